"""sparse_rows: the gradient of a table as the rows that were hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import Unsupported
from ...ir.dims import product
from ...ir.graph import SPARSE_PARTS, Graph
from ...ir.node import Node, call
from ...ir.pattern import Var, match
from ...ir.properties import Scatters, access
from ...ir.types import I64
from ...ops.indexing.sparse import coalesce
from ...ops.rules import converted, reshaped
from ..manager import graph_pass
from .replace_axis import converts

ADD = Var("x") + Var("y")


@graph_pass("REAL")
def sparse_rows(
    graph: Graph, *, names: Sequence[str], coalesce: Callable[..., tuple[Node, Node, Node]] = coalesce
) -> Graph:
    """d.w = scatter_add(i, u) + scatter_add(j, v)  ->  the rows of i and j, each once; their sums of u and v; how many
    they are

    :param coalesce: (indices, updates, and where they go) -> these three.
    """
    outputs: list[tuple[str, Node]] = []
    for name, node in graph.outputs:
        outputs += (
            zip((f"{name}.{part}" for part in SPARSE_PARTS), _coalesced(name, node, coalesce), strict=True)
            if name in names
            else [(name, node)]
        )
    return graph.with_outputs(outputs)


def _coalesced(name: str, node: Node, coalesce: Callable[..., tuple[Node, Node, Node]]) -> tuple[Node, Node, Node]:
    terms = list[tuple[Node, Scatters | None]]()
    pending = [node]
    while pending:
        term = pending.pop()
        if match(ADD, term, {}) or converts(term):
            pending += reversed(term.operands)
        else:
            terms.append((term, access(term, Scatters)))
    first = terms[0][1]
    lines, width = [], product(node.shape[1:])
    for term, how in terms:
        if how is None or how.axis != 0 or first is None or how.attrs != first.attrs:
            why = (
                "scatters under different options meet in it"
                if how is not None and how.axis == 0
                else f"'{term.op.name}' has a part in it"
            )
            raise Unsupported(
                f"{name} ({node.type}) has no sparse form: it is to be made of rows added along the first axis, and"
                f" {why}"
            )
        indices, updates = term.operands[how.indices], converted(term.operands[how.updates], node.dtype.compute)
        count = indices.type.count
        lines.append((reshaped(converted(indices, I64), (count,)), reshaped(updates, (count, width))))
    assert first is not None
    indices = lines[0][0] if len(lines) == 1 else call("concat", *(i for i, _ in lines), axis=0)
    updates = lines[0][1] if len(lines) == 1 else call("concat", *(u for _, u in lines), axis=0)
    rows, values, how_many = coalesce(
        indices, updates, size=node.shape[0], oob=first.oob, padding_idx=first.padding_idx
    )
    return rows, reshaped(converted(values, node.dtype), (values.shape[0], *node.shape[1:])), how_many
