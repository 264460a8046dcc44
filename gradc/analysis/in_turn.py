"""The time that warps take which need several units of a multiprocessor in turn."""

from __future__ import annotations

from collections.abc import Sequence


def in_turn(seconds: Sequence[float], warps: int) -> float:
    """The time of a launch whose warps need units for so many seconds in all, where so many warps are at them at once,
    each at one.

    One warp leaves all units but one idle; many keep the slowest one busy.  Between the two this is mean value analysis
    (Reiser, Lavenberg, JACM 1980): a warp that comes to a unit finds there, on average, those that would be there
    without it.
    """
    there, total = [0.0] * len(seconds), 0.0
    for count in range(1, warps + 1):
        times = [s * (1 + n) for s, n in zip(seconds, there, strict=True)]
        total = sum(times)
        there = [count * t / total if total else 0.0 for t in times]
    return total / warps
