"""fuse_siblings: a kernel that scatters to positions which it computes, and one that gathers at the same, become one:
both gradients of an interpolation read the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from ...analysis.combine import combines
from ...analysis.strategies import ATOMIC_FIXED
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ..loops import fuse as loops
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..loops.unroll import unroll
from ..manager import program_pass
from .unroll_scatters import LARGEST, MOST_CHANNELS, only_scatters

MOST = 2 * LARGEST
"""Statements of a fused kernel: of two that were unrolled as far as each may be."""


@program_pass("REAL")
def fuse_siblings(program: Program) -> Program:
    """rows(n, h) cols(w) { accum dx[n, %i] <- dy[n, h, w] };  rows(n, h, w) cols(c: 3) { store du[n, h, w] <- sum_cols
    x[n, c, %i] }  ->  rows(n, h) cols(w) { accum dx[n, %i] <- dy[n, h, w]; store du[n, h, w] <- x[n, 0, %i] + x[n, 1,
    %i] + x[n, 2, %i] }

    Of a scatter, threads have a point each, with all of its taps and channels (:mod:`.unroll_scatters`): its position
    is computed, and its cotangent loaded, where the gradient of the position needs them, too.
    """
    kernels = [step for step in program.steps if isinstance(step, Kernel)]
    for scatter in kernels:
        if not only_scatters(scatter, program.types) or not _takes_atomics(scatter, program.types):
            continue
        made = (_fused(program, scatter, reader) for reader in kernels if reader is not scatter)
        program = next((m for m in made if m is not None), program)
    return program


def _takes_atomics(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether threads may have a point each: where only partial results are right, there are few."""
    return all(ATOMIC_FIXED.right(part, types[part.buffer].dtype, False) for part in combines(kernel, types))


def _fused(program: Program, scatter: Kernel, reader: Kernel) -> Program | None:
    """A program with two of its steps as one kernel; None where that is not legal, or where the other reads nothing at
    a position that the scatter adds to.
    """
    alike = _along(scatter, reader)
    places = [k for k, step in enumerate(program.steps) if step is scatter or step is reader]
    if alike is None or len(places) < 2:
        return None
    steps = tuple(alike if step is reader else step for step in program.steps)
    made = attempt(loops.fuse_siblings, replace(program, steps=steps), *places)
    if made is None:
        return None
    fused = made.steps[places[0]]
    assert isinstance(fused, Kernel)
    added, read = (_positions(s for s in fused.body if s.op == op) for op in ("accum", "load"))
    return made if added & read and len(fused.body) <= MOST else None


def _positions(accesses: Iterable[Stmt]) -> set[tuple[Index, ...]]:
    """The indices of accesses, of which a part is data."""
    return {s.index for s in accesses if any(v.startswith("%") for i in s.index for v, _ in i.terms)}


def _along(scatter: Kernel, reader: Kernel) -> Kernel | None:
    """A kernel that only stores, with its few columns unrolled and the columns of one that scatters; None if it is none
    or has other axes.
    """
    if any(s.op != "store" for s in reader.body if not s.name) or reader.scans:
        return None
    if any(s.op in REDUCTIONS for s in reader.body):
        sizes = [n for _, n in reader.cols if isinstance(n, int)]
        if len(sizes) < len(reader.cols) or not 1 <= prod(sizes) <= MOST_CHANNELS:
            return None
        reader = attempt(unroll, reader, reader.cols) or reader
    axes = loops.common_axes(scatter, reader)
    if axes is None:
        return None
    columns = {a for a, _ in scatter.cols}
    return attempt(reorder, reader, [a for a, its in axes.items() if its in columns])
