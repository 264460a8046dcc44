"""Masks: what kind of number an element is, and logic on masks."""

from __future__ import annotations

import math
from collections.abc import Callable

from ...ir.node import Node
from ...ir.op import ZERO, BadSample, Composite, Sample
from ...ir.types import BOOL, Type
from ..rules import cases, converted, full, unary_float, zeros_like
from .pointwise import MISMATCH, abs, bitwise_and, bitwise_or, bitwise_xor, eq, invert, lt, ne
from .rounding import copysign


def _mask(x: Type) -> Type:
    return x.with_dtype(BOOL)


def _test(name: str, of_float: Callable[[Node], Node], of_other: bool, doc: str) -> Composite:
    return Composite(
        name,
        infer=_mask,
        decompose=lambda x: of_float(x) if x.dtype.is_float else full(of_other, x, BOOL),
        vjp=lambda g, y, x: (ZERO,),
        samples=(*cases("", "N"), *cases("N", dtype="i32", draw="int")),
        doc=doc,
    )


isnan = _test("isnan", lambda x: ne(x, x), False, "whether x is no number")
isinf = _test("isinf", lambda x: eq(abs(x), full(math.inf, x)), False, "whether x is infinite")
isfinite = _test("isfinite", lambda x: lt(abs(x), full(math.inf, x)), True, "whether x is neither infinite nor NaN")
isposinf = _test("isposinf", lambda x: eq(x, full(math.inf, x)), False, "whether x is +inf")
isneginf = _test("isneginf", lambda x: eq(x, full(-math.inf, x)), False, "whether x is -inf")
signbit = Composite(
    "signbit",
    infer=lambda x: _mask(unary_float(x)),
    decompose=lambda x: lt(copysign(full(1, x), x), zeros_like(x)),
    vjp=lambda g, y, x: (ZERO,),
    samples=cases("", "N"),
    bad=(BadSample(("i32[3]",), match="i32 is no float"),),
    doc="whether the sign is minus, that of -0 too",
)


def _both_masks(x: Type, y: Type) -> Type:
    return _mask(x)


def _logic(name: str, op: Callable[[Node, Node], Node], doc: str) -> Composite:
    return Composite(
        name,
        infer=_both_masks,
        decompose=lambda x, y: op(converted(x, BOOL), converted(y, BOOL)),
        vjp=lambda g, y, a, b: (ZERO, ZERO),
        broadcast=True,
        samples=(
            *cases("N", arity=2, dtype="bool", draw="bool"),
            *cases("2,N", arity=2),
            Sample(("i32[N]", "bool[2,N]"), draw=("index:2", "bool")),
        ),
        bad=MISMATCH[:1],
        doc=f"{doc}; a number is true unless it is 0",
    )


logical_and = _logic("logical_and", bitwise_and, "whether both hold")
logical_or = _logic("logical_or", bitwise_or, "whether one or both hold")
logical_xor = _logic("logical_xor", bitwise_xor, "whether just one holds")
logical_not = Composite(
    "logical_not",
    infer=_mask,
    decompose=lambda x: invert(converted(x, BOOL)),
    vjp=lambda g, y, x: (ZERO,),
    samples=(*cases("N", dtype="bool", draw="bool"), *cases("2,N"), *cases("N", dtype="i32", draw="index:2")),
    doc="whether x does not hold; a number holds unless it is 0",
)
