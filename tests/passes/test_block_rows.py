"""Steps that run for one block of rows at a time: against torch in f64, and what the plan says of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.row_blocking import decision
from gradc.runtime.host import pool
from gradc.targets.devices import CPU

torch = pytest.importorskip("torch")

HEADS = "f32[B,H,S,16]"


def _attention(q, k, v):
    return ops.scaled_dot_product_attention(q, k, v)


def _causal(q, k, v):
    return ops.scaled_dot_product_attention(q, k, v, is_causal=True)


def _cross_entropy(x, w, t):
    return ops.linear_cross_entropy(x, w, t)


def _mlp(x, w1, w2):
    return ops.gelu(x @ w1) @ w2


def _torch_attention(q, k, v, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


TYPES = {
    "attention": (_attention, {"q": HEADS, "k": HEADS, "v": HEADS}),
    "causal": (_causal, {"q": HEADS, "k": HEADS, "v": HEADS}),
    "cross_entropy": (_cross_entropy, {"x": "f32[N,8]", "w": "f32[V,8]", "t": "i64[N]"}),
    "mlp": (_mlp, {"x": "f32[N,8]", "w1": "f32[8,M]", "w2": "f32[M,5]"}),
}
ORACLES = {
    "attention": _torch_attention,
    "causal": lambda q, k, v: _torch_attention(q, k, v, True),
    "cross_entropy": lambda x, w, t: torch.nn.functional.cross_entropy(x @ w.T, t),
    "mlp": lambda x, w1, w2: torch.nn.functional.gelu(x @ w1) @ w2,
}


@pytest.fixture(scope="module")
def module():
    made = {}

    def of(name, **options):
        key = name, tuple(options.items())
        if key not in made:
            function, types = TYPES[name]
            wrt = [n for n, t in types.items() if t.startswith("f32")]
            made[key] = gradc.compile(gradc.trace(function, **types), wrt=wrt, target="cpu", **options)
        return made[key]

    return of


def _arrays(name, dims, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for x, text in TYPES[name][1].items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = [dims[s] if s in dims else int(s) for s in sizes.split(",")]
        drawn = rng.standard_normal(shape).astype(np.float32) * np.float32(0.7)
        arrays[x] = drawn if dtype == "f32" else rng.integers(0, max(dims["V"], 1), shape)
    return arrays


def _wanted(name, arrays):
    given = {x: torch.from_numpy(a.astype(np.float64) if a.dtype == np.float32 else a) for x, a in arrays.items()}
    floats = {x: a.requires_grad_() for x, a in given.items() if a.is_floating_point()}
    y = ORACLES[name](**given)
    cotangent = torch.from_numpy(np.random.default_rng(1).standard_normal(tuple(y.shape)))
    gradients = torch.autograd.grad(y, [*floats.values()], cotangent)
    return y.detach().numpy(), cotangent.numpy().astype(np.float32), dict(zip(floats, gradients, strict=True))


def _close(got, wanted, what):
    scale = max(float(np.abs(np.nan_to_num(wanted)).max(initial=0)), 1e-3)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-6 * scale, err_msg=what)


SIZES = (
    *(("attention", {"B": b, "H": 3, "S": s}) for b, s in ((1, 1), (2, 63), (1, 64), (3, 65), (1, 300), (3, 289))),
    *(("causal", {"B": b, "H": 3, "S": s}) for b, s in ((1, 1), (3, 65), (1, 300))),
    *(("cross_entropy", {"N": n, "V": v}) for n, v in ((1, 1), (64, 63), (65, 200), (1300, 70))),
    *(("mlp", {"N": n, "M": m}) for n, m in ((0, 64), (1, 64), (63, 1), (1203, 65), (64, 0))),
)


@pytest.mark.parametrize(("name", "dims"), SIZES)
def test_values_and_gradients_are_torchs(module, name, dims):
    made, arrays = module(name), _arrays(name, dims)
    assert made.executables["forward"].program.loops
    y, cotangent, gradients = _wanted(name, arrays)
    got, residuals = made.forward(**arrays)
    _close(got, y, "y")
    for x, g in made.backward(residuals, cotangent).items():
        _close(g, gradients[x].numpy(), f"d.{x}")


@pytest.mark.parametrize(("n", "v"), ((1, 1), (65, 200), (1300, 70)))
def test_value_and_gradients_in_one_program_compute_the_logits_once(module, n, v):
    made, arrays = module("cross_entropy"), _arrays("cross_entropy", {"N": n, "V": v})
    (loop,) = made.joint.program.loops
    assert [step.op for step in loop.steps if hasattr(step, "op")] == ["matmul"] * 3
    y, _, gradients = _wanted("cross_entropy", arrays)
    got, grads = made.value_and_grad(**arrays)
    _close(got, y, "y")
    scale = _wanted("cross_entropy", arrays)[1]
    for x, g in grads.items():
        _close(g, gradients[x].numpy() / float(scale), f"d.{x}")


@pytest.mark.parametrize("name", TYPES)
def test_the_text_parses_back_and_verifies(module, name):
    for executable in module(name).executables.values():
        parsed = parse_program(str(executable.program))
        assert parsed == executable.program
        verify_program(parsed)


@pytest.mark.parametrize(("name", "dims"), [(n, d) for n, d in SIZES if max(d.values()) >= 65])
def test_the_interpreter_agrees(module, name, dims):
    arrays, program = _arrays(name, dims), module(name).executables["forward"].program
    wanted = run_program(program, arrays, precision="f64")
    got, _ = module(name).forward(**arrays)
    _close(got, wanted[dict(program.outputs)["y"]] if "y" not in wanted else wanted["y"], "y")


def test_the_bits_do_not_depend_on_the_threads(module):
    before = pool.num_threads()
    for name, dims in (("attention", {"B": 2, "H": 4, "S": 200}), ("cross_entropy", {"N": 500, "V": 300})):
        made, arrays, bits = module(name), _arrays(name, dims), set()
        try:
            for threads in (1, 2, 3, 5):
                pool.set_num_threads(threads)
                y, residuals = made.forward(**arrays)
                gradients = made.backward(residuals, np.ones_like(y))
                bits.add(b"".join(np.ascontiguousarray(a).tobytes() for a in (y, *gradients.values())))
        finally:
            pool.set_num_threads(before)
        assert len(bits) == 1, name


@pytest.mark.parametrize("name", ("attention", "causal"))
def test_a_kernel_of_a_loop_is_sampled_and_timed_as_its_largest_block(module, name):
    dims = {"B": 2, "H": 3, "S": 500}
    kernels = [k for k in module(name).kernels.values() if k.loop is not None]
    assert kernels
    for kernel in kernels:
        rows = kernel.loop.largest(dims)[kernel.loop.count]
        blocks = {b.name for b in kernel.loop.blocks}
        shapes = {name: array.shape for name, array in kernel.sample(**dims).items()}
        assert {shape for name, shape in shapes.items() if name in blocks} <= {(rows, 500)}
        assert kernel.bytes(**dims) > 0 and kernel.time(1, **dims) > 0


def test_strict_numerics_cut_no_rows(module):
    """A product of fewer rows may add up in another order."""
    assert not module("attention", numerics="strict").executables["forward"].program.loops


def test_few_rows_of_known_size_are_not_cut():
    graph = gradc.trace(_attention, **dict.fromkeys("qkv", "f32[2,2,32,16]"))
    assert not gradc.compile(graph, wrt=[], target="cpu").executables["forward"].program.loops


# -- columns that no row of a block needs ------------------------------------------------------------------------------


def _masked(mask, fill=-np.inf):
    def function(x, w, v):
        scores = x @ ops.swapaxes(w, -1, -2)
        keep = ops.broadcast_to(mask(ops.iota(scores.shape[-2:], axis=1), ops.iota(scores.shape[-2:])), scores.shape)
        return ops.softmax(ops.where(keep, scores, fill), -1) @ v

    types = {"x": "f32[H,N,8]", "w": "f32[H,M,8]", "v": "f32[H,M,5]"}
    return gradc.compile(gradc.trace(function, **types), wrt=["x", "w", "v"], target="cpu")


MASKS = {
    "at most": (lambda column, row: column <= row, "row+rows"),
    "below": (lambda column, row: column < row + 3, "row+rows+2"),
    "swapped": (lambda column, row: row + 1 >= column, "row+rows+1"),
}


@pytest.mark.parametrize(("mask", "to"), MASKS.values(), ids=MASKS)
def test_columns_behind_a_mask_are_not_computed(mask, to):
    made = _masked(mask)
    for executable in made.executables.values():
        (loop,) = executable.program.loops
        assert str(loop.to) == to and str(loop.cols[0][1]) == "M"
        assert parse_program(str(executable.program)) == executable.program
    rng = np.random.default_rng(0)
    for n, m in ((1, 1), (65, 300), (300, 65), (290, 290), (300, 0)):
        shapes = {"x": (2, n, 8), "w": (2, m, 8), "v": (2, m, 5)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        y, residuals = made.forward(**arrays)
        x, w, v = (torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays.values())
        keep = torch.from_numpy(mask(np.arange(m)[None, :], np.arange(n)[:, None]))
        wanted = torch.where(keep, x @ w.mT, -torch.inf).softmax(-1) @ v
        _close(y, wanted.detach().numpy(), f"y {n} {m}")
        cotangent = rng.standard_normal(y.shape).astype(np.float32)
        gradients = torch.autograd.grad(wanted, (x, w, v), torch.from_numpy(cotangent).double())
        for got, want in zip(made.backward(residuals, cotangent).values(), gradients, strict=True):
            _close(got, want.numpy(), f"{n} {m}")


@pytest.mark.parametrize(
    ("mask", "fill"),
    (
        (lambda column, row: column >= row, -np.inf),  # what is hidden comes first
        (lambda column, row: column < row, -np.inf),  # the first row has no column: NaN, as in all of the weights
        (lambda column, row: column <= row, -1e9),  # exp(-1e9 - maximum) need not be 0
        (lambda column, row: column != row, -np.inf),
    ),
)
def test_columns_that_may_count_are_computed(mask, fill):
    program = _masked(mask, fill).executables["forward"].program
    assert program.loops and not any(loop.cols for loop in program.loops)


def _last_rows(column, row, n, m):
    """The mask of the last n of m positions, which see those before them: the first rows see nothing where n > m."""
    return column - m < row - n + 1


@pytest.mark.parametrize("assumed", (False, True))
def test_rows_without_a_column_are_nan_whatever_their_block(assumed):
    def function(x, w, v):
        scores = x @ ops.swapaxes(w, -1, -2)
        n, m = (ops.dim(size=size) for size in scores.shape[-2:])
        if assumed:
            gradc.assume("M >= N")
        keep = _last_rows(ops.iota(scores.shape[-2:], axis=1), ops.iota(scores.shape[-2:]), n, m)
        return ops.softmax(ops.where(ops.broadcast_to(keep, scores.shape), scores, -np.inf), -1) @ v

    types = {"x": "f32[H,N,8]", "w": "f32[H,M,8]", "v": "f32[H,M,5]"}
    made = gradc.compile(gradc.trace(function, **types), wrt=["x", "w", "v"], target="cpu")
    (loop,) = made.forward.program.loops
    assert ("max" in str(loop.to)) is not assumed, loop.to
    rng = np.random.default_rng(0)
    for n, m in ((290, 400), (300, 300), *(() if assumed else ((900, 500), (300, 10), (3, 0)))):
        shapes = {"x": (9, n, 8), "w": (9, m, 8), "v": (9, m, 5)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        given = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays.values()]
        keep = torch.from_numpy(_last_rows(np.arange(m)[None, :], np.arange(n)[:, None], n, m))
        x, w, v = given
        wanted = torch.where(keep, x @ w.mT, -torch.inf).softmax(-1) @ v
        y, residuals = made.forward(**arrays)
        _close(y, wanted.detach().numpy(), f"y {n} {m}")
        cotangent = rng.standard_normal(y.shape).astype(np.float32)
        gradients = torch.autograd.grad(wanted, given, torch.from_numpy(cotangent).double())
        for got, want in zip(made.backward(residuals, cotangent).values(), gradients, strict=True):
            _close(got, want.numpy(), f"{n} {m}")


def test_columns_that_somebody_is_given_are_computed():
    def function(x, w, v):
        scores = x @ ops.swapaxes(w, -1, -2)
        keep = ops.broadcast_to(ops.iota(scores.shape[-2:], axis=1) <= ops.iota(scores.shape[-2:]), scores.shape)
        weights = ops.softmax(ops.where(keep, scores, -np.inf), -1)
        return weights @ v, weights

    types = {"x": "f32[H,N,8]", "w": "f32[H,M,8]", "v": "f32[H,M,5]"}
    program = gradc.compile(gradc.trace(function, **types), wrt=[], target="cpu").executables["forward"].program
    assert not any(loop.cols for loop in program.loops)


@pytest.mark.parametrize("sizes", ("B,S", "2,300", "1,300"))
def test_heads_that_lie_side_by_side_have_no_scores_in_memory(sizes):
    """The keys' gradient is added up in whole rows, whatever the order of its axes."""

    def apart(f, x):
        return f(x.reshape((*x.shape[:2], 3, 8)), (0, 2, 1, 3))

    def function(q, k, v):
        heads = (apart(ops.transpose, x) for x in (q, k, v))
        return ops.transpose(ops.scaled_dot_product_attention(*heads, is_causal=True), (0, 2, 1, 3))

    types = dict.fromkeys("qkv", f"f32[{sizes},24]")
    made = gradc.compile(gradc.trace(function, **types), wrt=[*types], target="cpu")
    for executable in made.executables.values():
        (loop,) = executable.program.loops
        assert loop.cols
        assert not any(b.type.rank == 4 and b.type.shape[2] == b.type.shape[3] for b in executable.program.buffers)
    rng = np.random.default_rng(0)
    arrays = {x: rng.standard_normal((1 if sizes[0] == "1" else 2, 300, 24)).astype(np.float32) for x in types}
    given = {x: torch.from_numpy(a.astype(np.float64)).requires_grad_() for x, a in arrays.items()}
    heads = (apart(torch.permute, x) for x in given.values())
    wanted = torch.permute(_torch_attention(*heads, causal=True), (0, 2, 1, 3))
    cotangent = rng.standard_normal(wanted.shape).astype(np.float32)
    gradients = torch.autograd.grad(wanted, [*given.values()], torch.from_numpy(cotangent).double())
    got, residuals = made.forward(**arrays)
    _close(got, wanted.detach().numpy(), "y")
    for (x, g), want in zip(made.backward(residuals, cotangent).items(), gradients, strict=True):
        _close(g, want.numpy(), f"d.{x}")


# -- several layers ----------------------------------------------------------------------------------------------------


def _two_layers(x, wq, wk, wv):
    for _ in range(2):
        x = x + ops.tanh(ops.scaled_dot_product_attention(x @ wq, x @ wk, x @ wv, is_causal=True))
    return ops.sum(x * x)


def test_two_layers_have_no_scores_in_memory():
    types = {"x": "f32[B,S,8]", **dict.fromkeys(("wq", "wk", "wv"), "f32[8,8]")}
    made = gradc.compile(gradc.trace(_two_layers, **types), wrt=[*types], target="cpu")
    for executable in made.executables.values():
        loops = executable.program.loops
        assert len(loops) == 2 and all(loop.cols for loop in loops)
        assert not any(b.type.rank == 3 and str(b.type.shape[-1]) == "S" for b in executable.program.buffers)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((2, 200, 8) if name == "x" else (8, 8)).astype(np.float32) * np.float32(0.5)
        for name in types
    }
    given = {name: torch.from_numpy(a.astype(np.float64)).requires_grad_() for name, a in arrays.items()}
    x, *weights = given.values()
    for _ in range(2):
        x = x + torch.tanh(_torch_attention(*(x @ w for w in weights), causal=True))
    wanted = (x * x).sum()
    wanted.backward()
    value, residuals = made.forward(**arrays)
    _close(value, wanted.detach().numpy(), "value")
    gradients = {
        "forward and backward": made.backward(residuals, np.float32(1)),
        "one": made.value_and_grad(**arrays)[1],
    }
    for how, each in gradients.items():
        for name, got in each.items():
            _close(got, given[name].grad.numpy(), f"{how}: {name}")


def _heads(f, permute, x, w, causal):
    """Attention as models write it: one product for q, k and v, whose heads are views of its columns."""
    b, s, width = x.shape
    q, k, v = (permute((x @ w[i]).reshape((b, s, width // 16, 16)), (0, 2, 1, 3)) for i in range(3))
    y = f.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return permute(y, (0, 2, 1, 3)).reshape((b, s, width))


@pytest.mark.parametrize("causal", (False, True))
def test_heads_that_are_views_have_no_scores_in_memory(causal):
    """A gradient of k lies turned, [head, columns of the block]: the columns of a block are not a part of it."""
    types = {"x": "f32[2,640,64]", "w": "f32[3,64,64]"}
    graph = gradc.trace(lambda x, w: _heads(ops, ops.transpose, x, w, causal), **types)
    made = gradc.compile(graph, wrt=[*types], target="cpu")
    for executable in made.executables.values():
        assert len(executable.program.loops) == 1
        assert not any(list(b.type.shape[-2:]) == [640, 640] for b in executable.program.buffers)
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((2, 640, 64)).astype(np.float32),
        "w": rng.standard_normal((3, 64, 64)).astype(np.float32) * np.float32(0.1),
    }
    given = {name: torch.from_numpy(a.astype(np.float64)).requires_grad_() for name, a in arrays.items()}
    wanted = _heads(torch.nn.functional, torch.permute, **given, causal=causal)
    cotangent = rng.standard_normal(wanted.shape).astype(np.float32)
    wanted.backward(torch.from_numpy(cotangent.astype(np.float64)))
    value, residuals = made.forward(**arrays)
    _close(value, wanted.detach().numpy(), "value")
    for name, got in made.backward(residuals, cotangent).items():
        _close(got, given[name].grad.numpy(), name)


@pytest.mark.parametrize(
    "shape",
    ("f32[2,3,640,16]", "f32[B,H,S,16]", "f32[1,3,640,16]", "f32[2,1,640,16]", "f32[1,1,640,16]", "f32[1,H,S,16]"),
)
def test_attention_keeps_no_scores(shape):
    """What makes factors of narrow rows from statistics of wide ones is a part of the loop, if products wait for it."""
    graph = gradc.trace(_attention, **dict.fromkeys("qkv", shape))
    made = gradc.compile(graph, wrt=[*"qkv"], target="cpu")
    for executable in made.executables.values():
        (loop,) = executable.program.loops
        assert sum(hasattr(step, "op") for step in loop.steps) == (
            2 if executable is made.executables["forward"] else 5
        )
        sizes = {str(shape) for b in executable.program.buffers for shape in [b.type.shape[-2:]] if b.type.rank > 3}
        assert all(size.endswith("16)") for size in sizes), sizes
        elsewhere = {b for s in executable.program.steps if s is not loop for b in (*s.reads, *s.writes)}
        assert all(b.name in elsewhere for b in executable.program.of_kind("temp"))  # what is the loop's own is a block
    if "640" not in shape:
        return
    rng = np.random.default_rng(0)
    arrays = {x: rng.standard_normal(made.graph.input(x).type.shape).astype(np.float32) for x in "qkv"}
    given = {x: torch.from_numpy(a.astype(np.float64)).requires_grad_() for x, a in arrays.items()}
    wanted = _torch_attention(**given)
    y, residuals = made.forward(**arrays)
    _close(y, wanted.detach().numpy(), "y")
    wanted.backward(torch.ones_like(wanted))
    for x, got in made.backward(residuals, np.ones_like(y)).items():
        _close(got, given[x].grad.numpy(), x)


def test_rows_beside_a_count_of_windows_whose_sign_is_unknown() -> None:
    """How many rows a block has must be known to be one at least."""
    graph = gradc.trace(
        lambda x, w: ops.conv2d(x, w, stride=(1, 3), padding=(1, 0), dilation=(1, 2)),
        x="f32[N,2,H,W]",
        w="f32[1,2,1,1]",
    )
    module = gradc.compile(graph, wrt=["x", "w"], target="cpu")
    draw = np.random.default_rng(0)
    w = draw.standard_normal((1, 2, 1, 1)).astype("f4")
    for size in ((1, 1), (5, 7), (40, 61)):
        x = draw.standard_normal((2, 2, *size)).astype("f4")
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))[..., ::3]
        y, residuals = module.forward(x=x, w=w)
        np.testing.assert_allclose(y, (padded * w).sum(1, keepdims=True), rtol=1e-5, atol=1e-5)
        gradient = module.backward(residuals, np.ones_like(y))["w"]
        np.testing.assert_allclose(gradient[0, :, 0, 0], padded.astype("f8").sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_a_forward_with_an_unblocked_product_gives_a_partition_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is not compiled; that of the partition that is left for the others is, whatever it has."""
    unblocked = {("first", "forward"), ("second", "backward"), ("last", "forward")}
    monkeypatch.setattr(decision, "has_unblocked", lambda program, dims, device: program in unblocked)
    monkeypatch.setattr(decision, "tiled_products", lambda program: 0)
    made = []

    def programs_of(parts: Any) -> Iterator[tuple[str, Any]]:
        for name in ("forward", "backward"):
            made.append((parts.name, name))
            yield name, made[-1]

    partitions: Any = [SimpleNamespace(name=n, is_final=n == "last", tiled=()) for n in ("first", "second", "last")]
    parts, programs = decision.first_blocked(partitions, programs_of, None, CPU)
    assert made == [("first", "forward"), *((n, p) for n in ("second", "last") for p in ("forward", "backward"))]
    assert parts is partitions[-1] and programs == {"forward": made[-2], "backward": made[-1]}
