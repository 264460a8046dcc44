"""Numbers (learning rates, ...) in device memory, for kernels that read them there: written by launches that carry them
as arguments, so that nothing is allocated, copied from the host or waited for once a stream has been used.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CaptureError
from ...process.forks import lock
from ..host.arrays import address_of
from ..recent import Recent
from .device import Device, Span

Array = np.ndarray[Any, Any]
AT_ONCE = 8
"""Numbers that a launch of ``gradc_numbers`` writes."""
CAPTURED = 256
"""Numbers that captures find memory for until a call outside of a capture allocates more."""
PER_THREAD = 2
"""The handle that means another stream in each thread (cudaStreamPerThread)."""
_STREAMS = 64


class Cells:
    """Cells of 8 bytes for the numbers of calls on one stream, of which each input has its own.

    :param start: the address of the first.
    :param memory: keeps them allocated.
    :param captured: they are written by graphs.
    :ivar values: input -> the number that work submitted to the stream from now on finds; unknown in graphs.
    """

    def __init__(self, start: int, count: int, memory: Any, captured: bool = False):
        self.start, self.count, self.memory, self.captured = start, count, memory, captured
        self.values: dict[str, int] = {}

    def address(self, cell: int) -> int:
        return self.start + 8 * cell


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.cells: Recent[int, Cells] = Recent(_STREAMS)


class Numbers:
    """The numbers of a program's calls.

    :param device: what allocates cells.
    :param support: what has ``gradc_numbers``.
    :param inputs: the program's.
    :ivar lock: held from :meth:`write` until the work that reads the numbers is submitted.
    """

    def __init__(self, device: Device, support: Device, inputs: Sequence[str]):
        self._device, self._support = device, support
        self._cell = {name: i for i, name in enumerate(inputs)}
        self._shared: Recent[int, Cells] = Recent(_STREAMS)
        self._own = _OfThread()
        self._captured: list[Cells] = []  # the last one has room; graphs read from all of them
        self._left = 0
        self.lock = lock(reentrant=True)

    def cells(self, stream: int) -> Cells:
        """The cells for calls on a stream; allocated for its first one."""
        known = self._own.cells if stream == PER_THREAD else self._shared
        found = known.get(stream)
        if found is None or self._left < len(self._cell):
            with self.lock:
                if self._left < len(self._cell):
                    self._left = max(CAPTURED, len(self._cell))
                    self._captured.append(self._new(self._left, stream, True))
                found = known.get(stream)
                if found is None:
                    found = known[stream] = self._new(len(self._cell), stream)
        return found

    def _new(self, count: int, stream: int, captured: bool = False) -> Cells:
        memory = self._device.memory(8 * count, stream)
        return Cells(memory.address, count, memory, captured)

    def places(
        self, names: Sequence[str], stream: int, captured: bool, own: Array | None = None
    ) -> tuple[dict[str, int], Cells]:
        """(address of each input's number, their cells).

        :param captured: the stream is being captured: the graph gets cells of its own.
        :param own: memory of the graph for them, where it has its own.
        :raises CaptureError: there are none, because no call outside of a capture was given a number, or captures have
            used them all since.
        """
        if not captured:
            cells = self.cells(stream)
            return {name: cells.address(self._cell[name]) for name in names}, cells
        if own is not None and self._captured:
            found = Cells(address_of(own), len(names), own, captured=True)
            return {name: found.address(i) for i, name in enumerate(names)}, found
        with self.lock:
            if self._left < len(names):
                way = "call it once more outside of a capture" if self._captured else "call it once with numbers before"
                raise CaptureError(
                    f"there is no memory for the call's numbers, which a capture cannot allocate: {way}, or give arrays"
                    " of one element"
                )
            found = self._captured[-1]
            first = found.count - self._left
            self._left -= len(names)
            return {name: found.address(first + i) for i, name in enumerate(names)}, found

    def write(self, numbers: Mapping[str, int], places: Mapping[str, int], cells: Cells, stream: int) -> None:
        """Submits what writes numbers that differ from those of the call before; all of them where a graph does it.

        :param numbers: 8 bytes by input.
        :param places: their addresses.
        """
        known: dict[str, int] = {} if cells.captured else cells.values
        changed = [(name, bits) for name, bits in numbers.items() if known.get(name) != bits]
        for i in range(0, len(changed), AT_ONCE):
            some = changed[i : i + AT_ONCE]
            pad = [0] * (AT_ONCE - len(some))
            at = [(places[name] - cells.start) // 8 for name, _ in some]
            to = Span(cells.start, cells.count, np.dtype(np.uint64))
            args = [to, len(some), *at, *pad, *(bits for _, bits in some), *pad]
            self._support.launch("gradc_numbers", 1, 32, args, (0,), stream)
            known.update(some)  # now: a launch that fails has written nothing


def bits_of(number: Array) -> int:
    """The bytes of an array of one element, at most 8, as an integer."""
    return int.from_bytes(number.tobytes().ljust(8, b"\0"), "little", signed=True)
