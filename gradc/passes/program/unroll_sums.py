"""unroll_sums: a reduction into a few elements becomes one kernel that keeps an accumulator for each in registers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ...ir.dims import same
from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.lexer import suffixed
from ...ir.statement import Axis, Index, Stmt
from ...ir.types import Type

MOST_SUMS = 12
"""Sums that a kernel adds up side by side at most: registers hold them all."""


def unrolled_sums(given: Kernel, unrolled: Kernel, program: Program) -> tuple[list[Step], list[Buffer]] | None:
    """rows(n, c, w) cols(k: 3) { accum y[c, k] <- x[n, c, w+k] }
    ->  rows(n, c) cols(w) { accum y.sum0[c] <- sum_cols x[n, c, w]; accum y.sum1[c] <- ... }
        cols(c) { store y[c, 0] <- y.sum0[c]; ... }

    :param given: the kernel before its few columns were unrolled, :param unrolled: and after, each of whose accums adds
        what goes along its columns to one place.
    :return: the steps and the buffers of the sums; None where the places are no constants.
    """
    types = {b.name: b.type for b in program.buffers}
    taken = {*types}
    if len(given.accums) * prod(n for _, n in given.cols if isinstance(n, int)) > MOST_SUMS:
        return None
    taps = {axis for axis, _ in given.cols}
    shapes = {s.buffer: _kept_axes(s, taps, dict(given.rows), types) for s in given.accums}
    if len(shapes) < len(given.accums) or None in shapes.values():
        return None
    buffers: list[Buffer] = []
    stacks: dict[str, list[tuple[str, tuple[Index, ...]]]] = {}
    fresh = (name for k in itertools.count(len(unrolled.body)) if (name := f"%{k}") not in unrolled.stmts)
    body: list[Stmt] = []
    for s in unrolled.body:
        if s.op == "accum":
            (value,), kept = s.args, shapes[s.buffer]
            assert kept is not None
            stack = stacks.setdefault(s.buffer, [])
            names = (suffixed(s.buffer, f".sum{k}") for k in itertools.count(len(stack)))
            own = Buffer(
                next(name for name in names if name not in taken), types[s.buffer].with_shape(*(n for _, n in kept))
            )
            taken.add(own.name)
            buffers.append(own)
            stack.append((own.name, s.index))
            body.append(Stmt(next(fresh), "sum_cols", (value,), unrolled.stmts[value].dtype))
            s = replace(s, args=(body[-1].name,), buffer=own.name, index=tuple(Index.of(a) for a, _ in kept))
        body.append(s)
    known = {**types, **{b.name: b.type for b in buffers}}
    sums = replace(unrolled, body=tuple(body)).named_by_structure(_base_name(given), known)
    return [
        sums,
        *(_stacking_kernel(to, stack, shapes[to] or (), given, known) for to, stack in stacks.items()),
    ], buffers


def _kept_axes(
    s: Stmt, taps: set[str], rows: Mapping[str, object], types: Mapping[str, Type]
) -> tuple[Axis, ...] | None:
    """The (axis, size) of a result's dimensions that are indexed by rows; None where a dimension is neither such, nor a
    tap, nor of size 1.
    """
    kept: list[Axis] = []
    for entry, size in zip(s.index, types[s.buffer].shape, strict=True):
        axis = entry.variable
        if axis in taps or (not entry.terms and same(size, 1)):
            continue
        if axis is None or axis not in rows or axis in dict(kept):
            return None
        kept.append((axis, size))
    return tuple(kept)


def _stacking_kernel(
    to: str,
    parts: list[tuple[str, tuple[Index, ...]]],
    axes: tuple[Axis, ...],
    given: Kernel,
    types: Mapping[str, Type],
) -> Kernel:
    """(result, the buffers of its partial sums and their index in it) -> the kernel that copies each partial sum into
    its element of the result.
    """
    body: list[Stmt] = []
    for k, (name, index) in enumerate(parts):
        dtype = types[name].dtype
        body.append(Stmt(f"%{k}", "load", (), dtype, buffer=name, index=tuple(Index.of(a) for a, _ in axes)))
        body.append(Stmt("", "store", (f"%{k}",), dtype, buffer=to, index=index))
    made = Kernel("stack", (), axes, tuple(body), note=given.note)
    return made.named_by_structure(f"{_base_name(given)}_stack", types)


def _base_name(kernel: Kernel) -> str:
    """A kernel's name without the hash of its structure."""
    return kernel.name.rpartition("_")[0] or kernel.name
