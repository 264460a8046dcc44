"""Ops whose operands have sizes of several names that assumptions equate: values and gradients are those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from registry import Case, call, cases, tested_ops

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.ir.dims import Assumption, Dim, assuming, substitute, symbol
from gradc.ir.graph import Graph, input_node
from gradc.ir.op import Op

EQUATIONS: dict[str, Callable[[Sequence[str]], Any]] = {
    "star": lambda names: ((names[0], name) for name in names[1:]),
    "chain": itertools.pairwise,
    "backwards": lambda names: zip(names[1:], names[:-1], strict=True),
}
"""Which sizes are said to be equal: the first and each other, or each and the next."""


def renamed(case: Case, equations: str) -> Graph | None:
    """The case's graph with a size of its own in the place of N in each operand; None where it has one N alone."""
    own = [f"N{k}" for k, type in enumerate(case.types) if "N" in type.symbols]
    if len(own) < 2:
        return None
    types = [
        type.with_shape(*(substitute(size, {"N": symbol(f"N{k}")}) for size in type.shape))
        for k, type in enumerate(case.types)
    ]
    facts = tuple(Assumption(symbol(a), "==", symbol(b)) for a, b in EQUATIONS[equations](own))
    attrs = {name: of_names(value, own[0]) for name, value in case.attrs.items()}
    with assuming(facts):
        inputs = tuple(input_node(f"x{k}", type) for k, type in enumerate(types))
        return Graph(case.op.name, inputs, (("y", call(case.op, inputs, attrs)),), assumptions=facts)


def of_names(value: Any, name: str) -> Any:
    if isinstance(value, tuple):
        return tuple(of_names(item, name) for item in value)
    return substitute(value, {"N": symbol(name)}) if isinstance(value, Dim) else value


def samples(op: Op) -> list[Case]:
    found = cases(["f64"], [op.name])
    return [c for c in found if c.differentiable and c.graph is c.smooth and len(c.graph.outputs) == 1]


OPS = [op for op in tested_ops() if any(sum("N" in t.symbols for t in c.types) > 1 for c in samples(op))]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_gradients_are_those_of_one_size(op: Op) -> None:
    for case, equations in itertools.product(samples(op), EQUATIONS):
        graph = renamed(case, equations)
        if graph is None:
            continue
        wanted, found = (differentiate(g, case.floats, unused="zeros") for g in (case.graph, graph))
        for dims in case.bindings((4,)):
            arrays = case.arrays(dims)
            y = case.graph.output("y").type
            arrays["d.y"] = np.random.default_rng(5).normal(size=y.concrete(dims)).astype(y.dtype.np)
            named = {**dims, **{f"N{k}": dims["N"] for k in range(len(case.types))}}
            want, got = interp.run(wanted, arrays, dims=dims), interp.run(found, arrays, dims=named)
            for name, value in want.items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{case} {equations} {name}")


def compiled(function: Callable[..., Any], target: str, assume: Sequence[str], **types: str) -> Any:
    return gradc.compile(gradc.trace(function, assume=assume, **types), wrt=list(types), target=target)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_product_of_batches_with_sizes_of_two_names(target: str) -> None:
    module = compiled(
        lambda x, y: ops.sum(ops.matmul(x, y)), target, ["N == M", "B == C"], x="f64[B,3,N]", y="f64[C,M,2]"
    )
    x, y = np.arange(30.0).reshape(2, 3, 5), np.arange(20.0).reshape(2, 5, 2)
    _, grads = module.value_and_grad({"x": x, "y": y})
    np.testing.assert_array_equal(grads["x"], np.broadcast_to(y.sum(2)[:, None], x.shape))
    np.testing.assert_array_equal(grads["y"], np.broadcast_to(x.sum(1)[:, :, None], y.shape))


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_size_that_is_assumed_to_be_1_is_repeated(target: str) -> None:
    module = compiled(lambda x, y: ops.sum(ops.broadcast_to(x, (1,)) * y), target, ["N == 1"], x="f64[N]", y="f64[7]")
    y = np.arange(7.0)
    value, grads = module.value_and_grad({"x": np.array([3.0]), "y": y})
    assert value == 63 and grads["x"] == [21] and (grads["y"] == 3).all()
