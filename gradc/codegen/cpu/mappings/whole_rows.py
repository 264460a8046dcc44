"""Whole rows in their own order."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import RowMapping


@dataclass(frozen=True, kw_only=True)
class WholeRows(RowMapping):
    """A task goes through the whole rows of a chunk, and has partial results of its own."""


def whole_rows(facts: Facts) -> WholeRows:
    """The mapping of any kernel whose rows are in no order of keys or owners."""
    if facts.kernel.accums:
        reason = "rows are combined into partial results, one for each chunk of them"
    elif len(facts.kernel.cols) != 1:
        reason = "a row has several axes of columns" if facts.kernel.cols else "a row has no columns to cut up"
    else:
        reason = "the columns of a row meet in it: its passes need whole rows"
    return WholeRows(reason=reason)
