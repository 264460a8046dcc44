"""Which threads of a GPU do what of a kernel: the choice of a mapping, from the facts of the kernel."""

from __future__ import annotations

from typing import TypeAlias, get_args

from .columns import columns_at_once
from .facts import Facts
from .mapping import ThreadMapping, threads_for_columns
from .mappings.column_strips import ColumnStrips, column_strips, plain_atomics
from .mappings.row_in_registers import RowInRegisters, row_in_registers
from .mappings.scanned_rows import ScannedRows, scanned_rows
from .mappings.sorted_chunk import SortedChunk, few_keys, sorted_chunk
from .mappings.split_rows import SplitRows, few_long_rows, split_rows
from .mappings.split_scans import SplitScans, few_long_scans, split_scans
from .mappings.thread_per_row import ThreadPerRow, reduces_rows_side_by_side, thread_per_row
from .mappings.tiled import Tiled, owned_columns, tiled
from .mappings.tiled_transpose import TiledTranspose, tiled_transpose
from .mappings.warp_segmented_scan import WarpSegmentedScan, segments_of_elements, warp_segmented_scan
from .mappings.whole_rows import WholeRows, whole_rows

Mapping: TypeAlias = (
    SortedChunk
    | Tiled
    | TiledTranspose
    | ColumnStrips
    | WarpSegmentedScan
    | ThreadPerRow
    | SplitScans
    | ScannedRows
    | RowInRegisters
    | SplitRows
    | WholeRows
)
MAPPINGS: dict[str, type[ThreadMapping]] = {kind.name(): kind for kind in get_args(Mapping)}
"""By the names that launches know them by."""


def choose_mapping(facts: Facts, whole: bool = False) -> Mapping:
    """The first mapping that fits, from the most special to whole rows, which fit always.

    :param whole: whether the threads of a task are to have all columns of a row.
    """
    if few_keys(facts):
        return sorted_chunk(facts)
    if segments_of_elements(facts):
        return warp_segmented_scan()
    if facts.vector_groups or reduces_rows_side_by_side(facts):
        return thread_per_row(facts)
    if facts.kernel.scans:
        scanned = scanned_rows(facts)
        return split_scans(scanned) if few_long_scans(facts, scanned) else scanned
    vec = columns_at_once(facts.kernel, facts.types, len(facts.kernel.accums), facts.reduces)
    width = threads_for_columns(facts, vec)
    if facts.separate_columns:  # a row may be cut into tasks
        if owned_columns(facts) and (mapping := tiled(facts, vec, whole)) is not None:
            return mapping
        if plain_atomics(facts) and width > 1:
            return tiled_transpose(facts) or column_strips(facts, vec, width)
    elif (in_registers := row_in_registers(facts)) is not None:
        return in_registers
    if few_long_rows(facts, width):
        return split_rows(facts, vec, width)
    return whole_rows(facts, vec)
