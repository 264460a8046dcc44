"""coalesce: loop interchange and layouts by which the threads of a GPU, and the lanes of a CPU's vectors, access
contiguous memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from ...ir.dims import evaluate, nominal
from ...ir.kernel import Buffer, Kernel, Program
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ...targets.gpu import SECTOR_BYTES
from ..loops.accums import demote_reductions
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..manager import program_pass

LEAST = 16
"""Fewest elements of an axis that threads may run along."""
GAIN = 0.75
"""Another axis is chosen if it moves less than this share of the bytes."""


@program_pass("BITS")
def coalesce(program: Program) -> Program:
    """rows(n, c, h) cols(w): x[n, h, w, c]  ->  rows(n, h, w) cols(c): x[n, h, w, c], after buffers have been laid out
    as they are read and as the outputs require.
    """
    program = fuse_transposes(relayout_temps(program))
    return program.with_kernels(lambda kernel: interchange_loops(kernel, program.types))


@program_pass("BITS")
def gather_vectors(program: Program) -> Program:
    """rows(n, c, h) cols(w): x[n, %i, %j, c]  ->  rows(n, h, w) cols(c): x[n, %i, %j, c], where a CPU would access the
    elements at positions that are data one by one; kernels without any keep their columns
    """
    program = fuse_transposes(relayout_temps(program, _gathers_elements), _gathers_elements)
    types = program.types
    return program.with_kernels(lambda k: interchange_loops(k, types) if _gathers_elements(k) else k)


def _gathers_elements(kernel: Kernel) -> bool:
    """Whether columns access an array at indices that are data and differ per column, but along none of its axes:
    element by element.
    """
    axes = {a for a, _ in kernel.cols}
    return any(
        s.buffer
        and any(v.startswith("%") and axes & kernel.levels[v] for i in s.index for v, _ in i.terms)
        and not any(v in axes for i in s.index for v, _ in i.terms)
        for s in kernel.body
    )


def relayout_temps(program: Program, wanted: Callable[[Kernel], bool] = lambda kernel: True) -> Program:
    """Layout assignment of temps: store t[n, c, h] <- v;  load t[n, c, h] over rows(n, h) cols(c)  ->  store t[n, h, c]
    <- v;  load t[n, h, c], where fewer bytes move so

    :param wanted: the kernels whose results are stored so.
    """
    made = {b for kernel in program.kernels if wanted(kernel) for b in kernel.writes}
    for temp in program.of_kind("temp"):
        if temp.name not in made:
            continue
        order = _order_of_reads(program, temp)
        if order is None:
            continue
        buffers = tuple(
            replace(b, type=b.type.with_shape(*(b.type.shape[a] for a in order))) if b is temp else b
            for b in program.buffers
        )
        types = [{b.name: b.type for b in all_} for all_ in (program.buffers, buffers)]
        touching = {
            i: step for i, step in enumerate(program.steps) if isinstance(step, Kernel) and temp.name in step.buffers
        }
        permuted = {
            i: replace(
                k,
                body=tuple(
                    replace(s, index=tuple(s.index[a] for a in order)) if s.buffer == temp.name else s for s in k.body
                ),
            ).rehashed(types[1])
            for i, k in touching.items()
        }
        if sum(_least_bytes_moved(k, types[1]) for k in permuted.values()) < sum(
            _least_bytes_moved(k, types[0]) for k in touching.values()
        ):
            program = replace(
                program, buffers=buffers, steps=tuple(permuted.get(i, step) for i, step in enumerate(program.steps))
            )
    return program


def _order_of_reads(program: Program, temp: Buffer) -> tuple[int, ...] | None:
    """(program, temp) -> the one permutation of its axes in which all kernels that read it traverse it; None if they
    differ, or it is the layout that the temp has.
    """
    if (
        temp.alias
        or any(b.alias == temp.name for b in program.buffers)
        or any(temp.name in (*s.reads, *s.writes) and not isinstance(s, Kernel) for s in program.steps)
    ):
        return None
    orders = set()
    for kernel in program.kernels:
        axes = [a for a, _ in (*kernel.rows, *kernel.cols)]
        for s in kernel.body:
            if s.buffer != temp.name or s.op in ("store", "accum"):
                continue
            places = _axes_of_access(s, temp.type)
            units = [v for v in places if v.isdigit()]
            if s.op != "load" or len(set(places)) < len(places) or any(v not in (*units, *axes) for v in places):
                return None
            orders.add(tuple(places.index(axis) for axis in (*units, *axes) if axis in places))
    return next(iter(orders)) if len(orders) == 1 and orders != {tuple(range(temp.type.rank))} else None


def fuse_transposes(program: Program, wanted: Callable[[Kernel], bool] = lambda kernel: True) -> Program:
    """Transposes fused into their producers: store t[n, c, h] <- v;  store y[n, h, c] <- t[n, c, h]  ->  store y[n, h,
    c] <- v;  so with accum

    :param wanted: the kernels whose results are stored so.
    """
    for number, step in enumerate(program.steps):
        transposed = _as_transpose(step, program) if isinstance(step, Kernel) else None
        made = _sole_producer(program, number, *transposed[:2]) if transposed is not None else None
        if transposed is None or made is None:
            continue
        source, target, order = transposed
        producer = program.steps[made]
        assert isinstance(producer, Kernel)
        if not wanted(producer):
            continue
        body = tuple(
            replace(s, buffer=target, index=tuple(s.index[a] for a in order)) if s.buffer == source else s
            for s in producer.body
        )
        steps = list(program.steps)
        buffers = tuple(b for b in program.buffers if b.name != source)
        steps[made] = replace(producer, body=body).rehashed({b.name: b.type for b in buffers})
        del steps[number]
        return fuse_transposes(replace(program, steps=tuple(steps), buffers=buffers), wanted)
    return program


def _as_transpose(kernel: Kernel, program: Program) -> tuple[str, str, tuple[int, ...]] | None:
    """Kernel -> (source buffer, target buffer, permutation of the source's axes) if it only transposes the one into the
    other, else None.
    """
    if [s.op for s in kernel.body] != ["load", "store"]:
        return None
    load, store = kernel.body
    a, b = program.buffer[load.buffer].type, program.buffer[store.buffer].type
    read, written = _axes_of_access(load, a), _axes_of_access(store, b)
    axes = {a for a, _ in (*kernel.rows, *kernel.cols)}
    if (
        load.where
        or store.where
        or store.args != (load.name,)
        or len(set(written)) < len(written)
        or sorted(read) != sorted(written)
        or {v for v in read if not v.isdigit()} != axes
    ):
        return None
    order = tuple(read.index(v) for v in written)
    return (
        (load.buffer, store.buffer, order)
        if a.dtype is b.dtype and b.shape == tuple(a.shape[i] for i in order)
        else None
    )


def _axes_of_access(s: Stmt, type: Type) -> list[str]:
    """(access, type of its buffer) -> the kernel axis that each axis of the buffer is indexed by; a number for an axis
    of size 1 at index 0, "" for any other index.
    """
    units = itertools.count()
    return [
        str(next(units)) if i == Index() and n == 1 else i.variable or ""
        for i, n in zip(s.index, type.shape, strict=True)
    ]


def _sole_producer(program: Program, number: int, source: str, target: str) -> int | None:
    """The step that writes a temp which only step ``number`` reads, if it is a kernel that may write ``target``
    instead.
    """
    a, b = program.buffer[source], program.buffer[target]
    if a.kind != "temp" or a.alias or b.alias or any(x.alias in (source, target) for x in program.buffers):
        return None
    touching = [i for i, step in enumerate(program.steps) if i != number and source in (*step.reads, *step.writes)]
    if len(touching) != 1 or any(target in (*step.reads, *step.writes) for step in program.steps[:number]):
        return None
    producer = program.steps[touching[0]]
    return touching[0] if isinstance(producer, Kernel) and source not in producer.reads else None


def interchange_loops(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """Kernel -> the kernel with another axis as its columns, the one along which fewest bytes are moved."""
    if len(kernel.cols) != 1 or any(s.op == "search" for s in kernel.body):
        return kernel
    summed = attempt(demote_reductions, kernel) or kernel
    (now,) = summed.cols
    sizes = nominal([n for _, n in (*summed.rows, now)])
    extents = {a: evaluate(n, sizes) for a, n in (*summed.rows, now)}
    candidates = [a for a, _ in summed.rows if extents[a] >= LEAST and attempt(reorder, summed, [a]) is not None]
    if not candidates:
        return kernel
    best = min(candidates, key=lambda axis: _bytes_moved(summed, types, axis, extents))
    if _bytes_moved(summed, types, best, extents) >= GAIN * _bytes_moved(summed, types, now[0], extents):
        return kernel
    return reorder(summed, [best])


def _least_bytes_moved(kernel: Kernel, types: Mapping[str, Type]) -> int:
    """Bytes that a kernel moves once its loops are interchanged."""
    kernel = interchange_loops(kernel, types)
    sizes = nominal([n for _, n in (*kernel.rows, *kernel.cols)])
    return _bytes_moved(
        kernel,
        types,
        kernel.cols[-1][0] if kernel.cols else "",
        {a: evaluate(n, sizes) for a, n in (*kernel.rows, *kernel.cols)},
    )


def _bytes_moved(kernel: Kernel, types: Mapping[str, Type], lane: str, extents: Mapping[str, int]) -> int:
    """Bytes that the accesses of a kernel move where neighbouring threads or lanes go along axis ``lane``."""
    return sum(_bytes_of_access(kernel, types, s, lane, extents) for s in kernel.body if s.buffer)


def _bytes_of_access(kernel: Kernel, types: Mapping[str, Type], s: Stmt, lane: str, extents: Mapping[str, int]) -> int:
    """Bytes that one access moves: its elements where lanes are contiguous or share one, else a sector per element."""
    place = [entry for entry in s.index if entry != Index()]
    over = frozenset(v for entry in place for v, _ in entry.terms if not v.startswith("%")).union(
        *(kernel.levels[v] for entry in place for v, _ in entry.terms if v.startswith("%"))
    )
    count = prod(extents[a] for a in over)
    item = types[s.buffer].dtype.itemsize
    if lane not in over:
        return count * item
    moving = [
        v for entry in s.index for v, _ in entry.terms if v == lane or (v.startswith("%") and lane in kernel.levels[v])
    ]
    contiguous = moving == [lane] and dict(s.index[-1].terms).get(lane) == 1
    return count * (item if contiguous else SECTOR_BYTES)
