"""Differences of neighbours along an axis, and areas under a line by the trapezoid rule."""

from __future__ import annotations

from ..errors import TypeRuleError
from ..ir.dims import same
from ..ir.node import Node
from ..ir.op import BadSample, Function, Sample
from .movement import concat
from .reduce import sum
from .rules import canonical_axis, floating, reshaped, spread
from .scans import cumsum
from .views import _cut


def _neighbours(x: Node, axis: int) -> tuple[Node, Node]:
    """x[1:] and x[:-1] along an axis; of an empty axis both are x."""
    size = x.shape[axis]
    if same(size, 0):
        return x, x
    return _cut(x, axis, 1, size), _cut(x, axis, 0, size - 1)


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
