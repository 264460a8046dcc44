"""decompose: composites become the ops they mean."""

from __future__ import annotations

from dataclasses import replace

from ...ir.graph import Graph, again, parts_of
from ...ir.node import Node, Note
from ...ir.op import Composite
from ..manager import graph_pass


@graph_pass("BITS")
def decompose(graph: Graph) -> Graph:
    """softmax(x)  ->  exp(x - max) / sum(exp(x - max))"""
    new: dict[Node, Node] = {}
    notes = dict(graph.notes)
    pending = list(graph.nodes)[::-1]
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
        if not isinstance(node.op, Composite):
            new[node] = node if operands == node.operands else again(node, operands)
            continue
        note = notes.get(node, Note())
        notes[node] = note = replace(note, composite=note.composite or node.op.name)
        with parts_of(note.composite, notes):
            inner = node.op.decompose(*operands, **node.attrs)
        if inner in new:
            new[node] = new[inner]
        else:  # what it means may hold composites too; its operands are opened already
            new |= {o: o for o in operands if o not in new}
            pending.append(inner)
    return replace(graph, notes=notes).renamed(new)
