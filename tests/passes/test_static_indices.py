"""static_indices and the ranges of a graph's integers: what fires, what must not, and values within their ranges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import interp, ops
from gradc.ir.node_ranges import range_of
from gradc.ir.types import BOOL, DTYPES, I32
from gradc.ops.rules import full
from gradc.passes.graph.simplify import simplify
from gradc.passes.graph.static_indices import static_indices


def names(graph: gradc.Graph) -> set[str]:
    return {node.op.name for node in graph.nodes}


def from_the_end(place, size):
    return ops.where(place < 0, place + size, place)


def rows(n, **options):
    return ops.iota(shape=(n,), **options)


FIRES = {
    "counted from the end": (lambda x: ops.gather(x, from_the_end(rows(5) * 2, x.shape[0])), {"where", "lt"}),
    "a whole table": (lambda x: ops.gather(x, rows(x.shape[0]), oob="error"), {"gather"}),
    "the first slices": (lambda x: ops.gather(x, from_the_end(rows(7), 12), oob="error"), {"gather", "where"}),
    "along another axis": (lambda x: ops.gather(x, rows(3), axis=1, oob="error"), {"gather"}),
    "skipped where outside": (lambda x: ops.gather(x, rows(3), axis=1, oob="skip"), {"gather"}),
    "in 32 bits": (lambda x: ops.gather(x, rows(3, dtype="i32"), axis=1), {"gather"}),
}

STAYS = {
    "positions that may be negative": (lambda x: ops.gather(x, from_the_end(rows(5) - 1, x.shape[0])), {"where", "lt"}),
    "more than there are": (lambda x: ops.gather(x, rows(13), oob="skip"), {"gather"}),
    "a padding without gradient": (lambda x: ops.gather(x, rows(12), padding_idx=3), {"gather"}),
    "another order": (lambda x: ops.gather(x, 11 - rows(12)), {"gather"}),
    "a comparison that varies": (lambda x: ops.gather(x, ops.where(rows(5) < 3, rows(5), rows(5) + 1)), {"where"}),
}
X = {"x": "f32[12,4]"}


@pytest.mark.parametrize("name", FIRES)
def test_fires(name):
    function, gone = FIRES[name]
    graph = gradc.trace(function, **X)
    after = static_indices(graph)
    assert gone <= names(graph) and not gone & names(after)
    x = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    np.testing.assert_array_equal(interp.run(after, {"x": x})["y"], interp.run(graph, {"x": x})["y"])


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    function, kept = STAYS[name]
    assert kept <= names(static_indices(gradc.trace(function, **X)))


@pytest.mark.parametrize("dtype", ["u4", "i8", "u8"])
def test_positions_that_wrap_are_in_no_order(dtype):
    graph = gradc.trace(lambda x: ops.gather(x, rows(300, dtype=dtype), oob="skip"), x="f32[300]")
    x = np.arange(1, 301, dtype=np.float32)
    low, high = DTYPES[dtype].range
    place = (np.arange(300) - low) % (high - low + 1) + low
    expected = np.where(place >= 0, x[place], 0)
    np.testing.assert_array_equal(interp.run(static_indices(graph), {"x": x})["y"], expected)
    np.testing.assert_array_equal(gradc.compile(graph, target="cpu")(x=x), expected)


@pytest.mark.parametrize(("dtype", "size", "slices"), [("u8", 256, True), ("i8", 128, True), ("i8", 129, False)])
def test_positions_in_order_fit_their_dtype(dtype, size, slices):
    graph = gradc.trace(lambda x: ops.gather(x, rows(size, dtype=dtype), oob="skip"), x="f32[300]")
    assert ("gather" not in names(static_indices(graph))) == slices


def test_symbolic_sizes_are_compared_where_their_order_is_known():
    whole = gradc.trace(lambda x: ops.gather(x, from_the_end(rows(x.shape[0]), x.shape[0])), x="f32[N,4]")
    assert names(static_indices(whole)) == {"input"}
    unknown = gradc.trace(lambda x, y: ops.gather(x, rows(y.shape[0])), x="f32[N]", y="f32[M]")
    assert "gather" in names(static_indices(unknown))


def test_the_gradient_of_positions_that_are_known_is_no_scatter():
    graph = gradc.trace(lambda x: ops.sum(ops.gather(x, rows(7), oob="error") ** 2), **X)
    module = gradc.compile(graph, wrt="x", target="cpu")
    assert not {"scatter_add", "check_index"} & names(module.stages["tidy.fold"].result)
    x = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
    _, gradients = module.value_and_grad(x=x)
    np.testing.assert_allclose(gradients["x"], np.where(np.arange(12)[:, None] < 7, 2 * x, 0), rtol=1e-6)


@pytest.mark.parametrize(("value", "left"), [(True, {"input"}), (False, {"input", "sin"})])
def test_a_condition_that_is_constant_chooses(value, left):
    """simplify's rule for it asked whether the 1 of a mask is the object True."""
    graph = gradc.trace(lambda x: ops.where(full(value, x, BOOL), x, ops.sin(x)), **X)
    assert names(simplify(graph)) == left


@st.composite
def integers(draw, depth=4):
    """A function of rows and columns, of what the ranges know."""
    kind = draw(
        st.sampled_from(
            ["row", "column", "number", "input"]
            if not depth
            else ["add", "sub", "mul", "neg", "where", "narrow", "row", "column"]
        )
    )
    if kind in ("row", "column", "input"):
        return lambda at: at[kind]
    if kind == "number":
        value = draw(st.integers(-9, 9))
        return lambda at: at["row"] * 0 + value
    a, b = draw(integers(depth=depth - 1)), draw(integers(depth=depth - 1))
    if kind == "mul":
        value = draw(st.integers(-5, 5))
        return lambda at: a(at) * value
    return {
        "add": lambda at: a(at) + b(at),
        "sub": lambda at: a(at) - b(at),
        "neg": lambda at: -a(at),
        "where": lambda at: ops.where(a(at) < b(at), a(at), b(at)),
        "narrow": lambda at: ops.cast(ops.cast(a(at), dtype=I32), dtype="i64"),
    }[kind]


@settings(max_examples=150, deadline=None)
@given(integers(), st.data())
def test_values_lie_within_their_ranges(function, data):
    shape = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))

    def traced(x):
        at = {name: ops.iota(shape=shape, axis=axis) for axis, name in enumerate(("row", "column"))}
        return function({**at, "input": ops.cast(x, dtype="i64")})

    graph = gradc.trace(traced, x=f"i8[{shape[0]},{shape[1]}]")
    x = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-128, 128, shape).astype(np.int8)
    y = interp.run(graph, {"x": x})["y"]
    range_ = range_of(graph.outputs[0][1])
    assert all(y.min() >= low for low in range_.lows) and all(y.max() <= high for high in range_.highs)
    assert range_.lows and range_.highs
