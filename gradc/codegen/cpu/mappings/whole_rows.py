"""Whole rows in their own order."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import RowMapping, chunked_rows


@dataclass(frozen=True, kw_only=True)
class WholeRows(RowMapping):
    """A task goes through the whole rows of a chunk, and has partial results of its own."""


def whole_rows(facts: Facts) -> WholeRows:
    """The mapping of any kernel whose rows are in no order of keys or owners."""
    return WholeRows(reason=_reason(facts), **chunked_rows(facts))


def _reason(facts: Facts) -> str:
    """Why a kernel has no other mapping."""
    if facts.kernel.accums:
        return "rows are combined into partial results, one for each chunk of them"
    if len(facts.kernel.cols) != 1:
        return "a row has several axes of columns" if facts.kernel.cols else "a row has no columns to cut up"
    return "the columns of a row meet in it: its passes need whole rows"
