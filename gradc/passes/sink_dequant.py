"""stub"""
from __future__ import annotations
from ..ir.graph import Graph
from .manager import graph_pass
from .prepare import prepare
@graph_pass("REAL")
def sink_dequant(graph: Graph, *, numerics: str = "real") -> Graph:
    """sum_cols(a * scatter_add(i, u))  ->  scatter_add(i, sum_cols(gather(a, i) * u))"""
    return graph
