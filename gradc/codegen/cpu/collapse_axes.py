"""Short columns of neighbouring rows as one loop.

A loop of 28 columns is a vector of 16 and a tail that costs as much again; where rows follow one another in memory,
rows and columns are one loop of 784.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import Size, same
from ...ir.kernel import Kernel
from ...ir.statement import Axis, Index, Stmt
from ...ir.types import DTYPES, I64, Type
from ...targets.cpu import SHORT_COLUMNS
from ..index import flatten

_U32 = DTYPES["u32"]


def collapse_axes(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Kernel, Mapping[str, Type]]:
    """The kernel with its short innermost columns and the axis around them as one, over flat buffers; else itself.

    The axis around them is a column too, or a row of a kernel that only maps elements.  Every access must run on from
    one row to the next; where the position on an axis itself is read, it is computed from the collapsed one.
    """
    while (collapsed := _innermost_collapsed(kernel, types)) is not None:
        kernel, types = collapsed
    return kernel, types


def _innermost_collapsed(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Kernel, Mapping[str, Type]] | None:
    """The kernel with its innermost axis and the one around it as one; None where they stay two."""
    if not kernel.cols or any(s.op in ("accum", "check", "search", "scan") for s in kernel.body):
        return None
    inner = kernel.cols[-1]
    elementwise = (
        len(kernel.passes) == 1 and len(kernel.cols) == 1 and not any(s.op.endswith("_cols") for s in kernel.body)
    )
    if (
        not isinstance(inner[1], int)
        or inner[1] >= SHORT_COLUMNS
        or not (len(kernel.cols) > 1 or (elementwise and kernel.rows))
    ):
        return None
    outer = kernel.cols[-2] if len(kernel.cols) > 1 else kernel.rows[-1]
    collapsed: Axis = (outer[0], outer[1] * inner[1])
    positions = [
        s
        for s in kernel.body
        if s.op in ("index", "in_bounds") and {inner[0], outer[0]} & {v for i in s.index for v, _ in i.terms}
    ]
    if positions and not (isinstance(collapsed[1], int) and collapsed[1] < 2**31):
        return None
    body: list[Stmt] = []
    values = {inner[0]: f"%{len(kernel.body) + 5}", outer[0]: f"%{len(kernel.body) + 6}"}
    if positions:
        body += _split(len(kernel.body), collapsed[0], inner[1], values[inner[0]], values[outer[0]])
    for s in kernel.body:
        if s.op in ("load", "store"):
            flat = _collapsed_index(flatten(s.index, types[s.buffer].shape), inner, outer[0])
            if flat is None:
                return None
            s = replace(s, index=(flat,))
        elif s in positions:
            s = replace(s, index=tuple(i.renamed(values) for i in s.index))
        body.append(s)
    flat_types = {b: t.with_shape(t.count) for b, t in types.items()}
    if len(kernel.cols) > 1:
        return replace(kernel, cols=(*kernel.cols[:-2], collapsed), body=tuple(body)), flat_types
    return replace(kernel, rows=kernel.rows[:-1], cols=(collapsed,), body=tuple(body)), flat_types


def _collapsed_index(flat: Index, inner: Axis, outer: str) -> Index | None:
    """A flat index over the collapsed axis, which has the outer one's name; None where a row does not follow the one
    before.
    """
    steps: dict[str, Size] = dict(flat.terms)
    step, row = steps.pop(inner[0], 0), steps.pop(outer, 0)
    if not same(row, step * inner[1]):
        return None
    return Index(flat.const, (*steps.items(), *([(outer, step)] if step != 0 else [])))


def _split(first: int, collapsed: str, size: int, inner: str, outer: str) -> list[Stmt]:
    """Statements that compute both axes of a place on the collapsed one, in 32 bits, which vectors divide."""
    names = [f"%{first + k}" for k in range(5)]
    number, long, short, quotient, rest = names
    return [
        Stmt(number, "const", (), _U32, attrs=(("value", size),)),
        Stmt(long, "index", (), I64, index=(Index.of(collapsed),)),
        Stmt(short, "cast", (long,), _U32, attrs=(("dtype", _U32),)),
        Stmt(quotient, "floordiv", (short, number), _U32),
        Stmt(rest, "mod", (short, number), _U32),
        Stmt(inner, "cast", (rest,), I64, attrs=(("dtype", I64),)),
        Stmt(outer, "cast", (quotient,), I64, attrs=(("dtype", I64),)),
    ]
