"""The stacks of all threads where a test does not end: what hangs tells its cause, and goes on.

pytest's own ``faulthandler_timeout`` starts a thread for each test and waits for its end, which takes 0.6 ms of CPU,
and several times as long where other processes are ready to run.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable


class Watchdog:
    """Writes the stacks of a test that takes longer than ``seconds``, not more than ``slack`` seconds early.

    :param file: a descriptor.
    """

    def __init__(self, file: int, seconds: float, slack: float, clock: Callable[[], float] = time.monotonic):
        self.file, self.seconds, self.slack, self.clock = file, seconds, slack, clock
        self.armed: float | None = None

    def begin(self) -> None:
        """A test begins."""
        now = self.clock()
        if self.armed is None or now - self.armed >= self.slack:
            faulthandler.dump_traceback_later(self.seconds, file=self.file)
            self.armed = now

    def cancel(self) -> None:
        """Nothing is written until another test begins."""
        faulthandler.cancel_dump_traceback_later()
        self.armed = None
