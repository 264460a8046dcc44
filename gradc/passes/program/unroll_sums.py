"""unroll_sums: a reduction into a few elements becomes one kernel that keeps an accumulator for each in registers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ...ir.dims import product, same
from ...ir.kernel import Buffer, Kernel, Program
from ...ir.lexer import suffixed
from ...ir.statement import Axis, Index, Stmt
from ...ir.types import DType

MOST_SUMS = 12
"""Sums that a kernel adds up side by side at most: registers hold them all."""


def sums_apart(kernel: Kernel, program: Program) -> tuple[Sequence[Kernel], Sequence[Buffer]] | None:
    """rows(n, c) cols(w) { accum y[c, 0] <- sum_cols x[n, c, w]; accum y[c, 1] <- ... }
    ->  rows(n, c) cols(w) { accum y.sum0[c] <- sum_cols x[n, c, w]; accum y.sum1[c] <- ... }
        cols(c) { store y[c, 0] <- y.sum0[c]; ... }

    :param kernel: whose effects are accums.
    :return: the kernels and the buffers of the sums; None where these are too many, or are not all of each result.
    """
    types, rows = dict(program.types), dict(kernel.rows)
    stacks: dict[str, list[tuple[str, tuple[Index, ...]]]] = {}
    axes: dict[str, tuple[Axis, ...]] = {}
    buffers: list[Buffer] = []
    body: list[Stmt] = []
    for s in kernel.body:
        if s.op == "accum":
            shape = types[s.buffer].shape
            kept = [(str(i.variable), n) for i, n in zip(s.index, shape, strict=True) if i.terms]
            whole = all(a in rows and same(rows[a], n) for a, n in kept) and len(dict(kept)) == len(kept)
            if not whole or axes.setdefault(s.buffer, tuple(kept)) != tuple(kept) or s.where or s.combine != "sum":
                return None
            stack = stacks.setdefault(s.buffer, [])
            names = (suffixed(s.buffer, f".sum{k}") for k in itertools.count(len(stack)))
            name = next(name for name in names if name not in types)
            buffers.append(Buffer(name, types[s.buffer].with_shape(*(n for _, n in kept))))
            types[name] = buffers[-1].type
            stack.append((name, s.index))
            s = s.altered(buffer=name, index=tuple(Index.of(a) for a, _ in kept))
        body.append(s)
    for to, stack in stacks.items():
        places = len({index for _, index in stack})
        if places < len(stack) or not same(product([places, *(n for _, n in axes[to])]), types[to].count):
            return None
    if len(buffers) > MOST_SUMS:
        return None
    name = kernel.name.rpartition("_")[0] or kernel.name
    stacking = (_stack(f"{name}_stack_", axes[to], to, stack, types[to].dtype) for to, stack in stacks.items())
    sums = replace(kernel, body=tuple(body))
    return [made.rehashed(types) for made in (sums, *(replace(k, note=kernel.note) for k in stacking))], buffers


def _stack(
    name: str, axes: tuple[Axis, ...], to: str, parts: Sequence[tuple[str, tuple[Index, ...]]], dtype: DType
) -> Kernel:
    """The kernel that copies each part to its place in a buffer.

    :param axes: of a part.  :param parts: the buffer of each, and its index in ``to``.
    """
    at = tuple(Index.of(a) for a, _ in axes)
    body: list[Stmt] = []
    for k, (part, place) in enumerate(parts):
        body.append(Stmt(f"%{k}", "load", (), dtype, part, at))
        body.append(Stmt("", "store", (f"%{k}",), dtype, to, place))
    return Kernel(name, (), axes, tuple(body))
