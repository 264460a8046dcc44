"""Lines of reductions."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import I64, DType
from ...ops.elementwise.rounding import largest
from ...ops.rules import converted
from ..table import to_result


def _axes(x: Node, axis: Any) -> Any:
    """None or () for all, as torch has it."""
    return None if axis is None or axis == () else tuple(a % max(x.rank, 1) for a in _several(axis)) if x.rank else ()


def _several(axis: Any) -> tuple[int, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def _reduced(function: Any, x: Node, axis: Any = None, keepdim: bool = False) -> Node:
    axes = _axes(x, axis)
    return x if axes == () else function(x, axis=axes, keepdims=keepdim)


def _sum(x: Node, axis: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    kind = dtype or (x.dtype if x.dtype.is_float else I64)
    return converted(_reduced(ops.sum, converted(x, kind), axis, keepdim), kind)  # sums of integers are i64


def _mean(x: Node, axis: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    return _reduced(ops.mean, converted(x, dtype or x.dtype), axis, keepdim)


def _prod(x: Node, axis: Any = None, keepdim: bool = False, *, dtype: DType | None = None) -> Node:
    kind = dtype or (x.dtype if x.dtype.is_float else I64)
    return converted(_reduced(ops.prod, converted(x, kind), axis, keepdim), kind)


def _spread_of(function: Any) -> Any:
    def spread(x: Node, axis: Any = None, *, correction: Any = None, keepdim: bool = False) -> Node:
        return function(x, axis=_axes(x, axis), keepdims=keepdim, ddof=1 if correction is None else correction)

    return spread


def _with_mean(function: Any) -> Any:
    def both(x: Node, axis: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Node, Node]:
        spread = _spread_of(function)(x, axis, correction=correction, keepdim=keepdim)
        return spread, ops.mean(x, axis=_axes(x, axis), keepdims=keepdim)

    return both


def _any(x: Node, axis: Any = None, keepdim: bool = False) -> Node:
    return _reduced(ops.any, x if x.dtype.kind == "b" else ops.ne(x, 0), axis, keepdim)


def _all(x: Node, axis: Any = None, keepdim: bool = False) -> Node:
    return _reduced(ops.all, x if x.dtype.kind == "b" else ops.ne(x, 0), axis, keepdim)


def _extreme(value: Any, position: Any) -> Any:
    def both(x: Node, axis: int, keepdim: bool = False) -> tuple[Node, Node]:
        if not x.rank:
            return x, ops.constant(value=(0,), dtype=I64)
        axis = axis % x.rank
        return value(x, axis=axis, keepdims=keepdim), position(x, axis=axis, keepdims=keepdim)

    return both


def _position(function: Any) -> Any:
    def position(x: Node, axis: int | None = None, keepdim: bool = False) -> Node:
        if axis is not None and x.rank:
            return function(x, axis=axis % x.rank, keepdims=keepdim)
        found = function(ops.reshape(x, (-1,)), axis=0)
        return ops.reshape(found, (1,) * x.rank) if keepdim else found

    return position


def _softmax(function: Any) -> Any:
    def softmax(x: Node, axis: int, dtype: Any = None) -> Node:
        wide = x if not isinstance(dtype, DType) else converted(x, dtype)
        if not x.rank:  # torch takes it for one of one element
            return ops.reshape(function(ops.reshape(wide, (1,)), axis=0), ())
        return function(wide, axis=axis % x.rank)

    return softmax


def _old_softmax(function: Any) -> Any:
    of = _softmax(function)

    def softmax(x: Node, axis: int, half_to_float: bool) -> Node:
        if half_to_float:
            raise Unsupported("softmax that widens its operand")
        return of(x, axis)

    return softmax


def _cosine_similarity(x: Node, y: Node, axis: int = 1, eps: float = 1e-8) -> Node:
    if not x.rank and not y.rank:
        return ops.cosine_similarity(ops.reshape(x, (1,)), ops.reshape(y, (1,)), 0, eps)
    return ops.cosine_similarity(x, y, axis, eps)


def _running(values: Any, places: Any) -> Any:
    def extremum(x: Node, axis: int) -> tuple[Node, Node]:
        return values(x, axis=axis), places(x, axis=axis)

    return extremum


def _scan(function: Any) -> Any:
    def scan(x: Node, axis: int, *, dtype: DType | None = None) -> Node:
        y = function(x, axis=axis, dtype=dtype)
        return y if dtype is None else converted(y, dtype)  # scans of integers are i64

    return scan


def _histc(x: Node, bins: int = 100, min: Any = 0, max: Any = 0) -> Node:
    """How many elements lie in each of equal parts of [min, max], as many as ``bins``; max belongs to the last."""
    if not min < max or not x.dtype.is_float:
        raise Unsupported("histc without a range of its own: give min < max")
    if not max - min <= largest(x.dtype):
        raise Unsupported(f"histc over [{min}, {max}], whose length {x.dtype} does not hold")
    low, high = (ops.constant(value=(x.dtype.literal(v),), dtype=x.dtype) for v in (min, max))
    x = ops.stop_gradient(ops.reshape(x, (-1,)))
    within = (x >= low) & (x <= high)
    place = (ops.where(within, x, low) - low) * bins / (high - low)  # in the dtype of x, as torch rounds it
    place = ops.minimum(converted(place, I64), bins - 1)
    hits = converted(within, x.dtype)
    return ops.scatter_add(place, hits, size=bins)


def _pairwise_distance(x: Node, y: Node, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Node:
    if not (x.dtype.is_float and y.dtype.is_float):
        raise Unsupported("pairwise_distance of integers, whose differences wrap around")
    dtype = x.dtype if x.dtype.itemsize >= y.dtype.itemsize else y.dtype
    return ops.pairwise_distance(converted(x, dtype), converted(y, dtype), p=p, eps=eps, keepdim=keepdim)


LINES: dict[str, Any] = {
    "aten.sum.default": lambda x, *, dtype=None: _sum(x, dtype=dtype),
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": lambda x, *, dtype=None: _mean(x, dtype=dtype),
    "aten.mean.dim": _mean,
    "aten.prod.default": lambda x, *, dtype=None: _prod(x, dtype=dtype),
    "aten.prod.dim_int": _prod,
    "aten.amax.default": lambda x, axis=(), keepdim=False: _reduced(ops.amax, x, axis, keepdim),
    "aten.amin.default": lambda x, axis=(), keepdim=False: _reduced(ops.amin, x, axis, keepdim),
    "aten.max.default": lambda x: ops.amax(x) if x.rank else x,
    "aten.min.default": lambda x: ops.amin(x) if x.rank else x,
    "aten.max.dim": _extreme(ops.max, ops.argmax),
    "aten.min.dim": _extreme(ops.min, ops.argmin),
    "aten.argmax.default": _position(ops.argmax),
    "aten.argmin.default": _position(ops.argmin),
    "aten.any.default": _any,
    "aten.any.dim": _any,
    "aten.any.dims": _any,
    "aten.all.default": _all,
    "aten.all.dim": _all,
    "aten.all.dims": _all,
    "aten.cumsum.default": _scan(ops.cumsum),
    "aten.cumprod.default": _scan(ops.cumprod),
    "aten.cummax.default": _running(ops.cummax, ops.cumargmax),
    "aten.cummin.default": _running(ops.cummin, ops.cumargmin),
    "aten.logcumsumexp.default": lambda x, axis: ops.logcumsumexp(x, axis=axis),
    "aten.histc.default": _histc,
    "aten.var.correction": _spread_of(ops.var),
    "aten.logsumexp.default": lambda x, axis, keepdim=False: ops.logsumexp(x, axis=_axes(x, axis), keepdims=keepdim),
    "aten.softmax.int": _softmax(ops.softmax),
    "aten.log_softmax.int": _softmax(ops.log_softmax),
    "aten._softmax.default": _old_softmax(ops.softmax),
    "aten._log_softmax.default": _old_softmax(ops.log_softmax),
    "aten._safe_softmax.default": _softmax(ops.safe_softmax),
    "aten.var_mean.correction": _with_mean(ops.var),
    "aten.std_mean.correction": _with_mean(ops.std),
    "aten.std.correction": _spread_of(ops.std),
    "aten.nansum.default": lambda x, axis=None, keepdim=False, *, dtype=None: ops.nansum(
        x, axis=_axes(x, axis), keepdims=keepdim
    ),
    "aten.count_nonzero.default": lambda x, axis=None: ops.count_nonzero(x, axis=_axes(x, axis)),
    "aten.count_nonzero.dim_IntList": lambda x, axis: ops.count_nonzero(x, axis=_axes(x, axis)),
    "aten.linalg_vector_norm.default": to_result(
        lambda x, ord=2, axis=None, keepdim=False, *, dtype=None: ops.norm(
            x, float(ord), axis=_axes(x, axis), keepdims=keepdim
        )
    ),
    "aten.cosine_similarity.default": to_result(_cosine_similarity),
    "aten.pairwise_distance.default": _pairwise_distance,
    "aten.cdist.default": lambda x, y, p=2.0, compute_mode=None: ops.cdist(x, y, p=p),
    "aten._cdist_forward.default": lambda x, y, p, compute_mode: ops.cdist(x, y, p=p),
    "aten.dist.default": to_result(lambda x, y, p=2: ops.norm(x - y, float(p))),
}
