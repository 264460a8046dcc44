"""columns_to_rows: the columns of a kernel that scatters single elements become rows, which a strategy can sort by
index.
"""

from __future__ import annotations

from dataclasses import replace

from ...analysis.combine import combines
from ...ir.kernel import Kernel, Program, Step
from ...ir.statement import REDUCTIONS
from ...ir.types import Type
from ..manager import program_pass


@program_pass("BITS")
def columns_to_rows(program: Program) -> Program:
    """kernel rows() cols(i: N) { accum y[%t] <- v }  ->  kernel rows(i: N) cols() { accum y[%t] <- v }

    A kernel of one row is one task: its columns share no place of their own, so that one thread would add them up.
    """
    types = {b.name: b.type for b in program.buffers}
    steps: list[Step] = [
        _interchanged(step) if isinstance(step, Kernel) and _scatters(step, types) else step for step in program.steps
    ]
    return program if steps == list(program.steps) else replace(program, steps=tuple(steps))


def _scatters(kernel: Kernel, types: dict[str, Type]) -> bool:
    """Whether a kernel without rows scatters single elements, each column to an index of its own, and reduces
    nothing.
    """
    return (
        not kernel.rows
        and any(c.by_column for c in combines(kernel, types))
        and not any(s.op in REDUCTIONS for s in kernel.body)
    )


def _interchanged(kernel: Kernel) -> Kernel:
    """Kernel -> the same statements with the columns as rows."""
    return replace(kernel, rows=kernel.cols, cols=())
