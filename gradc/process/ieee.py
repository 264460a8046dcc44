"""The floating-point environment of the calling thread, for what Python and NumPy compute; compiled code sets its own
(``templates/common/ieee.h``).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any

_Environment = ctypes.c_uint64 * 64  # more than any system's fenv_t


def _functions() -> tuple[Any, Any, Any] | None:
    """fegetenv, fesetenv and FE_DFL_ENV of the C library, or None."""
    try:
        library = ctypes.CDLL(None)
        # macOS has the default environment as an object; for others it is an address that nothing has.
        default = ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV")) if sys.platform == "darwin" else -1
        found = library.fegetenv, library.fesetenv
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    for function in found:
        function.argtypes = [ctypes.c_void_p]
    return *found, ctypes.c_void_p(default)


_found = _functions()


class plain(contextlib.ContextDecorator):
    """The default environment while the block (or the function that this decorates) runs: round to nearest, subnormals
    kept, no exception traps.

    What was set before is there again afterwards.  About a microsecond; without effect where the C library has no
    <fenv.h>.
    """

    def __enter__(self) -> None:
        if _found is not None:
            get, put, default = _found
            self._before = _Environment()
            get(self._before)
            put(default)

    def __exit__(self, *error: object) -> None:
        if _found is not None:
            _found[1](self._before)

    def _recreate_cm(self) -> plain:
        return type(self)()
