"""What a value that is added in fixed point is at most: a weight that is known to be small need not be computed to find
the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...ir.kernel import Kernel
from ...ir.statement import Index, Stmt
from ...ir.walk import backward_slice

Range = tuple[float, float]
"""Of all that is finite: (least, largest)."""
HIGHEST_WEIGHT = 16.0
"""What a weight can be at most that is left out: the digits between it and what weights are get lost."""
LARGEST_EXPONENT = 60
"""Of powers of two beside the largest value, either way: the scale stays one that gradc_scaled takes."""


def ranges(kernel: Kernel) -> dict[str, Range]:
    """Of the values of floats that constants and fractions (x - floor x) are made into.

    Rounding is monotone, so that it leaves a value between bounds which f32 holds.
    """
    found: dict[str, Range] = {}
    for s in kernel.body:
        known = [found.get(a) for a in s.args]
        made: Range | None = None
        if s.dtype is None or not s.dtype.is_float:
            continue
        if s.op == "const":
            made = (s.attr("value"), s.attr("value"))
        elif _is_fraction(kernel, s):
            made = (0.0, 1.0)
        elif s.op == "where":
            known = known[1:]
        if made is None and known and all(r is not None for r in known):
            made = _made(s.op, [r for r in known if r is not None])
        if made is not None and all(map(math.isfinite, made)):
            found[s.name] = _in_f32(made)
    return found


def _is_fraction(kernel: Kernel, s: Stmt) -> bool:
    """Whether it is x - floor x."""
    return s.op == "sub" and (floor := kernel.stmts[s.args[1]]).op == "floor" and floor.args == s.args[:1]


def _left_out(kernel: Kernel) -> dict[str, float]:
    """The largest |value| of factors that a scan need not compute: weights made of fractions, of which a point has some
    that are not far below.  Other factors may all be, as a choice between constants that never takes the largest.
    """
    fractions: set[str] = set()
    found: dict[str, float] = {}
    for name, (low, high) in ranges(kernel).items():
        s, largest = kernel.stmts[name], max(-low, high)
        if _is_fraction(kernel, s) or not fractions.isdisjoint(s.args):
            fractions.add(name)
        if name in fractions and largest <= HIGHEST_WEIGHT:
            found[name] = largest
    return found


def _made(op: str, of: list[Range]) -> Range | None:
    """Of an op's value, whose operands' are known."""
    if op == "cast":
        return of[0]
    if op == "where":
        return min(r[0] for r in of), max(r[1] for r in of)
    if op in ("add", "sub") and len(of) == 2:
        (a, b), (c, d) = of
        return (a + c, b + d) if op == "add" else (a - d, b - c)
    if op == "mul" and len(of) == 2:
        ends = [x * y for x in of[0] for y in of[1]]
        return min(ends), max(ends)
    return None


def _in_f32(r: Range) -> Range:
    """The nearest bounds around it which f32 holds, after what was rounded in f64."""
    low, high = (np.float32(x) for x in r)
    low = low if float(low) == r[0] else np.nextafter(low, np.float32(-np.inf))
    high = high if float(high) == r[1] else np.nextafter(high, np.float32(np.inf))
    return float(low), float(high)


def largest_of(kernel: Kernel) -> tuple[Kernel, Mapping[str, int]]:
    """accum y[%i] <- dy * w where %m  ->  accum y[0] <- dy, where |w| is at most a power of two: what a scan for the
    largest |value| of each result looks at; and the exponents of these powers, by the result.

    A kernel with columns is looked at as it is: a place says which thread has an accum.
    """
    exponents = {s.buffer: 0 for s in kernel.accums}
    if kernel.cols:
        return kernel, exponents
    left_out = _left_out(kernel)
    looked_at: dict[Stmt, None] = {}
    factors = [(s, *_factor(kernel, s.args[0], left_out)) for s in kernel.accums]
    for buffer in exponents:  # the accums of a result share its scale
        exponents[buffer] = max(exponent for s, _, exponent in factors if s.buffer == buffer)
    for s, value, _ in factors:
        where = s.where if value == s.args[0] else ""
        looked_at[replace(s, args=(value,), where=where, index=tuple(Index() for _ in s.index))] = None
    body = backward_slice(kernel.body, (u for s in looked_at for u in s.uses))
    return replace(kernel, body=(*body, *looked_at)), exponents


def _factor(kernel: Kernel, value: str, left_out: Mapping[str, float]) -> tuple[str, int]:
    """(a factor of a product of f32, the exponent of the least power of two that all others are at most)."""
    exponent, at_most = 0, 1.0
    while (s := kernel.stmts[value]).op == "mul":
        others = [(a, left_out[b]) for a, b in (s.args, s.args[::-1]) if left_out.get(b)]
        if not others:
            break
        other, largest = others[0]
        fraction, power = math.frexp(at_most * largest)
        power -= fraction == 0.5
        if abs(power) > LARGEST_EXPONENT:
            break
        value, exponent, at_most = other, power, at_most * largest
    return value, exponent
