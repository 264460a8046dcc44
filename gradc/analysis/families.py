"""Kernels that differ in numbers alone: the lookups of tables of other sizes, scatters of other slices, the updates of
other parameters.  One text serves all of them, over the numbers that differ.

A number may be *open* where only places and bounds depend on it: how many rows a kernel goes through, or elements if it
only maps these; the first size of an array, which moves no other element; the constant of an index; the bound of a
check.  So are, on request, how many owners rows are combined for, the sizes of an array's axes up to the first that
columns go along, and whole numbers that values are computed with, as the count of a mean.  Other sizes are not: the
loops of a row, the steps in them and the order of its sums follow from them, and the number of a row is divided by
them: by sizes that are not known, maps of rows of 4 to 64 elements took up to 1.8 times as long (measured 2026-11-30,
AMD EPYC, family 26 model 2), and where columns are not known, those of 49 and 196 took 1.2 and 1.35 times as long
(Intel Xeon, family 6 model 207).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ir.dims import Dim, Size, product, symbol
from ..ir.kernel import Kernel
from ..ir.statement import REDUCTIONS, Axis, Index, Stmt, flatten
from ..ir.types import F32, F64, I64, Type
from .combine import combines

Types = Mapping[str, Type]
BOUNDS = ("bound", "lo", "hi", "size")
"""The attributes that say where an index has to lie."""
ARITHMETIC = ("add", "sub", "mul", "div")
SHORTEST_ROW = 4
"""Columns of a row below which sums by owner were 1.3 to 1.6 times as slow for any number of owners, and from which on
as fast (measured 2026-11-30, AMD EPYC, family 26 model 2).
"""
MOST_COUNT = 1 << 24
"""The number up to which f32 has all whole numbers."""
ALL = "i0"
"""The axis of a map that goes through whole arrays."""


@dataclass(frozen=True)
class Family:
    """Kernels that differ in numbers alone.

    :param kernel: the first of them, with a symbol for each number that differs, :param types: and for those of its
        buffers.
    :param members: the kernels, :param sizes: and what each symbol is in each: a number, or a symbol of the member's.
    """

    kernel: Kernel
    types: Types
    members: tuple[Kernel, ...]
    sizes: tuple[Mapping[str, str | int], ...]


def families(
    kernels: Collection[Kernel],
    types: Types,
    fits: Callable[[Kernel, Types, Family], bool],
    flat: bool = False,
    inner: bool = False,
) -> list[Family]:
    """Kernels of other names -> those of one text together, the others alone; in the order of their first members.

    :param fits: ``(kernel, its types, family)``: whether the family's text does as well for a kernel as its own.
    :param flat, inner: which numbers are open, as for :func:`skeleton`.
    """
    opening = _Opening(flat, inner)
    alike: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        alike.setdefault(opening.skeleton(kernel, types), []).append(kernel)
    return [family for members in alike.values() for family in opening.fitting(members, types, fits)]


def skeleton(kernel: Kernel, types: Types, flat: bool = False, inner: bool = False) -> str:
    """What kernels have in common that differ in open numbers and in names.

    :param flat: whether maps of whole arrays go through these as if they had one axis.
    :param inner: whether sizes of inner axes are open that neither columns nor the number of a row depend on.
    """
    return _Opening(flat, inner).skeleton(kernel, types)


def _alone(kernel: Kernel, types: Types) -> Family:
    return Family(kernel, types, (kernel,), ({name: name for name in kernel.dims(types)},))


@dataclass(frozen=True)
class _Opening:
    """Which numbers of a kernel are open: see :func:`skeleton`."""

    flat: bool
    inner: bool

    def form(self, kernel: Kernel, types: Types) -> tuple[Kernel, Types]:
        """The kernel whose numbers are open."""
        return flattened(kernel, types) if self.flat else (kernel, types)

    def skeleton(self, kernel: Kernel, types: Types) -> str:
        form, own = self.form(kernel, types)
        plain, own = self.rewritten(*form.canonical(own), lambda number: symbol("open"))
        return str(replace(plain, name="k")) + ";".join(map(str, own.values()))

    def fitting(
        self, members: Sequence[Kernel], types: Types, fits: Callable[[Kernel, Types, Family], bool]
    ) -> list[Family]:
        """Members of one skeleton -> one family of those that its text fits, the others alone."""
        alone: list[Kernel] = []
        while len(members) > 1:
            family = self.family(members, types)
            kept = [kernel for kernel in members if fits(kernel, types, family)]
            if len(kept) == len(members):
                return [family, *(_alone(kernel, types) for kernel in alone)]
            alone += [kernel for kernel in members if kernel not in kept]
            members = kept
        return [_alone(kernel, types) for kernel in (*members, *alone)]

    def family(self, members: Sequence[Kernel], types: Types) -> Family:
        """Kernels of one skeleton with a symbol for all numbers that differ alike."""
        forms = [self.form(kernel, types) for kernel in members]
        columns = list(zip(*(self.numbers(*form) for form in forms), strict=True))
        differing = list(dict.fromkeys(column for column in columns if len({*column}) > 1))
        first, own = forms[0]
        taken = {*first.dims(own), *first.buffers}
        fresh = (name for k in range(len(taken) + len(differing)) if (name := f"number{k}") not in taken)
        named = dict(zip(differing, fresh, strict=False))
        places = iter(columns)

        def opened(number: int) -> Size:
            name = named.get(next(places))
            return number if name is None else symbol(name)

        kernel, open_types = self.rewritten(first, own, opened)
        symbols = [form.dims(form_types) for form, form_types in forms]
        sizes = tuple(
            {**dict(zip(symbols[0], symbols[k], strict=True)), **{name: column[k] for column, name in named.items()}}
            for k in range(len(members))
        )
        return Family(kernel, open_types, tuple(members), sizes)

    def numbers(self, kernel: Kernel, types: Types) -> list[int]:
        """The open numbers of a kernel, in their order."""
        found: list[int] = []

        def seen(number: int) -> Size:
            found.append(number)
            return number

        self.rewritten(kernel, types, seen)
        return found

    def rewritten(self, kernel: Kernel, types: Types, number: Callable[[int], Size]) -> tuple[Kernel, dict[str, Type]]:
        """A kernel and its buffers' types with other sizes for its open numbers."""
        counts = _counts(kernel) if self.inner else set[str]()
        fresh = (name for k in itertools.count() if (name := f"%{k}") not in kernel.stmts)

        def size(value: Size) -> Size:
            return value if isinstance(value, Dim) or value < 0 else number(value)

        def first(sizes: Sequence[Size], count: int) -> tuple[Size, ...]:
            return (*map(size, sizes[:count]), *sizes[count:])

        def axes(given: tuple[Axis, ...], among: Collection[str]) -> tuple[Axis, ...]:
            return tuple((a, size(n) if a in among else n) for a, n in given)

        def statements(s: Stmt) -> tuple[Stmt, ...]:
            if s.name in counts:
                value = number(int(s.attr("value")))
                if isinstance(value, Dim):
                    count = Stmt(next(fresh), "size", (), I64, attrs=(("size", value),))
                    return count, Stmt(s.name, "cast", (count.name,), s.dtype, attrs=(("dtype", s.dtype),), of=s.of)
            index = tuple(Index(size(i.const), i.terms) for i in s.index)
            attrs = tuple((key, size(value) if key in BOUNDS and _whole(value) else value) for key, value in s.attrs)
            return (s.altered(index=index, attrs=attrs),)

        before = _before_columns(kernel) if self.inner else {}
        owners = _owners(kernel, types) if self.inner else set()
        rows = axes(kernel.rows, {a for a, _ in kernel.rows[:1]} | owners)
        cols = axes(kernel.cols, {a for a, _ in kernel.cols[:1]}) if not rows and maps(kernel) else kernel.cols
        made = {b: types[b].with_shape(*first(types[b].shape, before.get(b, 1))) for b in kernel.buffers}
        body = tuple(new for s in kernel.body for new in statements(s))
        return replace(kernel, rows=rows, cols=cols, body=body), made


def _counts(kernel: Kernel) -> set[str]:
    """The constants that are whole numbers, which their type of floats computes with as they are, and only terms,
    factors and divisors.  Divisors of columns that are powers of two are not: a compiler that knows them multiplies,
    without which maps in a cache took 1.2 to 1.9 times as long (Intel Xeon, family 6 model 207).
    """
    found = {
        s.name
        for s in kernel.body
        if s.op == "const" and s.dtype in (F32, F64) and 2 <= s.attr("value") <= MOST_COUNT and s.attr("value") % 1 == 0
    }
    powers = {name for name in found if int(kernel.stmts[name].attr("value")).bit_count() == 1}
    for s, inside in zip(kernel.body, kernel.in_columns, strict=True):
        if s.op not in ARITHMETIC:
            found -= {*s.uses}
        elif s.op == "div" and inside:
            found -= powers & {s.args[1]}
    return found


def _owners(kernel: Kernel, types: Types) -> set[str]:
    """The axis that numbers the owners of a result's elements, if it is one alone and rows are no shorter than those
    whose steps are all of their work.
    """
    short = isinstance(kernel.col_count, int) and kernel.col_count < SHORTEST_ROW
    if kernel.row_order != "by owner" or short:
        return set()
    kept = next(c.kept for c in combines(kernel, types) if c.buffer == kernel.order)
    return {*kept} if len(kept) == 1 else set()


def _before_columns(kernel: Kernel) -> dict[str, int]:
    """For each buffer how many of its axes' sizes columns' steps do not depend on: those up to the first axis that
    columns go along.
    """
    axes = {a for a, _ in kernel.cols}
    columns = axes | {value for value, level in kernel.levels.items() if level & axes}
    found: dict[str, int] = {}
    for s in kernel.accesses:
        along = (axis for axis, i in enumerate(s.index) if columns & {v for v, _ in i.terms})
        count = next(along, len(s.index)) + 1
        found[s.buffer] = min(found.get(s.buffer, count), count)
    return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def maps(kernel: Kernel) -> bool:
    """Whether each column is computed by itself, and combined with no other."""
    return bool(kernel.cols) and not any(s.op in REDUCTIONS or s.op in ("accum", "scan", "check") for s in kernel.body)


def flattened(kernel: Kernel, types: Types) -> tuple[Kernel, Types]:
    """A map of whole arrays, of the same number of elements in the same order, over one axis of all elements; another
    kernel as it is.
    """
    if not maps(kernel) or any(s.op in ("index", "in_bounds", "clamp_index") for s in kernel.body):
        return kernel, types
    axes, sizes = zip(*kernel.rows, *kernel.cols, strict=True)
    count, walked = product(sizes), flatten(list(map(Index.of, axes)), sizes)
    whole: dict[str, bool] = {}
    for s in kernel.accesses:
        found = flatten(s.index, types[s.buffer].shape)
        through = found == walked and types[s.buffer].count == count
        moved = any(variable in axes for variable, _ in found.terms)
        if s.op == "search" or moved != through or whole.setdefault(s.buffer, through) != through:
            return kernel, types
    body = tuple(s.altered(index=(Index.of(ALL),)) if whole.get(s.buffer) else s for s in kernel.body)
    flat = {b: types[b].with_shape(count) if whole.get(b) else types[b] for b in kernel.buffers}
    return replace(kernel, rows=(), cols=((ALL, count),), body=body), flat
