"""A compiled module as its user holds it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.errors import InvalidProblem, NotDifferentiable, Unsupported
from gradc.ir import envelope
from gradc.ir.kernel import Loop
from gradc.ir.types import DTYPES
from gradc.module import saved
from gradc.module.module import Gradients

f32 = np.float32


def bag(tokens: Any, table: Any, w: Any) -> Any:
    hidden = ops.gelu(ops.embedding(tokens, table) @ w)
    return ops.layer_norm(hidden, (hidden.shape[1],))


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    return gradc.compile(gradc.trace(bag, tokens="i64[N]", table="f32[V,8]", w="f32[8,M]"), wrt=["w", "table"])


def inputs(n: int, v: int = 9, m: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, v, n),
        "table": rng.standard_normal((v, 8)).astype(f32),
        "w": rng.standard_normal((8, m)).astype(f32),
    }


def expected(module: gradc.Module, arrays: dict[str, np.ndarray], dy: np.ndarray) -> dict[str, np.ndarray]:
    joint = gradc.differentiate(module.graph, module.wrt)
    return interp.run(joint, {**arrays, "d.y": dy}, precision="f64")


@pytest.mark.parametrize("target", ["cpu", "numpy"])
def test_one_module_for_every_size(target: str) -> None:
    module = gradc.compile(
        gradc.trace(bag, tokens="i64[N]", table="f32[V,8]", w="f32[8,M]"), wrt=["w", "table"], target=target
    )
    for n, v, m in ((3, 9, 5), (1000, 40, 17), (1, 1, 1), (0, 2, 3)):
        arrays = inputs(n, v, m)
        y, residuals = module.forward(**arrays)
        dy = np.random.default_rng(1).standard_normal(y.shape).astype(f32)
        grads = module.backward(residuals, dy)
        want = expected(module, arrays, dy)
        np.testing.assert_allclose(y, want["y"], rtol=0, atol=2e-5)
        for name in module.wrt:
            scale = max(1.0, float(np.abs(want[f"d.{name}"]).max(initial=0.0)))
            np.testing.assert_allclose(grads[name], want[f"d.{name}"], rtol=0, atol=2e-5 * scale)
        np.testing.assert_array_equal(module(**arrays), y)


def test_backward_as_often_as_one_likes(module: gradc.Module) -> None:
    y, residuals = module.forward(**inputs(20))
    first = module.backward(residuals, y)
    other = module.backward(residuals, 2 * y)
    again = module.backward(residuals, y)
    named = module.backward(residuals, y=y)
    for name in module.wrt:
        np.testing.assert_array_equal(again[name], first[name])
        np.testing.assert_array_equal(named[name], first[name])
        np.testing.assert_array_equal(other[name], 2 * first[name])
        assert not np.shares_memory(again[name], first[name])
    _, later = module.forward(**inputs(7, seed=1))  # residuals of two calls live side by side
    module.backward(later, np.ones((7, 5), f32))
    np.testing.assert_array_equal(module.backward(residuals, y)["w"], first["w"])


def test_cotangents_of_several_outputs() -> None:
    graph = gradc.trace(lambda x, k: {"a": x * 2.0, "n": k + 1, "b": ops.sum(x * x)}, x="f32[N]", k="i32[N]")
    module = gradc.compile(graph, wrt=["x"])
    x = np.arange(4, dtype=f32)
    values, residuals = module.forward(x=x, k=np.arange(4, dtype=np.int32))
    assert list(values) == ["a", "n", "b"]
    da, db = np.ones(4, f32), np.asarray(3, f32)
    np.testing.assert_array_equal(module.backward(residuals, da, db)["x"], 2 + 6 * x)
    np.testing.assert_array_equal(module.backward(residuals, b=db, a=da)["x"], 2 + 6 * x)
    np.testing.assert_array_equal(module.backward(residuals, None, db)["x"], 6 * x)
    np.testing.assert_array_equal(module.backward(residuals, a=da)["x"], [2, 2, 2, 2])
    np.testing.assert_array_equal(module.backward(residuals)["x"], [0, 0, 0, 0])
    np.testing.assert_array_equal(module.backward(residuals, b=3.0)["x"], 6 * x)  # a number is a scalar


def test_value_and_grad() -> None:
    graph = gradc.trace(
        lambda x, w, t: {
            "loss": ops.cross_entropy(x @ w, t),
            "hits": ops.sum(ops.cast(ops.eq(ops.argmax(x @ w, axis=1), t), "i64")),
        },
        x="f32[N,6]",
        w="f32[6,4]",
        t="i64[N]",
    )
    module = gradc.compile(graph, wrt=["w"])
    rng = np.random.default_rng(0)
    for n in (5, 300):
        arrays = {
            "x": rng.standard_normal((n, 6)).astype(f32),
            "w": rng.standard_normal((6, 4)).astype(f32),
            "t": rng.integers(0, 4, n),
        }
        value, grads = module.value_and_grad(**arrays)
        values, residuals = module.forward(**arrays)
        assert value["hits"] == values["hits"]
        np.testing.assert_allclose(value["loss"], values["loss"], rtol=1e-6)
        np.testing.assert_allclose(grads["w"], module.backward(residuals, np.asarray(1, f32))["w"], rtol=0, atol=1e-6)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_a_mapping_in_the_order_of_wrt(module: gradc.Module) -> None:
    y, residuals = module.forward(**inputs(4))
    grads = module.backward(residuals, y)
    assert isinstance(grads, Gradients) and list(grads) == ["w", "table"] and len(grads) == 2 and "table" in grads
    assert grads.get("tokens") is None and grads.get("w") is grads["w"]
    with pytest.raises(KeyError, match="no gradient of 'tokens'; there are w, table"):
        grads["tokens"]
    assert repr(grads) == "Gradients(w: float32[8, 5], table: float32[9, 8])"
    w = grads["w"]
    more = module.backward(residuals, y)
    grads.accumulate(more)
    np.testing.assert_array_equal(grads["w"], w + more["w"])
    grads.accumulate({"extra": np.ones(2, f32)})
    assert list(grads) == ["w", "table", "extra"]
    before = grads["w"].copy()
    for wrong in (np.ones((8, 4), f32), np.ones((8, 5))):
        with pytest.raises(InvalidProblem, match=r"the gradients of 'w' differ: float32.8, 5. and"):
            grads.accumulate({"table": grads["table"], "w": wrong})
    np.testing.assert_array_equal(grads["w"], before)
    taken = grads.pop("table")
    assert taken.shape == (9, 8) and list(grads) == ["w", "extra"] and grads.pop("table", None) is None
    with pytest.raises(KeyError, match="no gradient of 'table'; there are w, extra"):
        grads.pop("table")
    with pytest.raises(KeyError, match="no gradient of 'table'"):
        del grads["table"]
    grads.replace("w", 0)
    grads.replace("new", 1)
    assert dict(grads) == {"w": 0, "extra": grads["extra"], "new": 1}
    assert sorted(Gradients({}).tree) == []


@dataclass
class Layer:
    w: Any
    b: Any


def test_nested_parameters() -> None:
    def model(x: Any, params: Any) -> Any:
        for layer in params["layers"]:
            x = ops.tanh(x @ layer.w + layer.b)
        return ops.sum(x * params["scale"])

    shapes = {"layers": [Layer("f32[3,4]", "f32[4]"), Layer("f32[4,2]", "f32[2]")], "scale": "f32[]"}
    module = gradc.compile(gradc.trace(model, x="f32[N,3]", params=shapes), wrt="params")
    assert module.wrt == (
        "params.layers.0.w",
        "params.layers.0.b",
        "params.layers.1.w",
        "params.layers.1.b",
        "params.scale",
    )
    rng = np.random.default_rng(0)
    params = {
        "layers": [
            Layer(rng.standard_normal((3, 4)).astype(f32), np.zeros(4, f32)),
            Layer(rng.standard_normal((4, 2)).astype(f32), np.zeros(2, f32)),
        ],
        "scale": np.asarray(2, f32),
    }
    x = rng.standard_normal((5, 3)).astype(f32)
    value, grads = module.value_and_grad(x=x, params=params)
    flat = {
        "params.scale": params["scale"],
        **{f"params.layers.{i}.{k}": getattr(layer, k) for i, layer in enumerate(params["layers"]) for k in "wb"},
    }
    np.testing.assert_array_equal(module(x=x, **flat), module(x=x, params=params))
    assert grads["params.layers.1.w"].shape == (4, 2)
    np.testing.assert_allclose(grads["params.scale"], value / 2, rtol=1e-6)
    with pytest.raises(InvalidProblem, match=r"needs the input 'params.layers.1.b'"):
        module(x=x, params={**params, "layers": [params["layers"][0], {"w": params["layers"][1].w}]})


def test_second_order() -> None:
    """A joint graph is a graph: it compiles, with its own cotangents and gradients beside those it has."""
    graph = gradc.trace(lambda x, w: ops.sum(ops.tanh(x * w) * x), x="f64[N]", w="f64[N]")
    joint = gradc.differentiate(graph, ["x"])
    assert joint.output_names == ("y", "d.x") and joint.input_names == ("x", "w", "d.y")
    module = gradc.compile(joint, wrt=["x", "w"])
    rng = np.random.default_rng(0)
    x, w, one = rng.standard_normal(6), rng.standard_normal(6), np.asarray(1.0)
    values, residuals = module.forward({"x": x, "w": w, "d.y": one})
    v = rng.standard_normal(6)
    grads = module.backward(residuals, None, v)
    np.testing.assert_allclose(values["d.x"], np.tanh(x * w) + x * w / np.cosh(x * w) ** 2, rtol=1e-12)
    second = (2 * w - 2 * x * w * w * np.tanh(x * w)) / np.cosh(x * w) ** 2
    np.testing.assert_allclose(grads["x"], second * v, rtol=1e-10)
    both = module.backward(residuals, one, v)
    np.testing.assert_allclose(both["x"], second * v + values["d.x"], rtol=1e-10)
    again = gradc.compile(gradc.differentiate(joint, ["x"]), wrt=["w"])
    assert set(again.wrt) == {"w"}


# -- residuals ---------------------------------------------------------------------------------------------------------


def test_residuals_say_what_and_why(module: gradc.Module) -> None:
    arrays = inputs(6)
    _, residuals = module.forward(**arrays)
    assert residuals.inner("tokens") is arrays["tokens"] and residuals.inner("table") is arrays["table"]
    with pytest.raises(KeyError, match="no input 'y'; there are tokens, table, w"):
        residuals.inner("y")
    names = [r.name for r in module.residuals]
    assert repr(residuals) == f"Residuals({', '.join(names)})"
    for residual in module.residuals:
        assert residual.name in arrays or residual.name.startswith("r.")
        assert residual.why and str(residual.node.type) in str(module.graph) + module.explain() + str(
            residual.node.type
        )
    kept = sum(residuals.arrays[r.name].nbytes for r in module.residuals if r.why != "input")
    assert residuals.nbytes == kept
    everything = gradc.compile(module.graph, wrt=module.wrt, save="all").forward(**arrays)[1]
    nothing = gradc.compile(module.graph, wrt=module.wrt, save="none").forward(**arrays)[1]
    assert nothing.nbytes <= everything.nbytes and kept <= everything.nbytes


@pytest.mark.parametrize("save", ["min-cut", "all", "none"])
def test_what_is_saved_changes_no_gradient(save: str) -> None:
    module = gradc.compile(
        gradc.trace(bag, tokens="i64[N]", table="f32[V,8]", w="f32[8,M]"), wrt=["w", "table"], save=save
    )
    arrays = inputs(12)
    y, residuals = module.forward(**arrays)
    want = expected(module, arrays, y)
    for name, grad in module.backward(residuals, y).items():
        np.testing.assert_allclose(grad, want[f"d.{name}"], rtol=0, atol=3e-5)


def test_quantized_inputs_come_back_untouched() -> None:
    graph = gradc.trace(lambda q, s: ops.dequantize(q, ops.reshape(s, (-1, 1)), block=(1, 4)), q="i8[N,4]", s="f32[N]")
    module = gradc.compile(graph, wrt=["s"])
    q = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    y, residuals = module.forward(q=q, s=np.ones(4, f32))
    assert residuals.inner("q") is q
    np.testing.assert_array_equal(module.backward(residuals, np.ones((4, 4), f32))["s"], q.sum(1))
    straight = gradc.compile(graph, wrt=["q"])
    y, residuals = straight.forward(q=q, s=np.full(4, 2, f32))
    np.testing.assert_array_equal(
        straight.backward(residuals, y)["q"], 2 * y
    )  # through the integers as if they were numbers


# -- looking -----------------------------------------------------------------------------------------------------------


def test_stages_by_name_run_in_numpy(module: gradc.Module) -> None:
    names = module.stages.names()
    assert names[:5] == ["forward", "static_indices", "push_gathers", "push_slices", "joint"]
    assert "backward.plan_buffers" in names
    for name in ("decompose", "upcast", "simplify", "fold", "sink_dequant"):
        assert name in names and module.stages[name].name == name and str(module.stages[name])
    with pytest.raises(KeyError, match="no stage 'nope'; there are forward, static_indices"):
        module.stages["nope"]
    arrays = inputs(5)
    dy = np.ones((5, 5), f32)
    wanted = expected(module, arrays, dy)
    given = {**arrays, "d.y": dy}
    for stage in module.stages:
        if isinstance(stage.result, gradc.Graph) and set(stage.result.input_names) <= given.keys():
            found = interp.run(stage.result, {n: given[n] for n in stage.result.input_names})
            for name, value in found.items():
                if name in wanted:  # not a residual
                    np.testing.assert_allclose(value, wanted[name], rtol=0, atol=5e-5, err_msg=f"{stage.name} {name}")


def test_stages_of_a_module_from_the_cache(module: gradc.Module) -> None:
    again = gradc.compile(module.graph, wrt=module.wrt)
    assert again.stages.names() == module.stages.names()
    assert str(again) == str(module) and again.source() == module.source()


def test_kernels_one_by_one(module: gradc.Module) -> None:
    assert module.kernels
    for name, kernel in module.kernels.items():
        assert (
            name in (kernel.name, f"backward.{kernel.name}") and str(kernel) == kernel.ir and kernel.name in kernel.ir
        )
        assert f" * kernel @{kernel.name} rows(" in kernel.source  # its IR stands on its forehead
        buffers = kernel.sample(N=6, V=9, M=5)
        found = kernel.run(dims={"N": 6, "V": 9, "M": 5}, **buffers)
        assert set(found) == set(kernel.kernel.writes)
        numpy = interp.run(kernel.executable.program, buffers, dims=kernel.bound({"N": 6, "V": 9, "M": 5}))
        for buffer, value in found.items():
            np.testing.assert_allclose(
                value.astype(np.float64),
                numpy[buffer].astype(np.float64),
                rtol=1e-4,
                atol=1e-4,
                err_msg=f"{name} {buffer}",
            )
        moved = kernel.bytes(N=6, V=9, M=5)
        assert 0 < moved < kernel.bytes(N=600, V=9, M=5) or "N" not in kernel.ir
        assert 0 <= kernel.time(repeat=2, N=6, V=9, M=5) < 10
    with pytest.raises(InvalidProblem, match="needs a value for"):
        next(iter(module.kernels.values())).sample()
    with pytest.raises(KeyError):
        module.kernels["nope"]


def inner(step: Any) -> tuple[Any, ...]:
    """The steps that a step of a program is: a loop's own."""
    return step.steps if isinstance(step, Loop) else (step,)


def test_a_module_in_print(module: gradc.Module) -> None:
    text = str(module)
    programs = [executable.program for executable in module.executables.values()]
    steps = [
        inner for p in programs for step in p.steps for inner in (step.steps if isinstance(step, Loop) else [step])
    ]
    assert text.splitlines()[0].startswith(f"module bag on cpu: {len(steps)} steps, wrt w, table")
    assert len(text.splitlines()) == len(steps) + 1
    for step in steps:
        assert step.name in text
    assert re.search(r"\d+%", text) and "test_module.py" in text  # shares, and where it was written
    words = module.explain(N=100, V=9, M=5)
    for part in ("segmented", "privatized", "r.", "table"):
        assert part in words
    assert words != module.explain(N=10**6, V=9, M=5)
    assert "for (" in module.source() and "forward" in module.source() and "backward" in module.source()
    assert module.sku(N=100) == module.forward.sku(N=100) and "cpu" in module.sku() and "N100" in module.sku(N=100)


def test_measured_times_stand_beside_the_predicted(module: gradc.Module) -> None:
    text = module.explain(timed=1, N=100, V=9, M=5)
    steps = [s.name for e in module.executables.values() for step in e.program.steps for s in inner(step)]
    # of each step, matrix products too
    assert len(re.findall(r"(?:measured \d+\.\d us|in a loop, which is not timed alone)\n", text)) == len(steps)
    table = [line for line in text.splitlines() if re.match(r" +(-> )?(segmented|privatized|regular) ", line)]
    assert len(table) > 1 and all(
        re.search(r"us  (measured \d+\.\d us|not possible beside its other combines)  ", line) for line in table
    )
    assert "measured" not in module.explain(N=100, V=9, M=5)
    for bad in (-1, 0.5):
        with pytest.raises(InvalidProblem, match="an integer from 0"):
            module.explain(timed=bad)  # type: ignore[arg-type]


def test_what_random_data_cannot_run_is_not_timed(module: gradc.Module) -> None:
    """No index is inside a table without rows."""
    text = module.explain(timed=1, N=5, V=0, M=2)
    assert "measured nothing (InvalidProblem)" in text and re.search(r"measured \d", text)


def test_a_kernel_with_another_strategy() -> None:
    graph = gradc.trace(lambda i, t: ops.embedding(i, t), i="i64[N]", t="f32[20,4]")
    ways = {"cpu": ["segmented", "privatized"], "cuda-sim": ["segmented", "privatized", "atomic", "atomic_fixed"]}
    for target, names in ways.items():
        module = gradc.compile(graph, wrt=["t"], target=target)
        handle = next(k for k in module.backward.kernels.values() if k.kernel.accums)
        buffer = handle.kernel.accums[0].buffer
        found = [handle.forced(buffer, how) for how in names]
        assert [f.kernel.strategies[buffer] for f in found if f is not None] == names
        sample = handle.sample(N=30)
        given = [
            f.run(dims={"N": 30}, **sample)[buffer] for f in (found if target == "cpu" else found[2:3]) if f is not None
        ]
        want = interp.run(handle.executable.program, sample, dims={"N": 30})[buffer]
        for array in given:
            np.testing.assert_allclose(array, want, rtol=1e-6)
        with pytest.raises(Unsupported, match="cannot be regular"):
            handle.forced(buffer, "regular")


def test_precision_is_read_from_the_kernels() -> None:
    half = gradc.compile(gradc.trace(lambda x, w: ops.sum(x * w, axis=0), x="bf16[N,4]", w="bf16[4]"), wrt=["w"])
    assert half.precision.math == ("f32",) and half.precision.accumulator == ("f32",) and half.precision.bit_stable
    double = gradc.compile(gradc.trace(lambda x: ops.exp(x), x="f64[N]"), wrt=["x"])
    assert double.precision.math == ("f64",) and double.precision.accumulator == ()
    both = gradc.compile(gradc.trace(lambda x, y: (x @ x, ops.sum(y)), x="f64[N,N]", y="f32[N]"))
    assert set(both.precision.accumulator) == {"f32", "f64"}
    whole = gradc.compile(gradc.trace(lambda x: x + 1, x="i32[N]"))
    assert whole.precision.math == () and whole.precision.deterministic


def precisions(function: Any, wrt: list[str], **types: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(math, accumulator) of the forward and of the backward."""
    module = gradc.compile(gradc.trace(function, **types), wrt=wrt)
    found = [e.precision for e in module.executables.values()]
    assert all(p.deterministic and p.bit_stable for p in found)
    return [(p.math, p.accumulator) for p in found]


def test_precision_of_what_moves_compares_and_adds_up() -> None:
    """What only moves, casts, selects and compares computes in nothing; a largest value is no sum."""
    f, none = ("f32",), ()
    table = {"i": "i64[N]", "w": "f32[V,D]"}
    for dtype in ("f32", "bf16"):
        assert precisions(ops.embedding, ["weight"], indices="i64[N]", weight=f"{dtype}[V,D]") == [(none, none), (f, f)]
    assert precisions(ops.embedding, ["weight"], indices="i64[N]", weight="f64[V,D]") == [
        (none, none),
        (("f64",), ("f64",)),
    ]
    bag = {"indices": "i64[N]", "weight": "bf16[V,D]", "offsets": "i64[B]"}  # a search says which bag a position is in
    assert precisions(lambda **o: ops.embedding_bag(**o, mode="max"), ["weight"], **bag) == [(f, none), (f, f)]
    assert precisions(lambda **o: ops.embedding_bag(**o, mode="sum"), ["weight"], **bag) == [(f, f), (f, f)]
    assert precisions(lambda x, w: ops.layer_norm(x, (x.shape[1],), w), ["x", "w"], x="bf16[N,D]", w="bf16[D]") == [
        (f, f),
        (f, f),
    ]
    assert precisions(lambda x, w: x @ w, ["x", "w"], x="bf16[N,D]", w="bf16[D,M]") == [(f, f), (f, f)]
    assert precisions(lambda m, x: ops.where(m, x, ops.flip(x)), ["x"], m="bool[N]", x="bf16[N]")[0] == (none, none)
    assert precisions(lambda x: ops.amax(x, axis=1), [], x="f32[N,M]") == [(f, none)]
    assert precisions(lambda x: ops.prod(x, axis=1), [], x="f32[N,M]") == [(f, f)]
    product = gradc.trace(lambda i, w: ops.embedding(i, w) @ ops.embedding(i, w).T, **table)
    numpy, cpu = (gradc.compile(product, target=target).precision for target in ("numpy", "cpu"))
    assert (
        cpu.bit_stable and not numpy.bit_stable and numpy.deterministic
    )  # NumPy's own product adds up by the number of threads


def test_precision_knows_a_strategy_that_is_not_deterministic() -> None:
    from dataclasses import replace

    from gradc.analysis.precision import precision_of

    program = gradc.compile(
        gradc.trace(ops.embedding, indices="i64[N]", weight="f32[5,3]"), wrt=["weight"]
    ).backward.program
    assert precision_of(program, "cpu").deterministic
    loose = replace(
        program, steps=tuple(replace(s, strategy=tuple((b, "atomic") for b, _ in s.strategy)) for s in program.steps)
    )  # type: ignore[call-arg, union-attr]
    assert not precision_of(loose, "cpu").deterministic and not precision_of(loose, "cpu").bit_stable


@pytest.mark.parametrize("knob", [gradc.knobs.VERIFY, gradc.knobs.VALIDATE], ids=lambda knob: knob.name)
def test_compilation_that_checks_every_pass(knob: Any) -> None:
    graph = gradc.trace(bag, tokens="i64[N]", table="bf16[V,8]", w="bf16[8,M]")
    with knob.set(True):
        checked = gradc.compile(graph, wrt=["w", "table"])
        empty = gradc.compile(gradc.parse("graph @g(%x: f32[4]) {\n  return\n}"))
    assert checked.source() == gradc.compile(graph, wrt=["w", "table"]).source()
    assert empty(x=np.ones(4, f32)) == {}


def test_outputs_that_are_inputs_views_or_constants() -> None:
    x = np.arange(6, dtype=f32).reshape(2, 3)

    def function(x: Any) -> Any:
        twice = x * 2.0
        return {
            "a": x,
            "b": x,
            "flat": ops.reshape(x, (6,)),
            "across": x.T,
            "x": twice,
            "e": ops.reshape(twice, (6,)),
            "f": ops.reshape(twice, (6,)),
            "one": ops.constant((1.5,), "f32", ()),
            "two": ops.broadcast_to(ops.constant((2,), "i32", ()), (2, 2)),
            "three": ops.constant((1.0, 2.0, 3.0), "f64", (3,)),
        }

    graph = gradc.trace(function, x="f32[2,3]")
    for fuse in (True, False):
        found = gradc.compile(graph, fuse=fuse)(x=x)
        for name, want in interp.run(graph, {"x": x}).items():
            np.testing.assert_array_equal(found[name], want, err_msg=name)
            assert not np.shares_memory(found[name], x)
    none = gradc.compile(
        gradc.parse("graph @g() {\n  %0: f32[4] = iota {axis=0, dtype=f32, shape=[4]}\n  return y=%0\n}")
    )
    np.testing.assert_array_equal(none(), [0, 1, 2, 3])


# -- files -------------------------------------------------------------------------------------------------------------


def test_equal_kernels_are_all_there() -> None:
    graph = gradc.trace(
        lambda i, j, w, v: ops.sum(ops.embedding(i, w) * 2.0) + ops.sum(ops.embedding(j, v) * 2.0),
        i="i64[N]",
        j="i64[M]",
        w="f32[V,8]",
        v="f32[U,8]",
    )
    found = gradc.compile(graph)
    assert len(found.kernels) == len(found.forward.program.kernels)


@pytest.mark.parametrize("damage", ["other graph", "no graph", "wrt"])
def test_a_module_whose_parts_do_not_belong_together(damage: str, tmp_path: Path) -> None:
    gradc.compile(gradc.trace(lambda x: ops.sum(x * x), x="f32[N]"), wrt=["x"]).save(tmp_path / "a")
    gradc.compile(gradc.trace(lambda x: ops.sum(x * 3.0), x="f32[M]"), wrt=["x"]).save(tmp_path / "b")
    parts, others = (envelope.load(tmp_path / name, "module", saved.MODULE_FORMAT).parts for name in ("a", "b"))
    if damage == "other graph":
        parts["graph"] = others["graph"]
    elif damage == "no graph":
        del parts["graph"]
    else:
        parts["module"] = json.dumps({**json.loads(parts["module"]), "wrt": ["w"]}).encode()
    (tmp_path / "a").write_bytes(envelope.sealed_bytes("module", saved.MODULE_FORMAT, parts))
    with pytest.raises(InvalidProblem, match="holds no module of gradc"):
        gradc.load_module(tmp_path / "a")


def test_save_and_load(module: gradc.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs(11)
    y, residuals = module.forward(**arrays)
    grads = module.backward(residuals, y)
    module.save(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    from gradc.runtime.host import cpu

    with monkeypatch.context() as context:  # on the same machine nothing is compiled
        context.setattr(cpu, "compile_units", lambda *a, **k: pytest.fail("compiled again"))
        loaded = gradc.load_module(tmp_path / "m")
        again, kept = loaded.forward(**arrays)
        back = loaded.backward(kept, y)
    np.testing.assert_array_equal(again, y)
    assert loaded.wrt == module.wrt and [r.name for r in loaded.residuals] == [r.name for r in module.residuals]
    for name in module.wrt:
        np.testing.assert_array_equal(back[name], grads[name])
    assert (
        loaded.graph == module.graph
        and loaded.stages.names() == module.stages.names()
        and loaded.source() == module.source()
    )
    parts = envelope.load(tmp_path / "m", "module", saved.MODULE_FORMAT).parts
    parts["module"] = json.dumps({**json.loads(parts["module"]), "machine": "another"}).encode()
    (tmp_path / "m").write_bytes(envelope.sealed_bytes("module", saved.MODULE_FORMAT, parts))
    np.testing.assert_array_equal(gradc.load_module(tmp_path / "m")(**arrays), y)  # compiled anew from its programs
    numpy = gradc.compile(module.graph, wrt=module.wrt, target="numpy")
    numpy.save(tmp_path / "n")
    np.testing.assert_allclose(gradc.load_module(tmp_path / "n")(**arrays), y, atol=1e-5)


def test_damaged_modules_are_refused(module: gradc.Module, tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="holds no module of gradc"):
        gradc.load_module(tmp_path)
    file = tmp_path / "m"
    module.save(file)
    data = file.read_bytes()
    for damage in (
        b"",
        data[:40],
        data[: len(data) // 2],
        data[:-9] + b"x" + data[-8:],
        b"\x00" * len(data),
        b"[]",
        data + b"\0",
        data[:3000] + bytes([data[3000] ^ 1]) + data[3001:],
    ):
        file.write_bytes(damage)
        with pytest.raises(InvalidProblem, match="holds no module of gradc"):
            gradc.load_module(file)
    file.write_bytes(data)
    gradc.load_module(file)(**inputs(3))


def test_constants_travel_with_the_module(tmp_path: Path) -> None:
    weights = np.arange(300, dtype=f32).reshape(100, 3)
    module = gradc.compile(gradc.trace(lambda x: x @ weights, x="f32[N,100]"), wrt=["x"])
    x = np.ones((2, 100), f32)
    wanted, residuals = module.forward(x=x)
    np.testing.assert_allclose(wanted, x @ weights, rtol=1e-6)
    module.save(tmp_path / "m")
    loaded = gradc.load_module(tmp_path / "m")
    y, kept = loaded.forward(x=x)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(loaded.backward(kept, y)["x"], module.backward(residuals, y)["x"])
    other = weights + 1  # the same graph with another array is another module
    np.testing.assert_allclose(
        gradc.compile(gradc.trace(lambda x: x @ other, x="f32[N,100]"), wrt=["x"])(x=x), x @ other, rtol=1e-6
    )


# -- arrays of other libraries -----------------------------------------------------------------------------------------


def test_torch_in_torch_out(module: gradc.Module) -> None:
    torch = pytest.importorskip("torch")
    arrays = inputs(6)
    tensors = {name: torch.from_numpy(a) for name, a in arrays.items()}
    y, residuals = module.forward(**tensors)
    assert isinstance(y, torch.Tensor) and y.dtype is torch.float32
    grads = module.backward(residuals, torch.ones_like(y))
    assert all(isinstance(g, torch.Tensor) for g in grads.values()) and residuals.inner("w") is tensors["w"]
    np.testing.assert_array_equal(y.numpy(), module(**arrays))
    out = torch.zeros_like(y)
    module.forward(**tensors, out={"y": out})
    assert torch.equal(out, y)
    mine = torch.ones(8, 5)
    back = module.backward(residuals, torch.ones_like(y), out={"w": mine}, accumulate=True)
    assert back["w"] is mine and torch.allclose(mine, 1 + grads["w"])
    t = {name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in tensors.items()}
    z = torch.nn.functional.layer_norm(
        torch.nn.functional.gelu(torch.nn.functional.embedding(t["tokens"], t["table"]) @ t["w"]), (5,)
    )
    z.sum().backward()
    with torch.no_grad():  # nothing is to be recorded: tensors that require grad are taken as they are
        torch.testing.assert_close(module.forward(**t)[0], y)
    z.detach_()
    torch.testing.assert_close(y, z, atol=1e-5, rtol=1e-5)


def test_bf16_tensors() -> None:
    torch = pytest.importorskip("torch")
    module = gradc.compile(gradc.trace(lambda x, w: ops.sum(x * w, axis=1), x="bf16[N,4]", w="bf16[4]"), wrt=["w"])
    x, w = torch.randn(5, 4).bfloat16(), torch.randn(4).bfloat16()
    y, residuals = module.forward(x=x, w=w)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, (x * w).float().sum(1).bfloat16(), atol=0.05, rtol=0.02)
    grads = module.backward(residuals, torch.ones_like(y))
    assert grads["w"].dtype is torch.bfloat16
    torch.testing.assert_close(grads["w"], x.float().sum(0).bfloat16(), atol=0.05, rtol=0.02)
    narrow = np.asarray(x.float().numpy()).astype(DTYPES["bf16"].np)
    np.testing.assert_array_equal(
        module(x=narrow, w=w.float().numpy().astype(DTYPES["bf16"].np)).astype(f32), y.float().numpy()
    )


class Capsule:
    """Nothing but DLPack."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_anything_with_dlpack_or_an_interface(module: gradc.Module) -> None:
    arrays = inputs(6)

    class Interface:
        def __init__(self, array: np.ndarray):
            self.array, self.__array_interface__ = array, array.__array_interface__

    wanted = module(**arrays)
    for wrap in (Capsule, Interface):
        got, residuals = module.forward(**{name: wrap(a) for name, a in arrays.items()})
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, wanted)
        module.backward(residuals, wrap(got))
    with pytest.raises(InvalidProblem):
        module(**{**arrays, "w": object()})


def test_arrays_of_another_library_come_back_as_its_own(module: gradc.Module) -> None:
    import array_api_strict as library

    arrays = inputs(6)
    y, residuals = module.forward(**{name: library.asarray(a) for name, a in arrays.items()})
    wanted, kept = module.forward(**arrays)
    assert isinstance(y, type(library.asarray(wanted)))
    np.testing.assert_array_equal(np.asarray(y), wanted)
    gradients = module.backward(residuals, y)
    for name, g in module.backward(kept, wanted).items():
        assert isinstance(gradients[name], type(y))
        np.testing.assert_array_equal(np.asarray(gradients[name]), g)


def test_a_wanted_gradient_that_is_not_there() -> None:
    graph = gradc.trace(lambda x, w: ops.sum(ops.floor(x) * w), x="f32[N]", w="f32[N]")
    with pytest.raises(NotDifferentiable, match=r"'floor' .* lies between 'x' and every float output"):
        gradc.compile(graph, wrt=["x"])
    zero = gradc.compile(graph, wrt=["x", "w"], unused="zeros")
    _, residuals = zero.forward(x=np.ones(2, f32), w=np.ones(2, f32))
    assert not zero.backward(residuals, 1.0)["x"].any()
