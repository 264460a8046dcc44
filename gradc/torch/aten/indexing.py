"""Lines of ops that read and write by indices.

torch's own checks of an index are gradc's: out of range is an error.  Where torch counts a negative index from the end,
the line does, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.dims import product
from ...ir.node import Node
from ...ir.operands import broadcast_shapes
from ...ir.types import I64
from ...ops.rules import converted


def _wrapped(indices: Node, size: Any) -> Node:
    """Negative indices counted from the end."""
    indices = converted(indices, I64)
    return ops.where(indices < 0, indices + size, indices)


def _spots(x: Node, indices: Sequence[Node | None]) -> tuple[Node, Node, int]:
    """x with its indexed axes made one, the index into that, and the axis.

    :raises Unsupported: masks, and axes that are not neighbours.
    """
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype.kind == "b" for index in given):
        raise Unsupported("an index that is a mask: how many elements it takes depends on data")
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        raise Unsupported("indices along axes that are not neighbours")
    shape = broadcast_shapes([index.shape for index in given])
    flat: Any = None
    for axis, index in zip(axes, given, strict=True):
        at = _wrapped(ops.broadcast_to(index, shape), x.shape[axis])
        if len(axes) > 1:  # an index into the merged axes hides which of them is wrong, so each is checked
            at = ops.check_index(at, bound=x.shape[axis], op="index")
        flat = at if flat is None else flat * x.shape[axis] + at
    lead = axes[0]
    size = product(x.shape[a] for a in axes)
    return ops.reshape(x, (*x.shape[:lead], size, *x.shape[axes[-1] + 1 :])), flat, lead


def _index(x: Node, indices: Sequence[Node | None]) -> Node:
    merged, flat, axis = _spots(x, indices)
    return ops.gather(merged, flat, axis=axis)


def _embedding(
    weight: Node, indices: Node, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Node:
    if sparse and weight.op.name != "input":
        raise Unsupported("an embedding with sparse gradients of a table that is computed")
    padding = None if isinstance(padding_idx, int) and padding_idx < 0 else padding_idx
    return ops.embedding(indices, weight, padding_idx=padding, scale_grad_by_freq=scale_grad_by_freq)


_BAG_MODES = ("sum", "mean", "max")


def _embedding_bag(
    weight: Node,
    indices: Node,
    offsets: Node,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Node | None = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> tuple[Node, ...]:
    if sparse and weight.op.name != "input":
        raise Unsupported("an embedding_bag with sparse gradients of a table that is computed")
    bags = ops.embedding_bag(
        indices,
        weight,
        offsets,
        per_sample_weights,
        mode=_BAG_MODES[mode],
        scale_grad_by_freq=scale_grad_by_freq,
        include_last_offset=include_last_offset,
        padding_idx=None if padding_idx is None or padding_idx < 0 else padding_idx,
    )
    return (bags,)  # what torch returns beside it is for its own backward


def _gather(x: Node, axis: int, indices: Node, *, sparse_grad: bool = False) -> Node:
    if not x.rank:
        raise Unsupported("gather of a scalar")
    axis = axis % x.rank
    if any(a != axis and n is not m and n != m for a, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True))):
        x = x[tuple(slice(None) if a == axis else slice(0, n) for a, n in enumerate(indices.shape))]
    return ops.take_along_axis(x, converted(indices, I64), axis=axis)


def _scatter_add(x: Node, axis: int, indices: Node, updates: Node) -> Node:
    if not x.rank:
        raise Unsupported("scatter_add into a scalar")
    return ops.scatter_reduce(x, axis % x.rank, indices, updates, "sum")


def _scatter_reduce(
    x: Node, axis: int, indices: Node, updates: Node, reduce: str, *, include_self: bool = True
) -> Node:
    return ops.scatter_reduce(x, axis % x.rank, indices, updates, reduce, include_self=include_self)


def _replaced(x: Node, axis: int, index: Node, source: Node) -> Node:
    """x with slices of one axis replaced by those of source; of several for one place the last.

    That one alone has a gradient, where torch (which leaves the order open) gives it to each.
    """
    line = ops.iota(shape=index.shape)
    winner = ops.scatter_amax(index, line, axis=0, size=x.shape[axis])
    hit = winner >= 0
    shape = tuple(n if a == axis else 1 for a, n in enumerate(x.shape))
    if source.shape[axis] == 0:
        return x
    rows = ops.gather(source, ops.where(hit, winner, 0), axis=axis)
    return ops.where(ops.broadcast_to(ops.reshape(hit, shape), x.shape), converted(rows, x.dtype), x)


def _index_put(x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False) -> Node:
    merged, flat, axis = _spots(x, indices)
    rest = (*merged.shape[:axis], *flat.shape, *merged.shape[axis + 1 :])
    spread = ops.broadcast_to(converted(values, x.dtype), rest)
    count = product(flat.shape)
    source = ops.reshape(spread, (*merged.shape[:axis], count, *merged.shape[axis + 1 :]))
    line = ops.reshape(flat, (count,))
    put = ops.index_add(merged, axis, line, source) if accumulate else _replaced(merged, axis, line, source)
    return ops.reshape(put, x.shape)


def _line(index: Node) -> Node:
    return converted(index if index.rank else ops.reshape(index, (1,)), I64)


def _index_copy(x: Node, axis: int, index: Node, source: Node) -> Node:
    if not x.rank:
        raise Unsupported("index_copy into a scalar")
    axis = axis % x.rank
    line = _line(index)
    shape = (*x.shape[:axis], line.shape[0], *x.shape[axis + 1 :])
    return _replaced(x, axis, _wrapped(line, x.shape[axis]), ops.reshape(source, shape))


def _index_fill(x: Node, axis: int, index: Node, value: Any) -> Node:
    if not x.rank:
        raise Unsupported("index_fill of a scalar")
    axis = axis % x.rank
    line = _line(index)
    if not isinstance(value, Node):
        value = ops.constant(value=(x.dtype.literal(value),), dtype=x.dtype)
    source = ops.broadcast_to(converted(value, x.dtype), (*x.shape[:axis], line.shape[0], *x.shape[axis + 1 :]))
    return _replaced(x, axis, _wrapped(line, x.shape[axis]), source)


def _scatter(x: Node, axis: int, index: Node, source: Any) -> Node:
    if not x.rank or not index.rank:
        raise Unsupported("scatter into a scalar")
    axis = axis % x.rank
    index = converted(index, I64)
    if not isinstance(source, Node):
        source = ops.constant(value=(x.dtype.literal(source),), dtype=x.dtype)
        source = ops.broadcast_to(source, index.shape)
    source = source[tuple(slice(0, n) for n in index.shape)]
    if any(n == 0 for n in index.shape if isinstance(n, int)):
        return x
    winner = ops.scatter_amax(index, ops.iota(shape=index.shape, axis=axis), axis=axis, size=x.shape[axis])
    borders = tuple((0, 0 if a == axis else n - m) for a, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)))
    hit = ops.pad(winner >= 0, borders, False)
    put = ops.take_along_axis(converted(source, x.dtype), ops.where(winner >= 0, winner, 0), axis=axis)
    return ops.where(hit, ops.pad(put, borders), x)


LINES: dict[str, Any] = {
    "aten.index.Tensor": _index,
    "aten.index_select.default": lambda x, axis, indices: ops.index_select(x, axis, indices),
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.gather.default": _gather,
    "aten.index_add.default": lambda x, axis, indices, source, *, alpha=1: ops.index_add(
        x, axis, indices, source, alpha=alpha
    ),
    "aten.index_put.default": _index_put,
    "aten.index_copy.default": _index_copy,
    "aten.index_fill.int_Scalar": _index_fill,
    "aten.index_fill.int_Tensor": _index_fill,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter_reduce.two": _scatter_reduce,
}
