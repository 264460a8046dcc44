"""resize_blocks: how many rows a GPU's blocks have, once it is known what lies in them.

What a product sums over rows, the gradient of a weight, is read and written in f32 for each block: of 8192 tokens over
50257 words that is 309 MB each time.  So a block has as many rows as some 240 MB have room for: of 16 bits, one
computed in place of another, three times as many as of f32 with a gradient beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import Size, assuming, ceildiv, known_nonnegative, maximum, substitute, symbol
from ...ir.kernel import Buffer, Call, Kernel, Loop, Program
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ...ir.walk import backward_slice
from ..manager import program_pass
from ..program.plan_buffers import with_block_slots
from .fission import fresh_name
from .loop_writer import rows_per_launch

FULL_BYTES = 6
"""Of an element of a block as :data:`.wide_products.LAUNCH_ELEMENTS` counts them: f32, and its gradient in 16 bits."""


@program_pass("REAL")
def resize_blocks(program: Program) -> Program:
    """loop rows(n: N) by(768) { store dx[i, j] <- f(x[i, j], x[i, t[i]]) }  ->  loop rows(n: N) by(2176) { store
    at[i] <- x[i, t[i]]; store dx[i, j] <- f(x[i, j], at[i]) }, in which dx may lie where x does

    Licence REAL: how many rows a block has decides how sums over rows are grouped.
    """
    with assuming(program.assumptions):
        for given in program.loops:
            if given.tile is None and not given.sweeps and given.blocks:
                loop, size = given, _row_bytes(program, given, given)
                apart = _gathers_first(program, given)
                if apart is not given and known_nonnegative(size - 1 - (less := _row_bytes(program, given, apart))):
                    loop, size = apart, less
                sized = replace(loop, by=rows_per_launch(loop.rows[1], ceildiv(size, FULL_BYTES)))
                program = _with_loop(program, given, sized)
    return program


def _with_loop(program: Program, given: Loop, loop: Loop) -> Program:
    return replace(program, steps=tuple(loop if step is given else step for step in program.steps))


def _row_bytes(program: Program, given: Loop, loop: Loop) -> Size:
    """Bytes of memory that a row of a loop's blocks takes, in place of the given one."""
    slots, whole = dict[int, Size](), {loop.count: 1, **dict(loop.cols)}
    for block in with_block_slots(loop, _with_loop(program, given, loop)).blocks:
        size = substitute(block.type.nbytes, whole)
        slots[block.slot] = maximum(slots[block.slot], size) if block.slot in slots else size
    total: Size = 0
    for size in slots.values():
        total = total + size
    return total


def _gathers_first(program: Program, loop: Loop) -> Loop:
    """The loop whose kernels that compute wide rows leave it to kernels before them to read single elements of blocks:
    the same loop where none does.
    """
    taken = {*program.dims, *program.types, *loop.symbols}
    types, blocks, steps = dict(program.types), [*loop.blocks], list[Kernel | Call]()
    for step in loop.steps:
        found = _gathers(step, loop) if isinstance(step, Kernel) else []
        if not isinstance(step, Kernel) or not found:
            steps.append(step)
            continue
        own = {}
        for s in found:
            type_ = Type(program.types[s.buffer].dtype, (symbol(loop.count),))
            own[s.name] = Buffer(fresh_name(f"{s.buffer}.at", taken), type_, "block")
        types |= {b.name: b.type for b in own.values()}
        blocks += own.values()
        steps += _in_two(step, own, types)
    return loop if len(steps) == len(loop.steps) else replace(loop, blocks=tuple(blocks), steps=tuple(steps))


def _gathers(kernel: Kernel, loop: Loop) -> list[Stmt]:
    """The loads of a kernel's own rows of blocks at columns that data say, if it stores blocks and what says so is
    computed of no reduction.
    """
    blocks, rows = {b.name for b in loop.blocks}, [axis for axis, _ in kernel.rows]
    wide = any(s.op == "store" and s.buffer in blocks and kernel.is_column(s) for s in kernel.body)
    if not wide or len(rows) != 1 or kernel.order:
        return []
    found = []
    for s in kernel.body:
        place = [v for i in s.index for v, _ in i.terms if v.startswith("%")]
        if s.op == "load" and s.buffer in blocks and place and not s.where and not kernel.is_column(s):
            before = backward_slice(kernel.body, place)
            if s.index[0] == Index.of(rows[0]) and not any(b.op in REDUCTIONS for b in before):
                found.append(s)
    return found


def _in_two(kernel: Kernel, own: Mapping[str, Buffer], types: Mapping[str, Type]) -> tuple[Kernel, Kernel]:
    """A kernel that stores loads of another one, and that one, which loads what the first has stored.

    :param own: by the loads' names where these are stored.
    """
    base = kernel.name.rpartition("_")[0] or kernel.name
    at = (Index.of(kernel.rows[0][0]),)
    stores = [Stmt("", "store", (name,), b.type.dtype, b.name, at) for name, b in own.items()]
    first = replace(kernel, cols=(), body=(*backward_slice(kernel.body, own), *stores))
    body = tuple(s.altered(buffer=own[s.name].name, index=at) if s.name in own else s for s in kernel.body)
    first, rest = first.live, replace(kernel, body=body).live
    return first.named_by_structure(base, types), rest.named_by_structure(base, types)
