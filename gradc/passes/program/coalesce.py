"""coalesce: neighbouring threads of a GPU, and elements of a CPU's vectors, access neighbouring elements of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from ...ir.dims import evaluate, nominal
from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt
from ...ir.types import Type
from ...targets.gpu import SECTOR_BYTES
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
    program = stored_as_asked(stored_as_read(program))
    types = {b.name: b.type for b in program.buffers}
    return replace(
        program, steps=tuple(along_memory(step, types) if isinstance(step, Kernel) else step for step in program.steps)
    )


@program_pass("BITS")
def gather_vectors(program: Program) -> Program:
    """rows(n, c, h) cols(w): x[n, %i, %j, c]  ->  rows(n, h, w) cols(c): x[n, %i, %j, c], where a CPU would access the
    elements at positions that are data one by one; kernels without any keep their columns
    """
    program = stored_as_asked(stored_as_read(program, _found_in_data), _found_in_data)
    types = {b.name: b.type for b in program.buffers}
    steps: list[Step] = [
        along_memory(step, types) if isinstance(step, Kernel) and _found_in_data(step) else step
        for step in program.steps
    ]
    return program if steps == list(program.steps) else replace(program, steps=tuple(steps))


def _found_in_data(kernel: Kernel) -> bool:
    """Whether columns access an array at positions that are data, and go along none of its axes."""
    axes = {a for a, _ in kernel.cols}
    return any(
        s.buffer
        and any(v.startswith("%") and axes & kernel.levels[v] for i in s.index for v, _ in i.terms)
        and not any(v in axes for i in s.index for v, _ in i.terms)
        for s in kernel.body
    )


def stored_as_read(program: Program, wanted: Callable[[Kernel], bool] = lambda kernel: True) -> Program:
    """store t[n, c, h] <- v;  load t[n, c, h] over rows(n, h) cols(c)  ->  store t[n, h, c] <- v;  load t[n, h, c],
    where fewer bytes move so

    :param wanted: the kernels whose results are stored so.
    """
    made = {b for kernel in program.kernels if wanted(kernel) for b in kernel.writes}
    for temp in program.of_kind("temp"):
        if temp.name not in made:
            continue
        order = _order_read(program, temp)
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
        turned = {
            i: _named(
                replace(
                    k,
                    body=tuple(
                        replace(s, index=tuple(s.index[a] for a in order)) if s.buffer == temp.name else s
                        for s in k.body
                    ),
                ),
                types[1],
            )
            for i, k in touching.items()
        }
        if sum(_least_moved(k, types[1]) for k in turned.values()) < sum(
            _least_moved(k, types[0]) for k in touching.values()
        ):
            program = replace(
                program, buffers=buffers, steps=tuple(turned.get(i, step) for i, step in enumerate(program.steps))
            )
    return program


def _order_read(program: Program, temp: Buffer) -> tuple[int, ...] | None:
    """The order of a temp's axes in which all kernels that read it go through it, if that is another one."""
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
            places = _places(s, temp.type)
            units = [v for v in places if v.isdigit()]
            if s.op != "load" or len(set(places)) < len(places) or any(v not in (*units, *axes) for v in places):
                return None
            orders.add(tuple(places.index(axis) for axis in (*units, *axes) if axis in places))
    return next(iter(orders)) if len(orders) == 1 and orders != {tuple(range(temp.type.rank))} else None


def stored_as_asked(program: Program, wanted: Callable[[Kernel], bool] = lambda kernel: True) -> Program:
    """store t[n, c, h] <- v;  store y[n, h, c] <- t[n, c, h]  ->  store y[n, h, c] <- v;  so with accum

    :param wanted: the kernels whose results are stored so.
    """
    for number, step in enumerate(program.steps):
        transposed = _transposing(step, program) if isinstance(step, Kernel) else None
        made = _only_maker(program, number, *transposed[:2]) if transposed is not None else None
        if transposed is None or made is None:
            continue
        source, target, order = transposed
        maker = program.steps[made]
        assert isinstance(maker, Kernel)
        if not wanted(maker):
            continue
        body = tuple(
            replace(s, buffer=target, index=tuple(s.index[a] for a in order)) if s.buffer == source else s
            for s in maker.body
        )
        steps = list(program.steps)
        buffers = tuple(b for b in program.buffers if b.name != source)
        steps[made] = _named(replace(maker, body=body), {b.name: b.type for b in buffers})
        del steps[number]
        return stored_as_asked(replace(program, steps=tuple(steps), buffers=buffers), wanted)
    return program


def _transposing(kernel: Kernel, program: Program) -> tuple[str, str, tuple[int, ...]] | None:
    """(from, to, for each axis of the one that of the other) of a kernel that does nothing but store a buffer with its
    axes in another order.
    """
    if [s.op for s in kernel.body] != ["load", "store"]:
        return None
    load, store = kernel.body
    a, b = program.buffer[load.buffer].type, program.buffer[store.buffer].type
    read, written = _places(load, a), _places(store, b)
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


def _places(s: Stmt, type: Type) -> list[str]:
    """The axis of the kernel along each axis of an array; axes of one element, at 0, are numbered; else it is ""."""
    units = itertools.count()
    return [
        str(next(units)) if i == Index() and n == 1 else i.variable or ""
        for i, n in zip(s.index, type.shape, strict=True)
    ]


def _only_maker(program: Program, number: int, source: str, target: str) -> int | None:
    """The one kernel that writes the source, which nothing else reads, if it may write the target instead."""
    a, b = program.buffer[source], program.buffer[target]
    if a.kind != "temp" or a.alias or b.alias or any(x.alias in (source, target) for x in program.buffers):
        return None
    touching = [i for i, step in enumerate(program.steps) if i != number and source in (*step.reads, *step.writes)]
    if len(touching) != 1 or any(target in (*step.reads, *step.writes) for step in program.steps[:number]):
        return None
    maker = program.steps[touching[0]]
    return touching[0] if isinstance(maker, Kernel) and source not in maker.reads else None


def along_memory(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """The same statements with the columns along the axis in which fewest bytes are moved.

    Every effect runs over both axes, so that nothing happens more or less often; sums over rows and the places of bad
    elements depend on the order of axes, and what has these is left.
    """
    if len(kernel.cols) != 1 or any(s.op in REDUCTIONS or s.op in ("scan", "check", "search") for s in kernel.body):
        return kernel
    (now,) = kernel.cols
    sizes = nominal([n for _, n in (*kernel.rows, now)])
    extents = {a: evaluate(n, sizes) for a, n in (*kernel.rows, now)}
    effects = [s for s in kernel.body if not s.name]
    common = frozenset(extents).intersection(*(kernel.stmt_level(s) for s in effects))
    candidates = [axis for axis in kernel.rows if axis[0] in common and extents[axis[0]] >= LEAST]
    if now[0] not in common or not candidates:
        return kernel
    best = min(candidates, key=lambda axis: _moved(kernel, types, axis[0], extents))
    if _moved(kernel, types, best[0], extents) >= GAIN * _moved(kernel, types, now[0], extents):
        return kernel
    rows: tuple[Axis, ...] = tuple(axis for axis in (*kernel.rows, now) if axis != best)
    return _named(replace(kernel, rows=rows, cols=(best,)), types)


def _least_moved(kernel: Kernel, types: Mapping[str, Type]) -> int:
    """Bytes that a kernel moves with its columns along the best axis that they may have."""
    kernel = along_memory(kernel, types)
    sizes = nominal([n for _, n in (*kernel.rows, *kernel.cols)])
    return _moved(
        kernel,
        types,
        kernel.cols[-1][0] if kernel.cols else "",
        {a: evaluate(n, sizes) for a, n in (*kernel.rows, *kernel.cols)},
    )


def _moved(kernel: Kernel, types: Mapping[str, Type], lane: str, extents: Mapping[str, int]) -> int:
    """Bytes that loads, stores and accums move where neighbouring threads go along an axis."""
    return sum(_bytes(kernel, types, s, lane, extents) for s in kernel.body if s.buffer)


def _bytes(kernel: Kernel, types: Mapping[str, Type], s: Stmt, lane: str, extents: Mapping[str, int]) -> int:
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
    together = moving == [lane] and dict(s.index[-1].terms).get(lane) == 1
    return count * (item if together else SECTOR_BYTES)


def _named(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    return kernel.named_by_structure(kernel.name.rpartition("_")[0], types)
