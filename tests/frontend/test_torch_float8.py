"""Casts to floats of 8 bits are those of the torch that runs, also of what the format does not hold."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc.torch  # noqa: E402

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
SOURCES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
EDGES = (
    0.0, 1.5, 3.3, 240, 447, 448, 463.99999, 464, 464.00001, 465, 479, 480, 1e4, 57344, 61439, 61439.9999999, 61440,
    61441, 65504, 1e30, 1e300, 1e-12, 0.0136, 2.0**-150, 2.0**-128, 2.0**-127, 1.0001 * 2.0**-127, 1.25 * 2.0**-127,
    1.5 * 2.0**-127, 1.75 * 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, math.inf, math.nan,
)  # fmt: skip


def values(dtype: torch.dtype) -> torch.Tensor:
    line = torch.tensor([*EDGES, *(-x for x in EDGES)], dtype=torch.float64)
    return (line[line.abs() < 1e9] if dtype is torch.int64 else line).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """A NaN's own bits say nothing."""
    return torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8))


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_cast_is_eagers(format: torch.dtype, source: torch.dtype) -> None:
    def casts(x: Any, zeros: Any) -> Any:
        return x.to(format), zeros.clone().copy_(x), x.type_as(zeros), zeros.clone().fill_(x[-2])

    x = values(source)
    zeros = torch.ones(len(x)).to(format)
    wanted = casts(x, zeros)
    for got in (
        compiled(casts, fallback="error", smallest_region=1)(x, zeros),
        torch.compile(casts, backend="gradc", options={"fallback": "error", "smallest_region": 1})(x, zeros),
    ):
        for ours, eagers in zip(got, wanted, strict=True):
            assert ours.dtype is format and torch.equal(bits(ours), bits(eagers))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_an_exported_cast_is_eagers(format: torch.dtype) -> None:
    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(format).float()

    x = values(torch.float32)
    y = gradc.compile(gradc.from_torch(Cast(), (x,)), target="numpy")(x=x)
    torch.testing.assert_close(torch.as_tensor(y), Cast()(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", [*FORMATS, torch.bfloat16], ids=str)
def test_a_result_that_depends_on_no_input(format: torch.dtype) -> None:
    def constant(x: Any) -> Any:
        return torch.full((3,), 1.5).to(format), x * 2

    ours = compiled(constant, fallback="error", smallest_region=1)
    for got, want in zip(ours(torch.ones(2)), constant(torch.ones(2)), strict=True):
        assert got.dtype is want.dtype and torch.equal(got.float(), want.float())
    got = torch.compile(lambda: torch.full((3,), 1.5).to(format), backend="gradc")()
    assert got.dtype is format and torch.equal(got.float(), torch.full((3,), 1.5).to(format).float())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_gradient_of_what_is_finite_passes_through(format: torch.dtype) -> None:
    def function(x: Any) -> Any:
        return x.to(format).float()

    x = values(torch.float32)
    x = x[x.isfinite()].requires_grad_()
    upstream = torch.arange(len(x), dtype=torch.float32) % 7
    if format is torch.float8_e8m0fnu:
        upstream = upstream.exp2()  # what the format holds: eager mode casts cotangents of its values, too
    ours = compiled(function, fallback="error", smallest_region=1)(x)
    got, want = (torch.autograd.grad(y, x, upstream)[0] for y in (ours, function(x)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
