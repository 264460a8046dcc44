"""Rows that the threads of a task keep in registers: what one phase has loaded or computed, later ones find there.

A row of known length is shared out to the threads, at most :data:`ELEMENTS` to each, and each phase's loop over them is
unrolled.  So that a row is read once, and an exponential computed once, each value that several phases need stays in a
register per element; but one that is cheap beside others that stay, or the same for all rows, is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Stmt
from ...ir.types import F64, Type
from ...ir.walk import backward_slice, reachable
from ...targets.gpu import SHARED_BYTES
from .columns import LONG_BODY, Access, access, vector_length, weight

LONGEST_ROW = 8192
"""Columns of a row that is kept in registers."""
ELEMENTS = 32
"""Elements of a row per thread: fewer leave the reductions over threads to weigh more."""
FEWEST_ELEMENTS = 16
"""Elements of a row per thread before a warp is full."""
ROW_REGISTERS = 64
"""For a thread's elements that are kept or under way, where no sums are."""
ALL_REGISTERS = 120
"""For them, the loads of a phase and the sums of a thread: what NVRTC fits into 128 registers for sm_80, 90 and 100."""
RESIDENT_REGISTERS = 130
"""The same with two for the address of each array; a thread that needs more has a third more registers, and a
multiprocessor three quarters of the threads.  Of 27 gradients of norms those at up to 124 do not spill in 128
registers, those at 134 to 160 do (NVRTC 12.9 for sm_80, 90, 100).
"""
SHARED_ROOM = 8
"""Registers in which sums go to and from shared memory."""
SHARING_TASK = 256
"""Threads of a task from which on some of its sums are in shared memory, so that it need not have twice as many threads
of half as many elements: blocks of 16 warps wait for each other longer."""
CROWDED_SUMS, CROWDED_VECTOR = 48, 4
"""Registers of sums from which on loads come one after another, of so many columns, and nothing of the row is kept."""
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
    :param shared_sums: of a thread's sums, one an element for each accum, those in shared memory.
    :param crowds: whether a thread needs more registers than a multiprocessor has for the usual number of threads.
    """

    vec: int
    width: int
    iterations: int
    together: bool
    loads_first: bool
    kept: Mapping[str, int]
    shared_sums: int = 0
    crowds: bool = False


class _Need:
    """Registers that a thread needs for its elements of a row.

    :param sums: accums of which it has a sum for each element.
    :ivar kept: the values that stay, and the first phase that computes each.
    :ivar held: registers of an element for them between two phases, at most.
    :ivar all_at_once: whether the first phase takes all of the row's loads, and its statements few registers.
    :ivar shared: sums of a thread that are in shared memory, for which it has one register, not two.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type], sums: int):
        self.kernel, self.sums, self.kept = kernel, sums, kept_values(kernel)
        self.held, self.shared = _most_held(kernel, self.kept), 0
        phases = [[a for s in p.body if (a := access(kernel, types, s)) is not None] for p in kernel.passes]
        rows = {a for a, _ in kernel.rows}
        of_the_row = [a for loads in phases for a in loads if any(v in rows for v, _ in a.base.terms)]
        self.phase_loads, self.row_loads = max(map(_loaded, phases)), _loaded(of_the_row)
        text = sum(weight(s) for s in {s: None for p in kernel.passes for s in p.body})
        self.all_at_once = not sums and text <= LONG_BODY and _loaded(phases[0]) >= self.row_loads

    def fits(self, elements: int, words: float) -> bool:
        """Whether there are registers for so many words of each element, beside its sums."""
        limit = (ALL_REGISTERS - (SHARED_ROOM if self.shared else 0)) if self.sums else ROW_REGISTERS
        return self.of_sums(elements) + elements * words <= limit

    def of_sums(self, elements: int) -> int:
        """Registers for the sums of so many elements."""
        return 2 * self.sums * elements - self.shared

    def met(self, elements: int) -> bool:
        """Whether nothing spills."""
        return self.fits(elements, self.held + (self.phase_loads if self.sums else 0))

    def crowded(self, elements: int) -> bool:
        """Whether sums leave few registers for loads."""
        return self.of_sums(elements) > CROWDED_SUMS

    def together(self, elements: int) -> bool:
        """Whether all loads of a phase may be under way together."""
        return self.fits(elements, self.held + self.phase_loads) and not self.crowded(elements)

    def loads_first(self, elements: int) -> bool:
        """Whether all loads of the row may be under way before its first phase: where it is the one that takes them,
        what stays takes their registers.
        """
        words = max(self.held, self.row_loads) if self.all_at_once else self.held + self.row_loads
        return not (self.crowded(elements) and not self.shared) and self.fits(elements, words)

    def crowds(self, elements: int) -> bool:
        """Whether sums, elements and addresses need more registers than the usual number of threads leaves each."""
        addresses = 2 * len({*self.kernel.reads, *self.kernel.writes})
        of_elements = elements * (self.held + self.phase_loads)
        needed = self.of_sums(elements) + of_elements + addresses
        return self.sums > 0 and not self.shared and needed > RESIDENT_REGISTERS

    def keep_less(self) -> None:
        """The value that costs least is computed again."""
        self.kept.pop(min(self.kept, key=lambda v: (_work(self.kernel, v), -_words(self.kernel, v))))
        self.held = _most_held(self.kernel, self.kept)


def row_task(kernel: Kernel, types: Mapping[str, Type], sums: int, widest: int, shared: bool = False) -> RowTask | None:
    """None where a row is too long, or not of a known length.

    :param sums: accums of which a thread has a sum for each of its elements.
    :param widest: threads of a task at most.
    :param shared: whether these may be in shared memory, where a task has a block to itself.
    """
    count = kernel.col_count
    if not isinstance(count, int) or not 1 < count <= LONGEST_ROW:
        return None
    need, vec = _Need(kernel, types, sums), vector_length(kernel, types)
    text = sum(weight(s) for s in {s: None for p in kernel.passes for s in (*p.body, *p.roots)})
    elements, least = ELEMENTS, -(-count // widest)
    while not need.met(elements):
        if elements >= max(2 * least, FEWEST_ELEMENTS):
            elements //= 2
        elif need.kept:  # to read it again costs less than fewer elements
            need.keep_less()
        elif elements >= max(2 * least, 2):
            elements //= 2
        else:
            return None
    while elements >= max(2 * least, 2 * vec) and elements * text > UNROLLED_TEXT:
        elements //= 2
    if shared and need.kept and need.crowded(elements) and count >= SHARING_TASK * elements:
        need.shared = min(SHARED_BYTES // (8 * -(-count // elements)), sums * elements)
        need.shared = need.shared if need.met(elements) else 0
    while need.crowded(elements) and elements >= max(2 * least, 2 * vec):
        elements //= 2
    alone = need.crowded(elements) and not need.shared
    vec, width = min(vec, elements, CROWDED_VECTOR if alone else elements), 1
    while (width < 32 and width * max(vec, FEWEST_ELEMENTS) < count) or width * elements < count:
        width *= 2
    each = -(-count // (width * vec)) * vec
    kept = {} if alone else need.kept  # to read the row again takes no registers
    together, first = need.together(each), need.loads_first(each)
    return RowTask(vec, width, each // vec, together, first, kept, need.shared, need.crowds(each))


def row_task_across(kernel: Kernel, types: Mapping[str, Type], width: int, widest: int) -> RowTask | None:
    """The same where neighbouring threads have neighbouring rows, each one column at a time; None also where nothing
    would stay.

    :param width: threads of a row at least, ``widest`` at most.
    """
    count = kernel.col_count
    if not isinstance(count, int) or not 1 < count <= LONGEST_ROW:
        return None
    need = _Need(kernel, types, 0)
    text = sum(weight(s) for s in {s: None for p in kernel.passes for s in (*p.body, *p.roots)})
    room = ROW_REGISTERS // (2 if any(s.dtype is F64 for s in kernel.body) else 1)  # beside what is computed in f64
    while need.kept:
        threads, held = width, _most_held(kernel, need.kept, least=1)  # one column at a time: short ones are not packed
        while threads <= widest:
            each = -(-count // threads)
            if each * held <= room and each * text <= UNROLLED_TEXT:
                return RowTask(1, threads, each, False, False, need.kept)
            threads *= 2
        need.keep_less()
    return None


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
        again -= {n for n in again if again & set(known[n].args)}  # the arguments of what is computed again stay
        for name in known:  # an order that is the same in every process
            if name in frontier and name not in again:
                kept.setdefault(name, first[name])
        for name in known:
            first.setdefault(name, number)
    return kept


def _most_held(kernel: Kernel, kept: Mapping[str, int], least: float = 0) -> float:
    """The most registers per element that kept values take between two phases, each at least so many."""
    last: dict[str, int] = {}
    for number, p in enumerate(kernel.passes):
        sources = {s.name: s.uses for s in p.body if kept.get(s.name, number) >= number}
        roots = [u for s in p.roots for u in s.uses]
        last |= dict.fromkeys(reachable(roots, functools.partial(_sources, sources)), number)
    phases = range(1, len(kernel.passes))
    live = [sum(max(_words(kernel, v), least) for v, begin in kept.items() if begin < n <= last[v]) for n in phases]
    return max(live, default=0)


def _sources(sources: Mapping[str, Sequence[str]], name: str) -> Sequence[str]:
    """What a phase computes a value from; nothing if it finds the value in a register."""
    return sources.get(name, ())


def _loaded(loads: Sequence[Access]) -> float:
    """Registers of an element for loads, as they come from memory."""
    return sum(a.item for a in {(a.buffer, a.base): a for a in loads}.values()) / 4


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
