"""A pass that reduces takes strips of columns with accumulators of their own: any number of columns, NaN in any strip
and behind all, several reductions and axes at a time.
"""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops

pytestmark = pytest.mark.optimised

COUNTS = [1, 2, 3, 4, 5, 7, 8, 15, 20, 31, 32, 33, 40, 47, 63, 64, 65, 100, 127, 128, 129, 2047, 2048, 2049, 2113, 5000]


def reductions(x: gradc.Node) -> tuple[gradc.Node, ...]:
    return ops.sum(x, axes=(1,)), ops.sum(x * x, axes=(1,)), ops.amax(x, axes=(1,)), ops.amin(x, axes=(1,))


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32"])
@pytest.mark.parametrize("known", [False, True])
def test_any_number_of_columns(dtype: str, known: bool) -> None:
    random = np.random.default_rng(0)
    made = None if known else gradc.compile(gradc.trace(reductions, x=f"{dtype}[R,C]"), target="cpu")
    for width in () if made is None else (32, 8) if dtype == "f32" else (16, 4):
        assert f"strip + {width} <= c1" in made.source()
    for count in COUNTS[1::3] if known else COUNTS:
        module = made or gradc.compile(gradc.trace(reductions, x=f"{dtype}[3,{count}]"), target="cpu")
        x = random.integers(-9, 9, (3, count)).astype({"f32": np.float32, "f64": np.float64, "i32": np.int32}[dtype])
        total, squares, largest, least = module(x=x).values()
        np.testing.assert_array_equal(total, x.sum(1))  # of small integers: exact in every order
        np.testing.assert_array_equal(squares, (x * x).sum(1))
        np.testing.assert_array_equal(largest, x.max(1))
        np.testing.assert_array_equal(least, x.min(1))


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 127, 128, 129, 135, 136, 137])
def test_nan_in_any_strip_and_behind_all(at: int) -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.amax(x, axes=(1,)), x="f32[R,C]"), target="cpu")
    x = np.zeros((2, 138), np.float32)
    x[1, at] = np.nan
    np.testing.assert_array_equal(module(x=x), [0, np.nan])


@pytest.mark.parametrize("count", [1, 70, 1000, 3001])
def test_a_gradient_of_several_passes(count: int) -> None:
    """Softmax: its second sum makes up for what the first rounds away, however large the cotangent is."""
    module = gradc.compile(gradc.trace(ops.softmax, x="f32[R,C]"), wrt=["x"], target="cpu")
    random = np.random.default_rng(1)
    x, dy = random.standard_normal((2, 4, count)).astype(np.float32)
    dy += np.float32(1000)
    y, residuals = module.forward(x=x)
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    wide /= wide.sum(1, keepdims=True)
    want = wide * (dy - (wide * dy).sum(1, keepdims=True))
    np.testing.assert_allclose(y, wide, rtol=1e-6)
    np.testing.assert_allclose(module.backward(residuals, dy)["x"], want, rtol=2e-4, atol=1e-6 / count)


@pytest.mark.parametrize("columns", [64, 3001])
def test_an_interior_of_any_size(columns: int) -> None:
    """The columns inside of a pad are as many as they are, even where all columns fill strips."""
    graph = gradc.trace(lambda x: ops.sum(ops.pad(x, ((0, 0), (3, 2)), value=1.0), axis=-1), x=f"f32[2,{columns - 5}]")
    module = gradc.compile(graph, target="cpu")
    assert "inside0" in module.source()
    x = np.random.default_rng(2).integers(-9, 9, (2, columns - 5)).astype(np.float32)
    np.testing.assert_array_equal(module(x=x), x.sum(1) + 5)


def test_several_axes() -> None:
    """The inner one is short, known or not."""
    x = np.random.default_rng(3).integers(-9, 9, (3, 7, 5)).astype(np.float32)
    for shape in ("f32[A,B,C]", "f32[3,7,5]"):
        graph = gradc.trace(
            lambda x: (
                ops.sum(x, axes=(0, 2)),
                ops.sum(ops.where(x > 0.0, x, 0.0), axes=(1, 2)),
                ops.amax(x, axes=(0, 2)),
            ),
            x=shape,
        )
        total, positive, largest = gradc.compile(graph, target="cpu")(x=x).values()
        np.testing.assert_array_equal(total, x.sum((0, 2)))
        np.testing.assert_array_equal(positive, np.maximum(x, 0).sum((1, 2)))
        np.testing.assert_array_equal(largest, x.max((0, 2)))
