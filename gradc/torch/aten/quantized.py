"""Lines of quantized ops: PT2E's, and torch's fake quantization with its learnable scales."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.dims import Size
from ...ir.node import Node
from ...ir.types import DTYPES, F32, DType

_STORED = {(-128, 127): "i8", (0, 255): "u8", (-(2**31), 2**31 - 1): "i32", (-(2**15), 2**15 - 1): "i16"}


def _channels(x: Node, axis: int) -> tuple[Size, ...]:
    """The block shape of one scale per channel."""
    return tuple(1 if a == axis % x.rank else n for a, n in enumerate(x.shape))


def _per_channel(parameter: Node | None, x: Node, axis: int) -> Node | None:
    if parameter is None:
        return None
    return ops.reshape(parameter, tuple(n if a == axis % x.rank else 1 for a, n in enumerate(x.shape)))


def _scalar(parameter: Any, x: Node) -> Any:
    """A number, or a tensor of one element, as a scale of the whole tensor."""
    if not isinstance(parameter, Node):
        parameter = ops.constant(value=(parameter,), dtype=F32 if isinstance(parameter, float) else DTYPES["i64"])
    return ops.reshape(parameter, (1,) * x.rank)


def _dequantize_per_channel(
    q: Node,
    scales: Node,
    zero_points: Node | None,
    axis: int,
    low: int,
    high: int,
    dtype: DType,
    *,
    out_dtype: Any = F32,
) -> Node:
    return ops.dequantize(
        q,
        _per_channel(scales, q, axis),
        _per_channel(zero_points, q, axis),
        block=_channels(q, axis),
        out_dtype=out_dtype or F32,
    )


def _dequantize_per_tensor(
    q: Node, scale: Any, zero_point: Any, low: int, high: int, dtype: DType, *, out_dtype: Any = F32
) -> Node:
    return ops.dequantize(q, _scalar(scale, q), _scalar(zero_point, q), block=q.shape, out_dtype=out_dtype or F32)


# torch's quantize ends in an integer, through which autograd passes nothing; a straight-through gradient is what the
# fake quantizations below are for.


def _quantize_per_tensor(x: Node, scale: Any, zero_point: Any, low: int, high: int, dtype: DType) -> Node:
    return ops.quantize(
        ops.stop_gradient(x),
        _scalar(scale, x),
        _scalar(zero_point, x),
        block=x.shape,
        dtype=dtype,
        quant_min=low,
        quant_max=high,
    )


def _quantize_per_channel(
    x: Node, scales: Node, zero_points: Node, axis: int, low: int, high: int, dtype: DType
) -> Node:
    return ops.quantize(
        ops.stop_gradient(x),
        _per_channel(scales, x, axis),
        _per_channel(zero_points, x, axis),
        block=_channels(x, axis),
        dtype=dtype,
        quant_min=low,
        quant_max=high,
    )


def _fitting(low: int, high: int) -> str:
    """The narrowest integer type that holds a quantized range."""
    for (least, most), name in _STORED.items():
        if least <= low and high <= most:
            return name
    raise Unsupported(f"a quantized range from {low} to {high}")


def _fake_per_tensor(x: Node, scale: Any, zero_point: Any, low: int, high: int, grad_factor: float = 1.0) -> Node:
    return ops.fake_quantize(
        x,
        _scalar(scale, x),
        _scalar(zero_point, x),
        block=x.shape,
        dtype=_fitting(low, high),
        quant_min=low,
        quant_max=high,
        grad_factor=grad_factor,
    )


def _fake_per_channel(
    x: Node, scale: Node, zero_point: Node, axis: int, low: int, high: int, grad_factor: float = 1.0
) -> Node:
    return ops.fake_quantize(
        x,
        _per_channel(scale, x, axis),
        _per_channel(zero_point, x, axis),
        block=_channels(x, axis),
        dtype=_fitting(low, high),
        quant_min=low,
        quant_max=high,
        grad_factor=grad_factor,
    )


def _fixed(function: Any) -> Any:
    """Fake quantization whose scale and zero point are no parameters: torch has no gradient for them."""

    def fake(x: Node, scale: Any, zero_point: Any, *rest: Any) -> Node:
        stopped = [ops.stop_gradient(p) if isinstance(p, Node) and p.dtype.is_float else p for p in (scale, zero_point)]
        return function(x, *stopped, *rest)

    return fake


LINES: dict[str, Any] = {
    "quantized_decomposed.dequantize_per_channel.default": _dequantize_per_channel,
    "quantized_decomposed.dequantize_per_tensor.default": _dequantize_per_tensor,
    "quantized_decomposed.dequantize_per_tensor.tensor": _dequantize_per_tensor,
    "quantized_decomposed.quantize_per_tensor.default": _quantize_per_tensor,
    "quantized_decomposed.quantize_per_tensor.tensor": _quantize_per_tensor,
    "quantized_decomposed.quantize_per_channel.default": _quantize_per_channel,
    "aten.fake_quantize_per_tensor_affine.default": _fixed(_fake_per_tensor),
    "aten.fake_quantize_per_channel_affine.default": _fixed(_fake_per_channel),
    "aten._fake_quantize_learnable_per_tensor_affine.default": _fake_per_tensor,
    "aten._fake_quantize_learnable_per_channel_affine.default": _fake_per_channel,
}
