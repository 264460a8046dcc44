"""Maps normalised coordinates to the integer positions that are read on an axis, and to their interpolation weights.

The only definition of mode x padding_mode x align_corners, written as pointwise ops on the coordinate, from which
autodiff derives the gradients. Positions are range-checked in float before they are converted to integers; every
position outside the axis becomes -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from ...ir.dims import Size, maximum
from ...ir.node import Node, call
from ...ir.types import F32, F64, I32, I64, DType
from ..elementwise.pointwise import abs, eq, floor, ge, gt, le, logical_and, lt, minimum, mod, round, where
from ..rules import converted, reshaped

Mode = Literal["bilinear", "nearest", "bicubic"]
Padding = Literal["zeros", "border", "reflection"]

_A = -0.75
_TAPS: dict[str, tuple[int, tuple[tuple[float, ...], ...]]] = {
    "bilinear": (0, ((-1, 1), (1, 0))),
    "bicubic": (
        -1,
        ((_A, -2 * _A, _A, 0), (_A + 2, -(_A + 3), 0, 1), (-(_A + 2), 2 * _A + 3, -_A, 0), (-_A, _A, 0, 0)),
    ),
}
"""mode -> (offset of the first tap from the floor, each tap's weight as a polynomial in the fraction t, highest power
first).

Bicubic: the kernel of Keys 1981 with A = -0.75 at the signed distances -1-t, -t, 1-t, 2-t.
"""
_FAR = 3
"""Pixels beyond the axis at which every tap of every mode is outside, so that the result no longer depends on the
coordinate.
"""


def position_dtype(sizes: Iterable[Size]) -> DType:
    """i32 if it is known to hold every position on axes of these sizes, else i64."""
    return I32 if all(isinstance(n, int) and n < 2**31 for n in sizes) else I64


def read_at(
    coordinate: Node, size: Size, dtype: DType, *, mode: str, padding_mode: str, align_corners: bool
) -> tuple[Node, Node | None]:
    """(positions, weights) on an axis of ``size``.

    For coordinates ``[N,...]`` both are ``[N,T,...]`` with T taps; mode nearest gives positions ``[N,...]`` and None.
    Positions have the integer dtype ``dtype``.

    Coordinates are unnormalised in f64: in f32 a position on an axis of 1000 pixels keeps only 14 bits of fraction and
    may round to the wrong pixel.  For 16-bit coordinates the products are already exact in f32.
    """
    compute, coordinate = coordinate.dtype.compute, converted(coordinate, F32 if coordinate.dtype.bits == 16 else F64)
    known = where(eq(coordinate, coordinate), coordinate, -1.0)  # NaN counts as -1
    place = _place(known, size, align_corners)
    if mode == "nearest":
        return _index(round(_padded(place, size, padding_mode, align_corners)), size, dtype), None
    first, polynomials = _TAPS[mode]
    if mode == "bilinear":
        place = _padded(place, size, padding_mode, align_corners)
    else:
        place = (
            _finite(place, align_corners) if padding_mode == "reflection" else _held(place, -_FAR, size + (_FAR - 1))
        )
    base = floor(place)
    fraction = place - base
    if compute is F64:
        fraction = _completed(fraction, known, place, base, size, align_corners, mode=mode, padding_mode=padding_mode)
    base, fraction = _over_taps(base), _over_taps(converted(fraction, compute))
    taps = base + _per_tap(range(first, first + len(polynomials)), base)
    if mode == "bicubic" and padding_mode != "zeros":  # padding applies to each integer tap, not to the coordinate
        taps = _padded(taps, size, padding_mode, align_corners)
    weights = None
    for coefficients in zip(*polynomials, strict=True):  # Horner's rule
        constant = _per_tap(coefficients, fraction)
        weights = constant if weights is None else weights * fraction + constant
    return _index(taps, size, dtype), weights


def _over_taps(x: Node) -> Node:
    return reshaped(x, (x.shape[0], 1, *x.shape[1:]))


def _per_tap(values: object, like: Node) -> Node:
    items = tuple(float(v) for v in values)  # type: ignore[attr-defined]
    return call("constant", value=items, dtype=like.dtype, shape=(1, len(items), *(1,) * (like.rank - 2)))


def _place(x: Node, size: Size, align_corners: bool) -> Node:
    """Unnormalises [-1, 1] to pixels; -1 and 1 are centres (align_corners) or outer edges of the outermost pixels."""
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _completed(
    fraction: Node, x: Node, place: Node, base: Node, size: Size, align_corners: bool, *, mode: str, padding_mode: str
) -> Node:
    """place - base for the coordinate x, including the bits that rounding in f64 lost: x is split into two parts, of
    which the product of one with a size is exact.
    """
    if mode == "bilinear" and padding_mode == "reflection":
        x = x - round(x / 4) * 4  # reflection has period 4: exact in floats, as is 2 - x between 1 and 2
        x = where(gt(x, 1), 2 - x, where(lt(x, -1), -2 - x, x))
    scale, coarse = size - 1 if align_corners else size, round(x * 2.0**26) / 2.0**26
    exact = ((coarse * scale + (size - 1)) / 2 - base) + (x - coarse) * scale / 2
    free = lt(abs(x), 16)  # larger coordinates only matter in bicubic reflection
    if mode == "bilinear" or padding_mode != "reflection":
        low, high = (0, size - 1) if mode == "bilinear" and padding_mode != "zeros" else (-_FAR, size + (_FAR - 1))
        free = logical_and(free, logical_and(gt(place, low), lt(place, high)))
    return where(free, exact, fraction)


def _padded(place: Node, size: Size, padding_mode: str, align_corners: bool) -> Node:
    """The position after padding: on the axis, or for zeros padding at most ``_FAR`` outside it."""
    if padding_mode == "zeros":
        return _held(place, -_FAR, size + (_FAR - 1))
    if padding_mode == "reflection":
        place = _reflected(_finite(place, align_corners), size, align_corners)
    return _held(place, 0, size - 1)


def _held(x: Node, low: Size, high: Size) -> Node:
    """x clamped to [low, high]; the derivative is 0 on the bounds, beyond them, and for NaN."""
    return where(gt(x, low), where(lt(x, high), x, high), low)


def _finite(place: Node, align_corners: bool) -> Node:
    """The position, with infinite ones replaced by that of the coordinate -1."""
    return where(lt(abs(place), math.inf), place, 0.0 if align_corners else -0.5)


def _reflected(x: Node, size: Size, align_corners: bool) -> Node:
    """x reflected at the centres (align_corners) or outer edges of the outermost pixels; each reflection negates the
    derivative.
    """
    low = 0.0 if align_corners else -0.5
    period = maximum(2 * size - 2, 1) if align_corners else 2 * size
    along = mod(abs(x - low), period)
    return minimum(along, -(along - period)) + low


def _index(place: Node, size: Size, dtype: DType) -> Node:
    """An integral float position as an integer, -1 outside the axis; range-checked in float, so that no value
    overflows in the conversion.
    """
    inside = logical_and(ge(place, 0), le(place, size - 1))
    return converted(where(inside, place, -1.0), dtype)
