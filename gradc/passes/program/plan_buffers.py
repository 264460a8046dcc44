"""plan_buffers: memory planning by live ranges: temps that are never live together share memory of the one workspace.

A program says so by slots, which hold for all sizes; for given sizes, :func:`gradc.analysis.lifetimes.offsets` packs
temps closer than that, and lays large ones where outputs will be written later.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ...analysis.lifetimes import Span, lifetimes, lifetimes_of, may_overwrite
from ...ir.dims import Size, assuming, known_nonnegative
from ...ir.kernel import Kernel, Loop, Program
from ..manager import program_pass


@program_pass("BITS")
def plan_buffers(program: Program) -> Program:
    """temp t3: f32[N,D]  ->  temp t3: f32[N,D] slot 0"""
    with assuming(program.assumptions):
        placed = _slots(program, lifetimes(program))
        steps = tuple(with_block_slots(step, program) if isinstance(step, Loop) else step for step in program.steps)
    slots = ((b, placed.get(b.name, -1)) for b in program.buffers)
    buffers = tuple(b if b.slot == slot else replace(b, slot=slot) for b, slot in slots)
    return replace(program, buffers=buffers, steps=steps)


def with_block_slots(loop: Loop, program: Program) -> Loop:
    """Loop -> the loop with a slot for each block buffer; a block that a kernel may compute in place of a dead one
    shares its slot.
    """
    span = lifetimes_of(program, "block", [[item] for item in loop.steps])
    overwritten: dict[str, str] = {}  # block -> the one whose memory it takes
    for name in sorted(span, key=lambda n: span[n]):
        first = loop.steps[span[name][0]]
        for source in first.reads if isinstance(first, Kernel) else ():
            same = source in span and program.types[source] == program.types[name]
            if same and span[source][1] == span[name][0] and source not in overwritten.values():
                if isinstance(first, Kernel) and may_overwrite(program, first, source, name):
                    overwritten[name] = source
                    break

    def owner(name: str) -> str:
        return owner(overwritten[name]) if name in overwritten else name

    whole = dict(span)
    for name in overwritten:
        begin, end = whole[owner(name)]
        whole[owner(name)] = (begin, max(end, span[name][1]))
    slots = _slots(program, {name: whole[name] for name in span if name not in overwritten})
    return replace(loop, blocks=tuple(replace(b, slot=slots.get(owner(b.name), -1)) for b in loop.blocks))


def _slots(program: Program, span: Mapping[str, Span]) -> dict[str, int]:
    """Live ranges -> slot of each buffer: interval-graph colouring, first fit, by sizes known to be no larger for all
    symbols.
    """
    slots: list[tuple[Size, int]] = []  # bytes, the last step that uses it
    placed: dict[str, int] = {}
    holds = functools.cache(lambda size, need: known_nonnegative(size - need))  # few sizes differ
    for name in sorted(span, key=lambda n: span[n]):
        first, last = span[name]
        need = program.types[name].nbytes
        best = next((i for i, (size, busy) in enumerate(slots) if busy < first and holds(size, need)), len(slots))
        if best < len(slots):
            slots[best] = (slots[best][0], last)
        else:
            slots.append((need, last))
        placed[name] = best
    return placed
