"""The same bits in every run: random cotangents, other streams, other work beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import Machine
from models import MODELS

RUNS = {"cuda": 100, "memory": 3, "cuda-sim": 3}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_in_every_run(name: str, machine: Machine) -> None:
    model = MODELS[name]
    sizes = model.large if machine.on_gpu else model.small
    module = machine.compile(model.graph, model.wrt, **model.options)
    _, residuals = module.forward({n: machine.put(a) for n, a in model.arrays(sizes).items()})
    dy = machine.put(model.cotangent(sizes))
    module.synchronize()
    seen = set()
    streams = machine.streams()
    with machine.other_work() as more:
        for run in range(RUNS[machine.place]):
            machine.shuffled(module, run)
            more()
            gradients = module.backward(residuals, dy, stream=streams[run % len(streams)])
            module.synchronize()
            seen.add(machine.bits(gradients))
    assert len(seen) == 1


@pytest.mark.places("cuda-sim", "cuda")
@pytest.mark.kinds("torch")
def test_atomics_are_not_promised(machine: Machine) -> None:
    """What the promise is worth: plain atomics do differ where the order does."""
    model = replace(MODELS["embedding, sorted"], options={"reductions": {"*": "atomic"}, "determinism": "none"})
    sizes = model.large if machine.on_gpu else {"N": 3000, "V": 5, "D": 8}
    module = machine.compile(model.graph, model.wrt, **model.options)
    _, residuals = module.forward({n: machine.put(a) for n, a in model.arrays(sizes).items()})
    dy = machine.put(model.cotangent(sizes))
    seen = set()
    for run in range(RUNS[machine.place]):
        machine.shuffled(module, run)
        seen.add(machine.bits(module.backward(residuals, dy)))
    assert len(seen) > 1
