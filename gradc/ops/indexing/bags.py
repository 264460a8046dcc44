"""embedding_bag: rows of a table reduced over bags of indices; segment_ids: the bag that each position belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Lookup, Primitive, Sample
from ...ir.operands import adopt
from ...ir.properties import Bounds
from ...ir.statement import Index
from ...ir.types import I64, Type
from ...process.forks import cached_property
from ..elementwise.pointwise import bitwise_or, eq, ge, gt, logical_and, lt, maximum, ne, sqrt, where
from ..reductions.reduce import amax, amin, sum
from ..rules import along, converted, floating, full, reshaped, spread, zeros_like
from ..shapes.movement import iota
from .gathers import (
    Padding,
    _as_resolved,
    _padding,
    check_positions,
    gather,
    index_type,
    padding_exists,
    scatter_add,
    unpadded,
)
from .scatters import scatter_amax, scatter_amin
from .tables import embedding_renorm

# -- which segment a position is in ------------------------------------------------------------------------------------


def count_not_above(line: Any, values: Any) -> Any:
    """The number of elements of the ascending 1-D array ``line`` that are <= each value (``searchsorted`` on the
    right); an unsorted line gives what this binary search finds, as in the kernels.
    """
    line, values = np.asarray(line).astype(np.int64), np.asarray(values).astype(np.int64)
    low, high = np.zeros(values.shape, np.int64), np.full(values.shape, line.size, np.int64)
    while (low < high).any():
        middle = low + (high - low) // 2
        right = (low < high) & (line[np.minimum(middle, line.size - 1)] <= values)
        low, high = np.where(right, middle + 1, low), np.where(right | (low >= high), high, middle)
    return low


def _segments(offsets: Type, *, size: int | Dim, oob: Literal["error", "skip", "ascending"] = "error") -> Any:
    if index_type(offsets).rank != 1:
        raise TypeRuleError(f"the offsets {offsets} have rank {offsets.rank}, not 1")
    return Type(I64, (size,))


def _segments_reference(offsets: Any, *, size: int, oob: str) -> Any:
    raw = np.asarray(offsets).astype(np.int64)
    if oob == "error":
        check_positions("segment_ids", "offsets", raw, size + 1, ascending=True)
    return count_not_above(raw, np.arange(size)) - 1


segment_ids = Primitive(
    "segment_ids",
    infer=_segments,
    reference=_segments_reference,
    in_place_of_dtype=True,
    lower=Lookup(
        lambda index, node, kernel: kernel.position(
            Index.of(kernel.search(node.operands[0], kernel.position(index[0], I64), node.attrs["oob"] == "ascending"))
            + -1,
            I64,
        )
    ),
    indices={0: lambda node: node.attrs["size"] + 1},
    ascending=(0,),
    vjp=lambda g, y, offsets, **_: (DISCRETE,),
    samples=(
        Sample((np.array([0, 2, 2, 5]),), {"size": 7}),
        Sample((np.array([0, 3], np.int32),), {"size": 3}),
        Sample((np.zeros(0, np.int64),), {"size": 2}),
        Sample((np.array([0], np.uint8),), {"size": 0}),
        Sample((np.array([0, 0, 0]),), {"size": 4, "oob": "skip"}),
        Sample((np.array([0, 1, 1, 3, 4]),), {"size": 4, "oob": "ascending"}),
    ),
    bad=(
        BadSample(("f32[3]",), {"size": 4}, match="indices are f32"),
        BadSample(("i64[3,2]",), {"size": 4}, match="rank 2, not 1"),
    ),
    doc=(
        "the segment of each position 0..size-1, i64[size], where segment s begins at offsets[s]; -1 before the first"
        " segment. With oob='error' the offsets must begin with 0, not decrease, and not exceed size; 'ascending' says"
        " that they do so by how they are computed: nothing is checked"
    ),
)

# -- embedding_bag -----------------------------------------------------------------------------------------------------

Mode = Literal["sum", "mean", "max", "sqrtn"]


def _parts(indices: Any, offsets: Any, per_sample_weights: Any) -> tuple[Any, Any]:
    """(offsets, per_sample_weights): with 2-D indices, which need no offsets, a float third operand is the weights."""
    if per_sample_weights is None and offsets is not None and offsets.dtype.is_float and len(indices.shape) == 2:
        return None, offsets
    return offsets, per_sample_weights


def _embedding_bag(
    indices: Type,
    weight: Type,
    offsets: Type | None = None,
    per_sample_weights: Type | None = None,
    *,
    mode: Mode = "mean",
    include_last_offset: bool = False,
    padding_idx: Padding = None,
    scale_grad_by_freq: bool = False,
    oob: Bounds = "error",
) -> Any:
    offsets, per_sample_weights = _parts(indices, offsets, per_sample_weights)
    if floating(weight).rank != 2:
        raise TypeRuleError(f"the table has rank {weight.rank}, not 2")
    if index_type(indices).rank not in (1, 2):
        raise TypeRuleError(f"the indices {indices} have rank {indices.rank}: 1 with offsets, or 2")
    if (offsets is None) != (indices.rank == 2):
        raise TypeRuleError(
            "indices of rank 1 need offsets"
            if offsets is None
            else f"the rows of {indices} are the bags; offsets are for rank 1"
        )
    if offsets is None:
        if include_last_offset:
            raise TypeRuleError("include_last_offset without offsets")
        bags: Size = indices.shape[0]
    else:
        if index_type(offsets).rank != 1:
            raise TypeRuleError(f"the offsets {offsets} have rank {offsets.rank}, not 1")
        if include_last_offset and offsets.shape[0] == 0:
            raise TypeRuleError("include_last_offset wants 1 offset at least, got 0")
        bags = offsets.shape[0] - int(include_last_offset)
    if per_sample_weights is not None:
        if mode == "max":
            raise TypeRuleError("per_sample_weights have no meaning with mode='max'")
        if per_sample_weights.dtype is not weight.dtype:
            raise TypeRuleError(
                f"dtypes differ: {weight.dtype} and per_sample_weights {per_sample_weights.dtype}; write a cast"
            )
        if per_sample_weights.rank != indices.rank or not all(
            same(n, m) for n, m in zip(per_sample_weights.shape, indices.shape, strict=True)
        ):
            raise TypeRuleError(f"per_sample_weights {per_sample_weights} for the indices {indices}")
    if scale_grad_by_freq and mode == "max":
        raise TypeRuleError("scale_grad_by_freq has no meaning with mode='max'")
    attrs = {
        "mode": mode,
        "include_last_offset": include_last_offset,
        "padding_idx": _padding(padding_idx, weight.shape[0]),
        "scale_grad_by_freq": scale_grad_by_freq,
        "oob": oob,
    }
    return weight.with_shape(bags, weight.shape[1]), attrs


@dataclass(frozen=True)
class _Bags:
    """The intermediate values of one embedding_bag in its compute dtype, shared by value and vjp.

    A member is one index of a bag; padding and skipped indices belong to no bag.
    """

    indices: Node
    weight: Node
    offsets: Node | None
    factors: Node | None
    mode: str
    include_last_offset: bool
    padding_idx: Padding
    scale_grad_by_freq: bool
    oob: str

    @cached_property
    def kept(self) -> Node | None:
        """Mask of the members that are neither padding nor skipped; None if all count."""
        size, mask, place = self.weight.shape[0], None, converted(self.indices, I64)
        if self.oob == "skip":
            mask = logical_and(ge(place, 0), lt(place, call("dim", size=size)))
        if self.padding_idx is not None:
            other = unpadded(
                _as_resolved(self.indices, size, self.oob) if self.oob in ("clamp", "wrap") else place, self.padding_idx
            )
            mask = other if mask is None else logical_and(mask, other)
        return mask

    @cached_property
    def bag(self) -> Node:
        """The bag of each member: i64[N], for indices with offsets."""
        return segment_ids.plain(
            self.offsets, size=self.indices.shape[0], oob="skip" if self.oob == "skip" else "error"
        )

    @cached_property
    def place(self) -> Node:
        """The bag of each member, -1 for those that do not count."""
        return self.bag if self.kept is None else where(self.kept, self.bag, full(-1, self.bag))

    @property
    def bags(self) -> Size:
        return self.indices.shape[0] if self.offsets is None else self.offsets.shape[0] - int(self.include_last_offset)

    def wide(self, x: Node) -> Node:
        """A value per member ([N] or [B, L]) broadcast over the columns of the table."""
        return spread(reshaped(x, (*x.shape, 1)), (*x.shape, self.weight.shape[1]))

    def alone(self, x: Node, fill: Any = 0) -> Node:
        """x per member, with ``fill`` for those that do not count."""
        if self.kept is None:
            return x
        return where(self.wide(self.kept) if x.rank > self.indices.rank else self.kept, x, full(fill, x))

    def total(self, x: Node) -> Node:
        """The sum of x over the members of each bag."""
        if self.offsets is None:
            return converted(sum.plain(self.alone(x), axis=(1,)), x.dtype)
        return scatter_add.plain(self.place, x, axis=0, size=self.bags, oob="skip")

    def best(self, op: Any, scattered: Any, x: Node) -> Node:
        """The extremum of x over the members of each bag, per column."""
        if self.offsets is None:
            return op.plain(x, axis=(1,), empty="infinite")  # type: ignore[no-any-return]
        return scattered.plain(self.wide(self.place), x, axis=0, size=self.bags, oob="skip")  # type: ignore[no-any-return]

    def back(self, x: Node) -> Node:
        """A value per bag, gathered to each of its members: the adjoint of ``total``."""
        if self.offsets is None:
            return along(x, (*self.indices.shape, *x.shape[1:]), (1,))
        return gather.plain(x, self.bag, axis=0, oob="skip")

    @cached_property
    def raw(self) -> Node:
        return gather.plain(
            self.weight,
            self.indices,
            axis=0,
            oob=self.oob,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )

    @cached_property
    def rows(self) -> Node:
        return converted(self.raw, self.weight.dtype.compute)

    @cached_property
    def w(self) -> Node | None:
        return None if self.factors is None else converted(self.factors, self.weight.dtype.compute)

    @cached_property
    def members(self) -> Node:
        """The number of members of each bag that count: i64[B]."""
        if self.offsets is None and self.kept is None:
            return spread(call("dim", size=self.indices.shape[1]), (self.bags,))
        if self.kept is None:
            return self.lengths
        return self.total(full(1, self.indices, I64))

    @property
    def lengths(self) -> Node:
        """The number of positions of each bag, from where it and the next one begin: i64[B].  Without ``oob="skip"``,
        which has a mask of what it keeps, offsets ascend.
        """
        assert self.offsets is not None
        line, at = converted(self.offsets, I64), iota(shape=(self.bags,))
        begin, end = (gather.plain(line, place, axis=0, oob="clamp") for place in (at, at + full(1, at)))
        if not self.include_last_offset:
            last = eq(at, spread(call("dim", size=self.bags - 1), at.shape))
            end = where(last, spread(call("dim", size=self.indices.shape[0]), at.shape), end)
        return end - begin

    @cached_property
    def divisor(self) -> Node | None:
        """r of each bag: sum w (mean) or sqrt(sum w^2) (sqrtn); 1 for an empty bag; None for sum."""
        if self.mode == "sum":
            return None
        if self.w is None:
            count = converted(maximum(self.members, full(1, self.members)), self.rows.dtype)
            return count if self.mode == "mean" else sqrt(count)
        r = self.total(self.w if self.mode == "mean" else self.w * self.w)
        r = where(gt(self.members, full(0, self.members)), r, full(1, r))
        return r if self.mode == "mean" else sqrt(r)

    def divided(self, x: Node) -> Node:
        return x if self.divisor is None else x / along(self.divisor, x.shape, (1,))

    @cached_property
    def largest(self) -> Node:
        return self.best(
            amax, scatter_amax, self.alone(self.rows, -float("inf")) if self.offsets is None else self.rows
        )

    @cached_property
    def filled(self) -> Node:
        """Mask of the bags that have members, broadcast over the columns."""
        return along(gt(self.members, full(0, self.members)), (self.bags, self.weight.shape[1]), (1,))

    @cached_property
    def value(self) -> Node:
        if self.mode == "max":
            return where(self.filled, self.largest, zeros_like(self.largest))
        return self.divided(self.total(self.rows if self.w is None else self.rows * self.wide(self.w)))

    def of_rows(self, g: Node) -> Node:
        """The gradient of each member's row."""
        if self.mode != "max":
            back = self.back(self.divided(g))
            return back if self.w is None else back * self.wide(self.w)
        winner = bitwise_or(
            eq(self.rows, self.back(self.largest)), ne(self.rows, self.rows)
        )  # NaN is the largest; of equal members the first gets all of g
        winner = winner if self.kept is None else logical_and(winner, self.wide(self.kept))
        axis = self.indices.rank - 1
        line = iota(shape=self.rows.shape, axis=axis)
        late = full(2**62, line)
        first = self.back(self.best(amin, scatter_amin, where(winner, line, late)))
        return where(logical_and(winner, eq(first, line)), self.back(g), zeros_like(self.rows))

    def of_factors(self, g: Node) -> Node:
        """dw_j = dy.x_j (sum), dy.(x_j - y)/r (mean), (dy.x_j - w_j (dy.y)/r)/r (sqrtn)."""
        assert self.w is not None
        x = self.rows
        if self.mode == "mean":
            x = x - self.back(self.value)
        elif self.mode == "sqrtn":
            x = x - self.wide(self.w) * self.back(self.divided(self.value))
        return self.alone(sum.plain(self.back(self.divided(g)) * x, axis=(self.indices.rank,)))


def _bags(
    indices: Node, weight: Node, offsets: Node | None, per_sample_weights: Node | None, attrs: dict[str, Any]
) -> _Bags:
    return _Bags(indices, weight, *_parts(indices, offsets, per_sample_weights), **attrs)


def _bag_value(
    indices: Node, weight: Node, offsets: Node | None = None, per_sample_weights: Node | None = None, **attrs: Any
) -> Node:
    return converted(_bags(indices, weight, offsets, per_sample_weights, attrs).value, weight.dtype)


def _bag_vjp(
    g: Node,
    y: Node,
    indices: Node,
    weight: Node,
    offsets: Node | None = None,
    per_sample_weights: Node | None = None,
    **attrs: Any,
) -> tuple[Any, ...]:
    # with r per bag (sum: 1, mean: sum w, sqrtn: sqrt(sum w^2)) and a member j: the gradient of its row is w_j g / r;
    # for max it is g at the first maximum of each column; dw_j = g.x_j (sum), g.(x_j - y) / r (mean), (g.x_j - w_j
    # (g.y) / r) / r (sqrtn)
    b = _bags(indices, weight, offsets, per_sample_weights, attrs)
    g = converted(g, b.rows.dtype)
    of_weight, _ = gather.vjp(b.of_rows(g), b.raw, *b.raw.operands, **b.raw.attrs)  # type: ignore[misc]
    entries = [DISCRETE, converted(of_weight, weight.dtype)]
    if b.offsets is not None:
        entries.append(DISCRETE)
    return (*entries, *([converted(b.of_factors(g), weight.dtype)] if b.w is not None else []))


def _bag_call(
    indices: Any,
    weight: Any,
    offsets: Any = None,
    per_sample_weights: Any = None,
    *,
    mode: Mode = "mean",
    include_last_offset: bool = False,
    padding_idx: Padding = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    oob: Bounds = "error",
) -> Node:
    given = [
        adopt("embedding_bag", [o], broadcasting=False)[0]
        for o in (indices, weight, offsets, per_sample_weights)
        if o is not None
    ]
    if max_norm is not None:
        given[1] = embedding_renorm.plain(given[1], given[0], max_norm=max_norm, norm_type=norm_type, oob=oob)
    if offsets is None and per_sample_weights is not None and given[0].rank != 2:
        raise TypeRuleError("indices of rank 1 need offsets")
    return embedding_bag.apply(
        given,
        {
            "mode": mode,
            "include_last_offset": include_last_offset,
            "padding_idx": padding_idx,
            "scale_grad_by_freq": scale_grad_by_freq,
            "oob": oob,
        },
    )


_OFFSETS, _LONG = np.array([0, 2, 2, 5]), np.array([4, 1, 3, 3, 0, 3, 1])
_ONE = (_LONG, "F[5,3]", _OFFSETS)
_DRAW = ("index:5", "normal", "index:1", "positive")
embedding_bag: Composite = Composite(
    "embedding_bag",
    implies=lambda node: padding_exists(node.attrs["padding_idx"], node.operands[1].shape[0]),
    infer=_embedding_bag,
    decompose=_bag_value,
    vjp=_bag_vjp,
    sugar=_bag_call,
    indices={0: lambda node: node.operands[1].shape[0]},
    samples=(
        *(Sample(("i64[N,4]", "F[5,3]"), {"mode": mode}, draw=_DRAW) for mode in ("sum", "mean", "max", "sqrtn")),
        *(
            Sample(("i32[3,N]", "F[5,3]"), {"mode": mode, "padding_idx": 1}, draw=_DRAW)
            for mode in ("sum", "mean", "max", "sqrtn")
        ),
        *(Sample(_ONE, {"mode": mode}, draw=_DRAW) for mode in ("sum", "mean", "max", "sqrtn")),
        *(
            Sample(_ONE, {"mode": mode, "padding_idx": -2, "include_last_offset": True}, draw=_DRAW)
            for mode in ("sum", "mean", "max", "sqrtn")
        ),
        *(Sample((*_ONE, "F[7]"), {"mode": mode, "padding_idx": 0}, draw=_DRAW) for mode in ("sum", "mean", "sqrtn")),
        *(
            Sample(
                ("u8[N,4]", "F[5,3]", "F[N,4]"),
                {"mode": mode, "padding_idx": 2},
                draw=("index:5", "normal", "positive"),
            )
            for mode in ("sum", "mean", "sqrtn")
        ),
        Sample(_ONE, {"mode": "mean", "scale_grad_by_freq": True, "max_norm": 1.0}, draw=_DRAW),
        Sample(("i64[N]", "F[5,3]", np.zeros(2, np.int64)), {"mode": "sum"}, draw=_DRAW),
        Sample(("i8[N,4]", "F[3,2]"), {"mode": "mean", "oob": "skip"}, draw=("int", "normal")),
        Sample(("i8[N,4]", "F[3,2]"), {"mode": "max", "oob": "wrap", "padding_idx": 1}, draw=("int", "normal")),
    ),
    bad=(
        BadSample(("i64[7]", "f32[5,3]"), match="rank 1 need offsets"),
        BadSample(("i64[7,2]", "f32[5,3]", "i64[2]"), match="offsets are for rank 1"),
        BadSample(("f32[7,2]", "f32[5,3]"), match="indices are f32"),
        BadSample(("i64[7]", "f32[5,3]", "i64[2]", "f32[6]"), match="per_sample_weights f32[6]"),
        BadSample(("i64[7]", "f32[5,3]", "i64[2]", "f64[7]"), match="dtypes differ"),
        BadSample(("i64[7]", "f32[5,3]", "i64[2,1]"), match="rank 2, not 1"),
        BadSample(("i64[7,2]", "f32[5,3]", "f32[7,2]"), {"mode": "max"}, match="no meaning with mode='max'"),
        BadSample(("i64[7,2]", "f32[5,3]"), {"mode": "median"}, match="mode='median'"),
        BadSample(("i64[2,2,2]", "f32[5,3]"), match="rank 3"),
        BadSample(("i64[7]", "f32[5,3]", "i64[0]"), {"include_last_offset": True}, match="1 offset at least, got 0"),
        BadSample(("i64[7,2]", "i8[5,3]"), match="i8 is no float"),
    ),
    doc=(
        "rows of a table reduced over each bag: weighted sum (sum), divided by the sum of weights (mean) or by the root"
        " of the sum of squared weights (sqrtn), or the maximum (max); a bag is a row of 2-D indices, or begins at an"
        " offset into 1-D indices; padding does not count, an empty bag gives 0; oob defaults to 'error' here and to"
        " 'skip' in gradc.plans"
    ),
    source="torch.nn.functional.embedding_bag; tf.nn.embedding_lookup_sparse (sqrtn)",
)
