"""Maps whose loads and stores are contiguous along different axes: tiles are transposed in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....ir.dims import ceildiv, product
from ....ir.statement import Axis, Stmt
from ....ir.types import Type
from ...declarations import used
from ...expr import carrier, loaded, stored, variable
from ...index import flatten, size
from ..axes import axis_declarations
from ..facts import Facts
from ..mapping import THREADS, ThreadMapping
from ..phase_writer import PhaseWriter

SIDE = 32
"""Elements of a tile's side."""
MOST_TILES = 4
"""Loads that are transposed: 33 KB of shared memory where elements have 8 bytes."""


@dataclass(frozen=True, kw_only=True)
class TiledTranspose(ThreadMapping):
    """A task is a block, which has a tile of two axes: it loads along one, and stores along the other.

    :param lane: the axis along which its stores are contiguous, :param other: that of the loads that are transposed.
    :param planes: its other axes.
    :param loads: that are transposed.
    """

    purpose = "Tiles of two axes: loads lie together along another axis than stores"
    lane: Axis
    other: Axis
    planes: tuple[Axis, ...]
    loads: tuple[Stmt, ...]

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        """The transposed loads, and what is done to an element."""
        (p,) = writer.k.passes
        tiles: list[tuple[str, str, str]] = []
        body: list[str] = []
        for s in (*p.row, *p.body):
            if s not in self.loads:
                body.append(writer.scribe.value(s))
                continue
            assert s.dtype is not None
            name = f"tile{len(tiles)}"
            body.append(f"const {carrier(s.dtype)} {variable(s.name)} = {loaded(s.dtype, f'{name}[beside][i]')};")
            tiles.append((name, stored(s.dtype), writer.scribe.element(s.buffer, s.index)))
        body += [line for s in p.roots for line in writer.effect(s)]
        axes = axis_declarations(self.planes, "plane")
        return {
            "side": SIDE,
            "planes": size(product(n for _, n in self.planes)),
            "plane_axes": used(axes, "\n".join([*body, *(element for _, _, element in tiles)])),
            "lane_size": size(self.lane[1]),
            "other_size": size(self.other[1]),
            "tiles": tiles,
            "body": body,
        }


def tiled_transpose(facts: Facts) -> TiledTranspose | None:
    """How tiles of a map are transposed; None where every access is contiguous with its neighbour's, or the kernel is
    more than a map.
    """
    kernel, types = facts.kernel, facts.types
    axes = {a: (a, n) for a, n in (*kernel.rows, *kernel.cols)}
    effects = [s for s in kernel.body if not s.name]
    plain = all(s.op == "store" and not s.where and kernel.stmt_level(s) == axes.keys() for s in effects)
    if not plain or not kernel.cols or facts.reduces or any(s.op in ("scan", "search") for s in kernel.body):
        return None
    lanes = {_contiguous_axis(s, types) for s in effects}
    lane = lanes.pop() if len(lanes) == 1 else ""
    loads = [s for s in kernel.body if s.op == "load" and not s.where and lane in kernel.stmt_level(s)]
    along = {s: _contiguous_axis(s, types) for s in loads}
    others = sorted({a for a in along.values() if a and a != lane})
    if lane not in axes or len(others) != 1:
        return None
    pair = (axes[lane], axes[others[0]])
    if any(isinstance(n, int) and n < SIDE for _, n in pair):
        return None
    planes = tuple(a for a in axes.values() if a not in pair)
    return TiledTranspose(
        reason=f"loads are contiguous along {others[0]}, and stores along {lane}",
        width=THREADS,
        tasks=product(n for _, n in planes) * ceildiv(pair[1][1], SIDE) * ceildiv(pair[0][1], SIDE),
        lane=pair[0],
        other=pair[1],
        planes=planes,
        loads=tuple([s for s in loads if along[s] == others[0]][:MOST_TILES]),
    )


def _contiguous_axis(s: Stmt, types: Mapping[str, Type]) -> str:
    """The axis along which an access's neighbouring elements are contiguous; "" where values from memory decide."""
    terms = dict(flatten(s.index, types[s.buffer].shape).terms)
    if any(v.startswith("%") for v in terms):
        return ""
    return next((v for v, step in terms.items() if step == 1), "")
