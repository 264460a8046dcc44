"""propagate_reshapes: a reshape that collapses axes sinks below the pointwise ops and reductions that read it, which
then run on the separate axes.

A loop over ``[V, 4, 32]`` reads ``[V, 128]`` at ``32*g + i``; a loop over ``[V, 128]`` would need ``d // 32`` to read
``[V, 4, 32]``, so the value would go through memory.  Blocks of a quantized tensor (a scale per group of 32) are such
axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...ir.dims import Size
from ...ir.graph import Graph
from ...ir.node import Node, call
from ...ir.op import Expr, Primitive, Reduction
from ...ir.properties import Gathers, Reshapes, access
from ...ops.indexing.gathers import gather
from ...ops.shapes.axes import axis_groups
from ..manager import graph_pass
from .replace_axis import computes, plan

DEEPEST = 100


@graph_pass("REAL")
def propagate_reshapes(graph: Graph, *, numerics: str = "real") -> Graph:
    """f(reshape[N,A*B](x))  ->  reshape[N,A*B](f(x)); sum over A*B  ->  sum over A, B; where x is computed, so that the
    reshape would need memory
    """
    if numerics == "strict":
        return graph
    collapsed = _CollapsedAxes()
    return graph.rewrite(collapsed.rule)


class _CollapsedAxes:
    """Reshapes that collapse axes of a computed value: value -> (a reshape of its source which keeps them apart, the
    collapsed axis, the sizes that were collapsed).
    """

    def __init__(self) -> None:
        self.known: dict[Node, tuple[Node, int, tuple[Size, ...]] | None] = {}

    def of(self, node: Node) -> tuple[Node, int, tuple[Size, ...]] | None:
        """(uncollapsed value, axis, sizes) of a value, memoized; None if none of its axes is known to be collapsed."""
        if node not in self.known:
            self.known[node] = self._of_reshape(node)
        return self.known[node]

    def _of_reshape(self, node: Node) -> tuple[Node, int, tuple[Size, ...]] | None:
        """The same of a reshape of a pointwise result; None for every other value, which has a buffer to reshape for
        nothing.
        """
        if access(node, Reshapes) is None:
            return None
        (x,) = node.operands
        if not isinstance(x.op, Primitive) or not isinstance(x.op.lower, Expr) or not x.operands:
            return None  # x has a buffer, of which a reshape is a view
        groups = [(old, new) for old, new in axis_groups(x.shape, node.shape) if sum(x.shape[a] != 1 for a in old) > 1]
        if not groups or any(sum(node.shape[a] != 1 for a in new) != 1 for _, new in groups):
            return None
        old, new = groups[-1]
        axis = next(a for a in new if node.shape[a] != 1)
        sizes = tuple(x.shape[a] for a in old if x.shape[a] != 1)
        return call("reshape", x, (*node.shape[:axis], *sizes, *node.shape[axis + 1 :])), axis, sizes

    def rule(self, node: Node, operands: tuple[Node, ...]) -> Node | None:
        """The rewrite of one op: recomputed on uncollapsed operands if it has any; None leaves it."""
        if not isinstance(node.op, Primitive) or not any(self.of(o) for o in operands):
            return None
        return self.build(node.op, operands, node.attrs)

    def build(self, primitive: Primitive, operands: tuple[Node, ...], attrs: Mapping[str, Any]) -> Node:
        """(op, operands, attributes) -> the result, computed on uncollapsed operands and collapsed afterwards where the
        op allows it.
        """
        whole: Node = primitive.apply(operands, attrs)
        for k, operand in enumerate(operands):
            collapsed = self.of(operand)
            if collapsed is None:
                continue
            inner, axis, sizes = collapsed
            if isinstance(primitive.lower, Reduction) and axis in (
                gone := attrs["axis"] if isinstance(attrs["axis"], tuple) else ()
            ):
                axes = tuple(a if a < axis else a + len(sizes) - 1 for a in gone if a != axis) + tuple(
                    range(axis, axis + len(sizes))
                )
                return self.build(primitive, (inner,), {**attrs, "axis": tuple(sorted(axes))})
            how = access(whole, Gathers)
            if how is not None and k == how.table and how.axis != axis:
                indices = operands[how.indices]
                to = axis if axis < how.axis else axis + indices.rank - 1
                at = how.axis if how.axis < axis else how.axis + len(sizes) - 1
                rows = self.build(gather, (inner, indices), replace(how, axis=at).attrs)
                return self.collapsed(rows, to, sizes, whole.shape)
            if not computes(whole) and not isinstance(primitive.lower, Reduction):
                continue
            for result in range(whole.rank):
                replacement = plan(whole, result, sizes)
                if replacement is None or replacement[0][k] != axis:
                    continue
                split = tuple(self.expanded(o, at, sizes) for o, at in zip(operands, replacement[0], strict=True))
                return self.collapsed(self.build(primitive, split, replacement[1]), result, sizes, whole.shape)
        return whole

    def collapsed(self, inner: Node, axis: int, sizes: tuple[Size, ...], shape: tuple[Size, ...]) -> Node:
        """``inner`` with its axes from ``axis`` on collapsed by a reshape to ``shape``, recorded in ``known``."""
        node: Node = call("reshape", inner, shape)
        self.known[node] = (inner, axis, sizes)
        return node

    def expanded(self, node: Node, at: int | tuple[Size, ...], sizes: tuple[Size, ...], depth: int = 0) -> Node:
        """An operand with its axis ``at`` expanded into ``sizes``: the value before the collapse, else the same
        pointwise op on expanded operands, else a reshape.
        """
        if not isinstance(at, int):
            return call("reshape", node, at)
        collapsed = self.of(node)
        if collapsed is not None and collapsed[1:] == (at, sizes):
            return collapsed[0]
        if isinstance(node.op, Primitive) and isinstance(node.op.lower, Expr) and node.operands and depth < DEEPEST:
            inner: Node = node.op.apply(
                tuple(self.expanded(o, at, sizes, depth + 1) for o in node.operands), node.attrs
            )
            self.known[node] = (inner, at, sizes)
            return inner
        return call("reshape", node, (*node.shape[:at], *sizes, *node.shape[at + 1 :]))
