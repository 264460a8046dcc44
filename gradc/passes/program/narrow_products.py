"""narrow_products: a product that everybody rounds at once is rounded by its library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from ...ir.kernel import Buffer, Call, Kernel, Loop, Program, Step
from ...ir.node import REGISTRY
from ...ir.types import F32, DType
from ..manager import program_pass


@program_pass("BITS")
def narrow_products(program: Program) -> Program:
    """call t: f32 <- matmul ...;  %1 = cast t[i] : bf16;  ... %1  ->  call t: bf16 <- matmul ...;  %1 = load t[i];  ...

    Of operands in 16 bits, whose product the library rounds as the kernels would; half of the bytes move.  In a loop a
    block's product is.
    """
    narrow: dict[str, DType] = {}
    for steps in (program.steps, *(loop.items for loop in program.loops)):
        for step in steps:
            if isinstance(step, Call) and (dtype := _rounded_by_all(program, step, steps)) is not None:
                narrow |= dict.fromkeys(_same_memory(program, step.out.buffer), dtype)
    if not narrow:
        return program

    def rounded(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(replace(b, type=b.type.with_dtype(narrow[b.name])) if b.name in narrow else b for b in buffers)

    types = {name: t.with_dtype(narrow[name]) if name in narrow else t for name, t in program.types.items()}

    def in_loop(step: Kernel | Call) -> Kernel | Call:
        reads = isinstance(step, Kernel) and narrow.keys() & {*step.reads}
        return _reading_narrow(step, narrow).rehashed(types) if isinstance(step, Kernel) and reads else step

    def over_blocks(step: Step) -> Step:
        if not isinstance(step, Loop):
            return step
        sweeps = tuple(replace(sweep, blocks=rounded(sweep.blocks)) for sweep in step.sweeps)
        return replace(step, blocks=rounded(step.blocks), sweeps=sweeps).with_items(in_loop)

    steps = tuple(map(over_blocks, program.steps))
    program = replace(program, buffers=rounded(program.buffers), steps=steps)
    return program.with_kernels(lambda kernel: _reading_narrow(kernel, narrow))


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


def _reading_narrow(kernel: Kernel, narrow: Mapping[str, DType]) -> Kernel:
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
    return replace(kernel, body=tuple(body)).live
