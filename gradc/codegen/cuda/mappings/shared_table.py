"""Rows that are added to a small table of sums in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....passes.reductions.combine import OWN_COLUMNS, OWN_STAGED, own
from ..facts import Facts
from ..mapping import ThreadMapping

WARPS, STAGED_ROWS = 16, OWN_STAGED
"""Of a block: warps, and rows that they stage at once."""


@dataclass(frozen=True, kw_only=True)
class SharedTable(ThreadMapping):
    """A block has a chunk of rows x ``width`` columns, and partial results of these in shared memory.

    All its warps stage rows there, and each adds those whose key is its own (modulo the warps): a sum has one owner,
    which adds in the order of rows, and a key that half of all rows have is added up in registers while the rows behind
    it are loaded.
    """

    template: ClassVar[str] = "shared_table"
    visits_whole_rows: ClassVar[bool] = False
    purpose: ClassVar[str] = "Rows, a table in shared memory: a block has a chunk of rows x WIDTH columns"


def fits_table(facts: Facts) -> bool:
    """Whether all that is done is to add whole rows to one result, for which shared memory has room."""
    rows = facts.rows
    partials = [rows.strategy_of[b].partials for b in rows.parts] == [True]
    return partials and own(facts.kernel, next(iter(rows.parts.values())), facts.types)


def shared_table(facts: Facts) -> SharedTable:
    """The mapping of a kernel that fits."""
    return SharedTable(
        reason="whole rows are added to one result, for whose sums the shared memory of a block has room",
        width=OWN_COLUMNS,
        threads=32 * WARPS,
    )
