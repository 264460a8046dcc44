"""block_rows: steps that hand wide rows to one another run for one block of rows at a time.

What lies between a product with wide rows and the steps that read them, [rows, wide], is then never more than a block:
the logits of a linear layer before a cross entropy, the scores of attention, and their gradients.  A sum over the rows
is added up block by block.  How rows are cut depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ...ir.dims import Size, assuming, evaluate, known_nonnegative, product, same, symbol
from ...ir.kernel import Buffer, Call, Kernel, Loop, Program, Step, alternatives
from ...ir.node import REGISTRY
from ...ir.statement import EFFECTS, REDUCTIONS, Axis, Index, Operand, Stmt
from ...ir.types import F64, Type
from ...ir.walk import backward_slice
from ..manager import program_pass
from ..reductions.cost import nominal
from .column_bounds import column_bounds
from .wide_products import BLOCKED, wide_products


@program_pass("REAL")
def block_rows(program: Program, *, dims: Mapping[str, int] | None = None) -> Program:
    """matmul, softmax, matmul over rows(n: N)  ->  loop rows(n: N) by(144) { matmul, softmax, matmul }

    Licence REAL: the order in which a product is added up may depend on the number of its rows.

    :param dims: sizes at which elements are counted; 1024 stands for the others.
    """
    calls = {step.out.buffer: step for step in program.steps if isinstance(step, Call)}
    program = replace(program, steps=tuple(_narrowed(s) if isinstance(s, Call) else s for s in program.steps))
    program, apart = _sums_apart(
        program, {b for seed in wide_products(program, BLOCKED, dims) for b in _with_rows(program, seed)}
    )
    with assuming(program.assumptions):
        tried: set[str] = set()
        while (seed := next((b for b in wide_products(program, BLOCKED, dims) if b not in tried), None)) is not None:
            tried.add(seed)
            group = _Group.around(program, seed, dims)
            if group is not None:
                program = group.looped()
    program = _sums_together(program, apart)
    steps = tuple(calls[s.out.buffer] if isinstance(s, Call) else s for s in program.steps)
    return replace(program, steps=steps)


@dataclass(frozen=True)
class _SplitSums:
    """A kernel that adds up a value of each row, in two.

    :param whole: the kernel.  :param rows: one that stores these values.  :param sums: those that add them up.
    """

    whole: Kernel
    rows: Kernel
    sums: tuple[Kernel, ...]


def _with_rows(program: Program, seed: str) -> Iterator[str]:
    """The temps with the rows of one, and as many axes."""
    shape = program.types[seed].shape
    for buffer in program.of_kind("temp"):
        own = buffer.type.shape
        if len(own) == len(shape) and all(map(same, own[:-1], shape[:-1])):
            yield buffer.name


def _sums_apart(program: Program, wide: Set[str]) -> tuple[Program, list[_SplitSums]]:
    """accum t[] <- sum_cols(x) over rows(n: N)  ->  store r[n] <- sum_cols(x); accum t[] <- r[n]; and sum_cols(x) over
    cols(n: N)  ->  store r[n] <- x; sum_cols(r[n]); where ``x`` is made of wide temps: the first kernel can be cut by
    its rows.
    """
    steps: list[Step] = []
    buffers, found = list(program.buffers), list[_SplitSums]()
    taken = {*program.dims, *program.types}
    for step in program.steps:
        if isinstance(step, Kernel) and (summed := _column_sums_apart(step, wide, taken)) is not None:
            own, first, then = summed
            buffers += own
            types = {b.name: b.type for b in buffers}
            apart = _SplitSums(step, _renamed(first, types), (_renamed(then, types),))
            found.append(apart)
            steps += [apart.rows, *apart.sums]
            continue
        sums = []
        # Several sums may be owned in the order of one of them: they stay together.
        alone = isinstance(step, Kernel) and (not step.order or len(step.accums) == 1)
        if isinstance(step, Kernel) and alone and wide & {*step.reads, *step.writes}:
            sums = [s for s in step.accums if not step.is_column(s) and _is_of_axes(step, s)]
        if not isinstance(step, Kernel) or not sums:
            steps.append(step)
            continue
        body, made = list(step.body), list[Kernel]()
        for s in sums:
            assert s.dtype is not None
            name = _fresh(f"{s.buffer}.rows", taken)
            type_ = replace(program.types[s.buffer], dtype=s.dtype, shape=tuple(size for _, size in step.rows))
            buffers.append(Buffer(name, type_))
            at = tuple(Index.of(axis) for axis, _ in step.rows)
            store = Stmt("", "store", s.args, s.dtype, name, at, of=s.of)
            body[body.index(s)] = store
            made.append(_summed(step, s, name, at))
        left = tuple(pair for pair in step.strategy if pair[0] not in {s.buffer for s in sums})
        order = step.order if step.order in dict(left) else ""
        rows = replace(step, body=tuple(body), strategy=left, order=order)
        types = {b.name: b.type for b in buffers}
        apart = _SplitSums(step, _renamed(rows, types), tuple(_renamed(m, types) for m in made))
        found.append(apart)
        steps += [apart.rows, *apart.sums]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers)), found


def _column_sums_apart(kernel: Kernel, wide: Set[str], taken: set[str]) -> tuple[list[Buffer], Kernel, Kernel] | None:
    """A kernel that reduces values over the rows of wide temps, which are its columns, in two: what computes these
    values, with the buffers that hold them, and what reduces them.
    """
    axes = (*kernel.rows, *kernel.cols)
    reads = [s for s in kernel.body if s.op == "load" and s.buffer in wide]
    if not reads or not kernel.cols or any(len(s.index) <= len(axes) for s in reads):
        return None
    if not all(_begins(s, [axis for axis, _ in axes]) for s in reads):
        return None
    made = set[str]()  # values of each row
    for s in kernel.body:
        if (s in reads or made & {*s.uses}) and s.name and s.op not in REDUCTIONS:
            made.add(s.name)
    ends = [s for s in kernel.body if s.name not in made and made & {*s.uses}]
    if not all(s.op in REDUCTIONS or (s.op == "store" and kernel.is_column(s)) for s in ends):
        return None
    stores = [s for s in ends if s.op == "store"]
    body = backward_slice(kernel.body, {u for s in ends for u in s.uses})
    if any(s.op in REDUCTIONS or s.op in ("scan", "search") for s in body):
        return None
    own, held = list[Buffer](), dict[str, Stmt]()
    at = tuple(Index.of(axis) for axis, _ in axes)
    for value in dict.fromkeys(u for s in ends if s.op in REDUCTIONS for u in s.uses if u in made):
        dtype = kernel.stmts[value].dtype
        assert dtype is not None
        own.append(Buffer(_fresh(f"{kernel.writes[0]}.rows", taken), Type(dtype, tuple(size for _, size in axes))))
        stores.append(Stmt("", "store", (value,), dtype, own[-1].name, at))
        held[value] = Stmt(value, "load", (), dtype, own[-1].name, at)
    rest = [held.get(s.name, s) for s in kernel.body if s not in stores]
    live = backward_slice(rest, (v for s in rest if not s.name for v in s.uses))
    first = replace(kernel, rows=axes, cols=(), body=(*body, *stores), order="", strategy=())
    return own, first, replace(kernel, body=tuple(s for s in rest if not s.name or s in live))


def _is_of_axes(kernel: Kernel, accum: Stmt) -> bool:
    """Whether each row adds, at a place that only its position decides."""
    rows = {axis for axis, _ in kernel.rows}
    places = all(v in rows for index in accum.index for v, _ in index.terms)
    return bool(rows) and places and accum.combine == "sum" and not accum.where


def _summed(kernel: Kernel, accum: Stmt, name: str, at: tuple[Index, ...]) -> Kernel:
    """The kernel that adds up what is stored for each row."""
    assert accum.dtype is not None
    load = Stmt("%0", "load", (), accum.dtype, name, at)
    *outer, last = kernel.rows
    strategy = tuple(pair for pair in kernel.strategy if pair[0] == accum.buffer)
    order = kernel.order if kernel.order == accum.buffer else ""
    if last[0] in {v for index in accum.index for v, _ in index.terms}:
        add = replace(accum, args=("%0",))
        return replace(kernel, cols=(), body=(load, add), strategy=strategy, order=order)
    total = Stmt("%1", "sum_cols", ("%0",), accum.dtype)
    add = replace(accum, args=("%1",))
    if not outer:
        add, strategy, order = replace(add, op="store", attrs=()), (), ""
    return replace(kernel, rows=tuple(outer), cols=(last,), body=(load, total, add), strategy=strategy, order=order)


def _renamed(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    return kernel.named_by_structure(kernel.name.rpartition("_")[0] or kernel.name, types)


def _sums_together(program: Program, apart: Iterable[_SplitSums]) -> Program:
    """The program with the kernels in one again that no loop took."""
    for each in apart:
        if each.rows not in program.steps:
            continue
        gone = {*each.rows.writes} - {*each.whole.writes}
        steps = tuple(each.whole if s == each.rows else s for s in program.steps if s not in each.sums)
        program = replace(program, steps=steps, buffers=tuple(b for b in program.buffers if b.name not in gone))
    return program


def _narrowed(call: Call) -> Call:
    """A product without the axes of length 1 that its result begins with, as kernels have none: they are position 0."""
    if not REGISTRY[call.op].contraction:
        return call
    single = {axis for axis in call.result_axes[:-2] if dict(call.axes)[axis] == 1}
    index = tuple(Index() if i.variable in single else i for i in call.out.index)
    axes = tuple((axis, size) for axis, size in call.axes if axis not in single)
    used = {v for o in call.operands for i in o.index for v, _ in i.terms}
    return call if single & used else replace(call, axes=axes, out=replace(call.out, index=index))


@dataclass(frozen=True)
class _Cut:
    """How a step is cut: the names of its axes that a loop goes over, and of the one whose rows it cuts.

    :param add: the step adds up over the rows.
    :param accums: the buffers in which it adds up over some of ``over``, :param sequential: and which of these.
    """

    over: tuple[str, ...]
    row: str
    add: bool = False
    accums: frozenset[str] = frozenset()
    sequential: frozenset[int] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.over, self.row)


@dataclass
class _Group:
    """The steps of a loop, by their numbers, and the buffers that become blocks.

    :param shape: the sizes of the outer axes and of the rows.
    :param wide: elements of a row of the product that the loop is made for.
    :param blocks: with these columns.  :param narrow: with columns of their own, or none.
    """

    program: Program
    shape: tuple[Size, ...]
    wide: Size
    hints: Mapping[str, int] | None
    steps: dict[int, _Cut] = field(default_factory=dict)
    blocks: dict[str, None] = field(default_factory=dict)
    narrow: dict[str, None] = field(default_factory=dict)

    @classmethod
    def around(cls, program: Program, seed: str, hints: Mapping[str, int] | None) -> _Group | None:
        """The largest group found from a temp; None where its steps cannot be a loop."""
        shape = program.types[seed].shape
        group = cls(program, shape[:-1], shape[-1], hints)
        if not group.take(seed):
            return None
        refused: set[str] = set()
        while True:
            steps = [group.program.steps[n] for n in sorted(group.steps)]
            touched = (b for step in steps for b in (*step.reads, *step.writes))
            name = next((b for b in touched if b not in group.blocks and b not in refused and group.suits(b)), None)
            if name is None:
                return group if len(group.steps) > 1 else None
            if not group.take(name):
                refused.add(name)

    def suits(self, name: str) -> bool:
        """Whether a buffer is a temp whose rows are as wide as those that the loop is made for."""
        buffer, lead = self.program.buffer[name], len(self.shape)
        if buffer.kind != "temp" or buffer.alias or buffer.type.rank <= lead:
            return False
        rest = product(buffer.type.shape[lead:])
        dims = nominal([rest, self.wide], self.hints)
        return 2 * evaluate(rest, dims) >= evaluate(self.wide, dims)

    def take(self, name: str) -> bool:
        """Makes a temp a block, if every step that touches it can be in the loop."""
        program, steps = self.program, dict(self.steps)
        if any(b.alias == name for b in program.buffers):
            return False
        for number, step in enumerate(program.steps):
            if name not in (*step.reads, *step.writes):
                continue
            cut = _cut(step, name, self.shape)
            if cut is None or steps.setdefault(number, cut) != cut:
                return False
        before = self.program, self.steps
        self.steps = steps
        while self.consistent():
            if self.order() is not None:
                self.blocks[name] = None
                return True
            between = self.between()
            if not (self.joined(between) or self.hoisted(between) or self.parted(between)):
                break
        self.program, self.steps = before
        return False

    def joined(self, numbers: Iterable[int]) -> bool:
        """Makes steps a part of the loop, if each of them can be cut as some buffer that it touches has the rows."""
        steps = dict(self.steps)
        for number in numbers:
            step = self.program.steps[number]
            names = dict.fromkeys((*step.reads, *step.writes))
            cuts = (_cut(step, name, self.shape) for name in names if self.has_rows(name))
            cut = next((c for c in cuts if c is not None and not c.add), None)
            if cut is None:
                return False
            steps[number] = cut
        self.steps = steps
        return True

    def hoisted(self, numbers: Iterable[int]) -> bool:
        """Computes before the loop what it writes and steps that it waits for read: values of whole rows that depend on
        nothing that the loop writes (a statistic's reciprocal beside the exponentials).
        """
        written = {b: n for n in self.steps for b in self.touched(n)[1]}
        asked = dict.fromkeys(b for n in numbers for b in sorted(self.touched(n)[0]) if b in written)
        return self.apart([(written[name], name) for name in asked], set(written))

    def parted(self, numbers: Iterable[int]) -> bool:
        """Computes before the loop what it reads of steps that also read what it writes, and depends on nothing of that
        (the sum of the weights of all rows beside that of their losses).
        """
        read = {b for n in self.steps for b in self.touched(n)[0]}
        _, late, _ = self._placed()
        made = {b for n in (*self.steps, *late) for b in self.touched(n)[1]}
        return self.apart([(n, b) for n in numbers for b in sorted(self.touched(n)[1] & read)], made)

    def apart(self, asked: Iterable[tuple[int, str]], made: set[str]) -> bool:
        """Splits steps, each in what one of its buffers is made from and the rest; False if one cannot be.

        :param asked: numbers of steps and buffers.  :param made: the buffers that these may not depend on.
        """
        program, cuts, moved = self.program, self.steps, dict[int, int]()
        done = False
        for first, name in asked:
            number = first + sum(by for n, by in moved.items() if n <= first)
            parts = _apart(program, program.steps[number], name, made)
            if parts is None:
                return False
            program = replace(program, steps=(*program.steps[:number], *parts, *program.steps[number + 1 :]))
            cuts = {n + (n >= number): cut for n, cut in cuts.items()}
            moved[first] = moved.get(first, 0) + 1
            done = True
        self.program, self.steps = program, cuts
        return done

    def has_rows(self, name: str) -> bool:
        shape, lead = self.program.types[name].shape, len(self.shape)
        return len(shape) >= lead and all(map(same, shape[:lead], self.shape))

    def consistent(self) -> bool:
        """Whether all that a step of the loop reads of another one is in the same rows."""
        program = self.program
        written = {program.root(b) for n in self.steps for b in program.steps[n].writes}
        for number, cut in self.steps.items():
            for access in _accesses(program.steps[number]):
                root = program.root(access.buffer)
                if root not in written or (isinstance(access, Stmt) and access.op == "store"):
                    continue
                adds = (cut.add and access.buffer in program.steps[number].writes) or access.buffer in cut.accums
                apart = not adds and not _begins(access, cut.axes)
                if apart or access.buffer != root or not program.types[root].dtype.is_float:
                    return False
                sums = any(
                    (c.add and root in program.steps[n].writes) or root in c.accums for n, c in self.steps.items()
                )
                if sums and not adds:
                    return False
        return True

    def order(self) -> tuple[list[int], list[int]] | None:
        """The steps that run before the loop and after it; None if one has to do both."""
        early, late, between = self._placed()
        return None if between else (early, late)

    def between(self) -> list[int]:
        """The steps that read what the loop writes, and are waited for by it."""
        return self._placed()[2]

    def _placed(self) -> tuple[list[int], list[int], list[int]]:
        """The steps before the loop, after it, and of the latter those that the loop's own steps depend on."""
        first, last = min(self.steps), max(self.steps)
        early, late = [*range(first)], list[int]()
        made, read = set[str](), set[str]()  # by the loop's steps so far; what is made from that is made after them
        between: dict[int, None] = {}
        for number in range(first, last + 1):
            reads, writes = self.touched(number)
            behind = [n for n in late if self.touched(n)[1] & (reads | writes) or self.touched(n)[0] & writes]
            if number in self.steps:
                between |= dict.fromkeys(behind)
                made |= writes
                read |= reads
            elif behind or made & (reads | writes) or read & writes:
                late.append(number)
            else:
                early.append(number)
        return early, [*late, *range(last + 1, len(self.program.steps))], [*between]

    def touched(self, number: int) -> tuple[set[str], set[str]]:
        """The buffers that a step reads, and that it writes."""
        step, root = self.program.steps[number], self.program.root
        return {root(b) for b in step.reads}, {root(b) for b in step.writes}

    # -- the loop ------------------------------------------------------------------------------------------------------

    def looped(self) -> Program:
        order = self.order()
        assert order is not None
        early, late = order
        program = self.program
        self.narrow = dict.fromkeys(b.name for b in program.of_kind("temp") if self.only_here(b))
        buffers = tuple(b for b in program.buffers if b.name not in self.blocks and b.name not in self.narrow)
        steps = program.steps
        sums = self.sums()
        zeros = [_zeros(b) for b in sums.values()]
        rounded = [_rounded(b, program.buffer[name]) for name, b in sums.items() if b.name != name]
        ordered = (*(steps[n] for n in early), *zeros, self.loop(sums), *rounded, *(steps[n] for n in late))
        own = tuple(b for name, b in sums.items() if b.name != name)
        return replace(program, buffers=(*buffers, *own), steps=ordered)

    def only_here(self, buffer: Buffer) -> bool:
        """Whether a temp is made and read by the loop alone, each time in the rows of the block."""
        name, steps = buffer.name, self.program.steps
        if buffer.alias or name in self.blocks or any(b.alias == name for b in self.program.buffers):
            return False
        numbers = [n for n, step in enumerate(steps) if name in (*step.reads, *step.writes)]
        if not numbers or not self.steps.keys() >= {*numbers}:
            return False
        return all(
            _cut(steps[n], name, self.shape) == self.steps[n] and name not in self.steps[n].accums for n in numbers
        )

    def sums(self) -> dict[str, Buffer]:
        """Where it adds up what steps add to a buffer: in f64, because it adds one after the other."""
        taken, found = {*self.program.dims, *self.program.types}, dict[str, Buffer]()
        for name in (b for n in sorted(self.steps) for b in sorted(self.steps[n].accums)):
            buffer = self.program.buffer[name]
            wide = Buffer(_fresh(f"{name}.sum", taken), replace(buffer.type, dtype=F64))
            found[name] = buffer if buffer.type.dtype is F64 else wide
        return found

    def loop(self, sums: Mapping[str, Buffer]) -> Loop:
        program, sizes = self.program, [size for size in self.shape[:-1] if size != 1]
        taken = {*program.dims, *(name for loop in program.loops for name in loop.symbols)}
        names = (*(f"at{i}" for i in range(len(sizes))), "row", "rows", "cols")
        *over, row, count, column = (_fresh(name, taken) for name in names)
        numbers = sorted(self.steps)
        cuts = [self.steps[n] for n in numbers]
        whole = [step for n in numbers if isinstance(step := program.steps[n], Kernel | Call)]
        blocks = dict.fromkeys(self.blocks, len(self.shape))
        columns = column_bounds(whole, [cut.row for cut in cuts], blocks, self.wide)
        cols = (column, columns.size) if columns else None
        own = {name: self.block(name, count, cols) for name in self.blocks}
        own |= {name: self.block(name, count, None) for name in self.narrow}
        types = {**program.types, **{b.name: b.type for b in (*own.values(), *sums.values())}}
        steps = []
        for i, (step, cut) in enumerate(zip(whole, cuts, strict=True)):
            axis = columns.axes[i] if columns else None
            cols_of = (axis, column) if axis else None
            cutter = _Cutter(cut, tuple(over), row, count, own, len(self.shape) - 1, cols_of, sums)
            steps.append(cutter.step(step, types))
        outer = tuple(zip(over, sizes, strict=True))
        to = columns.below(symbol(row) + symbol(count)) if columns else 0
        sequential = {n for cut in cuts for n in cut.sequential}
        return Loop(
            outer,
            (row, self.shape[-1]),
            _by(self.shape[-1], self.wide, len(sequential) < len(sizes)),
            count,
            tuple(own.values()),
            tuple(steps),
            (cols,) if cols else (),
            to,
            tuple(name for n, name in enumerate(over) if n in sequential),
        )

    def block(self, name: str, count: str, cols: Axis | None) -> Buffer:
        type_ = self.program.types[name]
        rest = type_.shape[len(self.shape) :]
        return Buffer(name, replace(type_, shape=(symbol(count), *((symbol(cols[0]),) if cols else rest))), "block")


def _by(rows: Size, wide: Size, outer: bool) -> Size:
    """Rows of a block, a multiple of 12 (what a product goes over at once), all blocks about as large: of a thread's
    own, so many that they stay in its cache; else so many that what they are multiplied with, which is read and packed
    again for each block, is read rarely.
    """
    most = 48 * (1 + (1 << 13) // (wide + 2048)) if outer else 480 * (1 + (1 << 14) // (wide + 2048))
    by = 12 * (1 + rows // (12 * (1 + rows // most)))
    return by if known_nonnegative(by - 1) else 48  # of a count of windows no sign may be known


def _fresh(name: str, taken: set[str]) -> str:
    unique, k = name, 1
    while unique in taken:
        k += 1
        unique = f"{name}_{k}"
    taken.add(unique)
    return unique


def _apart(program: Program, step: Step, name: str, made: set[str]) -> tuple[Kernel, Kernel] | None:
    """A kernel of what is stored in ``name``, once for each row, and the kernel without that; None if it depends on
    ``made``, or is a value of the columns.
    """
    if not isinstance(step, Kernel) or not step.cols:
        return None
    stores = [s for s in step.body if s.buffer == name]
    if len(stores) != 1 or stores[0].op != "store" or step.is_column(stores[0]):
        return None
    (store,) = stores
    body = backward_slice(step.body, store.uses)
    if any(s.op in EFFECTS or program.root(s.buffer) in made for s in body if s.buffer):
        return None
    rest = [s for s in step.body if s is not store]
    if any(s.op in REDUCTIONS for s in body):  # the other kernel reads the sum
        (value,) = store.args
        at = next(n for n, s in enumerate(rest) if s.name == value)
        if rest[at].dtype is not program.types[name].dtype:
            return None
        rest[at] = replace(rest[at], op="load", args=(), buffer=name, index=store.index, where="", attrs=())
        early = replace(step, body=(*body, store))
    elif step.rows and not any(map(step.is_column, body)):
        early = replace(step, rows=step.rows[:-1], cols=step.rows[-1:], body=(*body, store))
    else:
        return None
    live = backward_slice(rest, (v for s in rest if not s.name for v in s.uses))
    late = replace(step, body=tuple(s for s in rest if not s.name or s in live))
    hint = step.name.rpartition("_")[0] or step.name
    return early.named_by_structure(hint, program.types), late.named_by_structure(hint, program.types)


def _accesses(step: Step) -> list[Stmt | Operand]:
    return [
        access
        for item in alternatives(step)
        for access in ([s for s in item.body if s.buffer] if isinstance(item, Kernel) else [*item.operands, item.out])
    ]


def _cut(step: Step, name: str, shape: tuple[Size, ...]) -> _Cut | None:
    """How a step is cut by the rows of a buffer that it touches; None if it cannot be."""
    found = {
        tuple(i.variable for i, size in zip(a.index, shape, strict=False) if size != 1 or i.terms or i.const != 0)
        for a in _accesses(step)
        if a.buffer == name
    }
    if len(found) != 1 or not isinstance(step, Kernel | Call):
        return None
    names = next(iter(found))
    axes = dict(step.rows if isinstance(step, Kernel) else step.axes)
    sizes = [*(size for size in shape[:-1] if size != 1), shape[-1]]
    if len(names) != len(sizes) or len(set(names)) < len(names):
        return None
    if not all(v in axes and same(axes[v], n) for v, n in zip(names, sizes, strict=True)):
        return None
    cut = _Cut(tuple(map(str, names[:-1])), str(names[-1]))
    return _of_kernel(step, cut) if isinstance(step, Kernel) else _of_call(step, cut)


def _of_kernel(kernel: Kernel, cut: _Cut) -> _Cut | None:
    """A kernel without effects but stores, each of which is in the rows that it is for, and sums over outer axes of
    values that are in these rows, too.
    """
    if not kernel.accums and not kernel.order:
        return _stores_rows(kernel, cut)
    if len(kernel.rows) != len(cut.axes):
        return None
    missing = [_summed_axes(kernel, s, cut) for s in kernel.accums]
    if any(m is None for m in missing):
        return None
    accums = frozenset(s.buffer for s in kernel.accums)
    once = len(accums) == len(kernel.accums) and not accums & set(kernel.reads)
    sequential = frozenset(n for m in missing for n in m or ())
    return _stores_rows(kernel, replace(cut, accums=accums, sequential=sequential)) if once else None


def _stores_rows(kernel: Kernel, cut: _Cut) -> _Cut | None:
    stores = [s for s in kernel.body if s.op == "store"]
    barred = any(s.op in ("check", "search") for s in kernel.body)
    return cut if not barred and all(_begins(s, cut.axes) for s in stores) else None


def _summed_axes(kernel: Kernel, accum: Stmt, cut: _Cut) -> set[int] | None:
    """The places among the outer axes of those over which it adds up; None if it does not add at one place for each
    position along all other axes.
    """
    named = [index.variable for index in accum.index if index.terms]
    others = {axis for axis, _ in (*kernel.rows, *kernel.cols)} - {*cut.over}
    if accum.combine != "sum" or accum.where or len(set(named)) < len(named) or not others <= set(named):
        return None
    if not set(named) <= others | {*cut.over}:
        return None
    return {n for n, axis in enumerate(cut.over) if axis not in named}


def _zeros(buffer: Buffer) -> Kernel:
    """The kernel that fills a buffer with zeros."""
    zero = Stmt("%0", "const", (), buffer.type.dtype, attrs=(("value", 0.0),))
    return _elementwise("zeros", (zero,), buffer)


def _rounded(wide: Buffer, buffer: Buffer) -> Kernel:
    """The kernel that writes a sum in f64 as what it is a sum of."""
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


def _begins(access: Stmt | Operand, axes: Sequence[str]) -> bool:
    """Whether the index of an access begins with axes, but for positions that are constant."""
    return [i.variable for i in access.index if i.terms][: len(axes)] == [*axes]


def _of_call(call: Call, cut: _Cut) -> _Cut | None:
    """A product with the rows of the loop, or one that adds up over them."""
    lead, out = len(cut.over), [i.variable for i in call.out.index if i.terms]
    if not REGISTRY[call.op].contraction or call.parts or len(out) != lead + 2:
        return None
    batch, row = out[:lead], out[lead]
    divided = {axis for o in call.operands for axis, _ in o.per}
    if batch != [*cut.over] or divided & {*cut.axes} or cut.row == call.result_axes[-1]:
        return None
    return cut if cut.row == row else replace(cut, add=True)


@dataclass(frozen=True)
class _Cutter:
    """Writes a step over the rows of one block."""

    cut: _Cut
    over: tuple[str, ...]
    row: str
    count: str
    blocks: Mapping[str, Buffer]
    lead: int
    """Axes of a buffer that a block of it does not have."""
    column: tuple[str, str] | None
    """The axis of the columns, and the symbol of how many a block has."""
    sums: Mapping[str, Buffer]
    """In what it adds up what a step adds to a buffer."""

    def step(self, step: Kernel | Call, types: Mapping[str, Type]) -> Kernel | Call:
        if isinstance(step, Call):
            out = self.operand(step.out)
            return replace(
                step, axes=self.axes(step.axes), out=out, args=tuple(map(self.operand, step.args)), add=self.cut.add
            )
        body = tuple(part for s in step.body for part in self.statements(s, len(step.body)))
        if self.cut.accums:
            step = replace(step, order="", strategy=())
        kernel = replace(step, rows=self.axes(step.rows), cols=self.axes(step.cols), body=body)
        return kernel.named_by_structure(step.name.rpartition("_")[0] or step.name, types)

    def statements(self, s: Stmt, count: int) -> Iterator[Stmt]:
        """A statement over the rows of a block; an accum adds to what its sequential positions so far came to.

        :param count: statements of the kernel.
        """
        index = self.index(s.buffer, s.index)
        if s.op != "accum":
            yield replace(s, index=index)
            return
        place = count + 3 * sorted(self.cut.accums).index(s.buffer)
        wide, so_far, total = f"%{place}", f"%{place + 1}", f"%{place + 2}"
        where = self.sums[s.buffer].name
        if s.dtype is F64:
            (wide,) = s.args
        else:
            yield Stmt(wide, "cast", s.args, F64, attrs=(("dtype", F64),))
        yield Stmt(so_far, "load", (), F64, where, index)
        yield Stmt(total, "add", (so_far, wide), F64)
        yield Stmt("", "store", (total,), F64, where, index)

    def axes(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        sizes = {self.cut.row: symbol(self.count)}
        if self.column:
            sizes[self.column[0]] = symbol(self.column[1])
        return tuple((name, sizes.get(name, size)) for name, size in axes if name not in self.cut.over)

    def operand(self, operand: Operand) -> Operand:
        scale = self.operand(operand.scale) if operand.scale else None
        return replace(operand, index=self.index(operand.buffer, operand.index), scale=scale)

    def index(self, buffer: str, index: tuple[Index, ...]) -> tuple[Index, ...]:
        if buffer in self.blocks:
            return index[self.lead :]
        return tuple(map(self.placed, index))

    def placed(self, index: Index) -> Index:
        """The index of a position in all rows, over those of a block."""
        places = dict(zip(self.cut.over, self.over, strict=True))
        const, terms = index.const, []
        for variable, factor in index.terms:
            if variable == self.cut.row:
                const = const + factor * symbol(self.row)
            if variable in places:
                const = const + factor * symbol(places[variable])
            else:
                terms.append((variable, factor))
        return Index(const, tuple(terms))
