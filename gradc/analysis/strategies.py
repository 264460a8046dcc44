"""The strategies for combining values of many rows into one result, one record each: where it is correct, what it
costs, whether it is deterministic.

The choice, the cost model, ``explain``, the precision of an executable, the verifier, the writers of C and CUDA and
the documentation read :data:`STRATEGIES`.  A new strategy is a record here; where its partial results are combined in a
new way, also the template that does it (:attr:`Strategy.fold`).
The cost on a CPU is bytes moved at the device's bandwidth; the cost on a GPU:

N rows add D elements each into V rows of a result; U of these are hit, the hottest R times.  B is the bandwidth of a
copy, a = 4 bytes (8 for 64-bit types) what sums are kept in, s the bytes of a result's element, [c] = 1 where c holds;
``read`` are the bytes that the values are made from, ``index`` those of the indices::

    floor        = (read + index + V D s) / B
    sort         = base + [N > 8192] ceil(log2 V / 9) max(pass, N / rate)
    atomic       = V D a / B + max((read + index) / B, adds, R hot) + [U D a > 0.6 L2] 2 U D a / B
                   + [s = 2] 6 V D / B + 2 launches, 3 if s = 2
    segmented    = sort + (read + V D s + 8 N) / B + 2 (R / 128) D a / B + 3 launches
                   groups of G rows are sorted as one, N / G rows by V / G keys: + (8 N + 4 V) / B + 1 launch
    privatized   = max((read + index + V D s) / B, N / P row) + (2 P V D b + [gathered] 2 N D b) / L2's rate or B
                   + 2 launches
                   P = min(131072 / ceil(D / 4), 1024, ceil(N / 8)); b = 2 a where sums are pairs of f32;
                   where V = 1 the 256 / ceil(D / 4) tasks of a block share a partial result and its rows
      by block   = max((read + index + P V D b) / B, N T / SMs add) + P V D b / L2's rate or B + 2 launches
                   T = ceil(D / 128), D / 128 where D < 128 and 1 / 8 at least
                   P = min(128 / ceil(D / 128), ceil(N / 64)); where V is known and 511 or less
    regular      = max((read + index + V D s + [gathered] 2 N D a) / B max(1, SMs / owners), N / owners owned)
                   + 1 launch
    atomic_fixed = (8.5 V D + read) / B + max((read + index) / B, adds, R hot) + [8 U D > 0.6 L2] 16 U D / B
                   + V D (8 + s) / B + 4 launches

``adds`` is the bytes of 16-byte atomics at L2's rate (sm_90: rows of f32), else single adds, but no less than the
128-byte lines that they reach.  Partial results within 60 % of L2 move at its rate.  ``owned`` is ``row`` where the
index is gathered, what a task takes to reduce a row where its columns are reduced first, else 0.  ``by block``: each
block sorts its rows by their index, of one digit, in shared memory, adds up those of one index in registers, and writes
its partial result while it reads; hot rows cost nothing.  ``row`` is a memory's latency shared by the rows that a task
has under way, ``add`` what a multiprocessor takes for 128 columns of a row.  The first four are models of kernels that
others measured; privatized, regular and atomic_fixed are derived from what they move.  What an H100 took for each is in
``benchmarks/results``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import InternalError
from ..ir.dims import Size, ceildiv, evaluate, maximum
from ..ir.kernel import ROW_ORDERS, RowOrder
from ..ir.types import DType
from ..targets.devices import Cpu, Gpu
from ..targets.gpu import ADD_SECONDS, ROW_SECONDS, SUMMED_SECONDS
from .chunks import GPU_MOST_CHUNKS, GPU_SHORTEST, GPU_SORTED, GPU_WORKERS, task_rows
from .combine import DIGIT_BITS, OWN_BLOCKS, OWN_COLUMNS, OWN_SHORTEST, Combine, Hits, HostScatter, Scatter

COLUMNS = 4
"""Columns of a thread."""
BLOCK = 256
"""Threads of a block."""

Cost = tuple[int, float]
"""(bytes moved, seconds)"""


Atomics = Literal["", "values", "fixed point"]
"""What atomics combine: nothing, values of the result's own type (16-bit floats in f32), or 64-bit integers that floats
are scaled to."""


@dataclass(frozen=True)
class GpuCost:
    """What a strategy costs on a GPU.

    :param cost: (sizes, hits, GPU) -> (bytes, seconds).
    :param words: (sizes, hits, GPU) -> the same in words.
    """

    cost: Callable[[Scatter[int], Hits, Gpu], Cost]
    words: Callable[[Scatter[int], Hits, Gpu], str]


@dataclass(frozen=True)
class Strategy:
    """One strategy.

    :param text: for the documentation.
    :param right: (combine, dtype of the result, exact) -> whether it is correct; ``exact``: the values are integers
        that atomics combine to the same bits in any order.
    :param host: (sizes, CPU) -> (bytes, seconds, in words), the cost on a CPU (:func:`_regular_host` is the simplest);
        None: there is no kernel for CPUs.
    :param gpu: the cost on a GPU; None: there is no CUDA kernel.
    :param visits: what decides in which order a kernel visits its rows: part of the kernel language.
    :param fold: the template that combines the partial results of the tasks, in ``templates/cpu/kernel`` and in
        ``templates/cuda/kernel``; "": a task has no partial result of its own.
    :param atomics: what atomics combine.
    :param deterministic: floats have the same bits in every run.
    :raises InternalError: it has not exactly one of ``visits``, ``fold`` and ``atomics``, which say where a task
        combines: in rows of the result that it alone has, in a partial result, in a result that all tasks share.
    """

    name: str
    text: str
    right: Callable[[Combine, DType, bool], bool]
    host: Callable[[HostScatter, Cpu], tuple[int, float, str]] | None = None
    gpu: GpuCost | None = None
    visits: RowOrder = ""
    fold: str = ""
    atomics: Atomics = ""
    deterministic: bool = True

    def __post_init__(self) -> None:
        if [bool(self.visits), bool(self.fold), bool(self.atomics)].count(True) != 1:
            raise InternalError(f"the strategy {self.name} has not exactly one of visits, fold and atomics")
        ROW_ORDERS[self.name] = self.visits

    @property
    def partials(self) -> bool:
        """Whether each task has a partial result of its own."""
        return bool(self.fold)

    @property
    def loses_digits(self) -> bool:
        """Whether values that are small beside the largest lose digits."""
        return self.atomics == "fixed point"


# -- what several cost -------------------------------------------------------------------------------------------------


def passes(largest: int) -> int:
    """Passes over keys from 0 to the largest."""
    return -(-max(largest, 0).bit_length() // DIGIT_BITS)


def sort_seconds(s: Scatter[int], device: Gpu) -> float:
    rows, keys = s.rows // s.groups, s.keys // s.groups
    if rows <= device.one_block:
        return device.sort_base
    return device.sort_base + passes(keys - 1) * max(device.sort_pass, rows / device.sort_rate)


def _adds(s: Scatter[int], hits: Hits, device: Gpu, item: int) -> float:
    """The atomics alone: elements of ``item`` bytes into memory that L2 holds."""
    count = s.rows * s.width
    vectors = item == 4 and device.vector and s.contiguous and not s.exact
    single = count * item / device.resident if vectors else count * (item // 4) / device.coalesced
    lines = s.rows * -(-s.width * item // 128) if s.contiguous else count
    hot = hits.most * device.hot * (1 if s.width * item <= 512 else 2)
    return max(single, lines / device.scattered, hot)


def floor(s: Scatter[int]) -> int:
    """Bytes that no strategy can avoid."""
    return s.read + s.index + s.out * s.item


def partials(s: Scatter[int]) -> int:
    """How many partial results a privatized accum has."""
    if s.own:
        return max(min(OWN_BLOCKS // max(-(-s.width // OWN_COLUMNS), 1), -(-s.rows // OWN_SHORTEST)), 1)
    threads, sharing = max(-(-s.width // COLUMNS), 1), tasks_of_a_chunk(s)
    return max(min(GPU_WORKERS // (threads * sharing), GPU_MOST_CHUNKS, -(-s.rows // (GPU_SHORTEST * sharing))), 1)


def tasks_of_a_chunk(s: Scatter[int]) -> int:
    """How many tasks share a partial result: those of a block, where all rows add to one."""
    return max(BLOCK // max(-(-s.width // COLUMNS), 1), 1) if s.keys == 1 and not s.own else 1


# -- segmented --------------------------------------------------------------------------------------------------------


SHARES = 256
"""Of an element of a partial result, in which the time of a sorted row is counted."""


SCATTERED_KEYS = 1 << 13
"""Rows of a result from which on a sort is faster where rows near each other go to places near each other: of fewer,
the lines that it writes to are all in the nearer caches.
"""
MISSED = ((4, 1.0), (2, 2 / 3), (1, 1 / 3), (0, 0.0))
"""Elements of a partial result, by those that caches hold, from which on such a share of the additions to it wait for
memory: of a place anywhere in it caches hold 1 - cached / elements not, which it is in the middle.
"""


def missed_share(size: int, cached: int) -> float:
    """Of additions to a partial result of so many elements, those that wait for memory."""
    return next(share for times, share in MISSED if size >= times * cached)


def sorted_row(width: Size, ordered: bool, device: Cpu, missed: float = 0.0) -> Size:
    """Elements of partial results, in ``SHARES`` of one, that a CPU sets and folds in the time that a row takes longer
    where rows are sorted than where each is added to a partial result.

    :param width: elements that a row adds.  :param missed: share of them that would wait for memory.
    """
    of_row = (device.ordered if ordered else device.sort) / device.partial * SHARES
    of_element = ((0.0 if ordered else device.gathered) - missed * device.missed) / device.partial * SHARES
    if isinstance(width, int):
        return max(round(of_row + of_element * width), 0)
    return maximum(round(of_row) + round(of_element) * width, 0)


def _segmented_host(s: HostScatter, device: Cpu) -> tuple[int, float, str]:
    moved = s.read + s.out * s.item + 8 * s.rows
    each = device.ordered if s.ordered else max(device.sort + s.read // s.item // max(s.rows, 1) * device.gathered, 0.0)
    return (
        moved,
        each * s.rows + moved / device.bandwidth,
        f"{s.rows} rows {'in the order of their' if s.ordered else 'sorted by'} index, each result row written once",
    )


def _segmented_gpu(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    moved = s.read + s.out * s.item + 8 * s.rows + 2 * (hits.most // GPU_SORTED) * s.width * s.wide
    moved += (8 * s.rows + 4 * s.keys) if s.groups > 1 else 0
    launches = 4 if s.groups > 1 else 3
    return moved, sort_seconds(s, device) + moved / device.bandwidth + launches * device.launch


def _segmented_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    micros = sort_seconds(s, device) * 1e6
    return f"{s.rows // s.groups} rows sorted by index in {micros:.1f} us, each result row written once"


SEGMENTED = Strategy(
    "segmented",
    "rows are visited in the order of a stable sort of their index, so that each row of the result is written once",
    right=lambda part, dtype, exact: part.gathered and part.tail,
    host=_segmented_host,
    gpu=GpuCost(_segmented_gpu, _segmented_words),
    visits="by key",
)


# -- regular ----------------------------------------------------------------------------------------------------------


def _regular_host(s: HostScatter, device: Cpu) -> tuple[int, float, str]:
    moved = s.read + s.out * s.item
    return (
        moved,
        moved / device.bandwidth * max(1.0, device.workers / max(s.owners, 1)),
        f"{s.owners} rows of the result, each owned by one task",
    )


def owned_row_seconds(s: Scatter[Size] | Scatter[int]) -> float:
    """What an owner takes for each of its rows, one after another; 0 where it has enough of them under way."""
    return ROW_SECONDS if s.gathered else SUMMED_SECONDS if s.reduced else 0.0


def _regular_gpu(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    moved = floor(s) + (2 * s.rows * s.width * s.wide if s.gathered else 0)
    alone = s.rows / max(s.owners, 1) * owned_row_seconds(s)
    return moved, max(moved / device.bandwidth * max(1.0, device.sms / max(s.owners, 1)), alone) + device.launch


def _regular_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    idle = f": too few for {device.sms} SMs" if s.owners < device.sms else ""
    each = s.rows // max(s.owners, 1)
    return f"{s.owners} rows of the result, each owned by one task{idle}: {each} rows each, one after another"


REGULAR = Strategy(
    "regular",
    "the index is affine in the rows, so that each row of the result has one owner",
    right=lambda part, dtype, exact: bool(part.kept),
    host=_regular_host,
    gpu=GpuCost(_regular_gpu, _regular_words),
    visits="by owner",
)


# -- privatized -------------------------------------------------------------------------------------------------------


PARTIAL_BYTES = 32
"""Moved for an element of a partial result, f64: it is set, read and written, and folded."""


def _privatized_host(s: HostScatter, device: Cpu) -> tuple[int, float, str]:
    chunks = evaluate(ceildiv(s.rows, task_rows(s.rows, s.columns, (s.out, *s.other_results))), {})
    moved, partials = s.read + s.out * s.item, chunks * s.out
    missed = missed_share(s.out, device.cached) * device.missed * (s.read // s.item)
    seconds = moved / device.bandwidth + device.partial * partials + missed
    return moved + PARTIAL_BYTES * partials, seconds, f"{chunks} partials of {s.out} elements, folded in order"


def _privatized_gpu(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    if s.own:
        tiles, written = max(1, -(-s.width // OWN_COLUMNS)), partials(s) * s.out * s.pair
        narrow = min(1.0, max(s.width / OWN_COLUMNS, 1 / 8))  # threads of a warp have several rows at a time
        busy = s.rows * tiles / min(device.sms, partials(s) * tiles) * ADD_SECONDS * narrow
        rate = device.resident if written <= device.room else device.bandwidth
        added = max((s.read + s.index + written) / device.bandwidth, busy)
        return floor(s) + 2 * written, added + written / rate + 2 * device.launch
    parts, streamed, tasks = partials(s) * s.out * s.pair, floor(s), partials(s) * tasks_of_a_chunk(s)
    scratch = 2 * parts + (2 * s.rows * s.width * s.pair if s.gathered else 0)
    rate = device.resident if parts <= device.room else device.bandwidth
    return (
        streamed + scratch,
        max(streamed / device.bandwidth, s.rows / tasks * ROW_SECONDS) + scratch / rate + 2 * device.launch,
    )


def _privatized_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    sorts = ", of rows that each block sorts" if s.own else ""
    return f"{partials(s)} partials of {s.out} elements{sorts}, folded in order"


PRIVATIZED = Strategy(
    "privatized",
    "each fixed chunk of rows has a partial result; these are folded in the order of the chunks",
    right=lambda part, dtype, exact: True,
    host=_privatized_host,
    gpu=GpuCost(_privatized_gpu, _privatized_words),
    fold="fold",
)


# -- atomic_fixed -----------------------------------------------------------------------------------------------------


def _atomic_fixed_gpu(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    hit, streamed = hits.unique * s.width * 8, s.read + s.index
    rest = s.out * 8 + s.out // 2 + s.read + (2 * hit if hit > device.room else 0) + s.out * (8 + s.item)
    return (
        rest + streamed,
        rest / device.bandwidth + max(streamed / device.bandwidth, _adds(s, hits, device, 8)) + 4 * device.launch,
    )


def _atomic_fixed_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    return (
        f"{s.rows * s.width} adds of 64-bit integers after a pass for their scale; what is small beside the largest"
        " value loses digits"
    )


ATOMIC_FIXED = Strategy(
    "atomic_fixed",
    "floats are added as 64-bit integers by atomics, in any order to the same bits; values that are small beside the"
    " largest lose digits",
    right=lambda part, dtype, exact: dtype.is_float and 16 <= dtype.bits <= 32 and part.stmt.combine == "sum",
    gpu=GpuCost(_atomic_fixed_gpu, _atomic_fixed_words),
    atomics="fixed point",
)


# -- atomic -----------------------------------------------------------------------------------------------------------


def _atomic_gpu(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    table, hit, streamed = s.out * s.wide, hits.unique * s.width * s.wide, s.read + s.index
    rest = table + (2 * hit if hit > device.room else 0) + (s.out * (4 + s.item) if s.item < 4 else 0)
    return (
        rest + streamed,
        rest / device.bandwidth
        + max(streamed / device.bandwidth, _adds(s, hits, device, s.wide))
        + (3 if s.item < 4 else 2) * device.launch,
    )


def _atomic_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    where = "more than L2 keeps" if hits.unique * s.width * s.wide > device.room else "within L2"
    text = f"{s.rows * s.width} adds to {hits.unique} rows, {where}; the hottest is hit {hits.most} times or more"
    return text + (f"; f32 sums are rounded to {s.item} bytes in a pass of their own" if s.item < 4 else "")


ATOMIC = Strategy(
    "atomic",
    "atomics, in any order: integers to the same bits, floats not",
    right=lambda part, dtype, exact: exact or (dtype.is_float and dtype.bits >= 16 and part.stmt.combine == "sum"),
    gpu=GpuCost(_atomic_gpu, _atomic_words),
    atomics="values",
    deterministic=False,
)


STRATEGIES: dict[str, Strategy] = {s.name: s for s in (SEGMENTED, REGULAR, PRIVATIZED, ATOMIC_FIXED, ATOMIC)}
"""All, in the order in which equals are picked."""
DEFAULT = PRIVATIZED
"""Right for every combine: what a kernel does where nothing is chosen, or what is chosen cannot be."""
ON_HOST = tuple(s.name for s in reversed(STRATEGIES.values()) if s.host)
"""Strategies with a kernel for CPUs."""
_GPU_ALONE = tuple(s.name for s in reversed(STRATEGIES.values()) if s.gpu and not s.host)
ON_GPU = (*(name for name in ON_HOST if STRATEGIES[name].gpu), *_GPU_ALONE)
"""Strategies with a CUDA kernel."""
