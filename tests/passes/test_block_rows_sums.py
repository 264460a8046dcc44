"""Loops over row blocks whose steps add up over rows, heads or batches: against torch in f64."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.runtime.host import pool

torch = pytest.importorskip("torch")
F = torch.nn.functional

HEADS = dict.fromkeys("qkv", "f32[B,H,S,8]")
GROUPED = {"q": "f32[B,6,S,8]", "k": "f32[B,2,S,8]", "v": "f32[B,2,S,8]"}
WIDE = {"x": "f32[N,8]", "w": "f32[8,V]", "t": "f32[N,V]"}
SHARED = {**HEADS, "bias": "f32[S,S]"}


def _biased(q, k, v, bias):
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _torch_biased(q, k, v, bias):
    return (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v  # torch's own gives a bias no gradient on every path


def _causal_biased(q, k, v, bias):
    shape = bias.shape[-2:]
    keep = ops.iota(shape, axis=1) <= ops.iota(shape)
    return _biased(q, k, v, ops.where(ops.broadcast_to(keep, bias.shape), bias, -np.inf))


def _torch_causal_biased(q, k, v, bias):
    keep = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
    return _torch_biased(q, k, v, torch.where(keep, bias, -torch.inf))


def _grouped(causal):
    return (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        GROUPED,
    )


def _temperature(x, w, t, s):
    return ops.binary_cross_entropy_with_logits((x @ w) * ops.exp(s), ops.sigmoid(t))


CASES = {
    "bias of all heads": (_biased, _torch_biased, SHARED),
    "bias of all heads, causal": (_causal_biased, _torch_causal_biased, SHARED),
    "bias of each head": (_biased, _torch_biased, {**HEADS, "bias": "f32[H,S,S]"}),
    "bias of each head, causal": (_causal_biased, _torch_causal_biased, {**HEADS, "bias": "f32[H,S,S]"}),
    "bias of each sample": (_biased, _torch_biased, {**HEADS, "bias": "f32[B,1,S,S]"}),
    "heads that share keys": _grouped(False),
    "heads that share keys, causal": _grouped(True),
    "mse": (lambda x, w, t: ops.mse_loss(x @ w, t), lambda x, w, t: F.mse_loss(x @ w, t), WIDE),
    "l1": (lambda x, w, t: ops.abs(x @ w - t).mean(), lambda x, w, t: (x @ w - t).abs().mean(), WIDE),
    "temperature": (
        _temperature,
        lambda x, w, t, s: F.binary_cross_entropy_with_logits((x @ w) * s.exp(), t.sigmoid()),
        {**WIDE, "s": "f32[]"},
    ),
}


@pytest.fixture(scope="module")
def module():
    made = {}

    def of(name):
        if name not in made:
            function, _, types = CASES[name]
            made[name] = gradc.compile(gradc.trace(function, **types), wrt=[*types], target="cpu")
        return made[name]

    return of


def _arrays(name, dims):
    rng = np.random.default_rng(0)
    sizes = {x: text[4:-1].split(",") for x, text in CASES[name][2].items()}
    shapes = {x: [dims[s] if s in dims else int(s) for s in size if s] for x, size in sizes.items()}
    return {x: np.asarray(rng.standard_normal(shape) * 0.7, np.float32) for x, shape in shapes.items()}


def _close(got, wanted, what):
    scale = max(float(np.abs(wanted).max(initial=0)), 1e-3)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-6 * scale, err_msg=what)


def _sizes(name):
    if "N,V" in CASES[name][2].get("t", ""):
        return [{"N": n, "V": v} for n, v in ((1, 1), (65, 200), (1300, 70))]
    return [{"B": b, "H": 3, "S": s} for b, s in ((1, 1), (2, 63), (3, 250))] + [{"B": 0, "H": 3, "S": 5}]


@pytest.mark.parametrize("name", CASES)
def test_nothing_wide_is_in_memory(module, name):
    """Of the size of scores or logits; an input, and its gradient, may be."""
    made = module(name)
    dims = {"B": 8, "H": 8, "S": 1000, "N": 4000, "V": 3000}
    rows = 8 * 6 * 1000 * 1000 if "share" in name else 8 * 8 * 1000 * 1000 if "bias" in name else 4000 * 3000
    for executable in made.executables.values():
        program = executable.program
        assert program.loops
        sizes = {x: d for x, d in dims.items() if x in program.dims}
        for buffer in program.buffers:
            if buffer.kind == "temp" or buffer.name.startswith("r."):
                count = np.prod([gradc.ir.dims.evaluate(n, sizes) for n in buffer.type.shape])
                assert count <= rows // 8, buffer


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(module, name):
    made = module(name)
    for dims in _sizes(name):
        arrays = _arrays(name, dims)
        given = {x: torch.from_numpy(a.astype(np.float64)).requires_grad_() for x, a in arrays.items()}
        wanted = CASES[name][1](**given)
        cotangent = np.asarray(np.random.default_rng(1).standard_normal(tuple(wanted.shape)), np.float32)
        gradients = torch.autograd.grad(wanted, [*given.values()], torch.from_numpy(cotangent.astype(np.float64)))
        y, residuals = made.forward(**arrays)
        _close(y, wanted.detach().numpy(), f"y {dims}")
        for (x, g), want in zip(made.backward(residuals, cotangent).items(), gradients, strict=True):
            _close(g, want.numpy(), f"d.{x} {dims}")


@pytest.mark.parametrize("name", CASES)
def test_the_bits_do_not_depend_on_the_threads(module, name):
    """Neither where each task has blocks of its own nor where all threads are at one."""
    before, made = pool.num_threads(), module(name)
    arrays = _arrays(name, {"B": 2, "H": 9, "S": 150, "N": 500, "V": 300})
    bits = set()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = made.forward(**arrays)
            gradients = made.backward(residuals, np.ones_like(y))
            bits.add(b"".join(np.ascontiguousarray(a).tobytes() for a in (y, *gradients.values())))
    finally:
        pool.set_num_threads(before)
    assert len(bits) == 1


@pytest.mark.parametrize("name", CASES)
def test_the_text_parses_back_and_verifies_and_runs(module, name):
    made, arrays = module(name), _arrays(name, {"B": 2, "H": 3, "S": 65, "N": 65, "V": 200})
    for executable in made.executables.values():
        parsed = parse_program(str(executable.program))
        assert parsed == executable.program
        verify_program(parsed)
    if "N,V" not in CASES[name][2].get("t", ""):
        return
    gradients = made.value_and_grad(**arrays)[1]
    wanted = run_program(made.joint.program, {**arrays, "d.y": np.float32(1)}, precision="f64")
    for x, g in gradients.items():
        _close(g, wanted[f"d.{x}"], x)


def test_sequential_axes_are_those_that_a_gradient_is_summed_over(module):
    def loop(name):
        (found,) = module(name).backward.program.loops
        return str(found).partition(" rows")[0]

    assert loop("bias of all heads") == "loop over(at0: B, at1: H) sequential(at0, at1)"
    assert loop("bias of each head") == "loop over(at0: B, at1: H) sequential(at0)"
    assert loop("bias of each sample") == "loop over(at0: B, at1: H) sequential(at1)"
    assert loop("heads that share keys").count("sequential") == 0
    parallel = str(module("bias of all heads").backward.program).replace(" sequential(at0, at1)", "")
    with pytest.raises(gradc.errors.TypeRuleError, match="where another block does"):
        verify_program(parse_program(parallel))


def test_a_sum_over_many_heads_errs_as_torchs_at_most() -> None:
    """It is added up one head after the other."""
    heads, n, width = 512, 64, 16

    def attention(q, k, v, bias):
        return ops.matmul(ops.softmax(ops.matmul(q, ops.transpose(k, (0, 2, 1))) + bias, 2), v)

    shape = f"f32[{heads},{n},{width}]"
    graph = gradc.trace(attention, q=shape, k=shape, v=shape, bias=f"f32[{n},{n}]")
    module = gradc.compile(graph, wrt=["bias"], target="cpu")
    assert any(loop.sequential for loop in module.backward.program.loops)
    draw = np.random.default_rng(0)

    def torchs(inputs, cotangent, dtype):
        q, k, v, bias = (torch.tensor(array, dtype=dtype) for array in inputs.values())
        bias.requires_grad_()
        (torch.softmax(q @ k.mT + bias, -1) @ v).backward(torch.tensor(cotangent, dtype=dtype))
        return bias.grad.numpy()

    for _ in range(3):
        inputs = {n: draw.normal(0, 1, graph.input(n).shape).astype("f4") for n in ("q", "k", "v", "bias")}
        cotangent = draw.normal(0, 1, (heads, n, width)).astype("f4")
        _, residuals = module.forward(**inputs)
        got, exact = module.backward(residuals, cotangent)["bias"], torchs(inputs, cotangent, torch.float64)
        ours, theirs = (np.linalg.norm(d - exact) for d in (got, torchs(inputs, cotangent, torch.float32)))
        assert ours <= theirs


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("mask", ["f32[5,7]", "f32[1,5,7]", "f32[6,5,7]", "f32[2,1,1,7]", "f32[2,6,5,7]"])
def test_grouped_heads_with_a_mask(few: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the heads that share a key, together and apart."""
    monkeypatch.setattr("gradc.ops.products.attention.FEW", few)

    def grouped(q, k, v, mask):
        return ops.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    names = ["q", "k", "v", "mask"]
    graph = gradc.trace(grouped, q="f32[2,6,5,8]", k="f32[2,3,7,8]", v="f32[2,3,7,4]", mask=mask)
    module = gradc.compile(graph, wrt=names, target="cpu")
    draw = np.random.default_rng(1)
    inputs = {n: draw.normal(0, 1, graph.input(n).shape).astype("f4") for n in names}
    y, residuals = module.forward(**inputs)
    cotangent = draw.normal(0, 1, y.shape).astype("f4")
    q, k, v, bias = leaves = [torch.tensor(inputs[n], dtype=torch.float64, requires_grad=True) for n in names]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    want = (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v
    np.testing.assert_allclose(y, want.detach(), rtol=0, atol=4e-7 * float(want.detach().abs().max()))
    gradients = torch.autograd.grad(want, leaves, torch.tensor(cotangent, dtype=torch.float64))
    ours = module.backward(residuals, cotangent)
    for name, d in zip(names, gradients, strict=True):
        np.testing.assert_allclose(ours[name], d, rtol=0, atol=4e-7 * float(d.abs().max()), err_msg=name)


def test_sums_that_are_owned_in_one_order_stay_together() -> None:
    """The gradients of a channel's scale and shift, over the rows of a wide product."""

    def block(w, x, g, b):
        y = ops.matmul(w, x) * g + b
        return ops.sum(ops.tanh(y) * y)

    graph = gradc.trace(block, w="f32[64,16]", x="f32[8,16,784]", g="f32[64,1]", b="f32[64,1]")
    module = gradc.compile(graph, wrt=["w", "g", "b"], target="cpu")
    draw = np.random.default_rng(2)
    inputs = {n: draw.normal(0, 1, graph.input(n).shape).astype("f4") for n in graph.input_names}
    _, residuals = module.forward(**inputs)
    ours = module.backward(residuals, np.float32(1))
    w, x, g, b = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in inputs.values()]
    y = (w @ x) * g + b
    for name, d in zip("wgb", torch.autograd.grad((y.tanh() * y).sum(), [w, g, b]), strict=True):
        np.testing.assert_allclose(ours[name], d, rtol=0, atol=1e-6 * float(d.abs().max()), err_msg=name)
