"""What every mapping of a kernel to tasks and vector lanes says to those who write its statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...analysis.chunks import Bound, task_bounds
from ...ir.dims import Size, product
from ..mapping import KernelMapping
from .facts import Facts


@dataclass(frozen=True)
class Stage:
    """A function of a kernel, run by tasks.

    :param name: of the function, behind the kernel's.
    :param template: of its body.
    :param tasks: how many there are, as C.
    :param then: a statement behind it.
    """

    name: str
    template: str
    tasks: str
    then: str = ""


@dataclass(frozen=True, kw_only=True)
class RowMapping(KernelMapping):
    """Which task, and which lane of a vector, does what of a kernel.  What its fields and these class variables say is
    all that the statements of rows and columns depend on.

    :cvar chunked: what chunks are cut from.
    :cvar strips: whether a task has a strip of a row's columns, not all of them.
    :cvar streams: whether stores may go past the caches.
    :cvar asks_ahead: whether rows ask for what later ones gather.
    :cvar sums_in_registers: whether all that rows are combined into is in registers while they last.
    :cvar owners_at_once: whether a thread has the wide sums of all owners of a chunk.
    :param starts: where the rows of key ``k`` begin, as C, if their own order is that of their keys; else "".
    """

    chunked: ClassVar[Literal["rows", "owners"]] = "rows"
    strips: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    asks_ahead: ClassVar[bool] = True
    sums_in_registers: ClassVar[bool] = False
    owners_at_once: ClassVar[bool] = False
    starts: str = ""

    def bounds(self, facts: Facts, short: Callable[[str, Size], Size]) -> list[Bound]:
        """The bounds of which the largest is the rows per task, or owners.  :param short: gives a size a name."""
        private = [product(facts.types[b].shape) for b, how in facts.rows.strategy_of.items() if how.partials]
        private = [short(f"size{i}", n) for i, n in enumerate(private)]
        return task_bounds(short("rows", facts.kernel.row_count), short("cols", facts.kernel.col_count), private)

    def tasks(self, facts: Facts) -> str:
        """How many tasks go through rows, as C."""
        return "chunks"

    @property
    def before(self) -> tuple[Stage, ...]:
        """The stages before that of the rows."""
        return ()

    @property
    def after(self) -> tuple[Stage, ...]:
        """The stages behind what folds partial results."""
        return ()

    def given(self, writer: Any) -> dict[str, Any]:
        """Records that its template names, by name.  :param writer: the PhaseWriter of the kernel."""
        return {}


class Segmented(RowMapping):
    """Rows are visited in the order of their keys: those of one key, a segment, meet in a row of the result."""

    def tasks(self, facts: Facts) -> str:
        return f"gradc_chunks({'rows' if facts.rows.visits_all_rows else 'start[keys]'}, chunk)"

    @property
    def before(self) -> tuple[Stage, ...]:
        if self.starts:
            return (Stage("starts", "starts", "1"),)
        sort = "gradc_sort(ctx, key, rows, keys, start, order, sorting);"
        return (Stage("key", "key", "gradc_chunks(rows, GRADC_KEY_ROWS)", sort),)

    @property
    def after(self) -> tuple[Stage, ...]:
        return (Stage("finish", "finish", "gradc_chunks(keys, GRADC_SEGMENTS)"),)


class Owned(RowMapping):
    """Elements of the result have an owner each, which combines all its members."""

    chunked = "owners"

    def bounds(self, facts: Facts, short: Callable[[str, Size], Size]) -> list[Bound]:
        combined = short("combined", facts.members * facts.kernel.col_count)
        return task_bounds(short("owners", facts.owners), combined)
