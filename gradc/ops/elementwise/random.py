"""Random numbers that a kernel computes where it needs them: a function of a key and a place, with no state.

Every draw takes a ``key`` (an i64 scalar: a seed, or a seed plus the step of a training loop) and a ``stream`` (a
number of the draw's own: two draws of one key and one stream are the same numbers).  The bits are the same on every
target; the backward computes a mask again instead of keeping it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, SizeLike, product
from ...ir.node import Node, call
from ...ir.op import ZERO, BadSample, Composite, Expr, Primitive, Sample
from ...ir.types import F32, F64, I64, DType, Type
from ..rules import alike, cases, converted, floating, full, reshaped, spread, zeros_like
from .bits import right_shift
from .pointwise import bitwise_and, cos, log, lt, sqrt, where

Array = np.ndarray[Any, Any]

# -- bits --------------------------------------------------------------------------------------------------------------

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def _philox(index: Type, stream: Type, key: Type) -> Type:
    if alike(index, stream, key).dtype is not I64:
        raise TypeRuleError(f"{index.dtype}: a place, a stream and a key are i64")
    return index


def philox_block(counter: list[Array], key: list[Array]) -> list[Array]:
    """The four words that ten rounds make of a counter of four words and a key of two, all in u64."""
    half = np.uint64(32)
    for _ in range(10):
        left, right = np.uint64(_MULTIPLIERS[0]) * counter[0], np.uint64(_MULTIPLIERS[1]) * counter[2]
        counter = [right >> half ^ counter[1] ^ key[0], right & _LOW, left >> half ^ counter[3] ^ key[1], left & _LOW]
        key = [key[j] + np.uint64(_WEYL[j]) & _LOW for j in (0, 1)]
    return counter


def _philox_reference(index: Array, stream: Array, key: Array) -> Array:
    i, s, k = (np.asarray(a).astype(np.int64).view(np.uint64) for a in (index, stream, key))
    half = np.uint64(32)
    c = philox_block([i >> np.uint64(1) & _LOW, i >> np.uint64(33), s & _LOW, s >> half], [k & _LOW, k >> half])
    odd = (i & np.uint64(1)).astype(bool)
    return np.asarray(np.where(odd, c[2] | c[3] << half, c[0] | c[1] << half)).view(np.int64)


philox = Primitive(
    "philox",
    infer=_philox,
    reference=_philox_reference,
    lower=Expr("philox({0}, {1}, {2})", cost=40),
    broadcast=True,
    in_place_of_dtype=True,
    vjp=lambda g, y, index, stream, key: (ZERO, ZERO, ZERO),
    samples=(
        *cases("N", "2,3", "", arity=3, dtype="i64", draw="int"),
        Sample(("i64[N]", "i64[]", "i64[]"), draw=("int",) * 3),
    ),
    bad=(BadSample(("i32[3]", "i32[3]", "i32[3]"), match="are i64"),),
    doc=(
        "64 random bits per place: half of the block that Philox4x32-10 makes of the counter (index // 2, stream) under"
        " a key; an even index takes the lower half"
    ),
    source="Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3",
)


def _shaped(key: Type, shape: tuple[SizeLike, ...], dtype: DType) -> Type:
    if key.dtype is not I64 or key.rank != 0:
        raise TypeRuleError(f"the key is {key}, not i64[]: a seed, or a seed and the number of the step")
    return Type(dtype, shape)


def _bits(key: Node, shape: Any, stream: int, first: Size = 0) -> Node:
    """64 bits per element of a shape, from the place ``first`` on."""
    index = reshaped(call("iota", shape=(product(shape),), axis=0, dtype=I64), shape)
    if first != 0:
        index = index + (first if isinstance(first, int) else spread(call("dim", size=first), shape))
    return philox(index, full(stream, index), spread(key, shape))


def _random_bits(key: Type, *, shape: tuple[SizeLike, ...], stream: int) -> Type:
    return _shaped(key, shape, I64)


random_bits = Composite(
    "random_bits",
    infer=_random_bits,
    decompose=lambda key, *, shape, stream: _bits(key, shape, stream),
    samples=(Sample(("i64[]",), {"shape": (3, 4), "stream": 5}), Sample(("i64[]",), {"shape": (), "stream": 0})),
    bad=(
        BadSample(("i64[2]",), {"shape": (3,), "stream": 0}, match="not i64"),
        BadSample(("i64[]",), {"shape": (3,)}, match="stream is missing"),
    ),
    doc="64 random bits per element, as i64: the same on every target",
)

# -- numbers -----------------------------------------------------------------------------------------------------------


_DIGITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}
"""Binary digits of a float's significand."""


def _unit(bits: Node, dtype: DType) -> Node:
    """Numbers in [0, 1): as many of the highest bits as the dtype holds exactly."""
    digits = _DIGITS[dtype.name]
    return converted(_top(bits, digits), dtype) * 2.0**-digits


def _top(bits: Node, digits: int) -> Node:
    """The number that the highest bits are."""
    return bitwise_and(right_shift(bits, full(64 - digits, bits)), full(2**digits - 1, bits))


def _rand(key: Type, *, shape: tuple[SizeLike, ...], stream: int, dtype: DType = F32) -> Type:
    if dtype.name not in _DIGITS:
        raise TypeRuleError(f"dtype={dtype}: there are {', '.join(_DIGITS)}")
    return _shaped(key, shape, dtype)


_DRAWS = (
    Sample(("i64[]",), {"shape": (3, 4), "stream": 1}),
    Sample(("i64[]",), {"shape": (7,), "stream": 2, "dtype": "f64"}),
    Sample(("i64[]",), {"shape": (5,), "stream": 2, "dtype": "f16"}),
    Sample(("i64[]",), {"shape": (5,), "stream": 2, "dtype": "bf16"}),
    Sample(("i64[]",), {"shape": (), "stream": 0}),
)
_BAD_DRAWS = (
    BadSample(("i32[]",), {"shape": (3,), "stream": 0}, match="not i64"),
    BadSample(("i64[]",), {"shape": (3,), "stream": 0, "dtype": "i8"}, match="there are"),
)

rand = Composite(
    "rand",
    infer=_rand,
    decompose=lambda key, *, shape, stream, dtype: _unit(_bits(key, shape, stream), dtype),
    samples=_DRAWS,
    bad=_BAD_DRAWS,
    doc="uniform on [0, 1): multiples of the dtype's distance below 1, the same bits on every target",
)


def _randn_value(key: Node, *, shape: Any, stream: int, dtype: DType) -> Node:
    # Box-Muller: the number that goes into the logarithm is in (0, 1]; in f64 a draw has bits for one of the two only
    bits = _bits(key, shape, stream)
    if dtype is F64:
        ahead = converted(_top(bits, 53) + 1, F64) * 2.0**-53
        around = _unit(_bits(key, shape, stream, product(shape)), F64)
    else:
        ahead = converted(_top(bits, 32) + 1, F32) * 2.0**-32
        around = converted(bitwise_and(bits, full(2**24 - 1, bits)), F32) * 2.0**-24
    return converted(sqrt(log(ahead) * -2.0) * cos(around * math.tau), dtype)


randn = Composite(
    "randn",
    infer=_rand,
    decompose=_randn_value,
    samples=_DRAWS,
    bad=_BAD_DRAWS,
    doc="normal with mean 0 and variance 1; targets differ by the error of their logarithm and cosine",
    source="Box and Muller 1958",
)


def _randint(key: Type, *, low: int, high: int, shape: tuple[SizeLike, ...], stream: int) -> Type:
    if not 0 < high - low <= 2**31:
        raise TypeRuleError(f"low={low}, high={high}: from 1 to 2^31 numbers lie between")
    return _shaped(key, shape, I64)


def _randint_value(key: Node, *, low: int, high: int, shape: Any, stream: int) -> Node:
    top = _top(_bits(key, shape, stream), 32)
    return right_shift(top * (high - low), full(32, top)) + low


randint = Composite(
    "randint",
    infer=_randint,
    decompose=_randint_value,
    samples=(Sample(("i64[]",), {"low": -2, "high": 5, "shape": (3, 4), "stream": 1}),),
    bad=(BadSample(("i64[]",), {"low": 3, "high": 3, "shape": (2,), "stream": 0}, match="from 1 to"),),
    doc="integers in [low, high), each as often but for one part in 2^32 / (high - low)",
)

# -- masks -------------------------------------------------------------------------------------------------------------


def _bernoulli(p: Type, key: Type, *, stream: int) -> Type:
    _shaped(key, p.shape, floating(p).dtype)
    return p


def _below(p: Node, key: Node, stream: int) -> Node:
    wide = converted(p, p.dtype.compute)
    return lt(_unit(_bits(key, p.shape, stream), wide.dtype), wide)


bernoulli = Composite(
    "bernoulli",
    infer=_bernoulli,
    decompose=lambda p, key, *, stream: converted(_below(p, key, stream), p.dtype),
    samples=(
        Sample(("F[N]", "i64[]"), {"stream": 3}, draw=("unit", "int")),
        Sample(("F[2,3]", "i64[]"), {"stream": 4}, draw=("unit", "int")),
    ),
    bad=(
        BadSample(("i32[3]", "i64[]"), {"stream": 0}, match="no float"),
        BadSample(("f32[3]", "f32[]"), {"stream": 0}, match="not i64"),
    ),
    doc="1 with probability p, else 0; p has no gradient",
)


def _dropout(x: Type, key: Type, *, p: float = 0.5, stream: int, training: bool = True) -> Type:
    if not 0 <= p <= 1:
        raise TypeRuleError(f"p={p} is no probability")
    _shaped(key, x.shape, floating(x).dtype)
    return x


def _feature_dropout(x: Type, key: Type, *, p: float = 0.5, stream: int, training: bool = True) -> Type:
    if x.rank < 2:
        raise TypeRuleError(f"{x} has no channels: they are the second axis")
    return _dropout(x, key, p=p, stream=stream, training=training)


def _kept(x: Node, key: Node, p: float, stream: int, features: bool) -> Node:
    """Which elements, or whole channels, stay."""
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if features else x.shape
    chance = full(1 - p, Type(F32, shape))
    return spread(_below(chance, key, stream), x.shape)


def _dropped(features: bool) -> Any:
    def value(x: Node, key: Node, *, p: float, stream: int, training: bool) -> Node:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0.0  # not 0 everywhere: NaN stays, and the gradient is there
        wide = converted(x, x.dtype.compute)
        kept = where(_kept(x, key, p, stream, features), wide * (1 / (1 - p)), zeros_like(wide))
        return converted(kept, x.dtype)

    return value


_SATURATED = -1.7580993408473766
"""What selu tends to as x falls: -scale * alpha."""


def _alpha_dropped(features: bool) -> Any:
    def value(x: Node, key: Node, *, p: float, stream: int, training: bool) -> Node:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0.0  # not 0 everywhere: NaN stays, and the gradient is there
        # a x + b has the mean and variance that x had, which are those of selu: 0 and 1
        a = ((1 - p) * (1 + p * _SATURATED**2)) ** -0.5
        wide = converted(x, x.dtype.compute)
        mask = _kept(x, key, p, stream, features)
        return converted(where(mask, wide, full(_SATURATED, wide)) * a - a * p * _SATURATED, x.dtype)

    return value


_MASKED = (
    Sample(("F[N]", "i64[]"), {"stream": 1}, draw=("normal", "int")),
    Sample(("F[2,3,N]", "i64[]"), {"stream": 2, "p": 0.1}, draw=("normal", "int")),
    Sample(("F[2,3]", "i64[]"), {"stream": 2, "p": 1.0}, draw=("normal", "int")),
    Sample(("F[2,3]", "i64[]"), {"stream": 2, "training": False}, draw=("normal", "int")),
)
_BAD_MASKS = (
    BadSample(("f32[3,4]", "i64[]"), {"stream": 0, "p": 1.5}, match="no probability"),
    BadSample(("f32[3,4]", "i64[3]"), {"stream": 0}, match="not i64"),
    BadSample(("f32[3,4]", "i64[]"), {}, match="stream is missing"),
)

dropout = Composite(
    "dropout",
    infer=_dropout,
    decompose=_dropped(features=False),
    samples=_MASKED,
    bad=_BAD_MASKS,
    doc="x / (1 - p), and 0 with probability p; x itself where training is False",
    source="Srivastava et al. 2014",
)
feature_dropout = Composite(
    "feature_dropout",
    infer=_feature_dropout,
    decompose=_dropped(features=True),
    samples=_MASKED[1:],
    bad=(*_BAD_MASKS, BadSample(("f32[3]", "i64[]"), {"stream": 0}, match="no channels")),
    doc="dropout of whole channels, the second axis: dropout1d, dropout2d and dropout3d",
    source="Tompson et al. 2015",
)
alpha_dropout = Composite(
    "alpha_dropout",
    infer=_dropout,
    decompose=_alpha_dropped(features=False),
    samples=_MASKED,
    bad=_BAD_MASKS,
    doc="dropout to selu's lowest value, which keeps mean 0 and variance 1",
    source="Klambauer et al. 2017",
)
feature_alpha_dropout = Composite(
    "feature_alpha_dropout",
    infer=_feature_dropout,
    decompose=_alpha_dropped(features=True),
    samples=_MASKED[1:],
    bad=(*_BAD_MASKS, BadSample(("f32[3]", "i64[]"), {"stream": 0}, match="no channels")),
    doc="alpha_dropout of whole channels, the second axis",
    source="Klambauer et al. 2017",
)
