"""Strips of columns that are only mapped."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import RowMapping, chunked_rows


@dataclass(frozen=True, kw_only=True)
class ColumnStrips(RowMapping):
    """A task has some rows of a strip of columns."""

    strips = True


def column_strips(facts: Facts) -> ColumnStrips:
    """The mapping of rows that are only mapped."""
    return ColumnStrips(
        reason="each element is computed by itself: rows and columns are both cut up",
        **chunked_rows(facts) | {"tasks": "gradc_chunks(rows, chunk) * gradc_chunks(cols, GRADC_STRIP)"},
    )
