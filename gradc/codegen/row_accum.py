"""A result that rows are combined into: what is the same on every target, and how its elements lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..analysis.strategies import Strategy
from ..ir.dims import Size
from ..ir.statement import Index, Stmt
from ..ir.types import DType
from ..process.forks import cached_property
from .expr import stored
from .index import flatten
from .rows import RowFacts


@dataclass(frozen=True)
class OwnedElements:
    """The elements of a result that belong to one kept row.

    :param extents: of their axes ``z0``, ``z1``, ...
    :param element: an element's place in the result, :param partial: and among wider sums.
    """

    extents: tuple[Size, ...]
    element: Index
    partial: Index


@dataclass(frozen=True, eq=False)
class RowAccum:
    """A result that rows are combined into.

    :param rows: the facts of the kernel.
    :param stmt: an accum into it, of several the last.
    """

    rows: RowFacts
    stmt: Stmt

    @property
    def buffer(self) -> str:
        return self.stmt.buffer

    @property
    def combine(self) -> str:
        """``sum``, ``prod``, ``max`` or ``min``."""
        return self.stmt.combine

    @property
    def number(self) -> int:
        """Of the accum in the kernel."""
        return self.rows.number[self.buffer]

    @property
    def strategy(self) -> Strategy:
        """How rows meet."""
        return self.rows.strategy_of[self.buffer]

    @property
    def segmented(self) -> bool:
        """Whether the rows of one key are combined into a row of the result."""
        return self.rows.in_segments(self.stmt)

    @property
    def is_owned(self) -> bool:
        """Whether each kept row owns a part of the result."""
        return self.rows.owned_by_row(self.stmt)

    @property
    def dtype(self) -> DType:
        return self.rows.types[self.buffer].dtype

    @property
    def ctype(self) -> str:
        """The C type of its elements in memory."""
        return stored(self.dtype)

    @property
    def shape(self) -> Sequence[Size]:
        return self.rows.types[self.buffer].shape

    @property
    def leading(self) -> int:
        """Entries of its index that select the row of the result."""
        return self.rows.parts[self.buffer].leading

    @cached_property
    def owned_elements(self) -> OwnedElements:
        """The elements of an owned result that belong to one kept row."""
        free = self.rows.free(self.stmt)
        extents = tuple(self.shape[axis] for axis in free)
        entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(self.stmt.index)]
        return OwnedElements(extents, flatten(entries, self.shape), flatten([entries[axis] for axis in free], extents))


A = TypeVar("A", bound=RowAccum)


@dataclass(frozen=True, eq=False, kw_only=True)
class Results(Generic[A]):
    """The results that rows are combined into, as templates ask for them.

    :param accums: all of them.
    """

    accums: tuple[A, ...]

    @property
    def segmented(self) -> list[A]:
        """Results into whose rows segments are combined: rows of one key."""
        return [a for a in self.accums if a.segmented]

    @property
    def owned(self) -> list[A]:
        """Results of which each kept row owns a part."""
        return [a for a in self.accums if a.is_owned]

    @property
    def privatized(self) -> list[A]:
        """Results of which each chunk has a partial one."""
        return [a for a in self.accums if a.strategy.partials]
