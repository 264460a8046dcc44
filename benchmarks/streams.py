"""Is the strategy that is chosen for adding up rows the fastest?  On index streams as models have them.

``python -m benchmarks.streams [STREAM ...] [--threads 1 2] [--widths 1 16 64 128] [--counts 1000 ...] [--save]``
times every strategy of a CPU that ``choose_reduction`` can pick for ``table[index[n], :] += rows[n, :]`` in f32: by
turns in one process, the least processor time of several rounds.  Picked is what a module for this processor picks
without a user's own calibration.  The regret of a case is how much longer the picked one takes than the fastest.  A
table of more than a GiB is left out.  Beside them stand the times that the cost model
gives an H100's strategies *for this data* (how many distinct rows, how often the hottest), and the regret of what is
picked there without seeing them: predicted, not measured; it takes places within memory to be random, and the
neighbours of a row not to be hit together.  ``--calibration FILE`` also says what is picked by a file of ``gradc
calibrate --target cpu``.  ``--save`` writes ``benchmarks/results/streams-PROCESSOR.json``.

Where the streams are from; what is not published stands as an assumption:

``criteo``
    A categorical feature of Criteo's clicks, one index a sample.  Table sizes: those of its first day, from
    ``examples/DLRM/run_kaggle_day1.sh`` of flexflow/FlexFlow, and the largest of all days, from DLRM's own scripts
    (``--arch-embedding-size=1460-583-10131227-...``).  Law of the rows: that with which FBGEMM's benchmark makes skewed
    requests, ``(zipf(alpha) - 1) % rows``.  Assumed: alpha = 1.15.
``text``
    Tokens.  f(rank) ~ (rank + 2.7) ** -1 (Mandelbrot; constants: Piantadosi, "Zipf's word frequency law in natural
    language", 2014).  Vocabularies: Llama 2's, GPT-2's, Llama 3's.  Assumed: tokens follow the law of words, and a
    tokenizer numbers them by their frequency.
``graph``
    Targets of edges, as messages of a graph network are added up.  Nodes and edges of ogbn-arxiv and ogbn-products (Hu
    et al., "Open Graph Benchmark", 2020: mean degrees 13.7 and 50.5) and of Reddit (Hamilton et al., 2017; counts of
    DGL's data set: 492).  Degrees are a power law, P(degree > k) ~ k ** (1 - gamma).  Assumed: gamma = 2.5, hubs
    anywhere among the nodes, a random sample of the edges; ``by target``: in the order in which they are stored.
``grid``
    Cells that the four taps of bilinear sampling read, channels last, of images of 64 x 64 and 256 x 256: a smooth warp
    (displacements of 5 % of the image, two waves across it), an affine map (turned by 20 degrees, 0.8 times as large),
    and random places.  More taps than an image has are those of several images.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradc
from gradc import ops
from gradc.analysis.combine import combines
from gradc.analysis.cost import estimates, ways
from gradc.analysis.strategies import ON_GPU, ON_HOST
from gradc.ir.dims import symbol
from gradc.ir.kernel import Kernel, Program, taken
from gradc.ir.sample import sampled
from gradc.passes.program.choose_reduction import choose_reduction, decisions
from gradc.passes.program.gpu_choice import candidates
from gradc.runtime.host import pool
from gradc.runtime.host.toolchain import cpu_model
from gradc.targets.calibration import measured_file
from gradc.targets.devices import CPU, GPUS, Cpu, Device, Gpu
from gradc.targets.devices import calibrated as calibrated_device

from .__main__ import RESULTS, machine, one_a_line, processor, words_of
from .alternated import least

Array = np.ndarray[Any, Any]
WIDTHS, COUNTS, THREADS = (1, 16, 64, 128), (1000, 10_000, 100_000, 1_000_000), (1, 2)
LARGEST = 1 << 30
"""Bytes of a table."""
ROUNDS, SECONDS = 4, 0.01
SHORT, HOPELESS = 4e-3, 2
"""Seconds of a call that is timed longer than a few calls; times the fastest from where it is not."""
H100 = next(gpu for gpu in GPUS if gpu.name == "H100")
GOALS = {"worst": 0.10, "mean": 0.02}


@dataclass(frozen=True)
class Stream:
    """Indices into a table.

    :param keys: rows of the table.  :param draw: (random numbers, how many) -> indices.
    """

    name: str
    keys: int
    draw: Callable[[np.random.Generator, int], Array]


def of_ranks(weights: Array) -> Callable[[np.random.Generator, int], Array]:
    """Draws of ranks from 0, by their weights."""
    ends = np.cumsum(weights)
    return lambda rng, count: np.searchsorted(ends, rng.random(count) * ends[-1], "right").clip(max=len(ends) - 1)


def criteo(keys: int) -> Stream:
    return Stream(f"criteo {keys}", keys, lambda rng, count: (rng.zipf(1.15, count) - 1) % keys)


def text(keys: int) -> Stream:
    return Stream(f"text {keys}", keys, lambda rng, count: of_ranks(1 / (np.arange(1, keys + 1) + 2.7))(rng, count))


def graph(name: str, nodes: int, ordered: bool = False) -> Stream:
    """Targets of edges; the degree of the r-th hub is ~ r ** (-1 / (gamma - 1))."""

    def draw(rng: np.random.Generator, count: int) -> Array:
        target = np.random.default_rng(7).permutation(nodes)[
            of_ranks(np.arange(1, nodes + 1) ** (-1 / 1.5))(rng, count)
        ]
        return np.sort(target) if ordered else target

    return Stream(f"graph {name}" + (", by target" if ordered else ""), nodes, draw)


def grid(kind: str, side: int) -> Stream:
    """The taps of as many samples as there are pixels, image after image."""

    def draw(rng: np.random.Generator, count: int) -> Array:
        images = -(-count // (4 * side * side))
        y, x = np.meshgrid(*2 * [np.linspace(0, 1, side)], indexing="ij")
        found = []
        for _ in range(images):
            phase, turn = rng.random(2) * 2 * np.pi, np.deg2rad(20)
            if kind == "smooth":
                at = (y + 0.05 * np.sin(4 * np.pi * x + phase[0]), x + 0.05 * np.sin(4 * np.pi * y + phase[1]))
            elif kind == "affine":
                v, u = (y - 0.5) / 0.8, (x - 0.5) / 0.8
                at = (0.5 + np.cos(turn) * v - np.sin(turn) * u, 0.5 + np.sin(turn) * v + np.cos(turn) * u)
            else:
                at = (rng.random(y.shape), rng.random(y.shape))
            first = [np.floor(a * (side - 1)).astype(np.int64) for a in at]
            taps = [
                (first[0] + i).clip(0, side - 1) * side + (first[1] + j).clip(0, side - 1)
                for i in (0, 1)
                for j in (0, 1)
            ]
            found.append(np.stack(taps, -1).ravel())
        return np.concatenate(found)[:count]

    return Stream(f"grid {kind} {side} x {side}", side * side, draw)


STREAMS = {
    s.name: s
    for s in (
        *map(criteo, (290, 5237, 72_655, 507_795, 1_761_917, 10_131_227)),
        *map(text, (32_000, 50_257, 128_256)),
        graph("arxiv", 169_343),
        graph("arxiv", 169_343, ordered=True),
        graph("Reddit", 232_965),
        graph("products", 2_449_029),
        *(grid(kind, side) for side in (64, 256) for kind in ("smooth", "affine", "random")),
    )
}


@functools.cache
def module(width: int, strategy: str) -> gradc.Module:
    """Adds rows up; strategy "": as chosen, not to be run."""
    graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, axis=0, size=symbol("V")), i="i64[N]", u=f"f32[N,{width}]")
    if strategy:
        return gradc.compile(graph, target="cpu", reductions={"*": strategy})
    return gradc.compile(graph, target="numpy")


def on_host(width: int) -> list[str]:
    """The strategies that there are."""
    (_, _, _, found), *_ = decisions(module(width, "").forward.program)
    return [e.strategy for e in found]


@functools.cache
def this_processor() -> Cpu:
    """Its constants as they come with gradc."""
    path = measured_file(CPU, cpu_model())
    return calibrated_device(CPU, path) if path.is_file() else CPU


@functools.cache
def chosen_program(width: int, device: Device) -> Program:
    scheduled = module(width, "").stages["forward.schedule"].result
    return choose_reduction(scheduled, device=device, available=ON_GPU if isinstance(device, Gpu) else ON_HOST)


def picked(width: int, dims: Mapping[str, int], sample: Mapping[str, int], device: Device) -> str:
    """The strategy that is taken at these sizes, with these numbers of a sample of the index."""
    kernels = [taken(step, dims, sample) for step in chosen_program(width, device).steps]
    (strategy,) = (how for k in kernels if isinstance(k, Kernel) for _, how in k.strategy)
    return strategy


def timed(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each, the least of several; short ones that may be the fastest are timed longer."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.process_time()
            call()
            found[name] = min(found[name], time.process_time() - began)
    near = {name: call for name, call in calls.items() if found[name] < HOPELESS * min(found.values())}
    return {**found, **(least(near, ROUNDS, SECONDS) if min(found.values()) < SHORT and len(near) > 1 else {})}


def regret(us: Mapping[str, float], pick: str) -> float:
    """How much longer the pick takes than the fastest."""
    return round(us[pick] / min(us.values()) - 1, 4)


def on_gpu(width: int, dims: Mapping[str, int], distinct: int, hottest: int, device: Gpu) -> dict[str, Any]:
    """The predicted times, for such data, of strategies that give the same bits in each run, and the pick's regret."""
    program = module(width, "").stages["forward.schedule"].result
    ((kernel, part),) = ((k, c) for k in program.kernels if k.accums for c in combines(k, program.types))
    names = candidates(part, program.types, "run", ways(part, program.types, device))
    found = estimates(kernel, part, program.types, dims, device, unique=distinct, hits=hottest)
    us = {e.strategy: round(e.seconds * 1e6, 2) for e in found if e.strategy in names}
    pick = picked(width, dims, {}, device)
    return {"us": us, "picked": pick, "regret": regret(us, pick)}


def case(
    stream: Stream, count: int, width: int, threads: Sequence[int], calibrated: Cpu | None = None
) -> list[dict[str, Any]]:
    """A record for each number of threads."""
    rng = np.random.default_rng(0)
    i = np.ascontiguousarray(stream.draw(rng, count)).astype(np.int64)
    u, y = rng.standard_normal((count, width)).astype(np.float32), np.zeros((stream.keys, width), np.float32)
    counts = np.unique(i, return_counts=True)[1]
    dims = {"V": stream.keys}
    sample = dict(zip(("skew", "locality"), sampled(i), strict=True))
    calls = {way: lambda way=way: module(width, way)(i=i, u=u, dims=dims, out={"y": y}) for way in on_host(width)}
    common = {
        "stream": stream.name,
        "table": stream.keys,
        "count": count,
        "width": width,
        "distinct": len(counts),
        "hottest": int(counts.max()),
        **sample,
        "picked": (pick := picked(width, {"N": count, **dims}, sample, this_processor())),
        "H100": on_gpu(width, {"N": count, **dims}, len(counts), int(counts.max()), H100),
    }
    records = []
    for number in threads:
        pool.set_num_threads(number)
        us = {way: round(s * 1e6, 2) for way, s in timed(calls).items()}
        records.append({**common, "threads": number, "us": us, "regret": regret(us, pick)})
        if calibrated is not None:
            by_file = picked(width, {"N": count, **dims}, sample, calibrated)
            records[-1]["calibrated"] = {"picked": by_file, "regret": regret(us, by_file)}
    return records


def line(r: Mapping[str, Any]) -> str:
    us = " ".join(f"{name} {t:.0f}" for name, t in r["us"].items())
    by_file = f"{r['calibrated']['picked']:<11}{r['calibrated']['regret']:>7.1%}   " if "calibrated" in r else ""
    return (
        f"{r['stream']:<30}{r['count']:>9}{r['width']:>5}{r['distinct']:>9}{r['hottest']:>8}{r['threads']:>3}  "
        f"{us:<40} {r['picked']:<11}{r['regret']:>7.1%}   {by_file}{r['H100']['picked']:<11}{r['H100']['regret']:>7.1%}"
    )


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Worst and mean regret by threads, and of an H100, of the cases in which there is a choice."""
    chosen = [r for r in records if len(r["us"]) > 1]
    groups = {f"CPU, threads {n}": [r["regret"] for r in chosen if r["threads"] == n] for n in THREADS}
    groups |= {
        f"CPU, threads {n}, calibrated": [
            r["calibrated"]["regret"] for r in chosen if r["threads"] == n and "calibrated" in r
        ]
        for n in THREADS
    }
    groups["H100, predicted"] = [r["H100"]["regret"] for r in records if r["threads"] == records[0]["threads"]]
    return {
        name: {"cases": len(found), "worst": max(found), "mean": sum(found) / len(found)}
        for name, found in groups.items()
        if found
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("streams", nargs="*", metavar="STREAM", help="streams whose names begin so; all by default")
    parser.add_argument("--threads", type=int, nargs="*", default=THREADS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--calibration", help="a file that gradc calibrate --target cpu wrote")
    parser.add_argument("--save", action="store_true", help="write the records to benchmarks/results")
    given = parser.parse_args()
    calibrated = None if given.calibration is None else calibrated_device(CPU, given.calibration)
    wanted = [s for s in STREAMS.values() if not given.streams or s.name.startswith(tuple(given.streams))]
    records = []
    for stream in wanted:
        for width in given.widths:
            for count in given.counts:
                if 4 * stream.keys * width <= LARGEST:
                    records += case(stream, count, width, given.threads, calibrated)
                    print(*(line(r) for r in records[-len(given.threads) :]), sep="\n", flush=True)
    for name, found in summary(records).items():
        print(f"{name}: {found['cases']} cases, regret: worst {found['worst']:.1%}, mean {found['mean']:.1%}", end="; ")
        print(f"goals {GOALS['worst']:.0%}, {GOALS['mean']:.0%}")
    if given.save:
        path = RESULTS / f"streams-{words_of(processor())}.json"
        about = {"machine": machine(max(given.threads)), "summary": summary(records)}
        if calibrated is not None:
            about["calibration"] = {name: getattr(calibrated, name) for name in calibrated.sources}
        path.write_text(one_a_line(about, "streams", records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
