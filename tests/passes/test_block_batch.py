"""Loops over the first axis of a batch on a GPU: in the simulator's checking mode, against torch in f64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.types import DTYPES
from gradc.passes.row_blocking import block_batch, wide_products

torch = pytest.importorskip("torch")


def heads(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ops.scaled_dot_product_attention(q, k, v, **options)


def beside(q: Any, k: Any, v: Any) -> Any:
    """Heads lie beside features, in operands and in the result."""
    q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    return ops.transpose(heads(q, k, v), (0, 2, 1, 3))


def torchs(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


Case = tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...]]
CASES: dict[str, Case] = {
    "heads": (heads, torchs, (5, 3, 70, 8)),
    "one position more": (heads, torchs, (3, 2, 65, 8)),
    "causal": (lambda *x: heads(*x, is_causal=True), lambda *x: torchs(*x, True), (3, 2, 67, 8)),
    "beside features": (
        beside,
        lambda *x: torchs(*(a.transpose(1, 2) for a in x)).transpose(1, 2),
        (3, 70, 2, 8),
    ),
}


OLD = "T4"
"""A device without a kernel for tensor cores, which would take 16 bits."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of one position of three heads, and of two of two shorter ones."""
    monkeypatch.setattr(wide_products, "LAUNCH_ELEMENTS", 1)
    monkeypatch.setattr(block_batch, "BATCH_ELEMENTS", 10_000)
    monkeypatch.setenv("GRADC_SIM_CHECK", "1")
    monkeypatch.setenv("GRADC_CACHE", "0")
    yield


def compiled(name: str, dtype: str = "f32", **options: Any) -> gradc.Module:
    ours, _, shape = CASES[name]
    types = dict.fromkeys("qkv", f"{dtype}[{','.join(map(str, shape))}]")
    return gradc.compile(
        gradc.trace(lambda q, k, v: ours(q, k, v), **types), list("qkv"), target="cuda-sim", device=OLD, **options
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.usefixtures("small")
def test_values_and_gradients_are_torchs_and_the_same_in_each_run(name: str, dtype: str) -> None:
    module, rng = compiled(name, dtype), np.random.default_rng(0)
    for executable in module.executables.values():
        (loop,) = executable.program.loops
        assert loop.rows[1] == CASES[name][2][0] and loop.by in (1, 2) and loop.over == loop.cols == ()
        assert len(loop.steps) >= 2 and all(len(b.type.shape) == 4 for b in loop.blocks)
    given = {n: rng.standard_normal(CASES[name][2]).astype(DTYPES[dtype].np) for n in "qkv"}
    y, residuals = module.forward(**given)
    dy = rng.standard_normal(y.shape).astype(DTYPES[dtype].np)
    found = {"y": y, **module.backward(residuals, dy)}
    leaves = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in given.items()}
    exact = CASES[name][1](*leaves.values())
    wanted = torch.autograd.grad(exact, [*leaves.values()], torch.tensor(dy.astype(np.float64)))
    unit = {"f32": 2.0**-24, "bf16": 2.0**-8}[dtype]
    for n, value in (("y", exact.detach()), *zip("qkv", wanted, strict=True)):
        error = np.abs(np.asarray(found[n]).astype(np.float64) - value.numpy())
        # products of 70 terms in f32; weights, slopes and the result are rounded to bf16
        assert error.max() <= (40 if dtype == "f32" else 4) * unit * float(value.abs().max()), n
    again = {"y": module.forward(**given)[0], **module.backward(residuals, dy)}
    assert all(np.asarray(again[n]).tobytes() == np.asarray(a).tobytes() for n, a in found.items())
    meant = interp.run_program(module.forward.program, given)["y"]
    a, b = (np.asarray(x).astype(np.float64) for x in (y, meant))
    assert np.abs(a - b).max() <= 2 * (40 if dtype == "f32" else 1) * unit * np.abs(b).max()


@pytest.mark.parametrize("name", ["heads", "causal"])
@pytest.mark.usefixtures("small")
def test_strict_numerics_make_no_loop(name: str) -> None:
    module = compiled(name, numerics="strict")
    assert not any(executable.program.loops for executable in module.executables.values())


def test_the_workspace_of_attention_is_that_of_some_heads() -> None:
    """A block of GPT-2 at 8 x 1024: 12 heads of one position at a time; none where tensor cores take it."""
    each, of_library = 12 * 1024 * 1024, 32 << 20

    def spaces(device: str) -> dict[str, int]:
        types = dict.fromkeys("qkv", "bf16[8,12,1024,64]")
        graph = gradc.trace(lambda q, k, v: heads(q, k, v, is_causal=True), **types)
        module = gradc.compile(graph, list("qkv"), target="cuda", device=device)
        return {n: e.native.bind({}).workspace for n, e in module.executables.items()}

    old, new = spaces(OLD), spaces("H100")
    assert old["forward"] - of_library <= 2 * each + 8 * 12 * 1024 * 64 * 4 + 4096
    assert old["backward"] - of_library <= (4 + 2 + 2) * each + 8 * 12 * 1024 * 4 + 4096
    of_rows = (
        8 * 12 * 1024 * 4
    )  # between the two loops: delta, what is subtracted, and what multiplies in place of a division
    assert new["forward"] <= 4096 and new["backward"] <= 3 * of_rows + 4096
    small = gradc.compile(gradc.trace(heads, **dict.fromkeys("qkv", "bf16[2,12,512,64]")), target="cuda", device=OLD)
    assert not small.forward.program.loops


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (2, 0, 5, 8), (0, 3, 5, 8)])
def test_empty_axes_of_symbolic_sizes(shape: tuple[int, ...]) -> None:
    types = dict.fromkeys("qkv", "bf16[B,H,S,8]")
    module = gradc.compile(gradc.trace(lambda q, k, v: heads(q, k, v), **types), list("qkv"), target="cuda-sim")
    given = np.zeros(shape, DTYPES["bf16"].np)
    y, residuals = module.forward(q=given, k=given, v=given)
    assert y.shape == shape
    assert all(g.shape == shape for g in module.backward(residuals, y).as_dict().values())
