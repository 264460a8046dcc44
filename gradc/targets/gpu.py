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
SECTOR_BYTES = 32
"""Of a transfer between the caches, and of a memory transaction (published)."""

# -- clocks of an instruction ------------------------------------------------------------------------------------------

LATENCY: Mapping[str, int] = {"shared": 30, "shuffle": 25, "special": 25, "convert": 15, "f64": 16, "barrier": 30}
"""Clocks until a result can be used, by class of instruction (published microbenchmarks, rounded); ``ALU_LATENCY`` for
the others.  The model of machine code's time follows chains of them.
"""
ALU_LATENCY = 5
ACCESS_COST = 6.0
"""Additions that take as long as an access that a cache serves, with its address (estimate); what is computed again
costs less.
"""

# -- matrix products ---------------------------------------------------------------------------------------------------

LIBRARY_FLOPS: Mapping[str, float] = {"f16": 600e12, "bf16": 600e12, "f32": 45e12, "f64": 45e12}
"""Of the library's products per second, by the dtype of their operands (estimate: two thirds of what is published of an
H100 for 16 bits, with f32 sums, and for f32 and f64).
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
HIT_SECONDS = 17e-9
"""Per row that one warp adds to what it has in registers (estimate)."""
ADD_SECONDS = 9e-9
"""Per row of 32 columns that a multiprocessor adds to sums in shared memory (estimate: two thirds of what an H100 took
on 2026-11-26 when half as many rows were staged at once).
"""
