"""Calls with ``out=`` that differ from an earlier one in addresses alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import GradcError, IndexOutOfRange, InvalidProblem, NotDifferentiable, OverlappingOperands
from gradc.runtime.host import pool
from gradc.runtime.host.arrays import worth_asking
from gradc.runtime.host.backend import CpuBackend

SIZE = 24
Array = np.ndarray[Any, Any]


@pytest.fixture(params=["by layout", "by attributes"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's arrays are read in C, or, where their layout is not known, by their attributes."""
    if request.param == "by attributes":
        monkeypatch.setattr(pool, "arrays_entry", lambda: None)
    else:
        assert pool.arrays_entry() is not None


def two() -> gradc.Module:
    """y = 2 * x, z = x + s"""
    graph = gradc.trace(lambda x, s: {"y": 2 * x, "z": x + s}, x="f32[N]", s="f32[N]")
    return gradc.compile(graph, target="cpu")


shared = functools.cache(two)
"""For tests that count no bound calls."""


def given() -> dict[str, Any]:
    return {"x": np.arange(SIZE, dtype=np.float32), "s": np.ones(SIZE, np.float32)}


def empty() -> Array:
    return np.full(SIZE, np.nan, np.float32)


def test_each_choice_of_outputs_is_bound_once(reading: None, bound: list[str]) -> None:
    module, arrays = two(), given()
    for again in range(3):
        for names in ((), ("y",), ("z",), ("y", "z"), ("z", "y")):
            out = {name: empty() for name in names}
            found = module(**arrays, out=out)
            assert all(found[name] is out[name] for name in names)
            np.testing.assert_array_equal(found["y"], 2 * arrays["x"])
            np.testing.assert_array_equal(found["z"], arrays["x"] + arrays["s"])
        assert len(bound) == (0 if again else 5)
        bound.clear()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("an input", OverlappingOperands),
        ("part of an input", OverlappingOperands),
        ("another output", OverlappingOperands),
        ("part of another output", OverlappingOperands),
        ("read-only", InvalidProblem),
        ("gaps", GradcError),
        ("backwards", GradcError),
        ("misaligned", GradcError),
        ("too short", GradcError),
        ("too long", InvalidProblem),
        ("other dtype", InvalidProblem),
        ("unknown name", InvalidProblem),
    ],
)
def test_what_cannot_be_written_is_refused_after_a_call(reading: None, kind: str, error: type[GradcError]) -> None:
    module, arrays = shared(), given()
    out: dict[str, Array] = {"y": empty(), "z": empty()}
    module(**arrays, out=dict(out))
    room = np.full(4 * SIZE, np.nan, np.float32)
    if kind == "an input":
        out["y"] = arrays["x"]
    elif kind == "part of an input":
        arrays["s"], out["y"] = room[:SIZE], room[SIZE - 1 : 2 * SIZE - 1]
    elif kind == "another output":
        out["y"] = out["z"]
    elif kind == "part of another output":
        out["y"], out["z"] = room[SIZE - 1 : 2 * SIZE - 1], room[:SIZE]
    elif kind == "read-only":
        out["y"].flags.writeable = False
    elif kind == "gaps":
        out["y"] = room[: 2 * SIZE : 2]
    elif kind == "backwards":
        out["y"] = room[:SIZE][::-1]
    elif kind == "misaligned":
        out["y"] = np.frombuffer(bytearray(1 + 4 * SIZE), np.float32, offset=1, count=SIZE)
    elif kind in ("too short", "too long"):
        out["y"] = room[: SIZE + (1 if kind == "too long" else -1)]
    elif kind == "other dtype":
        out["y"] = room.view(np.float64)[:SIZE]
    else:
        out["w"] = out.pop("y")
    before = [x.tobytes() for x in (*arrays.values(), *out.values(), room)]
    for _ in range(2):
        with pytest.raises(error):
            module(**arrays, out=out)
        assert [x.tobytes() for x in (*arrays.values(), *out.values(), room)] == before


def test_an_error_of_a_known_call(reading: None, bound: list[str]) -> None:
    module = gradc.compile(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,2]"), target="cpu")
    w, out = np.arange(8, dtype=np.float32).reshape(4, 2), np.empty((3, 2), np.float32)
    module(t=np.array([0, 3, 1]), w=w, out={"y": out})
    bound.clear()
    with pytest.raises(IndexOutOfRange) as error:
        module(t=np.array([0, 1, -1]), w=w, out={"y": out})
    assert (error.value.position, error.value.value, bound) == (2, -1, [])


def test_the_memory_of_a_donated_input_given_as_the_output(reading: None) -> None:
    module = gradc.compile(gradc.trace(lambda p, g: p - g, p="f32[N]", g="f32[N]"), donate=["p"], target="cpu")
    g = np.ones(SIZE, np.float32)
    for _ in range(3):
        p, other = np.arange(SIZE, dtype=np.float32), empty()
        assert module(p=p, g=g, out={"y": other}) is other
        np.testing.assert_array_equal(p, np.arange(SIZE))
        assert module(p=p, g=g, out={"y": p}) is p
        np.testing.assert_array_equal(p, np.arange(SIZE) - 1)
        np.testing.assert_array_equal(other, p)
        assert module(p=p, g=g) is p


def test_memory_that_the_caller_has_is_not_asked_for() -> None:
    """A call is known however large its ``out=`` is, and what it writes over; what it allocates counts."""
    graph = gradc.trace(lambda p, x: {"p": p + 1, "y": x + 1}, p="f32[N]", x="f32[M]")
    backend = gradc.compile(graph, donate=["p"], target="cpu").forward
    assert isinstance(backend.backend, CpuBackend)
    arrays = {"p": np.zeros(3, np.float32), "x": np.zeros(3, np.float32)}
    call = backend.bind_call(arrays)
    large, small = (worth_asking() + 4, 4), (12, 4)
    prepared = backend.backend.prepared
    assert prepared(call, {"p": large, "y": small}) is not None and prepared(call, {"p": small, "y": large}) is None
    assert prepared(call, {"p": large, "y": large}, out=["y"]) is not None


def test_tensors_are_written_and_counted(bound: list[str]) -> None:
    torch = pytest.importorskip("torch")
    module = two()
    arrays = {name: torch.from_numpy(x) for name, x in given().items()}
    for again in range(3):
        out = torch.empty(SIZE)
        found = module(**arrays, out={"z": out})
        assert found["z"] is out and out._version == 1 and isinstance(found["y"], torch.Tensor)
        torch.testing.assert_close(out, arrays["x"] + 1)
        assert len(bound) == (0 if again else 1)
        bound.clear()


@pytest.mark.parametrize("tensors", ["inputs", "out"])
def test_arrays_and_tensors_in_one_call(tensors: str, bound: list[str]) -> None:
    torch = pytest.importorskip("torch")
    module, arrays = two(), given()
    if tensors == "inputs":
        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    for again in range(3):
        out: Any = torch.empty(SIZE) if tensors == "out" else empty()
        found = module(**arrays, out={"z": out})
        assert found["z"] is out and isinstance(found["y"], torch.Tensor if tensors == "inputs" else np.ndarray)
        np.testing.assert_array_equal(np.asarray(out), np.arange(SIZE) + 1)
        assert tensors == "inputs" or out._version == 1
        assert len(bound) == (0 if again else 1)
        bound.clear()


def test_a_tensor_that_is_recorded_is_not_written() -> None:
    torch = pytest.importorskip("torch")
    module, arrays = two(), {name: torch.from_numpy(x) for name, x in given().items()}
    out = torch.zeros(SIZE, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            module(**arrays, out={"y": out})
    count = out._version
    with torch.no_grad():
        out.zero_()
    with pytest.raises(NotDifferentiable):
        module(**arrays, out={"y": out})
    assert not out.any() and out._version == count + 1


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_a_copy_is_no_place_for_a_result(target: str) -> None:
    """Where the caller's object is read as a copy, what is written there would be lost."""
    torch = pytest.importorskip("torch")
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x), x="f32[N]"), target=target)
    x = np.ones(3, np.float32)
    for _ in range(2):
        for out in (np.float32(0), np.zeros((), ">f4"), torch._neg_view(torch.zeros(()))):
            with pytest.raises(InvalidProblem, match=r"out\['y'\] is a .* that is read as a copy"):
                module(x=x, out={"y": out})
        for out in (np.zeros((), np.float32), torch.zeros(())):
            assert module(x=x, out={"y": out}) is out and float(out) == 3
