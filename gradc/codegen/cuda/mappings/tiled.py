"""Tiles of rows x columns: each column's sums belong to one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....ir.statement import Stmt
from ...declarations import used
from ...expr import carrier, variable
from ..axes import declared
from ..columns import Access, access
from ..facts import Facts
from ..mapping import THREADS, ThreadMapping, block_threads, even_columns, tasks_of_chunk, threads_for_columns
from ..phase_writer import PhaseWriter
from ..row_order import row_at, visited_axes

NARROWEST = 8
"""Threads of a row, if it has so many vectors: fewer leave parts of lines to others."""
RESIDENT = 1024
"""Threads of a multiprocessor, at least, that add up columns: with 128 multiprocessors or more all of GPU_WORKERS are
resident at once, as a second wave of a few blocks would take as long as the first.
"""


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

    purpose = "Rows, tiled: a task has a chunk of rows x WIDTH * VEC columns"
    array_slot = "u"

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """Of the rows whose loads are under way together."""
        facts, (p,), (view,) = writer.facts, writer.k.passes, writer.phases
        position = f"group + u{' * SHARING' if self.sharing > 1 else ''}"
        values = kept_values(facts, self.chunk_keys > 0)
        values += [
            s
            for s in p.row
            if s.name and s not in values and s.op not in ("const", "size") and self._needed_again(s, writer)
        ]
        constants = [declared(writer.scribe.value(s)) for s in p.row if s.op in ("const", "size")]
        work = "\n".join([*view.body, *(f"{a.address} {a.guard}" for a in view.puts)])
        again = used(constants, work)
        names = " ".join([variable(s.name) for s in values] + [f"{a.address} {a.guard}" for a in view.gets])
        row_values = used([*map(declared, view.row)], names)
        moved = "\n".join([*row_values, names])
        work = "\n".join([*again, work])
        later = used([declared("const ix r = group_rows[u];"), *visited_axes(facts)], work)
        kept_row = any("group_rows" in line for line in later)
        row = declared(f"const ix r = {'group_rows[u] = ' if kept_row else ''}{self.row_at(facts, position)};")
        load = used([row, *visited_axes(facts)], f"{moved} r" if kept_row else moved)
        if sorts := facts.order == "by key":
            load.insert(1 if load[:1] == [row.line] else 0, "group_keys[u] = sorted_keys[group + u];")
        return {
            "kept": [(carrier(s.dtype), variable(s.name)) for s in values if s.dtype is not None],
            "arrays": [*(["group_rows"] if kept_row else []), *(["group_keys"] if sorts else [])],
            "load_lines": [*load, *row_values],
            "work_lines": later,
            "constants": again,
        }

    def row_at(self, facts: Facts, position: str) -> str:
        """The row at a position of the visiting order."""
        return row_at(facts, position)

    def _needed_again(self, s: Stmt, writer: PhaseWriter) -> bool:
        """Whether a load or store that is not moved with its row's names it in its place."""
        (p,) = writer.k.passes
        return any(
            s.name in t.uses
            and t.op in ("load", "store")
            and ((self.prefetch == 1 and self.vec == 1) or t.op == "store" or writer.vector(t) is None)
            for t in (*p.body, *p.roots)
        )


def owned_columns(facts: Facts) -> bool:
    """Whether all that is combined in an order has a sum for each column, which a thread can have to itself."""
    owned = bool(facts.ordered) and all(map(facts.own, facts.ordered))
    return owned and (facts.order != "by owner" or all(map(facts.lasting, facts.ordered)))


def sums_columns(facts: Facts) -> bool:
    """Whether each column is added up over a chunk of rows as it comes, and nothing else is done."""
    done = sorted(s.op for s in facts.kernel.body if s.op != "cast")
    return not facts.order and facts.partial_sums and done == ["accum", "load"]


def tiled(facts: Facts, vec: int, whole: bool = False) -> Tiled | None:
    """The mapping of owned columns; None where one thread has all of a row, and rows go to several of the result in no
    order of theirs.

    :param whole: whether a row is one tile, as far as a block has threads, which meet at barriers.
    """
    width = threads_for_columns(facts, vec)
    if width == 1 and not facts.one_result_row and not (facts.order == "by key" and facts.lasting_sums):
        return None
    if facts.order == "by key" and facts.known_columns is not None and not whole:  # each tile of columns is a task
        width = full_width(max(1, -(-facts.known_columns // vec)), width)
    return Tiled(
        reason="each column is computed by itself, and combined over rows: a thread has its sums",
        vec=vec,
        width=width,
        threads=block_threads(width) if whole else THREADS,
        resident=RESIDENT if sums_columns(facts) else 2 * THREADS,
        sums="registers" if facts.lasting_sums else "memory",
        sharing=tasks_of_chunk(facts, width, THREADS),
        prefetch=prefetched_rows(facts, vec),
        iterations=1,
        tile=width * vec,
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


def prefetched_rows(facts: Facts, vec: int, sorts_chunk: bool = False) -> int:
    """Rows whose loads are under way while one is worked on."""
    body, even = facts.kernel.passes[0].body, even_columns(facts, vec)
    found = (access(facts.kernel, facts.types, s, masked=True) for s in body)
    loads = {(a.buffer, a.base): a for a in found if a is not None and a.fits(vec)}
    words = sum(_words(a, vec, even) for a in loads.values()) + len(kept_values(facts, sorts_chunk))
    return 4 if words <= 6 else 2 if words <= 16 else 1


def _words(a: Access, vec: int, even: bool) -> int:
    """Registers for a thread's elements: packed, if nothing can force them to come one by one."""
    return max(vec * a.item // 4, 1) if even else vec * max(a.item // 4, 1)


def kept_values(facts: Facts, sorts_chunk: bool = False) -> list[Stmt]:
    """The row's values that its columns use.

    :param sorts_chunk: whether rows come sorted by their place in the result, without those that have none.
    """
    row = facts.kernel.passes[0]
    vectors = {s for s in row.body if access(facts.kernel, facts.types, s, masked=True) is not None}
    placed = set(facts.ordered) if facts.lasting_sums or sorts_chunk else set()
    used = {u for s in (*row.body, *row.roots) if s not in vectors for u in (s.args if s in placed else s.uses)}
    if not sorts_chunk:
        used |= {s.where for s in facts.ordered if not facts.rows.in_segments(s)}
    return [s for s in row.row if s.name in used and s.op not in ("const", "size")]
