"""How the calls of torch's OpInfo samples are written with gradc's ops: ``TABLE[label](*arguments, **named)``.

A label is the OpInfo's name, with its variant after a dot.  A function takes torch's arguments with traced values for
the tensors and names for dtypes.  What is not there yet is in :data:`ABSENT`, with what it lacks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradc import ops
from gradc.ir.node import Node
from gradc.ir.operands import broadcast_shapes

# -- shapes ------------------------------------------------------------------------------------------------------------


def _axes(x: Node, dim: Any) -> tuple[int, ...]:
    dims = range(x.rank) if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    return tuple(d % max(x.rank, 1) for d in dims)


def _ints(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


def reshape(x: Node, *shape: Any) -> Node:
    sizes = list(_ints(shape))
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = math.prod(x.shape) // known if known else 0
    return ops.reshape(x, tuple(sizes))


def expand(x: Node, *shape: Any) -> Node:
    sizes = list(_ints(shape))
    lead = len(sizes) - x.rank
    return ops.broadcast_to(x, tuple(x.shape[a - lead] if s == -1 else s for a, s in enumerate(sizes)))


def permute(x: Node, *dims: Any) -> Node:
    return ops.transpose(x, tuple(d % x.rank for d in _ints(dims))) if x.rank else x


def transpose(x: Node, a: int, b: int) -> Node:
    order = list(range(x.rank))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(x, order)


def narrow(x: Node, dim: int, start: Any, length: int) -> Node:
    start = int(start) % max(x.shape[dim], 1) if int(start) < 0 else int(start)
    return _cut(x, dim, start, start + length)


def _cut(x: Node, dim: int, start: Any = None, stop: Any = None, step: int = 1) -> Node:
    key = [slice(None)] * x.rank
    key[dim % x.rank] = slice(start, stop, step)
    return x[tuple(key)]


def select(x: Node, dim: int, index: int) -> Node:
    key: list[Any] = [slice(None)] * x.rank
    key[dim % x.rank] = index
    return x[tuple(key)]


def tensor_split(x: Node, given: Any, dim: int = 0) -> list[Node]:
    whole = x.shape[dim]
    if isinstance(given, int):
        sizes = [whole // given + (k < whole % given) for k in range(given)]
        return ops.split(x, sizes, dim)
    ends = [0, *(int(g) for g in given), whole]
    pieces = [(min(a, whole), min(max(b, a), whole)) for a, b in itertools.pairwise(ends)]
    return [_cut(x, dim, a, b) for a, b in pieces]


def cat(xs: Sequence[Node], dim: int = 0) -> Node:
    full = [x for x in xs if x.shape != (0,)] or list(xs)[:1]
    return ops.concat(full, axis=dim)


def at_least(rank: int, x: Node) -> Node:
    """torch's atleast_1d, atleast_2d and atleast_3d."""
    while x.rank < rank:
        x = ops.unsqueeze(x, 0 if (x.rank < 2 and rank < 3) or x.rank == 0 or (rank == 3 and x.rank == 1) else -1)
    return x


def stacked(rank: int, axis: int) -> Callable[[Sequence[Node]], Node]:
    return lambda xs: ops.concat([at_least(rank, x) for x in xs], axis=axis)


def column_stack(xs: Sequence[Node]) -> Node:
    return ops.concat([reshape(x, (-1, 1)) if x.rank < 2 else x for x in xs], axis=1)


def rot90(x: Node, k: int = 1, dims: Sequence[int] = (0, 1)) -> Node:
    a, b = dims
    for _ in range(k % 4):
        x = ops.flip(transpose(x, a, b), axis=(a % x.rank,))
    return x


def diag(x: Node, diagonal_: int = 0) -> Node:
    return ops.diag_embed(x, diagonal_) if x.rank == 1 else ops.diagonal(x, diagonal_)


def padded(x: Node, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Node:
    """The borders in torch's order: the last axis first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return ops.pad(x, (*((0, 0),) * (x.rank - len(pairs)), *reversed(pairs)), value or 0, mode)


def channel_shuffle(x: Node, groups: int) -> Node:
    n, c, *rest = x.shape
    y = ops.reshape(x, (n, groups, c // groups, *rest))
    return ops.reshape(permute(y, [0, 2, 1, *range(3, y.rank)]), x.shape)


def unfold(x: Node, dim: int, size: int, step: int) -> Node:
    if not x.rank:
        return ops.reshape(x, (size,))
    at = dim % x.rank
    count = (x.shape[at] - size) // step + 1
    places = np.array([[k * step + j for j in range(size)] for k in range(count)], np.int64).reshape(count, size)
    return ops.movedim(ops.gather(x, places, axis=at), at + 1, -1)


def repeat_interleave(x: Node, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Node:
    if dim is None:
        x, dim = ops.reshape(x, (math.prod(x.shape),)), 0
    if not x.rank:
        x = ops.reshape(x, (1,))
    places = np.repeat(np.arange(x.shape[dim]), repeats if isinstance(repeats, int) else np.asarray(repeats))
    return ops.gather(x, places, axis=dim % x.rank)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _lift(x: Any, y: Any) -> tuple[Any, Any]:
    """torch promotes an integer operand beside a float one."""
    if isinstance(x, Node) and isinstance(y, Node) and x.dtype is not y.dtype:
        if x.dtype.is_float and not y.dtype.is_float:
            y = y.astype(x.dtype)
        elif y.dtype.is_float and not x.dtype.is_float:
            x = x.astype(y.dtype)
    return x, y


def binary(op: Any, *, reverse: bool = False) -> Callable[..., Node]:
    def fn(x: Any, y: Any, **named: Any) -> Node:
        x, y = _lift(x, _real(y))
        return op(y, x, **named) if reverse else op(x, y, **named)

    return fn


def _real(y: Any) -> Any:
    return float(y) if isinstance(y, bool) else y


def vander(x: Node, N: int | None = None) -> Node:
    x = at_least(1, x)
    count = x.shape[-1] if N is None else N
    powers = [ops.broadcast_to(ops.constant((1.0,), x.dtype, ()), x.shape)]
    for _ in range(count - 1):
        powers.append(powers[-1] * x)
    return ops.stack(powers, axis=-1)


def block_diag(*xs: Node) -> Node:
    xs = tuple(ops.reshape(x, (1,) * (2 - x.rank) + x.shape) for x in xs)
    width, at, rows = sum(x.shape[1] for x in xs), 0, []
    for x in xs:
        rows.append(ops.pad(x, ((0, 0), (at, width - at - x.shape[1]))))
        at += x.shape[1]
    return ops.concat(rows, axis=0)


def sum_to_size(x: Node, *size: Any) -> Node:
    sizes = _ints(size)
    lead = x.rank - len(sizes)
    axes = tuple(a for a in range(x.rank) if a < lead or (sizes[a - lead] == 1 and x.shape[a] != 1))
    return ops.reshape(ops.sum(x, axes), sizes) if axes else x


def float_power(x: Node, y: Any) -> Node:
    x = x.astype("f64")
    return ops.pow(x, y.astype("f64") if isinstance(y, Node) else float(y))


def sinc(x: Node) -> Node:
    zero = x == 0.0
    safe = ops.where(zero, 1.0, x) * math.pi
    return ops.where(zero, 1.0 + x * 0.0, ops.sin(safe) / safe)


def mvlgamma(x: Node, p: int) -> Node:
    start = p * (p - 1) / 4 * math.log(math.pi)
    return functools.reduce(ops.add, [ops.lgamma(x - k / 2) for k in range(p)]) + start


def _bound(x: Node, bound: Any) -> Any:
    return _lift(x, bound)[1]


# -- reductions --------------------------------------------------------------------------------------------------------


def reduction(op: Any, *, flat: bool = True) -> Callable[..., Node]:
    def fn(x: Node, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any) -> Node:
        x = x if dtype is None else x.astype(dtype)
        axis = None if dim is None or dim == () or dim == [] else _axes(x, dim)
        return op(x, axis if x.rank else None, keepdims=keepdim, **more)

    return fn


def masked(op: Any, neutral: float) -> Callable[..., Node]:
    def fn(x: Node, dim: Any = None, *, keepdim: bool = False, mask: Any = None, dtype: Any = None) -> Node:
        return reduction(op)(x if mask is None else ops.where(mask, x, neutral), dim, keepdim)

    return fn


def extremum(op: Any) -> Callable[..., Any]:
    def fn(x: Node, *dims: Any, keepdim: bool = False, dim: Any = None, other: Any = None) -> Any:
        if isinstance(other, Node) or (dims and isinstance(dims[0], Node)):
            binary_op = ops.maximum if op is ops.max else ops.minimum
            return binary_op(x, other if other is not None else dims[0])
        dim = dims[0] if dims else dim
        keepdim = dims[1] if len(dims) > 1 else keepdim
        if dim is None:
            return op(x)
        arg = ops.argmax if op is ops.max else ops.argmin
        if not x.rank:
            return x, ops.constant((0,), "i64", ())
        return op(x, int(dim) % x.rank, keepdims=keepdim), arg(x, int(dim), keepdims=keepdim)

    return fn


def std_var(op: Any, with_mean: bool = False) -> Callable[..., Any]:
    def fn(x: Node, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None) -> Any:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        ddof = (1 if unbiased is None or unbiased else 0) if correction is None else correction
        axis = None if dim is None or dim == () or dim == [] else _axes(x, dim)
        found = op(x, axis, keepdims=keepdim, ddof=ddof)
        return (found, ops.mean(x, axis, keepdims=keepdim)) if with_mean else found

    return fn


def norm(x: Node, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, ord: Any = None) -> Node:
    p = ord if ord is not None else p
    p = 2.0 if p in ("fro", None) else float(p)
    axis = None if dim is None or dim == () else _axes(x, dim)
    return ops.norm(x, p=p, axis=axis if x.rank else None, keepdims=keepdim)


def soft(op: Any, sign: float = 1.0) -> Callable[..., Node]:
    def fn(x: Node, dim: int, dtype: Any = None, **_: Any) -> Node:
        x = x if dtype is None else x.astype(dtype)
        return op(x if sign == 1 else -x, dim % x.rank) if x.rank else ops.reshape(op(ops.reshape(x, (1,)), 0), ())

    return fn


def logsumexp(x: Node, dim: Any, keepdim: bool = False) -> Node:
    return ops.logsumexp(x, _axes(x, dim) if x.rank else None, keepdims=keepdim)


def dist(a: Node, b: Node, p: float = 2) -> Node:
    return ops.norm(a - b, p=float(p))


def renorm(x: Node, p: float, dim: int, maxnorm: float) -> Node:
    axes = tuple(a for a in range(x.rank) if a != dim % x.rank)
    size = ops.norm(x, p=float(p), axis=axes, keepdims=True)
    return x * ops.where(size > maxnorm, maxnorm / (size + 1e-7), 1.0)


def masked_mean(x: Node, dim: Any = None, *, keepdim: bool = False, mask: Any = None, dtype: Any = None) -> Node:
    if mask is None:
        return reduction(ops.mean)(x, dim, keepdim)
    mask = expand(mask, x.shape)
    total = reduction(ops.sum)(ops.where(mask, x, 0.0), dim, keepdim)
    return total / reduction(ops.sum)(mask, dim, keepdim).astype(x.dtype)


def masked_std_var(op: Any) -> Callable[..., Node]:
    def fn(
        x: Node,
        dim: Any = None,
        unbiased: Any = None,
        *,
        correction: Any = None,
        keepdim: bool = False,
        mask: Any = None,
        dtype: Any = None,
    ) -> Node:
        ddof = (1 if unbiased or unbiased is None else 0) if correction is None else correction
        mask = expand(mask, x.shape) if mask is not None else ops.isfinite(x) | ~ops.isfinite(x)
        count = reduction(ops.sum)(mask, dim, True).astype(x.dtype)
        mean = reduction(ops.sum)(ops.where(mask, x, 0.0), dim, True) / count
        centred = ops.where(mask, x - mean, 0.0)
        free = ops.maximum(reduction(ops.sum)(mask, dim, keepdim).astype(x.dtype) - ddof, 0.0)
        found = reduction(ops.sum)(centred * centred, dim, keepdim) / free
        return found if op is ops.var else ops.sqrt(found)

    return fn


def masked_norm(
    x: Node, ord: Any, dim: Any = None, *, keepdim: bool = False, mask: Any = None, dtype: Any = None
) -> Node:
    neutral = math.inf if float(ord) == -math.inf else 0.0
    return norm(x if mask is None else ops.where(mask, x, neutral), ord, dim, keepdim)


def masked_normalize(x: Node, ord: float, dim: int, *, eps: float = 1e-12, mask: Any = None, dtype: Any = None) -> Node:
    x = x if mask is None else ops.where(mask, x, 0.0)
    return ops.normalize(x, p=float(ord), axis=dim if x.rank else (), eps=eps)


def masked_soft(op: Any, sign: float = 1.0) -> Callable[..., Node]:
    def fn(x: Node, dim: int, *, mask: Any = None, dtype: Any = None) -> Node:
        x = -x if sign < 0 else x
        return soft(op)(x if mask is None else ops.where(mask, x, -math.inf), dim)

    return fn


def matrix_norm(x: Node, ord: Any, dim: Any, keepdim: bool) -> Node:
    a, b = _axes(x, dim)
    if ord == "fro":
        return ops.norm(x, p=2.0, axis=(a, b), keepdims=keepdim)
    rows, columns = (a, b) if abs(ord) == 1 else (b, a)
    sums = ops.sum(abs(x), rows, keepdims=True)
    found = (ops.amax if ord > 0 else ops.amin)(sums, columns, keepdims=True)
    return found if keepdim else ops.reshape(found, tuple(s for k, s in enumerate(x.shape) if k not in (a, b)))


def linalg_norm(x: Node, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    dims = range(x.rank) if dim is None and ord is not None else dim
    if ord is None or (isinstance(dims, int) or len(list(dims)) == 1):
        return norm(x, 2.0 if ord is None else ord, dim, keepdim)
    return matrix_norm(x, ord, tuple(dims), keepdim)


def safe_softmax(x: Node, dim: int, dtype: Any = None) -> Node:
    none = ops.all(x == -math.inf, dim % x.rank, keepdims=True) if x.rank else x == -math.inf
    return ops.where(none, 0.0, soft(ops.softmax)(ops.where(none, 0.0, x), dim))


def cov(x: Node, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Node:
    x = x if x.rank == 2 else ops.reshape(x, (1, math.prod(x.shape)))
    weights = [w.astype(x.dtype) for w in (fweights, aweights) if w is not None]
    w = functools.reduce(ops.mul, weights) if weights else None
    total = ops.sum(w) if w is not None else float(x.shape[1])
    mean = ops.sum(x if w is None else x * w, 1, keepdims=True) / total
    centred = x - mean
    if aweights is not None and correction:
        free = total - ops.sum(w * weights[-1]) / total * float(correction)
    else:
        free = total - correction
    free = max(free, 0.0) if isinstance(free, float) else ops.maximum(free, 0.0)
    found = ops.matmul(centred if w is None else centred * w, transpose(centred, 0, 1)) / free
    return ops.squeeze(found)


def corrcoef(x: Node) -> Node:
    c = cov(x)
    if not c.rank:
        return c / c
    d = ops.sqrt(ops.diagonal(c))
    return c / ops.unsqueeze(d, 1) / ops.unsqueeze(d, 0)


def pdist(x: Node, p: float = 2.0) -> Node:
    pairs = list(itertools.combinations(range(x.shape[0]), 2))
    left, right = (np.array([pair[k] for pair in pairs], np.int64) for k in (0, 1))
    return ops.norm(ops.gather(x, left) - ops.gather(x, right), p=float(p), axis=1)


# -- gather and scatter ------------------------------------------------------------------------------------------------


def combinations(x: Node, r: int, with_replacement: bool) -> Node:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = np.array(list(choose(range(x.shape[0]), r)), np.int64).reshape(-1, r)
    return ops.gather(x, places) if places.size else ops.reshape(_cut(x, 0, 0, 0), places.shape)


def where(mask: Node, x: Any, y: Any) -> Node:
    return ops.where(mask, *_lift(x, y))


# -- layers and losses -------------------------------------------------------------------------------------------------


def loss(op: Any, *names: str) -> Callable[..., Node]:
    """A loss of torch's; its old options size_average and reduce are not there."""

    def fn(*operands: Any, size_average: Any = None, reduce: Any = None, **named: Any) -> Node:
        if size_average is not None or reduce is not None:
            average, each = size_average is not False, reduce is False
            named["reduction"] = "none" if each else "mean" if average else "sum"
        return op(*operands, **named)

    return fn


def multi_margin(x: Node, target: Node, **named: Any) -> Node:
    line = at_least(1, x)
    return loss(ops.multi_margin_loss)(line, ops.reshape(target, line.shape[:-1]), **named)


def linear(x: Node, weight: Node, bias: Any = None) -> Node:
    return ops.linear(x, weight, bias) if bias is not None else ops.linear(x, weight)


def triplet_with_distance(a: Node, p: Node, n: Node, **named: Any) -> Node:
    named.pop("distance_function", None)
    return ops.triplet_margin_loss(a, p, n, **named)


def native_layer_norm(x: Node, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Node, Node, Node]:
    axes = tuple(range(x.rank - len(shape), x.rank))
    rstd = ops.rsqrt(ops.var(x, axes, keepdims=True) + eps)
    return ops.layer_norm(x, tuple(shape), weight, bias, eps=eps), ops.mean(x, axes, keepdims=True), rstd


def max_pool2d_backward(x: Node, *, return_indices: bool, **named: Any) -> Node:
    """How many windows each element wins."""
    place = ops.max_pool2d(x, **named, return_indices=True)[1]
    line = ops.reshape(place, (*x.shape[:-2], math.prod(place.shape[-2:])))
    one = ops.broadcast_to(ops.constant((1.0,), x.dtype, ()), line.shape)
    return ops.reshape(ops.scatter_add_along_axis(line, one, axis=-1, size=math.prod(x.shape[-2:])), x.shape)


def logaddexp(x: Node, y: Node, *, input_mask: Any = None, other_mask: Any = None) -> Node:
    """Elements that a mask leaves out are -inf."""
    terms = [v if m is None else ops.where(m, v, -math.inf) for v, m in ((x, input_mask), (y, other_mask))]
    return ops.logaddexp(*terms)


def masked_index(x: Node, mask: Node, indices: Sequence[Node], fill: float) -> Node:
    """Where mask is False, an index may be anything."""
    return ops.where(mask, x[tuple(_within(indices, x))], fill)


def masked_index_put(x: Node, mask: Node, indices: Sequence[Node], values: Node) -> Node:
    return ops.index_put(x, tuple(_within(indices, x)), ops.where(mask, values, 0.0), accumulate=True)


def _within(indices: Sequence[Node], x: Node) -> list[Node]:
    return [ops.clamp(i, 0, n - 1) for i, n in zip(indices, x.shape, strict=True)]


def native_batch_norm(x: Node, weight: Any, bias: Any, mean: Node, var: Node, training: bool, *more: Any) -> Any:
    found = ops.native_batch_norm(x, weight, bias, mean, var, training, *more)
    return found[:3]


def native_group_norm(x: Node, weight: Any, bias: Any, n: int, c: int, rest: int, groups: int, eps: float) -> Any:
    line = ops.reshape(x, (n, groups, c // groups * rest))
    rstd = ops.rsqrt(ops.var(line, 2) + eps)
    return ops.group_norm(x, groups, weight, bias, eps), ops.mean(line, 2), rstd


def linear_cross_entropy(x: Node, linear_weight: Node, target: Node, *, options: Any = None, **named: Any) -> Node:
    size = getattr(options, "batch_chunk_size", None)
    return ops.linear_cross_entropy(x, linear_weight, target, **named, batch_chunk_size=size)


# -- the table ---------------------------------------------------------------------------------------------------------

Call = Callable[..., Any]


def _identity(x: Node, *_: Any, **__: Any) -> Node:
    return x


def _names(text: str, prefix: str = "") -> dict[str, Call]:
    """Ops that are called as torch calls them."""
    return {prefix + name: getattr(ops, name) for name in text.split()}


TABLE: dict[str, Call] = {
    **_names(
        "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac"
        " lgamma log log10 log1p log2 neg rad2deg reciprocal rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
        " nan_to_num logit round flip"
    ),
    **{
        name: binary(getattr(ops, op))
        for name, op in {
            **{
                n: n for n in "atan2 copysign fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum mul pow".split()
            },
            "remainder": "mod",
            "xlogy": "xlogy",
            "max.binary": "maximum",
            "min.binary": "minimum",
            "special.xlog1py": "xlog1py",
            "__rmul__": "mul",
            "__radd__": "add",
        }.items()
    },
    **{f"__r{n}__": binary(getattr(ops, n), reverse=True) for n in ("div", "mod", "pow", "sub")},
    "ldexp": ops.ldexp,
    "frexp": ops.frexp,
    "nextafter": ops.nextafter,
    "add": binary(ops.add),
    "sub": binary(ops.sub),
    "rsub": binary(ops.sub, reverse=True),
    **{
        label: binary(ops.divide)
        for label in ("div.no_rounding_mode", "div.floor_rounding", "div.trunc_rounding", "true_divide")
    },
    "float_power": float_power,
    "sgn": ops.sign,
    "positive": _identity,
    "real": _identity,
    "conj": _identity,
    "conj_physical": _identity,
    "resolve_conj": _identity,
    "resolve_neg": _identity,
    "contiguous": _identity,
    "clone": _identity,
    "alias_copy": _identity,
    "double": _identity,
    "to": _identity,
    "float": lambda x, **_: x.astype("f32"),
    "half": lambda x, **_: x.astype("f16"),
    "bfloat16": lambda x, **_: x.astype("bf16"),
    "round.decimals_0": ops.round,
    "round.decimals_3": ops.round,
    "round.decimals_neg_3": ops.round,
    "clamp": lambda x, min=None, max=None: ops.clamp(x, _bound(x, min), _bound(x, max)),
    "clamp_max": lambda x, max: ops.clamp(x, max=_bound(x, max)),
    "clamp_min": lambda x, min: ops.clamp(x, min=_bound(x, min)),
    "sinc": sinc,
    **_names("addcdiv addcmul lerp"),
    "special.entr": ops.entr,
    "special.ndtr": ops.ndtr,
    "i0": ops.i0,
    "special.modified_bessel_i0": ops.i0,
    "special.modified_bessel_i1": ops.i1,
    **_names("i0e i1 i1e erfcx log_ndtr ndtri", "special."),
    "angle": lambda x: ops.where(x < 0.0, math.pi, x * 0.0),
    **{f"mvlgamma.mvlgamma_p_{p}": mvlgamma for p in (1, 3, 5)},
    **{
        name: lambda x, n: ops.digamma(x) if n == 0 else ops.polygamma(n, x)
        for name in (
            "special.polygamma.special_polygamma_n_0",
            *(f"polygamma.polygamma_n_{n}" for n in range(5)),
        )
    },
    # shapes
    "H": lambda x: transpose(x, 0, 1) if x.rank else x,
    "T": lambda x: permute(x, list(reversed(range(x.rank)))),
    "mH": lambda x: transpose(x, -2, -1),
    "mT": lambda x: transpose(x, -2, -1),
    "t": lambda x: transpose(x, 0, 1) if x.rank == 2 else x,
    "t_copy": lambda x: transpose(x, 0, 1) if x.rank == 2 else x,
    **dict.fromkeys(("transpose", "transpose_copy"), transpose),
    **dict.fromkeys(("permute", "permute_copy"), permute),
    **dict.fromkeys(("reshape", "view", "view_copy"), reshape),
    **dict.fromkeys(("reshape_as", "view_as"), lambda x, other: reshape(x, other.shape)),
    **dict.fromkeys(("expand", "expand_copy", "broadcast_to"), expand),
    "expand_as": lambda x, other: expand(x, other.shape),
    "broadcast_tensors": lambda *xs: [expand(x, broadcast_shapes([v.shape for v in xs])) for x in xs],
    **dict.fromkeys(("squeeze", "squeeze.multiple", "squeeze_copy"), ops.squeeze),
    **dict.fromkeys(("unsqueeze", "unsqueeze_copy"), ops.unsqueeze),
    "flatten": ops.flatten,
    "ravel": ops.flatten,
    "unflatten": ops.unflatten,
    "movedim": lambda x, *axes: ops.movedim(x, *axes) if x.rank else x,
    **{name: getattr(ops, name) for name in "kthvalue median msort nanmedian nanquantile quantile sort topk".split()},
    **dict.fromkeys(("narrow", "narrow_copy"), narrow),
    "select": select,
    "slice": _cut,
    **dict.fromkeys(
        ("split", "split.list_args", "split_with_sizes", "split_with_sizes_copy", "unsafe_split"), ops.split
    ),
    **dict.fromkeys(("chunk", "unsafe_chunk"), ops.chunk),
    "tensor_split": tensor_split,
    "hsplit": lambda x, given: tensor_split(x, given, 0 if x.rank == 1 else 1),
    "vsplit": tensor_split,
    "dsplit": lambda x, given: tensor_split(x, given, 2),
    **dict.fromkeys(("unbind", "unbind_copy"), ops.unbind),
    "stack": lambda xs, dim=0: ops.stack(xs, axis=dim),
    "cat": cat,
    "hstack": lambda xs: ops.concat([at_least(1, x) for x in xs], axis=0 if at_least(1, xs[0]).rank == 1 else 1),
    "vstack": stacked(2, 0),
    "dstack": stacked(3, 2),
    "column_stack": column_stack,
    **{
        f"atleast_{n}d": (
            lambda *xs, n=n: (
                [at_least(n, x) for x in xs[0]]
                if isinstance(xs[0], list | tuple)
                else [at_least(n, x) for x in xs]
                if len(xs) > 1
                else at_least(n, xs[0])
            )
        )
        for n in (1, 2, 3)
    },
    "tile": lambda x, *dims: ops.tile(x, _ints(dims)),
    "repeat": lambda x, *dims: ops.repeat(x, _ints(dims)),
    "roll": ops.roll,
    "rot90": rot90,
    "fliplr": lambda x: ops.flip(x, axis=(1,)),
    "flipud": lambda x: ops.flip(x, axis=(0,)),
    "tril": ops.tril,
    "triu": ops.triu,
    **dict.fromkeys(("diagonal", "diagonal_copy"), ops.diagonal),
    "linalg.diagonal": lambda x, offset=0, dim1=-2, dim2=-1: ops.diagonal(x, offset, dim1, dim2),
    "diag": lambda x, k=0: diag(x, k),
    "diag_embed": ops.diag_embed,
    "diagflat": lambda x, offset=0: ops.diag_embed(ops.reshape(x, (math.prod(x.shape),)), offset),
    "constant_pad_nd": lambda x, pad, value=0.0: padded(x, pad, value=value),
    **{
        f"nn.functional.pad.{mode}": padded for mode in "constant reflect replicate circular replicate_negative".split()
    },
    "nn.functional.pixel_shuffle": ops.pixel_shuffle,
    "nn.functional.pixel_unshuffle": ops.pixel_unshuffle,
    "nn.functional.channel_shuffle": channel_shuffle,
    **dict.fromkeys(("unfold", "unfold_copy"), unfold),
    **dict.fromkeys(("as_strided", "as_strided_copy"), ops.as_strided),
    "repeat_interleave": repeat_interleave,
    **_names("select_scatter slice_scatter diagonal_scatter as_strided_scatter"),
    **{
        f"meshgrid.{form}": lambda *xs, indexing="ij": meshgrid(
            list(xs[0]) if isinstance(xs[0], list | tuple) else list(xs), indexing
        )
        for form in ("variadic_tensors", "list_of_tensors")
    },
    "block_diag": lambda *xs: block_diag(*xs),
    "cartesian_prod": lambda *xs: cartesian(xs[0] if isinstance(xs[0], list | tuple) else xs),
    "sum_to_size": sum_to_size,
    "fft.fftshift": lambda x, dim=None: ops.roll(x, [x.shape[d] // 2 for d in _axes(x, dim)], list(_axes(x, dim))),
    "fft.ifftshift": lambda x, dim=None: ops.roll(
        x, [(x.shape[d] + 1) // 2 for d in _axes(x, dim)], list(_axes(x, dim))
    ),
    # products
    "matmul": ops.matmul,
    "__rmatmul__": lambda x, y: ops.matmul(y, x),
    "mm": ops.matmul,
    "bmm": ops.matmul,
    "mv": ops.matmul,
    **_names("addmm baddbmm addbmm addmv addr outer dot inner kron trace"),
    "addmm.decomposed": ops.addmm,
    "vdot": ops.dot,
    "tensordot": ops.tensordot,
    "cross": lambda a, b, dim=None: ops.cross(
        a, b, broadcast_shapes([a.shape, b.shape]).index(3) if dim is None else dim
    ),
    "linalg.cross": ops.cross,
    **_names("vecdot matrix_power multi_dot", "linalg."),
    "linalg.vander": lambda x, N=None: vander(x, N),
    # reductions
    "sum": reduction(ops.sum),
    "mean": reduction(ops.mean),
    "nansum": reduction(ops.nansum),
    "nanmean": reduction(ops.nanmean),
    "prod": reduction(ops.prod),
    "amax": reduction(ops.amax),
    "amin": reduction(ops.amin),
    "aminmax": lambda x, *, dim=None, keepdim=False: tuple(
        reduction(op)(x, dim, keepdim) for op in (ops.amin, ops.amax)
    ),
    **{f"{n}.reduction_{how}": extremum(getattr(ops, n)) for n in ("max", "min") for how in ("no_dim", "with_dim")},
    "std": std_var(ops.std),
    "std.unbiased": std_var(ops.std),
    "var": std_var(ops.var),
    "var.unbiased": std_var(ops.var),
    "std_mean": std_var(ops.std, True),
    "std_mean.unbiased": std_var(ops.std, True),
    "var_mean": std_var(ops.var, True),
    "var_mean.unbiased": std_var(ops.var, True),
    "logsumexp": logsumexp,
    "softmax": soft(ops.softmax),
    "softmax.with_dtype": soft(ops.softmax),
    "log_softmax": soft(ops.log_softmax),
    "log_softmax.with_dtype": soft(ops.log_softmax),
    "nn.functional.softmin": soft(ops.softmax, -1.0),
    "nn.functional.softmin.with_dtype": soft(ops.softmax, -1.0),
    "norm": norm,
    "norm.fro": norm,
    "norm.inf": norm,
    "linalg.vector_norm": lambda x, ord=2, dim=None, keepdim=False, dtype=None: norm(x, ord, dim, keepdim),
    "dist": dist,
    "cdist": lambda a, b, p=2.0, *_, **__: ops.cdist(a, b, p=float(p)),
    "renorm": renorm,
    **_names("trapezoid cumulative_trapezoid diff cumsum cumprod"),
    "trapz": ops.trapezoid,
    "cummax": lambda x, dim: (ops.cummax(x, dim), ops.cumargmax(x, dim)),
    "cummin": lambda x, dim: (ops.cummin(x, dim), ops.cumargmin(x, dim)),
    "logcumsumexp": ops.logcumsumexp,
    "masked.cumsum": lambda x, dim, *, mask=None, **_: ops.cumsum(x if mask is None else ops.where(mask, x, 0.0), dim),
    "masked.cumprod": lambda x, dim, *, mask=None, **_: ops.cumprod(
        x if mask is None else ops.where(mask, x, 1.0), dim
    ),
    **{
        f"masked.{n}": masked(getattr(ops, n), neutral)
        for n, neutral in (("sum", 0.0), ("prod", 1.0), ("amax", -math.inf), ("amin", math.inf))
    },
    "masked.mean": masked_mean,
    "masked.var": masked_std_var(ops.var),
    "masked.std": masked_std_var(ops.std),
    "masked.norm": masked_norm,
    "masked.logsumexp": lambda x, dim=None, *, keepdim=False, mask=None, **_: logsumexp(
        x if mask is None else ops.where(mask, x, -math.inf), dim, keepdim
    ),
    "masked.softmax": masked_soft(ops.softmax),
    "masked.log_softmax": masked_soft(ops.log_softmax),
    "masked.softmin": masked_soft(ops.softmax, -1.0),
    "masked.normalize": masked_normalize,
    "linalg.norm": linalg_norm,
    "linalg.norm.subgradients_at_zero": linalg_norm,
    "linalg.matrix_norm": lambda x, ord="fro", dim=(-2, -1), keepdim=False, **_: matrix_norm(x, ord, dim, keepdim),
    "torch.ops.aten._safe_softmax.default": safe_softmax,
    "_softmax_backward_data": lambda g, y, dim, _: (
        y * (g - ops.sum(g * y, dim % y.rank, keepdims=True)) if y.rank else y * (g - g * y)
    ),
    "cov": cov,
    "corrcoef": corrcoef,
    "nn.functional.pdist": pdist,
    "native_dropout_backward": lambda g, mask, scale: ops.where(mask, g * float(scale), 0.0),
    # indexing
    **_names("index_copy index_fill index_put put scatter take masked_fill masked_scatter"),
    "__getitem__": lambda x, key: x[key],
    **{f"index_reduce.{n}": ops.index_reduce for n in ("mean", "prod", "amin", "amax")},
    "combinations": lambda x, r=2, with_replacement=False: combinations(x, r, with_replacement),
    "where": lambda x, mask, y: where(mask, x, y),
    "fill": lambda x, value: x * 0.0 + _real(value),
    "zero_": lambda x: x * 0.0,
    # activations
    **_names(
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu relu6 rrelu selu"
        " silu softplus softshrink softsign tanhshrink threshold glu",
        "nn.functional.",
    ),
    # losses and distances
    **{
        f"nn.functional.{n}": loss(getattr(ops, n))
        for n in (
            "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy"
            " gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss"
            " multilabel_soft_margin_loss nll_loss poisson_nll_loss"
            " smooth_l1_loss soft_margin_loss triplet_margin_loss"
        ).split()
    },
    "nn.functional.multi_margin_loss": multi_margin,
    "nn.functional.multilabel_margin_loss": lambda x, target, **named: loss(ops.multilabel_margin_loss)(
        at_least(1, x), at_least(1, target), **named
    ),
    "nn.functional.triplet_margin_with_distance_loss": triplet_with_distance,
    "nn.functional.normalize": lambda x, p=2.0, dim=1, eps=1e-12: ops.normalize(x, p=float(p), axis=dim, eps=eps),
    "nn.functional.cosine_similarity": ops.cosine_similarity,
    "nn.functional.pairwise_distance": lambda a, b, p=2.0, eps=1e-6, keepdim=False: ops.pairwise_distance(
        a, b, p=float(p), eps=eps, keepdim=keepdim
    ),
    # layers
    "nn.functional.linear": linear,
    "nn.functional.layer_norm": lambda x, shape, weight=None, bias=None, eps=1e-5: ops.layer_norm(
        x, tuple(shape), weight, bias, eps=eps
    ),
    "native_layer_norm": native_layer_norm,
    "nn.functional.rms_norm": lambda x, shape, weight=None, eps=None: ops.rms_norm(x, tuple(shape), weight, eps=eps),
    **{
        name: getattr(ops, name.rpartition(".")[2])
        for name in (
            *(
                f"nn.functional.{kind}{n}d"
                for kind in ("conv", "conv_transpose", "max_pool", "avg_pool")
                for n in (1, 2, 3)
            ),
            *(f"nn.functional.adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
            *(
                f"nn.functional.{n}"
                for n in "unfold local_response_norm group_norm instance_norm batch_norm bilinear"
                " scaled_dot_product_attention".split()
            ),
        )
    },
    **{
        f"nn.functional.interpolate.{mode}": ops.interpolate
        for mode in "area bicubic bilinear linear nearest nearest-exact trilinear".split()
    },
    **{
        f"nn.functional.max_unpool{n}d{form}": getattr(ops, f"max_unpool{n}d")
        for n in (1, 2, 3)
        for form in ("", ".grad")
    },
    "masked.logaddexp": logaddexp,
    "_unsafe_masked_index": masked_index,
    "_unsafe_masked_index_put_accumulate": masked_index_put,
    "gradient": ops.gradient,
    "mode": ops.mode,
    "masked.median": lambda x, dim, *, keepdim=False, mask=None: ops.nanmedian(
        x if mask is None else ops.where(mask, x, math.nan), dim, keepdim
    )[0],
    "max_pool2d_with_indices_backward": max_pool2d_backward,
    "nn.functional.upsample_bilinear": lambda x, size=None, scale_factor=None: ops.interpolate(
        x, size, scale_factor, "bilinear", align_corners=True
    ),
    "nn.functional.upsample_nearest": ops.interpolate,
    "_upsample_bilinear2d_aa": lambda x, output_size=None, align_corners=False, scale_factors=None, **_: (
        ops.interpolate(x, output_size, scale_factors, "bilinear", align_corners=align_corners, antialias=True)
    ),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), native_batch_norm),
    "_batch_norm_with_update": lambda x, weight, bias, mean, var, *more: (
        *native_batch_norm(x, weight, bias, mean, var, True, *more),
        ops.constant((), "u8", (0,)),
    ),
    "native_group_norm": native_group_norm,
    "nn.functional.ctc_loss": ops.ctc_loss,
    **{f"nn.functional.linear_cross_entropy{way}": linear_cross_entropy for way in ("", ".chunked", ".chunked_none")},
    "nn.functional.feature_alpha_dropout.without_train": _identity,
    "einsum": lambda tensors, equation: ops.einsum(equation, *tensors),
}


def meshgrid(xs: Sequence[Node], indexing: str = "ij") -> list[Node]:
    xs = [ops.reshape(x, (1,)) if not x.rank else x for x in xs]
    if indexing == "xy" and len(xs) > 1:
        found = meshgrid([xs[1], xs[0], *xs[2:]])
        return [found[1], found[0], *found[2:]]
    shape = tuple(x.shape[0] for x in xs)
    return [
        ops.broadcast_to(ops.reshape(x, tuple(n if a == k else 1 for a, n in enumerate(shape))), shape)
        for k, x in enumerate(xs)
    ]


def cartesian(xs: Sequence[Node]) -> Node:
    if len(xs) == 1:
        return xs[0]
    return ops.stack([ops.reshape(g, (math.prod(g.shape),)) for g in meshgrid(xs)], axis=-1)


# -- what is not compared ----------------------------------------------------------------------------------------------


def _because(reason: str, labels: str) -> dict[str, str]:
    return dict.fromkeys(labels.split(), reason)


def _of_singular_values(args: Any, named: dict[str, Any]) -> bool:
    order = args[1] if args[1:] else named.get("ord")
    return order in (2, -2, "nuc")


STATIC = ("tensor_split", "repeat_interleave", "__getitem__", "index_put")
"""Tensors of integers are sizes and those of bools say how many elements there are, which a graph must know."""

LEFT_OUT: dict[str, tuple[str, Callable[[Any, dict[str, Any]], bool]]] = {
    "nn.functional.scaled_dot_product_attention": (
        "dropout draws random numbers",
        lambda args, named: named.get("dropout_p", 0.0) > 0,
    ),
    "linalg.matrix_power": ("a negative power inverts", lambda args, named: args[1] < 0),
    "linalg.norm": ("a matrix's norm of singular values", lambda args, named: _of_singular_values(args, named)),
    "linalg.norm.subgradients_at_zero": (
        "a matrix's norm of singular values",
        lambda args, named: _of_singular_values(args, named),
    ),
    "linalg.matrix_norm": ("a matrix's norm of singular values", lambda args, named: _of_singular_values(args, named)),
    "nn.functional.batch_norm": ("a batch without channels", lambda args, named: args[0].ndim < 2),
    "_upsample_bilinear2d_aa": (
        "a size and a scale that is not its",
        lambda args, named: named.get("scales_h") is not None,
    ),
    "nn.functional.rrelu": ("training draws random numbers", lambda args, named: bool(named.get("training"))),
}
"""Samples: why they are left out, and which, by their arguments, the input first."""

LOOSE: dict[str, tuple[float, str]] = {
    "cov": (1e-6, "torch adds weights of 24 bits up in them"),
    "nn.functional.hardsigmoid": (1e-7, "torch's gradient has a sixth of 24 bits in f64, too"),
    **dict.fromkeys(
        (
            "lgamma",
            "digamma",
            "special.polygamma.special_polygamma_n_0",
            *(f"polygamma.polygamma_n_{n}" for n in range(5)),
            *(f"mvlgamma.mvlgamma_p_{p}" for p in (1, 3, 5)),
        ),
        (1e-7, "torch's polygamma of order 1 has eight digits"),
    ),
}
"""A wider tolerance, and why."""

VALUES_ONLY: dict[str, str] = {
    "nn.functional.ctc_loss": "torch's gradient has exp(log_probs) more than the derivative (test_functions.py)",
    "as_strided_scatter": "torch's gradient of input is that of the elements which are replaced",
    "nextafter": "torch's has no derivative either",
    "masked.amax": "torch's gradient of a row without an element is NaN, not 0",
    "masked.amin": "torch's gradient of a row without an element is NaN, not 0",
}

ABSENT: dict[str, str] = {
    **_because(
        "a decomposition of matrices",
        "cholesky cholesky_inverse cholesky_solve linalg.cholesky linalg.cholesky_ex linalg.cond linalg.det linalg.eig"
        " linalg.eigh linalg.eigvals linalg.eigvalsh linalg.householder_product linalg.inv linalg.inv_ex linalg.lstsq"
        " linalg.lstsq.grad_oriented linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_sqrth"
        " linalg.pinv linalg.pinv.hermitian linalg.pinv.singular linalg.polar linalg.qr linalg.slogdet linalg.solve"
        " linalg.solve_ex linalg.solve_triangular linalg.svd linalg.svdvals linalg.tensorinv linalg.tensorsolve logdet"
        " lu lu_solve"
        " lu_unpack matrix_exp norm.nuc ormqr pca_lowrank pinverse qr svd svd_lowrank triangular_solve",
    ),
    **_because(
        "complex numbers",
        "cdouble cfloat chalf complex fft.fft fft.fft2 fft.fftn fft.hfft fft.hfft2 fft.hfftn fft.ifft fft.ifft2"
        " fft.ifftn fft.ihfft fft.ihfft2 fft.ihfftn fft.irfft fft.irfft2 fft.irfftn fft.rfft fft.rfft2 fft.rfftn polar"
        " stft view_as_complex",
    ),
    **_because(
        "random numbers",
        "bernoulli nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d"
        " nn.functional.feature_alpha_dropout.with_train nn.functional.multi_head_attention_forward"
        " normal nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d normal.number_mean",
    ),
    **_because(
        "a result or an operand of another form: a shape that the data decides, sparse matrices, storage",
        "as_strided.partial_views masked_select sparse.mm.reduce sparse.sampled_addmm to_sparse",
    ),
    **_because(
        "no public function of torch: embedding_bag, scatter_reduce and index_reduce combine segments",
        "_segment_reduce.lengths _segment_reduce.offsets",
    ),
    **_because(
        "no op computes it: torch runs it",
        "special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.modified_bessel_k0"
        " special.modified_bessel_k1",
    ),
    **_because(
        "no public function of torch: scaled_dot_product_attention has a line",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    ),
}
"""Why an entry has no line in the table."""

_BESSEL = "bessel_j0 bessel_j1 bessel_y0 bessel_y1"
_BESSEL += " modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1"
OF_SOME_RELEASES = {
    *"cholesky qr".split(),  # up to 2.13
    *"linalg.matrix_sqrth linalg.polar torch.ops.aten._scaled_dot_product_flash_attention_for_cpu".split(),  # from 2.14
    *(f"special.{name}" for name in _BESSEL.split()),  # from 2.15 on they have gradients
}
"""Entries that not every tested release of torch has, or differentiates."""
