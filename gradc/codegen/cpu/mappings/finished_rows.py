"""Rows that another kernel finishes."""

from __future__ import annotations

from dataclasses import dataclass

from ..mapping import RowMapping


@dataclass(frozen=True, kw_only=True)
class FinishedRows(RowMapping):
    """Each row is computed as soon as the kernel before has finished the row that it reads, by the task that did."""

    streams = False
