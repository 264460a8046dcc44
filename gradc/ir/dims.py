"""Symbolic sizes: integer polynomials over symbols, floordiv and max, in one canonical form.

A *size* is an ``int`` or a :class:`Dim`; arithmetic with a constant result returns an ``int``, so ``N - N == 0``, and
``==`` compares canonical forms.  ``ceildiv(a, b)`` is stored as ``(a+b-1)//b`` and ``min(a, b)`` as ``a+b-max(a, b)``.
Every symbol is an integer >= 0; within a block of :func:`assuming`, facts such as ``N >= 1`` are used too.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypeVar, TypeVarTuple, Union

from ..errors import InvalidProblem, TypeRuleError
from ..process.forks import cached_property

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
Size = Union[int, "Dim"]
Atom = Union[str, "FloorDiv", "Max"]
Monomial = tuple[tuple[Atom, int], ...]  # (atom, power), sorted; () is the constant term
LARGEST = 2**63 - 1
DEEPEST, _MOST_PARTS = 40, 1000
_MOST_USES = 8
_MOST_CASES = 6
"""Maxima beyond which the two sides of each are not tried, as there are 64 cases of six."""


@dataclass(frozen=True)
class FloorDiv:
    """numerator // denominator, rounded down; no term of the numerator is divisible by the denominator, and a constant
    denominator is larger than the numerator's constant, which is not negative.
    """

    numerator: Size
    denominator: Size

    def __str__(self) -> str:
        return f"{_factor(self.numerator)}//{_factor(self.denominator)}"


@dataclass(frozen=True)
class Max:
    """The larger of two sizes whose order is not known."""

    left: Size
    right: Size

    def __str__(self) -> str:
        return f"max({self.left}, {self.right})"


@dataclass(frozen=True)
class Dim:
    """A non-constant size: ``terms`` are sorted pairs of a monomial and its non-zero coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Size) -> Size:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _sum(self, other, -1)

    def __rsub__(self, other: int) -> Size:
        return other + (-self)

    def __neg__(self) -> Size:
        return self * -1

    def __mul__(self, other: Size) -> Size:
        return _product(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return self - floordiv(self, other) * other

    def __rmod__(self, other: int) -> Size:
        return other - floordiv(other, self) * self

    def __truediv__(self, other: object) -> Size:
        raise TypeRuleError(
            f"{self} / {other}: a size is an integer; // rounds down, and ops take sizes as values (x / N)"
        )

    def __rtruediv__(self, other: object) -> Size:
        raise TypeRuleError(
            f"{other} / {self}: a size is an integer; // rounds down, and ops take sizes as values (x / N)"
        )

    def __lt__(self, other: object) -> bool:
        raise TypeRuleError(
            f"whether {self} is smaller or larger than {other} is not known while tracing, where it is symbolic:"
            " assume('N >= 4') states a bound, ops.where chooses by values, and a type with a number in its place"
            " (f32[8]) fixes it"
        )

    __le__ = __gt__ = __ge__ = __lt__

    def __index__(self) -> int:
        raise TypeRuleError(
            f"the size {self} is symbolic: Python needs a number here; use the dim as a value or bind it"
        )

    def __bool__(self) -> bool:
        raise TypeRuleError(
            f"whether {self} is zero depends on its symbols; compare sizes with == or assume(...) a bound"
        )

    @cached_property
    def _text(self) -> str:
        out = ""
        for monomial, coefficient in self.terms:
            factors = [_factor(atom) for atom, power in monomial for _ in range(power)]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+" if out else ""
            out += sign + "*".join(factors)
        return out

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    @cached_property
    def _extent(self) -> tuple[int, int]:
        """(number of subexpressions, nesting depth)."""
        parts, depth = len(self.terms), 0
        for monomial, _ in self.terms:
            for atom, power in monomial:
                inside = (
                    ()
                    if isinstance(atom, str)
                    else (atom.numerator, atom.denominator)
                    if isinstance(atom, FloorDiv)
                    else (atom.left, atom.right)
                )
                extents = [s._extent if isinstance(s, Dim) else (1, 0) for s in inside]
                parts += power * (1 + sum(p for p, _ in extents))
                depth = max(depth, 1 + max((d for _, d in extents), default=0))
        return parts, depth

    @cached_property
    def _symbols(self) -> frozenset[str]:
        names: set[str] = set()
        for monomial, _ in self.terms:
            for atom, _ in monomial:
                if isinstance(atom, str):
                    names.add(atom)
                else:
                    of = (atom.numerator, atom.denominator) if isinstance(atom, FloorDiv) else (atom.left, atom.right)
                    names.update(*map(symbols, of))
        return frozenset(names)

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

    @cached_property
    def _has_positive_terms(self) -> bool:
        return all(c >= 0 and all(_is_nonnegative(a) for a, _ in m) for m, c in self.terms)


SizeLike = int | Dim
""":data:`Size` where an annotation is evaluated, as those of type rules are."""


def _factor(part: Size | Atom) -> str:
    text = str(part)
    return text if isinstance(part, Max) or re.fullmatch(r"\w+", text) else f"({text})"


def _terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    return size.terms if isinstance(size, Dim) else (((), size),)


def _merge(left: Size, right: Size, sign: int) -> dict[Monomial, int]:
    merged = dict(_terms(left))
    for monomial, coefficient in _terms(right):
        merged[monomial] = merged.get(monomial, 0) + sign * coefficient
    return merged


# The passes ask for the same few sums and products of a graph's sizes again and again: a third of a compilation's time.
@functools.lru_cache(maxsize=1 << 14, typed=True)
def _sum(left: Dim, right: Size, sign: int) -> Size:
    return _build(_merge(left, right, sign))


@functools.lru_cache(maxsize=1 << 14, typed=True)
def _product(left: Dim, right: Size) -> Size:
    product: dict[Monomial, int] = {}
    for one, a in left.terms:
        for other, b in _terms(right):
            powers = dict(one)
            for atom, power in other:
                powers[atom] = powers.get(atom, 0) + power
            key = tuple(sorted(powers.items(), key=lambda item: str(item[0])))
            product[key] = product.get(key, 0) + a * b
    return _build(product)


def _build(terms: Mapping[Monomial, int]) -> Size:
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    # constants last, larger monomials first: N*D+N-1
    size = Dim(tuple(sorted(kept, key=lambda item: (-sum(p for _, p in item[0]), str(item[0])))))
    parts, depth = size._extent
    if parts > _MOST_PARTS or depth > DEEPEST or any(abs(c) > LARGEST**2 for _, c in kept):
        raise TypeRuleError(
            f"a size of {parts} parts, nested {depth} deep: {_MOST_PARTS} parts, {DEEPEST} levels and factors of 2^126"
            " are the most"
        )
    return size


def symbol(name: str) -> Dim:
    """The symbolic size ``name``."""
    if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
        raise TypeRuleError(f"{name[:80]!r} is not a name for a dim (a letter, then letters, digits, _; 64 at most)")
    return Dim(((((name, 1),), 1),))


def floordiv(a: Size, b: Size) -> Size:
    """a // b, rounded down, with multiples of b moved out of the quotient: (4*N+3)//4 == N, (N-1)//2 == (N+1)//2-1."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise TypeRuleError(f"a size is divided by zero: {a}//{b}")
        return a // b
    if b == 1:
        return a
    (divisor, scale), *more = _terms(b)
    whole: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, coefficient in _terms(a):
        quotient = _divide(monomial, divisor) if not more and scale else None
        if quotient is not None and (not monomial or coefficient % scale == 0):
            whole[quotient], coefficient = divmod(coefficient, scale)
        rest[monomial] = coefficient
    remainder = _build(rest)
    if remainder == b - 1 or remainder == 0:  # 0 <= b-1 < b for every b >= 1
        tail: Size = 0
    elif remainder == -1:
        tail = -1
    elif isinstance(remainder, int) and isinstance(b, int):
        tail = remainder // b
    else:
        tail = Dim(((((FloorDiv(remainder, b), 1),), 1),))
    return _build(whole) + tail


def _divide(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    powers = dict(monomial)
    for atom, power in divisor:
        if powers.get(atom, 0) < power:
            return None
        powers[atom] -= power
    return tuple((atom, power) for atom, power in powers.items() if power)


def ceildiv(a: Size, b: Size) -> Size:
    """a / b rounded up."""
    return floordiv(a + b - 1, b)


def maximum(a: Size, b: Size) -> Size:
    """The larger of two sizes; simplified to one of them if signs and assumptions decide it."""
    if known_nonnegative(a - b):
        return a
    if known_nonnegative(b - a):
        return b
    return _larger(a, b)


def _larger(a: Size, b: Size) -> Size:
    """The larger of two sizes, whose order only their signs decide."""
    if _positive_terms(a - b):
        return a
    if _positive_terms(b - a):
        return b
    left, right = sorted((a, b), key=str)
    return _build({((Max(left, right), 1),): 1})


def minimum(a: Size, b: Size) -> Size:
    """The smaller of two sizes: a + b - max(a, b)."""
    return a + b - maximum(a, b)


def product(sizes: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def total(sizes: Iterable[Size]) -> Size:
    """The sum of some sizes."""
    result: Size = 0
    for size in sizes:
        result = result + size
    return result


# -- facts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumption:
    """``left REL right`` with REL one of ``>=``, ``==``; a line of a graph's header, checked at each call."""

    left: Size
    relation: str
    right: Size

    @property
    def comparison(self) -> str:
        if isinstance(self.left, int) and self.relation == ">=":
            return f"{self.right} <= {self.left}"
        return f"{self.left} {self.relation} {self.right}"

    def __str__(self) -> str:
        return f"assume({self.comparison})"

    def holds(self, bindings: Mapping[str, int]) -> bool:
        left, right = evaluate(self.left, bindings), evaluate(self.right, bindings)
        return left >= right if self.relation == ">=" else left == right

    def fails(self, bindings: Mapping[str, int]) -> bool:
        """Whether the sizes contradict it; with an unbound dim, which no input depends on, it cannot fail."""
        return symbols(self.left) | symbols(self.right) <= bindings.keys() and not self.holds(bindings)


@dataclass(frozen=True)
class Predicate:
    """Comparisons joined by ``and``, and these conjunctions by ``or``: ``V >= 21 and N <= 209715 or V >= 32768``."""

    conjunctions: tuple[tuple[Assumption, ...], ...]

    @property
    def comparisons(self) -> tuple[Assumption, ...]:
        return tuple(itertools.chain(*self.conjunctions))

    def __str__(self) -> str:
        return " or ".join(" and ".join(c.comparison for c in each) for each in self.conjunctions)

    def holds(self, bindings: Mapping[str, int]) -> bool:
        return any(all(c.holds(bindings) for c in each) for each in self.conjunctions)

    def within(self, names: Iterable[str], most: int) -> tuple[Predicate, Predicate]:
        """(what holds if it does for some values of the names, what holds only if it does for all of them): each lies
        between 0 and ``most``, and each comparison is ``>=`` of sides that do not fall with any of them.
        """
        low, high = dict.fromkeys(names, 0), dict.fromkeys(names, most)

        def of(left: Mapping[str, int], right: Mapping[str, int]) -> Predicate:
            sides = lambda c: replace(c, left=substitute(c.left, left), right=substitute(c.right, right))
            return Predicate(tuple(tuple(map(sides, each)) for each in self.conjunctions))

        return of(high, low), of(low, high)


def nonnegative(*conjunctions: Iterable[Size], reduced: bool = True) -> Predicate:
    """The predicate that every size of one of the conjunctions is 0 or more, without what is known and what follows
    from the rest: one empty conjunction if it always holds, none if it never does.

    :param reduced: whether what follows is looked for, which takes its time where terms are many.
    """
    kept = []
    for sizes in map(list, conjunctions):
        if not any(_exclude(one, other) for one, other in itertools.combinations([*sizes, 0], 2)):
            unknown = [_at_least_zero(size) for size in sizes if not known_nonnegative(size)]
            kept.append(tuple(_without(unknown, lambda one, other: _implies([other], [one])) if reduced else unknown))
    return Predicate(tuple(_without(kept, _implies) if reduced else dict.fromkeys(kept)))


def _exclude(one: Size, other: Size) -> bool:
    """Whether of two sizes one is known to be below 0."""
    try:
        return known_nonnegative(-1 - one - other)
    except TypeRuleError:  # their sum has more terms than a size may have
        return False


def _without(items: Iterable[R], redundant: Callable[[R, R], bool]) -> list[R]:
    """The items without those that are redundant beside another; of equals the first is kept."""
    kept: list[R] = []
    for item in items:
        if not any(redundant(item, other) for other in kept):
            kept = [*(other for other in kept if not redundant(other, item)), item]
    return kept


def _at_least_zero(size: Size) -> Assumption:
    """``size >= 0`` as the terms that are added against those that are subtracted, without their common factor."""
    constant = sum(c for monomial, c in _terms(size) if not monomial)
    terms = [(monomial, c) for monomial, c in _terms(size) if monomial]
    share = math.gcd(*(c for _, c in terms)) or 1
    added = _build({monomial: c // share for monomial, c in terms if c > 0})
    taken = _build({monomial: -c // share for monomial, c in terms if c < 0})
    least = -(constant // share)
    return Assumption(added, ">=", taken + least) if least > 0 else Assumption(added - least, ">=", taken)


def _implies(conjunction: Sequence[Assumption], other: Sequence[Assumption]) -> bool:
    """Whether each comparison of the other follows from one of a conjunction."""
    return all(any(known_nonnegative(b.left - b.right - (a.left - a.right)) for a in conjunction) for b in other)


_facts: contextvars.ContextVar[tuple[Assumption, ...]] = contextvars.ContextVar("facts", default=())


@contextlib.contextmanager
def assuming(assumptions: Iterable[Assumption]) -> Iterator[None]:
    """A context manager in which the assumptions are taken as facts."""
    token = _facts.set(tuple(dict.fromkeys((*_facts.get(), *assumptions))))
    try:
        yield
    finally:
        _facts.reset(token)


@contextlib.contextmanager
def _only(facts: tuple[Assumption, ...]) -> Iterator[None]:
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)


def assume_from_here(fact: Assumption) -> None:
    """Takes an assumption as a fact, up to the end of the innermost :func:`assuming`."""
    _facts.set(tuple(dict.fromkeys((*_facts.get(), fact))))


def known_bounds(size: Size) -> Iterator[Size]:
    """What a size is at most by facts that are assumed, which differ from it by a number."""
    for fact in _facts.get():
        distance = size - fact.right
        if fact.relation == ">=" and isinstance(distance, int):
            yield fact.left + distance


def memoized(function: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """Keeps the results of a pure function of hashable arguments, which may ask what is known of sizes: they hold under
    the assumptions under which they were computed.
    """

    @functools.lru_cache(maxsize=1 << 14)
    def under(facts: tuple[Assumption, ...], *args: Any) -> R:
        return function(*args)

    @functools.wraps(function)
    def run(*args: *Ts) -> R:
        return under(_facts.get(), *args)

    return run


STATED: contextvars.ContextVar[list[Assumption] | None] = contextvars.ContextVar("stated", default=None)
"""The assumptions of the graph that is being traced; None where none is."""


def require(fact: Assumption) -> None:
    """Makes a fact that an op needs an assumption of the graph that is being traced, where it is not known to hold."""
    facts = STATED.get()
    if facts is not None and fact not in facts and not known_nonnegative(fact.left - fact.right):
        facts.append(fact)


def _positive_terms(size: Size) -> bool:
    """Whether no term can be negative (symbols are >= 0, and so are quotients of and maxima with such sizes)."""
    return size._has_positive_terms if isinstance(size, Dim) else size >= 0


def _is_nonnegative(atom: Atom) -> bool:
    if isinstance(atom, FloorDiv):
        return _positive_terms(atom.numerator) and _positive_terms(atom.denominator)
    return isinstance(atom, str) or _positive_terms(atom.left) or _positive_terms(atom.right)


def _least(size: Size, facts: tuple[Assumption, ...] = ()) -> Size:
    """A lower bound of a size, without quotients that are multiplied by their divisors: n - d + 1 <= d * (n // d) <= n
    where d >= 1.
    """
    total: Size = 0
    for monomial, coefficient in _terms(size):
        bound: Size = _build({monomial: coefficient})
        for atom, divisor, rest in _multiplied_quotients(monomial, coefficient):
            if _positive_terms(divisor - 1) or _known(divisor - 1, facts):
                bound = (atom.numerator - divisor + 1 if coefficient > 0 else atom.numerator) * rest
                break
        total = total + bound
    return total


def _multiplied_quotients(monomial: Monomial, coefficient: int) -> Iterator[tuple[FloorDiv, Size, Size]]:
    """Each quotient in a term that is a multiple of its divisor: (it, the divisor, the other factors), where those have
    the sign of the coefficient.
    """
    for atom, _ in monomial:
        if isinstance(atom, FloorDiv):
            others = _build({_divide(monomial, ((atom, 1),)) or (): coefficient})
            rest = floordiv(others, atom.denominator)
            if rest * atom.denominator == others and _positive_terms(rest if coefficient > 0 else -rest):
                yield atom, atom.denominator, rest


def known_nonnegative(size: Size) -> bool:
    """Whether ``size >= 0`` follows from symbols being >= 0 and a few uses of the assumptions."""
    facts = _facts.get()
    if _positive_terms(size) or _known(size, facts):
        return True
    if not _solutions(facts):
        return False
    size, facts = _solved_for(size, facts)
    with _only(facts):
        return _positive_terms(size) or _known(size, facts)


# Ranges ask for the order of the same few bounds of many values again and again.
@functools.lru_cache(maxsize=1 << 14)
def _known(size: Size, facts: tuple[Assumption, ...]) -> bool:
    try:
        if any(_positive_terms(bound) for bound in _lower_bounds(size, facts)) or _known_by_cases(size, facts):
            return True
        least = _least(size, facts)  # whose maxima may be cases, where a divisor that is a maximum becomes a sum in one
        return least != size and _known(least, facts)
    except TypeRuleError:  # a bound has more parts than a size may have
        return False


def _known_by_cases(size: Size, facts: tuple[Assumption, ...]) -> bool:
    """Whether a size is known to be >= 0 whichever of its two sides a maximum is, in the size or in a fact."""
    differences = [fact.left - fact.right for fact in facts]
    maxima = dict.fromkeys(atom for part in (size, *differences) for atom in _maxima(part))
    if not 0 < len(maxima) <= _MOST_CASES:
        return False
    (atom, *_) = maxima
    for value, other in ((atom.left, atom.right), (atom.right, atom.left)):
        chosen = [_with_choice(difference, atom, value) for difference in differences]
        if any(isinstance(difference, int) and difference < 0 for difference in chosen):
            continue  # a case that does not occur
        case = tuple(Assumption(left, fact.relation, 0) for left, fact in zip(chosen, facts, strict=True))
        rest = _with_choice(size, atom, value)
        if not (_positive_terms(rest) or _known(rest, (*case, Assumption(value, ">=", other)))):
            return False
    return True


def _maxima(size: Size) -> Iterator[Max]:
    """The maxima in a size, an outer one before those in its sides."""
    for monomial, _ in _terms(size):
        for atom, _ in monomial:
            if isinstance(atom, Max):
                yield atom
            if not isinstance(atom, str):
                for part in vars(atom).values():
                    yield from _maxima(part)


def _with_choice(size: Size, atom: Max, value: Size) -> Size:
    """A size with one side of a maximum for it, within quotients and other maxima, too."""
    if atom not in _maxima(size):
        return size
    result: Size = 0
    for monomial, coefficient in _terms(size):
        term: Size = coefficient
        for factor, power in monomial:
            part: Size = _build({((factor, 1),): 1})
            if factor == atom:
                part = value
            elif isinstance(factor, FloorDiv):
                part = floordiv(*(_with_choice(part, atom, value) for part in (factor.numerator, factor.denominator)))
            elif isinstance(factor, Max):
                part = _larger(*(_with_choice(part, atom, value) for part in (factor.left, factor.right)))
            for _ in range(power):
                term = term * part
        result = result + term
    return result


def _lower_bounds(size: Size, facts: tuple[Assumption, ...]) -> Iterator[Size]:
    least, inner = _least(size, facts), size
    yield least
    while least != inner:  # quotients of quotients
        least, inner = _least(least, facts), least
        yield least
    differences = [fact.left - fact.right for fact in facts]
    yield from (size - difference for difference in differences)
    slack = size
    for difference in differences:
        if isinstance(difference, Dim):
            yield slack - difference
            if any(m in dict(_terms(slack)) for m, _ in difference.terms if m):
                slack = slack - difference
    yield slack
    yield (bound := _without_negative_terms(size, differences))
    yield _least(bound, facts)
    yield (bound := _with_added_quotients(size))
    for atom, value in _surpluses(facts):
        bound = _replaced(bound, atom, value)
        yield bound


def _with_added_quotients(size: Size) -> Size:
    """A lower bound of a size, by n // d <= (n + c) // d + ceil(-c / d) where n // d is subtracted and (n + c) // d
    added, for a quotient in each product at a time.
    """
    for _ in range(_MOST_USES):
        added = dict.fromkeys(atom for m, c in _terms(size) if c > 0 for atom, _ in m if isinstance(atom, FloorDiv))
        bound = total((_most(m, added) if c < 0 else _build({m: 1})) * c for m, c in _terms(size))
        if bound == size:
            break
        size = bound
    return size


def _most(monomial: Monomial, quotients: Collection[FloorDiv]) -> Size:
    """An upper bound of a product of atoms in which one of ``quotients`` stands for another with the same divisor."""
    for atom, divisor, rest in _quotients(monomial):
        for other in quotients:
            more = atom.numerator - other.numerator
            if atom not in quotients and other.denominator == divisor and isinstance(more, int):
                return rest * (_build({((other, 1),): 1}) + ceildiv(more, divisor))
    return _build({monomial: 1})


def _quotients(monomial: Monomial) -> Iterator[tuple[FloorDiv, int, Size]]:
    """Each quotient by a number in a product: (it, the number, the other factors), where those are not negative."""
    for atom, _ in monomial:
        if isinstance(atom, FloorDiv) and isinstance(atom.denominator, int) and atom.denominator > 0:
            rest = _build({_divide(monomial, ((atom, 1),)) or (): 1})
            if _positive_terms(rest):
                yield atom, atom.denominator, rest


def _replaced(size: Size, atom: Atom, value: Size) -> Size:
    """A size with another one for an atom, not within quotients and maxima."""
    if not any(factor[0] == atom for monomial, _ in _terms(size) for factor in monomial):
        return size
    total: Size = 0
    for monomial, coefficient in _terms(size):
        term = _build({tuple(factor for factor in monomial if factor[0] != atom): coefficient})
        for _ in range(dict(monomial).get(atom, 0)):
            term = term * value
        total = total + term
    return total


@functools.lru_cache(maxsize=1 << 8)
def _surpluses(facts: tuple[Assumption, ...]) -> tuple[tuple[Atom, Size], ...]:
    """Atoms and what they are, in the order of their replacement: the sum of what facts say them to be at least and of
    a surplus, a symbol of its own: with N >= 2 and M >= 1, N*M - N is then N*M + 2*M, and with N >= K, N - K is N.
    """
    found: list[tuple[Atom, Size]] = [(atom, _surplus(atom) + least) for atom, least in _bounds(facts).items()]
    for fact in facts:
        difference = fact.left - fact.right
        for atom, value in found:
            difference = _replaced(difference, atom, value)
        found += _solved(difference)
    return tuple(found)


def _solved(difference: Size) -> list[tuple[Atom, Size]]:
    """An atom and what it is where a difference of several terms is not negative, if that is a sum, too."""
    for monomial, coefficient in sorted(_terms(difference), key=lambda term: -term[1]):
        atom, rest = _sole_atom(monomial), difference - _build({monomial: coefficient})
        if atom is None or _replaced(rest, atom, 0) != rest:
            continue
        if coefficient == 1:
            return [(atom, _surplus(atom) - rest)]
        if coefficient == -1 or (coefficient < 0 and isinstance(rest, int)):
            return [(atom, floordiv(rest, -coefficient) - _surplus(atom))]
    return []


def _surplus(atom: Atom) -> Size:
    return _build({((f"above {atom}", 1),): 1})


@functools.lru_cache(maxsize=1 << 8)
def _bounds(facts: tuple[Assumption, ...]) -> Mapping[Atom, int]:
    """The constants that single facts say atoms to be at least, from 0 on for those that are not negative anyway."""
    bounds: dict[Atom, int] = {}
    pending = [fact.left - fact.right for fact in facts]
    while pending:
        (monomial, coefficient), *rest = _terms(pending.pop())
        atom, constant = _sole_atom(monomial), dict(rest).get((), 0)
        if atom is None or coefficient < 0 or len(rest) > (constant != 0):
            continue
        least = -(constant // coefficient)
        if least >= bounds.get(atom, 0 if _positive_terms(_build({monomial: 1})) else least):
            bounds[atom] = least
        if isinstance(atom, FloorDiv) and isinstance(atom.denominator, int) and atom.denominator > 0:
            pending.append(atom.numerator - least * atom.denominator)
    return bounds


def _sole_atom(monomial: Monomial) -> Atom | None:
    """The atom that a monomial is."""
    return monomial[0][0] if len(monomial) == 1 and monomial[0][1] == 1 else None


def _without_negative_terms(size: Size, facts: Sequence[Size]) -> Size:
    """A lower bound of a size, from which multiples of what assumptions say to be >= 0 are taken: of N - i - 1, S times
    for -S*i.
    """
    for _ in range(_MOST_USES):
        for factor, fact in (
            (factor, fact)
            for monomial, coefficient in _terms(size)
            if coefficient < 0 and monomial
            for fact in facts
            if (factor := _multiple(monomial, coefficient, fact)) is not None
        ):
            size = size - fact * factor
            break
        else:
            break
    return size


def _multiple(monomial: Monomial, coefficient: int, fact: Size) -> Size | None:
    """How often a fact has a negative term, where it is a multiple that cannot be negative."""
    for other, negative in _terms(fact):
        if other and negative < 0 and coefficient % negative == 0:
            quotient = _divide(monomial, other)
            if quotient is not None and _positive_terms(factor := _build({quotient: coefficient // negative})):
                return factor
    return None


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal, by canonical form or by an ``assume(... == ...)``."""
    if a == b:
        return True
    facts = _facts.get()
    if any(a - b in (f.left - f.right, f.right - f.left) for f in facts if f.relation == "=="):
        return True
    return bool(_solutions(facts)) and _eliminated(a - b, _solutions(facts)) == 0


@functools.lru_cache(maxsize=1 << 8)
def _solutions(facts: tuple[Assumption, ...]) -> tuple[tuple[Atom, Size], ...]:
    """Atoms and what equations say them to be, in the order of their elimination; an equation without an atom that
    occurs once, with the coefficient 1 or -1, says nothing.
    """
    found: list[tuple[Atom, Size]] = []
    for fact in facts:
        if fact.relation == "==":
            difference = _eliminated(fact.left - fact.right, tuple(found))
            for monomial, coefficient in sorted(_terms(difference), key=lambda term: -term[1]):
                atom, rest = _sole_atom(monomial), difference - _build({monomial: coefficient})
                if atom is not None and abs(coefficient) == 1 and _replaced(rest, atom, 0) == rest:
                    found.append((atom, rest * -coefficient))
                    break
    return tuple(found)


@functools.lru_cache(maxsize=1 << 12)
def _eliminated(size: Size, solutions: tuple[tuple[Atom, Size], ...]) -> Size:
    """A size with other sizes for atoms; for symbols within quotients and maxima, too."""
    # without facts, as maxima ask for the order of their sides; suppressed: too many parts, or a quotient by 0
    with _only(()), contextlib.suppress(TypeRuleError):
        for atom, value in solutions:
            size = substitute(size, {atom: value}) if isinstance(atom, str) else _replaced(size, atom, value)
    return size


def _solved_for(size: Size, facts: tuple[Assumption, ...]) -> tuple[Size, tuple[Assumption, ...]]:
    """A size and the inequalities among facts without the atoms that equations eliminate."""
    solutions = _solutions(facts)
    differences = [_eliminated(fact.left - fact.right, solutions) for fact in facts if fact.relation == ">="]
    return _eliminated(size, solutions), tuple(Assumption(difference, ">=", 0) for difference in differences)


# -- using sizes ------------------------------------------------------------------------------------------------------


def symbols(size: Size) -> frozenset[str]:
    """The names of the symbols in a size."""
    return size._symbols if isinstance(size, Dim) else _NO_SYMBOLS


_NO_SYMBOLS: frozenset[str] = frozenset()


def rises(size: Size, names: Collection[str]) -> bool:
    """Whether a size falls with none of the names, each of which is a factor of terms that are added."""
    if isinstance(size, int):
        return True
    for monomial, coefficient in size.terms:
        own = {atom for atom, _ in monomial if isinstance(atom, str)}
        if own & {*names} and coefficient < 0:
            return False
    return all(
        isinstance(atom, str) or not symbols(_build({((atom, power),): 1})) & {*names}
        for monomial, _ in size.terms
        for atom, power in monomial
    )


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """The size with symbols replaced; those that ``values`` lacks stay."""
    if isinstance(size, int) or not values:
        return size
    total: Size = 0
    for monomial, coefficient in size.terms:
        term: Size = coefficient
        for atom, power in monomial:
            if isinstance(atom, str):
                value: Size = values.get(atom, symbol(atom))
            elif isinstance(atom, FloorDiv):
                value = floordiv(substitute(atom.numerator, values), substitute(atom.denominator, values))
            else:
                value = maximum(substitute(atom.left, values), substitute(atom.right, values))
            for _ in range(power):
                term = term * value
        total = total + term
    return total


def evaluate(size: Size, bindings: Mapping[str, int]) -> int:
    """The size as a number.

    :raises InvalidProblem: a symbol is not bound, or a division by zero.
    """
    if isinstance(size, int):
        return size
    try:
        return _number(size, bindings)
    except KeyError:
        missing = symbols(size) - bindings.keys()
        raise InvalidProblem(f"the dim {min(missing)} of {size} is not bound") from None
    except TypeRuleError as error:
        raise InvalidProblem(f"{size} with {dict(bindings)}: {error}") from None


def _number(size: Size, bindings: Mapping[str, int]) -> int:
    """The size as a number, in numbers alone: a call of new sizes evaluates each of its program's.

    :raises KeyError: a symbol is not bound.
    """
    if isinstance(size, int):
        return size
    value = 0
    for monomial, term in size.terms:
        for atom, power in monomial:
            if isinstance(atom, str):
                factor = index(bindings[atom])  # NumPy's integers would wrap around
            elif isinstance(atom, FloorDiv):
                factor = floordiv(_number(atom.numerator, bindings), _number(atom.denominator, bindings))  # type: ignore[assignment]
            else:
                factor = max(_number(atom.left, bindings), _number(atom.right, bindings))
            term *= factor**power
        value += term
    return value


def solved(size: Size, unknown: str, value: int, bindings: Mapping[str, int]) -> int | None:
    """What a symbol is, rounded down to a size, where a polynomial that is linear in it has this value; None where the
    size is no such polynomial.

    :param bindings: of the size's other symbols.
    :raises InvalidProblem: with these it has a factor of more than 2^126.
    """
    if any(not isinstance(atom, str) for monomial, _ in _terms(size) for atom, _ in monomial):
        return None
    try:
        terms = dict(_terms(substitute(size, bindings)))
    except TypeRuleError as error:
        raise InvalidProblem(f"{size} with {dict(bindings)}: {error}") from None
    slope, start = terms.pop(((unknown, 1),), 0), terms.pop((), 0)
    return None if terms or not slope else max((value - start) // slope, 0)


def check_count(shape: Iterable[Size], subject: object = "a shape") -> None:
    """Rejects negative constant sizes and element counts of 2^63 and more.

    :param subject: what an error names; its text is not made without one.
    """
    sizes = tuple(shape)
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise TypeRuleError(f"{subject} has a negative size: {size}")
    if math.prod(s for s in sizes if isinstance(s, int) and s > 0) > LARGEST:
        raise TypeRuleError(f"{subject} has more than 2^63 elements: {'x'.join(map(str, sizes))}")


def nominal(sizes: Sequence[Size], dims: Mapping[str, int] | None = None) -> dict[str, int]:
    """A value for each symbol in ``sizes``: the given one, else 1024, and 1 where a size would be below 0 for what is
    subtracted.
    """
    names: frozenset[str] = frozenset().union(*(symbols(s) for s in sizes)) if sizes else frozenset()
    values = {name: (dims or {}).get(name, 1024) for name in sorted(names)}
    subtracted = {size: {a for m, c in _terms(size) if c < 0 for a, _ in m if isinstance(a, str)} for size in sizes}
    below = [taken for size, taken in subtracted.items() if taken and evaluate(size, values) < 0]
    return values | {name: 1 for name in set().union(*below) - (dims or {}).keys()}
