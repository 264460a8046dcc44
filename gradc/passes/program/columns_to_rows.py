"""columns_to_rows: the columns of a kernel that scatters single elements become rows, which a strategy can sort by
index.
"""

from __future__ import annotations

from ...analysis.combine import combines
from ...ir.kernel import Kernel, Program
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..manager import program_pass


@program_pass("BITS")
def columns_to_rows(program: Program) -> Program:
    """kernel rows() cols(i: N) { accum y[%t] <- v }  ->  kernel rows(i: N) cols() { accum y[%t] <- v }

    A kernel of one row is one task: its columns share no place of their own, so that one thread would add them up.
    """

    def rewritten(kernel: Kernel) -> Kernel:
        scatters = not kernel.rows and any(c.by_column for c in combines(kernel, program.types))
        return attempt(reorder, kernel, ()) or kernel if scatters else kernel

    return program.with_kernels(rewritten)
