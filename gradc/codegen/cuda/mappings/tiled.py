"""Tiles of rows x columns: each column's sums belong to one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....ir.statement import Stmt
from ..columns import Access, access
from ..facts import Facts
from ..mapping import THREADS, ThreadMapping, even_columns, tasks_of_chunk, threads_for_columns

NARROWEST = 8
"""Threads of a row, if it has so many vectors: fewer leave parts of lines to others."""


@dataclass(frozen=True, kw_only=True)
class Tiled(ThreadMapping):
    """A task is a chunk of rows x ``width * vec`` columns: the columns of an accum belong to one thread, which keeps
    their sum in registers as long as the rows have one key (a segment, or all of a chunk) and prefetches ``prefetch``
    rows.

    Of a scatter of bf16 rows of 4096 (16384 into 128256) this moves each element of dy once in 16-byte loads and writes
    each element of the result once in 16-byte stores, 0.13 + 1.05 GB beside 12 bytes per position for its index, row
    and key; per element it issues an unpack, an addition and an eighth of some 40 instructions that are the same for
    all of a thread's columns: some 8, of which an H100 issues 28 T/s, four times as fast as 3 TB/s bring the elements.
    """

    template: ClassVar[str] = "tiled"
    visits_whole_rows: ClassVar[bool] = False
    purpose: ClassVar[str] = "Rows, tiled: a task has a chunk of rows x WIDTH * VEC columns"

    @property
    def iterations(self) -> int:
        return 1


def owned_columns(facts: Facts) -> bool:
    """Whether all that is combined in an order has a sum for each column, which a thread can have to itself."""
    owned = bool(facts.ordered) and all(map(facts.own, facts.ordered))
    return owned and (facts.order != "by owner" or all(map(facts.lasting, facts.ordered)))


def tiled(facts: Facts, vec: int) -> Tiled | None:
    """The mapping of owned columns; None where one thread has all of a row, and rows go to several of the result."""
    width = threads_for_columns(facts, vec)
    if width == 1 and not facts.one_result_row:
        return None
    if facts.order == "by key" and facts.known_columns is not None:  # each tile of columns is a task
        width = full_width(max(1, -(-facts.known_columns // vec)), width)
    return Tiled(
        reason="each column is computed by itself, and combined over rows: a thread has its sums",
        vec=vec,
        width=width,
        sums_in_registers=facts.lasting_sums,
        sharing=tasks_of_chunk(facts, width, THREADS),
        prefetch=_prefetched_rows(facts, vec),
    )


def full_width(vectors: int, most: int) -> int:
    """How many threads go through so many vectors: a power of two, ``most`` or less, of which at most an eighth is idle
    on average; else the one that leaves the fewest idle.
    """
    most = min(most, 1 << (vectors - 1).bit_length())
    widths = [most >> i for i in range(most.bit_length()) if most >> i >= min(most, NARROWEST)]
    walked = {w: -(-vectors // w) * w for w in widths}
    full = [w for w in widths if 8 * walked[w] <= 9 * vectors]
    return full[0] if full else min(widths, key=lambda w: (walked[w], -w))


def _prefetched_rows(facts: Facts, vec: int) -> int:
    """Rows whose loads are under way while one is worked on."""
    body, even = facts.kernel.passes[0].body, even_columns(facts, vec)
    found = (access(facts.kernel, facts.types, s) for s in body)
    loads = {(a.buffer, a.base): a for a in found if a is not None and a.fits(vec)}
    words = sum(_words(a, vec, even) for a in loads.values()) + len(kept_values(facts))
    return 4 if words <= 6 else 2 if words <= 16 else 1


def _words(a: Access, vec: int, even: bool) -> int:
    """Registers for a thread's elements: packed, if nothing can force them to come one by one."""
    return max(vec * a.item // 4, 1) if even else vec * max(a.item // 4, 1)


def kept_values(facts: Facts) -> list[Stmt]:
    """The row's values that its columns use."""
    row = facts.kernel.passes[0]
    vectors = {s for s in row.body if access(facts.kernel, facts.types, s) is not None}
    used = {
        u
        for s in (*row.body, *row.roots)
        if s not in vectors
        for u in (s.args if s in facts.ordered and facts.lasting_sums else s.uses)
    }
    used |= {s.where for s in facts.ordered if not facts.rows.in_segments(s)}
    return [s for s in row.row if s.name in used and s.op not in ("const", "size")]
