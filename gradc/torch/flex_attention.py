"""``torch.nn.attention.flex_attention`` in a graph: the scores that its functions describe, as ops on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["flex_attention", "says_nothing"]

Body = Callable[..., torch.Tensor]

_LIBRARY = torch.library.Library("gradc", "FRAGMENT")  # lives as long as its ops are to exist
_LIBRARY.define("attention_scores(Tensor query, Tensor key) -> Tensor")
_LIBRARY.define("attention_mix(Tensor scores, Tensor value) -> Tensor")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


_LIBRARY.impl("attention_scores", lambda query, key: _wide(query) @ _wide(key).mT, "CompositeImplicitAutograd")
_LIBRARY.impl(
    "attention_mix",
    lambda scores, value: torch.ops.aten._safe_softmax.default(scores, -1).to(value.dtype) @ value,
    "CompositeImplicitAutograd",
)

_WHOLE = 1 << 30
"""The columns of the one block that torch makes where the caller gives no mask."""


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Body,
    mask_mod: Body | None,
    blocks: Sequence[Any],
    scale: float,
    score_operands: Sequence[Any],
    mask_operands: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch's higher-order op gives, which takes functions of one score: softmax of all of them, times the values.

    :param query: f[B, Hq, S, D].
    :param key: f[B or 1, Hkv, T, D], Hq a multiple of Hkv.
    :param value: f[B or 1, Hkv, T, Dv].
    :param score_mod: gives a score of (score, b, h, row, column, *score_operands), tensors without axes.
    :param mask_mod: whether a score counts, of (b, h, row, column, *mask_operands); None where ``blocks`` alone say it.
    :param blocks: of torch's BlockMask, but for its function: the numbers of rows and of columns; of each block of rows
        how many blocks of columns are read i32[B or 1, H or 1, R] and which i32[B or 1, H or 1, R, C], twice: those
        that ``mask_mod`` is asked about, and those (or None) of which all scores count; the same of columns; and last
        the rows and the columns of a block.
    :returns: y[B, Hq, S, Dv] in the dtype and the memory order of the query, rows without a score that counts zero; of
        each row the logsumexp and the maximum of its scores, both divided by log 2, in f32 (f64 of f64).
    """
    groups = query.shape[1] // key.shape[1]
    places = [torch.arange(size, device=query.device) for size in (*query.shape[:3], key.shape[2])]
    axes: tuple[int, ...] = (0, 1, 2, 3)
    if groups > 1:  # an axis for the heads that share a key
        query, places[1] = query.unflatten(1, (-1, groups)), places[1].unflatten(0, (-1, groups))
        key, value = key.unsqueeze(2), value.unsqueeze(2)
        axes = (0, 1, 1, 2, 3)
    scores = torch.ops.gradc.attention_scores(query, key) * scale
    wide = scores.dtype
    empty = any(isinstance(n, int) and n == 0 for n in scores.shape)
    if not empty:  # torch.vmap calls nothing on none
        scores = _of_each(score_mod, axes, len(score_operands), scored=True)(scores, *places, *score_operands).to(wide)
        if mask_mod is not None:
            counts = _of_each(mask_mod, axes, len(mask_operands), scored=False)(*places, *mask_operands)
            scores = torch.where(counts, scores, -math.inf)
        elif blocks[-1] < _WHOLE:
            scores = torch.where(_read(blocks, places[1:]), scores, -math.inf)
    y = _ordered_like(torch.ops.gradc.attention_mix(scores, value), query)
    sums = torch.logsumexp(scores, -1)
    largest = sums.detach() if empty else scores.detach().amax(-1)
    results = y, sums / math.log(2), largest / math.log(2)
    return tuple(x.flatten(1, 2) if groups > 1 else x for x in results)


def says_nothing(mask_mod: torch.fx.GraphModule) -> bool:
    """Whether a function of a BlockMask is the one that torch takes where the caller gives none: all scores count.  The
    blocks are then the mask, which torch's eager mode does not look at, but its kernels do.
    """
    calls = [n for n in mask_mod.graph.nodes if n.op not in ("placeholder", "output")]
    return [n.target for n in calls] == ["new_ones"]


def _of_each(function: Body, axes: Sequence[int], operands: int, scored: bool) -> Body:
    """A function of one score over all of them.

    :param axes: which of the positions b, h, row and column each axis of the scores is one of.
    :param operands: how many it reads that are the same for all.
    :param scored: whether it is a function of the score before all else.
    """
    for axis in reversed(axes):
        places = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(function, in_dims=(*(0,) * scored, *places, *(None,) * operands))
    return function


def _read(blocks: Sequence[Any], places: Sequence[torch.Tensor]) -> torch.Tensor:
    """b8[B or 1, *H or 1, S, T]: whether a score lies in a block that is read.

    :param places: the heads i64[*H], the rows i64[S] and the columns i64[T].
    """
    read = torch.zeros((), dtype=torch.int32, device=blocks[2].device)
    for count, columns in (blocks[2:4], blocks[4:6]):
        if count is not None:
            used = torch.arange(columns.shape[-1], device=columns.device) < count.unsqueeze(-1)
            read = read + torch.zeros_like(columns).scatter_add(-1, columns.long(), used.to(columns.dtype))
    read = read > 0
    heads, *of_blocks = places
    for axis, (place, length) in enumerate(zip(of_blocks, blocks[-2:], strict=True), start=2):
        read = read.index_select(axis, place // length)
    return read.unflatten(1, heads.shape) if read.shape[1] > 1 else read.unflatten(1, (1,) * heads.ndim)


def _ordered_like(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same, in memory in the order of the axes of x, but for the last, whose elements lie side by side."""
    order = sorted(range(y.ndim - 1), key=lambda axis: -x.stride(axis))
    order.append(y.ndim - 1)
    inverse = [order.index(axis) for axis in range(y.ndim)]
    return y.permute(order).contiguous().permute(inverse)
