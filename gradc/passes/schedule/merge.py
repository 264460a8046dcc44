"""merge: two groups that read the same values, or each other's, become one.

The scheduler visits nodes one by one, so two groups may exist before the value that connects them is visited.  Here the
pair that saves the most bytes is rebuilt as one group, node by node under the rules of every group, until no pair is
left that can be.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable

from ...ir.dims import total
from ...ir.node import Node
from ...ir.op import Scatter
from .groups import Group, lowering, nbytes
from .lower import CannotInline
from .scheduler import Limits, Scheduler

SHARED = 0.75
"""Of two groups' statements, what one that has more than fits has at most: what both compute is computed once."""


def merge(scheduler: Scheduler, limits: Limits, fits: Limits) -> None:
    """Changes the groups of a scheduler that has placed every node.

    :param fits: limits of two groups that share little of what they compute.
    """
    scheduler.limits = limits
    scheduler.refused.clear()
    size = functools.cache(lambda node: int(nbytes(node)))
    live = {g.key: g for g in scheduler.groups if g.key in scheduler.order and not g.alone}
    pairs = {(a, b) for b in live.values() for key in partners(scheduler, b) if key < b.key and (a := live.get(key))}
    heap = [(-saving, b.key, a.key) for a, b in pairs if (saving := saved(scheduler, a, b, size))]
    heapq.heapify(heap)
    while heap:  # the pair that saves most, of those the two earliest
        _, second, first = heapq.heappop(heap)
        if first not in live or second not in live:
            continue
        a, b = live[first], live[second]
        why = _merged(scheduler, a, b, fits)
        if why:
            scheduler.refused[first, second] = total(node.type.nbytes for node in moved_by_both(scheduler, a, b)), why
            continue
        del live[first], live[second]
        new = scheduler.groups[-1]
        for key in partners(scheduler, new) & live.keys():
            if saving := saved(scheduler, live[key], new, size):
                heapq.heappush(heap, (-saving, new.key, key))
        live[new.key] = new


def partners(scheduler: Scheduler, group: Group) -> set[int]:
    """Groups that load what this one loads or computes, or compute what it loads."""
    keys = {key for node in (*scheduler.loads[group.key], *group.placed) for key in scheduler.readers.get(node, ())}
    return keys | {owner.key for node in scheduler.loads[group.key] if (owner := scheduler.group_of.get(node))}


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


def _merged(scheduler: Scheduler, a: Group, b: Group, fits: Limits) -> str:
    """Merge two groups; the reason if they cannot be, and then nothing has changed, else ""."""
    if scheduler.order.between(a.key, b.key):
        return "a third kernel needs the one and is needed by the other"
    wider = max((a, b), key=lambda g: (len(g.domain.real), g.domain.cols is not None))
    nodes = sorted([*a.placed, *b.placed], key=scheduler.position.__getitem__)
    before = len(scheduler.trail)
    scheduler.contract(a, b)
    new = scheduler.open(wider.domain.shape, wider.domain.cols)
    for node in nodes:
        scheduler.forget(node)
    refusal = next((reason for node in nodes if (reason := _add(scheduler, node, new)) is not None), None)
    statements = len(new.builder.body)
    if refusal is None and (statements > fits.statements or new.builder.cost > fits.cost):
        if statements > SHARED * (len(a.builder.body) + len(b.builder.body)):
            refusal = CannotInline(nodes[-1], "too long a kernel")
    if refusal is None:
        scheduler.retire(a)
        scheduler.retire(b)
        return ""
    scheduler.rewind(before)
    return f"{refusal.why} ({refusal.node.op.name} {refusal.node.type})"


def _add(scheduler: Scheduler, node: Node, group: Group) -> CannotInline | None:
    if not group.placed and group.domain.cols is None and not isinstance(lowering(node), Scatter):
        return scheduler.attempt(node, group)
    return scheduler.join(node, group)
