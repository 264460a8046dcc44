"""Lines of normalisations and losses."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...ir.node import Node

_REDUCTIONS = ("none", "mean", "sum")


def _layer_norm(
    x: Node,
    normalized_shape: Any,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Node:
    return ops.layer_norm(x, tuple(normalized_shape), weight=weight, bias=bias, eps=eps)


def _native_layer_norm(x: Node, normalized_shape: Any, weight: Node | None, bias: Node | None, eps: float) -> Any:
    # what torch returns beside it, mean and 1/deviation, is for its own backward
    return (ops.layer_norm(x, tuple(normalized_shape), weight=weight, bias=bias, eps=eps),)


def _rms_norm(x: Node, normalized_shape: Any, weight: Node | None = None, eps: float | None = None) -> Node:
    return ops.rms_norm(x, tuple(normalized_shape), weight=weight, eps=eps)


def _cross_entropy(
    x: Node,
    target: Node,
    weight: Node | None = None,
    reduction: int = 1,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Node:
    return ops.cross_entropy(
        x,
        target,
        weight=weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
    )


LINES: dict[str, Any] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.mse_loss.default": lambda x, y, reduction=1: ops.mse_loss(x, y, reduction=_REDUCTIONS[reduction]),
}
