"""Where an accum's sum over columns is added up: in memory, or in a register, from which the accum takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import same
from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Stmt
from ...ir.types import Type
from .legality import place, place_level, refuse, require_open

_REDUCTION = {combine: op for op, combine in REDUCTIONS.items()}


def promote_accums(kernel: Kernel) -> Kernel:
    """accum y[c] <- v  ->  accum y[c] <- sum_cols v, for every accum of a kernel (scalar promotion): in the columns
    nothing is in memory but what is added up.

    :raises IllegalMove: an accum is of rows, or the columns decide to which place it adds.
    """
    require_open("promote_accums", kernel)
    cols, names = {a for a, _ in kernel.cols}, kernel.fresh_names()
    body: list[Stmt] = []
    for s in kernel.body:
        if s.op == "accum":
            if not kernel.is_column(s):
                refuse("promote_accums", kernel, f"{s} is of rows")
            if place_level(kernel, s) & cols:
                refuse("promote_accums", kernel, f"the columns decide where {s} adds")
            (value,) = s.args
            body.append(Stmt(next(names), _REDUCTION[s.combine], (value,), kernel.stmts[value].dtype))
            s = s.altered(args=(body[-1].name,))
        body.append(s)
    return replace(kernel, body=tuple(body))


def demote_reductions(kernel: Kernel) -> Kernel:
    """accum y[c] <- sum_cols v  ->  accum y[c] <- v, for every reduction of a kernel: its columns are then as good as
    rows.

    :raises IllegalMove: a reduction is read by something else than an accum of the row that combines likewise, or is of
        a value that no column decides.
    """
    require_open("demote_reductions", kernel)
    cols, gone = {a for a, _ in kernel.cols}, {s.name: s for s in kernel.body if s.op in REDUCTIONS}
    body: list[Stmt] = []
    for s in kernel.body:
        if s.name in gone:
            if not kernel.levels[s.args[0]] & cols:
                refuse("demote_reductions", kernel, f"{s} counts its columns")
            if kernel.stmts[s.args[0]].dtype is not s.dtype:
                refuse("demote_reductions", kernel, f"{s} is wider than its terms")
            continue
        if gone.keys() & {*s.uses}:
            value = s.args[0] if s.op == "accum" else ""
            if value not in gone or s.combine != REDUCTIONS[gone[value].op] or gone.keys() & place(s):
                refuse("demote_reductions", kernel, f"{s} reads a reduction")
            if place_level(kernel, s) & cols:
                refuse("demote_reductions", kernel, f"{s} adds the sum once per column")
            s = s.altered(args=gone[value].args)
        body.append(s)
    return replace(kernel, body=tuple(body))


def store_sums(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """accum y[] <- sum_cols v  ->  store y[] <- sum_cols v, of a kernel without rows: its one row adds to nothing.

    :param types: of its buffers; what is added up in a wider dtype is rounded to them.
    :raises IllegalMove: there are rows; an accum is of columns, masked, at a place that is data, or one of several into
        its buffer.
    """
    require_open("store_sums", kernel)
    if kernel.rows:
        refuse("store_sums", kernel, "each of its rows adds to the same elements")
    names = kernel.fresh_names()
    body: list[Stmt] = []
    for s in kernel.body:
        if s.op == "accum":
            several = any(other.buffer == s.buffer for other in kernel.body if other is not s)
            if kernel.is_column(s) or s.where or several or not same(types[s.buffer].count, 1):
                refuse("store_sums", kernel, f"{s} is not all that its buffer gets")
            dtype = types[s.buffer].dtype
            if dtype is not s.dtype:  # a sum in f32 of a 16-bit result
                body.append(Stmt(next(names), "cast", s.args, dtype, attrs=(("dtype", dtype),)))
                s = s.altered(args=(body[-1].name,), dtype=dtype)
            s = s.altered(op="store", attrs=())
        body.append(s)
    return replace(kernel, body=tuple(body))
