"""``make gpu``: tests on a GPU, the device's constants, then the benchmark, within eight minutes and from a bare
checkout.

    python -m benchmarks.gpu_run [--seconds 460]

Writes gpu-<device>-<date>.json (and .md) into $OUT, else into benchmarks/results; what is there when the time is over
stays.  Exit status: 0 all well or no GPU, 1 a test failed, 2 a benchmark's result was wrong, 4 no device constants, 8 a
part ran out of its time; sums of these.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS, CONSTANTS = 190.0, 40.0
"""Seconds that the first two parts may take at most; the benchmark gets the rest."""
WARM = True
"""Whether the benchmark's modules are compiled beside the tests."""
MARGIN = 8.0
"""Seconds to write everything down."""
NO_GPU, LACKING = 32, 64
FAILED, WRONG, UNCALIBRATED, LATE = 1, 2, 4, 8
MEANING = {
    FAILED: "tests failed",
    WRONG: "a benchmark's result is wrong",
    UNCALIBRATED: "no constants",
    LATE: "out of time",
}
WANTED = ("numpy", "ml_dtypes", "jinja2", "networkx", "click", "pytest", "torch", "cupy")


def devices() -> int:
    """How many GPUs the driver shows, asked before anything else is imported."""
    try:
        driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)) else number.value
    except (OSError, AttributeError):
        return 0


def absent() -> list[str]:
    """The packages that are needed and that this Python lacks."""
    return [name for name in WANTED if importlib.util.find_spec(name) is None]


def finish(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """Wait; None if it had to be stopped: told to first, then killed, with everything that it started."""
    try:
        return process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        for number, patience in ((signal.SIGINT, 5.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, number)
                process.wait(patience)
                return None
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                return None
        return None


def start(arguments: Sequence[str], log: Path) -> subprocess.Popen[Any]:
    """This Python on the checkout, in a process group of its own; what it says goes to a file."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run_tests(folder: Path, seconds: float, shards: int, extra: Sequence[str] = ()) -> dict[str, Any]:
    """tests/gpu in several processes: counts, failures with their first lines, the slowest."""
    began = time.monotonic()
    results = [folder / f"tests-{k}.jsonl" for k in range(shards)]
    processes = [
        start(
            [
                "-m",
                "pytest",
                "-m",
                "gpu",
                "tests/gpu",
                "-p",
                "no:cacheprovider",
                f"--shard={k}/{shards}",
                f"--results={path}",
                *extra,
            ],
            folder / f"tests-{k}.log",
        )
        for k, path in enumerate(results)
    ]
    codes = [finish(process, began + seconds - time.monotonic()) for process in processes]
    tests = [
        json.loads(line)
        for path in results
        if path.exists()
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    counts: dict[str, Any] = {
        outcome: sum(t["outcome"] == outcome for t in tests) for outcome in ("passed", "failed", "skipped")
    }
    counts |= {"seconds": round(time.monotonic() - began, 1), "finished": None not in codes, "shards": shards}
    counts["failures"] = [{"test": t["test"], "text": t["text"]} for t in tests if t["outcome"] == "failed"]
    counts["reasons"] = sorted({t["text"] for t in tests if t["outcome"] == "skipped"})
    counts["slowest"] = [[t["test"], t["seconds"]] for t in sorted(tests, key=lambda t: -t["seconds"])[:10]]
    broken = [k for k, code in enumerate(codes) if code not in (None, 0, 1, 5)]
    if broken:  # pytest itself did not come to an end
        counts["broken"] = {k: (folder / f"tests-{k}.log").read_text()[-2000:] for k in broken}
    return counts


def write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything")
    parser.add_argument("--shards", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="test processes")
    parser.add_argument(
        "--ready",
        action="store_true",
        help=f"only say whether this Python can: 0 yes, {NO_GPU} there is no GPU, {LACKING} packages are missing",
    )
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    if not devices():
        print(
            "no GPU here (the driver shows none), so nothing was run on one; `pytest tests/gpu` runs the same tests on"
            " the simulator"
        )
        return NO_GPU if options.ready else 0
    lacking = absent()
    if lacking and not options.ready:
        print(f"make gpu needs {', '.join(lacking)} beside what is installed")
    if lacking or options.ready:
        return LACKING if lacking else 0
    from gradc.runtime.cuda import gpu

    device = gpu.current_device()
    name = re.sub("[^a-z0-9]+", "-", device.name.lower()).strip("-")
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    path = folder / f"gpu-{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json"
    logs = folder / f"{path.stem}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"device": vars(device)}
    write(path, content)
    with tempfile.TemporaryDirectory(prefix="gradc-gpu-") as cache:
        os.environ.setdefault("GRADC_CACHE_DIR", cache)
        status = parts(device, path, logs, content, until, options.shards)
    print(
        f"written: {path}; exit status {status}: "
        + (", ".join(words for bit, words in MEANING.items() if status & bit) or "all well")
    )
    return status


def parts(device: Any, path: Path, logs: Path, content: dict[str, Any], until: float, shards: int) -> int:
    """Tests, constants, benchmark, one after the other, each written down when it is done; the exit status."""
    status = 0

    print(f"{device.name}, {device.arch}: tests in {shards} processes, results in {path}", flush=True)
    warm = start(["-m", "benchmarks.gpu_warm", "--arch", device.arch], logs / "warm.log") if WARM else None
    content["tests"] = run_tests(logs, min(TESTS, until - time.monotonic() - MARGIN), shards)
    write(path, content)
    tests = content["tests"]
    status |= FAILED * bool(tests["failed"] or tests.get("broken")) | LATE * (not tests["finished"])
    print(
        f"tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped in {tests['seconds']}"
        f" s{'' if tests['finished'] else ', stopped: out of time'}",
        flush=True,
    )
    for failure in tests["failures"]:
        print(f"  {failure['test']}: {failure['text'].splitlines()[-1] if failure['text'] else ''}")
    if warm is not None:
        finish(warm, 30.0)

    constants = path.with_name(f"calibration-{path.stem}.json")
    code = finish(
        start(["-m", "gradc", "calibrate", "-v", "--no-progress", "--out", str(constants)], logs / "calibrate.log"),
        min(CONSTANTS, until - time.monotonic() - MARGIN),
    )
    content["calibration"] = (
        json.loads(constants.read_text())["constants"]
        if code == 0
        else {"failed": (logs / "calibrate.log").read_text()[-2000:]}
    )
    write(path, content)
    status |= UNCALIBRATED * (code != 0)
    print(
        "constants: "
        + (
            ", ".join(f"{k} {v:.3g}" for k, v in content["calibration"].items())
            if code == 0
            else f"failed, see {logs / 'calibrate.log'}"
        ),
        flush=True,
    )

    left = until - time.monotonic() - MARGIN
    code = finish(
        start(
            [
                "-W",
                "ignore",
                "-m",
                "benchmarks.gpu",
                "--seconds",
                f"{left - 10:.0f}",
                "--onto",
                str(path),
                "--out",
                str(path),
            ],
            logs / "benchmark.log",
        ),
        left,
    )
    status |= WRONG * (code not in (0, None)) | LATE * (code is None)
    print((path.with_suffix(".md") if path.with_suffix(".md").exists() else logs / "benchmark.log").read_text())
    return status


if __name__ == "__main__":
    raise SystemExit(main())
