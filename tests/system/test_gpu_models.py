"""The benchmark of whole models on a GPU, at small sizes on the CPU: every model runs, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the benchmark's peer")

from benchmarks import gpu_models  # noqa: E402
from benchmarks.gpu_model_list import MODELS  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_a_loss_and_every_gradient_and_is_the_same_twice(name: str, tmp_path: Path) -> None:
    job = gpu_models.Job(name, "eager", "cpu", True, tmp_path / "lock")
    found = job.results(job.net, job.model.autocast)
    assert found.keys() == {"", *(n for n, _ in job.net.named_parameters())}
    assert all(bool(torch.isfinite(x).all()) for x in found.values()) and float(found[""]) != 0
    assert gpu_models.errors(job.results(job.net, job.model.autocast), found)[:2] == (0.0, 0.0)
    assert all(p.grad is None for p in job.net.parameters())


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.random])
def test_without_dropout_nothing_is_random(name: str, tmp_path: Path) -> None:
    job = gpu_models.Job(name, "eager", "cpu", True, tmp_path / "lock")
    losses = set()
    for seed in range(3):
        torch.manual_seed(seed)
        with job.without_dropout():
            losses.add(float(job.step(job.net, False)))
    assert len(losses) == 1
    again = float(job.step(job.net, False))
    assert again not in losses


def test_a_wrong_gradient_is_called_wrong(tmp_path: Path) -> None:
    job = gpu_models.Job("gpt_block", "gradc", "cpu", True, tmp_path / "lock")
    found = job.results(job.net, True)
    assert job.judged(found)["right"]
    name = next(n for n in found if n)
    said = job.judged({**found, name: found[name] * 1.1})
    assert not said["right"] and said["worst"] == name and said["gradient_error"] == pytest.approx(0.1, rel=0.1)
    assert not job.judged({n: x for n, x in found.items() if n != name})["right"]
    assert not job.judged({**found, name: found[name] * float("nan")})["right"]


def test_engines_are_measured_and_a_failure_stays_in_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models.json"
    asked = ["gpt_block", "--tiny", "--device", "cpu", "--workers", "1", "--out", str(out), "--engines", "eager"]
    assert gpu_models.main(asked) == 0
    row = json.loads(out.read_text())["gpt_block"]["eager"]
    assert row["step_ms"] > 0 and row["flops"] > 0 and "right" not in row
    assert "| gpt_block | eager |" in capsys.readouterr().out
    for wrong, why in (("gpt", "no model 'gpt'"), ("gpt_block:fast", "no engine 'fast'")):
        with pytest.raises(SystemExit):
            gpu_models.main([wrong])
        assert why in capsys.readouterr().err
    alone = ["gpt_block:eager", "--tiny", "--device", "cpu", "--workers", "1", "--out", str(out)]
    assert gpu_models.main(alone) == 0 and list(json.loads(out.read_text())["gpt_block"]) == ["eager"]
    if not torch.cuda.is_available():
        assert gpu_models.main(["gpt_block", "--tiny", "--workers", "1", "--engines", "eager", "--out", str(out)]) == 1
        row = json.loads(out.read_text())["gpt_block"]["eager"]
        assert row["failed"] and "step_ms" not in row and "- gpt_block, eager: " in capsys.readouterr().out
