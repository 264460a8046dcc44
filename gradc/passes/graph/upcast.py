"""upcast: 8- and 16-bit floats are storage types; ops on them compute in f32, between explicit casts."""

from __future__ import annotations

from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Library, Primitive
from ...ops.rules import converted
from ..manager import graph_pass


@graph_pass("BITS")
def upcast(graph: Graph) -> Graph:
    """add(a: bf16, b: bf16)  ->  cast(add(cast(a, f32), cast(b, f32)), bf16)"""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        op = node.op
        if not isinstance(op, Primitive | Library) or op.in_place_of_dtype or not node.operands:
            return None
        if not any(o.dtype.is_float and o.dtype.compute is not o.dtype for o in operands):
            return None
        wide = op.apply([converted(o, o.dtype.compute) if o.dtype.is_float else o for o in operands], node.attrs)
        return converted(wide, node.dtype)

    return graph.rewrite(rule)
