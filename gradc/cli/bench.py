"""bench: times a model's forward, and forward with backward, beside NumPy and torch."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..errors import GradcError
from ..module.module import Module
from ..module.sparse import SparseRows
from ..runtime.host import arrays, pool
from ..runtime.host.arrays import Arguments
from ..runtime.host.toolchain import processor
from ..verify.samples import cotangents, sample
from .model import (
    AS_JSON,
    INPUTS,
    SEED,
    Settings,
    compiled,
    floats,
    input_types,
    open_model,
    open_program,
    read_arrays,
    with_model,
)
from .results import say_json

PEERS = ("numpy", "torch", "torch.compile")
SAMPLE_SECONDS = 5e-3
"""A sample is the mean of as many calls as take this long."""
MOST_SECONDS = 10.0
"""A contestant that takes longer gets fewer rounds, but three."""
LEAST_ROUNDS = 3
PATIENCE = 600.0
"""Seconds for which a contestant may not answer."""

Arrays = Mapping[str, np.ndarray[Any, Any]]
Call = Callable[[], Mapping[str, Any]]


class NotThere(Exception):
    """A peer that this machine does not have."""


@dataclass
class Times:
    """Seconds of a call.

    :ivar low, high: the quartiles.  :ivar peak_bytes: what a call takes of memory beside what is held between calls;
        None where the system does not say.
    """

    median: float
    low: float
    high: float
    rounds: int
    peak_bytes: int | None

    @classmethod
    def of(cls, seconds: Sequence[float], peak_bytes: int | None) -> Times:
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
        return cls(statistics.median(seconds), quartiles[0], quartiles[2], len(seconds), peak_bytes)


@dataclass
class Row:
    """One contestant.

    :ivar why: why it was not measured; empty if it was.
    :ivar prepared: seconds of its compilation and first calls.
    :ivar difference: the largest distance of a result from gradc's, as a share of the largest element of that result.
    """

    peer: str
    why: str = ""
    prepared: float = 0.0
    difference: float = 0.0
    forward: Times | None = None
    both: Times | None = None


@dataclass
class Problem:
    """What every contestant computes."""

    settings: Settings
    inference: Module
    training: Module | None
    arrays: Arrays
    dims: Mapping[str, int]
    seed: int
    threads: int
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def cotangents(self) -> Arrays:
        outputs = {name: node.type for name, node in self.inference.graph.outputs if node.dtype.is_float}
        return cotangents(outputs, self.dims, self.seed)


# -- contestants: {"forward": a call, "both": forward with backward} ---------------------------------------------------


def _of_modules(problem: Problem, inference: Module, training: Module | None) -> dict[str, Call]:
    given, dims = dict(problem.arrays), problem.dims

    def own(module: Module, direction: str) -> dict[str, int]:
        known = module.executables[direction].program.dims
        return {name: size for name, size in dims.items() if name in known}

    def named(value: Any) -> Mapping[str, Any]:
        return value if isinstance(value, dict) else {inference.graph.output_names[0]: value}

    def forward() -> Mapping[str, Any]:
        return named(inference(given, dims=own(inference, "forward")))

    calls: dict[str, Call] = {"forward": forward}
    if training is not None:
        upstream: Arguments = problem.cotangents

        def both() -> Mapping[str, Any]:
            _, residuals = training.forward(given, dims=own(training, "forward"))
            gradients = training.backward(residuals, dims=own(training, "backward"), **upstream)
            return {f"d.{name}": gradient for name, gradient in gradients.items()}

        calls["both"] = both
    return calls


def _numpy(problem: Problem) -> dict[str, Call]:
    from ..api import compile

    graph = problem.inference.graph
    modules = [
        compile(graph, module.wrt, "numpy", **module.options.for_other_target()) if module is not None else None
        for module in (problem.inference, problem.training)
    ]
    assert modules[0] is not None
    return _of_modules(problem, modules[0], modules[1])


def _torch(problem: Problem, compiled: bool) -> dict[str, Call]:
    try:
        from ..torch.eager import calls
    except ModuleNotFoundError as error:
        raise NotThere("it is not installed: pip install 'gradc[torch]'") from error
    return calls(
        problem.inference.graph,
        problem.training.wrt if problem.training is not None else (),
        problem.dims,
        problem.arrays,
        problem.cotangents,
        compiled=compiled,
        threads=problem.threads,
    )


CONTESTANTS: dict[str, Callable[[Problem], dict[str, Call]]] = {
    "gradc": lambda problem: _of_modules(problem, problem.inference, problem.training),
    "numpy": _numpy,
    "torch": lambda problem: _torch(problem, compiled=False),
    "torch.compile": lambda problem: _torch(problem, compiled=True),
}


# -- one contestant, in a process of its own ---------------------------------------------------------------------------


def _serve(name: str, problem: Problem, channel: Connection) -> None:
    """Prepares a contestant, says what it is like, and measures when asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    try:
        began = time.perf_counter()
        calls = CONTESTANTS[name](problem)
        found = {name: value for call in calls.values() for name, value in call().items()}
        prepared = time.perf_counter() - began
        difference = max((_distance(found[n], problem.results[n]) for n in problem.results), default=0.0)
        del found
        repeats, peaks = {}, {}
        for which, call in calls.items():
            call()
            peaks[which] = _peak(call)
            began = time.perf_counter()
            call()
            taken = max(time.perf_counter() - began, 1e-7)
            repeats[which] = (max(1, math.ceil(SAMPLE_SECONDS / taken)), taken)
        channel.send((prepared, difference, peaks, repeats))
        while which := channel.recv():
            count = repeats[which][0]
            began = time.perf_counter()
            for _ in range(count):
                calls[which]()
            channel.send((time.perf_counter() - began) / count)
    except EOFError:
        return
    except Exception as error:
        text = str(error).strip() or "no reason given"
        own = isinstance(error, GradcError | NotThere)
        channel.send(text.splitlines()[0] if own else f"{type(error).__name__}: {text.splitlines()[0]}"[:300])


def _distance(found: Any, wanted: Any) -> float:
    """The largest distance of two arrays as a share of the second's largest element."""
    a, b = (np.asarray(_dense(x)).astype(np.float64) for x in (found, wanted))
    if a.shape != b.shape:
        return math.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
    largest = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    return difference / largest if difference and largest else difference


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, SparseRows) else value


def _peak(call: Call) -> int | None:
    """The most bytes that a call holds at once, beside what is resident before it, once free memory is given back."""
    gc.collect()
    arrays.pool.trim()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        request = os.open("/proc/self/clear_refs", os.O_WRONLY)  # no file: the high-water mark begins anew
        try:
            os.write(request, b"5")
        finally:
            os.close(request)
        before = _resident("VmRSS")
        call()
        return max(_resident("VmHWM") - before, 0)
    except (OSError, KeyError):
        return None


def _resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Vm")}[which]


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """A process that measures, and what it has said."""

    row: Row
    process: Any
    channel: Connection
    peaks: Mapping[str, int | None] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def prepare(self, rounds: int) -> None:
        answer = self.hear()
        if answer is None:
            return
        self.row.prepared, self.row.difference, self.peaks, repeats = answer
        share = MOST_SECONDS / len(repeats)
        for which, (count, taken) in repeats.items():
            self.rounds[which] = min(rounds, max(LEAST_ROUNDS, int(share / (count * taken))))
            self.seconds[which] = []

    def measure(self, which: str, number: int) -> None:
        """A round, where it takes part in that."""
        if not self.row.why and number < self.rounds[which]:
            self.channel.send(which)
            answer = self.hear()
            if answer is not None:
                self.seconds[which].append(answer)

    def hear(self) -> Any:
        """Its answer; None, and why, if it has no number."""
        try:
            answer = self.channel.recv() if self.channel.poll(PATIENCE) else f"no answer in {PATIENCE:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            answer = f"its process ended with the code {self.process.exitcode}"
        if isinstance(answer, str):
            self.row.why = answer
            return None
        return answer


@contextmanager
def _started(name: str, problem: Problem) -> Iterator[Contestant]:
    forking = multiprocessing.get_context("fork")  # children have the model and the arrays as they stand
    ours, theirs = forking.Pipe()
    process = forking.Process(target=_serve, args=(name, problem, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        yield Contestant(Row(name), process, ours)
    finally:
        ours.close()
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()


def contest(problem: Problem, peers: Sequence[str], rounds: int) -> list[Row]:
    """Every contestant's row; rounds are interleaved, so that what else the machine does falls on all of them."""
    with ExitStack() as stack, problem.settings.waiting("measuring") as progress:
        contestants = []
        for name in ("gradc", *peers):  # one after another: compilers take all cores
            progress.say(f"preparing {name}")
            contestants.append(stack.enter_context(_started(name, problem)))
            contestants[-1].prepare(rounds)
        for number in range(rounds):
            progress.say(f"measuring, round {number + 1} of {rounds}")
            for which in ("forward", "both"):
                for each in contestants:
                    if which in each.rounds:
                        each.measure(which, number)
        for each in contestants:
            if not each.row.why:
                times = {w: Times.of(seconds, each.peaks[w]) for w, seconds in each.seconds.items()}
                each.row.forward, each.row.both = times["forward"], times.get("both")
    return [each.row for each in contestants]


# -- the command -------------------------------------------------------------------------------------------------------


def _peers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    wanted = PEERS if value is None else tuple(part.strip() for part in value.split(",") if part.strip())
    unknown = [name for name in wanted if name not in PEERS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}: there are {', '.join(PEERS)}; an empty text for none")
    return wanted


@click.command(short_help="Times beside NumPy, torch and torch.compile.")
@with_model
@INPUTS
@SEED
@click.option(
    "--peers",
    metavar="NAMES",
    callback=_peers,
    help=f"Beside what: some of {','.join(PEERS)}; all of them by default.",
)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Samples of each time.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of gradc and of torch.")
@click.option("--forward", "forward_only", is_flag=True, help="Forward alone.")
@AS_JSON
def bench(
    model: str,
    settings: Settings,
    inputs: tuple[str, ...],
    seed: int,
    peers: tuple[str, ...],
    rounds: int,
    threads: int | None,
    forward_only: bool,
    as_json: bool,
) -> None:
    """Time MODEL's forward, and its forward with backward, at --dims, beside the same graph in NumPy and torch.

    Inputs and cotangents are those of gradc run. Each contestant is a process of its own; they take turns, a sample
    each. The table has the median, half the distance of the quartiles, memory beside what is held between calls, and
    how far the largest difference from gradc's results is. Without --wrt the gradients are those of every float input.

    \b
    gradc bench model.py:loss --wrt w --dims N=4096,V=50000
    gradc bench model.gir --peers torch --threads 1 --rounds 30 --json
    """
    if open_program(model) is not None:
        raise click.UsageError("bench is for graphs: torch and NumPy have no program")
    if settings.target == "cuda":
        raise click.UsageError("bench times calls on the CPU; on a GPU: gradc explain MODEL --target cuda --timed 10")
    opened = open_model(model, settings.types, settings.native)
    graph = opened.graph if isinstance(opened, Module) else opened
    wrt = settings.wrt or (opened.wrt if isinstance(opened, Module) else ()) or floats(graph)
    if threads is not None:
        pool.set_num_threads(threads)
    given, dims = sample(graph, settings.dims, seed, read_arrays(inputs, input_types(graph), graph.name))
    training = compiled(model, settings, wrt) if wrt and not forward_only else None
    inference = opened if isinstance(opened, Module) else compiled(model, settings, ())
    problem = Problem(settings, inference, training, given, dims, seed, pool.num_threads())
    for call in CONTESTANTS["gradc"](problem).values():
        problem.results |= {name: np.array(_dense(value)) for name, value in call().items()}
    rows = contest(problem, [name for name in peers if name != inference.target], rounds)
    facts = {"name": graph.name, "wrt": list(training.wrt) if training else [], "dims": dims, "seed": seed}
    facts |= {"target": inference.target, "threads": problem.threads, "processor": processor()}
    if as_json:
        say_json({**facts, "rows": [asdict(row) for row in rows]})
    else:
        at = ", ".join(f"{name}={size}" for name, size in dims.items())
        click.echo(f"{graph.name}{f' at {at}' if at else ''}; {problem.threads} threads; {processor()}")
        click.echo("\n".join(lines(rows)))


def lines(rows: Sequence[Row]) -> list[str]:
    """The table."""
    heads = ("", "forward", "", "memory", "forward + backward", "", "memory", "prepared", "difference")
    cells: list[Sequence[str]] = [heads]
    for row in rows:
        if not row.why:
            last = (f"{row.prepared:.2f} s", f"{row.difference:.1e}" if row is not rows[0] else "")
            cells.append((row.peer, *_cells(row.forward, rows[0].forward), *_cells(row.both, rows[0].both), *last))
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    table = [
        "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    why = [f"{row.peer} was not measured: {row.why}" for row in rows if row.why]
    return [line.rstrip() for line in table] + why


def _cells(times: Times | None, ours: Times | None) -> tuple[str, str, str]:
    """Median and spread, the factor to gradc's, memory."""
    if times is None:
        return "", "", ""
    spread = (times.high - times.low) / 2 / times.median
    memory = "" if times.peak_bytes is None else f"{times.peak_bytes / 1e6:.1f} MB"
    factor = f"{times.median / ours.median:.2f}x" if ours is not None else ""
    return f"{times.median * 1e3:.3f} ms ±{100 * spread:.0f} %", factor, memory
