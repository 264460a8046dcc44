"""residuals="borrow": backward reads outputs of forward where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.errors import InvalidProblem

torch = pytest.importorskip("torch")

from gradc.torch.function import Function  # noqa: E402

GRAPH = gradc.trace(lambda x: ops.softmax(x * 2), x="f32[N,64]")


def compiled(target: str = "cpu", **options: Any) -> gradc.Module:
    return gradc.compile(GRAPH, wrt=["x"], target=target, residuals="borrow", **options)


def rows(n: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 64)).astype(np.float32)


def gradient(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """By torch in f64."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    torch.softmax(leaf * 2, -1).backward(torch.tensor(dy, dtype=torch.float64))
    return np.asarray(leaf.grad)


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
def test_softmax_keeps_its_result_alone(target: str) -> None:
    module = compiled(target)
    assert [(r.why, r.output) for r in module.residuals] == [("output", "y")]
    assert list(module.forward.outputs) == ["y"]  # written once
    x, dy = rows(), rows(seed=1)
    y, residuals = module.forward(x=x)
    assert residuals.nbytes == 0 and next(iter(residuals.arrays.values())) is y
    np.testing.assert_allclose(module.backward(residuals, dy)["x"], gradient(x, dy), rtol=0, atol=1e-6)


def test_by_default_a_module_keeps_no_output() -> None:
    module = gradc.compile(GRAPH, wrt=["x"], target="numpy")
    assert not any(r.output for r in module.residuals)
    y, residuals = module.forward(x=rows())
    want = module.backward(residuals, rows(seed=1))["x"].copy()
    y[:] = 0
    np.testing.assert_array_equal(module.backward(residuals, rows(seed=1))["x"], want)


def test_no_bytes_are_counted_for_it() -> None:
    module = compiled("numpy", memory_budget=0, hints={"N": 8})
    assert [r.output for r in module.residuals] == ["y"] and module.memory(N=8).residuals == 0
    assert module.memory(N=8).outputs == 8 * 64 * 4


def test_of_an_output_and_its_reshape_one_is_borrowed() -> None:
    def model(x: Any) -> Any:
        y = ops.exp(x)
        return {"flat": ops.reshape(y, (12,)), "y": y}

    module = gradc.compile(gradc.trace(model, x="f32[3,4]"), wrt=["x"], target="cpu", residuals="borrow")
    (kept,) = module.residuals
    assert kept.output == "y"
    x = rows()[:3, :4].copy()
    values, residuals = module.forward(x=x)
    got = module.backward(residuals, np.ones(12, np.float32), None)["x"]
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=1e-6)
    assert values["flat"].shape == (12,)


def test_an_output_of_an_inputs_name() -> None:
    graph = gradc.trace(lambda x: {"x": ops.exp(x)}, x="f32[4]")
    module = gradc.compile(graph, wrt=["x"], target="cpu", residuals="borrow")
    x = rows()[0, :4].copy()
    y, residuals = module.forward(x=x)
    np.testing.assert_allclose(module.backward(residuals, np.ones(4, np.float32))["x"], y, rtol=1e-6)


def test_an_output_that_was_changed_is_an_error() -> None:
    module = compiled()
    y, residuals = module.forward(x=torch.tensor(rows()))
    y.mul_(2)
    with pytest.raises(InvalidProblem, match="the output 'y' was changed in place between forward and backward"):
        module.backward(residuals, torch.ones_like(y))
    with knobs.CHECK_RESIDUALS.set(True):
        array, residuals = module.forward(x=rows())
        array[0, 0] = 2
        with pytest.raises(InvalidProblem, match=r"the output 'y' was changed .*; residuals borrow outputs"):
            module.backward(residuals, rows())


def test_a_saved_module_borrows_what_it_borrowed(tmp_path: Path) -> None:
    module = compiled()
    module.save(tmp_path / "m.gradc")
    loaded = gradc.load_module(tmp_path / "m.gradc")
    assert [(r.name, r.why, r.output) for r in loaded.residuals] == [
        (r.name, r.why, r.output) for r in module.residuals
    ]
    x, dy = rows(), rows(seed=1)
    _, residuals = loaded.forward(x=x)
    np.testing.assert_allclose(loaded.backward(residuals, dy)["x"], gradient(x, dy), rtol=0, atol=1e-6)


def test_autograd_guards_a_borrowed_output() -> None:
    function = Function(GRAPH, "cpu", {"residuals": "borrow"})
    x = torch.tensor(rows(), requires_grad=True)
    dy = torch.tensor(rows(seed=1))
    (y,) = function({}, x)
    y.backward(dy)
    np.testing.assert_allclose(x.grad, gradient(rows(), dy.numpy()), rtol=0, atol=1e-6)
    (y,) = function({}, x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
