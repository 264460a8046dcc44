"""simplify: its rewrites by hand, where a sample or an identity does not reach them."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.types import DTYPES
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


POWERS = (0, 1, 2, 3, -1)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "i32", "u8"])
def test_powers_by_small_integers_are_products(dtype: str) -> None:
    """Of a float within one rounding of each product; of integers as NumPy wraps them; of -1 and -0, NaN and infinity,
    and where the power overflows, is subnormal or 0.
    """
    kind = DTYPES[dtype]
    exponents = [n for n in POWERS if n >= 0 or kind.is_float]
    graph = gradc.trace(lambda x: tuple(x**n for n in exponents), x=f"{dtype}[N]")
    assert not any(node.op is ops.pow for node in simplify(graph).nodes)
    assert any(node.op is ops.pow for node in simplify(graph, numerics="strict").nodes)
    rng = np.random.default_rng(0)
    if not kind.is_float:
        x = np.arange(0 if kind.kind == "u" else -400, 401 if kind.kind == "i" else 256).astype(kind.np)
    else:
        # of both signs, from the smallest to the largest, where also the cube overflows and underflows
        largest = np.float64(ml_dtypes.finfo(kind.np).max)
        x = np.exp2(rng.uniform(-1080 if dtype == "f64" else -150, np.log2(largest), 1500)) * rng.choice([-1, 1], 1500)
        x = np.concatenate([x, rng.standard_normal(500), [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1]]).astype(kind.np)
    found = gradc.compile(graph, target="cpu").forward.run(x=x)
    with np.errstate(all="ignore"):
        for n, value in zip(exponents, found.values(), strict=True):
            if not kind.is_float:
                np.testing.assert_array_equal(value, x ** np.array(n, x.dtype))
                continue
            exact = x.astype(np.longdouble) ** np.longdouble(n)  # 64 bits of a product, and more range than f64
            wanted = exact.astype(kind.np) if dtype in ("f32", "f64") else exact.astype(np.float32).astype(kind.np)
            ulps = 1 if n == 3 else 0
            near = (value == wanted) | (np.isnan(value) & np.isnan(wanted))
            for side in (-np.inf, np.inf) if ulps else ():
                near |= value == np.nextafter(wanted, kind.np.type(side))
            assert near.all(), (n, x[~near][:5], value[~near][:5], wanted[~near][:5])
            assert np.array_equal(np.signbit(value)[value == 0], np.signbit(wanted)[value == 0])


def test_powers_of_what_is_wider_and_their_gradients() -> None:
    """The exponent may have more axes than the base; second gradients are of products, too."""

    def graph(x: gradc.Node, e: float) -> gradc.Node:
        return x ** ops.broadcast_to(ops.constant(value=(e,), dtype=DTYPES["f64"], shape=()), (3, *x.shape))

    x = np.array([-2.0, 0.0, 0.5, 3.0])
    for e in (0.0, 1.0, 2.0, 3.0):
        made = gradc.trace(lambda x, e=e: graph(x, e), x="f64[4]")
        module = gradc.compile(made, wrt=["x"], target="numpy")
        values, rest = module.forward(x=x)
        np.testing.assert_array_equal(values, np.broadcast_to(x**e, (3, 4)))
        (slope,) = module.backward(rest, np.ones((3, 4))).values()
        np.testing.assert_allclose(slope, 3 * (e * x ** max(e - 1, 0)), rtol=1e-15)
