"""minimal_filtering: convolutions by Winograd's algorithm, where fewer multiplications take less time."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.graph import Graph, again
from ...ir.node import Node
from ..manager import graph_pass


@graph_pass("REAL")
def minimal_filtering(graph: Graph, *, dims: Mapping[str, int] | None = None, numerics: str = "real") -> Graph:
    """convolution(x, w: 3 by 3)  ->  tiles of x and w transformed, 16 matrix products, transformed back

    So is any op with a form of its own for a CPU, which says where it takes less time.

    :param dims: sizes for which it is to take less time.
    """

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        minimal = node.op.minimal
        return minimal(dims or {}, *again(node, operands).operands, **node.attrs) if minimal is not None else None

    return graph if numerics == "strict" else graph.rewrite(rule)
