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

The rows of the loop are the axis of the weight that the product keeps, whichever of its two axes that is: forward and
the gradient of x are the same.  Rows of x are the loop's features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...ir.dims import evaluate, symbol
from ...ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Sweep
from ...ir.node import REGISTRY
from ...ir.statement import REDUCTIONS, Axis, Index, Operand, Stmt
from ...ir.types import F32, Type
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


def decoded_loop(program: Program, p: Decoded) -> tuple[Program, Loop]:
    """The program with a loop for a product and the kernel that decodes its operand; it has no tile yet.

    :raises IllegalMove: the kernel's axes are not those of the operand.
    """
    taken = {*program.dims, *program.buffer, *(name for loop in program.loops for name in loop.symbols)}
    row, rows, col, cols = (fresh_name(name, taken) for name in ("row", "rows", "col", "cols"))
    sizes, operand, out = dict(p.call.axes), p.operand, p.call.out
    summed = fresh_name(f"{out.buffer}.sum", taken)
    carry = Carry(summed, Type(F32, (symbol(rows), sizes[p.other])), "sum")
    block = Buffer(operand.buffer, Type(program.types[operand.buffer].dtype, (symbol(rows), symbol(cols))), "block")
    places = {p.kept: Index(symbol(row), ((ROW, 1),)), p.summed: Index(symbol(col), ((COLUMN, 1),))}
    groups = [(places[str(i.variable)], sizes[str(i.variable)]) for i in operand.index]
    body = Digits(p.kernel, groups).body(
        lambda s: replace(s, buffer=block.name, index=(Index.of(ROW), Index.of(COLUMN)))
    )
    decode = Kernel("", ((ROW, symbol(rows)),), ((COLUMN, symbol(cols)),), body, note=p.kernel.note)
    meaning = p.kernel.name.rpartition("_")[0] or p.kernel.name
    types: dict[str, Type] = {**program.types, summed: carry.type, block.name: block.type}
    decode = decode.live.named_by_structure(meaning, types)
    behind = {p.summed: Index(symbol(col), ((p.summed, 1),))}
    right = p.call.args[1 - p.place]
    right = replace(right, index=tuple(i.compose(behind) for i in right.index))
    args = Operand(block.name, (Index.of(p.kept), Index.of(p.summed))), right
    axes = ((p.kept, symbol(rows)), (p.other, sizes[p.other]), (p.summed, symbol(cols)))
    added = Operand(summed, (Index.of(p.kept), Index.of(p.other)))
    call = replace(p.call, axes=axes, out=added, args=args, add=True)
    sweep = Sweep((col, sizes[p.summed]), 64, cols, (carry,), (block,), (decode, call))
    store = _stored(p, summed, {p.kept: places[p.kept], p.other: Index.of(FEATURE)}, (ROW, symbol(rows)), types)
    loop = Loop((), (row, sizes[p.kept]), 64, rows, (), (store,), sweeps=(sweep,))
    root = program.root(operand.buffer)
    steps = tuple(loop if step is p.call else step for step in program.steps if step is not p.kernel)
    buffers = tuple(b for b in program.buffers if program.root(b.name) != root)
    return replace(program, steps=steps, buffers=buffers), loop


def _stored(p: Decoded, summed: str, places: Mapping[str, Index], rows: Axis, types: Mapping[str, Type]) -> Kernel:
    """The kernel that stores what the sweep summed as the product's result, in its dtype."""
    out, (index, dtype) = p.call.out, (tuple(map(Index.of, (ROW, FEATURE))), types[p.call.out.buffer].dtype)
    body = [Stmt("%0", "load", (), F32, summed, index)]
    if dtype is not F32:
        body.append(Stmt("%1", "cast", ("%0",), dtype, attrs=(("dtype", dtype),)))
    place = tuple(i.compose(places) for i in out.index)
    body.append(Stmt("", "store", (body[-1].name,), dtype, out.buffer, place))
    kernel = Kernel("", (rows,), ((FEATURE, dict(p.call.axes)[p.other]),), tuple(body), note=p.call.note)
    return kernel.named_by_structure(p.kernel.name.rpartition("_")[0] or p.kernel.name, types)
