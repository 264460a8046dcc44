"""What every mapping of a kernel to tasks and vector lanes says to those who write its statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...analysis.chunks import Bound, task_bounds
from ...ir.dims import Size, product, symbol
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

    :cvar strips: whether a task has a strip of a row's columns, not all of them.
    :cvar streams: whether stores may go past the caches.
    :cvar asks_ahead: whether rows ask for what later ones gather.
    :cvar sums_in_registers: whether all that rows are combined into is in registers while they last.
    :cvar owners_at_once: whether a thread has the wide sums of all owners of a chunk.
    :param sizes: that its text names.
    :param bounds: the largest is the rows per task, or owners.
    :param tasks: of the row program, as C.
    :param starts: where the rows of key ``k`` begin, as C, if their own order is that of their keys; else "".
    """

    strips: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    asks_ahead: ClassVar[bool] = True
    sums_in_registers: ClassVar[bool] = False
    owners_at_once: ClassVar[bool] = False
    sizes: tuple[tuple[str, Size], ...]
    bounds: tuple[Bound, ...]
    tasks: str = "chunks"
    starts: str = ""

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


@dataclass(frozen=True, kw_only=True)
class Segmented(RowMapping):
    """Rows are visited in the order of their keys: those of one key, a segment, meet in a row of the result."""

    @property
    def before(self) -> tuple[Stage, ...]:
        if self.starts:
            return (Stage("starts", "starts", "1"),)
        sort = "gradc_sort(ctx, key, rows, keys, start, order, sorting);"
        return (Stage("key", "key", "gradc_chunks(rows, GRADC_KEY_ROWS)", sort),)

    @property
    def after(self) -> tuple[Stage, ...]:
        return (Stage("finish", "finish", "gradc_chunks(keys, GRADC_SEGMENTS)"),)


def short(sizes: dict[str, Size], name: str, value: Size) -> Size:
    """A size by a name, so that expressions of it are as short for sizes that are long themselves.

    :param sizes: to which it is added.
    """
    if isinstance(value, int):
        return value
    sizes[name] = value
    return symbol(name)


def rows_and_columns(facts: Facts) -> dict[str, Size]:
    """The sizes that every kernel's text names."""
    return {"rows": facts.kernel.row_count, "cols": facts.kernel.col_count}


def chunked_rows(facts: Facts, **more: Size) -> dict[str, Any]:
    """Fields of a mapping whose tasks have chunks of rows.

    :param more: other sizes that its text names.
    """
    sizes = rows_and_columns(facts) | more
    private = [product(facts.types[b].shape) for b, how in facts.rows.strategy_of.items() if how.partials]
    partials = [short(sizes, f"size{i}", n) for i, n in enumerate(private)]
    kernel = facts.kernel
    bounds = task_bounds(short(sizes, "rows", kernel.row_count), short(sizes, "cols", kernel.col_count), partials)
    return fields(sizes, bounds)


def segments(facts: Facts) -> dict[str, Any]:
    """Fields of a mapping whose tasks have chunks of sorted rows."""
    assert facts.keys is not None
    visited = "rows" if facts.rows.visits_all_rows else "start[keys]"
    count = facts.rows.key_count(facts.keys.part)
    return chunked_rows(facts, keys=count) | {"tasks": f"gradc_chunks({visited}, chunk)"}


def chunked_owners(facts: Facts) -> dict[str, Any]:
    """Fields of a mapping whose tasks have chunks of owners."""
    owners: Size = product(n for _, n in facts.rows.kept_axes)
    sizes = rows_and_columns(facts) | {"owners": owners}
    combined = short(sizes, "combined", facts.members * facts.kernel.col_count)
    return fields(sizes, task_bounds(short(sizes, "owners", owners), combined))


def fields(sizes: dict[str, Size], bounds: Sequence[Bound]) -> dict[str, Any]:
    """Fields of a mapping."""
    return {"sizes": tuple(sizes.items()), "bounds": tuple(bounds)}
