"""forward_rows: the kernel that combines rows hands each finished row to the kernel that reads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ...analysis.combine import ascends, combines
from ...ir.kernel import Kernel, Program, Select, Step, alternatives
from ...ir.types import Type
from ..manager import program_pass


@program_pass("BITS")
def forward_rows(
    program: Program,
    *,
    donate: Collection[str] = (),
    can_hand_on: Callable[[Kernel, Kernel, Mapping[str, Type]], bool] = lambda first, then, types: True,
    choices: bool = False,
) -> Program:
    """temp t: f32[N,D]; rows(n) cols(d) { accum t[%k, d] }; rows(k) cols(d) { load t[k, d] }
    ->  forwarded t: f32[N,D]; the same kernels, one after the other

    Code generation makes them one: rows come in the order of their keys, so that each row of ``t`` is finished before
    the next one begins, and is read from the registers and the nearest cache that it was summed in.

    :param donate: inputs in whose memory outputs may be written while rows are still read.
    :param can_hand_on: whether the target has text for a kernel and the one that reads its rows.
    :param choices: whether it has text for a choice of which some kernels store their rows.
    """
    for buffer in program.of_kind("temp"):
        made = _forwarded(program, buffer.name, donate, choices)
        if made is not None and all(can_hand_on(*pair, made.types) for pair in _handing(made, buffer.name)):
            program = made
    return program


def _forwarded(program: Program, name: str, donate: Collection[str], choices: bool) -> Program | None:
    """The program that hands on the rows of a temp; None where that is not possible."""
    touching = program.touching.get(name, ())
    if len(touching) != 2 or program.sharing[program.root(name)] != (name,):
        return None
    first, second = (program.steps[number] for number in touching)
    producer = _producer(first, name, program, choices)
    if producer is None or not isinstance(second, Kernel) or name in second.writes:
        return None
    if not second.reads_own_rows(name, program.types[name]) or {*program.forwards.values()} & {
        *producer.reads,
        *second.reads,
    }:
        return None
    if not _may_run_together(program, producer, touching, donate):
        return None
    steps = [step for number, step in enumerate(program.steps) if number not in touching]
    at = touching[1] - 1
    steps[at:at] = [producer, second]
    buffers = tuple(replace(b, kind="forwarded") if b.name == name else b for b in program.buffers)
    return replace(program, steps=tuple(steps), buffers=buffers)


def _handing(program: Program, name: str) -> list[tuple[Kernel, Kernel]]:
    """Each kernel that hands on the rows of a buffer, and the one that reads them."""
    at = next(number for number, handed in program.forwards.items() if handed == name)
    first, then = program.steps[at : at + 2]
    assert isinstance(then, Kernel)
    return [(k, then) for k in alternatives(first) if isinstance(k, Kernel) and program.hands_on(at, k)]


def _producer(step: Step, name: str, program: Program, choices: bool) -> Kernel | Select | None:
    """The kernel of a step that combines rows into a buffer in the order of their keys, and does nothing else; a choice
    of kernels, some of which do, where there may be one.

    Of several it is taken without a choice where its rows are in this order: nothing is to be sorted for it.
    """
    kernels = [k for _, k in step.cases] if isinstance(step, Select) else [step]
    for kernel in kernels:
        if not isinstance(kernel, Kernel) or not kernel.finishes_rows(name, program.types[name]):
            continue
        part = next(c for c in combines(kernel, program.types) if c.buffer == name)
        if len(kernels) == 1 or ascends(kernel, part):
            return kernel
        if choices and isinstance(step, Select):
            return step
    return None


def _may_run_together(
    program: Program, producer: Kernel | Select, touching: tuple[int, ...], donate: Collection[str]
) -> bool:
    """Whether a producer may run row by row along with the step that reads its rows: nothing writes what it reads from
    its own place on, not even where an input is donated.
    """
    read = {program.root(b) for b in producer.reads}
    later = program.steps[touching[0] + 1 : touching[1] + 1]
    return not read & {*donate, *(program.root(b) for step in later for b in step.writes)}
