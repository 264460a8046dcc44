"""gradc.jax.call: modules under jit, grad and vmap, against the same functions in JAX alone."""

from __future__ import annotations

from typing import Any

import long_tests
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="gradc beside JAX")

import jax.numpy as jnp  # noqa: E402

import gradc  # noqa: E402
from gradc import ops  # noqa: E402
from gradc.errors import InvalidProblem, TypeRuleError, Unsupported  # noqa: E402
from gradc.jax import call  # noqa: E402


@pytest.fixture(autouse=True)
def _cpu() -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return ops.mean(ops.square(ops.linear(ops.gelu(ops.linear(x, w, b)), v)))


def own_mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return jnp.mean(jnp.square(jax.nn.gelu(x @ w.T + b, approximate=False) @ v.T))


TYPES = {"x": "f32[N,8]", "w": "f32[16,8]", "b": "f32[16]", "v": "f32[4,16]"}
ARRAYS = {"x": random(5, 8), "w": random(16, 8, seed=1), "b": random(16, seed=2), "v": random(4, 16, seed=3)}


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(mlp, **TYPES), wrt=["w", "b", "v", "x"])


def test_value_and_gradients(module: gradc.Module) -> None:
    f = call(module)
    for transform in (lambda g: g, jax.jit):
        value, found = transform(jax.value_and_grad(lambda p: f(**p)))(ARRAYS)
        expected, wanted = jax.value_and_grad(lambda p: own_mlp(**p))(ARRAYS)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for name in ARRAYS:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_one_module_for_every_size(module: gradc.Module) -> None:
    f = jax.jit(call(module))
    for n in (0, 1, 7, 64):
        x = random(n, 8, seed=n)
        if n:
            np.testing.assert_allclose(f(**{**ARRAYS, "x": x}), own_mlp(**{**ARRAYS, "x": x}), rtol=1e-5)
        else:
            assert np.isnan(f(**{**ARRAYS, "x": x}))


def test_a_training_loop_is_jax_s_own() -> None:
    """jit(grad) with momentum: forty steps, each parameter to 1e-6 of pure JAX in f64."""
    with jax.enable_x64(True):
        types = {name: text.replace("f32", "f64") for name, text in TYPES.items()}
        f = call(gradc.compile(gradc.trace(mlp, **types), wrt=["w", "b", "v"]))
        arrays = {name: array.astype(np.float64) for name, array in ARRAYS.items()}

        def train(loss: Any) -> dict[str, Any]:
            step = jax.jit(jax.grad(lambda p, x: loss(x=x, **p)))
            p = {name: jnp.asarray(arrays[name]) for name in ("w", "b", "v")}
            speed = jax.tree.map(jnp.zeros_like, p)
            for number in range(40):
                x = random(6, 8, seed=number).astype(np.float64)
                speed = jax.tree.map(lambda s, g: 0.9 * s + g, speed, step(p, x))
                p = jax.tree.map(lambda a, s: a - 0.01 * s, p, speed)
            return p

        found, wanted = train(f), train(own_mlp)
        for name in found:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
            assert np.abs(np.asarray(wanted[name]) - arrays[name]).max() > 1e-2, "it did learn"


def test_integers_and_the_scale_of_a_table() -> None:
    def loss(i: Any, q: Any, s: Any, t: Any) -> Any:
        return ops.cross_entropy(ops.embedding(i, ops.dequantize(q, s, block=(1, 6))), t)

    types = {"i": "i64[N]", "q": "i8[V,6]", "s": "f32[V,1]", "t": "i64[N]"}
    f = call(gradc.compile(gradc.trace(loss, **types), wrt=["s"]))
    choose = np.random.default_rng(0)
    q, s = choose.integers(-9, 9, (11, 6)).astype(np.int8), np.abs(random(11, 1)) + 0.1
    i, t = choose.integers(0, 11, 20).astype(np.int32), choose.integers(0, 6, 20).astype(np.int32)

    def own(s: Any) -> Any:
        rows = (q.astype(np.float32) * s)[i]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(rows), t[:, None], 1))

    found = jax.jit(jax.grad(lambda s: f(i=i, q=q, s=s, t=t)))(s)
    np.testing.assert_allclose(found, jax.grad(own)(s), rtol=1e-4, atol=1e-7)


def test_several_outputs_some_without_a_cotangent_or_a_gradient() -> None:
    def two(x: Any, w: Any) -> Any:
        y = ops.tanh(x * w)
        return {"y": y, "z": ops.exp(w), "k": ops.argmax(y, axis=0)}

    f = call(gradc.compile(gradc.trace(two, x="f32[N]", w="f32[N]"), wrt=["x", "w"]))
    x, w = random(6), random(6, seed=1)
    with jax.enable_x64(True):
        out = f(x=x, w=w)
        assert set(out) == {"y", "z", "k"} and out["k"] == np.argmax(np.tanh(x * w))
    graph = gradc.trace(lambda x, w: {"y": ops.tanh(x * w), "z": ops.exp(w)}, x="f32[N]", w="f32[N]")
    pair = call(gradc.compile(graph, wrt=["x", "w"]))
    own = lambda x, w: {"y": jnp.tanh(x * w), "z": jnp.exp(w)}
    for pick in (lambda o: o["y"].sum(), lambda o: o["z"].sum(), lambda o: (o["y"] * o["z"]).sum()):
        found = jax.grad(lambda x, w, pick=pick: pick(pair(x=x, w=w)), (0, 1))(x, w)
        wanted = jax.grad(lambda x, w, pick=pick: pick(own(x, w)), (0, 1))(x, w)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_vmap_is_one_after_the_other(module: gradc.Module) -> None:
    f = call(module)
    xs = random(3, 5, 8)
    fixed = {name: ARRAYS[name] for name in ("w", "b", "v")}
    found = jax.vmap(jax.value_and_grad(lambda x: f(x=x, **fixed)))(xs)
    wanted = jax.vmap(jax.value_and_grad(lambda x: own_mlp(x=x, **fixed)))(xs)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bits(dtype: str) -> None:
    own = {"bf16": jnp.bfloat16, "f16": jnp.float16}[dtype]
    f = call(gradc.compile(gradc.trace(lambda x: ops.sum(ops.square(x)), x=f"{dtype}[N]"), wrt=["x"]))
    x = jnp.asarray(random(9), own)
    value, found = jax.value_and_grad(lambda x: f(x=x))(x)
    assert value.dtype == found.dtype == own
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(2 * x, np.float32))


def test_nested_parameters_and_defaults() -> None:
    table = random(4, 3, seed=5)
    graph = gradc.trace(
        lambda p, x: ops.sum(ops.linear(x, p["l1"]["w"]) @ table), p={"l1": {"w": "f32[4,3]"}}, x="f32[N,3]"
    )
    f = call(gradc.compile(graph, wrt=["p.l1.w"]))
    p, x = {"l1": {"w": random(4, 3)}}, random(5, 3)
    found = jax.grad(lambda p: f(p=p, x=x))(p)
    np.testing.assert_allclose(found["l1"]["w"], jax.grad(lambda w: ((x @ w.T) @ table).sum())(p["l1"]["w"]), rtol=1e-4)


@long_tests.values
def test_arrays_of_jax_go_in_directly(module: gradc.Module) -> None:
    value, residuals = module.forward(**{name: jnp.asarray(array) for name, array in ARRAYS.items()})
    np.testing.assert_allclose(value, own_mlp(**ARRAYS), rtol=1e-5)
    gradients = module.backward(residuals, jnp.ones((), jnp.float32))
    np.testing.assert_allclose(
        gradients["b"], jax.grad(lambda b: own_mlp(**{**ARRAYS, "b": b}))(ARRAYS["b"]), rtol=1e-4
    )


def test_bad_input() -> None:
    module = gradc.compile(gradc.trace(lambda x, w: ops.sum(x * w), x="f32[N]", w="f32[N]"), wrt=["w"])
    f, x = call(module), random(3)
    with pytest.raises(InvalidProblem, match="differentiated by 'x', and was compiled with wrt="):
        jax.grad(lambda x: f(x=x, w=x))(x)
    with pytest.raises(InvalidProblem, match="N=3 from x"):
        jax.jit(f)(x=x, w=random(4))
    with pytest.raises(InvalidProblem, match="'w'"):
        f(x=x)
    with pytest.raises(InvalidProblem, match="'u'"):
        f(x=x, w=x, u=x)
    with pytest.raises(TypeRuleError, match="w is f32"):
        f(x=x, w=x.astype(np.float16))
    with pytest.raises(Unsupported, match="64"):
        call(gradc.compile(gradc.trace(lambda x: ops.argmax(x, axis=0), x="f32[N]")))(x=x)
    with pytest.raises(Unsupported, match="integers"):
        call(gradc.compile(gradc.trace(lambda q, s: ops.sum(ops.dequantize(q, s)), q="i8[4]", s="f32[]"), wrt=["q"]))
    with pytest.raises(Unsupported, match="sparse"):
        graph = gradc.trace(lambda t, i: ops.sum(ops.embedding(i, t)), t="f32[V,2]", i="i64[N]")
        call(gradc.compile(graph, wrt=["t"], sparse=["t"]))
    with pytest.raises(Exception, match=r"index 7 at position 1|IndexOutOfRange"):
        g = call(gradc.compile(gradc.trace(lambda t, i: ops.embedding(i, t), t="f32[V,2]", i="i64[N]")))
        np.asarray(g(t=random(3, 2), i=np.array([0, 7])))
