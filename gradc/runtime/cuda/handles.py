"""Handles of CUDA's libraries: one for each stream of a device, so that threads with streams of their own do not wait
for each other.

A handle is told its stream and its workspace by whoever uses it, under its lock.  So a full pool gives a stream the
handle that was used least recently, once the call that it is in has submitted its work: nothing is destroyed, which
would wait for the device and take memory from under what a captured graph replays, and nothing is allocated, which a
capture forbids.  That several streams take turns with a handle is what cuBLAS and cuDNN provide for (their
documentation of cublasSetStream and cudnnSetStream); the workspaces are the calls' own.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ...errors import OutOfMemory
from ...process.forks import lock
from .capture_mode import relaxed

H = TypeVar("H")
T = TypeVar("T")
STREAMS = 8
"""Handles of a device: each has memory of its own there (cuBLAS: tens of MiB)."""
_PATIENCE = 1.0
"""Seconds for which the process's exit waits for a call that is being submitted."""


class Handle(Generic[H]):
    """A handle; :attr:`lock` is held while it is used.

    :ivar native: the library's own, which a call may look at only under the lock.
    :ivar given: what it was told last: the stream, and whatever else goes with it; None: nobody knows.
    :ivar used: when it was asked for last.
    """

    def __init__(self, native: H):
        self.native = native
        self.given: Any = None
        self.used, self.closed = 0, False
        self.lock = lock(reentrant=True)  # the handler of a signal may ask for a product in the middle of one


class Handles(Generic[H]):
    """The handles of a library.

    :param create: makes one of a device, which is the current one.
    :param destroy: gives one back, whose device is the current one.
    """

    def __init__(self, create: Callable[[int], H], destroy: Callable[[H], object]):
        self._create, self._destroy = create, destroy
        self._of: dict[tuple[int, int | None], Handle[H]] = {}
        """By device and stream; None: no stream has it yet."""
        self._lock = lock(reentrant=True)
        self._clock = itertools.count(1)
        _pools.add(self)

    def using(
        self, device: int, work: Callable[[Handle[H], Any], T], capturing: Callable[[int], bool] | None = None
    ) -> Callable[[int | None], T]:
        """A function of a stream: ``work(handle, stream)`` under the lock of the stream's handle.  The stream None is
        for what depends on the device alone.

        :param capturing: whether a stream is being captured, where no handle can be made.
        :raises DeviceError, OutOfMemory: the device has no handle yet, and none can be made; with one there is always
            one.
        """
        known, clock = self._of, self._clock
        self._found(device, None)

        def used(stream: int | None) -> T:
            while True:
                handle = known.get((device, stream)) or self._found(device, stream, capturing)
                handle.used = next(clock)
                with handle.lock:
                    if not handle.closed:
                        return work(handle, stream)

        return used

    def _found(self, device: int, stream: int | None, capturing: Callable[[int], bool] | None = None) -> Handle[H]:
        """A handle for a stream that has none."""
        with self._lock:
            if found := self._of.get((device, stream)):
                return found
            own = sorted((key for key in self._of if key[0] == device), key=lambda key: self._of[key].used)
            if stream is None and own:
                return self._of[own[-1]]
            captured = stream is not None and capturing is not None and capturing(stream)
            handle = self._of.pop((device, None), None)
            if handle is None and (not own or (not captured and len(own) < STREAMS)):
                handle = self._made(device, needed=not own)
            self._of[device, stream] = handle or self._of.pop(own[0])
            return self._of[device, stream]

    def _made(self, device: int, needed: bool) -> Handle[H] | None:
        """A new handle; None where there is no memory for one more that is not needed."""
        atexit.unregister(_close)
        atexit.register(_close)  # now, to run before what CuPy, imported earlier, does at exit
        try:
            return Handle(relaxed(self._create, device))
        except OutOfMemory:
            if needed:
                raise
            return None

    def forget(self) -> None:
        """In a child: what belongs to the parent's context, which nothing of the child's may touch."""
        self._of.clear()

    def close(self) -> None:
        """Gives all back, each once its call has submitted its work; later calls make new ones."""
        with self._lock:
            held = self._of.copy()
            self._of.clear()
        for (device, _), handle in held.items():
            if not handle.lock.acquire(timeout=_PATIENCE):
                continue  # a thread that ends with the process is in it
            try:
                handle.closed = True
                with contextlib.suppress(Exception):  # the driver may be shut down already
                    _make_current(device)
                    self._destroy(handle.native)
            finally:
                handle.lock.release()


def _make_current(device: int) -> None:
    if cupy := sys.modules.get("cupy"):  # by which it was made
        cupy.cuda.runtime.setDevice(device)


_pools: weakref.WeakSet[Handles[Any]] = weakref.WeakSet()


def _forget() -> None:
    for pool in list(_pools):
        pool.forget()


def _close() -> None:
    for pool in list(_pools):
        pool.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
