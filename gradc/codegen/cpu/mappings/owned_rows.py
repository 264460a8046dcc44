"""Elements of the result with an owner each, which rows are combined into in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..mapping import Owned


@dataclass(frozen=True, kw_only=True)
class OwnedRows(Owned):
    """A task has a chunk of owners, and combines all members of one before the next."""
