"""A kernel with its mapping to the threads of a GPU chosen."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.kernel import Kernel
from ...ir.statement import Stmt
from ...ir.types import Type
from ...passes.reductions.strategies import STRATEGIES
from ..rows import RowWriter
from .choose_mapping import choose_mapping
from .facts import facts_of
from .mapping import even_columns
from .mappings.column_strips import ColumnStrips
from .mappings.shared_table import SharedTable
from .mappings.split_rows import SplitRows
from .mappings.thread_per_row import ThreadPerRow
from .mappings.tiled import Tiled
from .mappings.tiled_transpose import TiledTranspose
from .mappings.warp_segmented_scan import WarpSegmentedScan


class TaskWriter(RowWriter):
    """A kernel with its mapping.

    :ivar facts: of the kernel, :ivar mapping: that they lead to.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        self.facts = facts_of(kernel, types)
        super().__init__(kernel, types, self.facts.scribe, STRATEGIES)  # the facts have refused what has no text
        self.mapping = choose_mapping(self.facts)
        self.vec, self.width, self.threads = self.mapping.vec, self.mapping.width, self.mapping.threads
        self.combined, self.ordered = self.facts.combined, self.facts.ordered
        self.together, self.order_of_sums = self.facts.vector_groups, self.facts.layouts
        self.looked_at, self.exponents = self.facts.absmax_kernel, self.facts.exponents
        self.tiled = isinstance(self.mapping, Tiled)
        self.shared = isinstance(self.mapping, SharedTable)
        self.strips = isinstance(self.mapping, ColumnStrips)
        self.across = isinstance(self.mapping, ThreadPerRow)
        self.warp_scan = isinstance(self.mapping, WarpSegmentedScan)
        self.turn = self.mapping if isinstance(self.mapping, TiledTranspose) else None
        self.row_task, self.unroll = self.mapping.row, self.mapping.unroll
        self.iterations, self.register_accumulators = self.mapping.iterations, self.mapping.sums_in_registers
        self.prefetch, self.sharing = self.mapping.prefetch, self.mapping.sharing

    @property
    def sums_columns(self) -> bool:
        """Whether a task adds up each of its columns over a chunk of rows as they come, and does nothing else."""
        done = sorted(s.op for s in self.k.body if s.op != "cast")
        return self.tiled and not self.order and self.facts.partial_sums and done == ["accum", "load"]

    @property
    def even_cols(self) -> bool:
        """Whether a thread's columns are neighbours and all there or none, whatever the sizes."""
        return even_columns(self.facts, self.vec)

    def in_columns(self, s: Stmt) -> bool:
        """Whether an accum's place depends on the column."""
        return self.facts.in_columns(s)

    def own(self, s: Stmt) -> bool:
        """Whether columns add, in order and all, into the elements of a row of the result: each thread into its own."""
        return self.facts.own(s)

    def can_split_rows(self) -> bool:
        """Whether each phase is a function over strips of rows where there are few."""
        return isinstance(self.mapping, SplitRows)
