"""order_steps: list scheduling of steps for peak memory: one that frees more than it allocates runs as soon as it can,
one that only allocates as late.

The gradient of a weight is often the last to read the widest values of a backward; where the graph has it at the end,
all of them would be in memory until then.  What is made of inputs alone, as the transforms of weights are, would be in
memory from the first step on, and in no cache any more when it is read.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...analysis.lifetimes import checks_data
from ...ir.dims import evaluate, nominal
from ...ir.kernel import Program
from ...targets.cpu import PRIVATE_BYTES
from ..manager import program_pass


@program_pass("BITS")
def order_steps(program: Program, *, dims: Mapping[str, int] | None = None) -> Program:
    """a, b, c  ->  a, c, b where c frees more temps than it writes, or b is read by what follows alone and frees none

    A step that checks data stays before all that follow it: what is refused is refused as early.

    :param dims: sizes at which bytes are counted; 1024 stands for the others.
    """
    steps = program.steps
    temps = {b.name: b.type.nbytes for b in program.buffers if b.kind == "temp" and not b.alias}
    size = {name: evaluate(count, nominal([count], dims)) for name, count in temps.items()}
    used = [{root for b in (*step.reads, *step.writes) if (root := program.root(b)) in size} for step in steps]
    left = Counter(name for names in used for name in names)
    begun = set[str]()
    waits = _predecessors(program)
    after: list[list[int]] = [[] for _ in steps]
    for number, earlier in enumerate(waits):
        for each in earlier:
            after[each].append(number)
    lacking = [len(earlier) for earlier in waits]
    users: dict[str, list[int]] = {}
    for number, names in enumerate(used):
        for name in names:
            users.setdefault(name, []).append(number)
    ready = [n for n, count in enumerate(lacking) if not count]  # both are heaps; a step may be in either, too
    gaining: list[int] = []
    order: dict[int, None] = {}

    def given_back(number: int) -> int:
        """Bytes; they grow while other steps run."""
        freed = sum(size[name] for name in used[number] if left[name] == 1 and name in begun)
        return freed - sum(size[name] for name in used[number] if left[name] > 1 and name not in begun)

    while ready or gaining:
        first = heapq.heappop(gaining or ready)
        if first in order:
            continue
        order[first] = None
        begun |= used[first]
        left.subtract(used[first])
        touched = {n for name in used[first] for n in users[name]}
        for number in after[first]:
            lacking[number] -= 1
            if not lacking[number]:
                heapq.heappush(ready, number)
                touched.add(number)
        for number in touched:
            if number not in order and not lacking[number] and given_back(number) > 0:
                heapq.heappush(gaining, number)
    still = {n for n in order if checks_data(steps[n]) or sum(size[name] for name in used[n]) < PRIVATE_BYTES}
    return replace(program, steps=tuple(steps[n] for n in _sink([*order], used, after, still)))


def _sink(
    order: Sequence[int], used: Sequence[Collection[str]], after: Sequence[Collection[int]], still: Collection[int]
) -> list[int]:
    """Order of steps -> the order in which a step that is the last to use no temp runs right before its first
    successor.

    :param used: the temps of each step, :param after: the steps that wait for it.  :param still: steps that stay.
    """
    line: list[int] = []
    last: dict[str, int] = {}  # the step that is the last to use each temp
    for number in reversed(order):
        waiting = min((line.index(each) for each in after[number]), default=0)
        late = number not in still and all(name in last and line.index(last[name]) >= waiting for name in used[number])
        line.insert(waiting if late else 0, number)
        for name in used[number]:
            last.setdefault(name, number)
    return line


def _predecessors(program: Program) -> list[set[int]]:
    """For each step those that must run before it: writers of what it reads, and readers and writers of what it
    overwrites.
    """
    waits: list[set[int]] = []
    writer: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    checks: int | None = None
    for number, step in enumerate(program.steps):
        reads, writes = ({program.root(b) for b in names} for names in (step.reads, step.writes))
        earlier = {writer[b] for b in reads | writes if b in writer}
        earlier |= {n for b in writes for n in readers.get(b, ())}
        if checks is not None:
            earlier.add(checks)
        if checks_data(step):
            earlier.update(range(number))
            checks = number
        for b in writes:
            writer[b], readers[b] = number, set()
        for b in reads - writes:
            readers.setdefault(b, set()).add(number)
        waits.append(earlier - {number})
    return waits
