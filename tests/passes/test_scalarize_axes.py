"""scalarize_axes: short axes that only stack values become the values; nothing else does."""

from __future__ import annotations

import functools

import long_tests
import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.ir.node import Node
from gradc.passes.graph.scalarize_axes import LONGEST, scalarize_axes


def same(graph: gradc.Graph, after: gradc.Graph) -> None:
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal(graph.input(n).type.concrete({"N": 5})) for n in graph.input_names}
    wanted, got = (interp.run(g, given, precision="longdouble") for g in (graph, after))
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-14, atol=1e-14)


def count(graph: gradc.Graph, *names: str) -> int:
    return sum(n.op.name in names for n in graph.nodes)


def taps(*values: float) -> Node:
    return ops.constant(value=values, dtype="f64", shape=(1, len(values), 1))


STACKED = {
    "element of a stack": lambda a, b: ops.exp(ops.concat([a, b], axis=1))[:, 1],
    "sum over a stack": lambda a, b: ops.sum(ops.concat([a, b], axis=1) * taps(2.0, 3.0), axis=1),
    "elements of a constant": lambda a, b: (a * taps(1.0, 2.0, 4.0))[:, 2] + b[:, 0],
    "both coordinates": lambda a, b: ops.concat([a, b], axis=1)[:, 0] * ops.concat([a, b], axis=1)[:, 1],
    "padded": lambda a, b: (ops.pad(a, ((0, 0), (1, 2), (0, 1))) + 1.0)[:, 1],
    "outside the padding": lambda a, b: (ops.pad(a, ((0, 0), (1, 2), (0, 1))) + 1.0)[:, 3],
}


@pytest.mark.parametrize("what", STACKED)
def test_stacks_are_gone(what: str) -> None:
    graph = gradc.trace(STACKED[what], a="f64[N,1,7]", b="f64[N,1,7]")
    after = scalarize_axes(graph)
    same(graph, after)
    assert not count(after, "concat") and not any(n.rank == 3 and n.shape[1] != 1 for n in after.nodes)


def test_sums_of_stacks_are_stacks_of_sums() -> None:
    graph = gradc.trace(
        lambda a, b: ops.sum(ops.exp(ops.concat([a, b], axis=1)), axis=2), a="f64[N,1,7]", b="f64[N,1,7]"
    )
    after = scalarize_axes(graph)
    same(graph, after)
    (stack,) = (n for n in after.nodes if n.op.name == "concat")
    assert {o.op.name for o in stack.operands} == {"sum"}


WHOLE = {
    "it is an output": lambda a, b: (c := ops.exp(ops.concat([a, b], axis=1)), c[:, 0]),
    "it is read whole": lambda a, b: (c := ops.exp(ops.concat([a, b], axis=1)), ops.max(c, axis=0) + c[0])[1],
    "the axis is long": lambda a, b: ops.exp(ops.concat([a] * (LONGEST + 1), axis=1))[:, 0] + b[:, 0],
    "the piece is longer": lambda a, b: ops.exp(ops.concat([a, b, a], axis=1))[:, :2],
    "numerics are strict": STACKED["sum over a stack"],
}


@pytest.mark.parametrize("why", WHOLE)
def test_what_stays_whole(why: str) -> None:
    graph = gradc.trace(WHOLE[why], a="f64[N,1,7]", b="f64[N,1,7]")
    assert scalarize_axes(graph, numerics="strict" if "strict" in why else "real") == graph


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize(("image", "grid"), [("f64[N,1,5,6]", "f64[N,4,3,2]"), ("f64[N,1,5,6,4]", "f64[N,4,3,2,3]")])
def test_a_sampling_is_one_loop_over_the_points(image: str, grid: str, padding: str) -> None:
    """Value and gradient of the grid: each one kernel, and no array of taps in memory."""
    graph = gradc.trace(lambda x, grid: ops.grid_sample(x, grid, padding_mode=padding), x=image, grid=grid)
    module = gradc.compile(graph, wrt=["grid"], target="cpu")
    assert len(module.forward.program.kernels) == 1 and not [
        b for b in module.forward.program.buffers if b.kind == "temp"
    ]
    if padding != "reflection":  # whose coordinates take a kernel of their own in f64
        assert len(module.backward.program.kernels) <= 2, str(module.backward.program)
    assert all(
        b.type.shape[1] == 1 or b.type.rank < len(graph.input("x").type.shape)
        for b in module.backward.program.buffers
        if b.kind == "temp"
    )
    rng = np.random.default_rng(0)
    given = {n: rng.uniform(-1.2, 1.2, graph.input(n).type.concrete({"N": 3})) for n in graph.input_names}
    y, residuals = module.forward(**given)
    dy = rng.standard_normal(y.shape)
    exact = interp.run(differentiate(graph, ["grid"]), {**given, "d.y": dy})
    np.testing.assert_allclose(module.backward(residuals, dy)["grid"], exact["d.grid"], rtol=1e-9, atol=1e-9)


@long_tests.values
def test_long_chains_of_values() -> None:
    """No recursion per node, and each value is taken apart once, however many read its elements."""

    def steps(a: Node, b: Node) -> Node:
        x, total = ops.concat([a, b], axis=1), 0.0
        for _ in range(1500):
            x = x * 0.5 + 1.0
            total = ops.sum(x, axis=1) + total
        return total

    graph = gradc.trace(steps, a="f64[N,1,7]", b="f64[N,1,7]")
    after = scalarize_axes(graph)
    same(graph, after)
    assert not count(after, "concat") and len(after.nodes) < 2 * len(graph.nodes)
    widest = scalarize_axes(
        gradc.trace(
            lambda a: ops.sum(functools.reduce(lambda x, _: x * 0.5 + 1.0, range(1500), a), axis=1), a="f64[N,2,7]"
        )
    )
    assert count(widest, "sum") == 1
