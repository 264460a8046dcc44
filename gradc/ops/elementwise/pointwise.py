"""Pointwise ops: one scalar expression each, in NumPy and in C."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import InvalidProblem, TypeRuleError
from ...ir.dims import same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, ZERO, BadSample, Composite, Expr, Primitive, Sample
from ...ir.operands import adopt, broadcast
from ...ir.ranges import Range
from ...ir.types import BOOL, DType, Type
from ..rules import (
    SHAPES,
    alike,
    binary_float,
    binary_number,
    cases,
    comparison,
    converted,
    floating,
    full,
    linear_all,
    number,
    plain_number,
    unary_float,
    unary_number,
    zeros_like,
)


def _same_map(count: int):  # type: ignore[no-untyped-def]
    return lambda node: linear_all(count, node.rank)


def _only(operand: int):  # type: ignore[no-untyped-def]
    return lambda node: {operand: tuple(range(node.rank))}


NUMBERS = (
    *cases(*SHAPES, arity=2),
    *cases("N", "2,3", arity=2, dtype="i32", draw="int"),
    *cases("N", arity=2, dtype="i8", draw="int"),
)
UNARY = cases(*SHAPES)
POSITIVE = cases(*SHAPES, draw="positive")
MISMATCH = (
    BadSample(("f32[3]", "f32[4]"), match="do not broadcast: 3 and 4"),
    BadSample(("f32[3]", "f64[3]"), match="dtypes differ: f32 and f64"),
    BadSample(("f32[N]", "f32[M]"), match="assume"),
)
NOT_FLOAT = (BadSample(("i32[3]",), match="i32 is no float"),)

# -- arithmetic --------------------------------------------------------------------------------------------------------


def _scaled(y: Any, alpha: int | float) -> Any:
    """torch's alpha, the factor of the second operand of add and sub."""
    alpha = plain_number(alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeRuleError(f"alpha={alpha!r} is no number; multiply the operand by it")
    if alpha == 1:
        return y
    return y * alpha if isinstance(y, int | float) and not isinstance(y, bool) else mul(y, alpha)


def _add_call(x: Any, y: Any, alpha: int | float = 1) -> Node:
    return add.plain(x, _scaled(y, alpha))


def _times(node: Node, a: Range, b: Range) -> Range:
    """A product with a factor that is known."""
    for factor, other in ((a, b), (b, a)):
        if len(factor.lows) == 1 and factor.lows == factor.highs:
            return other * factor.lows[0]
    return Range()


def _sub_call(x: Any, y: Any, alpha: int | float = 1) -> Node:
    return sub.plain(x, _scaled(y, alpha))


add = Primitive(
    "add",
    infer=binary_number,
    reference=np.add,
    lower=Expr("{0} + {1}"),
    within=lambda node, a, b: a + b,
    broadcast=True,
    multilinear=_same_map(2),
    linear=True,
    sugar=_add_call,
    vjp=lambda g, y, a, b: (g, g),
    samples=NUMBERS,
    bad=(*MISMATCH, BadSample(("bool[3]", "bool[3]"), match="no arithmetic")),
    doc="a + b; with torch's keyword alpha a + alpha * b",
)
sub = Primitive(
    "sub",
    infer=binary_number,
    reference=np.subtract,
    lower=Expr("{0} - {1}"),
    within=lambda node, a, b: a + -b,
    broadcast=True,
    multilinear=_same_map(2),
    linear=True,
    sugar=_sub_call,
    vjp=lambda g, y, a, b: (g, -g),
    samples=NUMBERS,
    bad=MISMATCH,
    doc="a - b; with torch's keyword alpha a - alpha * b",
)
mul = Primitive(
    "mul",
    infer=binary_number,
    reference=np.multiply,
    lower=Expr("{0} * {1}"),
    within=_times,
    broadcast=True,
    multilinear=_same_map(2),
    vjp=lambda g, y, a, b: (g * b, g * a),
    samples=NUMBERS,
    bad=MISMATCH,
    doc="a * b",
)
div = Primitive(
    "div",
    infer=lambda x, y: _true_division(x, y),
    reference=np.true_divide,
    lower=Expr("{0} / {1}", cost=4),
    broadcast=True,
    multilinear=_only(0),
    vjp=lambda g, y, a, b: (g / b, -(g * y) / b),
    samples=tuple(Sample((f"F[{s}]",) * 2, draw=("normal", "nonzero")) for s in SHAPES),
    bad=(*MISMATCH, BadSample(("i32[3]", "i32[3]"), match="write a cast")),
    doc="a / b, floats only",
)


def _true_division(x: Type, y: Type) -> Type:
    if alike(x, y).dtype.is_integer:
        raise TypeRuleError(f"{x.dtype} / {x.dtype} is not an {x.dtype}; write a cast to a float, or floordiv")
    return binary_float(x, y)


def _nonzero_divisor(name: str, b: Node | Any) -> None:
    while isinstance(b, Node) and b.op.name in ("broadcast_to", "reshape"):
        b = b.operands[0]
    values = (
        b.attrs["value"]
        if isinstance(b, Node) and b.op.name == "constant"
        else np.asarray(b).reshape(-1).tolist()
        if isinstance(b, int | list | tuple | np.ndarray)
        else ()
    )
    if any(v == 0 and not isinstance(v, float) for v in values):
        raise InvalidProblem(f"{name}: an integer is divided by the constant 0")


def _floordiv(a: Any, b: Any) -> Node:
    _nonzero_divisor("floordiv", b)
    return floordiv.plain(a, b)


def _mod(a: Any, b: Any) -> Node:
    _nonzero_divisor("mod", b)
    return mod.plain(a, b)


def _divided(function: Any) -> Any:
    def reference(a: Any, b: Any) -> Any:  # integer division by 0 gives 0 on every target, without a trap
        if a.dtype.kind == "f":
            return function(a, b)
        return np.where(b == 0, 0, function(a, np.where(b == 0, 1, b)))

    return reference


floordiv = Primitive(
    "floordiv",
    infer=binary_number,
    reference=_divided(np.floor_divide),
    lower=Expr("floordiv({0}, {1})", cost=4),
    broadcast=True,
    sugar=_floordiv,
    vjp=lambda g, y, a, b: (ZERO, ZERO),
    samples=(
        *(Sample((f"F[{s}]",) * 2, draw=("normal", "nonzero")) for s in ("N", "2,3")),
        Sample(("i32[N]",) * 2, draw=("int", "int")),
    ),
    bad=MISMATCH,
    doc="a // b, rounded down; an integer divided by 0 gives 0",
)
mod = Primitive(
    "mod",
    infer=binary_number,
    reference=_divided(np.mod),
    lower=Expr("floormod({0}, {1})", cost=4),
    broadcast=True,
    sugar=_mod,
    vjp=lambda g, y, a, b: (g, -(g * floordiv(a, b))),
    samples=(
        *(Sample((f"F[{s}]",) * 2, draw=("normal", "nonzero")) for s in ("N", "2,3")),
        Sample(("i32[N]",) * 2, draw=("int", "int")),
    ),
    bad=MISMATCH,
    doc="a - b*floor(a/b): has the sign of b, as in Python and NumPy; an integer modulo 0 gives 0",
)
neg = Primitive(
    "neg",
    infer=unary_number,
    reference=np.negative,
    lower=Expr("-{0}"),
    within=lambda node, a: -a,
    multilinear=_only(0),
    vjp=lambda g, y, x: (-g,),
    samples=(*UNARY, *cases("N", dtype="i32", draw="int")),
    bad=(BadSample(("bool[3]",), match="no arithmetic"),),
    doc="-x",
)
reciprocal = Primitive(
    "reciprocal",
    infer=unary_float,
    reference=lambda x: 1 / x,
    lower=Expr("1 / {0}", cost=4),
    vjp=lambda g, y, x: (-(g * y * y),),
    samples=cases(*SHAPES, draw="nonzero"),
    bad=NOT_FLOAT,
    doc="1 / x",
)


def _pow_vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    # da = g b a^(b-1), 0 where b is 0; db = g y log(a), 0 where a is 0 and b >= 0 (torch), not 0 * log(0)
    zero = zeros_like(y)
    da = where(eq(b, zero), zero, g * b * pow(a, b - 1))
    known = where(logical_and(eq(a, zero), ge(b, zero)), full(1, a), a)  # log(1) where a is 0
    db = where(logical_and(eq(a, zero), ge(b, zero)), zero, g * y * log(known))
    return da, db


pow = Primitive(
    "pow",
    infer=binary_number,
    reference=lambda a, b: _power(a, b),
    lower=Expr("pow({0}, {1})", cost=40),
    broadcast=True,
    vjp=_pow_vjp,
    samples=tuple(Sample((f"F[{s}]",) * 2, draw=("positive", "normal")) for s in SHAPES),
    bad=MISMATCH,
    doc="a ** b; the gradient at pow(0, 0) is 0",
)


def _power(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":  # C's: NumPy takes the square root where all exponents are 1/2, of -inf NaN, of -0 -0
        return np.power(np.where((b == 0.5) & ((a == 0) | np.isinf(a)), np.abs(a), a), b)
    whole = np.power(a, np.maximum(b, 0))
    return np.where(b >= 0, whole, np.where(a == 1, 1, np.where(a == -1, np.where(b % 2 == 0, 1, -1), 0))).astype(
        a.dtype
    )


# -- extrema -----------------------------------------------------------------------------------------------------------


def _extremum_vjp(loses: Any) -> Any:
    def vjp(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:  # a tie gives half to each
        half = where(eq(a, b), g * 0.5, g)
        zero = zeros_like(g)
        return where(loses(a, b), zero, half), where(loses(b, a), zero, half)

    return vjp


maximum = Primitive(
    "maximum",
    infer=binary_number,
    reference=np.maximum,
    lower=Expr("maximum({0}, {1})"),
    broadcast=True,
    vjp=_extremum_vjp(lambda a, b: lt(a, b)),
    samples=NUMBERS,
    bad=MISMATCH,
    doc="the larger of a and b; propagates NaN; ties share the gradient evenly",
)
minimum = Primitive(
    "minimum",
    infer=binary_number,
    reference=np.minimum,
    lower=Expr("minimum({0}, {1})"),
    broadcast=True,
    vjp=_extremum_vjp(lambda a, b: lt(b, a)),
    samples=NUMBERS,
    bad=MISMATCH,
    doc="the smaller of a and b; propagates NaN; ties share the gradient evenly",
)


def _clamp(x: Type, *, min: int | float | None = None, max: int | float | None = None) -> Type:
    for bound in (min, max):
        if x.dtype.is_integer and isinstance(bound, float):
            raise TypeRuleError(f"the bound {bound} of an {x.dtype} operand is no int")
        if bound is not None:
            x.dtype.literal(bound)
    return number(x)


def _clamp_call(x: Node, min: Any = None, max: Any = None) -> Node:
    """Bounds that are traced values or arrays may be of any shape that broadcasts, numbers stand in the op."""
    if not any(isinstance(bound, Node | np.ndarray | list) for bound in (min, max)):
        return clamp.plain(x, min=min, max=max)
    least, most = (-math.inf, math.inf) if x.dtype.is_float else x.dtype.range
    return call("clamp_tensor", x, least if min is None else min, most if max is None else max)


def _clamp_value(x: Node, *, min: int | float | None, max: int | float | None) -> Node:
    low = x if min is None else maximum(x, full(min, x))
    return low if max is None else minimum(low, full(max, x))


def _clamp_vjp(g: Node, y: Node, x: Node, *, min: int | float | None, max: int | float | None) -> tuple[Node]:
    inside = [ge(x, full(min, x))] if min is not None else []
    inside += [le(x, full(max, x))] if max is not None else []
    for mask in inside:  # the derivative is 1 on the closed bounds
        g = where(mask, g, zeros_like(g))
    return (g,)


clamp = Composite(
    "clamp",
    infer=_clamp,
    decompose=_clamp_value,
    sugar=_clamp_call,
    vjp=_clamp_vjp,
    samples=(
        *(Sample((f"F[{s}]",), {"min": -0.5, "max": 0.7}) for s in SHAPES),
        Sample(("F[N]",), {"max": 0.25}),
        Sample(("i32[N]",), {"min": 1}, draw=("int",)),
    ),
    bad=(BadSample(("i32[3]",), {"min": 0.5}, match="no int"), BadSample(("f32[3]",), {"min": "x"}, match="min='x'")),
    doc="x limited to [min, max]; the derivative is 1 within the closed bounds, else 0",
)

# -- functions ---------------------------------------------------------------------------------------------------------

_erf = np.frompyfunc(math.erf, 1, 1)


def _reference_erf(x: Any) -> Any:
    return np.asarray(_erf(x.astype(np.float64)), x.dtype)


def _reference_rsqrt(x: Any) -> Any:
    return np.asarray(1 / np.sqrt(x.astype(np.float64)), x.dtype)  # rounded once


def _reference_sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


exp = Primitive(
    "exp",
    infer=unary_float,
    reference=np.exp,
    lower=Expr("exp({0})", cost=12),
    vjp=lambda g, y, x: (g * y,),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="e ** x",
)
log = Primitive(
    "log",
    infer=unary_float,
    reference=np.log,
    lower=Expr("log({0})", cost=12),
    vjp=lambda g, y, x: (g / x,),
    samples=POSITIVE,
    bad=NOT_FLOAT,
    doc="natural logarithm",
)
log1p = Primitive(
    "log1p",
    infer=unary_float,
    reference=np.log1p,
    lower=Expr("log1p({0})", cost=14),
    vjp=lambda g, y, x: (g / (x + 1),),
    samples=POSITIVE,
    bad=NOT_FLOAT,
    doc="log(1 + x)",
)
expm1 = Primitive(
    "expm1",
    infer=unary_float,
    reference=np.expm1,
    lower=Expr("expm1({0})", cost=14),
    vjp=lambda g, y, x: (g * (y + 1),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="exp(x) - 1",
)
sqrt = Primitive(
    "sqrt",
    infer=unary_float,
    reference=np.sqrt,
    lower=Expr("sqrt({0})", cost=4),
    vjp=lambda g, y, x: (g / (y * 2),),
    samples=POSITIVE,
    bad=NOT_FLOAT,
    doc="square root; the derivative at 0 is inf",
)
rsqrt = Primitive(
    "rsqrt",
    infer=unary_float,
    reference=_reference_rsqrt,
    lower=Expr("rsqrt({0})", cost=8),
    vjp=lambda g, y, x: (g * y / (x * -2),),
    samples=POSITIVE,
    bad=NOT_FLOAT,
    doc="1 / sqrt(x)",
)
tanh = Primitive(
    "tanh",
    infer=unary_float,
    reference=np.tanh,
    lower=Expr("tanh({0})", cost=16),
    vjp=lambda g, y, x: (g * (1 - y * y),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="hyperbolic tangent",
)
sigmoid = Primitive(
    "sigmoid",
    infer=unary_float,
    reference=_reference_sigmoid,
    lower=Expr("sigmoid({0})", cost=14),
    vjp=lambda g, y, x: (g * y * (1 - y),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="1 / (1 + exp(-x))",
)
erf = Primitive(
    "erf",
    infer=unary_float,
    reference=_reference_erf,
    lower=Expr("erf({0})", cost=16),
    vjp=lambda g, y, x: (g * exp(-(x * x)) * (2 / math.sqrt(math.pi)),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="2/sqrt(pi) * integral of exp(-t^2) from 0 to x",
)
sin = Primitive(
    "sin",
    infer=unary_float,
    reference=np.sin,
    lower=Expr("sin({0})", cost=16),
    vjp=lambda g, y, x: (g * cos(x),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="sine, radians",
)
cos: Primitive = Primitive(
    "cos",
    infer=unary_float,
    reference=np.cos,
    lower=Expr("cos({0})", cost=16),
    vjp=lambda g, y, x: (-(g * sin(x)),),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="cosine, radians",
)
abs = Primitive(
    "abs",
    infer=unary_number,
    reference=np.abs,
    lower=Expr("abs({0})"),
    vjp=lambda g, y, x: (g * sign(x),),
    samples=(*UNARY, *cases("N", dtype="i32", draw="int")),
    doc="|x|; the derivative at 0 is 0",
)
sign: Primitive = Primitive(
    "sign",
    infer=unary_number,
    reference=np.sign,
    lower=Expr("sign({0})"),
    vjp=lambda g, y, x: (ZERO,),
    samples=UNARY,
    doc="-1, 0 or 1; propagates NaN",
)
floor = Primitive(
    "floor",
    infer=unary_float,
    reference=np.floor,
    lower=Expr("floor({0})"),
    vjp=lambda g, y, x: (ZERO,),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="rounded down",
)


def _round_call(x: Node, decimals: int = 0) -> Node:
    if decimals == 0:
        return round.plain(x)
    scale = 10.0 ** (decimals if decimals > 0 else -decimals)
    return round.plain(x * scale) / scale if decimals > 0 else round.plain(x / scale) * scale


round = Primitive(
    "round",
    infer=unary_float,
    reference=np.rint,
    lower=Expr("round({0})"),
    sugar=_round_call,
    vjp=lambda g, y, x: (ZERO,),
    samples=UNARY,
    bad=NOT_FLOAT,
    doc="to the nearest integer, or to a number of decimals, half to even",
)

# -- comparisons and masks ---------------------------------------------------------------------------------------------


def _compare(name: str, function: Any, text: str) -> Primitive:
    return Primitive(
        name,
        infer=comparison,
        reference=function,
        lower=Expr(f"{{0}} {text} {{1}}"),
        broadcast=True,
        in_place_of_dtype=True,
        vjp=lambda g, y, a, b: (ZERO, ZERO),
        samples=(*cases(*SHAPES, arity=2), *cases("N", arity=2, dtype="i32", draw="int")),
        bad=MISMATCH,
        doc=f"a {text} b",
    )


eq: Primitive = _compare("eq", np.equal, "==")
ne: Primitive = _compare("ne", np.not_equal, "!=")
lt: Primitive = _compare("lt", np.less, "<")
le: Primitive = _compare("le", np.less_equal, "<=")
gt: Primitive = _compare("gt", np.greater, ">")
ge: Primitive = _compare("ge", np.greater_equal, ">=")


def _bits(x: Type, y: Type) -> Type:
    if alike(x, y).dtype.is_float:
        raise TypeRuleError(f"{x.dtype} has no bitwise operations")
    return x


def _bit_op(name: str, function: Any, text: str) -> Primitive:
    return Primitive(
        name,
        infer=_bits,
        reference=function,
        lower=Expr(f"{{0}} {text} {{1}}"),
        broadcast=True,
        in_place_of_dtype=True,
        vjp=lambda g, y, a, b: (ZERO, ZERO),
        samples=(*cases("N", "2,3", arity=2, dtype="bool", draw="bool"), *cases("N", arity=2, dtype="i32", draw="int")),
        bad=(BadSample(("f32[3]", "f32[3]"), match="bitwise"),),
        doc=f"a {text} b on ints, logical on bool",
    )


bitwise_and, bitwise_or, bitwise_xor = (
    _bit_op("bitwise_and", np.bitwise_and, "&"),
    _bit_op("bitwise_or", np.bitwise_or, "|"),
    _bit_op("bitwise_xor", np.bitwise_xor, "^"),
)


def _invert(x: Type) -> Type:
    return _bits(x, x)


invert = Primitive(
    "invert",
    infer=_invert,
    reference=np.invert,
    lower=Expr("~{0}", by_kind={"b": "!{0}"}),
    in_place_of_dtype=True,
    vjp=lambda g, y, x: (ZERO,),
    samples=(*cases("N", dtype="bool", draw="bool"), *cases("N", dtype="i32", draw="int")),
    doc="not x on bool, ~x on ints",
)


def logical_and(a: Node, b: Node) -> Node:
    """The conjunction of two masks."""
    return bitwise_and(a, b)


def _where(condition: Type, x: Type, y: Type) -> Type:
    if condition.dtype is not BOOL:
        raise TypeRuleError(f"the condition is {condition.dtype}, not bool")
    alike(condition, x.with_dtype(BOOL))
    return alike(x, y)


def _where_vjp(g: Node, y: Node, condition: Node, a: Node, b: Node) -> tuple[Any, Node, Node]:
    zero = zeros_like(g)  # select, never multiply: 0 * inf is NaN
    return DISCRETE, where(condition, g, zero), where(condition, zero, g)


def _where_call(condition: Any, x: Any, y: Any) -> Node:
    if isinstance(condition, bool):
        raise TypeRuleError(
            f"the condition is the Python bool {condition}, not a traced mask: compare values (x > 0, x == y, ops.eq),"
            " or choose the branch in Python"
        )
    # scalars adopt the dtype of the other branch, never the condition's
    x, y = adopt("where", [x, y], broadcasting=False)
    (condition,) = adopt("where", [condition], broadcasting=False)
    return where.apply(broadcast([condition, x, y]), {})


where = Primitive(
    "where",
    infer=_where,
    reference=np.where,
    lower=Expr("{0} ? {1} : {2}"),
    within=lambda node, condition, a, b: a | b,
    broadcast=True,
    in_place_of_dtype=True,
    sugar=_where_call,
    vjp=_where_vjp,
    multilinear=lambda node: {1: tuple(range(node.rank)), 2: tuple(range(node.rank))},
    linear=True,
    fills=True,
    samples=tuple(Sample((f"bool[{s}]", f"F[{s}]", f"F[{s}]"), draw=("bool", "normal", "normal")) for s in SHAPES),
    bad=(
        BadSample(("f32[3]", "f32[3]", "f32[3]"), match="not bool"),
        BadSample(("bool[3]", "f32[3]", "f64[3]"), match="dtypes differ"),
    ),
    doc="x where the condition holds, else y",
)

# -- conversions -------------------------------------------------------------------------------------------------------


def _cast(x: Type, *, dtype: DType) -> Type:
    return x.with_dtype(dtype)


def _cast_vjp(g: Node, y: Node, x: Node, *, dtype: DType) -> tuple[Any]:
    # to an int: 0; else dx = g in x's dtype, or in the compute dtype if x is quantized
    if not dtype.is_float:
        return (ZERO,)
    return (converted(g, x.dtype if x.dtype.has_tangent else dtype.compute),)  # straight-through for quantized values


cast = Primitive(
    "cast",
    infer=_cast,
    reference=lambda x, *, dtype: convert(x, dtype),
    lower=Expr("cast", conversion=True),
    in_place_of_dtype=True,
    vjp=_cast_vjp,
    multilinear=_only(0),
    samples=(
        *(Sample(("F[2,N]",), {"dtype": d}) for d in ("f32", "f64", "bf16", "f16", "i32", "i8", "u8", "bool")),
        Sample(("i32[N]",), {"dtype": "f32"}, draw=("int",)),
        Sample(("bool[N]",), {"dtype": "f32"}, draw=("bool",)),
        Sample(("i32[N]",), {"dtype": "i8"}, draw=("int",)),
    ),
    bad=(BadSample(("f32[3]",), {"dtype": "f31"}, match="not a dtype"),),
    doc=(
        "x converted to a dtype; float to int saturates (300.0 as i8 is 127, -1.0 as u8 is 0) and NaN gives 0, int to"
        " int wraps, f8 saturates finite values"
    ),
)


LIMITS = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
"""The largest finite values of the formats to which a cast saturates (f4e2m1 has no value beyond 6 to overflow to)."""


def convert(x: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """The reference meaning of ``cast`` in NumPy, which every target follows."""
    x = np.asarray(x)
    if x.dtype == dtype.np:
        return x
    source = x.dtype.kind if x.dtype.kind in "biuf" else None
    name = str(x.dtype)
    narrow_int = name in ("int4", "uint4", "int2", "uint2")
    floating = source == "f" or (source is None and not narrow_int)
    if narrow_int:
        x = x.astype(np.int8 if name.startswith("i") else np.uint8)
    if floating and dtype.kind == "b":
        return np.asarray(x.astype(np.float32 if x.dtype.itemsize < 4 else x.dtype) != 0)
    if floating and dtype.is_integer:
        wide = x.astype(np.float64)
        low, high = dtype.range
        whole = np.trunc(np.nan_to_num(wide, nan=0.0, posinf=np.inf, neginf=-np.inf))
        answer = np.full(x.shape, low, dtype=object if dtype.bits == 64 else np.int64)
        inside = (whole > low) & (whole < high)
        answer = np.where(inside, np.where(inside, whole, 0).astype(np.int64), np.where(whole >= high, high, low))
        return answer.astype(dtype.np)
    if dtype.is_integer:
        if dtype.bits < 8:  # wrap to the narrow width explicitly
            low = dtype.range[0]
            x = (((x.astype(np.int64) - low) & (2**dtype.bits - 1)) + low).astype(np.int8)
        return x.astype(dtype.np)
    with np.errstate(all="ignore"):
        if dtype.is_float and dtype.bits < 32:
            x = _odd(x) if source == "f" and x.dtype.itemsize == 8 else x.astype(np.float32)
        if dtype.name in LIMITS:
            limit = np.float32(LIMITS[dtype.name])
            x = np.where(np.isfinite(x), np.clip(x, -limit, limit), x)
        if dtype.name == "f4e2m1":  # it has no NaN: ml_dtypes converts the positive one to -0
            x = np.where(np.isnan(x), np.float32(np.nan), x)
        if dtype.name == "e8m0":  # ml_dtypes rounds every value above 2^-127 up
            x = np.where((x > 0) & (x < np.float32(1.5 * 2.0**-127)), np.float32(2.0**-127), x)
        return x.astype(dtype.np)


def _odd(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round-to-odd from f64 to f32, after which rounding to a shorter format is correct: a value that f32 does not
    hold becomes the neighbour whose last bit is 1.
    """
    y = np.asarray(x.astype(np.float32))
    back = y.astype(np.float64)
    bits = y.view(np.uint32)
    inward = bits - (np.abs(back) > np.abs(x)).astype(np.uint32)
    return np.asarray(np.where((back == x) | np.isnan(x), bits, inward | np.uint32(1))).view(np.float32)


def _stop(x: Type) -> Type:
    return x


stop_gradient = Primitive(
    "stop_gradient",
    infer=_stop,
    reference=lambda x: x,
    lower=Expr("{0}"),
    in_place_of_dtype=True,
    vjp=lambda g, y, x: (ZERO,),
    samples=(*UNARY, *cases("N", dtype="i32", draw="int")),
    doc="x, with derivative zero",
)


def _scale_gradient(x: Type, factor: Type) -> Type:
    alike(floating(x), factor if factor.dtype is not x.dtype.compute else factor.with_dtype(x.dtype))
    return x


def _scale_gradient_vjp(g: Node, y: Node, x: Node, factor: Node) -> tuple[Any, Any]:
    # dx = g factor
    wide = x.dtype.compute
    return converted(converted(g, wide) * converted(stop_gradient(factor), wide), x.dtype), DISCRETE


def _scale_gradient_surrogate(x: Node, factor: Node) -> Node:
    held = stop_gradient(x)
    return held + (x - held) * converted(stop_gradient(factor), x.dtype)


scale_gradient = Composite(
    "scale_gradient",
    infer=_scale_gradient,
    decompose=lambda x, factor: x,
    vjp=_scale_gradient_vjp,
    surrogate=_scale_gradient_surrogate,
    broadcast=True,
    samples=(
        Sample(("F[N]", "F[N]")),
        Sample(("F[]", "F[]")),
        Sample(("F[2,N,3]", "F[N,1]")),
        Sample(("bf16[N,3]", "f32[N,1]")),
    ),
    bad=(
        BadSample(("i32[3]", "f32[3]"), match="i32 is no float"),
        BadSample(("f32[3]", "f64[3]"), match="dtypes differ"),
        BadSample(("f32[3]", "f32[4]"), match="do not broadcast"),
    ),
    doc=("x, with its gradient multiplied by factor (of x's dtype or its compute dtype); factor gets no gradient"),
)


def _with_gradient_of(x: Type, of: Type) -> Type:
    if len(x.shape) != len(of.shape) or not all(map(same, x.shape, of.shape)):
        raise TypeRuleError(f"x and what its gradient is of have one shape: {x} and {of}")
    return x


def _with_gradient_of_surrogate(x: Node, of: Node) -> Node:
    return of


with_gradient_of = Composite(
    "with_gradient_of",
    infer=_with_gradient_of,
    decompose=lambda x, of: x,
    vjp=lambda g, y, x, of: (ZERO, converted(g, of.dtype if of.dtype.has_tangent else g.dtype)),
    surrogate=_with_gradient_of_surrogate,
    samples=(Sample(("F[N,3]", "F[N,3]")), Sample(("F[]", "F[]"))),
    bad=(BadSample(("f32[3]", "f32[4]"), match="have one shape"),),
    doc=(
        "x, with the gradient of `of`, which has its shape and is not computed: a value that is rounded otherwise than"
        " what is differentiated"
    ),
)
