"""Numbers (learning rates, ...) in device memory, for kernels that read them there: written by launches that carry them
as arguments, so that nothing is allocated, copied from the host or waited for once a stream has been used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CaptureError
from ...process.forks import lock
from .device import Device, Memory, Span

Array = np.ndarray[Any, Any]
AT_ONCE = 8
"""Numbers that a launch of ``gradc_numbers`` writes."""
CAPTURED = 256
"""Numbers in all captures of a program."""
_STREAMS = 64


class Cells:
    """Cells of 8 bytes for the numbers of calls on one stream, of which each input has its own.

    :param values: input -> the number that work submitted to the stream from now on finds.
    """

    def __init__(self, memory: Memory, count: int):
        self.memory, self.count = memory, count
        self.values: dict[str, int] = {}

    def address(self, cell: int) -> int:
        return self.memory.address + 8 * cell


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
        self._cells: dict[int, Cells] = {}
        self._captured: Cells | None = None
        self._captured_count = 0
        self.lock = lock(reentrant=True)

    def cells(self, stream: int) -> Cells:
        """The cells for calls on a stream; allocated for its first one."""
        found = self._cells.get(stream)
        if found is None:
            with self.lock:
                if len(self._cells) >= _STREAMS:
                    self._cells.clear()
                if self._captured is None:
                    self._captured = Cells(self._device.memory(8 * CAPTURED, stream), CAPTURED)
                count = len(self._cell)
                found = self._cells[stream] = Cells(self._device.memory(8 * count, stream), count)
        return found

    def places(self, names: Sequence[str], stream: int, captured: bool) -> tuple[dict[str, int], Cells]:
        """(address of each input's number, their cells).

        :param captured: the stream is being captured: the graph gets cells of its own.
        :raises CaptureError: there are none, because no call was given a number before, or no more of them.
        """
        if not captured:
            cells = self.cells(stream)
            return {name: cells.address(self._cell[name]) for name in names}, cells
        with self.lock:
            first, found = self._captured_count, self._captured
            if found is None or first + len(names) > CAPTURED:
                raise CaptureError(
                    "there is no memory for the call's numbers, which a capture cannot allocate: call it once with"
                    " numbers before, or give arrays of one element"
                )
            self._captured_count += len(names)
            return {name: found.address(first + i) for i, name in enumerate(names)}, found

    def write(self, numbers: Mapping[str, int], places: Mapping[str, int], cells: Cells, stream: int) -> None:
        """Submits what writes numbers that differ from those of the call before; all of them where a graph does it.

        :param numbers: 8 bytes by input.
        :param places: their addresses.
        """
        known: dict[str, int] = {} if cells is self._captured else cells.values
        changed = [(places[name], bits) for name, bits in numbers.items() if known.get(name) != bits]
        known.update(numbers)
        for i in range(0, len(changed), AT_ONCE):
            some = changed[i : i + AT_ONCE]
            pad = [0] * (AT_ONCE - len(some))
            at = [(address - cells.memory.address) // 8 for address, _ in some]
            to = Span(cells.memory.address, cells.count, np.dtype(np.uint64))
            args = [to, len(some), *at, *pad, *(bits for _, bits in some), *pad]
            self._support.launch("gradc_numbers", 1, 32, args, (0,), stream)


def bits_of(number: Array) -> int:
    """The bytes of an array of one element, at most 8, as an integer."""
    return int.from_bytes(number.tobytes().ljust(8, b"\0"), "little", signed=True)
