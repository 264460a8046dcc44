"""interchange: loop interchange, by which the threads of a GPU, and the lanes of a CPU's vectors, access contiguous
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from ...ir.dims import evaluate, nominal
from ...ir.kernel import Kernel, Program, Step
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
def interchange(program: Program, *, wanted: Callable[[Step], bool] = lambda step: True) -> Program:
    """rows(n, c, h) cols(w): x[n, h, w, c]  ->  rows(n, h, w) cols(c): x[n, h, w, c]

    :param wanted: the kernels whose columns may be others.
    """
    return program.with_kernels(lambda k: interchanged(k, program.types) if wanted(k) else k)


def gathers_elements(step: Step) -> bool:
    """Whether columns access an array at indices that are data and differ per column, but along none of its axes:
    element by element.
    """
    if not isinstance(step, Kernel):
        return False
    axes = {a for a, _ in step.cols}
    return any(
        s.buffer
        and any(v.startswith("%") and axes & step.levels[v] for i in s.index for v, _ in i.terms)
        and not any(v in axes for i in s.index for v, _ in i.terms)
        for s in step.body
    )


def interchanged(kernel: Kernel, types: Mapping[str, Type]) -> Kernel:
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


def least_bytes_moved(kernel: Kernel, types: Mapping[str, Type]) -> int:
    """Bytes that a kernel moves once its loops are interchanged."""
    kernel = interchanged(kernel, types)
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
