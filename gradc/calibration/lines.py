"""Times of more and more work as lines, of which constants are the slopes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import DeviceError

FARTHEST = 0.25
"""How far a time may lie from the line through all of them."""
PLAUSIBLE = 20.0
"""How far a constant may lie from the listed one, either way: many of those are estimates."""


def line(name: str, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at 0, seconds per unit) of the line through points, each as near as its own time allows.

    :raises DeviceError: fewer than two amounts, time does not grow with work, or a point lies far from the line.
    """
    amounts, seconds = (np.asarray(v, np.float64) for v in zip(*points, strict=True))
    if len(set(amounts)) < 2 or not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise DeviceError(f"{name}: times of two amounts of work are wanted, got {_said(points)}")
    rows = np.stack([1 / seconds, amounts / seconds], 1)
    start, slope = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    off = np.abs(rows @ [start, slope] - 1).max()
    if not slope > 0 or off > FARTHEST:
        why = "more work does not take longer" if not slope > 0 else f"a time lies {off:.0%} from a straight line"
        raise DeviceError(f"{name}: {why}: {_said(points)}; is something else running on the device?")
    return float(start), float(slope)


def _said(points: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{amount:g} in {seconds * 1e6:.2f} us" for amount, seconds in points)
