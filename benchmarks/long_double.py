"""grid_sample and its gradients in NumPy's long double: the oracle for f64, where torch's own rounding of a coordinate
is larger than what is measured.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LONG = np.longdouble
ENOUGH = bool(np.finfo(LONG).nmant >= 63)
"""Where long double is f64 there is no better oracle than torch."""


def _keys(d: Array, a: float = -0.75) -> tuple[Array, Array]:
    """Keys' kernel at a signed distance, and its derivative."""
    near, r = np.abs(d) <= 1, np.abs(d)
    value = np.where(near, ((a + 2) * r - (a + 3)) * r * r + 1, ((a * r - 5 * a) * r + 8 * a) * r - 4 * a)
    slope = np.where(near, (3 * (a + 2) * r - 2 * (a + 3)) * r, (3 * a * r - 10 * a) * r + 8 * a)
    return value, slope * np.sign(d)


def _folded(x: Array, low: float, high: float) -> tuple[Array, Array]:
    """x folded back at two points, and the sign of its derivative."""
    if low == high:
        return np.full_like(x, low), np.zeros_like(x)
    times = np.floor((x - low) / (high - low))
    rest = x - low - times * (high - low)
    odd = times % 2 == 1
    return np.where(odd, high - rest, low + rest), np.where(odd, -1, 1)


def _padded(x: Array, n: int, padding: str, corners: bool) -> tuple[Array, Array]:
    """A place on an axis of n pixels, and its derivative."""
    slope = np.ones_like(x)
    if padding == "reflection":
        x, slope = _folded(x, *((0, n - 1) if corners else (-0.5, n - 0.5)))
    if padding != "zeros":
        slope = np.where((x <= 0) | (x >= n - 1), 0, slope)
        x = np.clip(x, 0, n - 1)
    return x, slope


def _taps(c: Array, n: int, mode: str, padding: str, corners: bool) -> list[tuple[Array, Array, Array]]:
    """Along one axis: (pixel, weight, derivative of the weight) of every tap; a pixel outside weighs nothing."""
    place = (c + 1) / 2 * (n - 1) if corners else ((c + 1) * n - 1) / 2
    scale = LONG((n - 1 if corners else n) / 2)
    if mode != "bicubic":
        place, slope = _padded(place, n, padding, corners)
        scale = scale * slope
    base, taps = np.floor(place), []
    for tap in {"nearest": (0,), "bilinear": (0, 1), "bicubic": (-1, 0, 1, 2)}[mode]:
        at, d = base + tap, place - base - tap
        if mode == "nearest":
            at, weight, slope = np.round(place), np.ones_like(d), np.zeros_like(d)
        else:
            weight, slope = _keys(d) if mode == "bicubic" else (1 - np.abs(d), LONG(2 * tap - 1))
        if mode == "bicubic":
            at, _ = _padded(at, n, padding, corners)
        inside = (at >= 0) & (at <= n - 1)
        taps.append(
            (np.where(inside, at, 0).astype(np.int64), np.where(inside, weight, 0), np.where(inside, slope * scale, 0))
        )
    return taps


def grid_sample(x: Array, grid: Array, dy: Array, mode: str, padding: str, corners: bool) -> tuple[Array, Array, Array]:
    """(value, gradient of x, gradient of the grid)."""
    spatial, n, c = x.shape[2:], *x.shape[:2]
    points = grid.reshape(n, -1, len(spatial)).astype(LONG)
    flat, g = x.reshape(n, c, -1).astype(LONG), dy.reshape(n, c, points.shape[1]).astype(LONG)
    axes = [_taps(points[..., len(spatial) - 1 - a], size, mode, padding, corners) for a, size in enumerate(spatial)]
    y, dx, dgrid = np.zeros_like(g), np.zeros((n * c, flat.shape[2]), LONG), np.zeros_like(points)
    for chosen in itertools.product(*axes):
        at = np.ravel_multi_index([pixel for pixel, _, _ in chosen], spatial)
        weight = np.prod([w for _, w, _ in chosen], axis=0)
        values = np.take_along_axis(flat, at[:, None], axis=2)
        y += weight[:, None] * values
        updates = weight[:, None] * g
        for k, row in enumerate(updates.reshape(n * c, -1)):
            np.add.at(dx[k], at[k // c], row)
        if mode != "nearest":
            along = (g * values).sum(1)
            for a in range(len(spatial)):
                others = np.prod([slope if b == a else w for b, (_, w, slope) in enumerate(chosen)], axis=0)
                dgrid[..., len(spatial) - 1 - a] += along * others
    return y.reshape(dy.shape), dx.reshape(x.shape), dgrid.reshape(grid.shape)
