"""The GPU benchmark's harness, on the simulator: every case at a small size is right, by every strategy, and its floor
is the documented one.
"""

from __future__ import annotations

import json
from pathlib import Path

import long_tests
import pytest

from benchmarks.gpu_cases import all_cases

CASES = all_cases()
FLOORS = {
    "E1": 396,
    "E2": 1185,
    "E3": 1588,
    "E4": 1976,
    "E5": 453,
    "E6": 103,
    "E7": 5555,
    "E8": 358,
    "E8b": 179,
    "E12": 35,
    "Q1": 1320,
    "N1": 403,
    "N2": 201,
    "N3": 403,
    "S1": 805,
    "C1": 4203,
    "P1": 2349,
    "P2": 1611,
    "B1": 537,
    "G1": 167,
    "G3": 1048,
    "G4": 218,
    "G5": 295,
    "G6": 214,
}
"""MB, as the standard cases are stated."""


MEASURED = (*long_tests.COMPILER, "gradc/runtime", "benchmarks")
"""What is measured, and what measures it."""


def test_floors() -> None:
    assert {id: round(CASES[id].floor(CASES[id].at(False)) / 1e6) for id in FLOORS} == FLOORS


@pytest.mark.long(*MEASURED)
def test_every_case_at_a_small_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from benchmarks import gpu

    out = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--target", "cuda-sim", "--no-strategies", "--out", str(out)]) == 0, capsys.readouterr()
    found = json.loads(out.read_text())["cases"]
    assert found.keys() == CASES.keys()
    assert all("notes" not in row and "ours" not in row and row["results"] for row in found.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]
    assert "| E2 | embedding |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.long(*MEASURED)
@pytest.mark.parametrize("id", ["E5", "E8b", "G1"])
def test_every_strategy_of_a_case(id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from benchmarks import gpu

    assert gpu.main([id, "--tiny", "--target", "cuda-sim", "--out", str(tmp_path / "gpu.json")]) == 0, (
        capsys.readouterr()
    )
    row = json.loads((tmp_path / "gpu.json").read_text())["cases"][id]
    assert row["choice"].keys() == {"run", "none", "symbols"} and len(row["strategies"]) == 4
    for name, entry in row["strategies"].items():
        assert "units" in entry and (entry["right"] or name == "atomic"), (name, entry)


@pytest.mark.long(*MEASURED)
def test_what_is_measured(tmp_path: Path) -> None:
    """With the simulator's own clock: times mean nothing, what is made of them does."""
    torch = pytest.importorskip("torch")
    import time

    from benchmarks import gpu
    from benchmarks.gpu_clock import Clock, kernels
    from gradc.runtime.simulator.device import Simulator

    report = gpu.Report(tmp_path / "gpu.json", gpu.machine(torch, "cuda-sim"))
    clock = Clock(Simulator(kernels()), rate=1e4)
    gpu.Benchmark(torch, "cuda-sim", True, time.monotonic() + 3000, report, clock).run(
        [CASES["E5"], CASES["S1"]], peers=False
    )
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["fmad"]["case"] == "N1" and content["fmad"]["price"] > 0
    for id in ("E5", "S1"):
        row = content["cases"][id]
        assert "failed" not in row and "notes" not in row, row
        floor = row["floor_MB"] * 1e6 / (row["copy_GB_s"] * 1e9)
        assert row["floor_share"] == pytest.approx(floor / row["ours"]["median"]) and row[
            "over_eager"
        ] == pytest.approx(row["eager"]["median"] / row["ours"]["median"])
        assert row["ours"]["least"] <= row["ours"]["median"] <= row["ours"]["most"] and row["ours"]["runs"] >= 5
    row = content["cases"]["E5"]
    times = {name: entry["median"] for name, entry in row["strategies"].items()}
    assert row["best"]["none"] == min(times, key=times.__getitem__) and row["best"]["run"] != "atomic"
    assert (
        row["choice_over_best"]["none"] == pytest.approx(times[row["choice"]["none"]] / times[row["best"]["none"]])
        and row["choice_over_best"]["none"] >= 1
    )
    from benchmarks.gpu_report import markdown

    assert f"({content['cases']['E5']['best']['run']})" in markdown(content)


def test_a_case_that_goes_wrong_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from dataclasses import replace

    from benchmarks import gpu

    worse = replace(CASES["B1"], theirs=lambda torch, s, x, b: x + 2 * b)
    broken = replace(CASES["S1"], ours=lambda s, x: x.no_such_thing)
    monkeypatch.setattr(gpu, "all_cases", lambda: {"B1": worse, "S1": broken, "P2": CASES["P2"]})
    assert gpu.main(["--tiny", "--target", "cuda-sim", "--out", str(tmp_path / "gpu.json")]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    assert (
        not found["B1"]["results"]["b"]["right"]
        and "no_such_thing" in found["S1"]["failed"]
        and found["P2"]["results"]["x"]["right"]
    )
    said = capsys.readouterr()
    assert "wrong: B1, S1" in said.err and "WRONG" in said.out


def test_the_time_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from benchmarks import gpu

    assert gpu.main(["--tiny", "--target", "cuda-sim", "--seconds", "0", "--out", str(tmp_path / "gpu.json")]) == 0
    assert all(
        "no time left" in row["skipped"][0] for row in json.loads((tmp_path / "gpu.json").read_text())["cases"].values()
    )


def test_time_boxes_end_what_takes_too_long() -> None:
    from benchmarks.gpu import OutOfTime, boxed

    with pytest.raises(OutOfTime), boxed(0.05):
        while True:
            pass
