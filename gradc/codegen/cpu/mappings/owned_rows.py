"""Elements of the result with an owner each, to which all rows are added in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import RowMapping, chunked_owners


@dataclass(frozen=True, kw_only=True)
class OwnedRows(RowMapping):
    """A task has a chunk of owners, and combines all members of one before the next."""


def owned_rows(facts: Facts, obstacle: str) -> OwnedRows:
    """The mapping of owners, :param obstacle: whose sums registers cannot hold, and why."""
    reason = f"elements of the result have an owner each, whose sums are in memory: {obstacle}"
    return OwnedRows(reason=reason, **chunked_owners(facts))
