"""Loops over blocks of rows on a GPU: the host goes over the blocks; in the simulator's checking mode, against torch in
f64, and what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.codegen.cuda.actions import Launch, Library
from gradc.codegen.cuda.library_time import is_aligned
from gradc.errors import IndexOutOfRange
from gradc.ir.kernel import Loop
from gradc.ir.types import DTYPES
from gradc.passes.row_blocking import wide_products

torch = pytest.importorskip("torch")
F = torch.nn.functional

HEADS = dict.fromkeys("qkv", "f32[2,3,S,8]")
Case = tuple[Callable[..., Any], Callable[..., Any], dict[str, str]]
CASES: dict[str, Case] = {
    "loss": (
        lambda x, w, t: ops.linear_cross_entropy(x, w, t),
        lambda x, w, t: F.cross_entropy(x @ w.T, t),
        {"x": "f32[N,8]", "w": "f32[V,8]", "t": "i64[N]"},
    ),
    "loss of each row": (
        lambda x, w, t: ops.linear_cross_entropy(x, w, t, reduction="none"),
        lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="none"),
        {"x": "f32[N,8]", "w": "f32[V,8]", "t": "i64[N]"},
    ),
    "layers": (
        lambda x, v, w: ops.gelu(x @ v) @ w,
        lambda x, v, w: F.gelu(x @ v) @ w,
        {"x": "f32[N,8]", "v": "f32[8,V]", "w": "f32[V,5]"},
    ),
    "heads": (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        HEADS,
    ),
    "causal heads": (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        HEADS,
    ),
    "a bias of all heads": (
        lambda q, k, v, bias: ops.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        lambda q, k, v, bias: (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v,
        {**HEADS, "bias": "f32[S,S]"},
    ),
}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 128 rows, for any number of heads, and of small products, too."""
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(wide_products, "MOST_POSITIONS", 1 << 40)
    monkeypatch.setattr(wide_products, "MIN_BYTES", 1)
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    monkeypatch.setenv("GRADC_CACHE", "0")
    yield


def compiled(name: str, **options: Any) -> gradc.Module:
    ours, _, types = CASES[name]
    wrt = [n for n, t in types.items() if t.startswith("f")]
    return gradc.compile(gradc.trace(ours, **types), wrt, target="cuda-sim", **options)


def arrays_of(name: str, dims: dict[str, int]) -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(0), {}
    for x, text in CASES[name][2].items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = [dims[s] if s in dims else int(s) for s in sizes.split(",")]
        drawn = (0.7 * rng.standard_normal(shape)).astype(np.float32)
        made[x] = drawn if dtype == "f32" else rng.integers(0, max(dims["V"], 1), shape)
    return made


def wanted(name: str, arrays: dict[str, np.ndarray], dy: np.ndarray) -> dict[str, np.ndarray]:
    """The value and the gradients by torch in f64."""
    given = {n: torch.from_numpy(a.astype(np.float64) if a.dtype == np.float32 else a) for n, a in arrays.items()}
    leaves = {n: x.requires_grad_() for n, x in given.items() if x.is_floating_point()}
    y = CASES[name][1](**given)
    gradients = torch.autograd.grad(y, [*leaves.values()], torch.from_numpy(dy.astype(np.float64)))
    return {"y": y.detach().numpy(), **{n: g.numpy() for n, g in zip(leaves, gradients, strict=True)}}


def results(module: gradc.Module, arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The value and the gradients, and the cotangent."""
    y, residuals = module.forward(**arrays)
    dy = np.asarray(np.random.default_rng(1).standard_normal(np.shape(y)), np.float32)
    return {"y": np.asarray(y), **{n: np.asarray(g) for n, g in module.backward(residuals, dy).items()}}, dy


SIZES = [
    *((name, {"N": n, "V": v}) for name in ("loss", "layers") for n, v in ((1, 64), (127, 65), (128, 200), (300, 129))),
    ("loss of each row", {"N": 300, "V": 129}),
    ("layers", {"N": 0, "V": 70}),
    *((name, {"S": s}) for name in ("heads", "causal heads", "a bias of all heads") for s in (1, 128, 130)),
]


@long_tests.values
@pytest.mark.parametrize(("name", "dims"), SIZES)
@pytest.mark.usefixtures("blocks")
def test_values_and_gradients_are_torchs_and_the_same_in_each_run(name: str, dims: dict[str, int]) -> None:
    module, arrays = compiled(name), arrays_of(name, dims)
    assert all(executable.program.loops for n, executable in module.executables.items() if n == "forward")
    found, dy = results(module, arrays)
    exact = wanted(name, arrays, dy)
    for x, value in exact.items():
        scale = max(float(np.abs(value).max(initial=0)), 1e-3)
        np.testing.assert_allclose(found[x], value, rtol=0, atol=4e-6 * scale, err_msg=x)
    for x, value in results(module, arrays)[0].items():
        assert value.tobytes() == found[x].tobytes(), x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("blocks")
def test_the_interpreter_agrees(name: str) -> None:
    module, dims = compiled(name), {"N": 200, "V": 90, "S": 140}
    program = module.forward.program
    arrays = arrays_of(name, dims)
    meant = interp.run_program(program, arrays, precision="f64")["y"]
    y, _ = module.forward(**arrays)
    np.testing.assert_allclose(np.asarray(y), meant, rtol=0, atol=4e-6 * max(np.abs(meant).max(), 1e-3))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.usefixtures("blocks")
def test_a_loss_of_16_bit_operands(dtype: str) -> None:
    """Gradients are added up over the blocks in f32 and rounded once; in f16 the backward makes the logits again."""
    types = {"x": f"{dtype}[300,16]", "w": f"{dtype}[200,16]", "t": "i64[300]"}
    graph = gradc.trace(CASES["loss"][0], **types)
    module = gradc.compile(graph, ["x", "w"], target="cuda-sim")
    loops = {name: executable.program.loops for name, executable in module.executables.items()}
    assert loops["forward"] and bool(loops["backward"]) == (dtype == "f16")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(n).astype(DTYPES[dtype].np) for n in ((300, 16), (200, 16)))
    t = rng.integers(0, 200, 300)
    y, residuals = module.forward(x=x, w=w, t=t)
    found = {**module.backward(residuals, np.asarray(1, x.dtype)), "y": y}
    leaves = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, w)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, torch.tensor(t))
    loss.backward()
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    for name, exact in (("y", loss.detach()), ("x", leaves[0].grad), ("w", leaves[1].grad)):
        error = np.abs(np.asarray(found[name]).astype(np.float64) - exact.numpy())
        # logits, their gradient and the result are rounded
        assert error.max() <= 4 * unit * np.abs(exact.numpy()).max(), name


@pytest.mark.usefixtures("blocks")
def test_nothing_is_written_behind_a_check_that_finds_something() -> None:
    module, arrays = compiled("loss"), arrays_of("loss", {"N": 300, "V": 129})
    arrays["t"][170] = 129
    out = np.full((), 7, np.float32)
    with pytest.raises(IndexOutOfRange, match="129"):
        module(**arrays, out={"y": out})
    assert out == 7
    arrays["t"][170] = 128
    y, exact = module(**arrays), wanted("loss", arrays, np.ones(()))["y"]
    np.testing.assert_allclose(np.asarray(y), exact, rtol=1e-5)


def test_the_logits_of_a_language_model_are_never_whole() -> None:
    """8192 tokens, 50257 words: no residual has a row of logits, and the workspace stays below 300 MB, in which the
    gradient of a block of logits lies where they did.
    """
    types = {"x": "bf16[8192,768]", "w": "bf16[50257,768]", "t": "i64[8192]"}
    graph = gradc.trace(CASES["loss"][0], **types)
    module = gradc.compile(graph, ["x", "w"], target="cuda", arch="sm_90")
    for executable in module.executables.values():
        program = executable.program
        plan = executable.native.bind({})
        assert plan.workspace <= 300e6
        blocks = [b for loop in program.loops for b in loop.blocks]
        assert {b.type.dtype.bits for b in blocks} <= {16}, "logits are rounded as written"
        assert len({b.slot for b in blocks if b.type.rank == 2}) <= 1, "the gradient lies where they did"
        kept = [b.type.shape for b in program.buffers if b.kind in ("input", "output", "temp")]
        assert max(int(np.prod(shape, dtype=np.int64)) for shape in kept) <= 50257 * 768
    actions = [a for step in module.forward.native.bind({}).actions for a in step]
    products = [a for a in actions if isinstance(a, Library)]
    results = [a.product.out.part.root for a in products if a.m * a.n * a.k > 1e9]
    assert len(results) == 3 * 4 and sum(a.product.add for a in products if a.m == 50257) == 3
    assert all(map(is_aligned, (a for a in products if a.m * a.n * a.k > 1e9))), "rows begin and end at 16 bytes"
    assert not [a for a in actions if isinstance(a, Launch) and a.function.startswith("gradc_matmul")]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_logits_that_are_reshaped_and_widened_are_never_whole(target: str) -> None:
    """As a model under autocast has them: rows of a batch, in f32 before the loss."""

    def loss(x: Any, w: Any, t: Any) -> Any:
        logits = ops.cast(ops.linear(x, w), "f32")
        return ops.cross_entropy(ops.reshape(logits, (8192, 50257)), ops.reshape(t, (8192,)))

    graph = gradc.trace(loss, x="bf16[8,1024,768]", w="bf16[50257,768]", t="i64[8,1024]")
    module = gradc.compile(graph, ["x", "w"], target=target, **({"arch": "sm_90"} if target == "cuda" else {}))
    for executable in module.executables.values():
        kept = [b.type.shape for b in executable.program.buffers]
        assert max(int(np.prod(shape, dtype=np.int64)) for shape in kept) <= 50257 * 768


def test_many_heads_are_not_gone_over_one_by_one() -> None:
    graph = gradc.trace(CASES["causal heads"][0], **dict.fromkeys("qkv", "f32[8,12,1024,64]"))
    module = gradc.compile(graph, list("qkv"), target="cuda", arch="sm_90")
    loops = [loop for executable in module.executables.values() for loop in executable.program.loops]
    assert {(loop.over, loop.rows[1], loop.by) for loop in loops} == {((), 8, 1)}, "twelve heads at a time"
    graph = gradc.trace(CASES["causal heads"][0], **dict.fromkeys("qkv", "f32[1,2,16384,64]"))
    assert gradc.compile(graph, [], target="cuda", arch="sm_90").forward.program.loops


@pytest.mark.usefixtures("blocks")
def test_sums_over_nothing_in_a_loop_whose_blocks_have_padded_rows() -> None:
    graph = gradc.trace(lambda x, v, w: ops.gelu(x @ v + 1.0) @ w, x="f32[N,K]", v="f32[K,129]", w="f32[129,5]")
    module = gradc.compile(graph, target="cuda-sim", hints={"N": 300, "K": 3})
    assert any(isinstance(step, Loop) for step in module.forward.program.steps)
    rng = np.random.default_rng(0)
    for k in (0, 3):
        shapes = {"x": (300, k), "v": (k, 129), "w": (129, 5)}
        arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
        exact = gradc.compile(graph, target="numpy")(**arrays)
        np.testing.assert_allclose(module(**arrays), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "cuda-sim"])
def test_a_donated_input_is_whole_until_the_last_block_has_read_it(target: str, request: Any) -> None:
    """Each block of rows of ``x @ x.T`` reads all of x, whose memory the result would take."""
    if target != "cpu":
        request.getfixturevalue("blocks")
    n = 3000 if target == "cpu" else 300
    graph = gradc.trace(lambda x: ops.sum(ops.relu(x @ x.T), 1)[:, None] * 0.01 + x, x=f"f32[{n},1]")
    module = gradc.compile(graph, target=target, donate=["x"])
    assert any(isinstance(step, Loop) for step in module.forward.program.steps)
    x = np.random.default_rng(0).standard_normal((n, 1)).astype(np.float32)
    exact = np.maximum(x.astype("f8") @ x.T.astype("f8"), 0).sum(1, keepdims=True) * 0.01 + x
    np.testing.assert_allclose(module(x=x.copy()), exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@long_tests.values
@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 2), ("f32", 2), ("bf16", 140)])
@pytest.mark.usefixtures("blocks")
def test_rows_that_end_within_a_thread_s_columns(dtype: str, rows: int) -> None:
    """Of an odd number of classes, in rows that begin at multiples of 16 bytes: all but the last are moved so."""
    types = {"x": f"{dtype}[{rows},8]", "w": f"{dtype}[8209,8]", "b": f"{dtype}[8209]", "t": f"i64[{rows}]"}
    graph = gradc.trace(lambda x, w, b, t: ops.linear_cross_entropy(x, w, t, b), **types)
    module = gradc.compile(graph, ["x", "w", "b"], target="cuda-sim")
    assert "gradc_get_ragged" in module.forward.source
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(node.shape).astype(DTYPES[dtype].np) for node, n in _floats(graph)}
    t = rng.integers(0, 8209, rows)
    t[:2] = 8208, 8207
    y, residuals = module.forward(**arrays, t=t)
    found = {**module.backward(residuals, np.asarray(1, y.dtype)), "y": y}
    leaves = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in arrays.items()}
    loss = F.cross_entropy(F.linear(*leaves.values()), torch.tensor(t))
    loss.backward()
    unit = {"bf16": 2.0**-8, "f32": 2.0**-21}[dtype]
    for name, exact in (("y", loss.detach()), *((n, x.grad) for n, x in leaves.items())):
        error = np.abs(np.asarray(found[name]).astype(np.float64) - exact.numpy())
        assert error.max() <= 4 * unit * np.abs(exact.numpy()).max(), name


def _floats(graph: gradc.Graph) -> list[tuple[Any, str]]:
    return [(node, n) for node, n in zip(graph.inputs, graph.input_names, strict=True) if node.dtype.is_float]
