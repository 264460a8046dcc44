"""The inverse of max pooling: max_unpool1d, max_unpool2d and max_unpool3d."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, product, same
from ...ir.node import Node
from ...ir.op import DISCRETE, BadSample, Composite, Function, Sample
from ...ir.types import Type
from ..elementwise.pointwise import ge, where
from ..indexing.gathers import index_type, take_along_axis
from ..indexing.scatters import scatter_amax
from ..rules import reshaped, zeros_like
from ..shapes.movement import iota
from ..shapes.windows import Ints, per_axis


def _unpool(input: Type, indices: Type, *, sizes: tuple[int, ...]) -> Any:
    if index_type(indices).rank != input.rank or not all(map(same, indices.shape, input.shape)):
        raise TypeRuleError(f"indices are {indices} and the input {input}: one index per element")
    return input.with_shape(*input.shape[: input.rank - len(sizes)], *sizes)


def _lines(x: Node, spatial: int) -> Node:
    """The spatial axes as one."""
    lead = x.shape[: x.rank - spatial]
    return reshaped(x, (*lead, product(x.shape[x.rank - spatial :])))


def _value(input: Node, indices: Node, *, sizes: tuple[int, ...]) -> Node:
    spatial, axis = len(sizes), input.rank - len(sizes)
    places, values = _lines(indices, spatial), _lines(input, spatial)
    winner = scatter_amax.plain(places, iota.plain(shape=places.shape, axis=axis), axis=axis, size=math.prod(sizes))
    hit = ge(winner, zeros_like(winner))
    put = take_along_axis.plain(values, winner, axis=axis, oob="clamp")
    return reshaped(where(hit, put, zeros_like(put)), (*input.shape[:axis], *sizes))


def _vjp(g: Node, y: Node, input: Node, indices: Node, *, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    # dx = g at its index, also where several elements have one
    spatial, axis = len(sizes), input.rank - len(sizes)
    back = take_along_axis.plain(_lines(g, spatial), _lines(indices, spatial), axis=axis)
    return reshaped(back, input.shape), DISCRETE


max_unpool = Composite(
    "max_unpool",
    infer=_unpool,
    decompose=_value,
    vjp=_vjp,
    indices={1: lambda node: math.prod(node.attrs["sizes"])},
    samples=(
        Sample(("F[2,3]", np.array([[6, 0, 3], [1, 5, 2]])), {"sizes": (7,)}),
        Sample(("F[2,2,1]", np.array([[[3], [4]], [[0], [5]]])), {"sizes": (2, 3)}),
    ),
    bad=(BadSample(("f32[2,3]", "i64[2,2]"), {"sizes": (7,)}, match="one index per element"),),
    doc=(
        "zeros of the given sizes of the last axes with the elements of input at their indices into those axes, as"
        " max_pool gives them; of several for one place the last stays, and each has the gradient"
    ),
    source="torch.nn.functional.max_unpool2d",
)


def _max_unpool_of(spatial: int) -> Function:
    def write(
        input: Node,
        indices: Node,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        output_size: tuple[int, ...] | None = None,
    ) -> Node:
        if input.rank not in (spatial + 1, spatial + 2):
            raise TypeRuleError(f"an input of rank {input.rank}: {spatial + 1} or {spatial + 2}")
        kernel = per_axis("kernel_size", kernel_size, spatial, 1)
        steps = kernel if stride in (None, ()) else per_axis("stride", stride, spatial, 1)
        borders = per_axis("padding", padding, spatial)
        own: tuple[Size, ...] = input.shape[input.rank - spatial :]
        default = [(n - 1) * s - 2 * p + k for n, s, p, k in zip(own, steps, borders, kernel, strict=True)]
        sizes = tuple(default) if output_size is None else tuple(output_size)[-spatial:]
        if not all(isinstance(n, int) for n in sizes):
            raise TypeRuleError(f"the sizes {list(sizes)} of the result are symbolic: give an output_size")
        for n, least, s in zip(sizes, default, steps, strict=True):
            if isinstance(least, int) and not least - s < n < least + s:
                raise TypeRuleError(f"output_size={list(sizes)}: {n} is not within {s} of {least}")
        return max_unpool.plain(input, indices, sizes=sizes)

    shape, size = ",".join("234"[:spatial]), math.prod(range(4, 4 + 2 * spatial, 2))
    return Function(
        f"max_unpool{spatial}d",
        write=write,
        samples=(Sample((f"F[2,{shape}]", f"i64[2,{shape}]"), {"kernel_size": 2}, draw=("normal", f"index:{size}")),),
        bad=(
            BadSample(
                (f"f32[2,{shape}]", f"i64[2,{shape}]"),
                {"kernel_size": 2, "output_size": (9,) * spatial},
                match="is not within 2 of",
            ),
        ),
        doc=f"max_unpool over the last {spatial} axes; output_size where windows do not determine it",
        source=f"torch.nn.functional.max_unpool{spatial}d",
    )


max_unpool1d, max_unpool2d, max_unpool3d = (_max_unpool_of(n) for n in (1, 2, 3))
