"""The CPU cases: each a model written once with gradc's ops and once with torch's, its arrays, and the bytes that must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    :param ours: the forward in gradc's ops.  :param theirs: the same in torch, called with ``(torch, **tensors)``.
    :param types: of the inputs.  :param wrt: whose gradients are timed.  :param draw: integer inputs.  :param forward: time forward and backward, else backward alone.
    """

    id: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    types: Mapping[str, str]
    wrt: Sequence[str]
    draw: Mapping[str, Callable[[np.random.Generator], Array]] = field(default_factory=dict)
    forward: bool = False
    scale: float = 1.0

    def arrays(self) -> dict[str, Array]:
        """The inputs, the same in every process."""
        import gradc

        random = np.random.default_rng(0)
        out: dict[str, Array] = {}
        for name, text in self.types.items():
            if name in self.draw:
                out[name] = self.draw[name](random)
            else:
                type_ = _type(text)
                values = random.standard_normal(type_.concrete({})) * self.scale
                out[name] = values.astype(type_.dtype.np) if type_.dtype.is_float else random.integers(-127, 128, type_.concrete({})).astype(type_.dtype.np)
        assert gradc
        return out

    def upstream(self, shape: Sequence[int]) -> Array:
        return np.random.default_rng(1).standard_normal(tuple(shape)).astype(np.float32)


def _type(text: str) -> Any:
    from gradc.ir.types import parse_type

    return parse_type(text)


def _uniform(size: int, *shape: int) -> Callable[[np.random.Generator], Array]:
    return lambda random: random.integers(0, size, shape)


def _zipf(size: int, *shape: int) -> Callable[[np.random.Generator], Array]:
    return lambda random: np.minimum(random.zipf(1.1, shape), size) - 1


def _embedding(name: str, rows: int, table: int, width: int, draw: Any) -> Case:
    from gradc import ops

    return Case(
        name,
        lambda tokens, weight: ops.embedding(tokens, weight),
        lambda torch, tokens, weight: torch.nn.functional.embedding(tokens, weight),
        {"tokens": f"i64[{rows}]", "weight": f"f32[{table},{width}]"},
        ["weight"],
        {"tokens": draw(table, rows)},
    )


def _block(x: Any, g1: Any, b1: Any, wqkv: Any, bqkv: Any, wo: Any, bo: Any, g2: Any, b2: Any, w1: Any, c1: Any, w2: Any, c2: Any) -> Any:
    from gradc import ops

    batch, length, width = x.shape
    heads, each = 8, width // 8
    h = ops.layer_norm(x, (width,), g1, b1)
    qkv = ops.transpose(ops.reshape(ops.linear(h, wqkv, bqkv), (batch, length, 3, heads, each)), (2, 0, 3, 1, 4))
    weights = ops.softmax((qkv[0] @ qkv[1].T) * each**-0.5)
    mixed = ops.reshape(ops.transpose(weights @ qkv[2], (0, 2, 1, 3)), x.shape)
    x = x + ops.linear(mixed, wo, bo)
    h = ops.layer_norm(x, (width,), g2, b2)
    return x + ops.linear(ops.gelu(ops.linear(h, w1, c1)), w2, c2)


def _torch_block(torch: Any, x: Any, g1: Any, b1: Any, wqkv: Any, bqkv: Any, wo: Any, bo: Any, g2: Any, b2: Any, w1: Any, c1: Any, w2: Any, c2: Any) -> Any:
    f = torch.nn.functional
    batch, length, width = x.shape
    heads, each = 8, width // 8
    h = f.layer_norm(x, (width,), g1, b1)
    q, k, v = f.linear(h, wqkv, bqkv).reshape(batch, length, 3, heads, each).permute(2, 0, 3, 1, 4)
    weights = torch.softmax((q @ k.mT) * each**-0.5, -1)
    x = x + f.linear((weights @ v).permute(0, 2, 1, 3).reshape(x.shape), wo, bo)
    h = f.layer_norm(x, (width,), g2, b2)
    return x + f.linear(f.gelu(f.linear(h, w1, c1)), w2, c2)


def _language_model(tokens: Any, target: Any, table: Any, w1: Any, b1: Any, gamma: Any, beta: Any, w2: Any, b2: Any) -> Any:
    from gradc import ops

    h = ops.linear(ops.reshape(ops.embedding(tokens, table), (tokens.shape[0], -1)), w1, b1)
    return ops.cross_entropy(ops.linear(ops.layer_norm(ops.gelu(h), (128,), gamma, beta), w2, b2), target)


def _torch_language_model(torch: Any, tokens: Any, target: Any, table: Any, w1: Any, b1: Any, gamma: Any, beta: Any, w2: Any, b2: Any) -> Any:
    f = torch.nn.functional
    h = f.linear(f.embedding(tokens, table).reshape(tokens.shape[0], -1), w1, b1)
    return f.cross_entropy(f.linear(f.layer_norm(f.gelu(h), (128,), gamma, beta), w2, b2), target)


def all_cases() -> dict[str, Case]:
    """Every case, by id."""
    from gradc import ops

    d = 512
    found = [
        Case("demo-step", _language_model, _torch_language_model,
             {"tokens": "i64[512,6]", "target": "i64[512]", "table": "f32[6697,64]", "w1": "f32[128,384]", "b1": "f32[128]", "gamma": "f32[128]", "beta": "f32[128]", "w2": "f32[6697,128]", "b2": "f32[6697]"},
             ["table", "w1", "b1", "gamma", "beta", "w2", "b2"], {"tokens": _uniform(6697, 512, 6), "target": _uniform(6697, 512)}, forward=True, scale=0.1),
        _embedding("c-emb-uniform", 8192, 32000, 512, _uniform),
        _embedding("c-emb-zipf", 8192, 32000, 512, _zipf),
        _embedding("c-emb-wide-uniform", 65536, 1000000, 64, _uniform),
        _embedding("c-emb-wide-zipf", 65536, 1000000, 64, _zipf),
        Case("c-dequant-scale", lambda tokens, table, scale: ops.embedding(tokens, ops.dequantize(table, scale, block=(1, 512))),
             lambda torch, tokens, table, scale: torch.nn.functional.embedding(tokens, table.float() * scale),
             {"tokens": "i64[8192]", "table": "i8[32000,512]", "scale": "f32[32000,1]"}, ["scale"], {"tokens": _uniform(32000, 8192)}),
        Case("c-layernorm", lambda x, w, b: ops.layer_norm(x, (1024,), w, b), lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (1024,), w, b),
             {"x": "f32[8192,1024]", "w": "f32[1024]", "b": "f32[1024]"}, ["x", "w", "b"]),
        Case("c-rmsnorm", lambda x, w: ops.rms_norm(x, (1024,), w), lambda torch, x, w: torch.nn.functional.rms_norm(x, (1024,), w), {"x": "f32[8192,1024]", "w": "f32[1024]"}, ["x", "w"]),
        Case("c-softmax", lambda x: ops.softmax(x), lambda torch, x: torch.softmax(x, -1), {"x": "f32[4096,4096]"}, ["x"]),
        Case("c-xent", lambda x, t: ops.cross_entropy(x, t), lambda torch, x, t: torch.nn.functional.cross_entropy(x, t), {"x": "f32[4096,32000]", "t": "i64[4096]"}, ["x"], {"t": _uniform(32000, 4096)}),
        Case("c-gelu-bias", lambda x, b: ops.gelu(x + b), lambda torch, x, b: torch.nn.functional.gelu(x + b), {"x": "f32[8192,4096]", "b": "f32[4096]"}, ["x", "b"]),
        Case("c-silu-mul", lambda a, b: ops.silu(a) * b, lambda torch, a, b: torch.nn.functional.silu(a) * b, {"a": "f32[8192,4096]", "b": "f32[8192,4096]"}, ["a", "b"]),
        Case("c-block", _block, _torch_block,
             {"x": f"f32[4,512,{d}]", "g1": f"f32[{d}]", "b1": f"f32[{d}]", "wqkv": f"f32[{3 * d},{d}]", "bqkv": f"f32[{3 * d}]", "wo": f"f32[{d},{d}]", "bo": f"f32[{d}]", "g2": f"f32[{d}]", "b2": f"f32[{d}]", "w1": f"f32[{4 * d},{d}]", "c1": f"f32[{4 * d}]", "w2": f"f32[{d},{4 * d}]", "c2": f"f32[{d}]"},
             ["g1", "b1", "wqkv", "bqkv", "wo", "bo", "g2", "b2", "w1", "c1", "w2", "c2"], forward=True, scale=0.05),
    ]  # fmt: skip
    return {case.id: case for case in found}
