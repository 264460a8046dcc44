"""Maps: a row is cut into strips of columns, a task each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..facts import Facts
from ..mapping import ThreadMapping

STRIP = 2048
"""Columns per task at least."""


@dataclass(frozen=True, kw_only=True)
class ColumnStrips(ThreadMapping):
    """A task is a strip of the columns of one row; nothing is combined in an order."""

    template: ClassVar[str] = "column_strips"
    visits_whole_rows: ClassVar[bool] = False
    purpose: ClassVar[str] = "Rows, in strips: a task has a strip of one row's columns"


def plain_atomics(facts: Facts) -> bool:
    """Whether nothing is combined but by atomics on values."""
    return all(strategy.atomics == "values" for strategy in facts.rows.strategy_of.values())


def column_strips(vec: int, width: int) -> ColumnStrips:
    reason = "each column is computed by itself, and nothing is combined in an order"
    return ColumnStrips(reason=reason, vec=vec, width=width)
