"""A graph's inputs and outputs have the names that a user gives them, those that gradc uses itself included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import autodiff, ops
from gradc.errors import InvalidProblem
from gradc.ir.text import parse

OPTIONS = ("out", "dims", "stream", "workspace", "accumulate")
NAMES = (*OPTIONS, "d", "r", "inputs", "self", "residuals", "name", "assume", "fn", "y", "N", "graph", "target", "wrt")
X = np.array([0.5, 1, 2], np.float32)


def doubled(name: str) -> gradc.Graph:
    call: Any = eval(f"lambda {name}: exp({name}) * 2.0", {"exp": ops.exp})
    return gradc.trace(call, {name: "f32[N]"})


@pytest.mark.parametrize("name", NAMES)
def test_an_input_of_any_name(name: str, tmp_path: Path) -> None:
    graph = doubled(name)
    assert graph.input_names == (name,) and parse(str(graph)) == graph
    module = gradc.compile(graph, wrt=[name], target="numpy")
    module.save(tmp_path / "m.gradc")
    graph.save(tmp_path / "g.gir")
    assert gradc.load(tmp_path / "g.gir") == graph
    for each in (module, gradc.load_module(tmp_path / "m.gradc")):
        y, residuals = each.forward({name: X})
        np.testing.assert_allclose(y, 2 * np.exp(X), rtol=1e-6)
        np.testing.assert_array_equal(each({name: X}), y)
        np.testing.assert_array_equal(each.forward.run({name: X})["y"], y)
        grads = each.backward(residuals, X)
        assert list(grads) == [name]
        np.testing.assert_allclose(grads[name], 2 * X * np.exp(X), rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("method", ["forward", "run", "__call__", "value_and_grad"])
def test_an_option_that_may_be_meant_as_an_input(name: str, method: str) -> None:
    graph = gradc.trace(lambda x: ops.sum(ops.exp(x)), {"x": "f32[N]"})
    graph = parse(str(graph).replace("%x", f"%{name}"))
    module = gradc.compile(graph, wrt=[name], target="numpy")
    call = module.forward.run if method == "run" else getattr(module, method)
    call({name: X})
    try:
        call(**{name: X})  # where it is none of the call's options
    except InvalidProblem as error:
        assert f"graph({{'{name}': ...}})" in str(error)
    else:
        assert (name, method) in {
            ("workspace", "__call__"),
            *(("accumulate", each) for each in ("forward", "__call__", "value_and_grad")),
        }


def test_options_beside_inputs_of_their_names() -> None:
    module = gradc.compile(doubled("out"), target="numpy")
    buffer = np.empty_like(X)
    module({"out": X}, out={"y": buffer})
    np.testing.assert_allclose(buffer, 2 * np.exp(X), rtol=1e-6)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("first", ["d", "r"])
def test_parameters_beneath_a_name_of_ours(first: str, target: str) -> None:
    """``d.y`` is an input and the output is ``y``, whose cotangent is called otherwise; so is a gradient of ``y``."""
    call: Any = eval(f"lambda {first}, y: {{'y': exp({first}['y']) * y * {first}['d']['y']}}", {"exp": ops.exp})
    graph = gradc.trace(call, {first: {"y": "f64[N]", "d": {"y": "f64[N]"}}, "y": "f64[N]"})
    wrt = [f"{first}.y", f"{first}.d.y", "y"]
    assert graph.input_names == tuple(wrt)
    module = gradc.compile(graph, wrt=wrt, target=target)
    a, b, c, dy = (np.random.default_rng(i).normal(size=4) for i in range(4))
    y, residuals = module.forward({first: {"y": a, "d": {"y": b}}, "y": c})
    np.testing.assert_allclose(y, np.exp(a) * b * c, rtol=1e-12)
    grads = module.backward(residuals, dy)
    wanted = (dy * np.exp(a) * b * c, dy * np.exp(a) * c, dy * np.exp(a) * b)
    for name, value in zip(wrt, wanted, strict=True):
        np.testing.assert_allclose(grads[name], value, rtol=1e-12)
    joint = autodiff.differentiate(graph, wrt)
    assert parse(str(joint)) == joint and autodiff.primal_outputs(joint) == ["y"]


def test_outputs_beneath_a_name_of_ours_are_no_gradients() -> None:
    graph = gradc.trace(lambda x: {"d": {"x": ops.exp(x)}, "r": {"x": x * 3.0}}, x="f64[N]")
    assert graph.output_names == ("d.x", "r.x")
    joint = autodiff.differentiate(graph, ["x"])
    assert autodiff.primal_outputs(joint) == ["d.x", "r.x"]
    module = gradc.compile(graph, wrt=["x"], target="numpy")
    x = np.arange(3.0)
    _, residuals = module.forward(x=x)
    grads = module.backward(residuals, np.ones(3), np.ones(3))
    np.testing.assert_allclose(grads["x"], np.exp(x) + 3, rtol=1e-12)


def test_a_decorated_function_of_such_parameters() -> None:
    @gradc.graph
    def scaled(out: Any, name: Any, dims: Any) -> Any:
        return ops.sum(out * name * dims)

    assert scaled(X, X, X) == pytest.approx(float(np.sum(X**3)), rel=1e-6)
    _, grads = gradc.value_and_grad(scaled, wrt=["dims"])(X, X, X)
    np.testing.assert_allclose(grads["dims"], X * X, rtol=1e-6)
