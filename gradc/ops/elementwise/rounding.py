"""Rounding, remainders, signs and bounds: what keeps, cuts or exchanges parts of numbers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import DISCRETE, ZERO, BadSample, Composite, Expr, Function, Primitive, Sample
from ...ir.types import I32, DType, Type
from ..rules import (
    alike,
    binary_float,
    binary_number,
    cases,
    converted,
    floating,
    full,
    number,
    unary_float,
    unary_number,
    zeros_like,
)
from .elementary import FEW, exp2
from .pointwise import (
    MISMATCH,
    NOT_FLOAT,
    abs,
    bitwise_and,
    bitwise_or,
    eq,
    ge,
    gt,
    le,
    lt,
    maximum,
    minimum,
    ne,
    sign,
    where,
)


def _rounded(name: str, reference: Any, doc: str) -> Primitive:
    return Primitive(
        name,
        infer=unary_float,
        reference=reference,
        lower=Expr(f"{name}({{0}})"),
        vjp=lambda g, y, x: (ZERO,),
        samples=cases("", "N", "3,N"),
        bad=NOT_FLOAT,
        doc=doc,
    )


ceil = _rounded("ceil", np.ceil, "rounded up")
trunc = _rounded("trunc", np.trunc, "rounded towards 0")
frac = Composite(
    "frac",
    infer=unary_float,
    decompose=lambda x: x - trunc(x),
    vjp=lambda g, y, x: (g,),
    samples=cases(*FEW),
    bad=NOT_FLOAT,
    doc="x - trunc(x)",
)


def _rest(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b)))


_SIGN_OF_A = "(floormod({0}, {1}) != 0 && ({0} < 0) != ({1} < 0) ? floormod({0}, {1}) - {1} : floormod({0}, {1}))"
fmod = Primitive(
    "fmod",
    infer=binary_number,
    reference=_rest,
    lower=Expr("fmod({0}, {1})", cost=4, by_kind={"i": _SIGN_OF_A, "u": "floormod({0}, {1})"}),
    broadcast=True,
    vjp=lambda g, y, a, b: (g, -(g * trunc(a / b))),
    samples=(
        *(Sample((f"F[{s}]",) * 2, draw=("normal", "nonzero")) for s in ("N", "2,3")),
        Sample(("i32[N]",) * 2, draw=("int", "int")),
    ),
    bad=MISMATCH,
    doc="a - b*trunc(a/b): the sign of a, as C; an integer modulo 0 is 0 (mod has the sign of b)",
)

# -- signs -------------------------------------------------------------------------------------------------------------


def _copysign_vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Any, Any]:
    # dy/da = the quotient of the signs, 0 where a is 0
    return g * (sign(a) * where(lt(copysign(full(1, y), y), zeros_like(y)), full(-1, y), full(1, y))), ZERO


copysign: Primitive = Primitive(
    "copysign",
    infer=binary_float,
    reference=np.copysign,
    lower=Expr("copysign({0}, {1})"),
    broadcast=True,
    vjp=_copysign_vjp,
    samples=cases(*FEW, arity=2),
    bad=MISMATCH,
    doc="the magnitude of a with the sign of b, that of -0 too",
)
square = Composite(
    "square",
    infer=unary_number,
    decompose=lambda x: x * x,
    samples=(*cases(*FEW), *cases("N", dtype="i32", draw="int")),
    bad=(BadSample(("bool[3]",), match="no arithmetic"),),
    doc="x * x",
)


def _angle(name: str, factor: float, doc: str) -> Composite:
    return Composite(
        name,
        infer=unary_float,
        decompose=lambda x: x * factor,
        samples=cases("N", "2,N"),
        bad=NOT_FLOAT,
        doc=doc,
    )


deg2rad = _angle("deg2rad", math.pi / 180, "an angle in degrees in radians")
rad2deg = _angle("rad2deg", 180 / math.pi, "an angle in radians in degrees")


def _ldexp(x: Type, exponent: Type) -> Type:
    if exponent.dtype.kind == "b" or not (exponent.dtype.is_integer or exponent.dtype is x.dtype):
        raise TypeRuleError(f"the exponent is {exponent.dtype}; it may be an integer or {x.dtype}")
    alike(floating(x), exponent.with_dtype(x.dtype))
    return x


def _ldexp_vjp(g: Node, y: Node, x: Node, exponent: Node) -> tuple[Any, Any]:
    # dx = g 2^exponent; dexponent = g y log 2
    dx = ldexp(g, exponent)
    return dx, g * (y * math.log(2)) if exponent.dtype.is_float else DISCRETE


ldexp: Composite = Composite(
    "ldexp",
    infer=_ldexp,
    decompose=lambda x, exponent: converted(
        converted(x, x.dtype.compute) * exp2(converted(exponent, x.dtype.compute)), x.dtype
    ),
    vjp=_ldexp_vjp,
    broadcast=True,
    samples=(
        Sample(("F[N]", "i32[N]"), draw=("normal", "index:9")),
        Sample(("F[2,N]", "F[N]")),
    ),
    bad=(BadSample(("f32[3]", "bool[3]"), match="the exponent is bool"),),
    doc="x * 2 ** exponent",
)

# -- parts of a float --------------------------------------------------------------------------------------------------


def _exponent_reference(x: Any) -> Any:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(x.dtype)


exponent = Primitive(
    "exponent",
    infer=unary_float,
    reference=_exponent_reference,
    lower=Expr("exponent({0})", cost=4),
    vjp=lambda g, y, x: (ZERO,),
    samples=cases(*FEW),
    bad=NOT_FLOAT,
    doc="e, as a float, of |x| = m 2**e with 1/2 <= m < 1; 0 of zeros, infinities and NaN",
    source="numpy.frexp",
)


def _over_power_of_two(x: Node, exponent: Node) -> Node:
    """x / 2**exponent by two powers, one of which alone might not be a number of the dtype."""
    half = call("floor", exponent * 0.5)
    return x / exp2(half) / exp2(exponent - half)


mantissa = Composite(
    "mantissa",
    infer=unary_float,
    decompose=lambda x: _over_power_of_two(x, exponent(x)),
    samples=cases(*FEW),
    bad=NOT_FLOAT,
    doc="m of x = m 2**e with 1/2 <= abs(m) < 1; zeros, infinities and NaN are themselves; the gradient is g / 2**e",
    source="numpy.frexp",
)


def _frexp(x: Node) -> tuple[Node, Node]:
    return mantissa(x), converted(exponent(x), I32)


frexp = Function(
    "frexp",
    write=_frexp,
    samples=(Sample(("F[N]",)), Sample(("F[2,3]",))),
    bad=NOT_FLOAT,
    doc="(m, e) of x = m 2**e with 1/2 <= abs(m) < 1; e is i32; zeros, infinities and NaN are themselves, with e = 0",
    source="torch.frexp; numpy.frexp",
)


def _nextafter_value(x: Node, y: Node) -> Node:
    info = ml_dtypes.finfo(x.dtype.np)  # type: ignore[no-untyped-call]
    zero, infinity, least = zeros_like(x), full(math.inf, x), full(float(info.smallest_subnormal), x)
    up = lt(x, y)
    inward = eq(up, lt(x, zero))
    # below a power of two numbers lie twice as close as above it
    halved = bitwise_and(inward, eq(abs(mantissa(x)), full(0.5, x)))
    place = exponent(x) - full(info.nmant + 1, x) - where(halved, full(1, x), zero)
    step = where(eq(x, zero), least, maximum(exp2(place), least))
    moved = copysign(where(up, x + step, x - step), where(eq(x, zero), y, x))  # -least is followed by -0
    moved = where(eq(abs(x), infinity), copysign(full(largest(x.dtype), x), x), moved)
    moved = where(eq(x, y), y, moved)
    return where(bitwise_or(ne(x, x), ne(y, y)), x + y, moved)


nextafter = Composite(
    "nextafter",
    infer=binary_float,
    decompose=_nextafter_value,
    differentiable=False,
    broadcast=True,
    samples=cases(*FEW, arity=2),
    bad=MISMATCH,
    doc="the number of the dtype that follows x towards y; y where they are equal; no gradient",
    source="torch.nextafter; numpy.nextafter",
)

# -- special numbers ---------------------------------------------------------------------------------------------------


def _nan_to_num(
    x: Type, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> tuple[Type, dict[str, float]]:
    most = largest(floating(x).dtype)
    return x, {
        "nan": nan,
        "posinf": most if posinf is None else posinf,
        "neginf": -most if neginf is None else neginf,
    }


def largest(dtype: DType) -> float:
    """The largest finite number of a float dtype."""
    return float(ml_dtypes.finfo(dtype.np).max)  # type: ignore[no-untyped-call]


def _nan_to_num_value(x: Node, *, nan: float, posinf: float, neginf: float) -> Node:
    high = where(eq(x, full(math.inf, x)), full(posinf, x), x)
    low = where(eq(x, full(-math.inf, x)), full(neginf, x), high)
    return where(ne(x, x), full(nan, x), low)


nan_to_num = Composite(
    "nan_to_num",
    infer=_nan_to_num,
    decompose=_nan_to_num_value,
    vjp=lambda g, y, x, *, nan, posinf, neginf: (where(lt(abs(x), full(math.inf, x)), g, zeros_like(g)),),
    samples=(*cases("N", "2,N"), Sample(("F[N]",), {"nan": 1.0, "posinf": 2.0, "neginf": -3.0})),
    bad=NOT_FLOAT,
    doc="x with numbers for NaN and the infinities: 0 and the dtype's largest unless given; they have no gradient",
)

# -- bounds ------------------------------------------------------------------------------------------------------------


def _other_than_nan(name: str, wins: Any, doc: str) -> Composite:
    def chosen(a: Node, b: Node) -> Node:
        """Where the result is a."""
        return bitwise_or(wins(a, b), ne(b, b))

    def vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
        """g to the operand that is the result, 0 to the other"""
        first, zero = chosen(a, b), zeros_like(g)
        return where(first, g, zero), where(first, zero, g)

    return Composite(
        name,
        infer=binary_number,
        decompose=lambda a, b: where(chosen(a, b), a, b),
        vjp=vjp,
        broadcast=True,
        samples=(*cases(*FEW, arity=2), *cases("N", arity=2, dtype="i32", draw="int")),
        bad=MISMATCH,
        doc=doc,
    )


fmax = _other_than_nan("fmax", ge, "the larger, of a number and NaN the number; of two equals a has the gradient")
fmin = _other_than_nan("fmin", le, "the smaller, of a number and NaN the number; of two equals a has the gradient")


def _clamp_tensor(x: Type, min: Type, max: Type) -> Type:
    return number(alike(x, min, max))


def _clamp_tensor_vjp(g: Node, y: Node, x: Node, low: Node, high: Node) -> tuple[Node, Node, Node]:
    # to x within the closed bounds, to the bound that is taken outside; of bounds that cross the upper one is taken
    zero, under, over = zeros_like(g), lt(x, low), gt(x, high)
    crossed = gt(low, high)
    inside = bitwise_and(ge(x, low), le(x, high))
    to_high = bitwise_or(over, bitwise_and(under, crossed))
    to_low = bitwise_and(under, lt(low, high))  # of two equal bounds neither has one, as torch says
    return where(inside, g, zero), where(to_low, g, zero), where(to_high, g, zero)


clamp_tensor = Composite(
    "clamp_tensor",
    infer=_clamp_tensor,
    decompose=lambda x, low, high: minimum(maximum(x, low), high),
    vjp=_clamp_tensor_vjp,
    broadcast=True,
    samples=(
        *cases("N", "2,N,3", arity=3),
        Sample(("F[2,N]", "F[N]", "F[2,1]")),
        *cases("N", arity=3, dtype="i32", draw="int"),
    ),
    bad=(
        BadSample(("f32[3]", "f32[4]", "f32[3]"), match="do not broadcast: 3 and 4"),
        BadSample(("f32[3]", "f64[3]", "f32[3]"), match="dtypes differ"),
    ),
    doc="x held between traced bounds (clamp calls it); the gradient goes to x or to the bound that is taken",
)
