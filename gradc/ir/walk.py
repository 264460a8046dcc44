"""Walks over what is made from what: nodes of a graph, statements of a kernel.

None recurses, so that a graph may be as deep as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from .node import Node
from .statement import Stmt

T = TypeVar("T", bound=Hashable)


def positions(user: Node, node: Node) -> tuple[int, ...]:
    """Which of ``user``'s operands are ``node``."""
    return tuple(k for k, operand in enumerate(user.operands) if operand is node)


def reachable(starts: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """The starts, and what ``further`` leads to from them, each once; in no particular order."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    while pending:
        at = pending.pop()
        yield at
        fresh = [x for x in dict.fromkeys(further(at)) if x not in seen]
        seen.update(fresh)
        pending += fresh


def postorder(roots: Iterable[T], done: Collection[T], sources: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """What the roots need and ``done`` lacks, each after its sources.

    Whoever iterates adds each to ``done``: its sources, which may depend on what is done, are then not asked again.
    """
    pending = list(roots)[::-1]
    while pending:
        at = pending[-1]
        if at not in done:
            lacking = [x for x in sources(at) if x not in done]
            if lacking:
                pending += reversed(lacking)
                continue
            yield at
        pending.pop()


def operands(node: Node) -> tuple[Node, ...]:
    """What a node is made from."""
    return node.operands


def topological(roots: Iterable[Node]) -> list[Node]:
    """Every node the roots need, operands before users, in a reproducible order."""
    order: dict[Node, None] = {}
    for node in postorder(roots, order, operands):
        order[node] = None
    return list(order)


def depends_on_inputs(node: Node) -> bool:
    """Whether an input decides the value: no constant, no dim, and nothing that is made of them alone."""
    return any(n.op.name == "input" for n in reachable([node], operands))


def backward_slice(
    statements: Sequence[Stmt], values: Iterable[str], within: Callable[[Stmt], bool] = lambda s: True
) -> list[Stmt]:
    """The statements that values are made from, in order.

    :param within: whether a statement belongs to the slice; behind one that does not nothing does for its sake.
    """
    needed = set(values)
    kept = []
    for s in reversed(statements):
        if s.name in needed and within(s):
            needed.update(s.uses)
            kept.append(s)
    return kept[::-1]
