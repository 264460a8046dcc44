"""Products of matrices of 8-bit integers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Library, Sample
from ...ir.types import DTYPES, F32, F64, I32, I64, DType, Type
from ..rules import converted
from .contract import call_of, matmul_axes, matmul_views, product_shape

CODES = (DTYPES["i8"], DTYPES["u8"])


def _integer_matmul(x: Type, y: Type) -> Type:
    for operand in (x, y):
        if operand.dtype not in CODES:
            raise TypeRuleError(f"{operand.dtype} is neither i8 nor u8; write a cast")
    return Type(I32, product_shape(x, y))


def largest_sum(x: DType, y: DType, count: int) -> int:
    """The largest magnitude of a sum of so many products of integers of two dtypes."""
    return count * math.prod(max(-d.range[0], d.range[1]) for d in (x, y))


def _integer_matmul_reference(x: Any, y: Any) -> Any:
    return np.matmul(x.astype(np.int32), y.astype(np.int32))


def _integer_matmul_value(x: Node, y: Node) -> Node:
    """In floats that hold every partial sum."""
    inner = x.shape[-1]
    most = largest_sum(x.dtype, y.dtype, inner) if isinstance(inner, int) else 1 << 52
    wide = F32 if most <= 1 << 24 else F64
    total = call("matmul", converted(x, wide), converted(y, wide))
    return converted(total if most < 1 << 31 else converted(total, I64), I32)


integer_matmul = Library(
    "integer_matmul",
    infer=_integer_matmul,
    sugar=call_of("integer_matmul"),
    reference=_integer_matmul_reference,
    decompose=_integer_matmul_value,
    axes=matmul_axes,
    views=matmul_views,
    multiplies=True,
    in_place_of_dtype=True,
    vjp=lambda g, y, a, b: (DISCRETE, DISCRETE),
    samples=(
        Sample(("i8[3,4]", "i8[4,N]"), draw=("int", "int")),
        Sample(("u8[N,70]", "i8[70,3]"), draw=("int", "int")),
        Sample(("i8[2,N,4]", "u8[2,4,3]"), draw=("int", "int")),
        Sample(("u8[2,3,4]", "u8[4]"), draw=("int", "int")),
        Sample((np.full((2, 70000), 255, np.uint8), np.full((70000, 1), 255, np.uint8))),
    ),
    bad=(
        BadSample(("i8[3,4]", "i8[3,4]"), match="inner sizes differ: 4 and 3"),
        BadSample(("i8[3,4]", "i32[4,3]"), match="i32 is neither i8 nor u8"),
        BadSample(("f32[3,4]", "i8[4,3]"), match="f32 is neither i8 nor u8"),
        BadSample(("i8[]", "i8[4,3]"), match="scalar"),
    ),
    doc=(
        "the matrix product of 8-bit integers with NumPy's broadcasting of batch axes, i32, modulo 2^32; a CPU adds up"
        " products of four bytes (VNNI) where it can, and the integers are the same where it cannot"
    ),
    source="torch._int_mm",
)
