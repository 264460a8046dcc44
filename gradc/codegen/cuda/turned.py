"""Elementwise kernels whose loads and stores lie together along different axes: tiles are turned in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.dims import Size, product
from ...ir.kernel import Kernel
from ...ir.statement import REDUCTIONS, Axis, Stmt
from ...ir.types import Type
from ..index import flatten

TURN = 32
"""Elements of a tile's side."""
MOST_TILES = 4
"""Loads that are turned: 33 KB of shared memory where elements have 8 bytes."""


@dataclass(frozen=True)
class Turn:
    """How a kernel goes through two of its axes in tiles.

    :param lane: the axis along which its stores lie together, :param other: that of the loads that are turned.
    :param planes: its other axes.
    :param loads: that are turned.
    """

    lane: Axis
    other: Axis
    planes: tuple[Axis, ...]
    loads: tuple[Stmt, ...]

    @property
    def extents(self) -> tuple[Size, Size, Size]:
        """(planes, elements of the other axis, elements of the lane's)"""
        return product(n for _, n in self.planes), self.other[1], self.lane[1]


def turned(kernel: Kernel, types: Mapping[str, Type]) -> Turn | None:
    """How tiles of a kernel are turned; None where every access lies together with its neighbour's, or it is more than
    a map.
    """
    axes = {a: (a, n) for a, n in (*kernel.rows, *kernel.cols)}
    effects = [s for s in kernel.body if not s.name]
    plain = all(s.op == "store" and not s.where and kernel.stmt_level(s) == axes.keys() for s in effects)
    if not plain or not kernel.cols or any(s.op in REDUCTIONS or s.op in ("scan", "search") for s in kernel.body):
        return None
    lanes = {_together(s, types) for s in effects}
    lane = lanes.pop() if len(lanes) == 1 else ""
    loads = [s for s in kernel.body if s.op == "load" and not s.where and lane in kernel.stmt_level(s)]
    along = {s: _together(s, types) for s in loads}
    others = sorted({a for a in along.values() if a and a != lane})
    if lane not in axes or len(others) != 1:
        return None
    pair = (axes[lane], axes[others[0]])
    if any(isinstance(n, int) and n < TURN for _, n in pair):
        return None
    loads = [s for s in loads if along[s] == others[0]][:MOST_TILES]
    return Turn(*pair, tuple(a for a in axes.values() if a not in pair), tuple(loads))


def _together(s: Stmt, types: Mapping[str, Type]) -> str:
    """The axis along which an access's neighbouring elements lie together; "" where values from memory decide."""
    terms = dict(flatten(s.index, types[s.buffer].shape).terms)
    if any(v.startswith("%") for v in terms):
        return ""
    return next((v for v, step in terms.items() if step == 1), "")
