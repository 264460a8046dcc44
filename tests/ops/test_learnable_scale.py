"""The fact gradc exists for: a learnable per-channel scale through dequantize -> embedding has the gradient eager torch
gives, and nothing in the backward program is a float table.
"""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.dims import symbol

FLOATS = {"f16", "bf16", "f32", "f64"}


def module(padding_idx: int | None = None, spelling: str = "op") -> gradc.Module:
    def bag(tokens, table, scale):  # type: ignore[no-untyped-def]
        if spelling == "op":
            weight = ops.dequantize(table, scale, block=(1, 8))
        elif spelling == "by hand":
            weight = table.astype("f32") * scale
        else:
            weight = (scale.T * table.T.astype("f32")).T
        return ops.embedding(tokens, weight, padding_idx=padding_idx)

    return gradc.compile(gradc.trace(bag, tokens="i64[N]", table="i8[V,8]", scale="f32[V,1]"), wrt=["scale"])


@pytest.mark.parametrize("spelling", ["op", "by hand", "transposed"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_no_float_table_exists_anywhere(spelling: str, padding_idx: int | None) -> None:
    compiled = module(padding_idx, spelling)
    for program in (compiled.forward.program, compiled.backward.program):
        tables = [b for b in program.buffers if b.type.dtype.name in FLOATS and b.type.count == symbol("V") * 8]
        assert not tables, f"{tables} in\n{program}"


@pytest.mark.parametrize("rows", [0, 1, 7, 500])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_the_gradient_is_eager_torchs(rows: int, padding_idx: int | None) -> None:
    torch = pytest.importorskip("torch", reason="gradients against torch")
    rng = np.random.default_rng(rows)
    table = rng.integers(-127, 128, (50, 8)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (50, 1)).astype(np.float32)
    tokens = rng.integers(0, 50, rows)
    dy = rng.standard_normal((rows, 8)).astype(np.float32)
    compiled = module(padding_idx)
    y, residuals = compiled.forward(tokens=tokens, table=table, scale=scale)
    got = compiled.backward(residuals, dy)["scale"]
    learned = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(table).double() * learned
    eager = torch.nn.functional.embedding(torch.tensor(tokens), weight, padding_idx=padding_idx)
    eager.backward(torch.tensor(dy).double())
    np.testing.assert_allclose(y, eager.detach().numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got, learned.grad.numpy(), rtol=2e-6, atol=2e-5)


GRANULARITY = {
    "row": ("f32[V,1]", (1, 8)),
    "column": ("f32[1,8]", (symbol("V"), 1)),
    "tensor": ("f32[1,1]", (symbol("V"), 8)),
    "group": ("f32[V,2]", (1, 4)),
}


@pytest.mark.parametrize("granularity", GRANULARITY)
@pytest.mark.parametrize("by_freq", [False, True], ids=["", "scale_grad_by_freq"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_every_granularity_and_option(granularity: str, by_freq: bool, padding_idx: int | None) -> None:
    torch = pytest.importorskip("torch", reason="gradients against torch")
    type_, block = GRANULARITY[granularity]
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": by_freq}
    graph = gradc.trace(
        lambda i, q, s: ops.embedding(i, ops.dequantize(q, s, block=block), **options), i="i64[N]", q="i8[V,8]", s=type_
    )
    compiled = gradc.compile(graph, wrt=["s"])
    for program in (compiled.forward.program, compiled.backward.program):
        assert not [b for b in program.buffers if b.type.dtype.name in FLOATS and b.type.count == symbol("V") * 8], str(
            program
        )
    rng = np.random.default_rng(2)
    arrays = {"i": rng.integers(0, 12, 40), "q": rng.integers(-127, 128, (30, 8)).astype(np.int8)}
    arrays["s"] = rng.uniform(0.01, 0.1, graph.input("s").type.concrete({"V": 30})).astype(np.float32)
    _, residuals = compiled.forward(**arrays)
    dy = rng.standard_normal((40, 8)).astype(np.float32)
    scale = torch.tensor(arrays["s"], dtype=torch.float64, requires_grad=True)
    per_element = scale.repeat_interleave(30 // scale.shape[0], 0).repeat_interleave(8 // scale.shape[1], 1)
    weight = torch.tensor(arrays["q"]).double() * per_element
    torch.nn.functional.embedding(torch.tensor(arrays["i"]), weight, **options).backward(torch.tensor(dy).double())
    want = scale.grad.numpy()
    got = compiled.backward(residuals, dy)["s"]
    assert np.abs(got - want).max() <= 4 * 2.0**-24 * np.abs(want).max()


def test_the_programs_interpreter_agrees() -> None:
    compiled = module()
    rng = np.random.default_rng(1)
    arrays = {
        "tokens": rng.integers(0, 9, 30),
        "table": rng.integers(-9, 9, (9, 8)).astype(np.int8),
        "d.y": rng.standard_normal((30, 8)).astype(np.float32),
    }
    want = interp.run(compiled.backward.program, arrays)["d.scale"]
    np.testing.assert_allclose(compiled.backward.run(**arrays)["d.scale"], want, rtol=1e-6)


def test_one_module_serves_three_sizes() -> None:
    compiled = module()
    library = compiled.backward.native.library
    for rows, vocabulary in ((3, 5), (1000, 70), (17, 4000)):
        tokens = np.arange(rows) % vocabulary
        table = np.ones((vocabulary, 8), np.int8)
        _, residuals = compiled.forward(tokens=tokens, table=table, scale=np.ones((vocabulary, 1), np.float32))
        gradient = compiled.backward(residuals, np.ones((rows, 8), np.float32))["scale"]
        np.testing.assert_array_equal(gradient[:, 0], 8 * np.bincount(tokens, minlength=vocabulary))
    assert compiled.backward.native.library is library
