"""On a CPU, exponentials of what is known not to be above 0 take fewer instructions and have the bits of exp."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops

pytestmark = pytest.mark.optimised


def test_beside_a_maximum() -> None:
    """Whatever is below the largest of a row, subnormal results and NaN too."""

    def both(x: gradc.Node) -> tuple[gradc.Node, gradc.Node]:
        return ops.exp(x - ops.amax(x, axes=(1,), keepdims=True)), ops.exp(x)

    module = gradc.compile(gradc.trace(both, x="f32[N,1000]"), target="cpu")
    assert module.source().count("= exp_below_one_f32(") == 1
    x = -np.random.default_rng(0).uniform(0, 1, (60, 1000)).astype(np.float32) * np.float32(110)
    x[:, 0], x[7, 5], x[8, 6] = 0, np.nan, -np.inf
    beside, plain = module(x=x).values()
    rows = [n for n in range(60) if n != 7]
    np.testing.assert_array_equal(beside[rows].view(np.int32), plain[rows].view(np.int32))
    assert np.isnan(beside[7]).all()


def test_beside_a_maximum_that_is_taken_to_be_0() -> None:
    """Of a row of -inf, as attention does; the same bits as beside the maximum of a row that has others."""
    module = gradc.compile(
        gradc.trace(lambda x: (ops.safe_softmax(x, 1), ops.softmax(x, 1)), x="f32[N,500]"), target="cpu"
    )
    assert "= exp_f32(" not in module.source()
    x = -np.random.default_rng(0).uniform(0, 110, (40, 500)).astype(np.float32)
    x[3], x[4, ::2], x[5, 7] = -np.inf, -np.inf, np.nan
    safe, plain = module(x=x).values()
    np.testing.assert_array_equal(safe[3], 0)
    assert np.isnan(plain[3]).all() and np.isnan(safe[5]).all()
    rows = [n for n in range(40) if n not in (3, 5)]
    np.testing.assert_array_equal(safe[rows].view(np.int32), plain[rows].view(np.int32))


def test_of_negative_squares() -> None:
    """As GELU's gradient has them: halves of the quotient by ln 2, subnormal results, infinities and NaN too."""
    graph = gradc.trace(lambda x, y: (ops.exp(x * x * -0.5), ops.exp(y)), x="f32[N]", y="f32[N]")
    module = gradc.compile(graph, target="cpu")
    assert module.source().count("= exp_below_one_f32(") == 1
    halves = (2 * np.log(2) * (np.arange(150) + 0.5)) ** 0.5
    x = np.concatenate([np.linspace(-15, 15, 40_000), halves, [0.0, -0.0, np.nan, np.inf, -np.inf, 1e19]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        square, plain = module(x=x, y=x * x * np.float32(-0.5)).values()
    np.testing.assert_array_equal(square.view(np.int32)[~np.isnan(x)], plain.view(np.int32)[~np.isnan(x)])
    assert np.isnan(square[np.isnan(x)]).all()


def test_of_magnitudes() -> None:
    """Beside a sigmoid of the same, which has the same exponential: one is computed."""
    graph = gradc.trace(lambda x, y: (ops.exp(-ops.abs(x)), ops.exp(y)), x="f32[N]", y="f32[N]")
    module = gradc.compile(graph, target="cpu")
    assert module.source().count("= exp_below_one_f32(") == 1
    x = np.append(np.linspace(-110, 110, 40_001), [np.inf, -np.inf, -0.0]).astype(np.float32)
    magnitude, plain = module(x=x, y=-np.abs(x)).values()
    np.testing.assert_array_equal(magnitude.view(np.int32), plain.view(np.int32))
    graph = gradc.trace(lambda x: ops.silu(x), x="f32[N,4096]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    backward = "".join(k.source for name, k in module.kernels.items() if "grad" in name)
    assert "exp_below_one_f32(" in backward and "= exp_f32(" not in backward


def test_not_where_it_may_be_above() -> None:
    """Another row's largest, a positive factor, what is squared beside another value."""
    for function in (
        lambda x: ops.exp(x - ops.amax(-x, axes=(1,), keepdims=True)),
        lambda x: ops.exp(x * x * 0.5),
        lambda x: ops.exp((x * x - 3.0) * -0.5),
    ):
        module = gradc.compile(gradc.trace(function, x="f32[N,100]"), target="cpu")
        assert "exp_below_one_f32" not in module.source()
