"""differentiate: a graph and the inputs to differentiate by -> the joint graph of values and gradients.

Reverse mode in the IR: vjps create nodes, so that gradients are optimised like any graph and can be differentiated
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .errors import InternalError, InvalidProblem, NotDifferentiable, TypeRuleError
from .ir.dims import assuming, same
from .ir.graph import Graph, input_node, open_composites, parts_of
from .ir.lexer import suffixed
from .ir.node import Node, Note, call, made_by, maker
from .ir.op import DISCRETE, ZERO, Composite
from .ir.types import F32, F64, DType
from .ir.walk import positions, reachable, topological
from .ops.rules import converted, full


def differentiate(graph: Graph, wrt: Sequence[str], *, unused: str = "error") -> Graph:
    """The joint graph: its outputs are those of ``graph`` and the gradient ``d.NAME`` for each of ``wrt``; its inputs
    are those of ``graph`` and the cotangents ``d.OUTPUT``.

    A joint graph can be differentiated again; a name that exists already gets another prefix: ``d.d.NAME``.

    A cotangent has its value's shape.  For a float it has the value's dtype; for an int, a bool or a float of at most 8
    bits (quantized values) it is f64 if a float op that reads the value computes in f64, else f32.

    :param unused: for an input that no differentiable path reaches, ``"zeros"`` gives a zero gradient and ``"error"``
        raises.
    :raises NotDifferentiable: a gradient does not exist; names the op that blocks it.
    :raises InvalidProblem: ``wrt`` has a name that is no input, or a name twice.
    """
    for name in wrt:
        if name not in graph.input_names:
            raise InvalidProblem(f"wrt names {name!r}; the inputs of {graph.name} are {', '.join(graph.input_names)}")
    if len(set(wrt)) != len(wrt):
        raise InvalidProblem(f"wrt names an input twice: {', '.join(wrt)}")
    graph = graph.numbered()
    with assuming(graph.assumptions), made_by("differentiate"):
        opened = open_composites(graph, lambda op: op.vjp is None and op.differentiable)
        # what is opened stands beside the user's values until decompose makes them one
        own = set(graph.nodes)
        notes = {n: note if note.by or n in own else replace(note, by=maker()) for n, note in opened.notes.items()}
        outputs = [(name, node) for name, node in opened.outputs if node.dtype.is_float]
        cotangent_names, gradient_names = joint_names(graph, wrt)
        cotangents = {name: input_node(cotangent_names[name], node.type) for name, node in outputs}
        if not outputs:
            raise NotDifferentiable(
                f"{graph.name} has no float output: {', '.join(f'{n}: {v.type}' for n, v in graph.outputs)}"
            )
        contributions: dict[Node, list[Node]] = {}
        for name, node in outputs:
            contributions.setdefault(node, []).append(cotangents[name])
        wanted = {opened.input(name) for name in wrt}
        needed = set(reachable(wanted, opened.users.__getitem__))  # the values that depend on an input of wrt
        gradients = _sweep([node for _, node in outputs], contributions, needed, notes)
        results = [(gradient_names[name], _result(opened, name, gradients, unused)) for name in wrt]
    return Graph(
        name=suffixed(graph.name, "_joint"),
        inputs=(*graph.inputs, *(cotangents[name] for name, _ in outputs)),
        outputs=(*graph.outputs, *results),
        assumptions=graph.assumptions,
        notes={**notes, **graph.notes},
        defaults=graph.defaults,
    ).numbered()


def joint_names(graph: Graph, wrt: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(name of each float output's cotangent, name of the gradient of each of ``wrt``) in the joint graph."""
    return _new_names((name for name, node in graph.outputs if node.dtype.is_float), graph.input_names), _new_names(
        wrt, (*graph.output_names, *graph.input_names)
    )


def primal_outputs(joint: Graph) -> list[str]:
    """The outputs of a joint graph that are no gradients: those whose cotangents are its last inputs.

    What begins with ``d.`` may be a name of the user's.
    """
    for count in range(len(joint.outputs) - 1, 0, -1):
        floats = [name for name, node in joint.outputs[:count] if node.dtype.is_float]
        own = joint.input_names[: len(joint.inputs) - len(floats)]
        if floats and joint.input_names == (*own, *_new_names(floats, own).values()):
            return list(joint.output_names[:count])
    return [name for name in joint.output_names if not name.startswith("d.")]


def _new_names(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """``d.NAME`` for each name, with further ``d.`` prefixes until it is unused."""
    known, new = set(taken), {}
    for name in names:
        new[name] = f"d.{name}"
        while new[name] in known:
            new[name] = f"d.{new[name]}"
        known.add(new[name])
    return new


def tangent_dtype(node: Node, contributions: Sequence[Node]) -> DType:
    """The dtype of a value's cotangent, as :func:`differentiate` defines it."""
    if node.dtype.has_tangent:
        return node.dtype
    return F64 if any(c.dtype is F64 for c in contributions) else F32


def _sweep(
    roots: Sequence[Node], contributions: dict[Node, list[Node]], needed: set[Node], notes: dict[Node, Note]
) -> Mapping[Node, Node]:
    """The reverse sweep: the cotangent of every value that has one.

    :param notes: is extended by the notes of new nodes: the composite whose gradient they belong to.
    """
    gradients: dict[Node, Node] = {}
    for node in reversed(topological(roots)):
        if node not in needed or node not in contributions:
            continue
        parts = contributions[node]
        dtype = tangent_dtype(node, parts)
        wide = dtype.compute if len(parts) > 2 else dtype  # 16-bit contributions accumulate in f32, rounded once
        total = converted(parts[0], wide)
        for part in parts[1:]:
            total = total + converted(part, wide)
        gradients[node] = total = converted(total, dtype)
        if not node.operands or not any(o in needed for o in node.operands):
            continue
        if node.op.vjp is None:
            raise NotDifferentiable(
                f"'{node.op.name}' ({node.type}) lies between a wanted input and the output and has no vjp"
            )
        note = notes.get(node, Note())
        composite = node.op.name if isinstance(node.op, Composite) else note.composite
        gradient = f"{composite.removesuffix('_grad')}_grad" if composite else ""
        with parts_of(replace(note, composite=gradient), notes), made_by(node.op.name):
            entries = _vjp(node, total)
        if len(entries) != len(node.operands):
            raise InternalError(
                f"the vjp of {node.op.name} gave {len(entries)} entries for {len(node.operands)} operands"
            )
        for operand, entry in zip(node.operands, entries, strict=True):
            if entry is ZERO or entry is DISCRETE or operand not in needed:
                continue
            if len(entry.shape) == len(operand.shape) and all(map(same, entry.shape, operand.shape)):
                entry = call("broadcast_to", entry, operand.shape)  # where an assumption equates two sizes
            if (
                entry.shape != operand.shape
                or not entry.dtype.is_float
                or (operand.dtype.has_tangent and entry.dtype is not operand.dtype)
            ):
                raise InternalError(
                    f"the vjp of {node.op.name} gave {entry.type} for an operand of type {operand.type}"
                )
            contributions.setdefault(operand, []).append(entry)
    return gradients


def _vjp(node: Node, total: Node) -> tuple[Any, ...]:
    """The contributions of a node with cotangent ``total`` to the cotangents of its operands."""
    assert node.op.vjp is not None
    try:
        return tuple(node.op.vjp(total, node, *node.operands, **node.attrs))
    except TypeRuleError as error:
        if node.dtype.has_tangent:
            raise
        if node.dtype.is_float:  # arithmetic in a narrow float: its vjp is written in that dtype
            return tuple(node.op.vjp(converted(total, node.dtype), node, *node.operands, **node.attrs))
        raise NotDifferentiable(
            f"'{node.op.name}' ({node.type}) lies between a wanted input and the output and passes no derivative: it"
            f" computes in {node.dtype}"
        ) from error


def _result(graph: Graph, name: str, gradients: Mapping[Node, Node], unused: str) -> Node:
    node = graph.input(name)
    if node in gradients:
        return gradients[node]
    if unused == "zeros":
        return full(0.0, node, node.dtype if node.dtype.has_tangent else F32)
    users = [n for n in graph.nodes if positions(n, node)]
    if not users:
        raise NotDifferentiable(
            f"no output of {graph.name} depends on {name!r}; unused='zeros' gives it a zero gradient"
        )
    blocking = _blocking(graph, node, gradients)
    raise NotDifferentiable(
        f"'{blocking.op.name}' ({blocking.type}) lies between {name!r} and every float output and passes no derivative;"
        " unused='zeros' gives a zero gradient"
    )


def _blocking(graph: Graph, node: Node, gradients: Mapping[Node, Node]) -> Node:
    """The first op on the path from ``node`` that has a gradient but does not propagate it; else the last op."""
    reached, last = {node}, node
    for user in graph.nodes:
        if any(o in reached for o in user.operands):
            if user in gradients:
                return user
            reached.add(user)
            last = user
    return last
