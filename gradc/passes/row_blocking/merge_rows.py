"""merge_rows: rows that a product has in one axis stay in one axis where a reshape splits it.

The logits ``[B, S, V]`` of a linear layer are a product of ``[B*S, K]``.  A softmax over ``V`` of the product itself,
``[B*S, V]``, has the product's rows, so that both can be computed for one block of rows at a time; and where the
classes are in the second axis, ``[B, V, S]``, nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.dims import Size, product, same
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.op import Expr, Lookup, Movement, Primitive, Reduction
from ...ir.properties import Broadcasts, Gathers, GathersElements, Reshapes, Transposes, access
from ...ops.rules import canonical_axes, reshaped, spread, without
from ...ops.shapes.axes import reshape_axes
from ..manager import graph_pass
from .wide_products import BLOCKED, is_wide_product

DEEPEST = 100
NUMBERED = ("argmax", "argmin")
"""Reductions whose result is an element's row-major number in the reduced axes."""


@graph_pass("REAL")
def merge_rows(graph: Graph, *, numerics: str = "real") -> Graph:
    """f(reshape[A,B,V](matmul(x, w)))  ->  reshape[A,B,V](f(matmul(x, w))), where f reduces the product's wide rows"""
    if numerics == "strict":
        return graph
    asked: dict[Node, tuple[int, ...]] = {}
    while True:
        merged = _MergedRows(asked)
        result = graph.rewrite(merged.rule)
        if not merged.reduces:
            return graph
        if merged.anew.keys() <= asked.keys():
            return result
        asked |= merged.anew  # what is merged for the sake of others has other users, too


@dataclass(frozen=True)
class _Rows:
    """A value whose axes ``at``, in this order, are the first axis of ``whole``, which has its other axes, too."""

    whole: Node
    at: tuple[int, ...]
    sizes: tuple[Size, ...]

    def value(self) -> Node:
        """The value itself."""
        node = reshaped(self.whole, (*self.sizes, *self.whole.shape[1:]))
        rest = iter(range(len(self.at), node.rank))
        order = tuple(self.at.index(a) if a in self.at else next(rest) for a in range(node.rank))
        return node if order == tuple(range(node.rank)) else call("transpose", node, order)


class _MergedRows:
    """The values that are made of the rows of wide products.

    :param rows: the products, and what else has their rows in its first axis.
    :param asked: other values whose axes are merged.
    :param anew: the values that were computed with these axes merged.  :param reduces: rows have been reduced.
    """

    def __init__(self, asked: Mapping[Node, tuple[int, ...]]) -> None:
        self.asked = asked
        self.known: dict[Node, _Rows | None] = {}
        self.merged: dict[tuple[Node, tuple[int, ...]], Node | None] = {}
        self.rows: set[Node] = set()
        self.anew: dict[Node, tuple[int, ...]] = {}
        self.reduces = False

    def of(self, node: Node) -> _Rows | None:
        if node not in self.known:
            split = access(node, Reshapes) is not None and node.operands[0] in self.rows
            self.known[node] = _split(node) if split else None
        return self.known[node]

    def rule(self, node: Node, operands: tuple[Node, ...]) -> Node | None:
        new = self.rewritten(node, operands)
        made = again(node, operands) if new is None else new
        axes = (_axes(made, place) for place, o in enumerate(made.operands) if o in self.rows)
        if (made.rank == 2 and is_wide_product(made, BLOCKED)) or any(to and to[0] == 0 for to in axes):
            self.rows.add(made)
        return new

    def rewritten(self, node: Node, operands: tuple[Node, ...]) -> Node | None:
        """What a node becomes on new operands; None for the same op."""
        if not isinstance(node.op, Primitive) or not any(self.of(o) for o in operands):
            at = self.asked.get(node)
            whole = None if at is None else self.whole(node, at)
            return None if at is None or whole is None else self.value(node, whole, at)
        new: Node = node.op.apply(operands, node.attrs)
        for place, operand in enumerate(operands):
            rows = self.of(operand)
            if rows is None:
                continue
            if isinstance(node.op.lower, Reduction) and {*rows.at} <= {*(gone := _reduced(node))}:
                if node.op.lower.combine in NUMBERED and gone[: len(rows.at)] != rows.at:
                    continue  # elements are numbered in the order of the axes
                self.reduces = True
                axes = (0, *(_axis(a, rows.at) for a in gone if a not in rows.at))
                return node.op.apply((rows.whole,), {**node.attrs, "axis": axes})
            to = _axes(new, place)
            at = tuple(a for axis in rows.at if (a := to[axis]) is not None) if to is not None else ()
            if len(at) < len(rows.at) or at != tuple(sorted(at)):
                if access(node, Reshapes) and rows.at == tuple(range(len(rows.at))):
                    return reshaped(rows.whole, node.shape)
                continue
            whole = self.whole(new, at)
            if whole is None:
                continue
            return self.value(new, whole, at)
        return new

    def value(self, node: Node, whole: Node, at: tuple[int, ...]) -> Node:
        """A node made of the value with its axes merged, of which more can be made."""
        rows = _Rows(whole, at, tuple(node.shape[a] for a in at))
        value = rows.value()
        self.known[value] = rows
        return value

    def whole(self, node: Node, at: tuple[int, ...], depth: int = 0) -> Node | None:
        """A value with its axes ``at`` merged to the first one; None where that would take memory."""
        key = node, at
        if key not in self.merged:
            rows = self.of(node)
            whole = rows.whole if rows is not None and rows.at == at else self.made(node, at, depth)
            self.merged[key] = whole
        return self.merged[key]

    def made(self, node: Node, at: tuple[int, ...], depth: int) -> Node | None:
        """What :meth:`whole` makes anew."""
        shape = (product(node.shape[a] for a in at), *without(node.shape, at))
        if node.op.name == "iota":
            axis = node.attrs["axis"]
            return None if axis in at else call("iota", **{**node.attrs, "shape": shape, "axis": _axis(axis, at)})
        if access(node, Broadcasts):
            x = reshaped(node.operands[0], (*(1,) * (node.rank - node.operands[0].rank), *node.operands[0].shape))
            repeated = [a for a in at if x.shape[a] == 1]
            if len(repeated) == len(at):
                return spread(reshaped(x, (1, *without(x.shape, at))), shape)
            return None if repeated or (whole := self.whole(x, at, depth + 1)) is None else spread(whole, shape)
        if not node.operands or _axes(node, len(node.operands) - 1) is None:
            return _viewed(node, at, shape)
        gather, elements = access(node, Gathers), access(node, GathersElements)
        wholes = list[Node]()
        for place, operand in enumerate(node.operands):
            to = _axes(node, place)
            sources = tuple(axis for a in at for axis, result in enumerate(to or ()) if result == a)
            if gather is not None and place == gather.table:
                wholes.append(operand)
            elif len(sources) < len(at) or sources != tuple(sorted(sources)) or depth == DEEPEST:
                return _viewed(node, at, shape)
            elif (whole := self.whole(operand, sources, depth + 1)) is None:
                return _viewed(node, at, shape)
            else:
                wholes.append(whole)
        if access(node, Reshapes):
            return reshaped(wholes[0], shape)
        if (transpose := access(node, Transposes)) is not None:
            order = (_axis(a, sources) for a in transpose.axes if a not in sources)
            return call("transpose", wholes[0], (0, *order))
        attrs = dict(node.attrs)
        if isinstance(node.op.lower, Reduction):
            self.reduces = True
            attrs["axis"] = tuple(_axis(a, sources) for a in _reduced(node))
        result: Node = (
            node.op.apply(wholes, attrs)
            if elements is None
            else call(
                "take_along_axis",
                wholes[elements.table],
                wholes[elements.indices],
                axis=_axis(elements.axis, at),
                oob=elements.oob,
            )
        )
        self.anew[node] = at
        return result


def _axis(axis: int, at: Sequence[int]) -> int:
    """Where another axis than those ``at`` is when these are the first one."""
    return 1 + axis - sum(a < axis for a in at)


def _reduced(node: Node) -> tuple[int, ...]:
    """The axes that a reduction is over."""
    return canonical_axes(node.attrs["axis"], node.operands[0].rank)


def _axes(node: Node, place: int) -> Sequence[int | None] | None:
    """For each axis of an operand, that of the result along which the same elements lie, computed each from its own;
    None for another op.
    """
    operand, op = node.operands[place], node.op
    if not isinstance(op, Primitive):
        return None
    if isinstance(op.lower, Expr):
        return range(node.rank)
    if isinstance(op.lower, Reduction):
        gone, kept = _reduced(node), iter(range(node.rank))
        return [None if a in gone else next(kept) for a in range(operand.rank)]
    if (elements := access(node, GathersElements)) is not None:
        return [None if a == elements.axis else a for a in range(node.rank)]
    if (gather := access(node, Gathers)) is not None:
        return range(node.rank) if node.operands[gather.table].rank == 1 and place == gather.indices else None
    if access(node, Reshapes):
        return reshape_axes(node)
    if (transpose := access(node, Transposes)) is not None:
        return [transpose.axes.index(a) for a in range(node.rank)]
    if access(node, Broadcasts):
        lead = node.rank - operand.rank
        return [a + lead if same(n, node.shape[a + lead]) else None for a, n in enumerate(operand.shape)]
    return None


def _viewed(node: Node, at: tuple[int, ...], shape: tuple[Size, ...]) -> Node | None:
    """The value with its axes merged if it is in memory, and they are its first ones."""
    computed = isinstance(node.op, Primitive) and isinstance(node.op.lower, Expr | Movement | Lookup)
    before = (size for a, size in enumerate(node.shape[: at[-1] + 1]) if a not in at)
    return None if computed or any(size != 1 for size in before) else reshaped(node, shape)


def _split(node: Node) -> _Rows | None:
    """The rows of a reshape that splits the first axis of a value, and no other."""
    (x,) = node.operands
    lead = node.rank - x.rank + 1
    if lead < 2 or not all(map(same, node.shape[lead:], x.shape[1:])):
        return None
    at = tuple(a for a, size in enumerate(node.shape[:lead]) if size != 1)
    sizes = tuple(node.shape[a] for a in at)
    if len(at) < 2 or not same(product(sizes), x.shape[0]):
        return None
    return _Rows(reshaped(x, (x.shape[0], *without(node.shape, at))), at, sizes)
