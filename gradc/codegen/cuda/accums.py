"""Results that rows are combined into: in which C types, where partial results lie, and the statement of one accum."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InternalError
from ...ir.dims import Size, product
from ...ir.statement import Index, Stmt, neutral
from ...ir.types import F32, DType
from ..declarations import used
from ..expr import stored, variable
from ..index import flatten, index, literal, size
from .columns import OFFSETS, Access
from .facts import Facts
from .fixed_sums import place_of_sum
from .mapping import ThreadMapping
from .views import AccumView, OwnedElements
from .workspace import axis_declarations


def sum_dtype(facts: Facts, s: Stmt) -> DType:
    """What an accum is added up in: f32 for 16-bit results, which are rounded once."""
    dtype = facts.types[s.buffer].dtype
    return F32 if dtype.is_float and dtype.bits == 16 else dtype


def accumulator(facts: Facts, s: Stmt) -> str:
    """The C type that many values of an accum are combined in."""
    dtype = sum_dtype(facts, s)
    return "sum_f32" if dtype is F32 and s.combine == "sum" else stored(dtype)


def accumulator_bytes(facts: Facts, s: Stmt) -> int:
    """Of an element of that type."""
    return 8 if accumulator(facts, s) == "sum_f32" else sum_dtype(facts, s).itemsize


class Accums:
    """The accums of a kernel under a mapping.

    :ivar views: what templates are given of each, by its buffer.
    """

    def __init__(self, facts: Facts, mapping: ThreadMapping):
        self.facts, self.mapping, self.types = facts, mapping, facts.types
        self.strategy_of, self.number, self.parts = facts.rows.strategy_of, facts.rows.number, facts.rows.parts
        self.in_registers = mapping.sums == "registers"
        self.views = {s.buffer: self.view(s) for s in facts.kernel.accums}

    # -- types and places ----------------------------------------------------------------------------------------------

    def partial(self, s: Stmt) -> str:
        """The C type of partial results in the workspace."""
        wide = self.wide_accumulator(s) or self.strategy_of[s.buffer].partials
        wide = wide and not self.mapping.rounds_partials
        return accumulator(self.facts, s) if wide else stored(sum_dtype(self.facts, s))

    def wide_accumulator(self, s: Stmt) -> bool:
        """Whether an owned result is added up in wider elements beside it."""
        rows, narrow = self.facts.rows, self.types[s.buffer].dtype is not sum_dtype(self.facts, s)
        return rows.wide_accumulator(s) or (rows.owned_by_row(s) and narrow)

    def f32_staged(self, s: Stmt) -> bool:
        """Whether its sums are added up in f32 in memory and rounded after that."""
        in_memory = self.facts.rows.in_segments(s) and self.mapping.sums == "memory"
        narrow = self.types[s.buffer].dtype is not sum_dtype(self.facts, s)
        return narrow and (self.strategy_of[s.buffer].atomics == "values" or in_memory)

    def in_workspace(self, s: Stmt) -> bool:
        """Whether chunks have partial results of it in the workspace."""
        several = self.strategy_of[s.buffer].partials or self.facts.rows.in_segments(s)
        return several or (self.wide_accumulator(s) and not self.in_registers)

    def scratch_size(self, s: Stmt) -> tuple[Size, int]:
        """(elements per chunk, bytes of one) of its partial results."""
        shape = self.types[s.buffer].shape
        bytes_ = 8 if self.partial(s) == "sum_f32" else sum_dtype(self.facts, s).itemsize
        if self.facts.rows.in_segments(s):
            return 2 * self.facts.result_row(s), bytes_
        if self.facts.rows.owned_by_row(s):
            return product(shape[axis] for axis in self.facts.rows.free(s)), bytes_
        return product(shape), bytes_

    def flushed(self, s: Stmt) -> Access | None:
        """The row of the result that sums in registers are written to, a thread's columns at once."""
        type_ = self.types[s.buffer]
        if not self.in_registers or not self.strategy_of[s.buffer].visits:
            return None
        place = Index(0, (("segment", self.facts.result_row(s)),))
        return Access(s.buffer, stored(type_.dtype), type_.dtype.itemsize, place)

    # -- what templates are given --------------------------------------------------------------------------------------

    def view(self, s: Stmt) -> AccumView:
        """What templates are given of an accum."""
        part, type_, facts = self.parts[s.buffer], self.types[s.buffer], self.facts
        strategy, dtype, staged = self.strategy_of[s.buffer], sum_dtype(self.facts, s), self.f32_staged(s)
        if dtype.is_float and dtype.bits < 32:
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        if strategy.atomics == "fixed point" and (s.combine != "sum" or dtype is not F32):
            raise InternalError(f"{s.combine} into {type_} in fixed point: sums of f32 alone")
        inner, owned = size(facts.result_row(s)), facts.rows.owned_by_row(s)
        row = index(flatten(s.index[: part.leading], type_.shape[: part.leading]), OFFSETS) if owned else ""
        wide = not strategy.visits or self.wide_accumulator(s)
        order, exponent = facts.layouts[s.buffer], facts.exponents[s.buffer]
        return AccumView(
            number=self.number[s.buffer],
            buffer=s.buffer,
            dtype=type_.dtype,
            ctype=stored(type_.dtype),
            combine=s.combine,
            strategy=strategy,
            ordered=not strategy.atomics,
            neutral=literal(neutral(s.combine, dtype), dtype),
            sum=stored(dtype),
            accumulator=accumulator(facts, s),
            partial=self.partial(s),
            register=accumulator(facts, s) if wide else stored(dtype),
            size=size(type_.count),
            outer=size(product(type_.shape[: part.leading])),
            inner=inner,
            in_workspace=self.in_workspace(s),
            wide_accumulator=self.wide_accumulator(s),
            f32_staged=staged,
            additions=facts.scribe.size(facts.kernel.row_count * facts.kernel.col_count * part.times),
            target=f"staged{self.number[s.buffer]}" if staged else s.buffer,
            target_bytes=4 if staged else type_.dtype.itemsize,
            over=f" - {exponent}" if exponent else "",
            interleaved=order.width if order is not None else 0,
            plane=size(order.plane) if order is not None else "",
            kept_row=f"{s.buffer} + ({row}) * ({inner})" if owned else "",
            owned=self.owned(s) if owned else None,
            **self.shared_sums(s),
        )

    def shared_sums(self, s: Stmt) -> dict[str, int]:
        """How many of a thread's sums are in shared memory: of this accum, and of those before it."""
        row, ordered = self.mapping.row, self.facts.ordered
        if row is None or s not in ordered:
            return {}
        each = row.iterations * row.vec
        before = min(ordered.index(s) * each, row.shared_sums)
        return {"shared_sums": min(each, row.shared_sums - before), "shared_before": before}

    def owned(self, s: Stmt) -> OwnedElements:
        """The elements of an owned result that belong to one kept row."""
        type_, free = self.types[s.buffer], self.facts.rows.free(s)
        extents = [type_.shape[axis] for axis in free]
        entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
        element = index(flatten(entries, type_.shape), OFFSETS)
        partial = index(flatten([entries[axis] for axis in free], extents), OFFSETS)
        axes = axis_declarations([(f"z{i}", n) for i, n in enumerate(extents)], "e")
        return OwnedElements(tuple(used(axes, f"{element} {partial}")), size(product(extents)), element, partial)

    # -- the statement of an accum -------------------------------------------------------------------------------------

    def add(self, s: Stmt, value: str, alone: str) -> str:
        """A value is combined where its sum is on its way; ``alone``: the condition of the threads that do so."""
        strategy, number = self.strategy_of[s.buffer], self.number[s.buffer]
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        if self.in_registers and s in self.facts.ordered:
            return self.into_register(s, value, guard)
        if self.facts.rows.in_segments(s):
            return self.into_segment(s, value, alone)
        shape, wide = self.types[s.buffer].shape, self.wide_accumulator(s)
        axes = self.facts.rows.free(s) if wide else list(range(len(shape)))
        at = index(flatten([s.index[axis] for axis in axes], [shape[axis] for axis in axes]), OFFSETS)
        if wide or strategy.partials:
            return guard + self.joined(s, f"p{number}[{at}]", value)
        if strategy.atomics == "fixed point":
            at = self.place_of_sum(s)
            return f"{guard}gradc_fixed_add(fixed{number}, odd{number}, {at}, {value}, scale{number});"
        element = f"{self.sum_array(s)}[{at}]"
        if strategy.atomics == "values":
            return f"{guard}gradc_atomic_{'add' if s.combine == 'sum' else s.combine}(&{element}, {value});"
        return guard + self.joined(s, element, value)

    def find_largest(self, s: Stmt, value: str, alone: str) -> str:
        """The largest |value| that is added in fixed point, so far."""
        found, most = f"gradc_magnitude({value})", f"maximum{self.number[s.buffer]}"
        guard = alone + (f"if ({variable(s.where)}) " if s.where else "")
        return f"{guard}{most} = {found} > {most} ? {found} : {most};"

    def into_register(self, s: Stmt, value: str, guard: str) -> str:
        """An accum into the sum that a thread has of its column."""
        number, view, row = self.number[s.buffer], self.views[s.buffer], self.mapping.row
        guard = "if (valid) " if self.facts.rows.in_segments(s) else guard
        target = f"a{number}[t][j]"
        if view.register != "sum_f32":
            return guard + self.joined(s, target, value)
        add = f"{guard}gradc_add_next({target}, {value});"
        if row is None or not view.shared_sums:
            return add
        plain = f"{guard}plain{number}[t][j] += {value};"
        all_shared = view.shared_sums == row.iterations * row.vec
        return plain if all_shared else f"if (t * VEC + j < {view.shared_sums}) {{ {plain} }} else {add}"

    def into_segment(self, s: Stmt, value: str, alone: str) -> str:
        """An accum into the row of the segment: the first value of a segment is stored, others are combined with it."""
        number, leading = self.number[s.buffer], self.parts[s.buffer].leading
        if self.mapping.sums == "lanes":
            return f"if (valid) value{number} = {value};"
        at = index(flatten(s.index[leading:], self.types[s.buffer].shape[leading:]), OFFSETS)
        target = f"a{number}[{at}]"
        joined = self.joined(s, target, value)
        if s.combine == "sum":
            return f"{alone}if (valid) {{ if (first_in_segment) {target} = 0; {joined} }}"
        return f"{alone}if (valid) {{ if (first_in_segment) {target} = {value}; else {joined} }}"

    def add_together(self, group: Sequence[Stmt]) -> list[str]:
        """Accums of neighbouring sums: what the lanes of a warp add is exchanged before."""
        number = self.number[group[0].buffer]
        guards = [f"live && {variable(s.where)}" if s.where else "live" for s in group]
        places = ", ".join(f"{g} ? {self.place_of_sum(s)} : -1" for g, s in zip(guards, group, strict=True))
        values = ", ".join(variable(s.args[0]) for s in group)
        own = "&exchanged[threadIdx.x / 32 * gradc_exchanged<EXCHANGED>::SLOTS]"
        return [
            "{",
            f"const ix at[] = {{{places}}};",
            f"const f32 values[] = {{{values}}};",
            f"gradc_fixed_add_together(fixed{number}, odd{number}, at, values, scale{number}, {own});",
            "}",
        ]

    def place_of_sum(self, s: Stmt) -> str:
        """The number of the sum in fixed point that an accum adds to."""
        return index(place_of_sum(s.index, self.types[s.buffer].shape, self.facts.layouts[s.buffer]), OFFSETS)

    def sum_array(self, s: Stmt) -> str:
        """The array that atomics add to: the result, or its f32 staging."""
        return f"staged{self.number[s.buffer]}" if self.f32_staged(s) else s.buffer

    def joined(self, s: Stmt, target: str, value: str) -> str:
        """``target`` combined with a value, as a statement."""
        return self.views[s.buffer].join(target, value)
