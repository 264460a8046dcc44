"""A kernel as C: its arguments, its stages, and the function that runs them.

The stages of a kernel, each a function of a task: ``key`` (the sort key of each row), or ``starts`` (where the rows of
each key begin), ``rows`` (rows outside, passes over the columns inside), ``foldN`` (partial results of the chunks into
result N) and ``finish`` (segments longer than a chunk, and rows of the result that no row goes to).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import knobs
from ...analysis.families import Family, Types
from ...ir.kernel import Kernel
from ...ir.statement import Index
from ...ir.types import Type
from ..declarations import Declaration, used
from ..heading import heading, kernel_comment
from ..identifiers import foreign_axes, identifier, identifiers
from ..indent import indented
from ..jinja import render
from .accums import accums_of
from .certain_masks import without_certain_masks
from .choose_mapping import choose_mapping
from .collapse_axes import collapse_axes
from .facts import facts_of
from .lanes_along_rows import lanes_along_rows
from .mapping import Stage
from .mappings.finished_rows import FinishedRows
from .phase_writer import PhaseWriter
from .row_program import RowProgram
from .unread import without_unread

WIDTH = 120
"""Characters of a line on which declarations are put together."""
_SIZE = "const i64 "


@dataclass(frozen=True)
class KernelSource:
    """The C of a kernel.

    :param name: of the kernel.
    :param text: its functions.
    :param mapping: of its rows and columns to tasks and vector lanes, :param reason: and why it is this one.
    :param has_workspace: whether it has a function that says how many bytes of workspace it needs.
    :param has_thread_memory: whether it has one that says how many bytes each thread keeps for it.
    """

    name: str
    text: str
    mapping: str
    reason: str
    has_workspace: bool
    has_thread_memory: bool


def render_kernel(kernel: Kernel, types: Mapping[str, Type]) -> KernelSource:
    """One kernel's C, over identifiers made of the user's names."""
    return _rendered(_named(kernel, types, kernel.dims(types)), None, knobs.BOUNDS.get())


def render_forwarding(kernel: Kernel, then: Kernel, types: Mapping[str, Type]) -> KernelSource:
    """The C of a kernel that hands the rows of its result to another one, as one kernel: it takes the buffers and dims
    of both, one after the other.
    """
    (buffer,) = kernel.writes
    name = forwarding_name(kernel, then)
    row = types[buffer].with_shape(1, *types[buffer].shape[1:])
    body = (s.altered(index=(Index(), *s.index[1:])) if s.buffer == buffer else s for s in then.body)
    reader = replace(then, name=f"{name}_then", body=tuple(body))
    first = _named(replace(kernel, name=name), types, kernel.dims(types))
    second = _named(reader, {**types, buffer: row}, then.dims(types), of_row=buffer)  # the dims that a caller passes
    return _rendered(first, second, knobs.BOUNDS.get())


def same_mapping(kernel: Kernel, types: Types, family: Family) -> bool:
    """Whether tasks and vectors go through a kernel in the same way where the numbers of its family are not known, and
    sums are added up in the same types and order.
    """
    guarded = knobs.BOUNDS.get()

    def decided(k: Kernel, t: Types) -> tuple[object, ...]:
        facts = facts_of(*_simplified(k, {b: t[b] for b in k.buffers}), guarded)
        sums = [(a.partial, a.wide_accumulator, a.block_sums) for a in accums_of(facts, forwarded=False).values()]
        axes = [a for a, _ in facts.kernel.rows], [a for a, _ in facts.kernel.cols]
        return choose_mapping(facts), sums, [axis for axis, _ in facts.member_axes], axes

    return decided(kernel, types) == decided(family.kernel, family.types)


def forwarding_name(kernel: Kernel, then: Kernel) -> str:
    """The name of the two as one kernel."""
    return f"{kernel.name}_{then.name}"


@dataclass(frozen=True)
class _Named:
    """A kernel over identifiers.

    :param types: of its buffers, :param dims: its symbols in the order in which a caller passes their values,
    :param above: the lines of its comment.
    :param of_row: the buffer that is one row, which another kernel hands to it, or "".
    """

    kernel: Kernel
    types: tuple[tuple[str, Type], ...]
    dims: tuple[str, ...]
    above: tuple[str, ...]
    of_row: str


def _named(kernel: Kernel, types: Mapping[str, Type], dims: Sequence[str], of_row: str = "") -> _Named:
    buffers, symbols, axes = _identifiers(kernel, dims)
    named, own = kernel.renamed(types, buffers, symbols)
    named = replace(named.with_axes(axes), name=kernel.name)
    above = heading(named, own, kernel.note)
    return _Named(named, tuple(own.items()), tuple(symbols[name] for name in dims), above, buffers.get(of_row, ""))


def _identifiers(kernel: Kernel, dims: Sequence[str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Identifiers of its buffers, dims and axes, which share one scope with the names of its functions."""
    axes = foreign_axes(kernel)
    texts = [*kernel.buffers, *(f"{d} size" if d in kernel.buffers else d for d in dims), *(f"{a} axis" for a in axes)]
    texts = [f"the {t}" if identifier(t).startswith(kernel.name) else t for t in texts]
    words = identifiers(texts, "cpu")
    given = [words[text] for text in texts]
    after_buffers, after_dims = len(kernel.buffers), len(kernel.buffers) + len(dims)
    return (
        dict(zip(kernel.buffers, given[:after_buffers], strict=True)),
        dict(zip(dims, given[after_buffers:after_dims], strict=True)),
        dict(zip(axes, given[after_dims:], strict=True)),
    )


def _simplified(kernel: Kernel, types: Mapping[str, Type]) -> tuple[Kernel, Mapping[str, Type]]:
    """The kernel as it is written."""
    collapsed, types = collapse_axes(without_certain_masks(kernel), types)
    return lanes_along_rows(collapsed), types


@functools.lru_cache(maxsize=4096)
def _rendered(named: _Named, then: _Named | None, guarded: bool) -> KernelSource:
    facts = facts_of(*_simplified(named.kernel, dict(named.types)), guarded)
    mapping, accums = choose_mapping(facts), accums_of(facts, forwarded=then is not None)
    writer = PhaseWriter(facts, mapping, accums)
    k = RowProgram(
        accums=tuple(accums.values()),
        facts=facts,
        mapping=mapping,
        dims=named.dims,
        writer=writer,
        then=_reader(then, guarded) if then else None,
    )
    parts = [
        *(_finished_rows(k.then, then) if k.then and then else ()),
        f"{kernel_comment(facts.kernel, named.above)}\n{render('cpu/kernel/args.c.j2', k=k)}",
        *_sizes(k),
        *(_stage(k, stage, mapping.given(writer) if stage.name == "rows" else {}) for stage in k.stages),
        _entry(k),
    ]
    text = indented("\n".join(parts))
    return KernelSource(k.name, text, mapping.name(), mapping.reason, bool(k.workspace), bool(k.thread_memory))


def _reader(named: _Named, guarded: bool) -> RowProgram:
    """The kernel that finished rows are handed to."""
    facts = facts_of(named.kernel, dict(named.types), guarded)
    mapping = FinishedRows(reason="another kernel hands its rows to it, one by one")
    writer = PhaseWriter(facts, mapping, {})
    return RowProgram(accums=(), facts=facts, mapping=mapping, dims=named.dims, writer=writer, of_row=named.of_row)


def _finished_rows(k: RowProgram, named: _Named) -> list[str]:
    """The functions of a kernel that finished rows are handed to: of a row, and of what a later one gathers."""
    args = f"const {k.name}_args *A, i64 r"
    ahead = render("cpu/kernel/ask_ahead.c.j2", k=k) if k.ahead else ""
    size = f"static i64 {k.name}_thread_bytes(const {k.name}_args *A)"
    return [
        f"{kernel_comment(k.facts.kernel, named.above)}\n{render('cpu/kernel/args.c.j2', k=k)}",
        *([_function(k, size, render("cpu/kernel/thread_bytes.c.j2", k=k))] if k.thread_memory else []),
        # a compiler may leave out the call of a function that does nothing but prefetch, unless it is inlined first
        *(
            [_function(k, f"static inline __attribute__((always_inline)) void {k.name}_ask_ahead({args})", ahead)]
            if ahead
            else []
        ),
        *(
            [_function(k, f"static inline int {k.name}_idle({args})", render("cpu/kernel/idle.c.j2", k=k))]
            if k.without_effect
            else []
        ),
        _function(k, f"static void {k.name}_finished_row({args})", render("cpu/kernel/finished_row.c.j2", k=k)),
    ]


def _sizes(k: RowProgram) -> list[str]:
    """The functions that lay out memory, and say how much there is of it."""
    memory = ", char *workspace" if k.workspace else ""
    signature = f"static {'i64' if k.workspace else 'void'} {k.name}_layout({k.name}_args *A{memory})"
    parts = [_function(k, signature, render("cpu/kernel/layout.c.j2", k=k), laid_out=False)]
    if k.thread_memory:
        signature = f"static i64 {k.name}_thread_bytes(const {k.name}_args *A)"
        parts.append(_function(k, signature, render("cpu/kernel/thread_bytes.c.j2", k=k)))
    if k.workspace or k.thread_memory:
        parts.append(render("cpu/kernel/sizes.c.j2", k=k))
    return parts


def _stage(k: RowProgram, stage: Stage, given: Mapping[str, Any]) -> str:
    """The function of a task of a stage.

    :param given: records that its template names.
    """
    of_fold = {f"fold{a.number}": a for a in k.privatized}
    body = render(f"cpu/kernel/{stage.template}.c.j2", k=k, m=k.mapping, a=of_fold.get(stage.name), **given)
    args = Declaration("A", f"const {k.name}_args *const A = args;")
    return _function(k, f"static void {k.name}_{stage.name}(const void *args, i64 task)", body, [args])


def _entry(k: RowProgram) -> str:
    """The function that runs the stages."""
    signature = (
        f"GRADC_SHARED int {k.name}(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace,"
        " i64 site)"
    )
    args = Declaration("A", f"{render('cpu/kernel/fill_args.c.j2', k=k)}const {k.name}_args *const A = &args;")
    return _function(k, signature, render("cpu/kernel/entry.c.j2", k=k), [args])


def _function(k: RowProgram, signature: str, body: str, args: Sequence[Declaration] = (), laid_out: bool = True) -> str:
    """A function with the declarations that its body needs.

    :param args: the declaration of the arguments ``A``, where they are no parameter.
    :param laid_out: whether the arguments have the rows per task, and the arrays in the workspace.
    """
    chunk = "A->chunk" if laid_out else k.chunk
    known = [
        *args,
        *(_const(d, f"A->{d}") for d in k.dims),
        *(Declaration(b, f"{ctype} *restrict const {b} = A->{b};") for ctype, b in k.buffers),
        *k.counts,
        *(
            [_const("chunk", chunk), _const("chunks", f"gradc_chunks({k.mapping.chunked}, chunk)")]
            if laid_out or k.workspace
            else []
        ),
        *(Declaration(a.name, f"{a.ctype} *const {a.name} = A->{a.name};") for a in k.workspace if laid_out),
        Declaration("distant", f"const int distant = {k.distant}; /* what rows gather: it is asked for rows ahead */"),
        Declaration("unknown_zero", "const i64 unknown_zero = gradc_unknown_zero();"),
        Declaration("since", "i64 since = 0; /* elements, since it was asked whether the call ends */"),
    ]
    body = without_unread(body)
    declared = "".join(f"{line}\n" for line in _joined(used(known, body)))
    return f"{signature} {{\n{declared}{body}}}\n"


def _joined(lines: Sequence[str]) -> list[str]:
    """Declarations of which neighbours of one type share a line."""
    out: list[str] = []
    for line in lines:
        last = out[-1] if out else ""
        alike = all(re.fullmatch(rf"{_SIZE}\w+ = .*;", text) for text in (last, line))
        if alike and len(last) + len(line) < WIDTH:
            out[-1] = f"{last[:-1]}, {line.removeprefix(_SIZE)}"
        else:
            out.append(line)
    return out


def _const(name: str, value: str) -> Declaration:
    return Declaration(name, f"{_SIZE}{name} = {value};")
