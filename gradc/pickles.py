"""Pickling of graphs, nodes and ops (also for torch.save, multiprocessing): a graph as its text with arrays and notes,
an op as its name.

Unpickling parses and verifies the text; because nodes are hash-consed, it gives the identical nodes.  Modules are
pickled by :mod:`gradc.api`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import ops
from .errors import InvalidProblem
from .ir.graph import Graph
from .ir.node import Node, Note
from .ir.op import Composite, Library, Op, Primitive
from .ir.text import parse
from .ir.walk import topological
from .process.ieee import plain


def op_named(name: str) -> Op:
    """The op of that name; InvalidProblem if it is not registered in this process."""
    op: Op | None = ops.REGISTRY.get(name)
    if op is None:
        raise InvalidProblem(
            f"a pickle names the op {name!r}, which this process does not have: import the module that defines it first"
        )
    return op


@plain()
def graph_from(text: str, defaults: Mapping[str, np.ndarray[Any, Any]], notes: Sequence[tuple[int, Note]]) -> Graph:
    """A graph from its text, the arrays bound to inputs, and (position of the node, note) pairs."""
    graph = parse(text)
    for array in defaults.values():
        array.flags.writeable = False
    return Graph(
        graph.name,
        graph.inputs,
        graph.outputs,
        graph.assumptions,
        {graph.nodes[at]: note for at, note in notes},
        dict(defaults),
    )


@plain()
def node_from(text: str) -> Node:
    """A node from the text of the graph that computes it."""
    return parse(text).output("y")


def _graph(graph: Graph) -> tuple[Any, ...]:
    notes = [(at, graph.notes[node]) for at, node in enumerate(graph.nodes) if node in graph.notes]
    return graph_from, (str(graph), dict(graph.defaults), notes)


def _node(node: Node) -> tuple[Any, ...]:
    inputs = tuple(n for n in topological([node]) if n.op.name == "input")
    return node_from, (str(Graph("node", inputs, (("y", node),))),)


def register() -> None:
    """Registers the reducers with ``copyreg``."""
    copyreg.pickle(Graph, _graph)
    copyreg.pickle(Node, _node)
    for kind in (Primitive, Composite, Library):
        copyreg.pickle(kind, lambda op: (op_named, (op.name,)))
