"""A Graph as a ``torch.fx.GraphModule``: what a user of torch would have written for it, an op a call.

For measurements beside torch: sizes are numbers, indices are not checked against a rule other than ``error``, and what
depends on no input is computed once.  Composites that torch has no call for are written as what they decompose into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import Unsupported
from ..interp import concrete
from ..ir.graph import Graph
from ..ir.node import Node
from ..ir.types import DType
from ..runtime.host.tensors import from_tensor, to_tensor
from .sizes import TORCH_DTYPES

Axes = tuple[int, ...]
Call = Callable[[], Mapping[str, Any]]


def calls(
    graph: Graph,
    wrt: Sequence[str],
    dims: Mapping[str, int],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    cotangents: Mapping[str, np.ndarray[Any, Any]],
    *,
    compiled: bool,
    threads: int,
) -> dict[str, Call]:
    """``forward``, outputs by name without autograd, and with ``wrt`` ``both``, gradients by ``d.NAME``.

    :param compiled: by torch.compile, in this process's first call of each.
    :param threads: that torch takes, from now on.
    """
    torch.set_num_threads(threads)
    module: Any = to_torch(graph, dims)
    module = torch.compile(module) if compiled else module
    plain = {name: to_tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}
    recorded = {name: x.detach().requires_grad_() if name in wrt else x for name, x in plain.items()}
    upstream = {name: to_tensor(array) for name, array in cotangents.items()}

    def forward() -> Mapping[str, Any]:
        with torch.no_grad():
            return _as_arrays(graph.output_names, module(*(plain[name] for name in graph.input_names)))

    def both() -> Mapping[str, Any]:
        values = dict(zip(graph.output_names, module(*(recorded[name] for name in graph.input_names)), strict=True))
        into = {name: dy for name, dy in upstream.items() if values[name].requires_grad}
        wanted = [recorded[name] for name in wrt]
        gradients = torch.autograd.grad([values[name] for name in into], wanted, list(into.values()))
        return _as_arrays([f"d.{name}" for name in wrt], gradients)

    return {"forward": forward, "both": both} if wrt else {"forward": forward}


def _as_arrays(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {name: from_tensor(torch, x) for name, x in zip(names, tensors, strict=True)}


def to_torch(graph: Graph, dims: Mapping[str, int]) -> torch.fx.GraphModule:
    """The graph for given sizes; it is called with a tensor for each input, in order, and gives a tuple.

    :raises Unsupported: torch has no call for an op, or no such gradient or dtype; the first one is named.
    """
    written = torch.fx.Graph()
    constants, numbers = torch.nn.Module(), itertools.count()
    values: dict[Node, Any] = {}  # a tensor that is known, or a node of torch.fx
    for number, node in enumerate(graph.inputs):
        _attribute(node.dtype)
        values[node] = written.placeholder(f"input_{number}")

    def argument(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        name = f"constant_{next(numbers)}"
        constants.register_buffer(name, value)
        return written.get_attr(name)

    pending = [node for _, node in reversed(graph.outputs)]
    while pending:
        node = pending[-1]
        if node in values:
            pending.pop()
            continue
        function = CALLS.get(node.op.name)
        sources = node.operands if function else (_decomposed(node),)
        missing = [source for source in sources if source not in values]
        if missing:
            pending += reversed(missing)
            continue
        pending.pop()
        operands = [values[source] for source in sources]
        if function is None:
            values[node] = operands[0]
            continue
        attributes = {name: _attribute(concrete(value, dims)) for name, value in node.attrs.items()}
        if all(isinstance(each, torch.Tensor) for each in operands):
            values[node] = function(*operands, **attributes)
        else:
            values[node] = written.call_function(function, tuple(map(argument, operands)), attributes)
    written.output(tuple(argument(values[node]) for _, node in graph.outputs))
    return torch.fx.GraphModule(constants, written)


def _decomposed(node: Node) -> Node:
    """What an op that torch has no call for is made of."""
    if node.op.decompose is None:
        raise Unsupported(f"torch has no call for {node.op.name}")
    if node.op.surrogate is not None:
        raise Unsupported(f"the gradient of {node.op.name} is one that autograd does not give")
    made: Node = node.op.decompose(*node.operands, **node.attrs)
    return made


def _attribute(value: Any) -> Any:
    if isinstance(value, DType):
        if value not in TORCH_DTYPES:
            raise Unsupported(f"torch has no dtype {value.name}")
        return TORCH_DTYPES[value]
    return value


# -- what ops are in torch: operands in order, attributes by name ------------------------------------------------------


def _constant(value: Any, dtype: torch.dtype, shape: Axes) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype).reshape(shape)


def _dim(size: int) -> torch.Tensor:
    return torch.tensor(size)


def _iota(shape: Axes, axis: int, dtype: torch.dtype) -> torch.Tensor:
    line = torch.arange(shape[axis]).to(dtype)
    return line.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)


def _transpose(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    return x.permute(axes)


def _broadcast_to(x: torch.Tensor, shape: Axes) -> torch.Tensor:
    return x.expand(shape)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def _slice(x: torch.Tensor, start: Axes, limit: Axes, step: Axes) -> torch.Tensor:
    return x[tuple(map(slice, start, limit, step))]


def _pad(x: torch.Tensor, pad_width: Any, value: float) -> torch.Tensor:
    return F.pad(x, [n for pair in reversed(pad_width) for n in pair], value=value)


def _concat(*xs: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat(xs, axis)


def _flip(x: torch.Tensor, axis: Axes) -> torch.Tensor:
    return torch.flip(x, axis)


def _floordiv(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="floor")


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction whose ``dim`` may be several; over no axis it is its operand."""

    def reduction(x: torch.Tensor, axis: int | Axes | None = None, keepdims: bool = False, **more: Any) -> torch.Tensor:
        axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else axis
        result: torch.Tensor = function(x, dim=axes, keepdim=keepdims) if axes else x
        return result

    return _named(reduction, function)


def _along_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one axis."""

    def along(x: torch.Tensor, axis: int) -> Any:
        return function(x, dim=axis)

    return _named(along, function)


def _named(function: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Any]:
    """torch.fx writes a call by its function's name."""
    function.__name__ = function.__qualname__ = f"_{after.__name__}"
    return function


def _prod(x: torch.Tensor, axis: Axes) -> torch.Tensor:
    for a in reversed(axis):
        x = torch.prod(x, a)
    return x


def _argmax(x: torch.Tensor, axis: int | Axes) -> torch.Tensor:
    return torch.argmax(*_last(x, axis))


def _argmin(x: torch.Tensor, axis: int | Axes) -> torch.Tensor:
    return torch.argmin(*_last(x, axis))


def _last(x: torch.Tensor, axis: int | Axes) -> tuple[torch.Tensor, int]:
    """An operand whose reduced axes are one, and which."""
    if isinstance(axis, int):
        return x, axis
    kept = [a for a in range(x.ndim) if a not in axis]
    return x.permute(*kept, *axis).flatten(len(kept)), -1


def _var(x: torch.Tensor, axis: Any, keepdims: bool, ddof: int) -> torch.Tensor:
    return torch.var(x, axis, correction=ddof, keepdim=keepdims)


def _std(x: torch.Tensor, axis: Any, keepdims: bool, ddof: int) -> torch.Tensor:
    return torch.std(x, axis, correction=ddof, keepdim=keepdims)


def _scan(function: Callable[..., Any]) -> Callable[..., Any]:
    def scan(x: torch.Tensor, axis: int, reverse: bool, **more: Any) -> torch.Tensor:
        y = function(x.flip(axis) if reverse else x, axis)
        y = y if isinstance(y, torch.Tensor) else y.values
        return y.flip(axis) if reverse else y

    return _named(scan, function)


def _places(indices: torch.Tensor, size: int, oob: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where indices point, and which count, if not all do."""
    indices = indices if indices.dtype in (torch.int32, torch.int64) else indices.long()
    if oob == "clamp":
        return indices.clamp(0, size - 1), None
    if oob == "wrap":
        return indices % size, None
    if oob == "skip":
        inside = (indices >= 0) & (indices < size)
        return torch.where(inside, indices, 0), inside
    return indices, None


def _gather(
    x: torch.Tensor, indices: torch.Tensor, axis: int, oob: str, padding_idx: int | None, scale_grad_by_freq: bool
) -> torch.Tensor:
    places, counts = _places(indices, x.shape[axis], oob)
    if axis == 0 and x.ndim == 2:
        rows = F.embedding(places, x, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    elif padding_idx is None and not scale_grad_by_freq:
        rows = torch.index_select(x, axis, places.reshape(-1))
        rows = rows.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))
    else:
        raise Unsupported("torch's embedding takes rows of a matrix")
    if counts is None:
        return rows
    return torch.where(counts.reshape(counts.shape + (1,) * (x.ndim - axis - 1)), rows, 0)


def _embedding(
    indices: torch.Tensor, weight: torch.Tensor, max_norm: Any = None, norm_type: float = 2.0, **more: Any
) -> torch.Tensor:
    if max_norm is not None:
        raise Unsupported("torch's embedding with max_norm changes its weight")
    return _gather(weight, indices, 0, **{name: more[name] for name in ("oob", "padding_idx", "scale_grad_by_freq")})


def _scatter_add(
    indices: torch.Tensor, updates: torch.Tensor, axis: int, size: int, oob: str, padding_idx: int | None
) -> torch.Tensor:
    if oob == "skip" or padding_idx is not None:
        raise Unsupported("torch's index_add takes every index")
    places, _ = _places(indices, size, oob)
    shape = (*updates.shape[:axis], indices.numel(), *updates.shape[axis + indices.ndim :])
    out = updates.new_zeros(*shape[:axis], size, *shape[axis + 1 :])
    return out.index_add(axis, places.reshape(-1), updates.reshape(shape))


def _take_along_axis(x: torch.Tensor, indices: torch.Tensor, axis: int, oob: str) -> torch.Tensor:
    places, counts = _places(indices.long(), x.shape[axis], oob)
    shape = [n if a == axis % x.ndim else m for a, (n, m) in enumerate(zip(indices.shape, x.shape, strict=True))]
    taken = torch.gather(x, axis, places.expand(shape))
    return taken if counts is None else torch.where(counts, taken, 0)


def _put_along_axis(indices: torch.Tensor, updates: torch.Tensor, axis: int, size: int, oob: str) -> torch.Tensor:
    if oob == "skip":
        raise Unsupported("torch's scatter_add takes every index")
    shape = [size if a == axis % updates.ndim else n for a, n in enumerate(updates.shape)]
    places, _ = _places(indices.long(), size, oob)
    return updates.new_zeros(shape).scatter_add(axis, places.expand_as(updates), updates)


def _check_index(indices: torch.Tensor, **more: Any) -> torch.Tensor:
    return indices  # torch's calls check their own


def _argsort(x: torch.Tensor, axis: int, descending: bool, stable: bool) -> torch.Tensor:
    return torch.argsort(x, dim=axis, descending=descending, stable=stable)


def _glu(x: torch.Tensor, axis: int) -> torch.Tensor:
    return F.glu(x, axis)


def _layer_norm(x: torch.Tensor, *affine: torch.Tensor, normalized_shape: Axes, eps: float) -> torch.Tensor:
    weight, bias = (*affine, None, None)[:2]
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def _rms_norm(x: torch.Tensor, *weight: torch.Tensor, normalized_shape: Axes, eps: float | None) -> torch.Tensor:
    return F.rms_norm(x, normalized_shape, weight[0] if weight else None, eps)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor, **attrs: Any) -> torch.Tensor:
    stride, dilation, groups, padding = (attrs[name] for name in ("stride", "dilation", "groups", "padding"))
    if attrs["transposed"]:
        raise Unsupported("a transposed convolution whose padding is torch's in another order")
    if any(low != high for low, high in padding):
        x, padding = F.pad(x, [n for pair in reversed(padding) for n in pair]), [(0, 0)] * len(padding)
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
    return function(x, weight, bias[0] if bias else None, stride, [low for low, _ in padding], dilation, groups)


def _pool(functions: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    def pool(x: torch.Tensor, kernel_size: Axes, stride: Axes, **attrs: Any) -> torch.Tensor:
        rank = len(kernel_size)
        flat = x.reshape(-1, 1, *x.shape[x.ndim - rank :]) if x.ndim != rank + 2 else x
        if attrs.get("divisor_override", 0) is None:
            del attrs["divisor_override"]
        y = functions[rank - 1](flat, kernel_size, stride or kernel_size, **attrs)
        return y.reshape((*x.shape[: x.ndim - rank], *y.shape[2:]))

    return _named(pool, functions[0])


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor, **attrs: Any) -> torch.Tensor:
    return F.cross_entropy(x, target if target.is_floating_point() else target.long(), *weight, **attrs)


def _mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    x, y = torch.broadcast_tensors(x, y)
    return F.mse_loss(x, y, reduction=reduction)


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.lerp(x, end, weight)


_OF_TORCH = (
    "add sub mul div neg reciprocal pow maximum minimum exp log log1p expm1 sqrt rsqrt tanh sigmoid erf sin cos abs"
    " sign floor round eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor where exp2 log2 log10 tan asin acos atan"
    " atan2 hypot sinh cosh asinh acosh atanh erfc erfinv lgamma digamma ceil trunc fmod copysign xlogy logaddexp"
    " logaddexp2 frac square nextafter fmax fmin isnan isinf isfinite isposinf isneginf signbit logical_and"
    " logical_or logical_xor logical_not logit deg2rad rad2deg matmul clamp relu reshape nan_to_num"
).split()
_OF_FUNCTIONAL = (
    "gelu silu softplus elu selu celu leaky_relu hardtanh relu6 hardswish softshrink hardshrink tanhshrink"
    " threshold mish logsigmoid softsign linear prelu l1_loss smooth_l1_loss huber_loss"
).split()
_OF_SPECIAL = "xlog1py entr ndtr i0 i0e i1 i1e erfcx".split()

CALLS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _OF_TORCH},
    **{name: getattr(F, name) for name in _OF_FUNCTIONAL},
    **{name: getattr(torch.special, name) for name in _OF_SPECIAL},
    "constant": _constant,
    "dim": _dim,
    "iota": _iota,
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "flip": _flip,
    "floordiv": _floordiv,
    "invert": torch.bitwise_not,
    "mod": torch.remainder,
    "cast": _cast,
    "stop_gradient": torch.Tensor.detach,
    "transpose": _transpose,
    "broadcast_to": _broadcast_to,
    **{name: _over_axes(getattr(torch, name)) for name in "sum mean amax amin any all logsumexp nansum".split()},
    "prod": _prod,
    "argmax": _argmax,
    "argmin": _argmin,
    "var": _var,
    "std": _std,
    **{name: _scan(getattr(torch, name)) for name in "cumsum cumprod cummax cummin logcumsumexp".split()},
    **{name: _along_axis(getattr(torch, name)) for name in ("softmax", "log_softmax")},
    "gather": _gather,
    "embedding": _embedding,
    "scatter_add": _scatter_add,
    "take_along_axis": _take_along_axis,
    "scatter_add_along_axis": _put_along_axis,
    "check_index": _check_index,
    "argsort": _argsort,
    "glu": _glu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "convolution": _convolution,
    "max_pool": _pool((F.max_pool1d, F.max_pool2d, F.max_pool3d)),
    "avg_pool": _pool((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)),
    "cross_entropy": _cross_entropy,
    "mse_loss": _mse_loss,
    "lerp": _lerp,
    "grid_sample": F.grid_sample,
}
"""The call of torch for an op, by the op's name."""
