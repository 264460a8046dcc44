"""When Python's collector of cyclic garbage waits.

It goes through what a process holds the more often the more objects are made: a fifth of the time of a compilation,
which makes many that stay and loses few cycles.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

from .forks import lock
from .interrupts import interrupts_wait

_lock = lock()
_inside: dict[object, int] = {}
"""The thread of each block that has begun and not ended."""
_paused = False
"""Whether the collector is off because of these."""


@contextlib.contextmanager
def collection_waits() -> Iterator[None]:
    """A context manager in which no thread collects cyclic garbage; one that was off before is off afterwards."""
    block = object()
    try:
        with interrupts_wait():
            _inside[block] = threading.get_ident()
            _pause_or_go_on()
        yield
    finally:
        with interrupts_wait():
            _inside.pop(block, None)
            _pause_or_go_on()


def _pause_or_go_on() -> None:
    global _paused
    with _lock:
        if _inside and gc.isenabled():
            gc.disable()
            _paused = True
        elif not _inside and _paused:
            gc.enable()
            _paused = False


def _in_child() -> None:
    """A child has the thread that forked, and no other."""
    for block, thread in [*_inside.items()]:
        if thread != threading.get_ident():
            del _inside[block]
    _pause_or_go_on()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
