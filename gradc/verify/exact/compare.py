"""Tests the equality of two graphs in exact algebra."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import GradcError, InternalError, InvalidProblem
from ...ir.dims import evaluate as evaluate_size
from ...ir.graph import Graph
from ...ir.node import Node
from ...ir.op import Alias
from ...ir.walk import reachable
from ...ops.shapes.canonical import canonical
from .evaluate import evaluate
from .field import Array
from .values import ExactArray

_SIZES = (5, 4, 6, 3, 7, 2, 8, 1, 12, 16)
_DRAWN = {
    "f64": (10, 2),
    "f32": (8, 2),
    "f16": (6, 2),
    "bf16": (6, 2),
    "f8e4m3": (2, 4),
    "f8e5m2": (1, 4),
    "f4e2m1": (1, 2),
}
"""dtype -> (fractional bits, bound) of the random inputs."""


def draw(graph: Graph, dims: Mapping[str, int], seed: int = 0, outside: bool = False) -> dict[str, Array]:
    """Random inputs: small dyadic rationals that the dtype holds exactly; valid indices; otherwise small ints.

    :param outside: indices, but those that never decrease, lie on both sides of their bounds, too.
    """
    bounds = _index_bounds(graph, dims)
    ascending = {
        graph.input_name(v)
        for n in graph.opened.nodes
        for k in n.op.ascending
        if (v := n.operands[k]).op.name == "input"
    }
    out: dict[str, Array] = {}
    array: Array
    for node in graph.inputs:
        name, dtype, shape = graph.input_name(node), node.dtype, node.type.concrete(dims)
        rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        if dtype.name == "e8m0":
            array = 2.0 ** rng.integers(-3, 4, shape)
        elif dtype.is_float:
            bits, largest = _DRAWN[dtype.name]
            array = np.asarray(rng.integers(-(largest << bits) + 1, largest << bits, shape) / 2.0**bits)
        elif name in bounds:
            most = max(bounds[name], 1)
            beyond = most + 1 if outside and name not in ascending else 0
            array = rng.integers(max(-beyond, dtype.range[0]), min(most + beyond, dtype.range[1] + 1), shape)
            if name in ascending:
                array = np.where(np.arange(array.size) == 0, 0, np.sort(array))
        else:
            low, high = (0, 1) if dtype.kind == "b" else dtype.range
            array = rng.integers(max(low, -8), min(high, 8) + 1, shape)
        out[name] = np.asarray(array).astype(dtype.np)
    return out


def _index_bounds(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """For each input that is used as an index, directly or after integer ops, the size that it indexes."""
    bounds: dict[str, int] = {}
    for node in graph.opened.nodes:
        for k, bound in node.op.indices.items():
            size = evaluate_size(bound(node), dims)
            for value in reachable([node.operands[k]], lambda n: n.operands if n.dtype.is_integer else ()):
                if value.op.name == "input" and value.dtype.is_integer:
                    name = graph.input_name(value)
                    bounds[name] = min(size, bounds.get(name, size))
    return bounds


def bindings(graphs: Sequence[Graph], given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Small values of the dims, distinct if possible, that satisfy the assumptions and give valid shapes."""
    given = given or {}
    names = [n for n in dict.fromkeys(n for g in graphs for n in g.dims) if n not in given]
    facts = [fact for g in graphs for fact in g.assumptions]
    nodes = list(dict.fromkeys(n for g in graphs for n in g.opened.nodes))
    orders = [_SIZES[i % 4 :] + _SIZES[: i % 4] for i in range(len(names))]
    for different, sizes in (
        (d, s) for d in (True, False) for s in itertools.islice(itertools.product(*orders), 10000)
    ):
        bound = {**given, **dict(zip(names, sizes, strict=True))}
        if different and len(set(sizes)) < min(len(sizes), len(_SIZES)):
            continue
        if not any(fact.fails(bound) for fact in facts) and all(_fits(n, bound) for n in nodes):
            return bound
    raise InvalidProblem(f"no small sizes fit {graphs[0].name}<{','.join(names)}>; give dims=")


def _fits(node: Node, dims: Mapping[str, int]) -> bool:
    """Whether a node's shape is valid for these sizes; a reshape's must have as many elements as its operand's."""
    try:
        shape = node.type.concrete(dims)
        same = not isinstance(getattr(node.op, "lower", None), Alias) or math.prod(shape) == math.prod(
            node.operands[0].type.concrete(dims)
        )
    except GradcError:
        return False
    return same and min(shape, default=0) >= 0


def equal(
    before: Graph,
    after: Graph,
    licence: str = "BITS",
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    *,
    stage: str = "",
    outside: bool = False,
) -> None:
    """Requires that two graphs are equal: they have equal outputs in exact algebra on random inputs.

    :param licence: what a pass may change: nothing (``BITS``), rounding (``REAL``), anything (``FAST``: not compared).
    :param dims: sizes for some symbols; the others get small ones.
    :param stage: the pass that made ``after``, for errors.
    :param outside: as in :func:`draw`.
    :raises InternalError: an output differs; it is named with the first position.
    """
    if licence == "FAST" or before == after:
        return
    _same_interface(before, after, f"{stage}: " if stage else "")
    bound = bindings((before, after), dims)
    inputs = draw(before, bound, seed, outside)
    wrong = ""
    for folding in (True, False):
        one, other = (
            _evaluated(g, {n: inputs[n] for n in g.input_names}, bound, licence, folding) for g in (before, after)
        )
        difference = _first_difference(before, one, other)
        if not difference:
            return
        wrong = wrong or difference
    made_by = f"{stage}: " if stage else ""
    sizes = "".join(f"{k}={v}, " for k, v in bound.items())
    raise InternalError(f"{made_by}{after.name} no longer means the same under {licence}: {wrong} ({sizes}seed {seed})")


def require_declared(graph: Graph, dims: Mapping[str, int] | None = None) -> None:
    """Requires that each node is the data movement that its record declares (:mod:`gradc.ir.properties`), also at
    positions that are outside.

    :param dims: as in :func:`equal`.
    :raises InternalError: a node is not; its op is named, with the first position that differs.
    """
    for node in graph.nodes:
        declared = _declared(node)
        if declared is not node:
            before, after = (graph.with_outputs([(node.op.name, n)]) for n in (node, declared))
            stage = f"the data movement that op {node.op.name} declares"
            equal(before, after, dims=dims, stage=stage)
            if node.op.indices and not _is_checked(node, declared):
                equal(before, after, dims=dims, stage=f"{stage}, at positions outside", outside=True)


def _is_checked(node: Node, declared: Node) -> bool:
    """Whether positions outside are an error, of a node and of what it declares.  They are checked if a node has the
    attribute ``oob="error"``, and else mean what its kernel makes of them.

    :raises InternalError: they are an error of one of the two alone.
    """
    own, says = node.attrs.get("oob"), declared.attrs["oob"]
    if (own == "error") != (says == "error"):
        raise InternalError(
            f"the data movement that op {node.op.name} declares has oob={says!r}, but the positions are"
            f" {'' if own == 'error' else 'not '}checked: the op's own attribute oob is {own!r}"
        )
    return bool(own == "error")


def _declared(node: Node) -> Node:
    try:
        return canonical(node)
    except GradcError as error:
        raise InternalError(f"op {node.op.name} declares a data movement that cannot be: {error}") from error


def _evaluated(
    graph: Graph, inputs: Mapping[str, Array], dims: Mapping[str, int], licence: str, folding: bool
) -> dict[str, ExactArray]:
    try:
        return evaluate(graph, inputs, dims, licence, folding=folding)
    except GradcError as error:
        raise InternalError(f"{graph.name} cannot be evaluated: {error}") from error
    except IndexError as error:  # of an op's reference, which NumPy raises where it does not expect a position
        raise InternalError(f"{graph.name} cannot be evaluated: IndexError: {error}") from error


def _same_interface(before: Graph, after: Graph, made_by: str) -> None:
    known = {before.input_name(n): n.type for n in before.inputs}
    for node in after.inputs:
        if known.get(after.input_name(node)) != node.type:
            raise InternalError(
                f"{made_by}{after.name} has an input {after.input_name(node)}: {node.type} that {before.name} has not"
            )
    for name, node in before.outputs:
        if name not in after.output_names:
            raise InternalError(f"{made_by}{after.name} has lost the output {name}")
        if after.output(name).dtype is not node.dtype or after.output(name).rank != node.rank:
            raise InternalError(f"{made_by}the output {name} was {node.type} and is {after.output(name).type}")


def _first_difference(graph: Graph, before: Mapping[str, ExactArray], after: Mapping[str, ExactArray]) -> str:
    for name in graph.output_names:
        one, other = before[name], after[name]
        if one.shape != other.shape:
            return f"the output {name} had the shape {one.shape} and has {other.shape}"
        differs = one.differs(other)
        if differs.any():
            place: Any = np.unravel_index(int(differs.reshape(-1).argmax()), one.shape)
            where = ",".join(map(str, place))
            count = f"{int(differs.sum())} of {differs.size}"
            return (
                f"the output {name} differs at [{where}] ({count}): "
                f"it was {one.shown(place)} and is {other.shown(place)}"
            )
    return ""
