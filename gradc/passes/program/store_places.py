"""store_places: a kernel that only stacks values into an array is fused into the kernel that computes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.dims import same
from ...ir.kernel import Kernel, Program
from ...ir.statement import Index, Stmt
from ...ir.types import Type
from ..manager import program_pass
from .unroll_columns import unswitchable_axes, unswitched


@program_pass("BITS")
def store_places(program: Program) -> Program:
    """rows(n) cols(c) { store t[n] <- a, store u[n] <- b };
    rows(n) cols(k: 2) { store y[n, k] <- (load t[n] where k == 0) + (load u[n] where k == 1) }
    ->  rows(n) cols(c) { store y[n, 0] <- a + 0, store y[n, 1] <- 0 + b }

    A kernel that only stacks values reads them all once more, and branches on each element's position.  One that cannot
    be fused with the producer of its values is left as it is.
    """
    types = {b.name: b.type for b in program.buffers}
    for number, step in enumerate(program.steps):
        if isinstance(step, Kernel) and (short := unswitchable_axes(step, masks=True)):
            reader = unswitched(step, short, types)
            if reader is not None and (made := _fused(program, number, reader, types)) is not None:
                return store_places(made)
    return program


@dataclass(frozen=True)
class _Forwarded:
    """A temp between two kernels whose loads can be replaced by the value that is stored: each element is a row's, or a
    column's, of both.

    :param store: in the kernel that makes it.
    :param axes: of the one that reads it, as axes of the other.
    """

    store: Stmt
    axes: Mapping[str, str]


def _fused(program: Program, number: int, reader: Kernel, types: Mapping[str, Type]) -> Program | None:
    """(program, index of a reader, its unswitched form) -> the program with the reader fused into the one kernel that
    writes the temps it reads; None if there is no such kernel.
    """
    temps = {b.name for b in program.of_kind("temp") if not b.alias}
    read = sorted(temps.intersection(reader.reads))
    producers = {i for i, step in enumerate(program.steps) for b in read if b in step.writes}
    if len(producers) != 1:
        return None
    (at,) = producers
    producer = program.steps[at]
    aliased = {b.alias for b in program.buffers}
    others = [step for i, step in enumerate(program.steps) if i not in (at, number)]
    if not isinstance(producer, Kernel) or aliased.intersection((*read, *reader.writes)):
        return None
    if any({*read, *reader.writes}.intersection((*step.reads, *step.writes)) for step in others):
        return None
    given = [b for b in reader.reads if b not in (*read, *producer.reads)]
    if any(program.buffer[b].kind not in ("input", "const") for b in given):
        return None
    found = [_forwarded(producer, reader, b, types) for b in read]
    made = [t for t in found if t is not None]
    if len(made) < len(found) or any(t.axes != made[0].axes for t in made):
        return None
    body = _fused_body(producer, reader, made)
    steps = list(program.steps)
    steps[at] = replace(producer, body=tuple(body)).live.named_by_structure(producer.name.rpartition("_")[0], types)
    del steps[number]
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name not in read))


def _forwarded(producer: Kernel, reader: Kernel, buffer: str, types: Mapping[str, Type]) -> _Forwarded | None:
    """(producer, reader, buffer) -> the temp, if one store dominates the one load and both kernels traverse it alike;
    else None.
    """
    stores = [s for s in producer.body if s.buffer == buffer]
    loads = [s for s in reader.body if s.buffer == buffer]
    if len(stores) != 1 or len(loads) != 1 or stores[0].op != "store" or loads[0].op != "load":
        return None
    (store,), (load,) = stores, loads
    if load.where or store.dtype is not types[buffer].dtype:
        return None
    axes: dict[str, str] = {}
    for own, other in zip(load.index, store.index, strict=True):
        if own == other == Index():
            continue
        if own.variable is None or other.variable is None or own.variable in axes:
            return None
        axes[own.variable] = other.variable
    extents, given = dict((*reader.rows, *reader.cols)), dict(producer.rows)
    given |= dict(producer.cols) if producer.is_column(store) else {}
    if axes.keys() != extents.keys() or sorted(axes.values()) != sorted(given):
        return None
    return _Forwarded(store, axes) if all(same(extents[a], given[b]) for a, b in axes.items()) else None


def _fused_body(producer: Kernel, reader: Kernel, temps: Sequence[_Forwarded]) -> list[Stmt]:
    """The producer's statements followed by the reader's, with the stored values in place of the reader's loads."""
    gone = {t.store.buffer: t.store.args[0] for t in temps}
    body = [s for s in producer.body if s.buffer not in gone]
    known = {str(replace(s, name="")): s.name for s in body if s.name}
    names: dict[str, str] = dict(temps[0].axes)
    fresh = (name for k in itertools.count(len(producer.body)) if (name := f"%{k}") not in producer.stmts)
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
