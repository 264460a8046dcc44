"""Full unrolling, with constants and branches folded: loop unswitching, if a branch is on an unrolled axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...ir.kernel import Kernel
from ...ir.statement import EFFECTS, REDUCTIONS, Axis, Index, Stmt
from ...ir.types import BOOL, I32, DType
from .hoist import passthrough
from .legality import domain, refuse, require_open

DIVISIONS: dict[str, Callable[[int], int]] = {
    "right_shift": lambda places: 1 << places if 0 <= places < 8 else 0,
    "bitwise_and": lambda mask: mask + 1 if mask & (mask + 1) == 0 else 0,
    "floordiv": lambda size: size,
    "mod": lambda size: size,
}
"""Divisions of an integer by the constant that they have, and what the constant says that it is divided by."""
CHAINS = {"sum_cols": "add", "prod_cols": "mul", "max_cols": "maximum", "min_cols": "minimum"}
"""A reduction and the pointwise op that adds one more element."""
EXTREMES = {"argmax_cols": "gt", "argmin_cols": "lt"}
"""A reduction and the comparison that finds a better element; of equal ones the first stays, and the first NaN."""


def unroll(kernel: Kernel, axes: Sequence[Axis]) -> Kernel:
    """cols(k: 3) { f(k) }  ->  { f(0); f(1); f(2) }: the statements once per iteration of some axes, value-numbered,
    with constants and branches folded.  A reduction becomes a chain of pointwise ops, in order.

    :param axes: of constant sizes, at least 1 each; where columns are reduced, the columns, all and in order.
    :raises IllegalMove: they are no such axes; columns are scanned, a position checked, or a buffer read that is
        written, too; an effect would happen more or less often.
    """
    _require_unrollable(kernel, axes)
    return _Unrolled(kernel, axes).kernel()


def _require_unrollable(kernel: Kernel, axes: Sequence[Axis]) -> None:
    """
    :raises IllegalMove: see :func:`unroll`.
    """
    require_open("unroll", kernel)
    along, cols = {a for a, _ in axes}, {a for a, _ in kernel.cols}
    if not {*axes} <= {*kernel.rows, *kernel.cols} or not all(isinstance(n, int) and n >= 1 for _, n in axes):
        refuse("unroll", kernel, f"{dict(axes)} are no axes of constant sizes")
    if any(s.op == "check" for s in kernel.body):
        refuse("unroll", kernel, "it reports the first bad position")
    if {*kernel.reads} & {*kernel.writes}:
        refuse("unroll", kernel, "it reads what it writes")
    if kernel.scans and along & cols:
        refuse("unroll", kernel, "it scans its columns")
    for s in kernel.body:
        if s.op in REDUCTIONS and ([*axes] != [*kernel.cols] or kernel.stmts[s.args[0]].dtype is BOOL):
            refuse("unroll", kernel, f"{s} has no chain over {sorted(along)}")
        if s.op == "accum":
            level, over = kernel.stmt_level(s), domain(kernel, s)
            once = not along & over or along <= level  # per iteration
            if not once or (over & cols - along and not level & cols - along):
                refuse("unroll", kernel, f"{s} is executed more often than {sorted(along)} say")


class _Unrolled:
    """One run of :func:`unroll`: the statements of a kernel once per iteration."""

    def __init__(self, kernel: Kernel, axes: Sequence[Axis]):
        self.before, self.axes = kernel, axes
        self.along = frozenset(a for a, _ in axes)
        self.body: list[Stmt] = []
        self.known: dict[str, str] = {}
        """A statement's text -> its value's name; as statements, constants of 0.0 and -0.0 are equal."""
        self.constants: dict[str, Any] = {}
        self.false = set[str]()
        """Values that are false everywhere."""
        self.places: dict[str, Index] = {}
        """Values that are affine in the axes that are left."""
        self.names: dict[tuple[str, tuple[int, ...]], str] = {}
        """(value, place) -> its new name; values that do not go along the axes have the place ()."""

    def kernel(self) -> Kernel:
        """The unrolled kernel."""
        k = self.before
        for s in k.body:
            if s.op in REDUCTIONS:
                self.names[s.name, ()] = self.chain(s)
            elif k.stmt_level(s) & self.along:
                for column in self.iterations():
                    self.names[s.name, column] = self.instantiate(s, column)
            else:
                name = self.instantiate(s, ())
                if s.name:
                    self.names[s.name, ()] = name
        rows, cols = (tuple(axis for axis in all_ if axis not in self.axes) for all_ in (k.rows, k.cols))
        return replace(k, rows=rows, cols=cols, body=tuple(self.body))

    def iterations(self) -> Iterator[tuple[int, ...]]:
        """All iterations of the unrolled axes, in order."""
        return itertools.product(*(range(n) for _, n in self.axes if isinstance(n, int)))

    def of(self, value: str, column: tuple[int, ...]) -> str:
        """(value of the old kernel, iteration) -> its name in the new one."""
        return self.names[value, column] if (value, column) in self.names else self.names[value, ()]

    def instantiate(self, s: Stmt, column: tuple[int, ...]) -> str:
        """(statement, iteration) -> the name of its value in the new kernel, folded where that is known."""
        here = {axis: Index(k) for (axis, _), k in zip(self.axes, column, strict=False)}
        for variable in (v for i in s.index for v, _ in i.terms if v.startswith("%")):
            value = self.of(variable, column)
            here[variable] = self.places.get(value, Index.of(value))
        index = tuple(i.compose(here) for i in s.index)
        if s.op == "in_bounds" and not index[0].terms and isinstance(index[0].const, int):
            lo, hi = s.attr("lo"), s.attr("hi")
            if isinstance(lo, int) and isinstance(hi, int):
                return self.value("const", (), s.dtype, value=lo <= index[0].const < hi)
        args, where = tuple(self.of(a, column) for a in s.args), s.where and self.of(s.where, column)
        if s.op == "index":
            return self.affine(index[0], s.dtype)
        if s.op in DIVISIONS and (divided := self.quotient(s.op, *args)) is not None:
            return self.affine(divided, s.dtype)
        if s.op == "bitwise_and" and (false := [a for a in args if a in self.false]):
            return false[0]
        if s.op == "bitwise_and" and (true := [k for k, a in enumerate(args) if self.constants.get(a) is True]):
            return args[1 - true[0]]
        if s.op == "where" and (args[0] in self.false or args[1] == args[2]):
            return args[2]
        if s.op == "where" and self.constants.get(args[0]) is True:
            return args[1]
        if s.op == "load" and where in self.false:  # a place outside, as beside the only window
            return self.add(passthrough(s))
        where = "" if self.constants.get(where) is True else where
        return self.add(replace(s, name="", args=args, index=index, where=where))

    def affine(self, index: Index, dtype: DType | None) -> str:
        """Affine index -> the name of the value that it is, a constant if it has no axes."""
        if not index.terms and isinstance(index.const, int):
            name = self.value("const", (), dtype, value=index.const)
        else:
            name = self.add(Stmt("", "index", (), dtype, index=(index,)))
        self.places[name] = index
        return name

    def quotient(self, op: str, value: str, by: str) -> Index | None:
        """Quotient or remainder of an affine value by a constant that divides all its factors, as an affine index; None
        if it is none.
        """
        place, constant = self.places.get(value), self.constants.get(by)
        if place is None or constant is None or not isinstance(place.const, int):
            return None
        size = DIVISIONS[op](constant)
        if size < 1 or not all(isinstance(c, int) and c % size == 0 for _, c in place.terms):
            return None
        if op in ("bitwise_and", "mod"):
            return Index(place.const % size)
        return Index(place.const // size, tuple((v, c // size) for v, c in place.terms))

    def add(self, s: Stmt) -> str:
        """Statement -> the name of its value; one that is there already is not repeated (value numbering)."""
        if s.op in EFFECTS:
            if s.op == "accum" or s not in self.body:
                self.body.append(s)
            return ""
        text = str(s)
        if text not in self.known:
            self.known[text] = f"%{len(self.known)}"
            self.body.append(replace(s, name=self.known[text]))
            if s.op == "const":
                self.constants[self.known[text]] = s.attr("value")
                if s.attr("value") is False:
                    self.false.add(self.known[text])
        return self.known[text]

    def value(self, op: str, args: tuple[str, ...], dtype: DType | None, **attrs: int | bool) -> str:
        """(op, operands, dtype, attributes) -> the name of a new statement's value."""
        return self.add(Stmt("", op, args, dtype, attrs=tuple(attrs.items())))

    def chain(self, s: Stmt) -> str:
        """Reduction -> a chain of pointwise ops over the iterations, in order."""
        own = self.before.stmts[s.args[0]].dtype
        assert own is not None
        values = [self.of(s.args[0], column) for column in self.iterations()]
        if s.op in EXTREMES:
            return self.chain_of_extreme(s, values, own)
        values = [v if own is s.dtype else self.value("cast", (v,), s.dtype) for v in values]
        total = values[0]
        for v in values[1:]:
            total = self.value(CHAINS[s.op], (total, v), s.dtype)
        return total

    def chain_of_extreme(self, s: Stmt, values: list[str], own: DType) -> str:
        """argmax or argmin -> a chain of compares and selects that carries the best value and its index."""
        best, place = values[0], self.value("const", (), I32, value=0)  # lanes as wide as the values' most often
        for k, v in enumerate(values[1:], 1):
            better = self.value(EXTREMES[s.op], (v, best), BOOL)
            if own.is_float:  # a NaN is better than a number
                nan, found = self.value("ne", (v, v), BOOL), self.value("eq", (best, best), BOOL)
                better = self.value("bitwise_or", (better, self.value("bitwise_and", (nan, found), BOOL)), BOOL)
            best = self.value("where", (better, v, best), own)
            place = self.value("where", (better, self.value("const", (), I32, value=k), place), I32)
        return place if s.dtype is I32 else self.add(Stmt("", "cast", (place,), s.dtype, attrs=(("dtype", s.dtype),)))
