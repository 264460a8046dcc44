"""Python's integers, which Dynamo hands on as symbols: of either sign, as values and as widths of a border; and tensors
without axes where an axis is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

import torch.nn.functional as F  # noqa: E402
from torch_compiled import agree, compiled, fresh  # noqa: E402, F401


def over_numbers(function: Callable[[Any, int], Any], numbers: Sequence[int], **options: Any) -> None:
    """Values, gradients and what was written are eager mode's, for one number after another."""
    ours = compiled(function, **options)
    for number in numbers:
        found = []
        for call in (function, ours):
            x = torch.arange(20.0, dtype=torch.float64).reshape(5, 4).sin().requires_grad_()
            values = call(x, number)
            gradients = torch.autograd.grad([y for y in values if y.requires_grad], x, [torch.cos(y) for y in values])
            found.append((*values, *gradients))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x * n, x + n),
        lambda x, n: (x * (n * n - 3), x[0] + torch.arange(n, n + 4)),
        lambda x, n: (x * torch.tensor(n), torch.where(x > n, x, n * x)),
        lambda x, n: (x - n if n < 0 else x * n,),
    ],
    ids=["scalar", "arange", "tensor", "branch"],
)
def test_a_number_may_be_negative(function: Any, dynamic: bool | None) -> None:
    over_numbers(function, (2, 3, -1, 5, -4, 0), dynamic=dynamic, fallback="error", smallest_region=1)


def test_a_negative_number_beside_a_write() -> None:
    def scaled(x: Any, n: int) -> Any:
        return x.mul_(n) + 1

    ours = compiled(scaled, smallest_region=1)
    for number in (2, 3, -2):
        x, y = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        torch.testing.assert_close(ours(x, number), scaled(y, number))
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "width",
    [
        lambda n: (n - 4, 1),
        lambda n: (1, n - 4),
        lambda n: (n - 3, 3 - n),
        lambda n: (n - 3, n - 3, -1, n),
    ],
    ids=["low", "high", "shift", "both"],
)
def test_a_border_may_be_of_either_sign(width: Any, dynamic: bool | None) -> None:
    numbers = (3, 2, 5, 6, 4)
    over_numbers(lambda x, n: (F.pad(x, width(n), value=0.5),), numbers, dynamic=dynamic, fallback="error")


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_size_that_might_be_below_0(dynamic: bool | None) -> None:
    """What is cut by symbols, and its other uses."""

    def function(x: Any, n: int) -> tuple[Any, ...]:
        y = F.pad(x, (-n, -1)).sin()
        return F.pad(y, (n, 2)).cos(), torch.cat([y, y * 2], -1), y.sum(0)

    over_numbers(function, (2, 1, 0), dynamic=dynamic, fallback="error", smallest_region=1)


VECTOR, POINT = torch.arange(1.0, 5.0, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "gather": lambda x, i: x.gather(0, i),
    "scatter_add": lambda x, i: x.scatter_add(0, i, i.double() + 1),
    "amax": lambda x, i: x.scatter_reduce(0, i, i.double() + 3, "amax"),
    "add": lambda x, i: x.scatter(0, i, i.double() + 2, reduce="add"),
    "multiply": lambda x, i: x.scatter(-1, i, 2.0, reduce="multiply"),
    "softmax": lambda x, i: x.softmax(0) * 2,
    "log_softmax": lambda x, i: x.log_softmax(-1, dtype=torch.float64) + x,
    "flip": lambda x, i: x.flip(0) * i,
    "cosine_similarity": lambda x, i: F.cosine_similarity(x, x * 2, dim=0),
}


@pytest.mark.parametrize("name", NAMED)
def test_tensors_without_axes(name: str) -> None:
    def function(vector: Any, point: Any, place: Any) -> Any:
        named = NAMED[name]
        return named(point, place), named(point, place[None]), named(vector, place)

    recorded = name not in ("add", "multiply")  # of these eager mode has no gradient
    vector, point = VECTOR.clone().requires_grad_(recorded), POINT.clone().requires_grad_(recorded)
    place = torch.tensor(0)
    if name in ("flip", "cosine_similarity", "softmax", "log_softmax"):
        agree(lambda x, p, i: (NAMED[name](x, i), NAMED[name](p, i)), vector, point, place, whole=True)
    else:
        agree(function, vector, point, place, whole=True, smallest_region=1)
