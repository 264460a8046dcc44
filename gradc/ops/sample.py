"""Reading between pixels: grid_sample, affine_grid, and the gathers and scatters at points that they are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import TypeRuleError
from ..ir.dims import Dim, Size, known_nonnegative, maximum, minimum, same
from ..ir.kernel import Index
from ..ir.node import Node, call
from ..ir.op import DISCRETE, BadSample, Composite, Movement, Primitive, Sample, Scatter
from ..ir.types import Type
from .coordinates import Mode, Padding, read_at
from .indexing import _indices
from .pointwise import ge, logical_and, lt, where
from .rules import alike, converted, floating, full, number, reshaped, spread, summing

SizeLike = int | Dim
Places = tuple[Any, ...]

# -- gather and scatter at points: one position per spatial axis, the same for every channel ---------------------------


def _points(x: Type, *positions: Type) -> None:
    """[N,C,*S] and one [N,*Q] of positions per spatial axis."""
    if x.rank != len(positions) + 2:
        raise TypeRuleError(f"positions on {len(positions)} axes in an operand of rank {x.rank}, not {len(positions) + 2}")
    alike(*map(_indices, positions))
    if positions[0].rank < 1 or not same(positions[0].shape[0], x.shape[0]):
        raise TypeRuleError(f"the operand has {x.shape[0]} and the positions {positions[0].shape[0] if positions[0].rank else 'none'} on axis 0")


def _at(points: Type, updates: Type, *positions: Type, size: tuple[SizeLike, ...]) -> Type:
    """The type of updates [N,C,*Q] scattered into [N,C,*size]."""
    if len(size) != len(positions):
        raise TypeRuleError(f"size has {len(size)} entries for {len(positions)} spatial axes")
    wanted = (*updates.shape[:1], *updates.shape[2:])
    if len(points.shape) != len(wanted) or not all(same(n, m) for n, m in zip(points.shape, wanted, strict=True)):
        raise TypeRuleError(f"positions {points} do not fit updates {updates}: [N,...] and [N,C,...]")
    alike(*map(_indices, positions))
    return number(updates).with_shape(*updates.shape[:2], *size)


def _inside(positions: Sequence[Any], size: Sequence[int]) -> tuple[Places, Any]:
    """NumPy: (positions, 0 where one of them is outside; which are inside)."""
    inside = np.logical_and.reduce([(p >= 0) & (p < n) for p, n in zip(positions, size, strict=True)])
    return tuple(np.where(inside, p, 0).astype(np.int64) for p in positions), inside


def _gather_reference(x: Any, *positions: Any) -> Any:
    places, inside = _inside(positions, x.shape[2:])
    shape = (*x.shape[:2], *inside.shape[1:])
    if 0 in x.shape[2:] or 0 in shape:
        return np.zeros(shape, x.dtype)
    line = (slice(None), None)  # [N,1,*Q]
    batch, channel = (np.arange(n).reshape([-1 if a == axis else 1 for a in range(len(shape))]) for axis, n in enumerate(shape[:2]))
    return np.where(inside[line], x[(batch, channel, *(p[line] for p in places))], np.zeros((), x.dtype))


def _scatter_reference(updates: Any, *positions: Any, size: tuple[int, ...]) -> Any:
    places, inside = _inside(positions, size)
    out = np.zeros((*updates.shape[:2], *size), summing(updates.dtype))
    keep = np.broadcast_to(inside[:, None], updates.shape)
    batch, channel = np.indices(updates.shape, sparse=True)[:2] if updates.ndim else ((), ())
    where_ = (np.broadcast_to(p, updates.shape)[keep] for p in (batch, channel, *(p[:, None] for p in places)))
    np.add.at(out, tuple(where_), updates[keep])
    return out.astype(updates.dtype)


def _read(index: Sequence[Index], positions: Sequence[Node], size: Sequence[Size], kernel: Any) -> tuple[list[Index], Any]:
    """Kernel statements: (the place read for a result index [n, c, *q], which are inside)."""
    places = [Index.of(kernel.read(p, [index[0], *index[2:]])) for p in positions]
    inside = None
    for place, n in zip(places, size, strict=True):
        inside = kernel.both(inside, kernel.inside(place, 0, n))
    return [*index[:2], *places], inside


def _gather_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    x, *positions = node.operands
    place, inside = _read(index, positions, x.shape[2:], kernel)
    return kernel.read(x, place, where=inside, other=0)


def _scatter_at(index: Sequence[Index], node: Node, kernel: Any) -> tuple[list[Index], Any]:
    return _read(index, node.operands[1:], node.attrs["size"], kernel)


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
    gather = Primitive(f"gather_{name}", infer=gather_rule, reference=_gather_reference, lower=Movement(_gather_at), indices=indices, in_place_of_dtype=True, linear=_channels,
        vjp=lambda g, y, x, *positions: (scatter.plain(g, *positions, size=x.shape[2:]), *(DISCRETE for _ in positions)),
        samples=(Sample((x, *["i64[2,N]"] * rank), draw=("normal", *near)), Sample((x, *["i32[2,4,N]"] * rank), draw=("normal", *any_)), Sample((one, *["i8[N]"] * rank), draw=("normal", *any_))),
        bad=(BadSample((f"f32[2,{','.join(map(str, sizes))}]", *["i64[2,3]"] * rank), match=f"rank {rank + 1}, not {rank + 2}"), BadSample((x.replace("F", "f32"), *["i64[4,3]"] * rank), match="2 and the positions 4"),
             BadSample((x.replace("F", "f32"), "i64[2,3]", *["f32[2,3]"] * (rank - 1)), match="indices are f32")),
        doc=f"x[n, c, {', '.join('ijk'[:rank])}] at integer positions of each batch element, the same for every channel; 0 outside")  # fmt: skip
    scatter = Primitive(f"scatter_{name}", infer=scatter_rule, reference=_scatter_reference, lower=Scatter(_scatter_at, updates=0), indices=indices, linear=_channels,
        vjp=lambda g, y, updates, *positions, size: (gather.plain(g, *positions), *(DISCRETE for _ in positions)),
        samples=(Sample(("F[2,3,N]", *["i64[2,N]"] * rank), {"size": sizes}, draw=("normal", *near)), Sample(("F[2,3,4,N]", *["i32[2,4,N]"] * rank), {"size": sizes}, draw=("normal", *any_))),
        bad=(BadSample(("f32[2,3,4]", *["i64[2,3]"] * rank), {"size": sizes}, match="do not fit updates"), BadSample(("f32[2,3,4]", *["i64[2,4]"] * rank), {"size": (5,)}, match=f"1 entries for {rank}")),
        doc=f"zeros [N,C,{','.join('HWD'[:rank])}] with updates added at integer positions of each batch element; outside, nothing: the adjoint of gather_{name}")  # fmt: skip
    return gather, scatter


gather_2d, scatter_2d = _pair(2, _gather_2d, _scatter_2d)
gather_3d, scatter_3d = _pair(3, _gather_3d, _scatter_3d)
_GATHER, _SCATTER = {2: gather_2d, 3: gather_3d}, {2: scatter_2d, 3: scatter_3d}

# -- weighted sums over taps -------------------------------------------------------------------------------------------


def _weighted(x: Type, weights: Type, *positions: Type) -> Type:
    rank = len(positions)
    if rank not in _GATHER:
        raise TypeRuleError(f"positions on {rank} axes; there are 2 and 3")
    _points(x, *positions)
    if floating(x).dtype is not weights.dtype:
        raise TypeRuleError(f"dtypes differ: {x.dtype} and weights {weights.dtype}; write a cast")
    if not all(isinstance(n, int) for n in weights.shape[1 : rank + 1]) or weights.rank <= rank:
        raise TypeRuleError(f"weights {weights} are [N, {rank} constant numbers of taps, ...]")
    alike(weights.with_dtype(positions[0].dtype), positions[0])
    return x.with_shape(*x.shape[:2], *weights.shape[rank + 1 :])


def _weighted_value(x: Node, weights: Node, *positions: Node) -> Node:
    """One product per tap, written out: the sum stays pointwise, and what reads it can join its kernel."""
    rank, wide = len(positions), x.dtype.compute
    taps = weights.shape[1 : rank + 1]
    batch, points = weights.shape[0], weights.shape[rank + 1 :]
    total = None
    for tap in itertools.product(*(range(n) for n in taps)):
        at = (slice(None), *tap)
        value = converted(_GATHER[rank].plain(x, *(p[at] for p in positions)), wide)
        term = value * reshaped(converted(weights[at], wide), (batch, 1, *points))
        total = term if total is None else total + term
    return converted(total if total is not None else full(0, x.type.with_shape(*x.shape[:2], *points)), x.dtype)


def _weighted_vjp(g: Node, y: Node, x: Node, weights: Node, *positions: Node) -> tuple[Any, ...]:
    # bilinear in x and weights; the taps side by side make one scatter
    rank, wide = len(positions), x.dtype.compute
    taps = weights.shape[1 : rank + 1]
    every = (*y.shape[:2], *taps, *y.shape[2:])
    upstream = spread(reshaped(converted(g, wide), (*y.shape[:2], *(1 for _ in taps), *y.shape[2:])), every)
    by_channel = (weights.shape[0], 1, *weights.shape[1:])
    dx = _SCATTER[rank].plain(upstream * spread(reshaped(converted(weights, wide), by_channel), every), *positions, size=x.shape[2:])
    inside = None
    for p, n in zip(positions, x.shape[2:], strict=True):
        own = logical_and(ge(p, 0), lt(p, n))
        inside = own if inside is None else logical_and(inside, own)
    value = upstream * converted(_GATHER[rank].plain(x, *positions), wide)
    dw = call("sum", where(spread(reshaped(inside, by_channel), every), value, full(0, value)), axis=(1,))
    return converted(dx, x.dtype), converted(dw, weights.dtype), *(DISCRETE for _ in positions)


weighted_points = Composite("weighted_points", infer=_weighted, decompose=_weighted_value, vjp=_weighted_vjp,
    samples=(
        Sample(("F[2,3,5,4]", "F[2,2,1,N]", "i64[2,2,1,N]", "i64[2,2,1,N]"), draw=("normal", "normal", "index:5", "index:4")),
        Sample(("F[N,2,5,4]", "F[N,2,2,3]", "i32[N,2,2,3]", "i32[N,2,2,3]"), draw=("normal", "normal", "int", "int")),
        Sample(("F[2,3,5,4,3]", "F[2,1,2,2,N]", *["i32[2,1,2,2,N]"] * 3), draw=("normal", "normal", "int", "int", "int")),
    ),
    bad=(
        BadSample(("f32[2,3,5]", "f32[2,1,4]", "i32[2,1,4]"), match="positions on 1 axes"), BadSample(("f32[2,3,5,4]", "f64[2,2,2,3]", "i32[2,2,2,3]", "i32[2,2,2,3]"), match="f32 and weights f64"),
        BadSample(("f32[2,3,5,4]", "f32[2,2,N,3]", "i32[2,2,N,3]", "i32[2,2,N,3]"), match="constant numbers of taps"), BadSample(("f32[2,3,5,4]", "f32[2,2,2,4]", "i32[2,2,2,3]", "i32[2,2,2,3]"), match="shapes differ"),
    ),
    doc="sum over taps of weights[n, *taps, ...] * x[n, c, i, j(, k)] for positions [n, *taps, ...]; a position outside adds nothing")  # fmt: skip


def _insensitive(x: Type, to: Type) -> Type:
    return x


insensitive = Composite("insensitive", infer=_insensitive, decompose=lambda x, to: x, linear=lambda node: {0: tuple(range(node.rank))},
    vjp=lambda g, y, x, to: (g, full(0, to) if to.dtype.is_float else DISCRETE), samples=(Sample(("F[N,3]", "F[4]")), Sample(("F[2]", "F[N,2]"))),
    doc="x, taken as a function of `to` whose derivative is zero: its gradient is a real zero tensor")  # fmt: skip

# -- grid_sample -------------------------------------------------------------------------------------------------------


def _grid_sample(input: Type, grid: Type, *, mode: Mode = "bilinear", padding_mode: Padding = "zeros", align_corners: bool = False) -> Type:
    if floating(input).rank not in (4, 5):
        raise TypeRuleError(f"the input has rank {input.rank}, not 4 ([N,C,H,W]) or 5 ([N,C,D,H,W])")
    if grid.dtype is not input.dtype:
        raise TypeRuleError(f"dtypes differ: {input.dtype} and grid {grid.dtype}; write a cast")
    if grid.rank != input.rank:
        raise TypeRuleError(f"the grid has rank {grid.rank} and the input {input.rank}")
    if grid.shape[-1] != input.rank - 2:
        raise TypeRuleError(f"the grid's last dim is {grid.shape[-1]}, not {input.rank - 2}, the spatial axes of the input")
    if not same(grid.shape[0], input.shape[0]):
        raise TypeRuleError(f"the input has {input.shape[0]} and the grid {grid.shape[0]} on axis 0")
    if mode == "bicubic" and input.rank != 4:
        raise TypeRuleError(f"mode='bicubic' takes an input of rank 4, not {input.rank}")
    for axis, n in enumerate(input.shape[2:], 2):
        if n == 0:
            raise TypeRuleError(f"the input has size {n} on axis {axis}; a spatial axis has 1 at least")
    return input.with_shape(*input.shape[:2], *grid.shape[1:-1])


def _grid_sample_value(input: Node, grid: Node, *, mode: str, padding_mode: str, align_corners: bool) -> Node:
    rank, wide = input.rank - 2, converted(grid, grid.dtype.compute)
    points = grid.shape[1:-1]
    positions, weights = [], []
    for axis, size in enumerate(input.shape[2:]):  # the grid's last dim counts from the last axis
        position, weight = read_at(wide[..., rank - 1 - axis], size, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
        positions.append(position)
        weights.append(weight)
    widest = max((p.dtype for p in positions), key=lambda dtype: dtype.bits)  # along a symbolic size places are i64
    positions = [converted(p, widest) for p in positions]
    if mode == "nearest":
        return insensitive(_GATHER[rank].plain(input, *positions), grid)
    taps = tuple(p.shape[1] for p in positions)

    def spread_out(part: Node, axis: int) -> Node:
        own = tuple(n if a == axis else 1 for a, n in enumerate(taps))
        return spread(reshaped(part, (part.shape[0], *own, *points)), (part.shape[0], *taps, *points))

    weight = math.prod((spread_out(w, a) for a, w in enumerate(weights) if w is not None), start=1)
    y = weighted_points.plain(converted(input, wide.dtype), weight, *(spread_out(p, a) for a, p in enumerate(positions)))
    return converted(y, input.dtype)


_IMAGE, _VOLUME = ("F[2,3,5,4]", "F[2,N,3,2]"), ("F[2,2,4,3,5]", "F[2,N,2,1,3]")
grid_sample = Composite("grid_sample", infer=_grid_sample, decompose=_grid_sample_value,
    samples=(
        Sample(_IMAGE), Sample(_IMAGE, {"padding_mode": "reflection", "align_corners": True}), Sample(("F[N,2,C,4]", "F[N,3,2,2]"), {"padding_mode": "border"}, dims={"N": 3, "C": 6}),
        Sample(_IMAGE, {"mode": "nearest", "padding_mode": "reflection"}), Sample(_IMAGE, {"mode": "bicubic", "padding_mode": "border"}), Sample(_VOLUME, {"padding_mode": "border", "align_corners": True}),
        Sample(_VOLUME, {"mode": "nearest"}),
    ),
    bad=(
        BadSample(("f32[2,3,5]", "f32[2,4,1]"), match="rank 3, not 4"), BadSample(("f32[2,3,5,4]", "f32[2,4,2]"), match="rank 3 and the input 4"), BadSample(("f32[2,3,5,4]", "f32[2,4,4,3]"), match="last dim is 3, not 2"),
        BadSample(("f32[2,3,5,4,3]", "f32[2,4,4,4,2]"), match="last dim is 2, not 3"), BadSample(("f32[2,3,5,4]", "f64[2,4,4,2]"), match="f32 and grid f64"), BadSample(("f32[2,3,5,4]", "f32[3,4,4,2]"), match="has 2 and the grid 3"),
        BadSample(("f32[2,3,5,4,3]", "f32[2,4,4,4,3]"), {"mode": "bicubic"}, match="rank 4, not 5"), BadSample(("f32[2,3,5,4]", "f32[2,4,4,2]"), {"mode": "cubic"}, match="mode='cubic'"),
        BadSample(("f32[2,3,5,4]", "f32[2,4,4,2]"), {"padding_mode": "wrap"}, match="padding_mode='wrap'"), BadSample(("f32[2,3,0,4]", "f32[2,4,4,2]"), match="size 0 on axis 2"), BadSample(("i32[2,3,5,4]", "f32[2,4,4,2]"), match="i32 is no float"),
    ),
    doc="input [N,C,H,W] (or [N,C,D,H,W]) read at the points of grid [N,OH,OW,2] (or [N,OD,OH,OW,3]), (x, y(, z)) in [-1, 1] across the image; a NaN coordinate counts as -1; "
    "16-bit types are computed in f32", source="torch.nn.functional.grid_sample; Keys 1981")  # fmt: skip

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
        # the pixels' centres, symmetric about 0; one pixel lies at 0
        line = (call("iota", shape=(n,), dtype=wide.dtype) * 2 - (n - 1)) / (maximum(n - 1, 1) if align_corners else n)
        term = column(k) * spread(reshaped(line, (1, *(n if a == axis else 1 for a in range(spatial)), 1)), shape)
        total = term if total is None else total + term
    return converted(total + column(spatial), theta.dtype)


affine_grid = Composite("affine_grid", infer=_affine_grid, decompose=_affine_grid_value,
    samples=(
        Sample(("F[N,2,3]",), {"size": ("N", 3, 5, 4)}), Sample(("F[2,2,3]",), {"size": (2, 3, 1, "W"), "align_corners": True}, dims={"W": 6}), Sample(("F[2,3,4]",), {"size": (2, 1, 3, 2, 4)}),
        Sample(("F[N,3,4]",), {"size": ("N", 1, 3, 2, 4), "align_corners": True}),
    ),
    bad=(
        BadSample(("f32[2,3,4]",), {"size": (2, 3, 5, 4)}, match="f32[2,3,4], not [N,2,3]"), BadSample(("f32[2,2,3]",), {"size": (2, 5, 4)}, match="3 entries, not 4"),
        BadSample(("f32[2,2,3]",), {"size": (3, 1, 5, 4)}, match="theta has 2 and size 3"), BadSample(("i32[2,2,3]",), {"size": (2, 1, 5, 4)}, match="i32 is no float"),
    ),
    doc="the grid [N,H,W,2] (or [N,D,H,W,3]) of an affine map theta [N,2,3] (or [N,3,4]) of the pixels' centres, for grid_sample", source="torch.nn.functional.affine_grid")  # fmt: skip
