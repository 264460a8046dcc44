"""An expression with one axis of its result replaced: the rewrite that rules for gathers, scatters and short axes use.

An op that works elementwise along an axis (a pointwise op, or one whose record has ``replace_axis``), applied to
operands gathered along that axis, gives what a gather of its result would give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from ...errors import TypeRuleError
from ...ir.dims import Size, evaluate, nominal, product
from ...ir.node import Node
from ...ir.op import Alias, AxisReplacement, Composite, Expr, Lookup, Movement, Primitive, Reduction
from ...ir.pattern import splat
from ...ir.properties import Broadcasts, Reshapes, access
from ...ir.walk import operands, positions, postorder, reachable
from ...ops.rules import reshaped


def count(node: Node) -> int:
    """The number of elements of a value, unknown sizes taken at their nominal ones."""
    return elements(node.shape)


@functools.lru_cache(4096)
def elements(shape: tuple[Size, ...]) -> int:
    """Shape -> number of elements, with the cost model's nominal size in place of each symbol."""
    return evaluate(product(shape), nominal(shape))


def nbytes(node: Node) -> int:
    """The bytes of a value at nominal sizes."""
    return count(node) * node.dtype.itemsize


def computes(node: Node) -> bool:
    """Whether an op is elementwise: each element of its result depends on the operands' elements at the same index
    alone.
    """
    if isinstance(node.op, Primitive):
        return isinstance(node.op.lower, Expr)
    if not isinstance(node.op, Composite) or node.op.replace_axis is not None:
        return isinstance(node.op, Composite)

    def given(inner: Node) -> bool:
        return bool(positions(node, inner)) or splat(inner) is not None

    inside = reachable(
        [node.op.decompose(*node.operands, **node.attrs)], lambda inner: () if given(inner) else inner.operands
    )
    return all(given(inner) or (inner.shape == node.shape and computes(inner)) for inner in inside)


def moves(node: Node) -> bool:
    """Whether an op is data movement: its result consists of elements of its one operand (unpack: of bits of them)."""
    return (
        isinstance(node.op, Primitive)
        and isinstance(node.op.lower, Movement | Alias | Lookup)
        and not mixes(node)
        and node.op.replace_axis is not None
    )


def mixes(node: Node) -> bool:
    """Whether an op, which a kernel inlines into its loads, computes an element from several elements of its
    operand.
    """
    lower = getattr(node.op, "lower", None)
    return isinstance(lower, Lookup) and lower.mixes


def converts(node: Node) -> bool:
    """Whether an op only changes the dtype."""
    lower = getattr(node.op, "lower", None)
    return isinstance(lower, Expr) and lower.conversion


def sums(node: Node) -> bool:
    """Whether an op adds up the elements of its operand along the axes ``attrs["axis"]``."""
    lower = getattr(node.op, "lower", None)
    return isinstance(lower, Reduction) and lower.combine == "sum"


def source(node: Node) -> Node:
    """The value below a chain of data movement: the first one that is computed, or an input."""
    while moves(node):
        (node,) = node.operands
    return node


def plan(node: Node, axis: int, sizes: tuple[Size, ...]) -> AxisReplacement | None:
    """(value, axis of its result, sizes for it) -> for each operand the axis or shape to replace, and the op's new
    attributes; None where the op is not elementwise along the axis.
    """
    if node.op.replace_axis is not None:
        try:
            answer: AxisReplacement | None = node.op.replace_axis(node, axis, sizes)
        except TypeRuleError:  # a reshape of no elements has no axes to follow
            return None
        return answer
    return ((axis,) * len(node.operands), node.attrs) if node.operands and computes(node) else None


def replace_axis(
    root: Node,
    axis: int,
    sizes: tuple[Size, ...],
    leaf: Callable[[Node, int], Node],
    opens: Callable[[Node], bool] = lambda node: True,
    fixed: Callable[[Node], Node] = lambda node: node,
    done: dict[tuple[Node, int], Node] | None = None,
) -> Node:
    """Expression -> the expression rebuilt with ``axis`` of its root replaced by axes of ``sizes``, from the leaves up.

    :param leaf: ``(node, axis)``: the replacement of a node that is not rewritten.  :param opens: which nodes may be.
    :param fixed: the replacement of a node that does not vary along the axis.
    :param done: results of earlier calls with the same axis sizes and functions.
    """
    done = {} if done is None else done
    plans: dict[tuple[Node, int], AxisReplacement | None] = {}

    def sources(key: tuple[Node, int]) -> list[tuple[Node, int]]:
        node, at = key
        if key not in plans:
            plans[key] = plan(node, at, sizes) if opens(node) else None
        planned = plans[key]
        return [] if planned is None else varying_operands(node, planned)

    for key in postorder([(root, axis)], done, sources):
        node, planned = key[0], plans[key]
        if planned is None:
            done[key] = leaf(*key)
            continue
        operands = [
            done[o, a] if isinstance(a, int) else reshaped(fixed(o), a)
            for o, a in zip(node.operands, planned[0], strict=True)
        ]
        made = node.op.apply(operands, planned[1])
        done[key] = (
            operands[0]
            if (access(node, Reshapes) or access(node, Broadcasts)) and made.shape == operands[0].shape
            else made
        )
    return done[root, axis]


def varying_operands(node: Node, planned: AxisReplacement) -> list[tuple[Node, int]]:
    """(operand, axis) of the operands in which the replacement of an axis replaces one, too."""
    return [(o, a) for o, a in zip(node.operands, planned[0], strict=True) if isinstance(a, int)]


# -- along which axes a value varies -----------------------------------------------------------------------------------


class VaryingAxes:
    """For each value the axes along which its elements may differ: not those along which it is a broadcast."""

    def __init__(self) -> None:
        self.known: dict[Node, frozenset[int]] = {}

    def of(self, node: Node) -> frozenset[int]:
        """Value -> its varying axes, memoized with those of all that it is computed from."""
        for inner in postorder([node], self.known, operands):
            self.known[inner] = self._axes(inner)
        return self.known[node]

    def _axes(self, node: Node) -> frozenset[int]:
        """The varying axes of a value whose operands' are known."""
        real = [a for a, size in enumerate(node.shape) if size != 1]
        if not real or splat(node) is not None:
            return frozenset()
        if node.op.replace_axis is None:
            if not node.operands or not computes(node):
                return frozenset(real)
            return frozenset(a for a in real if any(a in self.known[o] for o in node.operands))
        varying = set()
        for axis in real:
            planned = plan(node, axis, (1,))
            if planned is None or any(a in self.known[o] for o, a in varying_operands(node, planned)):
                varying.add(axis)
        return frozenset(varying)

    def narrow(self, node: Node, keep: frozenset[int]) -> Node | None:
        """The value recomputed with size 1 along every axis but ``keep``; None if it varies along another, or an op in
        the way has no such form.
        """
        if not self.of(node) <= keep:
            return None
        for axis, size in enumerate(node.shape):
            if axis in keep or size == 1:
                continue
            stuck: list[Node] = []

            def leaf(inner: Node, at: int, stuck: list[Node] = stuck) -> Node:
                stuck.append(inner)
                return inner

            try:
                node = replace_axis(node, axis, (1,), leaf)
            except TypeRuleError:  # a leaf in the way: its type no longer fits
                return None
            if stuck:
                return None
        return node


def placed(node: Node, axes: Mapping[int, int], rank: int) -> Node:
    """A narrowed value transposed and reshaped to broadcast in ``rank`` axes: its axis ``a`` becomes axis ``axes[a]``,
    all others have size 1.
    """
    order = sorted(axes, key=lambda a: axes[a])
    if order != sorted(order):
        rest = [a for a in range(node.rank) if a not in axes]
        node = node.transpose(*order, *rest)
        order = list(range(len(order)))
    shape: list[Size] = [1] * rank
    for a, target in zip(order, sorted(axes.values()), strict=True):
        shape[target] = node.shape[a]
    return reshaped(node, tuple(shape))
