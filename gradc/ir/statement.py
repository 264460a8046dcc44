"""Statements of kernels, and the affine indices of memory accesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .dims import Size, substitute
from .lexer import format_attributes
from .types import DType

Axis = tuple[str, Size]


@dataclass(frozen=True)
class Index:
    """``const + sum(coefficient * variable)``; a variable is an axis (``n``) or an integer value (``%t``)."""

    const: Size = 0
    terms: tuple[tuple[str, Size], ...] = ()

    @staticmethod
    def of(variable: str) -> Index:
        return Index(0, ((variable, 1),))

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return Index(self.const + other, self.terms)
        merged = dict(self.terms)
        for variable, coefficient in other.terms:
            merged[variable] = merged.get(variable, 0) + coefficient
        return Index(self.const + other.const, tuple((v, c) for v, c in merged.items() if c != 0))

    def __mul__(self, factor: Size) -> Index:
        if factor == 0:
            return Index()
        return Index(self.const * factor, tuple((v, c * factor) for v, c in self.terms))

    @property
    def variable(self) -> str | None:
        """The variable, if the index consists of nothing else; else None."""
        return self.terms[0][0] if self.const == 0 and len(self.terms) == 1 and self.terms[0][1] == 1 else None

    def renamed(self, names: Mapping[str, str]) -> Index:
        return Index(self.const, tuple((names.get(v, v), c) for v, c in self.terms))

    def substitute(self, values: Mapping[str, Size]) -> Index:
        """The index at the sizes that are given."""
        if isinstance(self.const, int) and all(isinstance(c, int) for _, c in self.terms):
            return self
        return Index(substitute(self.const, values), tuple((v, substitute(c, values)) for v, c in self.terms))

    def compose(self, values: Mapping[str, Index]) -> Index:
        """The index with affine expressions for some of its variables."""
        new = Index(self.const)
        for variable, factor in self.terms:
            new += values.get(variable, Index.of(variable)) * factor
        return new

    def __str__(self) -> str:
        parts = [v if c == 1 else f"{v}*{_factor(c)}" for v, c in self.terms]
        if self.const != 0 or not parts:
            parts.append(
                str(self.const) if isinstance(self.const, int) and self.const >= 0 else f"({self.const})"
            )  # without parentheses a name would be read as an axis
        return " + ".join(parts)


def _factor(size: Size) -> str:
    text = str(size)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def strides(shape: Sequence[Size]) -> list[Size]:
    """Row-major strides in elements."""
    out: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        out.insert(0, step)
        step = step * s
    return out


def flatten(place: Sequence[Index], shape: Sequence[Size]) -> Index:
    """One index into the elements of a row-major buffer."""
    total = Index()
    for entry, step in zip(place, strides(shape), strict=True):
        total = total + entry * step
    return total


REDUCTIONS = {
    "sum_cols": "sum",
    "prod_cols": "prod",
    "max_cols": "max",
    "min_cols": "min",
    "argmax_cols": "argmax",
    "argmin_cols": "argmin",
}
"""Statements that end a pass over the columns: they reduce a row to a scalar."""
SCANS = ("sum", "prod", "max", "min", "argmax", "argmin", "logsumexp", "affine")
"""What a ``scan`` combines the columns by.

``argmax`` and ``argmin`` give the position of the extremum so far, of equals the one visited last, and the last NaN;
``affine`` of ``a`` and ``b`` is y = a * (y of the column before) + b, which begins with 0; a = 0 gives b whatever came
before.
"""
EFFECTS = ("store", "accum", "check")
MASKED = ("load", "store", "accum")
"""Statements that may have a mask (``where``), without which they do not access memory."""
BARE = ("index", "in_bounds")
"""Statements with an index but no buffer."""
COMBINES = ("sum", "prod", "max", "min")
"""The combine operations of ``accum``; ``sum`` is the default."""


def neutral(combine: str, dtype: DType) -> int | float:
    """The neutral element of a combine in a dtype."""
    if combine in ("sum", "prod"):
        return int(combine == "prod")
    lowest, highest = (-float("inf"), float("inf")) if dtype.is_float else dtype.range
    return lowest if combine == "max" else highest


@dataclass(frozen=True)
class Stmt:
    """One statement; ``op`` is one of:

    ``load buffer[index] (where w: else 0)``, ``const``, ``size``, ``index``, ``in_bounds`` (lo <= index < hi),
    ``clamp_index value`` (into 0 <= value < size, by clamping or modulo), a pointwise op's name, ``search buffer[0] <-
    value`` (the number of elements of an ascending row that are <= value), one of :data:`REDUCTIONS`, ``scan value
    {combine=..., reverse=...}`` (for each column the combination, one of :data:`SCANS`, of all columns up to it, itself
    included; with ``reverse`` from the last column on; a pass that needs it again computes it again), ``store
    buffer[index] <- value where w``, ``accum buffer[index] <- value where w``, ``check value [, low]`` (low <= value, 0
    <= value < bound).

    A store writes no element twice: where its index depends on data, as of ``put_rows``, each row has another position,
    by the contract of the op.  What no store of the kernel reaches stays as it is.

    :param name: of the value, ``%3``; empty for statements without a value.
    :param of: the number of the value of the graph that it computes or moves, if it is one's; not compared.
    """

    name: str
    op: str
    args: tuple[str, ...] = ()
    dtype: DType | None = None
    buffer: str = ""
    index: tuple[Index, ...] = ()
    where: str = ""
    attrs: tuple[tuple[str, Any], ...] = ()
    of: int | None = field(default=None, compare=False, repr=False)

    @property
    def uses(self) -> tuple[str, ...]:
        """The values it uses in its index, arguments and mask."""
        values = [v for i in self.index for v, _ in i.terms if v.startswith("%")]
        return (*values, *self.args, *((self.where,) if self.where else ()))

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]

    def altered(self, **changes: Any) -> Stmt:
        """:func:`dataclasses.replace`, in a third of its time: passes alter every statement several times."""
        new = object.__new__(Stmt)
        new.__dict__.update(self.__dict__, **changes)
        return new

    @property
    def combine(self) -> str:
        """The combine operation of an ``accum`` or ``scan``."""
        return str(dict(self.attrs).get("combine", "sum"))

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        parts = [f"{self.name} =" if self.name else "", self.op]
        if self.buffer or (self.index and self.op not in BARE):
            parts.append(f"{self.buffer}[{index}]")
            parts.append("<-" if self.args else "")
        elif self.index:
            parts.append(index)
        parts.append(", ".join(self.args))
        parts.append(f"where {self.where}" if self.where else "")
        parts.append(format_attributes(self.attrs, exact=self.op == "const").lstrip())
        parts.append(f": {self.dtype}" if self.dtype else "")
        return " ".join(p for p in parts if p)


@dataclass(frozen=True)
class Operand:
    """An operand of a library call: a buffer with an index, ``a[m, k]``, or a scaled one, ``q[n, k] * s[n, 0]``, whose
    products are rounded to the dtype.

    :param per: for scales only, divisors of axes in the index: ``s[n, k] per (k: 32)`` is ``s[n, k // 32]``.
    """

    buffer: str
    index: tuple[Index, ...]
    scale: Operand | None = None
    per: tuple[Axis, ...] = ()

    def __str__(self) -> str:
        scale = f" * {self.scale}" if self.scale else ""
        per = f" per ({format_axes(self.per)})" if self.per else ""
        return f"{self.buffer}[{', '.join(map(str, self.index))}]{per}{scale}"


def format_axes(axes: tuple[Axis, ...]) -> str:
    """``n: N, d: 64``"""
    return ", ".join(f"{name}: {size}" for name, size in axes)
