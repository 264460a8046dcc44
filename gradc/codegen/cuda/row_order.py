"""The order in which rows are visited, and the keys that they are sorted by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ...analysis.combine import Combine, sort_groups
from ...ir.dims import Size, product
from ...ir.statement import Axis
from ..declarations import Declaration, used
from ..index import size
from .axes import axis_declarations, declared
from .columns import OFFSETS
from .facts import Facts
from .phase_writer import PhaseView


@dataclass(frozen=True)
class Visit:
    """The row at a position.

    :param row: declares its number ``r``, if anything needs it.
    :param axes: declare its axes.
    """

    row: str
    axes: tuple[str, ...]


def visited_axes(facts: Facts) -> list[Declaration]:
    """The axes of row ``r`` of those that are visited: of an owner the rows that meet."""
    return axis_declarations(facts.rows.rest_axes if facts.order == "by owner" else facts.kernel.rows, "r")


def row_at(facts: Facts, position: str) -> str:
    """The row at a position of the visiting order."""
    return f"sorted_rows[{position}]" if facts.order == "by key" and not facts.in_order else position


def visit(facts: Facts, text: str) -> Visit:
    """What a text needs of the row at position ``p``."""
    row = declared(f"const ix r = {row_at(facts, 'p')};")
    lines = used([row, *visited_axes(facts)], text)
    if lines[:1] == [row.line]:
        return Visit(row.line, tuple(lines[1:]))
    return Visit("", tuple(lines))


def key_of_row(facts: Facts, part: Combine, masked: str, axes: Sequence[Axis], row: str) -> tuple[tuple[str, ...], str]:
    """(the statements that compute the key of row number ``row``, the key)

    :param masked: what stands for the key of a row that adds to nothing.
    """
    lines = [facts.scribe.value(s) for s in facts.rows.key_slice(part)]
    key = facts.rows.key_expression(part, masked, OFFSETS)
    return (*used(axis_declarations(axes, row), "\n".join([*lines, key])), *lines), key


def row_axes(facts: Facts, phases: Iterable[PhaseView]) -> tuple[str, ...]:
    """The declarations of the axes of row ``r`` that phases need."""
    return tuple(used(axis_declarations(facts.kernel.rows, "r"), "\n".join(p.text for p in phases)))


@dataclass(frozen=True)
class SortedRows:
    """Rows in the order of their keys: the rows of the result that they add to.

    :param facts: of the kernel.
    :param part: the accum that decides.
    :param group_sizes: of the last row axes, where rows that differ in these alone are sorted as one.
    """

    facts: Facts
    part: Combine
    group_sizes: tuple[int, ...]

    @property
    def keys(self) -> Size:
        """How many there are."""
        return self.facts.rows.key_count(self.part)

    @property
    def groups(self) -> int:
        """Neighbouring rows that the sort takes as one."""
        return prod(self.group_sizes)

    @property
    def axes(self) -> Sequence[Axis]:
        """The row axes that the sort has."""
        return self.facts.kernel.rows[: len(self.facts.kernel.rows) - len(self.group_sizes)]

    def key(self, row: str) -> dict[str, Any]:
        """Of row number ``row`` of those that are sorted: what its template names."""
        part = replace(self.part, leading=self.part.leading - len(self.group_sizes))
        masked, rows, array = (
            ("keys", "rows", "sorted_keys")
            if not self.group_sizes
            else (size(self.facts.rows.key_count(part)), size(product(n for _, n in self.axes)), "collapsed_keys")
        )
        lines, key = key_of_row(self.facts, part, masked, self.axes, row)
        return {"lines": lines, "key": key, "rows": rows, "array": array, "sorts": not self.facts.in_order}


def sorted_rows(facts: Facts) -> SortedRows | None:
    """The sort that a kernel's order needs."""
    if facts.order != "by key":
        return None
    part = facts.rows.parts[facts.kernel.order]
    return SortedRows(facts, part, () if facts.in_order else sort_groups(facts.kernel, part, facts.types))
