"""The sign of a result that is zero, with ``numerics="strict"``: torch's, but where docs/torch.md says otherwise; the
same on every target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is the oracle")

import torch.nn.functional as F  # noqa: E402

import gradc  # noqa: E402
from gradc import ops  # noqa: E402

LINE = (0.0, -0.0, 1.0, -1.0, 2.0, -0.0, 0.0, -3.0)
Pair = tuple[Callable[..., Any], Callable[..., Any]]

OF_ONE: dict[str, Pair] = {
    **{n: (getattr(ops, n), getattr(torch, n)) for n in "abs neg round floor ceil trunc frac sign sqrt square".split()},
    **{n: (getattr(ops, n), getattr(torch, n)) for n in "tanh sin sinh asinh atan erf expm1 log1p".split()},
    **{n: (getattr(ops, n), getattr(F, n)) for n in "elu celu silu mish softsign hardswish hardtanh".split()},
    **{n: (getattr(ops, n), getattr(F, n)) for n in "softshrink hardshrink tanhshrink".split()},
    "leaky_relu": (lambda x: ops.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, 0.1)),
    "clamp inside": (lambda x: ops.clamp(x, -1.0, 1.0), lambda x: x.clamp(-1, 1)),
    "x + 0": (lambda x: x + 0.0, lambda x: x + 0.0),
    "x - 0": (lambda x: x - 0.0, lambda x: x - 0.0),
    "0 - x": (lambda x: 0.0 - x, lambda x: 0.0 - x),
    "x * -1": (lambda x: x * -1.0, lambda x: x * -1.0),
    "x * 0": (lambda x: x * 0.0, lambda x: x * 0.0),
    "x ** 3": (lambda x: x**3, lambda x: x**3),
    "relu": (ops.relu, F.relu),
    "pad": (lambda x: ops.pad(x, ((1, 2),), -0.0), lambda x: F.pad(x, (1, 2), value=-0.0)),
    "pads": (
        lambda x: ops.pad(x, ((1, 2),), -0.0) * ops.pad(x, ((1, 2),), 0.0),
        lambda x: F.pad(x, (1, 2), value=-0.0) * F.pad(x, (1, 2)),
    ),
    "flip": (lambda x: ops.flip(x, axis=(0,)), lambda x: x.flip(0)),
    "pad reflect": (
        lambda x: ops.pad(x, ((1, 2),), mode="reflect"),
        lambda x: F.pad(x[None], (1, 2), mode="reflect")[0],
    ),
    "sort": (lambda x: ops.sort(x, axis=0)[0], lambda x: x.sort(dim=0, stable=True)[0]),
    "sum of pairs": (lambda x: ops.sum(x.reshape(-1, 2), axis=1), lambda x: x.reshape(-1, 2).sum(1)),
    "prod of pairs": (lambda x: ops.prod(x.reshape(-1, 2), axis=1), lambda x: x.reshape(-1, 2).prod(1)),
    "max_pool": (
        lambda x: ops.max_pool2d(x.reshape(1, 1, 8, 8), 1)[0, 0],
        lambda x: F.max_pool2d(x.reshape(1, 1, 8, 8), 1)[0, 0],
    ),
}
OF_TWO: dict[str, Pair] = {
    **{n: (getattr(ops, n), getattr(torch, n)) for n in "maximum minimum fmax fmin copysign atan2 hypot fmod".split()},
    "a + b": (lambda a, b: a + b, torch.add),
    "a - b": (lambda a, b: a - b, torch.sub),
    "a * b": (lambda a, b: a * b, torch.mul),
    "where": (lambda a, b: ops.where(a > 0, a, b), lambda a, b: torch.where(a > 0, a, b)),
    "nextafter": (ops.nextafter, torch.nextafter),
}
NUMPY_S: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "relu6": (ops.relu6, F.relu6, lambda x: np.where(x > 0, x, 0.0)),
    "clamp to 0": (lambda x: ops.clamp(x, 0.0, 3.0), lambda x: x.clamp(0, 3), lambda x: np.where(x > 0, x, 0.0)),
    "clamp to -0": (lambda x: ops.clamp(x, -0.0, 3.0), lambda x: x.clamp(-0.0, 3), lambda x: np.where(x > 0, x, -0.0)),
    "clamp below 0": (lambda x: ops.clamp(x, None, 0.0), lambda x: x.clamp(max=0), lambda x: np.where(x < 0, x, 0.0)),
    "remainder": (lambda x: x % 1.0, lambda x: torch.remainder(x, 1.0), lambda x: np.mod(x, 1.0)),
}
"""Those of docs/torch.md: gradc's, eager mode's, and what gradc's is."""


def signs(values: Any) -> Any:
    """-1 and 1 where a value is zero, 0 elsewhere."""
    x = np.asarray(values)
    return np.where(x == 0, np.where(np.signbit(x), -1, 1), 0)


def inputs(dtype: str) -> tuple[Any, Any]:
    a, b = (np.ascontiguousarray(x.reshape(-1), f"f{int(dtype[1:]) // 8}") for x in np.meshgrid(LINE, LINE))
    return a, b


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_signs_are_torchs(dtype: str, target: str) -> None:
    a, b = inputs(dtype)

    def every(a: Any, b: Any) -> tuple[Any, ...]:
        return (*(f(a) for f, *_ in (*OF_ONE.values(), *NUMPY_S.values())), *(f(a, b) for f, _ in OF_TWO.values()))

    graph = gradc.trace(every, a=f"{dtype}[64]", b=f"{dtype}[64]")
    found = gradc.compile(graph, target=target, numerics="strict")(a=a, b=b)
    names = [*OF_ONE, *NUMPY_S, *OF_TWO]
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    wrong = {}
    for at, name in enumerate(names):
        got = found[f"y{at}"]
        theirs = OF_ONE[name][1](ta) if name in OF_ONE else OF_TWO[name][1](ta, tb) if name in OF_TWO else None
        want = NUMPY_S[name][2](a) if theirs is None else theirs.numpy()
        if (signs(got) != signs(want)).any():
            wrong[name] = np.flatnonzero(signs(got) != signs(want))[:3].tolist()
    assert not wrong


@pytest.mark.parametrize("name", NUMPY_S)
def test_the_table_says_where_they_are_not(name: str) -> None:
    _, theirs, ours = NUMPY_S[name]
    a, _ = inputs("f64")
    assert (signs(theirs(torch.from_numpy(a)).numpy()) != signs(ours(a))).any()
