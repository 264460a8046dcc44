"""fuse_epilogues: what kernels do to the elements of a product is done by the product's library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.cost import kernel_seconds
from ...analysis.library_time import call_seconds
from ...analysis.lifetimes import may_move
from ...ir.dims import Size, same
from ...ir.dims import product as dims_product
from ...ir.epilogue import ARGUMENT_WORD, Epilogue, Function
from ...ir.kernel import Buffer, Call, Kernel, Program, Step
from ...ir.node import REGISTRY, Node
from ...ir.statement import Index, Operand, Stmt
from ...ir.types import BF16, F16, F32
from ...ops.products.epilogues import ARGUMENT, VALUE, function_of
from ...targets.devices import Device, Gpu
from ...targets.gpu import MATRIX_ALIGN
from ..manager import program_pass

BIAS_DTYPES, DTYPES = (F16, BF16, F32), (F16, BF16)
"""Of operands, vectors and results alike: what cuBLASLt adds a bias to, and what it does more to."""


LARGE = 8192
"""Stands for sizes that are not known: where a product is large enough for its bytes to count."""
Seconds = Callable[[Program, Program], float]
"""How much longer a program takes than another that it was made of."""


@program_pass("REAL")
def fuse_epilogues(program: Program, *, device: Device, dims: Mapping[str, int] | None = None) -> Program:
    """call t[m, n] <- matmul a[m, k], b[n, k];  store y[i, h, j] <- gelu(load t[i*H + h, j] + load v[j])  ->  call
    t[m, n] <- matmul a[m, k], b[n, k] + v[n] then gelu, where t is y, seen as a matrix

    And so with a sum that is kept, gelu's derivative times a product, and sums over rows of that or of an operand.  The
    kernel keeps what else it does, and reads a sum that is kept.  Of what may be done so each product takes what is
    predicted to be fastest, against the product with the kernels as they are: an epilogue saves bytes, as a product is
    not written and read in between, but a bias in f32 may need a kernel that rounds it.  The library applies an
    epilogue to the sum in f32 and rounds once, where a product in 16 bits was rounded by itself; the bits are the same
    in every run, as those of all of cuBLAS (its documentation, "Results Reproducibility").

    Products are of whole matrices, whose rows and those of the result are multiples of 16 bytes, as the library's
    kernels have them.

    :param dims: sizes at which time is predicted; ``LARGE`` stands for the others.
    """
    more = _more_seconds({**dict.fromkeys(program.dims, LARGE), **(dims or {})}, device)
    products = [step.out.buffer for step in program.steps if isinstance(step, Call) and _is_plain(program, step)]
    for name in products:
        given = program
        fused = [program, *(_fused(program, match) for match in _matches(program, name))]
        program = min(fused, key=lambda each: more(each, given))
    return _with_sums(program, more)


def _more_seconds(dims: Mapping[str, int], device: Device) -> Seconds:
    """By the steps that only one of two programs has; without a GPU each change is taken to save time."""

    def seconds(program: Program, steps: Sequence[Step]) -> float:
        assert isinstance(device, Gpu)
        total = 0.0
        for step in steps:
            if isinstance(step, Call):
                total += call_seconds(step, program, dims, device)
            elif isinstance(step, Kernel):
                total += kernel_seconds(step, program.types, dims, device)
        return total

    def more(program: Program, than: Program) -> float:
        if not isinstance(device, Gpu):
            return 0.0 if program is than else -1.0
        own, other = ({id(step): step for step in each.steps} for each in (program, than))
        added = [step for number, step in own.items() if number not in other]
        removed = [step for number, step in other.items() if number not in own]
        return seconds(program, added) - seconds(than, removed)

    return more


def _is_plain(program: Program, call: Call) -> bool:
    """Whether a call is a product of two matrices in one dtype, written to a whole matrix in the same, whose rows the
    library's kernels with an epilogue take.
    """
    types = program.types
    dtype = types[call.out.buffer].dtype
    if not REGISTRY[call.op].contraction or dtype not in BIAS_DTYPES or call.epilogue or call.parts:
        return False
    operands = (*call.args, call.out)
    matrices = all(not o.scale and len(o.index) == 2 and all(i.variable for i in o.index) for o in operands)
    if not matrices or len(call.axes) != 3 or [i.variable for i in call.out.index] != call.result_axes:
        return False
    if call.add or not _is_whole(program, call, call.out):
        return False
    rows, unit = [types[o.buffer].shape[-1] for o in operands], MATRIX_ALIGN * 8 // dtype.bits
    aligned = all(isinstance(size, int) and size > 0 and size % unit == 0 for size in rows)
    return aligned and all(types[o.buffer].dtype is dtype for o in operands)


def _is_whole(program: Program, call: Call, operand: Operand) -> bool:
    """Whether a matrix of a call is all of its buffer."""
    sizes = {Index.of(axis): size for axis, size in call.axes}
    return all(map(same, (sizes[i] for i in operand.index), program.types[operand.buffer].shape))


# -- the kernel that reads a product -----------------------------------------------------------------------------------


class _Reader:
    """A kernel that loads a product once."""

    def __init__(self, program: Program, call: Call, kernel: Kernel):
        self.program, self.call, self.kernel = program, call, kernel
        self.axes = (*kernel.rows, *kernel.cols)
        self.stmts = kernel.stmts
        product = call.out.buffer
        touching = [s for s in program.steps if product in (*s.reads, *s.writes)]
        self.alone = program.buffer[product].kind == "temp" and len(touching) == 2

    def users(self, name: str) -> list[Stmt]:
        return [s for s in self.kernel.body if name in s.uses]

    def elementwise(self, s: Stmt) -> bool:
        """Whether a statement visits a buffer that has the product's elements in its order, one each time."""
        shape, matrix = self.program.types[s.buffer].shape, self.program.types[self.call.out.buffer]
        visited = Index()
        for axis, size in self.axes:
            visited = visited * size + Index.of(axis)
        return (
            self.program.types[s.buffer].dtype is matrix.dtype
            and same(dims_product(size for _, size in self.axes), dims_product(matrix.shape))
            and same(dims_product(shape), dims_product(matrix.shape))
            and _place(s.index, shape) == _place([visited], [dims_product(shape)])
        )

    def along_columns(self, s: Stmt, wide: bool = False) -> bool:
        """Whether a statement visits a vector along the product's columns, in its dtype or (``wide``) in f32."""
        given, matrix = self.program.types[s.buffer], self.program.types[self.call.out.buffer]
        axis, size = self.axes[-1]
        columns = [i.variable for i in s.index] == [axis] and same(size, matrix.shape[-1])
        return columns and given.dtype in (matrix.dtype, *([F32] if wide else [])) and same(given.shape[0], size)

    def widened(self, s: Stmt) -> Stmt:
        """A load as a value in f32."""
        users = self.users(s.name)
        return users[0] if len(users) == 1 and users[0].op == "cast" and users[0].dtype is F32 else s

    def narrowed(self, name: str) -> Stmt:
        """What a stored value was rounded from."""
        s = self.stmts[name]
        return self.stmts[s.args[0]] if s.op == "cast" else s

    def load_of(self, name: str) -> Stmt | None:
        """The load that a value in f32 is, of the product's dtype or rounded to it: what is loaded in f32 may be beyond
        the range of 16 bits.
        """
        s, dtype = self.stmts[name], self.program.types[self.call.out.buffer].dtype
        rounded = False
        while s.op == "cast" and s.dtype in (F32, dtype):
            rounded = rounded or s.dtype is dtype
            s = self.stmts[s.args[0]]
        return s if s.op == "load" and (rounded or s.dtype is dtype) else None


def _place(index: Sequence[Index], shape: Sequence[Size]) -> tuple[Size, dict[str, Size]]:
    """The number of an element of a row-major buffer."""
    total = Index()
    for entry, size in zip(index, shape, strict=True):
        total = total * size + entry
    return total.const, dict(total.terms)


@dataclass(frozen=True)
class _Match:
    """What of a kernel an epilogue does.

    :param value: the sum that it is done to, a statement.
    :param epilogue: of buffers of the kernel.
    :param result: the buffer that the product makes.
    :param done: the stores and accums that the kernel need not have any longer.
    """

    reader: _Reader
    value: Stmt
    epilogue: Epilogue[str]
    result: str
    done: tuple[Stmt, ...]


def _matches(program: Program, product: str) -> Iterator[_Match]:
    """The epilogues of a product that do something of a kernel, the one that does most first of those of a kernel."""
    call = next(step for step in program.steps if isinstance(step, Call) and step.out.buffer == product)
    if program.buffer[product].alias or any(b.alias == product for b in program.buffers):
        return
    for kernel in [s for s in program.steps if isinstance(s, Kernel) and product in s.reads]:
        loads = [s for s in kernel.body if s.buffer == product]
        reader = _Reader(program, call, kernel)
        if len(loads) != 1 or not reader.elementwise(loads[0]) or any(s.where for s in kernel.body):
            continue
        if reader.alone and not may_move(program, call, kernel):
            continue
        value, bias = _biased(reader, reader.widened(loads[0]))
        if bias is not None and not reader.alone:
            continue
        kept = next((s for s in reader.users(value.name) if s.op == "cast" and s.dtype is not F32), value)
        stores = [s for s in reader.users(kept.name) if s.op == "store" and reader.elementwise(s)]
        stored = stores[0] if stores and reader.alone else None  # another reads the product, which is kept as it is
        for function in ARGUMENT_WORD if program.types[product].dtype in DTYPES else ():
            yield from _with_function(reader, function, value, bias, stored)
        if bias is not None and stored is not None:
            yield _Match(reader, value, Epilogue(bias), stored.buffer, (stored,))


def _biased(reader: _Reader, value: Stmt) -> tuple[Stmt, str | None]:
    """The sum of a product and a vector, and the vector's buffer, where nothing else is made of the product."""
    users = reader.users(value.name)
    if len(users) != 1 or users[0].op != "add" or users[0].dtype is not F32 or len({*users[0].args}) != 2:
        return value, None
    (other,) = (name for name in users[0].args if name != value.name)
    load = reader.load_of(other)
    return (users[0], load.buffer) if load is not None and reader.along_columns(load, wide=True) else (value, None)


def _with_function(
    reader: _Reader, function: Function, value: Stmt, bias: str | None, stored: Stmt | None
) -> Iterator[_Match]:
    """The epilogues with a function of a value that do all that depends on it."""
    for s in reader.kernel.body:
        if s.op != "store" or s is stored or not reader.elementwise(s):
            continue
        result, bound = reader.narrowed(s.args[0]), {VALUE: value.name}
        if not _equal(function_of(function, "f32"), result.name, reader.stmts, bound):
            continue
        summed = next((u for u in reader.users(result.name) if u.op == "accum"), None)
        done = tuple(each for each in (s, stored, summed) if each is not None)
        rest = [u for u in reader.kernel.body if not u.name and u not in done]
        if any(value.name in _behind(u, reader.stmts) for u in rest):
            continue
        if function == "gelu":
            argument = stored.buffer if stored else "" if reader.alone else reader.call.out.buffer
            early = reader.alone or may_move(reader.program, reader.kernel, reader.call, [s.buffer])
            if summed is None and early:
                yield _Match(reader, value, Epilogue(bias, function, argument or None), s.buffer, done)
            continue
        at = reader.load_of(bound[ARGUMENT])
        plain = bias is None and stored is None and reader.alone and at is not None and reader.elementwise(at)
        if plain and (summed is None or (reader.along_columns(summed) and not summed.attrs)):
            assert at is not None
            whole = Epilogue(None, function, at.buffer)
            whole = replace(whole, sums=summed.buffer, summed="result") if summed is not None else whole
            yield _Match(reader, value, whole, s.buffer, done)


def _equal(node: Node, name: str, stmts: Mapping[str, Stmt], bound: dict[str, str]) -> bool:
    """Whether a statement's value is computed as a node is, of the inputs that ``bound`` maps to statements; it gets
    those that it has not.
    """
    s = stmts[name]
    attributes = dict(node.attrs)
    if node.op.name == "input":
        return bound.setdefault(attributes["name"], name) == name
    if node.op.name == "constant":
        return s.op == "const" and s.attr("value") == attributes["value"][0]
    if s.op != node.op.name or s.dtype is not node.dtype or len(s.args) != len(node.operands):
        return False
    orders = [s.args, s.args[::-1]] if s.op in ("add", "mul") else [s.args]
    for args in orders:
        tried = dict(bound)
        if all(_equal(o, arg, stmts, tried) for o, arg in zip(node.operands, args, strict=True)):
            bound.update(tried)
            return True
    return False


def _behind(s: Stmt, stmts: Mapping[str, Stmt]) -> set[str]:
    """The values that a statement is made of."""
    found: set[str] = set()
    left = [*s.uses]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += stmts[name].uses
    return found


# -- the program after it ----------------------------------------------------------------------------------------------


def _fused(program: Program, match: _Match) -> Program:
    """The program whose product does what was matched."""
    reader, call, product = match.reader, match.reader.call, match.reader.call.out.buffer
    buffers, views = list(program.buffers), dict[str, str]()
    keeps = match.epilogue.function == "gelu" and match.epilogue.argument == product
    if not keeps:
        buffers = [b for b in buffers if b.name != product]

    def matrix(name: str, view: str = "") -> str:
        """A buffer of the product's elements, as a matrix."""
        own = next(b for b in buffers if b.name == name)
        if own.type == program.types[product] and not view:
            return name
        views[name] = view or _fresh(buffers, f"{product}_{len(views) + 1}")
        at = buffers.index(own)
        buffers.insert(at + 1, Buffer(views[name], program.types[product], own.kind, name))
        return views[name]

    def vector(name: str | None) -> Operand | None:
        return Operand(name, (Index.of(call.result_axes[-1]),)) if name else None

    out = replace(call.out, buffer=matrix(match.result, "" if keeps else product))
    epilogue, before = _narrowed(program, match.epilogue, buffers, product)
    argument = replace(call.out, buffer=matrix(epilogue.argument)) if epilogue.argument else None
    own = replace(
        call,
        out=out,
        epilogue=Epilogue(vector(epilogue.bias), epilogue.function, argument, vector(epilogue.sums), epilogue.summed),
        note=reader.kernel.note,
    )
    rest = _without(program, match)
    at = call if keeps else reader.kernel  # where the kernel was, what the epilogue reads is there
    steps: list[Step] = []
    for step in program.steps:
        if step is at:
            steps += [*before, own]
        if step is reader.kernel and rest is not None:
            steps.append(rest)
        elif step is not call and step is not reader.kernel:
            steps.append(step)
    return replace(program, steps=tuple(steps), buffers=tuple(buffers))


def _narrowed(
    program: Program, epilogue: Epilogue[str], buffers: list[Buffer], product: str
) -> tuple[Epilogue[str], list[Kernel]]:
    """The epilogue with its bias in the product's dtype, which a kernel rounds it to where it is wider, as autocast
    does.
    """
    dtype, bias = program.types[product].dtype, epilogue.bias
    if bias is None or program.types[bias].dtype is dtype:
        return epilogue, []
    given = next(b for b in buffers if b.name == bias)
    narrow = Buffer(_fresh(buffers, f"{product}_bias"), given.type.with_dtype(dtype))
    buffers.insert(buffers.index(given) + 1, narrow)
    index = (Index.of("i"),)
    body = (
        Stmt("%0", "load", (), given.type.dtype, bias, index),
        Stmt("%1", "cast", ("%0",), dtype, attrs=(("dtype", dtype),)),
        Stmt("", "store", ("%1",), dtype, narrow.name, index),
    )
    kernel = Kernel("cast", (), (("i", given.type.shape[0]),), body)
    types = {b.name: b.type for b in buffers}
    return replace(epilogue, bias=narrow.name), [kernel.rehashed(types)]


def _fresh(buffers: Iterable[Buffer], name: str) -> str:
    taken = {b.name for b in buffers}
    while name in taken:
        name += "_"
    return name


def _without(program: Program, match: _Match) -> Kernel | None:
    """The kernel without what an epilogue does, with a sum that it keeps loaded; None: it does nothing else."""
    kernel, value = match.reader.kernel, match.value
    stored = next((s for s in match.done if s.buffer == match.result), None)
    body: list[Stmt] = []
    for s in kernel.body:
        if s is value and not match.epilogue.function:
            assert stored is not None
            name = next(kernel.fresh_names()) if program.types[stored.buffer].dtype is not F32 else s.name
            body.append(Stmt(name, "load", (), program.types[stored.buffer].dtype, stored.buffer, stored.index))
            body += [Stmt(s.name, "cast", (name,), F32, attrs=(("dtype", F32),))] if name != s.name else []
        elif s not in match.done:
            body.append(s)
    rest = replace(kernel, body=tuple(body)).live
    return rest.rehashed(program.types) if rest.writes else None


# -- sums of operands --------------------------------------------------------------------------------------------------


def _with_sums(program: Program, more: Seconds) -> Program:
    """accum s[j] <- load a[i, j];  call y[m, n] <- matmul a[k, m], b[k, n]  ->  call y[m, n] <- matmul a[k, m],
    b[k, n] then sum s[m] of first, where the kernel does nothing else; so with the second operand
    """
    for kernel in [step for step in program.steps if isinstance(step, Kernel) and len(step.body) in (2, 3)]:
        load, accum = kernel.body[0], kernel.body[-1]
        ops = [s.op for s in kernel.body]
        if ops not in (["load", "accum"], ["load", "cast", "accum"]) or load.where or accum.where or accum.attrs:
            continue
        for call in [step for step in program.steps if isinstance(step, Call) and _is_plain(program, step)]:
            found = _summed(program, call, kernel)
            if found is not None and _is_only_writer(program, kernel) and may_move(program, kernel, call):
                own = replace(call, epilogue=found)
                steps = tuple(own if step is call else step for step in program.steps if step is not kernel)
                made = replace(program, steps=steps)
                if more(made, program) < 0:
                    program = made
                    break
    return program


def _summed(program: Program, call: Call, kernel: Kernel) -> Epilogue[Operand] | None:
    """The epilogue that sums what a kernel does, if it is an operand of the product over the axis that this sums."""
    load, accum = kernel.body[0], kernel.body[-1]
    if program.types[call.out.buffer].dtype not in DTYPES:
        return None
    for operand, axis, of in zip(call.args, call.result_axes, ("first", "second"), strict=True):
        along = [i.variable for i in operand.index][-1] == axis
        if not along or not _is_whole(program, call, operand):
            continue
        if program.root(operand.buffer) != program.root(load.buffer):
            continue
        reader = _Reader(program, replace(call, out=operand), kernel)
        if reader.elementwise(load) and reader.along_columns(accum):
            sums = Operand(accum.buffer, (Index.of(axis),))
            return Epilogue(sums=sums, summed="first" if of == "first" else "second")
    return None


def _is_only_writer(program: Program, kernel: Kernel) -> bool:
    """Whether a kernel's sums are all of what is added up there."""
    (sums,) = kernel.writes
    memory = program.root(sums)
    writers = [step for step in program.steps if any(program.root(b) == memory for b in step.writes)]
    return writers == [kernel]
