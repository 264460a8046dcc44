"""Loops on tensor cores: which graphs become one, and what they compute, against torch in f64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_forms import ATTENTION_FORMS, drawn, exact  # noqa: E402

from gradc import compiler  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.interp import run_program  # noqa: E402
from gradc.ir.dims import evaluate  # noqa: E402
from gradc.ir.kernel import Call  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402

LONG = 1 << 16
"""Rows and columns at which nothing but S x T has so many elements."""
SIZES = ((1, 2, 130, 70), (2, 1, 67, 130), (1, 1, 1, 65), (1, 1, 64, 1), (2, 2, 5, 0), (1, 1, 0, 3))
"""B, H, S, T: several blocks and parts of one, single and none."""


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    monkeypatch.setattr(compiler, "TILES", True)


def programs(name, dtype="bf16", wrt=(), **options):
    graph = ATTENTION_FORMS[name].graph(dtype)
    return graph, run_passes(graph, wrt, Options(**options), "cuda")[2]


def floats(graph):
    return tuple(n for node, n in zip(graph.inputs, graph.input_names, strict=True) if node.dtype.is_float)


def assert_one_tile(program):
    """One loop on tensor cores computes all that the size of the scores; nothing of that size is in memory."""
    (loop,) = [loop for loop in program.loops if loop.tile]
    assert not any(isinstance(step, Call) for step in program.steps)
    dims = dict.fromkeys(program.dims, 1) | {d: LONG for d in "ST" if d in program.dims}
    large = [b.name for b in program.buffers if b.kind != "input" and evaluate(b.type.count, dims) >= LONG * LONG]
    assert not large
    bound = {**dims, **dict.fromkeys(loop.symbols, 64)}
    assert all(evaluate(b.type.count, bound) <= 64 * 256 for b in loop.buffers)
    return loop


@pytest.mark.parametrize("name", ATTENTION_FORMS)
def test_a_form_is_one_loop_on_tensor_cores(name):
    for dtype in ("bf16", "f16"):
        graph, found = programs(name, dtype)
        loop = assert_one_tile(found["forward"])
        verify_program(found["forward"])
        assert parse_program(str(found["forward"])) == found["forward"]
        assert len(loop.sweeps) == (ATTENTION_FORMS[name].sweeps if dtype == "f16" else 1)
        assert found["forward"].types[found["forward"].outputs[0][1]].dtype.name == dtype
        with_residuals = programs(name, dtype, floats(graph))[1]["forward"]
        assert_one_tile(with_residuals)


@pytest.mark.parametrize("name", ATTENTION_FORMS)
def test_values_are_torchs(name):
    graph, found = programs(name)
    sizes = (own for own in SIZES if own[-1] >= ATTENTION_FORMS[name].least)
    for number, (b, h, s, t) in enumerate(sizes):
        dims = {"B": b, "H": h, "S": s, "T": t}
        arrays = drawn(graph, dims, number)
        wanted = ATTENTION_FORMS[name].torchs(**exact(arrays))
        known = {d: dims[d] for d in found["forward"].dims}
        got = run_program(found["forward"], arrays, known, precision="f64")
        for value, own in zip(wanted if isinstance(wanted, tuple) else (wanted,), got.values(), strict=True):
            np.testing.assert_allclose(own, value.detach().numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ATTENTION_FORMS)
def test_gradients_are_torchs(name):
    graph, _ = programs(name)
    wrt = floats(graph)
    _, found = programs(name, wrt=wrt)
    dims = {"B": 2, "H": 2, "S": 67, "T": 35}
    arrays = drawn(graph, dims, 7)
    given = exact(arrays)
    outputs = ATTENTION_FORMS[name].torchs(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    rng = np.random.default_rng(1)
    slopes = [rng.standard_normal(y.shape) for y in outputs]
    wanted = torch.autograd.grad(outputs, [given[n] for n in wrt], [torch.tensor(g) for g in slopes])
    known = lambda program: {d: dims[d] for d in program.dims}
    forward, backward = found["forward"], found["backward"]
    kept = run_program(forward, arrays, known(forward), precision="f64")
    cotangents = dict(zip((f"d.{n}" for n in graph.output_names), slopes, strict=True))
    given = {**arrays, **kept, **cotangents}
    own = {b.name: given[b.name] for b in backward.of_kind("input") if not b.alias}
    got = run_program(backward, own, known(backward), precision="f64")
    for input_name, value in zip(wrt, wanted, strict=True):
        np.testing.assert_allclose(got[f"d.{input_name}"], value.numpy(), rtol=1e-8, atol=1e-8)
