"""Deferred checks: submitted calls whose error flag (indices out of range) has not been read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ...process.forks import lock
from .device import Device, Event

Array = np.ndarray[Any, Any]
NOT_ARRIVED = 2**64 - 2
"""What a word in pinned memory is until the device has copied the flag there: no position, and no value of the flag."""


_in_flight: list[Array] = []
"""Cells of programs that are gone, which the device still writes."""


def _arrived(words: Array) -> bool:
    return NOT_ARRIVED not in words.tolist()


class FlagCopies:
    """Cells of pinned memory that flags are copied to, each with an event; one allocation has many.

    :param words: 8-byte words of a flag.
    """

    CELLS = 64

    def __init__(self, device: Device, words: int):
        self._device, self._words = device, words
        self._free: list[tuple[Array, int, Event]] = []
        self._taken: dict[int, Array] = {}
        self._lock = lock()

    def __del__(self) -> None:
        _in_flight[:] = [words for words in (*_in_flight, *self._taken.values()) if not _arrived(words)]

    def take(self) -> tuple[Array, int, Event]:
        """A cell whose words are all NOT_ARRIVED, its address, and its event."""
        with self._lock:
            if not self._free:
                slab = self._device.pinned(8 * self._words * self.CELLS).view(np.uint64).reshape(self.CELLS, -1)
                self._free = [(words, words.ctypes.data, self._device.event(timed=False)) for words in slab]
            words, address, event = self._free.pop()
            self._taken[id(words)] = words
        words.fill(NOT_ARRIVED)
        return words, address, event

    def give_back(self, words: Array, address: int, event: Event) -> None:
        with self._lock:
            del self._taken[id(words)]
            self._free.append((words, address, event))


class DeferredCheck:
    """One call's error flag, which is being copied to pinned memory.

    :param words: the flag once none of them is NOT_ARRIVED.
    :param event: completes after the copy.
    :param settle: decodes the words into an error or None; the words may be reused afterwards.
    """

    def __init__(self, words: Array, event: Event, settle: Callable[[Array], Exception | None]):
        self.words, self.event, self._settle = words, event, settle

    def arrived(self) -> bool:
        """Whether the copy is complete.  The driver is not asked, which a capture in the global mode would forbid."""
        return _arrived(self.words)

    def settle(self) -> Exception | None:
        return self._settle(self.words)


class AsyncErrors:
    """The pending checks of a module's calls, oldest first."""

    def __init__(self) -> None:
        self._checks: deque[DeferredCheck] = deque()
        self._lock = lock()

    def add(self, check: DeferredCheck) -> None:
        with self._lock:
            self._checks.append(check)

    def check(self) -> None:
        """Raises the error of an earlier call that has completed, unless one before it has not; never waits."""
        while self._checks:
            with self._lock:
                if not self._checks or not self._checks[0].arrived():
                    return
                first = self._checks.popleft()
            _raise(first)

    def wait(self) -> None:
        """Waits for all calls and raises the first error; later ones are raised by the next call of this method."""
        while self._checks:
            with self._lock:
                if not self._checks:
                    return
                first = self._checks.popleft()
            first.event.wait()
            _raise(first)


def _raise(check: DeferredCheck) -> None:
    error = check.settle()
    if error is not None:
        raise error
