"""Loop fusion: what one kernel stores for another stays in registers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...analysis.lifetimes import checks_data
from ...ir.dims import same
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Index, Stmt
from .legality import IllegalMove, refuse, require_open


@dataclass(frozen=True)
class _Forwarded:
    """A temp between two kernels whose loads can be replaced by the value that is stored: each element is a row's, or a
    column's, of both.

    :param store: in the kernel that makes it.
    :param axes: of the one that reads it, as axes of the other.
    """

    store: Stmt
    axes: Mapping[str, str]


def fuse(program: Program, first: int, second: int) -> Program:
    """rows(n) { store t[n] <- f };  rows(i) { store y[i] <- g(t[i]) }  ->  rows(n) { store y[n] <- g(f) }

    :param first, second: the numbers of two steps; all temps that the second reads of the first go.
    :raises IllegalMove: they are no kernels; the second does more than to compute and store elements; the first hands
        it no temp, or one that somebody else touches, or whose elements it visits otherwise; a step between writes what
        the second reads, or touches what it writes.
    """
    producer, reader = program.steps[first], program.steps[second]
    if not isinstance(producer, Kernel) or not isinstance(reader, Kernel) or not first < second:
        raise IllegalMove(f"fuse of {producer.name} and {reader.name}: they are not two kernels in order")
    require_open("fuse", producer)
    require_open("fuse", reader)
    if any(s.op in REDUCTIONS or s.op in ("scan", "accum", "check") for s in reader.body):
        refuse("fuse", reader, "it does more than to store elements")
    handed = [b for b in sorted(reader.reads) if b in producer.writes]
    memory = {b.name: program.root(b.name) for b in program.buffers}
    for b in handed:
        others = [s for i, s in enumerate(program.steps) if i not in (first, second)]
        shared = [name for name, root in memory.items() if root == memory[b]]
        if program.buffer[b].kind != "temp" or len(shared) > 1 or any(b in (*s.reads, *s.writes) for s in others):
            refuse("fuse", reader, f"{b} is not between these two alone")
    _require_movable(program, first, second, reader, handed)
    temps = [_forwarded(producer, reader, b) for b in handed]
    if not temps or any(t.axes != temps[0].axes for t in temps):
        refuse("fuse", reader, "it has no axes in common with the producer")
    fused = replace(producer, body=tuple(_fused_body(producer, reader, temps))).live.rehashed(program.types)
    steps = [fused if i == first else step for i, step in enumerate(program.steps) if i != second]
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name not in handed))


def _forwarded(producer: Kernel, reader: Kernel, buffer: str) -> _Forwarded:
    """
    :raises IllegalMove: not one store is what the one load reads, or the kernels do not traverse the temp alike.
    """
    stores = [s for s in producer.body if s.buffer == buffer]
    loads = [s for s in reader.body if s.buffer == buffer]
    if [s.op for s in (*stores, *loads)] != ["store", "load"] or loads[0].where:
        refuse("fuse", reader, f"{buffer} is not stored once and loaded once")
    (store,), (load,) = stores, loads
    axes: dict[str, str] = {}
    for own, other in zip(load.index, store.index, strict=True):
        if own == other == Index():
            continue
        if own.variable is None or other.variable is None or own.variable in axes:
            refuse("fuse", reader, f"{buffer} is read elsewhere than it is stored")
        axes[own.variable] = other.variable
    extents, given = dict((*reader.rows, *reader.cols)), dict(producer.rows)
    given |= dict(producer.cols) if producer.is_column(store) else {}
    alike = axes.keys() == extents.keys() and sorted(axes.values()) == sorted(given)
    if not alike or not all(same(extents[a], given[b]) for a, b in axes.items()):
        refuse("fuse", reader, f"it does not traverse {buffer} as it is stored")
    return _Forwarded(store, axes)


def fuse_siblings(program: Program, first: int, second: int) -> Program:
    """rows(n) { accum y[%t] <- f(x[n]) };  rows(i) { store z[i] <- g(x[i]) }
    ->  rows(n) { accum y[%t] <- f(x[n]); store z[n] <- g(x[n]) }: what both load and compute is there once.

    :param first, second: the numbers of two steps; the fused one is at the place of the first, and has its axes.
    :raises IllegalMove: they are no kernels; one touches what the other writes; one checks data; they load nothing at
        one place of axes that are the rows and the columns of both; a step between checks data, writes what the second
        reads, or touches what it writes.
    """
    one, other = program.steps[first], program.steps[second]
    if not isinstance(one, Kernel) or not isinstance(other, Kernel) or not first < second:
        raise IllegalMove(f"fuse of {one.name} and {other.name}: they are not two kernels in order")
    require_open("fuse", one)
    require_open("fuse", other)
    _require_movable(program, first, second, other)
    if any(map(checks_data, program.steps[first : second + 1])):
        refuse("fuse", other, "a check of data comes between")
    axes = common_axes(one, other)
    if axes is None:
        refuse("fuse", other, f"it loads nothing that {one.name} loads at the same place")
    for mine, its in ((one.rows, other.rows), (one.cols, other.cols)):
        if {a for a, _ in mine} != {axes[a] for a, _ in its}:
            refuse("fuse", other, f"other axes are its columns than those of {one.name}")
    body = tuple(_appended(one, [*one.body], other, axes, {}))
    fused = replace(one, body=body).live.rehashed(program.types)
    steps = [fused if i == first else step for i, step in enumerate(program.steps) if i != second]
    return replace(program, steps=tuple(steps))


def _require_movable(program: Program, first: int, second: int, reader: Kernel, handed: Collection[str] = ()) -> None:
    """
    :param reader: the second step, to be where the first is.  :param handed: what it reads in registers there.
    :raises IllegalMove: one of the steps before writes what it reads, or touches what it writes.
    """
    memory = {b.name: program.root(b.name) for b in program.buffers}
    read, written = ({memory[b] for b in own if b not in handed} for own in (reader.reads, reader.writes))
    for step in program.steps[first:second]:
        if {memory[b] for b in step.writes} & read or {memory[b] for b in (*step.reads, *step.writes)} & written:
            refuse("fuse", reader, f"{step.name} comes between")


def common_axes(first: Kernel, second: Kernel) -> Mapping[str, str] | None:
    """The second kernel's axes as axes of the first one, by a buffer that both load at one place of all their axes;
    None: there is none.
    """
    sizes = dict((*first.rows, *first.cols))
    for load, other in ((a, b) for a in first.body if a.op == "load" for b in second.body if b.op == "load"):
        if load.buffer != other.buffer:
            continue
        entries = [(j.variable, i.variable) for i, j in zip(load.index, other.index, strict=True)]
        axes = {own: its for own, its in entries if own is not None and its is not None and its in sizes}
        extents = (*second.rows, *second.cols)
        one_to_one = axes.keys() == {a for a, _ in extents} and sorted(axes.values()) == sorted(sizes)
        if one_to_one and all(same(n, sizes[axes[a]]) for a, n in extents):
            return axes
    return None


def _fused_body(producer: Kernel, reader: Kernel, temps: Sequence[_Forwarded]) -> list[Stmt]:
    """The producer's statements followed by the reader's, with the stored values in place of the reader's loads."""
    gone = {t.store.buffer: t.store.args[0] for t in temps}
    return _appended(producer, [s for s in producer.body if s.buffer not in gone], reader, temps[0].axes, gone)


def _appended(
    producer: Kernel, body: list[Stmt], reader: Kernel, axes: Mapping[str, str], gone: Mapping[str, str]
) -> list[Stmt]:
    """Statements of one kernel followed by those of another, each distinct value once.

    :param axes: of the other, as axes of the first.
    :param gone: buffers that the other does not load: the value that is in each.
    """
    known = {str(replace(s, name="")): s.name for s in body if s.name}
    names, fresh = dict(axes), producer.fresh_names()
    for s in reader.body:
        if s.buffer in gone:
            names[s.name] = gone[s.buffer]
            continue
        index = tuple(i.renamed(names) for i in s.index)
        own = replace(s, name="", args=tuple(names[a] for a in s.args), index=index, where=names.get(s.where, ""))
        if not s.name:
            body.append(own)
            continue
        if (text := str(own)) not in known:
            known[text] = next(fresh)
            body.append(replace(own, name=known[text]))
        names[s.name] = known[text]
    return body
