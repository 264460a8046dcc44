"""What is known of a kernel's rows on every target: their order, and what they are combined into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ..analysis.combine import Combine, combines
from ..analysis.strategies import DEFAULT, STRATEGIES, Strategy
from ..errors import InternalError
from ..ir.dims import Size, product
from ..ir.kernel import Kernel, Phase, RowOrder
from ..ir.statement import Axis, Stmt
from ..ir.types import F32, Type
from ..ir.walk import backward_slice
from .expr import Scribe, variable
from .index import flatten, index

NARROW_SUM_ROWS = 32
"""Rows that are added in f32 where a wider row beside the result would cost as much again."""


@dataclass(frozen=True, eq=False)
class RowFacts:
    """A kernel, and what is known of its rows.

    :param types: of its buffers.
    :param parts: the accum into each buffer, :param number: and numbered.
    :param strategy_of: the strategy of each.
    :param order: what decides in which order the rows are visited.
    """

    kernel: Kernel
    types: Mapping[str, Type]
    parts: Mapping[str, Combine]
    number: Mapping[str, int]
    strategy_of: Mapping[str, Strategy]
    order: RowOrder

    # -- what rows are combined into -----------------------------------------------------------------------------------

    def wide_accumulator(self, s: Stmt) -> bool:
        """Whether an owner adds up in a wider row beside its result: where more rows may meet than add up in f32
        without harm.
        """
        if not self.owned_by_row(s) or s.combine != "sum" or self.types[s.buffer].dtype is not F32:
            return False
        members: Size = product(n for a, n in self.kernel.rows if a not in self.parts[self.kernel.order].kept)
        return not isinstance(members, int) or members > NARROW_SUM_ROWS

    def owned_by_row(self, s: Stmt) -> bool:
        """Whether each kept row owns the elements of the result that it is combined into."""
        return self.strategy_of[s.buffer].visits == "by owner"

    def in_segments(self, s: Stmt) -> bool:
        """Whether the rows of one key, which are visited one after another, are combined into a row of the result."""
        return self.strategy_of[s.buffer].visits == "by key"

    def free(self, s: Stmt) -> list[int]:
        """The axes of an owned accum's buffer that it runs along while its kept row stands still; where one row names
        two axes, the second is such: all of it is owned.
        """
        kept, named = set(self.parts[self.kernel.order].kept), [i.variable for i in s.index]
        return [
            axis
            for axis, i in enumerate(s.index)
            if (i.variable not in kept or i.variable in named[:axis]) and self.types[s.buffer].shape[axis] != 1
        ]

    # -- its columns ---------------------------------------------------------------------------------------------------

    def by_column(self, value: str) -> bool:
        """Whether a value depends on the column."""
        return bool(self.kernel.levels[value] & {a for a, _ in self.kernel.cols})

    def placed_by_column(self, s: Stmt) -> bool:
        """Whether a value that depends on the column says where an effect goes."""
        return any(v.startswith("%") and self.by_column(v) for i in s.index for v, _ in i.terms)

    def in_columns(self, s: Stmt) -> bool:
        """Whether the place of an effect depends on the column."""
        cols, places = {a for a, _ in self.kernel.cols}, {v for i in s.index for v, _ in i.terms}
        return bool(cols & places) or self.placed_by_column(s)

    def values(self, p: Phase, number: int, kept: Callable[[Stmt, int], Stmt | None]) -> list[Stmt]:
        """A pass's values, where one that an earlier pass has stored is read back instead of computed again.

        :param kept: what stands for a value that is kept beside the buffers from one pass to the next.
        """
        stored_at: dict[str, Stmt] = {}
        for earlier in self.kernel.passes[:number]:
            stored_at |= {s.args[0]: s for s in earlier.roots if s.op == "store" and not s.where}
        needed = {u for s in p.roots for u in s.uses}
        out: list[Stmt] = []
        for s in reversed(p.body):
            if s.name not in needed:
                continue
            if (known := kept(s, number)) is not None:
                out.append(known)
            elif s.name in stored_at and s.op != "load":
                store = stored_at[s.name]
                out.append(replace(s, op="load", args=(), buffer=store.buffer, index=store.index, where="", attrs=()))
            else:
                needed.update(s.uses)
                out.append(s)
        return out[::-1]

    # -- the order of its rows -----------------------------------------------------------------------------------------

    @property
    def scans_side_by_side(self) -> bool:
        """Whether it scans, and neighbours in memory are neighbouring rows, not columns."""
        return bool(self.kernel.scans) and self.rows_side_by_side

    @property
    def rows_side_by_side(self) -> bool:
        """Whether neighbours in memory are neighbouring rows, not columns, and rows are combined with no others."""
        k = self.kernel
        if not k.rows or not k.cols or k.row_order or k.accums:
            return False
        along, cols = {axis: 0 for axis in (k.rows[-1][0], k.cols[-1][0])}, {a for a, _ in k.cols}
        for s in k.body:
            steps = dict(flatten(s.index, self.types[s.buffer].shape).terms) if s.op in ("load", "store") else {}
            if not cols & steps.keys():  # what a row has once says nothing of its columns
                continue
            for axis in along:
                along[axis] += steps.get(axis) == 1
        return along[k.rows[-1][0]] > along[k.cols[-1][0]]

    @property
    def kept_axes(self) -> list[Axis]:
        """The row axes that stand in the index of an owned accum: each of their rows is a part of the result."""
        return [a for a in self.kernel.rows if self.order == "by owner" and a[0] in self.parts[self.kernel.order].kept]

    @property
    def rest_axes(self) -> list[Axis]:
        """The other row axes: their rows meet in a part of the result."""
        kept = self.kept_axes
        return [a for a in self.kernel.rows if a not in kept]

    @property
    def visits_all_rows(self) -> bool:
        """Whether rows that add to no segment have other effects: they are visited, too."""
        return not all(s.op == "accum" and self.in_segments(s) for s in self.kernel.body if not s.name)

    @property
    def order_name(self) -> str:
        """The order in which rows are visited, as templates' names have it."""
        return self.order.replace(" ", "_") or "rows"

    def slice_of(self, values: Collection[str]) -> list[Stmt]:
        """The statements that values are computed by, in order."""
        return backward_slice(self.kernel.body, (v for v in values if v))

    def key_count(self, part: Combine) -> Size:
        """Keys that a row may have: the rows of a result."""
        return product(self.types[part.buffer].shape[: part.leading])

    def key_slice(self, part: Combine) -> list[Stmt]:
        """The statements that compute a row's key and its mask."""
        leading = part.stmt.index[: part.leading]
        values = [v for i in leading for v, _ in i.terms if v.startswith("%")]
        return self.slice_of([*values, part.stmt.where])

    def key_expression(self, part: Combine, masked: str, kind: str = "i64") -> str:
        """A row's key, the row of the result that it adds to, as a C expression; ``masked`` where it adds to none."""
        at = index(flatten(part.stmt.index[: part.leading], self.types[part.buffer].shape[: part.leading]), kind)
        return f"{variable(part.stmt.where)} ? {at} : {masked}" if part.stmt.where else at


@dataclass(frozen=True, eq=False)
class KernelFacts:
    """What the facts of a kernel begin with on every target.

    :param rows: what is known of its rows.
    :param scribe: writes its statements.
    """

    rows: RowFacts
    scribe: Scribe

    @property
    def kernel(self) -> Kernel:
        return self.rows.kernel

    @property
    def types(self) -> Mapping[str, Type]:
        return self.rows.types

    @property
    def order(self) -> RowOrder:
        """What decides in which order rows are visited."""
        return self.rows.order


def row_facts(kernel: Kernel, types: Mapping[str, Type], available: Collection[str]) -> RowFacts:
    """What is known of a kernel's rows.

    :param available: names of the strategies that the target has text for.
    :raises InternalError: the kernel has another.
    """
    strategy_of = _strategies(kernel, available)
    return RowFacts(
        kernel,
        types,
        parts={c.buffer: c for c in combines(kernel, types)},
        number={s.buffer: i for i, s in enumerate(kernel.accums)},
        strategy_of=strategy_of,
        order=strategy_of[kernel.order].visits if kernel.order else "",
    )


def _strategies(kernel: Kernel, available: Collection[str]) -> dict[str, Strategy]:
    """The strategy of each accum, by its buffer."""
    names = dict.fromkeys((s.buffer for s in kernel.accums), DEFAULT.name) | dict(kernel.strategies)
    for buffer, name in names.items():
        if name not in available:
            raise InternalError(
                f"{kernel.name} combines into {buffer} by {name}; there is text for {', '.join(available)}"
            )
    return {buffer: STRATEGIES[name] for buffer, name in names.items()}
