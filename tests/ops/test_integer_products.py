"""Products of 8-bit integers, against NumPy's own in i32: exact, modulo 2^32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.ir.kernel import Call
from gradc.passes.graph.simplify import simplify


def drawn(*shape: int, dtype: str = "i1", seed: int = 0) -> Any:
    """Integers of the whole range."""
    ends = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(ends.min, ends.max + 1, shape).astype(dtype)


def product(a: Any, b: Any) -> Any:
    return np.matmul(a.astype("i4"), b.astype("i4"))


def calls_of(module: Any) -> list[str]:
    return [step.op for step in module.forward.program.steps if isinstance(step, Call)]


def forms(a: Any, b: Any, w: Any, c: Any) -> dict[str, Any]:
    """Batches, transposes, windows, every second row, an operand that a batch shares, a vector, nothing at all."""
    return {
        "plain": a @ b,
        "layer": a @ w.T,
        "turned": b.T @ a.T,
        "window": a[1:, 3:20] @ b[3:20, 1:],
        "apart": a[::2, ::3] @ b[::3, ::2],
        "batch": c @ b,
        "both": c @ c.transpose(0, 2, 1),
        "row": a[:1] @ w.T,
        "column": a @ b[:, :1],
        "vector": a @ b[:, 0],
        "nothing": a[:, :0] @ b[:0],
    }


class Traced:
    """A node that multiplies by ``integer_matmul``."""

    def __init__(self, node: Any):
        self.node = node

    def __matmul__(self, other: Traced) -> Any:
        return ops.integer_matmul(self.node, other.node)

    def __getitem__(self, key: Any) -> Traced:
        return Traced(self.node[key])

    @property
    def T(self) -> Traced:
        return Traced(self.node.T)

    def transpose(self, *axes: int) -> Traced:
        return Traced(self.node.transpose(*axes))


class Wide(np.ndarray):
    """An array of 8 bits that multiplies in i32."""

    def __matmul__(self, other: Any) -> Any:
        return product(np.asarray(self), np.asarray(other))


@pytest.mark.parametrize("left,right", [("i8", "i8"), ("u8", "i8"), ("i8", "u8"), ("u8", "u8")])
def test_products_of_any_form_are_numpys(left: str, right: str) -> None:
    def traced(a: Any, b: Any, w: Any, c: Any) -> Any:
        return forms(*map(Traced, (a, b, w, c)))

    types = {"a": f"{left}[M,K]", "b": f"{right}[K,N]", "w": f"{right}[N,K]", "c": f"{left}[2,M,K]"}
    module = gradc.compile(gradc.trace(traced, **types), target="cpu")
    kinds = {"i8": "i1", "u8": "u1"}
    for m, k, n in ((5, 23, 7), (53, 131, 67), (60, 41, 300), (64, 2100, 33)):
        sizes = {"M": m, "K": k, "N": n}
        shapes = {"a": (m, k), "b": (k, n), "w": (n, k), "c": (2, m, k)}
        arrays = {x: drawn(*shapes[x], dtype=kinds[types[x][:2]], seed=i) for i, x in enumerate(shapes)}
        wanted = forms(*(array.view(Wide) for array in arrays.values()))
        for name, found in module(**arrays).items():
            np.testing.assert_array_equal(found, wanted[name], err_msg=f"{name} {sizes}")


@pytest.mark.parametrize("target", ["cpu", "numpy", "cuda-sim"])
@pytest.mark.parametrize("k", [258, 259, 40000])
def test_sums_wrap_around_as_in_numpy(k: int, target: str) -> None:
    """Also where the product is made of floats: f32 holds every sum of 258 products of bytes, and not of 259; of 40,000
    i32 does not.
    """
    a, b = np.full((2, k), 255, "u1"), np.full((k, 3), 255, "u1")
    wanted = product(a, b)
    assert (wanted == np.float32(255 * 255 * k)).all() == (k == 258) and (wanted < 0).all() == (k == 40000)
    for inner in ("K", k):
        graph = gradc.trace(lambda a, b: ops.integer_matmul(a, b), a=f"u8[2,{inner}]", b=f"u8[{inner},3]")
        np.testing.assert_array_equal(gradc.compile(graph, target=target)(a=a, b=b), wanted)


@pytest.mark.parametrize("k", [300, 1300])
def test_dynamically_quantized_rows_times_int8_weights_are_a_product_of_integers(k: int) -> None:
    """Scales of rows of both are factors of the sum, which is exact before it is rounded; scales learn."""

    def layer(x: Any, codes: Any, scale: Any) -> Any:
        step = ops.dynamic_scale(x, dtype="i8", block=(1, k))
        rows = ops.dequantize(ops.quantize(x, step, block=(1, k), dtype="i8"), step, block=(1, k))
        return ops.linear(rows, ops.dequantize(codes, scale, block=(1, k)))

    random = np.random.default_rng(0)
    graph = gradc.trace(layer, x=f"f32[M,{k}]", codes=f"i8[N,{k}]", scale="f32[N,1]")
    x, codes = random.standard_normal((20, k)).astype("f4"), drawn(50, k)
    scale = random.uniform(0.01, 0.02, (50, 1)).astype("f4")
    module = gradc.compile(graph, target="cpu")
    assert calls_of(module) == ["integer_matmul"]
    step = gradc.compile(gradc.trace(lambda x: ops.dynamic_scale(x, dtype="i8", block=(1, k)), x=f"f32[M,{k}]"))(x=x)
    rows = gradc.compile(
        gradc.trace(lambda x, s: ops.quantize(x, s, block=(1, k), dtype="i8"), x=f"f32[M,{k}]", s="f32[M,1]")
    )(x=x, s=step)
    exact = product(rows, codes.T).astype("f8") * step.astype("f8") * scale.astype("f8").T
    y = module(x=x, codes=codes, scale=scale)
    assert (abs(y - exact) <= 2 * np.finfo("f4").eps * abs(exact)).all()

    g = random.standard_normal(y.shape).astype("f4")
    learned = gradc.compile(graph, wrt=["scale"], target="cpu")
    slope = learned.backward(learned.forward(x=x, codes=codes, scale=scale)[1], g)["scale"]
    of_sums = g.astype("f8") * step.astype("f8") * product(rows, codes.T)
    wanted = of_sums.sum(0)[:, None]
    assert (abs(slope - wanted) <= 1e-5 * abs(of_sums).sum(0)[:, None]).all()


def test_sums_that_may_leave_i32_stay_floats() -> None:
    graph = gradc.trace(
        lambda q, w: ops.matmul(ops.cast(q, "f32"), ops.cast(w, "f32")), q="i8[M,140000]", w="i8[140000,2]"
    )
    module = gradc.compile(graph, target="cpu")
    assert calls_of(module) == ["matmul"]
    q, w = np.full((3, 140000), -128, "i1"), np.full((140000, 2), -128, "i1")
    np.testing.assert_array_equal(module(q=q, w=w), np.full((3, 2), 2.0**14 * 140000, "f4"))


def test_a_sum_of_no_codes_is_zero_whatever_their_scales() -> None:
    def scaled(q: Any, w: Any, s: Any) -> Any:
        return ops.matmul(ops.cast(q, "f32") * s, ops.cast(w, "f32"))

    module = gradc.compile(gradc.trace(scaled, q="i8[3,0]", w="i8[0,2]", s="f32[3,1]"), target="cpu")
    q, w, s = np.zeros((3, 0), "i1"), np.zeros((0, 2), "i1"), np.asarray([[1], [np.nan], [np.inf]], "f4")
    np.testing.assert_array_equal(module(q=q, w=w, s=s), np.zeros((3, 2), "f4"))


def test_each_factor_of_an_operand_is_looked_at_once() -> None:
    """x^(2^40) is 40 products, and 2^40 ways to x."""

    def power(x: Any, w: Any) -> Any:
        for _ in range(40):
            x = x * x
        return ops.matmul(x, w)

    graph = gradc.trace(power, x="f32[M,8]", w="f32[8,3]")
    assert simplify(graph, functions=["integer_matmul"]).nodes == graph.nodes
