"""A CPU's constants of reductions, measured: ``gradc calibrate --target cpu``.

What decides between sorted rows and partial results is how much longer a row takes where it is sorted, and what an
element of a partial result takes.  Both are slopes: of the difference of both strategies by rows, where partial results
have as many elements as they may, and of partial results by their elements.  The kernels are those that modules run, on
one thread; indices have a heavy tail, as those of words, hot ones anywhere.  Those of the same sizes by other laws say
what a sample of the index is worth: most rows of a few indices, and rows that are nearly in the order of theirs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.chunks import task_rows
from ..analysis.strategies import PRIVATIZED, SEGMENTED, missed_share
from ..api import compile
from ..errors import DeviceError
from ..ir.dims import ceildiv, evaluate, symbol
from ..ir.sample import FEWEST, MOST, sampled
from ..module.module import Module
from ..ops import scatter_add
from ..runtime.host import pool
from ..targets.devices import CPU, Cpu, calibration_text
from ..trace import trace
from .lines import PLAUSIBLE, line

ROUNDS = 5
WAYS = (PRIVATIZED.name, SEGMENTED.name)


@dataclass(frozen=True)
class Scale:
    """How much work is timed.

    :param rows: fewer and more.  :param widths: elements of a row.
    :param results: elements of a result, of which caches hold the first.
    :param folded: elements of a result of which there are as many partial results as chunks of ``chunked`` rows: so
        many elements that the near caches hold none of them, as where partial results decide.
    :param skewed, near: elements of a result where most rows have a few indices, and where these lie together.
    """

    rows: tuple[int, int] = (200_000, 1_000_000)
    widths: tuple[int, ...] = (16, 64)
    results: tuple[int, ...] = tuple(1 << n for n in (13, 16, 18, 20, 21, 22, 23, 24))
    folded: tuple[int, ...] = (1 << 14, 5 << 12, 3 << 13, 1 << 15)
    skewed: tuple[int, ...] = (1 << 16, 1 << 18)
    near: tuple[int, ...] = (1 << 20, 1 << 21)
    chunked: int = 1 << 13


@dataclass(frozen=True)
class Sample:
    """One time.

    :param what: ``fold``, or how much longer sorted rows take: ``sort``, ``ordered`` where they are in order already,
        ``skewed`` and ``near`` by other indices.
    :param amount: elements of partial results, or rows.  :param result: elements that it has.
    :param skew, locality: of the indices (:mod:`gradc.ir.sample`), as shares.
    """

    what: str
    amount: int
    seconds: float
    width: int = 0
    result: int = 0
    skew: float = 0.0
    locality: float = 0.0


def _modules(width: int) -> dict[str, Module]:
    graph = trace(lambda i, u: scatter_add(i, u, axis=0, size=symbol("V")), i="i64[N]", u=f"f32[N,{width}]")
    return {way: compile(graph, target="cpu", reductions={"*": way}, calibration="none") for way in WAYS}


def indices(rows: int, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of ``keys`` rows of a result; f(rank) ~ 1 / (rank + 2.7)."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(1 / (np.arange(1, keys + 1) + 2.7))
    ranks = np.searchsorted(ends, rng.random(rows) * ends[-1], "right").clip(max=keys - 1)
    return rng.permutation(keys)[ranks]


def skewed(rows: int, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """As those of a feature of clicks."""
    return (np.random.default_rng(0).zipf(1.15, rows) - 1) % keys


def near(rows: int, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Any, in order but for places of a thousand."""
    rng = np.random.default_rng(0)
    return np.sort(rng.integers(0, keys, rows))[np.argsort(np.arange(rows) // 1000 + rng.random(rows), kind="stable")]


LAWS: Mapping[str, Callable[[int, int], np.ndarray[Any, np.dtype[np.int64]]]] = {
    "sort": indices,
    "ordered": lambda rows, keys: np.sort(indices(rows, keys)),
    "skewed": skewed,
    "near": near,
}


def least(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of processor time of each, the least of several by turns."""
    found = dict.fromkeys(calls, float("inf"))
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:  # the first one loads
                found[name] = min(found[name], time.process_time() - began)
    return found


def measure(scale: Scale | None = None) -> Iterator[Sample]:
    """Run every experiment; samples as they come."""
    scale = scale or Scale()
    for width in scale.widths:
        modules = _modules(width)
        u = np.ones((max(scale.rows), width), np.float32)

        def seconds(i: Any, result: int, ways: Collection[str], u: Any = u, modules: Any = modules) -> dict[str, float]:
            dims, y = {"V": result // u.shape[1]}, np.zeros((result // u.shape[1], u.shape[1]), np.float32)
            run = lambda way: modules[way](i=i, u=u[: len(i)], dims=dims, out={"y": y})
            return least({way: functools.partial(run, way) for way in ways})

        if width == scale.widths[-1]:
            chunks = ceildiv(scale.chunked, task_rows(scale.chunked, width, ()))
            for result in scale.folded:
                parts = evaluate(chunks, {}) * result
                found = seconds(indices(scale.chunked, result // width), result, WAYS[:1])
                yield Sample("fold", parts, found[PRIVATIZED.name], width, result)
        cells = {"sort": scale.results, "ordered": scale.results[:2], "skewed": scale.skewed, "near": scale.near}
        for what, results in cells.items():
            for result in results:
                shares = [number / MOST for number in sampled(LAWS[what](max(*scale.rows, FEWEST), result // width))]
                for rows in scale.rows:
                    found = seconds(LAWS[what](rows, result // width), result, WAYS)
                    yield Sample(what, rows, found[SEGMENTED.name] - found[PRIVATIZED.name], width, result, *shares)


# -- times to constants ------------------------------------------------------------------------------------------------


def fitted(samples: Collection[Sample], device: Cpu = CPU) -> dict[str, float]:
    """The constants of :class:`~gradc.targets.devices.Cpu` that the samples give.

    :raises DeviceError: times that are not those of more and more work, or a constant far from the listed one.
    """
    partial = line("fold", [(s.amount, s.seconds) for s in samples if s.what == "fold"])[1]
    sorts = {what: _by_row([s for s in samples if s.what == what]) for what in LAWS}
    cells, seconds = zip(*sorts["sort"].items(), strict=True)
    of_row, of_element, missed, cached = min(
        (_fit(cells, np.array(seconds), cached) for cached in sorted({result for _, result in cells})[1:]),
        key=lambda found: found[0],
    )[1]
    constants = {
        "partial": partial,
        "sort": of_row,
        "gathered": of_element,
        "missed": max(missed, 0.0),
        "cached": cached,
        "ordered": max(float(np.mean(list(sorts["ordered"].values()))), 0.0),
        **_by_data(samples, sorts),
    }
    for name in ("partial", "sort"):
        listed = getattr(device, name)
        if not listed / PLAUSIBLE <= constants[name] <= listed * PLAUSIBLE:
            raise DeviceError(
                f"{name} was measured as {constants[name]:.3g}, and a CPU is listed with {listed:.3g}: it is shared or"
                " throttled, or its clock is wrong; nothing is written"
            )
    return constants


def _by_data(samples: Collection[Sample], sorts: Mapping[str, Mapping[tuple[int, int], float]]) -> dict[str, float]:
    """What a row takes longer, or less long, by other indices than most have, for the whole of a number of a sample."""
    shares = {(s.what, s.width, s.result): (s.skew, s.locality) for s in samples}
    found = {}
    for name, what, number, sign in (("skew", "skewed", 0, 1), ("locality", "near", 1, -1)):
        slopes = [0.0]
        for cell, seconds in sorts[what].items():
            more = shares[what, *cell][number] - shares["sort", *cell][number]
            slopes += [sign * (seconds - sorts["sort"][cell]) / more] if more > 0 else []
        found[name] = max(float(np.mean(slopes[1:] or slopes)), 0.0)
    return found


def _by_row(samples: Collection[Sample]) -> dict[tuple[int, int], float]:
    """(width, elements of the result) -> seconds that each further row takes longer where rows are sorted."""
    found = {}
    for cell in sorted({(s.width, s.result) for s in samples}):
        fewer, more = sorted((s for s in samples if (s.width, s.result) == cell), key=lambda s: s.amount)
        found[cell] = (more.seconds - fewer.seconds) / (more.amount - fewer.amount)
    return found


def _fit(
    cells: Collection[tuple[int, int]], seconds: np.ndarray[Any, Any], cached: int
) -> tuple[float, tuple[float, float, float, int]]:
    """(what is left, the constants) if caches hold results below ``cached`` elements."""
    terms = np.array([(1.0, width, -width * missed_share(result, cached)) for width, result in cells])
    weights = 1 / np.maximum(np.abs(seconds), np.median(np.abs(seconds)))
    found = np.linalg.lstsq(terms * weights[:, None], seconds * weights, rcond=None)[0]
    left = float(np.abs((terms @ found - seconds) * weights).sum())
    return left, (float(found[0]), float(found[1]), float(found[2]), cached)


# -- the whole of it ---------------------------------------------------------------------------------------------------


def calibrate(said: Callable[[str], None] = lambda line: None) -> tuple[Cpu, str]:
    """Measure this processor: what the cost model calls it, and the text of its calibration file.

    :param said: told of every sample.  :raises DeviceError: see :func:`fitted`.
    """
    threads = pool.num_threads()
    pool.set_num_threads(1)
    try:
        samples = []
        for s in measure():
            samples.append(s)
            of = f", results of {s.result} elements, {s.width} a row" if s.width else ""
            said(f"{s.what:<10} {s.amount:>14g} in {s.seconds * 1e6:>10.1f} us{of}")
    finally:
        pool.set_num_threads(threads)
    constants = {n: v if isinstance(v, int) else float(f"{v:.4g}") for n, v in fitted(samples).items()}
    return CPU, calibration_text(CPU, constants)
