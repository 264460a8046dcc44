"""sparse_rows: the gradient of a table as the rows that were hit."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Unsupported
from ...ir.dims import product
from ...ir.graph import SPARSE_PARTS, Graph
from ...ir.node import Node, call
from ...ir.pattern import Var, match, op
from ...ir.types import I64
from ...ops.rules import converted, reshaped
from ...ops.sparse import coalesce
from ..manager import graph_pass

SCATTER, ADD, CAST = op("scatter_add", Var("indices"), Var("updates")), Var("x") + Var("y"), op("cast", Var("x"))


@graph_pass("REAL")
def sparse_rows(graph: Graph, *, names: Sequence[str]) -> Graph:
    """d.w = scatter_add(i, u) + scatter_add(j, v)  ->  the rows of i and j, each once; their sums of u and v; how many
    they are
    """
    outputs: list[tuple[str, Node]] = []
    for name, node in graph.outputs:
        outputs += (
            zip((f"{name}.{part}" for part in SPARSE_PARTS), _coalesced(name, node), strict=True)
            if name in names
            else [(name, node)]
        )
    return graph.with_outputs(outputs)


def _coalesced(name: str, node: Node) -> tuple[Node, Node, Node]:
    terms, pending = [], [node]
    while pending:
        term = pending.pop()
        bound: dict[str, Node] = {}
        if match(ADD, term, bound) or match(CAST, term, bound):
            pending += [bound[v] for v in ("y", "x") if v in bound]
        else:
            terms.append(term)
    unsupported = next(
        (t for t in terms if not match(SCATTER, t, {}) or t.attrs["axis"] != 0 or t.attrs != terms[0].attrs), None
    )
    if unsupported is not None:
        why = (
            "scatters under different options meet in it"
            if match(SCATTER, unsupported, {}) and unsupported.attrs["axis"] == 0
            else f"'{unsupported.op.name}' has a part in it"
        )
        raise Unsupported(
            f"{name} ({node.type}) has no sparse form: it is to be made of rows added along the first axis, and {why}"
        )
    attrs = {k: v for k, v in terms[0].attrs.items() if k != "axis"}
    compute = node.dtype.compute
    lines, width = [], product(node.shape[1:])
    for term in terms:
        indices, updates = term.operands
        count = indices.type.count
        lines.append(
            (reshaped(converted(indices, I64), (count,)), reshaped(converted(updates, compute), (count, width)))
        )
    indices = lines[0][0] if len(lines) == 1 else call("concat", *(i for i, _ in lines), axis=0)
    updates = lines[0][1] if len(lines) == 1 else call("concat", *(u for _, u in lines), axis=0)
    rows, values, how_many = coalesce(indices, updates, **attrs)
    return rows, reshaped(converted(values, node.dtype), (values.shape[0], *node.shape[1:])), how_many
