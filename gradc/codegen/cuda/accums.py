"""Results that rows are combined into: in which C types, and where partial results lie."""

from __future__ import annotations

from ...errors import InternalError
from ...ir.dims import Size, product
from ...ir.statement import Index, Stmt, neutral
from ...ir.types import F32, DType
from ..declarations import used
from ..expr import stored
from ..index import flatten, index, literal, size
from .columns import OFFSETS, Access
from .tasks import TaskWriter
from .views import AccumView, OwnedElements
from .workspace import axis_declarations


class AccumWriter(TaskWriter):
    """A kernel's accums."""

    def sums(self, s: Stmt) -> DType:
        """What is added up in: f32 for 16-bit results, which are rounded once."""
        dtype = self.types[s.buffer].dtype
        return F32 if dtype.is_float and dtype.bits == 16 else dtype

    def accumulator(self, s: Stmt) -> str:
        """The C type that many values are combined in."""
        dtype = self.sums(s)
        return "sum_f32" if dtype is F32 and s.combine == "sum" else stored(dtype)

    def partial(self, s: Stmt) -> str:
        """The C type of partial results in the workspace."""
        if self.shared:
            return stored(self.sums(s))
        wide = self.wide_accumulator(s) or self.strategy_of[s.buffer].partials
        return self.accumulator(s) if wide else stored(self.sums(s))

    def wide_accumulator(self, s: Stmt) -> bool:
        narrow = self.types[s.buffer].dtype is not self.sums(s)
        return super().wide_accumulator(s) or (self.owned_by_row(s) and narrow)

    def f32_staged(self, s: Stmt) -> bool:
        """Whether its sums are added up in f32 in memory and rounded after that."""
        return self.types[s.buffer].dtype is not self.sums(s) and (
            self.strategy_of[s.buffer].atomics == "values"
            or (self.in_segments(s) and not self.register_accumulators and not self.warp_scan)
        )

    def in_workspace(self, s: Stmt) -> bool:
        """Whether chunks have partial results of it in the workspace."""
        several = self.strategy_of[s.buffer].partials or self.in_segments(s)
        return several or (self.wide_accumulator(s) and not self.register_accumulators)

    def scratch_size(self, s: Stmt) -> tuple[Size, int]:
        """(elements per chunk, bytes of one) of its partial results."""
        shape, part = self.types[s.buffer].shape, self.parts[s.buffer]
        bytes_ = 8 if self.partial(s) == "sum_f32" else self.sums(s).itemsize
        if self.in_segments(s):
            return 2 * product(shape[part.leading :]), bytes_
        if self.owned_by_row(s):
            return product(shape[axis] for axis in self.free(s)), bytes_
        return product(shape), bytes_

    def flushed(self, s: Stmt) -> Access | None:
        """The row of the result that sums in registers are written to, a thread's columns at once."""
        type_ = self.types[s.buffer]
        if not self.register_accumulators or not self.strategy_of[s.buffer].visits:
            return None
        row = product(type_.shape[self.parts[s.buffer].leading :])
        return Access(s.buffer, stored(type_.dtype), type_.dtype.itemsize, Index(0, (("segment", row),)))

    def accum(self, s: Stmt) -> AccumView:
        """What templates are given of an accum."""
        part, type_, number = self.parts[s.buffer], self.types[s.buffer], self.number[s.buffer]
        strategy, dtype, staged = self.strategy_of[s.buffer], self.sums(s), self.f32_staged(s)
        if dtype.is_float and dtype.bits < 32:
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        if strategy.atomics == "fixed point" and (s.combine != "sum" or dtype is not F32):
            raise InternalError(f"{s.combine} into {type_} in fixed point: sums of f32 alone")
        inner, owned = size(product(type_.shape[part.leading :])), self.owned_by_row(s)
        row = index(flatten(s.index[: part.leading], type_.shape[: part.leading]), OFFSETS) if owned else ""
        wide = not strategy.visits or self.wide_accumulator(s)
        order = self.order_of_sums[s.buffer]
        return AccumView(
            number=number,
            buffer=s.buffer,
            dtype=type_.dtype,
            ctype=stored(type_.dtype),
            combine=s.combine,
            strategy=strategy,
            ordered=not strategy.atomics,
            neutral=literal(neutral(s.combine, dtype), dtype),
            sum=stored(dtype),
            accumulator=self.accumulator(s),
            partial=self.partial(s),
            register=self.accumulator(s) if wide else stored(dtype),
            size=size(type_.count),
            outer=size(product(type_.shape[: part.leading])),
            inner=inner,
            in_workspace=self.in_workspace(s),
            wide_accumulator=self.wide_accumulator(s),
            f32_staged=staged,
            additions=self.scribe.size(self.k.row_count * self.k.col_count * part.times),
            target=f"staged{number}" if staged else s.buffer,
            target_bytes=4 if staged else type_.dtype.itemsize,
            over=f" - {self.exponents[s.buffer]}" if self.exponents[s.buffer] else "",
            interleaved=order.width if order is not None else 0,
            plane=size(order.plane) if order is not None else "",
            kept_row=f"{s.buffer} + ({row}) * ({inner})" if owned else "",
            owned=self.owned(s) if owned else None,
            **self.shared_sums(s),
        )

    def shared_sums(self, s: Stmt) -> dict[str, int]:
        """How many of a thread's sums are in shared memory: of this accum, and of those before it."""
        if self.row_task is None or s not in self.ordered:
            return {}
        each = self.row_task.iterations * self.row_task.vec
        before = min(self.ordered.index(s) * each, self.row_task.shared_sums)
        return {"shared_sums": min(each, self.row_task.shared_sums - before), "shared_before": before}

    def owned(self, s: Stmt) -> OwnedElements:
        """The elements of an owned result that belong to one kept row."""
        type_, free = self.types[s.buffer], self.free(s)
        extents = [type_.shape[axis] for axis in free]
        entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
        element = index(flatten(entries, type_.shape), OFFSETS)
        partial = index(flatten([entries[axis] for axis in free], extents), OFFSETS)
        axes = axis_declarations([(f"z{i}", n) for i, n in enumerate(extents)], "e")
        return OwnedElements(tuple(used(axes, f"{element} {partial}")), size(product(extents)), element, partial)
