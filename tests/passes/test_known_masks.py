"""A mask that a position was made with serves again as the test of that position, where the integer type keeps what it
says.
"""

from __future__ import annotations

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.node import Node

SIZE = 300


def position(x: Node, dtype: str, outside: float) -> Node:
    return ops.cast(
        ops.where((ops.ge(x, 0)) & (ops.le(x, SIZE - 1)), x, int(outside) if x.dtype.is_integer else outside), dtype
    )


def compared(graph: gradc.Graph, kind: str) -> gradc.Module:
    module = gradc.compile(graph, target="cpu")
    rng = np.random.default_rng(0)
    given = {
        n: rng.standard_normal(graph.input(n).type.concrete({})).astype(graph.input(n).dtype.np)
        for n in graph.input_names
    }
    given["x"] = rng.integers(-100, 2 * SIZE, given["x"].shape).astype(kind)
    if kind[0] == "f":
        given["x"][0, :3] = np.nan, np.inf, -0.5
    for name, exact in interp.run(graph, given).items():
        np.testing.assert_array_equal(module.forward.run(**given)[name], exact)
    return module


@pytest.mark.parametrize("outside", [-1.0, 300.0])
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "i64"])
@pytest.mark.parametrize(
    ("kind", "array"), [("f32", "float32"), ("f64", "float64"), ("i32", "int32"), ("i64", "int64")]
)
def test_places_of_every_type(kind: str, array: str, dtype: str, outside: float) -> None:
    """i8 wraps where u8 of a float ends at 0: neither is what the mask was asked of."""
    gather = gradc.trace(
        lambda x, y: ops.gather_2d(y, *[position(x, dtype, outside)] * 2),
        x=f"{kind}[1,200]",
        y=f"f32[1,1,{SIZE},{SIZE}]",
    )
    compared(gather, array)
    if dtype == "i32" and kind[0] == "f":
        assert "in_bounds" not in str(compared(gather, array).forward.program)


@pytest.mark.parametrize("dtype", ["u8", "i8", "u16", "u32", "i32", "f16"])
@pytest.mark.parametrize(("kind", "array"), [("f32", "float32"), ("i32", "int32")])
def test_comparisons_of_places(kind: str, array: str, dtype: str) -> None:
    """-1 as an unsigned number is no less than 0."""
    compared(gradc.trace(lambda x: ops.ge(position(x, dtype, -1.0), 0), x=f"{kind}[1,200]"), array)
