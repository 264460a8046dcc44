"""Bytes that hold fewer than eight bits, the others being anything: read by their low bits, written with zeros above;
any byte but 0 is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.types import DTYPES

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
MEANING = {
    "bool": BYTES != 0,
    "u2": BYTES % 4,
    "u4": BYTES % 16,
    "i2": (BYTES.astype(np.int64) + 2) % 4 - 2,
    "i4": (BYTES.astype(np.int64) + 8) % 16 - 8,
    "f4e2m1": np.array(E2M1)[BYTES % 16],
    "e8m0": np.where(BYTES == 255, np.nan, np.exp2(BYTES.astype(np.float64) - 127)),
}
"""By each format's definition."""
every_type = pytest.mark.parametrize("dtype", MEANING)
every_target = pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])


def results(function: Callable[..., Any], dtype: str, target: str) -> dict[str, np.ndarray[Any, Any]]:
    module = gradc.compile(gradc.trace(function, x=f"{dtype}[N]"), target=target)
    return {k: np.asarray(v) for k, v in module.forward.run(x=BYTES.view(DTYPES[dtype].np)).items()}


@every_target
@every_type
def test_values_and_copies(dtype: str, target: str) -> None:
    """What is moved comes out as the same bytes from every target: those of ml_dtypes' own conversion of the value."""
    found = results(
        lambda x: {
            "value": ops.cast(x, "f64"),
            "itself": x,
            "reshape": ops.reshape(x, (x.shape[0], 1)),
            "gather": ops.gather(x, ops.iota(shape=(x.shape[0],))),
            "where": ops.where(ops.ge(ops.iota(shape=(x.shape[0],)), 7), x, x),
            "flip": ops.flip(ops.concat([x, x])),
        },
        dtype,
        target,
    )
    np.testing.assert_array_equal(found.pop("value"), MEANING[dtype].astype(np.float64))
    want = BYTES != 0 if dtype == "bool" else BYTES & (2 ** DTYPES[dtype].bits - 1)
    for name, got in found.items():
        np.testing.assert_array_equal(
            got.reshape(-1).view(np.uint8), np.tile(want, 2)[::-1] if name == "flip" else want, name
        )


@every_target
@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_places(dtype: str, target: str) -> None:
    places = 2 ** DTYPES[dtype].bits
    found = results(
        lambda x: {
            "read": ops.gather(ops.iota(shape=(places,)), x),
            "added": ops.scatter_add(x, ops.cast(ops.iota(shape=(x.shape[0],)), "f64"), size=places),
        },
        dtype,
        target,
    )
    np.testing.assert_array_equal(found["read"], MEANING[dtype])
    np.testing.assert_array_equal(found["added"], np.bincount(MEANING[dtype], weights=BYTES))


@every_target
def test_masks(target: str) -> None:
    """Logic on bytes that are neither 0 nor 1."""
    true, back = MEANING["bool"], MEANING["bool"][::-1]
    found = results(
        lambda x: {
            "and": x & ops.flip(x),
            "xor": x ^ ops.flip(x),
            "eq": ops.eq(x, ops.flip(x)),
            "not": ~x,
            "sum": ops.sum(x),
        },
        "bool",
        target,
    )
    for name, want in {"and": true & back, "xor": true ^ back, "eq": true == back, "not": ~true, "sum": 255}.items():
        np.testing.assert_array_equal(found[name], want, name)
