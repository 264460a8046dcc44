"""Pooling over windows of the trailing axes: max, average, power average, adaptive; kernels read the image in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Assumption, Dim, Size, ceildiv, floordiv, minimum, product
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Sample
from ...ir.statement import neutral
from ...ir.types import I32, I64, Type
from ..elementwise.pointwise import abs, eq, lt, maximum, pow, sign, where
from ..elementwise.pointwise import minimum as smaller
from ..reductions.reduce import amax, argmax, sum
from ..rules import converted, floating, full, number, reshaped, spread, zeros_like
from ..shapes.movement import iota
from ..shapes.windows import Ints, overlap_add, per_axis, window_count, windows

SizeLike = int | Dim
OutputSize = int | None | tuple[int | None, ...]


def _pooled_sizes(
    sizes: tuple[Size, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> tuple[Size, ...]:
    """How many windows there are along each axis; with ceil_mode none begins beyond the padding before and the axis."""
    counts: list[Size] = []
    for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        if 2 * p > d * (k - 1) + 1:
            raise TypeRuleError(f"padding={p} is more than half of a kernel of {k} with dilation {d}")
        count = window_count(n, k, s, d, 2 * p, ceil_mode)
        count = minimum(count, ceildiv(n + p, s)) if ceil_mode else count
        if isinstance(count, int) and count < 1:
            raise TypeRuleError(f"a result of size {count}: the kernel {k} is larger than the padded {n}")
        counts.append(count)
    return tuple(counts)


def _implied(node: Node) -> list[Assumption]:
    rank = len(node.attrs["kernel_size"])
    return [Assumption(n, ">=", 1) for n in node.shape[node.rank - rank :] if not isinstance(n, int)]


def _window_axes(x: Node, spatial: int) -> tuple[int, ...]:
    """The axes of windows of ``x`` along which the places in a window lie."""
    return tuple(range(x.rank, x.rank + spatial))


def _steps(x: Node | Type, **attrs: Any) -> dict[str, Any]:
    """The attributes of the windows of a pooling."""
    spatial = len(attrs["kernel_size"])
    dilation = attrs.get("dilation", (1,) * spatial)
    return {
        "axis": tuple(range(x.rank - spatial, x.rank)),
        "step": attrs["stride"],
        "dilation": dilation,
        "padding": attrs["padding"],
    }


# -- max_pool ----------------------------------------------------------------------------------------------------------


def _max_pool(
    input: Type,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    padding: tuple[int, ...] = (0,),
    dilation: tuple[int, ...] = (1,),
    ceil_mode: bool = False,
) -> Any:
    spatial = len(kernel_size)
    if not 1 <= spatial <= number(input).rank:
        raise TypeRuleError(f"kernel_size {list(kernel_size)} for an input of rank {input.rank}")
    kernel = per_axis("kernel_size", kernel_size, spatial, 1)
    attrs = {
        "kernel_size": kernel,
        "stride": per_axis("stride", stride or kernel, spatial, 1),
        "padding": per_axis("padding", padding, spatial),
        "dilation": per_axis("dilation", dilation, spatial, 1),
    }
    lead = input.rank - spatial
    counts = _pooled_sizes(input.shape[lead:], kernel, attrs["stride"], attrs["padding"], attrs["dilation"], ceil_mode)
    return input.with_shape(*input.shape[:lead], *counts), {**attrs, "ceil_mode": ceil_mode}


def _max_windows(x: Node, y: Type, attrs: dict[str, Any]) -> Node:
    spatial = len(attrs["kernel_size"])
    least = neutral("max", x.dtype)
    counts = y.shape[x.rank - spatial :]
    return windows.plain(x, size=attrs["kernel_size"], count=counts, value=least, **_steps(x, **attrs))


def _max_pool_value(input: Node, **attrs: Any) -> Node:
    y, _ = _max_pool(input.type, **attrs)
    return amax.plain(_max_windows(input, y, attrs), axis=_window_axes(input, len(attrs["kernel_size"])))


def _max_pool_vjp(g: Node, y: Node, input: Node, **attrs: Any) -> tuple[Node]:
    # dx adds up g at the first largest element of each window
    kernel = attrs["kernel_size"]
    won = _at_place(_place(input, y.type, attrs), kernel, g)
    spatial = input.shape[input.rank - len(kernel) :]
    return (overlap_add.plain(won, length=spatial, **_steps(input, **attrs)),)


def _place(input: Node, y: Type, attrs: dict[str, Any]) -> Node:
    """The row-major number of the first largest element in each window; i64, of y's shape."""
    kernel, lead = attrs["kernel_size"], input.rank - len(attrs["kernel_size"])
    place = argmax.plain(_max_windows(input, y, attrs), axis=_window_axes(input, len(kernel)))
    if not any(attrs["padding"]):
        return place
    # where nothing is larger than the padding, the first element that is none: of a window without padding that is 0
    first = zeros_like(place)
    for j, size in enumerate(kernel):
        d, p = attrs["dilation"][j], attrs["padding"][j]
        begin = iota.plain(shape=y.shape, axis=lead + j) * attrs["stride"][j] - p
        before = d - 1 - begin
        first = first * size + maximum(before if d == 1 else before // d, 0)
    return where(eq(place, zeros_like(place)), first, place)


def _at_place(place: Node, kernel: tuple[Size, ...], g: Node) -> Node:
    """[..., *kernel]: g at the place in its window, 0 at the others."""
    wide = spread(reshaped(g, (*g.shape, *(1 for _ in kernel))), (*g.shape, *kernel))
    return where(_is_at(place, kernel), wide, zeros_like(wide))


def _is_at(place: Node, kernel: tuple[Size, ...]) -> Node:
    """[..., *kernel]: whether an element's row-major number in its window is the place."""
    shape = (*place.shape, *kernel)
    place = converted(place, I32)  # half the bytes of what may lie in memory
    number_ = reshaped(iota.plain(shape=(product(kernel),)), (*(1 for _ in place.shape), *kernel))
    return eq(
        spread(converted(number_, I32), shape), spread(reshaped(place, (*place.shape, *(1 for _ in kernel))), shape)
    )


_PLANE = {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 0), "dilation": (1, 2), "ceil_mode": True}

max_pool = Composite(
    "max_pool",
    infer=_max_pool,
    decompose=_max_pool_value,
    vjp=_max_pool_vjp,
    implies=_implied,
    samples=(
        Sample(("F[2,N,6,7]",), _PLANE, draw=("distinct",)),
        Sample(("F[2,N]",), {"kernel_size": (3,), "stride": (1,)}, draw=("distinct",), dims={"N": 7}),
    ),
    bad=(
        BadSample(("f32[2,6]",), {"kernel_size": (3, 3, 3)}, match="for an input of rank 2"),
        BadSample(("f32[2,6]",), {"kernel_size": (3,), "padding": (2,)}, match="more than half"),
        BadSample(("f32[2,2]",), {"kernel_size": (3,)}, match="larger than the padded 2"),
        BadSample(("bool[2,6]",), {"kernel_size": (3,)}, match="bool has no arithmetic"),
    ),
    doc=(
        "the largest element of each window of the trailing axes; the first of equal ones takes the gradient, NaN is"
        " larger than any number (of several NaN the first takes it); stride is kernel_size unless given"
    ),
    source="torch.nn.functional.max_pool2d",
)


def _max_pool_indices(
    input: Type,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    padding: tuple[int, ...] = (0,),
    dilation: tuple[int, ...] = (1,),
    ceil_mode: bool = False,
) -> Any:
    type_, attrs = _max_pool(
        input, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode
    )
    return type_.with_dtype(I64), attrs


def _max_pool_indices_value(input: Node, **attrs: Any) -> Node:
    kernel = attrs["kernel_size"]
    y, _ = _max_pool(input.type, **attrs)
    lead = input.rank - len(kernel)
    starts = [
        iota.plain(shape=y.shape, axis=lead + j) * step - padding
        for j, (step, padding) in enumerate(zip(attrs["stride"], attrs["padding"], strict=True))
    ]
    return _row_major(_place(input, y, attrs), kernel, starts, attrs["dilation"], input.shape[lead:])


def _row_major(
    place: Node, kernel: Sequence[Size], starts: Sequence[Node], dilation: Sequence[int], sizes: Sequence[Size]
) -> Node:
    """The row-major number in axes of ``sizes`` of an element of a window.

    :param place: its row-major number in the window.  :param starts: where the window begins along each axis.
    """
    scale: Size = 1
    total: Node | None = None
    for size, start, step, n in reversed(list(zip(kernel, starts, dilation, sizes, strict=True))):
        along = (start + place % size * step) * scale
        total, scale, place = along if total is None else total + along, scale * n, place // size
    assert total is not None
    return total


max_pool_indices = Composite(
    "max_pool_indices",
    infer=_max_pool_indices,
    decompose=_max_pool_indices_value,
    implies=_implied,
    samples=(Sample(("F[2,N,6,7]",), _PLANE, draw=("distinct",)),),
    bad=max_pool.bad,
    doc="where max_pool finds each element: the row-major number in the pooled axes of the input; i64",
    source="torch.nn.functional.max_pool2d_with_indices",
)

# -- avg_pool ----------------------------------------------------------------------------------------------------------


def _avg_pool(
    input: Type,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (),
    padding: tuple[int, ...] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if divisor_override == 0:
        raise TypeRuleError("divisor_override=0 divides by nothing")
    type_, attrs = _max_pool(
        floating(input), kernel_size=kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode
    )
    del attrs["dilation"]
    return type_, {**attrs, "count_include_pad": count_include_pad, "divisor_override": divisor_override}


def _covered(sizes: tuple[Size, ...], counts: tuple[Size, ...], attrs: dict[str, Any]) -> Node | int:
    """How many elements each window averages: of the padded input, or of the input alone."""
    kernel: tuple[int, ...] = attrs["kernel_size"]
    padding: tuple[int, ...] = attrs["padding"]
    if attrs["divisor_override"] is not None:
        return int(attrs["divisor_override"])
    if not attrs["ceil_mode"] and (attrs["count_include_pad"] or not any(padding)):
        return math.prod(kernel)
    total: Node | None = None
    for j, (n, count) in enumerate(zip(sizes, counts, strict=True)):
        p = padding[j]
        first = iota.plain(shape=(count,)) * attrs["stride"][j] - p
        last = smaller(first + kernel[j], n + p)
        if not attrs["count_include_pad"]:
            first, last = maximum(first, 0), smaller(last, n)
        line = reshaped(last - first, tuple(count if a == j else 1 for a in range(len(sizes))))
        total = spread(line, counts) if total is None else total * spread(line, counts)
    assert total is not None
    return total


def _avg_pool_value(input: Node, **attrs: Any) -> Node:
    spatial = len(attrs["kernel_size"])
    y, _ = _avg_pool(input.type, **attrs)
    counts = y.shape[input.rank - spatial :]
    wide = converted(input, input.dtype.compute)
    parts = windows.plain(wide, size=attrs["kernel_size"], count=counts, value=0, **_steps(input, **attrs))
    total = sum.plain(parts, axis=_window_axes(input, spatial))
    divisor = _covered(input.shape[input.rank - spatial :], counts, attrs)
    if isinstance(divisor, Node):
        divisor = spread(converted(divisor, total.dtype), total.shape)
    return converted(total / divisor, input.dtype)


avg_pool = Composite(
    "avg_pool",
    infer=_avg_pool,
    decompose=_avg_pool_value,
    implies=_implied,
    samples=(
        Sample(("F[2,N,6,7]",), {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True}),
        Sample(("F[2,N]",), {"kernel_size": (3,), "padding": (1,), "count_include_pad": False}, dims={"N": 7}),
    ),
    bad=(
        BadSample(("f32[2,6]",), {"kernel_size": (3,), "padding": (2,)}, match="more than half"),
        BadSample(("f32[2,6]",), {"kernel_size": (3,), "divisor_override": 0}, match="divisor_override=0"),
        BadSample(("i32[2,6]",), {"kernel_size": (3,)}, match="i32 is no float"),
    ),
    doc=(
        "the mean of each window of the trailing axes; padding counts as zeros, or with count_include_pad=False not at"
        " all; divisor_override divides the sum instead"
    ),
    source="torch.nn.functional.avg_pool2d",
)

# -- as torch calls them -----------------------------------------------------------------------------------------------


def _check_rank(input: Node, spatial: int) -> None:
    if input.rank not in (spatial + 1, spatial + 2):
        raise TypeRuleError(f"an input of rank {input.rank}: {spatial + 1} or {spatial + 2}")


def _sample_sizes(spatial: int) -> str:
    return ",".join("765"[:spatial])


def _max_pool_of(spatial: int) -> Function:
    def write(
        input: Node,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Node | tuple[Node, Node]:
        _check_rank(input, spatial)
        kernel = per_axis("kernel_size", kernel_size, spatial, 1)
        attrs: dict[str, Any] = {
            "kernel_size": kernel,
            "stride": kernel if stride in (None, ()) else per_axis("stride", stride, spatial, 1),
            "padding": per_axis("padding", padding, spatial),
            "dilation": per_axis("dilation", dilation, spatial, 1),
            "ceil_mode": ceil_mode,
        }
        y = max_pool.plain(input, **attrs)
        return (y, max_pool_indices.plain(input, **attrs)) if return_indices else y

    return Function(
        f"max_pool{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,2,{_sample_sizes(spatial)}]",), {"kernel_size": 2, "return_indices": True}),
            Sample((f"F[2,{_sample_sizes(spatial)}]",), {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}),
        ),
        bad=(BadSample(("f32[4]",), {"kernel_size": 2}, match="an input of rank 1"),),
        doc=f"max_pool over the last {spatial} axes; with return_indices also where each element was found",
        source=f"torch.nn.functional.max_pool{spatial}d",
    )


def _avg_pool_of(spatial: int) -> Function:
    def write(
        input: Node,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Node:
        _check_rank(input, spatial)
        kernel = per_axis("kernel_size", kernel_size, spatial, 1)
        return avg_pool.plain(
            input,
            kernel_size=kernel,
            stride=kernel if stride in (None, ()) else per_axis("stride", stride, spatial, 1),
            padding=per_axis("padding", padding, spatial),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
        )

    return Function(
        f"avg_pool{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,2,{_sample_sizes(spatial)}]",), {"kernel_size": 2, "ceil_mode": True}),
            Sample(
                (f"F[2,{_sample_sizes(spatial)}]",),
                {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
            ),
        ),
        bad=(BadSample(("f32[4]",), {"kernel_size": 2}, match="an input of rank 1"),),
        doc=f"avg_pool over the last {spatial} axes",
        source=f"torch.nn.functional.avg_pool{spatial}d",
    )


def _lp_pool_of(spatial: int) -> Function:
    def write(
        input: Node, norm_type: float, kernel_size: Ints, stride: Ints | None = None, ceil_mode: bool = False
    ) -> Node:
        if norm_type == 0:
            raise TypeRuleError("norm_type=0: its root is by 1/0")
        kernel = per_axis("kernel_size", kernel_size, spatial, 1)
        wide = converted(floating_node(input), input.dtype.compute)
        mean = _AVG[spatial](pow(wide, full(norm_type, wide)), kernel, stride, 0, ceil_mode)
        total = sign(mean) * call("relu", abs(mean)) * float(math.prod(kernel))
        return converted(pow(total, full(1 / norm_type, total)), input.dtype)

    return Function(
        f"lp_pool{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,2,{_sample_sizes(spatial)}]",), {"norm_type": 2.0, "kernel_size": 2, "ceil_mode": True}),
        ),
        bad=(BadSample((f"f32[2,{_sample_sizes(spatial)}]",), {"norm_type": 0, "kernel_size": 2}, match="1/0"),),
        doc=f"the norm_type-th root of the sum of x^norm_type over each window of the last {spatial} axes",
        source=f"torch.nn.functional.lp_pool{spatial}d",
    )


def floating_node(input: Node) -> Node:
    floating(input.type)
    return input


_AVG: dict[int, Function] = {}
max_pool1d, max_pool2d, max_pool3d = (_max_pool_of(n) for n in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (_AVG.setdefault(n, _avg_pool_of(n)) for n in (1, 2, 3))
lp_pool1d, lp_pool2d, lp_pool3d = (_lp_pool_of(n) for n in (1, 2, 3))

# -- adaptive ----------------------------------------------------------------------------------------------------------


def _evenly(size: Size, count: Size) -> Size | None:
    """The length of each of ``count`` equal parts of an axis, or None."""
    each = floordiv(size, count)
    return each if each * count == size and (isinstance(each, int) or count == 1) else None


def _parts(x: Node, axis: int, count: int) -> tuple[Node, Node]:
    """[..., count, ..., longest]: the elements of each part of an axis, parts differing in length by one and sharing
    elements at their edges, and which of them exist, [count, longest].
    """
    size = x.shape[axis]
    if isinstance(size, int):
        longest: Size = max((-(-(o + 1) * size // count) - o * size // count for o in range(count)), default=1)
    else:
        longest = ceildiv(size, count) + 1
    first = iota.plain(shape=(count,)) * size // count
    last = (iota.plain(shape=(count,)) * size + (size + count - 1)) // count
    shape = (count, longest)
    place = spread(reshaped(first, (count, 1)), shape) + iota.plain(shape=shape, axis=1)
    inside = lt(place, spread(reshaped(last, (count, 1)), shape))
    taken = call("gather", x, place, axis=axis, oob="clamp")
    order = [a for a in range(taken.rank) if a != axis + 1]
    return call("transpose", taken, (*order, axis + 1)), inside


def _adaptive_windows(x: Node, sizes: tuple[int, ...], outside: float) -> tuple[Node, list[Node | Size]]:
    """[..., *sizes, *longest], ``outside`` where a part has ended, and how long the parts of each axis are."""
    spatial = len(sizes)
    lead = x.rank - spatial
    even = [_evenly(x.shape[lead + j], count) for j, count in enumerate(sizes)]
    if all(each is not None for each in even):
        lengths: list[Any] = even
        steps = tuple(each if isinstance(each, int) else 1 for each in even)
        axes = tuple(range(lead, x.rank))
        none, one = (0,) * spatial, (1,) * spatial
        wide = windows.plain(
            x, axis=axes, size=tuple(lengths), count=sizes, step=steps, dilation=one, padding=none, value=0
        )
        return wide, lengths
    lengths, wide = [], x
    for j, count in enumerate(sizes):
        wide, inside = _parts(wide, lead + j, count)
        shape = [1] * wide.rank
        own: list[Any] = [*shape]
        own[lead + j], own[-1] = inside.shape
        mask = spread(reshaped(inside, tuple(own)), wide.shape)
        wide = where(mask, wide, full(outside, wide))
        lengths.append(sum.plain(converted(inside, x.dtype.compute), axis=(1,)))
    return wide, lengths


def _output_sizes(x: Node, output_size: OutputSize, spatial: int) -> tuple[Any, ...]:
    values = output_size if isinstance(output_size, tuple) else (output_size,) * spatial
    if len(values) != spatial:
        raise TypeRuleError(f"output_size={list(values)} has {len(values)} entries for {spatial} axes")
    sizes = x.shape[x.rank - spatial :]
    whole = tuple(n if v is None else v for v, n in zip(values, sizes, strict=True))
    if any(isinstance(v, int) and v < 1 for v in (*whole, *sizes)):
        raise TypeRuleError(f"output_size={list(values)} of {'x'.join(map(str, sizes))}: 1 at least")
    return whole


def _adaptive_avg_of(spatial: int) -> Function:
    def write(input: Node, output_size: OutputSize) -> Node:
        _check_rank(floating_node(input), spatial)
        sizes = _output_sizes(input, output_size, spatial)
        wide, lengths = _adaptive_windows(converted(input, input.dtype.compute), sizes, 0.0)
        y = sum.plain(wide, axis=tuple(range(input.rank, wide.rank)))
        for j, length in enumerate(lengths):
            axis = input.rank - spatial + j
            line = tuple(sizes[j] if a == axis else 1 for a in range(input.rank))
            y = y / (spread(reshaped(length, line), y.shape) if isinstance(length, Node) else length)
        return converted(y, input.dtype)

    return Function(
        f"adaptive_avg_pool{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,2,{_sample_sizes(spatial)}]",), {"output_size": 3}),
            Sample((f"F[2,{','.join('684'[:spatial])}]",), {"output_size": 2}),
        ),
        bad=(BadSample((f"f32[2,{_sample_sizes(spatial)}]",), {"output_size": (2,) * 4}, match="4 entries"),),
        doc=f"the means of output_size parts of the last {spatial} axes, nearly equal ones",
        source=f"torch.nn.functional.adaptive_avg_pool{spatial}d",
    )


def _adaptive_max_of(spatial: int) -> Function:
    def write(input: Node, output_size: OutputSize, return_indices: bool = False) -> Node | tuple[Node, Node]:
        _check_rank(input, spatial)
        sizes = _output_sizes(input, output_size, spatial)
        wide, _ = _adaptive_windows(input, sizes, neutral("max", input.dtype))
        axes, longest = tuple(range(input.rank, wide.rank)), wide.shape[input.rank :]
        place = argmax.plain(wide, axis=axes)
        # the first largest element: all others count as 0, also in the gradient
        won = where(_is_at(place, longest), wide, zeros_like(wide))
        y = sum.plain(won, axis=axes)
        if not return_indices:
            return y
        own = input.shape[input.rank - spatial :]
        starts = [
            iota.plain(shape=place.shape, axis=input.rank - spatial + j) * n // count
            for j, (n, count) in enumerate(zip(own, sizes, strict=True))
        ]
        return y, _row_major(place, longest, starts, (1,) * spatial, own)

    return Function(
        f"adaptive_max_pool{spatial}d",
        write=write,
        samples=(
            Sample((f"F[2,2,{_sample_sizes(spatial)}]",), {"output_size": 3, "return_indices": True}),
            Sample((f"F[2,{','.join('684'[:spatial])}]",), {"output_size": 2}),
        ),
        bad=(BadSample((f"f32[2,{_sample_sizes(spatial)}]",), {"output_size": 0}, match="1 at least"),),
        doc=(
            f"the largest elements of output_size parts of the last {spatial} axes, nearly equal ones; with"
            " return_indices also where each was found"
        ),
        source=f"torch.nn.functional.adaptive_max_pool{spatial}d",
    )


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_adaptive_avg_of(n) for n in (1, 2, 3))
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (_adaptive_max_of(n) for n in (1, 2, 3))

# -- local_response_norm -----------------------------------------------------------------------------------------------


def _local_response_norm(input: Node, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Node:
    if input.rank < 3:
        raise TypeRuleError(f"an input of rank {input.rank}: 3 at least")
    if size < 1:
        raise TypeRuleError(f"size={size}: 1 at least")
    wide = converted(floating_node(input), input.dtype.compute)
    parts = windows.plain(
        wide * wide, axis=(1,), size=(size,), count=(input.shape[1],), step=(1,), dilation=(1,), padding=(size // 2,)
    )
    near = sum.plain(parts, axis=(input.rank,)) * (alpha / size) + k
    return converted(wide / pow(near, full(beta, near)), input.dtype)


local_response_norm = Function(
    "local_response_norm",
    write=_local_response_norm,
    samples=(Sample(("F[2,5,3]",), {"size": 3, "alpha": 0.5}), Sample(("F[2,5,3]",), {"size": 2, "alpha": 0.5})),
    bad=(BadSample(("f32[2,5]",), {"size": 3}, match="rank 2"),),
    doc="x / (k + alpha * the mean of x^2 over size neighbouring channels, zeros beyond them) ^ beta",
    source="torch.nn.functional.local_response_norm; Krizhevsky et al. 2012",
)
