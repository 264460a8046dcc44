"""Lines of ops that read and write by indices.

torch's own checks of an index are gradc's: out of range is an error.  Where torch counts a negative index from the end,
the line does, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import I64
from ...ops.rules import converted
from .casts import number


def _wrapped(indices: Node, size: Any) -> Node:
    """Negative indices counted from the end."""
    indices = converted(indices, I64)
    return ops.where(indices < 0, indices + size, indices)


def _key(x: Node, indices: Sequence[Node | None]) -> tuple[Any, ...]:
    """The indices as ``x[key]`` takes them: torch's None is a whole axis, and a mask names as many axes as it has."""
    key: list[Any] = []
    axis = 0
    for index in indices:
        if index is None:
            key.append(slice(None))
        elif index.dtype.name == "u8":
            raise Unsupported(
                "an index of uint8, which torch reads as a mask: give a mask of bool, or positions of int64"
            )
        else:
            key.append(index if index.dtype.kind == "b" else _wrapped(index, x.shape[axis]))
        axis += index.rank if index is not None and index.dtype.kind == "b" else 1
    return tuple(key)


def _index(x: Node, indices: Sequence[Node | None]) -> Node:
    return x[_key(x, indices)]


def _embedding(
    weight: Node, indices: Node, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Node:
    if sparse and weight.op.name != "input":
        raise Unsupported("an embedding with sparse gradients of a table that is computed")
    padding = _known(padding_idx)
    padding = None if padding is not None and padding < 0 else padding
    return ops.embedding(indices, weight, padding_idx=padding, scale_grad_by_freq=scale_grad_by_freq)


def _known(padding_idx: Any) -> int | None:
    """:raises Unsupported: a number that Dynamo holds as a symbol, which may be negative: no size is."""
    if not isinstance(padding_idx, int | None):
        raise Unsupported("a padding_idx that is known at the call alone")
    return padding_idx


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
        padding_idx=_known(padding_idx),
    )
    return (bags,)  # what torch returns beside it is for its own backward


def _with_axis(x: Node) -> Node:
    """What torch takes a tensor without axes for where an axis is named: one of one element."""
    return x if x.rank else ops.reshape(x, (1,))


def _gather(x: Node, axis: int, indices: Node, *, sparse_grad: bool = False) -> Node:
    if not x.rank or not indices.rank:
        return ops.reshape(_gather(_with_axis(x), axis, _with_axis(indices)), indices.shape)
    axis = axis % x.rank
    if any(a != axis and n is not m and n != m for a, (n, m) in enumerate(zip(x.shape, indices.shape, strict=True))):
        x = x[tuple(slice(None) if a == axis else slice(0, n) for a, n in enumerate(indices.shape))]
    return ops.take_along_axis(x, converted(indices, I64), axis=axis)


def _scatter_reduce(
    x: Node, axis: int, indices: Node, updates: Node, reduce: str, *, include_self: bool = True
) -> Node:
    wide, indices, updates = map(_with_axis, (x, indices, updates))
    found = ops.scatter_reduce(wide, axis % wide.rank, indices, updates, reduce, include_self=include_self)
    return found if x.rank else ops.reshape(found, ())


def _scatter_add(x: Node, axis: int, indices: Node, updates: Node) -> Node:
    return _scatter_reduce(x, axis, indices, updates, "sum")


_REDUCES = {"add": "sum", "multiply": "prod"}  # the words of torch.scatter


def _scatter_value(x: Node, axis: int, indices: Node, value: Any, *, reduce: str) -> Node:
    one = ops.constant(value=(x.dtype.literal(number(value, x.dtype)),), dtype=x.dtype)
    return _scatter_reduce(x, axis, indices, ops.broadcast_to(one, indices.shape), _REDUCES[reduce])


def _index_put(x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False) -> Node:
    return ops.index_put(x, _key(x, indices), values, accumulate)


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
    "aten.index_copy.default": lambda x, axis, index, source: ops.index_copy(x, axis, index, source),
    "aten.index_fill.int_Scalar": lambda x, axis, index, value: ops.index_fill(x, axis, index, value),
    "aten.index_fill.int_Tensor": lambda x, axis, index, value: ops.index_fill(
        x, axis, index, converted(value, x.dtype)
    ),
    "aten.index_reduce.default": lambda x, axis, index, source, reduce, *, include_self=True: ops.index_reduce(
        x, axis, index, source, reduce, include_self
    ),
    "aten.masked_scatter.default": lambda x, mask, source: ops.masked_scatter(x, mask, source),
    "aten.take.default": lambda x, index: ops.take(x, index),
    "aten.put.default": lambda x, index, source, accumulate=False: ops.put(x, index, source, accumulate),
    "aten.scatter.src": lambda x, axis, index, source: ops.scatter(x, axis, converted(index, I64), source),
    "aten.scatter.value": lambda x, axis, index, value: ops.scatter(x, axis, converted(index, I64), value),
    "aten.scatter.reduce": lambda x, axis, index, source, *, reduce: _scatter_reduce(
        x, axis, index, source, _REDUCES[reduce]
    ),
    "aten.scatter.value_reduce": _scatter_value,
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter_reduce.two": _scatter_reduce,
}
