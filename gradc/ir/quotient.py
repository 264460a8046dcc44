"""Positions of an axis divided by a number, as packed codes and the scales of groups are indexed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .dims import Size, substitute
from .kernel import Kernel
from .statement import Index


@dataclass(frozen=True)
class Quotient:
    """``(axis + first) // by``: neighbours along the axis, ``by`` of them, share it."""

    axis: str
    first: Size
    by: int

    @staticmethod
    def of(kernel: Kernel, variable: str) -> Quotient | None:
        """A term of an index: an axis, or a value that is a quotient; None of others."""
        s, by = kernel.stmts.get(variable), 1
        if s is None:
            return Quotient(variable, 0, 1)
        if s.op in ("right_shift", "floordiv") and kernel.stmts[s.args[1]].op == "const":
            given = int(kernel.stmts[s.args[1]].attr("value"))
            by = 2**given if s.op == "right_shift" else given
            s = kernel.stmts[s.args[0]]
        terms = s.index[0].terms if s.op == "index" else ()
        if len(terms) != 1 or terms[0][1] != 1 or terms[0][0].startswith("%") or by < 1:
            return None
        return Quotient(terms[0][0], s.index[0].const, by)

    @property
    def plain(self) -> bool:
        """Whether it is of the axis as it is."""
        return Index(self.first) == Index()

    def starts_between(self, count: int, starts: Collection[str]) -> bool:
        """Whether a block is known to begin between so many neighbours and the next.

        :param starts: symbols of the first row and the first column of a block, which are multiples.
        """
        first = substitute(self.first, dict.fromkeys(starts, 0))
        return count == 1 or (isinstance(first, int) and first % count == 0)

    def shared_by(self, count: int, starts: Collection[str]) -> bool:
        """Whether each so many neighbours of a block share it."""
        return self.by % count == 0 and self.starts_between(count, starts)
