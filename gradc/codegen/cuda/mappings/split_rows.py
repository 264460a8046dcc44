"""Few long rows: each phase is a function over strips of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import FEW_ROWS, LONG_ROW, Facts
from ..mapping import block_threads
from .whole_rows import WholeRows, unrolled


@dataclass(frozen=True, kw_only=True)
class SplitRows(WholeRows):
    """Whole rows, unless a launch has few: each phase is a function then, a task a strip of a row, and what a phase
    reduces is combined from the strips by those after it.
    """


def few_long_rows(facts: Facts, width: int) -> bool:
    """Whether there may be few rows, and long ones, that are reduced and nothing else."""
    rows, columns = facts.kernel.row_count, facts.kernel.col_count
    few = rows < FEW_ROWS if isinstance(rows, int) else isinstance(columns, int)
    long = not isinstance(columns, int) or columns > LONG_ROW
    alone = facts.reduces and not facts.kernel.accums and not facts.kernel.scans
    return few and long and alone and width > 32


def split_rows(facts: Facts, vec: int, width: int) -> SplitRows:
    return SplitRows(
        reason="its rows may be long and few, and each phase over strips of them is a function",
        vec=vec,
        width=width,
        threads=block_threads(width),
        unroll=unrolled(facts, width),
    )
