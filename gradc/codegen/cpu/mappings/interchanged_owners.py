"""Elements of the result with an owner each, and the loop over owners inside that over what they add up."""

from __future__ import annotations

from dataclasses import dataclass

from ....analysis.chunks import interchanged_bound
from ....ir.dims import Size, product
from ..facts import Facts
from ..mapping import RowMapping, fields, rows_and_columns, short


@dataclass(frozen=True, kw_only=True)
class InterchangedOwners(RowMapping):
    """All owners of a chunk go through one member before the next."""

    asks_ahead = False
    owners_at_once = True


def gathers_by_member(facts: Facts) -> bool:
    """Whether each member gathers from a part of memory of its own."""
    if not all(map(facts.rows.owned_by_row, facts.kernel.accums)):
        return False
    axes = {a for a, _ in facts.rows.rest_axes}
    gathered = [{v for i in s.index for v, _ in i.terms} for s in facts.kernel.body if s.op == "load"]
    return any(
        axes & places and any(v.startswith("%") and facts.rows.by_column(v) for v in places) for places in gathered
    )


def interchanged_owners(facts: Facts) -> InterchangedOwners:
    """The mapping of owners whose members gather."""
    owners: Size = product(n for _, n in facts.rows.kept_axes)
    sizes = rows_and_columns(facts) | {"owners": owners}
    bound = interchanged_bound(short(sizes, "owners", owners), short(sizes, "cols", facts.kernel.col_count))
    reason = "each row that an owner adds up gathers from a part of memory of its own, which stays near for all owners"
    return InterchangedOwners(reason=reason, **fields(sizes, [bound]))
