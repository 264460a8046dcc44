"""Vector lanes along rows, where columns are too few to fill a vector and what they compute is worth one.

A compiler computes three sines of a row one after another; those of sixteen rows are three vectors.
"""

from __future__ import annotations

from ...ir.kernel import Kernel
from ...passes.loops.legality import attempt
from ...passes.loops.reorder import reorder
from ...passes.loops.unroll import unroll
from ...targets.cpu import MOST_UNROLLED, SHORT_ROW, WIDE_VECTOR_COST
from .row_memory import cost

MOST_COLUMNS = 4
"""Columns of a row at most: so many interleaved arrays compilers load and store by permuted vectors."""


def lanes_along_rows(kernel: Kernel) -> Kernel:
    """rows(n) cols(c: 2) { y[n, c] <- sin x[n] * w[c] }  ->
        rows() cols(n) { y[n, 0] <- sin x[n] * w[0], y[n, 1] <- sin x[n] * w[1] }
    rows(n) cols(c: 3) { y[n] <- sum_cols exp x[n, c] }  ->
        rows() cols(n) { y[n] <- exp x[n, 0] + exp x[n, 1] + exp x[n, 2] }

    :return: the kernel itself where its columns fill vectors, where they compute nothing costly, where it combines rows
        or finds places by data, or where no axis of its rows is long.
    """
    if len(kernel.cols) != 1 or not kernel.rows or not _is_below(kernel.cols[0][1], MOST_COLUMNS + 1):
        return kernel
    if not any(cost(s) >= WIDE_VECTOR_COST for s in kernel.body):
        return kernel
    if any(v.startswith("%") for s in kernel.body for i in s.index for v, _ in i.terms):
        return kernel
    if any(s.op in ("accum", "check", "search", "scan") for s in kernel.body):
        return kernel
    lane = next((a for a, n in reversed(kernel.rows) if not _is_below(n, SHORT_ROW)), "")
    if not lane or MOST_COLUMNS * len(kernel.body) > MOST_UNROLLED:
        return kernel
    unrolled = attempt(unroll, kernel, kernel.cols)
    return (attempt(reorder, unrolled.live, [lane]) if unrolled else None) or kernel


def _is_below(extent: object, bound: int) -> bool:
    return isinstance(extent, int) and extent < bound
