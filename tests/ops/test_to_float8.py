"""to_float8 and its gradient against ml_dtypes, bit for bit, also beyond the range of a format."""

from __future__ import annotations

import inspect

import long_tests
import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.types import DTYPES

LIMITS = {"f8e4m3": 448.0, "f8e5m2": 57344.0}
EDGES = (
    0.0, 1.0, 1.03, 3.3, 7.7, 17, 19, 447, 448, 463.9, 464, 464.1, 480, 1e4, 57344, 61439, 61440, 61441, 1e30, 1e300,
    0.0136, 2.0**-9, 2.0**-10, 1.0001 * 2.0**-10, 2.0**-16, 2.0**-17, 1.0001 * 2.0**-17, 1e-12, np.inf, np.nan,
)  # fmt: skip
LINE = np.array([*EDGES, *(-np.array(EDGES))])


def converted(x: np.ndarray, dtype: str, saturate: bool) -> np.ndarray:
    """By ml_dtypes, which makes infinities, or NaN, of what is beyond the range; e8m0's magnitudes by frexp."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        if dtype == "e8m0":
            fraction, exponent = np.frexp(np.maximum(np.abs(x), np.float32(2.0**-127)).astype(np.float64))
            below = (np.abs(x) < 2.0**-126) & (exponent == -126) & (fraction > 0.5)
            whole = np.where(below | (fraction >= 0.75), exponent, exponent - 1)
            return np.where((whole < 128) & np.isfinite(x), np.exp2(whole.astype(np.float64)), np.nan)
        if saturate:
            x = np.clip(x, -LIMITS[dtype], LIMITS[dtype])
        return x.astype(DTYPES[dtype].np).astype(np.float64)


SOURCES = ("f64", "f32", "f16", "bf16")
FORMATS = (*((dtype, saturate) for dtype in LIMITS for saturate in (True, False)), ("e8m0", True))
PAIRS = tuple((source, *format) for source in SOURCES for format in FORMATS)


@long_tests.values
@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
def test_values_and_cotangents_are_converted(target: str) -> None:
    def there_and_back(**inputs: gradc.ops.Node) -> tuple[gradc.ops.Node, ...]:
        return tuple(
            ops.cast(ops.to_float8(inputs[f"x{k}"], dtype=dtype, saturate=saturate), dtype="f64")
            for k, (_, dtype, saturate) in enumerate(PAIRS)
        )

    there_and_back.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"x{k}", inspect.Parameter.KEYWORD_ONLY) for k in range(len(PAIRS))]
    )
    graph = gradc.trace(there_and_back, **{f"x{k}": f"{source}[N]" for k, (source, *_) in enumerate(PAIRS)})
    module = gradc.compile(graph, wrt=graph.input_names, target=target, numerics="strict")
    with np.errstate(all="ignore"):
        arrays = {f"x{k}": LINE.astype(DTYPES[source].np) for k, (source, *_) in enumerate(PAIRS)}
    values, residuals = module.forward(arrays)
    found = module.backward(residuals, *(LINE for _ in PAIRS))
    for value, (name, x), (source, dtype, saturate) in zip(values.values(), arrays.items(), PAIRS, strict=True):
        what, got = f"{source} {dtype} {saturate}", found[name]
        np.testing.assert_array_equal(value, converted(x, dtype, saturate), err_msg=what)
        assert got.dtype == x.dtype
        with np.errstate(all="ignore"):
            wanted = converted(LINE, dtype, saturate).astype(x.dtype).astype(np.float64)
        np.testing.assert_array_equal(got.astype(np.float64), wanted, err_msg=what)


def test_the_gradient_is_rounded_again_in_the_second_order() -> None:
    def cube(x: gradc.ops.Node) -> gradc.ops.Node:
        wide = ops.cast(ops.to_float8(x, dtype="f8e4m3"), dtype="f32")
        return ops.sum(wide * wide * wide)

    graph = gradc.trace(cube, x="f32[N]")
    first = gradc.differentiate(graph, ["x"])
    twice = gradc.differentiate(first.with_outputs([("dx", first.output("d.x"))]), ["x"])
    x, weight = np.linspace(0.3, 3.7, 11, dtype=np.float32), np.linspace(-1, 2, 11, dtype=np.float32)
    found = gradc.interp.run(twice, {"x": x, "d.y": np.float32(1), "d.dx": weight})["d.x"]

    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    # d/dx of round(3 x^2) is 6 x of the rounded x, where both cotangents are rounded
    np.testing.assert_array_equal(found, rounded(6 * rounded(x) * rounded(weight)))
