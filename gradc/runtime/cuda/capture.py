"""Calls captured as a CUDA graph over fixed arrays, and replayed as one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CaptureError, Unsupported
from ..backend import Array, Backend, BoundCall
from ..host.arrays import Arguments, Results
from .backend import GpuBackend
from .programs import Submission


@dataclass
class Step:
    """A call in a capture, which was run once before.

    :param results: its outputs by name; each replay writes them.
    :param started: its last submission, which has the error flag.
    """

    backend: GpuBackend
    call: BoundCall
    workspace: Array
    results: Results
    started: Submission

    def submit(self) -> Submission:
        return self.backend.start(self.call, self.workspace)


class Capture:
    """A captured CUDA graph.

    :ivar outputs: arrays by name; each replay writes them.
    """

    def __init__(self, graph: Any, steps: Sequence[Step], outputs: Arguments):
        self.graph, self.steps, self.outputs = graph, tuple(steps), dict(outputs)
        self._backend = steps[0].backend

    def replay(self, stream: Any = None) -> None:
        """Launches the graph on the current contents of the arrays, without waiting.

        :param stream: None is the current stream of the inputs' library.
        """
        self.graph.replay(self._backend.stream(stream, self.steps[0].call.given.values()))

    def check(self) -> None:
        """Waits for the device and raises the error of the last replay; a replay with an error only leaves its outputs
        unwritten.

        :raises IndexOutOfRange: a data-dependent index is out of range.
        """
        self._backend.device.synchronize()
        for step in self.steps:
            step.backend.native.finish(step.started)


def stream_for(backend: Backend, given: Any, values: Iterable[Any]) -> int:
    """The stream to capture: the caller's, else a new one, which waits for the current one.

    :raises Unsupported: the target is not ``cuda``.
    :raises CaptureError: the stream cannot be captured, or is being captured already.
    """
    if not isinstance(backend, GpuBackend):
        raise Unsupported(f"a CUDA graph of a module for {backend.target!r}; target='cuda' has one")
    current = backend.stream(None, values)
    stream = backend.stream(given, values) if given is not None else backend.device.stream()
    if stream <= 2:
        raise CaptureError("the default stream cannot be captured; without stream= a new one is used")
    for busy in {stream, current}:
        if backend.device.capturing(busy):
            raise CaptureError(f"stream {busy:#x} is being captured already")
    if stream != current:
        backend.device.follow(stream, current)
    return int(stream)


def step(backend: Backend, call: BoundCall, workspace: Array | None, given: Arguments) -> Step:
    """Runs a call once in memory that stays allocated, which raises its errors now and loads its code, because loading
    is not allowed during a capture.

    :param given: the caller's arrays for outputs, by name.
    :raises CaptureError: an input would have to be made contiguous in each replay.
    """
    assert isinstance(backend, GpuBackend)
    if call.noncontiguous:
        raise CaptureError(
            f"the input {call.noncontiguous[0]} is not contiguous and aligned: a replay would read the copy that was"
            " made of it now"
        )
    backend.keep_numbers(call)
    if workspace is None:
        workspace = backend.scratch((max(backend.plan(call.dims).workspace, 1),), np.uint8, call.stream, call.kind)
    results = {
        key: given[key] if given.get(key) is not None else backend.result(call.outputs[key], call.kind)
        for key, _ in backend.program.outputs
    }
    started = backend.start(call, workspace)
    backend.finish(started)
    return Step(backend, call, workspace, results, started)


def capture(steps: Sequence[Step], stream: int, outputs: Arguments) -> Capture:
    """Captures the steps in order."""
    device = steps[0].backend.native.device
    device.synchronize(stream)
    try:
        device.capture(stream)  # here, as Ctrl-C may come once it has begun
        for each in steps:
            each.started = each.submit()
    except BaseException:
        device.captured(stream, keep=False)
        raise
    return Capture(device.captured(stream), steps, outputs)
