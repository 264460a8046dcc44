"""Sizes, indices and literals as C text; shared by every target."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ..ir.dims import Dim, FloorDiv, Max, Size
from ..ir.statement import Axis, Index
from ..ir.statement import flatten as flatten
from ..ir.statement import strides as strides
from ..ir.types import DType
from ..process.forks import held_off


def size(value: Size, cast: str = "") -> str:
    """A size over variables n0, n1..., in their arithmetic, or in that of the type they are cast to."""
    if isinstance(value, int):
        return (
            str(value) if abs(value) < 2**31 else f"{value}LL" if value > -(2**63) else "(-9223372036854775807LL - 1)"
        )
    if (pair := _smaller_of(value)) is not None:
        return f"minimum_i64({size(pair.left, cast)}, {size(pair.right, cast)})"
    parts = []
    for monomial, coefficient in value.terms:
        factors = []
        for atom, power in monomial:
            if isinstance(atom, str):
                text = f"({cast}){atom}" if cast else atom
            elif isinstance(atom, FloorDiv):
                text = f"floordiv_i64({size(atom.numerator, cast)}, {size(atom.denominator, cast)})"
            else:
                assert isinstance(atom, Max)
                text = f"maximum_i64({size(atom.left, cast)}, {size(atom.right, cast)})"
            factors += [text] * power
        if coefficient != 1 or not factors:
            factors.insert(0, size(coefficient))
        parts.append(" * ".join(factors))
    text = " + ".join(parts).replace("+ -", "- ")
    return f"({text})" if len(parts) > 1 else text


def _smaller_of(value: Dim) -> Max | None:
    """The two sizes of which a size is the smaller: dims write that as a + b - max(a, b)."""
    for monomial, coefficient in value.terms:
        if coefficient == -1 and len(monomial) == 1 and monomial[0][1] == 1 and isinstance(monomial[0][0], Max):
            larger = monomial[0][0]
            if value + Dim(((monomial, 1),)) == larger.left + larger.right:
                return larger
    return None


def index(value: Index, kind: str = "i64") -> str:
    """An affine index: ``%3`` is ``(i64)v3``, or of another C type; an axis is itself."""
    names = {v: f"({kind})v{v[1:]}" if v.startswith("%") else v for v, _ in value.terms}
    parts = [names[v] if c == 1 else f"{names[v]} * {grouped(size(c))}" for v, c in value.terms]
    if value.const != 0 or not parts:
        parts.append(size(value.const))
    text = " + ".join(parts)
    return f"({text})" if len(parts) > 1 else text


def grouped(text: str) -> str:
    """A size as a factor of a product, or as what something is divided by."""
    return f"({text})" if (" " in text and not text.startswith("(")) or text.startswith("-") else text


def number_of_place(axes: Sequence[Axis], level: frozenset[str] | None = None, kind: str = "i64") -> str:
    """The number of a place among all of the axes', where those that are not in ``level`` are at their first."""
    entries = [Index.of(a) if level is None or a in level else Index() for a, _ in axes]
    return index(flatten(entries, [n for _, n in axes]), kind) if axes else "0"


def literal(value: float, dtype: DType) -> str:
    """A constant of a carrier type: the shortest decimal that has its bits; nan and inf as bit patterns."""
    if dtype.kind == "b":
        return "1" if value else "0"
    if dtype.is_float:
        number = float(value) if dtype.name != "e8m0" or value > 0 else float("nan")  # which has no zero
        if number != number or number in (float("inf"), float("-inf")):
            if dtype.name == "f64":
                return f"f64_of_bits(0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016x}ull)"
            return f"f32_of_bits(0x{struct.unpack('<I', struct.pack('<f', number))[0]:08x}u)"
        return _decimal(number) if dtype.name == "f64" else f"{_decimal_f32(number)}f"
    whole = int(value)
    if whole == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return f"{whole}LL" if abs(whole) >= 2**31 else str(whole)


def _decimal(number: float) -> str:
    text = repr(number)
    return text if "." in text or "e" in text else f"{text}.0"


def _decimal_f32(number: float) -> str:
    """The shortest decimal that every compiler reads as the f32 nearest to a number; in hex what f32 does not hold."""
    if abs(number) >= 2.0**128 - 2.0**103:
        return number.hex()
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(number)))
    sign = "-" if math.copysign(1, number) < 0 else ""
    if bits == 0:
        return f"{sign}0.0"
    below, size = struct.unpack("<2f", struct.pack("<2I", bits - 1, bits))
    above = 2 * size - below if bits == 0x7F7FFFFF else struct.unpack("<f", struct.pack("<I", bits + 1))[0]
    with held_off:
        from fractions import Fraction
    for digits in range(1, 10):
        text = _decimal(float(f"{size:.{digits}g}"))
        if size + below < 2 * Fraction(text) < size + above:  # nearer to it than to its neighbours
            return sign + text
    return sign + size.hex()  # type: ignore[no-any-return]
