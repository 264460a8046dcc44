"""Losses between an input and a target, one term an element: their sum, their mean, or each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

from ...errors import TypeRuleError
from ...ir.node import Node
from ...ir.op import DISCRETE, BadSample, Composite, Sample
from ...ir.operands import broadcast_shapes
from ...ir.types import Type
from ..elementwise.pointwise import (
    abs,
    bitwise_and,
    eq,
    exp,
    gt,
    le,
    log,
    log1p,
    lt,
    maximum,
    minimum,
    ne,
    pow,
    sigmoid,
    sign,
    where,
)
from ..elementwise.special import xlogy
from ..reductions.norms import pairwise_distance
from ..reductions.reduce import _count, sum
from ..rules import alike, converted, floating, full, spread, widened, written, zeros_like
from .cross_entropy import Reduction, _count_of, _nonzero, _reduced

Terms = Callable[..., Node]
Slopes = Callable[..., tuple[Any, ...]]


def _mean_of(each: Node, reduction: str) -> Node:
    return _reduced(each, reduction, _count_of(each.shape, each.dtype) if reduction == "mean" else None)


def _value(terms: Terms) -> Callable[..., Node]:
    """The decomposition of a loss from its terms in the compute dtype."""

    def decompose(*operands: Node, reduction: str, **attrs: Any) -> Node:
        return widened(lambda *wide: _mean_of(terms(*wide, **attrs), reduction))(*operands)

    return decompose


def _vjp(slopes: Slopes) -> Callable[..., tuple[Any, ...]]:
    """The vjp of a loss from the derivatives of its terms; the cotangent is multiplied last."""

    def vjp(g: Node, y: Node, *operands: Node, reduction: str, **attrs: Any) -> tuple[Any, ...]:
        dtype, shape = operands[0].dtype.compute, operands[0].shape
        wide = [converted(o, dtype) if o.dtype.is_float else o for o in operands]
        g = converted(g, dtype)
        g = spread(g / _nonzero(_count_of(shape, dtype)) if reduction == "mean" else g, shape)
        found = slopes(*wide, **attrs)
        return tuple(s if s is DISCRETE else converted(g * s, o.dtype) for s, o in zip(found, operands, strict=True))

    return written(vjp, getattr(slopes, "written", slopes))


def _type(*operands: Type, reduction: str) -> Type:
    both = floating(alike(*operands))
    return both if reduction == "none" else both.with_shape()


def _two(input: Type, target: Type, *, reduction: Reduction = "mean") -> Type:
    return _type(input, target, reduction=reduction)


def _samples(*attrs: dict[str, Any], draw: tuple[str, ...] = (), count: int = 2) -> tuple[Sample, ...]:
    """Without attributes, and each set of them under another reduction."""
    cases = ({}, *attrs, {}, {})[: max(3, 1 + len(attrs))]
    ways = zip(cases, itertools.cycle(("mean", "sum", "none")), itertools.cycle(("N,4", "2,N,3", "N")), strict=False)
    return tuple(
        Sample((f"F[{shape}]",) * count, given if how == "mean" else {**given, "reduction": how}, draw=draw)
        for given, how, shape in ways
    )


_BAD = (
    BadSample(("f32[3]", "f32[4]"), match="do not broadcast: 3 and 4"),
    BadSample(("f32[3]", "f64[3]"), match="dtypes differ"),
    BadSample(("i32[3]", "i32[3]"), match="i32 is no float"),
    BadSample(("f32[3]", "f32[3]"), {"reduction": "max"}, match="reduction='max'"),
)


def _opposite(slope: Callable[..., Node]) -> Slopes:
    """The derivatives of a function of input - target."""

    def slopes(input: Node, target: Node, **attrs: Any) -> tuple[Node, Node]:
        found = slope(input - target, **attrs)
        return found, -found

    return written(slopes, slope)


# -- of the difference -------------------------------------------------------------------------------------------------

l1_loss = Composite(
    "l1_loss",
    infer=_two,
    decompose=_value(lambda x, t: abs(x - t)),
    vjp=_vjp(_opposite(lambda d: sign(d))),
    broadcast=True,
    samples=_samples(),
    bad=_BAD,
    doc="|input - target|, its mean, or its sum",
    source="torch.nn.functional.l1_loss",
)


def _smooth_l1(input: Type, target: Type, *, reduction: Reduction = "mean", beta: float = 1.0) -> Type:
    if beta < 0:
        raise TypeRuleError(f"beta={beta} is below 0")
    return _type(input, target, reduction=reduction)


def _smooth_l1_terms(x: Node, t: Node, *, beta: float) -> Node:
    size = abs(x - t)
    if beta == 0:
        return size
    return where(lt(size, full(beta, size)), size * size * (0.5 / beta), size - 0.5 * beta)


def _smooth_l1_slope(d: Node, *, beta: float) -> Node:
    """d / beta for |d| < beta, else sign(d); minus that for the target."""
    return sign(d) if beta == 0 else where(lt(abs(d), full(beta, d)), d / beta, sign(d))


smooth_l1_loss = Composite(
    "smooth_l1_loss",
    infer=_smooth_l1,
    decompose=_value(_smooth_l1_terms),
    vjp=_vjp(_opposite(_smooth_l1_slope)),
    broadcast=True,
    samples=_samples({"beta": 0.5}, {"beta": 0.0}),
    bad=(*_BAD, BadSample(("f32[3]", "f32[3]"), {"beta": -1.0}, match="beta=-1.0")),
    doc="d^2 / (2 beta) for |d| < beta, else |d| - beta/2, with d = input - target",
    source="torch.nn.functional.smooth_l1_loss",
)


def _huber(input: Type, target: Type, *, reduction: Reduction = "mean", delta: float = 1.0) -> Type:
    if not delta > 0:
        raise TypeRuleError(f"delta={delta} is not above 0")
    return _type(input, target, reduction=reduction)


def _huber_terms(x: Node, t: Node, *, delta: float) -> Node:
    size = abs(x - t)
    return where(le(size, full(delta, size)), size * size * 0.5, (size - 0.5 * delta) * delta)


huber_loss = Composite(
    "huber_loss",
    infer=_huber,
    decompose=_value(_huber_terms),
    vjp=_vjp(_opposite(lambda d, *, delta: where(le(abs(d), full(delta, d)), d, sign(d) * delta))),
    broadcast=True,
    samples=_samples({"delta": 0.5}),
    bad=(*_BAD, BadSample(("f32[3]", "f32[3]"), {"delta": 0.0}, match="delta=0.0")),
    doc="d^2 / 2 for |d| <= delta, else delta (|d| - delta/2), with d = input - target",
    source="Huber 1964; torch.nn.functional.huber_loss",
)

# -- of probabilities --------------------------------------------------------------------------------------------------

KlReduction = Literal["none", "mean", "sum", "batchmean"]


def _kl_div(input: Type, target: Type, *, reduction: KlReduction = "mean", log_target: bool = False) -> Type:
    if reduction == "batchmean" and input.rank == 0:
        raise TypeRuleError("reduction='batchmean' of an input without a batch axis")
    return _type(input, target, reduction=reduction)


def _kl_value(input: Node, target: Node, *, reduction: str, log_target: bool) -> Node:
    def loss(x: Node, t: Node) -> Node:
        each = exp(t) * (t - x) if log_target else xlogy(t, t) - t * x
        if reduction == "batchmean":
            return _mean_of(each, "sum") / _count(each, (0,))
        return _mean_of(each, reduction)

    return widened(loss)(input, target)


kl_div = Composite(
    "kl_div",
    infer=_kl_div,
    decompose=_kl_value,
    broadcast=True,
    samples=(
        *_samples({"log_target": True}, draw=("normal", "unit")),
        Sample(("F[N,4]", "F[N,4]"), {"reduction": "batchmean"}, draw=("normal", "unit")),
    ),
    bad=(*_BAD, BadSample(("f32[]", "f32[]"), {"reduction": "batchmean"}, match="without a batch axis")),
    doc=(
        "target (log(target) - input), the input being logarithms of probabilities; log_target: the target's, too."
        " batchmean divides the sum by the first size"
    ),
    source="torch.nn.functional.kl_div",
)


def _bce(input: Type, target: Type, weight: Type | None = None, *, reduction: Reduction = "mean") -> Type:
    return _type(*(t for t in (input, target, weight) if t is not None), reduction=reduction)


def _weighted(terms: Node, weight: Node | None) -> Node:
    return terms if weight is None else terms * weight


def _least_log(x: Node) -> Node:
    return maximum(x, full(-100, x))


def _bce_terms(x: Node, t: Node, weight: Node | None = None) -> Node:
    each = (t - 1) * _least_log(log1p(-x)) - t * _least_log(log(x))
    return _weighted(each, weight)


def _bce_slopes(x: Node, t: Node, weight: Node | None = None) -> tuple[Node, ...]:
    # d/dx = (x - t) / (x (1 - x)), of which torch holds the denominator above 1e-12
    below = (1 - x) * x
    least = full(1e-12, below)
    dx = (x - t) / where(lt(below, least), least, below)
    dt = log1p(-x) - log(x)
    if weight is None:
        return dx, dt
    return dx * weight, dt * weight, _bce_terms(x, t)


binary_cross_entropy = Composite(
    "binary_cross_entropy",
    infer=_bce,
    decompose=_value(_bce_terms),
    vjp=_vjp(_bce_slopes),
    broadcast=True,
    samples=(
        *_samples(draw=("unit", "unit")),
        Sample(("F[N,4]", "F[N,4]", "F[4]"), draw=("unit", "unit", "positive")),
    ),
    bad=_BAD,
    doc=(
        "-(target log(input) + (1 - target) log(1 - input)) of probabilities, times weight; the logarithms are held"
        " above -100"
    ),
    source="torch.nn.functional.binary_cross_entropy",
)


def _bce_logits(
    input: Type,
    target: Type,
    weight: Type | None = None,
    pos_weight: Type | None = None,
    *,
    reduction: Reduction = "mean",
) -> Type:
    return _type(*(t for t in (input, target, weight, pos_weight) if t is not None), reduction=reduction)


def _soft(x: Node) -> Node:
    """log(1 + e^x)"""
    return maximum(x, zeros_like(x)) + log1p(exp(-abs(x)))


def _bce_logits_terms(x: Node, t: Node, weight: Node | None = None, pos: Node | None = None) -> Node:
    if pos is None:
        # not maximum(x, 0) - t * x, which is NaN at x = inf
        each = where(gt(x, zeros_like(x)), 1 - t, -t) * x + log1p(exp(-abs(x)))
    else:
        each = (1 - t) * x + ((pos - 1) * t + 1) * _soft(-x)
    return _weighted(each, weight)


def _bce_logits_slopes(x: Node, t: Node, weight: Node | None = None, pos: Node | None = None) -> tuple[Node, ...]:
    # d/dx = sigmoid(x) (1 - t + pos t) - pos t; d/dt = softplus(x) - pos softplus(-x)... = -x where pos is 1
    if pos is None:
        dx, dt = sigmoid(x) - t, -x
    else:
        dx = sigmoid(x) * ((pos - 1) * t + 1) - pos * t
        dt = (pos - 1) * _soft(-x) - x
    found = [_weighted(dx, weight), _weighted(dt, weight)]
    if weight is not None:
        found.append(_bce_logits_terms(x, t, None, pos))
    if pos is not None:
        found.append(_weighted(t * _soft(-x), weight))
    return tuple(found)


binary_cross_entropy_with_logits = Composite(
    "binary_cross_entropy_with_logits",
    infer=_bce_logits,
    decompose=_value(_bce_logits_terms),
    vjp=_vjp(_bce_logits_slopes),
    broadcast=True,
    order=("input", "target", "weight", "reduction", "pos_weight"),
    omitted={"weight": lambda input, **_: full(1, input.with_shape())},
    samples=(
        *_samples(draw=("normal", "unit")),
        Sample(("F[N,4]", "F[N,4]", "F[4]"), draw=("normal", "unit", "positive")),
        Sample(("F[N,4]", "F[N,4]", "F[]", "F[4]"), draw=("normal", "unit", "positive", "positive")),
    ),
    bad=_BAD,
    doc=(
        "binary_cross_entropy of sigmoid(input) without overflow, times weight; pos_weight multiplies the part of the"
        " target"
    ),
    source="torch.nn.functional.binary_cross_entropy_with_logits",
)

# -- margins -----------------------------------------------------------------------------------------------------------


def _hinge(input: Type, target: Type, *, margin: float = 1.0, reduction: Reduction = "mean") -> Type:
    alike(floating(input), target.with_dtype(input.dtype))
    return input if reduction == "none" else input.with_shape()


def _is(target: Node, value: int) -> Node:
    return eq(target, full(value, target))


def _beyond(x: Node) -> Node:
    """x, 0 below it; the gradient at 0 is that of x, as of torch's clamp."""
    return where(lt(x, zeros_like(x)), zeros_like(x), x)


def _hinge_terms(x: Node, t: Node, *, margin: float) -> Node:
    zero = zeros_like(x)
    return where(_is(t, 1), zero, _beyond(margin - x)) + where(_is(t, -1), zero, x)


def _hinge_slopes(x: Node, t: Node, *, margin: float) -> tuple[Any, Any]:
    """-1 within the margin where the target is not 1, and 1 where it is not -1."""
    zero, one = zeros_like(x), full(1, x)
    away = where(bitwise_and(ne(t, full(1, t)), le(x, full(margin, x))), -one, zero)
    return away + where(_is(t, -1), zero, one), DISCRETE


hinge_embedding_loss = Composite(
    "hinge_embedding_loss",
    infer=_hinge,
    decompose=_value(_hinge_terms),
    vjp=_vjp(_hinge_slopes),
    broadcast=True,
    samples=(
        Sample(("F[N,4]", "i32[N,4]"), draw=("normal", "index:2")),
        Sample(("F[N]", "i64[N]"), {"margin": 0.5, "reduction": "sum"}, draw=("normal", "index:2")),
        Sample(("F[2,3]", "i8[3]"), {"reduction": "none"}, draw=("normal", "index:2")),
    ),
    bad=(_BAD[0], BadSample(("i32[3]", "i32[3]"), match="no float")),
    doc="input where the target is 1, max(0, margin - input) where it is -1; an integer or float target",
    source="torch.nn.functional.hinge_embedding_loss",
)


def _ranking(input1: Type, input2: Type, target: Type, *, margin: float = 0.0, reduction: Reduction = "mean") -> Type:
    return _type(input1, input2, target, reduction=reduction)


margin_ranking_loss = Composite(
    "margin_ranking_loss",
    infer=_ranking,
    decompose=_value(lambda a, b, t, *, margin: _beyond((b - a) * t + margin)),
    broadcast=True,
    samples=_samples({"margin": 0.5}, count=3),
    bad=tuple(BadSample((*b.operands, b.operands[1]), b.attrs, match=b.match) for b in _BAD),
    doc="max(0, -target (input1 - input2) + margin)",
    source="torch.nn.functional.margin_ranking_loss",
)
soft_margin_loss = Composite(
    "soft_margin_loss",
    infer=_two,
    decompose=_value(lambda x, t: _soft(-(x * t))),
    vjp=_vjp(lambda x, t: (-(t * sigmoid(-(x * t))), -(x * sigmoid(-(x * t))))),
    broadcast=True,
    samples=_samples(),
    bad=_BAD,
    doc="log(1 + e^(-target input)) without overflow",
    source="torch.nn.functional.soft_margin_loss",
)


def _multilabel(input: Type, target: Type, weight: Type | None = None, *, reduction: Reduction = "mean") -> Type:
    each = floating(alike(*(t for t in (input, target, weight) if t is not None)))
    if each.rank == 0:
        raise TypeRuleError("the input has no class axis")
    return each.with_shape(*(each.shape[:-1] if reduction == "none" else ()))


def _multilabel_value(input: Node, target: Node, weight: Node | None = None, *, reduction: str) -> Node:
    def loss(x: Node, t: Node, w: Node | None = None) -> Node:
        each = _weighted(_soft(-x) * t + _soft(x) * (1 - t), w)
        return _mean_of(sum.plain(each, axis=(each.rank - 1,)) / _count(each, (each.rank - 1,)), reduction)

    return widened(loss)(*(o for o in (input, target, weight) if o is not None))


multilabel_soft_margin_loss = Composite(
    "multilabel_soft_margin_loss",
    infer=_multilabel,
    decompose=_multilabel_value,
    broadcast=True,
    samples=(
        Sample(("F[N,4]", "F[N,4]"), draw=("normal", "unit")),
        Sample(("F[N,4]", "F[N,4]", "F[4]"), {"reduction": "sum"}, draw=("normal", "unit", "positive")),
        Sample(("F[2,N,3]", "F[2,N,3]"), {"reduction": "none"}, draw=("normal", "unit")),
    ),
    bad=(*_BAD[:2], BadSample(("f32[]", "f32[]"), match="no class axis")),
    doc="the mean over classes (the last axis) of binary_cross_entropy_with_logits, times weight",
    source="torch.nn.functional.multilabel_soft_margin_loss",
)

# -- of distances ------------------------------------------------------------------------------------------------------


def _cosine_embedding(
    input1: Type, input2: Type, target: Type, *, margin: float = 0.0, reduction: Reduction = "mean"
) -> Type:
    rows = floating(alike(input1, input2))
    if rows.rank not in (1, 2):
        raise TypeRuleError(f"inputs [D] or [N, D] are needed, not {rows}")
    each = rows.with_shape(*rows.shape[:-1])
    alike(each, target.with_dtype(rows.dtype))
    return each if reduction == "none" else each.with_shape()


def _cosine_embedding_terms(a: Node, b: Node, t: Node, *, margin: float) -> Node:
    last, tiny = (a.rank - 1,), 1e-12
    lengths = (sum.plain(a * a, axis=last) + tiny) * (sum.plain(b * b, axis=last) + tiny)
    cosine = sum.plain(a * b, axis=last) / pow(lengths, 0.5)
    zero = zeros_like(cosine)
    return where(_is(t, 1), 1 - cosine, zero) + where(_is(t, -1), _beyond(cosine - margin), zero)


_ROWS = ("normal", "normal", "index:2")
cosine_embedding_loss = Composite(
    "cosine_embedding_loss",
    infer=_cosine_embedding,
    decompose=_value(_cosine_embedding_terms),
    samples=(
        Sample(("F[N,4]", "F[N,4]", "i64[N]"), draw=_ROWS),
        Sample(("F[N,4]", "F[N,4]", "i32[N]"), {"margin": 0.25, "reduction": "sum"}, draw=_ROWS),
        Sample(("F[4]", "F[4]", "i32[]"), {"reduction": "none"}, draw=_ROWS),
    ),
    bad=(
        BadSample(("f32[2,3,4]", "f32[2,3,4]", "i32[2]"), match="[D] or [N, D]"),
        BadSample(("f32[3,4]", "f32[3,5]", "i32[3]"), match="shapes differ"),
        BadSample(("f32[3,4]", "f32[3,4]", "i32[4]"), match="shapes differ"),
    ),
    doc="1 - cosine where the target is 1, max(0, cosine - margin) where it is -1, for each row",
    source="torch.nn.functional.cosine_embedding_loss",
)


def _triplet(
    anchor: Type,
    positive: Type,
    negative: Type,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: Reduction = "mean",
) -> Type:
    for other in (positive, negative):
        if other.dtype is not anchor.dtype:
            alike(anchor, other)
    shape = broadcast_shapes([anchor.shape, positive.shape, negative.shape])
    if not shape:
        raise TypeRuleError("inputs without an axis of features")
    return floating(anchor).with_shape(*(shape[:-1] if reduction == "none" else ()))


def _triplet_terms(
    anchor: Node, positive: Node, negative: Node, *, margin: float, p: float, eps: float, swap: bool
) -> Node:
    near = pairwise_distance(anchor, positive, p=p, eps=eps)
    far = pairwise_distance(anchor, negative, p=p, eps=eps)
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p=p, eps=eps))
    return _beyond(near - far + margin)


triplet_margin_loss = Composite(
    "triplet_margin_loss",
    infer=_triplet,
    decompose=_value(_triplet_terms),
    samples=(
        Sample(("F[N,4]",) * 3),
        Sample(("F[N,4]",) * 3, {"p": 1.0, "margin": 0.5, "reduction": "sum"}),
        Sample(("F[2,4]",) * 3, {"swap": True, "reduction": "none"}),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,5]", "f32[3,4]"), match="do not broadcast"),
        BadSample(("f32[3,4]", "f64[3,4]", "f32[3,4]"), match="dtypes differ"),
    ),
    doc=(
        "max(0, margin + distance(anchor, positive) - distance(anchor, negative)) over the last axis; swap takes the"
        " negative's distance from the positive where it is less"
    ),
    source="Balntas et al. 2016; torch.nn.functional.triplet_margin_loss",
)

# -- of distributions --------------------------------------------------------------------------------------------------


def _poisson(
    input: Type,
    target: Type,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: Reduction = "mean",
) -> Type:
    return _type(input, target, reduction=reduction)


def _poisson_terms(x: Node, t: Node, *, log_input: bool, full: bool, eps: float) -> Node:
    each = exp(x) - t * x if log_input else x - t * log(x + eps)
    if not full:
        return each
    large = gt(t, zeros_like(t) + 1)
    safe = where(large, t, zeros_like(t) + 2)
    stirling = safe * log(safe) - safe + log(safe * (2 * math.pi)) * 0.5
    return each + where(large, stirling, zeros_like(t))


poisson_nll_loss = Composite(
    "poisson_nll_loss",
    infer=_poisson,
    decompose=_value(_poisson_terms),
    broadcast=True,
    samples=_samples({"full": True}, {"log_input": False}, draw=("positive", "positive")),
    bad=_BAD,
    doc=(
        "exp(input) - target input, or input - target log(input + eps) without log_input; full adds Stirling's"
        " approximation of log(target!) above 1"
    ),
    source="torch.nn.functional.poisson_nll_loss",
)


def _gaussian(
    input: Type,
    target: Type,
    var: Type,
    *,
    full: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "mean",
) -> Type:
    return _type(input, target, var, reduction=reduction)


def _gaussian_terms(x: Node, t: Node, var: Node, *, full: bool, eps: float) -> Node:
    held = _held(var, eps)
    each = (log(held) + (x - t) * (x - t) / held) * 0.5
    return each + 0.5 * math.log(2 * math.pi) if full else each


def _held(var: Node, eps: float) -> Node:
    least = zeros_like(var) + eps
    return where(lt(var, least), least, var)


def _gaussian_slopes(x: Node, t: Node, var: Node, *, full: bool, eps: float) -> tuple[Node, Node, Node]:
    # the variance is held for the value, and passes its gradient on all the same
    held = _held(var, eps)
    ratio = (x - t) / held
    return ratio, -ratio, (1 / held - ratio * ratio) * 0.5


def _gaussian_call(
    input: Node,
    target: Node,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Node:
    """One variance may stand for a row: without the last axis."""
    if isinstance(var, Node) and 0 < var.rank == input.rank - 1 and not _fits(var, input):
        var = var[..., None]
    return gaussian_nll_loss.plain(input, target, var, full=full, eps=eps, reduction=reduction)


def _fits(var: Node, input: Node) -> bool:
    try:
        return broadcast_shapes([var.shape, input.shape]) == input.shape
    except TypeRuleError:
        return False


gaussian_nll_loss = Composite(
    "gaussian_nll_loss",
    infer=_gaussian,
    decompose=_value(_gaussian_terms),
    vjp=_vjp(_gaussian_slopes),
    sugar=_gaussian_call,
    broadcast=True,
    samples=(
        *_samples({"full": True}, {"eps": 0.5}, draw=("normal", "normal", "positive"), count=3),
        Sample(("F[N,4]", "F[N,4]", "F[N]"), draw=("normal", "normal", "positive")),
    ),
    bad=(
        BadSample(("f32[3]", "f32[4]", "f32[3]"), match="do not broadcast: 3 and 4"),
        BadSample(("f32[3]", "f64[3]", "f32[3]"), match="dtypes differ"),
    ),
    doc="(log(var) + (input - target)^2 / var) / 2, var held above eps; full adds log(2 pi) / 2",
    source="torch.nn.functional.gaussian_nll_loss",
)
