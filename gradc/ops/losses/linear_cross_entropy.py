"""cross_entropy of a linear layer's outputs: linear_cross_entropy."""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import product
from ...ir.node import Node, call
from ...ir.op import BadSample, Function, Sample
from ..reductions.reduce import sum
from ..rules import converted, floating, full, reshaped, spread
from ..shapes.movement import concat, slice
from .cross_entropy import Reduction, cross_entropy


def _logits(input: Node, weight: Node, bias: Node | None) -> Node:
    """[N, C, ...] of an input [N, I] and weights [C, ..., I]."""
    flat = reshaped(weight, (product(weight.shape[:-1]), weight.shape[-1]))
    logits = call("matmul", input, flat.T)
    if bias is not None:
        logits = logits + spread(reshaped(bias, (bias.type.count,)), logits.shape)
    return reshaped(logits, (*input.shape[:-1], *weight.shape[:-1]))


def _rows(x: Node, start: int, stop: int) -> Node:
    rest = (0,) * (x.rank - 1)
    return slice.plain(x, (start, *rest), (stop, *x.shape[1:]), (1,) * x.rank)


def _linear_cross_entropy(
    input: Node,
    linear_weight: Node,
    target: Node,
    linear_bias: Node | None = None,
    weight: Node | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    batch_chunk_size: int | None = None,
) -> Node:
    if floating(input.type).rank not in (1, 2):
        raise TypeRuleError(f"the input is {input.type}: [N, I] or [I]")
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if linear_weight.rank < 2:
        raise TypeRuleError(f"linear_weight is {linear_weight.type}: [C, ..., I]")
    count = input.shape[0]
    if batch_chunk_size is None or input.rank == 1 or (isinstance(count, int) and count <= batch_chunk_size):
        return cross_entropy(_logits(input, linear_weight, linear_bias), target, weight, reduction=reduction, **attrs)
    if batch_chunk_size < 1:
        raise TypeRuleError(f"batch_chunk_size={batch_chunk_size}: 1 at least")
    if not isinstance(count, int):
        raise TypeRuleError(f"batch_chunk_size with {count} rows: it must be a constant")
    each = []
    for start in range(0, count, batch_chunk_size):
        stop = min(start + batch_chunk_size, count)
        logits = _logits(_rows(input, start, stop), linear_weight, linear_bias)
        each.append(cross_entropy(logits, _rows(target, start, stop), weight, reduction="none", **attrs))
    losses = concat(*each, axis=0)
    if reduction == "none":
        return losses
    wide = converted(losses, losses.dtype.compute)  # f16 holds no sum of many losses
    total = sum(wide)
    return converted(total if reduction == "sum" else total / _norm(target, weight, wide, ignore_index), losses.dtype)


def _norm(target: Node, weight: Node | None, losses: Node, ignore_index: int) -> Node:
    """What the mean divides by: the weights of the positions that count; rows, for probabilities."""
    if target.dtype.is_float:
        return converted(call("dim", size=losses.type.count), losses.dtype)
    kept = call("ne", target, ignore_index)
    index = call("where", kept, target, full(0, target))
    own = call("gather", weight, index, axis=0) if weight is not None else full(1, losses)
    own = converted(own, losses.dtype)
    return sum(call("where", kept, own, full(0, own)))


linear_cross_entropy = Function(
    "linear_cross_entropy",
    write=_linear_cross_entropy,
    samples=(
        Sample(("F[4,3]", "F[5,3]", "i64[4]"), draw=("normal", "normal", "index:5")),
        Sample(
            ("F[5,3]", "F[4,3]", "i64[5]", "F[4]", "F[4]"),
            {"batch_chunk_size": 2, "ignore_index": 1},
            draw=("normal", "normal", "index:4", "normal", "positive"),
        ),
    ),
    bad=(
        BadSample(("f32[N,3]", "f32[5,3]", "i64[N]"), {"batch_chunk_size": 2}, match="N rows: it must be a constant"),
        BadSample(("f32[2,2,3]", "f32[5,3]", "i64[2,2]"), match="[N, I] or [I]"),
        BadSample(("f32[2,3]", "f32[]", "i64[2]"), match="linear_weight is f32[]: [C, ..., I]"),
    ),
    doc=(
        "cross_entropy of input @ linear_weight.T + linear_bias, computed for a block of rows at a time, forward and"
        " backward; with batch_chunk_size so many rows at a time, whatever a block has"
    ),
    source="torch.nn.functional.linear_cross_entropy",
)
