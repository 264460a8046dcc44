"""Products by an operand that a kernel decodes: the kernel becomes a step of the product's loop.

The weight of a quantized linear is an expression of codes and scales along its axes.  Where few rows are multiplied by
it, the time is that of its bytes, and as 16-bit numbers in memory it has several times those of its codes, written and
read.  In the loop nothing but a block of it is ever decoded::

    kernel rows(n: N) cols(k: K) { store w[n, k] <- cast(q[n, k]) * s[n] }
    call y[m, n] <- matmul x[m, k], w[n, k]
    ->
    loop rows(row: N) {
      sweep cols(col: K) {
        carry y.sum: f32[rows,M] sum
        block w: bf16[rows,cols]
        kernel rows(i: rows) cols(j: cols) { store w[i, j] <- cast(q[i + (row), j + (col)]) * s[i + (row)] }
        call y.sum[n, m] += matmul x[m, k + (col)], w[n, k]
      }
      kernel rows(i: rows) cols(d: M) { store y[d, i + (row)] <- y.sum[i, d] }
    }

Several products of equal sizes may be one loop, with a carry and a block for each; thin products, whose results meet
theirs, are steps after its sweep.

The rows of the loop are the axis of the weight that the product keeps, whichever of its two axes that is: forward and
the gradient of x are the same.  Rows of x are the loop's features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.tiles import MOST_FEATURES
from ...ir.dims import Size, evaluate, symbol
from ...ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Step, Sweep
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS, Index, Operand, Stmt
from ...ir.types import F32, Type
from ...process.forks import cached_property
from ..loops.legality import IllegalMove
from ..row_blocking.fission import fresh_name
from .body import BARRED
from .digits import Digits

ROW, COLUMN, FEATURE = "i", "j", "d"
"""The axes of the loop's kernels."""


@dataclass(frozen=True)
class Decoded:
    """A product and the kernel that writes one of its operands.

    :param place: of the operand.  :param kept, summed, other: the axes of the call: those of the operand, of which the
        result has one, and the other one of the result.
    """

    call: Call
    kernel: Kernel
    place: int
    kept: str
    summed: str
    other: str

    @property
    def operand(self) -> Operand:
        return self.call.args[self.place]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of its axes: loops of products of which these are equal may be one."""
        own = dict(self.call.axes)
        return own[self.kept], own[self.summed], own[self.other]


def decoded_products(program: Program) -> Iterator[Decoded]:
    """The products of a program with an operand that nothing but they read, and that is larger than what it is computed
    from.
    """
    for call in program.steps:
        if not isinstance(call, Call) or not REGISTRY[call.op].contraction or call.parts or call.epilogue or call.add:
            continue
        axes = [axis for axis, _ in call.axes]
        kept = [i.variable for i in call.out.index if i != Index()]
        for place, operand in enumerate(call.args):
            own = [i.variable for i in operand.index]
            rest = [axis for axis in axes if axis not in own]
            if len(axes) == 3 and len(own) == 2 and len(rest) == 1 and not any(o.scale for o in call.args):
                kernel = _decoder(program, call, operand)
                rows = [axis for axis in own if axis in kept]
                if kernel is not None and len(rows) == 1:
                    (summed,) = (axis for axis in own if axis not in kept)
                    yield Decoded(call, kernel, place, str(rows[0]), str(summed), rest[0])


def _decoder(program: Program, call: Call, operand: Operand) -> Kernel | None:
    """The kernel that computes an operand, element by element, for this product alone."""
    root = program.root(operand.buffer)
    if program.buffer[root].kind != "temp":
        return None
    written = [s for s in program.steps if root in map(program.root, s.writes)]
    readers = [s for s in program.steps if root in map(program.root, s.reads)]
    if len(written) != 1 or readers != [call] or not isinstance(written[0], Kernel):
        return None
    kernel = written[0]
    axes = [axis for axis, _ in (*kernel.rows, *kernel.cols)]
    plain = not any(s.op in (*BARRED, *REDUCTIONS) for s in kernel.body) and not kernel.order and not kernel.strategy
    stores = [s for s in kernel.body if s.op == "store"]
    if not plain or len(stores) != 1 or [i.variable for i in stores[0].index] != axes or stores[0].where:
        return None
    between = program.steps[program.steps.index(kernel) : program.steps.index(call)]
    if {program.root(b) for step in between for b in step.writes} & set(map(program.root, kernel.reads)):
        return None
    known = [program.types[b].nbytes for b in {root, *kernel.reads}]
    if not all(isinstance(n, int) for n in known):
        return None
    read = sum(evaluate(program.types[b].nbytes, {}) for b in kernel.reads)
    return kernel if read < evaluate(program.types[root].nbytes, {}) else None


@dataclass(frozen=True)
class Thin:
    """A product of few terms whose result meets that of decoded ones, an adapter's ``t[m, n] <- low[m, k] high[n, k]``.

    :param kept, other: its axes: those of the loop's rows and of its features.
    """

    call: Call
    kept: str
    other: str


def thin_products(program: Program, products: Sequence[Decoded]) -> list[Thin]:
    """The products with the rows and features of decoded ones whose results a kernel reads with theirs."""
    p = products[0]
    at = [i.variable for i in p.call.out.index].index(p.kept)
    outs = {each.call.out.buffer for each in products}
    read = {b for kernel in program.kernels if outs & {*kernel.reads} for b in kernel.reads} - outs
    found = []
    for call in program.steps:
        plain = (
            isinstance(call, Call) and REGISTRY[call.op].contraction and not (call.parts or call.epilogue or call.add)
        )
        if not isinstance(call, Call) or not plain or call.out.buffer not in read or len(call.axes) != 3:
            continue
        axes, names = dict(call.axes), [i.variable for i in call.out.index]
        if any(_decoder(program, call, o) for o in call.args):
            continue
        if any(o.scale for o in call.args) or len(names) != len(p.call.out.index) or names[at] is None:
            continue
        rest = [name for name in names if name is not None and name != names[at]]
        summed = [size for axis, size in call.axes if axis not in names]
        if len(rest) == 1 and (axes[str(names[at])], axes[rest[0]]) == (p.sizes[0], p.sizes[2]) and len(summed) == 1:
            if isinstance(summed[0], int) and summed[0] <= MOST_FEATURES:
                found.append(Thin(call, str(names[at]), rest[0]))
    return found


def decoded_loop(program: Program, products: Sequence[Decoded], thin: Sequence[Thin] = ()) -> tuple[Program, Loop]:
    """The program with one loop for products of equal sizes and the kernels that decode their operands; it has no tile
    yet.

    :param thin: products that are steps of the loop after its sweep.

    :raises IllegalMove: a kernel's axes are not those of its operand, or one of the products waits for another one.
    """
    p = products[0]
    taken = {*program.dims, *program.buffer, *(name for loop in program.loops for name in loop.symbols)}
    row, rows, col, cols = (fresh_name(name, taken) for name in ("row", "rows", "col", "cols"))
    parts = [_Part(program, each, row, rows, col, cols, taken) for each in products]
    steps = tuple(step for part in parts for step in (part.decode(), part.product()))
    carries, blocks = tuple(part.carry for part in parts), tuple(part.block for part in parts)
    sweep = Sweep((col, dict(p.call.axes)[p.summed]), 64, cols, carries, blocks, steps)
    stores = [part.stored() for part in parts]
    own = [_thin_steps(program, each, row, rows, taken) for each in thin]
    after: tuple[Kernel | Call, ...] = (*(c for _, c, _ in own), *stores, *(store for _, _, store in own))
    results = tuple(block for block, _, _ in own)
    loop = Loop((), (row, dict(p.call.axes)[p.kept]), 64, rows, results, after, sweeps=(sweep,))
    members = {id(step) for each in products for step in (each.kernel, each.call)} | {id(each.call) for each in thin}
    kept = _gathered(program, [step for step in program.steps if id(step) in members], loop)
    roots = {program.root(each.operand.buffer) for each in products}
    buffers = tuple(b for b in program.buffers if program.root(b.name) not in roots)
    return replace(program, steps=kept, buffers=buffers), loop


def _gathered(program: Program, members: Sequence[Step], together: Step) -> tuple[Step, ...]:
    """The steps with one in the place of some, in order: those between that wait for one of these follow it.

    :raises IllegalMove: one of the members waits for such a step.
    """
    begin, end = (program.steps.index(step) for step in (members[0], members[-1]))
    earlier, passed, later = list(program.steps[:begin]), list[Step](), list[Step]()

    def waits(step: Step, others: Sequence[Step]) -> bool:
        reads, writes = ({*map(program.root, names)} for names in (step.reads, step.writes))
        return any(
            (reads | writes) & {*map(program.root, other.writes)} or writes & {*map(program.root, other.reads)}
            for other in others
        )

    for step in program.steps[begin : end + 1]:
        if any(step is member for member in members):
            passed.append(step)
            if waits(step, later):
                raise IllegalMove(f"{step.name} waits for what follows others of its loop")
        else:
            (later if waits(step, [*passed, *later]) else earlier).append(step)
    return (*earlier, together, *later, *program.steps[end + 1 :])


@dataclass(frozen=True)
class _Part:
    """What a product becomes in a loop.

    :param row, rows, col, cols: symbols of a block's first row, its rows, first column, and columns.
    :param taken: names that there are.
    """

    program: Program
    p: Decoded
    row: str
    rows: str
    col: str
    cols: str
    taken: set[str]

    @cached_property
    def carry(self) -> Carry:
        name = fresh_name(f"{self.p.call.out.buffer}.sum", self.taken)
        return Carry(name, Type(F32, (symbol(self.rows), dict(self.p.call.axes)[self.p.other])), "sum")

    @cached_property
    def block(self) -> Buffer:
        operand = self.p.operand.buffer
        shape = symbol(self.rows), symbol(self.cols)
        return Buffer(operand, Type(self.program.types[operand].dtype, shape), "block")

    @cached_property
    def types(self) -> Mapping[str, Type]:
        return {**self.program.types, self.carry.name: self.carry.type, self.block.name: self.block.type}

    def decode(self) -> Kernel:
        """The kernel over a block of rows and columns."""
        p, sizes = self.p, dict(self.p.call.axes)
        places = {p.kept: Index(symbol(self.row), ((ROW, 1),)), p.summed: Index(symbol(self.col), ((COLUMN, 1),))}
        groups = [(places[str(i.variable)], sizes[str(i.variable)]) for i in p.operand.index]
        body = Digits(p.kernel, groups).body(
            lambda s: replace(s, buffer=self.block.name, index=(Index.of(ROW), Index.of(COLUMN)))
        )
        axes = ((ROW, symbol(self.rows)),), ((COLUMN, symbol(self.cols)),)
        return Kernel("", *axes, body, note=p.kernel.note).live.named_by_structure(meaning_of(p.kernel), self.types)

    def product(self) -> Call:
        """The call that adds a block's part of the product up."""
        p = self.p
        behind = {p.summed: Index(symbol(self.col), ((p.summed, 1),))}
        right = p.call.args[1 - p.place]
        right = replace(right, index=tuple(i.compose(behind) for i in right.index))
        args = Operand(self.block.name, (Index.of(p.kept), Index.of(p.summed))), right
        other = dict(p.call.axes)[p.other]
        axes = ((p.kept, symbol(self.rows)), (p.other, other), (p.summed, symbol(self.cols)))
        added = Operand(self.carry.name, (Index.of(p.kept), Index.of(p.other)))
        return replace(p.call, axes=axes, out=added, args=args, add=True)

    def stored(self) -> Kernel:
        """The kernel that stores what the sweep summed as the product's result."""
        p, rows = self.p, (self.row, self.rows)
        return _stored(self.carry.name, p.call, p.kept, p.other, rows, meaning_of(p.kernel), self.types)


def _thin_steps(program: Program, t: Thin, row: str, rows: str, taken: set[str]) -> tuple[Buffer, Call, Kernel]:
    """The result of a thin product for a block of rows, the call that computes it, and the kernel that stores it."""
    sizes = dict(t.call.axes)
    block = Buffer(fresh_name(f"{t.call.out.buffer}.rows", taken), Type(F32, (symbol(rows), sizes[t.other])), "block")
    behind = {t.kept: Index(symbol(row), ((t.kept, 1),))}
    given = sorted(t.call.args, key=lambda o: Index.of(t.kept) not in o.index)
    args = tuple(replace(o, index=tuple(i.compose(behind) for i in o.index)) for o in given)
    summed = [(axis, size) for axis, size in t.call.axes if axis not in (t.kept, t.other)]
    axes = ((t.kept, symbol(rows)), (t.other, sizes[t.other]), *summed)
    out = Operand(block.name, (Index.of(t.kept), Index.of(t.other)))
    call = replace(t.call, axes=axes, out=out, args=args)
    types = {**program.types, block.name: block.type}
    store = _stored(block.name, t.call, t.kept, t.other, (row, rows), meaning_of(call), types)
    return block, call, store


def _stored(
    value: str, call: Call, kept: str, other: str, rows: tuple[str, str], meaning: str, types: Mapping[str, Type]
) -> Kernel:
    """The kernel that stores a block's rows and features of a product's result, in its dtype.

    :param value: the buffer that they are in.  :param rows: symbols of the first row and of their number.
    """
    out, dtype = call.out, types[call.out.buffer].dtype
    body = [Stmt("%0", "load", (), F32, value, tuple(map(Index.of, (ROW, FEATURE))))]
    if dtype is not F32:
        body.append(Stmt("%1", "cast", ("%0",), dtype, attrs=(("dtype", dtype),)))
    places = {kept: Index(symbol(rows[0]), ((ROW, 1),)), other: Index.of(FEATURE)}
    body.append(Stmt("", "store", (body[-1].name,), dtype, out.buffer, tuple(i.compose(places) for i in out.index)))
    axes = ((ROW, symbol(rows[1])),), ((FEATURE, dict(call.axes)[other]),)
    return Kernel("", *axes, tuple(body), note=call.note).named_by_structure(meaning, types)


def meaning_of(step: Kernel | Call) -> str:
    """The name of a step without the digest behind it."""
    return step.name.rpartition("_")[0] or step.name
