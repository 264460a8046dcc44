"""Rows that the threads of a task keep in registers: what one phase has loaded or computed, later ones find there.

A row of known length is shared out to the threads, at most :data:`ELEMENTS` to each, and each phase's loop over them is
unrolled.  So that a row is read once, and an exponential computed once, each value that several phases need stays in a
register per element; but one that is cheap beside others that stay, or the same for all rows, is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Stmt
from ...ir.types import Type
from ...ir.walk import backward_slice, reachable
from .columns import MAX_COLUMNS, access, vector_length, weight

LONGEST_ROW = 8192
"""Columns of a row that is kept in registers."""
ELEMENTS = 32
"""Elements of a row per thread: fewer leave the reductions over threads to weigh more."""
FEWEST_ELEMENTS = 16
"""Elements of a row per thread before a warp is full."""
ROW_REGISTERS = 64
"""For a thread's elements that are kept or under way, where no sums are."""
ALL_REGISTERS = 120
"""For them and for the sums of a thread: as many spill nothing where two blocks of 256 threads are to be resident."""
UNROLLED_TEXT = 2048
"""Instructions, more or less by tens, of a row's phases for all elements of a thread."""


@dataclass(frozen=True)
class RowTask:
    """How a row that is kept in registers is shared out.

    :param vec: neighbouring columns of a thread.
    :param width: threads of a task.
    :param iterations: of the threads over the row.
    :param together: whether all loads of a phase are under way together.
    :param loads_first: whether the row's loads begin before its first phase.
    :param kept: the values that stay in registers, and the first phase that computes each.
    """

    vec: int
    width: int
    iterations: int
    together: bool
    loads_first: bool
    kept: Mapping[str, int]


def row_task(kernel: Kernel, types: Mapping[str, Type], sums: int, widest: int, registers: int) -> RowTask | None:
    """None where a row is too long, or not of a known length.

    :param sums: accums of which a thread has a sum for each of its elements.
    :param widest: threads of a task at most.
    :param registers: for the sums of a thread.
    """
    count = kernel.col_count
    if not isinstance(count, int) or not 1 < count <= LONGEST_ROW:
        return None
    kept, vec = kept_values(kernel), vector_length(kernel, types, MAX_COLUMNS if sums else 0)
    held = _most_held(kernel, kept)
    by_phase = [
        {(a.buffer, a.base): a for s in p.body if (a := access(kernel, types, s)) is not None} for p in kernel.passes
    ]
    rows = {a for a, _ in kernel.rows}
    in_a_phase = max(sum(a.item for a in loads.values()) / 4 for loads in by_phase)
    of_the_row = {k: a for loads in by_phase for k, a in loads.items() if any(v in rows for v, _ in a.base.terms)}
    first = sum(a.item for a in of_the_row.values()) / 4
    text = sum(weight(s) for s in {s: None for p in kernel.passes for s in (*p.body, *p.roots)})

    def fits(elements: int, words: float, limit: int = ALL_REGISTERS if sums else ROW_REGISTERS) -> bool:
        return elements * (2 * sums + words) <= limit and 2 * elements * sums <= registers

    def together(elements: int) -> bool:
        return fits(elements, held + in_a_phase) and (held > 0 or not sums)

    def holds(elements: int) -> bool:  # beside sums, loads one after another leave no registers for what is kept
        return together(elements) if sums and kept else fits(elements, held)

    elements = ELEMENTS
    while elements > 1 and not holds(elements):
        if elements <= FEWEST_ELEMENTS and kept:  # to read it again costs less than fewer elements
            kept.pop(min(kept, key=lambda v: (_work(kernel, v), -_words(kernel, v))))
            held = _most_held(kernel, kept)
        else:
            elements //= 2
    while elements > vec and elements * text > UNROLLED_TEXT and 2 * count <= widest * elements:
        elements //= 2
    vec, width = min(vec, elements), 1
    while (width < 32 and width * max(vec, FEWEST_ELEMENTS) < count) or width * elements < count:
        width *= 2
    each = -(-count // (width * vec)) * vec
    if width > widest or not holds(each):
        return None
    return RowTask(vec, width, each // vec, together(each), not sums and fits(each, held + first), kept)


def kept_values(kernel: Kernel) -> dict[str, int]:
    """The values that stay in registers for later phases, and the first phase that computes each."""
    rows = {a for a, _ in kernel.rows}
    first: dict[str, int] = {}
    kept: dict[str, int] = {}
    for number, p in enumerate(kernel.passes):
        known = {s.name: s for s in p.body}
        frontier: dict[str, Stmt] = {}
        pending = [u for s in p.roots for u in s.uses]
        while pending:
            name = pending.pop()
            if name not in known or name in frontier:
                continue
            if first.get(name, number) < number and kernel.levels[name] & rows:
                frontier[name] = known[name]
            else:
                pending += known[name].uses

        def at_hand(name: str, known: Mapping[str, Stmt] = known, frontier: Mapping[str, Stmt] = frontier) -> bool:
            return name not in known or name in frontier or not kernel.levels[name] & rows

        again = {n for n, s in frontier.items() if weight(s) == 1 and s.args and all(map(at_hand, s.args))}
        again -= {n for n in again if again & set(known[n].args)}  # its argument must stay, then
        for name in frontier.keys() - again:
            kept.setdefault(name, first[name])
        for name in known:
            first.setdefault(name, number)
    return kept


def _most_held(kernel: Kernel, kept: Mapping[str, int]) -> float:
    """The most registers per element that kept values take between two phases."""
    words = {name: _words(kernel, name) for name in kept}
    last: dict[str, int] = {}
    for number, p in enumerate(kernel.passes):
        known = {s.name: s for s in p.body}
        start = [u for s in p.roots for u in s.uses]
        for name in reachable(start, lambda v: known[v].uses if v in known and kept.get(v, number) >= number else ()):
            last[name] = number
    live = [sum(words[v] for v, begin in kept.items() if begin < n <= last[v]) for n in range(1, len(kernel.passes))]
    return max(live, default=0)


def _work(kernel: Kernel, value: str) -> int:
    """Instructions, more or less, that compute a value of a column."""
    columns = backward_slice(kernel.body, [value], lambda s: kernel.is_column(s) and s.op not in REDUCTIONS)
    return sum(map(weight, columns))


def _words(kernel: Kernel, name: str) -> float:
    """Registers of a kept value: what is converted from memory stays as it was there."""
    s = kernel.stmts[name]
    if s.op == "cast" and kernel.stmts[s.args[0]].op == "load":
        return _words(kernel, s.args[0])
    assert s.dtype is not None
    return s.dtype.itemsize / 4 if s.op == "load" else max(s.dtype.itemsize // 4, 1)
