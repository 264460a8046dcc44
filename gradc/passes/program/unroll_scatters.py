"""unroll_scatters: unrolls the taps, and a block of channels, of a scatter into each thread, which loads values and
computes indices once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...analysis.combine import combines
from ...ir.dims import Size
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Axis, Stmt
from ...ir.types import Type
from ...targets.gpu import SECTOR_BYTES
from ..loops.split import split
from ..loops.unroll import unroll
from ..manager import program_pass

LONGEST = 4
"""Taps on an axis at most."""
MOST = 16
"""Taps of a value at most."""
MOST_CHANNELS = SECTOR_BYTES // 8
"""Of a thread: sums of 8 bytes that fill a sector."""
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
    return program.with_kernels(lambda kernel: _unrolled(kernel, program.types))


def unrollable(sizes: Sequence[Size]) -> int:
    """Sizes of an iteration space -> the unroll factor: the product of those that are taps, 1 if that is too large."""
    taps = [n for n in sizes if isinstance(n, int) and 1 <= n <= LONGEST]
    return prod(taps) if prod(taps) <= MOST else 1


def _unrolled(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
    """Kernel -> the kernel unrolled over its taps and a block of channels, or over the taps alone; as it is where
    neither is short enough.
    """
    if not only_scatters(kernel, types):
        return kernel
    taps = _axes_to_unroll(kernel)
    if prod(n for _, n in taps if isinstance(n, int)) > MOST:
        taps = ()
    tried = [(kernel, taps)]
    if (channels := _axis_to_block(kernel)) is not None:
        blocked, part = split(kernel, *channels)
        tried = [(blocked, (part, *taps)), *tried]
    for whole, axes in tried:
        if axes and len((made := unroll(whole, axes)).body) <= LARGEST:
            return made
    return kernel


def only_scatters(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether all that a kernel does is to accumulate at indices that are data, different ones for each column: rows
    cannot be sorted by them.
    """
    parts = combines(kernel, types)
    if not parts or not all(part.gathered and part.by_column for part in parts):
        return False
    return not any(s.op in REDUCTIONS or s.op in ("store", "check", "scan", "search") for s in kernel.body)


def _axes_to_unroll(kernel: Kernel) -> tuple[Axis, ...]:
    """The short row axes that every accum depends on through the values of its indices alone."""
    along = frozenset.intersection(*(kernel.stmt_level(s) for s in kernel.accums))
    by_itself = {v for s in kernel.accums for i in s.index for v, _ in i.terms}
    return tuple(
        (axis, n)
        for axis, n in kernel.rows
        if isinstance(n, int) and 1 <= n <= LONGEST and axis in along and axis not in by_itself
    )


def _axis_to_block(kernel: Kernel) -> tuple[str, int] | None:
    """(row axis, block size) of channels to unroll by: an axis that is an affine index of every accum, while no index
    that is data depends on it; None: there is none.
    """
    values = {v for s in kernel.accums for i in s.index for v, _ in i.terms if v.startswith("%")}
    values |= {s.where for s in kernel.accums if s.where}
    for axis, n in kernel.rows:
        step = max(k for k in range(1, MOST_CHANNELS + 1) if n % k == 0) if isinstance(n, int) and n > 0 else 1
        shared = step > 1 and not any(axis in kernel.levels[v] for v in values)
        places = {_entry_of_axis(s, axis) for s in kernel.accums}
        if shared and len(places) == 1 and None not in places:
            return axis, step
    return None


def _entry_of_axis(accum: Stmt, axis: str) -> int | None:
    """The dimension of an accum's buffer that is indexed by an axis, if it is one, not the last, and by nothing else;
    None otherwise.
    """
    found = [k for k, i in enumerate(accum.index) if any(v == axis for v, _ in i.terms)]
    whole = len(found) == 1 and accum.index[found[0]].variable == axis and found[0] < len(accum.index) - 1
    return found[0] if whole else None
