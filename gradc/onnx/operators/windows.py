"""Lines of pooling and sampling."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import numpy as np

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim, floordiv
from ...ir.node import Node
from ...ir.types import I64
from ...ops.rules import converted
from ..table import Forms, Site, Sizes, checked
from .products import each, padding_of


def _extended(
    x: Node, auto_pad: str, pads: Any, kernel: Any, strides: Any, dilations: Any, ceil_mode: int
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Widths of padding, grown to what ``ceil_mode`` adds behind, and what it added."""
    rank = len(kernel)
    pairs = padding_of(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    for k, d, pair in zip(kernel, dilations, pairs, strict=True):
        if max(pair) > (k - 1) * d:
            raise InvalidProblem(f"padding of {max(pair)} for windows of {(k - 1) * d + 1}: some would hold nothing")
    if not ceil_mode or auto_pad not in ("NOTSET", ""):
        return pairs, (0,) * rank
    grown, extra = [], []
    for size, k, s, d, (a, b) in zip(x.shape[2:], kernel, strides, dilations, pairs, strict=True):
        if isinstance(size, Dim):
            raise Unsupported(f"ceil_mode over an axis of {size} elements")
        reach = (k - 1) * d + 1
        count = -(-(size + a + b - reach) // s) + 1
        if (count - 1) * s >= size + a:
            count -= 1
        more = max(0, (count - 1) * s + reach - (size + a + b))
        grown.append((a, b + more))
        extra.append(more)
    return tuple(grown), tuple(extra)


def _padded(x: Node, pairs: tuple[tuple[int, int], ...], value: Any) -> Node:
    return ops.pad(x, ((0, 0), (0, 0), *pairs), value=value) if any(n for p in pairs for n in p) else x


def _max_pool(
    site: Site,
    x: Node,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    pads: Any = None,
    storage_order: int = 0,
    strides: Any = None,
) -> Any:
    rank = x.rank - 2
    kernel, step, spread = each(kernel_shape, rank, 1), each(strides, rank, 1), each(dilations, rank, 1)
    pairs, _ = _extended(x, auto_pad, pads, kernel, step, spread, ceil_mode)
    lowest: Any = -inf if x.dtype.is_float else x.dtype.range[0]
    wide = _padded(x, pairs, lowest)
    y = ops.max_pool(wide, kernel, step, (0,) * rank, spread)
    if site.results < 2:
        return y
    return y, _indices(x, wide, pairs, kernel, step, spread, storage_order)


def _indices(x: Node, wide: Node, pairs: Any, kernel: Any, step: Any, spread: Any, storage_order: int) -> Node:
    """Where in the flat image, counted over batch and channels, the largest element stands."""
    rank = len(kernel)
    places = ops.max_pool_indices(wide, kernel, step, (0,) * rank, spread)
    sizes, own = wide.shape[2:], x.shape[2:]
    coordinates: list[Node] = []
    for axis in reversed(range(rank)):
        coordinates.insert(0, ops.mod(places, sizes[axis]) - pairs[axis][0])
        places = ops.floordiv(places, sizes[axis])
    order = list(range(rank)) if not storage_order else list(reversed(range(rank)))
    flat = None
    for axis in order:
        flat = coordinates[axis] if flat is None else flat * own[axis] + coordinates[axis]
    assert flat is not None
    image = ops.iota(shape=flat.shape, axis=0) * x.shape[1] + ops.iota(shape=flat.shape, axis=1)
    whole = image
    for size in own:
        whole = whole * size
    return converted(whole + flat, I64)


def _average_pool_first(
    x: Node, *, kernel_shape: Any, auto_pad: str = "NOTSET", pads: Any = None, strides: Any = None
) -> Node:
    """Before opset 7 padding is never counted."""
    return _average_pool(x, kernel_shape=kernel_shape, auto_pad=auto_pad, pads=pads, strides=strides)


def _average_pool(
    x: Node,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    rank = x.rank - 2
    kernel, step, spread = each(kernel_shape, rank, 1), each(strides, rank, 1), each(dilations, rank, 1)
    pairs, extra = _extended(x, auto_pad, pads, kernel, step, spread, ceil_mode)
    around = ((0, 0), (0, 0), *pairs)

    def summed(values: Node) -> Node:
        return ops.reduce_window(values, "sum", (1, 1, *kernel), (1, 1, *step), (1, 1, *spread))

    total = summed(ops.pad(x, around))
    if count_include_pad and not any(extra):
        return total / float(prod(kernel))
    ones = ops.broadcast_to(converted(ops.constant(value=(1.0,), dtype="f32"), x.dtype), (1, 1, *x.shape[2:]))
    if count_include_pad:
        inner = tuple((a, b - more) for (a, b), more in zip(pairs, extra, strict=True))
        ones = ops.pad(ones, ((0, 0), (0, 0), *inner), value=1.0)
        counted = ops.pad(ones, ((0, 0), (0, 0), *((0, more) for more in extra)))
    else:
        counted = ops.pad(ones, around)
    return total / summed(counted)


def _lp_pool_first(
    x: Node,
    *,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
    p: float = 2.0,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    """Of opset 1, whose exponent is a float."""
    if kernel_shape is None:
        raise InvalidProblem("an LpPool without a kernel_shape")
    return _lp_pool(x, kernel_shape=kernel_shape, auto_pad=auto_pad, p=p, pads=pads, strides=strides)


def _lp_pool(
    x: Node,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    p: float = 2,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    rank = x.rank - 2
    kernel, step, spread = each(kernel_shape, rank, 1), each(strides, rank, 1), each(dilations, rank, 1)
    pairs, _ = _extended(x, auto_pad, pads, kernel, step, spread, ceil_mode)
    powers = ops.pow(ops.abs(_padded(x, pairs, 0.0)), float(p))
    return ops.pow(ops.reduce_window(powers, "sum", (1, 1, *kernel), (1, 1, *step), (1, 1, *spread)), 1.0 / p)


def _all_axes(x: Node) -> tuple[int, ...]:
    return tuple(range(2, x.rank))


def _global_lp_pool(x: Node, *, p: float = 2) -> Node:
    return ops.pow(ops.sum(ops.pow(ops.abs(x), float(p)), _all_axes(x), keepdims=True), 1.0 / p)


def _max_unpool(
    x: Node,
    indices: Node,
    shape: Sizes | None = None,
    *,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    rank = x.rank - 2
    kernel, step, around = each(kernel_shape, rank, 1), each(strides, rank, 1), each(pads, 2 * rank, 0)
    sizes = [
        (n - 1) * s + k - around[i] - around[i + rank]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], step, kernel, strict=True))
    ]
    final = tuple(shape) if shape is not None else (*x.shape[:2], *sizes)
    count = prod(int(n) for n in final)
    if shape is not None:  # places count over the image that the window leaves
        rest = indices
        places: list[Node] = []
        for size in reversed(sizes):
            places.insert(0, ops.mod(rest, size))
            rest = ops.floordiv(rest, size)
        for size, place in zip(final[2:], places, strict=True):
            rest = rest * size + place
        indices = rest
    flat = ops.scatter(
        ops.broadcast_to(converted(ops.constant(value=(0.0,), dtype="f32"), x.dtype), (count,)),
        0,
        ops.reshape(indices, (prod(int(n) for n in x.shape),)),
        ops.reshape(x, (prod(int(n) for n in x.shape),)),
    )
    return ops.reshape(flat, final)


_SAMPLING = {
    "linear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
}
"""What the modes of GridSample are called here; before opset 20 those of an image have names of their own."""


def _grid_sample(
    x: Node, grid: Node, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Node:
    kind: Any = _SAMPLING[checked("mode", mode, _SAMPLING)]
    checked("padding_mode", padding_mode, ("zeros", "border", "reflection"))
    return ops.grid_sample(x, grid, mode=kind, padding_mode=padding_mode, align_corners=bool(align_corners))


def _col2im(
    x: Node, image: Sizes, block: Sizes, *, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Node:
    rank = len(image)
    around, step, spread = each(pads, 2 * rank, 0), each(strides, rank, 1), each(dilations, rank, 1)
    if rank == 2 and around[:rank] == around[rank:]:
        return ops.fold(x, tuple(image), tuple(int(n) for n in block), spread, around[:rank], step)
    if any(isinstance(n, Dim) for n in image):
        raise Unsupported("Col2Im into an image of unknown size")
    # The place of each element in the padded image, [block, blocks], added up there.
    sizes = [int(n) + a + b for n, a, b in zip(image, around[:rank], around[rank:], strict=True)]
    places = np.zeros((1, 1), np.int64)
    for size, n, s, d in zip(sizes, map(int, block), step, spread, strict=True):
        blocks = (size - (n - 1) * d - 1) // s + 1
        own = np.arange(n)[:, None] * d + np.arange(blocks) * s
        wide = places[:, None, :, None] * size + own[None, :, None, :]
        places = wide.reshape(places.shape[0] * n, places.shape[1] * blocks)
    batch, channels = x.shape[0], floordiv(x.shape[1], len(places))
    zeros = ops.broadcast_to(
        converted(ops.constant(value=(0.0,), dtype="f32"), x.dtype), (batch, channels, prod(sizes))
    )
    flat = ops.reshape(x, (batch, channels, places.size))
    whole = ops.reshape(ops.index_add(zeros, 2, places.reshape(-1), flat), (batch, channels, *sizes))
    cut = tuple((-a, -b) for a, b in zip(around[:rank], around[rank:], strict=True))
    return ops.pad(whole, ((0, 0), (0, 0), *cut)) if any(around) else whole


LINES: dict[str, Forms] = {
    "MaxPool": _max_pool,
    "AveragePool": {1: _average_pool_first, 7: _average_pool},
    "LpPool": {1: _lp_pool_first, 2: _lp_pool},
    "GlobalAveragePool": lambda x: ops.mean(x, _all_axes(x), keepdims=True),
    "GlobalMaxPool": lambda x: ops.amax(x, _all_axes(x), keepdims=True),
    "GlobalLpPool": _global_lp_pool,
    "MaxUnpool": _max_unpool,
    "GridSample": _grid_sample,
    "Col2Im": _col2im,
}
