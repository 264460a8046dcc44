"""Floats of places on axes: by way of i32 where it holds them, for AVX2 has no vectors of the direct conversion."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.node import call
from gradc.ir.types import DTYPES

pytestmark = pytest.mark.optimised

FLOATS = {
    "columns": ("f32[7,100]", (7, 100), 0, "f32", True),
    "doubles": ("f64[7,100]", (7, 100), 0, "f64", True),
    "joined columns": ("f32[7,9,28]", (7, 9, 28), 0, "f32", True),
    "up to the largest": ("f32[7,100]", (7, 100), 2**31 - 100, "f32", True),
    "past the largest": ("f32[7,100]", (7, 100), 2**31 - 99, "f32", False),
    "a size that is not known": ("f32[7,N]", (7, 100), 0, "f32", False),
}


@pytest.mark.parametrize("what", FLOATS)
def test_by_way_of_i32(what: str) -> None:
    kind, shape, first, dtype, narrow = FLOATS[what]

    def function(x: gradc.Node) -> gradc.Node:
        place = call("iota", shape=x.shape, axis=len(x.shape) - 1, dtype=DTYPES["i64"])
        return x * ops.cast(place + first, dtype)

    module = gradc.compile(gradc.trace(function, x=kind), target="cpu")
    (kernel,) = module.kernels.values()
    conversions = re.findall(rf"\({dtype}\)(\(i32\))?v\d+;", kernel.source)
    assert [bool(via) for via in conversions] == [narrow]
    x = np.random.default_rng(0).standard_normal(shape).astype(DTYPES[dtype].np)
    np.testing.assert_array_equal(module(x=x), x * (first + np.arange(shape[-1])).astype(x.dtype))


def test_elements_are_converted_whole() -> None:
    """Of what an array holds nothing is known."""
    module = gradc.compile(gradc.trace(lambda i: ops.cast(i, "f32"), i="i64[5]"), target="cpu")
    i = np.int64([2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 7])
    np.testing.assert_array_equal(module(i=i), i.astype(np.float32))
