"""Cutting a graph of ATen ops into regions that gradc takes and a rest that torch runs."""

from __future__ import annotations

import graphlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .draws import is_draw, is_drawn_into, is_own_draw
from .importer import Refusal, Translation, refusal, tensors_of
from .normal_form import stops_gradient
from .preference import faster_in_torch
from .sizes import assumptions

Nodes = Sequence[torch.fx.Node]
Homes = Mapping[torch.fx.Node, torch.device]


@dataclass
class Plan:
    """Who runs each call of a graph.

    :ivar taken: the calls that gradc takes, each with the number of its region; regions run in ascending order.
    :ivar levels: for each other call, the region after which it runs.
    :ivar refused: why torch runs a call.
    :ivar devices: where the values of each region lie.
    :ivar orders: the memory order in which a region gives a value, its axes from the outermost to the innermost, where
        that is not their own.
    """

    taken: dict[torch.fx.Node, int] = field(default_factory=dict)
    levels: dict[torch.fx.Node, int] = field(default_factory=dict)
    refused: dict[torch.fx.Node, Refusal] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    orders: dict[torch.fx.Node, tuple[int, ...]] = field(default_factory=dict)

    @property
    def regions(self) -> dict[int, list[torch.fx.Node]]:
        """The calls of each region, in their order."""
        regions: dict[int, list[torch.fx.Node]] = {}
        for node, region in self.taken.items():
            regions.setdefault(region, []).append(node)
        return dict(sorted(regions.items()))


def plan(
    graph: torch.fx.Graph, smallest: int, take: str = "faster", leaves: Nodes = (), calibration: Any = None
) -> Plan:
    """
    :param smallest: regions of fewer ops that compute something are torch's, unless gradc takes the whole graph.
    :param take: ``"all"``, or those ops that :func:`faster_in_torch` does not leave to torch.
    :param leaves: the inputs whose gradients are wanted.  :param calibration: of :func:`gradc.compile`.
    """
    calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
    taken, refused = _capabilities(graph, calls, take, leaves, calibration)
    for node in reversed(calls):  # a view that leaves a region is torch's own: it shares memory as the user expects
        if node in taken and is_view(node):
            _leave(graph, node, taken)
    while True:
        calls = [n for n in graph.nodes if n.op in ("call_function", "get_attr")]
        homes = _homes(calls, taken)
        levels = _levels(calls, homes)
        _sink(calls, homes, levels)
        casts = _shared_casts(graph, homes, levels)
        if casts:
            for node, copies in casts.items():
                _leave_cast(graph, node, copies, taken)
                refused[node] = refusal(node, "several regions read what it gives", by_choice=True)
            continue
        found = _numbered(calls, homes, levels, refused)
        whole = all(is_draw(node) and reason.by_choice for node, reason in refused.items())
        least = 1 if whole else max(smallest, 1)
        small = [
            nodes
            for nodes in found.regions.values()
            if sum(map(computes, nodes)) < least and not any(map(is_own_draw, nodes))
        ]
        if not small:
            return found
        for nodes in small:
            for node in nodes:
                del taken[node]
                if computes(node):
                    refused[node] = refusal(node, f"its region has fewer than {smallest} ops", by_choice=True)


def _numbered(
    calls: Nodes, homes: Homes, levels: Mapping[torch.fx.Node, int], refused: dict[torch.fx.Node, Refusal]
) -> Plan:
    """The plan in which each level has a region for each device, one after another; those of a level read nothing of
    each other.
    """
    order = {device: i for i, device in enumerate(dict.fromkeys(homes.values()))}
    count = max(len(order), 1)
    taken = {node: levels[node] * count + order[home] for node, home in homes.items()}
    devices = {number: homes[node] for node, number in taken.items()}
    return Plan(taken, {n: levels[n] * count + count - 1 for n in calls if n not in homes}, refused, devices)


def _homes(calls: Nodes, taken: Collection[torch.fx.Node]) -> dict[torch.fx.Node, torch.device]:
    """Where the value of each call lies that gradc takes.  A number that the graph writes out (a tensor on the CPU
    without an axis, made of nothing else) lies where it is read.
    """
    homes = {node: _home(node) for node in calls if node in taken}
    numbers: dict[torch.fx.Node, None] = {}
    for node in calls:
        if all(o in numbers for o in node.all_input_nodes if tensors_of(o)) and _home(node).type == "cpu":
            if not any(v.ndim for v in tensors_of(node)):
                numbers[node] = None
    for node in reversed(numbers):
        theirs = {homes.get(user) for user in node.users}
        if node in homes and len(theirs) == 1 and None not in theirs:
            homes[node] = theirs.pop()  # type: ignore[assignment]
    return homes


def _home(node: torch.fx.Node) -> torch.device:
    return next((v.device for v in tensors_of(node)), torch.device("cpu"))


def _leave(graph: torch.fx.Graph, view: torch.fx.Node, taken: dict[torch.fx.Node, None]) -> None:
    """Have torch take a view for those that are outside of the regions; what is inside reads one of its own."""
    outside = [user for user in view.users if user not in taken]
    if len(outside) == len(view.users):
        del taken[view]
        theirs = view
    elif outside:
        with graph.inserting_after(view):
            theirs = graph.node_copy(view)
        for user in outside:
            user.replace_input_with(view, theirs)
    else:
        return
    if theirs.target is operator.getitem:
        _take_apart(graph, theirs)


def _shared_casts(
    graph: torch.fx.Graph, homes: Homes, levels: Mapping[torch.fx.Node, int]
) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """The casts of inputs whose results several levels read, each with its copies: autocast writes one for each use of
    a weight, and eager mode casts it once.  What is returned stays a tensor of its own, as the caller may write to it.
    """
    alike: dict[Any, list[torch.fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        of_input = [operand.op for operand in node.all_input_nodes] == ["placeholder"]
        if node in homes and of_input and not _is_returned(node):
            alike.setdefault((node.args, tuple(sorted(node.kwargs.items()))), []).append(node)
    return {
        first: copies
        for first, *copies in alike.values()
        if len({levels[user] for node in (first, *copies) for user in node.users if user in homes}) > 1
    }


def _is_returned(node: torch.fx.Node) -> bool:
    """Whether a value, or a view of it, is a result of the graph."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _leave_cast(graph: torch.fx.Graph, node: torch.fx.Node, copies: Nodes, taken: dict[torch.fx.Node, None]) -> None:
    """Have torch run a cast in place of the regions, once."""
    del taken[node]
    for copy in copies:
        copy.replace_all_uses_with(node)
        del taken[copy]
        graph.erase_node(copy)


def _take_apart(graph: torch.fx.Graph, part: torch.fx.Node) -> None:
    """Have one part of several views be a part of a call of its own."""
    several = part.args[0]
    assert isinstance(several, torch.fx.Node)
    if len(several.users) > 1:
        with graph.inserting_before(part):
            part.args = (graph.node_copy(several), *part.args[1:])


def without(found: Plan, graph: torch.fx.Graph, region: Collection[torch.fx.Node], reason: str) -> Plan:
    """The plan with one region left to torch."""
    for node in region:
        found.levels[node] = found.taken.pop(node)
        if computes(node):
            found.refused[node] = refusal(node, reason)
    return found


def losses_apart(graph: torch.fx.Graph, nodes: Nodes, leaves: Collection[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """The calls of a region, cut between values that share nothing but by ``detach`` and lead to different results of
    the graph, there or by way of torch and other regions: as in eager mode, each of these can be differentiated, and
    what is kept for it freed, without the others.  Parts are in the order in which they can run; where there is none,
    as each reads another's detached value, those are not cut.

    :param leaves: the placeholders that require grad.  What leads to no result that depends on them is not cut off.
    """
    results = _results(graph, _recorded(graph, leaves))
    for cut_at_detach in (True, False):
        parts = _parts(nodes, results, cut_at_detach)
        order = _order(parts)
        if order is not None:
            break
    assert order is not None  # parts that share nothing run in any order
    return [parts[i] for i in order]


def _results(graph: torch.fx.Graph, recorded: Collection[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """A bit for each result of the graph through which a value gets a gradient."""
    returned = dict.fromkeys(n for n in map(viewed, graph.output_node().all_input_nodes) if n in recorded)
    bit = {node: 1 << i for i, node in enumerate(returned)}
    found: dict[torch.fx.Node, int] = {}
    for node in reversed(graph.nodes):
        found[node] = bit.get(node, 0)
        for user in node.users if node in recorded else ():
            found[node] |= found[user]
    return found


def viewed(node: torch.fx.Node) -> torch.fx.Node:
    """What a chain of permuted axes is a view of."""
    while node.target is torch.ops.aten.permute.default:
        node = node.all_input_nodes[0]
    return node


def _parts(nodes: Nodes, results: Mapping[torch.fx.Node, int], cut_at_detach: bool) -> list[list[torch.fx.Node]]:
    """The calls by the results that those connected with them lead to, where these are not among another part's; those
    that lead to none are in the first part.
    """
    inside, part = set(nodes), {node: node for node in nodes}

    def root(node: torch.fx.Node) -> torch.fx.Node:
        while part[node] is not node:
            part[node] = node = part[part[node]]
        return node

    for node in nodes:
        for operand in node.all_input_nodes:
            if operand in inside and not (cut_at_detach and stops_gradient(node)):
                part[root(operand)] = root(node)
    reached: dict[torch.fx.Node, int] = {}
    for node in nodes:
        reached[root(node)] = reached.get(root(node), 0) | results[node]
    every = [*dict.fromkeys(reached.values())]
    apart = [r for r in every if not any(r != other and r & other == r for other in every)]
    parts: list[list[torch.fx.Node]] = [[] for _ in apart]
    for node in nodes:
        mine = reached[root(node)]
        parts[next(i for i, r in enumerate(apart) if mine & r == mine)].append(node)
    return parts


def _order(parts: Sequence[Nodes]) -> list[int] | None:
    """An order in which each part comes after those that it reads; None where there is none."""
    owner = {node: i for i, part in enumerate(parts) for node in part}
    reads = [
        {owner[o] for node in part for o in node.all_input_nodes if o in owner} - {i} for i, part in enumerate(parts)
    ]
    try:
        return list(graphlib.TopologicalSorter(dict(enumerate(reads))).static_order())
    except graphlib.CycleError:
        return None


def _recorded(graph: torch.fx.Graph, leaves: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """The values that require grad where the leaves do."""
    found = set(leaves)
    for node in graph.nodes:
        value = node.meta.get("val")
        several = value if isinstance(value, tuple | list) else [value]
        differentiable = any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in several)
        if differentiable and not stops_gradient(node) and any(o in found for o in node.all_input_nodes):
            found.add(node)
    return found


def sparse_tables(nodes: Collection[torch.fx.Node], inputs: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """The inputs of a region that it only reads as tables of embeddings with ``sparse=True``.

    A gradient that is sparse in one place and dense in another is dense, as in eager mode.
    """
    inside = set(nodes)
    return {
        table
        for table in inputs
        if all(_argument(u, "sparse") and _argument(u, "weight") is table for u in table.users if u in inside)
    }


def _argument(node: torch.fx.Node, name: str) -> Any:
    """An argument of a call by its name; None where it is not given, or there is none of that name."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name)
    return None


def is_view(node: torch.fx.Node) -> bool:
    """Whether a call gives other strides over its operand's memory, or one of several such views."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def computes(node: torch.fx.Node) -> bool:
    """Whether a call computes something from tensors: no view, no element of a tuple, no constant, no size."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not is_view(node)
        and not isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
        and any(isinstance(o.meta.get("val"), torch.Tensor) for o in node.all_input_nodes)
    )


def _capabilities(
    graph: torch.fx.Graph, calls: Nodes, take: str, leaves: Nodes, calibration: Any
) -> tuple[dict[torch.fx.Node, None], dict[torch.fx.Node, Refusal]]:
    """Which calls gradc takes, found by translating each, and why it does not take the others."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    translation = Translation(assumptions(n.meta["val"] for n in placeholders if is_sized(n)))
    taken: dict[torch.fx.Node, None] = {}
    chosen: dict[torch.fx.Node, Refusal] = {}
    recorded = {*leaves}
    with translation:
        for node in placeholders:
            _as_input(translation, node)
        for node in calls:
            if node.op == "get_attr" or is_drawn_into(node):
                _as_input(translation, node)
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if any(o in recorded for o in node.all_input_nodes):
                recorded.add(node)
            reason = faster_in_torch(node, node in recorded, calibration) if take == "faster" else ""
            if reason:
                chosen[node] = refusal(node, reason, by_choice=True)
            elif is_draw(node) and not any(o in taken for o in node.all_input_nodes):
                chosen[node] = refusal(node, "torch draws the random numbers of eager mode", by_choice=True)
            elif source is None or source in taken:
                translation.translate(node)
            if node in translation.values:
                if not isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat):
                    taken[node] = None
            else:
                _as_input(translation, node)
    refused = {n: r for n, r in translation.refused.items() if computes(n) or not _only_sizes(n)}
    return taken, {**refused, **chosen}


def is_sized(node: torch.fx.Node) -> bool:
    """Whether a node's value is a tensor or a size."""
    return isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt)


def _only_sizes(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def _as_input(translation: Translation, node: torch.fx.Node) -> None:
    """A value that torch computes; without one that gradc has a type for, what reads it is torch's, too."""
    from ..errors import GradcError

    if isinstance(node.meta.get("val"), torch.Tensor):
        try:
            translation.input(node, f"t_{node.name}")
        except GradcError:
            return


def _levels(calls: Nodes, homes: Homes) -> dict[torch.fx.Node, int]:
    """The earliest level of each call, as regions and what torch runs after each take turns; -1 before all regions.

    Torch's random ops keep their order: each runs no earlier than the one before it, and those that read nothing of a
    region before all.  A region that reads another device's comes after it.

    :param homes: of the calls that gradc takes.
    """
    levels: dict[torch.fx.Node, int] = {}
    last = -1
    for node in calls:
        level = 0 if node in homes or (_ordered(node) and not is_draw(node)) else -1
        for operand in node.all_input_nodes:
            if operand in levels:
                other = node in homes and homes.get(operand) != homes[node]
                level = max(level, levels[operand] + other)
        if node not in homes and _ordered(node):
            last = level = max(level, last)
        levels[node] = level
    return levels


def _ordered(node: torch.fx.Node) -> bool:
    """Whether a call draws random numbers, has an effect, or may do anything at all."""
    if "effect" in node.meta:
        return True
    tags = getattr(node.target, "tags", None)
    if tags is None:
        return node.op == "call_function" and not getattr(node.target, "__module__", "").startswith(
            ("_operator", "math", "torch")
        )
    return torch.Tag.nondeterministic_seeded in tags


def _sink(calls: Nodes, homes: Homes, levels: dict[torch.fx.Node, int]) -> None:
    """Move what is computed from the graph's inputs alone, and draws, to the first region that reads it: less is kept
    between.
    """
    free: set[torch.fx.Node] = set()
    for node in calls:
        if node in homes and all(o.op in ("placeholder", "get_attr") or o in free for o in node.all_input_nodes):
            if node.target is not operator.getitem and not isinstance(node.meta.get("val"), tuple | list):
                free.add(node)
    following = max(levels.values(), default=0)
    for node in reversed(calls):
        needed = [
            levels[user] - (user in homes and homes[user] != homes.get(node)) for user in node.users if user in levels
        ]
        if node in free and needed and len(needed) == len(node.users):
            levels[node] = min(needed)
        elif node not in homes and _is_drawing(node) and needed:
            levels[node] = max(levels[node], min(*needed, following))
        if node not in homes and _ordered(node):
            following = levels[node]


def _is_drawing(node: torch.fx.Node) -> bool:
    """Whether a call draws, makes the memory for it, or is one of several values that are drawn."""
    drawn = node.args[0] if node.target is operator.getitem else node
    return is_draw(drawn) or is_drawn_into(node)  # type: ignore[arg-type]


def ordered_calls(found: Plan, calls: Nodes) -> list[tuple[int, Any]]:
    """What runs, in order: ``(level, None)`` for a region, ``(level, node)`` for a call of torch."""
    steps: list[tuple[int, int, Any]] = [(region, -1, None) for region in found.regions]
    steps += [(found.levels[node], at, node) for at, node in enumerate(calls) if node in found.levels]
    return [(level, node) for level, _, node in sorted(steps, key=lambda step: step[:2])]
