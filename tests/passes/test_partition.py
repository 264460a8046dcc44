"""What forward leaves for backward: the cut, and a memory budget for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.errors import InvalidProblem
from gradc.passes.graph.replace_axis import moves
from gradc.passes.schedule.partition import Partition, _drop, bytes_of, partition
from gradc.passes.schedule.schedule import schedule, written
from gradc.targets.devices import CPU, Device, gpu_of

f32 = np.float32
SIZES = {"N": 64}
WRT = ["w1", "w2", "g", "b"]


def block(x: Any, w1: Any, w2: Any, g: Any, b: Any) -> Any:
    hidden = ops.gelu(ops.layer_norm(x, (x.shape[1],), g, b) @ w1)
    y = x + hidden @ w2
    return ops.softmax(ops.layer_norm(y, (y.shape[1],), g, b))


@pytest.fixture(scope="module")
def graph() -> gradc.Graph:
    return gradc.trace(block, x="f32[N,16]", w1="f32[16,32]", w2="f32[32,16]", g="f32[16]", b="f32[16]")


@pytest.fixture(scope="module")
def joint(graph: gradc.Graph) -> gradc.Graph:
    stage = gradc.compile(graph, wrt=WRT, target="numpy").stages["tidy.fold"].result
    assert isinstance(stage, gradc.Graph)
    return stage


def kept(parts: Partition, **dims: int) -> int:
    """Bytes beyond the inputs."""
    return sum(
        int(np.prod(r.node.type.concrete(dims))) * r.node.dtype.itemsize for r in parts.residuals if r.why != "input"
    )


def arrays(n: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (n, 16), "w1": (16, 32), "w2": (32, 16), "g": (16,), "b": (16,)}
    return {name: (rng.standard_normal(shape) * 0.5).astype(f32) for name, shape in shapes.items()}


@pytest.mark.parametrize("save", ["min-cut", "all", "none"])
def test_residuals_stay_within_every_budget_that_is_possible(joint: gradc.Graph, save: str) -> None:
    unbounded = partition(joint, ["y"], save=save, dims=SIZES)
    fewest = kept(partition(joint, ["y"], save=save, budget=0.0, dims=SIZES), **SIZES)
    assert fewest == 64 * (32 + 16) * 4  # the two products, which are never computed twice
    whole = kept(unbounded, **SIZES)
    assert fewest < whole
    assert partition(joint, ["y"], save=save, budget=1.0, dims=SIZES).residuals == unbounded.residuals
    assert partition(joint, ["y"], save=save, budget=whole, dims=SIZES).residuals == unbounded.residuals
    values = arrays()
    dy = np.random.default_rng(1).standard_normal((64, 16)).astype(f32)
    want = interp.run(joint, {**values, "d.y": dy}, precision="f64")
    found = set()
    for budget in (whole - 1, (whole + fewest) // 2, fewest):
        parts = partition(joint, ["y"], save=save, budget=budget, dims=SIZES)
        assert fewest <= kept(parts, **SIZES) <= budget
        found.add(kept(parts, **SIZES))
        given = {**values, **interp.run(parts.forward, values), "d.y": dy}
        gradients = interp.run(parts.backward, {name: given[name] for name in parts.backward.input_names})
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, want[name], rtol=0, atol=3e-5)
    assert len(found) > 1  # a larger budget keeps more


def test_what_is_cheap_to_compute_again_goes_first() -> None:
    """exp(x) is as large as sums of 64 products each; it costs a pass over itself, they cost one over what they add
    up.
    """

    def model(x: Any, w: Any) -> Any:
        sums = ops.sum(ops.exp(ops.broadcast_to(ops.reshape(x, (256, 1)), (256, 64)) * 0.1), axis=1)
        return ops.exp(x) * w + sums * w

    joint = (
        gradc.compile(gradc.trace(model, x="f32[256]", w="f32[256]"), wrt=["w"], target="numpy")
        .stages["tidy.fold"]
        .result
    )
    every = {n.op.name: n for n in joint.nodes}
    saved = {every["sum"], *(n for n in joint.nodes if n.op.name == "exp" and n.shape == (256,))}
    size = {n: bytes_of(n, None) for n in joint.nodes}
    left = _drop(joint, saved, 1024, size)
    assert len(saved) == 2 and left - set(joint.inputs) == {every["sum"]}
    assert not _drop(joint, saved, 0, size) - set(joint.inputs)


def test_what_still_fits_is_kept_after_all() -> None:
    """Two small values are dropped before a large one that makes room enough for both."""

    def model(a: Any, b: Any) -> Any:
        return ops.sum(ops.exp(a) * b), ops.sum(ops.exp(b) * a)

    graph = gradc.trace(model, a="f32[8]", b="f32[8]")
    joint = gradc.compile(graph, wrt=["a", "b"], target="numpy").stages["tidy.fold"].result
    names = [n for n, _ in joint.outputs][:2]
    every = partition(joint, names, save="all")
    part = partition(joint, names, save="all", budget=kept(every) - 32)
    assert kept(every) - 32 == kept(part)


def test_an_impossible_budget_says_both_numbers(graph: gradc.Graph) -> None:
    with pytest.raises(
        InvalidProblem,
        match=(
            r"memory_budget=1000 bytes, and 12288 are the fewest that can be kept for the backward: results of matmul"
        ),
    ):
        gradc.compile(graph, wrt=WRT, memory_budget=1000, hints=SIZES)
    with pytest.raises(
        InvalidProblem,
        match=(
            r"memory_budget=1000 bytes: how many there are depends on N; hints=\{'N': ...\} says at which sizes, or"
            r" give a fraction"
        ),
    ):
        gradc.compile(graph, wrt=WRT, memory_budget=1000)


@pytest.mark.parametrize("budget", [-1, True, 1.5, -0.1, float("nan"), "64MB", [1]])
def test_no_budget(graph: gradc.Graph, budget: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"bytes as an int from 0, or a fraction as a float from 0\.0 to 1\.0"):
        gradc.compile(graph, wrt=WRT, memory_budget=budget, hints=SIZES)


def test_hints_bind_nothing_and_are_checked(graph: gradc.Graph) -> None:
    module = gradc.compile(graph, wrt=WRT, target="numpy", memory_budget=64 * 50 * 4, hints=SIZES)
    assert module(**arrays(5)).shape == (5, 16)
    with pytest.raises(InvalidProblem, match="hints names 'M'; the dims of block are N"):
        gradc.compile(graph, wrt=WRT, hints={"M": 3})
    with pytest.raises(InvalidProblem, match="hints: N=-3 is no size"):
        gradc.compile(graph, wrt=WRT, hints={"N": -3})


def test_inputs_and_nothing_to_keep_cost_nothing() -> None:
    module = gradc.compile(
        gradc.trace(lambda a, b: a * b, a="f32[N]", b="f32[N]"),
        wrt=["a", "b"],
        target="numpy",
        memory_budget=0,
        hints={"N": 10**12},
    )
    assert [r.why for r in module.residuals] == ["input", "input"]
    assert not gradc.compile(gradc.trace(lambda a: a + 1, a="f32[N]"), target="numpy", memory_budget=0).residuals


def test_a_budget_changes_no_gradient_on_the_cpu(graph: gradc.Graph) -> None:
    values = arrays(40)
    module = gradc.compile(graph, wrt=WRT, memory_budget=40 * 49 * 4, hints={"N": 40})
    assert "residuals within memory_budget=7840, N=40:" in module.explain()
    y, residuals = module.forward(**values)
    assert residuals.nbytes <= 40 * 49 * 4 < gradc.compile(graph, wrt=WRT).forward(**values)[1].nbytes
    want = interp.run(gradc.differentiate(graph, WRT), {**values, "d.y": y}, precision="f64")
    for name, gradient in module.backward(residuals, y).items():
        np.testing.assert_allclose(gradient, want[f"d.{name}"], rtol=0, atol=3e-5)


MODELS: dict[str, Any] = {
    "softmax": lambda x, w: ops.softmax(x * w),
    "layer_norm": lambda x, w: ops.layer_norm(x, (5,), w),
    "of the sum": lambda x, w: ops.exp(x) / ops.reshape(ops.sum(ops.exp(x * w), axis=1), (x.shape[0], 1)),
    "transposed": lambda x, w: ops.tanh(ops.transpose(x)) * ops.reshape(w, (5, 1)),
    "part and whole": lambda x, w: ops.sin(ops.tanh(x)[1:]) * ops.sin(w) + ops.tanh(x)[:-1] * w,
    "broadcast": lambda x, w: x * ops.broadcast_to(ops.tanh(ops.reshape(w, (1, 5))), x.shape),
}


@pytest.mark.parametrize("name", MODELS)
def test_saving_all_keeps_nothing_twice(name: str) -> None:
    """No residual is an input or another residual moved or repeated; the gradients are those of a module that keeps the
    least.
    """
    graph = gradc.trace(MODELS[name], x="f64[N,5]", w="f64[5]")
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((4, 5)), "w": rng.uniform(1, 2, 5)}
    found = {}
    for save in ("all", "min-cut"):
        module = gradc.compile(graph, wrt=["x", "w"], target="numpy", save=save)
        y, residuals = module.forward(given)
        found[save] = dict(module.backward(residuals, np.cos(y)))
        if save == "all":
            kept = {r.node for r in module.residuals}
            for node in kept:
                while moves(node):
                    (node,) = node.operands
                    assert node not in kept and node.op.name != "input"
                assert node.op.name != "broadcast_to"
    for key, value in found["min-cut"].items():
        np.testing.assert_allclose(found["all"][key], value, rtol=1e-12, atol=1e-13)


# -- what is kept: the fewest bytes moved -----------------------------------------------------------------------------


def large(module: gradc.Module, at_least: int) -> dict[str, str]:
    """The residuals of so many elements, and why."""
    return {r.name: r.why for r in module.residuals if np.prod(r.node.type.concrete({})) >= at_least}


def test_the_logits_are_kept_as_the_product_that_lies_in_memory() -> None:
    graph = gradc.trace(
        lambda h, w, b, t: ops.cross_entropy(ops.linear(h, w, b), t),
        h="f32[64,16]",
        w="f32[500,16]",
        b="f32[500]",
        t="i64[64]",
    )
    module = gradc.compile(graph, wrt=["h", "w", "b"], target="numpy")
    assert large(module, 64 * 500) == {"r.matmul": "matmul: a matrix product"}
    others = [r for r in module.residuals if r.name != "r.matmul" and r.why != "input"]
    assert others and all(r.node.shape in ((64,), ()) for r in others)  # row statistics


@pytest.mark.parametrize("count", [2, 3])
def test_a_new_value_is_worth_it_where_more_than_two_others_would_be_read(count: int) -> None:
    """It is written once and read once."""

    def model(**x: Any) -> Any:
        return ops.sum(ops.sin(sum(x.values())))  # type: ignore[arg-type]

    names = [f"x{i}" for i in range(count)]
    module = gradc.compile(gradc.trace(model, **dict.fromkeys(names, "f32[1000]")), wrt=names, target="numpy")
    kept = {r.name: r.why for r in module.residuals}
    new = {"r.add": "add: fewer bytes than what it is made from"}
    assert kept == (new if count == 3 else dict.fromkeys(names, "input"))


def test_of_a_gathered_input_only_the_rows_are_read() -> None:
    def model(table: Any, rows: Any, w: Any) -> Any:
        return ops.sum(ops.embedding(rows, table) * w)

    graph = gradc.trace(model, table="f32[100000,8]", rows="i64[50]", w="f32[50,8]")
    module = gradc.compile(graph, wrt=["w"], target="numpy")
    assert {r.name for r in module.residuals} == {"table", "rows"}


def test_an_operand_of_a_product_is_kept_as_the_product_read_it() -> None:
    """Softmax of scores: not the scores and their statistics, of which backward would write the weights again."""
    graph = gradc.trace(
        lambda q, k, v: ops.softmax(q @ ops.transpose(k)) @ v, q="f32[256,8]", k="f32[256,8]", v="f32[256,8]"
    )
    module = gradc.compile(graph, wrt=["q", "k", "v"], target="numpy")
    kept = large(module, 256 * 256)
    assert len(kept) == 1 and next(iter(kept.values())).endswith(": written anyway")
    values = {n: np.random.default_rng(i).standard_normal((256, 8)).astype(f32) for i, n in enumerate("qkv")}
    y, residuals = module.forward(values)
    want = interp.run(gradc.differentiate(graph, ["q", "k", "v"]), {**values, "d.y": y}, precision="f64")
    for name, gradient in module.backward(residuals, y).items():
        np.testing.assert_allclose(gradient, want[f"d.{name}"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("device", [CPU, gpu_of("sm_90")], ids=["cpu", "sm_90"])
@pytest.mark.parametrize("fuse", [True, False])
def test_what_is_written_is_what_the_schedule_gives_memory(graph: gradc.Graph, device: Device, fuse: bool) -> None:
    tidy = gradc.compile(graph, target="numpy").stages["tidy.fold"].result
    assert isinstance(tidy, gradc.Graph)
    program = schedule(tidy, fuse=fuse, device=device)
    buffers = [b.type for b in program.buffers if b.kind in ("temp", "output") and not b.alias]
    found = written(tidy, fuse=fuse, device=device)
    assert sorted(map(str, buffers)) == sorted(str(node.type) for node in found)


def test_what_the_next_layer_reads_is_kept_rather_than_what_it_is_made_of():
    """A relu's result serves its own gradient and the next weight's: the product before it is not kept, and nothing is
    computed again.
    """

    def layers(x, w1, w2):
        return ops.relu(x @ w1) @ w2

    graph = gradc.trace(layers, x="f32[64,32]", w1="f32[32,128]", w2="f32[128,16]")
    module = gradc.compile(graph, wrt=["x", "w1", "w2"], target="cpu")
    assert [r.node.op.name for r in module.residuals if not r.borrowed] == ["relu"]
    assert not any(s.op == "relu" for k in module.backward.program.kernels for s in k.body)
