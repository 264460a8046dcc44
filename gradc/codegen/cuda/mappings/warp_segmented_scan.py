"""Rows of one element in the order of their keys, combined by a segmented scan of a warp."""

from __future__ import annotations

from dataclasses import dataclass

from ....analysis.chunks import GPU_SORTED
from ....targets.gpu import WARP
from ..actions import chunks
from ..facts import Facts
from ..kernel import CudaKernel
from ..mapping import ChunkOfRows, Extents


@dataclass(frozen=True, kw_only=True)
class WarpSegmentedScan(ChunkOfRows):
    """A task is a warp, a lane has a row, and the rows of a segment are combined by a segmented scan of the warp."""

    purpose = "Rows, a warp segmented scan: each lane of a task has a row"

    @property
    def shares_rows(self) -> bool:
        return False

    @staticmethod
    def chunk(kernel: CudaKernel, n: Extents) -> int:
        return min(GPU_SORTED, max(1, chunks(n.rows, 2 * n.workers))) * WARP


def segments_of_elements(facts: Facts) -> bool:
    """Whether rows have no columns and are combined in the order of their keys."""
    return not facts.kernel.cols and facts.order == "by key" and all(map(facts.rows.in_segments, facts.ordered))


def warp_segmented_scan() -> WarpSegmentedScan:
    """The mapping of rows of one element in the order of their keys."""
    reason = "rows of one element are combined in the order of their keys"
    return WarpSegmentedScan(reason=reason, width=WARP, sums="lanes")
