"""Results that rows are combined into: in which C types, where partial results lie, and the statement of one accum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import InternalError
from ...ir.dims import Size, product
from ...ir.statement import Index, Stmt, neutral
from ...ir.types import F32, DType
from ...process.forks import cached_property
from ..declarations import used
from ..expr import stored, to_memory, variable
from ..index import flatten, index, literal, size
from ..row_accum import RowAccum
from .axes import axis_declarations
from .columns import OFFSETS, Access
from .facts import Facts
from .fixed_sums import place_of_sum, taps
from .mapping import ThreadMapping


def sum_dtype(facts: Facts, s: Stmt) -> DType:
    """What an accum is added up in: f32 for 16-bit results, which are rounded once."""
    dtype = facts.types[s.buffer].dtype
    return F32 if dtype.is_float and dtype.bits == 16 else dtype


def adds_to_result(facts: Facts, s: Stmt) -> bool:
    """Whether atomics add to the result itself, and nothing lies in the workspace."""
    in_values = facts.rows.strategy_of[s.buffer].atomics == "values"
    return in_values and sum_dtype(facts, s) is facts.types[s.buffer].dtype


def accumulator(facts: Facts, s: Stmt) -> str:
    """The C type that many values of an accum are combined in."""
    dtype = sum_dtype(facts, s)
    return "sum_f32" if dtype is F32 and s.combine == "sum" else stored(dtype)


@dataclass(frozen=True)
class OwnedText:
    """The elements of an owned result that belong to one kept row.

    :param axes: declare their axes, from the number ``e`` of an element.
    :param size: how many there are.
    :param element: the element's place in the result.
    :param partial: its place among wider sums.
    """

    axes: tuple[str, ...]
    size: str
    element: str
    partial: str


@dataclass(frozen=True, eq=False)
class Accum(RowAccum):
    """A result that rows are combined into, under a mapping."""

    facts: Facts
    mapping: ThreadMapping

    @property
    def ordered(self) -> bool:
        """Whether they are combined in a fixed order."""
        return not self.strategy.atomics

    @property
    def fixed(self) -> bool:
        """Whether it is added up in fixed point."""
        return self.strategy.atomics == "fixed point"

    # -- types ---------------------------------------------------------------------------------------------------------

    @cached_property
    def sum_dtype(self) -> DType:
        """What it is added up in."""
        return sum_dtype(self.facts, self.stmt)

    @property
    def sum(self) -> str:
        """The C type of a combined value in memory."""
        return stored(self.sum_dtype)

    @property
    def accumulator(self) -> str:
        """The C type that many values are combined in."""
        return accumulator(self.facts, self.stmt)

    @cached_property
    def partial(self) -> str:
        """The C type of partial results in the workspace."""
        return self.accumulator if self.wide_accumulator or self.strategy.partials else self.sum

    @property
    def register(self) -> str:
        """The C type of partial results in registers."""
        return self.accumulator if not self.strategy.visits or self.wide_accumulator else self.sum

    @property
    def neutral(self) -> str:
        """What a combine of nothing gives, as C."""
        return literal(neutral(self.combine, self.sum_dtype), self.sum_dtype)

    @cached_property
    def wide_accumulator(self) -> bool:
        """Whether an owned result is added up in wider elements beside it."""
        return self.rows.wide_accumulator(self.stmt) or (self.is_owned and self.dtype is not self.sum_dtype)

    @cached_property
    def f32_staged(self) -> bool:
        """Whether a 16-bit result is added up in f32 in the workspace and rounded at the end."""
        in_memory = self.segmented and self.mapping.sums == "memory"
        return self.dtype is not self.sum_dtype and (self.strategy.atomics == "values" or in_memory)

    # -- sizes and places ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> str:
        """Elements of the result: ``outer`` times ``inner``, those of a row."""
        return size(product(self.shape))

    @property
    def outer(self) -> str:
        return size(product(self.shape[: self.leading]))

    @property
    def inner(self) -> str:
        return size(self.facts.result_row(self.stmt))

    @property
    def target(self) -> str:
        """The array that sums are finished in, and atomics add to: the result, or its f32 staging."""
        return f"staged{self.number}" if self.f32_staged else self.buffer

    def word(self, vec: int) -> int:
        """Bytes that ``vec`` neighbouring elements of the target are moved in."""
        return min(vec * (4 if self.f32_staged else self.dtype.itemsize), 16)

    @property
    def in_workspace(self) -> bool:
        """Whether chunks have partial results in the workspace."""
        in_memory = self.wide_accumulator and self.mapping.sums != "registers"
        return self.strategy.partials or self.segmented or in_memory

    @property
    def scratch_size(self) -> tuple[Size, int]:
        """(elements per chunk, bytes of one) of its partial results."""
        bytes_ = 8 if self.partial == "sum_f32" else self.sum_dtype.itemsize
        if self.segmented:
            return 2 * self.facts.result_row(self.stmt), bytes_
        free = self.rows.free(self.stmt) if self.is_owned else range(len(self.shape))
        return product(self.shape[axis] for axis in free), bytes_

    @property
    def flushed(self) -> Access | None:
        """The row of the result that sums in registers are written to, a thread's columns at once."""
        if self.mapping.sums != "registers" or not self.strategy.visits:
            return None
        place = Index(0, (("segment", self.facts.result_row(self.stmt)),))
        return Access(self.buffer, self.ctype, self.dtype.itemsize, place)

    @property
    def kept_row(self) -> str:
        """The address of a kept row in an owned result."""
        place = index(flatten(self.stmt.index[: self.leading], self.shape[: self.leading]), OFFSETS)
        return f"{self.buffer} + ({place}) * ({self.inner})"

    @property
    def segment_row(self) -> str:
        """The address of the row of the result that a segment adds up to."""
        return f"{self.buffer} + segment * ({self.inner})"

    @cached_property
    def owned(self) -> OwnedText:
        """The elements of an owned result that belong to one kept row."""
        owned = self.owned_elements
        element, partial = index(owned.element, OFFSETS), index(owned.partial, OFFSETS)
        axes = axis_declarations([(f"z{i}", n) for i, n in enumerate(owned.extents)], "e")
        return OwnedText(tuple(used(axes, f"{element} {partial}")), size(product(owned.extents)), element, partial)

    @property
    def kept_text(self) -> str:
        """What names the axes of a kept row."""
        owned = self.owned if self.is_owned else None
        return "\n".join((self.kept_row, *owned.axes, owned.element, owned.partial)) if owned is not None else ""

    @property
    def shared_before(self) -> int:
        """Of a thread's sums that are in shared memory, those of the accums before it."""
        row, ordered = self.mapping.row, self.facts.ordered
        if row is None or self.stmt not in ordered:
            return 0
        return min(ordered.index(self.stmt) * row.iterations * row.vec, row.shared_sums)

    @property
    def shared_sums(self) -> int:
        """Of a thread's sums, the first, that are in shared memory."""
        row = self.mapping.row
        if row is None or self.stmt not in self.facts.ordered:
            return 0
        return min(row.iterations * row.vec, row.shared_sums - self.shared_before)

    # -- sums in fixed point -------------------------------------------------------------------------------------------

    @property
    def additions(self) -> str:
        """Values that one element may be the sum of, at most."""
        kernel, times = self.facts.kernel, self.rows.parts[self.buffer].times
        return self.facts.scribe.size(kernel.row_count * kernel.col_count * times)

    @property
    def over(self) -> str:
        """Behind a scale, how far values may be above the largest that was looked for."""
        exponent = self.facts.exponents[self.buffer]
        return f" - {exponent}" if exponent else ""

    @property
    def interleaved(self) -> int:
        """Places on an axis of the result whose sums are innermost; 0: its order is the result's."""
        order = self.facts.layouts[self.buffer]
        return order.width if order is not None else 0

    @property
    def plane(self) -> str:
        """Elements of the axes behind that one."""
        order = self.facts.layouts[self.buffer]
        return size(order.plane) if order is not None else ""

    @property
    def settled(self) -> str:
        """Element ``at + j`` of the result, of its sum in fixed point or in f32."""
        return self.final("gradc_fixed_value(sums[j], scale)" if self.fixed else "sums[j]", self.sum)

    # -- statements ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> str:
        """The registers, or the row in memory, that values are being combined in."""
        return f"a{self.number}"

    def empty(self, target: str, ctype: str) -> str:
        """``target``, of this type, becomes the neutral element."""
        return f"gradc_clear({target});" if ctype == "sum_f32" else f"{target} = {self.neutral};"

    def join(self, target: str, value: str) -> str:
        """``target`` is combined with a value."""
        if self.combine in ("sum", "prod"):
            return f"{'gradc_add' if self.combine == 'sum' else 'gradc_times'}({target}, {value});"
        return f"{target} = {self.combine}imum_{self.sum}({target}, {value});"

    def result(self, total: str, ctype: str) -> str:
        """An expression: the value of a combined element of this type."""
        return f"gradc_value({total})" if ctype == "sum_f32" else total

    def final(self, total: str, ctype: str) -> str:
        """An expression: the same, as it is stored in the result."""
        return to_memory(self.dtype, self.result(total, ctype))

    def add(self, s: Stmt, value: str, alone: str) -> str:
        """A value is combined where its sum is on its way; ``alone``: the condition of the threads that do so."""
        number, guard = self.number, alone + (f"if ({variable(s.where)}) " if s.where else "")
        if self.mapping.sums == "registers" and self.ordered:
            return self.into_register(value, guard)
        if self.segmented:
            return self.into_segment(s, value, alone)
        axes = self.rows.free(s) if self.wide_accumulator else list(range(len(self.shape)))
        at = index(flatten([s.index[axis] for axis in axes], [self.shape[axis] for axis in axes]), OFFSETS)
        if self.wide_accumulator or self.strategy.partials:
            return guard + self.join(f"p{number}[{at}]", value)
        if self.fixed:
            at = self.place_of_sum(s)
            return f"{guard}gradc_fixed_add(fixed{number}, {at}, {value}, scale{number});"
        element = f"{self.target}[{at}]"
        if self.strategy.atomics == "values":
            return f"{guard}gradc_atomic_{'add' if s.combine == 'sum' else s.combine}(&{element}, {value});"
        return guard + self.join(element, value)

    def find_largest(self, s: Stmt, value: str, alone: str) -> str:
        """The largest |value| that is added in fixed point, so far."""
        found, most = f"gradc_magnitude({value})", f"maximum{self.number}"
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        return f"{guard}{most} = {found} > {most} ? {found} : {most};"

    def into_register(self, value: str, guard: str) -> str:
        """An accum into the sum that a thread has of its column."""
        number, row, target = self.number, self.mapping.row, f"a{self.number}[t][j]"
        guard = "if (valid) " if self.segmented else "" if self.mapping.chunk_keys else guard
        if self.register != "sum_f32":
            return guard + self.join(target, value)
        if self.adds_plain:
            return f"plain{number}[t][j] += {value};"
        add = f"{guard}gradc_add_next({target}, {value});"
        if row is None or not self.shared_sums:
            return add
        plain = f"{guard}plain{number}[t][j] += {value};"
        all_shared = self.shared_sums == row.iterations * row.vec
        return plain if all_shared else f"if (t * VEC + j < {self.shared_sums}) {{ {plain} }} else {add}"

    @property
    def adds_plain(self) -> bool:
        """Whether a few rows are added up in plain f32 before they meet the sum: rows that a block has sorted."""
        return self.mapping.chunk_keys > 0 and self.register == "sum_f32"

    def into_segment(self, s: Stmt, value: str, alone: str) -> str:
        """An accum into the row of the segment: the first value of a segment is stored, others are combined with it."""
        if self.mapping.sums == "lanes":
            return f"if (valid) value{self.number} = {value};"
        target = f"a{self.number}[{index(flatten(s.index[self.leading :], self.shape[self.leading :]), OFFSETS)}]"
        joined = self.join(target, value)
        if s.combine == "sum":
            return f"{alone}if (valid) {{ if (first_in_segment) {target} = 0; {joined} }}"
        return f"{alone}if (valid) {{ if (first_in_segment) {target} = {value}; else {joined} }}"

    def add_together(self, groups: Sequence[Sequence[Stmt]]) -> list[str]:
        """Accums of neighbouring sums: what the lanes of a warp add is exchanged before, and added up where lanes that
        are neighbours add to one sum.
        """
        number = self.number
        firsts = [taps(group, [self.sum_of(s) for s in group]) for group in groups]
        if len({*map(len, firsts)}) > 1:
            firsts = [[*group] for group in groups]
        rows = ", ".join("{{{}}}".format(", ".join(map(self.place_or_none, row))) for row in firsts)
        values = ", ".join(variable(s.args[0]) for group in groups for s in group)
        own = "&exchanged[threadIdx.x / 32 * (GRADC_EXCHANGED * EXCHANGED)]"
        return [
            "{",
            f"const ix at[][{len(firsts[0])}] = {{{rows}}};",
            f"const f32 values[] = {{{values}}};",
            f"gradc_fixed_add_together(fixed{number}, at, values, scale{number}, {own});",
            "}",
        ]

    def place_or_none(self, s: Stmt) -> str:
        """The number of the sum that an accum adds to, as C; -1 where it adds to none."""
        guard = f"live && {variable(s.where)}" if s.where else "live"
        return f"{guard} ? {self.place_of_sum(s)} : -1"

    def sum_of(self, s: Stmt) -> Index:
        """The number of the sum in fixed point that an accum adds to."""
        return place_of_sum(s.index, self.shape, self.facts.layouts[self.buffer])

    def place_of_sum(self, s: Stmt) -> str:
        """The same in C."""
        return index(self.sum_of(s), OFFSETS)


def accums_of(facts: Facts, mapping: ThreadMapping) -> Mapping[str, Accum]:
    """The accums of a kernel under a mapping, by their buffers.

    :raises InternalError: there is no text for one of them.
    """
    accums = {s.buffer: Accum(facts.rows, s, facts, mapping) for s in facts.kernel.accums}
    for a in accums.values():
        type_ = facts.types[a.buffer]
        if a.sum_dtype.is_float and a.sum_dtype.bits < 32:
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        if a.fixed and (a.combine != "sum" or a.sum_dtype is not F32):
            raise InternalError(f"{a.combine} into {type_} in fixed point: sums of f32 alone")
    return accums
