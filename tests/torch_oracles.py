"""What torch says each op means: ``TORCH[name](*tensors, **attrs as the user wrote them)``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import sampling
import torch
import torch.nn.functional as F
from oracles import _unpack

from gradc.ir.node import REGISTRY
from gradc.ir.op import Function
from gradc.ir.types import DTYPES, dtype
from gradc.ops.quantized.block_scales import NF4

DTYPE = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "bool": torch.bool}
DTYPE |= {f"i{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)} | {
    f"u{n}": getattr(torch, f"uint{n}") for n in (8, 16, 32)
}

FLOAT8 = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
if hasattr(torch, "float8_e8m0fnu"):  # from 2.7 on
    FLOAT8["e8m0"] = torch.float8_e8m0fnu


def to_torch(array: np.ndarray) -> torch.Tensor:
    name = dtype(array.dtype).name
    if name not in DTYPE:  # narrow ints and f8: by value
        array = array.astype(np.int8 if name[0] in "iu" else np.float32)
    if array.dtype == DTYPES["bf16"].np:
        return torch.from_numpy(np.array(array).view(np.uint16).astype(np.int32)).to(torch.uint16).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (
        tensor.view(torch.uint16).numpy().view(DTYPES["bf16"].np)
        if tensor.dtype is torch.bfloat16
        else tensor.numpy(force=True)
    )


# -- what gradc's own ops keep of torch up to 2.13, where later releases differentiate otherwise -----------------------


def clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``torch.clamp``: at a bound the gradient is all of x's; a lower bound not below the upper one has none."""
    inside = torch.where(x > high, high, torch.where(x < low, low, x))
    return torch.where(low < high, inside, torch.where(x < low, high.where(low > high, high.detach()), inside))


def fmax(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.fmax``: of equal operands the first has the gradient."""
    return torch.where((a >= b) | b.isnan(), a, b)


def fmin(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.fmin``: of equal operands the first has the gradient."""
    return torch.where((a <= b) | b.isnan(), a, b)


def hinge(x: torch.Tensor, sign: int) -> torch.Tensor:
    """``F.hinge_embedding_loss`` of one sign and margin 1: at the margin the gradient is that of what lies inside."""
    return x if sign == 1 else torch.where(1 - x < 0, torch.zeros_like(x), 1 - x)


def _axes(x: torch.Tensor, axis: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, axis: Any = None, keepdims: bool = False, **more: Any) -> torch.Tensor:
        return (
            function(x, dim=_axes(x, axis), keepdim=keepdims, **more)
            if x.ndim
            else function(x.reshape(1), dim=(0,), **more)
        )

    return oracle


def _scan(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, axis: int | None = None, reverse: bool = False, **more: Any) -> torch.Tensor:
        x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
        return function(x.flip(axis), axis, **more).flip(axis) if reverse else function(x, axis, **more)

    return oracle


def _place_of_scan(function: Any) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, axis: int | None = None, reverse: bool = False) -> torch.Tensor:
        place = _scan(lambda x, a: function(x, a).indices)(x, axis, reverse)
        return x.shape[axis or 0] - 1 - place if reverse else place

    return oracle


def _recurrence(a: torch.Tensor, b: torch.Tensor, axis: int, reverse: bool = False) -> torch.Tensor:
    factors, terms = ([*(t.flip(axis) if reverse else t).unbind(axis)] for t in (a, b))
    states = [torch.zeros_like(terms[0])]
    for factor, term in zip(factors, terms, strict=True):
        states.append(factor * states[-1] + term)
    y = torch.stack(states[1:], axis)
    return y.flip(axis) if reverse else y


def _prod(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
    for a in sorted((a % x.ndim for a in _axes(x, axis)), reverse=True):
        x = torch.prod(x, a, keepdim=keepdims)
    return x


def _first(function: Any) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        if isinstance(axis, int):
            return function(x, axis, keepdim=keepdims).values
        return _reduction(torch.amax if function is torch.max else torch.amin)(x, axis, keepdims)

    return oracle


def _segments(keys: torch.Tensor) -> torch.Tensor:
    order, counts = torch.argsort(keys, stable=True), torch.unique(keys, return_counts=True)
    found, ends = counts[0].long(), counts[1].cumsum(0)
    rest = torch.full((len(keys) - len(found),), 2**63 - 1)
    starts = torch.cat([ends - counts[1], torch.full((len(rest),), len(keys))])
    return torch.stack([order, torch.cat([found, rest]), starts])


def _arg(function: Any) -> Callable[..., torch.Tensor]:
    def oracle(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        if not isinstance(axis, tuple):
            return function(x.reshape(-1), 0) if axis is None else function(x, axis, keepdim=keepdims)
        kept = [a for a in range(x.ndim) if a not in axis]
        return function(x.permute(*kept, *axis).flatten(len(kept)), -1)

    return oracle


def _var(x: torch.Tensor, axis: Any = None, keepdims: bool = False, ddof: int = 0) -> torch.Tensor:
    axes = _axes(x, axis)
    count = int(np.prod([x.shape[a] for a in axes]))  # by definition: torch.var wants a dim
    free = max(float(count - ddof), 0.0)
    centred = x - x.mean(axes, keepdim=True) if axes else x - x
    return (
        (centred * centred).sum(axes, keepdim=keepdims) / torch.tensor(free, dtype=x.dtype)
        if axes
        else centred / (1.0 - ddof)
    )


def positions(indices: torch.Tensor, size: int, oob: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Where indices point under a rule for bounds, and which count."""
    raw = indices.long()
    if oob == "clamp":
        return raw.clamp(0, size - 1), torch.ones_like(raw, dtype=torch.bool)
    if oob == "wrap":
        return raw % size, torch.ones_like(raw, dtype=torch.bool)
    inside = (raw >= 0) & (raw < size)
    return torch.where(inside, raw, 0), inside


def _gather(
    x: torch.Tensor,
    indices: torch.Tensor,
    axis: int = 0,
    oob: str = "error",
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    where, counts = positions(indices, x.shape[axis], oob)
    rows = torch.index_select(x, axis, where.reshape(-1)).reshape(
        (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    )
    spread = (*(1,) * axis, *indices.shape, *(1,) * (x.ndim - axis - 1))
    rows = torch.where(counts.reshape(spread), rows, torch.zeros((), dtype=x.dtype)) if oob == "skip" else rows
    share = torch.ones(indices.shape, dtype=x.dtype)
    if scale_grad_by_freq:
        share = 1 / torch.bincount(where.reshape(-1), minlength=x.shape[axis])[where.reshape(-1)].reshape(
            indices.shape
        ).to(x.dtype)
    if padding_idx is not None:
        share = torch.where(where == padding_idx % x.shape[axis], 0, share)
    if padding_idx is None and not scale_grad_by_freq:
        return rows
    return rows.detach() + share.reshape(spread) * (
        rows - rows.detach()
    )  # the value of rows, its derivative times share


def _scatter(
    indices: torch.Tensor,
    updates: torch.Tensor,
    size: int,
    axis: int = 0,
    oob: str = "error",
    padding_idx: int | None = None,
) -> torch.Tensor:
    where, counts = positions(indices, size, oob)
    if padding_idx is not None:
        counts = counts & (where != padding_idx % size)
    rank = indices.ndim
    flat = updates.reshape((*updates.shape[:axis], indices.numel(), *updates.shape[axis + rank :]))
    keep = counts.reshape(-1)
    out = torch.zeros(*updates.shape[:axis], size, *updates.shape[axis + rank :], dtype=updates.dtype)
    return out.index_add(axis, where.reshape(-1)[keep], flat.index_select(axis, torch.nonzero(keep)[:, 0]))


def _put(indices: torch.Tensor, updates: torch.Tensor, axis: int, size: int, oob: str = "error") -> torch.Tensor:
    shape = [size if a == axis % updates.ndim else n for a, n in enumerate(updates.shape)]
    return torch.zeros(shape, dtype=updates.dtype).scatter_add(axis, indices.long(), updates)


def _scatter_combined(reduce: str) -> Callable[..., torch.Tensor]:
    def oracle(indices: torch.Tensor, updates: torch.Tensor, axis: int, size: int, oob: str = "error") -> torch.Tensor:
        where, counts = positions(indices, size, oob)
        if reduce == "prod":  # torch's forward mode says 0 for scatter_reduce's prod
            line = torch.arange(size).reshape(
                [size if a == axis % updates.ndim else 1 for a in range(updates.ndim + 1)]
            )
            mine = (where.unsqueeze(axis % updates.ndim) == line) & counts.unsqueeze(axis % updates.ndim)
            return (
                torch.where(mine, updates.unsqueeze(axis % updates.ndim), 1)
                .prod(axis % updates.ndim + 1)
                .to(updates.dtype)
            )
        axis, kind = axis % updates.ndim, torch.finfo if updates.dtype.is_floating_point else torch.iinfo
        limit = {"amax": kind(updates.dtype).min, "amin": kind(updates.dtype).max}[reduce]
        start = (
            -float("inf")
            if kind is torch.finfo and reduce == "amax"
            else float("inf")
            if kind is torch.finfo and reduce == "amin"
            else limit
        )
        shape = [
            size + 1 if a == axis else n for a, n in enumerate(updates.shape)
        ]  # what counts nowhere goes to one more place
        out = torch.full(shape, start, dtype=updates.dtype)
        return out.scatter_reduce(axis, torch.where(counts, where, size), updates, reduce).narrow(axis, 0, size)

    return oracle


def _coalesced(
    indices: torch.Tensor, size: int, oob: str = "error", padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(rows with room for all, of each index the place of its row or the room, how many rows)."""
    where, counts = positions(indices.reshape(-1), size, oob)
    if padding_idx is not None:
        counts = counts & (where != padding_idx % size)
    rows, place = torch.unique(where[counts], return_inverse=True)
    room = torch.full(where.shape, where.numel())
    room[counts] = place
    return torch.cat([rows, torch.full((where.numel() - len(rows),), size)]), room, len(rows)


def _put_rows(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    there = (rows >= 0) & (rows < len(x))
    return x.index_copy(0, rows[there], values[there])


def _coalesced_values(indices: torch.Tensor, updates: torch.Tensor, size: int, **attrs: Any) -> torch.Tensor:
    _, place, _ = _coalesced(indices, size, **attrs)
    flat = updates.reshape(indices.numel(), updates.shape[-1])
    return torch.zeros(len(flat) + 1, flat.shape[1], dtype=flat.dtype).index_add(0, place, flat)[: len(flat)]


def _scatter_reduce(
    x: torch.Tensor, index: torch.Tensor, src: torch.Tensor, dim: int, reduce: str, include_self: bool = True
) -> torch.Tensor:
    src = src[tuple(map(slice, index.shape))]  # torch has no gradient where src is the larger
    if reduce != "prod" or not x.dtype.is_floating_point:
        return torch.scatter_reduce(x, dim, index.long(), src, reduce, include_self=include_self)
    if not x.ndim:
        return (x if include_self else torch.ones_like(x)) * src
    product = _scatter_combined("prod")(index, src, dim, x.shape[dim])
    count = torch.zeros_like(product).scatter_add(dim, index.long(), torch.ones_like(src))
    widths = [n for a, b in zip(reversed(x.shape), reversed(product.shape), strict=True) for n in (0, a - b)]
    product, count = F.pad(product, widths, value=1), F.pad(count, widths)
    return torch.where((count > 0) & (not include_self), torch.ones_like(x), x) * product


def _renormed(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    new = torch.embedding_renorm_(weight.detach().clone(), indices.long().reshape(-1), max_norm, norm_type)
    return weight + (new - weight).detach()


def _embedding(
    indices: torch.Tensor, weight: torch.Tensor, max_norm: float | None = None, norm_type: float = 2.0, **attrs: Any
) -> torch.Tensor:
    return _gather(weight if max_norm is None else _renormed(weight, indices, max_norm, norm_type), indices, **attrs)


def _bag(
    indices: torch.Tensor,
    weight: torch.Tensor,
    offsets: Any = None,
    factors: Any = None,
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    max_norm: float | None = None,
    oob: str = "error",
) -> torch.Tensor:
    """By definition, one bag after another; tests/ops/test_embedding_family.py holds it against torch's own."""
    if indices.ndim == 2 and offsets is not None:
        offsets, factors = None, offsets
    if max_norm is not None:
        weight = _renormed(weight, indices, max_norm)
    rows = _gather(weight, indices, oob=oob, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    place, kept = positions(indices, weight.shape[0], oob)
    if padding_idx is not None:
        kept = kept & (place != padding_idx % weight.shape[0])
    if indices.ndim == 2:
        bags = [(rows[b], kept[b], None if factors is None else factors[b]) for b in range(indices.shape[0])]
    else:
        ends = [*offsets.tolist(), indices.numel()]
        bags = [(rows[i:j], kept[i:j], None if factors is None else factors[i:j]) for i, j in itertools.pairwise(ends)][
            : len(offsets) - include_last_offset
        ]
    out = []
    for x, keep, w in bags:
        x = x[keep]
        w = torch.ones(len(x), dtype=x.dtype) if w is None else w[keep]
        if not len(x):
            out.append(x.sum(0))
        elif mode == "max":
            out.append(x.max(0).values)
        else:
            r = {"sum": 1, "mean": w.sum(), "sqrtn": (w * w).sum().sqrt()}[mode]
            out.append((w[:, None] * x).sum(0) / r)
    return torch.stack(out) if out else weight[:0].clone()


def _slice(x: torch.Tensor, start: Any, limit: Any, step: Any) -> torch.Tensor:
    return x[tuple(slice(a, b, c) for a, b, c in zip(start, limit, step, strict=True))]


def _pad(x: torch.Tensor, pad_width: Any, value: float = 0, mode: str = "constant") -> torch.Tensor:
    if mode == "constant":
        return F.pad(x, [n for pair in reversed(pad_width) for n in pair], value=value)
    for axis, pair in enumerate(pad_width):
        lines = x.movedim(axis, -1)
        flat = F.pad(lines.reshape(1, -1, x.shape[axis]), pair, mode)
        x = flat.reshape(*lines.shape[:-1], flat.shape[-1]).movedim(-1, axis)
    return x


def _cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    name = dtype
    if x.dtype.is_floating_point and not DTYPE[name].is_floating_point and name != "bool":
        low, high = DTYPES[name].range  # torch leaves overflow undefined
        return x.nan_to_num(0.0, float("inf"), -float("inf")).double().trunc().clamp(low, high).to(DTYPE[name])
    return x.to(DTYPE[name])


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.ndim == 2 or bias is None:
        return F.linear(x, weight, bias)
    return F.linear(x, weight) + bias  # torch adds the bias of one output to some ranks alone


def _divided(function: Any) -> Any:
    def oracle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (
            function(a, b)
            if a.dtype.is_floating_point
            else torch.where(b == 0, 0, function(a, torch.where(b == 0, 1, b)))
        )

    return oracle


def _over_blocks(parameter: Any, shape: Any, block: Any) -> Any:
    """A parameter repeated over its blocks."""
    for axis, (n, b) in enumerate(zip(shape, block or shape, strict=True) if parameter.ndim else ()):
        parameter = parameter.index_select(axis, torch.from_numpy(np.arange(n) // max(min(b, n), 1)))
    return parameter


def _dequantize(
    q: torch.Tensor, scale: torch.Tensor, zero: Any = None, block: Any = None, out_dtype: str = "f32"
) -> torch.Tensor:
    wide = (
        torch.float64
        if torch.float64 in (scale.dtype, DTYPE[out_dtype], None if zero is None else zero.dtype)
        else torch.float32
    )
    y = q.to(wide) if zero is None else q.to(wide) - _over_blocks(zero.to(wide), q.shape, block)
    return (y * _over_blocks(scale.to(wide), q.shape, block)).to(DTYPE[out_dtype])


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """By definition (torch's own does not differentiate the weight)."""
    axis, classes = (0, x.shape[0]) if x.ndim == 1 else (1, x.shape[1])
    log_p = torch.log_softmax(x, axis)
    line = [classes if a == axis else 1 for a in range(x.ndim)]
    w = torch.ones(line, dtype=x.dtype) if weight is None else weight.reshape(line)
    if target.dtype.is_floating_point:
        soft = target * (1 - label_smoothing) + label_smoothing / classes
        each, norm = -(soft * w * log_p).sum(axis), torch.tensor(float(x.numel() // classes), dtype=x.dtype)
    else:
        target = target.long()
        kept = target != ignore_index
        hot = (target.unsqueeze(axis) == torch.arange(classes).reshape(line)).to(x.dtype)
        own = (hot * w).sum(axis)
        each = -(1 - label_smoothing) * (hot * w * log_p).sum(axis) - label_smoothing / classes * (w * log_p).sum(axis)
        each, norm = torch.where(kept, each, 0), torch.where(kept, own, 0).sum()
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / norm


def _shape(normalized_shape: Any) -> tuple[int, ...]:
    return normalized_shape if isinstance(normalized_shape, tuple) else (normalized_shape,)


def _mse(x: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.mse_loss(*torch.broadcast_tensors(x, y), reduction=reduction)


def _computed(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _groups(offsets: torch.Tensor) -> Iterator[slice]:
    """The rows of each group."""
    return itertools.starmap(slice, itertools.pairwise(offsets.tolist()))


def _grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, oob: str = "error") -> torch.Tensor:
    parts = [_computed(x)[rows] @ _computed(weight)[g] for g, rows in enumerate(_groups(offsets))]
    rest = x.new_zeros(len(x) - int(offsets[-1]), weight.shape[2], dtype=_computed(x).dtype)
    return torch.cat([*parts, rest]).to(x.dtype)


def _grouped_outer(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, oob: str = "error") -> torch.Tensor:
    return torch.stack([_computed(x)[rows].T @ _computed(y)[rows] for rows in _groups(offsets)]).to(x.dtype)


def _mixed_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    narrow = min((x.dtype, y.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    return _computed(x.to(narrow)) @ _computed(y.to(narrow))


def _nf4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    block: Any = None,
    axis: int = -1,
    low_nibble_first: bool = True,
    out_dtype: str = "f32",
) -> torch.Tensor:
    wide = torch.float64 if torch.float64 in (scale.dtype, DTYPE[out_dtype]) else torch.float32
    values = torch.tensor(NF4, dtype=wide)[
        torch.from_numpy(_unpack(packed.numpy(), "u4", axis, low_nibble_first).astype(np.int64))
    ]
    return (values * _over_blocks(scale.to(wide), values.shape, block)).to(DTYPE[out_dtype])


def _largest(x: torch.Tensor, block: Any) -> torch.Tensor:
    """max |x| of each block."""
    view, widths, inner = [], [], []
    for n, b in zip(x.shape, block or x.shape, strict=True):
        whole = block is None or (b >= n > 0 and b > 1)
        count, size = (1, n) if whole else (-(-n // b), b)
        inner.append(len(view) + 1)
        view += [count, size]
        widths = [0, count * size - n, *widths]
    if not x.numel():
        return x.new_zeros(view[::2]) + x.sum()
    return F.pad(x.abs(), widths).reshape(view).amax(inner) if view else x.abs()


def _dynamic_scale(x: torch.Tensor, block: Any = None, dtype: str = "i8", differentiable: bool = False) -> torch.Tensor:
    top = {"f8e4m3": 448, "f8e5m2": 57344, "f4e2m1": 6}.get(dtype) or DTYPES[dtype].range[1]
    scale = _largest(x if x.dtype is torch.float64 else x.float(), block) / top
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale if differentiable else scale.detach() + 0 * x.sum()


def _windows(
    x: torch.Tensor,
    axis: Any,
    size: Any,
    count: Any,
    step: Any,
    dilation: Any,
    padding: Any,
    value: float = 0,
) -> torch.Tensor:
    rank = x.ndim
    for j, a in enumerate(axis):
        far = (count[j] - 1) * step[j] + (size[j] - 1) * dilation[j] + 1
        widths = [0, 0] * (x.ndim - 1 - a) + [padding[j], max(far - padding[j] - x.shape[a], 0)]
        wide = F.pad(x, widths, value=value).unfold(a, (size[j] - 1) * dilation[j] + 1, step[j])
        x = wide[..., :: dilation[j]].narrow(a, 0, count[j])
    assert x.ndim == rank + len(axis)
    return x


def _overlaps(x: torch.Tensor, axis: Any, length: Any, step: Any, dilation: Any, padding: Any) -> torch.Tensor:
    rank = x.ndim - len(axis)
    for j, a in enumerate(axis):
        size = x.shape[rank + j]
        unit = step[j] if dilation[j] == 1 else 1
        y = x.movedim((a, rank + j), (0, 1))
        out = x.new_zeros(length[j], -(-size // unit), *y.shape[2:])
        at = [(o * step[j] + k * dilation[j] - padding[j], k // unit, o, k) for o in range(len(y)) for k in range(size)]
        kept = torch.tensor([entry for entry in at if 0 <= entry[0] < length[j]]).long().reshape(-1, 4).T
        out = out.index_put((kept[0], kept[1]), y[kept[2], kept[3]])
        x = out.movedim((0, 1), (a, rank + j))
    return x


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any = None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool = False,
    output_padding: Any = (),
    groups: int = 1,
) -> torch.Tensor:
    spatial = weight.ndim - 2
    if not transposed:
        x = F.pad(x, [n for pair in reversed(padding) for n in pair])
        return getattr(F, f"conv{spatial}d")(x, weight, bias, stride, 0, dilation, groups)
    y = getattr(F, f"conv_transpose{spatial}d")(x, weight, bias, stride, 0, output_padding or 0, groups, dilation)
    for a, (low, high) in enumerate(padding):
        y = y.narrow(2 + a, low, y.shape[2 + a] - low - high)
    return y


def _convolution_response(x: torch.Tensor, weight: torch.Tensor, *, size: Any, **attrs: Any) -> torch.Tensor:
    y = _convolution(x, weight, **attrs)
    return y[(..., *(slice(n) for n in size))]


def _convolution_image(
    response: torch.Tensor,
    weight: torch.Tensor,
    *,
    size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int = 1,
) -> torch.Tensor:
    whole = [n + low + high for n, (low, high) in zip(size, padding, strict=True)]
    taps = zip(whole, weight.shape[2:], stride, dilation, strict=True)
    made = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in taps]
    missing = [n - m for n, m in zip(made, response.shape[2:], strict=True)]
    response = F.pad(response, [n for rest in reversed(missing) for n in (0, rest)])
    gradient = getattr(torch.nn.grad, f"conv{len(size)}d_input")
    shape = (response.shape[0], weight.shape[1] * groups, *whole)
    x = gradient(shape, weight, response, stride, 0, dilation, groups)
    return x[(..., *(slice(low, low + n) for n, (low, _) in zip(size, padding, strict=True)))]  # type: ignore[no-any-return]


def _convolution_filter(
    response: torch.Tensor, x: torch.Tensor, *, size: Any, stride: Any, padding: Any, dilation: Any, groups: int = 1
) -> torch.Tensor:
    x = F.pad(x, [n for pair in reversed(padding) for n in pair])
    gradient = getattr(torch.nn.grad, f"conv{len(size)}d_weight")
    shape = (response.shape[1], x.shape[1] // groups, *size)
    return gradient(x, shape, response, stride, 0, dilation, groups)  # type: ignore[no-any-return]


def _pool(name: str) -> Callable[..., Any]:
    def oracle(x: torch.Tensor, kernel_size: Any, stride: Any = None, **attrs: Any) -> Any:
        spatial = len(kernel_size)
        flat = x.reshape(int(np.prod(x.shape[: x.ndim - spatial])), 1, *x.shape[x.ndim - spatial :])
        y = getattr(F, f"{name}_pool{spatial}d")(flat, kernel_size, stride or kernel_size, **attrs)
        shape = lambda t: t.reshape(*x.shape[: x.ndim - spatial], *t.shape[2:])
        return tuple(map(shape, y)) if isinstance(y, tuple) else shape(y)

    return oracle


def _with_running(function: Any) -> Callable[..., torch.Tensor]:
    """torch neither differentiates running statistics nor leaves them alone."""
    return lambda x, mean, var, *affine, **attrs: function(
        x, mean.detach().clone(), var.detach().clone(), *affine, **attrs
    )


def _standardize(x: torch.Tensor, axis: Any = None, eps: float = 1e-5) -> torch.Tensor:
    axes = _axes(x, axis)
    kept = [a for a in range(x.ndim) if a not in {b % x.ndim for b in axes}]
    order = [*kept, *(a for a in range(x.ndim) if a not in kept)]
    moved = x.permute(order)
    y = F.layer_norm(moved, moved.shape[len(kept) :], eps=eps)
    return y.permute([order.index(a) for a in range(x.ndim)])


def _lgamma(x: torch.Tensor) -> torch.Tensor:
    """Where torch's own second derivative is right to the last digits (below 6 it is so to eight)."""
    return torch.lgamma(x + 12) - sum(torch.log(x + k) for k in range(12))


def _polygamma(x: torch.Tensor, order: int) -> torch.Tensor:
    """By definition, the sum's tail by Euler and Maclaurin (torch's own of order 1 is right to eight digits)."""
    s, z = order + 1, x + 40
    total = sum((x + k) ** -s for k in range(40)) + z ** (1 - s) / (s - 1) + z**-s / 2
    for k, factor in ((1, 1 / 12), (3, -1 / 720), (5, 1 / 30240)):
        total = total + factor * math.prod(range(s, s + k)) * z ** -(s + k)
    return -((-1) ** order) * math.factorial(order) * total


def _reduced(each: torch.Tensor, reduction: str) -> torch.Tensor:
    return {"none": each, "sum": each.sum(), "mean": each.mean()}[reduction]


def _gaussian(
    x: torch.Tensor, t: torch.Tensor, var: torch.Tensor, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    """By torch's definition: the held variance passes its gradient on."""
    var = var.unsqueeze(-1) if 0 < var.ndim == x.ndim - 1 else var
    held = var + (var.clamp_min(eps) - var).detach()
    each = (torch.log(held) + (x - t) ** 2 / held) / 2 + (math.log(2 * math.pi) / 2 if full else 0)
    return _reduced(each, reduction)


def _nll(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """By definition (torch's own does not differentiate the weight)."""
    axis = 0 if x.ndim == 1 else 1
    target = target.long()
    kept = target != ignore_index
    w = torch.ones(x.shape[axis], dtype=x.dtype) if weight is None else weight
    own = torch.where(kept, w[torch.where(kept, target, 0)], 0)
    each = -own * x.gather(axis, torch.where(kept, target, 0).unsqueeze(axis)).squeeze(axis)
    each = torch.where(kept, each, 0)
    return each.sum() / own.sum() if reduction == "mean" else _reduced(each, reduction)


def _multi_margin(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, p: int = 1, margin: float = 1.0, reduction: str = "mean"
) -> torch.Tensor:
    """By definition (torch's own has no second derivative and, of no rows, a value that nobody wrote)."""
    target = target.long().unsqueeze(-1)
    over = (margin - x.gather(-1, target) + x).clamp_min(0) ** p
    own = torch.arange(x.shape[-1]) == target
    each = torch.where(own, 0, over * (1 if weight is None else weight[target]))
    return _reduced(each.sum(-1) / x.shape[-1], reduction)


def _multilabel_margin(x: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """By definition, row after row."""
    each = []
    for row, listed in zip(x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1]).tolist(), strict=True):
        named = listed[: listed.index(-1)] if -1 in listed else listed
        others = [c for c in range(len(row)) if c not in named]
        terms = [(1 - row[a] + row[b]).clamp_min(0) for a in named for b in others]
        each.append(sum(terms, row.sum() * 0) / len(row))
    return _reduced(torch.stack(each).reshape(x.shape[:-1]) if each else x.sum(-1), reduction)


def _max_unpool(x: Any, indices: Any, sizes: Any) -> Any:
    lead = x.shape[: x.ndim - len(sizes)]
    flat = torch.zeros(*lead, math.prod(sizes), dtype=x.dtype)
    return flat.scatter(-1, indices.reshape(*lead, -1), x.reshape(*lead, -1)).reshape(*lead, *sizes)


TORCH: dict[str, Callable[..., Any]] = {
    "lerp": torch.lerp,
    "count_not_above": lambda line, x: torch.searchsorted(line.long(), x, right=True),
    "standardize": _standardize,
    "diagonal": lambda x, offset=0, axis1=0, axis2=1: torch.diagonal(x, offset, axis1, axis2),
    "diag_embed": lambda x, offset=0, axis1=-2, axis2=-1, rows=None, columns=None: F.pad(
        torch.diag_embed(x, offset, axis1, axis2),
        [0] * 2 * (x.ndim - max(axis1 % (x.ndim + 1), axis2 % (x.ndim + 1)))
        + [0, 0 if columns is None else columns - x.shape[-1] - abs(offset)],
    ),
    "windows": _windows,
    "overlaps": _overlaps,
    "overlap_add": lambda x, axis, **attrs: _overlaps(x, axis, **attrs).sum(tuple(range(x.ndim - len(axis), x.ndim))),
    "convolution": _convolution,
    "convolution_response": _convolution_response,
    "convolution_image": _convolution_image,
    "convolution_filter": _convolution_filter,
    "max_pool": _pool("max"),
    "max_unpool": _max_unpool,
    "max_pool_indices": lambda x, **attrs: _pool("max")(x, **attrs, return_indices=True)[1],
    "avg_pool": _pool("avg"),
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "pow": torch.pow,
    "floordiv": _divided(lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "mod": _divided(torch.remainder),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, min=None, max=None: torch.clamp(x, min, max),
    **{
        name: getattr(torch, name)
        for name in (
            "exp log log1p expm1 sqrt rsqrt tanh sigmoid erf sin cos abs sign floor round relu "
            "eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor where"
        ).split()
    },
    **{
        name: getattr(torch, name)
        for name in (
            "exp2 log2 log10 tan asin acos atan atan2 hypot sinh cosh asinh acosh atanh erfc erfinv "
            "logaddexp logaddexp2 xlogy ceil trunc frac copysign square deg2rad rad2deg ldexp nan_to_num fmax fmin "
            "isnan isinf isfinite isposinf isneginf signbit logical_and logical_or logical_xor logical_not logit"
        ).split()
    },
    **{name: getattr(torch.special, name) for name in "xlog1py entr ndtr log_ndtr ndtri i0 i0e i1 i1e erfcx".split()},
    "lgamma": _lgamma,
    "digamma": lambda x: torch.digamma(x + 20) - sum(1 / (x + k) for k in range(20)),
    "polygamma": _polygamma,
    "fmod": _divided(torch.fmod),
    "exponent": lambda x: torch.frexp(x).exponent.to(x.dtype),
    "mantissa": lambda x: torch.frexp(x).mantissa,
    "nextafter": torch.nextafter,
    "clamp_tensor": torch.clamp,
    "invert": torch.bitwise_not,
    "stop_gradient": lambda x: x.detach(),
    "with_gradient_of": lambda x, of: x.detach() + (of - of.detach()),
    "scale_gradient": lambda x, factor: x.detach() + (x - x.detach()) * factor.detach().to(x.dtype),
    "cast": _cast,
    "to_float8": lambda x, dtype, saturate=True: x.to(FLOAT8[dtype]).float(),  # samples stay within the range
    "gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "normal_cdf": lambda x: torch.special.ndtr(x),
    "gelu_derivative": lambda x: torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    "silu": F.silu,
    **{
        name: getattr(F, name)
        for name in (
            "elu selu celu leaky_relu rrelu prelu hardtanh relu6 hardswish softshrink hardshrink tanhshrink "
            "threshold mish logsigmoid softsign"
        ).split()
    },
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,  # torch's own gradient has a sixth of 24 bits in f64, too
    "glu": lambda x, axis=-1: F.glu(x, axis),
    "softplus": lambda x, beta=1.0, threshold=20.0: F.softplus(x, beta, threshold),
    "constant": lambda value, dtype, shape=(): torch.tensor(value, dtype=DTYPE[dtype]).reshape(shape),
    "dim": lambda size: torch.tensor(size),
    "iota": (
        lambda shape, axis=0, dtype="i64": (
            torch.arange(shape[axis], dtype=DTYPE[dtype])
            .reshape([-1 if a == axis else 1 for a in range(len(shape))])
            .expand(*shape)
        )
    ),
    "reshape": lambda x, shape: (
        torch.reshape(x, shape)
        if x.numel() or -1 not in shape
        else x.flatten()
        if shape == (-1,)
        else x.reshape([0 if s == -1 else s for s in shape])
    ),
    "transpose": lambda x, axes=None: x.permute(tuple(reversed(range(x.ndim))) if axes is None else axes),
    "broadcast_to": lambda x, shape: torch.broadcast_to(x, shape),
    "slice": _slice,
    "pad": _pad,
    "concat": lambda *xs, axis=0: torch.cat(xs, axis),
    "flip": lambda x, axis=None: torch.flip(x, _axes(x, axis)),
    "cumsum": _scan(torch.cumsum),
    "cumprod": _scan(torch.cumprod),
    "cummax": _scan(lambda x, a: torch.cummax(x, a).values),
    "cummin": _scan(lambda x, a: torch.cummin(x, a).values),
    "cumargmax": _place_of_scan(torch.cummax),
    "cumargmin": _place_of_scan(torch.cummin),
    "logcumsumexp": _scan(torch.logcumsumexp),
    "linear_recurrence": _recurrence,
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "prod": _prod,
    "amax": _reduction(torch.amax),
    "amin": _reduction(torch.amin),
    "argmax": _arg(torch.argmax),
    "argsort": lambda x, axis=-1, descending=False, stable=True: torch.argsort(
        x, dim=axis, descending=descending, stable=True
    ),
    "argsort_rows": lambda keys, count: torch.argsort(keys, dim=-1, stable=True)[..., :count],
    "sort_segments": _segments,
    "argmin": _arg(torch.argmin),
    "max": _first(torch.max),
    "min": _first(torch.min),
    "var": _var,
    "std": lambda x, **attrs: _var(x, **attrs).sqrt(),
    "nansum": _reduction(torch.nansum),
    "nanmean": _reduction(torch.nanmean),
    "count_nonzero": lambda x, axis=None, keepdims=False: (x != 0).sum(_axes(x, axis), keepdim=keepdims),
    "any": lambda x, axis=None, keepdims=False: torch.any(x, _axes(x, axis), keepdim=keepdims),
    "all": lambda x, axis=None, keepdims=False: torch.all(x, _axes(x, axis), keepdim=keepdims),
    "norm": lambda x, p=2.0, axis=None, keepdims=False: torch.linalg.vector_norm(x, p, axis, keepdim=keepdims),
    "normalize": lambda x, p=2.0, axis=1, eps=1e-12: (
        x / torch.linalg.vector_norm(x, p, axis, keepdim=True).clamp_min(eps)
    ),
    "cosine_similarity": lambda x1, x2, axis=1, eps=1e-8: F.cosine_similarity(x1, x2, axis, eps),
    "pairwise_distance": F.pairwise_distance,
    "cdist": lambda x1, x2, p=2.0: torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1),
    "logsumexp": _reduction(torch.logsumexp),
    "softmax": lambda x, axis=-1: torch.softmax(x, axis),
    "safe_softmax": lambda x, axis=-1: torch._safe_softmax(x, axis),
    "log_softmax": lambda x, axis=-1: torch.log_softmax(x, axis),
    "gather": _gather,
    "embedding": _embedding,
    "embedding_renorm": _renormed,
    "embedding_bag": _bag,
    "coalesce_rows": lambda indices, **attrs: _coalesced(indices, **attrs)[0],
    "coalesce_count": lambda indices, **attrs: torch.tensor(_coalesced(indices, **attrs)[2]),
    "coalesce_values": _coalesced_values,
    "put_rows": _put_rows,
    "segment_ids": lambda offsets, size, oob="error": torch.searchsorted(offsets, torch.arange(size), right=True) - 1,
    "index_select": lambda x, index, dim: torch.index_select(x, dim, index.long()),
    "index_add": lambda x, index, source, dim, alpha=1: torch.index_add(x, dim, index.long(), source, alpha=alpha),
    **{f"scatter_{way}": _scatter_combined(way) for way in ("amax", "amin", "prod")},
    "scatter_reduce": _scatter_reduce,
    "scatter_add": _scatter,
    "scatter_add_along_axis": _put,
    "dequantize_nf4": _nf4,
    "dynamic_scale": _dynamic_scale,
    "take_along_axis": lambda x, indices, axis: torch.gather(
        x,
        axis,
        indices.long().expand(
            *[n if a == axis % x.ndim else m for a, (n, m) in enumerate(zip(indices.shape, x.shape, strict=True))]
        ),
    ),
    "matmul": torch.matmul,
    "integer_matmul": lambda x, y: torch.matmul(x.int(), y.int()),  # modulo 2^32
    "grouped_matmul": _grouped_matmul,
    "grouped_outer": _grouped_outer,
    "mixed_matmul": _mixed_matmul,
    "softmax_matmul": lambda x, value: (torch._safe_softmax(_computed(x), -1) @ _computed(value)).to(value.dtype),
    "linear": _linear,
    "mode_product": lambda x, matrix, axis=-1: torch.tensordot(
        torch.tensor(matrix, dtype=x.dtype), x, dims=([1], [axis])
    ).movedim(0, axis),
    "dequantize": _dequantize,
    "cross_entropy": _cross_entropy,
    "mse_loss": _mse,
    **{
        name: getattr(F, name)
        for name in (
            "l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss margin_ranking_loss "
            "multilabel_soft_margin_loss hinge_embedding_loss cosine_embedding_loss triplet_margin_loss"
        ).split()
    },
    "binary_cross_entropy": lambda x, t, weight=None, reduction="mean": _reduced(
        (1 if weight is None else weight)
        * -(t * torch.log(x).clamp_min(-100) + (1 - t) * torch.log1p(-x).clamp_min(-100)),
        reduction,
    ),
    "binary_cross_entropy_with_logits": lambda x, t, weight=None, pos=None, reduction="mean": _reduced(
        (1 if weight is None else weight)
        * -((1 if pos is None else pos) * t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x)),
        reduction,
    ),
    "gaussian_nll_loss": _gaussian,
    "nll_loss": _nll,
    "soft_margin_loss": lambda x, t, reduction="mean": _reduced(-F.logsigmoid(t * x), reduction),
    "multi_margin_loss": _multi_margin,
    "multilabel_margin_loss": _multilabel_margin,
    "layer_norm": lambda x, weight=None, bias=None, *, normalized_shape, eps=1e-5: F.layer_norm(
        x, _shape(normalized_shape), weight, bias, eps
    ),
    **sampling.TORCH,
    "rms_norm": lambda x, weight=None, *, normalized_shape, eps=None: F.rms_norm(
        x, _shape(normalized_shape), weight, torch.finfo(x.dtype).eps if eps is None else eps
    ),
}


def _as_strided_scatter(x: Any, src: Any, size: Any, stride: Any, storage_offset: int) -> Any:
    """By scatter: torch's own gradient of the operand is that of the elements which are replaced."""
    places = torch.arange(x.numel()).as_strided(size, stride, storage_offset)
    return x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(x.shape)


def _recurrent(name: str) -> Callable[..., Any]:
    def layers(
        *tensors: Any, has_biases: bool = True, num_layers: int = 1, bidirectional: bool = False, **more: Any
    ) -> Any:
        states = 2 if name == "lstm" else 1
        x, state, weights = tensors[0], tensors[1 : 1 + states], list(tensors[1 + states :])
        function = getattr(torch, f"{name}_tanh" if name == "rnn" else name)
        given = state if states == 2 else state[0]
        batch_first = more.get("batch_first", False)
        return function(x, given, weights, has_biases, num_layers, 0.0, False, bidirectional, batch_first)

    return layers


def _ctc_loss(x: Any, targets: Any, **attrs: Any) -> Any:
    """Without the term exp(log_probs) that torch's gradient has more than the derivative."""
    loss = F.ctc_loss(x, targets, **attrs)
    extra = (
        torch.stack([x[:n, k].exp().sum() for k, n in enumerate(attrs["input_lengths"])])
        if x.ndim == 3
        else x.exp().sum()
    )
    return loss + (extra.detach() - extra)


def _rnn_cell(*tensors: Any, nonlinearity: str = "tanh") -> Any:
    return (torch.rnn_tanh_cell if nonlinearity == "tanh" else torch.rnn_relu_cell)(*tensors)


def _middle(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis=None, keepdims=False: function(x) if axis is None else tuple(function(x, axis, keepdims))


def _quantile(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, q, axis=None, keepdims=False, interpolation="linear": function(
        x, q, axis, keepdims, interpolation=interpolation
    )


def _areas(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch takes the places x or the width dx, not both."""
    return lambda y, x=None, dx=1.0, axis=-1: function(y, dx=dx, dim=axis) if x is None else function(y, x, dim=axis)


def _reduce_window(
    x: Any, reduction: str, window: Any, strides: Any = 1, dilation: Any = 1, padding: Any = 0
) -> torch.Tensor:
    """Padded with the reduction's neutral element and unfolded axis by axis; the windows are flattened and reduced."""
    per_axis = [v if isinstance(v, tuple) else (v,) * x.ndim for v in (window, strides, dilation, padding)]
    border = {"sum": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}[reduction]
    x = F.pad(x, [p for p in reversed(per_axis[3]) for _ in range(2)], value=border)
    rank = x.ndim
    for axis, (size, step, apart) in enumerate(zip(*per_axis[:3], strict=True)):
        x = x.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
    x = x.flatten(rank)
    return {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}[reduction](x, -1)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(F, name) for name, op in REGISTRY.items() if isinstance(op, Function) and hasattr(F, name)},
    "group_norm": lambda x, *affine, num_groups, **attrs: F.group_norm(x, num_groups, *affine, **attrs),
    **{name: _with_running(getattr(F, name)) for name in ("batch_norm", "instance_norm")},
    **{
        name: getattr(torch, name)
        for name in (
            "flatten movedim swapaxes tile tril triu tensordot bmm outer addmm baddbmm addbmm addmv addr addcmul"
            " addcdiv dot inner kron trace"
        ).split()
    },
    "vecdot": lambda x, y, axis=-1: torch.linalg.vecdot(x, y, dim=axis),
    "matrix_power": torch.linalg.matrix_power,
    "multi_dot": lambda *xs: torch.linalg.multi_dot(xs),
    "divide": torch.div,
    "diff": lambda x, prepend=None, append=None, n=1, axis=-1: torch.diff(
        x, n, axis, *(v if v is None or v.ndim else v.expand(len(x), 1) for v in (prepend, append))
    ),
    "reduce_window": _reduce_window,
    **{name: _areas(getattr(torch, name)) for name in ("trapezoid", "cumulative_trapezoid")},
    "einsum": lambda *xs, equation: torch.einsum(equation, *xs),
    "cross": lambda x, y, axis=-1: torch.linalg.cross(x, y, dim=axis),
    "weight_norm": torch._weight_norm,
    "native_batch_norm": lambda x, weight, bias, mean, var, training, momentum=0.1, eps=1e-5: (
        torch.ops.aten._native_batch_norm_legit_functional(
            x, weight, bias, mean.detach(), var.detach(), training, momentum, eps
        )
    ),
    "squeeze": lambda x, axis=None: x.squeeze() if axis is None else x.squeeze(axis),
    "unsqueeze": lambda x, axis: x.unsqueeze(axis),
    "searchsorted": lambda line, x, sorter=None, **attrs: torch.searchsorted(line, x, sorter=sorter, **attrs),
    "bucketize": torch.bucketize,
    "one_hot": lambda x, num_classes: F.one_hot(x.long(), num_classes),
    "isin": torch.isin,
    "sort": lambda x, axis=-1, descending=False: tuple(torch.sort(x, dim=axis, descending=descending, stable=True)),
    "msort": torch.msort,
    "frexp": lambda x: tuple(torch.frexp(x)),
    "mode": lambda x, axis=-1, keepdims=False: tuple(torch.mode(x, axis, keepdims)),
    "gradient": lambda x, spacing=1.0, axis=None, edge_order=1: torch.gradient(
        x,
        spacing=tuple(map(torch.as_tensor, spacing)) if isinstance(spacing, tuple) and np.ndim(spacing[0]) else spacing,
        dim=axis,
        edge_order=edge_order,
    ),
    "topk": lambda x, k, axis=-1, largest=True: tuple(torch.topk(x, k, axis, largest)),
    "kthvalue": lambda x, k, axis=-1, keepdims=False: tuple(torch.kthvalue(x, k, axis, keepdims)),
    **{name: _middle(getattr(torch, name)) for name in ("median", "nanmedian")},
    **{name: _quantile(getattr(torch, name)) for name in ("quantile", "nanquantile")},
    "unflatten": lambda x, axis, sizes: x.unflatten(axis, sizes),
    "var_mean": lambda x, axis=None, keepdims=False, ddof=0: torch.var_mean(x, axis, correction=ddof, keepdim=keepdims),
    "std_mean": lambda x, axis=None, keepdims=False, ddof=0: torch.std_mean(x, axis, correction=ddof, keepdim=keepdims),
    "stack": lambda *xs, axis=0: torch.stack(xs, axis),
    "split": lambda x, sizes, axis=0: torch.split(x, list(sizes) if isinstance(sizes, tuple) else sizes, axis),
    "chunk": lambda x, chunks, axis=0: torch.chunk(x, chunks, axis),
    "unbind": lambda x, axis=0: torch.unbind(x, axis),
    "repeat": lambda x, repeats: x.repeat(repeats),
    "repeat_interleave": lambda x, repeats, axis=None: torch.repeat_interleave(x, repeats, axis),
    "roll": lambda x, shifts, axis=None: torch.roll(x, shifts, axis),
    **{
        name: getattr(torch, name)
        for name in ("take masked_fill slice_scatter select_scatter diagonal_scatter as_strided").split()
    },
    "index_copy": lambda x, index, source, dim: x.index_copy(dim, index, source),
    "index_fill": lambda x, index, dim, value: x.index_fill(dim, index, value),
    "index_reduce": lambda x, index, source, dim, reduce, include_self=True: x.index_reduce(
        dim, index, source, reduce, include_self=include_self
    ),
    "scatter": lambda x, index, dim, src, reduce=None: (
        x.scatter(dim, index, src)
        if reduce is None
        else x.scatter_reduce(dim, index, torch.full(index.shape, src, dtype=x.dtype), "prod")
    ),  # with reduce, torch's scatter has no gradient
    "as_strided_scatter": _as_strided_scatter,
    "put": torch.Tensor.put,
    "rnn_cell": _rnn_cell,
    "lstm_cell": lambda x, h, c, *weights: torch.lstm_cell(x, (h, c), *weights),
    "gru_cell": torch.gru_cell,
    **{name: _recurrent(name) for name in ("rnn", "lstm", "gru")},
    "ctc_loss": _ctc_loss,
    "linear_cross_entropy": lambda x, w, target, bias=None, weight=None, batch_chunk_size=None, **attrs: _cross_entropy(
        F.linear(x, w, bias), target, weight, **attrs
    ),
    "masked_scatter": torch.masked_scatter,
    "index_put": lambda x, indices, values, accumulate=False: x.index_put(
        tuple(torch.as_tensor(i) for i in indices), torch.tensor(values, dtype=x.dtype), accumulate
    ),
}
"""What torch says each function means, whose calls leave no node: as in ``TORCH``; several results are a tuple."""
