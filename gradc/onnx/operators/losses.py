"""Lines of losses and of transforms between time and frequency."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim
from ...ir.node import Node
from ...ir.types import I64
from ...ops.rules import converted
from ..table import Forms, Site, Sizes, checked, normalized_axis


def _nll(
    x: Node, target: Node, weight: Node | None = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Node:
    checked("reduction", reduction, ("none", "mean", "sum"))
    ignored = -(2**31) if ignore_index is None else ignore_index
    return ops.nll_loss(x, converted(target, I64), weight, ignore_index=ignored, reduction=reduction)


def _softmax_cross_entropy(
    site: Site,
    scores: Node,
    labels: Node,
    weights: Node | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Any:
    logarithms = ops.log_softmax(scores, 1)
    loss = _nll(logarithms, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return (loss, logarithms) if site.results > 1 else loss


def _waves(count: int, frequencies: int, inverse: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """cos and sin of the transform, [count, frequencies]; the inverse divided by the count."""
    turns = np.outer(np.arange(count), np.arange(frequencies)) % count * (2 * np.pi / count)
    scale = 1 / count if inverse else 1.0
    return np.cos(turns) * scale, np.sin(turns) * (scale if inverse else -scale)


def _transformed(x: Node, length: int, frequencies: int, inverse: bool) -> Node:
    """x [..., n, 1 or 2], real or complex, along n: [..., frequencies, 2]."""
    size = x.shape[-2]
    if isinstance(size, Dim):
        raise Unsupported(f"a Fourier transform of {size} elements")
    if size < length:
        x = ops.pad(x, (*((0, 0),) * (x.rank - 2), (0, length - size), (0, 0)))
    elif size > length:
        x = x[..., :length, :]
    cos, sin = (w.astype(x.dtype.np) for w in _waves(length, frequencies, inverse))
    real = x[..., 0]
    a, b = ops.matmul(real, cos), ops.matmul(real, sin)
    if x.shape[-1] == 2:
        imaginary = x[..., 1]
        a, b = a - ops.matmul(imaginary, sin), b + ops.matmul(imaginary, cos)
    return ops.stack(a, b, axis=a.rank)


def _real_inverse(x: Node, count: int) -> Node:
    """Of the first half of a spectrum [..., n, 2], of which the other half is the conjugate: [..., count, 1]."""
    size, need = x.shape[-2], count // 2 + 1
    if isinstance(size, Dim):
        raise Unsupported(f"a Fourier transform of {size} elements")
    if size < need:
        x = ops.pad(x, (*((0, 0),) * (x.rank - 2), (0, need - size), (0, 0)))
    cos, sin = _waves(count, need, inverse=True)
    twice = np.where((np.arange(need) == 0) | (2 * np.arange(need) == count), 1.0, 2.0)
    cos, sin = ((w * twice).T.astype(x.dtype.np) for w in (cos, sin))
    y = ops.matmul(x[..., :need, 0], cos) - ops.matmul(x[..., :need, 1], sin)
    return ops.unsqueeze(y, y.rank)


def _dft(
    x: Node, length: Sizes | None = None, place: Sizes | None = None, *, inverse: int = 0, onesided: int = 0
) -> Node:
    return _dft_along(x, length, axis=-2 if place is None else int(place[0]), inverse=inverse, onesided=onesided)


def _dft_along(x: Node, length: Sizes | None = None, *, axis: int, inverse: int = 0, onesided: int = 0) -> Node:
    """Before opset 20 the axis is an attribute."""
    at = normalized_axis(axis, x.rank)
    if at == x.rank - 1:
        raise InvalidProblem(f"axis {axis} of {x.type}, the last: it holds the real and the imaginary part")
    half = bool(inverse and onesided)
    count = int(length[0]) if length is not None else (x.shape[at] - 1) * 2 if half else x.shape[at]
    if isinstance(count, Dim):
        raise Unsupported(f"a Fourier transform of {count} elements")
    moved = ops.movedim(x, at, x.rank - 2)
    if half:
        return ops.movedim(_real_inverse(moved, count), x.rank - 2, at)
    y = _transformed(moved, count, count // 2 + 1 if onesided else count, bool(inverse))
    return ops.movedim(y, y.rank - 2, at)


def _stft(
    signal: Node, frame_step: Sizes, window: Node | None = None, frame_length: Sizes | None = None, *, onesided: int = 1
) -> Node:
    x = signal if signal.rank == 3 else ops.unsqueeze(signal, 2)
    step, size = int(frame_step[0]), x.shape[1]
    length = int(frame_length[0]) if frame_length is not None else window.shape[0] if window is not None else None
    if not isinstance(length, int) or isinstance(size, Dim):
        raise Unsupported("a short-time Fourier transform whose frames have no known length")
    count = (size - length) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(length)
    frames = ops.gather(x, places, 1)
    if window is not None:
        frames = frames * ops.reshape(window, (1, 1, length, 1))
    return _transformed(frames, length, length // 2 + 1 if onesided else length, False)


LINES: dict[str, Forms] = {
    "NegativeLogLikelihoodLoss": _nll,
    "SoftmaxCrossEntropyLoss": _softmax_cross_entropy,
    "DFT": {17: _dft_along, 20: _dft},
    "STFT": _stft,
}
