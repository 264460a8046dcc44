"""Rows that are added to one row of a result: sums of a block of columns stay in registers for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.statement import Stmt
from ...ir.types import F32
from ...targets.cpu import CACHED_COST, NARROW_RUN, RUN_WIDTHS, WIDEST_RUN
from ..expr import carrier, variable
from ..index import flatten, index, size
from ..rows import NARROW_SUM_ROWS
from .accums import Accum
from .facts import Facts
from .keys import beside_keys
from .packed import Unpacking, unpacked
from .phase_writer import PhaseWriter, extents
from .row_memory import cost

_ALONE = tuple(map(str, RUN_WIDTHS[1:]))


@dataclass(frozen=True)
class RegisterSum:
    """A sum of a run's rows.

    :param ctype: its C type, :param name: the array of a block's columns.
    :param element: what a column of it is added up for, and :param wide: the element of a wider row that it is added
        to, where more rows may meet than those of one run, or "".
    """

    ctype: str
    name: str
    element: str
    wide: str


@dataclass(frozen=True)
class RegisterSums:
    """Rows that are added to one row of a result: sums of a block of columns are in registers for all of them.

    :param row: the statements of a row before its columns.
    :param where: what says that a row is added, as C, or "".
    :param outer: the loops around the innermost columns, :param axis: the variable of the innermost loop, :param last:
        and the column behind its last, as C.
    :param widths: columns of the blocks, of one kind after the other.
    :param narrow: bytes of the narrowest value of a column: a vector has no more of them than of it.
    :param sums: what is added up.
    :param unpackings: what is unpacked before a block of a row.
    :param floats: what bytes are cast to before it.
    :param body: the statements of column ``e`` of a block.
    :param from_memory: whether what is added is in memory as it is added: an instruction reads and adds it, and sums
        may be in every register.
    """

    row: tuple[str, ...]
    where: str
    outer: Sequence[tuple[str, str]]
    axis: str
    last: str
    widths: tuple[int, ...]
    narrow: int
    sums: tuple[RegisterSum, ...]
    unpackings: Sequence[Unpacking]
    floats: Sequence[tuple[str, str, str]]
    body: tuple[str, ...]
    from_memory: bool

    @property
    def widest(self) -> int:
        """The width of blocks that there are only where the registers of a processor hold them."""
        return WIDEST_RUN

    @property
    def rest(self) -> bool:
        """Whether there are columns behind those of all blocks."""
        if not self.last.isdigit():
            return True
        left = int(self.last)
        for width in self.widths:
            left %= width
        return left > 0

    @property
    def in_parts(self) -> bool:
        """Whether rows may be so wide that few are added at a time: else they leave the caches from one block of
        columns to the next.
        """
        return not (self.last.isdigit() and int(self.last) <= NARROW_RUN) and not self.wide

    @property
    def wide(self) -> bool:
        """Whether an owner's rows may be those of several runs."""
        return any(s.wide for s in self.sums)


def obstacle(facts: Facts) -> str:
    """Why registers cannot hold what the rows of a segment, or of an owner, are added to; "" if they can."""
    k, roots = facts.kernel, [s for p in facts.kernel.passes for s in p.roots]
    if len(k.passes) != 1:
        return "a row has several passes over its columns"
    if not k.cols or not roots:
        return "a row has no columns"
    if k.scans:
        return "a row is scanned"
    if facts.guarded:
        return "each access is looked at"
    if not all(s.op == "accum" and s.combine == "sum" for s in roots):
        return "rows have other effects than sums"
    columns = {a for a, _ in k.cols}
    if not all(columns <= {v for i in s.index for v, _ in i.terms} and facts.independent(s) for s in roots):
        return "columns do not add to elements of their own"
    if other := next(filter(None, (_other_elements(facts, s) for s in roots)), ""):
        return other
    beside = beside_keys(facts.rows)
    kept = facts.keys.kept_searches if facts.keys is not None else []
    read = [s for s in k.passes[0].row if not s.name or (s in beside and s not in kept)]
    costly = any(not s.name or s.op == "search" or cost(s) >= CACHED_COST for s in read)
    if costly and size(k.cols[-1][1]) not in _ALONE:
        return "what a row computes once would be computed again for each block of columns"
    return ""


def _other_elements(facts: Facts, s: Stmt) -> str:
    """Why an accum does not add the rows of a segment, or of an owner, to one row of elements of its type; or ""."""
    if facts.order == "by key":
        return "rows without a key have effects, too" if facts.rows.visits_all_rows else ""
    if not facts.rows.owned_by_row(s):
        return "another result is combined in chunks of rows"
    where = facts.kernel.passes[0].roots[0].where
    if s.where != where or (where and facts.rows.by_column(where)):
        return "some columns of a row are added, others are not"
    if not _owns_columns(facts, s):
        return "an owner has not one element for each column"
    few = isinstance(facts.members, int) and 0 < facts.members <= NARROW_SUM_ROWS
    return "" if few or facts.sums_by_block(s) else "so many rows are added up in f64"


def _owns_columns(facts: Facts, s: Stmt) -> bool:
    """Whether what an owner's rows are added to is an element for each of their columns."""
    shape, free = facts.types[s.buffer].shape, facts.rows.free(s)
    extents = {s.index[axis].variable: shape[axis] for axis in free}
    return len(extents) == len(free) and extents == dict(facts.kernel.cols)


# -- as text -----------------------------------------------------------------------------------------------------------


def register_sums(writer: PhaseWriter) -> RegisterSums:
    """The sums of a kernel's rows, of one pass."""
    facts, accums, (p,) = writer.facts, writer.accums, writer.k.passes
    last = size(facts.kernel.cols[-1][1])
    statements = facts.values(p, 0)
    bytes_ = _bytes_as_floats(facts, statements, p.roots)
    made = {s.args[0] for s in bytes_}
    computed = [s for s in statements if s.name not in made and facts.rows.by_column(s.name)]
    sums, body = [], []
    for s in (s for s in statements if s.name not in made):
        body += writer.line(s, 0, f"{_floats(s.name)}[e]" if s in bytes_ else "")
    for s in p.roots:
        sums.append(_register_sum(accums[s.buffer], s))
        ctype, name = sums[-1].ctype, sums[-1].name
        body.append(f"{name}[e] = ({ctype})({name}[e] + {variable(s.args[0])});")
    masks = dict.fromkeys(variable(s.where) for s in p.roots if s.where and not facts.rows.in_segments(s))
    wide = len(sums) > 1 or any(s.dtype is None or s.dtype.bits > 32 for s in p.roots)
    return RegisterSums(
        row=tuple(writer.row_value(s) for s in p.row),
        where=" && ".join(masks),
        outer=extents(facts.kernel.cols[:-1]),
        axis=facts.innermost,
        last=last,
        widths=_widths(last, wide),
        narrow=min([4, *map(facts.bytes_of, computed)]),
        sums=tuple(sums),
        unpackings=[packed.unpacking(facts.scribe) for packed in facts.packed[0]],
        floats=[(_floats(s.name), carrier(t.dtype), at) for s, (t, at) in bytes_.items() if t.dtype],
        body=tuple(body),
        from_memory=not bytes_ and not facts.packed[0] and all(map(_is_read_as_added, computed)),
    )


def _is_read_as_added(s: Stmt) -> bool:
    """Whether a value is one that lies in memory, of 32 bits, in every column."""
    return s.op == "load" and not s.where and s.dtype is not None and s.dtype.bits == 32


def _widths(columns: str, wide: bool) -> tuple[int, ...]:
    """The columns of the blocks that sums are in registers for, from the first column on: each as often as it fits; the
    columns behind are a block that is filled in part.

    :param columns: how many there are, as C.  :param wide: whether there are several sums of a column, or one of 8
        bytes.
    """
    widths = RUN_WIDTHS[2:] if wide else RUN_WIDTHS
    if not columns.isdigit():
        return widths[: 3 - 2 * wide]
    left, found = int(columns), list[int]()
    for width in widths:
        if left >= width or (width == WIDEST_RUN // 2 and WIDEST_RUN in found):  # two of these where registers are few
            found.append(width)
            left %= width
    return tuple(found)


def _floats(value: str) -> str:
    """The array of a block's floats that bytes are cast to."""
    return f"floats{value[1:]}"


def _bytes_as_floats(facts: Facts, statements: Sequence[Stmt], roots: Sequence[Stmt]) -> dict[Stmt, tuple[Stmt, str]]:
    """The floats that bytes side by side in memory are cast to, with what is read and where a block of it begins: not
    all compilers find the shortest conversion.
    """
    known = {s.name: s for s in statements}
    found: dict[Stmt, tuple[Stmt, str]] = {}
    for s in statements:
        source = known.get(s.args[0]) if s.op == "cast" and s.dtype is F32 else None
        if source is None or source.dtype is None or carrier(source.dtype) not in ("u8", "i8"):
            continue
        if source.op == "unpacked":
            found[s] = source, unpacked(source.name)
        elif source.op == "load" and source.dtype.bits == 8 and not source.where and facts.by_neighbours(source):
            first = [i.renamed({facts.innermost: "c0"}) for i in source.index]
            found[s] = source, f"&{facts.scribe.element(source.buffer, first)}"
    others = {u for s in (*statements, *roots) if s not in found for u in s.uses}
    return {s: given for s, given in found.items() if s.args[0] not in others}


def _register_sum(accum: Accum, s: Stmt) -> RegisterSum:
    name = f"sum{accum.number}"
    if accum.segmented:
        return RegisterSum(accum.ctype, name, accum.segment_element(s), "")
    wide = f"acc{accum.number}[{accum.place(s)}]" if accum.array != s.buffer else ""
    return RegisterSum(accum.ctype, name, f"{s.buffer}[{index(flatten(s.index, accum.shape))}]", wide)
