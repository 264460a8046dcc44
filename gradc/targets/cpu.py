"""What a CPU is, in numbers: caches, vectors, what a step costs.

Each says its unit, where it is from and what depends on it.  "Estimate": chosen by what it means, and no measurement
kept here moves it; "measured": a figure changed when it was set, on the machine that is named.  Costs
are in additions, as :attr:`gradc.ir.op.Expr.cost` is.
"""

from __future__ import annotations

# -- memory ------------------------------------------------------------------------------------------------------------

LINE_BYTES = 64
"""Of a cache line (x86-64 and most of Arm: published).  A prefetch asks for one."""
PRIVATE_BYTES = 1 << 20
"""Bytes that stay in the caches of one core: its L2 (estimate: 0.5 to 2 MB).  Smaller arrays are never written by
streaming stores, smaller temporaries neither lie in results nor decide when a step runs.
"""
PREFETCHED_BYTES = 16 << 10
"""Bytes of the next row up to which it is prefetched: longer ones push the present row out of the nearest cache (half
an L1 of 32 KB: derived).
"""
GATHERED_BYTES = 512
"""Bytes of a gathered row that are asked for rows ahead: of a longer one the processor sees how it goes on (measured
2026-11-25, AMD EPYC, family 25 model 17).
"""
PREFETCH_LOCALITY = 2
"""Which cache a gathered row is asked for into, as ``__builtin_prefetch`` counts them: 3 is the first, 2 the second,
which waits for more lines at a time (measured 2026-12-01, AMD EPYC, family 25 model 17: sums of a million sorted rows
take 0.72 to 1.01 of the time, lookups in tables that no cache holds 0.7 to 1, in one of 10^4 rows of 64 1 to 1.2).
"""
MOST_STREAMS = 8
"""Stores of a kernel that stream at most: what more have to stage costs more than the lines that are not read (measured
2026-11-26, AMD EPYC, family 25 model 17).
"""

WAKING_WORK = 1 << 17
"""Additions and accesses of a batch from which it is worth waking a thread for it: fewer run on the caller's (measured
2026-11-29, AMD EPYC, family 25 model 17: eight updates of 2048 parameters, which are that many, took 17 us on two
threads for 18 on one where both were awake; where the other slept, as long, and twice the processor time).
"""

# -- vectors and registers ---------------------------------------------------------------------------------------------

LANE_BYTES = 128
"""Of the accumulators that the columns of a strip have: several additions are on their way at once in vectors of any
processor, and those of three reductions fit 16 registers of 256 bits (derived).
"""
SHORT_COLUMNS = 48
"""Columns below which a row is collapsed with the next: more fill vectors well enough (estimate)."""
SHORT_ROW = 16
"""Columns below which a processor is at several rows at a time by itself, so that no later row is asked for (estimate).
"""
MOST_UNROLLED = 256
"""Statements at most of a kernel whose few columns are unrolled (estimate: a compiler takes a second for ten times as
many).
"""
WIDEST_RUN = 128
"""Columns whose sums are in registers only where there are more than 16 of them: 32 (measured 2026-11-26, AMD EPYC,
family 25 model 17).
"""
RUN_WIDTHS = (WIDEST_RUN, 64, 32, 16, 8)
"""Columns of a block of a run of rows, whose sums stay in registers, widest first (derived: whole vectors)."""
NARROW_RUN = 256
"""Columns of rows of which any number stays in the nearest caches while a run is added (measured 2026-11-26, AMD EPYC,
family 25 model 1).
"""

# -- time, in additions ------------------------------------------------------------------------------------------------

CACHED_COST = 8
"""Of computation from which a value is kept for the row's next pass: a store and a load that a near cache serves cost
less (estimate).
"""
WAITING_COST = 12
"""Of computation below which a column takes less time than the addition to a sum does until the next can begin, so that
accumulators are in registers (measured 2026-11-26, AMD EPYC, family 25 model 1).
"""
WIDE_VECTOR_COST = 12
"""Of one op from which a kernel gets the widest vectors there are: exp, tanh, erf, sigmoid gain a third by 512 bits on
processors for which compilers prefer 256, and what only moves and adds loses (measured 2026-11, AMD EPYC, family 25).
"""
OF_A_FILTER, OF_AN_ELEMENT = 1000, 10
"""Of transforming one filter of a channel by minimal filtering, and of making one element of the other transforms, in
multiplications and additions (measured 2026-11-26, one thread of an AMD EPYC, family 25 model 17).
"""
CHEAP_COST = 8
"""Of a value that each of its readers computes again rather than reads, where it is made of no more bytes (estimate).
"""
STORE_COST = 24
"""As much as writing and reading an element once more, where a kernel fills vectors (estimate)."""
STRIDED_COST = 4
"""Of a load of elements that no vector has, beside one of whole vectors (estimate)."""
FLOPS_PER_BYTE = 16
"""Multiplications and additions of a product that take as long as a byte of traffic to memory (estimate, two cores).
Gradients are made ahead where they save so many.
"""
