"""Lines of ops that put elements in order, or read them by rank.  Every sort is stable, whether asked for or not."""

from __future__ import annotations

import math
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node


def _quantile(function: Any) -> Any:
    def quantile(
        x: Node,
        q: Any,
        axis: int | None = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
    ) -> Node:
        return function(x, q, axis, keepdim, interpolation)  # type: ignore[no-any-return]

    return quantile


def _searchsorted(
    line: Node,
    values: Node,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Node | None = None,
) -> Node:
    given = () if sorter is None else (sorter,)
    return ops.searchsorted(line, values, *given, right=right, side=side, out_int32=out_int32)


def _spread_evenly(x: Node, chosen: Node) -> Node:
    """The chosen element, whose gradient goes to all its equals in equal parts."""
    if not x.dtype.has_tangent:
        return chosen
    value, others = ops.stop_gradient(chosen), ops.stop_gradient(x)
    equal = ops.where(ops.isnan(value), ops.isnan(others), ops.eq(others, value))
    return ops.amax(ops.where(equal, x, -math.inf))


def _number(value: Any, line: Node) -> Node:
    """A number as a scalar of the line's dtype."""
    if isinstance(value, float) and not line.dtype.is_float:
        raise Unsupported(f"the float {value} among elements of {line.dtype}")
    return ops.reshape(ops.constant(value=(line.dtype.literal(value),), dtype=line.dtype), ())


def _is_among(element: Any, among: Node, *, assume_unique: bool = False, invert: bool = False) -> Node:
    found = ops.any(ops.eq(among, element))
    return ~found if invert else found


LINES: dict[str, Any] = {
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.bucketize.Tensor": lambda x, boundaries, *, out_int32=False, right=False: ops.bucketize(
        x, boundaries, right=right, out_int32=out_int32
    ),
    "aten.searchsorted.Scalar": lambda line, value, **options: _searchsorted(line, _number(value, line), **options),
    "aten.bucketize.Scalar": lambda value, boundaries, *, out_int32=False, right=False: ops.bucketize(
        _number(value, boundaries), boundaries, right=right, out_int32=out_int32
    ),
    "aten.isin.Tensor_Scalar": lambda x, element, *, assume_unique=False, invert=False: (
        ops.ne(x, element) if invert else ops.eq(x, element)
    ),
    "aten.isin.Scalar_Tensor": _is_among,
    "aten.isin.Tensor_Tensor": lambda x, among, *, assume_unique=False, invert=False: ops.isin(x, among, invert=invert),
    "aten.sort.default": lambda x, axis=-1, descending=False: ops.sort(x, axis, descending),
    "aten.sort.stable": lambda x, *, stable=None, dim=-1, descending=False: ops.sort(x, dim, descending),
    "aten.argsort.default": lambda x, axis=-1, descending=False: ops.argsort(x, axis, descending),
    "aten.argsort.stable": lambda x, *, stable, dim=-1, descending=False: ops.argsort(x, dim, descending),
    "aten.msort.default": lambda x: ops.msort(x),
    "aten.topk.default": lambda x, k, axis=-1, largest=True, sorted=True: ops.topk(x, k, axis, largest, sorted),
    "aten.kthvalue.default": lambda x, k, axis=-1, keepdim=False: ops.kthvalue(x, k, axis, keepdim),
    "aten.median.default": lambda x: _spread_evenly(x, ops.median(x)),
    "aten.median.dim": lambda x, axis, keepdim=False: ops.median(x, axis, keepdim),
    "aten.nanmedian.default": lambda x: _spread_evenly(x, ops.nanmedian(x)),
    "aten.nanmedian.dim": lambda x, axis, keepdim=False: ops.nanmedian(x, axis, keepdim),
    "aten.mode.default": lambda x, axis=-1, keepdim=False: ops.mode(x, axis, keepdim),
    "aten.quantile.default": _quantile(ops.quantile),
    "aten.quantile.scalar": _quantile(ops.quantile),
    "aten.nanquantile.default": _quantile(ops.nanquantile),
    "aten.nanquantile.scalar": _quantile(ops.nanquantile),
}
