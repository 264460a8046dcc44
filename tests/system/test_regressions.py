"""Graphs that once went wrong, each as small as it could be made: compiled, fused and not, against the interpreter in
f64.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.dims import symbol

rng = np.random.default_rng(1)


def agrees(fn: Any, types: dict[str, str], arrays: dict[str, np.ndarray]) -> None:
    graph = gradc.trace(fn, **types)
    want = interp.run(graph, arrays, precision="f64")
    for fuse in (True, False):
        got = gradc.compile(graph, fuse=fuse).forward.run(**arrays)
        for name, value in got.items():
            np.testing.assert_allclose(
                value.astype(np.float64),
                want[name].astype(np.float64),
                rtol=1e-4,
                atol=1e-4,
                err_msg=f"{name} fuse={fuse}",
            )


def f32(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 7, 64])
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32"])
def test_a_scatter_of_narrow_ints_wraps_before_the_sum(dtype: str, rows: int) -> None:
    kind = gradc.typeof(np.zeros(1, {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "i32": np.int32}[dtype])).dtype
    low, high = kind.range
    draw = lambda *shape: rng.integers(low, high, shape, endpoint=True).astype(kind.np)
    types = {"i": "i64[N]", "u": f"{dtype}[N,3]", "a": f"{dtype}[5,3]"}
    graph = gradc.trace(lambda i, u, a: ops.sum(a * ops.scatter_add(i, u, axis=0, size=5)), **types)
    arrays = {"i": rng.integers(0, 5, rows), "u": draw(rows, 3), "a": draw(5, 3)}
    np.testing.assert_array_equal(gradc.compile(graph)(**arrays), interp.run(graph, arrays)["y"])


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_a_scatter_by_a_column_beside_a_sum(rows: int) -> None:
    def fn(x, i):
        spread = ops.broadcast_to(ops.reshape(i, (6, 1)), (6, 5))
        return {"a": ops.sum(x, axis=(1, 2)), "b": ops.scatter_add(spread, x, axis=1, size=4)}

    agrees(fn, {"x": "f32[N,6,5]", "i": "i64[6]"}, {"x": f32(rows, 6, 5), "i": rng.integers(0, 4, 6)})


def test_skipped_positions_along_an_axis() -> None:
    types = {"i": "i64[N,3]", "u": "f32[N,3]", "a": "f32[N,5]"}
    arrays = {"i": rng.integers(-2, 8, (9, 3)), "u": f32(9, 3), "a": f32(9, 5)}
    agrees(lambda i, u, a: ops.sum(a * ops.scatter_add_along_axis(i, u, axis=1, size=5, oob="skip")), types, arrays)


def test_what_falls_outside_an_image_is_not_multiplied() -> None:
    i, j, u = rng.integers(0, 5, (2, 6)), rng.integers(0, 4, (2, 6)), f32(2, 3, 6)
    i[:, 0], u[:, :, 0] = 9, np.inf
    types = {"a": "f32[2,3,5,4]", "u": "f32[2,3,6]", "i": "i64[2,6]", "j": "i64[2,6]"}
    agrees(
        lambda a, u, i, j: ops.sum(a * ops.scatter_2d(u, i, j, size=(5, 4)), axis=(2, 3)),
        types,
        {"a": f32(2, 3, 5, 4), "u": u, "i": i, "j": j},
    )


@pytest.mark.parametrize("oob", ["clamp", "wrap"])
def test_nothing_is_added_to_a_table_without_rows(oob: str) -> None:
    types = {"i": "i64[N]", "u": "f32[N,3]", "a": "f32[V,3]"}
    arrays = {"i": np.array([0, 1]), "u": np.full((2, 3), np.inf, np.float32), "a": np.zeros((0, 3), np.float32)}
    agrees(lambda i, u, a: ops.sum(a * ops.scatter_add(i, u, axis=0, size=symbol("V"), oob=oob)), types, arrays)


@pytest.mark.parametrize("links", [200, 1500])
def test_a_long_chain_is_cut_into_kernels(links: int) -> None:
    def chain(x):
        for k in range(links):
            x = ops.sin(x) * 0.5 + 0.25 if k % 2 else ops.tanh(x)
        return x

    graph = gradc.trace(chain, x="f32[64,6]")
    program = gradc.compile(graph, target="numpy").forward.program
    assert len(program.kernels) > 3 and max(len(k.body) for k in program.kernels) < 1000
    if links == 200:
        agrees(chain, {"x": "f32[64,6]"}, {"x": f32(64, 6)})


def test_a_fact_about_a_dim_that_nothing_depends_on() -> None:
    """The gradient of nearest sampling's grid is zero whatever the image is, so nothing of its program binds H and
    W.
    """
    graph = gradc.trace(lambda x, g: ops.grid_sample(x, g, mode="nearest"), x="f32[B,2,H,W]", g="f32[B,h,w,2]")
    module = gradc.compile(graph, wrt=["g"])
    y, residuals = module.forward(x=f32(1, 2, 4, 4), g=f32(1, 3, 2, 2))
    assert not module.backward(residuals, y)["g"].any()


def test_tracing_is_all_that_was_asked_for() -> None:
    """In a process that has used nothing else of gradc."""
    code = "import gradc; print(gradc.trace(lambda x: x, x='f32[N]'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert "%x: f32[N]" in done.stdout


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (lambda x: ops.broadcast_to(x, (symbol("N"), symbol("M"), 4, 2)), {"x": "f64[M,4,2]"}),
        (lambda x: ops.broadcast_to(x, (symbol("M"), symbol("N"), symbol("N"), 3)), {"x": "f64[N,N,3]"}),
        (lambda a, b, c: ops.concat([a, b, c], axis=0), {"a": "f32[4,N,3]", "b": "f32[3,N,3]", "c": "f32[M,N,3]"}),
    ],
)
def test_joined_columns_take_sizes_in_the_order_of_the_call(fn: Any, types: dict[str, str]) -> None:
    """Columns joined with the rows around them name N and M in another order than the kernel that the program calls."""
    dims = {"N": 5, "M": 3}
    graph = gradc.trace(fn, **types)
    arrays = {
        name: rng.standard_normal(t.concrete(dims)).astype(t.dtype.np)
        for name, t in zip(types, (n.type for n in graph.inputs), strict=True)
    }
    found = {}
    for target in ("cpu", "numpy"):
        module = gradc.compile(graph, wrt=list(types), target=target)
        y, residuals = module.forward(**arrays, dims=dims)
        grads = module.backward(residuals, np.arange(y.size, dtype=y.dtype).reshape(y.shape))
        found[target] = [y, *(grads[name] for name in types)]
    for cpu, expected in zip(found["cpu"], found["numpy"], strict=True):
        np.testing.assert_array_equal(cpu, expected)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_masked_row_read_twice_beside_a_prefetch_of_the_next(rows: int) -> None:
    """gcc 12 read the next row in the second pass (-fno-tree-ter)."""
    x, w = rng.standard_normal((rows, 3)), rng.standard_normal(5)
    graph = gradc.trace(
        lambda x, w: ops.rms_norm(ops.pad(x, [[0, 0], [1, 1]]), (5,), w, eps=0.01), x="f64[N,3]", w="f64[5]"
    )
    padded = np.pad(x, ((0, 0), (1, 1)))
    expected = padded / np.sqrt((padded**2).mean(1, keepdims=True) + 0.01) * w
    np.testing.assert_allclose(gradc.compile(graph, target="cpu")(x=x, w=w), expected, rtol=1e-14)


def test_a_long_chain_of_values_that_are_each_used_twice() -> None:
    """What passes over a row keep of it was looked for along every path: of 2^60 here, none came to an end."""

    def chain(x: Any) -> Any:
        for _ in range(60):
            x = ops.tanh(x) * 0.5 + x
        return ops.softmax(x)

    graph = gradc.trace(chain, x="f32[N,7]")
    x = rng.standard_normal((3, 7)).astype(np.float32)
    expected = gradc.compile(graph, target="numpy")(x=x)
    np.testing.assert_allclose(gradc.compile(graph, target="cpu")(x=x), expected, rtol=1e-5)
