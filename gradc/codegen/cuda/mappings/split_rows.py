"""Few long rows: each phase is a function over strips of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...declarations import used
from ..axes import declared
from ..facts import FEW_ROWS, LONG_ROW, Facts
from ..mapping import block_threads
from ..phase_writer import PhaseView, PhaseWriter
from ..row_order import row_axes
from ..workspace import strip_arrays
from .whole_rows import WholeRows, is_ragged, unrolled, with_ragged_ends


@dataclass(frozen=True, kw_only=True)
class SplitRows(WholeRows):
    """Whole rows, unless a launch has few: each phase is a function then, a task a strip of a row, and what a phase
    reduces is combined from the strips by those after it.
    """

    reduces_in_pairs = False

    @property
    def template(self) -> str:
        return "whole_rows"

    def split_reductions(self, writer: PhaseWriter) -> list[tuple[str, str]]:
        return [(r.ctype, r.strips) for p in writer.phases for r in p.reductions]

    def split_phases(self, writer: PhaseWriter) -> Iterator[dict[str, Any]]:
        arrays = strip_arrays(self.split_reductions(writer))
        for i, p in enumerate(writer.phases):
            setup = [
                declared("const ix strips = gradc_chunks(cols, chunk);"),
                declared(f"const ix r = {'task / strips' if p.columns else 'task'};"),
                declared(f"const ix strip = {'task % strips' if p.columns else '0'};"),
                *arrays,
            ]
            before = writer.phases[: i + 1]
            values = used([declared(v) for q in before for v in q.values], _text(writer.phases, i))
            kind = "part" if p.columns else "last"
            stage = {"template": "split_rows", "suffix": f"part{i}", "kind": kind, "setup": setup}
            given = {"p": p, "earlier": before[:-1], "row_axes": row_axes(writer.facts, before), "needed": values}
            yield stage | given


def _text(phases: Sequence[PhaseView], number: int) -> str:
    """The text of a phase, to look for names in, with the reductions of those before it."""
    before = [line for q in phases[:number] for r in q.reductions for line in (r.start, r.result)]
    own = phases[number]
    return "\n".join([*before, own.text, *own.effects])


def few_long_rows(facts: Facts, width: int) -> bool:
    """Whether there may be few rows, and long ones, that are reduced and nothing else."""
    rows, columns = facts.kernel.row_count, facts.kernel.col_count
    few = rows < FEW_ROWS if isinstance(rows, int) else isinstance(columns, int)
    long = not isinstance(columns, int) or columns > LONG_ROW
    alone = facts.reduces and not facts.kernel.accums and not facts.kernel.scans
    return few and long and alone and width > 32


def split_rows(facts: Facts, vec: int, width: int) -> SplitRows:
    """The mapping of long rows of which a launch may have few."""
    vec = with_ragged_ends(facts, vec)
    return SplitRows(
        reason="its rows may be long and few, and each phase over strips of them is a function",
        vec=vec,
        ragged=is_ragged(facts, vec),
        width=width,
        threads=block_threads(width),
        unroll=unrolled(facts, width),
    )
