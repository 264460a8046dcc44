"""Products of floats that are 8-bit integers times scales, as products of the integers (a rule of ``simplify``)."""

from __future__ import annotations

from ...ir.graph import again
from ...ir.node import Node
from ...ir.op import Alias, Movement
from ...ir.pattern import Var, match
from ...ops.products.integers import CODES, integer_matmul, largest_sum
from ...ops.rules import converted, spread
from .replace_axis import VaryingAxes, converts

MUL = Var("x") * Var("y")


def product_of_codes(node: Node, variation: VaryingAxes) -> Node | None:
    """matmul(cast(x) * s, cast(y) * t)  ->  cast(integer_matmul(x, y)) * s * t of 8-bit integers x, y and scales that
    are the same along what is summed over, where no sum leaves i32: it is exact before it is rounded, and a processor
    multiplies integers several times as fast
    """
    if node.op.name != "matmul":
        return None
    left, right = map(_codes, node.operands)
    inner = node.operands[0].shape[-1]
    if left is None or right is None or not isinstance(inner, int):
        return None
    if largest_sum(left[0].dtype, right[0].dtype, inner) >= 1 << 31:
        return None
    product = converted(integer_matmul.plain(left[0], right[0]), node.dtype)
    for (_, scale), summed in ((left, node.rank - 1), (right, node.rank - 2)):
        if scale is None:
            continue
        narrow = variation.narrow(scale, frozenset({*range(node.rank)} - {summed}))
        if narrow is None:
            return None
        product = product * spread(narrow, node.shape)
    return product


def _codes(node: Node) -> tuple[Node, Node | None] | None:
    """move(cast(x) * s)  ->  (move(x), move(s)) of 8-bit integers x; None for anything else."""
    if converts(node) and node.operands[0].dtype in CODES:
        return node.operands[0], None
    if isinstance(getattr(node.op, "lower", None), Movement | Alias) and len(node.operands) == 1 and not node.op.fills:
        if (inner := _codes(node.operands[0])) is None:
            return None
        codes, scale = (None if part is None else again(node, (part,)) for part in inner)
        return None if codes is None else (codes, scale)
    factors: dict[str, Node] = {}
    if match(MUL, node, factors):
        for value, scale in ((factors["x"], factors["y"]), (factors["y"], factors["x"])):
            found = _codes(value)
            if found is not None:
                return found[0], scale if found[1] is None else found[1] * scale
    return None
