"""What the templates of ``templates/cuda/kernel`` ask of a kernel, beside its mapping."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.dims import product
from ..declarations import used
from ..expr import carrier, variable
from ..index import size
from ..row_accum import Results
from .accums import Accum
from .axes import axis_declarations
from .facts import Facts
from .finished_rows import Reader
from .mapping import ThreadMapping, even_columns
from .phase_writer import PhaseView
from .row_order import Visit, row_axes, visit


@dataclass(frozen=True, eq=False, kw_only=True)
class RowProgram(Results[Accum]):
    """A kernel's row program.

    :param phases: of a row.
    :param then: what finished rows are handed to, if not to memory.
    """

    facts: Facts
    mapping: ThreadMapping
    phases: tuple[PhaseView, ...]
    then: Reader | None = None

    @property
    def shares_sums(self) -> bool:
        """Whether some of the sums that a thread keeps are in shared memory."""
        return any(a.shared_sums for a in self.accums)

    @property
    def syncs(self) -> bool:
        """Whether what the threads of a task add for a row others of them may add to for the next, or read."""
        apart = all(self.facts.own(a.stmt) and not a.wide_accumulator for a in self.accums if a.ordered)
        return self.mapping.sums == "memory" and not apart

    @property
    def even_cols(self) -> bool:
        """Whether a thread's columns are neighbours, and, but where rows are ragged, all there or none."""
        return self.mapping.ragged or even_columns(self.facts, self.mapping.vec)

    @property
    def full(self) -> bool:
        """Whether each thread has all columns of each walk: of a row that is kept in registers, or of the next ones."""
        m, columns = self.mapping, self.facts.known_columns
        if m.row is None:
            return m.unroll > 0 and columns is not None and columns % (m.unroll * m.width * m.vec) == 0
        return m.row.iterations * m.width * m.vec == columns

    @property
    def kept(self) -> list[tuple[str, str]]:
        """C type and name of the values of the row that stay in registers between its phases."""
        names = self.mapping.row.kept if self.mapping.row is not None else ()
        dtypes = {name: self.facts.kernel.stmts[name].dtype for name in names}
        return [(carrier(d), variable(name)) for name, d in dtypes.items() if d is not None]

    # -- the rows of a chunk -------------------------------------------------------------------------------------------

    @property
    def order(self) -> str:
        """``rows``, ``by_key`` or ``by_owner``"""
        return self.facts.rows.order_name

    @property
    def positions(self) -> str:
        """How many positions a segmented order visits."""
        return "rows" if self.facts.rows.visits_all_rows else "segment_start[keys]"

    @property
    def visit(self) -> Visit:
        """The row at a position."""
        return visit(self.facts, "\n".join(p.text for p in self.phases))

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The declarations of the axes of row ``r``."""
        return row_axes(self.facts, self.phases)

    @property
    def kept_axes(self) -> list[str]:
        """The declarations of the axes of a kept row, from its number ``q``."""
        text = "\n".join([p.text for p in self.phases] + [a.kept_text for a in self.accums])
        return used(axis_declarations(self.facts.rows.kept_axes, "q"), text)

    @property
    def rest_count(self) -> str:
        """Rows that meet in a kept row."""
        return size(product(n for _, n in self.facts.rows.rest_axes))
