"""Backward passes that torch calls with a batch of cotangents, under its old vmap and torch.func's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch.autograd.functional import hessian, jacobian  # noqa: E402
from torch_compiled import compiled, fresh, rand  # noqa: E402, F401

import gradc  # noqa: E402
import gradc.torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*performance drop")  # torch's, of an op that it calls in a loop

Call = Callable[[Any], Any]


def curve(x: Any, w: Any) -> Any:
    return (x @ w).tanh().exp() * x.sum()


def two(x: Any, w: Any) -> Any:
    return x.sin() * x.sum(), (x @ w).exp().cumsum(0)


def batch(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1, 4, 3).requires_grad_(), batch(2, 3, 2).requires_grad_()


def batched(function: Call, **options: Any) -> Any:
    x, w = leaves()
    return torch.autograd.grad(function(x, w), (x, w), batch(3, 5, 4, 2), is_grads_batched=True, **options), w


def one_batch(function: Call) -> Any:
    return batched(function)[0]


def with_a_graph(function: Call) -> Any:
    (dx, dw), w = batched(function, create_graph=True)
    return dx.detach(), dw.detach(), torch.autograd.grad(dx.sin().sum() + dw.cos().sum(), w)


def a_batch_of_a_batch(function: Call) -> Any:
    (dx, _), w = batched(function, create_graph=True)
    return torch.autograd.grad(dx, w, batch(4, 2, 5, 4, 3), is_grads_batched=True)


def jacobians(function: Call) -> Any:
    x, w = leaves()
    return [jacobian(function, (x, w), vectorize=True, create_graph=c) for c in (False, True)]


def by_forward_mode(function: Call) -> Any:
    x, w = leaves()
    return jacobian(function, (x, w), vectorize=True, strategy="forward-mode")


def hessians(function: Call) -> Any:
    x, w = leaves()
    return hessian(lambda x: (function(x, w) ** 2).sum(), x, vectorize=True)


def over(levels: int, function: Call, **options: Any) -> Any:
    x, w = leaves()
    y = function(x, w)

    def backward(v: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True, **options)[0]

    mapped = torch.func.vmap(backward)
    for _ in range(levels - 1):
        mapped = torch.func.vmap(mapped, in_dims=1)
    gradients = mapped(batch(3, *(5, 3)[:levels], 4, 2))
    return (gradients.detach(), torch.autograd.grad(gradients.sin().sum(), w)) if options else gradients


CALLS: dict[str, Call] = {
    "is_grads_batched": one_batch,
    "create_graph": with_a_graph,
    "a batch of a batch": a_batch_of_a_batch,
    "jacobian": jacobians,
    "hessian": hessians,
    "vmap": lambda function: over(1, function),
    "vmap in vmap": lambda function: over(2, function),
    "vmap, create_graph": lambda function: over(1, function, create_graph=True),
}
OF_TORCH: dict[str, Call] = {  # runs in torch
    "forward mode": by_forward_mode,
    "jacrev": lambda function: torch.func.jacrev(function, argnums=(0, 1))(*leaves()),
    "jacfwd": lambda function: torch.func.jacfwd(function)(*leaves()),
    "func.hessian": lambda function: torch.func.hessian(lambda x, w: function(x, w).sum())(*leaves()),
    "func.vjp": lambda function: torch.func.vjp(function, *leaves())[1](batch(3, 4, 2)),
    "func.vmap": lambda function: torch.func.vmap(function, in_dims=(0, None))(batch(5, 6, 4, 3), leaves()[1]),
}


@pytest.mark.parametrize("call", [*CALLS.values(), *OF_TORCH.values()], ids=[*CALLS, *OF_TORCH])
def test_a_compiled_function_is_eagers(call: Call) -> None:
    torch.testing.assert_close(call(compiled(curve, fallback="error")), call(curve), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_module_is_eagers(call: Call) -> None:
    layer = gradc.torch.Module(
        lambda x, w: gradc.ops.exp(gradc.ops.tanh(x @ w)) * gradc.ops.sum(x), options={"target": "numpy"}
    )
    torch.testing.assert_close(call(layer), call(curve), rtol=1e-9, atol=1e-11)


def test_some_outputs_some_inputs() -> None:
    def call(function: Call) -> Any:
        x, w = leaves()
        first, second = function(x, w)
        v, u = batch(3, 5, 4, 3), batch(4, 5, 4, 2)
        options = {"is_grads_batched": True, "retain_graph": True, "allow_unused": True}
        return (
            torch.autograd.grad((first, second), (x, w), (v, u), **options),
            torch.autograd.grad(first, (x, w), v, **options),  # no gradient of w: None
            torch.autograd.grad(second, w, u, **options),
        )

    got, want = call(compiled(two, fallback="error")), call(two)
    assert got[1][1] is want[1][1] is None
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_sparse_gradient_is_dense_in_a_batch() -> None:
    """Eager mode has no batch of sparse gradients: the same with a dense table is what it would be."""
    table, rows = rand(7, 3), torch.tensor([1, 2, 2])

    def looked_up(sparse: bool) -> Call:
        return lambda table: torch.nn.functional.embedding(rows, table, sparse=sparse).sin()

    found = [
        torch.autograd.grad(function(table), table, batch(3, 5, 3, 3), is_grads_batched=True)[0]
        for function in (compiled(looked_up(True), fallback="error", smallest_region=1), looked_up(False))
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_machine_code() -> None:
    x, w = leaves()
    y = torch.compile(curve, backend="gradc")(x, w)
    got = torch.autograd.grad(y, (x, w), batch(3, 5, 4, 2), is_grads_batched=True)
    torch.testing.assert_close(got, one_batch(curve), rtol=1e-9, atol=1e-11)


def test_a_transform_that_differentiates_a_backward_is_one_error() -> None:
    x, w = leaves()
    y = compiled(curve, fallback="error")(x, w)
    with pytest.raises(gradc.errors.Unsupported, match="do not reach into gradc"):
        torch.func.grad(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0].sum())(batch(3, 4, 2))
