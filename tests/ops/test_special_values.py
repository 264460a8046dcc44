"""Values and gradients where numbers are extreme or sums long, on every target: torch in f32 and f64 is the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import interp, ops
from gradc.ir.types import DTYPES, parse_type
from gradc.ops.elementwise.pointwise import convert
from gradc.passes.graph.decompose import decompose
from gradc.passes.graph.simplify import simplify
from gradc.passes.graph.sink_dequant import sink_dequant
from gradc.runtime.torch_private import SHARES_TIES, release
from gradc.verify.exact.evaluate import evaluate

torch = pytest.importorskip("torch")
import torch_oracles  # noqa: E402

pytestmark = pytest.mark.optimised
F = torch.nn.functional

TARGETS = ("numpy", "cpu", "cuda-sim")
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
every_target = pytest.mark.parametrize("target", TARGETS)
Array = np.ndarray[Any, Any]


def ours(function: Callable[..., Any], target: str, g: Array, **given: Array) -> tuple[Array, dict[str, Array]]:
    """Value and gradients by a compiled module."""
    graph = gradc.trace(function, **{k: str(gradc.typeof(v)) for k, v in given.items()})
    module = gradc.compile(graph, wrt=[k for k, v in given.items() if v.dtype.kind == "f"], target=target)
    y, residuals = module.forward(given)
    return np.asarray(y), {k: np.asarray(v) for k, v in dict(module.backward(residuals, g)).items()}


def torchs(function: Callable[..., Any], g: Array, dtype: Any = None, **given: Array) -> tuple[Array, dict[str, Array]]:
    tensors = {k: torch.from_numpy(v.copy()) for k, v in given.items()}
    leaves = {
        k: (t if dtype is None else t.to(dtype)).requires_grad_() for k, t in tensors.items() if t.is_floating_point()
    }
    y = function(**{**tensors, **leaves})
    y.backward(torch.from_numpy(np.asarray(g)).to(y.dtype))
    return y.detach().numpy(), {k: t.grad.numpy() for k, t in leaves.items()}


LARGEST: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (lambda x: ops.softmax(x, axis=-1), lambda x: torch.softmax(x, -1)),
    "softmax of the middle": (
        lambda x: ops.softmax(ops.reshape(x, (*x.shape, 1)), axis=1),
        lambda x: torch.softmax(x, 1)[..., None],
    ),
    "logsumexp": (lambda x: ops.logsumexp(x, axis=-1), lambda x: torch.logsumexp(x, -1)),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, ops.argmax(x, axis=-1), reduction="none"),
        lambda x: F.cross_entropy(x, x.argmax(-1), reduction="none"),
    ),
    "mean of cross_entropy": (
        lambda x: ops.cross_entropy(x, ops.argmax(x, axis=-1)),
        lambda x: F.cross_entropy(x, x.argmax(-1)),
    ),
    "mse_loss": (lambda x: ops.mse_loss(x, x * 0.5), lambda x: F.mse_loss(x, x * 0.5)),
    "var": (lambda x: ops.var(x, axis=-1), lambda x: torch.var(x, -1, correction=0)),
    "silu": (lambda x: ops.silu(x), lambda x: F.silu(x)),
    "gelu": (lambda x: ops.gelu(x), lambda x: F.gelu(x)),
    "gelu, tanh form": (lambda x: ops.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
}


@long_tests.values
@every_target
@pytest.mark.parametrize("name", LARGEST)
def test_gradients_of_the_largest_cotangents_are_finite_where_torchs_are(name: str, target: str) -> None:
    function, reference = LARGEST[name]
    for columns, scale in ((1, 1.0), (5, 1.0), (33, 10.0)):
        rng = np.random.default_rng(columns)
        x = (rng.standard_normal((6, columns)) * scale).astype(np.float32)
        shape = reference(torch.from_numpy(x)).shape
        g = np.where(rng.random(shape) < 0.5, -3e38, 3e38).astype(np.float32)
        (_, got), (_, peer), (_, exact) = (
            ours(function, target, g, x=x),
            torchs(reference, g, x=x),
            torchs(reference, g, torch.float64, x=x),
        )
        finite = np.isfinite(peer["x"])
        assert np.isfinite(got["x"][finite]).all()
        assert not np.isnan(got["x"]).any()
        scale = max(float(np.abs(exact["x"][finite]).max(initial=0)), 1.0)
        error, allowed = (
            float(np.abs(v[finite].astype(np.float64) - exact["x"][finite]).max(initial=0)) / scale
            for v in (got["x"], peer["x"])
        )
        assert error <= max(allowed, 4 * UNIT["float32"])


@every_target
def test_second_derivative_of_gelu_where_a_square_overflows(target: str) -> None:
    """0, as in f64."""
    x = np.array([1e20, -1e20, 3e38, 3.0], np.float32)
    _, got = ours(lambda x: ops.gelu_derivative(x), target, np.ones(4, np.float32), x=x)
    wide = x.astype(np.float64)
    want = np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi) * (2 - wide * wide)
    np.testing.assert_allclose(got["x"], want, rtol=1e-6, atol=0)


@every_target
@pytest.mark.parametrize("name", ["softmax", "softmax of the middle"])
def test_no_finite_cotangent_of_softmax_overflows(name: str, target: str) -> None:
    """torch's does: of two cotangents of opposite sign the difference is infinite."""
    rng = np.random.default_rng(0)
    x, g = (
        rng.standard_normal((20, 9)).astype(np.float32),
        np.where(rng.random((20, 9)) < 0.5, -1, 1) * np.finfo(np.float32).max,
    )
    (_, got), (_, exact) = (
        ours(LARGEST[name][0], target, g.reshape(g.shape if name == "softmax" else (20, 9, 1)).astype(np.float32), x=x),
        torchs(LARGEST["softmax"][1], g, torch.float64, x=x),
    )
    np.testing.assert_allclose(got["x"], exact["x"], rtol=0, atol=float(np.abs(exact["x"]).max()) * 8 * UNIT["float32"])


@every_target
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_an_infinite_sum_stays_infinite(dtype: str, target: str) -> None:
    """What an addition rounds away is kept beside a sum; beside infinity that is NaN."""
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x, axis=1), x=f"{dtype}[N,D]"), target=target)
    for columns in (5, 3000, 20_000):
        x = np.ones((4, columns), DTYPES[dtype].np)
        x[0, columns // 2], x[1, -1], x[2, 0], x[3, 0], x[3, -1] = np.inf, -np.inf, np.inf, np.inf, -np.inf
        np.testing.assert_array_equal(module(x=x), [np.inf, -np.inf, np.inf, np.nan])


@every_target
@pytest.mark.parametrize("top", [2, 5, 10, 15, 20])
def test_gradient_of_a_softmax_that_is_nearly_one(top: int, target: str) -> None:
    """The gradient of such a row is small, a difference of cotangents that are not: torch's, in f32, has no right digit
    from 15 on.
    """
    rng = np.random.default_rng(top)
    x, g = (rng.standard_normal((64, 9)).astype(np.float32) for _ in range(2))
    x[:, 3] += top
    (_, got), (_, exact) = (
        ours(LARGEST["softmax"][0], target, g, x=x),
        torchs(LARGEST["softmax"][1], g, torch.float64, x=x),
    )
    error = np.abs(got["x"] - exact["x"]).max(1) / np.abs(exact["x"]).max(1)
    assert error.max() <= 64 * UNIT["float32"]


@every_target
@pytest.mark.parametrize("approximate", ["silu", "none", "tanh"])
def test_slopes_far_out(approximate: str, target: str) -> None:
    """The slope of silu and gelu is 0 or 1 there, whatever x squared, cubed or times a cotangent is."""
    function = (lambda x: ops.silu(x)) if approximate == "silu" else (lambda x: ops.gelu(x, approximate=approximate))
    x = np.array([-3.4e38, -1e30, -1e20, -1e13, -1e6, -100, 100, 1e6, 1e13, 1e20, 1e30, 3.4e38], np.float32)
    for scale in (1.0, 3e38):
        _, got = ours(function, target, np.full(12, scale, np.float32), x=x)
        np.testing.assert_allclose(got["x"] / np.float32(scale), np.repeat([0.0, 1.0], 6), atol=1e-30)


@every_target
def test_logsumexp_of_infinities(target: str) -> None:
    inf = np.inf
    x = np.array([[1, inf, 2], [-inf, 0, 1], [inf, inf, -inf], [-inf, -inf, -inf]], np.float32)
    g = np.array([2, 3, 5, 7], np.float32)
    function, reference = LARGEST["logsumexp"]
    (y, got), (want, peer) = ours(function, target, g, x=x), torchs(reference, g, x=x)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_allclose(got["x"][:3], peer["x"][:3], rtol=1e-6)
    np.testing.assert_array_equal(got["x"][3], 0)  # torch: NaN


LONG: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": LARGEST["softmax"],
    "log_softmax": (lambda x: ops.log_softmax(x, axis=-1), lambda x: torch.log_softmax(x, -1)),
    "sum": (lambda x: ops.sum(x, axis=-1), lambda x: x.sum(-1)),
    "layer_norm": (lambda x: ops.layer_norm(x, (x.shape[-1],)), lambda x: F.layer_norm(x, (x.shape[-1],))),
}


def _exact(name: str, x: Array) -> Array:
    """In numbers of 64 bits or more after the point."""
    wide = x.astype(np.longdouble)
    if name == "sum":
        return wide.sum(-1)
    if name == "layer_norm":
        centred = wide - wide.mean(-1, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.longdouble(1e-5))
    shifted = wide - wide.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True)
    return np.exp(shifted) / total if name == "softmax" else shifted - np.log(total)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider number to compare with")
@every_target
@pytest.mark.parametrize("name", LONG)
def test_long_rows_of_f64_are_added_up_as_exactly_as_torch_does(name: str, target: str) -> None:
    function, reference = LONG[name]
    module = gradc.compile(gradc.trace(function, x="f64[N,D]"), target=target)
    for columns in (300, 1000, 5000):
        for k, x in enumerate(
            (
                np.full((1, columns), 0.1),
                np.full((1, columns), 0.3),
                np.random.default_rng(columns).random((3, columns)),
            )
        ):
            if name == "layer_norm" and k < 2:
                continue  # a row of one value has no variance
            exact = _exact(name, x)

            def error(value: Any, exact: Array = exact) -> float:
                return (
                    float(np.abs(np.asarray(value).astype(np.longdouble) - exact).max() / np.abs(exact).max())
                    / UNIT["float64"]
                )

            assert error(module.forward.run(x=x)["y"]) <= max(4, error(reference(torch.from_numpy(x)))), (columns, k)


@pytest.mark.parametrize("rest", [1.0, 2.0**-30])
def test_blocks_of_a_long_row_that_cancel_leave_the_small_ones(rest: float) -> None:
    """What an addition of f64 block sums rounds away is kept, whichever of the two is the larger (Knuth's TwoSum, not
    Dekker's).
    """
    module = gradc.compile(gradc.trace(lambda x: ops.sum(x, axis=-1), x="f64[N,D]"), target="cpu")
    x = np.zeros((2, 8192))
    x[:, ::2048] = [[rest, 2.0**80, rest, -(2.0**80)], [2.0**80, rest, -(2.0**80), rest]]
    assert module.forward.run(x=x)["y"].tolist() == [math.fsum(row) for row in x]


# -- ties, zeros and bounds --------------------------------------------------------------------------------------------

KINKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "maximum": (lambda a, b: ops.maximum(a, b), lambda a, b: torch.maximum(a, b)),
    "minimum": (lambda a, b: ops.minimum(a, b), lambda a, b: torch.minimum(a, b)),
    "clamp up to 2.13": (
        lambda a, b: ops.clamp(a, min=-1.0, max=1.0) * b,
        lambda a, b: torch_oracles.clamp(a, -torch.ones_like(a), torch.ones_like(a)) * b,
    ),
    "relu": (lambda a, b: ops.relu(a) * b, lambda a, b: F.relu(a) * b),
    "abs": (lambda a, b: ops.abs(a) * b, lambda a, b: a.abs() * b),
    "pow": (lambda a, b: ops.pow(ops.abs(a), ops.abs(b)), lambda a, b: a.abs() ** b.abs()),
    "mod": (lambda a, b: ops.mod(a, b * 2.0 + 5.0), lambda a, b: a.remainder(b * 2 + 5)),
    "prod": (lambda a, b: ops.prod(a, axis=1) * ops.sum(b, axis=1), lambda a, b: a.prod(1) * b.sum(1)),
    "amax": (lambda a, b: ops.amax(a, axis=1) * ops.amax(b, axis=0), lambda a, b: a.amax(1) * b.amax(0)),
    "amin": (lambda a, b: ops.amin(a, axis=0) * ops.amin(b, axis=1), lambda a, b: a.amin(0) * b.amin(1)),
    "max": (lambda a, b: ops.max(a, axis=1) * ops.max(b, axis=0), lambda a, b: a.max(1).values * b.max(0).values),
    "min": (lambda a, b: ops.min(a, axis=0) * ops.min(b, axis=1), lambda a, b: a.min(0).values * b.min(1).values),
}
if release() < SHARES_TIES:
    KINKS["clamp"] = (KINKS["clamp up to 2.13"][0], lambda a, b: a.clamp(-1, 1) * b)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("name", KINKS)
def test_gradients_where_functions_have_kinks(name: str, target: str) -> None:
    """Every pair of small whole numbers, so every tie, zero and bound: each op's choice is torch's."""
    function, reference = KINKS[name]
    line = np.arange(-2.0, 3.0)
    a, b = (np.ascontiguousarray(x) for x in np.meshgrid(line, line))
    for seed in range(3):  # in other orders: who is the first of equals, and how many zeros a row has
        rng = np.random.default_rng(seed)
        if seed:
            a, b = (rng.permutation(x.ravel()).reshape(5, 5) for x in (a, b))
        g = rng.standard_normal(reference(torch.from_numpy(a), torch.from_numpy(b)).shape)
        (y, got), (want, peer) = ours(function, target, g, a=a, b=b), torchs(reference, g, a=a, b=b)
        np.testing.assert_allclose(y, want, rtol=1e-14)
        for operand in ("a", "b"):
            np.testing.assert_allclose(got[operand], peer[operand], rtol=1e-13, atol=1e-13, err_msg=f"d {operand}")


# -- rewrites that keep bits -------------------------------------------------------------------------------------------

FLOATS, INTEGERS = ("f8e4m3", "f8e5m2", "f16", "bf16", "f32", "f64"), ("i8", "u8", "i16", "i32", "i64")
REWRITTEN: dict[str, Callable[..., Any]] = {
    "x * 1": lambda x, m: x * 1.0,
    "1 * x": lambda x, m: 1.0 * x,
    "x / 1": lambda x, m: x / 1.0,
    "-(-x)": lambda x, m: ops.neg(ops.neg(x)),
    "x + 0": lambda x, m: x + 0.0,
    "0 + x": lambda x, m: 0.0 + x,
    "x - 0": lambda x, m: x - 0.0,
    "x + -0": lambda x, m: x + -0.0,
    "x - -0": lambda x, m: x - -0.0,
    "one of the same": lambda x, m: ops.where(m, x, x),
    "under a mask twice": lambda x, m: ops.where(m, ops.where(m, x, x * 2.0), x * 3.0),
    "a mask of a constant": (
        lambda x, m: (
            ops.where(ops.constant(value=(True,), dtype="bool"), x, x * 2.0)
            + ops.where(ops.constant(value=(False,), dtype="bool"), x * 2.0, x)
        )
    ),
}


def _extreme(dtype: str) -> Array:
    """Zeros of both signs, subnormals, halves and neighbours of 1, the largest of every narrower type and what is
    beyond, infinities, NaN.
    """
    if dtype in INTEGERS:
        return np.array(
            [-(2**40), -(2**31), -(2**15), -129, -128, -1, 0, 1, 127, 128, 255, 256, 2**24 + 1, 2**31, 2**40]
        ).astype(DTYPES[dtype].np)
    positive = [
        0.0,
        2.0**-149,
        2.0**-133,
        2.0**-24,
        2.0**-14,
        1 / 3,
        1.0,
        1 + 2.0**-8,
        1 + 2.0**-23,
        448.0,
        464.0,
        57344.0,
        65504.0,
        65520.0,
        1e5,
        3e38,
        1e300,
        np.inf,
    ]
    return convert(np.array([*positive, *(-x for x in positive), np.nan]), DTYPES[dtype])


def _assert_keeps_bits(graph: gradc.Graph, given: dict[str, Array]) -> None:
    want, got = (interp.run(g, given)["y"] for g in (graph, simplify(graph, numerics="strict")))
    assert got.dtype == want.dtype
    number = want == want
    assert np.array_equal(number, got == got) and got[number].tobytes() == want[number].tobytes()


@pytest.mark.parametrize("name", REWRITTEN)
def test_strict_rewrites_keep_every_bit(name: str) -> None:
    for dtype in ("f16", "bf16", "f32", "f64"):
        x = _extreme(dtype)
        graph = gradc.trace(REWRITTEN[name], x=f"{dtype}[{x.size}]", m=f"bool[{x.size}]")
        for mask in (np.arange(x.size) % 2 == 0, np.arange(x.size) % 2 == 1):
            _assert_keeps_bits(graph, {"x": x, "m": mask})


@pytest.mark.parametrize("inner", [*FLOATS, *INTEGERS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts_that_are_dropped_lose_nothing(inner: str) -> None:
    """source -> inner -> outer, for every three types: only a cast through a type that holds all of the source's values
    may go.
    """
    for source in (*FLOATS, *INTEGERS):
        x = _extreme(source)
        for outer in (*FLOATS, *INTEGERS):
            graph = gradc.trace(lambda x, outer=outer: ops.cast(ops.cast(x, inner), outer), x=f"{source}[{x.size}]")
            _assert_keeps_bits(graph, {"x": x})


# -- what a mask keeps out ---------------------------------------------------------------------------------------------

MASKED: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "read outside": (lambda x, p: ops.gather_2d(ops.mean(x, axis=4), p, p), {"x": "f32[1,1,3,3,K]", "p": "i64[1,5]"}),
    "rows outside": (
        lambda x, p: ops.gather(ops.mean(x, axis=2), ops.reshape(p, (5,)), oob="skip"),
        {"x": "f32[3,2,K]", "p": "i64[1,5]"},
    ),
    "padded": (lambda x: ops.pad(ops.mean(x, axis=2), ((0, 0), (1, 0))), {"x": "f32[3,2,K]"}),
    "selected": (
        lambda x, p: ops.where(ops.ge(ops.reshape(p, (5,)), 1), ops.mean(x, axis=1), 0.0),
        {"x": "f32[5,K]", "p": "i64[1,5]"},
    ),
    "joined": (
        lambda x: ops.concat([ops.mean(x, axis=1), ops.constant(value=(0.0, 0.0), dtype="f32", shape=(2,))]),
        {"x": "f32[5,K]"},
    ),
    "summed over nothing": (
        lambda x, z: ops.sum(
            ops.broadcast_to(ops.reshape(ops.sum(x, axis=1), (5, 1)), (5, z.shape[0]))
            / ops.cast(ops.dim(size=z.shape[0]), "f32"),
            axis=1,
        ),
        {"x": "f32[5,3]", "z": "f32[K]"},
    ),
}


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("name", MASKED)
def test_a_division_stays_behind_a_mask(name: str, target: str) -> None:
    """A mean over nothing is NaN where it is read, and what is masked stays 0: with the licence to reassociate as
    without.
    """
    function, types = MASKED[name]
    graph = gradc.trace(function, **types)
    for count in (0, 3):
        given = {k: np.ones(parse_type(t).concrete({"K": count}), np.float32) for k, t in types.items()}
        if "p" in types:
            given["p"] = np.array([[0, 1, 2, -1, 7]])
        want = interp.run(graph, given)["y"]
        for numerics in ("real", "strict"):
            np.testing.assert_array_equal(
                gradc.compile(graph, target=target, numerics=numerics).forward.run(given)["y"], want
            )
        if not count and name != "summed over nothing":
            assert np.isnan(want).any() and (want == 0).any()


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_rows_that_nothing_is_added_to_stay_zero(target: str) -> None:
    """Whatever the scale of a row that is not read: one that was never initialised, for instance."""
    graph = gradc.trace(
        lambda i, s, u: ops.scatter_add(i, u * ops.reshape(ops.gather(s, i), (i.shape[0], 1)), size=4),
        i="i64[N]",
        s="f32[4]",
        u="f32[N,3]",
    )
    given = {
        "i": np.array([0, 2, 2, 0, 0, 0, 2, 2]),
        "s": np.array([2, np.nan, 3, np.inf], np.float32),
        "u": np.ones((8, 3), np.float32),
    }
    want = interp.run(graph, given)["y"]
    assert not np.isnan(want).any()
    module = gradc.compile(graph, target=target, hints={"N": 100_000})
    np.testing.assert_array_equal(module.forward.run(given)["y"], want)


def test_exact_algebra_sees_a_division_moved_past_a_mask() -> None:
    """1/0 is a tagged value there: the graph before the pass, the graph after it, and one with the division moved by
    hand.
    """
    graph = gradc.trace(*(MASKED["read outside"][:1]), **MASKED["read outside"][1])
    moved = gradc.trace(
        lambda x, p: ops.gather_2d(ops.sum(x, axis=4), p, p) / ops.cast(ops.dim(size=x.shape[4]), "f32"),
        **MASKED["read outside"][1],
    )
    given = {"x": np.ones((1, 1, 3, 3, 0), np.float32), "p": np.array([[0, 1, 2, -1, 7]])}

    def values(g: Any) -> tuple[Any, Any]:
        found = evaluate(g, given, licence="REAL")["y"]
        return found.value.tolist(), found.tag.tolist()

    prepared = decompose(graph)
    assert values(sink_dequant(prepared)) == values(graph)
    assert values(moved) != values(graph)


# -- ties of quantized values ------------------------------------------------------------------------------------------


class _FakeQuantized(torch.autograd.Function):
    """The learnable rule of one scale (Esser et al. 2020), in which equal codes are equal values."""

    @staticmethod
    def forward(context: Any, x: Any, s: Any) -> Any:  # type: ignore[override]
        q = (x / s).float().to(torch.float8_e5m2).to(x.dtype)
        context.save_for_backward(x, s, q)
        return q * s

    @staticmethod
    def backward(context: Any, g: Any) -> Any:  # type: ignore[override]
        x, s, q = context.saved_tensors
        inside = ((x / s).abs() <= 57344).to(x.dtype)
        return g * inside, 0.25 * (g * (q - inside * x / s)).sum()


@every_target
def test_ties_of_quantized_values_share_the_gradient(target: str) -> None:
    """Numbers that share a code tie, in the scatter and in maximum, whatever they were before."""
    graph = gradc.trace(
        lambda x, s, i, z: ops.maximum(
            ops.scatter_amax(i, ops.fake_quantize(x, s, dtype="f8e5m2", grad_factor=0.25), axis=0, size=3), z
        ),
        x="f32[12]",
        s="f32[]",
        i="i64[12]",
        z="f32[3]",
    )
    module = gradc.compile(graph, wrt=["x", "s", "z"], target=target)
    tied = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        s = np.float32(rng.uniform(0.05, 0.5))
        given = {
            "x": rng.choice([1.0, 1.02, 0.97, -0.5, 0.5, 0.52], 12).astype(np.float32),
            "s": np.asarray(s),
            "i": rng.integers(0, 3, 12),
            "z": (rng.integers(-2, 3, 3) * s).astype(np.float32),
        }
        g = rng.standard_normal(3).astype(np.float32)

        def reference(x: Any, s: Any, i: Any, z: Any) -> Any:
            start = torch.full((3,), -float("inf"), dtype=x.dtype)
            return torch.maximum(start.scatter_reduce(0, i, _FakeQuantized.apply(x, s), "amax"), z)

        _, want = torchs(reference, g, **given)
        _, residuals = module.forward(given)
        got = module.backward(residuals, g)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        tied += int(np.count_nonzero(want["x"]) > 3)
    assert tied > 5


@every_target
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_polygamma_beside_its_poles(target: str, dtype: str) -> None:
    """Next to 0 and to -1 the term of the pole is all, from both sides: (-1)^(n+1) n! / d^(n+1)."""
    units = np.finfo("f4" if dtype == "f32" else "f8").eps
    distances = np.array([2.0**-25, 2.0**-16, 3e-4], dtype="f4" if dtype == "f32" else "f8")
    beside_0 = np.concatenate([distances, -distances])
    beside_1 = np.array([-1 + 2.0**-16, -1 - 2.0**-16], dtype=beside_0.dtype)
    for order in (1, 2, 3):
        module = gradc.compile(
            gradc.trace(lambda x, n=order: ops.polygamma(x, order=n), x=f"{dtype}[N]"), target=target
        )
        for x, pole in ((beside_0, 0.0), (beside_1, -1.0)):
            d = x.astype(np.longdouble) - pole
            term = (-1) ** (order + 1) * math.factorial(order) / d ** (order + 1)
            # What the other terms add is below 10 n! next to 0 and -1.
            limit = 10 * math.factorial(order) + 64 * units * abs(term)
            assert np.all(abs(module(x=x) - term) <= limit)
