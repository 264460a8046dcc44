"""Maps: a row is cut into strips of columns, a task each."""

from __future__ import annotations

from dataclasses import dataclass

from ..actions import chunks
from ..facts import Facts
from ..kernel import CudaKernel
from ..mapping import Extents, ThreadMapping

STRIP = 2048
"""Columns per task at least."""
MANY_STRIPS, LONGEST_STRIP = 8192, 4
"""Strips of maps, from twice as many of which on they are longer: that often as long at most."""


@dataclass(frozen=True, kw_only=True)
class ColumnStrips(ThreadMapping):
    """A task is a strip of the columns of one row; nothing is combined in an order.

    :param one: whether a row is one strip, whatever the sizes.
    """

    purpose = "Rows, in strips: a task has a strip of one row's columns"
    one: bool

    @staticmethod
    def chunk(kernel: CudaKernel, n: Extents) -> int:
        return STRIP * min(LONGEST_STRIP, max(1, n.rows * chunks(n.columns, STRIP) // MANY_STRIPS))

    @staticmethod
    def task_count(kernel: CudaKernel, n: Extents, chunk: int) -> int:
        return n.rows * chunks(n.columns, chunk)


def plain_atomics(facts: Facts) -> bool:
    """Whether nothing is combined but by atomics on values."""
    return all(strategy.atomics == "values" for strategy in facts.rows.strategy_of.values())


def column_strips(facts: Facts, vec: int, width: int) -> ColumnStrips:
    """The mapping of a map: ``width`` threads to a strip, ``vec`` columns of each at once."""
    reason = "each column is computed by itself, and nothing is combined in an order"
    one = facts.known_columns is not None and facts.known_columns <= STRIP
    return ColumnStrips(reason=reason, vec=vec, width=width, one=one)
