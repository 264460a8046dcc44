"""Gradients of a loss that are made in the forward: against torch in f64, and where they are not."""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.compiler import Options, cut, lower
from gradc.passes.manager import Pipeline
from gradc.passes.row_blocking import decision, precompute_gradients

torch = pytest.importorskip("torch")
F = torch.nn.functional

N, K, V = 260, 16, 1100
SIZES = {"N": N, "V": V}


def _linear(x, w, b, t):
    return ops.cross_entropy(ops.linear(x, w, b), t)


def _deep(x, w, b, t):
    return ops.cross_entropy(ops.linear(ops.gelu(x) * 2.0, w, b), t)


def _smoothed(x, w, b, t):
    return ops.cross_entropy(ops.linear(x, w, b), t, label_smoothing=0.1)


def _weighted(x, w, b, t):
    return ops.cross_entropy(ops.linear(x, w), t, weight=ops.exp(b), ignore_index=3)


def _scaled(x, w, b, t):
    return ops.cross_entropy(ops.linear(x, w, b), t, reduction="sum") * 3.0 + (x * x).sum()


def _tied(x, w, b, t):
    return ops.cross_entropy(ops.linear(x + w[t], w, b), t)


THEIRS = {
    _linear: lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t),
    _deep: lambda x, w, b, t: F.cross_entropy(F.linear(F.gelu(x) * 2.0, w, b), t),
    _smoothed: lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, label_smoothing=0.1),
    _weighted: lambda x, w, b, t: F.cross_entropy(F.linear(x, w), t, weight=b.exp(), ignore_index=3),
    _scaled: lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, reduction="sum") * 3.0 + (x * x).sum(),
    _tied: lambda x, w, b, t: F.cross_entropy(F.linear(x + w[t], w, b), t),
}
SYMBOLIC = {"x": f"f32[N,{K}]", "w": f"f32[V,{K}]", "b": "f32[V]", "t": "i64[N]"}


def _compiled(function, types=SYMBOLIC, **options):
    wrt = [name for name, type_ in types.items() if not type_.startswith("i")]
    if function is _weighted:
        wrt.remove("b")
    return gradc.compile(gradc.trace(function, **types), wrt=wrt, target="cpu", **options)


def _arrays(n=N, v=V, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, w, b = (rng.standard_normal(shape).astype(dtype) * 0.5 for shape in ((n, K), (v, K), (v,)))
    return {"x": x.astype(dtype), "w": w.astype(dtype), "b": b.astype(dtype), "t": rng.integers(0, v, n)}


def _wanted(function, made, arrays, cotangent=1.0):
    """torch's loss and gradients in f64."""
    given = {n: torch.from_numpy(a.astype(np.float64) if a.dtype.kind == "f" else a) for n, a in arrays.items()}
    for name in made.wrt:
        given[name].requires_grad_()
    loss = THEIRS[function](**given)
    return loss, torch.autograd.grad(loss, [given[n] for n in made.wrt], torch.tensor(cotangent, dtype=torch.float64))


def _products(executable):
    return [step for loop in executable.program.loops for step in loop.steps if hasattr(step, "op")]


@pytest.fixture
def few_flops(monkeypatch):
    """As if a product of few columns took long: sizes that a test has time for."""
    monkeypatch.setattr(precompute_gradients, "FLOPS_PER_BYTE", 0.25)


@pytest.mark.parametrize("function", THEIRS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_torchs(function, few_flops):
    made, arrays = _compiled(function), _arrays()
    assert any(r.precomputed for r in made.residuals), made.residuals
    assert not made.backward.program.loops and len(made.forward.program.loops) == 1
    loss, wanted = _wanted(function, made, arrays)
    y, residuals = made.forward(**arrays)
    np.testing.assert_allclose(y, loss.item(), rtol=2e-6)
    np.testing.assert_allclose(made(**arrays), loss.item(), rtol=2e-6)
    for cotangent in (1.0, -2.5, 0.0):
        for name, want in zip(made.wrt, wanted, strict=True):
            got = made.backward(residuals, np.float32(cotangent))[name]
            scale = float(want.abs().max())
            np.testing.assert_allclose(got, cotangent * want.numpy(), rtol=0, atol=4e-6 * scale, err_msg=name)


@pytest.mark.parametrize(("n", "v"), ((1, 1), (0, 7), (3, 1100), (1300, 70)))
def test_other_sizes_of_the_same_module(n, v, few_flops):
    made, arrays = _compiled(_linear), _arrays(n, v)
    loss, wanted = _wanted(_linear, made, arrays)
    y, residuals = made.forward(**arrays)
    np.testing.assert_allclose(y, loss.item(), rtol=2e-6)
    for name, want in zip(made.wrt, wanted, strict=True):
        got = made.backward(residuals, np.float32(1))[name]
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=4e-6 * max([*want.abs().flatten().tolist(), 1e-6]))


def test_logits_are_computed_once(few_flops):
    made = _compiled(_linear)
    assert [step.op for step in _products(made.forward)] == ["matmul"] * 4  # logits, d.x, d.w, d.b
    assert not _products(made.backward)
    kept = [r for r in made.residuals if not r.borrowed]
    assert sorted(r.name for r in kept) == ["r.d.b", "r.d.w", "r.d.x"] and all(r.precomputed for r in kept)


def test_a_value_alone_does_not_pay_for_gradients(few_flops):
    made = _compiled(_linear)
    arrays = _arrays()
    value = made(**arrays)
    assert [step.op for step in _products(made._value.forward)] == ["matmul"]
    np.testing.assert_allclose(value, made.forward(**arrays)[0], rtol=1e-6)
    out = np.zeros((), np.float32)
    made(**arrays, out={"y": out})
    assert out == value


def test_bits_do_not_depend_on_the_threads(few_flops):
    from gradc.runtime.host import pool

    made, arrays, seen = _compiled(_linear), _arrays(1300, 700), set()
    before = pool.num_threads()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            y, residuals = made.forward(**arrays)
            gradients = made.backward(residuals, np.float32(0.7))
            seen.add(b"".join(np.ascontiguousarray(a).tobytes() for a in (y, *gradients.values())))
    finally:
        pool.set_num_threads(before)
    assert len(seen) == 1


def test_a_saved_module_keeps_them(few_flops, tmp_path):
    made, arrays = _compiled(_linear), _arrays()
    made.save(tmp_path / "m.gradc")
    loaded = gradc.load_module(tmp_path / "m.gradc")
    assert any(r.precomputed for r in loaded.residuals)
    y, residuals = made.forward(**arrays)
    again, kept = loaded.forward(**arrays)
    assert y.tobytes() == again.tobytes() and loaded(**arrays).tobytes() == made(**arrays).tobytes()
    for mine, theirs in zip(made.backward(residuals, y).values(), loaded.backward(kept, y).values(), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_a_loss_in_f16_that_is_scaled_keeps_small_gradients(few_flops):
    half = {name: type_.replace("f32", "f16") for name, type_ in SYMBOLIC.items()}
    made, arrays = _compiled(_linear, half), _arrays(dtype=np.float16)
    _, wanted = _wanted(_linear, made, arrays, 16384.0)
    _, residuals = made.forward(**arrays)
    for name, want in zip(made.wrt, wanted, strict=True):
        got = made.backward(residuals, np.float16(16384))[name].astype(np.float64)
        np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=2e-3 * float(want.abs().max()))


def _two(x, w, b, t):
    logits = ops.linear(x, w, b)
    return {"loss": ops.cross_entropy(logits, t), "norm": (logits * logits).sum()}


def _rows(x, w, b, t):
    return ops.cross_entropy(ops.linear(x, w, b), t, reduction="none")


NOT = {
    "two floats": (_two, SYMBOLIC, {}),
    "a loss of each row": (_rows, SYMBOLIC, {}),
    "all is kept": (_linear, SYMBOLIC, {"save": "all"}),
    "nothing is kept": (_linear, SYMBOLIC, {"save": "none"}),
    "a budget": (_linear, SYMBOLIC, {"memory_budget": 0.5}),
    "no loops": (_linear, SYMBOLIC, {"numerics": "strict"}),
    "few rows": (_linear, {"x": "f32[4,16]", "w": "f32[80000,16]", "b": "f32[80000]", "t": "i64[4]"}, {}),
}


@pytest.mark.parametrize(("function", "types", "options"), NOT.values(), ids=NOT)
def test_not_where(function, types, options, few_flops):
    assert not any(r.precomputed for r in _compiled(function, types, **options).residuals)


def _two_layers(x, w, b, t):
    """The first wide product's gradient is made with another product of the backward."""
    return ops.cross_entropy(ops.linear(ops.relu(ops.linear(x, w, b)), ops.swapaxes(w, 0, 1)), t % 16)


def test_a_product_before_another_one_is_computed_again_instead(few_flops):
    """Else all of a network's backward would be made in its forward."""
    made = _compiled(_two_layers)
    assert not any(r.precomputed for r in made.residuals)


@pytest.mark.parametrize("inner", (192, 256))
def test_not_where_the_gradients_are_larger_than_logits(inner, few_flops):
    n, v = 128, 2100
    types = {"x": f"f32[{n},{inner}]", "w": f"f32[{v},{inner}]", "b": f"f32[{v}]", "t": f"i64[{n}]"}
    made = _compiled(_linear, types)
    assert not any(r.precomputed for r in made.residuals)
    assert max(np.prod(r.node.shape) for r in made.residuals if not r.borrowed) < n * v  # no logits, nor made of them
    memory, logits = made.memory(), 4 * n * v
    assert memory.peak - memory.threads <= memory.gradients + 1.1 * logits


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (_linear, {}, ["PRECOMPUTE_GRADIENT", "RECOMPUTE", "SAVE"]),
        (_linear, {"save": "none"}, ["RECOMPUTE", "SAVE"]),
        (_rows, {}, ["RECOMPUTE", "SAVE"]),
        (_linear, {"numerics": "strict"}, ["SAVE"]),
    ],
)
def test_policies_that_shapes_allow_least_work_first(function, options, expected, few_flops):
    graph, wrt, given = gradc.trace(function, **SYMBOLIC), ["x", "w", "b"], Options(**options)
    joint = lower(graph, wrt, given, "cpu", Pipeline())
    assert [parts.policy.name for parts in cut(graph, joint, wrt, given, "cpu")] == expected


def test_stages_are_those_of_the_attempt_that_was_taken(few_flops, monkeypatch):
    """Where no loop comes of what was to be precomputed or recomputed, all is saved, and no stage says else."""
    monkeypatch.setattr(decision, "has_unblocked", lambda *_: True)
    with knobs.VERIFY.set("1"):  # the cache has the module that was not given up
        made = _compiled(_linear)
    names = made.stages.names()
    assert len(set(names)) == len(names)
    assert not any(r.precomputed for r in made.residuals)
    assert {name for name in made.stages["forward.partition"].result.output_names if name.startswith("r.")} == {
        r.name for r in made.residuals if not r.borrowed
    }


def test_an_output_may_have_any_name(few_flops):
    made, arrays = _compiled(lambda **given: {"r.precomputed.0": _linear(**given)}), _arrays()
    plain = _compiled(_linear)
    (value, residuals), (wanted, theirs) = made.forward(**arrays), plain.forward(**arrays)
    assert made.graph.output_names == ("r.precomputed.0",) and value == wanted
    gradients, wanted = made.backward(residuals, np.float32(2)), plain.backward(theirs, np.float32(2))
    assert all(gradients[name].tobytes() == wanted[name].tobytes() for name in plain.wrt)


def test_a_sum_whose_reduction_is_forced_stays_one(few_flops):
    """Of the bias's gradient, which would be a product that adds up over blocks of rows."""
    made = _compiled(_linear, reductions={"d.b": "privatized"})
    assert "d.b" in {s.buffer for e in made.executables.values() for k in e.program.kernels for s in k.accums}
