"""Orders of elements: argsort, sort, topk, kthvalue.

A sort is a library call on integers: floats become integers of the same order first (``sort_key``), in the kernel that
computes them.  Every sort is stable; NaN counts as the largest, -0.0 equals 0.0, and descending is the reverse order of
keys, so that equal elements keep their order there, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Assumption, Dim, Size, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Expr, Function, Library, Primitive, Sample
from ...ir.statement import Index
from ...ir.types import I32, I64, DType, Type
from ..elementwise.pointwise import invert
from ..indexing.gathers import take_along_axis
from ..rules import canonical_axis, cases, converted, floating, reshaped, without
from ..shapes.movement import transpose

# -- keys --------------------------------------------------------------------------------------------------------------


def _key_dtype(dtype: DType) -> DType:
    """The integers that are sorted in place of a dtype's values."""
    return I64 if dtype.name in ("f64", "i64", "u32") else I32


def _sort_key_reference(x: Any, *, bits: int) -> Any:
    wide = np.asarray(x).astype(f"f{bits // 8}")
    found = np.where(wide == 0, 0, wide).astype(wide.dtype).view(f"i{bits // 8}")
    largest = np.iinfo(found.dtype).max
    return np.where(np.isnan(wide), largest, np.where(found < 0, found ^ largest, found)).astype(found.dtype)


def _sort_key_type(x: Type, *, bits: int = 0) -> Any:
    key = _key_dtype(floating(x).dtype)
    return x.with_dtype(key), {"bits": key.bits}


sort_key = Primitive(
    "sort_key",
    infer=_sort_key_type,
    reference=_sort_key_reference,
    lower=Expr("sort_key({0})", cost=4),
    in_place_of_dtype=True,
    vjp=lambda g, y, x: (DISCRETE,),
    samples=cases("", "N", "2,N"),
    bad=(BadSample(("i32[3]",), match="i32 is no float"),),
    doc="integers of so many bits in the order of the floats, NaN the largest, -0.0 as 0.0: 64 for f64, 32 for others",
)


def keys(x: Node) -> Node:
    """Integers in the order of x, i32 or i64."""
    return sort_key(x) if x.dtype.is_float else converted(x, _key_dtype(x.dtype))


# -- the library function ----------------------------------------------------------------------------------------------


def _argsort_rows(keys: Type, *, count: int | Dim) -> Any:
    if keys.dtype not in (I32, I64):
        raise TypeRuleError(f"keys are {keys.dtype}; i32 and i64 are sorted")
    if keys.rank < 1:
        raise TypeRuleError("a scalar has no rows")
    if isinstance(count, int) and (count < 0 or (isinstance(keys.shape[-1], int) and count > keys.shape[-1])):
        raise TypeRuleError(f"count={count} of {keys.shape[-1]} positions")
    return Type(I64, (*keys.shape[:-1], count)), {"count": count}


def _argsort_rows_axes(node: Node) -> Any:
    (x,) = node.operands
    rows = [(f"b{i}", size) for i, size in enumerate(x.shape[:-1])]
    axes = (*rows, ("i", x.shape[-1]), ("j", node.shape[-1]))
    lead = tuple(Index.of(name) for name, _ in rows)
    return axes, ((*lead, Index.of("i")),), (*lead, Index.of("j"))


def _count_exists(node: Node) -> list[Assumption]:
    count, size = node.attrs["count"], node.operands[0].shape[-1]
    return [] if same(count, size) or isinstance(size, int) else [Assumption(size, ">=", count)]


argsort_rows = Library(
    "argsort_rows",
    infer=_argsort_rows,
    reference=lambda keys, *, count: np.argsort(keys, axis=-1, kind="stable")[..., :count].astype(np.int64),
    axes=_argsort_rows_axes,
    views=lambda out, inner: ((*out[:-1], *inner),),
    attributes=lambda shape: {"count": shape[-1]},
    positions_in=0,
    sorts=0,
    in_place_of_dtype=True,
    implies=_count_exists,
    vjp=lambda g, y, keys, *, count: (DISCRETE,),
    samples=(
        Sample(("i32[3,N]",), {"count": 2}, draw=("int",), dims={"N": 5}),
        Sample(("i64[2,3,40]",), {"count": 40}, draw=("int",)),
        Sample(("i32[N,90]",), {"count": 3}, draw=("int",)),
        Sample(("i64[5]",), {"count": 0}, draw=("int",)),
    ),
    bad=(
        BadSample(("f32[3]",), {"count": 1}, match="i32 and i64 are sorted"),
        BadSample(("i32[]",), {"count": 1}, match="no rows"),
        BadSample(("i32[3]",), {"count": 4}, match="count=4 of 3"),
    ),
    doc="the positions of the count smallest keys of each row (the last axis), in ascending order, stable; i64",
)

# -- argsort and sort --------------------------------------------------------------------------------------------------


def order(x: Node, axis: int, descending: bool, count: Size | None = None) -> Node:
    """The positions along ``axis`` of the first ``count`` elements of x in order (all where it is None); i64."""
    key = invert(keys(x)) if descending else keys(x)
    last = (*(a for a in range(x.rank) if a != axis), axis)
    found = argsort_rows.plain(transpose(key, last), count=x.shape[axis] if count is None else count)
    return transpose(found, tuple(last.index(a) for a in range(x.rank)))


def _argsort(x: Type, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    axis = canonical_axis(axis, max(x.rank, 1))
    return x.with_dtype(I64), {"axis": axis, "descending": descending, "stable": stable}


def _argsort_value(x: Node, *, axis: int, descending: bool, stable: bool) -> Node:
    return order(x, axis, descending) if x.rank else reshaped(order(reshaped(x, (1,)), 0, descending), ())


_SORTED = (
    Sample(("F[N,5]",), draw=("distinct",)),
    Sample(("F[3,N,2]",), {"axis": 1, "descending": True}, draw=("distinct",)),
    Sample(("F[]",)),
    Sample(("i32[4,N]",), {"axis": 0}, draw=("int",)),
    Sample(("u8[40]",), {"descending": True}, draw=("int",)),
    Sample(("bool[3,N]",), draw=("bool",)),
)
_BAD_SORT = (
    BadSample(("f32[2,3]",), {"axis": 2}, match="axis=2"),
    BadSample(("f32[3]",), {"descending": 1}, match="descending=1"),
)
argsort = Composite(
    "argsort",
    infer=_argsort,
    decompose=_argsort_value,
    vjp=lambda g, y, x, *, axis, descending, stable: (DISCRETE,),
    samples=_SORTED,
    bad=_BAD_SORT,
    doc="the positions that sort x along an axis, i64; always stable, NaN as the largest",
    source="torch.argsort",
)


def _selected(x: Node, axis: int, indices: Node) -> Node:
    return take_along_axis.plain(x, indices, axis=axis) if x.rank else x


def _sort(x: Node, axis: int = -1, descending: bool = False, stable: bool = True) -> tuple[Node, Node]:
    indices = argsort(x, axis, descending, stable)
    return _selected(x, canonical_axis(axis, max(x.rank, 1)), indices), indices


def _msort(x: Node) -> Node:
    return _sort(x, 0)[0]


sort = Function(
    "sort",
    write=_sort,
    samples=_SORTED,
    bad=_BAD_SORT,
    doc="the elements of x in order along an axis, and their positions in x (i64); always stable, NaN as the largest",
    source="torch.sort",
)
msort = Function(
    "msort",
    write=_msort,
    samples=(_SORTED[0], _SORTED[2]),
    doc="x sorted along its first axis",
    source="torch.msort",
)

# -- a part of the order -----------------------------------------------------------------------------------------------


def _at_most(name: str, k: int, least: int, size: Size) -> None:
    if k < least or (isinstance(size, int) and k > size):
        raise TypeRuleError(f"{name}={k} of an axis of {size}: {least} to {size} exist")


def _topk(x: Node, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Node, Node]:
    line = x if x.rank else reshaped(x, (1,))
    axis = canonical_axis(axis, line.rank)
    _at_most("k", k, 0, line.shape[axis])
    indices = order(line, axis, largest, k)
    values = take_along_axis.plain(line, indices, axis=axis)
    return (values, indices) if x.rank or k == 0 else (reshaped(values, ()), reshaped(indices, ()))


topk = Function(
    "topk",
    write=_topk,
    samples=(
        Sample(("F[N,5]",), {"k": 3}, draw=("distinct",)),
        Sample(("F[3,7]",), {"k": 2, "axis": 0, "largest": False}, draw=("distinct",)),
        Sample(("F[]",), {"k": 1}),
    ),
    bad=(
        BadSample(("f32[3]",), {"k": 4}, match="k=4 of an axis of 3: 0 to 3 exist"),
        BadSample(("f32[3]",), {"k": -1}, match="k=-1"),
        BadSample(("f32[3]",), {"k": 1.5}, match="k=1.5 is not an int"),
    ),
    doc=(
        "the k largest (or smallest) elements along an axis, in order whatever sorted says, and their positions (i64);"
        " among equal ones the first"
    ),
    source="torch.topk",
)


def _kthvalue(x: Node, k: int, axis: int = -1, keepdims: bool = False) -> tuple[Node, Node]:
    at = canonical_axis(axis, max(x.rank, 1))
    _at_most("k", k, 1, x.shape[at] if x.rank else 1)
    return kth_in_order(x, k, at, keepdims)


def kth_in_order(x: Node, k: Size, axis: int, keepdims: bool) -> tuple[Node, Node]:
    """The k-th smallest element along an axis, and its position."""
    line = x if x.rank else reshaped(x, (1,))
    start, limit, step = _last(line, axis, k)
    at = call("slice", order(line, axis, False, k), start, limit, step)
    values = take_along_axis.plain(line, at, axis=axis)
    if keepdims and x.rank:
        return values, at
    shape = without(values.shape, (axis,))
    return reshaped(values, shape), reshaped(at, shape)


def _last(x: Node, axis: int, k: Size) -> tuple[Any, ...]:
    """Start, limit and step that take the last of k positions along an axis."""
    start = tuple(k - 1 if a == axis else 0 for a in range(x.rank))
    limit = tuple(k if a == axis else n for a, n in enumerate(x.shape))
    return start, limit, (1,) * x.rank


kthvalue = Function(
    "kthvalue",
    write=_kthvalue,
    samples=(
        Sample(("F[N,5]",), {"k": 3}, draw=("distinct",)),
        Sample(("F[3,7]",), {"k": 2, "axis": 0, "keepdims": True}, draw=("distinct",)),
    ),
    bad=(
        BadSample(("f32[3]",), {"k": 0}, match="k=0 of an axis of 3: 1 to 3 exist"),
        BadSample(("f32[3]",), {"k": 4}, match="k=4"),
    ),
    doc="the k-th smallest element along an axis, from 1, and its position (i64); among equal ones the first",
    source="torch.kthvalue",
)
