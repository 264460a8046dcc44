"""centre_sums: which sums of an attention's gradient of its scores are centred, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.passes.graph.centre_sums import centre_sums

TYPES = {"s": "f32[2,5,7]", "v": "bf16[2,7,4]", "dy": "bf16[2,5,4]", "t": "f32[2,5,7]", "mask": "bool[2,5,7]"}


def _graph(function, value="y"):
    """function(gradient of the scores, t, mask), as softmax_matmul's rule writes the gradient.

    :param value: what its centre is computed of: the result, or its negative.
    """

    def written(s, v, dy, t, mask):
        y = ops.softmax_matmul(s, v)
        wide = ops.cast(dy, dtype="f32")
        own = ops.cast(y if value == "y" else -y, dtype="f32")
        centre = ops.broadcast_to(ops.reshape(ops.sum(wide * own, axis=2), (2, 5, 1)), s.shape)
        slopes = ops.mixed_matmul(ops.cast(wide, dtype="bf16"), ops.transpose(v, (0, 2, 1))) - centre
        return function(ops.safe_softmax(s, -1) * slopes, t, mask)

    return gradc.trace(written, **TYPES)


CENTRED = {
    "all": lambda dx, t, mask: ops.sum(dx),
    "times something": lambda dx, t, mask: ops.sum(t * dx, axis=(0, 2)),
    "masked": lambda dx, t, mask: ops.sum(ops.where(mask, dx, dx * 0.0) * t, axis=2),
    "two parts": lambda dx, t, mask: ops.sum(-dx / t + dx * t, axis=(1, 2)),
    "in 16 bits": lambda dx, t, mask: ops.sum(ops.cast(dx, dtype="bf16") * ops.cast(t, dtype="bf16"), axis=(0, 1, 2)),
}
LEFT = {
    "rows": lambda dx, t, mask: ops.sum(dx * t, axis=(0, 1)),
    "squares": lambda dx, t, mask: ops.sum(dx * dx),
    "a function": lambda dx, t, mask: ops.sum(ops.exp(dx)),
    "a divisor": lambda dx, t, mask: ops.sum(t / dx),
    "a sum with something": lambda dx, t, mask: ops.sum(dx + t),
    "something where it is masked": lambda dx, t, mask: ops.sum(ops.where(mask, dx, t)),
    "maxima": lambda dx, t, mask: ops.amax(dx, axis=2),
}


@pytest.mark.parametrize("name", CENTRED)
def test_a_sum_over_columns_is_what_it_is_over_the_reals(name):
    graph = _graph(CENTRED[name])
    centred = centre_sums(graph)
    assert centred != graph and centre_sums(graph, numerics="strict") is graph
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.random(x.type.shape) < 0.5 if x.dtype.kind == "b" else 1 + rng.random(x.type.shape).astype(x.dtype.np)
        for n, x in zip(graph.input_names, graph.inputs, strict=True)
    }
    wanted, got = (
        np.asarray(*interp.run(g, arrays, precision="f64").values(), dtype=np.float64) for g in (graph, centred)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_linear_sum_of_columns_stays(name):
    graph = _graph(LEFT[name])
    assert centre_sums(graph) is graph


@pytest.mark.parametrize(
    "other",
    [{"softmax": 0}, {"softmax": 1}, {"sum": 0}, {"sum": 1}, {"transpose": (1, 2, 0)}, {"centre": (3, 1, 3)}],
    ids=str,
)
def test_the_same_ops_along_other_axes_stay(other):
    """All sizes are 3, so that they have the types of a gradient of scores; their rows do not add up to 0."""

    def written(s, v, dy, t):
        y = ops.softmax_matmul(s, v)
        wide = ops.cast(dy, dtype="f32")
        centre = ops.sum(wide * ops.cast(y, dtype="f32"), axis=other.get("sum", 2))
        centre = ops.broadcast_to(ops.reshape(centre, other.get("centre", (3, 3, 1))), s.shape)
        to_weights = ops.mixed_matmul(ops.cast(wide, dtype="bf16"), ops.transpose(v, other.get("transpose", (0, 2, 1))))
        return ops.sum(ops.safe_softmax(s, other.get("softmax", 2)) * (to_weights - centre) * t)

    graph = gradc.trace(written, s="f32[3,3,3]", v="bf16[3,3,3]", dy="bf16[3,3,3]", t="f32[3,3,3]")
    assert centre_sums(graph) is graph


def test_rows_whose_sum_is_not_zero_stay():
    """Their centre is that of another value."""
    graph = _graph(CENTRED["all"], value="another")
    assert centre_sums(graph) is graph


def test_a_sum_that_depends_on_another_has_what_is_made_of_that():
    """Scales of scores that depend on what the layer before gives: nothing is computed with that sum and without it."""

    def layers(x, p):
        for _ in range(3):
            scale = ops.reshape(ops.mean(ops.cast(x, dtype="f32"), axis=(1, 2)), (2, 1, 1))
            scores = ops.mixed_matmul(x, x.T) * ops.broadcast_to(scale * ops.broadcast_to(p, (2, 1, 1)), (2, 5, 5))
            x = ops.softmax_matmul(scores, x)
        return x

    graph = differentiate(gradc.trace(layers, x="bf16[2,5,4]", p="f32[]"), ["x", "p"])
    centred = centre_sums(graph)
    products, after = ([n for n in g.nodes if n.op.name == "mixed_matmul"] for g in (graph, centred))
    assert centred is not graph and len(after) == len(products)
    rng = np.random.default_rng(0)
    arrays = {
        n: rng.random(x.type.shape).astype(x.dtype.np) for n, x in zip(graph.input_names, graph.inputs, strict=True)
    }
    wanted, got = (interp.run(g, arrays, precision="f64") for g in (graph, centred))
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-9, atol=1e-12)
