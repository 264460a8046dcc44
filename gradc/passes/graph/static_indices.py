"""static_indices: before differentiation, what shapes alone say of indices.

Frontends count negative indices from the end, and write positions as values: of ``doc[row] == doc[column]``, given the
positions of all rows, nothing depends on data but ``doc``.  A slice needs no check, and its gradient no scatter.
"""

from __future__ import annotations

from ...ir.dims import known_nonnegative, same
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.node_ranges import range_of
from ...ir.pattern import splat
from ...ir.properties import Gathers, access
from ...ir.ranges import Range, fits, inside
from ...ops.rules import full
from ..manager import graph_pass


@graph_pass("BITS")
def static_indices(graph: Graph) -> Graph:
    """where(iota < 0, iota + n, iota)  ->  iota; gather(x, iota)  ->  slice(x)"""

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        current = again(node, operands)
        how = access(current, Gathers)
        if how is not None:
            cut = _in_order(current.operands[how.table], current.operands[how.indices], how)
            return current if cut is None else cut
        if node.op.name == "where" and node.dtype.is_integer and (chosen := splat(operands[0])) is not None:
            return operands[1 if chosen else 2]
        decided = _decided(current)
        return current if decided is None else full(decided, current)

    return graph.rewrite(rule)


def _decided(node: Node) -> bool | None:
    """What a comparison of integers is for all of their values, if ranges say it."""
    if node.op.name not in ("lt", "le", "gt", "ge") or not node.operands[0].dtype.is_integer:
        return None
    a, b = map(range_of, node.operands)
    over = b + -a if node.op.name in ("lt", "le") else a + -b
    least = 1 if node.op.name in ("lt", "gt") else 0
    if over.within(Range(lows=(least,))):
        return True
    return False if over.within(Range(highs=(least - 1,))) else None


def _in_order(table: Node, indices: Node, how: Gathers) -> Node | None:
    """A gather of a table's first slices in their order, as a slice of it; None of other ones."""
    if indices.op.name != "iota" or indices.rank != 1 or not indices.dtype.is_integer or how.padding_idx is not None:
        return None
    if not fits(inside(indices.shape[0]), indices.dtype):  # iota(300) in u8 begins again after 255
        return None
    count, size = indices.shape[0], table.shape[how.axis]
    if same(count, size):
        return table
    if not known_nonnegative(size - count):
        return None
    limit = tuple(count if axis == how.axis else n for axis, n in enumerate(table.shape))
    return call("slice", table, start=(0,) * table.rank, limit=limit, step=(1,) * table.rank)
