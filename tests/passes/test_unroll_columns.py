"""unroll_columns: what a kernel over windows computes is what it computed before, ties and NaN included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.ir.statement import REDUCTIONS
from gradc.ir.types import dtype as dtype_of
from gradc.ir.verify import verify_program
from gradc.passes.graph.decompose import decompose
from gradc.passes.program.unroll_columns import unroll_columns
from gradc.passes.schedule.schedule import schedule
from tests.agreement import agree_with_torch

POOL = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 1)}


def both(fn: Any, **types: str) -> tuple[Any, Any]:
    graph = decompose(gradc.trace(fn, **types))
    before = schedule(graph)
    after = unroll_columns(before)
    verify_program(after)
    return before, after


def run(program: Any, **given: np.ndarray) -> dict[str, np.ndarray]:
    return interp.run(program, given)


KINDS = {
    "max": lambda x: ops.max_pool(x, **POOL),
    "place": lambda x: ops.argmax(ops.windows(x, **WINDOWS), axis=(4, 5)),
    "least": lambda x: ops.amin(ops.windows(x, **WINDOWS), axis=(4, 5)),
    "place of the least": lambda x: ops.argmin(ops.windows(x, **WINDOWS), axis=(4, 5)),
    "sum": lambda x: ops.sum(ops.windows(x, **WINDOWS), axis=(4, 5)),
    "product": lambda x: ops.prod(ops.windows(x, **WINDOWS), axis=(4, 5)),
}
WINDOWS: dict[str, Any] = {
    "axis": (2, 3),
    "size": (3, 2),
    "count": (4, 9),
    "step": (2, 1),
    "dilation": (1, 2),
    "padding": (1, 1),
}


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "u8", "i64"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_values(kind: str, dtype: str) -> None:
    before, after = both(KINDS[kind], x=f"{dtype}[2,3,9,10]")
    assert any(s.op in REDUCTIONS for k in before.kernels for s in k.body)
    assert not any(s.op in REDUCTIONS for k in after.kernels for s in k.body)
    rng = np.random.default_rng(3)
    x = rng.integers(0, 4, (2, 3, 9, 10)).astype(dtype_of(dtype).np)  # ties; sums and products are exact
    if x.dtype.kind == "f":
        x[rng.random(x.shape) < 0.2] = np.nan
    want, got = run(before, x=x), run(after, x=x)
    for name in want:
        assert want[name].dtype == got[name].dtype
        np.testing.assert_array_equal(got[name], want[name])


def test_compiled() -> None:
    graph = gradc.trace(lambda x: ops.max_pool(x, **POOL), x="f32[N,3,H,W]")
    module = gradc.compile(graph, wrt=["x"])
    assert "unroll_columns" in str([stage.name for stage in module.stages])
    x = np.random.default_rng(0).integers(0, 5, (2, 3, 8, 19)).astype(np.float32)
    y, residuals = module.forward(x=x)
    dy = np.arange(y.size, dtype=np.float32).reshape(y.shape)
    wanted = interp.run(differentiate(graph, ["x"]), {"x": x, "d.y": dy})
    np.testing.assert_array_equal(y, wanted["y"])
    np.testing.assert_array_equal(module.backward(residuals, dy)["x"], wanted["d.x"])


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (lambda x: ops.sum(x, axis=1), {"x": "f32[N,9]"}),  # columns lie together: a vector of rows would be strided
        (lambda x: ops.sum(ops.windows(x, **{**WINDOWS, "count": (4, 3)}), axis=(4, 5)), {"x": "f32[2,3,9,4]"}),
        (lambda x: ops.mean(x, axis=(2, 3)), {"x": "f32[4,8,64,64]"}),  # too many
    ],
)
def test_what_is_left_alone(fn: Any, types: dict[str, str]) -> None:
    before, after = both(fn, **types)
    assert after is before


@pytest.mark.parametrize("count", [2, 3, 4])
def test_arrays_that_are_joined_in_turn_go_along_their_own_elements(count: int) -> None:
    def joined(**arrays: Any) -> Any:
        return ops.concat(*(ops.reshape(ops.neg(a), (3, 11, 1)) for a in arrays.values()), axis=2)

    types = {f"x{i}": "f32[3,11]" for i in range(count)}
    before, after = both(joined, **types)
    (kernel,) = after.kernels
    assert [n for _, n in kernel.cols] == [11] and sum(s.op == "store" for s in kernel.body) == count
    assert not any(s.op in ("in_bounds", "where") or s.where for s in kernel.body)
    arrays = {name: np.random.default_rng(0).standard_normal((3, 11), np.float32) for name in types}
    want, got = run(before, **arrays), run(after, **arrays)
    np.testing.assert_array_equal(got["y"], want["y"])


def test_a_scan_is_no_window() -> None:
    """Its columns are the axis that it goes along."""
    graph = gradc.trace(lambda x: ops.sum(ops.cumsum(x, axis=1), axis=1), x="f32[4,3,64]")
    x = np.random.default_rng(0).normal(size=(4, 3, 64)).astype(np.float32)
    np.testing.assert_allclose(gradc.compile(graph)(x=x), x.cumsum(1).sum(1), rtol=1e-5, atol=1e-5)


def test_zeros_keep_their_signs() -> None:
    before, after = both(
        lambda x: 1.0 / ops.amin(ops.where(ops.windows(x, **WINDOWS) > 0, 0.0, -0.0), axis=(4, 5)), x="f32[2,3,9,10]"
    )
    assert after is not before
    x = np.full((2, 3, 9, 10), -1, np.float32)
    with np.errstate(divide="ignore"):
        want, got = run(before, x=x), run(after, x=x)
    (name,) = want
    assert (want[name] == -np.inf).all()
    np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"dilation": 2, "padding": 2}, {"stride": (1, 2), "padding": (0, 2)}]
)
@pytest.mark.parametrize("shape", ["f32[2,6,20,24]", "f32[B,6,H,W]"])
def test_a_depthwise_convolution_goes_along_its_rows(shape: str, options: dict[str, Any]) -> None:
    """Behind an activation, whose factors are read once for a row: values, gradients, and no loop over few columns."""
    torch = pytest.importorskip("torch")

    def layer(f: Any, x: Any, scale: Any, w: Any) -> Any:
        return f.conv2d(f.relu(x * scale), w, groups=6, **{"padding": 1, **options})

    types = {"x": shape, "scale": "f32[6,1,1]", "w": "f32[6,1,3,3]"}
    module = gradc.compile(gradc.trace(lambda **x: layer(ops, **x), **types), wrt=[*types], target="cpu")
    few = [
        kernel.name
        for executable in module.executables.values()
        for kernel in executable.program.kernels
        if kernel.cols and all(isinstance(n, int) and n == 3 for _, n in kernel.cols)
    ]
    strided = options.get("stride", 1) != 1
    assert not few or strided, few
    draw = np.random.default_rng(0)
    given = {
        "x": draw.standard_normal((2, 6, 20, 24)).astype("f4"),
        "scale": draw.standard_normal((6, 1, 1)).astype("f4"),
        "w": draw.standard_normal((6, 1, 3, 3)).astype("f4"),
    }
    agree_with_torch(module, lambda **x: layer(torch.nn.functional, **x), given)


def test_windows_of_seven_by_seven_go_along_their_rows() -> None:
    torch = pytest.importorskip("torch")

    def layer(f: Any, x: Any, w: Any) -> Any:
        return f.conv2d(x, w, groups=6, padding=3)

    types = {"x": "f32[2,6,20,24]", "w": "f32[6,1,7,7]"}
    module = gradc.compile(gradc.trace(lambda **x: layer(ops, **x), **types), wrt=[*types], target="cpu")
    assert [n for k in module.forward.program.kernels for _, n in k.cols] == [24]
    assert 24 in [n for k in module.backward.program.kernels for _, n in k.cols]
    draw = np.random.default_rng(0)
    given = {name: draw.standard_normal(shape, "f4") for name, shape in (("x", (2, 6, 20, 24)), ("w", (6, 1, 7, 7)))}
    agree_with_torch(module, lambda **x: layer(torch.nn.functional, **x), given)


def test_axes_of_one_element_do_not_hide_what_is_contiguous() -> None:
    before, after = both(lambda x: ops.sum(ops.windows(x, **WINDOWS), axis=(5, 6)), x="f32[2,3,9,10,1]")
    (kernel,) = after.kernels
    assert after is not before and [n for _, n in kernel.cols] == [9]
    x = np.random.default_rng(0).integers(0, 4, (2, 3, 9, 10, 1)).astype(np.float32)  # sums are exact
    want, got = run(before, x=x), run(after, x=x)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_sums_over_windows_keep_their_order_where_that_is_asked() -> None:
    graph = gradc.trace(lambda x, w: ops.conv2d(x, w, groups=6, padding=1), x="f32[2,6,20,24]", w="f32[6,1,3,3]")
    columns = {}
    for numerics in ("real", "strict"):
        module = gradc.compile(graph, wrt=["w"], target="cpu", numerics=numerics)
        (kernel,) = [k for k in module.backward.program.kernels if k.accums]
        columns[numerics] = [n for _, n in kernel.cols]
    assert columns == {"real": [24], "strict": [3]}


def test_few_sums_are_added_up_side_by_side() -> None:
    """One for each place in a row of a window, in a kernel that reads the response once for all of them."""
    graph = differentiate(gradc.trace(lambda x, w: ops.conv2d(x, w, groups=6, padding=1),
                                      x="f32[2,6,20,24]", w="f32[6,1,3,3]"), ["w"])  # fmt: skip
    before = schedule(decompose(graph))
    after = unroll_columns(before)
    verify_program(after)
    (sums,) = [k for k in after.kernels if k.accums]
    assert [n for _, n in sums.cols] == [24]
    assert len(sums.accums) == 3 and len({s.buffer for s in sums.accums}) == 3
    assert len([s for s in sums.body if s.op == "load" and s.buffer == "d.y"]) == 1
    draw = np.random.default_rng(0)
    given = {b.name: draw.standard_normal([int(n) for n in b.type.shape]).astype("f4") for b in before.of_kind("input")}
    want, got = run(before, **given), run(after, **given)
    np.testing.assert_allclose(got["d.w"], want["d.w"], rtol=1e-5, atol=1e-4)
    assert not any(len(k.accums) > 1 for k in unroll_columns(before, reassociate=False).kernels)


def test_a_sum_whose_reduction_is_named_stays_one() -> None:
    graph = gradc.trace(lambda x, w: ops.conv2d(x, w, groups=6, padding=1), x="f32[2,6,20,24]", w="f32[6,1,3,3]")
    module = gradc.compile(graph, wrt=["w"], target="cpu", reductions={"d.w": "privatized"})
    (kernel,) = [k for k in module.backward.program.kernels if k.accums]
    assert kernel.strategies == {"d.w": "privatized"}


def test_the_sums_buffers_have_names_of_their_own() -> None:
    graph = gradc.ir.text.parse(
        """graph @f(%x: f32[2,6,12,16], %w: f32[6,1,3,3], %w.sum0: f32[2,6,12,16]) {
  %0: f32[2,6,12,16] = convolution %x, %w {dilation=[1, 1], groups=6, output_padding=[0, 0], padding=[[1, 1], [1, 1]],\
 stride=[1, 1], transposed=false}
  %1: f32[2,6,12,16] = mul %0, %w.sum0
  return y=%1
}
"""
    )
    module = gradc.compile(graph, wrt=["w", "w.sum0"], target="cpu")
    draw = np.random.default_rng(0)
    given = {n: draw.standard_normal([*map(int, t.shape)]).astype("f4") for n, t in
             ((n.attrs["name"], n.type) for n in graph.inputs)}  # fmt: skip
    y, residuals = module.forward(**given)
    wanted = interp.run(differentiate(graph, ["w", "w.sum0"]), {**given, "d.y": np.ones_like(y)})
    gradients = module.backward(residuals, np.ones_like(y))
    for name in ("w", "w.sum0"):
        np.testing.assert_allclose(gradients[name], wanted[f"d.{name}"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [2, 3, 4, 5])
@pytest.mark.parametrize("padding", [0, 1])
def test_places_are_not_divided_column_by_column(stride: int, padding: int) -> None:
    """The gradient of an image whose windows are a step apart: a column for as many elements."""
    pooled = gradc.trace(lambda x: ops.max_pool(x, (3,), (stride,), (padding,)), x="f32[2,3,120]")
    before, after = (
        unroll(schedule(decompose(differentiate(pooled, ["x"])))) for unroll in (lambda p: p, unroll_columns)
    )
    verify_program(after)
    divisions = [s for k in after.kernels for s in k.body if s.op in ("right_shift", "floordiv") and k.is_column(s)]
    assert bool(divisions) == (stride > 4)
    x = np.random.default_rng(0).integers(0, 5, (2, 3, 120)).astype(np.float32)  # ties
    count = (120 + 2 * padding - 3) // stride + 1
    dy = np.arange(2 * 3 * count, dtype=np.float32).reshape(2, 3, count)
    want, got = run(before, x=x, **{"d.y": dy}), run(after, x=x, **{"d.y": dy})
    np.testing.assert_array_equal(got["d.x"], want["d.x"])


def test_a_window_that_stands_out_on_both_sides_reads_what_is_there():
    """The only window along an axis is at places that are constants, some of them outside."""
    graph = gradc.trace(lambda x, w: ops.conv2d(x, w, padding=(1, 1), groups=2), x="f32[2,2,3,33]", w="f32[2,1,5,3]")
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((2, 2, 3, 33), np.float32),
        "w": rng.standard_normal((2, 1, 5, 3), np.float32),
    }
    padded = np.pad(arrays["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    want = sum(
        padded[:, :, i : i + 1, j : j + 33] * arrays["w"][:, :, i, j, None, None].reshape(1, 2, 1, 1)
        for i in range(5)
        for j in range(3)
    )
    np.testing.assert_allclose(gradc.compile(graph, wrt=[], target="cpu")(**arrays), want, atol=1e-5)
