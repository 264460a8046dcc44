"""Fission and fusion of kernels: a part of a kernel that a loop over rows cannot take becomes a kernel of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ...ir.dims import same
from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ...ir.walk import backward_slice
from .tiling import starts_with


@dataclass(frozen=True)
class Fission:
    """A kernel that reduces a value of each row, in two.

    :param whole: the kernel.
    :param rows: one that stores these values.
    :param sums: those that reduce them.
    """

    whole: Kernel
    rows: Kernel
    sums: tuple[Kernel, ...]


def split_sums(program: Program, wide: Iterable[str]) -> tuple[Program, list[Fission]]:
    """accum t[] <- sum_cols(x) over rows(n: N)  ->  store r[n] <- sum_cols(x); accum t[] <- r[n]; and sum_cols(x) over
    cols(n: N)  ->  store r[n] <- x; sum_cols(r[n]); where ``x`` is computed from temps that have the rows of wide ones:
    a loop can take the first kernel.
    """
    temps = {b for name in wide for b in _with_rows_of(program, name)}
    steps: list[Step] = []
    buffers, found = list(program.buffers), list[Fission]()
    taken = {*program.dims, *program.types}
    for step in program.steps:
        split = None
        if isinstance(step, Kernel):
            split = _split_column_sums(step, temps, taken) or _split_row_sums(step, program, temps, taken)
        if split is None or not isinstance(step, Kernel):
            steps.append(step)
            continue
        own, rows, sums = split
        buffers += own
        types = {b.name: b.type for b in buffers}
        found.append(Fission(step, rows.rehashed(types), tuple(k.rehashed(types) for k in sums)))
        steps += [found[-1].rows, *found[-1].sums]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers)), found


def fuse_unused(program: Program, fissions: Iterable[Fission]) -> Program:
    """store r[n] <- sum_cols(x); accum t[] <- r[n]  ->  accum t[] <- sum_cols(x), where no loop took the first"""
    for each in fissions:
        if each.rows not in program.steps:
            continue
        gone = {*each.rows.writes} - {*each.whole.writes}
        steps = tuple(each.whole if s == each.rows else s for s in program.steps if s not in each.sums)
        program = replace(program, steps=steps, buffers=tuple(b for b in program.buffers if b.name not in gone))
    return program


def fresh_name(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken; from then on it is."""
    unique, k = name, 1
    while unique in taken:
        k += 1
        unique = f"{name}_{k}"
    taken.add(unique)
    return unique


def _with_rows_of(program: Program, name: str) -> Iterator[str]:
    """The temps with the rows of one, and as many axes."""
    shape = program.types[name].shape
    for buffer in program.of_kind("temp"):
        own = buffer.type.shape
        if len(own) == len(shape) and all(map(same, own[:-1], shape[:-1])):
            yield buffer.name


_Parts = tuple[list[Buffer], Kernel, list[Kernel]]
"""Buffers of values of each row, the kernel that stores them, and those that reduce them."""


def _split_row_sums(kernel: Kernel, program: Program, temps: Collection[str], taken: set[str]) -> _Parts | None:
    """A kernel that adds up values of its rows, in two."""
    # Several sums may be owned in the order of one of them: they stay together.
    alone = not kernel.order or len(kernel.accums) == 1
    sums = [s for s in kernel.accums if not kernel.is_column(s) and _is_sum_of_rows(kernel, s)]
    if not alone or not sums or not {*temps} & {*kernel.reads, *kernel.writes}:
        return None
    body, buffers, kernels = list(kernel.body), list[Buffer](), list[Kernel]()
    at = tuple(Index.of(axis) for axis, _ in kernel.rows)
    for s in sums:
        assert s.dtype is not None
        name = fresh_name(f"{s.buffer}.rows", taken)
        type_ = replace(program.types[s.buffer], dtype=s.dtype, shape=tuple(size for _, size in kernel.rows))
        buffers.append(Buffer(name, type_))
        body[body.index(s)] = Stmt("", "store", s.args, s.dtype, name, at, of=s.of)
        kernels.append(_sum_of(kernel, s, name, at))
    left = tuple(pair for pair in kernel.strategy if pair[0] not in {s.buffer for s in sums})
    order = kernel.order if kernel.order in dict(left) else ""
    return buffers, replace(kernel, body=tuple(body), strategy=left, order=order), kernels


def _split_column_sums(kernel: Kernel, temps: Collection[str], taken: set[str]) -> _Parts | None:
    """A kernel whose columns are the rows of temps, and which reduces values of them, in two."""
    axes = (*kernel.rows, *kernel.cols)
    reads = [s for s in kernel.body if s.op == "load" and s.buffer in temps]
    if not reads or not kernel.cols or any(len(s.index) <= len(axes) for s in reads):
        return None
    if not all(starts_with(s, [axis for axis, _ in axes]) for s in reads):
        return None
    made = set[str]()  # values of each row
    for s in kernel.body:
        if (s in reads or made & {*s.uses}) and s.name and s.op not in REDUCTIONS:
            made.add(s.name)
    ends = [s for s in kernel.body if s.name not in made and made & {*s.uses}]
    if not all(s.op in REDUCTIONS or (s.op == "store" and kernel.is_column(s)) for s in ends):
        return None
    body = backward_slice(kernel.body, {u for s in ends for u in s.uses})
    if any(s.op in REDUCTIONS or s.op in ("scan", "search") for s in body):
        return None
    stores = [s for s in ends if s.op == "store"]
    buffers, loads = list[Buffer](), dict[str, Stmt]()
    at = tuple(Index.of(axis) for axis, _ in axes)
    for value in dict.fromkeys(u for s in ends if s.op in REDUCTIONS for u in s.uses if u in made):
        dtype = kernel.stmts[value].dtype
        assert dtype is not None
        name = fresh_name(f"{kernel.writes[0]}.rows", taken)
        buffers.append(Buffer(name, Type(dtype, tuple(size for _, size in axes))))
        stores.append(Stmt("", "store", (value,), dtype, name, at))
        loads[value] = Stmt(value, "load", (), dtype, name, at)
    rest = [loads.get(s.name, s) for s in kernel.body if s not in stores]
    first = replace(kernel, rows=axes, cols=(), body=(*body, *stores), order="", strategy=())
    return buffers, first, [replace(kernel, body=_live(rest))]


def _live(body: list[Stmt]) -> tuple[Stmt, ...]:
    """The statements that effects depend on, and these."""
    live = backward_slice(body, (v for s in body if not s.name for v in s.uses))
    return tuple(s for s in body if not s.name or s in live)


def _is_sum_of_rows(kernel: Kernel, accum: Stmt) -> bool:
    """Whether each row adds to an element that only its position decides."""
    rows = {axis for axis, _ in kernel.rows}
    affine = all(v in rows for index in accum.index for v, _ in index.terms)
    return bool(rows) and affine and accum.combine == "sum" and not accum.where


def _sum_of(kernel: Kernel, accum: Stmt, name: str, at: tuple[Index, ...]) -> Kernel:
    """The kernel that adds up what is stored at ``at`` for each row of another."""
    assert accum.dtype is not None
    load = Stmt("%0", "load", (), accum.dtype, name, at)
    *outer, last = kernel.rows
    strategy = tuple(pair for pair in kernel.strategy if pair[0] == accum.buffer)
    order = kernel.order if kernel.order == accum.buffer else ""
    if last[0] in {v for index in accum.index for v, _ in index.terms}:
        add = replace(accum, args=("%0",))
        return replace(kernel, cols=(), body=(load, add), strategy=strategy, order=order)
    total = Stmt("%1", "sum_cols", ("%0",), accum.dtype)
    add = replace(accum, args=("%1",))
    if not outer:
        add, strategy, order = replace(add, op="store", attrs=()), (), ""
    return replace(kernel, rows=tuple(outer), cols=(last,), body=(load, total, add), strategy=strategy, order=order)
