"""Decorators and nested parameters."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import TypeRuleError
from gradc.ir.types import F32, Type


def test_sizes_that_change_become_dims_once() -> None:
    run = gradc.value_and_grad(lambda p, x: ops.mean(ops.relu(x @ p["w"] + p["b"])))
    rng = np.random.default_rng(0)
    p = {"w": rng.standard_normal((4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
    for batch in (5, 7, 1, 64, 0):
        x = rng.standard_normal((batch, 4)).astype(np.float32)
        value, grads = run(p, x)
        if batch:
            np.testing.assert_allclose(value, np.maximum(x @ p["w"], 0).mean(), rtol=1e-5)
        assert grads.tree["p"]["w"].shape == (4, 3) and list(grads) == ["p.w", "p.b"]
    (modules,) = run.traced._modules.values()
    assert len(modules) == 2  # the first sizes, then any batch


def test_lists_and_tuples_keep_their_kind() -> None:
    run = gradc.value_and_grad(lambda p, x: ops.sum(p[0] * x))
    x = np.ones(3)
    for tree, kind in (([np.ones(3)], list), ((np.ones(3),), tuple)):
        _, grads = run(tree, x)
        assert isinstance(grads.tree["p"], kind)


def test_gradients_of_a_traced_graph_nest() -> None:
    graph = gradc.trace(
        lambda params, x: ops.sum(x @ params["l1"]["w"]), params={"l1": {"w": "f32[4,3]"}}, x="f32[N,4]"
    )
    module = gradc.compile(graph, wrt=["params"])
    _, residuals = module.forward(params={"l1": {"w": np.ones((4, 3), np.float32)}}, x=np.ones((2, 4), np.float32))
    assert module.backward(residuals, np.float32(1)).tree["params"]["l1"]["w"].shape == (4, 3)


@pytest.mark.parametrize("tree", [{"a.b": np.ones(3), "a": {"b": np.ones(3)}}, {"0": np.ones(3), 0: np.ones(3)}])
def test_names_that_collide_are_refused(tree: object) -> None:
    with pytest.raises(TypeRuleError, match="two leaves are called"):
        gradc.value_and_grad(lambda p: ops.sum(next(iter(p.values()))))(tree)


def test_a_captured_array_is_a_constant() -> None:
    big = np.arange(200, dtype=np.float32)
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x * big), x="f32[200]"))
    big[:] = 0
    assert module(x=np.ones(200, np.float32)) == 19900


@pytest.mark.parametrize(
    "attempt", [lambda x: float(x), lambda x: len(x), lambda x: x.__setitem__(0, 1.0), lambda x: 1 if x else 0]
)
def test_what_needs_data_says_so(attempt: object) -> None:
    with pytest.raises(TypeRuleError, match="traced f32"):
        gradc.trace(attempt, x="f32[N]")  # type: ignore[arg-type]


def test_numpys_elementwise_functions_are_the_ops() -> None:
    x = np.linspace(-1, 1, 5).astype(np.float32)
    graph = gradc.trace(lambda x: np.sin(x) * np.float32(2) - np.maximum(x, 0.5) / np.ones(5, np.float32), x="f32[5]")
    same = gradc.trace(lambda x: ops.sin(x) * 2.0 - ops.maximum(x, 0.5) / np.ones(5, np.float32), x="f32[5]")
    assert graph == same
    np.testing.assert_allclose(gradc.compile(graph)(x=x), np.sin(x) * 2 - np.maximum(x, 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (np.sum, r"numpy.sum was given a traced f32\[3\]; ops.sum can be traced"),
        (lambda x: np.concatenate([x, x]), "ops.concat can be traced"),
        (np.cbrt, "numpy.cbrt cannot be traced"),
        (np.add.reduce, "numpy.add.reduce cannot be traced"),
        (lambda x: np.exp(x, out=np.ones(3)), r"numpy.exp\(out=\) cannot be traced"),
        (np.asarray, "has no data yet"),
    ],
)
def test_what_numpy_cannot_trace_says_so(fn, message) -> None:
    with pytest.raises(TypeRuleError, match=message):
        gradc.trace(lambda x: fn(x), x="f32[3]")


def test_a_parameter_that_is_none_is_not_there() -> None:
    def loss(layer):
        y = layer["w"] * 2.0
        return ops.sum(y if layer["b"] is None else y + layer["b"])

    step = gradc.value_and_grad(loss)
    w = np.ones(3, np.float32)
    value, gradients = step({"w": w, "b": None})
    assert float(value) == 6 and gradients.tree["layer"]["b"] is None
    np.testing.assert_array_equal(gradients.tree["layer"]["w"], [2, 2, 2])


def test_inputs_have_names() -> None:
    with pytest.raises(TypeRuleError, match=r"\(\*xs\): inputs have names"):
        gradc.trace(lambda *xs: xs[0], xs="f32[3]")


Rows = Annotated[gradc.Node, "rows", "f32[N,4]"]


@gradc.graph
def _scored(x: Rows, w: Annotated[gradc.Node, Type(F32, (4,))], b: "f32[4]"):  # noqa: F821, UP037
    return ((x * w + b) ** 2.0).sum()


def test_types_are_annotated_so_that_type_checkers_accept_them() -> None:
    assert [str(node.type) for node in _scored.graph.inputs] == ["f32[N,4]", "f32[4]", "f32[4]"]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert _scored(x=x, w=np.ones(4, np.float32), b=np.zeros(4, np.float32)) == np.square(x).sum()


def test_annotations_that_are_no_types_wait_for_the_first_call() -> None:
    @gradc.graph
    def double(x: Annotated[int, "how many"], y: "NoSuchName" = None):  # noqa: F821, UP037
        return x * 2

    assert double(x=np.float32(3)) == 6
