"""Linear cross entropies as users write them: gradc's ops, and the same in torch.

``LOSS_FORMS`` has each form's function, the types of its inputs, and what torch computes of them in f64.  The dtype
``D`` stands for one of 16 bits; the dims ``N`` and ``V`` for the rows and the classes, ``K`` for the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gradc
from gradc import ops
from gradc.ir.types import DTYPES

Function = Callable[..., Any]
F = torch.nn.functional
LARGE = {"N": 8192, "V": 50257}
"""Sizes of a language model's loss."""


@dataclass(frozen=True, eq=False)
class Loss:
    """One way to write a linear cross entropy.

    :param torchs: given tensors in f64, by the inputs' names.
    :param tiled: whether the forward alone, of few features, is predicted to be faster as one kernel on tensor cores.
    :param ignored: the target of rows without a loss.
    """

    function: Function
    torchs: Function
    types: Mapping[str, str]
    tiled: bool = True
    ignored: int = -100

    def graph(self, dtype: str, features: int) -> gradc.Graph:
        types = {n: t.replace("D[", f"{dtype}[").replace("K]", f"{features}]") for n, t in self.types.items()}
        return gradc.trace(self.function, **types)

    def drawn(self, graph: gradc.Graph, dims: Mapping[str, int], seed: int, ignored: float) -> dict[str, np.ndarray]:
        """Arrays for a graph's inputs, logits of about 1.

        :param ignored: share of the targets that are.
        """
        rng, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
        for node, name in zip(graph.inputs, graph.input_names, strict=True):
            shape = node.type.concrete(dict(dims))
            if name == "t":
                arrays[name] = np.where(rng.random(shape) < ignored, self.ignored, rng.integers(0, dims["V"], shape))
                continue
            if name in ("c", "scale"):
                drawn = 0.5 + rng.random(shape)
            else:
                drawn = rng.standard_normal(shape) / max(shape[-1], 1) ** 0.25
            arrays[name] = np.asarray(drawn).astype(DTYPES[node.dtype.name].np)
        return arrays


def exact(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The same as tensors in f64; torch differentiates by all of floats but weights of classes."""
    return {
        n: torch.from_numpy(a) if a.dtype.kind == "i" else torch.tensor(a.astype(np.float64), requires_grad=n != "c")
        for n, a in arrays.items()
    }


PLAIN = {"x": "D[N,K]", "w": "D[V,K]", "t": "i64[N]"}


def _with(**options: Any) -> Loss:
    return Loss(
        lambda x, w, t: ops.linear_cross_entropy(x, w, t, **options),
        lambda x, w, t: F.cross_entropy(x @ w.T, t, **options),
        PLAIN,
        tiled="label_smoothing" not in options,
        ignored=options.get("ignore_index", -100),
    )


def _weighted(**options: Any) -> Loss:
    return Loss(
        lambda x, w, t, c: ops.linear_cross_entropy(x, w, t, None, c, **options),
        lambda x, w, t, c: F.cross_entropy(x @ w.T, t, c, **options),
        {**PLAIN, "c": "D[V]"},
        tiled="label_smoothing" not in options,
    )


def _capped(x, w, t):
    return ops.cross_entropy(ops.tanh(ops.linear(x, w).astype("f32") * 0.5) * 2.0, t)


def _with_z(x, w, t):
    logits = ops.linear(x, w).astype("f32")
    z = ops.logsumexp(logits, 1)
    return ops.cross_entropy(logits, t) + ops.mean(z * z) * 0.125


def _torch_with_z(x, w, t):
    logits = x @ w.T
    return F.cross_entropy(logits, t) + (torch.logsumexp(logits, 1) ** 2).mean() * 0.125


def _contrastive(x, w, scale):
    """As CLIP has it: row i of one belongs to row i of the other, and the other way round."""
    logits, t = (x @ w.T).astype("f32") * scale, ops.iota(shape=(x.shape[0],))
    return (ops.cross_entropy(logits, t) + ops.cross_entropy(logits.T, t)) * 0.5


def _torch_contrastive(x, w, scale):
    logits, t = x @ w.T * scale, torch.arange(x.shape[0])
    return (F.cross_entropy(logits, t) + F.cross_entropy(logits.T, t)) * 0.5


CONTRASTIVE = Loss(_contrastive, _torch_contrastive, {"x": "D[N,K]", "w": "D[N,K]", "scale": "f32[]"})


def _of_two_products(x, w, scale):
    t = ops.iota(shape=(x.shape[0],))
    rows, columns = ((a @ b.T).astype("f32") * scale for a, b in ((x, w), (w, x)))
    return (ops.cross_entropy(rows, t) + ops.cross_entropy(columns, t)) * 0.5


OF_TWO_PRODUCTS = Loss(_of_two_products, _torch_contrastive, CONTRASTIVE.types)

LOSS_FORMS = {
    "mean": _with(),
    "sum": _with(reduction="sum"),
    "of each row": _with(reduction="none"),
    "another index is ignored": _with(ignore_index=0),
    "label smoothing": _with(label_smoothing=0.1),
    "weights of classes": _weighted(),
    "weights, smoothing, sum": _weighted(label_smoothing=0.1, reduction="sum"),
    "bias": Loss(
        lambda x, w, t, b: ops.linear_cross_entropy(x, w, t, b),
        lambda x, w, t, b: F.cross_entropy(F.linear(x, w, b), t),
        {**PLAIN, "b": "D[V]"},
    ),
    "softcap": Loss(_capped, lambda x, w, t: F.cross_entropy(torch.tanh(x @ w.T * 0.5) * 2, t), PLAIN, tiled=False),
    "z-loss": Loss(_with_z, _torch_with_z, PLAIN, tiled=False),
    "log_softmax and nll_loss": Loss(
        lambda x, w, t: ops.nll_loss(ops.log_softmax(ops.linear(x, w).astype("f32"), 1), t),
        lambda x, w, t: F.nll_loss(F.log_softmax(x @ w.T, 1), t),
        PLAIN,
    ),
    "tokens of sequences": Loss(
        lambda x, w, t: ops.cross_entropy(
            ops.reshape(ops.linear(x, w), (2 * t.shape[1], w.shape[0])), ops.reshape(t, (2 * t.shape[1],))
        ),
        lambda x, w, t: F.cross_entropy((x @ w.T).flatten(0, 1), t.flatten()),
        {"x": "D[2,N,K]", "w": "D[V,K]", "t": "i64[2,N]"},
    ),
}
