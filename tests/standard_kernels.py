"""The fused kernels that benchmarks time, at any size: each a graph over symbols, its inputs, and what it must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradc
from gradc import interp, ops

Array = np.ndarray[Any, Any]
f32 = np.float32
TOLERANCE = 2e-5
"""Of the largest value, or of 1."""


def dequantized(index: Any, q: Any, s: Any, table: Any) -> Any:
    """table[index[n], :] += s[n] * q[n, :]"""
    return ops.index_add(table, 0, index, ops.dequantize(q, s, block=(1, q.shape[1])))


@dataclass(frozen=True)
class Standard:
    """:param rows, cols: what ``n`` and ``d`` of :meth:`inputs` are, in words."""

    function: Callable[..., Any]
    types: Mapping[str, str]
    wrt: tuple[str, ...]

    @property
    def graph(self) -> gradc.Graph:
        return gradc.trace(self.function, name=self.function.__name__, **self.types)

    def inputs(self, n: int, d: int, seed: int = 0) -> dict[str, Array]:
        """n rows of d columns; integers that are indices stay inside tables of ``max(d, 1)`` classes or of ``n + 3``
        rows.
        """
        random = np.random.default_rng(seed)
        sizes = {
            "N": n,
            "D": d,
            "V": n + 3,
            "C": max(d % 7, 1),
            "H": max(d % 5, 1),
            "W": max(d, 1),
            "h": 2,
            "w": max(d // 2, 1),
        }
        found: dict[str, Array] = {}
        for name, text in self.types.items():
            type_ = ops_type(text)
            shape = type_.concrete(sizes)
            if type_.dtype.is_float:
                found[name] = random.standard_normal(shape).astype(f32)
            elif name == "q":
                found[name] = random.integers(-127, 128, shape).astype(np.int8)
            else:
                found[name] = random.integers(0, max(d, 1) if name == "target" else n + 3, shape)
        return found


def ops_type(text: str) -> Any:
    return gradc.ir.types.parse_type(text)


def softmax(x: Any) -> Any:
    return ops.softmax(x)


def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
    return ops.layer_norm(x, (x.shape[1],), gamma, beta)


def rms_norm(x: Any, gamma: Any) -> Any:
    return ops.rms_norm(x, (x.shape[1],), gamma)


def cross_entropy(x: Any, target: Any) -> Any:
    return ops.cross_entropy(x, target)


def gelu_bias(x: Any, b: Any) -> Any:
    return ops.gelu(x + b)


def silu_mul(a: Any, b: Any) -> Any:
    return ops.silu(a) * b


def embedding(tokens: Any, weight: Any) -> Any:
    return ops.embedding(tokens, weight)


def grid_sample(image: Any, grid: Any) -> Any:
    return ops.grid_sample(image, grid)


STANDARD = {
    s.function.__name__: s
    for s in (
        Standard(softmax, {"x": "f32[N,D]"}, ("x",)),
        Standard(layer_norm, {"x": "f32[N,D]", "gamma": "f32[D]", "beta": "f32[D]"}, ("x", "gamma", "beta")),
        Standard(rms_norm, {"x": "f32[N,D]", "gamma": "f32[D]"}, ("x", "gamma")),
        Standard(cross_entropy, {"x": "f32[N,D]", "target": "i64[N]"}, ("x",)),
        Standard(gelu_bias, {"x": "f32[N,D]", "b": "f32[D]"}, ("x", "b")),
        Standard(silu_mul, {"a": "f32[N,D]", "b": "f32[N,D]"}, ("a", "b")),
        Standard(embedding, {"tokens": "i64[N]", "weight": "f32[V,D]"}, ("weight",)),
        Standard(
            dequantized, {"index": "i64[N]", "q": "i8[N,D]", "s": "f32[N,1]", "table": "f32[V,D]"}, ("s", "table")
        ),
        Standard(grid_sample, {"image": "f32[N,C,H,W]", "grid": "f32[N,h,w,2]"}, ("image", "grid")),
    )
}


def cotangent(y: Array) -> Array:
    return np.random.default_rng(1).standard_normal(y.shape).astype(f32)


def computed(
    module: gradc.Module, arrays: Mapping[str, Array], dy: Callable[[Array], Array] = cotangent
) -> dict[str, Array]:
    """Value and gradients, as ``y`` and ``d.NAME``."""
    y, residuals = module.forward(**arrays)
    return {"y": y, **{f"d.{name}": g for name, g in module.backward(residuals, dy(y)).items()}}


def expected(module: gradc.Module, arrays: Mapping[str, Array], y: Array) -> dict[str, Array]:
    """The same in f64, by the meaning of each op."""
    return interp.run(gradc.differentiate(module.graph, module.wrt), {**arrays, "d.y": cotangent(y)}, precision="f64")


def agree(got: Mapping[str, Array], want: Mapping[str, Array], what: str = "") -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        scale = max(1.0, float(np.abs(want[name]).max(initial=0.0))) if np.isfinite(want[name]).all() else 1.0
        np.testing.assert_allclose(value, want[name], rtol=0, atol=TOLERANCE * scale, err_msg=f"{what} {name}")


def all_at_once() -> tuple[gradc.Graph, list[str]]:
    """Every kernel in one graph; an input is ``KERNEL.NAME``, and so are the sizes' letters kept apart."""
    types: dict[str, Any] = {}
    for number, (name, one) in enumerate(STANDARD.items()):
        renamed = {k: ops_type(t) for k, t in one.types.items()}
        types[name] = {
            k: t.substitute({str(s): gradc.ir.dims.symbol(f"{s}{number}") for s in t.symbols})
            for k, t in renamed.items()
        }

    def every(**groups: Any) -> Any:
        return {name: STANDARD[name].function(**group) for name, group in groups.items()}

    return gradc.trace(every, **types), [f"{name}.{w}" for name, one in STANDARD.items() for w in one.wrt]


def check_all(n: int, d: int) -> None:
    """Every kernel at one size, compiled together."""
    graph, wrt = all_at_once()
    module = gradc.compile(graph, wrt=wrt)
    arrays = {f"{name}.{k}": v for name, one in STANDARD.items() for k, v in one.inputs(n, d).items()}
    values, residuals = module.forward(arrays)
    gradients = module.backward(residuals, **{name: cotangent(y) for name, y in values.items()})
    want = interp.run(
        gradc.differentiate(graph, module.wrt),
        {**arrays, **{f"d.{name}": cotangent(y) for name, y in values.items()}},
        precision="f64",
    )
    agree({**values, **{f"d.{name}": g for name, g in gradients.items()}}, want, f"{n} rows of {d}")


def main() -> None:
    """For processes with other compilers, threads or limits."""
    from gradc.runtime.host import pool

    check_all(200, 67)
    print("right with", pool.num_threads(), "threads and vectors of", pool._library().gradc_vector_bytes(), "bytes")
