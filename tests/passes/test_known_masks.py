"""A mask that a position was made with serves again as the test of that position, where the integer type keeps what it
says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from agreement import merged

import gradc
from gradc import interp, ops
from gradc.ir.node import Node

SIZE = 300


def position(x: Node, dtype: str, outside: float) -> Node:
    return ops.cast(
        ops.where((ops.ge(x, 0)) & (ops.le(x, SIZE - 1)), x, int(outside) if x.dtype.is_integer else outside), dtype
    )


def compared(cases: Mapping[str, gradc.Graph]) -> gradc.Module:
    """The cases as one module, each of arrays as if it were alone."""
    graph = merged("masks", cases.items())
    module = gradc.compile(graph, target="cpu")
    given = {}
    for case, alone in cases.items():
        rng = np.random.default_rng(0)
        types = {n: alone.input(n).type for n in alone.input_names}
        arrays = {n: rng.standard_normal(t.concrete({})).astype(t.dtype.np) for n, t in types.items()}
        arrays["x"] = rng.integers(-100, 2 * SIZE, arrays["x"].shape).astype(types["x"].dtype.np)
        if types["x"].dtype.is_float:
            arrays["x"][0, :3] = np.nan, np.inf, -0.5
        given |= {f"{case}.{n}": array for n, array in arrays.items()}
    got = module.forward.run(**given)
    for name, exact in interp.run(graph, given).items():
        np.testing.assert_array_equal(got[name], exact, err_msg=name)
    return module


@pytest.mark.parametrize("outside", [-1.0, 300.0])
def test_places_of_every_type(outside: float) -> None:
    """i8 wraps where u8 of a float ends at 0: neither is what the mask was asked of."""

    def gather(kind: str, dtype: str) -> gradc.Graph:
        return gradc.trace(
            lambda x, y: ops.gather_2d(y, *[position(x, dtype, outside)] * 2),
            x=f"{kind}[1,200]",
            y=f"f32[1,1,{SIZE},{SIZE}]",
        )

    kinds, dtypes = ("f32", "f64", "i32", "i64"), ("i8", "u8", "i16", "i32", "i64")
    cases = {f"{kind}_{dtype}": gather(kind, dtype) for kind in kinds for dtype in dtypes}
    kernels = compared(cases).forward.program.kernels
    for case in ("f32_i32", "f64_i32"):
        (kernel,) = (k for k in kernels if f"{case}.x" in k.reads)
        assert "in_bounds" not in str(kernel), case


def test_comparisons_of_places() -> None:
    """-1 as an unsigned number is no less than 0."""

    def compare(kind: str, dtype: str) -> gradc.Graph:
        return gradc.trace(lambda x: ops.ge(position(x, dtype, -1.0), 0), x=f"{kind}[1,200]")

    dtypes = ("u8", "i8", "u16", "u32", "i32", "f16")
    compared({f"{kind}_{dtype}": compare(kind, dtype) for kind in ("f32", "i32") for dtype in dtypes})
