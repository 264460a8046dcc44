"""unroll_scatters: a thread that has loaded a value adds it at all of its taps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...ir.dims import Size
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Axis
from ...ir.types import Type
from ..reductions.combine import combines
from .unroll_columns import Unrolled

LONGEST = 4
"""Taps on an axis at most."""
MOST = 16
"""Taps of a value at most."""
LARGEST = 512
"""Statements of an unrolled kernel at most, each distinct one once."""


def unroll_scatters(program: Program) -> Program:
    """rows(n, t: 2) cols(w) { accum y[n, %t] <- dy[n, w] }  ->  rows(n) cols(w) { accum y[n, %t0] <- dy[n, w]; accum
    y[n, %t1] <- dy[n, w] }

    As rows, the taps of one value are threads far from each other: each loads the value, and computes its position.
    """
    types = {b.name: b.type for b in program.buffers}
    steps = tuple(_unrolled(step, types) if isinstance(step, Kernel) else step for step in program.steps)
    return program if steps == program.steps else replace(program, steps=steps)


def unrollable(sizes: Sequence[Size]) -> int:
    """The product of those of an iteration space's sizes that are taps."""
    taps = [n for n in sizes if isinstance(n, int) and 1 <= n <= LONGEST]
    return prod(taps) if prod(taps) <= MOST else 1


def _unrolled(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    taps = _taps(kernel, types)
    count = prod(n for _, n in taps if isinstance(n, int))
    if not taps or count > MOST:
        return kernel
    rows = tuple(axis for axis in kernel.rows if axis not in taps)
    made = Unrolled(kernel, taps).kernel(rows, kernel.cols, types)
    return made if len(made.body) <= LARGEST else kernel


def _taps(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Axis, ...]:
    """Short axes of rows that are in no accum's place but through a value, and that every accum goes along; none where
    rows may be sorted by where they go, or where a row does anything else.
    """
    parts = combines(kernel, types)
    if not parts or not all(part.gathered and part.by_column for part in parts):
        return ()
    if any(s.op in REDUCTIONS or s.op in ("store", "check", "scan", "search") for s in kernel.body):
        return ()
    along = frozenset.intersection(*(kernel.stmt_level(s) for s in kernel.accums))
    by_itself = {v for s in kernel.accums for i in s.index for v, _ in i.terms}
    return tuple(
        (axis, n)
        for axis, n in kernel.rows
        if isinstance(n, int) and n <= LONGEST and axis in along and axis not in by_itself
    )
