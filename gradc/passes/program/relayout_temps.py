"""relayout_temps: temps lie as the kernels that read them go through them."""

from __future__ import annotations

from collections.abc import Callable

from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ...ir.walk import backward_slice
from ..loops.legality import attempt
from ..loops.relayout import relayout
from ..manager import program_pass
from .interchange import least_bytes_moved


@program_pass("BITS")
def relayout_temps(program: Program, *, wanted: Callable[[Step], bool] = lambda step: True) -> Program:
    """Layout assignment of temps: store t[n, c, h] <- v;  load t[n, c, h] over rows(n, h) cols(c)  ->  store t[n, h, c]
    <- v;  load t[n, h, c], where fewer bytes move so

    :param wanted: the kernels whose results may be stored so.
    """
    for name in dict.fromkeys(b for kernel in program.kernels if wanted(kernel) for b in kernel.writes):
        order = _order_of_reads(program, program.buffer[name])
        made = attempt(relayout, program, name, order) if order is not None else None
        if made is not None and _bytes_moved(made, name) < _bytes_moved(program, name):
            program = made
    return program


def _bytes_moved(program: Program, name: str) -> int:
    """Bytes that the kernels that access a buffer move."""
    return sum(least_bytes_moved(k, program.types) for k in program.kernels if name in k.buffers)


def _order_of_reads(program: Program, temp: Buffer) -> tuple[int, ...] | None:
    """(program, temp) -> the one permutation of its axes in which all kernels that read it traverse it; None if they
    differ, or it is the layout that the temp has.
    """
    orders = set()
    for kernel in program.kernels:
        for s in kernel.body:
            if s.buffer != temp.name or s.op in ("store", "accum"):
                continue
            order = _loop_order(kernel, s, temp.type) if s.op == "load" else None
            if order is None:
                return None
            orders.add(order)
    return next(iter(orders)) if len(orders) == 1 and orders != {tuple(range(temp.type.rank))} else None


def _loop_order(kernel: Kernel, load: Stmt, type: Type) -> tuple[int, ...] | None:
    """(kernel, load, type of its buffer) -> the buffer's axes, outermost loop first, of which each moves with a loop
    of its own, by any computed index; those of size 1 before all.  None: two move with one loop, or one by data.
    """
    loops = [a for a, _ in (*kernel.rows, *kernel.cols)]
    found: dict[str, int] = {}
    for dim, (entry, size) in enumerate(zip(load.index, type.shape, strict=True)):
        values = [v for v, _ in entry.terms if v.startswith("%")]
        if any(s.op == "load" for s in backward_slice(kernel.body, values)):
            return None
        moving = {v for v, _ in entry.terms if not v.startswith("%")}.union(*(kernel.levels[v] for v in values))
        unit = str(dim) if entry == Index() and size == 1 else ""
        if not (unit or len(moving) == 1) or found.setdefault(unit or next(iter(moving)), dim) != dim:
            return None
    units = sorted((v for v in found if v.isdigit()), key=int)
    return tuple(found[loop] for loop in (*units, *loops) if loop in found)
