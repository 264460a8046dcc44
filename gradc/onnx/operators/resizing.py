"""Resize: along each axis, elements at known places with known weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim
from ...ir.node import Node
from ...ir.types import F32
from ...ops.rules import converted
from ..table import Forms, Known, Sizes, checked, normalized_axes

Array = np.ndarray[Any, Any]


_COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)


def _coordinates(mode: str, out: int, size: int, scale: float, roi: tuple[float, float]) -> Array:
    """Where in the image each element of the result lies."""
    x = np.arange(out, dtype=np.float64)
    checked("coordinate_transformation_mode", mode, _COORDINATES)
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        adjusted = out / (size * scale)
        center = size / 2
        return center * (1 - adjusted) + (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / scale - 0.5 if out > 1 else np.zeros(out)
    if mode == "align_corners":
        return x * (size - 1) / (size * scale - 1) if size * scale > 1 else np.zeros(out)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":  # which opset 13 ended
        return (x + 0.5) / scale
    low, high = roi  # tf_crop_and_resize
    if out > 1:
        return low * (size - 1) + x * (high - low) * (size - 1) / (size * scale - 1)
    return np.full(out, 0.5 * (low + high) * (size - 1))


_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _nearest(x: Array, mode: str, scale: float) -> Array:
    if mode == "towards_the_sampled":
        # Before opset 11, on coordinates in f32: 7 / 0.7 is 10 there, and in f64, of f32's 0.7, a little more.
        x = x.astype(np.float32)
        return np.ceil(x) if scale < 1 else np.floor(x)
    if checked("nearest_mode", mode, _NEAREST) == "round_prefer_floor":
        return np.ceil(x - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(x + 0.5)
    return np.floor(x) if mode == "floor" else np.ceil(x)


def _cubic(t: Array, a: float) -> Array:
    t = np.abs(t)
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _taps(
    x: Array, size: int, mode: str, nearest: str, a: float, exclude: bool, scale: float, antialias: bool
) -> tuple[Array, Array]:
    """(places, weights), [out, taps] each: of the element at coordinate x."""
    if mode == "nearest":
        return np.clip(_nearest(x, nearest, scale), 0, size - 1)[:, None].astype(np.int64), np.ones((len(x), 1))
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / shrink
    first = np.floor(x - reach).astype(np.int64) + (1 if not antialias else 0)
    count = int(np.ceil(2 * reach)) + (1 if antialias else 0) + (1 if antialias else 0)
    places = first[:, None] + np.arange(count)
    distance = (places - x[:, None]) * shrink
    weights = np.maximum(0.0, 1 - np.abs(distance)) if mode == "linear" else _cubic(distance, a)
    if exclude or antialias:
        inside = (places >= 0) & (places < size) if exclude or antialias else np.ones_like(places, bool)
        if exclude:
            weights = np.where(inside, weights, 0.0)
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(places, 0, size - 1), weights


def _along(x: Node, axis: int, places: Array, weights: Array | None) -> Node:
    """Sums of elements along an axis."""
    shape = [1] * x.rank
    total: Node | None = None
    for tap in range(places.shape[1]):
        if weights is not None and not weights[:, tap].any():
            continue
        part = ops.gather(x, places[:, tap], axis)
        if weights is not None:
            shape[axis] = len(places)
            values = ops.reshape(weights[:, tap].astype(x.dtype.np), tuple(shape))
            part = part * ops.broadcast_to(values, part.shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _lengths(
    lengths: Sequence[Any], scales: Known | None, sizes: Sizes | None, policy: str
) -> tuple[list[int], list[float]]:
    """(sizes, scales) of the result along the axes that are resized; those of an axis that stays are not read."""
    if scales is not None and scales.size:
        factors = [float(s) for s in scales]
        if len(factors) != len(lengths) or not all(f > 0 for f in factors):
            raise InvalidProblem(f"scales {factors} for {len(lengths)} axes")
        return [
            int(np.floor(np.float32(n) * np.float32(s))) if isinstance(n, int) else 0
            for n, s in zip(lengths, factors, strict=True)  # in f32: ten times .7 are seven
        ], factors
    if sizes is None:
        raise InvalidProblem("neither scales nor sizes")
    if len(sizes) != len(lengths):
        raise InvalidProblem(f"{len(sizes)} sizes for {len(lengths)} axes")
    wanted = [n if isinstance(n, int) else 0 for n in sizes]
    factors = [w / n if isinstance(n, int) else 1.0 for w, n in zip(wanted, lengths, strict=True)]
    if policy == "stretch":
        return wanted, factors
    one = (min if policy == "not_larger" else max)(factors)
    return [int(np.floor(one * n + 0.5)) for n in lengths], [one] * len(factors)


def _resize(
    x: Node,
    roi: Known | None = None,
    scales: Known | None = None,
    sizes: Sizes | None = None,
    *,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Node:
    checked("mode", mode, ("nearest", "linear", "cubic"))
    checked("keep_aspect_ratio_policy", keep_aspect_ratio_policy, ("stretch", "not_larger", "not_smaller"))
    chosen = normalized_axes(axes, x.rank) if axes is not None else range(x.rank)
    lengths = [x.shape[a] for a in chosen]
    by_scale = scales is not None and scales.size > 0
    wanted, factors = _lengths(lengths, scales, sizes, keep_aspect_ratio_policy)
    crops, nearest = coordinate_transformation_mode == "tf_crop_and_resize", mode == "nearest"
    y, outside = x, []
    for i, (axis, n) in enumerate(zip(chosen, lengths, strict=True)):
        if not crops and (factors[i] == 1.0 if by_scale else sizes is not None and sizes[i] == n):
            continue
        if isinstance(n, Dim):
            raise Unsupported(f"resizing an axis of {n} elements")
        ends = (float(roi[i]), float(roi[i + len(chosen)])) if roi is not None and roi.size else (0.0, 1.0)
        at = _coordinates(coordinate_transformation_mode, wanted[i], n, factors[i], ends)
        smooth = bool(antialias) and not nearest
        places, weights = _taps(at, n, mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), factors[i], smooth)
        wide = y if y.dtype.is_float or nearest else converted(y, F32)
        y = _along(wide, axis, places, None if nearest else weights)
        if crops:
            outside.append((axis, (at < 0) | (at > n - 1)))
    value: Any = extrapolation_value if y.dtype.is_float else int(extrapolation_value)
    for axis, beyond in outside:
        if beyond.any():
            shape = tuple(len(beyond) if i == axis else 1 for i in range(y.rank))
            y = ops.where(ops.broadcast_to(ops.reshape(beyond, shape), y.shape), value, y)
    return converted(y, x.dtype)


def _resize_first(x: Node, scales: Known, *, mode: str = "nearest") -> Node:
    """Of opset 10."""
    kind = "linear" if mode in ("bilinear", "trilinear") else mode  # which the schema counts among the linear
    if kind == "cubic":
        raise InvalidProblem(f"the mode {mode!r}")
    return _resize(
        x,
        None,
        np.asarray(scales, np.float32),
        None,
        mode=kind,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="towards_the_sampled",
    )


def _upsample(x: Node, scales: Known, *, mode: str = "nearest") -> Node:
    """Of opset 9: a Resize by factors of 1 and more."""
    if (scales < 1).any():
        raise InvalidProblem(f"an Upsample by {scales.tolist()}: a scale is 1 or more")
    return _resize_first(x, scales, mode=mode)


def _upsample_by(x: Node, *, scales: Any, mode: str = "nearest") -> Node:
    """Of opsets 7 and 8."""
    return _upsample(x, np.asarray(scales, np.float32), mode=mode)


def _upsample_image(x: Node, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Node:
    """Of opset 1: an image [N, C, H, W]."""
    if x.rank != 4:
        raise InvalidProblem(f"an Upsample of opset 1 takes an image of 4 axes, not {x.type}")
    return _upsample(x, np.array([1, 1, height_scale, width_scale], np.float32), mode=mode)


LINES: dict[str, Forms] = {
    "Resize": {10: _resize_first, 11: _resize},
    "Upsample": {1: _upsample_image, 7: _upsample_by, 9: _upsample},
}
