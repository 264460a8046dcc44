"""Lines of operators that move elements."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim, Size, floordiv, maximum, minimum, product
from ...ir.node import Node
from ...ir.types import F32, I64
from ...ops.rules import converted
from .. import folding, model
from ..table import Forms, Known, Site, Sizes, checked, normalized_axes, normalized_axis


def _reshape_to(x: Node, *, shape: Any = None) -> Node:
    """Before opset 5 the shape is an attribute."""
    if shape is None:
        raise InvalidProblem("a Reshape without a shape")
    return _reshape(x, tuple(shape))


def _reshape(x: Node, shape: Sizes, *, allowzero: int = 0) -> Node:
    wanted = [x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(shape)]
    if -1 in wanted:
        at = wanted.index(-1)
        rest = product(n for i, n in enumerate(wanted) if i != at)
        whole = product(x.shape)
        wanted[at] = (
            (whole // rest if rest else 0)
            if isinstance(whole, int) and isinstance(rest, int)
            else floordiv(whole, rest)
        )
    return ops.reshape(x, tuple(wanted))


def _flatten(x: Node, *, axis: int = 1) -> Node:
    axis = axis if axis == x.rank else normalized_axis(axis, x.rank)  # which may be behind the last
    return ops.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


def _squeeze(x: Node, places: Sizes | None = None, *, axes: Any = None) -> Node:
    chosen = places if places is not None else axes
    if chosen is None or not len(chosen):
        chosen = [i for i, n in enumerate(x.shape) if n == 1]
    gone = normalized_axes(chosen, x.rank)
    if any(x.shape[a] != 1 for a in gone):
        raise InvalidProblem(f"axes {tuple(chosen)} of {x.type}: not all of one element")
    return ops.reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in gone))


def _unsqueeze(x: Node, places: Sizes | None = None, *, axes: Any = None) -> Node:
    chosen = places if places is not None else axes
    new = normalized_axes(chosen, x.rank + len(chosen))
    sizes = iter(x.shape)
    return ops.reshape(x, tuple(1 if i in new else next(sizes) for i in range(x.rank + len(chosen))))


def _transpose(x: Node, *, perm: Any = None) -> Node:
    return ops.transpose(x, tuple(perm) if perm is not None else None)


def _expand(x: Node, shape: Sizes) -> Node:
    rank = max(x.rank, len(shape))
    own, other = (1,) * (rank - x.rank) + x.shape, (1,) * (rank - len(shape)) + tuple(shape)
    wanted = tuple(b if a == 1 else a for a, b in zip(own, other, strict=True))
    return ops.broadcast_to(ops.reshape(x, own), wanted)


def _concat(*operands: Node, axis: int = 1) -> Node:
    axis = normalized_axis(axis, operands[0].rank)
    return ops.concat(*operands, axis=axis) if len(operands) > 1 else operands[0]


def _split_first(
    site: Site, x: Node, sizes: Sizes | None = None, *, axis: int | None = None, split: Any = None
) -> tuple[Node, ...]:
    """Of opset 1: with sizes as an input or as an attribute."""
    if axis is None:
        raise Unsupported(f"Split of opset {site.opset} without an axis, for which its schema has no default")
    return _split_equally(site, x, sizes, axis=axis, split=split)


def _split_equally(
    site: Site, x: Node, sizes: Sizes | None = None, *, axis: int = 0, split: Any = None
) -> tuple[Node, ...]:
    """Before opset 18: without sizes as many equal parts as there are results."""
    sizes, axis = sizes if sizes is not None else split, normalized_axis(axis, x.rank)
    if sizes is None and isinstance(x.shape[axis], int) and x.shape[axis] % site.outputs:
        raise InvalidProblem(f"a split of {x.shape[axis]} elements into {site.outputs} equal parts")
    return _split(site, x, sizes, axis=axis, num_outputs=site.outputs)


def _split(
    site: Site, x: Node, sizes: Sizes | None = None, *, axis: int = 0, num_outputs: int | None = None
) -> tuple[Node, ...]:
    """With sizes, or into parts of which the last is smaller."""
    axis = normalized_axis(axis, x.rank)
    if sizes is None:
        whole = x.shape[axis]
        if num_outputs is None:
            raise InvalidProblem("neither sizes nor num_outputs")
        if num_outputs != site.outputs:
            raise InvalidProblem(f"num_outputs {num_outputs}, and {site.outputs} results")
        if isinstance(whole, Dim):
            raise Unsupported(f"a split of {whole} elements into {num_outputs} equal parts")
        each = -(-whole // num_outputs)
        sizes = tuple(max(0, min(each, whole - i * each)) for i in range(num_outputs))
    if len(sizes) != site.outputs:
        raise InvalidProblem(f"{len(sizes)} sizes, and {site.outputs} results")
    return tuple(ops.split(x, tuple(sizes), axis))


def _clamped(at: Size, size: Size, lowest: int, highest: int) -> Size:
    """A place of a slice, counted from the end if negative, within ``[lowest, size + highest]``."""
    if isinstance(at, int) and isinstance(size, int):
        at = at + size if at < 0 else at
        return max(lowest, min(at, size + highest))
    if isinstance(at, int) and at >= 2**31 - 1:
        return size + highest
    if isinstance(at, int) and at <= -(2**31):
        return lowest
    at = at + size if isinstance(at, int) and at < 0 else at
    return minimum(maximum(at, lowest), size + highest)


def _slice(
    x: Node,
    first: Sizes | None = None,
    last: Sizes | None = None,
    places: Sizes | None = None,
    strides: Sizes | None = None,
    *,
    starts: Any = None,
    ends: Any = None,
    axes: Any = None,
) -> Node:
    begin, end = (first if first is not None else starts), (last if last is not None else ends)
    chosen = places if places is not None else axes if axes is not None else range(len(begin))
    chosen = normalized_axes(chosen, x.rank)
    steps = strides if strides is not None else (1,) * len(begin)
    if not len(begin) == len(end) == len(chosen) == len(steps):
        raise InvalidProblem(f"{len(begin)} starts, {len(end)} ends, {len(chosen)} axes and {len(steps)} steps")
    start: list[Size] = [0] * x.rank
    limit, step = list(x.shape), [1] * x.rank
    reverse = []
    for axis, a, b, by in zip(chosen, begin, end, steps, strict=True):
        size = x.shape[axis]
        if by == 0:
            raise InvalidProblem("a slice of step 0")
        if by > 0:
            start[axis], limit[axis], step[axis] = _clamped(a, size, 0, 0), _clamped(b, size, 0, 0), int(by)
            continue
        if isinstance(size, Dim):
            raise Unsupported(f"a slice backwards along an axis of {size} elements")
        places_read = range(*slice(_clamped(a, size, -1, -1), None if b <= -size - 1 else b, by).indices(size))
        low = places_read[-1] if places_read else 0
        start[axis], step[axis] = low, -int(by)
        limit[axis] = places_read[0] + 1 if places_read else low
        reverse.append(axis)
    limit = [b if isinstance(a, Dim) or isinstance(b, Dim) else max(a, b) for a, b in zip(start, limit, strict=True)]
    part = ops.slice(x, tuple(start), tuple(limit), tuple(step))
    return ops.flip(part, tuple(reverse)) if reverse else part


_PADDING: dict[str, Any] = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad_first(x: Node, *, paddings: Any, mode: str = "constant", value: float = 0.0) -> Node:
    """Of opset 1."""
    return _pad(x, mode=mode, pads=paddings, value=value)


def _pad(
    x: Node,
    width: Sizes | None = None,
    fill: Known | None = None,
    places: Sizes | None = None,
    *,
    mode: str = "constant",
    pads: Any = None,
    value: float = 0.0,
) -> Node:
    width = width if width is not None else pads
    chosen = normalized_axes(places, x.rank) if places is not None else range(x.rank)
    if len(width) != 2 * len(chosen):
        raise InvalidProblem(f"{len(width)} widths for {len(chosen)} axes")
    pairs: list[tuple[Size, Size]] = [(0, 0)] * x.rank
    for i, axis in enumerate(chosen):
        pairs[axis] = (width[i], width[i + len(chosen)])
    number: Any = value if fill is None or not fill.size else fill.reshape(-1)[0].item()
    if not x.dtype.is_float:
        number = bool(number) if x.dtype.kind == "b" else int(number)
    kind = _PADDING[checked("mode", mode, _PADDING)]
    cut = tuple((minimum(a, 0), minimum(b, 0)) for a, b in pairs)
    grown = tuple((maximum(a, 0), maximum(b, 0)) for a, b in pairs)
    if any(n != 0 for pair in cut for n in pair):
        x = ops.pad(x, cut)
    return ops.pad(x, grown, value=number, mode=kind) if kind == "constant" else ops.pad(x, grown, mode=kind)


def _tile_axis(x: Node, tiles: Sizes, axis: Sizes) -> Node:
    """Before opset 6: along one axis."""
    at = normalized_axis(int(axis[0]), x.rank)
    return ops.tile(x, tuple(tiles[0] if i == at else 1 for i in range(x.rank)))


def _tile(x: Node, repeats: Sizes) -> Node:
    if len(repeats) != x.rank:
        raise InvalidProblem(f"{len(repeats)} repeats for {x.type}")
    return ops.tile(x, tuple(repeats))


def _shape(x: Node, *, start: int = 0, end: int | None = None) -> Any:
    return folding.shape_of(x.shape[slice(start, end)])


def _size(x: Node) -> Any:
    return folding.shape_of((product(x.shape),)).reshape(())


_BLOCKS = ("DCR", "CRD")
"""Whether depth or blocks come first among channels."""


def _depth_to_space(x: Node, *, blocksize: int, mode: str = "DCR") -> Node:
    n, c, h, w = x.shape
    b, rest = blocksize, floordiv(c, blocksize * blocksize)
    if checked("mode", mode, _BLOCKS) == "DCR":
        cut = ops.transpose(ops.reshape(x, (n, b, b, rest, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        cut = ops.transpose(ops.reshape(x, (n, rest, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return ops.reshape(cut, (n, rest, h * b, w * b))


def _space_to_depth(x: Node, *, blocksize: int, mode: str = "DCR") -> Node:
    n, c, h, w = x.shape
    b = blocksize
    cut = ops.reshape(x, (n, c, floordiv(h, b), b, floordiv(w, b), b))
    axes = (0, 3, 5, 1, 2, 4) if checked("mode", mode, _BLOCKS) == "DCR" else (0, 1, 3, 5, 2, 4)
    return ops.reshape(ops.transpose(cut, axes), (n, c * b * b, floordiv(h, b), floordiv(w, b)))


def _trilu(x: Node, k: Known | None = None, *, upper: int = 1) -> Node:
    diagonal = 0 if k is None else int(k.reshape(-1)[0])
    return ops.triu(x, diagonal) if upper else ops.tril(x, diagonal)


def _eye_like(x: Node, *, dtype: int | None = None, k: int = 0) -> Node:
    wanted = x.dtype if dtype is None else model.element(dtype)
    rows, columns = (ops.iota(shape=x.shape, axis=axis) for axis in (0, 1))
    return converted(ops.eq(rows + k, columns), wanted)


def _constant_of_shape(shape: Sizes, *, value: Any = None) -> Node:
    number = (
        folding.as_node(value.reshape(-1)[0].reshape(()))
        if value is not None
        else ops.constant(value=(0.0,), dtype=F32)
    )
    return ops.broadcast_to(number, tuple(shape))


def _range(start: Known, limit: Sizes, delta: Known) -> Node:
    if start.item() == 0 and delta.item() == 1 and start.dtype.kind == "i":
        return converted(ops.iota(shape=(limit[0],), axis=0), model.dtype_of(start.dtype))
    raise Unsupported("a range to a size that varies, other than from 0 by 1")


def _reverse_sequence(x: Node, lengths: Node, *, batch_axis: int = 1, time_axis: int = 0) -> Node:
    time = ops.iota(shape=x.shape, axis=time_axis)
    sizes: list[Size] = [1] * x.rank
    sizes[batch_axis] = x.shape[batch_axis]
    length = ops.broadcast_to(ops.reshape(converted(lengths, I64), tuple(sizes)), x.shape)
    return ops.take_along_axis(x, ops.where(time < length, length - 1 - time, time), time_axis)


def _one_hot(indices: Node, depth: Known, values: Node, *, axis: int = -1) -> Node:
    """Indices count from the end where they are negative."""
    size, places = int(depth.reshape(-1)[0]), converted(indices, I64)
    return _one_hot_from_front(ops.where(places < 0, places + size, places), depth, values, axis=axis)


def _one_hot_from_front(indices: Node, depth: Known, values: Node, *, axis: int = -1) -> Node:
    """Before opset 11 a negative index is outside, as one beyond the depth is."""
    size = int(depth.reshape(-1)[0])
    places = converted(indices, I64)
    at = normalized_axis(axis, indices.rank + 1)
    shape = (*indices.shape[:at], size, *indices.shape[at:])
    wide = ops.broadcast_to(ops.reshape(places, (*indices.shape[:at], 1, *indices.shape[at:])), shape)
    off, on = (ops.broadcast_to(ops.reshape(v, ()), shape) for v in ops.split(values, (1, 1), 0))
    return ops.where(ops.eq(ops.iota(shape=shape, axis=at), wide), on, off)


LINES: dict[str, Forms] = {
    "Reshape": {1: _reshape_to, 5: _reshape},
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Concat": _concat,
    "Split": {1: _split_first, 2: _split_equally, 18: _split},
    "Slice": _slice,
    "Pad": {1: _pad_first, 2: _pad},
    "Tile": {1: _tile_axis, 6: _tile},
    "Shape": _shape,
    "Size": _size,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": _trilu,
    "EyeLike": _eye_like,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "ReverseSequence": _reverse_sequence,
    "OneHot": {9: _one_hot_from_front, 11: _one_hot},
}
