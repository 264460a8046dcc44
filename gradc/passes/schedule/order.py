"""The order of groups: which kernels run before which."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class GroupOrder:
    """A directed acyclic graph of groups with its transitive closure: an edge leads from a group to one that needs it.

    The groups that run before a group are the bits of one integer, so that a question about paths is one test, and an
    edge costs only the groups whose predecessors it changes.  Every change returns what undoes it.
    """

    def __init__(self) -> None:
        self.successors: dict[int, set[int]] = {}
        self.predecessors: dict[int, set[int]] = {}
        self.before: dict[int, int] = {}
        """All groups with a path to this one: bit ``k`` for group ``k``."""

    def __contains__(self, key: int) -> bool:
        return key in self.before

    @property
    def edges(self) -> Iterator[tuple[int, int]]:
        return ((a, b) for a, after in self.successors.items() for b in after)

    def sorted(self, rank: Callable[[int], tuple[bool, int]]) -> Iterator[int]:
        """The groups in an order in which they can run: always the one of least rank of those that can be next."""
        waits_for = {key: len(before) for key, before in self.predecessors.items()}
        ready = [(rank(key), key) for key, count in waits_for.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, key = heapq.heappop(ready)
            yield key
            for after in self.successors[key]:
                waits_for[after] -= 1
                if not waits_for[after]:
                    heapq.heappush(ready, (rank(after), after))

    def has_path(self, first: int, second: int) -> bool:
        return bool(self.before[second] >> first & 1)

    def between(self, a: int, b: int) -> bool:
        """Whether a third group needs the one and is needed by the other: then the two cannot become one."""
        return any(
            self.has_path(key, last) for first, last in ((a, b), (b, a)) for key in self.successors[first] - {last}
        )

    def add(self, key: int) -> Callable[[], None]:
        """A group without edges."""
        self.successors[key], self.predecessors[key], self.before[key] = set(), set(), 0

        def undo() -> None:
            del self.successors[key], self.predecessors[key], self.before[key]

        return undo

    def connect(self, first: int, second: int) -> Callable[[], None]:
        """``first`` runs before ``second``."""
        if second in self.successors[first]:
            return lambda: None
        self.successors[first].add(second)
        self.predecessors[second].add(first)
        changed = self._put_before([second], self.before[first] | 1 << first)

        def undo() -> None:
            self.before.update(changed)
            self.successors[first].discard(second)
            self.predecessors[second].discard(first)

        return undo

    def contract(self, a: int, b: int, new: int) -> Callable[[], None]:
        """``new`` takes the place of both ``a`` and ``b``, which have no group between them."""
        pair = {a, b}
        after = (self.successors[a] | self.successors[b]) - pair
        ahead = (self.predecessors[a] | self.predecessors[b]) - pair
        edges = [(self.successors, key, self.successors[key]) for key in ahead | pair]
        edges += [(self.predecessors, key, self.predecessors[key]) for key in after | pair]
        masks = {key: self.before.pop(key) for key in pair}
        for ends, key, old in edges:
            ends[key] = old - pair | {new}
        for key in pair:
            del self.successors[key], self.predecessors[key]
        self.successors[new], self.predecessors[new] = after, ahead
        gone = 1 << a | 1 << b
        self.before[new] = (masks[a] | masks[b]) & ~gone
        changed = self._put_before([*after], self.before[new] | 1 << new, gone)

        def undo() -> None:
            del self.before[new], self.successors[new], self.predecessors[new]
            self.before.update(changed | masks)
            for ends, key, old in edges:
                ends[key] = old

        return undo

    def _put_before(self, groups: list[int], more: int, gone: int = 0) -> dict[int, int]:
        """Some groups and all after them run after the groups ``more``, and none named in ``gone`` is left; what
        ``before`` was where it changed.
        """
        changed: dict[int, int] = {}
        while groups:
            key = groups.pop()
            mask = self.before[key]
            if mask & ~gone | more != mask:
                changed.setdefault(key, mask)
                self.before[key] = mask & ~gone | more
                groups += self.successors[key]
        return changed
