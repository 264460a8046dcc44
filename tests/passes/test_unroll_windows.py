"""unroll_windows on a GPU's programs: windows, and what strided windows spread, are straight-line code of neighbouring
elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agreement import merged
from skips import disassembled

import gradc
from gradc import knobs, ops
from gradc.inspect.static import directions
from gradc.ir.statement import REDUCTIONS

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def pooled(kind: str, kernel: int, stride: int, padding: int) -> Any:
    op = ops.max_pool2d if kind == "max" else ops.avg_pool2d
    return lambda x: op(x, kernel, stride, padding)


def by_torch(kind: str, x: np.ndarray, dy: np.ndarray, *sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient in f64."""
    given = torch.from_numpy(x.astype(np.float64)).requires_grad_()
    op = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    y = op(given, *sizes)
    (dx,) = torch.autograd.grad(y, given, torch.from_numpy(dy.astype(np.float64)))
    return y.detach().numpy(), dx.numpy()


POOLED = (
    ((2, 16, 10, 20), (3, 2, 1)),  # phases of two along both axes
    ((1, 24, 9, 17), (3, 2, 1)),  # axes that cannot be cut into phases
    ((2, 9, 12, 16), (2, 2, 0)),  # windows side by side
    ((1, 8, 9, 24), (5, 3, 2)),  # of three
    ((3, 11, 8, 9), (3, 1, 1)),  # windows that overlap by all but one
)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_and_its_gradient(layout: str, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("gradc.passes.program.unroll_windows.MOST_THREADS", 1)
    cases = {
        "_".join(map(str, (dtype, *shape, "by", *sizes))): (dtype, shape, sizes)
        for dtype in ("f32", "bf16")
        for shape, sizes in POOLED
    }
    graphs = {
        case: gradc.trace(pooled(kind, *sizes), x=f"{dtype}[{','.join(map(str, shape))}]")
        for case, (dtype, shape, sizes) in cases.items()
    }
    module = gradc.compile(
        merged("pooled", graphs.items()),
        wrt=[f"{case}.x" for case in cases],
        target="cuda-sim",
        layout={f"{case}.{name}": layout for case in cases for name in "xy" if layout != "NCHW"},
    )
    assert not any(s.op in REDUCTIONS for e in module.executables.values() for k in e.program.kernels for s in k.body)
    inner, outer = ((0, 2, 3, 1), (0, 3, 1, 2)) if layout == "NHWC" else ((0, 1, 2, 3), (0, 1, 2, 3))
    draws = {case: np.random.default_rng(0) for case in cases}
    given = {}
    for case, (_, shape, _) in cases.items():
        x = draws[case].permutation(int(np.prod(shape))).reshape(shape) - 500.0  # distinct integers of few digits
        given[case] = (x % 251).astype(graphs[case].input("x").dtype.np)  # ties too
    y, residuals = module.forward(
        **{f"{case}.x": np.ascontiguousarray(x.transpose(inner)) for case, x in given.items()}
    )
    dy = {f"{c}.y": draws[c].integers(-8, 9, y[f"{c}.y"].shape).astype(x.dtype) for c, x in given.items()}
    dx = module.backward(residuals, **dy)
    for case, (dtype, _, sizes) in cases.items():
        wanted, slope = by_torch(kind, given[case], dy[f"{case}.y"].transpose(outer), *sizes)
        eps = float(torch.finfo(torch.float32 if dtype == "f32" else torch.bfloat16).eps)
        bound, sums = (
            (0.0, 0.0) if kind == "max" else (2 * eps, 2.0**-19)
        )  # of integers exact, else 8 adds of at most 8
        for what, found, exact in (("y", y[f"{case}.y"], wanted), ("dx", dx[f"{case}.x"], slope)):
            found = np.asarray(found.transpose(outer), np.float64)
            np.testing.assert_allclose(found, exact, rtol=bound, atol=sums, err_msg=f"{case}: {what}")


def test_nan_and_infinity_win_a_window_as_in_torch() -> None:
    x = np.array([[[[1, np.nan, -np.inf, 2], [np.nan, 3, -np.inf, -np.inf], [-np.inf] * 4, [-np.inf] * 4]]], np.float32)
    x = np.repeat(x, 8, axis=1)
    graph = gradc.trace(pooled("max", 3, 2, 1), x="f32[1,8,4,4]")
    module = gradc.compile(graph, wrt=["x"], target="cuda-sim")
    y, residuals = module.forward(x=x)
    dy = np.arange(1, 1 + y.size, dtype=np.float32).reshape(y.shape)
    dx = module.backward(residuals, dy)
    given = torch.from_numpy(x).requires_grad_()
    exact = torch.nn.functional.max_pool2d(given, 3, 2, 1)
    exact.backward(torch.from_numpy(dy))
    assert given.grad is not None
    np.testing.assert_array_equal(np.asarray(y), exact.detach().numpy())
    dx = np.asarray(dx if isinstance(dx, np.ndarray) else dx["x"])
    np.testing.assert_array_equal(dx.sum((2, 3)), given.grad.numpy().sum((2, 3)))
    np.testing.assert_array_equal(dx[..., 2:], given.grad.numpy()[..., 2:])


@disassembled("sm_90")
def test_a_window_of_channels_last_images_takes_16_bytes_at_once() -> None:
    """The predicted time of both directions is at most twice that of their bytes."""
    graph = gradc.trace(pooled("max", 3, 2, 1), x="bf16[32,64,112,112]")
    module = gradc.compile(graph, wrt=["x"], target="cuda", arch="sm_90", layout={"x": "NHWC", "y": "NHWC"})
    found = directions(module, {})
    assert all(p.load_width >= 8 for d in found.values() for _, p in d.launches)
    for d in found.values():
        assert d.seconds is not None and d.seconds <= 2 * d.floor / d.gpu.bandwidth
        assert all(r.spill_stores == 0 for r in d.executable.binary.kernels.values())
