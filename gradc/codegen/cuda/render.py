"""Programs as CUDA: one text of kernels, and the launches that run them.

The statements are the ones of every target (:mod:`gradc.codegen.expr`); ``templates/cuda/rows.cu.j2`` owns threads,
visiting order, partials and flush, and :mod:`gradc.codegen.cuda.rows` says what it needs to know of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from ...ir.kernel import Kernel, Program, alternatives
from ...ir.types import Type
from ..text import standalone
from .kernel import CudaKernel, Stage
from .products import support
from .rows import Writer
from .tasks import STRIP

__all__ = ["STRIP", "CudaKernel", "Stage", "cuda_kernel", "rebind", "prelude", "render_cuda"]


def render_cuda(program: Program) -> tuple[str, dict[str, CudaKernel]]:
    """The text of a program, one translation unit, and its kernels by name."""
    types = {b.name: b.type for b in program.buffers}
    kernels: dict[str, CudaKernel] = {}
    for step in program.steps:
        for item in alternatives(step):
            if isinstance(item, Kernel) and item.name not in kernels:
                kernels[item.name] = cuda_kernel(item, types)
    sorts = [standalone("cuda/sort.cu")] if any(k.keys is not None for k in kernels.values()) else []
    return "\n".join([prelude(), *sorts, *(k.text for k in kernels.values()), support(program)]), kernels


def prelude() -> str:
    """What stands above every kernel."""
    return f"{standalone('cuda/math.h')}\n{standalone('cuda/program.h')}\nenum {{ GRADC_STRIP = {STRIP} }};\n"


def cuda_kernel(kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """One kernel's functions, made from its canonical form: no name of the user's reaches its text."""
    plain, own = kernel.canonical(types)
    return rebind(_made(replace(plain, name=kernel.name), tuple(own.items())), kernel, types)


def rebind(made: CudaKernel, kernel: Kernel, types: Mapping[str, Type]) -> CudaKernel:
    """What was made of a kernel, for another one of the same structure and name: its buffers, dims and indices are its
    own.
    """
    sites = tuple((s.attr("op"), s.attr("source")) for s in kernel.body if s.op == "check")
    return replace(made, buffers=kernel.buffers, dims=tuple(kernel.dims(types)), sites=sites)


@functools.lru_cache(maxsize=4096)
def _made(kernel: Kernel, types: tuple[tuple[str, Type], ...]) -> CudaKernel:
    return Writer(kernel, dict(types)).made()
