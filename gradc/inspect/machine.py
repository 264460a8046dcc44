"""One thread of a kernel, followed through its machine code without a GPU: how often each basic block runs, what arrays
it accesses, how long its chain of dependent instructions is.

Integers that follow from the launch's arguments, from the thread's place and from indices are computed; data are not.
A branch that depends on data leaves the innermost loop that it can leave, avoids a subroutine (the slow path of a
division) and what writes to nothing but the words that say what went wrong, and else goes on with the next instruction,
which is what a condition guards; so does an exit, but where all that it skips is such a report.  A loop whose registers
advance by constant steps is not followed to its end: the number of its passes is found by bisection.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..process.forks import cached_property
from ..targets.gpu import ALU_LATENCY, LATENCY, SECTOR_BYTES, WARP
from .operands import MASK, address, following, is_predicate
from .sass import ACCESSES, LOADS, Function, Instruction
from .semantics import Decoder, array_of

MOST_BLOCKS = 10_000
"""Basic blocks that are followed before a thread is given up."""
MOST_PASSES = 1 << 31
"""Passes of a loop at which a thread is given up."""
MOST_STEPWISE = 1024
"""Passes that are followed one by one of loops whose end would be jumped over: those that count to a number and ask
whether they are there.
"""
MOST_STAGES = 4
"""Passes of a loop after which it does the same again."""
MOST_GROUPS = 8
"""Groups of asynchronous copies of which is known when they have arrived."""
MOST_REPORTED = 16
"""Basic blocks of a report of what went wrong."""
_WORDS = 4


@dataclass
class Access:
    """An instruction that accesses global memory.

    :param executed: times.  :param array: the last one that it accessed, from 1; 0: not known.
    :param first: its first address; None: not known.  :param sectors: that differ from the one before.
    """

    instruction: Instruction
    executed: float = 0
    sectors: float = 0
    array: int = 0
    first: int | None = None
    last: int | None = None


@dataclass
class Trace:
    """What a thread did.

    :param counts: instructions by class.  :param instructions: in all.  :param clocks: of its chain of dependences.
    :param products: that its warp gave the matrix units, as :attr:`.Instruction.products` counts.
    :param shared: bytes that it passed to or from shared memory.
    :param accesses: that ran.  :param unknown: branches that depended on data.  :param walked: basic blocks that
        were followed.  :param finished: whether it came to its end.
    """

    counts: dict[str, float] = field(default_factory=dict)
    instructions: float = 0
    clocks: float = 0
    products: float = 0
    shared: float = 0
    accesses: list[Access] = field(default_factory=list)
    unknown: int = 0
    walked: int = 0
    finished: bool = True


@dataclass(frozen=True)
class Launched:
    """A launch, as its threads see it.

    :param words: constant bank 0, by byte.
    :param load: what an array has: (array, byte, bytes) -> integer, or None if it is data.
    :param latency: clocks of a load from an array.
    :param coherent: whether neighbouring lanes have neighbouring places where these follow from data.
    :param threads: of a block.
    :param flag: the array of words that say what went wrong; 0: there is none.
    """

    words: Mapping[int, int]
    load: Callable[[int, int, int], int | None]
    latency: Callable[[int], int]
    coherent: bool = True
    threads: int = WARP
    flag: int = 0


class _Asked(Exception):
    """Whether a condition holds for a thread, which is all that was asked of it."""

    def __init__(self, holds: Any):
        self.holds = holds


_Step = tuple[str, bool, Callable[..., None] | None, tuple[str, ...], tuple[str, ...], int, int]


class Machine:
    """A function, decoded for one launch; :meth:`run` follows a thread.

    :param guarded: whether it executes what a condition on data guards within a loop.
    """

    def __init__(self, function: Function, launched: Launched, guarded: bool = True):
        self.function, self.launched, self.guarded = function, launched, guarded
        self.blocks = function.blocks
        self.order = list(self.blocks)
        self.next = dict(zip(self.order, [*self.order[1:], -1], strict=True))
        decoder = Decoder(lambda at: launched.words.get(at), self._special)
        self.accesses: list[Access] = []
        self.known: list[int | None] | None = None
        """What barriers count, of a thread that is asked for its condition at the next; None: of one that is followed.
        """
        self.counted: dict[int, list[int | None]] = {}
        """By block: its threads see the same."""
        self.reports: dict[tuple[int, int], bool] = {}
        self.steps = {at: [self._decoded(decoder, i) for i in block] for at, block in self.blocks.items()}
        self.kinds = {at: Counter(i.kind for i in block) for at, block in self.blocks.items()}
        self._begin(0, 0)

    def _begin(self, block: int, thread: int) -> None:
        self.block, self.thread = block, thread
        self.r: dict[str, Any] = {}
        self.ready: dict[str, int] = {}
        self.now, self.walked, self.unknown = 0, 0, 0
        self.visits: dict[int, float] = dict.fromkeys(self.order, 0)
        self.calls: list[int] = []
        self.history: dict[int, list[Any]] = {}
        self.stepwise: dict[int, int] = {}
        self.barriers = 0
        self.count: int | None = None
        for access in self.accesses:
            access.executed, access.sectors, access.array, access.first, access.last = 0, 0, 0, None, None

    def _special(self, name: str) -> int | None:
        known = {"SR_TID.X": self.thread, "SR_CTAID.X": self.block, "SR_LANEID": 0}
        return known.get(
            name, 0 if name in ("SR_CgaCtaId", "SR_CTAID.Y", "SR_CTAID.Z", "SR_TID.Y", "SR_TID.Z") else None
        )

    def _decoded(self, decoder: Decoder, i: Instruction) -> _Step:
        step, written, read = decoder.step(i.opcode, i.modifiers, i.operands)
        if i.opcode in ("LDL", "STL"):
            step, written = _local(i, written)
        if i.opcode == "BAR" and "POPC" in i.modifiers:
            step = self._counting(i.operands.split(", ")[-1])
        elif i.opcode == "B2R" and "RESULT" in i.modifiers:
            step, written = self._result(i.operands.strip()), (i.operands.strip(),)
        latency = LATENCY.get(i.kind, ALU_LATENCY)
        access = -1
        if i.width:
            access = len(self.accesses)
            self.accesses.append(Access(i))
            step = self._accessing(self.accesses[access], written)
            latency = -1 if i.opcode in (*LOADS, "ATOMG") else ALU_LATENCY
            if i.opcode == "LDGSTS":
                written = (_group(0),)
        name = i.predicate.lstrip("!")
        return (
            "" if name in ("PT", "UPT") else name,
            i.predicate.startswith("!"),
            step,
            read,
            written,
            latency,
            access,
        )

    def _accessing(self, access: Access, written: tuple[str, ...]) -> Callable[..., None]:
        i = access.instruction
        # The last one is of global memory: LDGSTS.E.128 [R35], desc[UR4][R6.64].
        where = address(next((part for part in reversed(i.operands.split(", ")) if "[" in part), ""))
        loads = i.opcode == "LDG"

        def step(r: dict[str, Any]) -> None:
            low, high = where(r)
            array = array_of(high)
            access.executed += 1
            access.array = array or access.array
            at = None if low is None else (high & 0xFF) << 32 | low
            access.sectors += self._new_sectors(access.array, at)
            if access.executed == 1:
                access.first = at
            access.last = at
            each = 1 if len(written) == 1 and i.width < _WORDS else _WORDS
            value = self.launched.load(array, at, i.width) if loads and array and at is not None else None
            for n, name in enumerate(written):
                r[name] = None if value is None else (value >> 32 * n) & MASK if each == _WORDS else value & MASK

        return step

    def _new_sectors(self, array: int, at: int | None) -> float:
        """The part of a sector that an access is away from where the thread has just been in this array."""
        if at is None:
            return 1.0
        distances = [abs(at - a.last) for a in self.accesses if a.array == array and a.last is not None]
        nearest = min(distances, default=SECTOR_BYTES)
        return nearest / SECTOR_BYTES if nearest < SECTOR_BYTES else 1.0

    # -- how many threads of a block ---------------------------------------------------------------------------------

    def _counting(self, condition: str) -> Callable[[dict[str, Any]], None]:
        """A barrier that counts the threads for which a condition holds."""
        name, negated = condition.lstrip("!"), condition.startswith("!")

        def step(r: dict[str, Any]) -> None:
            own = True if name == "PT" else r.get(name)
            number, self.barriers = self.barriers, self.barriers + 1
            known = self.counted.setdefault(self.block, []) if self.known is None else self.known
            if number == len(known) and self.known is not None:
                raise _Asked(own if own is None else own is not negated)
            if number == len(known):
                known.append(self._threads_before(known) if own is not None else None)
            self.count = known[number]

        return step

    def _result(self, register: str) -> Callable[[dict[str, Any]], None]:
        """What the last such barrier has counted."""

        def step(r: dict[str, Any]) -> None:
            r[register] = self.count

        return step

    def _threads_before(self, known: list[int | None]) -> int | None:
        """How many threads have the condition at the next barrier, if the first ones have it and the others do not, as
        in a search of sorted keys: found by halving.
        """
        low, high = 0, self.launched.threads
        while low < high:
            middle = (low + high) // 2
            holds = self._other.asked(self.block, middle, known)
            if holds is None:
                return None
            low, high = (middle + 1, high) if holds else (low, middle)
        return low

    @cached_property
    def _other(self) -> Machine:
        return Machine(self.function, self.launched, self.guarded)

    def asked(self, block: int, thread: int, known: list[int | None]) -> Any:
        """The condition of a thread at the barrier after so many that are known; None: it depends on data."""
        self.known = known
        self._begin(block, thread)
        try:
            self._follow(self.order[0], -1)
        except _Asked as found:
            return found.holds
        return None

    # -- a thread ------------------------------------------------------------------------------------------------------

    def run(self, block: int, thread: int) -> Trace:
        """Follows a thread to its end."""
        self._begin(block, thread)
        finished = self._follow(self.order[0], -1) is False and self.walked < MOST_BLOCKS
        trace = Trace(unknown=self.unknown, walked=self.walked, finished=finished, clocks=self.now)
        for at, times in self.visits.items():
            if times:
                for kind, count in self.kinds[at].items():
                    trace.counts[kind] = trace.counts.get(kind, 0) + count * times
                trace.instructions += times * len(self.blocks[at])
                trace.products += times * sum(i.products for i in self.blocks[at])
                trace.shared += times * sum(i.shared_width for i in self.blocks[at])
        trace.accesses = [replace(a) for a in self.accesses if a.executed]
        return trace

    def _follow(self, at: int, stop: int, members: frozenset[int] | None = None) -> bool:
        """Follows from a block to the next back edge to ``stop``; False if the thread ends before, or leaves the blocks
        ``members``.
        """
        while self.walked < MOST_BLOCKS:
            to = self._block(at)
            if to < 0 or (members is not None and to not in members and not self.calls):
                return False
            if to <= at:
                if to == stop:
                    return True
                self._gallop(to)
            at = to
        return False

    def _block(self, at: int) -> int:
        """Runs a block; the next one's address, or -1 at the end."""
        self.walked += 1
        self.visits[at] += 1
        r, ready = self.r, self.ready
        for i, (name, negated, step, read, written, latency, access) in zip(
            self.blocks[at], self.steps[at], strict=True
        ):
            holds: Any = True
            issue = self.now + 1
            if name:
                holds = r.get(name)
                issue = max(issue, ready.get(name, 0))
                holds = holds if holds is None or not negated else not holds
            for register in read:
                if (then := ready.get(register, 0)) > issue:
                    issue = then
            self.now = issue
            if i.opcode in _CONTROL:
                to = self._control(i, holds, at)
                if to is not None:
                    return to
                continue
            if holds is False or step is None:
                continue
            before = [r.get(w) for w in written] if holds is None else ()
            step(r)
            if latency < 0:
                latency = self.launched.latency(self.accesses[access].array)
            for n, register in enumerate(written):
                ready[register] = issue + latency
                if holds is None and r.get(register) != before[n]:
                    r[register] = None
        return self.next[at]

    def _control(self, i: Instruction, holds: Any, at: int) -> int | None:
        """The next block's address, -1 at the end, None to go on with the next instruction."""
        if i.opcode == "CALL":
            if holds is False or i.label not in self.function.labels:
                return None
            self.calls.append(self.next[at])
            return self.function.labels[i.label]
        if i.opcode in ("LDGDEPBAR", "DEPBAR"):
            self._of_copies(i)
            return None
        if i.opcode == "RET":
            return self.calls.pop() if self.calls else -1
        if i.opcode in ("EXIT", "KILL"):
            if holds is None:
                self.unknown += 1
                holds = self._only_reports(self.next[at], -1)
            return -1 if holds else None
        if i.opcode != "BRA" or i.label not in self.function.labels:
            return -1 if i.opcode in ("BRX", "JMP", "JMX") else None
        target = self.function.labels[i.label]
        if "DIV" in i.modifiers or "CONV" in i.modifiers:
            return None
        if holds is None:
            self.unknown += 1
            holds = self._taken(at, target, self.next[at])
        return target if holds else None

    def _of_copies(self, i: Instruction) -> None:
        """Asynchronous copies: begins another group of them, or waits for all but the last ones: DEPBAR.LE SB0, 0x1."""
        ready = self.ready
        if i.opcode == "LDGDEPBAR":
            for n in range(MOST_GROUPS, 0, -1):
                ready[_group(n)] = ready.get(_group(n - 1), 0)
            ready[_group(0)] = 0
        elif match := _LEFT.search(i.operands):
            left = int(match[1], 16)
            self.now = max([self.now, *(ready.get(_group(n), 0) for n in range(left + 1, MOST_GROUPS + 1))])

    def _taken(self, at: int, target: int, behind: int) -> bool:
        """Whether a branch that depends on data is taken."""
        if not self.launched.coherent:
            for one, taken in ((target, True), (behind, False)):
                if any(i.opcode == "CALL" and self._adds(i.label) for i in self._begun_at(one)):
                    return taken
        for one, other in ((target, False), (behind, True)):
            if self._is_rare(one):
                return other
        if self._only_notes(behind, target) or self._only_reports(behind, target):
            return True
        if self._only_reports(target, behind):
            return False
        around = [members for members in self.loops.values() if at in members]
        innermost = min(around, key=len, default=frozenset[int]())
        if not self.guarded and at < target and target in innermost and behind in innermost:
            return True
        return target not in innermost and behind in innermost

    def _is_rare(self, at: int) -> bool:
        """Whether what begins at a block, up to its first branch, is taken to be the exception: it calls a subroutine
        (of operands out of the fast range, or of lanes that share no sum with a neighbour) or notes a value that is no
        number.
        """
        return any(i.opcode == "CALL" or _notes(i) for i in self._begun_at(at))

    def _begun_at(self, at: int) -> Iterator[Instruction]:
        """The instructions from a block on to the first branch."""
        while at in self.blocks:
            yield from self.blocks[at]
            last = self.blocks[at][-1]
            diverges = last.opcode == "BRA" and ("DIV" in last.modifiers or "CONV" in last.modifiers)
            if last.opcode in ("BRA", "BRX", "JMP", "JMX", "RET", "EXIT", "KILL") and not diverges:
                return
            at = self.next[at]

    def _adds(self, label: str) -> bool:
        """Whether a subroutine adds to memory, as that of lanes which share no sum with a neighbour does."""
        at = self.function.labels.get(label, -1)
        while at in self.blocks:
            if any(i.opcode in _ATOMICS and not _notes(i) for i in self.blocks[at]):
                return True
            if self.blocks[at][-1].opcode == "RET":
                return False
            at = self.next[at]
        return False

    def _only_reports(self, begin: int, end: int) -> bool:
        """Whether a thread that goes from a block to another one, or to its end, writes to nothing but the words that
        say what went wrong: found by following it.
        """
        if not self.launched.flag:
            return False
        if (begin, end) not in self.reports:
            self.reports[begin, end] = False  # of a branch on the way that asks for the same
            before, walked, at = self._state(), self.walked, begin
            executed = [access.executed for access in self.accesses]
            for _ in range(MOST_REPORTED):
                if at not in (end, -1):
                    at = self._block(at)
            ran = [a for a, times in zip(self.accesses, executed, strict=True) if a.executed > times]
            written = {a.array for a in ran if a.instruction.opcode not in LOADS}
            self._restore(before)
            self.walked = walked
            self.reports[begin, end] = at in (end, -1) and written == {self.launched.flag}
        return self.reports[begin, end]

    def _only_notes(self, behind: int, target: int) -> bool:
        """Whether what a branch skips accesses memory for nothing else than to note values that are no numbers."""
        skipped = [i for at, block in self.blocks.items() if behind <= at < target for i in block]
        accesses = [i for i in skipped if i.opcode in ACCESSES]
        return bool(accesses) and all(map(_notes, accesses))

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """The blocks of each loop by its first: those that reach the origin of a branch back without its target."""
        before: dict[int, list[int]] = {at: [] for at in self.order}
        for at, block in self.blocks.items():
            label = block[-1].label if block[-1].opcode == "BRA" else ""
            goes_on = block[-1].opcode not in ("BRA", "EXIT", "RET", "JMP") or block[-1].predicate
            for to in (self.function.labels.get(label, -1), self.next[at] if goes_on else -1):
                if to >= 0:
                    before[to].append(at)
        loops: dict[int, set[int]] = {}
        for header in self.order:
            for origin in before[header]:
                if origin >= header:
                    members, pending = loops.setdefault(header, {header}), [origin]
                    while pending:
                        at = pending.pop()
                        if at not in members:
                            members.add(at)
                            pending += before[at]
        return {header: frozenset(members) for header, members in loops.items()}

    # -- loops ---------------------------------------------------------------------------------------------------------

    def _state(self) -> Any:
        marks = [(a.executed, a.sectors, a.array, a.first, a.last) for a in self.accesses]
        known = dict(self.r), dict(self.visits), marks, self.now, dict(self.ready), list(self.calls), self.unknown
        return *known, self.barriers

    def _restore(self, state: Any) -> None:
        registers, visits, marks, self.now, ready, calls, self.unknown, self.barriers = state
        self.r.clear()
        self.r.update(registers)
        self.visits, self.ready, self.calls = dict(visits), dict(ready), list(calls)
        for access, (executed, sectors, array, first, last) in zip(self.accesses, marks, strict=True):
            access.executed, access.sectors, access.array, access.first, access.last = (
                executed,
                sectors,
                array,
                first,
                last,
            )

    def _gallop(self, header: int) -> None:
        """At a loop's header: skips passes while each does what the last two have done, or each few (stages of a
        pipeline, which alternate, and count up before they begin anew).
        """
        if header in self.stepwise:
            self.stepwise[header] += 1
            if self.stepwise[header] > MOST_STEPWISE:  # no condition ends it that could be followed
                self.walked = MOST_BLOCKS
            return
        seen = self.history.setdefault(header, [])
        seen.append(self._state())
        del seen[: -2 * MOST_STAGES - 1]
        for passes in range(1, (len(seen) + 1) // 2):
            step = _step(*seen[-1 - 2 * passes :: passes])
            if step is not None and self._skips(header, passes, step):
                self.history[header] = []
                return

    def _skips(self, header: int, passes: int, step: Any) -> bool:
        """At a loop's header: skips as many times so many passes as each time adds this step; whether it is any."""
        count, growing, start, skipped = 1, True, self._state(), False
        left = min(self._before_equal(header, step[0]), self._before_carry(header, step[0]))
        while count:
            if count > left:  # would jump over the end, or over a carry into a high word
                growing, count = False, count // 2
                continue
            before, history = self._state(), {at: list(states) for at, states in self.history.items()}
            self._skip(step, count)
            middle = self._state()
            ran = all(self._follow(header, header, self.loops.get(header)) for _ in range(passes))
            same = ran and _same(step, middle, self._state())
            if same and count >= MOST_PASSES:
                self._restore(start)
                self.stepwise[header] = 0
                return True
            if same:
                left -= count + 1  # those skipped, and that which was followed
                skipped, count = True, 2 * count if growing else count // 2
            else:
                self._restore(before)
                self.history = history
                growing, count = False, count // 2
        return skipped

    def _before_equal(self, header: int, steps: Mapping[str, int]) -> int:
        """Passes before two values that a loop compares for equality, and that come nearer by a step, are equal: what
        follows is then another way.
        """
        least = 2 * MOST_PASSES
        for block, n, i in (
            (self.blocks[at], *each) for at in self.loops.get(header, ()) for each in enumerate(self.blocks[at])
        ):
            if i.opcode not in ("ISETP", "UISETP") or not {"NE", "EQ"} & {*i.modifiers.split(".")}:
                continue
            parts = i.operands.split(", ")[2:4]
            (one, by), (other, further) = (self._sum_stepping(part, block[:n], steps) for part in parts)
            if one is None or other is None or by == further:
                continue
            apart, nearer = (other - one) & MASK, (by - further) & MASK
            if nearer > MASK // 2:
                apart, nearer = -apart & MASK, -nearer & MASK
            if apart and apart % nearer == 0:
                least = min(least, apart // nearer - 1)
        return least

    def _before_carry(self, header: int, steps: Mapping[str, int]) -> int:
        """Passes before a low word that a loop adds to, and whose carry it keeps, wraps: only a pass that is followed
        moves the high word on.
        """
        least = 2 * MOST_PASSES
        for i in (i for at in self.loops.get(header, ()) for i in self.blocks[at]):
            target, carry, *terms = [*i.operands.split(", "), ""]
            if i.opcode not in ("IADD3", "UIADD3") or not is_predicate(carry):
                continue
            for name in (target, *terms):
                value, by = self._stepping(name, steps)
                if value is not None and by:
                    least = min(least, (MASK - value) // by if by <= MASK // 2 else value // (-by & MASK))
        return least

    def _sum_stepping(
        self, operand: str, before: Sequence[Instruction], steps: Mapping[str, int]
    ) -> tuple[int | None, int]:
        """The same as :meth:`_stepping`, also of what a block has just added up in a register that has no value from
        the pass before.
        """
        made = next((i for i in reversed(before) if i.operands.split(", ")[0] == operand), None)
        terms = [part.removesuffix(".reuse") for part in made.operands.split(", ")[1:]] if made else []
        if (
            made is None
            or made.opcode not in ("IADD3", "UIADD3")
            or "X" in made.modifiers.split(".")
            or operand in terms
        ):
            return self._stepping(operand, steps)
        found = [self._stepping(term, steps) for term in terms if not is_predicate(term)]
        values = [value for value, _ in found if value is not None]
        return (sum(values) & MASK if len(values) == len(found) else None), sum(by for _, by in found) & MASK

    def _stepping(self, operand: str, steps: Mapping[str, int]) -> tuple[int | None, int]:
        """An operand's value at a loop's header, and what a pass adds to it."""
        name = operand.removesuffix(".reuse")
        if name in ("RZ", "URZ"):
            return 0, 0
        if name.startswith(("0x", "-0x")):
            return int(name, 16) & MASK, 0
        value = self.r.get(name)
        return (value, steps.get(name, 0)) if isinstance(value, int) and not isinstance(value, bool) else (None, 0)

    def _skip(self, step: Any, count: int) -> None:
        registers, visits, marks, clocks = step
        for name, by in registers.items():
            if by:
                self.r[name] = (self.r[name] + by * count) & MASK
        for at, by in visits.items():
            self.visits[at] += by * count
        for access, (executed, sectors, moved) in zip(self.accesses, marks, strict=True):
            access.executed += executed * count
            access.sectors += sectors * count
            if access.last is not None and moved is not None:
                access.last += moved * count
        self.now += clocks * count
        for register in self.ready:
            self.ready[register] += clocks * count


def _local(i: Instruction, written: tuple[str, ...]) -> tuple[Callable[..., None], tuple[str, ...]]:
    """A register spilled or loaded again; what is spilled is kept among the registers."""
    place = ((match := _PLACE.search(i.operands)) and match[1]) or ""
    count = 4 if "128" in i.modifiers else 2 if "64" in i.modifiers else 1
    slots = tuple(f"[{place}]{n}" for n in range(count))
    names = written or tuple(following(i.operands.split(", ")[-1], n) for n in range(count))
    pairs = list(zip(slots, names, strict=False)) if i.opcode == "STL" else list(zip(names, slots, strict=False))

    def step(r: dict[str, Any]) -> None:
        for to, source in pairs:
            r[to] = 0 if source == "RZ" else r.get(source)

    return step, written if i.opcode == "LDL" else slots


def _group(n: int) -> str:
    """What stands among the registers for when the copies of a group have arrived: 0 is the one that is begun, 1 the
    one before.
    """
    return f"[copies]{n}"


_LEFT = re.compile(r"SB0, (0x[0-9a-f]+)")
_PLACE = re.compile(r"\[([^\]]*)\]")
_ATOMICS = ("RED", "REDG", "ATOM", "ATOMG")
_CONTROL = ("BRA", "CALL", "RET", "EXIT", "KILL", "BRX", "JMP", "JMX", "LDGDEPBAR", "DEPBAR")


def _notes(i: Instruction) -> bool:
    """Whether an instruction sets a bit, which notes a value that is no number."""
    return i.opcode in _ATOMICS and ".OR" in i.modifiers


def _difference(a: Any, b: Any) -> Any:
    """(registers, visits, accesses, clocks) that a pass adds, or None where its registers do not advance by a step."""
    registers: dict[str, int] = {}
    if a[0].keys() != b[0].keys() or a[5] != b[5]:
        return None
    for name, value in b[0].items():
        before = a[0][name]
        if value is None or before is None or isinstance(value, bool) or isinstance(before, bool):
            if value is not before:
                return None
            continue
        registers[name] = (value - before) & MASK
    visits = {at: n - a[1][at] for at, n in b[1].items() if n != a[1][at]}
    marks = [
        (y[0] - x[0], y[1] - x[1], None if x[4] is None or y[4] is None else y[4] - x[4])
        for x, y in zip(a[2], b[2], strict=True)
    ]
    return registers, visits, marks, b[3] - a[3]


def _step(first: Any, second: Any, third: Any) -> Any:
    """What each of two passes has added, if it is the same but for clocks; clocks are of the later."""
    before, after = _difference(first, second), _difference(second, third)
    if before is None or after is None or before[:2] != after[:2]:
        return None
    return after if [m[0] for m in before[2]] == [m[0] for m in after[2]] else None


def _same(step: Any, first: Any, second: Any) -> bool:
    found = _difference(first, second)
    return found is not None and found[:2] == step[:2]
