"""Fusion of a copy into the step that computes what it copies (TVM's reverse_compute_inline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.dims import same
from ...ir.kernel import Call, Kernel, Program, Step
from ...ir.node import REGISTRY
from ...ir.statement import Stmt
from ...ir.types import BF16, F16, F32, Type
from .legality import IllegalMove, refuse, require_open
from .relayout import axes_of_access, redirected


@dataclass(frozen=True)
class Copy:
    """A store that copies a temp, and the step that computes the temp.

    :param number: of the step with the store.  :param producer: of the other.
    :param source: the temp.  :param target: where it is copied to.
    :param order: the axis of the source that each axis of the target is.
    :param readers: the numbers of all steps that read the source.
    :param epilogue: what it computes of an element before it is stored: a rounding from f32 to 16 bits, or, of what
        its producer stores, any pointwise ops.
    """

    number: int
    producer: int
    source: str
    target: str
    order: tuple[int, ...]
    readers: tuple[int, ...]
    epilogue: tuple[Stmt, ...]

    @property
    def rounds(self) -> bool:
        """Whether the copy is another value than its source's."""
        return bool(self.epilogue)


def find_copy(program: Program, number: int, target: str) -> Copy:
    """(program, number of a kernel, a buffer that it writes) -> the copy of a temp that it writes there.

    :raises IllegalMove: it is not all of a temp that it copies to all of the buffer, or rounds to 16 bits; somebody
        touches the buffer, too; the temp is read otherwise than by kernels; or its producer cannot write the buffer: it
        is no kernel or product, reads the temp, rounds otherwise, or writes its last axis as rows.
    """
    kernel = program.steps[number]
    if not isinstance(kernel, Kernel):
        raise IllegalMove(f"find_copy in {kernel.name}: it is no kernel")
    require_open("find_copy", kernel)
    load, store, epilogue = _statements(kernel, target)
    source = load.buffer
    order = _order(kernel, load, store, program.types[source], program.types[target])
    touching = program.touching[source]
    writers = [i for i in touching if source in program.steps[i].writes]
    readers = tuple(i for i in touching if i not in writers)
    alone = program.sharing.get(source) == (source,)
    if not alone or program.buffer[source].kind != "temp" or source in (b for _, b in program.outputs):
        refuse("find_copy", kernel, f"{source} is memory that others have")
    if (
        len(writers) != 1
        or (epilogue and len(readers) > 1)
        or not all(_only_loads(program.steps[i], source) for i in readers)
    ):
        refuse("find_copy", kernel, f"{source} is not computed by one step and read by kernels as it is")
    memory = {*program.sharing.get(target, ())}
    others = sorted({i for name in memory for i in program.touching.get(name, ())})
    before = any(i < number for i in others)
    again = len(readers) > 1 and any(i > number and memory & {*program.steps[i].writes} for i in others)
    if target not in memory or before or again or writers[0] > number:
        refuse("find_copy", kernel, f"{target} is touched before, or written again")
    _require_writable(program.steps[writers[0]], source, program, order, epilogue)
    return Copy(number, writers[0], source, target, order, readers, epilogue)


def write_through(program: Program, copy: Copy) -> Program:
    """store t[n, c, h] <- v;  store y[n, h, c] <- load t[n, c, h]  ->  store y[n, h, c] <- v; so with accums, and with
    the result of a product.  Who reads the temp reads the copy.
    """
    buffers = tuple(b for b in program.buffers if b.name != copy.source)
    types = {b.name: b.type for b in buffers}

    def moved(kernel: Kernel) -> Kernel:
        return redirected(kernel, copy.source, copy.target, copy.order)

    steps: list[Step] = []
    for i, step in enumerate(program.steps):
        if i == copy.producer and isinstance(step, Call):
            index = tuple(step.out.index[a] for a in copy.order)
            step = replace(step, out=replace(step.out, buffer=copy.target, index=index))
        elif isinstance(step, Kernel) and i == copy.number:
            rest = [s for s in step.body if s.op != "store" or s.buffer != copy.target]
            step = moved(replace(step, body=tuple(rest))).live.rehashed(types)
        elif isinstance(step, Kernel) and (i == copy.producer or i in copy.readers):
            step = moved(_with_epilogue(step, copy) if i == copy.producer else step).rehashed(types)
        if i != copy.number or step.writes:
            steps.append(step)
    return replace(program, steps=tuple(steps), buffers=buffers)


def _with_epilogue(producer: Kernel, copy: Copy) -> Kernel:
    """The kernel that stores what the copy computes of its values; a sum is rounded where it is combined."""
    fresh = producer.fresh_names()
    body: list[Stmt] = []
    for s in producer.body:
        if s.buffer == copy.source and s.op == "store" and copy.epilogue:
            names: dict[str, str] = {}  # what has none is the load
            for e in copy.epilogue:
                args = tuple(names.get(a, s.args[0]) for a in e.args)
                names[e.name] = value = next(fresh)
                body.append(e.altered(name=value, args=args))
            s = s.altered(args=(value,), dtype=copy.epilogue[-1].dtype)
        body.append(s)
    return replace(producer, body=tuple(body))


def _statements(kernel: Kernel, target: str) -> tuple[Stmt, Stmt, tuple[Stmt, ...]]:
    """(load, store, what is computed between).

    :raises IllegalMove: there are others between, or no such two.
    """
    stores = [s for s in kernel.body if s.buffer == target]
    value = kernel.stmts[stores[0].args[0]] if [s.op for s in stores] == ["store"] else None
    epilogue: tuple[Stmt, ...] = ()
    if value is not None and value.op != "load" and len(kernel.body) > 2 and value is kernel.body[-2]:
        first, *between, _ = kernel.body
        pointwise = all(s.op == "const" or (s.op in REGISTRY and not s.index) for s in between)
        value, epilogue = (first, tuple(between)) if pointwise else (None, ())
    if value is None or value.op != "load" or value.where:
        refuse("find_copy", kernel, f"what it writes to {target} is no copy")
    return value, stores[0], epilogue


def _order(kernel: Kernel, load: Stmt, store: Stmt, source: Type, target: Type) -> tuple[int, ...]:
    """The axis of the source that each axis of the target is.

    :raises IllegalMove: not all elements of the one are all elements of the other.
    """
    read, written = axes_of_access(load, source), axes_of_access(store, target)
    axes = dict((*kernel.rows, *kernel.cols))
    if sorted(read) != sorted(written) or {v for v in read if not v.isdigit()} != axes.keys():
        refuse("find_copy", kernel, f"{load} and {store} are not at the same positions")
    order = tuple(read.index(v) for v in written)
    sizes = [*zip(read, source.shape, strict=True), *zip(written, target.shape, strict=True)]
    if len({*read}) < len(read) or not all(v.isdigit() or same(axes[v], n) for v, n in sizes):
        refuse("find_copy", kernel, f"it does not copy all of {load.buffer}, or to all of {store.buffer}")
    return order


def _only_loads(step: Step, buffer: str) -> bool:
    return isinstance(step, Kernel) and all(s.op == "load" for s in step.body if s.buffer == buffer)


def _require_writable(
    step: Step, source: str, program: Program, order: tuple[int, ...], epilogue: Sequence[Stmt]
) -> None:
    """
    :raises IllegalMove: the producer of a temp cannot write the copy itself.
    """
    if isinstance(step, Call):
        op, rank = REGISTRY[step.op], len(order)
        rows = op.contraction and order[-1:] == (rank - 1,)
        if not (rows or (op.channels_last and order == (0, *range(2, rank), 1))) or epilogue:
            raise IllegalMove(f"write_through of {source}: {step.op} writes rows, in its own dtype")
        return
    if not isinstance(step, Kernel) or source in step.reads:
        raise IllegalMove(f"write_through of {source}: {step.name} is no kernel, or reads it")
    require_open("write_through", step)
    writes = [s for s in step.body if s.buffer == source]
    if all(s.op == "store" and s.dtype is program.types[source].dtype for s in writes) or not epilogue:
        return
    f32 = all(s.op == "accum" and s.combine == "sum" and s.dtype is F32 for s in writes)
    narrow = [s.op for s in epilogue] == ["cast"] and epilogue[0].dtype in (F16, BF16)
    if not (f32 and narrow and len(writes) == 1):
        raise IllegalMove(f"write_through of {source}: it is no sum in f32, which is rounded once")
