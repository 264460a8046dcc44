"""check_indices: bounds checks of data-dependent indices, which dominate every read and write through them.

The check is a value of the graph and the read depends on it, so no kernel that reads through the indices runs earlier.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.dims import Size, same
from ...ir.graph import Graph, again
from ...ir.node import Node, Note, call
from ...ir.node_ranges import only_moves_elements, range_of
from ...ir.op import Composite
from ...ir.ranges import inside
from ...ir.walk import topological
from ..manager import graph_pass


def name_readers(graph: Graph) -> Graph:
    """Graph -> the same graph with a note on every index operand: the op that reads through it, which an error names
    even after passes have replaced that op.
    """
    notes = dict(graph.notes)
    for node in graph.nodes:
        for k, operand in enumerate(node.operands):
            if k in node.op.indices or (isinstance(node.op, Composite) and operand.dtype.is_integer):
                note = notes.get(operand, Note())
                notes[operand] = note if note.reader else replace(note, reader=node.op.name)
    return replace(graph, notes=notes)


@graph_pass("BITS")
def check_indices(graph: Graph) -> Graph:
    """gather(x, i) {oob="error"}  ->  gather(x, check_index(i) {bound})

    Ops that only move or widen indices are applied after the check, so that each index is checked once, in memory;
    computed indices get a buffer of their own.
    """
    checks: dict[tuple[Node, Size, bool], Node] = {}

    def checked(index: Node, bound: Size, ascending: bool, op: str) -> Node:
        if not ascending and certain(index, bound):
            return index
        if not ascending and only_moves_elements(index) and not same(index.type.count, 0):  # of none, all are inside
            return again(index, (checked(index.operands[0], bound, ascending, op),))
        key = index, bound, ascending
        if key not in checks:
            checks[key] = call("check_index", index, bound=bound, op=op, ascending=ascending)
        return checks[key]

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if node.op.name == "check_index" and not node.attrs["ascending"]:  # one that is there already
            return checked(operands[0], node.attrs["bound"], False, node.attrs["op"])
        if node.attrs.get("oob") != "error" or not node.op.indices:
            return None
        bounds = {k: bound(node) for k, bound in node.op.indices.items()}
        new = tuple(
            checked(o, bounds[k], k in node.op.ascending, reader(node, k)) if k in bounds else o
            for k, o in enumerate(operands)
        )
        return again(node, new)

    def reader(node: Node, operand: int) -> str:
        noted = (note.reader for n in reversed(topological([node.operands[operand]])) if (note := graph.notes.get(n)))
        return next(filter(None, noted), node.op.name)

    return graph.rewrite(rule)


def certain(index: Node, bound: Size) -> bool:
    """Whether the ranges of values prove every element of an integer value to lie in [0, bound)."""
    return range_of(index).within(inside(bound))


__all__ = ["certain", "check_indices", "name_readers"]
