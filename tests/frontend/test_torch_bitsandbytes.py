"""Products with bitsandbytes' weights of four bits: its op, with or without the package, and its layers."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradc.torch needs PyTorch")

from torch import nn  # noqa: E402
from torch_compiled import compiled, fresh  # noqa: E402, F401

import gradc.torch  # noqa: E402
from gradc import interp  # noqa: E402
from gradc.torch import table  # noqa: E402

FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
BOOKS = {
    "fp4": FP4 + [-x for x in FP4],
    "nf4": [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
}
"""Dettmers et al. 2023, appendix E, and the documentation of bitsandbytes."""
SCHEMA = (
    "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None,"
    " Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor"
)


def spread(scales: Any, size: int, count: int) -> Any:
    return scales.repeat_interleave(size)[:count]


def weight(packed: Any, shape: Any, absmax: Any, size: int, kind: str, nested: Any = ()) -> Any:
    """What the codes mean, in f64: bytes hold two of them, the first in the high bits."""
    if nested:
        codes, book, offset = nested
        absmax = book.double()[codes.long()] * spread(absmax.double(), 256, len(codes)) + offset.double()
    flat = packed.reshape(-1)
    codes = torch.stack([flat >> 4, flat & 15], 1).reshape(-1)[: math.prod(shape)].long()
    values = torch.tensor(BOOKS[kind], dtype=torch.float64)[codes]
    return (values * spread(absmax.double(), size, len(codes))).reshape(shape)


def gemm(
    x: Any,
    packed: Any,
    shape: Any,
    absmax: Any,
    size: int,
    kind: str,
    bias: Any = None,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> Any:
    nested = (absmax_8bit, absmax_code, absmax_offset) if absmax_8bit is not None else ()
    return nn.functional.linear(x, weight(packed, shape, absmax, size, kind, nested).to(x.dtype), bias)


if importlib.util.find_spec("bitsandbytes") is None:  # its op by its schema, as its package defines it
    torch.library.define("bitsandbytes::gemm_4bit", SCHEMA)
    torch.library.impl("bitsandbytes::gemm_4bit", "cpu", gemm)
    torch.library.register_fake(
        "bitsandbytes::gemm_4bit", lambda x, packed, shape, *_, **__: x.new_empty((*x.shape[:-1], shape[0]))
    )
    schema = "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor"
    torch.library.define("bitsandbytes::dequantize_4bit", schema)
    torch.library.impl(
        "bitsandbytes::dequantize_4bit",
        "cpu",
        lambda packed, absmax, size, kind, shape, dtype: weight(packed, shape, absmax, size, kind).to(dtype),
    )
    torch.library.register_fake(
        "bitsandbytes::dequantize_4bit",
        lambda packed, absmax, size, kind, shape, dtype: absmax.new_empty(shape, dtype=dtype),
    )
else:
    import bitsandbytes


class Product(torch.autograd.Function):
    """As bitsandbytes': the op has no formula of autograd's, and the scales no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, absmax: Any, bias: Any, kind: str, shape: Any, nested: Any) -> Any:
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], shape[0])
        ctx.held = (packed, shape, absmax, 64, kind, nested or ())
        more = dict(zip(("absmax_8bit", "absmax_code", "absmax_offset"), nested or (), strict=False))
        op = torch.ops.bitsandbytes.gemm_4bit.default
        return op(x, packed.view(-1, 1), shape, absmax, 64, kind, bias=bias, **more)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        packed, shape, absmax, size, kind, nested = ctx.held
        if nested:
            codes, book, offset = nested
            absmax = book[codes.long()] * spread(absmax, 256, len(codes)) + offset
        written_out = torch.ops.bitsandbytes.dequantize_4bit.default(packed, absmax, size, kind, shape, torch.float32)
        return torch.matmul(g, written_out.to(g.dtype)), None, None, g.sum(0), None, None, None


def drawn(shape: Any, nested: bool) -> tuple[Any, ...]:
    """x, packed codes, absmax, bias, and of a double quantized weight its scales' codes, their book and offset."""
    generator = torch.Generator().manual_seed(0)
    count = math.prod(shape)
    blocks = -(-count // 64)
    packed = torch.randint(256, ((count + 1) // 2, 1), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(-(-blocks // 256) if nested else blocks, generator=generator) + 0.1
    codes = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
    inner = (codes, torch.rand(256, generator=generator), torch.tensor(0.3)) if nested else ()
    x, bias = (torch.randn(s, generator=generator, requires_grad=True) for s in ((3, shape[1]), (shape[0],)))
    return x, packed, absmax.requires_grad_(), bias, inner


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_product_with_codes_of_four_bits(kind: str, nested: bool, target: str) -> None:
    """Blocks inside of rows, across rows, and an odd number of codes; against f64.  The scales have a gradient."""
    for shape in ((6, 128), (5, 96), (3, 7)):
        x, packed, absmax, bias, inner = drawn(shape, nested)
        torch._dynamo.reset()

        def run(x: Any, absmax: Any, bias: Any, shape: Any = shape, packed: Any = packed, inner: Any = inner) -> Any:
            return Product.apply(x, packed, absmax, bias, kind, shape, inner)

        y = compiled(run, target=target, fallback="error")(x, absmax, bias)
        wide = [t.detach().double().requires_grad_() for t in (x, absmax, bias)]
        wanted = wide[0] @ weight(packed, shape, wide[1], 64, kind, inner).T + wide[2]
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad(y, [x, absmax, bias], cotangent)
        for each, other in zip(
            (y, *found), (wanted, *torch.autograd.grad(wanted, wide, cotangent.double())), strict=True
        ):
            torch.testing.assert_close(each.double(), other, rtol=1e-5, atol=1e-5)


def test_any_number_of_rows() -> None:
    """A symbol, which the Function compares with 0."""
    x, packed, absmax, bias, _ = drawn((6, 128), nested=False)
    run = compiled(lambda x: Product.apply(x, packed, absmax, bias, "nf4", (6, 128), ()), fallback="error")
    for rows in (3, 2, 7):
        given = x.detach().repeat(3, 1)[:rows].requires_grad_()
        torch._dynamo.mark_dynamic(given, 0)
        y = run(given)
        wanted = given.detach().double() @ weight(packed, (6, 128), absmax, 64, "nf4").T + bias.double()
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
        (found,) = torch.autograd.grad(y.sum(), given)
        each_row = weight(packed, (6, 128), absmax, 64, "nf4").sum(0).expand(rows, -1)
        torch.testing.assert_close(found.double(), each_row, rtol=1e-5, atol=1e-5)
    assert gradc.torch.report().share == 1


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_that_are_written_out(kind: str) -> None:
    """``dequantize_4bit`` and, of its scales, ``dequantize_blockwise``; also of more than two axes."""
    line = {
        name: table.lines()[f"bitsandbytes.{name}.default"].function
        for name in ("dequantize_4bit", "dequantize_blockwise")
    }
    for shape in ((6, 128), (2, 3, 64), (5, 97)):
        _, packed, absmax, *_ = drawn((math.prod(shape), 1), nested=False)
        absmax = absmax.detach()
        types = {"packed": f"u8[{len(packed)},1]", "absmax": f"f32[{len(absmax)}]"}
        graph = gradc.trace(
            lambda packed, absmax, s=shape: line["dequantize_4bit"](packed, absmax, 64, kind, s, "f32"), **types
        )
        found = interp.run(graph, {"packed": packed.numpy(), "absmax": absmax.numpy()})["y"]
        wanted = weight(packed, shape, absmax, 64, kind)
        torch.testing.assert_close(torch.from_numpy(found), wanted.float(), rtol=1e-6, atol=0)
    book, codes, scales = (
        torch.rand(256),
        torch.arange(256, dtype=torch.uint8).repeat(3)[:700],
        torch.tensor([2.0, 0.5, 3.0]),
    )
    types = {"codes": "u8[700]", "absmax": "f32[3]", "code": "f32[256]"}
    graph = gradc.trace(
        lambda codes, absmax, code: line["dequantize_blockwise"](codes, absmax, code, 256, "f32"), **types
    )
    found = interp.run(graph, {"codes": codes.numpy(), "absmax": scales.numpy(), "code": book.numpy()})["y"]
    assert torch.equal(torch.from_numpy(found), book[codes.long()] * spread(scales, 256, 700))


def test_another_function_around_the_op_keeps_its_gradient() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, packed: Any, absmax: Any) -> Any:
            return torch.ops.bitsandbytes.gemm_4bit.default(x, packed, (6, 128), absmax, 64, "nf4") * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g.new_full((3, 128), 5.0), None, None

    x, packed, absmax, _, _ = drawn((6, 128), nested=False)
    y = compiled(lambda x: Doubled.apply(x, packed, absmax))(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3, 128), 5.0))
    assert "a torch.autograd.Function" in str(gradc.torch.report())


def reversed_gradient(g: Any, written_out: Any) -> Any:
    return -torch.matmul(g, written_out)


def clipped_gradient(g: Any, written_out: Any) -> Any:
    return torch.matmul(g.clamp(-0.1, 0.1), written_out)


def no_gradient(g: Any, written_out: Any) -> Any:
    return None


def constant_gradient(g: Any, written_out: Any) -> Any:
    return g.new_full((3, 128), 5.0)


@pytest.mark.parametrize("own", [reversed_gradient, clipped_gradient, no_gradient, constant_gradient])
def test_a_function_that_is_the_op_alone_keeps_a_gradient_that_is_not_the_products(own: Any) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, packed: Any, absmax: Any) -> Any:
            ctx.held = (packed, absmax)
            return torch.ops.bitsandbytes.gemm_4bit.default(x, packed, (6, 128), absmax, 64, "nf4")

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            packed, absmax = ctx.held
            op = torch.ops.bitsandbytes.dequantize_4bit.default
            return own(g, op(packed, absmax, 64, "nf4", (6, 128), torch.float32)), None, None

    x, packed, absmax, _, _ = drawn((6, 128), nested=False)
    absmax = absmax.detach()
    found, wanted = (
        torch.autograd.grad((x * 2 + call(x).sum()).sum(), x)[0]
        for call in (compiled(lambda x: Own.apply(x, packed, absmax)), lambda x: Own.apply(x, packed, absmax))
    )
    torch.testing.assert_close(found, wanted)
    assert gradc.torch.report().share < 1


# -- the package -------------------------------------------------------------------------------------------------------

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes' layers need bitsandbytes"
)


@needs_bitsandbytes
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_layers_of_bitsandbytes_are_one_region(kind: str, nested: bool) -> None:
    """Values and gradients are eager mode's; the scales have one, where bitsandbytes has none."""

    def layer(inputs: int, outputs: int) -> Any:
        return bitsandbytes.nn.Linear4bit(inputs, outputs, quant_type=kind, compress_statistics=nested).to("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(layer(64, 128), nn.GELU(), layer(128, 64))
    states = [model[i].weight.quant_state for i in (0, 2)]
    x = torch.randn(8, 64, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, model[0].bias])
    scales = [(state.state2 if nested else state).absmax.requires_grad_() for state in states]
    compiled_model = compiled(model, fallback="error")
    y = compiled_model(x)
    found = torch.autograd.grad(y.square().sum(), [x, model[0].bias, *scales])
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)
    for each, other in zip(found, wanted, strict=False):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)
    assert all(g.abs().max() > 0 for g in found[2:])
    assert gradc.torch.report().share == 1
    for rows in (5, 9):  # other numbers of rows: the graph compares their symbol with 0
        x = torch.randn(rows, 64, requires_grad=True)
        torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)
