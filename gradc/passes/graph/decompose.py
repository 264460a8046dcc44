"""decompose: composites are expanded into the primitives that they are defined by."""

from __future__ import annotations

from ...ir.graph import Graph, open_composites
from ..manager import graph_pass


@graph_pass("BITS")
def decompose(graph: Graph) -> Graph:
    """softmax(x)  ->  exp(x - max) / sum(exp(x - max))"""
    return open_composites(graph)
