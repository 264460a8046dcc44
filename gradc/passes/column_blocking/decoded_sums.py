"""Sums of a product's columns times what a kernel decodes: gradients of learned scales and zero points.

The gradient of a weight has as many elements as the weight, and that of a scale is its sum times the codes of a group.
Over the reals that is a product by the codes, as the forward has it, summed over the rows of x: no gradient of the
weight is in memory, and none is computed::

    call dw[n, k] <- matmul dy[m, n], x[m, k]
    kernel rows(n: N, g: G) cols(p: P) { store ds[n, g] <- sum_cols(dw[n, g P + p] * q[n, g P + p]) }
    ->                                             # sum_p (sum_m dy x) q = sum_m dy (sum_p q x)
    loop over(at: G) rows(row: N) {
      sweep cols(col: P) {
        carry code.sum: f32[rows,M] sum
        block code: bf16[rows,cols]
        kernel rows(i: rows) cols(j: cols) { store code[i, j] <- q[i + (row), (at P) + j + (col)] }
        call code.sum[n, m] += matmul code[n, k], x[m, (at P) + k + (col)]
      }
      kernel rows(i: rows) cols(d: M) { store ds[i + (row), (at)] <- sum_cols(code.sum[i, d] * dy[d, i + (row)]) }
    }

What a product is multiplied by is open, and there may be several: a zero point's gradient multiplies it by 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.dims import Size, product, same, symbol
from ...ir.kernel import Buffer, Call, Carry, Kernel, Loop, Program, Step, Sweep
from ...ir.statement import Axis, Index, Operand, Stmt
from ...ir.types import BF16, F32, DType, Type
from ...ir.walk import backward_slice
from ..loops.legality import refuse
from ..row_blocking.fission import fresh_name
from .decoded_products import COLUMN, FEATURE, ROW, meaning_of
from .digits import Digits

LINEAR = ("cast", "mul")
"""What a sum's terms are made of, of the product and factors: casts to f32 or to its operands' dtype."""
CODES = ("load", "index", "const", "cast", "bitcast", "bitwise_and", "right_shift", "mul", "add", "sub")
"""Statements whose results f16 has, of integers of 8 bits and numbers up to WHOLE."""
WHOLE = 2**8


@dataclass(frozen=True)
class Summed:
    """A product that nothing but the sums of a kernel read.

    :param kernel: what is done with the sums, :param beside: and what else the reader does.
    :param by_row, by_column: its operands.  :param other: the axis that it sums over.
    :param rows, groups, within: the axes of the kernel that its rows are made of, and its columns, of which the sums
        are over the last.
    :param sums: the values that are summed, each with its factors beside the product.
    """

    call: Call
    reader: Kernel
    kernel: Kernel
    beside: tuple[Kernel, ...]
    by_row: Operand
    by_column: Operand
    other: str
    rows: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    within: tuple[Axis, ...]
    sums: Mapping[str, tuple[str, ...]]

    @property
    def kept(self) -> str:
        return str(self.call.out.index[0].variable)

    @property
    def column(self) -> str:
        return str(self.call.out.index[1].variable)

    @property
    def factors(self) -> tuple[tuple[str, ...], ...]:
        """What the product is multiplied by, each once."""
        return tuple(dict.fromkeys(self.sums.values()))

    @property
    def rest(self) -> tuple[Axis, ...]:
        """The axes that the kernel sums over beside the product's columns."""
        return tuple(axis for axis in self.kernel.cols if axis not in self.within)

    @property
    def whole(self) -> bool:
        """Whether all else that the kernel does is done for each row of the product and each group."""
        return not self.rest and len(self.rows) == 1 and not self.kernel.accums


def summed_products(program: Program) -> Iterator[Summed]:
    """The products of a program of which nothing but sums over columns are used."""
    for call in program.steps:
        if isinstance(call, Call) and call.op == "matmul" and not (call.parts or call.epilogue or call.add):
            out = program.buffer[call.out.buffer]
            readers = [s for s in program.steps if program.root(out.name) in map(program.root, s.reads)]
            if out.kind != "temp" or len(readers) != 1 or not isinstance(readers[0], Kernel):
                continue
            found = _summed(program, call, readers[0]) if out.name in readers[0].reads else None
            if found is not None:
                yield found


def _summed(program: Program, call: Call, reader: Kernel) -> Summed | None:
    kernel, beside = _parts(reader, call.out.buffer, program.types)
    kernel = _distributed(kernel, program.types)
    axes, out = dict(call.axes), call.out.index
    own = [{v for i in o.index for v, _ in i.terms} for o in call.args]
    if (
        len(axes) != 3
        or len(out) != 2
        or any(o.scale for o in call.args)
        or any(i != Index.of(i.variable or "") for i in out)
    ):
        return None
    row, column = str(out[0].variable), str(out[1].variable)
    places = [next((n for n, names in enumerate(own) if axis in names), -1) for axis in (row, column)]
    if sorted(places) != [0, 1] or any({row, column} <= names for names in own):
        return None
    (other,) = axes.keys() - {row, column}
    dtype = program.types[call.args[0].buffer].dtype
    sums, at = _sums(kernel, call.out.buffer, dtype), _place(kernel, call.out.buffer)
    between = program.steps[program.steps.index(call) : program.steps.index(reader)]
    written = {program.root(b) for step in between for b in step.writes}
    if not sums or at is None or written & {program.root(o.buffer) for o in call.args} or reader.order:
        return None
    if any(not s.name and kernel.is_column(s) for s in kernel.body):
        return None
    parts = [[axis for axis in (*kernel.rows, *kernel.cols) if axis[0] in dict(i.terms)] for i in at]
    within = [axis for axis in parts[1] if axis in kernel.cols]
    groups = [axis for axis in parts[1] if axis not in within]
    if not within or not all(_is_position(i, p, axes[v]) for i, p, v in zip(at, parts, (row, column), strict=True)):
        return None
    if [axis for axis in (*kernel.rows, *kernel.cols) if axis[1] != 1 or axis in (*parts[0], *parts[1])] != [
        *parts[0],
        *groups,
        *within,
    ]:
        return None
    by_row, by_column = (call.args[n] for n in places)
    return Summed(
        call, reader, kernel, beside, by_row, by_column, other, tuple(parts[0]), tuple(groups), tuple(within), sums
    )


def _parts(reader: Kernel, buffer: str, types: Mapping[str, Type]) -> tuple[Kernel, tuple[Kernel, ...]]:
    """The kernel of the effects that depend on a buffer, and that of the others, if there are any."""
    made = set[str]()
    for s in reader.body:
        if s.buffer == buffer or made.intersection(s.uses):
            made.add(s.name)
    effects = [s for s in reader.body if not s.name]
    others = [s for s in effects if not made.intersection(s.uses)]
    if not others:
        return reader, ()
    parts = (tuple(s for s in reader.body if s.name or (s in others) == beside) for beside in (False, True))
    kernel, beside = (replace(reader, body=body).live.rehashed(types) for body in parts)
    return kernel, (beside,)


def _distributed(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """sum_cols(t * (q - z))  ->  sum_cols(t * q) - z * sum_cols(t), where z is a float of the row: a block of codes is
    exact in 16 bits, and one of such differences is not.
    """
    names, body, now = kernel.fresh_names(), list[Stmt](), dict(kernel.stmts)

    def add(s: Stmt, op: str, *args: str) -> str:
        body.append(s.altered(name=next(names), op=op, args=args))
        return body[-1].name

    def of_floats(name: str) -> bool:
        s = backward_slice(kernel.body, [name])
        return not kernel.is_column(now[name]) and any(x.op == "load" and types[x.buffer].dtype.is_float for x in s)

    for s in kernel.body:
        term = now[s.args[0]] if s.op == "sum_cols" else s
        pairs = (term.args, term.args[::-1]) if s.op == "sum_cols" and term.op == "mul" else ()
        found = next(((t, now[d].args) for t, d in pairs if now[d].op == "sub" and of_floats(now[d].args[1])), None)
        if found is None:
            body.append(s)
            continue
        t, (q, z) = found
        shifted = add(term, "mul", z, add(s, "sum_cols", t))
        body.append(term.altered(name=s.name, op="sub", args=(add(s, "sum_cols", add(term, "mul", t, q)), shifted)))
    return kernel if len(body) == len(kernel.body) else replace(kernel, body=tuple(body)).live


def _place(kernel: Kernel, buffer: str) -> tuple[Index, ...] | None:
    """The index of all loads of a buffer."""
    found = {s.index for s in kernel.body if s.buffer == buffer and s.op == "load" and not s.where}
    return found.pop() if len(found) == 1 and not any(s.buffer == buffer and s.where for s in kernel.body) else None


def _is_position(index: Index, axes: Sequence[Axis], size: Size) -> bool:
    """Whether an index counts all positions along axes, in their order."""
    steps = dict[str, Size]()
    step: Size = 1
    for axis, own in reversed(axes):
        steps[axis] = step
        step = step * own
    terms = dict(index.terms)
    right = terms.keys() == steps.keys() and all(same(steps[axis], by) for axis, by in terms.items())
    return bool(axes) and index.const == 0 and right and same(product(own for _, own in axes), size)


def _sums(kernel: Kernel, buffer: str, dtype: DType) -> dict[str, tuple[str, ...]]:
    """The factors of what a kernel sums of a buffer's elements, by the names of the sums; none where it uses these
    otherwise.

    :param dtype: of what the product multiplies, to which it may be rounded.
    """
    factors: dict[str, tuple[str, ...]] = {}
    found: dict[str, tuple[str, ...]] = {}
    for s in kernel.body:
        used = [u for u in s.uses if u in factors]
        if s.op == "load" and s.buffer == buffer:
            factors[s.name] = ()
        elif len(used) == 1 and s.op in LINEAR and s.dtype in (F32, dtype):
            factors[s.name] = (*factors[used[0]], *(a for a in s.args if a != used[0]))
            if s.op == "mul" and len(set(s.args)) == 1:
                return {}
        elif used and s.op == "sum_cols":
            found[s.name] = factors[used[0]]
        elif used:
            return {}
    return found


def _fits_f16(kernel: Kernel, program: Program, factors: Sequence[str]) -> bool:
    """Whether a product of factors is known to be in the range of f16: codes, entries of a codebook, their sums."""
    body = backward_slice(kernel.body, factors)
    of_codes = all(s.op in CODES and not (s.op == "mul" and s.dtype is F32) for s in body)
    read = [program.buffer[s.buffer] for s in body if s.op == "load"]
    known = all(b.type.dtype.bits <= 8 or (b.kind == "const" and max(map(abs, b.value)) <= WHOLE) for b in read)
    return len(factors) < 2 and of_codes and known


def summed_loop(program: Program, p: Summed) -> tuple[Program, Loop]:
    """The program with a loop for a product and the kernel that sums it times what it decodes; it has no tile yet.

    :raises IllegalMove: a factor may be beyond the range of the product's dtype, or is no expression of its place.
    """
    return _Writer(program, p).program()


class _Writer:
    """Writes the loop.

    :ivar places: for each axis of the product's rows and columns, and each group, where it is in the loop.
    :ivar parts: the block and the carry of each of the factors.
    """

    def __init__(self, program: Program, p: Summed):
        self.before, self.p, self.types = program, p, dict(program.types)
        self.dtype = program.types[p.by_column.buffer].dtype
        taken = {*program.dims, *program.buffer, *(name for loop in program.loops for name in loop.symbols)}
        self.row, self.rows, self.col, self.cols = (fresh_name(n, taken) for n in ("row", "rows", "col", "cols"))
        self.over = tuple((fresh_name("at", taken), size) for _, size in p.groups)
        self.at = {axis: Index(symbol(name)) for (axis, _), (name, _) in zip(p.groups, self.over, strict=True)}
        self.place = Index(symbol(self.row), ((ROW, 1),))
        sizes, self.parts = dict(p.call.axes), dict[tuple[str, ...], tuple[Buffer, Carry]]()
        for factors in p.factors:
            if self.dtype is not BF16 and not _fits_f16(p.kernel, program, factors):
                refuse("decoded_sums", p.kernel, f"it multiplies by what may be beyond the range of {self.dtype}")
            name = fresh_name("code", taken)
            block = Buffer(name, Type(self.dtype, (symbol(self.rows), symbol(self.cols))), "block")
            carry = Carry(fresh_name(f"{name}.sum", taken), Type(F32, (symbol(self.rows), sizes[p.other])), "sum")
            self.parts[factors] = block, carry
            self.types |= {name: block.type, carry.name: carry.type}
        self.sums = fresh_name(f"{p.kernel.writes[0]}.rows", taken)
        self.meaning = meaning_of(p.kernel)

    def program(self) -> tuple[Program, Loop]:
        p, program = self.p, self.before
        steps = [step for factors in self.parts for step in (self.decode(factors), self.added(factors))]
        blocks, carries = zip(*self.parts.values(), strict=True)
        sweep = Sweep((self.col, product(n for _, n in p.within)), 64, self.cols, carries, blocks, tuple(steps))
        own, rest = [*program.buffers], tuple[Kernel, ...]()
        if not p.whole:
            for n in range(len(p.sums)):
                type_ = Type(F32, (dict(p.call.axes)[p.kept], *(size for _, size in p.groups)))
                own.append(Buffer(self.stored(n), type_))
                self.types[self.stored(n)] = type_
            rest = (self.rest(),)
        loop = Loop(
            self.over, (self.row, dict(p.call.axes)[p.kept]), 64, self.rows, (), (self.after(),), sweeps=(sweep,)
        )
        done: list[Step] = []
        for step in program.steps:
            done += (*p.beside, loop, *rest) if step is p.reader else () if step is p.call else (step,)
        gone = program.root(p.call.out.buffer)
        kept = tuple(b for b in own if b.name not in program.buffer or program.root(b.name) != gone)
        return replace(program, steps=tuple(done), buffers=kept), loop

    def stored(self, number: int) -> str:
        """The temp of the sums of each row and group."""
        return f"{self.sums}{number or ''}"

    # -- the sweep -----------------------------------------------------------------------------------------------------

    def decode(self, factors: tuple[str, ...]) -> Kernel:
        """The kernel that computes a block of what the product is multiplied by."""
        p, (block, _) = self.p, self.parts[factors]
        names, body = p.kernel.fresh_names(), [*backward_slice(p.kernel.body, factors)]

        def add(op: str, *args: str, dtype: object = F32, attrs: tuple[tuple[str, object], ...] = ()) -> str:
            body.append(Stmt(next(names), op, args, dtype, attrs=attrs))  # type: ignore[arg-type]
            return body[-1].name

        value = factors[0] if factors else add("const", attrs=(("value", 1.0),))
        for factor in factors[1:]:
            value = add("mul", value, factor)
        value = add("cast", value, dtype=self.dtype, attrs=(("dtype", self.dtype),))
        body.append(Stmt("", "store", (value,), self.dtype, block.name, ()))
        groups = [
            (self.place, product(n for _, n in p.rows)),
            *zip(self.at.values(), (n for _, n in p.groups), strict=True),
        ]
        groups.append((Index(symbol(self.col), ((COLUMN, 1),)), product(n for _, n in p.within)))
        digits = Digits(replace(p.kernel, body=tuple(body)), groups)
        own = digits.body(lambda s: s.altered(index=(Index.of(ROW), Index.of(COLUMN))))
        axes = (ROW, symbol(self.rows)), (COLUMN, symbol(self.cols))
        made = Kernel("", axes[:1], axes[1:], own, note=p.kernel.note)
        return made.live.named_by_structure(self.meaning, self.types)

    def added(self, factors: tuple[str, ...]) -> Call:
        """The product that adds up a block's columns."""
        p, (block, carry) = self.p, self.parts[factors]
        first, step = Index(symbol(self.col)), product(n for _, n in p.within)
        for axis, size in reversed(p.groups):
            first = first + self.at[axis] * step
            step = step * size
        place = {p.column: first + Index.of(p.column)}
        right = replace(p.by_column, index=tuple(i.compose(place) for i in p.by_column.index))
        args = Operand(block.name, (Index.of(p.kept), Index.of(p.column))), right
        axes = ((p.kept, symbol(self.rows)), (p.other, dict(p.call.axes)[p.other]), (p.column, symbol(self.cols)))
        out = Operand(carry.name, (Index.of(p.kept), Index.of(p.other)))
        return replace(p.call, axes=axes, out=out, args=args, add=True)

    # -- after it ------------------------------------------------------------------------------------------------------

    def after(self) -> Kernel:
        """The kernel that sums the rows of the other operand times what the sweep has summed, and goes on with it."""
        p, kernel = self.p, self.p.kernel
        names, body = kernel.fresh_names(), list[Stmt]()

        def add(op: str, *args: str, dtype: object = F32, **where: object) -> str:
            body.append(Stmt(next(names), op, args, dtype, **where))  # type: ignore[arg-type]
            return body[-1].name

        here = {p.kept: self.place, p.other: Index.of(FEATURE)}
        index = tuple(i.compose(here) for i in p.by_row.index)
        other = add("load", dtype=self.types[p.by_row.buffer].dtype, buffer=p.by_row.buffer, index=index)
        other = add("cast", other, attrs=(("dtype", F32),))
        totals: dict[tuple[str, ...], str] = {}
        for factors, (_, carry) in self.parts.items():
            own = add("load", buffer=carry.name, index=(Index.of(ROW), Index.of(FEATURE)))
            totals[factors] = add("sum_cols", add("mul", own, other))
        sums = {name: totals[factors] for name, factors in p.sums.items()}
        if p.whole:
            at = {p.rows[0][0]: self.place, **self.at}
            left = (s for s in kernel.body if s.name not in sums)
            body += [
                s.altered(args=tuple(sums.get(a, a) for a in s.args), index=tuple(i.compose(at) for i in s.index))
                for s in left
            ]
        else:
            place = (self.place, *self.at.values())
            body += [Stmt("", "store", (total,), F32, self.stored(n), place) for n, total in enumerate(sums.values())]
        made = Kernel(
            "", ((ROW, symbol(self.rows)),), ((FEATURE, dict(p.call.axes)[p.other]),), tuple(body), note=kernel.note
        )
        return made.live.named_by_structure(self.meaning, self.types)

    def rest(self) -> Kernel:
        """The kernel that goes on with the sums, in memory."""
        p, kernel = self.p, self.p.kernel
        at = next(s for s in kernel.body if s.buffer == p.call.out.buffer).index[0]
        index = (at, *(Index.of(axis) for axis, _ in p.groups))
        names, body = kernel.fresh_names(), list[Stmt]()
        for s in kernel.body:
            if s.name in p.sums:
                name = next(names) if p.rest else s.name
                body.append(Stmt(name, "load", (), F32, self.stored([*p.sums].index(s.name)), index))
                body += [s.altered(args=(name,))] if p.rest else []
            else:
                body.append(s)
        return replace(kernel, cols=p.rest, body=tuple(body)).live.rehashed(self.types)
