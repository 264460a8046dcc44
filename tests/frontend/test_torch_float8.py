"""Casts to floats of 8 bits are those of the torch that runs, also of what the format does not hold."""

from __future__ import annotations

import functools
import math
from typing import Any

import long_tests
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


def first_gradient(y: Any, x: Any, upstream: Any) -> Any:
    return torch.autograd.grad(y, x, upstream.to(y.dtype))[0]


CASTS = {
    "there_and_back": lambda x, format: x.to(format).to(x.dtype),
    "a_result": lambda x, format: x.to(format),
    "to_f64": lambda x, format: (x * 2).to(format).double() * 1.3,
    "to_bf16": lambda x, format: (x * 2).to(format).bfloat16() * 1.5,
    "type_as": lambda x, format: x.type_as(x.detach().to(format)).type_as(x),
    "copied_over": lambda x, format: x.detach().to(format).clone().copy_(x).float(),
    "moved": lambda x, format: x.to(format).view(2, -1).t().float(),
    "chained": lambda x, format: x.to(format).half().to(torch.float8_e5m2).float(),
}


def check_gradients(name: str, format: torch.dtype, source: torch.dtype, compile: Any) -> None:
    upstream = values(torch.float64)

    def run(function: Any) -> Any:
        x = torch.linspace(-3, 3, len(upstream), dtype=source).requires_grad_()
        y = function(x)
        return first_gradient(y, x, upstream.reshape(y.shape))

    def function(x: Any) -> Any:
        return CASTS[name](x, format)

    got, want = run(compile(function)), run(function)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@long_tests.values
@pytest.mark.parametrize("format", [*FORMATS, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_a_gradient_is_rounded_as_eagers(name: str, format: torch.dtype) -> None:
    """A cotangent of a float of 8 bits is one itself."""
    fallback = "error" if format in FORMATS else "torch"
    for source in SOURCES[:4]:
        of_16_bits = source.itemsize == 2 or name in ("to_bf16", "chained")
        for dynamic in (False, True):
            torch._dynamo.reset()
            numerics = "real" if dynamic and not of_16_bits else "strict"
            options = {"smallest_region": 1, "numerics": numerics, "fallback": fallback}
            check_gradients(name, format, source, functools.partial(compiled, dynamic=dynamic, **options))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_machine_code_rounds_gradients(format: torch.dtype) -> None:
    options = {"smallest_region": 1, "fallback": "error"}
    check_gradients(
        "there_and_back", format, torch.float32, lambda f: torch.compile(f, backend="gradc", options=options)
    )


@pytest.mark.parametrize("format", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_a_gradient_is_rounded_to_16_bits(name: str, format: torch.dtype) -> None:
    for source in (torch.float64, torch.float32):
        torch._dynamo.reset()
        options = {"smallest_region": 1, "numerics": "strict", "fallback": "error"}
        check_gradients(name, format, source, functools.partial(compiled, **options))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_an_input_of_8_bits_has_a_gradient_of_8_bits(format: torch.dtype) -> None:
    upstream = values(torch.float32)

    def run(function: Any) -> Any:
        x = torch.linspace(0.5, 3, len(upstream)).to(format).requires_grad_()
        return first_gradient(function(x), x, upstream)

    def function(x: Any) -> Any:
        return x.float() * 3

    got, want = run(compiled(function, fallback="error", smallest_region=1)), run(function)
    assert got.dtype is want.dtype is format and torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_second_gradients_are_rounded_too(format: torch.dtype) -> None:
    def function(x: Any) -> Any:
        return (x.to(format).float() ** 3).sum()

    def run(function: Any) -> Any:
        x = torch.linspace(0.3, 3.7, 11).requires_grad_()
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        return first, torch.autograd.grad((first * torch.linspace(-1, 2, 11)).sum(), x)[0]

    for got, want in zip(run(compiled(function, fallback="error", smallest_region=1)), run(function), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_an_exported_cast_has_eagers_gradient(format: torch.dtype) -> None:
    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(format).float() * weights).sum()

    weights = values(torch.float32)
    weights = weights[weights.isfinite() & (weights.abs() < 400)]
    x = torch.linspace(-3, 3, len(weights)).requires_grad_()
    module = gradc.compile(gradc.from_torch(Cast(), (x,)), wrt=["x"], target="numpy")
    _, grads = module.value_and_grad({"x": x})
    (want,) = torch.autograd.grad(Cast()(x), x)
    torch.testing.assert_close(torch.as_tensor(grads["x"]), want, rtol=0, atol=0)
