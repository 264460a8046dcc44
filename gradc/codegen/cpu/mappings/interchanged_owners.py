"""Elements of the result with an owner each, and the loop over owners inside that over what they add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....analysis.chunks import Bound, interchanged_bound
from ....ir.dims import Size
from ..facts import Facts
from ..mapping import Owned


@dataclass(frozen=True, kw_only=True)
class InterchangedOwners(Owned):
    """All owners of a chunk go through one member before the next."""

    asks_ahead = False
    owners_at_once = True

    def bounds(self, facts: Facts, short: Callable[[str, Size], Size]) -> list[Bound]:
        return [interchanged_bound(short("owners", facts.owners), short("cols", facts.kernel.col_count))]


def gathers_by_member(facts: Facts) -> bool:
    """Whether each member gathers from a part of memory of its own."""
    if not all(map(facts.rows.owned_by_row, facts.kernel.accums)):
        return False
    axes = {a for a, _ in facts.rows.rest_axes}
    gathered = [{v for i in s.index for v, _ in i.terms} for s in facts.kernel.body if s.op == "load"]
    return any(
        axes & places and any(v.startswith("%") and facts.rows.by_column(v) for v in places) for places in gathered
    )
