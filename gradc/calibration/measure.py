"""A GPU's constants, measured: ``gradc calibrate``.

Every constant is a slope: the same kernel at several amounts of work, so that what a measurement costs by itself falls
out.  The kernels are ``templates/cuda/calibrate.cu`` and the sort that modules use; :func:`measure` runs them,
:func:`fitted` makes constants of their times and refuses times that no device can have.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..analysis.strategies import SEGMENTED, passes
from ..api import compile
from ..codegen.cuda.launch import FLAG, WORKSPACE, Launch, LaunchPlan, Part
from ..codegen.cuda.render import render_cuda
from ..codegen.text import standalone
from ..errors import DeviceError
from ..ir.dims import symbol
from ..ops import scatter_add
from ..runtime.cuda.device import Device, Span
from ..targets.devices import Gpu, calibration_text, listed_device
from ..trace import trace
from .lines import PLAUSIBLE, line

REPEATS = 7
SPIN = 4e8
"""Steps a second, or fewer, of the kernel that waits: a multiply and add that depend on each other."""
THREADS = 256
SORT = "gradc_sort_"


class Bench:
    """A device with :func:`text` on it, a stream of its own and a clock.

    :param device: a :class:`~gradc.runtime.cuda.device.Device` made of that text.
    """

    def __init__(self, device: Device):
        self.device, self.stream = device, device.stream()
        self._kept: list[Any] = []
        self._spun = self.memory(1, np.uint32)

    def memory(self, count: int, dtype: Any) -> Span:
        """Zeroed memory of so many elements, until :meth:`release`."""
        span = Span(0, count, np.dtype(dtype))
        memory = self.device.memory(max(span.nbytes, 1), self.stream)
        self._kept.append(memory)
        self.device.fill(memory.address, 0, span.nbytes, self.stream)
        return replace(span, address=memory.address)

    def release(self) -> None:
        """Give all memory back but what the clock needs."""
        self.device.synchronize(self.stream)
        del self._kept[1:]

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        self.device.launch(function, blocks, threads, args, written, self.stream)

    def seconds(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        """The device's time for what ``work`` starts, the median of several; ``before`` runs ahead of each, untimed."""
        times: list[float] = []
        queued = 0.0
        for turn in range(REPEATS + 1):
            if before is not None:
                before()
            # The device spins while the host queues, so that it never waits for the host in between.
            self.launch("gradc_calibrate_spin", 1, 32, [self._spun, int(SPIN * max(2 * queued, 1e-4))], (0,))
            start, end = self.device.event(), self.device.event()
            start.record(self.stream)
            began = time.perf_counter()
            work()
            queued = time.perf_counter() - began
            end.record(self.stream)
            end.wait()
            if turn:  # the first one loads, and tells how long queueing takes
                times.append(end.since(start))
        return statistics.median(times)


@dataclass(frozen=True)
class Scale:
    """How much work is timed.

    :param launches: empty kernels in a row.
    :param copied: bytes of a copy, as multiples of L2.
    :param adds: atomic adds of neighbouring lanes.
    :param lines: adds to lines.
    :param moved: bytes within L2.
    :param hits: adds to one row.
    :param rows: of sorts, the first few, the others many.
    """

    launches: tuple[int, ...] = (50, 100, 200)
    copied: tuple[int, ...] = (4, 8, 16)
    adds: tuple[int, ...] = (1 << 25, 1 << 26, 1 << 27)
    lines: tuple[int, ...] = (1 << 23, 1 << 24, 1 << 25)
    moved: tuple[int, ...] = (1 << 28, 1 << 29, 1 << 30)
    hits: tuple[int, ...] = (1 << 14, 1 << 15, 1 << 16)
    rows: tuple[int, ...] = (1 << 15, 1 << 22, 1 << 23, 1 << 24)


KEYS = (200, 70_000, 300_000)
"""Rows of a result that need sorts of one, two and three passes, and few: where each begins is looked for, too."""


@dataclass(frozen=True)
class Sample:
    """One time.

    :param what: the experiment.  :param amount: launches, bytes, adds or rows.  :param passes: of a sort.
    """

    what: str
    amount: float
    seconds: float
    passes: int = 0


# -- running -----------------------------------------------------------------------------------------------------------


def sort_plan(rows: int, keys: int) -> LaunchPlan:
    """The launches of a scatter of so many rows; its sort is the one that modules use."""
    module = compile(
        trace(lambda i, u: scatter_add(i, u, size=symbol("V")), i="i64[N]", u="f32[N,2]"),
        target="cuda-sim",
        reductions={"*": SEGMENTED.name},
    )
    program = module.forward.program
    return LaunchPlan(program, render_cuda(program)[1], {"N": rows, "V": keys})


def text() -> str:
    """The CUDA text that a machine runs: the kernels of a scatter, the sort among them, and our own."""
    return render_cuda(sort_plan(1, 1).program)[0] + standalone("cuda/calibrate.cu")


def measure(bench: Bench, device: Gpu, scale: Scale | None = None) -> Iterator[Sample]:
    """Run every experiment; samples as they come.

    :param device: its SMs and L2 say how wide a launch and how large a table is.
    """
    scale = scale or Scale()
    wide = 8 * device.sms  # blocks that fill it

    def sample(name: str, amount: int, function: str, blocks: int, *args: Any, count: int = 1) -> Sample:
        written = [
            i for i, a in enumerate(args) if isinstance(a, Span) and i == sum(isinstance(b, Span) for b in args) - 1
        ]

        def work() -> None:
            for _ in range(count):
                bench.launch(f"gradc_calibrate_{function}", blocks, THREADS, args, written)

        return Sample(name, amount, bench.seconds(work))

    for count in scale.launches:
        yield sample("launch", count, "nothing", 1, 0, count=count)
    one = device.l2 // 16  # elements of 16 bytes
    source, target = (bench.memory(4 * one * max(scale.copied), np.uint32) for _ in range(2))
    for times in scale.copied:
        yield sample("bandwidth", 2 * 16 * one * times, "copy", 4 * wide, source, target, one * times, 1)
    small = 1 << ((device.l2 // 8).bit_length() - 1)  # bytes that stay in L2
    for amount in scale.moved:
        rounds = max(1, amount // (2 * small))
        yield sample("moved", rounds * 2 * small, "copy", wide, source, target, small // 16, rounds)
    bench.release()
    table, row = bench.memory(small // 4, np.float32), bench.memory(128, np.float32)
    for what, amounts, each in (
        ("coalesced", scale.adds, 1),
        ("scattered", scale.lines, 1),
        ("vectors", scale.moved, 16),
    ):
        for amount in amounts if what != "vectors" or device.vector else ():
            yield sample(what, amount, what, wide, table, small // 4, amount // each)
    for hits in scale.hits:
        yield sample("hot", hits, "hot", wide, row, hits)
    bench.release()
    for keys in KEYS:
        for rows in scale.rows:
            yield _sort_sample(bench, rows, keys)
            bench.release()


def _sort_sample(bench: Bench, rows: int, keys: int) -> Sample:
    """The time of a sort alone; the stage that writes its keys runs before each."""
    plan = sort_plan(rows, keys)
    memory = {WORKSPACE: bench.memory(plan.workspace, np.uint8), FLAG: bench.memory(plan.flag.count, np.uint64)}
    for buffer in plan.program.buffers:
        part = plan.part(buffer.name)
        if part.root not in memory:
            memory[part.root] = bench.memory(part.count, part.dtype)
    (index,) = [b.name for b in plan.program.buffers if b.kind == "input" and b.type.dtype.is_integer]
    bench.device.upload(memory[index].address, np.random.default_rng(0).integers(0, keys, rows), bench.stream)
    bench.device.fill(memory[FLAG].address, 0xFF, plan.flag.nbytes, bench.stream)
    launches = [action for actions in plan.actions for action in actions if isinstance(action, Launch)]
    first = next(i for i, a in enumerate(launches) if a.function.startswith(SORT))

    def run(actions: Sequence[Launch]) -> None:
        for action in actions:
            args = [
                Span(memory[a.root].address + a.start, a.count, a.dtype) if isinstance(a, Part) else a
                for a in action.args
            ]
            bench.launch(action.function, action.blocks, action.threads, args, action.written)

    sorts = [a for a in launches[first:] if a.function.startswith(SORT)]
    return Sample("sort", rows, bench.seconds(lambda: run(sorts), lambda: run(launches[:first])), passes(keys - 1))


# -- times to constants ------------------------------------------------------------------------------------------------


def fitted(samples: Collection[Sample], device: Gpu) -> dict[str, float]:
    """The constants of :class:`~gradc.targets.devices.Gpu` that the samples give: rates per second, times in
    seconds.

    :raises DeviceError: times that are not those of more and more work, or a constant far from what the device is
        listed with.
    """

    def rate(name: str) -> float:
        return 1 / line(name, [(s.amount, s.seconds) for s in samples if s.what == name])[1]

    sorts = [s for s in samples if s.what == "sort"]
    few, *many = sorted({s.amount for s in sorts})
    # T = base + passes * max(pass, rows / rate): few rows give base and pass, many the rate.
    base, each = line("sort", [(s.passes, s.seconds) for s in sorts if s.amount == few])
    slopes = [
        (p, line("sort", [(s.amount, s.seconds) for s in sorts if s.amount in many and s.passes == p])[1])
        for p in sorted({s.passes for s in sorts})
    ]
    constants = {
        "bandwidth": rate("bandwidth"),
        "coalesced": rate("coalesced"),
        "scattered": rate("scattered"),
        "resident": min(rate(name) for name in ("moved", "vectors") if any(s.what == name for s in samples)),
        "hot": 1 / rate("hot"),
        "launch": 1 / rate("launch"),
        "sort_base": max(base, 0.0),
        "sort_pass": each,
        "sort_rate": 1 / float(np.mean([slope / passes for passes, slope in slopes])),
    }
    for name, value in constants.items():
        listed = getattr(device, name)
        if name != "sort_base" and not listed / PLAUSIBLE <= value <= listed * PLAUSIBLE:
            raise DeviceError(
                f"{name} was measured as {value:.3g}, and {device.name} is listed with {listed:.3g}: the device is"
                " shared or throttled, or its clock is wrong; nothing is written"
            )
    return constants


# -- the whole of it ---------------------------------------------------------------------------------------------------


def calibrate(said: Callable[[str], None] = lambda line: None) -> tuple[Gpu, str]:
    """Measure the current device: what the cost model calls it, and the text of its calibration file.

    :param said: told of every sample.
    :raises NoDevice: there is no device, or no way to reach it.  :raises DeviceError: see :func:`fitted`.
    :raises Unsupported: the cost model knows neither its name nor its architecture.
    """
    from ..runtime.cuda import gpu

    device = gpu.current_device()
    listed = listed_device(device.name, device.arch)
    bench = Bench(gpu.Gpu(text()))
    samples: list[Sample] = []
    for sample in measure(bench, replace(listed, sms=device.sms, l2=device.l2)):
        samples.append(sample)
        said(f"{sample.what:<10} {sample.amount:>14g} in {sample.seconds * 1e6:>10.1f} us")
    constants = {
        "sms": device.sms,
        "l2": device.l2,
        "shared": device.shared,
        **{n: float(f"{v:.4g}") for n, v in fitted(samples, listed).items()},
    }
    return listed, calibration_text(listed, constants)
