"""Tensors in exact algebra, and the pointwise ops on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ...ir.types import DTYPES, DType
from ...ops.elementwise.pointwise import convert
from .field import Array, P, U, inverse, mixed, multiply, negative, reduced, shifted

INFINITY, NAN = 0x1234567_89ABCDE, 0xFEDCBA9_8765432  # residues that represent 1/0 and NaN
_ORDER, _SHOWN = 40, 20  # fractional bits of the numbers whose order is preserved, and of those printed as numbers

FRACTION = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7, "f8e4m3": 3, "f8e5m2": 2, "f4e2m1": 1, "e8m0": 0}
_EXPONENT = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8, "f8e4m3": 4, "f8e5m2": 5, "f4e2m1": 2, "e8m0": 8}


def _holds(inner: DType, outer: DType) -> bool:
    if inner is outer:
        return True
    if outer.name == "e8m0" or (inner.is_float and not outer.is_float):
        return False
    if inner.is_float:
        return FRACTION[inner.name] <= FRACTION[outer.name] and _EXPONENT[inner.name] <= _EXPONENT[outer.name]
    digits = inner.bits - (inner.kind == "i")
    if outer.is_float:
        return digits <= FRACTION[outer.name] + 1
    return outer.kind != "b" and digits <= outer.bits - (outer.kind == "i") and (inner.kind != "i" or outer.kind == "i")


HOLDERS = {inner.name: frozenset(o.name for o in DTYPES.values() if _holds(inner, o)) for inner in DTYPES.values()}
"""For each dtype, the dtypes that hold all its values exactly."""
EXACT_INTS = ("bool", "i2", "u2", "i4", "u4", "i8", "u8", "i16", "u16", "i32", "u32")


@dataclass(frozen=True, eq=False)
class ExactArray:
    """A tensor in exact algebra.

    :param value: residues (uint64) for a float, the elements themselves for an int or bool.
    :param tag: mask of the float elements that are not finite.
    :param exact_in: the dtypes known to hold every element.  :param derived: whether an int was computed from floats.
    :param constant: the common value of all elements of a folded constant.
    """

    dtype: DType
    value: Array
    tag: Array
    exact_in: frozenset[str]
    derived: bool = False
    constant: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def differs(self, other: ExactArray) -> Array:
        """Mask of the elements that differ."""
        return (self.value != other.value) | (self.tag != other.tag)

    def key(self, nan: int = 0) -> Array:
        """Integers with the order of the elements; ``nan`` says at which end NaN is placed."""
        turned = shifted(self.value, _ORDER).astype(np.int64)
        order = np.where(turned > P // 2, turned - P, turned)
        for residue, place in ((INFINITY, 1 << 62), (P - INFINITY, -(1 << 62)), (NAN, nan * (3 << 61))):
            order = np.where(self.tag & (self.value == U(residue)), place, order)
        return order

    @property
    def is_nan(self) -> Array:
        return np.asarray(self.tag & (self.value == U(NAN)))

    @property
    def numbers(self) -> Array:
        """The elements as f64; NaN for those that are not small dyadic rationals."""
        if not self.dtype.is_float:
            return self.value.astype(np.float64)
        turned = shifted(self.value, _SHOWN).astype(np.int64)
        turned = np.where(turned > P // 2, turned - P, turned)
        return np.where((np.abs(turned) < 2**45) & ~self.tag, turned / 2.0**_SHOWN, np.nan)

    def shown(self, place: tuple[int, ...]) -> str:
        """The text of one element, for messages."""
        if not self.dtype.is_float:
            return str(self.value[place])
        number = replace(self, tag=np.zeros_like(self.tag)).numbers[place]
        text = f"the residue {int(self.value[place]):#x}" if np.isnan(number) else str(number)
        return f"{text} (tagged)" if self.tag[place] else text


def embed(array: Array, dtype: DType, exact_in: frozenset[str] | None = None) -> ExactArray:
    """A NumPy array of floats as an ExactArray; non-finite elements are tagged."""
    wide = np.asarray(array).astype(np.float64)
    finite = np.isfinite(wide)
    fraction, exponent = np.frexp(np.where(finite, wide, 0.0))
    digits = np.abs(np.ldexp(fraction, 53)).astype(U)
    residue = shifted(digits, exponent.astype(np.int64) - 53)
    residue = np.where(wide < 0, negative(residue), residue)
    residue = np.where(
        finite, residue, np.where(np.isnan(wide), U(NAN), np.where(wide > 0, U(INFINITY), U(P - INFINITY)))
    )
    return ExactArray(dtype, residue, ~finite, HOLDERS[dtype.name] if exact_in is None else exact_in)


def concrete(array: Array, dtype: DType, derived: bool = False) -> ExactArray:
    array = np.asarray(array)
    return ExactArray(dtype, array, np.zeros(array.shape, bool), HOLDERS[dtype.name], derived)


@functools.lru_cache(maxsize=4096)
def holders(number: float, dtype: DType) -> frozenset[str]:
    """The dtypes that hold a number of dtype ``dtype`` exactly."""
    wide = np.asarray(number)
    with np.errstate(all="ignore"):
        return HOLDERS[dtype.name] | {
            n for n in (*EXACT_INTS, *FRACTION) if convert(wide, DTYPES[n]).astype(np.float64) == wide
        }


# -- pointwise ops -----------------------------------------------------------------------------------------------------

Values = tuple[Array, Array]  # residues, tags


def _quotient(a: ExactArray, b: ExactArray) -> Values:
    zero = b.value == 0
    return multiply(a.value, np.where(zero, U(INFINITY), inverse(b.value))), a.tag | b.tag | zero


def _one(like: ExactArray) -> ExactArray:
    return replace(like, value=np.ones_like(like.value), tag=np.zeros_like(like.tag))


def _with(x: ExactArray, values: Values) -> ExactArray:
    return replace(x, value=values[0], tag=values[1], constant=None)


def _sum(a: ExactArray, b: ExactArray) -> Values:
    return reduced(a.value + b.value), a.tag | b.tag


def _minus(a: ExactArray) -> ExactArray:
    return replace(a, value=negative(a.value))


def _times(a: ExactArray, b: ExactArray) -> Values:
    return multiply(a.value, b.value), a.tag | b.tag


def _select(mask: Array, a: ExactArray, b: ExactArray) -> Values:
    return np.where(mask, a.value, b.value), np.where(mask, a.tag, b.tag)


def _sign(x: ExactArray) -> Array:
    return np.sign(np.where(x.value == 0, 0, x.key()))


def _signed(x: ExactArray) -> Values:
    s = _sign(x)
    return np.where(s < 0, U(P - 1), np.abs(s).astype(U)), x.is_nan


def _power(a: ExactArray, b: ExactArray) -> Values:
    """Repeated multiplication for small integer exponents, else a hash."""
    answer, tag = mixed("pow", a.value, b.value), a.tag | b.tag
    whole = np.where(b.value > P // 2, b.value.astype(np.int64) - P, b.value.astype(np.int64))
    power = np.ones_like(a.value)
    for n in range(9):
        answer = np.where(whole == n, power, answer)
        answer = np.where((whole == -n) & (n > 0), np.where(power == 0, U(INFINITY), inverse(power)), answer)
        power = multiply(power, a.value)
    return answer, tag | ((a.value == 0) & (whole < 0) & (whole > -9))


def _modulo(a: ExactArray, b: ExactArray) -> Values:
    whole = mixed("floordiv", a.value, b.value)
    return reduced(a.value + negative(multiply(b.value, whole))), a.tag | b.tag


ARITHMETIC: dict[str, Callable[..., Values]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, _minus(b)),
    "mul": _times,
    "div": _quotient,
    "reciprocal": lambda x: _quotient(_one(x), x),
    "pow": _power,
    "mod": _modulo,
}
CHOICES: dict[str, Callable[..., Values]] = {
    "neg": lambda x: (negative(x.value), x.tag),
    "abs": lambda x: _select(_sign(x) < 0, _minus(x), x),
    "copysign": lambda a, b: _select((_sign(a) < 0) != (_sign(b) < 0), _minus(a), a),  # of 0 the sign is plus
    "sign": _signed,
    "relu": lambda x: _select((_sign(x) > 0) | x.is_nan, x, _with(x, (np.zeros_like(x.value), np.zeros_like(x.tag)))),
    "maximum": lambda a, b: _select(a.key(1) >= b.key(1), a, b),
    "minimum": lambda a, b: _select(a.key(-1) <= b.key(-1), a, b),
    "stop_gradient": lambda x: (x.value, x.tag),
}
"""Ops whose result is an operand up to sign, so that the dtypes that hold the operands hold the result."""
COMPARISONS: dict[str, Callable[[ExactArray, ExactArray], Array]] = {
    "eq": lambda a, b: ~a.differs(b) & ~a.is_nan,
    "ne": lambda a, b: a.differs(b) | a.is_nan,
    "lt": lambda a, b: (a.key() < b.key()) & ~a.is_nan & ~b.is_nan,
    "le": lambda a, b: (a.key() <= b.key()) & ~a.is_nan & ~b.is_nan,
    "gt": lambda a, b: (a.key() > b.key()) & ~a.is_nan & ~b.is_nan,
    "ge": lambda a, b: (a.key() >= b.key()) & ~a.is_nan & ~b.is_nan,
}


def _values(x: ExactArray) -> Values:
    return x.value, x.tag


def _hash(name: str) -> Callable[[ExactArray], ExactArray]:
    return lambda x: replace(x, value=mixed(name, "", "", x.value, x.tag), constant=None)


_exp, _log, _sqrt = _hash("exp"), _hash("log"), _hash("sqrt")
OVER_THE_REALS: dict[str, Callable[[ExactArray], Values]] = {
    "rsqrt": lambda x: _quotient(_one(x), _sqrt(x)),
    "expm1": lambda x: _sum(_exp(x), _minus(_one(x))),
    "log1p": lambda x: _values(_log(_with(x, _sum(x, _one(x))))),
    "sigmoid": lambda x: _quotient(_one(x), _with(x, _sum(_one(x), _exp(_minus(x))))),
}
"""Functions expressed by others that are equal over the reals."""
