"""Normalisation over chosen axes: standardize, batch_norm, group_norm, instance_norm, weight_norm."""

from __future__ import annotations

from typing import Any

from ...errors import TypeRuleError
from ...ir.dims import Size, product, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Sample
from ...ir.types import Type
from ..elementwise.pointwise import rsqrt, sqrt
from ..reductions.reduce import _count, sum
from ..rules import along, canonical_axes, canonical_axis, converted, floating, reshaped, spread
from .normalize import _centred_rows

# -- standardize -------------------------------------------------------------------------------------------------------


def _standardize(x: Type, *, axis: int | tuple[int, ...] | None = None, eps: float = 1e-5) -> Any:
    return floating(x), {"axis": canonical_axes(axis, x.rank), "eps": eps}


def _standardize_vjp(g: Node, y: Node, x: Node, *, axis: tuple[int, ...], eps: float) -> tuple[Node]:
    # dx = rstd (g - mean(g) - xhat mean(g xhat))
    xhat, rstd = _centred_rows(x, axis, eps)
    count, g = _count(x, axis), converted(g, xhat.dtype)
    mean, slope = (along(sum.plain(v, axis=axis) / count, x.shape, axis) for v in (g, g * xhat))
    return (converted(along(rstd, x.shape, axis) * (g - mean - xhat * slope), x.dtype),)


standardize = Composite(
    "standardize",
    infer=_standardize,
    decompose=lambda x, *, axis, eps: converted(_centred_rows(x, axis, eps)[0], x.dtype),
    vjp=_standardize_vjp,
    samples=(
        Sample(("F[3,N,2]",), {"axis": (0, 2)}, dims={"N": 4}),
        Sample(("F[N,5]",), {"axis": -1, "eps": 0.1}, dims={"N": 3}),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"axis": 2}, match="axis=2"),
        BadSample(("i32[2,3]",), match="i32 is no float"),
    ),
    doc="(x - mean) / sqrt(variance + eps) over axes; statistics in f32 for 16-bit types",
    source="jax.nn.standardize",
)

# -- per channel -------------------------------------------------------------------------------------------------------


def _per_channel(name: str, parameter: Node, input: Node, axis: int = 1) -> Node:
    """A vector of a number per channel, spread over the input and in its compute dtype."""
    if parameter.rank != 1 or not same(parameter.shape[0], input.shape[axis]):
        raise TypeRuleError(f"{name} {parameter.type} for {input.shape[axis]} channels")
    floating(parameter.type)
    line = tuple(input.shape[axis] if a == axis else 1 for a in range(input.rank))
    return spread(reshaped(converted(parameter, input.dtype.compute), line), input.shape)


def _affine(xhat: Node, input: Node, weight: Node | None, bias: Node | None) -> Node:
    """xhat * weight + bias per channel, in the input's dtype."""
    if weight is not None:
        xhat = xhat * _per_channel("weight", weight, input)
    if bias is not None:
        xhat = xhat + _per_channel("bias", bias, input)
    return converted(xhat, input.dtype)


def _wide(input: Node, least: int = 2) -> Node:
    if floating(input.type).rank < least:
        raise TypeRuleError(f"an input of rank {input.rank}: {least} at least")
    return converted(input, input.dtype.compute)


def _channel_free(input: Node) -> tuple[int, ...]:
    """The axes that a batch's statistics are over."""
    return tuple(a for a in range(input.rank) if a != 1)


def _with_running(input: Node, running_mean: Node | None, running_var: Node | None, eps: float) -> Node:
    if running_mean is None or running_var is None:
        raise TypeRuleError("running_mean and running_var are needed where training is false")
    running_mean, running_var = (call("stop_gradient", x) for x in (running_mean, running_var))
    rstd = rsqrt(converted(running_var, input.dtype.compute) + eps)
    return (_wide(input) - _per_channel("running_mean", running_mean, input)) * _per_channel("running_var", rstd, input)


def _check_batch(input: Node) -> None:
    count = product(input.shape[a] for a in _channel_free(input))
    if isinstance(count, int) and count <= 1:
        raise TypeRuleError(f"training wants more than {count} value per channel")


def _batch_norm(
    input: Node,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    weight: Node | None = None,
    bias: Node | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Node:
    wide = _wide(input)
    if not training:
        return _affine(_with_running(input, running_mean, running_var, eps), input, weight, bias)
    _check_batch(input)
    return _affine(standardize.plain(wide, axis=_channel_free(input), eps=eps), input, weight, bias)


_RUNNING = ("normal", "normal", "positive", "normal", "normal")

batch_norm = Function(
    "batch_norm",
    write=_batch_norm,
    samples=(
        Sample(("F[3,2,4]", "F[2]", "F[2]", "F[2]", "F[2]"), {"training": True}, draw=_RUNNING),
        Sample(("F[3,2,2,3]", "F[2]", "F[2]", "F[2]", "F[2]"), draw=_RUNNING),
    ),
    bad=(
        BadSample(("f32[3,2]",), match="are needed"),
        BadSample(("f32[1,2]",), {"training": True}, match="more than 1 value per channel"),
        BadSample(("f32[3]",), {"training": True}, match="rank 1"),
    ),
    doc=(
        "each channel (axis 1) less its mean over its standard deviation, times weight plus bias: with training those"
        " of this batch, else the running ones; nothing is updated: native_batch_norm"
        " returns the new running ones, which pass no gradient, as the old ones take none"
    ),
    source="torch.nn.functional.batch_norm; Ioffe and Szegedy 2015",
)


def _native_batch_norm(
    input: Node,
    weight: Node | None = None,
    bias: Node | None = None,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Node, ...]:
    wide = _wide(input)
    if running_mean is None or running_var is None:
        raise TypeRuleError("running_mean and running_var are needed: batch_norm does without")
    empty = call("constant", value=(), dtype=wide.dtype, shape=(0,))
    y = _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        return y, empty, empty, call("stop_gradient", running_mean), call("stop_gradient", running_var)
    axes = _channel_free(input)
    mean, variance = call("mean", wide, axis=axes), call("var", wide, axis=axes)
    count = _count(wide, axes)
    unbiased = variance * (count / (count - 1))

    def moved(old: Node, new: Node) -> Node:
        return converted(converted(old, wide.dtype) * (1 - momentum) + new * momentum, old.dtype)

    statistics = mean, rsqrt(variance + eps), moved(running_mean, mean), moved(running_var, unbiased)
    return y, *(call("stop_gradient", x) for x in statistics)


native_batch_norm = Function(
    "native_batch_norm",
    write=_native_batch_norm,
    samples=(
        Sample(
            ("F[3,2,4]", "F[2]", "F[2]", "F[2]", "F[2]"),
            {"training": True, "momentum": 0.25},
            draw=("normal", "normal", "normal", "normal", "positive"),
        ),
    ),
    bad=(
        BadSample(("f32[3,2]", "f32[3]", "f32[2]", "f32[2]", "f32[2]"), {"training": True}, match="weight f32[3]"),
        BadSample(
            ("f32[3,2]", "f32[2]", "f32[2]"), {"training": True}, match="running_mean and running_var are needed"
        ),
    ),
    doc=(
        "batch_norm, the mean and 1 / standard deviation that it used (without training nothing), and the new running"
        " mean and (unbiased) variance: five values, of which the first passes a gradient"
    ),
    source="torch.ops.aten._native_batch_norm_legit_functional",
)


def _group_norm(
    input: Node, num_groups: int, weight: Node | None = None, bias: Node | None = None, eps: float = 1e-5
) -> Node:
    wide = _wide(input)
    channels: Size = input.shape[1]
    if num_groups < 1 or not isinstance(channels, int) or channels % num_groups:
        raise TypeRuleError(f"{channels} channels are not a multiple of num_groups={num_groups}")
    shape = (input.shape[0], num_groups, channels // num_groups, *input.shape[2:])
    xhat = standardize.plain(reshaped(wide, shape), axis=tuple(range(2, len(shape))), eps=eps)
    return _affine(reshaped(xhat, input.shape), input, weight, bias)


group_norm = Function(
    "group_norm",
    write=_group_norm,
    samples=(
        Sample(("F[2,6,3]", "F[6]", "F[6]"), {"num_groups": 3}),
        Sample(("F[2,4]",), {"num_groups": 2, "eps": 0.1}),
    ),
    bad=(BadSample(("f32[2,6,3]",), {"num_groups": 4}, match="6 channels are not a multiple of num_groups=4"),),
    doc="each group of channels less its mean over its standard deviation, times weight plus bias per channel",
    source="torch.nn.functional.group_norm; Wu and He 2018",
)


def _instance_norm(
    input: Node,
    running_mean: Node | None = None,
    running_var: Node | None = None,
    weight: Node | None = None,
    bias: Node | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Node:
    wide = _wide(input, 3)
    if not use_input_stats:
        return _affine(_with_running(input, running_mean, running_var, eps), input, weight, bias)
    return _affine(standardize.plain(wide, axis=tuple(range(2, input.rank)), eps=eps), input, weight, bias)


instance_norm = Function(
    "instance_norm",
    write=_instance_norm,
    samples=(
        Sample(("F[2,3,2,4]", "F[3]", "F[3]", "F[3]", "F[3]"), draw=_RUNNING),
        Sample(("F[2,3,4]", "F[3]", "F[3]"), {"use_input_stats": False}, draw=_RUNNING),
    ),
    bad=(BadSample(("f32[2,3]",), match="rank 2: 3 at least"),),
    doc=(
        "each channel of each element of the batch less its mean over its standard deviation, times weight plus bias"
        " per channel; nothing is updated"
    ),
    source="torch.nn.functional.instance_norm; Ulyanov et al. 2016",
)


def _weight_norm(v: Node, g: Node, dim: int = 0) -> Node:
    wide = converted(v, floating(v.type).dtype.compute)
    axes = tuple(a for a in range(v.rank) if dim == -1 or a != canonical_axis(dim, v.rank, "dim"))
    norm = sqrt(sum.plain(wide * wide, axis=axes))
    scale = converted(g, wide.dtype)
    if g.type.count != norm.type.count:
        raise TypeRuleError(f"g {g.type} for {norm.type.count} norms")
    return converted(wide * along(reshaped(scale, norm.shape) / norm, v.shape, axes), v.dtype)


weight_norm = Function(
    "weight_norm",
    write=_weight_norm,
    samples=(Sample(("F[3,2,4]", "F[3,1,1]")), Sample(("F[3,4]", "F[1,4]"), {"dim": 1})),
    bad=(BadSample(("f32[3,4]", "f32[2,1]"), match="for 3 norms"),),
    doc="g * v / |v|, the norm over all axes but dim (over all for dim=-1)",
    source="torch._weight_norm; Salimans and Kingma 2016",
)
