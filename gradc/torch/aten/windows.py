"""Lines of convolutions, pooling, resizing and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node

Ints = Sequence[int]


def _each(values: Any, rank: int) -> tuple[Any, ...]:
    """A value per axis, as torch lets one stand for all."""
    several = values if isinstance(values, tuple) else (values,)
    return several * rank if len(several) == 1 else several


def _unfold(x: Node, axis: int, size: int, step: int) -> Node:
    if not x.rank:
        return _unfold(ops.reshape(x, (1,)), 0, size, step)[0]
    axis %= x.rank
    count = (x.shape[axis] - size) // step + 1
    return ops.windows(x, axis=(axis,), size=(size,), count=(count,), step=(step,), dilation=(1,), padding=(0,))


def _convolution(
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Node:
    rank = weight.rank - 2
    return ops.convolution(
        x,
        weight,
        bias,
        stride=_each(stride, rank),
        padding=tuple((n, n) for n in _each(padding, rank)),
        dilation=_each(dilation, rank),
        transposed=transposed,
        output_padding=_each(output_padding, rank) if transposed else (),
        groups=groups,
    )


def _max_pool(rank: int, indices: bool) -> Any:
    function = {1: ops.max_pool1d, 2: ops.max_pool2d, 3: ops.max_pool3d}[rank]

    def pool(x: Node, size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Any:
        window = _each(size, rank)
        return function(
            x,
            window,
            _each(stride, rank) if stride != () else window,
            _each(padding, rank),
            _each(dilation, rank),
            ceil_mode,
            return_indices=indices,
        )

    return pool


def _avg_pool(rank: int) -> Any:
    function = {1: ops.avg_pool1d, 2: ops.avg_pool2d, 3: ops.avg_pool3d}[rank]

    def pool(
        x: Node,
        size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Node:
        window = _each(size, rank)
        return function(
            x,
            window,
            _each(stride, rank) if stride != () else window,
            _each(padding, rank),
            ceil_mode,
            count_include_pad,
            divisor_override,
        )

    return pool


def _resized(mode: str) -> Any:
    def resize(x: Node, size: Any, *rest: Any) -> Node:
        align = rest[0] if mode in ("linear", "bilinear", "bicubic", "trilinear") else None
        factors: Any = rest[-1] if rest else None
        if size is None:
            return ops.interpolate(x, scale_factor=tuple(factors or ()), mode=mode, align_corners=align)
        return ops.interpolate(x, size=tuple(size), mode=mode, align_corners=align)

    return resize


def _resized_to_size(mode: str, antialias: bool = False) -> Any:
    def resize(x: Node, size: Any, *rest: Any) -> Node:
        align = bool(rest[0]) if mode in ("linear", "bilinear", "bicubic", "trilinear") else None
        scales = rest[1:] if align is not None else rest
        if any(s is not None for s in scales):
            raise Unsupported("resizing to a size by factors that it does not follow from")
        return ops.interpolate(x, size=tuple(size), mode=mode, align_corners=align, antialias=antialias)

    return resize


_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def _grid_sample(x: Node, grid: Node, mode: int, padding: int, align_corners: bool) -> Node:
    return ops.grid_sample(x, grid, mode=_MODES[mode], padding_mode=_PADDINGS[padding], align_corners=align_corners)


LINES: dict[str, Any] = {
    "aten.convolution.default": _convolution,
    "aten.max_pool2d.default": _max_pool(2, False),
    "aten.max_pool2d_with_indices.default": _max_pool(2, True),
    "aten.max_pool3d.default": _max_pool(3, False),
    "aten.max_pool3d_with_indices.default": _max_pool(3, True),
    "aten.avg_pool1d.default": _avg_pool(1),
    "aten.avg_pool2d.default": _avg_pool(2),
    "aten.avg_pool3d.default": _avg_pool(3),
    "aten.adaptive_avg_pool1d.default": lambda x, size: ops.adaptive_avg_pool1d(x, size),
    "aten.adaptive_avg_pool2d.default": lambda x, size: ops.adaptive_avg_pool2d(x, size),
    "aten._adaptive_avg_pool2d.default": lambda x, size: ops.adaptive_avg_pool2d(x, size),
    "aten.adaptive_avg_pool3d.default": lambda x, size: ops.adaptive_avg_pool3d(x, size),
    "aten._adaptive_avg_pool3d.default": lambda x, size: ops.adaptive_avg_pool3d(x, size),
    "aten.adaptive_max_pool2d.default": lambda x, size: ops.adaptive_max_pool2d(x, size, return_indices=True),
    "aten.adaptive_max_pool3d.default": lambda x, size: ops.adaptive_max_pool3d(x, size, return_indices=True),
    "aten.max_unpool2d.default": lambda x, indices, sizes: ops.max_unpool(x, indices, sizes=tuple(sizes)),
    "aten.max_unpool3d.default": lambda x, indices, sizes, stride, padding: ops.max_unpool(
        x, indices, sizes=tuple(sizes)
    ),
    "aten.unfold.default": _unfold,
    "aten.im2col.default": lambda x, size, dilation, padding, stride: ops.unfold(x, size, dilation, padding, stride),
    "aten.col2im.default": lambda x, output, size, dilation, padding, stride: ops.fold(
        x, output, size, dilation, padding, stride
    ),
    "aten.pixel_shuffle.default": lambda x, factor: ops.pixel_shuffle(x, factor),
    "aten.pixel_unshuffle.default": lambda x, factor: ops.pixel_unshuffle(x, factor),
    "aten.upsample_nearest1d.vec": _resized("nearest"),
    "aten.upsample_nearest2d.vec": _resized("nearest"),
    "aten.upsample_nearest3d.vec": _resized("nearest"),
    "aten.upsample_linear1d.vec": _resized("linear"),
    "aten.upsample_bilinear2d.vec": _resized("bilinear"),
    "aten.upsample_trilinear3d.vec": _resized("trilinear"),
    "aten.upsample_bicubic2d.vec": _resized("bicubic"),
    "aten._upsample_bilinear2d_aa.default": _resized_to_size("bilinear", antialias=True),
    "aten._upsample_bicubic2d_aa.default": _resized_to_size("bicubic", antialias=True),
    "aten.upsample_nearest1d.default": _resized_to_size("nearest"),
    "aten.upsample_nearest2d.default": _resized_to_size("nearest"),
    "aten.upsample_nearest3d.default": _resized_to_size("nearest"),
    "aten.upsample_linear1d.default": _resized_to_size("linear"),
    "aten.upsample_bilinear2d.default": _resized_to_size("bilinear"),
    "aten.upsample_trilinear3d.default": _resized_to_size("trilinear"),
    "aten.upsample_bicubic2d.default": _resized_to_size("bicubic"),
    "aten.grid_sampler.default": _grid_sample,
    "aten.grid_sampler_2d.default": _grid_sample,
    "aten.grid_sampler_3d.default": _grid_sample,
    "aten.affine_grid_generator.default": lambda theta, size, align: ops.affine_grid(theta, size, align_corners=align),
}
