"""Losses of class indices besides cross_entropy: nll_loss, multi_margin_loss, multilabel_margin_loss."""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Sample
from ...ir.types import I64, Type
from ..elementwise.pointwise import bitwise_and, eq, gt, invert, lt, where
from ..indexing.gathers import INDEX_DTYPES, gather, take_along_axis
from ..reductions.reduce import _count, sum
from ..rules import converted, floating, full, keeping, reshaped, spread, widened, zeros_like
from .cross_entropy import Reduction, _class_axis, _cross_entropy, _Entropy, _reduced, _same_shape
from .elementwise import _mean_of

# -- nll_loss ----------------------------------------------------------------------------------------------------------


def _nll(
    input: Type,
    target: Type,
    weight: Type | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Any:
    if target.dtype.is_float:
        raise TypeRuleError(f"the target is {target.dtype}; class indices may be {' '.join(INDEX_DTYPES)}")
    type_, _ = _cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    return type_, {"ignore_index": ignore_index, "reduction": reduction}


def _terms(e: _Entropy) -> Node:
    """-w x at the target per position, 0 where it is ignored."""
    place = reshaped(e.index, keeping(e.input.shape, (e.axis,)))
    at_target = reshaped(take_along_axis.plain(e.wide, place, axis=e.axis), e.positions)
    return e.keep(e.weighted(-at_target, e.target_weight))


def _nll_value(input: Node, target: Node, weight: Node | None = None, **attrs: Any) -> Node:
    e = _Entropy(input, target, weight, **attrs, label_smoothing=0.0)
    return converted(_reduced(_terms(e), e.reduction, e.norm if e.reduction == "mean" else None), input.dtype)


def _nll_vjp(g: Node, y: Node, input: Node, target: Node, weight: Node | None = None, **attrs: Any) -> tuple[Any, ...]:
    # dx = -g w at the target, 0 elsewhere; dw_c = -g x at the targets that are c, less the loss in a mean's norm
    e = _Entropy(input, target, weight, **attrs, label_smoothing=0.0)
    each = e.over_classes(e.cotangent(g))
    slope = -each if e.class_weight is None else -(each * e.class_weight)
    gradients: list[Any] = [converted(e.keep(where(e.hit, slope, zeros_like(slope))), input.dtype), DISCRETE]
    if weight is not None:
        at_hit = -e.wide
        if e.reduction == "mean":
            at_hit = at_hit - spread(_reduced(_terms(e), "mean", e.norm), e.input.shape)
        terms = e.keep(where(e.hit, each * at_hit, zeros_like(at_hit)))
        others = tuple(a for a in range(input.rank) if a != e.axis)
        gradients.append(converted(sum.plain(terms, axis=others) if others else terms, weight.dtype))
    return tuple(gradients)


_CLASS = ("normal", "index:5", "positive")
nll_loss = Composite(
    "nll_loss",
    infer=_nll,
    decompose=_nll_value,
    vjp=_nll_vjp,
    samples=(
        Sample(("F[N,5]", "i64[N]"), draw=_CLASS),
        Sample(("F[5]", "i64[]"), draw=_CLASS),
        Sample(("F[N,5]", "i32[N]", "F[5]"), {"ignore_index": 2}, draw=_CLASS),
        Sample(("F[2,5,N]", "u8[2,N]", "F[5]"), {"reduction": "sum"}, draw=_CLASS, dims={"N": 6}),
        Sample(("F[2,5,3,N]", "i64[2,3,N]"), {"reduction": "none", "ignore_index": 1}, draw=_CLASS),
    ),
    bad=(
        BadSample(("f32[4,5]", "i64[5]"), match="class indices of shape [5] for f32[4,5]: [4] is needed"),
        BadSample(("f32[4,5]", "f32[4,5]"), match="the target is f32; class indices"),
        BadSample(("f32[4,5]", "i64[4]", "f32[4]"), match="weight f32[4] for f32[4,5]: f32[5]"),
        BadSample(("f32[4,5]", "i64[4]"), {"reduction": "max"}, match="reduction='max'"),
        BadSample(("i32[4,5]", "i64[4]"), match="i32 is no float"),
    ),
    doc=(
        "-weight[target] input[target] of logarithms of probabilities: what cross_entropy does after log_softmax;"
        " a mean divides by the weights of the positions that count"
    ),
    source="torch.nn.functional.nll_loss",
)

# -- multi_margin_loss -------------------------------------------------------------------------------------------------


def _violation(x: Node) -> Node:
    """x above 0, else 0; torch takes a NaN for none."""
    return where(gt(x, zeros_like(x)), x, zeros_like(x))


def _multi_margin(
    input: Type,
    target: Type,
    weight: Type | None = None,
    *,
    p: int = 1,
    margin: float = 1.0,
    reduction: Reduction = "mean",
) -> Any:
    if p not in (1, 2):
        raise TypeRuleError(f"p={p} is neither 1 nor 2")
    if floating(input).rank not in (1, 2):
        raise TypeRuleError(f"inputs [C] or [N, C] are needed, not {input}")
    type_, _ = _nll(input, target, weight, reduction=reduction)
    return type_, {"p": p, "margin": margin, "reduction": reduction}


def _multi_margin_value(
    input: Node, target: Node, weight: Node | None = None, *, p: int, margin: float, reduction: str
) -> Node:
    axis = _class_axis(input)
    wide = converted(input, input.dtype.compute)
    place = reshaped(target, keeping(input.shape, (axis,)))
    at_target = take_along_axis.plain(wide, place, axis=axis)
    over = _violation(wide - spread(at_target, wide.shape) + margin)
    each = over * over if p == 2 else over
    if weight is not None:
        own = gather.plain(converted(weight, wide.dtype), target, axis=0)
        each = each * spread(reshaped(own, keeping(input.shape, (axis,))), each.shape)
    classes = call("iota", shape=input.shape, axis=axis, dtype=I64)
    hit = eq(classes, spread(converted(place, I64), input.shape))
    each = where(hit, zeros_like(each), each)
    rows = sum.plain(each, axis=(axis,)) / _count(each, (axis,))
    return converted(_mean_of(rows, reduction), input.dtype)


multi_margin_loss = Composite(
    "multi_margin_loss",
    infer=_multi_margin,
    decompose=_multi_margin_value,
    order=("input", "target", "p", "margin", "weight", "reduction"),
    samples=(
        Sample(("F[N,5]", "i64[N]"), draw=_CLASS),
        Sample(("F[N,5]", "i32[N]", "F[5]"), {"p": 2, "margin": 0.5, "reduction": "sum"}, draw=_CLASS),
        Sample(("F[5]", "i64[]"), {"reduction": "none"}, draw=_CLASS),
    ),
    bad=(
        BadSample(("f32[4,5]", "i64[4]"), {"p": 3}, match="p=3 is neither 1 nor 2"),
        BadSample(("f32[4,5,2]", "i64[4,2]"), match="[C] or [N, C]"),
        BadSample(("f32[4,5]", "i64[5]"), match="class indices of shape [5]"),
    ),
    doc="the mean over the other classes of max(0, margin - input[target] + input)^p, times weight[target]",
    source="torch.nn.functional.multi_margin_loss",
)

# -- multilabel_margin_loss --------------------------------------------------------------------------------------------


def _multilabel_margin(input: Type, target: Type, *, reduction: Reduction = "mean") -> Type:
    if floating(input).rank not in (1, 2):
        raise TypeRuleError(f"inputs [C] or [N, C] are needed, not {input}")
    if target.dtype.name not in INDEX_DTYPES or not _same_shape(input.shape, target.shape):
        raise TypeRuleError(f"class indices of the shape of {input} are needed, ended by -1, not {target}")
    return input.with_shape(*(input.shape[:-1] if reduction == "none" else ()))


def _multilabel_margin_value(input: Node, target: Node, *, reduction: str) -> Node:
    last = input.rank - 1
    size = input.shape[last]
    pairs = (*input.shape, size)  # [..., a place in the list of targets, a class]
    target = converted(target, I64)
    ended = eq(target, full(-1, target))
    names = where(ended, zeros_like(target), target)
    names = call("check_index", names, bound=size, op="multilabel_margin_loss")
    listed = spread(reshaped(names, (*input.shape, 1)), pairs)
    place, other = (call("iota", shape=pairs, axis=axis, dtype=I64) for axis in (last, last + 1))
    before = bitwise_and(spread(reshaped(ended, (*input.shape[:-1], 1, size)), pairs), lt(other, place))
    open_ = eq(sum.plain(before, axis=(last + 1,)), full(0, input, I64))
    counts = bitwise_and(open_, invert(ended))
    hit = bitwise_and(eq(listed, other), spread(reshaped(counts, (*input.shape, 1)), pairs))
    named = sum.plain(hit, axis=(last,))

    def loss(x: Node) -> Node:
        line = spread(reshaped(x, (*input.shape[:-1], 1, size)), pairs)
        own = sum.plain(where(hit, line, zeros_like(line)), axis=(last + 1,))
        over = _violation(line - spread(reshaped(own, (*input.shape, 1)), pairs) + 1)
        takes_part = bitwise_and(
            spread(reshaped(counts, (*input.shape, 1)), pairs),
            spread(reshaped(eq(named, full(0, input, I64)), (*input.shape[:-1], 1, size)), pairs),
        )
        each = where(takes_part, over, zeros_like(over))
        return _mean_of(sum.plain(each, axis=(last, last + 1)) / _count(each, (last + 1,)), reduction)

    return widened(loss)(input)


multilabel_margin_loss = Composite(
    "multilabel_margin_loss",
    infer=_multilabel_margin,
    decompose=_multilabel_margin_value,
    samples=(
        Sample(("F[N,5]", "i64[N,5]"), draw=("normal", "index:5")),
        Sample(("F[5]", "i64[5]"), {"reduction": "none"}, draw=("normal", "index:5")),
    ),
    bad=(
        BadSample(("f32[4,5]", "i64[4]"), match="class indices of the shape"),
        BadSample(("f32[4,5]", "f32[4,5]"), match="class indices of the shape"),
    ),
    doc=(
        "the sum over named and unnamed classes of max(0, 1 - input[named] + input[unnamed]) / C; -1 ends the names;"
        " no class but one of 0..C-1 is named"
    ),
    source="torch.nn.functional.multilabel_margin_loss",
)
