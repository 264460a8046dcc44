"""Which threads of a GPU do what of a kernel.

A *task* is ``width`` threads that go through rows together; each thread has ``vec`` columns at a time.  What is summed
up in which order is decided by shapes alone.  Eight mappings:

- *strips*: nothing is combined in an order.  A task is a strip of one row.
- *tiled*: every ordered accum adds into columns of its own, and no pass needs a whole row.  A task is a chunk of rows x
  ``width * vec`` columns: the columns of an accum belong to one thread, which keeps their sum in registers as long as
  the rows have one key (a segment, or all of a chunk) and prefetches ``prefetch`` rows.
- *shared table*: one accum of whole rows into a small table.  A task is a block, which has a chunk of rows x 32
  columns; all its warps stage rows in shared memory, and each adds those whose key is its own (modulo the warps) to the
  block's partial results there: a sum has one owner, which adds in the order of rows, and a key that half of all rows
  have is added up in registers while the rows behind it are loaded.
- *warp segmented scan*: rows without columns, in the order of their keys.  A task is a warp, a lane has a row, and the
  rows of a segment are added up by a segmented scan of the warp.
- *turned*: nothing is combined, and loads lie together along another axis than stores.  A task is a block, which has a
  tile of both axes; what it loads is turned in shared memory.
- *split rows*: few long rows.  Each pass is a function, a task a strip of a row, and what a pass reduces is combined
  from the strips by those after it.
- *across*: neighbouring rows lie side by side in memory, as where an axis is reduced that is not the last.
  Neighbouring threads have neighbouring rows; the threads of a row are as far apart as a block has rows.  So have those
  that exchange what they add to sums in fixed point (:mod:`gradc.codegen.cuda.fixed_sums`), a row each.
- else a task goes through *whole rows*; the row and the sums are in registers where the columns are few enough
  (:mod:`gradc.codegen.cuda.row_registers`); else sums are in memory, and each phase reads the row again.

Of a scatter of bf16 rows of 4096 (16384 into 128256) the tiled kernel moves each element of dy once in 16-byte loads
and writes each element of the result once in 16-byte stores, 0.13 + 1.05 GB beside 12 bytes per position for its index,
row and key; per element it issues an unpack, an addition and an eighth of some 40 instructions that are the same for
all of a thread's columns: some 8, of which an H100 issues 28 T/s, four times as fast as 3 TB/s bring the elements.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...analysis.combine import OWN_COLUMNS, OWN_STAGED, own
from ...analysis.strategies import ON_GPU
from ...ir.dims import product
from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import F64, Type
from ..expr import Scribe
from ..rows import RowWriter
from .columns import OFFSETS, Access, access, columns_at_once, linear
from .fixed_sums import interleaved, neighbours
from .magnitudes import largest_of
from .row_registers import RowTask, row_task, row_task_across
from .turned import turned

STRIP = 2048
"""Columns per task of a map at least."""
THREADS = 256
WIDEST = 512
"""Threads of a task that keeps sums of whole rows."""
WARPS, STAGED_ROWS = 16, OWN_STAGED
"""Of a block whose partial results are in shared memory: warps, and rows that they stage at once."""
NARROWEST = 8
"""Threads of a row, if it has so many vectors: fewer leave parts of lines to others."""
NOMINAL = 1024
"""Columns of a size that is not known when the text is made."""
FEW_ROWS = 256
"""Rows below which long ones are cut up."""
FEWEST_ACROSS = 16
"""Fewest rows that lie side by side where neighbouring threads have neighbouring rows."""
MOST_ACROSS = 16
"""Threads of such a row; twice as many where the row stays in their registers."""
UNROLLED = 2
"""Times round the columns of a row that is not kept in registers, with all their loads under way."""
LONG_ROW = 16384
"""Columns of a row that may be cut up."""


def full_width(vectors: int, most: int) -> int:
    """How many threads go through so many vectors: a power of two, ``most`` or less, of which at most an eighth is idle
    on average; else the one that leaves the fewest idle.
    """
    most = min(most, 1 << (vectors - 1).bit_length())
    widths = [most >> i for i in range(most.bit_length()) if most >> i >= min(most, NARROWEST)]
    walked = {w: -(-vectors // w) * w for w in widths}
    full = [w for w in widths if 8 * walked[w] <= 9 * vectors]
    return full[0] if full else min(widths, key=lambda w: (walked[w], -w))


class TaskWriter(RowWriter):
    """A kernel with its tasks decided.

    :ivar combined: one accum into each result.
    :ivar ordered: the accums that add in an order.
    :ivar width: threads of a task.
    :ivar vec: columns of a thread at once.
    :ivar strips, tiled, shared, warp_scan: the mapping, if it is one of these.
    :ivar turn: how a map goes through tiles of two axes, if its loads and stores lie together along different ones.
    :ivar across: whether neighbouring threads have neighbouring rows.
    :ivar together: accums whose values are exchanged with those of other lanes, and added together.
    :ivar order_of_sums: of the results of these, by name; None: that of the result.
    :ivar looked_at: the kernel that a scan for the largest values to be added goes through.
    :ivar exponents: of two, how far each result's values may be above these.
    :ivar register_accumulators: whether sums are in registers.
    :ivar row_task: how a row is shared out that is kept in registers, if it is.
    :ivar sharing: tasks of a block that share a chunk of rows.
    :ivar iterations: of a task's threads over the columns of a row, if that is kept in registers; 1 if tiled.
    :ivar prefetch: rows of a tiled kernel whose loads are under way together.
    :ivar unroll: times round the columns of a whole row whose loads are under way together.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        super().__init__(kernel, types, Scribe(types, kernel.body, wraps=False, offsets=OFFSETS), ON_GPU)
        self.combined = [part.stmt for part in self.parts.values()]
        self.ordered = [s for s in kernel.accums if not self.strategy_of[s.buffer].atomics]
        once = any(
            not s.name for p in kernel.passes for s in p.row
        )  # what a row does once is not for each of its strips
        alone = (
            not once
            and len(kernel.passes) == 1
            and bool(kernel.cols)
            and not kernel.scans
            and all(s.op != "accum" or self.in_columns(s) for s in kernel.body)
        )
        reduces = any(s.op in REDUCTIONS for s in kernel.body)
        alone = alone and not reduces
        self.tiled = (
            alone
            and bool(self.ordered)
            and all(map(self.own, self.ordered))
            and (self.order != "by owner" or all(map(self.lasting, self.ordered)))
        )
        self.shared = [self.strategy_of[b].partials for b in self.parts] == [True] and own(
            kernel, next(iter(self.parts.values())), types
        )
        self.tiled &= not self.shared
        unordered = all(strategy.atomics == "values" for strategy in self.strategy_of.values())
        self.strips = alone and not self.shared and unordered
        self.together = neighbours(kernel) if not kernel.cols else []
        sums = {part.buffer: [s for s in kernel.accums if s.buffer == part.buffer] for part in self.parts.values()}
        self.order_of_sums = {
            buffer: interleaved(accums, types[buffer].shape) if self.together else None
            for buffer, accums in sums.items()
        }
        self.looked_at, self.exponents = largest_of(kernel)
        self.across = bool(self.together) or self.rows_across()
        single = self.shared or bool(kernel.scans) or self.across
        self.vec = 1 if single else columns_at_once(kernel, types, len(kernel.accums), reduces)
        self.warp_scan = not kernel.cols and self.order == "by key" and all(map(self.in_segments, self.ordered))
        lasting = bool(self.ordered) and all(map(self.lasting, self.ordered))
        self.row_task = self.row_in_registers(len(self.ordered) if lasting else 0) if not alone else None
        if self.row_task is not None:
            self.vec, self.width = self.row_task.vec, self.row_task.width
        else:
            self.width = OWN_COLUMNS if self.shared else 32 if self.warp_scan else self.threads_per_task()
        self.tiled &= self.width > 1 or self.alone_with_rows()
        self.strips &= self.width > 1
        self.iterations = self.row_task.iterations if self.row_task is not None else int(self.tiled)
        self.register_accumulators = self.iterations > 0 and lasting
        self.prefetch = self.prefetched_rows() if self.tiled else 1
        self.unroll = self.unrolled()
        self.turn = turned(kernel, types) if self.strips else None
        if self.turn is not None:
            self.strips, self.vec, self.width = False, 1, THREADS
        self.sharing = self.threads // self.width if self.shares_chunks() else 1

    @property
    def mapping(self) -> str:
        """The template of the rows' function."""
        ways = {
            "shared_table": bool(self.shared),
            "turned": self.turn is not None,
            "strips": self.strips,
            "tiled": self.tiled,
            "warp_scan": self.warp_scan,
            "across": self.across,
        }
        return next((name for name, taken in ways.items() if taken), "whole_rows")

    def alone_with_rows(self) -> bool:
        """Whether all columns of a row, a known number, are those of one task, rows come in their own order, and all
        of a chunk add to one row of the result.
        """
        return isinstance(self.k.col_count, int) and not self.order and all(map(self.lasting, self.ordered))

    @property
    def sums_columns(self) -> bool:
        """Whether a task adds up each of its columns over a chunk of rows as they come, and does nothing else."""
        partial = all(self.strategy_of[s.buffer].partials for s in self.ordered)
        done = sorted(s.op for s in self.k.body if s.op != "cast")
        return self.tiled and not self.order and partial and done == ["accum", "load"]

    def shares_chunks(self) -> bool:
        """Whether the tasks of a block go through one chunk, a row each in turn, and add their sums up at its end: all
        sums are in registers.
        """
        partial = all(self.strategy_of[s.buffer].partials for s in self.ordered)
        return self.register_accumulators and partial and self.alone_with_rows() and self.width < self.threads

    # -- the mapping to threads ----------------------------------------------------------------------------------------

    def threads_per_task(self) -> int:
        """As many threads as there are columns to go through side by side: a power of two, at most a block."""
        if self.k.scans:
            return self.threads_of_scan()
        if self.across:
            return self.threads_per_row_across()
        if not self.shares_columns:
            return 1
        count = self.k.col_count
        columns = count if isinstance(count, int) else NOMINAL
        width = 1
        while width < THREADS and width * self.vec < columns:
            width *= 2
        if self.tiled and self.order == "by key" and isinstance(count, int):  # each tile of columns is a task
            return full_width(max(1, -(-count // self.vec)), width)
        return width

    @property
    def shares_columns(self) -> bool:
        """Whether there are columns that threads can go through side by side."""
        walked = bool(self.k.cols) and any(p.roots for p in self.k.passes)
        return walked and all(map(self.side_by_side, self.ordered))

    def row_in_registers(self, sums: int) -> RowTask | None:
        """How a whole row is shared out, if its threads can keep it.

        :param sums: accums whose sums they keep as well.
        """
        if self.shared or self.k.scans or not self.shares_columns:
            return None
        if self.across:
            return row_task_across(self.k, self.types, self.threads_per_row_across(), 2 * MOST_ACROSS)
        return row_task(self.k, self.types, sums, WIDEST if sums else THREADS, self.may_share_sums)

    @property
    def may_share_sums(self) -> bool:
        """Whether the sums of rows in registers may be in shared memory: they are f32, and a chunk's."""
        partial = all(self.strategy_of[s.buffer].partials and s.combine == "sum" for s in self.ordered)
        dtypes = [self.types[s.buffer].dtype for s in self.ordered]
        return partial and not self.order and all(d.is_float and d.bits <= 32 for d in dtypes)

    def unrolled(self) -> int:
        """How often the threads of a task go round the columns of a row with all their loads under way; 0 for once,
        each with its loads.
        """
        if self.row_task is not None:
            return self.row_task.iterations
        once = self.tiled or self.strips or self.shared or self.across or self.k.scans or self.width == 1
        wide = any(s.dtype is F64 for s in self.k.body)  # two registers a value: NVRTC spills some kernels
        return 0 if once or wide else UNROLLED

    def threads_of_scan(self) -> int:
        """One where neighbouring rows lie together, or sums belong to threads by their columns; else whole warps."""
        if self.ordered or self.scans_side_by_side:
            return 1
        count = self.k.col_count
        width = 32
        while width < THREADS and width < (count if isinstance(count, int) else NOMINAL):
            width *= 2
        return width

    def rows_across(self) -> bool:
        """Whether rows are reduced, neighbours in memory are neighbouring rows, and there are rows enough for a GPU:
        neighbouring threads have neighbouring rows then, and the threads of a row are a warp or more apart.
        """
        if self.k.scans or not any(s.op in REDUCTIONS for s in self.k.body) or not self.rows_side_by_side:
            return False
        extent, rows, columns = self.k.rows[-1][1], self.k.row_count, self.k.col_count
        together = not isinstance(extent, int) or extent >= FEWEST_ACROSS
        long = not isinstance(columns, int) or columns > LONG_ROW
        return together and not (isinstance(rows, int) and rows < FEW_ROWS and long)

    def threads_per_row_across(self) -> int:
        """A power of two: a thread has some columns of its row, if there are so many."""
        count, width = self.k.col_count, 1
        while width < MOST_ACROSS and 4 * width < (count if isinstance(count, int) else NOMINAL):
            width *= 2
        return width

    @property
    def threads(self) -> int:
        """Per block: a task of more than a warp that has a barrier has a block to itself."""
        if self.shared:
            return 32 * WARPS
        if self.together:  # 16 values of a lane, with places of 64 bits, are 34 KB of shared memory
            return THREADS // 2
        if self.across:
            return max(THREADS, min(32 * self.width, 2 * THREADS))
        return THREADS if self.width <= 32 or self.tiled or self.strips else self.width

    def side_by_side(self, s: Stmt) -> bool:
        """Whether columns may add at the same time: each into an element of its own, or all into one."""
        return self.parts[s.buffer].tail or not self.in_columns(s)

    def in_columns(self, s: Stmt) -> bool:
        """Whether an accum's place depends on the column."""
        cols = {a for a, _ in self.k.cols}
        places = [v for i in s.index for v, _ in i.terms]
        return bool(cols & set(places)) or any(v.startswith("%") and self.k.levels[v] & cols for v in places)

    def own(self, s: Stmt) -> bool:
        """Whether columns add, in order and all, into the elements of a row of the result: each thread into its own."""
        part = self.parts[s.buffer]
        return (
            part.tail
            and self.in_columns(s)
            and linear(self.k, self.types, s, part.leading) == Index()
            and product(self.types[s.buffer].shape[part.leading :]) == self.k.col_count
        )

    def lasting(self, s: Stmt) -> bool:
        """Whether it adds to one row of the result while its segment, its kept row or its chunk lasts."""
        part = self.parts[s.buffer]
        if not self.own(s):
            return False
        if self.owned_by_row(s):
            return all(i == Index() or i.variable in self.parts[self.k.order].kept for i in s.index[: part.leading])
        return self.in_segments(s) or all(i == Index() for i in s.index[: part.leading])

    @property
    def even_cols(self) -> bool:
        """Whether a thread's columns are neighbours and all there or none, whatever the sizes."""
        return self.vec == 1 or (isinstance(self.k.col_count, int) and self.k.col_count % self.vec == 0)

    def words(self, a: Access) -> int:
        """Registers for a thread's elements: packed, if nothing can force them to come one by one."""
        return max(self.vec * a.item // 4, 1) if self.even_cols else self.vec * max(a.item // 4, 1)

    def prefetched_rows(self) -> int:
        """Rows of a tiled kernel whose loads are under way while one is worked on."""
        body = self.k.passes[0].body
        loads = {
            (a.buffer, a.base): a for s in body if (a := access(self.k, self.types, s)) is not None and a.fits(self.vec)
        }
        words = sum(map(self.words, loads.values())) + len(self.kept_values())
        return 4 if words <= 6 else 2 if words <= 16 else 1

    def kept_values(self) -> list[Stmt]:
        """The row's values that its columns use, of a tiled kernel."""
        row = self.k.passes[0]
        vectors = {s for s in row.body if access(self.k, self.types, s) is not None}
        used = {
            u
            for s in (*row.body, *row.roots)
            if s not in vectors
            for u in (s.args if s in self.ordered and self.register_accumulators else s.uses)
        }
        used |= {s.where for s in self.ordered if not self.in_segments(s)}
        return [s for s in row.row if s.name in used and s.op not in ("const", "size")]

    def can_split_rows(self) -> bool:
        """Whether there may be few rows, and long ones, that are added up and nothing else: each pass is a function
        then, over strips of them.
        """
        rows, columns = self.k.row_count, self.k.col_count
        few = rows < FEW_ROWS if isinstance(rows, int) else isinstance(columns, int)
        return (
            few
            and self.width > 32
            and not self.k.accums
            and not self.k.scans
            and any(s.op in REDUCTIONS for s in self.k.body)
            and (not isinstance(columns, int) or columns > LONG_ROW)
        )
