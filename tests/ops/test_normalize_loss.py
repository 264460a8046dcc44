"""layer_norm, rms_norm, cross_entropy and mse_loss against torch."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import registry

from gradc import compile as compile_module
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.errors import IndexOutOfRange, NotDifferentiable, TypeRuleError
from gradc.ir.graph import Graph, input_node
from gradc.ir.node import Node
from gradc.ir.text import parse
from gradc.ir.types import parse_type
from gradc.trace import trace

torch = pytest.importorskip("torch")
F = torch.nn.functional

NAMES = ("layer_norm", "rms_norm", "cross_entropy", "mse_loss")
U32 = 2.0**-24
rng = np.random.default_rng(0)
Arrays = Mapping[str, np.ndarray]


@pytest.fixture(autouse=True)
def same_numbers_for_each_test() -> None:
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


def joint_of(fn: Callable[..., Node], arrays: Arrays, wrt: list[str]) -> Graph:
    return differentiate(trace(fn, **{k: registry.typeof(v) for k, v in arrays.items()}), wrt)


def torch_gradients(
    fn: Callable[..., torch.Tensor],
    arrays: Arrays,
    wrt: list[str],
    g: np.ndarray | None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, np.ndarray]:
    ts = {
        k: (
            torch.tensor(v.astype(np.float64)).to(dtype).requires_grad_(k in wrt)
            if v.dtype.kind not in "iu"
            else torch.tensor(v.astype(np.int64))
        )
        for k, v in arrays.items()
    }
    y = fn(**ts)
    y.backward(torch.ones_like(y) if g is None else torch.tensor(g).to(dtype))
    return {
        "y": y.detach().numpy(),
        **{f"d.{k}": np.zeros(ts[k].shape) if ts[k].grad is None else ts[k].grad.numpy() for k in wrt},
    }  # type: ignore[union-attr]


def close(got: np.ndarray, want: np.ndarray, rtol: float = 1e-10) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rtol, atol=rtol)


def check(fn: Callable[..., Node], reference: Callable[..., torch.Tensor], arrays: Arrays, wrt: list[str]) -> None:
    """Value and gradients in f64."""
    joint = joint_of(fn, arrays, wrt)
    assert parse(str(joint)) == joint
    shape = joint.output("y").type.concrete({})
    g = rng.standard_normal(shape)
    out = interp.run(joint, {**arrays, "d.y": g})
    for key, want in torch_gradients(reference, arrays, wrt, g).items():
        close(out[key], want)


def error(got: Any, exact: np.ndarray) -> float:
    """The largest error relative to the largest value."""
    return float(np.abs(np.asarray(got, np.float64) - exact).max(initial=0) / max(np.abs(exact).max(initial=0), 1e-30))


def check_f32(fn: Callable[..., Node], reference: Callable[..., torch.Tensor], arrays: Arrays, wrt: list[str]) -> None:
    """In f32, an error of at most 4 units or torch's own."""
    narrow = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in arrays.items()}
    joint = joint_of(fn, narrow, wrt)
    g = rng.standard_normal(joint.output("y").type.concrete({})).astype(np.float32)
    out = interp.run(joint, {**narrow, "d.y": g})
    exact, peer = torch_gradients(reference, narrow, wrt, g), torch_gradients(reference, narrow, wrt, g, torch.float32)
    for key, want in exact.items():
        assert error(out[key], want) <= max(4 * U32, error(peer[key], want)), key


def second_order(
    fn: Callable[..., Node], reference: Callable[..., torch.Tensor], arrays: Arrays, wrt: list[str]
) -> None:
    """The gradient of a random combination of value and gradients, cotangent included."""
    first = joint_of(fn, arrays, wrt)
    names = {"d.y": "g"}
    new: dict[Node, Node] = {
        n: input_node(names.get(first.input_name(n), first.input_name(n)), n.type) for n in first.inputs
    }
    for node in first.nodes:
        if node not in new:
            new[node] = node.op.apply(tuple(new[o] for o in node.operands), node.attrs)
    again = Graph(
        "first",
        tuple(new[n] for n in first.inputs),
        tuple((k.replace("d.", "grad_"), new[n]) for k, n in first.outputs),
    )
    second = differentiate(again, [*wrt, "g"])
    g = rng.standard_normal(first.output("y").type.concrete({}))
    mix = {k: rng.standard_normal(n.type.concrete({})) for k, n in again.outputs}
    out = interp.run(second, {**arrays, "g": g, **{f"d.{k}": v for k, v in mix.items()}})
    ts = {k: torch.tensor(v).requires_grad_(k in wrt) for k, v in arrays.items()}
    cotangent = torch.tensor(g).requires_grad_()
    y = reference(**ts)
    values = {
        "y": y,
        **{
            f"grad_{k}": t
            for k, t in zip(
                wrt, torch.autograd.grad(y, [ts[k] for k in wrt], cotangent, create_graph=True), strict=True
            )
        },
    }
    total = torch.stack([(torch.tensor(mix[k]) * v).sum() for k, v in values.items()]).sum()
    for key, want in zip((*wrt, "g"), torch.autograd.grad(total, [*(ts[k] for k in wrt), cotangent]), strict=True):
        close(out[f"d.{key}"], want.numpy(), 1e-9)


def count(graph: Graph, op: str) -> int:
    return sum(n.op.name == op for n in graph.nodes)


# -- layer_norm, rms_norm ----------------------------------------------------------------------------------------------

SHAPES = [
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((3, 5), (3, 5)),
    ((2, 3, 5), (5,)),
    ((2, 3, 5), (3, 5)),
    ((2, 3, 4, 5), (4, 5)),
    ((0, 5), (5,)),
    ((3, 1), (1,)),
]


def norm_case(
    kind: str, shape: tuple, sizes: tuple, parameters: int, eps: float | None
) -> tuple[Any, Any, dict[str, np.ndarray], list[str]]:
    names = ["x", "w", "b"][: parameters + 1]
    arrays = {"x": rng.standard_normal(shape) * 2 + 1, "w": rng.standard_normal(sizes), "b": rng.standard_normal(sizes)}
    arrays = {k: arrays[k] for k in names}
    if kind == "layer_norm":
        extra = {} if eps is None else {"eps": eps}
        return (
            lambda x, w=None, b=None: ops.layer_norm(x, sizes, w, b, **extra),
            lambda x, w=None, b=None: F.layer_norm(x, sizes, w, b, **extra),
            arrays,
            names,
        )
    return (
        lambda x, w=None: ops.rms_norm(x, sizes, w, eps),
        lambda x, w=None: F.rms_norm(x, sizes, w, eps),
        arrays,
        names,
    )


CASES = [
    (k, *s, p, e)
    for k in ("layer_norm", "rms_norm")
    for s in SHAPES
    for p in ((0, 1, 2) if k == "layer_norm" else (0, 1))
    for e in (None, 0.1)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms(case: tuple) -> None:
    check(*norm_case(*case))


@pytest.mark.parametrize("case", [c for c in CASES if 0 not in c[1] and c[1] != (3, 1)], ids=str)
def test_norms_second_order(case: tuple) -> None:
    second_order(*norm_case(*case))


@pytest.mark.parametrize(
    "case",
    [
        ("layer_norm", (33, 200), (200,), 2, None),
        ("layer_norm", (8, 4, 64), (4, 64), 1, None),
        ("rms_norm", (33, 200), (200,), 1, None),
        ("rms_norm", (8, 4, 64), (64,), 0, None),
    ],
    ids=str,
)
def test_norms_f32(case: tuple) -> None:
    check_f32(*norm_case(*case))


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_norms_of_16_bit_floats_are_those_of_f32_rounded_once(kind: str, dtype: Any) -> None:
    fn, _, arrays, names = norm_case(kind, (7, 300), (300,), 2 if kind == "layer_norm" else 1, None)
    narrow = {k: v.astype(dtype) for k, v in arrays.items()}
    wide = {k: v.astype(np.float32) for k, v in narrow.items()}
    g = rng.standard_normal((7, 300)).astype(dtype)
    got = interp.run(joint_of(fn, narrow, names), {**narrow, "d.y": g})
    want = interp.run(joint_of(fn, wide, names), {**wide, "d.y": g.astype(np.float32)})
    for key in want:
        assert np.array_equal(got[key], want[key].astype(dtype))
    node = next(n for n in registry.opened(joint_of(fn, narrow, names)).nodes if n.op.name == "rsqrt")
    assert node.dtype.name == "f32"


def test_eps_of_rms_norm_is_that_of_the_compute_dtype() -> None:
    for name, eps in (("f64", 2.0**-52), ("f32", 2.0**-23), ("bf16", 2.0**-23), ("f16", 2.0**-23)):
        assert ops.rms_norm(input_node("x", parse_type(f"{name}[3]")), 3).attrs["eps"] == eps


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_one_rstd(kind: str) -> None:
    """Forward and backward share the statistics (contracts 6)."""
    fn, _, _, names = norm_case(kind, (3, 5), (5,), 2 if kind == "layer_norm" else 1, None)
    types = {"x": "bf16[N,5]", "w": "bf16[5]", "b": "bf16[5]"}
    joint = registry.opened(differentiate(trace(fn, **{k: types[k] for k in names}), names))
    assert count(joint, "rsqrt") == 1
    statistics = [n for n in joint.nodes if n.op.name == "sum" and n.shape == joint.input("x").shape[:1]]
    assert len(statistics) == (
        5 if kind == "layer_norm" else 2
    )  # mean, what it missed, variance; mean(h), mean(h xhat)


# -- cross_entropy -----------------------------------------------------------------------------------------------------

LOGITS = [(5,), (4, 5), (2, 5, 3), (2, 5, 3, 2), (0, 5), (1, 1)]
REDUCTIONS = ("none", "mean", "sum")


def entropy_case(
    shape: tuple,
    probabilities: bool,
    weighted: bool,
    ignored: bool,
    reduction: str,
    smoothing: float,
    index: str = "int64",
) -> tuple[Any, Any, dict[str, np.ndarray], list[str]]:
    axis = 0 if len(shape) == 1 else 1
    c, positions = shape[axis], (*shape[:axis], *shape[axis + 1 :])
    arrays = {
        "x": rng.standard_normal(shape) * 3,
        "t": rng.uniform(0, 1, shape) if probabilities else np.asarray(rng.integers(0, c, positions)).astype(index),
    }
    attrs: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if ignored and not probabilities:
        attrs["ignore_index"] = -1 if index != "uint8" else 1
        if len(positions) and positions[0]:
            arrays["t"][0] = attrs["ignore_index"]
    wrt = ["x", "t"] if probabilities else ["x"]
    if weighted:
        arrays["w"] = rng.uniform(0.2, 2, c)
        wrt += ["w"] if probabilities else []
    fn = lambda x, t, w=None: ops.cross_entropy(x, t, w, **attrs)
    return fn, lambda x, t, w=None: F.cross_entropy(x, t, w, **attrs), arrays, wrt


OPTIONS = [*itertools.product(LOGITS, (False, True), (False, True), (False, True), REDUCTIONS, (0.0, 0.2))]
OPTIONS = [o for o in OPTIONS if not (o[1] and o[3])]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_cross_entropy(case: tuple) -> None:
    check(*entropy_case(*case))


@pytest.mark.parametrize("case", [o for o in OPTIONS if 0 not in o[0] and o[0] != (1, 1)], ids=str)
def test_cross_entropy_second_order(case: tuple) -> None:
    second_order(*entropy_case(*case))


@pytest.mark.parametrize("index", ["int8", "int16", "int32", "uint8"])
def test_cross_entropy_index_dtypes(index: str) -> None:
    check(*entropy_case((6, 5), False, True, True, "mean", 0.1, index))
    check(*entropy_case((6, 5), False, False, False, "mean", 0.0, index))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 5, 3)])
def test_cross_entropy_weight_gradient_of_indices(shape: tuple, reduction: str, smoothing: float) -> None:
    """torch has none; written out with a one-hot it has."""
    fn, _, arrays, _ = entropy_case(shape, False, True, len(shape) > 1, reduction, smoothing)
    axis = 0 if len(shape) == 1 else 1

    def reference(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = t >= 0
        hot = torch.movedim(F.one_hot(t.clamp(min=0), shape[axis]).double(), -1, axis)
        line = w.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        each = -((hot * (1 - smoothing) + smoothing / shape[axis]) * line * x.log_softmax(axis)).sum(axis) * kept
        return (
            each
            if reduction == "none"
            else each.sum() / ((hot * line).sum(axis) * kept).sum()
            if reduction == "mean"
            else each.sum()
        )

    check(fn, reference, arrays, ["x", "w"])


@pytest.mark.parametrize(
    "case",
    [
        ((64, 300), False, False, True, "mean", 0.0),
        ((64, 300), False, True, True, "sum", 0.1),
        ((8, 30, 20), True, True, False, "none", 0.1),
        ((8, 30, 20), False, True, False, "mean", 0.0),
    ],
    ids=str,
)
def test_cross_entropy_f32(case: tuple) -> None:
    check_f32(*entropy_case(*case))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("probabilities", [False, True])
def test_cross_entropy_of_16_bit_floats_is_that_of_f32_rounded_once(dtype: Any, probabilities: bool) -> None:
    fn, _, arrays, wrt = entropy_case((1000, 7), probabilities, True, True, "mean", 0.1)
    narrow = {k: v.astype(dtype) if v.dtype.kind == "f" else v for k, v in arrays.items()}
    wide = {k: v.astype(np.float32) if v.dtype == dtype else v for k, v in narrow.items()}
    got = interp.run(joint_of(fn, narrow, wrt), {**narrow, "d.y": np.ones((), dtype)})
    want = interp.run(joint_of(fn, wide, wrt), {**wide, "d.y": np.ones((), np.float32)})
    for key in want:
        assert np.array_equal(got[key], want[key].astype(dtype)), key


def test_everything_ignored() -> None:
    arrays = {"x": rng.standard_normal((3, 4)), "t": np.full(3, -100)}
    for reduction, want in (("mean", np.nan), ("sum", 0.0), ("none", np.zeros(3))):
        joint = joint_of(lambda x, t, r=reduction: ops.cross_entropy(x, t, reduction=r), arrays, ["x"])
        out = interp.run(joint, {**arrays, "d.y": np.ones(np.shape(want))})
        assert np.array_equal(out["y"], want, equal_nan=True)
        assert np.array_equal(out["d.x"], np.zeros((3, 4)))


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2])
@pytest.mark.parametrize("targets", [[1, 1, 1], [1, -100, 1], [-100, -100, -100]], ids=str)
def test_weights_of_0_alone(targets: list[int], smoothing: float | None) -> None:
    """Their mean is a NaN, and so is what their positions have of its gradient; what is ignored has none, as in eager
    mode.
    """
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    arrays = {"x": rng.standard_normal((3, 4)), "t": np.array(targets), "w": np.array([0.5, 0, 2, 1])}
    ours, name = (ops.nll_loss, "nll_loss") if smoothing is None else (ops.cross_entropy, "cross_entropy")
    x = torch.tensor(arrays["x"], requires_grad=True)
    more = {"label_smoothing": smoothing} if smoothing else {}
    want = getattr(functional, name)(x, torch.tensor(arrays["t"]), torch.tensor(arrays["w"]), **more)
    want.backward()
    graph = trace(
        lambda input, target, weight: ours(input, target, weight, **more),
        input="f64[N,4]",
        target="i64[N]",
        weight="f64[4]",
    )
    given = {"input": arrays["x"], "target": arrays["t"], "weight": arrays["w"]}
    for target in ("numpy", "cpu"):
        value, gradients = compile_module(graph, wrt=["input"], target=target).value_and_grad(given)
        assert np.isnan(value) and np.isnan(want.item())
        assert np.array_equal(gradients["input"], x.grad.numpy(), equal_nan=True), target


def test_an_ignored_row_is_never_read() -> None:
    """What stands in it, NaN too, does not reach the loss or the gradient."""
    x = rng.standard_normal((3, 4))
    x[1] = np.nan
    arrays = {"x": x, "t": np.array([0, -100, 3])}
    out = interp.run(joint_of(lambda x, t: ops.cross_entropy(x, t), arrays, ["x"]), {**arrays, "d.y": np.ones(())})
    want = torch_gradients(lambda x, t: F.cross_entropy(x, t), {"x": x[[0, 2]], "t": np.array([0, 3])}, ["x"], None)
    close(out["y"], want["y"])
    close(out["d.x"][[0, 2]], want["d.x"])
    assert not out["d.x"][1].any()


@pytest.mark.parametrize("bad", [5, -1, 2**31, -(2**62)])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_index_outside_the_classes(bad: int, weighted: bool) -> None:
    arrays = {"x": np.zeros((3, 5)), "t": np.array([0, -100, bad])} | ({"w": np.ones(5)} if weighted else {})
    graph = trace(lambda x, t, w=None: ops.cross_entropy(x, t, w), **{k: registry.typeof(v) for k, v in arrays.items()})
    with pytest.raises(IndexOutOfRange) as caught:
        interp.run(graph, arrays)
    assert caught.value.value == bad and caught.value.position == 2 and caught.value.bound == 5


def test_large_logits_and_impossible_classes() -> None:
    arrays = {"x": np.array([[1e30, 0, -1e30], [1000, 999, -np.inf]]), "t": np.array([0, 1])}
    fn, reference = (lambda x, t: ops.cross_entropy(x, t)), (lambda x, t: F.cross_entropy(x, t))
    check(fn, reference, arrays, ["x"])
    arrays["t"] = np.array([2, 2])
    out = interp.run(trace(fn, x="f64[2,3]", t="i64[2]"), arrays)
    assert out["y"] == np.inf


def test_the_gradient_is_no_scatter() -> None:
    joint = registry.opened(differentiate(trace(lambda x, t: ops.cross_entropy(x, t), x="f32[N,V]", t="i64[N]"), ["x"]))
    names = [n.op.name for n in joint.nodes]
    assert not {"scatter_add", "scatter_add_along_axis"} & set(names)
    assert names.count("exp") == 1 and names.count("amax") == 1 and names.count("take_along_axis") == 1
    (big,) = [n for n in joint.nodes if n.op.name == "take_along_axis"]
    assert big.operands[0] is joint.input("x")  # the logits themselves are read, not their logarithm


def test_the_target_has_no_gradient() -> None:
    graph = trace(lambda x, t: ops.cross_entropy(x, t), x="f32[3,4]", t="i64[3]")
    with pytest.raises(NotDifferentiable, match="cross_entropy"):
        differentiate(graph, ["t"])


# -- mse_loss ----------------------------------------------------------------------------------------------------------

PAIRS = [
    ((), ()),
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((2, 1, 4), (3, 4)),
    ((3, 1), (1, 4)),
    ((0, 3), (0, 3)),
    ((2, 3, 4, 2), (2, 3, 4, 2)),
]


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore::RuntimeWarning")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_mse_loss(pair: tuple, reduction: str) -> None:
    arrays = {"x": rng.standard_normal(pair[0]), "t": rng.standard_normal(pair[1])}
    arrays = {k: np.asarray(v) for k, v in arrays.items()}
    case = (
        (lambda x, t: ops.mse_loss(x, t, reduction=reduction)),
        (lambda x, t: F.mse_loss(x, t, reduction=reduction)),
        arrays,
        ["x", "t"],
    )
    check(*case)
    if 0 not in pair[0]:
        second_order(*case)


def test_mse_loss_f32() -> None:
    check_f32(
        lambda x, t: ops.mse_loss(x, t),
        lambda x, t: F.mse_loss(x, t),
        {"x": rng.standard_normal((50, 60)), "t": rng.standard_normal((50, 60))},
        ["x", "t"],
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_mse_loss_of_16_bit_floats_is_summed_in_f32(dtype: Any) -> None:
    arrays = {"x": np.ones(5000, dtype), "t": np.zeros(5000, dtype)}
    assert interp.run(
        trace(lambda x, t: ops.mse_loss(x, t, reduction="sum"), **{k: registry.typeof(v) for k, v in arrays.items()}),
        arrays,
    )["y"] == np.asarray(5000, dtype)


# -- the records' own samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(registry.cases(names=NAMES)), ids=str)
def test_samples(case: registry.Case) -> None:
    assert parse(str(case.graph)) == case.graph
    joint = differentiate(case.graph, case.floats)
    for dims in case.bindings():
        y = joint.output("y")
        out = interp.run(joint, {**case.arrays(dims), "d.y": np.ones(y.type.concrete(dims), y.dtype.np)}, dims=dims)
        for name, node in joint.outputs:
            assert out[name].shape == node.type.concrete(dims) and out[name].dtype == node.dtype.np


@pytest.mark.parametrize(
    "op,bad", [(ops.REGISTRY[n], b) for n in NAMES for b in ops.REGISTRY[n].bad], ids=lambda v: getattr(v, "match", "")
)
def test_refused(op: Any, bad: Any) -> None:
    operands = [input_node(f"x{k}", parse_type(t)) for k, t in enumerate(bad.operands)]
    with pytest.raises(TypeRuleError) as caught:
        registry.call(op, operands, bad.attrs)
    assert bad.match in str(caught.value)
