"""Sizes of two forms that a guard equates: halves of an axis, ``N//2`` and ``N - N//2``, whose gradients are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch_compiled import fresh  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc import ops  # noqa: E402


def halves(x: Any) -> tuple[Any, Any]:
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


def into_bins(a: Any, b: Any) -> Any:
    return torch.zeros_like(a).scatter_add(1, b.argsort(1), b)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "glu": lambda x: F.glu(x, -1),
    "mul": lambda x: torch.mul(*halves(x)),
    "broadcast": lambda x: halves(x)[0][:1] * halves(x)[1] + halves(x)[0],
    "where": lambda x: torch.where(halves(x)[0] > 0, *halves(x)),
    "cat": lambda x: torch.cat(halves(x), 0) * 2,
    "stack": lambda x: torch.stack(halves(x)).sum(0),
    "rotated": lambda x: x * 2 + torch.cat([-halves(x)[1], halves(x)[0]], -1),
    "matmul": lambda x: halves(x)[0] @ halves(x)[1].t(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", *halves(x)),
    "linear": lambda x: F.linear(halves(x)[0], halves(x)[1][:2].contiguous()),
    "addmm": lambda x: torch.addmm(x[:, :2], halves(x)[0], halves(x)[1].t() @ x[:, :2]),
    "mse_loss": lambda x: F.mse_loss(*halves(x)),
    "cross_entropy": lambda x: F.cross_entropy(halves(x)[0], halves(x)[1].softmax(-1)),
    "cosine_similarity": lambda x: F.cosine_similarity(*halves(x)),
    "layer_norm": lambda x: F.layer_norm(halves(x)[0], (x.shape[1] // 2,), halves(x)[1][0], halves(x)[1][1]),
    "scatter_add": lambda x: into_bins(*halves(x)),
    "cumsum": lambda x: halves(x)[0].cumsum(1) * halves(x)[1],
}


def check(function: Any, target: str) -> None:
    options = {"target": target, "smallest_region": 1, "fallback": "error"}
    compiled = torch.compile(function, backend="gradc", dynamic=True, options=options)
    for rows, columns in ((4, 6), (5, 8)):
        x = torch.randn(rows, columns, dtype=torch.float64).requires_grad_()
        got, want = compiled(x), function(x)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        found, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_two_halves(name: str) -> None:
    check(PROGRAMS[name], "numpy")


@pytest.mark.parametrize("name", ["glu", "broadcast", "matmul"])
def test_machine_code(name: str) -> None:
    check(PROGRAMS[name], "cpu")


def test_chunks_that_torch_runs() -> None:
    def function(x: Any) -> Any:
        a, b, c = x.chunk(3, 1)
        return b * a + c

    x = torch.randn(2, 6, dtype=torch.float64).requires_grad_()
    got, want = torch.compile(function, backend="gradc", dynamic=True)(x), function(x)
    found, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_sizes_that_a_function_of_ops_assumes_equal() -> None:
    def loss(x: Any, y: Any) -> Any:
        gradc.assume("N == M")
        return ops.sum(x * y) + ops.sum(ops.reshape(x, (1, -1)) * y) + ops.sum(ops.matmul(x, y))

    module = gradc.compile(gradc.trace(loss, x="f64[N]", y="f64[M]"), wrt=["x", "y"], target="numpy")
    x, y = np.linspace(1, 2, 5), np.linspace(-1, 3, 5)
    _, grads = module.value_and_grad({"x": x, "y": y})
    np.testing.assert_allclose(grads["x"], 3 * y, rtol=1e-14)
    np.testing.assert_allclose(grads["y"], 3 * x, rtol=1e-14)
