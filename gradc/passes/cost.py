"""What each way to combine across rows costs: predicted bytes and time, from shapes alone.

CPU constants start from measurements on a 2-core AVX-512 machine and hold better as ratios than as times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir.dims import Size, evaluate, product, symbols
from ..ir.kernel import REDUCTIONS, Index, Kernel, Program, Stmt, alternatives
from ..ir.types import Type

CHUNK_LEAST, CHUNK_MOST = 8, 64
"""Rows per chunk on the CPU: clamp(N/256, 8, 64)."""


@dataclass(frozen=True)
class Device:
    """What the model knows of a machine.

    :param bandwidth: bytes/s of a copy.  :param sort: seconds per row of a counting sort.  :param workers: cores assumed.
    """

    name: str = "cpu"
    bandwidth: float = 20e9
    sort: float = 10e-9
    workers: int = 4


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
    """The ways that are right for an accum, deterministic all."""
    found = ["privatized"]
    if combine.kept:
        found.append("regular")
    if combine.gathered and combine.tail:
        found.append("segmented")
    return found


@dataclass(frozen=True)
class Estimate:
    """A strategy's predicted cost.

    :param bytes: moved by the kernel's accum under this strategy.  :param seconds: predicted.  :param why: in words.
    """

    strategy: str
    bytes: int
    seconds: float
    why: str


def nominal(sizes: Sequence[Size], dims: Mapping[str, int] | None = None) -> dict[str, int]:
    """A value for each symbol: the given one, else 1024."""
    names: frozenset[str] = frozenset().union(*(symbols(s) for s in sizes)) if sizes else frozenset()
    return {name: (dims or {}).get(name, 1024) for name in sorted(names)}


def chunk_rows(rows: int) -> int:
    return max(CHUNK_LEAST, min(rows // 256, CHUNK_MOST))


def estimates(kernel: Kernel, combine: Combine, types: Mapping[str, Type], dims: Mapping[str, int] | None = None, device: Device = Device()) -> list[Estimate]:
    """The table of choose_reduction: each right strategy with its predicted bytes and time."""
    shape = types[combine.buffer].shape
    bound = nominal([s for _, s in (*kernel.rows, *kernel.cols)] + list(shape), dims)
    rows, cols = evaluate(kernel.row_count, bound), evaluate(kernel.col_count, bound)
    out, width = evaluate(product(shape), bound), types[combine.buffer].dtype.itemsize
    level = kernel.stmt_level(combine.stmt) & {a for a, _ in kernel.cols}
    read = rows * (cols if level else 1) * width
    chunks = -(-rows // chunk_rows(rows)) if rows else 0
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


def sort_limit(program: Program, dims: Mapping[str, int]) -> str:
    """Why a segmented kernel cannot run at these sizes: positions and keys are 32-bit; "" if all can."""
    types = {b.name: b.type for b in program.buffers}
    for kernel in program.kernels:
        for part in combines(kernel, types) if "segmented" in kernel.strategies.values() else ():
            rows, keys = evaluate(kernel.row_count, dims), evaluate(product(types[part.buffer].shape[: part.leading]), dims)
            if kernel.strategies.get(part.buffer) == "segmented" and max(rows, keys) >= 2**31 - 2:
                return f"{kernel.name} sorts {rows} rows into {keys}: 2^31 - 3 are the most"
    return ""


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
