"""Data-dependent reads and their adjoints: gather, scatter_add, take_along_axis, scatter_add_along_axis; torch's
index_select and index_add; check_index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import IndexOutOfRange, NotAscending, TypeRuleError
from ...ir.dims import Assumption, Dim, Size, known_nonnegative, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Checked, Composite, Movement, Primitive, Sample, Scatter
from ...ir.properties import Bounds, Gathers, GathersElements, Scatters
from ...ir.ranges import inside
from ...ir.statement import Index
from ...ir.types import DTYPES, I32, I64, DType, Type
from ..elementwise.pointwise import mul
from ..rules import canonical_axis, converted, full, number, reshaped, spread, summing

INDEX_DTYPES = ("i8", "i16", "i32", "i64", "u2", "u4", "u8")


def index_type(type: Type) -> Type:
    if type.dtype.name not in INDEX_DTYPES:
        raise TypeRuleError(
            f"indices are {type.dtype}; they may be {' '.join(INDEX_DTYPES)}: write ops.cast(indices, 'i64')"
        )
    return type


Padding = int | Dim | None


def _padding(padding_idx: Padding, size: Size) -> Padding:
    """``padding_idx`` counted from 0; for a symbolic size, :func:`padding_exists` gives what the call must check."""
    if padding_idx is None or isinstance(padding_idx, Dim):
        return padding_idx
    if not isinstance(size, int):
        return size + padding_idx if padding_idx < 0 else padding_idx
    if not -size <= padding_idx < size:
        raise TypeRuleError(f"padding_idx={padding_idx} of {size} rows: {-size} to {size - 1} exist")
    return padding_idx % size


def padding_exists(padding_idx: Padding, size: Size) -> list[Assumption]:
    """The assumptions for 0 <= padding_idx < size, unless that is known already."""
    if padding_idx is None:
        return []
    least = size - padding_idx if isinstance(padding_idx, Dim) else 0  # counted from the end
    if isinstance(least, int):
        return [Assumption(size, ">=", least or padding_idx + 1)] if not isinstance(size, int) else []
    return [Assumption(padding_idx, ">=", 0), Assumption(size, ">=", padding_idx + 1)]


def unpadded(place: Node, padding_idx: Padding) -> Node:
    """Mask of the positions that differ from padding_idx, compared in i64."""
    return call("ne", converted(place, I64), padding_idx)


def in_range(place: Node, size: Size) -> Node:
    """Mask of the positions in [0, size)."""
    wide = converted(place, I64)
    return call(
        "bitwise_and", call("ge", wide, full(0, wide)), call("lt", wide, spread(call("dim", size=size), wide.shape))
    )


def check_positions(op: str, name: str, values: Any, bound: int, *, ascending: bool = False) -> None:
    """Checks that every value is in [0, bound) and, if ``ascending``, that the first is 0 and none decreases.

    :raises IndexOutOfRange, NotAscending: for the first value that is wrong, with its flat position.
    """
    line = np.asarray(values).reshape(-1)
    if ascending and line.size:
        check_positions(op, name, line[:1], 1)
    outside = (line < 0) | (line >= bound)
    below = (
        np.concatenate([np.zeros(min(line.size, 1), bool), line[1:] < line[:-1]])
        if ascending
        else np.zeros(line.shape, bool)
    )
    if (outside | below).any():
        position = int(np.argmax(outside | below))
        if below[position]:
            raise NotAscending(op, name, position, int(line[position]), int(line[position - 1]))
        raise IndexOutOfRange(op, name, position, int(line[position]), bound)


# -- what an index means under each rule for bounds --------------------------------------------------------------------


def resolve(raw: Any, size: int, oob: str, op: str, name: str = "indices") -> tuple[Any, Any]:
    """NumPy: (positions in [0, size), mask of those that read a row), under the rule ``oob``."""
    raw = np.asarray(raw).astype(np.int64)
    inside = (raw >= 0) & (raw < size)
    if oob == "error":
        check_positions(op, name, raw, size)
    if oob == "clamp":
        return np.clip(raw, 0, max(size - 1, 0)), np.full(raw.shape, size > 0)
    if oob == "wrap":
        return raw % max(size, 1), np.full(raw.shape, size > 0)
    return np.where(inside, raw, 0), inside


def _resolve_at(value: Any, size: Size, oob: str, kernel: Any) -> tuple[Index, Any]:
    """Kernel statements for the rule ``oob``: (index, mask of the positions that read a row, or None for all)."""
    if oob in ("clamp", "wrap"):
        value = kernel.clamp_index(value, size, oob)
        return Index.of(value), (
            None if known_nonnegative(size - 1) else kernel.in_bounds(Index.of(value), 0, size)
        )  # if the axis may be empty, clamped positions may still be outside it
    if oob == "skip":
        return Index.of(value), kernel.in_bounds(Index.of(value), 0, size)
    return Index.of(value), None


# -- positions that are checked before anything is read through them ---------------------------------------------------


def _check_index(indices: Type, *, bound: int | Dim, op: str = "check_index", ascending: bool = False) -> Type:
    if ascending and indices.rank != 1:
        raise TypeRuleError(f"the indices {indices} have rank {indices.rank}; those that ascend have 1")
    return index_type(indices)


def _checked_reference(indices: Any, *, bound: int, op: str, ascending: bool) -> Any:
    check_positions(op, "indices", np.asarray(indices).astype(np.int64), bound, ascending=ascending)
    return indices


check_index = Primitive(
    "check_index",
    infer=_check_index,
    reference=_checked_reference,
    lower=Checked(lambda index, node, kernel: kernel.read(node.operands[0], index)),
    in_place_of_dtype=True,
    within=lambda node, _: inside(node.attrs["bound"]),
    indices={0: lambda node: node.attrs["bound"]},
    vjp=lambda g, y, indices, **_: (g,),
    samples=(
        Sample(("i64[N]",), {"bound": 5}, draw=("index:5",)),
        Sample(("u8[2,N]",), {"bound": 5}, draw=("index:5",)),
    ),
    bad=(
        BadSample(("f32[2]",), {"bound": 5}, match="indices are f32"),
        BadSample(("i64[2,3]",), {"bound": 5, "ascending": True}, match="rank 2"),
    ),
    doc=(
        "the indices, after a check that each is in [0, bound), made before any kernel reads through them; the error,"
        " IndexOutOfRange, names op. The pass check_indices inserts it before each access with oob='error'"
    ),
)

# -- gather and scatter_add: whole slices along one axis ---------------------------------------------------------------


def _gather(
    x: Type,
    indices: Type,
    *,
    axis: int = 0,
    oob: Bounds = "error",
    padding_idx: Padding = None,
    scale_grad_by_freq: bool = False,
) -> Any:
    axis = canonical_axis(axis, x.rank)
    shape = (*x.shape[:axis], *index_type(indices).shape, *x.shape[axis + 1 :])
    return x.with_shape(*shape), {
        "axis": axis,
        "oob": oob,
        "padding_idx": _padding(padding_idx, x.shape[axis]),
        "scale_grad_by_freq": scale_grad_by_freq,
    }


def _gather_reference(x: Any, indices: Any, *, axis: int, oob: str, **_: Any) -> Any:
    where, counts = resolve(indices, x.shape[axis], oob, "gather")
    if not x.shape[axis] and where.size:
        return np.zeros((*x.shape[:axis], *where.shape, *x.shape[axis + 1 :])).astype(x.dtype)
    rows = np.take(x, where, axis)
    mask = counts.reshape((1,) * axis + counts.shape + (1,) * (x.ndim - axis - 1))
    return np.where(mask, rows, np.zeros(()).astype(x.dtype)) if oob == "skip" else rows


def _gather_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    x, indices = node.operands
    axis, rank = node.attrs["axis"], indices.rank
    value = kernel.read(indices, index[axis : axis + rank])
    where_, mask = _resolve_at(value, x.shape[axis], node.attrs["oob"], kernel)
    return kernel.read(x, [*index[:axis], where_, *index[axis + rank :]], where=mask, other=0)


def row_share(indices: Node, size: Size, dtype: DType, *, oob: str, padding_idx: Padding) -> Node:
    """1 / (number of indices with the same value), the factor of scale_grad_by_freq; shape of the indices; padding is
    not counted.
    """
    counts = scatter_add.plain(indices, full(1, indices, I32), axis=0, size=size, oob=oob, padding_idx=padding_idx)
    count = converted(call("maximum", gather.plain(counts, indices, axis=0, oob=oob), 1), dtype)  # padding has count 0
    return full(1, count) / count


def _gather_vjp(
    g: Node, y: Node, x: Node, indices: Node, *, axis: int, oob: str, padding_idx: Padding, scale_grad_by_freq: bool
) -> tuple[Any, Any]:
    # dx[i] = sum of g over the positions that read i, divided by their number with scale_grad_by_freq; 0 for
    # padding_idx
    size = x.shape[axis]
    if scale_grad_by_freq:
        share = reshaped(
            row_share(indices, size, g.dtype.compute, oob=oob, padding_idx=padding_idx),
            (1,) * axis + indices.shape + (1,) * (x.rank - axis - 1),
        )
        g = converted(mul(converted(g, share.dtype), spread(share, g.shape)), g.dtype)
    return scatter_add.plain(indices, g, axis=axis, size=size, oob=oob, padding_idx=padding_idx), DISCRETE


def _gather_surrogate(
    x: Node, indices: Node, *, axis: int, oob: str, padding_idx: Padding, scale_grad_by_freq: bool
) -> Node:
    """The rows, with derivative 0 for padding and 1/k for a row read k times (scale_grad_by_freq)."""
    rows = gather.plain(x, indices, axis=axis, oob=oob)
    if not x.dtype.is_float or (padding_idx is None and not scale_grad_by_freq):
        return rows
    place = indices if oob in ("error", "skip") else _as_resolved(indices, x.shape[axis], oob)
    share = full(1, place, rows.dtype)
    if scale_grad_by_freq:
        share = share / gather.plain(
            scatter_add.plain(indices, share, axis=0, size=x.shape[axis], oob=oob), indices, axis=0, oob=oob
        )
    if padding_idx is not None:
        share = call("where", unpadded(place, padding_idx), share, full(0, share))
    held = call("stop_gradient", rows)
    return held + spread(reshaped(share, (1,) * axis + indices.shape + (1,) * (x.rank - axis - 1)), rows.shape) * (
        rows - held
    )


def _gather_map(node: Node) -> dict[int, tuple[int | None, ...]]:
    axis, rank = node.attrs["axis"], node.operands[1].rank
    return {0: tuple(a if a < axis else None if a == axis else a + rank - 1 for a in range(node.operands[0].rank))}


_TABLE = ("index:5",)
gather = Primitive(
    "gather",
    infer=_gather,
    reference=_gather_reference,
    lower=Movement(_gather_at),
    vjp=_gather_vjp,
    surrogate=_gather_surrogate,
    implies=lambda node: padding_exists(node.attrs["padding_idx"], node.operands[0].shape[node.attrs["axis"]]),
    access=lambda node: Gathers(0, 1, **node.attrs),
    multilinear=_gather_map,
    fills=True,
    indices={1: lambda node: node.operands[0].shape[node.attrs["axis"]]},
    in_place_of_dtype=True,
    samples=(
        Sample(("F[5,3]", "i64[N]"), draw=("normal", *_TABLE)),
        Sample(("F[5,3]", "i32[2,N]"), draw=("normal", *_TABLE)),
        Sample(("F[5]", "i64[]"), draw=("normal", *_TABLE)),
        Sample(("F[2,5,3]", "u8[N]"), {"axis": 1}, draw=("normal", *_TABLE)),
        Sample(("F[5,N]", "i16[4]"), {"padding_idx": 2, "scale_grad_by_freq": True}, draw=("normal", *_TABLE)),
        Sample(("F[3,2]", "i64[N]"), {"oob": "skip"}, draw=("normal", "index:5")),
        Sample(("F[3,2]", "i8[N]"), {"oob": "clamp"}, draw=("normal", "int")),
        Sample(("F[3,2]", "i8[N]"), {"oob": "wrap"}, draw=("normal", "int")),
    ),
    bad=(
        BadSample(("f32[5,3]", "f32[2]"), match="indices are f32"),
        BadSample(("f32[5,3]", "i64[2]"), {"padding_idx": 5}, match="padding_idx=5 of 5 rows"),
        BadSample(("f32[5,3]", "i64[2]"), {"oob": "ignore"}, match="oob='ignore'"),
    ),
    doc=(
        "slices of x at integer positions along an axis (numpy.take); padding_idx and scale_grad_by_freq affect only"
        " the gradient. An index out of range raises IndexOutOfRange (oob='error'), reads zeros ('skip'), is clamped to"
        " the nearest end ('clamp') or taken modulo the size ('wrap'); on an axis of size 0, clamp and wrap read zeros"
        " too, and scattered updates are dropped"
    ),
)


def _scatter_add(
    indices: Type, updates: Type, *, axis: int = 0, size: int | Dim, oob: Bounds = "error", padding_idx: Padding = None
) -> Any:
    rank = index_type(indices).rank
    if not 0 <= axis <= updates.rank - rank:
        raise TypeRuleError(f"axis={axis} with indices of rank {rank} in updates of rank {updates.rank}")
    for a, (n, m) in enumerate(zip(indices.shape, updates.shape[axis : axis + rank], strict=True)):
        if not same(n, m):
            raise TypeRuleError(f"indices have {n} and updates {m} on axis {axis + a}")
    shape = (*updates.shape[:axis], size, *updates.shape[axis + rank :])
    return number(updates).with_shape(*shape), {
        "axis": axis,
        "size": size,
        "oob": oob,
        "padding_idx": _padding(padding_idx, size),
    }


def _scatter_reference(indices: Any, updates: Any, *, axis: int, size: int, oob: str, padding_idx: Padding) -> Any:
    where, counts = resolve(indices, size, oob, "scatter_add")
    if padding_idx is not None:
        counts = counts & (where != padding_idx)
    rank = indices.ndim
    out = np.zeros((size, *updates.shape[:axis], *updates.shape[axis + rank :]), summing(updates.dtype))
    rows = np.moveaxis(updates, range(axis, axis + rank), range(rank)).reshape((where.size, *out.shape[1:]))
    keep = counts.reshape(-1)
    np.add.at(out, where.reshape(-1)[keep], rows[keep])
    return np.moveaxis(out, 0, axis).astype(updates.dtype)


def _scatter_at(index: Sequence[Index], node: Node, kernel: Any) -> tuple[list[Index], Any]:
    indices = node.operands[0]
    axis, rank = node.attrs["axis"], indices.rank
    value = kernel.read(indices, index[axis : axis + rank])
    where_, mask = _resolve_at(value, node.attrs["size"], node.attrs["oob"], kernel)
    if node.attrs["padding_idx"] is not None:
        mask = kernel.both(mask, kernel.differs(where_, node.attrs["padding_idx"]))
    return [*index[:axis], where_, *index[axis + rank :]], mask


def _scatter_vjp(
    g: Node, y: Node, indices: Node, updates: Node, *, axis: int, size: Size, oob: str, padding_idx: Padding
) -> tuple[Any, Node]:
    # du = g at the indices; 0 for padding_idx
    back = gather.plain(g, indices, axis=axis, oob=oob)
    if padding_idx is not None:
        kept = unpadded(indices if oob in ("error", "skip") else _as_resolved(indices, size, oob), padding_idx)
        kept = reshaped(kept, (1,) * axis + indices.shape + (1,) * (updates.rank - axis - indices.rank))
        back = call("where", spread(kept, back.shape), back, full(0, back))
    return DISCRETE, back


def _as_resolved(indices: Node, size: Size, oob: str) -> Node:
    wide = converted(indices, DTYPES["i64"])
    limit = call("dim", size=size)
    if oob == "wrap":
        return call("mod", wide, spread(limit, wide.shape))
    return call("maximum", call("minimum", wide, spread(limit - 1, wide.shape)), full(0, wide))


def _scatter_map(node: Node) -> dict[int, tuple[int | None, ...]]:
    axis, rank = node.attrs["axis"], node.operands[0].rank
    return {
        1: tuple(a if a < axis else None if a < axis + rank else a - rank + 1 for a in range(node.operands[1].rank))
    }


scatter_add = Primitive(
    "scatter_add",
    infer=_scatter_add,
    reference=_scatter_reference,
    implies=lambda node: padding_exists(node.attrs["padding_idx"], node.attrs["size"]),
    lower=Scatter(_scatter_at, updates=1),
    vjp=_scatter_vjp,
    access=lambda node: Scatters(0, 1, **{k: v for k, v in node.attrs.items() if k != "size"}),
    multilinear=_scatter_map,
    indices={0: lambda node: node.attrs["size"]},
    samples=(
        Sample(("i64[N]", "F[N,3]"), {"size": 5}, draw=("index:5", "normal")),
        Sample(("i32[2,N]", "F[2,N,3]"), {"size": 5}, draw=("index:5", "normal")),
        Sample(("i64[N]", "F[N]"), {"size": 5}, draw=("index:5", "normal")),
        Sample(("i64[N]", "F[2,N,3]"), {"size": 5, "axis": 1}, draw=("index:5", "normal")),
        Sample(("i64[N]", "F[N,3]"), {"size": 5, "padding_idx": 2}, draw=("index:5", "normal")),
        Sample(("i64[N]", "F[N,3]"), {"size": 3, "oob": "skip"}, draw=("index:5", "normal")),
        Sample(("i8[N]", "F[N,2]"), {"size": 3, "oob": "wrap", "padding_idx": 1}, draw=("int", "normal")),
        Sample(("i64[]", "F[3]"), {"size": 5}, draw=("index:5", "normal")),
        Sample(("i8[N]", "F[N,2]"), {"size": 3, "oob": "clamp"}, draw=("int", "normal")),
        Sample(("i64[N]", "i32[N]"), {"size": 5}, draw=("index:5", "int")),
    ),
    bad=(
        BadSample(("i64[4]", "f32[3,2]"), {"size": 5}, match="indices have 4 and updates 3"),
        BadSample(("i64[4]", "f32[4]"), {"size": 5, "axis": 1}, match="axis=1"),
    ),
    doc="zeros with updates added at integer positions along an axis of the given size: the adjoint of gather",
)

# -- along an axis: one index per element ------------------------------------------------------------------------------


def _take(x: Type, indices: Type, *, axis: int, oob: Bounds = "error") -> Any:
    axis = canonical_axis(axis, x.rank)
    if index_type(indices).rank != x.rank:
        raise TypeRuleError(f"indices have rank {indices.rank}, the operand {x.rank}")
    for a, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if a != axis and not same(n, m):
            raise TypeRuleError(f"the operand has {n} and the indices {m} on axis {a}")
    return x.with_shape(*indices.shape), {"axis": axis, "oob": oob}


def _take_reference(x: Any, indices: Any, *, axis: int, oob: str) -> Any:
    where, counts = resolve(indices, x.shape[axis], oob, "take_along_axis")
    if not x.shape[axis]:
        return np.zeros(indices.shape).astype(x.dtype)
    rows = np.take_along_axis(x, where, axis)
    return np.where(counts, rows, np.zeros(()).astype(x.dtype)) if oob == "skip" else rows


def _take_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    x, indices = node.operands
    axis = node.attrs["axis"]
    where_, mask = _resolve_at(kernel.read(indices, index), x.shape[axis], node.attrs["oob"], kernel)
    return kernel.read(x, [where_ if a == axis else i for a, i in enumerate(index)], where=mask, other=0)


def _take_vjp(g: Node, y: Node, x: Node, indices: Node, *, axis: int, oob: Bounds) -> tuple[Node, Any]:
    """`scatter_add_along_axis` of g; where there is one index for each line, g at this place and 0 elsewhere, which is
    computed where it is read.
    """
    size = x.shape[axis]
    if indices.shape[axis] != 1 or oob not in ("error", "skip"):
        return scatter_add_along_axis.plain(indices, g, axis=axis, size=size, oob=oob), DISCRETE
    places = call("iota", shape=x.shape, axis=axis, dtype=I64)
    here = call("eq", places, spread(converted(indices, I64), x.shape))
    return call("where", here, spread(g, x.shape), full(0, x)), DISCRETE


def _put(indices: Type, updates: Type, *, axis: int, size: int | Dim, oob: Bounds = "error") -> Any:
    axis = canonical_axis(axis, updates.rank)
    if index_type(indices).rank != updates.rank or not all(
        same(n, m) for n, m in zip(indices.shape, updates.shape, strict=True)
    ):
        raise TypeRuleError(f"indices {indices} and updates {updates} have different shapes")
    return number(updates).with_shape(*(size if a == axis else n for a, n in enumerate(updates.shape))), {
        "axis": axis,
        "size": size,
        "oob": oob,
    }


def _put_reference(indices: Any, updates: Any, *, axis: int, size: int, oob: str) -> Any:
    where, counts = resolve(indices, size, oob, "scatter_add_along_axis")
    out = np.zeros([size if a == axis else n for a, n in enumerate(updates.shape)], summing(updates.dtype))
    places = list(np.indices(updates.shape, sparse=False))
    places[axis] = where
    np.add.at(out, tuple(p[counts] for p in places), updates[counts])
    return out.astype(updates.dtype)


def _put_at(index: Sequence[Index], node: Node, kernel: Any) -> tuple[list[Index], Any]:
    axis = node.attrs["axis"]
    where_, mask = _resolve_at(kernel.read(node.operands[0], index), node.attrs["size"], node.attrs["oob"], kernel)
    return [where_ if a == axis else i for a, i in enumerate(index)], mask


take_along_axis = Primitive(
    "take_along_axis",
    infer=_take,
    reference=_take_reference,
    lower=Movement(_take_at),
    indices={1: lambda node: node.operands[0].shape[node.attrs["axis"]]},
    in_place_of_dtype=True,
    vjp=_take_vjp,
    access=lambda node: GathersElements(0, 1, **node.attrs),
    multilinear=lambda node: {0: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank))},
    fills=True,
    samples=(
        Sample(("F[5,3]", "i64[N,3]"), {"axis": 0}, draw=("normal", "index:5")),
        Sample(("F[N,5]", "i64[N,1]"), {"axis": -1}, draw=("normal", "index:5")),
        Sample(("F[2,5,3]", "i32[2,4,3]"), {"axis": 1}, draw=("normal", "index:5")),
    ),
    bad=(
        BadSample(("f32[5,3]", "i64[2]"), {"axis": 0}, match="rank 1"),
        BadSample(("f32[5,3]", "i64[2,4]"), {"axis": 0}, match="3 and the indices 4"),
    ),
    doc="one element per index along an axis (numpy.take_along_axis)",
)
scatter_add_along_axis: Primitive = Primitive(
    "scatter_add_along_axis",
    infer=_put,
    reference=_put_reference,
    lower=Scatter(_put_at, updates=1, positions=lambda node: tuple(range(node.rank))),
    indices={0: lambda node: node.attrs["size"]},
    vjp=lambda g, y, indices, updates, *, axis, size, oob: (
        DISCRETE,
        take_along_axis.plain(g, indices, axis=axis, oob=oob),
    ),
    multilinear=lambda node: {1: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank))},
    samples=(
        Sample(("i64[N,3]", "F[N,3]"), {"axis": 0, "size": 5}, draw=("index:5", "normal")),
        Sample(("i64[N,2]", "F[N,2]"), {"axis": 1, "size": 5}, draw=("index:5", "normal")),
    ),
    bad=(BadSample(("i64[4,3]", "f32[3,3]"), {"axis": 0, "size": 5}, match="different shapes"),),
    doc="zeros with each update added at its index along an axis: the adjoint of take_along_axis",
)

# -- index_select and index_add: torch's names -------------------------------------------------------------------------


def _index_select(input: Type, index: Type, *, dim: int, oob: Bounds = "error") -> Any:
    dim = canonical_axis(dim, max(input.rank, 1), "dim")
    if index_type(index).rank > 1:
        raise TypeRuleError(f"the index {index} has rank {index.rank}: 0 or 1")
    if input.rank == 0 and index.count != 1:
        raise TypeRuleError(f"the index {index} has {index.count} elements; of a scalar it selects 1")
    return input.with_shape(*(index.count if a == dim else n for a, n in enumerate(input.shape))), {
        "dim": dim,
        "oob": oob,
    }


def _index_select_value(input: Node, index: Node, *, dim: int, oob: str) -> Node:
    rows = gather.plain(
        input if input.rank else reshaped(input, (1,)), reshaped(index, (index.type.count,)), axis=dim, oob=oob
    )
    return rows if input.rank else reshaped(rows, ())


index_select = Composite(
    "index_select",
    infer=_index_select,
    decompose=_index_select_value,
    order=("input", "dim", "index", "oob"),
    indices={1: lambda node: node.operands[0].shape[node.attrs["dim"]] if node.operands[0].rank else 1},
    samples=(
        Sample(("F[5,3]", "i64[N]"), {"dim": 0}, draw=("normal", *_TABLE)),
        Sample(("F[2,5,N]", "i32[4]"), {"dim": -2}, draw=("normal", *_TABLE)),
        Sample(("F[5]", "u8[]"), {"dim": 0}, draw=("normal", *_TABLE)),
        Sample(("F[]", "i64[1]"), {"dim": 0}, draw=("normal", "index:1")),
        Sample(("i8[5,3]", "i64[N]"), {"dim": 0}, draw=("int", *_TABLE)),
    ),
    bad=(
        BadSample(("f32[5,3]", "i64[2,2]"), {"dim": 0}, match="rank 2: 0 or 1"),
        BadSample(("f32[5,3]", "bool[5]"), {"dim": 0}, match="ops.cast(indices, 'i64')"),
        BadSample(("f32[5,3]", "i64[2]"), {"dim": 2}, match="dim=2"),
    ),
    doc="the slices of input at the positions in index along dim",
    source="torch.index_select",
)


def _index_add(
    input: Type, index: Type, source: Type, *, dim: int, alpha: int | float = 1, oob: Bounds = "error"
) -> Any:
    wanted, attrs = _index_select(number(input), index, dim=dim, oob=oob)
    if source.dtype is not input.dtype:
        raise TypeRuleError(f"dtypes differ: {input.dtype} and {source.dtype}; write a cast")
    shape = (
        wanted.shape
        if index.rank or source.rank == input.rank
        else tuple(n for a, n in enumerate(wanted.shape) if a != attrs["dim"])
    )
    if source.rank != len(shape) or not all(same(n, m) for n, m in zip(source.shape, shape, strict=True)):
        raise TypeRuleError(
            f"source {source} for {index} on axis {attrs['dim']} of {input}: its shape should be"
            f" {input.with_shape(*shape)}"
        )
    if input.dtype.is_integer and isinstance(alpha, float):
        raise TypeRuleError(f"alpha={alpha} of an {input.dtype} operand is no int")
    if input.dtype.is_integer:
        input.dtype.literal(alpha)  # raises where it does not fit
    return input, {**attrs, "alpha": alpha}


def _index_add_value(input: Node, index: Node, source: Node, *, dim: int, alpha: int | float, oob: str) -> Node:
    whole = input if input.rank else reshaped(input, (1,))
    count = index.type.count
    part = converted(
        reshaped(source, tuple(count if a == dim else n for a, n in enumerate(whole.shape))), input.dtype.compute
    )
    scaled = part if alpha == 1 else part * alpha
    total = converted(whole, part.dtype) + scatter_add.plain(
        reshaped(index, (count,)), scaled, axis=dim, size=whole.shape[dim], oob=oob
    )
    return reshaped(converted(total, input.dtype), input.shape)


index_add = Composite(
    "index_add",
    infer=_index_add,
    decompose=_index_add_value,
    order=("input", "dim", "index", "source", "alpha", "oob"),
    indices={1: lambda node: node.operands[0].shape[node.attrs["dim"]] if node.operands[0].rank else 1},
    samples=(
        Sample(("F[5,3]", "i64[N]", "F[N,3]"), {"dim": 0}, draw=("normal", *_TABLE, "normal")),
        Sample(("F[2,5,N]", "i32[4]", "F[2,4,N]"), {"dim": 1, "alpha": -2.5}, draw=("normal", *_TABLE, "normal")),
        Sample(("F[5]", "i64[]", "F[1]"), {"dim": 0}, draw=("normal", *_TABLE, "normal")),
        Sample(("F[]", "i64[1]", "F[]"), {"dim": 0, "alpha": 0.5}, draw=("normal", "index:1", "normal")),
        Sample(("i32[5,2]", "i64[N]", "i32[N,2]"), {"dim": 0, "alpha": 3}, draw=("int", *_TABLE, "int")),
    ),
    bad=(
        BadSample(("f32[5,3]", "i64[2]", "f32[3,3]"), {"dim": 0}, match="should be f32[2,3]"),
        BadSample(("f32[5,3]", "i64[2]", "f64[2,3]"), {"dim": 0}, match="dtypes differ"),
        BadSample(("i32[5]", "i64[2]", "i32[2]"), {"dim": 0, "alpha": 0.5}, match="no int"),
        BadSample(("u8[5]", "i64[2]", "u8[2]"), {"dim": 0, "alpha": -1}, match="-1 does not fit u8"),
        BadSample(("f32[5,3]", "f32[2]", "f32[2,3]"), {"dim": 0}, match="indices are f32"),
    ),
    doc=(
        "input with alpha * source added at the positions in index along dim; 16-bit floats accumulate in f32; oob"
        " defaults to 'error' here and to 'skip' in gradc.plans"
    ),
    source="torch.index_add",
)
