"""Lines of normalizations."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import product
from ...ir.node import Node
from ...ir.types import F32, F64
from ...ops.rules import converted
from ..table import Forms, Site, Weight, normalized_axis


def _per_channel(v: Node, x: Node) -> Node:
    return ops.broadcast_to(ops.reshape(v, (1, v.shape[0], *(1,) * (x.rank - 2))), x.shape)


def _first_batch_normalization(
    site: Site,
    x: Node,
    scale: Weight,
    b: Weight,
    mean: Weight,
    var: Weight,
    *,
    epsilon: float,
    is_test: int,
    momentum: float,
    spatial: int,
) -> Node:
    """Before opset 7 an attribute says whether the given mean and variance are those that count."""
    if not is_test:
        raise Unsupported(_IN_TRAINING.format(site.opset))
    return _normalized(site, x, scale, b, mean, var, epsilon=epsilon, momentum=momentum, spatial=spatial)


_IN_TRAINING = "BatchNormalization of opset {} in training mode; opset 14 says what its results are"


def _normalized(
    site: Site,
    x: Node,
    scale: Weight,
    b: Weight,
    mean: Weight,
    var: Weight,
    *,
    epsilon: float,
    momentum: float,
    spatial: int = 1,
) -> Node:
    """Before opset 14 it is in training mode if it has more results than one.

    :param spatial: if 0, which opset 9 ended, each place has a mean, a variance, a scale and a bias of its own.
    """
    if site.results > 1:
        raise Unsupported(_IN_TRAINING.format(site.opset))
    if spatial:
        return ops.batch_norm(x, mean, var, scale, b, training=False, eps=epsilon)
    if any(v.shape != x.shape[1:] for v in (scale, b, mean, var)):
        raise InvalidProblem(f"statistics of {mean.type} for each place of {x.type}")
    places = product(x.shape[1:])
    each = [ops.reshape(v, (places,)) for v in (mean, var, scale, b)]
    rows = ops.reshape(x, (x.shape[0], places))
    return ops.reshape(ops.batch_norm(rows, *each, training=False, eps=epsilon), x.shape)


def _batch_normalization(
    x: Node,
    scale: Weight,
    b: Weight,
    mean: Weight,
    var: Weight,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    if not training_mode:
        wide = [converted(v, x.dtype) for v in (mean, var, scale, b)]
        y = ops.batch_norm(x, wide[0], wide[1], wide[2], wide[3], training=False, eps=epsilon)
        return y
    axes = (0, *range(2, x.rank))
    own = ops.mean(x, axes)
    spread = ops.var(x, axes)
    y = ops.batch_norm(x, None, None, scale, b, training=True, eps=epsilon)
    kept = (v * momentum + converted(new, v.dtype) * (1 - momentum) for v, new in ((mean, own), (var, spread)))
    return y, *kept


def _instance_normalization(x: Node, scale: Weight, b: Weight, *, epsilon: float = 1e-5) -> Node:
    return ops.instance_norm(x, None, None, scale, b, eps=epsilon)


def _layer_normalization(
    site: Site,
    x: Node,
    scale: Weight,
    b: Weight | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    shape = x.shape[normalized_axis(axis, x.rank) :]
    scale, bias = ops.broadcast_to(scale, shape), None if b is None else ops.broadcast_to(b, shape)
    y = ops.layer_norm(x, shape, scale, bias, eps=epsilon)
    if site.results < 2:
        return y
    axes = tuple(range(normalized_axis(axis, x.rank), x.rank))
    wide = converted(x, F64 if x.dtype is F64 else F32)
    mean = ops.mean(wide, axes, keepdims=True)
    return y, mean, ops.rsqrt(ops.var(wide, axes, keepdims=True) + epsilon)


def _rms_normalization(x: Node, scale: Weight, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Node:
    shape = x.shape[normalized_axis(axis, x.rank) :]
    return ops.rms_norm(x, shape, ops.broadcast_to(converted(scale, x.dtype), shape), eps=epsilon)


def _group_normalization(
    x: Node, scale: Weight, b: Weight, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Node:
    return ops.group_norm(x, num_groups, scale, b, eps=epsilon)


def _group_normalization_by_group(x: Node, scale: Weight, b: Weight, *, num_groups: int, epsilon: float = 1e-5) -> Node:
    """Before opset 21 a scale and a bias are a group's."""
    y = ops.group_norm(x, num_groups, None, None, eps=epsilon)  # one scale for a group, not a channel
    each = x.shape[1] // num_groups
    return y * _per_channel(ops.repeat_interleave(scale, each, 0), x) + _per_channel(
        ops.repeat_interleave(b, each, 0), x
    )


def _lp_normalization(x: Node, *, axis: int = -1, p: int = 2) -> Node:
    size = ops.norm(x, float(p), normalized_axis(axis, x.rank), keepdims=True)
    zero = ops.eq(size, 0.0)
    return ops.where(ops.broadcast_to(zero, x.shape), 0.0, x / ops.where(zero, 1.0, size))


def _lrn(x: Node, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Node:
    low = (size - 1) // 2
    squares = ops.pad(ops.square(x), ((0, 0), (low, size - 1 - low), *(((0, 0),) * (x.rank - 2))))
    window = (1, size, *(1,) * (x.rank - 2))
    return x / ops.pow(ops.reduce_window(squares, "sum", window) * (alpha / size) + bias, beta)


LINES: dict[str, Forms] = {
    "BatchNormalization": {1: _first_batch_normalization, 7: _normalized, 14: _batch_normalization},
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "RMSNormalization": _rms_normalization,
    "GroupNormalization": {18: _group_normalization_by_group, 21: _group_normalization},
    "LpNormalization": _lp_normalization,
    "LRN": _lrn,
}
