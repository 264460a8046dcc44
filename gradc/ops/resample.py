"""interpolate: an array on a finer or coarser grid of its trailing axes, one axis after another."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from ..errors import TypeRuleError
from ..ir.dims import Dim, Size
from ..ir.node import Node, call
from ..ir.op import BadSample, Function, Sample
from ..ir.types import F32, I64, DType
from .movement import iota
from .pointwise import cast, floor, maximum
from .rules import converted, floating, full, reshaped, spread

SizeLike = int | Dim
Mode = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic", "area"]
_AXES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
"""The modes of one number of spatial axes, which take align_corners."""
KEYS = -0.75
"""The parameter of the cubic kernel (Keys 1981)."""


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


def _cubic(x: Node, axis: int, out: Size, scale: float | None, align_corners: bool) -> Node:
    source = _source(x, axis, out, scale, align_corners)
    low = floor(source)
    place, t = cast(low, I64), source - low

    def near(d: Node) -> Node:
        return ((KEYS + 2) * d - (KEYS + 3)) * d * d + 1

    def far(d: Node) -> Node:
        return ((KEYS * d - 5 * KEYS) * d + 8 * KEYS) * d - 4 * KEYS

    total: Node | None = None
    for step, weight in ((-1, far(t + 1)), (0, near(t)), (1, near(1 - t)), (2, far(2 - t))):
        part = _taken(x, axis, place + step)
        part = part * _along(weight, part, axis)
        total = part if total is None else total + part
    assert total is not None
    return total


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
    if antialias:
        raise TypeRuleError("antialias=True is not there")
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
        way = _cubic if mode == "bicubic" else _linear
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
        Sample(("F[1,2,N]",), {"scale_factor": 2.0, "mode": "linear"}, dims={"N": 3}),
    ),
    bad=(
        BadSample(("f32[2,2,3]",), {"size": 4, "mode": "bilinear"}, match="mode='bilinear' for an input of rank 3"),
        BadSample(("f32[2,2,3]",), {"size": 4, "scale_factor": 2.0}, match="one of them"),
        BadSample(("f32[2,2,3]",), {"size": 4, "align_corners": True}, match="align_corners with mode='nearest'"),
        BadSample(("f32[2,2,3]",), {"scale_factor": -1.0}, match="is not positive"),
    ),
    doc=(
        "[N,C,...] on a grid of size, or of scale_factor as many positions, for 1 to 3 spatial axes; nearest positions"
        " are computed in f32 for every dtype"
    ),
    source="torch.nn.functional.interpolate; Keys 1981",
)
