"""Modules for a GPU, run on one that is not there (:mod:`gpu_in_memory`): arrays, streams, errors, products,
captures.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import long_tests
import ml_dtypes
import numpy as np
import pytest
from gpu_in_memory import Exchanged, InMemory, Interface, Tensor, installed, ndarray, to_cupy, to_torch

import gradc
from gradc import api, knobs, ops
from gradc import compiler as pipeline
from gradc.errors import (
    BufferTooSmall,
    CaptureError,
    DeviceError,
    GradcError,
    IndexOutOfRange,
    InvalidProblem,
    MisalignedOperand,
    NotAscending,
    OutOfMemory,
    OverlappingOperands,
    Unsupported,
    WorkspaceTooSmall,
)
from gradc.runtime.cuda import programs as cuda
from gradc.runtime.cuda.numbers import CAPTURED
from gradc.runtime.executable import Executable

pytestmark = pytest.mark.usefixtures("device")
rng = np.random.default_rng(0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[InMemory]]:
    with installed(monkeypatch) as made:
        yield made


def host(value: Any) -> np.ndarray:
    return (
        value.get() if isinstance(value, ndarray) else value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    )


GRAPH = gradc.trace(lambda t, w, x: ops.softmax(ops.embedding(t, w) * x), t="i64[N]", w="f32[V,D]", x="f32[D]")


def given(n: int = 30, v: int = 12, d: int = 7, bad: int | None = None) -> dict[str, np.ndarray]:
    t = rng.integers(0, v, n)
    if bad is not None:
        t[bad] = v + 3
    return {"t": t, "w": rng.standard_normal((v, d)).astype(np.float32), "x": rng.standard_normal(d).astype(np.float32)}


def agree(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    found, wanted = host(found).astype(np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= tolerance * max(1, np.abs(wanted).max(initial=0))


@pytest.mark.parametrize("move", [to_cupy, to_torch, Interface, Exchanged])
@pytest.mark.parametrize("errors", ["sync", "async"])
def test_forward_and_backward(move: Any, errors: str) -> None:
    """Arrays of every library in; torch's out where torch's came in, else CuPy's."""
    module = gradc.compile(GRAPH, wrt=["w", "x"], target="cuda", errors=errors)
    cpu = gradc.compile(GRAPH, wrt=["w", "x"], target="cpu")
    values = given()
    y, residuals = module.forward(**{k: move(v) for k, v in values.items()})
    wanted, kept = cpu.forward(**values)
    dy = rng.standard_normal(wanted.shape).astype(np.float32)
    gradients = module.backward(residuals, move(dy))
    assert isinstance(y, Tensor if move is to_torch else ndarray) and all(
        type(g) is type(y) for g in gradients.values()
    )
    agree(y, wanted)
    for name, gradient in cpu.backward(kept, dy).items():
        agree(gradients[name], gradient)
    module.synchronize()


def test_torch_wins_over_cupy_and_numbers_are_launched_once(device: type[InMemory]) -> None:
    module = gradc.compile(gradc.trace(lambda x, y, s: x * y + s, x="f32[N]", y="f32[N]", s="f32[]"), target="cuda")
    x, y = np.ones(3, np.float32), np.full(3, 2, np.float32)
    first = module(x=to_cupy(x), y=to_torch(y), s=0.5)
    assert isinstance(first, Tensor) and device.waits == 0
    agree(first, [2.5] * 3)
    waits, before = device.waits, device.allocated
    agree(module(x=to_cupy(x), y=to_cupy(y), s=0.5), [2.5] * 3)
    assert device.waits == waits and device.allocated == before + 3, "two inputs and the result"
    assert [name for name, _ in device.launched].count("gradc_numbers") == 1


def test_numbers_that_change(device: type[InMemory]) -> None:
    """Each call has its own, whatever is submitted before it is done: on one stream, on two, and beside a capture."""
    graph = gradc.trace(lambda x, a, b: x * a + ops.cast(b, "f32"), x="f32[N]", a="f32[]", b="f64[]")
    module = gradc.compile(graph, target="cuda")
    x = to_cupy(np.ones(3, np.float32))
    found = [module(x=x, a=i / 8, b=np.float64(i // 2), stream=stream) for i in range(6) for stream in (None, 5)]
    handle = module.capture(x=x, a=0.5, b=1.0)
    assert sum(name == "gradc_numbers" for name, _ in device.launched) == 2 * 6 + 1
    last = module(x=x, a=7, b=8.0)
    handle.replay()
    device.drain()
    for i, y in enumerate(found):
        agree(y, np.full(3, i // 2 / 8 + i // 4))
    agree(handle.outputs["y"], np.full(3, 1.5))
    agree(last, np.full(3, 15.0))
    assert device.waits <= 4, "of the capture and its first run"


def test_numbers_in_a_capture_of_the_callers(device: type[InMemory]) -> None:
    module = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x, y = to_cupy(np.ones(3, np.float32)), to_cupy(np.zeros(3, np.float32))
    fresh = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    fresh(x=x, a=to_cupy(np.array(1, np.float32)))
    device.captures[50] = []
    with pytest.raises(CaptureError, match="no memory for the call's numbers"):
        fresh(x=x, a=3, stream=50, out={"y": y})
    del device.captures[50]
    module(x=x, a=2)
    device.captures[50] = []
    for a in (3, 4):
        module.forward(x=x, a=a, stream=50, out={"y": y})
    recorded = device.captures.pop(50)
    module(x=x, a=5)
    for work in recorded:
        device.queues[0].append(work)
    agree(y, [4, 4, 4])


def on_host(array: Any) -> Tensor:
    """A tensor of torch's on the CPU."""
    tensor = to_torch(array)
    tensor.device = tensor.device._replace(type="cpu")
    tensor.__array__ = lambda: None  # type: ignore[attr-defined]
    return tensor


def test_a_tensor_without_an_axis_may_lie_in_host_memory() -> None:
    """As torch takes it beside tensors of any device: by its value at the call, in forward, backward and alone."""
    graph = gradc.trace(lambda x, a: ops.exp(x * a), x="f32[N]", a="f32[]")
    module = gradc.compile(graph, wrt=["x", "a"], target="cuda")
    cpu = gradc.compile(graph, wrt=["x", "a"], target="cpu")
    x = rng.standard_normal(5).astype(np.float32)
    for a in (0.5, -1.25):
        number = np.asarray(a, np.float32)
        y, residuals = module.forward(x=to_torch(x), a=on_host(number))
        wanted, kept = cpu.forward(x=x, a=number)
        dy = rng.standard_normal(5).astype(np.float32)
        gradients, expected = module.backward(residuals, to_torch(dy)), cpu.backward(kept, dy)
        agree(y, wanted)
        for name in ("x", "a"):
            assert gradients[name].device.type == "cuda"
            agree(gradients[name], expected[name])
    alone = gradc.compile(gradc.trace(lambda a: a + a, a="f64[]"), target="cuda")(a=on_host(np.asarray(0.75)))
    assert isinstance(alone, Tensor) and alone.device.type == "cuda"
    agree(alone, 1.5)


@pytest.mark.parametrize("place", ["out", "x"])
def test_a_tensor_without_an_axis_is_no_memory_of_a_device(place: str) -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x), x="f32[N]"), target="cuda")
    given = {"x": to_torch(np.ones(3, np.float32)), "out": {"y": to_torch(np.zeros((), np.float32))}}
    given[place] = {"y": on_host(np.zeros((), np.float32))} if place == "out" else on_host(np.ones(1, np.float32))
    with pytest.raises(DeviceError, match="in host memory"):
        module(x=given["x"], out=given["out"])


@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_a_call_without_inputs_is_of_the_library_of_what_it_writes(move: Any, device: type[InMemory]) -> None:
    """Its stream, and the library that allocates what is not given."""
    graph = gradc.trace(lambda: {"a": ops.iota(shape=(4,), axis=0, dtype="f32"), "b": ops.iota(shape=(3,), axis=0)})
    module = gradc.compile(graph, target="cuda")
    sys.modules["torch"].streams.append(7)
    device.current = 5
    for _ in range(2):
        device.launched.clear()
        made = module(out={"a": (a := move(np.zeros(4, np.float32)))})
        assert made["a"] is a and type(made["b"]) is type(a)
        assert {stream for _, stream in device.launched} == {7 if move is to_torch else 5}
        agree(made["a"], range(4))
        agree(made["b"], range(3))


def test_a_number_whose_launch_failed_is_written_by_the_next_call(
    device: type[InMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x = to_cupy(np.ones(3, np.float32))
    module(x=x, a=2)
    monkeypatch.setattr(InMemory, "fails", "gradc_numbers")
    with pytest.raises(DeviceError, match="gradc_numbers"):
        module(x=x, a=3)
    monkeypatch.undo()
    agree(module(x=x, a=3), [3] * 3)


def test_more_captures_with_numbers_than_there_is_memory_for(device: type[InMemory]) -> None:
    """A call outside of a capture allocates for the next ones, and what was captured keeps its numbers."""
    module = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x, kept = to_cupy(np.ones(3, np.float32)), to_cupy(np.zeros(3, np.float32))
    recorded = []

    def captured(a: float) -> None:
        device.captures[50] = []
        try:
            module.forward(x=x, a=a, stream=50, out={"y": kept})
        finally:
            recorded.append(device.captures.pop(50))

    module(x=x, a=1)
    for i in range(CAPTURED):
        captured(i)
    with pytest.raises(CaptureError, match="call it once more outside of a capture"):
        captured(7)
    agree(module(x=x, a=2), [2] * 3)
    captured(-1)
    for number, a in ((0, 0), (CAPTURED - 1, CAPTURED - 1), (-1, -1)):
        device.queues[0].extend(recorded[number])
        agree(kept, [a] * 3)


def test_numbers_on_the_stream_of_each_thread(device: type[InMemory]) -> None:
    """The handle is one, the streams are not ordered: each has numbers of its own."""
    module = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x = to_cupy(np.ones(3, np.float32))
    module(x=x, a=1)
    cells = {}
    with ThreadPoolExecutor(1) as other:
        for run in (lambda f: f(), lambda f: other.submit(f).result()):
            run(lambda: [module(x=x, a=a, stream=2) for a in (3, 3)])
            cells[run] = run(lambda: module.forward.backend.numbers.cells(2))
    assert len(set(cells.values())) == 2
    assert sum(name == "gradc_numbers" for name, _ in device.launched) == 3


def test_an_error_of_before_is_not_raised_in_a_capture(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, target="cuda")
    arrays = {k: to_cupy(v) for k, v in given().items()}
    y = module(**arrays)
    space = ndarray((1 << 12,), np.uint8, device().memory(1 << 12, 0))
    module(**{k: to_cupy(v) for k, v in given(bad=1).items()})
    device.drain()
    device.captures[50] = []
    module.forward(**arrays, stream=50, out={"y": y}, workspace=space)
    device.captures.pop(50)
    with pytest.raises(IndexOutOfRange):
        module.forward(**arrays)


def test_nothing_is_allocated_or_waited_for(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    values = {k: to_cupy(v) for k, v in given().items()}
    y, residuals = module.forward(**values)
    out = {
        name: to_cupy(np.zeros_like(host(a)))
        for name, a in {"y": y, **residuals.arrays}.items()
        if name in module.forward.outputs
    }
    workspace = to_cupy(np.zeros(module.forward.workspace_size(N=30, V=12, D=7) + 256, np.uint8))
    workspace = workspace[-workspace.data.ptr % 256 :]
    module.synchronize()
    before, waits = device.allocated, device.waits
    again, _ = module.forward(**values, out=out, workspace=workspace)
    assert again is out["y"] and device.allocated == before and device.waits == waits
    agree(out["y"], host(y))


@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_strided_and_misaligned_inputs_are_packed(move: Any) -> None:
    module = gradc.compile(gradc.trace(lambda x, y: x + y, x="f32[A,B]", y="f32[A,B]"), target="cuda")
    whole, other = rng.standard_normal((9, 14)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    seen = whole[1::2, 13:3:-2] if move is to_cupy else whole[1::2, 3:13:2]
    array = to_cupy(whole)[1::2, 13:3:-2] if move is to_cupy else Tensor(to_cupy(whole)[1::2, 3:13:2])
    agree(module(x=array, y=move(other)), seen + other)
    raw = to_cupy(np.zeros(81, np.uint8))
    raw.host[1:] = other.reshape(-1).view(np.uint8)
    odd = raw.seen(raw.host[1:].view(np.float32).reshape(4, 5))
    agree(module(x=odd, y=move(other)), 2 * other)
    strided = raw.seen(
        raw.host[1:].view(np.float32).reshape(4, 5)[::-1]
        if move is to_cupy
        else raw.host[1:].view(np.float32).reshape(4, 5)[::2]
    )
    if move is to_cupy:
        agree(module(x=strided, y=move(other)), other[::-1] + other)
    assert module.forward.copied["x"] >= 2


def test_accumulate(device: type[InMemory]) -> None:
    """Adds on the device, and not where an index is bad."""
    module = gradc.compile(GRAPH, wrt=["w", "x"], target="cuda")
    values = given()
    _, residuals = module.forward(**{k: to_cupy(v) for k, v in values.items()})
    dy = to_cupy(rng.standard_normal((30, 7)).astype(np.float32))
    first = {name: host(g) for name, g in module.backward(residuals, dy).items()}
    total = {name: to_cupy(np.ones_like(g)) for name, g in first.items()}
    waits = device.waits
    back = module.backward(residuals, dy, out=total, accumulate=True)
    assert back["w"] is total["w"] and device.waits == waits
    for name in first:
        agree(total[name], 1 + first[name])
    residuals.arrays["t"].host[3] = 99
    before = {name: host(g) for name, g in total.items()}
    module.backward(residuals, dy, out=total, accumulate=True)
    with pytest.raises(IndexOutOfRange, match="index 99 at position 3"):
        module.synchronize()
    assert all(np.array_equal(host(total[name]), before[name]) for name in total), "nothing was added"
    gradients = gradc.Gradients(dict(total))
    gradients.accumulate(total)
    agree(gradients["w"], 2 + 2 * first["w"])


def test_a_bad_index_stops_what_follows() -> None:
    graph = gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]")
    module = gradc.compile(graph, wrt=["w"], target="cuda")
    out = to_cupy(np.full((4, 2), 7, np.float32))
    t, w = to_cupy(np.array([0, 5, -9, 1])), to_cupy(np.ones((3, 2), np.float32))
    module.forward(t=t, w=w, out={"y": out})
    with pytest.raises(IndexOutOfRange, match=r"index 5 at position 1 of '.*t.*' is out of range \[0, 3\)") as caught:
        module.synchronize()
    assert (caught.value.position, caught.value.value, caught.value.bound) == (1, 5, 3)
    assert (host(out) == 7).all()
    module.synchronize()  # it was raised once


@pytest.mark.parametrize("what", ["the next call", "the arrays are gone", "sync", "backward"])
def test_when_a_bad_index_is_raised(what: str, device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda", errors="sync" if what == "sync" else "async")
    arrays = {k: to_cupy(v) for k, v in given(bad=4).items()}
    good = {k: to_cupy(v) for k, v in given().items()}
    if what == "sync":
        with pytest.raises(IndexOutOfRange, match="index 15 at position 4"):
            module.forward(**arrays)
        return
    _, residuals = module.forward(**good)
    waits = device.waits
    module.forward(**arrays)
    assert device.waits == waits
    if what == "the arrays are gone":
        del arrays
        gc.collect()
        with pytest.raises(
            IndexOutOfRange, match=r"its array is gone or was changed since\) at position 4 .* \[0, 12\)"
        ) as caught:
            module.synchronize()
        assert caught.value.value is None
        return
    module.forward(**good)  # not there yet: nothing waits for it
    assert device.waits == waits
    device.drain()
    with pytest.raises(IndexOutOfRange, match="index 15 at position 4"):
        (
            module.backward(residuals, to_cupy(np.ones((30, 7), np.float32)))
            if what == "backward"
            else module.forward(**good)
        )
    module.forward(**good)
    module.synchronize()


@long_tests.values
def test_bad_calls_among_good_ones(device: type[InMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    """On two streams, of forward and backward, through several blocks of flags: each bad call is raised once, in order
    and with its value; all others are right; a call without errors submits launches alone, and no call waits.
    """
    asked: list[str] = []
    for name in ("fill", "copy", "event"):
        original = getattr(InMemory, name)
        monkeypatch.setattr(
            InMemory, name, lambda *a, _name=name, _original=original, **k: (asked.append(_name), _original(*a, **k))[1]
        )
    graph = gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]")
    module = gradc.compile(graph, wrt=["w"], target="cuda", reductions={"*": "segmented"})
    w, dy = np.arange(24, dtype=np.float32).reshape(12, 2), to_cupy(np.ones((4, 2), np.float32))
    table, kept, found = to_cupy(w), [], []
    places = {5: 12, 31: -1, 32: 99, 63: 13, 64: 14}
    for number in range(80):
        t = np.arange(4) + number % 9
        if number in places:
            t[2] = places[number]
        tokens = to_cupy(t)
        kept.append(tokens)  # the value of a bad index is read from it
        y, residuals = module.forward(t=tokens, w=table, stream=number % 2 * 7)
        found.append((t, y))
        if number not in places:
            module.backward(residuals, dy, stream=number % 2 * 7)
    assert device.waits == 0 and asked == ["copy"] * 4, "more than one block of calls on each stream, twice"
    device.drain()
    for number, value in places.items():
        with pytest.raises(IndexOutOfRange, match=f"index {value} at position 2 of 't'"):
            module.forward(t=kept[0], w=table)
        assert (found[number][0] == host(kept[number])).all()
    module.synchronize()
    for number, (t, y) in enumerate(found):
        if number not in places:
            agree(y, w[t])


def test_the_flag_of_a_call_that_fails_to_start_is_given_back(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, target="cuda")
    arrays = {k: to_cupy(v) for k, v in given().items()}
    wanted = host(module(**arrays))
    name = next(iter(module.forward.kernels))
    for _ in range(100):
        device.fails = name
        with pytest.raises(DeviceError, match="illegal memory access"):
            module(**arrays)
        device.fails = ""
    agree(module(**arrays), wanted)
    pool = module.forward.native._flags
    assert len(pool._used) + len(pool._free) <= 4
    module.synchronize()
    assert not pool._used


def test_ascending(device: type[InMemory]) -> None:
    module = gradc.compile(
        gradc.trace(lambda w, t, o: ops.embedding_bag(t, w, o), t="i64[N]", o="i64[B]", w="f32[V,D]"), target="cuda"
    )
    module(
        t=to_cupy(np.array([0, 1, 2])),
        o=(offsets := to_cupy(np.array([0, 2, 1]))),
        w=(w := to_cupy(np.ones((3, 2), np.float32))),
    )
    assert offsets is not None and w is not None
    with pytest.raises((NotAscending, IndexOutOfRange)):
        module.synchronize()


def test_steps_of_one_structure_keep_their_own_sizes_and_names() -> None:
    """Kernels that are equal share one name and one text, over other dims and other indices."""
    graph = gradc.trace(
        lambda a, p, b, q: {"one": ops.embedding(a, p), "two": ops.embedding(b, q)},
        a="i64[N]",
        p="f32[V,D]",
        b="i64[M]",
        q="f32[W,E]",
    )
    module = gradc.compile(graph, target="cuda", fuse=False)
    assert len({k.name for k in module.forward.program.kernels}) < len(module.forward.program.kernels)
    values = {
        "a": rng.integers(0, 4, 3),
        "p": rng.standard_normal((4, 5)).astype(np.float32),
        "b": rng.integers(0, 9, 70),
        "q": rng.standard_normal((9, 40)).astype(np.float32),
    }
    found = module(**{k: to_cupy(v) for k, v in values.items()})
    agree(found["one"], values["p"][values["a"]])
    agree(found["two"], values["q"][values["b"]])
    values["b"][69] = 9
    arrays = {k: to_cupy(v) for k, v in values.items()}
    module(**arrays)
    with pytest.raises(IndexOutOfRange, match=r"index 9 at position 69 of 'b' is out of range \[0, 9\)"):
        module.synchronize()


# -- streams -----------------------------------------------------------------------------------------------------------


class External:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "number"),
    [(5, 5), (External(), 77), (type("S", (), {"ptr": 9})(), 9), (type("S", (), {"cuda_stream": 11})(), 11)],
)
@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_streams(stream: Any, number: int, move: Any, device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    values = given()
    arrays = {k: move(v) for k, v in values.items()}
    y, residuals = module.forward(**arrays, stream=stream)
    module.backward(residuals, move(np.ones((30, 7), np.float32)), stream=stream)
    assert {s for _, s in device.launched} == {number}
    agree(y, gradc.compile(GRAPH, target="cpu")(**values))
    module.synchronize()


@pytest.mark.parametrize("stream", [-1, True, "s", 1.5, object()])
def test_what_is_no_stream(stream: Any) -> None:
    module = gradc.compile(GRAPH, target="cuda")
    with pytest.raises(InvalidProblem, match="stream="):
        module.forward(**{k: to_cupy(v) for k, v in given().items()}, stream=stream)


def test_the_current_stream_is_the_librarys(device: type[InMemory]) -> None:
    import torch

    module = gradc.compile(GRAPH, target="cuda")
    device.current = 3
    module.forward(**{k: to_cupy(v) for k, v in given().items()})
    with torch.cuda.stream(torch.cuda.ExternalStream(4)):
        module.forward(**{k: to_torch(v) for k, v in given().items()})
    assert {s for _, s in device.launched} == {3, 4}


def test_what_another_stream_still_writes_is_waited_for(device: type[InMemory]) -> None:
    module = gradc.compile(gradc.trace(lambda x: x + x, x="f32[N]"), target="cuda")
    late = Interface(np.zeros(3, np.float32), stream=21)
    device.queues[21].append(lambda: late.array.host.fill(4))
    y = module(x=late, stream=8)
    device.drain(8)
    agree(y, [8, 8, 8])
    exchanged = Exchanged(np.ones(3, np.float32))
    module(x=exchanged, stream=8)
    assert exchanged.asked == 8
    module(x=exchanged)
    assert exchanged.asked == 1, "DLPack's name of the default stream"


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(error: type[GradcError], match: str, **changes: Any) -> None:
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    arrays: dict[str, Any] = {k: to_cupy(v) for k, v in given().items()}
    launched = len(InMemory.launched)
    options = {k: changes.pop(k) for k in ("out", "workspace", "stream") if k in changes}
    with pytest.raises(error, match=match):
        module.forward(**{**arrays, **changes}, **options)
    assert len(InMemory.launched) == launched
    assert isinstance(module.forward.can_implement({**arrays, **changes}, **options), error)


def test_wrong_places(device: type[InMemory]) -> None:
    refused(DeviceError, "the input x is a numpy.ndarray in host memory", x=np.zeros(7, np.float32))
    refused(DeviceError, "the input x is a .*Tensor in host memory", x=on_host(np.zeros(7, np.float32)))
    far = to_cupy(np.zeros(7, np.float32))
    far.device.id = 3
    refused(DeviceError, "the input x lies on device 3, and this module on device 0", x=far)
    refused(
        DeviceError,
        "the input x lies on device 2, and this module on device 0",
        x=Exchanged(np.zeros(7, np.float32), device=2),
    )
    refused(InvalidProblem, "the input x is a builtins.object", x=object())
    cpu = gradc.compile(GRAPH, target="cpu")
    with pytest.raises(DeviceError, match="module for the CPU"):
        cpu(**{**given(), "x": to_torch(np.zeros(7, np.float32))})
    refused(DeviceError, "the workspace is a numpy.ndarray in host memory", workspace=np.zeros(1 << 20, np.uint8))
    refused(DeviceError, r"out\['y'\] is a numpy.ndarray in host memory", out={"y": np.zeros((30, 7), np.float32)})
    device.device_number = 1
    refused(DeviceError, "loaded on device 0, and the current one is device 1")


def test_wrong_memory(device: type[InMemory]) -> None:
    refused(WorkspaceTooSmall, "workspace needs .* bytes, got 16", workspace=to_cupy(np.zeros(16, np.uint8)))
    refused(MisalignedOperand, "multiple of 256 bytes", workspace=to_cupy(np.zeros(1 << 20, np.uint8))[8:])
    refused(BufferTooSmall, "'y' needs 840 bytes", out={"y": to_cupy(np.zeros((3, 7), np.float32))})
    w = to_cupy(np.zeros((30, 7), np.float32))
    refused(OverlappingOperands, "shares memory", out={"y": w}, w=w)
    refused(InvalidProblem, "f64|float64", x=to_cupy(np.zeros(7)))
    device.room = 1000
    big = gradc.compile(gradc.trace(lambda x: x + x, x="f32[N]"), target="cuda")
    array = to_cupy(np.zeros(1, np.float32))
    array.shape, array.strides = (1 << 30,), (4,)
    with pytest.raises(OutOfMemory, match=r"needs 429496\d{4} bytes of outputs and workspace, 1000 are left"):
        big(x=array)


@pytest.mark.parametrize("enough", [True, False])
def test_torch_is_given_what_cupy_keeps(enough: bool, device: type[InMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; where that is not enough, one error has the plan's bytes, and the next call works."""
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), target="cuda")
    x = np.linspace(0, 1, 64, dtype=np.float32)
    trimmed: list[int] = []

    def trim(self: InMemory) -> None:
        trimmed.append(1)
        InMemory.room = 1 << 40 if enough else 100

    monkeypatch.setattr(InMemory, "trim", trim)
    given = to_torch(x)
    monkeypatch.setattr(InMemory, "room", 100)
    if enough:
        agree(module(x=given), np.exp(x))
    else:
        with pytest.raises(OutOfMemory, match=r"float32\[64\] on cuda:0: 256 bytes") as caught:
            module(x=given)
        assert any("needs 256 bytes of outputs and workspace" in note for note in caught.value.__notes__)
    assert trimmed == [1]
    monkeypatch.setattr(InMemory, "room", 1 << 40)
    agree(module(x=given), np.exp(x))
    assert trimmed == [1]


def test_a_failed_launch_names_its_function(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, target="cuda")
    device.fails = "softmax"
    device.fails = next(k for k in module.forward.kernels)
    with pytest.raises(DeviceError, match=f"{device.fails}.*illegal memory access") as caught:
        module.forward(**{k: to_cupy(v) for k, v in given().items()})
    assert any(module.forward.program.name in note for note in caught.value.__notes__)


def test_dtypes() -> None:
    """What torch calls bfloat16 and the f8 types are seen by their bits."""
    for dtype in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.float16,
        np.float64,
        np.int8,
        np.bool_,
    ):
        from gradc.ir.types import dtype as dtype_of

        name = dtype_of(dtype).name
        module = gradc.compile(gradc.trace(lambda x: x, x=f"{name}[N]"), target="cuda")
        x = rng.integers(0, 2, 5).astype(dtype)
        for move in (to_cupy, to_torch):
            assert np.array_equal(host(module(x=move(x))).view(np.uint8), x.view(np.uint8))


def test_no_host_loop_reads_a_device() -> None:
    from gradc.errors import InternalError
    from gradc.runtime.cuda.on_device import describe

    array = describe(to_cupy(np.zeros(3, np.float32)))
    assert array is not None and "on a device" in repr(array)
    with pytest.raises(InternalError):
        array + 1


# -- captures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [to_cupy, to_torch])
@pytest.mark.parametrize("what", ["forward", "backward", "both", "value_and_grad"])
def test_capture(what: str, move: Any, device: type[InMemory]) -> None:
    """A replay reads the arrays as they are by then, and writes the same outputs."""
    graph = gradc.trace(
        lambda t, w, x: ops.sum(ops.softmax(ops.embedding(t, w) * x) * x), t="i64[N]", w="f32[V,D]", x="f32[D]"
    )
    module, cpu = (gradc.compile(graph, wrt=["w", "x"], target=target) for target in ("cuda", "cpu"))
    values = given()
    arrays = {k: move(v) for k, v in values.items()}
    one = np.float32(1.0) * np.ones((), np.float32)
    more = {} if what in ("forward", "value_and_grad") else {"cotangents": move(one)}
    handle = module.capture(what, **arrays, **more)
    device.drain()
    other = given()
    for k, v in other.items():
        getattr(arrays[k], "array", arrays[k]).host[...] = v
    if what == "backward":  # residuals are those of the first arrays; the inputs among them are read anew
        other = values
        for k, v in other.items():
            getattr(arrays[k], "array", arrays[k]).host[...] = v
    waits, before = device.waits, device.allocated
    for _ in range(3):
        handle.replay()
    assert device.waits == waits and device.allocated == before
    handle.check()
    value, gradients = cpu.value_and_grad(**other)
    wanted = {
        **({} if what == "backward" else {"y": value}),
        **({} if what == "forward" else {(k if what == "backward" else f"d.{k}"): v for k, v in gradients.items()}),
    }
    assert wanted.keys() <= handle.outputs.keys()
    for name, array in wanted.items():
        assert isinstance(handle.outputs[name], Tensor if move is to_torch else ndarray)
        agree(handle.outputs[name], array, 1e-5)


def test_a_captured_run_keeps_outputs_from_bad_indices(device: type[InMemory]) -> None:
    module = gradc.compile(gradc.trace(lambda t, w: ops.embedding(t, w), t="i64[N]", w="f32[V,D]"), target="cuda")
    t, w = to_cupy(np.array([0, 1])), to_cupy(np.ones((3, 2), np.float32))
    handle = module.capture(t=t, w=w)
    t.host[1] = 8
    w.host[...] = 5
    handle.replay(stream=6)
    with pytest.raises(IndexOutOfRange, match="index 8 at position 1"):
        handle.check()
    agree(handle.outputs["y"], np.ones((2, 2)))
    t.host[1] = 2
    handle.replay(stream=6)
    handle.check()
    agree(handle.outputs["y"], np.full((2, 2), 5))


def test_what_cannot_be_captured(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    arrays = {k: to_cupy(v) for k, v in given().items()}
    with pytest.raises(CaptureError, match="default stream"):
        module.capture(**arrays, stream=0)
    device.captures[40] = []
    with pytest.raises(CaptureError, match="0x28 is being captured already"):
        module.capture(**arrays, stream=40)
    del device.captures[40]
    with pytest.raises(DeviceError, match=r"the input x is a numpy\.ndarray in host memory"):
        module.capture(**{**arrays, "x": np.zeros(7, np.float32)})
    with pytest.raises(CaptureError, match="the input w is not contiguous"):
        module.capture(**{**arrays, "w": to_cupy(np.zeros((12, 14), np.float32))[:, ::2]})
    with pytest.raises(IndexOutOfRange):
        module.capture(**{k: to_cupy(v) for k, v in given(bad=2).items()})
    with pytest.raises(InvalidProblem, match="there are forward, backward, both, value_and_grad"):
        module.capture("sideways", **arrays)
    with pytest.raises(Unsupported, match="a CUDA graph of a module for 'cpu'"):
        gradc.compile(GRAPH, target="cpu").capture(**given())
    with pytest.raises(InvalidProblem, match="backward needs the cotangent"):
        module.capture("backward", **arrays)
    device.fails = next(iter(module.forward.kernels))
    with pytest.raises(DeviceError):
        module.capture(**arrays)
    assert not device.captures, "a capture that failed has ended"


def test_ctrl_c_leaves_no_capture(device: type[InMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes once the driver has begun one, and before the next line."""
    begin = device.capture

    def interrupted(self: InMemory, stream: int) -> None:
        begin(self, stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "capture", interrupted)
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    arrays = {k: to_cupy(v) for k, v in given().items()}
    with pytest.raises(KeyboardInterrupt):
        module.capture(**arrays)
    assert not device.captures


def test_a_call_on_a_captured_stream(device: type[InMemory]) -> None:
    """The caller's own capture: it must bring all memory."""
    module = gradc.compile(GRAPH, target="cuda")
    arrays = {k: to_cupy(v) for k, v in given().items()}
    y = module(**arrays)
    module.synchronize()
    device.captures[50] = []
    fresh = gradc.compile(GRAPH, target="cuda", fuse=False)
    space = device().memory(1 << 20, 0)
    with pytest.raises(CaptureError, match="run it once before"):
        fresh.forward(**arrays, stream=50, out={"y": y}, workspace=ndarray((space.nbytes,), np.uint8, space))
    fresh.synchronize()
    with pytest.raises(CaptureError, match=r"give out="):
        module.forward(**arrays, stream=50)
    with pytest.raises(CaptureError, match=r"workspace= of [0-9]+ bytes is needed"):
        module.forward(**arrays, stream=50, out={"y": y})
    space = device().memory(module.workspace_size(N=30, V=12, D=7), 0)
    workspace = ndarray((space.nbytes,), np.uint8, space)
    named = {**arrays, "w": Interface(given()["w"], stream=21)}
    with pytest.raises(CaptureError, match="would wait for one that is not"):
        module.forward(**named, stream=50, out={"y": y}, workspace=workspace)
    assert not device.captures[50]
    module.forward(**arrays, stream=50, out={"y": y}, workspace=workspace)
    assert device.captures.pop(50)


def test_torchs_own_capture(device: type[InMemory]) -> None:
    """What a call needs in torch.cuda.graph is the graph's own memory, which no later call gets: workspace, results,
    packed copies, numbers, zeros for a cotangent that is not given, sums for ``accumulate=``.  An error of before is
    raised after it.
    """
    torch: Any = sys.modules["torch"]

    def function(t: Any, w: Any, x: Any, a: Any) -> Any:
        rows = ops.embedding(t, w) * x * a
        return {"rows": rows, "sums": ops.sum(ops.exp(rows), axes=(1,))}

    graph = gradc.trace(function, t="i64[N]", w="f32[V,D]", x="f32[D]", a="f32[]")
    module, cpu = (gradc.compile(graph, wrt=["w"], target=target) for target in ("cuda", "cpu"))
    values = given()
    every_second = Tensor(to_cupy(np.repeat(values["w"], 2, axis=1))[:, ::2])
    arrays = {"t": to_torch(values["t"]), "x": to_torch(values["x"]), "w": every_second}
    sums = to_torch(np.ones(30, np.float32))
    total = to_torch(np.zeros((12, 7), np.float32))

    def step(a: float) -> Any:
        results, residuals = module.forward(**arrays, a=a)
        module.backward(residuals, sums=sums, out={"w": total}, accumulate=True)
        return results

    step(2.0)
    module.synchronize()
    module.forward(**{**arrays, "t": to_torch(given(bad=1)["t"])}, a=2.0)
    device.drain()
    captured, waits, before = torch.cuda.CUDAGraph(), device.waits, device.allocated
    with torch.cuda.graph(captured):
        results = [step(0.5), step(0.25)]
    assert device.waits == waits and device.allocated == before and module.forward.copied["w"] == 4
    with pytest.raises(IndexOutOfRange):
        module.synchronize()
    gc.collect()
    for round_ in range(3):
        arrays["x"].array.host[...] = values["x"] * round_
        total.array.host[...] = 0
        captured.replay()
        step(7.0)  # between replays the pool outside of the graph is used
        device.drain()
        expected = np.zeros((12, 7))
        for a in (0.5, 0.25, 7.0):
            y, residuals = cpu.forward(**{**values, "x": values["x"] * round_}, a=a)
            expected += cpu.backward(residuals, sums=np.ones(30, np.float32))["w"]
            if a != 7.0:
                agree(results[a == 0.25]["rows"], y["rows"], 1e-6)
                agree(results[a == 0.25]["sums"], y["sums"], 1e-5)
        agree(total, expected, 1e-4)


def test_a_capture_that_torch_did_not_begin(device: type[InMemory]) -> None:
    """torch's allocator knows nothing of it, and would give the memory to somebody else."""
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda")
    arrays = {k: to_torch(v) for k, v in given().items()}
    y, residuals = module.forward(**arrays)
    module.backward(residuals, y)
    outs = {n: to_torch(np.zeros_like(host(a))) for n, a in {"y": y, **residuals.arrays}.items()}
    outs = {n: a for n, a in outs.items() if n in module.forward.outputs}
    device.captures[50] = []
    for call, match in (
        (lambda: module.forward(**arrays, stream=50), "give out="),
        (lambda: module.forward(**arrays, stream=50, out=outs), r"workspace= of [0-9]+ bytes"),
        (lambda: module.backward(residuals, None, stream=50), "give out="),
    ):
        with pytest.raises(CaptureError, match=match):
            call()
    assert not device.captures.pop(50)


def test_torchs_capture_of_a_first_call(device: type[InMemory]) -> None:
    torch: Any = sys.modules["torch"]
    fresh = gradc.compile(gradc.trace(lambda x, a: x * a, x="f32[N]", a="f32[]"), target="cuda")
    x = to_torch(np.ones(3, np.float32))
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError, match="call it once with numbers"):
        fresh(x=x, a=2.0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError, match="run it once before"):
        fresh(x=x, a=to_torch(np.ones((), np.float32)))


# -- calls that repeat an earlier one ----------------------------------------------------------------------------------


def binds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the programs for a GPU whose calls are checked and bound, from now on."""
    bound, original = [], Executable.bind_call

    def counted(self: Executable, *args: Any, **more: Any) -> Any:
        bound.extend([self.program.name] * (self.target == "cuda"))
        return original(self, *args, **more)

    monkeypatch.setattr(Executable, "bind_call", counted)
    return bound


@long_tests.values
@pytest.mark.parametrize("errors", ["sync", "async"])
@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_a_call_that_differs_in_addresses_is_not_bound_again(
    move: Any, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gradc.compile(GRAPH, wrt=["w", "x"], target="cuda", errors=errors)
    cpu = gradc.compile(GRAPH, wrt=["w", "x"], target="cpu")
    bound = binds(monkeypatch)
    kept = []
    for stream in (None, None, 5, 7):
        values = given()
        arrays = {k: move(v) for k, v in values.items()}
        y, residuals = module.forward(**arrays, stream=stream)
        dy = rng.standard_normal((30, 7)).astype(np.float32)
        cotangent, out = move(dy), {k: move(np.full_like(values[k], np.nan)) for k in "xw"}
        found = [module.backward(residuals, cotangent, stream=stream) for _ in range(2)]
        found.append(module.backward(residuals, cotangent, out=out, stream=stream))
        assert found[2]["w"] is out["w"] and found[2]["x"] is out["x"]
        kept.append((y, found, values, dy, (arrays, cotangent)))
    assert len(bound) == 3, "forward, backward, and backward into given arrays"
    for y, found, values, dy, _ in kept:
        assert isinstance(y, Tensor if move is to_torch else ndarray)
        wanted, residuals = cpu.forward(**values)
        agree(y, wanted)
        for name, gradient in cpu.backward(residuals, dy).items():
            for gradients in found:
                agree(gradients[name], gradient)
    module.synchronize()
    with pytest.raises(IndexOutOfRange, match="index 15 at position 4"):
        bad = {k: move(v) for k, v in given(bad=4).items()}
        module.forward(**bad)
        module.synchronize()


def wrong_calls(move: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> what replaces inputs of GRAPH, and what else the call is given; each is refused."""
    shared = to_cupy(np.zeros((64, 7), np.float32))
    part = (lambda rows: Tensor(shared[rows])) if move is to_torch else (lambda rows: shared[rows])
    floats = to_cupy(np.zeros(12 * 7 * 4 + 4, np.uint8))
    view = floats.host[1 : 12 * 7 * 4 + 1].view(np.float32).reshape(12, 7)
    odd = ndarray(view.shape, view.dtype, floats.memory, view)
    wide = to_cupy(np.zeros((30, 14), np.float32))[:, ::2]
    wrap = Tensor if move is to_torch else lambda array: array
    grad = to_torch(np.zeros(7, np.float32))
    grad.requires_grad = True
    return {
        "out overlaps an input": ({"x": wrap(shared[40:41].seen(shared.host[20]))}, {"out": {"y": part(slice(0, 30))}}),
        "out is not aligned": ({}, {"out": {"y": wrap(odd)}}),
        "out is not contiguous": ({}, {"out": {"y": wrap(wide)}}),
        "out has another shape": ({}, {"out": {"y": move(np.zeros((31, 7), np.float32))}}),
        "out has another dtype": ({}, {"out": {"y": move(np.zeros((30, 7), np.float64))}}),
        "out has another name": ({}, {"out": {"z": move(np.zeros((30, 7), np.float32))}}),
        "another shape": ({"x": move(np.zeros(8, np.float32))}, {}),
        "another dtype": ({"x": move(np.zeros(7, np.int32))}, {}),
        "another memory": ({"x": np.zeros(7, np.float32)}, {}),
        "a tensor that requires grad": ({"x": grad}, {}),
        "an input too many": ({"more": move(np.zeros(7, np.float32))}, {}),
        "no size": ({}, {"dims": {"N": True}}),
        "another size": ({}, {"dims": {"N": 29}}),
        "no stream": ({}, {"stream": "five"}),
    }


def test_a_call_that_is_repeated_stays_known_beside_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches drop what was used least recently, never all: neither its plan nor what was checked is made again."""
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x) + 1, x="f32[N]"), target="cuda")
    executable = module.forward
    bound, planned = [], []
    bind, plan = executable.bind_call, cuda.LaunchPlan
    monkeypatch.setattr(executable, "bind_call", lambda *args, **more: bound.append(1) or bind(*args, **more))
    monkeypatch.setattr(cuda, "LaunchPlan", lambda *args: planned.append(1) or plan(*args))
    often = to_cupy(np.ones(3, np.float32))
    for n in range(4, 304):
        module(x=often)
        module(x=to_cupy(np.ones(n, np.float32)))
    assert len(bound) == len(planned) == 301


@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_a_call_after_others_is_refused_as_the_first(move: Any, device: type[InMemory]) -> None:
    arrays = {k: move(v) for k, v in given().items()}

    def refused(module: gradc.Module, changed: Any, more: Any) -> GradcError:
        with pytest.raises(GradcError) as found:
            module(**{**arrays, **changed}, **more)
        return found.value

    first, warm = (gradc.compile(GRAPH, target="cuda") for _ in range(2))
    for _ in range(2):
        warm(**arrays)
        warm(**arrays, dims={"N": 30})
        warm(**arrays, out={"y": move(np.zeros((30, 7), np.float32))})
    launched = len(device.launched)
    for name, call in wrong_calls(move).items():
        one, other = refused(first, *call), refused(warm, *call)
        assert type(one) is type(other) and str(one) == str(other) and len(device.launched) == launched, name


@pytest.mark.parametrize("move", [to_cupy, to_torch])
def test_what_depends_on_addresses_is_checked_in_each_call(move: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs that share memory, an input that is not aligned (which is copied), no memory left."""
    graph = gradc.trace(lambda x: {"a": ops.exp(x), "b": ops.sin(x)}, x="f32[N]")
    module = gradc.compile(graph, target="cuda")
    x = np.linspace(0, 1, 64, dtype=np.float32)
    wrap = Tensor if move is to_torch else lambda array: array
    memory = to_cupy(np.zeros(128, np.float32))
    apart = {"a": wrap(memory[:64]), "b": wrap(memory[64:])}
    for _ in range(3):
        module(x=move(x), out=apart)
        module(x=move(x))
    with pytest.raises(OverlappingOperands):
        module(x=move(x), out={"a": wrap(memory[:64]), "b": wrap(memory[63:127])})
    with pytest.raises(OverlappingOperands):
        module(x=wrap(memory[32:96]), out={"a": wrap(memory[:32].seen(memory.host[:64])), "b": move(x)})
    raw = to_cupy(np.zeros(64 * 4 + 1, np.uint8))
    view = raw.host[1:].view(np.float32)
    view[...] = x
    found = module(x=wrap(ndarray(view.shape, view.dtype, raw.memory, view)), out=apart)
    assert module.forward.copied == {"x": 1}
    agree(found["a"], np.exp(x))
    monkeypatch.setattr(InMemory, "room", 100)
    with pytest.raises(OutOfMemory, match="256 bytes"):
        module(x=move(x))


def test_a_tensor_whose_storage_was_freed_is_refused_in_each_call(device: type[InMemory]) -> None:
    """As by resize_(0) of its storage: it has its shape, and no memory."""
    module = gradc.compile(GRAPH, target="cuda")
    arrays = {k: to_torch(v) for k, v in given().items()}
    for _ in range(2):
        module(**arrays)
    launched = len(device.launched)
    arrays["w"].data_ptr = lambda: 0  # type: ignore[method-assign]
    with pytest.raises(InvalidProblem, match="storage was freed"):
        module(**arrays)
    assert len(device.launched) == launched


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("sizes", [(5, 7, 9), (1, 1, 1), (4, 1, 3), (3, 5, 0), (0, 3, 2), (33, 65, 40)])
def test_products(dtype: str, sizes: tuple[int, int, int]) -> None:
    """Value and gradients; an empty sum is 0."""
    graph = gradc.trace(lambda a, b: a @ b, a=f"{dtype}[M,K]", b=f"{dtype}[K,N]")
    m, n, k = sizes
    module = gradc.compile(graph, wrt=["a", "b"], target="cuda")
    a, b, dy = (rng.standard_normal(shape).astype(graph.input("a").dtype.np) for shape in ((m, k), (k, n), (m, n)))
    y, residuals = module.forward(a=to_cupy(a), b=to_cupy(b))
    gradients = module.backward(residuals, to_cupy(dy))
    unit = {"f32": 1e-6, "f64": 1e-14, "f16": 1e-3, "bf16": 8e-3}[dtype]
    wide = [x.astype(np.longdouble) for x in (a, b, dy)]  # BLAS's product in f64 is no more exact than what it judges
    agree(y, wide[0] @ wide[1], unit)
    agree(gradients["a"], wide[2] @ wide[1].T, unit)
    agree(gradients["b"], wide[0].T @ wide[2], unit)
    module.synchronize()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("errors", ["sync", "async"])
def test_a_product_behind_a_check_is_written_in_place(fuse: bool, errors: str, device: type[InMemory]) -> None:
    """The library cannot see the flag: launches before and after it keep the output as it is when an index is bad, to
    its last bit, whatever the operands hold.
    """
    module = gradc.compile(
        gradc.trace(lambda t, w, b: ops.embedding(t, w) @ b, t="i64[N]", w="f32[V,D]", b="f32[D,E]"),
        target="cuda",
        fuse=fuse,
        errors=errors,
    )
    w, b = rng.standard_normal((6, 3)).astype(np.float32), rng.standard_normal((3, 500)).astype(np.float32)
    t, out = np.array([1, 5, 0, 2]), to_cupy(np.full((4, 500), 7, np.float32))
    arrays = {"w": to_cupy(w), "b": to_cupy(b)}
    module.forward(t=to_cupy(t), **arrays, out={"y": out})
    agree(out, w[t] @ b)
    assert [name for name, _ in device.launched][-2:] == ["gradc_gate"] * 2
    out.host[...] = before = np.array([[7, -0.0, 0, np.inf, np.nan] * 100] * 4, np.float32)
    arrays["b"].host[0] = np.nan
    arrays["b"].host[1] = -np.inf
    bad = to_cupy(np.array([1, 6, 0, 2]))
    space = to_cupy(np.full(module.forward.workspace_size(N=4, V=6, D=3, E=500) + 256, 255, np.uint8))
    with pytest.raises(IndexOutOfRange, match="index 6 at position 1"):
        module.forward(t=bad, **arrays, out={"y": out}, workspace=space[-space.data.ptr % 256 :])
        module.synchronize()
    assert host(out).tobytes() == before.tobytes()


def test_an_empty_product_behind_a_check(device: type[InMemory]) -> None:
    graph = gradc.trace(lambda t, w, b: ops.embedding(t, w) @ b, t="i64[N]", w="f32[V,D]", b="f32[D,E]")
    module = gradc.compile(graph, target="cuda")
    w, b, out = (
        to_cupy(np.zeros((6, 0), np.float32)),
        to_cupy(np.zeros((0, 5), np.float32)),
        to_cupy(np.ones((4, 5), "f4")),
    )
    module.forward(t=to_cupy(np.array([1, 6, 0, 2])), w=w, b=b, out={"y": out})
    with pytest.raises(IndexOutOfRange):
        module.synchronize()
    assert (host(out) == 1).all()
    module.forward(t=to_cupy(np.array([1, 5, 0, 2])), w=w, b=b, out={"y": out})
    assert (host(out) == 0).all()


def test_batched_products() -> None:
    """One axis of a batch is the library's, two that do not step alike are ours; a repeated operand steps by 0."""
    shapes = {"a": "f32[3,4,M,K]", "b": "f32[4,K,5]"}
    graph = gradc.trace(
        lambda a, b: ops.swapaxes(a, 0, 1) @ ops.reshape(b, (4, 1, 6, 5)) if hasattr(ops, "swapaxes") else a @ b,
        **{**shapes, "a": "f32[3,4,7,6]", "b": "f32[4,6,5]"},
    )
    module = gradc.compile(graph, wrt=["a", "b"], target="cuda")
    a, b = rng.standard_normal((3, 4, 7, 6)).astype(np.float32), rng.standard_normal((4, 6, 5)).astype(np.float32)
    y, residuals = module.forward(a=to_cupy(a), b=to_cupy(b))
    wanted, kept = gradc.compile(graph, wrt=["a", "b"], target="cpu").forward(a=a, b=b)
    agree(y, wanted)
    gradients = module.backward(residuals, to_cupy(np.ones_like(wanted)))
    for name, gradient in (
        gradc.compile(graph, wrt=["a", "b"], target="cpu").backward(kept, np.ones_like(wanted)).items()
    ):
        agree(gradients[name], gradient, 1e-5)


# -- files, the cache, kernels alone -----------------------------------------------------------------------------------


def test_from_the_cache_nothing_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADC_CACHE_DIR", str(tmp_path / "cache"))
    graph = gradc.trace(lambda t, w, x: ops.tanh(ops.embedding(t, w) * x), t="i64[N]", w="f32[V,D]", x="f32[D]")
    first = gradc.compile(graph, wrt=["w"], target="cuda")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this is in the cache")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "compile_graph", never)
        patched.setattr(cuda, "render_cuda", never)
        module = gradc.compile(gradc.parse(str(graph)), wrt=["w"], target="cuda")
        assert module.source() == first.source() and module.backward.native.kernels == first.backward.native.kernels
        values = given()
        y, residuals = module.forward(**{k: to_cupy(v) for k, v in values.items()})
        agree(y, np.tanh(values["w"][values["t"]] * values["x"]))
        module.backward(residuals, to_cupy(np.ones((30, 7), np.float32)))
        module.synchronize()
        with pytest.raises(AssertionError, match="this is in the cache"):
            gradc.compile(graph, wrt=["w"], target="cuda", arch="sm_80")


def test_a_saved_module_carries_its_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.cuda_nvrtc")
    module = gradc.compile(GRAPH, wrt=["w"], target="cuda", arch="sm_90")
    module.save(tmp_path / "m")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("this is in the folder")

    monkeypatch.setattr(cuda, "render_cuda", never)
    loaded = gradc.load_module(tmp_path / "m")
    assert loaded.forward.native.device.cubin[:4] == b"\x7fELF" and loaded.forward.arch == "sm_90"
    values = given()
    agree(loaded(**{k: to_cupy(v) for k, v in values.items()}), gradc.compile(GRAPH, target="cpu")(**values))
    monkeypatch.undo()
    monkeypatch.setattr(api, "fingerprint", lambda: "another gradc")  # its launches would not fit this binary
    assert gradc.load_module(tmp_path / "m").forward.backend._payload is None


def test_a_kernel_alone(device: type[InMemory]) -> None:
    module = gradc.compile(GRAPH, target="cuda")
    kernel = next(k for k in module.kernels.values() if k.executable.outputs)
    inputs = kernel.sample(N=5, V=6, D=4)
    found = kernel.run(dims={"N": 5, "V": 6, "D": 4}, **{k: to_cupy(v) for k, v in inputs.items()})
    assert all(isinstance(a, ndarray) for a in found.values())
    assert kernel.time(repeat=2, N=5, V=6, D=4) > 0


def test_a_decorated_function_runs_where_its_arrays_lie() -> None:
    @gradc.graph
    def squared(x: Any) -> Any:
        return ops.sum(x * x)

    x = np.arange(4, dtype=np.float32)
    with knobs.TARGET.set(""):
        agree(squared(to_cupy(x)), 14)
        assert squared(x) == 14
        value, gradients = gradc.value_and_grad(squared)(to_torch(x))
    assert isinstance(value, Tensor)
    agree(gradients["x"], 2 * x)


def test_sparse_gradients() -> None:
    module, cpu = (gradc.compile(GRAPH, wrt=["w"], sparse=["w"], target=target) for target in ("cuda", "cpu"))
    values, dy = given(), np.ones((30, 7), np.float32)
    _, residuals = module.forward(**{k: to_cupy(v) for k, v in values.items()})
    rows = module.backward(residuals, to_cupy(dy))["w"]
    wanted = cpu.backward(cpu.forward(**values)[1], dy)["w"]
    assert np.array_equal(host(rows.rows), wanted.rows)
    agree(rows.values, wanted.values)
    with pytest.raises(Unsupported, match="sparse gradients"):
        module.capture("backward", **{k: to_cupy(v) for k, v in values.items()}, cotangents=to_cupy(dy))


def test_channels_last_is_read_as_it_lies(device: type[InMemory]) -> None:
    graph = gradc.trace(lambda x, b: ops.relu(x + ops.reshape(b, (1, 8, 1, 1))), x="f32[B,8,H,W]", b="f32[8]")
    module = gradc.compile(graph, target="cuda")
    x, b = rng.standard_normal((2, 130, 130, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    y = module(x=to_cupy(x).transpose((0, 3, 1, 2)), b=to_cupy(b))
    agree(y, np.maximum(x.transpose(0, 3, 1, 2) + b.reshape(1, 8, 1, 1), 0))
    assert len(module.variants) == 1 and not module.forward.copied


@pytest.mark.parametrize("stream", [None, 9])
def test_a_gradient_in_the_graphs_order_of_channels_last_inputs(stream: int | None, device: type[InMemory]) -> None:
    """The variant's gradient is copied and added on the library's own stream, after the kernels' and before what
    follows.
    """
    module = gradc.compile(gradc.trace(lambda x: x * x, x="f32[B,8,H,W]"), wrt=["x"], target="cuda")
    x, dy = (rng.standard_normal((2, 130, 130, 8)).astype(np.float32) for _ in range(2))
    seen, out = x.transpose(0, 3, 1, 2), to_cupy(np.ones((2, 8, 130, 130), np.float32))
    _, residuals = module.forward(x=to_cupy(x).transpose((0, 3, 1, 2)), stream=stream)
    for accumulate in (False, True):
        gradients = module.backward(
            residuals, to_cupy(dy).transpose((0, 3, 1, 2)), out={"x": out}, accumulate=accumulate, stream=stream
        )
        assert gradients["x"] is out
    agree(out, 2 * 2 * seen * dy.transpose(0, 3, 1, 2))


def test_donated_memory() -> None:
    module = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f32[N]"), target="cuda", donate=["x"])
    x = to_cupy(np.zeros(5, np.float32))
    y = module(x=x)
    assert y is x
    agree(y, np.ones(5))


def test_launch_errors_are_of_the_call_with_sync() -> None:
    """errors="sync" opens the device so that it waits after each launch."""
    module = gradc.compile(GRAPH, target="cuda", errors="sync")
    assert module.forward.native.device.sync and not gradc.compile(GRAPH, target="cuda").forward.native.device.sync
    with pytest.raises(InvalidProblem, match="errors='async' is for the target 'cuda'"):
        gradc.compile(GRAPH, target="cpu", errors="async")


def test_constants_of_the_graph_are_uploaded_once(device: type[InMemory]) -> None:
    """A large array met while tracing is an input with a default, which backward reads too; small ones are the
    program's own.
    """
    table = rng.standard_normal((20, 5)).astype(np.float32)
    graph = gradc.trace(lambda x: ops.tanh(x * table) * np.arange(5, dtype=np.float32), x="f32[20,5]")
    module, cpu = (gradc.compile(graph, wrt=["x"], target=target) for target in ("cuda", "cpu"))
    x = rng.standard_normal((20, 5)).astype(np.float32)
    for _ in range(2):
        waits = device.waits
        y, residuals = module.forward(x=to_cupy(x))
        gradient = module.backward(residuals, to_cupy(np.ones_like(x)))["x"]
    assert device.waits == waits, "the second time nothing is uploaded"
    wanted, kept = cpu.forward(x=x)
    agree(y, wanted)
    agree(gradient, cpu.backward(kept, np.ones_like(x))["x"])
