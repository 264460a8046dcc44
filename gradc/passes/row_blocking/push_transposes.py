"""push_transposes: columns of wide rows that are reduced are rows of a product of their own.

A contrastive loss takes the entropy of ``scale * a @ b.T`` along both axes.  A loop over blocks of its rows has no
whole column; but the columns are rows of ``b @ a.T``.  So what reduces columns reads another product; and what is
computed elementwise of them and these statistics, the gradient, is computed of the rows.  Scores are in memory in
blocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...ir.dims import same
from ...ir.graph import Graph
from ...ir.node import Node, call
from ...ir.op import Expr, Library, Primitive, Reduction
from ...ir.properties import Broadcasts, Transposes, access
from ...ir.walk import reachable
from ...ops.rules import reshaped, spread
from ...targets.devices import Device
from ..manager import graph_pass
from .wide_products import RECOMPUTED, Sizes, is_recomputed, is_wide


@graph_pass("REAL")
def push_transposes(graph: Graph, *, dims: Sizes = None, device: Device, numerics: str = "real") -> Graph:
    """max(transpose(f(matmul(a, b))))  ->  max(f(matmul(transpose(b), transpose(a)))), and
    transpose(g(transpose(f(matmul(a, b)))))  ->  g(f(matmul(a, b))), where rows and columns of the product are so wide
    that it is computed in blocks, rather than saved

    Licence REAL: each product may be added up in an order of its own.

    :param dims: sizes at which elements are counted; 1024 stands for the others.  :param device: that runs the loops.
    """
    if numerics == "strict" or not any(map(_swaps, graph.nodes)):
        return graph
    return graph.rewrite(_Transposer(graph, dims, device).rule)


def _swaps(node: Node) -> bool:
    """Whether an op exchanges the last two axes, and no others."""
    moved = access(node, Transposes)
    axes = [*range(node.rank)]
    return moved is not None and node.rank > 1 and [*moved.axes] == [*axes[:-2], axes[-1], axes[-2]]


def _swapped(node: Node) -> Node:
    """A value with its last two axes exchanged."""
    axes = range(node.rank)
    return node.operands[0] if _swaps(node) else call("transpose", node, (*axes[:-2], axes[-1], axes[-2]))


def _is_elementwise(node: Node) -> bool:
    """Whether an op computes each element from those at its place."""
    own = isinstance(node.op, Primitive) and isinstance(node.op.lower, Expr)
    return own and bool(node.operands) and all(o.shape == node.shape for o in node.operands)


class _Source(NamedTuple):
    """A product, or its transpose."""

    product: Node
    transposed: bool = False


class _Transposer:
    """Rewrites a graph.

    :ivar made: nodes of the graph, and what they are rewritten to.
    """

    def __init__(self, graph: Graph, dims: Sizes, device: Device):
        self.graph, self.dims, self.device = graph, dims, device
        self.made: dict[Node, Node] = {}
        self._sources: dict[Node, frozenset[_Source]] = {}
        self._transposed: dict[Node, Node] = {}

    def rule(self, node: Node, operands: tuple[Node, ...]) -> Node | None:
        self.made |= zip(node.operands, operands, strict=True)
        if not _swaps(node):
            return None
        sources = self.sources(node.operands[0])
        columns = bool(sources) and not any(s.transposed for s in sources) and self.is_reduced(node)
        # what rows of the product are computed for anyway
        back = bool(sources) and all(s.transposed and self.is_reduced(s.product) for s in sources)
        return self.transposed(node.operands[0]) if columns or back else None

    def sources(self, node: Node) -> frozenset[_Source]:
        """What a value is computed of elementwise: wide products, transposes of such values."""
        found = self._sources.get(node)
        if found is None:
            if self.is_wide_both_ways(node):
                found = frozenset({_Source(node)})
            elif _swaps(node):
                found = frozenset(_Source(s.product, not s.transposed) for s in self.sources(node.operands[0]))
            else:
                found = frozenset().union(*map(self.sources, node.operands)) if _is_elementwise(node) else frozenset()
            self._sources[node] = found
        return found

    def is_wide_both_ways(self, node: Node) -> bool:
        """Whether a node is a product with rows and columns that wide."""
        if (
            not isinstance(node.op, Library)
            or not node.op.contraction
            or not is_recomputed(node, self.dims, self.device)
        ):
            return False
        a, b = node.operands
        return a.rank == b.rank == node.rank and is_wide(node.shape[-2], a.shape[-1], RECOMPUTED, self.dims)

    def is_reduced(self, node: Node) -> bool:
        """Whether the last axis of a value, or of what is computed of it elementwise, is reduced."""
        users: Mapping[Node, tuple[Node, ...]] = {n: tuple(self.graph.users[n]) for n in self.graph.nodes}
        values = {*reachable([node], lambda at: (u for u in users[at] if _is_elementwise(u)))}
        readers = (u for at in values for u in users[at] if isinstance(getattr(u.op, "lower", None), Reduction))
        return any(u.operands[0] in values and tuple(u.attrs["axis"]) == (node.rank - 1,) for u in readers)

    def transposed(self, node: Node) -> Node:
        """The transpose of a value."""
        if node not in self._transposed:
            self._transposed[node] = self._of(node)
        return self._transposed[node]

    def _of(self, node: Node) -> Node:
        own, shape = self.made.get(node, node), (*node.shape[:-2], node.shape[-1], node.shape[-2])
        if self.is_wide_both_ways(node):
            a, b = own.operands
            product: Node = own.op.apply((_swapped(b), _swapped(a)), own.attrs)
            return product
        if _swaps(node):
            return self.made.get(node.operands[0], node.operands[0])
        if _is_elementwise(node):
            value: Node = node.op.apply(tuple(map(self.transposed, node.operands)), node.attrs)
            return value
        if access(node, Broadcasts):
            x = self.made.get(node.operands[0], node.operands[0])
            if x.rank == 0 or (x.rank == 1 and same(x.shape[0], 1)):
                return spread(x, shape)
            if x.rank == 1 or (x.rank == node.rank and any(same(n, 1) for n in x.shape[-2:])):
                rows, columns = x.shape[-2:] if x.rank > 1 else (1, x.shape[0])
                return spread(reshaped(x, (*x.shape[:-2], columns, rows)), shape)
        if node.op.name == "iota":
            axis = node.attrs["axis"]
            other = {node.rank - 1: node.rank - 2, node.rank - 2: node.rank - 1}.get(axis, axis)
            return call("iota", shape=shape, axis=other, dtype=node.dtype)
        return _swapped(own)
