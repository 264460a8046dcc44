"""Lines of random operators: Philox bits under the graph's input ``key``, the number of the operator in the model, and
its ``seed`` where it has one.  Other numbers than onnxruntime's; those of one key are the same on every target.
"""

from __future__ import annotations

import struct
from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import BOOL, F32, I32, I64, DType
from ...ops.rules import converted
from .. import model
from ..table import Forms, Known, Site


def _drawn(site: Site, seed: float | None) -> tuple[Node, int]:
    """The key and the stream of an operator."""
    key, stream = site.draw()
    bits = 0 if seed is None else struct.unpack("<i", struct.pack("<f", seed))[0]
    return (key + bits if bits else key), stream


def _dropout_first(site: Site, x: Node, *, is_test: int, ratio: float) -> Any:
    """Before opset 7, whose mask has the dtype of x, and which is in training mode if no attribute says otherwise."""
    return _with_mask_of(x.dtype, _dropped(site, x, 0.0 if is_test else ratio, None))


def _dropout_at_inference(site: Site, x: Node, *, ratio: float) -> Any:
    """Of opsets 7 to 9: x."""
    return _with_mask_of(x.dtype, _dropped(site, x, 0.0, None))


def _dropout_with_predicates(site: Site, x: Node, *, ratio: float) -> Any:
    """Of opsets 10 and 11: x, and a mask of bool."""
    return _dropped(site, x, 0.0, None)


def _with_mask_of(dtype: DType, results: Any) -> Any:
    return (results[0], converted(results[1], dtype)) if isinstance(results, tuple) else results


def _dropout(
    site: Site, x: Node, share: Known | None = None, training: Known | None = None, *, seed: int | None = None
) -> Any:
    ratio = float(share.reshape(-1)[0]) if share is not None and share.size else 0.5
    return _dropped(site, x, ratio if training is not None and training.any() else 0.0, seed)


def _dropped(site: Site, x: Node, part: float, seed: int | None) -> Any:
    """``Dropout``: x / (1 - part) where a mask says so, and where it has two results the mask."""
    if part == 0:
        ones = ops.broadcast_to(ops.constant(value=(True,), dtype=BOOL), x.shape)
        return (x, ones) if site.results > 1 else x
    if not 0 <= part < 1:
        raise Unsupported(f"dropout of a share of {part:g}")
    key, stream = _drawn(site, None if seed is None else float(seed))
    y = ops.dropout(x, key, p=part, stream=stream)
    if site.results < 2:
        return y
    one = ops.broadcast_to(ops.constant(value=(1.0,), dtype=F32), x.shape)
    return y, ops.ne(ops.dropout(one, key, p=part, stream=stream), 0.0)


def _dtype(given: int | None, like: Node | None) -> DType:
    if given:
        return model.element(given)
    return F32 if like is None else like.dtype


def _uniform(key: Node, stream: int, shape: Any, dtype: DType, low: float, high: float) -> Node:
    wide = F32 if dtype.bits < 32 else dtype
    return converted(ops.rand(key, shape=shape, stream=stream, dtype=wide) * (high - low) + low, dtype)


def _normal(key: Node, stream: int, shape: Any, dtype: DType, mean: float, scale: float) -> Node:
    wide = F32 if dtype.bits < 32 else dtype
    return converted(ops.randn(key, shape=shape, stream=stream, dtype=wide) * scale + mean, dtype)


def _random_uniform(
    site: Site, *, shape: Any, dtype: int = 1, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Node:
    return _uniform(*_drawn(site, seed), tuple(shape), _dtype(dtype, None), low, high)


def _random_uniform_like(
    site: Site, x: Node, *, dtype: int | None = None, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Node:
    return _uniform(*_drawn(site, seed), x.shape, _dtype(dtype, x), low, high)


def _random_normal(
    site: Site, *, shape: Any, dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Node:
    return _normal(*_drawn(site, seed), tuple(shape), _dtype(dtype, None), mean, scale)


def _random_normal_like(
    site: Site, x: Node, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Node:
    return _normal(*_drawn(site, seed), x.shape, _dtype(dtype, x), mean, scale)


def _bernoulli(site: Site, x: Node, *, dtype: int | None = None, seed: float | None = None) -> Node:
    key, stream = _drawn(site, seed)
    return converted(ops.bernoulli(x, key, stream=stream), _dtype(dtype, x))


def _multinomial(
    site: Site, x: Node, *, dtype: int | None = None, sample_size: int = 1, seed: float | None = None
) -> Node:
    """Classes with the probabilities whose logarithms, each row's but for one summand, x holds."""
    batch, classes = x.shape
    sums = ops.cumsum(ops.softmax(converted(x, F32), 1), 1)
    key, stream = _drawn(site, seed)
    drawn = ops.rand(key, shape=(batch, sample_size), stream=stream)
    below = ops.unsqueeze(sums, 1) <= ops.unsqueeze(drawn * sums[:, classes - 1 :], 2)
    return converted(ops.sum(converted(below, I64), 2), I32 if dtype is None else model.element(dtype))


LINES: dict[str, Forms] = {
    "Dropout": {
        1: _dropout_first,
        7: _dropout_at_inference,
        10: _dropout_with_predicates,
        12: _dropout,
    },
    "RandomUniform": _random_uniform,
    "RandomUniformLike": _random_uniform_like,
    "RandomNormal": _random_normal,
    "RandomNormalLike": _random_normal_like,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
}
