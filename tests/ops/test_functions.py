"""The functions: ops that write others where they are called; values and gradients are torch's.

Each sample runs once in the interpreter, and the functions of a file once more as one module of each of two targets.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import registry
from agreement import agree_with_numpy
from registry import Case
from test_ops import attrs_of, close, random_like

from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import TypeRuleError
from gradc.ir.graph import input_node
from gradc.ir.node import REGISTRY
from gradc.ir.op import Function
from gradc.ir.text import parse
from gradc.ir.types import parse_type
from gradc.trace import trace

torch = pytest.importorskip("torch")

from torch_oracles import FUNCTIONS, to_numpy, to_torch  # noqa: E402

NAMES = [name for name in sorted(REGISTRY) if isinstance(REGISTRY[name], Function)]
CASES = [
    case
    for name in NAMES
    for k, sample in enumerate(REGISTRY[name].samples)
    for case in registry.cases_of(REGISTRY[name], sample, k, ["f64"])
]
BAD = [(REGISTRY[name], bad) for name in NAMES for bad in REGISTRY[name].bad]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_has_samples_and_an_oracle(name: str) -> None:
    assert REGISTRY[name].samples and REGISTRY[name].doc and name in FUNCTIONS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_function_means_what_torch_says(case: Case) -> None:
    """Value and gradient."""
    for dims in case.bindings((3,)):
        arrays = case.arrays(dims)
        tensors = [to_torch(a).requires_grad_(f"x{k}" in case.floats) for k, a in enumerate(arrays.values())]
        want = FUNCTIONS[case.op.name](*tensors, **attrs_of(case, dims))
        want = want if isinstance(want, tuple | list) else (want,)
        outputs = dict(zip(case.graph.output_names, want, strict=True))
        got = interp.run(case.graph, arrays, dims=dims)
        for name, value in outputs.items():
            close(got[name], to_numpy(value), 1e-12, f"{case} {dims} {name}")
        smooth = {name: value for name, value in outputs.items() if value.requires_grad}
        if not smooth:
            continue
        graph = case.graph.with_outputs([(n, v) for n, v in case.graph.outputs if n in smooth])
        joint = differentiate(graph, case.floats, unused="zeros")
        cotangents = {f"d.{n}": random_like(to_numpy(v), 11 + k) for k, (n, v) in enumerate(smooth.items())}
        found = torch.autograd.grad(
            list(smooth.values()),
            [t for t in tensors if t.requires_grad],
            [to_torch(c) for c in cotangents.values()],
            allow_unused=True,
            materialize_grads=True,
        )
        given = {**arrays, **cotangents}
        gradients = interp.run(joint, {n: given[n] for n in joint.input_names}, dims=dims)
        for name, value in zip(case.floats, found, strict=True):
            close(gradients[f"d.{name}"], to_numpy(value), 1e-10, f"d {case}/d {name} {dims}")


@pytest.mark.parametrize(("op", "bad"), BAD, ids=[f"{op.name}-{bad.match}" for op, bad in BAD])
def test_a_bad_call_is_refused(op: Function, bad: Any) -> None:
    operands = [input_node(f"x{k}", parse_type(o)) for k, o in enumerate(bad.operands)]
    with pytest.raises(bad.error, match=re.escape(bad.match)):
        op.on(operands, bad.attrs)


FILES = sorted({REGISTRY[name].write.__module__ for name in NAMES})


@pytest.mark.parametrize("file", FILES)
def test_the_passes_keep_what_functions_mean(file: str) -> None:
    """One module in NumPy of each one's first sample in f64 and of all with symbolic sizes, with gradients."""
    chosen = [case for case in CASES if case.op.write.__module__ == file and (case.number == 0 or case.graph.dims)]
    agree_with_numpy(chosen, [3], target="numpy")


@pytest.mark.parametrize("file", FILES)
def test_compiled_functions_agree_with_numpy(file: str) -> None:
    """One module of each one's first sample in f32 and last in bf16, with gradients."""
    chosen = [
        case
        for name in NAMES
        if (op := REGISTRY[name]).write.__module__ == file
        for k, dtype in {0: "f32", len(op.samples) - 1: "bf16"}.items()
        for case in registry.cases_of(op, op.samples[k], k, [dtype])
    ]
    agree_with_numpy([c for c in chosen if not c.graph.dims], [0])


def test_a_function_is_no_node_of_a_text() -> None:
    with pytest.raises(TypeRuleError, match="conv2d is no node of a graph"):
        parse("graph @g(%x: f32[2,3]) {\n  %0: f32[2,3] = conv2d %x, %x\n  return y=%0\n}")


def test_arrays_are_operands() -> None:
    y = ops.max_pool1d(np.arange(12.0).reshape(1, 2, 6), 2)
    assert str(y.type) == "f64[1,2,3]"


def test_pooling_at_extremes() -> None:
    """NaN is larger than any number, padding never wins, and of equals the first takes the gradient, as in torch, which
    of two NaN in one window takes the last.
    """
    inf, nan = np.inf, np.nan
    x = np.array([[-inf, -inf, -inf, 1, 1, nan, 2, 2, 0, 0, -inf, -inf]])
    attrs = {"kernel_size": 3, "stride": 2, "padding": 1}
    graph = trace(lambda x: ops.max_pool1d(x, **attrs, return_indices=True), x="f64[1,12]")
    joint = differentiate(graph, ["x"])
    g = np.arange(1.0, 7.0)[None]
    got = interp.run(joint, {"x": x, joint.input_names[1]: g})
    t = torch.tensor(x, requires_grad=True)
    want, places = torch.nn.functional.max_pool1d(t, **attrs, return_indices=True)
    want.backward(torch.tensor(g))
    for value, expected in zip(got.values(), (want, places, t.grad), strict=True):
        np.testing.assert_array_equal(value, to_numpy(expected))
