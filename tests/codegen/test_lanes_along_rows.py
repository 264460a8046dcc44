"""Rows of few columns in vectors: neighbouring rows side by side, or the columns as a part of a vector."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest

import gradc
from gradc import interp, knobs, ops
from gradc.analysis.families import families
from gradc.autodiff import differentiate
from gradc.codegen.cpu.kernel import same_mapping
from gradc.codegen.cpu.lanes_along_rows import lanes_along_rows
from gradc.ir.kernel import Kernel

ALONG = {
    "a map": (lambda x, w: ops.sin(x * w), "f32[N,1]", "f32[3]"),
    "of 16 bits": (lambda x, w: ops.gelu(x + w), "bf16[N,4]", "bf16[4]"),
    "of f64": (lambda x, w: ops.exp(x + w), "f64[N,2]", "f64[2]"),
    "sums and maxima": (lambda x, w: ops.softmax(x + w, axis=1), "f32[N,3]", "f32[3]"),
    "the place of a maximum": (lambda x, w: ops.argmax(ops.exp(x + w), axis=1), "f32[N,4]", "f32[4]"),
    "a value of the row": (lambda x, w: ops.sum(x, axis=1, keepdims=True) + ops.exp(x * w), "f32[40,3]", "f32[3]"),
}
AS_BEFORE = {
    "nothing costly": (lambda x, w: x + w, "f32[N,3]", "f32[3]"),
    "more columns": (lambda x, w: ops.exp(x + w), "f32[N,5]", "f32[5]"),
    "few rows": (lambda x, w: ops.exp(x + w), "f32[4,3]", "f32[3]"),
    "a sum of rows": (lambda x, w: ops.sum(ops.exp(x + w), axis=0), "f32[N,3]", "f32[3]"),
    "places by data": (lambda x, w: ops.exp(ops.embedding(ops.cast(x[:, 0], "i32"), w)), "f32[N,3]", "f32[7,3]"),
}


def kernels(module: gradc.Module) -> list[tuple[Kernel, Kernel]]:
    return [(k, lanes_along_rows(k)) for k in module.forward.program.kernels]


def agrees(module: gradc.Module, sizes: tuple[int, ...], special: bool = False) -> None:
    """Values against the interpreter's in f64; infinities and NaN stand in some rows."""
    for n in sizes:
        rng = np.random.default_rng(n)
        given = {
            name: rng.uniform(0, 2, module.graph.input(name).type.concrete({"N": n})).astype(
                module.graph.input(name).dtype.np
            )
            for name in module.graph.input_names
        }
        if special and len(given["x"]) > 5:
            given["x"][1:6, 0] = [np.nan, np.inf, -np.inf, -0.0, 3.0]
        with np.errstate(all="ignore"):
            exact = interp.run(module.graph, given, precision="f64")["y"]
        found = module.forward.run(**given)["y"].astype(np.float64)
        wide = module.graph.output("y").dtype.itemsize >= 4
        np.testing.assert_allclose(found, exact, rtol=2e-6 if wide else 8e-3, atol=1e-6 if wide else 8e-3)


@pytest.mark.parametrize("what", ALONG)
def test_along_rows(what: str) -> None:
    function, x, w = ALONG[what]
    module = gradc.compile(gradc.trace(function, x=x, w=w), target="cpu")
    assert any(after is not before and after.cols[-1][0] in dict(before.rows) for before, after in kernels(module))
    agrees(module, (0, 1, 2, 15, 16, 33, 200), special=True)
    with knobs.BOUNDS.set(True):
        agrees(gradc.compile(gradc.trace(function, x=x, w=w), target="cpu"), (3, 33))


@pytest.mark.parametrize("why", AS_BEFORE)
def test_as_before(why: str) -> None:
    function, x, w = AS_BEFORE[why]
    module = gradc.compile(gradc.trace(function, x=x, w=w), target="cpu")
    assert all(after is before for before, after in kernels(module))
    agrees(module, (1, 33))


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("columns", [5, 6, 7, 9, 15, 20, 47])
def test_columns_that_fill_a_part_of_a_vector(columns: int, dtype: str) -> None:
    """Nothing behind the last column is written or read: the last row ends where its array does."""
    graph = gradc.trace(lambda x, w: ops.sin(x * w), x=f"{dtype}[N,1]", w=f"{dtype}[{columns}]")
    module = gradc.compile(graph, target="cpu")
    assert f"gradc_filled({columns}, " in module.source()
    agrees(module, (0, 1, 2, 33), special=True)
    rng = np.random.default_rng(0)
    given = {"x": rng.uniform(0, 2, (9, 1)).astype(dtype.replace("f", "float")), "w": rng.uniform(0, 2, columns)}
    given["w"] = given["w"].astype(given["x"].dtype)
    memory = np.full(9 * columns + 64, 7, given["x"].dtype)
    module.forward.run(**given, out={"y": memory[: 9 * columns].reshape(9, columns)})
    assert (memory[9 * columns :] == 7).all()


@pytest.mark.optimised
def test_borders_of_short_rows() -> None:
    """A gradient of windows: where masks have registers, columns near the ends are no loop of their own; no last
    vector is filled, which took 4.5 times as long for windows of 5 by 5 in rows of 10 to 14.
    """
    graph = gradc.trace(lambda x, w: ops.conv2d(x, w), x="f32[2,1,18,18]", w="f32[3,1,5,5]")
    module = gradc.compile(graph, wrt=["x"], target="cpu")
    assert "!GRADC_MASK_REGISTERS" in module.source() and "gradc_filled(" not in module.source()
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((2, 1, 18, 18), (3, 1, 5, 5), (2, 3, 14, 14)))
    _, residuals = module.forward(x=x, w=w)
    found = module.backward(residuals, dy)["x"]
    exact = np.zeros((2, 1, 18, 18))
    for i in range(5):
        for j in range(5):
            exact[:, 0, i : i + 14, j : j + 14] += np.einsum(
                "ncij,c->nij", dy.astype(float), w[:, 0, i, j].astype(float)
            )
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


def between_fences(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy between two pages that nothing may touch; it ends where the second begins, or begins behind the first."""
    page = mmap.PAGESIZE
    inside = max(1, -(-array.nbytes // page)) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for fence in (first, first + page + inside):
        assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    offset = page + inside - array.nbytes if at_end else page
    copy = np.frombuffer(memory, np.uint8, array.nbytes, offset).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.optimised
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("columns", [2, 3, 5, 7, 13, 23])
def test_nothing_outside_of_arrays_is_read(columns: int, dtype: str) -> None:
    """A read of memory that may not be touched ends the process."""
    graph = gradc.trace(lambda x, w: ops.sin(x * w), x=f"{dtype}[N,1]", w=f"{dtype}[{columns}]")
    module = gradc.compile(graph, target="cpu")
    rng = np.random.default_rng(columns)
    for rows in (1, 2, 17):
        x, w = rng.uniform(0, 2, (rows, 1)), rng.uniform(0, 2, columns)
        given = {name: value.astype(dtype.replace("f", "float")) for name, value in (("x", x), ("w", w))}
        wanted = module.forward.run(**given)["y"]
        for at_end in (True, False):
            fenced = {name: between_fences(array, at_end) for name, array in given.items()}
            y = between_fences(np.zeros_like(wanted), at_end)
            module.forward.run(**fenced, out={"y": y})
            np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize(("rows", "together"), [((40, 50), 2), ((4, 40), 1)])
def test_kernels_share_a_text_that_has_the_lanes_of_each(rows: tuple[int, int], together: int) -> None:
    """Rows that become lanes in one kernel and not in the other are no two sizes of one text."""
    graph = gradc.trace(
        lambda x, y, u, w: (ops.exp(x * u), ops.exp(y * w)),
        **{"x": f"f32[{rows[0]},1]", "y": f"f32[{rows[1]},1]", "u": "f32[3]", "w": "f32[3]"},
    )
    program = gradc.compile(graph, target="cpu").forward.program
    found = families(program.kernels, program.types, same_mapping, inner=True)
    assert [len(family.members) for family in found] == [together] * (2 // together)


@pytest.mark.optimised
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("columns", "before", "behind"), [(6, 0, 2), (5, 0, 3), (9, 0, 3), (5, 3, 0), (9, 1, 2)])
def test_nothing_is_read_around_what_is_padded(columns: int, before: int, behind: int, dtype: str) -> None:
    """The borders are computed under masks, which columns alone decide: a compiler is not to know them."""
    widths = ((0, 0), (before, behind))
    graph = gradc.trace(lambda x: ops.sin(ops.pad(x, widths)), x=f"{dtype}[N,{columns}]")
    module = gradc.compile(graph, target="cpu")
    assert "!GRADC_MASK_REGISTERS" in module.source() and "unknown_zero" in module.source()
    values = np.random.default_rng(0).uniform(0, 1, (3, columns)).astype(dtype.replace("f", "float"))
    for at_end in (False, True):
        y = module.forward.run(x=between_fences(values, at_end))["y"]
        np.testing.assert_allclose(y, np.pad(np.sin(values.astype(float)), widths), rtol=1e-6)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16"])
@pytest.mark.parametrize("columns", [4, 8, 16])
def test_nothing_is_read_behind_what_windows_and_parts_leave_out(columns: int, dtype: str) -> None:
    """Columns alone decide these masks, too: of one vector each, gcc 12 read all of it."""
    types = {"x": f"{dtype}[4,1,1,{columns}]", "w": f"{dtype}[3,1,1,3]"}
    windows = differentiate(gradc.trace(lambda x, w: ops.conv2d(x, w), **types), ["x"])
    parts = gradc.trace(lambda x, y: ops.concat([x, y * 2.0], axis=1), x=f"{dtype}[N,{columns - 3}]", y=f"{dtype}[N,3]")
    for graph in (windows, parts):
        module = gradc.compile(graph, target="cpu")
        rng = np.random.default_rng(0)
        given = {
            name: rng.uniform(0, 1, module.graph.input(name).type.concrete({"N": 3})).astype(
                module.graph.input(name).dtype.np
            )
            for name in module.graph.input_names
        }
        exact = interp.run(graph, given, precision="f64")
        for at_end in (False, True):
            found = module.forward.run(**{name: between_fences(a, at_end) for name, a in given.items()})
            for name, value in found.items():
                np.testing.assert_allclose(value.astype(float), exact[name], rtol=2e-2 if dtype == "f16" else 1e-5)
