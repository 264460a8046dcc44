"""split_loops: what a loop over blocks of rows sums over its rows gets a loop of its own, over blocks of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.dims import Size, assuming, maximum, symbol, symbols
from ...ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Sweep, Tile
from ...ir.statement import REDUCTIONS, Axis, Index, Operand, Stmt
from ...ir.types import F32, DType, Type
from ...ir.walk import backward_slice
from ..loops.legality import IllegalMove, attempt
from ..manager import program_pass
from ..row_blocking.fission import fresh_name
from .body import Body, Cut, Product, body_of, stored


@program_pass("REAL")
def split_loops(program: Program, *, rows: Size = 64, columns: Size = 64, tile: Tile | None = None) -> Program:
    """loop rows(n: N) { s = q k^T; ...; dq = t k; dk += t^T q }  ->  loop rows(n: N) { s = q k^T; ...; dq = t k } and
    loop rows(v: V) { sweep cols(n: N) { s^T = k q^T; ...; carry dk += t^T q } }

    Each block of columns sums over all rows by itself, in their order: no block waits for another, and none adds to
    what another wrote.  It computes the products again.  What it needs of a whole row (a softmax's sum) the first loop
    stores.  Loops that sum nothing over rows, whose steps are not all of rows times columns, or that have sweeps, stay.

    Licence REAL: blocks of rows are added up in another order.

    :param rows, columns: of a block of the second loop.  :param tile: what it says of a GPU.
    """
    with assuming(program.assumptions):
        for loop in program.loops:
            body = attempt(body_of, loop, program) if loop.reduces_rows else None
            made = body and attempt(split, body, program, rows, columns, tile)
            program = made or program
    return program


def split(body: Body, program: Program, rows: Size = 64, columns: Size = 64, tile: Tile | None = None) -> Program:
    """The program with two loops for the body's, or the second one alone."""
    taken = {*program.dims, *program.types, *(name for loop in program.loops for name in loop.symbols)}
    features = [v for call in (*body.computed.values(), *(p.call for p in body.added)) for v in body.features_of(call)]
    values = (*(p.value for p in body.added), *features)
    needed = list(dict.fromkeys(r for value in values for r in body.reductions(value)))
    if needed or _rows_loop(body, {}, program.types) is not None:
        needed = _of_rows(body, values)
    statistics = {name: _statistic(body, name, taken) for name in needed}
    types = {**program.types, **{b.name: b.type for b in statistics.values()}}
    first = _rows_loop(body, statistics, types)
    second = _ColumnsLoop(body, types, taken, statistics).loop(rows, columns, tile)
    loops = (*((first,) if first else ()), second)
    steps = (new for step in program.steps for new in (loops if step is body.loop else (step,)))
    return replace(program, buffers=(*program.buffers, *statistics.values()), steps=tuple(steps))


def _of_rows(body: Body, values: Sequence[str]) -> list[str]:
    """What values need of a row that is no constant and no load: sums over its columns, and what is computed of these
    and of other values of the row, such as reciprocals, which the second loop would compute again for each element.
    """

    of_features = {own.axis for own in body.features.values()}

    def is_computed(name: str) -> bool:
        s = body.stmts[name]
        if s.op in REDUCTIONS:
            return True
        plain = s.op in ("load", "const", "size", "index") or s.dtype is not F32 or name not in body.origin
        along = {v for own in body.slice([name]) for i in own.index for v, _ in i.terms}
        return not (plain or body.varies(name) or along & of_features) and body.row in along

    found: dict[str, None] = {}
    pending, seen = list(values), set[str]()
    while pending:
        name = pending.pop(0)
        if is_computed(name):
            found[name] = None
        elif name not in seen:
            pending += body.stmts[name].uses
        seen.add(name)
    return list(found)


def _statistic(body: Body, name: str, taken: set[str]) -> Buffer:
    """The temp in which the first loop stores a value of each row."""
    number, _ = body.origin[name]
    dtype = body.stmts[name].dtype
    assert dtype is not None
    sizes = tuple(size for _, size in (*body.loop.over, body.loop.rows))
    return Buffer(fresh_name(f"{body.loop.steps[number].writes[0]}.row", taken), Type(dtype, sizes))


def _position(loop: Loop, row: str) -> tuple[Index, ...]:
    """The index of a row of a block in a buffer of values of all rows."""
    outer = (Index(symbol(name)) for name, _ in loop.over)
    return (*outer, Index(symbol(loop.rows[0]), ((row, 1),)))


def _rows_loop(body: Body, statistics: Mapping[str, Buffer], types: Mapping[str, Type]) -> Loop | None:
    """The loop without its sums over rows, and with stores of what these need; None where nothing is left."""
    loop = body.loop
    stores: dict[int, list[Stmt]] = {}
    for name, buffer in statistics.items():
        number, local = body.origin[name]
        kernel = loop.steps[number]
        assert isinstance(kernel, Kernel)
        index = _position(loop, kernel.rows[0][0])
        stores.setdefault(number, []).append(Stmt("", "store", (local,), buffer.type.dtype, buffer.name, index))
    own, read = {b.name for b in loop.blocks}, set[str]()
    kept: list[Kernel | Call] = []
    for number, step in reversed(list(enumerate(loop.steps))):
        if isinstance(step, Call):
            if step.add or (step.out.buffer in own and step.out.buffer not in read):
                continue
        else:
            dead = [s for s in step.body if s.op == "store" and s.buffer in own and s.buffer not in read]
            effects = [*(s for s in step.body if not s.name and s not in dead), *stores.get(number, [])]
            if not effects:
                continue
            live = backward_slice(step.body, (u for s in effects for u in s.uses))
            whole = [s for s in step.body if s in live or (not s.name and s not in dead)]
            step = replace(step, body=(*whole, *stores.get(number, []))).live.rehashed(types)
        read |= {*step.reads}
        kept.append(step)
    if not kept:
        return None
    used = {b for step in kept for b in (*step.reads, *step.writes)}
    blocks = tuple(replace(b, slot=-1) for b in loop.blocks if b.name in used)
    return replace(loop, blocks=blocks, steps=tuple(kept[::-1]))


class _ColumnsLoop:
    """Writes the loop over blocks of columns, whose sweep goes over the rows.  Its blocks are ``[columns, rows]``.

    :ivar cut: how the columns are cut.  :ivar inner: the symbol of the number of a block's rows.
    :ivar symbols: what the symbols of the body's loop are here.  :ivar blocks: by what they hold: a product of the
        loop, or a value.  :ivar private: names of blocks and carries.
    """

    def __init__(self, body: Body, types: Mapping[str, Type], taken: set[str], statistics: Mapping[str, Buffer]):
        loop = body.loop
        self.body, self.types, self.taken, self.statistics = body, dict(types), taken, statistics
        self.over = tuple((fresh_name(name, taken), size) for name, size in loop.over)
        self.cut = Cut(body, fresh_name("col", taken), fresh_name("cols", taken))
        self.row, self.inner = fresh_name(loop.rows[0], taken), fresh_name(loop.count, taken)
        old = (*(name for name, _ in loop.over), loop.rows[0], loop.count)
        new = (*(name for name, _ in self.over), self.row, self.inner)
        self.symbols = {name: symbol(other) for name, other in zip(old, new, strict=True)}
        self.blocks: dict[str, Buffer] = {}
        self.private = set[str]()
        self.features: dict[str, Kernel] = {}

    @property
    def columns_axis(self) -> tuple[Axis, ...]:
        return ((self.body.column, symbol(self.cut.count)),)

    def loop(self, rows: Size, columns: Size, tile: Tile | None) -> Loop:
        body = self.body
        values = {p.value: self.now(p.value) for p in body.added}
        read = {s.buffer for s in body.slice(values.values()) if s.op == "load"}
        computed = [self.computed(name, call) for name, call in body.computed.items() if name in read]
        stores = [self.store(p, values[p.value]) for p in body.added if values[p.value] not in self.blocks]
        kernels = [self.kernel(list(dict.fromkeys(stores)))] if stores else []
        carries = [self.carry(p) for p in body.added]
        products = [
            self.added(p, self.blocks[values[p.value]].name, carry)
            for p, carry in zip(body.added, carries, strict=True)
        ]
        sweep = Sweep(
            (self.row, body.loop.rows[1]),
            rows,
            self.inner,
            tuple(carries),
            tuple({b.name: b for b in self.blocks.values()}.values()),
            (*self.features.values(), *computed, *kernels, *products),
            since=self.since,
        )
        after = tuple(self.result(p, carry) for p, carry in zip(body.added, carries, strict=True))
        return Loop(
            self.over, (self.cut.first, body.size), columns, self.cut.count, (), after, sweeps=(sweep,), tile=tile
        )

    @property
    def since(self) -> Size:
        """The first row that needs a column of the block: ``to`` is row + rows + more for the rows of a block."""
        loop = self.body.loop
        more = loop.to - symbol(loop.rows[0]) - symbol(loop.count)
        if not loop.cols or symbols(more) & {*loop.symbols}:
            return 0
        return maximum(0, symbol(self.cut.first) - more)

    def now(self, value: str) -> str:
        """A value, with what the first loop stored for reductions."""
        body, index = self.body, _position(self.body.loop, self.body.row)
        found = {
            name: body.intern(Stmt("", "load", (), body.stmts[name].dtype, self.statistics[name].name, index))
            for name in self.statistics
        }
        return body.replaced(value, found)

    def block(self, value: str, name: str, dtype: DType, shape: tuple[Size, ...] = ()) -> str:
        """A new block for a value, of columns times rows if no other shape is given."""
        name = fresh_name(name, self.taken)
        type_ = self.types[name] = Type(dtype, shape or (symbol(self.cut.count), symbol(self.inner)))
        self.blocks[value] = Buffer(name, type_, "block")
        self.private.add(name)
        return name

    # -- steps of the sweep --------------------------------------------------------------------------------------------

    def computed(self, name: str, call: Call) -> Call:
        """A product of the loop, transposed."""
        row, column = (str(i.variable) for i in call.out.index)
        dtype = self.body.dtype_of_block(name)
        load = self.body.intern(Stmt("", "load", (), dtype, name, self.body.everywhere))
        block = self.block(load, name, dtype)
        args = [self.cut.outside(o, column) for o in call.args]
        out = Operand(block, (Index.of(column), Index.of(row)))
        return self.turned(self.cut.call(call, column, out, args, add=False), row, column)

    def turned(self, call: Call, row: str, column: str) -> Call:
        """A product whose result begins with the columns, over the rows of a block."""
        call = self.cut.renamed(call, self.features_of(call))
        if call.result_axes[0] != column:
            first = (column, *(axis for axis in call.result_axes if axis != column))
            order = sorted(call.axes, key=lambda axis: first.index(axis[0]) if axis[0] in first else len(first))
            call = replace(call, axes=tuple(order), args=call.args[::-1])
        axes = tuple((axis, symbol(self.inner) if axis == row else size) for axis, size in call.axes)
        call = replace(call, axes=axes).substitute(self.symbols)
        for operand, own in zip(call.args, call.views, strict=True):
            if not {v for i in operand.index for v, _ in i.terms} <= {*own}:
                raise IllegalMove(f"{call.name} has no transpose")
        return call

    def features_of(self, call: Call) -> dict[str, str]:
        """The blocks of features that a product reads, by what they are called in the body's loop."""
        body, names = self.body, dict[str, str]()
        for block in [o.buffer for o in call.args if o.buffer in body.features]:
            if block not in self.features:
                own = body.features[block]
                name = self.block(block, block, body.dtype_of_block(block), (symbol(self.inner), own.size))
                rows = ((body.row, symbol(self.inner)),)
                kernel = body.kernel_of_features(block, name, self.now(own.value), rows, self.types)
                self.features[block] = kernel.substitute(self.symbols).rehashed(self.types)
            names[block] = self.features[block].writes[0]
        return names

    def store(self, p: Product, value: str) -> Stmt:
        """The store of a value that is no product."""
        dtype = self.body.stmts[value].dtype
        assert dtype is not None
        known = self.blocks.get(value)
        block = known.name if known else self.block(value, p.call.args[p.place].buffer, dtype)
        return Stmt("", "store", (value,), dtype, block, self.body.everywhere[::-1])

    def kernel(self, stores: Sequence[Stmt]) -> Kernel:
        rows = ((self.body.row, symbol(self.inner)),)
        kernel = self.body.named(self.columns_axis, rows, stores, self.types, self.placed)
        return kernel.substitute(self.symbols).rehashed(self.types)

    def placed(self, s: Stmt) -> Stmt:
        """A statement with the position in the block for that in all columns."""
        if s.op == "load" and s.buffer in self.body.computed:
            return s.altered(buffer=self.blocks[s.name].name, index=s.index[::-1])
        return s if s.buffer in self.private else s.altered(index=self.cut.index(s.index, self.body.column))

    def carry(self, p: Product) -> Carry:
        axes, out = dict(p.call.axes), p.call.out.buffer
        shape = (symbol(self.cut.count), *(axes[axis] for axis in p.call.result_axes if axis != p.column))
        name = fresh_name(f"{out}.sum", self.taken)
        self.types[name] = Type(self.types[out].dtype.compute, shape)
        self.private.add(name)
        return Carry(name, self.types[name], "sum")

    def added(self, p: Product, block: str, carry: Carry) -> Call:
        """A product that adds the rows of a block to the carry."""
        rest = (axis for axis in p.call.result_axes if axis != p.column)
        out = Operand(carry.name, tuple(map(Index.of, (p.column, *rest))))
        call = self.cut.product(p, p.column, out, block, add=True)
        args = list(call.args)
        args[p.place] = Operand(block, (Index.of(p.column), Index.of(p.row)))
        return self.turned(replace(call, args=tuple(args)), p.row, p.column)

    def result(self, p: Product, carry: Carry) -> Kernel:
        kernel = stored(self.body, p, p.column, self.columns_axis, carry, self.types, self.body.intern, self.placed)
        return kernel.substitute(self.symbols).rehashed(self.types)
