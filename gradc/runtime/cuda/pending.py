"""Deferred checks: submitted calls whose error flag (indices out of range) has not been read yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...process.forks import lock
from .device import Event

Array = np.ndarray[Any, Any]


class DeferredCheck:
    """One call's error flag, which is being copied to pinned memory.

    :param words: the flag, valid once ``event`` has completed.
    :param settle: decodes the words into an error or None; the words may be reused afterwards.
    """

    def __init__(self, words: Array, event: Event, settle: Callable[[Array], Exception | None]):
        self.words, self.event, self._settle = words, event, settle

    def settle(self) -> Exception | None:
        return self._settle(self.words)


class AsyncErrors:
    """The pending checks of a module's calls, oldest first."""

    def __init__(self) -> None:
        self._checks: list[DeferredCheck] = []
        self._lock = lock()

    def add(self, check: DeferredCheck) -> None:
        with self._lock:
            self._checks.append(check)

    def check(self) -> None:
        """Raises the error of an earlier call that has completed; never waits."""
        while self._checks:
            with self._lock:
                finished = next((each for each in self._checks if each.event.done()), None)
                if finished is None:
                    return
                self._checks.remove(finished)
            _raise(finished)

    def wait(self) -> None:
        """Waits for all calls and raises the first error; later ones are raised by the next call of this method."""
        while self._checks:
            with self._lock:
                if not self._checks:
                    return
                first = self._checks.pop(0)
            first.event.wait()
            _raise(first)


def _raise(check: DeferredCheck) -> None:
    error = check.settle()
    if error is not None:
        raise error
