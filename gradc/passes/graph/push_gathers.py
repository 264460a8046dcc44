"""push_gathers: before differentiation, a gather from a computed table becomes a computation on gathered rows.

The backward of ``embedding(tokens, dequantize(q, scale))`` then works on the rows that were read, and no float of the
table's size exists.

When it pays: the table has no other use than gathers, and either its operands' rows are narrower than its own (int8
against f32: fewer bytes are read however many rows are gathered), or it is not certain that more rows are gathered than
the table has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...ir.dims import Size, known_nonnegative, product
from ...ir.graph import Graph
from ...ir.node import Node, call
from ...ir.op import Composite
from ...ir.properties import Gathers, access
from ...ir.types import DTYPES
from ...ir.walk import depends_on_inputs
from ...ops.indexing.gathers import in_range, row_share, unpadded
from ...ops.rules import full, reshaped, spread
from ..manager import graph_pass
from .known_values import value_where
from .replace_axis import computes, moves, nbytes, replace_axis


@graph_pass("REAL")
def push_gathers(graph: Graph, *, numerics: str = "real") -> Graph:
    """gather(f(table..), i)  ->  f(gather(table, i)..): BITS in the value, REAL in the gradient"""
    if numerics == "strict":
        return graph
    reads = {node: read for node in graph.nodes if (read := Read.of(node)) is not None}
    refused: set[Node] = set()
    while True:
        inside = _only_gathered(graph, reads, refused)
        taken = {node: Taken(read, inside) for node, read in reads.items() if read.table in inside}
        tables: dict[Node, list[Taken]] = {}
        for each in taken.values():
            tables.setdefault(each.table, []).append(each)
        worse = {table for table, uses in tables.items() if not all(u.possible for u in uses) or not _pays(table, uses)}
        if not worse:
            break
        refused |= worse  # an expression below a refused table is not only gathered any more
    if not taken:
        return graph
    new: dict[Node, Node] = {}
    return graph.rewrite(lambda node, operands: taken[node].rewritten(new) if node in taken else None, new)


@dataclass(frozen=True)
class Read:
    """A gather of slices: its operands, and how it gathers."""

    table: Node
    indices: Node
    how: Gathers

    @classmethod
    def of(cls, node: Node) -> Read | None:
        """The node as a gather, if its record says that it is one, or that of what a composite without a vjp decomposes
        into.
        """
        how = access(node, Gathers)
        if how is None and isinstance(node.op, Composite) and node.op.vjp is None and node.op.indices:
            return cls.of(node.op.decompose(*node.operands, **node.attrs))
        return None if how is None else cls(node.operands[how.table], node.operands[how.indices], how)


def _only_gathered(graph: Graph, reads: Mapping[Node, Read], refused: set[Node]) -> set[Node]:
    """The values that are computed elementwise and whose only use, directly or through such values, is as the table of
    a gather.
    """
    outputs = {node for _, node in graph.outputs}
    inside: set[Node] = set()

    def gathers(user: Node, node: Node) -> bool:
        read = reads.get(user)
        return read is not None and read.table is node and read.indices is not node

    for node in reversed(graph.nodes):
        if node in outputs or node in refused or not (moves(node) or computes(node)):
            continue
        users = graph.users[node]
        if users and all(u in inside or gathers(u, node) for u in users):
            inside.add(node)
    return inside


@dataclass
class Taken:
    """One gather from a computed table.

    :param leaves: what is gathered instead, with the axis.
    :param fixed: operands that do not vary along the gathered axis.
    """

    read: Read
    inside: set[Node]
    leaves: dict[tuple[Node, int], None] = field(default_factory=dict)
    fixed: dict[Node, None] = field(default_factory=dict)
    works: bool = False

    def __post_init__(self) -> None:
        self.result = self.build(
            lambda node, axis: self._gather(node, self.indices, axis), lambda node: node, note=True
        )

    @property
    def table(self) -> Node:
        return self.read.table

    @property
    def indices(self) -> Node:
        return self.read.indices

    @property
    def how(self) -> Gathers:
        return self.read.how

    @property
    def axis(self) -> int:
        return self.how.axis

    @property
    def size(self) -> Size:
        return self.table.shape[self.axis]

    def build(self, gathered: Callable[[Node, int], Node], fixed: Callable[[Node], Node], note: bool = False) -> Node:
        def leaf(node: Node, axis: int) -> Node:
            if note:
                self.leaves[node, axis] = None
            return gathered(node, axis)

        def stays(node: Node) -> Node:
            if note and depends_on_inputs(node):
                self.fixed[node] = None
            return fixed(node)

        def opens(node: Node) -> bool:
            if node in self.inside and computes(node):
                self.works = True
            return node in self.inside or moves(node)

        return replace_axis(self.table, self.axis, self.indices.shape, leaf, opens, stays)

    def _gather(self, node: Node, indices: Node, axis: int) -> Node:
        scaled = self.how.scale_grad_by_freq and not self.fixed
        return call("gather", node, indices, **replace(self.how, axis=axis, scale_grad_by_freq=scaled).attrs)

    @property
    def possible(self) -> bool:
        """Whether something is gathered, something is computed, and what is not gathered keeps its gradient."""
        return (
            bool(self.leaves)
            and self.works
            and not (self.shared and not self.table.dtype.is_float)
            and not self._needs_rows
        )

    @property
    def shared(self) -> bool:
        """Whether operands that are not gathered get each row's gradient divided by its count too."""
        return bool(self.fixed) and bool(self.how.scale_grad_by_freq)

    @property
    def _needs_rows(self) -> bool:
        # clamp and wrap read 0 from a table without rows
        return self.how.oob in ("clamp", "wrap") and not known_nonnegative(self.size - 1) and not self.zero_at_zero

    @property
    def zero_at_zero(self) -> bool:
        """Whether the expression is +0 where every gathered value is 0."""
        if self.fixed:
            return False
        value = value_where(self.table, {node: 0 for node, _ in self.leaves})
        return value is not None and value == 0 and not np.signbit(np.asarray(value, np.float64))

    def rewritten(self, new: Mapping[Node, Node]) -> Node:
        indices = new[self.indices]
        result = self.build(lambda node, axis: self._gather(new[node], indices, axis), lambda node: new[node])
        if self.shared:  # the whole gradient at once, in place of each gather's own
            share = row_share(
                indices,
                self.size,
                result.dtype.compute,
                oob=self.how.oob,
                padding_idx=self.how.padding_idx,
            )
            result = call("scale_gradient", result, self._along(share, result))
        if self.fixed and self.how.padding_idx is not None and result.dtype.is_float:
            # what is not gathered gets no gradient from padding either
            result = call("where", self._along(self._kept(indices), result), result, call("stop_gradient", result))
        if self.how.oob == "skip" and not self.zero_at_zero:
            result = call("where", self._along(in_range(indices, self.size), result), result, full(0, result))
        return result

    def _along(self, mask: Node, result: Node) -> Node:
        rank = self.table.rank - self.axis - 1
        return spread(reshaped(mask, (*(1,) * self.axis, *mask.shape, *(1,) * rank)), result.shape)

    def _kept(self, indices: Node) -> Node:
        if self.how.oob in ("clamp", "wrap"):
            rows = call("iota", shape=(self.size,), dtype=DTYPES["i64"])
            indices = call("gather", rows, indices, axis=0, oob=self.how.oob)
        return unpadded(indices, self.how.padding_idx)


def _pays(table: Node, uses: Sequence[Taken]) -> bool:
    leaves = {leaf for use in uses for leaf, _ in use.leaves}
    if sum(nbytes(leaf) for leaf in leaves) < nbytes(table):
        return True
    rows: Size = 0
    for use in uses:
        rows = rows + product(use.indices.shape)
    return not known_nonnegative(rows - uses[0].size - 1)
