"""What is known of a kernel before its rows and columns are given to the tasks of a CPU and the lanes of its vectors.

Shapes alone decide everything here, so that the order of a sum is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.strategies import ON_HOST
from ...ir.dims import Size, product
from ...ir.kernel import Kernel, Phase
from ...ir.ranges import KernelRanges, Range, of_type
from ...ir.statement import REDUCTIONS, Axis, Stmt
from ...ir.types import DTYPES, F32, Type
from ...process.forks import cached_property
from ..expr import Scribe, carrier, stored
from ..index import flatten
from ..rows import KernelFacts, row_facts
from .keys import RowKeys
from .packed import Packed, packed_values
from .row_memory import Gathered, gathered, kept_values, may_stream

BLOCK_SUM_ROWS = 256
"""Rows from which sums over them are sums of sums in f32."""
TAPS = 4
"""Rows of an axis that are taken innermost: the taps of one place lie near one another."""
_I32 = of_type(DTYPES["i32"])


@dataclass(frozen=True, eq=False)
class Facts(KernelFacts):
    """A kernel, and what the choice of a mapping and the text of its statements depend on.

    :param keys: of its rows, where they are visited in the order of their keys.
    """

    keys: RowKeys | None

    # -- the kernel ----------------------------------------------------------------------------------------------------

    @property
    def guarded(self) -> bool:
        """Whether each access is looked at: then nothing is read but what statements read."""
        return self.scribe.guarded

    @property
    def maps_elements(self) -> bool:
        """Whether nothing is combined, in one pass over one axis of columns."""
        k = self.kernel
        combines = any(s.op in ("accum", "scan") or s.op in REDUCTIONS for s in k.body)
        return not combines and len(k.passes) == 1 and len(k.cols) == 1

    @property
    def member_axes(self) -> list[Axis]:
        """The axes of the rows that are combined into the elements of an owner, short ones innermost."""
        return sorted(self.rows.rest_axes, key=lambda a: isinstance(a[1], int) and a[1] <= TAPS)

    @property
    def members(self) -> Size:
        """How many rows these are."""
        return product(n for _, n in self.rows.rest_axes)

    @property
    def owners(self) -> Size:
        """How many owners there are."""
        return product(n for _, n in self.rows.kept_axes)

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """What rows gather from places that their indices tell."""
        return gathered(self.rows, self.scribe)

    # -- its columns ---------------------------------------------------------------------------------------------------

    @property
    def innermost(self) -> str:
        return self.kernel.cols[-1][0] if self.kernel.cols else "one"

    @cached_property
    def kept_values(self) -> Mapping[str, int]:
        """The values that are kept from one pass to the next, and the first pass that has each."""
        return kept_values(self.kernel)

    @cached_property
    def packed(self) -> Sequence[tuple[Packed, ...]]:
        """What each pass has in parts of bytes."""
        k = self.kernel
        if len(k.cols) != 1 or k.scans or k.descending or self.guarded:
            return [()] * len(k.passes)
        numbers = {s.name: s.attr("value") for s in k.body if s.op == "const" and isinstance(s.attr("value"), int)}
        written = {s.buffer for s in k.body if s.op in ("store", "accum")}
        is_book = lambda b: b not in written and self.types[b] == Type(F32, (16,))
        return [packed_values(p.body, p.roots, numbers, self.innermost, self.rows.by_column, is_book) for p in k.passes]

    def values(self, p: Phase, number: int) -> list[Stmt]:
        """A pass's values, of which those that are kept, unpacked or stored before are read back."""
        return self.rows.values(p, number, self._read_back)

    def _read_back(self, s: Stmt, number: int) -> Stmt | None:
        if any(s.name == packed.value for packed in self.packed[number]):
            return replace(s, op="unpacked", args=(), attrs=())
        if self.kept_values.get(s.name, number) < number:
            return replace(s, op="cached", args=(), where="", attrs=())
        return None

    @cached_property
    def streamed(self) -> list[Stmt]:
        """The stores that may go past the caches, of what no later pass of a row reads back."""
        if self.guarded:
            return []
        passes = [*enumerate(self.kernel.passes)]
        stores = [(number, s) for number, p in passes for s in p.roots if s.op == "store"]
        return [
            s
            for number, s in stores
            if may_stream(self.kernel, self.types[s.buffer], s)
            and not any(v.buffer == s.buffer for j, p in passes if j > number for v in self.values(p, j))
        ]

    def independent(self, s: Stmt) -> bool:
        """Whether an effect touches another element in every column, so that columns may go side by side."""
        along = self.innermost in {v for i in s.index for v, _ in i.terms}
        return s.op != "check" and along and not self.rows.placed_by_column(s)

    def reduces_columns(self, s: Stmt) -> bool:
        """Whether an accum adds a whole run of the innermost columns to one element; a place that a column decides is
        known inside the run alone.
        """
        if s.op != "accum" or s.combine != "sum" or self.rows.in_segments(s):
            return False
        return self.innermost not in {v for i in s.index for v, _ in i.terms} and not self.rows.placed_by_column(s)

    def by_neighbours(self, load: Stmt) -> bool:
        """Whether neighbouring columns load neighbouring elements."""
        flat = flatten(load.index, self.types[load.buffer].shape)
        by_column = [v for v, _ in flat.terms if v.startswith("%") and self.rows.by_column(v)]
        return dict(flat.terms).get(self.innermost) == 1 and not by_column

    def bytes_of(self, s: Stmt) -> int:
        """Of a value, or of the element that it is loaded from, whichever are fewer."""
        dtype = self.types[s.buffer].dtype if s.op == "load" else s.dtype
        assert dtype is not None
        return {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "i64": 8, "f64": 8}.get(
            stored(dtype) if s.op == "load" else carrier(dtype), 4
        )

    # -- what rows are combined into -----------------------------------------------------------------------------------

    def sums_wide(self, s: Stmt) -> bool:
        """Whether partial results are f64: sums of many rows are kept wide, for a chunk of f32 additions would lose
        bits that the total keeps.
        """
        privatized_sum = self.rows.strategy_of[s.buffer].partials and s.combine == "sum"
        return self.types[s.buffer].dtype.is_float and (self.rows.wide_accumulator(s) or privatized_sum)

    def sums_by_block(self, s: Stmt) -> bool:
        """Whether a few rows are added in f32 before they are added to the task's partial result, or to the wide sums
        of what they gather.
        """
        along = {v for i in s.index for v, _ in i.terms}
        if self.rows.wide_accumulator(s) and self.gathered and all(map(self.rows.owned_by_row, self.kernel.accums)):
            return bool(self.kernel.cols) and self.innermost in along and not any(v.startswith("%") for v in along)
        few = isinstance(self.kernel.row_count, int) and self.kernel.row_count < BLOCK_SUM_ROWS
        narrow = self.sums_wide(s) and self.types[s.buffer].dtype is F32
        partials = self.rows.strategy_of[s.buffer].partials
        side_by_side = self.innermost in along and along <= {a for a, _ in self.kernel.cols}  # the same in every row
        return narrow and partials and side_by_side and not few


def facts_of(kernel: Kernel, types: Mapping[str, Type], guarded: bool) -> Facts:
    """The facts of a kernel.

    :param guarded: whether an access outside its array is to be reported.
    """
    rows = row_facts(kernel, types, ON_HOST)
    scribe = Scribe(
        types,
        kernel.body,
        columns=[a for a, _ in kernel.cols],
        guarded=guarded,
        narrow=_narrow(kernel, types),
        hidden=_known_masks(kernel),
        below_one="exp_below_one_f32",
    )
    keys = RowKeys(rows, rows.parts[kernel.order], scribe) if rows.order == "by key" else None
    return Facts(rows, scribe, keys)


def _known_masks(kernel: Kernel) -> set[str]:
    """Tests of bounds that a C compiler knows where it unrolls the columns, and that are all there is of a load's
    mask.
    """
    axes = {a for a, n in kernel.cols if isinstance(n, int)}

    def known(test: str) -> set[str]:
        """The tests of bounds in a mask; none if another value decides it, too."""
        s = kernel.stmts[test]
        if s.op == "bitwise_and":
            parts = [known(a) for a in s.args]
            return set[str]().union(*parts) if all(parts) else set()
        is_known = s.op == "in_bounds" and isinstance(s.attr("hi"), int) and {v for v, _ in s.index[0].terms} <= axes
        return {test} if is_known else set()

    return set[str]().union(*(known(s.where) for s in kernel.body if s.op == "load" and s.where))


def _narrow(kernel: Kernel, types: Mapping[str, Type]) -> set[str]:
    """The integers of 64 bits that floats are made of and that i32 holds, whatever elements the buffers have."""
    ranges = KernelRanges(kernel, types, lambda buffer: Range())
    cast = {s.args[0] for s in kernel.body if s.op == "cast" and s.dtype is not None and s.dtype.is_float}
    wide = {s.name for s in kernel.body if s.dtype is not None and s.dtype.is_integer and s.dtype.bits == 64}
    return {v for v in cast & wide if ranges.value(v, frozenset()).within(_I32)}
