"""The demo: a quick run of the whole story, and what it claims about its models, one claim at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest

from gradc.api import parse
from gradc.demo import report, train
from gradc.demo.corpus import Corpus
from gradc.demo.model import BETA1, BETA2, CONTEXT, EPSILON, VARIANTS, WIDTH, initial_values
from gradc.interp import run_program
from gradc.ir.types import DTYPES

VOCABULARY = 211
NAMES = [variant.name for variant in VARIANTS]


@pytest.fixture(scope="module")
def unigram() -> np.ndarray:
    weights = 1 / np.arange(1, VOCABULARY + 1)
    return weights / weights.sum()


@pytest.fixture(scope="module")
def trainees(unigram) -> dict[str, train.Trainee]:
    return {variant.name: train.trainee(variant, unigram) for variant in VARIANTS}


def batch(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, (size, CONTEXT)), random.integers(0, VOCABULARY, size)


# -- the story ---------------------------------------------------------------------------------------------------------


def test_quick_run_tells_the_whole_story(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(report.TERMINAL))
    monkeypatch.chdir(tmp_path)
    assert train.main(quick=True) == 0
    told = capsys.readouterr().out
    parts = [
        "written once",
        "20,000 to learn from",
        "graph @frozen_codes",
        "return d.scale=",
        "After sink_dequant",
        "none is left",
        "-> segmented",
        "module frozen_codes on cpu",
        "The dump lies in gradc-demo",
        "running loss",
        "ms per step",
        "trigram",
        "Verdict: after 60 steps the losses",
        "Total:",
    ]
    places = [told.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), dict(zip(parts, places, strict=True))
    assert max(map(len, told.splitlines())) <= report.TERMINAL
    folder = tmp_path / "gradc-demo"
    assert {p.name for p in folder.iterdir()} == {
        "report.md",
        "report.html",
        "index.html",
        "losses.svg",
        "backward-before.gir",
        "backward-after.gir",
        "float",
        "fake-quantized",
        "frozen-int8",
    }
    for text in ((folder / "report.md").read_text(), (folder / "report.html").read_text()):
        assert all(part in text for part in ("Verdict", "graph @frozen_codes", "trigram", "segmented"))
    xml.etree.ElementTree.parse(folder / "losses.svg")
    for name in ("backward-before.gir", "backward-after.gir", "float/04-joint.gir"):
        text = (folder / name).read_text().strip()
        assert str(parse(text)) == text
    dumped = folder / "frozen-int8"
    assert '<a href="frozen-int8/index.html">' in (folder / "report.html").read_text()
    assert "(frozen-int8/index.html)" in (folder / "report.md").read_text()
    assert (
        (dumped / "index.html").exists()
        and (dumped / "explain.txt").exists()
        and list((dumped / "kernels").glob("*.c"))
    )


def test_losses_go_down(unigram):
    """Trained on one batch over and over, every variant learns it."""
    tokens, targets = batch(64)
    for variant in VARIANTS:
        learner = train.trainee(variant, unigram)
        for number in range(1, 31):
            learner.step(tokens, targets, number, 0.01)
        assert learner.losses[-1] < 0.5 * learner.losses[0], variant.name


def test_a_model_that_learned_nothing_fails(trainees, capsys):
    random = np.random.default_rng(0)
    words = tuple(map(str, range(VOCABULARY)))
    text = Corpus(words, random.integers(0, VOCABULARY, 5000), random.integers(0, VOCABULARY, 500))
    passed, baselines = train.measure(report.Report("untrained"), list(trainees.values()), text, train.Plan(1), [])
    assert not passed and list(baselines) == ["unigram", "trigram"]
    assert "Verdict: FAILED" in capsys.readouterr().out
    for steps in (
        train.QUICK_STEPS,
        3,
    ):  # as a quick run is judged: no loss has moved, and only a run of fewer steps is let go
        plan = train.Plan(steps, 128, 512, slice=(5000, VOCABULARY))
        start = train.on_training_text(list(trainees.values()), text, plan)
        passed, _ = train.measure(report.Report("untrained"), list(trainees.values()), text, plan, start)
        assert passed == (steps < train.QUICK_STEPS)
        assert ("Verdict: FAILED" in capsys.readouterr().out) == (not passed)


def test_the_verdict_names_each_variant_by_what_it_is(trainees, capsys, monkeypatch):
    """The rounded table and the frozen codes cost differently, and each has its own figure."""
    losses = {"float": np.log(50), "fake-quantized": np.log(50.5), "frozen int8": np.log(64)}
    monkeypatch.setattr(train.Trainee, "loss", lambda self, *_: losses[self.variant.name])
    random = np.random.default_rng(0)
    text = Corpus(
        tuple(map(str, range(VOCABULARY))), random.integers(0, VOCABULARY, 5000), random.integers(0, VOCABULARY, 500)
    )
    passed, _ = train.measure(report.Report("made up"), list(trainees.values()), text, train.Plan(500), [])
    told = " ".join(capsys.readouterr().out.split())
    costs = (
        "rounded to int8 in every step while it is learned costs +1.0 % of perplexity, "
        "and int8 codes that never change, with learned scales, +28.0 %"
    )
    assert passed and costs in told


def test_a_wrong_number_of_steps_is_told(tmp_path):
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "gradc.demo", "--steps", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 2 and "--steps 0: 1 at least" in done.stderr and not list(tmp_path.iterdir())


def test_long_lines_are_folded_without_loss():
    line = "  %1: f32[B,6,64] = embedding " + ", ".join(f"%operand{i}" for i in range(40))
    folded = report.fold(line).splitlines()
    assert max(map(len, folded)) <= report.TERMINAL and folded[1].startswith(" " * 8)
    assert " ".join(" ".join(folded).split()) == " ".join(line.split())


# -- the facts ---------------------------------------------------------------------------------------------------------


def test_no_float_of_the_table_s_size_is_made(trainees):
    """The learnable-scale fact on the demo's own model: neither forward nor backward holds an f32 [V,D]."""
    frozen = trainees["frozen int8"]
    for executable in frozen.module.executables.values():
        held = [
            b.name
            for b in executable.program.buffers
            if b.type.dtype is DTYPES["f32"] and b.type.shape == (VOCABULARY, WIDTH)
        ]
        assert not held, f"{executable.program.name} holds {held}"
    assert len(train.dense(train.derivative(frozen.module), VOCABULARY)) >= 4, "as calculus gives it, there are some"
    assert not train.dense(frozen.module.stages["tidy.fold"].result, VOCABULARY)


@pytest.mark.parametrize("name", NAMES)
def test_interpreter_runs_the_scheduled_programs(trainees, name):
    each = trainees[name]
    tokens, targets = batch(10)
    inputs = {"tokens": tokens, "targets": targets, **each.constants, **each.values}
    loss, residuals = each.module.forward(**inputs)
    gradients = each.module.backward(residuals, np.float32(1))
    dims = {"B": len(targets)}
    forward = run_program(each.module.forward.program, inputs, dims)
    np.testing.assert_allclose(forward["loss"], loss, rtol=2e-6)
    kept = {n: forward.get(n, inputs.get(n)) for n in each.module.backward.inputs}
    backward = run_program(each.module.backward.program, {**kept, "d.loss": np.float32(1)}, dims)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(
            backward[f"d.{key}"], gradient, rtol=2e-5, atol=2e-6 * np.abs(gradient).max(), err_msg=key
        )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_torch_s(trainees, name):
    torch = pytest.importorskip("torch", reason="torch is not installed: its gradients are the oracle")
    each = trainees[name]
    tokens, targets = batch(24, seed=1)
    if "scale" in each.values:  # smaller scales, so that some entries of a trained table are clamped
        each = train.trainee(each.variant, np.full(VOCABULARY, 1 / VOCABULARY))
        each.values["scale"] *= np.float32(0.9)
    loss, residuals = each.module.forward(tokens=tokens, targets=targets, **each.constants, **each.values)
    gradients = each.module.backward(residuals, np.float32(1))
    wide = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in each.values.items()}
    if name == "float":
        table = wide["table"]
    elif name == "frozen int8":
        table = torch.tensor(each.constants["codes"]).double() * wide["scale"]
    else:
        table = fake_quantized(torch, wide["table"], wide["scale"], each.values)
    functional = torch.nn.functional
    x = functional.embedding(torch.tensor(tokens), table).reshape(len(targets), -1)
    h = functional.gelu(functional.linear(x, wide["w1"], wide["b1"]))
    h = functional.layer_norm(h, h.shape[1:], wide["gamma"], wide["beta"])
    expected = functional.cross_entropy(functional.linear(h, wide["w2"], wide["b2"]), torch.tensor(targets))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    assert list(gradients) == list(wide)
    for key, gradient in gradients.items():
        right = wide[key].grad.numpy()
        np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-5 * np.abs(right).max(), err_msg=key)


def fake_quantized(torch, table, scale, values):
    """round and clamp forward; backward the identity inside the range: d/dscale is code - table/scale there, code
    outside.
    """
    codes = np.rint(values["table"] / values["scale"])  # in f32, as the kernel rounds
    inside = torch.tensor(np.abs(codes) <= 127)
    assert not inside.all(), "a test of the clamp too"
    codes = torch.tensor(np.clip(codes, -127, 127)).double()
    ratio = torch.where(inside, table / scale, codes)
    return scale * (ratio + (codes - ratio).detach())


@pytest.mark.parametrize("name", NAMES)
def test_optimiser_is_adam_in_place(unigram, name):
    each = train.trainee(next(v for v in VARIANTS if v.name == name), unigram)
    arrays = {
        **{f"parameters.{n}": a for n, a in each.values.items()},
        **{f"mean.{n}": a for n, a in each.means.items()},
    }
    arrays |= {f"square.{n}": a for n, a in each.squares.items()}
    at = {n: a.ctypes.data for n, a in arrays.items()}
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    for number in range(1, 4):
        tokens, targets = batch(16, seed=number)
        _, residuals = each.module.forward(tokens=tokens, targets=targets, **each.constants, **each.values)
        gradients = each.module.backward(residuals, np.float32(1))
        for n, g in gradients.items():
            m = wide[f"mean.{n}"] = BETA1 * wide[f"mean.{n}"] + (1 - BETA1) * np.float64(g)
            s = wide[f"square.{n}"] = BETA2 * wide[f"square.{n}"] + (1 - BETA2) * np.float64(g) ** 2
            wide[f"parameters.{n}"] -= (
                0.01 * each.rates[n] * (m / (1 - BETA1**number)) / (np.sqrt(s / (1 - BETA2**number)) + EPSILON)
            )
        each.step(tokens, targets, number, 0.01)
    after = {
        **{f"parameters.{n}": a for n, a in each.values.items()},
        **{f"mean.{n}": a for n, a in each.means.items()},
    }
    after |= {f"square.{n}": a for n, a in each.squares.items()}
    for n, a in after.items():
        assert a is arrays[n] and a.ctypes.data == at[n], f"{n} moved to other memory"
        np.testing.assert_allclose(a, wide[n], rtol=1e-5, atol=1e-6 * np.abs(wide[n]).max(), err_msg=n)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_size_run_through_one_module(trainees, name):
    tokens, targets = batch(77, seed=3)
    whole = trainees[name].loss(tokens, targets, 77)
    for size in (1, 7, 64, 1000):
        assert trainees[name].loss(tokens, targets, size) == pytest.approx(whole, rel=1e-5)


def test_codes_are_the_table_rounded(unigram):
    values = initial_values(unigram)
    assert (
        values["codes"].dtype == np.int8 and np.abs(values["codes"].astype(int)).max(1).tolist() == [127] * VOCABULARY
    )
    assert np.abs(values["codes"] * values["scale"] - values["table"]).max() <= 0.5001 * values["scale"].max()
    again = initial_values(unigram)
    assert all((again[n] == v).all() for n, v in values.items())


@pytest.mark.parametrize("given, width", [("80", 80), ("60", 60), ("20", 60), ("118", 116), ("200", 116)])
def test_what_it_prints_fits_the_terminal(
    given: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", given)
    told = report.Report("demo")
    told.heading("The module")
    told.say("word " * 50)
    told.link("All stages are in", Path("folder"), "report.md")
    told.code(
        f"  backward layer_norm_gelu_linear_grad_04530d {'2.1 MB   5%':>24}  {'d.b1: privatized':<34} model.py:36"
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and f"== The module {'=' * (width - 15)}" in lines
    assert sum("model.py:36" in line for line in lines) == 1
