"""Products of f16 and bf16 on a GPU: both operands are read as they are, added up in f32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.kernel import Call, alternatives
from gradc.ir.types import DTYPES

pytestmark = pytest.mark.optimised

UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Half the distance from 1 to the next number."""
N, STEP = "N", "every second column"
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
    "linear": (lambda x, w: ops.linear(x, w), lambda x, w: x @ w.T, {"x": (N, 24), "w": (36, 24)}),
    "batch of rows": (lambda x, w: ops.linear(x, w), lambda x, w: x @ w.T, {"x": (3, N, 24), "w": (36, 24)}),
    "batch": (lambda x, w: x @ w, lambda x, w: x @ w, {"x": (3, N, 24), "w": (3, 24, 36)}),
    "transposed": (lambda x, w: x.T @ w.T, lambda x, w: x.T @ w.T, {"x": (24, N), "w": (36, 24)}),
    STEP: (lambda x, w: x[:, ::2] @ w, lambda x, w: x[:, ::2] @ w, {"x": (N, 48), "w": (24, 36)}),
}
"""Ours, torch's, and shapes.  No library takes the last's left operand."""


def programs(module: gradc.Module) -> list[Any]:
    return [executable.program for executable in module.executables.values()]


def steps(program: Any) -> list[Any]:
    """Those of loops, too."""
    return [item for step in program.steps for item in alternatives(step)]


def read_wide(module: gradc.Module) -> list[str]:
    """Operands of products that are not narrow."""
    return [
        f"{program.name}: {operand}"
        for program in programs(module)
        for step in steps(program)
        if isinstance(step, Call)
        for operand in step.operands
        if program.buffer[operand.buffer].type.dtype.bits != 16
    ]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("numerics", ["real", "strict"])
def test_an_operand_is_no_copy(name: str, dtype: str, numerics: str) -> None:
    """Forward and both gradients are the products and nothing else: no f32 beside them; each is its sum in float64,
    rounded once.
    """
    torch = pytest.importorskip("torch")
    ours, theirs, shapes = CASES[name]
    types = {n: f"{dtype}[{','.join(map(str, shape))}]" for n, shape in shapes.items()}
    module = gradc.compile(gradc.trace(ours, **types), list(types), target="cuda-sim", numerics=numerics)
    assert not read_wide(module)
    if name != STEP and numerics == "real":  # the gradient of that is spread out; strictly, a product is turned apart
        for program in programs(module):
            assert all(isinstance(step, Call) for step in program.steps), program

    rng = np.random.default_rng(0)
    sizes = {n: [19 if d == N else d for d in shape] for n, shape in shapes.items()}
    arrays = {n: rng.standard_normal(shape).astype(DTYPES[dtype].np) for n, shape in sizes.items()}
    y, residuals = module.forward(**arrays)
    dy = rng.standard_normal(y.shape).astype(DTYPES[dtype].np)
    found = {**module.backward(residuals, dy), "y": y}

    leaves = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in arrays.items()}
    exact_y = theirs(**leaves)
    gradients = torch.autograd.grad(exact_y, list(leaves.values()), torch.tensor(dy.astype(np.float64)))
    exact = {**dict(zip(leaves, gradients, strict=True)), "y": exact_y.detach()}
    added = 2.0**-24 * 64 * 16  # 64 sums of at most 16
    for key, wanted in exact.items():
        assert found[key].dtype == DTYPES[dtype].np
        error = np.abs(found[key].astype(np.float64) - wanted.numpy())
        assert (error <= UNIT[dtype] * np.abs(wanted.numpy()) + added).all(), key


def test_an_operand_that_is_computed_is_stored_narrow() -> None:
    """int8 weights and a gradient behind an activation are rounded where they are made."""

    def layer(x, q, scale, b):  # type: ignore[no-untyped-def]
        return ops.gelu(ops.linear(x, ops.dequantize(q, scale, block=(1, 24), out_dtype="bf16"), b))

    types = {"x": "bf16[N,24]", "q": "i8[36,24]", "scale": "f32[36,1]", "b": "bf16[36]"}
    module = gradc.compile(gradc.trace(layer, **types), ["x", "b"], target="cuda-sim")
    assert not read_wide(module)


def test_operands_of_a_product_have_one_dtype() -> None:
    """A gradient that one product reads as bf16, and another beside f32 weights as f32."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        """With weights that are not rounded."""
        weights = ops.softmax(widened(q) @ widened(k).T, -1)
        return ops.cast(weights @ widened(v), "bf16")

    types = dict.fromkeys("qkv", "bf16[2,T,8]")
    module = gradc.compile(gradc.trace(attention, **types), list("qkv"), target="cuda-sim")
    read = [
        {program.buffer[o.buffer].type.dtype.name for o in step.operands}
        for program in programs(module)
        for step in steps(program)
        if isinstance(step, Call)
    ]
    assert {"bf16"} in read and {"f32"} in read and all(len(names) == 1 for names in read)


def widened(x: Any) -> Any:
    return ops.cast(x, "f32")


MOVED: dict[str, Callable[..., Any]] = {
    "padded": lambda x, w: ops.pad(widened(x), ((0, 0), (1, 1), (0, 0)))[0] @ widened(w),
    "axes joined": lambda x, w: ops.reshape(ops.transpose(widened(x), (1, 2, 0)), (6, 24)) @ widened(w),
    "an output": lambda x, w: [ops.transpose(widened(x)[0]), ops.transpose(widened(x)[0]) @ widened(w)],
}
"""What moves an operand after it was widened, that no strides show or that memory has as f32."""


@pytest.mark.parametrize("name", MOVED)
def test_an_operand_that_is_moved_after_it_was_widened(name: str) -> None:
    """Both operands are read as f32, or both as they are."""
    types = {"x": "bf16[4,6,6]", "w": "bf16[24,7]" if name == "axes joined" else "bf16[6,7]"}
    module = gradc.compile(gradc.trace(MOVED[name], **types), target="cuda-sim")
    for program in programs(module):
        for step in program.steps:
            if isinstance(step, Call):
                assert len({program.buffer[o.buffer].type.dtype for o in step.operands}) == 1
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal(s).astype(DTYPES["bf16"].np) for s in ((4, 6, 6), (24 if name == "axes joined" else 6, 7))
    )
    wide, right = x.astype(np.float64), w.astype(np.float64)
    left = {
        "padded": np.pad(wide[0], ((1, 1), (0, 0))),
        "axes joined": wide.transpose(1, 2, 0).reshape(6, 24),
        "an output": wide[0].T,
    }[name]
    found = module(x=x, w=w)
    product = list(found.values())[1] if name == "an output" else found
    np.testing.assert_allclose(product, left @ right, rtol=0, atol=2.0**-24 * 24 * 16)
