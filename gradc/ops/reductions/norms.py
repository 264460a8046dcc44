"""Norms over axes, and what divides by them or takes them of differences."""

from __future__ import annotations

import math
from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import same
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Sample
from ...ir.operands import broadcast_shapes
from ...ir.types import Type
from ..elementwise.pointwise import abs, eq, ge, ne, pow, sign, sqrt, where
from ..rules import alike, along, canonical_axis, converted, floating, full, reshaped, spread, without, zeros_like
from .reduce import BAD_AXIS, _float_reduction, _plain, amax, amin, sum

# -- norm --------------------------------------------------------------------------------------------------------------


def _norm(x: Type, *, p: float = 2.0, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    type_, attrs = _float_reduction(x, axis=axis, keepdims=keepdims)
    if math.isnan(p):
        raise TypeRuleError("p=nan is no order of a norm")
    if math.isinf(p) and any(x.shape[a] == 0 for a in attrs["axis"]):
        raise TypeRuleError(f"the norm of order {p} over no elements")
    return type_, {"p": p, **attrs}


def _length(wide: Node, p: float, axis: tuple[int, ...]) -> Node:
    """The norm of the compute dtype, without the axes."""
    if math.isinf(p):
        return (amax if p > 0 else amin).plain(abs(wide), axis=axis)
    if p == 0:
        return converted(sum.plain(ne(wide, zeros_like(wide)), axis=axis), wide.dtype)
    if p == 1:
        return sum.plain(abs(wide), axis=axis)
    if p == 2:
        return sqrt(sum.plain(wide * wide, axis=axis))
    return pow(sum.plain(pow(abs(wide), full(p, wide)), axis=axis), 1 / p)


def _norm_value(x: Node, *, p: float, axis: tuple[int, ...], keepdims: bool) -> Node:
    return _plain(converted(_length(converted(x, x.dtype.compute), p, axis), x.dtype), axis, keepdims, x.shape)


def _norm_vjp(g: Node, y: Node, x: Node, *, p: float, axis: tuple[int, ...], keepdims: bool) -> tuple[Node]:
    # dx = g sign(x) (|x| / norm)^(p-1), 0 where the norm is 0; of extrema a share of g where |x| is the norm
    wide = converted(x, x.dtype.compute)
    norm = _length(wide, p, axis)
    each, length = (along(v, x.shape, axis) for v in (converted(reshaped(g, without(x.shape, axis)), wide.dtype), norm))
    zero = zeros_like(wide)
    if p == 0:
        return (converted(zero, x.dtype),)
    if math.isinf(p):
        hit = eq(abs(wide), length)
        count = along(sum.plain(converted(hit, wide.dtype), axis=axis), x.shape, axis)
        dx = where(hit, sign(wide) * (each / count), zero)
    elif p == 1:
        dx = sign(wide) * each
    else:
        safe = where(eq(length, zero), full(1, length), length)
        ratio = wide / safe
        if p != 2:
            nought = eq(wide, zero)
            size = pow(where(nought, full(1, wide), abs(ratio)), full(p - 1, wide))
            ratio = where(nought, zero, sign(wide) * size)
        dx = where(eq(length, zero), zero, each * ratio)
    return (converted(dx, x.dtype),)


norm = Composite(
    "norm",
    infer=_norm,
    decompose=_norm_value,
    vjp=_norm_vjp,
    order=("x", "p", "axis", "keepdims"),
    samples=(
        Sample(("F[N]",)),
        Sample(("F[N,3]",), {"p": 1.0, "axis": -1, "keepdims": True}),
        Sample(("F[2,N,3]",), {"axis": (0, 2)}),
        Sample(("F[2,N]",), {"p": math.inf, "axis": 1}, dims={"N": 5}, draw=("distinct",)),
        Sample(("F[2,N]",), {"p": 3.0, "axis": 1}, dims={"N": 5}),
        Sample(("F[2,N]",), {"p": 0.5, "axis": 0}, dims={"N": 5}, draw=("nonzero",)),
    ),
    bad=(
        *BAD_AXIS,
        BadSample(("i32[3]",), match="write a cast"),
        BadSample(("f32[3]",), {"p": "nuc"}, match="p='nuc'"),
    ),
    doc=(
        "the vector norm (sum |x|^p)^(1/p) over axes, Frobenius's of two axes and p=2; inf and -inf are extrema of |x|,"
        " 0 counts what is not 0; the gradient at 0 is 0"
    ),
)

# -- divided by their norms --------------------------------------------------------------------------------------------


def _normalize(x: Type, *, p: float = 2.0, axis: int | tuple[int, ...] = 1, eps: float = 1e-12) -> Any:
    _, attrs = _norm(x, p=p, axis=axis)
    return x, {"p": p, "axis": attrs["axis"], "eps": eps}


def _at_least(x: Node, eps: float) -> Node:
    """x, but eps where it is less; from eps on the gradient passes."""
    return where(x < eps, full(eps, x), x)


def _normalize_value(x: Node, *, p: float, axis: tuple[int, ...], eps: float) -> Node:
    wide = converted(x, x.dtype.compute)
    below = _at_least(norm(wide, p=p, axis=axis, keepdims=True), eps)
    return converted(wide / spread(below, x.shape), x.dtype)


normalize = Composite(
    "normalize",
    infer=_normalize,
    decompose=_normalize_value,
    order=("x", "p", "axis", "eps"),
    samples=(Sample(("F[N,3]",)), Sample(("F[2,N,3]",), {"p": 1.0, "axis": (0, 2)}), Sample(("F[N]",), {"axis": 0})),
    bad=(*BAD_AXIS, BadSample(("f32[3]",), match="axis=1")),
    doc="x / max(norm, eps) over axes",
    source="torch.nn.functional.normalize",
)


def _over_axis(x1: Type, x2: Type, axis: int, keepdims: bool = False) -> tuple[Type, int]:
    both = floating(alike(x1, x2))
    axis = canonical_axis(axis, both.rank)
    kept = tuple(1 if a == axis else s for a, s in enumerate(both.shape) if keepdims or a != axis)
    return both.with_shape(*kept), axis


def _cosine(x1: Type, x2: Type, *, axis: int = 1, eps: float = 1e-8) -> Any:
    type_, axis = _over_axis(x1, x2, axis)
    return type_, {"axis": axis, "eps": eps}


def _units(x: Node, axis: int, eps: float) -> tuple[Node, Node, Node]:
    """x divided by its norm, what it was divided by, and whether that is the norm itself; of x's shape."""
    wide = converted(x, x.dtype.compute)
    length = along(_length(wide, 2.0, (axis,)), x.shape, (axis,))
    below = _at_least(length, eps)
    return wide / below, below, ge(length, full(eps, length))


def _cosine_value(x1: Node, x2: Node, *, axis: int, eps: float) -> Node:
    (u, _, _), (v, _, _) = (_units(x, axis, eps) for x in (x1, x2))
    return converted(sum.plain(u * v, axis=(axis,)), x1.dtype)


def _cosine_vjp(g: Node, y: Node, x1: Node, x2: Node, *, axis: int, eps: float) -> tuple[Node, Node]:
    # dx = g (v - cosine u) / |x|, with u and v divided by their norms; g v / eps where x was divided by eps
    (u, first, known1), (v, second, known2) = (_units(x, axis, eps) for x in (x1, x2))
    cosine = along(sum.plain(u * v, axis=(axis,)), x1.shape, (axis,))
    each, zero = along(converted(g, u.dtype), x1.shape, (axis,)), zeros_like(u)
    dx1 = each * ((v - where(known1, cosine * u, zero)) / first)
    dx2 = each * ((u - where(known2, cosine * v, zero)) / second)
    return converted(dx1, x1.dtype), converted(dx2, x2.dtype)


cosine_similarity = Composite(
    "cosine_similarity",
    infer=_cosine,
    decompose=_cosine_value,
    vjp=_cosine_vjp,
    broadcast=True,
    samples=(
        Sample(("F[N,4]", "F[N,4]")),
        Sample(("F[2,4,N]", "F[4,N]"), {"axis": 1}),
        Sample(("F[N]", "F[N]"), {"axis": 0, "eps": 0.5}, dims={"N": 5}),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,5]"), match="do not broadcast"),
        BadSample(("f32[3,4]", "f64[3,4]"), match="dtypes differ"),
        BadSample(("f32[3]", "f32[3]"), match="axis=1"),
    ),
    doc="the sum of products over an axis of both divided by their norms (at least eps)",
    source="torch.nn.functional.cosine_similarity",
)

# -- distances ---------------------------------------------------------------------------------------------------------


def _pairwise(x1: Type, x2: Type, *, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    type_, _ = _over_axis(x1, x2, -1, keepdim)
    return type_, {"p": p, "eps": eps, "keepdim": keepdim}


def _pairwise_value(x1: Node, x2: Node, *, p: float, eps: float, keepdim: bool) -> Node:
    wide = converted(x1, x1.dtype.compute) - converted(x2, x1.dtype.compute) + eps
    return converted(norm(wide, p=p, axis=-1, keepdims=keepdim), x1.dtype)


pairwise_distance = Composite(
    "pairwise_distance",
    infer=_pairwise,
    decompose=_pairwise_value,
    broadcast=True,
    samples=(
        Sample(("F[N,4]", "F[N,4]")),
        Sample(("F[2,N,3]", "F[N,3]"), {"p": 1.0, "keepdim": True}),
        Sample(("F[4]", "F[N,4]"), {"eps": 0.1}),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,5]"), match="do not broadcast"),
        BadSample(("f32[3,4]", "f64[3,4]"), match="dtypes differ"),
    ),
    doc="the norm of x1 - x2 + eps over the last axis",
    source="torch.nn.functional.pairwise_distance",
)


def _cdist(x1: Type, x2: Type, *, p: float = 2.0) -> Any:
    if x1.dtype is not x2.dtype:
        alike(x1, x2)
    if floating(x1).rank < 2 or x2.rank < 2 or not same(x1.shape[-1], x2.shape[-1]):
        raise TypeRuleError(f"rows of one length are needed, [..., P, M] and [..., R, M]: {x1} and {x2}")
    if p < 0:
        raise TypeRuleError(f"p={p} is below 0")
    lead = broadcast_shapes([x1.shape[:-2], x2.shape[:-2]])
    return x1.with_shape(*lead, x1.shape[-2], x2.shape[-2]), {"p": p}


def _cdist_value(x1: Node, x2: Node, *, p: float) -> Node:
    lead = broadcast_shapes([x1.shape[:-2], x2.shape[:-2]])
    shape = (*lead, x1.shape[-2], x2.shape[-2], x1.shape[-1])
    rows, columns = (
        spread(reshaped(spread(x, (*lead, *x.shape[-2:])), (*lead, *line, x.shape[-1])), shape)
        for x, line in (
            (converted(x1, x1.dtype.compute), (x1.shape[-2], 1)),
            (converted(x2, x1.dtype.compute), (1, x2.shape[-2])),
        )
    )
    return converted(norm(rows - columns, p=p, axis=-1), x1.dtype)


cdist = Composite(
    "cdist",
    infer=_cdist,
    decompose=_cdist_value,
    samples=(
        Sample(("F[N,4]", "F[3,4]")),
        Sample(("F[2,N,3]", "F[4,3]"), {"p": 1.0}),
        Sample(("F[3,2]", "F[N,2]"), {"p": 3.0}),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,5]"), match="rows of one length"),
        BadSample(("f32[4]", "f32[3,4]"), match="rows of one length"),
        BadSample(("f32[3,4]", "f32[3,4]"), {"p": -1.0}, match="p=-1.0"),
    ),
    doc=(
        "the norm of the difference of each row of x1 and each of x2; its gradient is 0 where they are equal; with"
        " p=inf ties share it evenly, a subgradient, where torch gives each the whole"
    ),
    source="torch.cdist",
)
