"""Reductions over axes, and the composites built on them: mean, var, logsumexp, softmax."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ...errors import InvalidProblem, TypeRuleError
from ...ir.dims import Size, product
from ...ir.node import Node, call
from ...ir.op import AxisReplacement, BadSample, Composite, Primitive, Reduction, Sample
from ...ir.ranges import Range, inside
from ...ir.types import DTYPES, I64, Type
from ..elementwise.pointwise import eq, exp, log, maximum, reciprocal, where
from ..rules import (
    along,
    canonical_axes,
    canonical_axis,
    converted,
    floating,
    full,
    keeping,
    neutral_of,
    number,
    reshaped,
    summing,
    without,
    zeros_like,
)

AXES = (
    Sample(("F[N]",)),
    Sample(("F[]",)),
    Sample(("F[3,N]",), {"axis": 0}),
    Sample(("F[N,3]",), {"axis": -1, "keepdims": True}),
    Sample(("F[2,N,3]",), {"axis": (0, 2)}),
    Sample(("F[2,N,3]",), {"axis": 1}),
    Sample(("F[2,3,N,2]",), {"axis": (1, 2)}),
    Sample(("F[2,3,N,2]",)),
)
NONEMPTY = tuple(Sample(s.operands, s.attrs, dims={"N": 5}, draw=("distinct",)) for s in AXES)
BAD_AXIS = (
    BadSample(("f32[2,3]",), {"axis": 2}, match="axis=2"),
    BadSample(("f32[2,3]",), {"axis": (0, 0)}, match="twice"),
)


def _plain(node: Node, axes: tuple[int, ...], keepdims: bool, shape: Any) -> Node:
    return reshaped(node, keeping(shape, axes)) if keepdims else node


def _reduce_call(name: str) -> Any:
    def sugar(x: Node, axis: Any = None, keepdims: bool = False) -> Node:
        axes = canonical_axes(axis, x.rank)
        op: Primitive = _OPS[name]
        return _plain(op.plain(x, axis=axes), axes, keepdims, x.shape)

    return sugar


def _reduced(x: Type, *, axis: tuple[int, ...]) -> Any:
    axes = canonical_axes(axis, number(x).rank)
    return x.with_shape(*without(x.shape, axes)), {"axis": axes}


def _sum_type(x: Type, *, axis: tuple[int, ...]) -> Any:
    type_, attrs = _reduced(Type(I64, x.shape) if x.dtype.kind == "b" else x, axis=axis)
    return (type_ if x.dtype.is_float else type_.with_dtype(I64)), attrs


Empty = Literal["error", "infinite"]
"""What an extremum over no elements does: raise an error, or give the neutral infinity of a float."""


def _nonempty(x: Type, *, axis: tuple[int, ...], empty: Empty = "error") -> Any:
    type_, attrs = _reduced(x, axis=axis)
    if empty == "error" and any(x.shape[a] == 0 for a in attrs["axis"]):
        raise TypeRuleError("the extremum over no elements")
    return type_, attrs | {"empty": empty}


def _extremum_reference(function: Any, combine: str) -> Any:
    def reference(x: Any, *, axis: Any, empty: str = "error") -> Any:
        axes = axis if isinstance(axis, tuple) else (axis,)
        if all(x.shape[a] for a in axes):
            return function(x, axis=axis)
        kept = [n for a, n in enumerate(x.shape) if a not in axes]
        if empty == "error" and 0 not in kept:
            raise InvalidProblem(
                f"the extremum over no elements: axis {', '.join(map(str, axes))} of an array of shape {x.shape}"
            )
        return np.full(kept, neutral_of(combine, x), x.dtype)

    return reference


def _linear(node: Node) -> dict[int, tuple[int | None, ...]]:
    kept = iter(range(node.rank))
    return {0: tuple(None if a in node.attrs["axis"] else next(kept) for a in range(node.operands[0].rank))}


def _replace_axis_of_sum(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement:
    gone = node.attrs["axis"]
    own = [a for a in range(node.operands[0].rank) if a not in gone][axis]
    return (own,), {"axis": tuple(a if a < own else a + len(sizes) - 1 for a in gone)}


def _sum_reference(x: Any, *, axis: Any) -> Any:
    return np.sum(x, axis=axis, dtype=np.int64 if x.dtype.kind in "biu" else summing(x.dtype)).astype(
        np.int64 if x.dtype.kind in "biu" else x.dtype
    )


sum = Primitive(
    "sum",
    infer=_sum_type,
    reference=_sum_reference,
    lower=Reduction("sum"),
    sugar=_reduce_call("sum"),
    multilinear=_linear,
    replace_axis=_replace_axis_of_sum,
    vjp=lambda g, y, x, *, axis: (along(g, x.shape, axis),),
    samples=(*AXES, Sample(("i32[N,3]",), {"axis": 0}, draw=("int",)), Sample(("bool[N]",), draw=("bool",))),
    bad=BAD_AXIS,
    doc="the sum over axes; ints and bool sum to i64; the empty sum is 0",
)


def _prod_vjp(g: Node, y: Node, x: Node, *, axis: Any) -> tuple[Node]:
    # d(prod x)/dx_j = prod of the others: y/x_j without zeros; with one zero, the product of the rest for it and 0 for
    # the others; with more, 0
    zero = eq(x, zeros_like(x))
    others = prod.plain(where(zero, full(1, x), x), axis=axis)
    zeros = sum.plain(converted(zero, DTYPES["i32"]), axis=axis)
    spread_zeros, spread_others = along(zeros, x.shape, axis), along(others, x.shape, axis)
    none = where(eq(spread_zeros, full(0, spread_zeros)), spread_others / where(zero, full(1, x), x), zeros_like(x))
    one = where(eq(spread_zeros, full(1, spread_zeros)), spread_others, zeros_like(x))
    return (along(g, x.shape, axis) * where(zero, one, none),)


prod = Primitive(
    "prod",
    infer=_reduced,
    reference=lambda x, *, axis: np.prod(x, axis=axis, dtype=x.dtype),
    lower=Reduction("prod"),
    sugar=_reduce_call("prod"),
    vjp=_prod_vjp,
    samples=AXES,
    bad=BAD_AXIS,
    doc=(
        "the product over axes, in the operand's dtype; the empty product is 1; the gradient is exact with any number"
        " of zeros"
    ),
)


def _extremum_vjp(g: Node, y: Node, x: Node, *, axis: Any, empty: str) -> tuple[Node]:
    hit = eq(x, along(y, x.shape, axis))  # ties share the gradient evenly
    count = sum.plain(converted(hit, g.dtype), axis=axis)
    return (where(hit, along(g / count, x.shape, axis), zeros_like(x)),)


amax = Primitive(
    "amax",
    infer=_nonempty,
    reference=_extremum_reference(np.max, "max"),
    lower=Reduction("max", nonempty=True),
    sugar=_reduce_call("amax"),
    vjp=_extremum_vjp,
    samples=NONEMPTY,
    bad=(*BAD_AXIS, BadSample(("f32[0]",), {"axis": 0}, match="no elements")),
    doc="the maximum over axes; propagates NaN, with gradient 0 for all; ties share the gradient evenly",
)
amin = Primitive(
    "amin",
    infer=_nonempty,
    reference=_extremum_reference(np.min, "min"),
    lower=Reduction("min", nonempty=True),
    sugar=_reduce_call("amin"),
    vjp=_extremum_vjp,
    samples=NONEMPTY,
    bad=(*BAD_AXIS, BadSample(("f32[0]",), {"axis": 0}, match="no elements")),
    doc="the minimum over axes; propagates NaN, with gradient 0 for all; ties share the gradient evenly",
)


def _arg_type(x: Type, *, axis: int | tuple[int, ...]) -> Any:
    gone = canonical_axes(axis, x.rank)
    if not gone or any(x.shape[a] == 0 for a in gone):
        raise TypeRuleError("the extremum over no elements" if gone else "axis () names no axis")
    return number(x).with_shape(*without(x.shape, gone)).with_dtype(I64), {"axis": gone if gone[1:] else gone[0]}


def _arg_reference(function: Any) -> Any:
    def reference(x: Any, *, axis: Any) -> Any:
        axes = axis if isinstance(axis, tuple) else (axis,)
        last = np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
        flat = last.reshape(*last.shape[: x.ndim - len(axes)], math.prod(x.shape[a] for a in axes))
        return _extremum_reference(function, "max")(flat, axis=flat.ndim - 1)

    return reference


def _places(node: Node, _: Range) -> Range:
    axis = node.attrs["axis"]
    return inside(product(node.operands[0].shape[a] for a in (axis if isinstance(axis, tuple) else (axis,))))


def _arg_call(name: str) -> Any:
    def sugar(x: Node, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Node:
        if axis is None:
            x, axis = reshaped(x, (x.type.count,)), 0
        axes = canonical_axes(axis, x.rank)
        return _plain(_OPS[name].plain(x, axis=axes), axes, keepdims, x.shape)

    return sugar


_ARG = (
    Sample(("F[N]",), {"axis": 0}, dims={"N": 5}),
    Sample(("F[2,N,3]",), {"axis": 1, "keepdims": True}, dims={"N": 5}),
    Sample(("F[3,4]",)),
    Sample(("i32[3,4,2]",), {"axis": (0, 2)}, draw=("int",)),
)
argmax = Primitive(
    "argmax",
    infer=_arg_type,
    reference=_arg_reference(np.argmax),
    lower=Reduction("argmax", nonempty=True),
    within=_places,
    sugar=_arg_call("argmax"),
    samples=_ARG,
    bad=BAD_AXIS[:1],
    doc=(
        "the index of the maximum along an axis, the first among equals; a NaN counts as the maximum; over several axes"
        " their row-major index; i64"
    ),
)
argmin = Primitive(
    "argmin",
    infer=_arg_type,
    reference=_arg_reference(np.argmin),
    lower=Reduction("argmin", nonempty=True),
    within=_places,
    sugar=_arg_call("argmin"),
    samples=_ARG,
    bad=BAD_AXIS[:1],
    doc=(
        "the index of the minimum along an axis, the first among equals; a NaN counts as the minimum; over several axes"
        " their row-major index; i64"
    ),
)

_OPS = {"sum": sum, "prod": prod, "amax": amax, "amin": amin, "argmax": argmax, "argmin": argmin}

# -- composites --------------------------------------------------------------------------------------------------------


def _kept(x: Type, axis: Any, keepdims: bool) -> Any:
    axes = canonical_axes(axis, x.rank)
    return x.with_shape(*(keeping(x.shape, axes) if keepdims else without(x.shape, axes))), {
        "axis": axes,
        "keepdims": keepdims,
    }


def _float_reduction(x: Type, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    if not x.dtype.is_float:
        raise TypeRuleError(f"the mean of {x.dtype} is no {x.dtype}; write a cast to a float")
    return _kept(floating(x), axis, keepdims)


def _count(x: Node, axes: tuple[int, ...]) -> Node:
    """The number of elements reduced over ``axes``: a scalar in x's compute dtype."""
    return call("cast", call("dim", size=product(x.shape[a] for a in axes)), x.dtype.compute)


def _mean_value(x: Node, *, axis: Any, keepdims: bool) -> Node:
    wide = converted(x, x.dtype.compute)
    total = sum.plain(wide, axis=axis)
    return _plain(converted(total / _count(x, axis), x.dtype), axis, keepdims, x.shape)


mean = Composite(
    "mean",
    infer=_float_reduction,
    decompose=_mean_value,
    samples=tuple(Sample(s.operands, s.attrs, dims={"N": 5}) for s in AXES),
    bad=(*BAD_AXIS, BadSample(("i32[3]",), match="write a cast")),
    doc="sum / count; NaN over no elements",
)


def _var(x: Type, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ddof: int | float = 0) -> Any:
    type_, attrs = _float_reduction(x, axis=axis, keepdims=keepdims)
    return type_, {**attrs, "ddof": ddof}


def _freedom(count: Node, ddof: int | float) -> Node:
    """What a variance divides by: never less than 0."""
    return count if ddof == 0 else maximum(count - ddof, zeros_like(count))


def _centred(wide: Node, axis: Any, count: Node) -> Node:
    """x - mean(x); the mean of the centred values is subtracted too, to remove the rounding error of the first."""
    centred = wide - along(sum.plain(wide, axis=axis) / count, wide.shape, axis)
    return centred - along(sum.plain(centred, axis=axis) / count, wide.shape, axis)


def _var_value(x: Node, *, axis: Any, keepdims: bool, ddof: int | float) -> Node:
    wide = converted(x, x.dtype.compute)
    count = _count(x, axis)
    centred = _centred(wide, axis, count)
    return _plain(
        converted(sum.plain(centred * centred, axis=axis) / _freedom(count, ddof), x.dtype), axis, keepdims, x.shape
    )


def _var_vjp(g: Node, y: Node, x: Node, *, axis: Any, keepdims: bool, ddof: int | float) -> tuple[Node]:
    # dx = 2 g (x - mean) / (count - ddof), doubled last, so that no intermediate value overflows unless dx does
    wide = converted(x, x.dtype.compute)
    count = _count(x, axis)
    centred = _centred(wide, axis, count)
    spread = along(converted(reshaped(g, without(x.shape, axis)), wide.dtype) / _freedom(count, ddof), x.shape, axis)
    return (converted(spread * centred * 2, x.dtype),)


var = Composite(
    "var",
    infer=_var,
    decompose=_var_value,
    vjp=_var_vjp,
    samples=tuple(
        Sample(s.operands, {**s.attrs, **extra}, dims={"N": 5})
        for s, extra in zip(AXES, ({}, {}, {"ddof": 1}, {}, {}, {"ddof": 1}, {}, {}), strict=True)
    ),
    bad=BAD_AXIS,
    doc="the variance: sum((x - mean)^2) / (count - ddof), ddof=0 by default; ddof may be a fraction",
)


def _extremum_type(x: Type, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    type_, attrs = _kept(number(x), axis, keepdims)
    if any(x.shape[a] == 0 for a in attrs["axis"]):
        raise TypeRuleError("the extremum over no elements")
    # with an int axis the first maximum gets the gradient; with several axes ties share it
    return type_, {**attrs, "axis": attrs["axis"] if axis is None or isinstance(axis, tuple) else attrs["axis"][0]}


def _extremum_value(arg: Primitive, plain: Primitive) -> Any:
    def decompose(x: Node, *, axis: Any, keepdims: bool) -> Node:
        if isinstance(axis, tuple):
            return _plain(plain.plain(x, axis=axis), axis, keepdims, x.shape)
        first = reshaped(arg.plain(x, axis=axis), keeping(x.shape, (axis,)))
        return reshaped(
            call("take_along_axis", x, first, axis=axis),
            keeping(x.shape, (axis,)) if keepdims else without(x.shape, (axis,)),
        )

    return decompose


max = Composite(
    "max",
    infer=_extremum_type,
    decompose=_extremum_value(argmax, amax),
    samples=NONEMPTY,
    bad=(*BAD_AXIS, BadSample(("f32[0]",), match="no elements")),
    doc="the maximum; among ties the first gets the gradient if axis is an int, otherwise they share it evenly",
)
min = Composite(
    "min",
    infer=_extremum_type,
    decompose=_extremum_value(argmin, amin),
    samples=NONEMPTY,
    bad=(*BAD_AXIS, BadSample(("f32[0]",), match="no elements")),
    doc="the minimum; among ties the first gets the gradient if axis is an int, otherwise they share it evenly",
)


def _logsumexp_value(x: Node, *, axis: Any, keepdims: bool) -> Node:
    wide = converted(x, x.dtype.compute)
    top = amax.plain(wide, axis=axis, empty="infinite")
    # an infinite maximum must not be subtracted: inf - inf is NaN
    shift = where(eq(call("abs", top), full(float("inf"), top)), zeros_like(top), top)
    total = log(sum.plain(exp(wide - along(shift, x.shape, axis)), axis=axis)) + shift
    return _plain(converted(total, x.dtype), axis, keepdims, x.shape)


def _logsumexp_vjp(g: Node, y: Node, x: Node, *, axis: Any, keepdims: bool) -> tuple[Node]:
    # dx = g exp(x - y): 0 if all x are -inf; if one is inf, NaN for it and 0 for the others
    wide = converted(x, x.dtype.compute)
    exact = logsumexp(wide, axis)
    shift = where(eq(exact, full(-float("inf"), exact)), zeros_like(exact), exact)
    g = along(converted(reshaped(g, without(x.shape, axis)), wide.dtype), x.shape, axis)
    return (converted(g * exp(wide - along(shift, x.shape, axis)), x.dtype),)


logsumexp = Composite(
    "logsumexp",
    infer=_float_reduction,
    decompose=_logsumexp_value,
    vjp=_logsumexp_vjp,
    samples=NONEMPTY,
    bad=BAD_AXIS,
    doc="log(sum(exp(x))) without overflow",
)


def _row_function(x: Type, *, axis: int = -1) -> Any:
    return floating(x), {"axis": canonical_axis(axis, x.rank)}


def _shifted(wide: Node, axis: int) -> tuple[Node, Node]:
    """(x - max, sum of exp(x - max)) along the axis, for softmax and log_softmax."""
    centred = wide - along(amax.plain(wide, axis=(axis,), empty="infinite"), wide.shape, (axis,))
    return centred, sum.plain(exp(centred), axis=(axis,))


def _softmax_value(x: Node, *, axis: int) -> Node:
    wide = converted(x, x.dtype.compute)
    centred, total = _shifted(wide, axis)
    return converted(
        exp(centred) * along(reciprocal(total), x.shape, (axis,)), x.dtype
    )  # one division per row; total >= 1, so its reciprocal does not overflow


def _softmax_vjp(g: Node, y: Node, x: Node, *, axis: int) -> tuple[Node]:
    # dx = y (g - sum(g y)), computed on g / 2: the difference of two finite g may overflow where dx does not
    return (softmax_slopes(g, softmax(converted(x, x.dtype.compute), axis), x, axis),)


def softmax_slopes(g: Node, p: Node, x: Node, axis: int) -> Node:
    """p (g - sum(g p)) of probabilities p, in x's dtype."""
    centred = converted(g, p.dtype) * 0.5
    for _ in range(2):  # where y is nearly 1 the first difference cancels; since sum(y) = 1, the second corrects it
        centred = centred - along(sum.plain(centred * p, axis=(axis,)), x.shape, (axis,))
    return converted(p * 2 * centred, x.dtype)


_SOFT = (
    Sample(("F[N,5]",)),
    Sample(("F[5]",)),
    Sample(("F[2,3,N]",), {"axis": 1}),
    Sample(("F[3,N]",), {"axis": 0}),
    Sample(("F[2,N,3,2]",), {"axis": 2}),
)
softmax = Composite(
    "softmax",
    infer=_row_function,
    decompose=_softmax_value,
    vjp=_softmax_vjp,
    samples=_SOFT,
    bad=BAD_AXIS[:1],
    doc="exp(x) / sum(exp(x)) along an axis; a row of only -inf gives NaN",
)


def safe_exponentials(x: Node, axis: int) -> tuple[Node, Node]:
    """exp(x - max(x)) along an axis in x's compute dtype, and 1 over their sum, the axis left out; zeros and 1 where x
    is -inf alone.
    """
    wide = converted(x, x.dtype.compute)
    top = amax.plain(wide, axis=(axis,), empty="infinite")
    hidden = eq(top, full(-float("inf"), top))
    # exp(-inf - 0) is 0: in a row of only -inf the sum is 0, too
    each = exp(wide - along(where(hidden, zeros_like(top), top), x.shape, (axis,)))
    total = sum.plain(each, axis=(axis,))
    return each, reciprocal(where(hidden, full(1, total), total))


def _safe_softmax_value(x: Node, *, axis: int) -> Node:
    each, share = safe_exponentials(x, axis)
    return converted(each * along(share, x.shape, (axis,)), x.dtype)


def _safe_softmax_vjp(g: Node, y: Node, x: Node, *, axis: int) -> tuple[Node]:
    # dx = y (g - sum(g y)), as softmax's: 0 where y is
    return (softmax_slopes(g, safe_softmax(converted(x, x.dtype.compute), axis), x, axis),)


safe_softmax = Composite(
    "safe_softmax",
    infer=_row_function,
    decompose=_safe_softmax_value,
    vjp=_safe_softmax_vjp,
    samples=_SOFT,
    bad=BAD_AXIS[:1],
    doc="softmax, but a row of only -inf gives zeros, and passes no gradient",
    source="torch._safe_softmax",
)


def _log_softmax_value(x: Node, *, axis: int) -> Node:
    wide = converted(x, x.dtype.compute)
    centred, total = _shifted(wide, axis)
    return converted(centred - along(log(total), x.shape, (axis,)), x.dtype)


def _log_softmax_vjp(g: Node, y: Node, x: Node, *, axis: int) -> tuple[Node]:
    # dx = g - softmax(x) sum(g)
    p = softmax(converted(x, x.dtype.compute), axis)
    g = converted(g, p.dtype)
    return (converted(g - p * along(sum.plain(g, axis=(axis,)), x.shape, (axis,)), x.dtype),)


log_softmax = Composite(
    "log_softmax",
    infer=_row_function,
    decompose=_log_softmax_value,
    vjp=_log_softmax_vjp,
    samples=_SOFT,
    bad=BAD_AXIS[:1],
    doc="log(softmax(x)) along an axis",
)
