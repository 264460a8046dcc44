"""Attention as users write it, for the tests of loops on tensor cores: gradc's ops, and the same in torch.

``ATTENTION_FORMS`` has each form's function, the types of its inputs, and what torch computes of them in f64.  The
dtype ``D`` stands for one of 16 bits; the dims ``S`` and ``T`` for the numbers of rows and columns of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradc
from gradc import interp, ops
from gradc.ir.types import DTYPES

Function = Callable[..., Any]
heads = ops.scaled_dot_product_attention


def reference(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


@dataclass(frozen=True, eq=False)
class Form:
    """One way to write attention.

    :param torchs: given tensors in f64, by the inputs' names.
    :param least: columns at least: none have no maximum.
    :param sweeps: over the columns, in f16: exponentials without a maximum do not fit it before they are divided.
    """

    function: Function
    types: Mapping[str, str]
    torchs: Function
    least: int = 0
    sweeps: int = 1

    def graph(self, dtype: str) -> gradc.Graph:
        types = {name: text.replace("D[", f"{dtype}[") for name, text in self.types.items()}
        return gradc.trace(self.function, **types)


def drawn(graph: gradc.Graph, dims: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Arrays for a graph's inputs: half of a mask is false, and the last row of all; half of a bias is -inf."""
    rng, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
    for node, name in zip(graph.inputs, graph.input_names, strict=True):
        shape = node.type.concrete(dict(dims))
        if name == "lengths":
            arrays[name] = rng.integers(0, dims["T"] + 2, shape)
        elif name == "document":
            arrays[name] = rng.integers(0, 3, shape)
        elif name == "key":
            arrays[name] = np.array(seed)
        elif node.dtype.kind == "b":
            arrays[name] = rng.random(shape) < 0.5
            if len(shape) > 1 and shape[-2] > 1:
                arrays[name][..., -1, :] = False
        else:
            arrays[name] = (2 * rng.standard_normal(shape)).astype(DTYPES[node.dtype.name].np)
            if name == "bias":
                arrays[name][rng.random(shape) < 0.5] = -np.inf
    return arrays


def exact(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The tensors that torch is given: floats in f64."""
    own = {n: a if a.dtype.kind in "biu" else a.astype(np.float64) for n, a in arrays.items()}
    return {n: torch.tensor(a, requires_grad=a.dtype == np.float64) for n, a in own.items()}


# -- gradc -------------------------------------------------------------------------------------------------------------


def _scores(q, k):
    return ops.mixed_matmul(q, k.T) * 0.125


def _positions(q, k):
    shape = (*q.shape[:-1], k.shape[-2])
    return ops.iota(shape=shape, axis=len(shape) - 2), ops.iota(shape=shape, axis=len(shape) - 1)


def _along(x, shape, axis):
    return ops.broadcast_to(ops.reshape(x, tuple(x.shape[0] if i == axis else 1 for i in range(len(shape)))), shape)


def _window(q, k, v):
    row, column = _positions(q, k)
    return heads(q, k, v, attn_mask=(column <= row) & (column > row - 100))


def _lengths(q, k, v, lengths):
    column = _positions(q, k)[1]
    return heads(q, k, v, attn_mask=column < _along(lengths, column.shape, 0))


def _biased(q, k, v, bias):
    return heads(q, k, v, attn_mask=bias)


def _masked(q, k, v, mask):
    return heads(q, k, v, attn_mask=mask)


def _capped(q, k, v):
    return ops.softmax_matmul(ops.tanh(_scores(q, k) * 0.03125) * 32.0, v)


def _alibi(q, k, v, slopes):
    (row, column), s = _positions(q, k), _scores(q, k)
    s = s + ops.cast(column - row, dtype="f32") * _along(slopes, s.shape, 1)
    return ops.softmax_matmul(ops.where(column <= row, s, s * 0.0 - math.inf), v)


def _documents(q, k, v, document):
    row, column = (ops.broadcast_to(ops.reshape(document, n), (q.shape[-2],) * 2) for n in ((-1, 1), (1, -1)))
    return heads(q, k, v, attn_mask=row == column)


def _relative(q, k, v, table):
    rows = q.shape[-2]
    row, column = (ops.iota(shape=(rows, rows), axis=axis) for axis in (0, 1))
    s = _scores(q, k)
    bias = ops.gather(table, row - column + rows, axis=1, oob="error")
    return ops.softmax_matmul(s + ops.broadcast_to(bias, s.shape), v)


def _scaled(q, k, v, scale):
    s = ops.mixed_matmul(q, k.T)
    return ops.softmax_matmul(s * ops.broadcast_to(scale, s.shape), v)


def _dropped(q, k, v, key):
    kept = ops.rand(key, shape=(*q.shape[:-1], k.shape[-2]), stream=0) < 0.5
    return heads(q, k, v, is_causal=True, dropout_p=0.5, dropout_mask=kept)


def _by_hand(q, k, v):
    s = ops.cast(q, dtype="f32") @ ops.cast(k, dtype="f32").T * 0.125
    each = ops.exp(s - ops.amax(s, -1, keepdims=True))
    return ops.cast(each / ops.sum(each, -1, keepdims=True), dtype=v.dtype) @ v


def _without_maximum(q, k, v):
    each = ops.exp(_scores(q, k) * 0.25)
    return ops.cast(each / ops.sum(each, -1, keepdims=True), dtype=v.dtype) @ v


def _of_wide_scores(q, k, v):
    return ops.cast(ops.softmax(ops.cast(q @ k.T * 0.125, dtype="f32"), -1), dtype=v.dtype) @ v


def _with_logsumexp(q, k, v):
    s = _scores(q, k)
    return ops.softmax_matmul(s, v), ops.logsumexp(s, -1)


def _beside(q, k, v):
    """Heads lie beside features, in operands and in the result."""
    y = heads(*(ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)), is_causal=True)
    y = ops.transpose(y, (0, 2, 1, 3))
    return ops.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3]))


def _packed(qkv):
    x = ops.transpose(ops.reshape(qkv, (*qkv.shape[:2], 3, 2, 64)), (2, 0, 3, 1, 4))
    y = ops.transpose(heads(x[0], x[1], x[2], is_causal=True), (0, 2, 1, 3))
    return ops.reshape(y, (*y.shape[:2], 128))


def _repeated(q, k, v):
    return heads(q, ops.repeat_interleave(k, 2, axis=1), ops.repeat_interleave(v, 2, axis=1), is_causal=True)


def _grouped(q, k, v):
    return heads(q, k, v, enable_gqa=True)


def _continued(q, k, v, x, w):
    return heads(q, k, v) * ops.broadcast_to(w, q.shape) + x


# -- torch -------------------------------------------------------------------------------------------------------------


def _hidden(mask, s):
    return torch.where(mask, s, -math.inf)


def _torch_scores(q, k):
    return q @ k.mT * 0.125


def _torch_positions(q, k):
    return torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])


def _torch_window(q, k, v):
    row, column = _torch_positions(q, k)
    return reference(q, k, v, attn_mask=(column <= row) & (column > row - 100))


def _torch_alibi(q, k, v, slopes):
    row, column = _torch_positions(q, k)
    s = _torch_scores(q, k) + (column - row) * slopes[:, None, None]
    return torch.softmax(_hidden(column <= row, s), -1) @ v


def _torch_relative(q, k, v, table):
    row, column = _torch_positions(q, k)
    return torch.softmax(_torch_scores(q, k) + table[:, row - column + len(row)], -1) @ v


def _kept(q, k, seed):
    """What a dropout keeps: gradc's own draw, which is no part of what is judged here."""
    shape = (*q.shape[:-1], k.shape[-2])
    graph = gradc.trace(lambda key: ops.rand(key, shape=shape, stream=0), key="i64[]")
    (values,) = interp.run(graph, {"key": np.asarray(seed)}).values()
    return torch.tensor(values)


def _torch_dropped(q, k, v, key):
    row, column = _torch_positions(q, k)
    weights = torch.softmax(_hidden(column <= row, _torch_scores(q, k)), -1)
    return weights * (_kept(q, k, key) < 0.5) * 2 @ v


def _torch_beside(q, k, v):
    return reference(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2).flatten(2)


def _torch_packed(qkv):
    q, k, v = qkv.unflatten(2, (3, 2, 64)).permute(2, 0, 3, 1, 4)
    return reference(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def _torch_repeated(q, k, v):
    return reference(q, *(x.repeat_interleave(2, 1) for x in (k, v)), is_causal=True)


def _plain(features: int = 64, lead: str = "B,H,", other: str = "T", values: int = 0, **more: str) -> dict[str, str]:
    q, k = f"D[{lead}S,{features}]", f"D[{lead}{other},{features}]"
    return {"q": q, "k": k, "v": f"D[{lead}{other},{values or features}]", **more}


def _sized(features: int) -> Form:
    scale = float(np.float32(features**-0.5))  # as it is in memory
    own = lambda q, k, v: heads(q, k, v, is_causal=True, scale=scale)
    return Form(own, _plain(features, other="S"), lambda q, k, v: reference(q, k, v, is_causal=True, scale=scale))


def _torch_causal(q, k, v):
    return reference(q, k, v, is_causal=True)


def _with_bias(type_: str) -> Form:
    return Form(_biased, _plain(bias=type_), lambda q, k, v, bias: reference(q, k, v, attn_mask=bias))


def _with_mask(type_: str) -> Form:
    return Form(_masked, _plain(mask=type_), lambda q, k, v, mask: reference(q, k, v, attn_mask=mask))


def _of_groups(shared: int) -> Form:
    types = {"q": "D[B,4,S,64]", "k": f"D[B,{shared},T,64]", "v": f"D[B,{shared},T,64]"}
    return Form(_grouped, types, lambda q, k, v: reference(q, k, v, enable_gqa=True))


def _of_rank(lead: str) -> Form:
    return Form(lambda q, k, v: heads(q, k, v), _plain(lead=lead), reference)


def _softmax_product(q, k, v):
    return torch.softmax(_torch_scores(q, k), -1) @ v


ATTENTION_FORMS = {
    "bidirectional": _of_rank("B,H,"),
    "no batch": _of_rank(""),
    "one axis of a batch": _of_rank("H,"),
    "three axes of a batch": _of_rank("2,B,H,"),
    **{f"causal, {n} features": _sized(n) for n in (16, 32, 64, 80, 96, 128, 192, 256)},
    "values of other features": Form(lambda q, k, v: heads(q, k, v), _plain(values=32), reference),
    "sliding window": Form(_window, _plain(other="S"), _torch_window),
    "key lengths": Form(
        _lengths,
        _plain(lengths="i64[B]"),
        lambda q, k, v, lengths: reference(q, k, v, attn_mask=torch.arange(k.shape[2]) < lengths[:, None, None, None]),
    ),
    "bias of keys": _with_bias("D[B,1,1,T]"),
    "bias of rows and keys": _with_bias("D[S,T]"),
    "bias of heads": _with_bias("f32[1,H,S,T]"),
    "bias of each": _with_bias("D[B,H,S,T]"),
    "mask of keys": _with_mask("bool[B,1,1,T]"),
    "mask of rows and keys": _with_mask("bool[S,T]"),
    "mask of each": _with_mask("bool[B,H,S,T]"),
    "softcap": Form(
        _capped,
        _plain(),
        lambda q, k, v: torch.softmax(torch.tanh(_torch_scores(q, k) * 0.03125) * 32, -1) @ v,
    ),
    "documents": Form(
        _documents,
        _plain(other="S", document="i64[S]"),
        lambda q, k, v, document: reference(q, k, v, attn_mask=document[:, None] == document),
    ),
    "relative positions": Form(_relative, _plain(other="S", table="f32[H,2*S]"), _torch_relative),
    "alibi": Form(_alibi, _plain(other="S", slopes="f32[H]"), _torch_alibi),
    "grouped queries": _of_groups(2),
    "one key for all heads": _of_groups(1),
    "repeated keys": Form(_repeated, {"q": "D[B,4,S,64]", "k": "D[B,2,S,64]", "v": "D[B,2,S,64]"}, _torch_repeated),
    "dropout": Form(_dropped, _plain(other="S", key="i64[]"), _torch_dropped),
    "a scale given": Form(
        lambda q, k, v: heads(q, k, v, scale=0.25), _plain(), lambda q, k, v: reference(q, k, v, scale=0.25)
    ),
    "a scale in memory": Form(
        _scaled, _plain(scale="f32[]"), lambda q, k, v, scale: torch.softmax(q @ k.mT * scale, -1) @ v
    ),
    "heads beside features": Form(_beside, {n: "D[B,S,2,64]" for n in "qkv"}, _torch_beside),
    "packed projections": Form(_packed, {"qkv": "D[B,S,384]"}, _torch_packed),
    "softmax by hand": Form(_by_hand, _plain(), _softmax_product, least=1),
    "softmax without a maximum": Form(
        _without_maximum,
        _plain(),
        lambda q, k, v: torch.softmax(_torch_scores(q, k) * 0.25, -1) @ v,
        sweeps=2,
    ),
    "softmax of wide scores": Form(_of_wide_scores, _plain(), _softmax_product),
    "logsumexp besides": Form(
        _with_logsumexp,
        _plain(),
        lambda q, k, v: (_softmax_product(q, k, v), torch.logsumexp(_torch_scores(q, k), -1)),
    ),
    "what follows a row": Form(
        _continued, _plain(x="D[B,H,S,64]", w="D[64]"), lambda q, k, v, x, w: reference(q, k, v) * w + x
    ),
    "static sizes": Form(
        lambda q, k, v: heads(q, k, v, is_causal=True), {n: "D[1,2,64,64]" for n in "qkv"}, _torch_causal
    ),
}
"""Each is one loop on tensor cores."""
