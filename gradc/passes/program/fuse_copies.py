"""fuse_copies: what a kernel only copies, in another order of axes or rounded, is written there by its producer."""

from __future__ import annotations

from collections.abc import Callable

from ...ir.kernel import Kernel, Program, Step
from ..loops.copies import Copy, find_copy, write_through
from ..loops.legality import attempt
from ..manager import program_pass


@program_pass("BITS")
def fuse_copies(
    program: Program, *, wanted: Callable[[Step], bool] = lambda step: True, rounded: bool = True
) -> Program:
    """store t[n, c, h] <- v;  store y[n, h, c] <- load t[n, c, h]  ->  store y[n, h, c] <- v

    Sums are added up in f32 and rounded once, so that the bits stay: accum t[i] <- v : f32;  store o[i] <- cast t[i] :
    bf16  ->  accum o[i] <- v : f32.  Products are written by their library where a kernel moves their rows: call t[b,
    m, n] <- matmul ...;  store o[m, b, n] <- load t[b, m, n]  ->  call o[m, b, n] <- matmul ...

    :param wanted: the steps that may write what is copied of their results.
    :param rounded: sums may be rounded by the kernels that add them up.
    """

    def pays(copy: Copy) -> bool:
        """Whether nobody else would read the copy in another order of axes than its own."""
        alone = copy.readers == (copy.number,) or copy.order == tuple(range(len(copy.order)))
        return alone and wanted(program.steps[copy.producer]) and (rounded or not copy.rounds)

    number = 0
    while number < len(program.steps):
        step = program.steps[number]
        found = (attempt(find_copy, program, number, b) for b in (step.writes if isinstance(step, Kernel) else ()))
        copy = next((c for c in found if c is not None and pays(c)), None)
        if copy is None:
            number += 1
        else:
            program = write_through(program, copy)
    return program
