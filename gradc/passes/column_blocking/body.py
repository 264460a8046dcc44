"""The steps of a loop over blocks of rows as one straight line of statements: what is computed, whichever step does it.

A kernel's statement that loads what another step stored becomes that value; a product whose rows are the loop's becomes
a load of its block.  Equal statements are one.  So sums over columns show what they are sums of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ir.dims import Dim, Size, same, symbol, symbols
from ...ir.kernel import Call, Carry, Kernel, Loop, Program
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS, Axis, Index, Operand, Stmt
from ...ir.types import BOOL, I64, DType, Type
from ...ir.walk import postorder
from ..loops.legality import IllegalMove
from ..row_blocking.fission import fresh_name

BARRED = ("accum", "check", "search", "scan", "argmax_cols", "argmin_cols")
"""Statements that no block of columns can do its part of."""


@dataclass(frozen=True)
class Product:
    """A product of a loop one of whose operands is a block ``[rows, columns]``.

    :param place: the operand's place.  :param value: what the block holds.  :param row, column: its axes in the call.
    """

    call: Call
    place: int
    value: str
    row: str
    column: str


@dataclass(frozen=True)
class Features:
    """A block ``[rows, features]``, which products read as well as one of rows times columns.

    :param value: what it holds, along the rows and the axis ``axis``.
    """

    value: str
    axis: str
    size: Size


@dataclass
class Body:
    """What a block of rows of a loop computes.

    :ivar row, column: names of the axes of statements.  :ivar size: of all columns.
    :ivar stmts: by their names; every statement has other names than those of the loop's kernels.
    :ivar computed: products whose results are blocks, by the names of these; statements load them.
    :ivar features: the other blocks, by their names.
    :ivar contracted: products that sum over columns.  :ivar added: products that sum over rows.
    :ivar stores: to buffers outside of the loop.
    :ivar origin: the step of each value, and its name there.
    """

    loop: Loop
    row: str
    column: str
    size: Size
    stmts: dict[str, Stmt] = field(default_factory=dict)
    computed: dict[str, Call] = field(default_factory=dict)
    features: dict[str, Features] = field(default_factory=dict)
    contracted: list[Product] = field(default_factory=list)
    added: list[Product] = field(default_factory=list)
    stores: list[Stmt] = field(default_factory=list)
    origin: dict[str, tuple[int, str]] = field(default_factory=dict)
    _interned: dict[Any, str] = field(default_factory=dict)
    _varying: set[str] = field(default_factory=set)

    @property
    def kernel(self) -> Kernel:
        """The first kernel, after whose meaning others are called."""
        return next(step for step in self.loop.steps if isinstance(step, Kernel))

    def features_of(self, call: Call) -> list[str]:
        """The values of the blocks of rows times features that a product reads."""
        return [self.features[o.buffer].value for o in call.args if o.buffer in self.features]

    def add(self, op: str, *args: str, dtype: DType, attrs: Iterable[tuple[str, Any]] = ()) -> str:
        """The name of a value, computed anew if it is not there."""
        return self.intern(Stmt("", op, args, dtype, attrs=tuple(attrs)))

    def constant(self, value: float, dtype: DType) -> str:
        return self.add("const", dtype=dtype, attrs=(("value", value),))

    def intern(self, s: Stmt) -> str:
        """The name of the value that a statement computes."""
        key = (s.op, s.args, s.dtype, s.buffer, s.index, s.where, repr(s.attrs))
        if key not in self._interned:
            name = self._interned[key] = f"%{len(self.stmts)}"
            self.stmts[name] = s.altered(name=name)
            along = any(v == self.column for i in s.index for v, _ in i.terms)
            if s.op not in REDUCTIONS and (along or any(map(self.varies, s.uses))):
                self._varying.add(name)
        return self._interned[key]

    def varies(self, name: str) -> bool:
        """Whether a value depends on the column."""
        return name in self._varying

    def slice(self, values: Iterable[str]) -> list[Stmt]:
        """The statements that values depend on, in order."""
        return [self.stmts[name] for name in self._ordered(values, lambda name: self.stmts[name].uses)]

    def reductions(self, value: str) -> list[str]:
        """The reductions that a value depends on, but not through others."""

        return [name for name in self.down_to_reductions(value) if self.stmts[name].op in REDUCTIONS]

    def kernel_of_features(
        self, block: str, name: str, value: str, rows: tuple[Axis, ...], types: Mapping[str, Type]
    ) -> Kernel:
        """The kernel that stores a block of features.

        :param block: what it is called in the loop, :param name: and in the sweep.  :param value: what it holds there.
        """
        own, dtype = self.features[block], self.dtype_of_block(block)
        store = Stmt("", "store", (value,), dtype, name, (Index.of(self.row), Index.of(own.axis)))
        return self.named(rows, ((own.axis, own.size),), [store], types)

    def down_to_reductions(self, value: str) -> Iterable[str]:
        """What a value depends on, but not through reductions, in order."""
        return self._ordered([value], lambda at: () if self.stmts[at].op in REDUCTIONS else self.stmts[at].uses)

    def _ordered(self, values: Iterable[str], uses: Callable[[str], tuple[str, ...]]) -> dict[str, None]:
        done: dict[str, None] = {}
        for name in postorder(values, done, uses):
            done[name] = None
        return done

    def replaced(self, value: str, other: Mapping[str, str]) -> str:
        """A value computed with other values for some that it depends on."""
        known = dict(other)
        for name in self._ordered([value], lambda name: () if name in other else self.stmts[name].uses):
            if name not in known:
                s = self.stmts[name]
                index = tuple(i.renamed(known) for i in s.index)
                args = tuple(known[a] for a in s.args)
                known[name] = self.intern(s.altered(args=args, index=index, where=known.get(s.where, "")))
        return known[value]

    @property
    def everywhere(self) -> tuple[Index, ...]:
        """The index of a row and a column."""
        return Index.of(self.row), Index.of(self.column)

    def dtype_of_block(self, block: str) -> DType:
        return next(b.type.dtype for b in self.loop.blocks if b.name == block)

    def named(
        self,
        rows: tuple[Axis, ...],
        cols: tuple[Axis, ...],
        effects: Sequence[Stmt],
        types: Mapping[str, Type],
        placed: Callable[[Stmt], Stmt] = lambda s: s,
    ) -> Kernel:
        """A kernel of effects and what they depend on, called after what the loop's kernels compute.

        :param placed: what a statement is in the kernel.
        """
        first = self.kernel
        meaning = first.name.rpartition("_")[0] or first.name
        body = (*self.slice(u for s in effects for u in s.uses), *effects)
        kernel = Kernel("", rows, cols, tuple(map(placed, body)), note=first.note)
        return kernel.live.named_by_structure(meaning, types)


def body_of(loop: Loop, program: Program) -> Body:
    """The body of a loop.

    :raises IllegalMove: its steps are not all of rows times columns, or hand one another something else.
    """
    if loop.sweeps or loop.sequential:
        raise IllegalMove(f"{loop.name} has its columns in blocks already, or adds up over positions")
    kernels = [step for step in loop.steps if isinstance(step, Kernel)]
    made = {step.out.buffer for step in loop.steps if isinstance(step, Call)}
    widths = [b.type.shape[1] for b in loop.blocks if b.name in made and b.type.rank == 2]
    widths += [size for k in kernels for _, size in k.cols if not made]
    first = next((k for k in kernels if len(k.cols) == 1 and widths and same(k.cols[0][1], widths[0])), None)
    if first is None or len(first.rows) != 1 or not all(same(widths[0], width) for width in widths):
        raise IllegalMove(f"{loop.name} has no kernel of rows times columns, or several axes of them")
    own = loop.cols[0][1] if loop.cols else widths[0]
    reader = _Reader(Body(loop, first.rows[0][0], first.cols[0][0], own), program, widths[0])
    for number, step in enumerate(loop.steps):
        reader.call(step) if isinstance(step, Call) else reader.kernel(number, step)
    return reader.body


class _Reader:
    """Reads the steps of a loop into its body.

    :param width: the size of a block's columns.
    """

    def __init__(self, body: Body, program: Program, width: Size):
        self.body, self.width = body, width
        self.blocks = {b.name: b for b in body.loop.blocks}
        self.types = program.types
        self.root = program.root
        self.written = {program.root(b) for b in body.loop.writes}
        self.stored: dict[tuple[str, tuple[Index, ...]], str] = {}
        """What is in a block, or in an element outside of the loop that it writes."""

    def refuse(self, step: Kernel | Call, why: str) -> IllegalMove:
        return IllegalMove(f"{step.name} in {self.body.loop.name}: {why}")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        if not REGISTRY[call.op].contraction or call.parts or call.epilogue:
            raise self.refuse(call, "no plain product")
        features, axes = self.body.features, dict(call.axes)
        read = [place for place, o in enumerate(call.args) if o.buffer in self.blocks and o.buffer not in features]
        for o in (o for o in call.args if o.buffer in features):
            row = o.index[0].variable
            if o.scale or row not in axes or not same(axes[str(row)], symbol(self.body.loop.count)):
                raise self.refuse(call, f"it reads other rows of {o.buffer} than the block's")
        if any(self.root(o.buffer) in self.written for o in call.operands if o.buffer not in self.blocks):
            raise self.refuse(call, "it reads what the loop writes")
        if call.out.buffer in self.blocks and not read:
            self.computed(call)
            return
        if len(read) != 1 or call.out.buffer in self.blocks or call.args[read[0]].scale:
            raise self.refuse(call, "its operands are not one block, and its result is none")
        product = self.product(call, read[0])
        (self.body.added if call.add else self.body.contracted).append(product)

    def computed(self, call: Call) -> None:
        row, column = (i.variable for i in call.out.index) if len(call.out.index) == 2 else ("", "")
        self.sized(call, row, column)
        if (call.out.buffer, self.body.everywhere) in self.stored:
            raise self.refuse(call, "it writes a block anew")
        if any(map(self.body.reductions, self.body.features_of(call))):
            raise self.refuse(call, "it reads what is known after all columns of another product")
        load = Stmt("", "load", (), self.blocks[call.out.buffer].type.dtype, call.out.buffer, self.body.everywhere)
        self.body.computed[call.out.buffer] = call
        self.stored[call.out.buffer, self.body.everywhere] = self.body.intern(load)

    def product(self, call: Call, place: int) -> Product:
        operand = call.args[place]
        row, column = (i.variable for i in operand.index) if len(operand.index) == 2 else ("", "")
        self.sized(call, row, column)
        assert row is not None and column is not None
        value = self.stored.get((operand.buffer, self.body.everywhere))
        kept, summed = (column, row) if call.add else (row, column)
        axes = call.result_axes
        if value is None or kept not in axes or summed in axes or (axes[-1] == kept and not call.add):
            raise self.refuse(call, f"it is no sum over {'rows' if call.add else 'columns'}")
        return Product(call, place, value, row, column)

    def sized(self, call: Call, row: str | None, column: str | None) -> None:
        """Demands that a block is indexed by its rows and columns, of which no scale has parts."""
        axes = dict(call.axes)
        whole = row in axes and column in axes and same(axes[str(row)], symbol(self.body.loop.count))
        if not whole or not same(axes[str(column)], self.width):
            raise self.refuse(call, "it goes over other axes than rows and columns of a block")
        if any(axis in (row, column) for o in call.operands for axis, _ in o.per):
            raise self.refuse(call, "a scale has parts of rows or columns")

    # -- kernels -------------------------------------------------------------------------------------------------------

    def kernel(self, number: int, kernel: Kernel) -> None:
        fits = len(kernel.rows) == 1 and len(kernel.cols) <= 1 and not kernel.order
        if not fits or not same(kernel.rows[0][1], symbol(self.body.loop.count)):
            raise self.refuse(kernel, "it goes over other axes than rows and columns of a block")
        column = self.body.column
        if not (kernel.cols and {*kernel.reads} & {*self.blocks}) and self.is_of_features(kernel):
            column = f"{column}_{len(self.body.features)}"
        elif not all(same(size, self.width) for _, size in kernel.cols):
            raise self.refuse(kernel, "it goes over other columns than a block's")
        names = {kernel.rows[0][0]: self.body.row} | {axis: column for axis, _ in kernel.cols}
        values: dict[str, str] = {}
        for s in kernel.with_axes(names).body:
            sizes = [value for _, value in s.attrs if isinstance(value, Dim)]
            if s.op in BARRED:
                raise self.refuse(kernel, f"it has a statement {s.op}")
            if any(symbols(size) & {name for name, _ in self.body.loop.cols} for size in sizes):
                raise self.refuse(kernel, "it computes with the number of a block's columns")
            args = tuple(values[a] for a in s.args)
            index = tuple(i.renamed(values) for i in s.index)
            s = s.altered(args=args, index=index, where=values.get(s.where, ""))
            if s.op == "store" and column != self.body.column:
                self.body.features[s.buffer] = Features(s.args[0], column, kernel.cols[0][1])
                continue
            if s.op == "store":
                self.store(kernel, s)
                continue
            name = self.load(kernel, s) if s.op == "load" else self.body.intern(s)
            self.body.origin.setdefault(name, (number, s.name))
            values[s.name] = name

    def is_of_features(self, kernel: Kernel) -> bool:
        """Whether a kernel does nothing but store one block that no kernel reads, of its rows and its columns."""
        stores = [s for s in kernel.body if not s.name]
        axes = (*kernel.rows, *kernel.cols)
        whole = len(stores) == 1 and stores[0].index == tuple(Index.of(axis) for axis, _ in axes) and len(axes) == 2
        kernels = (step for step in self.body.loop.steps if isinstance(step, Kernel))
        block = whole and stores[0].buffer in self.blocks
        reduces = any(s.op in REDUCTIONS for s in kernel.body)
        return block and not reduces and not any(stores[0].buffer in k.reads for k in kernels)

    def store(self, kernel: Kernel, s: Stmt) -> None:
        if s.buffer in self.blocks and s.index not in (self.body.everywhere, self.body.everywhere[:1]):
            raise self.refuse(kernel, f"it does not store to all of {s.buffer}")
        if s.buffer not in self.blocks:
            self.body.stores.append(s)
        if (s.buffer, s.index) in self.stored:
            raise self.refuse(kernel, f"it stores to {s.buffer} anew")
        self.stored[s.buffer, s.index] = s.args[0]

    def load(self, kernel: Kernel, s: Stmt) -> str:
        if s.buffer not in self.blocks and self.root(s.buffer) not in self.written:
            return self.body.intern(s)
        found = self.stored.get((s.buffer, s.index))
        if found is not None and not s.where:
            return found
        whole = self.stored.get((s.buffer, self.body.everywhere))
        place = s.index[1].variable if s.buffer in self.blocks and len(s.index) == 2 else None
        if (
            whole is None
            or s.where
            or s.index[0] != self.body.everywhere[0]
            or place is None
            or self.body.varies(place)
        ):
            raise self.refuse(kernel, f"it reads other elements of {s.buffer} than its own")
        # x[i, t]  ->  the sum of x[i, j] where j == t
        body, dtype = self.body, self.types[s.buffer].dtype
        here = body.intern(Stmt("", "index", (), I64, index=(Index.of(body.column),)))
        if body.stmts[place].dtype is not I64:
            place = body.add("cast", place, dtype=I64, attrs=(("dtype", I64),))
        chosen = body.add("eq", here, place, dtype=BOOL)
        summand = body.add("where", chosen, whole, body.constant(0.0, dtype), dtype=dtype)
        return body.add("sum_cols", summand, dtype=dtype)


# -- writing steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How the columns of a body are cut into blocks.

    :param first: the symbol of a block's first column.  :param count: of the number of its columns.
    """

    body: Body
    first: str
    count: str

    def index(self, index: tuple[Index, ...], column: str) -> tuple[Index, ...]:
        """The index of a position in all columns, by its position in the block."""
        return tuple(i.compose({column: Index(symbol(self.first), ((column, 1),))}) for i in index)

    def call(self, call: Call, column: str, out: Operand, args: Iterable[Operand], add: bool) -> Call:
        """A product of the body over the columns of a block, with these for its result and its operands."""
        axes = tuple((axis, symbol(self.count) if axis == column else size) for axis, size in call.axes)
        return replace(call, axes=axes, out=out, args=tuple(args), add=add)

    def outside(self, operand: Operand, column: str) -> Operand:
        """An operand that is no block."""
        scale = self.outside(operand.scale, column) if operand.scale else None
        return replace(operand, index=self.index(operand.index, column), scale=scale)

    def renamed(self, call: Call, names: Mapping[str, str]) -> Call:
        """A product that reads blocks under other names."""
        args = (replace(o, buffer=names.get(o.buffer, o.buffer)) for o in call.args)
        return replace(call, args=tuple(args))

    def product(self, p: Product, column: str, out: Operand, block: str, add: bool) -> Call:
        """A product whose operand is a block."""
        args = [self.outside(o, column) for o in p.call.args]
        args[p.place] = replace(p.call.args[p.place], buffer=block)
        return self.call(p.call, column, out, args, add)


def stored(
    body: Body,
    p: Product,
    kept: str,
    rows: tuple[Axis, ...],
    carry: Carry,
    types: Mapping[str, Type],
    final: Callable[[Stmt], str],
    placed: Callable[[Stmt], Stmt] = lambda s: s,
) -> Kernel:
    """The kernel that stores what a sweep summed as a product's result, in its dtype.

    :param kept: the axis of the product that the loop cuts; the kernel's ``rows`` are its block.
    :param final: load of the carry -> the value to store.  :param placed: what a statement is in the kernel.
    """
    axes, taken, rest = dict(p.call.axes), {rows[0][0]}, [axis for axis in p.call.result_axes if axis != kept]
    names = {axis: fresh_name("d", taken) for axis in rest} | {kept: rows[0][0]}
    index = tuple(Index.of(names[axis]) for axis in (kept, *rest))
    value = final(Stmt("", "load", (), carry.type.dtype, carry.name, index))
    dtype = types[p.call.out.buffer].dtype
    if dtype is not carry.type.dtype:
        value = body.add("cast", value, dtype=dtype, attrs=(("dtype", dtype),))
    where = tuple(i.renamed(names) for i in p.call.out.index)
    store = Stmt("", "store", (value,), dtype, p.call.out.buffer, where)
    return body.named(rows, tuple((names[axis], axes[axis]) for axis in rest), [store], types, placed)


__all__ = ["Body", "Cut", "Product", "body_of", "stored"]
