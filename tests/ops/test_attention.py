"""Attention of 16-bit operands: how far it is from the same in f64, beside torch's fused kernel, which rounds where
ours does; and that its products multiply 16-bit operands.
"""

from __future__ import annotations

import functools
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.kernel import Call, alternatives
from gradc.ir.types import DTYPES

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

SHAPE = (2, 3, 128, 32)
NAMES = ("q", "k", "v")
WAYS = {
    "cpu": {"target": "cpu"},
    "cpu, strict": {"target": "cpu", "numerics": "strict"},
    "cuda": {"target": "cuda-sim"},
    "cuda, strict": {"target": "cuda-sim", "numerics": "strict"},
}
SAME = 1.02
"""Two computations that round in the same places differ in which way each rounding falls."""


@functools.cache
def given(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SHAPE).astype(DTYPES[dtype].np) for _ in range(4)]


@functools.cache
def torchs(dtype: str, computed: Any, causal: bool, backend: Any) -> list[np.ndarray]:
    """y and the gradients of q, k and v of values of one dtype, computed in another."""
    *leaves, dy = (torch.tensor(x.astype(np.float64)).to(computed) for x in given(dtype))
    leaves = [x.requires_grad_() for x in leaves]
    with sdpa_kernel(backend):
        y = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    y.backward(dy)
    return [x.detach().double().numpy() for x in (y, *(x.grad for x in leaves))]


def graph_of(dtype: str, causal: bool) -> gradc.Graph:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return ops.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return gradc.trace(attention, **dict.fromkeys(NAMES, f"{dtype}[{','.join(map(str, SHAPE))}]"))


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@long_tests.values
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("way", WAYS)
def test_the_error_is_no_larger_than_torchs(way: str, dtype: str, causal: bool) -> None:
    """Value and gradients, by the root of the mean square of the error."""
    module = gradc.compile(graph_of(dtype, causal), NAMES, **WAYS[way])
    *arrays, dy = given(dtype)
    y, residuals = module.forward(**dict(zip(NAMES, arrays, strict=True)))
    gradients = module.backward(residuals, dy)
    exact = torchs(dtype, torch.float64, causal, SDPBackend.MATH)
    theirs = torchs(dtype, getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[dtype]), causal,
                    SDPBackend.FLASH_ATTENTION)  # fmt: skip
    for name, ours, wanted, other in zip(
        ("y", *NAMES), (y, *(gradients[n] for n in NAMES)), exact, theirs, strict=True
    ):
        assert ours.dtype == DTYPES[dtype].np
        assert rms(ours.astype(np.float64) - wanted) <= SAME * rms(other - wanted), name


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_interpreter_rounds_where_strict_does(dtype: str) -> None:
    """A graph's meaning, computed in f64 between the roundings that it says."""
    graph = graph_of(dtype, True)
    arrays = dict(zip(NAMES, given(dtype), strict=False))
    meant = interp.run(graph, arrays)["y"].astype(np.float64)
    found = gradc.compile(graph, [], target="cuda-sim", numerics="strict")(**arrays).astype(np.float64)
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    # a last place of the result where f32 sums fall on the other side, and of an exponential of a row
    assert (np.abs(found - meant) <= 2 * unit * np.abs(meant) + unit * np.abs(meant).max() / 16).all()
    assert rms(found - meant) <= 0.1 * unit * rms(meant)


@pytest.mark.parametrize("options", [{}, {"enable_gqa": True}, {"attn_mask": "f32[5,9]"}])
def test_every_product_reads_16_bits(options: dict[str, Any]) -> None:
    types = {"q": "bf16[2,4,5,8]", "k": "bf16[2,4,9,8]", "v": "bf16[2,4,9,6]"}
    if "enable_gqa" in options:
        types |= {name: types[name].replace("[2,4", "[2,2") for name in ("k", "v")}
    types |= {"mask": options["attn_mask"]} if "attn_mask" in options else {}
    given = {name: value for name, value in options.items() if name != "attn_mask"}

    def attention(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return ops.scaled_dot_product_attention(q, k, v, mask, **given)

    module = gradc.compile(gradc.trace(attention, **types), NAMES, target="cuda-sim")
    programs = [executable.program for executable in module.executables.values()]
    read = [
        program.buffer[operand.buffer].type.dtype.name
        for program in programs
        for step in program.steps
        for item in alternatives(step)
        if isinstance(item, Call)
        for operand in item.operands
    ]
    # scores are computed again by the backward, and in it, with the slopes of the weights, by each of its two loops
    loops = sum(loop.tile is not None for program in programs for loop in program.loops)
    assert loops == (0 if "enable_gqa" in options else 3)  # so few rows of two heads are not merged to those of one key
    assert len(read) == 2 * (9 if loops else 6) and set(read) == {"bf16"}
