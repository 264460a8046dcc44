"""Reductions made of others: standard deviations, sums without NaN, counts and questions to all elements."""

from __future__ import annotations

from typing import Any

from ...ir.node import Node
from ...ir.op import ZERO, BadSample, Composite, Function, Sample
from ...ir.types import BOOL, I64, Type
from ..elementwise.pointwise import eq, invert, ne, sqrt, where
from ..rules import along, converted, full, reshaped, without, zeros_like
from .reduce import AXES, BAD_AXIS, _centred, _count, _float_reduction, _freedom, _kept, _plain, _var, mean, sum, var

_SOME = (AXES[0], AXES[3], AXES[4], AXES[6])
_FIVE = tuple(Sample(s.operands, s.attrs, dims={"N": 5}) for s in _SOME)

# -- spread ------------------------------------------------------------------------------------------------------------


def _std_value(x: Node, *, axis: Any, keepdims: bool, ddof: int | float) -> Node:
    wide = converted(x, x.dtype.compute)
    return converted(sqrt(var(wide, axis, keepdims, ddof)), x.dtype)


def _std_vjp(g: Node, y: Node, x: Node, *, axis: Any, keepdims: bool, ddof: int | float) -> tuple[Node]:
    # dx = g (x - mean) / ((count - ddof) std), 0 where the deviation is 0, as torch says
    wide, count, shape = converted(x, x.dtype.compute), _count(x, axis), without(x.shape, axis)
    centred = _centred(wide, axis, count)
    deviation = sqrt(sum.plain(centred * centred, axis=axis) / _freedom(count, ddof))
    none = eq(deviation, zeros_like(deviation))
    slope = (
        converted(reshaped(g, shape), wide.dtype) / where(none, full(1, deviation), deviation) / _freedom(count, ddof)
    )
    slope = where(none, zeros_like(slope), slope)
    return (converted(along(slope, x.shape, axis) * centred, x.dtype),)


std = Composite(
    "std",
    infer=_var,
    decompose=_std_value,
    vjp=_std_vjp,
    samples=(
        *_FIVE[:3],
        Sample(("F[N,3]",), {"axis": 0, "ddof": 1}, dims={"N": 5}),
        Sample(("F[3,N]",), {"ddof": 0.5}),
    ),
    bad=(*BAD_AXIS, BadSample(("i32[3]",), match="write a cast")),
    doc="the standard deviation, sqrt(var); the gradient of equal elements is 0",
)


def _var_mean(
    x: Node, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ddof: int | float = 0
) -> tuple[Node, Node]:
    return var(x, axis, keepdims, ddof), mean(x, axis, keepdims)


def _std_mean(
    x: Node, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, ddof: int | float = 0
) -> tuple[Node, Node]:
    return std(x, axis, keepdims, ddof), mean(x, axis, keepdims)


_PAIRS: dict[str, Any] = {"samples": (_FIVE[0], Sample(("F[4,3]",), {"axis": 0, "ddof": 1})), "bad": BAD_AXIS}
var_mean = Function("var_mean", write=_var_mean, doc="the variance, and the mean", source="torch.var_mean", **_PAIRS)
std_mean = Function(
    "std_mean", write=_std_mean, doc="the standard deviation, and the mean", source="torch.std_mean", **_PAIRS
)

# -- without NaN -------------------------------------------------------------------------------------------------------


def _numbers(x: Node) -> Node:
    """Where x is not NaN."""
    return eq(x, x)


def _nansum_value(x: Node, *, axis: Any, keepdims: bool) -> Node:
    total = sum.plain(where(_numbers(x), x, zeros_like(x)), axis=axis)
    return _plain(total, axis, keepdims, x.shape)


nansum = Composite(
    "nansum",
    infer=_float_reduction,
    decompose=_nansum_value,
    samples=_FIVE,
    bad=BAD_AXIS,
    doc="the sum of what is not NaN",
)


def _nanmean_value(x: Node, *, axis: Any, keepdims: bool) -> Node:
    numbers, wide = _numbers(x), converted(x, x.dtype.compute)
    total = sum.plain(where(numbers, wide, zeros_like(wide)), axis=axis)
    count = converted(sum.plain(numbers, axis=axis), wide.dtype)
    return _plain(converted(total / count, x.dtype), axis, keepdims, x.shape)


nanmean = Composite(
    "nanmean",
    infer=_float_reduction,
    decompose=_nanmean_value,
    samples=_FIVE,
    bad=BAD_AXIS,
    doc="the mean of what is not NaN; NaN where nothing else is",
)

# -- questions ---------------------------------------------------------------------------------------------------------


def _counted(x: Type, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    type_, attrs = _kept(x, axis, keepdims)
    return type_.with_dtype(I64), attrs


def _asked(x: Type, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Any:
    type_, attrs = _kept(x, axis, keepdims)
    return type_.with_dtype(BOOL), attrs


def _count_where(mask: Node, axis: Any, keepdims: bool) -> Node:
    return _plain(sum.plain(mask, axis=axis), axis, keepdims, mask.shape)


def _question(name: str, infer: Any, value: Any, doc: str) -> Composite:
    return Composite(
        name,
        infer=infer,
        decompose=value,
        vjp=lambda g, y, x, *, axis, keepdims: (ZERO,),
        samples=(
            Sample(("bool[N,3]",), {"axis": 1}, draw=("bool",)),
            Sample(("i32[2,N]",), {"axis": 0, "keepdims": True}, draw=("index:2",)),
            Sample(("F[2,3]",)),
        ),
        bad=BAD_AXIS,
        doc=doc,
    )


count_nonzero = _question(
    "count_nonzero",
    _counted,
    lambda x, *, axis, keepdims: _count_where(converted(x, BOOL), axis, keepdims),
    "the number of elements other than 0, i64",
)


def _any(x: Node, *, axis: Any, keepdims: bool) -> Node:
    count = _count_where(converted(x, BOOL), axis, keepdims)
    return ne(count, zeros_like(count))


def _all(x: Node, *, axis: Any, keepdims: bool) -> Node:
    count = _count_where(invert(converted(x, BOOL)), axis, keepdims)
    return eq(count, zeros_like(count))


any = _question("any", _asked, _any, "whether any element over axes is other than 0; False of no elements")
all = _question("all", _asked, _all, "whether all elements over axes are other than 0; True of no elements")
