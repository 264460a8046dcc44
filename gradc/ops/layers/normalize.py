"""Normalisation over trailing axes: layer_norm, rms_norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Dim, Size, SizeLike, same
from ...ir.node import Node
from ...ir.op import BadSample, Composite, Sample
from ...ir.types import Type
from ..elementwise.pointwise import rsqrt
from ..reductions.reduce import _count, sum
from ..rules import along, converted, floating, full, spread


def _trailing(input: Type, normalized_shape: Any, **parameters: Type | None) -> tuple[Size, ...]:
    """``normalized_shape`` as a tuple; TypeRuleError if the input's or a parameter's shape does not end in it."""
    sizes: tuple[Size, ...] = normalized_shape if isinstance(normalized_shape, tuple) else (normalized_shape,)
    if (
        not sizes
        or len(sizes) > input.rank
        or not all(same(n, m) for n, m in zip(input.shape[input.rank - len(sizes) :], sizes, strict=True))
    ):
        raise TypeRuleError(f"normalized_shape {list(sizes)} is not how {floating(input)} ends")
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.dtype is not input.dtype:
            raise TypeRuleError(f"dtypes differ: {input.dtype} and {name} {parameter.dtype}; write a cast")
        if parameter.rank != len(sizes) or not all(same(n, m) for n, m in zip(parameter.shape, sizes, strict=True)):
            raise TypeRuleError(f"{name} {parameter} for normalized_shape {list(sizes)}")
    return sizes


def _axes(input: Node, normalized_shape: tuple[Size, ...]) -> tuple[int, ...]:
    return tuple(range(input.rank - len(normalized_shape), input.rank))


def _lead(x: Node, parameter: Node) -> Node:
    """A parameter's gradient: the sum of x over the leading axes, along which the parameter was broadcast."""
    axes = tuple(range(x.rank - parameter.rank))
    return converted(sum.plain(x, axis=axes) if axes else x, parameter.dtype)


def _scaled(xhat: Node, weight: Node | None) -> Node:
    return xhat if weight is None else xhat * spread(converted(weight, xhat.dtype), xhat.shape)


# -- layer_norm --------------------------------------------------------------------------------------------------------


def _layer_norm(
    input: Type,
    weight: Type | None = None,
    bias: Type | None = None,
    *,
    normalized_shape: int | Dim | tuple[SizeLike, ...],
    eps: float = 1e-5,
) -> Any:
    return floating(input), {
        "normalized_shape": _trailing(input, normalized_shape, weight=weight, bias=bias),
        "eps": eps,
    }


def _centred_rows(input: Node, axes: tuple[int, ...], eps: float) -> tuple[Node, Node]:
    """(xhat, 1 / standard deviation per row), for the value and the vjp."""
    wide = converted(input, input.dtype.compute)
    count = _count(input, axes)
    centred = wide - along(sum.plain(wide, axis=axes) / count, wide.shape, axes)
    # the mean was rounded; subtracting the mean of the centred values removes its error
    centred = centred - along(sum.plain(centred, axis=axes) / count, wide.shape, axes)
    rstd = rsqrt(sum.plain(centred * centred, axis=axes) / count + eps)
    return centred * along(rstd, wide.shape, axes), rstd


def _layer_norm_value(
    input: Node, weight: Node | None = None, bias: Node | None = None, *, normalized_shape: tuple[Size, ...], eps: float
) -> Node:
    xhat, _ = _centred_rows(input, _axes(input, normalized_shape), eps)
    y = _scaled(xhat, weight)
    return converted(y if bias is None else y + spread(converted(bias, y.dtype), y.shape), input.dtype)


def _layer_norm_vjp(
    g: Node,
    y: Node,
    input: Node,
    weight: Node | None = None,
    bias: Node | None = None,
    *,
    normalized_shape: tuple[Size, ...],
    eps: float,
) -> tuple[Node, ...]:
    # dx = rstd (h - mean(h) - xhat mean(h xhat)) with h = g w
    axes = _axes(input, normalized_shape)
    xhat, rstd = _centred_rows(input, axes, eps)
    count, g = _count(input, axes), converted(g, xhat.dtype)
    h = _scaled(g, weight)
    mean, slope = (along(sum.plain(v, axis=axes) / count, input.shape, axes) for v in (h, h * xhat))
    gradients = [converted(along(rstd, input.shape, axes) * (h - mean - xhat * slope), input.dtype)]
    if weight is not None:
        gradients.append(_lead(g * xhat, weight))
    if bias is not None:
        gradients.append(_lead(g, bias))
    return tuple(gradients)


def _ones(input: Type, *, normalized_shape: Any, **_: Any) -> Node:
    """The weight of a norm that has a bias alone."""
    sizes = tuple(normalized_shape) if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    return full(1, input.with_shape(*sizes))


layer_norm = Composite(
    "layer_norm",
    infer=_layer_norm,
    decompose=_layer_norm_value,
    vjp=_layer_norm_vjp,
    order=("input", "normalized_shape", "weight", "bias", "eps"),
    omitted={"weight": _ones},
    samples=(
        Sample(("F[N,5]", "F[5]", "F[5]"), {"normalized_shape": (5,)}),
        Sample(("F[5]",), {"normalized_shape": 5}),
        Sample(("F[2,N,5]", "F[5]"), {"normalized_shape": (5,), "eps": 0.1}),
        Sample(("F[N,3,4]", "F[3,4]", "F[3,4]"), {"normalized_shape": (3, 4)}),
        Sample(("F[2,3,N,4]", "F[3,N,4]", "F[3,N,4]"), {"normalized_shape": (3, "N", 4)}, dims={"N": 5}),
        Sample(("F[3,N]",), {"normalized_shape": ("N",)}, dims={"N": 6}),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"normalized_shape": (2,)}, match="normalized_shape [2] is not how f32[2,3] ends"),
        BadSample(("f32[3]",), {"normalized_shape": ()}, match="normalized_shape []"),
        BadSample(("f32[3]",), {"normalized_shape": (2, 3)}, match="is not how"),
        BadSample(("f32[2,3]", "f32[2]"), {"normalized_shape": (3,)}, match="weight f32[2] for normalized_shape [3]"),
        BadSample(
            ("f32[2,3]", "f32[3]", "f64[3]"), {"normalized_shape": (3,)}, match="dtypes differ: f32 and bias f64"
        ),
        BadSample(("i32[2,3]",), {"normalized_shape": (3,)}, match="i32 is no float"),
    ),
    doc=(
        "(x - mean) / sqrt(variance + eps) over the trailing normalized_shape, times weight plus bias; "
        "statistics in f32 for 16-bit types"
    ),
    source="Ba et al. 2016; torch.nn.functional.layer_norm",
)

# -- rms_norm ----------------------------------------------------------------------------------------------------------


def _rms_norm(
    input: Type,
    weight: Type | None = None,
    *,
    normalized_shape: int | Dim | tuple[SizeLike, ...],
    eps: float | None = None,
) -> Any:
    sizes = _trailing(input, normalized_shape, weight=weight)
    return floating(input), {
        "normalized_shape": sizes,
        "eps": float(np.finfo(input.dtype.compute.np).eps) if eps is None else eps,
    }


def _scaled_rows(input: Node, axes: tuple[int, ...], eps: float) -> tuple[Node, Node]:
    """(xhat, 1 / root mean square per row), for the value and the vjp."""
    wide = converted(input, input.dtype.compute)
    rstd = rsqrt(sum.plain(wide * wide, axis=axes) / _count(input, axes) + eps)
    return wide * along(rstd, wide.shape, axes), rstd


def _rms_norm_value(input: Node, weight: Node | None = None, *, normalized_shape: tuple[Size, ...], eps: float) -> Node:
    xhat, _ = _scaled_rows(input, _axes(input, normalized_shape), eps)
    return converted(_scaled(xhat, weight), input.dtype)


def _rms_norm_vjp(
    g: Node, y: Node, input: Node, weight: Node | None = None, *, normalized_shape: tuple[Size, ...], eps: float
) -> tuple[Node, ...]:
    # dx = rstd (h - xhat mean(h xhat)) with h = g w
    axes = _axes(input, normalized_shape)
    xhat, rstd = _scaled_rows(input, axes, eps)
    g = converted(g, xhat.dtype)
    h = _scaled(g, weight)
    slope = along(sum.plain(h * xhat, axis=axes) / _count(input, axes), input.shape, axes)
    dx = converted(along(rstd, input.shape, axes) * (h - xhat * slope), input.dtype)
    return (dx,) if weight is None else (dx, _lead(g * xhat, weight))


rms_norm = Composite(
    "rms_norm",
    infer=_rms_norm,
    decompose=_rms_norm_value,
    vjp=_rms_norm_vjp,
    order=("input", "normalized_shape", "weight", "eps"),
    samples=(
        Sample(("F[N,5]", "F[5]"), {"normalized_shape": (5,)}),
        Sample(("F[5]",), {"normalized_shape": 5}),
        Sample(("F[2,N,5]", "F[5]"), {"normalized_shape": (5,), "eps": 0.1}),
        Sample(("F[N,3,4]", "F[3,4]"), {"normalized_shape": (3, 4)}),
        Sample(("F[2,3,N,4]", "F[3,N,4]"), {"normalized_shape": (3, "N", 4), "eps": 1e-6}, dims={"N": 5}),
        Sample(("F[3,N]",), {"normalized_shape": ("N",)}, dims={"N": 6}),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"normalized_shape": (2,)}, match="normalized_shape [2] is not how f32[2,3] ends"),
        BadSample(("f32[2,3]", "f32[2]"), {"normalized_shape": (3,)}, match="weight f32[2]"),
        BadSample(("i32[2,3]",), {"normalized_shape": (3,)}, match="i32 is no float"),
        BadSample(("f32[2,3]",), {"normalized_shape": (3,), "eps": "small"}, match="eps='small'"),
    ),
    doc=(
        "x / sqrt(mean(x^2) + eps) over the trailing normalized_shape, times weight; eps=None is the machine epsilon of"
        " the compute dtype"
    ),
    source="Zhang and Sennrich 2019; torch.nn.functional.rms_norm",
)
