"""Losses: cross_entropy, mse_loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import TypeRuleError
from ...ir.dims import Size, known_nonnegative, product, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Sample
from ...ir.types import I64, DType, Type
from ...process.forks import cached_property
from ..elementwise.pointwise import eq, log, ne, where
from ..indexing.gathers import INDEX_DTYPES, gather, take_along_axis
from ..quantized.blocks import text_of
from ..reductions.reduce import _count, _shifted, amax, softmax, sum
from ..rules import alike, along, converted, floating, full, keeping, reshaped, spread, without, zeros_like

Reduction = Literal["none", "mean", "sum"]

# -- cross_entropy -----------------------------------------------------------------------------------------------------


def _class_axis(input: Any) -> int:
    return 0 if input.rank == 1 else 1


def _same_shape(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    return len(a) == len(b) and all(same(n, m) for n, m in zip(a, b, strict=True))


def _cross_entropy(
    input: Type,
    target: Type,
    weight: Type | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if floating(input).rank == 0:
        raise TypeRuleError("the input has no class axis: [C], [N,C] or [N,C,d1...]")
    axis = _class_axis(input)
    classes, positions = input.shape[axis], without(input.shape, (axis,))
    if classes == 0 and (target.dtype.is_float or known_nonnegative(product(positions) - 1)):
        raise TypeRuleError(
            "an input of 0 classes"
        )  # without positions no class is indexed; a symbolic number of positions is checked by the call
    if target.dtype.is_float:
        alike(input, target)
        if ignore_index >= 0:
            raise TypeRuleError(f"ignore_index={ignore_index} with a target of probabilities; it is for class indices")
    elif target.dtype.name not in INDEX_DTYPES:
        raise TypeRuleError(
            f"the target is {target.dtype}; class indices may be {' '.join(INDEX_DTYPES)}, probabilities {input.dtype}"
        )
    elif not _same_shape(target.shape, positions):
        raise TypeRuleError(
            f"class indices of shape {text_of(target.shape)} for {input}: {text_of(positions)} is needed"
        )
    if weight is not None and (weight.dtype is not input.dtype or not _same_shape(weight.shape, (classes,))):
        raise TypeRuleError(f"weight {weight} for {input}: {input.dtype}[{classes}] is needed")
    if not 0.0 <= label_smoothing <= 1.0:
        raise TypeRuleError(f"label_smoothing={label_smoothing} is not between 0 and 1")
    attrs = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return input.with_shape(*(positions if reduction == "none" else ())), attrs


@dataclass(frozen=True)
class _Entropy:
    """The intermediate values of one cross entropy in its compute dtype, shared by value and vjp.

    The loss of a position is -sum_c a_c log p_c, where a is the target distribution, smoothed and weighted.
    """

    input: Node
    target: Node
    weight: Node | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    @cached_property
    def axis(self) -> int:
        return _class_axis(self.input)

    @cached_property
    def dtype(self) -> DType:
        return self.input.dtype.compute

    @cached_property
    def wide(self) -> Node:
        return converted(self.input, self.dtype)

    @cached_property
    def positions(self) -> tuple[Size, ...]:
        return without(self.input.shape, (self.axis,))

    @cached_property
    def log_total(self) -> Node:
        """log sum exp(x - max) per position."""
        return log(_shifted(self.wide, self.axis)[1])

    @cached_property
    def log_p(self) -> Node:
        return _shifted(self.wide, self.axis)[0] - self.over_classes(self.log_total)

    @cached_property
    def probabilities(self) -> bool:
        return self.target.dtype.is_float

    @cached_property
    def class_weight(self) -> Node | None:
        """The weights [C] along the class axis of the input's shape."""
        if self.weight is None:
            return None
        line = keeping(self.input.shape, (a for a in range(self.input.rank) if a != self.axis))
        return spread(reshaped(converted(self.weight, self.dtype), line), self.input.shape)

    @cached_property
    def share(self) -> Node:
        """label_smoothing / C, the smoothing mass of each class; a scalar."""
        classes = _count(self.input, (self.axis,))
        return full(self.label_smoothing, classes) / classes

    def over_classes(self, x: Node) -> Node:
        return along(x, self.input.shape, (self.axis,))

    def weighted(self, x: Node, weight: Node | None) -> Node:
        return x if weight is None else x * weight

    # class indices

    @cached_property
    def kept(self) -> Node | None:
        """Mask of the positions whose target is not ignore_index; None if the target's dtype cannot hold that."""
        low, high = self.target.dtype.range
        return ne(self.target, full(self.ignore_index, self.target)) if low <= self.ignore_index <= high else None

    @cached_property
    def index(self) -> Node:
        """The target, with class 0 in place of ignore_index."""
        return self.target if self.kept is None else where(self.kept, self.target, zeros_like(self.target))

    @cached_property
    def hit(self) -> Node:
        """The one-hot encoding of the target, as a mask of the input's shape."""
        classes = call("iota", shape=self.input.shape, axis=self.axis, dtype=I64)
        return eq(classes, self.over_classes(converted(self.target, I64)))

    @cached_property
    def target_weight(self) -> Node | None:
        return None if self.weight is None else gather.plain(converted(self.weight, self.dtype), self.index, axis=0)

    def keep(self, x: Node) -> Node:
        """x, with 0 at ignored positions; x has the shape of the positions or of the input."""
        if self.kept is None:
            return x
        kept = self.kept if _same_shape(x.shape, self.positions) else self.over_classes(self.kept)
        return where(kept, x, zeros_like(x))

    # the loss

    @cached_property
    def smoothed(self) -> Node:
        """Probability targets after smoothing."""
        target = converted(self.target, self.dtype)
        return target * (1 - self.label_smoothing) + self.share if self.label_smoothing else target

    @cached_property
    def distribution(self) -> Node:
        """a, in the input's shape; for class indices defined only at positions that are not ignored."""
        if self.probabilities:
            target = self.smoothed
        else:
            target = where(self.hit, full(1 - self.label_smoothing, self.wide), zeros_like(self.wide))
            target = target + self.share if self.label_smoothing else target
        return self.weighted(target, self.class_weight)

    @cached_property
    def mass(self) -> Node | None:
        """sum_c a_c per position; None if it is 1."""
        if self.probabilities:
            return sum.plain(self.distribution, axis=(self.axis,))
        if self.target_weight is None or self.weight is None:
            return None
        if not self.label_smoothing:
            return self.target_weight
        total = sum.plain(converted(self.weight, self.dtype), axis=(0,))
        return self.target_weight * (1 - self.label_smoothing) + self.share * total

    @cached_property
    def each(self) -> Node:
        """The loss per position."""
        if self.probabilities:
            return -sum.plain(self.distribution * self.log_p, axis=(self.axis,))
        place = reshaped(self.index, keeping(self.input.shape, (self.axis,)))
        at_target = reshaped(take_along_axis.plain(self.wide, place, axis=self.axis), self.positions)
        top = amax.plain(self.wide, axis=(self.axis,), empty="infinite")
        loss = self.weighted(self.log_total - (at_target - top), self.target_weight)
        if self.label_smoothing:
            uniform = sum.plain(self.weighted(self.log_p, self.class_weight), axis=(self.axis,))
            loss = loss * (1 - self.label_smoothing) - uniform * self.share
        return self.keep(loss)

    @cached_property
    def norm(self) -> Node:
        """The divisor of a mean: the total weight of the positions that are not ignored.  With smoothing a total of 0
        is a NaN: the mean of the targets' part is 0 / 0, and what is smoothed over the classes does not save it.
        """
        if not self.probabilities and self.target_weight is not None:
            total = _all(self.keep(self.target_weight))
            return where(eq(total, zeros_like(total)), full(math.nan, total), total) if self.label_smoothing else total
        if not self.probabilities and self.kept is not None:
            return converted(_all(self.kept), self.dtype)
        return _count_of(self.positions, self.dtype)

    @cached_property
    def loss(self) -> Node:
        return _reduced(self.each, self.reduction, self.norm if self.reduction == "mean" else None)

    def cotangent(self, g: Node) -> Node:
        """The cotangent of each position's loss, given that of the result."""
        g = converted(g, self.dtype)
        if self.reduction != "mean":
            return spread(g, self.positions)
        return spread(g / self.nonzero_norm, self.positions)

    @cached_property
    def nonzero_norm(self) -> Node:
        """``norm``, or 1 where every position is ignored: the mean is NaN then, but its gradient 0, as in torch.
        Weights of 0 alone make a NaN of both.
        """
        if self.weight is None or self.probabilities:
            return _nonzero(self.norm)
        return self.norm if self.kept is None else _nonzero(self.norm, _all(self.kept))


def _count_of(shape: tuple[Size, ...], dtype: DType) -> Node:
    return converted(call("dim", size=product(shape)), dtype)


def _nonzero(norm: Node, count: Node | None = None) -> Node:
    """``norm`` with 1 for it where ``count``, or itself, is 0."""
    count = norm if count is None else count
    return where(eq(count, zeros_like(count)), full(1, norm), norm)


def _all(x: Node) -> Node:
    return sum.plain(x, axis=tuple(range(x.rank))) if x.rank else x


def _reduced(each: Node, reduction: str, norm: Node | None = None) -> Node:
    if reduction == "none":
        return each
    return _all(each) if norm is None else _all(each) / norm


def _cross_entropy_value(input: Node, target: Node, weight: Node | None = None, **attrs: Any) -> Node:
    return converted(_Entropy(input, target, weight, **attrs).loss, input.dtype)


def _cross_entropy_vjp(
    g: Node, y: Node, input: Node, target: Node, weight: Node | None = None, **attrs: Any
) -> tuple[Any, ...]:
    # d(-sum_c a_c log p_c)/dx = mass p - a, with mass = sum_c a_c
    e = _Entropy(input, target, weight, **attrs)
    each = e.over_classes(e.cotangent(g))
    p = softmax(e.wide, e.axis)
    slope = (p if e.mass is None else e.over_classes(e.mass) * p) - e.distribution
    keep = (lambda x: x) if e.probabilities else e.keep
    gradients: list[Any] = [converted(keep(each * slope), input.dtype)]
    if e.probabilities:
        part = e.weighted(e.log_p, e.class_weight) * (e.label_smoothing - 1)
        gradients.append(converted(each * part, target.dtype))
    else:
        gradients.append(DISCRETE)
    if weight is not None:
        gradients.append(_weight_gradient(e, each))
    return tuple(gradients)


def _weight_gradient(e: _Entropy, each: Node) -> Node:
    # dloss_i/dw_c = -t_ic log p_ic; a mean over class indices also divides by the weights: -loss for each target class
    others = tuple(a for a in range(e.input.rank) if a != e.axis)
    if e.probabilities:
        terms = -(each * e.smoothed * e.log_p)
    else:
        at_hit = e.log_p * (e.label_smoothing - 1)
        if e.reduction == "mean":
            at_hit = at_hit - spread(e.loss, e.input.shape)
        slope = where(e.hit, at_hit, zeros_like(at_hit))
        if e.label_smoothing:
            slope = slope - e.share * e.log_p
        terms = e.keep(each * slope)
    assert e.weight is not None
    return converted(sum.plain(terms, axis=others) if others else terms, e.weight.dtype)


_CLASS = ("normal", "index:5", "positive")
cross_entropy = Composite(
    "cross_entropy",
    infer=_cross_entropy,
    decompose=_cross_entropy_value,
    vjp=_cross_entropy_vjp,
    samples=(
        Sample(("F[N,5]", "i64[N]"), draw=_CLASS),
        Sample(("F[5]", "i64[]"), draw=_CLASS),
        Sample(("F[N,5]", "i32[N]", "F[5]"), {"reduction": "sum", "ignore_index": 2}, draw=_CLASS),
        Sample(
            ("F[2,5,N]", "i64[2,N]", "F[5]"), {"label_smoothing": 0.1, "ignore_index": 1}, draw=_CLASS, dims={"N": 6}
        ),
        Sample(("F[2,5,3,N]", "u8[2,3,N]"), {"reduction": "none"}, draw=_CLASS),
        Sample(("F[N,5]", "i8[N]"), {"reduction": "none", "label_smoothing": 0.3, "ignore_index": 0}, draw=_CLASS),
        Sample(("F[3,N]", "i64[3]"), {"label_smoothing": 0.2}, draw=("normal", "index:N"), dims={"N": 6}),
        Sample(("F[N,5]", "F[N,5]"), draw=("normal", "unit")),
        Sample(("F[5]", "F[5]", "F[5]"), {"reduction": "sum"}, draw=("normal", "unit", "positive")),
        Sample(
            ("F[2,5,N]", "F[2,5,N]", "F[5]"),
            {"label_smoothing": 0.1, "reduction": "none"},
            draw=("normal", "unit", "positive"),
        ),
        Sample(("F[2,5,N]", "F[2,5,N]"), {"label_smoothing": 0.4}, draw=("normal", "unit")),
    ),
    bad=(
        BadSample(("f32[]", "i64[]"), match="no class axis"),
        BadSample(("f32[4,5]", "i64[5]"), match="class indices of shape [5] for f32[4,5]: [4] is needed"),
        BadSample(("f32[4,5]", "f32[4]"), match="shapes differ"),
        BadSample(("f32[4,5]", "f64[4,5]"), match="dtypes differ"),
        BadSample(("f32[4,5]", "bool[4]"), match="the target is bool"),
        BadSample(("f32[4,5]", "i64[4]", "f32[4]"), match="weight f32[4] for f32[4,5]: f32[5]"),
        BadSample(("f32[4,5]", "i64[4]"), {"label_smoothing": 1.5}, match="label_smoothing=1.5"),
        BadSample(("f32[4,5]", "i64[4]"), {"reduction": "max"}, match="reduction='max'"),
        BadSample(("f32[4,5]", "f32[4,5]"), {"ignore_index": 1}, match="ignore_index=1 with a target of probabilities"),
        BadSample(("f32[4,0]", "i64[4]"), match="0 classes"),
        BadSample(("i32[4,5]", "i64[4]"), match="i32 is no float"),
    ),
    doc=(
        "-log softmax(input) at the target: class indices [N, d1...] or probabilities in the"
        " input's shape; the class axis is axis 1 (axis 0 for rank 1); positions whose target is ignore_index have no"
        " loss and no gradient and are not counted in a mean; a target outside the classes is an error"
    ),
    source="torch.nn.functional.cross_entropy; label smoothing: Szegedy et al. 2016",
)

# -- mse_loss ----------------------------------------------------------------------------------------------------------


def _mse_loss(input: Type, target: Type, *, reduction: Reduction = "mean") -> Type:
    both = floating(alike(input, target))
    return both if reduction == "none" else both.with_shape()


def _difference(input: Node, target: Node) -> Node:
    return converted(input, input.dtype.compute) - converted(target, input.dtype.compute)


def _mse_value(input: Node, target: Node, *, reduction: str) -> Node:
    difference = _difference(input, target)
    norm = _count_of(input.shape, difference.dtype) if reduction == "mean" else None
    return converted(_reduced(difference * difference, reduction, norm), input.dtype)


def _mse_vjp(g: Node, y: Node, input: Node, target: Node, *, reduction: str) -> tuple[Node, Node]:
    # dx = 2 g (x - target), divided by the count for a mean; dtarget = -dx; doubled last, so that no intermediate
    # value overflows unless dx does
    difference = _difference(input, target)
    g = converted(g, difference.dtype)
    g = spread(g / _nonzero(_count_of(input.shape, difference.dtype)) if reduction == "mean" else g, input.shape)
    dx = g * difference * 2
    return converted(dx, input.dtype), converted(-dx, input.dtype)


mse_loss = Composite(
    "mse_loss",
    infer=_mse_loss,
    decompose=_mse_value,
    vjp=_mse_vjp,
    broadcast=True,
    samples=(
        Sample(("F[N,4]", "F[N,4]")),
        Sample(("F[]", "F[]")),
        Sample(("F[N,4]", "F[4]"), {"reduction": "sum"}),
        Sample(("F[2,1,N]", "F[3,N]"), {"reduction": "none"}),
        Sample(("F[2,3,N,2]", "F[2,3,N,2]")),
    ),
    bad=(
        BadSample(("f32[3]", "f32[4]"), match="do not broadcast: 3 and 4"),
        BadSample(("f32[3]", "f64[3]"), match="dtypes differ"),
        BadSample(("i32[3]", "i32[3]"), match="i32 is no float"),
        BadSample(("f32[3]", "f32[3]"), {"reduction": "max"}, match="reduction='max'"),
    ),
    doc="(input - target)^2 per element, or its mean or sum (reduction)",
    source="torch.nn.functional.mse_loss",
)
