"""Grouped products: rows that stand by group, and a matrix for each group, as in a mixture of experts whose tokens are
sorted by expert.  How many rows a group has is data; the work grows with the rows, not with the groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import same
from ...ir.node import Node
from ...ir.op import DISCRETE, BadSample, Library, Sample
from ...ir.statement import Index
from ...ir.types import Type
from ..indexing.gathers import check_positions, index_type
from ..rules import floating

Oob = Literal["error", "skip"]


def _typed(x: Type, y: Type, offsets: Type, rank: int) -> tuple[Type, Type]:
    """Both factors.

    :param rank: of the second.
    :raises TypeRuleError: they, or the offsets, are no such thing.
    """
    if x.dtype is not y.dtype:
        raise TypeRuleError(f"dtypes differ: {x.dtype} and {y.dtype}; write a cast")
    if x.rank != 2 or y.rank != rank:
        raise TypeRuleError(f"ranks {x.rank} and {y.rank}, not 2 and {rank}")
    if index_type(offsets).rank != 1:
        raise TypeRuleError(f"the offsets {offsets} have rank {offsets.rank}, not 1")
    if same(offsets.shape[0], 0):
        raise TypeRuleError("there are no offsets; they begin with 0")
    return floating(x), floating(y)


def _groups(op: str, offsets: Any, rows: int, oob: str) -> Iterator[slice]:
    """The rows of each group.

    :raises IndexOutOfRange, NotAscending: as :func:`.check_positions`, with ``oob="error"``.
    """
    ends = np.asarray(offsets).astype(np.int64)
    if oob == "error":
        check_positions(op, "offsets", ends, rows + 1, ascending=True)
    ends[:1] = 0
    ends = np.maximum.accumulate(np.minimum(ends, rows))
    return itertools.starmap(slice, itertools.pairwise(ends.tolist()))


def _wide(x: Any) -> Any:
    """BLAS has no wider product than f64."""
    return x.astype(np.result_type(x.dtype, np.float64))


def _rows_of(node: Node) -> Any:
    """Rows that are bounds of groups go up to the number of rows."""
    return node.operands[0].shape[0] + 1


# -- rows times the matrix of their group ------------------------------------------------------------------------------


def _grouped_matmul(x: Type, weight: Type, offsets: Type, *, oob: Oob = "error") -> Type:
    x, weight = _typed(x, weight, offsets, 3)
    if not same(x.shape[1], weight.shape[1]):
        raise TypeRuleError(f"inner sizes differ: {x.shape[1]} and {weight.shape[1]}")
    if not same(weight.shape[0] + 1, offsets.shape[0]):
        raise TypeRuleError(f"{offsets.shape[0]} offsets for {weight.shape[0]} groups, not one more")
    return x.with_shape(x.shape[0], weight.shape[2])


def _grouped_matmul_reference(x: Any, weight: Any, offsets: Any, *, oob: str) -> Any:
    y = np.zeros((x.shape[0], weight.shape[2]), x.dtype)
    for rows, matrix in zip(_groups("grouped_matmul", offsets, len(x), oob), weight, strict=True):
        y[rows] = _wide(x[rows]) @ _wide(matrix)
    return y


def _grouped_matmul_axes(node: Node) -> Any:
    x, weight, offsets = node.operands
    axes = zip("sngke", (x.shape[0], weight.shape[2], weight.shape[0], x.shape[1], offsets.shape[0]), strict=True)
    s, n, g, k, e = map(Index.of, "sngke")
    return tuple(axes), ((s, k), (g, k, n), (e,)), (s, n)


OFFSETS = np.array([0, 2, 2, 5, 6])
grouped_matmul: Library = Library(
    "grouped_matmul",
    infer=_grouped_matmul,
    reference=_grouped_matmul_reference,
    axes=_grouped_matmul_axes,
    views=lambda out, inner: ((out[0], inner[1]), (inner[0], inner[1], out[1]), (inner[2],)),
    converts=(0, 1),
    scales=(1,),
    indices={2: _rows_of},
    ascending=(2,),
    attributes=lambda shape: {"oob": "skip"},  # they are checked before
    multilinear=lambda node: {0: (0, None), 1: (None, None, 1)},
    vjp=lambda g, y, x, weight, offsets, *, oob: (
        grouped_matmul.plain(g, weight.T, offsets, oob=oob),
        grouped_outer.plain(x, g, offsets, oob=oob),
        DISCRETE,
    ),
    samples=(
        Sample(("F[7,3]", "F[4,3,5]", OFFSETS)),
        Sample(("F[N,3]", "F[2,3,4]", np.array([0, 1, 2], np.int32)), dims={"N": 3}),
        Sample(("F[6,4]", "F[4,4,3]", OFFSETS)),
        Sample(("F[2,3]", "F[0,3,4]", np.array([0]))),
    ),
    bad=(
        BadSample(("f32[7,3]", "f32[4,3,5]", "i64[4]"), match="4 offsets for 4 groups"),
        BadSample(("f32[7,3]", "f32[4,2,5]", "i64[5]"), match="inner sizes differ: 3 and 2"),
        BadSample(("f32[7,3]", "f32[3,5]", "i64[5]"), match="ranks 2 and 2"),
        BadSample(("f32[7,3]", "f64[4,3,5]", "i64[5]"), match="dtypes differ"),
        BadSample(("i32[7,3]", "i32[4,3,5]", "i64[5]"), match="i32 is no float"),
        BadSample(("f32[7,3]", "f32[4,3,5]", "f32[5]"), match="indices are f32"),
        BadSample(("f32[7,3]", "f32[4,3,5]", "i64[1,5]"), match="rank 2, not 1"),
    ),
    doc=(
        "each row of x[S,K] times the matrix of its group, of weight[E,K,N]: group g has the rows from offsets[g] to"
        " offsets[g + 1]; what is behind the last is 0. With oob='error' offsets must begin with 0, not decrease and"
        " not exceed S; with 'skip' a group begins where those before it end. Time grows with S, not with E"
    ),
)

# -- for each group the sum of outer products of its rows: the gradient of its matrix ---------------------------------


def _grouped_outer(x: Type, y: Type, offsets: Type, *, oob: Oob = "error") -> Type:
    x, y = _typed(x, y, offsets, 2)
    if not same(x.shape[0], y.shape[0]):
        raise TypeRuleError(f"numbers of rows differ: {x.shape[0]} and {y.shape[0]}")
    return x.with_shape(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def _grouped_outer_reference(x: Any, y: Any, offsets: Any, *, oob: str) -> Any:
    out = np.zeros((len(offsets) - 1, x.shape[1], y.shape[1]), x.dtype)
    for matrix, rows in zip(out, _groups("grouped_outer", offsets, len(x), oob), strict=True):
        matrix[...] = _wide(x[rows]).T @ _wide(y[rows])
    return out


def _grouped_outer_axes(node: Node) -> Any:
    x, y, offsets = node.operands
    axes = zip("gknse", (node.shape[0], x.shape[1], y.shape[1], x.shape[0], offsets.shape[0]), strict=True)
    g, k, n, s, e = map(Index.of, "gknse")
    return tuple(axes), ((s, k), (s, n), (e,)), (g, k, n)


grouped_outer: Library = Library(
    "grouped_outer",
    infer=_grouped_outer,
    reference=_grouped_outer_reference,
    axes=_grouped_outer_axes,
    views=lambda out, inner: ((inner[0], out[1]), (inner[0], out[2]), (inner[1],)),
    converts=(0, 1),
    indices={2: _rows_of},
    ascending=(2,),
    attributes=lambda shape: {"oob": "skip"},  # they are checked before
    multilinear=lambda node: {0: (None, 1), 1: (None, 2)},
    vjp=lambda g, out, x, y, offsets, *, oob: (
        grouped_matmul.plain(y, g.T, offsets, oob=oob),
        grouped_matmul.plain(x, g, offsets, oob=oob),
        DISCRETE,
    ),
    samples=(
        Sample(("F[7,3]", "F[7,5]", OFFSETS)),
        Sample(("F[N,3]", "F[N,4]", np.array([0, 1, 2], np.int32)), dims={"N": 3}),
        Sample(("F[0,3]", "F[0,2]", np.array([0, 0]))),
    ),
    bad=(
        BadSample(("f32[7,3]", "f32[6,5]", "i64[5]"), match="numbers of rows differ: 7 and 6"),
        BadSample(("f32[7,3]", "f32[7,5]", "i64[0]"), match="no offsets"),
        BadSample(("f32[7,3]", "f64[7,5]", "i64[5]"), match="dtypes differ"),
    ),
    doc=(
        "for each group the sum of the outer products of its rows of x[S,K] and y[S,N]: [E,K,N], the gradient of"
        " grouped_matmul's weight. Group g has the rows from offsets[g] to offsets[g + 1]"
    ),
)
