"""What every mapping of a kernel to the threads of a GPU says to those who write its statements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...analysis.chunks import GPU_SHORTEST, GPU_SORTED
from ...ir.dims import Size
from ...ir.kernel import Kernel, Phase
from ..declarations import Declaration
from ..mapping import KernelMapping
from .actions import chunks
from .axes import declared
from .exp_sums import ExpSum
from .facts import FEW_ROWS, LONG_ROW, Facts
from .kernel import CudaKernel
from .row_registers import RowTask

THREADS = 256
"""Of a block, and of a task at most, but for mappings with a number of their own."""


WHOLE_ROW = [declared("const ix first_col = 0;"), declared("const ix end_col = cols;")]
"""The columns of a task that goes through whole rows."""


@dataclass(frozen=True)
class Extents:
    """Sizes of a kernel for one set of dims, by which a launch cuts its rows up.

    :param chunked: what chunks are cut from: rows, or kept rows.
    :param tiles: of the columns of a row.
    :param width: threads of a task.
    :param workers: threads that a GPU's kernel is cut up for.
    """

    rows: int
    columns: int
    chunked: int
    tiles: int
    width: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class ThreadMapping(KernelMapping):
    """Which threads do what of a kernel.  What its fields and these class variables say is all that the statements of
    rows and columns depend on.

    :cvar purpose: what it does, for the comment above it.
    :cvar predicate: what a thread may lack while it goes along to barriers; ``live`` says then whether it is there.
    :cvar array_slot: where in an array of registers the loads of the row at hand are.
    :cvar always_vectors: whether even single columns are moved through arrays.
    :cvar reduce: the function that reduces over the threads of a task; ``reduces_in_pairs``: whether two sums may go
        together.
    :cvar few_rows: rows are cut into strips where a launch has fewer than these, :cvar long_row: of more columns than
        these; :cvar strip: columns of a strip at least.
    :cvar exchanges: whether the lanes of a warp exchange what they add to neighbouring sums in fixed point.
    :param width: threads of a task.
    :param vec: neighbouring columns of a thread at once.
    :param ragged: whether a row of a known number of columns may end within a thread's.
    :param threads: of a block.
    :param resident: threads that a multiprocessor is to hold, at least.
    :param unroll: times round the columns of a whole row whose loads are under way together; 0: each has its own.
    :param row: how a row is shared out that is kept in registers.
    :param sums: where sums that are added in an order are on their way: in memory, in the registers of the threads that
        have the columns, or one for each lane of a warp.
    :param sharing: tasks of a block that share a chunk of rows.
    :param prefetch: rows whose loads are under way together.
    :param iterations: elements of a thread's arrays of VEC columns, where sums or a row are in registers.
    :param column_loop: what opens the loop over a thread's columns of a row, if it is one of its own.
    :param tile: columns of a task that does not go through whole rows; 0: it does.
    :param tasks: of the row program, if their number does not depend on what a launch decides.
    :param shared_slots: of 16 bytes, in which the threads of a block reduce: one for each warp.
    :param chunk_keys: rows of the result, by which a block sorts its own rows, without those that add to none; 0: no.
    :param shared_bytes: dynamic shared memory of a block of the row program.
    """

    purpose: ClassVar[str]
    predicate: ClassVar[Literal["", "rows", "columns"]] = ""
    array_slot: ClassVar[str] = "0"
    always_vectors: ClassVar[bool] = False
    reduce: ClassVar[str] = "gradc_reduce"
    reduces_in_pairs: ClassVar[bool] = True
    few_rows: ClassVar[int] = FEW_ROWS
    long_row: ClassVar[int] = LONG_ROW
    strip: ClassVar[int] = 2048
    exchanges: ClassVar[bool] = False
    width: int
    vec: int = 1
    ragged: bool = False
    threads: int = THREADS
    resident: int = 2 * THREADS
    unroll: int = 0
    row: RowTask | None = None
    sums: Literal["memory", "registers", "lanes"] = "memory"
    sharing: int = 1
    prefetch: int = 1
    iterations: int = 0
    column_loop: str = ""
    tile: int = 0
    tasks: Size | None = None
    shared_slots: int = 32
    chunk_keys: int = 0
    shared_bytes: int = 0

    @property
    def shares_rows(self) -> bool:
        """Whether a row has several threads: one of them does what is done once for it."""
        return self.width > 1

    @property
    def reduces_in_shared(self) -> bool:
        """Whether reductions over the threads of a task go through shared memory."""
        return self.width > 32

    @property
    def loads_together(self) -> bool:
        """Whether all loads of a phase are under way together."""
        return self.unroll > 0 and (self.row is None or self.row.together)

    @property
    def adds_pairwise(self) -> bool:
        """Whether a thread's columns that are loaded together are added up before they meet a sum."""
        return False

    @property
    def stage_width(self) -> int:
        """Threads of a task of the row program, as a launch counts them."""
        return self.width

    def phases(self, kernel: Kernel) -> tuple[tuple[Phase, ...], Mapping[str, ExpSum]]:
        """The phases of a kernel, and by their maximum the sums of exponentials that are found in its phase."""
        return kernel.passes, {}

    # -- a launch of its row program -----------------------------------------------------------------------------------

    @staticmethod
    def chunk(kernel: CudaKernel, n: Extents) -> int:
        """Rows, or positions of their order, of a task; columns, where it has a strip of a row."""
        if kernel.keys is not None:
            return min(GPU_SORTED, max(GPU_SHORTEST, chunks(n.rows * n.tiles * n.width, 2 * n.workers)))
        if not kernel.by_chunk:
            return 1
        least = GPU_SHORTEST if kernel.tile else min(GPU_SHORTEST, max(1, THREADS // n.width))
        taken, most = n.chunked * n.tiles * n.width * kernel.sharing, n.workers // (2 if kernel.row_sums else 1)
        return max(least * kernel.sharing, chunks(taken, most), chunks(n.chunked, kernel.most_chunks))

    @staticmethod
    def task_count(kernel: CudaKernel, n: Extents, chunk: int) -> int:
        """Tasks of a launch with so long chunks."""
        return chunks(n.chunked, chunk) * n.tiles * kernel.sharing

    # -- its row program -----------------------------------------------------------------------------------------------

    def given(self, writer: Any) -> dict[str, Any]:
        """Records that its template names, by name.  :param writer: the PhaseWriter of the kernel."""
        return {}

    def split_reductions(self, writer: Any) -> list[tuple[str, str]]:
        """Type and name of the arrays of the strips' partial results, where a launch may split rows."""
        return []

    def split_phases(self, writer: Any) -> Iterable[dict[str, Any]]:
        """What is said of the functions of phases, where a launch may split rows: arguments of their writer."""
        return ()

    def place_of_thread(self) -> list[Declaration]:
        """A thread's task, and its number in the task."""
        return [
            declared("const ix task = element / WIDTH;"),
            declared("const int lane = (int)(threadIdx.x % WIDTH);"),
        ]

    def place_of_task(self) -> list[Declaration]:
        """The chunk of rows and the columns of a task, which its row program may need; else this declares them."""
        return []


class ChunkOfRows(ThreadMapping):
    """A task goes through the whole rows of a chunk."""

    def place_of_task(self) -> list[Declaration]:
        return [declared(f"const ix chunk_index = task{' / SHARING' if self.sharing > 1 else ''};"), *WHOLE_ROW]


def even_columns(facts: Facts, vec: int) -> bool:
    """Whether a thread's ``vec`` columns are neighbours and all there or none, whatever the sizes."""
    return vec == 1 or (facts.known_columns is not None and facts.known_columns % vec == 0)


def threads_for_columns(facts: Facts, vec: int) -> int:
    """As many threads as there are columns to go through side by side: a power of two, at most a block."""
    if not facts.shares_columns:
        return 1
    width = 1
    while width < THREADS and width * vec < facts.nominal_columns:
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
