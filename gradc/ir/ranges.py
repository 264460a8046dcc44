"""Range analysis of a kernel's values with symbolic sizes as bounds, from known ranges of buffer elements, dtypes and
masks.

With it the verifier proves that data-dependent accesses stay inside their buffers: a position is in range because the
elements of the buffer that it was loaded from have been checked, because of its computation (an argmax, a clamp), or
because the access is masked by a comparison.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .dims import Dim, Size, floordiv, known_bounds, known_nonnegative, maximum
from .kernel import Kernel
from .statement import MASKED, Index, Stmt
from .types import F64, I64, DType, Type
from .walk import reachable

EXACT = 2**53
"""Integers up to this magnitude are exact in f64."""


MOST = 4
"""The most lower (or upper) bounds kept for one value; several are kept because the order of symbolic sizes may be
unknown.
"""


@dataclass(frozen=True)
class Range:
    """The values x with l <= x for all l of ``lows`` and x <= h for all h of ``highs``; no bounds mean unbounded."""

    lows: tuple[Size, ...] = ()
    highs: tuple[Size, ...] = ()

    @classmethod
    def of(cls, low: Size, high: Size) -> Range:
        return cls((low,), (high,))

    def __and__(self, other: Range) -> Range:
        """The intersection."""
        return Range(_tightest((*self.lows, *other.lows), 1), _tightest((*self.highs, *other.highs), -1))

    def __or__(self, other: Range) -> Range:
        """A range that contains both: the bounds of each that hold for the other, too."""
        lows = [a for a, b in _both_ways(self.lows, other.lows) if known_nonnegative(b - a)]
        highs = [a for a, b in _both_ways(self.highs, other.highs) if known_nonnegative(a - b)]
        return Range(_tightest(lows, 1), _tightest(highs, -1))

    def __add__(self, other: Range) -> Range:
        return Range(
            _tightest((a + b for a in self.lows for b in other.lows), 1),
            _tightest((a + b for a in self.highs for b in other.highs), -1),
        )

    def __neg__(self) -> Range:
        return Range(tuple(a * -1 for a in self.highs), tuple(a * -1 for a in self.lows))

    def __mul__(self, factor: Size) -> Range:
        if known_nonnegative(factor):
            return self.each(lambda bound: bound * factor)
        return -(self * (factor * -1)) if known_nonnegative(factor * -1) else Range()

    def each(self, rising: Callable[[Size], Size]) -> Range:
        """The image under a monotonically increasing function."""
        return Range(tuple(map(rising, self.lows)), tuple(map(rising, self.highs)))

    def within(self, outer: Range) -> bool:
        """Whether it is known to be a subset of ``outer``."""
        below = all(any(known_nonnegative(a - b) for a in self.lows) for b in outer.lows)
        return below and all(any(known_nonnegative(b - a) for a in self.highs) for b in outer.highs)


def _tightest(bounds: Iterable[Size], sign: int) -> tuple[Size, ...]:
    """The bounds that no other bound implies: the greatest lower bounds (sign 1) or the least upper bounds (-1), each
    in the place of the first that it implies.
    """
    kept: list[Size] = []
    for new in dict.fromkeys(bounds):
        if not any(known_nonnegative((old - new) * sign) for old in kept):
            implied = [known_nonnegative((new - old) * sign) for old in kept]
            at = [*implied, True].index(True)
            kept = [*kept[:at], new, *(old for old, gone in zip(kept[at:], implied[at:], strict=True) if not gone)]
    return tuple(kept[:MOST])


def _both_ways(a: tuple[Size, ...], b: tuple[Size, ...]) -> Iterator[tuple[Size, Size]]:
    yield from itertools.product(a, b)
    yield from itertools.product(b, a)


def of_type(dtype: DType | None) -> Range:
    """The range of a dtype's values."""
    if dtype is None or dtype.is_float:
        return Range()
    return Range.of(*(dtype.range if dtype.is_integer else (0, 1)))


def fits(range_: Range, dtype: DType) -> bool:
    """Whether the dtype holds every integer of the range; sums of array sizes are taken to fit 64 bits."""
    if dtype.bits < 64 or dtype.kind == "u":
        return range_.within(of_type(dtype))
    return any(map(_countable, range_.lows)) and any(map(_countable, range_.highs))


def _countable(bound: Size) -> bool:
    """Whether it is a constant or a sum of array sizes, far from 2^63."""
    return (
        all(abs(c) < 2**31 or (not m and abs(c) < 2**62) for m, c in bound.terms)
        if isinstance(bound, Dim)
        else abs(bound) < 2**62
    )


def inside(size: Size) -> Range:
    """The range of the indices of an axis: [0, size)."""
    return Range.of(0, size - 1)


class KernelRanges:
    """The ranges of one kernel's values.

    :param known: the range of a buffer's elements.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type], known: Callable[[str], Range]):
        self.k, self.types, self.known = kernel, types, known
        self.axes = {name: inside(size) for name, size in (*kernel.rows, *kernel.cols)}
        self._memo: dict[tuple[str, frozenset[str]], Range] = {}
        self._indices: dict[tuple[Index, frozenset[str]], Range] = {}

    # -- masks ---------------------------------------------------------------------------------------------------------

    def conditions(self, mask: str) -> frozenset[str]:
        """The comparisons that hold where the mask is true: the conjuncts of ``mask``."""

        def parts(name: str) -> tuple[str, ...]:
            s = self.k.stmts[name]
            return s.args if s.op == "bitwise_and" else ()

        return frozenset(reachable([mask] if mask else [], parts))

    def tested(self, value: str, true: frozenset[str]) -> Range:
        """The range of a value that follows from the conditions ``true`` on it: ``ge``, ``le``, ``gt``, ``lt`` with a
        constant or a size.
        """
        range_ = Range()
        for s in map(self.k.stmts.__getitem__, sorted(true)):
            if s.op in ("ge", "le", "gt", "lt") and s.args[0] == value:
                bound = self.number(s.args[1])
                if bound is not None:
                    whole = not self._dtype(value).is_float  # a float x < 4 may be 3.5
                    range_ &= (
                        Range((bound + (s.op == "gt" and whole),))
                        if s.op in ("ge", "gt")
                        else Range((), (bound - (s.op == "lt" and whole),))
                    )
        return range_

    def number(self, value: str) -> Size | None:
        """The integer constant or size that a value is equal to, or None."""
        s = self.k.stmts[value]
        if s.op == "cast" and s.dtype is F64:  # a cast to f32 may round a size up
            s = self.k.stmts[s.args[0]]
        if s.op == "size":
            size: Size = s.attr("size")
            return size
        return exact(s.attr("value"), self._dtype(s.name)) if s.op == "const" else None

    # -- values --------------------------------------------------------------------------------------------------------

    def index(self, index: Index, true: frozenset[str]) -> Range:
        """The range of an index entry of an access where the conditions ``true`` hold."""
        key = index, true
        if key not in self._indices:
            self._indices[key] = self._index(index, true)
        return self._indices[key]

    def _index(self, index: Index, true: frozenset[str]) -> Range:
        total = Range.of(index.const, index.const)
        for variable, factor in index.terms:
            total += (self.axes[variable] if variable in self.axes else self.value(variable, true)) * factor
        for name in sorted(true):  # in one order, as not all bounds are kept, but the first
            s = self.k.stmts[name]
            if s.op == "in_bounds":
                test = Range.of(s.attr("lo"), s.attr("hi") - 1)
                for factor, rest in multiples(index, s.index[0]):
                    found = test * factor + self.index(rest, true - {name})
                    part = len(rest.terms) + len(s.index[0].terms) == len(index.terms)  # brings no other variable in
                    total = found & total if part else total & found
                for whole, size in self.undivided(index):
                    if same_place(s.index[0], whole):
                        total = test.each(lambda bound, size=size: floordiv(bound, size)) & total  # type: ignore[misc]
        return total

    def undivided(self, index: Index) -> Iterator[tuple[Index, int]]:
        """Each (place, size) such that the index is ``place // size``: for ``a + (x >> log2(size))``, place is
        ``a * size + x``.
        """
        for variable, factor in index.terms:
            s = self.k.stmts.get(variable)
            if s is None or s.op != "right_shift" or factor != 1 or self.k.stmts[s.args[0]].op != "index":
                continue
            places = self.number(s.args[1])
            if isinstance(places, int) and 0 <= places < 63:
                rest = Index(index.const, tuple(t for t in index.terms if t[0] != variable))
                whole = rest * 2**places + self.k.stmts[s.args[0]].index[0]
                if fits(self.index(whole, frozenset()), I64):  # a place that could wrap says nothing of its quotient
                    yield whole, 2**places

    def value(self, name: str, true: frozenset[str]) -> Range:
        key = name, true
        if key not in self._memo:
            s = self.k.stmts[name]
            self._memo[key] = self.tested(name, true) & self._computed(s, true) & of_type(s.dtype)
        return self._memo[key]

    def _dtype(self, name: str) -> DType:
        dtype = self.k.stmts[name].dtype
        assert dtype is not None
        return dtype

    def _computed(self, s: Stmt, true: frozenset[str]) -> Range:
        """The range that follows from a statement's operands; the full range of the dtype if integers could wrap."""
        rule = getattr(self, f"_of_{s.op}", None)
        if rule is None or (s.dtype is not None and s.dtype.is_float and s.op not in ("cast", "where")):
            return Range()
        range_: Range = rule(s, true)
        may_wrap = s.op in ("add", "sub", "mul", "cast", "index") and s.dtype is not None and not s.dtype.is_float
        return Range() if may_wrap and not fits(range_, self._dtype(s.name)) else range_

    def _of_load(self, s: Stmt, true: frozenset[str]) -> Range:
        range_ = self.known(s.buffer)
        if s.where and not self.conditions(s.where) <= true:
            range_ |= self._number(s, dict(s.attrs).get("other", 0))
        return range_

    def _of_const(self, s: Stmt, true: frozenset[str]) -> Range:
        return self._number(s, s.attr("value"))

    def _number(self, s: Stmt, value: object) -> Range:
        number = exact(value, self._dtype(s.name))
        return Range() if number is None else Range.of(number, number)

    def _of_size(self, s: Stmt, true: frozenset[str]) -> Range:
        return Range.of(s.attr("size"), s.attr("size"))

    def _of_index(self, s: Stmt, true: frozenset[str]) -> Range:
        return self.index(s.index[0], true)

    def _of_search(self, s: Stmt, true: frozenset[str]) -> Range:
        return Range.of(0, self.types[s.buffer].count)

    def _of_clamp_index(self, s: Stmt, true: frozenset[str]) -> Range:
        return inside(maximum(s.attr("size"), 1))  # 0 for an empty axis, where the access is masked

    def _of_argmax_cols(self, s: Stmt, true: frozenset[str]) -> Range:
        size = self.k.col_count  # a call with no columns raises an error
        return inside(size if dict(s.attrs).get("empty") == "error" else maximum(size, 1))

    _of_argmin_cols = _of_argmax_cols

    def _of_scan(self, s: Stmt, true: frozenset[str]) -> Range:
        return inside(self.k.col_count) if s.combine in ("argmax", "argmin") else Range()  # without columns none is run

    def _of_where(self, s: Stmt, true: frozenset[str]) -> Range:
        condition, a, b = s.args
        chosen = self.conditions(condition)
        if chosen <= true:
            return self.value(a, true)
        return self.value(a, true | chosen) | self.value(b, true)

    def _of_cast(self, s: Stmt, true: frozenset[str]) -> Range:
        """Truncation to an int preserves integer bounds; rounding to a float preserves bounds the dtype represents."""
        range_, dtype = self.value(s.args[0], true), self._dtype(s.name)
        if not dtype.is_float:
            return range_
        lows, highs = (
            tuple(b for b in bounds if (dtype is F64 if isinstance(b, Dim) else exact(b, dtype) is not None))
            for bounds in (range_.lows, range_.highs)
        )
        return Range(lows, highs) if lows and highs else Range()  # without both bounds it may be NaN

    def _of_add(self, s: Stmt, true: frozenset[str]) -> Range:
        return self.value(s.args[0], true) + self.value(s.args[1], true)

    def _of_sub(self, s: Stmt, true: frozenset[str]) -> Range:
        return self.value(s.args[0], true) + -self.value(s.args[1], true)

    def _of_mul(self, s: Stmt, true: frozenset[str]) -> Range:
        factors = [self.number(a) for a in s.args]
        for factor, other in zip(factors, reversed(s.args), strict=True):
            if factor is not None:
                return self.value(other, true) * factor
        return Range()

    def _of_bitwise_and(self, s: Stmt, true: frozenset[str]) -> Range:
        limits = [n for a in s.args if isinstance(n := self.number(a), int) and n >= 0]
        return Range.of(0, min(limits)) if limits else Range()

    def _of_right_shift(self, s: Stmt, true: frozenset[str]) -> Range:
        places = self.number(s.args[1])
        if not isinstance(places, int) or not 0 <= places < 63:
            return Range()
        return _quotients(self.value(s.args[0], true), 2**places)

    def _of_mod(self, s: Stmt, true: frozenset[str]) -> Range:
        divisor = self.number(s.args[1])
        return inside(divisor) if divisor is not None and known_nonnegative(divisor - 1) else Range()

    def _of_floordiv(self, s: Stmt, true: frozenset[str]) -> Range:
        divisor = self.number(s.args[1])
        if divisor is None or not known_nonnegative(divisor - 1):
            return Range()
        return _quotients(self.value(s.args[0], true), divisor)

    # -- accesses ------------------------------------------------------------------------------------------------------

    def accesses(self) -> Iterator[tuple[Stmt, int, Range, Size]]:
        """For each index entry of each access: (statement, axis of the buffer, range of the entry, the axis's size)."""
        for s in self.k.body:
            if s.op in ("load", "store", "accum"):
                true = self.conditions(s.where) if s.op in MASKED else frozenset[str]()
                for axis, (index, size) in enumerate(zip(s.index, self.types[s.buffer].shape, strict=True)):
                    yield s, axis, self.index(index, true), size


def _quotients(range_: Range, divisor: Size) -> Range:
    """A range divided by a positive number.  What is known of a bound is used before: it is not of the quotient."""
    known = itertools.chain.from_iterable((high, *known_bounds(high)) for high in range_.highs)
    return Range(range_.lows, tuple(dict.fromkeys(known))).each(lambda bound: floordiv(bound, divisor))


def multiples(index: Index, tested: Index) -> Iterator[tuple[Size, Index]]:
    """Each (factor, rest) with index = factor * tested + rest that eliminates a variable from the rest, or all."""
    steps = dict(index.terms)
    factors = [_quotient(steps[v], c) for v, c in tested.terms if v in steps] or [1] * same_place(index, tested)
    for factor in dict.fromkeys(factors):
        if factor is not None:
            yield factor, index + tested * (factor * -1)


def _quotient(step: Size, by: Size) -> Size | None:
    """step / by where that is whole."""
    if step == by:
        return 1
    quotient = floordiv(step, by)
    return quotient if quotient * by == step else None


def same_place(a: Index, b: Index) -> bool:
    """Whether two indices are equal, regardless of the order of terms."""
    return a.const == b.const and dict(a.terms) == dict(b.terms)


def sources(kernel: Kernel, index: Index) -> Iterator[str]:
    """The buffers whose unmodified elements an index is: a check of those elements would bound the index."""
    variable = index.variable
    if variable is None or not variable.startswith("%"):
        return
    s = kernel.stmts[variable]
    while s.op == "cast":
        s = kernel.stmts[s.args[0]]
    if s.op == "load":
        yield s.buffer


def exact(value: object, dtype: DType) -> int | None:
    """The integer that a constant of a dtype is equal to; None if it is no integer or the dtype rounds or wraps it."""
    if (
        not isinstance(value, bool | int | float)
        or not abs(value) < (EXACT if dtype.is_float else 2**64)
        or value != int(value)
    ):
        return None
    if dtype.is_float:
        with np.errstate(over="ignore"):
            return int(value) if float(np.asarray(value).astype(dtype.np)) == value else None
    low, high = dtype.range if dtype.is_integer else (0, 1)
    return int(value) if low <= value <= high else None


def constant(values: tuple[int | float | bool, ...], dtype: DType) -> Range:
    """The range of a constant's elements."""
    whole = [exact(v, dtype) for v in values]
    known = [v for v in whole if v is not None]
    return Range.of(min(known), max(known)) if known and len(known) == len(whole) else Range()


__all__ = ["KernelRanges", "Range", "constant", "inside", "of_type", "same_place", "sources"]
