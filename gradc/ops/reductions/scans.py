"""Scans along an axis: running sums, products, extrema, logsumexp, and first-order linear recurrences.

Every op has ``reverse``, which begins at the axis' end.  A gradient is again a scan in the other direction: of n
elements in O(n), without a division, so that zeros and second derivatives need no case of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import BadSample, Primitive, Sample, Scan
from ...ir.ranges import inside
from ...ir.types import I64, Type
from ...ir.types import dtype as dtype_of
from ..elementwise.pointwise import eq, exp, where
from ..rules import alike, canonical_axis, converted, floating, full, number, reshaped, summing, zeros_like
from ..shapes.axes import replace_axis_beside

Array = np.ndarray[Any, Any]


def accumulate(operands: tuple[Array, ...], combine: str, reverse: bool, axis: int) -> Array:
    """What a scan means in NumPy: ``combine`` is one of :data:`gradc.ir.statement.SCANS`; floats are combined in the
    accumulator dtype of references and rounded to their own, sums and products of integers are i64.
    """
    moved = [np.moveaxis(x, axis, -1)[..., ::-1] if reverse else np.moveaxis(x, axis, -1) for x in operands]
    x = moved[-1]
    if combine in ("sum", "prod"):
        out = (np.add if combine == "sum" else np.multiply).accumulate(
            x, -1, dtype=summing(x.dtype) if x.dtype.kind == "f" else np.int64
        )
    elif combine in ("max", "min"):
        out = (np.maximum if combine == "max" else np.minimum).accumulate(x, -1)
    elif combine in ("argmax", "argmin"):
        best = (np.maximum if combine == "argmax" else np.minimum).accumulate(x, -1)
        places = np.arange(x.shape[-1])
        out = np.maximum.accumulate(np.where((x == best) | (x != x), places, 0), -1)
        out = x.shape[-1] - 1 - out if reverse else out
    elif combine == "logsumexp":
        out = np.logaddexp.accumulate(x.astype(summing(x.dtype)), -1)
    else:
        factor, x = (each.astype(summing(each.dtype)) for each in moved)
        out, state = np.empty_like(x), np.zeros_like(x[..., 0]) if x.shape[-1] else None
        for i in range(x.shape[-1]):
            state = out[..., i] = np.where(factor[..., i] == 0, x[..., i], factor[..., i] * state + x[..., i])
    out = out.astype(operands[-1].dtype) if out.dtype.kind == "f" else out
    return np.moveaxis(out[..., ::-1] if reverse else out, -1, axis)


def _reference(combine: str) -> Callable[..., Array]:
    def reference(*operands: Array, axis: int, reverse: bool) -> Array:
        return accumulate(operands, combine, reverse, axis)

    return reference


# -- type rules --------------------------------------------------------------------------------------------------------


def _along(x: Type, axis: int, reverse: bool) -> Any:
    if x.rank == 0:
        raise TypeRuleError("a scalar has no axis to scan")
    return x, {"axis": canonical_axis(axis, x.rank), "reverse": reverse}


def _total(x: Type, *, axis: int, reverse: bool = False) -> Any:
    type_, attrs = _along(x, axis, reverse)
    return (type_ if x.dtype.is_float else type_.with_dtype(I64)), attrs


def _same(x: Type, *, axis: int, reverse: bool = False) -> Any:
    return _along(number(x), axis, reverse)


def _place(x: Type, *, axis: int, reverse: bool = False) -> Any:
    type_, attrs = _along(number(x), axis, reverse)
    return type_.with_dtype(I64), attrs


def _float(x: Type, *, axis: int, reverse: bool = False) -> Any:
    return _along(floating(x), axis, reverse)


def _recurrence(a: Type, b: Type, *, axis: int, reverse: bool = False) -> Any:
    return _along(floating(alike(a, b)), axis, reverse)


# -- calls -------------------------------------------------------------------------------------------------------------


def _scanned(name: str, x: Node, axis: int | None, reverse: bool) -> Node:
    """The scan along an axis; of the flattened operand if that is None; a scalar is its own scan."""
    if axis is not None and x.rank:
        return _OPS[name].plain(x, axis=axis, reverse=reverse)
    canonical_axis(axis or 0, 1)
    y = _OPS[name].plain(reshaped(x, (x.type.count,)), axis=0, reverse=reverse)
    return y if x.rank else reshaped(y, ())


def _call(name: str) -> Any:
    def sugar(x: Node, axis: int | None = None, reverse: bool = False) -> Node:
        return _scanned(name, x, axis, reverse)

    return sugar


def _total_call(name: str) -> Any:
    def sugar(x: Node, axis: int | None = None, reverse: bool = False, dtype: Any = None) -> Node:
        wide = dtype_of(dtype) if dtype is not None else x.dtype if x.dtype.is_float else I64
        return _scanned(name, converted(x, wide), axis, reverse)

    return sugar


# -- gradients ---------------------------------------------------------------------------------------------------------


def _shifted(x: Node, axis: int, by: int, fill: float) -> Node:
    """x, one place further along an axis, or one back where ``by`` is -1; ``fill`` where nothing was."""
    wide = call("pad", x, tuple((int(by > 0), int(by < 0)) if a == axis else (0, 0) for a in range(x.rank)), fill)
    start = tuple(int(by < 0 and a == axis) for a in range(x.rank))
    limit = tuple(low + n for low, n in zip(start, x.shape, strict=True))
    return call("slice", wide, start=start, limit=limit, step=(1,) * x.rank)


def _before(x: Node, axis: int, reverse: bool, fill: float) -> Node:
    """For each place the element that a scan visits before it."""
    return _shifted(x, axis, -1 if reverse else 1, fill)


def _after(x: Node, axis: int, reverse: bool, fill: float = 0) -> Node:
    """For each place the element that a scan visits after it; ``fill`` for the last."""
    return _shifted(x, axis, 1 if reverse else -1, fill)


def _recurrence_vjp(g: Node, y: Node, a: Node, b: Node, *, axis: int, reverse: bool) -> tuple[Node, Node]:
    # y_i = a_i y_(i-1) + b_i: the adjoint l_i = g_i + a_(i+1) l_(i+1) is db_i, and da_i = l_i y_(i-1)
    wide = g.dtype.compute
    adjoint = linear_recurrence.plain(
        _after(converted(a, wide), axis, reverse), converted(g, wide), axis=axis, reverse=not reverse
    )
    slope = adjoint * _before(converted(y, wide), axis, reverse, 0)
    return converted(slope, a.dtype), converted(adjoint, b.dtype)


def _cumprod_vjp(g: Node, y: Node, x: Node, *, axis: int, reverse: bool) -> tuple[Node]:
    # dx_i = (product before i) * (g_i + x_(i+1) (g_(i+1) + ...)): no division, so that zeros are nothing special
    wide = converted(x, g.dtype.compute)
    before = _before(cumprod.plain(wide, axis=axis, reverse=reverse), axis, reverse, 1)
    adjoint = linear_recurrence.plain(
        _after(wide, axis, reverse), converted(g, wide.dtype), axis=axis, reverse=not reverse
    )
    return (converted(before * adjoint, x.dtype),)


def _extremum_vjp(place: str) -> Callable[..., tuple[Node]]:
    def vjp(g: Node, y: Node, x: Node, *, axis: int, reverse: bool) -> tuple[Node]:
        # an element gets the cotangents of the run of places whose extremum it is
        wide = g.dtype.compute
        found = _OPS[place].plain(x, axis=axis, reverse=reverse)
        begins = eq(found, call("iota", shape=x.shape, axis=axis))
        goes_on = where(begins, full(0, x, wide), full(1, x, wide))
        run = linear_recurrence.plain(
            _after(goes_on, axis, reverse), converted(g, wide), axis=axis, reverse=not reverse
        )
        return (converted(where(begins, run, zeros_like(run)), x.dtype),)

    return vjp


def _logcumsumexp_vjp(g: Node, y: Node, x: Node, *, axis: int, reverse: bool) -> tuple[Node]:
    # dx_i = sum over k >= i of g_k exp(x_i - y_k) = exp(x_i - y_i) (g_i + exp(y_i - y_(i+1)) (g_(i+1) + ...)), and no
    # exponent is above 0
    wide = converted(x, g.dtype.compute)
    total = logcumsumexp.plain(wide, axis=axis, reverse=reverse)
    following = _after(total, axis, reverse, float("inf"))
    ratio = exp(where(eq(total, following), zeros_like(total), total - following))  # inf - inf is NaN
    adjoint = linear_recurrence.plain(ratio, converted(g, wide.dtype), axis=axis, reverse=not reverse)
    least = eq(wide, full(-float("inf"), wide))
    share = where(least, zeros_like(wide), exp(wide - total))
    return (converted(share * adjoint, x.dtype),)


# -- records -----------------------------------------------------------------------------------------------------------


def _linear(node: Node) -> dict[int, tuple[int | None, ...]]:
    return {0: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank))}


def _samples(*operands: str, draw: str = "normal") -> tuple[Sample, ...]:
    """Calls along each axis, in both directions."""

    def of(shape: str, **attrs: Any) -> Sample:
        return Sample(tuple(f"F[{shape}]" for _ in operands), attrs, (draw,) * len(operands), {"N": 5})

    return (
        of("N", axis=0),
        of("3,N", axis=1),
        of("N,4", axis=0, reverse=True),
        of("2,N,3", axis=1),
        of("2,N,3", axis=-1, reverse=True),
        of("2,1,N", axis=1),
    )


_BAD = (
    BadSample(("f32[2,3]",), {"axis": 2}, match="axis=2"),
    BadSample(("f32[]",), {"axis": 1}, match="axis=1"),
)

cumsum: Primitive = Primitive(
    "cumsum",
    infer=_total,
    reference=_reference("sum"),
    lower=Scan("sum"),
    sugar=_total_call("cumsum"),
    multilinear=_linear,
    replace_axis=replace_axis_beside,
    vjp=lambda g, y, x, *, axis, reverse: (cumsum.plain(g, axis=axis, reverse=not reverse),),
    samples=(
        *_samples("x"),
        Sample(("F[2,N]",), dims={"N": 5}),
        Sample(("i32[N,3]",), {"axis": 0}, draw=("int",)),
        Sample(("bool[N]",), {"axis": 0}, draw=("bool",)),
    ),
    bad=_BAD,
    doc=(
        "the sum of all elements up to each along an axis, of the flattened operand without one; reverse=True begins at"
        " the end; ints and bool sum to i64, dtype= to another"
    ),
)
cumprod = Primitive(
    "cumprod",
    infer=_total,
    reference=_reference("prod"),
    lower=Scan("prod"),
    sugar=_total_call("cumprod"),
    replace_axis=replace_axis_beside,
    vjp=_cumprod_vjp,
    samples=(*_samples("x"), Sample(("i32[N,3]",), {"axis": 0}, draw=("int",))),
    bad=_BAD,
    doc=(
        "the product of all elements up to each along an axis, of the flattened operand without one; reverse=True"
        " begins at the end; ints multiply to i64; the gradient is exact with any number of zeros"
    ),
)
cumargmax = Primitive(
    "cumargmax",
    infer=_place,
    reference=_reference("argmax"),
    lower=Scan("argmax"),
    sugar=_call("cumargmax"),
    replace_axis=replace_axis_beside,
    within=lambda node, _: inside(node.shape[node.attrs["axis"]]),
    samples=_samples("x", draw="distinct"),
    bad=_BAD,
    doc=(
        "for each element the position of the largest up to it along an axis: of equals the one visited last, and the"
        " last NaN; i64"
    ),
)
cumargmin = Primitive(
    "cumargmin",
    infer=_place,
    reference=_reference("argmin"),
    lower=Scan("argmin"),
    sugar=_call("cumargmin"),
    replace_axis=replace_axis_beside,
    within=lambda node, _: inside(node.shape[node.attrs["axis"]]),
    samples=_samples("x", draw="distinct"),
    bad=_BAD,
    doc=(
        "for each element the position of the least up to it along an axis: of equals the one visited last, and the"
        " last NaN; i64"
    ),
)
cummax = Primitive(
    "cummax",
    infer=_same,
    reference=_reference("max"),
    lower=Scan("max"),
    sugar=_call("cummax"),
    replace_axis=replace_axis_beside,
    vjp=_extremum_vjp("cumargmax"),
    samples=_samples("x", draw="distinct"),
    bad=_BAD,
    doc=(
        "the maximum of all elements up to each along an axis, of the flattened operand without one; reverse=True"
        " begins at the end; a NaN stays; among equals the one visited last gets the gradient"
    ),
)
cummin = Primitive(
    "cummin",
    infer=_same,
    reference=_reference("min"),
    lower=Scan("min"),
    sugar=_call("cummin"),
    replace_axis=replace_axis_beside,
    vjp=_extremum_vjp("cumargmin"),
    samples=_samples("x", draw="distinct"),
    bad=_BAD,
    doc=(
        "the minimum of all elements up to each along an axis, of the flattened operand without one; reverse=True"
        " begins at the end; a NaN stays; among equals the one visited last gets the gradient"
    ),
)
logcumsumexp = Primitive(
    "logcumsumexp",
    infer=_float,
    reference=_reference("logsumexp"),
    lower=Scan("logsumexp"),
    sugar=_call("logcumsumexp"),
    replace_axis=replace_axis_beside,
    vjp=_logcumsumexp_vjp,
    samples=_samples("x"),
    bad=_BAD,
    doc=(
        "log(cumsum(exp(x))) without overflow, along an axis, of the flattened operand without one; reverse=True begins"
        " at the end; the gradient of a -inf is 0"
    ),
)
linear_recurrence = Primitive(
    "linear_recurrence",
    infer=_recurrence,
    reference=_reference("affine"),
    lower=Scan("affine"),
    replace_axis=replace_axis_beside,
    vjp=_recurrence_vjp,
    samples=_samples("a", "b"),
    bad=(
        BadSample(("f32[2,3]", "f32[2,3]"), {"axis": 2}, match="axis=2"),
        BadSample(("f32[2,3]", "f32[2,4]"), {"axis": 0}, match="shapes differ"),
        BadSample(("i32[2]", "i32[2]"), {"axis": 0}, match="no float"),
    ),
    doc=(
        "y_i = a_i y_(i-1) + b_i along an axis, beginning with 0; reverse=True begins at the end: exponential moving"
        " averages, linear filters, state-space models; a factor of 0 begins anew, whatever came before it"
    ),
)

_OPS: dict[str, Primitive] = {
    op.name: op for op in (cumsum, cumprod, cumargmax, cumargmin, cummax, cummin, logcumsumexp)
}
