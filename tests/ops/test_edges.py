"""What ops do at the edges of their domains: integers, infinities, the last of a range, sums that 16 bits do not hold;
an error names the op that was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gradc  # noqa: E402
from gradc import interp, ops  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.errors import IndexOutOfRange, InvalidProblem, NotDifferentiable, TypeRuleError  # noqa: E402

X = np.arange(6.0)
ONE = np.ones(1)


@pytest.mark.parametrize(
    ("name", "call", "index"),
    [
        ("take", lambda x, i: ops.take(x, i), -7),
        ("put", lambda x, i: ops.put(x, i, ONE), -7),
        ("scatter", lambda x, i: ops.scatter(x, 0, i, ONE), 7),
        ("index_copy", lambda x, i: ops.index_copy(x, 0, i, ONE), 6),
        ("index_fill", lambda x, i: ops.index_fill(x, 0, i, 2.0), -8),
        ("index_reduce", lambda x, i: ops.index_reduce(x, 0, i, ONE, "prod"), 9),
        ("index_put", lambda x, i: ops.index_put(x, (i,), 2.0), -1),
        ("index_put", lambda x, i: ops.index_put(x.reshape((2, 3)), (i, i), 2.0), 4),
        ("getitem", lambda x, i: x.reshape((2, 1, 3))[i, :, i], -1),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_an_index_out_of_range_is_named_as_it_was_given(name: str, call: Callable[..., Any], index: int) -> None:
    graph = gradc.trace(call, x="f64[6]", i="i64[1]")
    module = gradc.compile(graph, target="numpy")
    for run in (lambda **a: interp.run(graph, a), module):
        with pytest.raises(IndexOutOfRange, match=f"^{name}: index {index} at position 0 "):
            run(x=X, i=np.array([index]))


def test_an_error_of_an_op_that_is_written_begins_with_the_op_that_writes_it() -> None:
    for call, match in (
        (lambda x, i: ops.divide(x, i), r"^divide\(f64\[6\], i64\[1\]\): div"),
        (lambda x, i: ops.take(x, np.array([0, -7])), "^take: index -7 of a size of 6"),
        (lambda x, i: ops.scatter(x, 0, ops.cast(i, "f64"), 1.0), r"^scatter\(f64\[6\], f64\[1\]\): .*indices are f64"),
    ):
        with pytest.raises(TypeRuleError, match=match):
            gradc.trace(call, x="f64[6]", i="i64[1]")


def test_a_mask_of_a_call_takes_no_more_than_source_has() -> None:
    graph = gradc.trace(ops.masked_scatter, input="f64[6]", mask="bool[6]", source="f64[2]")
    given = {"input": X, "source": np.array([7.0, 8.0])}
    got = interp.run(graph, {**given, "mask": X % 3 == 1})["y"]
    np.testing.assert_array_equal(got, [0, 7, 2, 3, 8, 5])
    with pytest.raises(IndexOutOfRange, match=r"^masked_scatter: index 2 .* \[0, 2\)"):
        interp.run(graph, {**given, "mask": X > 2})


@pytest.mark.parametrize("source", ["f64[0]", "f64[K]"])
def test_a_mask_that_takes_none_needs_no_source(source: str) -> None:
    graph = gradc.trace(ops.masked_scatter, input="f64[6]", mask="bool[6]", source=source)
    module = gradc.compile(graph, wrt=["input", "source"])
    none = {"input": X, "mask": np.zeros(6, bool), "source": np.zeros(0)}
    y, residuals = module.forward(**none)
    np.testing.assert_array_equal(y, X)
    grads = module.backward(residuals, X)
    np.testing.assert_array_equal(grads["input"], X)
    assert grads["source"].shape == (0,)
    with pytest.raises(IndexOutOfRange, match=r"^masked_scatter: index 1 "):
        module.forward(**{**none, "mask": X == 2})
    if source == "f64[K]":
        some = torch.from_numpy(X).masked_scatter(torch.from_numpy(X % 3 == 1), torch.tensor([7.0, 8.0]).double())
        got = module.forward(**{**none, "mask": X % 3 == 1, "source": np.array([7.0, 8.0])})[0]
        np.testing.assert_array_equal(got, some.numpy())


def _floats(dtype: str) -> Any:
    """Every number of 16 bits, or bit patterns of the others beside powers of two and the ends of the range."""
    if dtype in ("f16", "bf16"):
        return torch.arange(65536).to(torch.uint16).view(torch.float16 if dtype == "f16" else torch.bfloat16)
    kind, bits = (np.float32, np.uint32) if dtype == "f32" else (np.float64, np.uint64)
    info = np.finfo(kind)
    least = info.smallest_subnormal
    ends = np.array([0.0, np.inf, 0.5, 1.0, info.tiny, least, 3 * least, info.max], kind)
    patterns = np.random.default_rng(0).integers(0, np.iinfo(bits).max, 5000, dtype=bits).view(kind)
    return torch.from_numpy(np.concatenate([ends, -ends, patterns, np.exp2(np.arange(-120, 120)).astype(kind)]))


@pytest.mark.parametrize("dtype", ("f16", "bf16", "f32", "f64"))
@pytest.mark.parametrize("target", ("cpu", "numpy"))
def test_the_parts_and_the_neighbours_of_a_float(dtype: str, target: str) -> None:
    """frexp and nextafter have torch's bits, of subnormals, infinities and NaN too."""
    x = _floats(dtype)
    torch.manual_seed(0)
    y = torch.where(torch.rand(len(x)) < 0.2, -x, x[torch.randperm(len(x))])
    graph = gradc.trace(lambda x, y: (ops.nextafter(x, y), *ops.frexp(x)), x=f"{dtype}[N]", y=f"{dtype}[N]")
    with np.errstate(all="ignore"):
        got = gradc.compile(graph, target=target)(x=x, y=y)
    for found, wanted in zip(got.values(), (torch.nextafter(x, y), *torch.frexp(x)), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=0, atol=0, equal_nan=True)
        if wanted.is_floating_point():
            assert (torch.signbit(torch.as_tensor(found)) == torch.signbit(wanted))[~wanted.isnan()].all()


def test_the_gradient_of_a_mantissa() -> None:
    """Torch's, but at the ends of the range, where torch's 2**e is none of the dtype."""
    graph = gradc.trace(lambda x: ops.frexp(x)[0], x="f32[N]")
    x = torch.tensor([1.5, -0.3, 1e-30, 3e37, 0.0], requires_grad=True)
    dy = torch.tensor([0.1, 0.7, -3.0, 0.3, 2.0])
    torch.frexp(x).mantissa.backward(dy)
    given = {"x": np.append(x.detach().numpy(), np.float32(2.0**127)), "d.y": np.append(dy.numpy(), np.float32(8.0))}
    found = interp.run(differentiate(graph, ["x"]), given)["d.x"]
    np.testing.assert_array_equal(found, np.append(x.grad.numpy(), np.float32(2.0**-125)))
    blocked = gradc.trace(lambda x: ops.nextafter(x, x * 2) + x, x="f32[N]")
    with pytest.raises(NotDifferentiable, match="'nextafter'"):
        differentiate(blocked, ["x"])


@pytest.mark.parametrize("edge_order", (1, 2))
def test_a_derivative_along_a_symbol_needs_neighbours(edge_order: int) -> None:
    graph = gradc.trace(lambda x: ops.gradient(x, 0.5, 0, edge_order)[0], x="f64[N,2]")
    module = gradc.compile(graph, wrt=["x"])
    x = np.arange(10.0).reshape(5, 2) ** 2
    np.testing.assert_allclose(module.forward(x=x)[0], np.gradient(x, 0.5, axis=0, edge_order=edge_order))
    for size in range(edge_order + 1):
        with pytest.raises(InvalidProblem, match=rf"assume\(N >= {edge_order + 1}\), and here N={size}"):
            module.forward(x=x[:size])


def test_rows_that_are_searched_and_counted() -> None:
    """searchsorted, mode and masked_scatter on a simulated GPU, with ties."""
    rng = np.random.default_rng(0)
    arrays = {
        "line": np.sort(np.round(rng.standard_normal((5, 37)), 1), 1).astype(np.float32),
        "x": np.round(rng.standard_normal((5, 50)), 1).astype(np.float32),
        "mask": rng.random((5, 50)) < 0.4,
        "source": rng.standard_normal(250).astype(np.float32),
    }
    line, x, mask, source = map(torch.from_numpy, arrays.values())
    graph = gradc.trace(
        lambda line, x, mask, source: [
            ops.searchsorted(line, x),
            ops.searchsorted(line, x, right=True),
            ops.masked_scatter(x, mask, source),
            *ops.mode(x, 1),
        ],
        **arrays,
    )
    *found, value, place = (np.asarray(v) for v in gradc.compile(graph, target="cuda-sim")(**arrays).values())
    wanted = (torch.searchsorted(line, x), torch.searchsorted(line, x, right=True), x.masked_scatter(mask, source))
    for got, want in zip((*found, value), (*wanted, x.mode(1).values), strict=True):
        np.testing.assert_array_equal(got, want.numpy())
    last = [np.flatnonzero(row == v)[-1] for row, v in zip(arrays["x"], value, strict=True)]
    np.testing.assert_array_equal(place, last)  # torch's is any of them


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8"])
def test_quotients_of_integers(dtype: str) -> None:
    line = np.array([-7, -6, -1, 0, 1, 5, 6, 7, 100], np.int64)
    line = line[line >= 0] if dtype == "uint8" else line
    x, y = (v.reshape(-1).astype(dtype) for v in np.meshgrid(line, line[line != 0]))
    modes = (None, "trunc", "floor")
    graph = gradc.trace(lambda x, y: [ops.divide(x, y, mode) for mode in modes], x=x, y=y)
    for mode, got in zip(modes, interp.run(graph, {"x": x, "y": y}).values(), strict=True):
        want = torch.div(torch.from_numpy(x), torch.from_numpy(y), rounding_mode=mode).numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_a_quotient_by_zero_that_is_rounded_is_zero() -> None:
    graph = gradc.trace(lambda x, y: ops.divide(x, y, "trunc"), x="i32[3]", y="i32[3]")
    got = interp.run(graph, {"x": np.array([-7, 0, 7], np.int32), "y": np.zeros(3, np.int32)})["y"]
    np.testing.assert_array_equal(got, 0)


def test_alpha_of_sums_and_differences() -> None:
    x, y = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    graph = gradc.trace(
        lambda x, y: [ops.add(x, y, alpha=2), ops.sub(x, y, alpha=0.5), ops.add(x, 3.0, alpha=2)], x=x, y=y
    )
    for got, want in zip(interp.run(graph, {"x": x, "y": y}).values(), ([7, 12], [-0.5, -0.5], [7, 8]), strict=True):
        np.testing.assert_array_equal(got, want)
    for alpha in (True, "2"):
        with pytest.raises(TypeRuleError, match=r"^add\(.*alpha=.* is no number"):
            gradc.trace(lambda x, alpha=alpha: ops.add(x, x, alpha=alpha), x="f32[2]")


def test_lerp_is_exact_at_both_ends() -> None:
    arrays = {"a": np.array([1e10, 1.25, 1e10]), "b": np.array([1.2345, -1e300, 3.5]), "w": np.array([1.0, 0.0, 0.75])}
    got = interp.run(gradc.trace(lambda a, b, w: ops.lerp(a, b, w), **arrays), arrays)
    np.testing.assert_array_equal(got["y"], torch.lerp(*map(torch.from_numpy, arrays.values())).numpy())


@pytest.mark.parametrize("way", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantiles_of_infinities(way: Any) -> None:
    inf = np.inf
    q = np.array([0, 0.25, 0.5, 0.9, 1])
    x = np.array([[-inf, 1, 2, inf], [-inf, -inf, inf, inf], [1, inf, inf, inf], [-inf, inf, 3, 4], [inf] * 4])
    graph = gradc.trace(lambda x, q: ops.quantile(x, q, 1, interpolation=way), x=x, q=q)
    want = torch.quantile(torch.from_numpy(x), torch.from_numpy(q), 1, interpolation=way)
    np.testing.assert_array_equal(interp.run(graph, {"x": x, "q": q})["y"], want.numpy())


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_in_16_bits_are_added_up_in_32(reduction: Any) -> None:
    rng = np.random.default_rng(0)
    rows = 900
    arrays: dict[str, np.ndarray] = {
        "x": rng.standard_normal((rows, 4)).astype(np.float16),
        "w": (rng.standard_normal((6, 4)) * 3).astype(np.float16),
        "t": rng.integers(0, 6, rows),
        "weight": np.array([0.5, 1, 2, 0.25, 1.5, 3], np.float16),
    }
    graph = gradc.trace(
        lambda x, w, t, weight: ops.linear_cross_entropy(
            x, w, t, weight=weight, reduction=reduction, ignore_index=2, batch_chunk_size=300
        ),
        **arrays,
    )
    got = gradc.compile(graph, target="numpy", numerics="strict")(**arrays)
    x, w, weight = (torch.from_numpy(arrays[n].astype(np.float64)) for n in ("x", "w", "weight"))
    target = torch.from_numpy(arrays["t"])
    want = torch.nn.functional.cross_entropy(x @ w.T, target, weight, ignore_index=2, reduction=reduction)
    assert abs(float(got) - float(want)) <= 2**-10 * float(want)


def test_ctc_loss_reads_no_label_behind_a_targets_end() -> None:
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    target = np.array([[1, 1, -1], [2, 3, 1]])
    graph = gradc.trace(lambda x, t, n: ops.ctc_loss(x, t, (5, 4), n), x=x.numpy(), t=target, n=np.array([2, 3]))
    given = {"x": x.numpy(), "t": target, "n": np.array([2, 3])}
    want = torch.nn.functional.ctc_loss(x, torch.from_numpy(target).clamp(0), (5, 4), (2, 3))
    np.testing.assert_allclose(interp.run(graph, given)["y"], want.numpy(), rtol=1e-12)
    with pytest.raises(IndexOutOfRange, match=r"^ctc_loss: index -1 at position 2 "):
        interp.run(graph, {**given, "n": np.array([3, 3])})


def test_ctc_loss_refuses_a_blank_in_a_target_and_has_no_mean_of_nothing() -> None:
    for target in (np.array([[1, 0], [1, 2]]), np.array([1, 0, 1, 2])):
        with pytest.raises(TypeRuleError, match=r"ctc_loss.*: the target \[1, 0.* has the blank, 0, in it"):
            gradc.trace(lambda x, t=target: ops.ctc_loss(x, t, (5, 5), (2, 2)), x="f32[5,2,4]")
    graph = gradc.trace(lambda x, t: ops.ctc_loss(x, t, (), ()), x="f64[5,0,4]", t="i64[0,3]")
    assert np.isnan(interp.run(graph, {"x": np.zeros((5, 0, 4)), "t": np.zeros((0, 3), np.int64)})["y"])


# -- gradients that are not torch's ------------------------------------------------------------------------------------

NAN = np.nan
PLACES = np.array([1, 0, 1])
BESIDE_TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[float], list[float]]] = {
    "amax": (lambda x: ops.amax(x, 0), lambda x: x.amax(0), [0, 0, 0], [NAN, NAN, NAN]),
    "max of all": (ops.max, torch.max, [0, 0, 0], [0, 0.5, 0.5]),
    "relu": (ops.relu, torch.relu, [1, 0, 0], [1, 1, 1]),
    "abs": (ops.abs, torch.abs, [1, NAN, NAN], [1, 0, 0]),
    "max_pool": (
        lambda x: ops.max_pool1d(ops.reshape(x, (1, 3)), 3),
        lambda x: torch.nn.functional.max_pool1d(x.reshape(1, 3), 3),
        [0, 1, 0],
        [0, 0, 1],
    ),
    "index_put": (
        lambda x: ops.index_put(x * 0.0, (PLACES,), x),
        lambda x: (x * 0.0).index_put((torch.from_numpy(PLACES),), x),
        [0, 1, 1],
        [1, 1, 1],
    ),
    "scatter": (
        lambda x: ops.scatter(x * 0.0, 0, PLACES, x),
        lambda x: (x * 0.0).scatter(0, torch.from_numpy(PLACES), x),
        [0, 1, 1],
        [1, 1, 1],
    ),
    **{
        f"{name} without self": (
            lambda x, name=name: getattr(ops, name)(
                np.ones(1), 0, np.zeros(3, int), x - np.arange(3.0), "amax", include_self=False
            ),
            lambda x, name=name: getattr(torch, name)(
                torch.ones(1, dtype=torch.float64),
                *(0, torch.zeros(3, dtype=torch.int64), x - torch.arange(3), "amax"),
                include_self=False,
            ),
            [1 / 3] * 3,
            [1 / 4] * 3,
        )
        for name in ("scatter_reduce", "index_reduce")
    },
}


@pytest.mark.parametrize("name", BESIDE_TORCH)
def test_gradients_that_docs_tell_apart_from_torchs(name: str) -> None:
    ours, theirs, own, eager = BESIDE_TORCH[name]
    x = np.array([1.0, 2.0, 3.0] if "scatter" in name or "index" in name else [1.0, NAN, NAN])
    joint = differentiate(gradc.trace(ours, x=x), ["x"])
    upstream = next(n for n in joint.inputs if joint.input_name(n) != "x")
    given = {"x": x, joint.input_name(upstream): np.ones(upstream.type.concrete({}))}
    np.testing.assert_array_equal(interp.run(joint, {n: given[n] for n in joint.input_names})["d.x"], own)
    leaf = torch.tensor(x, requires_grad=True)
    np.testing.assert_array_equal(torch.autograd.grad(theirs(leaf).sum(), leaf)[0].numpy(), eager)


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_the_slopes_of_i1_and_i1e_beside_0(target: str) -> None:
    """1/2 - |x| and 1/2 + 3 x^2 / 16: the reciprocal of a subnormal is infinite."""
    x = np.array([1e-40, -1e-40, 1e-30, -0.0], np.float32)
    for function in (ops.i1, ops.i1e):
        module = gradc.compile(gradc.trace(function, x="f32[N]"), wrt=["x"], target=target)
        _, residuals = module.forward(x=x)
        np.testing.assert_allclose(module.backward(residuals, np.ones_like(x))["x"], 0.5, rtol=1e-4)
