"""Activations: relu, gelu, silu, softplus."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Expr, Primitive, Sample
from ...ir.types import Type
from ..rules import SHAPES, cases, converted, full, unary_float, unary_number, zeros_like
from .pointwise import NOT_FLOAT, UNARY, abs, eq, exp, ge, gt, log1p, maximum, reciprocal, sigmoid, tanh, where

relu = Primitive(
    "relu",
    infer=unary_number,
    reference=lambda x: np.where(x < 0, x.dtype.type(0), x),
    lower=Expr("relu({0})"),
    # of y, which what follows reads anyway: x is not kept for it
    vjp=lambda g, y, x: (where(gt(y, zeros_like(y)), g, zeros_like(g)),),
    samples=UNARY,
    doc="max(x, 0); propagates NaN; the derivative at 0 and at NaN is 0",
)


def _gelu(x: Type, *, approximate: str = "none") -> Type:
    if approximate not in ("none", "tanh"):
        raise TypeRuleError(f"approximate={approximate!r} is neither 'none' nor 'tanh'")
    return unary_float(x)


_TANH = (math.sqrt(2 / math.pi), 0.044715)


def _logistic(z: Node) -> tuple[Node, Node]:
    """(sigmoid(z), its derivative), from one exponential; the derivative as s (1 - s) would cancel for large z."""
    e = exp(-abs(z))
    r = reciprocal(e + 1)
    return where(ge(z, zeros_like(z)), r, e * r), e * r * r


def _gelu_argument(wide: Node) -> Node:
    """The argument of tanh in the tanh approximation: sqrt(2/pi) (x + 0.044715 x^3)."""
    return (wide * wide * wide * _TANH[1] + wide) * _TANH[0]


def _gelu_value(x: Node, *, approximate: str) -> Node:
    wide = converted(x, x.dtype.compute)
    cdf = normal_cdf(wide) if approximate == "none" else (tanh(_gelu_argument(wide)) + 1) * 0.5
    return converted(wide * cdf, x.dtype)


_erfc = np.frompyfunc(math.erfc, 1, 1)


def _reference_normal_cdf(x: Any) -> Any:
    return np.asarray(np.asarray(_erfc(np.asarray(x, np.float64) * -math.sqrt(0.5)), np.float64) * 0.5, x.dtype)


normal_cdf = Primitive(
    "normal_cdf",
    infer=unary_float,
    reference=_reference_normal_cdf,
    lower=Expr("normal_cdf({0})", cost=14),
    vjp=lambda g, y, x: (g * (exp(x * x * -0.5) * math.sqrt(0.5 / math.pi)),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="Phi(x), the standard normal CDF: (1 + erf(x / sqrt(2))) / 2, as one function; but in f64 to a unit of 1,"
    " and 0 below -5.75, where ndtr has the digits of small results",
)


def _reference_gelu_derivative(x: Any) -> Any:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        density = np.exp(wide * wide * -0.5) * math.sqrt(0.5 / math.pi)
        slope = np.where(density == 0, 0.0, wide * density)  # at infinity, too
    return np.asarray(np.asarray(_erfc(wide * -math.sqrt(0.5)), np.float64) * 0.5 + slope, x.dtype)


def _gelu_derivative_vjp(g: Node, y: Node, x: Node) -> tuple[Node]:
    # Phi'(x) (2 - x^2), which is 0 where x^2 overflows
    density = exp(x * x * -0.5) * math.sqrt(0.5 / math.pi)
    return (g * where(eq(density, zeros_like(density)), density, density * (2 - x * x)),)


gelu_derivative = Primitive(
    "gelu_derivative",
    infer=unary_float,
    reference=_reference_gelu_derivative,
    lower=Expr("gelu_derivative({0})", cost=24),
    vjp=_gelu_derivative_vjp,
    samples=cases(*SHAPES),
    bad=NOT_FLOAT,
    doc="Phi(x) + x Phi'(x), the derivative of x Phi(x), with Phi the standard normal CDF: from one exponential",
)


def _gelu_vjp(g: Node, y: Node, x: Node, *, approximate: str) -> tuple[Node]:
    # dx = g (P + x P'), P = Phi(x) or sigmoid(2 a(x)); g is multiplied last because g x may overflow, and P' is 0 where
    # x^2 overflows
    wide = converted(x, x.dtype.compute)
    if approximate == "none":
        slope = gelu_derivative(wide)
    else:
        cdf, flat = _logistic(_gelu_argument(wide) * 2)
        slope = cdf + where(
            eq(flat, zeros_like(flat)), flat, wide * flat * (wide * wide * (6 * _TANH[0] * _TANH[1]) + 2 * _TANH[0])
        )
    return (converted(converted(g, wide.dtype) * slope, x.dtype),)


gelu = Composite(
    "gelu",
    infer=_gelu,
    decompose=_gelu_value,
    vjp=_gelu_vjp,
    samples=(*cases(*SHAPES), *(Sample((f"F[{s}]",), {"approximate": "tanh"}) for s in ("N", "2,N"))),
    bad=(BadSample(("f32[3]",), {"approximate": "erf"}, match="neither"), *NOT_FLOAT),
    doc="x * Phi(x), with Phi the standard normal CDF; approximate='tanh' selects the tanh approximation",
    source="Hendrycks and Gimpel 2016",
)


def _silu_value(x: Node) -> Node:
    wide = converted(x, x.dtype.compute)
    return converted(wide * sigmoid(wide), x.dtype)


def _silu_vjp(g: Node, y: Node, x: Node) -> tuple[Node]:
    # dx = g (s + x s') with s = sigmoid(x); g is multiplied last because g x may overflow
    wide = converted(x, x.dtype.compute)
    s, slope = _logistic(wide)
    return (converted(converted(g, wide.dtype) * (s + wide * slope), x.dtype),)


silu = Composite(
    "silu", infer=unary_float, decompose=_silu_value, vjp=_silu_vjp, samples=UNARY, bad=NOT_FLOAT, doc="x * sigmoid(x)"
)


def _softplus(x: Type, *, beta: float = 1.0, threshold: float = 20.0) -> Type:
    if not beta > 0:
        raise TypeRuleError(f"beta={beta} is not above 0")
    return unary_float(x)


def _softplus_value(x: Node, *, beta: float, threshold: float) -> Node:
    wide = converted(x, x.dtype.compute)
    scaled = wide * beta
    linear = gt(scaled, full(threshold, scaled))
    soft = (maximum(scaled, zeros_like(scaled)) + log1p(exp(-abs(scaled)))) / beta
    return converted(where(linear, wide, soft), x.dtype)


def _softplus_vjp(g: Node, y: Node, x: Node, *, beta: float, threshold: float) -> tuple[Node]:
    # dx = g sigmoid(beta x), and g where beta x exceeds the threshold
    scaled = converted(x, x.dtype.compute) * beta
    slope = where(gt(scaled, full(threshold, scaled)), full(1, scaled), sigmoid(scaled))
    return (converted(converted(g, x.dtype.compute) * slope, x.dtype),)


softplus = Composite(
    "softplus",
    infer=_softplus,
    decompose=_softplus_value,
    vjp=_softplus_vjp,
    samples=(*cases(*SHAPES), Sample(("F[N]",), {"beta": 2.0, "threshold": 1.0})),
    bad=(BadSample(("f32[3]",), {"beta": 0.0}, match="not above 0"), *NOT_FLOAT),
    doc="log(1 + exp(beta*x)) / beta; x itself where beta*x exceeds threshold",
)
