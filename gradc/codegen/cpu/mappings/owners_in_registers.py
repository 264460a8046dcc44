"""Elements of the result with an owner each, whose sums are in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..facts import Facts
from ..mapping import RowMapping, chunked_owners
from ..phase_writer import PhaseWriter
from ..register_sums import register_sums


@dataclass(frozen=True, kw_only=True)
class OwnersInRegisters(RowMapping):
    """A task has a chunk of owners; members of one are added to a block of columns in registers, then to the next."""

    sums_in_registers = True

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        return {"t": register_sums(writer)}


def owners_in_registers(facts: Facts) -> OwnersInRegisters:
    """The mapping of owners whose members are only added up."""
    reason = "all that is done with the rows of an owner is to add them up, column by column"
    return OwnersInRegisters(reason=reason, **chunked_owners(facts))
