"""Lines of quantized operators, those of the domain ``com.microsoft`` among them: codes stay codes, and what reads them
is gradc's ``dequantize``, whose scales the passes move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.dims import Size
from ...ir.node import Node
from ...ir.types import DTYPES, F32, F64, DType
from ...ops.products.integers import CODES
from ...ops.rules import converted
from .. import model
from ..table import Forms, Weight, normalized_axis
from .products import conv_integer, convolution, matmul_integer

U8, U4 = DTYPES["u8"], DTYPES["u4"]


def _blocks(x: Node, scale: Node, axis: int, block_size: int) -> tuple[Any, tuple[Size, ...] | None]:
    """(the block of a scale, the shape that scales have for it)."""
    if scale.rank == 0 or (scale.rank == 1 and scale.shape[0] == 1 and not block_size):
        return None, ()
    if scale.rank == x.rank > 1 and not block_size:  # of rows or columns of each matrix of a batch
        return tuple(n if each == 1 else 1 for n, each in zip(x.shape, scale.shape, strict=True)), None
    axis = normalized_axis(axis, x.rank)
    if block_size:
        return tuple(block_size if i == axis else 1 for i in range(x.rank)), None
    block = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    return block, tuple(scale.shape[0] if i == axis else 1 for i in range(x.rank))


def _shaped(v: Node | None, shape: Any) -> Node | None:
    return v if v is None or shape is None or v.shape == shape else ops.reshape(v, shape)


def _has_codes(zero: Node | None) -> bool:
    """Whether a zero point may differ from zero: those of floats cannot."""
    return zero is not None and not zero.dtype.is_float


def quantize_linear(
    x: Node,
    scale: Weight,
    zero: Weight | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Node:
    """``QuantizeLinear``."""
    wanted = zero.dtype if zero is not None else model.element(output_dtype) if output_dtype else U8
    if not saturate:
        raise Unsupported("a quantization that does not saturate")
    if precision and model.element(precision) not in (F32, scale.dtype):  # 16 bits are divided as f32, as everywhere
        raise Unsupported(f"a division of the precision {model.element(precision).name}")
    if not x.dtype.is_float:  # of i32, which f16 does not hold
        x, scale = converted(x, F32), converted(scale, F32)
    block, shape = _blocks(x, scale, axis, block_size)
    kept = _shaped(zero, shape) if _has_codes(zero) else None
    return ops.quantize(x, _shaped(scale, shape), kept, block=block, dtype=wanted)


def dequantize_linear(
    x: Node, scale: Weight, zero: Weight | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Node:
    """``DequantizeLinear``."""
    wanted = model.element(output_dtype) if output_dtype else scale.dtype
    block, shape = _blocks(x, scale, axis, block_size)
    kept = _shaped(zero, shape) if _has_codes(zero) else None
    return ops.dequantize(x, _shaped(scale, shape), kept, block=block, out_dtype=wanted)


def _qlinear(function: Callable[..., Node]) -> Callable[..., Node]:
    """On what two quantized operands stand for."""

    def both(
        a: Weight,
        a_scale: Weight,
        a_zero: Weight | None,
        b: Weight,
        b_scale: Weight,
        b_zero: Weight | None,
        y_scale: Weight,
        y_zero: Weight | None = None,
    ) -> Node:
        x, y = dequantize_linear(a, a_scale, a_zero, axis=-2), dequantize_linear(b, b_scale, b_zero, axis=-1)
        return quantize_linear(function(x, y), y_scale, y_zero)

    return both


def _rounded(sums: Node, factor: Node, zero: Node | None, dtype: DType) -> Node:
    """Codes of integers times a factor, as ONNX's reference rounds them: in f64, behind the zero point."""
    steps = converted(sums, F64) * converted(factor, F64)
    return converted(ops.round(steps if zero is None else steps + converted(zero, F64)), dtype)


def _along(scale: Node, axis: int) -> Node:
    """A scale of each row (axis -2) or column (-1) of a product, to be multiplied with it."""
    return ops.unsqueeze(scale, 1) if scale.rank == 1 and axis == -2 else scale


def _are_codes(*values: Node | None) -> bool:
    """Whether all that are there are integers of 8 bits."""
    return all(v is None or v.dtype in CODES for v in values)


def _qlinear_matmul(
    a: Weight,
    a_scale: Weight,
    a_zero: Weight | None,
    b: Weight,
    b_scale: Weight,
    b_zero: Weight | None,
    y_scale: Weight,
    y_zero: Weight | None = None,
) -> Node:
    """``QLinearMatMul``: a product of integers, of which the product of what they stand for is the gradient."""
    if vectors := tuple(axis for axis, v in ((-2, a), (-1, b)) if v.rank == 1):
        row, column = (ops.unsqueeze(v, axis) if v.rank == 1 else v for v, axis in ((a, 0), (b, 1)))
        return ops.squeeze(_qlinear_matmul(row, a_scale, a_zero, column, b_scale, b_zero, y_scale, y_zero), vectors)
    floats = _qlinear(lambda x, y: ops.matmul(x, y))(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero)
    if not _are_codes(a, a_zero, b, b_zero, y_zero):
        return floats
    factor = _along(a_scale, -2) * b_scale / y_scale
    return ops.with_gradient_of(_rounded(matmul_integer(a, b, a_zero, b_zero), factor, y_zero, floats.dtype), floats)


def _qgemm(
    a: Weight,
    a_scale: Weight,
    a_zero: Weight | None,
    b: Weight,
    b_scale: Weight,
    b_zero: Weight | None,
    c: Weight | None = None,
    y_scale: Weight | None = None,
    y_zero: Weight | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Node:
    """``com.microsoft.QGemm``: codes where there is a scale for them, else floats."""
    left, right = (ops.transpose(v, (1, 0)) if flag else v for v, flag in ((a, transA), (b, transB)))
    x, y = dequantize_linear(left, a_scale, a_zero, axis=-2), dequantize_linear(right, b_scale, b_zero, axis=-1)
    step = _along(a_scale, -2) * b_scale
    step = step if alpha == 1.0 else step * alpha
    product = ops.matmul(x, y) * alpha if alpha != 1.0 else ops.matmul(x, y)
    if c is not None:
        product = product + converted(c, product.dtype) * step
    floats = product if y_scale is None else quantize_linear(product, y_scale, y_zero)
    if not _are_codes(a, a_zero, b, b_zero, y_zero):
        return floats
    sums = matmul_integer(left, right, a_zero, b_zero)
    sums = sums if c is None else sums + c
    if y_scale is None:
        exact = converted(sums, product.dtype) * step
    else:
        exact = _rounded(sums, step / y_scale, y_zero, floats.dtype)
    return ops.with_gradient_of(exact, floats)


def _qlinear_conv(
    x: Weight,
    x_scale: Weight,
    x_zero: Weight,
    w: Weight,
    w_scale: Weight,
    w_zero: Weight,
    y_scale: Weight,
    y_zero: Weight,
    b: Weight | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    """``QLinearConv``: a convolution of integers, of which the convolution of what they stand for is the gradient."""
    how = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "pads": pads, "strides": strides}
    image, weight = dequantize_linear(x, x_scale, x_zero), dequantize_linear(w, w_scale, w_zero, axis=0)
    bias = None
    if b is not None:
        step = ops.broadcast_to(x_scale * w_scale, b.shape)
        bias = converted(b, image.dtype) * converted(step, image.dtype)
    floats = quantize_linear(convolution(image, weight, bias, **how), y_scale, y_zero)
    if not _are_codes(x, x_zero, w, w_zero, y_zero):
        return floats
    ones = (1,) * (w.rank - 2)  # axes behind a channel
    sums = conv_integer(x, w, x_zero, w_zero, **how)
    sums = sums if b is None else sums + ops.reshape(b, (-1, *ones))
    factor = x_scale * w_scale / y_scale
    factor = ops.reshape(factor, (-1, *ones)) if factor.rank else factor
    return ops.with_gradient_of(_rounded(sums, factor, y_zero, floats.dtype), floats)


def _codes(packed: Node, bits: int) -> Node:
    if bits not in (2, 4, 8):
        raise Unsupported(f"codes of {bits} bits")
    return packed if bits == 8 else ops.unpack(packed, f"u{bits}", axis=-1)


def _matmul_nbits(
    a: Node,
    b: Weight,
    scales: Weight,
    zero_points: Weight | None = None,
    groups: Node | None = None,
    bias: Node | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Node:
    """``com.microsoft.MatMulNBits``: a [..., K] with codes [N, blocks, bytes], low bits first."""
    if groups is not None:
        raise Unsupported("MatMulNBits with group indices")
    count = -(-K // block_size)
    codes = ops.reshape(_codes(ops.reshape(b, (N, count, block_size * bits // 8)), bits), (N, count, block_size))
    scale = ops.reshape(scales, (N, count, 1))
    if zero_points is None:
        zero: Node = ops.broadcast_to(ops.constant(value=(2 ** (bits - 1),), dtype="i32"), (N, count, 1))
    elif zero_points.dtype.is_float:
        zero = ops.reshape(zero_points, (N, count, 1))
    else:
        wide = (
            _codes(
                ops.reshape(
                    zero_points,
                    (N, -1 if bits == 8 else zero_points.shape[-1] if zero_points.rank > 1 else -(-count * bits // 8)),
                ),
                bits,
            )
            if bits != 8
            else ops.reshape(zero_points, (N, count))
        )
        zero = ops.reshape(wide[:, :count], (N, count, 1))
    weight = ops.dequantize(codes, scale, zero, block=(1, 1, block_size), out_dtype=a.dtype)
    flat = ops.reshape(weight, (N, count * block_size))
    flat = flat if count * block_size == K else flat[:, :K]
    y = ops.matmul(a, ops.transpose(flat, (1, 0)))
    return y if bias is None else y + bias


def _gather_block_quantized(
    data: Weight,
    indices: Node,
    scales: Weight,
    zero_points: Weight | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Node:
    """``com.microsoft.GatherBlockQuantized``: rows of codes, read as floats once they are gathered."""
    if data.rank != 2 or (normalized_axis(gather_axis, 2), normalized_axis(quantize_axis, 2)) != (0, 1):
        raise Unsupported("GatherBlockQuantized of other than rows with blocks along them")
    codes = ops.gather(data, indices, 0)
    if data.dtype is U8 and bits < 8:
        codes = _codes(codes, bits)
    scale = ops.gather(scales, indices, 0)
    zero: Node | None = None
    if zero_points is not None:
        zero = ops.gather(zero_points, indices, 0)
        if zero_points.dtype is U8 and bits < 8:
            zero = _codes(zero, bits)[..., : scales.shape[-1]]
    elif data.dtype is U8:
        zero = ops.broadcast_to(ops.constant(value=(2 ** (bits - 1),), dtype="i32"), scale.shape)
    block = (*(1,) * (codes.rank - 1), block_size)
    return ops.dequantize(codes, scale, zero, block=block, out_dtype=scales.dtype)


def _qlinear_pointwise(function: Callable[[Node], Node]) -> Callable[..., Node]:
    def one(x: Weight, x_scale: Weight, x_zero: Weight | None, y_scale: Weight, y_zero: Weight | None = None) -> Node:
        return quantize_linear(function(dequantize_linear(x, x_scale, x_zero)), y_scale, y_zero)

    return one


LINES: dict[str, Forms] = {
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "QLinearMatMul": _qlinear_matmul,
    "QLinearConv": _qlinear_conv,
    "com.microsoft.QuantizeLinear": quantize_linear,
    "com.microsoft.DequantizeLinear": dequantize_linear,
    "com.microsoft.QGemm": _qgemm,
    "com.microsoft.QLinearAdd": _qlinear(lambda x, y: x + y),
    "com.microsoft.QLinearMul": _qlinear(lambda x, y: x * y),
    "com.microsoft.QLinearSigmoid": _qlinear_pointwise(ops.sigmoid),
    "com.microsoft.MatMulNBits": _matmul_nbits,
    "com.microsoft.GatherBlockQuantized": _gather_block_quantized,
    "com.microsoft.Gelu": lambda x: ops.gelu(x),
    "com.microsoft.FastGelu": lambda x, bias=None: ops.gelu(x if bias is None else x + bias, approximate="tanh"),
    "com.microsoft.BiasGelu": lambda x, bias: ops.gelu(x + bias),
    "com.microsoft.QuickGelu": lambda x, *, alpha=1.702: x * ops.sigmoid(x * alpha),
}
