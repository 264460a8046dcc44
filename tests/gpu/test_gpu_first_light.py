"""The first two minutes on a device: four families of kernels with every step waited for, then what a training loop
does on top of them.  ``make gpu`` runs this file before anything long.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from machines import Machine
from models import MODELS

import gradc
from gradc import ops

FAMILIES = ("layer norm", "embedding, sorted", "softmax, bf16", "grid sample")
UNITS = {"f32": 2.0**-24, "bf16": 2.0**-9}


@pytest.mark.kinds("torch")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_right_when_every_step_is_waited_for(name: str, machine: Machine) -> None:
    """``errors="sync"``: what goes wrong goes wrong in the call that did it.  Against the meaning in float64."""
    model = MODELS[name]
    sizes = model.large if machine.on_gpu else model.small
    arrays, dy = model.arrays(sizes), model.cotangent(sizes)
    module = machine.compile(model.graph, model.wrt, errors="sync", **model.options)
    _, residuals = module.forward({n: machine.put(a) for n, a in arrays.items()})
    gradients = module.backward(residuals, machine.put(dy))
    kept = gradc.compile(model.graph, model.wrt, target="numpy")
    rounded = kept.backward(kept.forward(arrays)[1], dy)
    for key, exact in model.exact(arrays, dy).items():
        own = rounded[key]
        got, numpy_ = (np.asarray(a).astype(np.float64) for a in (machine.get(gradients[key], own.dtype), own))
        allowed = 8 * UNITS[str(gradc.typeof(own).dtype)] * np.abs(exact).max()
        assert np.abs(got - exact).max() <= max(allowed, 2 * np.abs(numpy_ - exact).max()), key


@pytest.mark.places("memory", "cuda")
@pytest.mark.kinds("torch")
def test_a_step_of_adam_with_numbers_that_change(machine: Machine) -> None:
    """The rate and the two corrections are other numbers at each step; the weights follow NumPy's in float64."""

    def step(w, g, m, v, rate, c1, c2):  # type: ignore[no-untyped-def]
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - rate * (m * c1) / (ops.sqrt(v * c2) + 1e-8), m, v

    types = {**dict.fromkeys("wgmv", "f32[N]"), **dict.fromkeys(("rate", "c1", "c2"), "f32[]")}
    module = machine.compile(gradc.trace(step, **types))
    rng = np.random.default_rng(0)
    size = 100_000 if machine.on_gpu else 300
    exact = [rng.standard_normal(size), np.zeros(size), np.zeros(size)]
    state = [machine.put(a.astype(np.float32)) for a in exact]
    exact[0] = exact[0].astype(np.float32).astype(np.float64)
    for t in range(1, 5):
        g = rng.standard_normal(size).astype(np.float32)
        numbers = {"rate": 0.01 / t, "c1": 1 / (1 - 0.9**t), "c2": 1 / (1 - 0.99**t)}
        state = [*module(w=state[0], g=machine.put(g), m=state[1], v=state[2], **numbers).values()]
        m, v = 0.9 * exact[1] + 0.1 * g, 0.99 * exact[2] + 0.01 * g.astype(np.float64) ** 2
        exact = [
            exact[0] - numbers["rate"] * m * numbers["c1"] / (np.sqrt(v * numbers["c2"]) + 1e-8),
            m,
            v,
        ]
    module.synchronize()
    for got, want in zip(state, exact, strict=True):
        np.testing.assert_allclose(
            machine.get(got), want, rtol=0, atol=32 * UNITS["f32"] * max(1.0, np.abs(want).max())
        )


@pytest.mark.places("memory", "cuda")
@pytest.mark.kinds("torch")
def test_torchs_own_capture_of_a_checked_call(machine: Machine) -> None:
    """torch.cuda.graph captures in the global mode, in which nothing may ask an event how it stands; nobody waited for
    the calls before.  What the calls allocate is the graph's memory: their second replay has results of what the arrays
    hold by then.
    """
    import torch

    model = MODELS["embedding, sorted"]
    sizes = model.large if machine.on_gpu else model.small
    arrays, dy = model.arrays(sizes), machine.put(model.cotangent(sizes))
    given = {n: machine.put(a) for n, a in arrays.items()}
    module = machine.compile(model.graph, model.wrt, **model.options)
    for _ in range(3):
        wanted = module.backward(module.forward(given)[1], dy)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = module.backward(module.forward(given)[1], dy)
    captured.replay()
    torch.cuda.synchronize()
    assert machine.bits(found) == machine.bits(wanted)
    other = model.cotangent(sizes)[::-1].copy()
    machine.write(dy, other)
    more = [module.backward(module.forward(given)[1], dy) for _ in range(2)]  # of the pool outside of the graph
    captured.replay()
    torch.cuda.synchronize()
    assert machine.bits(found) == machine.bits(more[0]) != machine.bits(wanted)


@pytest.mark.places("memory", "cuda")
@pytest.mark.kinds("torch")
def test_a_first_call_beside_torchs_capture(machine: Machine) -> None:
    """A thread loads code, and has memory of its own allocated, while another one captures in the global mode: the call
    is right, and so is the graph.  A third thread's first call of a module is captured.
    """
    import torch

    model = MODELS["embedding, sorted"]
    sizes = model.large if machine.on_gpu else model.small
    arrays, dy = model.arrays(sizes), machine.put(model.cotangent(sizes))
    given = {n: machine.put(a) for n, a in arrays.items()}
    module, fresh = (machine.compile(model.graph, model.wrt, **model.options) for _ in range(2))
    for _ in range(3):
        wanted = module.backward(module.forward(given)[1], dy)
    found: dict[str, Any] = {}
    aside, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    def call(name: str, each: Any, stream: Any) -> None:
        with torch.cuda.stream(stream):
            found[name] = each.backward(each.forward(given)[1], dy)

    with torch.cuda.graph(captured):
        stream = torch.cuda.current_stream()
        for name, each, its in (("beside", fresh, aside), ("captured", module, stream)):
            thread = threading.Thread(target=call, args=(name, each, its))
            thread.start()
            thread.join()
    captured.replay()
    torch.cuda.synchronize()
    assert machine.bits(found["beside"]) == machine.bits(found["captured"]) == machine.bits(wanted)


@pytest.mark.places("cuda")
@pytest.mark.kinds("torch")
def test_a_call_beside_a_full_pool_of_torchs(machine: Machine) -> None:
    """What torch keeps for itself is memory that a call may have."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    block = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda")
    del block  # torch keeps it
    model = MODELS["layer norm"]
    arrays = {n: machine.put(a) for n, a in model.arrays(model.large).items()}
    module = machine.compile(model.graph, model.wrt, **model.options)
    y, residuals = module.forward(arrays)
    module.backward(residuals, machine.put(model.cotangent(model.large)))
    module.synchronize()
    assert torch.isfinite(y).all()
    torch.cuda.empty_cache()
