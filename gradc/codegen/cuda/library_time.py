"""How long calls of cuBLAS and cuDNN take on a GPU, as a launch plan has them: what they compute and move, for
:mod:`gradc.analysis.library_time`.

Of 29 products that an H200 was given (bf16 and f32, results of both, 9.7 GFLOP to 1.1 TFLOP;
``benchmarks/results/gpu-nvidia-h200-2026-11-28-tiles.json``) all took within 10 % of it.
"""

from __future__ import annotations

from math import prod

from ...analysis import library_time
from ...analysis.library_time import CallTime
from ...ir.types import dtype as dtype_of
from ...targets.devices import Gpu
from ...targets.gpu import MATRIX_ALIGN
from .actions import Convolution, Library, Side, Strided


def library_seconds(library: Library, gpu: Gpu) -> float:
    """Predicted seconds of all calls of a product."""
    return product_time(library, gpu).seconds


def product_time(library: Library, gpu: Gpu) -> CallTime:
    """The predicted time of all calls of a product."""
    p, count = library.product, library.matrices
    flops = 2.0 * count * library.m * library.n * library.k
    read = sum(map(_held_bytes, (p.a, p.b)))
    written = count * library.m * library.n * library.dtype.itemsize * (2 if p.add else 1)
    # what an epilogue reads and writes beside the result moves when that does
    written += sum(part.nbytes for part in (*p.epilogue.reads, *p.epilogue.writes))
    calls = 1 if library.pointers is not None else len(library.calls)
    kind = dtype_of(library.read).name
    return library_time.product_time(gpu, kind, flops, read, written, is_aligned(library), calls)


def convolution_time(asked: Convolution, gpu: Gpu) -> CallTime:
    """The predicted time of a convolution by its library.

    Its kernels for 16-bit floats read and write channels last: what lies channels first is copied before, or after
    (by the workspace that cuDNN 9.28 asks for, which is that of both copies).
    """
    moved = 0
    for x in (asked.image, asked.filter, asked.response):
        copied = asked.dtype.itemsize == 2 and x.shape[1] > 1 and x.strides[1] != 1
        moved += x.nbytes * (3 if copied else 1)
    return library_time.convolution_time(gpu, dtype_of(asked.dtype).name, 2.0 * asked.products, moved)


def is_aligned(library: Library) -> bool:
    """Whether cuBLAS has its fast kernels for a product of 16-bit operands; those of others are one kind.

    Matrices and their rows begin at multiples of 16 bytes (cuBLAS documentation, "Tensor Core Usage"), and so do those
    extents that a kernel must not go beyond by a part of 16 bytes: of a result's rows, which it would write, and of the
    summed axis where that is an operand's unit stride, which it would add.  Beyond the others it reads, and drops what
    comes of it: with V odd and rows padded to multiples of 8, an H200 had ``align1`` kernels for x[N,D] w[V,D] and
    dy[N,V] w[V,D], and an ``align8`` one for dy[N,V] x[N,D] (the table ``linear_cross_entropy`` of
    ``benchmarks/results/gpu-nvidia-h200-2026-11-28.json``).
    """
    if library.read.itemsize > 2:
        return True
    p = library.product
    summed = library.k if library.b.transposed or not library.a.transposed else 0
    sides = ((p.a, library.a), (p.b, library.b), (p.out, library.out))
    ends = (library.n * library.dtype.itemsize, summed * library.read.itemsize)
    return all(begins_aligned(*side) for side in sides) and not any(end % MATRIX_ALIGN for end in ends)


def begins_aligned(operand: Strided, side: Side) -> bool:
    """Whether all rows of all matrices of an operand begin at multiples of 16 bytes, if its memory does."""
    size = operand.part.dtype.itemsize
    steps = [step for count, step in zip(operand.shape[:-2], operand.strides[:-2], strict=True) if count > 1]
    at = (operand.part.start, operand.skipped, side.leading * size, *(step * size for step in steps))
    return not any(place % MATRIX_ALIGN for place in at)


def _held_bytes(operand: Strided) -> int:
    """Bytes of an operand's matrices, each once."""
    batch = zip(operand.shape[:-2], operand.strides[:-2], strict=True)
    held = prod(count for count, step in batch if step) * operand.shape[-2] * operand.shape[-1]
    return held * operand.part.dtype.itemsize
