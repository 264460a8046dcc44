"""Lines of reductions."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from ... import ops
from ...ir.node import Node
from ...ir.types import DTYPES, F64
from ...ops.rules import converted
from ..table import Forms, Sizes, normalized_axes


def _over(function: Callable[[Node, tuple[int, ...], bool], Node]) -> Callable[..., Node]:
    def reduced(
        x: Node, places: Sizes | None = None, *, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Node:
        chosen = places if places is not None else axes
        if chosen is None or not len(chosen):
            if noop_with_empty_axes:
                return converted(function(ops.reshape(x, (*x.shape, 1)), (x.rank,), False), x.dtype)
            chosen = range(x.rank)
        whole = tuple(sorted(normalized_axes(chosen, x.rank)))
        return converted(function(x, whole, bool(keepdims)), x.dtype)

    return reduced


def _mean(x: Node, axes: tuple[int, ...], keep: bool) -> Node:
    if x.dtype.is_float:
        return ops.mean(x, axes, keepdims=keep)
    return ops.trunc(ops.mean(converted(x, F64), axes, keepdims=keep))


def _float(x: Node) -> Node:
    return x if x.dtype.is_float else converted(x, F64)


def _extreme(floats: Callable[..., Node]) -> Callable[[Node, tuple[int, ...], bool], Node]:
    """The largest or smallest; of bool as of integers; of nothing the end of the dtype's range."""

    def reduced(x: Node, axes: tuple[int, ...], keep: bool) -> Node:
        if any(x.shape[a] == 0 for a in axes):
            least, most = (-inf, inf) if x.dtype.is_float else x.dtype.range if x.dtype.is_integer else (False, True)
            shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keep or i not in axes)
            return ops.broadcast_to(ops.constant(value=(least if floats is ops.amax else most,), dtype=x.dtype), shape)
        if x.dtype.kind == "b":
            return ops.ne(floats(converted(x, DTYPES["u8"]), axes, keepdims=keep), 0)
        return floats(x, axes, keepdims=keep)

    return reduced


LINES: dict[str, Forms] = {
    "ReduceSum": _over(lambda x, axes, keep: ops.sum(x, axes, keepdims=keep)),
    "ReduceMean": _over(_mean),
    "ReduceMax": _over(_extreme(ops.amax)),
    "ReduceMin": _over(_extreme(ops.amin)),
    "ReduceProd": _over(lambda x, axes, keep: ops.prod(x, axes, keepdims=keep)),
    "ReduceL1": _over(lambda x, axes, keep: ops.sum(ops.abs(x), axes, keepdims=keep)),
    "ReduceL2": _over(lambda x, axes, keep: ops.sqrt(ops.sum(ops.square(_float(x)), axes, keepdims=keep))),
    "ReduceLogSum": _over(lambda x, axes, keep: ops.log(_float(ops.sum(x, axes, keepdims=keep)))),
    "ReduceLogSumExp": _over(lambda x, axes, keep: ops.logsumexp(_float(x), axes, keepdims=keep)),
    "ReduceSumSquare": _over(lambda x, axes, keep: ops.sum(x * x, axes, keepdims=keep)),
}
