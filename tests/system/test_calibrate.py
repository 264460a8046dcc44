"""gradc calibrate: from times to constants, and to the file that compile reads."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gradc
from benchmarks import gpu_dry
from gradc import cli, knobs, ops
from gradc.analysis.strategies import passes
from gradc.calibration import host
from gradc.calibration import measure as calibrate
from gradc.calibration.measure import Sample, fitted
from gradc.cli.doctor import _constants
from gradc.cli.model import Settings, compiled
from gradc.errors import DeviceError, InvalidProblem, Unsupported
from gradc.runtime.cuda.device import Span
from gradc.runtime.host import pool
from gradc.runtime.host.toolchain import cpu_model
from gradc.runtime.simulator.device import Simulator
from gradc.targets import calibration as calibration
from gradc.targets.devices import (
    CPU,
    CPU_CONSTANTS,
    FORMAT,
    Gpu,
    calibrated_by,
    calibration_text,
    cpu_of,
    device_for,
    gpu_of,
    listed_device,
)

H100 = gpu_of("sm_90")
GIVEN = {
    "bandwidth": 2.5e12,
    "coalesced": 4e11,
    "scattered": 7e10,
    "resident": 3.3e12,
    "hot": 6e-9,
    "launch": 1.9e-6,
    "sort_base": 9e-6,
    "sort_pass": 6e-6,
    "sort_rate": 5e10,
}
RATES = {"bandwidth": "bandwidth", "coalesced": "coalesced", "scattered": "scattered", "moved": "resident"}


def synthetic(noise: float = 0.0, faster_vectors: float = 1.2) -> list[Sample]:
    """The times of a device with these constants, as the model has them, each with 3 us of its own."""
    scale, rng = calibrate.Scale(), np.random.default_rng(0)
    amounts = {
        "bandwidth": [2 * n * H100.l2 for n in scale.copied],
        "coalesced": scale.adds,
        "scattered": scale.lines,
        "moved": scale.moved,
    }
    found = [Sample(what, n, 3e-6 + n / GIVEN[RATES[what]]) for what, all_ in amounts.items() for n in all_]
    found += [Sample("vectors", n, 3e-6 + n / (GIVEN["resident"] * faster_vectors)) for n in scale.moved]
    found += [Sample("hot", n, 3e-6 + n * GIVEN["hot"]) for n in scale.hits] + [
        Sample("launch", n, 3e-6 + n * GIVEN["launch"]) for n in scale.launches
    ]
    for keys in calibrate.KEYS:
        p = passes(keys)
        found += [
            Sample("sort", n, GIVEN["sort_base"] + p * max(GIVEN["sort_pass"], n / GIVEN["sort_rate"]), p)
            for n in scale.rows
        ]
    return [Sample(s.what, s.amount, s.seconds * (1 + noise * rng.uniform(-1, 1)), s.passes) for s in found]


def test_constants_come_back() -> None:
    assert fitted(synthetic(), H100) == pytest.approx(GIVEN, rel=1e-6)


def test_noise_moves_them_little() -> None:
    found = fitted(synthetic(noise=0.01), H100)
    for name, wanted in GIVEN.items():
        assert found[name] == pytest.approx(wanted, rel=0.25 if name == "sort_base" else 0.08), name


def test_the_slower_of_two_ways_within_l2_counts() -> None:
    """The model moves vectors and partial results at one rate."""
    assert fitted(synthetic(faster_vectors=0.5), H100)["resident"] == pytest.approx(GIVEN["resident"] / 2)
    without = [s for s in synthetic() if s.what != "vectors"]  # before sm_90 there are none
    assert fitted(without, H100)["resident"] == pytest.approx(GIVEN["resident"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: Sample(s.what, s.amount, 1e-3, s.passes) if s.what == "bandwidth" else s,
            "bandwidth: more work does not take longer",
        ),
        (
            lambda s: Sample(s.what, s.amount, s.seconds * 3) if s.what == "coalesced" and s.amount == 1 << 26 else s,
            "coalesced: a time lies",
        ),
        (lambda s: Sample(s.what, s.amount, 0.0) if s.what == "hot" else s, "hot: times of two amounts"),
        (
            lambda s: Sample(s.what, s.amount, math.nan) if s.what == "scattered" else s,
            "scattered: times of two amounts",
        ),
        (
            lambda s: Sample(s.what, s.amount, s.seconds * 1000) if s.what == "launch" else s,
            "launch was measured as 0.0019, and H100 is listed with 2.5e-06",
        ),
        (
            lambda s: Sample(s.what, s.amount, s.seconds / 1000, s.passes) if s.what == "bandwidth" else s,
            "shared or throttled",
        ),
    ],
)
def test_times_that_no_device_has(change, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        fitted([change(s) for s in synthetic()], H100)


def test_one_amount_is_no_line() -> None:
    with pytest.raises(DeviceError, match="two amounts"):
        fitted([s for s in synthetic() if s.what != "hot" or s.amount == 1 << 14], H100)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's configuration directory of its own, and nothing said about calibration."""
    monkeypatch.setattr(calibration, "user_directory", lambda kind: str(tmp_path))
    monkeypatch.delenv("GRADC_CALIBRATION")
    return tmp_path


def scattered(**options):
    graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, size=200_000), i="i64[65536]", u="f32[65536,64]")
    return gradc.compile(graph, **{"target": "cuda", "determinism": "none", **options})


SLOW_SORT = calibration_text(H100, {"sort_base": 0.5})
FAST_SORT = calibration_text(
    H100, {"sort_base": 0.0, "sort_pass": 1e-9, "sort_rate": 1e15, "coalesced": 1e9, "resident": 1e9, "scattered": 1e8}
)


def test_the_users_own_file_decides_for_cuda(home: Path) -> None:
    path = calibration.calibration_file(H100)
    assert path == home / "calibration" / "h100.json"
    before = str(scattered().forward.program)
    path.parent.mkdir()
    path.write_text(SLOW_SORT)
    slow = scattered()
    path.write_text(FAST_SORT)
    fast = scattered()
    assert "strategy(y: segmented)" in str(fast.forward.program) and "segmented" not in str(slow.forward.program)
    assert str(scattered(calibration="none").forward.program) == before
    assert str(scattered(target="cuda-sim").forward.program) == str(
        scattered(target="cuda-sim", calibration="none").forward.program
    )
    assert fast.options.calibration == FAST_SORT  # what it was chosen by, which is part of every key
    assert "segmented is the fastest" in fast.explain()


def test_a_file_that_is_named_goes_before(home: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.json").write_text(SLOW_SORT)
    (tmp_path / "fast.json").write_text(FAST_SORT)
    with knobs.CALIBRATION.set(str(tmp_path / "slow.json")):
        assert "segmented" not in str(scattered().forward.program)
        assert "segmented" in str(scattered(calibration=tmp_path / "fast.json").forward.program)
        assert calibration.calibration_file(H100) == tmp_path / "slow.json"
    assert "segmented" in str(scattered(calibration=str(tmp_path / "fast.json"), target="cuda-sim").forward.program)


def test_wrong_files(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="cannot be read"):
        scattered(calibration=tmp_path / "none.json")
    with pytest.raises(InvalidProblem, match="the calibration is of 'H100', not of A100"):
        (tmp_path / "h100.json").write_text(SLOW_SORT)
        scattered(calibration=tmp_path / "h100.json", arch="sm_80")
    with pytest.raises(InvalidProblem, match="not the JSON"):
        (tmp_path / "torn.json").write_text(SLOW_SORT[:40])
        scattered(calibration=tmp_path / "torn.json")
    with pytest.raises(InvalidProblem, match="calibration=3: a path"):
        scattered(calibration=3)
    with pytest.raises(InvalidProblem, match="the calibration is of 'H100', not of cpu"):
        scattered(calibration=tmp_path / "h100.json", target="cpu", determinism="run")
    with pytest.raises(InvalidProblem, match="the calibration is of 'cpu', not of H100"):
        (tmp_path / "cpu.json").write_text(calibration_text(CPU, {"sort": 1e-9}))
        scattered(calibration=tmp_path / "cpu.json")
    for constants, said in (
        ({"hot": 1e-9}, "no constant 'hot'"),
        ({"gathered": 1.0}, "between -1e-08"),
        ({"cached": 0.5}, "1"),
    ):
        (tmp_path / "cpu.json").write_text(json.dumps({"format": FORMAT, "device": "cpu", "constants": constants}))
        with pytest.raises(InvalidProblem, match=said):
            scattered(calibration=tmp_path / "cpu.json", target="cpu", determinism="run")


def test_what_stands_for_a_device_in_hand() -> None:
    assert listed_device("NVIDIA H200", "sm_90").name == "H200"
    assert listed_device("NVIDIA H100 80GB HBM3", "sm_90").name == "H100"
    assert listed_device("NVIDIA L40S", "sm_89").name == "L4"  # the first of its arch
    assert listed_device("NVIDIA H100 PCIe in another generation", "sm_80").name == "A100"
    with pytest.raises(Unsupported, match="neither a device 'Quadro' nor the architecture sm_35"):
        listed_device("Quadro", "sm_35")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_compile_finds(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("gradc.cli.calibrate")  # the name in gradc.cli is the command

    def measured(said):
        said("bandwidth 1 in 2 us")
        return H100, calibration_text(H100, fitted(synthetic(), H100))

    monkeypatch.setattr(command, "measured", measured)
    assert cli.main(["calibrate", "-v"]) == 0
    path = home / "calibration" / "h100.json"
    said = capsys.readouterr().out
    assert f"wrote {path}" in said and "bandwidth 1 in 2 us" in said and "listed: 3e+12 (measured)" in said
    constants = json.loads(path.read_text())["constants"]
    assert constants == pytest.approx(GIVEN, rel=1e-6)
    assert gpu_of("sm_90", scattered().options.calibration).bandwidth == pytest.approx(GIVEN["bandwidth"])
    assert cli.main(["calibrate", "--out", str(home / "own.json")]) == 0
    assert (home / "own.json").read_text() == path.read_text() and sorted(p.name for p in home.iterdir()) == [
        "calibration",
        "own.json",
    ]


def test_a_measurement_that_cannot_be_writes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("gradc.cli.calibrate")  # the name in gradc.cli is the command

    def measured(said):
        raise DeviceError("hot: more work does not take longer")

    monkeypatch.setattr(command, "measured", measured)
    assert cli.main(["calibrate"]) == 2
    assert "DeviceError: hot" in capsys.readouterr().err and not list(home.iterdir())


def test_calibrated_constants_are_said_to_be() -> None:
    device = calibrated_by(H100, calibration_text(H100, GIVEN))
    assert isinstance(device, Gpu) and device.sources["hot"] == "calibrated" and device.sources["shared"] == "published"
    assert device_for("sm_90") == H100


# -- a CPU -------------------------------------------------------------------------------------------------------------

HOST = {"partial": 0.7e-9, "sort": 12e-9, "gathered": -0.08e-9, "missed": 0.2e-9, "cached": 1 << 21, "ordered": 0.5e-9}
HOST |= {"skew": 20e-9, "locality": 9e-9}


def of_host(noise: float = 0.0) -> list[host.Sample]:
    """The times of a CPU with these constants, as the model has them, each with 3 us of its own."""
    scale, rng, found = host.Scale(), np.random.default_rng(0), []
    for parts in (1 << 19, 1 << 20, 1 << 21):
        found.append(host.Sample("fold", parts, 3e-6 + parts * HOST["partial"], 64, parts >> 7))
    for width, result, rows in itertools.product(scale.widths, scale.results, scale.rows):
        far = HOST["missed"] * {0: 0, 1: 1 / 3, 2: 2 / 3, 3: 2 / 3}.get(result // HOST["cached"], 1)
        each = HOST["sort"] + width * (HOST["gathered"] - far)
        found.append(host.Sample("sort", rows, 3e-6 - 4e-3 + rows * each, width, result))
        if result in scale.results[:2]:
            found.append(host.Sample("ordered", rows, 3e-6 - 4e-3 + rows * HOST["ordered"], width, result))
        for what, results, skew, near in (("skewed", scale.skewed, 0.2, 0.0), ("near", scale.near, 0.0, 0.9)):
            if result in results:
                more = each + skew * HOST["skew"] - near * HOST["locality"]
                found.append(host.Sample(what, rows, 3e-6 - 4e-3 + rows * more, width, result, skew, near))
    return [replace(s, seconds=s.seconds * (1 + noise * rng.uniform(-1, 1))) for s in found]


def test_constants_of_a_cpu_come_back() -> None:
    assert host.fitted(of_host()) == pytest.approx(HOST, rel=1e-6)
    found = host.fitted(of_host(noise=0.01))
    assert found["cached"] == HOST["cached"]
    for name, allowed in (("partial", 0.05), ("sort", 0.1), ("missed", 0.2)):
        assert found[name] == pytest.approx(HOST[name], rel=allowed), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: replace(s, seconds=1e-3) if s.what == "fold" else s, "fold: more work does not take longer"),
        (lambda s: replace(s, seconds=-s.seconds) if s.what == "sort" else s, "sort was measured as -"),
        (lambda s: replace(s, seconds=s.seconds * 100) if s.what == "fold" else s, "partial was measured as 7e-08"),
    ],
)
def test_times_that_no_cpu_has(change, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        host.fitted([change(s) for s in of_host()])


SMALL = host.Scale(
    rows=(2000, 4000),
    widths=(4, 8),
    results=(64, 128, 4096),
    folded=(64, 128),
    chunked=256,
    skewed=(64,),
    near=(128, 4096),
)


def test_every_experiment_of_a_cpu_runs() -> None:
    found = list(host.measure(SMALL))
    laws = ("sort", "ordered", "skewed", "near")
    assert {(s.what, s.width) for s in found} == {("fold", 8), *itertools.product(laws, SMALL.widths)}
    assert min(s.skew for s in found if s.what == "skewed") > 0.1
    assert min(s.locality for s in found if s.what == "near" and s.result == 4096) > 0.5
    folds = [s.amount for s in found if s.what == "fold"]
    assert folds[1] == 2 * folds[0] and all(math.isfinite(s.seconds) for s in found)


def test_the_command_writes_what_compile_for_a_cpu_finds(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "measure", of_host)
    threads = pool.num_threads()
    assert cli.main(["calibrate", "--target", "cpu", "-v"]) == 0
    assert pool.num_threads() == threads
    (path,) = (home / "calibration").iterdir()
    assert path.name.startswith("cpu-") and path == calibration.calibration_file(CPU, cpu_model())
    said = capsys.readouterr().out
    assert f"wrote {path}" in said and "sort" in said and "listed: 1.1e-08" in said
    assert json.loads(path.read_text())["constants"] == pytest.approx(HOST, rel=1e-3)
    options = scattered(target="cpu", determinism="run").options
    assert options.calibration == path.read_text() and cpu_of(options.calibration).sort == pytest.approx(12e-9)
    assert scattered(target="numpy", determinism="run").options.calibration is None
    assert scattered().options.calibration is None  # a GPU has its own
    (home / "h100.json").write_text(SLOW_SORT)
    with knobs.CALIBRATION.set(str(home / "h100.json")):  # it is a GPU's: a CPU has its own
        assert scattered(target="cpu", determinism="run").options.calibration == path.read_text()
        assert scattered(target="numpy", determinism="run").options.calibration is None
        assert scattered().options.calibration == SLOW_SORT
        capsys.readouterr()
        assert cli.main(["calibrate", "--target", "cpu"]) == 2 and (home / "h100.json").read_text() == SLOW_SORT
        assert "which GRADC_CALIBRATION names, is not of cpu" in capsys.readouterr().err
        assert cli.main(["calibrate", "--target", "cpu", "-o", str(home / "other.json")]) == 0
    (home / "calibration" / "h100.json").write_text(FAST_SORT)
    with knobs.CALIBRATION.set(str(path)):  # a CPU's: a GPU has its own
        assert scattered().options.calibration == FAST_SORT
    assert cli.main(["calibrate", "--target", "cpu", "--device", "1"]) == 2


# -- the kernels, on the simulator -------------------------------------------------------------------------------------


def test_every_kernel_runs_clean_and_the_whole_way_gives_the_constants() -> None:
    bench = gpu_dry.ReckonedBench(check=True)
    found = fitted(list(calibrate.measure(bench, gpu_dry.SMALL, gpu_dry.SCALE)), gpu_dry.SMALL)
    assert found == pytest.approx(gpu_dry.CONSTANTS, rel=1e-5)


def test_kernels_do_what_they_are_timed_for() -> None:
    device = Simulator(calibrate.text(), check=True)

    def run(function: str, *args, written=(0,), blocks=3):
        spans = []
        for a in args:
            if isinstance(a, np.ndarray):
                memory = device.memory(a.nbytes)
                device.upload(memory.address, a)
                spans.append((Span(memory.address, a.size, a.dtype), memory))
            else:
                spans.append((a, None))
        device.launch(
            f"gradc_calibrate_{function}", blocks, 32 if function == "spin" else 256, [s for s, _ in spans], written
        )
        return [device.read(s) for s, memory in spans if memory is not None]

    (table,) = run("coalesced", np.zeros(64, np.float32), 64, 6400)
    assert (table == 100).all()
    (table,) = run("scattered", np.zeros(4096, np.float32), 4096, 10_000)
    assert table.sum() == 10_000 and np.unique(np.nonzero(table)[0] // 32).size == 128, "every line is reached"
    (table,) = run("vectors", np.zeros(256, np.float32), 256, 640)
    assert (table == 10).all()
    (row,) = run("hot", np.zeros(128, np.float32), 37)
    assert (row == 37).all()
    source, target = run("copy", np.arange(4000, dtype=np.uint32), np.zeros(4000, np.uint32), 1000, 2, written=(1,))
    assert np.array_equal(source, target)
    _, word = run("read", np.arange(4000, dtype=np.uint32), np.full(1, 9, np.uint32), 1000, written=(1,))
    assert word[0] == 9
    x = 1
    for _ in range(1000):
        x = (x * 1664525 + 1013904223) % 2**32
    assert run("spin", np.zeros(1, np.uint32), 1000, blocks=1)[0][0] == x


def test_the_clock_of_a_device() -> None:
    """Real events, if only the simulator's: a median of several, after one that is not counted; memory goes back."""
    bench = calibrate.Bench(Simulator(calibrate.text()))
    table, turns = bench.memory(1 << 16, np.float32), []

    def adds(count: int) -> float:
        return bench.seconds(
            lambda: bench.launch("gradc_calibrate_coalesced", 4, 256, [table, 1 << 16, count], (0,)),
            lambda: turns.append(count),
        )

    assert adds(1 << 12) > 0 and adds(1 << 17) > 0
    assert turns == [1 << 12] * (calibrate.REPEATS + 1) + [1 << 17] * (calibrate.REPEATS + 1)
    bench.release()
    assert len(bench._kept) == 1


def test_kernels_of_every_architecture_do_not_spill() -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    from gradc.runtime.cuda.nvrtc import compile_cuda

    for arch in ("sm_80", "sm_90", "sm_100"):
        made = compile_cuda(calibrate.text(), arch=arch, spills="error")
        assert ("red.relaxed.gpu.global.add.v4.f32" in made.ptx) == (arch != "sm_80")


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from gradc.runtime.cuda import gpu

    if gpu.count():
        pytest.skip("there is one here")
    assert cli.main(["calibrate"]) == 2
    assert "NoDevice" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "asked"), [("V100", False), ("H100", True)])
def test_what_torch_cannot_run_leaves_what_was_measured(
    name: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    command = importlib.import_module("gradc.cli.calibrate")
    from gradc.torch import library_rates

    gpu = gpu_of(name)
    calls: list[Gpu] = []
    said: list[str] = []

    def rates(device: Gpu) -> dict[str, float]:
        calls.append(device)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library_rates, "library_rates", rates)
    text = calibration_text(gpu, {"bandwidth": 1e12})
    assert command._with_torch(gpu, text, said.append) == text
    assert bool(calls) is asked and ("CUDNN_STATUS_NOT_INITIALIZED" in "".join(said)) is asked


def test_a_processor_has_the_file_that_comes_with_gradc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its family and model, whoever sells it; the user's own goes before, and ``"none"`` reads neither."""
    path = calibration.measured_file(CPU, "AMD EPYC family 25 model 17")
    assert path == calibration.measured_file(CPU, "AMD EPYC 9654 96-Core Processor family 25 model 17")
    monkeypatch.setattr("gradc.module.options.cpu_model", lambda: "AMD EPYC 9654 96-Core Processor family 25 model 17")
    chosen = lambda **options: scattered(target="cpu", determinism="run", **options).options.calibration
    assert chosen() == path.read_text() and cpu_of(chosen()) != CPU
    assert chosen(calibration="none") is None and scattered(target="cuda-sim").options.calibration is None
    own = calibration.calibration_file(CPU, "AMD EPYC 9654 96-Core Processor family 25 model 17")
    own.parent.mkdir()
    own.write_text(calibration_text(CPU, HOST))
    assert chosen() == own.read_text()
    monkeypatch.setattr("gradc.module.options.cpu_model", lambda: "a processor that nobody measured")
    assert chosen() is None


def test_a_module_with_constants_of_its_own_is_compiled_again_with_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the second machine is; another target reads its own."""
    here = calibration.measured_file(CPU, "family 25 model 17")
    monkeypatch.setattr("gradc.module.options.cpu_model", lambda: "AMD EPYC family 25 model 17")
    module = scattered(target="cpu", determinism="run")
    assert "with constants of a calibration:" in module.explain()
    module.save(home / "module.gradc")
    with knobs.CALIBRATION.set("none"):
        again = gradc.compile(module.graph, target="cpu", **module.options.given())
        assert again.options == module.options and str(again.forward.program) == str(module.forward.program)
        settings = lambda target=None, **options: Settings({}, (), target, {}, options, progress=False)
        strict = compiled(str(home / "module.gradc"), settings(numerics="strict"))
        assert strict.options.calibration == here.read_text() and strict.options.numerics == "strict"
        for target in ("numpy", "cuda-sim"):  # of a GPU its constants are not
            assert compiled(str(home / "module.gradc"), settings(target=target)).options.calibration is None
    with pytest.raises(InvalidProblem, match="the calibration is of 'H100', not of cpu"):
        scattered(target="cpu", determinism="run", calibration=SLOW_SORT)


def test_doctor_says_whose_constants_decide(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradc.runtime.host.toolchain.cpu_model", lambda: "AMD EPYC family 25 model 17")
    said = lambda: next(_constants()).text
    assert said().endswith(f"model 17: {calibration.measured_file(CPU, 'family 25 model 17')}")
    own = calibration.calibration_file(CPU, "AMD EPYC family 25 model 17")
    own.parent.mkdir()
    own.write_text(calibration_text(CPU, HOST))
    assert said().endswith(f": {own}")
    with knobs.CALIBRATION.set("none"):
        assert said().endswith(": those listed for any CPU")


@pytest.mark.parametrize("path", sorted(calibration.MEASURED.iterdir()), ids=lambda path: path.stem)
def test_files_that_come_with_gradc_hold_every_constant(path: Path) -> None:
    device = calibrated_by(CPU, path.read_text(), path)
    assert set(device.sources) == set(CPU_CONSTANTS) - {"bandwidth"} and path == calibration.measured_file(
        CPU, path.stem.removeprefix("cpu-").replace("-", " ")
    )
