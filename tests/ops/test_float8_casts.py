"""Casts to floats of 8 bits and back: every bit, on every target.

The oracle is a table of the format's values, as ml_dtypes reads its bytes: the nearest is found among exact midpoints.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.ir.types import DTYPES

FORMATS = ("f8e4m3", "f8e5m2")
SOURCES = ("f16", "bf16", "f32", "f64")
TARGETS = (("numpy", "0"), ("cpu", "0"), ("cpu", "2"), ("cuda-sim", "0"))
BYTES = np.arange(256, dtype=np.uint8)
Array = np.ndarray[Any, Any]


def magnitudes(format: str) -> Array:
    """The finite values that are not negative, by their bytes."""
    values = BYTES[:128].view(DTYPES[format].np).astype(np.float64)
    return values[np.isfinite(values)]


def midpoints(format: str) -> Array:
    """Between neighbours, and between the largest value and what would come next: exact in f64."""
    values = magnitudes(format)
    values = np.append(values, 2 * values[-1] - values[-2])
    return (values[1:] + values[:-1]) / 2


def numbers(source: str, format: str) -> Array:
    """Every number of 16 bits; of more bits values and midpoints with their neighbours, and the ends of the range."""
    dtype = np.dtype(DTYPES[source].np).type
    if source in ("f16", "bf16"):
        return np.arange(65536, dtype=np.uint16).view(dtype)
    info = np.finfo(dtype)
    near = np.concatenate([magnitudes(format), midpoints(format)]).astype(dtype)
    near = np.concatenate([near, np.nextafter(near, dtype(0)), np.nextafter(near, dtype(np.inf))])
    ends = [info.max, info.tiny, info.smallest_subnormal, np.inf, np.nan, 1e5, 1e30]
    patterns = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    positive = np.concatenate([near, np.array(ends, dtype), np.abs(patterns).astype(dtype)])
    return np.concatenate([positive, -positive])


def nearest(x: Array, format: str) -> Array:
    """The bytes of gradc's cast: nearest, of two the even one; what is finite saturates; a NaN is 0x7f."""
    wide = x.astype(np.float64)
    middle, most = midpoints(format), len(magnitudes(format)) - 1
    below = np.searchsorted(middle, np.abs(wide), side="left")
    tie = (below < len(middle)) & (middle[np.minimum(below, most)] == np.abs(wide))
    found = np.minimum(below + (tie & (below % 2 == 1)), most)
    of_infinity = BYTES[:128][np.isposinf(BYTES[:128].view(DTYPES[format].np).astype(np.float64))]
    found = np.where(np.isinf(wide), of_infinity[0] if len(of_infinity) else 0x7F, found)
    found = found | (np.signbit(wide) << 7)
    return without_sign_of_nan(found.astype(np.uint8), format)


def without_sign_of_nan(found: Array, format: str) -> Array:
    return np.where(np.isnan(found.view(DTYPES[format].np).astype(np.float64)), 0x7F, found).astype(np.uint8)


@pytest.mark.parametrize(("target", "level"), TARGETS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cast_to_8_bits_rounds_once(format: str, target: str, level: str) -> None:
    given = {source: numbers(source, format) for source in SOURCES}
    types = {source: f"{source}[{x.size}]" for source, x in given.items()}
    graph = gradc.trace(lambda **inputs: {f"from_{n}": ops.cast(x, format) for n, x in inputs.items()}, **types)
    with knobs.OPTIMIZE.set(level):
        found = gradc.compile(graph, target=target)(**given)
    for source, x in given.items():
        got = without_sign_of_nan(np.asarray(found[f"from_{source}"]).view(np.uint8), format)
        want = np.where(np.isnan(x.astype(np.float64)), 0x7F, nearest(x, format))
        wrong = np.flatnonzero(got != want)
        assert not wrong.size, (source, x[wrong[:5]], got[wrong[:5]], want[wrong[:5]])


@pytest.mark.parametrize(("target", "level"), TARGETS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_cast_from_8_bits_is_exact(format: str, target: str, level: str) -> None:
    x = BYTES.view(DTYPES[format].np)
    others = [*SOURCES, *FORMATS]
    graph = gradc.trace(lambda x: {f"as_{n}": ops.cast(x, n) for n in others}, x=f"{format}[256]")
    with knobs.OPTIMIZE.set(level):
        found = gradc.compile(graph, target=target)(x=x)
    wide = x.astype(np.float64)
    for name in SOURCES:
        got, number = np.asarray(found[f"as_{name}"]).astype(np.float64), ~np.isnan(wide)
        np.testing.assert_array_equal(got, np.asarray(x.astype(DTYPES[name].np)).astype(np.float64))
        assert np.array_equal(np.signbit(got)[number], np.signbit(wide)[number])
    for name in FORMATS:
        got = without_sign_of_nan(np.asarray(found[f"as_{name}"]).view(np.uint8), name)
        np.testing.assert_array_equal(got, np.where(np.isnan(wide), 0x7F, nearest(x, name)))
