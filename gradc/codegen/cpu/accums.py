"""Results that rows are combined into, and statements with an effect: stores, accums, checks."""

from __future__ import annotations

from ...errors import InternalError
from ...ir.dims import Size, product
from ...ir.statement import Index, Stmt, neutral
from ...ir.types import F32, F64
from ..expr import stored, to_memory, variable
from ..index import flatten, index, literal, size
from .records import Accum, combined, grouped
from .row_memory import RowMemory

BLOCK_SUM_ROWS = 256
"""Rows from which sums over them are sums of sums in f32."""


class AccumWriter(RowMemory):
    """A writer of what a row leaves behind."""

    def accum(self, s: Stmt) -> Accum:
        part, type_ = self.parts[s.buffer], self.types[s.buffer]
        strategy, ctype = self.strategy_of[s.buffer], stored(type_.dtype)
        if type_.dtype.is_float and type_.dtype not in (F32, F64):
            raise InternalError(f"an accum into {type_}: upcast makes it f32")
        wide = F64 if type_.dtype.is_float else type_.dtype
        start = neutral(s.combine, type_.dtype)
        free = self.free(s) if self.owned_by_row(s) else []
        extents = [type_.shape[axis] for axis in free]
        entries = [Index.of(f"z{free.index(axis)}") if axis in free else i for axis, i in enumerate(s.index)]
        return Accum(
            number=self.number[s.buffer],
            buffer=s.buffer,
            ctype=ctype,
            strategy=strategy,
            combine=s.combine,
            partial=self.partial_type(s),
            wide=stored(wide),
            start=literal(start, type_.dtype),
            wide_start=literal(start, wide),
            size=grouped(size(type_.count)),
            inner=grouped(size(product(type_.shape[part.leading :]))),
            extents=tuple(map(size, extents)),
            owned_size=grouped(size(product(extents))),
            block_size=grouped(size(product(extents) if self.owned_by_row(s) else type_.count)),
            owned_at=index(flatten(entries, type_.shape)),
            partial_at=index(flatten([entries[axis] for axis in free], extents)),
            wide_accumulator=self.wide_accumulator(s),
            block_sums=self.sums_by_block(s),
            streamed=self.in_segments(s) and self.large(s.buffer),
        )

    def partial_type(self, s: Stmt) -> str:
        """The C type of partial results: sums of many rows are kept wide, for a chunk of f32 additions would lose bits
        that the total keeps.
        """
        dtype = self.types[s.buffer].dtype
        privatized_sum = self.strategy_of[s.buffer].partials and s.combine == "sum"
        return "f64" if dtype.is_float and (self.wide_accumulator(s) or privatized_sum) else stored(dtype)

    def sums_by_block(self, s: Stmt) -> bool:
        """Whether a few rows are added in f32 before they are added to the task's partial result, or to the wide sums
        of what they gather.
        """
        if self.wide_accumulator(s) and self.gathered and all(map(self.owned_by_row, self.k.accums)):
            along = {v for i in s.index for v, _ in i.terms}
            return bool(self.k.cols) and self.k.cols[-1][0] in along and not any(v.startswith("%") for v in along)
        few = isinstance(self.k.row_count, int) and self.k.row_count < BLOCK_SUM_ROWS
        narrow = self.partial_type(s) == "f64" and self.types[s.buffer].dtype is F32
        return narrow and self.strategy_of[s.buffer].partials and self.side_by_side(s) and not few

    def side_by_side(self, s: Stmt) -> bool:
        """Whether the innermost columns add to neighbouring elements, the same in every row."""
        places = [v for i in s.index for v, _ in i.terms]
        return bool(self.k.cols) and self.k.cols[-1][0] in places and set(places) <= {a for a, _ in self.k.cols}

    def target_of(self, s: Stmt, ctype: str = "i64") -> tuple[str, str]:
        """Where an accum that has no segments adds: an array, and the place in it, of values that are ``ctype``."""
        number, shape, wide = self.number[s.buffer], self.types[s.buffer].shape, self.wide_accumulator(s)
        own = self.free(s) if wide else list(range(len(shape)))
        privatized = self.strategy_of[s.buffer].partials
        array = f"block{number}" if self.sums_by_block(s) else f"acc{number}" if wide or privatized else s.buffer
        return array, index(flatten([s.index[axis] for axis in own], [shape[axis] for axis in own]), ctype)

    def target_count(self, s: Stmt) -> Size:
        """Elements of that array."""
        shape = self.types[s.buffer].shape
        return product(shape[axis] for axis in self.free(s)) if self.wide_accumulator(s) else product(shape)

    def target_type(self, s: Stmt) -> str:
        """The C type of its elements."""
        array, _ = self.target_of(s)
        in_memory = array == s.buffer or self.sums_by_block(s)
        return stored(self.types[s.buffer].dtype) if in_memory else self.partial_type(s)

    def effect(self, s: Stmt, value: str = "") -> list[str]:
        """The lines of a statement with an effect, on the value that it names or on another."""
        value = value or variable(s.args[0])
        if s.op == "check":
            return self.check(s, value)
        if s.op == "store":
            assert s.dtype is not None
            return [f"{self.scribe.element(s.buffer, s.index)} = {to_memory(s.dtype, value)};"]
        if self.in_segments(s):
            return self.segment_update(s, value)
        ctype = stored(self.types[s.buffer].dtype)
        array, place = self.target_of(s)
        target = self.scribe.guard(array, place, self.target_count(s), self.target_type(s))
        return [(f"if ({variable(s.where)}) " if s.where else "") + combined(s.combine, ctype, target, value)]

    def check(self, s: Stmt, value: str) -> list[str]:
        """A value that is out of range, or below what it must not be below, is reported with its position."""
        axes, level = (*self.k.rows, *self.k.cols), self.k.stmt_level(s)
        # along the other axes the value repeats: the first is meant
        entries = [Index.of(a) if a in level else Index() for a, _ in axes]
        at = index(flatten(entries, [n for _, n in axes])) if axes else "0"
        bound = size(s.attr("bound"))
        report = "gradc_report(A->ctx, {0}, A->site, {1}, {2}, {3});"
        return [
            *(
                f"if ({value} < {low}) {report.format('GRADC_DECREASES', at, value, low)}"
                for low in map(variable, s.args[1:])
            ),
            f"if ((u64){value} >= (u64){bound}) {report.format('GRADC_INDEX_OUT_OF_RANGE', at, value, bound)}",
        ]

    def segment_target(self, s: Stmt) -> str:
        """The element of a segment's row that a column adds to."""
        part, type_ = self.parts[s.buffer], self.types[s.buffer]
        row = type_.shape[part.leading :]
        place = index(flatten(s.index[part.leading :], row))
        return self.scribe.guard(f"target{self.number[s.buffer]}", place, product(row), stored(type_.dtype))

    def segment_update(self, s: Stmt, value: str) -> list[str]:
        """A row of a segment: the first one writes, the others combine; none where its key is no row of the result.

        Where only rows with a key are visited nothing asks for one: a loop with that condition is none of vectors.
        """
        ctype, target = stored(self.types[s.buffer].dtype), self.segment_target(s)
        both, one = ("valid && ", "if (valid) ") if self.visits_all_rows else ("", "")
        if s.combine == "sum":
            return [f"{one}{target} = ({ctype})((begins ? 0 : {target}) + {value});"]
        return [
            f"if ({both}begins) {target} = {value};",
            f"else {one}{combined(s.combine, ctype, target, value)}",
        ]
