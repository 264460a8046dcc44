"""Strategy choice on a GPU: the cheapest allowed strategy of each combine, as a list of cases over the sizes.

Constant sizes give one case.  With one symbol, the crossovers are found in the cost model by integer bisection, so that
a case is ``N >= 3073``.  With several symbols, the cases are the thresholds of the model's formulas, each a product of
sizes compared with a number: short enough to read in a program, and near the optimum everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from ...analysis.chunks import GPU_MOST_CHUNKS, GPU_SHORTEST
from ...analysis.combine import Combine, Scatter, numbers, scatter_of, scatter_sizes
from ...analysis.cost import cheapest, deterministic
from ...analysis.strategies import (
    ATOMIC,
    ATOMIC_FIXED,
    PRIVATIZED,
    REGULAR,
    SEGMENTED,
    STRATEGIES,
    Strategy,
    owned_row_seconds,
)
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Predicate, Size, nominal, nonnegative, symbol, symbols
from ...ir.kernel import Kernel
from ...ir.types import Type
from ...targets.devices import Gpu
from ...targets.gpu import ROW_SECONDS

Case = tuple[Predicate | None, str]
"""(predicate, strategy); the first case that holds is taken, the last has no predicate."""
_LARGEST = 31
"""Crossovers are searched among sizes up to 2^31: positions and keys have 32 bits."""


def candidates(part: Combine, types: Mapping[str, Type], determinism: str, allowed: Sequence[str]) -> list[str]:
    """The strategies to choose from if none is forced.  Fixed-point atomics are excluded if rows can be sorted: a
    sum in sorted order is deterministic without rounding to fixed point.
    """
    names = [
        name for name in STRATEGIES if name in allowed and (determinism == "none" or deterministic(name, part, types))
    ]
    sortable = any(STRATEGIES[name].visits == "by key" for name in names)
    if (sortable or not part.gathered) and len(names) > 1:
        names = [name for name in names if not STRATEGIES[name].loses_digits]
    if not names:
        raise Unsupported(
            f"the combine into {part.buffer} can only be {', '.join(allowed)} here, which adds in any order;"
            ' determinism="none" allows it'
        )
    return names


def cases(
    kernel: Kernel, part: Combine, types: Mapping[str, Type], device: Gpu, determinism: str, allowed: Sequence[str]
) -> tuple[Case, ...]:
    """The cheapest of the allowed strategies, as cases over the sizes."""
    names = candidates(part, types, determinism, allowed)
    sizes = scatter_of(kernel, part, types)
    free = sorted(frozenset().union(*(symbols(size) for size in scatter_sizes(sizes))))
    if len(names) == 1 or not free:
        return ((None, names[0] if len(names) == 1 else cheapest(numbers(sizes, {}), device, names)),)
    return _crossovers(sizes, free[0], device, names) if len(free) == 1 else _thresholds(sizes, device, names)


def fallback(
    kernel: Kernel, part: Combine, types: Mapping[str, Type], device: Gpu, determinism: str, allowed: Sequence[str]
) -> str:
    """A single strategy for all sizes: the cheapest with 1024 for every symbol."""
    sizes = scatter_of(kernel, part, types)
    return cheapest(
        numbers(sizes, nominal(scatter_sizes(sizes))), device, candidates(part, types, determinism, allowed)
    )


def _crossovers(sizes: Scatter[Size], name: str, device: Gpu, names: Sequence[str]) -> tuple[Case, ...]:
    """The cases ``symbol >= value`` with the least value of each interval of one best strategy, largest first."""

    @functools.cache
    def best(value: int) -> str:
        try:
            return cheapest(numbers(sizes, {name: value}), device, names)
        except InvalidProblem:  # a division by a size that is 0
            if value > 1:
                raise
            return best(value + 1)

    pieces: list[tuple[int, str]] = [(0, best(0))]
    low = 0
    for high in (1 << power for power in range(_LARGEST + 1)):
        while best(high) != pieces[-1][1]:
            left, right = low, high  # left belongs to the last interval, right does not
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if best(middle) == pieces[-1][1] else (left, middle)
            pieces.append((right, best(right)))
            low = right
        low = high
    if len(pieces) > 1 and pieces[1][0] == 1:
        pieces = [(0, pieces[1][1]), *pieces[2:]]  # no case of its own for 0 rows
    return decided([(nonnegative([symbol(name) - least]), strategy) for least, strategy in reversed(pieces)])


def _thresholds(s: Scatter[Size], device: Gpu, names: Sequence[str]) -> tuple[Case, ...]:
    """The terms of the formulas that decide, in the order in which they do."""
    ways = [STRATEGIES[name] for name in names]
    thresholds: list[tuple[Size, Strategy]] = []  # taken where the size is >= 0
    if REGULAR in ways and not (s.gathered and SEGMENTED in ways):
        # an owner for each SM: nothing is idle, and nothing else moves less; where an owner adds one row after another,
        # as many as do that as fast as atomics, or as there would be partial results, or so few rows for each that they
        # are done before those would be folded
        each = owned_row_seconds(s)
        if s.reduced:
            thresholds.append((s.owners * int(2 * device.launch / each) - s.rows, REGULAR))
        enough = int(each * device.scattered) if s.gathered else GPU_MOST_CHUNKS if s.reduced else device.sms
        thresholds.append((s.owners - enough, REGULAR))
    if ATOMIC in ways and SEGMENTED in ways and not s.exact:  # R hot > sort, R being N / V at least
        thresholds.append((s.rows - s.keys * int((device.sort_base + 2 * device.sort_pass) / device.hot), SEGMENTED))
    if ATOMIC in ways:
        thresholds.append((device.room // s.wide - s.out, ATOMIC))  # the table stays in L2
    if SEGMENTED in ways:
        if (
            ATOMIC in ways and s.item >= 4
        ):  # 2 U D a > B sort: rows hit come and go; U is near N, and three passes are enough for 2^24 rows
            least = int((device.sort_base + 3 * device.sort_pass) * device.bandwidth)
            each = int(3 * device.bandwidth / device.sort_rate)
            thresholds += [(s.rows * (s.width * (2 * s.wide) - each) - least, SEGMENTED), (0, ATOMIC)]
        elif (
            PRIVATIZED in ways and ATOMIC not in ways
        ):  # 2 (N / 8 V + N) D b / rate > sort + launch, or so many rows for each task that a sort is sooner
            pays = device.sort_base + device.launch
            amount = int(min(pays * device.resident, max(pays * device.bandwidth, 2 * device.room)))
            thresholds += [
                (
                    ((s.rows + (GPU_SHORTEST - 1)) * s.width) * (s.keys + GPU_SHORTEST) * (2 * s.pair // GPU_SHORTEST)
                    - amount,
                    SEGMENTED,
                ),
                (s.rows - int(pays / ROW_SECONDS) * GPU_MOST_CHUNKS, SEGMENTED),
                (0, PRIVATIZED),
            ]
        else:
            thresholds.append((0, SEGMENTED))
    rest = [way for way in (SEGMENTED, ATOMIC, ATOMIC_FIXED, PRIVATIZED, REGULAR) if way in ways]
    thresholds.append((0, (rest or ways)[0]))
    return decided([(nonnegative([size]), way.name) for size, way in thresholds])


def decided(options: Iterable[tuple[Predicate, str]]) -> tuple[Case, ...]:
    """The cases without those that cannot hold, up to the first that always holds; trailing cases with the strategy of
    the last are dropped.
    """
    kept: list[tuple[Predicate, str]] = []
    for when, name in options:
        if when.conjunctions:
            kept.append((when, name))
        if () in when.conjunctions:
            break
    while len(kept) > 1 and kept[-2][1] == kept[-1][1]:
        del kept[-2]
    return (*kept[:-1], (None, kept[-1][1]))
