"""Differences of neighbours along an axis, derivatives by them, and areas under a line by the trapezoid rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Assumption, require, same
from ...ir.node import Node
from ...ir.op import BadSample, Function, Sample
from ...ir.operands import adopt
from ..rules import canonical_axis, floating, plain_number, reshaped, spread
from ..shapes.movement import concat
from ..shapes.views import cut
from .reduce import sum
from .scans import cumsum


def _neighbours(x: Node, axis: int) -> tuple[Node, Node]:
    """x[1:] and x[:-1] along an axis; of an empty axis both are x."""
    size = x.shape[axis]
    if same(size, 0):
        return x, x
    return cut(x, axis, 1, size), cut(x, axis, 0, size - 1)


# -- differences -------------------------------------------------------------------------------------------------------


def _diff(x: Node, n: int = 1, axis: int = -1, prepend: Node | None = None, append: Node | None = None) -> Node:
    at = canonical_axis(axis, x.rank)
    if n < 0:
        raise TypeRuleError(f"n={n}: 0 at least")
    if n == 0:
        return x
    one = tuple(1 if a == at else size for a, size in enumerate(x.shape))
    parts = [v if v.rank else spread(v, one) for v in (prepend, x, append) if v is not None]
    line = concat(*parts, axis=at) if len(parts) > 1 else x
    for _ in range(n):
        after, before = _neighbours(line, at)
        line = after - before
    return line


diff = Function(
    "diff",
    write=_diff,
    samples=(
        Sample(("F[2,5]",), {"n": 2}),
        Sample(("F[N,2]",), {"axis": 0}),
        Sample(("F[2,3]", "F[]", "F[2,2]")),
        Sample(("F[2,2]",), {"n": 3}),
    ),
    bad=(
        BadSample(("f32[3]",), {"n": -1}, match="n=-1"),
        BadSample(("f32[]",), match="axis=-1"),
        BadSample(("f32[2,3]", "f32[3,1]"), match="differ"),
    ),
    doc=(
        "the differences of neighbours along an axis, taken n times, after prepend and append (a scalar stands for one"
        " element more in each row) are joined to x"
    ),
    source="torch.diff; numpy.diff",
)

# -- derivatives -------------------------------------------------------------------------------------------------------


def _steps(spacing: Any, count: int) -> list[Any]:
    """One step, or array of places, for each axis."""
    spacing = plain_number(spacing)
    if isinstance(spacing, bool) or not isinstance(spacing, int | float | list | tuple):
        raise TypeRuleError(f"spacing={spacing!r}: a number, or for each axis a number or an array of places")
    given = [spacing] * count if isinstance(spacing, int | float) else [plain_number(step) for step in spacing]
    if len(given) != count:
        raise TypeRuleError(
            f"spacing for {len(given)} axes; the derivative is along {count}: one number, or one for each"
        )
    return given


def _places(x: Node, axis: int, given: Any) -> Node:
    """The places of x's elements along an axis, in x's shape."""
    (places,) = adopt("gradient", [given], broadcasting=False)
    if places.dtype is not x.dtype or places.rank != 1 or not same(places.shape[0], x.shape[axis]):
        raise TypeRuleError(f"places {places.type} along axis {axis} of {x.type}; {x.dtype}[{x.shape[axis]}] is needed")
    return spread(reshaped(places, tuple(n if a == axis else 1 for a, n in enumerate(x.shape))), x.shape)


def _slope(x: Node, axis: int, step: Any, edge_order: int) -> Node:
    """The slope of the parabola through three neighbours inside; at the ends that of the line through two (edge_order
    1), or of the parabola.
    """
    n = x.shape[axis]
    if isinstance(n, int) and n <= edge_order:
        raise TypeRuleError(f"axis {axis} of {x.type} has {n} elements: {edge_order + 1} at least")
    require(Assumption(n, ">=", edge_order + 1))
    after, before = _neighbours(x, axis)
    if isinstance(step, int | float):
        rates = (after - before) / float(step)
        left, right = cut(rates, axis, 0, n - 2), cut(rates, axis, 1, n - 1)
        inside, bend = (left + right) * 0.5, (right - left) * 0.5
        bends = bend, bend
    else:
        to, origin = _neighbours(_places(x, axis, step), axis)
        widths = to - origin
        rates = (after - before) / widths
        left, right = cut(rates, axis, 0, n - 2), cut(rates, axis, 1, n - 1)
        low, high = cut(widths, axis, 0, n - 2), cut(widths, axis, 1, n - 1)
        inside, bend = (left * high + right * low) / (low + high), (right - left) / (low + high)
        bends = bend * low, bend * high
    first, last = cut(rates, axis, 0, 1), cut(rates, axis, n - 2, n - 1)
    if edge_order == 2:
        first, last = first - cut(bends[0], axis, 0, 1), last + cut(bends[1], axis, n - 3, n - 2)
    return concat(first, inside, last, axis=axis)


def _gradient(
    x: Node, spacing: Any = 1.0, axis: int | tuple[int, ...] | None = None, edge_order: int = 1
) -> tuple[Node, ...]:
    floating(x.type)
    if edge_order not in (1, 2):
        raise TypeRuleError(f"edge_order={edge_order}: 1 or 2")
    axes = tuple(range(x.rank)) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = tuple(canonical_axis(a, x.rank) for a in axes)
    steps = _steps(1.0 if spacing is None else spacing, len(axes))
    return tuple(_slope(x, a, step, edge_order) for a, step in zip(axes, steps, strict=True))


gradient = Function(
    "gradient",
    write=_gradient,
    samples=(
        Sample(("F[4,5]",)),
        Sample(("F[2,5]",), {"spacing": 0.5, "axis": 1, "edge_order": 2}),
        Sample(("F[N,3]",), {"axis": 0}, dims={"N": 4}),
        Sample(
            ("f64[3,4]",), {"spacing": (np.array([0.0, 1.0, 3.0]), np.array([-1.0, 0.5, 1.0, 2.5])), "edge_order": 2}
        ),
        Sample(("F[2,3]",), {"spacing": (2.0, 0.5)}),
    ),
    bad=(
        BadSample(("i32[3]",), match="i32 is no float"),
        BadSample(("f32[2]",), {"edge_order": 2}, match="has 2 elements: 3 at least"),
        BadSample(("f32[3]",), {"edge_order": 3}, match="edge_order=3: 1 or 2"),
        BadSample(("f32[3,3]",), {"spacing": (1.0,)}, match="spacing for 1 axes; the derivative is along 2"),
        BadSample(("f64[3]",), {"spacing": (np.array([0.0, 1.0]),)}, match="places f64[2] along axis 0 of f64[3]"),
        BadSample(("f64[3]",), {"spacing": ("a",)}, match="an array of <U1"),
    ),
    doc=(
        "the derivative along each axis (all, or those of axis) by differences of neighbours, one result for each;"
        " spacing: the distance of neighbours, or for each axis a distance or the places of the elements, [n];"
        " edge_order: the order of the differences at the ends"
    ),
    source="torch.gradient; numpy.gradient",
)

# -- areas -------------------------------------------------------------------------------------------------------------


def _areas(y: Node, x: Node | None, dx: float, axis: int) -> Node:
    """The area between each two neighbours: their mean times the width."""
    floating(y.type)
    after, before = _neighbours(y, axis)
    if x is None:
        return (after + before) * (dx / 2)
    if x.rank == 0:
        raise TypeRuleError("x is a scalar: the places of y's elements, or dx for equal widths")
    if x.rank > y.rank:
        raise TypeRuleError(f"x of rank {x.rank} for y of rank {y.rank}")
    # of rank 1 it goes along the axis, otherwise its axes are y's last ones
    lead = axis if x.rank == 1 else y.rank - x.rank
    places = reshaped(x, (*(1,) * lead, *x.shape, *(1,) * (y.rank - lead - x.rank)))
    if not same(places.shape[axis], y.shape[axis]):
        raise TypeRuleError(f"x has {places.shape[axis]} places for the {y.shape[axis]} elements of axis {axis}")
    right, left = _neighbours(places, axis)
    return (after + before) * (right - left) * 0.5


def _trapezoid(y: Node, x: Node | None = None, dx: float = 1.0, axis: int = -1) -> Node:
    at = canonical_axis(axis, y.rank)
    return sum(_areas(y, x, dx, at), at)


def _cumulative_trapezoid(y: Node, x: Node | None = None, dx: float = 1.0, axis: int = -1) -> Node:
    at = canonical_axis(axis, y.rank)
    return cumsum(_areas(y, x, dx, at), at)


_SAMPLES = (
    Sample(("F[2,5]",), {"dx": 0.5}),
    Sample(("F[N,2]", "F[N]"), {"axis": 0}),
    Sample(("F[2,4]", "F[2,4]")),
    Sample(("F[2,3,4]", "F[3,1]"), {"axis": 1}),
)
_BAD = (
    BadSample(("f32[2,3]", "f32[4]"), match="x has 4 places for the 3 elements of axis 1"),
    BadSample(("f32[3]", "f32[]"), match="x is a scalar"),
    BadSample(("f32[3]", "f32[2,3]"), match="x of rank 2 for y of rank 1"),
    BadSample(("i32[3]",), match="i32 is no float"),
)

trapezoid = Function(
    "trapezoid",
    write=_trapezoid,
    samples=_SAMPLES,
    bad=_BAD,
    doc="the area under y by the trapezoid rule along an axis, at places x (one axis or all) or dx apart",
    source="torch.trapezoid",
)
cumulative_trapezoid = Function(
    "cumulative_trapezoid",
    write=_cumulative_trapezoid,
    samples=_SAMPLES,
    bad=_BAD,
    doc="the area under y up to each element but the first, by the trapezoid rule as in trapezoid",
    source="torch.cumulative_trapezoid",
)
