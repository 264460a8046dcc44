"""decompose: composites are expanded into the primitives and library calls that they are defined by."""

from __future__ import annotations

from collections.abc import Collection

from ...ir.graph import Graph, open_composites
from ...ir.node import Node
from ...ir.op import Library
from ..manager import graph_pass


@graph_pass("BITS")
def decompose(graph: Graph, *, functions: Collection[str] = ()) -> Graph:
    """softmax(x)  ->  exp(x - max) / sum(exp(x - max))

    :param functions: the library ops that the target has a function for although they are made of others: they stay
        calls where that pays.
    """

    def keeps(node: Node) -> bool:
        return isinstance(node.op, Library) and node.op.name in functions and node.op.pays(node)

    return open_composites(graph, keeps=keeps)
