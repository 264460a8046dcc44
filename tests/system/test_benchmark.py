"""The runner of ``make bench``, without timing anything: what it checks, says, writes and exits with; its cases."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark compares with PyTorch")

import gradc
from benchmarks import __main__ as bench
from benchmarks import network_cases, performance, worker
from benchmarks.cases import all_cases

CASES = all_cases()
ROOT = Path(bench.__file__).resolve().parents[1]
RIGHT = {"y": {"ours": 1e-7, "torch": 1e-7, "allowed": 4e-6}}
TIMES = {
    "ours_ms": 1.0,
    "eager_ms": 2.0,
    "ratio_eager": 0.5,
    "floor_share": 1.5,
    "spread": 1.0,
    "peak_MB": 3.0,
    "kernels": ["a", "b"],
}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("n-")])
def test_a_case_is_a_graph(name: str) -> None:
    case = CASES[name]
    graph = gradc.trace(case.ours, **case.types)
    assert set(case.wrt) <= set(graph.input_names) == set(case.types)


SMALL = {
    "f32": network_cases.block_case("small", "f32", 2, 5, width=24),
    "bf16": network_cases.block_case("small-bf16", "bf16", 2, 5, width=24),
}


@pytest.mark.parametrize("dtype", SMALL)
def test_results_are_compared_with_torchs(dtype: str) -> None:
    """The value and each gradient; one that is off by a fifth is seen, and so is NaN."""
    case = SMALL[dtype]
    errors = worker.errors(case)
    assert set(errors) == {"y", *case.wrt} and not bench.wrong(errors)
    off = dataclasses.replace(case, ours=lambda **x: case.ours(**x) * 1.2)
    assert set(bench.wrong(worker.errors(off))) >= {"y", "x", "up"}
    nan = dataclasses.replace(case, ours=lambda **x: case.ours(**x) * float("nan"))
    assert set(bench.wrong(worker.errors(nan))) == {"y", *case.wrt}


def test_files_are_named_by_the_processor() -> None:
    for processor, name in (
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cpu-intel-xeon-platinum-8481c-2.json"),
        ("AMD EPYC 7B13 64-Core Processor", "cpu-amd-epyc-7b13-64-core-2.json"),
        ("Neoverse-N1", "cpu-neoverse-n1-2.json"),
        ("", "cpu-unknown-2.json"),
    ):
        assert bench.file_name(processor, 2) == name
    family = {"model name": "AMD EPYC", "cpu family": "25", "model": "1"}
    assert bench.file_name(bench.full_name(family), 2) == "cpu-amd-epyc-family-25-model-1-2.json"
    assert bench.full_name({**family, "model name": "AMD EPYC 7B13"}) == "AMD EPYC 7B13"
    assert bench.full_name({}) == ""


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, found: dict[str, Any], *arguments: str, row: dict[str, Any] = TIMES
) -> int:
    def checked(case: str, threads: int) -> Any:
        if isinstance(found[case], str):
            raise bench.Stopped(found[case])
        return found[case]

    monkeypatch.setattr(bench, "checked", checked)
    monkeypatch.setattr(bench, "measure", lambda case, options, say: say("timing") or dict(row))
    return bench.main([*found, "--peers", "eager", "--threads", "2", "--out", str(out), *arguments])


def test_it_says_where_it_is_and_writes_after_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu-one-2.json"
    assert run(monkeypatch, out, {"c-softmax": RIGHT, "n-attention": RIGHT}) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "[1/2] c-softmax: comparing values and gradients with torch",
        "[1/2] c-softmax: timing",
        "[2/2] n-attention: comparing values and gradients with torch",
        "[2/2] n-attention: timing",
    ]
    assert "geometric means: 0.50 of eager" in said.out
    data = json.loads(out.read_text())
    assert data["machine"]["threads"] == 2 and [row["id"] for row in data["cases"]] == ["c-softmax", "n-attention"]
    # a part that is run again stands in its place, and the others stay
    assert run(monkeypatch, out, {"c-softmax": RIGHT}, row={**TIMES, "ours_ms": 7.0}) == 0
    assert [row["ours_ms"] for row in json.loads(out.read_text())["cases"]] == [7.0, 1.0]


def test_what_is_wrong_is_not_timed_and_what_stops_stops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"x": {"ours": 0.5, "torch": 1e-7, "allowed": 4e-6}, **RIGHT}
    found = {"c-softmax": bad, "n-attention": "the process of ours stopped", "c-xent": RIGHT}
    assert run(monkeypatch, tmp_path / "a.json", found) == 1
    said = capsys.readouterr()
    assert "WRONG: x 5.0e-01 where 4.0e-06 is allowed" in said.out and "the process of ours stopped" in said.out
    assert "wrong results, not timed: c-softmax" in said.err and "[1/3] c-softmax: timing" not in said.err
    rows = {row["id"]: row for row in json.loads((tmp_path / "a.json").read_text())["cases"]}
    assert "ours_ms" not in rows["c-softmax"] and "stopped" in rows["n-attention"] and rows["c-xent"]["ours_ms"] == 1


def test_a_noisy_neighbour_is_told_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = {**TIMES, "peer_beside_over_alone": 1.2}
    for arguments, status in (((), 0), (("--strict",), 1)):
        assert run(monkeypatch, tmp_path / "a.json", {"c-softmax": RIGHT}, *arguments, row=noisy) == status
        said = capsys.readouterr()
        assert "not as fast beside us as alone" in said.err and "DISTURBED" in said.out
    different = {**TIMES, "same_bits": False}
    assert run(monkeypatch, tmp_path / "a.json", {"c-softmax": RIGHT}, row=different) == 1


def test_a_worker_that_stops_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(bench.Stopped, match="the process of eager stopped"):
        bench.Contestant("eager", "c-softmax", 1)
    with pytest.raises(bench.Stopped, match="checks"):
        bench.checked("c-softmax", 1)


def test_the_page_has_every_file_side_by_side(tmp_path: Path) -> None:
    for name, cpu in (("cpu-a-2.json", "A"), ("cpu-b-1.json", "B")):
        bench.written(tmp_path / name, [{"id": "c-softmax", "date": "2026-01-02", **TIMES}], ["eager"], 2, list(CASES))
        data = json.loads((tmp_path / name).read_text())
        data["machine"]["cpu"] = cpu
        (tmp_path / name).write_text(json.dumps(data))
    text = performance.page(performance.results(tmp_path))
    assert "| case | A, 2 threads: eager | compile | B, 2 threads: eager | compile |" in text
    assert "| c-softmax | 0.50 | - | 0.50 | - |" in text
    assert text.count("| c-softmax | 1.00 | 2.00 | - | 1.50 | - | bytes | 3 | - | - | 2026-01-02 |") == 2


def test_the_page_has_models_blocks_and_lookups(tmp_path: Path) -> None:
    """An engine that was not measured, or whose memory was not, is no error; a model without steps has no row."""
    steps = [{"name": "stn", "steps_ms": {"gradc": 2.0, "eager": 4.0, "inductor": 1.0}}, {"name": "gcn"}]
    steps.append({"name": "bert", "steps_ms": {"gradc": 2.0, "eager": 1.0}})
    block = {"format": "int8", "rows": 16, "ms": {"gradc": 1.0, "torchao": 2.0}, "share": 0.5, "MB": {"gradc": 0.25}}
    older = {"format": "nf4", "rows": 1, "ms": {"gradc": 1.0, "dequantise": 4.0}, "share": 0.25}
    times = {"gradc": 1000.0, "floor": 500.0}
    row = {"law": "zipf", "rows": 10_000, "width": 64, "distinct": 7455, "us": {"forward": times, "backward": times}}
    row["share"] = {"forward": 0.5, "backward": 0.5}
    found = {"models-x": {"models": steps}, "quantized_block-x": {"records": {"1": [block, older]}}}
    for name, data in {**found, "lookups-x": {"lookups": [row]}, "models-older": {"models": [{"name": "gcn"}]}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {"cpu": "A"}, **data}))
    text = "\n".join(performance.models(tmp_path) + performance.quantized(tmp_path) + performance.lookups(tmp_path))
    assert "| stn | 2.00 | 4.00 | 1.00 | 0.50 | 2.00 |" in text and "| bert | 2.00 | 1.00 | - | 2.00 | - |" in text
    assert "| geometric mean of 2 | | | | 1.00 | 2.00 of 1 |" in text
    assert "gcn" not in text and "models-older" not in text
    assert "| int8, 16 | 1.0 (0.2) | 2.0 | - | - | - | 0.50 |" in text
    assert "| nf4, 1 | 1.0 | - | - | 4.0 | - | 0.25 |" in text
    assert "| zipf, 10,000 x 64 | 7,455 | 1,000 | 500 | 50 % | 1,000 | 500 | 50 % |" in text


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"floor_share": 2.0, "product_GFLOP_s": 100.0}, "bytes"),
        ({"floor_share": 9.0, "product_GFLOP_s": 75.0}, "products"),
        ({"floor_share": 9.0, "product_GFLOP_s": 74.0}, "instructions"),
        ({"floor_share": 9.0}, "-"),
        ({}, "-"),
    ],
)
def test_a_case_is_bound_by_bytes_products_or_instructions(row: dict[str, float], why: str) -> None:
    assert performance.bound(row, 100.0) == why


def test_the_products_of_a_case_are_counted() -> None:
    """q k^T and its product with v, once, and five products for the gradients; behind a causal mask none."""
    inner = 2 * 4 * 8 * 2048 * 2048 * 64
    for name, least, most in (("n-attention", 7.0, 7.0), ("n-attention-causal", 3.5, 3.9), ("c-softmax", 0.0, 0.0)):
        case = CASES[name]
        module = gradc.compile(gradc.trace(case.ours, **case.types), wrt=case.wrt, target="cpu")
        flops = sum(worker.product_flops(e.program, {}) for e in module.executables.values())
        assert least * inner <= flops <= most * inner
    linear = gradc.compile(gradc.trace(lambda x, w: x @ w, x="f32[N,3]", w="f32[3,4]"), target="numpy")
    assert worker.product_flops(linear.forward.program, {"N": 5}) == 2 * 5 * 3 * 4


def test_the_page_is_what_the_results_say() -> None:
    for path, text in performance.pages(performance.results(ROOT / bench.RESULTS)).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text
