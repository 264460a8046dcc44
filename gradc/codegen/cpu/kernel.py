"""A kernel as C: its arguments, its stages, and the function that runs them.

The stages of a kernel, each a function of a task: ``key`` (the sort key of each row), ``rows`` (rows outside, passes
over the columns inside), ``foldN`` (partial results of the chunks into result N) and ``finish`` (segments
longer than a chunk, and rows of the result that no row goes to).  The templates own loops, visiting order, ownership,
partial results; statements come from the writers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ... import knobs
from ...ir.kernel import Kernel
from ...ir.types import Type
from ..declarations import Declaration, used
from ..heading import heading
from ..identifiers import foreign_axes, identifier, identifiers
from ..indent import indented
from ..jinja import render
from .collapse_axes import collapse_axes
from .records import KernelText
from .unread import without_unread
from .writer import KernelWriter

WIDTH = 120
"""Characters of a line on which declarations are put together."""
_SIZE = "const i64 "


@dataclass(frozen=True)
class KernelSource:
    """The C of a kernel.

    :param text: its functions.
    :param has_workspace: whether it has a function that says how many bytes of workspace it needs.
    :param has_thread_memory: whether it has one that says how many bytes each thread keeps for it.
    """

    text: str
    has_workspace: bool
    has_thread_memory: bool


def render_kernel(kernel: Kernel, types: Mapping[str, Type]) -> KernelSource:
    """One kernel's C, over identifiers made of the user's names."""
    dims = kernel.dims(types)
    buffers, symbols, axes = _identifiers(kernel, dims)
    named, own = kernel.renamed(types, buffers, symbols)
    named = replace(named.with_axes(axes), name=kernel.name)
    return _rendered(
        named,
        tuple(own.items()),
        tuple(symbols[name] for name in dims),
        heading(named, own, kernel.note),
        knobs.BOUNDS.get(),
    )


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


@functools.lru_cache(maxsize=4096)
def _rendered(
    kernel: Kernel, types: tuple[tuple[str, Type], ...], dims: tuple[str, ...], above: tuple[str, ...], guarded: bool
) -> KernelSource:
    writer = KernelWriter(*collapse_axes(kernel, dict(types)), dims, guarded)
    k = writer.record()
    parts = [
        f"{writer.comment(above)}\n{render('cpu/kernel/args.c.j2', k=k)}",
        *_sizes(k),
        *_stages(k, writer.mapping, writer.order == "by key"),
        _entry(k),
    ]
    return KernelSource(indented("\n".join(parts)), bool(k.workspace), bool(k.thread_memory))


def _sizes(k: KernelText) -> list[str]:
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


def _stages(k: KernelText, mapping: str, sorts: bool) -> list[str]:
    """The functions of a task.

    :param mapping: the template that visits rows.
    :param sorts: whether they are visited in the order of their keys.
    """

    def stage(name: str, body: str) -> str:
        args = Declaration("A", f"const {k.name}_args *const A = args;")
        return _function(k, f"static void {k.name}_{name}(const void *args, i64 task)", body, [args])

    keys = "starts" if k.starts else "key"
    return [
        *([stage(keys, render(f"cpu/rows/{keys}.c.j2", k=k))] if sorts else []),
        stage("rows", render(f"cpu/rows/{mapping}.c.j2", k=k)),
        *(stage(f"fold{a.number}", render(f"cpu/rows/{a.strategy.fold}.c.j2", k=k, a=a)) for a in k.privatized),
        *([stage("finish", render("cpu/rows/finish.c.j2", k=k))] if sorts else []),
    ]


def _entry(k: KernelText) -> str:
    """The function that runs the stages."""
    signature = (
        f"GRADC_SHARED int {k.name}(const gradc_ctx *ctx, void *const *buffers, const i64 *dims, char *workspace,"
        " i64 site)"
    )
    args = Declaration("A", f"const {k.name}_args *const A = &args;")
    begin, body = (render(f"cpu/kernel/{part}.c.j2", k=k) for part in ("fill_args", "entry"))
    return _function(k, signature, body, [args], begin)


def _function(
    k: KernelText, signature: str, body: str, args: Sequence[Declaration] = (), begin: str = "", laid_out: bool = True
) -> str:
    """A function with the declarations that its body needs.

    :param args: the declaration of the arguments ``A``, where they are no parameter.
    :param begin: statements before all declarations.
    :param laid_out: whether the arguments have the rows per task, and the arrays in the workspace.
    """
    chunk = "A->chunk" if laid_out else k.chunk
    chunked = "owners" if any(count.name == "owners" for count in k.counts) else "rows"
    known = [
        *args,
        *(_const(d, f"A->{d}") for d in k.dims),
        *(Declaration(b.name, f"{b.ctype} *restrict const {b.name} = A->{b.name};") for b in k.buffers),
        *k.counts,
        *(
            [_const("chunk", chunk), _const("chunks", f"gradc_chunks({chunked}, chunk)")]
            if laid_out or k.workspace
            else []
        ),
        *(Declaration(a.name, f"{a.ctype} *const {a.name} = A->{a.name};") for a in k.workspace if laid_out),
        Declaration("distant", f"const int distant = {k.distant}; /* what rows gather: it is asked for rows ahead */"),
        Declaration("since", "i64 since = 0; /* elements, since it was asked whether the call ends */"),
    ]
    body = without_unread(body)
    declared = "".join(f"{line}\n" for line in _joined(used(known, body)))
    return f"{signature} {{\n{begin}{declared}{body}}}\n"


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
