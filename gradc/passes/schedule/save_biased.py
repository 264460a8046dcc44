"""save_biased: what is saved of a product with a bias to which gelu is applied is their sum."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...ir.graph import Graph, input_node, rebuild
from ...ir.node import Node, Note
from ...ir.op import Alias
from ...ir.types import DType
from ...ir.walk import topological
from ...ops.elementwise.activations import gelu
from ...ops.rules import converted
from ...targets.gpu import MATRIX_ALIGN
from ..graph.replace_axis import converts, moves
from .partition import Partition


def save_biased(parts: Partition, dtypes: Collection[DType]) -> Partition:
    """forward: return y=gelu(t + b), r=t;  backward: ... r + b  ->  forward: return y=gelu(t + b), r=t + b;  backward:
    ... r

    As many bytes, and the backward need not add again; but it is the sum that a library writes beside its gelu, and
    reads beside gelu's derivative (:mod:`gradc.passes.program.fuse_epilogues`).  Licence REAL: the sum is rounded where
    the product was.

    :param dtypes: of what is saved.
    """
    for residual in parts.residuals:
        if not residual.borrowed and residual.node.dtype in dtypes and _is_product(residual.node):
            parts = _with_sum(parts, residual.name)
    return parts


def _is_product(node: Node) -> bool:
    """Whether it is a product, rounded."""
    return converts(node) and bool(getattr(node.operands[0].op, "contraction", False))


def _with_sum(parts: Partition, name: str) -> Partition:
    (residual,) = (r for r in parts.residuals if r.name == name)
    given = next((node for node in parts.backward.inputs if parts.backward.input_name(node) == name), None)
    total = _sum_of(residual.node, parts.forward, name)
    again = _sum_of(given, parts.backward) if given is not None else None
    if total is None or given is None or again is None or not _is_fused(total, parts.forward):
        return parts
    if rebuild([again], {given: residual.node})[again] is not total:
        return parts
    saved = converted(total, residual.node.dtype)
    read = input_node(name, saved.type)
    outputs = tuple((own, saved if own == name else node) for own, node in parts.forward.outputs)
    notes = {**parts.forward.notes, saved: parts.forward.notes.get(total, Note())}
    forward = replace(parts.forward, outputs=outputs, notes=notes)
    new = rebuild((node for _, node in parts.backward.outputs), {again: converted(read, total.dtype)})
    new[given] = read
    reached = set(topological(new[node] for _, node in parts.backward.outputs))
    kept = {r.name for r in parts.residuals}  # of which a bias may be read no longer
    inputs = [
        (own, new.get(node, node)) for own, node in zip(parts.backward.input_names, parts.backward.inputs, strict=True)
    ]
    backward = replace(
        parts.backward,
        inputs=tuple(node for own, node in inputs if node in reached or own not in kept),
        outputs=tuple((own, new[node]) for own, node in parts.backward.outputs),
        notes={new.get(node, node): note for node, note in parts.backward.notes.items()},
    )
    own = replace(residual, node=saved, why=f"{total.op.name}: a matrix product with its bias")
    return replace(
        parts, forward=forward, backward=backward, residuals=tuple(own if r is residual else r for r in parts.residuals)
    )


def _sum_of(product: Node, graph: Graph, name: str = "") -> Node | None:
    """The sum of a product, reshaped and widened, with a smaller value that only inputs decide by moves: None if
    anything else is made of the product, which is no output but that of ``name``.
    """
    if any(node is product and own != name for own, node in graph.outputs):
        return None
    value = product
    while len(users := graph.users.get(value, ())) == 1:
        (user,) = users
        if user.op.name == "add":
            other = next((o for o in user.operands if o is not value), value)
            return user if _is_bias(other) else None
        if not (converts(user) or isinstance(getattr(user.op, "lower", None), Alias)):
            return None
        value = user
    return None


def _is_bias(node: Node) -> bool:
    """Whether it is the elements of a vector that is an input, each of them repeated."""
    while moves(node) or converts(node):
        (node,) = node.operands
    return node.op.name == "input" and node.type.rank == 1


def _is_fused(total: Node, forward: Graph) -> bool:
    """Whether gelu is applied to a sum with rows that the library's kernels take; any other would be rounded where
    nothing was.
    """
    columns = total.shape[-1]
    aligned = isinstance(columns, int) and columns % (MATRIX_ALIGN // 2) == 0
    return aligned and gelu.decompose(total, approximate="tanh") in set(forward.nodes)
