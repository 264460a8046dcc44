"""carry_sums: the columns of a loop over blocks of rows come in blocks, too, and sums over columns are carried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...ir.dims import Size, assuming, symbol
from ...ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Sweep, Tile
from ...ir.statement import REDUCTIONS, Axis, Index, Operand, Stmt
from ...ir.types import DType, Type
from ..loops.legality import IllegalMove, attempt
from ..manager import program_pass
from ..row_blocking.fission import fresh_name
from .body import Body, Cut, Product, body_of, stored
from .carried import Plan, Sum
from .row_loop import row_loop

CARRIED_AS = {"max": "top", "min": "bottom", "sum": "total", "prod": "product"}
"""What the carry of a reduction is called, by what it combines by."""


@program_pass("REAL")
def carry_sums(program: Program, *, rows: Size = 64, columns: Size = 64, tile: Tile | None = None) -> Program:
    """loop rows(n: N) { matmul, softmax, matmul }  ->  loop rows(n: N) { sweep cols(v: V) { carry max, sum by exp(max),
    product by exp(max) }, divide }, and so for a kernel alone that has a maximum and a sum by it.

    Licence REAL: sums are added up in blocks of columns, relative to the maximum so far, and factors of a row multiply
    them once.  A sum that cannot be carried along its maximum gets a sweep of its own, in which products are computed
    again.  Loops whose steps are not all of rows times columns, and those that have sweeps, stay.

    :param rows, columns: of a block.  :param tile: what the loops say of a GPU.
    """
    with assuming(program.assumptions):
        for number, step in enumerate(program.steps):
            loop = attempt(row_loop, step, program) if isinstance(step, Kernel) else step
            if not isinstance(loop, Loop):
                continue
            steps = (*program.steps[:number], loop, *program.steps[number + 1 :])
            body = attempt(body_of, loop, replace(program, steps=steps))
            if body is None or (loop is not step and not _has_carried(body)):
                continue
            blocked = attempt(swept, body, replace(program, steps=steps), rows, columns, tile)
            if blocked is not None:
                program = replace(program, steps=tuple(blocked if s is loop else s for s in steps))
    return program


def swept(body: Body, program: Program, rows: Size = 64, columns: Size = 64, tile: Tile | None = None) -> Loop:
    """A loop of the program with its columns in blocks, too.

    :raises IllegalMove: a block of columns would be a part of each row of a product's result.
    """
    if any(map(_turned, body.added)):
        raise IllegalMove(f"{body.loop.name} adds up rows whose parts are columns")
    return _Writer(body, program, rows, columns).loop(tile)


def _turned(p: Product) -> bool:
    """Whether a block of columns would be a part of each row of a product's result, which a product does not write."""
    return p.call.result_axes[-1] == p.column


def _has_carried(body: Body) -> bool:
    """Whether a sum of a body is carried along its maximum."""
    plan = Plan(body)
    return any(plan.of(name).by for name, s in list(body.stmts.items()) if s.op in REDUCTIONS)


@dataclass
class _Roots:
    """What one sweep is for.

    :ivar reduced: reductions by their names, :ivar contracted: products that sum over columns, :ivar added: products
        that sum over rows, :ivar stores: of columns.
    """

    reduced: dict[str, Sum] = field(default_factory=dict)
    contracted: list[tuple[Product, Sum]] = field(default_factory=list)
    added: list[Product] = field(default_factory=list)
    stores: list[Stmt] = field(default_factory=list)


class _Writer:
    """Writes a body as a loop with sweeps.

    :ivar taken: names that are not free.  :ivar carries: by the names of reductions.  :ivar of_products: by the
        results of products.
    """

    def __init__(self, body: Body, program: Program, rows: Size, columns: Size):
        self.body, self.rows, self.columns = body, rows, columns
        loop, gone = body.loop, {b.name for b in body.loop.blocks}
        self.types: dict[str, Type] = {name: type_ for name, type_ in program.types.items() if name not in gone}
        self.taken = {*program.dims, *self.types, *(name for other in program.loops for name in other.symbols)}
        self.taken -= {name for name, _ in loop.cols}
        self.plan = Plan(body)
        self.carries: dict[str, Carry] = {}
        self.of_products: dict[str, Carry] = {}

    @property
    def count(self) -> Size:
        return symbol(self.body.loop.count)

    def loop(self, tile: Tile | None) -> Loop:
        sweeps = tuple(map(self.sweep, self.roots()))
        after = tuple(self.after())
        return replace(self.body.loop, by=self.rows, blocks=(), cols=(), to=0, sweeps=sweeps, steps=after, tile=tile)

    def roots(self) -> Sequence[_Roots]:
        """What each sweep is for."""
        body, plan = self.body, self.plan
        contracted = [(p, plan.carried(p.value, "sum")) for p in body.contracted]
        wanted = [s.args[0] for s in body.stores] + [p.value for p in body.added]
        wanted += [v for _, total in contracted for v in (total.value, *total.factors)]
        wanted += [
            v for call in (*body.computed.values(), *(p.call for p in body.added)) for v in body.features_of(call)
        ]
        reduced: dict[str, Sum] = {}
        while wanted:
            for name in body.reductions(wanted.pop()):
                if name not in reduced:
                    total = reduced[name] = plan.of(name)
                    wanted += [total.value, *total.factors]
        columns = [s for s in body.stores if body.varies(s.args[0])]
        numbers = [total.sweep for total in (*reduced.values(), *(total for _, total in contracted))]
        numbers += [plan.sweep_of(s.args[0]) for s in columns] + [self.sweep_of(p) for p in body.added]
        sweeps = [_Roots() for _ in range(1 + max(numbers, default=-1))]
        for name, total in sorted(reduced.items(), key=lambda item: (bool(item[1].by), item[1].combine)):
            sweeps[total.sweep].reduced[name] = total
        for p, total in contracted:
            sweeps[total.sweep].contracted.append((p, total))
        for product in body.added:
            sweeps[self.sweep_of(product)].added.append(product)
        for s in columns:
            sweeps[plan.sweep_of(s.args[0])].stores.append(s)
        return [sweep for sweep in sweeps if sweep != _Roots()]

    def sweep_of(self, p: Product) -> int:
        """The number of the sweep that adds a product over rows."""
        return max(map(self.plan.sweep_of, (p.value, *self.body.features_of(p.call))))

    # -- one sweep -----------------------------------------------------------------------------------------------------

    def sweep(self, roots: _Roots) -> Sweep:
        cut = Cut(self.body, fresh_name("col", self.taken), fresh_name("cols", self.taken))
        carries = [self.carry(name, total) for name, total in roots.reduced.items()]
        blocks = _Blocks(self, cut)
        parts: tuple[list[Stmt], list[Stmt]] = ([], [])  # before the maxima of the block are known, and after
        for name, total in roots.reduced.items():
            parts[bool(total.by)].extend(self.combination(name, total))
        for s in roots.stores:
            parts[0].append(s.altered(args=(self.now(s.args[0]),)))
        products = list[Call]()
        for p, total in roots.contracted:
            carry = self.of_products[p.call.out.buffer] = self.product_carry(p, total)
            carries.append(carry)
            operand = blocks.operand(p, self.now(total.value), parts[bool(total.by)])
            rest = (axis for axis in p.call.result_axes if axis != p.row)
            out = Operand(carry.name, tuple(map(Index.of, (p.row, *rest))))
            products.append(cut.product(p, p.column, out, operand, add=True))
        for p in roots.added:
            operand = blocks.operand(p, self.now(p.value), parts[0])
            products.append(cut.product(p, p.column, cut.outside(p.call.out, p.column), operand, add=True))
        kernels = [blocks.kernel(effects) for effects in parts if effects]
        products = [cut.renamed(call, blocks.features_of(call)) for call in products]
        computed = [cut.renamed(call, blocks.features_of(call)) for call in blocks.computed.values()]
        steps: tuple[Kernel | Call, ...] = (*blocks.features.values(), *computed, *kernels, *products)
        to = self.body.loop.to if self.body.loop.cols and not roots.stores else None  # a store leaves nothing out
        size = self.body.size
        return Sweep((cut.first, size), self.columns, cut.count, tuple(carries), blocks.in_order, steps, to=to)

    def now(self, value: str) -> str:
        """A value, with what carries hold for reductions."""
        return self.body.replaced(value, {name: self.result(name) for name in self.body.reductions(value)})

    def result(self, name: str) -> str:
        """What a reduction has come to: its carry, times the factors of a row."""
        carry = self.carries[name]
        load = Stmt("", "load", (), carry.type.dtype, carry.name, (Index.of(self.body.row),))
        return self.times(load, carry, self.plan.of(name))

    def times(self, load: Stmt, carry: Carry, total: Sum) -> str:
        """What a carry holds, times the factors of a row."""
        body, dtype = self.body, carry.type.dtype
        value = body.intern(load)
        for factor in map(self.now, total.factors):
            if body.stmts[factor].dtype is not dtype:
                factor = body.add("cast", factor, dtype=dtype, attrs=(("dtype", dtype),))
            value = body.add("mul", value, factor, dtype=dtype)
        return value

    def carry(self, name: str, total: Sum) -> Carry:
        dtype = self.body.stmts[name].dtype
        assert dtype is not None
        carry = self.fresh_carry(CARRIED_AS[total.combine], Type(dtype, (self.count,)), total)
        self.carries[name] = carry
        return carry

    def product_carry(self, p: Product, total: Sum) -> Carry:
        axes, out = dict(p.call.axes), p.call.out.buffer
        shape = (self.count, *(axes[axis] for axis in p.call.result_axes if axis != p.row))
        return self.fresh_carry(f"{out}.sum", Type(self.types[out].dtype.compute, shape), total)

    def fresh_carry(self, name: str, type_: Type, total: Sum) -> Carry:
        carry = Carry(
            fresh_name(name, self.taken), type_, total.combine, self.carries[total.by].name if total.by else ""
        )
        self.types[carry.name] = type_
        return carry

    def combination(self, name: str, total: Sum) -> Iterator[Stmt]:
        """Statements that combine the columns of a block with those before."""
        s, carry = self.body.stmts[name], self.carries[name]
        how = () if total.combine == "sum" else (("combine", total.combine),)
        reduced = self.body.intern(s.altered(name="", args=(self.now(total.value),)))
        yield Stmt("", "accum", (reduced,), s.dtype, carry.name, (Index.of(self.body.row),), attrs=how, of=s.of)

    # -- after the sweeps ----------------------------------------------------------------------------------------------

    def after(self) -> Iterator[Kernel]:
        """What is done once for each row."""
        stores = [s.altered(args=(self.now(s.args[0]),)) for s in self.body.stores if not self.body.varies(s.args[0])]
        if stores:
            yield self.body.named(self.rows_axis, (), stores, self.types)
        for p in self.body.contracted:
            yield self.divided(p)

    @property
    def rows_axis(self) -> tuple[Axis, ...]:
        return ((self.body.row, self.count),)

    def divided(self, p: Product) -> Kernel:
        """The kernel that stores what a sweep summed as the product's result, times its factors."""
        carry, total = self.of_products[p.call.out.buffer], self.plan.carried(p.value, "sum")
        return stored(
            self.body, p, p.row, self.rows_axis, carry, self.types, lambda load: self.times(load, carry, total)
        )


class _Blocks:
    """The blocks of one sweep, and the products that compute some.

    :ivar own: by name.  :ivar computed: the products, and :ivar features: the kernels of rows times features, by what
        their blocks are called in the loop.
    """

    def __init__(self, writer: _Writer, cut: Cut):
        self.writer, self.cut = writer, cut
        self.own: dict[str, Buffer] = {}
        self.computed: dict[str, Call] = {}
        self.stored: dict[str, str] = {}
        self.features: dict[str, Kernel] = {}

    @property
    def body(self) -> Body:
        return self.writer.body

    @property
    def in_order(self) -> tuple[Buffer, ...]:
        """The blocks: those of products first."""
        computed = [call.out.buffer for call in self.computed.values()]
        features = [kernel.writes[0] for kernel in self.features.values()]
        return tuple(self.own[name] for name in (*features, *computed, *self.stored.values()))

    def fresh(self, name: str, dtype: DType, columns: Size = 0) -> str:
        """A new block."""
        writer = self.writer
        name = fresh_name(name, writer.taken)
        type_ = writer.types[name] = Type(dtype, (writer.count, columns or symbol(self.cut.count)))
        self.own[name] = Buffer(name, type_, "block")
        return name

    def product(self, block: str) -> str:
        """The block of the sweep that a product of the loop computes."""
        if block not in self.computed:
            call, dtype = self.body.computed[block], self.body.dtype_of_block(block)
            out = replace(call.out, buffer=self.fresh(block, dtype))
            column = str(call.out.index[1].variable)
            args = (self.cut.outside(o, column) for o in call.args)
            self.computed[block] = self.cut.call(call, column, out, args, add=False)
        return self.computed[block].out.buffer

    def features_of(self, call: Call) -> dict[str, str]:
        """The blocks of features that a product reads, by what they are called in the loop."""
        body, writer, names = self.body, self.writer, dict[str, str]()
        for block in [o.buffer for o in call.args if o.buffer in body.features]:
            if block not in self.features:
                own = body.features[block]
                name = self.fresh(block, body.dtype_of_block(block), own.size)
                value = writer.now(own.value)
                self.features[block] = body.kernel_of_features(block, name, value, writer.rows_axis, writer.types)
            names[block] = self.features[block].writes[0]
        return names

    def operand(self, p: Product, value: str, effects: list[Stmt]) -> str:
        """The block that holds a value; ``effects`` store it if nothing does yet."""
        s = self.body.stmts[value]
        if s.op == "load" and s.buffer in self.body.computed:
            return self.product(s.buffer)
        if value not in self.stored:
            assert s.dtype is not None
            self.stored[value] = self.fresh(p.call.args[p.place].buffer, s.dtype)
            effects.append(Stmt("", "store", (value,), s.dtype, self.stored[value], self.body.everywhere))
        return self.stored[value]

    def kernel(self, effects: Sequence[Stmt]) -> Kernel:
        """The kernel with these effects in a block of columns."""
        columns = ((self.body.column, symbol(self.cut.count)),)
        return self.body.named(self.writer.rows_axis, columns, effects, self.writer.types, self.placed)

    def placed(self, s: Stmt) -> Stmt:
        """A statement with the position in the block for that in all columns."""
        if s.op == "load" and s.buffer in self.body.computed:
            return s.altered(buffer=self.product(s.buffer))
        return s if s.buffer in self.own else s.altered(index=self.cut.index(s.index, self.body.column))
