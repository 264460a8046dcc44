"""Results that rows are combined into: in which C types, where partial results lie, and the statements of one accum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InternalError
from ...ir.dims import Size, product
from ...ir.statement import Stmt, neutral
from ...ir.types import F32, F64
from ...process.forks import cached_property
from ..expr import variable
from ..index import flatten, grouped, index, literal, size
from ..row_accum import RowAccum
from .facts import Facts
from .row_memory import is_large


def combined(combine: str, ctype: str, target: str, value: str) -> str:
    """``target`` combined with a value of a C type, as a statement."""
    if combine in ("sum", "prod"):
        return f"{target} {'+' if combine == 'sum' else '*'}= {value};"
    return f"{target} = {combine}imum_{ctype}({target}, {value});"


@dataclass(frozen=True, eq=False)
class Accum(RowAccum):
    """A result that rows are combined into.

    :param forwarded: whether it has no memory: each row of it is handed on.
    """

    facts: Facts
    forwarded: bool = False

    # -- types ---------------------------------------------------------------------------------------------------------

    @property
    def wide(self) -> str:
        """The C type in which partial results are combined."""
        return "f64" if self.dtype.is_float else self.ctype

    @cached_property
    def partial(self) -> str:
        """The C type of a partial result."""
        return "f64" if self.facts.sums_wide(self.stmt) else self.ctype

    @property
    def start(self) -> str:
        """The element that changes nothing, as C."""
        return literal(neutral(self.combine, self.dtype), self.dtype)

    @property
    def wide_start(self) -> str:
        """The same in the wide type."""
        return literal(neutral(self.combine, self.dtype), F64 if self.dtype.is_float else self.dtype)

    @cached_property
    def wide_accumulator(self) -> bool:
        """Whether an owner adds into a wider row beside the result."""
        return self.rows.wide_accumulator(self.stmt)

    @cached_property
    def block_sums(self) -> bool:
        """Whether a few rows are added in f32 before they are added to the partial result or wider row."""
        return self.facts.sums_by_block(self.stmt)

    # -- sizes and places ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> str:
        """Elements of the result, as a factor."""
        return grouped(size(product(self.shape)))

    @property
    def inner(self) -> str:
        """Elements of one row of it, likewise."""
        return grouped(size(product(self.shape[self.leading :])))

    @property
    def extents(self) -> tuple[str, ...]:
        """Of what one owner adds into."""
        return tuple(map(size, self.owned_elements.extents))

    @property
    def owned_size(self) -> str:
        """Their product."""
        return grouped(size(product(self.owned_elements.extents)))

    @property
    def block_size(self) -> str:
        """Elements of the sum of a few rows."""
        return self.owned_size if self.is_owned else self.size

    @property
    def owned_at(self) -> str:
        """The place in the result of element ``z0, z1, ...`` of an owner's."""
        return index(self.owned_elements.element)

    @property
    def partial_at(self) -> str:
        """The same in a partial result."""
        return index(self.owned_elements.partial)

    @property
    def streamed(self) -> bool:
        """Whether rows of the result may be written by streaming stores."""
        return self.segmented and not self.forwarded and is_large(self.rows.types[self.buffer])

    # -- statements ----------------------------------------------------------------------------------------------------

    def combined(self, target: str, value: str) -> str:
        """``target`` combined with a value in the wide type."""
        return combined(self.combine, self.wide, target, value)

    def joined(self, target: str, value: str) -> str:
        """``target`` combined with a value of the result's own type."""
        return combined(self.combine, self.ctype, target, value)

    @property
    def array(self) -> str:
        """The array that an accum adds to, if it has no segments."""
        own = self.wide_accumulator or self.strategy.partials
        return f"block{self.number}" if self.block_sums else f"acc{self.number}" if own else self.buffer

    def place(self, s: Stmt, ctype: str = "i64") -> str:
        """Where in this array, of values that are ``ctype``."""
        own = self.rows.free(s) if self.wide_accumulator else range(len(self.shape))
        return index(flatten([s.index[axis] for axis in own], [self.shape[axis] for axis in own]), ctype)

    def guarded(self, place: str) -> str:
        """An element of this array."""
        own = self.rows.free(self.stmt) if self.wide_accumulator else range(len(self.shape))
        count: Size = product(self.shape[axis] for axis in own)
        ctype = self.ctype if self.array == self.buffer or self.block_sums else self.partial
        return self.facts.scribe.guard(self.array, place, count, ctype)

    def add(self, s: Stmt, value: str) -> list[str]:
        """The lines of an accum of a value."""
        if self.segmented:
            return self._add_to_segment(s, value)
        where = f"if ({variable(s.where)}) " if s.where else ""
        return [where + self.joined(self.guarded(self.place(s)), value)]

    def segment_element(self, s: Stmt) -> str:
        """The element of a segment's row that a column adds to."""
        row = self.shape[self.leading :]
        place = index(flatten(s.index[self.leading :], row))
        return self.facts.scribe.guard(f"target{self.number}", place, product(row), self.ctype)

    def _add_to_segment(self, s: Stmt, value: str) -> list[str]:
        """A row of a segment: the first one writes, the others combine; none where its key is no row of the result.

        Where only rows with a key are visited nothing asks for one: a loop with that condition is none of vectors.
        """
        target = self.segment_element(s)
        both, one = ("valid && ", "if (valid) ") if self.rows.visits_all_rows else ("", "")
        if self.combine == "sum":
            return [f"{one}{target} = ({self.ctype})((begins ? 0 : {target}) + {value});"]
        return [f"if ({both}begins) {target} = {value};", f"else {one}{self.joined(target, value)}"]


def accums_of(facts: Facts, forwarded: bool = False) -> Mapping[str, Accum]:
    """The accums of a kernel, by their buffers.

    :param forwarded: whether their rows are handed on.
    :raises InternalError: there is no text for one of them.
    """
    accums = {s.buffer: Accum(facts.rows, s, facts, forwarded) for s in facts.kernel.accums}
    for a in accums.values():
        if a.dtype.is_float and a.dtype not in (F32, F64):
            raise InternalError(f"an accum into {facts.types[a.buffer]}: upcast makes it f32")
    return accums
