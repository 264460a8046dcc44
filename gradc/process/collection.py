"""When Python's collector of cyclic garbage waits.

It goes through what a process holds the more often the more objects are made: a fifth of the time of a compilation,
which makes many that stay and loses few cycles.

As with :data:`.forks.held_off`, the interpreter keeps a block's end on the stack of its frame, and drops it however the
frame is left.  What is dropped last turns the collector on, in C: no Ctrl-C comes between.
"""

from __future__ import annotations

import gc
import operator
import os
import weakref


class _Pause:
    """The collector is off until this is dropped, which all blocks have that are inside at once."""

    __slots__ = ("__weakref__",)
    __call__ = staticmethod("".format)  # at the end of a block: False


class _End(weakref.ref[_Pause]):
    """Of a pause that was made while the collector was on."""

    enable = staticmethod(gc.enable)


_end = _End(_Pause())
"""The end of the last pause, which is over where this is dead."""


class _CollectionWaits:
    """See :data:`collection_waits`."""

    def __enter__(self) -> None:
        pass

    @property
    def __exit__(self) -> _Pause:  # looked up by ``with`` before the block, and kept for its end
        global _end
        pause = _end()
        if pause is None:
            pause = _Pause()
            if not gc.isenabled():
                return pause
            _end = _End(pause, operator.methodcaller("enable"))  # before it is off, as Ctrl-C may come now
        gc.disable()
        return pause


collection_waits = _CollectionWaits()
"""``with collection_waits:`` no thread collects cyclic garbage; a collector that was off before is off afterwards."""


def _in_child() -> None:
    """A child has no other threads, whose blocks never end there."""
    global _end
    if _end() is not None:
        _end = _End(_Pause())
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
