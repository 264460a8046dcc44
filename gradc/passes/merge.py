"""merge: groups that were opened apart, and read the same or each other's values, become one.

The scheduler meets nodes one by one, so two groups may stand before the value appears that joins them.  Here the pair that saves the most bytes
is written again as one group, node by node under the rules of every group, until no pair can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.node import Node
from ..ir.op import Scatter
from .groups import Group, lowering, nbytes

if TYPE_CHECKING:
    from .schedule import Scheduler


def merge(scheduler: Scheduler) -> None:
    """Changes the groups of a scheduler that has placed every node."""
    position = {node: i for i, node in enumerate(scheduler.graph.nodes)}
    refused: set[tuple[int, int]] = set()
    while True:
        live = [g for g in scheduler.groups if g.key in scheduler.order and "library" not in g.placed.values()]
        pairs = [(saved(scheduler, a, b), a, b) for i, a in enumerate(live) for b in live[i + 1 :] if (a.key, b.key) not in refused]
        worth = sorted(((size, a, b) for size, a, b in pairs if size), key=lambda pair: (-pair[0], pair[1].key, pair[2].key))
        for _, a, b in worth:
            if _merged(scheduler, a, b, position):
                break
            refused.add((a.key, b.key))
        else:
            return


def saved(scheduler: Scheduler, a: Group, b: Group) -> int:
    """Bytes that one kernel would not move again: what both read, and what one writes and the other reads.  0 where that is little."""
    shared = scheduler.loads[a.key] & scheduler.loads[b.key]
    handed = (scheduler.loads[a.key] & b.placed.keys()) | (scheduler.loads[b.key] & a.placed.keys())
    total = int(sum(nbytes(node) for node in shared | handed))
    least = min(max(nbytes(scheduler.source(node)) for node in group.placed) for group in (a, b))
    return total if 2 * total >= least else 0


def _merged(scheduler: Scheduler, a: Group, b: Group, position: dict[Node, int]) -> bool:
    """Whether the two have become one; if not, nothing has changed."""
    import networkx as nx

    order = nx.contracted_nodes(scheduler.order, a.key, b.key, self_loops=False, copy=True)
    if not nx.is_directed_acyclic_graph(order):
        return False
    wider = max((a, b), key=lambda g: (len(g.domain.real), g.domain.cols is not None))
    nodes = sorted([*a.placed, *b.placed], key=position.__getitem__)
    before = scheduler.order, dict(scheduler.group_of)
    scheduler.order = nx.relabel_nodes(order, {a.key: len(scheduler.groups)})
    new = scheduler.open(wider.domain.shape, wider.domain.cols)
    for node in nodes:
        del scheduler.group_of[node]
        scheduler.in_memory.discard(node)
    if all(_joins(scheduler, node, new) for node in nodes):
        del scheduler.loads[a.key], scheduler.loads[b.key]
        return True
    scheduler.groups.pop()
    del scheduler.loads[new.key]
    scheduler.order, scheduler.group_of = before
    scheduler.in_memory.update(nodes)
    return False


def _joins(scheduler: Scheduler, node: Node, group: Group) -> bool:
    if not group.placed and group.domain.cols is None and not isinstance(lowering(node), Scatter):
        return scheduler.attempt(node, group) is None
    return scheduler.join(node, group)
