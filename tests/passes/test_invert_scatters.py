"""invert_scatters: what is added at known positions is gathered, on a GPU; values and gradients as torch's in f64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.errors import InternalError
from gradc.ir.node import Node
from gradc.passes.graph import invert_scatters

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with knobs.SIM_CHECK.set(True):
        yield


def gradient(fn: Callable[[Node], Node], shape: tuple[int, ...], dy: np.ndarray | None = None, **options: Any) -> Any:
    """(backward program, cotangent, gradient) of a function of f32."""
    graph = gradc.trace(fn, x=f"f32[{','.join(map(str, shape))}]")
    module = gradc.compile(graph, wrt=["x"], target="cuda-sim", **options)
    rng = np.random.default_rng(0)
    y, residuals = module.forward(x=rng.normal(size=shape).astype(np.float32))
    dy = rng.normal(size=y.shape).astype(np.float32) if dy is None else dy
    dx = module.backward(residuals, dy)
    return module.backward.program, dy, dx if isinstance(dx, np.ndarray) else dx["x"]


def accums(program: Any) -> int:
    return sum(len(k.accums) for k in program.kernels)


@pytest.mark.parametrize(
    "shape, size, mode, corners",
    [
        ((2, 3, 9, 10), (18, 20), "bilinear", False),
        ((1, 8, 7, 8), (21, 32), "bilinear", False),  # of three and four
        ((2, 3, 9, 10), (17, 19), "bilinear", True),  # 2 n - 1: a step that is none of whole places
        ((1, 2, 8, 9), (16, 18), "bicubic", False),
        ((1, 2, 6, 5, 8), (12, 10, 16), "trilinear", False),
        ((2, 5, 11), (22,), "linear", False),
        ((1, 3, 8, 8), (13, 11), "bilinear", False),  # ratios of nothing whole
        ((1, 3, 12, 8), (6, 4), "bilinear", False),  # smaller: nothing is gathered
    ],
)
def test_gradients_of_interpolation(shape: tuple[int, ...], size: tuple[int, ...], mode: str, corners: bool) -> None:
    program, dy, dx = gradient(lambda x: ops.interpolate(x, size=size, mode=mode, align_corners=corners), shape)
    given = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.interpolate(given, size=size, mode=mode, align_corners=corners)
    (exact,) = torch.autograd.grad(y, given, torch.from_numpy(dy.astype(np.float64)))
    bound = 2.0**-20 * np.abs(dy).max() * max(1, np.prod(size) / np.prod(shape[2:]))
    np.testing.assert_allclose(dx, exact.numpy(), rtol=0, atol=bound)
    if (
        np.prod(size) > np.prod(shape[2:])
        and not corners
        and all(m % n == 0 for m, n in zip(size, shape[2:], strict=True))
    ):
        assert not accums(program)


def test_a_cotangent_that_is_no_number_reaches_what_it_was_made_of_alone() -> None:
    dy = np.zeros((1, 1, 16, 16), np.float32)
    dy[0, 0, 7, 7] = np.nan
    _, _, dx = gradient(lambda x: ops.interpolate(x, size=(16, 16), mode="bilinear"), (1, 1, 8, 8), dy)
    given = torch.zeros((1, 1, 8, 8), dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.interpolate(given, size=(16, 16), mode="bilinear")
    (exact,) = torch.autograd.grad(y, given, torch.from_numpy(dy.astype(np.float64)))
    np.testing.assert_array_equal(np.isnan(dx), np.isnan(exact.numpy()))


def test_strict_numerics_and_positions_in_data_keep_their_scatters() -> None:
    up = lambda x: ops.interpolate(x, size=(16, 16), mode="bilinear")
    program, _, _ = gradient(up, (1, 2, 8, 8), numerics="strict")
    assert accums(program)
    graph = gradc.trace(lambda x, i: ops.gather(x, i, axis=1), x="f32[3,8]", i="i64[16]")
    module = gradc.compile(graph, wrt=["x"], target="cuda-sim")
    assert accums(module.backward.program)


def test_windows_that_would_be_long_are_left() -> None:
    """All positions are one element's, or spread without a step."""
    for positions in ([3] * 40, [k * 7 % 40 for k in range(40)]):
        fn = lambda x, p=positions: ops.gather(x, ops.constant(tuple(p), dtype="i64", shape=(40,)), axis=0)
        program, dy, dx = gradient(fn, (8 if positions[0] == 3 else 40, 9))
        exact = np.zeros(dx.shape)
        np.add.at(exact, positions, dy.astype(np.float64))
        np.testing.assert_allclose(dx, exact, rtol=0, atol=2.0**-20 * np.abs(dy).sum(0).max())
        assert accums(program)


def at(size: int) -> Node:
    return ops.iota((size,), dtype="i64")


CLAMPED: dict[str, Callable[[], Node]] = {
    "above": lambda: ops.where(at(4) < 3, at(4), 2**32),
    "below": lambda: ops.where(at(4) < 1, at(4) - 2**32 + 2, at(4)),
    "of a float": lambda: ops.cast(
        ops.where(ops.cast(at(4), "f64") < 3.0, ops.cast(at(4), "f64"), ops.cast(at(4), "f64") * 1e10), "i64"
    ),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_positions_beyond_i32_are_clamped_as_they_are(name: str) -> None:
    graph = gradc.trace(lambda x: ops.scatter_add(CLAMPED[name](), x, size=4, axis=0, oob="clamp"), x="f32[4]")
    x = np.arange(1, 5, dtype=np.float32)
    want = gradc.compile(graph, [], target="numpy")(x=x)
    np.testing.assert_array_equal(gradc.compile(graph, [], target="cuda-sim")(x=x), want)
    np.testing.assert_array_equal(want, x)


def test_a_sum_of_one_negative_zero_is_zero() -> None:
    graph = gradc.trace(lambda x: ops.scatter_add(at(4), x, size=4, axis=0), x="f32[4]")
    y = gradc.compile(graph, [], target="cuda-sim")(x=-np.zeros(4, np.float32))
    assert not np.signbit(y).any()


def enlarged(x: Node) -> Node:
    return ops.interpolate(x, size=(18, 20), mode="bilinear")


def test_validation_follows_positions() -> None:
    with knobs.VALIDATE.set(True):
        gradient(enlarged, (2, 3, 9, 10))
        for case in CLAMPED.values():
            graph = gradc.trace(lambda x, at=case: ops.scatter_add(at(), x, size=4, axis=0, oob="clamp"), x="f32[4]")
            gradc.compile(graph, [], target="cuda-sim")


def test_validation_names_it_where_a_window_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = invert_scatters._Scattered.gathered
    monkeypatch.setattr(invert_scatters._Scattered, "gathered", lambda self, a, b, v: gathered(self, a, b - 1, v))
    with knobs.VALIDATE.set(True), pytest.raises(InternalError, match=r"^invert_scatters: .* no longer means the same"):
        gradient(enlarged, (2, 3, 9, 10))
