"""Neighbouring vector lanes with neighbouring rows, which are neighbours in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....ir.dims import product
from ....ir.statement import REDUCTIONS
from ...index import size
from ..arrays import grouped
from ..facts import Facts
from ..mapping import RowMapping, chunked_rows
from ..phase_writer import PhaseWriter
from ..scans import RunningValue


@dataclass(frozen=True)
class Lanes:
    """Rows that lie together in memory, scanned side by side.

    :param axis: the variable of the loop over them.
    :param size: how many there are, as C.
    :param column: the variable of the columns, and :param columns: their number.
    :param descending: whether columns are visited from the last to the first.
    :param running: the arrays of what scans keep.
    :param body: the statements of one row and column.
    """

    axis: str
    size: str
    column: str
    columns: str
    descending: bool
    running: tuple[RunningValue, ...]
    body: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LanePerRow(RowMapping):
    """Neighbouring lanes have neighbouring rows: a task has GRADC_LANES of them, and all of their columns.

    So an axis is scanned that is not the last in memory.
    """

    streams = False
    asks_ahead = False

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """The loop over rows and columns."""
        k, (p,) = writer.k, writer.k.passes
        axis, extent = k.rows[-1]
        columns, running = writer.computed(p, 0, f"{axis} - first_lane")
        row = [writer.row_value(s) for s in p.row]
        body = (*row, *columns, *(line for s in p.roots for line in writer.effect(s)))
        lanes = Lanes(axis, size(extent), writer.facts.innermost, size(k.cols[0][1]), k.descending, running, body)
        return {"w": lanes}


def scans_rows_side_by_side(facts: Facts) -> bool:
    """Whether nothing is done but to scan rows in one pass whose neighbours in memory are neighbouring rows."""
    k = facts.kernel
    reduces = any(s.op in REDUCTIONS or s.op == "check" for s in k.body)
    once = any(not s.name for p in k.passes for s in p.row)
    return not reduces and not once and len(k.passes) == 1 and facts.rows.scans_side_by_side


def lane_per_row(facts: Facts) -> LanePerRow:
    """The mapping of rows that are scanned side by side."""
    *outer, (_, extent) = facts.kernel.rows
    lines = grouped(size(product(n for _, n in outer)))
    return LanePerRow(
        reason="rows are scanned whose neighbours in memory are neighbouring rows",
        **chunked_rows(facts) | {"tasks": f"{lines} * gradc_chunks({size(extent)}, GRADC_LANES)"},
    )
