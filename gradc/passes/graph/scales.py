"""Rule (d): a scale passes every op whose record says that it is linear, along axes on which the scale is constant.

A scale is a factor, a divisor or a minus sign that varies along fewer axes than what it is applied to.
:func:`sink_scales` moves it towards its uses (past a sum: N multiplications instead of N x D; past a matrix product to
its result or to its other operand), :func:`hoist_scales` towards the inputs (before a broadcast, to an operand of a
matrix product, into the load of a scatter).  Each moves a scale only to where strictly fewer elements are multiplied,
unknown sizes taken as nominal, so the two never undo each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, known_nonnegative, same
from ...ir.graph import Graph, again
from ...ir.node import Node, Note, call
from ...ir.op import Expr, Library, Reduction, Scatter
from ...ir.pattern import Var, match, op, splat
from ...ir.properties import Scatters, access
from ...ir.types import BF16, F16, DType
from ...ir.walk import operands as operands_of
from ...ir.walk import positions, reachable
from ...ops.rules import converted, full, spread
from .known_values import value_where
from .replace_axis import VaryingAxes, converts, count, elements, moves, nbytes, placed

MUL, DIV, NEG, DIM = Var("x") * Var("y"), Var("x") / Var("y"), -Var("x"), op("dim")
DEEPEST, MOST = 16, 64
_RANGE = {"f16": 5, "bf16": 8, "f32": 8, "f64": 11}  # exponent bits


class Uses:
    """Who reads what in a graph."""

    def __init__(self, graph: Graph):
        self.outputs = {node for _, node in graph.outputs}
        self.of = graph.users

    def single(self, node: Node) -> bool:
        """Whether there is one reader, which reads it once."""
        users = self.of[node]
        return node not in self.outputs and len(users) == 1 and len(positions(users[0], node)) == 1


def homogeneous(node: Node, operand: int) -> tuple[int | None, ...] | None:
    """The axis map of an operand if the op is linear in it with the others held: f(x * s) = f(x) * s; else None.

    A cast is, where its result's range is no smaller: f32 -> bf16 rounds elsewhere (REAL), f32 -> f16 might overflow.
    """
    if node.op.multilinear is None or not node.dtype.is_float or not node.operands[operand].dtype.is_float:
        return None
    try:
        maps: Mapping[int, tuple[int | None, ...]] = node.op.multilinear(node)
    except TypeRuleError:  # a reshape of no elements has no axes to follow
        return None
    if operand not in maps or (node.op.linear and not all(splat(node.operands[k]) == 0 for k in maps if k != operand)):
        return None
    if converts(node) and not _RANGE.get(node.operands[operand].dtype.name, 99) <= _RANGE.get(node.dtype.name, 0):
        return None
    return maps[operand]


@dataclass(frozen=True)
class Scale:
    """A factor that is being moved.

    :param kind: mul, div or neg.  :param value: size 1 but along its own axes; None for neg.
    :param axes: where the axes of ``value`` stand in the scaled value.  :param source: the node it was split from.
    """

    kind: str
    value: Node | None
    axes: tuple[tuple[int, int], ...]
    source: Node

    def onto(self, node: Node) -> Node:
        """``node`` scaled, computed in the wider of the two dtypes."""
        if self.value is None:
            return -node
        s = placed(self.value, dict(self.axes), node.rank)
        wide: DType = max((node.dtype, s.dtype), key=lambda d: d.bits).compute
        return converted(call(self.kind, converted(node, wide), spread(converted(s, wide), node.shape)), node.dtype)


@dataclass(frozen=True)
class _Split:
    """A node as ``core`` (an operand) times a scale (another operand, or none for a minus sign)."""

    kind: str
    core: int
    scale: int | None
    axes: frozenset[int]


def splits(node: Node, variation: VaryingAxes) -> list[_Split]:
    """The decompositions of a node into an operand times a scale."""
    if not node.dtype.is_float or not any(size != 1 for size in node.shape):
        return []
    if match(NEG, node, {}):
        return [_Split("neg", 0, None, frozenset())]
    ways = [("mul", 0, 1), ("mul", 1, 0)] if match(MUL, node, {}) else [("div", 0, 1)] if match(DIV, node, {}) else []
    real = {a for a, size in enumerate(node.shape) if size != 1}
    candidates = [_Split(kind, core, scale, variation.of(node.operands[scale])) for kind, core, scale in ways]
    return sorted(
        (s for s in candidates if s.axes < real and splat(node.operands[s.core]) is None), key=lambda s: len(s.axes)
    )


# -- towards the outputs -----------------------------------------------------------------------------------------------


def _zero_stays(split: _Split, node: Node) -> tuple[bool, bool]:
    """Whether 0 scaled is 0: (for certain, as far as sizes decide it); data may be infinite or NaN, and a size that
    divides may be 0.
    """
    if split.scale is None:
        return True, True
    scale = node.operands[split.scale]
    while splat(scale) is None and (moves(scale) or converts(scale)):
        (scale,) = scale.operands
    value = splat(scale)
    if value is not None:
        known = math.isfinite(value) and (split.kind == "mul" or value != 0)
        return known, known
    if match(DIM, scale, {}):
        known = split.kind == "mul" or known_nonnegative(scale.attrs["size"] - 1)
        return known, known
    return False, True


@dataclass(frozen=True)
class _Step:
    """How a scale passes a user: to ``axes`` of its result, or to its operand ``other``."""

    axes: dict[int, int]
    other: int | None = None


@dataclass
class _Look:
    """A search for the cheapest places among the users of one scaled value.

    :param stops: the dtypes rounding to which it does not pass.
    """

    uses: Uses
    zero_stays: tuple[bool, bool]
    stops: Collection[DType] = ()
    seen: set[Node] = field(default_factory=set)

    def best(self, node: Node, axes: dict[int, int], depth: int = DEEPEST) -> tuple[int, dict[tuple[Node, int], _Step]]:
        """The number of multiplications if the scale is at ``node``, and the steps to take from there."""
        here, users = count(node), self.uses.of[node]
        if node in self.uses.outputs or not users or not depth:
            return here, {}
        total = 0
        steps: dict[tuple[Node, int], _Step] = {}
        for user in users:
            read = positions(user, node)
            if user in self.seen or len(self.seen) > MOST or len(read) != 1:
                return here, {}
            self.seen.add(user)
            (operand,) = read
            options = []
            stopped = user.dtype in self.stops and converts(user)
            through = None if stopped else _through(user, operand, axes, self.zero_stays)
            if through is not None:
                cost, more = self.best(user, through, depth - 1)
                options.append((cost, {(user, operand): _Step(through), **more}))
            across = _across(user, operand, axes)
            if across is not None and across.other is not None:
                options.append((count(user.operands[across.other]), {(user, operand): across}))
            if not options:
                return here, {}
            cost, more = min(options, key=lambda option: option[0])
            total += cost
            steps |= more
            if total >= here:
                return here, {}
        return total, steps


def _through(user: Node, operand: int, axes: Mapping[int, int], zero_stays: tuple[bool, bool]) -> dict[int, int] | None:
    if isinstance(getattr(user.op, "lower", None), Scatter):
        return None  # its load is the cheapest place
    maps = homogeneous(user, operand)
    if maps is None:
        return None
    certain, sized = zero_stays
    if not certain and user.op.fills and user.attrs.get("oob") != "error":
        return None  # what it masks would be multiplied
    if not sized and any(
        to is None and not known_nonnegative(n - 1) for n, to in zip(user.operands[operand].shape, maps, strict=True)
    ):
        return None  # a sum over nothing would be
    moved = {a: maps[at] for a, at in axes.items()}
    return None if None in moved.values() else {a: at for a, at in moved.items() if at is not None}


def _multiplies_narrow(node: Node) -> bool:
    """Whether it is a product that reads all of its operands as 16-bit floats, which one with a scale is no longer."""

    def read(operand: Node) -> Node:
        while moves(operand):
            operand = operand.operands[0]
        return operand.operands[0] if converts(operand) else operand

    return (
        isinstance(node.op, Library)
        and node.op.contraction
        and all(read(operand).dtype in (BF16, F16) for operand in node.operands)
    )


def _across(user: Node, operand: int, axes: Mapping[int, int]) -> _Step | None:
    """sum_k (x s)[m,k] y[k,n]  =  sum_k x[m,k] (s y)[k,n]"""
    if not isinstance(user.op, Library) or user.op.axes is None or homogeneous(user, operand) is None:
        return None
    if _multiplies_narrow(user):
        return None
    _, places, _ = user.op.axes(user)
    names = {a: places[operand][at].variable for a, at in axes.items()}
    for other, place in enumerate(places):
        variables = [i.variable for i in place]
        if (
            other != operand
            and homogeneous(user, other) is not None
            and all(n is not None and n in variables for n in names.values())
        ):
            return _Step({a: variables.index(n) for a, n in names.items()}, other)
    return None


def sink_scales(graph: Graph, variation: VaryingAxes, round_once: Collection[DType] = ()) -> Graph:
    """f(x * s)  ->  f(x) * s, where fewer elements are multiplied so

    :param variation: of the values of any graphs.
    :param round_once: a constant stays before a cast to one of these: what is multiplied after a product, the library
        that computes the product does not round.
    """
    uses = Uses(graph)
    plans: dict[Node, tuple[_Split, dict[tuple[Node, int], _Step]]] = {}
    for node in graph.nodes:
        best = count(node)
        for split in splits(node, variation):
            constant = split.scale is not None and splat(node.operands[split.scale]) is not None
            look = _Look(uses, _zero_stays(split, node), round_once if constant else ())
            cost, steps = look.best(node, {a: a for a in split.axes})
            if cost < best and steps:
                best, plans[node] = cost, (split, steps)
    return _sunk(graph, plans, variation) if plans else graph


def _sunk(
    graph: Graph, plans: Mapping[Node, tuple[_Split, Mapping[tuple[Node, int], _Step]]], variation: VaryingAxes
) -> Graph:
    """One sweep: values are rebuilt without their scales, which stay in ``waiting`` until a step applies them."""
    new: dict[Node, Node] = {}
    waiting: dict[Node, list[Scale]] = {}
    for node in graph.nodes:
        operands, onwards, over = [], [], []
        for k, operand in enumerate(node.operands):
            value = new[operand]
            for scale in waiting.get(operand, ()):
                step = plans[scale.source][1].get((node, k))
                if step is None:
                    value = scale.onto(value)
                elif step.other is None:
                    onwards.append(replace(_past(scale, node, k), axes=tuple(step.axes.items())))
                else:
                    over.append((step.other, replace(scale, axes=tuple(step.axes.items()))))
            operands.append(value)
        for other, scale in over:
            operands[other] = scale.onto(operands[other])
        new[node] = again(node, tuple(operands))
        if node in plans:
            split = plans[node][0]
            narrow = None if split.scale is None else variation.narrow(operands[split.scale], split.axes)
            if narrow is not None or split.scale is None:
                new[node] = operands[split.core]
                onwards.append(Scale(split.kind, narrow, tuple((a, a) for a in sorted(split.axes)), node))
        if onwards:
            waiting[node] = onwards
    return _finished(graph, new, waiting)


def _past(scale: Scale, user: Node, operand: int) -> Scale:
    """The scale behind a user that adds up along axes of an operand.  Where one of these has no elements the sum is 0,
    and a scale that was itself computed along it (the sum of a softmax, 0) is 1.
    """
    maps = homogeneous(user, operand) or ()
    summed = [n for n, to in zip(user.operands[operand].shape, maps, strict=False) if to is None]
    unsure = [n for n in summed if not known_nonnegative(n - 1) and not any(same(n, m) for m in user.shape)]
    value = scale.value
    if value is None or not unsure:
        return scale
    reductions = [at for at in reachable([value], operands_of) if isinstance(getattr(at.op, "lower", None), Reduction)]
    for n in unsure:
        of_none = {at: identity for at in reductions if (identity := _of_none(at, n)) is not None}
        least = value_where(value, of_none) if of_none else np.float64(1)
        if least is None or not np.isfinite(least) or (scale.kind == "div" and least == 0):
            count = call("dim", size=n)
            none = spread(call("eq", count, full(0, count)), value.shape)
            value = call("where", none, full(1, value), value)
    return replace(scale, value=value)


def _of_none(reduction: Node, size: Size) -> float | None:
    """What it is of no elements, if it goes along an axis of a size."""
    axis, (x, *_) = reduction.attrs["axis"], reduction.operands
    along = axis if isinstance(axis, tuple) else (axis,)
    identities = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
    return identities.get(reduction.op.lower.combine) if any(same(x.shape[a], size) for a in along) else None


def _finished(graph: Graph, new: Mapping[Node, Node], waiting: Mapping[Node, Sequence[Scale]]) -> Graph:
    full = dict(new)
    for node, scales in waiting.items():
        for scale in scales:
            full[node] = scale.onto(full[node])
    notes: dict[Node, Note] = {full.get(n, n): note for n, note in graph.notes.items()}
    return replace(graph, outputs=tuple((name, full[n]) for name, n in graph.outputs), notes=notes)


# -- towards the inputs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A place below a scaled value.

    :param cost: elements multiplied there.
    :param path: ``(node, operand)`` from the scaled value down; the last operand is scaled.
    :param axes: as in :class:`Scale`.
    :param read: how the scatter at the end of the path scatters, if the scale is gathered for its rows.
    """

    cost: float
    path: tuple[tuple[Node, int], ...]
    axes: dict[int, int]
    read: Scatters | None = None


def hoist_scales(graph: Graph, variation: VaryingAxes) -> Graph:
    """broadcast(x) * s  ->  broadcast(x * s); (a @ b) * s  ->  (a * s) @ b; s[:,None] * scatter_add(i, u)  ->
    scatter_add(i, gather(s, i) * u)
    """
    uses = Uses(graph)
    new: dict[Node, Node] = {}

    def rule(node: Node, operands: tuple[Node, ...]) -> Node | None:
        best: tuple[_Place, _Split] | None = None
        for split in splits(node, variation):
            value = node.operands[split.core]
            if split.kind == "neg" or splat(node.operands[split.scale or 0]) is not None or not uses.single(value):
                continue
            place = _lowest(value, {a: a for a in split.axes}, uses, node)
            if place.path and place.cost < (best[0].cost if best else count(node)):
                best = place, split
        return _hoisted(*best, node, new, variation) if best is not None else None

    return graph.rewrite(rule, new)


def _lowest(top: Node, axes: dict[int, int], uses: Uses, node: Node) -> _Place:
    best = _Place(count(node), (), axes)
    pending: list[tuple[Node, dict[int, int], tuple[tuple[Node, int], ...]]] = [(top, axes, ())]
    visits = 0
    while pending and visits < MOST:
        at, axes, path = pending.pop()
        visits += 1
        if path and count(at) < best.cost:
            best = _Place(count(at), path, axes)
        if not (uses.single(at) and len(path) < DEEPEST):
            continue
        if (how := access(at, Scatters)) is not None:
            if inside := _into_scatter(at, how, axes, path):
                return inside
            continue
        if not (isinstance(at.op, Library) or moves(at) or isinstance(getattr(at.op, "lower", None), Expr)):
            continue
        if _multiplies_narrow(at):
            continue
        for k, operand in enumerate(at.operands):
            maps = homogeneous(at, k)
            if maps is not None and all(
                i in maps and same(operand.shape[maps.index(i)], at.shape[i]) for i in axes.values()
            ):
                pending.append((operand, {a: maps.index(i) for a, i in axes.items()}, (*path, (at, k))))
    return best


def _into_scatter(
    scatter: Node, how: Scatters, axes: Mapping[int, int], path: tuple[tuple[Node, int], ...]
) -> _Place | None:
    """Rule (c), towards the inputs, where reading the scale once per row moves fewer bytes than another pass over the
    result."""
    indices = scatter.operands[how.indices]
    at, wider = how.axis, indices.rank - 1
    rows = elements(indices.shape) if at in axes.values() else 1
    if rows * scatter.dtype.itemsize >= 2 * nbytes(scatter):
        return None
    return _Place(
        -1,
        (*path, (scatter, how.updates)),
        {a: i if i <= at else i + wider for a, i in axes.items()},
        how if at in axes.values() else None,
    )


def _hoisted(place: _Place, split: _Split, node: Node, new: Mapping[Node, Node], variation: VaryingAxes) -> Node | None:
    assert split.scale is not None
    value = variation.narrow(new[node.operands[split.scale]], split.axes)
    if value is None:
        return None
    axes, read = place.axes, place.read
    last, k = place.path[-1]
    if read is not None:
        indices = new[last.operands[read.indices]]
        own = next(a for a, i in axes.items() if i == read.axis)
        value = call("gather", value, indices, axis=own, oob=read.oob)
        rank = indices.rank
        axes = {(a if a < own else a + rank - 1): i for a, i in axes.items() if a != own} | {
            own + r: read.axis + r for r in range(rank)
        }
    scale = Scale(split.kind, value, tuple(sorted(axes.items())), node)
    result = scale.onto(new[last.operands[k]])
    for at, k in reversed(place.path):
        result = again(at, tuple(result if i == k else new[o] for i, o in enumerate(at.operands)))
    return converted(result, node.dtype)
