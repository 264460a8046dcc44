"""Rows that are added to a result of few rows: each block sorts its own by their key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....analysis.combine import OWN_BATCH, OWN_BLOCKS, OWN_COLUMNS, OWN_SHORTEST, own
from ..actions import chunks
from ..columns import columns_at_once
from ..facts import Facts
from ..kernel import CudaKernel
from ..mapping import THREADS, Extents, threads_for_columns
from ..phase_writer import PhaseWriter
from ..row_order import key_of_row
from .tiled import Tiled, prefetched_rows

WARPS = 2 * THREADS // 32
"""Of a block."""
WIDEST = 4
"""Columns of a thread at most: what its slices leave to others fits where the sort has counted."""


@dataclass(frozen=True, kw_only=True)
class SortedChunk(Tiled):
    """A block has a chunk of rows x ``tile`` columns, and sorts :data:`OWN_BATCH` rows at a time by their key in shared
    memory: one pass of a digit, as there are few keys.  Its groups of ``width`` threads share the sorted positions out
    evenly, whatever the keys, and add up those of one key in registers; pieces of a key that several groups have meet
    in their order.  The sums of a batch join the chunk's partial result.
    """

    purpose = "Rows, sorted by a block: it has a chunk of rows x WIDTH * VEC columns"

    @property
    def stage_width(self) -> int:
        return self.threads

    @staticmethod
    def chunk(kernel: CudaKernel, n: Extents) -> int:
        return max(OWN_SHORTEST, chunks(n.chunked, max(OWN_BLOCKS // max(n.tiles, 1), 1)))

    def row_at(self, facts: Facts, position: str) -> str:
        return f"batch + (ix)order[{position}]"

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """What a row brings, and the row of the result that it is added to."""
        facts = writer.facts
        (a,) = writer.accums.values()
        lines, key = key_of_row(facts, facts.rows.parts[a.buffer], "KEYS", facts.kernel.rows, "r")
        sizes = {"bits": self.chunk_keys.bit_length(), "warps": WARPS, "batch_rows": OWN_BATCH}
        return {**super().given(writer), **sizes, "a": a, "key_lines": lines, "key": key}


def few_keys(facts: Facts) -> bool:
    """Whether all that is done is to add whole rows to one result of few rows."""
    rows = facts.rows
    partials = [rows.strategy_of[b].partials for b in rows.parts] == [True]
    return partials and own(facts.kernel, next(iter(rows.parts.values())), facts.types)


def sorted_chunk(facts: Facts) -> SortedChunk:
    """The mapping of a kernel that fits."""
    (part,) = facts.rows.parts.values()
    keys = facts.rows.key_count(part)
    assert isinstance(keys, int)
    vec = min(columns_at_once(facts.kernel, facts.types, len(facts.kernel.accums)), WIDEST)
    width = min(threads_for_columns(facts, vec), OWN_COLUMNS // vec)
    return SortedChunk(
        reason="whole rows are added to one result of few rows, by which a block sorts its own",
        vec=vec,
        width=width,
        threads=32 * WARPS,
        resident=32 * WARPS,
        sums="registers",
        prefetch=prefetched_rows(facts, vec, sorts_chunk=True),
        iterations=1,
        tile=width * vec,
        chunk_keys=keys,
    )
