"""Where a normalised coordinate falls on an axis: the positions that are read there, and their weights.

The one definition of mode x padding x align_corners, as pointwise ops on the coordinate; every derivative follows from
it by calculus. Positions are tested in float before they become integers, and -1 stands for all that lie outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from ..ir.dims import Size, maximum
from ..ir.node import Node, call
from ..ir.types import F32, F64, I32, I64, DType
from .pointwise import abs, eq, floor, ge, gt, le, logical_and, lt, minimum, mod, round, where
from .rules import converted, reshaped

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
"""mode -> (the first tap's distance from the floor, each tap's weight as a polynomial of the fraction, highest power
first).

Cubic: Keys 1981 at the signed distances -1-t, -t, 1-t, 2-t.
"""
_FAR = 3
"""So far outside every tap of every mode is outside too, and nothing depends on the coordinate any more."""


def position_dtype(sizes: Iterable[Size]) -> DType:
    """i32 where it is known to hold every position on axes of these sizes."""
    return I32 if all(isinstance(n, int) and n < 2**31 for n in sizes) else I64


def read_at(
    coordinate: Node, size: Size, dtype: DType, *, mode: str, padding_mode: str, align_corners: bool
) -> tuple[Node, Node | None]:
    """(positions, weights) on an axis of ``size``: ``[N,T,...]`` for coordinates ``[N,...]``; nearest has no taps T and
    no weights.

    Coordinates are mapped in f64: in f32 a place on an axis of 1000 pixels keeps 14 bits of its fraction, and may fall
    beside its pixel.  In f32 the products of 16-bit coordinates are exact already.
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
    if mode == "bicubic" and padding_mode != "zeros":  # each tap is padded, never the coordinate
        taps = _padded(taps, size, padding_mode, align_corners)
    weights = None
    for coefficients in zip(*polynomials, strict=True):  # Horner
        constant = _per_tap(coefficients, fraction)
        weights = constant if weights is None else weights * fraction + constant
    return _index(taps, size, dtype), weights


def _over_taps(x: Node) -> Node:
    return reshaped(x, (x.shape[0], 1, *x.shape[1:]))


def _per_tap(values: object, like: Node) -> Node:
    items = tuple(float(v) for v in values)  # type: ignore[attr-defined]
    return call("constant", value=items, dtype=like.dtype, shape=(1, len(items), *(1,) * (like.rank - 2)))


def _place(x: Node, size: Size, align_corners: bool) -> Node:
    """[-1, 1] -> pixels: -1 and 1 are the centres of the outermost ones, or their outer edges."""
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _completed(
    fraction: Node, x: Node, place: Node, base: Node, size: Size, align_corners: bool, *, mode: str, padding_mode: str
) -> Node:
    """place - base of the coordinate x with the bits that f64 itself lost: x in two parts, of which one times a size is
    exact.
    """
    if mode == "bilinear" and padding_mode == "reflection":
        x = x - round(x / 4) * 4  # folded back at -1 and 1: exact in floats, as is 2 - x between 1 and 2
        x = where(gt(x, 1), 2 - x, where(lt(x, -1), -2 - x, x))
    scale, coarse = size - 1 if align_corners else size, round(x * 2.0**26) / 2.0**26
    exact = ((coarse * scale + (size - 1)) / 2 - base) + (x - coarse) * scale / 2
    free = lt(abs(x), 16)  # only bicubic reflection makes anything of larger ones
    if mode == "bilinear" or padding_mode != "reflection":
        low, high = (0, size - 1) if mode == "bilinear" and padding_mode != "zeros" else (-_FAR, size + (_FAR - 1))
        free = logical_and(free, logical_and(gt(place, low), lt(place, high)))
    return where(free, exact, fraction)


def _padded(place: Node, size: Size, padding_mode: str, align_corners: bool) -> Node:
    """A place brought to the axis; under zeros, to a place outside it at most."""
    if padding_mode == "zeros":
        return _held(place, -_FAR, size + (_FAR - 1))
    if padding_mode == "reflection":
        place = _reflected(_finite(place, align_corners), size, align_corners)
    return _held(place, 0, size - 1)


def _held(x: Node, low: Size, high: Size) -> Node:
    """x between two bounds; on them and beyond, NaN included, the derivative is 0."""
    return where(gt(x, low), where(lt(x, high), x, high), low)


def _finite(place: Node, align_corners: bool) -> Node:
    """An infinite place counts as that of the coordinate -1."""
    return where(lt(abs(place), math.inf), place, 0.0 if align_corners else -0.5)


def _reflected(x: Node, size: Size, align_corners: bool) -> Node:
    """x folded back at the outermost centres, or at their outer edges; each fold turns the derivative's sign."""
    low = 0.0 if align_corners else -0.5
    period = maximum(2 * size - 2, 1) if align_corners else 2 * size
    along = mod(abs(x - low), period)
    return minimum(along, -(along - period)) + low


def _index(place: Node, size: Size, dtype: DType) -> Node:
    """A whole place as an integer, -1 outside the axis: the test is made in float, so that no number becomes a wild
    position.
    """
    inside = logical_and(ge(place, 0), le(place, size - 1))
    return converted(where(inside, place, -1.0), dtype)
