"""invert_scatters: sums at positions that are known when a module is compiled are gathered by their elements.

So is the gradient of an image that was made larger: every result element has few summands, neighbours of each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ...interp import apply
from ...ir.dims import Size
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.op import Expr, Primitive
from ...ir.pattern import splat
from ...ir.properties import Broadcasts, Scatters, access
from ...ir.types import F32, F64, I32, Type
from ...ops.rules import converted, full, spread
from ...ops.shapes.windows import windows
from ..manager import graph_pass

LONGEST = 16
"""Places of an element's window at most."""
WASTE = 2
"""A window has this many times the most summands of an element, and one, as its places at most."""
MOST_POSITIONS = 1 << 16
"""Positions that are computed at most."""
EXACT = {"floor", "ceil", "trunc", "rint", "minimum", "maximum", "abs", "cast"}
"""Functions that have the same bits on every target, as + - * / do."""

Known = dict[Node, np.ndarray | None]
"""What arrays of a graph are; None: not known."""


@graph_pass("REAL", by_values=True)
def invert_scatters(graph: Graph, *, numerics: str = "real") -> Graph:
    """scatter_add(f(iota), v)  ->  sum(where(f(place) == iota, windows(v), 0)), where the positions f(iota) are made of
    constants, and those of each element lie in a short window that steps along with it
    sum(where(...)) + sum(where(...))  ->  sum(where(...) + where(...)), of two such over the same windows

    The order of a sum is that of its positions.  No element is written twice, and none needs an atomic.
    """
    if numerics == "strict":
        return graph
    known: Known = {}
    found = {node: made for node in graph.nodes if (made := _scattered(node, known)) is not None}
    by_size: dict[tuple[int, int], list[_Scattered]] = {}
    for each in found.values():
        by_size.setdefault((each.count, each.size), []).append(each)
    windows_of = {  # one for all, so that one kernel has the sums of several taps
        sizes: (min(e.first for e in same), max(e.last for e in same)) for sizes, same in by_size.items()
    }

    sums: set[Node] = set()

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node.op.name == "add" and sums.issuperset(operands) and len({o.attrs["axis"] for o in operands}) == 1:
            a, b = (o.operands[0] for o in operands)
            if a.shape != b.shape:
                return None
            sums.add(both := call("sum", a + b, axis=operands[0].attrs["axis"]))
            return both
        if (made := found.get(node)) is None:
            return None
        window = windows_of[made.count, made.size]
        window = window if window[1] - window[0] < made.most else (made.first, made.last)
        sums.add(gathered := made.gathered(*window, operands[made.scatter.updates]))
        return gathered

    return graph.rewrite(rule) if found else graph


@dataclass(frozen=True)
class _Scattered:
    """A sum at known positions.

    :param indices: made of iota and constants.  :param count: of them.  :param size: of the result along the axis.
    :param step: from one element's window to the next one's.
    :param first, last: place of a window's ends, beside ``step`` times the element.  :param most: its length, at most.
    """

    scatter: Scatters
    indices: Node
    count: int
    size: int
    step: int
    first: int
    last: int
    most: int

    def gathered(self, first: int, last: int, updates: Node) -> Node:
        """The sum over windows of the updates."""
        axis, length = self.scatter.axis, last - first + 1
        along = {"size": (length,), "count": (self.size,), "step": (self.step,), "padding": (-first,)}
        values = windows.plain(updates, axis=(axis,), value=0, dilation=(1,), **along)
        shape: list[Size] = [1] * values.rank  # for each axis nodes of its own, which its kernel computes
        shape[axis], shape[-1] = self.size, length
        own, turn = (call("iota", shape=tuple(shape), axis=a, dtype=I32) for a in (axis, values.rank - 1))
        places = _at(self.indices, own * self.step + turn + first)
        if self.scatter.oob == "clamp":
            places = call("maximum", call("minimum", places, full(self.size - 1, places)), full(0, places))
        hit = spread(call("eq", converted(places, I32), own), values.shape)
        return call("sum", call("where", hit, values, full(0, values)), axis=(values.rank - 1,))


def _scattered(node: Node, known: Known) -> _Scattered | None:
    """What a node adds up, if that can be gathered."""
    scatter = access(node, Scatters)
    if scatter is None or scatter.padding_idx is not None or node.dtype not in (F32, F64):
        return None
    indices, size = node.operands[scatter.indices], node.shape[scatter.axis]
    if indices.rank != 1 or not isinstance(size, int) or not isinstance(indices.shape[0], int):
        return None
    positions = _positions(indices, known)
    if positions is None or not 0 < size <= len(positions):
        return None
    if scatter.oob == "clamp":
        positions = np.clip(positions, 0, size - 1)
    elif positions.min() < 0 or positions.max() >= size:
        return None
    positions, step = positions.astype(np.int64), len(positions) // size
    apart = np.arange(len(positions)) - step * positions
    first, last = min(int(apart.min()), 0), int(apart.max())
    most = min(LONGEST, WASTE * (int(np.bincount(positions).max()) + 1))
    if last == first or last - first >= most:  # a sum of one is that one, and -0.0 added to 0.0 is not
        return None
    return _Scattered(scatter, indices, len(positions), size, step, first, last, most)


# -- positions ---------------------------------------------------------------------------------------------------------


def _positions(node: Node, known: Known) -> np.ndarray | None:
    """What an array with at most one axis is, if it is made of iota and constants by what is exact."""
    if node not in known:
        operands = [_positions(o, known) for o in node.operands] if _is_known(node) else [None]
        values = [o for o in operands if o is not None]
        known[node] = np.asarray(apply(node, values, {})) if len(values) == len(operands) else None
    return known[node]


def _is_known(node: Node) -> bool:
    """Whether a node is what its operands say, by the same bits on every target."""
    if not isinstance(node.op, Primitive) or node.rank > 1:
        return False
    if any(not isinstance(n, int) or n > MOST_POSITIONS for n in node.shape):
        return False
    if not node.operands:
        return node.op.name == "iota" or splat(node) is not None
    if access(node, Broadcasts) is not None:
        return splat(node) is not None
    expr = node.op.lower
    return isinstance(expr, Expr) and EXACT.issuperset(re.findall(r"([a-z]\w*)\(", expr.text))


def _at(node: Node, place: Node) -> Node:
    """Positions -> those at other places than 0, 1, ...: of the same bits where the places are these."""
    if (value := splat(node)) is not None:
        return full(value, Type(node.dtype, place.shape))
    if not node.operands:
        return converted(place, node.dtype)
    return again(node, tuple(_at(o, place) for o in node.operands))
