"""Times in the format of trace viewers: Perfetto, chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .report import Content


def chrome_trace(found: Content) -> dict[str, Any]:
    """The trace-event JSON that Perfetto and chrome://tracing read: the passes as they were timed, and the kernels of a
    step one after another, as long as they were measured, else as long as they are predicted to take.

    Source: the document "Trace Event Format" of the Chromium project.
    """
    events: list[dict[str, Any]] = []

    def track(number: int, name: str) -> None:
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})

    def event(number: int, name: str, at: float, seconds: float, args: Mapping[str, Any]) -> None:
        events.append(
            {"name": name, "ph": "X", "pid": 1, "tid": number, "ts": at * 1e6, "dur": seconds * 1e6, "args": dict(args)}
        )

    events.append({"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": f"gradc: {found.name}"}})
    track(1, "passes")
    at = 0.0
    for stage in found.stages:
        added = dict(zip(("added", "removed", "rewritten"), stage.changes or (), strict=False))
        event(1, stage.name, at, stage.ms / 1e3, {"size": stage.size, **added})
        at += stage.ms / 1e3
    for number, program in enumerate(found.programs, 2):
        track(number, f"{program.direction} on {found.device}")
        at = 0.0
        for kernel in (k for k in found.kernels if k.direction == program.direction):
            seconds = kernel.measured if kernel.measured is not None else kernel.predicted
            known = {"bytes": kernel.bytes, "line": kernel.where, "strategy": kernel.strategy, "when": kernel.when}
            how = "measured" if kernel.measured is not None else "predicted"
            event(number, kernel.name, at, seconds, {"time": how, **{k: v for k, v in known.items() if v}})
            at += seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}
