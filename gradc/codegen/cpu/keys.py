"""Rows that are visited in the order of their keys: the rows of the result that they add to."""

from __future__ import annotations

from dataclasses import dataclass

from ...analysis.combine import Combine, line_of_keys, row_searches
from ...ir.dims import Size
from ...ir.statement import Index, Stmt
from ...process.forks import cached_property
from ..expr import Scribe, carrier, stored, variable
from ..index import size
from ..rows import RowFacts


def found_by(s: Stmt) -> str:
    """The array of what a search finds for each row."""
    return f"found_{variable(s.name)}"


def _seek_of(s: Stmt) -> str:
    """Where the search for one row after another is."""
    return f"seek_{variable(s.name)}"


@dataclass(frozen=True, eq=False)
class RowKeys:
    """The keys of a kernel's rows.

    :param part: the accum whose index they are, :param scribe: and what writes their statements.
    """

    rows: RowFacts
    part: Combine
    scribe: Scribe

    @cached_property
    def kept_searches(self) -> list[Stmt]:
        """The searches for a row itself that more is made of than its key: in the order of the keys each would begin
        anew, in the order of the rows it goes on.
        """
        return [] if self.scribe.guarded else row_searches(self.rows.kernel, beside_keys(self.rows))

    @cached_property
    def begins(self) -> Stmt | None:
        """The search for each row in a line that says where the rows of each key begin, and ascends, which is all that
        its key is made of; None if there is none.
        """
        if self.rows.visits_all_rows or self.scribe.guarded:
            return None  # with bounds looked at, each row is searched for by itself
        search = line_of_keys(self.rows.kernel, self.part, self.rows.types)
        return None if {*self.kept_searches} - {search} else search

    @property
    def count(self) -> Size:
        """Keys that a row may have: the rows of the result."""
        return self.rows.key_count(self.part)

    # -- as text -------------------------------------------------------------------------------------------------------

    @property
    def values(self) -> list[Stmt]:
        """The statements of a row's key, and of the searches that the row's other values read as well."""
        names = [s.name for s in (*self.rows.key_slice(self.part), *self.kept_searches)]
        return self.rows.slice_of(names)

    @property
    def searches(self) -> list[Stmt]:
        """The searches of these for the row itself: what they find does not go back from row to row."""
        return [] if self.scribe.guarded else row_searches(self.rows.kernel, self.values)

    @property
    def seeks(self) -> list[str]:
        """What such searches go on from, declared before a task's rows."""
        lines = []
        for s in self.searches:
            line = self.rows.types[s.buffer]
            of = f"{s.buffer}, {self.scribe.size(line.shape[-1])}"
            lines.append(f"gradc_seek {_seek_of(s)} = gradc_seek_{stored(line.dtype)}({of}, first, last - 1);")
        return lines

    @property
    def lines(self) -> list[str]:
        """The statements that compute a row's key."""
        searches = self.searches
        lines = [self.scribe.value(s, _seek_of(s) if s in searches else "") for s in self.values]
        return [*lines, *(f"{found_by(s)}[r] = {variable(s.name)};" for s in self.kept_searches)]

    @property
    def key(self) -> str:
        """The key of row ``r``, as C."""
        return self.rows.key_expression(self.part, size(self.count))

    def known(self, s: Stmt) -> str:
        """A value of a row as C, where its key says it, if no row without one comes, or a search along with the keys
        has found it; else "".
        """
        if s in self.kept_searches:
            return f"{found_by(s)}[r]" if self.begins is None else "to + 1"
        if not self.rows.visits_all_rows:
            if self.part.leading == 1 and self.part.stmt.index[0] == Index.of(s.name):
                return f"({carrier(self.scribe.values[s.name])})to"
            if s.name == self.part.stmt.where:
                return "1"
        return ""


def beside_keys(rows: RowFacts) -> list[Stmt]:
    """The statements of all that a row computes but its key."""
    values: list[str] = []
    for s in (s for s in rows.kernel.body if not s.name):
        rest = s.index[rows.parts[s.buffer].leading :] if s.op == "accum" and rows.in_segments(s) else None
        values += s.uses if rest is None else [*s.args, *(v for i in rest for v, _ in i.terms)]
    return rows.slice_of([v for v in values if v.startswith("%")])
