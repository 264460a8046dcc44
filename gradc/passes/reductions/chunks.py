"""Rows per task: the unit of determinism, so functions of shapes and nothing else.

On the CPU sizes may be numbers or symbols: the cost model evaluates what the emitted C computes.  A GPU's launches are
cut up by these numbers too.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.dims import Size, ceildiv, floordiv, known_nonnegative, maximum, minimum, total

FEWEST_ROWS, MOST_ROWS = 8, 64
"""Bounds of N/256, which leaves a few hundred tasks to balance."""
WORK = 4096
"""Elements that make a task worth handing out: short rows come by more, up to ``SHORT_ROWS``, so that no chain of
additions grows long.
"""
SHORT_ROWS = 128
MOST_PARTIALS = 1 << 22
"""Elements of all partial results of a kernel together."""

GPU_WORKERS = 1 << 17
"""Threads that a GPU's kernel is cut up for."""
GPU_MOST_CHUNKS = 1024
"""Partial results, of which a warp of a fold goes through an eighth."""
GPU_SHORTEST = 8
"""Rows per task at least; of a block that goes through whole rows one."""
GPU_SORTED = 128
"""Positions of a sorted order per task at most."""


def chunk_rows(rows: Size, cols: Size) -> Size:
    """Rows per task: clamp(rows / 256, 8, 64), or more where a row has few columns."""
    least = minimum(SHORT_ROWS, ceildiv(WORK, maximum(cols, 1)))
    if known_nonnegative(least - MOST_ROWS):
        return least
    return maximum(least, maximum(FEWEST_ROWS, minimum(floordiv(rows, 256), MOST_ROWS)))


def private_chunk_rows(rows: Size, cols: Size, size: Size) -> Size:
    """Rows per task where each task holds a partial result of ``size`` elements."""
    return maximum(chunk_rows(rows, cols), ceildiv(rows, maximum(1, floordiv(MOST_PARTIALS, maximum(size, 1)))))


def task_rows(rows: Size, cols: Size, private: Sequence[Size]) -> Size:
    """Rows per task of a kernel whose tasks have partial results of so many elements; single elements weigh nothing."""
    return private_chunk_rows(rows, cols, total(private)) if any(n != 1 for n in private) else chunk_rows(rows, cols)


def interchanged_chunk_rows(rows: Size, cols: Size) -> Size:
    """Rows per task where a task's rows share what they gather from: some thousand columns, if that leaves tasks
    enough.
    """
    return maximum(1, minimum(ceildiv(WORK, maximum(cols, 1)), ceildiv(rows, 16)))
