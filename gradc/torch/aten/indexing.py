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


def _wrapped(indices: Node, size: Any) -> Node:
    """Negative indices counted from the end."""
    indices = converted(indices, I64)
    return ops.where(indices < 0, indices + size, indices)


def _index(x: Node, indices: Sequence[Node | None]) -> Node:
    """x[i, j, ...]: indices along neighbouring axes become one index into their axes made one."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype.kind == "b" for index in given):
        raise Unsupported("an index that is a mask: how many elements it takes depends on data")
    if not axes:
        return x
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise Unsupported("indices along axes that are not neighbours")
    flat: Any = None
    for axis, index in zip(axes, given, strict=True):
        at = _wrapped(index, x.shape[axis])
        if len(axes) > 1:  # the flat index below hides which axis is wrong, so each is checked
            at = ops.check_index(at, bound=x.shape[axis], op="index")
        flat = at if flat is None else flat * x.shape[axis] + at
    lead = axes[0]
    merged = ops.reshape(x, (*x.shape[:lead], -1, *x.shape[axes[-1] + 1 :])) if len(axes) > 1 else x
    return ops.gather(merged, flat, axis=lead)


def _embedding(
    weight: Node, indices: Node, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Node:
    if sparse:
        raise Unsupported("embedding with sparse gradients")
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
    if sparse:
        raise Unsupported("embedding_bag with sparse gradients")
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


LINES: dict[str, Any] = {
    "aten.index.Tensor": _index,
    "aten.index_select.default": lambda x, axis, indices: ops.index_select(x, axis, indices),
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.gather.default": _gather,
    "aten.index_add.default": lambda x, axis, indices, source, *, alpha=1: ops.index_add(
        x, axis, indices, source, alpha=alpha
    ),
    "aten.scatter_add.default": _scatter_add,
    "aten.scatter_reduce.two": _scatter_reduce,
}
