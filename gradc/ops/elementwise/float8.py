"""Conversion to floats of 8 bits, with a choice of what becomes of values beyond their range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Sample
from ...ir.types import DTYPES, F32, DType, Type
from ..rules import converted
from .pointwise import LIMITS, abs, clamp, ge, gt, lt, maximum, where
from .rounding import copysign

E8M0 = DTYPES["e8m0"]
LEAST, SUBNORMAL = 2.0**-127, 2.0**-126
"""The least value of e8m0, and where f32's values are no longer subnormal."""


def bounded(x: Node, dtype: DType, *, saturate: bool) -> Node:
    """x, an f32 or f64, with that in the place of values beyond ``dtype``'s range which :func:`.cast` gives for them.

    :param saturate: they become the largest finite number; False: what rounds to more becomes an infinity, or NaN where
        the format has none.
    """
    most = LIMITS[dtype.name]
    if saturate:
        return clamp(x, -most, most)
    half_way = most + (most - float(np.nextafter(dtype.np.type(most), dtype.np.type(0)))) / 2
    if np.isnan(dtype.np.type(math.inf)):  # 448 is even: what lies half way to the next rounds to it
        return where(gt(abs(x), half_way), math.nan, x)
    above = ge(abs(x), half_way)
    return where(above, copysign(where(above, math.inf, x), x), x)


def _magnitude(x: Node) -> Node:
    """abs(x), at least 2^-127; above it 2^-126, as PyTorch rounds subnormal numbers up."""
    size = abs(x)
    return where(gt(size, LEAST) & lt(size, SUBNORMAL), SUBNORMAL, maximum(size, LEAST))


def _to_float8(x: Type, *, dtype: DType, saturate: bool = True) -> Any:
    if dtype is not E8M0 and dtype.name not in LIMITS:
        raise TypeRuleError(f"dtype={dtype}; a float of 8 bits is one of {' '.join((*LIMITS, E8M0.name))}")
    return x.with_dtype(dtype), {"dtype": dtype, "saturate": saturate}


def _value(x: Node, *, dtype: DType, saturate: bool) -> Node:
    if x.dtype is dtype:
        return x
    wide = converted(x, F32)
    return converted(_magnitude(wide) if dtype is E8M0 else bounded(wide, dtype, saturate=saturate), dtype)


def _vjp(g: Node, y: Node, x: Node, *, dtype: DType, saturate: bool) -> tuple[Any]:
    # dx = g, converted as x is
    rounded = to_float8.apply((g,), {"dtype": dtype, "saturate": saturate})
    return (converted(rounded, x.dtype if x.dtype.has_tangent else dtype.compute),)


to_float8 = Composite(
    "to_float8",
    infer=_to_float8,
    decompose=_value,
    vjp=_vjp,
    samples=(
        *(
            Sample(("F[2,N]",), {"dtype": dtype, "saturate": saturate})
            for dtype in (*LIMITS, "e8m0")
            for saturate in (True, False)
        ),
        Sample(("i32[N]",), {"dtype": "f8e4m3"}, draw=("int",)),
    ),
    bad=(
        BadSample(("f32[3]",), {"dtype": "f16"}, match="dtype=f16; a float of 8 bits is one of f8e4m3 f8e5m2 e8m0"),
        BadSample(("f32[3]",), {"dtype": "f4e2m1"}, match="dtype=f4e2m1; a float of 8 bits is one of"),
    ),
    doc=(
        "x as PyTorch converts it to a float of 8 bits: rounded to f32 first; values beyond the range, infinities too,"
        " become the largest number, or with saturate=False an infinity, or NaN where the format has none; e8m0 takes"
        " the magnitude, at least 2^-127. The gradient is a value of the same format: the cotangent converted in the"
        " same way. A cast passes it through unrounded"
    ),
    source="OCP 8-bit Floating Point Specification 1.0, 5.2",
)
