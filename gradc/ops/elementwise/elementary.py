"""Elementary functions: powers and logarithms of base 2 and 10, trigonometric and hyperbolic functions, hypot."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...ir.node import Node
from ...ir.op import Expr, Primitive, Sample
from ..rules import binary_float, cases, full, unary_float, written, zeros_like
from .pointwise import MISMATCH, NOT_FLOAT, eq, reciprocal, rsqrt, where

FEW = ("", "N", "2,N,3")
"""Ranks on which a function of one expression is tried."""


def unary(
    name: str,
    reference: Any,
    cost: int,
    vjp: Any,
    *,
    draw: str = "normal",
    more: tuple[Sample, ...] = (),
    doc: str,
    text: str = "",
    source: str = "",
) -> Primitive:
    """A function of one float operand, computed by the text's function of that name.

    :param vjp: ``(g, y, x) -> dx``.
    """
    return Primitive(
        name,
        infer=unary_float,
        reference=reference,
        lower=Expr(text or f"{name}({{0}})", cost=cost),
        vjp=written(lambda g, y, x: (vjp(g, y, x),), vjp),
        samples=(*cases(*FEW, draw=draw), *more),
        bad=NOT_FLOAT,
        doc=doc,
        source=source,
    )


exp2 = unary("exp2", np.exp2, 12, lambda g, y, x: g * (y * math.log(2)), doc="2 ** x")
log2 = unary("log2", np.log2, 12, lambda g, y, x: g / (x * math.log(2)), draw="positive", doc="logarithm of base 2")
log10 = unary(
    "log10", np.log10, 12, lambda g, y, x: g / (x * math.log(10)), draw="positive", doc="logarithm of base 10"
)

# -- trigonometric -----------------------------------------------------------------------------------------------------

tan = unary("tan", np.tan, 36, lambda g, y, x: g * (y * y + 1), doc="tangent, radians")
asin = unary(
    "asin",
    np.arcsin,
    20,
    lambda g, y, x: g * rsqrt((1 - x) * (x + 1)),
    draw="unit",
    doc="inverse sine, radians",
)
acos = unary(
    "acos",
    np.arccos,
    20,
    lambda g, y, x: -(g * rsqrt((1 - x) * (x + 1))),
    draw="unit",
    doc="inverse cosine, radians",
)
atan = unary("atan", np.arctan, 20, lambda g, y, x: g / (x * x + 1), doc="inverse tangent, in [-pi/2, pi/2]")


def _atan2_vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    # d(angle) = (b da - a db) / (a^2 + b^2), which may lie outside the dtype; 0 at the origin, as torch says
    length = hypot(a, b)
    length = where(eq(length, zeros_like(length)), full(1, length), length)
    g = g / length
    return g * (b / length), -(g * (a / length))


atan2 = Primitive(
    "atan2",
    infer=binary_float,
    reference=np.arctan2,
    lower=Expr("atan2({0}, {1})", cost=24),
    broadcast=True,
    vjp=_atan2_vjp,
    samples=cases(*FEW, arity=2),
    bad=MISMATCH,
    doc="the angle of the point (y, x) = (first, second operand), in [-pi, pi]",
)
hypot: Primitive = Primitive(
    "hypot",
    infer=binary_float,
    reference=np.hypot,
    lower=Expr("hypot({0}, {1})", cost=12),
    broadcast=True,
    vjp=lambda g, y, a, b: (g * (a / y), g * (b / y)),
    samples=cases(*FEW, arity=2),
    bad=MISMATCH,
    doc="sqrt(a^2 + b^2) without overflow",
)

# -- hyperbolic --------------------------------------------------------------------------------------------------------

sinh = unary("sinh", np.sinh, 24, lambda g, y, x: g * cosh(x), doc="hyperbolic sine")
cosh: Primitive = unary("cosh", np.cosh, 24, lambda g, y, x: g * sinh(x), doc="hyperbolic cosine")
asinh = unary("asinh", np.arcsinh, 24, lambda g, y, x: g * reciprocal(hypot(x, 1.0)), doc="inverse hyperbolic sine")
acosh = unary(
    "acosh",
    np.arccosh,
    24,
    lambda g, y, x: g * (rsqrt(x - 1) * rsqrt(x + 1)),
    draw="above_one",
    doc="inverse hyperbolic cosine, of numbers from 1 on",
)
atanh = unary(
    "atanh", np.arctanh, 20, lambda g, y, x: g / ((1 - x) * (x + 1)), draw="unit", doc="inverse hyperbolic tangent"
)
