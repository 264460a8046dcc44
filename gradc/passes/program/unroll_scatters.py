"""unroll_scatters: a thread that has computed a position adds at all of its taps, and some channels there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...analysis.combine import combines
from ...ir.dims import Size
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt
from ...ir.types import Type
from ...targets.gpu import SECTOR_BYTES
from ..manager import program_pass
from .unroll_columns import Unrolled, substituted

LONGEST = 4
"""Taps on an axis at most."""
MOST = 16
"""Taps of a value at most."""
MOST_CHANNELS = SECTOR_BYTES // 8
"""Of a thread: sums of 8 bytes that fill a sector."""
PART = "r"
"""Ends the name of an axis of channels that lie beside each other."""
LARGEST = 512
"""Statements of an unrolled kernel at most, each distinct one once."""


@program_pass("BITS")
def unroll_scatters(program: Program) -> Program:
    """rows(n, t: 2) cols(w) { accum y[n, %t] <- dy[n, w] }  ->  rows(n) cols(w) { accum y[n, %t0] <- dy[n, w]; accum
    y[n, %t1] <- dy[n, w] }
    rows(n, c: 6) cols(w) { accum y[n, c, %w] <- dy[n, c, w] }  ->  rows(n, c: 2) cols(w) { accum y[n, c*3, %w] <-
    dy[n, c*3, w]; accum y[n, c*3 + 1, %w] <- dy[n, c*3 + 1, w]; ... }

    As rows, the taps of one value are threads far from each other: each loads the value, and computes its position; so
    do those of the channels, which share their positions.
    """
    types = {b.name: b.type for b in program.buffers}
    steps = tuple(_unrolled(step, types) if isinstance(step, Kernel) else step for step in program.steps)
    return program if steps == program.steps else replace(program, steps=steps)


def unrollable(sizes: Sequence[Size]) -> int:
    """The product of those of an iteration space's sizes that are taps."""
    taps = [n for n in sizes if isinstance(n, int) and 1 <= n <= LONGEST]
    return prod(taps) if prod(taps) <= MOST else 1


def _unrolled(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    if not _scatters_alone(kernel, types):
        return kernel
    channels = _channels(kernel)
    wide = _divided(kernel, *channels) if channels is not None else kernel
    beside = [axis for axis in wide.rows if axis not in kernel.rows and axis[0].endswith(PART)]
    taps = _taps(kernel)
    if prod(n for _, n in taps if isinstance(n, int)) > MOST:
        taps = ()
    for whole, axes in ((wide, [*beside, *taps]), (kernel, taps)):
        if axes:
            rows = tuple(axis for axis in whole.rows if axis not in axes)
            made = Unrolled(whole, axes).kernel(rows, whole.cols, types)
            if len(made.body) <= LARGEST:
                return made
    return kernel


def _scatters_alone(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether a kernel does nothing but add at positions that are data, of which each column has its own: rows cannot
    be sorted by where they go.
    """
    parts = combines(kernel, types)
    if not parts or not all(part.gathered and part.by_column for part in parts):
        return False
    return not any(s.op in REDUCTIONS or s.op in ("store", "check", "scan", "search") for s in kernel.body)


def _taps(kernel: Kernel) -> tuple[Axis, ...]:
    """Short axes of rows that are in no accum's place but through a value, and that every accum goes along."""
    along = frozenset.intersection(*(kernel.stmt_level(s) for s in kernel.accums))
    by_itself = {v for s in kernel.accums for i in s.index for v, _ in i.terms}
    return tuple(
        (axis, n)
        for axis, n in kernel.rows
        if isinstance(n, int) and n <= LONGEST and axis in along and axis not in by_itself
    )


def _channels(kernel: Kernel) -> tuple[Axis, int] | None:
    """(an axis of rows that every accum goes along by itself, and no position along; how many of its places a thread
    takes: as many as divide it, up to a sector of sums).
    """
    values = {v for s in kernel.accums for i in s.index for v, _ in i.terms if v.startswith("%")}
    values |= {s.where for s in kernel.accums if s.where}
    for axis, n in kernel.rows:
        step = max(k for k in range(1, MOST_CHANNELS + 1) if n % k == 0) if isinstance(n, int) and n > 0 else 1
        shared = step > 1 and not any(axis in kernel.levels[v] for v in values)
        places = {_place_of(s, axis) for s in kernel.accums}
        if shared and len(places) == 1 and None not in places:
            return (axis, n), step
    return None


def _place_of(accum: Stmt, axis: str) -> int | None:
    """The entry of an accum's index that is all of an axis, which stands in no other, nor in the last; None: there is
    none.
    """
    found = [k for k, i in enumerate(accum.index) if any(v == axis for v, _ in i.terms)]
    whole = len(found) == 1 and accum.index[found[0]].variable == axis and found[0] < len(accum.index) - 1
    return found[0] if whole else None


def _divided(kernel: Kernel, axis: Axis, step: int) -> Kernel:
    """The kernel with an axis of ``step`` places beside one of the others."""
    name, count = axis
    assert isinstance(count, int)
    part, outer = f"{name}{PART}", count // step
    place = Index(0, ((name, step), (part, 1))) if outer > 1 else Index.of(part)
    body = tuple(replace(s, index=tuple(substituted(i, {name: place}) for i in s.index)) for s in kernel.body)
    at = kernel.rows.index(axis)
    new = ((name, outer), (part, step)) if outer > 1 else ((part, step),)
    return replace(kernel, rows=(*kernel.rows[:at], *new, *kernel.rows[at + 1 :]), body=body)
