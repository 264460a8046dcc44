"""What each way to combine across rows costs: predicted bytes and time, from shapes alone.

The formulas of the CPU are here, those of GPUs in :mod:`gpu_cost`; the machines are in :mod:`devices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Unsupported
from ..ir.dims import Size, ceildiv, evaluate, floordiv, maximum, product, symbols
from ..ir.kernel import REDUCTIONS, Index, Kernel, Program, Stmt, alternatives, taken
from ..ir.types import Type
from .chunks import private_chunk_rows
from .devices import CPU, Cpu, Device, Gpu
from .gpu_cost import DETERMINISTIC, OWN_BYTES, Estimate, Scatter, expected_hits, own_bytes, predict

MOST_SORTED = 2**31 - 3
"""Rows that a sort takes, and places that they go to."""


@dataclass(frozen=True)
class Combine:
    """One accum, taken apart.

    :param kept: row axes that stand in the index by themselves: rows that differ there never meet.
    :param gathered: whether a value read from memory stands in the index.
    :param by_column: whether such a value varies along the columns.
    :param leading: how many leading index entries hold no column; the rest are the columns, in order and whole, if ``tail``.
    """

    stmt: Stmt
    kept: tuple[str, ...]
    gathered: bool
    by_column: bool
    leading: int
    tail: bool

    @property
    def buffer(self) -> str:
        return self.stmt.buffer

    @property
    def key(self) -> tuple[tuple[Index, ...], str]:
        """What decides where a row goes; axes of size 1 decide nothing."""
        return tuple(i for i in self.stmt.index[: self.leading] if i != Index()), self.stmt.where


def combines(kernel: Kernel, types: Mapping[str, Type]) -> list[Combine]:
    """Every accum of a kernel, taken apart."""
    rows, cols = [a for a, _ in kernel.rows], dict(kernel.cols)
    out = []
    for s in kernel.accums:
        entries = s.index
        kept = tuple(dict.fromkeys(i.variable for i in entries if i.variable in rows))
        values = [v for i in entries for v, _ in i.terms if v.startswith("%")]
        by_column = any(kernel.levels[v] & cols.keys() for v in values) or bool(s.where and kernel.levels[s.where] & cols.keys())
        uses_col = [any(v in cols for v, _ in i.terms) for i in entries]
        leading = next((k for k, used in enumerate(uses_col) if used), len(entries))
        early = not _reduces(kernel, [*values, *([s.where] if s.where else [])])  # the sort comes before any pass over columns
        tail = early and all(i.variable in cols and types[s.buffer].shape[k] == cols[i.variable] for k, i in enumerate(entries) if k >= leading)
        tail &= {i.variable for i in entries[leading:]} == kernel.stmt_level(s) & cols.keys()  # each column adds into an element of its own
        out.append(Combine(s, tuple(k for k in kept if k), bool(values), by_column, leading, tail and not by_column))
    return out


def _reduces(kernel: Kernel, values: Sequence[str]) -> bool:
    """Whether values are made from the result of a pass over the columns."""
    pending, seen = list(values), set(values)
    while pending:
        s = kernel.stmts[pending.pop()]
        if s.op in REDUCTIONS:
            return True
        fresh = [u for u in s.uses if u not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def strategies(kernel: Kernel, combine: Combine) -> list[str]:
    """The ways that are right for an accum on every machine, deterministic all."""
    found = ["privatized"]
    if combine.kept:
        found.append("regular")
    if combine.gathered and combine.tail:
        found.append("segmented")
    return found


def ways(kernel: Kernel, combine: Combine, types: Mapping[str, Type], device: Device = CPU) -> list[str]:
    """The ways that are right for an accum on a device; on a GPU atomics are among them, where the hardware has them for the type."""
    found = strategies(kernel, combine)
    if isinstance(device, Gpu):
        dtype, how = types[combine.buffer].dtype, combine.stmt.combine
        if exact(combine, types) or (dtype.is_float and dtype.bits >= 16 and how == "sum"):
            found.append("atomic")
        if dtype.is_float and 16 <= dtype.bits <= 32 and how == "sum":
            found.append("atomic_fixed")
    return found


def exact(combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether atomics combine in any order to the same bits: integers that the hardware adds and compares."""
    dtype = types[combine.buffer].dtype
    return dtype.is_integer and dtype.itemsize >= 4 and combine.stmt.combine in ("sum", "max", "min")


def deterministic(strategy: str, combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether a way gives the same bits in every run."""
    return strategy in DETERMINISTIC or exact(combine, types)


def nominal(sizes: Sequence[Size], dims: Mapping[str, int] | None = None) -> dict[str, int]:
    """A value for each symbol: the given one, else 1024."""
    names: frozenset[str] = frozenset().union(*(symbols(s) for s in sizes)) if sizes else frozenset()
    return {name: (dims or {}).get(name, 1024) for name in sorted(names)}


def estimates(kernel: Kernel, combine: Combine, types: Mapping[str, Type], dims: Mapping[str, int] | None = None, device: Device = CPU,
              *, unique: int | None = None, hits: int | None = None) -> list[Estimate]:  # fmt: skip
    """The table of choose_reduction: each right strategy with its predicted bytes and time.

    :param unique: how many rows of the result are hit, where that is known; else as many as indices drawn at random hit.
    :param hits: the most hits on one row, where that is known; else the least that it can be.
    """
    if isinstance(device, Gpu):
        sizes = scatter_of(kernel, combine, types)
        bound = numbers(sizes, nominal(scatter_sizes(sizes), dims))
        return predict(bound, device, ways(kernel, combine, types, device), expected_hits(bound, unique, hits))
    assert isinstance(device, Cpu)
    return _cpu_estimates(kernel, combine, types, dims, device)


def scatter_of(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> Scatter[Size]:
    """An accum as the sizes that its cost on a GPU depends on."""
    s, type_ = combine.stmt, types[combine.buffer]
    cols = {a for a, _ in kernel.cols}
    in_columns = bool(kernel.stmt_level(s) & cols)
    place = {v for i in s.index for v, _ in i.terms}
    along = bool(place & cols) or combine.by_column  # else the columns of a row are added up first
    rows, width, keys = kernel.row_count, kernel.col_count if in_columns and along else 1, product(type_.shape)
    if combine.by_column:  # each element goes a way of its own
        rows, width = rows * width, 1
    elif combine.tail:
        width, keys = product(type_.shape[combine.leading :]), product(type_.shape[: combine.leading])
    elif along:
        keys = floordiv(product(type_.shape), maximum(width, 1))
    read, index = _loaded(kernel, s, types)
    owners = product(size for a, size in kernel.rows if a in combine.kept) if combine.kept else 0
    whole = combine.tail or width == 1
    return Scatter[Size](rows, width, keys, product(type_.shape), read, index, owners, type_.dtype.itemsize, whole, exact(combine, types), combine.gathered, own(kernel, combine, types))


def own(kernel: Kernel, combine: Combine, types: Mapping[str, Type]) -> bool:
    """Whether a privatized accum's partial results can lie in the memory of a GPU's block: few rows, a known number of them, and nothing else to do.

    Rows are added whole, each column to one element, and their places are read from memory.
    """
    keys, type_ = product(types[combine.buffer].shape[: combine.leading]), types[combine.buffer]
    alone = [s for s in kernel.body if not s.name or s.op in REDUCTIONS] == [combine.stmt] and len(kernel.passes) == 1 and bool(kernel.cols)
    if not alone or not combine.gathered or not combine.tail or not isinstance(keys, int):
        return False
    inner = type_.shape[combine.leading :]
    in_order = [i.variable for i in combine.stmt.index[combine.leading :]] == [a for a, _ in kernel.cols] and product(inner) == kernel.col_count
    return in_order and own_bytes(keys, type_.dtype.itemsize) <= OWN_BYTES


def _loaded(kernel: Kernel, s: Stmt, types: Mapping[str, Type]) -> tuple[Size, Size]:
    """Bytes that are read to make an accum's values, and its index and mask."""
    sizes = dict((*kernel.rows, *kernel.cols))
    values = _behind(kernel, s.args)
    place = _behind(kernel, [v for v in s.uses if v not in s.args]) - values
    total: list[Size] = []
    for names in (values, place):
        loads = {(x.buffer, x.index): x for x in (kernel.stmts[v] for v in sorted(names)) if x.op == "load"}
        count: Size = 0
        for x in loads.values():
            count = count + product(sizes[a] for a in sorted(kernel.levels[x.name])) * types[x.buffer].dtype.itemsize
        total.append(count)
    return total[0], total[1]


def _behind(kernel: Kernel, values: Sequence[str]) -> set[str]:
    """Values and what they are made from."""
    pending, seen = list(values), set(values)
    while pending:
        fresh = [u for u in kernel.stmts[pending.pop()].uses if u not in seen]
        seen.update(fresh)
        pending += fresh
    return seen


def scatter_sizes(s: Scatter[Size]) -> list[Size]:
    return [s.rows, s.width, s.keys, s.out, s.read, s.index, s.owners]


def numbers(s: Scatter[Size], bound: Mapping[str, int]) -> Scatter[int]:
    """The sizes with their symbols bound."""
    rows, width, keys, out, read, index, owners = (evaluate(size, bound) for size in scatter_sizes(s))
    return Scatter[int](rows, width, keys, out, read, index, owners, s.item, s.contiguous, s.exact, s.gathered, s.own)


def _cpu_estimates(kernel: Kernel, combine: Combine, types: Mapping[str, Type], dims: Mapping[str, int] | None, device: Cpu) -> list[Estimate]:
    shape = types[combine.buffer].shape
    bound = nominal([s for _, s in (*kernel.rows, *kernel.cols)] + list(shape), dims)
    rows, cols = evaluate(kernel.row_count, bound), evaluate(kernel.col_count, bound)
    out, width = evaluate(product(shape), bound), types[combine.buffer].dtype.itemsize
    level = kernel.stmt_level(combine.stmt) & {a for a, _ in kernel.cols}
    read = rows * (cols if level else 1) * width
    chunks = evaluate(ceildiv(rows, private_chunk_rows(rows, cols, out)), {})
    answer = []
    for strategy in strategies(kernel, combine):
        if strategy == "privatized":
            moved = read + 2 * chunks * out * width + out * width
            seconds, why = moved / device.bandwidth, f"{chunks} partials of {out} elements, folded in order"
        elif strategy == "regular":
            moved = read + out * width
            owners = 1
            for axis, size in kernel.rows:
                owners *= evaluate(size, bound) if axis in combine.kept else 1
            idle = max(1.0, device.workers / max(owners, 1))
            seconds, why = moved / device.bandwidth * idle, f"{owners} rows of the result, each owned by one task"
        else:
            moved = read + out * width + 8 * rows
            seconds, why = device.sort * rows + moved / device.bandwidth, f"{rows} rows sorted by index, each result row written once"
        answer.append(Estimate(strategy, moved, seconds, why))
    return answer


def check_sorts(program: Program, dims: Mapping[str, int]) -> None:
    """Positions and keys of a sort have 32 bits.

    :raises Unsupported: a kernel that runs at these sizes would sort more rows, or into more places, than ``MOST_SORTED``.
    """
    types = {b.name: b.type for b in program.buffers}
    for step in program.steps:
        kernel = taken(step, dims)
        if not isinstance(kernel, Kernel) or kernel.strategies.get(kernel.order) != "segmented":
            continue
        part = next(c for c in combines(kernel, types) if c.buffer == kernel.order)
        for what, size in (("rows", kernel.row_count), ("rows of its result", product(types[kernel.order].shape[: part.leading]))):
            count = evaluate(size, dims)
            if count > MOST_SORTED:
                raise Unsupported(f"{kernel.name}: a segmented sum over {count} {what}; it counts to {MOST_SORTED}, reductions={{'*': 'privatized'}} further")


def kernel_bytes(kernel: Kernel, types: Mapping[str, Type], dims: Mapping[str, int]) -> int:
    """Bytes a kernel must move: each buffer it reads or writes once; of a gathered buffer only the rows that are read."""
    return sum(_buffer_bytes(kernel, name, types, dims) for name in kernel.buffers)


def _buffer_bytes(kernel: Kernel, name: str, types: Mapping[str, Type], dims: Mapping[str, int]) -> int:
    count = evaluate(types[name].count, dims)
    uses = [s for s in kernel.body if s.buffer == name]
    if all(s.op == "load" for s in uses):
        count = min(count, evaluate(kernel.row_count, dims) * evaluate(kernel.col_count, dims) * len(uses))
    return count * types[name].dtype.itemsize


def floor_bytes(program: Program, dims: Mapping[str, int]) -> int:
    """Bytes the whole program cannot avoid: every input read once (of a gathered one the rows that are read) and every output written once."""
    types = {b.name: b.type for b in program.buffers}
    total = 0
    for b in program.buffers:
        if b.alias or b.kind not in ("input", "output"):
            continue
        uses = [0]
        for step in program.steps:
            for item in alternatives(step):
                touched = {n for n in (*item.reads, *item.writes) if program.root(n) == b.name}
                uses += [_buffer_bytes(item, n, types, dims) if isinstance(item, Kernel) else evaluate(b.type.nbytes, dims) for n in touched]
        total += max(uses)
    return total
