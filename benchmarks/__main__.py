"""``make bench``: every CPU case against torch eager and torch.compile, each in a process of its own, blocks in turn.

    python -m benchmarks [CASE ...] [--peers eager,compile] [--rounds 7] [--check] [--bits] [--default-allocator] [--out
    FILE]

Prints a table (ms, ratios, share of the floor, kernels), writes JSON and one picture.  The exit status is 1 where a
peer beside us was not as fast as alone: then the machine was busy, or the contestants disturb each other, and no ratio
means anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .cases import all_cases

ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}
"""Everyone reuses warm pages."""
DISTURBED = 0.05
COMPILED = "c-block"
"""The case whose compilation is timed."""


class Contestant:
    """A worker process that runs when told to."""

    def __init__(self, who: str, case: str, environment: dict[str, str] | None = None):
        self.who = who
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", who, case]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(ENVIRONMENT if environment is None else environment)},
        )
        self.times: list[float] = []
        self.facts = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise SystemExit(f"the {self.who} worker stopped")

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


def measure(case: str, peers: list[str], rounds: int, check: bool, bits: bool, default: bool) -> dict[str, Any]:
    """One case: blocks of every contestant in turn, and the copy bandwidth in the same rotation."""
    first = Contestant(peers[0], case) if peers else None
    alone = statistics.median(first.block() for _ in range(3)) if first else 0.0
    if first:
        first.times.clear()
    contestants = {"ours": Contestant("ours", case), "stream": Contestant("stream", case)}
    if first:
        contestants[peers[0]] = first
    contestants |= {p: Contestant(p, case) for p in peers[1:]}
    if default:
        contestants |= {f"{who}_default": Contestant(who, case, {}) for who in ("ours", *peers)}
    for _ in range(rounds):
        for contestant in contestants.values():
            contestant.block()
    ours, stream = contestants["ours"], contestants["stream"]
    bandwidth = stream.facts["floor_bytes"] / stream.median
    floor = ours.facts["floor_bytes"] / bandwidth
    row: dict[str, Any] = {
        "id": case,
        "ours_ms": ours.median * 1e3,
        "floor_share": ours.median / floor,
        "floor_ms": floor * 1e3,
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
    if first and alone:
        row["peer_beside_over_alone"] = first.median / alone
    if check:
        row["max_error"] = max(ours.ask("check").values())
    if bits:
        row["same_bits"] = ours.ask("bits")["same"]
    for contestant in contestants.values():
        contestant.close()
    return row


def compile_times(peers: list[str], repeat: int = 3) -> list[dict[str, Any]]:
    """From a graph to a callable, in a fresh process each time: with an empty cache and with a full one."""

    def seconds(who: str, cache: str) -> float:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", "compile-time", who, COMPILED]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GRADC_CACHE_DIR": f"{cache}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/theirs"},
        )
        return float(json.loads(done.stdout.splitlines()[-1])[0])

    rows = [{"id": "t-compile-cold"}, {"id": "t-compile-warm"}]
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


def machine() -> dict[str, Any]:
    import numpy

    name = platform.processor() or platform.machine()
    try:
        name = next(
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "date": datetime.date.today().isoformat(),
    }


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios to the fastest peer, as bars; 1 is a line."""
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
    path.write_text("\n".join(parts) + "\n")


def geometric_mean(rows: list[dict[str, Any]], peer: str) -> float:
    ratios = [row[f"ratio_{peer}"] for row in rows if f"ratio_{peer}" in row and "floor_share" in row]
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def line_of(row: dict[str, Any], peers: list[str]) -> str:
    """A row of the table."""
    text = f"{row['id']:<20}{row['ours_ms']:>10.2f}"
    for peer in peers:
        text += f"{row[f'{peer}_ms']:>12.2f}{row[f'ratio_{peer}']:>8.2f}" if f"{peer}_ms" in row else " " * 20
    if "floor_share" not in row:
        return text
    error = f"{row['max_error']:.1e}" if "max_error" in row else "-"
    kernels = " ".join(row["kernels"][:3]) + (f" and {len(row['kernels']) - 3} more" if len(row["kernels"]) > 3 else "")
    kernels = ("" if row.get("same_bits", True) else "BITS DIFFER ") + kernels
    return f"{text}{row['floor_share']:>9.2f}{row['spread']:>8.2f}{row['peak_MB']:>9.0f}{error:>10}  {kernels}"


def main() -> int:
    special = ("t-compile-cold", "t-compile-warm")
    known = all_cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join([*known, *special]))
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="compare every result with float64")
    parser.add_argument(
        "--bits", action="store_true", help="look whether 100 runs with 1, 2, 3 and 5 threads give the same bits"
    )
    parser.add_argument(
        "--default-allocator", action="store_true", help="time everyone with the system's own settings of malloc, too"
    )
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    unknown = [c for c in options.cases if c not in known and c not in special]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join([*known, *special])}")
    peers = [p for p in options.peers.split(",") if p]
    rows: list[dict[str, Any]] = []
    out = (
        Path(options.out)
        if options.out
        else Path("benchmarks/results") / f"cpu-{datetime.date.today().isoformat()}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"{'case':<20}{'ours ms':>10}"
        + "".join(f"{p + ' ms':>12}{'ratio':>8}" for p in peers)
        + f"{'x floor':>9}{'spread':>8}{'peak MB':>9}{'error':>10}  kernels"
    )
    wanted = options.cases or [*known, *special]
    disturbed = []
    for name in wanted:
        if name in special and name != next(n for n in wanted if n in special):
            continue  # both are measured together
        results = (
            compile_times(peers)
            if name in special
            else [measure(name, peers, options.rounds, options.check, options.bits, options.default_allocator)]
        )
        for row in results:
            rows.append(row)
            print(line_of(row, peers), flush=True)
            if abs(row.get("peer_beside_over_alone", 1.0) - 1) > DISTURBED:
                disturbed.append(name)
        means = {f"geometric_mean_{peer}": geometric_mean(rows, peer) for peer in peers}
        out.write_text(json.dumps({"machine": machine(), **means, "cases": rows}, indent=1) + "\n")
    print("geometric means: " + ", ".join(f"{geometric_mean(rows, peer):.2f} of {peer}" for peer in peers))
    picture(rows, out.with_suffix(".svg"))
    print(f"written: {out} and {out.with_suffix('.svg')}")
    if disturbed:
        print(
            f"a peer was not as fast beside us as alone, by more than {DISTURBED:.0%}: {', '.join(disturbed)}",
            file=sys.stderr,
        )
    different = [row["id"] for row in rows if not row.get("same_bits", True)]
    if different:
        print(f"not the same bits in every run: {', '.join(different)}", file=sys.stderr)
    return int(bool(disturbed or different))


if __name__ == "__main__":
    raise SystemExit(main())
