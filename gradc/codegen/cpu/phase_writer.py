"""The phases of a row as C: statements, then a pass over the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...ir.kernel import Phase
from ...ir.statement import REDUCTIONS, Axis, Stmt
from ...targets.cpu import MOST_STREAMS, SHORT_COLUMNS, WIDE_VECTOR_COST
from ..expr import carrier, stored, to_memory, variable
from ..index import flatten, index, number_of_place, size
from ..phases import phase_comment
from ..text import enumerators
from .accums import Accum
from .facts import Facts
from .interior import Interior, interior
from .mapping import RowMapping
from .packed import Unpacking, unpacked
from .reductions import Accumulators, Reduction, combined_lanes, reduction
from .row_memory import cost, of_next_row
from .scans import RunningValue, scan
from .strips import PassLanes, Strips

STRIP = enumerators("cpu/program.h")["GRADC_STRIP"]
"""Columns of a task of a map."""
UNPOLLED_COLUMNS = 4096
"""Columns of a row that no task need interrupt to find out whether the call is to end."""


def extents(axes: Sequence[Axis]) -> list[tuple[str, str]]:
    """Axes and their extents, as C."""
    return [(name, size(extent)) for name, extent in axes]


@dataclass(frozen=True)
class Scatter:
    """An accum whose place each column decides: places and values of a block are computed side by side, then added one
    after another.

    :param number: of the accum.
    :param value: the C type of the values, :param place: and of the places.
    :param masked: whether a place below 0 says that nothing is added.
    :param update: the statements of one column.
    :param add: the statement that adds element ``i``.
    """

    number: int
    value: str
    place: str
    masked: bool
    update: tuple[str, ...]
    add: str


@dataclass(frozen=True)
class Columns:
    """A pass over the columns.

    :param outer: the axes of the loops around the innermost, and their extents.
    :param axis: the variable of the innermost loop.
    :param first: its first column, :param last: and the one behind its last, as C.
    :param block: columns of a block, as C; "" where there are no blocks.
    :param running: what scans keep of the columns so far.
    :param reductions: what is reduced.
    :param scatters: what goes to places that the columns decide.
    :param stores: by streaming stores, where their arrays are large enough, of a block that is staged in thread memory:
        numbers, C types of elements in memory, and where the block goes.
    :param prefetches: where a block of what the next row reads begins, and elements of a cache line.
    :param unpackings: what is unpacked before.
    :param pragma: what says that the innermost loop is one of vectors, or "".
    :param body: the statements of one column.
    :param screen: the statements of a column after which the highest bit of ``outside`` says whether a value of it is
        out of range: the loop, of checks alone, is run where that of any column is.
    :param poll: the statement at a block's end that leaves when the call is to end, or "".
    :param interior: the columns that a loop of their own takes, :param interior_body: and its statements.
    :param strips: how the columns' accumulators are gone through, or None if there are none.
    :param mask: the value of the row without which the pass stores nothing, or "".
    """

    outer: Sequence[tuple[str, str]]
    axis: str
    first: str
    last: str
    block: str
    running: tuple[RunningValue, ...]
    reductions: tuple[Reduction, ...]
    scatters: tuple[Scatter, ...]
    stores: Sequence[tuple[int, str, str]]
    prefetches: Sequence[tuple[str, int]]
    unpackings: Sequence[Unpacking]
    pragma: str
    body: tuple[str, ...]
    screen: tuple[str, ...]
    poll: str
    interior: Interior | None
    interior_body: tuple[str, ...]
    strips: Strips | None
    mask: str

    @property
    def blocked(self) -> bool:
        """Whether there is a loop over blocks around the innermost."""
        return bool(self.block or self.prefetches or self.poll)


PhaseText: TypeAlias = tuple[str, list[str], Columns | None]
"""A phase of a row: what it computes, in words, as a C comment; statements; then the pass over the columns, if there is
one.
"""


@dataclass
class _Pass:
    """What a pass over the columns is made of while its statements are written.

    :ivar body: of the statements that end it, for one column.
    :ivar vectors: whether columns may go side by side.
    """

    lanes: PassLanes
    body: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    scatters: list[Scatter] = field(default_factory=list)
    stores: list[tuple[int, str, str]] = field(default_factory=list)
    vectors: bool = True


class PhaseWriter:
    """Writes a kernel's phases under a mapping.

    :ivar stream_number: the stores that may stream, numbered.
    """

    def __init__(self, facts: Facts, mapping: RowMapping, accums: Mapping[str, Accum]):
        self.facts, self.mapping, self.accums = facts, mapping, accums
        self.k, self.types, self.scribe = facts.kernel, facts.types, facts.scribe
        streamed = facts.streamed if mapping.streams else []
        self.stream_number = {s: i for i, s in enumerate(streamed if len(streamed) <= MOST_STREAMS else ())}

    def phase(self, p: Phase, number: int) -> PhaseText:
        row = [line for s in p.row for line in ([self.row_value(s)] if s.name else self.effect(s))]
        return phase_comment(self.k, p, number), row, self.columns(p, number) if p.roots else None

    # -- values --------------------------------------------------------------------------------------------------------

    def row_value(self, s: Stmt) -> str:
        """A value of a row as a statement; the row's key may say what it is."""
        known = self.facts.keys.known(s) if self.facts.keys is not None else ""
        return self.scribe.declaration(s, known) if known else self.scribe.value(s)

    def line(self, s: Stmt, number: int, value: str = "") -> list[str]:
        """A value of a column as a statement; one that is kept for later passes is stored.

        :param value: as C, where the statement alone does not say it.
        """
        if s.op == "unpacked":
            value = f"{unpacked(s.name)}[{self.facts.innermost} - c0]"
        kept = self.facts.kept_values
        place = f"cache{list(kept).index(s.name)}[{number_of_place(self.k.cols)}]" if s.name in kept else ""
        if s.op == "cached":
            value = place
        line = self.scribe.declaration(s, value) if value else self.scribe.value(s)
        keeps = s.op != "cached" and kept.get(s.name) == number
        return [line, f"{place} = {variable(s.name)};"] if keeps else [line]

    def computed(self, p: Phase, number: int, lane: str = "") -> tuple[list[str], tuple[RunningValue, ...]]:
        """The statements of a column's values, and what their scans keep.

        :param lane: the row's place among those that are scanned side by side, as C, or "".
        """
        lines: list[str] = []
        running: list[RunningValue] = []
        for s in self.facts.values(p, number):
            if s.op != "scan":
                lines += self.line(s, number)
                continue
            known = number * len(self.k.scans) + self.k.scans.index(s)
            kept, update, value = scan(s, self.scribe.values[s.args[-1]], known, self.facts.innermost, lane)
            running += kept
            lines += [*update, *self.line(s, number, value)]
        return lines, tuple(running)

    # -- a pass over the columns ---------------------------------------------------------------------------------------

    @property
    def visited(self) -> str:
        """The variable of the loop over the innermost columns: their positions in the order in which it visits them."""
        return "visit" if self.k.descending else self.facts.innermost

    def columns(self, p: Phase, number: int) -> Columns:
        """A phase's pass over the columns."""
        values, running = self.computed(p, number)
        made = _Pass(PassLanes(self.facts, self.accums, p))
        for s in p.roots:
            self.root(s, made)
        vectors = made.vectors and all(r.vectors for r in made.reductions) and not running
        unpackings = [packed.unpacking(self.scribe) for packed in self.facts.packed[number]]
        first, last, block, poll = self.extent(made, bool(unpackings))
        body = [*values, *made.body]
        if self.k.descending:
            body.insert(0, f"const i64 {self.facts.innermost} = {last} - 1 - {self.visited};")
        inside = interior(self.k, self.types, self.facts.values(p, number), self.facts.innermost) if vectors else None
        work = self.work_under_masks(made, number, bool(unpackings)) if vectors else []
        if inside and inside[0].first and sum(work) >= WIDE_VECTOR_COST:
            inside = inside[0].unless("GRADC_MASK_REGISTERS"), inside[1]  # its borders are single elements
        elif inside is None and max(work, default=0) >= WIDE_VECTOR_COST:
            filled = self.filled(made, number)
            body = [f"if ({filled} == {last} || {self.visited} < {last} + unknown_zero) {{", *body, "}"]
            last = filled
        lanes = any(r.lanes for r in made.reductions)
        next_row = not self.facts.guarded and 0 < number == len(self.k.passes) - 1
        return Columns(
            outer=extents(self.k.cols[:-1]),
            axis=self.visited,
            first=first,
            last=last,
            block=block,
            running=running,
            reductions=tuple(made.reductions),
            scatters=tuple(made.scatters),
            stores=made.stores,
            prefetches=of_next_row(self.facts.rows) if next_row else (),
            unpackings=unpackings,
            pragma="#pragma omp simd" if vectors else "",
            body=tuple(body),
            screen=(*values, *self.screen(p)) if self.is_screened(p, running) else (),
            poll=poll,
            interior=inside[0] if inside else None,
            interior_body=(*(x for s in inside[1] for x in self.line(s, number)), *made.body) if inside else (),
            strips=made.lanes.strips(number, inside is not None) if lanes else None,
            mask=variable(mask) if (mask := self.mask(p)) else "",
        )

    def is_screened(self, p: Phase, running: Sequence[RunningValue]) -> bool:
        """Whether a pass does nothing but checks of ranges: vectors of columns find out whether any is out of its."""
        plain = not running and not self.facts.guarded and not self.k.descending
        return plain and all(s.op == "check" and len(s.args) == 1 for s in p.roots)

    @staticmethod
    def screen(p: Phase) -> list[str]:
        """The statements that make the highest bit of ``outside`` 1 where a value is below 0 or above its bound - 1."""
        checked = [(f"(u64){variable(s.args[0])}", f"(u64){size(s.attr('bound'))}") for s in p.roots]
        return [f"outside |= {value} | ({bound} - 1 - {value});" for value, bound in checked]

    def mask(self, p: Phase) -> str:
        """The value of a row that masks all that ends a pass, or "": vectors of columns are stored whole behind it."""
        masks = {s.where if s.op == "store" else "" for s in p.roots}
        (mask,) = masks if len(masks) == 1 else ("",)
        return "" if mask and self.facts.rows.by_column(mask) else mask

    def extent(self, made: _Pass, unpacks: bool) -> tuple[str, str, str, str]:
        """The first column and the one behind the last, columns of a block, and when a task polls: those of strips are
        short, those of long rows or several axes are not.
        """
        block = "GRADC_BLOCK" if made.reductions else "GRADC_STAGED" if made.stores or made.scatters or unpacks else ""
        block = "GRADC_FINE_BLOCK" if any(r.fine for r in made.reductions) else block
        if self.mapping.strips:
            whole = isinstance(self.k.cols[-1][1], int) and self.k.cols[-1][1] <= STRIP
            return *(("0", size(self.k.cols[-1][1])) if whole else ("first_col", "last_col")), block, ""
        if not self.k.cols:
            return "0", "1", block, ""
        extent, several = self.k.cols[-1][1], len(self.k.cols) > 1
        long, last = not isinstance(extent, int) or extent > UNPOLLED_COLUMNS, size(extent)
        behind = "" if several else f"c1 < {last} && "
        poll = f"if ({behind}gradc_poll(A->ctx, &since, c1 - c0)) return;" if several or long else ""
        return "0", last, block or ("GRADC_POLL" if long else ""), poll

    def work_under_masks(self, made: _Pass, number: int, unpacks: bool) -> list[int]:
        """What the values of a column cost, where a map has short rows that may be vectors under masks; else []."""
        columns = self.k.cols[-1][1] if self.mapping.strips else SHORT_COLUMNS
        if not isinstance(columns, int) or columns >= SHORT_COLUMNS or made.stores or made.scatters or unpacks:
            return []
        accesses = self.accesses(made, number)
        if not all(map(self.facts.by_neighbours, accesses)):  # under a mask steps gather
            return []
        if not {self.types[s.buffer].dtype.itemsize for s in accesses} <= {4, 8}:  # AVX2 masks no shorter elements
            return []
        return [cost(s) for s in self.values_of_columns(number)]

    def filled(self, made: _Pass, number: int) -> str:
        """The columns of a short row with those that fill its last vector up, as C."""
        widest = max(self.types[s.buffer].dtype.itemsize for s in self.accesses(made, number))
        return f"gradc_filled({size(self.k.cols[-1][1])}, {widest})"

    def accesses(self, made: _Pass, number: int) -> list[Stmt]:
        """What a pass loads and stores in each column."""
        return [s for s in (*self.values_of_columns(number), *made.lanes.phase.roots) if s.buffer]

    def values_of_columns(self, number: int) -> list[Stmt]:
        """A pass's values that columns have each for itself."""
        values = self.facts.values(self.k.passes[number], number)
        return [s for s in values if self.facts.rows.by_column(s.name)]

    def root(self, s: Stmt, made: _Pass) -> None:
        """Adds what a statement that ends a pass makes of a column."""
        if s.op in REDUCTIONS or self.facts.reduces_columns(s):
            write = self.reduction if s.op in REDUCTIONS else self.sum_of_columns
            made.reductions.append(write(s, made.lanes))
            made.body += made.reductions[-1].update.splitlines()
        elif s.op == "accum" and not self.facts.rows.in_segments(s) and self.facts.rows.placed_by_column(s):
            made.scatters.append(self.scatter(s))
            made.body += made.scatters[-1].update
        elif s in self.stream_number:
            made.stores.append(self.streamed_store(s))
            made.body.append(self.staged(s))
        else:
            made.body += self.effect(s)
            made.vectors &= self.facts.independent(s)

    def reduction(self, s: Stmt, lanes: PassLanes) -> Reduction:
        operand = self.scribe.values[s.args[0]]
        return reduction(s, operand, number_of_place(self.k.cols), lanes.count, lanes.wide_blocks)

    def sum_of_columns(self, s: Stmt, lanes: PassLanes) -> Reduction:
        """An accum that adds a run of columns to one element: the run is added up first."""
        accum, value = self.accums[s.buffer], variable(s.args[0])
        of = Accumulators(accum.partial, f"lanes_a{accum.number}", "0")
        term = f"{variable(s.where)} ? {value} : 0" if s.where else value
        (merge,) = accum.add(replace(s, where=""), combined_lanes("sum", of, lanes.count))
        return Reduction("", f"{of.name}[lane] += {term};", merge, "", (of,))

    # -- effects -------------------------------------------------------------------------------------------------------

    def effect(self, s: Stmt) -> list[str]:
        """The lines of a statement with an effect."""
        value = variable(s.args[0])
        if s.op == "check":
            return self.check(s, value)
        if s.op == "store":
            assert s.dtype is not None
            where = f"if ({variable(s.where)}) " if s.where else ""
            return [f"{where}{self.scribe.element(s.buffer, s.index)} = {to_memory(s.dtype, value)};"]
        return self.accums[s.buffer].add(s, value)

    def check(self, s: Stmt, value: str) -> list[str]:
        """A value that is out of range, or below what it must not be below, is reported with its position."""
        at = number_of_place((*self.k.rows, *self.k.cols), self.k.stmt_level(s))
        bound = size(s.attr("bound"))
        report = "gradc_report(A->ctx, {0}, A->site, {1}, {2}, {3});"
        return [
            *(
                f"if ({value} < {low}) {report.format('GRADC_DECREASES', at, value, low)}"
                for low in map(variable, s.args[1:])
            ),
            f"if ((u64){value} >= (u64){bound}) {report.format('GRADC_INDEX_OUT_OF_RANGE', at, value, bound)}",
        ]

    def scatter(self, s: Stmt) -> Scatter:
        """An accum that goes where each column says.

        A sum of one's own takes 0 at place 0 where a mask is off (no sum that began with 0 is changed by it): a branch
        would be guessed wrong too often.
        """
        accum, count = self.accums[s.buffer], self.types[s.buffer].count
        n, ctype = accum.number, "i32" if isinstance(count, int) and count < 2**31 else "i64"
        value, at = variable(s.args[0]), f"({ctype}){accum.place(s, ctype)}"
        own = s.combine == "sum" and accum.array != s.buffer
        if s.where:
            at = f"{variable(s.where)} ? {at} : {0 if own else -1}"
            value = f"{variable(s.where)} ? {value} : 0" if own else value
        return Scatter(
            number=n,
            value=carrier(self.scribe.values[s.args[0]]),
            place=ctype,
            masked=bool(s.where) and not own,
            update=(f"place{n}[{self.visited} - c0] = {at};", f"value{n}[{self.visited} - c0] = {value};"),
            add=accum.joined(accum.guarded(f"place{n}[i]"), f"value{n}[i]"),
        )

    def streamed_store(self, s: Stmt) -> tuple[int, str, str]:
        """The number of such a store, the C type of an element in memory, and where a block goes."""
        place = flatten([i.renamed({self.facts.innermost: "c0"}) for i in s.index], self.types[s.buffer].shape)
        return self.stream_number[s], stored(self.types[s.buffer].dtype), f"{s.buffer} + {index(place)}"

    def staged(self, s: Stmt) -> str:
        """The statement that stores one column of a block."""
        assert s.dtype is not None
        value = to_memory(s.dtype, variable(s.args[0]))
        return f"out{self.stream_number[s]}[{self.facts.innermost} - c0] = {value};"
