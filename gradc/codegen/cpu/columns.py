"""The phases of a row: statements, then a pass over the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.combine import ascends, row_searches
from ...ir.dims import product, same
from ...ir.kernel import Phase
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt
from ...ir.types import F32
from ...process.forks import cached_property
from ...targets.cpu import CACHED_COST, LANE_BYTES, RUN_WIDTHS, WAITING_COST, WIDEST_RUN
from ..expr import carrier, stored, to_memory, variable
from ..index import flatten, index, size
from ..phases import phase_comment
from ..rows import NARROW_SUM_ROWS
from .accums import AccumWriter
from .interior import interior
from .packed import Packed, packed_values
from .records import (
    Accumulators,
    ByteFloats,
    Columns,
    Lanes,
    PhaseText,
    Reduction,
    Run,
    RunningValue,
    RunSum,
    Scatter,
    StreamedStore,
    Strips,
    Unpacking,
    combined,
    grouped,
)
from .reductions import accumulator_type, combined_lanes, reduction
from .row_memory import cost
from .scans import scan

_ALONE = tuple(map(str, RUN_WIDTHS[1:]))


def run_widths(columns: str, wide: bool) -> tuple[int, ...]:
    """The columns of the blocks that sums of a run are in registers for, from the first column on: each as often as it
    fits; the columns behind are a block that is filled in part.

    :param columns: how many there are, as C.  :param wide: whether there are several sums of a column, or one of 8
        bytes.
    """
    widths = RUN_WIDTHS[2:] if wide else RUN_WIDTHS
    if not columns.isdigit():
        return widths[: 3 - 2 * wide]
    left, found = int(columns), list[int]()
    for width in widths:
        if left >= width or (width == WIDEST_RUN // 2 and WIDEST_RUN in found):  # two of these where registers are few
            found.append(width)
            left %= width
    return tuple(found)


def unpacked(value: str) -> str:
    """The array of a block's values that bytes have in parts."""
    return f"unpacked{value[1:]}"


def found_by(s: Stmt) -> str:
    """The array of what a search finds for each row."""
    return f"found_{variable(s.name)}"


def floats(value: str) -> str:
    """The array of a block's floats that bytes are cast to."""
    return f"floats{value[1:]}"


@dataclass
class RootText:
    """What the statements that end a pass make of a column.

    :param vectors: whether columns may go side by side.
    """

    body: list[str]
    reductions: list[Reduction]
    scatters: list[Scatter]
    stores: list[StreamedStore]
    vectors: bool


class ColumnWriter(AccumWriter):
    """A writer of the phases of a row.

    :ivar stream_number: the stores that may stream, numbered.
    """

    stream_number: Mapping[Stmt, int]

    @property
    def innermost(self) -> str:
        return self.k.cols[-1][0] if self.k.cols else "one"

    @property
    def visited(self) -> str:
        """The variable of the loop over the innermost columns: their positions in the order in which it visits them."""
        return "visit" if self.k.descending else self.innermost

    @property
    def is_map(self) -> bool:
        """Whether rows are only mapped: nothing is combined, in one pass over one axis of columns."""
        k = self.k
        combines = any(s.op in ("accum", "scan") or s.op in REDUCTIONS for s in k.body)
        return not combines and len(k.passes) == 1 and len(k.cols) == 1

    def phase(self, p: Phase, number: int) -> PhaseText:
        row = [line for s in p.row for line in ([self.row_value(s)] if s.name else self.effect(s))]
        return PhaseText(phase_comment(self.k, p, number), tuple(row), self.columns_of(p, number) if p.roots else None)

    def row_value(self, s: Stmt) -> str:
        """A value of a row as a statement: those that its key was made of are known, where no row without one comes,
        and so is what was searched for along with the keys.
        """
        if s in self.kept_searches:
            found = f"{found_by(s)}[r]" if self.begins is None else "to + 1"
            return f"const {carrier(self.scribe.values[s.name])} {variable(s.name)} = {found};"
        if self.order == "by key" and not self.visits_all_rows:
            part = self.parts[self.k.order]
            ctype = carrier(self.scribe.values[s.name])
            if part.leading == 1 and part.stmt.index[0] == Index.of(s.name):
                return f"const {ctype} {variable(s.name)} = ({ctype})to;"
            if s.name == part.stmt.where:
                return f"const {ctype} {variable(s.name)} = 1;"
        return self.scribe.value(s)

    @cached_property
    def begins(self) -> Stmt | None:
        """The search for each row in a line that says where the rows of each key begin, and ascends, which is all that
        its key is made of; None if there is none.
        """
        if self.order != "by key" or self.visits_all_rows or self.scribe.guarded:
            return None  # with bounds looked at, each row is searched for by itself
        part = self.parts[self.k.order]
        searches, (key, *more) = row_searches(self.k, self.key_slice(part)), part.stmt.index[: part.leading]
        if more or not ascends(self.k, part) or {*self.kept_searches} - {*searches}:
            return None
        (search,), mask, keys = searches, self.k.stmts.get(part.stmt.where), self.key_count(part)
        found = {s.name: s.index[0] for s in self.k.body if s.op == "index"}
        place = found.get(key.variable or "", key)
        bounded = mask is None or (mask.index[0] == key and mask.attr("lo") == 0 and same(mask.attr("hi"), keys))
        first = place == Index.of(search.name) + -1 and same(self.types[search.buffer].shape[-1], keys)
        return search if bounded and first and dict(search.attrs).get("ascending") else None

    @cached_property
    def kept_searches(self) -> list[Stmt]:
        """The searches for a row itself that more is made of than its key: in the order of the keys each would begin
        anew, in the order of the rows it goes on.
        """
        if self.order != "by key" or self.scribe.guarded:
            return []
        return row_searches(self.k, self.beside_keys)

    @cached_property
    def beside_keys(self) -> list[Stmt]:
        """The statements of all that a row computes but its key."""
        values: list[str] = []
        for s in (s for s in self.k.body if not s.name):
            rest = s.index[self.parts[s.buffer].leading :] if s.op == "accum" and self.in_segments(s) else None
            values += s.uses if rest is None else [*s.args, *(v for i in rest for v, _ in i.terms)]
        return self.slice_of([v for v in values if v.startswith("%")])

    def columns_of(self, p: Phase, number: int) -> Columns:
        values, running = self.computed(p, number)
        roots = RootText([], [], [], [], True)
        for s in p.roots:
            self.root(s, p, roots)
        reductions, stores = roots.reductions, roots.stores
        vectors = roots.vectors and all(r.vectors for r in reductions) and not running
        block = "GRADC_FINE_BLOCK" if any(r.fine for r in reductions) else "GRADC_BLOCK" if reductions else ""
        unpackings = tuple(map(self.unpacking, self.packed[number]))
        block = block or ("GRADC_STAGED" if stores or roots.scatters or unpackings else "")
        first, last, block, poll = self.extent(block)
        body = [*values, *roots.body]
        if self.k.descending:
            body.insert(0, f"const i64 {self.innermost} = {last} - 1 - {self.visited};")
        inside = interior(self.k, self.types, self.reloaded(p, number), self.innermost) if vectors else None
        return Columns(
            outer=tuple(self.axes(self.k.cols[:-1])),
            axis=self.visited,
            first=first,
            last=last,
            block=block,
            running=running,
            reductions=tuple(reductions),
            scatters=tuple(roots.scatters),
            stores=tuple(stores),
            prefetches=self.prefetches(number),
            unpackings=unpackings,
            pragma="#pragma omp simd" if vectors else "",
            body=tuple(body),
            poll=poll,
            interior=inside[0] if inside else None,
            interior_body=(*self.values(inside[1], number), *roots.body) if inside else (),
            strips=self.strips(p, number, inside is not None) if any(r.lanes for r in reductions) else None,
        )

    def strips(self, p: Phase, number: int, parted: bool) -> Strips:
        """How a pass goes through the columns that its accumulators are for.

        They are in registers by vectors that the text states, where nothing else takes longer than an addition does
        until the next can begin: neither computation nor conversion, which is the faster the longer a vector is.

        :param parted: whether some of the columns have a loop of their own.
        """
        inner, lanes, most = self.k.cols[-1][1] if self.k.cols else 1, self.lane_count(p), self.most_lanes(p)
        known = inner if isinstance(inner, int) and not parted else -1
        fewer = most // 4  # a vector of them
        widths = (lanes, fewer) if lanes > fewer and known % lanes >= fewer else (lanes,)
        statements = [s for s in self.reloaded(p, number) if self.column_value(s.name)]
        narrow = min([8, *map(self.bytes_of, statements)])
        waits = sum(cost(s) for s in statements) < WAITING_COST and narrow * most >= LANE_BYTES
        return Strips(widths, f"GRADC_VECTOR / {narrow}" if waits else "", rest=known % widths[-1] != 0)

    def lane_count(self, p: Phase) -> int:
        """How many columns of a pass have accumulators of their own: no more than there are columns."""
        inner, most = self.k.cols[-1][1] if self.k.cols else 1, self.most_lanes(p)
        if not isinstance(inner, int):
            return most if len(self.k.cols) == 1 else most // 4  # a row of several axes ends often
        return min(most, 1 << inner.bit_length() - 1) if inner >= 4 else 1

    def most_lanes(self, p: Phase) -> int:
        """So few that a pass's accumulators stay in registers."""
        types = [self.accumulator_type(s, p) for s in p.roots if s.op in REDUCTIONS or self.by_block(s)]
        return LANE_BYTES // (8 if {"f64", "i64", "u64"} & {*types} else 4)

    def accumulator_type(self, s: Stmt, p: Phase) -> str:
        return accumulator_type(s, self.wide_blocks(p)) if s.op in REDUCTIONS else self.partial_type(s)

    def root(self, s: Stmt, p: Phase, text: RootText) -> None:
        """Adds what a statement that ends a pass makes of a column."""
        if s.op in REDUCTIONS or self.by_block(s):
            text.reductions.append(self.reduction(s, p) if s.op in REDUCTIONS else self.run_sum(s, p))
            text.body += text.reductions[-1].update.splitlines()
        elif self.decided_by_column(s):
            text.scatters.append(self.scatter(s))
            text.body += text.scatters[-1].update
        elif s in self.stream_number:
            text.stores.append(self.streamed_store(s))
            text.body.append(self.staged(s))
        else:
            text.body += self.effect(s)
            text.vectors &= self.independent(s)

    def values(self, statements: Sequence[Stmt], number: int) -> list[str]:
        return [line for s in statements for line in self.line(s, number)]

    @cached_property
    def packed(self) -> Sequence[tuple[Packed, ...]]:
        """What each pass has in parts of bytes."""
        k = self.k
        if len(k.cols) != 1 or k.scans or k.descending or self.scribe.guarded:
            return [()] * len(k.passes)
        numbers = {s.name: s.attr("value") for s in k.body if s.op == "const" and isinstance(s.attr("value"), int)}
        return [packed_values(p.body, p.roots, numbers, self.innermost, self.column_value) for p in k.passes]

    def unpacking(self, packed: Packed) -> Unpacking:
        """The statements that a block of such values is computed by: for each part, then for the byte."""
        ctype = carrier(self.scribe.values[packed.value])
        each = tuple(
            (
                *(f"const i64 {variable(name)} = {part};" for name in packed.parts),
                *(self.scribe.value(s) for s in packed.body),
                f"{unpacked(packed.value)}[{packed.per} * e + {part}] = {variable(packed.value)};",
            )
            for part in range(packed.per)
        )
        return Unpacking(unpacked(packed.value), ctype, packed.per, variable(packed.place), each)

    def cached(self, s: Stmt, number: int) -> Stmt | None:
        if any(s.name == packed.value for packed in self.packed[number]):
            return replace(s, op="unpacked", args=(), attrs=())
        return super().cached(s, number)

    def line(self, s: Stmt, number: int, value: str = "") -> list[str]:
        if s.op == "unpacked":
            value = f"{unpacked(s.name)}[{self.innermost} - c0]"
        return super().line(s, number, value)

    def computed(self, p: Phase, number: int, lane: str = "") -> tuple[list[str], tuple[RunningValue, ...]]:
        """The statements of a column's values, and what their scans keep."""
        lines: list[str] = []
        running: list[RunningValue] = []
        for s in self.reloaded(p, number):
            if s.op != "scan":
                lines += self.line(s, number)
                continue
            known = number * len(self.k.scans) + self.k.scans.index(s)
            made = scan(s, self.scribe.values[s.args[-1]], known, self.innermost, lane)
            running += made.running
            lines += [*made.update, *self.line(s, number, made.value)]
        return lines, tuple(running)

    @staticmethod
    def located(axes: Sequence[Axis], linear: str) -> list[str]:
        """Statements that compute the axes of a position, row-major."""
        lines = []
        for i, (name, extent) in enumerate(axes):
            below = size(product(n for _, n in axes[i + 1 :]))
            quotient = f"{linear} / {grouped(below)}" if below != "1" else linear
            lines.append(f"const i64 {name} = {quotient}{f' % {grouped(size(extent))}' if i else ''};")
        return lines

    @property
    def interchanged(self) -> bool:
        """Whether all owners go through one member before the next: those gather from a part of memory of its own."""
        if self.order != "by owner" or not all(map(self.owned_by_row, self.k.accums)):
            return False
        axes = {a for a, _ in self.rest_axes}
        gathered = [{v for i in s.index for v, _ in i.terms} for s in self.k.body if s.op == "load"]
        return any(
            axes & places and any(v.startswith("%") and self.column_value(v) for v in places) for places in gathered
        )

    @cached_property
    def run(self) -> Run | None:
        """How the rows of a run are added, where the rows of a segment, or of an owner, are added side by side and have
        no other effects.
        """
        k, roots = self.k, [s for p in self.k.passes for s in p.roots]
        if len(k.passes) != 1 or not k.cols or k.scans or k.descending or self.scribe.guarded or not roots:
            return None
        columns = {a for a, _ in k.cols}
        if not all(columns <= {v for i in s.index for v, _ in i.terms} for s in roots):
            return None
        if not all(s.op == "accum" and s.combine == "sum" and self.independent(s) and self.of_run(s) for s in roots):
            return None
        (p,) = k.passes
        last = self.axes(k.cols[-1:])[0].size
        read = [s for s in p.row if not s.name or (s in self.beside_keys and s not in self.kept_searches)]
        if any(not s.name or s.op == "search" or cost(s) >= CACHED_COST for s in read) and last not in _ALONE:
            return None  # they would be computed again for each block of columns
        statements = self.reloaded(p, 0)
        bytes_ = self.bytes_as_floats(statements, roots)
        made = {s.args[0] for s in bytes_}
        computed = [s for s in statements if s.name not in made and self.column_value(s.name)]
        sums, body = [], []
        for s in (s for s in statements if s.name not in made):
            body += self.line(s, 0, f"{floats(s.name)}[e]" if s in bytes_ else "")
        for s in roots:
            ctype, name = stored(self.types[s.buffer].dtype), f"sum{self.number[s.buffer]}"
            sums.append(self.sum_of_run(s, ctype, name))
            body.append(f"{name}[e] = ({ctype})({name}[e] + {variable(s.args[0])});")
        return Run(
            row=tuple(self.row_value(s) for s in p.row),
            where=" && ".join(dict.fromkeys(variable(s.where) for s in roots if s.where and not self.in_segments(s))),
            outer=tuple(self.axes(k.cols[:-1])),
            axis=self.innermost,
            last=last,
            widths=run_widths(last, len(sums) > 1 or any(s.dtype is None or s.dtype.bits > 32 for s in roots)),
            narrow=min([4, *map(self.bytes_of, computed)]),
            sums=tuple(sums),
            unpackings=tuple(map(self.unpacking, self.packed[0])),
            floats=tuple(ByteFloats(floats(s.name), carrier(t.dtype), at) for s, (t, at) in bytes_.items() if t.dtype),
            body=tuple(body),
        )

    def bytes_as_floats(self, statements: Sequence[Stmt], roots: Sequence[Stmt]) -> dict[Stmt, tuple[Stmt, str]]:
        """The floats that bytes side by side in memory are cast to, with what is read and where a block of it begins:
        not all compilers find the shortest conversion.
        """
        known = {s.name: s for s in statements}
        found: dict[Stmt, tuple[Stmt, str]] = {}
        for s in statements:
            source = known.get(s.args[0]) if s.op == "cast" and s.dtype is F32 else None
            if source is None or source.dtype is None or carrier(source.dtype) not in ("u8", "i8"):
                continue
            if source.op == "unpacked":
                found[s] = source, unpacked(source.name)
            elif source.op == "load" and source.dtype.bits == 8 and not source.where and self.by_neighbours(source):
                first = [i.renamed({self.innermost: "c0"}) for i in source.index]
                found[s] = source, f"&{self.scribe.element(source.buffer, first)}"
        others = {u for s in (*statements, *roots) if s not in found for u in s.uses}
        return {s: given for s, given in found.items() if s.args[0] not in others}

    def by_neighbours(self, load: Stmt) -> bool:
        """Whether neighbouring columns load neighbouring elements."""
        flat = flatten(load.index, self.types[load.buffer].shape)
        by_column = [v for v, _ in flat.terms if v.startswith("%") and self.column_value(v)]
        return dict(flat.terms).get(self.innermost) == 1 and not by_column

    def of_run(self, s: Stmt) -> bool:
        """Whether an accum adds the rows of a segment, or of an owner, to one row of elements."""
        if self.order == "by key":
            return not self.visits_all_rows
        if self.order != "by owner" or not self.owned_by_row(s) or self.interchanged:
            return False
        where = self.k.passes[0].roots[0].where  # all of a row is added, or nothing
        if s.where != where or (where and self.column_value(where)) or not self.owns_columns(s):
            return False
        members = product(n for _, n in self.rest_axes)
        return self.sums_by_block(s) or (isinstance(members, int) and 0 < members <= NARROW_SUM_ROWS)

    def owns_columns(self, s: Stmt) -> bool:
        """Whether what an owner's rows are added to is an element for each of their columns."""
        shape, free = self.types[s.buffer].shape, self.free(s)
        extents = {s.index[axis].variable: shape[axis] for axis in free}
        return len(extents) == len(free) and extents == dict(self.k.cols)

    def sum_of_run(self, s: Stmt, ctype: str, name: str) -> RunSum:
        if self.in_segments(s):
            return RunSum(ctype, name, self.segment_target(s), "")
        array, place = self.target_of(s)
        owned = f"{s.buffer}[{index(flatten(s.index, self.types[s.buffer].shape))}]"
        return RunSum(ctype, name, owned, f"acc{self.number[s.buffer]}[{place}]" if array != s.buffer else "")

    def bytes_of(self, s: Stmt) -> int:
        """Of a value, or of the element that it is loaded from, whichever are fewer."""
        dtype = self.types[s.buffer].dtype if s.op == "load" else s.dtype
        assert dtype is not None
        return {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "i64": 8, "f64": 8}.get(
            stored(dtype) if s.op == "load" else carrier(dtype), 4
        )

    @cached_property
    def lanes(self) -> Lanes | None:
        """The loop over rows side by side, of a kernel that scans them in one pass and does nothing else."""
        k = self.k
        only = not any(s.op in REDUCTIONS or s.op == "check" for s in k.body) and not any(
            not s.name for p in k.passes for s in p.row
        )
        if not only or len(k.passes) > 1 or not self.scans_side_by_side:
            return None
        axis, (p,) = k.rows[-1][0], k.passes
        columns, running = self.computed(p, 0, f"{axis} - first_lane")
        row = [self.scribe.value(s) for s in p.row]
        return Lanes(
            axis=axis,
            size=self.axes(k.rows[-1:])[0].size,
            column=self.innermost,
            columns=self.axes(k.cols)[0].size,
            descending=k.descending,
            running=running,
            body=(*row, *columns, *(line for s in p.roots for line in self.effect(s))),
        )

    def extent(self, block: str) -> tuple[str, str, str, str]:
        """The first column and the one behind the last, columns of a block, and when a task polls: a map's tasks are
        short, those of long rows or several axes are not.
        """
        if self.is_map:
            return "first_col", "last_col", block, ""
        if not self.k.cols:
            return "0", "1", block, ""
        innermost = self.axes(self.k.cols[-1:])[0]
        poll = "if ({}gradc_poll(A->ctx, &since, c1 - c0)) return;"
        if len(self.k.cols) > 1:
            poll = poll.format("")
        else:
            poll = poll.format(f"c1 < {innermost.size} && ") if innermost.long else ""
        return "0", innermost.size, block or ("GRADC_POLL" if innermost.long else ""), poll

    def independent(self, s: Stmt) -> bool:
        """Whether an effect touches another element in every column, so that columns may go side by side."""
        along = self.innermost in {v for i in s.index for v, _ in i.terms}
        return s.op != "check" and along and not self.placed_by_column(s)

    def reduction(self, s: Stmt, p: Phase) -> Reduction:
        axes = self.k.cols
        place = index(flatten([Index.of(a) for a, _ in axes], [n for _, n in axes])) if axes else "0"
        return reduction(s, self.scribe.values[s.args[0]], place, self.lane_count(p), self.wide_blocks(p))

    def wide_blocks(self, p: Phase) -> bool:
        """Whether blocks of f32 are added in f64 too."""
        return not self.k.rows or self.mixed(p)

    def mixed(self, p: Phase) -> bool:
        """Whether a pass gathers or computes on wider values than f32: a compiler then adds the lanes, or the elements,
        one after another.
        """
        return any(v.startswith("%") for s in p.body for i in s.index for v, _ in i.terms) or any(
            s.dtype is not None and s.dtype.bits > 32 for s in p.body
        )

    # -- accums ------------------------------------------------------------------------------------------------------

    def column_value(self, value: str) -> bool:
        return bool(self.k.levels[value] & {a for a, _ in self.k.cols})

    def placed_by_column(self, s: Stmt) -> bool:
        """Whether a value that depends on the column says where an effect goes."""
        return any(v.startswith("%") and self.column_value(v) for i in s.index for v, _ in i.terms)

    def by_block(self, s: Stmt) -> bool:
        """Whether an accum adds a whole run of the innermost columns to one element; a place that a column decides is
        known inside the run alone.
        """
        places = [v for i in s.index for v, _ in i.terms]
        if s.op != "accum" or s.combine != "sum" or self.in_segments(s):
            return False
        return self.innermost not in places and not self.placed_by_column(s)

    def run_sum(self, s: Stmt, p: Phase) -> Reduction:
        """Such an accum: the run is added up first."""
        value, of = variable(s.args[0]), Accumulators(self.partial_type(s), f"lanes_a{self.number[s.buffer]}", "0")
        term = f"{variable(s.where)} ? {value} : 0" if s.where else value
        (merge,) = self.effect(replace(s, where=""), combined_lanes("sum", of, self.lane_count(p)))
        return Reduction("", f"{of.name}[lane] += {term};", merge, "", (of,))

    def decided_by_column(self, s: Stmt) -> bool:
        """Whether an accum goes where each column says: values and places are computed side by side, then added one
        after another.
        """
        return s.op == "accum" and not self.in_segments(s) and bool(self.k.cols) and self.placed_by_column(s)

    def scatter(self, s: Stmt) -> Scatter:
        """Such an accum.

        A sum of one's own takes 0 at place 0 where a mask is off (no sum that began with 0 is changed by it): a branch
        would be guessed wrong too often.
        """
        count, n = self.types[s.buffer].count, self.number[s.buffer]
        ctype = "i32" if isinstance(count, int) and count < 2**31 else "i64"
        array, at = self.target_of(s, ctype)
        value, at = variable(s.args[0]), f"({ctype}){at}"
        own = s.combine == "sum" and array != s.buffer
        if s.where:
            at = f"{variable(s.where)} ? {at} : {0 if own else -1}"
            value = f"{variable(s.where)} ? {value} : 0" if own else value
        target = self.scribe.guard(array, f"place{n}[i]", self.target_count(s), self.target_type(s))
        return Scatter(
            number=n,
            value=carrier(self.scribe.values[s.args[0]]),
            place=ctype,
            masked=bool(s.where) and not own,
            update=(f"place{n}[{self.visited} - c0] = {at};", f"value{n}[{self.visited} - c0] = {value};"),
            add=combined(s.combine, stored(self.types[s.buffer].dtype), target, f"value{n}[i]"),
        )

    # -- stores --------------------------------------------------------------------------------------------------------

    def streamed_store(self, s: Stmt) -> StreamedStore:
        place = flatten([i.renamed({self.innermost: "c0"}) for i in s.index], self.types[s.buffer].shape)
        ctype = stored(self.types[s.buffer].dtype)
        return StreamedStore(self.stream_number[s], ctype, f"{s.buffer} + {index(place)}")

    def staged(self, s: Stmt) -> str:
        """The statement that stores one column of a block."""
        assert s.dtype is not None
        return f"out{self.stream_number[s]}[{self.innermost} - c0] = {to_memory(s.dtype, variable(s.args[0]))};"
