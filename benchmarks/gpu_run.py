"""``make gpu``: first light, tests on a GPU, the device's constants, the benchmark by these, and the sanitizer, within
eight minutes and from a bare checkout.

    python -m benchmarks.gpu_run [--seconds 460]

Writes gpu-<device>-<date>.json, .md, -logs.tar.gz and calibration-gpu-<device>-<date>.json into $OUT, else into
benchmarks/results; what is there when the time is over stays.  Exit status: 0 all well or no GPU, 1 a test failed, 2 a
benchmark's result was wrong, 4 no device constants, 8 a part ran out of its time, 16 first light failed; sums of these.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST, TESTS, CONSTANTS, SANITIZER = 100.0, 150.0, 40.0, 60.0
"""Seconds that first light, tests, constants and the sanitizer may take at most; the benchmark gets the rest."""
SANITIZED = "tests/gpu/test_gpu_sanitizer.py"
WARM = True
"""Whether the benchmark's modules are compiled beside the tests."""
MARGIN = 8.0
"""Seconds to write everything down."""
NO_GPU, LACKING = 32, 64
FAILED, WRONG, UNCALIBRATED, LATE, DARK = 1, 2, 4, 8, 16
MEANING = {
    FAILED: "tests failed",
    WRONG: "a benchmark's result is wrong",
    UNCALIBRATED: "no constants",
    LATE: "out of time",
    DARK: "first light failed",
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


def start(arguments: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[Any]:
    """This Python on the checkout, in a process group of its own; what it says goes to a file."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    with open(log, "w", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run_tests(
    folder: Path, seconds: float, shards: int, extra: Sequence[str] = (), where: str = "tests/gpu"
) -> dict[str, Any]:
    """tests/gpu, or a file of it, in several processes: counts, failures with their first lines, the slowest."""
    began, part = time.monotonic(), Path(where).stem.removeprefix("test_gpu_") if where.endswith(".py") else "tests"
    results = [folder / f"{part}-{k}.jsonl" for k in range(shards)]
    processes = [
        start(
            [
                "-m",
                "pytest",
                "-m",
                "gpu",
                where,
                "-p",
                "no:cacheprovider",
                f"--shard={k}/{shards}",
                f"--results={path}",
                *extra,
            ],
            folder / f"{part}-{k}.log",
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
        counts["broken"] = {k: (folder / f"{part}-{k}.log").read_text()[-2000:] for k in broken}
    return counts


def pack(logs: Path, path: Path) -> None:
    """What every part has said so far, as one file beside the results."""
    temporary = path.with_name(f"{path.stem}-logs.part")
    with tarfile.open(temporary, "w:gz") as archive:
        archive.add(logs, arcname=f"{path.stem}-logs")
    os.replace(temporary, path.with_name(f"{path.stem}-logs.tar.gz"))


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
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"device": vars(device)}
    write(path, content)
    with tempfile.TemporaryDirectory(prefix="gradc-gpu-") as scratch:
        os.environ.setdefault("GRADC_CACHE_DIR", os.path.join(scratch, "cache"))
        logs = Path(scratch) / "logs"
        logs.mkdir()
        try:
            status = parts(device, path, logs, content, until, options.shards)
        finally:
            pack(logs, path)
    print(
        f"written: {path}; exit status {status}: "
        + (", ".join(words for bit, words in MEANING.items() if status & bit) or "all well")
    )
    return status


def parts(device: Any, path: Path, logs: Path, content: dict[str, Any], until: float, shards: int) -> int:
    """First light, tests, constants, benchmark, sanitizer, one after the other, each written down when it is done; the
    exit status.
    """
    left = lambda most: min(most, until - time.monotonic() - MARGIN)
    print(f"{device.name}, {device.arch}: results in {path}", flush=True)
    status = first_light(logs, content, left(FIRST))
    save(path, content, logs)
    warm = start(["-m", "benchmarks.gpu_warm", "--arch", device.arch], logs / "warm.log") if WARM else None
    content["tests"] = run_tests(logs, left(TESTS), shards, [f"--ignore={SANITIZED}"])
    save(path, content, logs)
    status |= counted("tests", content["tests"])
    if warm is not None:
        finish(warm, 30.0)
    constants = path.with_name(f"calibration-{path.stem}.json")
    status |= calibrate(logs, content, constants, left(CONSTANTS))
    save(path, content, logs)
    status |= benchmark(path, logs, constants, left(math.inf) - SANITIZER)
    content |= json.loads(path.read_text())  # with what the benchmark has added
    if left(SANITIZER) > 0:
        content["sanitizer"] = run_tests(logs, left(SANITIZER), 1, where=SANITIZED)
        status |= counted("sanitizer", content["sanitizer"])
    save(path, content, logs)
    return status


def save(path: Path, content: dict[str, Any], logs: Path) -> None:
    write(path, content)
    pack(logs, path)


def first_light(logs: Path, content: dict[str, Any], seconds: float) -> int:
    """Runs :mod:`benchmarks.gpu_first`."""
    records = logs / "first.json"
    code = finish(start(["-m", "benchmarks.gpu_first", "--out", str(records)], logs / "first.log"), seconds)
    content["first"] = json.loads(records.read_text()) if records.exists() else []
    for record in content["first"]:
        if not record["right"]:
            print(f"  {record['name']}: {record.get('text') or record['error']}")
    right = sum(record["right"] for record in content["first"])
    print(f"first light: {right} of {len(content['first'])} right, exit status {code}", flush=True)
    if code is None:
        return LATE
    if code:
        content["first"].append({"name": "the end of the log", "right": False, "text": tail(logs / "first.log")})
    return DARK * (code != 0)


def counted(name: str, tests: dict[str, Any]) -> int:
    """Prints the counts of tests; their part of the exit status."""
    print(
        f"{name}: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped in {tests['seconds']}"
        f" s{'' if tests['finished'] else ', stopped: out of time'}",
        flush=True,
    )
    for failure in tests["failures"]:
        print(f"  {failure['test']}: {failure['text'].splitlines()[-1] if failure['text'] else ''}")
    return FAILED * bool(tests["failed"] or tests.get("broken")) | LATE * (not tests["finished"])


def calibrate(logs: Path, content: dict[str, Any], constants: Path, seconds: float) -> int:
    """Runs gradc calibrate."""
    log = logs / "calibrate.log"
    code = finish(start(["-m", "gradc", "calibrate", "-v", "--no-progress", "--out", str(constants)], log), seconds)
    content["calibration"] = json.loads(constants.read_text())["constants"] if code == 0 else {"failed": tail(log)}
    print(
        "constants: "
        + (
            ", ".join(f"{k} {v:.3g}" for k, v in content["calibration"].items())
            if code == 0
            else "failed, see the logs"
        ),
        flush=True,
    )
    return UNCALIBRATED * (code != 0)


def benchmark(path: Path, logs: Path, constants: Path, seconds: float) -> int:
    """Runs the benchmark by the constants measured before, where there are any."""
    arguments = ["-W", "ignore", "-m", "benchmarks.gpu", "--seconds", f"{seconds - 10:.0f}"]
    environment = {"GRADC_CALIBRATION": str(constants)} if constants.exists() else {}
    log = logs / "benchmark.log"
    code = finish(start([*arguments, "--onto", str(path), "--out", str(path)], log, **environment), seconds)
    table = path.with_suffix(".md")
    print(table.read_text() if table.exists() else tail(log))
    return WRONG * (code not in (0, None)) | LATE * (code is None)


def tail(log: Path) -> str:
    return log.read_text()[-2000:]


if __name__ == "__main__":
    raise SystemExit(main())
