"""interpolate: an array on a finer or coarser grid of its trailing axes, one axis after another."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ...ir.types import F32, I64, DType
from ..elementwise.pointwise import bitwise_and, cast, floor, ge, lt, maximum, minimum, where
from ..rules import converted, floating, full, reshaped, spread
from ..shapes.movement import iota

SizeLike = int | Dim
Mode = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic", "area"]
_AXES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
"""The modes of one number of spatial axes, which take align_corners."""
KEYS, SMOOTH_KEYS = -0.75, -0.5
"""The parameter of the cubic kernel (Keys 1981); with antialias torch takes another."""


def _sizes(input: Node, size: Any, scale_factor: Any) -> tuple[tuple[Size, ...], tuple[float | None, ...]]:
    """The sizes of the result, and the scale of each axis where it was given."""
    own = input.shape[2:]
    if (size is None) == (scale_factor is None):
        raise TypeRuleError("size or scale_factor: one of them")
    given = size if scale_factor is None else scale_factor
    values = given if isinstance(given, tuple) else (given,) * len(own)
    if len(values) != len(own):
        raise TypeRuleError(f"{list(values)} has {len(values)} entries for {len(own)} spatial axes")
    if scale_factor is None:
        sizes: tuple[Size, ...] = values
    else:
        if any(not 0 < s < math.inf for s in values):
            raise TypeRuleError(f"scale_factor={list(values)} is not positive")
        sizes = tuple(_scaled(n, s) for n, s in zip(own, values, strict=True))
    for n in (*sizes, *own):
        if isinstance(n, int) and n < 1:
            raise TypeRuleError(f"from {'x'.join(map(str, own))} to {'x'.join(map(str, sizes))}: 1 at least")
    return sizes, (None,) * len(own) if scale_factor is None else values


def _scaled(n: Size, scale: float) -> Size:
    if scale == int(scale):
        return n * int(scale)
    if not isinstance(n, int):
        raise TypeRuleError(f"scale_factor={scale} of the symbolic size {n}: give a whole number, or the size")
    return math.floor(n * scale)


def _ratio(n: Size, out: Size, scale: float | None, dtype: DType) -> Node | float:
    """Input positions per output position."""
    if scale is not None:
        return 1.0 / scale
    if isinstance(n, int) and isinstance(out, int):
        return n / out
    above, below = (cast(call("dim", size=size), dtype) for size in (n, out))
    return above / below


def _taken(x: Node, axis: int, place: Node) -> Node:
    """x at positions of an axis, those outside at its ends."""
    return call("gather", x, place, axis=axis, oob="clamp")


def _along(line: Node, x: Node, axis: int) -> Node:
    """A value per position of an axis, spread over x."""
    return spread(reshaped(line, tuple(n if a == axis else 1 for a, n in enumerate(x.shape))), x.shape)


def _nearest(x: Node, axis: int, out: Size, scale: float | None, exact: bool) -> Node:
    n = x.shape[axis]
    if not exact and isinstance(n, int) and isinstance(out, int) and out % n == 0 and scale in (None, out // n):
        return call("repeat_interleave", x, out // n, axis)
    # in f32, as torch does for every dtype
    ratio = _ratio(n, out, scale, F32)
    line = iota.plain(shape=(out,), dtype=F32)
    line = line + 0.5 if exact else line
    return _taken(x, axis, cast(floor(line * (ratio if isinstance(ratio, Node) else float(np.float32(ratio)))), I64))


def _source(x: Node, axis: int, out: Size, scale: float | None, align_corners: bool) -> Node:
    """The position in the input of each output position, as a real number."""
    n, dtype = x.shape[axis], x.dtype
    line = iota.plain(shape=(out,), dtype=dtype)
    if not align_corners:
        return (line + 0.5) * _ratio(n, out, scale, dtype) - 0.5
    if isinstance(out, int) and isinstance(n, int):
        return line * ((n - 1) / (out - 1) if out > 1 else 0.0)
    last, steps = (cast(call("dim", size=size - 1), dtype) for size in (n, out))
    return line * (last / maximum(steps, full(1, steps)))


def _linear(x: Node, axis: int, out: Size, scale: float | None, align_corners: bool) -> Node:
    source = _source(x, axis, out, scale, align_corners)
    source = maximum(source, full(0, source))
    low = floor(source)
    place = cast(low, I64)
    below, above = _taken(x, axis, place), _taken(x, axis, place + 1)
    t = _along(source - low, below, axis)
    return below * (1 - t) + above * t


def _near(d: Node, a: float) -> Node:
    """The cubic kernel at a distance of 0 to 1."""
    return ((a + 2) * d - (a + 3)) * d * d + 1


def _far(d: Node, a: float) -> Node:
    """The cubic kernel at a distance of 1 to 2."""
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a


def _cubic(x: Node, axis: int, out: Size, scale: float | None, align_corners: bool) -> Node:
    source = _source(x, axis, out, scale, align_corners)
    low = floor(source)
    place, t = cast(low, I64), source - low

    weights = _far(t + 1, KEYS), _near(t, KEYS), _near(1 - t, KEYS), _far(2 - t, KEYS)
    total: Node | None = None
    for step, weight in enumerate(weights, -1):
        part = _taken(x, axis, place + step)
        part = part * _along(weight, part, axis)
        total = part if total is None else total + part
    assert total is not None
    return total


def _smoothed(x: Node, axis: int, out: Size, scale: float | None, align_corners: bool, cubic: bool) -> Node:
    """The kernel as wide as a coarser grid's step, its weights normalised: a product with a matrix [n, out]."""
    n, zero = x.shape[axis], full(0, x.type.with_shape(out, x.shape[axis]))
    if not isinstance(n, int) or not isinstance(out, int):
        raise TypeRuleError(f"antialias=True from {n} to {out} positions: constant sizes are needed")
    step = (n - 1) / max(out - 1, 1) if align_corners else 1.0 / scale if scale is not None else n / out
    if align_corners and out == 1:
        step = 0.0
    wide = max(step, 1.0)
    centre = (iota.plain(shape=zero.shape, dtype=x.dtype) + 0.5) * step
    place = iota.plain(shape=zero.shape, axis=1, dtype=x.dtype)
    reach = (2 if cubic else 1) * wide
    low, high = floor(centre - reach + 0.5), minimum(floor(centre + reach + 0.5), full(n, centre))
    d = call("abs", place - centre + 0.5) / wide
    if cubic:
        weight = where(lt(d, full(1, d)), _near(d, SMOOTH_KEYS), where(lt(d, full(2, d)), _far(d, SMOOTH_KEYS), zero))
    else:
        weight = maximum(1 - d, zero)
    weight = where(bitwise_and(ge(place, low), lt(place, high)), weight, zero)
    weight = weight / call("sum", weight, 1, True)
    y: Node = call("matmul", call("movedim", x, axis, -1), weight.T)
    return call("movedim", y, -1, axis)


_WAYS: dict[str, Callable[..., Node]] = {
    "linear": _linear,
    "bilinear": _linear,
    "trilinear": _linear,
    "bicubic": _cubic,
}


def _interpolate(
    input: Node,
    size: int | Dim | tuple[SizeLike, ...] | None = None,
    scale_factor: float | tuple[float, ...] | None = None,
    mode: Mode = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Node:
    spatial = input.rank - 2
    if not 1 <= spatial <= 3 or _AXES.get(mode, spatial) != spatial:
        raise TypeRuleError(f"mode={mode!r} for an input of rank {input.rank}")
    if align_corners is not None and mode not in _AXES:
        raise TypeRuleError(f"align_corners with mode={mode!r}: {', '.join(_AXES)} take it")
    if antialias and mode not in ("bilinear", "bicubic"):
        raise TypeRuleError(f"antialias=True with mode={mode!r}: bilinear and bicubic take it")
    floating(input.type)
    sizes, scales = _sizes(input, size, scale_factor)
    if recompute_scale_factor:
        scales = (None,) * spatial
    if mode == "area":
        return call(f"adaptive_avg_pool{spatial}d", input, sizes)
    if mode in ("nearest", "nearest-exact"):
        for a in range(spatial):
            input = _nearest(input, 2 + a, sizes[a], scales[a], mode == "nearest-exact")
        return input
    x = converted(input, input.dtype.compute)
    for a in reversed(range(spatial)):
        way = functools.partial(_smoothed, cubic=mode == "bicubic") if antialias else _WAYS[mode]
        x = way(x, 2 + a, sizes[a], scales[a], bool(align_corners))
    return converted(x, input.dtype)


interpolate = Function(
    "interpolate",
    write=_interpolate,
    samples=(
        Sample(("F[2,2,3,4]",), {"size": (5, 7), "mode": "bilinear"}),
        Sample(("F[2,2,3,4]",), {"scale_factor": 2.0}),
        Sample(("F[2,2,5,4]",), {"size": (3, 6), "mode": "bilinear", "align_corners": True}),
        Sample(("F[2,2,5,4]",), {"size": (3, 7), "mode": "bicubic"}),
        Sample(("F[2,2,5]",), {"scale_factor": 1.7, "mode": "nearest-exact"}),
        Sample(("F[2,1,2,3,4]",), {"scale_factor": (1.5, 0.7, 2.0), "mode": "trilinear"}),
        Sample(("F[2,2,5,4]",), {"size": 3, "mode": "area"}),
        Sample(("F[1,2,5,7]",), {"size": (2, 9), "mode": "bilinear", "antialias": True}),
        Sample(("F[1,2,5,7]",), {"scale_factor": (1.7, 0.4), "mode": "bicubic", "antialias": True}),
        Sample(("F[1,2,N]",), {"scale_factor": 2.0, "mode": "linear"}, dims={"N": 3}),
    ),
    bad=(
        BadSample(("f32[2,2,3]",), {"size": 4, "mode": "bilinear"}, match="mode='bilinear' for an input of rank 3"),
        BadSample(("f32[2,2,3]",), {"size": 4, "scale_factor": 2.0}, match="one of them"),
        BadSample(("f32[2,2,3]",), {"size": 4, "align_corners": True}, match="align_corners with mode='nearest'"),
        BadSample(("f32[2,2,3]",), {"scale_factor": -1.0}, match="is not positive"),
        BadSample(("f32[2,2,3]",), {"size": 4, "antialias": True}, match="antialias=True with mode='nearest'"),
        BadSample(
            ("f32[2,2,N,3]",),
            {"size": 4, "mode": "bilinear", "antialias": True},
            match="constant sizes are needed",
        ),
    ),
    doc=(
        "[N,C,...] on a grid of size, or of scale_factor as many positions, for 1 to 3 spatial axes; nearest positions"
        " are computed in f32 for every dtype; antialias (bilinear, bicubic): the kernel spans a coarser grid's step"
    ),
    source="torch.nn.functional.interpolate; Keys 1981",
)
