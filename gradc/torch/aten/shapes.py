"""Lines of ops that move data, and of constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.dims import Dim, Size, ceildiv
from ...ir.node import Node
from ...ir.types import F32, F64, I64, DType
from ...ops.rules import converted
from ..table import to_result
from .casts import cast, number

_LAST = 2**62  # torch's ends of slices are 2**63 - 1 where they are not given


def _spread(value: Any, shape: Sequence[Size], dtype: DType) -> Node:
    if isinstance(value, Dim):
        return ops.broadcast_to(cast(ops.dim(value), dtype), tuple(shape))
    one = ops.constant(value=(dtype.literal(number(value, dtype)),), dtype=dtype)
    return ops.broadcast_to(one, tuple(shape))


def _full(shape: Sequence[Size], value: Any, *, dtype: DType | None = None) -> Node:
    kind = dtype or (I64 if isinstance(value, int) and not isinstance(value, bool) else F32)
    return _spread(value, shape, kind)


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: DType | None = None) -> Node:
    if not all(isinstance(v, int | Dim) for v in (start, end, step)) or not isinstance(step, int):
        raise Unsupported("arange of floats")
    count = ceildiv(end - start, step) if step > 0 else ceildiv(start - end, -step)
    steps = ops.iota(shape=(count,), dtype=I64)
    line = steps * step + start if (start, step) != (0, 1) else steps
    return converted(line, dtype or I64)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: DType | None = None) -> Node:
    """From both ends to the middle; integers are cut off from f64, as are their ends before."""
    if not all(isinstance(v, int | float) for v in (start, end)) or not isinstance(steps, int):
        raise Unsupported("linspace between tensors, or of a number of steps that sizes give")
    kind = dtype or F32
    start, end, wide = (start, end, kind.compute) if kind.is_float else (int(start), int(end), F64)
    if steps < 2:
        return _spread(start, (steps,), kind)
    at, step = ops.iota(shape=(steps,), dtype=I64), (end - start) / (steps - 1)
    before, after = (converted(n, wide) * step for n in (at, (steps - 1) - at))
    return converted(ops.where(at < steps // 2, before + start, end - after), kind)


def _expand(x: Node, shape: Sequence[Size], *, implicit: bool = False) -> Node:
    lead = len(shape) - x.rank
    sizes = [x.shape[i - lead] if i >= lead and isinstance(n, int) and n == -1 else n for i, n in enumerate(shape)]
    return ops.broadcast_to(x, tuple(sizes))


def _squeeze(x: Node, axes: Any = None) -> Node:
    named = axes if isinstance(axes, tuple) else (axes,)
    chosen = range(x.rank) if axes is None else [a % max(x.rank, 1) for a in named]
    return ops.reshape(x, tuple(n for a, n in enumerate(x.shape) if a not in chosen or n != 1))


def _unsqueeze(x: Node, axis: int) -> Node:
    axis = axis % (x.rank + 1)
    return ops.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def _swapped(x: Node, a: int, b: int) -> Node:
    order = list(range(x.rank))
    if order:
        order[a], order[b] = order[b], order[a]
    return ops.transpose(x, tuple(order))


def _along(x: Node, axis: int, key: Any) -> Node:
    """x[..., key, ...] with the key on one axis."""
    axis = axis % x.rank
    return x[(*[slice(None)] * axis, key)]


def _end(size: Any) -> Any:
    return None if isinstance(size, int) and size >= _LAST else size


def _slice(x: Node, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Node:
    return _along(x, axis, slice(start, _end(end), step))


def _select(x: Node, axis: int, index: Any) -> Node:
    return _along(x, axis, index)


def _parts(x: Node, sizes: Sequence[Size], axis: int = 0) -> tuple[Node, ...]:
    parts: list[Node] = []
    at: Size = 0
    for size in sizes:
        parts.append(_along(x, axis, slice(at, at + size)))
        at = at + size
    return tuple(parts)


def _split(x: Node, size: Any, axis: int = 0) -> tuple[Node, ...]:
    total = x.shape[axis]
    if not isinstance(total, int) or not isinstance(size, int):
        raise Unsupported(f"split of a size of {total} into parts of {size}: how many there are is not known")
    return _parts(x, [min(size, total - at) for at in range(0, max(total, 1), max(size, 1))], axis)


def _unbind(x: Node, axis: int = 0) -> tuple[Node, ...]:
    if not isinstance(x.shape[axis], int):
        raise Unsupported(f"unbind of a size of {x.shape[axis]}: how many parts there are is not known")
    return tuple(_select(x, axis, i) for i in range(x.shape[axis]))


def _concat(parts: Sequence[Node], axis: int = 0) -> Node:
    widest = next((p for p in parts if p.rank > 1 or p.shape != (0,)), parts[0])
    kept = [p for p in parts if p.rank == widest.rank]  # torch lets an empty vector pass beside any shape
    return ops.concat(*kept, axis=axis % widest.rank) if len(kept) > 1 else kept[0]


def _stack(parts: Sequence[Node], axis: int = 0) -> Node:
    return _concat([_unsqueeze(p, axis) for p in parts], axis % (parts[0].rank + 1))


def _repeat(x: Node, times: Sequence[Size]) -> Node:
    """Tiled: each axis is spread along a new one before it and merged with that."""
    x = ops.reshape(x, (*[1] * (len(times) - x.rank), *x.shape))
    split = tuple(size for n in x.shape for size in (1, n))
    wide = tuple(size for t, n in zip(times, x.shape, strict=True) for size in (t, n))
    merged = tuple(t * n for t, n in zip(times, x.shape, strict=True))
    return ops.reshape(ops.broadcast_to(ops.reshape(x, split), wide), merged)


def _pad(x: Node, width: Sequence[Any], value: Any = 0) -> Node:
    pairs = [(0, 0)] * (x.rank - len(width) // 2)
    pairs += [(width[i], width[i + 1]) for i in range(len(width) - 2, -1, -2)]
    return ops.pad(x, tuple(pairs), value)


def _pad_by_mode(x: Node, width: Sequence[Any], mode: str = "constant", value: Any = None) -> Node:
    if mode == "constant":
        return _pad(x, width, 0 if value is None else value)
    pairs = [(0, 0)] * (x.rank - len(width) // 2)
    pairs += [(width[i], width[i + 1]) for i in range(len(width) - 2, -1, -2)]
    return ops.pad(x, tuple(pairs), mode=mode)


def _flatten(x: Node, start: int = 0, end: int = -1) -> Node:
    if not x.rank:
        return ops.reshape(x, (1,))
    start, end = start % x.rank, end % x.rank
    return ops.reshape(x, (*x.shape[:start], -1, *x.shape[end + 1 :])) if start < end else x


def _repeat_interleave(x: Node, repeats: int, axis: int | None = None, *, output_size: Any = None) -> Node:
    return ops.repeat_interleave(x, repeats, axis)


def _written(x: Node, part: Node, axis: int, before: Any, after: Any) -> Node:
    """x with a slice of one axis replaced."""
    pieces = [_along(x, axis, slice(0, before)), part, _along(x, axis, slice(after, None))]
    return ops.concat(*[p for p in pieces if p.shape[axis] != 0], axis=axis)


def _slice_scatter(x: Node, part: Node, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Node:
    axis = axis % x.rank
    size = x.shape[axis]
    low, high = 0 if start is None else start, size if _end(end) is None else end
    if step == 1 and all(isinstance(n, int) for n in (size, low, high)):
        low, high, _ = slice(low, high).indices(size)
        high = max(low, high)  # an end before the start is a slice of nothing
        part = ops.broadcast_to(cast(part, x.dtype), (*x.shape[:axis], high - low, *x.shape[axis + 1 :]))
        return _written(x, part, axis, low, high)
    key = slice(start, _end(end), step)
    return ops.slice_scatter(x, ops.broadcast_to(part, _along(x, axis, key).shape), axis, key.start, key.stop, step)


def _select_scatter(x: Node, part: Node, axis: int, index: int) -> Node:
    axis = axis % x.rank
    return _slice_scatter(x, _unsqueeze(part, axis), axis, index, index + 1 if index != -1 else None)


def _roll(x: Node, shifts: Sequence[int], axes: Sequence[int] = ()) -> Node:
    return ops.roll(x, tuple(shifts), tuple(a % max(x.rank, 1) for a in axes)) if axes else ops.roll(x, *shifts)


LINES: dict[str, Any] = {
    # another shape
    "aten.view.default": lambda x, shape: ops.reshape(x, shape),
    "aten._unsafe_view.default": lambda x, shape: ops.reshape(x, shape),
    "aten.reshape.default": lambda x, shape: ops.reshape(x, shape),
    "aten.view_as.default": lambda x, like: ops.reshape(x, like.shape),
    "aten.flatten.using_ints": _flatten,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.expand.default": _expand,
    "aten.permute.default": lambda x, axes: ops.transpose(x, tuple(a % x.rank for a in axes)),
    "aten.transpose.int": _swapped,
    "aten.t.default": lambda x: ops.transpose(x) if x.rank == 2 else x,
    "aten.numpy_T.default": lambda x: ops.transpose(x),
    # parts
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": lambda x, axis, start, length: _along(x, axis, slice(start, start + length)),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _parts,
    "aten.chunk.default": lambda x, count, axis=0: _split(x, ceildiv(x.shape[axis], count), axis),
    "aten.unbind.int": _unbind,
    "aten.cat.default": to_result(lambda parts, axis=0: _concat(parts, axis)),
    "aten.stack.default": to_result(_stack),
    "aten.flip.default": lambda x, axes: ops.flip(x, axes) if axes and x.rank else x,
    "aten.roll.default": _roll,
    "aten.repeat.default": _repeat,
    "aten.constant_pad_nd.default": _pad,
    "aten.pad.default": _pad_by_mode,
    "aten.reflection_pad1d.default": lambda x, width: _pad_by_mode(x, width, "reflect"),
    "aten.reflection_pad2d.default": lambda x, width: _pad_by_mode(x, width, "reflect"),
    "aten.reflection_pad3d.default": lambda x, width: _pad_by_mode(x, width, "reflect"),
    "aten.replication_pad1d.default": lambda x, width: _pad_by_mode(x, width, "replicate"),
    "aten.replication_pad2d.default": lambda x, width: _pad_by_mode(x, width, "replicate"),
    "aten.replication_pad3d.default": lambda x, width: _pad_by_mode(x, width, "replicate"),
    "aten.tril.default": lambda x, diagonal=0: ops.tril(x, diagonal),
    "aten.triu.default": lambda x, diagonal=0: ops.triu(x, diagonal),
    "aten.diagonal.default": lambda x, offset=0, axis1=0, axis2=1: ops.diagonal(x, offset, axis1, axis2),
    "aten.diag_embed.default": lambda x, offset=0, axis1=-2, axis2=-1: ops.diag_embed(x, offset, axis1, axis2),
    "aten.movedim.int": lambda x, source, destination: ops.movedim(x, source, destination),
    "aten.movedim.intlist": lambda x, source, destination: ops.movedim(x, source, destination),
    "aten.swapaxes.default": _swapped,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.expand_as.default": lambda x, like: ops.broadcast_to(x, like.shape),
    "aten.reshape_as.default": lambda x, like: ops.reshape(x, like.shape),
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.diagonal_scatter.default": lambda x, part, offset=0, axis1=0, axis2=1: ops.diagonal_scatter(
        x, part, offset, axis1, axis2
    ),
    # constants
    "aten.full.default": _full,
    "aten.zeros.default": lambda shape, *, dtype=None: _spread(0, shape, dtype or F32),
    "aten.ones.default": lambda shape, *, dtype=None: _spread(1, shape, dtype or F32),
    "aten.full_like.default": lambda x, value, *, dtype=None: _spread(value, x.shape, dtype or x.dtype),
    "aten.zeros_like.default": lambda x, *, dtype=None: _spread(0, x.shape, dtype or x.dtype),
    "aten.ones_like.default": lambda x, *, dtype=None: _spread(1, x.shape, dtype or x.dtype),
    "aten.empty_permuted.default": lambda shape, order, *, dtype=None: _spread(0, shape, dtype or F32),
    "aten.new_full.default": lambda x, shape, value, *, dtype=None: _spread(value, shape, dtype or x.dtype),
    "aten.new_zeros.default": lambda x, shape, *, dtype=None: _spread(0, shape, dtype or x.dtype),
    "aten.new_ones.default": lambda x, shape, *, dtype=None: _spread(1, shape, dtype or x.dtype),
    "aten.fill.Scalar": lambda x, value: _spread(value, x.shape, x.dtype),
    "aten.fill.Tensor": lambda x, value: ops.broadcast_to(cast(value, x.dtype), x.shape),
    "aten.scalar_tensor.default": lambda value, *, dtype=None: _spread(value, (), dtype or F32),
    "aten.linspace.default": _linspace,
    "aten.arange.default": lambda end, *, dtype=None: _arange(0, end, dtype=dtype),
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
}
