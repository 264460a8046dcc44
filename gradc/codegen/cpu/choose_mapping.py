"""Which task, and which lane of a vector, does what of a kernel: the choice of a mapping, from the kernel's facts."""

from __future__ import annotations

from typing import TypeAlias, get_args

from .facts import Facts
from .mapping import RowMapping
from .mappings.column_strips import ColumnStrips
from .mappings.interchanged_owners import InterchangedOwners, gathers_by_member
from .mappings.lane_per_row import LanePerRow, scans_rows_side_by_side
from .mappings.owned_rows import OwnedRows
from .mappings.owners_in_registers import OwnersInRegisters
from .mappings.segmented_rows import SegmentedRows
from .mappings.segments_in_registers import SegmentsInRegisters, segments_in_registers
from .mappings.whole_rows import WholeRows, whole_rows
from .register_sums import obstacle

Mapping: TypeAlias = (
    ColumnStrips
    | LanePerRow
    | SegmentsInRegisters
    | SegmentedRows
    | InterchangedOwners
    | OwnersInRegisters
    | OwnedRows
    | WholeRows
)
MAPPINGS: dict[str, type[RowMapping]] = {kind.name(): kind for kind in get_args(Mapping)}
"""By the names that explanations know them by."""


def choose_mapping(facts: Facts) -> Mapping:
    """The first mapping that fits, from the most special to whole rows, which fit always."""
    if facts.maps_elements:
        return ColumnStrips(reason="each element is computed by itself: rows and columns are both cut up")
    if scans_rows_side_by_side(facts):
        return LanePerRow(reason="rows are scanned whose neighbours in memory are neighbouring rows")
    if facts.order == "by key":
        if why_not := obstacle(facts):
            return SegmentedRows(reason=f"rows of one key follow one another, and are combined in memory: {why_not}")
        return segments_in_registers(facts, "rows of one key follow one another, and are only added up")
    if facts.order == "by owner":
        if gathers_by_member(facts):
            reason = "each row that an owner adds up gathers from a part of memory of its own: it stays near for all"
            return InterchangedOwners(reason=reason)
        if why_not := obstacle(facts):
            return OwnedRows(reason=f"parts of the result have an owner each, and are combined in memory: {why_not}")
        return OwnersInRegisters(reason="parts of the result have an owner each, and are only added up")
    return whole_rows(facts)
