"""merge: two groups that read the same values, or each other's, become one.

The scheduler visits nodes one by one, so two groups may exist before the value that connects them is visited.  Here the
pair that saves the most bytes is rebuilt as one group, node by node under the rules of every group, until no pair is
left that can be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ...ir.dims import Size, total
from ...ir.node import Node
from ...ir.op import Scatter
from .groups import Group, lowering, nbytes
from .lower import CannotInline
from .scheduler import Limits, Scheduler


@dataclass(frozen=True)
class MissedFusion:
    """Two kernels that would save bytes as one, and why they are two."""

    first: str
    second: str
    nbytes: Size
    why: str


def merge(scheduler: Scheduler, limits: Limits) -> None:
    """Changes the groups of a scheduler that has placed every node."""
    scheduler.limits = limits
    position = {node: i for i, node in enumerate(scheduler.graph.nodes)}
    size = functools.cache(lambda node: int(nbytes(node)))
    refused = scheduler.refused
    live = [g for g in scheduler.groups if g.key in scheduler.order and not g.alone]
    worth = {
        pair: saving
        for i, a in enumerate(live)
        for b in live[i + 1 :]
        if (saving := saved(scheduler, *(pair := (a, b)), size))
    }
    while worth:
        a, b = pair = min(worth, key=lambda pair: (-worth[pair], pair[1].key, pair[0].key))
        why = _merged(scheduler, a, b, position)
        if why:
            del worth[pair]
            refused[a.key, b.key] = total(node.type.nbytes for node in moved_by_both(scheduler, a, b)), why
            continue
        live = [g for g in live if g not in pair]
        worth = {x: saving for x, saving in worth.items() if not {*x} & {*pair}}
        new = scheduler.groups[-1]
        worth |= {(g, new): saving for g in live if (saving := saved(scheduler, g, new, size))}
        live.append(new)


def saved(scheduler: Scheduler, a: Group, b: Group, size: Callable[[Node], int]) -> int:
    """Bytes that one kernel would save: what both read, and what one writes and the other reads.  0 where that is less
    than half of the smaller group's largest value.
    """
    both = moved_by_both(scheduler, a, b)
    if not both:
        return 0
    saving = sum(map(size, both))
    least = min(max(size(scheduler.source(node)) for node in group.placed) for group in (a, b))
    return saving if 2 * saving >= least else 0


def moved_by_both(scheduler: Scheduler, a: Group, b: Group) -> set[Node]:
    """What both groups read, and what one writes and the other reads."""
    shared = scheduler.loads[a.key] & scheduler.loads[b.key]
    return shared | (scheduler.loads[a.key] & b.placed.keys()) | (scheduler.loads[b.key] & a.placed.keys())


def _merged(scheduler: Scheduler, a: Group, b: Group, position: dict[Node, int]) -> str:
    """Merge two groups; the reason if they cannot be, and then nothing has changed, else ""."""
    import networkx as nx

    order = nx.contracted_nodes(scheduler.order, a.key, b.key, self_loops=False, copy=True)
    if not nx.is_directed_acyclic_graph(order):
        return "a third kernel needs the one and is needed by the other"
    wider = max((a, b), key=lambda g: (len(g.domain.real), g.domain.cols is not None))
    nodes = sorted([*a.placed, *b.placed], key=position.__getitem__)
    before = scheduler.order, dict(scheduler.group_of)
    scheduler.order = nx.relabel_nodes(order, {a.key: len(scheduler.groups)})
    new = scheduler.open(wider.domain.shape, wider.domain.cols)
    for node in nodes:
        del scheduler.group_of[node]
        scheduler.in_memory.discard(node)
    refusal = next((reason for node in nodes if (reason := _add(scheduler, node, new)) is not None), None)
    if refusal is None:
        del scheduler.loads[a.key], scheduler.loads[b.key]
        return ""
    scheduler.groups.pop()
    del scheduler.loads[new.key]
    scheduler.order, scheduler.group_of = before
    scheduler.in_memory.update(nodes)
    return f"{refusal.why} ({refusal.node.op.name} {refusal.node.type})"


def _add(scheduler: Scheduler, node: Node, group: Group) -> CannotInline | None:
    if not group.placed and group.domain.cols is None and not isinstance(lowering(node), Scatter):
        return scheduler.attempt(node, group)
    return scheduler.join(node, group)
