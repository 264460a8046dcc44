"""Calls as a CUDA graph: written down once with fixed arrays, asked for again as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CaptureError, Unsupported
from .calls import start, with_program
from .programs import CudaProgram, Submission

if TYPE_CHECKING:
    from ..executable import Executable, Prepared

Array = np.ndarray[Any, Any]


@dataclass
class Step:
    """A call of a capture, run once already.

    :param results: its outputs by name, written again by each replay.  :param started: where its flag lies.
    """

    executable: Executable
    prepared: Prepared
    workspace: Array
    results: dict[str, Any]
    started: Submission

    def ask(self) -> Submission:
        e = self.executable
        return start(e, self.prepared, e.bound(self.prepared), e.native.bind(self.prepared.dims), self.workspace)


class Capture:
    """What was captured.

    :ivar outputs: arrays by name; each replay writes them.
    """

    def __init__(self, graph: Any, steps: Sequence[Step], outputs: Mapping[str, Any]):
        self.graph, self.steps, self.outputs = graph, tuple(steps), dict(outputs)
        self._place = steps[0].executable.place

    def replay(self, stream: Any = None) -> None:
        """Ask for all of it again, on the arrays as they are by then; nothing is waited for.

        :param stream: None: the current one of the library that the inputs are of.
        """
        self.graph.replay(self._place.stream(stream, self.steps[0].prepared.given.values()))

    def check(self) -> None:
        """Wait for the device, and raise what the last replay found wrong: a replay itself only keeps outputs from
        being written.

        :raises IndexOutOfRange: a data-dependent index.
        """
        self._place.device.synchronize()
        for step in self.steps:
            native: CudaProgram = step.executable.native
            native.finish(step.started)


def stream_for(executable: Executable, given: Any, values: Any) -> int:
    """The stream to capture: the caller's, else a new one, which waits for the current one.

    :raises CaptureError: it cannot be captured, or is already.
    """
    if executable.target != "cuda":
        raise Unsupported(f"a CUDA graph of a module for {executable.target!r}; target='cuda' has one")
    place = executable.place
    current = place.stream(None, values)
    stream = place.stream(given, values) if given is not None else place.device.stream()
    if stream <= 2:
        raise CaptureError("the default stream cannot be captured; without stream= a new one is used")
    for busy in {stream, current}:
        if place.device.capturing(busy):
            raise CaptureError(f"stream {busy:#x} is being captured already")
    if stream != current:
        place.device.follow(stream, current)
    return int(stream)


def step(
    executable: Executable,
    inputs: Mapping[str, Any],
    stream: int,
    out: Mapping[str, Any] | None = None,
    workspace: Any = None,
    dims: Mapping[str, int] | None = None,
) -> Step:
    """Run a call once, in memory that stays: its errors come now, and its first launches load what a capture could not.

    :raises CaptureError: an input would have to be packed in each replay.
    """
    prepared = executable.prepare(inputs, out, False, dims, True, stream)
    if prepared.loose:
        raise CaptureError(
            f"the input {prepared.loose[0]} is not contiguous and aligned: a replay would read the copy that was made"
            " of it now"
        )
    native: CudaProgram = executable.native
    plan = native.bind(prepared.dims)
    space = executable._workspace(workspace, prepared)
    if space is None:
        space = executable.place.scratch((max(plan.workspace, 1),), np.uint8, stream)
    results = {key: (out or {}).get(key, None) for key in executable.outputs}
    results = {
        key: value if value is not None else executable.place.result(prepared.outputs[key], prepared.kind)
        for key, value in results.items()
    }
    started = start(executable, prepared, executable.bound(prepared), plan, space)
    with_program(executable, lambda: native.finish(started))
    return Step(executable, prepared, space, results, started)


def capture(steps: Sequence[Step], stream: int, outputs: Mapping[str, Any]) -> Capture:
    """Write the steps down, one after another."""
    device = steps[0].executable.native.device
    device.synchronize(stream)
    device.capture(stream)
    try:
        for each in steps:
            each.started = each.ask()
    except BaseException:
        device.captured(stream, keep=False)
        raise
    return Capture(device.captured(stream), steps, outputs)
