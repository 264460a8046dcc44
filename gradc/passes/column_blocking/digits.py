"""A kernel over the digits of two positions, rewritten over the positions.

``store w[a, g, p]`` over groups g of P places is, of the same bytes seen as ``w[n, k]``, over k = g P + p: ``g`` is
``k // P``, and an index ``g (P / 2) + p // 2``, as packed codes have it, is ``k // 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ir.dims import Size, same
from ...ir.kernel import Kernel
from ...ir.quotient import Quotient
from ...ir.statement import Index, Stmt
from ...ir.types import I64
from ..loops.legality import refuse


@dataclass(frozen=True)
class Digit:
    """An axis of a kernel as a digit of a position.

    :param group: which position.  :param size: of the axis.  :param step: positions from one of its values to the next.
    """

    group: int
    size: int
    step: int


@dataclass
class Digits:
    """Rewrites a kernel's statements.

    :param kernel: whose axes in order, row-major, are the digits of the positions.
    :param groups: each position, and how many there are.
    """

    kernel: Kernel
    groups: Sequence[tuple[Index, Size]]
    _body: list[Stmt] = field(default_factory=list)
    _known: dict[Any, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def body(self, store: Callable[[Stmt], Stmt]) -> tuple[Stmt, ...]:
        """The statements over the positions.

        :param store: what becomes of the store.
        :raises IllegalMove: a position's digits are not some of the kernel's axes.
        """
        self._axes = self.axes()
        for s in self.kernel.body:
            if s.op == "store":
                args = tuple(self._names[a] for a in s.args)
                self._body.append(store(s.altered(args=args)))
            elif s.op == "index":
                index = self.index(s.index[0])
                variable = index.variable or ""
                plain = variable.startswith("%") and index == Index.of(variable)
                self._names[s.name] = variable if plain else self.add(s.altered(index=(index,)))
            else:
                args = tuple(self._names[a] for a in s.args)
                where = self._names[s.where] if s.where else ""
                self._names[s.name] = self.add(s.altered(args=args, index=tuple(map(self.index, s.index)), where=where))
        return tuple(self._body)

    def axes(self) -> dict[str, Digit]:
        """The kernel's axes as digits."""
        found: dict[str, Digit] = {}
        axes = list((*self.kernel.rows, *self.kernel.cols))
        for number in reversed(range(len(self.groups))):
            step, size = 1, self.groups[number][1]
            while not same(step, size):
                if not axes or not isinstance(axes[-1][1], int) or not isinstance(size, int) or step > size:
                    if axes and step == 1 and same(axes[-1][1], size):  # an axis of its own, of any size
                        found[axes.pop()[0]] = Digit(number, 0, 1)
                        break
                    refuse("decoded_products", self.kernel, "its axes are not those of the product")
                axis, own = axes.pop()
                found[axis] = Digit(number, int(own), step)
                step *= int(own)
        if any(not same(size, 1) for _, size in axes):
            refuse("decoded_products", self.kernel, "it has more axes than the product")
        return found | {axis: Digit(0, 1, 0) for axis, _ in axes}

    # -- indices -------------------------------------------------------------------------------------------------------

    def index(self, index: Index) -> Index:
        """An index over the kernel's axes and values, over the positions."""
        rest = Index(index.const)
        steps: list[dict[str, Size]] = [{} for _ in self.groups]
        for variable, factor in index.terms:
            digit = self._axes.get(variable)
            halved = self.halved(variable)
            if digit is not None:
                steps[digit.group][variable] = factor
            elif halved is not None:
                steps[self._axes[halved[0]].group][variable] = factor
            else:
                rest = rest + Index.of(self._names[variable]) * factor
        for group, own in enumerate(steps):
            rest = rest + self.position(group, own)
        return rest

    def position(self, group: int, steps: dict[str, Size]) -> Index:
        """The sum of digits of a position times steps."""
        steps = {v: factor for v, factor in steps.items() if v.startswith("%") or self._axes[v].size != 1}
        if not steps:
            return Index()
        digits = sorted(
            (a for a, d in self._axes.items() if d.group == group and d.size != 1), key=lambda a: -self._axes[a].step
        )
        for last in digits:
            # digits times steps that grow as theirs do, down to one of them: the position, divided
            by = self._axes[last].step
            first = [a for a in digits if self._axes[a].step >= by]
            if steps.keys() == set(first) and all(steps[a] == steps[last] * (self._axes[a].step // by) for a in first):
                return self.divided(group, by) * steps[last]
        shifted = [v for v in steps if v.startswith("%")]
        if len(shifted) == 1 and (halved := self.halved(shifted[0])) is not None:
            axis, by = halved
            outer = [a for a in digits if a != axis]
            whole = self._axes[axis].step == 1 and all(self._axes[a].step % by == 0 for a in outer)
            if whole and steps.keys() == {*outer, *shifted}:
                factor = steps[shifted[0]]
                if all(steps[a] == factor * (self._axes[a].step // by) for a in outer):
                    return self.divided(group, by) * factor
        total = Index()
        for variable, factor in steps.items():
            own = Index.of(self._names[variable]) if variable.startswith("%") else self.digit(variable)
            total = total + own * factor
        return total

    def halved(self, value: str) -> tuple[str, int] | None:
        """(axis, divisor) where a value is a digit divided by a number."""
        own = Quotient.of(self.kernel, value)
        divided = own is not None and own.by > 1 and own.plain and own.axis in self._axes
        return (own.axis, own.by) if own is not None and divided else None

    def digit(self, axis: str) -> Index:
        """A digit of a position."""
        own = self._axes[axis]
        if own.size == 1:
            return Index()
        above = self.divided(own.group, own.step)
        most = all(d.group != own.group or d.step <= own.step for d in self._axes.values())
        if own.size == 0 or most:
            return above
        value = above.variable or ""
        if not value.startswith("%"):
            value = self.add(Stmt("", "index", (), I64, index=(above,)))
        return Index.of(self.computed("bitwise_and", "mod", value, own.size, own.size - 1))

    def divided(self, group: int, by: int) -> Index:
        """A position divided by a number."""
        position = self.groups[group][0]
        if by == 1:
            return position
        value = self.add(Stmt("", "index", (), I64, index=(position,)))
        return Index.of(self.computed("right_shift", "floordiv", value, by, by.bit_length() - 1))

    def computed(self, bits: str, op: str, value: str, by: int, number: int) -> str:
        """A quotient or remainder, by an operation on bits where the divisor is a power of two."""
        power = by & (by - 1) == 0
        constant = self.add(Stmt("", "const", (), I64, attrs=(("value", number if power else by),)))
        return self.add(Stmt("", bits if power else op, (value, constant), I64))

    def add(self, s: Stmt) -> str:
        """The name of a statement's value, computed anew if it is not there."""
        key = (s.op, s.args, s.dtype, s.buffer, s.index, s.where, repr(s.attrs))
        if key not in self._known:
            self._known[key] = f"%{len(self._known)}"
            self._body.append(s.altered(name=self._known[key]))
        return self._known[key]
