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
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

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
    """The function that takes a mode for the calling thread and gives the one before; None without a driver, and with
    one of before CUDA 10.1.
    """
    try:
        return driver_library().cuThreadExchangeStreamCaptureMode  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return None


def relaxed(function: Callable[P, T], *given: P.args, **more: P.kwargs) -> T:
    """``function(*given, **more)``, with the calling thread in the relaxed mode meanwhile, however it is left.

    Not a context manager: Ctrl-C may come before the first line of its ``__exit__``, and after the last call of its
    ``__enter__``.  Here it comes behind a call, and both calls that follow ``try`` stand under it.
    """
    exchange = _exchange()
    if exchange is None:
        return function(*given, **more)
    mode = ctypes.c_int(_RELAXED)
    place = ctypes.byref(mode)
    try:
        exchange(place)
        return function(*given, **more)
    finally:
        if mode.value != _RELAXED:  # it was before, or the driver has refused, as before cuInit and at exit
            exchange(place)
