"""What a launch must know of a kernel's functions."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.dims import Size

SCANNED = 4
"""Rows without columns that a thread looks at together for the largest value of a sum in fixed point."""


@dataclass(frozen=True)
class Stage:
    """One function of a kernel.

    :param name: the function.
    :param kind: ``clear``, ``scan``, ``key``, ``rows``, ``part``, ``last``, ``fold``, ``tree``, ``finish`` or
        ``settle``.
    :param tasks: how many tasks, of ``width`` threads each; None where their number depends on the chunk.
    :param width: threads of a task.
    """

    name: str
    kind: str
    tasks: Size | None
    width: int


@dataclass(frozen=True)
class CudaKernel:
    """A kernel's functions and what a launch must know of its sizes, over dims n0, n1... in the order of the kernel's.

    :param name: of the kernel.
    :param mapping: of its rows to threads, :param reason: why it is this one.
    :param text: its functions.
    :param buffers: the step's buffers, in the order of the functions' parameters.
    :param symbols: the step's dims, in their order.
    :param dims: those of the functions' parameters, in the order of these; among them what the numbers are that other
        steps of the same text have other ones for.
    :param stages: the functions in the order of their launches.
    :param threads: of a block.
    :param rows: of the iteration space.
    :param columns: of a row.
    :param chunked: what a chunk is cut from: rows, or the kept rows of a regular order.
    :param by_chunk: whether a task goes through several of them.
    :param row_sums: whether a whole block keeps sums of the columns of rows: their registers leave room for half of the
        threads.
    :param sharing: tasks of a block that share a chunk, whose rows they take in turn.
    :param most_chunks: chunks whose partial results its folds go through at most.
    :param tile: columns of a task that does not go through whole rows; 0: it does.
    :param private: elements of the partial results of one chunk.
    :param keys: keys of the sort; None without one.
    :param masked: whether rows may add to nothing: their key is the number of keys.
    :param groups: neighbouring rows that the sort takes as one: their keys are neighbours, too.
    :param in_order: whether rows come in the order of their keys, and are not sorted.
    :param scratch: (elements per chunk, bytes of one) of the partial results, in order.
    :param fixed: elements of each sum in integers.
    :param f32_staged: elements of each f32 sum of a 16-bit result that is added up in memory.
    :param split_rows: rows of each reduction, if rows may be cut up: a partial result per strip.
    :param checks: whether it looks for bad indices.
    :param shared: bytes of the partial results that a block of the rows keeps in shared memory; 0: they lie in memory.
    :param chunk_keys: keys by which its blocks sort their rows, with ``cuda/sort_tile.h``; 0: they do not.
    :param exp_sums: whether it needs ``cuda/exp_sums.h``.
    :param index_bounds: sizes that bound what its text computes for offsets, but for what a launch adds.
    :param sites: the op and the index of each check.
    """

    name: str
    mapping: str
    reason: str
    text: str
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    dims: tuple[str | int, ...]
    stages: tuple[Stage, ...]
    threads: int
    rows: Size
    columns: Size
    chunked: Size
    by_chunk: bool
    row_sums: bool
    sharing: int
    most_chunks: int
    tile: int
    private: Size
    keys: Size | None
    masked: bool
    groups: int
    in_order: bool
    scratch: tuple[tuple[Size, int], ...]
    fixed: tuple[Size, ...]
    f32_staged: tuple[Size, ...]
    split_rows: tuple[Size, ...]
    checks: bool
    shared: int
    chunk_keys: int
    exp_sums: bool
    index_bounds: tuple[Size, ...]
    sites: tuple[tuple[str, str], ...]

    def dynamic_shared(self, stage: Stage) -> int:
        """Bytes of dynamic shared memory of a block of one of its functions."""
        return self.shared if stage.kind == "rows" else 0


def own_dims(kernel: CudaKernel) -> list[str]:
    """The names that a kernel's sizes have for its dims."""
    return [f"n{i:02d}" if i > 9 else f"n{i}" for i in range(len(kernel.dims))]
