"""align_rows: rows of what products write for one another begin where a GPU's library wants them."""

from __future__ import annotations

from dataclasses import replace

from ...ir.kernel import Buffer, Call, Kernel, Loop, Program, Step, alternatives
from ...ir.node import REGISTRY
from ...targets.gpu import MATRIX_ALIGN
from ..manager import program_pass

ROW_ELEMENTS = MATRIX_ALIGN // 2
"""Rows begin at multiples of so many elements of 16 bits."""
LEAST_COLUMNS = 64
"""Of a row that is padded, which then takes an eighth more memory at most."""


@program_pass("BITS")
def align_rows(program: Program) -> Program:
    """temp t: bf16[96,1025,1025], of a product  ->  temp t: bf16[96,1025,1032]

    What is behind the columns is never accessed.  Inputs and outputs are as their readers expect them.
    """
    touched = {
        o.buffer for step in program.steps for c in alternatives(step) if _is_narrow(program, c) for o in c.accesses
    }
    padded = {b.name: _padded(b) for b in program.buffers if b.name in touched and _may_pad(program, b)}
    if not padded:
        return program
    types = {**program.types, **{name: b.type for name, b in padded.items()}}

    def own(step: Kernel | Call) -> Kernel | Call:
        reads = isinstance(step, Kernel) and padded.keys() & {*step.buffers}
        return step.rehashed(types) if isinstance(step, Kernel) and reads else step

    def over(step: Step) -> Step:
        if isinstance(step, Loop):
            return step.with_items(own)
        return own(step) if isinstance(step, Kernel) else step

    buffers = tuple(padded.get(b.name, b) for b in program.buffers)
    return replace(program, buffers=buffers, steps=tuple(map(over, program.steps)))


def _is_narrow(program: Program, item: Kernel | Call) -> bool:
    """Whether a step is a product of operands of 16 bits."""
    product = isinstance(item, Call) and REGISTRY[item.op].contraction
    return product and all(program.types[name].dtype.bits == 16 for name in item.reads)


def _may_pad(program: Program, buffer: Buffer) -> bool:
    """Whether a buffer is a temp with rows of a known odd number of elements, that steps load and store as it is."""
    columns = buffer.type.shape[-1] if buffer.type.rank > 1 else 0
    odd = isinstance(columns, int) and columns >= LEAST_COLUMNS and columns % ROW_ELEMENTS
    aliased = buffer.alias or any(b.alias == buffer.name for b in program.buffers)
    kernels = (k for k in program.kernels if buffer.name in k.buffers)
    plain = all(s.op in ("load", "store") for k in kernels for s in k.accesses if s.buffer == buffer.name)
    return buffer.kind == "temp" and bool(odd) and not aliased and plain


def _padded(buffer: Buffer) -> Buffer:
    *rows, columns = buffer.type.shape
    assert isinstance(columns, int)
    return replace(buffer, type=replace(buffer.type, shape=(*rows, -(-columns // ROW_ELEMENTS) * ROW_ELEMENTS)))
