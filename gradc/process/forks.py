"""fork at any moment: what another thread holds when a process is forked is never given back in the child.

Three things make that harmless.  Locks of ours come from :func:`lock` and are free in the child.  What takes locks that
are not ours (imports, the loader, Jinja, the start of a process) stands under :data:`held_off`, for which a fork waits:
these are milliseconds, or seconds on a starved machine.  And a value that is kept after its first use is computed
without a lock (:class:`cached_property`; Python 3.11's holds one for all instances).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds for which a fork waits at most: who forks may himself hold, in the middle of an import, what the others wait
for.  A starved machine takes more than ten to import the compiler.
"""

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock(reentrant: bool = False) -> Any:
    """A lock that is free in a child, whichever other thread held it.

    :param reentrant: for what the handler of a signal may ask for again, on the thread that is at it.
    """
    made = threading.RLock() if reentrant else threading.Lock()
    _locks.add(made)
    return made


held_off = threading.RLock()
"""``with held_off:`` no other thread forks meanwhile.  A lock itself, not an object around one: Ctrl-C between two
lines of Python's would keep it locked.
"""
_forking = threading.local()


def _before() -> None:
    _forking.has_it = held_off.acquire(timeout=PATIENCE)


def _in_parent() -> None:
    if _forking.has_it:
        held_off.release()


def _in_child() -> None:
    if _forking.has_it:
        held_off.release()
    else:
        held_off._at_fork_reinit()  # type: ignore[attr-defined]
    for each in list(
        _locks
    ):  # as threading and logging do with theirs; what the forking thread itself holds it will give back
        if not (hasattr(each, "_is_owned") and each._is_owned()):
            each._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


class cached_property(Generic[T]):
    """A property that is computed at its first use, by two threads twice if they ask at once; one of the results
    stays.
    """

    def __init__(self, compute: Callable[[Any], T]):
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.compute(instance))
