"""Reductions over windows along any axes: reduce_window, of which the poolings are the cases that networks use."""

from __future__ import annotations

from typing import Any, Literal

from ...errors import TypeRuleError
from ...ir.node import Node
from ...ir.op import BadSample, Function, Sample
from ...ir.statement import neutral
from ..rules import number
from ..shapes.windows import Ints, per_axis, window_count, windows
from .reduce import amax, amin, prod, sum

_REDUCTIONS: dict[str, Any] = {"sum": sum, "prod": prod, "max": amax, "min": amin}


def _reduce_window(
    x: Node,
    reduction: Literal["sum", "prod", "max", "min"],
    window: Ints,
    strides: Ints = 1,
    dilation: Ints = 1,
    padding: Ints = 0,
) -> Node:
    number(x.type)
    rank = x.rank
    if rank == 0:
        raise TypeRuleError("a scalar has no axis for a window")
    sizes = per_axis("window", window, rank, 1)
    steps = per_axis("strides", strides, rank, 1)
    apart = per_axis("dilation", dilation, rank, 1)
    borders = per_axis("padding", padding, rank)
    axes = tuple(a for a in range(rank) if (sizes[a], steps[a], borders[a]) != (1, 1, 0))  # the others stay as they are
    if not axes:
        return x
    counts = tuple(window_count(x.shape[a], sizes[a], steps[a], apart[a], 2 * borders[a]) for a in axes)
    if any(isinstance(n, int) and n < 1 for n in counts):
        raise TypeRuleError(f"a window of {list(sizes)} (dilation {list(apart)}) is larger than the padded operand")
    parts = windows.plain(
        x,
        axis=axes,
        size=tuple(sizes[a] for a in axes),
        count=counts,
        step=tuple(steps[a] for a in axes),
        dilation=tuple(apart[a] for a in axes),
        padding=tuple(borders[a] for a in axes),
        value=neutral(reduction, x.dtype),
    )
    y: Node = _REDUCTIONS[reduction].plain(parts, axis=tuple(range(rank, rank + len(axes))))
    return y


reduce_window = Function(
    "reduce_window",
    write=_reduce_window,
    samples=(
        Sample(("F[2,5,6]",), {"reduction": "sum", "window": (1, 2, 3), "strides": (1, 2, 1), "padding": (0, 1, 0)}),
        Sample(("F[7]",), {"reduction": "max", "window": 3, "dilation": 2, "padding": 1}, draw=("distinct",)),
        Sample(("F[2,N]",), {"reduction": "min", "window": (2, 2)}, dims={"N": 4}, draw=("distinct",)),
        Sample(("F[3,4]",), {"reduction": "prod", "window": 2, "strides": (1, 2), "padding": 1}),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"reduction": "mean", "window": 2}, match="reduction='mean'"),
        BadSample(("f32[2,3]",), {"reduction": "sum", "window": (2, 2, 2)}, match="3 entries for 2"),
        BadSample(("f32[2,3]",), {"reduction": "sum", "window": 3}, match="larger than the padded operand"),
        BadSample(("f32[2,3]",), {"reduction": "sum", "window": 1, "strides": 0}, match="strides=0"),
        BadSample(("bool[3]",), {"reduction": "max", "window": 2}, match="bool has no arithmetic"),
    ),
    doc=(
        "sum, prod, max or min of windows along all axes; window, strides, dilation and padding (at both ends, with the"
        " reduction's neutral element) are one number for all axes, or one each; equal extrema share the gradient"
    ),
    source="XLA's ReduceWindow",
)
