"""Calls whose results are written over donated inputs, and differ from an earlier one in addresses alone."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import GradcError, IndexOutOfRange, NotDifferentiable
from gradc.runtime.host import pool

SIZE = 24


@pytest.fixture(params=["by layout", "by attributes"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's arrays are read in C, or, where their layout is not known, by their attributes."""
    if request.param == "by attributes":
        monkeypatch.setattr(pool, "arrays_entry", lambda: None)
    else:
        assert pool.arrays_entry() is not None


def update(arrays: int = 1) -> gradc.Module:
    """p0 - g / 2, p1 - g / 2, ..., over p0, p1, ..."""
    names = [f"p{i}" for i in range(arrays)]

    def updated(g: Any, **given: Any) -> Any:
        return {name: p - g * 0.5 for name, p in given.items()}

    graph = gradc.trace(updated, g="f32[N]", **dict.fromkeys(names, "f32[N]"))
    return gradc.compile(graph, donate=names, target="cpu")


def given(count: int = SIZE) -> dict[str, Any]:
    return {"p0": np.arange(count, dtype=np.float32), "g": np.ones(count, np.float32)}


def test_a_call_is_bound_once_and_written_in_place(reading: None, bound: list[str]) -> None:
    module, arrays = update(), given()
    for again in range(4):
        y = module(**arrays)
        assert y is arrays["p0"]
        np.testing.assert_array_equal(y, np.arange(SIZE) - 0.5 * (again + 1))
        arrays["p0"] = y
    assert len(bound) == 1
    other = given()
    assert module(**other) is other["p0"] and len(bound) == 1


@pytest.mark.parametrize(
    "kind",
    [
        "given twice",
        "overlapping",
        "the same memory",
        "read-only",
        "columns first",
        "gaps",
        "backwards",
        "misaligned",
        "empty",
    ],
)
def test_what_cannot_be_written_as_it_lies_stays_as_it_was(reading: None, kind: str) -> None:
    """After a call that was in place."""
    module = update()
    module(**given())
    p, g = given().values()
    if kind == "given twice":
        p = g
    elif kind == "overlapping":
        both = np.arange(SIZE + 5, dtype=np.float32)
        p, g = both[5:], both[:SIZE]
    elif kind == "the same memory":
        p = g[:]
    elif kind == "read-only":
        p.flags.writeable = False
    elif kind == "columns first":
        p = np.asfortranarray(np.arange(2 * SIZE, dtype=np.float32).reshape(SIZE, 2))[:, 1]
    elif kind == "gaps":
        p = np.arange(2 * SIZE, dtype=np.float32)[::2]
    elif kind == "backwards":
        p = p[::-1]
    elif kind == "misaligned":
        p = np.frombuffer(bytearray(1 + p.nbytes), np.float32, offset=1, count=SIZE)
        assert not p.flags.aligned
    else:
        p, g = p[:0], g[:0]
    before, gradient = p.copy(), g.copy()
    for _ in range(2):
        y = module(p0=p, g=g)
        np.testing.assert_array_equal(y, before - gradient * 0.5)
        if kind not in ("columns first", "empty"):
            assert not np.shares_memory(y, p)
            np.testing.assert_array_equal(p, before)
            np.testing.assert_array_equal(g, gradient)
        p = p if kind != "columns first" else before.copy()


def test_arrays_in_any_order_of_memory(reading: None, bound: list[str]) -> None:
    """One pair that shares a byte is found wherever it lies, and none where there is none."""
    count, rng = 23, np.random.default_rng(0)
    module = update(count)
    wide = SIZE + 3
    for trial in range(40):
        room = np.zeros(wide * (count + 1), np.float32)
        places = rng.permutation(count + 1) * wide
        if trial % 2:
            one, other = rng.choice(count + 1, 2, replace=False)
            places[one] = min(max(places[other] + rng.integers(1 - SIZE, SIZE), 0), len(room) - SIZE)
        arrays = {
            n: room[at : at + SIZE] for n, at in zip(["g", *(f"p{i}" for i in range(count))], places, strict=True)
        }
        room[:] = rng.integers(0, 100, len(room))
        before = {name: x.copy() for name, x in arrays.items()}
        bound.clear()
        results = module(**arrays)
        for name, y in results.items():
            np.testing.assert_array_equal(y, before[name] - before["g"] * 0.5)
        lowest = sorted(places)
        shared = any(b - a < SIZE for a, b in itertools.pairwise(lowest))
        assert len(bound) == (1 if shared or not trial else 0)
        assert shared or all(results[name] is arrays[name] for name in results)


def test_a_default_is_not_written(reading: None) -> None:
    table = np.arange(400, dtype=np.float32)  # larger than what a graph's text holds
    graph = gradc.trace(lambda g: table - g, g="f32[400]")
    name = next(iter(graph.defaults))
    module, g = gradc.compile(graph, donate=[name], target="cpu"), np.ones(400, np.float32)
    mine = table.copy()
    for _ in range(2):
        assert module(**{name: mine}, g=g) is mine
        np.testing.assert_array_equal(module(g=g), table - 1)
        np.testing.assert_array_equal(table, np.arange(400))


def test_a_refused_call_leaves_every_bit(reading: None, bound: list[str]) -> None:
    def rows(p: Any, t: Any) -> Any:
        return {"p": p - ops.sum(ops.embedding(t, p)), "n": ops.sum(p)}

    module = gradc.compile(gradc.trace(rows, p="f32[V,2]", t="i64[N]"), donate=["p"], target="cpu")
    p, good = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 3, 1])
    for _ in range(2):
        wanted = p - p[good].sum()
        results = module(p=p, t=good)
        np.testing.assert_array_equal(results["p"], wanted)
        p = results["p"]
        bound.clear()
        with pytest.raises(IndexOutOfRange):
            module(p=p, t=np.array([0, 4, 1]))
        assert not bound
        np.testing.assert_array_equal(p, wanted)


def test_threads_at_once_and_arrays_that_die() -> None:
    module, wrong = update(), []
    module(**given())

    def work(seed: int) -> None:
        for i in range(200):
            arrays = given(SIZE)
            arrays["p0"] += seed * 1000 + i
            if not np.array_equal(module(**arrays), np.arange(SIZE) + seed * 1000 + i - 0.5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_are_written_in_place_and_counted(bound: list[str]) -> None:
    torch = pytest.importorskip("torch")
    module = update()
    p, g = torch.arange(SIZE, dtype=torch.float32), torch.ones(SIZE)
    for again in range(3):
        count = p._version
        y = module(p0=p, g=g)
        assert y is p and p._version == count + 1
        torch.testing.assert_close(y, torch.arange(SIZE) - 0.5 * (again + 1))
    assert len(bound) == 1
    with torch.inference_mode():
        unrecorded = torch.arange(SIZE, dtype=torch.float32)
        for _ in range(2):
            module(p0=unrecorded, g=g)
    torch.testing.assert_close(unrecorded, torch.arange(SIZE) - 1.0)


@pytest.mark.parametrize("kind", ["given twice", "view", "negated", "strided", "other dtype", "recorded"])
def test_other_tensors(kind: str) -> None:
    """After a call that was in place."""
    torch = pytest.importorskip("torch")
    module = update()
    module(p0=torch.zeros(SIZE), g=torch.ones(SIZE))
    p, g = torch.arange(SIZE, dtype=torch.float32), torch.ones(SIZE)
    if kind == "given twice":
        p = g
    elif kind == "view":
        both = torch.arange(SIZE + 5, dtype=torch.float32)
        p, g = both[5:], both[:SIZE]
    elif kind == "negated":
        p = torch._neg_view(p)
    elif kind == "strided":
        p = torch.arange(2 * SIZE, dtype=torch.float32)[::2]
    elif kind == "other dtype":
        p = p.double()
    else:
        p.requires_grad_()
    if kind in ("other dtype", "recorded"):
        with pytest.raises(GradcError):
            module(p0=p, g=g)
        torch.testing.assert_close(p.detach(), torch.arange(SIZE, dtype=p.dtype))
        return
    before, gradient = p.clone(), g.clone()
    for _ in range(2):
        torch.testing.assert_close(module(p0=p, g=g), before - gradient * 0.5)
        torch.testing.assert_close(p, before)
        torch.testing.assert_close(g, gradient)


@pytest.mark.parametrize("donate", [["p0"], []])
def test_a_tensor_that_requires_grad_is_refused_after_calls_that_record_nothing(donate: list[str]) -> None:
    torch = pytest.importorskip("torch")
    graph = gradc.trace(lambda g, p0: p0 - g * 0.5, g="f32[N]", p0="f32[N]")
    module = gradc.compile(graph, donate=donate, target="cpu")
    p, g = torch.zeros(SIZE, requires_grad=True), torch.ones(SIZE)
    with torch.no_grad():
        for _ in range(2):
            module(p0=p, g=g)
    kept, count = p.detach().clone(), p._version
    with pytest.raises(NotDifferentiable):
        module(p0=p, g=g)
    assert torch.equal(p, kept) and p._version == count


def test_what_is_not_written_counts_no_change() -> None:
    torch = pytest.importorskip("torch")
    module, g = update(), torch.ones(SIZE)
    strided, p, out = torch.arange(2.0 * SIZE)[::2], torch.ones(SIZE), torch.ones(SIZE)
    module(p0=strided, g=g)
    module(p0=p, g=g, out={"p0": out})
    assert (strided._version, p._version, out._version) == (0, 0, 1)
    module(p0=p, g=g, out={"p0": p})
    assert p._version == 1
