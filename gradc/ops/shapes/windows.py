"""Windows of an array: an affine view of it, the sum of overlapping windows, which is its adjoint, unfold and fold.

``windows`` is what convolutions and poolings read: it copies nothing, and a reduction over windows reads the array in
place.  ``overlap_add`` gathers, so that every element of its result has one writer, and its sums one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Assumption, Dim, Size, ceildiv, floordiv, product
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Movement, Primitive, Sample
from ...ir.statement import Index
from ...ir.types import Type
from ..rules import canonical_axis, reshaped

SizeLike = int | Dim
Ints = int | tuple[int, ...]


def window_count(
    length: Size, size: Size, step: int = 1, dilation: int = 1, padding: Size = 0, ceil_mode: bool = False
) -> Size:
    """How many windows of ``size`` elements, ``dilation`` apart, an axis padded by ``padding`` in all has.

    :param ceil_mode: the last one may stand out over the end.
    """
    rest = length + padding - dilation * (size - 1) - 1
    return (ceildiv if ceil_mode else floordiv)(rest, step) + 1


def per_axis(name: str, value: int | tuple[Any, ...], rank: int, least: int = 0) -> tuple[Any, ...]:
    """An attribute that is one number for all spatial axes, or one for each.

    :raises TypeRuleError: another number of them, or one below ``least``.
    """
    values = value if isinstance(value, tuple) else (value,)
    values = values * rank if len(values) == 1 else values
    if len(values) != rank:
        raise TypeRuleError(f"{name}={list(values)} has {len(values)} entries for {rank} spatial axes")
    low = [v for v in values if isinstance(v, int) and v < least]
    if low:
        raise TypeRuleError(f"{name}={low[0]}: {least} at least")
    return values


def _check_axes(rank: int, axis: tuple[int, ...], **others: tuple[Any, ...]) -> tuple[int, ...]:
    axes = tuple(canonical_axis(a, rank) for a in axis)
    if len(set(axes)) != len(axes):
        raise TypeRuleError(f"axis {axis} names an axis twice")
    for name, values in others.items():
        if len(values) != len(axes):
            raise TypeRuleError(f"{len(values)} entries of {name} for {len(axes)} axes")
        if name in ("step", "dilation") and any(v < 1 for v in values):
            raise TypeRuleError(f"a {name} of {min(values)}: 1 at least")
    return axes


# -- windows -----------------------------------------------------------------------------------------------------------


def _windows(
    x: Type,
    *,
    axis: tuple[int, ...],
    size: tuple[SizeLike, ...],
    count: tuple[SizeLike, ...],
    step: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[SizeLike, ...],
    value: int | float | bool = 0,
) -> Any:
    axes = _check_axes(x.rank, axis, size=size, count=count, step=step, dilation=dilation, padding=padding)
    counts = dict(zip(axes, count, strict=True))
    shape = [counts.get(a, n) for a, n in enumerate(x.shape)]
    attrs = {"axis": axes, "size": size, "count": count, "step": step, "dilation": dilation, "padding": padding}
    return x.with_shape(*shape, *size), {**attrs, "value": x.dtype.literal(value)}


def _geometry(node: Node) -> Any:
    """(position among the windowed axes, axis, step, dilation, padding) of each."""
    names = ("axis", "step", "dilation", "padding")
    return ((j, *entry) for j, entry in enumerate(zip(*(node.attrs[n] for n in names), strict=True)))


def _windows_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    (x,) = node.operands
    at, where = list(index[: x.rank]), None
    for j, axis, step, dilation, padding in _geometry(node):
        at[axis] = index[axis] * step + index[x.rank + j] * dilation + padding * -1
        where = kernel.both(where, kernel.in_bounds(at[axis], 0, x.shape[axis]))
    return kernel.read(x, at, where=where, other=node.attrs["value"])


def _windows_reference(
    x: Any, *, axis: Any, size: Any, count: Any, step: Any, dilation: Any, padding: Any, value: Any
) -> Any:
    for j, a in enumerate(axis):
        place = np.arange(count[j])[:, None] * step[j] + np.arange(size[j]) * dilation[j] - padding[j]
        inside = ((place >= 0) & (place < x.shape[a])).reshape(*place.shape, *(1 for _ in x.shape[a + 1 :]))
        wide = x if x.shape[a] else np.zeros((*x.shape[:a], 1, *x.shape[a + 1 :]), x.dtype)
        taken = np.take(wide, np.clip(place, 0, wide.shape[a] - 1), axis=a)
        x = np.moveaxis(np.where(inside, taken, np.asarray(value).astype(x.dtype)), a + 1, -1)
    return x


def _windows_map(node: Node) -> dict[int, tuple[int | None, ...]]:
    if node.attrs["value"] != 0:
        return {}
    return {0: tuple(None if a in node.attrs["axis"] else a for a in range(node.operands[0].rank))}


def _replace_axis(node: Node, axis: int, sizes: tuple[Size, ...]) -> Any:
    windowed = node.attrs["axis"]
    if axis in windowed or axis >= node.rank - len(windowed):
        return None
    return (axis,), {**node.attrs, "axis": tuple(a if a < axis else a + len(sizes) - 1 for a in windowed)}


def _windows_vjp(g: Node, y: Node, x: Node, *, axis: Any, size: Any, count: Any, value: Any, **steps: Any) -> Any:
    # overlap_add of g
    return (overlap_add.plain(g, axis=axis, length=tuple(x.shape[a] for a in axis), **steps),)


_LINE = {"axis": (0,), "size": (3,), "count": (4,), "step": (2,), "dilation": (1,), "padding": (1,)}
_PLANE = {"axis": (1, 2), "size": (2, 3), "count": (3, 2), "step": (1, 3), "dilation": (2, 1), "padding": (1, 0)}

windows: Primitive = Primitive(
    "windows",
    infer=_windows,
    reference=_windows_reference,
    lower=Movement(_windows_at),
    in_place_of_dtype=True,
    vjp=_windows_vjp,
    multilinear=_windows_map,
    replace_axis=_replace_axis,
    fills=True,
    implies=lambda node: [Assumption(n, ">=", 0) for n in node.attrs["count"] if not isinstance(n, int)],
    samples=(
        Sample(("F[7]",), _LINE),
        Sample(("F[N,4,6]",), {**_PLANE, "value": 0.5}),
        Sample(
            ("F[2,N]",),
            {"axis": (1,), "size": (3,), "count": ("N-2",), "step": (1,), "dilation": (1,), "padding": (0,)},
            dims={"N": 6},
        ),
    ),
    bad=(
        BadSample(("f32[7]",), {**_LINE, "axis": (1,)}, match="axis=1"),
        BadSample(("f32[7]",), {**_LINE, "step": (0,)}, match="a step of 0"),
        BadSample(("f32[7]",), {**_LINE, "size": (3, 3)}, match="2 entries of size for 1 axes"),
    ),
    doc=(
        "count windows of size elements along each of some axes: element [..., o, ..., k] is"
        " x[..., o*step + k*dilation - padding, ...], or value outside; the places in a window are the last axes"
    ),
    source="numpy.lib.stride_tricks.sliding_window_view",
)

# -- overlaps ----------------------------------------------------------------------------------------------------------


def _stride_of_places(step: int, dilation: int) -> int:
    """How far apart in their windows the places lie that an element has in the windows that overlap at it: one step;
    with a dilation, not every place of that kind exists, and all places are looked at.
    """
    return step if dilation == 1 else 1


def _overlaps(
    x: Type,
    *,
    axis: tuple[int, ...],
    length: tuple[SizeLike, ...],
    step: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[SizeLike, ...],
) -> Any:
    rank = x.rank - len(axis)
    axes = _check_axes(max(rank, 0), axis, length=length, step=step, dilation=dilation, padding=padding)
    lengths = dict(zip(axes, length, strict=True))
    depth = [ceildiv(size, _stride_of_places(s, d)) for size, s, d in zip(x.shape[rank:], step, dilation, strict=True)]
    attrs = {"axis": axes, "length": length, "step": step, "dilation": dilation, "padding": padding}
    return x.with_shape(*(lengths.get(a, n) for a, n in enumerate(x.shape[:rank])), *depth), attrs


def _overlaps_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    (x,) = node.operands
    rank = x.rank - len(node.attrs["axis"])
    at, where = list(index), None
    for j, axis, step, dilation, padding in _geometry(node):
        size, turn = x.shape[rank + j], index[rank + j]
        if dilation == 1:  # l + padding = (window + turn) * step + rest, of which the place is turn * step + rest
            window, rest = kernel.divided(index[axis] + padding, step)
            window = window + turn * -1
            place = turn * step + (rest if isinstance(rest, int) else Index.of(rest))
            if size != node.shape[rank + j] * step:
                where = kernel.both(where, kernel.in_bounds(place, 0, size))
        else:
            window, rest = kernel.divided(index[axis] + turn * -dilation + padding, step)
            place = turn
            if not isinstance(rest, int):
                where = kernel.both(where, kernel.is_zero(rest))
            elif rest:
                return kernel.number(0, node.dtype)
        at[axis], at[rank + j] = window, place
        where = kernel.both(where, kernel.in_bounds(window, 0, x.shape[axis]))
    return kernel.read(x, at, where=where)


def _overlaps_reference(x: Any, *, axis: Any, length: Any, step: Any, dilation: Any, padding: Any) -> Any:
    rank = x.ndim - len(axis)
    for j, a in enumerate(axis):
        x = np.moveaxis(x, (a, rank + j), (-2, -1))
        count, size = x.shape[-2:]
        turn = np.arange(-(-size // _stride_of_places(step[j], dilation[j])))
        far = np.arange(length[j])[:, None] + padding[j]
        if dilation[j] == 1:
            window, place = far // step[j] - turn, far % step[j] + turn * step[j]
            inside = (window >= 0) & (window < count) & (place < size)
        else:
            window, rest = np.divmod(far - turn * dilation[j], step[j])
            place, inside = np.broadcast_to(turn, window.shape), (rest == 0) & (window >= 0) & (window < count)
        wide = x if count and size else np.zeros((*x.shape[:-2], 1, 1), x.dtype)
        most = [max(n - 1, 0) for n in (count, size)]
        taken = wide[..., np.clip(window, 0, most[0]), np.clip(place, 0, most[1])]
        x = np.moveaxis(np.where(inside, taken, np.zeros((), x.dtype)), (-2, -1), (a, rank + j))
    return x


def _overlaps_vjp(g: Node, y: Node, x: Node, *, axis: Any, length: Any, **steps: Any) -> tuple[Node]:
    # each element of a window has one place in the result: at the turn that is its place in the window per step
    rank, spatial = x.rank - len(axis), len(axis)
    counts, sizes = tuple(x.shape[a] for a in axis), x.shape[rank:]
    parts = windows.plain(g, axis=axis, size=sizes, count=counts, value=0, **steps)  # [..., windows, turns, places]
    hit: Node | None = None
    for j, (step, dilation) in enumerate(zip(steps["step"], steps["dilation"], strict=True)):
        turn = call("iota", shape=parts.shape, axis=rank + j)
        own = call("iota", shape=parts.shape, axis=rank + spatial + j) // _stride_of_places(step, dilation)
        same_turn = call("eq", turn, own)
        hit = same_turn if hit is None else hit & same_turn
    kept = call("where", hit, parts, call("constant", value=(0.0,), dtype=g.dtype))
    return (call("sum", kept, axis=tuple(range(rank, rank + spatial))),)


overlaps: Primitive = Primitive(
    "overlaps",
    infer=_overlaps,
    reference=_overlaps_reference,
    lower=Movement(_overlaps_at),
    in_place_of_dtype=True,
    vjp=_overlaps_vjp,
    replace_axis=_replace_axis,
    fills=True,
    samples=(
        Sample(("F[4,3]",), {"axis": (0,), "length": (7,), "step": (2,), "dilation": (1,), "padding": (1,)}),
        Sample(
            ("F[N,3,2,2,3]",),
            {"axis": (1, 2), "length": (4, 6), "step": (1, 3), "dilation": (2, 1), "padding": (1, 0)},
        ),
    ),
    bad=(
        BadSample(
            ("f32[4]",),
            {"axis": (0,), "length": (7,), "step": (2,), "dilation": (1,), "padding": (1,)},
            match="axis=0 of a rank 0",
        ),
    ),
    doc=(
        "for each element of an array the elements of its windows x [..., o, ..., k] that lie there, those with"
        " o*step + k*dilation - padding = l, in new last axes in the place of the windows'; 0 where there are fewer."
        " Such an axis is as long as windows of k elements overlap, ceil(k / step), or with a dilation k"
    ),
)


def _overlap_add(
    x: Type,
    *,
    axis: tuple[int, ...],
    length: tuple[SizeLike, ...],
    step: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[SizeLike, ...],
) -> Any:
    met, attrs = _overlaps(x, axis=axis, length=length, step=step, dilation=dilation, padding=padding)
    return met.with_shape(*met.shape[: x.rank - len(axis)]), attrs


def _overlap_add_value(x: Node, **attrs: Any) -> Node:
    met, rank = overlaps.plain(x, **attrs), x.rank - len(attrs["axis"])
    if all(n == 1 for n in met.shape[rank:]):  # no window overlaps another
        return reshaped(met, met.shape[:rank])
    return call("sum", met, axis=tuple(range(rank, met.rank)))


def _overlap_add_vjp(g: Node, y: Node, x: Node, *, axis: Any, length: Any, **steps: Any) -> tuple[Node]:
    # the windows of g
    counts = tuple(x.shape[a] for a in axis)
    return (windows.plain(g, axis=axis, size=x.shape[x.rank - len(axis) :], count=counts, value=0, **steps),)


overlap_add: Composite = Composite(
    "overlap_add",
    infer=_overlap_add,
    decompose=_overlap_add_value,
    vjp=_overlap_add_vjp,
    samples=overlaps.samples,
    bad=overlaps.bad,
    doc=(
        "windows added up where they overlap: element [..., l, ...] is the sum of x[..., o, ..., k] over"
        " o*step + k*dilation - padding = l; the adjoint of windows, whose places are the last axes"
    ),
    source="torch.nn.functional.fold; scipy.signal's overlap-add",
)


# -- unfold, fold ------------------------------------------------------------------------------------------------------


def _unfold(input: Node, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1) -> Node:
    if input.rank not in (3, 4):
        raise TypeRuleError(f"an input of rank {input.rank}: [N,C,H,W] or [C,H,W]")
    batched = input if input.rank == 4 else reshaped(input, (1, *input.shape))
    kernel, steps = _plane_steps(kernel_size, dilation, padding, stride)
    counts = _plane_counts(batched.shape[2:], kernel, steps)
    parts = windows.plain(batched, axis=(2, 3), size=kernel, count=counts, value=0, **steps)
    n, channels = batched.shape[:2]
    y = reshaped(call("transpose", parts, (0, 1, 4, 5, 2, 3)), (n, channels * product(kernel), product(counts)))
    return y if batched is input else reshaped(y, y.shape[1:])


def _plane_steps(kernel_size: Ints, dilation: Ints, padding: Ints, stride: Ints) -> tuple[tuple[int, ...], Any]:
    """The size of the windows of a plane, and how they lie."""
    return per_axis("kernel_size", kernel_size, 2, 1), {
        "step": per_axis("stride", stride, 2, 1),
        "dilation": per_axis("dilation", dilation, 2, 1),
        "padding": per_axis("padding", padding, 2),
    }


def _plane_counts(sizes: Sequence[Size], kernel: tuple[int, ...], steps: Any) -> tuple[Size, ...]:
    counts = tuple(
        window_count(n, k, s, d, 2 * p)
        for n, k, s, d, p in zip(sizes, kernel, steps["step"], steps["dilation"], steps["padding"], strict=True)
    )
    if any(isinstance(n, int) and n < 1 for n in counts):
        raise TypeRuleError(f"{'x'.join(map(str, counts))} windows: the kernel is larger than the padded input")
    return counts


unfold = Function(
    "unfold",
    write=_unfold,
    samples=(
        Sample(("F[2,2,5,6]",), {"kernel_size": (2, 3), "dilation": (2, 1), "padding": 1, "stride": (1, 2)}),
        Sample(("F[2,4,3]",), {"kernel_size": 2}),
    ),
    bad=(
        BadSample(("f32[4,3]",), {"kernel_size": 2}, match="rank 2"),
        BadSample(("f32[2,4,3]",), {"kernel_size": 5}, match="larger than the padded input"),
    ),
    doc="the windows of the planes of [N,C,H,W] as columns: [N, C*KH*KW, how many]",
    source="torch.nn.functional.unfold",
)


def _fold(
    input: Node, output_size: Ints, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1
) -> Node:
    if input.rank not in (2, 3):
        raise TypeRuleError(f"an input of rank {input.rank}: [N,C*KH*KW,L] or [C*KH*KW,L]")
    batched = input if input.rank == 3 else reshaped(input, (1, *input.shape))
    sizes = per_axis("output_size", output_size, 2, 1)
    kernel, steps = _plane_steps(kernel_size, dilation, padding, stride)
    counts = _plane_counts(sizes, kernel, steps)
    n, rows, columns = batched.shape
    each = math.prod(kernel)
    if not isinstance(rows, int) or rows % each:
        raise TypeRuleError(f"{rows} rows are not windows of {'x'.join(map(str, kernel))}")
    if columns != product(counts):
        raise TypeRuleError(f"{columns} columns for {'x'.join(map(str, counts))} windows")
    parts = call("transpose", reshaped(batched, (n, rows // each, *kernel, *counts)), (0, 1, 4, 5, 2, 3))
    y = overlap_add.plain(parts, axis=(2, 3), length=sizes, **steps)
    return y if batched is input else reshaped(y, y.shape[1:])


fold = Function(
    "fold",
    write=_fold,
    samples=(
        Sample(
            ("F[2,12,10]",),
            {"output_size": (5, 4), "kernel_size": (2, 3), "dilation": (2, 1), "padding": 1, "stride": (1, 2)},
        ),
        Sample(("F[4,6]",), {"output_size": (4, 3), "kernel_size": 2}),
    ),
    bad=(
        BadSample(("f32[5,6]",), {"output_size": (4, 3), "kernel_size": 2}, match="5 rows are not windows of 2x2"),
        BadSample(("f32[4,5]",), {"output_size": (4, 3), "kernel_size": 2}, match="5 columns for 3x2 windows"),
    ),
    doc="columns of windows added up where they overlap, [N,C,H,W]: the adjoint of unfold",
    source="torch.nn.functional.fold",
)
