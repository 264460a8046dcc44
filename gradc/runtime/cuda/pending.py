"""Calls that were asked of a device and whose flag of bad indices is still to be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...process.forks import lock
from .device import Event

Array = np.ndarray[Any, Any]


class DeferredCheck:
    """One call's flag, on its way to pinned memory.

    :param words: the flag's once ``event`` has come.
    :param settle: gives the error that words mean, or None; the words are free afterwards.
    """

    def __init__(self, words: Array, event: Event, settle: Callable[[Array], Exception | None]):
        self.words, self.event, self._settle = words, event, settle

    def settle(self) -> Exception | None:
        return self._settle(self.words)


class AsyncErrors:
    """The watches of a module's calls, oldest first."""

    def __init__(self) -> None:
        self._watches: list[DeferredCheck] = []
        self._lock = lock()

    def add(self, watch: DeferredCheck) -> None:
        with self._lock:
            self._watches.append(watch)

    def check(self) -> None:
        """Raise the error of an earlier call that has ended; never waits."""
        while self._watches:
            with self._lock:
                watch = next((w for w in self._watches if w.event.done()), None)
                if watch is None:
                    return
                self._watches.remove(watch)
            _raise(watch)

    def wait(self) -> None:
        """Wait for every call; raise the error of the first that has one, and leave those after it for the next
        time.
        """
        while self._watches:
            with self._lock:
                if not self._watches:
                    return
                first = self._watches.pop(0)
            first.event.wait()
            _raise(first)


def _raise(watch: DeferredCheck) -> None:
    error = watch.settle()
    if error is not None:
        raise error
