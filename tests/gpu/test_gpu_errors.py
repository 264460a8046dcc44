"""What is wrong with a call or with its data: one error each, nothing half-written, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machines import Machine

import gradc
from gradc import ops
from gradc.errors import (
    BufferTooSmall,
    CaptureError,
    DeviceError,
    GradcError,
    IndexOutOfRange,
    InvalidProblem,
    MisalignedOperand,
    NotAscending,
    OverlappingOperands,
    WorkspaceTooSmall,
)

V, D, N = 12, 20, 5000
EMBEDDING = gradc.trace(lambda t, w: ops.embedding(t, w) * 2.0, t="i64[N]", w="f32[V,D]")


def given(machine: Machine, **bad: int) -> dict[str, Any]:
    """Indices and a table; ``at_17=99`` is what stands at position 17."""
    t = np.arange(N) % V
    for where, value in bad.items():
        t[int(where.removeprefix("at_"))] = value
    return {"t": machine.put(t), "w": machine.put(np.ones((V, D), np.float32))}


# -- bad indices -------------------------------------------------------------------------------------------------------


def test_the_lowest_bad_index_is_named_and_nothing_is_written(machine: Machine) -> None:
    module = machine.compile(EMBEDDING)
    out = machine.put(np.full((N, D), 7, np.float32))
    bad = given(machine, at_4000=-1, at_1777=V)
    error = machine.fails_with(
        module,
        IndexOutOfRange,
        lambda: module(**bad, out={"y": out}),
        match=rf"index {V} at position 1777 of 't' is out of range \[0, {V}\)",
    )
    assert isinstance(error, IndexOutOfRange) and (error.position, error.value, error.bound) == (1777, V, V)
    assert (machine.get(out) == 7).all()


def test_the_device_goes_on_after_bad_indices(machine: Machine) -> None:
    """Many calls, one of them bad: that one raises, all others are right, before and after."""
    module = machine.compile(EMBEDDING)
    good, bad = given(machine), given(machine, at_3=V + 1)
    for _ in range(3):
        before = module(**good)
        module.synchronize()
        machine.fails_with(module, IndexOutOfRange, lambda: module(**bad), match="position 3 ")
        after = module(**good)
        module.synchronize()
        assert (machine.get(before) == 2).all() and (machine.get(after) == 2).all()


@pytest.mark.places("memory", "cuda")
def test_an_error_comes_with_a_later_call_or_at_once(machine: Machine) -> None:
    bad, good = given(machine, at_3=V), given(machine)
    at_once = machine.compile(EMBEDDING, errors="sync")
    with pytest.raises(IndexOutOfRange, match="position 3 "):
        at_once(**bad)
    late = machine.compile(EMBEDDING, errors="async")
    late(**bad)  # says nothing yet
    with pytest.raises(IndexOutOfRange, match="position 3 "):
        for _ in range(1000):
            late(**good)
            machine.waited()
    assert (machine.get(late(**good)) == 2).all()
    late.synchronize()


def test_a_scatter_writes_nothing_after_a_bad_index(machine: Machine) -> None:
    """By sort, partial results, fixed point: every stage looks at the flag."""
    for how in ("segmented", "privatized", "atomic_fixed"):
        graph = gradc.trace(lambda i, u: ops.scatter_add(i, u, size=30), i="i64[N]", u="f32[N,3]")
        module = machine.compile(graph, reductions={"*": how})
        out = machine.put(np.full((30, 3), 7, np.float32))
        i = np.zeros(400, np.int64)
        i[77] = 30
        machine.fails_with(
            module,
            IndexOutOfRange,
            lambda m=module, i=i, o=out: m(
                i=machine.put(i), u=machine.put(np.ones((400, 3), np.float32)), out={"y": o}
            ),
            match="position 77 ",
        )
        assert (machine.get(out) == 7).all(), how


def test_offsets_that_decrease(machine: Machine) -> None:
    graph = gradc.trace(lambda i, o, t: ops.embedding_bag(i, t, o, mode="sum"), i="i64[N]", o="i64[B]", t="f32[V,4]")
    module = machine.compile(graph)
    bad = {
        n: machine.put(a)
        for n, a in {"i": np.zeros(9, np.int64), "o": np.array([0, 5, 3]), "t": np.ones((4, 4), np.float32)}.items()
    }
    machine.fails_with(module, NotAscending, lambda: module(**bad), match="3 at position 2 of 'o' is below the 5")


# -- calls that cannot be ----------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[type[GradcError], str, Callable[[Machine, gradc.Module], Any]]] = {
    "an input is missing": (InvalidProblem, "needs the input 'w'", lambda m, f: f(t=m.put(np.zeros(3, np.int64)))),
    "another dtype": (
        InvalidProblem,
        "convert it first",
        lambda m, f: f(t=m.put(np.zeros(3, np.int64)), w=m.put(np.zeros((V, D)))),
    ),
    "another rank": (
        InvalidProblem,
        "w",
        lambda m, f: f(t=m.put(np.zeros(3, np.int64)), w=m.put(np.zeros(V, np.float32))),
    ),
    "a result too large for out": (
        BufferTooSmall,
        "needs",
        lambda m, f: f(**given(m), out={"y": m.put(np.zeros((N - 1, D), np.float32))}),
    ),
    "out of another dtype": (
        InvalidProblem,
        "out\\['y'\\]",
        lambda m, f: f(**given(m), out={"y": m.put(np.zeros((N, D)))}),
    ),
    "out that is an input": (
        OverlappingOperands,
        "shares memory with the input w",
        lambda m, f: f(t=m.put(np.arange(V)), w=(w := m.put(np.ones((V, D), np.float32))), out={"y": w}),
    ),
    "a workspace too small": (
        WorkspaceTooSmall,
        "workspace needs",
        lambda m, f: f.forward(**given(m), workspace=m.put(np.zeros(8, np.uint8))),
    ),
    "a workspace that begins oddly": (
        MisalignedOperand,
        "workspace",
        lambda m, f: f.forward(
            **given(m), workspace=m.cut(m.put(np.zeros(f.workspace_size(N=N, V=V, D=D) + 1, np.uint8)))
        ),
    ),
    "no such input": (InvalidProblem, "has no input 'z'", lambda m, f: f(**given(m), z=m.put(np.zeros(3, np.float32)))),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_cannot_be(what: str, machine: Machine) -> None:
    """Found before anything runs; the module is fine."""
    error, match, call = CALLS[what]
    module = machine.compile(EMBEDDING)
    with pytest.raises(error, match=match):
        call(machine, module)
    y = module(**given(machine))
    module.synchronize()
    assert (machine.get(y) == 2).all()


@pytest.mark.places("memory", "cuda")
def test_arrays_of_the_host(machine: Machine) -> None:
    module = machine.compile(EMBEDDING)
    with pytest.raises(DeviceError, match="in host memory"):
        module(t=np.zeros(3, np.int64), w=given(machine)["w"])


@pytest.mark.places("memory", "cuda")
def test_what_cannot_be_captured(machine: Machine) -> None:
    """A bad index in the run before the capture, a host array, a backward without its cotangent; then a capture that
    can be.
    """
    module = machine.compile(EMBEDDING, ["w"])
    with pytest.raises(IndexOutOfRange):
        module.capture(**given(machine, at_3=V))
    with pytest.raises((DeviceError, CaptureError)):
        module.capture(**{**given(machine), "w": np.ones((V, D), np.float32)})
    with pytest.raises(GradcError):
        module.capture("backward", **given(machine))
    handle = module.capture(**given(machine))
    handle.replay()
    handle.check()
    assert (machine.get(handle.outputs["y"]) == 2).all()


@pytest.mark.places("memory", "cuda")
def test_a_captured_run_keeps_its_outputs_from_bad_indices(machine: Machine) -> None:
    module = machine.compile(EMBEDDING)
    inputs = given(machine)
    handle = module.capture(**inputs)
    handle.replay()
    handle.check()
    t = np.arange(N) % V
    machine.write(inputs["t"], np.where(t == 7, V, t))
    machine.write(inputs["w"], np.full((V, D), 5, np.float32))
    handle.replay()
    with pytest.raises(IndexOutOfRange, match=f"index {V} at position 7 "):
        handle.check()
    assert (machine.get(handle.outputs["y"]) == 2).all()
    machine.write(inputs["t"], t)
    handle.replay()
    handle.check()
    assert (machine.get(handle.outputs["y"]) == 10).all()
