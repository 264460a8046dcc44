"""A group of steps that can share a loop over blocks of rows  ->  the program with that loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...ir.dims import Size, ceildiv, known_nonnegative, symbol
from ...ir.kernel import Buffer, Call, Kernel, Loop, Program
from ...ir.statement import Axis, Index, Operand, Stmt
from ...ir.types import F64, Type
from ...targets.devices import CPU, Cpu, Device
from . import wide_products
from .column_bounds import column_bounds
from .fission import fresh_name
from .fusion_group import FusionGroup
from .tiling import Tiling, tile

ROW_ELEMENTS = 8
"""Rows of a GPU's blocks begin at multiples of so many elements: products of 16-bit operands are several times as slow
where rows do not begin at multiples of 16 bytes.
"""


def fuse(group: FusionGroup, device: Device = CPU) -> Program:
    """matmul, softmax, matmul over rows(n: N)  ->  loop rows(n: N) by(144) { matmul, softmax, matmul }"""
    program, steps = group.program, group.program.steps
    before, after, _ = group.placement()
    own_rows = [b.name for b in program.of_kind("temp") if _is_private(group, b)]
    sums = _accumulators(group)
    new = {name: b for name, b in sums.items() if b.name != name}
    zeros = [_zeros(b) for b in sums.values()]
    rounded = [_rounded(b, program.buffer[name]) for name, b in new.items()]
    ordered = (
        *(steps[n] for n in before),
        *zeros,
        _loop(group, own_rows, sums, device),
        *rounded,
        *(steps[n] for n in after),
    )
    kept = (b for b in program.buffers if b.name not in group.blocks and b.name not in own_rows)
    return replace(program, buffers=(*kept, *new.values()), steps=ordered)


def rows_per_block(rows: Size, columns: Size, parallel: bool, most: Size | None = None) -> Size:
    """How many rows a block has: a multiple of 12 (what a product goes over at once), all blocks about as large.

    :param columns: elements of a row of the widest block.
    :param parallel: each thread has blocks of its own, with so many rows that they stay in its cache; else so many that
        what they are multiplied with, which is read and packed again for each block, is read rarely.
    :param most: rows, where that is not left to their columns.
    """
    if most is None:
        most = 48 * (1 + (1 << 13) // (columns + 2048)) if parallel else 480 * (1 + (1 << 14) // (columns + 2048))
    by = 12 * (1 + rows // (12 * (1 + rows // most)))
    return by if known_nonnegative(by - 1) else 48  # of a count of windows no sign may be known


def rows_per_launch(rows: Size, columns: Size) -> Size:
    """How many rows a block has on a GPU, which has one after another: a multiple of 128 (of a product's tile), all
    blocks about as large, of some ``LAUNCH_ELEMENTS``: so many that what they are multiplied with, and what they add
    to, is read rarely.
    """
    most = 128 * (1 + wide_products.LAUNCH_ELEMENTS // (128 * (columns + 2048)))
    by = 128 * (1 + rows // (128 * (1 + rows // most)))
    return by if known_nonnegative(by - 1) else 512


def _is_private(group: FusionGroup, buffer: Buffer) -> bool:
    """Whether a temp is written and read by the loop alone, each time in the rows of the block."""
    name, steps = buffer.name, group.program.steps
    if buffer.alias or name in group.blocks or any(b.alias == name for b in group.program.buffers):
        return False
    numbers = [n for n, step in enumerate(steps) if name in (*step.reads, *step.writes)]
    if not numbers or not group.tilings.keys() >= {*numbers}:
        return False
    return all(
        tile(steps[n], name, group.shape) == group.tilings[n] and name not in group.tilings[n].accums for n in numbers
    )


def _accumulators(group: FusionGroup) -> dict[str, Buffer]:
    """Where a loop adds up what its kernels add to a buffer: in f64, because it adds one iteration after the other."""
    program = group.program
    taken, found = {*program.dims, *program.types}, dict[str, Buffer]()
    for name in (b for n in sorted(group.tilings) for b in sorted(group.tilings[n].accums)):
        buffer = program.buffer[name]
        wide = Buffer(fresh_name(f"{name}.sum", taken), replace(buffer.type, dtype=F64))
        found[name] = buffer if buffer.type.dtype is F64 else wide
    return found


def _loop(group: FusionGroup, own_rows: Collection[str], sums: Mapping[str, Buffer], device: Device) -> Loop:
    """The loop that runs a group's steps.

    :param own_rows: the temps of which a block is left beside those with wide rows.
    :param sums: where it adds up what its kernels add to a buffer.
    """
    program, sizes = group.program, [size for size in group.shape[:-1] if size != 1]
    taken = {*program.dims, *(name for loop in program.loops for name in loop.symbols)}
    names = (*(f"at{i}" for i in range(len(sizes))), "row", "rows", "cols")
    *outer, row, count, column = (fresh_name(name, taken) for name in names)
    whole, tilings = [*group.steps.values()], [group.tilings[n] for n in group.steps]
    lead = len(group.shape)
    rows = [tiling.row for tiling in tilings]
    by, bounds = group.by, None
    if by is None:
        bounds = column_bounds(whole, rows, dict.fromkeys(group.blocks, lead), group.columns)
    host = isinstance(device, Cpu)

    def block(name: str, columns: tuple[Size, ...] | None = None) -> Buffer:
        type_ = program.types[name]
        rest = type_.shape[lead:] if columns is None else columns
        if name in group.blocks and len(rest) == 1 and not (bounds or host):
            rest = (ROW_ELEMENTS * ceildiv(rest[0], ROW_ELEMENTS),)
        return Buffer(name, replace(type_, shape=(symbol(count), *rest)), "block")

    blocks = {name: block(name, (symbol(column),) if bounds else None) for name in group.blocks}
    blocks |= {name: block(name) for name in own_rows}
    types = {**program.types, **{b.name: b.type for b in (*blocks.values(), *sums.values())}}
    steps = []
    for i, (step, tiling) in enumerate(zip(whole, tilings, strict=True)):
        axis = bounds.axes[i] if bounds else None
        columns = (axis, column) if axis else None
        steps.append(_StepWriter(tiling, tuple(outer), row, count, blocks, lead - 1, columns, sums).step(step, types))
    carried = {n for tiling in tilings for n in tiling.carried}
    every, parallel = group.shape[-1], len(carried) < len(sizes)
    if by is None:
        by = (
            rows_per_block(every, group.columns, parallel, group.most)
            if host
            else rows_per_launch(every, group.columns)
        )
    return Loop(
        over=tuple(zip(outer, sizes, strict=True)),
        rows=(row, every),
        by=by,
        count=count,
        blocks=tuple(blocks.values()),
        steps=tuple(steps),
        cols=((column, bounds.size),) if bounds else (),
        to=bounds.below(symbol(row) + symbol(count)) if bounds else 0,
        sequential=tuple(name for n, name in enumerate(outer) if n in carried),
    )


@dataclass(frozen=True)
class _StepWriter:
    """Writes a step over the rows of one block.

    :param outer: the loop's symbols for positions along its outer axes,
    :param row: for the first row of a block,
    :param count: and for the number of its rows.
    :param blocks: the buffers of a block, by the names of what they are blocks of,
    :param lead: which has as many more axes.
    :param columns: the step's axis of columns, and the loop's symbol for how many a block has; None if it has all.
    :param sums: where the loop adds up what the step adds to a buffer.
    """

    tiling: Tiling
    outer: tuple[str, ...]
    row: str
    count: str
    blocks: Mapping[str, Buffer]
    lead: int
    columns: tuple[str, str] | None
    sums: Mapping[str, Buffer]

    def step(self, step: Kernel | Call, types: Mapping[str, Type]) -> Kernel | Call:
        if isinstance(step, Call):
            args = tuple(map(self.operand, step.args))
            out, add = self.operand(step.out), self.tiling.sums_rows
            return replace(step, axes=self.axes(step.axes), out=out, args=args, add=add)
        body = tuple(part for s in step.body for part in self.statements(s, len(step.body)))
        if self.tiling.accums:
            step = replace(step, order="", strategy=())
        return replace(step, rows=self.axes(step.rows), cols=self.axes(step.cols), body=body).rehashed(types)

    def statements(self, s: Stmt, count: int) -> Iterator[Stmt]:
        """A statement over the rows of a block; an accum adds to what its iterations so far came to.

        :param count: statements of the kernel.
        """
        index = self.index(s.buffer, s.index)
        if s.op != "accum":
            yield replace(s, index=index)
            return
        first = count + 3 * sorted(self.tiling.accums).index(s.buffer)
        wide, so_far, total = f"%{first}", f"%{first + 1}", f"%{first + 2}"
        where = self.sums[s.buffer].name
        if s.dtype is F64:
            (wide,) = s.args
        else:
            yield Stmt(wide, "cast", s.args, F64, attrs=(("dtype", F64),))
        yield Stmt(so_far, "load", (), F64, where, index)
        yield Stmt(total, "add", (so_far, wide), F64)
        yield Stmt("", "store", (total,), F64, where, index)

    def axes(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        sizes = {self.tiling.row: symbol(self.count)}
        if self.columns:
            sizes[self.columns[0]] = symbol(self.columns[1])
        return tuple((name, sizes.get(name, size)) for name, size in axes if name not in self.tiling.outer)

    def operand(self, operand: Operand) -> Operand:
        scale = self.operand(operand.scale) if operand.scale else None
        return replace(operand, index=self.index(operand.buffer, operand.index), scale=scale)

    def index(self, buffer: str, index: tuple[Index, ...]) -> tuple[Index, ...]:
        return index[self.lead :] if buffer in self.blocks else tuple(map(self.within_block, index))

    def within_block(self, index: Index) -> Index:
        """The index of a position in all rows, by its position in the block."""
        outer = dict(zip(self.tiling.outer, self.outer, strict=True))
        const, terms = index.const, []
        for variable, factor in index.terms:
            if variable == self.tiling.row:
                const = const + factor * symbol(self.row)
            if variable in outer:
                const = const + factor * symbol(outer[variable])
            else:
                terms.append((variable, factor))
        return Index(const, tuple(terms))


def _zeros(buffer: Buffer) -> Kernel:
    """The kernel that fills a buffer with zeros."""
    zero = Stmt("%0", "const", (), buffer.type.dtype, attrs=(("value", 0.0),))
    return _elementwise("zeros", (zero,), buffer)


def _rounded(wide: Buffer, buffer: Buffer) -> Kernel:
    """The kernel that writes a sum in f64 to the buffer that it is the sum of."""
    dtype = buffer.type.dtype.compute
    load = Stmt("%0", "load", (), F64, wide.name, _everywhere(wide))
    return _elementwise("cast", (load, Stmt("%1", "cast", ("%0",), dtype, attrs=(("dtype", dtype),))), buffer, wide)


def _elementwise(name: str, body: tuple[Stmt, ...], out: Buffer, *read: Buffer) -> Kernel:
    """The kernel that stores the last value of its body at every position of a buffer."""
    *rows, cols = ((f"i{n}", size) for n, size in enumerate(out.type.shape))
    store = Stmt("", "store", (body[-1].name,), out.type.dtype.compute, out.name, _everywhere(out))
    kernel = Kernel("", tuple(rows), (cols,), (*body, store))
    return kernel.named_by_structure(name, {b.name: b.type for b in (out, *read)})


def _everywhere(buffer: Buffer) -> tuple[Index, ...]:
    return tuple(Index.of(f"i{n}") for n in range(buffer.type.rank))
