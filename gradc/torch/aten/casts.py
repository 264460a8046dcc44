"""Casts as torch defines them, where they differ from gradc's: to floats of 8 bits that do not hold the value.

Releases of torch differ there, so torch is asked.  A float beyond the range of an integer type is undefined in torch
(machines differ); gradc's answer is the nearest integer of the type.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ... import ops
from ...ir.node import Node
from ...ir.types import F32, DType
from ...ops.elementwise.pointwise import LIMITS
from ...ops.rules import converted
from ..sizes import TORCH_DTYPES


@functools.cache
def _overflow(dtype: DType) -> tuple[float, float, float] | None:
    """For a float of 8 bits, the least magnitude in f32 that overflows, what it becomes, and what infinity becomes;
    None for other dtypes.
    """
    if dtype.name not in LIMITS:
        return None
    kind = torch.finfo(TORCH_DTYPES[dtype])
    between = kind.max + kind.eps * 2.0 ** (math.frexp(kind.max)[1] - 2)  # half way to what would come next
    if number(between, dtype) == kind.max:
        between = float(torch.nextafter(torch.tensor(between), torch.tensor(math.inf)))
    return between, number(2 * kind.max, dtype), number(math.inf, dtype)


def number(value: Any, dtype: DType) -> Any:
    """A number as it stands in a tensor of a dtype: a float of 8 bits as torch makes it, others as they are."""
    if dtype.name not in (*LIMITS, "e8m0"):
        return value
    return float(torch.tensor(value, dtype=torch.float32).to(TORCH_DTYPES[dtype]).to(torch.float32))


@functools.cache
def _is_magnitude(dtype: DType) -> bool:
    """Whether a power of two drops the sign of a value, and has a least value in place of 0."""
    return bool(number(-1.0, dtype) == 1.0 and number(0.0, dtype) > 0)


def cast(x: Node, dtype: DType) -> Node:
    """x in a dtype.  torch makes a float of 8 bits of f32, so that it rounds a value of f64 twice."""
    if dtype.name == "e8m0" and x.dtype is not dtype and _is_magnitude(dtype):
        return converted(_magnitude(converted(x, F32), number(0.0, dtype)), dtype)
    overflow = _overflow(dtype)
    if overflow is None or x.dtype is dtype:
        return converted(x, dtype)
    least, beyond, of_infinity = overflow
    x = converted(x, F32)
    value = ops.stop_gradient(x)
    if math.isfinite(of_infinity):
        x = ops.where(ops.isinf(value), _signed(of_infinity, value), x)
    if not math.isfinite(beyond):  # added, so that the gradient passes through
        x = x + ops.where(ops.abs(value) >= least, _signed(beyond, value), -0.0)
    return converted(x, dtype)


def _magnitude(x: Node, least: float) -> Node:
    """The larger of abs(x) and ``least``, to which torch passes the gradient as to any cast: what it lacks is added."""
    value = ops.stop_gradient(x)
    size = ops.abs(value)
    to_zero = ops.where(value < 0, size, 0.0)  # twice, as the sum of both may overflow
    return x + to_zero + to_zero + ops.where(size < least, least - size, 0.0)


def _signed(magnitude: float, like: Node) -> Node:
    one = ops.constant(value=(F32.literal(magnitude),), dtype=F32)
    return ops.copysign(ops.broadcast_to(ops.reshape(one, ()), like.shape), like)
