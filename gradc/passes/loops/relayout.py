"""Memory layouts of temps: in which order their axes lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ...ir.kernel import Kernel, Program
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from .legality import IllegalMove


def relayout(program: Program, temp: str, order: Sequence[int]) -> Program:
    """t: f32[N,C,H];  store t[n, c, h] <- v;  load t[n, c, h]  ->  t: f32[N,H,C];  store t[n, h, c] <- v;  load t[n, h,
    c], where ``order`` is ``(0, 2, 1)``

    :param order: the axis of the temp that each axis of the new one is.
    :raises IllegalMove: it is no temp, or others than kernels know how its elements lie.
    """
    buffer, shared = program.buffer[temp], [b.name for b in program.buffers if program.root(b.name) == temp]
    touching = [s for s in program.steps if temp in (*s.reads, *s.writes)]
    if buffer.kind != "temp" or shared != [temp] or temp in (b for _, b in program.outputs):
        raise IllegalMove(f"relayout of {temp}: it is memory that others have")
    if any(not isinstance(s, Kernel) or any(x.op == "search" for x in s.body if x.buffer == temp) for s in touching):
        raise IllegalMove(f"relayout of {temp}: not only kernels access it, element by element")
    new = replace(buffer, type=buffer.type.with_shape(*(buffer.type.shape[a] for a in order)))
    buffers = tuple(new if b is buffer else b for b in program.buffers)
    return replace(program, buffers=buffers).with_kernels(lambda k: redirected(k, temp, temp, order))


def redirected(kernel: Kernel, source: str, target: str, order: Sequence[int]) -> Kernel:
    """The kernel with its accesses of one buffer to another, whose axes are those of the first in another order."""
    return replace(
        kernel,
        body=tuple(
            s.altered(buffer=target, index=tuple(s.index[a] for a in order)) if s.buffer == source else s
            for s in kernel.body
        ),
    )


def axes_of_access(s: Stmt, type: Type) -> list[str]:
    """(access, type of its buffer) -> the kernel axis that each axis of the buffer is indexed by; a number for an axis
    of size 1 at index 0, "" for any other index.
    """
    units = itertools.count()
    return [
        str(next(units)) if i == Index() and n == 1 else i.variable or ""
        for i, n in zip(s.index, type.shape, strict=True)
    ]
