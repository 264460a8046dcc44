"""Rows per task: the unit of determinism, so functions of shapes and nothing else.

On the CPU sizes may be numbers or symbols: the cost model evaluates what the emitted C computes.  A GPU's launches are
cut up by these numbers too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.dims import Size, ceildiv, floordiv, known_nonnegative, maximum, minimum, total

TASKS = 256
"""A few hundred tasks can be balanced: N/256 rows each."""
FEWEST_ROWS, MOST_ROWS = 8, 64
"""Bounds of that."""
WORK = 4096
"""Elements that make a task worth handing out: short rows come by more, up to ``SHORT_ROWS``, so that no chain of
additions grows long.
"""
SHORT_ROWS = 128
MOST_PARTIALS = 1 << 22
"""Elements of all partial results of a kernel together."""

LEAST_TASKS = 16
"""Tasks whose rows share what they gather from."""

GPU_WORKERS = 1 << 17
"""Threads that a GPU's kernel is cut up for."""
GPU_FOLDED = 128
"""Partial results that one thread of a fold goes through."""
GPU_MOST_CHUNKS = 8 * GPU_FOLDED
"""Partial results of a wide result: what a fold's eight warps go through."""
GPU_NARROW = 1024
"""Elements of a result below which a fold has fewer elements per block, and more threads for each."""
GPU_SHORTEST = 8
"""Rows per task at least; of a block that goes through whole rows one."""
GPU_SORTED = 128
"""Positions of a sorted order per task at most."""


def fold_lanes(size: Size) -> int:
    """Elements of a result that a block of its fold has: a power of two, so that the other threads share the chunks."""
    if not isinstance(size, int) or size > GPU_NARROW:
        return 32
    return next(lanes for lanes in (1, 2, 4, 8) if lanes >= size or lanes == 8)


@dataclass(frozen=True)
class Bound:
    """Rows that a task has at least.

    :param name: what generated C calls them, :param why: and why there are so many, in words.
    :param rows: their number.
    """

    name: str
    why: str
    rows: Size


def task_bounds(rows: Size, cols: Size, private: Sequence[Size] = ()) -> list[Bound]:
    """The bounds of which the largest is the rows per task.

    :param private: elements of each partial result that a task has; single elements weigh nothing.
    """
    worthwhile = minimum(SHORT_ROWS, ceildiv(WORK, maximum(cols, 1)))
    bounds = [Bound("worthwhile", f"as many rows as have {WORK} elements, {SHORT_ROWS} at most", worthwhile)]
    if not known_nonnegative(worthwhile - MOST_ROWS):
        balanced = maximum(FEWEST_ROWS, minimum(floordiv(rows, TASKS), MOST_ROWS))
        bounds.append(Bound("balanced", f"{TASKS} tasks, of {FEWEST_ROWS} to {MOST_ROWS} rows", balanced))
    if any(n != 1 for n in private):
        affordable = ceildiv(rows, maximum(1, floordiv(MOST_PARTIALS, maximum(total(private), 1))))
        bounds.append(
            Bound(
                "affordable",
                f"so few tasks that their partial results have {MOST_PARTIALS} elements at most",
                affordable,
            )
        )
    return bounds


def largest(bounds: Sequence[Bound]) -> Size:
    """The rows per task."""
    return functools.reduce(maximum, (bound.rows for bound in bounds))


def chunk_rows(rows: Size, cols: Size) -> Size:
    """Rows per task: clamp(rows / 256, 8, 64), or more where a row has few columns."""
    return largest(task_bounds(rows, cols))


def task_rows(rows: Size, cols: Size, private: Sequence[Size]) -> Size:
    """Rows per task of a kernel whose tasks have partial results of so many elements."""
    return largest(task_bounds(rows, cols, private))


def interchanged_bound(rows: Size, cols: Size) -> Bound:
    """Rows per task where a task's rows share what they gather from: some thousand columns, if that leaves tasks
    enough.
    """
    shared = maximum(1, minimum(ceildiv(WORK, maximum(cols, 1)), ceildiv(rows, LEAST_TASKS)))
    return Bound("shared_gather", f"as many rows as have {WORK} elements, in {LEAST_TASKS} tasks at least", shared)
