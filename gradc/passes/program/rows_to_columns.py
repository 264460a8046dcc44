"""rows_to_columns: a reduction over all rows and columns becomes that of one row, which a GPU splits among blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.dims import same
from ...ir.kernel import Kernel, Program
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ..loops.accums import store_sums
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..manager import program_pass


@program_pass("BITS")
def rows_to_columns(program: Program) -> Program:
    """kernel rows(i: N) cols(j: M) { %1 = sum_cols %0;  accum y[] <- %1 }
    ->  kernel rows() cols(i: N, j: M) { %1 = sum_cols %0;  store y[] <- %1 }

    Every other access goes through whole arrays in the order of rows and columns, so that they still lie together.
    """
    types = program.types

    def rewritten(kernel: Kernel) -> Kernel:
        whole = kernel.rows and kernel.cols and kernel.accums
        if not whole or not all(_is_row_major(kernel, types, s) for s in kernel.body if s.op in ("load", "store")):
            return kernel
        axes = [a for a, _ in (*kernel.rows, *kernel.cols)]
        return attempt(lambda: store_sums(reorder(kernel, axes), types)) or kernel

    return program.with_kernels(rewritten)


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
