"""store_places: a kernel that only stacks values into an array is fused into the kernel that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.kernel import Kernel, Program
from ...ir.statement import Axis
from ..loops.fuse import fuse
from ..loops.legality import attempt
from ..manager import program_pass
from .unroll_columns import unswitchable_axes, unswitched


@program_pass("BITS")
def store_places(program: Program) -> Program:
    """rows(n) cols(c) { store t[n] <- a, store u[n] <- b };
    rows(n) cols(k: 2) { store y[n, k] <- (load t[n] where k == 0) + (load u[n] where k == 1) }
    ->  rows(n) cols(c) { store y[n, 0] <- a + 0, store y[n, 1] <- 0 + b }

    A kernel that only stacks values reads them all once more, and branches on each element's position.  One that cannot
    be fused with the producer of its values is left as it is.
    """
    for number, step in enumerate(program.steps):
        if isinstance(step, Kernel) and (short := unswitchable_axes(step, masks=True)):
            made = attempt(_fused, program, number, step, short)
            if made is not None:
                return store_places(made)
    return program


def _fused(program: Program, number: int, reader: Kernel, short: Sequence[Axis]) -> Program | None:
    """The program with a kernel, unswitched, in the one that writes all temps that it reads; None if there is none, or
    it is too long.
    """
    temps = {b.name for b in program.of_kind("temp")}.intersection(reader.reads)
    producers = [i for i, step in enumerate(program.steps) if temps.intersection(step.writes)]
    unswitched_ = unswitched(reader, short) if len(producers) == 1 else None
    if unswitched_ is None or not isinstance(program.steps[producers[0]], Kernel):
        return None
    steps = [unswitched_ if i == number else step for i, step in enumerate(program.steps)]
    return fuse(replace(program, steps=tuple(steps)), producers[0], number)
