"""Values and gradients where functions have kinks, poles and ends, element by element: torch's own choices, in f64 and
f32, and nothing lost in f32 that torch keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_oracles  # noqa: E402

from gradc import compile, interp, ops  # noqa: E402
from gradc.autodiff import differentiate  # noqa: E402
from gradc.errors import IndexOutOfRange  # noqa: E402
from gradc.runtime.torch_private import SHARES_TIES, release  # noqa: E402
from gradc.trace import trace  # noqa: E402

F = torch.nn.functional
torch.set_num_threads(1)
ENDS = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 20.0, -20.0, 90.0, -90.0, 1e6]
ENDS += [-1e6, 1e25, -1e25, 3e38, -3e38]
INSIDE = [0.0, -0.0, 1e-30, 1e-8, -1e-8, 0.25, -0.25, 0.5, -0.5, 0.75, 0.999, -0.999, 0.9999999, -0.9999999]
AROUND = [0.0, 0.1, 0.25, 0.5, 0.55, 0.6, 0.9, 1.0, 1.25, -0.05, -2.0, 3.0, float("nan")]
POSITIVE = [1e-30, 1e-8, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 8.5, 30.0, 1e6, 1e25]

UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[float]]] = {
    **{
        name: (getattr(ops, name), getattr(F, name), ENDS)
        for name in (
            "elu selu celu leaky_relu hardtanh relu6 hardsigmoid hardswish hardshrink mish logsigmoid softsign softplus"
        ).split()
    },
    "softshrink": (ops.softshrink, F.softshrink, ENDS),
    "threshold": (lambda x: ops.threshold(x, 0.5, -2.0), lambda x: F.threshold(x, 0.5, -2.0), ENDS),
    **{
        name: (getattr(ops, name), getattr(torch, name), ENDS)
        for name in "atan asinh exp2 erfc ceil trunc frac square sinh cosh nan_to_num".split()
    },
    **{name: (getattr(ops, name), getattr(torch, name), INSIDE) for name in "asin acos atanh erfinv".split()},
    **{name: (getattr(ops, name), getattr(torch, name), POSITIVE) for name in "log2 log10 digamma lgamma".split()},
    "ndtri": (ops.ndtri, torch.special.ndtri, [0.0, 1e-30, 1e-8, 0.01, 0.2499, 0.25, 0.5, 0.75, 0.999, 0.9999999, 1.0]),
    "acosh": (ops.acosh, torch.acosh, [1.0, 1.0000001, 1.5, 2.0, 100.0, 1e6, 1e25]),
    "xlogy": (lambda x: ops.xlogy(x, 0.0 * x + 2.0), lambda x: torch.xlogy(x, 0.0 * x + 2.0), ENDS[:17]),
    **{
        f"logit, eps {eps}": (lambda x, e=eps: ops.logit(x, eps=e), lambda x, e=eps: torch.logit(x, eps=e), AROUND)
        for eps in (None, 0.0, 0.1, 0.5, 0.6, 1.0, 1.5, -0.1)
    },
    "norm of rows": (lambda x: ops.norm(x * 0.0), lambda x: torch.linalg.vector_norm(x * 0.0), [1.0, 2.0]),
    "std of equals": (lambda x: ops.std(x * 0.0 + 1.0), lambda x: torch.std(x * 0.0 + 1.0, correction=0), [1.0, 2.0]),
    "bce at the ends": (
        lambda x: ops.binary_cross_entropy(x, ops.stop_gradient(x) * 0.0 + 1.0, reduction="none"),
        lambda x: F.binary_cross_entropy(x, x.detach() * 0.0 + 1.0, reduction="none"),
        [0.0, 1e-30, 0.5, 1.0],
    ),
    "bce with logits": (
        lambda x: ops.binary_cross_entropy_with_logits(x, ops.stop_gradient(x) * 0.0 + 0.25, reduction="none"),
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach() * 0.0 + 0.25, reduction="none"),
        ENDS,
    ),
    "smooth_l1": (
        lambda x: ops.smooth_l1_loss(x, ops.stop_gradient(x) * 0.0, reduction="none"),
        lambda x: F.smooth_l1_loss(x, x.detach() * 0.0, reduction="none"),
        ENDS[:19],
    ),
    "huber": (
        lambda x: ops.huber_loss(x, ops.stop_gradient(x) * 0.0, reduction="none"),
        lambda x: F.huber_loss(x, x.detach() * 0.0, reduction="none"),
        ENDS[:19],
    ),
}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (getattr(ops, name), getattr(torch, name)) for name in "copysign atan2 hypot logaddexp".split()
}
TIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "fmax": (ops.fmax, torch.fmax, torch_oracles.fmax),
    "fmin": (ops.fmin, torch.fmin, torch_oracles.fmin),
    "clamp": (
        lambda x, y: ops.clamp(x, y, 1.0),
        lambda a, b: torch.clamp(a, b, torch.ones_like(a)),
        lambda a, b: torch_oracles.clamp(a, b, torch.ones_like(a)),
    ),
    **{
        f"hinge, {t}": (
            lambda x, y, t=t: ops.hinge_embedding_loss(x + y, np.full(36, t, np.int64), reduction="none"),
            lambda a, b, t=t: F.hinge_embedding_loss(a + b, torch.full((36,), t), reduction="none"),
            lambda a, b, t=t: torch_oracles.hinge(a + b, t),
        )
        for t in (1, -1)
    },
}
"""Ours, torch's, and torch's up to 2.13 written out, which later releases differentiate otherwise at ties."""
PAIRS |= {name: (ours, theirs) for name, (ours, theirs, _) in TIES.items() if release() < SHARES_TIES}
PAIRS |= {f"{name} up to 2.13": (ours, written) for name, (ours, _, written) in TIES.items()}


def both(
    ours: Callable[..., Any], theirs: Callable[..., Any], arrays: dict[str, np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(value and gradients of ours, of torch's), the cotangent 1."""
    graph = trace(ours, **arrays)
    joint = differentiate(graph, list(arrays), unused="zeros")
    y = interp.run(graph, arrays)["y"]
    given = {**arrays, "d.y": np.ones(y.shape, y.dtype)}
    found = interp.run(joint, {n: given[n] for n in joint.input_names})
    leaves = [torch.from_numpy(a.copy()).requires_grad_() for a in arrays.values()]
    want = theirs(*leaves)
    gradients = torch.autograd.grad(want.sum(), leaves, allow_unused=True, materialize_grads=True)
    return [y, *(found[f"d.{n}"] for n in arrays)], [v.detach().numpy(force=True) for v in (want, *gradients)]


def check(name: str, ours: Callable[..., Any], theirs: Callable[..., Any], arrays: dict[str, np.ndarray]) -> None:
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    single = next(iter(arrays.values())).dtype == np.float32
    exact = both(ours, theirs, wide)[1]
    got, want = both(ours, theirs, arrays)
    for what, g, w, e in zip(("the value", *(f"d {n}" for n in arrays)), got, want, exact, strict=True):
        finite = np.isfinite(w)
        np.testing.assert_array_equal(np.isnan(g[np.isnan(w)]), True, err_msg=f"{name}: {what}")
        assert np.isfinite(g[finite]).all(), f"{name}: {what} is {g}, torch's is {w}"
        unit = np.finfo(np.float32 if single else np.float64).eps
        # in f64 torch is the oracle, though less exact where it subtracts (1 - x^2, x - tanh(x))
        allowed = np.maximum(16 * unit, 0 if single else 1e-7) * np.abs(e) + (0 if single else 1e-12)
        allowed = np.maximum(allowed, 2 * np.abs(w - e) + np.finfo(g.dtype).tiny)
        bad = finite & ~(np.abs(g - e) <= allowed)
        assert not bad.any(), f"{name}: {what} at {[a[bad] for a in arrays.values()]} is {g[bad]}, not {e[bad]}"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", UNARY)
def test_points_where_functions_are_hard(name: str, dtype: Any) -> None:
    ours, theirs, points = UNARY[name]
    with np.errstate(all="ignore"):
        check(name, ours, theirs, {"x": np.array(points, dtype)})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_where_functions_are_hard(name: str, dtype: Any) -> None:
    line = [0.0, 1.0, -1.0, 2.0, 1e25, -1e-25]
    a, b = (v.reshape(-1).astype(dtype) for v in np.meshgrid(line, line))
    with np.errstate(all="ignore"):
        check(name, *PAIRS[name], {"x": a, "y": b})


@pytest.mark.parametrize(
    ("listed", "reduction"), [([[1, 3, -1, 0, 2]], "none"), ([[-1, 0, 1, 2, 3], [4, 4, -1, -1, -1]], "sum")]
)
def test_multilabel_margin_loss_ends_its_targets(listed: list[list[int]], reduction: str) -> None:
    x, target = np.random.default_rng(0).standard_normal((len(listed), 5)), np.array(listed)
    got, want = both(
        lambda x: ops.multilabel_margin_loss(x, target, reduction=reduction),
        lambda x: F.multilabel_margin_loss(x, torch.from_numpy(target), reduction=reduction),
        {"x": x},
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_cosine_embedding_loss_of_both_targets(margin: float) -> None:
    rng, target = np.random.default_rng(1), np.array([1, -1, 1, -1, -1])
    arrays = {"a": rng.standard_normal((5, 4)), "b": rng.standard_normal((5, 4))}
    got, want = both(
        lambda a, b: ops.cosine_embedding_loss(a, b, target, margin=margin),
        lambda a, b: F.cosine_embedding_loss(a, b, torch.from_numpy(target), margin=margin),
        arrays,
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", [-2, 3])
def test_multilabel_margin_loss_names_classes_that_exist(name: int) -> None:
    """torch refuses them, too, behind the -1 as well as before it."""
    graph = trace(ops.multilabel_margin_loss, input="f32[2,3]", target="i64[2,3]")
    with pytest.raises(IndexOutOfRange, match=f"multilabel_margin_loss.* {name} "):
        compile(graph)(input=np.ones((2, 3), np.float32), target=np.array([[0, 1, -1], [0, -1, name]]))
