"""Other shapes and orders of an array, in terms of reshape, transpose, slice, concat and broadcast."""

from __future__ import annotations

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, known_nonnegative, maximum, product, same
from ...ir.node import Node
from ...ir.op import BadSample, Function, Sample
from ...ir.types import I64
from ..elementwise.pointwise import ge, le, where
from ..rules import canonical_axes, canonical_axis, full, reshaped, zeros_like
from .movement import broadcast_to, concat, iota, reshape, slice, transpose
from .windows import Ints

SizeLike = int | Dim


def cut(x: Node, axis: int, start: Size, limit: Size) -> Node:
    """x[start:limit] along an axis."""
    low = tuple(start if a == axis else 0 for a in range(x.rank))
    high = tuple(limit if a == axis else n for a, n in enumerate(x.shape))
    return slice.plain(x, start=low, limit=high, step=(1,) * x.rank)


def _constant_size(x: Node, axis: int) -> int:
    size = x.shape[axis]
    if not isinstance(size, int):
        raise TypeRuleError(f"axis {axis} of {x.type} has a symbolic size: how many parts it has is not known")
    return size


# -- axes of size 1 ----------------------------------------------------------------------------------------------------


def _squeeze(x: Node, axis: int | tuple[int, ...] | None = None) -> Node:
    gone = canonical_axes(axis, x.rank or 1)  # a scalar has none to lose, whichever is named
    return reshaped(x, tuple(n for a, n in enumerate(x.shape) if a not in gone or n != 1))


squeeze = Function(
    "squeeze",
    write=_squeeze,
    samples=(Sample(("F[1,3,1]",)), Sample(("F[1,3,1]",), {"axis": (-1, 1)})),
    bad=(BadSample(("f32[1]",), {"axis": 1}, match="axis=1"),),
    doc="without axes of size 1, all or those named; another size stays",
    source="torch.squeeze",
)


def _unsqueeze(x: Node, axis: int) -> Node:
    at = canonical_axis(axis, x.rank + 1)
    return reshaped(x, (*x.shape[:at], 1, *x.shape[at:]))


unsqueeze = Function(
    "unsqueeze",
    write=_unsqueeze,
    samples=(Sample(("F[2,3]",), {"axis": -2}), Sample(("F[]",), {"axis": 0})),
    bad=(BadSample(("f32[2]",), {"axis": 2}, match="axis=2"),),
    doc="with an axis of size 1 more, which is axis of the result",
    source="torch.unsqueeze",
)

# -- one axis of several, several of one -------------------------------------------------------------------------------


def _flatten(x: Node, start_dim: int = 0, end_dim: int = -1) -> Node:
    if x.rank == 0:
        return reshaped(x, (1,))
    first, last = canonical_axis(start_dim, x.rank, "start_dim"), canonical_axis(end_dim, x.rank, "end_dim")
    if first > last:
        raise TypeRuleError(f"start_dim={start_dim} is behind end_dim={end_dim}")
    return reshaped(x, (*x.shape[:first], product(x.shape[first : last + 1]), *x.shape[last + 1 :]))


flatten = Function(
    "flatten",
    write=_flatten,
    samples=(Sample(("F[2,3,4]",)), Sample(("F[2,3,4]",), {"start_dim": 1}), Sample(("F[]",))),
    bad=(BadSample(("f32[2,3]",), {"start_dim": 1, "end_dim": 0}, match="is behind"),),
    doc="the axes from start_dim to end_dim as one",
    source="torch.flatten",
)


def _unflatten(x: Node, axis: int, sizes: tuple[SizeLike, ...]) -> Node:
    at = canonical_axis(axis, x.rank)
    known = product(n for n in sizes if n != -1)
    free = [j for j, n in enumerate(sizes) if n == -1]
    if len(free) > 1:
        raise TypeRuleError(f"sizes {list(sizes)}: one -1 at most")
    if free and known == 0:
        raise TypeRuleError(f"sizes {list(sizes)}: -1 stands for no size beside a 0")
    whole = tuple(x.shape[at] // known if n == -1 else n for n in sizes)
    return reshaped(x, (*x.shape[:at], *whole, *x.shape[at + 1 :]))


unflatten = Function(
    "unflatten",
    write=_unflatten,
    samples=(Sample(("F[2,6]",), {"axis": 1, "sizes": (2, -1)}),),
    bad=(BadSample(("f32[2,6]",), {"axis": 1, "sizes": (-1, -1)}, match="one -1 at most"),),
    doc="an axis as several, -1 what is left",
    source="torch.unflatten",
)

# -- order of axes -----------------------------------------------------------------------------------------------------


def _movedim(x: Node, source: Ints, destination: Ints) -> Node:
    given = [v if isinstance(v, tuple) else (v,) for v in (source, destination)]
    if len(given[0]) != len(given[1]):
        raise TypeRuleError(f"{len(given[0])} axes of source and {len(given[1])} of destination")
    old = [canonical_axis(a, x.rank, "source") for a in given[0]]
    new = [canonical_axis(a, x.rank, "destination") for a in given[1]]
    for name, axes in (("source", old), ("destination", new)):
        if len(set(axes)) != len(axes):
            raise TypeRuleError(f"{name} names an axis twice")
    moved = dict(zip(new, old, strict=True))
    rest = iter(a for a in range(x.rank) if a not in old)
    return transpose(x, tuple(moved[a] if a in moved else next(rest) for a in range(x.rank)))


movedim = Function(
    "movedim",
    write=_movedim,
    samples=(
        Sample(("F[2,3,4]",), {"source": 0, "destination": -1}),
        Sample(("F[2,3,4]",), {"source": (2, 0), "destination": (0, 1)}),
    ),
    bad=(BadSample(("f32[2,3]",), {"source": (0, 0), "destination": (0, 1)}, match="source names an axis twice"),),
    doc="axes of source moved to destination; the others keep their order",
    source="torch.movedim",
)


def _swapaxes(x: Node, axis0: int, axis1: int) -> Node:
    first, second = canonical_axis(axis0, x.rank, "axis0"), canonical_axis(axis1, x.rank, "axis1")
    other = {first: second, second: first}
    return transpose(x, tuple(other.get(a, a) for a in range(x.rank)))


swapaxes = Function(
    "swapaxes",
    write=_swapaxes,
    samples=(Sample(("F[2,3,4]",), {"axis0": 0, "axis1": -1}),),
    bad=(BadSample(("f32[2,3]",), {"axis0": 0, "axis1": 2}, match="axis1=2"),),
    doc="two axes exchanged",
    source="torch.swapaxes",
)

# -- parts and their joining -------------------------------------------------------------------------------------------


def _stack(*tensors: Node, axis: int = 0) -> Node:
    if not tensors:
        raise TypeRuleError("nothing to join")
    at = canonical_axis(axis, tensors[0].rank + 1)
    return concat(*(reshaped(x, (*x.shape[:at], 1, *x.shape[at:])) for x in tensors), axis=at)


stack = Function(
    "stack",
    write=_stack,
    samples=(Sample(("F[2,3]", "F[2,3]"), {"axis": -1}), Sample(("F[]", "F[]", "F[]"))),
    bad=(BadSample(("f32[2]", "f32[3]"), match="differ"),),
    doc="arrays of one shape, one by one or in a list, along a new axis",
    source="torch.stack",
)


def _split(x: Node, sizes: int | tuple[int, ...], axis: int = 0) -> tuple[Node, ...]:
    at = canonical_axis(axis, x.rank)
    if isinstance(sizes, int):
        if sizes < 1:
            raise TypeRuleError(f"parts of {sizes}: 1 at least")
        length = _constant_size(x, at)
        sizes = tuple(min(sizes, length - start) for start in range(0, max(length, 1), sizes))
    if any(n < 0 for n in sizes):
        raise TypeRuleError(f"a part of {min(sizes)}")
    rest = x.shape[at] - sum(sizes)
    if rest != 0:
        raise TypeRuleError(f"parts of {list(sizes)} are {sum(sizes)} of the {x.shape[at]} of axis {axis}")
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(cut(x, at, start, start + n) for start, n in zip(starts, sizes, strict=True))


split = Function(
    "split",
    write=_split,
    samples=(Sample(("F[5,2]",), {"sizes": 2}), Sample(("F[2,5]",), {"sizes": (1, 0, 4), "axis": -1})),
    bad=(
        BadSample(("f32[5]",), {"sizes": (2, 2)}, match="are 4 of the 5"),
        BadSample(("f32[N]",), {"sizes": 2}, match="symbolic size"),
    ),
    doc="the parts of an axis, of one size (the last may be shorter) or of sizes: a tuple",
    source="torch.split",
)


def _chunk(x: Node, chunks: int, axis: int = 0) -> tuple[Node, ...]:
    at = canonical_axis(axis, x.rank)
    if chunks < 1:
        raise TypeRuleError(f"chunks={chunks}: 1 at least")
    length = _constant_size(x, at)
    return _split(x, (0,) * chunks if length == 0 else -(-length // chunks), at)


chunk = Function(
    "chunk",
    write=_chunk,
    samples=(Sample(("F[7,2]",), {"chunks": 3}), Sample(("F[2,5]",), {"chunks": 4, "axis": 1})),
    bad=(BadSample(("f32[5]",), {"chunks": 0}, match="chunks=0"),),
    doc="the parts of an axis, at most chunks of one size, the last may be shorter: a tuple",
    source="torch.chunk",
)


def _unbind(x: Node, axis: int = 0) -> tuple[Node, ...]:
    at = canonical_axis(axis, x.rank)
    rest = (*x.shape[:at], *x.shape[at + 1 :])
    return tuple(reshaped(cut(x, at, k, k + 1), rest) for k in range(_constant_size(x, at)))


unbind = Function(
    "unbind",
    write=_unbind,
    samples=(Sample(("F[3,2]",)), Sample(("F[2,3]",), {"axis": -1})),
    bad=(BadSample(("f32[N]",), match="symbolic size"),),
    doc="the elements of an axis, which has a constant size: a tuple",
    source="torch.unbind",
)

# -- repetition --------------------------------------------------------------------------------------------------------


def _tile(x: Node, dims: tuple[int, ...]) -> Node:
    if any(n < 0 for n in dims):
        raise TypeRuleError(f"repeated {min(dims)} times")
    rank = max(len(dims), x.rank)
    counts = (1,) * (rank - len(dims)) + dims
    x = reshaped(x, (*(1 for _ in range(rank - x.rank)), *x.shape))
    wide = reshape(x, tuple(n for size in x.shape for n in (1, size)))
    wide = broadcast_to(wide, tuple(n for k, size in zip(counts, x.shape, strict=True) for n in (k, size)))
    return reshape(wide, tuple(k * size for k, size in zip(counts, x.shape, strict=True)))


def _repeat(x: Node, repeats: tuple[int, ...]) -> Node:
    if len(repeats) < x.rank:
        raise TypeRuleError(f"{len(repeats)} repeats for an operand of rank {x.rank}")
    return _tile(x, repeats)


tile = Function(
    "tile",
    write=_tile,
    samples=(Sample(("F[2,3]",), {"dims": (2,)}), Sample(("F[3]",), {"dims": (2, 1, 2)})),
    bad=(BadSample(("f32[3]",), {"dims": (-1,)}, match="repeated -1 times"),),
    doc="the array repeated along its axes, new ones in front where dims has more",
    source="torch.tile; numpy.tile",
)
repeat = Function(
    "repeat",
    write=_repeat,
    samples=(Sample(("F[3]",), {"repeats": (2, 1, 2)}),),
    bad=(BadSample(("f32[2,3]",), {"repeats": (2,)}, match="1 repeats for an operand of rank 2"),),
    doc="the array repeated along its axes, a number for each",
    source="torch.Tensor.repeat",
)


def _repeat_interleave(x: Node, repeats: int, axis: int | None = None) -> Node:
    if repeats < 0:
        raise TypeRuleError(f"repeated {repeats} times")
    if axis is None:
        x, axis = reshaped(x, (x.type.count,)), 0
    at = canonical_axis(axis, x.rank)
    lead, size, rest = x.shape[:at], x.shape[at], x.shape[at + 1 :]
    wide = broadcast_to(reshape(x, (*lead, size, 1, *rest)), (*lead, size, repeats, *rest))
    return reshape(wide, (*lead, size * repeats, *rest))


repeat_interleave = Function(
    "repeat_interleave",
    write=_repeat_interleave,
    samples=(Sample(("F[2,3]",), {"repeats": 2, "axis": 1}), Sample(("F[2,2]",), {"repeats": 3})),
    bad=(BadSample(("f32[3]",), {"repeats": -1}, match="repeated -1 times"),),
    doc="each element of an axis repeated; without axis, of the flattened array",
    source="torch.repeat_interleave",
)


def _roll(x: Node, shifts: SizeLike | tuple[SizeLike, ...], axis: int | tuple[int, ...] | None = None) -> Node:
    if axis is None:
        flat = reshaped(x, (x.type.count,))
        return reshaped(_roll(flat, shifts, 0), x.shape)
    axes = axis if isinstance(axis, tuple) else (axis,)
    by = shifts if isinstance(shifts, tuple) else (shifts,)
    if len(axes) != len(by):
        raise TypeRuleError(f"{len(by)} shifts along {len(axes)} axes")
    for a, given in zip(axes, by, strict=True):
        at = canonical_axis(a, x.rank)
        first = _rolled_to_front(x.shape[at], given)
        if not same(first, 0):
            x = concat(cut(x, at, first, x.shape[at]), cut(x, at, 0, first), axis=at)
    return x


def _rolled_to_front(size: Size, shift: Size) -> Size:
    """The place of the element that a roll by ``shift`` puts first: ``-shift`` modulo ``size``."""
    for place in (-shift, size - shift):
        if known_nonnegative(place) and (same(place, 0) or known_nonnegative(size - place)):
            return place
    return -shift % maximum(size, 1)


roll = Function(
    "roll",
    write=_roll,
    samples=(
        Sample(("F[5,3]",), {"shifts": (7, -1), "axis": (0, 1)}),
        Sample(("F[2,3]",), {"shifts": 2}),
        Sample(("F[N,2]",), {"shifts": -2, "axis": 0}),
        Sample(("F[2,N]",), {"shifts": 7, "axis": 1}),
    ),
    bad=(BadSample(("f32[3]",), {"shifts": (1, 2), "axis": 0}, match="2 shifts along 1 axes"),),
    doc="elements moved on along axes, those that leave at the end enter at the beginning",
    source="torch.roll",
)

# -- triangles ---------------------------------------------------------------------------------------------------------


def _triangle(x: Node, diagonal: int, lower: bool) -> Node:
    if x.rank < 2:
        raise TypeRuleError(f"an operand of rank {x.rank}: 2 at least")
    right = iota.plain(shape=x.shape, axis=x.rank - 1, dtype=I64) - iota.plain(shape=x.shape, axis=x.rank - 2)
    edge = full(diagonal, right)
    return where((le if lower else ge)(right, edge), x, zeros_like(x))


def _tril(x: Node, diagonal: int = 0) -> Node:
    return _triangle(x, diagonal, lower=True)


tril = Function(
    "tril",
    write=_tril,
    samples=(Sample(("F[3,4]",)), Sample(("F[2,3,3]",), {"diagonal": -1})),
    bad=(BadSample(("f32[3]",), match="rank 1"),),
    doc="matrices with zeros above a diagonal",
    source="torch.tril",
)


def _triu(x: Node, diagonal: int = 0) -> Node:
    return _triangle(x, diagonal, lower=False)


triu = Function(
    "triu",
    write=_triu,
    samples=(Sample(("F[3,4]",)), Sample(("F[2,3,3]",), {"diagonal": 1})),
    bad=(BadSample(("f32[3]",), match="rank 1"),),
    doc="matrices with zeros below a diagonal",
    source="torch.triu",
)

# -- channels and space ------------------------------------------------------------------------------------------------


def _channels(input: Node, factor: int, name: str) -> None:
    if input.rank < 3:
        raise TypeRuleError(f"an input of rank {input.rank}: 3 at least")
    if factor < 1:
        raise TypeRuleError(f"{name}={factor}: 1 at least")


def _pixel_shuffle(input: Node, upscale_factor: int) -> Node:
    r = upscale_factor
    _channels(input, r, "upscale_factor")
    *lead, channels, height, width = input.shape
    if not isinstance(channels, int) or channels % (r * r):
        raise TypeRuleError(f"{channels} channels are not a multiple of {r}x{r}")
    k = len(lead)
    parts = reshape(input, (*lead, channels // (r * r), r, r, height, width))
    order = (*range(k + 1), k + 3, k + 1, k + 4, k + 2)
    return reshaped(transpose(parts, order), (*lead, channels // (r * r), height * r, width * r))


def _pixel_unshuffle(input: Node, downscale_factor: int) -> Node:
    r = downscale_factor
    _channels(input, r, "downscale_factor")
    *lead, channels, height, width = input.shape
    for size in (height, width):
        if size % r != 0:
            raise TypeRuleError(f"a size of {size} is not a multiple of {r}")
    k = len(lead)
    parts = reshape(input, (*lead, channels, height // r, r, width // r, r))
    order = (*range(k + 1), k + 2, k + 4, k + 1, k + 3)
    return reshaped(transpose(parts, order), (*lead, channels * (r * r), height // r, width // r))


pixel_shuffle = Function(
    "pixel_shuffle",
    write=_pixel_shuffle,
    samples=(Sample(("F[2,8,2,3]",), {"upscale_factor": 2}),),
    bad=(BadSample(("f32[6,2,3]",), {"upscale_factor": 2}, match="6 channels are not a multiple of 2x2"),),
    doc="[..., C*r*r, H, W] -> [..., C, H*r, W*r]",
    source="torch.nn.functional.pixel_shuffle",
)
pixel_unshuffle = Function(
    "pixel_unshuffle",
    write=_pixel_unshuffle,
    samples=(Sample(("F[2,2,4,6]",), {"downscale_factor": 2}),),
    bad=(BadSample(("f32[2,5,4]",), {"downscale_factor": 2}, match="a size of 5 is not a multiple of 2"),),
    doc="[..., C, H*r, W*r] -> [..., C*r*r, H, W]",
    source="torch.nn.functional.pixel_unshuffle",
)
