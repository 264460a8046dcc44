"""batch_steps: horizontal fusion: steps of one form, none of which waits for another, run as the tasks of one launch.

The lookups of a model's tables, the sorts of their indices, and the updates of their rows are kernels of their own, for
each table has other sizes and memory; so are the updates of a model's parameters.  Each alone is too small to be worth
waking threads for, and to wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...analysis.families import skeleton
from ...analysis.lifetimes import Span, checks_data, lifetimes
from ...ir.dims import known_nonnegative
from ...ir.kernel import Call, Kernel, Loop, Program, Select, Step, alternatives
from ...ir.node import REGISTRY
from ...ir.types import Type
from ..manager import program_pass

LEAST = 4
"""Steps that are worth a batch: fewer leave most threads without a task."""

SMALL = 1 << 14
"""Elements of an array of known size that a batch may hold longer than its steps one after the other would."""


@program_pass("BITS")
def batch_steps(program: Program, *, donate: Collection[str] = (), alike: bool = False) -> Program:
    """sort a; add a; sort b; add b; ...  ->  batch { sort a; sort b; ... } batch { add a; add b; ... }

    A step that is gathered runs earlier than it did: nothing that it passes by touches what it writes, or writes what
    it reads, and only a check of data passes by another one.  Arrays of rows and columns that would share memory keep
    their steps apart: dense gradients of tables, each of which is used before the next is made.

    :param donate: inputs in whose memory outputs may be written.
    :param alike: whether members must differ in numbers alone, as where they are one function's blocks on a GPU.
    """
    left = _units(program, donate, alike)
    often = {form for form, count in Counter(unit.form for unit in left).items() if count >= LEAST} - {None}
    steps: list[Step] = []
    batches: list[tuple[int, int]] = []
    while left:
        members = _gathered(left) if left[0].form in often else left[:1]
        left = [unit for unit in left if unit not in members]
        begin = len(steps)
        steps += [step for unit in members for step in unit.steps]
        if len(members) > 1:
            batches.append((begin, len(steps)))
    return replace(program, steps=tuple(steps), batches=tuple(batches)) if batches else program


@dataclass(frozen=True, eq=False)
class _Unit:
    """A step, or one that hands its rows to the next with that one.

    :param form: what the members of a batch have in common; None where it is in none.
    :param reads, writes: what owns the memory of what it touches.
    :param checks: whether it checks data.
    :param held: when there is what it writes of the temps that may be large.
    """

    steps: tuple[Step, ...]
    form: Any
    reads: frozenset[str]
    writes: frozenset[str]
    checks: bool
    held: tuple[Span, ...]

    def waits_for(self, other: _Unit) -> bool:
        """Whether it may not run before or along with a unit that stands before it."""
        if other.checks and not self.checks:
            return True
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


def _units(program: Program, donate: Collection[str], alike: bool) -> list[_Unit]:
    memory = _memory(program, donate)
    large = {b.name for b in program.buffers if b.type.rank > 1 and not known_nonnegative(SMALL - b.type.count)}
    spans = {name: span for name, span in lifetimes(program).items() if name in large}
    units, number = [], 0
    while number < len(program.steps):
        steps = program.steps[number : number + (2 if number in program.forwards else 1)]
        reads = frozenset(memory[program.root(b)] for step in steps for b in step.reads)
        writes = frozenset(memory[program.root(b)] for step in steps for b in step.writes)
        forms = tuple(_form(step, program.types if alike else None) for step in steps)
        form = None if None in forms else forms
        held = tuple(spans[root] for step in steps for root in map(program.root, step.writes) if root in spans)
        units.append(_Unit(steps, form, reads, writes, any(map(checks_data, steps)), held))
        number += len(steps)
    return units


def _memory(program: Program, donate: Collection[str]) -> dict[str, str]:
    """For each buffer that owns memory what stands for it: a donated input for the output of its name, and one name for
    all outputs if there is an input that another one may take.
    """
    named = {program.root(buffer): name for name, buffer in program.outputs if name in donate}
    loose = any(name not in named.values() for name in donate)
    made = {}
    for b in program.buffers:
        root = program.root(b.name)
        free = loose and (b.kind == "output" or (b.kind == "input" and b.name in donate)) and root not in named
        made[root] = "an output" if free else named.get(root, root)
    return made


def _form(step: Step, types: Mapping[str, Type] | None) -> Any:
    """What steps have in common whose work is alike; None of loops and products, which use all threads themselves.

    :param types: of the buffers, where they must differ in numbers alone.
    """
    if isinstance(step, Loop) or any(isinstance(c, Call) and REGISTRY[c.op].multiplies for c in alternatives(step)):
        return None
    if isinstance(step, Select):
        return tuple(_form(item, types) for _, item in step.cases)
    if isinstance(step, Kernel) and types is not None:
        return skeleton(step, types, flat=True)
    if isinstance(step, Kernel):
        strategies = tuple(sorted(step.strategies.values()))
        return len(step.rows), len(step.cols), strategies, tuple((s.op, s.dtype) for s in step.body)
    return step.op if isinstance(step, Call) else None


def _gathered(left: Sequence[_Unit]) -> list[_Unit]:
    """The first unit, and those of its form that may run along with it, if they are enough; else it alone."""
    members = [
        unit
        for at, unit in enumerate(left)
        if unit.form == left[0].form and not any(unit.waits_for(other) for other in reversed(left[:at]))
    ]
    together: list[_Unit] = []
    held: list[Span] = []
    for unit in members:
        both = [*held, *unit.held]
        if not both or max(first for first, _ in both) <= min(last for _, last in both):
            together, held = [*together, unit], both
    return together if len(together) >= LEAST else [left[0]]
