"""What of a row stays near the processor: values cached from one pass to the next, streaming stores, prefetches of the
next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...ir.dims import Size
from ...ir.node import REGISTRY
from ...ir.op import Expr
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ...ir.walk import reachable
from ...process.forks import cached_property
from ...targets.cpu import CACHED_COST, GATHERED_BYTES, LINE_BYTES, PREFETCHED_BYTES, PRIVATE_BYTES, SHORT_ROW
from ..expr import carrier, variable
from ..index import flatten, index, size
from ..rows import RowWriter
from ..text import enumerators
from .records import Gathered, Prefetch

STREAMED_ROW = enumerators("cpu/program.h")["GRADC_STREAMED_ROW"]
"""Bytes of a row below which it is not written by streaming stores."""


def cost(s: Stmt) -> int:
    """Additions that a statement takes as long as; a scan waits for the column before."""
    if s.op == "scan":
        return CACHED_COST
    lower = getattr(REGISTRY.get(s.op), "lower", None)
    return lower.cost if isinstance(lower, Expr) else 0


class RowMemory(RowWriter):
    """A writer of rows for processors with caches.

    :ivar row_cache: the values kept between passes, and the first pass that has each.
    """

    row_cache: Mapping[str, int]

    def worth_caching(self) -> dict[str, int]:
        """The values that a pass would compute again at some cost, and the first pass that has them."""
        first: dict[str, int] = {}
        cache: dict[str, int] = {}
        for number, p in enumerate(self.k.passes):
            known = {s.name: s for s in p.body}
            pending, seen = [u for s in p.roots for u in s.uses], set[str]()  # once each: paths between them are many
            while pending:
                name = pending.pop()
                if name not in known or name in cache or name in seen:
                    continue
                seen.add(name)
                if first.get(name, number) < number and self.work(name, known) >= CACHED_COST:
                    cache[name] = first[name]
                else:
                    pending += known[name].uses
            for name in known:
                first.setdefault(name, number)
        return cache

    def work(self, value: str, known: Mapping[str, Stmt]) -> int:
        """Additions that computing it takes in a pass."""
        return sum(cost(known[v]) for v in reachable([value], lambda v: [u for u in known[v].uses if u in known]))

    def cached(self, s: Stmt, number: int) -> Stmt | None:
        if self.row_cache.get(s.name, number) >= number:
            return None
        return replace(s, op="cached", args=(), where="", attrs=())

    def line(self, s: Stmt, number: int, value: str = "") -> list[str]:
        """A value as a statement; one that the row's cache keeps is stored there.

        :param value: as C, where the statement alone does not say it.
        """
        assert s.dtype is not None
        declared = f"const {carrier(s.dtype)} {variable(s.name)} = {value};" if value else ""
        if s.name not in self.row_cache:
            return [declared or self.scribe.value(s)]
        place = index(flatten([Index.of(a) for a, _ in self.k.cols], [n for _, n in self.k.cols]))
        element = f"cache{list(self.row_cache).index(s.name)}[{place}]"
        if s.op == "cached":
            return [f"const {carrier(s.dtype)} {variable(s.name)} = {element};"]
        stored = [f"{element} = {variable(s.name)};"] if self.row_cache[s.name] == number else []
        return [declared or self.scribe.value(s), *stored]

    def large(self, buffer: str) -> bool:
        """Whether an array may be larger than caches are."""
        nbytes = self.types[buffer].nbytes
        return not isinstance(nbytes, int) or nbytes >= PRIVATE_BYTES

    def streams(self, s: Stmt, number: int) -> bool:
        """Whether a store fills neighbouring elements of a large array that no later pass of the row reads back."""
        if s.op != "store" or not self.k.cols or self.k.descending or not self.large(s.buffer) or self.scribe.guarded:
            return False
        row = self.k.cols[-1][1] * self.types[s.buffer].dtype.itemsize
        if isinstance(row, int) and row < STREAMED_ROW:
            return False
        flat = flatten(s.index, self.types[s.buffer].shape)
        if dict(flat.terms).get(self.k.cols[-1][0]) != 1 or any(v.startswith("%") for v, _ in flat.terms):
            return False
        return not any(
            q.buffer == s.buffer for j, p in enumerate(self.k.passes) if j > number for q in self.reloaded(p, j)
        )

    @cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """What rows gather from places that nothing but their indices tells: a processor waits for each in turn, unless
        rows ahead ask for theirs.
        """
        if not self.k.rows or (isinstance(self.k.col_count, int) and self.k.col_count < SHORT_ROW):
            return ()
        cols, axes = {a for a, _ in self.k.cols}, {a for a, _ in self.k.rows}
        found: dict[str, Gathered] = {}
        for s in self.k.body:
            type_ = self.types[s.buffer] if s.op == "load" and self.large(s.buffer) else None
            if type_ is None or not type_.shape:
                continue
            *leading, along = ([v for v, _ in i.terms] for i in s.index)
            told = {v for variables in leading for v in variables}
            values = [v for v in told if v.startswith("%")]
            if any(self.k.levels[v] & cols for v in values) or told & cols:
                continue
            if not values and not (self.order == "by key" and told & axes):
                continue
            place = self.slice_of(values)
            if values and not any(t.op == "load" for t in place):
                continue  # its rows lie side by side
            if any(t.op in ("search", *REDUCTIONS) or cost(t) >= CACHED_COST for t in place):
                continue
            first = Index(s.index[-1].const, tuple(t for t in s.index[-1].terms if t[0] in axes))
            at = index(flatten([*s.index[:-1], first], type_.shape))
            whole = any(v in cols or v.startswith("%") for v in along)
            width = type_.shape[-1] if whole else 1
            lines = [self.scribe.value(t) for t in place]
            found.setdefault(f"{s.buffer} + {at}", Gathered(tuple(lines), s.buffer, at, *self.asked_for(type_, width)))
        return tuple(found.values())

    @staticmethod
    def asked_for(type_: Type, width: Size) -> tuple[str, int, str]:
        """Elements of a row that are asked for ahead, as C, those of a line, and all of the array."""
        most = GATHERED_BYTES // type_.dtype.itemsize
        elements = str(min(width, most)) if isinstance(width, int) else f"gradc_min({size(width)}, {most})"
        return elements, LINE_BYTES // type_.dtype.itemsize, size(type_.count)

    def prefetches(self, number: int) -> tuple[Prefetch, ...]:
        """What the next row reads, asked for while the last of several passes computes: memory would stand still."""
        if (
            self.scribe.guarded
            or number == 0
            or number < len(self.k.passes) - 1
            or not (self.k.rows and self.k.cols)
            or self.order
        ):
            return ()
        innermost, row = self.k.cols[-1][0], self.k.rows[-1][0]
        element_bytes: dict[str, int] = {}
        for s in self.k.body:
            flat = flatten(s.index, self.types[s.buffer].shape) if s.op == "load" and self.large(s.buffer) else Index()
            step = dict(flat.terms)
            if step.get(innermost) == 1 and row in step and not any(v.startswith("%") for v in step):
                next_row = flat.renamed({innermost: "c0"}) + step[row]
                element_bytes[f"{s.buffer} + {index(next_row)}"] = self.types[s.buffer].dtype.itemsize
        width = sum(element_bytes.values())
        if not isinstance(self.k.col_count, int) or self.k.col_count * width > PREFETCHED_BYTES:
            return ()
        return tuple(Prefetch(at, LINE_BYTES // itemsize) for at, itemsize in element_bytes.items())
