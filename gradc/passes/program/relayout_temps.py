"""relayout_temps: temps lie as the kernels that read them go through them."""

from __future__ import annotations

from collections.abc import Callable

from ...ir.kernel import Buffer, Program, Step
from ..loops.legality import attempt
from ..loops.relayout import axes_of_access, relayout
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
        axes = [a for a, _ in (*kernel.rows, *kernel.cols)]
        for s in kernel.body:
            if s.buffer != temp.name or s.op in ("store", "accum"):
                continue
            places = axes_of_access(s, temp.type)
            units = [v for v in places if v.isdigit()]
            if s.op != "load" or len(set(places)) < len(places) or any(v not in (*units, *axes) for v in places):
                return None
            orders.add(tuple(places.index(axis) for axis in (*units, *axes) if axis in places))
    return next(iter(orders)) if len(orders) == 1 and orders != {tuple(range(temp.type.rank))} else None
