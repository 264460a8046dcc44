"""Which sums over columns are carried along a maximum, and by which factors of the row they are multiplied at last.

A sum A of f(x) over columns that come in blocks is A + block.  With exp(x - m) in it, where m is the maximum of x, it
waits for m, and needs a sweep of its own; but if each term has exactly one factor exp(x - m), and all else is free of
m, then what was summed relative to a maximum ``a`` is, relative to ``b``, A exp(a - b).  So the sum is carried next to
its maximum, in one sweep.  Online softmax, logsumexp, cross entropy and attention are this one rule.

Why x has to be what m is the maximum of: before the last block exp(x - m) would overflow otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...ir.dims import known_nonnegative
from ...ir.statement import REDUCTIONS
from ...ir.types import BOOL, I64, DType
from .body import Body

Shift = Literal["maximum", "finite from below", "finite"]
"""What is subtracted of x: the maximum m itself; 0 where m is -inf; 0 where m is infinite."""


@dataclass(frozen=True)
class Sum:
    """A combination of all columns.

    :param value: what is combined.  :param combine: of :data:`gradc.ir.statement.COMBINES`.
    :param sweep: the number of the sweep that does it.  :param by: the maximum along which it is carried, or "".
    :param factors: values of the row that multiply the result.
    :param known: the number of the sweep after which the result is known.
    """

    value: str
    combine: str
    sweep: int
    by: str
    factors: tuple[str, ...]
    known: int


@dataclass
class Plan:
    """The sweep of each reduction, found in the order in which they depend on each other."""

    body: Body
    sums: dict[str, Sum] = field(default_factory=dict)

    def sweep_of(self, value: str) -> int:
        """The number of the first sweep in which a value of a column can be computed."""
        return max((self.of(r).known + 1 for r in self.body.reductions(value)), default=0)

    def of(self, reduction: str) -> Sum:
        """How a reduction is carried."""
        if reduction not in self.sums:
            s = self.body.stmts[reduction]
            self.sums[reduction] = self.carried(s.args[0], REDUCTIONS[s.op])
        return self.sums[reduction]

    def carried(self, value: str, combine: str) -> Sum:
        """How a combination of a value of the columns is carried: in the first sweep that can."""
        found = self._in_its_sweep(value, (), combine)
        core, factors = split(self.body, value) if combine == "sum" else (value, ())
        factors = tuple(_finite_over_none(self.body, factor) for factor in factors)
        if factors:
            other = self._in_its_sweep(core, factors, combine)
            found = other if other.sweep < found.sweep else found
        return found

    def _in_its_sweep(self, value: str, factors: tuple[str, ...], combine: str) -> Sum:
        sweep, by = self.sweep_of(value), ""
        last = [r for r in self.body.reductions(value) if self.of(r).known + 1 == sweep]
        if combine == "sum" and len(last) == 1 and self.of(last[0]).combine == "max":
            term = _Term(self.body, last[0])
            if term.is_relative(value):
                sweep, by = sweep - 1, last[0]
                if term.shifts == {"maximum"}:
                    value, factors = _from_finite(self.body, value, by), (*factors, _to_maximum(self.body, by))
        known = max((sweep, *(self.sweep_of(f) - 1 for f in factors)))
        return Sum(value, combine, sweep, by, factors, known)


def split(body: Body, value: str) -> tuple[str, tuple[str, ...]]:
    """A value of a column  ->  what of it depends on the column, and the factors that do not.

    A ``where`` keeps its factors: 0 where it hides all columns is 0 times a factor that need not be finite.  So does a
    cast to a dtype of a smaller range, which the value may leave without them, unless it is an exponential below 1.
    """
    s = body.stmts[value]
    assert s.dtype is not None
    if not body.varies(value) or not s.dtype.is_float:
        return value, ()
    if s.op in ("mul", "div") and not body.varies(s.args[1]):
        core, factors = split(body, s.args[0])
        factor = s.args[1]
        return core, (*factors, factor if s.op == "mul" else body.add("reciprocal", factor, dtype=s.dtype))
    if s.op == "mul" and not body.varies(s.args[0]):
        core, factors = split(body, s.args[1])
        return core, (*factors, s.args[0])
    if s.op == "mul":
        (a, left), (b, right) = (split(body, arg) for arg in s.args)
        return (body.add("mul", a, b, dtype=s.dtype), (*left, *right)) if left or right else (value, ())
    if s.op in ("neg", "cast") and _is_float(body, s.args[0]):
        core, factors = split(body, s.args[0])
        fits = s.op == "neg" or _has_range_of(s.dtype, body.stmts[core].dtype) or _is_at_most_one(body, core)
        return (body.intern(s.altered(args=(core,))), factors) if factors and fits else (value, ())
    return value, ()


def _has_range_of(dtype: DType, other: DType | None) -> bool:
    return other is not None and (dtype.holds(other) or (dtype.name == "bf16" and other.bits <= 32))


def _is_at_most_one(body: Body, value: str) -> bool:
    """Whether a value is a product of exponentials exp(x - m), where m is the maximum of x, of masks and of casts of
    these.
    """
    s = body.stmts[value]
    if s.op == "cast" and body.stmts[s.args[0]].dtype is BOOL:
        return True
    if s.op == "const":
        return bool(abs(s.attr("value")) <= 1)
    if s.op in ("cast", "mul", "neg"):
        return all(_is_float(body, a) and _is_at_most_one(body, a) for a in s.args)
    if s.op == "where":
        return all(_is_at_most_one(body, a) for a in s.args[1:])
    tops = (name for name in body.reductions(value) if REDUCTIONS[body.stmts[name].op] == "max")
    return s.op == "exp" and any(_Term(body, top).shift(value) for top in tops)


def _is_float(body: Body, value: str) -> bool:
    dtype = body.stmts[value].dtype
    return dtype is not None and dtype.is_float


@dataclass
class _Term:
    """Whether a value has exactly one factor exp(x - m), and is free of m else.

    :param top: the reduction m.
    :ivar shifts: what its exponentials subtract.
    """

    body: Body
    top: str
    shifts: set[Shift] = field(default_factory=set)
    masked: bool = False
    _powers: dict[str, int | None] = field(default_factory=dict)

    def is_relative(self, value: str) -> bool:
        relative = self.power(value) == 1
        # A mask may hide the columns where m is infinite.  Without it, these decide what the sum is, unless an exp of
        # another column overflows first: where m is +inf, a carried sum of both signs may be an infinity for a NaN.
        return relative and len(self.shifts) == 1 and not (self.masked and self.shifts != {"finite from below"})

    def power(self, value: str) -> int | None:
        """The number of factors exp(-m); None if it is no product of these and what is free of m."""
        for name in self.body.down_to_reductions(value):
            if name not in self._powers:
                self._powers[name] = self._power(name)
        return self._powers[value]

    def _power(self, value: str) -> int | None:
        s = self.body.stmts[value]
        if self.top not in self.body.reductions(value):
            return 0
        shift = self.shift(value)
        if shift is not None:
            self.shifts.add(shift)
            return 1
        if s.op in REDUCTIONS:
            return None
        powers = [self._powers[a] for a in s.args]
        if s.op == "where" and powers[0] == 0:
            self.masked = True
            return self._equal(s.args[1:])
        if s.op in ("add", "sub"):
            return self._equal(s.args)
        if None in powers:
            return None
        if s.op in ("mul", "div"):
            a, b = (p for p in powers if p is not None)
            return a + b if s.op == "mul" else a - b
        if s.op == "neg" or (s.op == "cast" and s.dtype is not None and s.dtype.is_float):
            return powers[0]
        return None

    def _equal(self, values: tuple[str, ...]) -> int | None:
        """The power that values have in common; 0 has any."""
        powers = {self._powers[v] for v in values if not _is_constant(self.body, v, 0.0)}
        return powers.pop() if len(powers) == 1 else None

    def shift(self, value: str) -> Shift | None:
        """What is subtracted, if the value is exp(x - m)."""
        body, s = self.body, self.body.stmts[value]
        difference = body.stmts[s.args[0]] if s.op == "exp" else s
        if difference is s or difference.op != "sub" or difference.args[0] != body.stmts[self.top].args[0]:
            return None
        shift = body.stmts[difference.args[1]]
        if shift.name == self.top:
            return "maximum"
        if shift.op != "where" or shift.args[2] != self.top or not _is_constant(body, shift.args[1], 0.0):
            return None
        test = body.stmts[shift.args[0]]
        if test.op != "eq":
            return None
        for a, b in (test.args, test.args[::-1]):
            if a == self.top and _is_constant(body, b, -math.inf):
                return "finite from below"
            size = body.stmts[a]
            if size.op == "abs" and size.args == (self.top,) and _is_constant(body, b, math.inf):
                return "finite"
        return None


def _is_constant(body: Body, value: str, number: float) -> bool:
    s = body.stmts[value]
    return s.op == "const" and s.attr("value") == number


def _finite(body: Body, top: str, dtype: DType) -> str:
    """The maximum, or 0 where it is -inf: where all columns so far are."""
    test = body.add("eq", top, body.constant(-math.inf, dtype), dtype=BOOL)
    return body.add("where", test, body.constant(0.0, dtype), top, dtype=dtype)


def _from_finite(body: Body, value: str, top: str) -> str:
    """A value with exp(x - m)  ->  with exp(x - 0) where all columns so far are -inf."""
    s = body.stmts[top]
    assert s.dtype is not None
    difference = body.add("sub", s.args[0], top, dtype=s.dtype)
    shifted = body.add("sub", s.args[0], _finite(body, top, s.dtype), dtype=s.dtype)
    return body.replaced(value, {difference: shifted})


def _to_maximum(body: Body, top: str) -> str:
    """The factor from a sum relative to 0 where m is -inf to one relative to m: 1, or NaN as exp(-inf - -inf) is."""
    dtype = body.stmts[top].dtype
    assert dtype is not None
    factor = body.add("exp", body.add("sub", _finite(body, top, dtype), top, dtype=dtype), dtype=dtype)
    return _where_some(body, factor)


def _where_some(body: Body, factor: str) -> str:
    """A factor, or 1 where there are no columns: a sum of none is 0."""
    dtype = body.stmts[factor].dtype
    assert dtype is not None
    if known_nonnegative(body.size - 1):
        return factor
    count = body.add("size", dtype=I64, attrs=(("size", body.size),))
    some = body.add("gt", count, body.constant(0, I64), dtype=BOOL)
    return body.add("where", some, factor, body.constant(1.0, dtype), dtype=dtype)


def _finite_over_none(body: Body, factor: str) -> str:
    """A factor, or 1 where there are no columns, if it is infinite or NaN there, as 1 / sum is: 0 times it were NaN."""
    value = _over_none(body, factor)
    return factor if value is None or math.isfinite(value) else _where_some(body, factor)


def _over_none(body: Body, value: str) -> float | None:
    """What a value of the row is where there are no columns; None if that depends on what is in memory."""
    s = body.stmts[value]
    if s.op in REDUCTIONS:
        return {"sum": 0.0, "max": -math.inf, "min": math.inf}.get(REDUCTIONS[s.op])
    if s.op == "const":
        return float(s.attr("value"))
    args = [a for arg in s.args if (a := _over_none(body, arg)) is not None]
    if not args or len(args) < len(s.args):
        return None
    with np.errstate(all="ignore"):
        return float(_OF_ROW[s.op](*args)) if s.op in _OF_ROW else None


_OF_ROW: dict[str, Callable[..., Any]] = {
    "cast": np.positive,
    "reciprocal": np.reciprocal,
    "div": np.divide,
    "mul": np.multiply,
    "eq": np.equal,
    "where": np.where,
}
