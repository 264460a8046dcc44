"""store_rows: calls that replace rows of donated inputs run last, and the kernel that computes the rows stores them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ...analysis.lifetimes import checks_data, may_update
from ...ir.dims import Size, same
from ...ir.kernel import Call, Kernel, Program, Step
from ...ir.node import REGISTRY
from ...ir.statement import Index, Stmt
from ...ir.types import BOOL
from ..manager import program_pass
from .copy_donated import copy_of


@program_pass("BITS")
def store_rows(program: Program, *, donate: Collection[str], fuse: bool = True) -> Program:
    """rows(n) cols(d) { store r[n] <- %r; load w[%r, d] where in; store t[n, d] <- %t }; w.2 = put_rows w, r, t
    ->  copy w.2 <- w; rows(n) cols(d) { load w.2[%r, d] where in; store w.2[%r, d] <- %t where in }

    The copy is nothing where both are one memory.  A kernel that reads other rows of ``w`` is left as it is.

    :param donate: inputs over which the outputs of their names are written.
    :param fuse: False leaves kernels as they are.
    """
    late = [step for step in program.steps if isinstance(step, Call) and _updates(program, step, donate)]
    program = replace(program, steps=(*(step for step in program.steps if step not in late), *late))
    for call in late if fuse else ():
        program = _stored(program, call) or program
    return program


def _updates(program: Program, call: Call, donate: Collection[str]) -> bool:
    """Whether a call updates one of the inputs, and nothing reads what it gives."""
    number = REGISTRY[call.op].updates
    if number is None or (source := call.args[number].buffer) not in donate:
        return False
    read = any(program.root(b) == program.root(call.out.buffer) for step in program.steps for b in step.reads)
    return may_update(program, call, source) and not read


def _stored(program: Program, call: Call) -> Program | None:
    """The program whose kernel stores the rows of a call; None if there is no such kernel."""
    base, rows, values = (arg.buffer for arg in call.args)
    writers = [step for step in program.steps if values in step.writes]
    readers = [step for step in program.steps if values in step.reads]
    if len(writers) != 1 or not isinstance(kernel := writers[0], Kernel) or readers != [call]:
        return None
    if kernel.accums or checks_data(kernel) or program.buffer[values].kind != "temp" or _is_aliased(program, values):
        return None
    made = _Stores(kernel, call, program).kernel()
    if made is None:
        return None
    out = call.out.buffer
    copy = copy_of(base, out, program.types[out])
    steps = [step for step in program.steps if step not in (kernel, call)]
    last = next((i for i, step in enumerate(steps) if _are_late(steps[i:])), len(steps))
    if not _may_run_after(program, kernel, steps[program.steps.index(kernel) : last]):
        return None
    steps[last:last] = [copy, made.rehashed(program.types)]
    return _without(replace(program, steps=tuple(steps)), (rows, values))


def _are_late(steps: list[Step]) -> bool:
    """Whether they are nothing but calls that update rows."""
    return all(isinstance(step, Call) and REGISTRY[step.op].updates is not None for step in steps)


def _may_run_after(program: Program, kernel: Kernel, steps: list[Step]) -> bool:
    """Whether a kernel may run after steps that come behind it: they neither read what it writes nor write what it
    reads.
    """
    own = {program.root(name) for name in (*kernel.reads, *kernel.writes)}
    written = {program.root(name) for name in kernel.writes}
    return not any(
        written.intersection(map(program.root, step.reads)) or own.intersection(map(program.root, step.writes))
        for step in steps
    )


def _is_aliased(program: Program, name: str) -> bool:
    return bool(program.buffer[name].alias) or any(b.alias == name for b in program.buffers)


def _without(program: Program, names: Collection[str]) -> Program:
    """The program without temps that no step reads, and without the stores to them."""
    read = {b for step in program.steps for b in step.reads}
    dead = {n for n in names if n not in read and program.buffer[n].kind == "temp" and not _is_aliased(program, n)}
    steps = [
        replace(step, body=tuple(s for s in step.body if s.buffer not in dead)).rehashed(program.types)
        if isinstance(step, Kernel) and dead.intersection(step.writes)
        else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name not in dead))


@dataclass(frozen=True)
class _Stores:
    """A kernel that computes the rows of a call."""

    writer: Kernel
    call: Call
    program: Program

    def kernel(self) -> Kernel | None:
        """The kernel that stores them, None if it cannot."""
        base, rows, values = (arg.buffer for arg in self.call.args)
        out, size = self.call.out.buffer, self.program.types[base].shape[0]
        stores = [s for s in self.writer.body if s.buffer == values]
        if [s.op for s in stores] != ["store"] or stores[0].where:
            return None
        (store,) = stores
        row = self.row(rows, store)
        if row is None:
            return None
        mask = next(self.masks(row, size), None)
        at = (Index.of(row), *store.index[1:])
        loads = [s for s in self.writer.body if s.buffer == base]
        if any((s.op, s.index, s.where) != ("load", at, mask) for s in loads):
            return None
        if not self.before(loads, store):
            return None
        late = not {row, mask or row} <= {s.name for s in self.writer.body[: self.writer.body.index(store)]}
        if late and loads:
            return None
        body: list[Stmt] = []
        where = mask or next(self.writer.fresh_names())
        others = [s for s in self.writer.body if s is not store]
        for s in (*others, store) if late else self.writer.body:  # where the row is known
            if s is store:
                if mask is None:
                    body.append(Stmt(where, "in_bounds", (), BOOL, index=at[:1], attrs=(("hi", size), ("lo", 0))))
                body.append(s.altered(buffer=out, index=at, where=where))
            else:
                body.append(s.altered(buffer=out) if s in loads else s)
        return replace(self.writer, body=tuple(body))

    def row(self, rows: str, store: Stmt) -> str | None:
        """The value that says which row a row of the kernel is."""
        for s in self.writer.body:
            if s.buffer == rows and s.index == store.index[:1] and not s.where and s.op in ("store", "load"):
                return s.args[0] if s.op == "store" else s.name
        return None

    def masks(self, row: str, size: Size) -> Iterator[str]:
        """The values that say whether a row is one of the array's."""
        for s in self.writer.body:
            if s.op == "in_bounds" and s.index == (Index.of(row),) and s.attr("lo") == 0 and same(s.attr("hi"), size):
                yield s.name

    def before(self, loads: list[Stmt], store: Stmt) -> bool:
        """Whether no pass over the columns loads what an earlier one has stored."""
        kernel = self.writer
        last = kernel.phases[kernel.body.index(store)]
        return not any(s in each.row or s in each.body for s in loads for each in kernel.passes[last + 1 :])
