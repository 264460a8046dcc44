"""fuse_rounding: the cast to 16 bits of a sum or product becomes the epilogue of the step that computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from ...ir.kernel import Buffer, Call, Kernel, Loop, Program, Step
from ...ir.node import REGISTRY
from ...ir.statement import Index, Stmt
from ...ir.types import F32, DType, Type
from ..manager import program_pass


@program_pass("BITS")
def fuse_rounding(program: Program) -> Program:
    """accum t[i] <- v : f32;  store o[i] <- cast t[i] : bf16  ->  accum o[i] <- v : f32

    It adds up in f32 and is rounded once, so the bits stay; what goes is the f32 result's way to memory and back: 8 of
    10 bytes per element.  The same holds of a product of operands of the narrow dtype, which its library rounds:

    call t[m, n] <- matmul a[m, k], b[k, n];  store o[i] <- cast t[i] : bf16  ->  call o[m, n] <- matmul ...

    Where the kernels that read such a product do more than round it, the product itself is rounded in memory, in a loop
    in a block's:

    call t: f32 <- matmul ...;  %1 = cast t[i] : bf16;  ... %1  ->  call t: bf16 <- matmul ...;  %1 = load t[i];  ...

    And where a kernel only moves it, rows apart (heads beside features), the library writes it where it is moved to:

    call t[b, m, n] <- matmul ...;  store o[m, b, n] <- load t[b, m, n]  ->  call o[m, b, n] <- matmul ...
    """
    steps: list[Step] = list(program.steps)
    rounded_to: dict[str, str] = {}
    for number, step in enumerate(program.steps):
        rounded = _rounding(step) if isinstance(step, Kernel) else None
        if rounded is not None and _is_sole_consumer(program, number, *rounded):
            rounded_to[rounded[0]] = rounded[1]
            steps.remove(step)
    if rounded_to:
        kept = [_with_outputs(step, rounded_to) if isinstance(step, Kernel | Call) else step for step in steps]
        buffers = tuple(b for b in program.buffers if b.name not in rounded_to)
        program = replace(program, steps=tuple(kept), buffers=buffers)
    return _with_moved_results(_with_narrow_products(program))


def _rounding(kernel: Kernel) -> tuple[str, str] | None:
    """(f32 buffer, 16-bit buffer) of a kernel that only casts every element of the one into the other; None for any
    other kernel.
    """
    if [s.op for s in kernel.body] != ["load", "cast", "store"]:
        return None
    load, cast, store = kernel.body
    axes = [a for a, _ in (*kernel.rows, *kernel.cols)]
    plain = load.index == store.index and sorted(str(i.variable) for i in load.index if i != Index()) == sorted(axes)
    narrow = cast.dtype is not None and cast.dtype.is_float and cast.dtype.bits == 16
    chained = (cast.args, store.args) == ((load.name,), (cast.name,))
    return (
        (load.buffer, store.buffer)
        if plain and narrow and chained and load.dtype is F32 and not load.where and not store.where
        else None
    )


def _is_sole_consumer(program: Program, number: int, source: str, target: str) -> bool:
    """Whether a rounding kernel is the only reader of a temp that one step writes, a sum in f32 or a product, so that
    this step may write the rounded result itself; neither buffer has aliases.
    """
    a, b = program.buffer[source], program.buffer[target]
    others = [step for i, step in enumerate(program.steps) if i != number]
    touched = [step for step in others if source in (*step.reads, *step.writes)]
    same_memory = {target, *(x.name for x in program.buffers if x.alias == target)}
    first = all(same_memory.isdisjoint((*step.reads, *step.writes)) for step in program.steps[:number])
    return (
        a.kind == "temp"
        and not (a.alias or b.alias or any(x.alias == source for x in program.buffers))
        and len(touched) == 1
        and (_is_f32_sum(touched[0], source) or _is_narrow_product(program, touched[0], target))
        and first
        and a.type.shape == b.type.shape
    )


def _is_f32_sum(step: Step, source: str) -> bool:
    """Whether a step accumulates a buffer by one sum in f32."""
    made = [s for s in step.accums if s.buffer == source] if isinstance(step, Kernel) else []
    return len(made) == 1 and made[0].combine == "sum" and made[0].dtype is F32


def _is_narrow_product(program: Program, step: Step, target: str) -> bool:
    """Whether a step is a matrix product whose operands have the dtype of a buffer."""
    return (
        isinstance(step, Call)
        and REGISTRY[step.op].contraction
        and all(program.buffer[o.buffer].type.dtype is program.buffer[target].type.dtype for o in step.operands)
    )


# -- products that several steps read ----------------------------------------------------------------------------------


def _with_narrow_products(program: Program) -> Program:
    """Program -> the program in which products that every reader rounds at once are rounded where they are written."""
    narrow: dict[str, DType] = {}
    for steps in (program.steps, *(loop.steps for loop in program.loops)):
        for step in steps:
            if isinstance(step, Call) and (dtype := _rounded_by_all(program, step, steps)) is not None:
                narrow |= dict.fromkeys(_same_memory(program, step.out.buffer), dtype)
    if not narrow:
        return program

    def rounded(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(replace(b, type=b.type.with_dtype(narrow[b.name])) if b.name in narrow else b for b in buffers)

    types = {name: type_.with_dtype(narrow[name]) if name in narrow else type_ for name, type_ in program.types.items()}

    def reading(step: Step) -> Step:
        if isinstance(step, Loop):
            steps = tuple(_reading_narrow(s, narrow, types) if isinstance(s, Kernel) else s for s in step.steps)
            return replace(step, blocks=rounded(step.blocks), steps=steps)
        return _reading_narrow(step, narrow, types) if isinstance(step, Kernel) else step

    steps = tuple(map(reading, program.steps))
    return _without_copies(replace(program, buffers=rounded(program.buffers), steps=steps), narrow)


def _without_copies(program: Program, narrow: Mapping[str, DType]) -> Program:
    """Program -> the program in which a rounded product that a kernel also stores elsewhere as it is, is written there.

    :param narrow: the rounded products.
    """
    moved: dict[str, str] = {}
    for number, step in enumerate(program.steps):
        for source, target in _copies(step) if isinstance(step, Kernel) else ():
            own = source in narrow and source not in moved and len(_same_memory(program, source)) == 1
            if own and _is_first(program, number, target) and _alike(program, source, target):
                moved[source] = target
    if not moved:
        return program
    buffers = tuple(b for b in program.buffers if b.name not in moved)
    types = {b.name: b.type for b in buffers}
    steps = tuple(_moved(step, moved, types) if isinstance(step, Kernel | Call) else step for step in program.steps)
    return replace(program, buffers=buffers, steps=steps)


def _copies(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """(buffer, other buffer) where a kernel stores every element of the one, as it was loaded, at its place in the
    other.
    """
    axes = sorted(a for a, _ in (*kernel.rows, *kernel.cols))
    loads = {s.name: s for s in kernel.body if s.op == "load" and not s.where}
    for store in kernel.body:
        load = loads.get(store.args[0]) if store.op == "store" and not store.where else None
        if load is not None and load.index == store.index and _variables(load) == axes:
            yield load.buffer, store.buffer


def _variables(s: Stmt) -> list[str]:
    return sorted(str(i.variable) for i in s.index if i != Index())


def _is_first(program: Program, number: int, name: str) -> bool:
    """Whether no step before touches a buffer that owns its memory, and no other writes it."""
    same_memory = _same_memory(program, program.root(name))
    before = all(same_memory.isdisjoint((*step.reads, *step.writes)) for step in program.steps[:number])
    writers = [step for step in program.steps if same_memory & {*step.writes}]
    return program.root(name) == name and before and len(writers) == 1


def _alike(program: Program, one: str, other: str) -> bool:
    return program.buffer[one].type == program.buffer[other].type


def _moved(step: Kernel | Call, names: Mapping[str, str], types: Mapping[str, Type]) -> Kernel | Call:
    """A step that writes or loads other buffers; what it would copy to them is there."""
    if isinstance(step, Call):
        return _with_outputs(step, dict(names))
    if not names.keys() & {*step.reads}:
        return step
    copied = {pair for pair in _copies(step) if names.get(pair[0]) == pair[1]}
    loads = {s.name: s.buffer for s in step.body if s.op == "load"}
    body = [
        replace(s, buffer=names.get(s.buffer, s.buffer))
        for s in step.body
        if not (s.op == "store" and (loads.get(s.args[0], ""), s.buffer) in copied)
    ]
    return replace(step, body=tuple(body)).live.named_by_structure(step.name.rpartition("_")[0], types)


def _rounded_by_all(program: Program, call: Call, steps: Sequence[Step]) -> DType | None:
    """The 16-bit dtype of a product's operands, if the product is a temp (in a loop, a block) in f32 that is read by
    kernels alone, each of which rounds what it loads to it.

    :param steps: the product's own sequence: the program's or a loop's.
    """
    out = program.buffer[call.out.buffer]
    read = {program.buffer[o.buffer].type.dtype for o in call.operands}
    if (
        out.kind != ("temp" if steps is program.steps else "block")
        or out.alias
        or out.type.dtype is not F32
        or len(read) != 1
        or not REGISTRY[call.op].contraction
    ):
        return None
    (dtype,) = read
    if not (dtype.is_float and dtype.bits == 16):
        return None
    names = _same_memory(program, out.name)
    readers = [step for step in steps if step is not call and names & {*step.reads, *step.writes}]
    rounded = all(isinstance(step, Kernel) and _rounds_loads(step, names, dtype) for step in readers)
    return dtype if readers and rounded else None


def _same_memory(program: Program, name: str) -> set[str]:
    return {other for other in program.buffer if program.root(other) == name}


def _rounds_loads(kernel: Kernel, names: Set[str], dtype: DType) -> bool:
    """Whether a kernel only loads buffers, and rounds what it loads of them before anything else."""
    loads = {s.name for s in kernel.body if s.op == "load" and s.buffer in names}
    others = [s for s in kernel.body if s.buffer in names and (s.op != "load" or s.where)]
    users = [s for s in kernel.body if loads & {*s.uses}]
    return not others and all(s.op == "cast" and s.dtype is dtype for s in users)


def _reading_narrow(kernel: Kernel, narrow: Mapping[str, DType], types: Mapping[str, Type]) -> Kernel:
    """A kernel that loads what is rounded already, without its own rounding of it."""
    loads = {s.name for s in kernel.body if s.op == "load" and s.buffer in narrow}
    if not loads:
        return kernel
    rounded = {s.name: s.args[0] for s in kernel.body if s.op == "cast" and s.args[0] in loads}
    body = []
    for s in kernel.body:
        if s.name in rounded:
            continue
        args, index = tuple(rounded.get(a, a) for a in s.args), tuple(i.renamed(rounded) for i in s.index)
        dtype = narrow[s.buffer] if s.name in loads else s.dtype
        body.append(replace(s, args=args, index=index, where=rounded.get(s.where, s.where), dtype=dtype))
    return replace(kernel, body=tuple(body)).live.named_by_structure(kernel.name.rpartition("_")[0], types)


# -- products that are moved -------------------------------------------------------------------------------------------


def _with_moved_results(program: Program) -> Program:
    """Program -> the program in which products that a kernel only moves are written where it moves them to."""
    for number, step in enumerate(program.steps):
        moved = _movement(step) if isinstance(step, Kernel) else None
        if moved is None:
            continue
        load, store = moved
        source, target = program.buffer[load.buffer], program.buffer[store.buffer]
        others = [(n, s) for n, s in enumerate(program.steps) if n != number and load.buffer in (*s.reads, *s.writes)]
        call = others[0][1] if len(others) == 1 else None
        if not isinstance(call, Call) or not REGISTRY[call.op].contraction or call.out.buffer != source.name:
            continue
        if (
            source.kind != "temp"
            or len(_same_memory(program, source.name)) > 1
            or source.type.dtype is not target.type.dtype
        ):
            continue
        if not _is_first(program, number, target.name):
            continue
        axes = dict(zip((i.variable for i in load.index), call.out.index, strict=True))
        index = tuple(axes[i.variable] for i in store.index)
        if index[-1] != call.out.index[-1]:  # elements of a row stay neighbours
            continue
        written = replace(call, out=replace(call.out, buffer=target.name, index=index))
        steps = tuple(written if s is call else s for s in program.steps if s is not step)
        buffers = tuple(b for b in program.buffers if b.name != source.name)
        return _with_moved_results(replace(program, steps=steps, buffers=buffers))
    return program


def _movement(kernel: Kernel) -> tuple[Stmt, Stmt] | None:
    """(load, store) of a kernel that only stores every element at a place with the same positions in another order."""
    if [s.op for s in kernel.body] != ["load", "store"]:
        return None
    load, store = kernel.body
    axes = sorted(a for a, _ in (*kernel.rows, *kernel.cols))
    plain = all(sorted(str(i.variable) for i in s.index) == axes and not s.where for s in (load, store))
    return (load, store) if plain and store.args == (load.name,) else None


def _with_outputs(step: Kernel | Call, names: dict[str, str]) -> Kernel | Call:
    """Step -> the step that writes other buffers: ``names`` maps the old to the new."""
    if isinstance(step, Call):
        return replace(step, out=replace(step.out, buffer=names.get(step.out.buffer, step.out.buffer)))

    def of(s: Stmt) -> Stmt:
        return replace(s, buffer=names[s.buffer]) if s.op == "accum" and s.buffer in names else s

    return replace(step, body=tuple(map(of, step.body)))
