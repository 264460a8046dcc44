"""What NumPy says of ops that torch lacks: ``NUMPY[name](*arrays, **attrs as the user wrote them)``; torch's part is in
tests/torch_oracles.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradc.ir.types import DTYPES, dtype
from gradc.ops.block_scales import NF4


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


NUMPY: dict[str, Callable[..., Any]] = {
    "check_index": lambda indices, bound, **_: indices.astype(np.int64),
    "quantize": _quantize,
    "fake_quantize": _fake_quantize,
    "right_shift": _right_shift,
    "unpack": _unpack,
    "bitcast": _bitcast,
    "nf4_codebook": lambda dtype="f32": np.asarray(NF4, DTYPES[dtype].np).astype(np.float64),
    "mx_scale": _mx_scale,
}

KINKED = frozenset(
    "abs amax amin argmax argmin bitwise_and bitwise_or bitwise_xor ceil clamp clamp_tensor copysign eq floor floordiv"
    " fmax fmin fmod frac ge gt hardshrink hardsigmoid hardswish hardtanh invert le leaky_relu lt max maximum min"
    " minimum mod ne prelu relu relu6 round rrelu sign softshrink threshold trunc".split()
)
"""Ops with kinks or jumps: the second order is not compared where torch's choice is its own."""
