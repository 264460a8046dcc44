"""Activations that are other functions on other parts of the line, and what is made of sigmoid and tanh."""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Sample
from ...ir.types import Type
from ..rules import (
    canonical_axis,
    cases,
    converted,
    floating,
    full,
    reshaped,
    slopes,
    spread,
    unary_float,
    widened,
    zeros_like,
)
from .pointwise import (
    NOT_FLOAT,
    abs,
    bitwise_and,
    clamp,
    exp,
    expm1,
    ge,
    gt,
    le,
    log1p,
    lt,
    minimum,
    sigmoid,
    tanh,
    where,
)

_SAMPLES = cases("", "N", "2,N,3")


def _ones(x: Node) -> Node:
    return full(1, x)


def _between(x: Node, low: float, high: float) -> Node:
    """Where low < x < high."""
    return bitwise_and(gt(x, full(low, x)), lt(x, full(high, x)))


# -- exponential below 0 -----------------------------------------------------------------------------------------------

_SELU = (1.0507009873554805, 1.6732632423543772)
"""Scale and alpha (Klambauer et al. 2017)."""


def _elu(x: Type, *, alpha: float = 1.0) -> Type:
    return floating(x)


def _celu(x: Type, *, alpha: float = 1.0) -> Type:
    if alpha == 0:
        raise TypeRuleError("alpha=0.0: x is divided by it")
    return floating(x)


def _negative_part(x: Node) -> Node:
    """x below 0, else 0: the exponential of what is not taken never overflows."""
    return where(gt(x, zeros_like(x)), zeros_like(x), x)


def _exponential(x: Node, scale: float, alpha: float, inside: float) -> Node:
    """scale x above 0, scale alpha (e^(x inside) - 1) below."""
    below = expm1(_negative_part(x) * inside) * (scale * alpha)
    return where(gt(x, zeros_like(x)), x * scale, below)


def _exponential_slope(x: Node, scale: float, alpha: float, inside: float) -> tuple[Node]:
    """scale above 0, scale alpha inside e^(x inside) below."""
    below = exp(_negative_part(x) * inside) * (scale * alpha * inside)
    return (where(gt(x, zeros_like(x)), full(scale, x), below),)


elu = Composite(
    "elu",
    infer=_elu,
    decompose=widened(lambda x, *, alpha: _exponential(x, 1.0, alpha, 1.0)),
    vjp=slopes(lambda x, *, alpha: _exponential_slope(x, 1.0, alpha, 1.0)),
    samples=(*_SAMPLES, Sample(("F[N]",), {"alpha": 0.5})),
    bad=NOT_FLOAT,
    doc="x above 0, alpha (e^x - 1) below",
    source="Clevert et al. 2016",
)
selu = Composite(
    "selu",
    infer=unary_float,
    decompose=widened(lambda x: _exponential(x, *_SELU, 1.0)),
    vjp=slopes(lambda x: _exponential_slope(x, *_SELU, 1.0)),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="elu with the alpha and the scale that keep mean and variance",
    source="Klambauer et al. 2017",
)
celu = Composite(
    "celu",
    infer=_celu,
    decompose=widened(lambda x, *, alpha: _exponential(x, 1.0, alpha, 1 / alpha)),
    vjp=slopes(lambda x, *, alpha: _exponential_slope(x, 1.0, alpha, 1 / alpha)),
    samples=(*_SAMPLES, Sample(("F[N]",), {"alpha": 0.5})),
    bad=(*NOT_FLOAT, BadSample(("f32[3]",), {"alpha": 0.0}, match="alpha=0.0")),
    doc="x above 0, alpha (e^(x/alpha) - 1) below",
    source="Barron 2017",
)

# -- another slope below 0 ---------------------------------------------------------------------------------------------


def _leaky(x: Type, *, negative_slope: float = 0.01) -> Type:
    return floating(x)


leaky_relu = Composite(
    "leaky_relu",
    infer=_leaky,
    decompose=widened(lambda x, *, negative_slope: where(gt(x, zeros_like(x)), x, x * negative_slope)),
    vjp=slopes(
        lambda x, *, negative_slope: (where(gt(x, zeros_like(x)), _ones(x), full(negative_slope, x)),),
    ),
    samples=(*_SAMPLES, Sample(("F[N]",), {"negative_slope": 0.3})),
    bad=NOT_FLOAT,
    doc="x above 0, negative_slope x below; the derivative at 0 is negative_slope",
)


def _rrelu(x: Type, *, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Type:
    if training:
        raise TypeRuleError("training=True draws random slopes; only the mean slope of evaluation is there")
    return floating(x)


rrelu = Composite(
    "rrelu",
    infer=_rrelu,
    decompose=lambda x, *, lower, upper, training: leaky_relu(x, (lower + upper) / 2),
    samples=(*cases("N", "2,N"), Sample(("F[N]",), {"lower": 0.1, "upper": 0.5})),
    bad=(*NOT_FLOAT, BadSample(("f32[3]",), {"training": True}, match="training=True")),
    doc="leaky_relu with the mean slope (lower + upper) / 2: randomised relu outside training",
)


def _prelu(x: Type, weight: Type) -> Type:
    if weight.dtype is not floating(x).dtype:
        raise TypeRuleError(f"dtypes differ: {x.dtype} and weight {weight.dtype}; write a cast")
    one = weight.rank == 0 or (weight.rank == 1 and weight.shape[0] == 1)
    if not one and (weight.rank != 1 or x.rank < 2 or not same(weight.shape[0], x.shape[1])):
        raise TypeRuleError(f"weight {weight} for {x}: one slope is needed, or one for each channel of axis 1")
    return x


def _prelu_value(x: Node, weight: Node) -> Node:
    channels = weight.rank == 1 and weight.shape[0] != 1
    line: tuple[Size, ...] = tuple(s if channels and a == 1 else 1 for a, s in enumerate(x.shape))
    return where(gt(x, zeros_like(x)), x, x * spread(reshaped(weight, line), x.shape))


prelu = Composite(
    "prelu",
    infer=_prelu,
    decompose=widened(_prelu_value),
    samples=(
        Sample(("F[N,3]", "F[3]")),
        Sample(("F[2,3,N]", "F[3]")),
        Sample(("F[N]", "F[1]")),
        Sample(("F[2,N]", "F[]")),
    ),
    bad=(
        BadSample(("f32[2,3]", "f32[2]"), match="weight f32[2] for f32[2,3]"),
        BadSample(("f32[2,3]", "f64[3]"), match="dtypes differ"),
    ),
    doc="x above 0, weight x below, with one weight or one for each channel (axis 1)",
    source="He et al. 2015",
)

# -- bounded -----------------------------------------------------------------------------------------------------------


def _hardtanh(x: Type, *, min_val: float = -1.0, max_val: float = 1.0) -> Type:
    if not min_val <= max_val:
        raise TypeRuleError(f"min_val={min_val} is above max_val={max_val}")
    return floating(x)


def _mask(inside: Node, x: Node) -> tuple[Node]:
    return (where(inside, _ones(x), zeros_like(x)),)


hardtanh = Composite(
    "hardtanh",
    infer=_hardtanh,
    decompose=lambda x, *, min_val, max_val: clamp.plain(x, min=min_val, max=max_val),
    vjp=slopes(lambda x, *, min_val, max_val: _mask(_between(x, min_val, max_val), x)),
    samples=(*_SAMPLES, Sample(("F[N]",), {"min_val": -0.25, "max_val": 0.5})),
    bad=(*NOT_FLOAT, BadSample(("f32[3]",), {"min_val": 2.0}, match="min_val=2.0 is above")),
    doc="x held between min_val and max_val; the derivative is 0 on the bounds, where clamp's is 1",
)
relu6 = Composite(
    "relu6",
    infer=unary_float,
    decompose=lambda x: clamp.plain(x, min=0.0, max=6.0),
    vjp=slopes(lambda x: _mask(_between(x, 0.0, 6.0), x)),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="x held between 0 and 6; the derivative is 0 on the bounds",
)
hardsigmoid = Composite(
    "hardsigmoid",
    infer=unary_float,
    decompose=widened(lambda x: clamp.plain(x + 3, min=0.0, max=6.0) / 6),
    vjp=slopes(lambda x: (where(_between(x, -3.0, 3.0), full(1 / 6, x), zeros_like(x)),)),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="relu6(x + 3) / 6",
)


def _hardswish_slope(x: Node) -> tuple[Node]:
    """0 below -3, x/3 + 1/2 up to 3, 1 above."""
    far = where(lt(x, full(3, x)), x / 3 + 0.5, _ones(x))
    return (where(le(x, full(-3, x)), zeros_like(x), far),)


hardswish = Composite(
    "hardswish",
    infer=unary_float,
    decompose=widened(lambda x: x * (clamp.plain(x + 3, min=0.0, max=6.0) / 6)),
    vjp=slopes(_hardswish_slope),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="x relu6(x + 3) / 6",
    source="Howard et al. 2019",
)

# -- shrinking and thresholds ------------------------------------------------------------------------------------------


def _shrink(x: Type, *, lambd: float = 0.5) -> Type:
    if lambd < 0:
        raise TypeRuleError(f"lambd={lambd} is below 0")
    return floating(x)


def _hardshrink(x: Type, *, lambd: float = 0.5) -> Type:
    return floating(x)


def _outside(x: Node, lambd: float) -> Node:
    """Where |x| > lambd, or x is NaN."""
    return ~bitwise_and(ge(x, full(-lambd, x)), le(x, full(lambd, x)))


def _softshrunk(x: Node, *, lambd: float) -> Node:
    moved = where(gt(x, zeros_like(x)), x - lambd, x + lambd)
    return where(_outside(x, lambd), moved, zeros_like(x))


_NEGATIVE = (*NOT_FLOAT, BadSample(("f32[3]",), {"lambd": -1.0}, match="lambd=-1.0 is below 0"))
softshrink = Composite(
    "softshrink",
    infer=_shrink,
    decompose=widened(_softshrunk),
    vjp=slopes(lambda x, *, lambd: _mask(_outside(x, lambd), x)),
    samples=(*_SAMPLES, Sample(("F[N]",), {"lambd": 0.2})),
    bad=_NEGATIVE,
    doc="x moved towards 0 by lambd, 0 within lambd of it",
)
hardshrink = Composite(
    "hardshrink",
    infer=_hardshrink,
    decompose=lambda x, *, lambd: where(_outside(x, lambd), x, zeros_like(x)),
    vjp=slopes(lambda x, *, lambd: _mask(_outside(x, lambd), x)),
    samples=(*_SAMPLES, Sample(("F[N]",), {"lambd": 0.2})),
    bad=NOT_FLOAT,
    doc="x, 0 within lambd of 0",
)
tanhshrink = Composite(
    "tanhshrink",
    infer=unary_float,
    decompose=widened(lambda x: x - tanh(x)),
    vjp=slopes(lambda x: (tanh(x) * tanh(x),)),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="x - tanh(x)",
)


def _threshold(x: Type, *, threshold: float, value: float) -> Type:
    return floating(x)


threshold = Composite(
    "threshold",
    infer=_threshold,
    decompose=lambda x, *, threshold, value: where(le(x, full(threshold, x)), full(value, x), x),
    vjp=slopes(lambda x, *, threshold, value: _mask(~le(x, full(threshold, x)), x)),
    samples=(
        Sample(("F[N]",), {"threshold": 0.1, "value": 20.0}),
        Sample(("F[2,N]",), {"threshold": -0.5, "value": 0.0}),
    ),
    bad=(BadSample(("i32[3]",), {"threshold": 0.0, "value": 0.0}, match="i32 is no float"),),
    doc="x above the threshold, else value",
)

# -- smooth ------------------------------------------------------------------------------------------------------------


def _mish_parts(x: Node) -> tuple[Node, Node, Node]:
    """tanh(log(1 + e^x)), 1 minus that, and sigmoid(x), of the exponential that does not overflow."""
    positive = ge(x, zeros_like(x))
    e = exp(-abs(x))
    over, missing = where(positive, e * 2 + 1, e * (e + 2)), where(positive, e * e * 2, full(2, x))
    return over / (over + missing), missing / (over + missing), where(positive, _ones(x), e) / (e + 1)


def _mish_slope(x: Node) -> tuple[Node]:
    """t + x (1 - t^2) sigmoid(x), t = tanh(log(1 + e^x))."""
    t, missing, s = _mish_parts(x)
    return (t + x * (missing * (t + 1) * s),)


mish = Composite(
    "mish",
    infer=unary_float,
    decompose=widened(lambda x: x * _mish_parts(x)[0]),
    vjp=slopes(_mish_slope),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="x tanh(log(1 + e^x))",
    source="Misra 2020",
)
logsigmoid = Composite(
    "logsigmoid",
    infer=unary_float,
    decompose=widened(lambda x: minimum(x, zeros_like(x)) - log1p(exp(-abs(x)))),
    vjp=slopes(lambda x: (sigmoid(-x),)),
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="log(sigmoid(x)) without overflow",
)


def _softsign_vjp(g: Node, y: Node, x: Node) -> tuple[Node]:
    # dx = g / (1 + |x|)^2, whose square may lie outside the dtype
    wide = converted(x, x.dtype.compute)
    below = abs(wide) + 1
    return (converted(converted(g, wide.dtype) / below / below, x.dtype),)


softsign = Composite(
    "softsign",
    infer=unary_float,
    decompose=widened(lambda x: x / (abs(x) + 1)),
    vjp=_softsign_vjp,
    samples=_SAMPLES,
    bad=NOT_FLOAT,
    doc="x / (1 + |x|)",
)


def _glu(x: Type, *, axis: int = -1) -> Any:
    axis = canonical_axis(axis, floating(x).rank)
    size = x.shape[axis]
    half = size // 2
    if not same(half * 2, size):
        raise TypeRuleError(f"axis {axis} has a size of {size}, which is not known to be even")
    return x.with_shape(*(half if a == axis else s for a, s in enumerate(x.shape))), {"axis": axis}


def _glu_value(x: Node, *, axis: int) -> Node:
    half = x.shape[axis] // 2
    first, second = (
        call("getitem", x, (*(slice(None) for _ in range(axis)), part)) for part in (slice(half), slice(half, None))
    )
    return first * sigmoid(second)


glu = Composite(
    "glu",
    infer=_glu,
    decompose=widened(_glu_value),
    samples=(Sample(("F[N,6]",)), Sample(("F[2,4,N]",), {"axis": 1}), Sample(("F[2*N]",), dims={"N": 3})),
    bad=(
        BadSample(("f32[3]",), match="size of 3, which is not known to be even"),
        BadSample(("f32[2,4]",), {"axis": 2}, match="axis=2"),
    ),
    doc="the first half of an axis times the sigmoid of the second",
    source="Dauphin et al. 2017",
)
