"""How long a device takes for what a call starts: CUDA events, behind a kernel that waits until the host has queued everything.

Every contestant is timed alike.  Before each run a buffer larger than L2 is read, so that nothing is left there and nothing waits to be
written back; between a run's two events stands nothing but what the run starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MOST = 30
"""Runs that are queued at once: a device takes about a thousand launches before the host has to wait."""
SPIN = 4e8
"""Steps a second, or fewer, of the kernel that waits."""


class Clock:
    """Times runs on the current device's current stream."""

    def __init__(self, torch: Any):
        from gradc.codegen.cuda import prelude
        from gradc.codegen.text import standalone
        from gradc.runtime.device import Span
        from gradc.runtime.gpu import Gpu

        self.torch, self.device = torch, Gpu(prelude() + standalone("cuda/calibrate.cu"))
        self.stream = int(torch.cuda.current_stream().cuda_stream)
        l2, self.blocks = self.device.description.l2, 8 * self.device.description.sms
        self.flushed = torch.zeros(max(2 * l2, 1 << 26), dtype=torch.uint8, device="cuda")
        self.word = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._buffer = Span(self.flushed.data_ptr(), self.flushed.numel() // 4, np.dtype(np.uint32))
        self._word = Span(self.word.data_ptr(), 1, np.dtype(np.uint32))

    def flush(self) -> None:
        self.device.launch("gradc_calibrate_read", self.blocks, 256, [self._buffer, self._word, self._buffer.nbytes // 16], (1,), self.stream)

    def spin(self, seconds: float) -> None:
        self.device.launch("gradc_calibrate_spin", 1, 32, [self._word, int(SPIN * seconds)], (0,), self.stream)

    def host(self, run: Callable[[], Any]) -> float:
        """Seconds that the host takes to start a run that is warm."""
        times = []
        for _ in range(3):
            self.torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        self.torch.cuda.synchronize()
        return min(times)

    def seconds(self, run: Callable[[], Any], budget: float = 0.25, least: int = 5) -> dict[str, float]:
        """``median``, ``least``, ``most`` of the device's seconds, ``host`` of the host's, and how many ``runs``."""
        for _ in range(2):
            run()
        host = self.host(run)
        once = self._queued(run, 2, host)[-1]
        count = max(least, min(MOST, int(budget / max(once + host, 1e-6))))
        times = self._queued(run, count, host)
        return {"median": statistics.median(times), "least": min(times), "most": max(times), "host": host, "runs": count}

    def _queued(self, run: Callable[[], Any], count: int, host: float) -> list[float]:
        torch = self.torch
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        self.spin(min(0.2, 1e-3 + 1.5 * count * (host + 3e-5)))
        for begin, end in events:
            self.flush()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]

    def copy_bandwidth(self, nbytes: int = 1 << 28) -> float:
        """Bytes/s of a copy between two buffers, each byte read and written."""
        source = self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")
        target = self.torch.empty_like(source)
        return 2 * nbytes / self.seconds(lambda: target.copy_(source), budget=0.02)["median"]


def kernel_times(torch: Any, run: Callable[[], Any], count: int = 3) -> dict[str, float]:
    """Seconds of each kernel of a run, by name, as the device's own tracing says; empty where it says nothing."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in traced.key_averages():
        total = getattr(event, "self_device_time_total", 0) or getattr(event, "self_cuda_time_total", 0)
        if total:
            found[event.key] = total * 1e-6 / count
    return dict(sorted(found.items(), key=lambda item: -item[1]))
