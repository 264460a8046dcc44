"""Scans: values, gradients and second derivatives against torch in f64; compiled, and in the simulator of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.runtime.host import pool

torch = pytest.importorskip("torch")

from torch_oracles import TORCH  # noqa: E402

NAMES = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
INF, NAN = float("inf"), float("nan")


def reversible(name: str, axis: int, reverse: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op, and what torch says that it is."""
    return (
        lambda x: getattr(ops, name)(x, axis, reverse=reverse),
        lambda x: TORCH[name](x, axis, reverse=reverse),
    )


def derivatives(fn: Callable[..., Any], oracle: Callable[..., Any], x: np.ndarray[Any, Any], rtol: float) -> None:
    """Value, gradient, and the gradient of a function of the gradient, in the interpreter, with f64."""
    graph = gradc.trace(fn, x=x)
    first = differentiate(graph, ["x"], unused="zeros")
    second = differentiate(
        first.with_outputs([("g", dict(first.outputs)["d.x"])]), ["x"], unused="zeros"
    )  # of the gradient, by its cotangent
    leaf = torch.tensor(x, requires_grad=True)
    value = oracle(leaf)
    upstream = torch.tensor(np.cos(np.arange(x.size)).reshape(value.shape))
    (slope,) = torch.autograd.grad(value, leaf, upstream, create_graph=True)
    again = torch.tensor(np.sin(np.arange(x.size) + 1.0).reshape(x.shape))
    curve = (
        torch.autograd.grad(slope, leaf, again, allow_unused=True, materialize_grads=True)[0]
        if slope.requires_grad
        else torch.zeros_like(leaf)
    )
    given = {"x": x, f"d.{graph.output_names[0]}": upstream.numpy(), "d.g": again.numpy()}
    np.testing.assert_allclose(interp.run(graph, {"x": x})[graph.output_names[0]], value.detach().numpy(), rtol, rtol)
    for joint, want in ((first, slope.detach()), (second, curve)):
        got = interp.run(joint, {n: given[n] for n in joint.input_names})["d.x"]
        np.testing.assert_allclose(got, want.numpy(), rtol, rtol)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    axis=st.integers(-3, 2),
    reverse=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_axis_and_direction(name: str, shape: list[int], axis: int, reverse: bool, seed: int) -> None:
    """A tenth of the elements are 0: products of several, and derivatives through them."""
    axis %= len(shape)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * (rng.random(shape) > 0.1) + (0.0 if name == "cumprod" else np.arange(shape[-1]) * 1e-3)
    derivatives(*reversible(name, axis, reverse), x, 1e-9)


@pytest.mark.parametrize("zeros", [(), (1,), (0, 3), (1, 2, 4)])
def test_second_derivatives_of_products_with_zeros(zeros: tuple[int, ...]) -> None:
    x = np.array([1.5, -2.0, 0.5, 3.0, -1.0])
    x[list(zeros)] = 0.0
    for reverse in (False, True):
        derivatives(*reversible("cumprod", 0, reverse), x, 1e-12)


def both(values: list[float], fn: Callable[..., Any]) -> list[float]:
    x = np.array(values)
    return [float(v) for v in interp.run(gradc.trace(fn, x=x), {"x": x})["y"]]


def test_of_equals_the_last_and_the_last_nan() -> None:
    """As torch has it; in reverse the one that is visited last."""
    x = [1.0, 3.0, 3.0, NAN, 2.0, NAN, 5.0]
    assert both(x, lambda x: ops.cumargmax(x, 0)) == [0, 1, 2, 3, 3, 5, 5]
    assert both(x, lambda x: ops.cumargmin(x, 0)) == [0, 0, 0, 3, 3, 5, 5]
    assert both([2.0, 2.0, 1.0], lambda x: ops.cumargmax(x, 0, reverse=True)) == [0, 1, 2]


def test_logcumsumexp_of_infinities() -> None:
    """Nothing but -inf is -inf, and gets no gradient; torch's is NaN there."""
    x = np.array([-INF, -INF, 0.0, 1.0, -INF])
    graph = gradc.trace(lambda x: ops.logcumsumexp(x, 0), x=x)
    np.testing.assert_allclose(interp.run(graph, x=x)["y"], [-INF, -INF, 0, *[np.log1p(np.e)] * 2])
    joint = differentiate(graph, ["x"])
    got = interp.run(joint, {"x": x, "d.y": np.ones(5)})["d.x"]
    e = np.e / (1 + np.e)
    np.testing.assert_allclose(got, [0, 0, 1 + 2 * (1 - e), 2 * e, 0])


def test_axes_dtypes_and_scalars() -> None:
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    flat = interp.run(gradc.trace(lambda x: ops.cumsum(x), x=x), x=x)["y"]
    np.testing.assert_array_equal(flat, np.cumsum(x))
    assert flat.dtype == np.int64
    assert interp.run(gradc.trace(lambda x: ops.cumprod(x, 0, dtype="f32"), x=x), x=x)["y"].dtype == np.float32
    for axis in (None, 0, -1):
        scalar = interp.run(gradc.trace(lambda x, axis=axis: ops.cummax(x, axis), x="f64[]"), x=np.float64(3))["y"]
        assert scalar.shape == () and scalar == 3
    assert interp.run(gradc.trace(lambda x: ops.cumsum(x, 1), x="f32[2,0]"), x=np.ones((2, 0), np.float32))[
        "y"
    ].shape == (2, 0)


def fused(x: Any, w: Any) -> tuple[Any, ...]:
    """Scans between pointwise ops, behind and before reductions, in both directions, along several axes."""
    total = ops.cumsum(ops.sin(x) * w, 1)
    part = ops.exp(total * 0.1 - ops.amax(total, axis=(1,), keepdims=True) * 0.1)
    back = ops.cumprod(1.0 + part * 0.01, 1, reverse=True)
    place = ops.cumargmax(x, 0)
    return (
        part / ops.sum(part, axis=1, keepdims=True),
        ops.sum(back, axis=0),
        ops.take_along_axis(x, place, axis=0) * ops.cummin(x, 0),
        ops.logcumsumexp(x, 0),
        ops.linear_recurrence(ops.tanh(x), ops.cumsum(x, 1), axis=1),
    )


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_fused_and_compiled(target: str) -> None:
    """One module; rows longer than a strip of a GPU's task, and than one block of columns."""
    graph = gradc.trace(fused, x="f32[M,N]", w="f32[N]")
    module = gradc.compile(graph, wrt=["x", "w"], target=target)
    for m, n in ((3, 700), (40, 1), (1, 0), (2, 2100 if target == "cpu" else 33)):
        rng = np.random.default_rng(n)
        given = {"x": rng.normal(size=(m, n)).astype(np.float32), "w": rng.normal(size=n).astype(np.float32)}
        if n == 0:
            continue
        values, residuals = module.forward(**given)
        want = interp.run(graph, given, precision="f64")
        upstream = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in values.items()}
        got = module.backward(residuals, *upstream.values())
        joint = differentiate(graph, ["x", "w"])
        exact = interp.run(joint, {**given, **{f"d.{k}": g for k, g in upstream.items()}}, precision="f64")
        for name, value in {**values, **{f"d.{k}": g for k, g in got.items()}}.items():
            expected = want.get(name, exact.get(name))
            scale = np.abs(expected).max()
            assert np.abs(value - expected).max() <= 3e-5 * scale, (target, m, n, name)


def test_a_scan_is_one_kernel_with_what_is_around_it() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(ops.cumsum(ops.sin(x), 1)), x="f32[N,64]"), wrt=[])
    assert len(module.kernels) == 1


def test_read_at_another_column_it_needs_memory() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.flip(ops.cumsum(x, 1), axis=(1,)), x="f32[N,64]"), wrt=[])
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    assert len(module.kernels) == 2
    np.testing.assert_allclose(module.forward(x=x)[0], np.cumsum(x, 1)[:, ::-1], 1e-5, 1e-5)


def test_the_bits_are_those_of_one_thread() -> None:
    """Along both axes; sums are kept in f64 and rounded once."""
    graph = gradc.trace(lambda x: (ops.cumsum(x, 1), ops.cumsum(x, 0, reverse=True)), x="f32[M,N]")
    x = np.random.default_rng(0).normal(size=(600, 1500)).astype(np.float32)
    module = gradc.compile(graph, wrt=[])
    found, before = [], pool.num_threads()
    try:
        for threads in range(1, 6):
            pool.set_num_threads(threads)
            found.append(module.forward(x=x)[0])
    finally:
        pool.set_num_threads(before)
    exact = {"y0": np.cumsum(x, 1, dtype=np.float64), "y1": np.cumsum(x[::-1], 0, dtype=np.float64)[::-1]}
    for name, value in found[0].items():
        assert all(np.array_equal(value, other[name]) for other in found)
        np.testing.assert_allclose(value, exact[name], 2.0**-23, 1e-12)
