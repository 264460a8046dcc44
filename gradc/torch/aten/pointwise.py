"""Lines of pointwise ops."""

from __future__ import annotations

import math
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import F32, DType
from ...ops.products.attention import scale_of_kept
from ...ops.rules import converted
from ...runtime.torch_private import SHARES_TIES, release
from ..draws import mask_of
from ..table import in_opmath, to_common, to_result
from .casts import cast

_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1)  # what torch writes selu as


def _times(x: Any, alpha: Any) -> Any:
    return x if alpha == 1 else x * alpha


def _product(x: Any, y: Any) -> Any:
    both_masks = all(isinstance(v, bool) or (isinstance(v, Node) and v.dtype.kind == "b") for v in (x, y))
    return x & y if both_masks else ops.mul(x, y)


def _power(x: Node, y: Any) -> Node:
    """x ** y; torch takes the square root for y = 1/2, but in f16: of -inf it is NaN, of -0 it is -0."""
    roots = {0.5: ops.sqrt, -0.5: ops.rsqrt} if x.dtype.is_float and x.dtype.name != "f16" else {}
    return roots[y](x) if y in roots else ops.pow(x, y)


def _sum(x: Any, y: Any, alpha: Any = 1) -> Any:
    both_masks = all(isinstance(v, Node) and v.dtype.kind == "b" for v in (x, y))
    return x | y if both_masks and alpha == 1 else _plus(x, y, alpha)


def _plus(x: Any, y: Any, alpha: Any) -> Node:
    """x + alpha*y.  Of 16 bits as torch rounds it: all three to 16 bits first, the result once."""
    dtype = next(v.dtype for v in (x, y) if isinstance(v, Node))
    if alpha in (1, -1) or not dtype.is_float or dtype.itemsize != 2:
        return x - y if alpha == -1 else x + _times(y, alpha)
    x, y, alpha = (converted(_of_dtype(v, dtype), F32) for v in (x, y, alpha))
    return converted(x + y * alpha, dtype)


def _of_dtype(value: Any, dtype: DType) -> Node:
    if isinstance(value, Node):
        return value
    return ops.reshape(ops.constant(value=(dtype.literal(value),), dtype=dtype), ())


def _clamp(x: Node, min: Any = None, max: Any = None) -> Node:
    """At a bound the gradient is 1, or from 2.14 on 0 where the bound is a number, and shared with a tensor."""
    y = ops.clamp(x, min, max)
    if release() < SHARES_TIES or not x.dtype.is_float:
        return y
    given = [bound for bound in (min, max) if bound is not None]
    if all(isinstance(bound, bool | int | float) for bound in given):
        inside = [*([] if min is None else [x > min]), *([] if max is None else [x < max])]
        return ops.where(inside[0] & inside[-1], x, ops.stop_gradient(y))
    if not all(isinstance(bound, Node) for bound in given):
        return y
    if max is None:
        return ops.maximum(x, min)
    if min is None:
        return ops.minimum(x, max)
    shared = ops.where(ops.eq(x, min), ops.maximum(x, min), ops.minimum(x, max))
    unshared = ops.where(x < min, min, ops.where(x > max, max, x))
    ordered = ops.where((min < max) & (ops.eq(x, min) | ops.eq(x, max)), shared, unshared)
    above = ops.where(ops.eq(x, x), max, ops.maximum(x, max))
    chosen = ops.where(min > max, above, ordered)
    return ops.where(ops.eq(min, min) & ops.eq(max, max), chosen, y)  # of a bound that is NaN, all is NaN


def _fmax(function: Any, sharing: Any) -> Any:
    """fmax or fmin; of equal operands the first has the gradient, or from 2.14 on each half of it."""

    def line(x: Any, y: Any) -> Node:
        first = function(x, y)
        if release() < SHARES_TIES or not first.dtype.is_float:
            return first
        return ops.where(ops.eq(x, y), sharing(x, y), first)

    return line


def _cast(x: Any, dtype: DType | None = None) -> Node:
    if not isinstance(x, Node):  # a number, which torch.vmap gives the dtype that it is promoted to
        if dtype is None:
            raise Unsupported(f"a copy of the number {x!r}")
        return _of_dtype(x, dtype)
    return x if dtype is None else cast(x, dtype)


def _logical(x: Any) -> Any:
    return x if x.dtype.kind == "b" else ops.ne(x, 0)


def _sign(x: Node) -> Node:
    """0 of a NaN."""
    return ops.where(ops.eq(x, x), ops.sign(x), 0.0) if x.dtype.is_float else ops.sign(x)


def _sinc(x: Node) -> Node:
    """By its Taylor series up to an angle of 1, in whose derivative nothing cancels: that of sin(a) / a is the
    difference of cos(a) / a and sin(a) / a^2, which is all rounding where a is small.
    """
    angle = x * math.pi
    near = ops.abs(angle) < 1.0
    square = ops.where(near, angle, 0.0) ** 2
    series: Any = 0.0
    for k in range(9, 0, -1):
        series = (series + (-1) ** k / math.factorial(2 * k + 1)) * square
    apart = ops.where(near, 1.0, angle)
    return ops.where(near, series + 1.0, ops.sin(apart) / apart)


def _softplus(x: Node, beta: float = 1, threshold: float = 20) -> Node:
    return ops.softplus(x, beta=float(beta), threshold=float(threshold))


def _elu(x: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    if scale == 1 and input_scale == 1:
        return ops.elu(x, alpha=float(alpha))
    if (alpha, scale, input_scale) == _SELU:
        return ops.selu(x)
    negative = ops.where(x > 0, 0.0, x)  # where it is not taken the exponential must not overflow
    return ops.where(x > 0, x * scale, ops.expm1(negative * input_scale) * (alpha * scale))


def _copy(x: Node, source: Node) -> Node:
    return ops.broadcast_to(cast(source, x.dtype), x.shape)


def _shift(op: Any) -> Any:
    """A shift, whose numbers wrap around as torch casts them to the tensor's dtype."""

    def wrapped(number: Any, dtype: DType) -> Any:
        if not dtype.is_integer or not isinstance(number, int):
            return number
        low = dtype.range[0]
        return (number - low) % 2**dtype.bits + low

    def shifted(x: Any, y: Any) -> Node:
        dtype = (x if isinstance(x, Node) else y).dtype
        return op(*(v if isinstance(v, Node) else wrapped(v, dtype) for v in (x, y)))

    return to_result(shifted)


def _dropout(x: Node, mask: Node, p: float) -> Node:
    wide = x.dtype.compute
    return converted(converted(x, wide) * converted(mask, wide) * scale_of_kept(p), x.dtype)


LINES: dict[str, Any] = {
    "gradc.dropout.default": _dropout,
    "gradc.random_mask.default": mask_of,
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
    "aten.sinc.default": to_result(_sinc),
    "aten.square.default": to_result(lambda x: ops.square(x)),
    "aten.sin.default": to_result(lambda x: ops.sin(x)),
    "aten.cos.default": to_result(lambda x: ops.cos(x)),
    "aten.tanh.default": to_result(lambda x: ops.tanh(x)),
    "aten.erf.default": to_result(lambda x: ops.erf(x)),
    "aten.sign.default": to_result(_sign),
    "aten.floor.default": to_result(lambda x: ops.floor(x)),
    "aten.ceil.default": to_result(lambda x: ops.ceil(x)),
    "aten.round.default": to_result(lambda x: ops.round(x)),
    "aten.trunc.default": to_result(lambda x: ops.trunc(x)),
    "aten.isnan.default": lambda x: ops.isnan(x),
    "aten.acos.default": to_result(lambda x: ops.acos(x)),
    "aten.acosh.default": to_result(lambda x: ops.acosh(x)),
    "aten.asin.default": to_result(lambda x: ops.asin(x)),
    "aten.asinh.default": to_result(lambda x: ops.asinh(x)),
    "aten.atan.default": to_result(lambda x: ops.atan(x)),
    "aten.atanh.default": to_result(lambda x: ops.atanh(x)),
    "aten.cosh.default": to_result(lambda x: ops.cosh(x)),
    "aten.sinh.default": to_result(lambda x: ops.sinh(x)),
    "aten.tan.default": to_result(lambda x: ops.tan(x)),
    "aten.exp2.default": to_result(lambda x: ops.exp2(x)),
    "aten.log10.default": to_result(lambda x: ops.log10(x)),
    "aten.log2.default": to_result(lambda x: ops.log2(x)),
    "aten.erfc.default": to_result(lambda x: ops.erfc(x)),
    "aten.erfinv.default": to_result(lambda x: ops.erfinv(x)),
    "aten.lgamma.default": to_result(lambda x: ops.lgamma(x)),
    "aten.digamma.default": to_result(lambda x: ops.digamma(x)),
    "aten.frac.default": to_result(lambda x: ops.frac(x)),
    "aten.deg2rad.default": to_result(lambda x: ops.deg2rad(x)),
    "aten.rad2deg.default": to_result(lambda x: ops.rad2deg(x)),
    "aten.special_erfinv.default": to_result(lambda x: ops.erfinv(x)),
    "aten.special_entr.default": to_result(lambda x: ops.entr(x)),
    "aten.special_ndtr.default": to_result(lambda x: ops.ndtr(x)),
    "aten.special_ndtri.default": to_result(lambda x: ops.ndtri(x)),
    "aten.special_log_ndtr.default": to_result(lambda x: ops.log_ndtr(x)),
    "aten.special_erfcx.default": to_result(lambda x: ops.erfcx(x)),
    "aten.i0.default": to_result(lambda x: ops.i0(x)),
    "aten.special_i0e.default": to_result(lambda x: ops.i0e(x)),
    "aten.special_i1.default": to_result(lambda x: ops.i1(x)),
    "aten.special_i1e.default": to_result(lambda x: ops.i1e(x)),
    "aten.polygamma.default": to_result(lambda order, x: ops.polygamma(order, x)),
    "aten.logit.default": to_result(lambda x, eps=None: ops.logit(x, eps)),
    "aten.nan_to_num.default": lambda x, nan=None, posinf=None, neginf=None: ops.nan_to_num(
        x, nan or 0.0, posinf, neginf
    ),
    "aten.sgn.default": to_result(_sign),
    "aten.round.decimals": to_result(lambda x, *, decimals: ops.round(x, decimals)),
    "aten.frexp.Tensor": lambda x: ops.frexp(x),
    "aten.frexp.default": lambda x: ops.frexp(x),
    "aten.isinf.default": lambda x: ops.isinf(x),
    "aten.isfinite.default": lambda x: ops.isfinite(x),
    "aten.isposinf.default": lambda x: ops.isposinf(x),
    "aten.isneginf.default": lambda x: ops.isneginf(x),
    "aten.signbit.default": lambda x: ops.signbit(x),
    "aten.bitwise_not.default": lambda x: ~x,
    "aten.logical_not.default": lambda x: ~_logical(x),
    # activations
    "aten.relu.default": lambda x: ops.relu(x),
    "aten.sigmoid.default": to_result(lambda x: ops.sigmoid(x)),
    "aten.silu.default": lambda x: ops.silu(x),
    "aten.gelu.default": lambda x, *, approximate="none": ops.gelu(x, approximate=approximate),
    "aten.softplus.default": _softplus,
    "aten.elu.default": _elu,
    "aten.celu.default": lambda x, alpha=1.0: ops.celu(x, alpha=float(alpha)),
    "aten.leaky_relu.default": lambda x, slope=0.01: ops.leaky_relu(x, negative_slope=float(slope)),
    "aten.prelu.default": lambda x, weight: ops.prelu(x, weight),
    "aten._prelu_kernel.default": lambda x, weight: ops.where(x > 0, x, x * weight),
    "aten.hardtanh.default": lambda x, low=-1, high=1: ops.hardtanh(x, min_val=float(low), max_val=float(high)),
    "aten.relu6.default": lambda x: ops.relu6(x),
    "aten.hardswish.default": lambda x: ops.hardswish(x),
    "aten.hardsigmoid.default": lambda x: ops.hardsigmoid(x),
    "aten.mish.default": lambda x: ops.mish(x),
    "aten.log_sigmoid.default": lambda x: ops.logsigmoid(x),
    "aten.log_sigmoid_forward.default": lambda x: (ops.logsigmoid(x),),
    "aten.softshrink.default": lambda x, bound=0.5: ops.softshrink(x, lambd=float(bound)),
    "aten.hardshrink.default": lambda x, bound=0.5: ops.hardshrink(x, lambd=float(bound)),
    "aten.threshold.default": lambda x, threshold, value: ops.threshold(x, float(threshold), float(value)),
    "aten.glu.default": lambda x, axis=-1: ops.glu(x, axis),
    # two operands
    "aten.add.Tensor": to_result(_sum),
    "aten.add.Scalar": to_result(lambda x, y, alpha=1: _plus(x, y, alpha)),
    "aten.sub.Tensor": to_result(lambda x, y, *, alpha=1: _plus(x, y, -alpha)),
    "aten.sub.Scalar": to_result(lambda x, y, alpha=1: _plus(x, y, -alpha)),
    "aten.rsub.Tensor": to_result(lambda x, y, *, alpha=1: _plus(y, x, -alpha)),
    "aten.rsub.Scalar": to_result(lambda x, y, alpha=1: _plus(y, x, -alpha)),
    "aten.mul.Tensor": in_opmath(_product),
    "aten.mul.Scalar": in_opmath(_product),
    "aten.div.Tensor": in_opmath(lambda x, y: ops.div(x, y)),
    "aten.div.Scalar": in_opmath(lambda x, y: ops.div(x, y)),
    "aten.div.Tensor_mode": in_opmath(lambda x, y, *, rounding_mode=None: ops.divide(x, y, rounding_mode)),
    "aten.div.Scalar_mode": in_opmath(lambda x, y, *, rounding_mode=None: ops.divide(x, y, rounding_mode)),
    "aten.floor_divide.default": in_opmath(lambda x, y: ops.divide(x, y, "floor")),
    "aten.remainder.Tensor": to_result(lambda x, y: ops.mod(x, y)),
    "aten.remainder.Scalar": to_result(lambda x, y: ops.mod(x, y)),
    "aten.pow.Tensor_Scalar": to_result(lambda x, y: _power(x, y)),
    "aten.pow.Tensor_Tensor": to_result(lambda x, y: ops.pow(x, y)),
    "aten.pow.Scalar": to_result(lambda x, y: ops.pow(x, y)),
    "aten.atan2.default": to_result(lambda x, y: ops.atan2(x, y)),
    "aten.hypot.default": to_result(lambda x, y: ops.hypot(x, y)),
    "aten.copysign.Tensor": to_result(lambda x, y: ops.copysign(x, y)),
    "aten.fmod.Tensor": to_result(lambda x, y: ops.fmod(x, y)),
    "aten.fmod.Scalar": to_result(lambda x, y: ops.fmod(x, y)),
    "aten.fmax.default": to_result(_fmax(ops.fmax, ops.maximum)),
    "aten.fmin.default": to_result(_fmax(ops.fmin, ops.minimum)),
    "aten.xlogy.Tensor": to_result(lambda x, y: ops.xlogy(x, y)),
    "aten.xlogy.Scalar_Other": to_result(lambda x, y: ops.xlogy(x, y)),
    "aten.xlogy.Scalar_Self": to_result(lambda x, y: ops.xlogy(x, y)),
    "aten.special_xlog1py.default": to_result(lambda x, y: ops.xlog1py(x, y)),
    "aten.special_xlog1py.other_scalar": to_result(lambda x, y: ops.xlog1py(x, y)),
    "aten.special_xlog1py.self_scalar": to_result(lambda x, y: ops.xlog1py(x, y)),
    "aten.logaddexp.default": to_result(lambda x, y: ops.logaddexp(x, y)),
    "aten.logaddexp2.default": to_result(lambda x, y: ops.logaddexp2(x, y)),
    "aten.ldexp.Tensor": to_result(lambda x, y: ops.ldexp(x, y)),
    "aten.nextafter.default": to_result(lambda x, y: ops.nextafter(x, y)),
    "aten.maximum.default": to_result(lambda x, y: ops.maximum(x, y)),
    "aten.minimum.default": to_result(lambda x, y: ops.minimum(x, y)),
    "aten.bitwise_and.Tensor": to_result(lambda x, y: x & y),
    "aten.bitwise_or.Tensor": to_result(lambda x, y: x | y),
    "aten.bitwise_xor.Tensor": to_result(lambda x, y: x ^ y),
    "aten.bitwise_and.Scalar": to_result(lambda x, y: x & y),
    "aten.bitwise_or.Scalar": to_result(lambda x, y: x | y),
    "aten.bitwise_xor.Scalar": to_result(lambda x, y: x ^ y),
    "aten.bitwise_and.Scalar_Tensor": to_result(lambda x, y: x & y),
    "aten.bitwise_or.Scalar_Tensor": to_result(lambda x, y: x | y),
    "aten.bitwise_xor.Scalar_Tensor": to_result(lambda x, y: x ^ y),
    "aten.bitwise_left_shift.Tensor": _shift(ops.left_shift),
    "aten.bitwise_left_shift.Tensor_Scalar": _shift(ops.left_shift),
    "aten.bitwise_left_shift.Scalar_Tensor": _shift(ops.left_shift),
    "aten.bitwise_right_shift.Tensor": _shift(ops.right_shift),
    "aten.bitwise_right_shift.Tensor_Scalar": _shift(ops.right_shift),
    "aten.bitwise_right_shift.Scalar_Tensor": _shift(ops.right_shift),
    "aten.__lshift__.Tensor": _shift(ops.left_shift),
    "aten.__lshift__.Scalar": _shift(ops.left_shift),
    "aten.__rshift__.Tensor": _shift(ops.right_shift),
    "aten.__rshift__.Scalar": _shift(ops.right_shift),
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
    "aten.clamp.Tensor": to_result(_clamp),
    "aten.clamp_min.default": to_result(lambda x, min: _clamp(x, min, None)),
    "aten.clamp_max.default": to_result(lambda x, max: _clamp(x, None, max)),
    "aten.addcmul.default": in_opmath(lambda x, y, z, *, value=1: x + _times(y * z, value)),
    "aten.addcdiv.default": in_opmath(lambda x, y, z, *, value=1: x + _times(y / z, value)),
    "prims.fma.default": to_result(lambda x, y, z: x * y + z),  # what Dynamo makes of addcmul_ with a tensor's value
    "aten.lerp.Scalar": in_opmath(lambda x, y, weight: ops.lerp(x, y, weight)),
    "aten.lerp.Tensor": in_opmath(lambda x, y, weight: ops.lerp(x, y, weight)),
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
    "aten.detach.default": lambda x: ops.stop_gradient(x),
    "gradc.stop_gradient.default": lambda x: ops.stop_gradient(x),
}
