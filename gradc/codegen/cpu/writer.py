"""A kernel taken apart for the templates of the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...analysis.chunks import Bound, interchanged_bound, largest, task_bounds
from ...analysis.combine import Combine, row_searches
from ...analysis.strategies import ON_HOST
from ...ir.dims import Size, product, symbol
from ...ir.kernel import Kernel
from ...ir.ranges import KernelRanges, Range, of_type
from ...ir.statement import Axis, Stmt
from ...ir.types import DTYPES, F32, Type
from ...targets.cpu import MOST_STREAMS
from ..declarations import Declaration
from ..expr import Scribe, carrier, stored, variable
from ..index import size
from .columns import ColumnWriter, found_by
from .records import BufferField, Gathered, KernelText, LocalArray, StreamedArray, grouped

_I32 = of_type(DTYPES["i32"])
TAPS = 4
"""Rows of an axis that are taken innermost: the taps of one place lie near one another."""


def seek_of(s: Stmt) -> str:
    """Where the search for one row after another is."""
    return f"seek_{variable(s.name)}"


def _narrow(kernel: Kernel, types: Mapping[str, Type]) -> set[str]:
    """The integers of 64 bits that floats are made of and that i32 holds, whatever elements the buffers have."""
    ranges = KernelRanges(kernel, types, lambda buffer: Range())
    cast = {s.args[0] for s in kernel.body if s.op == "cast" and s.dtype is not None and s.dtype.is_float}
    wide = {s.name for s in kernel.body if s.dtype is not None and s.dtype.is_integer and s.dtype.bits == 64}
    return {v for v in cast & wide if ranges.value(v, frozenset()).within(_I32)}


class KernelWriter(ColumnWriter):
    """The writer of one kernel.

    :param dims: the symbols in the order in which a caller passes their values: that of the kernel as it stands in the
        program. Joined columns name them in another order, and may not name them all.
    :ivar caches: the arrays that keep the row's values between passes.
    """

    def __init__(self, kernel: Kernel, types: Mapping[str, Type], dims: Sequence[str], guarded: bool):
        self.dims = dims
        columns = [a for a, _ in kernel.cols]
        scribe = Scribe(
            types,
            kernel.body,
            columns=columns,
            guarded=guarded,
            narrow=_narrow(kernel, types),
            below_one="exp_below_one_f32",
        )
        super().__init__(kernel, types, scribe, ON_HOST)
        self.row_cache = self.worth_caching()
        streamed = [s for j, p in enumerate(kernel.passes) for s in p.roots if self.streams(s, j) and not self.lanes]
        self.stream_number = {s: i for i, s in enumerate(streamed if len(streamed) <= MOST_STREAMS else ())}

    def record(self) -> KernelText:
        k = self.k
        part = self.parts[self.k.order] if self.order == "by key" else None
        counts = self.counts()
        bounds = self.chunk_bounds(counts)
        gathered = () if self.lanes or self.interchanged or self.scribe.guarded else self.gathered
        chunk = largest([b if isinstance(b.rows, int) else replace(b, rows=symbol(b.name)) for b in bounds])
        return KernelText(
            name=k.name,
            buffers=tuple(
                BufferField(b, f"{'' if b in k.writes else 'const '}{stored(self.types[b].dtype)}") for b in k.buffers
            ),
            dims=tuple(self.dims),
            accums=tuple(map(self.accum, k.accums)),
            phases=tuple(self.phase(p, i) for i, p in enumerate(k.passes)),
            run=self.run,
            row_axes=tuple(self.located(k.rows, "r")),
            ahead=tuple(self.ahead(gathered)),
            distant=" || ".join(
                dict.fromkeys(f"{g.count} * (i64)sizeof(*{g.buffer}) >= GRADC_DISTANT" for g in gathered)
            ),
            lanes=self.lanes,
            lane_axes=tuple(self.located(k.rows[:-1], "r")),
            owner_axes=tuple(self.located(self.kept_axes, "owner")),
            member_axes=tuple(self.located(self.member_axes, "r")),
            member_count=size(product(n for _, n in self.member_axes)),
            seeks=tuple(self.seek(s) for s in self.row_searches(part)) if part else (),
            key_lines=tuple(self.key_statements(part)) if part else (),
            key=self.key_expression(part, size(self.key_count(part))) if part else "",
            starts=self.starts,
            visits_all=self.visits_all_rows,
            workspace=tuple(self.workspace()),
            thread_memory=tuple(self.thread_memory()),
            streams=tuple(self.streamed_array(s, i) for s, i in self.stream_number.items()),
            counts=(
                *(Declaration(name, f"const i64 {name} = {size(value)};") for name, value in counts.items()),
                *(Declaration(b.name, f"const i64 {b.name} = {size(b.rows)}; /* {b.why} */") for b in bounds),
            ),
            chunk=size(chunk),
            launches=tuple(self.launches()),
            checks=any(s.op == "check" for s in k.body),
        )

    def key_values(self, part: Combine) -> list[Stmt]:
        """The statements of a row's key, and of the searches that the row's other values read as well."""
        return self.slice_of([*(s.name for s in self.key_slice(part)), *(s.name for s in self.kept_searches)])

    def row_searches(self, part: Combine) -> list[Stmt]:
        """The searches of these for the row itself: what they find does not go back from row to row."""
        return [] if self.scribe.guarded else row_searches(self.k, self.key_values(part))

    @property
    def starts(self) -> str:
        """Where the rows of key ``k`` begin, as C, where a line says so and their own order is that of their keys."""
        return f"{self.begins.buffer}[k]" if self.begins is not None and self.run else ""

    def seek(self, s: Stmt) -> str:
        """What such a search goes on from, declared before a task's rows."""
        line = self.types[s.buffer]
        of = f"{s.buffer}, {self.scribe.size(line.shape[-1])}"
        return f"gradc_seek {seek_of(s)} = gradc_seek_{stored(line.dtype)}({of}, first, last - 1);"

    def key_statements(self, part: Combine) -> list[str]:
        searches = self.row_searches(part)
        lines = [self.scribe.value(s, seek_of(s) if s in searches else "") for s in self.key_values(part)]
        return [*lines, *(f"{found_by(s)}[r] = {variable(s.name)};" for s in self.kept_searches)]

    @staticmethod
    def ahead(gathered: Sequence[Gathered]) -> list[str]:
        """The statements that ask for what a row gathers."""
        lines = list(dict.fromkeys(line for g in gathered for line in g.lines))
        for g in gathered:
            if g.elements.isdigit():
                steps = range(0, int(g.elements), g.step)
                lines += [f"__builtin_prefetch({g.buffer} + {g.at}{f' + {e}' if e else ''});" for e in steps]
            else:
                loop = f"for (i64 e = 0; e < {g.elements}; e += {g.step})"
                lines.append(f"{loop} __builtin_prefetch({g.buffer} + {g.at} + e);")
        return lines

    @property
    def mapping(self) -> str:
        """How rows are given to tasks: the template of the stage that visits them."""
        if self.is_map:
            return "map"
        if self.lanes:
            return "lanes"
        return "interchanged" if self.interchanged else self.order_name

    @property
    def member_axes(self) -> list[Axis]:
        """The axes of the rows that are combined into the elements of an owner, short ones innermost."""
        return sorted(self.rest_axes, key=lambda a: isinstance(a[1], int) and a[1] <= TAPS)

    def chunk_bounds(self, named: dict[str, Size]) -> list[Bound]:
        """The bounds of which the largest is the rows per task, or owners: expressions of a few sizes, which get names,
        so that they are as short for sizes that are long themselves.

        :param named: to which those sizes are added.
        """

        def short(name: str, value: Size) -> Size:
            if isinstance(value, int):
                return value
            named[name] = value
            return symbol(name)

        owners, members = (product(n for _, n in axes) for axes in (self.kept_axes, self.member_axes))
        if self.interchanged:
            return [interchanged_bound(short("owners", owners), short("cols", self.k.col_count))]
        if self.order == "by owner":
            return task_bounds(short("owners", owners), short("combined", members * self.k.col_count))
        private = [product(self.types[b].shape) for b, how in self.strategy_of.items() if how.partials]
        private = [short(f"size{i}", n) for i, n in enumerate(private)]
        return task_bounds(short("rows", self.k.row_count), short("cols", self.k.col_count), private)

    def counts(self) -> dict[str, Size]:
        """The sizes that the stages name."""
        sizes: dict[str, Size] = {"rows": self.k.row_count, "cols": self.k.col_count}
        if self.order == "by owner":
            sizes["owners"] = product(n for _, n in self.kept_axes)
        if self.order == "by key":
            sizes["keys"] = self.key_count(self.parts[self.k.order])
        return sizes

    def launches(self) -> list[str]:
        """The statements that run the stages, one after another."""
        sort, tasks = [], "chunks"
        if self.order == "by key":
            tasks = f"gradc_chunks({'rows' if self.visits_all_rows else 'start[keys]'}, chunk)"
            sort = [self.launch("key", "gradc_chunks(rows, GRADC_KEY_ROWS)")]
            sort.append("gradc_sort(ctx, key, rows, keys, start, order, sorting);")
            sort = [self.launch("starts", "1")] if self.starts else sort
        elif self.is_map:
            tasks = "gradc_chunks(rows, chunk) * gradc_chunks(cols, GRADC_STRIP)"
        elif self.lanes:
            outer = size(product(n for _, n in self.k.rows[:-1]))
            tasks = f"{grouped(outer)} * gradc_chunks({self.lanes.size}, GRADC_LANES)"
        folds = [
            self.launch(f"fold{a.number}", f"gradc_chunks({a.size}, GRADC_FOLD)")
            for a in map(self.accum, self.k.accums)
            if a.strategy.partials
        ]
        finish = [self.launch("finish", "gradc_chunks(keys, GRADC_SEGMENTS)")] if self.order == "by key" else []
        return [*sort, self.launch("rows", tasks), *folds, *finish]

    def launch(self, stage: str, tasks: str) -> str:
        return f"ctx->parallel_for(ctx, {tasks}, {self.k.name}_{stage}, A);"

    def streamed_array(self, s: Stmt, number: int) -> StreamedArray:
        type_ = self.types[s.buffer]
        ctype = stored(type_.dtype)
        row = f"{grouped(size(self.k.cols[-1][1]))} * (i64)sizeof({ctype})"
        return StreamedArray(f"stream{number}", ctype, size(type_.count), row)

    def workspace(self) -> list[LocalArray]:
        """What the stages of a kernel hand to one another."""
        arrays = []
        if self.starts:
            arrays = [LocalArray("start", "i32", "keys + 2")]
        elif self.order == "by key":
            arrays = [
                LocalArray("key", "i32", "rows"),
                LocalArray("order", "i32", "rows"),
                LocalArray("start", "i32", "keys + 2"),
                LocalArray("sorting", "char", "gradc_sort_bytes(rows, keys)"),
                *(LocalArray(found_by(s), "i64", "rows") for s in self.kept_searches),
            ]
        for a in map(self.accum, self.k.accums):
            if a.strategy.visits == "by key":
                count = f"2 * chunks * {a.inner}"
            elif a.strategy.partials:
                count = f"chunks * {a.size}"
            elif a.wide_accumulator and not self.interchanged:
                count = f"chunks * {a.owned_size}"
            else:
                continue
            arrays.append(LocalArray(f"partial{a.number}", a.partial, count))
        return arrays

    def thread_memory(self) -> list[LocalArray]:
        """What a task keeps: cached values of a row, blocks and rows to be streamed, sums of a few rows, wide sums of a
        chunk.
        """
        accums = list(map(self.accum, self.k.accums))
        types = [self.k.stmts[v].dtype or F32 for v in self.row_cache]
        arrays = [LocalArray(f"cache{i}", carrier(dtype), "cols") for i, dtype in enumerate(types)]
        for s, i in self.stream_number.items():
            streamed = self.streamed_array(s, i)
            count = f"({streamed.row} >= GRADC_STREAMED_ROW ? GRADC_BLOCK : 0)"
            arrays.append(LocalArray(f"staged{i}", streamed.ctype, count))
        arrays += [
            LocalArray(f"block{a.number}", a.ctype, a.block_size) for a in accums if a.block_sums and not self.run
        ]
        arrays += [LocalArray(f"row_a{a.number}", a.ctype, a.inner) for a in accums if a.streamed]
        if self.interchanged:
            owned = [a for a in accums if a.wide_accumulator]
            arrays += [LocalArray(f"wide{a.number}", a.partial, f"chunk * {a.owned_size}") for a in owned]
        return arrays
