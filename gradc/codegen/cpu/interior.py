"""The columns of a row whose tests of bounds are all true, as of windows that lie inside an image: they are a loop of
their own, without tests.  A load under a mask is no vector of loads, or a slow one; most windows need no mask.  So are
the columns before the diagonal of a causal mask: vectors of places have 64 bits for each, twice those of values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.affine import less_than
from ...ir.dims import ceildiv
from ...ir.kernel import Kernel
from ...ir.ranges import KernelRanges, Range
from ...ir.statement import Index, Stmt
from ...ir.types import BOOL, Type
from ..expr import variable
from ..index import index

MOSTLY = 4
"""A test of a row that is true for all but one position in so many is taken to be true for most rows."""


@dataclass(frozen=True)
class Interior:
    """The columns that the loop without tests takes.

    :param first: the first one, :param last: and the one behind the last, as C, before they are cut to a block; without
        a first one all columns before the last, and those behind it are vectors, too.
    :param rows: the C condition on the row under which there are any, or "".
    :param switch: a test of the row that is the only mask of loads left, or "": the loop is written once for each of
        its values, since compilers make no vectors of loads that are all under one mask.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    rows: str
    switch: str = ""

    def unless(self, condition: str) -> Interior:
        """The same, where a C condition is false; no columns where it is true."""
        return replace(self, rows=" & ".join(filter(None, [self.rows, f"!{condition}"])))


def interior(
    kernel: Kernel, types: Mapping[str, Type], body: Sequence[Stmt], column: str
) -> tuple[Interior, list[Stmt]] | None:
    """(the columns at which the tests of a pass are true, its statements without them); None if there are no such
    tests, or no column where they are true.

    :param column: the axis of the innermost loop.
    """
    tests = {s.name: s for s in body if s.op == "in_bounds" and _along(kernel, s, column)}
    if not tests:
        return _before_diagonal(kernel, body, column)
    bounds = [_columns(s, column) for s in tests.values()]
    if any(
        isinstance(a.const, int) and isinstance(b.const, int) and not a.terms and a.const >= b.const for a, b in bounds
    ):
        return None
    ranges = KernelRanges(kernel, types, lambda _: Range())
    of_row = {v for s in body for v in s.uses} - {s.name for s in body}
    rows = sorted(v for v in of_row if _mostly_true(kernel.stmts[v], ranges))
    first = _texts([a for a, _ in bounds], max)
    last = _texts([b for _, b in bounds], min)
    inside = _without(body, {*tests, *rows})
    masks = {s.where for s in inside if s.op == "load" and s.where}
    switch = variable(*masks) if len(masks) == 1 and not masks & {s.name for s in inside} else ""
    return Interior(first, last, " & ".join(map(variable, rows)), switch), inside


def _before_diagonal(kernel: Kernel, body: Sequence[Stmt], column: str) -> tuple[Interior, list[Stmt]] | None:
    """The same for tests of a column against a place of the row, ``column <= row``."""
    found = {s.name: last for s in body if (last := _last_column(kernel, s, column)) is not None}
    return (Interior((), _texts([*found.values()], min), ""), _without(body, found)) if found else None


def _last_column(kernel: Kernel, s: Stmt, column: str) -> Index | None:
    """The column behind the last one at which such a test is true; None if it is another statement."""
    compared = less_than(kernel, s)
    if compared is None or compared[0].terms != ((column, 1),):
        return None
    place, bound = compared
    of_row = {v for v, _ in bound.terms} <= {axis for axis, _ in kernel.rows}
    return bound + place.const * -1 if of_row else None


def _along(kernel: Kernel, s: Stmt, column: str) -> bool:
    """Whether a test is of a place that grows with the innermost column and otherwise stands still."""
    steps = dict(s.index[0].terms)
    step = steps.pop(column, 0)
    outer = {a for a, _ in (*kernel.rows, *kernel.cols)}
    return isinstance(step, int) and step > 0 and (not steps or (step == 1 and steps.keys() <= outer))


def _columns(s: Stmt, column: str) -> tuple[Index, Index]:
    """The first column at which a test is true, and the one behind the last."""
    (place,), bounds = s.index, (s.attr("lo"), s.attr("hi"))
    steps = dict(place.terms)
    step = steps.pop(column)
    if steps:  # of step 1
        low, high = (Index(place.const, tuple(steps.items())) * -1 + bound for bound in bounds)
    else:
        low, high = (Index(ceildiv(bound - place.const, step)) for bound in bounds)
    return low, high


def _texts(columns: Sequence[Index], tightest: Callable[[Iterable[int]], int]) -> tuple[str, ...]:
    """Columns as C, of those that are numbers the one that decides."""
    numbers = [c.const for c in columns if isinstance(c.const, int) and not c.terms]
    others = [index(c) for c in columns if not isinstance(c.const, int) or c.terms]
    return tuple(dict.fromkeys((*([str(tightest(numbers))] if numbers else []), *others)))


def _mostly_true(s: Stmt, ranges: KernelRanges) -> bool:
    """Whether a value of the row is a test of bounds that is true for most rows, or several such."""
    if s.op == "bitwise_and" and s.dtype is BOOL:
        return all(_mostly_true(ranges.k.stmts[v], ranges) for v in s.args)
    if s.op != "in_bounds":
        return False
    (place,), lo, hi = s.index, s.attr("lo"), s.attr("hi")
    if not any(v.startswith("%") for v, _ in place.terms):
        return True  # the edge of an image
    known = ranges.index(place, frozenset())
    sizes = [n for n in (*known.lows[:1], *known.highs[:1], lo, hi) if isinstance(n, int)]
    if len(sizes) < 4:
        return False
    low, high, lo, hi = sizes
    return (max(lo - low, 0) + max(high + 1 - hi, 0)) * MOSTLY <= high + 1 - low


def _without(body: Sequence[Stmt], true: Collection[str]) -> list[Stmt]:
    """Statements under the condition that some values are true; all keep their names."""
    known = {*true}
    same: dict[str, str] = {}
    new: list[Stmt] = []
    for s in body:
        args = tuple(same.get(a, a) for a in s.args)
        if s.op == "bitwise_and" and s.dtype is BOOL:
            left = [a for a in args if a not in known]
            known |= set() if left else {s.name}
            if len(left) == 1:
                same[s.name] = left[0]
        elif s.op == "bitwise_or" and s.dtype is BOOL:
            known |= {s.name} if known & {*args} else set()
        elif s.op == "where" and args[0] in known:
            same[s.name] = args[1]
        where = "" if s.where in known else same.get(s.where, s.where)
        new.append(replace(s, args=args, where=where))
    return [_value(s, known, same) for s in new]


def _value(s: Stmt, known: Collection[str], same: Mapping[str, str]) -> Stmt:
    if s.name in known:
        return Stmt(s.name, "const", (), BOOL, attrs=(("value", True),))
    if s.name in same:
        return Stmt(s.name, "cast", (same[s.name],), s.dtype)
    return s
