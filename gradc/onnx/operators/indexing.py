"""Lines of gathers, scatters and sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim, product
from ...ir.node import Node
from ...ir.types import F32, I64
from ...ops.rules import converted
from ..table import Forms, Known, Sizes, checked, normalized_axis


def _wrapped(indices: Node, size: Any) -> Node:
    """Indices that count from the end where they are negative."""
    places = converted(indices, I64)
    return ops.where(places < 0, places + size, places)


def _gather(x: Node, indices: Node, *, axis: int = 0) -> Node:
    axis = normalized_axis(axis, x.rank)
    return ops.gather(x, _wrapped(indices, x.shape[axis]), axis)


def _gather_elements(x: Node, indices: Node, *, axis: int = 0) -> Node:
    axis = normalized_axis(axis, x.rank)
    part = _cut(x, indices.shape, axis)
    return ops.take_along_axis(part, _wrapped(indices, x.shape[axis]), axis)


def _cut(x: Node, shape: Any, axis: int) -> Node:
    """Without what lies beyond the shape on the other axes."""
    limit = tuple(n if i == axis else m for i, (n, m) in enumerate(zip(x.shape, shape, strict=True)))
    return x if limit == x.shape else ops.slice(x, (0,) * x.rank, limit, (1,) * x.rank)


def _flat_places(indices: Node, shape: Any, batch: int) -> Node:
    """The row of each index tuple, counted over the axes that it indexes and the batch axes before them."""
    depth = indices.shape[-1]
    if isinstance(depth, Dim):
        raise Unsupported(f"index tuples of {depth} elements")
    lead = indices.shape[:-1]
    place = ops.broadcast_to(ops.constant(value=(0,), dtype=I64), lead)
    for axis in range(batch):
        place = place * shape[axis] + ops.iota(shape=lead, axis=axis)
    for i in range(depth):
        one = ops.reshape(ops.slice(indices, (0,) * len(lead) + (i,), (*lead, i + 1), (1,) * indices.rank), lead)
        place = place * shape[batch + i] + _wrapped(one, shape[batch + i])
    return place


def _gather_nd(x: Node, indices: Node, *, batch_dims: int = 0) -> Node:
    depth = batch_dims + indices.shape[-1]
    rows = ops.reshape(x, (product(x.shape[:depth]), *x.shape[depth:]))
    return ops.gather(rows, _flat_places(indices, x.shape, batch_dims), 0)


_SCATTERED = {"none": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""What the reductions of scatters are called here."""


def _scatter_elements(x: Node, indices: Node, updates: Node, *, axis: int = 0, reduction: str = "none") -> Node:
    axis = normalized_axis(axis, x.rank)
    places = _wrapped(indices, x.shape[axis])
    how: Any = _SCATTERED[checked("reduction", reduction, _SCATTERED)]
    return ops.scatter_reduce(x, axis, places, updates, how) if how else ops.scatter(x, axis, places, updates)


def _tensor_scatter(
    past: Node, update: Node, begin: Node | None = None, *, axis: int = -2, mode: str = "linear"
) -> Node:
    """``TensorScatter``: rows of a cache written over, from another place in each batch."""
    axis = normalized_axis(axis, past.rank)
    if axis == 0:
        raise Unsupported("TensorScatter along the axis of batches")
    places = ops.iota(shape=update.shape, axis=axis)
    if begin is not None:
        places = places + ops.reshape(converted(begin, I64), (begin.shape[0], *(1,) * (update.rank - 1)))
    if checked("mode", mode, ("linear", "circular")) == "circular":
        places = ops.mod(places, past.shape[axis])
    return ops.scatter(past, axis, places, update)


def _scatter_nd(x: Node, indices: Node, updates: Node, *, reduction: str = "none") -> Node:
    depth = indices.shape[-1]
    width = product(x.shape[depth:])
    rows = ops.reshape(x, (product(x.shape[:depth]), width))
    count = product(indices.shape[:-1])
    places = ops.reshape(_flat_places(indices, x.shape, 0), (count, 1))
    wide = ops.broadcast_to(places, (count, width))
    flat = ops.reshape(updates, (count, width))
    return ops.reshape(_scatter_elements(rows, wide, flat, axis=0, reduction=reduction), x.shape)


def _top_k_first(x: Node, *, k: int, axis: int = -1) -> Any:
    """Before opset 10 the number of elements is an attribute."""
    return _top_k(x, (k,), axis=axis)


def _top_k(x: Node, k: Sizes, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:
    return ops.topk(x, int(k[0]), normalized_axis(axis, x.rank), bool(largest), bool(sorted))


def _argument(function: Callable[..., Node]) -> Callable[..., Node]:
    def along(x: Node, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Node:
        axis = normalized_axis(axis, x.rank)
        if not select_last_index:
            return function(x, axis, keepdims=bool(keepdims))
        return x.shape[axis] - 1 - function(ops.flip(x, axis), axis, keepdims=bool(keepdims))

    return along


def _compress(x: Node, condition: Known, *, axis: int | None = None) -> Node:
    places = np.flatnonzero(condition)
    if axis is None:
        x, axis = ops.reshape(x, (product(x.shape),)), 0
    axis = normalized_axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and places.size and places[-1] >= size:
        raise InvalidProblem(f"a condition that takes element {places[-1]} of an axis of {size}")
    return ops.gather(x, places, axis)


def _tf_idf(
    x: Node,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Any,
    ngram_indexes: Any,
    pool_int64s: Any = None,
    pool_strings: Any = None,
    weights: Any = None,
) -> Node:
    """``TfIdfVectorizer`` of integers: how often each n-gram of a pool occurs, its elements up to some apart."""
    if pool_int64s is None:
        raise Unsupported("TfIdfVectorizer of strings")
    tokens = converted(x if x.rank == 2 else ops.reshape(x, (1, x.shape[0])), I64)
    size, batch = tokens.shape[1], tokens.shape[0]
    if isinstance(size, Dim):
        raise Unsupported(f"TfIdfVectorizer of {size} tokens")
    ends = (*ngram_counts[1:], len(pool_int64s))
    counts: list[Node] = []  # in the order of the pool
    for length, (first, last) in enumerate(zip(ngram_counts, ends, strict=True), 1):
        grams = np.asarray(pool_int64s[first:last], np.int64).reshape(-1, length)
        total = ops.broadcast_to(ops.constant(value=(0,), dtype=I64), (batch, len(grams)))
        wanted = min_gram_length <= length <= max_gram_length
        for skip in range(max_skip_count + 1 if length > 1 else 1):
            windows = size - (length - 1) * (skip + 1)
            if wanted and windows > 0 and len(grams):
                at = np.arange(windows)[:, None] + np.arange(length) * (skip + 1)
                read = ops.reshape(ops.gather(tokens, at, 1), (batch, windows, 1, length))
                same = ops.all(ops.eq(read, ops.reshape(grams, (1, 1, *grams.shape))), 3)
                total = total + ops.sum(converted(same, I64), 1)
        counts.append(total)
    every = converted(ops.concat(*counts, axis=1), F32)
    if checked("mode", mode, ("TF", "IDF", "TFIDF")) != "TF":
        each = np.asarray(weights if weights is not None else np.ones(len(ngram_indexes)), np.float32)
        every = (converted(every > 0.0, F32) if mode == "IDF" else every) * ops.reshape(each, (1, len(each)))
    place = {column: row for row, column in enumerate(ngram_indexes)}
    order = np.array([place.get(column, 0) for column in range(max(ngram_indexes) + 1)])
    y = ops.gather(every, order, 1)
    return y if x.rank == 2 else ops.reshape(y, (y.shape[1],))


LINES: dict[str, Forms] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": lambda x, indices, updates, *, axis=0: _scatter_elements(x, indices, updates, axis=axis),
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "TopK": {1: _top_k_first, 10: _top_k},
    "ArgMax": _argument(ops.argmax),
    "ArgMin": _argument(ops.argmin),
    "Compress": _compress,
    "TfIdfVectorizer": _tf_idf,
}
