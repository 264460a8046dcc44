"""Neighbouring threads with neighbouring rows, which are neighbours in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ....ir.statement import REDUCTIONS
from ...declarations import Declaration
from ..axes import declared
from ..facts import FEW_ROWS, LONG_ROW, Facts
from ..mapping import THREADS, WHOLE_ROW, ThreadMapping
from ..row_registers import row_task_across

FEWEST_ROWS = 16
"""Fewest rows side by side for which neighbouring threads have neighbouring rows."""
MOST_THREADS = 16
"""Of a row; twice as many where the row stays in their registers."""
ENOUGH_THREADS = 1 << 18
"""As many as a GPU runs at once: where rows alone are so many, a row has one, which computes what is the row's once."""
MANY_STATEMENTS = 512
"""From which on a thread's values do not fit in 128 registers, where it adds and stores."""
COLUMNS = 4
"""Of a thread whose loads are under way together, and whose terms of sums are added up before they meet these."""
MOST_SUMS = 8
"""Of a row whose terms of so many columns fit in registers beside what they are computed from."""
COLUMN_LOOP = f"""#pragma unroll {COLUMNS // 2}
for (ix col = first_col + lane; col < end_col; col += WIDTH) {{"""
"""One column after another, where there are more: their sums leave registers for the loads of half as many columns."""


@dataclass(frozen=True, kw_only=True)
class ThreadPerRow(ThreadMapping):
    """Neighbouring threads have neighbouring rows; the threads of a row are as far apart as a block has rows.

    So an axis is reduced that is not the last in memory.  So have the lanes that exchange what they add to sums in
    fixed point (:mod:`gradc.codegen.cuda.fixed_sums`) a row each.
    """

    purpose = "Rows side by side: neighbouring threads have neighbouring rows"
    predicate = "rows"
    reduce = "gradc_reduce_across"
    reduces_in_pairs = False
    exchanges = True

    @property
    def reduces_in_shared(self) -> bool:
        return True

    @property
    def adds_pairwise(self) -> bool:
        return 1 < self.unroll <= COLUMNS

    def place_of_task(self) -> list[Declaration]:
        return WHOLE_ROW

    def place_of_thread(self) -> list[Declaration]:
        rows = self.threads // self.width
        return [
            declared(f"const ix task = ((ix)first_block + (ix)blockIdx.x) * {rows} + (ix)(threadIdx.x % {rows});"),
            declared(f"const int lane = (int)(threadIdx.x / {rows});"),
        ]


def reduces_rows_side_by_side(facts: Facts) -> bool:
    """Whether rows are reduced whose neighbours in memory are neighbouring rows, enough of them for a GPU."""
    kernel = facts.kernel
    if kernel.scans or not facts.reduces or not facts.rows.rows_side_by_side:
        return False
    extent, rows, columns = kernel.rows[-1][1], kernel.row_count, kernel.col_count
    enough = not isinstance(extent, int) or extent >= FEWEST_ROWS
    long = not isinstance(columns, int) or columns > LONG_ROW
    return enough and not (isinstance(rows, int) and rows < FEW_ROWS and long)


def thread_per_row(facts: Facts) -> ThreadPerRow:
    """The mapping of rows that are side by side; a thread has some columns of its row, if there are so many."""
    if facts.vector_groups:  # 16 values of a lane, with places of 64 bits, are 34 KB of shared memory
        reason = "values are added in fixed point to neighbouring sums: lanes exchange them"
        threads = THREADS // 2
        crowded = len(facts.kernel.body) > MANY_STATEMENTS and any(s.op == "store" for s in facts.kernel.body)
        resident = 3 * threads if crowded else 4 * threads
        return ThreadPerRow(reason=reason, width=1, threads=threads, shared_slots=threads, resident=resident)
    row = row_task_across(facts.kernel, facts.types, _threads(facts), 2 * MOST_THREADS)
    width = _threads_of_many(facts) if row is None else row.width
    threads = max(THREADS, min(32 * width, 2 * THREADS))
    one_by_one = row is None and sum(s.op in REDUCTIONS for s in facts.kernel.body) > MOST_SUMS
    return ThreadPerRow(
        reason="rows are reduced whose neighbours in memory are neighbouring rows",
        width=width,
        threads=threads,
        shared_slots=threads,
        row=row,
        unroll=row.iterations if row is not None else 0 if one_by_one else COLUMNS,
        iterations=row.iterations if row is not None else 0,
        column_loop=COLUMN_LOOP if one_by_one else "",
    )


def _threads_of_many(facts: Facts) -> int:
    """Threads of a row that does not stay in registers: no more than a GPU runs at once, of all rows."""
    rows, width = facts.kernel.row_count, _threads(facts)
    while isinstance(rows, int) and width > 1 and rows * width > ENOUGH_THREADS:
        width //= 2
    return width


def _threads(facts: Facts) -> int:
    """Threads of a row: a power of two."""
    width = 1
    while width < MOST_THREADS and 4 * width < facts.nominal_columns:
        width *= 2
    return width
