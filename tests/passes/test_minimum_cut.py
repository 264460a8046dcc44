"""Minimum cuts against networkx: the same sides, not only the same cost."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradc.errors import InternalError
from gradc.passes.schedule.minimum_cut import Network

VERTICES = ("S", "T", *range(8))
edges = st.dictionaries(
    st.tuples(st.sampled_from(VERTICES), st.sampled_from(VERTICES)).filter(lambda edge: edge[0] != edge[1]),
    st.none() | st.integers(0, 6),
    max_size=40,
)


@given(edges)
def test_the_side_of_the_source(capacities: dict[tuple[object, object], int | None]) -> None:
    network, graph = Network[object](), nx.DiGraph()
    graph.add_nodes_from(("S", "T"))
    for (tail, head), capacity in capacities.items():
        network.add_edge(tail, head, capacity)
        graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
    try:
        _, (side, _) = nx.minimum_cut(graph, "S", "T")
    except nx.NetworkXUnbounded:
        with pytest.raises(InternalError, match="no finite cut"):
            network.source_side("S", "T")
    else:
        assert network.source_side("S", "T") == side


def test_deep_networks() -> None:
    """A chain of 20,000 vertices is neither recursion nor quadratic work."""
    network = Network[int]()
    for k in range(20_000):
        network.add_edge(k, k + 1, 5 if k != 7_000 else 3)
    assert network.source_side(0, 20_000) == set(range(7_001))
