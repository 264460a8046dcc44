"""``make bench``: every CPU case against torch eager and torch.compile, each in a process of its own, blocks in turn.

    python -m benchmarks [CASE ...] [--peers eager,compile] [--rounds 7] [--check] [--out FILE]

Prints a table (ms, ratios, share of the floor), writes JSON and one picture.
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
import time
from pathlib import Path
from typing import Any

from .cases import all_cases

ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1099511627776"}


class Contestant:
    """A worker process that runs when told to."""

    def __init__(self, who: str, case: str):
        self.who = who
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worker", who, case]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
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


def measure(case: str, peers: list[str], rounds: int, check: bool) -> dict[str, Any]:
    """One case: blocks of every contestant in turn, and the copy bandwidth in the same rotation."""
    first = Contestant(peers[0], case) if peers else None
    alone = statistics.median(first.block() for _ in range(3)) if first else 0.0
    if first:
        first.times.clear()
    contestants = {"ours": Contestant("ours", case), "stream": Contestant("stream", case)}
    if first:
        contestants[peers[0]] = first
    contestants |= {p: Contestant(p, case) for p in peers[1:]}
    for _ in range(rounds):
        for contestant in contestants.values():
            contestant.block()
    ours, stream = contestants["ours"], contestants["stream"]
    bandwidth = stream.facts["floor_bytes"] / stream.median
    floor = ours.facts["floor_bytes"] / bandwidth
    row: dict[str, Any] = {"id": case, "ours_ms": ours.median * 1e3, "floor_share": ours.median / floor, "floor_ms": floor * 1e3, "copy_GB_s": bandwidth / 1e9,
                           "spread": max(ours.times) / min(ours.times), "compile_s": ours.facts["compile_s"], "kernels": ours.facts["kernels"]}  # fmt: skip
    for peer in peers:
        row[f"{peer}_ms"] = contestants[peer].median * 1e3
        row[f"ratio_{peer}"] = ours.median / contestants[peer].median
        row[f"{peer}_compile_s"] = contestants[peer].facts["compile_s"]
    if first and alone:
        row["peer_beside_over_alone"] = first.median / alone
    if check:
        row["max_error"] = max(ours.ask("check").values())
    for contestant in contestants.values():
        contestant.close()
    return row


def machine() -> dict[str, Any]:
    import numpy

    name = platform.processor() or platform.machine()
    try:
        name = next(line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), "numpy": numpy.__version__, "date": datetime.date.today().isoformat()}


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios to the fastest peer, as bars; 1 is a line."""
    width, height = 760, 24 * len(rows) + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">']
    for i, row in enumerate(rows):
        ratios = [row[k] for k in ("ratio_eager", "ratio_compile") if k in row]
        y = 20 + 24 * i
        parts.append(f'<text x="150" y="{y + 12}" text-anchor="end">{row["id"]}</text>')
        if ratios:
            worst = max(ratios)
            length = min(worst, 2.0) * 250
            parts.append(f'<rect x="160" y="{y}" width="{length:.1f}" height="16" fill="{"#3a7" if worst <= 1 else "#c53"}"/><text x="{166 + length:.1f}" y="{y + 12}">{worst:.2f}</text>')
    parts.append(f'<line x1="410" y1="10" x2="410" y2="{height - 20}" stroke="#555"/><text x="414" y="{height - 8}">1 = the faster peer</text></svg>')
    path.write_text("\n".join(parts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], help=", ".join(all_cases()))
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="compare every gradient with float64")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    known = all_cases()
    unknown = [c for c in options.cases if c not in known]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(known)}")
    peers = [p for p in options.peers.split(",") if p]
    rows: list[dict[str, Any]] = []
    out = Path(options.out) if options.out else Path("benchmarks/results") / f"cpu-{datetime.date.today().isoformat()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'case':<20}{'ours ms':>10}" + "".join(f"{p + ' ms':>12}{'ratio':>8}" for p in peers) + f"{'x floor':>9}{'spread':>8}{'error':>10}")
    for name in options.cases or list(known):
        row = measure(name, peers, options.rounds, options.check)
        rows.append(row)
        peer_text = "".join(f"{row[f'{p}_ms']:>12.2f}{row[f'ratio_{p}']:>8.2f}" for p in peers)
        error = f"{row['max_error']:.1e}" if "max_error" in row else "-"
        print(f"{name:<20}{row['ours_ms']:>10.2f}{peer_text}{row['floor_share']:>9.2f}{row['spread']:>8.2f}{error:>10}", flush=True)
        out.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=1) + "\n")
    picture(rows, out.with_suffix(".svg"))
    print(f"written: {out} and {out.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
