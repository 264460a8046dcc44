"""fork at any moment: what another thread holds when a process is forked is never given back in the child.

Three things make that harmless.  Locks of ours come from :func:`lock` and are free in the child.  What takes locks that
are not ours (imports, the loader, Jinja, the start of a process) stands under :data:`held_off`, for which a fork waits:
these are milliseconds, or seconds on a starved machine.  And a value that is kept after its first use is computed
without a lock (:class:`cached_property`; Python 3.11's holds one for all instances).

:data:`held_off` is a count of readers, and forks are its writers: any number of threads are inside at once, so that one
may wait for another there.  Nothing of it survives what made it.  A section is inside while the interpreter keeps its
end on the stack of its frame, however that frame is left: ``__exit__`` is not called where Ctrl-C comes between a body
and its end, as it can under a tracer.  A fork's claim is made and dropped by hooks that are C from beginning to end:
signals are handled between two instructions of Python's, and an exception from a hook is printed and forgotten.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

S = TypeVar("S")
T = TypeVar("T")
PATIENCE = 60.0
"""Seconds for which a fork waits at most: a section may itself wait for the thread that forks.  A starved machine takes
more than ten to import the compiler.
"""
CLOSED = 0.2
"""Seconds for which forks that wait keep new sections out; then all of them at once let in those that came meanwhile,
one of which may be what they wait for.
"""
OPEN, PAUSE = 0.02, 0.001

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock(reentrant: bool = False) -> Any:
    """A lock that is free in a child, whichever other thread held it.

    :param reentrant: for what the handler of a signal may ask for again, on the thread that is at it.
    """
    made = threading.RLock() if reentrant else threading.Lock()
    _locks.add(made)
    return made


_claims: list[int] = []
"""The thread of each fork in progress: a thread is there twice while a hook, or the handler of a signal, forks in the
middle of a fork.
"""
_yielding: set[int] = set()
"""Threads whose forks wait, and let sections begin for the moment."""
_inside: set[_Mark] = set()


class _Mark(weakref.ref["_Section"]):
    """An entry of :data:`_inside`, dropped with its section by a callback that is C, too.

    :ivar admitted: whether the section has looked for forks.  Until then it may have to wait for one that is past its
        own look, and so has a section that the handler of a signal begins in the middle.
    """

    thread: int
    admitted: bool = False
    __hash__ = object.__hash__  # a reference's own is its object's, which may be gone
    __eq__ = object.__eq__


class _Section:
    """A section is inside from its making until it is dropped; its call, at the end of a block, does nothing."""

    __slots__ = ("__weakref__",)
    __call__ = staticmethod("".format)  # False, in C: the traceback of Ctrl-C in a frame of ours would keep the section

    def __init__(self) -> None:
        me = threading.get_ident()
        mark = _Mark(self, _inside.discard)
        mark.thread = me
        # what forks may wait for the outer section, or for this thread's fork
        nested = me in _claims or any([outer.admitted for outer in _marks_of(me)])
        try:
            _inside.add(mark)  # before it looks for claims, as a fork claims before it looks for sections
            while not nested and _forked_by_another(me):
                _inside.discard(mark)
                time.sleep(PAUSE)
                _inside.add(mark)
            mark.admitted = True
            del self  # a traceback keeps this frame; the section is to end with its caller's
        except BaseException:
            _inside.discard(mark)
            raise


class _HeldOff:
    """See :data:`held_off`."""

    def __enter__(self) -> None:
        pass

    @property
    def __exit__(self) -> _Section:  # looked up by ``with`` before the block, and kept for its end
        return _Section()

    def is_inside(self) -> bool:
        """Whether the calling thread holds forks off."""
        return _is_inside(threading.get_ident())


held_off = _HeldOff()
"""``with held_off:`` no other thread forks meanwhile."""


def _is_inside(thread: int) -> bool:
    return bool(_marks_of(thread))


def _marks_of(thread: int) -> list[_Mark]:
    """Of the sections of a thread.  They are not asked whether they live: for the moment of an answer another thread's
    section would live on, and that thread seem to be inside.
    """
    # a list: Ctrl-C while any() drops a generator in the middle is printed and forgotten
    return [mark for mark in _inside.copy() if mark.thread == thread]


def _forked_by_another(me: int) -> bool:
    """Whether another thread is about to fork."""
    others = [thread for thread in _claims.copy() if thread != me and thread not in _yielding]
    return bool(others) and not sys._current_frames().keys().isdisjoint(others)


def _held_off_by_another(me: int) -> bool:
    """Whether another thread is in a section; two that fork in theirs do not wait for each other."""
    waived = {me, *_claims.copy()} if _is_inside(me) else {me}
    others = {mark.thread for mark in _inside.copy() if mark.thread not in waived}
    return bool(others) and not sys._current_frames().keys().isdisjoint(others)


def _wait() -> None:
    """Waits until no other thread is in a section."""
    me, began = threading.get_ident(), time.monotonic()
    _yielding.discard(me)  # of a fork in the middle of which this one is
    while _held_off_by_another(me) and (now := time.monotonic()) - began < PATIENCE:
        phase = now % (CLOSED + OPEN)  # the same for all forks that wait: a section begins when none keeps it out
        if phase > CLOSED:
            _yielding.add(me)
            time.sleep(CLOSED + OPEN - phase)
            _yielding.discard(me)
        time.sleep(PAUSE)


def _in_child() -> None:
    """Drops what other threads had, of which there are none in a child."""
    me = threading.get_ident()
    _claims[:] = [thread for thread in _claims if thread == me]
    for mark in _inside.copy():
        if mark.thread != me:
            _inside.discard(mark)
    for each in list(
        _locks
    ):  # as threading and logging do with theirs; what the forking thread itself holds it will give back
        if not (hasattr(each, "_is_owned") and each._is_owned()):
            each._at_fork_reinit()


def _for_this_thread(change: Callable[[int], object]) -> Callable[[], object]:
    """``lambda: change(threading.get_ident())``, entirely in C."""
    return functools.partial(next, map(change, iter(threading.get_ident, None)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait)  # run last: the last registered is the first before a fork
    unclaim, close = _for_this_thread(_claims.remove), _for_this_thread(_yielding.discard)
    os.register_at_fork(before=_for_this_thread(_claims.append), after_in_parent=unclaim, after_in_child=unclaim)
    os.register_at_fork(after_in_parent=close, after_in_child=close)
    os.register_at_fork(after_in_child=_in_child)


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


def once_each(compute: Callable[[S], T]) -> Callable[[S], T]:
    """A function of one object that never changes, computed once for each and kept in it: :class:`cached_property` of
    what does not belong to the object's class.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @functools.wraps(compute)
    def kept(instance: S) -> T:
        values = instance.__dict__
        return values[name] if name in values else values.setdefault(name, compute(instance))

    return kept
