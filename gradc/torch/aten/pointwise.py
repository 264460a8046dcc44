"""Lines of pointwise ops."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import DType
from ...ops.rules import converted
from ..table import to_common, to_result


def _times(x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else x * alpha


def _rounded_quotient(x: Node, y: Any, rounding_mode: str | None = None) -> Node:
    quotient = x / y if x.dtype.is_float else None
    match rounding_mode:
        case None:
            return x / y
        case "floor":
            return ops.floordiv(x, y) if quotient is None else ops.floor(quotient)
        case _ if quotient is not None:
            return _truncated(quotient)
    raise Unsupported("a quotient of integers rounded to zero")


def _truncated(x: Node) -> Node:
    return ops.where(x < 0, -ops.floor(-x), ops.floor(x))


def _clamp(x: Node, min: Any = None, max: Any = None) -> Node:
    return ops.clamp(x, min, max)


def _clamp_to_tensors(x: Node, min: Node | None = None, max: Node | None = None) -> Node:
    x = x if min is None else ops.maximum(x, min)
    return x if max is None else ops.minimum(x, max)


def _cast(x: Node, dtype: DType | None = None) -> Node:
    return x if dtype is None else converted(x, dtype)


def _logical(x: Any) -> Any:
    return x if x.dtype.kind == "b" else ops.ne(x, 0)


def _softplus(x: Node, beta: float = 1, threshold: float = 20) -> Node:
    return ops.softplus(x, beta=float(beta), threshold=float(threshold))


def _copy(x: Node, source: Node) -> Node:
    return ops.broadcast_to(converted(source, x.dtype), x.shape)


LINES: dict[str, Any] = {
    # one operand
    "aten.abs.default": to_result(lambda x: ops.abs(x)),
    "aten.neg.default": to_result(lambda x: -x),
    "aten.exp.default": to_result(lambda x: ops.exp(x)),
    "aten.expm1.default": to_result(lambda x: ops.expm1(x)),
    "aten.log.default": to_result(lambda x: ops.log(x)),
    "aten.log1p.default": to_result(lambda x: ops.log1p(x)),
    "aten.sqrt.default": to_result(lambda x: ops.sqrt(x)),
    "aten.rsqrt.default": to_result(lambda x: ops.rsqrt(x)),
    "aten.reciprocal.default": to_result(lambda x: ops.reciprocal(x)),
    "aten.square.default": to_result(lambda x: x * x),
    "aten.sin.default": to_result(lambda x: ops.sin(x)),
    "aten.cos.default": to_result(lambda x: ops.cos(x)),
    "aten.tanh.default": to_result(lambda x: ops.tanh(x)),
    "aten.erf.default": to_result(lambda x: ops.erf(x)),
    "aten.sign.default": to_result(lambda x: ops.sign(x)),
    "aten.floor.default": to_result(lambda x: ops.floor(x)),
    "aten.ceil.default": to_result(lambda x: -ops.floor(-x)),
    "aten.round.default": to_result(lambda x: ops.round(x)),
    "aten.trunc.default": to_result(_truncated),
    "aten.isnan.default": lambda x: ops.ne(x, x),
    "aten.bitwise_not.default": lambda x: ~x,
    "aten.logical_not.default": lambda x: ~_logical(x),
    # activations
    "aten.relu.default": lambda x: ops.relu(x),
    "aten.sigmoid.default": to_result(lambda x: ops.sigmoid(x)),
    "aten.silu.default": lambda x: ops.silu(x),
    "aten.gelu.default": lambda x, *, approximate="none": ops.gelu(x, approximate=approximate),
    "aten.softplus.default": _softplus,
    # two operands
    "aten.add.Tensor": to_result(lambda x, y, *, alpha=1: x + _times(y, alpha)),
    "aten.add.Scalar": to_result(lambda x, y, alpha=1: x + _times(y, alpha)),
    "aten.sub.Tensor": to_result(lambda x, y, *, alpha=1: x - _times(y, alpha)),
    "aten.sub.Scalar": to_result(lambda x, y, alpha=1: x - _times(y, alpha)),
    "aten.rsub.Tensor": to_result(lambda x, y, *, alpha=1: y - _times(x, alpha)),
    "aten.rsub.Scalar": to_result(lambda x, y, alpha=1: y - _times(x, alpha)),
    "aten.mul.Tensor": to_result(lambda x, y: ops.mul(x, y)),
    "aten.mul.Scalar": to_result(lambda x, y: ops.mul(x, y)),
    "aten.div.Tensor": to_result(lambda x, y: ops.div(x, y)),
    "aten.div.Scalar": to_result(lambda x, y: ops.div(x, y)),
    "aten.div.Tensor_mode": to_result(lambda x, y, *, rounding_mode=None: _rounded_quotient(x, y, rounding_mode)),
    "aten.div.Scalar_mode": to_result(lambda x, y, *, rounding_mode=None: _rounded_quotient(x, y, rounding_mode)),
    "aten.floor_divide.default": to_result(lambda x, y: _rounded_quotient(x, y, "floor")),
    "aten.remainder.Tensor": to_result(lambda x, y: ops.mod(x, y)),
    "aten.remainder.Scalar": to_result(lambda x, y: ops.mod(x, y)),
    "aten.pow.Tensor_Scalar": to_result(lambda x, y: ops.pow(x, y)),
    "aten.pow.Tensor_Tensor": to_result(lambda x, y: ops.pow(x, y)),
    "aten.pow.Scalar": to_result(lambda x, y: ops.pow(x, y)),
    "aten.maximum.default": to_result(lambda x, y: ops.maximum(x, y)),
    "aten.minimum.default": to_result(lambda x, y: ops.minimum(x, y)),
    "aten.bitwise_and.Tensor": to_result(lambda x, y: x & y),
    "aten.bitwise_or.Tensor": to_result(lambda x, y: x | y),
    "aten.bitwise_xor.Tensor": to_result(lambda x, y: x ^ y),
    "aten.bitwise_and.Scalar": to_result(lambda x, y: x & y),
    "aten.bitwise_or.Scalar": to_result(lambda x, y: x | y),
    "aten.bitwise_xor.Scalar": to_result(lambda x, y: x ^ y),
    "aten.logical_and.default": lambda x, y: _logical(x) & _logical(y),
    "aten.logical_or.default": lambda x, y: _logical(x) | _logical(y),
    "aten.logical_xor.default": lambda x, y: _logical(x) ^ _logical(y),
    "aten.eq.Tensor": to_common(lambda x, y: ops.eq(x, y)),
    "aten.ne.Tensor": to_common(lambda x, y: ops.ne(x, y)),
    "aten.lt.Tensor": to_common(lambda x, y: ops.lt(x, y)),
    "aten.le.Tensor": to_common(lambda x, y: ops.le(x, y)),
    "aten.gt.Tensor": to_common(lambda x, y: ops.gt(x, y)),
    "aten.ge.Tensor": to_common(lambda x, y: ops.ge(x, y)),
    "aten.eq.Scalar": to_common(lambda x, y: ops.eq(x, y)),
    "aten.ne.Scalar": to_common(lambda x, y: ops.ne(x, y)),
    "aten.lt.Scalar": to_common(lambda x, y: ops.lt(x, y)),
    "aten.le.Scalar": to_common(lambda x, y: ops.le(x, y)),
    "aten.gt.Scalar": to_common(lambda x, y: ops.gt(x, y)),
    "aten.ge.Scalar": to_common(lambda x, y: ops.ge(x, y)),
    # three
    "aten.clamp.default": to_result(_clamp),
    "aten.clamp.Tensor": to_result(_clamp_to_tensors),
    "aten.clamp_min.default": to_result(lambda x, min: ops.clamp(x, min, None)),
    "aten.clamp_max.default": to_result(lambda x, max: ops.clamp(x, None, max)),
    "aten.addcmul.default": to_result(lambda x, y, z, *, value=1: x + _times(y * z, value)),
    "aten.addcdiv.default": to_result(lambda x, y, z, *, value=1: x + _times(y / z, value)),
    "aten.lerp.Scalar": to_result(lambda x, y, weight: x + (y - x) * weight),
    "aten.lerp.Tensor": to_result(lambda x, y, weight: x + (y - x) * weight),
    "aten.where.self": to_result(lambda condition, x, y: ops.where(condition, x, y)),
    "aten.where.ScalarOther": to_result(lambda condition, x, y: ops.where(condition, x, y)),
    "aten.where.ScalarSelf": to_result(lambda condition, x, y: ops.where(condition, x, y)),
    "aten.masked_fill.Scalar": lambda x, mask, value: ops.where(mask, value, x),
    "aten.masked_fill.Tensor": lambda x, mask, value: ops.where(mask, converted(value, x.dtype), x),
    # the same value
    "aten._to_copy.default": _cast,
    "aten.to.dtype": lambda x, dtype, non_blocking=False, copy=False: _cast(x, dtype),
    "aten.copy.default": lambda x, source, non_blocking=False: _copy(x, source),
    "aten.clone.default": lambda x: x,
    "aten.alias.default": lambda x: x,
    "aten.contiguous.default": lambda x: x,
    "aten.lift_fresh_copy.default": lambda x: x,
    "aten.type_as.default": lambda x, like: converted(x, like.dtype),
    "gradc.stop_gradient.default": lambda x: ops.stop_gradient(x),
}
