"""rows_to_columns: a reduction over all rows and columns becomes that of one row, which a GPU splits among blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import same
from ...ir.kernel import Kernel, Program, Step
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ..manager import program_pass


@program_pass("BITS")
def rows_to_columns(program: Program) -> Program:
    """kernel rows(i: N) cols(j: M) { %1 = sum_cols %0;  accum y[] <- %1 }
    ->  kernel rows() cols(i: N, j: M) { %1 = sum_cols %0;  store y[] <- %1 }

    Every other access goes through whole arrays in the order of rows and columns, so that they still lie together.
    """
    types = {b.name: b.type for b in program.buffers}
    steps: list[Step] = [
        _as_one_row(step, types) if isinstance(step, Kernel) and _is_full_reduction(step, types) else step
        for step in program.steps
    ]
    return program if steps == list(program.steps) else replace(program, steps=tuple(steps))


def _is_full_reduction(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether all that a kernel does is to reduce over its rows and columns into scalars, from arrays that it reads in
    row-major order.
    """
    if not kernel.rows or not kernel.cols or not kernel.accums:
        return False
    if any(s.op in ("scan", "check", "search") or s.where for s in kernel.body):
        return False
    totals = {s.args[0]: s for s in kernel.accums}
    reductions = {s.name: s for s in kernel.body if s.op in REDUCTIONS}
    if totals.keys() != reductions.keys():
        return False
    used_elsewhere = any(set(s.uses) & totals.keys() for s in kernel.body if s.op != "accum")
    scalars = all(
        all(i == Index() for i in s.index) and s.combine == REDUCTIONS[reductions[value].op]
        for value, s in totals.items()
    )
    return (
        not used_elsewhere
        and scalars
        and all(_is_row_major(kernel, types, s) for s in kernel.body if s.op in ("load", "store"))
    )


def _is_row_major(kernel: Kernel, types: Mapping[str, Type], s: Stmt) -> bool:
    """Whether an access goes through all of its buffer in the order of rows and columns, or stays at one element."""
    if s.op == "load" and all(i == Index() for i in s.index):
        return True
    axes = (*kernel.rows, *kernel.cols)
    entries = [(i, n) for i, n in zip(s.index, types[s.buffer].shape, strict=True) if n != 1]
    wanted = [(a, n) for a, n in axes if n != 1]
    return len(entries) == len(wanted) and all(
        i.variable == a and same(n, extent) for (i, n), (a, extent) in zip(entries, wanted, strict=True)
    )


def _as_one_row(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """Kernel -> one row, whose columns are the rows and columns of the kernel, with a store in place of each accum."""
    body: list[Stmt] = []
    for number, s in enumerate(kernel.body):
        dtype = types[s.buffer].dtype if s.op == "accum" else s.dtype
        if s.op == "accum" and dtype is not s.dtype:  # a sum in f32 of a 16-bit result
            rounded = Stmt(f"%{len(kernel.body) + number}", "cast", s.args, dtype, attrs=(("dtype", dtype),))
            body.append(rounded)
            s = replace(s, args=(rounded.name,), dtype=dtype)
        body.append(replace(s, op="store", attrs=()) if s.op == "accum" else s)
    one_row = replace(kernel, rows=(), cols=(*kernel.rows, *kernel.cols), body=tuple(body))
    return one_row.named_by_structure(kernel.name.rpartition("_")[0], types)
