"""``make gpu`` without a GPU: what it says, how its parts are run, stopped and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import gpu_dry, gpu_run, host

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = pytest.mark.skipif(gpu_run.devices() > 0, reason="there is a GPU here")


@NO_GPU
def test_without_a_gpu_it_says_so_and_that_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_run.main([]) == 0
    assert capsys.readouterr().out.startswith("no GPU here") and gpu_run.main(["--ready"]) == gpu_run.NO_GPU


@pytest.mark.long("benchmarks", "gradc/cli", "gradc/process", "gradc/runtime", "gradc/targets", "tests/gpu")
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
from gradc.process.files import user_directory
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


@pytest.mark.long("benchmarks", "gradc/codegen", "gradc/runtime", "gradc/targets", "templates", "tests/gpu")
def test_a_dry_run_goes_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a device in memory, in parts that are the whole; a case of the benchmark on the simulator; what needs a
    GPU says so.  Few files, because a machine that is lent may not bring many back.
    """
    pytest.importorskip("torch", reason="the benchmark's peer")
    pytest.importorskip("cupy", reason="make gpu ends without it")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_run.main(["--dry", "--shards", "2", "--seconds", "6000"]) == 0
    (path,) = tmp_path.glob("gpu-*.json")
    found = json.loads(path.read_text())
    assert found["device"]["name"] == "cuda-sim" and found["cases"]["E5"]["results"]
    ran = {part: [found[part][n] for n in ("passed", "failed", "finished")] for part in ("first_light", "tests")}
    assert ran == {"first_light": [1, 0, True], "tests": [11, 0, True]}
    assert found["models"]["gpt_block"]["gradc"]["right"] and "step_ms" in found["models"]["gpt_block"]["eager"]
    assert found["constants"] == found["calibration"] == pytest.approx(gpu_dry.CONSTANTS, rel=1e-3)
    assert not any(value == getattr(gpu_dry.LISTED, name) for name, value in found["constants"].items())
    if not gpu_run.devices():
        assert found["sanitizers"]["skipped"] == 4 and found["sanitizers"]["reasons"] == ["needs a GPU"]
    assert {"default", "digits of 8 bits (are 9)"} <= set(found["variants"]["sort"])
    assert all(entry["right"] for rows in found["variants"]["sort"].values() for entry in rows.values())
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) <= 4 and f"{path.stem}-logs.tar.gz" in names
    with tarfile.open(tmp_path / f"{path.stem}-logs.tar.gz") as tar:
        assert {"logs/first_light-0.log", "logs/benchmark.log", "logs/calibrate.log"} <= set(tar.getnames())


def test_warm_calls_ask_little_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program of the host's benchmark: no wait, no memory beside the pool's, no query of an event."""
    from gradc.runtime.cuda import gpu

    driver = host.Driver()
    for owner, name, value in (*host.replaced(driver), (host, "REPEAT", 1), (host, "CALLS", 2)):
        monkeypatch.setattr(owner, name, value)
    torch = pytest.importorskip("torch")
    for owner, name in ((torch, "empty"), (torch._C, "_cuda_getCurrentRawStream"), (torch.cuda, "current_stream")):
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)  # the benchmark replaces them
    gpu._description.cache_clear()
    try:
        *records, _ = host.measured(driver)
    finally:
        gpu._description.cache_clear()
    assert sum("torch" in record["program"] for record in records) == 5 and len(records) == 12
    for record in records:
        asked = record["driver calls"]
        assert record["waits"] == record["allocations"] == 0 and "eventQuery" not in asked, record
        assert asked["streamIsCapturing"] == 1 and asked["getDevice"] <= 3, record
        assert asked.keys().isdisjoint(("memsetAsync", "memcpyAsync", "eventRecord")), record
