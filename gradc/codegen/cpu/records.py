"""What the templates of the CPU are handed: records of C text, and the sizes of what a kernel keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...analysis.strategies import Strategy
from ...targets.cpu import NARROW_RUN, WIDEST_RUN
from ..declarations import Declaration
from ..rows import LoopAxis
from .interior import Interior


def grouped(text: str) -> str:
    """A size as a factor of a product."""
    return text if text.startswith("(") or text.isidentifier() or text.isdigit() else f"({text})"


@dataclass(frozen=True)
class BufferField:
    """A buffer as a kernel's arguments hold it.

    :param name: the identifier of the user's name.
    :param ctype: the type of its elements in memory, ``const`` where the kernel only reads them.
    """

    name: str
    ctype: str


@dataclass(frozen=True)
class LocalArray:
    """An array in the workspace, or in the memory of the running thread.

    :param name: what it is called.
    :param ctype: the type of its elements.
    :param count: how many there are, as C.
    """

    name: str
    ctype: str
    count: str

    @property
    def bytes(self) -> str:
        """Its bytes, as C."""
        return f"{grouped(self.count)} * (i64)sizeof({self.ctype})"


@dataclass(frozen=True)
class Accum:
    """A result that rows are combined into.

    :param number: of the accum in its kernel.
    :param buffer: the result.
    :param ctype: the type of its elements in memory.
    :param strategy: how rows are combined.
    :param combine: the function that combines two values.
    :param partial: the type of a partial result.
    :param wide: the type in which partial results are combined.
    :param start: the element that changes nothing, :param wide_start: and in the wide type.
    :param size: elements of the result, as a factor in C.
    :param inner: elements of one row of it, likewise.
    :param extents: the extents of what one owner adds into, and :param owned_size: their product.
    :param owned_at: the place in the result of element ``z0, z1, ...`` of it, and :param partial_at: in a partial
        result.
    :param wide_accumulator: whether an owner adds into a wider row beside the result.
    :param block_sums: whether a few rows are added in f32 before they are added to the partial result or wider row, and
        :param block_size: elements of such a sum.
    :param streamed: whether rows of the result may be written by streaming stores.
    """

    number: int
    buffer: str
    ctype: str
    strategy: Strategy
    combine: str
    partial: str
    wide: str
    start: str
    wide_start: str
    size: str
    inner: str
    extents: tuple[str, ...]
    owned_size: str
    block_size: str
    owned_at: str
    partial_at: str
    wide_accumulator: bool
    block_sums: bool
    streamed: bool

    def combined(self, target: str, value: str) -> str:
        """``target`` combined with a value in the wide type, as a statement."""
        return combined(self.combine, self.wide, target, value)


def combined(combine: str, ctype: str, target: str, value: str) -> str:
    """``target`` combined with a value of a C type, as a statement."""
    if combine in ("sum", "prod"):
        return f"{target} {'+' if combine == 'sum' else '*'}= {value};"
    return f"{target} = {combine}imum_{ctype}({target}, {value});"


@dataclass(frozen=True)
class Accumulators:
    """Accumulators of a reduction, one for each column of a strip, and one for columns that fill no strip.

    :param ctype: their type, :param name: the array of them, and :param start: what they begin with, as C.
    """

    ctype: str
    name: str
    start: str


@dataclass(frozen=True)
class Reduction:
    """A reduction over the columns: that of a block of columns, merged into totals.

    :param totals: declarations before the columns.
    :param update: statements of one column, which has the accumulators ``[lane]``.
    :param merge: the statements at the end of a block.
    :param result: the statement behind the columns.
    :param lanes: the accumulators of a block.
    :param vectors: whether its loop may be one of vectors.
    :param fine: whether blocks are short.
    """

    totals: str
    update: str
    merge: str
    result: str
    lanes: tuple[Accumulators, ...] = ()
    vectors: bool = True
    fine: bool = False


@dataclass(frozen=True)
class StreamedArray(LocalArray):
    """An array that a store streams to.

    :param row: bytes that lie side by side in a row of the kernel, as C.
    """

    row: str


@dataclass(frozen=True)
class Strips:
    """A loop over columns strip by strip, each column of which has accumulators of its own: what is added to what does
    not depend on the vectors that a compiler makes.  The columns that fill no strip share one accumulator.

    :param widths: columns of a strip, the widest first: each as often as it fits.
    :param vector: columns that are computed at a time while the accumulators stay in registers, as C; "" leaves it to
        the compiler how many.
    :param rest: whether there may be columns behind the strips.
    """

    widths: tuple[int, ...]
    vector: str
    rest: bool

    @property
    def lanes(self) -> int:
        """Accumulators, beside the one that is shared."""
        return self.widths[0]


@dataclass(frozen=True)
class RunningValue:
    """What a scan keeps of the columns so far.

    :param name: of the variable, or of the array with one for each row of several side by side.
    :param ctype: its type.
    :param start: its value before the first column.
    """

    name: str
    ctype: str
    start: str

    @property
    def number(self) -> str:
        """Of the scan."""
        return self.name.lstrip("abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Scan:
    """A scan along the columns.

    :param running: what is kept of the columns so far.
    :param update: the statements of one column that take it further.
    :param value: the column's value, as C.
    """

    running: tuple[RunningValue, ...]
    update: tuple[str, ...]
    value: str


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
class StreamedStore:
    """A store by streaming stores, where its array is large enough: a block of columns is staged in thread memory.

    :param number: of the store in its kernel.
    :param ctype: the type of an element in memory.
    :param at: where the block goes, as C.
    """

    number: int
    ctype: str
    at: str


@dataclass(frozen=True)
class Prefetch:
    """What the next row reads, asked for while this one is computed.

    :param at: where a block of it begins.
    :param step: elements of a cache line.
    """

    at: str
    step: int


@dataclass(frozen=True)
class Unpacking:
    """Values of a block's columns that bytes have in parts.

    :param name: of the array that they are put into, :param ctype: and the type of its elements.
    :param per: parts of a byte.
    :param place: the variable of a byte's number.
    :param parts: the statements of each part.
    """

    name: str
    ctype: str
    per: int
    place: str
    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Gathered:
    """What a row reads at a place that its indices tell, asked for rows ahead.

    :param lines: the statements that compute the place, :param buffer: what is read there, :param at: and the place.
    :param elements: how many are asked for, :param step: and how many of them a cache line has.
    :param count: elements of the buffer.
    """

    lines: tuple[str, ...]
    buffer: str
    at: str
    elements: str
    step: int
    count: str


@dataclass(frozen=True)
class Columns:
    """A pass over the columns.

    :param outer: the loops around the innermost.
    :param axis: the variable of the innermost loop.
    :param first: its first column, :param last: and the one behind its last, as C.
    :param block: columns of a block, as C; "" where there are no blocks.
    :param running: what scans keep of the columns so far.
    :param reductions: what is reduced.
    :param scatters: what goes to places that the columns decide.
    :param stores: the streamed stores.
    :param prefetches: what is asked for.
    :param unpackings: what is unpacked before.
    :param pragma: what says that the innermost loop is one of vectors, or "".
    :param body: the statements of one column.
    :param poll: the statement at a block's end that leaves when the call is to end, or "".
    :param interior: the columns that a loop of their own takes, :param interior_body: and its statements.
    :param strips: how the columns' accumulators are gone through, or None if there are none.
    """

    outer: tuple[LoopAxis, ...]
    axis: str
    first: str
    last: str
    block: str
    running: tuple[RunningValue, ...]
    reductions: tuple[Reduction, ...]
    scatters: tuple[Scatter, ...]
    stores: tuple[StreamedStore, ...]
    prefetches: tuple[Prefetch, ...]
    unpackings: tuple[Unpacking, ...]
    pragma: str
    body: tuple[str, ...]
    poll: str
    interior: Interior | None
    interior_body: tuple[str, ...]
    strips: Strips | None

    @property
    def blocked(self) -> bool:
        """Whether there is a loop over blocks around the innermost."""
        return bool(self.block or self.prefetches or self.poll)


@dataclass(frozen=True)
class Lanes:
    """Rows that lie together in memory, scanned side by side.

    :param axis: the variable of the loop over them.
    :param size: how many there are, as C.
    :param column: the variable of the columns, and :param columns: their number.
    :param descending: whether columns are visited from the last to the first.
    :param running: the arrays of what scans keep.
    :param body: the statements of one row and column.
    """

    axis: str
    size: str
    column: str
    columns: str
    descending: bool
    running: tuple[RunningValue, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class RunSum:
    """A sum of a run's rows.

    :param ctype: its C type, :param name: the array of a block's columns.
    :param element: what a column of it is added up for, and :param wide: the element of a wider row that it is added
        to, where more rows may meet than those of one run, or "".
    """

    ctype: str
    name: str
    element: str
    wide: str


@dataclass(frozen=True)
class ByteFloats:
    """The floats of a block's columns that bytes are cast to.

    :param name: of their array.
    :param ctype: the C type of a byte, :param at: and where those of the block begin.
    """

    name: str
    ctype: str
    at: str


@dataclass(frozen=True)
class Run:
    """Rows that are added to one row of a result: sums of a block of columns are in registers for all of them.

    :param row: the statements of a row before its columns.
    :param where: what says that a row is added, as C, or "".
    :param outer: the loops around the innermost columns, :param axis: the variable of the innermost loop, :param last:
        and the column behind its last, as C.
    :param widths: columns of the blocks, of one kind after the other.
    :param narrow: bytes of the narrowest value of a column: a vector has no more of them than of it.
    :param sums: what is added up.
    :param unpackings: what is unpacked before a block of a row.
    :param floats: what bytes are cast to before it.
    :param body: the statements of column ``e`` of a block.
    """

    row: tuple[str, ...]
    where: str
    outer: tuple[LoopAxis, ...]
    axis: str
    last: str
    widths: tuple[int, ...]
    narrow: int
    sums: tuple[RunSum, ...]
    unpackings: tuple[Unpacking, ...]
    floats: tuple[ByteFloats, ...]
    body: tuple[str, ...]

    @property
    def widest(self) -> int:
        """The width of blocks that there are only where a processor has more than 16 registers."""
        return WIDEST_RUN

    @property
    def rest(self) -> bool:
        """Whether there are columns behind those of all blocks."""
        if not self.last.isdigit():
            return True
        left = int(self.last)
        for width in self.widths:
            left %= width
        return left > 0

    @property
    def in_parts(self) -> bool:
        """Whether rows may be so wide that few are added at a time: else they leave the caches from one block of
        columns to the next.
        """
        return not (self.last.isdigit() and int(self.last) <= NARROW_RUN) and not self.wide

    @property
    def wide(self) -> bool:
        """Whether an owner's rows may be those of several runs."""
        return any(s.wide for s in self.sums)


@dataclass(frozen=True)
class PhaseText:
    """A phase of a row: statements, then a pass over the columns.

    :param comment: what it computes, in words, as a C comment.
    :param row: the statements before the columns.
    :param columns: the pass over the columns, if there is one.
    """

    comment: str
    row: tuple[str, ...]
    columns: Columns | None


@dataclass(frozen=True)
class KernelText:
    """A kernel as the templates of its stages read it.

    :param name: of the kernel, with which the names of its functions begin.
    :param buffers: in the order in which a caller passes them.
    :param dims: likewise.
    :param accums: the results that rows are combined into.
    :param phases: of a row.
    :param run: how the rows of a segment, or of an owner, are added, if that is all that is done with them.
    :param row_axes: statements that compute the axes of row ``r``.
    :param ahead: statements that ask for what row ``r`` gathers, :param distant: whether that may be far away.
    :param lanes: the loop over rows that are scanned side by side, if they are.
    :param lane_axes: statements that compute the axes of a line ``r`` of such rows.
    :param owner_axes: those of owner ``owner``, :param member_axes: and of its member ``r``.
    :param member_count: rows that are combined into an owner's elements, as C.
    :param seeks: what searches for the key of one row after another go on from, as declarations.
    :param key_lines: statements that compute a row's sort key, :param key: and the key.
    :param starts: where the rows of key ``k`` begin, if their own order is that of their keys, else "".
    :param visits_all: whether rows without a key are visited too.
    :param workspace: the arrays in the workspace.
    :param thread_memory: the arrays in the memory of the running thread.
    :param streams: the arrays that a store streams to.
    :param counts: sizes that the stages name: rows, columns, owners, keys.
    :param chunk: rows per task, or owners, as C.
    :param launches: the statements that run the stages.
    :param checks: whether it may report an index.
    """

    name: str
    buffers: tuple[BufferField, ...]
    dims: tuple[str, ...]
    accums: tuple[Accum, ...]
    phases: tuple[PhaseText, ...]
    run: Run | None
    row_axes: tuple[str, ...]
    ahead: tuple[str, ...]
    distant: str
    lanes: Lanes | None
    lane_axes: tuple[str, ...]
    owner_axes: tuple[str, ...]
    member_axes: tuple[str, ...]
    member_count: str
    seeks: tuple[str, ...]
    key_lines: tuple[str, ...]
    key: str
    starts: str
    visits_all: bool
    workspace: tuple[LocalArray, ...]
    thread_memory: tuple[LocalArray, ...]
    streams: tuple[StreamedArray, ...]
    counts: tuple[Declaration, ...]
    chunk: str
    launches: tuple[str, ...]
    checks: bool

    @property
    def privatized(self) -> tuple[Accum, ...]:
        return tuple(a for a in self.accums if a.strategy.partials)

    @property
    def owned(self) -> tuple[Accum, ...]:
        return tuple(a for a in self.accums if a.strategy.visits == "by owner")

    @property
    def segmented(self) -> tuple[Accum, ...]:
        return tuple(a for a in self.accums if a.strategy.visits == "by key")

    @property
    def block_sums(self) -> tuple[Accum, ...]:
        """Results of which a few rows are added in f32 first."""
        return tuple(a for a in self.accums if a.block_sums)

    @property
    def streamed_results(self) -> tuple[Accum, ...]:
        return tuple(a for a in self.accums if a.streamed)
