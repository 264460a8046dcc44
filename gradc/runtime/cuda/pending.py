"""Deferred checks: the errors (indices out of range) of submitted calls that nobody has waited for."""

from __future__ import annotations

import atexit
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ...process.forks import lock

Array = np.ndarray[Any, Any]
_unraised: weakref.WeakSet[AsyncErrors] = weakref.WeakSet()
"""Those whose calls have flags."""


class Flags(Protocol):
    """Where the calls of a program leave what they find (:class:`.flags.FlagPool`)."""

    failed: list[DeferredCheck]

    @property
    def noticed(self) -> bool: ...

    def collect(self) -> None: ...


class DeferredCheck:
    """The check of one call.

    :param describe: words of a flag that is not at rest -> the error.
    :ivar words: its flag, once that is known not to be at rest.
    :ivar number: of the call among those of its module.
    """

    words: Array | None = None
    number = -1

    def __init__(self, flags: Flags, describe: Callable[[Array], Exception | None]):
        self.flags, self._describe = flags, describe

    def error(self) -> Exception | None:
        assert self.words is not None
        return self._describe(self.words)


class AsyncErrors:
    """The errors of a module's calls, oldest first."""

    def __init__(self) -> None:
        self._pools: list[Flags] = []
        self._numbers = itertools.count()
        self._lock = lock()

    def add(self, check: DeferredCheck) -> None:
        """A check of a call that was submitted."""
        check.number = next(self._numbers)
        if check.flags not in self._pools:
            with self._lock:
                self._pools = [*self._pools, check.flags]
            _register(self)

    def check(self) -> None:
        """Raises the first error if a call has found one, after waiting for what was submitted; else never waits."""
        for flags in self._pools:
            if flags.noticed:
                return self.wait()
        return None

    def wait(self) -> None:
        """Waits for all calls and raises the first error; later ones are raised by the next call of this method."""
        pools = self._pools
        for flags in pools:
            flags.collect()
        while True:
            with self._lock:
                failed = [(check.number, i) for i, flags in enumerate(pools) for check in flags.failed]
                if not failed:
                    return
                number, i = min(failed)
                check = next(c for c in pools[i].failed if c.number == number)
                pools[i].failed.remove(check)
            error = check.error()
            if error is not None:
                raise error


def _register(errors: AsyncErrors) -> None:
    if not _unraised:
        atexit.unregister(_print_unraised)
        atexit.register(_print_unraised)  # now, to run before what CuPy, imported earlier, does at exit
    _unraised.add(errors)


def _print_unraised() -> None:
    """At exit: prints the first error of each module that neither a call nor ``synchronize()`` has raised."""
    for errors in list(_unraised):
        try:
            errors.wait()
        except Exception as error:
            sys.stderr.write(f"gradc: found in a call and raised by none: {type(error).__name__}: {error}\n")
