"""Range analysis of a graph's integers: what shapes and constants alone say of them."""

from __future__ import annotations

from .node import Node
from .op import Alias, Checked, Expr, Movement
from .ranges import Range, fits, of_type
from .walk import postorder

__all__ = ["only_moves_elements", "range_of"]


def range_of(node: Node) -> Range:
    """The range of a value's elements, from the dtypes and the ``within`` of the ops that it is computed by; unbounded
    for floats.
    """
    known: dict[Node, Range] = {}

    def sources(at: Node) -> tuple[Node, ...]:
        follows = not at.dtype.is_float and (at.op.within is not None or only_moves_elements(at))
        return at.operands if follows else ()

    for at in postorder([node], known, sources):
        found = Range()
        if sources(at) or (at.op.within is not None and not at.operands):
            ranges = [known[operand] for operand in at.operands]
            found = at.op.within(at, *ranges) if at.op.within is not None else ranges[0]
        own = of_type(at.dtype)
        known[at] = own & found if not at.dtype.is_float and fits(found, at.dtype) else own
    return known[node]


def only_moves_elements(node: Node) -> bool:
    """Whether a unary op only moves, repeats or widens integers, so that a bounds check of its operand covers its
    result.
    """
    lower = getattr(node.op, "lower", None)
    if len(node.operands) != 1 or isinstance(lower, Checked):
        return False
    (operand,) = node.operands
    if isinstance(lower, Expr):
        return (
            lower.conversion
            and operand.dtype.is_integer
            and node.dtype.is_integer
            and of_type(operand.dtype).within(of_type(node.dtype))
        )
    if isinstance(lower, Alias):
        return node.dtype is operand.dtype
    return (
        isinstance(lower, Movement)
        and node.op.multilinear is not None
        and not node.op.indices
        and None not in node.op.multilinear(node).get(0, (None,))
    )
