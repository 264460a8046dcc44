"""centre_sums: what an attention passes to its scores adds up to 0 in each row, and so it does where it is summed."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir.graph import Graph, again, rebuild
from ...ir.node import Node
from ...ir.op import Expr
from ...ir.pattern import Var, match, op, splat
from ...ops.reductions.reduce import sum as sum_of
from ...ops.rules import converted
from ..manager import graph_pass

_CENTRE = op(
    "sum", op("mul", Var("given"), op("cast", op("softmax_matmul", Var("scores"), Var("value"), bind="result")))
)
SLOPE = op(
    "mul",
    op("safe_softmax", Var("x"), bind="weights"),
    op("sub", Var("to_weights"), op("broadcast_to", op("reshape", _CENTRE))),
)
"""What :func:`_weights_of` compares with the gradient of the scores of ``softmax_matmul(scores, value)``; x are the
scores in the dtype that they are computed in.
"""


@graph_pass("REAL")
def centre_sums(graph: Graph, *, numerics: str = "real") -> Graph:
    """sum(dx * t)  ->  sum(sum_cols(dx * t) - sum_cols(dx) * sum_cols(w * t)), dx = w * (dw - c) the gradient of scores
    with weights w, so that sum_cols(dx) = 0 and sum_cols(w) = 1

    The centre c of a row is computed of a result that was rounded to 16 bits.  What it is off by, times w, is in all
    of the row's elements, and has one sign: in the gradient of a parameter of many scores (ALiBi's slopes, a
    temperature, a softcap) such errors add up where the elements cancel.  They are ``w * sum_cols(dx)``.
    """
    if numerics == "strict":
        return graph
    slopes, new = _linear_in_slopes(graph), dict[Node, Node]()

    def rule(old: Node, operands: tuple[Node, ...]) -> Node:
        node = again(old, operands)
        if not _sums_columns(old, slopes):
            return node
        slope, of_weights = slopes[old.operands[0]]  # both of what is before, which another sum may have changed
        return _centred(node, new[slope], rebuild([of_weights], new)[of_weights])

    return graph.rewrite(rule, new) if any(_sums_columns(node, slopes) for node in graph.nodes) else graph


def _linear_in_slopes(graph: Graph) -> Mapping[Node, tuple[Node, Node]]:
    """The values that are linear in the gradient of some scores, element by element, with that gradient, and what they
    are for weights in its place.
    """
    found: dict[Node, tuple[Node, Node]] = {}
    for node in graph.nodes:
        if (weights := _weights_of(node)) is not None:
            found[node] = (node, weights)
            continue
        of = {found[o][0] for o in node.operands if o in found}
        if len(of) == 1 and _is_linear(node, found):
            found[node] = (of.pop(), again(node, tuple(found[o][1] if o in found else o for o in node.operands)))
    return found


def _weights_of(node: Node) -> Node | None:
    """The weights, where the node is the gradient of the scores by softmax_matmul's own rule, whatever else has its ops
    along other axes.
    """
    bound: dict[str, Node] = {}
    if not match(SLOPE, node, bound):
        return None
    result, weights = bound["result"], bound["weights"]
    scores = converted(bound["scores"], weights.dtype)
    to_scores, _ = result.op.vjp(bound["given"], result, scores, bound["value"])
    return weights if to_scores is node else None


def _is_linear(node: Node, found: Mapping[Node, tuple[Node, Node]]) -> bool:
    """Whether an op is linear in those of its operands that were found, element by element."""
    if not isinstance(getattr(node.op, "lower", None), Expr) or node.op.multilinear is None or not node.dtype.is_float:
        return False
    places, linear = [k for k, o in enumerate(node.operands) if o in found], node.op.multilinear(node)
    others = [node.operands[k] for k in linear if k not in places]
    zero = all(splat(o) == 0 for o in others) if node.op.linear else len(places) == 1
    return zero and all(k in linear for k in places)


def _sums_columns(node: Node, slopes: Mapping[Node, tuple[Node, Node]]) -> bool:
    return node.op is sum_of and node.operands[0] in slopes and node.operands[0].rank - 1 in node.attrs["axis"]


def _centred(node: Node, slope: Node, of_weights: Node) -> Node:
    columns = (slope.rank - 1,)
    rows, centre, weighted = (
        sum_of.plain(converted(x, slope.dtype), axis=columns) for x in (node.operands[0], slope, of_weights)
    )
    rest = tuple(axis for axis in node.attrs["axis"] if axis not in columns)
    rows = rows - centre * weighted
    return converted(sum_of.plain(rows, axis=rest) if rest else rows, node.dtype)
