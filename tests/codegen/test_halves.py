"""A pass that only reduces a little of each column takes both halves of a block side by side: any number of columns,
NaN in either half, several reductions and axes at a time.
"""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops

pytestmark = pytest.mark.optimised

COUNTS = [1, 31, 63, 64, 65, 127, 128, 129, 191, 192, 2047, 2048, 2049, 2113, 5000]


def reductions(x: gradc.Node) -> tuple[gradc.Node, ...]:
    return ops.sum(x, axes=(1,)), ops.sum(x * x, axes=(1,)), ops.amax(x, axes=(1,)), ops.amin(x, axes=(1,))


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32"])
@pytest.mark.parametrize("known", [False, True])
def test_any_number_of_columns(dtype: str, known: bool) -> None:
    random = np.random.default_rng(0)
    made = None if known else gradc.compile(gradc.trace(reductions, x=f"{dtype}[R,C]"), target="cpu")
    for count in COUNTS[2::3] if known else COUNTS:
        module = made or gradc.compile(gradc.trace(reductions, x=f"{dtype}[3,{count}]"), target="cpu")
        assert ("const i64 half" in module.source()) == (dtype == "f32" and (not known or count >= 128))
        x = random.integers(-9, 9, (3, count)).astype({"f32": np.float32, "f64": np.float64, "i32": np.int32}[dtype])
        total, squares, largest, least = module(x=x).values()
        np.testing.assert_array_equal(total, x.sum(1))  # of small integers: exact in every order
        np.testing.assert_array_equal(squares, (x * x).sum(1))
        np.testing.assert_array_equal(largest, x.max(1))
        np.testing.assert_array_equal(least, x.min(1))


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 127, 128, 129])
def test_nan_in_either_half_and_behind_both(at: int) -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.amax(x, axes=(1,)), x="f32[R,C]"), target="cpu")
    assert "const i64 half" in module.source()
    x = np.zeros((2, 130), np.float32)
    x[1, at] = np.nan
    np.testing.assert_array_equal(module(x=x), [0, np.nan])


@pytest.mark.parametrize("count", [1, 70, 1000, 3001])
def test_a_gradient_of_several_passes(count: int) -> None:
    """Softmax: its second sum makes up for what the first rounds away, however large the cotangent is."""
    module = gradc.compile(gradc.trace(ops.softmax, x="f32[R,C]"), wrt=["x"], target="cpu")
    assert "const i64 half" in module.source()
    random = np.random.default_rng(1)
    x, dy = random.standard_normal((2, 4, count)).astype(np.float32)
    dy += np.float32(1000)
    y, residuals = module.forward(x=x)
    wide = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    wide /= wide.sum(1, keepdims=True)
    want = wide * (dy - (wide * dy).sum(1, keepdims=True))
    np.testing.assert_allclose(y, wide, rtol=1e-6)
    np.testing.assert_allclose(module.backward(residuals, dy)["x"], want, rtol=2e-4, atol=1e-6 / count)
