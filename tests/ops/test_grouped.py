"""Products of rows by groups: what the samples of the ops do not reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradc
from gradc import knobs, ops
from gradc.errors import IndexOutOfRange, NotAscending
from gradc.ir.kernel import Call
from gradc.ir.types import DTYPES

Array = np.ndarray[Any, Any]


def by_group(x: Array, weight: Array, offsets: Array) -> Array:
    """In long double, one row after another: NumPy's own products are judged by none that is less exact."""
    y = np.zeros((len(x), weight.shape[2]), np.longdouble)
    for g in range(len(weight)):
        for row in range(offsets[g], offsets[g + 1]):
            y[row] = (x[row, :, None].astype(np.longdouble) * weight[g]).sum(0)
    return y


def outer_by_group(x: Array, y: Array, offsets: Array) -> Array:
    out = np.zeros((len(offsets) - 1, x.shape[1], y.shape[1]), np.longdouble)
    for g in range(len(out)):
        for row in range(offsets[g], offsets[g + 1]):
            out[g] += x[row, :, None].astype(np.longdouble) * y[row]
    return out


def compiled(target: str = "cpu", dtype: str = "f64", index: str = "i64") -> gradc.Module:
    graph = gradc.trace(ops.grouped_matmul, x=f"{dtype}[S,K]", weight=f"{dtype}[E,K,N]", offsets=f"{index}[E+1]")
    return gradc.compile(graph, wrt=["x", "weight"], target=target)


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return compiled()


@given(st.integers(0, 9), st.integers(0, 6), st.integers(0, 5), st.lists(st.integers(0, 9), max_size=6), st.data())
def test_any_sizes_and_groups(
    module: gradc.Module, rows: int, k: int, n: int, ends: list[int], data: st.DataObject
) -> None:
    offsets = np.array([0, *sorted(min(end, rows) for end in ends)])
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, weight = rng.standard_normal((rows, k)), rng.standard_normal((len(ends), k, n))
    g = rng.standard_normal((rows, n))
    with knobs.NUM_THREADS.set(data.draw(st.sampled_from([1, 2, 5]))):
        y, residuals = module.forward(x=x, weight=weight, offsets=offsets)
        gradients = module.backward(residuals, g)
    np.testing.assert_allclose(y, by_group(x, weight, offsets).astype(float), rtol=1e-13, atol=1e-13)
    d_x = by_group(g, weight.transpose(0, 2, 1), offsets).astype(float)
    np.testing.assert_allclose(gradients["x"], d_x, rtol=1e-13, atol=1e-13)
    d_weight = outer_by_group(x, g, offsets).astype(float)
    np.testing.assert_allclose(gradients["weight"], d_weight, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
def test_what_no_row_is_of_is_not_read(target: str) -> None:
    """An infinity or NaN in a group without rows is in no result, as it is in none of a loop over the groups."""
    module = compiled(target, "f32", "i32")
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((40, 33)).astype(np.float32), rng.standard_normal((4, 33, 7)).astype(np.float32)
    weight[1], weight[3, 5] = np.nan, np.inf
    x[38:] = np.nan
    offsets = np.array([0, 3, 3, 38, 38], np.int32)
    y, residuals = module.forward(x=x, weight=weight, offsets=offsets)
    gradients = module.backward(residuals, np.ones_like(y))
    np.testing.assert_allclose(y, by_group(x, weight, offsets).astype(float), rtol=1e-5, atol=1e-5)
    assert not y[38:].any() and not gradients["x"][38:].any()
    assert np.isfinite(gradients["x"]).all() and np.isfinite(gradients["weight"]).all()
    assert not gradients["weight"][[1, 3]].any()


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@pytest.mark.parametrize(
    ("offsets", "error", "match"),
    [
        ([0, 2, 8], IndexOutOfRange, r"index 8 at position 2 of 'offsets' is out of range \[0, 8\)"),
        ([0, 3, 2], NotAscending, "2 at position 2 of 'offsets' is below the 3 before it"),
        ([1, 2, 3], IndexOutOfRange, "index 1 at position 0"),
        ([0, -1, 3], (NotAscending, IndexOutOfRange), "-1 at position 1"),
        ([0, 2, 2**62], IndexOutOfRange, "position 2"),
    ],
)
def test_offsets_are_checked_before_anything_is_written(
    target: str, offsets: list[int], error: Any, match: str
) -> None:
    module = compiled(target)
    out = np.full((7, 2), 5.0)
    with pytest.raises(error, match=match):
        module(x=np.ones((7, 3)), weight=np.ones((2, 3, 2)), offsets=np.array(offsets), out={"y": out})
    assert (out == 5.0).all()


def test_skipped_offsets_begin_where_groups_end() -> None:
    """Whatever they are, no row is of two groups, and nothing outside is read."""
    graph = gradc.trace(
        lambda x, weight, offsets: ops.grouped_matmul(x, weight, offsets, oob="skip"),
        x="f64[S,3]", weight="f64[E,3,2]", offsets="i64[E+1]",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((7, 3)), rng.standard_normal((4, 3, 2))
    offsets = np.array([9, -5, 4, 2, 2**60])
    wanted, size = (by_group(a, b, np.array([0, 0, 4, 4, 7])) for a, b in ((x, weight), (abs(x), abs(weight))))
    for target in ("numpy", "cpu", "cuda-sim"):
        y = np.asarray(gradc.compile(graph, target=target)(x=x, weight=weight, offsets=offsets))
        assert (np.abs(y - wanted) <= 4 * 2.0**-53 * size).all(), target  # of three terms


def _as_it_is(weight: Any) -> Any:
    return weight


@pytest.mark.parametrize("laid", [_as_it_is, lambda w: ops.transpose(w, (0, 2, 1))])
def test_narrow_weights_are_read_as_they_are(laid: Callable[[Any], Any]) -> None:
    """Codes with a scale for each 4 of what is summed over: no expert's weight is dequantized to memory."""

    def product(x: Any, codes: Any, scale: Any, offsets: Any) -> Any:
        weight = ops.dequantize(codes, scale, block=(1, 4, 1) if laid is _as_it_is else (1, 1, 4))
        return ops.grouped_matmul(x, laid(weight), offsets)

    codes_type, scale_type = ("i8[5,32,24]", "f32[5,8,24]") if laid is _as_it_is else ("i8[5,24,32]", "f32[5,24,8]")
    graph = gradc.trace(product, x="f32[S,32]", codes=codes_type, scale=scale_type, offsets="i64[6]")
    module = gradc.compile(graph, wrt=["x", "scale"])
    (call,) = [step for step in module.forward.program.steps if isinstance(step, Call)]
    assert call.args[1].buffer == "codes" and call.args[1].scale is not None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((11, 32)).astype(np.float32)
    codes = rng.integers(-128, 128, module.graph.input("codes").type.shape).astype(np.int8)
    scale = rng.uniform(0.5, 1.5, module.graph.input("scale").type.shape).astype(np.float32)
    offsets = np.array([0, 4, 4, 5, 9, 11])
    y, residuals = module.forward(x=x, codes=codes, scale=scale, offsets=offsets)
    axis = 1 if laid is _as_it_is else 2
    weight = codes.astype(np.longdouble) * np.repeat(scale, 4, axis)
    weight = weight if laid is _as_it_is else weight.transpose(0, 2, 1)
    limit = 32 * 2.0**-24 * by_group(np.abs(x), np.abs(weight), offsets)
    assert (np.abs(y - by_group(x, weight, offsets)) <= limit).all()
    g = rng.standard_normal(y.shape).astype(np.float32)
    gradients = module.backward(residuals, g)
    slope = outer_by_group(x, g, offsets)
    slope = slope if laid is _as_it_is else slope.transpose(0, 2, 1)
    parts = (5, 8, 4, 24) if laid is _as_it_is else (5, 24, 8, 4)
    wanted = (slope * codes).reshape(parts).sum(axis + 1)
    np.testing.assert_allclose(gradients["scale"], wanted.astype(float), rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(
        gradients["x"], by_group(g, weight.transpose(0, 2, 1), offsets).astype(float), rtol=1e-4, atol=1e-2
    )


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_short_floats_are_read_as_they_are_and_rounded_once(dtype: str) -> None:
    module = compiled("cpu", dtype)
    assert module.forward.workspace_size(S=3, E=100, K=64, N=8) < 100 * 64 * 8  # no f32 of all weights
    rng = np.random.default_rng(0)
    kind = DTYPES[dtype].np
    x, weight = rng.standard_normal((9, 64)).astype(kind), rng.standard_normal((3, 64, 8)).astype(kind)
    offsets = np.array([0, 2, 2, 9])
    y = module(x=x, weight=weight, offsets=offsets)
    exact = by_group(x, weight, offsets).astype(float)
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    assert (np.abs(y.astype(float) - exact) <= unit * np.abs(exact) + 64 * 2.0**-24 * 64).all()


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_offsets_of_4_bits(target: str) -> None:
    """They lie one in a byte."""
    module = compiled(target, index="u4")
    rng = np.random.default_rng(0)
    x, weight, offsets = rng.standard_normal((9, 3)), rng.standard_normal((2, 3, 4)), np.array([0, 4, 9])
    y, residuals = module.forward(x=x, weight=weight, offsets=offsets.astype(DTYPES["u4"].np))
    np.testing.assert_allclose(y, by_group(x, weight, offsets).astype(float), rtol=1e-13, atol=1e-13)
    wanted = outer_by_group(x, y, offsets).astype(float)
    np.testing.assert_allclose(module.backward(residuals, y)["weight"], wanted, rtol=1e-13, atol=1e-13)


def test_rows_in_any_order_of_memory() -> None:
    """Transposed operands are read where they lie."""
    graph = gradc.trace(
        lambda x, weight, offsets: ops.grouped_matmul(x.T, ops.transpose(weight, (1, 2, 0)), offsets),
        x="f64[K,S]", weight="f64[N,E,K]", offsets="u8[E+1]",
    )  # fmt: skip
    module = gradc.compile(graph)
    assert [type(step) for step in module.forward.program.steps].count(Call) == 1
    assert not any(buffer.kind == "temp" for buffer in module.forward.program.buffers)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 8)), rng.standard_normal((5, 2, 3))
    offsets = np.array([0, 5, 7], np.uint8)
    wanted, size = (by_group(a.T, b.transpose(1, 2, 0), offsets) for a, b in ((x, weight), (abs(x), abs(weight))))
    assert (np.abs(module(x=x, weight=weight, offsets=offsets) - wanted) <= 4 * 2.0**-53 * size).all()
