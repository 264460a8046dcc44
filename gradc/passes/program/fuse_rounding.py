"""fuse_rounding: a sum that is only rounded is rounded where it is written."""

from __future__ import annotations

from dataclasses import replace

from ...ir.kernel import Kernel, Program, Step
from ...ir.statement import Index, Stmt
from ...ir.types import F32


def fuse_rounding(program: Program) -> Program:
    """accum t[i] <- v : f32;  store o[i] <- cast t[i] : bf16  ->  accum o[i] <- v : f32

    It adds up in f32 and is rounded once, so the bits stay; what goes is the f32 result's way to memory and back: 8 of
    10 bytes per element.
    """
    steps: list[Step] = list(program.steps)
    instead: dict[str, str] = {}
    for number, step in enumerate(program.steps):
        rounded = _rounding(step) if isinstance(step, Kernel) else None
        if rounded is not None and _only_this(program, number, *rounded):
            instead[rounded[0]] = rounded[1]
            steps.remove(step)
    if not instead:
        return program
    kept = [_renamed(step, instead) if isinstance(step, Kernel) and step.accums else step for step in steps]
    return replace(program, steps=tuple(kept), buffers=tuple(b for b in program.buffers if b.name not in instead))


def _rounding(kernel: Kernel) -> tuple[str, str] | None:
    """(f32 buffer, 16-bit buffer) of a kernel that does nothing but round every element of one into the other."""
    if [s.op for s in kernel.body] != ["load", "cast", "store"]:
        return None
    load, cast, store = kernel.body
    axes = [a for a, _ in (*kernel.rows, *kernel.cols)]
    plain = load.index == store.index and sorted(str(i.variable) for i in load.index if i != Index()) == sorted(axes)
    narrow = cast.dtype is not None and cast.dtype.is_float and cast.dtype.bits == 16
    chained = (cast.args, store.args) == ((load.name,), (cast.name,))
    return (
        (load.buffer, store.buffer)
        if plain and narrow and chained and load.dtype is F32 and not load.where and not store.where
        else None
    )


def _only_this(program: Program, number: int, source: str, target: str) -> bool:
    """Whether the source is nothing but a sum that one kernel before makes for this rounding, and both buffers are
    themselves.
    """
    a, b = program.buffer[source], program.buffer[target]
    others = [step for i, step in enumerate(program.steps) if i != number]
    made = [s for step in others if isinstance(step, Kernel) for s in step.accums if s.buffer == source]
    aliased = any(x.alias in (source, target) for x in program.buffers)
    touched = sum(source in (*step.reads, *step.writes) for step in others)
    first = all(target not in (*step.reads, *step.writes) for step in program.steps[:number])
    return (
        a.kind == "temp"
        and not (a.alias or b.alias or aliased)
        and len(made) == 1
        and made[0].combine == "sum"
        and made[0].dtype is F32
        and touched == 1
        and first
        and a.type.shape == b.type.shape
    )


def _renamed(kernel: Kernel, names: dict[str, str]) -> Kernel:
    def of(s: Stmt) -> Stmt:
        return replace(s, buffer=names[s.buffer]) if s.op == "accum" and s.buffer in names else s

    return replace(kernel, body=tuple(map(of, kernel.body)))
