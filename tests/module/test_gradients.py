"""The container of gradients and what residuals give back: each sentence of section 4 of the semantics."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.errors import InvalidProblem, NotDifferentiable
from gradc.ir.types import DTYPES
from gradc.module.module import Gradients

f32 = np.float32


def model(tokens: Any, table: Any, w: Any, b: Any) -> Any:
    return ops.tanh(ops.embedding(tokens, table) @ w + b)


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(
        gradc.trace(model, tokens="i64[N]", table="f32[V,4]", w="f32[4,M]", b="f32[M]"), wrt=["w", "table", "b"]
    )


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 5, 7),
        "table": rng.standard_normal((5, 4)).astype(f32),
        "w": rng.standard_normal((4, 3)).astype(f32),
        "b": np.zeros(3, f32),
    }


@pytest.fixture
def grads(module: gradc.Module) -> Gradients:
    y, residuals = module.forward(**inputs())
    return module.backward(residuals, y)


# -- the container -----------------------------------------------------------------------------------------------------


def test_by_name(grads: Gradients) -> None:
    assert grads["table"].shape == (5, 4) and grads.get("table") is grads["table"]
    assert grads.get("tokens") is None and grads.get("tokens", 3) == 3
    for ask in (lambda: grads["tokens"], lambda: grads.pop("tokens"), lambda: grads.__delitem__("tokens")):
        with pytest.raises(KeyError, match="no gradient of 'tokens'; there are w, table, b"):
            ask()
    with pytest.raises(KeyError, match="no gradient of 'w'; there are none"):
        Gradients({})["w"]


def test_in_the_order_of_wrt_whatever_was_done_to_it(grads: Gradients) -> None:
    assert list(grads) == list(grads.keys()) == ["w", "table", "b"]
    taken = grads.pop("w")
    assert list(grads) == ["table", "b"] and len(grads) == 2 and "w" not in grads
    grads.replace("extra", taken)
    grads.replace("w", taken)
    assert list(grads) == ["w", "table", "b", "extra"] and next(iter(grads.values())) is taken
    del grads["table"]
    grads.accumulate({"extra": taken, "table": np.ones((5, 4), f32)})
    assert list(grads) == ["w", "table", "b", "extra"]
    assert repr(grads).startswith("Gradients(w: float32[4, 3], table: float32[5, 4], b: float32[3], extra")


def test_what_is_taken_is_freed(grads: Gradients) -> None:
    alive = weakref.ref(grads["w"])
    taken = grads.pop("w")
    assert alive() is taken
    del taken
    gc.collect()
    assert alive() is None  # nothing of ours holds it


def test_replace_overwrites_or_inserts(grads: Gradients) -> None:
    new = np.ones((4, 3), f32)
    grads.replace("w", new)
    grads.replace("other", new)
    assert grads["w"] is new and grads["other"] is new and len(grads) == 4
    grads.replace("w", 0)
    assert grads["w"] == 0 and "w: 0" in repr(grads)


def test_accumulate(module: gradc.Module, grads: Gradients) -> None:
    before = {name: g.copy() for name, g in grads.items()}
    objects = dict(grads)
    grads.accumulate(grads)
    grads.accumulate({"table": before["table"]})
    for name, times in (("w", 2), ("table", 3), ("b", 2)):
        np.testing.assert_array_equal(grads[name], times * before[name])
        np.testing.assert_array_equal(objects[name], before[name])  # as new arrays: what others hold stays
    grads.accumulate({"new": before["b"]})
    assert grads["new"] is before["b"]
    grads.accumulate({"new": before["b"]})
    np.testing.assert_array_equal(before["b"] * 2, grads["new"])
    for wrong in (np.ones((4, 2), f32), np.ones((4, 3)), 1.0):
        now = grads["table"]
        with pytest.raises(InvalidProblem, match=r"the gradients of 'w' differ: float32\[4, 3\] and float"):
            grads.accumulate({"table": now, "w": wrong})
        assert grads["table"] is now  # nothing was added
    zero = Gradients({"s": np.asarray(2, f32)})
    zero.accumulate({"s": np.asarray(3, f32)})
    assert isinstance(zero["s"], np.ndarray) and zero["s"] == 5
    half = Gradients({"s": np.ones(2, DTYPES["bf16"].np)})
    half.accumulate(half)
    assert half["s"].dtype == DTYPES["bf16"].np and (half["s"] == 2).all()


def test_accumulate_keeps_the_kind() -> None:
    torch = pytest.importorskip("torch")
    mine = Gradients({"a": torch.ones(2, dtype=torch.bfloat16), "b": np.ones(2, f32)})
    mine.accumulate({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)})
    assert isinstance(mine["a"], torch.Tensor) and mine["a"].dtype == torch.bfloat16 and (mine["a"] == 2).all()
    assert isinstance(mine["b"], np.ndarray) and (mine["b"] == 2).all()


def test_a_tree_of_what_is_there() -> None:
    graph = gradc.trace(lambda x, p: ops.sum(x @ p["l"][0] * p["s"]), x="f32[N,3]", p={"l": ["f32[3,2]"], "s": "f32[]"})
    module = gradc.compile(graph, wrt="p")
    _, grads = module.value_and_grad(x=np.ones((2, 3), f32), p={"l": [np.ones((3, 2), f32)], "s": np.asarray(1, f32)})
    assert grads.tree["p"]["l"]["0"] is grads["p.l.0"] and list(grads) == ["p.l.0", "p.s"]
    structured = Gradients({"l.0": 1}, {"l": [None, 0], "s": 0})
    with pytest.raises(KeyError, match=r"no gradient of 'l\.1'; there are l\.0"):
        _ = structured.tree


def test_backward_any_number_of_times(module: gradc.Module) -> None:
    y, residuals = module.forward(**inputs())
    first = module.backward(residuals, y)
    kept = {n: g.copy() for n, g in first.items()}
    for _ in range(5):
        again = module.backward(residuals, y)
        for name in module.wrt:
            np.testing.assert_array_equal(again[name], kept[name])
            assert not np.shares_memory(again[name], first[name])
        again.accumulate(first)
        again.pop("w")
    for name in module.wrt:
        np.testing.assert_array_equal(first[name], kept[name])


# -- residuals ---------------------------------------------------------------------------------------------------------


def plain(dtype: str) -> Any:
    return np.array([[1, 0, 1], [0, 1, 1]]).astype(DTYPES[dtype].np)


@pytest.mark.parametrize("dtype", ["i8", "u8", "i4", "u4", "i2", "u2", "i16", "f8e4m3", "f8e5m2"])
def test_quantized_inputs(dtype: str) -> None:
    """The plain value comes back; the gradient goes straight through."""
    graph = gradc.trace(lambda q, s: ops.dequantize(q, s, block=(1, 3)), q=f"{dtype}[N,3]", s="f32[N,1]")
    q, s = plain(dtype), np.array([[2], [3]], f32)
    module = gradc.compile(graph, wrt=["s"])
    y, residuals = module.forward(q=q, s=s)
    assert residuals.inner("q") is q and residuals.inner("s") is s
    np.testing.assert_array_equal(q.astype(f32), plain(dtype).astype(f32))
    np.testing.assert_array_equal(
        module.backward(residuals, np.ones((2, 3), f32))["s"], q.astype(f32).sum(1, keepdims=True)
    )
    straight = gradc.compile(graph, wrt=["q"])
    y, residuals = straight.forward(q=q, s=s)
    found = straight.backward(residuals, np.ones_like(y))["q"]
    assert residuals.inner("q") is q and found.dtype == f32
    np.testing.assert_array_equal(found.astype(f32), np.broadcast_to(s, (2, 3)))


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u8"])
def test_integer_inputs(dtype: str) -> None:
    graph = gradc.trace(lambda i, w: ops.embedding(i, w), i=f"{dtype}[N]", w="f32[V,2]")
    i, w = np.array([0, 2, 2]).astype(DTYPES[dtype].np), np.ones((3, 2), f32)
    module = gradc.compile(graph, wrt=["w"])
    _, residuals = module.forward(i=i, w=w)
    assert residuals.inner("i") is i and residuals.inner("w") is w
    with pytest.raises(NotDifferentiable, match="lies between 'i' and every float output"):
        gradc.compile(graph, wrt=["i"])
    with pytest.raises(NotDifferentiable, match="lies between 'i' and every float output"):
        gradc.compile(graph, wrt=["w", "i"])


def test_bool_inputs() -> None:
    graph = gradc.trace(lambda m, x: ops.where(m, x * x, -x), m="bool[N]", x="f32[N]")
    m, x = np.array([True, False]), np.array([3, 5], f32)
    module = gradc.compile(graph, wrt=["x"])
    _, residuals = module.forward(m=m, x=x)
    assert residuals.inner("m") is m
    np.testing.assert_array_equal(module.backward(residuals, np.ones(2, f32))["x"], [6, -1])
    with pytest.raises(NotDifferentiable, match=r"'where' .* lies between 'm' and every float output"):
        gradc.compile(graph, wrt=["m"])


def test_straight_through_paths_alone() -> None:
    """Quantized and back passes; rounding to an integer by a cast does not; one path that does not exist hides none
    that does.
    """
    through = gradc.compile(
        gradc.trace(lambda x, s: ops.dequantize(ops.quantize(x, s), s), x="f32[N]", s="f32[]"), wrt=["x"]
    )
    x = np.array([0.4, 500.0], f32)
    _, residuals = through.forward(x=x, s=np.asarray(1, f32))
    np.testing.assert_array_equal(through.backward(residuals, np.ones(2, f32))["x"], [1, 0])
    with pytest.raises(NotDifferentiable, match=r"'cast' .* lies between 'x' and every float output"):
        gradc.compile(gradc.trace(lambda x: x.astype("i32").astype("f32"), x="f32[N]"), wrt=["x"])
    with pytest.raises(NotDifferentiable, match="has no float output"):
        gradc.compile(gradc.trace(lambda q: q + 1, q="i8[N]"), wrt=["q"])
    number = gradc.compile(
        gradc.trace(lambda q: q.astype("f32") * 3.0, q="i8[N]"), wrt=["q"]
    )  # an integer taken as a number
    _, residuals = number.forward(q=np.ones(2, np.int8))
    np.testing.assert_array_equal(number.backward(residuals, np.ones(2, f32))["q"], [3, 3])


def test_inner_of_every_kind() -> None:
    graph = gradc.trace(lambda x, p: x * p["a"], x="f32[N]", p={"a": "f32[]"})
    module = gradc.compile(graph, wrt=["x"])
    x = np.ones(2, f32)
    _, residuals = module.forward(x=x, p={"a": 3.0})
    assert residuals.inner("p.a") == 3.0 and residuals.inner("x") is x
    with pytest.raises(KeyError, match=r"no input 'y'; there are x, p\.a"):
        residuals.inner("y")
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2)
    assert module.forward(x=tensor, p={"a": 3.0})[1].inner("x") is tensor


def test_inner_of_donated_memory() -> None:
    module = gradc.compile(gradc.trace(lambda w, g: w - 0.5 * g, w="f32[N]", g="f32[N]"), donate=["w"])
    w, g = np.ones(3, f32), np.ones(3, f32)
    y, residuals = module.forward(w=w, g=g)
    assert np.shares_memory(y, w) and residuals.inner("g") is g
    with pytest.raises(KeyError, match="the input 'w' was donated: its memory is an output's now"):
        residuals.inner("w")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_contributions_of_16_bits_are_rounded_once(dtype: str, target: str) -> None:
    """Three uses: one contribution as large as 2 / ulp and two of half an ulp, which are lost if each addition is
    rounded.
    """
    large = {"f16": 2.0**11, "bf16": 2.0**8}[dtype]
    graph = gradc.trace(
        lambda x, a: ops.sin(x) * a + ops.tanh(x) * a + x * (a * large), x=f"{dtype}[N]", a=f"{dtype}[N]"
    )
    module = gradc.compile(graph, wrt=["x"], target=target, numerics="strict")  # else no value between is rounded
    kind = graph.input("x").dtype.np
    _, residuals = module.forward(x=np.zeros(3, kind), a=np.ones(3, kind))
    assert module.backward(residuals, np.ones(3, kind))["x"].astype(np.float64).tolist() == [large + 2] * 3
