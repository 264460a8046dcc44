"""Lines of element by element operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from math import inf

import numpy as np

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import product
from ...ir.node import Node
from ...ir.types import DTYPES, F32, F64, I32, DType
from ...ops.elementwise.float8 import bounded
from ...ops.elementwise.pointwise import LIMITS
from ...ops.rules import converted
from .. import model
from ..table import Forms, Sizes, checked, normalized_axis


def _several(function: Callable[..., Node]) -> Forms:
    """Of any number of operands, which before opset 8 have one shape.

    :param function: of all operands.
    """

    def all_of(*operands: Node) -> Node:
        return function(*operands)

    def of_one_shape(*operands: Node) -> Node:
        if len({x.shape for x in operands}) > 1:
            raise InvalidProblem(f"operands {', '.join(str(x.type) for x in operands)}: before opset 8 of one shape")
        return function(*operands)

    return {1: of_one_shape, 8: all_of}


def _reduced(function: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    return lambda *operands: functools.reduce(function, operands)


def _unary(function: Callable[[Node], Node]) -> Callable[[Node], Node]:
    return lambda x: function(x)  # whose parameters are ONNX's


def _binary(function: Callable[[Node, Node], Node]) -> Callable[..., Node]:
    return lambda x, y: function(x, y)


def _binary_forms(function: Callable[[Node, Node], Node]) -> Forms:
    """Before opset 7 shapes are equal, or with ``broadcast`` y's axes are x's from ``axis`` on, without it x's last."""

    def aligned(x: Node, y: Node, *, broadcast: int = 0, axis: int | None = None) -> Node:
        return function(x, _aligned(x, y, axis) if broadcast else _of_one_shape(x, y))

    return {1: aligned, 7: _binary(function)}


def _of_one_shape(x: Node, y: Node) -> Node:
    """:raises InvalidProblem: the second operand has not the shape of the first."""
    if x.shape != y.shape:
        raise InvalidProblem(f"operands {x.type} and {y.type} of two shapes, and no broadcast=1")
    return y


def _aligned(x: Node, y: Node, axis: int | None) -> Node:
    """y with axes of one element behind its own, so that they are x's from ``axis`` on.

    :raises InvalidProblem: they are not.
    """
    if all(n == 1 for n in y.shape):
        return ops.reshape(y, ())
    first = x.rank - y.rank if axis is None else normalized_axis(axis, x.rank)
    if first < 0 or any(n != m and n != 1 for n, m in zip_longest(y.shape, x.shape[first : first + y.rank])):
        where = "its last axes" if axis is None else f"axis {axis}"
        raise InvalidProblem(f"the operand {y.type} does not fit {x.type} at {where}")
    return ops.reshape(y, (*y.shape, *(1,) * (x.rank - first - y.rank)))


def _cast(x: Node, *, to: int | str, saturate: int = 1, round_mode: str = "up") -> Node:
    return _to(x, model.element(to), saturate, round_mode)


def _to(x: Node, wanted: DType, saturate: int, round_mode: str) -> Node:
    if checked("round_mode", round_mode, ("up", "down", "nearest")) != "up":
        raise Unsupported(f"round_mode {round_mode}")
    if wanted.name in LIMITS:
        wide = converted(x, F64 if x.dtype is F64 else F32)
        return converted(bounded(wide, wanted, saturate=bool(saturate)), wanted)
    if wanted.is_integer and wanted.bits < 8 and x.dtype.is_float:
        x = converted(x, I32)  # of which the low bits are kept
    return converted(x, wanted)


def _div(x: Node, y: Node) -> Node:
    return ops.div(x, y) if x.dtype.is_float else ops.divide(x, y, "trunc")


def _mod(x: Node, y: Node, *, fmod: int = 0) -> Node:
    return ops.fmod(x, y) if fmod else ops.mod(x, y)


def _pow(x: Node, y: Node) -> Node:
    if x.dtype.is_float:
        return ops.pow(x, converted(y, x.dtype))
    return converted(ops.pow(converted(x, F64), converted(y, F64)), x.dtype)


def _clip_to_numbers(x: Node, *, min: float | None = None, max: float | None = None) -> Node:
    """Before opset 11 the limits are f32 numbers, from opset 6 on the largest of f32 where they are not given."""
    with np.errstate(over="ignore"):
        low, high = (None if v is None else float(np.float32(v).astype(x.dtype.np)) for v in (min, max))
    if low is not None and low != -inf:
        x = ops.maximum(x, low)
    return x if high is None or high == inf else ops.minimum(x, high)


def _clip(x: Node, low: Node | None = None, high: Node | None = None) -> Node:
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
    left = checked("direction", direction, ("LEFT", "RIGHT")) == "LEFT"
    return ops.left_shift(x, y) if left else ops.right_shift(x, y)


def _shrink(x: Node, *, bias: float = 0.0, lambd: float = 0.5) -> Node:
    wide = x if x.dtype.is_float else converted(x, F64)
    shrunk = ops.where(wide < -lambd, wide + bias, ops.where(wide > lambd, wide - bias, 0.0))
    return converted(shrunk, x.dtype)


def _prelu_of_channels(x: Node, slope: Node) -> Node:
    """Before opset 7: one slope, or one for each channel."""
    if slope.rank == 1 and slope.shape[0] != 1:
        if x.rank < 2 or slope.shape[0] != x.shape[1]:
            raise InvalidProblem(f"slopes {slope.type} for the channels of {x.type}")
        slope = ops.reshape(slope, (*slope.shape, *(1,) * (x.rank - 2)))
    return _prelu(x, ops.reshape(slope, ()) if all(n == 1 for n in slope.shape) else slope)


def _prelu(x: Node, slope: Node) -> Node:
    if slope.rank > x.rank:
        raise InvalidProblem(f"slopes {slope.type} for {x.type}")
    slope = ops.broadcast_to(slope, x.shape)
    return ops.where(x < (0.0 if x.dtype.is_float else 0), x * slope, x)


def _bitwise_not(x: Node) -> Node:
    return ops.invert(x)


def _not(x: Node) -> Node:
    return ops.logical_not(x)


def _neg(x: Node) -> Node:
    return ops.neg(x)


def _mean(*operands: Node) -> Node:
    return functools.reduce(ops.add, operands) / float(len(operands))


def _selu(x: Node, *, alpha: float, gamma: float) -> Node:
    return ops.where(x > 0.0, x, alpha * ops.expm1(ops.minimum(x, 0.0))) * gamma


def _elu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.elu(x, alpha)


def _along(function: Callable[[Node, int], Node]) -> Callable[..., Node]:
    return lambda x, *, axis=-1: function(x, normalized_axis(axis, x.rank))


def _along_forms(function: Callable[[Node, int], Node]) -> Forms:
    """Along one axis; before opset 13 over all axes from that one on as if they were one."""

    def flattened(x: Node, *, axis: int) -> Node:
        axis = normalized_axis(axis, x.rank)
        if axis == x.rank - 1:
            return function(x, axis)
        rows = ops.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))
        return ops.reshape(function(rows, 1), x.shape)

    return {1: flattened, 13: _along(function)}


def _hardmax(x: Node, axis: int) -> Node:
    place = ops.argmax(x, axis, keepdims=True)
    at = ops.iota(shape=x.shape, axis=axis)
    return converted(ops.eq(at, ops.broadcast_to(place, x.shape)), x.dtype)


def _cumulated(function: Callable[..., Node], identity: float) -> Callable[..., Node]:
    def along(x: Node, axis: Sizes, *, exclusive: int = 0, reverse: int = 0) -> Node:
        at = normalized_axis(int(axis[0]), x.rank)
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
    return ops.gelu(x, approximate=checked("approximate", approximate, ("none", "tanh")))


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
    return ops.where(x > alpha, x, 0.0)


def _leaky(x: Node, *, alpha: float = 0.01) -> Node:
    return ops.leaky_relu(x, alpha)


def _celu(x: Node, *, alpha: float = 1.0) -> Node:
    return ops.celu(x, alpha)


def _relu(x: Node) -> Node:
    return ops.relu(x) if x.dtype.is_float else ops.maximum(x, 0)


_SINCE_THE_FIRST: dict[str, Callable[..., Node]] = {
    "Add": ops.add,
    "And": ops.logical_and,
    "Div": _div,
    "Equal": ops.eq,
    "Greater": ops.gt,
    "Less": ops.lt,
    "Mul": ops.mul,
    "Or": ops.logical_or,
    "Pow": _pow,
    "Sub": ops.sub,
    "Xor": ops.logical_xor,
}
"""Operators of two operands that broadcast since opset 7 as NumPy does, and before as their attributes say."""
LINES: dict[str, Forms] = {
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
    **{name: _binary_forms(function) for name, function in _SINCE_THE_FIRST.items()},
    **{
        name: _binary(function)
        for name, function in {
            "BitwiseAnd": ops.bitwise_and,
            "BitwiseOr": ops.bitwise_or,
            "BitwiseXor": ops.bitwise_xor,
            "GreaterOrEqual": ops.ge,
            "LessOrEqual": ops.le,
        }.items()
    },
    "Neg": _neg,
    "Not": _not,
    "BitwiseNot": _bitwise_not,
    "BitShift": _shift,
    "Cast": _cast,
    "CastLike": _cast_like,
    "BitCast": _bitcast,
    "Celu": _celu,
    "Clip": {1: _clip_to_numbers, 11: _clip},
    "CumSum": _cumulated(ops.cumsum, 0.0),
    "CumProd": _cumulated(ops.cumprod, 1.0),
    "Elu": _elu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "Hardmax": _along_forms(_hardmax),
    "IsInf": _is_inf,
    "LeakyRelu": _leaky,
    "LogSoftmax": _along_forms(ops.log_softmax),
    "Max": _several(_reduced(ops.maximum)),
    "Mean": _several(_mean),
    "Min": _several(_reduced(ops.minimum)),
    "Mod": _mod,
    "PRelu": {1: _prelu_of_channels, 7: _prelu},
    "Relu": _relu,
    "Selu": _selu,
    "Shrink": _shrink,
    "Softmax": _along_forms(ops.softmax),
    "Attention.Softmax": _along(ops.safe_softmax),  # behind it stand zeros where a row is masked whole
    "Sum": _several(_reduced(ops.add)),
    "Swish": _swish,
    "ThresholdedRelu": _thresholded,
    "Where": _where,
}
