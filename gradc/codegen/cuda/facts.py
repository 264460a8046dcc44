"""What is known of a kernel before its rows and columns are mapped to the threads of a GPU.

A *task* is the threads that go through rows together.  Shapes alone decide everything here, so that the order of a sum
is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...analysis.combine import line_of_keys
from ...analysis.strategies import ON_GPU
from ...ir.dims import Size, product
from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import F64, Type
from ...process.forks import cached_property
from ..expr import Scribe
from ..rows import KernelFacts, row_facts
from .columns import OFFSETS, linear
from .fixed_sums import Interleaved, batches, interleaved, neighbours
from .magnitudes import largest_of

NOMINAL = 1024
"""Columns of a size that is not known when the text is made."""
FEW_ROWS = 256
"""Rows below which long ones are cut up."""
LONG_ROW = 16384
"""Columns of a row that may be cut up."""


@dataclass(frozen=True)
class Facts(KernelFacts):
    """A kernel, and what the choice of a mapping and the text of its statements depend on.

    :param ordered: the accums that are combined in an order; atomics take the others.
    :param vector_groups: accums in fixed point into neighbouring sums, in groups of them; the lanes of a warp exchange
        the values of several groups at once.
    :param layouts: the order of the sums of results of these, by name; None: that of the result.
    :param absmax_kernel: what the search for the largest |value| that is added in fixed point goes through.
    :param exponents: of two, how far each result's values may be above these.
    """

    ordered: tuple[Stmt, ...]
    vector_groups: tuple[tuple[tuple[Stmt, ...], ...], ...]
    layouts: Mapping[str, Interleaved | None]
    absmax_kernel: Kernel
    exponents: Mapping[str, int]

    # -- the kernel ----------------------------------------------------------------------------------------------------

    @property
    def known_columns(self) -> int | None:
        """The columns of a row, if their number is known when the text is made."""
        return self.kernel.col_count if isinstance(self.kernel.col_count, int) else None

    def may_alias(self, buffer: str) -> bool:
        """Whether another may lie where it does: only an output that is stored where an input is read can take its
        memory.
        """
        stores, loads = ([s for s in self.kernel.body if s.op == op] for op in ("store", "load"))
        return any(
            buffer in (s.buffer, t.buffer) and s.index == t.index and self.types[s.buffer] == self.types[t.buffer]
            for s in stores
            for t in loads
        )

    @property
    def nominal_columns(self) -> int:
        """The columns of a row, or what is taken for their number where it is not known."""
        return NOMINAL if self.known_columns is None else self.known_columns

    # -- its columns ---------------------------------------------------------------------------------------------------

    @cached_property
    def reduces(self) -> bool:
        """Whether the columns of a row are reduced."""
        return any(s.op in REDUCTIONS for s in self.kernel.body)

    @cached_property
    def separate_columns(self) -> bool:
        """Whether one sweep over the columns computes each by itself, and nothing else is done for a row: a row may be
        cut into tasks.
        """
        once = any(not s.name for p in self.kernel.passes for s in p.row)
        accums = all(s.op != "accum" or self.rows.in_columns(s) for s in self.kernel.body)
        one_sweep = len(self.kernel.passes) == 1 and bool(self.kernel.cols) and not once
        return one_sweep and accums and not self.reduces and not self.kernel.scans

    @property
    def shares_columns(self) -> bool:
        """Whether there are columns that threads can go through side by side."""
        walked = bool(self.kernel.cols) and any(p.roots for p in self.kernel.passes)
        return walked and all(map(self.side_by_side, self.ordered))

    @property
    def wide_values(self) -> bool:
        """Whether values take two registers: NVRTC spills some kernels that have several loads in flight."""
        return any(s.dtype is F64 for s in self.kernel.body)

    # -- what rows are combined into -----------------------------------------------------------------------------------

    @cached_property
    def in_order(self) -> bool:
        """Whether rows that are visited by key come in this order by how their keys are computed, or were checked to do
        so by an earlier kernel: nothing is sorted.
        """
        if self.order != "by key" or any(s.op == "check" for s in self.kernel.body):
            return False
        return line_of_keys(self.kernel, self.rows.parts[self.kernel.order], self.types) is not None

    @property
    def partial_sums(self) -> bool:
        """Whether each chunk of rows has a partial result of all that is combined in an order."""
        return all(self.rows.strategy_of[s.buffer].partials for s in self.ordered)

    @property
    def lasting_sums(self) -> bool:
        """Whether sums stay those of one row of the result while a segment, a kept row or a chunk lasts: registers can
        hold them.
        """
        return bool(self.ordered) and all(map(self.lasting, self.ordered))

    @property
    def one_result_row(self) -> bool:
        """Whether all rows of a chunk, in their own order, add a known number of columns to one row of the result."""
        return self.known_columns is not None and not self.order and all(map(self.lasting, self.ordered))

    def side_by_side(self, s: Stmt) -> bool:
        """Whether columns may add at the same time: each into an element of its own, or all into one."""
        return self.rows.parts[s.buffer].tail or not self.rows.in_columns(s)

    def own(self, s: Stmt) -> bool:
        """Whether columns add, in order and all, into the elements of a row of the result: each thread into its own."""
        part = self.rows.parts[s.buffer]
        return (
            part.tail
            and self.rows.in_columns(s)
            and linear(self.kernel, self.types, s, part.leading) == Index()
            and self.result_row(s) == self.kernel.col_count
        )

    def lasting(self, s: Stmt) -> bool:
        """Whether it adds to one row of the result while its segment, its kept row or its chunk lasts."""
        leading = s.index[: self.rows.parts[s.buffer].leading]
        if not self.own(s):
            return False
        if self.rows.owned_by_row(s):
            return all(i == Index() or i.variable in self.rows.parts[self.kernel.order].kept for i in leading)
        return self.rows.in_segments(s) or all(i == Index() for i in leading)

    def result_row(self, s: Stmt) -> Size:
        """Elements of a row of the result: those behind the entries of its index that columns do not move."""
        return product(self.types[s.buffer].shape[self.rows.parts[s.buffer].leading :])


def facts_of(kernel: Kernel, types: Mapping[str, Type]) -> Facts:
    """The facts of a kernel."""
    rows = row_facts(kernel, types, ON_GPU)
    groups = batches(neighbours(kernel)) if not kernel.cols else ()
    accums = {buffer: [s for s in kernel.accums if s.buffer == buffer] for buffer in rows.parts}
    absmax_kernel, exponents = largest_of(kernel)
    return Facts(
        rows=rows,
        scribe=Scribe(types, kernel.body, wraps=False, offsets=OFFSETS),
        ordered=tuple(s for s in kernel.accums if not rows.strategy_of[s.buffer].atomics),
        vector_groups=groups,
        layouts={b: interleaved(sums, types[b].shape) if groups else None for b, sums in accums.items()},
        absmax_kernel=absmax_kernel,
        exponents=exponents,
    )
