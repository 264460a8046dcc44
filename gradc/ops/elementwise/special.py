"""Special functions: of the error function, of the gamma function, and products and sums with logarithms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Expr, Primitive, Sample
from ...ir.types import Type
from ..rules import binary_float, cases, converted, floating, full, unary_float, widened, zeros_like
from .elementary import FEW, unary
from .pointwise import (
    MISMATCH,
    NOT_FLOAT,
    abs,
    bitwise_and,
    bitwise_or,
    eq,
    exp,
    gt,
    le,
    log,
    log1p,
    maximum,
    ne,
    sigmoid,
    where,
)

# -- references --------------------------------------------------------------------------------------------------------

Array = np.ndarray[Any, Any]


def _of_f64(function: Any) -> Any:
    """A function of numbers in f64 as one of arrays of any float dtype, rounded once."""
    vector = np.frompyfunc(function, 1, 1)
    return lambda x: np.asarray(vector(np.asarray(x, np.float64)), np.float64).astype(x.dtype)


def _inverse_erf(x: float) -> float:
    """By Newton's method from an approximation by Winitzki (2008), on erfc where x is near 1."""
    if not -1 < x < 1:
        return math.copysign(math.inf, x) if x in (-1, 1) else math.nan
    a = math.fabs(x)
    if a < 1e-8:
        return x * math.sqrt(math.pi) / 2
    w = math.log1p(-a * a)
    half = 2 / (math.pi * 0.147) + w / 2
    y = math.sqrt(math.sqrt(half * half - w / 0.147) - half)
    for _ in range(4):
        missed = math.erf(y) - a if a < 0.5 else (1 - a) - math.erfc(y)
        step = missed * math.sqrt(math.pi) / 2 * math.exp(y * y)
        y -= step / (1 + y * step)
    return math.copysign(y, x)


def _log_gamma(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    return math.lgamma(x)


def _hurwitz(s: int, z: float) -> float:
    """The sum over k >= 0 of (z + k)^-s for z > 0, by Euler and Maclaurin."""
    if math.isinf(z) or z == 0:
        return 0.0 if z else math.inf
    try:
        total = math.fsum((z + k) ** -s for k in range(12))
    except OverflowError:
        return math.inf
    z += 12
    terms, product, power = [z / (s - 1), 0.5], float(s), 1 / z
    for k, bernoulli in enumerate((1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000)):
        terms.append(bernoulli * product * power)
        product *= (s + 2 * k + 1) * (s + 2 * k + 2)
        power /= z * z
    return total + math.fsum(terms) * z**-s


def _digamma(x: float) -> float:
    if x == 0 or math.isinf(x) or (x < 0 and x == math.floor(x)):
        return -math.copysign(math.inf, x) if x == 0 else x if x > 0 else math.nan
    if math.isnan(x):
        return x
    if x < 0:
        angle = math.pi * (x - round(x))
        return _digamma(1 - x) - math.pi * math.cos(angle) / math.sin(angle)
    below = []
    while x < 12:
        below.append(1 / x)
        x += 1
    s, series = 1 / (x * x), 0.0
    for term in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = s * (term + series)
    return math.fsum([math.log(x), -0.5 / x, -series, *(-b for b in below)])


def _polygamma_of(order: int, x: float) -> float:
    sign, s = (-1 if order % 2 == 0 else 1), order + 1
    if math.isnan(x):
        return x
    if x < 0:
        if math.isinf(x):
            return math.nan
        if x == math.floor(x):
            return math.nan if sign < 0 else math.inf
        # Both distances are exact but where x is next to 0, where the second is.
        before = _hurwitz(s, math.ceil(x) - x) - _hurwitz(s, 1 - x)
        return sign * math.factorial(order) * (_hurwitz(s, x - math.floor(x)) + sign * before)
    return sign * math.factorial(order) * _hurwitz(s, x)


# -- error function ----------------------------------------------------------------------------------------------------

_SLOPE = 2 / math.sqrt(math.pi)

erfc = unary(
    "erfc", _of_f64(math.erfc), 30, lambda g, y, x: g * (exp(-(x * x)) * -_SLOPE), doc="1 - erf(x), small numbers too"
)
erfinv = unary(
    "erfinv",
    _of_f64(_inverse_erf),
    40,
    lambda g, y, x: g * (exp(y * y) * (1 / _SLOPE)),
    draw="unit",
    doc="the number whose erf is x; inf at 1, NaN outside [-1, 1]",
)

# -- gamma function ----------------------------------------------------------------------------------------------------

lgamma = unary(
    "lgamma",
    _of_f64(_log_gamma),
    60,
    lambda g, y, x: g * digamma(x),
    draw="positive",
    doc="log |gamma(x)|; inf at 0 and the negative integers",
)
digamma: Primitive = unary(
    "digamma",
    _of_f64(_digamma),
    80,
    lambda g, y, x: g * polygamma(x, order=1),
    draw="positive",
    doc="the derivative of log gamma; NaN at the negative integers",
)


def _polygamma(x: Type, *, order: int) -> Type:
    if not 1 <= order <= 30:
        raise TypeRuleError(f"order={order} is not between 1 and 30 (digamma is the one of order 0)")
    return floating(x)


polygamma: Primitive = Primitive(
    "polygamma",
    infer=_polygamma,
    reference=lambda x, *, order: _of_f64(lambda v: _polygamma_of(order, v))(x),
    lower=Expr("polygamma({order}, {0})", cost=200),
    order=("order", "x"),
    vjp=lambda g, y, x, *, order: (g * polygamma(x, order=order + 1),),
    samples=(
        Sample(("F[N]",), {"order": 1}, draw=("positive",)),
        Sample(("F[2,N]",), {"order": 4}, draw=("above_one",)),
        Sample(("f64[N]",), {"order": 2}, draw=("nonzero",)),
    ),
    bad=(BadSample(("f32[3]",), {"order": 0}, match="order=0"), BadSample(("i32[3]",), {"order": 1}, match="no float")),
    doc="the derivative of digamma of that order, 1 or more",
)

# -- products and sums with logarithms ---------------------------------------------------------------------------------


def _times_log(function: Any) -> Any:
    def value(x: Node, y: Node) -> Node:
        none = bitwise_and(eq(x, zeros_like(x)), eq(y, y))  # a NaN of y stays
        return where(none, zeros_like(x), x * function(where(none, full(1, y), y)))

    return value


def _times_log_vjp(function: Any, at: float) -> Any:
    def vjp(g: Node, _: Node, x: Node, y: Node) -> tuple[Node, Node]:
        # dx = g log(y + at), 0 where x is 0 and the logarithm is none; dy = g x / (y + at)
        none = bitwise_and(eq(x, zeros_like(x)), le(y, full(-at, y)))
        slope = x / (y + at) if at else x / y
        return where(none, zeros_like(g), g * function(where(none, full(1, y), y))), g * slope

    return vjp


_LOGARITHM = tuple(Sample((f"F[{s}]",) * 2, draw=("normal", "positive")) for s in FEW)
xlogy = Composite(
    "xlogy",
    infer=binary_float,
    decompose=widened(_times_log(log)),
    vjp=_times_log_vjp(log, 0.0),
    broadcast=True,
    samples=_LOGARITHM,
    bad=MISMATCH,
    doc="x * log(y), 0 where x is 0 unless y is NaN",
)
xlog1py = Composite(
    "xlog1py",
    infer=binary_float,
    decompose=widened(_times_log(log1p)),
    vjp=_times_log_vjp(log1p, 1.0),
    broadcast=True,
    samples=_LOGARITHM,
    bad=MISMATCH,
    doc="x * log(1 + y), 0 where x is 0 unless y is NaN",
)


def _log_sum(a: Node, b: Node, *, scale: float) -> Node:
    top = maximum(a, b)
    apart = abs(a - b) * -scale  # inf - inf: two equal infinities are their own sum
    equal = eq(a, b)
    apart = where(equal, zeros_like(apart), apart)
    infinite = bitwise_and(equal, eq(abs(top), full(math.inf, top)))
    return where(infinite, top, top + log1p(exp(apart)) / scale)


def _log_sum_op(name: str, scale: float, doc: str) -> Composite:
    def vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
        # da = g e^a / (e^a + e^b) = g sigmoid(a - b)
        wide = converted(a, a.dtype.compute) - converted(b, a.dtype.compute)
        wide, g = (wide if scale == 1 else wide * scale), converted(g, a.dtype.compute)
        return converted(g * sigmoid(wide), a.dtype), converted(g * sigmoid(-wide), a.dtype)

    return Composite(
        name,
        infer=binary_float,
        decompose=widened(lambda a, b: _log_sum(a, b, scale=scale)),
        vjp=vjp,
        broadcast=True,
        samples=cases(*FEW, arity=2),
        bad=MISMATCH,
        doc=doc,
    )


logaddexp = _log_sum_op("logaddexp", 1.0, "log(e^a + e^b) without overflow")
logaddexp2 = _log_sum_op("logaddexp2", math.log(2), "log2(2^a + 2^b) without overflow")


def _logit(x: Type, *, eps: float | None = None) -> Type:
    return floating(x)


def _least(eps: float | None) -> float | None:
    """The least that x is held at; torch takes an eps below 0 as none."""
    return None if eps is None or eps < 0 else eps


def _held(x: Node, eps: float | None) -> Node:
    """x within [eps, 1 - eps]; of an eps above a half, eps where x is below it, and 1 - eps elsewhere."""
    eps = _least(eps)
    if eps is None:
        return x
    low, high = full(eps, x), full(1 - eps, x)
    return where(gt(low, x), low, where(gt(x, high), high, x))


def _logit_vjp(g: Node, y: Node, x: Node, *, eps: float | None) -> tuple[Node]:
    # dx = g / (x (1 - x)), 0 where x was held; without eps NaN outside [0, 1], as torch says
    eps = _least(eps)
    low = eps or 0.0
    outside = bitwise_or(gt(full(low, x), x), gt(x, full(1 - low, x)))
    safe = where(outside, full(0.5, x), x)
    return (where(outside, full(math.nan if eps is None else 0.0, g), g / (safe * (1 - safe))),)


logit = Composite(
    "logit",
    infer=_logit,
    decompose=widened(lambda x, *, eps: log(_held(x, eps) / (1 - _held(x, eps)))),
    vjp=_logit_vjp,
    samples=(*cases("N", "2,N", draw="unit"), Sample(("F[N]",), {"eps": 0.2}, draw=("unit",))),
    bad=NOT_FLOAT,
    doc="log(x / (1 - x)); with eps x is first held in [eps, 1 - eps]",
)


def _entr(x: Node) -> Node:
    negative = gt(zeros_like(x), x)
    inside = bitwise_and(ne(x, zeros_like(x)), le(zeros_like(x), x))
    safe = where(inside, x, full(1, x))
    other = where(negative, full(-math.inf, x), where(ne(x, x), x, zeros_like(x)))
    return where(inside, -(safe * log(safe)), other)


entr = Composite(
    "entr",
    infer=unary_float,
    decompose=widened(_entr),
    vjp=lambda g, y, x: (g * (-log(x) - 1),),
    samples=cases("N", "2,N", draw="positive"),
    bad=NOT_FLOAT,
    doc="-x log(x); 0 at 0, -inf below",
)
ndtr = Composite(
    "ndtr",
    infer=unary_float,
    decompose=widened(lambda x: erfc(x * -math.sqrt(0.5)) * 0.5),
    vjp=lambda g, y, x: (g * (exp(x * x * -0.5) * math.sqrt(0.5 / math.pi)),),
    samples=cases("N", "2,N"),
    bad=NOT_FLOAT,
    doc="the normal distribution's probability below x",
)
