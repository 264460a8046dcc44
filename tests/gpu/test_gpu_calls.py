"""Calls as callers make them: memory of their own, streams, captures, arrays that lie oddly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import Machine
from models import MODELS

import gradc
from gradc import ops

GRAPH = gradc.trace(lambda t, w, x: ops.softmax(ops.embedding(t, w) * x), t="i64[N]", w="f32[V,D]", x="f32[D]")
SIZES = {"N": 60, "V": 12, "D": 20}


def drawn(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "t": rng.integers(0, SIZES["V"], SIZES["N"]),
        "w": rng.standard_normal((SIZES["V"], SIZES["D"])).astype("f4"),
        "x": rng.standard_normal(SIZES["D"]).astype("f4"),
    }


DY = np.random.default_rng(9).standard_normal((SIZES["N"], SIZES["D"])).astype("f4")


def cpu(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Value and gradients of the CPU target."""
    module = gradc.compile(GRAPH, wrt=["w", "x"], target="cpu")
    y, residuals = module.forward(**arrays)
    return y, dict(module.backward(residuals, DY))


def near(machine: Machine, got: Any, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(machine.get(got), wanted, rtol=2e-5, atol=2e-6)


class Called:
    """A module on a machine, its forward called once."""

    def __init__(self, machine: Machine, seed: int = 0, **options: Any):
        self.machine, self.arrays = machine, drawn(seed)
        self.module = machine.compile(GRAPH, ["w", "x"], **options)
        self.inputs = {n: machine.put(a) for n, a in self.arrays.items()}
        self.y, self.residuals = self.module.forward(**self.inputs)
        self.dy = machine.put(DY)
        self.value, self.gradients = cpu(self.arrays)

    def right(self, y: Any = None, gradients: Any = None) -> None:
        self.module.synchronize()
        if y is not None:
            near(self.machine, y, self.value)
        for name in gradients or ():
            near(self.machine, gradients[name], self.gradients[name])


def test_results_are_of_the_callers_kind(machine: Machine) -> None:
    called = Called(machine)
    gradients = called.module.backward(called.residuals, called.dy)
    assert (
        machine.is_own(called.y)
        and list(gradients) == ["w", "x"]
        and all(machine.is_own(g) for g in gradients.values())
    )
    called.right(called.y, gradients)


def test_out_is_written_and_returned(machine: Machine) -> None:
    called = Called(machine)
    out = {n: machine.put(np.full_like(a, 7)) for n, a in called.gradients.items()}
    gradients = called.module.backward(called.residuals, called.dy, out=out)
    assert all(gradients[n] is out[n] for n in out)
    called.right(gradients=out)


def test_accumulate_adds(machine: Machine) -> None:
    """Into one gradient, the other is written."""
    called = Called(machine)
    out = {n: machine.put(np.full_like(a, 2)) for n, a in called.gradients.items()}
    called.module.backward(called.residuals, called.dy, out=out, accumulate=["w"])
    called.module.synchronize()
    near(machine, out["w"], called.gradients["w"] + 2)
    near(machine, out["x"], called.gradients["x"])


def test_a_workspace_of_ones_own(machine: Machine) -> None:
    called = Called(machine)
    needed = called.module.workspace_size(**SIZES)
    workspace = machine.put(np.full(needed, 0xAB, np.uint8))
    first = called.module.backward(called.residuals, called.dy, workspace=workspace)
    called.right(gradients=first)
    assert machine.bits(first) == machine.bits(called.module.backward(called.residuals, called.dy))


def test_every_kind_of_stream(machine: Machine) -> None:
    called = Called(machine)
    called.module.synchronize()
    wanted = machine.bits(called.module.backward(called.residuals, called.dy))
    for stream in machine.streams():
        pointers = (
            [stream]
            if stream is None or isinstance(stream, int)
            else [stream, int(getattr(stream, "cuda_stream", 0) or stream.ptr)]
        )
        for given in pointers:
            gradients = called.module.backward(called.residuals, called.dy, stream=given)
            called.module.synchronize()
            assert machine.bits(gradients) == wanted, given


def test_many_calls_without_waiting(machine: Machine) -> None:
    """Sizes change from call to call; nothing is looked at in between."""
    module = machine.compile(GRAPH, ["w", "x"])
    found = []
    for n in (60, 3, 0, 200, 60):
        arrays = {**drawn(n), "t": np.random.default_rng(n).integers(0, SIZES["V"], n)}
        found.append((arrays, module(**{k: machine.put(a) for k, a in arrays.items()})))
    module.synchronize()
    reference = gradc.compile(GRAPH, target="cpu")
    for arrays, y in found:
        near(machine, y, reference(**arrays))


def test_arrays_that_lie_oddly(machine: Machine) -> None:
    """An input that begins 4 bytes behind a multiple of 16 is read as it lies, or copied."""
    called = Called(machine)
    shifted = machine.cut(machine.put(np.concatenate([np.zeros(1, np.float32), called.arrays["x"]])))
    called.right(called.module(**{**called.inputs, "x": shifted}))


def test_channels_last(machine: Machine) -> None:
    """An image whose channels lie innermost, large enough to be read in place, and its gradient."""
    graph = gradc.trace(lambda x: ops.silu(x) * 2.0, x="f32[B,C,H,W]")
    x = np.random.default_rng(0).standard_normal((2, 80, 60, 32)).astype("f4")  # B, H, W, C
    module, reference = machine.compile(graph, ["x"]), gradc.compile(graph, ["x"], target="cpu")
    moved = machine.put(x)
    seen = moved.permute(0, 3, 1, 2) if machine.kind == "torch" else moved.transpose((0, 3, 1, 2))
    y, residuals = module.forward(x=seen)
    wanted, kept = reference.forward(x=x.transpose(0, 3, 1, 2))
    module.synchronize()
    near(machine, y, wanted)
    dy = np.random.default_rng(1).standard_normal(wanted.shape).astype("f4")
    near(machine, module.backward(residuals, machine.put(dy))["x"], reference.backward(kept, dy)["x"])


# -- captures: a CUDA graph, so not the target cuda-sim ----------------------------------------------------------------


@pytest.mark.places("memory", "cuda")
@pytest.mark.parametrize("what", ["forward", "backward", "both"])
def test_a_replay_reads_what_stands_there_by_then(what: str, machine: Machine) -> None:
    called = Called(machine)
    more = {} if what == "forward" else {"cotangents": called.dy}
    handle = called.module.capture(what, **called.inputs, **more)
    if what != "backward":  # there the residuals are those of the first arrays
        called.arrays = drawn(5)
        for name, array in called.inputs.items():
            machine.write(array, called.arrays[name])
        called.value, called.gradients = cpu(called.arrays)
    wanted = {"forward": {}, "backward": called.gradients, "both": {f"d.{n}": g for n, g in called.gradients.items()}}[
        what
    ]
    seen = set()
    for _ in range(20 if machine.on_gpu else 2):
        handle.replay()
        handle.check()
        seen.add(machine.bits({n: handle.outputs[n] for n in (*wanted, *(["y"] if what != "backward" else []))}))
    assert len(seen) == 1
    if what != "backward":
        near(machine, handle.outputs["y"], called.value)
    for name, gradient in wanted.items():
        near(machine, handle.outputs[name], gradient)


@pytest.mark.places("memory", "cuda")
def test_a_replay_on_another_stream_beside_calls(machine: Machine) -> None:
    called = Called(machine)
    handle = called.module.capture("backward", **called.inputs, cotangents=called.dy)
    for stream in machine.streams()[1:]:
        handle.replay(stream=stream)
        gradients = called.module.backward(called.residuals, called.dy)
        handle.check()
        called.right(gradients=gradients)
        for name, gradient in called.gradients.items():
            near(machine, handle.outputs[name], gradient)


@pytest.mark.places("memory", "cuda")
@pytest.mark.parametrize("name", ["embedding, sorted", "layer norm", "grid sample", "linear"])
def test_a_captured_gradient_has_the_bits_of_a_call(name: str, machine: Machine) -> None:
    """With a sort, partial results, fixed point sums, a library's product."""
    model = MODELS[name]
    sizes = model.large if machine.on_gpu else model.small
    module = machine.compile(model.graph, model.wrt, **model.options)
    inputs = {n: machine.put(a) for n, a in model.arrays(sizes).items()}
    dy = machine.put(model.cotangent(sizes))
    _, residuals = module.forward(inputs)
    called = dict(module.backward(residuals, dy))
    handle = module.capture("backward", inputs, cotangents=dy)
    handle.replay()
    handle.check()
    assert machine.bits({n: handle.outputs[n] for n in model.wrt}) == machine.bits(called)
