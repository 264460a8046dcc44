"""Rows whose columns are scanned."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import THREADS, ChunkOfRows, block_threads

COLUMN_LOOP = """for (ix col = first_col + lane_col; col - lane_col < end_col; col += WIDTH) {
const bool live = col < end_col;"""
"""All threads go round together, one column each."""


@dataclass(frozen=True, kw_only=True)
class ScannedRows(ChunkOfRows):
    """A task goes through whole rows, its threads round the columns together, one column each."""

    purpose = "Whole rows: a task goes through those of a chunk"
    predicate = "columns"


def scanned_rows(facts: Facts) -> ScannedRows:
    """One thread of a row where neighbouring rows are contiguous, or sums belong to threads by their columns; else
    whole warps.
    """
    width = 32
    if facts.ordered or facts.rows.scans_side_by_side:
        width = 1
    while 1 < width < THREADS and width < facts.nominal_columns:
        width *= 2
    return ScannedRows(reason="columns are scanned", width=width, threads=block_threads(width), column_loop=COLUMN_LOOP)
