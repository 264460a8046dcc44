"""Strips of columns that are only mapped."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import RowMapping


@dataclass(frozen=True, kw_only=True)
class ColumnStrips(RowMapping):
    """A task has some rows of a strip of columns."""

    strips = True

    def tasks(self, facts: Facts) -> str:
        return "gradc_chunks(rows, chunk) * gradc_chunks(cols, GRADC_STRIP)"
