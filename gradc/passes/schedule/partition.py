"""partition: the joint graph -> a forward with residuals and a backward, by a minimum cut over the bytes moved.

A value that only the inputs decide may be saved or computed again in the backward (free, but matrix products, scatters
and reductions are never computed twice).  What the forward writes anyway, and an input, costs a read; another value
costs a write and a read.  The cut that moves the fewest bytes is what is saved; of several, one from which what the
products of the backward read, which has to be in memory, is not computed again.

A product with rows so wide that loops compute them block by block (:mod:`gradc.passes.row_blocking`) is in memory
neither in the forward nor in the backward, and never saved.

A memory budget bounds these bytes.  Where they exceed it, saved values are computed again after all, reductions among
them, those first that give most bytes back for what has to be computed; products and scatters never are, and a budget
below their results is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import InvalidProblem
from ...ir.dims import evaluate, nominal, symbols
from ...ir.graph import Graph, input_node, rebuild
from ...ir.lexer import LONGEST_NAME, suffixed
from ...ir.node import Node, Note
from ...ir.op import Alias, Library, Movement, Reduction, Scan, Scatter
from ...ir.walk import depends_on_inputs, reachable, topological
from ..graph.replace_axis import mixes, moves, source
from .minimum_cut import Network
from .residual import PRECOMPUTED, Residual, WideRowPolicy
from .schedule import written

_FREE = 0


@dataclass(frozen=True)
class Partition:
    """:param forward: outputs, then residuals ``r.NAME``.
    :param backward: inputs are residuals and cotangents.
    :param recomputed: the matrix products of the forward that the backward computes again,
    :param tiled: and those of them that loops on tensor cores are to compute in the forward.
    """

    forward: Graph
    backward: Graph
    residuals: tuple[Residual, ...]
    recomputed: frozenset[Node] = frozenset()
    tiled: frozenset[Node] = frozenset()

    @property
    def policy(self) -> WideRowPolicy:
        """What was done about products with wide rows: ``SAVE`` also where there are none."""
        if any(r.precomputed for r in self.residuals):
            return WideRowPolicy.PRECOMPUTE_GRADIENT
        return WideRowPolicy.RECOMPUTE if self.recomputed else WideRowPolicy.SAVE

    @property
    def is_final(self) -> bool:
        """Whether it is not given up for another one, whatever its programs are."""
        return self.policy is WideRowPolicy.SAVE


def partition(
    joint: Graph,
    values: Sequence[str],
    *,
    save: str | Sequence[str] = "min-cut",
    budget: int | float | None = None,
    dims: Mapping[str, int] | None = None,
    borrow: bool = False,
    blocked: Callable[[Node], bool] = lambda product: False,
    precomputed: Sequence[str] = (),
    materialized: Callable[[Graph], set[Node]] = written,
    unwritten: Collection[Node] = (),
) -> Partition:
    """joint  ->  forward + residuals and backward

    :param values: the joint graph's outputs that belong to the forward.
    :param save: ``"min-cut"``, ``"all"`` (whatever the backward reads, as it is before it is only moved or repeated),
        ``"none"`` (only what must not be computed twice), or names of values.
    :param budget: bytes that residuals may have beyond the inputs; or, a float, a place between the fewest possible
        (0.0) and what ``save`` keeps (1.0).
    :param dims: sizes at which bytes are counted; 1024 stands for the others, which a budget in bytes does not allow.
    :param borrow: an output may be kept itself; else what is kept of it is a copy.
    :param blocked: the products that loops compute block by block: they are recomputed, not saved.
    :param precomputed: the joint graph's outputs that the forward makes for the backward alone, and keeps.
    :param materialized: of a graph the values that it writes on this device: :func:`.written`,
    :param unwritten: but for these, which loops keep to themselves.
    :raises InvalidProblem: a budget below the fewest bytes possible, or in bytes where these are not known; names that
        there are not.
    """
    halves = _halves(joint, values, precomputed)
    borrowed = {node: name for name, node in reversed(halves.forward.outputs)} if borrow else {}
    given = set(reachable((n for _, n in halves.forward.outputs), lambda n: n.operands if _is_alias(n) else ()))
    computed = halves.forward.with_outputs([(name, joint.output(name)) for name in (*values, *precomputed)])
    traffic = Traffic(
        materialized(computed) - {*unwritten},
        given - borrowed.keys(),
        borrowed.keys() - set(joint.inputs),
        dims,
        blocked,
        {source(n.operands[0]) for n in joint.nodes if mixes(n)},
    )
    saved = _cut(joint, halves.boundary, save, traffic, _operands_of_products(halves.late))
    if budget is not None:
        saved = _within(joint, halves.boundary, saved, budget, traffic)
    made_early = {joint.output(name) for name in precomputed}
    reasons = {
        n: PRECOMPUTED if n in made_early else "output" if n in borrowed else _why(n, traffic.written)
        for n in saved
        if n.op.name != "input"
    }
    residuals = _residuals(joint, saved, reasons, borrowed)
    own = [(r.name, r.node) for r in residuals.values() if not r.borrowed]
    forward = halves.forward.with_outputs([*halves.forward.outputs, *own])
    backward = _backward(joint, halves.gradients, residuals, halves.cotangents)
    behind = reachable(halves.boundary, lambda n: () if n in saved else n.operands)
    products = frozenset(n for n in behind if n not in saved and traffic.is_recomputed(n))
    return Partition(forward, backward, tuple(residuals.values()), products)


@dataclass(frozen=True)
class _Halves:
    """What of the joint graph is forward and what backward, whatever is saved.

    :param forward: without residuals.
    :param cotangents: the inputs that only the backward has.
    :param late: what depends on these, or serves the gradients alone.
    :param gradients: the outputs of the backward.
    :param boundary: what it reads, or gives, that is not late.
    """

    forward: Graph
    cotangents: set[Node]
    late: set[Node]
    gradients: list[tuple[str, Node]]
    boundary: set[Node]


def _halves(joint: Graph, values: Sequence[str], precomputed: Sequence[str]) -> _Halves:
    floats = sum(joint.output(name).dtype.is_float for name in values)
    cotangents = set(joint.inputs[len(joint.inputs) - floats :])  # differentiate puts them last
    late = _late(joint, set(topological(joint.output(name) for name in (*values, *precomputed))), cotangents)
    gradients = [(name, node) for name, node in joint.outputs if name not in values and name not in precomputed]
    needed = set(topological(node for _, node in gradients))
    boundary = {o for n in needed if n in late for o in n.operands if o not in late and o in needed}
    boundary |= {n for _, n in gradients if n not in late}
    forward = replace(
        joint,
        name=joint.name.removesuffix("_joint"),
        inputs=tuple(n for n in joint.inputs if n not in cotangents),
        outputs=tuple((name, joint.output(name)) for name in values),
    )
    return _Halves(forward, cotangents, late, gradients, boundary)


def _late(joint: Graph, early: Collection[Node], cotangents: Collection[Node]) -> set[Node]:
    """The nodes that depend on a cotangent, or serve the gradients alone: a forward without a backward does not pay for
    these.
    """
    late = set(cotangents)
    for node in joint.nodes:
        if any(o in late for o in node.operands) or (
            node not in early and node.op.name != "input" and depends_on_inputs(node)
        ):
            late.add(node)
    return late


def _residuals(
    joint: Graph, saved: Collection[Node], reasons: Mapping[Node, str], borrowed: Mapping[Node, str]
) -> dict[Node, Residual]:
    """What is saved, in the order of the graph.

    :param reasons: why, of what is no input.  :param borrowed: the outputs that are kept themselves.
    """
    found: dict[Node, Residual] = {}
    names = {*joint.input_names, *joint.output_names}
    for node in (n for n in joint.nodes if n in saved):
        if node.op.name == "input":
            found[node] = Residual(joint.input_name(node), node, "input")
        else:
            found[node] = Residual(_name(node, joint, names), node, reasons[node], borrowed.get(node, ""))
    return found


def _name(node: Node, joint: Graph, taken: set[str]) -> str:
    """``r.`` and the user's name of a value, or its op's; a number where that is taken.  It is added to ``taken``."""
    note = joint.notes.get(node, Note())
    called = f"{note.scope.replace('/', '.') + '.' if note.scope else ''}{note.name or node.op.name}"
    # Python's names may have other letters
    hint = f"r.{re.sub('[^A-Za-z0-9_.]', '_', called)[:LONGEST_NAME].rstrip('.')}"
    name, k = hint, 1
    while name in taken:
        k += 1
        name = suffixed(hint, str(k))
    taken.add(name)
    return name


@dataclass(frozen=True)
class Traffic:
    """What it costs to keep a value, in bytes written and read.

    :param written: what the forward writes anyway.
    :param given: of it what the caller is given, who may change it: what is kept is a copy.
    :param borrowed: of it what the caller is given, and does not change before the backward.
    :param dims: sizes at which bytes are counted.
    :param blocked: products that are never more than a block, and are recomputed,
    :param mixed: but for these values, of which elements of several rows are read together.
    """

    written: Collection[Node]
    given: Collection[Node]
    borrowed: Collection[Node]
    dims: Mapping[str, int] | None
    blocked: Callable[[Node], bool] = lambda product: False
    mixed: Collection[Node] = ()

    def once(self, node: Node) -> bool:
        """Whether a value is not computed twice."""
        return _never_twice(node) and not self.is_recomputed(node)

    def always_kept(self, node: Node) -> bool:
        """Whether not even a budget lets a value be computed twice."""
        return _always_kept(node) and not self.is_recomputed(node)

    def is_recomputed(self, node: Node) -> bool:
        """Whether a value is a product that the backward computes again, block by block."""
        return node not in self.mixed and node not in self.given and self.blocked(node)

    def size(self, node: Node) -> int:
        """Bytes of memory to keep a value that is no input."""
        return 0 if node in self.borrowed else bytes_of(node, self.dims)

    def cost(self, node: Node, readers: Collection[Node]) -> int:
        """:param readers: the nodes that read it."""
        size = bytes_of(node, self.dims)
        parts = [_elements(r, self.dims) for r in readers if isinstance(getattr(r.op, "lower", None), Movement)]
        # through a slice or a gather only what it gives is read
        read = min(size, sum(parts) * node.dtype.itemsize) if len(parts) == len(readers) > 0 else size
        if node.op.name == "input":
            return read
        if node in self.given:
            return read + 2 * size
        return read if node in self.written else read + size


def _why(node: Node, written: Collection[Node]) -> str:
    kind = (
        "a library call"
        if isinstance(node.op, Library) and not node.op.contraction
        else "a matrix product"
        if isinstance(node.op, Library)
        else "a reduction"
        if _never_twice(node)
        else "written anyway"
        if node in written
        else "fewer bytes than what it is made from"
    )
    return f"{node.op.name}: {kind}"


def _never_twice(node: Node) -> bool:
    return isinstance(node.op, Library) or isinstance(getattr(node.op, "lower", None), Reduction | Scan | Scatter)


def _always_kept(node: Node) -> bool:
    return isinstance(node.op, Library) or isinstance(getattr(node.op, "lower", None), Scatter)


def bytes_of(node: Node, dims: Mapping[str, int] | None) -> int:
    return evaluate(node.type.nbytes, nominal(node.shape, dims))


def _is_alias(node: Node) -> bool:
    return isinstance(getattr(node.op, "lower", None), Alias)


def _elements(node: Node, dims: Mapping[str, int] | None) -> int:
    return bytes_of(node, dims) // node.dtype.itemsize


def _operands_of_products(late: Collection[Node]) -> set[Node]:
    """What the library calls of the backward read, before it is moved."""
    read = {o for n in late if isinstance(n.op, Library) for o in n.operands}
    return {source(node) for node in read} - set(late)


def _cut(
    joint: Graph, boundary: set[Node], save: str | Sequence[str], traffic: Traffic, whole: Collection[Node]
) -> set[Node]:
    """:param whole: values that the backward has in memory, kept or computed again."""
    if save == "all":
        return _unmoved({n for n in boundary if depends_on_inputs(n)}, traffic.dims)
    names = set() if isinstance(save, str) else set(save)
    if isinstance(save, str) and save not in ("min-cut", "none"):
        raise InvalidProblem(f"save={save!r}; there are 'min-cut', 'all', 'none' and a list of names")
    known = {joint.notes[n].name for n in set(topological(boundary)) if n in joint.notes}
    if names - known:
        raise InvalidProblem(f"save names {min(names - known)!r}, which no value of the forward is called")

    readers: dict[Node, set[Node]] = {}
    for node in topological(boundary):
        for operand in node.operands:
            readers.setdefault(operand, set()).add(node)

    def cost(node: Node) -> int | None:
        name = joint.notes[node].name if node in joint.notes else ""
        if name and name in names:
            return _FREE
        if traffic.is_recomputed(node):
            return None
        if save == "none" and node.op.name != "input" and not (traffic.once(node) or traffic.once(_unmixed(node))):
            return None
        if moves(node) and node not in traffic.written and depends_on_inputs(node.operands[0]):
            (moved,) = node.operands  # kept as it is, it joins no other kernel than now
            if bytes_of(moved, traffic.dims) <= bytes_of(node, traffic.dims):
                return None
        return traffic.cost(node, readers.get(node, ()) if node not in boundary else ())

    def recompute_bytes(node: Node) -> int:
        return 2 * bytes_of(node, traffic.dims) if node in whole else 0

    return _minimum(joint, boundary, cost, traffic.once, traffic.size, recompute_bytes)


def _unmixed(node: Node) -> Node:
    """What elements were mixed of, which may be more than these; the node itself, if it is no such mixture."""
    base = source(node)
    while mixes(base):
        node = base = source(base.operands[0])
    return node


def _unmoved(read: set[Node], dims: Mapping[str, int] | None) -> set[Node]:
    """What is kept so that all of ``read`` is: of a broadcast, a reshape or a transpose what it is made from; nothing
    that an input or a kept value holds.
    """

    def unmoved(node: Node) -> Node:
        while moves(node) and depends_on_inputs(node) and bytes_of(node.operands[0], dims) <= bytes_of(node, dims):
            (node,) = node.operands
        return node

    kept = {unmoved(node) for node in read}
    held = set(kept)
    for node in kept:  # a part of what is kept as a whole
        below = node
        while moves(below):
            (below,) = below.operands
            if below in held or below.op.name == "input":
                kept = (kept - {node}) | {below}
                break
    return {node for node in kept if depends_on_inputs(node)}


def _minimum(
    joint: Graph,
    boundary: set[Node],
    cost: Callable[[Node], int | None],
    once: Callable[[Node], bool],
    size: Callable[[Node], int],
    recompute_bytes: Callable[[Node], int] = lambda node: 0,
) -> set[Node]:
    """The cheapest values from which, with inputs, the boundary can be computed; what is computed ``once`` is not
    computed from others.

    :param cost: of keeping a node; None: it is not kept.
    :param size: the bytes of a node; of cuts of one cost, that of fewest bytes beyond the inputs.
    :param recompute_bytes: moved where a node is recomputed, which count as much as those.
    """
    behind = set(topological(boundary))
    nodes = [n for n in joint.nodes if n in behind and depends_on_inputs(n)]
    network: Network[object] = Network()
    # in lexicographic order: cost, bytes, and few nodes, no inputs (where an output is borrowed), moved ones (nothing
    # moves them again) and early ones, so that the cut can be repeated
    byte = 1 + 4 * len(nodes) ** 2
    unit = byte * (1 + sum(map(size, nodes)) + sum(map(recompute_bytes, nodes)))
    for order, node in enumerate(nodes):
        inside, outside = ("in", node), ("out", node)
        is_input = node.op.name == "input"
        price, rank = cost(node), order + len(nodes) * (3 if is_input else 1 if moves(node) else 2)
        if price is None:
            network.add_edge(inside, outside, None)
        else:
            network.add_edge(inside, outside, price * unit + (0 if is_input else size(node)) * byte + rank)
        if is_input or once(node):
            network.add_edge("S", inside, None)
        elif recompute_bytes(node):
            network.add_edge("S", inside, recompute_bytes(node) * byte)
        for operand in node.operands:
            if depends_on_inputs(operand):
                network.add_edge(("out", operand), inside, None)
        if node in boundary:
            network.add_edge(outside, "T", None)
    near = network.source_side("S", "T")
    return {node for node in behind if ("in", node) in near and ("out", node) not in near}


# -- a budget ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rematerialized:
    """A saved value that is recomputed instead.

    :param computed: what is computed with it.
    :param read: the saved values and inputs it is made from.
    :param kept: products and scatters that are saved for it.
    """

    computed: frozenset[Node]
    read: frozenset[Node]
    kept: frozenset[Node]


def _within(joint: Graph, boundary: set[Node], saved: set[Node], budget: int | float, traffic: Traffic) -> set[Node]:
    """What is saved of ``saved``, and what is saved instead, so that the bytes are within the budget."""
    behind = set(topological(boundary))
    size = {node: traffic.size(node) for node in behind}
    fewest = None
    if isinstance(budget, float):
        fewest = _fewest(joint, boundary, size, traffic)
        budget = _total(fewest, size) + int(budget * max(_total(saved, size) - _total(fewest, size), 0))
    else:
        held = [n for n in behind if (n in saved or traffic.always_kept(n)) and n.op.name != "input"]
        held = [n for n in held if n not in traffic.borrowed]
        unknown = sorted({s for n in held for d in n.shape for s in symbols(d)} - (traffic.dims or {}).keys())
        if unknown:
            raise InvalidProblem(
                f"memory_budget={budget} bytes: how many there are depends on {', '.join(unknown)};"
                f" hints={{{unknown[0]!r}: ...}} says at which sizes, or give a fraction"
            )
    left = _drop(joint, saved, budget, size, traffic.always_kept)
    if _total(left, size) <= budget:
        return _reached(boundary, left)
    fewest = _fewest(joint, boundary, size, traffic) if fewest is None else fewest
    if _total(fewest, size) > budget:
        products = ", ".join(sorted({n.op.name for n in fewest if n.op.name != "input" and size[n]}))
        raise InvalidProblem(
            f"memory_budget={budget} bytes, and {_total(fewest, size)} are the fewest that can be kept for the"
            f" backward: results of {products}"
        )
    return fewest


def _fewest(joint: Graph, boundary: set[Node], size: Mapping[Node, int], traffic: Traffic) -> set[Node]:
    """What has the fewest bytes beyond the inputs."""

    def cost(node: Node) -> int | None:
        return _FREE if node.op.name == "input" else None if traffic.is_recomputed(node) else size[node]

    return _minimum(joint, boundary, cost, traffic.always_kept, size.__getitem__)


def _total(saved: Collection[Node], size: Mapping[Node, int]) -> int:
    return sum(size[n] for n in saved if n.op.name != "input")


def _drop(
    joint: Graph,
    saved: set[Node],
    budget: int,
    size: Mapping[Node, int],
    always_kept: Callable[[Node], bool] = _always_kept,
) -> set[Node]:
    """``saved`` without the values that give most bytes back for what is computed again, one after another until the
    rest fits.
    """
    order = {node: i for i, node in enumerate(joint.nodes)}
    left, total = set(saved), _total(saved, size)
    known: dict[Node, _Rematerialized] = {}
    dropped: list[Node] = []
    while total > budget:
        best, most = None, 0.0
        for node in sorted(
            (n for n in left if size[n] and n.op.name != "input" and not always_kept(n)), key=order.__getitem__
        ):
            instead = known[node] = known.get(node) or _rematerialized(node, left, always_kept)
            given_back = size[node] - sum(size[n] for n in instead.kept)
            worth = given_back / max(sum(_work(n, size) for n in instead.computed), 1)
            if worth > most:
                best, most = node, worth
        if best is None:
            return left
        now = known.pop(best)
        left = (left - {best}) | now.kept | {n for n in now.read if n.op.name == "input"}
        total += sum(size[n] for n in now.kept) - size[best]
        dropped.append(best)
        changed = {best, *now.kept}
        known = {n: a for n, a in known.items() if not changed & (a.read | a.computed)}
    for node in reversed(dropped):  # the last one may have given back more than was needed
        if total + size[node] <= budget:
            left.add(node)
            total += size[node]
    return left


def _rematerialized(node: Node, saved: Collection[Node], always_kept: Callable[[Node], bool]) -> _Rematerialized:
    """The node, computed from what else is saved, from inputs, and from what is always kept."""

    def computes(n: Node) -> bool:
        return n is node or not (_is_held(n, saved) or always_kept(n))

    def sources(n: Node) -> list[Node]:
        return [o for o in n.operands if depends_on_inputs(o)] if computes(n) else []

    behind = frozenset(reachable([node], sources))
    computed = frozenset(n for n in behind if computes(n))
    read = frozenset(n for n in behind - computed if _is_held(n, saved))
    return _Rematerialized(computed, read, behind - computed - read)


def _work(node: Node, size: Mapping[Node, int]) -> int:
    """Bytes that are gone through to compute a value: its own, or what a reduction reads."""
    return max(size[n] for n in (node, *node.operands)) if _never_twice(node) else size[node]


def _reached(boundary: set[Node], saved: set[Node]) -> set[Node]:
    """Of ``saved`` and the inputs what the boundary is made from."""
    behind = reachable(boundary, lambda n: () if _is_held(n, saved) else n.operands)
    return {n for n in behind if _is_held(n, saved)}


def _is_held(node: Node, saved: Collection[Node]) -> bool:
    """Whether the backward reads a value: an input, or what is saved."""
    return node in saved or node.op.name == "input"


def _backward(
    joint: Graph, gradients: Sequence[tuple[str, Node]], residuals: Mapping[Node, Residual], cotangents: set[Node]
) -> Graph:
    new: dict[Node, Node] = {n: input_node(r.name, n.type) for n, r in residuals.items()}
    new |= {n: n for n in cotangents}
    rebuild((node for _, node in gradients), new)
    outputs = tuple((name, new[node]) for name, node in gradients)
    reached = set(topological(node for _, node in outputs))
    inputs = [new[n] for n in residuals if new[n] in reached]
    inputs += [n for n in joint.inputs if n in cotangents]
    notes = {new[n]: note for n, note in joint.notes.items() if n in new}
    defaults = {k: v for k, v in joint.defaults.items() if any(joint.input_name(n) == k for n in inputs)}
    return Graph(
        suffixed(joint.name.removesuffix("_joint"), "_backward"),
        tuple(inputs),
        outputs,
        joint.assumptions,
        notes,
        defaults,
    )
