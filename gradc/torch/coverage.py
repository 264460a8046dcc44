"""What the backend took and what it left to torch, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .cuda_graphs import Captures
from .importer import Refusal
from .timing import Time


@dataclass(frozen=True)
class Compiled:
    """One graph that Dynamo handed over.

    :param name: of the graph.
    :param ops: how many of its ops compute something.
    :param regions: the numbers of such ops of the regions that gradc runs.
    :param refused: what torch runs, with reasons.
    :param reason: why torch runs all of it, "" if it does not.
    :param times: with the option ``timed``, of each step by the name of its node; of none where torch runs all.
    :param captures: with ``mode="reduce-overhead"``, what became of its calls.
    """

    name: str
    ops: int
    regions: tuple[int, ...]
    refused: tuple[Refusal, ...]
    reason: str = ""
    times: Mapping[str, Time] = field(default_factory=dict)
    captures: Captures | None = None


@dataclass(frozen=True)
class Row:
    """An op that torch ran for one reason.

    :param share: of all ops that compute something.
    :param time: the share of all time that was measured, forward and backward; None where nothing was.
    """

    op: str
    reason: str
    count: int
    share: float
    time: float | None = None


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
        counts: Counter[tuple[str, str]] = Counter()
        seconds: Counter[tuple[str, str]] = Counter()
        for graph, refusal in self._refusals():
            counts[refusal.op, refusal.reason] += 1
            if refusal.node in graph.times:
                seconds[refusal.op, refusal.reason] += graph.times[refusal.node].seconds  # type: ignore[assignment]
        total = self.seconds
        return [
            Row(*key, n, n / max(self.ops, 1), seconds[key] / total if total else None)
            for key, n in counts.most_common()
        ]

    @property
    def times(self) -> list[Time]:
        """With the option ``timed``, the time per region, and per overload that torch ran; the longest first."""
        found: dict[str, Time] = {}
        for each in (time for graph in self.graphs for time in graph.times.values()):
            entry = found.setdefault(each.op, Time(each.op))
            entry.calls += each.calls
            entry.forward += each.forward
            entry.backward += each.backward
        return sorted(found.values(), key=lambda time: -time.seconds)

    @property
    def seconds(self) -> float:
        """All that was measured."""
        return sum(time.seconds for graph in self.graphs for time in graph.times.values())

    def _refusals(self) -> Iterable[tuple[Compiled, Refusal]]:
        for graph in self.graphs:
            for each in graph.refused:
                yield graph, each
            if graph.reason:
                yield graph, Refusal("(the whole graph)", graph.reason, "", graph.name)

    def clear(self) -> None:
        """Forget all graphs."""
        self.graphs.clear()

    def __str__(self) -> str:
        if not self.graphs:
            return "0 graphs: torch has handed gradc none since the start or the last clear()"
        regions = sum(len(g.regions) for g in self.graphs)
        lines = [f"{len(self.graphs)} graphs, {self.ops} ops: {self.share:.0%} in {regions} regions of gradc"]
        rows, times, total = self.rows, self.times, self.seconds
        if rows:
            width = max(len(row.op) for row in rows)
            lines.append("left to torch (ops, share of ops, share of time):" if times else "left to torch:")
            for row in rows:
                time = "" if not times else f"  {row.time:>4.0%}" if row.time is not None else "     -"
                lines.append(f"  {row.op:<{width}}  {row.count:>4}  {row.share:>4.0%}{time}  {row.reason}")
        lines += [f"{g.name}: {g.captures}" for g in self.graphs if g.captures is not None and g.captures.any]
        if times:
            width = max(len(each.op) for each in times)
            lines.append("time (share, calls, ms forward, ms backward):")
            lines += [
                f"  {t.op:<{width}}  {t.seconds / max(total, 1e-12):>4.0%}  {t.calls:>5}  {t.forward * 1e3:>9.2f}"
                f"  {t.backward * 1e3:>9.2f}"
                for t in times
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
