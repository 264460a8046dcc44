"""Which columns the rows of a block need at most: behind the diagonal of a causal mask all that is added up is 0.

A kernel is gone through as if its mask were false: a column that is hidden must add 0 to every sum, be no maximum, and
be stored as 0, which adds nothing to a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...ir.affine import less_than
from ...ir.dims import Size, known_nonnegative, maximum, same
from ...ir.kernel import Call, Kernel
from ...ir.statement import REDUCTIONS, Stmt

Known = float | bool | None
"""A value in a hidden column, as far as it is known: equal over the reals, so that 0 times anything is 0."""


@dataclass(frozen=True)
class ColumnBounds:
    """How the steps of a loop go over columns.

    :param size: how many there are.
    :param offset: a row ``r`` needs the columns below ``r + offset``.
    :param axes: for each step, its axis of columns; None where it has none.
    """

    size: Size
    offset: Size
    axes: tuple[str | None, ...]

    def below(self, row: Size) -> Size:
        """How many columns the rows below ``row`` need; all, where the first row has none of its own."""
        bound = row + self.offset - 1
        return bound if known_nonnegative(self.offset - 1) else bound + self.size * maximum(0, 1 - self.offset)


def column_bounds(
    steps: Sequence[Kernel | Call], rows: Sequence[str], blocks: Mapping[str, int], columns: Size
) -> ColumnBounds | None:
    """Steps of a loop  ->  the columns that their rows need; None if no row is known to need less than all.

    :param steps: in order, before they are tiled.
    :param rows: the axis of each of which the loop has a block.
    :param blocks: the buffers of a block, and how many axes of each come before its columns.
    :param columns: how many columns they have.
    """
    kernels = [(step, row) for step, row in zip(steps, rows, strict=True) if isinstance(step, Kernel)]
    for offset in dict.fromkeys(offset for kernel, row in kernels for offset in _offsets(kernel, row)):
        axes = _bounded_axes(steps, rows, blocks, columns, offset)
        if axes is not None:
            return ColumnBounds(columns, offset, axes)
    return None


def _bounded_axes(
    steps: Sequence[Kernel | Call], rows: Sequence[str], blocks: Mapping[str, int], columns: Size, offset: Size
) -> tuple[str | None, ...] | None:
    """For each step its axis of columns, where a row ``r`` needs those below ``r + offset`` only; else None."""
    zero: set[str] = set()  # blocks whose hidden columns are 0
    axes: list[str | None] = []
    for step, row in zip(steps, rows, strict=True):
        axis = _axis(step, blocks, columns)
        if axis == "":
            return None
        if axis is not None and not (
            _HiddenColumn(step, row, axis, offset, blocks, zero).changes_nothing()
            if isinstance(step, Kernel)
            else _adds_nothing(step, axis, blocks, zero)
        ):
            return None
        axes.append(axis)
    return tuple(axes)


def _axis(step: Kernel | Call, blocks: Mapping[str, int], columns: Size) -> str | None:
    """The axis of a step that goes over the columns of blocks; None if it touches none, "" if it is not one axis."""
    found: set[str] = set()
    for access in step.accesses:
        lead = blocks.get(access.buffer)
        if lead is not None:
            found.add(access.index[lead].variable or "" if len(access.index) == lead + 1 else "")
    if not found:
        return None
    axes = dict(step.cols if isinstance(step, Kernel) else step.axes)
    name = found.pop()
    whole = not found and name in axes and same(axes[name], columns)
    return name if whole and (isinstance(step, Call) or len(step.cols) == 1) else ""


def _adds_nothing(call: Call, axis: str, blocks: Mapping[str, int], zero: set[str]) -> bool:
    """Whether hidden columns add nothing to a product: its result has them, or an operand is 0 there.

    Of a result that is no block they would be a part of each of its rows, which a product does not write.
    """
    if axis == call.result_axes[-1]:
        return call.out.buffer in blocks
    return not any(axis in dict(o.per) for o in call.operands) and any(o.buffer in zero for o in call.operands)


def _offsets(kernel: Kernel, row: str) -> Iterator[Size]:
    """For each mask ``column < row + offset`` the offset, where the first row may have a column: what a row without any
    comes to, NaN for a softmax, must not depend on how many columns its block goes over.
    """
    for s in kernel.body:
        offset = _offset(kernel, s, row)
        if offset is not None and not (isinstance(offset, int) and offset < 1):
            yield offset


def _offset(kernel: Kernel, s: Stmt, row: str) -> Size | None:
    """Of a mask ``column < row + offset`` the offset; None for another statement."""
    compared = less_than(kernel, s)
    if compared is None or len(kernel.cols) != 1:
        return None
    column, bound = compared
    if column.terms != ((kernel.cols[0][0], 1),) or bound.terms != ((row, 1),):
        return None
    return bound.const - column.const


class _HiddenColumn:
    """A kernel's statements in a column that its mask hides from a row."""

    def __init__(
        self, kernel: Kernel, row: str, axis: str, offset: Size, blocks: Mapping[str, int], zero: set[str]
    ) -> None:
        self.kernel, self.row, self.axis, self.offset = kernel, row, axis, offset
        self.blocks, self.zero = blocks, zero
        self.values: dict[str, Known] = {}

    def changes_nothing(self) -> bool:
        """Whether hidden columns change no result; the blocks that are stored as 0 there join ``zero``."""
        for s in self.kernel.body:
            if not self.statement(s):
                return False
        return True

    def statement(self, s: Stmt) -> bool:
        column = self.kernel.is_column(s)
        if s.op in REDUCTIONS:
            self.values[s.name] = None
            neutral = {"sum": 0.0, "max": -math.inf, "min": math.inf}.get(REDUCTIONS[s.op])
            return neutral is not None and self.values[s.args[0]] == neutral
        if s.op == "scan":
            return False
        if s.op == "accum":
            return not column or self.values[s.args[0]] == 0
        if s.op == "store":
            if column and self.blocks.get(s.buffer) is None:
                return False
            if column and self.values[s.args[0]] == 0:
                self.zero.add(s.buffer)
            return True
        if s.op == "load" and s.buffer in self.blocks and not column:
            return False  # an element that data choose may be hidden
        self.values[s.name] = self.value(s)
        return True

    def value(self, s: Stmt) -> Known:
        if s.op == "load":
            hidden = s.buffer in self.zero and s.index[-1].variable == self.axis and not s.where
            return 0.0 if hidden else None
        if s.op == "const":
            value: Known = s.attr("value")
            return value
        if _offset(self.kernel, s, self.row) == self.offset:
            return False
        rule = _RULES.get(s.op)
        return rule(*(self.values[a] for a in s.args)) if rule else None


def _where(mask: Known, a: Known, b: Known) -> Known:
    if mask is None:
        return a if a is not None and a == b else None
    return a if mask else b


def _mul(a: Known, b: Known) -> Known:
    if a == 0 or b == 0:
        return 0.0
    return None if a is None or b is None else a * b


def _add(a: Known, b: Known) -> Known:
    if -math.inf in (a, b):
        return None if math.inf in (a, b) else -math.inf
    return None if a is None or b is None else a + b


def _sub(a: Known, b: Known) -> Known:
    if a == -math.inf:  # what is subtracted is a maximum, or it would be NaN
        return None if b == -math.inf else a
    return None if a is None or b is None or math.isinf(b) else a - b


_RULES: dict[str, Callable[..., Known]] = {
    "where": _where,
    "mul": _mul,
    "add": _add,
    "sub": _sub,
    "neg": lambda a: None if a is None else -a,
    "exp": lambda a: 0.0 if a == -math.inf else None,
    "cast": lambda a: a,
    "bitwise_and": lambda a, b: False if a is False or b is False else None,
}
