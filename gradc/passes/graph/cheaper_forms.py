"""cheaper_forms: ops in the form that takes a CPU less time, over the reals the same: Winograd's convolutions."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.graph import Graph, again
from ...ir.node import Node
from ..manager import graph_pass


@graph_pass("REAL")
def cheaper_forms(graph: Graph, *, dims: Mapping[str, int] | None = None, numerics: str = "real") -> Graph:
    """convolution(x, w: 3 by 3)  ->  tiles of x and w transformed, 16 matrix products, transformed back

    The ops that have such a form say where it takes less time.

    :param dims: sizes for which it is to take less time.
    """

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        cheaper = node.op.cheaper
        return cheaper(dims or {}, *again(node, operands).operands, **node.attrs) if cheaper is not None else None

    return graph if numerics == "strict" else graph.rewrite(rule)
