"""Loops with sweeps as one kernel on tensor cores: whether they have its form, what the form is, which block sizes.

A *panel* is an operand in memory seen as rows of features, ``q[(b), (h), m + (row), k]``.  The panels of a loop's rows
stay in shared memory (resident), those of a sweep's columns go through it in stages (streamed).  A sweep is made of

- products of panels, ``s[m, n] <- q[m, k] k[n, k]``, which give a block of rows x columns in registers,
- kernels over such blocks, whose sums and maxima go into carries,
- products with a block, ``o[m, d] += p[m, n] v[n, d]``, which are summed in a carry of rows x features.

The steps of the loop itself, the epilogue, are kernels over rows, or rows x features, and products of few terms that
give these of what is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir.dims import Size, floordiv
from ..ir.kernel import Call, Kernel, Loop, Program, Sweep, Tile
from ..ir.quotient import Quotient
from ..ir.statement import REDUCTIONS, Operand, Stmt, flatten
from ..ir.types import BF16, F16, F32, DType, Type
from ..process.forks import cached_property
from ..targets.devices import ARCHITECTURES, Device, Gpu
from ..targets.gpu import REGISTERS, SHARED_RATE, WARP
from .in_turn import in_turn

MOST_FEATURES = 256
"""Of a panel: sums of 16 rows with more do not fit the registers of a warp."""
ROWS = 16
"""Of a warp, those of one product of fragments."""
RUN = 16
"""Neighbouring columns of a lane, of each 64, where codes lie along columns: those of 16 bytes of f8 and int8."""
PIECE = 8
"""Elements of 16 bits that are copied and loaded together, 16 bytes."""
MOST_RESIDENT = 4
"""Blocks of a multiprocessor that a kernel leaves registers for: a scheduler then has four warps that wait in turn."""
LEAST_SHARED, MOST_SHARED = (
    most(ARCHITECTURES[arch].shared for arch in ("sm_80", "sm_90", "sm_100")) for most in (min, max)
)
"""Bytes of shared memory of a multiprocessor."""
RESERVED = 1024
"""Bytes of it for each block beside its own (published)."""
MOST_WARPS = 32
"""Of a thread block."""
MOST_REGISTERS = 255
"""Of a thread."""
BESIDE, BESIDE_SEVERAL, BESIDE_HELD, SYMBOLIC, OF_BOUND, SPARE = 32, 52, 30, 12, 2, 16
"""Registers of a thread beside fragments and values of rows, by NVRTC for sm_80 to sm_100: of a sweep with one block of
products, with more, and with more whose rows are fragments, too; more where sizes are not known, twice as many with
fragments of rows, and for each bound of columns from memory where blocks have parts; left over where more than two
blocks are resident of several products, of more statements than causal attention's, or with edges of a mask and parts.
"""
OF_PARTS = 18
"""Registers left over before sm_90 where a warp of 16 rows has fragments of these and goes over parts of columns: dK
and dV of 128 features spill 12 bytes with fewer, in 64 x 32 of 2 parts, and none in 64 x 16 (NVRTC for sm_80); where
elements are at no edge one of 32 rows does, too: those of 64 features spill 8 bytes in 128 x 64 of 4 parts.  And
from sm_100 on where one of 32 rows has, of which a sweep before sums features, and some blocks have fewer rows: dQ of
80 features, 1000 or 2000 rows, spills 16 bytes in 16 columns (NVRTC for sm_100); before sm_90 where it has no edges
(32 bytes).
"""
NEWER = 8
"""More registers of a thread, from sm_100 on."""
TOGETHER = 24
"""More where codes along the rows are decoded for more than 16 rows of a warp, left over where more than one block is
resident (groups of 24 spill in fewer, for sm_80).
"""
DECODING = 128
"""Registers of a thread that decodes codes along columns, in blocks that all have as many (NVRTC for sm_80 to sm_100:
of tests/runtime/test_decoded_products.py it takes 71 to 143 where it may, and spills in none with these).
"""
WEIGHING = ("load", "bitcast", "cast", "add", "sub", "mul", "store")
"""What makes a weight of a code in so many; a power, a sine, GELU or a clip of 4 bits spills there."""
TOGETHER_ROWS = (2, 4, 8, 16)
"""Of a lane, where codes lie along rows: their bytes are loaded at once."""
EARLY = 32
"""Columns of a block whose values of columns NVRTC does not load long before they are used; else ROWS."""
ADDRESSES, OF_PART = 100, 20
"""Instructions of a block of columns beside products, loads and elements, and of each part of it but the first (counted
in attention's).
"""
_COMPARED = ("le", "lt", "ge", "gt")
_FREE = ("load", "const", "index", "store", *_COMPARED, "where", "cast")
"""Statements of elements that take an instruction at the edges of a mask alone, or none."""
STATEMENTS = 64
"""More for 16 rows, where no product follows the statements of a block, which NVRTC takes several elements of at once:
losses of 16 to 128 features, with targets, biases and tanh, spill in fewer (for sm_80, 90 and 100).
"""
CAUSAL = (4, 7)
"""Statements of an element of causal attention, forward and backward, whose registers are counted in the above."""
OF_STATEMENT = (3, 2)
"""More registers of a thread, for 16 rows, for each statement beyond these, and for each load of an element from
memory, forward and backward; and one more for each 32 columns: of the forms in tests/attention_forms.py none spills
(NVRTC for sm_90 and sm_100, 64 and 128 features).
"""
RANDOM = 9
"""Statements that a random number stands for: counters, keys and products of 64 bits."""
_NO_STATEMENT = ("search", "scan", "check", "argmax_cols", "argmin_cols")


class NotTiled(Exception):
    """A loop has not the form; the text says why, in a sentence for users."""


@dataclass(frozen=True)
class Panel:
    """An operand in memory: rows of features.

    :param start: its first element, over the symbols that the loop and the sweep bind.
    :param step: elements from a row to the next.  :param feature_step: from a feature to the next.
    """

    buffer: str
    start: Size
    step: Size
    feature_step: Size
    features: int

    @property
    def padded(self) -> int:
        """Features in shared memory: zeros follow, for products that sum 16 at once."""
        return -(-self.features // ROWS) * ROWS

    @property
    def pitch(self) -> int:
        """Elements from a row in shared memory to the next: an odd number of pieces of 16 bytes, so that the same piece
        of 8 rows lies in 8 different sets of banks.
        """
        return (self.padded // PIECE | 1) * PIECE


@dataclass(frozen=True)
class Strip:
    """A block of a matrix in memory as it lies there, rows of neighbours, in shared memory.

    What is summed along a panel's neighbours (``x[m, k]`` in a sum over k) is one, and so are codes, ``q[n, k // 2]``,
    that a kernel decodes.

    :param start: its first element, where the rows and columns of the loop's block are counted from 0.
    :param step: elements from a row to the next.  :param next: from an element of a row to the next one.
    :param across: whether its rows are the sweep's columns, and its neighbours the loop's rows; else its neighbours are
        the sweep's columns.
    :param features: its rows, if they are no axis of the loop; else 0.
    :param per: rows or columns of an element.  :param bytes: of an element.
    """

    buffer: str
    start: Size
    step: Size
    next: Size = 1
    across: bool = False
    features: int = 0
    per: int = 1
    bytes: int = 1

    @property
    def padded(self) -> int:
        """Features in shared memory: zeros follow."""
        return -(-self.features // PIECE) * PIECE

    def sizes(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and elements of each for a block of so many rows and columns."""
        width = rows if self.across else columns
        return self.padded or (columns if self.across else rows), -(-width // self.per)

    @property
    def is_codes(self) -> bool:
        """Whether a lane loads the bytes of several elements at once."""
        return self.bytes == 1 and self.per <= 2

    def pitch(self, rows: int, columns: int, run: int) -> int:
        """Elements from a row in shared memory to the next, so that lanes which load together read other banks.

        Of codes along columns a lane has a run of columns, and the bytes of four lanes in a row lie beside those of
        the next row; so do those of features where a run is of one piece of 16 bytes.  Of others the next row is 16
        bytes further, or the next word where a row is in one.
        """
        width = self.sizes(rows, columns)[1] * self.bytes
        if not self.is_codes and width <= 4:
            return 4 // self.bytes
        if not self.is_codes:
            pieces = -(-width // 16)
            four = self.features and run == RUN // 2  # lanes have neighbouring pieces
            apart = pieces + (4 - pieces) % 8 if four else pieces | 1
            return apart * 16 // self.bytes
        if self.across:
            return -(-(width - 16) // 32) * 32 + 16
        own = 4 * run // self.per
        return width + (own - width) % 128


@dataclass(frozen=True)
class Scores:
    """``block[m, n] <- sum over k of left[m, k] right[n, k]``."""

    call: Call
    block: str
    left: Panel
    right: Panel


@dataclass(frozen=True)
class Added:
    """``carry[m, d] += sum over n of block[m, n] right[n, d]``."""

    call: Call
    carry: str
    block: str
    right: Panel | Strip

    @property
    def padded(self) -> int:
        """Features in fragments."""
        return self.right.padded


@dataclass(frozen=True)
class RowProduct:
    """``block[m, d] <- sum over k of left[m, k] right[d, k]``, after the sweeps: of few terms, straight from memory."""

    call: Call
    block: str
    left: Panel
    right: Panel

    @property
    def features(self) -> int:
        """Of the block."""
        return int(dict(self.call.axes)[str(self.call.out.index[1].variable)])


@dataclass(frozen=True)
class Codes:
    """A load of bytes that a kernel decodes."""

    kernel: Kernel
    load: Stmt
    strip: Strip


@dataclass(frozen=True)
class SweepForm:
    """A sweep's steps in order.

    :param codes: the loads of bytes through shared memory: where a sweep computes what it sums up of nothing but
        memory, so that which lane has which column is open.
    """

    sweep: Sweep
    steps: tuple[Scores | Added | Kernel, ...]
    codes: tuple[Codes, ...] = ()

    @property
    def strips(self) -> tuple[Strip, ...]:
        """What of memory is in shared memory as it lies, each once."""
        return tuple(
            dict.fromkeys(
                [*(p.right for p in self.added if isinstance(p.right, Strip)), *(c.strip for c in self.codes)]
            )
        )

    @property
    def scores(self) -> tuple[Scores, ...]:
        return tuple(s for s in self.steps if isinstance(s, Scores))

    @property
    def added(self) -> tuple[Added, ...]:
        return tuple(s for s in self.steps if isinstance(s, Added))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(s for s in self.steps if isinstance(s, Kernel))

    @property
    def multiplies(self) -> bool:
        """Whether it has products; else it sums features of the rows, for other sweeps, and takes little."""
        return bool(self.scores or self.added)

    @property
    def divides(self) -> bool:
        """Whether its exponentials are weights of a product: what is rounded in all of a row alike is divided out.  A
        logarithm of their sum keeps it.
        """
        return bool(self.added)

    @property
    def streamed(self) -> tuple[Panel, ...]:
        """The panels of its columns, each once."""
        panels = (*(p.right for p in self.scores), *(p.right for p in self.added))
        return tuple(dict.fromkeys(p for p in panels if isinstance(p, Panel)))


@dataclass(frozen=True)
class TileForm:
    """A loop as one kernel on tensor cores.

    :param dtype: of all that products read.  :param after: the products that follow the sweeps.
    :param row_strips: loads of the steps after the sweeps whose rows are neighbours.
    """

    loop: Loop
    sweeps: tuple[SweepForm, ...]
    dtype: DType
    after: tuple[RowProduct, ...] = ()
    row_strips: tuple[tuple[Stmt, Strip], ...] = ()

    @property
    def multiplying(self) -> tuple[SweepForm, ...]:
        """The sweeps that have products."""
        return tuple(s for s in self.sweeps if s.multiplies)

    @cached_property
    def resident(self) -> tuple[Panel, ...]:
        """The panels of its rows, each once."""
        return tuple(dict.fromkeys(p.left for sweep in self.sweeps for p in sweep.scores))

    def padded(self, carry: str) -> int:
        """Columns of the fragments of a carry of rows and features."""
        return next(p.padded for s in self.sweeps for p in s.added if p.carry == carry)

    def padded_features(self, features: int) -> int:
        """Columns of the fragments of results that have so many: of a product with what is computed 8 at a time."""
        unit = PIECE if self.decoded else ROWS
        return -(-features // unit) * unit

    @cached_property
    def decoded(self) -> bool:
        """Whether what it sums up is computed of memory alone."""
        return all(s.added and not s.scores for s in self.multiplying)

    @cached_property
    def run(self) -> int:
        """Neighbouring columns of a lane, of each four times as many: those of fragments where codes do not lie along
        the columns; fewer where those share a scale.
        """
        strips = [c.strip for s in self.sweeps for c in s.codes if not c.strip.across]
        if not any(s.is_codes for s in strips):
            return 2
        columns = (s.sweep.cols[1] for s in self.sweeps)
        shared = min(
            [4 * RUN, *(s.per for s in strips if not s.is_codes), *(n for n in columns if isinstance(n, int) and n > 0)]
        )
        return RUN // 2 if 2 * RUN <= shared < 4 * RUN else RUN

    @cached_property
    def rows_together(self) -> bool:
        """Whether the rows of a lane are neighbours, because codes lie along the rows."""
        return any(c.strip.across for s in self.sweeps for c in s.codes)

    def scales_right(self, tiles: int) -> bool:
        """Whether what columns are scaled by multiplies the right operand of their product, of which a warp with so
        many tiles of 16 rows has few elements: where all its rows share it, and bf16 has the range of both.  It takes
        2.5 instructions of an element there; of a code 3 where two of 4 bits lie in a register, and else 1.
        """
        if not self.rows_together or self.dtype is not BF16:
            return False
        rows, features = ROWS * tiles, max(p.padded for s in self.sweeps for p in s.added)
        strips = [c.strip for s in self.sweeps for c in s.codes]
        few = features <= rows if any(s.is_codes and s.per == 2 for s in strips) else 3 * features <= rows
        return few and all(s.is_codes or s.per % rows == 0 for s in strips)

    def strip_bytes(self, sweep: SweepForm, rows: int, columns: int) -> Iterator[int]:
        """Of a sweep's strips, for one stage."""
        for s in sweep.strips:
            yield -(-s.sizes(rows, columns)[0] * s.pitch(rows, columns, self.run) * s.bytes // 16) * 16

    @cached_property
    def epilogue(self) -> Mapping[Stmt, Strip]:
        """What the steps after the sweeps load for each row and feature, where its rows are neighbours and what is
        summed is computed of memory alone: it is copied while the sweeps go on, since four of a lane's neighbours have
        other features.
        """
        return dict(self.row_strips) if self.decoded else {}

    def epilogue_bytes(self, rows: int) -> Iterator[int]:
        """Of these, each once."""
        for s in dict.fromkeys(self.epilogue.values()):
            yield -(-s.padded * s.pitch(rows, 0, self.run) * s.bytes // 16) * 16

    def shared_bytes(self, rows: int, columns: int, tile: Tile) -> int:
        """Of a block of so many rows and columns."""
        return self.staged_bytes(rows, columns, tile) + sum(self.epilogue_bytes(rows))

    def staged_bytes(self, rows: int, columns: int, tile: Tile) -> int:
        """Of these, those that the sweeps use."""
        stages = tile.stages
        resident = sum(rows * p.pitch for p in self.resident)
        streamed = max(sum(stages * columns * p.pitch for p in s.streamed) for s in self.sweeps)
        vectors = max(len({vector_at(load) for _, load in column_loads(s)}) for s in self.sweeps)
        strips = max(stages * sum(self.strip_bytes(s, rows, columns)) for s in self.sweeps)
        parts = (
            max(rows * (tile.split - 1) * p.padded * 4 for s in self.sweeps for p in s.added) if tile.split > 1 else 0
        )
        return -(-max(2 * (resident + streamed) + 4 * stages * columns * vectors + strips, parts) // 16) * 16

    def registers(self, columns: int, tiles: int = 1) -> int:
        """An estimate of a thread's: fragments of blocks, carries and operands, of ``tiles`` times 16 rows, and what
        addresses, counters and values on the way take.

        :param columns: with which a warp computes at once.
        """
        return self._registers(columns, tiles, self.fragments(columns, tiles))

    def _registers(self, columns: int, tiles: int, held: int) -> int:
        types = {b.name: b.type for sweep in self.loop.sweeps for b in sweep.buffers}
        carried = sum(_held(types[c.name]) for sweep in self.loop.sweeps for c in sweep.carries)
        carried += sum(_held(b.type) for b in self.loop.blocks)
        blocks = 1 if self.decoded else max(max(len(s.scores), len(s.added), 1) for s in self.sweeps)
        of_row = 2 if held and self.is_several else 6
        rows = max(of_row * len({vector_at(load) for load in row_loads(s)}) for s in self.sweeps)
        packed = 2 if self.decoded else 1  # elements of a block in a register
        own = carried + blocks * columns // (2 * packed) + rows + held
        own += self._of_statements(columns) if any(s.added for s in self.sweeps) else STATEMENTS
        unknown = self._of_sizes(columns, tiles)
        if self.is_several:
            vectors = max(len({vector_at(load) for _, load in column_loads(s)}) for s in self.sweeps)
            if not held:
                early = (tiles - 1) * vectors * max(columns - EARLY, 0)
                return tiles * own + BESIDE_SEVERAL + tiles * columns // 8 + early
            early = (tiles - 1) * vectors * (columns - ROWS)
            return tiles * own + BESIDE_HELD + 2 * unknown + tiles * (columns - ROWS) + early
        beside = BESIDE_SEVERAL if any(len(s.added) > 1 for s in self.sweeps) else BESIDE
        return tiles * own + beside + unknown

    def _of_statements(self, columns: int) -> int:
        """More registers of 16 rows for statements beyond causal attention's."""
        return self.more_statements * (32 * OF_STATEMENT[self.is_several] + columns) // 32

    def _of_sizes(self, columns: int, tiles: int) -> int:
        """Registers of a thread for sizes that are not known; else, where blocks have parts, for bounds from memory."""
        if not self.is_known:
            return SYMBOLIC
        return 0 if self.is_whole(columns, tiles) else OF_BOUND * self.bounds

    @cached_property
    def is_known(self) -> bool:
        """Whether the sizes are."""
        return all(isinstance(size, int) for size in self.loop.sizes)

    def is_whole(self, columns: int, tiles: int) -> bool:
        """Whether all blocks have as many rows and columns as the first."""
        parts = [(self.loop.rows[1], ROWS * WARPS * tiles), *((s.sweep.cols[1], columns) for s in self.sweeps)]
        return all(isinstance(size, int) and size % by == 0 for size, by in parts)

    @cached_property
    def has_edges(self) -> bool:
        """Whether elements are compared, as with a mask's first or last column."""
        kernels = (kernel for sweep in self.sweeps for kernel in sweep.kernels)
        return any(s.op in _COMPARED and kernel.is_column(s) for kernel in kernels for s in kernel.body)

    @cached_property
    def bounds(self) -> int:
        """Integers from memory that are one in a block, such as lengths."""
        loads = (
            (kernel, s)
            for sweep in self.sweeps
            for kernel in sweep.kernels
            for s in kernel.body
            if s.op == "load" and s.dtype is not None and s.dtype.is_integer
        )
        return len({vector_at(s) for kernel, s in loads if not kernel.stmt_level(s)})

    @cached_property
    def loads_of_elements(self) -> int:
        """From memory, of a sweep that has most."""

        def of(sweep: SweepForm) -> int:
            inside = {b.name for b in sweep.sweep.buffers}
            loads = ((k, s) for k in sweep.kernels for s in k.body if s.op == "load" and s.buffer not in inside)
            return len({vector_at(s) for k, s in loads if {k.rows[0][0], k.cols[0][0]} <= k.stmt_level(s)})

        return max(map(of, self.multiplying))

    def left_over(self, columns: int, tiles: int, parts: int, gpu: Gpu) -> int:
        """Registers of a thread that blocks with so many columns are to leave: for edges, where blocks of one product
        have parts (half as many on newer devices where they have none: values of 128 features spilled 8 to 60 bytes),
        for parts beside many fragments of rows, and for elements of memory that the compilers of newer devices load
        long before they are used.
        """
        if self.decoded:
            return 0
        whole, held = self.is_whole(columns, tiles), self.fragments(columns, tiles) > 0
        older, newer = int(gpu.arch[3:]) < 90, int(gpu.arch[3:]) >= 100
        if older and held and parts > 1 and (tiles == 1 or not self.has_edges):
            return OF_PARTS
        ragged = held and tiles > 1 and not whole and self.multiplying != self.sweeps
        if ragged and (newer or (older and not self.has_edges)):
            return OF_PARTS
        of_edges = 0 if self.is_several or (whole and not newer) else tiles * (columns - ROWS) // (4 if whole else 2)
        early = tiles * self.loads_of_elements * max(columns - EARLY, 0) if newer else 0
        return of_edges + early

    @cached_property
    def more_statements(self) -> int:
        """Of an element, beyond causal attention's."""

        def weight(sweep: SweepForm, s: Stmt) -> int:
            if s.op == "load":
                return int(s.buffer not in {b.name for b in sweep.sweep.buffers})
            return RANDOM if s.op == "philox" else int(s.op not in _FREE)

        def of(sweep: SweepForm, kernel: Kernel) -> int:
            levels = {kernel.rows[0][0], *(axis for axis, _ in kernel.cols)}
            return sum(
                weight(sweep, s)
                for s in kernel.body
                if kernel.is_column(s) and (s.op != "load" or levels <= kernel.stmt_level(s))
            )

        most = max((of(s, kernel) for s in self.multiplying for kernel in s.kernels), default=0)
        return max(0, most - CAUSAL[self.is_several])

    @property
    def is_several(self) -> bool:
        """Whether a sweep has more than one block of products at once, or adds more than one product up."""
        return not self.decoded and any(len(s.scores) > 1 or len(s.added) > 1 for s in self.sweeps)

    @property
    def decodes_evenly(self) -> bool:
        """Whether codes lie along columns and become weights by sums and products alone, all that differs from one to
        the next comes through shared memory, and all blocks have as many: there is no code for a last one.
        """
        blocks = [(s.sweep.cols[1], s.sweep.by) for s in self.sweeps]
        even = all(isinstance(size, int) and isinstance(by, int) and size % by == 0 for size, by in blocks)
        of_columns = [x for s in self.sweeps for k in s.kernels for x in k.body if k.cols[0][0] in k.stmt_level(x)]
        staged = sum(x.op == "load" for x in of_columns) == sum(len(s.codes) for s in self.sweeps)
        floats = (x for x in of_columns if x.dtype is not None and x.dtype.is_float)
        plain = all(x.op in WEIGHING for x in floats)
        return self.decoded and not self.rows_together and even and staged and plain

    def resident_blocks(self, warps: int, columns: int, tiles: int, shared: int, more: int = 0, room: int = 0) -> int:
        """Blocks that a multiprocessor is to hold: as many as registers and shared memory suffice for, four at most.

        :param columns: with which a warp computes at once.
        :param shared: bytes of a block, :param room: of a multiprocessor; 0 for a text of any device, whose registers
            are to suffice where most blocks of a single product fit.
        :param more: registers of a thread beside those that are estimated.
        """
        needed = self.registers(columns, tiles) + more + (TOGETHER if self.rows_together and tiles > 1 else 0)
        if self.decodes_evenly:
            needed = max(DECODING, needed - tiles * self._of_statements(columns))
        by_registers = REGISTERS // (32 * warps * -(-needed // 8) * 8)
        has_parts = self.has_edges and self.is_known and not self.is_whole(columns, tiles)
        if (self.is_several or self.more_statements or has_parts) and by_registers > 2:
            by_registers = max(2, REGISTERS // (32 * warps * -(-(needed + SPARE) // 8) * 8))
        least = self.is_several or (self.decoded and not self.decodes_evenly)
        room = room or (LEAST_SHARED if least else MOST_SHARED)
        return max(1, min(MOST_RESIDENT, by_registers, room // max(shared, 1)))

    def leaves_registers(self, rows: int, columns: int, tile: Tile, gpu: Gpu) -> bool:
        """Whether as many blocks as the text asks a multiprocessor to hold, which is that of any device, leave what a
        newer one's compiler takes more.
        """
        tiles, width = rows * tile.split // (ROWS * tile.warps), columns // tile.parts
        resident = self.resident_blocks(tile.warps, width, tiles, self.shared_bytes(rows, columns, tile))
        most = REGISTERS // (WARP * tile.warps * resident) // 8 * 8
        newer = int(gpu.arch[3:]) >= 100 and most < MOST_REGISTERS
        return not newer or self.registers(width, tiles) + NEWER <= most

    def fragments(self, columns: int, tiles: int) -> int:
        """Registers of resident panels that are fragments for the whole of the loop, for each 16 rows: of all of them,
        if registers suffice, where a sweep has several blocks; else of one alone, where a warp has no more rows.
        """
        held = sum(p.padded for p in self.resident) // 4
        if self.is_several:
            return held if self._registers(columns, tiles, held) <= MOST_REGISTERS else 0
        return held if len(self.resident) == 1 and held <= 32 and tiles == 1 else 0

    def clocks(self, rows: int, columns: int, tile: Tile, gpu: Gpu) -> float:
        """About how long an element of a block takes a multiprocessor whose warps are at its units in turn: those of
        instructions, of products and of shared memory.
        """
        tiles = rows * tile.split // (ROWS * tile.warps)
        elements, width = ROWS * tiles * columns, columns // tile.parts
        shared, more = self.shared_bytes(rows, columns, tile), NEWER if int(gpu.arch[3:]) >= 100 else 0
        room = ARCHITECTURES[gpu.arch].shared
        resident = self.resident_blocks(tile.warps, width, tiles, shared + RESERVED, more, room)
        units = [0.0, 0.0, 0.0]
        for s in self.multiplying:
            features = sum(p.left.padded for p in s.scores) + sum(p.padded for p in s.added)
            left = 0 if self.fragments(width, tiles) else sum(p.left.padded for p in s.scores)
            loads = (columns * features // ROWS + tile.parts * tiles * left) // ROWS
            copied = columns * sum(2 * p.pitch for p in s.streamed) / tile.warps
            of_elements = elements // 32 * sum(k.is_column(x) and x.op not in _FREE for k in s.kernels for x in k.body)
            products = elements * features // 2048
            units[0] += (ADDRESSES + OF_PART * (tile.parts - 1) + loads + products + of_elements) / (
                4 * gpu.issue_share
            )
            units[1] += elements * features / gpu.matrix
            units[2] += (512 * loads + copied) / SHARED_RATE
        return in_turn(units, max(1, round(resident * tile.warps / 4))) / elements


def _held(type_: Type) -> int:
    """Registers of a thread for a carry."""
    return 2 if len(type_.shape) == 1 else -(-int(type_.shape[1]) // ROWS) * 8


def refusal(loop: Loop, program: Program, device: Device) -> str | None:
    """Why the kernel on tensor cores does not take a loop with sweeps, in a sentence; None where it does.

    :param program: that the loop is a step of.  :param device: a GPU; any other has no tensor cores.
    """
    try:
        _check_memory(loop, program)
        choose(form_of(loop, program.types), device)
    except NotTiled as reason:
        return str(reason)
    return None


def tiled(loop: Loop, program: Program, device: Device) -> list[Loop]:
    """The loop with each of the block sizes, warps and stages that fit a device, the best first: :func:`choose`.

    :raises NotTiled: :func:`refusal` says why there is none.
    """
    return [
        replace(loop, by=rows, sweeps=tuple(replace(s, by=columns) for s in loop.sweeps), tile=tile)
        for rows, columns, tile in choose(form_of(loop, program.types), device)
    ]


def unfit(loop: Loop, program: Program, shared: int) -> str | None:
    """Why a loop is no kernel on tensor cores with the tile and the block sizes that it says, in a sentence.

    :param shared: bytes of shared memory that a block may have.
    """
    tile, columns = loop.tile, {s.by for s in loop.sweeps}
    if tile is None or not columns:
        return "it has no tile" if columns else "its columns do not come in blocks"
    if tile.mapping != "mma" or not 1 <= tile.warps <= MOST_WARPS or tile.stages < 2:
        return f"{tile} is no tile of mma, 1 to {MOST_WARPS} warps, and two stages and more"
    rows = loop.by
    most = ROWS * tile.warps // tile.split
    if not isinstance(rows, int) or rows < 1 or rows % most:
        return f"{tile} has a multiple of {most} rows, and a block {rows}"
    width = columns.pop()
    least = ROWS * tile.split * tile.parts
    if columns or not isinstance(width, int) or width % least or not 0 < width:
        return f"blocks of {', '.join(map(str, (width, *columns)))} columns: one multiple of {least} for all sweeps"
    try:
        _check_memory(loop, program)
        _check_split(form_of(loop, program.types), rows, width, tile)
        needed = form_of(loop, program.types).shared_bytes(rows, width, tile)
    except NotTiled as reason:
        return str(reason)
    if needed > shared:
        return (
            f"blocks of {loop.by} rows and {width} columns take {needed} bytes of shared memory; a block has {shared}"
        )
    return None


WARPS, STAGES = 4, 2
TILES, COLUMNS = (2, 1), (64, 48, 32, 16)
"""Of 16 rows, of a warp: two take each right operand from shared memory once for 32 rows.  Columns of a block."""
SEVERAL = ((128, 8), (64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (16, 1))
"""The same and its parts, where a sweep has several blocks of products: a part's are in registers beside the rows."""


def choose(form: TileForm, device: Device) -> list[tuple[int, int, Tile]]:
    """(rows, columns, tile) of the blocks whose registers and shared memory suffice, the fastest of an element first.

    :raises NotTiled: there is none.
    """
    if not isinstance(device, Gpu) or int(device.arch[3:]) < 80:
        raise NotTiled(f"{device.name} has no asynchronous copies and products of bf16: sm_80 and later have")
    if form.decoded:
        return _choose_decoded(form, device)
    found, tile = [], Tile("mma", WARPS, STAGES)
    for tiles in TILES:
        for columns, parts in SEVERAL if form.is_several else ((columns, 1) for columns in COLUMNS):
            rows, tile = ROWS * WARPS * tiles, replace(tile, parts=parts)
            fits = form.shared_bytes(rows, columns, tile) <= device.shared
            width = columns // parts
            needed = form.registers(width, tiles) + form.left_over(width, tiles, parts, device)
            if fits and needed <= MOST_REGISTERS and form.leaves_registers(rows, columns, tile, device):
                found.append((rows, columns, tile))
    if found:
        return sorted(found, key=lambda sizes: form.clocks(sizes[0], sizes[1], sizes[2], device))
    raise _too_large(form, rows, columns, tiles, tile, device)


def _too_large(form: TileForm, rows: int, columns: int, tiles: int, tile: Tile, device: Gpu) -> NotTiled:
    registers = form.registers(columns // (tile.split * tile.parts), tiles)
    return NotTiled(
        f"even blocks of {rows} rows and {columns} columns take {registers} registers of a thread"
        f" and {form.shared_bytes(rows, columns, tile)} bytes of shared memory; there are"
        f" {MOST_REGISTERS} and {device.shared}"
    )


SHARING = (8, 4)
"""Warps of a block that share its columns, where weights are decoded: so many have bytes under way;"""
SHARING_FEW = (2, 1)
"""and where they have few columns: of four warps, which have rows of their own else."""
DECODED = ((2, 128, 3), (2, 128, 2), (2, 64, 3), (1, 64, 3), (2, 64, 2), (1, 64, 2))
DECODED_FEW = (*((tiles, width, 2) for width in (32, 64, 128) for tiles in (4, 2, 1)),)
"""Of a warp, tiles of 16 rows, columns, and stages, where codes lie along columns;"""
DECODED_ACROSS = ((4, 64, 3), (4, 32, 3), (2, 64, 3), (2, 64, 2), (2, 32, 3), (2, 32, 2), (1, 32, 2))
"""and where they lie along rows: 64 are the 32 bytes of a transfer, of int4 too."""


def _choose_decoded(form: TileForm, device: Gpu) -> list[tuple[int, int, Tile]]:
    """The same where a block of rows is decoded, and all warps have its rows."""
    found, why, all_columns = [], NotTiled(), form.sweeps[0].sweep.cols[1]
    for split in (*SHARING, *SHARING_FEW):
        few = split in SHARING_FEW
        for tiles, width, stages in DECODED_ACROSS if form.rows_together else DECODED_FEW if few else DECODED:
            warps, columns = WARPS if few else split, width * split
            rows, tile = ROWS * tiles * warps // split, Tile("mma", warps, stages, split)
            if few and (not isinstance(all_columns, int) or columns < all_columns):
                continue
            try:
                if (
                    form.shared_bytes(rows, columns, tile) > device.shared
                    or form.registers(width, tiles) > MOST_REGISTERS
                ):
                    raise _too_large(form, rows, columns, tiles, tile, device)
                _check_split(form, rows, columns, tile)
                found.append((rows, columns, tile))
            except NotTiled as error:
                why = error
    if not found:
        raise why
    return found


def _check_split(form: TileForm, rows: int, columns: int, tile: Tile) -> None:
    """NotTiled where the warps of a block, or the lanes of a warp, have no whole parts of its columns."""
    if not form.decoded:
        if tile.split > 1:
            raise NotTiled("warps share the columns of products of panels: each has rows of its own")
        return
    if tile.parts > 1:
        raise NotTiled("decoded columns come in parts: a warp computes with all that it has at once")
    own = columns // tile.split
    if own % (4 * form.run):
        raise NotTiled(f"a warp has {own} of a block's columns, and a multiple of {4 * form.run} is loaded at once")
    neighbours = 2 * rows * tile.split // (ROWS * tile.warps)
    if form.rows_together and neighbours not in TOGETHER_ROWS:
        raise NotTiled(f"a lane has {neighbours} neighbouring rows, and 2, 4, 8 or 16 are loaded at once")
    for strip in (c.strip for s in form.sweeps for c in s.codes):
        near = rows if strip.across else columns
        if near % strip.per and strip.per % near:
            raise NotTiled(f"{strip.buffer} has an element for {strip.per} neighbours, and a block {near}")


# -- the form ----------------------------------------------------------------------------------------------------------


def form_of(loop: Loop, types: Mapping[str, Type]) -> TileForm:
    """The form of a loop.

    :param types: of all buffers.
    :raises NotTiled: it has another.
    """
    if not loop.sweeps:
        raise NotTiled("its columns do not come in blocks")
    after = tuple(_row_product(step, loop, types) for step in loop.steps if isinstance(step, Call))
    if loop.cols or {b.name for b in loop.blocks} != {p.block for p in after}:
        raise NotTiled("blocks of its rows have all columns at once")
    if loop.sequential:
        raise NotTiled(f"positions along {', '.join(loop.sequential)} come one after another")
    sweeps = tuple(_sweep_form(loop, sweep, types) for sweep in loop.sweeps)
    if not all(s.multiplies or _is_of_features(s.sweep) for s in sweeps) or not any(s.multiplies for s in sweeps):
        raise NotTiled("a sweep has no product")
    dtypes = {types[p.buffer].dtype for s in sweeps for p in (*s.streamed, *(x.left for x in s.scores))}
    dtypes |= {types[x.right.buffer].dtype for s in sweeps for x in s.added}
    dtypes |= {types[x.block].dtype for s in sweeps for x in s.added}
    dtypes |= {types[o.buffer].dtype for x in after for o in x.call.args}
    if len(dtypes) != 1 or not dtypes <= {BF16, F16}:
        found = ", ".join(sorted(d.name for d in dtypes)) or "nothing"
        raise NotTiled(f"its products multiply {found}: tensor cores are given f16 alone, or bf16 alone")
    for kernel in loop.steps:
        if not isinstance(kernel, Kernel):
            continue
        features = [size for _, size in kernel.cols]
        if len(features) > 1 or not all(isinstance(n, int) and n <= MOST_FEATURES for n in features):
            raise NotTiled(
                f"{kernel.name} follows its sweeps and has more than {MOST_FEATURES} columns, or not a known number"
            )
        _check_kernel(kernel, loop, None)
    return TileForm(loop, sweeps, dtypes.pop(), after, tuple(_epilogue_strips(loop, types)))


def _check_memory(loop: Loop, program: Program) -> None:
    """NotTiled where blocks of rows could read what others write: panels are copied when nobody knows who is first."""
    written = {program.root(b) for b in loop.writes}
    both = [b for b in loop.reads if program.root(b) in written]
    if both:
        raise NotTiled(f"it reads and writes {both[0]}")


def _is_of_features(sweep: Sweep) -> bool:
    """Whether a sweep goes over so few columns as features are, and keeps none of them."""
    return isinstance(size := sweep.cols[1], int) and size <= MOST_FEATURES and not sweep.blocks


def _sweep_form(loop: Loop, sweep: Sweep, types: Mapping[str, Type]) -> SweepForm:
    steps: list[Scores | Added | Kernel] = []
    for step in sweep.steps:
        if isinstance(step, Call):
            steps.append(_product(step, loop, sweep, types))
        else:
            if len(step.cols) != 1 or str(step.cols[0][1]) != sweep.count:
                raise NotTiled(f"{step.name} is not over the columns of its block")
            _check_kernel(step, loop, sweep)
            steps.append(step)
    scores = any(isinstance(s, Scores) for s in steps)
    kernels = (s for s in steps if isinstance(s, Kernel))
    added = any(isinstance(s, Added) for s in steps)
    codes = () if scores or not added else tuple(c for k in kernels for c in _codes(k, loop, sweep, types))
    across = next((c.strip.across for c in codes if c.strip.is_codes), False)
    return SweepForm(sweep, tuple(steps), tuple(c for c in codes if c.strip.across == across))


def _codes(kernel: Kernel, loop: Loop, sweep: Sweep, types: Mapping[str, Type]) -> Iterator[Codes]:
    """The loads of an element for each row and column, or for each power of two of neighbours.

    :raises NotTiled: a block begins between neighbours of one element.
    """
    row, column = kernel.rows[0][0], kernel.cols[0][0]
    inside = {b.name for b in loop.buffers}
    for s in kernel.body:
        if s.op != "load" or s.where or s.buffer in inside or types[s.buffer].dtype.itemsize > 4:
            continue
        if kernel.stmt_level(s) != {row, column}:
            continue
        flat = flatten(s.index, types[s.buffer].shape)
        start, steps = flat.const, dict[str, tuple[Size, int]]()
        for variable, factor in flat.terms:
            own = Quotient.of(kernel, variable)
            if own is None or own.by & (own.by - 1):  # blocks are of powers of two
                steps[""] = (factor, 1)
                continue
            if not own.starts_between(own.by, {loop.rows[0], sweep.cols[0]}):
                raise NotTiled(
                    f"{s.buffer} has an element for {own.by} neighbours, and the first block begins within one"
                )
            start = start + floordiv(own.first, own.by) * factor
            steps[own.axis] = (factor, own.by)
        if steps.keys() != {row, column} or len(flat.terms) != 2:
            continue
        for across, (near, far) in enumerate(((column, row), (row, column))):
            if steps[near][0] == 1 and steps[far][1] == 1:
                size = types[s.buffer].dtype.itemsize
                strip = Strip(s.buffer, start, steps[far][0], across=bool(across), per=steps[near][1], bytes=size)
                yield Codes(kernel, s, strip)
                break


def _epilogue_strips(loop: Loop, types: Mapping[str, Type]) -> Iterator[tuple[Stmt, Strip]]:
    """The loads after a loop's sweeps of elements of which a row's neighbour is the next one."""
    inside = {b.name for b in loop.buffers}
    for kernel in loop.steps:
        if not isinstance(kernel, Kernel) or len(kernel.cols) != 1:
            continue
        (row, _), (feature, features) = kernel.rows[0], kernel.cols[0]
        for s in kernel.body:
            if s.op != "load" or s.where or s.buffer in inside or not 2 <= types[s.buffer].dtype.itemsize <= 4:
                continue
            flat = flatten(s.index, types[s.buffer].shape)
            steps = dict(flat.terms)
            if steps.keys() == {row, feature} and steps[row] == 1 and isinstance(features, int):
                size = types[s.buffer].dtype.itemsize
                yield s, Strip(s.buffer, flat.const, steps[feature], across=True, features=features, bytes=size)


def _product(call: Call, loop: Loop, sweep: Sweep, types: Mapping[str, Type]) -> Scores | Added:
    """The form of a product."""
    sizes, out = dict(call.axes), call.out
    if call.op != "matmul" or call.parts or call.epilogue or any(o.scale for o in call.args):
        raise NotTiled(f"{call.name} is no plain matrix product")
    if call.add and out.buffer not in {b.name for b in loop.buffers}:
        raise NotTiled(f"{call.name} adds to {out.buffer}, which other blocks of rows add to, too")
    axes = [i.variable for i in out.index]
    rest = [axis for axis in sizes if axis not in axes]
    if len(axes) != 2 or None in axes or len(rest) != 1 or str(sizes[str(axes[0])]) != loop.count:
        raise NotTiled(f"{call.name} does not give the rows of a block")
    row, other, summed = str(axes[0]), str(axes[1]), rest[0]
    by_row = [o for o in call.args if any(row in dict(i.terms) for i in o.index)]
    if len(by_row) != 1:
        raise NotTiled(f"both operands of {call.name} have its rows")
    left, right = by_row[0], next(o for o in call.args if o is not by_row[0])
    blocks, carries = {b.name for b in sweep.blocks}, {c.name for c in sweep.carries}
    inside = {b.name for b in loop.buffers}
    if right.buffer in inside:
        raise NotTiled(f"{call.name} multiplies by {right.buffer}, which is not in memory")
    if not call.add and out.buffer in blocks and str(sizes[other]) == sweep.count:
        if left.buffer in inside:
            raise NotTiled(f"{call.name} multiplies {left.buffer}, which is computed in each block")
        if types[out.buffer].dtype not in (F32, types[left.buffer].dtype):
            raise NotTiled(f"{call.name} gives {types[out.buffer].dtype}")
        return Scores(
            call, out.buffer, _panel(left, row, summed, sizes, types), _panel(right, other, summed, sizes, types)
        )
    if call.add and out.buffer in carries and str(sizes[summed]) == sweep.count:
        if left.buffer not in blocks or [i.variable for i in left.index] != [row, summed]:
            raise NotTiled(f"{call.name} multiplies {left.buffer}, which is no block of its columns")
        if types[out.buffer].dtype is not F32:
            raise NotTiled(f"{call.name} adds to {types[out.buffer].dtype}")
        scores = any(isinstance(s, Call) and not s.add for s in sweep.steps)
        panel = _panel(right, summed, other, sizes, types)
        return Added(call, out.buffer, left.buffer, panel if scores else _strip(panel))
    raise NotTiled(f"{call.name} is no product of its rows with features of its columns, nor of a block with these")


def _row_product(call: Call, loop: Loop, types: Mapping[str, Type]) -> RowProduct:
    """The form of a product after the sweeps."""
    sizes, axes = dict(call.axes), [str(i.variable) for i in call.out.index]
    rest = [axis for axis in sizes if axis not in axes]
    inside = {b.name for b in loop.buffers}
    given = {b.name: b.type for b in loop.blocks}.get(call.out.buffer)
    plain = call.op == "matmul" and not (call.parts or call.epilogue or call.add or any(o.scale for o in call.args))
    of_rows = [o for o in call.args if any(axes[0] in dict(i.terms) for i in o.index)]
    if not plain or given is None or len(rest) != 1 or given.shape != tuple(sizes.get(axis, 0) for axis in axes):
        raise NotTiled(f"the product {call.name} follows its sweeps, and gives no block of rows and features")
    if len(of_rows) != 1 or {o.buffer for o in call.args} & inside or str(sizes[axes[0]]) != loop.count:
        raise NotTiled(f"the product {call.name} follows its sweeps, and is none of its rows in memory")
    left, right = of_rows[0], next(o for o in call.args if o is not of_rows[0])
    panels = _panel(left, axes[0], rest[0], sizes, types), _panel(right, axes[1], rest[0], sizes, types)
    return RowProduct(call, call.out.buffer, *panels)


def _panel(operand: Operand, row: str, feature: str, sizes: Mapping[str, Size], types: Mapping[str, Type]) -> Panel:
    features = sizes[feature]
    if not isinstance(features, int) or not 1 <= features <= MOST_FEATURES:
        raise NotTiled(f"{operand.buffer} has {features} features: blocks keep 1 to {MOST_FEATURES} of them")
    flat = flatten(operand.index, types[operand.buffer].shape)
    steps = dict(flat.terms)
    if not steps.keys() <= {row, feature}:
        raise NotTiled(f"{operand.buffer} has more axes than rows and features")
    return Panel(operand.buffer, flat.const, steps.get(row, 0), steps.get(feature, 0), features)


def _strip(panel: Panel) -> Strip:
    """A panel of columns with its columns as neighbours."""
    return Strip(panel.buffer, panel.start, panel.feature_step, panel.step, features=panel.features, bytes=2)


def _check_kernel(kernel: Kernel, loop: Loop, sweep: Sweep | None) -> None:
    """NotTiled where a kernel does what lanes of fragments cannot."""
    if len(kernel.rows) != 1 or str(kernel.rows[0][1]) != loop.count:
        raise NotTiled(f"{kernel.name} is not over the rows of its block")
    inside = {b.name for b in loop.buffers}
    carries = {c.name for c in sweep.carries} if sweep is not None else set[str]()
    axes = [axis for axis, _ in (*kernel.rows, *kernel.cols)]
    for s in kernel.body:
        if s.op in _NO_STATEMENT:
            raise NotTiled(f"{kernel.name} has the statement {s.op}")
        if s.op == "accum" and (s.buffer not in carries or [i.variable for i in s.index] != axes[:1]):
            raise NotTiled(f"{kernel.name} combines rows in {s.buffer}")
        if s.op == "accum" and (kernel.is_column(s) or s.where):
            raise NotTiled(f"{kernel.name} combines in {s.buffer} what is no sum over its columns")
        if s.buffer in inside and [i.variable for i in s.index] not in (axes[:1], axes[:2]):
            raise NotTiled(f"{kernel.name} reads {s.buffer} elsewhere than at its own rows and columns")
        if sweep is not None and s.op in REDUCTIONS and not _is_carried(kernel, s):
            raise NotTiled(f"{kernel.name} uses {s.op} of a block of columns")


def _is_carried(kernel: Kernel, reduction: Stmt) -> bool:
    """Whether all that reads a reduction is an accum of its kind."""
    readers = [s for s in kernel.body if reduction.name in s.uses]
    return all(s.op == "accum" and s.combine == REDUCTIONS[reduction.op] for s in readers)


def vector_at(s: Stmt) -> tuple[object, ...]:
    """What a load of a column reads: equal for equal elements."""
    return s.buffer, s.index


def row_loads(sweep: SweepForm) -> tuple[Stmt, ...]:
    """The loads of values of rows from memory, which a lane keeps for the whole of a sweep."""
    inside = {b.name for b in sweep.sweep.buffers}
    return tuple(
        s
        for kernel in sweep.kernels
        for s in kernel.body
        if s.op == "load" and s.buffer not in inside and kernel.stmt_level(s) == {kernel.rows[0][0]}
    )


def column_loads(sweep: SweepForm) -> tuple[tuple[Kernel, Stmt], ...]:
    """The loads of f32 vectors over a sweep's columns, which are staged in shared memory with its panels."""
    return tuple(
        (kernel, s)
        for kernel in sweep.kernels
        for s in kernel.body
        if s.op == "load"
        and s.dtype is F32
        and not s.where
        and kernel.stmt_level(s) == {kernel.cols[0][0]}
        and not any(v.startswith("%") for i in s.index for v, _ in i.terms)
        and s.buffer not in {b.name for b in sweep.sweep.buffers}
    )
