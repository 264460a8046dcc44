"""How long a device takes for what a call starts: CUDA events, behind a kernel that waits until the host has queued
everything.

Every contestant is timed alike.  Before each run a buffer larger than L2 is read, so that nothing is left there and
nothing waits to be written back; between a run's two events stands nothing but what the run starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gradc.runtime.cuda.device import Device, Span

MOST = 30
"""Runs that are queued at once: a device takes about a thousand launches before the host has to wait."""
SPIN = 4e8
"""Steps a second, or fewer, of the kernel that waits."""
SLOW = 0.5
LONGEST_SPIN = 0.2
"""Seconds; a host that needs longer is part of what is measured."""


def kernels() -> str:
    """The text of the device that a clock needs."""
    from gradc.codegen.cuda.render import prelude
    from gradc.codegen.text import standalone

    return prelude() + standalone("cuda/calibrate.cu")


class Clock:
    """Times what is asked of one stream.

    :param device: made of :func:`kernels`.
    :param stream: on which the contestants run.
    :param rate: steps a second of the waiting kernel.
    """

    def __init__(self, device: Device, stream: int = 0, rate: float = SPIN):
        self.device, self.stream, self.rate = device, stream, rate
        self.blocks = 8 * device.description.sms
        self._memory = device.memory(max(2 * device.description.l2, 1 << 12)), device.memory(4)
        self._buffer, self._word = (Span(m.address, m.nbytes // 4, np.dtype(np.uint32)) for m in self._memory)
        for span in (self._buffer, self._word):
            device.fill(span.address, 0, span.nbytes, stream)

    def flush(self) -> None:
        self.device.launch(
            "gradc_calibrate_read",
            self.blocks,
            256,
            [self._buffer, self._word, self._buffer.nbytes // 16],
            (1,),
            self.stream,
        )

    def spin(self, seconds: float) -> None:
        self.device.launch("gradc_calibrate_spin", 1, 32, [self._word, int(self.rate * seconds)], (0,), self.stream)

    def wait(self) -> None:
        self.device.synchronize(self.stream)

    def host(self, run: Callable[[], Any]) -> float:
        """Seconds that the host takes to start a run that is warm."""
        times = []
        for _ in range(3):
            self.wait()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        self.wait()
        return min(times)

    def seconds(self, run: Callable[[], Any], budget: float = 0.25, least: int = 5) -> dict[str, float]:
        """``median``, ``least``, ``most`` of the device's seconds, ``host`` of the host's, and how many ``runs``; a run
        of more than SLOW seconds is timed once.
        """
        run()
        self.wait()
        began = time.perf_counter()
        (once,) = self._queued(run, 1, 0.0)
        if once > SLOW:
            return {"median": once, "least": once, "most": once, "host": time.perf_counter() - began, "runs": 1}
        host = self.host(run)
        once = self._queued(run, 2, host)[-1]
        count = max(least, min(MOST, int(budget / max(once + host, 1e-6))))
        times = self._queued(run, count, host)
        return {
            "median": statistics.median(times),
            "least": min(times),
            "most": max(times),
            "host": host,
            "runs": count,
        }

    def _queued(self, run: Callable[[], Any], count: int, host: float) -> list[float]:
        events = [(self.device.event(), self.device.event()) for _ in range(count)]
        self.spin(min(LONGEST_SPIN, 1e-3 + 1.5 * count * (host + 3e-5)))
        for begin, end in events:
            self.flush()
            begin.record(self.stream)
            run()
            end.record(self.stream)
        self.wait()
        return [end.since(begin) for begin, end in events]

    def copy_bandwidth(self, nbytes: int = 0) -> float:
        """Bytes/s of a copy between two buffers, each byte read and written; ``nbytes`` of each, four times L2 if
        unsaid.
        """
        nbytes = nbytes or max(4 * self.device.description.l2, 1 << 12)
        count = nbytes // 16
        source, target = (self.device.memory(16 * count, self.stream) for _ in range(2))
        for memory in (source, target):
            self.device.fill(memory.address, 0, 16 * count, self.stream)
        args = [Span(m.address, 4 * count, np.dtype(np.uint32)) for m in (source, target)]
        seconds = self.seconds(
            lambda: self.device.launch(
                "gradc_calibrate_copy", 4 * self.blocks, 256, [*args, count, 1], (1,), self.stream
            ),
            budget=0.02,
        )
        return 2 * 16 * count / seconds["median"]


def kernel_times(torch: Any, run: Callable[[], Any], wait: Callable[[], Any], count: int = 3) -> dict[str, float]:
    """Seconds of each kernel of a run, by name, as the device's own tracing says; empty where it says nothing."""
    from torch.profiler import ProfilerActivity, profile

    run()
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(count):
            run()
        wait()
    times: dict[str, float] = {}
    for event in traced.key_averages():
        total = getattr(event, "self_device_time_total", 0) or getattr(event, "self_cuda_time_total", 0)
        if total:
            times[event.key] = total * 1e-6 / count
    return dict(sorted(times.items(), key=lambda item: -item[1]))
