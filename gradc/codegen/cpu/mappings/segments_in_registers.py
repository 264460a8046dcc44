"""Rows in the order of their keys, whose sums are in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..facts import Facts
from ..mapping import Segmented
from ..phase_writer import PhaseWriter
from ..register_sums import register_sums


@dataclass(frozen=True, kw_only=True)
class SegmentsInRegisters(Segmented):
    """A task has some chunks of the sorted rows; those of one key are added to a block of columns in registers, then to
    the next.
    """

    sums_in_registers = True

    def tasks(self, facts: Facts) -> str:
        return "gradc_chunks(start[keys], gradc_together(chunks) * chunk)"

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        return {"t": register_sums(writer)}


def segments_in_registers(facts: Facts, reason: str) -> SegmentsInRegisters:
    """The mapping of sorted rows that are only added up, which may be in the order of their keys as they are."""
    begins = facts.keys.begins if facts.keys is not None else None
    return SegmentsInRegisters(reason=reason, starts="" if begins is None else f"{begins.buffer}[k]")
