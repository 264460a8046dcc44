"""decompose: composites become the ops they mean."""

from __future__ import annotations

from ..ir.graph import Graph, again
from ..ir.node import Node, topological
from ..ir.op import Composite
from .manager import graph_pass


@graph_pass("BITS")
def decompose(graph: Graph) -> Graph:
    """softmax(x)  ->  exp(x - max) / sum(exp(x - max))"""
    new: dict[Node, Node] = {}

    def opened(root: Node) -> Node:
        pending = [root]
        while pending:
            node = pending[-1]
            if node in new:
                pending.pop()
                continue
            lacking = [o for o in node.operands if o not in new]
            if lacking:
                pending.extend(lacking)
                continue
            operands = tuple(new[o] for o in node.operands)
            result = node if operands == node.operands else again(node, operands)
            if isinstance(node.op, Composite):
                inner = node.op.decompose(*operands, **node.attrs)
                if inner not in new:
                    pending.append(inner)
                    for value in topological([inner]):  # operands are opened already
                        if value in operands:
                            new.setdefault(value, value)
                    continue
                result = new[inner]
            new[node] = result
        return new[root]

    for node in graph.nodes:
        opened(node)
    return graph.renamed(new)
