"""Few long rows whose columns are scanned: reduce, then scan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from ..accums import adds_to_result
from ..axes import declared
from ..facts import Facts
from ..mapping import THREADS
from ..phase_writer import PhaseWriter
from ..row_order import row_axes
from ..workspace import strip_arrays
from .scanned_rows import ScannedRows


@dataclass(frozen=True, kw_only=True)
class SplitScans(ScannedRows):
    """Whole rows, unless a launch has few: one function combines the columns of each strip of a row, and another one
    goes through the strips once more, each from what those before it are combined to.

    A strip is a multiple of a task's threads, so that only what the last one is combined to has columns that are not
    there, and no other reads that.  From some 150 rows on each as a block takes less time than going through all twice,
    by the static model.
    """

    few_rows = 128
    long_row = 16 * THREADS
    strip = THREADS

    @property
    def template(self) -> str:
        return "scanned_rows"

    def split_reductions(self, writer: PhaseWriter) -> list[tuple[str, str]]:
        return [(scan.ctype, scan.strips) for scan in writer.phases[0].scans]

    def split_phases(self, writer: PhaseWriter) -> Iterator[dict[str, Any]]:
        (p,) = writer.phases
        setup = [
            declared("const ix strips = gradc_chunks(cols, chunk);"),
            declared("const ix r = task / strips;"),
            declared("const ix strip = task % strips;"),
            *strip_arrays(self.split_reductions(writer)),
        ]
        axes = row_axes(writer.facts, writer.phases)
        for i, template in enumerate(("strip_totals", "split_scans")):
            stage = {"template": template, "suffix": f"part{i}", "kind": "part", "setup": setup}
            yield stage | {"p": p, "row_axes": axes}


def few_long_scans(facts: Facts, mapping: ScannedRows) -> bool:
    """Whether there may be few rows, and long ones, of which strips can be combined before they are scanned: no scan
    reads another one or a reduction, and what is added is so to the result itself, by atomics: the workspace is that of
    the strips.  The factors of a recurrence are not multiplied over strips: their products may be beyond the largest
    number.
    """
    k, rows, columns = facts.kernel, facts.kernel.row_count, facts.kernel.col_count
    inputs = facts.rows.slice_of([v for s in k.scans for v in s.args])
    return (
        (not isinstance(rows, int) or rows < SplitScans.few_rows)
        and (not isinstance(columns, int) or columns > SplitScans.long_row)
        and mapping.width == THREADS
        and len(k.passes) == 1
        and not facts.reduces
        and all(facts.rows.in_columns(s) and adds_to_result(facts, s) for s in k.accums)
        and not any(s.op == "scan" for s in inputs)
        and not any(s.combine == "affine" for s in k.scans)
    )


def split_scans(mapping: ScannedRows) -> SplitScans:
    """The mapping of long rows of which a launch may have few, and of others as without it."""
    given = {each.name: getattr(mapping, each.name) for each in fields(mapping)}
    return SplitScans(**given | {"reason": "columns are scanned, and strips of few long rows one beside the other"})
