"""A kernel -> a loop over blocks of its rows."""

from __future__ import annotations

from dataclasses import replace

from ...ir.dims import symbol
from ...ir.kernel import Kernel, Loop, Program
from ...ir.statement import Index
from ..loops.legality import refuse
from ..row_blocking.fission import fresh_name


def row_loop(kernel: Kernel, program: Program) -> Loop:
    """kernel rows(i: B, j: N)  ->  loop over(at0: B) rows(row: N) { kernel rows(j: rows) }

    :raises IllegalMove: it has no rows, or does not store to its own.
    """
    if not kernel.rows or kernel.order or kernel.accums:
        refuse("row_loop", kernel, "it has no rows of its own")
    *outer, (row, size) = kernel.rows
    axes = {axis for axis, _ in kernel.rows}
    for s in kernel.body:
        if s.op == "store" and not axes <= {i.variable for i in s.index}:
            refuse("row_loop", kernel, f"it stores to {s.buffer} at places that are no axes")
        if s.op == "load" and program.root(s.buffer) in {program.root(b) for b in kernel.writes}:
            refuse("row_loop", kernel, f"it reads {s.buffer}, which it writes")
    taken = {*program.dims, *(name for loop in program.loops for name in loop.symbols)}
    names = {axis: fresh_name(f"at{n}", taken) for n, (axis, _) in enumerate(outer)}
    first, count = fresh_name("row", taken), fresh_name("rows", taken)
    places = {axis: Index(symbol(name)) for axis, name in names.items()} | {row: Index(symbol(first), ((row, 1),))}
    body = tuple(s.altered(index=tuple(i.compose(places) for i in s.index)) for s in kernel.body)
    own = replace(kernel, rows=((row, symbol(count)),), body=body)
    over = tuple((names[axis], n) for axis, n in outer)
    return Loop(over, (first, size), 64, count, (), (own,))
