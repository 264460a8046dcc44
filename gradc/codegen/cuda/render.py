"""Programs as CUDA: one text of kernels, and the launches that run them.

The statements are the ones of every target (:mod:`gradc.codegen.expr`); the templates of ``cuda/kernel`` own threads,
visiting order, partial results and flush, and :mod:`gradc.codegen.cuda.functions` says what they need to know.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...analysis.families import Family, families
from ...ir.kernel import Kernel, Loop, Program, alternatives
from ...ir.types import Type
from ..heading import heading
from ..identifiers import foreign_axes, identifiers
from ..text import standalone
from .batches import started_together, with_members
from .calls import support
from .facts import facts_of
from .finished_rows import launched, mapping_of, parted, refuse_handed_on
from .fixed_sums import elements_as_rows
from .functions import cuda_functions
from .kernel import CudaKernel, Stage, own_dims
from .mappings.column_strips import ColumnStrips
from .tiles.kernel import MAPPING, refuse_tiles, tile_kernel

__all__ = ["CudaKernel", "Stage", "cuda_kernel", "rebind", "prelude", "render_cuda"]

_CANONICAL = re.compile(r"\b[bn]\d+\b")
"""Canonical names of buffers and dims; no identifier of a user's name is one."""


def render_cuda(program: Program) -> tuple[str, dict[str, CudaKernel]]:
    """The text of a program, one translation unit, and its kernels by name."""
    refuse_tiles(program, "cuda")
    refuse_handed_on(program, "cuda")
    types = program.types
    kernels: dict[str, CudaKernel] = {}
    for step in program.steps:
        if isinstance(step, Loop) and step.tile is not None:
            tile = tile_kernel(step, program)
            kernels.setdefault(tile.name, tile)
    tiled = {item for step in program.loops if step.tile is not None for item in step.items}
    items = [item for step in launched(program) if step is not None for item in alternatives(step)]
    plain = {k.name: k for k in items if isinstance(k, Kernel) and k not in tiled}
    for family in families(plain.values(), types, _fits, flat=True):
        kernels |= {k.name: made for k, made in zip(family.members, _of_family(family, types), strict=True)}
    sorts = [standalone("cuda/sort.cu")] if any(k.keys is not None for k in kernels.values()) else []
    if not sorts and any(k.chunk_keys for k in kernels.values()):  # a part of that text
        sorts = [standalone("cuda/sort_tile.h")]
    scans = [standalone("cuda/scans.h")] if any(k.scans for k in program.kernels) else []
    exp_sums = [standalone("cuda/exp_sums.h")] if any(k.exp_sums for k in kernels.values()) else []
    tiles = [standalone("cuda/tiles.h")] if any(k.mapping == MAPPING for k in kernels.values()) else []
    text = "\n".join(
        [
            prelude(),
            *sorts,
            *scans,
            *exp_sums,
            *tiles,
            *dict.fromkeys(k.text for k in kernels.values()),
            support(program),
        ]
    )
    if program.batches:
        batch = [prelude(), standalone("cuda/batch.h")]
        text = "\n".join([*batch, with_members(text[len(batch[0]) + 1 :], started_together(program, kernels))])
    return text, kernels


def _of_family(family: Family, types: Mapping[str, Type]) -> Iterator[CudaKernel]:
    """The functions of each member, which are the same but for what they are given."""
    made = cuda_kernel(family.kernel, family.types)
    for kernel, sizes in zip(family.members, family.sizes, strict=True):
        given = tuple(sizes[d] if isinstance(d, str) else d for d in made.dims)
        yield rebind(replace(made, name=kernel.name, symbols=kernel.dims(types), dims=given), kernel, types)


def _fits(kernel: Kernel, types: Mapping[str, Type], family: Family) -> bool:
    """Whether threads go through a kernel in the same way where the numbers are not known, and add up in the same types
    and order; a map of many strips may have one.
    """
    both = [(kernel, types), (family.kernel, family.types)]
    pairs = [(parted(k, t), t) for k, t in both]
    facts = [facts_of(elements_as_rows(first), t) for (first, _), t in pairs]
    readers = [facts_of(then, t) if then is not None else None for (_, then), t in pairs]
    own, open_ = ([f.rows.wide_accumulator(s) for s in f.kernel.accums] for f in facts)
    if own != open_:
        return False
    mapping, open_mapping = map(mapping_of, facts, readers)
    if isinstance(mapping, ColumnStrips) and isinstance(open_mapping, ColumnStrips):
        return mapping.threads == open_mapping.threads

    def decided(made: CudaKernel) -> tuple[object, ...]:
        arrays = [len(each) for each in (made.scratch, made.fixed, made.f32_staged, made.split_rows)]
        stages = [(stage.kind, stage.width) for stage in made.stages]
        return stages, arrays, made.most_chunks, made.masked, made.groups

    alike = replace(mapping, tasks=None) == replace(open_mapping, tasks=None)
    return alike and len({str(decided(cuda_kernel(k, t))) for k, t in both}) == 1


def prelude() -> str:
    """What stands above every kernel."""
    return f"{standalone('cuda/math.h')}\n{standalone('cuda/program.h')}\n"


def cuda_kernel(kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """One kernel's functions; of the user's names nothing but identifiers reaches their text.

    They are written over the canonical names, b0 and n0, which are replaced at last: the order of a size's terms goes
    by names, and what is compiled must not depend on those of the user.
    """
    dims = kernel.dims(types)
    axes = foreign_axes(kernel)
    # a buffer, a dim and an axis may share a name: blanks tell them apart, and reach no identifier
    names = identifiers([*kernel.buffers, *(f"{d} " for d in dims), *(f"{a}  " for a in axes)])
    plain, own = kernel.canonical(types)
    plain = replace(plain.with_axes({a: names[f"{a}  "] for a in axes}), name=kernel.name)
    made = _made(plain, tuple(own.items()))
    words = dict(zip(own, (names[b] for b in kernel.buffers), strict=True))
    words |= dict(zip(own_dims(made), (names[f"{d} "] for d in dims), strict=True))
    text = _CANONICAL.sub(lambda word: words.get(word[0], word[0]), made.text)
    named, named_types = kernel.renamed(types, {b: names[b] for b in kernel.buffers}, {d: names[f"{d} "] for d in dims})
    lines = "".join(f" * {line}".rstrip() + "\n" for line in (*heading(named, named_types, kernel.note), ""))
    return rebind(replace(made, text=text.replace("/*\n", f"/*\n{lines}", 1)), kernel, types)


def rebind(made: CudaKernel, kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """What was made of a kernel, for another one of the same structure and name: its buffers, dims and indices are its
    own.
    """
    sites = tuple((s.attr("op"), s.attr("source")) for s in kernel.body if s.op == "check")
    symbols = kernel.dims(types)
    names = dict(zip(made.symbols, symbols, strict=True))
    dims = tuple(d if isinstance(d, int) else names[d] for d in made.dims)
    return replace(made, buffers=kernel.buffers, symbols=symbols, dims=dims, sites=sites)


@functools.lru_cache(maxsize=4096)
def _made(kernel: Kernel, types: tuple[tuple[str, Type], ...]) -> CudaKernel:
    return cuda_functions(kernel, dict(types))
