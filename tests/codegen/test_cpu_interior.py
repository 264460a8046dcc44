"""Columns whose windows lie inside an image are a loop without tests: the same values for every size, also where no
window lies inside, and no tests in that loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.runtime.host import pool
from tests.agreement import agree_with_torch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.optimised

SIZES = [(1, 1), (2, 3), (5, 4), (7, 7), (8, 31), (9, 50), (17, 64), (3, 129)]
WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 5), "stride": (1, 3), "padding": (1, 2)},
    {"kernel_size": 3, "stride": 4, "padding": 1},
    {"kernel_size": 5, "stride": 2, "padding": 2},
]


def _sizes(windows: dict[str, Any], dilation: int = 1) -> list[tuple[int, int]]:
    """Those that have a window."""
    kernel, padding = (np.broadcast_to(windows[k], 2) for k in ("kernel_size", "padding"))
    return [s for s in SIZES if all(n + 2 * p > dilation * (k - 1) for n, p, k in zip(s, padding, kernel, strict=True))]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("kind", ["max_pool2d", "avg_pool2d"])
def test_poolings_of_every_size(kind: str, windows: dict[str, Any]) -> None:
    module = gradc.compile(
        gradc.trace(lambda x: getattr(ops, kind)(x, **windows), x="f32[2,3,H,W]"), wrt=["x"], target="cpu"
    )
    for size in _sizes(windows):
        x = np.random.default_rng(0).standard_normal((2, 3, *size)).astype("f4")
        agree_with_torch(module, lambda x: getattr(torch.nn.functional, kind)(x, **windows), {"x": x})


@long_tests.values
@pytest.mark.parametrize("sizes", ["fixed", "symbolic"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("dilation", [1, 2])
def test_depthwise_convolutions_of_every_size(windows: dict[str, Any], dilation: int, sizes: str) -> None:
    kernel = tuple(int(k) for k in np.broadcast_to(windows["kernel_size"], 2))
    options = {k: windows[k] for k in ("stride", "padding")} | {"groups": 4, "dilation": dilation}

    def ours(size: str) -> Any:
        graph = gradc.trace(
            lambda x, w: ops.conv2d(ops.relu6(3 * x), w, **options),
            x=f"f32[2,4,{size}]",
            w=f"f32[4,1,{kernel[0]},{kernel[1]}]",
        )
        return gradc.compile(graph, wrt=["x", "w"], target="cpu")

    module = ours("H,W") if sizes == "symbolic" else None
    for size in _sizes(windows, dilation)[:: 1 if module else 3]:
        draw = np.random.default_rng(0)
        given = {
            "x": draw.standard_normal((2, 4, *size)).astype("f4"),
            "w": draw.standard_normal((4, 1, *kernel)).astype("f4"),
        }
        agree_with_torch(
            module or ours(f"{size[0]},{size[1]}"),
            lambda x, w: torch.nn.functional.conv2d(torch.nn.functional.relu6(3 * x), w, **options),
            given,
        )


def _loops(source: str) -> tuple[str, str]:
    """(the loop that tests, the loop inside)"""
    inside = source.index("< inside1; ")
    return source[source.index("inside0 == inside1") : inside], source[inside : source.index("}", inside)]


def test_the_loop_inside_has_no_tests() -> None:
    graph = gradc.trace(lambda x: ops.max_pool2d(x, 3, 2, 1), x="f32[2,3,32,112]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    found = 0
    for kernel in (k for e in module.executables.values() for k in e.kernels.values()):
        if "inside0" not in kernel.source:
            continue
        tests, inside = _loops(kernel.source)
        assert "(u64)" in tests
        assert "(u64)" not in inside and "f32_of_bits" not in inside
        found += 1
    assert found == 3


def test_a_test_of_the_row_that_masks_loads_is_a_constant_of_the_loop() -> None:
    """Compilers make no vectors of loads that are all under one mask."""
    graph = gradc.trace(lambda x: ops.max_pool2d(x, 3, 2, 1), x="f32[2,3,32,112]")
    source = gradc.compile(graph, wrt=["x"], target="cpu").backward.source
    switch = re.search(
        r"if \((v\d+)\) \{\s+const i32 \1 = 1;(.*?)\} else \{\s+const i32 \1 = 0;(.*?< inside1; .*?\})", source, re.S
    )
    assert switch
    for loop in switch.group(2, 3):
        masks = set(re.findall(r"= (\w+) \? \w+\[", loop))
        assert masks == {switch.group(1)}


def test_a_nan_beside_an_edge_is_seen() -> None:
    graph = gradc.trace(lambda x: ops.max_pool2d(x, 3, 2, 1), x="f32[1,1,6,64]")
    module = gradc.compile(graph, wrt=[], target="cpu")
    for column in (0, 1, 2, 31, 62, 63):
        x = np.zeros((1, 1, 6, 64), np.float32)
        x[0, 0, 3, column] = np.nan
        y = module(x=x)
        wanted = torch.nn.functional.max_pool2d(torch.from_numpy(x), 3, 2, 1).numpy()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))


DIAGONALS: dict[str, Callable[[Any, Any], Any]] = {
    "le": lambda row, col: ops.le(col, row),
    "lt, moved": lambda row, col: ops.lt(col - 2, row + 5),
    "ge, moved": lambda row, col: ops.ge(row, col + 3),
    "gt": lambda row, col: ops.gt(row, col),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_columns_before_a_diagonal_are_a_loop_without_tests(name: str) -> None:
    """Sums, maxima and stores, in blocks of columns that lie before the diagonal, across it, and behind it."""

    def ours(x: Any) -> Any:
        row, col = (ops.iota(x.shape, axis=axis) for axis in (0, 1))
        return ops.safe_softmax(ops.where(DIAGONALS[name](row, col), x, -np.inf), -1)

    def theirs(x: Any) -> Any:
        row, col = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])
        kept = {"le": col <= row, "lt, moved": col < row + 7, "ge, moved": row >= col + 3, "gt": row > col}[name]
        return torch.where(kept, x, -torch.inf).softmax(1).nan_to_num()

    module = gradc.compile(gradc.trace(ours, x="f32[N,M]"), wrt=["x"], target="cpu")
    source = module.source()
    assert source.count(" < inside; ") == len(re.findall(r" = inside;\s", source)) > 1
    for size in ((1, 1), (3, 9), (9, 3), (40, 2500), (2500, 2300)):
        x = np.random.default_rng(0).standard_normal(size).astype("f4")
        y = module(x=x)
        np.testing.assert_allclose(y, theirs(torch.from_numpy(x).double()).numpy(), rtol=2e-6, atol=1e-9)
        dy = np.random.default_rng(1).standard_normal(size).astype("f4")
        _, residuals = module.forward(x=x)
        p, g = torch.from_numpy(y).double(), torch.from_numpy(dy).double()
        wanted = p * (g - (p * g).sum(1, keepdim=True))
        np.testing.assert_allclose(module.backward(residuals, dy)["x"], wanted.numpy(), rtol=2e-5, atol=1e-7)


def test_a_diagonal_so_far_away_that_the_distance_overflows() -> None:
    """Beside a symbolic size, too: no column is before it, though the difference of the two places wraps."""
    far = 1 << 62

    def ours(x: Any) -> Any:
        row, col = (ops.iota(x.shape, axis=axis) for axis in (0, 1))
        n = ops.dim(x.shape[0])
        return ops.where(ops.le(col + n + far, row - n - far), x, -1.0)

    module = gradc.compile(gradc.trace(ours, x="f32[N,M]"), wrt=[], target="cpu")
    assert (module(x=np.ones((3, 9), np.float32)) == -1).all()


def test_a_nan_on_either_side_of_a_diagonal() -> None:
    """Before it, it is seen; behind it, it is not."""

    def ours(x: Any) -> Any:
        row, col = (ops.iota(x.shape, axis=axis) for axis in (0, 1))
        return ops.softmax(ops.where(ops.le(col, row), x, -np.inf), -1)

    module = gradc.compile(gradc.trace(ours, x="f32[50,70]"), wrt=[], target="cpu")
    for column in (0, 30, 31, 69):
        x = np.zeros((50, 70), np.float32)
        x[30, column] = np.nan
        assert np.isnan(module(x=x)).any(1).tolist() == [row == 30 and column <= 30 for row in range(50)]


def test_the_same_bits_for_any_number_of_threads() -> None:
    graph = gradc.trace(
        lambda x, w: ops.conv2d(ops.relu6(x), w, padding=1, groups=8), x="f32[4,8,19,65]", w="f32[8,1,3,3]"
    )
    module = gradc.compile(graph, wrt=["x", "w"], target="cpu")
    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((4, 8, 19, 65)).astype("f4"), draw.standard_normal((8, 1, 3, 3)).astype("f4")
    before, bits = pool.num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = module.forward(x=x, w=w)
            gradients = module.backward(residuals, y)
            bits.add((y.tobytes(), *(g.tobytes() for g in gradients.values())))
    finally:
        pool.set_num_threads(before)
    assert len(bits) == 1
