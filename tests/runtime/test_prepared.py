"""Calls on arrays of NumPy's that differ from an earlier one in addresses alone."""

from __future__ import annotations

import ctypes
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import IndexOutOfRange, InvalidProblem
from gradc.runtime.host import pool, prepared
from gradc.runtime.host.arrays import SMALL
from gradc.runtime.host.prepared import KEPT


@pytest.fixture(params=["by layout", "by attributes"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's arrays are read in C, or, where their layout is not known, by their attributes."""
    if request.param == "by attributes":
        monkeypatch.setattr(pool, "arrays_entry", lambda: None)
    else:
        assert pool.arrays_entry() is not None


def scaled(target: str = "cpu") -> gradc.Module:
    """y = x * s + 1"""
    return gradc.compile(
        gradc.trace(lambda x, s: x * s + 1, x="f32[N,4]", s="f32[4]"), wrt=["x", "s"], target=target, dims={}
    )


def given(rows: int, dtype: Any = np.float32) -> dict[str, Any]:
    return {"x": np.arange(4 * rows, dtype=dtype).reshape(rows, 4), "s": np.arange(4, dtype=dtype)}


def test_each_size_is_bound_once(reading: None, bound: list[str]) -> None:
    module = scaled()
    for rows in range(1, KEPT + 1):
        module(**given(rows))
    bound.clear()
    for rows in range(KEPT, 0, -1):
        arrays = given(rows)
        y = module(**dict(reversed(arrays.items())))
        np.testing.assert_array_equal(y, arrays["x"] * arrays["s"] + 1)
        assert y.base is None and y.flags.owndata
    assert not bound
    module(**given(KEPT + 1))
    assert len(bound) == 1


def test_forward_and_backward(reading: None, bound: list[str]) -> None:
    module, arrays = scaled(), given(3)
    for again in range(3):
        y, residuals = module.forward(**arrays)
        dy = np.full_like(y, 2)
        grads = module.backward(residuals, dy)
        np.testing.assert_array_equal(y, arrays["x"] * arrays["s"] + 1)
        np.testing.assert_array_equal(grads["x"], dy * arrays["s"])
        np.testing.assert_array_equal(grads["s"], (dy * arrays["x"]).sum(0))
        assert len(bound) == (0 if again else 2)
        bound.clear()


@pytest.mark.parametrize("kind", ["columns first", "gaps", "backwards", "misaligned", "read-only", "subclass", "empty"])
def test_other_arrays_of_the_same_shape(reading: None, kind: str) -> None:
    module, arrays = scaled(), given(6)
    module(**arrays)
    x = arrays["x"]
    if kind == "columns first":
        x = np.asfortranarray(x)
    elif kind == "gaps":
        x = np.repeat(x, 2, axis=0)[::2]
    elif kind == "backwards":
        x = x[::-1]
    elif kind == "misaligned":
        x = np.frombuffer(bytearray(1 + x.nbytes), np.float32, offset=1, count=x.size).reshape(x.shape)
        assert not x.flags.aligned
    elif kind == "read-only":
        x.flags.writeable = False
    elif kind == "subclass":
        x = x.view(type("Own", (np.ndarray,), {}))
    else:
        x = x[:0]
    for _ in range(2):
        np.testing.assert_array_equal(module(x=x, s=arrays["s"]), np.asarray(x) * arrays["s"] + 1)


def test_what_is_wrong_is_said_after_a_call_too(reading: None) -> None:
    module, arrays = scaled(), given(3)
    module(**arrays)
    for wrong, text in (
        ({"x": arrays["x"].astype(np.float64)}, "f64|float64"),
        ({"x": arrays["x"][:, :3]}, "4"),
        ({"x": arrays["x"].astype(">f4"), "s": arrays["s"][:2]}, "4"),
        ({"z": arrays["s"]}, "z"),
        ({"x": np.ma.masked_array(arrays["x"])}, "masked"),
    ):
        with pytest.raises(InvalidProblem, match=text):
            module(**{**arrays, **wrong})
    with pytest.raises(InvalidProblem, match="s"):
        module(x=arrays["x"])
    np.testing.assert_array_equal(module(x=arrays["x"], s=2.0 * arrays["s"]), arrays["x"] * 2 * arrays["s"] + 1)
    big = arrays["x"].astype(">f4")
    np.testing.assert_array_equal(module(x=big, s=arrays["s"]), module(**arrays))


def test_an_index_out_of_range(reading: None) -> None:
    module = gradc.compile(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,2]"), wrt=["w"])
    w, t = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 3, 1])
    np.testing.assert_array_equal(module(t=t, w=w), w[t])
    for _ in range(2):
        with pytest.raises(IndexOutOfRange) as error:
            module(t=np.array([0, 4, 1]), w=w)
        assert (error.value.position, error.value.value) == (1, 4)
        np.testing.assert_array_equal(module(t=t, w=w), w[t])


def test_defaults_out_and_dims(reading: None, bound: list[str]) -> None:
    table = np.arange(400, dtype=np.float32).reshape(100, 4)  # larger than what a graph's text holds
    module = gradc.compile(gradc.trace(lambda t: ops.embedding(t, table), t="i64[N]"))
    for _ in range(2):
        np.testing.assert_array_equal(module(t=np.array([99, 0])), table[[99, 0]])
    assert len(bound) == 1
    out = np.empty((2, 4), np.float32)
    assert module(t=np.array([5, 6]), out={"y": out}) is out and len(bound) == 2
    np.testing.assert_array_equal(out, table[5:7])
    np.testing.assert_array_equal(module(t=np.array([99, 0]), dims={"N": 2}), table[[99, 0]])
    with pytest.raises(InvalidProblem):
        module(t=np.array([99, 0]), dims={"N": 3})


def test_a_result_outlives_the_next_call(reading: None) -> None:
    module, arrays = scaled(), given(3)
    first = module(**arrays)
    kept = first.copy()
    module(x=arrays["x"] + 1, s=arrays["s"])
    np.testing.assert_array_equal(first, kept)


def test_threads_that_call_at_once() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.softmax(ops.exp(x) @ ops.exp(x)), x="f64[N,N]"))
    xs = [np.random.default_rng(i).standard_normal((24, 24)) for i in range(4)]
    wanted = [module(x=x) for x in xs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not np.array_equal(module(x=xs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_layout_of_an_array_is_recognised() -> None:
    assert pool._has_known_layout(np.zeros((2, 3)))

    class Array(ctypes.Structure):  # as large, and nothing where it is looked for
        _fields_ = (("words", ctypes.c_uint64 * 9),)
        ndim, dtype, ctypes = 1, np.dtype("f4"), np.zeros(1).ctypes
        flags = np.zeros(1).flags

    assert not pool._has_known_layout(Array())  # type: ignore[arg-type]


def test_a_call_of_other_sizes_asks_for_no_memory_of_the_known_ones(
    reading: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prepared, "empty", lambda shape, dtype, **_: asked.append(shape) or np.empty(shape, dtype))
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), target="cpu")
    large = np.zeros(SMALL, np.float32)
    for _ in range(2):
        module(x=large)
    assert asked == [large.shape]
    np.testing.assert_array_equal(module(x=np.zeros(3, np.float32)), np.ones(3))
    assert asked == [large.shape]


def test_unpickled_arrays_drop_no_known_call(reading: None, bound: list[str]) -> None:
    """Each has a dtype object of its own."""
    module, arrays = scaled(), given(3)
    want = module(**arrays)
    for _ in range(KEPT + 1):
        other = {name: pickle.loads(pickle.dumps(a)) for name, a in arrays.items()}
        assert other["x"].dtype is not arrays["x"].dtype
        np.testing.assert_array_equal(module(**other), want)
    bound.clear()
    np.testing.assert_array_equal(module(**arrays), want)
    assert not bound
