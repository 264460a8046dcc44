"""Rows that are added to a small table of sums in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....analysis.combine import OWN_BLOCKS, OWN_COLUMNS, OWN_SHORTEST, OWN_STAGED, own
from ...declarations import used
from ...expr import carrier, variable
from ..accums import accumulator_bytes
from ..actions import chunks
from ..axes import axis_declarations
from ..facts import Facts
from ..kernel import CudaKernel
from ..mapping import Extents, ThreadMapping
from ..phase_writer import PhaseWriter
from ..row_order import key_of_row

WARPS, STAGED_ROWS = 16, OWN_STAGED
"""Of a block: warps, and rows that they stage at once."""


@dataclass(frozen=True, kw_only=True)
class SharedTable(ThreadMapping):
    """A block has a chunk of rows x ``width`` columns, and partial results of these in shared memory.

    All its warps stage rows there, and each adds those whose key is its own (modulo the warps): a sum has one owner,
    which adds in the order of rows, and a key that half of all rows have is added up in registers while the rows behind
    it are loaded.
    """

    purpose = "Rows, a table in shared memory: a block has a chunk of rows x WIDTH columns"
    rounds_partials = True

    @property
    def stage_width(self) -> int:
        return self.threads

    @staticmethod
    def chunk(kernel: CudaKernel, n: Extents) -> int:
        return max(OWN_SHORTEST, chunks(n.chunked, max(OWN_BLOCKS // max(n.tiles, 1), 1)))

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """What a row brings, and where it goes."""
        facts = writer.facts
        (s,), (p,) = facts.kernel.accums, facts.kernel.passes
        lines, value = [facts.scribe.value(v) for v in (*p.row, *p.body) if v.name], variable(s.args[0])
        axes = [*axis_declarations(facts.kernel.rows, "r"), *axis_declarations(facts.kernel.cols, "c")]
        key_lines, key = key_of_row(facts, facts.rows.parts[s.buffer], "-1", facts.kernel.rows, "r")
        return {
            "a": writer.accums[s.buffer],
            "rows": STAGED_ROWS,
            "warps": WARPS,
            "ctype": carrier(facts.scribe.values[s.args[0]]),
            "lines": [*used(axes, "\n".join([*lines, value])), *lines],
            "value": value,
            "key_lines": key_lines,
            "key": key,
        }


def fits_table(facts: Facts) -> bool:
    """Whether all that is done is to add whole rows to one result, for which shared memory has room."""
    rows = facts.rows
    partials = [rows.strategy_of[b].partials for b in rows.parts] == [True]
    return partials and own(facts.kernel, next(iter(rows.parts.values())), facts.types)


def shared_table(facts: Facts) -> SharedTable:
    """The mapping of a kernel that fits: a sum for each column of a task in each row of the result."""
    (part,) = facts.rows.parts.values()
    keys = facts.rows.key_count(part)
    assert isinstance(keys, int)
    return SharedTable(
        reason="whole rows are added to one result, for whose sums the shared memory of a block has room",
        width=OWN_COLUMNS,
        threads=32 * WARPS,
        tile=OWN_COLUMNS,
        shared_bytes=keys * OWN_COLUMNS * accumulator_bytes(facts, part.stmt),
    )
