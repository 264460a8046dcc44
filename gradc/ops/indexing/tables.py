"""Table lookups: embedding, and embedding_renorm, which scales the rows that are looked up to a norm of at most
max_norm.
"""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError, Unsupported
from ...ir.node import Node, call
from ...ir.op import DISCRETE, BadSample, Composite, Sample
from ...ir.operands import adopt
from ...ir.properties import Bounds
from ...ir.types import I32, Type
from ..elementwise.pointwise import gt, ne, pow, sqrt, stop_gradient, where
from ..reductions.reduce import amax, amin, sum
from ..rules import along, converted, floating, full
from .gathers import Padding, _padding, gather, index_type, padding_exists, scatter_add

# -- max_norm ----------------------------------------------------------------------------------------------------------


def _renorm(weight: Type, indices: Type, *, max_norm: float, norm_type: float = 2.0, oob: Bounds = "error") -> Any:
    if weight.rank != 2:
        raise TypeRuleError(f"the table has rank {weight.rank}, not 2")
    index_type(indices)
    return floating(weight), {"max_norm": max_norm, "norm_type": norm_type, "oob": oob}


def row_norms(rows: Node, p: float) -> Node:
    """The p-norm (sum |x|^p)^(1/p) of each row, [V, D] -> [V]; p = 0 counts the nonzero elements, inf and -inf give
    max |x| and min |x|.
    """
    size = call("abs", rows)
    if p in (float("inf"), -float("inf")):
        return (amax if p > 0 else amin).plain(size, axis=(1,), empty="infinite")
    if p == 0:
        return sum.plain(converted(ne(rows, full(0, rows)), rows.dtype), axis=(1,))
    if p == 1:
        return sum.plain(size, axis=(1,))
    return sqrt(sum.plain(rows * rows, axis=(1,))) if p == 2 else pow(sum.plain(pow(size, p), axis=(1,)), 1 / p)


def _renorm_value(weight: Node, indices: Node, *, max_norm: float, norm_type: float, oob: str) -> Node:
    wide = converted(weight, weight.dtype.compute)
    count = scatter_add.plain(indices, full(1, indices, I32), axis=0, size=weight.shape[0], oob=oob)
    norm = row_norms(wide, norm_type)
    long = call("bitwise_and", gt(count, full(0, count)), gt(norm, full(max_norm, norm)))
    scale = where(long, full(max_norm, norm) / (norm + 1e-7), full(1, norm))
    return converted(wide * along(scale, weight.shape, (1,)), weight.dtype)


def _renorm_surrogate(weight: Node, indices: Node, **attrs: Any) -> Node:
    return weight + stop_gradient(embedding_renorm.plain(weight, indices, **attrs) - weight)


embedding_renorm: Composite = Composite(
    "embedding_renorm",
    infer=_renorm,
    decompose=_renorm_value,
    surrogate=_renorm_surrogate,
    indices={1: lambda node: node.operands[0].shape[0]},
    vjp=lambda g, y, weight, indices, **_: (g, DISCRETE),
    samples=(
        Sample(("F[5,3]", "i64[N]"), {"max_norm": 1.0}, draw=("normal", "index:5")),
        Sample(("F[5,4]", "i32[2,N]"), {"max_norm": 0.5, "norm_type": 1.0}, draw=("normal", "index:5")),
        Sample(("F[5,4]", "u8[N]"), {"max_norm": 0.7, "norm_type": float("inf")}, draw=("normal", "index:5")),
        Sample(("F[5,4]", "i64[N]"), {"max_norm": 0.7, "norm_type": 3.0}, draw=("nonzero", "index:5")),
        Sample(("F[5,4]", "i64[3]"), {"max_norm": 2.5, "norm_type": 0.0}, draw=("normal", "index:5")),
    ),
    bad=(
        BadSample(("i8[5,3]", "i64[2]"), {"max_norm": 1.0}, match="i8 is no float"),
        BadSample(("f32[5]", "i64[2]"), {"max_norm": 1.0}, match="rank 1, not 2"),
        BadSample(("f32[5,3]", "f32[2]"), {"max_norm": 1.0}, match="indices are f32"),
    ),
    doc=(
        "the table, with each row that an index selects and whose norm exceeds max_norm scaled by max_norm / (norm +"
        " 1e-7); the gradient of weight is the cotangent of the result (the scaling is not differentiated), as in"
        " PyTorch"
    ),
    source="torch.embedding_renorm_",
)

# -- embedding ---------------------------------------------------------------------------------------------------------


def _embedding(
    indices: Type, weight: Type, *, padding_idx: Padding = None, scale_grad_by_freq: bool = False, oob: Bounds = "error"
) -> Any:
    if weight.rank != 2:
        raise TypeRuleError(f"the table has rank {weight.rank}, not 2")
    attrs = {
        "padding_idx": _padding(padding_idx, weight.shape[0]),
        "scale_grad_by_freq": scale_grad_by_freq,
        "oob": oob,
    }
    return weight.with_shape(*index_type(indices).shape, weight.shape[1]), attrs


def _embedding_call(
    indices: Any,
    weight: Any,
    padding_idx: Padding = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    oob: Bounds = "error",
    sparse: bool = False,
) -> Node:
    """``max_norm`` inserts ``ops.embedding_renorm`` before the lookup; unlike torch, the table is not changed in
    place.
    """
    if sparse:
        raise Unsupported(
            "embedding(sparse=True): the form of a gradient is a matter of the compilation: gradc.compile(graph,"
            " wrt=[...], sparse=[the table])"
        )
    (indices,), (weight,) = (
        adopt("embedding", [indices], broadcasting=False),
        adopt("embedding", [weight], broadcasting=False),
    )
    if max_norm is not None:
        weight = embedding_renorm.plain(weight, indices, max_norm=max_norm, norm_type=norm_type, oob=oob)
    return embedding.plain(indices, weight, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq, oob=oob)


embedding: Composite = Composite(
    "embedding",
    infer=_embedding,
    implies=lambda node: padding_exists(node.attrs["padding_idx"], node.operands[1].shape[0]),
    sugar=_embedding_call,
    indices={0: lambda node: node.operands[1].shape[0]},
    decompose=lambda indices, weight, *, padding_idx, scale_grad_by_freq, oob: gather.plain(
        weight, indices, axis=0, oob=oob, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq
    ),
    samples=(
        Sample(("i64[N]", "F[5,3]"), draw=("index:5", "normal")),
        Sample(("i32[2,N]", "F[5,3]"), {"padding_idx": -2}, draw=("index:5", "normal")),
        Sample(("i64[]", "F[5,3]"), draw=("index:5", "normal")),
        Sample(("u8[N]", "F[5,3]"), {"scale_grad_by_freq": True, "padding_idx": 0}, draw=("index:5", "normal")),
        Sample(("i64[2,2,N]", "F[3,3]"), {"oob": "skip"}, draw=("index:5", "normal")),
    ),
    bad=(
        BadSample(("f32[2]", "f32[5,3]"), match="indices are f32"),
        BadSample(("i64[2]", "f32[5]"), match="rank 1, not 2"),
        BadSample(("i64[2]", "f32[5,3]"), {"padding_idx": 7}, match="padding_idx=7"),
    ),
    doc=(
        "rows of a table: [..., D] for indices [...]; positions with padding_idx give no gradient; max_norm applies"
        " embedding_renorm to the table first; oob defaults to 'error' here and to 'skip' in gradc.plans"
    ),
    source="torch.nn.functional.embedding",
)
