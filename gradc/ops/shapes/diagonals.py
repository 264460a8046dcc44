"""Diagonals of matrices, and matrices that have a given diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, maximum, minimum
from ...ir.node import Node
from ...ir.op import BadSample, Movement, Primitive, Sample
from ...ir.statement import Index
from ...ir.types import Type
from ..rules import canonical_axis, without

SizeLike = int | Dim


def _two_axes(rank: int, axis1: int, axis2: int) -> tuple[int, int]:
    first, second = canonical_axis(axis1, rank, "axis1"), canonical_axis(axis2, rank, "axis2")
    if first == second:
        raise TypeRuleError(f"axis1={axis1} and axis2={axis2} are one axis of a rank {rank} operand")
    return first, second


def _starts(offset: int) -> tuple[int, int]:
    """Row and column of a diagonal's first element."""
    return max(-offset, 0), max(offset, 0)


def _length(rows: Size, columns: Size, offset: int) -> Size:
    top, left = _starts(offset)
    return maximum(minimum(rows - top, columns - left), 0)


def _diagonal(x: Type, *, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    axis1, axis2 = _two_axes(x.rank, axis1, axis2)
    length = _length(x.shape[axis1], x.shape[axis2], offset)
    return x.with_shape(*without(x.shape, (axis1, axis2)), length), {"offset": offset, "axis1": axis1, "axis2": axis2}


def _diagonal_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    *rest, along = index
    top, left = _starts(node.attrs["offset"])
    places = {node.attrs["axis1"]: along + top, node.attrs["axis2"]: along + left}
    others = iter(rest)
    (x,) = node.operands
    return kernel.read(x, [places[a] if a in places else next(others) for a in range(x.rank)])


diagonal: Primitive = Primitive(
    "diagonal",
    infer=_diagonal,
    reference=lambda x, *, offset, axis1, axis2: np.diagonal(x, offset, axis1, axis2),
    lower=Movement(_diagonal_at),
    in_place_of_dtype=True,
    vjp=lambda g, y, x, *, offset, axis1, axis2: (
        diag_embed.plain(g, offset=offset, axis1=axis1, axis2=axis2, rows=x.shape[axis1], columns=x.shape[axis2]),
    ),
    multilinear=lambda node: {
        0: tuple(
            None
            if a in (node.attrs["axis1"], node.attrs["axis2"])
            else a - sum(b < a for b in (node.attrs["axis1"], node.attrs["axis2"]))
            for a in range(node.operands[0].rank)
        )
    },
    samples=(Sample(("F[3,5]",), {"offset": 1}), Sample(("F[4,2,N]",), {"offset": -1, "axis1": 2, "axis2": 0})),
    bad=(
        BadSample(("f32[3,4]",), {"axis1": 1, "axis2": -1}, match="are one axis"),
        BadSample(("f32[3]",), match="axis2=1"),
    ),
    doc="the diagonal of the matrices that two axes make, as the last axis; offset counts to the right of the main one",
    source="numpy.diagonal",
)


def _diag_embed(
    x: Type,
    *,
    offset: int = 0,
    axis1: int = -2,
    axis2: int = -1,
    rows: SizeLike | None = None,
    columns: SizeLike | None = None,
) -> Any:
    if x.rank == 0:
        raise TypeRuleError("a scalar is no diagonal: one axis at least")
    axis1, axis2 = _two_axes(x.rank + 1, axis1, axis2)
    length = x.shape[-1]
    rows = length + abs(offset) if rows is None else rows
    columns = length + abs(offset) if columns is None else columns
    if _length(rows, columns, offset) != length:
        raise TypeRuleError(f"{length} elements are not the diagonal {offset} of {rows}x{columns}")
    others = iter(x.shape[:-1])
    shape = [rows if a == axis1 else columns if a == axis2 else next(others) for a in range(x.rank + 1)]
    attrs = {"offset": offset, "axis1": axis1, "axis2": axis2, "rows": rows, "columns": columns}
    return x.with_shape(*shape), attrs


def _diag_embed_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    axis1, axis2, (top, left) = node.attrs["axis1"], node.attrs["axis2"], _starts(node.attrs["offset"])
    place, across = index[axis1] + -top, index[axis2] + -left
    on = kernel.both(
        kernel.in_bounds(place + across * -1, 0, 1), kernel.in_bounds(place, 0, node.operands[0].shape[-1])
    )
    rest = [i for a, i in enumerate(index) if a not in (axis1, axis2)]
    return kernel.read(node.operands[0], [*rest, place], where=on)


def _diag_embed_reference(x: Any, *, offset: int, axis1: int, axis2: int, rows: int, columns: int) -> Any:
    out = np.zeros((*x.shape[:-1], rows, columns), x.dtype)
    at, (top, left) = np.arange(x.shape[-1]), _starts(offset)
    out[..., at + top, at + left] = x
    return np.moveaxis(out, (-2, -1), (axis1, axis2))


diag_embed: Primitive = Primitive(
    "diag_embed",
    infer=_diag_embed,
    reference=_diag_embed_reference,
    lower=Movement(_diag_embed_at),
    in_place_of_dtype=True,
    fills=True,
    vjp=lambda g, y, x, *, offset, axis1, axis2, rows, columns: (
        diagonal.plain(g, offset=offset, axis1=axis1, axis2=axis2),
    ),
    samples=(Sample(("F[N]",), {"offset": -1}), Sample(("F[2,3]",), {"axis1": 0, "rows": 3, "columns": 5})),
    bad=(
        BadSample(("f32[3]",), {"rows": 4, "columns": 4}, match="not the diagonal 0 of 4x4"),
        BadSample(("f32[]",), match="a scalar"),
    ),
    doc="zeros with the last axis of x on a diagonal of the matrices that the axes axis1 and axis2 of the result make",
    source="torch.diag_embed",
)
