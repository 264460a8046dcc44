"""Small modules that between them use every way of combining rows, with arrays drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from machines import gpus

import gradc
from gradc import interp, ops
from gradc.autodiff import differentiate
from gradc.runtime.cuda import cudnn_version

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator], Array]


@dataclass(frozen=True)
class Model:
    """A graph as a function, its types, and sizes at which it is small for the simulator and busy for a GPU.

    :param multiplied: dims that products sum over.
    """

    build: Callable[..., Any]
    types: Mapping[str, str]
    wrt: tuple[str, ...]
    small: Mapping[str, int]
    large: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    multiplied: tuple[str, ...] = ()

    @property
    def graph(self) -> Any:
        return gradc.trace(self.build, **self.types)

    def arrays(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
        """Random inputs; an index is below V, and half of all are one row."""
        rng = np.random.default_rng(seed)
        found: dict[str, Array] = {}
        for node in self.graph.inputs:
            shape, kind = node.type.concrete(sizes), node.dtype.np
            if node.dtype.name == "i64":
                found[self.graph.input_name(node)] = np.where(
                    rng.random(shape) < 0.5, 1, rng.integers(0, sizes["V"], shape)
                )
            elif node.dtype.is_integer:
                found[self.graph.input_name(node)] = rng.integers(-100, 100, shape).astype(kind)
            else:
                found[self.graph.input_name(node)] = rng.uniform(-1, 1, shape).astype(kind)
        return found

    def cotangent(self, sizes: Mapping[str, int], seed: int = 1) -> Array:
        """Random: with ones, every order of a sum gives the same."""
        (_, y), *_ = self.graph.outputs
        return np.random.default_rng(seed).standard_normal(y.type.concrete(sizes)).astype(y.dtype.np)

    def exact(self, arrays: Mapping[str, Array], dy: Array) -> dict[str, Array]:
        """Every gradient in float64, by the NumPy meaning."""
        joint = differentiate(self.graph, self.wrt)
        (name, _), *_ = self.graph.outputs
        found = interp.run(joint, {**arrays, f"d.{name}": dy}, precision="f64")
        return {w: found[f"d.{w}"] for w in self.wrt}


def embedding(how: str, dtype: str = "f32") -> Model:
    return Model(
        lambda t, w: ops.embedding(t, w, padding_idx=0),
        {"t": "i64[N]", "w": f"{dtype}[V,D]"},
        ("w",),
        {"N": 300, "V": 40, "D": 24},
        {"N": 20000, "V": 3000, "D": 96},
        {"reductions": {"*": how}},
    )


def heads(q: Any, k: Any, v: Any) -> Any:
    """Attention whose heads lie beside features: cuBLAS steps along one axis of two, or is given addresses."""
    q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    return ops.transpose(ops.scaled_dot_product_attention(q, k, v, is_causal=True), (0, 2, 1, 3))


def mlp(x: Any, w: Any, b: Any, w2: Any, b2: Any) -> Any:
    """Whose bias, GELU, its gradient and the biases' are epilogues of cuBLASLt."""
    return ops.linear(ops.gelu(ops.linear(x, w, b), approximate="tanh"), w2, b2)


def int4_linear(x: Any, q: Any, s: Any) -> Any:
    """Whose weight is decoded in the blocks of a kernel on tensor cores."""
    codes = ops.unpack(q, dtype="u4", axis=1)
    return ops.linear(x, ops.dequantize(codes, s, block=(1, 128), out_dtype="bf16"))


MODELS = {
    "mlp, epilogues": Model(
        mlp,
        {"x": "bf16[N,32]", "w": "bf16[64,32]", "b": "bf16[64]", "w2": "bf16[32,64]", "b2": "bf16[32]"},
        ("x", "w", "b", "w2", "b2"),
        {"N": 24},
        {"N": 3000},
        multiplied=("N",),
    ),
    "convolution, cuDNN": Model(
        lambda x, w: ops.relu(ops.conv2d(x, w, padding=1)),
        {"x": "bf16[B,8,H,W]", "w": "bf16[16,8,3,3]"},
        ("x", "w"),
        {"B": 2, "H": 6, "W": 5},
        {"B": 8, "H": 60, "W": 70},
        {"convolutions": "cudnn" if cudnn_version.installed() or not gpus() else "windows"},
        multiplied=("B", "H", "W"),
    ),
    "int4 linear, decoded": Model(
        int4_linear, {"x": "bf16[16,128]", "q": "u8[64,64]", "s": "f16[64,1]"}, ("x",), {}, {}
    ),
    "embedding, sorted": embedding("segmented"),
    "embedding, sorted, bf16": embedding("segmented", "bf16"),
    "embedding, partials": Model(
        lambda t, w: ops.embedding(t, w),
        {"t": "i64[N]", "w": "f32[V,D]"},
        ("w",),
        {"N": 300, "V": 9, "D": 24},
        {"N": 20000, "V": 60, "D": 96},
        {"reductions": {"*": "privatized"}},
    ),
    "embedding, fixed point": embedding("atomic_fixed"),
    "scale of an int8 embedding": Model(
        lambda t, q, s: ops.embedding(t, ops.dequantize(q, s, block=(1, q.shape[1]))),
        {"t": "i64[N]", "q": "i8[V,D]", "s": "f32[V,1]"},
        ("s",),
        {"N": 200, "V": 40, "D": 24},
        {"N": 20000, "V": 3000, "D": 128},
    ),
    "layer norm": Model(
        lambda x, g, b: ops.layer_norm(x, (x.shape[-1],), g, b),
        {"x": "f32[N,D]", "g": "f32[D]", "b": "f32[D]"},
        ("x", "g", "b"),
        {"N": 50, "D": 70},
        {"N": 3000, "D": 1000},
    ),
    "softmax, bf16": Model(
        lambda x: ops.softmax(x), {"x": "bf16[N,D]"}, ("x",), {"N": 20, "D": 70}, {"N": 1000, "D": 3000}
    ),
    "cross entropy": Model(
        lambda x, t: ops.cross_entropy(x, t),
        {"x": "f32[N,V]", "t": "i64[N]"},
        ("x",),
        {"N": 30, "V": 50},
        {"N": 1000, "V": 5000},
    ),
    "grid sample": Model(
        lambda x, g: ops.grid_sample(x, g),
        {"x": "f32[B,3,H,W]", "g": "f32[B,h,w,2]"},
        ("x", "g"),
        {"B": 2, "H": 6, "W": 7, "h": 5, "w": 8},
        {"B": 4, "H": 90, "W": 70, "h": 100, "w": 80},
    ),
    "linear": Model(
        lambda x, w, b: ops.gelu(ops.linear(x, w, b)),
        {"x": "f32[N,D]", "w": "f32[K,D]", "b": "f32[K]"},
        ("x", "w", "b"),
        {"N": 20, "D": 30, "K": 25},
        {"N": 700, "D": 300, "K": 400},
        multiplied=("N", "D", "K"),
    ),
    "heads, bf16": Model(
        heads,
        dict.fromkeys("qkv", "bf16[B,S,H,32]"),
        ("q", "k", "v"),
        {"B": 2, "S": 9, "H": 3},
        {"B": 3, "S": 300, "H": 8},
        multiplied=("S",),
    ),
    "many heads": Model(
        heads,
        dict.fromkeys("qkv", "f32[B,S,H,8]"),
        ("q", "k", "v"),
        {"B": 17, "S": 2, "H": 18},
        {"B": 20, "S": 40, "H": 18},
        multiplied=("S",),
    ),
}
