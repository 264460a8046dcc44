"""docs/performance.md: tables and pictures of every processor whose results lie in ``benchmarks/results``.

python -m benchmarks.performance [--check]     writes the page and its pictures; with --check says whether it is stale
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gradc.inspect.plot import Axis, plot, side_by_side

from .__main__ import RESULTS, disturbed, geometric_mean, picture
from .cases import all_cases

PAGE = Path("docs/performance.md")
HEAD = """# Performance on CPUs

Written by `python -m benchmarks.performance` from `benchmarks/results`; do not edit (a test fails when it is stale).

## How to measure

    make bench                                    # every case, on the cores that this process may use
    make bench ARGS=--threads=1                   # one thread, a file of its own
    make bench CASE="c-softmax n-attention"       # these, in the place of their rows in the file
    python -m benchmarks.performance              # this page, from all files

`make bench` installs PyTorch into `.venv`. It says on stderr which case of how many it is at and what it does, and
prints a row when a case is done. Each case is first compared with torch in f64, the value and every gradient: an
error, as a share of the result's largest element, may be 64 units in the last place of f32, four of bf16, or four
times torch's own in the same dtype; where it is more, the case is not timed and the exit status is 1. Then gradc,
torch eager, torch.compile and a copy run in processes of their own, in turn, 0.4 s each, `--rounds` times (7): what
is told is the median of the blocks' medians. All have `--threads` threads (the cores that this process may use) and
keep freed pages (glibc's `MALLOC_TRIM_THRESHOLD_`; `--default-allocator` measures without, too).

Results go to `benchmarks/results/cpu-PROCESSOR-THREADS.json`, so that files of several machines lie side by side, and
into a picture beside it. On a busy machine a peer is not as fast beside us as it was alone: such cases are named at
the end and marked `*` here, their ratios mean little, and the exit status stays 0 (`--strict` makes it 1). Measure on
a machine that does nothing else.

## How to read

A ratio is gradc's time over the peer's: below 1 gradc is faster. *x floor* is gradc's time over that of a copy of the
bytes that inputs and outputs have, at the bandwidth measured in the same rotation. Cases named `c-` are a kernel or
two, backward alone where no forward is meant; `n-` are parts of networks with forward and backward
(`n-int8-linear-ROWS` forward alone, `n-nf4-linear-ROWS` and `n-int8-group-linear-ROWS` with the gradient of the
scales). Their sizes stand in `benchmarks/cases.py` and `benchmarks/network_cases.py`.

*GFLOP/s* are the multiplications and additions of a case's matrix products and convolutions over its whole time.
*Bound by* says *bytes* where a case takes at most twice as long as the copy; *products* where its GFLOP/s are at least
three quarters of those of the machine's fastest case; else *instructions*: those of its kernels, and the values that
pass between them. *MB* is the most memory beyond inputs and program that the process had.
"""


def results(folder: Path = RESULTS) -> dict[str, Any]:
    """What each file holds, by its name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("cpu-*.json"))}


def ratio(row: dict[str, Any] | None, peer: str) -> str:
    if row is None or f"ratio_{peer}" not in row:
        return "-"
    return f"{row[f'ratio_{peer}']:.2f}{'*' if disturbed(row) else ''}"


def ratios(found: dict[str, Any]) -> list[str]:
    """One table: the ratios of each processor, a row a case."""
    titles = [f"{data['machine']['cpu']}, {threads_of(data)}" for data in found.values()]
    rows = [{row["id"]: row for row in data["cases"]} for data in found.values()]
    names = dict.fromkeys([*all_cases(), *(name for each in rows for name in each)])
    lines = [
        "| case | " + " | ".join(f"{t}: eager | compile" for t in titles) + " |",
        "|---" * (1 + 2 * len(rows)) + "|",
    ]
    for name in names:
        if any(name in each for each in rows):
            cells = [ratio(each.get(name), peer) for each in rows for peer in ("eager", "compile")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    means = [f"{geometric_mean(data['cases'], p):.2f}" for data in found.values() for p in ("eager", "compile")]
    return [*lines, f"| geometric mean | {' | '.join(means)} |"]


def threads_of(data: dict[str, Any]) -> str:
    count = data["machine"].get("threads", data["machine"]["cores"])
    return f"{count} thread{'s' if count > 1 else ''}"


def times(data: dict[str, Any]) -> list[str]:
    """One processor's table: milliseconds, and what else is known of a case."""
    heads = (
        "case",
        "gradc ms",
        "eager ms",
        "compile ms",
        "x floor",
        "GFLOP/s",
        "bound by",
        "MB",
        "eager MB",
        "error",
        "on",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    fastest = max((row.get("product_GFLOP_s", 0.0) for row in data["cases"]), default=0.0)
    for row in data["cases"]:
        if "ours_ms" not in row:
            why = row.get("stopped", "wrong results")
            lines.append(f"| {row['id']} | {why} {'| ' * (len(heads) - 2)}| {row['date']} |")
            continue
        cells = [_cell(row, key, ".2f") for key in ("ours_ms", "eager_ms", "compile_ms", "floor_share")]
        cells += [_cell(row, "product_GFLOP_s", ".0f"), bound(row, fastest)]
        cells += [_cell(row, "peak_MB", ".0f"), _cell(row, "eager_peak_MB", ".0f"), _cell(row, "max_error", ".1e")]
        lines.append(f"| {row['id']} | {' | '.join(cells)} | {row.get('date', data['machine']['date'])} |")
    return lines


def bound(row: dict[str, Any], fastest: float) -> str:
    """What a case's time is bound by, as far as its row tells.

    :param fastest: the GFLOP/s of the machine's case with most.
    """
    if row.get("floor_share", math.inf) <= 2:
        return "bytes"
    if "product_GFLOP_s" not in row:
        return "-"
    return "products" if row["product_GFLOP_s"] >= 0.75 * fastest else "instructions"


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    return format(row[key], form) if key in row else "-"


CALLS = """## What a call costs

Microseconds of processor time of a call whose kernels do next to nothing: forward and backward of layers `Linear(8, 8)`
with biases on 4 rows by `torch.compile` (one thread, all three in turn in one process), and `module(...)` that adds up
arrays of NumPy's of 8 elements. `python -m benchmarks.calls` measures it. On a busy machine all three take longer: the
ratio is what to read.
"""
UPDATES = """Updates of parameters on one thread: by torch's optimizers; by `torch.compile(optimizer.step)` with a
backend that does nothing, which is what Dynamo takes, and with gradc; by `gradc.step`, on arrays of NumPy's and on
tensors, whose loss only has the gradients and so reads parameters and gradients once more.
"""
_UPDATERS = ("foreach", "fused", "dynamo", "compiled", "step", "step torch")


def calls(folder: Path = RESULTS) -> list[str]:
    """The cost of calls on each processor."""
    parts = []
    for path in sorted(folder.glob("calls-*.json")):
        data = json.loads(path.read_text())
        lines = [
            f"{data['machine']['cpu']} (`benchmarks/results/{path.name}`):\n",
            "| call | eager | inductor | gradc | gradc / inductor |",
            "|---|---|---|---|---|",
        ]
        for row in data["calls"]:
            title = f"{row['parameters']} parameters" if "parameters" in row else f"NumPy's arrays: {row['arrays']}"
            cells = [f"{row['us'][e]:.0f}" if e in row["us"] else "-" for e in ("eager", "inductor", "gradc")]
            cells.append(f"{row['of inductor']:.2f}" if "of inductor" in row else "-")
            lines.append(f"| {title} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
        if rows := data.get("updates"):
            lines = [
                "| us | foreach | fused | Dynamo | compiled | `gradc.step` | tensors | compiled / foreach | / fused |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for row in rows:
                us, shape = row["us"], "x".join(map(str, row["shape"]))
                cells = [f"{us[e]:.0f}" for e in _UPDATERS]
                cells += [f"{us['compiled'] / us[e]:.2f}" for e in ("foreach", "fused")]
                lines.append(f"| {row['optimizer']}, {row['parameters']} of [{shape}] | {' | '.join(cells)} |")
            parts += [UPDATES, "\n".join(lines) + "\n"]
    return [CALLS, *parts] if parts else []


MODELS = """## Whole models

A training step of well-known models with random weights, in milliseconds of processor time (`python -m
benchmarks.models --steps`, one thread, the engines in turn in one process).
"""
QUANTIZED = """## A block of quantized weights

Forward and the gradient of the input of one block of a Llama (width 1024) whose linear layers hold codes: milliseconds
of processor time, and in brackets the megabytes that a step takes beside the codes (`python -m
benchmarks.quantized_block`, one thread, the engines in turn in one process). *Dequantise* writes each weight out in
torch's ops and multiplies by MKL. Where a file is older than its memory, or has no such engine, there is a dash.
[quantized.md](quantized.md) tells what they do.
"""
LOOKUPS = """## Lookups and updates of tables

4,096 bags of 20 rows, and the same with the backward and the update by rowwise Adagrad; shares are of the bandwidth
that the machine has for rows at these places (`python -m benchmarks.lookups`, one thread).
[embeddings.md](embeddings.md#how-near-to-memory) tells what bounds them. That of family 25 model 1 is older than two
things: floors, as gradc, ask for the last line of a row that begins within one by now, and updates take less time. All
but that of model 17 are older than floors, and gradc, that ask for rows into the second cache.
"""
PICTURED = ("int8", "nf4")
"""Formats that have a picture."""
LEAST = 0.1
"""Megabytes that a picture shows where there are fewer."""
_WAYS = ("gradc", "torchao", "bitsandbytes", "dequantise", "inductor")


def _of_each(head: str, paths: Iterable[Path], table: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    """A section: the table of each processor's file, of those that have what it is made of."""
    parts = []
    for path in sorted(paths):
        data = json.loads(path.read_text())
        if lines := table(data):
            title = f"{data['machine']['cpu']} (`benchmarks/results/{path.name}`):\n"
            parts += [title, "\n".join(lines) + "\n"]
    return [head, *parts] if parts else []


def models(folder: Path = RESULTS) -> list[str]:
    """Warm steps of whole models, of each file that has such."""
    return _of_each(MODELS, folder.glob("models-*.json"), _steps)


def _steps(data: dict[str, Any]) -> list[str]:
    found = {row["name"]: row["steps_ms"] for row in data["models"] if "steps_ms" in row}
    if not found:
        return []
    lines = ["| model | gradc | eager | inductor | of eager | of the faster |", "|---" * 6 + "|"]
    for name, ms in found.items():
        peers = [ms[e] for e in ("eager", "inductor") if e in ms]
        cells = [_cell(ms, e, ".2f") for e in ("gradc", "eager", "inductor")]
        cells += [f"{ms['gradc'] / ms['eager']:.2f}", f"{ms['gradc'] / min(peers):.2f}" if peers[1:] else "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    of_eager = [ms["gradc"] / ms["eager"] for ms in found.values()]
    of_faster = [
        ms["gradc"] / min(ms["eager"], ms["inductor"]) for ms in found.values() if {"eager", "inductor"} <= ms.keys()
    ]
    mean = f"{statistics.geometric_mean(of_eager):.2f}"
    if of_faster:
        mean += f" | {statistics.geometric_mean(of_faster):.2f} of {len(of_faster)}"
    return [*lines, f"| geometric mean of {len(found)} | | | | {mean} |{'' if of_faster else ' |'}"]


def quantized(folder: Path = RESULTS) -> list[str]:
    """The block of quantized weights on each processor."""
    return _of_each(QUANTIZED, folder.glob("quantized_block-*.json"), _blocks)


def _blocks(data: dict[str, Any]) -> list[str]:
    lines = [f"| format, rows | {' | '.join(_WAYS)} | gradc / fastest other |", "|---" * (len(_WAYS) + 2) + "|"]
    for row in data["records"].get("1", ()):
        cells = []
        for way in _WAYS:
            MB = f" ({row['MB'][way]:.1f})" if way in row.get("MB", ()) else ""
            cells.append(f"{row['ms'][way]:.1f}{MB}" if way in row["ms"] else "-")
        lines.append(f"| {row['format']}, {row['rows']} | {' | '.join(cells)} | {row['share']:.2f} |")
    return lines


def lookups(folder: Path = RESULTS) -> list[str]:
    """Lookups and updates of tables on each processor."""
    return _of_each(LOOKUPS, folder.glob("lookups-*.json"), _shares)


def _shares(data: dict[str, Any]) -> list[str]:
    heads = "indices, table | distinct rows | forward us | floor | share | backward, update us | floor | share"
    lines = [f"| {heads} |", "|---" * 8 + "|"]
    for row in data["lookups"]:
        cells = [f"{row['law']}, {row['rows']:,} x {row['width']}", f"{row['distinct']:,}"]
        for way in ("forward", "backward"):
            us = row["us"][way]
            cells += [f"{us['gradc']:,.0f}", f"{us['floor']:,.0f}", f"{100 * row['share'][way]:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def picture_of_block(rows: list[dict[str, Any]]) -> str:
    """Times and memory of a block of one format over rows: SVG."""
    plots = []
    for key, title, unit in (("ms", "processor time of a step", "ms"), ("MB", "memory beside the codes", "MB")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for way in _WAYS:
                if way in row.get(key, ()):
                    lines.setdefault(way, []).append((row["rows"], max(row[key][way], LEAST)))
        plots.append(plot(lines, Axis("rows", base=2), Axis(unit, base=10), title=f"{rows[0]['format']}: {title}"))
    return side_by_side(plots)


def picture_of_lookups(rows: list[dict[str, Any]]) -> str:
    """Shares of the bandwidth over the rows of a table, forward and backward: SVG."""
    plots = []
    for way, title in (("forward", "lookups"), ("backward", "gradient and update by rowwise Adagrad")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            lines.setdefault(f"{row['law']} x {row['width']}", []).append((row["rows"], 100 * row["share"][way]))
        plots.append(
            plot(lines, Axis("rows of the table", base=10), Axis("% of bandwidth", limits=(0, 110)), title=title)
        )
    return side_by_side(plots)


def page(found: dict[str, Any]) -> str:
    parts = [HEAD]
    if found:
        parts += ["## Ratios\n", "\n".join(ratios(found)) + "\n"]
    parts += calls() + models() + quantized() + lookups()
    for name, data in found.items():
        machine = data["machine"]
        known = (f"{word} {machine[word]}" for word in ("python", "numpy", "torch") if word in machine)
        parts += [
            f"## {machine['cpu']}, {threads_of(data)}\n",
            f"`benchmarks/results/{name}`: {machine['cores']} cores, {', '.join(known)}.\n",
            f"![ratios to the faster peer]({Path(name).with_suffix('.svg')})\n",
            "\n".join(times(data)) + "\n",
        ]
    return "\n".join(parts)


def pages(found: dict[str, Any]) -> dict[Path, str]:
    """What is written: the page, and a picture for each file of results."""
    pictures = {PAGE.with_name(name).with_suffix(".svg"): picture(data["cases"]) for name, data in found.items()}
    for path in sorted(RESULTS.glob("quantized_block-*.json")):
        measured = [row for row in json.loads(path.read_text())["records"].get("1", ()) if "MB" in row]
        for form in PICTURED:
            if rows := [row for row in measured if row["format"] == form]:
                pictures[PAGE.with_name(f"{path.stem}-{form}.svg")] = picture_of_block(rows)
    for path in sorted(RESULTS.glob("lookups-*.json")):
        rows = json.loads(path.read_text())["lookups"]
        pictures[PAGE.with_name(path.name).with_suffix(".svg")] = picture_of_lookups(rows)
    return {PAGE: page(found), **pictures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    texts = pages(results())
    if parser.parse_args().check:
        stale = any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in texts.items())
        print(f"{PAGE} is stale: python -m benchmarks.performance" if stale else f"{PAGE} is as the results are")
        return int(stale)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"written: {', '.join(map(str, texts))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
