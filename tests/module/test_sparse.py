"""Gradients of tables as the rows that were hit: the same numbers as the dense ones, however the table is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import InvalidProblem, Unsupported
from gradc.ir.dims import symbol

READS: dict[str, tuple[Any, dict[str, str]]] = {
    "embedding": (lambda i, w: ops.embedding(i, w, padding_idx=1), {"i": "i64[N,3]"}),
    "by frequency": (lambda i, w: ops.embedding(i, w, scale_grad_by_freq=True), {"i": "i32[N,3]"}),
    "skip": (lambda i, w: ops.embedding(i, w, oob="skip"), {"i": "i64[N,3]"}),
    "wrap": (lambda i, w: ops.embedding(i, w, oob="wrap", padding_idx=0), {"i": "i64[N,3]"}),
    "bag": (lambda i, w: ops.embedding_bag(i, w, mode="mean"), {"i": "u8[N,3]"}),
    "twice": (lambda i, w: ops.embedding(i, w) * 2.0 + ops.tanh(ops.embedding(i + 1, w)), {"i": "i64[N,3]"}),
}


DTYPES = ("f64", "f32", "bf16", "f16")


def both(name: str, dtype: str = "f32") -> tuple[gradc.Module, gradc.Module]:
    fn, types = READS[name]
    graph = gradc.trace(fn, **types, w=f"{dtype}[V,8]")
    return gradc.compile(graph, wrt=["w"], sparse=["w"]), gradc.compile(graph, wrt=["w"])


def arrays(module: gradc.Module, rows: int, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    index, table = module.graph.input("i").dtype.np, module.graph.input("w").dtype.np
    return {
        "i": rng.integers(0, max(size - 1, 1), (rows, 3)).astype(index),
        "w": rng.standard_normal((size, 8)).astype(table),
    }


@pytest.mark.parametrize(("name", "dtype"), [(name, d) for k, name in enumerate(READS) for d in DTYPES[k % 2 :: 2]])
def test_rows_are_what_the_dense_gradient_has(name: str, dtype: str) -> None:
    sparse, dense = both(name, dtype)
    for rows, size in ((5, 20), (40, 7), (0, 30), (1, 2)):
        given = arrays(sparse, rows, size)
        y, residuals = sparse.forward(**given)
        dy = np.random.default_rng(1).standard_normal(y.shape).astype(y.dtype)
        got = sparse.backward(residuals, dy)["w"]
        want = dense.backward(dense.forward(**given)[1], dy)["w"]
        assert isinstance(got, gradc.SparseRows) and got.shape == want.shape and got.values.dtype == want.dtype
        assert np.array_equal(got.rows, np.unique(got.rows)), "ascending, each once"
        hit = np.flatnonzero(np.any(want != 0, axis=1))
        assert set(hit) <= set(got.rows.tolist()) and len(got.rows) <= given["i"].size * (2 if name == "twice" else 1)
        unit = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]
        apart = np.abs(got.dense().astype(np.float64) - want.astype(np.float64)).max(initial=0.0)
        assert apart <= 4 * unit * max(np.abs(want.astype(np.float64)).max(initial=0.0), 1.0)


@pytest.mark.parametrize("name", ["embedding", "bag", "by frequency"])
def test_no_float_of_the_tables_size_is_there(name: str) -> None:
    program = both(name)[0].backward.program
    assert not [
        b for b in program.buffers if b.type.dtype.is_float and b.kind != "input" and b.type.shape[:1] == (symbol("V"),)
    ], str(program)


def test_rows_are_added_into_an_array_without_touching_others() -> None:
    sparse, dense = both("embedding")
    given = arrays(sparse, 4, 50)
    y, residuals = sparse.forward(**given)
    got, want = (
        sparse.backward(residuals, np.ones_like(y))["w"],
        dense.backward(dense.forward(**given)[1], np.ones_like(y))["w"],
    )
    total = np.full((50, 8), np.nan, np.float32)
    total[got.rows] = 1
    got.add_to(total)
    assert np.isnan(np.delete(total, got.rows, axis=0)).all()
    np.testing.assert_array_equal(total[got.rows], 1 + want[got.rows])
    twice = got + got
    np.testing.assert_array_equal(twice.dense(), 2 * want)
    np.testing.assert_array_equal(got + want, 2 * want)
    gradients = sparse.backward(residuals, np.ones_like(y))
    gradients.accumulate(sparse.backward(residuals, np.ones_like(y)))
    np.testing.assert_array_equal(gradients["w"].dense(), 2 * want)
    with pytest.raises(InvalidProblem, match=r"float32\[50, 8\] are added to one like it, not to float32\[49, 8\]"):
        got.add_to(np.zeros((49, 8), np.float32))


def test_torch_arrays_stay_torchs() -> None:
    torch = pytest.importorskip("torch", reason="tensors in, tensors out")
    sparse, _ = both("embedding")
    given = {n: torch.tensor(a) for n, a in arrays(sparse, 4, 50).items()}
    y, residuals = sparse.forward(**given)
    got = sparse.backward(residuals, torch.ones_like(y))["w"]
    assert isinstance(got.rows, torch.Tensor) and isinstance((got + got).values, torch.Tensor)
    torch.testing.assert_close((got + got).dense(), 2 * got.dense())


def test_value_and_grad_and_a_saved_module(tmp_path: Path) -> None:
    graph = gradc.trace(lambda i, w, b: ops.sum(ops.embedding(i, w) * b), i="i64[N]", w="f32[V,8]", b="f32[8]")
    module = gradc.compile(graph, wrt=["w", "b"], sparse=["w"])
    rng = np.random.default_rng(0)
    given = {
        "i": rng.integers(0, 9, 5),
        "w": rng.standard_normal((9, 8)).astype(np.float32),
        "b": np.ones(8, np.float32),
    }
    value, gradients = module.value_and_grad(**given)
    np.testing.assert_allclose(value, given["w"][given["i"]].sum(), rtol=1e-5)
    np.testing.assert_array_equal(gradients["w"].dense()[:, 0], np.bincount(given["i"], minlength=9))
    assert isinstance(gradients["b"], np.ndarray)
    module.save(tmp_path / "saved")
    again = gradc.load_module(tmp_path / "saved")
    _, residuals = again.forward(**given)
    np.testing.assert_array_equal(again.backward(residuals, 1.0)["w"].dense(), gradients["w"].dense())


@pytest.mark.parametrize("row", ["", ",1", ",2,3"])
def test_rows_of_any_rank(row: str) -> None:
    graph = gradc.trace(lambda i, w: ops.gather(w, i), i="i64[N,3]", w=f"f64[V{row}]")
    sparse, dense = (gradc.compile(graph, wrt=["w"], sparse=names) for names in (["w"], []))
    rng = np.random.default_rng(0)
    shape = (9, *(int(n) for n in row.split(",")[1:]))
    given = {"i": rng.integers(0, 9, (4, 3)), "w": rng.standard_normal(shape)}
    y, residuals = sparse.forward(**given)
    got = sparse.backward(residuals, y)["w"]
    assert got.values.shape == (len(np.unique(given["i"])), *shape[1:])
    np.testing.assert_array_equal(got.dense(), dense.backward(dense.forward(**given)[1], y)["w"])


def test_what_has_no_sparse_form_says_so() -> None:
    graph = gradc.trace(lambda i, w: ops.embedding(i, w) @ w.T, i="i64[N]", w="f32[V,8]")
    with pytest.raises(Unsupported, match=r"d.w \(f32\[V,8\]\) has no sparse form.*'\w+' has a part in it"):
        gradc.compile(graph, wrt=["w"], sparse=["w"])
    with pytest.raises(InvalidProblem, match="sparse names 'i', which is not in wrt: w"):
        gradc.compile(graph, wrt=["w"], sparse=["i"])
    with pytest.raises(Unsupported, match=r"gradc.compile\(graph, wrt=\[...\], sparse="):
        gradc.trace(lambda i, w: ops.embedding(i, w, sparse=True), i="i64[N]", w="f32[V,8]")
    sparse, _ = both("embedding")
    y, residuals = sparse.forward(**arrays(sparse, 4, 50))
    with pytest.raises(Unsupported, match="out= for the sparse gradient of 'w'"):
        sparse.backward(residuals, y, out={"w": np.zeros((50, 8), np.float32)})
