"""What the templates of ``templates/cuda/kernel`` are given of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ...analysis.strategies import Strategy
from ...ir.types import DType
from ..expr import to_memory


@dataclass(frozen=True)
class Value:
    """A variable of a generated function.

    :param name: of the variable.
    :param ctype: its C type.
    """

    name: str
    ctype: str


@dataclass(frozen=True)
class VectorAccess:
    """A thread's columns of one row, moved between memory and an array of registers at once.

    :param name: the array.
    :param ctype: of an element, as it is stored.
    :param address: of the row's first column.
    :param guard: ``if (v3) ``, or nothing.
    :param function: what moves them.
    :param first: whether the load begins before the row's first phase.
    """

    name: str
    ctype: str
    address: str
    guard: str = ""
    function: str = "gradc_get"
    first: bool = False


@dataclass(frozen=True)
class Reduction:
    """A reduction over the columns of a row.

    :param start: declares a thread's partial result.
    :param lines: combine a column's value with it.
    :param result: combines the threads of a task.
    :param part: the partial result's name.
    :param ctype: its type.
    :param join: the struct whose ``join`` combines two of them.
    :param strips: the array of the strips' partial results, where rows are split.
    :param shared: the shared memory that warps combine through; 0: a task is no more than a warp.
    :param terms: the array of a thread's VEC columns, where they are added up before they meet the partial result.
    :param before: a declaration before the columns whose loads are under way together.
    :param after: a statement behind them.
    :param absent: what stands for columns that are not there.
    :param around: what opens a walk over the columns, and closes it.
    """

    start: str
    lines: tuple[str, ...]
    result: str
    part: str
    ctype: str
    join: str
    strips: str
    shared: str
    terms: str = ""
    before: str = ""
    after: str = ""
    absent: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def declared_terms(self) -> str:
        """Declares a thread's terms; columns that are not there add nothing."""
        return f"f32 {self.terms}[VEC] = {{}};"

    @property
    def add_terms(self) -> str:
        """Adds them to the partial result."""
        return f"gradc_add_all({self.part}, {self.terms});"


@dataclass(frozen=True)
class PassView:
    """A phase: statements of the row, then a walk over its columns.

    :param comment: what it computes, as a C comment.
    :param row: statements of the row, in order; ``values`` those that name a value, ``effects`` the others.
    :param body: statements of a column.
    :param columns: whether there is a walk over the columns.
    :param scans: declarations of what its scans carry from strip to strip.
    :param reductions: what the walk reduces.
    :param gets: loads of a thread's columns before their statements.
    :param puts: stores behind them.
    """

    comment: str
    row: tuple[str, ...]
    values: tuple[str, ...]
    effects: tuple[str, ...]
    body: tuple[str, ...]
    columns: bool
    scans: tuple[str, ...]
    reductions: tuple[Reduction, ...]
    gets: tuple[VectorAccess, ...]
    puts: tuple[VectorAccess, ...]

    @property
    def loads_first(self) -> tuple[VectorAccess, ...]:
        """Its loads that begin before the row's first phase."""
        return tuple(a for a in self.gets if a.first)

    @property
    def loads(self) -> tuple[VectorAccess, ...]:
        """Its other loads."""
        return tuple(a for a in self.gets if not a.first)

    @property
    def text(self) -> str:
        """All of it, to look for names in."""
        moved = [part for a in (*self.gets, *self.puts) for part in (a.address, a.guard)]
        reduced = [part for r in self.reductions for part in (r.start, r.result)]
        return "\n".join((*self.row, *self.scans, *self.body, *moved, *reduced))


@dataclass(frozen=True)
class OwnedElements:
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


@dataclass(frozen=True)
class AccumView:
    """An accum: a result that rows are combined into.

    :param number: of the accum in the kernel.
    :param buffer: the result.
    :param dtype: of its elements.
    :param ctype: their C type in memory.
    :param combine: ``sum``, ``prod``, ``max`` or ``min``.
    :param strategy: how rows meet.
    :param ordered: whether they are combined in a fixed order.
    :param neutral: what a combine of nothing gives, as C.
    :param sum: C type of a combined value in memory.
    :param accumulator: C type that many values are combined in.
    :param partial: C type of partial results in the workspace.
    :param register: C type of partial results in registers.
    :param size: elements of the result; ``outer`` times ``inner``, those of a row.
    :param in_workspace: whether chunks have partial results in the workspace.
    :param wide_accumulator: whether an owned result is added up in wider elements beside it.
    :param f32_staged: whether a 16-bit result is added up in f32 in the workspace and rounded at the end.
    :param additions: values that one element may be the sum of, at most.
    :param target: where sums are finished: the result, or its f32 staging.
    :param target_bytes: of an element there.
    :param over: behind a scale, how far values may be above the largest that was looked for, as C.
    :param interleaved: places on an axis of the result whose sums are innermost, if not 0; ``plane``: elements of the
        axes behind it.
    :param kept_row: address of a kept row in the result, where it is owned.
    :param owned: its elements, likewise.
    :param shared_sums: of a thread's sums, the first, that are in shared memory.
    :param shared_before: those of the accums before it.
    """

    number: int
    buffer: str
    dtype: DType
    ctype: str
    combine: str
    strategy: Strategy
    ordered: bool
    neutral: str
    sum: str
    accumulator: str
    partial: str
    register: str
    size: str
    outer: str
    inner: str
    in_workspace: bool
    wide_accumulator: bool
    f32_staged: bool
    additions: str
    target: str
    target_bytes: int
    over: str = ""
    interleaved: int = 0
    plane: str = ""
    kept_row: str = ""
    owned: OwnedElements | None = None
    shared_sums: int = 0
    shared_before: int = 0

    @property
    def running(self) -> str:
        """The registers, or the row in memory, that values are being combined in."""
        return f"a{self.number}"

    def empty(self, target: str, ctype: str) -> str:
        """A statement: ``target``, of this type, becomes the neutral element."""
        return f"gradc_clear({target});" if ctype == "sum_f32" else f"{target} = {self.neutral};"

    def join(self, target: str, value: str) -> str:
        """A statement: ``target`` is combined with a value."""
        if self.combine in ("sum", "prod"):
            return f"{'gradc_add' if self.combine == 'sum' else 'gradc_times'}({target}, {value});"
        return f"{target} = {self.combine}imum_{self.sum}({target}, {value});"

    def result(self, total: str, ctype: str) -> str:
        """An expression: the value of a combined element of this type."""
        return f"gradc_value({total})" if ctype == "sum_f32" else total

    def final(self, total: str, ctype: str) -> str:
        """An expression: the same, as it is stored in the result."""
        return to_memory(self.dtype, self.result(total, ctype))

    @property
    def settled(self) -> str:
        """Element ``at + j`` of the result, of its sum in fixed point or in f32."""
        flags = f"any_odd ? gradc_odd_flags(odd{self.number}, at + j) : 0u"
        return self.final(f"gradc_fixed_value(sums[j], {flags}, scale)" if self.fixed else "sums[j]", self.sum)

    @property
    def fixed(self) -> bool:
        """Whether it is added up in fixed point."""
        return self.strategy.atomics == "fixed point"

    @property
    def kept_text(self) -> str:
        """What names the axes of a kept row."""
        owned = (*self.owned.axes, self.owned.element, self.owned.partial) if self.owned is not None else ()
        return "\n".join((self.kept_row, *owned))

    @property
    def segment_row(self) -> str:
        """Address of the row of the result that a segment adds up to."""
        return f"{self.buffer} + segment * ({self.inner})"

    def word(self, vec: int) -> int:
        """Bytes that ``vec`` neighbouring elements of the target are moved in."""
        return min(vec * self.target_bytes, 16)


@dataclass(frozen=True)
class Tile:
    """A load that is turned in shared memory.

    :param name: of the array, :param ctype: of its elements.
    :param element: what is loaded.
    """

    name: str
    ctype: str
    element: str


@dataclass(frozen=True)
class TurnedTiles:
    """A map whose loads and stores lie together along different axes.

    :param side: of a tile.
    :param planes: how many tiles lie behind each other.
    :param plane_axes: declare the axes of plane number ``plane``.
    :param lane, other: names of the axis along which stores lie together, and of that of the turned loads.
    :param lane_size, other_size: their extents.
    :param tiles: the turned loads.
    :param body: statements of an element.
    """

    side: int
    planes: str
    plane_axes: tuple[str, ...]
    lane: str
    other: str
    lane_size: str
    other_size: str
    tiles: tuple[Tile, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class SortKey:
    """The key that a row is sorted by.

    :param lines: statements that compute it, the row's axes first.
    :param value: the key.
    :param rows: how many rows have one.
    :param array: of the keys in their order.
    """

    lines: tuple[str, ...]
    value: str
    rows: str = "rows"
    array: str = "sorted_keys"


@dataclass(frozen=True)
class SharedTable:
    """Partial results of a block in its shared memory: what rows bring.

    :param accum: what they are of.
    :param rows: staged at once.
    :param warps: of a block.
    :param ctype: of a staged value.
    :param lines: statements that compute the value of row r, column c.
    :param value: that value.
    :param key: the row of the table that it is added to; -1 where it is masked.
    """

    accum: AccumView
    rows: int
    warps: int
    ctype: str
    lines: tuple[str, ...]
    value: str
    key: SortKey

    def key_row(self, base: str) -> list[str]:
        """The statements that compute the key of the row ``base + threadIdx.x``."""
        row = f"const ix r = gradc_min({base} + (ix)threadIdx.x, until - 1);"
        return [row, *self.key.lines]


@dataclass(frozen=True)
class ScanView:
    """The scan for the largest values that are added up in fixed point.

    :param sums: that are.
    :param passes: the phases, with nothing that is written.
    :param row_axes: declare the axes of row ``r``.
    """

    sums: tuple[AccumView, ...]
    passes: tuple[PassView, ...]
    row_axes: tuple[str, ...]


@dataclass(frozen=True)
class SplitPhase:
    """One phase of split rows.

    :param phase: its statements.
    :param earlier: the phases before it, whose reductions are combined from all strips.
    :param row_axes: declare the axes of row ``r``.
    :param needed: statements of all these rows that it needs.
    """

    phase: PassView
    earlier: tuple[PassView, ...]
    row_axes: tuple[str, ...]
    needed: frozenset[str]


@dataclass(frozen=True)
class Visit:
    """The row at a position.

    :param row: declares its number ``r``, if anything needs it.
    :param axes: declare its axes.
    """

    row: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class PrefetchedRows:
    """The rows of a tiled kernel whose loads are under way together.

    :param count: of them.
    :param kept: values of each row that are kept for its columns.
    :param again: constants of the row, which are computed again instead.
    :param row_values: statements of the row that its loads, or what is kept, need.
    :param arrays: integers that are kept of each.
    :param load_lines: begin the loads of row u.
    :param work_lines: begin the work on row u.
    """

    count: int
    kept: tuple[Value, ...]
    again: tuple[str, ...]
    row_values: tuple[str, ...]
    arrays: tuple[str, ...]
    load_lines: tuple[str, ...]
    work_lines: tuple[str, ...]


@dataclass(frozen=True)
class KernelView:
    """A kernel's row program.

    :param threads: of a block.
    :param vec: neighbouring columns of a thread.
    :param even_cols: whether a thread's columns are all there or none, whatever the sizes.
    :param one_strip: whether a row of a map is one strip, whatever the sizes.
    :param iterations: of the threads of a task over the columns of a row, where a thread has a sum for each; else 0.
    :param unroll: times round the columns of a whole row whose loads are under way together; 0: each has its own.
    :param whole: whether those are all of the row.
    :param full: whether each thread has all of its columns of such a row.
    :param together: whether that is so of all loads of a phase.
    :param kept: values of the row that stay in registers between its phases.
    :param column_loop: the template that opens a loop over columns.
    :param sums: where sums are on their way: ``registers`` or ``memory``.
    :param order_template: the template that goes through a chunk in the kernel's order.
    :param visit_template: the template that goes through rows.
    :param begin_segment: the template that looks at each position's key, or nothing.
    :param task_count: tasks of the rows.
    :param sharing: tasks of a block that share a chunk, whose rows they take in turn.
    :param syncs: whether what a row adds the next may add to.
    :param passes: the phases.
    :param row_axes: declare the axes of row ``r``.
    :param accums: the results that rows are combined into.
    :param visit: of a row at a position.
    :param positions: how many positions a segmented order visits.
    :param kept_axes: declare the axes of a kept row, from its number ``q``.
    :param rest_count: rows that meet in a kept row.
    :param group: rows whose loads are under way together; tiled kernels alone.
    """

    threads: int
    vec: int
    even_cols: bool
    one_strip: bool
    iterations: int
    unroll: int
    whole: bool
    full: bool
    together: bool
    kept: tuple[Value, ...]
    column_loop: str
    sums: str
    order_template: str
    visit_template: str
    begin_segment: str
    task_count: str
    sharing: int
    syncs: bool
    passes: tuple[PassView, ...]
    row_axes: tuple[str, ...]
    accums: tuple[AccumView, ...]
    visit: Visit
    positions: str
    kept_axes: tuple[str, ...]
    rest_count: str
    group: PrefetchedRows | None

    @property
    def shares_sums(self) -> bool:
        """Whether some of the sums that a thread keeps are in shared memory."""
        return any(a.shared_sums for a in self.accums)

    @property
    def row_step(self) -> str:
        """`` * SHARING`` behind a number of rows that a task goes through, if it takes turns with others."""
        return " * SHARING" if self.sharing > 1 else ""

    @property
    def segmented(self) -> tuple[AccumView, ...]:
        """Results into whose rows segments are combined: rows of one key."""
        return tuple(a for a in self.accums if a.strategy.visits == "by key")

    @property
    def owned(self) -> tuple[AccumView, ...]:
        """Results of which each kept row owns a part."""
        return tuple(a for a in self.accums if a.strategy.visits == "by owner")

    @property
    def privatized(self) -> tuple[AccumView, ...]:
        """Results of which each chunk has a partial one."""
        return tuple(a for a in self.accums if a.strategy.partials)


@dataclass(frozen=True)
class FunctionView:
    """A function's head, for ``function.cu.j2``.

    :param name: of the function.
    :param purpose: what it does.
    :param threads: of a block, at most.
    :param min_blocks: that a multiprocessor is to hold.
    :param buffers: the parameters of the kernel's buffers.
    :param dims: the parameters of its dims, a comma behind each.
    :param declarations: that the body needs.
    :param body: its text.
    """

    name: str
    purpose: str
    threads: int
    min_blocks: int
    buffers: tuple[str, ...]
    dims: str
    declarations: tuple[str, ...]
    body: str
