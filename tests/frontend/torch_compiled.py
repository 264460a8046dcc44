"""Functions compiled by the backend gradc, and how they are compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradc.torch

if "gradc" not in torch._dynamo.list_backends(exclude_tags=()):  # as the entry point of an installed package does
    torch._dynamo.register_backend(gradc.torch.backend, name="gradc")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    gradc.torch.report().clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(function: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """By default with what runs the ops' meaning in place of machine code: nothing to wait for."""
    return torch.compile(function, backend="gradc", dynamic=dynamic, options={"target": "numpy", **options})


def agree(
    function: Callable[..., Any], *inputs: torch.Tensor, whole: bool = False, equal_nan: bool = False, **options: Any
) -> Any:
    """Values and gradients of a function and of its compiled twin, on their own copies of the inputs.

    :param equal_nan: whether values of the function may be NaN.
    """
    options |= {"fallback": "error"} if whole else {}
    found = []
    for call in (function, compiled(function, **options)):
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        torch.manual_seed(1)
        outputs = call(*given)
        each = list(outputs) if isinstance(outputs, tuple) else [outputs]
        recorded = [y for y in each if isinstance(y, torch.Tensor) and y.requires_grad]
        wanted = [x for x in given if x.requires_grad]
        grads = (
            torch.autograd.grad(recorded, wanted, [torch.ones_like(y) * 0.5 for y in recorded], allow_unused=True)
            if recorded
            else []
        )
        found.append((each, [y.requires_grad for y in each if isinstance(y, torch.Tensor)], grads, given))
    eager, ours = found
    assert ours[1] == eager[1], "which outputs require grad"
    for got, want in zip([*ours[0], *ours[2], *ours[3]], [*eager[0], *eager[2], *eager[3]], strict=True):
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, equal_nan=equal_nan)
        else:
            assert got == want
    return ours[0]


def rand(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)
