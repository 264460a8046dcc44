"""Same inputs, same bits: for any number of threads, in every strategy, with random upstream gradients (all ones would
hide it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.runtime.host import pool

pytestmark = pytest.mark.optimised

RUNS = 100
THREADS = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = pool.num_threads()
    yield
    pool.set_num_threads(before)


def heavy(rng: np.random.Generator, v: int, n: int) -> np.ndarray:
    """Indices of which half point at one row."""
    return np.where(rng.random(n) < 0.5, v // 2, rng.integers(0, v, n))


Case = tuple[Callable[..., Any], dict[str, str], Callable[[np.random.Generator], dict[str, np.ndarray]]]


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def cases() -> dict[str, Case]:
    bf16 = gradc.ir.types.DTYPES["bf16"].np
    return {
        "embedding": (
            lambda tokens, table: ops.embedding(tokens, table, padding_idx=3),
            {"tokens": "i64[N]", "table": "f32[V,D]"},
            lambda rng: {"tokens": heavy(rng, 60, 5000), "table": normal(rng, 60, 17)},
        ),
        "embedding by frequency, bf16": (
            lambda tokens, table: ops.embedding(tokens, table, scale_grad_by_freq=True),
            {"tokens": "i32[N,M]", "table": "bf16[50,8]"},
            lambda rng: {
                "tokens": heavy(rng, 50, 3000).reshape(1000, 3).astype(np.int32),
                "table": normal(rng, 50, 8, dtype=bf16),
            },
        ),
        "learnable scale": (
            lambda tokens, q, scale: ops.embedding(
                tokens, ops.dequantize(q, ops.reshape(scale, (-1, 1)), block=(1, 16))
            ),
            {"tokens": "i64[N]", "q": "i8[V,16]", "scale": "f32[V]"},
            lambda rng: {
                "tokens": heavy(rng, 300, 4000),
                "q": rng.integers(-9, 9, (300, 16)).astype(np.int8),
                "scale": normal(rng, 300),
            },
        ),
        "layer_norm": (
            lambda x, w, b: ops.layer_norm(x, (33,), w, b),
            {"x": "f32[N,33]", "w": "f32[33]", "b": "f32[33]"},
            lambda rng: {"x": normal(rng, 3001, 33), "w": normal(rng, 33), "b": normal(rng, 33)},
        ),
        "broadcast": (
            lambda x, b: ops.tanh(x * b),
            {"x": "f32[N,M,24]", "b": "f32[N,1,24]"},
            lambda rng: {"x": normal(rng, 301, 7, 24), "b": normal(rng, 301, 1, 24)},
        ),
        "softmax": (
            lambda x, t: ops.softmax(x * t),
            {"x": "f32[N,M]", "t": "f32[M]"},
            lambda rng: {"x": normal(rng, 999, 70), "t": normal(rng, 70)},
        ),
        "cross_entropy": (
            lambda x, w, t: ops.cross_entropy(x @ w, t, label_smoothing=0.1),
            {"x": "f32[N,20]", "w": "f32[20,V]", "t": "i64[N]"},
            lambda rng: {"x": normal(rng, 700, 20), "w": normal(rng, 20, 90), "t": rng.integers(0, 90, 700)},
        ),
        "matmul": (
            lambda x, w: x @ w,
            {"x": "f32[N,K]", "w": "f32[K,M]"},
            lambda rng: {"x": normal(rng, 257, 129), "w": normal(rng, 129, 65)},
        ),
        "column sums": (
            lambda x, b, s: ops.sum((x + b) * s, axis=1),
            {"x": "f64[N,40]", "b": "f64[40]", "s": "f64[]"},
            lambda rng: {
                "x": normal(rng, 5000, 40, dtype=np.float64),
                "b": normal(rng, 40, dtype=np.float64),
                "s": np.asarray(1.5),
            },
        ),
    }


CASES = cases()


FORCED = {
    ("embedding", "segmented"),
    ("embedding", "privatized"),
    ("learnable scale", "segmented"),
    ("broadcast", "regular"),
    ("broadcast", "privatized"),
    ("layer_norm", "privatized"),
}
"""Where a strategy that is asked for must be seen."""


def digest(grads: gradc.Gradients, values: Any) -> str:
    hasher = hashlib.sha256()
    for name, array in [*grads.items(), *sorted((values if isinstance(values, dict) else {"y": values}).items())]:
        hasher.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


@pytest.mark.parametrize("strategy", ["chosen", "segmented", "regular", "privatized"])
@pytest.mark.parametrize("name", list(CASES))
def test_same_bits(name: str, strategy: str) -> None:
    function, types, draw = CASES[name]
    graph = gradc.trace(function, **types)
    wrt = [n for n in graph.input_names if graph.input(n).dtype.is_float]
    module = gradc.compile(graph, wrt=wrt, reductions=None if strategy == "chosen" else {"*": strategy})
    assert module.precision.deterministic and module.precision.bit_stable
    used = {how for kernel in module.backward.program.kernels for _, how in kernel.strategy}
    assert (name, strategy) not in FORCED or strategy in used, used
    rng = np.random.default_rng(5)
    inputs = draw(rng)
    y, residuals = module.forward(**inputs)
    dy = np.asarray(rng.standard_normal(y.shape)).astype(y.dtype)
    seen: dict[str, int] = {}
    for run in range(RUNS):
        pool.set_num_threads(THREADS[run % len(THREADS)])
        if run % 10 == 0:
            y, residuals = module.forward(**inputs)
        found = digest(module.backward(residuals, dy), y)
        seen[found] = seen.get(found, 0) + 1
    assert len(seen) == 1, f"{len(seen)} different results in {RUNS} runs: {sorted(seen.values())}"


def test_strategies_agree() -> None:
    """They differ in the order of sums alone, and so by little."""
    for name in ("embedding", "layer_norm", "learnable scale", "column sums"):
        function, types, draw = CASES[name]
        graph = gradc.trace(function, **types)
        wrt = [n for n in graph.input_names if graph.input(n).dtype.is_float]
        rng = np.random.default_rng(6)
        inputs = draw(rng)
        found = []
        for strategy in ("segmented", "regular", "privatized"):
            module = gradc.compile(graph, wrt=wrt, reductions={"*": strategy})
            y, residuals = module.forward(**inputs)
            dy = np.asarray(np.random.default_rng(7).standard_normal(y.shape)).astype(y.dtype)
            found.append(module.backward(residuals, dy))
        for other in found[1:]:
            for key in wrt:
                scale = float(np.abs(found[0][key].astype(np.float64)).max())
                np.testing.assert_allclose(
                    other[key].astype(np.float64),
                    found[0][key].astype(np.float64),
                    rtol=0,
                    atol=3e-6 * scale,
                    err_msg=f"{name} {key}",
                )


def test_a_module_from_the_cache_gives_the_same_bits() -> None:
    function, types, draw = CASES["embedding"]
    inputs = draw(np.random.default_rng(1))
    dy = normal(np.random.default_rng(2), 5000, 17)
    results = set()
    for _ in range(3):
        module = gradc.compile(gradc.trace(function, **types), wrt=["table"])
        _, residuals = module.forward(**inputs)
        results.add(module.backward(residuals, dy)["table"].tobytes())
    assert len(results) == 1


def test_a_row_does_not_depend_on_how_often_it_was_asked() -> None:
    """Bits of one call do not depend on calls before it, sizes of other calls among them (scratch is never read before
    it is written).
    """
    function, types, _ = CASES["embedding"]
    module = gradc.compile(gradc.trace(function, **types), wrt=["table"])
    rng = np.random.default_rng(3)
    tokens, table, dy = heavy(rng, 60, 700), normal(rng, 60, 17), normal(rng, 700, 17)
    _, residuals = module.forward(tokens=tokens, table=table)
    first = module.backward(residuals, dy)["table"].tobytes()
    for n in (1, 5000, 0, 64, 701):
        _, other = module.forward(tokens=heavy(rng, 60, n), table=table)
        module.backward(other, np.full((n, 17), np.nan, np.float32))
        assert module.backward(residuals, dy)["table"].tobytes() == first
    dirty = np.full(module.backward.workspace_size(N=700, V=60, D=17), 0xFF, np.uint8)
    assert module.backward(residuals, dy, workspace=dirty)["table"].tobytes() == first
