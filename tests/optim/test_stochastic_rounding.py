"""Parameters of 16 bits that are rounded up or down by chance: to a neighbour, right on average, alike everywhere."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies

import gradc
from gradc import knobs, ops, optim
from gradc.errors import InvalidProblem
from gradc.ir.kernel import Call
from gradc.ir.types import DTYPES
from gradc.optim.optimizer import Now, stochastically_rounded

HALF = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TARGETS = ("numpy", "cpu", "cuda-sim")
FULL = {"f16": 2.0**-24, "bf16": 2.0**-119}
"""From where on all digits of the dtype are kept."""


@functools.cache
def rounded(dtype: str, target: str) -> Any:
    fn = lambda x, key: stochastically_rounded(x, DTYPES[dtype], Now(key, key, key, 3))
    return gradc.compile(gradc.trace(fn, x="f32[N]", key="i64[]"), (), target)


def neighbours(x: Any, dtype: str) -> tuple[Any, Any]:
    """The largest number of the dtype that is not above each of x, and the smallest that is not below, in f64."""
    near = x.astype(HALF[dtype])
    wide, exact = near.astype(np.float64), x.astype(np.float64)
    infinity = HALF[dtype].type(np.inf)
    below, above = (np.nextafter(near, sign * infinity).astype(np.float64) for sign in (-1, 1))
    return np.where(wide <= exact, wide, below), np.where(wide >= exact, wide, above)


@pytest.mark.parametrize("dtype", HALF)
@hypothesis.given(x=strategies.lists(strategies.floats(width=32), min_size=8, max_size=8), key=strategies.integers(0))
@hypothesis.settings(deadline=None, max_examples=60)
def test_to_a_neighbour_with_the_same_bits_on_every_target(dtype: str, x: list[float], key: int) -> None:
    given, key = np.array(x, np.float32), key % 2**62
    found = [rounded(dtype, target)(x=given, key=np.array(key)) for target in TARGETS]
    assert len({each.tobytes() for each in found}) == 1
    y, most = found[0].astype(np.float64), float(ml_dtypes.finfo(HALF[dtype]).max)
    assert ((np.signbit(y) == np.signbit(given)) | np.isnan(given)).all() and (np.isnan(y) == np.isnan(given)).all()
    assert (np.isinf(y) <= (np.abs(given) > most)).all()
    with np.errstate(over="ignore"):
        low, high = neighbours(given, dtype)
    sure = (np.abs(given) >= FULL[dtype]) & (np.abs(given) <= most)
    assert ((y == low) | (y == high) | ~sure).all()
    small = np.abs(given) < FULL[dtype]
    assert (np.abs(y - given)[small] < FULL[dtype]).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("x", [1.0003, -0.1, 3e-7, 1234.5])
def test_right_on_average(dtype: str, x: float) -> None:
    """The share that goes up lies within five standard deviations of what it should be."""
    given = np.full(100_000, x, np.float32)
    y = rounded(dtype, "cpu")(x=given, key=np.array(11)).astype(np.float64)
    (low,), (high,) = (np.unique(each) for each in neighbours(given, dtype))
    share = (float(given[0]) - low) / (high - low)
    assert abs((y == high).mean() - share) <= 5 * np.sqrt(share * (1 - share) / len(y))


def test_steps_below_the_rounding_are_not_lost() -> None:
    """Each moves by a fiftieth of what two neighbours differ by; numbers differ from step to step and by parameter."""
    graph = gradc.trace(
        lambda a, b, i: ops.sum(ops.embedding(i, a)) + ops.sum(b), a="f16[V,64]", b="f16[64]", i="i64[N]"
    )
    lr = 2.0**-10 / 50
    for stochastic in (False, True):
        update = dict.fromkeys("ab", optim.sgd(lr, stochastic=stochastic))
        module = gradc.compile(graph, ["a", "b"], "cpu", update=update, sparse="a")
        given = {"a": np.full((9, 64), 1.5, np.float16), "b": np.full(64, 1.5, np.float16), "state.step": np.array(0)}
        for _ in range(100):
            module(**given, i=np.array([2, 5, 7]))
        moved = 1.5 - given["a"][[2, 5, 7]].astype(np.float64)
        assert (given["a"][[0, 1, 3, 4, 6, 8]] == 1.5).all()
        if not stochastic:
            assert not moved.any() and (given["b"] == 1.5).all()
            continue
        one = 2.0**-10 * np.sqrt(100 * 0.02 * 0.98 / moved.size)  # the deviation of the mean
        assert abs(moved.mean() - 100 * lr) < 5 * one and len(np.unique(moved)) > 3
        assert (given["a"][2] != given["b"]).any() and (given["a"][2] != given["a"][5]).any()


def test_the_kernel_that_sums_rows_rounds_them() -> None:
    graph = gradc.trace(lambda w, i, g: ops.sum(ops.embedding(i, w) * g), w="f16[V,8]", i="i64[N]", g="f16[N,8]")
    optimizer = optim.rowwise_adagrad(0.1, stochastic=True)
    with knobs.VALIDATE.set("1"):
        program = gradc.compile(graph, ["w"], "cpu", update={"w": optimizer}, sparse="w").forward.program
    assert len(program.forwards) == 1 and not any(isinstance(s, Call) and s.op == "put_rows" for s in program.steps)
    assert not [b for b in program.of_kind("temp") if b.type.rank == 2 and b.type.dtype.is_float]


def test_wide_parameters_are_not_rounded() -> None:
    graph = gradc.trace(lambda w: ops.sum(w * w), w="f32[5]")
    w = np.linspace(-1, 1, 5, dtype=np.float32)
    steps = [gradc.step(graph, optim.sgd(0.1, stochastic=s), "w", target="cpu", donate=False) for s in (False, True)]
    one, other = (step(w, step.init(w))[1] for step in steps)
    assert one.tobytes() == other.tobytes()
    with pytest.raises(InvalidProblem, match="adam: stochastic=1: True or False"):
        optim.adam(stochastic=1)  # type: ignore[arg-type]
