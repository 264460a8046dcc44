"""What a graph's value is where some of those that it is computed from are known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...interp import apply
from ...ir.node import Node
from ...ir.op import Composite, Expr, Lookup
from ...ir.pattern import splat
from ...ir.properties import filling
from ...ir.walk import postorder
from .replace_axis import moves

__all__ = ["value_where"]


def value_where(
    root: Node, given: Mapping[Node, float]
) -> np.generic | np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None:
    """The value of ``root``, the same at every element, where each of these nodes has its number at every element; None
    if that is not so or not known.
    """
    meant: dict[Node, Node] = {}
    values: dict[Node, np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None] = {
        n: np.asarray(number).astype(n.dtype.np) for n, number in given.items()
    }

    def sources(node: Node) -> tuple[Node, ...]:
        if splat(node) is not None:
            return ()
        if not isinstance(node.op, Composite):
            return node.operands
        if node not in meant:
            meant[node] = node.op.decompose(*node.operands, **node.attrs)
        return (meant[node],)

    for node in postorder([root], values, sources):
        constant = splat(node)
        if constant is not None:
            values[node] = np.asarray(constant).astype(node.dtype.np)
        elif node in meant:
            values[node] = values[meant[node]]
        else:
            values[node] = _scalar(node, [values[o] for o in node.operands])
    return values[root]


def _scalar(
    node: Node, operands: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None]
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None:
    known = [o for o in operands if o is not None]
    if not operands or len(known) < len(operands):
        return None
    if isinstance(node.op.lower, Expr):
        return apply(node, known, {})
    if moves(node) and len(known) == 1 and filling(node, known[0]) == known[0]:  # a pad may hold another value
        if not isinstance(node.op.lower, Lookup):
            return known[0]
        return np.zeros(()).astype(node.dtype.np) if known[0] == 0 else None  # unpacked: other bits are other values
    return None
