"""Convolutions of any rank and their transposes, over windows that are views and the library's matrix product.

A convolution is one of three bilinear maps between an image, a response and a filter, of which each is the gradient of
the others: the response of an image to a filter, the image that a response spreads to, and the filter that correlates
both.  Each is a library call (cuDNN's fprop, dgrad and wgrad) where a target has such a function; windows and a matrix
product elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Assumption, Size, ceildiv, floordiv, known_nonnegative, product, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Library, Sample
from ...ir.statement import Index
from ...ir.types import BF16, F16, F32, F64, DType, Type
from ..rules import floating, full, leading, reshaped, spread
from ..shapes.windows import Ints, SizeLike, overlap_add, per_axis, window_count, windows
from . import minimal_filtering

MOST_PHASES = 9
"""Phases of an image, whose elements lie a stride apart, that are computed one by one at most."""
FEWEST_CHANNELS = 8
"""Channels of such an image at least: fewer leave a product without rows."""

Padding = int | tuple[int, ...] | Literal["valid", "same"]


@dataclass(frozen=True)
class Geometry:
    """How the windows of an image lie.

    :param image: its spatial sizes, :param response: how many windows there are along each, :param filter: their sizes.
    :param before: the padding before the first element.
    """

    image: tuple[Size, ...]
    response: tuple[Size, ...]
    filter: tuple[Size, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[Size, ...]
    groups: int

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(2, 2 + len(self.image)))

    @property
    def pointwise(self) -> bool:
        """Whether the windows are the image itself."""
        ones = all(n == 1 for n in (*self.filter, *self.stride))
        return ones and not any(self.before) and self.image == self.response

    @property
    def steps_by_one(self) -> bool:
        return all(n == 1 for n in self.stride)

    @property
    def tiles(self) -> bool:
        """Whether windows may lie side by side: none is known to overlap another, or to leave a gap to it, whose
        elements are in no window.
        """
        known = all(isinstance(n, int) for n in (*self.filter, *self.before))
        return not known or all(k == s for k, s in zip(self.filter, self.stride, strict=True))

    def is_minimal(self, dtype: DType) -> bool:
        """Whether :mod:`.minimal_filtering` has a form for it; of f32, whose errors it keeps near those of the sum."""
        once = all(n == 1 for n in (*self.stride, *self.dilation, self.groups))
        return dtype is F32 and once and self.filter == (minimal_filtering.TAPS,) * 2

    @property
    def phases(self) -> list[tuple[int, ...]]:
        """Where the elements of the image begin that are a stride apart, along every axis."""
        return list(itertools.product(*map(range, self.stride)))

    @property
    def adjoint(self) -> Geometry:
        """Where a window's neighbour is one element away: the windows of the response that an element of the image is
        in, whose places are in the opposite order.
        """
        far = (d * (k - 1) - p for k, d, p in zip(self.filter, self.dilation, self.before, strict=True))
        return replace(self, image=self.response, response=self.image, before=tuple(far))

    def windows(self, image: Node) -> Node:
        """[N, C, *image] -> [N, C, *response, *filter]"""
        if self.pointwise:
            return reshaped(image, (*image.shape, *self.filter))
        steps = {"step": self.stride, "dilation": self.dilation, "padding": self.before}
        return windows.plain(image, axis=self.axes, size=self.filter, count=self.response, value=0, **steps)

    def columns(self, image: Node) -> Node:
        """[N, C, *image] -> [N, C, *filter, *response]"""
        if self.pointwise:
            return reshaped(image, (*image.shape[:2], *self.filter, *self.response))
        return call("transpose", self.windows(image), self._exchanged(len(self.response)))

    def image_of_columns(self, columns: Node) -> Node:
        """[N, C, *filter, *response] -> [N, C, *image], the adjoint of columns."""
        if self.pointwise:
            return reshaped(columns, (*columns.shape[:2], *self.image))
        return self.overlap_add(call("transpose", columns, self._exchanged(len(self.response))))

    @staticmethod
    def _exchanged(spatial: int) -> tuple[int, ...]:
        """The order of axes that exchanges a response's and a filter's."""
        return (0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial))

    def overlap_add(self, parts: Node) -> Node:
        """[..., *response, *filter] -> [..., *image]"""
        steps = {"step": self.stride, "dilation": self.dilation, "padding": self.before}
        lead = parts.rank - 2 * len(self.image)
        axes = tuple(range(lead, lead + len(self.image)))
        return overlap_add.plain(parts, axis=axes, length=self.image, **steps)


def is_depthwise(weight: Node) -> bool:
    """Whether a response has one channel of the image: nothing is left for a matrix product to add up."""
    return bool(weight.shape[1] == 1)


def _is_wide(weight: Node) -> bool:
    """Whether an image has many channels in each group."""
    channels = weight.shape[1]
    return not isinstance(channels, int) or channels >= FEWEST_CHANNELS


def response_of(image: Node, weight: Node, geometry: Geometry, multiply: str = "matmul") -> Node:
    """image [N, G*B, *image], weight [G*A, B, *filter] -> [N, G*A, *response]

    :param multiply: the op that multiplies matrices.
    """
    n, groups, spatial = image.shape[0], geometry.groups, len(geometry.image)
    if is_depthwise(weight):
        parts = geometry.windows(image)
        outer = weight.shape[0] // groups
        shape = (n, groups, outer, *geometry.response, *geometry.filter)
        wide = spread(reshaped(parts, (n, groups, 1, *geometry.response, *geometry.filter)), shape)
        each = wide * _per_window(weight, geometry, shape)
        total = call("sum", each, axis=tuple(range(3 + spatial, 3 + 2 * spatial)))
        return reshaped(total, (n, weight.shape[0], *geometry.response))
    lead = (n,) if groups == 1 else (n, groups)
    rows = weight.shape[1] * product(geometry.filter)
    columns = reshaped(geometry.columns(image), (*lead, rows, product(geometry.response)))
    y = call(multiply, reshaped(weight, _rows(weight, groups)), columns)
    return reshaped(y, (n, weight.shape[0], *geometry.response))


def image_of(response: Node, weight: Node, geometry: Geometry) -> Node:
    """response [N, G*A, *response], weight [G*A, B, *filter] -> [N, G*B, *image], the adjoint of response_of."""
    n, groups, spatial = response.shape[0], geometry.groups, len(geometry.image)
    if is_depthwise(weight):
        outer = weight.shape[0] // groups
        shape = (n, groups, outer, *geometry.response, *geometry.filter)
        wide = spread(reshaped(response, (n, groups, outer, *geometry.response, *(1 for _ in range(spatial)))), shape)
        each = wide * _per_window(weight, geometry, shape)
        parts = geometry.overlap_add(each)
        return call("sum", parts, axis=2) if outer != 1 else reshaped(parts, (n, groups, *geometry.image))
    if geometry.steps_by_one and not geometry.pointwise:
        return response_of(response, _turned(weight, groups), geometry.adjoint)
    if not geometry.tiles and math.prod(geometry.stride) <= MOST_PHASES and _is_wide(weight):
        return _interleaved([_phase_of(response, weight, geometry, phase) for phase in geometry.phases], geometry)
    lead = (n,) if groups == 1 else (n, groups)
    rows = reshaped(response, (*lead, weight.shape[0] // groups, product(geometry.response)))
    columns = call("matmul", reshaped(weight, _rows(weight, groups)).T, rows)
    shape = (n, groups * weight.shape[1], *geometry.filter, *geometry.response)
    return geometry.image_of_columns(reshaped(columns, shape))


def _phase_of(response: Node, weight: Node, geometry: Geometry, phase: tuple[int, ...]) -> Node:
    """Every stride-th element from ``phase`` on of the image that a response spreads to: [N, G*B, *ceil(image/stride)].

    Its element q is at tap k of window o where o s + k d - before = q s + phase, so only every so many taps meet it,
    through which the response spreads with stride 1.
    """
    taps: list[range] = []
    dilation, before = [], []
    for first, k, s, d, low in zip(
        phase, geometry.filter, geometry.stride, geometry.dilation, geometry.before, strict=True
    ):
        every = s // math.gcd(s, d)
        start = next((t for t in range(min(every, k)) if (t * d - low - first) % s == 0), k)
        taps.append(range(start, k, every))
        dilation.append(every * d // s)
        before.append((low + first - start * d) // s)
    sizes = tuple(ceildiv(n, s) for n, s in zip(geometry.image, geometry.stride, strict=True))
    if not all(taps):
        return full(0, response.type.with_shape(response.shape[0], weight.shape[1] * geometry.groups, *sizes))
    picked = call(
        "slice",
        weight,
        start=(0, 0, *(t.start for t in taps)),
        limit=weight.shape,
        step=(1, 1, *(t.step for t in taps)),
    )
    ones = (1,) * len(taps)
    met = replace(
        geometry, image=sizes, filter=picked.shape[2:], stride=ones, dilation=tuple(dilation), before=tuple(before)
    )
    return image_of(response, picked, met)


def _interleaved(phases: list[Node], geometry: Geometry) -> Node:
    """The image whose elements a stride apart are ``phases``, the last axis's first elements in turn."""
    for axis, s in reversed(list(zip(geometry.axes, geometry.stride, strict=True))):
        joined = []
        for i in range(0, len(phases), s):
            shape = phases[i].shape
            parts = [reshaped(p, (*shape[: axis + 1], 1, *shape[axis + 1 :])) for p in phases[i : i + s]]
            joined.append(
                reshaped(call("concat", *parts, axis=axis + 1), (*shape[:axis], shape[axis] * s, *shape[axis + 1 :]))
            )
        phases = joined
    (whole,) = phases
    return leading(whole, (*whole.shape[:2], *geometry.image))


def filter_of(response: Node, image: Node, geometry: Geometry) -> Node:
    """response [N, G*A, *response], image [N, G*B, *image] -> [G*A, B, *filter], the gradient of response_of."""
    n, groups, spatial = image.shape[0], geometry.groups, len(geometry.image)
    outer, inner = response.shape[1] // groups, image.shape[1] // groups
    shape = (groups * outer, inner, *geometry.filter)
    if inner == 1:
        parts = geometry.windows(image)
        wide = (n, groups, outer, *geometry.response, *geometry.filter)
        ones = tuple(1 for _ in range(spatial))
        left = spread(reshaped(response, (n, groups, outer, *geometry.response, *ones)), wide)
        right = spread(reshaped(parts, (n, groups, 1, *geometry.response, *geometry.filter)), wide)
        return reshaped(call("sum", left * right, axis=(0, *range(3, 3 + spatial))), shape)
    lead = () if groups == 1 else (groups,)
    places = n * product(geometry.response)
    # one product over all images: [G, A, N*response] @ [G, B*filter, N*response].T
    left = call("transpose", response, (1, 0, *geometry.axes))
    split = reshaped(geometry.columns(image), (n, groups, inner, *geometry.filter, *geometry.response))
    kernel = tuple(range(3, 3 + spatial))
    right = call("transpose", split, (1, 2, *kernel, 0, *range(3 + spatial, split.rank)))
    columns = reshaped(right, (*lead, inner * product(geometry.filter), places))
    return reshaped(call("matmul", reshaped(left, (*lead, outer, places)), columns.T), shape)


def _turned(weight: Node, groups: int) -> Node:
    """[G*A, B, *filter] -> [G*B, A, *filter], the places in a window in the opposite order."""
    outer, inner = weight.shape[0] // groups, weight.shape[1]
    split = reshaped(weight, (groups, outer, inner, *weight.shape[2:]))
    turned = call("flip", call("transpose", split, (0, 2, 1, *range(3, split.rank))), axis=tuple(range(3, split.rank)))
    return reshaped(turned, (groups * inner, outer, *weight.shape[2:]))


def _rows(weight: Node, groups: int) -> tuple[Size, ...]:
    """The shape of a weight as a matrix per group: [G, A, B*filter]."""
    inner = product(weight.shape[1:])
    return (weight.shape[0], inner) if groups == 1 else (groups, weight.shape[0] // groups, inner)


def _per_window(weight: Node, geometry: Geometry, shape: tuple[Size, ...]) -> Node:
    """A depthwise weight spread to [N, G, A, *response, *filter]."""
    ones = tuple(1 for _ in geometry.image)
    return spread(reshaped(weight, (1, shape[1], shape[2], *ones, *geometry.filter)), shape)


# -- convolution -------------------------------------------------------------------------------------------------------


def _geometry(
    input: Type | Node,
    weight: Type | Node,
    *,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> Geometry:
    sizes, filter_ = input.shape[2:], weight.shape[2:]
    if transposed:
        far = tuple(
            (n - 1) * s + d * (k - 1) + 1 + o - low - high
            for n, k, s, d, o, (low, high) in zip(
                sizes, filter_, stride, dilation, output_padding, padding, strict=True
            )
        )
        image, response = far, sizes
    else:
        image = sizes
        response = tuple(
            window_count(n, k, s, d, low + high)
            for n, k, s, d, (low, high) in zip(sizes, filter_, stride, dilation, padding, strict=True)
        )
    return Geometry(image, response, filter_, stride, dilation, tuple(low for low, _ in padding), groups)


def _check_channels(input: Type, weight: Type, bias: Type | None, transposed: bool, groups: int) -> Size:
    """The number of channels of the result."""
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype is not input.dtype:
            raise TypeRuleError(f"dtypes differ: {input.dtype} and {name} {other.dtype}; write a cast")
    if groups < 1:
        raise TypeRuleError(f"groups={groups}: 1 at least")
    for what, size in (("the input has", input.shape[1]), ("the weight has", weight.shape[0])):
        if groups > 1 and not isinstance(size, int):
            raise TypeRuleError(f"{what} {size} channels: groups={groups} needs a known number")
        if groups > 1 and size % groups:
            raise TypeRuleError(f"{what} {size} channels, which groups={groups} does not divide")
    taken = weight.shape[0] if transposed else weight.shape[1] * groups
    if not same(input.shape[1], taken):
        raise TypeRuleError(f"the input has {input.shape[1]} channels and the weight takes {taken}")
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and (bias.rank != 1 or not same(bias.shape[0], channels)):
        raise TypeRuleError(f"bias {bias} for {channels} channels")
    return channels


def _convolution(
    input: Type,
    weight: Type,
    bias: Type | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    transposed: bool = False,
    output_padding: tuple[int, ...] = (),
    groups: int = 1,
) -> Any:
    spatial = weight.rank - 2
    if spatial < 1 or floating(input).rank != weight.rank:
        raise TypeRuleError(f"an input of rank {input.rank} and a weight of rank {weight.rank}: both 3 at least, alike")
    channels = _check_channels(input, weight, bias, transposed, groups)
    output_padding = per_axis("output_padding", output_padding or 0, spatial)
    if len(padding) != spatial or any(len(p) != 2 or min(p) < 0 for p in padding):
        raise TypeRuleError(f"padding {padding} is not {spatial} pairs of 0 at least")
    attrs: dict[str, Any] = {
        "stride": per_axis("stride", stride, spatial, 1),
        "padding": padding,
        "dilation": per_axis("dilation", dilation, spatial, 1),
        "transposed": transposed,
        "output_padding": output_padding,
        "groups": groups,
    }
    for extra, s, d in zip(output_padding, attrs["stride"], attrs["dilation"], strict=True):
        if extra and (not transposed or extra >= max(s, d)):
            raise TypeRuleError(f"output_padding={extra} is not below stride {s} or dilation {d} of a transpose")
    geometry = _geometry(input, weight, **attrs)
    sizes = geometry.image if transposed else geometry.response
    if any(isinstance(n, int) and n < 1 for n in sizes):
        raise TypeRuleError(f"a result of {'x'.join(map(str, sizes))}: the kernel is larger than the padded input")
    return input.with_shape(input.shape[0], channels, *sizes), attrs


def _convolution_value(input: Node, weight: Node, bias: Node | None = None, **attrs: Any) -> Node:
    return _biased(_mapped(input, weight, _geometry(input, weight, **attrs), attrs["transposed"], attrs), bias)


def _mapped(x: Node, weight: Node, geometry: Geometry, to_image: bool, attrs: Mapping[str, Any]) -> Node:
    """The image that a response spreads to, or the response of an image."""
    if any(isinstance(n, int) and n < 1 for n in geometry.response):  # the result of no convolution
        return (image_of if to_image else response_of)(x, weight, geometry)
    how = {name: attrs[name] for name in ("stride", "padding", "dilation", "groups")}
    if to_image:
        return convolution_image.plain(x, weight, size=geometry.image, **how)
    return convolution_response.plain(x, weight, size=geometry.response, **how)


def _biased(y: Node, bias: Node | None) -> Node:
    return y if bias is None else y + spread(reshaped(bias, (*bias.shape, *(1 for _ in y.shape[2:]))), y.shape)


def _minimal_convolution(
    dims: Mapping[str, int], input: Node, weight: Node, bias: Node | None = None, **attrs: Any
) -> Node | None:
    geometry = _geometry(input, weight, **attrs)
    response = geometry.image if attrs["transposed"] else geometry.response
    channels = (weight.shape[0], weight.shape[1])
    if not geometry.is_minimal(input.dtype) or not minimal_filtering.pays(channels, input.shape[0], response, dims):
        return None
    if attrs["transposed"]:
        return _biased(minimal_filtering.image_of(input, weight, geometry.image, geometry.adjoint.before), bias)
    return _biased(minimal_filtering.response_of(input, weight, geometry.response, geometry.before), bias)


def _convolution_vjp(
    g: Node, y: Node, input: Node, weight: Node, bias: Node | None = None, **attrs: Any
) -> tuple[Node, ...]:
    # dx is the other direction's value; dw correlates the response with the image; db is the sum over all but channels
    geometry, transposed = _geometry(input, weight, **attrs), attrs["transposed"]
    response, image = (input, g) if transposed else (g, input)
    empty = any(isinstance(n, int) and n < 1 for n in input.shape[2:])  # the result of no convolution
    if geometry.steps_by_one and not any(attrs["output_padding"]) and not empty:
        other = convolution.plain(g, weight, **{**attrs, "transposed": not transposed})
    else:
        other = _mapped(g, weight, geometry, not transposed, attrs)
    if empty:
        filter_ = filter_of(response, image, geometry)
    else:
        taps = {"size": geometry.filter, "padding": attrs["padding"]}
        steps = {name: attrs[name] for name in ("stride", "dilation", "groups")}
        filter_ = convolution_filter.plain(response, image, **taps, **steps)
    parts = [other, filter_]
    return (*parts, *(() if bias is None else (call("sum", g, axis=(0, *geometry.axes)),)))


def _implied(node: Node) -> list[Assumption]:
    return [Assumption(n, ">=", 1) for n in node.shape[2:] if not isinstance(n, int)]


_PLAIN = {"stride": (1,), "padding": ((0, 0),), "dilation": (1,)}
_FULL = {"stride": (2, 1), "padding": ((1, 1), (1, 2)), "dilation": (1, 2)}
_THREE = {"stride": (1, 2, 1), "padding": ((0, 0), (1, 1), (0, 1)), "dilation": (1, 1, 1)}

convolution = Composite(
    "convolution",
    infer=_convolution,
    decompose=_convolution_value,
    cheaper=_minimal_convolution,
    vjp=_convolution_vjp,
    implies=_implied,
    samples=(
        Sample(("F[2,4,N,4]", "F[6,2,3,2]", "F[6]"), {**_FULL, "groups": 2}, dims={"N": 6}),
        Sample(("F[N,2,5]", "F[4,1,3]"), {**_PLAIN, "groups": 2}, dims={"N": 2}),
        Sample(("F[2,3,2,4]", "F[3,2,3,2]", "F[2]"), {**_FULL, "transposed": True, "output_padding": (1, 0)}),
        Sample(("F[N,2,4]", "F[2,1,3]"), {**_PLAIN, "transposed": True, "groups": 2}, dims={"N": 2}),
        Sample(("F[2,C,5,4]", "F[O,C,3,2]", "F[O]"), _FULL, dims={"C": 3, "O": 2}),
    ),
    bad=(
        BadSample(("f32[2,4,6]", "f32[6,3,3]"), _PLAIN, match="has 4 channels and the weight takes 3"),
        BadSample(("f32[2,C,6]", "f32[6,D,3]"), _PLAIN, match="has C channels and the weight takes D"),
        BadSample(
            ("f32[2,C,6]", "f32[6,C//2,3]"), {**_PLAIN, "groups": 2}, match="C channels: groups=2 needs a known number"
        ),
        BadSample(("f32[2,4,2]", "f32[6,4,3]"), _PLAIN, match="larger than the padded input"),
        BadSample(("f32[2,4,6]", "f32[6,4,3]"), {**_PLAIN, "stride": (0,)}, match="stride=0: 1 at least"),
        BadSample(("f32[2,4,6]", "f32[6,4,3]"), {**_PLAIN, "groups": 3}, match="which groups=3 does not divide"),
        BadSample(("f32[2,4,6]", "f32[6,4,3]", "f32[4]"), _PLAIN, match="bias f32[4] for 6 channels"),
        BadSample(("f32[2,4,6]", "f64[6,4,3]"), _PLAIN, match="dtypes differ: f32 and weight f64"),
    ),
    doc=(
        "the cross-correlation of input [N,C,...] with weight [O,C/groups,...], or its transpose, with weight"
        " [C,O/groups,...]; padding is a pair per axis; on a CPU, of f32 with a filter of 3 by 3 and stride 1, by"
        " minimal filtering where that takes less time, unless numerics are strict"
    ),
    source="torch.ops.aten.convolution",
)

# -- the three maps ----------------------------------------------------------------------------------------------------


def _fitting(response: Type, input: Type, weight: Type, **attrs: Any) -> dict[str, Any]:
    """The attributes of a map between these three, canonical.

    :raises TypeRuleError: no convolution of this image with this filter has such a response.
    """
    made, canonical = _convolution(input, weight, **attrs)
    missing = (known_nonnegative(n - m - 1) for n, m in zip(response.shape, made.shape, strict=True))
    # a transpose with output_padding meets fewer
    if not all(map(same, made.shape[:2], response.shape[:2])) or any(missing):
        size = "x".join(map(str, weight.shape[2:]))
        raise TypeRuleError(f"the response is {response}, and that to a filter of {size} is {made}")
    return {name: canonical[name] for name in _HOW}


def _alike(first: str, x: Type, second: str, y: Type, size: tuple[SizeLike, ...]) -> None:
    if not (x.rank == y.rank == len(size) + 2 >= 3):
        raise TypeRuleError(f"{first} {x} and {second} {y}: both of rank 3 at least, alike")


def _convolution_response(
    input: Type,
    weight: Type,
    *,
    size: tuple[SizeLike, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Any:
    _alike("an input", input, "a filter", weight, size)
    response = input.with_shape(input.shape[0], weight.shape[0], *size)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return response, {"size": size, **_fitting(response, input, weight, **how)}


def _convolution_image(
    response: Type,
    weight: Type,
    *,
    size: tuple[SizeLike, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Any:
    _alike("a response", response, "a filter", weight, size)
    image = response.with_shape(response.shape[0], weight.shape[1] * groups, *size)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return image, {"size": size, **_fitting(response, image, weight, **how)}


def _convolution_filter(
    response: Type,
    input: Type,
    *,
    size: tuple[SizeLike, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, ...], ...],
    dilation: tuple[int, ...],
    groups: int = 1,
) -> Any:
    _alike("a response", response, "an input", input, size)
    if groups < 1 or (groups > 1 and not isinstance(input.shape[1], int)):
        raise TypeRuleError(
            f"an input {input} in groups={groups}: 1 group at least, a known number of channels if more"
        )
    weight = response.with_shape(response.shape[1], floordiv(input.shape[1], groups), *size)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return weight, {"size": size, **_fitting(response, input, weight, **how)}


_HOW = ("stride", "padding", "dilation", "groups")


def _between(
    image: Type | Node, response: tuple[Size, ...], filter_: tuple[Size, ...], attrs: Mapping[str, Any]
) -> Geometry:
    before = tuple(low for low, _ in attrs["padding"])
    return Geometry(image.shape[2:], response, filter_, attrs["stride"], attrs["dilation"], before, attrs["groups"])


def _of_response(input: Node, weight: Node, *, size: tuple[Size, ...], **attrs: Any) -> Geometry:
    return _between(input, size, weight.shape[2:], attrs)


def _of_image(response: Node, weight: Node, *, size: tuple[Size, ...], **attrs: Any) -> Geometry:
    return replace(_between(response, response.shape[2:], weight.shape[2:], attrs), image=size)


def _of_filter(response: Node, input: Node, *, size: tuple[Size, ...], **attrs: Any) -> Geometry:
    return _between(input, response.shape[2:], size, attrs)


def _minimal_filter(dims: Mapping[str, int], response: Node, input: Node, **attrs: Any) -> Node | None:
    geometry = _of_filter(response, input, **attrs)
    channels = (response.shape[1], input.shape[1])
    pays = minimal_filtering.pays(channels, input.shape[0], geometry.response, dims)
    if not geometry.is_minimal(input.dtype) or not pays:
        return None
    return minimal_filtering.filter_of(response, input, geometry.before)


def _implied_between(response: Type | Node, input: Type | Node, weight: Type | Node, node: Node) -> list[Assumption]:
    attrs = {name: node.attrs[name] for name in _HOW}
    most = _geometry(input, weight, **attrs, transposed=False, output_padding=()).response
    beyond = (m - n for n, m in zip(response.shape[2:], most, strict=True))
    ones = (Assumption(n, ">=", 1) for n in response.shape[2:] if not isinstance(n, int))
    return [*ones, *(Assumption(rest, ">=", 0) for rest in beyond if not isinstance(rest, int))]


# what a library computes them by, in NumPy


def _met(geometry: Any) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """For each tap of a filter, where the elements that it meets lie in an image between its padding."""
    for tap in np.ndindex(*geometry.filter):
        starts = [k * d for k, d in zip(tap, geometry.dilation, strict=True)]
        yield (
            tap,
            tuple(
                slice(start, start + n * s, s)
                for start, n, s in zip(starts, geometry.response, geometry.stride, strict=True)
            ),
        )


def _extents(geometry: Any) -> list[tuple[int, int]]:
    """The padding before and after each spatial axis with which every window lies in the image."""
    return [
        (low, max(0, (o - 1) * s + d * (k - 1) + 1 - low - n))
        for low, n, o, k, s, d in zip(
            geometry.before,
            geometry.image,
            geometry.response,
            geometry.filter,
            geometry.stride,
            geometry.dilation,
            strict=True,
        )
    ]


def _grouped(x: Any, groups: int) -> Any:
    """[N, G*B, ...] -> [N, G, B, ...]"""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _by_group(weight: Any, groups: int) -> Any:
    """[G*A, B, ...] -> [G, A, B, ...]"""
    return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])


def _response_in_numpy(image: Any, weight: Any, geometry: Any) -> Any:
    """:func:`response_of` of arrays, in their dtype."""
    n, groups = image.shape[0], geometry.groups
    padded = _grouped(np.pad(image, [(0, 0), (0, 0), *_extents(geometry)]), groups)
    taps = _by_group(weight, groups)
    out = np.zeros((n, groups, weight.shape[0] // groups, *geometry.response), image.dtype)
    for tap, at in _met(geometry):
        out += np.einsum("ngb...,gab->nga...", padded[(..., *at)], taps[(..., *tap)])
    return out.reshape(n, weight.shape[0], *geometry.response)


def _image_in_numpy(response: Any, weight: Any, geometry: Any) -> Any:
    """:func:`image_of` of arrays, in their dtype."""
    n, groups, around = response.shape[0], geometry.groups, _extents(geometry)
    sizes = [low + size + high for size, (low, high) in zip(geometry.image, around, strict=True)]
    padded: Any = np.zeros((n, groups, weight.shape[1], *sizes), response.dtype)
    spread_, taps = _grouped(response, groups), _by_group(weight, groups)
    for tap, at in _met(geometry):
        padded[(..., *at)] += np.einsum("nga...,gab->ngb...", spread_, taps[(..., *tap)])
    inside = tuple(slice(low, low + size) for size, (low, _) in zip(geometry.image, around, strict=True))
    return padded[(..., *inside)].reshape(n, groups * weight.shape[1], *geometry.image)


def _filter_in_numpy(response: Any, image: Any, geometry: Any) -> Any:
    """:func:`filter_of` of arrays, in their dtype."""
    groups = geometry.groups
    padded = _grouped(np.pad(image, [(0, 0), (0, 0), *_extents(geometry)]), groups)
    given = _grouped(response, groups)
    out: Any = np.zeros((groups, given.shape[2], padded.shape[2], *geometry.filter), image.dtype)
    for tap, at in _met(geometry):
        met = padded[(..., *at)]
        out[(..., *tap)] = np.einsum("ngap,ngbp->gab", *(x.reshape(*x.shape[:3], -1) for x in (given, met)))
    return out.reshape(response.shape[1], padded.shape[2], *geometry.filter)


def _reference(geometry_of: Any, compute: Any) -> Any:
    """A map's NumPy meaning, added up in f64 at least."""

    def reference(x: Any, y: Any, **attrs: Any) -> Any:
        wide = np.result_type(x.dtype, np.float64)
        return compute(x.astype(wide), y.astype(wide), geometry_of(x, y, **attrs)).astype(x.dtype)

    return reference


def _pays(geometry_of: Any, filter_at: int | None) -> Any:
    """Whether a library's function is to compute a node: not where the windows are the image itself, which a matrix
    product reads as it lies, and not where each response has one channel, which has no windows in memory.
    """

    def pays(node: Node) -> bool:
        geometry: Geometry = geometry_of(*node.operands, **node.attrs)
        weight = node if filter_at is None else node.operands[filter_at]
        attrs = {name: node.attrs[name] for name in _HOW}
        image = node.type.with_shape(node.shape[0], weight.shape[1] * geometry.groups, *geometry.image)
        most = _geometry(image, weight, **attrs, transposed=False, output_padding=()).response
        exact = all(map(same, most, geometry.response))  # else a library would compute a larger response
        few = len(geometry.image) <= 3
        return exact and few and node.dtype in LIBRARY_DTYPES and not geometry.pointwise and not is_depthwise(weight)

    return pays


LIBRARY_DTYPES = (F16, BF16, F32, F64)
"""Of convolutions by a library."""


def _axes_of(*names: str) -> Any:
    """A call's axes: n, o and y.. of a response, n, c and x.. of an image, o, i and k.. of a filter.

    :param names: what the operands and the result are.
    """

    def axes(node: Node) -> Any:
        sizes: dict[str, Size] = {}
        indices = []
        for what, value in zip(names, (*node.operands, node), strict=True):
            lead, letter = _LETTERS[what]
            own = [*lead, *(f"{letter}{a}" for a in range(value.rank - 2))]
            sizes |= zip(own, value.shape, strict=True)
            indices.append(tuple(map(Index.of, own)))
        return tuple(sizes.items()), tuple(indices[:-1]), indices[-1]

    return axes


_LETTERS = {"response": ("no", "y"), "image": ("nc", "x"), "filter": ("oi", "k")}


def _views_of(*names: str) -> Any:
    def views(out: list[str], inner: list[str]) -> tuple[tuple[str, ...], ...]:
        every = [*out, *inner]
        return tuple(
            (*_LETTERS[what][0], *sorted(a for a in every if a[0] == _LETTERS[what][1] and a[1:])) for what in names
        )

    return views


convolution_response: Library = Library(
    "convolution_response",
    infer=_convolution_response,
    reference=_reference(_of_response, _response_in_numpy),
    decompose=lambda input, weight, **attrs: response_of(input, weight, _of_response(input, weight, **attrs)),
    pays=_pays(_of_response, 1),
    axes=_axes_of("image", "filter", "response"),
    views=_views_of("image", "filter"),
    attributes=lambda shape: {"size": shape[2:]},
    carries=_HOW,
    channels_last=True,
    in_place_of_dtype=True,
    implies=lambda node: _implied_between(node, node.operands[0], node.operands[1], node),
    # each of the three is linear in the other two, and its gradient by one is the map from the others to it
    vjp=lambda g, y, input, weight, *, size, **how: (
        convolution_image.plain(g, weight, size=input.shape[2:], **how),
        convolution_filter.plain(g, input, size=weight.shape[2:], **how),
    ),
    samples=(
        Sample(("F[2,4,6,4]", "F[6,2,3,2]"), {**_FULL, "size": (3, 5), "groups": 2}),
        Sample(("F[N,C,5]", "F[O,C,3]"), {**_PLAIN, "size": (3,)}, dims={"N": 2, "C": 3, "O": 2}),
        Sample(("F[1,2,3,4,3]", "F[3,2,2,3,2]"), {**_THREE, "size": (2, 2, 3)}),
        Sample(
            ("F[2,3,5,6]", "F[4,3,3,3]"),
            {"stride": (2, 2), "padding": ((0, 1), (1, 0)), "dilation": (1, 1), "size": (2, 2)},
        ),
    ),
    bad=(
        BadSample(("f32[2,4,6]", "f32[6,4,3]"), {**_PLAIN, "size": (5,)}, match="the response is"),
        BadSample(
            ("f32[2,4,6]", "f32[6,3,3]"), {**_PLAIN, "size": (4,)}, match="has 4 channels and the weight takes 3"
        ),
        BadSample(("f32[2,4,6]", "f32[6,4,3]"), {**_PLAIN, "size": (4, 4)}, match="rank 3 at least, alike"),
        BadSample(("f32[2,4,6]", "f64[6,4,3]"), {**_PLAIN, "size": (4,)}, match="dtypes differ"),
    ),
    doc=(
        "the response of input [N,C,...] to a filter, weight [O,C/groups,...], [N,O,*size]: a convolution's, or the"
        " first elements of it"
    ),
    source="torch.ops.aten.convolution",
)

convolution_image: Library = Library(
    "convolution_image",
    infer=_convolution_image,
    reference=_reference(_of_image, _image_in_numpy),
    decompose=lambda response, weight, **attrs: image_of(response, weight, _of_image(response, weight, **attrs)),
    pays=_pays(_of_image, 1),
    axes=_axes_of("response", "filter", "image"),
    views=_views_of("response", "filter"),
    attributes=lambda shape: {"size": shape[2:]},
    carries=_HOW,
    channels_last=True,
    in_place_of_dtype=True,
    implies=lambda node: _implied_between(node.operands[0], node, node.operands[1], node),
    vjp=lambda g, y, response, weight, *, size, **how: (
        convolution_response.plain(g, weight, size=response.shape[2:], **how),
        convolution_filter.plain(response, g, size=weight.shape[2:], **how),
    ),
    samples=(
        Sample(("F[2,6,3,5]", "F[6,2,3,2]"), {**_FULL, "size": (6, 4), "groups": 2}),
        Sample(("F[N,O,3]", "F[O,C,3]"), {**_PLAIN, "size": (5,)}, dims={"N": 2, "C": 3, "O": 2}),
        Sample(("F[1,3,2,2,3]", "F[3,2,2,3,2]"), {**_THREE, "size": (3, 4, 3)}),
        Sample(
            ("F[2,4,2,2]", "F[4,3,3,3]"),
            {"stride": (2, 2), "padding": ((0, 1), (1, 0)), "dilation": (1, 1), "size": (5, 6)},
        ),
    ),
    bad=(
        BadSample(("f32[2,6,5]", "f32[6,4,3]"), {**_PLAIN, "size": (6,)}, match="the response is"),
        BadSample(("f32[2,5,4]", "f32[6,4,3]"), {**_PLAIN, "size": (6,)}, match="the response is"),
        BadSample(("f32[2,6,4]", "f32[6,4,3]"), {**_PLAIN, "size": (6, 6)}, match="rank 3 at least, alike"),
        BadSample(("f32[2,6,4]", "f64[6,4,3]"), {**_PLAIN, "size": (6,)}, match="dtypes differ"),
    ),
    doc=(
        "the gradient of a convolution by its input: the image [N,C,*size] that response [N,O,...] spreads to through"
        " weight [O,C/groups,...], as a transposed convolution with this weight does"
    ),
    source="torch.nn.grad.conv2d_input",
)

convolution_filter: Library = Library(
    "convolution_filter",
    infer=_convolution_filter,
    reference=_reference(_of_filter, _filter_in_numpy),
    decompose=lambda response, input, **attrs: filter_of(response, input, _of_filter(response, input, **attrs)),
    cheaper=_minimal_filter,
    pays=_pays(_of_filter, None),
    axes=_axes_of("response", "image", "filter"),
    views=_views_of("response", "image"),
    attributes=lambda shape: {"size": shape[2:]},
    carries=_HOW,
    channels_last=True,
    in_place_of_dtype=True,
    implies=lambda node: _implied_between(node.operands[0], node.operands[1], node, node),
    vjp=lambda g, y, response, input, *, size, **how: (
        convolution_response.plain(input, g, size=response.shape[2:], **how),
        convolution_image.plain(response, g, size=input.shape[2:], **how),
    ),
    samples=(
        Sample(("F[2,6,(N+1)//2,5]", "F[2,4,N,4]"), {**_FULL, "size": (3, 2), "groups": 2}, dims={"N": 6}),
        Sample(("F[2,O,3]", "F[2,C,5]"), {**_PLAIN, "size": (3,)}, dims={"C": 3, "O": 2}),
    ),
    bad=(
        BadSample(("f32[2,6,4]", "f32[2,4,6]"), {**_PLAIN, "size": (4,)}, match="the response is"),
        BadSample(("f32[3,6,4]", "f32[2,4,6]"), {**_PLAIN, "size": (3,)}, match="the response is"),
        BadSample(
            ("f32[2,6,4]", "f32[2,4,6]"), {**_PLAIN, "size": (3,), "groups": 4}, match="groups=4 does not divide"
        ),
        BadSample(("f32[2,6,4]", "f64[2,4,6]"), {**_PLAIN, "size": (3,)}, match="dtypes differ"),
        BadSample(("f32[2,6]", "f32[2,4,6]"), {**_PLAIN, "size": (3,)}, match="rank 3 at least"),
        BadSample(("f32[2,6,4,4]", "f32[2,4,6]"), {**_PLAIN, "size": (3,)}, match="rank 3 at least, alike"),
        BadSample(
            ("f32[2,6,4]", "f32[2,C,6]"), {**_PLAIN, "size": (3,), "groups": 2}, match="a known number of channels"
        ),
    ),
    doc=(
        "the gradient of a convolution by its weight: the cross-correlation of response [N,O,...] with input [N,C,...]"
        " at the places of a filter of this size, [O,C/groups,*size]"
    ),
    source="torch.nn.grad.conv2d_weight",
)

# -- as torch calls them -----------------------------------------------------------------------------------------------


def _named(input: Node, weight: Node, bias: Node | None, spatial: int, **attrs: Any) -> Node:
    """The convolution of an input with or without a batch axis."""
    if weight.rank != spatial + 2 or input.rank not in (spatial + 1, spatial + 2):
        raise TypeRuleError(
            f"an input of rank {input.rank} and a weight of rank {weight.rank}: {spatial + 1} or {spatial + 2}, and"
            f" {spatial + 2}"
        )
    batched = input if input.rank == spatial + 2 else reshaped(input, (1, *input.shape))
    y = convolution.plain(batched, weight, *(() if bias is None else (bias,)), **attrs)
    return y if batched is input else reshaped(y, y.shape[1:])


def _pairs(padding: Any, kernel: tuple[Size, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Any:
    """The padding before and after each axis; 'same' keeps its size, with the odd one after."""
    if padding == "valid":
        return tuple((0, 0) for _ in kernel)
    if padding != "same":
        return tuple((p, p) for p in per_axis("padding", padding, len(kernel)))
    if any(s != 1 for s in stride):
        raise TypeRuleError(f"padding='same' with stride {list(stride)}: 1 is needed")
    if not all(isinstance(k, int) for k in kernel):
        raise TypeRuleError(f"padding='same' with a kernel of symbolic size {'x'.join(map(str, kernel))}")
    whole = [d * (int(k) - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((n // 2, n - n // 2) for n in whole)


def _conv(spatial: int) -> Function:
    def write(
        input: Node,
        weight: Node,
        bias: Node | None = None,
        stride: Ints = 1,
        padding: Padding = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Node:
        kernel = weight.shape[2:]
        stride = per_axis("stride", stride, len(kernel), 1)
        dilation = per_axis("dilation", dilation, len(kernel), 1)
        pairs = _pairs(padding, kernel, stride, dilation)
        return _named(input, weight, bias, spatial, stride=stride, padding=pairs, dilation=dilation, groups=groups)

    sizes = ",".join("654"[:spatial])
    kernel = ",".join("323"[:spatial])
    return Function(
        f"conv{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,4,{sizes}]", f"F[4,2,{kernel}]", "F[4]"), {"stride": 2, "padding": 1, "groups": 2}),
            Sample((f"F[3,{sizes}]", f"F[2,3,{kernel}]"), {"padding": "same", "dilation": 2}),
        ),
        bad=(
            BadSample((f"f32[2,4,{sizes}]", "f32[4,2]"), match="a weight of rank 2"),
            BadSample(
                (f"f32[2,4,{sizes}]", f"f32[4,4,{kernel}]"), {"padding": "same", "stride": 2}, match="1 is needed"
            ),
        ),
        doc=(
            f"a convolution over {spatial} spatial ax{'es' if spatial > 1 else 'is'} of input [N,C,...] or [C,...] with"
            " weight [O,C/groups,...]; padding is a number per axis, 'valid' or 'same'"
        ),
        source=f"torch.nn.functional.conv{spatial}d",
    )


def _conv_transpose(spatial: int) -> Function:
    def write(
        input: Node,
        weight: Node,
        bias: Node | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Node:
        axes = weight.rank - 2
        stride, dilation = per_axis("stride", stride, axes, 1), per_axis("dilation", dilation, axes, 1)
        more = per_axis("output_padding", output_padding, axes)
        pairs = tuple((p, p) for p in per_axis("padding", padding, axes))
        return _named(
            input,
            weight,
            bias,
            spatial,
            stride=stride,
            padding=pairs,
            dilation=dilation,
            transposed=True,
            output_padding=more,
            groups=groups,
        )

    sizes = ",".join("343"[:spatial])
    kernel = ",".join("323"[:spatial])
    more = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
    return Function(
        f"conv_transpose{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,4,{sizes}]", f"F[4,2,{kernel}]", "F[4]"), more),
            Sample((f"F[3,{sizes}]", f"F[3,2,{kernel}]"), {"dilation": 2}),
        ),
        bad=(BadSample((f"f32[2,4,{sizes}]", f"f32[4,2,{kernel}]"), {"output_padding": 1}, match="output_padding=1"),),
        doc=(
            "the transpose (adjoint) of a convolution with this weight, [C,O/groups,...], stride, padding and dilation;"
            " output_padding makes the result larger at its end"
        ),
        source=f"torch.nn.functional.conv_transpose{spatial}d",
    )


conv1d, conv2d, conv3d = _conv(1), _conv(2), _conv(3)
conv_transpose1d, conv_transpose2d, conv_transpose3d = _conv_transpose(1), _conv_transpose(2), _conv_transpose(3)
