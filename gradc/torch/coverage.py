"""What the backend took and what it left to torch, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .importer import Refusal


@dataclass(frozen=True)
class Compiled:
    """One graph that Dynamo handed over.

    :param name: of the graph.
    :param ops: how many of its ops compute something.
    :param regions: the numbers of such ops of the regions that gradc runs.
    :param refused: what torch runs, with reasons.
    :param reason: why torch runs all of it, "" if it does not.
    """

    name: str
    ops: int
    regions: tuple[int, ...]
    refused: tuple[Refusal, ...]
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """An op that torch ran for one reason.

    :param share: of all ops that compute something.
    """

    op: str
    reason: str
    count: int
    share: float


@dataclass
class Report:
    """All graphs since the last :meth:`clear`; ``print`` shows a table."""

    graphs: list[Compiled] = field(default_factory=list)

    @property
    def ops(self) -> int:
        """How many ops of all graphs compute something."""
        return sum(g.ops for g in self.graphs)

    @property
    def share(self) -> float:
        """The share of these that gradc runs; 1 where there are none."""
        return sum(sum(g.regions) for g in self.graphs) / self.ops if self.ops else 1.0

    @property
    def rows(self) -> list[Row]:
        """What torch ran, the most frequent first."""
        counts = Counter((r.op, r.reason) for r in self._refusals())
        return [Row(op, reason, n, n / max(self.ops, 1)) for (op, reason), n in counts.most_common()]

    def _refusals(self) -> Iterable[Refusal]:
        for graph in self.graphs:
            yield from graph.refused
            if graph.reason:
                yield Refusal("(the whole graph)", graph.reason, "", graph.name)

    def clear(self) -> None:
        """Forget all graphs."""
        self.graphs.clear()

    def __str__(self) -> str:
        regions = sum(len(g.regions) for g in self.graphs)
        lines = [
            f"{len(self.graphs)} graphs, {self.ops} ops: {self.share:.0%} in {regions} regions of gradc",
        ]
        if self.rows:
            width = max(len(row.op) for row in self.rows)
            lines += [
                "left to torch:",
                *(f"  {r.op:<{width}}  {r.count:>4}  {r.share:>4.0%}  {r.reason}" for r in self.rows),
            ]
        return "\n".join(lines)


_report = Report()


def report() -> Report:
    """What ``torch.compile(backend="gradc")`` has compiled in this process."""
    return _report


def record(compiled: Compiled) -> None:
    """Add a graph to the report."""
    _report.graphs.append(compiled)


def listing(name: str, refused: Sequence[Refusal]) -> str:
    """All that gradc does not take of a program."""
    lines = "".join(f"\n  {each}" for each in dict.fromkeys(map(str, refused)))
    return f"gradc does not take {len(refused)} of the ops of {name}:{lines}"
