"""Neighbouring vector lanes with neighbouring rows, which are neighbours in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....ir.dims import product
from ....ir.statement import REDUCTIONS
from ...index import grouped, size
from ..facts import Facts
from ..mapping import RowMapping
from ..phase_writer import PhaseWriter


@dataclass(frozen=True, kw_only=True)
class LanePerRow(RowMapping):
    """Neighbouring lanes have neighbouring rows: a task has GRADC_LANES of them, and all of their columns.

    So an axis is scanned that is not the last in memory.
    """

    streams = False
    asks_ahead = False

    def tasks(self, facts: Facts) -> str:
        *outer, (_, extent) = facts.kernel.rows
        return f"{grouped(size(product(n for _, n in outer)))} * gradc_chunks({size(extent)}, GRADC_LANES)"

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """The axes of neighbouring rows and of columns, what scans keep, and the statements of one row and column."""
        axis, extent = writer.k.rows[-1]
        (p,) = writer.k.passes
        columns, running = writer.computed(p, 0, f"{axis} - first_lane")
        row = [writer.row_value(s) for s in p.row]
        body = [*row, *columns, *(line for s in p.roots for line in writer.effect(s))]
        given = {"axis": axis, "extent": size(extent), "running": running, "body": body}
        return given | {
            "column": writer.facts.innermost,
            "columns": size(writer.k.col_count),
            "descending": writer.k.descending,
        }


def scans_rows_side_by_side(facts: Facts) -> bool:
    """Whether nothing is done but to scan rows in one pass whose neighbours in memory are neighbouring rows."""
    k = facts.kernel
    reduces = any(s.op in REDUCTIONS or s.op == "check" for s in k.body)
    once = any(not s.name for p in k.passes for s in p.row)
    return not reduces and not once and len(k.passes) == 1 and facts.rows.scans_side_by_side
