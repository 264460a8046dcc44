"""Programs for the tests of column blocking, and what they compute in NumPy at any precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradc
from gradc import ops
from gradc.compiler import cut, lower, run_passes
from gradc.ir.kernel import Program
from gradc.module.options import Options
from gradc.passes.manager import Pipeline

HEADS = "f32[B,H,S,4]"
Arrays = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A function, the types of its inputs, and an oracle that is given arrays of the precision."""

    function: Callable[..., Any]
    types: Mapping[str, str]
    oracle: Callable[..., Any]

    @functools.cached_property
    def graph(self) -> gradc.Graph:
        return gradc.trace(self.function, **self.types)

    @functools.cache  # noqa: B019
    def program(self, direction: str = "forward", wrt: tuple[str, ...] = (), target: str = "cpu") -> Program:
        return run_passes(self.graph, wrt, Options(), target)[2][direction]

    def forward_graph(self, wrt: tuple[str, ...]) -> gradc.Graph:
        """What the forward is scheduled from: its residuals are outputs, too."""
        joint = lower(self.graph, wrt, Options(), "cpu", Pipeline())
        return next(iter(cut(self.graph, joint, wrt, Options(), "cpu"))).forward


def softmax(x):
    """Over the last axis; rows of -inf alone are 0."""
    top = x.max(-1, keepdims=True, initial=-np.inf)
    each = np.exp(x - np.where(top == -np.inf, 0, top))
    total = each.sum(-1, keepdims=True)
    return each / np.where(total == 0, 1, total)


def scores(q, k):
    return np.einsum("bhmk,bhnk->bhmn", q, k) / 2  # sqrt(4)


def _positions(rows, columns):
    at = ops.iota(shape=(rows, columns))
    return at, ops.iota(shape=(rows, columns), axis=1)


def _window(q, k, v):
    row, column = _positions(q.shape[-2], k.shape[-2])
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=(column <= row) & (column > row - 3))


def _window_wanted(q, k, v):
    row, column = np.indices((q.shape[2], k.shape[2]))
    hidden = ~((column <= row) & (column > row - 3))
    return softmax(np.where(hidden, -np.inf, scores(q, k))) @ v


def _lengths(q, k, v, lengths):
    shape = (lengths.shape[0], 1, 1, k.shape[-2])
    columns = ops.iota(shape=shape, axis=3)
    mask = columns < ops.broadcast_to(ops.reshape(lengths, (lengths.shape[0], 1, 1, 1)), shape)
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _lengths_wanted(q, k, v, lengths):
    hidden = np.arange(k.shape[2]) >= lengths[:, None, None, None]
    return softmax(np.where(hidden, -np.inf, scores(q, k))) @ v


def _causal(q, k, v):
    return ops.scaled_dot_product_attention(q, k, v, is_causal=True)


def _causal_wanted(q, k, v):
    hidden = np.triu(np.ones((q.shape[2], k.shape[2]), bool), 1)
    return softmax(np.where(hidden, -np.inf, scores(q, k))) @ v


def _biased(q, k, v, bias):
    return ops.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _capped(q, k, v):
    s = ops.tanh(q @ k.T * 0.1) * 5.0
    return ops.softmax(s, -1) @ v


def _capped_wanted(q, k, v):
    s = 5 * np.tanh(2 * scores(q, k) * np.float32(0.1).astype(q.dtype))
    return softmax(s) @ v


def _logsumexp(x):
    top = x.max(-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - shift[..., None]).sum(-1)) + shift


def _cross_entropy_wanted(x, t):
    kept = t != -100
    rows = _logsumexp(x) - np.take_along_axis(x, np.where(kept, t, 0)[:, None], 1)[:, 0]
    return np.where(kept, rows, 0).sum() / kept.sum()


def _attention(**more: str) -> dict[str, str]:
    return {"q": HEADS, "k": HEADS, "v": HEADS, **more}


CASES = {
    "softmax": Case(lambda x: ops.softmax(x, -1), {"x": "f32[N,V]"}, softmax),
    "softmax of batches": Case(lambda x: ops.softmax(x, -1), {"x": "f32[B,N,V]"}, softmax),
    "logsumexp": Case(lambda x: ops.logsumexp(x, -1), {"x": "f32[N,V]"}, _logsumexp),
    "cross entropy": Case(
        lambda x, t: ops.cross_entropy(x, t), {"x": "f32[N,V]", "t": "i64[N]"}, _cross_entropy_wanted
    ),
    "linear cross entropy": Case(
        lambda x, w, t: ops.linear_cross_entropy(x, w, t),
        {"x": "f32[N,3]", "w": "f32[V,3]", "t": "i64[N]"},
        lambda x, w, t: _cross_entropy_wanted(x @ w.T, t),
    ),
    "attention": Case(
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v),
        _attention(k="f32[B,H,T,4]", v="f32[B,H,T,4]"),
        lambda q, k, v: softmax(scores(q, k)) @ v,
    ),
    "causal": Case(_causal, _attention(), _causal_wanted),
    "sliding window": Case(_window, _attention(), _window_wanted),
    "key lengths": Case(_lengths, _attention(lengths="i64[B]"), _lengths_wanted),
    "bias of keys": Case(
        _biased, _attention(bias="f32[B,1,1,S]"), lambda q, k, v, bias: softmax(scores(q, k) + bias) @ v
    ),
    "bias of heads": Case(
        _biased, _attention(bias="f32[B,H,S,S]"), lambda q, k, v, bias: softmax(scores(q, k) + bias) @ v
    ),
    "softcap": Case(_capped, _attention(), _capped_wanted),
}
ATTENTION = [name for name, case in CASES.items() if "q" in case.types]


def drawn(case: Case, dims: Mapping[str, int], seed: int, scale: float = 4.0) -> dict[str, np.ndarray]:
    """Arrays for a case: half of a bias is -inf, whole rows of some; a class in four is none."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, text in case.types.items():
        dtype, _, sizes = text.rstrip("]").partition("[")
        shape = [dims[s] if s in dims else int(s) for s in sizes.split(",") if s]
        if name == "lengths":
            arrays[name] = rng.integers(0, dims["S"] + 2, shape)
        elif name == "key":
            arrays[name] = np.array(seed)
        elif dtype == "i64":
            arrays[name] = np.where(rng.random(shape) < 0.25, -100, rng.integers(0, max(dims["V"], 1), shape))
        else:
            arrays[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
        if name == "bias":
            arrays[name][rng.random(shape) < 0.5] = -np.inf
            arrays[name][:1] = -np.inf
    return arrays
