"""Lines of operators that read images at places which data decide."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Size
from ...ir.node import Node
from ...ir.types import I64
from ...ops.rules import converted
from ..table import Forms, checked
from .products import each


def _corners(at: Node, size: Size) -> tuple[Node, Node]:
    """(weights, places) of the two elements around each coordinate, [1, 2, ...] each; -1 is outside of the axis."""
    low = ops.floor(at)
    part = at - low
    first = converted(low, I64)
    places = [ops.where((p >= 0) & (p < size), p, -1) for p in (first, first + 1)]
    return ops.stack(1.0 - part, part, axis=1), ops.stack(*places, axis=1)


def _deform_conv(
    x: Node,
    w: Node,
    offset: Node,
    b: Node | None = None,
    mask: Node | None = None,
    *,
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    offset_group: int = 1,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    """``DeformConv``: a product of the weights with what is read at the places of a window, each moved by an offset."""
    if x.rank != 4:
        raise Unsupported(f"DeformConv over {x.rank - 2} axes; gradc takes 2")
    (n, channels, *sizes), (outputs, _, *kernel) = x.shape, w.shape
    step, spread, around = each(strides, 2, 1), each(dilations, 2, 1), each(pads, 4, 0)
    window, out = prod(int(k) for k in kernel), offset.shape[2:]
    if offset.shape[1] != offset_group * window * 2 or channels != w.shape[1] * group:
        raise InvalidProblem(f"offsets {offset.type} do not fit the image {x.type} and the weights {w.type}")
    moved = ops.reshape(offset, (n * offset_group, *kernel, 2, *out))
    weights, places = [], []
    for axis in range(2):
        shape = (n * offset_group, *kernel, *out)
        tap, place = (ops.iota(shape=shape, axis=at) for at in (1 + axis, 3 + axis))
        begin = converted(place * step[axis] + tap * spread[axis] - around[axis], x.dtype)
        own, at = _corners(begin + moved[:, :, :, axis], sizes[axis])
        weights.append(own)
        places.append(at)
    image = ops.reshape(x, (n * offset_group, channels // offset_group, *sizes))
    read = ops.interpolate_2d(image, *weights, *places)
    if mask is not None:
        read = read * ops.reshape(mask, (n * offset_group, 1, *kernel, *out))
    rows = ops.reshape(read, (n, group, channels // group * window, out[0] * out[1]))
    y = ops.matmul(ops.reshape(w, (1, group, outputs // group, channels // group * window)), rows)
    y = ops.reshape(y, (n, outputs, *out))
    return y if b is None else y + ops.reshape(b, (1, outputs, 1, 1))


def _roi_align(
    x: Node,
    rois: Node,
    images: Node,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Node:
    """``RoiAlign``: the mean, or the largest weighted corner, of a grid of points in each cell of each region."""
    if sampling_ratio <= 0:
        raise Unsupported("RoiAlign with as many points as each region is large; a sampling_ratio says how many")
    checked("mode", mode, ("avg", "max"))
    kinds = ("half_pixel", "output_half_pixel")
    half = 0.5 if checked("coordinate_transformation_mode", coordinate_transformation_mode, kinds) == kinds[0] else 0.0
    n, channels, height, width = x.shape
    count = rois.shape[0]
    # Cells and the points in them are axes: [1, regions, rows, points, columns, points].
    shape = (1, count, output_height, sampling_ratio, output_width, sampling_ratio)
    edges = rois * spatial_scale - half
    weights, places = [], []
    for axis, (size, cells) in enumerate(((height, output_height), (width, output_width))):
        begin, end = (ops.reshape(edges[:, i], (1, count, 1, 1, 1, 1)) for i in (1 - axis, 3 - axis))
        extent = end - begin if half else ops.maximum(end - begin, 1.0)
        cell, point = (converted(ops.iota(shape=shape, axis=2 + 2 * axis + k), x.dtype) for k in (0, 1))
        at = begin + (cell + (point + 0.5) / float(sampling_ratio)) * (extent / float(cells))
        inside = (at >= -1.0) & (at <= converted(ops.dim(size), x.dtype))
        last = converted(ops.dim(size - 1), x.dtype)
        own, near = _corners(ops.minimum(ops.maximum(at, 0.0), last), size)
        weights.append(ops.where(ops.unsqueeze(inside, 1), own, 0.0))
        places.append(near)
    # Images below one another: the place of a row says which.
    image = ops.reshape(images, (1, 1, count, 1, 1, 1, 1))
    rows = ops.where(places[0] < 0, places[0], places[0] + converted(image, I64) * height)
    tall = ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (1, channels, n * height, width))
    if mode == "avg":
        read = ops.interpolate_2d(tall, *weights, rows, places[1])
        y = ops.mean(read, (4, 6))
    else:
        corners = [
            ops.interpolate_2d(tall, weights[0][:, i], weights[1][:, j], rows[:, i], places[1][:, j])
            for i in (slice(0, 1), slice(1, 2))
            for j in (slice(0, 1), slice(1, 2))
        ]
        y = ops.amax(ops.maximum(ops.maximum(*corners[:2]), ops.maximum(*corners[2:])), (4, 6))
    return ops.transpose(ops.reshape(y, (channels, count, output_height, output_width)), (1, 0, 2, 3))


LINES: dict[str, Forms] = {
    "DeformConv": _deform_conv,
    "RoiAlign": {
        # regions were not moved by half an element yet
        10: functools.partial(_roi_align, coordinate_transformation_mode="output_half_pixel"),
        16: _roi_align,
    },
}
