"""Explanations of a module as text and tables."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..analysis.cost import Estimate, floor_bytes, kernel_bytes
from ..codegen.cpu.row_memory import batch_work
from ..errors import (
    CompilerMissing,
    GradcError,
    IndexOutOfRange,
    InvalidProblem,
    NotAscending,
    OutOfMemory,
    Unsupported,
)
from ..ir.dims import evaluate, nominal
from ..ir.graph import Graph
from ..ir.kernel import Call, Kernel, Loop, Program, Select, Step, alternatives, possible, taken
from ..ir.lexer import format_note
from ..passes.manager import Pipeline
from ..passes.program.choose_reduction import decisions
from ..passes.schedule.residual import Residual
from ..passes.schedule.schedule import missed_fusions
from ..runtime.executable import Executable
from ..runtime.kernel import KernelHandle, time_call
from ..targets.cpu import WAKING_WORK
from ..targets.devices import CPU, ESTIMATE, OF_INSTRUCTIONS, OF_TORCH, Cpu, Device, Gpu, cpu_of, gpu_of
from .memory import Memory

if TYPE_CHECKING:
    from ..module.options import Options


class Explained(Protocol):
    """The part of :class:`gradc.Module` that explanations use."""

    graph: Graph
    wrt: tuple[str, ...]
    target: str
    options: Options
    residuals: tuple[Residual, ...]

    @property
    def executables(self) -> Mapping[str, Executable]: ...

    @property
    def stages(self) -> Pipeline: ...

    @property
    def variants(self) -> Mapping[tuple[tuple[str, tuple[int, ...]], ...], object | None]: ...

    @property
    def kernels(self) -> Mapping[str, KernelHandle]: ...

    def memory(self, **dims: int) -> Memory: ...


MOST_PAIRS = 5
"""The most pairs of unfused kernels in an explanation."""


def _human(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def _fixed_dims(module: Explained) -> dict[str, int]:
    return module.executables["forward"].fixed_dims


def _bindings(module: Explained, dims: Mapping[str, int]) -> dict[str, int]:
    known = list(dict.fromkeys(d for e in module.executables.values() for d in (*e.program.dims, *e.fixed_dims)))
    for name in dims:
        if name not in known:
            close = difflib.get_close_matches(name.upper(), known, 1)
            raise InvalidProblem(
                f"{module.graph.name} has no dim {name!r}{f'; did you mean {close[0]}?' if close else ''}; it has"
                f" {', '.join(known) or 'none'}"
            )
    sizes = [s for e in module.executables.values() for b in e.program.buffers for s in b.type.shape]
    return {**nominal(sizes, {**_fixed_dims(module), **dims})}


def _step_bytes(item: Kernel | Call | Loop, program: Program, bound: Mapping[str, int]) -> int:
    """The bytes that a step moves; of a loop those outside of its blocks, each once."""
    types = program.types
    if isinstance(item, Kernel):
        return 0 if program.begins_update(item) else kernel_bytes(item, types, bound, program.handed_on(bound))
    return sum(evaluate(types[b].nbytes, bound) for b in {*item.reads, *item.writes})


def _in_block(item: Kernel | Call, loop: Loop, program: Program, bound: Mapping[str, int]) -> int:
    """The bytes outside of its blocks that a step of a loop moves, each once."""
    own = {b.name for b in loop.blocks}
    return sum(evaluate(program.types[b].nbytes, bound) for b in {*item.reads, *item.writes} - own)


def _way(item: Kernel | Call) -> str:
    """How a kernel combines rows, ``d.gamma, d.beta: privatized``, or which library's call it is."""
    if not isinstance(item, Kernel):
        return f"library {item.op}{item.epilogue.words}"
    of = {strategy: [b for b, s in item.strategy if s == strategy] for _, strategy in item.strategy}
    return "; ".join(f"{', '.join(names)}: {strategy}" for strategy, names in of.items())


def _caller(steps: Sequence[Step], bound: Mapping[str, int], target: str) -> str:
    """Whether a batch is less work than waking a thread for it is."""
    work = [evaluate(each, bound) for each in batch_work(steps)] if target == "cpu" else []
    return " on the caller's thread" if work and sum(work) < WAKING_WORK else ""


def summary(module: Explained, dims: Mapping[str, int] | None = None) -> str:
    """One line per kernel: name, bytes, share of the bytes, strategy, why."""
    bound = _bindings(module, dims or {})
    rows = []
    for direction, executable in module.executables.items():
        program = executable.program
        batches = {
            number: f" in a batch of {end - begin}{_caller(program.steps[begin:end], bound, module.target)}"
            for begin, end in program.batches
            for number in range(begin, end)
        }
        for number, step in enumerate(program.steps):
            item = taken(step, bound)
            if isinstance(item, Loop) and item.tile is not None:
                blocks = f"{evaluate(item.by, bound)} rows and {evaluate(item.sweeps[0].by, bound)} columns"
                nbytes = _step_bytes(item, program, bound)
                rows.append((direction, item.name, nbytes, f"one kernel by {blocks}, {item.tile}", str(item.note)))
                continue
            if isinstance(item, Loop):
                by = f"by {evaluate(item.by, bound)} rows"
                rows += [
                    (direction, x.name, _in_block(x, item, program, bound), f"{_way(x)} {by}".lstrip(), str(x.note))
                    for x in item.steps
                ]
                continue
            way = _way(item)
            if isinstance(step, Select):
                when = next(w for w, k in step.cases if k is item)
                way += (
                    f" when {when}"
                    if when is not None
                    else f" unless {' or '.join(str(w) for w, _ in step.cases if w is not None)}"
                )
            way += batches.get(number, "")
            rows.append((direction, item.name, _step_bytes(item, program, bound), way.lstrip(), str(item.note)))
    total = sum(r[2] for r in rows) or 1
    guessed = {**_fixed_dims(module), **(dims or {})}.keys()
    symbols = ", ".join(f"{k}={v}" for k, v in bound.items()) + (
        ", 1024 standing for what is not given" if bound.keys() - guessed else ""
    )
    lines = [
        f"module {module.graph.name} on {module.target}: {len(rows)} steps, wrt"
        f" {', '.join(module.wrt) or 'nothing'}{f' (bytes at {symbols})' if symbols else ''}"
    ]
    lines += [
        f"  {direction:<8} {name:<38} {_human(size):>9} {size / total:>4.0%}  {way:<34} {note}".rstrip()
        for direction, name, size, way, note in rows
    ]
    return "\n".join(lines)


def explain(module: Explained, dims: Mapping[str, int], device: Device | None = None, timed: int = 0) -> str:
    """The summary, the lower bound of bytes, each choice of reduction with its estimates, the residuals and the passes.

    :param device: for the estimates; None is the one it was compiled for.
    :param timed: the number of runs, on random data, by which each step, and each strategy of its combines, is timed;
        0 measures nothing.
    """
    device = device or _compiled_for(module)
    bound = _bindings(module, dims)
    lines = [summary(module, dims), ""]
    for direction, executable in module.executables.items():
        program = executable.program
        moved = sum(_step_bytes(taken(s, bound), program, bound) for s in program.steps)
        lines.append(
            f"{direction}: moves {_human(moved)}, the floor (each input read once, each output written once) is"
            f" {_human(floor_bytes(program, bound))}"
        )
        lines += time_table(executable, bound, device, timed) if timed else []
        ways = timed and module.target != "numpy"  # the interpreter ignores strategies
        lines += reduction_table(
            program, bound, device, partial(_measured_way, executable, timed, bound) if ways else None
        )
        lines += [
            f"  {name} was copied in {calls} calls: its elements lie in no order that the kernels read"
            for name, calls in executable.copied.items()
        ]
        lines += missed_fusions_table(module, direction, bound)
        lines += untiled_table(module, direction)
        if executable.target != "numpy":
            lines += mappings_table(executable)
        if executable.target.startswith("cuda"):
            lines.append(f"  {executable.native.counting(bound)}")
        if executable.target == "cuda":
            lines += resources_table(executable)
    for orders, variant in module.variants.items():
        if variant is not None:
            lines.append(
                f"a variant reads {', '.join(f'{name} with its axes in the order {order}' for name, order in orders)}"
            )
    budget, hints = module.options.memory_budget, module.options.hints or {}
    within = (
        "" if budget is None else f" within memory_budget={budget}{''.join(f', {d}={n}' for d, n in hints.items())}"
    )
    lines += ["", f"residuals{within}:"]
    for r in module.residuals:
        size = 0 if r.borrowed else evaluate(r.node.type.nbytes, {**nominal(r.node.shape), **bound})
        lines.append(f"  {r.name:<24} {r.node.type!s:<20} {_human(size):>9}  {r.why}")
    lines += memory_lines(module, dims)
    lines += ["", "passes:"]
    lines += [
        f"  {stage.name:<28} {stage.size:>5} {'nodes' if hasattr(stage.result, 'nodes') else 'steps'} "
        f" {stage.seconds * 1e3:7.1f} ms"
        for stage in module.stages
    ]
    return "\n".join(lines)


def memory_lines(module: Explained, dims: Mapping[str, int]) -> list[str]:
    """The memory that forward and backward allocate; empty unless every dim is known."""
    if {d for e in module.executables.values() for d in e.program.dims} - {**_fixed_dims(module), **dims}.keys():
        return []
    try:
        m = module.memory(**dims)
    except GradcError as error:  # the module cannot run with these sizes
        return ["", f"memory: {error}"]
    kept = f"values {_human(m.outputs)}, residuals {_human(m.residuals)}"
    lines = [
        "",
        f"memory beyond inputs and cotangents: {_human(m.peak)}",
        f"  forward  {_human(m.forward):>9}  {kept}, workspace {_human(m.forward_workspace)}",
    ]
    if "backward" in module.executables:
        lines.append(
            f"  backward {_human(m.backward):>9}  {kept}, gradients {_human(m.gradients)}, workspace"
            f" {_human(m.backward_workspace)}"
        )
    if m.threads:
        lines.append(f"  threads  {_human(m.threads):>9}  kept from call to call")
    return lines


def _compiled_for(module: Explained) -> Device:
    """The device that a module was compiled for."""
    if not module.target.startswith("cuda"):
        return cpu_of(module.options.calibration)
    return gpu_of(module.options.device or module.options.arch, module.options.calibration)


def missed_fusions_table(module: Explained, direction: str, bound: Mapping[str, int]) -> list[str]:
    """The pairs of kernels whose fusion would save bytes, with the reason why they are not fused; none of two of which
    one hands its rows to the other.
    """
    scheduled = module.stages[f"{direction}.schedule"].result
    if not isinstance(scheduled, Program):
        return []
    program = module.executables[direction].program
    # Kernels are renamed, or are no more, by the passes that follow; what they write is written by one at most.
    writers = {b: (inner.name, step) for step in program.steps for inner in alternatives(step) for b in inner.writes}
    now: dict[str, tuple[str, Step]] = {}
    for kernel in scheduled.kernels:
        if not kernel.writes or kernel.writes[0] in writers:
            now[kernel.name] = writers[kernel.writes[0]] if kernel.writes else (kernel.name, kernel)
    as_one = [program.steps[number : number + 2] for number in program.forwards]
    pairs = [
        replace(pair, first=first, second=second)
        for pair in missed_fusions(scheduled)
        if pair.first in now and pair.second in now
        for (first, one), (second, other) in [(now[pair.first], now[pair.second])]
        if first != second and not (one is other and isinstance(one, Loop)) and (one, other) not in as_one
    ]
    lines = []
    for pair in pairs[:MOST_PAIRS]:
        moved = _human(evaluate(pair.nbytes, {**nominal([pair.nbytes]), **bound}))
        lines.append(f"  {pair.first} and {pair.second} both move {moved} and are two kernels: {pair.why}")
    return [*lines, *([f"  ... and {len(pairs) - MOST_PAIRS} pairs more"] if len(pairs) > MOST_PAIRS else [])]


def untiled_table(module: Explained, direction: str) -> list[str]:
    """The products with wide rows, or of decoded weights, that no kernel on tensor cores computes, with the reason."""
    name = f"{direction}.tile_rows"
    stage = module.stages[name].result if name in module.stages.names() else None
    untiled = stage.untiled if isinstance(stage, Program) else ()
    return [
        f"  {each.step} and what is computed with it are no kernel on tensor cores: {each.why}{format_note(each.note)}"
        for each in untiled
    ]


def mappings_table(executable: Executable) -> list[str]:
    """The mapping of each kernel, to the tasks of a CPU or to the threads of a GPU, with the reason."""
    kernels = executable.native.kernels.values()
    return [f"  {kernel.name}: {kernel.mapping}, because {kernel.reason}" for kernel in kernels]


def resources_table(executable: Executable) -> list[str]:
    """The resources (registers, shared memory, spills) of each CUDA function, as reported by the assembler."""
    try:
        binary = executable.binary
    except CompilerMissing as error:
        return [f"  not compiled: {error}"]
    lines = [f"  compiled for {binary.arch}:"]
    kernels = executable.native.kernels.values()
    dynamic = {stage.name: kernel.dynamic_shared(stage) for kernel in kernels for stage in kernel.stages}
    for name, r in binary.kernels.items():
        shared = r.shared + dynamic.get(name, 0)
        spilled = f"  {r.spill_stores + r.spill_loads} bytes spilled" if r.spill_stores + r.spill_loads else ""
        lines.append(f"   {name:<40} {r.registers:>4} registers  {shared:>6} B shared{spilled}")
    return lines


def time_table(executable: Executable, dims: Mapping[str, int], device: Device, repeat: int) -> list[str]:
    """Each step's predicted time (its bytes at the device's bandwidth; none for matrix products) and the median of
    ``repeat`` runs.
    """
    where = (
        "by the simulator, which says nothing of a GPU"
        if executable.target == "cuda-sim"
        else f"on {executable.target}"
    )
    lines = [
        f"  each step alone on random data, the median of {repeat}, {where}; predicted at {_human(device.bandwidth)}/s:"
    ]
    for step in executable.program.steps:
        item = taken(step, dims)
        if isinstance(item, Loop):
            lines += [f"     {x.name:<38} {'':>13}  in a loop, which is not timed alone" for x in item.steps]
            continue
        predicted = (
            f"{_step_bytes(item, executable.program, dims) / device.bandwidth * 1e6:10.1f} us"
            if isinstance(item, Kernel)
            else f"{'':>13}"
        )
        run = lambda item=item: (
            KernelHandle(item, executable).time(repeat, None, **dims)
            if isinstance(item, Kernel)
            else time_call(item, executable, repeat, dims)
        )
        lines.append(f"     {item.name:<38} {predicted}  measured {_measured(run)}")
    return lines


def _measured(run: Callable[[], float]) -> str:
    try:
        return f"{run() * 1e6:.1f} us"
    except (
        InvalidProblem,
        IndexOutOfRange,
        NotAscending,
        OutOfMemory,
    ) as error:  # random inputs may be invalid for the kernel
        return f"nothing ({type(error).__name__})"


def _measured_way(
    executable: Executable, repeat: int, dims: Mapping[str, int], name: str, buffer: str, strategy: str
) -> str:
    """The measured time of a kernel with a given strategy for one of its combines."""
    kernel = next(k for k in executable.program.kernels if k.name == name and buffer in k.writes)
    try:
        handle = KernelHandle(kernel, executable).forced(buffer, strategy)
    except Unsupported:
        handle = None
    return (
        "  not possible beside its other combines"
        if handle is None
        else f"  measured {_measured(lambda: handle.time(repeat, None, **dims))}"
    )


def reduction_table(
    program: Any, dims: Mapping[str, int], device: Device = CPU, measured: Callable[[str, str, str], str] | None = None
) -> list[str]:
    """choose_reduction's table: predicted bytes and time of each strategy, and the chosen one; for a GPU also the lower
    bound and the reason.

    :param measured: (kernel, buffer, strategy) -> text of the measured time.
    """
    lines = []
    by_data = {each.name: step for step in program.steps for each in alternatives(step)}
    for kernel, buffer, pick, table in decisions(program, dims, device):
        by = ", with constants of a calibration" if isinstance(device, Cpu) and device.sources else ""
        lines.append(f"  combine into {buffer} by {kernel}{by}:")
        lines += _by_data(by_data[kernel], buffer, dims)
        if isinstance(device, Gpu) and table:
            sources = [source for name, source in device.sources.items() if name not in (*OF_INSTRUCTIONS, *OF_TORCH)]
            guessed = sources.count(ESTIMATE)
            known = f" ({guessed} of {len(sources)} constants are estimates)" if guessed else ""
            lines.append(
                f"      on {device.name}{known} the floor is {_human(table[0].floor)},"
                f" {table[0].floor / device.bandwidth * 1e6:.1f} us; {_verdict(pick, table)}"
            )
        for e in table:
            mark, share = "->" if e.strategy == pick else "  ", ""
            if isinstance(device, Gpu):
                share = f"  {e.floor / device.bandwidth / e.seconds:>4.0%} of the floor" if e.seconds else ""
                share += "" if e.deterministic else "  other bits in each run"
            lines.append(
                f"   {mark} {e.strategy:<{12 if share else 11}} {_human(e.bytes):>9}  {e.seconds * 1e6:10.1f}"
                f" us{measured(kernel, buffer, e.strategy) if measured else ''}{share}  {e.why}"
            )
    return lines


def _by_data(step: Step, buffer: str, dims: Mapping[str, int]) -> list[str]:
    """What a sample of the data decides at these sizes."""
    ways = [k.strategies.get(buffer, "") for k in possible(step, dims) if isinstance(k, Kernel)]
    if not isinstance(step, Select) or step.sample is None or len(set(ways)) < 2:
        return []
    names, of = " and ".join(step.sample.names), step.sample.buffer
    return [f"      {names} of {of} decide: {' or '.join(dict.fromkeys(ways))}; without them (0 and 0)"]


def _verdict(pick: str, table: list[Estimate]) -> str:
    """The reason for the choice, in a sentence."""
    estimates = {e.strategy: e for e in table}
    if pick not in estimates:
        return "nothing is picked yet"
    best = min(table, key=lambda e: e.seconds)
    if best.strategy == pick:
        return f"{pick} is the fastest"
    loss = f"{(estimates[pick].seconds - best.seconds) * 1e6:.1f} us"
    rest = [e for e in table if e.deterministic]
    if not best.deterministic and min(rest, key=lambda e: e.seconds).strategy == pick:
        return f"{pick} is the fastest that gives the same bits in each run, {best.strategy} would save {loss}"
    return (
        f"{pick} was forced, is what there are kernels for, or holds for a range of sizes; {best.strategy} would save"
        f" {loss} at these"
    )
