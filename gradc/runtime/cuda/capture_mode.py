"""What a thread may ask of the driver while another thread captures a stream.

A capture in the global mode, as torch's is, forbids every thread of the process to allocate, to give memory back, to
load code and more: the call fails, and ends the capture.  A thread in the relaxed mode may, and answers for it that no
such call depends on the captured work (cuThreadExchangeStreamCaptureMode): memory of a pool, code and handles of
libraries do not.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@functools.cache
def driver_library() -> Any:
    """The driver.

    :raises OSError: there is none.
    """
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """The function that takes a mode for the calling thread and gives the one before; None without a driver."""
    try:
        return driver_library().cuThreadExchangeStreamCaptureMode  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None


class relaxed:
    """A context in which the calling thread is in the relaxed mode.  A class, as it is around each allocation."""

    __slots__ = ("_exchange", "_mode")

    def __enter__(self) -> None:
        self._exchange = _exchange()
        if self._exchange is not None:
            self._mode = ctypes.c_int(_RELAXED)
            self._exchange(ctypes.byref(self._mode))

    def __exit__(self, *_: object) -> None:
        if self._exchange is not None:
            self._exchange(ctypes.byref(self._mode))  # to the one before
