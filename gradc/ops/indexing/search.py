"""Where values stand in an ascending line: searchsorted, bucketize, isin; one_hot."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Function, Lookup, Primitive, Sample
from ...ir.types import I32, I64, Type
from ..elementwise.pointwise import bitwise_and, eq, floordiv, le, lt, ne, where
from ..elementwise.pointwise import invert as opposite
from ..reductions.sorts import keys, sort
from ..rules import converted, full, reshaped
from ..shapes.movement import iota
from .bags import count_not_above as reference_count
from .gathers import take_along_axis
from .positions import checked

# -- the search --------------------------------------------------------------------------------------------------------


def _count_not_above(line: Type, values: Type) -> Any:
    if line.dtype not in (I32, I64) or values.dtype is not I64:
        raise TypeRuleError(
            f"a line of {line.dtype}, values of {values.dtype}; a line of i32 or i64 and i64 are searched"
        )
    if line.rank != 1:
        raise TypeRuleError(f"the line {line} has rank {line.rank}, not 1")
    return values


count_not_above = Primitive(
    "count_not_above",
    infer=_count_not_above,
    reference=reference_count,
    in_place_of_dtype=True,
    lower=Lookup(
        lambda index, node, kernel: kernel.search(node.operands[0], kernel.read(node.operands[1], index)),
    ),
    vjp=lambda g, y, line, values: (DISCRETE, DISCRETE),
    samples=(
        Sample((np.array([0, 2, 2, 5]), np.array([[-1, 0, 1], [2, 5, 9]]))),
        Sample((np.array([-4, 7], np.int32), np.array(3))),
        Sample((np.zeros(0, np.int64), np.array([1, 2]))),
    ),
    bad=(
        BadSample(("f32[3]", "i64[2]"), match="a line of i32 or i64"),
        BadSample(("i64[3,2]", "i64[2]"), match="rank 2, not 1"),
    ),
    doc="how many elements of an ascending line are <= each value, by a binary search; i64",
)


def _found_in_rows(lines: Node, values: Node, right: bool) -> Node:
    """How many elements of each ascending row [..., L] are below each value [..., K], or with ``right`` not above it: a
    binary search whose steps are written out.
    """
    size = lines.shape[-1]
    if not isinstance(size, int):
        raise TypeRuleError(f"a sequence {lines.type} of rows: their size must be a constant")
    low, high = full(0, values), full(size, values)
    for _ in range(size.bit_length()):
        middle = floordiv(low + high, full(2, low))
        element = take_along_axis.plain(lines, middle, axis=lines.rank - 1, oob="clamp")
        after = bitwise_and((le if right else lt)(element, values), lt(low, high))
        low, high = where(after, middle + 1, low), where(after, high, middle)
    return low


def _searchsorted(
    sorted_sequence: Node,
    values: Node,
    sorter: Node | None = None,
    *,
    right: bool = False,
    side: Literal["left", "right"] | None = None,
    out_int32: bool = False,
) -> Node:
    if sorted_sequence.rank != 1 and not (
        sorted_sequence.rank == values.rank and all(map(same, sorted_sequence.shape[:-1], values.shape[:-1]))
    ):
        raise TypeRuleError(
            f"a sequence {sorted_sequence.type} and values {values.type}: a sequence of one axis, or of as many axes as"
            " values and equal sizes of all but the last"
        )
    if sorted_sequence.dtype is not values.dtype:
        raise TypeRuleError(f"a sequence of {sorted_sequence.dtype} and values of {values.dtype}: write a cast")
    if side is not None and (side not in ("left", "right") or (right and side == "left")):
        raise TypeRuleError(f"side={side!r} with right={right}: 'left', or 'right'")
    if sorter is not None:
        if sorter.rank != sorted_sequence.rank or not all(map(same, sorter.shape, sorted_sequence.shape)):
            raise TypeRuleError(f"a sorter {sorter.type} of a sequence {sorted_sequence.type}: they have one shape")
        sorter = checked(sorter, sorted_sequence.shape[-1], "searchsorted")
        sorted_sequence = take_along_axis.plain(sorted_sequence, sorter, axis=sorter.rank - 1)
    line, wanted = keys(sorted_sequence), converted(keys(values), I64)
    if line.rank != 1:
        found = _found_in_rows(converted(line, I64), wanted, right or side == "right")
    elif right or side == "right":
        found = count_not_above(line, wanted)
    elif line.dtype is I32:
        found = count_not_above(line, wanted - 1)
    else:  # nothing is below the least, from which no 1 can be taken
        least = full(I64.range[0], wanted.type)
        found = where(eq(wanted, least), full(0, wanted.type), count_not_above(line, wanted - 1))
    return converted(found, I32) if out_int32 else found


_LINE = np.array([-1.0, 0.0, 0.0, 2.5], np.float32)
_ROWS = np.array([[-1.0, 0.0, 0.0, 2.5], [-3.0, 0.5, 0.5, 2.5]], np.float32)
_PLACES = np.array([[-2.0, -1.0, -0.0], [0.5, 2.5, np.nan]], np.float32)
searchsorted = Function(
    "searchsorted",
    write=_searchsorted,
    samples=(
        Sample((_LINE, _PLACES)),
        Sample((_LINE, _PLACES), {"right": True, "out_int32": True}),
        Sample((np.array([3, -2, 9]), np.array([0, 9, 10]), np.array([1, 0, 2])), {"side": "right"}),
        Sample((np.array([np.iinfo(np.int64).min, 4]), np.array([np.iinfo(np.int64).min, 5]))),
        Sample((np.zeros(0, np.float32), _LINE)),
        Sample((_ROWS, _PLACES)),
        Sample((_ROWS, _PLACES), {"right": True}),
        Sample((_ROWS[:, ::-1].copy(), _PLACES, np.array([[3, 2, 1, 0]] * 2)), {"out_int32": True}),
    ),
    bad=(
        BadSample(("f32[3]", "f64[2]"), match="write a cast"),
        BadSample(("f32[3,2]", "f32[2,2]"), match="equal sizes of all but the last"),
        BadSample(("f32[3,2]", "f32[3]"), match="of as many axes as"),
        BadSample(("f32[3,N]", "f32[3,2]"), match="their size must be a constant"),
        BadSample(("f32[3]", "f32[2]", "i64[2]"), match="they have one shape"),
        BadSample(("f32[3]", "f32[2]"), {"right": True, "side": "left"}, match="side='left'"),
    ),
    doc=(
        "how many elements of an ascending sequence are below each value (right: not above it): where it would be"
        " inserted; i64. The sequence has one axis, or one row for each row of values. NaN is above every number, in"
        " the sequence too (NumPy's rule, not torch's). sorter: the positions that sort the sequence"
    ),
    source="torch.searchsorted",
)


def _bucketize(values: Node, boundaries: Node, *, right: bool = False, out_int32: bool = False) -> Node:
    if boundaries.rank != 1:
        raise TypeRuleError(f"boundaries of rank {boundaries.rank}; only 1-D ones are searched")
    return _searchsorted(boundaries, values, right=right, out_int32=out_int32)


bucketize = Function(
    "bucketize",
    write=_bucketize,
    samples=(Sample((_PLACES, _LINE)), Sample((_PLACES, _LINE), {"right": True})),
    bad=(BadSample(("f32[3]", "f32[2,2]"), match="only 1-D"),),
    doc="the number of the range between ascending boundaries that each value is in; right: a boundary begins a range",
    source="torch.bucketize",
)


def _isin(elements: Node, test_elements: Node, *, invert: bool = False) -> Node:
    if elements.dtype is not test_elements.dtype:
        raise TypeRuleError(f"elements of {elements.dtype} among those of {test_elements.dtype}: write a cast")
    line = sort(reshaped(test_elements, (test_elements.type.count,)))[0]
    found = ne(_searchsorted(line, elements, right=True), _searchsorted(line, elements))
    found = found & eq(elements, elements) if elements.dtype.is_float else found  # NaN is in no set
    return opposite(found) if invert else found


isin = Function(
    "isin",
    write=_isin,
    samples=(
        Sample((_PLACES, _LINE)),
        Sample((np.array([1, 2, 3]), np.array([[3, 1]])), {"invert": True}),
        Sample((np.array([1, 2, 3]), np.zeros(0, np.int64))),
    ),
    bad=(BadSample(("f32[3]", "i64[2]"), match="write a cast"),),
    doc="whether each element is among test_elements, by a search in their order; NaN is not",
    source="torch.isin",
)

# -- one-hot -----------------------------------------------------------------------------------------------------------


def _one_hot(indices: Node, num_classes: int | Dim) -> Node:
    if not indices.dtype.is_integer:
        raise TypeRuleError(f"indices are {indices.dtype}, not integers")
    if isinstance(num_classes, int) and num_classes < 0:
        raise TypeRuleError(f"num_classes={num_classes}: a number of them that no data decides")
    size: Size = num_classes
    at = call("check_index", converted(indices, I64), bound=size, op="one_hot")
    columns = iota((size,))
    return converted(eq(reshaped(at, (*at.shape, 1)), columns), I64)


one_hot = Function(
    "one_hot",
    write=_one_hot,
    samples=(
        Sample((np.array([[0, 2], [1, 1]]),), {"num_classes": 3}),
        Sample((np.array(4, np.int32),), {"num_classes": 5}),
    ),
    bad=(
        BadSample(("f32[3]",), {"num_classes": 3}, match="not integers"),
        BadSample(("i64[3]",), {"num_classes": -1}, match="num_classes=-1"),
    ),
    doc="a last axis of num_classes with 1 at each index, i64; an index outside is an error of the call",
    source="torch.nn.functional.one_hot",
)
