"""Numbers (learning rates, ...) in device memory, for kernels that read them there: written by launches that carry them
as arguments, so that nothing is allocated, copied from the host or waited for once a stream has been used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CaptureError
from ...process.forks import lock
from .device import Device, Memory, Span

Array = np.ndarray[Any, Any]
CELLS, AT_ONCE = 256, 8
"""Cells of 8 bytes for a stream; numbers that a launch of ``gradc_numbers`` writes."""
MOST = CELLS // 2
"""Numbers of a call: the cells of some calls before keep their values, for calls with the same numbers."""
_STREAMS = 64


class Cells:
    """Cells for the work of one stream: what a launch writes there is read by later work of the same stream alone."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self._values: list[int | None] = [None] * CELLS
        self._cell: dict[int, int] = {}
        self._next = 0

    def take(self, wanted: Collection[int]) -> dict[int, int]:
        """Gives each number a cell; returns those that must be written: number -> cell."""
        return {bits: self._replace(bits, wanted) for bits in wanted if bits not in self._cell}

    def _replace(self, bits: int, wanted: Collection[int]) -> int:
        while self._values[self._next] in wanted:
            self._next = (self._next + 1) % CELLS
        cell, self._next = self._next, (self._next + 1) % CELLS
        before = self._values[cell]
        if before is not None:
            del self._cell[before]
        self._values[cell], self._cell[bits] = bits, cell
        return cell

    def address(self, bits: int) -> int:
        return self.memory.address + 8 * self._cell[bits]


class Numbers:
    """The cells of a program's calls.

    :param device: what allocates them.  :param support: what has ``gradc_numbers``.
    """

    def __init__(self, device: Device, support: Device):
        self._device, self._support = device, support
        self._cells: dict[int, Cells] = {}
        self._captured: Memory | None = None
        self._captured_count = 0
        self._lock = lock()

    def addresses(self, arrays: Mapping[str, Array], stream: int, captured: bool) -> Iterator[tuple[str, int, Any]]:
        """(name, address of the number, what keeps that allocated) for host arrays of one element of at most 8 bytes.

        :param captured: the stream is being captured: the numbers become part of the graph, in cells of their own.
        :raises CaptureError: there are no cells for numbers in captures, because no call was given a number before, or
            no more of them.
        """
        bits = {name: _bits(array) for name, array in arrays.items()}
        wanted = set(bits.values())
        with self._lock:
            if captured:
                memory = self._captured
                if memory is None or self._captured_count + len(wanted) > CELLS:
                    raise CaptureError(
                        "there is no memory for the call's numbers, which a capture cannot allocate: call it once with"
                        " numbers before, or give arrays of one element"
                    )
                fresh = {b: self._captured_count + i for i, b in enumerate(wanted)}
                self._captured_count += len(wanted)
                places = {b: memory.address + 8 * cell for b, cell in fresh.items()}
            else:
                cells = self._of(stream)
                memory, fresh = cells.memory, cells.take(wanted)
                places = {b: cells.address(b) for b in wanted}
            written = list(fresh.items())
            for i in range(0, len(written), AT_ONCE):
                self._write(memory, written[i : i + AT_ONCE], stream)
        return ((name, places[b], memory) for name, b in bits.items())

    def _of(self, stream: int) -> Cells:
        found = self._cells.get(stream)
        if found is None:
            if len(self._cells) >= _STREAMS:
                self._cells.clear()
            if self._captured is None:
                self._captured = self._device.memory(8 * CELLS, stream)
            found = self._cells[stream] = Cells(self._device.memory(8 * CELLS, stream))
        return found

    def _write(self, memory: Memory, numbers: Sequence[tuple[int, int]], stream: int) -> None:
        pad = [0] * (AT_ONCE - len(numbers))
        cells, values = [cell for _, cell in numbers], [bits for bits, _ in numbers]
        args = [Span(memory.address, CELLS, np.dtype(np.uint64)), len(numbers), *cells, *pad, *values, *pad]
        self._support.launch("gradc_numbers", 1, 32, args, (0,), stream)

    def holds(self, owner: Any) -> bool:
        """Whether later calls may write other numbers to memory of this owner."""
        return any(owner is cells.memory for cells in self._cells.values())


def _bits(array: Array) -> int:
    return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little", signed=True)
