"""What every mapping of a kernel to the threads of a GPU says to those who write its statements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...ir.kernel import Kernel, Phase
from .exp_sums import ExpSum
from .facts import NOMINAL, Facts
from .row_registers import RowTask

THREADS = 256
"""Of a block, and of a task at most, but for mappings with a number of their own."""


@dataclass(frozen=True, kw_only=True)
class ThreadMapping:
    """Which threads do what of a kernel.

    :cvar template: of the row program, in ``templates/cuda/kernel``.
    :cvar purpose: what it does, for the comment above it.
    :cvar visits_whole_rows: whether a task goes through all columns of a row.
    :param reason: why a kernel has this mapping.
    :param width: threads of a task.
    :param vec: neighbouring columns of a thread at once.
    :param threads: of a block.
    :param unroll: times round the columns of a whole row whose loads are under way together; 0: each has its own.
    :param row: how a row is shared out that is kept in registers.
    :param sums_in_registers: whether a thread keeps the sums of its columns in registers.
    :param sharing: tasks of a block that share a chunk of rows.
    :param prefetch: rows whose loads are under way together.
    """

    template: ClassVar[str]
    purpose: ClassVar[str]
    visits_whole_rows: ClassVar[bool] = True
    reason: str
    width: int
    vec: int = 1
    threads: int = THREADS
    unroll: int = 0
    row: RowTask | None = None
    sums_in_registers: bool = False
    sharing: int = 1
    prefetch: int = 1

    @property
    def name(self) -> str:
        """``tiled transpose``, as explanations call it."""
        return re.sub("(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()

    @property
    def iterations(self) -> int:
        """Elements of a thread's arrays of VEC columns, where it has sums or values of a row in registers; else 0."""
        return self.row.iterations if self.row is not None else 0

    def phases(self, kernel: Kernel) -> tuple[tuple[Phase, ...], Mapping[str, ExpSum]]:
        """The phases of a kernel, and by their maximum the sums of exponentials that are found in its phase."""
        return kernel.passes, {}


def even_columns(facts: Facts, vec: int) -> bool:
    """Whether a thread's ``vec`` columns are neighbours and all there or none, whatever the sizes."""
    return vec == 1 or (facts.known_columns is not None and facts.known_columns % vec == 0)


def threads_for_columns(facts: Facts, vec: int) -> int:
    """As many threads as there are columns to go through side by side: a power of two, at most a block."""
    if not facts.shares_columns:
        return 1
    columns, width = NOMINAL if facts.known_columns is None else facts.known_columns, 1
    while width < THREADS and width * vec < columns:
        width *= 2
    return width


def block_threads(width: int) -> int:
    """Threads of a block: a task of more than a warp that has a barrier has a block to itself."""
    return max(width, THREADS) if width <= 32 else width


def tasks_of_chunk(facts: Facts, width: int, threads: int) -> int:
    """Tasks of a block that go through one chunk, a row each in turn, and add up at its end the sums that they have in
    registers: 1 unless all rows add to one row of a partial result.
    """
    return threads // width if facts.lasting_sums and facts.partial_sums and facts.one_result_row else 1
