"""Lines of normalisations.  Where torch gives its own backward's statistics beside the result, these are left out."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...ir.node import Node
from .casts import cast


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
    return (_layer_norm(x, normalized_shape, weight, bias, eps),)


def _rms_norm(x: Node, normalized_shape: Any, weight: Node | None = None, eps: float | None = None) -> Node:
    return ops.rms_norm(x, tuple(normalized_shape), weight=weight, eps=eps)


def _group_norm(
    x: Node,
    groups: int,
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Node:
    return ops.group_norm(x, groups, weight, bias, eps)


def _native_group_norm(
    x: Node, weight: Node | None, bias: Node | None, n: Any, c: Any, positions: Any, groups: int, eps: float
) -> Any:
    return (ops.group_norm(x, groups, weight, bias, eps),)


def _batch_norm_of_batch(
    x: Node, weight: Node | None, bias: Node | None, training: bool, momentum: float, eps: float
) -> Any:
    return (ops.batch_norm(x, None, None, weight, bias, True, momentum, eps),)


def _batch_norm_of_running(
    x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, momentum: float, eps: float
) -> Any:
    return (ops.batch_norm(x, mean, variance, weight, bias, False, momentum, eps),)


def _native_batch_norm(
    x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, *options: Any
) -> Any:
    """Torch's tracing has new running statistics in the dtype that they are computed in, and rounds them behind it."""
    wide = x.dtype.compute
    return ops.native_batch_norm(x, weight, bias, cast(mean, wide), cast(variance, wide), *options)


def _updating_batch_norm(
    x: Node, weight: Node | None, bias: Node | None, mean: Node, variance: Node, momentum: float, eps: float
) -> Any:
    y, saved_mean, saved_scale, *running = _native_batch_norm(x, weight, bias, mean, variance, True, momentum, eps)
    return y, saved_mean, saved_scale, ops.iota(shape=(0,)), *running


LINES: dict[str, Any] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_group_norm.default": _native_group_norm,
    "aten._native_batch_norm_legit_functional.default": _native_batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_of_batch,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_of_running,
    "aten._batch_norm_no_update.default": _batch_norm_of_running,
    "aten._batch_norm_with_update_functional.default": _updating_batch_norm,
    "aten._weight_norm.default": lambda v, g, axis=0: ops.weight_norm(v, g, axis),
}
