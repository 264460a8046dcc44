"""Lines of element by element operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import inf, nan
from typing import Any

import ml_dtypes
import numpy as np

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import DTYPES, F32, F64, I32, DType
from ...ops.rules import converted
from .. import model
from ..table import Site, Sizes


def _several(function: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    def all_of(*operands: Node) -> Node:
        return functools.reduce(function, operands)

    return all_of


def _unary(function: Callable[[Node], Node]) -> Callable[[Node], Node]:
    return lambda x: function(x)  # whose parameters are ONNX's


def _binary(function: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    """``broadcast`` and ``axis`` are those of opsets before 7: y's axes are x's from ``axis`` on."""

    def both(x: Node, y: Node, *, broadcast: int = 0, axis: int | None = None) -> Node:
        if axis is not None:
            y = ops.reshape(y, (*y.shape, *(1,) * (x.rank - axis % x.rank - y.rank)))
        return function(x, y)

    return both


def _add(x: Node, y: Node) -> Node:
    return ops.add(x, y)


def _cast(x: Node, *, to: int, saturate: int = 1, round_mode: str = "up") -> Node:
    return _to(x, model.element(to), saturate, round_mode)


def _to(x: Node, wanted: DType, saturate: int, round_mode: str) -> Node:
    if round_mode != "up":
        raise Unsupported(f"round_mode {round_mode}")
    if wanted.name in ("f8e4m3", "f8e5m2"):
        most = float(ml_dtypes.finfo(wanted.np).max)
        x = converted(x, F64 if x.dtype is F64 else F32)
        if not saturate:
            return _overflowing(x, wanted, most)
        return converted(ops.clamp(x, -most, most), wanted)  # infinities, too
    if wanted.is_integer and wanted.bits < 8 and x.dtype.is_float:
        x = converted(x, I32)  # of which the low bits are kept
    return converted(x, wanted)


def _overflowing(x: Node, wanted: DType, most: float) -> Node:
    """A cast after which what rounds to more than the largest number is an infinity, or NaN where there is none."""
    step = most - float(np.nextafter(wanted.np.type(most), wanted.np.type(0)))
    if wanted.name == "f8e4m3":  # 448 is even, so that half a step above it still rounds to it
        return converted(ops.where(ops.abs(x) > most + step / 2, nan, x), wanted)
    above = ops.abs(x) >= most + step / 2
    return converted(ops.where(above, ops.copysign(ops.where(above, inf, x), x), x), wanted)


def _div(x: Node, y: Node) -> Node:
    return ops.div(x, y) if x.dtype.is_float else ops.divide(x, y, "trunc")


def _mod(x: Node, y: Node, *, fmod: int = 0) -> Node:
    return ops.fmod(x, y) if fmod else ops.mod(x, y)


def _pow(x: Node, y: Node) -> Node:
    if x.dtype.is_float:
        return ops.pow(x, converted(y, x.dtype))
    return converted(ops.pow(converted(x, F64), converted(y, F64)), x.dtype)


def _clip(x: Node, low: Node | None = None, high: Node | None = None, *, min: Any = None, max: Any = None) -> Node:
    low, high = (min if low is None else low), (max if high is None else high)
    if low is not None:
        x = ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


def _hard_sigmoid(x: Node, *, alpha: float = 0.2, beta: float = 0.5) -> Node:
    return ops.clamp(x * alpha + beta, 0.0, 1.0)


def _is_inf(x: Node, *, detect_negative: int = 1, detect_positive: int = 1) -> Node:
    if detect_negative and detect_positive:
        return ops.isinf(x)
    if detect_negative:
        return ops.isneginf(x)
    return ops.isposinf(x) if detect_positive else ops.isinf(x) & ops.isnan(x)


def _shift(x: Node, y: Node, *, direction: str) -> Node:
    return ops.left_shift(x, y) if direction == "LEFT" else ops.right_shift(x, y)


def _shrink(x: Node, *, bias: float = 0.0, lambd: float = 0.5) -> Node:
    return ops.where(x < -lambd, x + bias, ops.where(x > lambd, x - bias, x * 0))


def _prelu(site: Site, x: Node, slope: Node) -> Node:
    if site.opset < 7 and slope.rank == 1:  # of channels
        slope = ops.reshape(slope, (*slope.shape, *(1,) * (x.rank - 2)))
    zero = converted(x * 0, x.dtype)
    return ops.where(x < zero, x * slope, x)


def _bitwise_not(x: Node) -> Node:
    return ops.invert(x)


def _not(x: Node) -> Node:
    return ops.logical_not(x)


def _neg(x: Node) -> Node:
    return ops.neg(x)


def _mean(*operands: Node) -> Node:
    return functools.reduce(_add, operands) / float(len(operands))


def _selu(x: Node, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Node:
    return ops.where(x > 0.0, x, alpha * ops.expm1(ops.minimum(x, 0.0))) * gamma


def _elu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.elu(x, alpha)


def _softmax(function: Callable[..., Node]) -> Callable[..., Node]:
    def along(site: Site, x: Node, *, axis: int | None = None) -> Node:
        if site.opset >= 13:
            return function(x, -1 if axis is None else axis)
        axis = (1 if axis is None else axis) % max(x.rank, 1)
        return ops.reshape(function(ops.flatten(x, axis), -1), x.shape) if axis < x.rank - 1 else function(x, -1)

    return along


def _hardmax(x: Node, *, axis: int = -1) -> Node:
    place = ops.argmax(x, axis, keepdims=True)
    at = ops.iota(shape=x.shape, axis=axis % x.rank)
    return converted(ops.eq(at, ops.broadcast_to(place, x.shape)), x.dtype)


def _cumulated(function: Callable[..., Node], identity: float) -> Callable[..., Node]:
    def along(x: Node, axis: Sizes, *, exclusive: int = 0, reverse: int = 0) -> Node:
        at = axis[0] % x.rank
        summed = converted(function(x, at, reverse=bool(reverse)), x.dtype)
        if not exclusive:
            return summed
        width = [(0, 0)] * x.rank
        width[at] = (-1, 0) if reverse else (0, -1)
        other = [(0, 0)] * x.rank
        other[at] = (0, 1) if reverse else (1, 0)
        shifted = ops.pad(summed, tuple(width))
        return ops.pad(shifted, tuple(other), value=identity if x.dtype.is_float else int(identity))

    return along


def _gelu(x: Node, *, approximate: str = "none") -> Node:
    return ops.gelu(x, approximate=approximate)


def _swish(x: Node, *, alpha: float = 1.0) -> Node:
    return x * ops.sigmoid(x * alpha)


def _where(condition: Node, x: Node, y: Node) -> Node:
    return ops.where(condition, x, y)


def _cast_like(x: Node, y: Node, *, saturate: int = 1, round_mode: str = "up") -> Node:
    return _to(x, y.dtype, saturate, round_mode)


def _bitcast(x: Node, *, to: int) -> Node:
    wanted = model.element(to)
    if x.dtype.kind in "bi" and x.dtype.bits < 64:  # a cast between integers of one width keeps the bits
        x = converted(x, DTYPES[f"u{max(x.dtype.bits, 8)}"])
    if x.dtype.kind == "u" and wanted.is_integer and x.dtype.bits == wanted.bits:
        return converted(x, wanted)
    return ops.bitcast(x, wanted)


def _thresholded(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.where(x > alpha, x, x * 0)


def _leaky(x: Node, *, alpha: float = 0.01) -> Node:
    return ops.leaky_relu(x, alpha)


def _celu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.celu(x, alpha)


def _relu(x: Node) -> Node:
    return ops.relu(x) if x.dtype.is_float else ops.maximum(x, 0)


LINES: dict[str, Callable[..., Any]] = {
    **{
        name: _unary(function)
        for name, function in {
            "Abs": ops.abs,
            "Acos": ops.acos,
            "Acosh": ops.acosh,
            "Asin": ops.asin,
            "Asinh": ops.asinh,
            "Atan": ops.atan,
            "Atanh": ops.atanh,
            "Ceil": ops.ceil,
            "Cos": ops.cos,
            "Cosh": ops.cosh,
            "Erf": ops.erf,
            "Exp": ops.exp,
            "Floor": ops.floor,
            "HardSwish": ops.hardswish,
            "IsNaN": ops.isnan,
            "Log": ops.log,
            "Mish": ops.mish,
            "Reciprocal": ops.reciprocal,
            "Round": ops.round,
            "Sigmoid": ops.sigmoid,
            "Sign": ops.sign,
            "Sin": ops.sin,
            "Sinh": ops.sinh,
            "Softplus": ops.softplus,
            "Softsign": ops.softsign,
            "Sqrt": ops.sqrt,
            "Tan": ops.tan,
            "Tanh": ops.tanh,
        }.items()
    },
    **{
        name: _binary(function)
        for name, function in {
            "Add": ops.add,
            "And": ops.logical_and,
            "BitwiseAnd": ops.bitwise_and,
            "BitwiseOr": ops.bitwise_or,
            "BitwiseXor": ops.bitwise_xor,
            "Equal": ops.eq,
            "Greater": ops.gt,
            "GreaterOrEqual": ops.ge,
            "Less": ops.lt,
            "LessOrEqual": ops.le,
            "Mul": ops.mul,
            "Or": ops.logical_or,
            "Sub": ops.sub,
            "Xor": ops.logical_xor,
        }.items()
    },
    "Identity": lambda x: x,
    "Neg": _neg,
    "Not": _not,
    "BitwiseNot": _bitwise_not,
    "BitShift": _shift,
    "Cast": _cast,
    "CastLike": _cast_like,
    "BitCast": _bitcast,
    "Celu": _celu,
    "Clip": _clip,
    "CumSum": _cumulated(ops.cumsum, 0.0),
    "CumProd": _cumulated(ops.cumprod, 1.0),
    "Div": _binary(_div),
    "Elu": _elu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "Hardmax": _hardmax,
    "IsInf": _is_inf,
    "LeakyRelu": _leaky,
    "LogSoftmax": _softmax(ops.log_softmax),
    "Max": _several(ops.maximum),
    "Mean": _mean,
    "Min": _several(ops.minimum),
    "Mod": _mod,
    "PRelu": _prelu,
    "Pow": _binary(_pow),
    "Relu": _relu,
    "Selu": _selu,
    "Shrink": _shrink,
    "Softmax": _softmax(ops.softmax),
    "Attention.Softmax": _softmax(ops.safe_softmax),  # behind it stand zeros where a row is masked whole
    "Sum": _several(ops.add),
    "Swish": _swish,
    "ThresholdedRelu": _thresholded,
    "Where": _where,
}
