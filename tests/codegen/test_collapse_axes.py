"""Short columns of neighbouring rows become one loop where every access runs on, and only there."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.codegen.cpu.collapse_axes import collapse_axes
from gradc.ir.node import call
from gradc.ir.types import DTYPES
from gradc.targets.cpu import SHORT_COLUMNS

JOINED = {
    "a map": (lambda x: ops.exp(x), "f32[N,5,28]", 1, "i1: 140"),
    "a cast": (lambda x: ops.cast(x, "f32"), "bf16[N,5]", 0, "i0: 5*N"),
    "a sum over two axes": (lambda x: ops.sum(x, axis=(1, 2)), "f32[N,9,28]", 1, "i1: 252"),
    "a maximum over two axes": (lambda x: ops.max(x, axis=(1, 2)), "f32[N,9,28]", 1, "i1: 252"),
    "a row's own scalar": (
        lambda x: ops.exp(x - ops.reshape(ops.max(x, axis=(1, 2)), (-1, 1, 1))),
        "f32[N,9,28]",
        1,
        "i1: 252",
    ),
    "a place on an axis": (
        lambda x: (
            x * call("iota", shape=(7, 9, 28), axis=1, dtype=DTYPES["f32"])
            + call("iota", shape=(7, 9, 28), axis=2, dtype=DTYPES["f32"])
        ),
        "f32[7,9,28]",
        1,
        "i1: 252",
    ),
    "inside an axis": (lambda x: ops.pad(x, ((0, 0), (0, 0), (0, 1)))[:, :, :28] + x, "f32[7,9,28]", 1, "i1: 252"),
}
APART = {
    "long columns": (lambda x: ops.exp(x), f"f32[N,{SHORT_COLUMNS}]"),
    "columns of unknown length": (lambda x: ops.exp(x), "f32[N,D]"),
    "a sum along a row": (lambda x: ops.sum(ops.exp(x), axis=1), "f32[N,28]"),
    "the same in every row": (lambda x: x + x[0], "f32[N,28]"),
    "another order": (lambda x: ops.transpose(x) + 1.0, "f32[28,N]"),
    "a place on an axis of unknown length": (
        lambda x: x * call("iota", shape=x.shape, axis=1, dtype=DTYPES["f32"]),
        "f32[N,28]",
    ),
    "a sum over rows": (lambda x: ops.sum(x, axis=0), "f32[N,28]"),
}


def values(module: gradc.Module, sizes: tuple[int, ...]) -> None:
    graph = module.graph
    for n in sizes:
        x = (
            np.random.default_rng(n)
            .standard_normal(graph.input("x").type.concrete({"N": n, "D": 28}))
            .astype(graph.input("x").dtype.np)
        )
        for name, exact in interp.run(graph, {"x": x}, precision="f64").items():
            np.testing.assert_allclose(
                module.forward.run(x=x)[name].astype(np.float64),
                exact,
                rtol=2e-6,
                atol=2e-6 * np.abs(exact).max(initial=0),
            )


@pytest.mark.parametrize("what", JOINED)
def test_joined(what: str) -> None:
    function, kind, rows, axis = JOINED[what]
    module = gradc.compile(gradc.trace(function, x=kind), target="cpu")
    types = {b.name: b.type for b in module.forward.program.buffers}
    kernels = [collapse_axes(k, types)[0] for k in module.forward.program.kernels]
    (kernel,) = (k for k in kernels if k.cols)
    assert len(kernel.rows) == rows and [f"{name}: {size}" for name, size in kernel.cols] == [axis]
    values(module, (0, 1, 2, 33))


@pytest.mark.parametrize("why", APART)
def test_apart(why: str) -> None:
    function, kind = APART[why]
    module = gradc.compile(gradc.trace(function, x=kind), target="cpu")
    types = {b.name: b.type for b in module.forward.program.buffers}
    assert all(collapse_axes(k, types)[0] is k for k in module.forward.program.kernels)
    values(module, (1, 2, 33))


@pytest.mark.parametrize("axes", [(1,), (1, 2)])
def test_several_passes_over_no_columns(axes: tuple[int, ...]) -> None:
    """Rows of one element have no columns, and still a maximum before a sum."""
    module = gradc.compile(
        gradc.trace(
            lambda x: ops.exp(x - ops.max(x, axis=axes, keepdims=True)), x=f"f32[N,{','.join('1' * len(axes))}]"
        ),
        target="cpu",
    )
    values(module, (0, 1, 33))


def test_values_behind_a_long_border() -> None:
    """A place counted from the start of a border needs 64 bits, however small the buffer behind it is."""
    border = 3_000_000_000
    module = gradc.compile(
        gradc.trace(lambda x, i: ops.gather(ops.pad(x, ((border, 0),)), i, axis=0) * 1.0, x="f32[100]", i="i64[64]"),
        target="cpu",
    )
    rng = np.random.default_rng(0)
    x, i = rng.standard_normal(100).astype(np.float32), rng.integers(0, 100, 64)
    np.testing.assert_array_equal(module.forward.run(x=x, i=border + i)["y"], x[i])
