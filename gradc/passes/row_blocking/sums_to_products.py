"""Sums over the rows of what is blocked by rows, as products."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...ir.graph import Graph
from ...ir.node import Node, call
from ...ir.pattern import Var, match, op
from ...ops.rules import full, reshaped
from .precompute_gradients import WIDE_RANGE

SUM = op("sum", Var("x"))


def sums_to_products(joint: Graph, products: Collection[Node]) -> Graph:
    """sum(x, axis=0)  ->  ones[1, N] @ x, where x is made of a product that is computed block by block, and has its
    rows: a product can add up over the rows of each block.  Licence REAL: the order of the sum.
    """
    shapes = {n.shape for n in products if n.rank == 2}
    made = set(products)
    for node in joint.nodes:
        if any(o in made for o in node.operands):
            made.add(node)

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        if not match(SUM, node, {}) or node.attrs["axis"] != (0,) or node.dtype not in WIDE_RANGE:
            return None
        (value,) = node.operands
        if value not in made or value.shape not in shapes or value.dtype is not node.dtype:
            return None
        ones = full(1, replace(value.type, shape=(1, value.shape[0])))
        return reshaped(call("matmul", ones, operands[0]), node.shape)

    return joint.rewrite(rule) if shapes else joint
