"""Analysis of combines across rows: the form of an accum's index, and the sizes that strategies' costs depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..ir.dims import Dim, Size, evaluate, floordiv, maximum, product, same
from ..ir.kernel import Kernel
from ..ir.statement import REDUCTIONS, Index, Stmt
from ..ir.types import Type
from ..ir.walk import backward_slice

DIGIT_BITS = 9
"""Most bits of a pass of a sort on a GPU."""
OWN_KEYS, OWN_COLUMNS, OWN_BLOCKS, OWN_SHORTEST, OWN_BATCH = 2**DIGIT_BITS - 1, 128, 128, 64, 4096
"""For results of so few rows that a block sorts its own rows by them: most rows of the result (with one that stands for
none they are a digit's values), columns of a block, blocks that a kernel is divided into, fewest rows of one, rows that
a block sorts at once; :mod:`gradc.codegen.cuda` reads them here.
"""
S = TypeVar("S", int, int | Dim)


@dataclass(frozen=True)
class Combine:
    """One accum, and the form of its index.

    :param kept: row axes that are index entries by themselves: rows that differ there update different elements.
    :param gathered: whether the index contains a value loaded from memory.
    :param by_column: whether such a value varies along the columns.
    :param leading: the number of leading index entries without a column axis.
    :param tail: whether the remaining entries are exactly the whole column axes, in order.
    :param times: the accums into the buffer, which differ in the values of their indices alone: this is the first.
    """

    stmt: Stmt
    kept: tuple[str, ...]
    gathered: bool
    by_column: bool
    leading: int
    tail: bool
    times: int = 1

    @property
    def buffer(self) -> str:
        return self.stmt.buffer

    @property
    def key(self) -> tuple[tuple[Index, ...], str]:
        """The part of the index that selects the row of the result: accums with equal keys share a row order."""
        return tuple(i for i in self.stmt.index[: self.leading] if i != Index()), self.stmt.where


def combines(kernel: Kernel, types: Mapping[str, Type]) -> list[Combine]:
    """What a kernel combines into each buffer, in order."""
    rows, cols = [a for a, _ in kernel.rows], dict(kernel.cols)
    out = []
    times = Counter(s.buffer for s in kernel.accums)
    for buffer, count in times.items():
        s = next(s for s in kernel.accums if s.buffer == buffer)
        entries = s.index
        kept = tuple(dict.fromkeys(i.variable for i in entries if i.variable in rows))
        values = [v for i in entries for v, _ in i.terms if v.startswith("%")]
        by_column = any(kernel.levels[v] & cols.keys() for v in values) or bool(
            s.where and kernel.levels[s.where] & cols.keys()
        )
        uses_col = [any(v in cols for v, _ in i.terms) for i in entries]
        leading = next((k for k, used in enumerate(uses_col) if used), len(entries))
        early = not _reduces(
            kernel, [*values, *([s.where] if s.where else [])]
        )  # the sort precedes all passes over the columns
        tail = early and all(
            i.variable in cols and types[s.buffer].shape[k] == cols[i.variable]
            for k, i in enumerate(entries)
            if k >= leading
        )
        tail &= {i.variable for i in entries[leading:]} == kernel.stmt_level(
            s
        ) & cols.keys()  # each column updates a different element
        out.append(
            Combine(s, tuple(k for k in kept if k), bool(values), by_column, leading, tail and not by_column, count)
        )
    return out


def index_buffer(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> str:
    """The buffer whose elements alone say, row by row in their order, which row of the result a row is added to, or ""
    where none does: of i32 or i64, for a sample of it.
    """
    entries = combine.stmt.index[: combine.leading]
    values = [v for i in entries for v, _ in i.terms if v.startswith("%")]
    rows = {axis for axis, _ in kernel.rows}
    computed = backward_slice(kernel.body, values)
    loads = [s for s in computed if s.op == "load"]
    if len(loads) != 1 or any(
        v in rows for s in (combine.stmt, *computed) if s.op != "load" for i in s.index for v, _ in i.terms
    ):
        return ""
    (load,) = loads
    type_ = types[load.buffer]
    in_order = tuple(i.variable for i in load.index) == tuple(axis for axis, _ in kernel.rows)
    whole = len(kernel.rows) == len(type_.shape) and all(map(same, type_.shape, (size for _, size in kernel.rows)))
    return load.buffer if type_.dtype.name in ("i32", "i64") and in_order and whole and not load.where else ""


def _reduces(kernel: Kernel, values: Sequence[str]) -> bool:
    """Whether values depend on the result of a pass over the columns."""
    return any(s.op in REDUCTIONS for s in backward_slice(kernel.body, values))


def exact(combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether atomics in any order give the same bits: integers with hardware atomics."""
    dtype = types[combine.buffer].dtype
    return dtype.is_integer and dtype.itemsize >= 4 and combine.stmt.combine in ("sum", "max", "min")


# -- in sizes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scatter(Generic[S]):
    """The sizes of one accum, for the GPU cost model.

    :param rows: N, the rows of the kernel.
    :param width: D, the elements that each row updates.
    :param keys: V, the rows of the result.
    :param out: elements of the result.
    :param read: bytes read to compute the values.
    :param index: bytes of the indices.
    :param item: bytes of an element of the result.
    :param contiguous: whether the elements that a row updates are adjacent in memory.
    :param exact: whether atomics in any order give the same bits.
    :param gathered: whether the index is loaded from memory.
    :param own: whether a block sorts its rows by their place in the result (:func:`own`).
    :param owners: rows of the result that each have one owner, which adds all kernel rows of it; 0 if not known.
    :param groups: neighbouring rows that a sort takes as one.
    :param reduced: whether a row's columns are reduced to the one element that it adds.
    """

    rows: S
    width: S
    keys: S
    out: S
    read: S
    index: S
    owners: S
    item: int
    contiguous: bool = True
    exact: bool = False
    gathered: bool = True
    own: bool = False
    groups: int = 1
    reduced: bool = False

    @property
    def wide(self) -> int:
        """Bytes of an accumulator element."""
        return max(self.item, 4)

    @property
    def pair(self) -> int:
        """Bytes of a partial sum with its compensation term (the rounding error of f32)."""
        return self.wide * (2 if self.wide == 4 else 1)


@dataclass(frozen=True)
class HostScatter:
    """The sizes of one accum, for the CPU cost model.

    :param columns: of the kernel.
    :param out: elements of the result, of ``item`` bytes each.
    :param read: bytes of the values that are added.
    :param owners: rows of the result that could each be owned by one task.
    :param other_results: elements of the kernel's other privatized results.
    :param ordered: whether the rows are in the order of their index.
    """

    rows: int
    columns: int
    out: int
    item: int
    read: int
    owners: int
    other_results: tuple[int, ...] = ()
    ordered: bool = False


@dataclass(frozen=True)
class Hits:
    """The distribution of indices.

    :param unique: U, the number of distinct rows of the result that are updated.
    :param most: R, the largest number of updates of one row.
    """

    unique: int
    most: int


def expected_hits(s: Scatter[int], unique: int | None = None, most: int | None = None) -> Hits:
    """The given numbers; by default U is the expected number for uniformly random indices, V (1 - (1 - 1/V)^N), and R
    the smallest possible, N / V rounded up.
    """
    if unique is None:
        unique = (
            round(-s.keys * math.expm1(s.rows * math.log1p(-1 / s.keys))) if s.keys > 1 else max(min(s.rows, s.keys), 0)
        )
    return Hits(unique, -(-s.rows // max(s.keys, 1)) if most is None else most)


def row_scatter(
    rows: int, keys: int, width: int, grad: int = 4, item: int = 4, index: int = 4, own: bool = False
) -> Scatter[int]:
    """The sizes of ``result[index[n], :] += gradient[n, :]``.

    :param grad, item, index: bytes of an element of the gradients, the result and the indices.
    :param own: whether the result has a known, small number of rows.
    """
    return Scatter(rows, width, keys, keys * width, rows * width * grad, rows * index, 0, item, own=own)


def ascends(kernel: Kernel, combine: Combine) -> bool:
    """Whether the key is what a search finds for the row itself: it never goes back from one row to the next, so that
    a sort finds the rows in order.
    """
    leading = combine.stmt.index[: combine.leading]
    wanted = [v for i in leading for v, _ in i.terms if v.startswith("%")]
    place = backward_slice(kernel.body, [*wanted, *([combine.stmt.where] if combine.stmt.where else [])])
    searches = [s for s in place if s.op == "search"]
    others = {s.op for s in place} - {"index", "search", "in_bounds"}
    return len(searches) == 1 and row_searches(kernel, place) == searches and not others


def line_of_keys(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> Stmt | None:
    """The search for each row in a line that says where the rows of each key begin, and ascends from 0 on, which is all
    that its key is made of: rows come in the order of their keys, and each has one.  None if there is none.
    """
    key, *more = combine.stmt.index[: combine.leading] or (Index(),)
    if more or not ascends(kernel, combine):
        return None
    mask, keys = kernel.stmts.get(combine.stmt.where), product(types[combine.buffer].shape[: combine.leading])
    values = [v for v in (key.variable, combine.stmt.where) if v and v.startswith("%")]
    (search,) = row_searches(kernel, backward_slice(kernel.body, values))
    found = {s.name: s.index[0] for s in kernel.body if s.op == "index"}
    place = found.get(key.variable or "", key)
    bounded = mask is None or (mask.index[0] == key and mask.attr("lo") == 0 and same(mask.attr("hi"), keys))
    first = place == Index.of(search.name) + -1 and same(types[search.buffer].shape[-1], keys)
    return search if bounded and first and dict(search.attrs).get("ascending") else None


def row_searches(kernel: Kernel, stmts: Sequence[Stmt]) -> list[Stmt]:
    """The searches among statements that are for the number of the row itself, of a kernel whose rows are one axis."""
    if len(kernel.rows) != 1:
        return []
    row = (Index.of(kernel.rows[0][0]),)
    rows = {s.name for s in stmts if s.op == "index" and s.index == row}
    return [s for s in stmts if s.op == "search" and s.args[0] in rows]


def scatter_of(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> Scatter[Size]:
    """The sizes of an accum that its cost on a GPU depends on."""
    s, type_ = combine.stmt, types[combine.buffer]
    cols = {a for a, _ in kernel.cols}
    in_columns = bool(kernel.stmt_level(s) & cols)
    place = {v for i in s.index for v, _ in i.terms}
    along = bool(place & cols) or combine.by_column  # otherwise each row's columns are reduced first
    rows, width, keys = kernel.row_count, kernel.col_count if in_columns and along else 1, product(type_.shape)
    if combine.by_column:  # every element has its own index
        rows, width = rows * width, 1
    elif combine.tail:
        width, keys = product(type_.shape[combine.leading :]), product(type_.shape[: combine.leading])
    elif along:
        keys = floordiv(product(type_.shape), maximum(width, 1))
    read, index = _loaded(kernel, s, types)
    owners = product(size for a, size in kernel.rows if a in combine.kept) if combine.kept else 0
    whole = combine.tail or width == 1
    return Scatter[Size](
        rows * combine.times,
        width,
        keys,
        product(type_.shape),
        read,
        index,
        owners,
        type_.dtype.itemsize,
        whole,
        exact(combine, types),
        combine.gathered,
        own(kernel, combine, types),
        math.prod(sort_groups(kernel, combine, types)) if combine.tail else 1,
        bool(cols) and not along,
    )


def sort_groups(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> tuple[int, ...]:
    """The sizes of the last row axes, where these are the last entries of the place that a row adds to and nothing else
    of it depends on them: keys of rows that differ there alone are neighbours, and a sort takes these rows as one.
    """
    sizes: list[int] = []
    place, shape = combine.stmt.index[: combine.leading], types[combine.buffer].shape
    for at in range(len(place) - 1, 0, -1):
        if len(sizes) == len(kernel.rows):
            break
        name, count = kernel.rows[-1 - len(sizes)]
        values = [v for i in place[:at] for v, _ in i.terms] + [combine.stmt.where]
        names = {a for v in values for a in (kernel.levels[v] if v.startswith("%") else (v,))}
        if place[at] != Index.of(name) or shape[at] != count or name in names:
            break
        if not isinstance(count, int) or count < 2:
            break
        sizes.append(count)
    return tuple(sizes)


def own(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether a block of a privatized accum sorts its rows by their place in the result: this has a known, small number
    of rows, and the kernel does nothing else.

    Rows are added whole, each column to one element, at positions loaded from memory.
    """
    keys, type_ = product(types[combine.buffer].shape[: combine.leading]), types[combine.buffer]
    alone = (
        [s for s in kernel.body if not s.name or s.op == "scan" or s.op in REDUCTIONS] == [combine.stmt]
        and len(kernel.passes) == 1
        and bool(kernel.cols)
    )
    if not alone or not combine.gathered or not combine.tail or not isinstance(keys, int):
        return False
    inner = type_.shape[combine.leading :]
    in_order = [i.variable for i in combine.stmt.index[combine.leading :]] == [a for a, _ in kernel.cols] and product(
        inner
    ) == kernel.col_count
    return in_order and 0 < keys <= OWN_KEYS


def _loaded(kernel: Kernel, s: Stmt, types: Mapping[str, Type]) -> tuple[Size, Size]:
    """(bytes read to compute an accum's values, bytes read for its index and mask)."""
    sizes = dict((*kernel.rows, *kernel.cols))
    values = _dependences(kernel, s.args)
    place = _dependences(kernel, [v for v in s.uses if v not in s.args]) - values
    total: list[Size] = []
    for names in (values, place):
        loads = {(x.buffer, x.index): x for x in (kernel.stmts[v] for v in sorted(names)) if x.op == "load"}
        count: Size = 0
        for x in loads.values():
            count = count + product(sizes[a] for a in sorted(kernel.levels[x.name])) * types[x.buffer].dtype.itemsize
        total.append(count)
    return total[0], total[1]


def _dependences(kernel: Kernel, values: Sequence[str]) -> set[str]:
    """The values and everything they depend on."""
    return {s.name for s in backward_slice(kernel.body, values)}


def scatter_sizes(s: Scatter[Size]) -> list[Size]:
    return [s.rows, s.width, s.keys, s.out, s.read, s.index, s.owners]


def numbers(s: Scatter[Size], bound: Mapping[str, int]) -> Scatter[int]:
    """The sizes with symbols replaced by numbers."""
    rows, width, keys, out, read, index, owners = (evaluate(size, bound) for size in scatter_sizes(s))
    return Scatter[int](
        rows,
        width,
        keys,
        out,
        read,
        index,
        owners,
        s.item,
        s.contiguous,
        s.exact,
        s.gathered,
        s.own,
        s.groups,
        s.reduced,
    )
