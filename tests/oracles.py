"""What NumPy says of ops that torch lacks: ``NUMPY[name](*arrays, **attrs as the user wrote them)``; torch's part is in
tests/torch_oracles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradc.ir.types import DTYPES, dtype
from gradc.ops.quantized.block_scales import NF4


def _over_blocks(parameter: Any, shape: Any, block: Any) -> Any:
    """A parameter repeated over its blocks."""
    for axis, (n, b) in enumerate(
        zip(shape, block or shape, strict=True) if parameter is not None and parameter.ndim else ()
    ):
        parameter = np.take(parameter, np.arange(n) // max(min(b, n), 1), axis)
    return parameter


def _nearest(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """The nearest value of a short float to each number, of two equally near the one with the even code."""
    codes = np.arange(2 ** (DTYPES[name].bits - 1), dtype=np.uint8).view(DTYPES[name].np).astype(np.float64)
    values = codes[np.isfinite(codes)]

    def nearest(x: np.ndarray) -> np.ndarray:
        apart = np.abs(np.abs(x)[..., None] - values)
        best = apart == apart.min(-1, keepdims=True)
        return np.copysign(values[np.where(best, 1 + np.arange(values.size) % 2, 3).argmin(-1)], x)

    return nearest


NEAREST = {name: _nearest(name) for name in ("f8e4m3", "f8e5m2", "f4e2m1")}


def _quantize(
    x: Any,
    scale: Any,
    zero: Any = None,
    block: Any = None,
    dtype: str = "i8",
    quant_min: Any = None,
    quant_max: Any = None,
    **_: Any,
) -> np.ndarray:
    if dtype in NEAREST:
        return NEAREST[dtype](x / _over_blocks(scale.astype(np.float64), x.shape, block))
    low, high = DTYPES[dtype].range
    low, high = low if quant_min is None else quant_min, high if quant_max is None else quant_max
    q = np.rint(x / _over_blocks(scale, x.shape, block))
    if zero is not None:
        q = q + _over_blocks(_zero_point(zero, low, high), x.shape, block)
    return np.clip(q, low, high).astype(np.int64)


def _zero_point(zero: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(zero), low, high) if zero.dtype.kind == "f" else zero.astype(np.float64)


def _fake_quantize(
    x: Any,
    scale: Any,
    zero: Any = None,
    block: Any = None,
    dtype: str = "i8",
    grad_factor: float = 1.0,
    quant_min: Any = None,
    quant_max: Any = None,
) -> np.ndarray:
    q = _quantize(x, scale, zero, block, dtype, quant_min, quant_max)
    if dtype in NEAREST:
        return q * _over_blocks(scale.astype(np.float64), x.shape, block)
    low, high = DTYPES[dtype].range
    whole = (
        0
        if zero is None
        else _over_blocks(
            _zero_point(zero, low if quant_min is None else quant_min, high if quant_max is None else quant_max),
            x.shape,
            block,
        )
    )
    return (q - whole) * _over_blocks(scale, x.shape, block)


def _mx_scale(x: np.ndarray, dtype: str, block: Any = None) -> np.ndarray:
    """By definition, from the binary exponents."""
    most = np.asarray(np.abs(x), np.float64)
    for axis, (n, b) in enumerate(zip(x.shape, block or x.shape, strict=True)):
        whole = block is None or (b >= n > 0 and b > 1)
        most = (
            np.maximum.reduceat(most, np.arange(0, n, n if whole else b), axis)
            if n
            else np.zeros_like(most, shape=(*most.shape[:axis], int(whole), *most.shape[axis + 1 :]))
        )
    exponent = np.frexp(most)[1] - 1 - {"f4e2m1": 2, "f8e4m3": 8, "f8e5m2": 15}[dtype]
    return np.exp2(np.where(most == 0, -127, np.clip(exponent, -127, 127)).astype(np.float64))


def _right_shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By definition, in Python's integers; everything is shifted out by the width or a negative number."""
    bits = dtype(a.dtype).bits
    return np.vectorize(lambda x, n: int(x) // 2 ** (int(n) if 0 <= n < bits else bits), otypes=[np.int64])(
        a, np.broadcast_to(b, a.shape)
    )


def _left_shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By definition, in Python's integers, of which the dtype keeps its bits."""
    bits, signed = dtype(a.dtype).bits, a.dtype.kind == "i"

    def shifted(x: Any, n: Any) -> int:
        low = (int(x) << int(n)) % 2**bits if 0 <= n < bits else 0
        return low - 2**bits if signed and low >= 2 ** (bits - 1) else low

    return np.vectorize(shifted, otypes=[np.int64])(a, np.broadcast_to(b, a.shape))


def _coded(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes as numbers, by each format's definition."""
    bits = DTYPES[name].bits
    if name == "f4e2m1":
        return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[codes]
    return np.where((codes >= 2 ** (bits - 1)) & (name[0] == "i"), codes.astype(np.int64) - 2**bits, codes)


def _unpack(packed: np.ndarray, dtype: str, axis: int = -1, low_nibble_first: bool = True) -> np.ndarray:
    bits = DTYPES[dtype].bits
    order = range(0, 8, bits) if low_nibble_first else range(8 - bits, -1, -bits)
    rows = np.moveaxis(packed, axis, -1)
    codes = (
        [np.stack([(rows[..., k] // 2**at) % 2**bits for k in range(rows.shape[-1]) for at in order], -1)]
        if rows.shape[-1]
        else [rows]
    )
    return _coded(np.moveaxis(codes[0], -1, axis).astype(np.int64), dtype)


def _bitcast(x: np.ndarray, to: str) -> np.ndarray:
    wide = {"f4e2m1": 4, "i4": 4, "u2": 2}.get(to)
    if wide:
        return _coded(x % 2**wide, to)
    if to == "e8m0":
        return np.where(x == 255, np.nan, np.exp2(x.astype(np.float64) - 127))
    return x.view(DTYPES[to].np).astype(np.float64)


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds, in Python's integers, as Salmon et al. (2011) write them."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def _philox(index: Any, stream: Any, key: Any) -> np.ndarray:
    """The 64 bits at each place, as i64."""

    def one(i: int, s: int, k: int) -> int:
        i, s, k = (int(v) % 2**64 for v in (i, s, k))
        words = philox4x32([i // 2 % 2**32, i // 2**33, s % 2**32, s >> 32], [k % 2**32, k >> 32])
        low, high = words[2:] if i % 2 else words[:2]
        return low + 2**32 * high - (2**64 if high >= 2**31 else 0)

    return np.vectorize(one, otypes=[np.int64])(index, stream, key)


def _draws(key: Any, shape: Any, stream: int, first: int = 0) -> np.ndarray:
    places = first + np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    return _philox(places, stream, key).view(np.uint64) if places.size else places.astype(np.uint64)


def _rand(key: Any, shape: Any, stream: int, dtype: Any = "f32", first: int = 0) -> np.ndarray:
    digits = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}[str(dtype)]
    return (_draws(key, shape, stream, first) >> np.uint64(64 - digits)).astype(np.float64) / 2.0**digits


def _randn(key: Any, shape: Any, stream: int, dtype: Any = "f32") -> np.ndarray:
    bits = _draws(key, shape, stream)
    if str(dtype) == "f64":
        count = int(np.prod(shape, dtype=np.int64))
        ahead, around = _rand(key, shape, stream, "f64") + 2.0**-53, _rand(key, shape, stream, "f64", count)
    else:
        ahead = ((bits >> np.uint64(32)).astype(np.float64) + 1) / 2.0**32
        around = (bits & np.uint64(2**24 - 1)).astype(np.float64) / 2.0**24
    return np.sqrt(-2 * np.log(ahead)) * np.cos(2 * np.pi * around)


def _mask(x: np.ndarray, key: Any, p: float, stream: int, features: bool) -> np.ndarray:
    shape = x.shape[:2] + (1,) * (x.ndim - 2) if features else x.shape
    return np.broadcast_to(_rand(key, shape, stream) < np.float32(1 - p), x.shape)


def _dropout(features: bool) -> Callable[..., np.ndarray]:
    def dropped(x: Any, key: Any, p: float = 0.5, stream: int = 0, training: bool = True) -> np.ndarray:
        if not training:
            return x
        return x * 0 if p == 1 else np.where(_mask(x, key, p, stream, features), x / (1 - p), 0)

    return dropped


def _alpha_dropout(features: bool) -> Callable[..., np.ndarray]:
    def dropped(x: Any, key: Any, p: float = 0.5, stream: int = 0, training: bool = True) -> np.ndarray:
        if not training or p == 1:
            return x * training * (p != 1) if training else x
        low = -1.7580993408473766
        a = ((1 - p) * (1 + p * low**2)) ** -0.5
        return a * np.where(_mask(x, key, p, stream, features), x, low) - a * low * p

    return dropped


def _bernoulli(p: np.ndarray, key: Any, stream: int) -> np.ndarray:
    return (_rand(key, p.shape, stream, "f64" if p.dtype == np.float64 else "f32") < p).astype(np.float64)


def _sort_key(x: Any) -> Any:
    """The place of a float among all of its dtype, by counting how many steps of one unit lie between it and 0."""
    wide = np.asarray(x, np.float64 if np.asarray(x).dtype == np.float64 else np.float32)
    size = wide.dtype.itemsize
    places = np.abs(wide).view(f"u{size}").astype(object)
    key = np.where(wide < 0, -places - 1, places)
    return np.where(np.isnan(wide), 2 ** (8 * size - 1) - 1, np.where(wide == 0, 0, key)).astype(f"i{size}")


NUMPY: dict[str, Callable[..., Any]] = {
    "check_index": lambda indices, bound, **_: indices.astype(np.int64),
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "right_shift": _right_shift,
    "left_shift": _left_shift,
    "unpack": _unpack,
    "bitcast": _bitcast,
    "nf4_codebook": lambda dtype="f32": np.asarray(NF4, DTYPES[dtype].np).astype(np.float64),
    "mx_scale": _mx_scale,
    "philox": _philox,
    "sort_key": _sort_key,
    "random_bits": lambda key, shape, stream: _draws(key, shape, stream).view(np.int64),
    "rand": _rand,
    "randn": _randn,
    "randint": lambda key, low, high, shape, stream: (
        low + (_draws(key, shape, stream) >> np.uint64(32)).astype(np.int64) * (high - low) // 2**32
    ),
    "bernoulli": _bernoulli,
    "dropout": _dropout(False),
    "feature_dropout": _dropout(True),
    "alpha_dropout": _alpha_dropout(False),
    "feature_alpha_dropout": _alpha_dropout(True),
}

KINKED = frozenset(
    "abs amax amin argmax argmin bitwise_and bitwise_or bitwise_xor ceil clamp clamp_tensor copysign eq floor floordiv"
    " fmax fmin fmod frac ge gt hardshrink hardsigmoid hardswish hardtanh invert le leaky_relu lt max maximum min"
    " minimum mod ne prelu relu relu6 round rrelu sign softshrink threshold trunc".split()
)
"""Ops with kinks or jumps: the second order is not compared where torch's choice is its own."""
