"""``make gpu`` without a GPU: what it says, how its parts are run, stopped and counted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import gpu_first, gpu_run, host

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = pytest.mark.skipif(gpu_run.devices() > 0, reason="there is a GPU here")


@NO_GPU
def test_without_a_gpu_it_says_so_and_that_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_run.main([]) == 0
    assert capsys.readouterr().out.startswith("no GPU here") and gpu_run.main(["--ready"]) == gpu_run.NO_GPU


def test_it_needs_nothing_but_what_is_stated() -> None:
    """In a Python without the packages that a GPU machine may lack, and before any is asked for."""
    hidden = ("hypothesis", "xdist", "platformdirs", "array_api_strict", "cuda", "onnx")
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in {hidden!r} else found(name, package)
)
import benchmarks.gpu_run, benchmarks.gpu, benchmarks.gpu_warm, benchmarks.gpu_clock
import gradc, numpy, pytest
from gradc.runtime.cache import user_directory
print(user_directory(), user_directory("config"))
module = gradc.compile(gradc.trace(lambda x: x * 2.0, x="f32[N]"), target="cuda-sim")
assert module(x=numpy.ones(3, "f4")).tolist() == [2, 2, 2]
from gradc import cli
assert cli.main(["--help"]) == 0
raise SystemExit(pytest.main(["tests/gpu/test_gpu_calls.py", "-p", "no:cacheprovider", "-k", "accumulate and numpy"]))
"""
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.split()[0].endswith("gradc")


def test_parts_of_the_tests_are_the_whole(tmp_path: Path) -> None:
    found = gpu_run.run_tests(tmp_path, 3000, 2, ("-m", "not gpu", "-k", "accumulate or out_is"))
    without_torch = 0 if importlib.util.find_spec("torch") else 2
    assert found["finished"] and found["failed"] == 0 and "broken" not in found, found
    assert (found["passed"], found["skipped"]) == (8 - without_torch, without_torch)
    assert {
        json.loads(line)["outcome"] for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()
    } <= {"passed", "skipped"}


def test_what_takes_too_long_is_stopped_and_what_was_found_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [gpu_run.start(["-c", "import time\nwhile True: time.sleep(1)"], tmp_path / f"{k}.log") for k in range(2)]
    waiting = iter(endless)
    monkeypatch.setattr(gpu_run, "start", lambda arguments, log: next(waiting))
    (tmp_path / "tests-0.jsonl").write_text(
        '{"test": "a", "outcome": "failed", "seconds": 1, "text": "why"}\n{"test": "b", "outco'
    )
    found = gpu_run.run_tests(tmp_path, 0.5, 2, ("-m", "not gpu"))
    assert not found["finished"] and all(process.poll() is not None for process in endless)
    assert found["failures"] == [{"test": "a", "text": "why"}]


def test_a_process_that_does_not_listen_is_ended(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True)\nwhile True:"
        " time.sleep(1)"
    )
    process = gpu_run.start(["-c", code], tmp_path / "log")
    while "ready" not in (tmp_path / "log").read_text():
        time.sleep(0.05)
    assert gpu_run.finish(process, 0.1) is None and process.poll() is not None


@NO_GPU
def test_every_part_is_run_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device that is only said to be there: its tests are skipped, its constants cannot be had, and each part says
    so.
    """
    pytest.importorskip("torch", reason="the benchmark's peer")
    from gradc.runtime.cuda import gpu
    from gradc.runtime.cuda.device import Description

    monkeypatch.setattr(gpu_run, "devices", lambda: 1)
    monkeypatch.setattr(gpu_run, "absent", list)
    monkeypatch.setattr(
        gpu,
        "current_device",
        lambda: Description(0, "NVIDIA Said To Be", "sm_90", 132, 50 << 20, 227 << 10, 80 << 30, 3 << 40, (12, 8)),
    )
    monkeypatch.setattr(gpu_run, "WARM", False)
    monkeypatch.setattr(gpu_run, "TESTS", 3000.0)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_run.main(["--shards", "2", "--seconds", "6000"]) == gpu_run.UNCALIBRATED | gpu_run.DARK
    (path,) = tmp_path.glob("gpu-*.json")
    found = json.loads(path.read_text())
    assert len(list(tmp_path.iterdir())) <= 6, "more may not be brought back"
    with tarfile.open(path.with_name(f"{path.stem}-logs.tar.gz")) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"first.log", "tests-0.log", "tests-1.log", "calibrate.log", "benchmark.log", "sanitizer-0.log"} <= names
    assert found["first"] and not any(record["right"] for record in found["first"])
    assert found["sanitizer"]["skipped"] == 4 and found["sanitizer"]["finished"]
    assert path.name.startswith("gpu-nvidia-said-to-be-20") and found["device"]["arch"] == "sm_90"
    assert (
        found["tests"]["finished"]
        and found["tests"]["failed"] == found["tests"]["passed"] == 0
        and found["tests"]["skipped"] > 200
    )
    assert found["tests"]["reasons"] == ["needs a GPU"] and "NoDevice" in found["calibration"]["failed"]
    assert "exit status 20: no constants, first light failed" in capsys.readouterr().out


def test_warm_calls_ask_little_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program of the host's benchmark: no wait, no memory beside the pool's, no query of an event."""
    from gradc.runtime.cuda import gpu

    driver = host.Driver()
    cupy = host.cupy_of(driver)
    for owner, name, value in (
        (gpu, "_cupy", lambda: cupy),
        (gpu, "count", lambda: 1),
        (gpu.Gpu, "load", host._load),
        (host, "REPEAT", 1),
        (host, "CALLS", 2),
    ):
        monkeypatch.setattr(owner, name, value)
    gpu._description.cache_clear()
    try:
        *records, _ = host.measured(driver)
    finally:
        gpu._description.cache_clear()
    assert len(records) == 5
    for record in records:
        asked = record["driver calls"]
        assert record["waits"] == record["allocations"] == 0 and "eventQuery" not in asked, record
        assert asked["streamIsCapturing"] == 1 and asked["getDevice"] <= 3, record
        assert (
            asked.get("memsetAsync", 0)
            == asked.get("eventRecord", 0)
            == ("checked" in record["program"] or "sorted" in record["program"])
        )


def test_first_light_on_a_device_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every check is right there; one that is wrong and one that fails are written down, and the others are run."""
    from gpu_in_memory import installed, ndarray, to_cupy

    def broken() -> float:
        raise ValueError("a fault")

    with installed(monkeypatch) as device:
        records = gpu_first.run(gpu_first.checks(to_cupy, ndarray.get, shrink=40), tmp_path / "first.json")
        assert [r["name"] for r in records] == [*gpu_first.FAMILIES, "numbers that change"]
        assert all(r["right"] for r in records), records
        assert {"gradc_numbers"} < {name for name, _ in device.launched}
        others = gpu_first.run(iter([("wrong", lambda: 1.0), ("broken", broken), ("right", lambda: 0.0)]))
    assert [r["right"] for r in others] == [False, False, True] and others[1]["text"] == "ValueError: a fault"
    assert json.loads((tmp_path / "first.json").read_text()) == records
