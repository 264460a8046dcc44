"""Rows whose columns are scanned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..facts import NOMINAL, Facts
from ..mapping import THREADS, ChunkOfRows, block_threads


@dataclass(frozen=True, kw_only=True)
class ScannedRows(ChunkOfRows):
    """A task goes through whole rows, its threads round the columns together, one column each."""

    purpose: ClassVar[str] = "Whole rows: a task goes through those of a chunk"
    predicate: ClassVar[Literal["", "rows", "columns"]] = "columns"


def scanned_rows(facts: Facts) -> ScannedRows:
    """One thread of a row where neighbouring rows are contiguous, or sums belong to threads by their columns; else
    whole warps.
    """
    width = 32
    if facts.ordered or facts.rows.scans_side_by_side:
        width = 1
    while 1 < width < THREADS and width < (NOMINAL if facts.known_columns is None else facts.known_columns):
        width *= 2
    return ScannedRows(reason="columns are scanned", width=width, threads=block_threads(width), column_loop="scanned")
