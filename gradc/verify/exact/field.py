"""Arithmetic modulo the prime p = 2^61 - 1 on arrays of uint64."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
U = np.uint64
P = (1 << 61) - 1


def reduced(x: Array) -> Array:
    """x mod p, for any uint64."""
    x = (x & U(P)) + (x >> U(61))
    return np.where(x >= U(P), x - U(P), x)


def multiply(a: Array, b: Array) -> Array:
    """a * b mod p, from 31-bit halves, with 2^61 = 1 and 2^62 = 2 (mod p)."""
    low = U((1 << 31) - 1)
    a1, a0, b1, b0 = a >> U(31), a & low, b >> U(31), b & low
    middle = a1 * b0 + a0 * b1
    return reduced(U(2) * a1 * b1 + (middle >> U(30)) + ((middle & U((1 << 30) - 1)) << U(31)) + reduced(a0 * b0))


def negative(a: Array) -> Array:
    return np.where(a == 0, a, U(P) - a)


def shifted(a: Array, places: Any) -> Array:
    """a * 2^places mod p: a rotation of the 61-bit number."""
    places = np.asarray(np.asarray(places) % 61).astype(U)
    return reduced(((a << places) & U(P)) | (a >> (U(61) - places)))


def inverse(a: Array) -> Array:
    """The inverse mod p, a^(p-2) (Fermat); 0 gives 0."""
    power, done = a, 1  # power = a^(2^done - 1); done is doubled up to 59
    for bit in bin(59)[3:]:
        squared = power
        for _ in range(done):
            squared = multiply(squared, squared)
        power, done = multiply(squared, power), done * 2
        if bit == "1":
            power, done = multiply(multiply(power, power), a), done + 1
    power = multiply(power, power)
    return multiply(multiply(power, power), a)


def total(a: Array, axes: tuple[int, ...]) -> Array:
    """The sum over axes mod p."""
    low, high = a & U(0xFFFFFFFF), a >> U(32)
    return joined(low.sum(axes, dtype=U), high.sum(axes, dtype=U))


def joined(low: Array, high: Array) -> Array:
    """low + 2^32 high mod p."""
    return reduced(reduced(low) + shifted(reduced(high), 32))


def product(a: Array, axes: tuple[int, ...]) -> Array:
    """The product over axes mod p."""
    a = last(a, axes)
    while a.shape[-1] > 1:
        if a.shape[-1] % 2:
            a = np.concatenate([a, np.ones_like(a[..., :1])], -1)
        a = multiply(a[..., ::2], a[..., 1::2])
    return a[..., 0] if a.shape[-1] else np.ones(a.shape[:-1], U)


def matmul(a: Array, b: Array) -> Array:
    """a @ b mod p, from 21-bit limbs, whose products are summed exactly in f64."""
    mask, limb, answer = U((1 << 21) - 1), (0, 21, 42), np.zeros((*a.shape[:-1], b.shape[-1]), U)
    for start in range(0, a.shape[-1], 1024):
        part, other = a[..., start : start + 1024], b[..., start : start + 1024, :]
        for i, j in itertools.product(limb, limb):
            digits = (((part >> U(i)) & mask).astype(np.float64), ((other >> U(j)) & mask).astype(np.float64))
            answer = reduced(answer + shifted(reduced(np.matmul(*digits).astype(U)), i + j))
    return answer


def mixed(*parts: Any) -> Array:
    """A hash of the parts as a residue (splitmix64)."""
    state: Array = np.zeros((), U)
    for part in parts:
        x = np.asarray(zlib.crc32(part.encode()) if isinstance(part, str) else part).astype(U)
        state = (state ^ x) + U(0x9E3779B97F4A7C15)
        state = (state ^ (state >> U(30))) * U(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> U(27))) * U(0x94D049BB133111EB)
        state = state ^ (state >> U(31))
    return reduced(state)


def last(a: Array, axes: tuple[int, ...]) -> Array:
    """The array with ``axes`` flattened into one last axis."""
    kept = [i for i in range(a.ndim) if i not in axes]
    moved = np.transpose(a, (*kept, *axes))
    return moved.reshape(*(a.shape[i] for i in kept), math.prod(a.shape[i] for i in axes))
