"""What a module's kernels will execute on a GPU, as far as machine code and shapes say it, without a GPU.

Nothing here is measured.  Counts are of instructions in the text, per loop and per pass through it; times are those of
the model in :mod:`predicted`, which follows threads through the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..analysis.cost import floor_bytes, kernel_bytes
from ..codegen.cuda.actions import Launch
from ..errors import InvalidProblem
from ..ir.kernel import Kernel
from ..runtime.cuda.nvdisasm import disassemble
from ..runtime.cuda.nvrtc import KernelResources
from ..runtime.executable import Executable
from ..targets.devices import Gpu, gpu_of
from .occupancy import multiprocessor_of, resident_blocks
from .predicted import Predicted, predict, setting_of
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
    those that only load (the check of the error flags is one), then the widest first.  Each launch, and each direction,
    has its predicted time, what bounds it, and the share of it that the floor's bytes take at the peak bandwidth.

    :param dims: a size for every symbolic dim.
    :raises InvalidProblem: the target is not ``cuda``, a dim has no size, or the architecture's limits are not known.
    :raises CompilerMissing: there is no NVRTC or no nvdisasm.
    """
    lines = ["counts of the machine code and of shapes, and times of a model; nothing is measured"]
    for name, direction in directions(module, dims).items():
        lines += _lines(name, direction)
    return "\n".join(lines)


@dataclass(frozen=True)
class Direction:
    """A direction's launches at given sizes, each with its prediction.

    :param floor: bytes that must move.  :param kernel_bytes: those that the kernels say they move.
    :param other: actions that are no launches (products by a library), which no time is predicted for.
    """

    executable: Executable
    gpu: Gpu
    functions: Mapping[str, Function]
    launches: tuple[tuple[Launch, Predicted], ...]
    other: int
    kernel_bytes: int
    floor: int

    @property
    def seconds(self) -> float | None:
        """Predicted, of all launches; what was followed of them may be a sample, and the floor's bytes are known, if
        nothing but launches moves them.  None without launches: nothing is predicted of a library.
        """
        if not self.launches:
            return None
        followed = sum(p.seconds for _, p in self.launches)
        return followed if self.other else max(followed, self.floor / self.gpu.bandwidth)

    @property
    def share(self) -> float | None:
        """The time of the floor's bytes at the peak bandwidth, as a share of the predicted time; None where a library
        takes some of the time, or there is none.
        """
        return None if self.other or not self.seconds else self.floor / self.gpu.peak / self.seconds

    @property
    def bound(self) -> str | None:
        """What bounds the launches that take longest together; None without launches."""
        by: Counter[str] = Counter()
        for _, p in self.launches:
            by[p.bound] += p.seconds  # type: ignore[assignment]
        return max(by, key=by.__getitem__, default=None)


def directions(module: Compiled, dims: Mapping[str, int]) -> dict[str, Direction]:
    """Each direction's launches with their predicted times; arguments and errors are :func:`static_table`'s."""
    if module.target != "cuda":
        raise InvalidProblem(f"a static table is of the target cuda, and this module is for {module.target}")
    fixed = module.executables["forward"].fixed_dims
    bound = {**fixed, **dims}
    missing = sorted({d for e in module.executables.values() for d in e.program.dims} - bound.keys())
    if missing:
        raise InvalidProblem(f"a static table needs a size for {', '.join(missing)}: {missing[0]}=4096")
    return {name: _direction(executable, bound) for name, executable in module.executables.items()}


def _direction(executable: Executable, dims: Mapping[str, int]) -> Direction:
    program, binary = executable.program, executable.binary
    multiprocessor_of(binary.arch)
    gpu = gpu_of(binary.arch)
    plan = executable.native.bind(dims)
    actions = [action for step in plan.actions for action in step]
    launches = [action for action in actions if isinstance(action, Launch)]
    kernels = [(run.step, run.dims) for run in plan.runs if isinstance(run.step, Kernel)]
    moved = sum(kernel_bytes(kernel, program.types, sizes) for kernel, sizes in kernels)
    functions = {f.name: f for f in parse(disassemble(binary.cubin))} if binary.cubin else {}
    setting = setting_of(gpu, program, plan)
    made: dict[Launch, Predicted] = {}
    for launch in launches:
        if launch not in made:
            made[launch] = predict(setting, functions[launch.function], binary.kernels[launch.function], launch)
    timed = tuple((launch, made[launch]) for launch in launches)
    return Direction(executable, gpu, functions, timed, len(actions) - len(launches), moved, floor_bytes(program, dims))


def _lines(name: str, d: Direction) -> list[str]:
    binary = d.executable.binary
    against = f", {d.kernel_bytes / d.floor:.2f}x" if d.floor else ""
    lines = [
        f"{name} for {binary.arch}: {len(d.launches)} launches of kernels and {d.other} other"
        f" actions; kernels move {d.kernel_bytes} bytes, the floor is {d.floor}{against}",
        _predicted(d),
    ]
    for function, resources in binary.kernels.items():
        used = [(launch, p) for launch, p in d.launches if launch.function == function]
        lines += _function(binary.arch, d, d.functions[function], resources, used)
    return lines


def _predicted(d: Direction) -> str:
    if d.seconds is None:
        return f"  nothing is predicted for {d.gpu.name}: it has no launches of ours"
    share = (
        f" + {d.other} by a library, whose time is not predicted"
        if d.share is None
        else f", {d.share:.0%} of the floor"
    )
    return f"  predicted for {d.gpu.name}: {d.seconds * 1e6:.1f} us{share}; bound by {d.bound}"


def _function(
    arch: str,
    direction: Direction,
    function: Function,
    resources: KernelResources,
    used: Sequence[tuple[Launch, Predicted]],
) -> list[str]:
    spills = resources.spill_stores + resources.spill_loads
    lines = [
        f"  {function.name}: {resources.registers} registers, {resources.shared} B static shared, {spills} B spilled"
    ]
    alike: dict[tuple[int, int, int, bool], list[Predicted]] = {}
    for launch, p in used:
        alike.setdefault((launch.blocks, launch.threads, launch.shared, launch.wide), []).append(p)
    for (blocks, threads, shared, wide), times in alike.items():
        resident = resident_blocks(arch, threads, resources.registers, resources.shared + shared)
        repeated = f"{len(times)} times " if len(times) > 1 else ""
        lines.append(
            f"    {repeated}{blocks} blocks of {threads} threads, {shared} B dynamic shared;"
            f" {resident} blocks per multiprocessor{'; counts are of its text with 32-bit offsets' if wide else ''}"
        )
        lines.append(_time(direction, times))
    lines += [] if used else ["    not launched at these sizes"]
    lines.append(f"    {len(function.instructions)} instructions: {_counts(classes(function.instructions))}")
    accessing = [loop for loop in function.loops if widths(loop.body)]
    lines += [_loop(loop) for loop in sorted(accessing, key=_rank)[:MOST_LOOPS]]
    more = len(accessing) - MOST_LOOPS
    return [*lines, f"    ... and {more} loops more that access global memory"] if more > 0 else lines


def _time(direction: Direction, times: Sequence[Predicted]) -> str:
    """The predicted time of launches that are alike."""
    seconds, moved = sum(p.seconds for p in times), sum(p.bytes for p in times)
    longest = max(times, key=lambda p: p.seconds)
    guessed = f"; {longest.unknown} branches of the followed threads depend on data" if longest.unknown else ""
    lost = "" if all(p.finished for p in times) else "; a thread was not followed to its end"
    return (
        f"    predicted {seconds * 1e6:.1f} us, bound by {longest.bound};"
        f" {moved:.0f} B of DRAM, {sum(p.instructions for p in times):.3g} instructions of"
        f" threads; its bytes at the peak are {moved / direction.gpu.peak / seconds:.0%} of it{guessed}{lost}"
    )


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
