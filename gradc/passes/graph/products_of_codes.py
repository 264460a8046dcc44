"""Products of floats that are 8-bit integers times scales, as products of the integers (a rule of ``simplify``)."""

from __future__ import annotations

from typing import TypeAlias

from ...ir.graph import again
from ...ir.node import Node
from ...ir.op import Alias, Movement
from ...ir.pattern import Var, match
from ...ir.walk import postorder
from ...ops.products.integers import CODES, integer_matmul, largest_sum
from ...ops.rules import converted, spread
from .replace_axis import VaryingAxes, converts

MUL = Var("x") * Var("y")


Codes: TypeAlias = tuple[Node, Node | None]
"""8-bit integers, and what they are multiplied with, of their shape."""


class ProductsOfCodes:
    """matmul(cast(x) * s, cast(y) * t)  ->  cast(integer_matmul(x, y)) * s * t of 8-bit integers x, y and scales that
    are the same along what is summed over, where no sum leaves i32: it is exact before it is rounded, and a processor
    multiplies integers several times as fast
    """

    def __init__(self) -> None:
        self.variation = VaryingAxes()
        self.known: dict[Node, Codes | None] = {}

    def rewritten(self, node: Node) -> Node | None:
        if node.op.name != "matmul":
            return None
        left, right = map(self._codes, node.operands)
        inner = node.operands[0].shape[-1]
        if left is None or right is None or not isinstance(inner, int) or inner == 0:  # a sum of nothing is 0, not NaN
            return None
        if largest_sum(left[0].dtype, right[0].dtype, inner) >= 1 << 31:
            return None
        product = converted(integer_matmul.plain(left[0], right[0]), node.dtype)
        for (_, scale), summed in ((left, node.rank - 1), (right, node.rank - 2)):
            if scale is None:
                continue
            narrow = self.variation.narrow(scale, frozenset({*range(node.rank)} - {summed}))
            if narrow is None:
                return None
            product = product * spread(narrow, node.shape)
        return product

    def _codes(self, node: Node) -> Codes | None:
        """move(cast(x) * s)  ->  (move(x), move(s)) of 8-bit integers x; None for anything else."""
        for inner in postorder([node], self.known, _moved_or_scaled):
            self.known[inner] = self._codes_of(inner)
        return self.known[node]

    def _codes_of(self, node: Node) -> Codes | None:
        """The same, where those of its sources are known."""
        if _is_cast_of_codes(node):
            return node.operands[0], None
        sources = _moved_or_scaled(node)
        if len(sources) == 2:
            for value, scale in (sources, sources[::-1]):
                if (found := self.known[value]) is not None:
                    return found[0], scale if found[1] is None else found[1] * scale
        elif sources and (found := self.known[sources[0]]) is not None:
            codes, factor = found
            return again(node, (codes,)), None if factor is None else again(node, (factor,))
        return None


def _is_cast_of_codes(node: Node) -> bool:
    return converts(node) and node.operands[0].dtype in CODES


def _moved_or_scaled(node: Node) -> tuple[Node, ...]:
    """The factors of a product of elements, or what is moved, without an element that is not there."""
    factors: dict[str, Node] = {}
    if match(MUL, node, factors):
        return factors["x"], factors["y"]
    moves = isinstance(getattr(node.op, "lower", None), Movement | Alias) and not node.op.fills
    return node.operands if moves and len(node.operands) == 1 else ()
