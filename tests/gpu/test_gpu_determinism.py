"""The same bits in every run: random cotangents, other streams, other work beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from machines import Machine
from models import MODELS

RUNS = {"cuda": 100, "cuda-sim": 4}


@contextlib.contextmanager
def other_work(machine: Machine) -> Iterator[Any]:
    """Something that keeps a GPU busy on a stream of its own; called, it asks for more."""
    if not machine.on_gpu:
        yield lambda: None
        return
    import torch

    stream, a = torch.cuda.Stream(), torch.randn(1500, 1500, device="cuda")

    def more() -> None:
        with torch.cuda.stream(stream):
            a @ a

    yield more
    torch.cuda.synchronize()


def streams(machine: Machine) -> list[Any]:
    """The current one, and two others."""
    if not machine.on_gpu:
        return [None]
    if machine.kind == "torch":
        import torch

        return [None, torch.cuda.Stream(), torch.cuda.Stream()]
    import cupy

    return [None, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_in_every_run(name: str, machine: Machine) -> None:
    model = MODELS[name]
    if not all(machine.takes(node.dtype.name) for node in model.graph.inputs):
        pytest.skip(f"{machine.kind} has no arrays of this dtype")
    sizes = model.large if machine.on_gpu else model.small
    module = machine.compile(model.graph, model.wrt, **model.options)
    _, residuals = module.forward({n: machine.put(a) for n, a in model.arrays(sizes).items()})
    dy = machine.put(model.cotangent(sizes))
    module.synchronize()
    seen = set()
    with other_work(machine) as more:
        for run in range(RUNS[machine.target]):
            machine.shuffled(module, run)
            more()
            stream = streams(machine)[run % len(streams(machine))] if run < 3 else None
            gradients = module.backward(residuals, dy, **({} if stream is None else {"stream": stream}))
            module.synchronize()
            seen.add(machine.bits(gradients))
    assert len(seen) == 1


@pytest.mark.machines("cuda-sim", "cuda")
@pytest.mark.kinds("torch")
def test_atomics_are_not_promised(machine: Machine) -> None:
    """What the promise is worth: plain atomics do differ where the order does."""
    from dataclasses import replace

    model = replace(MODELS["embedding, sorted"], options={"reductions": {"*": "atomic"}, "determinism": "none"})
    sizes = model.large if machine.on_gpu else {"N": 3000, "V": 5, "D": 8}
    module = machine.compile(model.graph, model.wrt, **model.options)
    _, residuals = module.forward({n: machine.put(a) for n, a in model.arrays(sizes).items()})
    dy = machine.put(model.cotangent(sizes))
    seen = set()
    for run in range(RUNS[machine.target]):
        machine.shuffled(module, run)
        seen.add(machine.bits(module.backward(residuals, dy)))
    assert len(seen) > 1
