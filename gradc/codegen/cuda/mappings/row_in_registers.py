"""Whole rows that the threads of a task keep in registers."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import THREADS, ChunkOfRows, block_threads, tasks_of_chunk
from ..row_registers import RowTask, row_task

WIDEST = 512
"""Threads of a task that keeps sums of whole rows."""


@dataclass(frozen=True, kw_only=True)
class RowInRegisters(ChunkOfRows):
    """A task goes through whole rows, whose values its threads keep in registers between the phases
    (:mod:`gradc.codegen.cuda.row_registers`), with the sums of their columns where these last.
    """

    purpose = "Whole rows: a task goes through those of a chunk"
    row: RowTask


def row_in_registers(facts: Facts) -> RowInRegisters | None:
    """How a row is shared out; None where there are no registers for it."""
    if not facts.shares_columns:
        return None
    sums = len(facts.ordered) if facts.lasting_sums else 0
    row = row_task(facts.kernel, facts.types, sums, WIDEST if sums else THREADS, _may_share_sums(facts))
    if row is None:
        return None
    threads = block_threads(row.width)
    return RowInRegisters(
        reason=f"the registers of {row.width} threads hold a row of {facts.known_columns} columns",
        width=row.width,
        vec=row.vec,
        threads=threads,
        resident=(3 * THREADS // 2) if row.crowds else 2 * THREADS,
        unroll=row.iterations,
        row=row,
        sums="registers" if facts.lasting_sums else "memory",
        iterations=row.iterations,
        shared_bytes=8 * row.shared_sums * row.width,
        sharing=tasks_of_chunk(facts, row.width, threads),
    )


def _may_share_sums(facts: Facts) -> bool:
    """Whether the sums may be in shared memory: they are f32, and a chunk's."""
    sums = facts.partial_sums and all(s.combine == "sum" for s in facts.ordered)
    dtypes = [facts.types[s.buffer].dtype for s in facts.ordered]
    return sums and not facts.order and all(d.is_float and d.bits <= 32 for d in dtypes)
