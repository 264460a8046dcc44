"""Image sampling: grid_sample, affine_grid, and the point gathers and scatters that grid_sample decomposes into."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Assumption, Size, SizeLike, maximum, same
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Movement, Primitive, Sample, Scatter
from ...ir.statement import Index
from ...ir.types import Type
from ..elementwise.pointwise import ge, logical_and, where
from ..indexing.gathers import index_type
from ..rules import alike, converted, floating, full, number, reshaped, spread, summing
from .coordinates import Mode, Padding, position_dtype, read_at

Places = tuple[Any, ...]

# -- gather and scatter at points: one position per spatial axis, the same for every channel ---------------------------


def _points(x: Type, *positions: Type) -> None:
    """Checks x [N,C,*S] and one operand of positions [N,*Q] per spatial axis."""
    if x.rank != len(positions) + 2:
        raise TypeRuleError(
            f"positions on {len(positions)} axes in an operand of rank {x.rank}, not {len(positions) + 2}"
        )
    alike(*map(index_type, positions))
    if positions[0].rank < 1 or not same(positions[0].shape[0], x.shape[0]):
        raise TypeRuleError(
            f"the operand has {x.shape[0]} and the positions {positions[0].shape[0] if positions[0].rank else 'none'}"
            " on axis 0"
        )


def _at(points: Type, updates: Type, *positions: Type, size: tuple[SizeLike, ...]) -> Type:
    """The type of updates [N,C,*Q] scattered into [N,C,*size]."""
    if len(size) != len(positions):
        raise TypeRuleError(f"size has {len(size)} entries for {len(positions)} spatial axes")
    wanted = (*updates.shape[:1], *updates.shape[2:])
    if len(points.shape) != len(wanted) or not all(same(n, m) for n, m in zip(points.shape, wanted, strict=True)):
        raise TypeRuleError(f"positions {points} do not fit updates {updates}: [N,...] and [N,C,...]")
    alike(*map(index_type, positions))
    return number(updates).with_shape(*updates.shape[:2], *size)


def _inside(positions: Sequence[Any], size: Sequence[int]) -> tuple[Places, Any]:
    """NumPy: (positions, with 0 for points outside; mask of the points inside)."""
    inside = np.logical_and.reduce([(p >= 0) & (p < n) for p, n in zip(positions, size, strict=True)])
    return tuple(np.where(inside, p, 0).astype(np.int64) for p in positions), inside


def _gather_reference(x: Any, *positions: Any) -> Any:
    places, inside = _inside(positions, x.shape[2:])
    shape = (*x.shape[:2], *inside.shape[1:])
    if 0 in x.shape[2:] or 0 in shape:
        return np.zeros(shape, x.dtype)
    line = (slice(None), None)  # [N,1,*Q]
    batch, channel = (
        np.arange(n).reshape([-1 if a == axis else 1 for a in range(len(shape))]) for axis, n in enumerate(shape[:2])
    )
    return np.where(inside[line], x[(batch, channel, *(p[line] for p in places))], np.zeros((), x.dtype))


def _scatter_reference(updates: Any, *positions: Any, size: tuple[int, ...]) -> Any:
    places, inside = _inside(positions, size)
    out = np.zeros((*updates.shape[:2], *size), summing(updates.dtype))
    keep = np.broadcast_to(inside[:, None], updates.shape)
    batch, channel = np.indices(updates.shape, sparse=True)[:2] if updates.ndim else ((), ())
    where_ = (np.broadcast_to(p, updates.shape)[keep] for p in (batch, channel, *(p[:, None] for p in places)))
    np.add.at(out, tuple(where_), updates[keep])
    return out.astype(updates.dtype)


def _read(
    index: Sequence[Index], positions: Sequence[Node], size: Sequence[Size], kernel: Any
) -> tuple[list[Index], Any]:
    """Kernel statements: (index that is read for the result index [n, c, *q], mask of the points inside)."""
    places = [Index.of(kernel.read(p, [index[0], *index[2:]])) for p in positions]
    inside = None
    for place, n in zip(places, size, strict=True):
        inside = kernel.both(inside, kernel.in_bounds(place, 0, n))
    return [*index[:2], *places], inside


def _gather_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    x, *positions = node.operands
    place, inside = _read(index, positions, x.shape[2:], kernel)
    return kernel.read(x, place, where=inside, other=0)


def _scatter_at(index: Sequence[Index], node: Node, kernel: Any) -> tuple[list[Index], Any]:
    return _read(index, node.operands[1:], node.attrs["size"], kernel)


def _but_channels(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _channels(node: Node) -> dict[int, tuple[int | None, ...]]:
    return {0: (0, 1, *(None for _ in node.operands[0].shape[2:]))}


def _gather_2d(x: Type, i: Type, j: Type) -> Type:
    _points(x, i, j)
    return x.with_shape(*x.shape[:2], *i.shape[1:])


def _gather_3d(x: Type, i: Type, j: Type, k: Type) -> Type:
    _points(x, i, j, k)
    return x.with_shape(*x.shape[:2], *i.shape[1:])


def _scatter_2d(updates: Type, i: Type, j: Type, *, size: tuple[SizeLike, ...]) -> Type:
    return _at(i, updates, i, j, size=size)


def _scatter_3d(updates: Type, i: Type, j: Type, k: Type, *, size: tuple[SizeLike, ...]) -> Type:
    return _at(i, updates, i, j, k, size=size)


def _bound(axis: int) -> Any:
    return lambda node: (node.attrs["size"] if "size" in node.attrs else node.operands[0].shape[2:])[axis]


def _pair(rank: int, gather_rule: Any, scatter_rule: Any) -> tuple[Primitive, Primitive]:
    """The gather at points of ``rank`` spatial axes, and its adjoint."""
    sizes, name = (5, 4, 3)[:rank], f"{rank}d"
    near, any_, indices = [f"index:{n}" for n in sizes], ["int"] * rank, {1 + a: _bound(a) for a in range(rank)}
    x, one = f"F[2,3,{','.join(map(str, sizes))}]", f"F[N,2,{','.join(map(str, sizes))}]"
    gather = Primitive(
        f"gather_{name}",
        infer=gather_rule,
        reference=_gather_reference,
        lower=Movement(_gather_at),
        indices=indices,
        in_place_of_dtype=True,
        multilinear=_channels,
        fills=True,
        vjp=lambda g, y, x, *positions: (
            scatter.plain(g, *positions, size=x.shape[2:]),
            *(DISCRETE for _ in positions),
        ),
        samples=(
            Sample((x, *["i64[2,N]"] * rank), draw=("normal", *near)),
            Sample((x, *["i32[2,4,N]"] * rank), draw=("normal", *any_)),
            Sample((one, *["i8[N]"] * rank), draw=("normal", *any_)),
        ),
        bad=(
            BadSample(
                (f"f32[2,{','.join(map(str, sizes))}]", *["i64[2,3]"] * rank), match=f"rank {rank + 1}, not {rank + 2}"
            ),
            BadSample((x.replace("F", "f32"), *["i64[4,3]"] * rank), match="2 and the positions 4"),
            BadSample((x.replace("F", "f32"), "i64[2,3]", *["f32[2,3]"] * (rank - 1)), match="indices are f32"),
        ),
        doc=(
            f"x[n, c, {', '.join('ijk'[:rank])}] at integer positions given per batch element, the same for all"
            " channels; 0 for positions outside x"
        ),
    )
    scatter = Primitive(
        f"scatter_{name}",
        infer=scatter_rule,
        reference=_scatter_reference,
        lower=Scatter(_scatter_at, updates=0, positions=lambda node: _but_channels(node.operands[0].rank)),
        indices=indices,
        multilinear=_channels,
        vjp=lambda g, y, updates, *positions, size: (gather.plain(g, *positions), *(DISCRETE for _ in positions)),
        samples=(
            Sample(("F[2,3,N]", *["i64[2,N]"] * rank), {"size": sizes}, draw=("normal", *near)),
            Sample(("F[2,3,4,N]", *["i32[2,4,N]"] * rank), {"size": sizes}, draw=("normal", *any_)),
        ),
        bad=(
            BadSample(("f32[2,3,4]", *["i64[2,3]"] * rank), {"size": sizes}, match="do not fit updates"),
            BadSample(("f32[2,3,4]", *["i64[2,4]"] * rank), {"size": (5,)}, match=f"1 entries for {rank}"),
        ),
        doc=(
            f"zeros [N,C,{','.join('HWD'[:rank])}] with updates added at integer positions given per batch element;"
            f" updates outside are dropped: the adjoint of gather_{name}"
        ),
    )
    return gather, scatter


gather_2d, scatter_2d = _pair(2, _gather_2d, _scatter_2d)
gather_3d, scatter_3d = _pair(3, _gather_3d, _scatter_3d)
_GATHER, _SCATTER = {2: gather_2d, 3: gather_3d}, {2: scatter_2d, 3: scatter_3d}

# -- weighted sums over taps: a product of one weight per axis ---------------------------------------------------------


def _interpolated(x: Type, weights: Sequence[Type], positions: Sequence[Type]) -> Type:
    _points(x, *(p.with_shape(*p.shape[:1], *p.shape[2:]) for p in positions))
    for w, p in zip(weights, positions, strict=True):
        if w.dtype is not floating(x).dtype:
            raise TypeRuleError(f"dtypes differ: {x.dtype} and weights {w.dtype}; write a cast")
        if w.rank < 2 or not isinstance(w.shape[1], int) or w.shape[1] < 1:
            raise TypeRuleError(f"weights {w} are [N,T,...] with a constant number of taps T")
        alike(w.with_dtype(p.dtype), p)
    return x.with_shape(*x.shape[:2], *positions[0].shape[2:])


def _interpolate_2d(x: Type, u: Type, v: Type, i: Type, j: Type) -> Type:
    return _interpolated(x, (u, v), (i, j))


def _interpolate_3d(x: Type, u: Type, v: Type, w: Type, i: Type, j: Type, k: Type) -> Type:
    return _interpolated(x, (u, v, w), (i, j, k))


def _each(
    axis: int,
    taps: Sequence[Any],
    values: dict[tuple[int, ...], Node],
    weights: Sequence[Node],
    fixed: tuple[int, ...] = (),
    skip: int = -1,
    at: int = 0,
) -> Node:
    """The sum over taps of weights times values, innermost axis first; on the axis ``skip`` only the tap ``at``
    contributes, with weight 1.
    """
    if axis == len(taps):
        return values[fixed]
    if axis == skip:
        return _each(axis + 1, taps, values, weights, (*fixed, at), skip, at)
    total = None
    for t in range(taps[axis]):
        inner = _each(axis + 1, taps, values, weights, (*fixed, t), skip, at)
        term = inner * _by_channel(weights[axis][:, t])
        total = term if total is None else total + term
    assert total is not None
    return total


def _by_channel(x: Node) -> Node:
    return reshaped(x, (x.shape[0], 1, *x.shape[1:]))


def _interpolate_value(x: Node, *parts: Node) -> Node:
    """The sum with every tap unrolled: it stays pointwise, so that its readers can be fused with it."""
    rank, wide = x.rank - 2, x.dtype.compute
    weights, positions = [converted(w, wide) for w in parts[:rank]], parts[rank:]
    taps = [w.shape[1] for w in weights]
    values = {
        tap: converted(_GATHER[rank].plain(x, *(p[:, t] for p, t in zip(positions, tap, strict=True))), wide)
        for tap in itertools.product(*map(range, taps))
    }
    return converted(_each(0, taps, values, weights), x.dtype)


def _interpolate_vjp(g: Node, y: Node, x: Node, *parts: Node) -> tuple[Any, ...]:
    # linear in x and in each axis's weights; for dx all taps become axes of one scatter's updates
    rank, wide = x.rank - 2, x.dtype.compute
    weights, positions = [converted(w, wide) for w in parts[:rank]], parts[rank:]
    others = [[w for a, w in enumerate(parts[:rank]) if a != axis] for axis in range(rank)]
    slopes = [_SLOPES[rank].plain(g, x, *others[axis], *parts[rank:], axis=axis) for axis in range(rank)]
    taps, points, g = tuple(w.shape[1] for w in weights), y.shape[2:], converted(g, wide)

    def side_by_side(part: Node, axis: int) -> Node:
        own = tuple(n if a == axis else 1 for a, n in enumerate(taps))
        return spread(reshaped(part, (part.shape[0], *own, *points)), (part.shape[0], *taps, *points))

    every = (*y.shape[:2], *taps, *points)
    updates = spread(reshaped(g, (*y.shape[:2], *(1 for _ in taps), *points)), every)
    for axis, w in enumerate(weights):
        updates = updates * spread(_by_channel(side_by_side(w, axis)), every)
    dx = _SCATTER[rank].plain(updates, *(side_by_side(p, a) for a, p in enumerate(positions)), size=x.shape[2:])
    return converted(dx, x.dtype), *slopes, *(DISCRETE for _ in positions)


MOST_WEIGHED, SUM_IN_MEMORY = 8, 8
"""Channels whose products a CPU weighs one by one at most, and the multiplications that it does in the time in which it
adds to a sum in memory: of bicubic taps of 2, 3, 4 and 8 channels that took 0.80, 0.82, 0.85 and 0.95 of the time, of
the 8 taps of a volume 1.4 to 1.6 times as long (AMD EPYC family 26 model 2, busy).  The gradient of the grid alone
takes 0.85, 0.8, 0.95 and 1.1 of it in f32, of which kernels keep the products in memory between, 0.75 of it in f64.
"""


def _weighed(g: Node, x: Node, parts: Sequence[Node], axis: int, summed: bool) -> list[Node]:
    """For each tap of an axis the sum over those of the other axes of their weights times g times x there, 0 outside.

    :param parts: weights of the other axes, and positions of all.
    :param summed: whether it is of what is added up over channels; else there is one for each of them.
    """
    rank, wide = x.rank - 2, x.dtype.compute
    positions, g = parts[rank - 1 :], converted(g, wide)
    weights = [converted(w, wide) for w in parts[: rank - 1]]
    weights.insert(axis, g)  # of the axis itself none is read
    taps, values, known = [p.shape[1] for p in positions], {}, [ge(p, 0) for p in positions]
    for tap in itertools.product(*(range(n) for n in taps)):
        places = [p[:, t] for p, t in zip(positions, tap, strict=True)]
        inside = functools.reduce(logical_and, (k[:, t] for k, t in zip(known, tap, strict=True)))
        product = g * converted(_GATHER[rank].plain(x, *places), wide)
        if summed:
            product = call("sum", product, axis=(1,))
            values[tap] = _by_channel(where(inside, product, full(0, product)))
        else:
            values[tap] = where(spread(_by_channel(inside), product.shape), product, full(0, product))
    return [_each(0, taps, values, weights, skip=axis, at=t) for t in range(taps[axis])]


def _slopes(g: Node, x: Node, *parts: Node, axis: int) -> Node:
    """Weights do not depend on the channel, so that these are added up first."""
    return converted(call("concat", *_weighed(g, x, parts, axis, summed=True), axis=1), x.dtype)


def _weighed_slopes(dims: Mapping[str, int], g: Node, x: Node, *parts: Node, axis: int) -> Node | None:
    """The same, of few channels: there is a sum for each weight, and not for each tap."""
    rank, channels = x.rank - 2, x.shape[1]
    taps = [int(p.shape[1]) for p in parts[rank - 1 :]]
    pays = rank * prod(taps) < SUM_IN_MEMORY * (prod(taps) - sum(taps))
    if not isinstance(channels, int) or not 1 < channels <= MOST_WEIGHED or not pays:  # of one there is no sum
        return None
    slopes = _weighed(g, x, parts, axis, summed=False)
    return converted(call("concat", *(_by_channel(call("sum", s, axis=(1,))) for s in slopes), axis=1), x.dtype)


def _interpolated_slopes(g: Type, x: Type, weights: Sequence[Type], positions: Sequence[Type], axis: int) -> Type:
    if not 0 <= axis < len(positions):
        raise TypeRuleError(f"axis {axis} of {len(positions)} axes with weights")
    own = positions[axis].with_dtype(floating(x).dtype)
    alike(g, _interpolated(x, (*weights[:axis], own, *weights[axis:]), positions))
    return own


def _slopes_2d(g: Type, x: Type, w: Type, i: Type, j: Type, *, axis: int) -> Type:
    return _interpolated_slopes(g, x, (w,), (i, j), axis)


def _slopes_3d(g: Type, x: Type, v: Type, w: Type, i: Type, j: Type, k: Type, *, axis: int) -> Type:
    return _interpolated_slopes(g, x, (v, w), (i, j, k), axis)


def _interpolate(rank: int, rule: Any) -> Composite:
    sizes = (5, 4, 3)[:rank]
    near, letters = [f"index:{n}" for n in sizes], "ijk"[:rank]
    x, weights, positions = f"F[2,3,{','.join(map(str, sizes))}]", ["F[2,2,N]"] * rank, ["i64[2,2,N]"] * rank
    mixed = ["1,N,3", "2,N,3", "1,N,3"][:rank]
    return Composite(
        f"interpolate_{rank}d",
        infer=rule,
        decompose=_interpolate_value,
        vjp=_interpolate_vjp,
        samples=(
            Sample((x, *weights, *positions), draw=("normal", *["normal"] * rank, *near)),
            Sample(
                (x, *(f"F[2,{m}]" for m in mixed), *(f"i32[2,{m}]" for m in mixed)),
                draw=("normal", *["normal"] * rank, *["index:5"] * rank),
            ),
        ),
        bad=(
            BadSample(("f32[2,3,5]", *["f32[2,2,4]"] * rank, *["i64[2,2,4]"] * rank), match=f"rank 3, not {rank + 2}"),
            BadSample(
                (x.replace("F", "f32"), *["f64[2,2,4]"] * rank, *["i64[2,2,4]"] * rank), match="f32 and weights f64"
            ),
            BadSample(
                (x.replace("F", "f32"), *["f32[2,N,4]"] * rank, *["i64[2,N,4]"] * rank), match="constant number of taps"
            ),
            BadSample((x.replace("F", "f32"), *["f32[2,2,5]"] * rank, *["i64[2,2,4]"] * rank), match="shapes differ"),
        ),
        doc=(
            f"sum over taps of {'*'.join(f'{w}[n, {t}, ...]' for w, t in zip('uvw', 'abc'[:rank], strict=False))} *"
            f" gather_{rank}d(x, {', '.join(f'{p}[n, {t}, ...]' for p, t in zip(letters, 'abc', strict=False))});"
            " position -1 is outside, where x counts as 0"
        ),
    )


def _slopes_op(rank: int, rule: Any) -> Composite:
    sizes = (5, 4, 3)[:rank]
    x, taps = f"F[2,3,{','.join(map(str, sizes))}]", {2: 4, 3: 2}[rank]
    weights, positions = [f"F[2,{taps},N]"] * (rank - 1), [f"i64[2,{taps},N]"] * rank
    draw, axes = ("normal", "normal", *["normal"] * (rank - 1), *[f"index:{n}" for n in sizes]), (0, rank - 1)
    return Composite(
        f"interpolate_{rank}d_slopes",
        infer=rule,
        decompose=_slopes,
        cheaper=_weighed_slopes,
        samples=tuple(Sample(("F[2,3,N]", x, *weights, *positions), {"axis": a}, draw=draw) for a in axes),
        bad=(
            BadSample(
                ("f32[2,3,4]", x.replace("F", "f32"), *["f32[2,2,4]"] * (rank - 1), *["i64[2,2,4]"] * rank),
                {"axis": rank},
                match=f"axis {rank} of {rank} axes",
            ),
        ),
        doc=(
            f"the gradient of interpolate_{rank}d for its weights of an axis, g being that of the result: sum over"
            " channels and the other axes' taps of g times x at the tap times the other axes' weights"
        ),
    )


interpolate_2d, interpolate_3d = _interpolate(2, _interpolate_2d), _interpolate(3, _interpolate_3d)
_SLOPES = {2: _slopes_op(2, _slopes_2d), 3: _slopes_op(3, _slopes_3d)}
_INTERPOLATE = {2: interpolate_2d, 3: interpolate_3d}


def _insensitive(x: Type, to: Type) -> Type:
    return x


insensitive = Composite(
    "insensitive",
    infer=_insensitive,
    decompose=lambda x, to: x,
    multilinear=lambda node: {0: tuple(range(node.rank))},
    vjp=lambda g, y, x, to: (g, full(0, to) if to.dtype.is_float else DISCRETE),
    samples=(Sample(("F[N,3]", "F[4]")), Sample(("F[2]", "F[N,2]"))),
    doc="x; the gradient of `to` is a tensor of zeros, not an absent gradient",
)

# -- grid_sample -------------------------------------------------------------------------------------------------------


def _grid_sample(
    input: Type, grid: Type, *, mode: Mode = "bilinear", padding_mode: Padding = "zeros", align_corners: bool = False
) -> Type:
    if floating(input).rank not in (4, 5):
        raise TypeRuleError(f"the input has rank {input.rank}, not 4 ([N,C,H,W]) or 5 ([N,C,D,H,W])")
    if grid.dtype is not input.dtype:
        raise TypeRuleError(f"dtypes differ: {input.dtype} and grid {grid.dtype}; write a cast")
    if grid.rank != input.rank:
        raise TypeRuleError(f"the grid has rank {grid.rank} and the input {input.rank}")
    if grid.shape[-1] != input.rank - 2:
        raise TypeRuleError(
            f"the grid's last dim is {grid.shape[-1]}, not {input.rank - 2}, the spatial axes of the input"
        )
    if not same(grid.shape[0], input.shape[0]):
        raise TypeRuleError(f"the input has {input.shape[0]} and the grid {grid.shape[0]} on axis 0")
    if mode == "bicubic" and input.rank != 4:
        raise TypeRuleError(f"mode='bicubic' takes an input of rank 4, not {input.rank}")
    for axis, n in enumerate(input.shape[2:], 2):
        if n == 0:
            raise TypeRuleError(f"the input has size {n} on axis {axis}; a spatial axis has 1 at least")
    return input.with_shape(*input.shape[:2], *grid.shape[1:-1])


def _grid_sample_value(input: Node, grid: Node, *, mode: str, padding_mode: str, align_corners: bool) -> Node:
    rank, dtype = input.rank - 2, position_dtype(input.shape[2:])
    positions, weights = [], []
    for axis, size in enumerate(input.shape[2:]):  # the grid's last dim is (x, y[, z]): the last axis comes first
        position, weight = read_at(
            grid[..., rank - 1 - axis], size, dtype, mode=mode, padding_mode=padding_mode, align_corners=align_corners
        )
        positions.append(position)
        weights.append(weight)
    if mode == "nearest":
        return insensitive(_GATHER[rank].plain(input, *positions), grid)
    y = _INTERPOLATE[rank].plain(converted(input, input.dtype.compute), *weights, *positions)
    return converted(y, input.dtype)


_IMAGE, _VOLUME = ("F[2,3,5,4]", "F[2,N,3,2]"), ("F[2,2,4,3,5]", "F[2,N,2,1,3]")
grid_sample = Composite(
    "grid_sample",
    infer=_grid_sample,
    decompose=_grid_sample_value,
    implies=lambda node: [
        Assumption(size, ">=", 1) for size in node.operands[0].shape[2:] if not isinstance(size, int)
    ],
    samples=(
        Sample(_IMAGE),
        Sample(
            ("F[N,2,C,4]", "F[N,3,2,2]"), {"padding_mode": "reflection", "align_corners": True}, dims={"N": 3, "C": 6}
        ),
        Sample(_IMAGE, {"mode": "nearest", "padding_mode": "reflection"}),
        Sample(_IMAGE, {"mode": "bicubic", "padding_mode": "border"}),
        Sample(_VOLUME, {"padding_mode": "border", "align_corners": True}),
    ),
    bad=(
        BadSample(("f32[2,3,5]", "f32[2,4,1]"), match="rank 3, not 4"),
        BadSample(("f32[2,3,5,4]", "f32[2,4,2]"), match="rank 3 and the input 4"),
        BadSample(("f32[2,3,5,4]", "f32[2,4,4,3]"), match="last dim is 3, not 2"),
        BadSample(("f32[2,3,5,4,3]", "f32[2,4,4,4,2]"), match="last dim is 2, not 3"),
        BadSample(("f32[2,3,5,4]", "f64[2,4,4,2]"), match="f32 and grid f64"),
        BadSample(("f32[2,3,5,4]", "f32[3,4,4,2]"), match="has 2 and the grid 3"),
        BadSample(("f32[2,3,5,4,3]", "f32[2,4,4,4,3]"), {"mode": "bicubic"}, match="rank 4, not 5"),
        BadSample(("f32[2,3,5,4]", "f32[2,4,4,2]"), {"mode": "cubic"}, match="mode='cubic'"),
        BadSample(("f32[2,3,5,4]", "f32[2,4,4,2]"), {"padding_mode": "wrap"}, match="padding_mode='wrap'"),
        BadSample(("f32[2,3,0,4]", "f32[2,4,4,2]"), match="size 0 on axis 2"),
        BadSample(("i32[2,3,5,4]", "f32[2,4,4,2]"), match="i32 is no float"),
    ),
    doc=(
        "input [N,C,H,W] (or [N,C,D,H,W]) interpolated at the points of grid [N,OH,OW,2] (or [N,OD,OH,OW,3]), which are"
        " (x, y(, z)) in [-1, 1] across the image; a NaN coordinate counts as -1; 16-bit types are computed in f32"
    ),
    source="torch.nn.functional.grid_sample; Keys 1981",
)

# -- affine_grid -------------------------------------------------------------------------------------------------------


def _affine_grid(theta: Type, *, size: tuple[SizeLike, ...], align_corners: bool = False) -> Type:
    spatial = len(size) - 2
    if spatial not in (2, 3):
        raise TypeRuleError(f"size {[str(n) for n in size]} has {len(size)} entries, not 4 (N,C,H,W) or 5 (N,C,D,H,W)")
    if floating(theta).rank != 3 or theta.shape[1:] != (spatial, spatial + 1):
        raise TypeRuleError(f"theta is {theta}, not [N,{spatial},{spatial + 1}] for a size of {len(size)} entries")
    if not same(theta.shape[0], size[0]):
        raise TypeRuleError(f"theta has {theta.shape[0]} and size {size[0]} on axis 0")
    for axis, n in enumerate(size):
        if isinstance(n, int) and n < 0:
            raise TypeRuleError(f"size has {n} on axis {axis}; 0 at least")
    return theta.with_shape(theta.shape[0], *size[2:], spatial)


def _affine_grid_value(theta: Node, *, size: tuple[Size, ...], align_corners: bool) -> Node:
    wide, spatial = converted(theta, theta.dtype.compute), len(size) - 2
    shape = (theta.shape[0], *size[2:], spatial)

    def column(k: int) -> Node:
        return spread(reshaped(wide[:, :, k], (theta.shape[0], *(1 for _ in range(spatial)), spatial)), shape)

    total = None
    for k in range(spatial):
        axis = spatial - 1 - k
        n = size[2 + axis]
        # the pixels' centres, symmetric about 0; a single pixel lies at 0
        line = (call("iota", shape=(n,), dtype=wide.dtype) * 2 - (n - 1)) / (maximum(n - 1, 1) if align_corners else n)
        term = column(k) * spread(reshaped(line, (1, *(n if a == axis else 1 for a in range(spatial)), 1)), shape)
        total = term if total is None else total + term
    return converted(total + column(spatial), theta.dtype)


affine_grid = Composite(
    "affine_grid",
    infer=_affine_grid,
    decompose=_affine_grid_value,
    samples=(
        Sample(("F[N,2,3]",), {"size": ("N", 3, 5, 4)}),
        Sample(("F[2,2,3]",), {"size": (2, 3, 1, "W"), "align_corners": True}, dims={"W": 6}),
        Sample(("F[2,3,4]",), {"size": (2, 1, 3, 2, 4)}),
        Sample(("F[N,3,4]",), {"size": ("N", 1, 3, 2, 4), "align_corners": True}),
    ),
    bad=(
        BadSample(("f32[2,3,4]",), {"size": (2, 3, 5, 4)}, match="f32[2,3,4], not [N,2,3]"),
        BadSample(("f32[2,2,3]",), {"size": (2, 5, 4)}, match="3 entries, not 4"),
        BadSample(("f32[2,2,3]",), {"size": (3, 1, 5, 4)}, match="theta has 2 and size 3"),
        BadSample(("i32[2,2,3]",), {"size": (2, 1, 5, 4)}, match="i32 is no float"),
    ),
    doc=(
        "the grid [N,H,W,2] (or [N,D,H,W,3]) for grid_sample: the pixels' centres, transformed by the affine maps theta"
        " [N,2,3] (or [N,3,4])"
    ),
    source="torch.nn.functional.affine_grid",
)
