"""Elements by their rank: medians, quantiles and modes, read from the sorted rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ...ir.types import BOOL, I64
from ..elementwise.pointwise import eq, floor, maximum, ne, where
from ..elementwise.rounding import ceil
from ..indexing.gathers import take_along_axis
from ..products.algebra import lerp
from ..rules import canonical_axis, converted, full, keeping, reshaped, spread, without, zeros_like
from ..shapes.movement import concat, iota, transpose
from ..shapes.views import cut
from .reduce import argmax, sum
from .scans import cummax
from .sorts import kth_in_order, order

Interpolation = Literal["linear", "lower", "higher", "midpoint", "nearest"]


def _line(x: Node, axis: int | None) -> tuple[Node, int]:
    """x with one axis at least, all as one where ``axis`` is None, and the axis."""
    line = reshaped(x, (x.type.count,)) if axis is None or not x.rank else x
    at = canonical_axis(axis if axis is not None else 0, line.rank)
    if line.shape[at] == 0:
        raise TypeRuleError(f"an element of axis {at} of {x.type}, which has no elements")
    return line, at


def _numbers(line: Node, axis: int) -> Node:
    """How many elements of each row are no NaN, i64, the axis kept as 1."""
    count = sum.plain(eq(line, line), axis=(axis,))
    return reshaped(count, tuple(1 if a == axis else n for a, n in enumerate(line.shape)))


def _at_rank(line: Node, axis: int, ranks: Node, keepdims: bool) -> tuple[Node, Node]:
    """The element of each row whose rank is given, and its position."""
    at = take_along_axis.plain(order(line, axis, False), ranks, axis=axis, oob="clamp")
    values = take_along_axis.plain(line, at, axis=axis, oob="clamp")
    if keepdims:
        return values, at
    shape = without(values.shape, (axis,))
    return reshaped(values, shape), reshaped(at, shape)


def _median(x: Node, axis: int | None = None, keepdims: bool = False) -> Node | tuple[Node, Node]:
    line, at = _line(x, axis)
    size = line.shape[at]
    if line.dtype.is_float:
        numbers = _numbers(line, at)
        whole = call("dim", size=size)
        middle = call("dim", size=(size - 1) // 2)
        # a NaN makes the median NaN: the first stands behind all numbers
        ranks = where(eq(numbers, spread(whole, numbers.shape)), spread(middle, numbers.shape), numbers)
        found = _at_rank(line, at, ranks, keepdims and bool(x.rank))
    else:
        found = kth_in_order(x if axis is not None else line, (size - 1) // 2 + 1, at, keepdims)
    return found if axis is not None else found[0]


def _nanmedian(x: Node, axis: int | None = None, keepdims: bool = False) -> Node | tuple[Node, Node]:
    if not x.dtype.is_float:
        return _median(x, axis, keepdims)
    line, at = _line(x, axis)
    numbers = _numbers(line, at)
    ranks = call("floordiv", maximum(numbers - 1, zeros_like(numbers)), full(2, numbers))
    found = _at_rank(line, at, ranks, keepdims and bool(x.rank))
    return found if axis is not None else found[0]


_MEDIANS = (
    Sample(("F[5]",), draw=("distinct",)),
    Sample(("F[3,4]",), {"axis": 1}, draw=("distinct",)),
    Sample(("F[4,N]",), {"axis": 0, "keepdims": True}, draw=("distinct",)),
)
_BAD = (BadSample(("f32[2,3]",), {"axis": 2}, match="axis=2"), BadSample(("f32[0]",), match="no elements"))
median = Function(
    "median",
    write=_median,
    samples=_MEDIANS,
    bad=_BAD,
    doc=(
        "the median, the lower one of two; along an axis with its position (i64). A NaN makes it NaN; the gradient goes"
        " to the element, the first among equal ones"
    ),
    source="torch.median",
)
nanmedian = Function(
    "nanmedian",
    write=_nanmedian,
    samples=_MEDIANS,
    bad=_BAD,
    doc="the median of what is not NaN; NaN where nothing else is",
    source="torch.nanmedian",
)


# -- the most frequent element -----------------------------------------------------------------------------------------


def _mode(x: Node, axis: int = -1, keepdims: bool = False) -> tuple[Node, Node]:
    line, at = _line(x, axis)
    size, places = line.shape[at], order(line, at, False)
    row = take_along_axis.plain(line, places, axis=at, oob="clamp")
    differs = ne(cut(row, at, 1, size), cut(row, at, 0, size - 1))
    begins = concat(full(True, row.type.with_dtype(BOOL).with_shape(*keeping(row.shape, (at,)))), differs, axis=at)
    number = iota.plain(shape=row.shape, axis=at)
    begin = cummax.plain(where(begins, number, zeros_like(number)), axis=at)
    # how many equal ones stand up to each: the largest is the last of the first of the longest runs
    rank = reshaped(argmax.plain(number - begin, axis=(at,)), keeping(row.shape, (at,)))
    found = take_along_axis.plain(places, rank, axis=at, oob="clamp")
    value = take_along_axis.plain(line, found, axis=at, oob="clamp")
    shape = x.shape if not x.rank else value.shape if keepdims else without(value.shape, (at,))
    return reshaped(value, shape), reshaped(found, shape)


_TIES = np.array([[2.0, 1.0, 2.0, 1.0, 3.0], [5.0, 5.0, 5.0, 1.0, 1.0], [0.0, 3.0, -0.0, 4.0, 2.0]])
mode = Function(
    "mode",
    write=_mode,
    samples=(
        Sample((_TIES,), {"axis": 1}),
        Sample(("F[3,4]",), {"axis": 0, "keepdims": True}, draw=("distinct",)),
        Sample(("F[]",)),
        Sample((np.array([3, 1, 3, 1, 2]),)),
    ),
    bad=_BAD,
    doc=(
        "the most frequent element along an axis, the smallest of several, and the position (i64) of the last one that"
        " equals it (torch's of long rows is any), to which the gradient goes; each NaN is a value of its own, above"
        " all numbers"
    ),
    source="torch.mode",
)

# -- quantiles ---------------------------------------------------------------------------------------------------------


def _quantiles(x: Node, q: Node, axis: int | None, keepdims: bool, interpolation: str, skip_nan: bool) -> Node:
    line, at = _line(x, axis)
    if not x.dtype.is_float or q.dtype is not x.dtype:
        raise TypeRuleError(f"x is {x.dtype} and q {q.dtype}: they are floats of one dtype")
    if q.rank > 1:
        raise TypeRuleError(f"q has rank {q.rank}: 0 or 1")
    if q.op.name == "constant" and not all(0 <= v <= 1 for v in q.attrs["value"]):
        raise TypeRuleError(f"q has {next(v for v in q.attrs['value'] if not 0 <= v <= 1)}: fractions in [0, 1]")
    size, rank = line.shape[at], line.rank
    last = (*(a for a in range(rank) if a != at), at)
    rows = transpose(line, last)
    rows = take_along_axis.plain(rows, order(rows, rank - 1, False), axis=rank - 1)
    numbers = _numbers(rows, rank - 1)
    wide = x.dtype.compute
    asked = reshaped(q, (q.type.count,))
    shape = (*rows.shape[:-1], asked.shape[0])
    top = converted(spread(call("dim", size=size - 1), numbers.shape), wide)
    if skip_nan:
        top = converted(maximum(numbers - 1, zeros_like(numbers)), wide)
    ranks = spread(converted(asked, wide), shape) * spread(top, shape)
    if not skip_nan:  # behind all numbers stands a NaN, if there is one
        whole = eq(numbers, spread(call("dim", size=size), numbers.shape))
        ranks = where(spread(whole, shape), ranks, spread(top, shape))
    value = _interpolated(converted(rows, wide), ranks, interpolation)
    value = transpose(converted(value, x.dtype), (rank - 1, *range(rank - 1)))
    kept = without(line.shape, (at,))
    if keepdims:
        kept = (1,) * x.rank if axis is None else tuple(1 if a == at else n for a, n in enumerate(x.shape))
    return reshaped(value, (*q.shape, *kept))


def _interpolated(rows: Node, ranks: Node, interpolation: str) -> Node:
    """Elements of ascending rows at fractional ranks along the last axis."""

    def at(rank: Node) -> Node:
        return take_along_axis.plain(rows, converted(rank, I64), axis=rows.rank - 1, oob="clamp")

    low, high = floor(ranks), ceil(ranks)
    if interpolation == "lower":
        return at(low)
    if interpolation == "higher":
        return at(high)
    if interpolation == "nearest":
        return at(call("round", ranks))
    weight = ranks - low if interpolation == "linear" else full(0.5, ranks)
    return lerp.plain(at(low), at(high), weight)


def _quantile(
    x: Node, q: Node, axis: int | None = None, keepdims: bool = False, interpolation: Interpolation = "linear"
) -> Node:
    return _quantiles(x, q, axis, keepdims, interpolation, False)


def _nanquantile(
    x: Node, q: Node, axis: int | None = None, keepdims: bool = False, interpolation: Interpolation = "linear"
) -> Node:
    return _quantiles(x, q, axis, keepdims, interpolation, True)


_ASKED = (
    Sample(("F[5,3]", "F[]"), {"axis": 0}, draw=("distinct", "unit")),
    Sample(("F[2,7]", "F[3]"), {"axis": 1, "keepdims": True}, draw=("distinct", "unit")),
    Sample(("F[4,3]", "F[2]"), {"interpolation": "lower"}, draw=("distinct", "unit")),
)
_NO_QUANTILE = (
    BadSample(("f32[3]", "f64[]"), match="floats of one dtype"),
    BadSample(("f32[3]", "f32[2,2]"), match="rank 2"),
    BadSample(("f32[3]", "f32[]"), {"interpolation": "cubic"}, match="interpolation='cubic'"),
)
quantile = Function(
    "quantile",
    write=_quantile,
    samples=_ASKED,
    bad=_NO_QUANTILE,
    doc=(
        "the elements at the fractions q of the sorted rows, the axes of q first; a row with a NaN gives NaN."
        " interpolation: between neighbours linearly, the lower, the higher, their middle, or the nearest; as in torch"
        " the first and the third are NaN where the neighbours are an infinity each, also the same one"
    ),
    source="torch.quantile",
)
nanquantile = Function(
    "nanquantile",
    write=_nanquantile,
    samples=_ASKED,
    bad=_NO_QUANTILE,
    doc="the quantile of what is not NaN",
    source="torch.nanquantile",
)
