"""sink_dequant: scales move to where they cost least, and sums move into scatters.

(b) a sum over columns of something times a scatter happens before the scatter, so that no gradient of the table's size is made;
(c) a scale per row of a scatter's result is read inside the scatter's load, or taken out of it, whichever moves fewer bytes;
(d) a scale passes every op that is linear in its operand, along axes on which it is constant (:mod:`gradc.passes.scales`).

Rule (a) works before differentiation: :mod:`gradc.passes.prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.dims import evaluate, product, symbols
from ..ir.graph import Graph, again
from ..ir.node import Node, call
from ..ir.op import Expr, Primitive, Reduction
from ..ir.pattern import match, splat
from .cost import nominal
from .manager import graph_pass
from .prepare import GATHER, prepare
from .resize import Variation, moves, nbytes, resize
from .scales import MUL, SCATTER, Uses, carry, homogeneous, sink

ROUNDS, DEEPEST = 4, 16


@graph_pass("REAL")
def sink_dequant(graph: Graph, *, numerics: str = "real") -> Graph:
    """sum_cols(a * scatter_add(i, u))  ->  scatter_add(i, sum_cols(gather(a, i) * u)); a scale moves to where it costs least"""
    if numerics == "strict":
        return graph
    for _ in range(ROUNDS):
        before = graph
        for step in (_reduce_before_scatter, carry, sink, _scale_after_scatter):
            graph = step(graph)
        if graph == before:
            break
    return graph


# -- (b) ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    """A scatter below a reduction, through ops that are linear in it and keep its scattered axis.

    :param axis: the scattered axis as an axis of the reduction's result.
    """

    root: Node
    scatter: Node
    path: frozenset[Node]
    axis: int


def _reduce_before_scatter(graph: Graph) -> Graph:
    """sum_cols(a * scatter_add(i, u))  ->  scatter_add(i, sum_cols(gather(a, i) * u))"""
    uses = Uses(graph)
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        operands = tuple(new[o] for o in node.operands)
        chain = _scatter_below(node, uses)
        result = None if chain is None else _scattered_last(chain, uses, new)
        new[node] = result if result is not None else node if operands == node.operands else again(node, operands)
    return graph.renamed(new)


def _scatter_below(root: Node, uses: Uses) -> _Chain | None:
    if not isinstance(getattr(root.op, "lower", None), Reduction) or root.op.linear is None or root.op.resized is None:
        return None
    pending: list[tuple[Node, ...]] = [(root,)]
    while pending:
        path = pending.pop()
        node = path[-1]
        if node is not root and not uses.single(node):
            continue
        if match(SCATTER, node, {}):
            axis: int | None = int(node.attrs["axis"])
            for below, above in zip(reversed(path), reversed(path[:-1]), strict=False):
                known = homogeneous(above, above.operands.index(below))
                axis = None if known is None or axis is None else known[axis]
            return None if axis is None else _Chain(root, node, frozenset(path), axis)
        if len(path) < DEEPEST:
            pending += [(*path, o) for k, o in reversed(tuple(enumerate(node.operands))) if o.dtype.is_float and homogeneous(node, k) is not None]
    return None


def _scattered_last(chain: _Chain, uses: Uses, new: dict[Node, Node]) -> Node | None:
    indices, updates = chain.scatter.operands
    attrs = chain.scatter.attrs
    read: dict[Node, Node] = {}

    def leaf(node: Node, axis: int) -> Node:
        if node is chain.scatter:
            return new[updates]
        read[node] = call("gather", new[node], new[indices], axis=axis, oob=attrs["oob"])
        return read[node]

    def opens(node: Node) -> bool:
        if node in chain.path or moves(node):
            return node is not chain.scatter
        if not isinstance(node.op, Primitive) or not isinstance(node.op.lower, Expr):
            return False
        return splat(node) is not None or uses.single(node) or sum(nbytes(o) for o in node.operands if splat(o) is None) < nbytes(node)

    reduced = resize(chain.root, chain.axis, indices.shape, leaf, opens, lambda node: new[node])
    known = not any(symbols(size) for size in (*indices.shape, attrs["size"]))
    if known and sum(nbytes(n) for n in read.values()) > 2 * nbytes(chain.scatter) + sum(nbytes(n) for n in read):
        return None  # so many rows are added that reading the table's rows for each costs more than the dense sum
    return call("scatter_add", new[indices], reduced, **{**attrs, "axis": chain.axis})


# -- (c), outwards; inwards is part of sink ----------------------------------------------------------------------------


def _scale_after_scatter(graph: Graph) -> Graph:
    """scatter_add(i, gather(s, i) * u)  ->  s[:,None] * scatter_add(i, u), where fewer bytes are moved so"""
    variation = Variation()

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if not match(SCATTER, node, {}):
            return None
        indices, updates = operands
        found: dict[str, Node] = {}
        if not match(MUL, updates, found) or 2 * nbytes(node) >= evaluate(product(indices.shape), nominal(indices.shape)) * node.dtype.itemsize:
            return None
        axis = node.attrs["axis"]
        for scale, rest in ((found["y"], found["x"]), (found["x"], found["y"])):
            if not variation.of(scale) <= set(range(axis, axis + indices.rank)):
                continue
            source = scale
            while moves(source):
                (source,) = source.operands
            if match(GATHER, source, {}) and source.operands[1] is indices and source.operands[0].rank == 1 and source.attrs["oob"] == node.attrs["oob"]:
                whole = call("scatter_add", indices, rest, **node.attrs)
                column = source.operands[0].reshape(*(node.shape[a] if a == axis else 1 for a in range(node.rank)))
                return whole * column
        return None

    return graph.rewrite(rule)


__all__ = ["prepare", "sink_dequant"]
