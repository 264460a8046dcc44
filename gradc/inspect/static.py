"""What a module will execute on a GPU, as far as machine code and shapes say it, without a GPU.

Nothing here is measured.  Counts are of instructions in the text, per loop and per pass through it; times of kernels
are those of the model in :mod:`predicted`, which follows threads through the text, and times of a library's products
those of :mod:`gradc.analysis.library_time`, which has rates that were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..analysis.cost import floor_bytes, kernel_bytes
from ..analysis.library_time import CallTime
from ..codegen.cuda.actions import Action, Convolution, Launch, Library
from ..codegen.cuda.library_time import convolution_time, product_time
from ..errors import InvalidProblem
from ..ir.dims import evaluate
from ..ir.kernel import Kernel
from ..ir.kernel import Loop as RowLoop
from ..runtime.cuda.nvdisasm import disassemble
from ..runtime.cuda.nvrtc import KernelResources
from ..runtime.executable import Executable
from ..targets.devices import Gpu, gpu_of
from ..targets.gpu import HOST_CALL, HOST_LAUNCH, HOST_RESULT
from .occupancy import multiprocessor_of, resident_blocks
from .predicted import Predicted, predict, setting_of
from .sass import Function, Loop, classes, parse, widths

MOST_LOOPS = 6
"""The most loops of a function in the table."""


class _Options(Protocol):
    """Of :class:`.Options`."""

    @property
    def device(self) -> str | None: ...


class Compiled(Protocol):
    """The part of :class:`gradc.Module` that the table uses."""

    target: str

    @property
    def options(self) -> _Options: ...

    @property
    def executables(self) -> Mapping[str, Executable]: ...


def static_table(module: Compiled, dims: Mapping[str, int]) -> str:
    """For each direction: bytes as the kernels say against the floor, launches, the predicted time of all steps and of
    each with its share, and what they take the host; for each function of the cubin: blocks,
    threads, registers, spills, shared memory, resident blocks per multiprocessor; the classes of its instructions, and
    its loops that access global memory, with the bytes per thread of each access: those that compute or store before
    those that only load (the check of the error flags is one), then the widest first.  Each launch has its predicted
    time, what bounds it, and the share of it that its bytes take at the peak bandwidth.

    :param dims: a size for every symbolic dim.
    :raises InvalidProblem: the target is not ``cuda``, a dim has no size, or the architecture's limits are not known.
    :raises CompilerMissing: there is no NVRTC or no nvdisasm.
    """
    lines = ["counts of the machine code and of shapes, and times of a model; nothing is measured"]
    for name, direction in directions(module, dims).items():
        lines += _lines(name, direction)
    return "\n".join(lines)


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, in a loop of all its blocks.

    :param name: of a kernel or call.  :param launches: of ours.  :param calls: of a library.
    :param bound: what bounds the part that takes longest.
    """

    name: str
    seconds: float
    launches: int
    calls: int
    bound: str


@dataclass(frozen=True)
class Direction:
    """A direction's launches and products by a library at given sizes, each with its prediction.

    :param steps: the same, one for each step of the program.
    :param floor: bytes that must move.  :param kernel_bytes: those that the kernels say they move.
    :param workspace: bytes of it.
    """

    executable: Executable
    gpu: Gpu
    functions: Mapping[str, Function]
    launches: tuple[tuple[Launch, Predicted], ...]
    products: tuple[tuple[Library | Convolution, CallTime], ...]
    steps: tuple[StepTime, ...]
    kernel_bytes: int
    floor: int
    workspace: int

    @property
    def seconds(self) -> float:
        """Predicted, of all launches and products; what was followed of launches may be a sample, and the floor's
        bytes are known.
        """
        return max(sum(step.seconds for step in self.steps), self.floor / self.gpu.bandwidth)

    @property
    def product_seconds(self) -> float:
        """Of the products."""
        return sum(p.seconds for _, p in self.products)

    @property
    def calls(self) -> int:
        """Of a library."""
        return sum(step.calls for step in self.steps)

    @property
    def host_seconds(self) -> float:
        """What launches, calls of a library and memory of results take the host to start."""
        results = len(self.executable.program.outputs)
        return HOST_LAUNCH * len(self.launches) + HOST_CALL * self.calls + HOST_RESULT * results

    @property
    def share(self) -> float | None:
        """The time of the floor's bytes at the peak bandwidth, as a share of the predicted time; None where nothing is
        predicted to take any.
        """
        return self.floor / self.gpu.peak / self.seconds if self.seconds else None

    @property
    def bound(self) -> str | None:
        """What bounds the launches and products that take longest together; None without any."""
        by: Counter[str] = Counter()
        timed: list[Predicted | CallTime] = [*(p for _, p in self.launches), *(p for _, p in self.products)]
        for p in timed:
            by[p.bound] += p.seconds  # type: ignore[assignment]
        return max(by, key=by.__getitem__, default=None)


def directions(module: Compiled, dims: Mapping[str, int], coherent: bool = True) -> dict[str, Direction]:
    """Each direction's launches with their predicted times; arguments and errors are :func:`static_table`'s.

    :param coherent: whether places that follow from data, as a grid's, are neighbours for neighbouring lanes.
    """
    if module.target != "cuda":
        raise InvalidProblem(f"a static table is of the target cuda, and this module is for {module.target}")
    fixed = module.executables["forward"].fixed_dims
    bound = {**fixed, **dims}
    missing = sorted({d for e in module.executables.values() for d in e.program.dims} - bound.keys())
    if missing:
        raise InvalidProblem(f"a static table needs a size for {', '.join(missing)}: {missing[0]}=4096")
    return {
        name: _direction(executable, bound, module.options.device, coherent)
        for name, executable in module.executables.items()
    }


def _direction(executable: Executable, dims: Mapping[str, int], device: str | None, coherent: bool) -> Direction:
    program, binary = executable.program, executable.binary
    multiprocessor_of(binary.arch)
    gpu = gpu_of(device or binary.arch)
    plan = executable.native.bind(dims)
    kernels = [(run.step, run.dims) for run in plan.runs if isinstance(run.step, Kernel)]
    handed_on = program.handed_on(dims)
    moved = sum(kernel_bytes(kernel, program.types, sizes, handed_on) for kernel, sizes in kernels)
    tiles = [run.step for run in plan.runs if isinstance(run.step, RowLoop)]
    moved += sum(evaluate(program.types[b].nbytes, dims) for loop in tiles for b in {*loop.reads, *loop.writes})
    functions = {f.name: f for f in parse(disassemble(binary.cubin))} if binary.cubin else {}
    setting = setting_of(gpu, plan, coherent)
    made: dict[Launch, Predicted] = {}
    steps: dict[tuple[int, str], list[tuple[Action, Predicted | CallTime]]] = {}
    for run, started in zip(plan.runs, plan.started, strict=True):
        timed = steps.setdefault((run.number, run.step.name), [])
        for action in started:
            if isinstance(action, Library):
                timed.append((action, product_time(action, gpu)))
                continue
            if isinstance(action, Convolution):
                timed.append((action, convolution_time(action, gpu)))
                continue
            if action not in made:
                made[action] = predict(setting, functions[action.function], binary.kernels[action.function], action)
            timed.append((action, made[action]))
    every = [pair for timed in steps.values() for pair in timed]
    return Direction(
        executable,
        gpu,
        functions,
        tuple((a, p) for a, p in every if isinstance(a, Launch) and isinstance(p, Predicted)),
        tuple((a, p) for a, p in every if not isinstance(a, Launch) and isinstance(p, CallTime)),
        tuple(_step_time(name, timed) for (_, name), timed in steps.items() if timed),
        moved,
        floor_bytes(program, dims),
        plan.workspace,
    )


def _step_time(name: str, timed: Sequence[tuple[Action, Predicted | CallTime]]) -> StepTime:
    calls = [1 if a.pointers is not None else len(a.calls) for a, _ in timed if isinstance(a, Library)]
    calls += [1 for a, _ in timed if isinstance(a, Convolution)]
    longest = max((p for _, p in timed), key=lambda p: p.seconds)
    launches = sum(isinstance(a, Launch) for a, _ in timed)
    return StepTime(name, sum(p.seconds for _, p in timed), launches, sum(calls), longest.bound)


def _lines(name: str, d: Direction) -> list[str]:
    binary = d.executable.binary
    against = f", {d.kernel_bytes / d.floor:.2f}x" if d.floor else ""
    lines = [
        f"{name} for {binary.arch}: {len(d.launches)} launches of kernels and {d.calls} calls of a library;"
        f" kernels move {d.kernel_bytes} bytes, the floor is {d.floor}{against}; workspace of {d.workspace} bytes",
        *_predicted(d),
    ]
    for function, resources in binary.kernels.items():
        used = [(launch, p) for launch, p in d.launches if launch.function == function]
        lines += _function(binary.arch, d, d.functions[function], resources, used)
    return lines


def _predicted(d: Direction) -> list[str]:
    """The time of a direction and of its steps."""
    if d.share is None:
        return [f"  nothing is predicted for {d.gpu.name}: nothing is executed"]
    products = f", {d.product_seconds / d.seconds:.0%} of it in products" if d.products else ""
    lines = [
        f"  predicted for {d.gpu.name}: {d.seconds * 1e6:.1f} us{products}, {d.share:.0%} of the floor; bound by"
        f" {d.bound}; to start it takes the host {d.host_seconds * 1e6:.0f} us"
    ]
    for step in d.steps:
        counted = [(step.launches, "launches"), (step.calls, "calls of a library")]
        parts = " and ".join(f"{n} {what}" for n, what in counted if n)
        seconds, share = step.seconds * 1e6, step.seconds / d.seconds
        lines.append(f"    {seconds:9.1f} us {share:4.0%}  {step.name}: {parts}, bound by {step.bound}")
    return lines


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
