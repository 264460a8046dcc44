"""simplify: its rewrites by hand, where a sample or an identity does not reach them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.passes.graph.simplify import simplify

SHAPES = ("1,N,3", "N,1,3", "N,3,1", "1,N,1,3", "N,1,3,1")


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_over_axes_of_one_element(shape: str) -> None:
    """sum(x) over axes of size 1 is a reshape, and of the other axes the sum: in i64, whose sums are NumPy's."""
    rank = shape.count(",") + 1
    every = [axes for n in range(1, rank + 1) for axes in itertools.combinations(range(rank), n)]
    graph = gradc.trace(lambda x: tuple(ops.sum(x, axis=axes) for axes in every), x=f"i64[{shape}]")
    made = simplify(graph)
    summed = [node.operands[0].shape[a] for node in made.nodes if node.op is ops.sum for a in node.attrs["axis"]]
    assert summed and 1 not in summed
    x = np.random.default_rng(0).integers(-9, 9, [int(n) if n.isdigit() else 4 for n in shape.split(",")])
    found = interp.run(made, {"x": x})
    for value, axes in zip(found.values(), every, strict=True):
        assert np.array_equal(value, x.sum(axes)), axes
