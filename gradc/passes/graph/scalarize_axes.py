"""scalarize_axes: a short axis that only stacks values becomes the values themselves.

The taps of an interpolation and the coordinates of a point are axes of 2 to 4.  Where every reader takes one element of
such an axis, or adds them up, a kernel over the points holds all of them at once; as an axis they would be a loop of
two inside the loop over the points.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from ...ir.dims import Size
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.pattern import splat
from ...ir.properties import Concats, Pads, Slices, access
from ...ir.walk import postorder
from ...ops.movement import pad
from ...ops.rules import full, reshaped
from ..manager import graph_pass
from .replace_axis import computes, moves, plan, replace_axis, replaced_alike, sums

LONGEST = 4
"""Elements of an axis that become values."""


def _short(size: Size) -> bool:
    return isinstance(size, int) and 2 <= size <= LONGEST


def _taken(node: Node) -> tuple[int, int] | None:
    """(axis, element) of a slice that takes one element of a short axis and all of the others."""
    slice = access(node, Slices)
    if slice is None:
        return None
    (source,) = node.operands
    cut = [a for a in range(node.rank) if node.shape[a] != source.shape[a] or slice.step[a] != 1]
    if (
        len(cut) != 1
        or node.shape[cut[0]] != 1
        or not _short(source.shape[cut[0]])
        or not isinstance(start := slice.start[cut[0]], int)
    ):
        return None
    return cut[0], start


def _puts_together(node: Node, axis: int) -> bool:
    """Whether an op concatenates or pads along an axis of its result."""
    concat, pads = access(node, Concats), access(node, Pads)
    return (concat is not None and concat.axis == axis) or (pads is not None and pads.pad_width[axis] != (0, 0))


def _along(key: tuple[Node, int]) -> list[tuple[Node, int]]:
    """(operand, axis) of the operands that vary along an axis of a value, if it works elementwise along it."""
    planned = None if _puts_together(*key) else plan(*key, (1,))
    return replaced_alike(key[0], planned) if planned is not None else []


def _summed(node: Node) -> int | None:
    """The one short axis that a sum goes over."""
    if not sums(node) or node.dtype is not node.operands[0].dtype:
        return None
    axes = [a for a in node.attrs["axis"] if _short(node.operands[0].shape[a])]
    return axes[0] if len(axes) == 1 else None


@graph_pass("REAL")
def scalarize_axes(graph: Graph, *, numerics: str = "real") -> Graph:
    """f(stack(a, b))[:, 0]  ->  f(a); sum over the axis of f(stack(a, b))  ->  f(a) + f(b); sum over another  ->
    stack(sum f(a), sum f(b))
    """
    return graph if numerics == "strict" else _Unrolling(graph).graph()


class _Unrolling:
    def __init__(self, graph: Graph):
        self.before = graph
        self.whole: set[Node] = set()
        """The values of the new graph that something reads whole: they are computed anyway, and an element of them is
        read.
        """
        self.stacks: dict[tuple[Node, int], bool] = {}
        self.elements: dict[int, dict[tuple[Node, int], Node]] = {}
        """Element -> (value of the new graph, axis) -> the value's element along the axis."""
        self.pieces = self.in_pieces()

    def in_pieces(self) -> set[Node]:
        """The values of which only single elements of short axes are read."""
        pieces: set[Node] = set()
        outputs = {n for _, n in self.before.outputs}
        for node in reversed(self.before.nodes):
            if node not in outputs and all(
                _taken(u) or u in pieces or self.reduces(u) for u in self.before.users.get(node, ())
            ):
                pieces.add(node)
        puts = {n for n in pieces if access(n, Concats) or access(n, Pads) or sums(n) or n.op.name == "constant"}
        return {n for n in pieces if n in puts or computes(n) or moves(n)}

    def reduces(self, node: Node) -> bool:
        return _summed(node) is not None or any(self.stacked(node, a) for a in self.kept(node))

    def kept(self, node: Node) -> Iterator[int]:
        """The short axes that a sum over others leaves."""
        if sums(node):
            yield from (a for a, size in enumerate(node.shape) if _short(size))

    def stacked(self, node: Node, axis: int) -> bool:
        """Whether elements along the axis come from values that a concat or a pad has put together."""
        for key in postorder([(node, axis)], self.stacks, _along):
            self.stacks[key] = _puts_together(*key) or any(self.stacks[source] for source in _along(key))
        return self.stacks[node, axis]

    def graph(self) -> Graph:
        return self.before.rewrite(self.rule)

    def rule(self, old: Node, operands: tuple[Node, ...]) -> Node | None:
        node = again(old, operands)
        new = self.unrolled(node)
        if old not in self.pieces:
            self.whole.add(new)
        return new

    def unrolled(self, node: Node) -> Node:
        taken = _taken(node)
        if taken is not None:
            return self.element(node.operands[0], *taken)
        axis = _summed(node)
        if axis is not None and self.stacked(node.operands[0], axis):
            (source,) = node.operands
            total = self.element(source, axis, 0)
            for k in range(1, source.shape[axis]):
                total = total + self.element(source, axis, k)
            others = tuple(a for a in node.attrs["axis"] if a != axis)
            return reshaped(call("sum", total, axis=others) if others else total, node.shape)
        for axis in self.kept(node):
            if self.stacked(node, axis):
                return call("concat", *(self.element(node, axis, k) for k in range(node.shape[axis])), axis=axis)
        return node

    def element(self, node: Node, axis: int, k: int) -> Node:
        """Element k along the axis, which stays with size 1."""
        done = self.elements.setdefault(k, {})
        return replace_axis(
            node,
            axis,
            (1,),
            lambda inner, at: self.part(inner, at, k),
            lambda inner: inner not in self.whole or splat(inner) is not None,
            done=done,
        )

    def only(self, node: Node, axis: int, k: int) -> Node:
        return node if node.shape[axis] == 1 else self.element(node, axis, k)

    def part(self, node: Node, axis: int, k: int) -> Node:
        """Element k of a value that is not rewritten."""
        concat, pads = access(node, Concats), access(node, Pads)
        if concat is not None and concat.axis == axis:
            sizes = [x.shape[axis] for x in node.operands]
            if all(isinstance(n, int) for n in sizes):
                ends = list(itertools.accumulate(sizes))
                which = bisect.bisect_right(ends, k)
                return self.only(node.operands[which], axis, k - ends[which] + sizes[which])  # type: ignore[arg-type]
        if pads is not None:
            (x,), (low, _), size = node.operands, pads.pad_width[axis], node.operands[0].shape[axis]
            if isinstance(low, int) and isinstance(size, int):
                if not low <= k < low + size:
                    narrow = node.type.with_shape(*(1 if a == axis else n for a, n in enumerate(node.shape)))
                    return full(pads.value, narrow)
                width = tuple((0, 0) if a == axis else w for a, w in enumerate(pads.pad_width))
                return pad(self.only(x, axis, k - low), width, pads.value)
        if node.op.name == "constant":
            values = np.take(np.array(node.attrs["value"], object).reshape(node.shape), [k], axis)
            return call("constant", value=tuple(values.reshape(-1).tolist()), dtype=node.dtype, shape=values.shape)
        edges = [(0, size) for size in node.shape]
        edges[axis] = (k, k + 1)
        return call(
            "slice", node, start=tuple(a for a, _ in edges), limit=tuple(b for _, b in edges), step=(1,) * node.rank
        )
