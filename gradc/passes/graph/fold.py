"""fold: constant folding of pointwise ops."""

from __future__ import annotations

import numpy as np

from ...interp import apply
from ...ir.graph import Graph, again
from ...ir.node import Node
from ...ir.op import Expr, Primitive
from ...ir.pattern import splat
from ...ir.types import Type
from ...ops.rules import full
from ..manager import graph_pass


@graph_pass("BITS")
def fold(graph: Graph) -> Graph:
    """Constant folding: mul(full(2.0), full(3.0))  ->  full(6.0), for pointwise ops on constants of one value and any
    shape
    """

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        current = again(node, operands)
        if not isinstance(node.op, Primitive) or not isinstance(node.op.lower, Expr) or not operands:
            if node.op.name == "dim" and isinstance(node.attrs["size"], int):
                return full(node.attrs["size"], current)
            return current
        values = [splat(o) for o in operands]
        if any(v is None for v in values):
            return current
        arrays = [
            np.asarray(v, np.float64 if o.dtype.is_float else None).astype(o.dtype.np)
            for v, o in zip(values, operands, strict=True)
        ]
        result = apply(current, arrays, {})
        return full(
            np.asarray(result).item() if current.dtype.kind != "f" else float(result),
            Type(current.dtype, current.shape),
        )

    return graph.rewrite(rule)
