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
from ...ops.rules import full, reshaped
from ...ops.shapes.movement import pad
from ..manager import graph_pass
from .replace_axis import computes, moves, plan, replace_axis, sums, varying_operands

LONGEST = 4
"""Elements of an axis that become values."""


def _short(size: Size) -> bool:
    """Whether a size is a constant small enough for its axis to be scalarized."""
    return isinstance(size, int) and 2 <= size <= LONGEST


def _single_element(node: Node) -> tuple[int, int] | None:
    """(axis, element) of a slice that takes one element of a short axis and all of the others; None for every other
    value.
    """
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


def _concatenates(node: Node, axis: int) -> bool:
    """Whether a value is a concat or a pad along one of its axes."""
    concat, pads = access(node, Concats), access(node, Pads)
    return (concat is not None and concat.axis == axis) or (pads is not None and pads.pad_width[axis] != (0, 0))


def _operands_along(key: tuple[Node, int]) -> list[tuple[Node, int]]:
    """(value, axis) -> (operand, axis) of what its elements along the axis are computed from; none where it is a
    concat, a pad, or not elementwise along it.
    """
    planned = None if _concatenates(*key) else plan(*key, (1,))
    return varying_operands(key[0], planned) if planned is not None else []


def _summed_axis(node: Node) -> int | None:
    """The one short axis of its operand that a sum reduces; None for every other value, and where there are several."""
    if not sums(node) or node.dtype is not node.operands[0].dtype:
        return None
    axes = [a for a in node.attrs["axis"] if _short(node.operands[0].shape[a])]
    return axes[0] if len(axes) == 1 else None


@graph_pass("REAL")
def scalarize_axes(graph: Graph, *, numerics: str = "real") -> Graph:
    """f(stack(a, b))[:, 0]  ->  f(a); sum over the axis of f(stack(a, b))  ->  f(a) + f(b); sum over another  ->
    stack(sum f(a), sum f(b))
    """
    return graph if numerics == "strict" else _Scalarizer(graph).graph()


class _Scalarizer:
    """One run of the pass over a graph: which values are read by single elements, and the elements built so far."""

    def __init__(self, graph: Graph):
        self.before = graph
        self.whole: set[Node] = set()
        """The values of the new graph that something reads whole: they are computed anyway, and an element of them is
        read.
        """
        self.stacks: dict[tuple[Node, int], bool] = {}
        self.elements: dict[int, dict[tuple[Node, int], Node]] = {}
        """Element -> (value of the new graph, axis) -> the value's element along the axis."""
        self.pieces = self.find_pieces()

    def find_pieces(self) -> set[Node]:
        """The values of which nothing reads more than single elements of short axes: they need no array."""
        pieces: set[Node] = set()
        outputs = {n for _, n in self.before.outputs}
        for node in reversed(self.before.nodes):
            if node not in outputs and all(
                _single_element(u) or u in pieces or self.is_reduced(u) for u in self.before.users.get(node, ())
            ):
                pieces.add(node)
        puts = {n for n in pieces if access(n, Concats) or access(n, Pads) or sums(n) or n.op.name == "constant"}
        return {n for n in pieces if n in puts or computes(n) or moves(n)}

    def is_reduced(self, node: Node) -> bool:
        """Whether a reader is a reduction that will be scalarized: over a short axis, or over others with short axes of
        stacked elements kept.
        """
        return _summed_axis(node) is not None or any(self.has_concat(node, a) for a in self.kept_axes(node))

    def kept_axes(self, node: Node) -> Iterator[int]:
        """The short axes of a sum's result."""
        if sums(node):
            yield from (a for a, size in enumerate(node.shape) if _short(size))

    def has_concat(self, node: Node, axis: int) -> bool:
        """Whether a value's elements along an axis derive, through elementwise ops, from a concat or a pad along it;
        memoized.
        """
        for key in postorder([(node, axis)], self.stacks, _operands_along):
            self.stacks[key] = _concatenates(*key) or any(self.stacks[source] for source in _operands_along(key))
        return self.stacks[node, axis]

    def graph(self) -> Graph:
        """The rewritten graph."""
        return self.before.rewrite(self.rule)

    def rule(self, old: Node, operands: tuple[Node, ...]) -> Node | None:
        """Value and its new operands -> its replacement, noted as whole if it is an array anyway."""
        node = again(old, operands)
        new = self.scalarized(node)
        if old not in self.pieces:
            self.whole.add(new)
        return new

    def scalarized(self, node: Node) -> Node:
        """A slice, or a sum, of a stacked short axis -> expressions of its elements; any other value as it is."""
        taken = _single_element(node)
        if taken is not None:
            return self.element(node.operands[0], *taken)
        axis = _summed_axis(node)
        if axis is not None and self.has_concat(node.operands[0], axis):
            (source,) = node.operands
            total = self.element(source, axis, 0)
            for k in range(1, source.shape[axis]):
                total = total + self.element(source, axis, k)
            others = tuple(a for a in node.attrs["axis"] if a != axis)
            return reshaped(call("sum", total, axis=others) if others else total, node.shape)
        for axis in self.kept_axes(node):
            if self.has_concat(node, axis):
                return call("concat", *(self.element(node, axis, k) for k in range(node.shape[axis])), axis=axis)
        return node

    def element(self, node: Node, axis: int, k: int) -> Node:
        """The expression of element ``k`` along an axis, which stays with size 1; memoized per element."""
        done = self.elements.setdefault(k, {})
        return replace_axis(
            node,
            axis,
            (1,),
            lambda inner, at: self.element_of_leaf(inner, at, k),
            lambda inner: inner not in self.whole or splat(inner) is not None,
            done=done,
        )

    def element_or_all(self, node: Node, axis: int, k: int) -> Node:
        """Element ``k`` along an axis; a value that has but one is that element."""
        return node if node.shape[axis] == 1 else self.element(node, axis, k)

    def element_of_leaf(self, node: Node, axis: int, k: int) -> Node:
        """Element ``k`` of a value that is not recomputed: of a concat's operand, of a pad or a constant, else a
        slice.
        """
        concat, pads = access(node, Concats), access(node, Pads)
        if concat is not None and concat.axis == axis:
            sizes = [x.shape[axis] for x in node.operands]
            if all(isinstance(n, int) for n in sizes):
                ends = list(itertools.accumulate(sizes))
                which = bisect.bisect_right(ends, k)
                return self.element_or_all(node.operands[which], axis, k - ends[which] + sizes[which])  # type: ignore[arg-type]
        if pads is not None:
            (x,), (low, _), size = node.operands, pads.pad_width[axis], node.operands[0].shape[axis]
            if isinstance(low, int) and isinstance(size, int):
                if not low <= k < low + size:
                    narrow = node.type.with_shape(*(1 if a == axis else n for a, n in enumerate(node.shape)))
                    return full(pads.value, narrow)
                width = tuple((0, 0) if a == axis else w for a, w in enumerate(pads.pad_width))
                return pad(self.element_or_all(x, axis, k - low), width, pads.value)
        if node.op.name == "constant":
            values = np.take(np.array(node.attrs["value"], object).reshape(node.shape), [k], axis)
            return call("constant", value=tuple(values.reshape(-1).tolist()), dtype=node.dtype, shape=values.shape)
        edges = [(0, size) for size in node.shape]
        edges[axis] = (k, k + 1)
        return call(
            "slice", node, start=tuple(a for a, _ in edges), limit=tuple(b for _, b in edges), step=(1,) * node.rank
        )
