"""Minimum cuts by maximum flows: Dinic's algorithm (E. A. Dinic, Soviet Math. Doklady 11, 1970).

networkx has them, too; importing it takes longer than most compilations.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from ...errors import InternalError

Vertex = TypeVar("Vertex", bound=Hashable)


class Network(Generic[Vertex]):
    """A directed network whose edges have capacities.

    Vertices are numbered, and so are edges: ``e ^ 1`` is the reverse of ``e``, whose capacity is the flow along ``e``.
    """

    def __init__(self) -> None:
        self.vertices: dict[Vertex, int] = {}
        self._leaving: list[list[int]] = []
        self._head: list[int] = []
        self._capacity: list[int | None] = []

    def add_edge(self, tail: Vertex, head: Vertex, capacity: int | None) -> None:
        """:param capacity: None: infinite."""
        a, b = self._number(tail), self._number(head)
        for vertex, other, bound in ((a, b, capacity), (b, a, 0)):
            self._leaving[vertex].append(len(self._head))
            self._head.append(other)
            self._capacity.append(bound)

    def _number(self, vertex: Vertex) -> int:
        number = self.vertices.setdefault(vertex, len(self.vertices))
        if number == len(self._leaving):
            self._leaving.append([])
        return number

    def source_side(self, source: Vertex, sink: Vertex) -> set[Vertex]:
        """The source's side of the minimum cut whose other side is the smallest: the one that every maximum flow gives
        as the vertices from which the sink cannot be reached by what is left of the capacities.

        :raises InternalError: no cut is finite.
        """
        infinite = 1 + sum(c for c in self._capacity if c is not None)
        left = [infinite if c is None else c for c in self._capacity]
        start, end = self._number(source), self._number(sink)
        flow = 0
        while True:
            distance = self._distances(end, left)
            if distance[start] is None:
                return {vertex for vertex, number in self.vertices.items() if distance[number] is None}
            flow += self._block(start, end, left, distance)
            if flow >= infinite:
                raise InternalError("a network has no finite cut")

    def _distances(self, end: int, left: list[int]) -> list[int | None]:
        """How many edges with capacity left each vertex is away from ``end``; None: it does not reach it."""
        distance: list[int | None] = [None] * len(self._leaving)
        distance[end], depth, reached = 0, 0, [end]
        while reached:
            depth, further = depth + 1, []
            for vertex in reached:
                for edge in self._leaving[vertex]:
                    tail = self._head[edge]
                    if distance[tail] is None and left[edge ^ 1]:
                        distance[tail] = depth
                        further.append(tail)
            reached = further
        return distance

    def _block(self, start: int, end: int, left: list[int], distance: list[int | None]) -> int:
        """Sends flow along shortest paths until each has an edge without capacity; how much it was."""
        head, leaving, flow = self._head, self._leaving, 0
        following = [0] * len(leaving)  # edges of each vertex before this one are of no use any more
        path: list[int] = []
        vertex = start
        while True:
            if vertex == end:
                amount = min(left[edge] for edge in path)
                flow += amount
                for edge in path:
                    left[edge] -= amount
                    left[edge ^ 1] += amount
                full = next(k for k, edge in enumerate(path) if not left[edge])
                vertex = head[path[full] ^ 1]
                del path[full:]
                continue
            edges, wanted = leaving[vertex], distance[vertex]
            for at in range(following[vertex], len(edges)):
                edge = edges[at]
                to = distance[head[edge]]
                if left[edge] and to is not None and to + 1 == wanted:
                    following[vertex] = at
                    path.append(edge)
                    vertex = head[edge]
                    break
            else:
                following[vertex] = len(edges)
                if not path:
                    return flow
                vertex = head[path.pop() ^ 1]
                following[vertex] += 1
