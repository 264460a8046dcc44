"""check: right gradients hold, wrong ones are found and located, and points without a gradient are said to be such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import registry

import gradc
from gradc import ops
from gradc.autodiff import differentiate
from gradc.errors import InvalidProblem, NotDifferentiable
from gradc.ir.graph import Graph
from gradc.ir.node import REGISTRY, Node
from gradc.verify.check import Report, check, slope
from gradc.verify.samples import sample, sizes


def traced(fn: Any, **types: str) -> Graph:
    return gradc.trace(fn, **types)


def verdicts(report: Report) -> set[str]:
    return {f.verdict for f in report.findings}


def with_vjp(graph: Graph, name: str, vjp: Any) -> Graph:
    """The graph with one op's derivative replaced."""
    return registry.with_op(graph, REGISTRY[name], registry.unregistered(REGISTRY[name], vjp=vjp))


def bag(tokens: Node, q: Node, scale: Node, w: Node) -> Node:
    table = ops.dequantize(q, scale, block=(1, 8))
    return (ops.gelu(ops.embedding(tokens, table)) * w).sum()


BAG = {"tokens": "i64[N]", "q": "i8[V,8]", "scale": "f32[V,1]", "w": "f32[8]"}

RIGHT = {
    "bag": (bag, BAG),
    "softmax": (lambda x: ops.softmax(x)[:, 1:], {"x": "f64[N,4]"}),
    "layer_norm": (lambda x, w: ops.layer_norm(x, (4,), w), {"x": "f32[N,4]", "w": "f32[4]"}),
    "several outputs": (lambda x, y: (x * y, ops.exp(y).sum(), ops.gt(x, y)), {"x": "f32[N]", "y": "f32[N]"}),
    "cross_entropy": (lambda x, t: ops.cross_entropy(x, t), {"x": "f32[N,5]", "t": "i64[N]"}),
    "logarithm": (lambda x: ops.log(ops.reshape(x, (-1,))).sum(), {"x": "f32[N,2]"}),
    "matmul bf16": (lambda x, w: x @ w, {"x": "bf16[N,4]", "w": "bf16[4,3]"}),
    "constant": (lambda x: x * 0 + 1, {"x": "f32[N]"}),
    "nothing": (lambda x: x[:0] * 2, {"x": "f32[4]"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_hold(name: str):
    fn, types = RIGHT[name]
    report = check(traced(fn, **types))
    assert report.ok and verdicts(report) == {"ok"}, report
    assert not report.notes


@pytest.mark.parametrize("seed", range(4))
def test_a_kink_nearby_is_stepped_inside_of(seed: int):
    """Among many values some lie within the largest step of zero."""
    report = check(traced(lambda x: ops.relu(x), x="f32[N]"), dims={"N": 2000}, seed=seed)
    assert verdicts(report) == {"ok"}, report


# -- surrogates --------------------------------------------------------------------------------------------------------

SURROGATES = {
    "fake_quantize": (
        lambda x, s: ops.tanh(ops.fake_quantize(x, s, block=(1, 4))),
        {"x": "f32[N,4]", "s": "f32[N,1]"},
        "fake_quantize",
    ),
    "quantize": (
        lambda x, s: ops.dequantize(ops.quantize(x, s, block=(1, 4)), s, block=(1, 4)) * x,
        {"x": "f32[N,4]", "s": "f32[N,1]"},
        "quantize",
    ),
    "padding": (lambda i, x: ops.embedding(i, x, padding_idx=0) ** 2, {"i": "i64[N]", "x": "f64[V,3]"}, "gather"),
    "frequency": (
        lambda i, x: ops.embedding(i, x, scale_grad_by_freq=True) ** 2,
        {"i": "i64[N]", "x": "f64[V,3]"},
        "gather",
    ),
    "both": (
        lambda i, x: ops.embedding(i, x, padding_idx=1, scale_grad_by_freq=True) ** 2,
        {"i": "i64[N]", "x": "f32[V,3]"},
        "gather",
    ),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_are_differentiated_and_the_report_says_so(name: str):
    fn, types, op = SURROGATES[name]
    graph = traced(fn, **types)
    inputs = {"i": np.array([0, 2, 1, 1, 0, 2, 2])} if "i" in types else None
    report = check(graph, [n for n in types if n != "i"], inputs=inputs)
    assert verdicts(report) == {"ok"}, report
    assert f"{op} (1x) was replaced by its surrogate" in str(report)


def test_a_plain_gather_is_its_own_surrogate():
    assert not check(traced(lambda i, x: ops.embedding(i, x), i="i64[N]", x="f32[V,3]"), ["x"]).notes


def test_stop_gradient_is_held():
    report = check(
        traced(lambda x, y: ops.stop_gradient(ops.exp(x)) * x + ops.stop_gradient(y) * y, x="f64[N]", y="f64[N]")
    )
    assert verdicts(report) == {"ok"}, report
    assert "2 values under stop_gradient were held" in str(report)


def test_an_integer_table_moves_if_its_gradient_is_wanted():
    report = check(traced(bag, **BAG), ["q"])
    assert verdicts(report) == {"ok"}, report


# -- wrong gradients ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, dict[str, str], str, Any]] = {
    "factor": (lambda x: ops.tanh(x), {"x": "f32[N,3]"}, "tanh", lambda g, y, x: (g * (1 - y * y) * 1.001,)),
    "sign": (lambda x: ops.sin(x).sum(), {"x": "f32[N]"}, "sin", lambda g, y, x: (-(g * ops.cos(x)),)),
    "operand": (lambda x, y: x * y, {"x": "f32[N]", "y": "f32[N]"}, "mul", lambda g, z, x, y: (g * y, g * y)),
    "one element": (
        lambda x: ops.exp(x),
        {"x": "f64[N]"},
        "exp",
        lambda g, y, x: (ops.where(ops.gt(x, ops.max(x, axis=0, keepdims=True) - 1e-9), g * y * 2, g * y),),
    ),
    "kink": (
        lambda x: ops.relu(x),
        {"x": "f32[N]"},
        "relu",
        lambda g, y, x: (g * ops.where(ops.gt(x, 0.0 * x), x * 0 + 1.01, x * 0),),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_found(name: str):
    fn, types, op, vjp = WRONG[name]
    graph = traced(fn, **types)
    assert check(graph).ok
    assert REGISTRY[op].vjp is not None
    report = check(with_vjp(graph, op, vjp))
    assert not report.ok, report
    assert {f.oracle for f in report.findings if f.verdict == "FAILED"} >= {"single elements"}, report
    assert "FAILED" in str(report)


def test_the_report_names_the_element_and_both_numbers():
    graph = traced(lambda x: ops.exp(x), x="f64[N]")
    wrong = with_vjp(graph, "exp", lambda g, y, x: (ops.where(ops.gt(x, 2 + 0 * x), g * y * 2, g * y),))
    report = check(wrong, inputs={"x": np.array([0.5, -1.0, 3.0, 0.0])})
    (element,) = [f for f in report.findings if f.oracle == "single elements"]
    assert element.where.startswith("[2] differences say ") and ", the gradient " in element.where


def test_wrong_kernels_are_found():
    module = gradc.compile(traced(lambda x, w: ops.tanh(x @ w), x="f32[N,4]", w="f32[4,3]"), wrt=["w"])
    assert check(module).ok
    backward = module._backward.run_bound

    def wrong(*args, **kwargs):
        found, dims = backward(*args, **kwargs)
        return {name: array * np.float32(1.001) for name, array in found.items()}, dims

    module._backward.run_bound = wrong
    report = check(module)
    assert [f.oracle for f in report.findings if f.verdict == "FAILED"] == ["cpu kernels, f64"], report


def test_the_kernels_gradient_of_a_scalar():
    module = gradc.compile(traced(lambda x, s: ops.tanh(x * s), x="f32[5]", s="f32[]"), wrt=["s"])
    report = check(module)
    assert report.ok and "cpu kernels, f64" in [f.oracle for f in report.findings]


# -- points without a gradient -----------------------------------------------------------------------------------------


def test_a_kink_at_the_point_is_said():
    report = check(traced(lambda x: ops.relu(x).sum(), x="f32[N]"), inputs={"x": np.array([1, 0, -1, 2], np.float32)})
    assert report.ok and "kink" in verdicts(report), report
    assert "[1] one-sided slopes" in str(report)


def test_ties_are_said():
    report = check(
        traced(lambda x: ops.max(x, axis=1), x="f32[N,3]"), inputs={"x": np.array([[1, 1, 0], [0, 2, 1]], np.float32)}
    )
    assert report.ok and "kink" in verdicts(report), report


def test_a_jump_is_said():
    report = check(traced(lambda x: ops.floor(x) * x, x="f32[N]"), inputs={"x": np.array([1.5, 2.0, 2.25], np.float32)})
    assert "jump" in verdicts(report), report


def test_a_gradient_outside_of_a_kinks_slopes_fails():
    graph = traced(lambda x: abs(x), x="f64[N]")
    wrong = with_vjp(graph, "abs", lambda g, y, x: (g * 3,))
    assert not check(wrong, inputs={"x": np.array([0.0, 1.0])}).ok


@pytest.mark.parametrize(
    ("function", "value", "kind"),
    [
        (lambda t: np.sin(3 * t), 3.0, "smooth"),
        (lambda t: np.exp(5 * t) - 1e3 * t**3, 5.0, "smooth"),
        (lambda t: 7.0, 0.0, "smooth"),
        (lambda t: 2 * t, 2.0, "smooth"),
        (lambda t: abs(t), None, "kink"),
        (lambda t: max(t, 1e-4), None, "kink"),
        (lambda t: t + (t > 0), None, "jump"),
    ],
)
def test_slope(function: Any, value: float | None, kind: str):
    found = slope(function, 2e-3, 1.0)
    assert found.kind == kind
    if value is not None:
        assert found.value == pytest.approx(value, abs=1e-8)


# -- what it refuses ---------------------------------------------------------------------------------------------------


def test_inputs_without_axes_and_names_of_cotangents_are_checked():
    """A joint graph reads its cotangent d.y; its own outputs' cotangents are called otherwise."""
    joint = differentiate(traced(lambda x, s: (ops.tanh(x) * s).sum(), x="f32[N]", s="f32[]"), ["x"])
    report = check(gradc.compile(joint, wrt=["x", "s", "d.y"], target="cpu"))
    assert report.ok and {f.gradient for f in report.findings} >= {"x", "s", "d.y"}


def test_no_gradient_no_check():
    with pytest.raises(NotDifferentiable, match="stop_gradient"):
        check(traced(lambda x, y: ops.stop_gradient(x) * y, x="f32[N]", y="f32[N]"), ["x"])
    with pytest.raises(InvalidProblem, match="no float input"):
        check(traced(lambda x: x + 1, x="i32[N]"))
    with pytest.raises(InvalidProblem, match="has no dim 'M'"):
        check(traced(lambda x: x * x, x="f32[N]"), dims={"M": 3})
    with pytest.raises(InvalidProblem, match="no value of graph is finite"):
        check(traced(lambda x: ops.log(x), x="f32[N]"), inputs={"x": np.zeros(3, np.float32)})


def test_values_that_are_not_finite_are_left_out():
    report = check(traced(lambda x: ops.log(x), x="f64[N]"), inputs={"x": np.array([1.0, -1.0, 2.0])})
    assert report.ok and "1 elements of y are not finite and were left out" in str(report), report


def test_sizes_keep_the_assumptions():
    graph = gradc.trace(lambda x, y: x[:4].sum() + y.sum(), assume=["N == 4*M", "M >= 3"], x="f32[N]", y="f32[M]")
    bound = sizes(graph)
    assert bound["N"] == 4 * bound["M"] and bound["M"] >= 3
    with pytest.raises(InvalidProblem, match="N == 4"):
        sizes(graph, {"N": 7})


def test_samples_fit_what_reads_them():
    arrays, dims = sample(traced(bag, **BAG), {"N": 1000})
    assert dims["N"] == 1000 and arrays["tokens"].max() < dims["V"] and arrays["tokens"].min() >= 0
    arrays, _ = sample(traced(lambda x: ops.log(x), x="f32[N]"), {"N": 100})
    assert (arrays["x"] > 0).all()
    again, _ = sample(traced(lambda x: ops.log(x), x="f32[N]"), {"N": 100})
    assert np.array_equal(arrays["x"], again["x"])


# -- the registry ------------------------------------------------------------------------------------------------------

CASES = [c for c in registry.cases(["f64"]) if c.differentiable and c.op.name != "cast"]


@registry.for_cases([case for case in CASES if case.number % 2 == 0])
def test_every_sample_of_every_op_holds(case: registry.Case):
    """No false alarm: composites, indices, surrogates and integer zero points included.  Every second sample: the
    gradients of all are held against differences by tests/ops/test_ops.py.
    """
    for dims in case.bindings((7,)):
        try:
            report = check(case.smooth, case.floats, dims, inputs=case.arrays(dims))
        except NotDifferentiable as error:
            assert "passes no derivative" in str(error)
        else:
            assert report.ok, report
