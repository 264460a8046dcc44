"""The gradient of a table in coalesced sparse form: the rows that indices select, ascending; their values; the count;
and put_rows, which writes new values of such rows.

Sizes do not depend on data: N indices select at most N rows, so rows and values have size N; entries from ``count`` on
have the row number ``size`` and the value 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, ceildiv, known_nonnegative, product, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Library, Sample
from ...ir.operands import adopt
from ...ir.properties import Bounds, Broadcasts, Reshapes, access
from ...ir.statement import Index
from ...ir.types import I32, I64, Type
from ..elementwise.pointwise import gt, le, ne, where
from ..reductions.reduce import sum
from ..rules import converted, full, leading, number, reshaped, spread
from ..shapes.movement import iota
from .gathers import (
    Padding,
    _as_resolved,
    _padding,
    gather,
    in_range,
    index_type,
    padding_exists,
    scatter_add,
    unpadded,
)

BLOCK, LEVELS = 64, 3
"""A running sum is computed in blocks, and recursively over the blocks' totals, at most LEVELS deep: 2^31 elements
leave 2^13 totals.
"""


def running_sum(x: Node, levels: int = LEVELS) -> Node:
    """The inclusive prefix sum of ints [N]: a masked sum within each block plus the total of the blocks before it."""
    (size,) = x.shape
    small = isinstance(size, int) and size <= BLOCK
    block: Size = size if small or not levels else BLOCK
    count = ceildiv(size, block) if levels and not small else 1
    cut = x if same(count * block, size) else call("pad", x, ((0, count * block - size),), 0)
    shape = (count, block, block)
    before = le(
        spread(reshaped(iota(shape=(block,)), (1, 1, block)), shape),
        spread(reshaped(iota(shape=(block,)), (1, block, 1)), shape),
    )
    each = spread(reshaped(cut, (count, 1, block)), shape)
    within = sum.plain(where(before, each, full(0, each)), axis=(2,))
    if small or not levels:
        return reshaped(within, (size,))
    totals = sum.plain(reshaped(cut, (count, block)), axis=(1,))
    whole = within + spread(reshaped(running_sum(totals, levels - 1) - totals, (count, 1)), within.shape)
    line = reshaped(whole, (count * block,))
    return leading(line, (size,))


class _Coalesced:
    """What the three ops share: the flattened indices, and which rows they select."""

    def __init__(self, indices: Node, size: Size, oob: str, padding_idx: Padding):
        self.size, self.oob = size, oob
        self.indices = reshaped(indices, (product(indices.shape),))
        if oob in ("clamp", "wrap"):
            self.indices = _as_resolved(self.indices, size, oob)
        self.padding_idx = padding_idx
        self.room = self.indices.shape[0]

    @property
    def hit(self) -> Node:
        """i64[size]: 1 for each row that an index selects, else 0."""
        count = scatter_add.plain(
            self.indices, full(1, self.indices, I64), axis=0, size=self.size, oob=self.oob, padding_idx=self.padding_idx
        )
        return converted(gt(count, full(0, count)), I64)

    @property
    def slot(self) -> Node:
        """i64[size]: the rank of each selected row among the selected rows, -1 for the others."""
        return where(gt(self.hit, full(0, self.hit)), running_sum(self.hit) - 1, full(-1, self.hit))

    def rows(self) -> Node:
        line = iota(shape=(self.size,))
        limit = call("dim", size=self.size)
        return scatter_add.plain(self.slot, line - limit, axis=0, size=self.room, oob="skip") + limit

    def values(self, updates: Node) -> Node:
        flat = reshaped(updates, (self.room, *updates.shape[len(updates.shape) - 1 :]))
        place = gather.plain(self.slot, self.indices, axis=0, oob=self.oob)
        if self.oob != "error" and not (self.oob in ("clamp", "wrap") and known_nonnegative(self.size - 1)):
            place = where(
                in_range(self.indices, self.size), place, full(-1, place)
            )  # a gather out of range gives 0, which would be a valid slot
        if self.padding_idx is not None:
            place = where(unpadded(self.indices, self.padding_idx), place, full(-1, place))
        return scatter_add.plain(place, flat, axis=0, size=self.room, oob="skip")


def _rows(indices: Type, *, size: int | Dim, oob: Bounds = "error", padding_idx: Padding = None) -> Any:
    return Type(I64, (index_type(indices).count,)), {
        "size": size,
        "oob": oob,
        "padding_idx": _padding(padding_idx, size),
    }


def _count(indices: Type, *, size: int | Dim, oob: Bounds = "error", padding_idx: Padding = None) -> Any:
    return Type(I64), _rows(indices, size=size, oob=oob, padding_idx=padding_idx)[1]


def _values(
    indices: Type, updates: Type, *, size: int | Dim, oob: Bounds = "error", padding_idx: Padding = None
) -> Any:
    line, attrs = _rows(indices, size=size, oob=oob, padding_idx=padding_idx)
    lead = updates.shape[:-1]
    if updates.rank != indices.rank + 1 or not all(same(n, m) for n, m in zip(lead, indices.shape, strict=True)):
        raise TypeRuleError(f"updates {updates} for the indices {indices}: a row each")
    return number(updates).with_shape(line.shape[0], updates.shape[-1]), attrs


_PLAIN = {"size": 5}
_SAMPLES: tuple[tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]], ...] = (
    (("i64[N]",), _PLAIN, ("index:5",)),
    (("i32[2,N]",), {"size": 5, "padding_idx": -1}, ("index:5",)),
    (("u8[N]",), {"size": 70}, ("index:70",)),
    (("i8[N]",), {"size": 3, "oob": "skip"}, ("int",)),
    (("i8[N]",), {"size": 3, "oob": "wrap", "padding_idx": 1}, ("int",)),
    (("i64[]",), _PLAIN, ("index:5",)),
)
_BAD = (
    BadSample(("f32[3]",), {"size": 5}, match="indices are f32"),
    BadSample(("i64[3]",), {"size": 5, "padding_idx": 5}, match="padding_idx=5 of 5 rows"),
)


def _op(name: str, infer: Any, value: Any, doc: str, updates: bool = False) -> Composite:
    more, word = (
        ((lambda shape: (f"F[{shape},3]" if shape else "F[3]",)), ("normal",)) if updates else ((lambda shape: ()), ())
    )
    samples = tuple(
        Sample((*operands, *more(operands[0].partition("[")[2].rstrip("]"))), attrs, draw=(*draw, *word))
        for operands, attrs, draw in _SAMPLES
    )
    bad = (
        (
            BadSample(("i64[3]", "f32[2,4]"), {"size": 5}, match="a row each"),
            BadSample(("f32[3]", "f32[3,4]"), {"size": 5}, match="indices are f32"),
        )
        if updates
        else _BAD
    )
    return Composite(
        name,
        infer=infer,
        decompose=value,
        samples=samples,
        bad=bad,
        doc=doc,
        indices={0: lambda node: node.attrs["size"]},
        implies=lambda node: padding_exists(node.attrs["padding_idx"], node.attrs["size"]),
        source="torch.sparse_coo_tensor(...).coalesce()",
    )


coalesce_rows = _op(
    "coalesce_rows",
    _rows,
    lambda indices, **attrs: _Coalesced(indices, **attrs).rows(),
    "the distinct rows that the indices select, ascending: i64 with one entry per index, filled up with size",
)
coalesce_count = _op(
    "coalesce_count",
    _count,
    lambda indices, **attrs: sum.plain(_Coalesced(indices, **attrs).hit, axis=(0,)),
    "the number of distinct rows that the indices select: i64[]",
)
coalesce_values = _op(
    "coalesce_values",
    _values,
    lambda indices, updates, **attrs: _Coalesced(indices, **attrs).values(updates),
    "the sum of the updates of each row of coalesce_rows, filled up with zeros",
    updates=True,
)


def coalesce(
    indices: Node, updates: Node, size: Size, oob: Bounds = "error", padding_idx: Padding = None
) -> tuple[Node, Node, Node]:
    """(rows i64[N], values [N, D], count i64[]): a ``[size, D]`` gradient in coalesced sparse form, valid in the first
    ``count`` entries.
    """
    attrs: dict[str, Any] = {"size": size, "oob": oob, "padding_idx": padding_idx}
    return coalesce_rows(indices, **attrs), coalesce_values(indices, updates, **attrs), coalesce_count(indices, **attrs)


def _at(updates: Node, order: Node) -> Node:
    """Rows of the updates; of those that a bag repeats for each of its indices, the bag's."""
    repeated = updates.operands[0] if access(updates, Reshapes) else updates
    if access(repeated, Broadcasts) and repeated.rank == 3 and repeated.shape[1] != 0:  # bags of none repeat nothing
        (bags,) = repeated.operands
        whole = same(updates.shape[1], repeated.shape[2])  # a row of the updates is one of a bag, not all of them
        if whole and bags.rank == 3 and bags.shape[1] == 1 and all(map(same, bags.shape[::2], repeated.shape[::2])):
            rows = reshaped(bags, bags.shape[::2])
            # sorts count to 2^31: divisions of 32 bits are done side by side
            return gather.plain(rows, call("floordiv", converted(order, I32), repeated.shape[1]), axis=0, oob="clamp")
    return gather.plain(updates, order, axis=0, oob="clamp")


# -- segments of equal keys --------------------------------------------------------------------------------------------

NONE = np.iinfo(np.int64).max
"""What stands behind the last key of sort_segments."""


def _sort_segments(keys: Type) -> Any:
    if keys.dtype not in (I32, I64) or keys.rank != 1:
        raise TypeRuleError(f"keys are {keys}; i32 and i64 vectors are sorted")
    return Type(I64, (3, keys.shape[0]))


def _sort_segments_reference(keys: Any) -> Any:
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    out = np.stack([order, np.full_like(order, NONE), np.full_like(order, keys.size)])
    out[1:, : found.size] = found, starts
    return out


def _sort_segments_value(keys: Node) -> Node:
    order, position = call("argsort", keys), iota(shape=keys.shape)
    key = converted(gather.plain(keys, order, axis=0, oob="clamp"), I64)
    before = gather.plain(key, position - 1, axis=0, oob="clamp")
    begins = call("bitwise_or", ne(key, before), call("eq", position, 0))
    number = call("cumsum", converted(begins, I64), axis=0) - 1
    place = where(begins, number, full(-1, number))

    def of_firsts(x: Node, rest: Node) -> Node:
        """x where each segment begins, one after the other; filled up with ``rest``."""
        return scatter_add.plain(place, x - rest, axis=0, size=keys.shape[0], oob="skip") + rest

    found = of_firsts(key, full(NONE, key))
    starts = of_firsts(position, spread(call("dim", size=keys.shape[0]), keys.shape))
    return call("concat", *(reshaped(x, (1, *keys.shape)) for x in (order, found, starts)), axis=0)


sort_segments = Library(
    "sort_segments",
    infer=_sort_segments,
    reference=_sort_segments_reference,
    decompose=_sort_segments_value,
    axes=lambda node: (
        (("i", node.shape[1]), ("k", 3), ("j", node.shape[1])),
        ((Index.of("i"),),),
        (Index.of("k"), Index.of("j")),
    ),
    views=lambda out, inner: (tuple(inner),),
    sorts=0,
    in_place_of_dtype=True,
    vjp=lambda g, y, keys: (DISCRETE,),
    samples=(
        Sample(("i64[N]",), draw=("int",)),
        Sample(("i32[40]",), draw=("int",)),
        Sample((np.array([2**62, -5, 2**62, 7, -(2**63)]),)),
        Sample(("i64[0]",), draw=("int",)),
    ),
    bad=(
        BadSample(("f32[3]",), match="i32 and i64 vectors"),
        BadSample(("i64[2,3]",), match="i32 and i64 vectors"),
    ),
    doc=(
        "equal keys side by side, i64[3,N]: the positions of the keys in ascending order, stable; the distinct keys,"
        " ascending, filled up with the largest i64; and where each of them begins in that order, filled up with N"
    ),
    source="numpy.unique(return_index=True)",
)


def _row(x: Node, k: int) -> Node:
    """A row of a matrix."""
    return reshaped(call("slice", x, start=(k, 0), limit=(k + 1, x.shape[1]), step=(1, 1)), x.shape[1:])


def coalesce_by_sorting(
    indices: Node, updates: Node, size: Size, oob: Bounds = "error", padding_idx: Padding = None
) -> tuple[Node, Node, Node]:
    """:func:`coalesce` of N indices in N log N operations, whatever the size is."""
    line = converted(_Coalesced(indices, size, oob, None).indices, I64)
    if oob == "error":
        line = call("check_index", line, bound=size, op="gather")
    limit = spread(call("dim", size=size), line.shape)
    everywhere = oob == "error" and padding_idx is None
    if not everywhere:
        hits = in_range(line, size)
        if padding_idx is not None:
            hits = call("bitwise_and", hits, unpadded(line, padding_idx))
        line = where(hits, line, limit)  # they come last
    order, found, starts = (_row(sort_segments.plain(line), k) for k in range(3))
    segment = call("segment_ids", starts, size=line.shape[0], oob="ascending")
    rows, sorted_ = call("minimum", found, limit), _at(updates, order)
    if not everywhere:
        hit = call("lt", gather.plain(line, order, axis=0, oob="clamp"), limit)
        sorted_ = where(spread(reshaped(hit, (*hit.shape, 1)), sorted_.shape), sorted_, full(0, sorted_))
    values = scatter_add.plain(segment, sorted_, axis=0, size=line.shape[0], oob="skip")
    count = sum.plain(converted(call("lt", found, limit), I64), axis=(0,))
    return rows, values, count


# -- rows written back -------------------------------------------------------------------------------------------------


def _put_rows(x: Type, rows: Type, values: Type) -> Any:
    if not x.rank:
        raise TypeRuleError("a scalar has no rows")
    if rows.dtype is not I64 or rows.rank != 1:
        raise TypeRuleError(f"rows are {rows}; they are an i64 vector")
    wanted = x.with_shape(rows.shape[0], *x.shape[1:])
    if values.dtype is not x.dtype or values.rank != x.rank or not all(map(same, values.shape, wanted.shape)):
        raise TypeRuleError(f"values {values} for {rows} of {x}: they should be {wanted}")
    return x


def _put_rows_reference(x: Any, rows: Any, values: Any) -> Any:
    out, there = np.array(x), (rows >= 0) & (rows < len(x))
    out[rows[there]] = values[there]
    return out


def _put_rows_axes(node: Node) -> Any:
    x, rows, _ = node.operands
    trailing = [(f"d{i}", size) for i, size in enumerate(x.shape[1:])]
    row = tuple(Index.of(name) for name, _ in trailing)
    v, n = Index.of("v"), Index.of("n")
    axes = (("v", x.shape[0]), *trailing, ("n", rows.shape[0]))
    return axes, ((v, *row), (n,), (n, *row)), (v, *row)


def _put_rows_vjp(g: Node, y: Node, x: Node, rows: Node, values: Node) -> tuple[Any, Any, Any]:
    # a row of y is a row of values or of x
    return put_rows.plain(g, rows, full(0, values)), DISCRETE, gather.plain(g, rows, axis=0, oob="skip")


def _put_last_rows(x: Node, rows: Node, values: Node) -> Node:
    """:func:`put_rows` of rows that may be there more than once: all but the last of each are moved outside of x."""
    x, rows, values = adopt("put_rows", [x, rows, values], broadcasting=False)
    put_rows.type_of([x.type, rows.type, values.type], {})
    order = call("argsort", rows)  # stable: equal rows stay in the order of their positions
    key = gather.plain(rows, order, axis=0, oob="clamp")
    position = iota(shape=rows.shape)
    after = gather.plain(key, position + 1, axis=0, oob="clamp")
    end = spread(call("dim", size=rows.shape[0]), rows.shape)
    last = call("bitwise_or", ne(key, after), call("eq", position + 1, end))
    outside = spread(call("dim", size=x.shape[0]), rows.shape)
    return put_rows.plain(x, where(last, key, outside), gather.plain(values, order, axis=0, oob="clamp"))


_SOME = np.array([0, 2, 5, 5], np.int64)
put_rows = Library(
    "put_rows",
    infer=_put_rows,
    reference=_put_rows_reference,
    axes=_put_rows_axes,
    views=lambda out, inner: (tuple(out), tuple(inner), (*inner, *out[1:])),
    row_major=True,
    updates=0,
    in_place_of_dtype=True,
    sugar=_put_last_rows,
    vjp=_put_rows_vjp,
    samples=(
        Sample(("F[5,3]", _SOME, "F[4,3]")),
        Sample(("F[5]", _SOME, "F[4]")),
        Sample(("F[V,2,3]", np.array([-7, 1, 4], np.int64), "F[3,2,3]"), dims={"V": 4}),
        Sample(("i32[3,2]", np.array([2], np.int64), "i32[1,2]"), draw=("int", "int")),
    ),
    bad=(
        BadSample(("f32[]", "i64[2]", "f32[2]"), match="a scalar has no rows"),
        BadSample(("f32[5,3]", "i32[2]", "f32[2,3]"), match="an i64 vector"),
        BadSample(("f32[5,3]", "i64[2]", "f32[3,3]"), match="should be f32[2,3]"),
        BadSample(("f32[5,3]", "i64[2]", "f64[2,3]"), match="should be f32[2,3]"),
    ),
    doc=(
        "x with values in place of some of its rows; what is outside of x is skipped, and of several for one row the"
        " last one stays. Where x is donated, nothing but these rows is written. put_rows.plain is for rows that are"
        " there once by how they are computed, as those of coalesce_rows are: it does not sort them"
    ),
)
