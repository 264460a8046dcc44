"""Progress messages on standard error, for activities that take longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

PATIENCE, PERIOD = 1.0, 0.25


class Progress:
    """A context manager that shows the last activity given to :meth:`say`, with its time, once a second has passed; on
    a terminal the line is erased at the end.

    :param wanted: True shows it always, with one line per activity if standard error is no terminal; None only on a
        terminal; False never.
    """

    def __init__(self, activity: str, wanted: bool | None = None):
        self.terminal = sys.stderr.isatty()
        self.shown = wanted if wanted is not None else self.terminal
        self._activity, self._printed = activity, ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def say(self, activity: str) -> None:
        self._activity = activity

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self.shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self.shown:
            self._thread.join()
            if self.terminal and self._printed:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        wait = PATIENCE
        while not self._done.wait(wait):
            wait, seconds = PERIOD, time.monotonic() - self._began
            if self.terminal:
                print(f"\r\033[K{self._activity} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
            elif self._activity != self._printed:
                print(f"{self._activity} ... {seconds:.0f} s", file=sys.stderr, flush=True)
            self._printed = self._activity
