"""Modified Bessel functions of the first kind, i0, i0e, i1, i1e, the scaled complementary error function erfcx, and
what needs it: log_ndtr and ndtri.
"""

from __future__ import annotations

import math
from typing import Any

from ...ir.node import Node
from ...ir.op import Composite, Primitive, Sample
from ..rules import cases, full, unary_float, widened, zeros_like
from .elementary import unary
from .pointwise import NOT_FLOAT, bitwise_and, eq, exp, gt, log, log1p, lt, minimum, sign, sqrt, where
from .special import _of_f64, erfc, erfinv

# -- references --------------------------------------------------------------------------------------------------------


def _bessel(order: int, scaled: bool) -> Any:
    """I_order(x), times e^-|x| if scaled: the series below 19, the asymptotic one above (DLMF 10.25.2, 10.40.1)."""

    def value(x: float) -> float:
        a = math.fabs(x)
        if math.isnan(x):
            return x
        if math.isinf(x):
            return 0.0 if scaled else math.copysign(math.inf, x) if order else math.inf
        if a < 19:
            terms = [(a / 2) ** order]
            for k in range(1, 60):
                terms.append(terms[-1] * (a * a / 4) / (k * (k + order)))
            found = math.fsum(terms) * (math.exp(-a) if scaled else 1.0)
        else:
            terms = [1.0]
            for k in range(1, 36):
                terms.append(terms[-1] * ((2 * k - 1) ** 2 - 4 * order) / (8 * k * a))
            found = math.fsum(terms) / (math.sqrt(2 * math.pi) * math.sqrt(a))
            if not scaled:
                found = found * math.exp(a / 2) * math.exp(a / 2) if a < 1400 else math.inf
        return math.copysign(found, x) if order else found

    return _of_f64(value)


def _scaled_erfc(x: float) -> float:
    """e^(x^2) erfc(x): by Laplace's continued fraction from 2 on (DLMF 7.9.2)."""
    if x < 2:
        return math.inf if x < -26.7 else math.exp(x * x) * math.erfc(x)
    below = x
    for k in range(60, 0, -1):
        below = x + k / 2 / below
    return 1 / math.sqrt(math.pi) / below


# -- modified Bessel functions -----------------------------------------------------------------------------------------


def _safe(x: Node) -> tuple[Node, Node]:
    """(where x is 0, x with 1 there)."""
    zero = eq(x, zeros_like(x))
    return zero, where(zero, full(1, x), x)


def _i1_slope(y: Node, x: Node) -> Node:
    zero, safe = _safe(x)
    return where(zero, full(0.5, x), i0(x) - y / safe)


def _i1e_slope(y: Node, x: Node) -> Node:
    zero, safe = _safe(x)
    return where(zero, full(0.5, x), i0e(x) - (y * sign(x) + y / safe))  # 1 / safe may overflow


i0: Primitive = unary(
    "i0",
    _bessel(0, False),
    120,
    lambda g, y, x: g * i1(x),
    doc="the modified Bessel function of the first kind of order 0",
    source="torch.special.i0; DLMF 10.25",
)
i0e: Primitive = unary(
    "i0e",
    _bessel(0, True),
    120,
    lambda g, y, x: g * (i1e(x) - sign(x) * y),
    doc="i0(x) e^-|x|",
    source="torch.special.i0e; DLMF 10.25",
)
i1: Primitive = unary(
    "i1",
    _bessel(1, False),
    120,
    lambda g, y, x: g * _i1_slope(y, x),
    doc="the modified Bessel function of the first kind of order 1",
    source="torch.special.i1; DLMF 10.25",
)
i1e: Primitive = unary(
    "i1e",
    _bessel(1, True),
    120,
    lambda g, y, x: g * _i1e_slope(y, x),
    doc="i1(x) e^-|x|",
    source="torch.special.i1e; DLMF 10.25",
)

# -- error function ----------------------------------------------------------------------------------------------------

erfcx = unary(
    "erfcx",
    _of_f64(_scaled_erfc),
    120,
    lambda g, y, x: g * (x * y * 2 - 2 / math.sqrt(math.pi)),
    draw="positive",
    more=(Sample(("f32[2,N]",)), Sample(("f64[N]",), draw=("nonzero",))),  # below -2.9 x * y * 2 is beyond f16
    doc="e^(x^2) erfc(x)",
    source="torch.special.erfcx; DLMF 7.9",
)


def _log_ndtr(x: Node) -> Node:
    low = lt(x, full(-1, x))
    tail = log(erfcx(where(low, x, full(-1, x)) * -math.sqrt(0.5)) * 0.5) - x * x * 0.5
    return where(low, tail, log1p(erfc(where(low, full(-1, x), x) * math.sqrt(0.5)) * -0.5))


log_ndtr = Composite(
    "log_ndtr",
    infer=unary_float,
    decompose=widened(_log_ndtr),
    # dx = the density over the probability
    vjp=lambda g, y, x: (g * (math.sqrt(2 / math.pi) / erfcx(x * -math.sqrt(0.5))),),
    samples=cases("N", "2,N"),
    bad=NOT_FLOAT,
    doc="log of the normal distribution's probability below x, without underflow",
    source="torch.special.log_ndtr",
)


def _ndtri(p: Node) -> Node:
    """By erfinv in the middle, in the tails by Newton's method on the log of the probability."""
    tail = minimum(p, 1 - p)
    middle = erfinv(p * 2 - 1) * math.sqrt(2)
    far = bitwise_and(lt(tail, full(0.25, tail)), gt(tail, zeros_like(tail)))
    q = where(far, tail, full(0.1, tail))
    target = log(q)
    w = sqrt(target * -2)
    z = w - (log(w) + math.log(2 * math.pi) / 2) / w  # the first terms of the asymptotic series
    for _ in range(4 if p.dtype.bits == 64 else 3):
        scaled = erfcx(z * math.sqrt(0.5))
        z = z + (log(scaled * 0.5) - z * z * 0.5 - target) * scaled * math.sqrt(math.pi / 2)
    return where(far, where(lt(p, full(0.5, p)), -z, z), middle)


ndtri = Composite(
    "ndtri",
    infer=unary_float,
    decompose=widened(_ndtri),
    # dx = 1 over the density
    vjp=lambda g, y, x: (g * (exp(y * y * 0.5) * math.sqrt(2 * math.pi)),),
    samples=cases("N", "2,N", draw="unit"),
    bad=NOT_FLOAT,
    doc="the number below which a normal variable is with probability x, the inverse of ndtr; -inf at 0, inf at 1",
    source="torch.special.ndtri",
)
