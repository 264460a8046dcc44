"""What a module's kernels will execute on a GPU, as far as machine code and shapes say it, without a GPU.

Nothing here is measured.  Counts are of instructions in the text, per loop and per pass through it; they say nothing of
how long an instruction takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from ..codegen.cuda.actions import Launch
from ..errors import InvalidProblem
from ..passes.reductions.cost import floor_bytes, kernel_bytes
from ..runtime.cuda.nvdisasm import disassemble
from ..runtime.cuda.nvrtc import KernelResources
from ..runtime.executable import Executable
from .occupancy import multiprocessor_of, resident_blocks
from .sass import Function, Loop, classes, parse, widths

MOST_LOOPS = 6
"""The most loops of a function in the table."""


class Compiled(Protocol):
    """The part of :class:`gradc.Module` that the table uses."""

    target: str

    @property
    def executables(self) -> Mapping[str, Executable]: ...


def static_table(module: Compiled, dims: Mapping[str, int]) -> str:
    """For each direction: bytes as the kernels say against the floor, launches; for each function of the cubin: blocks,
    threads, registers, spills, shared memory, resident blocks per multiprocessor; the classes of its instructions, and
    its loops that access global memory, with the bytes per thread of each access: those that compute or store before
    those that only load (the check of the error flags is one), then the widest first.

    :param dims: a size for every symbolic dim.
    :raises InvalidProblem: the target is not ``cuda``, a dim has no size, or the architecture's limits are not known.
    :raises CompilerMissing: there is no NVRTC or no nvdisasm.
    """
    if module.target != "cuda":
        raise InvalidProblem(f"a static table is of the target cuda, and this module is for {module.target}")
    fixed = module.executables["forward"].fixed_dims
    bound = {**fixed, **dims}
    missing = sorted({d for e in module.executables.values() for d in e.program.dims} - bound.keys())
    if missing:
        raise InvalidProblem(f"a static table needs a size for {', '.join(missing)}: {missing[0]}=4096")
    lines = ["counts of the machine code and of shapes; nothing is measured"]
    for direction, executable in module.executables.items():
        lines += _direction(direction, executable, bound)
    return "\n".join(lines)


def _direction(direction: str, executable: Executable, dims: Mapping[str, int]) -> list[str]:
    program, binary = executable.program, executable.binary
    multiprocessor_of(binary.arch)
    plan = executable.native.bind(dims)
    actions = [action for step in plan.actions for action in step]
    launches = [action for action in actions if isinstance(action, Launch)]
    types = {b.name: b.type for b in program.buffers}
    kernels = [item for item in plan.steps if item in program.kernels]
    moved = sum(kernel_bytes(kernel, types, dims) for kernel in kernels)
    floor = floor_bytes(program, dims)
    share = f", {moved / floor:.2f}x" if floor else ""
    lines = [
        f"{direction} for {binary.arch}: {len(launches)} launches of kernels and {len(actions) - len(launches)} other"
        f" actions; kernels move {moved} bytes, the floor is {floor}{share}"
    ]
    functions = {f.name: f for f in parse(disassemble(binary.cubin))} if binary.cubin else {}
    for name, resources in binary.kernels.items():
        used = [launch for launch in launches if launch.function == name]
        lines += _function(binary.arch, functions[name], resources, used)
    return lines


def _function(arch: str, function: Function, resources: KernelResources, used: list[Launch]) -> list[str]:
    spills = resources.spill_stores + resources.spill_loads
    lines = [
        f"  {function.name}: {resources.registers} registers, {resources.shared} B static shared, {spills} B spilled"
    ]
    alike = Counter((launch.blocks, launch.threads, launch.shared, launch.wide) for launch in used)
    for (blocks, threads, shared, wide), times in alike.items():
        resident = resident_blocks(arch, threads, resources.registers, resources.shared + shared)
        repeated = f"{times} times " if times > 1 else ""
        lines.append(
            f"    {repeated}{blocks} blocks of {threads} threads, {shared} B dynamic shared;"
            f" {resident} blocks per multiprocessor{'; counts are of its text with 32-bit offsets' if wide else ''}"
        )
    lines += [] if used else ["    not launched at these sizes"]
    lines.append(f"    {len(function.instructions)} instructions: {_counts(classes(function.instructions))}")
    accessing = [loop for loop in function.loops if widths(loop.body)]
    lines += [_loop(loop) for loop in sorted(accessing, key=_rank)[:MOST_LOOPS]]
    more = len(accessing) - MOST_LOOPS
    return [*lines, f"    ... and {more} loops more that access global memory"] if more > 0 else lines


def _rank(loop: Loop) -> tuple[bool, int, int]:
    """The order of loops in the table."""
    works = {"f32", "f64", "global store", "atomics", "special", "matrix"} & classes(loop.body).keys()
    return not works, -max(width for _, width in widths(loop.body)), loop.start


def _loop(loop: Loop) -> str:
    accesses = ", ".join(f"{n} {opcode} of {width} B" for (opcode, width), n in widths(loop.body).items())
    slow = f"; {loop.slow} on slow paths" if loop.slow else ""
    return (
        f"    loop at {loop.start:#06x}, depth {loop.depth}: {accesses}; {len(loop.body)} instructions:"
        f" {_counts(classes(loop.body))}{slow}"
    )


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counted.items())
