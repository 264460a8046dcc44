"""``make gpu``: the first light, training steps of whole models, tests on a GPU, the device's constants, the benchmark
of kernels, the sanitizers and, if time is left, variants of the kernels (:mod:`.gpu_variants`), within eight minutes
and from a bare checkout.

    python -m benchmarks.gpu_run [--seconds 460] [--parts first_light models]
    python -m benchmarks.gpu_run --dry   # the parts at small sizes without a GPU: does this script work?

Writes into $OUT, else into benchmarks/results: gpu-<device>-<date>.json, its .md, calibration-<the same>.json and the
logs of all parts as one .tar.gz.  Each part has a box of time of its own and is written down when it is done; what is
there when the time is over stays.  Binaries that were compiled elsewhere (python -m benchmarks.gpu_warm --arch sm_90
--cache build/gpu-cache) are found in build/gpu-cache: a binary's key has the text, the options and NVRTC's version.

Exit status: 0 all well or no GPU, 1 a test failed, 2 a benchmark's result was wrong, 4 no device constants, 8 a part
ran out of its time; sums of these.
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
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST_LIGHT, STEPS, TESTS, CONSTANTS, SANITIZERS = 60.0, 160.0, 110.0, 30.0, 30.0
"""Seconds that these parts may take at most; the benchmark gets the rest, and the sanitizers come last."""
PARTS = ("first_light", "models", "tests", "constants", "benchmark", "sanitizers", "variants")
FIRST_FILE, SANITIZER_FILE = "tests/gpu/test_gpu_first_light.py", "tests/gpu/test_gpu_sanitizer.py"
OTHER_FILES = ("tests/gpu", f"--ignore={FIRST_FILE}", f"--ignore={SANITIZER_FILE}")
CACHE = ROOT / "build" / "gpu-cache"
"""Binaries that were compiled elsewhere."""
DRY = ("-m", "not gpu", "-k", "(memory-torch and (layer or epilogues or cuDNN or decoded)) or (accumulate and memory)")
"""Of the tests, where there is no GPU: a few on a device in the host's memory."""
VARIANTS = 20.0
"""Seconds without which the variants are not begun."""
DRY_VARIANTS = ("sort", "--tiny", "--target", "cuda-sim")
DRY_MODELS = ("gpt_block", "--tiny", "--device", "cpu", "--engines", "eager", "gradc")
DRY_BENCHMARK = ("E5", "--tiny", "--target", "cuda-sim", "--no-strategies")
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
    folder: Path, seconds: float, shards: int, extra: Sequence[str] = (), part: str = "tests"
) -> dict[str, Any]:
    """Tests in several processes: counts, failures with their first lines, the slowest.

    :param extra: files, and options of pytest.  :param part: what the logs' names begin with.
    """
    began = time.monotonic()
    results = [folder / f"{part}-{k}.jsonl" for k in range(shards)]
    with tempfile.TemporaryDirectory(prefix="gradc-queue-") as queue:
        options = ("-p", "no:cacheprovider", f"--queue={queue}")
        processes = [
            start(["-m", "pytest", *options, f"--results={path}", *extra], folder / f"{part}-{k}.log")
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


def write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything")
    parser.add_argument("--shards", type=int, default=max(1, min(16, os.cpu_count() or 1)), help="test processes")
    parser.add_argument(
        "--ready",
        action="store_true",
        help=f"only say whether this Python can: 0 yes, {NO_GPU} there is no GPU, {LACKING} packages are missing",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all, if unsaid")
    parser.add_argument("--no-strategies", action="store_true", help="the benchmark forces no strategy of a scatter")
    parser.add_argument("--dry", action="store_true", help="without a GPU, at small sizes")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    if not devices() and not options.dry:
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
    device = described(options.dry)
    name = re.sub("[^a-z0-9]+", "-", device.name.lower()).strip("-")
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    path = folder / f"gpu-{name}-{time.strftime('%Y-%m-%d', time.gmtime())}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gradc-gpu-") as scratch:
        os.environ.setdefault("GRADC_CACHE_DIR", str(CACHE) if CACHE.is_dir() else str(Path(scratch) / "cache"))
        logs = Path(scratch) / "logs"
        logs.mkdir()
        run = Run(device, path, logs, until, options.shards, options.dry, not options.no_strategies, options.parts)
        run.write()
        try:
            run.parts()
        finally:
            run.write()
    print(
        f"written: {path}; exit status {run.status}: "
        + (", ".join(words for bit, words in MEANING.items() if run.status & bit) or "all well")
    )
    return run.status


def described(dry: bool) -> Any:
    """The device, or what stands for it."""
    from gradc.runtime.cuda import gpu
    from gradc.runtime.simulator.device import Simulator

    return Simulator.description if dry else gpu.current_device()


class Run:
    """The parts, one after the other, each written down when it is done.

    :ivar content: of the JSON.  :ivar status: the exit status so far.

    :param logs: a folder for what the parts say.  :param chosen: of :data:`PARTS`.
    """

    def __init__(
        self,
        device: Any,
        path: Path,
        logs: Path,
        until: float,
        shards: int,
        dry: bool = False,
        strategies: bool = True,
        chosen: Sequence[str] = PARTS,
    ):
        self.device, self.path, self.logs, self.strategies, self.chosen = device, path, logs, strategies, chosen
        self.until, self.shards, self.dry = until, shards, dry
        self.content: dict[str, Any] = {"device": vars(device)}
        self.status = 0

    def write(self) -> None:
        """All that there is so far; the logs are one file."""
        write(self.path, self.content)
        temporary = self.path.with_name(f"{self.path.stem}-logs.part")
        with tarfile.open(temporary, "w:gz") as tar:
            tar.add(self.logs, "logs")
        os.replace(temporary, self.path.with_name(f"{self.path.stem}-logs.tar.gz"))

    def box(self, most: float = float("inf")) -> float:
        """Seconds that a part may take."""
        return max(min(most, self.until - time.monotonic() - MARGIN), 0.0)

    def parts(self) -> None:
        print(f"{self.device.name}, {self.device.arch}: results in {self.path}", flush=True)
        warm = constants = None
        if "first_light" in self.chosen:
            self.tests("first light", FIRST_LIGHT, (FIRST_FILE,), 1)
        if "models" in self.chosen:
            self.models()
        if "benchmark" in self.chosen and not self.dry:  # compiled beside the tests
            warm = start(["-m", "benchmarks.gpu_warm", "--arch", self.device.arch], self.logs / "warm.log")
        if "tests" in self.chosen:
            self.tests("tests", TESTS, OTHER_FILES, self.shards)
        if warm is not None:
            finish(warm, 30.0)
        if "constants" in self.chosen:
            constants = self.constants()
        if "benchmark" in self.chosen:
            self.benchmark(constants)
        if "sanitizers" in self.chosen:
            self.tests("sanitizers", SANITIZERS, (SANITIZER_FILE,), 4)
        if "variants" in self.chosen and self.box() > VARIANTS:
            self.variants(constants)

    def tests(self, name: str, seconds: float, files: Sequence[str], shards: int) -> None:
        """A part that is tests."""
        part = name.replace(" ", "_")
        which = DRY if self.dry and files != (SANITIZER_FILE,) else ("-m", "gpu")
        found = self.content[part] = run_tests(self.logs, self.box(seconds), shards, (*which, *files), part)
        self.write()
        self.status |= FAILED * bool(found["failed"] or found.get("broken")) | LATE * (not found["finished"])
        print(
            f"{name}: {found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped in"
            f" {found['seconds']} s{'' if found['finished'] else ', stopped: out of time'}",
            flush=True,
        )
        for failure in found["failures"]:
            print(f"  {failure['test']}: {failure['text'].splitlines()[-1] if failure['text'] else ''}")

    def models(self) -> None:
        """Training steps; each engine's row is in the file as soon as it is measured."""
        out, log, left = self.logs / "models.json", self.logs / "models.log", self.box(STEPS)
        arguments = ["-m", "benchmarks.gpu_models", "--seconds", f"{max(left - 5, 0):.0f}", "--out", str(out)]
        arguments += ["--arch", self.device.arch, *(DRY_MODELS if self.dry else ())]
        code = finish(start(arguments, log), left)
        self.content["models"] = json.loads(out.read_text()) if out.exists() else {}
        self.write()
        self.status |= WRONG * (code not in (0, None)) | LATE * (code is None)
        print(log.read_text(), flush=True)

    def constants(self) -> Path | None:
        """The device's, measured; the file, with which the benchmark's modules are compiled."""
        path, log = self.path.with_name(f"calibration-{self.path.stem}.json"), self.logs / "calibrate.log"
        command = ("benchmarks.gpu_dry",) if self.dry else ("gradc", "calibrate", "-v", "--no-progress")
        arguments = ["-m", *command, "--out", str(path)]
        code = finish(start(arguments, log), self.box(CONSTANTS))
        right = code == 0
        said = json.loads(path.read_text())["constants"] if right else {"failed": log.read_text()[-2000:]}
        self.content["calibration"] = said
        self.write()
        self.status |= UNCALIBRATED * (not right)
        values = ", ".join(f"{k} {v:.3g}" for k, v in said.items()) if right else "failed, see calibrate.log"
        print(f"constants: {values}", flush=True)
        return path if right else None

    def benchmark(self, constants: Path | None) -> None:
        """The standard cases; each is in the file as soon as it is measured."""
        left = self.box() - SANITIZERS
        arguments = ["-W", "ignore", "-m", "benchmarks.gpu", "--seconds", f"{max(left - 10, 0):.0f}"]
        arguments += ["--onto", str(self.path), "--out", str(self.path)]
        arguments += [*([] if self.strategies else ["--no-strategies"]), *(DRY_BENCHMARK if self.dry else ())]
        environment = {"GRADC_CALIBRATION": str(constants)} if constants else {}
        log = self.logs / "benchmark.log"
        code = finish(start(arguments, log, **environment), left)
        self.status |= WRONG * (code not in (0, None)) | LATE * (code is None)
        self.content |= json.loads(self.path.read_text())
        self.write()
        table = self.path.with_suffix(".md")
        print((table if table.exists() else log).read_text(), flush=True)

    def variants(self, constants: Path | None) -> None:
        """What other choices would give, in the time that is left."""
        out, log, left = self.logs / "variants.json", self.logs / "variants.log", self.box()
        arguments = ["-m", "benchmarks.gpu_variants", "--seconds", f"{left - 5:.0f}", "--out", str(out)]
        environment = {"GRADC_CALIBRATION": str(constants)} if constants else {}
        code = finish(start([*arguments, *(DRY_VARIANTS if self.dry else ())], log, **environment), left)
        self.content["variants"] = json.loads(out.read_text()) if out.exists() else {"failed": log.read_text()[-2000:]}
        self.write()
        self.status |= WRONG * (code not in (0, None))
        print(log.read_text(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
