"""Loops on tensor cores: which graphs become one, and what they compute, against torch in f64."""

from __future__ import annotations

import re

import long_tests
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_forms import ATTENTION_FORMS, drawn, exact, heads, reference  # noqa: E402

import gradc  # noqa: E402
from gradc import ops  # noqa: E402
from gradc.analysis.tile_time import tile_seconds  # noqa: E402
from gradc.analysis.tiles import RESERVED, form_of  # noqa: E402
from gradc.compiler import run_passes  # noqa: E402
from gradc.inspect.report import content  # noqa: E402
from gradc.interp import run_program  # noqa: E402
from gradc.ir.dims import evaluate  # noqa: E402
from gradc.ir.kernel import Call  # noqa: E402
from gradc.ir.program_text import parse_program  # noqa: E402
from gradc.ir.verify import verify_program  # noqa: E402
from gradc.module.options import Options  # noqa: E402
from gradc.targets.devices import ARCHITECTURES, gpu_of  # noqa: E402

LONG = 1 << 16
"""Rows and columns at which nothing but S x T has so many elements."""
SIZES = ((1, 2, 130, 70), (2, 1, 67, 130), (1, 1, 1, 65), (1, 1, 64, 1), (2, 2, 5, 0), (1, 1, 0, 3))
"""B, H, S, T: several blocks and parts of one, single and none."""


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


@pytest.mark.parametrize("name", ["softmax of wide scores", "softmax without a maximum", "bidirectional"])
def test_a_product_over_no_columns_is_zero(name):
    """Also where it is multiplied by 1 / sum once it is summed: that of none is infinite."""
    graph, found = programs(name, "f16")
    assert_one_tile(found["forward"])
    dims = {"B": 1, "H": 2, "S": 3, "T": 0}
    arrays = drawn(graph, dims, 1)
    (got,) = run_program(found["forward"], arrays, {d: dims[d] for d in found["forward"].dims}).values()
    np.testing.assert_array_equal(got, ATTENTION_FORMS[name].torchs(**exact(arrays)).detach().numpy())


def _pairs(x, axis):
    """Each element less each one along an axis."""
    shape = (*x.shape[: axis + 1], *x.shape[axis:])
    one, other = ((*x.shape[:at], 1, *x.shape[at:]) for at in (axis + 1, axis))
    return ops.broadcast_to(ops.reshape(x, one), shape) - ops.broadcast_to(ops.reshape(x, other), shape)


PAIRS = {
    "rows": lambda q, k, v: _pairs(ops.logsumexp(ops.mixed_matmul(q, k.T) * 0.125, -1), 2),
    "features": lambda q, k, v: _pairs(heads(q, k, v), 3),
    "heads": lambda q, k, v: _pairs(heads(q, k, v), 1),
}


@pytest.mark.parametrize("axis", PAIRS)
def test_what_meets_another_row_is_no_epilogue(axis):
    """An element is computed from two of the loop's rows, heads or features."""

    def function(q, k, v):
        return heads(q, k, v), PAIRS[axis](q, k, v)

    types = {"q": "bf16[B,H,S,64]", "k": "bf16[B,H,T,64]", "v": "bf16[B,H,T,64]"}
    graph = gradc.trace(function, **types)
    program = run_passes(graph, (), Options(), "cuda")[2]["forward"]
    assert any(loop.tile for loop in program.loops)
    dims = {"B": 2, "H": 3, "S": 67, "T": 35}
    arrays = drawn(graph, dims, 2)
    given = exact(arrays)
    y = reference(**given)
    x = torch.logsumexp(given["q"] @ given["k"].mT * 0.125, -1) if axis == "rows" else y
    at = {"rows": 2, "features": 3, "heads": 1}[axis]
    wanted = (y, x.unsqueeze(at + 1) - x.unsqueeze(at))
    got = run_program(program, arrays, {d: dims[d] for d in program.dims}, precision="f64")
    for value, own in zip(wanted, got.values(), strict=True):
        np.testing.assert_allclose(own, value.detach().numpy(), rtol=1e-9, atol=1e-10)


SIMULATED = (
    "causal, 64 features",
    "sliding window",
    "mask of each",
    "bias of heads",
    "dropout",
    "grouped queries",
    "packed projections",
    "what follows a row",
)


@long_tests.values
@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulator_has_the_values_and_gradients_of_torch(name, monkeypatch):
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    monkeypatch.setenv("GRADC_CACHE", "0")
    graph = ATTENTION_FORMS[name].graph("bf16")
    wrt = floats(graph)
    module = gradc.compile(graph, wrt, target="cuda-sim")
    assert [loop for loop in module.forward.program.loops if loop.tile]
    arrays = drawn(graph, {"B": 1, "H": 2, "S": 130, "T": 67}, 3)
    given = exact(arrays)
    wanted = ATTENTION_FORMS[name].torchs(**given)
    y, residuals = module.forward(**arrays)
    dy = np.random.default_rng(5).standard_normal(y.shape).astype(y.dtype)
    slopes = torch.autograd.grad(wanted, [given[n] for n in wrt], torch.tensor(dy.astype(np.float64)))
    found = {"y": y, **module.backward(residuals, dy)}
    for output, value in (("y", wanted.detach()), *zip(wrt, slopes, strict=True)):
        error = np.abs(np.asarray(found[output]).astype(np.float64) - value.numpy())
        # exponentials, slopes of the scores and the result are rounded to bf16, each once
        assert error.max() <= 4 * 2.0**-8 * float(value.abs().max()), output


def test_strict_numerics_and_unfused_programs_have_none():
    for options in ({"numerics": "strict"}, {"fuse": False}):
        _, found = programs("bidirectional", wrt=("q", "k", "v"), **options)
        assert not any(program.loops for program in found.values())


REFUSED = {
    "f32": ("f32[B,H,S,64]", "its products multiply f32: tensor cores are given f16 alone, or bf16 alone"),
    "features": ("bf16[B,H,S,512]", "q has 512 features"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_explain_and_the_report_say_why_there_is_no_loop(why):
    type_, sentence = REFUSED[why]
    graph = gradc.trace(lambda q, k, v: heads(q, k, v), **dict.fromkeys("qkv", type_))
    module = gradc.compile(graph, target="cuda")
    assert not any(loop.tile for loop in module.forward.program.loops)
    assert sentence in module.explain()
    assert any(sentence in line for line in content(module, {}).programs[0].missed)


def test_few_rows_and_many_columns_stay_products():
    """Two blocks of rows would leave all but two multiprocessors without work."""

    def untiled(heads_, rows, columns):
        q, k = f"bf16[1,{heads_},{rows},128]", f"bf16[1,{heads_},{columns},128]"
        graph = gradc.trace(lambda q, k, v: heads(q, k, v), q=q, k=k, v=k)
        return [each.why for each in run_passes(graph, (), Options(), "cuda")[2]["forward"].untiled]

    (why,) = untiled(2, 16, 65536)
    one, several = map(int, re.findall(r"(\d+) (?:us|as products)", why))
    assert one > several
    assert untiled(16, 2048, 2048) == untiled(128, 512, 512) == []


@pytest.mark.parametrize(("arch", "columns"), [("sm_80", 48), ("sm_90", 64)])
def test_blocks_are_those_of_which_most_fit_a_multiprocessor(arch, columns):
    """Three blocks of 128 x 64, with what is reserved beside them, fit sm_90's shared memory and not sm_80's."""
    types = dict.fromkeys("qkv", "bf16[4,16,2048,64]")
    graph = gradc.trace(lambda q, k, v: heads(q, k, v, is_causal=True), **types)
    program = run_passes(graph, (), Options(arch=arch), "cuda")[2]["forward"]
    (loop,) = program.loops
    assert (loop.by, loop.sweeps[0].by) == (128, columns)
    of_block = form_of(loop, program.types).shared_bytes(128, columns, loop.tile) + RESERVED
    assert 3 * of_block <= ARCHITECTURES[arch].shared


def test_a_tile_takes_no_less_than_its_bytes():
    """A bias of each score is read from memory, however fast the products are."""
    types = {**dict.fromkeys("qkv", "bf16[4,16,2048,64]"), "bias": "f32[4,16,2048,2048]"}
    graph = gradc.trace(lambda q, k, v, bias: heads(q, k, v, attn_mask=bias), **types)
    program = run_passes(graph, (), Options(arch="sm_90"), "cuda")[2]["forward"]
    (loop,) = program.loops
    gpu = gpu_of("sm_90")
    assert tile_seconds(form_of(loop, program.types), program, {}, gpu) >= 4 * 4 * 16 * 2048**2 / gpu.bandwidth
