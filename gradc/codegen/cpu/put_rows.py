"""Rows of an array replaced, in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...ir.dims import Size, product
from ...ir.kernel import Call, Program
from ..text import read_template
from .products import Extent, extent, operand_view


@dataclass(frozen=True)
class PutRowsCall:
    """A call of ``gradc_put_rows``; the arrays by their numbers in the program's table, sizes as C.

    :param size: rows of the array, :param count: those that are replaced, :param bytes: and the bytes of a row.
    :param extents: what is to be checked with GRADC_BOUNDS.
    """

    base: int
    out: int
    rows: int
    values: int
    size: str
    count: str
    bytes: str
    extents: tuple[Extent, ...]


def put_rows_call(
    call: Call, program: Program, place: Mapping[str, int], over_dims: Callable[[Size], str], checked: bool
) -> PutRowsCall:
    """A call as the template of the entry writes it; parameters as of :func:`.products.product_call`."""
    base, rows, values = (program.buffer[operand.buffer] for operand in call.args)
    sizes = {axis: over_dims(size) for axis, size in call.axes}
    views = (
        (operand_view(operand, program, place, over_dims, program.buffer[operand.buffer].type.dtype), axes)
        for operand, axes in zip(call.args, call.views, strict=True)
    )
    return PutRowsCall(
        base=place[base.name],
        out=place[call.out.buffer],
        rows=place[rows.name],
        values=place[values.name],
        size=over_dims(base.type.shape[0]),
        count=over_dims(rows.type.shape[0]),
        bytes=over_dims(product(base.type.shape[1:]) * base.type.dtype.itemsize),
        extents=tuple(extent(view, {a: sizes[a] for a in axes}) for view, axes in views) if checked else (),
    )


def put_rows_functions(program: Program, calls: Sequence[Call]) -> list[str]:
    """The function, if a program calls it."""
    return [read_template("cpu/put_rows.h")] if calls else []
