"""``make bench``: every CPU case against torch eager and torch.compile, each in a process of its own, blocks in turn.

    python -m benchmarks [CASE ...] [--peers eager,compile] [--rounds 7] [--threads 2] [--bits] [--default-allocator]
    [--strict] [--out FILE]

A case's values and gradients are compared with torch's in f64 before it is timed; where they are wrong it is not.  What
is being done goes to stderr, a table (ms, ratios, share of the floor, kernels) to stdout, the results to
``benchmarks/results/cpu-PROCESSOR-THREADS.json`` and a picture beside it: rows of cases that are not run again stay.
``python -m benchmarks.performance`` writes docs/performance.md of all such files.

The exit status is 1 where results are wrong, differ between runs, or a case stopped.  A peer that was not as fast
beside us as alone says that the machine was busy, or that the contestants disturb each other, and that the ratios of
that case mean little: it is told, kept in the row, and with ``--strict`` the exit status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .cases import all_cases

ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}
"""Everyone reuses warm pages."""
DISTURBED = 0.05
COMPILED = "c-block"
"""The case whose compilation is timed."""
COMPILE_TIMES = ("t-compile-cold", "t-compile-warm")
RESULTS = Path("benchmarks/results")


class Stopped(Exception):
    """A worker process ended before it answered; what it said is on stderr."""


def in_threads(count: int) -> dict[str, str]:
    """What makes gradc and torch take as many threads."""
    return {"GRADC_NUM_THREADS": str(count), "OMP_NUM_THREADS": str(count)}


class Contestant:
    """A worker process that runs when told to."""

    def __init__(self, who: str, case: str, threads: int, environment: dict[str, str] | None = None):
        self.who = who
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", who, case]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **in_threads(threads), **(ENVIRONMENT if environment is None else environment)},
        )
        self.times: list[float] = []
        self.facts = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise Stopped(f"the process of {self.who} stopped")

    def ask(self, text: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self._answer()

    def block(self, seconds: float = 0.4) -> float:
        """Runs for about ``seconds``; the block's median."""
        once = self.ask("run 1")[0]
        times = self.ask(f"run {max(3, min(200, int(seconds / max(once, 1e-6))))}")
        self.times.append(statistics.median(times))
        time.sleep(0.1)  # no foreign thread may still be spinning
        return self.times[-1]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def checked(case: str, threads: int) -> dict[str, dict[str, float]]:
    """The errors of the value and the gradients (:func:`benchmarks.worker.errors`), from a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", "check", case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **in_threads(threads)})
    if done.returncode:
        raise Stopped("the process that checks stopped")
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def wrong(errors: dict[str, dict[str, float]]) -> list[str]:
    """The results that are further from torch's in f64 than is allowed, NaN among them."""
    return [name for name, each in errors.items() if not each["ours"] <= each["allowed"]]


def row_of(case: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """One case: checked, then timed; only ``wrong`` or ``stopped`` where that went wrong."""
    row: dict[str, Any] = {"id": case, "date": datetime.date.today().isoformat()}
    try:
        say("comparing values and gradients with torch")
        errors = checked(case, options.threads)
        row["max_error"] = max(each["ours"] for each in errors.values())
        if wrong(errors):
            return row | {"wrong": {name: errors[name] for name in wrong(errors)}}
        return row | measure(case, options, say)
    except Stopped as error:
        return row | {"stopped": str(error)}


def measure(case: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Blocks of every contestant in turn, and the copy bandwidth in the same rotation."""
    peers, contestants = options.peers, dict[str, Contestant]()
    try:
        first = None
        if peers:
            say(f"{peers[0]} alone")
            first = contestants[peers[0]] = Contestant(peers[0], case, options.threads)
        alone = statistics.median(first.block() for _ in range(3)) if first else 0.0
        if first:
            first.times.clear()
        for who in ("ours", "stream", *peers[1:]):
            say(f"starting {who}")
            contestants[who] = Contestant(who, case, options.threads)
        for who in ("ours", *peers) if options.default_allocator else ():
            contestants[f"{who}_default"] = Contestant(who, case, options.threads, {})
        for i in range(options.rounds):
            say(f"round {i + 1} of {options.rounds}")
            for contestant in contestants.values():
                contestant.block()
        row = _timed(contestants, peers)
        if first and alone:
            row["peer_beside_over_alone"] = first.median / alone
        if options.bits:
            say("the same bits in every run")
            row["same_bits"] = contestants["ours"].ask("bits")["same"]
        return row
    finally:
        for contestant in contestants.values():
            contestant.close()


def _timed(contestants: dict[str, Contestant], peers: list[str]) -> dict[str, Any]:
    ours, stream = contestants["ours"], contestants["stream"]
    bandwidth = stream.facts["floor_bytes"] / stream.median
    floor = ours.facts["floor_bytes"] / bandwidth
    row: dict[str, Any] = {
        "ours_ms": ours.median * 1e3,
        "floor_share": ours.median / floor,
        "floor_ms": floor * 1e3,
        "product_GFLOP_s": ours.facts["product_flops"] / ours.median / 1e9,
        "copy_GB_s": bandwidth / 1e9,
        "spread": max(ours.times) / min(ours.times),
        "compile_s": ours.facts["compile_s"],
        "peak_MB": ours.facts["peak_MB"],
        "kernels": ours.facts["kernels"],
    }
    for peer in peers:
        row[f"{peer}_ms"] = contestants[peer].median * 1e3
        row[f"ratio_{peer}"] = ours.median / contestants[peer].median
        row[f"{peer}_compile_s"] = contestants[peer].facts["compile_s"]
        row[f"{peer}_peak_MB"] = contestants[peer].facts["peak_MB"]
    row |= {f"{name}_ms": c.median * 1e3 for name, c in contestants.items() if name.endswith("_default")}
    return row


def compile_times(peers: list[str], threads: int, repeat: int = 3) -> list[dict[str, Any]]:
    """From a graph to a callable, in a fresh process each time: with an empty cache and with a full one.

    Python may keep its bytecode, as it does where gradc is installed, even if it keeps none here.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def seconds(who: str, cache: str) -> float:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", "compile-time", who, COMPILED]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={
                **inherited,
                **in_threads(threads),
                "PYTHONPYCACHEPREFIX": f"{cache}/bytecode",
                "GRADC_CACHE_DIR": f"{cache}/ours",
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/theirs",
            },
        )
        return float(json.loads(done.stdout.splitlines()[-1])[0])

    date = datetime.date.today().isoformat()
    rows: list[dict[str, Any]] = [{"id": name, "date": date} for name in COMPILE_TIMES]
    for who in ("ours", *(p for p in peers if p == "compile")):
        cold, warm = [], []
        for _ in range(repeat if who == "ours" else 1):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(seconds(who, cache))
                warm.append(seconds(who, cache))
        for row, times in zip(rows, (cold, warm), strict=True):
            row[f"{who}_ms"] = statistics.median(times) * 1e3
            if who != "ours":
                row[f"ratio_{who}"] = row["ours_ms"] / row[f"{who}_ms"]
    return rows


def processor() -> str:
    """What the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    return full_name(facts) or platform.processor() or platform.machine()


def full_name(facts: Mapping[str, str]) -> str:
    """The name of a model, of a whole family (``AMD EPYC``) with the numbers of both: its makes differ in vectors and
    caches.
    """
    name = facts.get("model name", "")
    if re.search(r"\d", name) or not facts.get("model"):
        return name
    return f"{name} family {facts.get('cpu family', '?')} model {facts['model']}"


def words_of(processor: str) -> str:
    """``intel-xeon-gold-6448y``: a kind of processor, for the names of files."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|\bcpu\b|@.*|processor", " ", processor.lower()))
    return "-".join(words) or "unknown"


def file_name(processor: str, threads: int) -> str:
    """``cpu-intel-xeon-gold-6448y-8.json``: one file for a kind of processor and a number of threads."""
    return f"cpu-{words_of(processor)}-{threads}.json"


def one_a_line(about: Mapping[str, Any], name: str, records: Iterable[Any]) -> str:
    """JSON of what there is to say of some records, and of these under a name, each on a line of its own."""
    head = json.dumps({**about, name: []}, indent=1).removesuffix("[]\n}")
    return head + "[\n  " + ",\n  ".join(map(json.dumps, records)) + "\n ]\n}\n"


def machine(threads: int) -> dict[str, Any]:
    import numpy
    import torch

    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def picture(rows: list[dict[str, Any]]) -> str:
    """Ratios to the fastest peer, as bars; 1 is a line: SVG."""
    width, height = 760, 24 * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">'
    ]
    for i, row in enumerate(rows):
        ratios = [row[k] for k in ("ratio_eager", "ratio_compile") if k in row]
        y = 20 + 24 * i
        parts.append(f'<text x="150" y="{y + 12}" text-anchor="end">{row["id"]}</text>')
        if ratios:
            worst = max(ratios)
            length = min(worst, 2.0) * 250
            parts.append(
                f'<rect x="160" y="{y}" width="{length:.1f}" height="16"'
                f' fill="{"#3a7" if worst <= 1 else "#c53"}"/><text x="{166 + length:.1f}"'
                f' y="{y + 12}">{worst:.2f}</text>'
            )
    parts.append(
        f'<line x1="410" y1="10" x2="410" y2="{height - 20}" stroke="#555"/><text x="414" y="{height - 8}">1 = the'
        " faster peer</text></svg>"
    )
    return "\n".join(parts) + "\n"


def geometric_mean(rows: list[dict[str, Any]], peer: str) -> float:
    ratios = [row[f"ratio_{peer}"] for row in rows if f"ratio_{peer}" in row and "floor_share" in row]
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def line_of(row: dict[str, Any], peers: list[str]) -> str:
    """A row of the table."""
    if "wrong" in row:
        each = (f"{name} {e['ours']:.1e} where {e['allowed']:.1e} is allowed" for name, e in row["wrong"].items())
        return f"{row['id']:<20}  WRONG: {', '.join(each)}"
    if "stopped" in row:
        return f"{row['id']:<20}  {row['stopped']}"
    text = f"{row['id']:<20}{row['ours_ms']:>10.2f}"
    for peer in peers:
        text += f"{row[f'{peer}_ms']:>12.2f}{row[f'ratio_{peer}']:>8.2f}" if f"{peer}_ms" in row else " " * 20
    if "floor_share" not in row:
        return text
    kernels = " ".join(row["kernels"][:3]) + (f" and {len(row['kernels']) - 3} more" if len(row["kernels"]) > 3 else "")
    marks = ("" if row.get("same_bits", True) else "BITS DIFFER ") + ("DISTURBED " if disturbed(row) else "")
    return (
        f"{text}{row['floor_share']:>9.2f}{row['spread']:>8.2f}{row['peak_MB']:>9.0f}{row['max_error']:>10.1e}"
        f"  {marks}{kernels}"
    )


def disturbed(row: dict[str, Any]) -> bool:
    return abs(row.get("peer_beside_over_alone", 1.0) - 1) > DISTURBED


def status(rows: list[dict[str, Any]], strict: bool) -> int:
    """The exit status; says on stderr what is the matter."""
    bad = [row["id"] for row in rows if "wrong" in row]
    stopped = [row["id"] for row in rows if "stopped" in row]
    different = [row["id"] for row in rows if not row.get("same_bits", True)]
    noisy = [row["id"] for row in rows if disturbed(row)]
    for names, said in (
        (bad, "wrong results, not timed"),
        (stopped, "stopped"),
        (different, "not the same bits in every run"),
        (noisy, f"a peer was not as fast beside us as alone, by more than {DISTURBED:.0%}, so the ratios mean little"),
    ):
        if names:
            print(f"{said}: {', '.join(names)}", file=sys.stderr)
    return int(bool(bad or stopped or different or (strict and noisy)))


def parsed(arguments: list[str] | None, known: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join(known))
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--rounds", type=int, default=7)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=available, help="of everyone; the processor's cores")
    parser.add_argument(
        "--bits", action="store_true", help="look whether 100 runs with 1, 2, 3 and 5 threads give the same bits"
    )
    parser.add_argument(
        "--default-allocator", action="store_true", help="time everyone with the system's own settings of malloc, too"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a peer was disturbed")
    parser.add_argument("--out", default="", help="the file of results, instead of one named by the processor")
    options = parser.parse_args(arguments)
    unknown = [c for c in options.cases if c not in known]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds are 1 at least")
    options.peers = [p for p in options.peers.split(",") if p]
    return options


def main(arguments: list[str] | None = None) -> int:
    known = [*all_cases(), *COMPILE_TIMES]
    options = parsed(arguments, known)
    peers, wanted = options.peers, options.cases or known
    # both compile times are measured together
    steps = [n for n in wanted if n not in COMPILE_TIMES] + [n for n in wanted if n in COMPILE_TIMES][:1]
    out = Path(options.out) if options.out else RESULTS / file_name(processor(), options.threads)
    out.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"{'case':<20}{'ours ms':>10}"
        + "".join(f"{p + ' ms':>12}{'ratio':>8}" for p in peers)
        + f"{'x floor':>9}{'spread':>8}{'peak MB':>9}{'error':>10}  kernels"
    )
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(steps, 1):

        def say(phase: str, k: int = k, name: str = name) -> None:
            print(f"[{k}/{len(steps)}] {name}: {phase}", file=sys.stderr, flush=True)

        if name in COMPILE_TIMES:
            say("compile times, with an empty cache and with a full one")
            results = compile_times(peers, options.threads)
        else:
            results = [row_of(name, options, say)]
        for row in results:
            rows.append(row)
            print(line_of(row, peers), flush=True)
        kept = written(out, rows, peers, options.threads, known)
    print("geometric means: " + ", ".join(f"{geometric_mean(rows, peer):.2f} of {peer}" for peer in peers))
    out.with_suffix(".svg").write_text(picture(kept))
    print(f"written: {out} and {out.with_suffix('.svg')}")
    return status(rows, options.strict)


def written(
    out: Path, rows: list[dict[str, Any]], peers: list[str], threads: int, known: list[str]
) -> list[dict[str, Any]]:
    """Writes the rows into a file of results, in the place of earlier ones of these cases; gives all that it holds."""
    before = json.loads(out.read_text())["cases"] if out.exists() else []
    merged = {row["id"]: row for row in (*before, *rows)}
    kept = sorted(merged.values(), key=lambda row: known.index(row["id"]) if row["id"] in known else len(known))
    means = {f"geometric_mean_{peer}": geometric_mean(kept, peer) for peer in peers}
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps({"machine": machine(threads), **means, "cases": kept}, indent=1) + "\n")
    temporary.replace(out)
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
