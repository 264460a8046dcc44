"""partition: the joint graph -> a forward with residuals and a backward, by a minimum cut over bytes.

A value that only the inputs decide may be saved (its bytes) or computed again in the backward (free, but matrix products, scatters and
reductions are never computed twice).  The cut of fewest bytes is what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import InvalidProblem
from ..ir.dims import evaluate
from ..ir.graph import Graph, input_node, rebuild
from ..ir.node import Node, Note
from ..ir.op import Library, Reduction, Scatter
from .cost import nominal

_FREE = 0
_NEVER = float("inf")


@dataclass(frozen=True)
class Residual:
    """One value kept between forward and backward.

    :param why: ``input`` (borrowed, 0 bytes), or the op whose result it is and why it is not computed again.
    """

    name: str
    node: Node
    why: str


@dataclass(frozen=True)
class Partition:
    """:param forward: outputs, then residuals ``r.NAME``.  :param backward: inputs are residuals and cotangents."""

    forward: Graph
    backward: Graph
    residuals: tuple[Residual, ...]


def partition(joint: Graph, values: Sequence[str], *, save: str | Sequence[str] = "min-cut", dims: Mapping[str, int] | None = None) -> Partition:
    """joint  ->  forward + residuals and backward

    :param values: the joint graph's outputs that belong to the forward.
    :param save: ``"min-cut"``, ``"all"`` (whatever the backward reads), ``"none"`` (only what must not be computed twice), or names of values.
    """
    floats = sum(joint.output(name).dtype.is_float for name in values)
    cotangents = set(joint.inputs[len(joint.inputs) - floats :])  # differentiate puts them last
    early = _needed(joint.output(name) for name in values)
    # late: depends on a cotangent, or serves the gradients alone (a forward without a backward does not pay for it)
    late: set[Node] = set(cotangents)
    for node in joint.nodes:
        if any(o in late for o in node.operands) or (node not in early and node.op.name != "input" and not _constant(node)):
            late.add(node)
    gradients = [(name, node) for name, node in joint.outputs if name not in values]
    needed = _needed(node for _, node in gradients)
    boundary = {o for n in needed if n in late for o in n.operands if o not in late and o in needed}
    boundary |= {n for _, n in gradients if n not in late}
    saved = _cut(joint, boundary, save, dims)
    residuals: dict[Node, Residual] = {}
    used = {*joint.input_names, *joint.output_names}
    for node in joint.nodes:
        if node not in saved:
            continue
        if node.op.name == "input":
            residuals[node] = Residual(joint.input_name(node), node, "input")
            continue
        note = joint.notes.get(node, Note())
        wish = f"r.{note.scope.replace('/', '.') + '.' if note.scope else ''}{note.name or node.op.name}"
        name, k = wish, 1
        while name in used:
            k += 1
            name = f"{wish}{k}"
        used.add(name)
        residuals[node] = Residual(name, node, _why(node))
    forward = replace(
        joint,
        name=joint.name.removesuffix("_joint"),
        inputs=tuple(n for n in joint.inputs if n not in cotangents),
        outputs=(*((name, joint.output(name)) for name in values), *((r.name, r.node) for r in residuals.values() if r.why != "input")),
    )
    return Partition(forward, _backward(joint, gradients, residuals, cotangents), tuple(residuals.values()))


def _needed(roots: object) -> set[Node]:
    from ..ir.node import topological

    return set(topological(roots))  # type: ignore[arg-type]


def _why(node: Node) -> str:
    kind = "a matrix product" if isinstance(node.op, Library) else "a reduction" if _never_twice(node) else "fewer bytes than what it is made from"
    return f"{node.op.name}: {kind}"


def _never_twice(node: Node) -> bool:
    return isinstance(node.op, Library) or isinstance(getattr(node.op, "lower", None), Reduction | Scatter)


def bytes_of(node: Node, dims: Mapping[str, int] | None) -> int:
    return evaluate(node.type.nbytes, nominal(node.shape, dims))


def _cut(joint: Graph, boundary: set[Node], save: str | Sequence[str], dims: Mapping[str, int] | None) -> set[Node]:
    if save == "all":
        return {n for n in boundary if not _constant(n)}
    names = set() if isinstance(save, str) else set(save)
    if isinstance(save, str) and save not in ("min-cut", "none"):
        raise InvalidProblem(f"save={save!r}; there are 'min-cut', 'all', 'none' and a list of names")
    behind = _needed(boundary)
    known = {joint.notes[n].name for n in behind if n in joint.notes}
    if names - known:
        raise InvalidProblem(f"save names {min(names - known)!r}, which no value of the forward is called")
    import networkx as nx  # a tenth of a second, and nothing that comes from the cache is cut

    network: nx.DiGraph[object] = nx.DiGraph()
    network.add_node("T")
    for order, node in enumerate(joint.nodes):
        if node not in behind or _constant(node):
            continue
        inside, outside = ("in", node), ("out", node)
        name = joint.notes[node].name if node in joint.notes else ""
        cost: float = bytes_of(node, dims)
        if node.op.name == "input":
            cost = _FREE
        elif name and name in names:
            cost = _FREE
        elif save == "none" and not _never_twice(node):
            cost = _NEVER
        # a tie goes to the earlier node, so that the cut can be repeated
        network.add_edge(inside, outside, capacity=cost * 4096 + order % 4096 / 4096 + 1)
        if node.op.name == "input" or _never_twice(node):
            network.add_edge("S", inside)  # no capacity: infinite
        for operand in node.operands:
            if not _constant(operand):
                network.add_edge(("out", operand), inside)
        if node in boundary:
            network.add_edge(outside, "T")
    if "S" not in network:
        return set()
    _, (reachable, _) = nx.minimum_cut(network, "S", "T")
    return {node for node in behind if ("in", node) in reachable and ("out", node) not in reachable}


def _constant(node: Node) -> bool:
    """Whether no input decides it: constants, dims and what is made of them alone."""
    pending = [node]
    seen = {node}
    while pending:
        at = pending.pop()
        if at.op.name == "input":
            return False
        fresh = [o for o in at.operands if o not in seen]
        seen.update(fresh)
        pending += fresh
    return True


def _backward(joint: Graph, gradients: Sequence[tuple[str, Node]], residuals: Mapping[Node, Residual], cotangents: set[Node]) -> Graph:
    new: dict[Node, Node] = {n: input_node(r.name, n.type) for n, r in residuals.items()}
    new |= {n: n for n in cotangents}
    rebuild((node for _, node in gradients), new)
    outputs = tuple((name, new[node]) for name, node in gradients)
    reached = _needed(node for _, node in outputs)
    inputs = [new[n] for n in residuals if new[n] in reached]
    inputs += [n for n in joint.inputs if n in cotangents]
    notes = {new[n]: note for n, note in joint.notes.items() if n in new}
    defaults = {k: v for k, v in joint.defaults.items() if any(joint.input_name(n) == k for n in inputs)}
    return Graph(joint.name.removesuffix("_joint") + "_backward", tuple(inputs), outputs, joint.assumptions, notes, defaults)

