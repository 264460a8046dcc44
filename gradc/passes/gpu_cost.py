"""What each way to combine rows costs on a GPU, from sizes alone.

N rows add D elements each into V rows of a result; U of these are hit, the hottest R times.  B is the bandwidth of a copy, a = 4 bytes (8 for
64-bit types) what sums are kept in, s the bytes of a result's element, [c] = 1 where c holds; ``read`` are the bytes that the values are made
from, ``index`` those of the indices::

    floor        = (read + index + V D s) / B
    sort         = base + ceil(log2(V + 1) / 8) max(pass, N / rate)
    atomic       = V D a / B + max((read + index) / B, adds, R hot) + [U D a > 0.6 L2] 2 U D a / B + [s = 2] 6 V D / B + 2 launches, 3 if s = 2
    segmented    = sort + (read + V D s + 8 N) / B + 2 (R / 128) D a / B + 3 launches
    privatized   = max((read + index + V D s) / B, N / P row) + (2 P V D b + [gathered] 2 N D b) / L2's rate or B + 2 launches
                   P = min(131072 / ceil(D / 4), 1024, ceil(N / 8)); b = 2 a where sums are pairs of f32
      shared     = max((read + index + V D s) / B, R / P hit) + 2 P V D a / L2's rate or B + 2 launches
                   P = min(256 / ceil(D / 32), ceil(N / 64)); where 32 columns of V pairs are 60 KB or less
    regular      = max((read + index + V D s + [gathered] 2 N D a) / B max(1, SMs / owners), [gathered] N / owners row) + 1 launch
    atomic_fixed = (8 V D + read) / B + max((read + index) / B, adds, R hot) + [8 U D > 0.6 L2] 16 U D / B + V D (8 + s) / B + 4 launches

``adds`` is the bytes of 16-byte atomics at L2's rate (sm_90: rows of f32), else single adds, but no less than the 128-byte lines that they
reach.  Partial results within 60 % of L2 move at its rate.  ``shared``: each block adds up in its own memory, its warps share the rows out by their
index, so that every sum has one owner, and what is left of a block moves once.  ``row`` is a memory's latency shared by the rows that a task has under way,
``hit`` a row that a warp adds.  The first four are models of kernels that others measured; privatized, regular and
atomic_fixed are derived from what they move.  None of them has been held against our own kernels on a device yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..ir.dims import Dim
from .devices import Gpu

CHUNK = 128
"""Rows per chunk on a GPU: the unit of determinism."""
WORKERS, PARTIALS, SHORTEST = 1 << 17, 1024, 8
"""Threads that a privatized kernel is cut up for, the most partial results, the fewest rows of one: as :mod:`gradc.codegen.launch` has them."""
COLUMNS = 4
"""Of a thread."""
OWN_COLUMNS, OWN_BYTES, OWN_BLOCKS, OWN_SHORTEST = 32, 60 * 1024, 256, 64
"""Of partial results in a block's own memory: columns of a block, bytes at most (every device has them beside what the kernel stages), blocks
that a kernel is cut up for, fewest rows of one: as :mod:`gradc.codegen.launch` has them."""
HIT = 17e-9
"""Seconds per row that one warp adds to what it has in registers: an estimate."""
ROW = 0.25e-6
"""Seconds per row of a task: an estimate."""
MARGIN = 1.1
"""What is not deterministic must be faster by this much to be picked."""
DETERMINISTIC = ("segmented", "regular", "privatized", "atomic_fixed")
S = TypeVar("S", int, int | Dim)


@dataclass(frozen=True)
class Estimate:
    """A strategy's predicted cost.

    :param bytes: moved by the kernel's accum under this strategy.  :param seconds: predicted.  :param why: in words.
    :param floor: bytes that no strategy can avoid; 0: not known.  :param deterministic: whether it gives the same bits in every run.
    """

    strategy: str
    bytes: int
    seconds: float
    why: str
    floor: int = 0
    deterministic: bool = True


@dataclass(frozen=True)
class Scatter(Generic[S]):
    """One accum in sizes.

    :param rows: N.  :param width: D, elements that a row adds.  :param keys: V, rows of the result.  :param out: its elements.
    :param read: bytes read to make the values.  :param index: bytes of the indices.  :param item: bytes of an element of the result.
    :param contiguous: whether what a row adds lies together.  :param exact: whether atomics give the same bits in any order.
    :param gathered: whether the place is read from memory.  :param own: whether partial results can lie in a block's own memory.  :param owners: rows of the result with one owner each; 0: not known.
    """

    rows: S
    width: S
    keys: S
    out: S
    read: S
    index: S
    owners: S
    item: int
    contiguous: bool = True
    exact: bool = False
    gathered: bool = True
    own: bool = False

    @property
    def wide(self) -> int:
        """Bytes of an element that sums are kept in."""
        return max(self.item, 4)

    @property
    def pair(self) -> int:
        """Bytes of a partial sum: with what f32 has rounded off."""
        return self.wide * (2 if self.wide == 4 else 1)


@dataclass(frozen=True)
class Hits:
    """Where rows go.

    :param unique: U, how many rows of the result are hit.  :param most: R, the hits on the hottest.
    """

    unique: int
    most: int


def expected_hits(s: Scatter[int], unique: int | None = None, most: int | None = None) -> Hits:
    """As given; else U as N indices drawn at random have it, V (1 - (1 - 1/V)^N), and R the least that N hits on V rows can be."""
    if unique is None:
        unique = round(-s.keys * math.expm1(s.rows * math.log1p(-1 / s.keys))) if s.keys > 1 else max(min(s.rows, s.keys), 0)
    return Hits(unique, -(-s.rows // max(s.keys, 1)) if most is None else most)


def row_scatter(rows: int, keys: int, width: int, grad: int = 4, item: int = 4, index: int = 4, own: bool = False) -> Scatter[int]:
    """``result[index[n], :] += gradient[n, :]``: gradients, results and indices of so many bytes; ``own``: into a table whose rows are known and few."""
    return Scatter(rows, width, keys, keys * width, rows * width * grad, rows * index, 0, item, own=own)


def own_bytes(keys: int, item: int) -> int:
    """Of the partial results of a block: sums of f32 with what they round off."""
    return keys * OWN_COLUMNS * (8 if item <= 4 else item)


# -- costs: (bytes moved, seconds) -------------------------------------------------------------------------------------

Cost = tuple[int, float]


def passes(keys: int) -> int:
    """Passes of 8 bits over keys from 0 to V: ceil(log2(V + 1) / 8)."""
    return -(-max(keys, 0).bit_length() // 8)


def sort_seconds(s: Scatter[int], device: Gpu) -> float:
    if s.rows <= device.one_block:
        return device.sort_base
    return device.sort_base + passes(s.keys) * max(device.sort_pass, s.rows / device.sort_rate)


def _adds(s: Scatter[int], hits: Hits, device: Gpu, item: int) -> float:
    """The atomics alone: elements of ``item`` bytes into memory that L2 holds."""
    count = s.rows * s.width
    vectors = item == 4 and device.vector and s.contiguous and not s.exact
    single = count * item / device.resident if vectors else count * (item // 4) / device.coalesced
    lines = s.rows * -(-s.width * item // 128) if s.contiguous else count
    hot = hits.most * device.hot * (1 if s.width * item <= 512 else 2)
    return max(single, lines / device.scattered, hot)


def atomic(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    table, hit, streamed = s.out * s.wide, hits.unique * s.width * s.wide, s.read + s.index
    rest = table + (2 * hit if hit > device.room else 0) + (s.out * (4 + s.item) if s.item < 4 else 0)
    return rest + streamed, rest / device.bandwidth + max(streamed / device.bandwidth, _adds(s, hits, device, s.wide)) + (3 if s.item < 4 else 2) * device.launch


def segmented(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    moved = s.read + s.out * s.item + 8 * s.rows + 2 * (hits.most // CHUNK) * s.width * s.wide
    return moved, sort_seconds(s, device) + moved / device.bandwidth + 3 * device.launch


def partials(s: Scatter[int]) -> int:
    """How many partial results a privatized accum has."""
    if s.own:
        return max(min(OWN_BLOCKS // max(-(-s.width // OWN_COLUMNS), 1), -(-s.rows // OWN_SHORTEST)), 1)
    return max(min(WORKERS // max(-(-s.width // COLUMNS), 1), PARTIALS, -(-s.rows // SHORTEST)), 1)


def privatized(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    if s.own:
        apart, streamed = 2 * partials(s) * s.out * s.wide, floor(s)
        rate = device.resident if apart // 2 <= device.room else device.bandwidth
        return streamed + apart, max(streamed / device.bandwidth, hits.most / partials(s) * HIT) + apart / rate + 2 * device.launch
    parts, streamed = partials(s) * s.out * s.pair, floor(s)
    apart = 2 * parts + (2 * s.rows * s.width * s.pair if s.gathered else 0)
    rate = device.resident if parts <= device.room else device.bandwidth
    return streamed + apart, max(streamed / device.bandwidth, s.rows / partials(s) * ROW) + apart / rate + 2 * device.launch


def regular(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    moved = floor(s) + (2 * s.rows * s.width * s.wide if s.gathered else 0)
    alone = s.rows / max(s.owners, 1) * ROW if s.gathered else 0.0
    return moved, max(moved / device.bandwidth * max(1.0, device.sms / max(s.owners, 1)), alone) + device.launch


def atomic_fixed(s: Scatter[int], hits: Hits, device: Gpu) -> Cost:
    hit, streamed = hits.unique * s.width * 8, s.read + s.index
    rest = s.out * 8 + s.read + (2 * hit if hit > device.room else 0) + s.out * (8 + s.item)
    return rest + streamed, rest / device.bandwidth + max(streamed / device.bandwidth, _adds(s, hits, device, 8)) + 4 * device.launch


def floor(s: Scatter[int]) -> int:
    """Bytes that no strategy can avoid."""
    return s.read + s.index + s.out * s.item


FORMULAS: Mapping[str, Callable[[Scatter[int], Hits, Gpu], Cost]] = {
    "segmented": segmented, "regular": regular, "privatized": privatized, "atomic_fixed": atomic_fixed, "atomic": atomic,
}  # fmt: skip
"""In the order in which equals are picked."""


def predict(s: Scatter[int], device: Gpu, names: Sequence[str] = tuple(FORMULAS), hits: Hits | None = None) -> list[Estimate]:
    """The estimate of each of some strategies."""
    hits = hits or expected_hits(s)
    answer = []
    for name in FORMULAS:
        if name in names:
            moved, seconds = FORMULAS[name](s, hits, device)
            answer.append(Estimate(name, moved, seconds, _WORDS[name](s, hits, device), floor(s), s.exact or name in DETERMINISTIC))
    return answer


def cheapest(s: Scatter[int], device: Gpu, names: Sequence[str]) -> str:
    """The pick: what is not deterministic must be faster than what is by a margin."""
    hits = expected_hits(s)
    seconds = {name: FORMULAS[name](s, hits, device)[1] for name in FORMULAS if name in names}
    return min(seconds, key=lambda name: seconds[name] * (1 if s.exact or name in DETERMINISTIC else MARGIN))


# -- in words ----------------------------------------------------------------------------------------------------------


def _atomic_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    where = "more than L2 keeps" if hits.unique * s.width * s.wide > device.room else "within L2"
    text = f"{s.rows * s.width} adds to {hits.unique} rows, {where}; the hottest is hit {hits.most} times or more"
    return text + (f"; f32 sums are rounded to {s.item} bytes in a pass of their own" if s.item < 4 else "")


def _segmented_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    return f"{s.rows} rows sorted by index in {sort_seconds(s, device) * 1e6:.1f} us, each result row written once"


def _privatized_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    return f"{partials(s)} partials of {s.out} elements{' in shared memory' if s.own else ''}, folded in order"


def _regular_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    idle = f": too few for {device.sms} SMs" if s.owners < device.sms else ""
    idle = f": {s.rows // max(s.owners, 1)} rows each, one after another" if s.gathered and not idle else idle
    return f"{s.owners} rows of the result, each owned by one task{idle}"


def _fixed_words(s: Scatter[int], hits: Hits, device: Gpu) -> str:
    return f"{s.rows * s.width} adds of 64-bit integers after a pass for their scale; what is small beside the largest value loses digits"


_WORDS = {"segmented": _segmented_words, "regular": _regular_words, "privatized": _privatized_words, "atomic_fixed": _fixed_words, "atomic": _atomic_words}
