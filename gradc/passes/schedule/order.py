"""The order of groups: which kernels run before which."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class GroupOrder:
    """A directed acyclic graph of groups with its transitive closure: an edge leads from a group to one that needs it.

    The groups that run before a group are the bits of one integer, so that a question about paths is one test, and an
    edge costs only the groups whose predecessors it changes.
    """

    def __init__(self) -> None:
        self.successors: dict[int, set[int]] = {}
        self.before: dict[int, int] = {}
        """All groups with a path to this one: bit ``k`` for group ``k``."""

    def __contains__(self, key: int) -> bool:
        return key in self.before

    @property
    def edges(self) -> Iterator[tuple[int, int]]:
        return ((a, b) for a, after in self.successors.items() for b in after)

    def add(self, key: int) -> Callable[[], None]:
        """A group without edges; what undoes it."""
        if key in self:
            return lambda: None
        self.successors[key], self.before[key] = set(), 0

        def undo() -> None:
            del self.successors[key], self.before[key]

        return undo

    def connect(self, first: int, second: int) -> Callable[[], None]:
        """``first`` runs before ``second``; what undoes it."""
        if second in self.successors[first]:
            return lambda: None
        self.successors[first].add(second)
        more, changed, pending = self.before[first] | 1 << first, dict[int, int](), [second]
        while pending:
            key = pending.pop()
            known = self.before[key]
            if known | more != known:
                changed[key] = known
                self.before[key] = known | more
                pending += self.successors[key]

        def undo() -> None:
            self.before.update(changed)
            self.successors[first].discard(second)

        return undo

    def has_path(self, first: int, second: int) -> bool:
        return bool(self.before[second] >> first & 1)

    def between(self, a: int, b: int) -> bool:
        """Whether a third group needs the one and is needed by the other: then the two cannot become one."""
        return any(
            self.has_path(key, last) for first, last in ((a, b), (b, a)) for key in self.successors[first] - {last}
        )

    def contracted(self, a: int, b: int, new: int) -> GroupOrder:
        """The order in which ``new`` stands for both ``a`` and ``b``, with no group between them."""
        gone = 1 << a | 1 << b
        ahead = (self.before[a] | self.before[b]) & ~gone
        result = GroupOrder()
        result.before = {
            key: (mask & ~gone | ahead | 1 << new) if mask & gone else mask
            for key, mask in self.before.items()
            if key not in (a, b)
        }
        result.before[new] = ahead
        result.successors = {
            key: {new if k in (a, b) else k for k in after}
            for key, after in self.successors.items()
            if key not in (a, b)
        }
        result.successors[new] = (self.successors[a] | self.successors[b]) - {a, b}
        return result
