"""A kernel as CUDA functions: what :mod:`gradc.codegen.cuda.tasks` decides, in the templates of ``cuda/kernel``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...ir.dims import Size, ceildiv, maximum, product
from ...ir.kernel import Kernel
from ...ir.statement import Axis, Stmt
from ...ir.types import Type
from ...passes.reductions.chunks import GPU_FOLDED, fold_lanes
from ...passes.reductions.combine import sort_groups
from ...process.forks import cached_property
from ..declarations import Declaration, used
from ..expr import carrier, loaded, stored, variable
from ..indent import indented
from ..index import size
from ..jinja import render
from .columns import OFFSETS
from .index_bound import index_bounds
from .kernel import CudaKernel, Stage
from .mapping import THREADS
from .mappings.column_strips import STRIP
from .mappings.shared_table import STAGED_ROWS, WARPS
from .mappings.tiled import full_width, kept_values
from .mappings.tiled_transpose import SIDE, TiledTranspose
from .passes import PassWriter
from .views import (
    AccumView,
    FunctionView,
    KernelView,
    PassView,
    PrefetchedRows,
    ScanView,
    SharedTable,
    SortKey,
    SplitPhase,
    Tile,
    TurnedTiles,
    Value,
    Visit,
)
from .workspace import axis_declarations, declared, size_declarations, strip_arrays, workspace

FOLDER = "cuda/kernel"
EACH, TIMES = 4, 4
"""Neighbouring elements of a result that a thread clears or finishes, and how many such."""
RESIDENT = 1024
"""Threads of a multiprocessor, at least, that add up columns: with 128 multiprocessors or more all of GPU_WORKERS are
resident at once, as a second wave of a few blocks would take as long as the first.
"""
CLEARED = 8
"""Vectors that a thread stores into rows that nobody hits: enough of them are under way together that the first
positions of rows, which must be loaded before, delay none.
"""
PURPOSE = {
    "clear": "The neutral element in a result that atomics combine into",
    "clear_fixed": "Zeros in sums in fixed point",
    "key": "The key of each row: the row of the result that it adds to",
    "scan": "The largest |value| that is added up in fixed point",
    "column_strips": "Rows, in strips: a task has a strip of one row's columns",
    "tiled": "Rows, tiled: a task has a chunk of rows x WIDTH * VEC columns",
    "shared_table": "Rows, a table in shared memory: a block has a chunk of rows x WIDTH columns",
    "warp_segmented_scan": "Rows, a warp segmented scan: each lane of a task has a row",
    "tiled_transpose": "Tiles of two axes: loads lie together along another axis than stores",
    "thread_per_row": "Rows side by side: neighbouring threads have neighbouring rows",
    "whole_rows": "Whole rows: a task goes through those of a chunk",
    "split_rows": "One phase of few long rows: a task has a strip of a row",
    "fold": "The chunks' partial results, added up",
    "tree": "Segments of many chunks: carry rows added up in groups of GRADC_TREE",
    "finish": "Segments of more than one chunk, their carry rows added up; rows that nobody hits",
    "settle": "Sums in their own type become elements of the result",
    "settle_interleaved": "Sums in their own type become elements of the result, which lie in another order",
}
"""What each template's function does, for the comment above it."""


@dataclass(frozen=True)
class Function:
    """A function of a kernel.

    :param stage: its place among the launches.
    :param text: its CUDA.
    """

    stage: Stage
    text: str


class Writer(PassWriter):
    """A kernel's functions."""

    def __init__(self, kernel: Kernel, types: Mapping[str, Type]):
        super().__init__(kernel, types)
        self.dims = kernel.dims(types)
        self.passes = tuple(self.one_pass(p, i) for i, p in enumerate(self.phases))
        self.fixed = [a for a in self.views.values() if a.strategy.atomics == "fixed point"]
        looked_at = self.looked_at.passes if self.fixed else ()
        self.scan = tuple(self.one_pass(p, i, scan=True) for i, p in enumerate(looked_at))
        self.part = self.parts[kernel.order] if self.order == "by key" else None
        self.splits = self.can_split_rows()

    def made(self) -> CudaKernel:
        """The functions, and what a launch must know of them."""
        k = self.k
        functions = [*self.before_rows(), self.rows(), *self.after_rows()]
        partials = tuple(self.scratch_size(s) for s in self.combined if self.in_workspace(s))
        folded = [self.types[a.buffer] for a in self.view.privatized]
        private: Size = 0
        for count, _ in partials:
            private = private + count
        return CudaKernel(
            name=k.name,
            mapping=self.mapping.name,
            reason=self.mapping.reason,
            text="\n".join([self.comment(), *(f.text for f in functions)]),
            buffers=k.buffers,
            dims=self.dims,
            stages=tuple(f.stage for f in functions),
            threads=self.threads,
            rows=k.row_count,
            columns=k.col_count,
            chunked=product(n for _, n in self.kept_axes) if self.order == "by owner" else k.row_count,
            by_chunk=self.order != "by owner" and bool(self.ordered),
            row_sums=self.row_task is not None and self.register_accumulators and self.width >= THREADS,
            sharing=self.sharing,
            most_chunks=GPU_FOLDED * self.threads // max((fold_lanes(a.count) for a in folded), default=1),
            tile=self.width * self.vec if self.tiled or self.shared else 0,
            warp_scan=self.warp_scan,
            private=private,
            keys=self.keys,
            masked=self.part is not None and bool(self.part.stmt.where),
            groups=self.groups,
            scratch=partials,
            fixed=tuple(self.types[a.buffer].count for a in self.fixed),
            f32_staged=tuple(self.types[s.buffer].count for s in self.combined if self.f32_staged(s)),
            split_rows=tuple(k.row_count for _ in self.strips_of_reductions),
            strips=self.strips,
            turned=self.turn.extents if self.turn is not None else (),
            checks=any(s.op == "check" for s in k.body),
            shared=self.table_bytes() if self.shared else self.shared_sum_bytes(),
            exp_sums=bool(self.exp_sums),
            index_bounds=index_bounds(k, self.types),
            sites=(),
        )

    # -- functions -----------------------------------------------------------------------------------------------------

    def function(
        self,
        suffix: str,
        kind: str,
        template: str,
        tasks: Size | None,
        width: int,
        lanes: int = 0,
        setup: Sequence[Declaration] = (),
        vec: int = 0,
        **given: object,
    ) -> Function:
        """A function made of the template of its body and of the declarations that this needs.

        :param width: threads of a task.
        :param lanes: of them that share out columns, if not all.
        :param setup: declarations of this function alone.
        :param vec: columns of a thread at once, if not as many as of the rows.
        :param given: records that the template names.
        """
        body = render(f"{FOLDER}/{template}.cu.j2", k=self.view, **given)
        name = f"{self.k.name}_{suffix}"
        view = FunctionView(
            name=name,
            purpose=PURPOSE["fold" if kind == "fold" else template],
            threads=self.threads,
            min_blocks=max(1, (RESIDENT if kind == "rows" and self.sums_columns else 512) // self.threads),
            buffers=self.parameters,
            dims="".join(f"const i64 dim{i}, " for i in range(len(self.dims))),
            declarations=tuple(used([*self.declarations(lanes or width, vec or self.vec), *setup], body)),
            body=body,
        )
        return Function(Stage(name, kind, tasks, width), indented(render(f"{FOLDER}/function.cu.j2", f=view)))

    def before_rows(self) -> Iterator[Function]:
        """What is done before rows are visited: results cleared, keys computed, the largest values looked for."""
        for a in reversed([a for a in self.views.values() if not a.ordered]):
            yield self.of_elements("clear", "clear_fixed" if a in self.fixed else "clear", a)
        if self.part is not None:
            count = product(n for _, n in self.sorted_axes)
            yield self.function("key", "key", "key", count, 1, key=self.sort_key("element"))
        if self.scan:
            scan = ScanView(tuple(self.fixed), self.scan, self.row_axes(self.scan))
            yield self.function("scan", "scan", "scan", None, self.width, setup=self.whole_rows, scan=scan)

    def rows(self) -> Function:
        """The row program."""
        scales = [
            declared(f"const int scale{a.number} = gradc_fixed_scale(largest{a.number}[0], {a.additions}){a.over};")
            for a in self.fixed
        ]
        if self.shared:
            return self.function("rows", "rows", "shared_table", None, self.threads, self.width, s=self.table())
        tiles = self.turned_tiles(self.turn) if self.turn is not None else None
        whole = (
            self.whole_rows if self.mapping.template in ("whole_rows", "warp_segmented_scan", "thread_per_row") else []
        )
        setup = [*scales, *([] if self.across or not whole else [self.chunk_index]), *whole]
        return self.function("rows", "rows", self.mapping.template, None, self.width, setup=setup, tiles=tiles)

    def after_rows(self) -> Iterator[Function]:
        """What finishes the results: partial results added up, sums stored in their own types."""
        for a in self.view.privatized:
            count = self.types[a.buffer].count
            elements = fold_lanes(count)
            walkers = self.threads // elements
            yield self.function(f"fold{a.number}", "fold", a.strategy.fold, count, walkers, a=a, elements=elements)
        if self.keys is not None:
            width, vec, times = self.threads_of_result()
            each, beside = ceildiv(CLEARED, times), max(32 // width, 1)
            tasks = ceildiv(self.keys, each * beside) * beside
            yield self.function("tree", "tree", "tree", None, width, vec=vec)
            yield self.function("finish", "finish", "finish", tasks, width, vec=vec, each=each, beside=beside)
        if self.splits:
            yield from self.split_rows()
        for a in self.views.values():
            if a in self.fixed or a.f32_staged:
                yield self.of_elements("settle", "settle_interleaved" if a.interleaved else "settle", a)

    def of_elements(self, kind: str, template: str, a: AccumView) -> Function:
        """What is done to each element of a result, whatever it was made from."""
        each = {"clear_fixed": 2, "settle_interleaved": a.interleaved}.get(template, EACH)  # 2 sums: 16 bytes
        times = EACH * TIMES // each
        count = ceildiv(maximum(self.types[a.buffer].count, 1), each * times)
        return self.function(f"{kind}{a.number}", kind, template, count, 1, a=a, each=each, times=times)

    def split_rows(self) -> Iterator[Function]:
        """A function for each phase of few long rows."""
        for i, p in enumerate(self.passes):
            setup = [
                declared("const ix strips = gradc_chunks(cols, chunk);"),
                declared(f"const ix r = {'task / strips' if p.columns else 'task'};"),
                declared(f"const ix strip = {'task % strips' if p.columns else '0'};"),
                *strip_arrays(self.strips_of_reductions),
            ]
            values = used([declared(v) for q in self.passes[: i + 1] for v in q.values], self.part_text(i))
            phase = SplitPhase(p, self.passes[:i], self.row_axes(self.passes[: i + 1]), frozenset(values))
            kind = "part" if p.columns else "last"
            yield self.function(f"part{i}", kind, "split_rows", None, self.width, setup=setup, split=phase)

    def part_text(self, number: int) -> str:
        """The text of a phase of split rows, to look for names in, with the reductions of those before it."""
        before = [line for q in self.passes[:number] for r in q.reductions for line in (r.start, r.result)]
        own = self.passes[number]
        return "\n".join([*before, own.text, *own.effects])

    # -- declarations --------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The kernel's buffers as parameters of its functions."""
        return tuple(
            f"{'' if b in self.k.writes else 'const '}{stored(self.types[b].dtype)}"
            f" *{'__restrict__ ' if self.alone(b) else ''}const {b}"
            for b in self.k.buffers
        )

    def declarations(self, width: int, vec: int) -> list[Declaration]:
        """All that a function may need before its body, in order."""
        kept = product(n for _, n in self.kept_axes) if self.order == "by owner" else None
        per_chunk = [self.scratch_size(s)[0] if self.in_workspace(s) else 0 for s in self.combined]
        arrays = workspace(self.view.accums, per_chunk, self.groups if self.part is not None else None)
        conditions = "".join(f" && {c}" for c in self.vector_conditions)
        even = "true" if self.even_cols else "cols % VEC == 0"
        exchanged, slots = max(map(len, self.together), default=0), "gradc_exchanged<EXCHANGED>::SLOTS"
        return [
            Declaration("WIDTH", f"enum {{ WIDTH = {width} }}; /* threads of a task */"),
            Declaration("SHARING", f"enum {{ SHARING = {self.sharing} }}; /* tasks of a block that share a chunk */"),
            Declaration("VEC", f"enum {{ VEC = {vec} }}; /* neighbouring columns of a thread */"),
            *size_declarations(self.dims, self.k.row_count, self.k.col_count, kept, self.keys),
            *arrays,
            declared("const ix element = ((ix)first_block + (ix)blockIdx.x) * (ix)blockDim.x + (ix)threadIdx.x;"),
            *self.place_of_thread(),
            declared(f"const bool even_cols = {even};"),
            declared("const ix col_step = even_cols ? 1 : WIDTH;"),
            declared("const ix lane_col = even_cols ? lane * VEC : lane;"),
            declared(f"const bool vectorized = even_cols{conditions};"),
            Declaration("EXCHANGED", f"enum {{ EXCHANGED = {exchanged} }}; /* values of a lane at once */"),
            Declaration("exchanged", f"__shared__ gradc_addend exchanged[{self.threads // 32} * {slots}];"),
            Declaration("shared", f"__shared__ __align__(16) char shared[{self.threads if self.across else 32} * 16];"),
        ]

    def place_of_thread(self) -> list[Declaration]:
        """A thread's task, and its number in the task."""
        if self.across:
            rows = self.threads // self.width
            return [
                declared(f"const ix task = ((ix)first_block + (ix)blockIdx.x) * {rows} + (ix)(threadIdx.x % {rows});"),
                declared(f"const int lane = (int)(threadIdx.x / {rows});"),
            ]
        return [
            declared("const ix task = element / WIDTH;"),
            declared("const int lane = (int)(threadIdx.x % WIDTH);"),
        ]

    @property
    def chunk_index(self) -> Declaration:
        """The chunk of a task that goes through whole rows."""
        return declared(f"const ix chunk_index = task{' / SHARING' if self.sharing > 1 else ''};")

    @property
    def whole_rows(self) -> list[Declaration]:
        """The columns of a task that goes through whole rows."""
        return [declared("const ix first_col = 0;"), declared("const ix end_col = cols;")]

    @cached_property
    def vector_conditions(self) -> list[str]:
        """What a launch must find to move a thread's columns at once."""
        flushed = [a for s in self.combined if (a := self.flushed(s)) is not None and a.fits(self.vec)]
        rows = [*self.moved.values(), *flushed] if self.vec > 1 else []
        return list(dict.fromkeys(c for a in rows for c in a.conditions(self.vec)))

    @cached_property
    def strips_of_reductions(self) -> list[tuple[str, str]]:
        """Type and name of the arrays of strips' partial results, where rows may be split."""
        return [(r.ctype, r.strips) for p in self.passes for r in p.reductions] if self.splits else []

    # -- what templates are given --------------------------------------------------------------------------------------

    @cached_property
    def view(self) -> KernelView:
        """The row program, for its templates."""
        folder = f"{FOLDER}/{'registers' if self.register_accumulators else 'memory'}"
        sorts = self.order == "by key"
        text = "\n".join([p.text for p in self.passes] + [a.kept_text for a in self.views.values()])
        kept = used(axis_declarations(self.kept_axes, "q"), text)
        loop = (
            "scanned" if self.k.scans else "iterations" if self.iterations else "across" if self.across else "columns"
        )
        return KernelView(
            threads=self.threads,
            vec=self.vec,
            even_cols=self.even_cols,
            one_strip=isinstance(self.k.col_count, int) and self.k.col_count <= STRIP,
            iterations=self.iterations,
            unroll=self.unroll,
            whole=self.row_task is not None,
            full=self.row_task is not None and self.row_task.iterations * self.width * self.vec == self.k.col_count,
            together=self.row_task is None or self.row_task.together,
            kept=self.values_between_phases(),
            column_loop=f"{FOLDER}/loop_{loop}.cu.j2",
            sums="registers" if self.register_accumulators else "memory",
            order_template=f"{FOLDER}/order_{self.order_name}.cu.j2",
            visit_template=f"{FOLDER}/visit_{'prefetched' if self.tiled else 'each'}.cu.j2",
            begin_segment=f"{folder}/begin_segment.cu.j2" if sorts else "",
            task_count="gradc_max(chunks, 1)" if sorts else f"chunks{' * SHARING' if self.sharing > 1 else ''}",
            sharing=self.sharing,
            syncs=self.syncs,
            passes=self.passes,
            row_axes=self.row_axes(self.passes),
            accums=tuple(self.views.values()),
            visit=self.visit(),
            positions="rows" if self.visits_all_rows else "segment_start[keys]",
            kept_axes=tuple(kept),
            rest_count=size(product(n for _, n in self.rest_axes)),
            group=self.group() if self.tiled else None,
        )

    def values_between_phases(self) -> tuple[Value, ...]:
        """The values that stay in registers from one phase to the next."""
        names = self.row_task.kept if self.row_task is not None else ()
        dtypes = {name: self.k.stmts[name].dtype for name in names}
        return tuple(Value(variable(name), carrier(d)) for name, d in dtypes.items() if d is not None)

    @property
    def keys(self) -> Size | None:
        """Keys of the sort; None without one."""
        return self.key_count(self.part) if self.part is not None else None

    @property
    def syncs(self) -> bool:
        """Whether what the threads of a task add for a row others of them may add to for the next, or read."""
        in_memory = bool(self.ordered) and not (self.tiled or self.register_accumulators or self.warp_scan)
        return in_memory and not all(self.own(s) and not self.wide_accumulator(s) for s in self.ordered)

    def row_axes(self, passes: Sequence[PassView]) -> tuple[str, ...]:
        """The declarations of the axes of row ``r`` that passes need."""
        return tuple(used(axis_declarations(self.k.rows, "r"), "\n".join(p.text for p in passes)))

    @property
    def visited_axes(self) -> list[Declaration]:
        """The axes of row ``r`` of those that are visited: of an owner the rows that meet."""
        return axis_declarations(self.rest_axes if self.order == "by owner" else self.k.rows, "r")

    def row_at(self, position: str) -> str:
        """The row at a position of the visiting order."""
        return f"sorted_rows[{position}]" if self.order == "by key" else position

    def visit(self) -> Visit:
        """A row at position ``p``."""
        text = "\n".join(p.text for p in self.passes)
        row = declared(f"const ix r = {self.row_at('p')};")
        lines = used([row, *self.visited_axes], text)
        if lines[:1] == [row.line]:
            return Visit(row.line, tuple(lines[1:]))
        return Visit("", tuple(lines))

    @cached_property
    def group_sizes(self) -> Sequence[int]:
        """The sizes of the last row axes, where rows that differ in these alone are sorted as one."""
        return sort_groups(self.k, self.part, self.types) if self.part is not None else ()

    @property
    def groups(self) -> int:
        """Neighbouring rows that the sort takes as one."""
        return prod(self.group_sizes)

    @property
    def sorted_axes(self) -> Sequence[Axis]:
        """The row axes that the sort has."""
        return self.k.rows[: len(self.k.rows) - len(self.group_sizes)]

    def sort_key(self, row: str) -> SortKey:
        """The key of row number ``row`` of those that are sorted."""
        assert self.part is not None
        part = replace(self.part, leading=self.part.leading - len(self.group_sizes))
        lines = self.key_statements(part)
        masked, rows, array = (
            ("keys", "rows", "sorted_keys")
            if not self.group_sizes
            else (size(self.key_count(part)), size(product(n for _, n in self.sorted_axes)), "collapsed_keys")
        )
        value = self.key_expression(part, masked, OFFSETS)
        axes = used(axis_declarations(self.sorted_axes, row), "\n".join([*lines, value]))
        return SortKey((*axes, *lines), value, rows, array)

    def threads_of_result(self) -> tuple[int, int, int]:
        """(threads, columns of each at once, how often) for a row of the results that segments are combined into: no
        more than its elements, and few that are idle the last time.
        """
        counts = [product(self.types[a.buffer].shape[self.parts[a.buffer].leading :]) for a in self.view.segmented]
        known = [count for count in counts if isinstance(count, int)]
        if len(known) < len(counts):
            return self.width, self.vec, 1
        vec = self.vec
        while vec > max(known):
            vec //= 2
        width = full_width(-(-max(known) // vec), self.width)
        return width, vec, -(-max(known) // (width * vec))

    def table(self) -> SharedTable:
        """Of partial results in shared memory: what a row brings, and where it goes."""
        (s,), (p,) = self.k.accums, self.k.passes
        part = self.parts[s.buffer]
        key_lines, key = self.key_statements(part), self.key_expression(part, "-1", OFFSETS)
        key_axes = used(axis_declarations(self.k.rows, "r"), "\n".join([*key_lines, key]))
        lines, value = [self.scribe.value(v) for v in (*p.row, *p.body) if v.name], variable(s.args[0])
        axes = [*axis_declarations(self.k.rows, "r"), *axis_declarations(self.k.cols, "c")]
        return SharedTable(
            accum=self.views[s.buffer],
            rows=STAGED_ROWS,
            warps=WARPS,
            ctype=carrier(self.scribe.values[s.args[0]]),
            lines=(*used(axes, "\n".join([*lines, value])), *lines),
            value=value,
            key=SortKey((*key_axes, *key_lines), key),
        )

    def turned_tiles(self, turn: TiledTranspose) -> TurnedTiles:
        """The tiles of a map, and what is done to an element of them."""
        (p,) = self.k.passes
        tiles: list[Tile] = []
        body: list[str] = []
        for s in (*p.row, *p.body):
            if s not in turn.loads:
                body.append(self.scribe.value(s))
                continue
            assert s.dtype is not None
            tile = Tile(f"tile{len(tiles)}", stored(s.dtype), self.scribe.element(s.buffer, s.index))
            body.append(f"const {carrier(s.dtype)} {variable(s.name)} = {loaded(s.dtype, f'{tile.name}[beside][i]')};")
            tiles.append(tile)
        body += [line for s in p.roots for line in self.effect(s)]
        planes, other_size, lane_size = map(size, turn.extents)
        axes = axis_declarations(turn.planes, "plane")
        return TurnedTiles(
            side=SIDE,
            planes=planes,
            plane_axes=tuple(used(axes, "\n".join([*body, *(t.element for t in tiles)]))),
            lane=turn.lane[0],
            other=turn.other[0],
            lane_size=lane_size,
            other_size=other_size,
            tiles=tuple(tiles),
            body=tuple(body),
        )

    def table_bytes(self) -> int:
        """A sum for each column of a task in each row of the result; 0 where they are not in shared memory."""
        if not self.shared:
            return 0
        (s,) = self.k.accums
        keys = self.key_count(self.parts[s.buffer])
        assert isinstance(keys, int)
        return keys * self.width * (8 if self.accumulator(s) == "sum_f32" else self.sums(s).itemsize)

    def shared_sum_bytes(self) -> int:
        """A block's sums in shared memory that its threads have no registers for."""
        return 8 * self.row_task.shared_sums * self.width if self.row_task is not None else 0

    def group(self) -> PrefetchedRows:
        """The rows of a tiled kernel whose loads are under way together."""
        (p,), (view,) = self.k.passes, self.passes
        position = f"group + u{' * SHARING' if self.sharing > 1 else ''}"
        values = kept_values(self.facts)
        values += [
            s for s in p.row if s.name and s not in values and s.op not in ("const", "size") and self.needed_again(s)
        ]
        constants = [declared(self.scribe.value(s)) for s in p.row if s.op in ("const", "size")]
        work = "\n".join([*view.body, *(f"{a.address} {a.guard}" for a in view.puts)])
        again = used(constants, work)
        names = " ".join([variable(s.name) for s in values] + [a.address for a in view.gets])
        row_values = used([*map(declared, view.row)], names)
        moved = "\n".join([*row_values, names])
        work = "\n".join([*again, work])
        later = used([declared("const ix r = group_rows[u];"), *self.visited_axes], work)
        kept_row = any("group_rows" in line for line in later)
        row = declared(f"const ix r = {'group_rows[u] = ' if kept_row else ''}{self.row_at(position)};")
        load = used([row, *self.visited_axes], f"{moved} r" if kept_row else moved)
        if sorts := self.order == "by key":
            load.insert(1 if load[:1] == [row.line] else 0, "group_keys[u] = sorted_keys[group + u];")
        return PrefetchedRows(
            count=self.prefetch,
            kept=tuple(Value(variable(s.name), carrier(s.dtype)) for s in values if s.dtype is not None),
            again=tuple(again),
            row_values=tuple(row_values),
            arrays=(*(["group_rows"] if kept_row else []), *(["group_keys"] if sorts else [])),
            load_lines=tuple(load),
            work_lines=tuple(later),
        )

    def needed_again(self, s: Stmt) -> bool:
        """Whether a load or store that is not moved with its row's names it in its place."""
        row = self.k.passes[0]
        return any(
            s.name in t.uses
            and t.op in ("load", "store")
            and ((self.prefetch == 1 and self.vec == 1) or t.op == "store" or self.vector(t) is None)
            for t in (*row.body, *row.roots)
        )
