"""Traversals of dependence graphs: nodes of a graph, statements of a kernel.

None is recursive, so that the depth of a graph is not limited.
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
    """Everything reachable from ``starts`` by ``further``, each once, in no particular order."""
    pending = list(dict.fromkeys(starts))
    seen = set(pending)
    while pending:
        at = pending.pop()
        yield at
        fresh = [x for x in dict.fromkeys(further(at)) if x not in seen]
        seen.update(fresh)
        pending += fresh


def postorder(roots: Iterable[T], done: Collection[T], sources: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """What the roots depend on and ``done`` lacks, each after its sources.

    The caller must add each item to ``done`` as it is yielded; ``sources`` may depend on what is done.
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
    """The node's operands."""
    return node.operands


def topological(roots: Iterable[Node]) -> list[Node]:
    """Every node the roots depend on, operands before users, in a deterministic order."""
    order: dict[Node, None] = {}
    for node in postorder(roots, order, operands):
        order[node] = None
    return list(order)


def depends_on_inputs(node: Node) -> bool:
    """Whether the value depends on an input, not only on constants and dims."""
    return any(n.op.name == "input" for n in reachable([node], operands))


def backward_slice(
    statements: Sequence[Stmt], values: Iterable[str], within: Callable[[Stmt], bool] = lambda s: True
) -> list[Stmt]:
    """The statements that ``values`` depend on, in order.

    :param within: whether a statement may be in the slice; the dependences of one that may not are not followed.
    """
    needed = set(values)
    kept = []
    for s in reversed(statements):
        if s.name in needed and within(s):
            needed.update(s.uses)
            kept.append(s)
    return kept[::-1]
