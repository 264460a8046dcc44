"""sink_dequant: scales move to where they cost least, and sums move into scatters.

(b) a sum over columns of something times a scatter is computed before the scatter, so that no gradient of the table's
size is made; a sum over the scattered axes needs no scatter at all;
(c) a scale per row of a scatter's result is read inside the scatter's load, or taken out of it, whichever moves fewer
bytes; (d) a scale passes every op that is linear in its operand, along axes on which it is constant
(:mod:`gradc.passes.graph.scales`).

Rule (a) works before differentiation: :mod:`gradc.passes.graph.push_gathers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from ...ir.dims import known_nonnegative, same, symbols
from ...ir.graph import Graph, again
from ...ir.node import Node, call
from ...ir.op import Expr, Primitive, Reduction, Scatter
from ...ir.pattern import Var, match, op, splat
from ...ir.properties import Gathers, Scatters, access
from ...ir.types import DType
from ...ir.walk import positions
from ...ops.indexing.gathers import in_range
from ...ops.rules import full, reshaped, spread
from ..manager import graph_pass
from .replace_axis import VaryingAxes, converts, elements, moves, nbytes, replace_axis, sums
from .scales import DEEPEST, MOST, MUL, Uses, hoist_scales, homogeneous, sink_scales

SELECT = op("where", Var("kept"), Var("value"), Var("none"))
ROUNDS = 4


@graph_pass("REAL")
def sink_dequant(graph: Graph, *, numerics: str = "real", round_once: Collection[DType] = ()) -> Graph:
    """sum_cols(a * scatter_add(i, u))  ->  scatter_add(i, sum_cols(gather(a, i) * u)), or sum(gather(a, i) * u); a
    scale moves to where it costs least

    :param round_once: constants do not pass a rounding to one of these.
    """
    if numerics == "strict":
        return graph
    variation = VaryingAxes()
    sink = partial(sink_scales, variation=variation, round_once=round_once)
    hoist, scale_after = (partial(step, variation=variation) for step in (hoist_scales, _scale_after_scatter))
    steps = (_sum_without_scatter, _reduce_before_scatter, sink, hoist, scale_after)
    idle = 0  # steps, one after another, that left the graph as it was
    for _ in range(ROUNDS):
        before = graph
        for step in steps:
            after = step(graph) if idle < len(steps) else graph
            idle, graph = idle + 1 if after is graph else 0, after
        if graph == before:
            break
    return graph


# -- (b) ---------------------------------------------------------------------------------------------------------------


def _sum_without_scatter(graph: Graph) -> Graph:
    """sum(a * scatter(i, u))  ->  sum(gather(a, i) * u), the sum over every axis that the scatter mixes: its adjoint is
    the gather of its vjp
    """
    if not _scatters(graph):
        return graph
    uses = Uses(graph)
    new: dict[Node, Node] = {}
    return graph.rewrite(lambda node, operands: _gathered_sum(node, uses, new), new)


def _scatters(graph: Graph) -> bool:
    """Whether a graph has a scatter, without which most of these rules have nothing to do."""
    return any(
        isinstance(getattr(node.op, "lower", None), Scatter) or access(node, Scatters) is not None
        for node in graph.nodes
    )


def _added(scatter: Node, operands: tuple[Node, ...]) -> list[Node] | None:
    """Masks of the updates whose index is in range, each to be broadcast to the updates' shape; None where unknown."""
    how, lower = access(scatter, Scatters), scatter.op.lower
    rank = scatter.operands[lower.updates].rank
    oob = scatter.attrs.get("oob", "skip") if how is None else how.oob
    positions = {k: bound(scatter) for k, bound in scatter.op.indices.items()}
    if oob == "error":
        return []
    if oob != "skip":  # clamp and wrap: of no rows there is none to be meant
        return [] if all(known_nonnegative(size - 1) for size in positions.values()) else None
    masks = []
    for k, size in positions.items():
        mask = in_range(operands[k], size)
        if how is not None:
            axes = tuple(range(how.axis, how.axis + mask.rank))
        elif lower.positions is not None:
            axes = lower.positions(scatter)
        else:
            return None
        at = dict(zip(axes, mask.shape, strict=True))
        masks.append(reshaped(mask, tuple(at.get(axis, 1) for axis in range(rank))))
    return masks


def _gathered_sum(root: Node, uses: Uses, new: Mapping[Node, Node]) -> Node | None:
    factors: dict[str, Node] = {}
    if (
        not sums(root)
        or not match(MUL, root.operands[0], factors)
        or not uses.single(root.operands[0])
        or root.dtype is not root.operands[0].dtype
    ):
        return None  # a sum in a wider integer: the scatter wraps before it
    for scatter, other in ((factors["x"], factors["y"]), (factors["y"], factors["x"])):
        lower = getattr(scatter.op, "lower", None)
        if (
            not isinstance(lower, Scatter)
            or lower.combine != "sum"
            or scatter.op.multilinear is None
            or not uses.single(scatter)
        ):
            continue
        axes, updates = scatter.op.multilinear(scatter)[lower.updates], scatter.operands[lower.updates]
        if any(a not in root.attrs["axis"] for a in range(scatter.rank) if a not in axes):
            continue
        operands = tuple(new[o] for o in scatter.operands)
        back: Node = scatter.op.vjp(new[other], again(scatter, operands), *operands, **scatter.attrs)[lower.updates]
        inside = _added(scatter, operands)
        if inside is None:
            continue
        known = not any(symbols(size) for size in (*updates.shape, *scatter.shape))
        if known and nbytes(updates) > 2 * nbytes(scatter) + nbytes(other):
            return None  # so many are added that a gather for each costs more than the dense sum
        select: dict[str, Node] = {}
        if (
            match(SELECT, back, select) and splat(select["none"]) == 0
        ):  # what is not added is not multiplied either: 0 * inf
            product = call("where", select["kept"], select["value"] * new[updates], select["none"])
        else:
            product = back * new[updates]
        for mask in inside:
            product = call("where", spread(mask, updates.shape), product, full(0, product))
        return call(
            "sum", product, axis=tuple(a for a, to in enumerate(axes) if to is None or to in root.attrs["axis"])
        )
    return None


@dataclass(frozen=True)
class _Chain:
    """A scatter below a reduction, through ops that are linear in it and keep its scattered axis.

    :param root: the reduction over kept axes.  :param how: how the scatter scatters.
    :param axis: the scattered axis as an axis of root's result.
    :param path: from the reduction down to the scatter.
    :param outer: the graph's reduction, if that sums the scattered axis too.
    """

    root: Node
    scatter: Node
    how: Scatters
    path: tuple[Node, ...]
    axis: int
    outer: Node


def _reduce_before_scatter(graph: Graph) -> Graph:
    """sum_cols(a * scatter_add(i, u))  ->  scatter_add(i, sum_cols(gather(a, i) * u))"""
    if not _scatters(graph):
        return graph
    uses = Uses(graph)
    chains = _dissolving([chain for node in graph.nodes for chain in _scatters_below(node)], uses)
    if not chains:
        return graph
    new: dict[Node, Node] = {}
    return graph.rewrite(
        lambda node, operands: _scattered_last(chains[node], uses, new) if node in chains else None, new
    )


def _dissolving(chains: list[_Chain], uses: Uses) -> dict[Node, _Chain]:
    """One chain per reduction: those whose values all become dead once all of them are rewritten."""
    while True:
        gone = {
            (node, user)
            for chain in chains
            for user, node in zip((chain.outer, *chain.path[1:]), chain.path[1:], strict=False)
        }
        kept = [
            c
            for c in chains
            if not any(n in uses.outputs or any((n, user) not in gone for user in uses.of[n]) for n in c.path[1:])
        ]
        first: dict[Node, _Chain] = {}
        for chain in kept:
            first.setdefault(chain.outer, chain)
        if len(first) == len(chains):
            return first
        chains = list(first.values())


def _scatters_below(root: Node) -> list[_Chain]:
    if (
        not isinstance(getattr(root.op, "lower", None), Reduction)
        or root.op.multilinear is None
        or root.op.replace_axis is None
    ):
        return []
    chains, visits = [], 0
    pending: list[tuple[Node, ...]] = [(root,)]
    while pending and visits < MOST:
        path, visits = pending.pop(), visits + 1
        node = path[-1]
        if (how := access(node, Scatters)) is not None and node is not root:
            chain = _chain(path, how)
            chains += [chain] if chain is not None else []
        elif len(path) < DEEPEST:
            inner = [
                o
                for k, o in enumerate(node.operands)
                if len(positions(node, o)) == 1 and homogeneous(node, k) is not None
            ]
            pending += [(*path, o) for o in reversed(inner)]
    return chains


def _chain(path: tuple[Node, ...], how: Scatters) -> _Chain | None:
    root, scatter, axis = path[0], path[-1], how.axis
    for below, above in zip(reversed(path), reversed(path[1:-1]), strict=False):
        known = homogeneous(above, positions(above, below)[0])
        moved = None if known is None else known[axis]
        if moved is None or not same(above.shape[moved], below.shape[axis]):
            return None
        axis = moved
    if sums(root) and axis in root.attrs["axis"]:  # the columns first, then what is left of the scattered axis
        columns = tuple(a for a in root.attrs["axis"] if a != axis)
        if not columns:
            return None
        inner = call("sum", *root.operands, axis=columns)
        return _Chain(inner, scatter, how, (inner, *path[1:]), axis - sum(c < axis for c in columns), root)
    known = homogeneous(root, positions(root, path[1])[0])
    kept = None if known is None else known[axis]
    return None if kept is None else _Chain(root, scatter, how, path, kept, root)


def _scattered_last(chain: _Chain, uses: Uses, new: dict[Node, Node]) -> Node | None:
    scatter, how = chain.scatter, chain.how
    indices, updates, size = scatter.operands[how.indices], scatter.operands[how.updates], scatter.shape[how.axis]
    read: dict[Node, Node] = {}

    def leaf(node: Node, axis: int) -> Node:
        if node is chain.scatter:
            return new[updates]
        read[node] = call("gather", new[node], new[indices], axis=axis, oob=how.oob)
        return read[node]

    def opens(node: Node) -> bool:
        if any(node is step for step in chain.path) or moves(node):
            return node is not chain.scatter
        if not isinstance(node.op, Primitive) or not isinstance(node.op.lower, Expr):
            return False
        return (
            splat(node) is not None
            or uses.single(node)
            or sum(nbytes(_stored(o)) for o in node.operands) < nbytes(node)
        )

    reduced = replace_axis(chain.root, chain.axis, indices.shape, leaf, opens, lambda node: new[node])
    known = not any(symbols(size) for size in (*indices.shape, size))
    if known and sum(nbytes(n) for n in read.values()) > 2 * nbytes(chain.scatter) + sum(nbytes(n) for n in read):
        return None  # so many rows are added that reading the table's rows for each costs more than the dense sum
    whole = call("scatter_add", new[indices], reduced, size=size, **{**how.attrs, "axis": chain.axis})
    return whole if chain.outer is chain.root else call("sum", whole, axis=chain.axis)


def _stored(node: Node) -> Node:
    """The value behind ops that only move or convert."""
    while moves(node) or converts(node):
        (node,) = node.operands
    return node


# -- (c), towards the uses; towards the inputs it is part of hoist_scales ----------------------------------------------


def _scale_after_scatter(graph: Graph, variation: VaryingAxes) -> Graph:
    """scatter_add(i, gather(s, i) * u)  ->  s[:,None] * scatter_add(i, u), where fewer bytes are moved so"""
    if not _scatters(graph):
        return graph

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        scatter = access(node, Scatters)
        if scatter is None:
            return None
        indices, updates = operands[scatter.indices], operands[scatter.updates]
        factors: dict[str, Node] = {}
        if not match(MUL, updates, factors) or 2 * nbytes(node) >= elements(indices.shape) * node.dtype.itemsize:
            return None
        axis = scatter.axis
        for scale, rest in ((factors["y"], factors["x"]), (factors["x"], factors["y"])):
            if not variation.of(scale) <= set(range(axis, axis + indices.rank)):
                continue
            source = scale
            while moves(source):
                (source,) = source.operands
            gather = access(source, Gathers)
            if (
                gather is not None
                and source.operands[gather.indices] is indices
                and source.operands[gather.table].rank == 1
                and gather.oob == scatter.oob
            ):
                whole = call("scatter_add", indices, rest, size=node.shape[axis], **scatter.attrs)
                column = source.operands[gather.table].reshape(
                    *(node.shape[a] if a == axis else 1 for a in range(node.rank))
                )
                return call(
                    "where", call("eq", whole, full(0, whole)), whole, whole * column
                )  # rows that nothing was added to stay 0
        return None

    return graph.rewrite(rule)
