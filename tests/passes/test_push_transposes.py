"""push_transposes: columns of wide rows that are reduced are rows of a product of their own, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.passes.graph.decompose import decompose
from gradc.passes.graph.simplify import simplify
from gradc.passes.row_blocking import wide_products
from gradc.passes.row_blocking.push_transposes import push_transposes
from gradc.targets.devices import gpu_of

H100 = gpu_of("sm_90")
TYPES = {"a": "f32[24,2]", "b": "f32[40,2]", "scale": "f32[]", "row": "f32[40]"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)


def _both(a, b, scale, row):
    """Statistics of both axes, with elements and positions of each in what is reduced."""
    s = (a @ b.T) * scale + row
    at = ops.iota(shape=(40, 24), axis=0) + 2 * ops.iota(shape=(40, 24), axis=1)
    t = ops.where(at % 3 == 0, ops.transpose(s, (1, 0)), -1.0)
    return ops.sum(ops.logsumexp(s, 1)) + ops.sum(ops.logsumexp(t, 1) ** 2)


FORMS = {
    "both axes": (_both, 2),
    "columns alone": (lambda a, b, scale, row: ops.sum(ops.logsumexp((a @ b.T + row).T, 1)), 1),
    "rows alone": (lambda a, b, scale, row: ops.sum(ops.logsumexp(a @ b.T * scale + row, 1)), 1),
    "a transpose that is multiplied": (lambda a, b, scale, row: ops.sum(ops.exp(a @ b.T + row).T @ a), 2),
    "a batch": (
        lambda a, b, scale, row: (
            ops.sum(ops.softmax(_batched(a) @ ops.transpose(_batched(b), (0, 2, 1)), 2))
            + ops.sum(ops.logsumexp(ops.transpose(_batched(a) @ ops.transpose(_batched(b), (0, 2, 1)), (0, 2, 1)), 2))
        ),
        2,
    ),
}
"""Each form's function, and how many products of scores, of which its value is, there are then."""


def _batched(x):
    return ops.broadcast_to(ops.reshape(x, (1, *x.shape)), (2, *x.shape))


def of_scores(graph):
    return [n for n in graph.nodes if n.op.name == "matmul" and {24, 40} == {*n.shape[-2:]}]


@pytest.mark.parametrize("wrt", [(), ("a", "b", "scale", "row")])
@pytest.mark.parametrize("name", FORMS)
def test_values_are_the_same(name, wrt):
    function, products = FORMS[name]
    graph = gradc.trace(function, **TYPES)
    unused = [n for n in wrt if n not in graph.input_names or not _reaches(graph, n)]
    graph = differentiate(graph, [n for n in wrt if n not in unused]) if wrt else graph
    graph = simplify(decompose(graph))
    pushed = push_transposes(graph, device=H100)
    rng = np.random.default_rng(0)
    arrays = {
        n: np.asarray(rng.standard_normal(node.type.concrete({})), np.float32)
        for node, n in zip(graph.inputs, graph.input_names, strict=True)
    }
    wanted, got = (interp.run(g, arrays, precision="f64") for g in (graph, pushed))
    for output, value in wanted.items():
        np.testing.assert_allclose(got[output], value, rtol=1e-10, atol=1e-12, err_msg=output)
    if name in ("rows alone", "a transpose that is multiplied"):
        assert str(pushed) == str(graph)
    else:
        assert len(of_scores(pushed)) == products


def _reaches(graph, name):
    node = dict(zip(graph.input_names, graph.inputs, strict=True))[name]
    return bool(graph.users[node])


def test_products_that_are_saved_stay_one():
    graph = simplify(decompose(gradc.trace(_both, **{**TYPES, "a": "f32[24,12]", "b": "f32[40,12]"})))
    assert str(push_transposes(graph, device=H100)) == str(graph)
    graph = simplify(decompose(gradc.trace(_both, **TYPES)))
    assert str(push_transposes(graph, device=H100)) != str(graph)
    assert push_transposes(graph, device=H100, numerics="strict") is graph
