"""push_slices: before differentiation, a slice of a product becomes a product of slices.

A language model predicts each next token, ``logits[:, :-1]``, or only the last one, ``logits[:, -1]``.  The other rows
are not multiplied, and no ``[B, S, V]`` is there to be cut, or, of gradients, to be padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.dims import Size, product, same
from ...ir.graph import Graph
from ...ir.node import Node, call
from ...ir.op import Composite, Expr, Library, Primitive
from ...ir.properties import Broadcasts, Reshapes, Slices, access
from ...ops.rules import reshaped, spread
from ..manager import graph_pass


@graph_pass("REAL")
def push_slices(graph: Graph, *, numerics: str = "real") -> Graph:
    """slice(matmul(x, w))  ->  matmul(slice(x), w), where nothing else reads the product"""
    if numerics == "strict" or not any(access(node, Slices) for node in graph.nodes):
        return graph
    outputs = {node for _, node in graph.outputs}
    uses = {node: len(graph.users[node]) + (node in outputs) for node in graph.nodes}

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        for old, new in zip(node.operands, operands, strict=True):
            uses.setdefault(new, uses[old])
        cut = access(node, Slices)
        return None if cut is None else _pushed(node, cut, operands[0], uses)

    return graph.rewrite(rule)


def _pushed(node: Node, cut: Slices, x: Node, uses: Mapping[Node, int]) -> Node | None:
    """A slice of a product as a product of slices, and a slice along the axes for which that cannot be; None if it can
    be for none.

    :param cut: the slice.  :param x: what is sliced.
    :param uses: how many there are of each node of the graph; what is made anew has one.
    """
    value, left = x, list[_Slice]()
    for axis, (start, limit, step) in enumerate(zip(cut.start, cut.limit, cut.step, strict=True)):
        if start == 0 and same(limit, x.shape[axis]) and step == 1:
            continue
        along = _Slice(axis, start, limit, step)
        narrow = along.of_product(value, uses)
        if narrow is None:
            left.append(along)
        else:
            value = narrow
    if value is x:
        return None
    for each in left:
        value = each.of(value)
    return value if value.shape == node.shape else None


@dataclass(frozen=True)
class _Slice:
    """``[start:limit:step]`` along an axis."""

    axis: int
    start: Size
    limit: Size
    step: int

    def of(self, node: Node, axis: int | None = None) -> Node:
        """The slice of a value, along the same axis or another one."""
        at = self.axis if axis is None else axis
        start, limit, step = list[Size]([0] * node.rank), [*node.shape], [1] * node.rank
        start[at], limit[at], step[at] = self.start, self.limit, self.step
        return call("slice", node, start=tuple(start), limit=tuple(limit), step=tuple(step))

    def of_product(self, node: Node, uses: Mapping[Node, int]) -> Node | None:
        """The slice of a value that is a product, or computed elementwise from one; None for another."""
        if uses.get(node, 1) > 1:
            return None
        if isinstance(node.op, Composite):
            return None if node.op.vjp else self.of_product(node.op.decompose(*node.operands, **node.attrs), uses)
        if isinstance(node.op, Library) and node.op.contraction:
            return self.of_contraction(node)
        if access(node, Reshapes):
            return self.of_rows(node, uses)
        if not isinstance(node.op, Primitive) or not isinstance(node.op.lower, Expr):
            return None
        found = [self.of_product(o, uses) for o in node.operands]
        if all(f is None for f in found):
            return None
        operands = [self.of_operand(o) if f is None else f for f, o in zip(found, node.operands, strict=True)]
        return node.op.apply(operands, node.attrs)

    def of_operand(self, node: Node) -> Node:
        """The slice of a value that may be a broadcast along the axis."""
        if access(node, Broadcasts):
            (x,) = node.operands
            own = self.axis - node.rank + x.rank
            if own < 0 or x.shape[own] == 1:
                return spread(x, self.of(node).shape)
        return self.of(node)

    def of_contraction(self, node: Node) -> Node:
        operands = list(node.operands)
        for place, axes in node.op.multilinear(node).items():
            for axis, result in enumerate(axes):
                if result == self.axis:
                    operands[place] = self.of(operands[place], axis)
        return node.op.apply(operands, node.attrs)  # type: ignore[no-any-return]

    def of_rows(self, node: Node, uses: Mapping[Node, int]) -> Node | None:
        """The slice of a reshape that splits the rows of a product."""
        (whole,) = node.operands
        matrix = isinstance(whole.op, Library) and whole.op.contraction and whole.rank == 2
        if not matrix or uses.get(whole, 1) > 1 or not node.rank or not same(node.shape[-1], whole.shape[-1]):
            return None
        rows, columns = whole.operands
        if self.axis == node.rank - 1:
            columns = self.of(columns, 1)
        else:
            rows = self.of(reshaped(rows, (*node.shape[:-1], rows.shape[1])))
            rows = reshaped(rows, (product(rows.shape[:-1]), rows.shape[-1]))
        return reshaped(whole.op.apply((rows, columns), whole.attrs), self.of(node).shape)
