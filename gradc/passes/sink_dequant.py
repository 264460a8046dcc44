"""Being written: prepare and sink_dequant as identities."""

from __future__ import annotations

from ..ir.graph import Graph
from .manager import graph_pass


@graph_pass("BITS")
def prepare(graph: Graph, *, numerics: str = "real") -> Graph:
    """graph  ->  graph"""
    return graph


@graph_pass("REAL")
def sink_dequant(graph: Graph, *, numerics: str = "real") -> Graph:
    """graph  ->  graph"""
    return graph
