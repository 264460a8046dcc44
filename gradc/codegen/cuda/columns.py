"""Which accesses of a row program go through neighbouring columns, and how many of these a thread of a GPU takes at
once.

An access is *linear* if its element is a place that the columns do not move, plus the column: the rows of a matrix, a
gathered row of a table, a row of parameters.  Such elements are moved 16 bytes at a time where address and length
allow, which is known at the launch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...ir.dims import Size, product
from ...ir.kernel import Kernel
from ...ir.node import REGISTRY
from ...ir.op import Expr
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ..expr import stored
from ..index import flatten, index, size, strides

OFFSETS = "ix"
"""The C type of places, 32 or 64 bits wide (:mod:`gradc.codegen.cuda.index_bound`)."""
MAX_COLUMNS = 8
"""Columns that a thread takes at once."""
ACCESS_BYTES = 16
"""Of the widest access."""
PACKED_REGISTERS, UNPACKED_REGISTERS = 40, 32
"""Registers for loaded elements: packed, and one each where a row's length may not allow wide accesses."""
PASS_WEIGHT = 4
"""Of a further pass in a body's length: its first loads overlap the end of the one before."""
MOST_SINGLE = 18
"""Loads of single elements that a thread has for its columns, where each has several at places that are no data."""
LONG_BODY = 50
"""Instructions, more or less by tens, from which on a thread takes half as many columns: each is written out for every
one of them.
"""


@dataclass(frozen=True)
class Access:
    """The columns of one row in one buffer.

    :param base: the place of column 0.
    """

    buffer: str
    ctype: str
    item: int
    base: Index

    def fits(self, vec: int) -> bool:
        """Whether what is known of the place lets ``vec`` elements be aligned."""
        return all(not isinstance(c, int) or c % vec == 0 for c in (self.base.const, *(c for _, c in self.base.terms)))

    def conditions(self, vec: int) -> list[str]:
        """What a launch must find to move ``vec`` elements at once."""
        steps = [c for c in (self.base.const, *(c for _, c in self.base.terms)) if not isinstance(c, int)]
        return [
            f"gradc_aligned({self.buffer}, {min(vec * self.item, ACCESS_BYTES)})",
            *(f"{size(c)} % {vec} == 0" for c in steps),
        ]

    @property
    def at(self) -> str:
        """The first element's address."""
        return self.buffer if self.base == Index() else f"{self.buffer} + {index(self.base, OFFSETS)}"


def linear(kernel: Kernel, types: Mapping[str, Type], s: Stmt, leading: int = 0) -> Index | None:
    """The place of column 0, without the ``leading`` entries of the index, if the columns lie one after another from
    there on.
    """
    cols = {a for a, _ in kernel.cols}
    flat = flatten(s.index[leading:], types[s.buffer].shape[leading:])
    terms = dict(flat.terms)
    for (axis, count), step in zip(kernel.cols, strides([n for _, n in kernel.cols]), strict=True):
        if terms.pop(axis, 0) != step and count != 1:
            return None
    if any(v.startswith("%") and kernel.levels[v] & cols for v in terms):
        return None
    return Index(flat.const, tuple(terms.items()))


def access(kernel: Kernel, types: Mapping[str, Type], s: Stmt, masked: bool = False) -> Access | None:
    """A load's or a store's, if it is linear and has no mask; ``masked``: nor one of its columns."""
    if s.op not in ("load", "store") or not kernel.cols:
        return None
    if s.where and not (masked and s.op == "load" and not kernel.levels[s.where] & {a for a, _ in kernel.cols}):
        return None
    base = linear(kernel, types, s)
    dtype = types[s.buffer].dtype
    return None if base is None else Access(s.buffer, stored(dtype), dtype.itemsize, base)


def weight(s: Stmt) -> int:
    """Of a statement beside an addition's: a function has a polynomial, or steps of integers."""
    lower = getattr(REGISTRY.get(s.op), "lower", None)
    return 16 if isinstance(lower, Expr) and re.search(r"\b(?!m[ai][xn]imum|abs|fma)[a-z]\w+\(", lower.text) else 1


def _bodies(kernel: Kernel) -> list[list[Stmt]]:
    """The statements of each phase's columns, with those that store."""
    return [[*p.body, *(s for s in p.roots if s.op == "store")] for p in kernel.passes]


def _accesses(kernel: Kernel, types: Mapping[str, Type]) -> dict[tuple[str, Index], Access]:
    """The linear accesses of all phases; those that a value of the row masks where there are no others."""
    body = [s for body in _bodies(kernel) for s in body]
    found = [a for s in body if (a := access(kernel, types, s)) is not None]
    found = found or [a for s in body if (a := access(kernel, types, s, masked=True)) is not None]
    return {(a.buffer, a.base): a for a in found}


def _is_single(kernel: Kernel, types: Mapping[str, Type], s: Stmt) -> bool:
    """Whether each column has a load of its own, some places from its neighbour's, as in a strided window."""
    affine = not any(v.startswith("%") for i in s.index for v, _ in i.terms)
    return s.op == "load" and affine and kernel.is_column(s) and linear(kernel, types, s) is None


def _widest(accesses: Collection[Access]) -> int:
    """Columns in 16 bytes of the narrowest access."""
    return min(MAX_COLUMNS, max(ACCESS_BYTES // a.item for a in accesses)) if accesses else 1


def vector_length(kernel: Kernel, types: Mapping[str, Type]) -> int:
    """Columns of a known number that a thread takes at once where registers are counted for a whole row: a power of
    two, 16 bytes of the narrowest linear access where columns can be shared out so.
    """
    accesses = _accesses(kernel, types).values()
    vec, count = _widest(accesses), kernel.col_count
    while vec > 1 and (not any(a.fits(vec) for a in accesses) or (isinstance(count, int) and count % vec)):
        vec //= 2
    return vec


def fits_registers(kernel: Kernel, types: Mapping[str, Type], vec: int, sums: int = 0, share: int = 1) -> bool:
    """Whether registers are enough for ``vec`` columns of a thread.

    :param sums: that it has of each column, too.  :param share: how many times as many registers there are.
    """
    items = [a.item for a in _accesses(kernel, types).values()]
    if isinstance(kernel.col_count, int):
        return sum(max(vec * item // 4, 1) for item in items) + 2 * vec * sums <= share * PACKED_REGISTERS
    return vec * (sum(max(item // 4, 1) for item in items) + 2 * sums) <= share * UNPACKED_REGISTERS


def columns_at_once(
    kernel: Kernel, types: Mapping[str, Type], sums: int, reduces: bool = False, ragged: bool = False
) -> int:
    """A power of two: 16 bytes of the narrowest linear access, as far as columns of a known number can be shared out
    and registers are enough.

    :param sums: accums: what a thread has of each for each of its columns is in registers, too.
    :param reduces: whether a row is reduced: fewer columns would leave more to the reduction over threads.
    :param ragged: whether a thread may have fewer columns at the end of a row, if all rows begin where so many can be
        moved at once.
    """
    bodies = _bodies(kernel)
    accesses = _accesses(kernel, types)
    vec = _widest(accesses.values())
    total = max(sum(map(weight, body)) for body in bodies) + PASS_WEIGHT * (len(bodies) - 1)
    total = total // 4 if reduces else total
    vec = (
        1
        if total > 4 * LONG_BODY
        else min(vec, MAX_COLUMNS // 4)
        if total > 2 * LONG_BODY
        else min(vec, MAX_COLUMNS // 2)
        if total > LONG_BODY
        else vec
    )
    count: Size = product(n for _, n in kernel.cols)
    single = max(sum(_is_single(kernel, types, s) for s in body) for body in bodies)
    while vec > 1 and vec * single > MOST_SINGLE:
        vec //= 2

    def shared_out() -> bool:
        fits = [a.fits(vec) for a in accesses.values()]
        even = not isinstance(count, int) or count % vec == 0
        return any(fits) if even else ragged and all(fits)

    while vec > 1 and not (fits_registers(kernel, types, vec, sums) and shared_out()):
        vec //= 2
    return vec
