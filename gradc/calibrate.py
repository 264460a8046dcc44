"""A GPU's constants, measured: ``gradc calibrate``.

Every constant is a slope: the same kernel at several amounts of work, so that what a measurement costs by itself falls out.  The kernels are
``templates/cuda/calibrate.cu`` and the sort that modules use; :func:`measure` runs them, :func:`fitted` makes constants of their times and
refuses times that no device can have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .api import compile
from .codegen.cuda import render_cuda
from .codegen.launch import Launch, LaunchPlan, Part
from .codegen.text import standalone
from .errors import DeviceError
from .ir.dims import symbol
from .ops import scatter_add
from .passes.devices import Gpu
from .trace import trace

FARTHEST = 0.25
"""How far a time may lie from the line through all of them."""
PLAUSIBLE = 20.0
"""How far a constant may lie from the listed one, either way: many of those are estimates."""
THREADS = 256
SORT = "gradc_sort_"


class Machine(Protocol):
    """Where the kernels run: a device, or in tests the simulator with a clock of its own."""

    def memory(self, count: int, dtype: Any) -> Any:
        """Zeroed memory of so many elements."""

    def fill(self, memory: Any, values: np.ndarray[Any, Any]) -> None:
        """Copy an array into memory."""

    def part(self, memory: Any, start: int, count: int, dtype: Any) -> Any:
        """Elements from a byte on, as an argument of :meth:`launch`."""

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        """Start a function of :func:`text`."""

    def seconds(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        """The device's time for what ``work`` starts, the median of several; ``before`` runs ahead of each, untimed."""


@dataclass(frozen=True)
class Scale:
    """How much work is timed.

    :param launches: empty kernels in a row.  :param copied: bytes of a copy, as multiples of L2.  :param adds: atomic adds of neighbouring lanes.
    :param lines: adds to lines.  :param moved: bytes within L2.  :param hits: adds to one row.  :param rows: of sorts, the first few, the others many.
    """

    launches: tuple[int, ...] = (50, 100, 200)
    copied: tuple[int, ...] = (4, 8, 16)
    adds: tuple[int, ...] = (1 << 25, 1 << 26, 1 << 27)
    lines: tuple[int, ...] = (1 << 23, 1 << 24, 1 << 25)
    moved: tuple[int, ...] = (1 << 28, 1 << 29, 1 << 30)
    hits: tuple[int, ...] = (1 << 14, 1 << 15, 1 << 16)
    rows: tuple[int, ...] = (1 << 12, 1 << 22, 1 << 23, 1 << 24)


KEYS = (200, 60_000, (1 << 24) - 2)
"""Rows of a result that need sorts of one, two and three passes."""


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
    module = compile(trace(lambda i, u: scatter_add(i, u, size=symbol("V")), i="i64[N]", u="f32[N,2]"), target="cuda-sim", reductions={"*": "segmented"})
    program = module.forward.program
    return LaunchPlan(program, render_cuda(program)[1], {"N": rows, "V": keys})


def text() -> str:
    """The CUDA text that a machine runs: the kernels of a scatter, the sort among them, and our own."""
    return render_cuda(sort_plan(1, 1).program)[0] + standalone("cuda/calibrate.cu")


def measure(machine: Machine, device: Gpu, scale: Scale | None = None) -> Iterator[Sample]:
    """Run every experiment; samples as they come.

    :param device: its SMs and L2 say how wide a launch and how large a table is.
    """
    scale = scale or Scale()
    wide = 8 * device.sms  # blocks that fill it

    def sample(what: str, amount: float, work: Callable[[], None]) -> Sample:
        return Sample(what, amount, machine.seconds(work))

    for count in scale.launches:
        yield sample("launch", count, lambda n=count: [machine.launch("gradc_calibrate_nothing", 1, THREADS, [0], ()) for _ in range(n)] and None)  # type: ignore[misc]
    one = device.l2 // 16  # 16-byte elements
    source, target = (machine.memory(4 * one * max(scale.copied), np.uint32) for _ in range(2))
    for times in scale.copied:
        args = [source, target, one * times, 1]
        yield sample("bandwidth", 2 * 16 * one * times, lambda a=args: machine.launch("gradc_calibrate_copy", 4 * wide, THREADS, a, (1,)))  # type: ignore[misc]
    small = _power_below(device.l2 // 8)  # bytes
    for amount in scale.moved:
        rounds = max(1, amount // (2 * small))
        args = [source, target, small // 16, rounds]
        yield sample("moved", rounds * 2 * small, lambda a=args: machine.launch("gradc_calibrate_copy", wide, THREADS, a, (1,)))  # type: ignore[misc]
    del source, target
    table = machine.memory(small // 4, np.float32)
    for what, amounts, each in (("coalesced", scale.adds, 1), ("scattered", scale.lines, 1), ("vectors", scale.moved, 16)):
        for amount in amounts if what != "vectors" or device.vector else ():
            args = [table, small // 4, amount // each]
            yield sample(what, amount, lambda a=args, f=what: machine.launch(f"gradc_calibrate_{f}", wide, THREADS, a, (0,)))  # type: ignore[misc]
    row = machine.memory(128, np.float32)
    for hits in scale.hits:
        yield sample("hot", hits, lambda n=hits: machine.launch("gradc_calibrate_hot", wide, THREADS, [row, n], (0,)))  # type: ignore[misc]
    for keys in KEYS:
        for rows in scale.rows:
            yield _sort_sample(machine, rows, keys)


def _power_below(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _sort_sample(machine: Machine, rows: int, keys: int) -> Sample:
    """The time of a sort alone; the stage that writes its keys runs before each."""
    plan = sort_plan(rows, keys)
    memory: dict[str, Any] = {".workspace": machine.memory(plan.workspace, np.uint8), ".flag": machine.memory(plan.flag.count, np.uint64)}
    for buffer in plan.program.buffers:
        part = plan.part(buffer.name)
        if part.root not in memory:
            memory[part.root] = machine.memory(part.count, part.dtype)
    (index,) = [b.name for b in plan.program.buffers if b.kind == "input" and b.type.dtype.is_integer]
    machine.fill(memory[index], np.random.default_rng(0).integers(0, keys, rows))
    machine.fill(memory[".flag"], np.full(plan.flag.count, 2**64 - 1, np.uint64))
    launches = [action for actions in plan.actions for action in actions if isinstance(action, Launch)]
    first = next(i for i, a in enumerate(launches) if a.function.startswith(SORT))
    sorts = [a for a in launches if a.function.startswith(SORT)]

    def run(actions: Sequence[Launch]) -> None:
        for action in actions:
            args = [machine.part(memory[a.root], a.start, a.count, a.dtype) if isinstance(a, Part) else a for a in action.args]
            machine.launch(action.function, action.blocks, action.threads, args, action.written)

    return Sample("sort", rows, machine.seconds(lambda: run(sorts), lambda: run(launches[:first])), max(1, -(-keys.bit_length() // 8)))


# -- times to constants ------------------------------------------------------------------------------------------------


def fitted(samples: Collection[Sample], device: Gpu) -> dict[str, float]:
    """The constants of :class:`~gradc.passes.devices.Gpu` that the samples give: rates per second, times in seconds.

    :raises DeviceError: times that are not those of more and more work, or a constant far from what the device is listed with.
    """

    def rate(what: str) -> float:
        return 1 / _line(what, [(s.amount, s.seconds) for s in samples if s.what == what])[1]

    sorts = [s for s in samples if s.what == "sort"]
    few, *many = sorted({s.amount for s in sorts})
    # T = base + passes * max(pass, rows / rate): few rows give base and pass, many the rate.
    base, each = _line("sort", [(s.passes, s.seconds) for s in sorts if s.amount == few])
    slopes = [(p, _line("sort", [(s.amount, s.seconds) for s in sorts if s.amount in many and s.passes == p])[1]) for p in sorted({s.passes for s in sorts})]
    found = {
        "bandwidth": rate("bandwidth"),
        "coalesced": rate("coalesced"),
        "scattered": rate("scattered"),
        "resident": min(rate(what) for what in ("moved", "vectors") if any(s.what == what for s in samples)),
        "hot": 1 / rate("hot"),
        "launch": 1 / rate("launch"),
        "sort_base": max(base, 0.0),
        "sort_pass": each,
        "sort_rate": 1 / float(np.mean([slope / passes for passes, slope in slopes])),
    }
    for name, value in found.items():
        listed = getattr(device, name)
        if name != "sort_base" and not listed / PLAUSIBLE <= value <= listed * PLAUSIBLE:
            raise DeviceError(f"{name} was measured as {value:.3g}, and {device.name} is listed with {listed:.3g}: the device is shared or throttled, or its clock is wrong; nothing is written")
    return found


def _line(what: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0, seconds per unit) of the line through points, each as near as its own time allows.

    :raises DeviceError: fewer than two amounts, time does not grow with work, or a point lies far from the line.
    """
    amounts, seconds = (np.asarray(v, np.float64) for v in zip(*points, strict=True))
    if len(set(amounts)) < 2 or not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise DeviceError(f"{what}: times of two amounts of work are wanted, got {_said(points)}")
    rows = np.stack([1 / seconds, amounts / seconds], 1)
    start, slope = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    off = np.abs(rows @ [start, slope] - 1).max()
    if not slope > 0 or off > FARTHEST:
        why = "more work does not take longer" if not slope > 0 else f"a time lies {off:.0%} from a straight line"
        raise DeviceError(f"{what}: {why}: {_said(points)}; is something else running on the device?")
    return float(start), float(slope)


def _said(points: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{amount:g} in {seconds * 1e6:.2f} us" for amount, seconds in points)


def constants(machine: Machine, device: Gpu, attributes: Mapping[str, int], scale: Scale | None = None) -> dict[str, float]:
    """Everything a calibration file holds: what was measured, and ``sms``, ``l2``, ``shared`` as the driver states them."""
    return {**attributes, **{name: float(f"{value:.4g}") for name, value in fitted(list(measure(machine, device, scale)), device).items()}}
