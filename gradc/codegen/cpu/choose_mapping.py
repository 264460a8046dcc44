"""Which task, and which lane of a vector, does what of a kernel: the choice of a mapping, from the kernel's facts."""

from __future__ import annotations

from typing import TypeAlias, get_args

from .facts import Facts
from .mapping import RowMapping
from .mappings.column_strips import ColumnStrips, column_strips
from .mappings.interchanged_owners import InterchangedOwners, gathers_by_member, interchanged_owners
from .mappings.lane_per_row import LanePerRow, lane_per_row, scans_rows_side_by_side
from .mappings.owned_rows import OwnedRows, owned_rows
from .mappings.owners_in_registers import OwnersInRegisters, owners_in_registers
from .mappings.segmented_rows import SegmentedRows, segmented_rows
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
    """The first mapping that fits, of the order in which the kernel's rows are visited."""
    if facts.maps_elements:
        return column_strips(facts)
    if scans_rows_side_by_side(facts):
        return lane_per_row(facts)
    if facts.order == "by key":
        in_memory = obstacle(facts)
        return segmented_rows(facts, in_memory) if in_memory else segments_in_registers(facts)
    if facts.order == "by owner":
        if gathers_by_member(facts):
            return interchanged_owners(facts)
        in_memory = obstacle(facts)
        return owned_rows(facts, in_memory) if in_memory else owners_in_registers(facts)
    return whole_rows(facts)
