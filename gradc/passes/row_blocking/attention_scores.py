"""Which products of a graph are scores: rows that are reduced, and of which weights are made for another product.

In a program :mod:`gradc.passes.column_blocking` makes one loop of such a product.  In a graph, where what the backward
keeps is decided, they are told by what follows them.
"""

from __future__ import annotations

from collections.abc import Collection

from ...analysis.tiles import MOST_FEATURES
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Expr, Library, Reduction
from ...ir.types import BF16, F16
from ...ir.walk import reachable
from ..graph.replace_axis import source


def attention_scores(graph: Graph, within: Collection[Node]) -> frozenset[Node]:
    """The matrix products of 16-bit operands, with at most ``MOST_FEATURES`` summed, whose result is reduced along its
    rows, elementwise ops before, and multiplied by another matrix, elementwise ops before.

    :param within: the nodes that are looked at.
    """
    return frozenset(node for node in graph.nodes if node in within and _is_scores(graph, node, within))


def weighted_sums(graph: Graph, scores: Node, within: Collection[Node]) -> list[Node]:
    """The products that multiply what is made of scores, in which their loop sums the columns."""
    found = _made_of(graph, scores, within)
    readers = {u for at in found for u in graph.users[at] if u in within and u is not scores}
    return [u for u in graph.nodes if u in readers and _multiplies(u) and u.operands[0] in found]


def _is_scores(graph: Graph, node: Node, within: Collection[Node]) -> bool:
    if not _multiplies(node) or not all(map(_is_narrow, node.operands)):
        return False
    inner = node.operands[0].shape[-1]
    if not isinstance(inner, int) or inner > MOST_FEATURES:
        return False
    found = _made_of(graph, node, within)
    readers = {u for at in found for u in graph.users[at] if u in within}
    reduced = any(isinstance(getattr(u.op, "lower", None), Reduction) and u.operands[0] in found for u in readers)
    return reduced and bool(weighted_sums(graph, node, within))


def _made_of(graph: Graph, scores: Node, within: Collection[Node]) -> set[Node]:
    """Scores, and what is computed of them elementwise."""
    return {*reachable([scores], lambda at: (u for u in graph.users[at] if u in within and _goes_on(u, scores)))}


def _multiplies(node: Node) -> bool:
    return isinstance(node.op, Library) and node.op.contraction


def _goes_on(node: Node, scores: Node) -> bool:
    """Whether an op computes each element from those at its place."""
    return isinstance(getattr(node.op, "lower", None), Expr) and node.shape == scores.shape


def _is_narrow(operand: Node) -> bool:
    """Whether an operand is moved or converted from one in 16 bits."""
    operand = source(operand)
    while operand.dtype not in (F16, BF16) and operand.op.name == "cast":
        operand = source(operand.operands[0])
    return operand.dtype in (F16, BF16)
