"""What of a row stays near the processor: values kept from one pass to the next, streaming stores, prefetches of later
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.dims import Size
from ...ir.kernel import Kernel, Step
from ...ir.node import REGISTRY
from ...ir.op import Expr
from ...ir.statement import REDUCTIONS, Index, Stmt
from ...ir.types import Type
from ...ir.walk import reachable
from ...targets.cpu import (
    CACHED_COST,
    GATHERED_BYTES,
    LINE_BYTES,
    PREFETCH_LOCALITY,
    PREFETCHED_BYTES,
    PRIVATE_BYTES,
    SHORT_ROW,
)
from ..expr import Scribe
from ..index import flatten, index, size
from ..rows import RowFacts
from ..text import enumerators

STREAMED_ROW = enumerators("cpu/program.h")["GRADC_STREAMED_ROW"]
"""Bytes of a row below which it is not written by streaming stores."""


@dataclass(frozen=True)
class Gathered:
    """What a row reads at a place that its indices tell, asked for rows ahead.

    :param lines: the statements that compute the place, :param buffer: what is read there, :param at: and the place.
    :param elements: how many are asked for, :param step: and how many of them a cache line has.
    :param count: elements of the buffer.
    """

    lines: tuple[str, ...]
    buffer: str
    at: str
    elements: str
    step: int
    count: str

    @property
    def requests(self) -> list[str]:
        """The statements that ask for it."""
        if not self.elements.isdigit():
            loop = f"for (i64 e = 0; e < {self.elements}; e += {self.step})"
            return [f"{loop} {self._request('e')}", self._request(f"{self.elements} - 1")]
        elements = int(self.elements)
        asked = [self._request(str(e) if e else "") for e in range(0, elements, self.step)]
        if elements > 1:  # the row may begin within a line: then its end lies in one more
            place = f"{self.buffer} + {self.at}"
            whole = f"if ((u64)({place}) % {LINE_BYTES}) " if elements % self.step == 0 else ""  # all rows do, or none
            asked.append(f"{whole}{self._request(str(elements - 1))}")
        return asked

    def _request(self, element: str) -> str:
        """For the line of an element, into the second cache: the first one waits for fewer lines at a time than a row
        and those behind it have.
        """
        place = f"{self.buffer} + {self.at}{f' + {element}' if element else ''}"
        return f"__builtin_prefetch({place}, 0, {PREFETCH_LOCALITY});"


def cost(s: Stmt) -> int:
    """Additions that a statement takes as long as; a scan waits for the column before."""
    if s.op == "scan":
        return CACHED_COST
    lower = getattr(REGISTRY.get(s.op), "lower", None)
    return lower.cost if isinstance(lower, Expr) else 0


def batch_work(steps: Sequence[Step]) -> list[Size]:
    """The additions and accesses of each step of a batch; [] where one is no kernel, whose work is not in its text."""
    if not all(isinstance(step, Kernel) for step in steps):
        return []
    kernels = [step for step in steps if isinstance(step, Kernel)]
    return [k.row_count * k.col_count * sum(max(cost(s), s.op != "const") for s in k.body) for k in kernels]


def is_large(type_: Type) -> bool:
    """Whether an array may be larger than caches are."""
    nbytes = type_.nbytes
    return not isinstance(nbytes, int) or nbytes >= PRIVATE_BYTES


def kept_values(kernel: Kernel) -> dict[str, int]:
    """The values that a pass would compute again at some cost, and the first pass that has them."""
    first: dict[str, int] = {}
    kept: dict[str, int] = {}
    for number, p in enumerate(kernel.passes):
        known = {s.name: s for s in p.body}
        pending, seen = [u for s in p.roots for u in s.uses], set[str]()  # once each: paths between them are many
        while pending:
            name = pending.pop()
            if name not in known or name in kept or name in seen:
                continue
            seen.add(name)
            if first.get(name, number) < number and _work(name, known) >= CACHED_COST:
                kept[name] = first[name]
            else:
                pending += known[name].uses
        for name in known:
            first.setdefault(name, number)
    return kept


def _work(value: str, known: Mapping[str, Stmt]) -> int:
    """Additions that computing it takes in a pass."""
    return sum(cost(known[v]) for v in reachable([value], lambda v: [u for u in known[v].uses if u in known]))


def may_stream(kernel: Kernel, type_: Type, s: Stmt) -> bool:
    """Whether a store, without a mask, fills neighbouring elements of a large array, of this type."""
    if not kernel.cols or kernel.descending or s.where or not is_large(type_):
        return False
    row = kernel.cols[-1][1] * type_.dtype.itemsize
    if isinstance(row, int) and row < STREAMED_ROW:
        return False
    flat = flatten(s.index, type_.shape)
    return dict(flat.terms).get(kernel.cols[-1][0]) == 1 and not any(v.startswith("%") for v, _ in flat.terms)


def gathered(rows: RowFacts, scribe: Scribe) -> tuple[Gathered, ...]:
    """What rows gather from places that nothing but their indices tells: a processor waits for each in turn, unless
    rows ahead ask for theirs.
    """
    kernel = rows.kernel
    if not kernel.rows or (isinstance(kernel.col_count, int) and kernel.col_count < SHORT_ROW):
        return ()
    cols, axes = {a for a, _ in kernel.cols}, {a for a, _ in kernel.rows}
    found: dict[str, Gathered] = {}
    for s in kernel.body:
        type_ = rows.types[s.buffer] if s.op == "load" and is_large(rows.types[s.buffer]) else None
        if type_ is None or not type_.shape:
            continue
        vector = len(s.index) == 1  # whose rows are elements
        leading, along = (s.index, Index()) if vector else (s.index[:-1], s.index[-1])
        told = {v for i in leading for v, _ in i.terms}
        values = [v for v in told if v.startswith("%")]
        if any(map(rows.by_column, values)) or told & cols:
            continue
        if not values and (vector or not (rows.order == "by key" and told & axes)):
            continue
        place = rows.slice_of(values)
        if values and not any(t.op == "load" for t in place):
            continue  # its rows lie side by side
        if any(t.op in ("search", *REDUCTIONS) or cost(t) >= CACHED_COST for t in place):
            continue
        first = Index(along.const, tuple(t for t in along.terms if t[0] in axes))
        at = index(flatten(leading if vector else [*leading, first], type_.shape))
        whole = any(v in cols or v.startswith("%") for v, _ in along.terms)
        lines = tuple(scribe.value(t) for t in place)
        asked = _asked_for(type_, type_.shape[-1] if whole else 1)
        found.setdefault(f"{s.buffer} + {at}", Gathered(lines, s.buffer, at, *asked))
    return tuple(found.values())


def _asked_for(type_: Type, width: Size) -> tuple[str, int, str]:
    """Elements of a row that are asked for ahead, as C, those of a line, and all of the array."""
    most = GATHERED_BYTES // type_.dtype.itemsize
    elements = str(min(width, most)) if isinstance(width, int) else f"gradc_min({size(width)}, {most})"
    return elements, LINE_BYTES // type_.dtype.itemsize, size(type_.count)


def of_next_row(rows: RowFacts) -> list[tuple[str, int]]:
    """What the next row reads, asked for while the last of several passes computes: memory would stand still.

    :returns: where a block of it begins, as C, and elements of a cache line.
    """
    kernel = rows.kernel
    if not (kernel.rows and kernel.cols) or rows.order:
        return []
    innermost, row = kernel.cols[-1][0], kernel.rows[-1][0]
    element_bytes: dict[str, int] = {}
    for s in kernel.body:
        large = s.op == "load" and is_large(rows.types[s.buffer])
        flat = flatten(s.index, rows.types[s.buffer].shape) if large else Index()
        step = dict(flat.terms)
        if step.get(innermost) == 1 and row in step and not any(v.startswith("%") for v in step):
            next_row = flat.renamed({innermost: "c0"}) + step[row]
            element_bytes[f"{s.buffer} + {index(next_row)}"] = rows.types[s.buffer].dtype.itemsize
    width = sum(element_bytes.values())
    if not isinstance(kernel.col_count, int) or kernel.col_count * width > PREFETCHED_BYTES:
        return []
    return [(at, LINE_BYTES // itemsize) for at, itemsize in element_bytes.items()]
