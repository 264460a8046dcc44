"""A dim that no input has as a size of its own: sizes that are linear in it tell what it is."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import InvalidProblem


@pytest.fixture(scope="module", params=["numpy", "cpu"])
def pairs(request: pytest.FixtureRequest) -> gradc.Module:
    graph = gradc.trace(
        lambda x, y: ops.sum(ops.reshape(x, (-1, 2)), axis=1) * ops.sum(y), x="f64[2*N+2]", y="f64[3*M+N]"
    )
    return gradc.compile(graph, wrt=["x"], target=request.param)


@pytest.mark.parametrize(("count", "rest"), [(0, 2), (1, 0), (4, 5)])
def test_sizes_are_solved_one_after_another(pairs: gradc.Module, count: int, rest: int) -> None:
    x, y = np.arange(2.0 * count + 2), np.ones(3 * rest + count)
    value, residuals = pairs.forward(x=x, y=y)
    assert np.array_equal(value, x.reshape(-1, 2).sum(1) * y.sum())
    gradient = pairs.backward(residuals, np.arange(count + 1.0))["x"]
    assert np.array_equal(gradient, np.repeat(np.arange(count + 1.0), 2) * y.sum())


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        (7, 8, r"x is f64\[2\*N\+2\]: axis 0 is 7, not 6 \(N=2 from x\)"),
        (1, 8, r"x is f64\[2\*N\+2\]: axis 0 is 1, not 2 \(N=0 from x\)"),
        (6, 4, r"axis 0 is 4, not 2 \(M=0 from y, N=2 from x\)"),
    ],
)
def test_what_no_size_makes_is_an_error(pairs: gradc.Module, x: int, y: int, match: str) -> None:
    with pytest.raises(InvalidProblem, match=match):
        pairs(x=np.ones(x), y=np.ones(y))


def test_numbers_that_no_size_has_are_an_error() -> None:
    graph = gradc.trace(lambda x: ops.sum(x), x="f64[M*M*M*N]")
    with pytest.raises(InvalidProblem, match="factors of 2\\^126"):
        gradc.compile(graph, target="numpy")(x=np.ones(0), dims={"M": 2**62})


def test_a_size_from_which_a_dim_is_subtracted() -> None:
    """The sizes for which a plan is chosen are none below 0."""
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x, axis=0), x="f64[M,5-N]"), target="cpu")
    assert np.array_equal(module(x=np.ones((3, 4))), [3.0] * 4)
    with pytest.raises(InvalidProblem, match="axis 1 is 6, not 5"):
        module(x=np.ones((3, 6)))


def test_a_size_that_is_not_linear_tells_nothing() -> None:
    graph = gradc.trace(lambda x: ops.sum(x) * 2, x="f64[N*N]")
    with pytest.raises(InvalidProblem, match="nothing binds the dim N"):
        gradc.compile(graph, target="numpy")(x=np.ones(4))
    assert gradc.compile(graph, target="numpy")(x=np.ones(4), dims={"N": 2}) == 8
