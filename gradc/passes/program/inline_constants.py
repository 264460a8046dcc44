"""inline_constants: constant propagation from constant arrays into kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.kernel import Buffer, Program
from ...ir.statement import Stmt
from ..manager import program_pass


@program_pass("BITS")
def inline_constants(program: Program) -> Program:
    """load c[0, 1] : f32, of const c = [[-1.0, 1.0]]  ->  const {value=1.0} : f32

    So are the coefficients of weights where taps are unrolled: a compiler leaves out a product with 1.
    """
    constants = {b.name: b for b in program.of_kind("const") if not b.alias}
    made = program.with_kernels(lambda k: replace(k, body=tuple(_folded(s, constants) for s in k.body)))
    if made is program:
        return program
    kept = {b for step in made.steps for b in (*step.reads, *step.writes)} | {b.alias for b in program.buffers}
    kept |= {b for _, b in program.outputs}
    buffers = tuple(b for b in program.buffers if b.kind != "const" or b.name in kept)
    return replace(made, buffers=buffers)


def _folded(s: Stmt, constants: Mapping[str, Buffer]) -> Stmt:
    """Load -> a constant statement, if it is unmasked and at a constant index of a constant array; any other statement
    as it is.
    """
    if s.op != "load" or s.where or s.buffer not in constants or any(i.terms for i in s.index):
        return s
    place, shape = [i.const for i in s.index], constants[s.buffer].type.shape
    at = 0
    for entry, size in zip(place, shape, strict=True):
        if not isinstance(entry, int) or not isinstance(size, int) or not 0 <= entry < size:
            return s
        at = at * size + entry
    return replace(s, op="const", buffer="", index=(), attrs=(("value", constants[s.buffer].value[at]),))
