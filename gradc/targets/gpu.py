"""What a GPU of NVIDIA's is, in numbers that all architectures share; what differs is in :mod:`gradc.targets.devices`.

Each says its unit, where it is from and what depends on it.  "Published": CUDA C++ Programming Guide, technical
specifications per compute capability; "estimate": chosen by what it means, no measurement kept here moves it.
"""

from __future__ import annotations

from collections.abc import Mapping

# -- threads and memory ------------------------------------------------------------------------------------------------

WARP = 32
"""Threads that run in step (published)."""
REGISTERS = 65536
"""Of a multiprocessor, and of a block at most, 4 bytes each (published)."""
REGISTER_UNIT = 256
"""Registers are given to a warp in units of so many (published)."""
SHARED_UNIT = 128
"""Bytes in units of which a block gets shared memory (published)."""
SHARED_BYTES = 60 * 1024
"""Bytes of shared memory that a block uses at most for sums: every device has them (published: 64 KB on sm_75, of which
a block's other needs are left).
"""
SHARED_RATE = 128
"""Bytes of shared memory per clock of a multiprocessor: 32 banks of 4 bytes (published; measured on an H200: 0.25
ldmatrix of 512 bytes a clock).
"""
SECTOR_BYTES = 32
"""Of a transfer between the caches, and of a memory transaction (published)."""

# -- clocks of an instruction ------------------------------------------------------------------------------------------

LATENCY: Mapping[str, int] = {
    **{"shared": 30, "shuffle": 25, "special": 25, "convert": 15, "f64": 16, "barrier": 30},
    "matrix": 24,
}
"""Clocks until a result can be used, by class of instruction (published microbenchmarks, rounded; ``matrix``: measured,
0.0417 dependent products a clock in ``gpu-nvidia-h200-2026-11-28-tiles.json``); ``ALU_LATENCY`` for the others.  The
model of machine code's time follows chains of them.
"""
ALU_LATENCY = 5
ACCESS_COST = 6.0
"""Additions that take as long as an access that a cache serves, with its address (estimate); what is computed again
costs less.
"""

# -- matrix products ---------------------------------------------------------------------------------------------------

LIBRARY_FLOPS: Mapping[str, float] = {"f16": 850e12, "bf16": 850e12, "f32": 47e12, "f64": 47e12}
"""Of the library's products per second, without the time in which results are written, by the dtype of their operands
(measured of bf16 and f32: fitted to the products of ``gpu-nvidia-h200-2026-11-28-tiles.json``, whose multiprocessors
are an H100's; estimate of f16 and f64: as these).
"""
UNALIGNED_FLOPS: Mapping[str, float] = {"f16": 114e12, "bf16": 114e12, "f32": 47e12, "f64": 47e12}
"""The same of operands of 16 bits whose rows do not begin, or end, at multiples of :data:`MATRIX_ALIGN` bytes
(measured of bf16: two products of 632 GFLOP each at 102 and 130, ``linear_cross_entropy`` of
``gpu-nvidia-h200-2026-11-28.json``).
"""
HOST_CALL, HOST_LAUNCH, HOST_RESULT = 13e-6, 8e-6, 5e-6
"""Seconds of the host for a call of the library, a launch, and the memory of a result (measured beside an H200 on
2026-11-28, docs/gpu.md; estimate of a call: 30 us less the 17 that ``python -m benchmarks.host`` has less since).
"""
LIBRARY_CALL = 5e-6
"""Seconds of a product beside its flops and bytes (fitted to the same)."""
MATRIX_ALIGN = 16
"""Bytes at multiples of which rows of matrices of 16-bit elements begin and end for the library's fast kernels
(published: cuBLAS documentation, "Tensor Core Usage").
"""
TORCH_WIDE_ATTENTION = (1.21, 1.16)
"""How many times as fast torch's attention of more than 64 features computes, forward and backward, as that of 64
(measured: cuDNN's, ``sdpa`` of ``gpu-nvidia-h200-2026-11-28-tiles.json``).
"""
ATTENTION_TILES: Mapping[int, tuple[float, float]] = {64: (323e12, 231e12), 128: (269e12, 190e12)}
"""Products and sums per second of our own attention in 16 bits on an H100 or H200, forward and backward, by the most
features of a head (what the model of machine code's time gives for 4 x 16 heads of 2048 x 64 and 4 x 8 of 2048 x 128,
causal: 109 and 377 us, 130 and 458; docs/tiles.md).
"""
WINDOW_ELEMENTS = 1.35e12
"""Elements of a convolution's windows that our kernels write per second on an H100 or H200 (by the same model: 57.8 M
in 43 us, 32 x 64 x 56 x 56 by 3 x 3).
"""
PRODUCT_FLOPS = 8.5e12
"""Of the kernel of ours for products of any strides and dtypes (what the model of machine code's time gives for an H100
and bf16).
"""

# -- seconds of a step of a reduction ----------------------------------------------------------------------------------

ROW_SECONDS = 0.25e-6
"""Per row of a task that has one row after another: a memory's latency, shared by the rows under way (estimate)."""
SUMMED_SECONDS = 0.73e-6
"""Per row of a task that reduces one row after another and adds what comes out: a chain of dependent instructions (by
the model of machine code; sums of 32 x 64 x 56 rows of a channel took an H200 1.4 ms where it says 1.3).
"""
ADD_SECONDS = 10e-9
"""Per row of 128 columns that a multiprocessor adds, of those that its blocks sort (by the model of machine code).
"""
