"""The error flags (indices out of range) of calls that nobody waits for.

A call's flag lies on the device, where its kernels read it, and is at rest (all FINE) before and after a call without
errors: nothing is submitted for it.  A kernel that finds an error also writes a word of host memory, which is mapped
into the device; a later call looks at that word, and asks the driver nothing.

Flags are in blocks.  A block belongs to one stream until its last call is submitted; then it is copied to the host, by
which these calls are known to have ended, and the block is free again.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from ...codegen.cuda.actions import FLAG_NOTICE, FLAG_WORDS
from ...process.forks import lock
from .device import Device, Memory, Span
from .pending import DeferredCheck

Array = np.ndarray[Any, Any]
FINE = 2**64 - 1
"""What the words of a flag are while nothing is wrong."""
NOT_ARRIVED = 2**64 - 2
"""What a word of host memory is until the device has copied a flag there: no position, and no value of the flag."""
_U64 = np.dtype(np.uint64)

_kept: list[Any] = []
"""Memory of flags.  It lives as long as the process, as the code of a program does on the device: calls of a program
that is gone may still write there.
"""
_pools: weakref.WeakSet[FlagPool] = weakref.WeakSet()
Queue = tuple[int, object]
"""A stream, and the thread, if it is another stream in each."""
_PER_THREAD = 2
"""cudaStreamPerThread."""


_BEING_SUBMITTED: Any = object()
"""In the place of the check of a call until all of its work is submitted."""


class _Block:
    """Flags of calls in one stream.

    :ivar queue: that the calls are in.
    :ivar copy: their words on the host, NOT_ARRIVED until all calls are submitted and have ended.
    :ivar checks: of the calls; None in the place of those that nobody asks for and those that have been settled.
    :ivar left: the numbers of flags that no call has.
    :ivar submitted: calls.
    :ivar at_rest: whether all flags are, as far as known.
    """

    def __init__(self, memory: Memory, copy: Array, copy_at: int):
        self.memory, self.copy, self.copy_at = memory, copy, copy_at
        self.at_rest = False
        self.begin((0, None))

    def begin(self, queue: Queue) -> None:
        self.queue, self.submitted = queue, 0
        self.checks: list[DeferredCheck | None] = [_BEING_SUBMITTED] * len(self.copy)
        self.left = list(reversed(range(len(self.copy))))
        self.copy.fill(NOT_ARRIVED)

    @property
    def taken(self) -> int:
        """How many calls have a flag."""
        return len(self.checks) - len(self.left)

    @property
    def span(self) -> Span:
        return Span(self.memory.address, self.copy.size, _U64)


class Flag(NamedTuple):
    """The flag of one call."""

    block: _Block
    number: int
    address: int


class FlagPool:
    """The flags of a program's calls.

    :param words: 8-byte words of a flag.
    :ivar failed: checks that have found an error, which nobody has raised yet.
    """

    CALLS = 32
    """Flags of a block."""
    MOST = 256
    """Blocks."""

    def __init__(self, device: Device, words: int):
        self._device = device
        host, at = device.mapped(8)
        _kept.append(host)
        self._notice = host.view(_U64)
        self._notice[0] = 0
        self._rest = np.full((self.CALLS, words), FINE, _U64)
        self._rest[:, FLAG_NOTICE] = at
        self._filling: dict[Queue, _Block] = {}  # the newest block of each
        self._threads = threading.local()
        self._used: list[_Block] = []
        self._free: list[_Block] = []
        self.failed: list[DeferredCheck] = []
        self._lock = lock(reentrant=True)
        _pools.add(self)

    @property
    def noticed(self) -> bool:
        """Whether a call has found an error, which may still run.  The driver is not asked, which a capture in the
        global mode would forbid.
        """
        return bool(self._notice[0]) or bool(self.failed)

    def take(self, stream: int) -> Flag:
        """A flag at rest, for a call that is submitted to the stream next."""
        with self._lock:
            queue = self._queue(stream)
            block = self._filling.get(queue)
            while block is None or not block.left:
                block = self._filling[queue] = self._begun(queue)
            number = block.left.pop()
            return Flag(block, number, block.memory.address + number * self._rest[0].nbytes)

    def _queue(self, stream: int) -> Queue:
        if stream != _PER_THREAD:
            return stream, None
        if not hasattr(self._threads, "own"):
            self._threads.own = object()  # numbers of threads are used again
        return stream, self._threads.own

    def submitted(self, flag: Flag, check: DeferredCheck | None) -> None:
        """All work of a call that uses the flag is submitted.

        :param check: None: nobody asks for its error.
        """
        block = flag.block
        with self._lock:
            block.checks[flag.number] = check
            block.submitted += 1
            if block.submitted == self.CALLS:
                self._device.copy(block.copy_at, block.memory.address, block.span.nbytes, block.queue[0])

    def collect(self) -> None:
        """Waits for the device; :attr:`failed` then has the checks of the calls submitted so far that have failed."""
        with self._lock:
            self._notice[0] = 0  # before the wait: a kernel that runs later writes it again
            before = [(block, block.checks, [*block.checks], block.submitted) for block in self._used]
        if not before:
            return
        try:
            with self._device.made_current():
                self._device.synchronize()
                found = [self._device.read(block.span) for block, *_ in before]
        except BaseException:
            self._notice[0] = 1  # somebody else is to look
            raise
        for (block, calls, checks, submitted), words in zip(before, found, strict=True):
            with self._lock:
                if block.checks is calls:  # not settled and begun again meanwhile
                    self._settle(block, checks, words)
                    if block.taken == submitted:
                        self._release(block)

    def _settle(self, block: _Block, checks: list[DeferredCheck | None], words: Array) -> None:
        """Finds the failed ones of a block's checks, whose calls have ended."""
        words = words.reshape(block.copy.shape)
        wrong = (words[:, FLAG_WORDS:] != FINE).any(axis=1)
        for number in np.flatnonzero(wrong).tolist():
            block.at_rest = False
            check = checks[number]
            if check is _BEING_SUBMITTED:
                self._notice[0] = 1  # its error is found once it has a check
            elif check is not None and block.checks[number] is check:
                check.words = words[number].copy()
                self.failed.append(check)
                block.checks[number] = None

    def _release(self, block: _Block) -> None:
        self._used.remove(block)
        if self._filling.get(block.queue) is block:
            del self._filling[block.queue]
        block.checks = []
        self._free.append(block)

    def _begun(self, queue: Queue) -> _Block:
        """A block whose flags are at rest when work that is submitted to the queue next begins."""
        stream = queue[0]
        for block in [b for b in self._used if b.submitted == self.CALLS and NOT_ARRIVED not in b.copy]:
            self._settle(block, block.checks, block.copy)
            self._release(block)
        if not self._free and len(self._used) >= self.MOST:
            self.collect()
        block = self._free.pop() if self._free else self._new(stream)
        block.begin(queue)
        if not block.at_rest:
            self._device.upload(block.memory.address, self._rest, stream)
            block.at_rest = True
        self._used.append(block)
        return block

    def _new(self, stream: int) -> _Block:
        memory = self._device.memory(self._rest.nbytes, stream)
        host, at = self._device.mapped(self._rest.nbytes)
        _kept.append((memory, host))
        return _Block(memory, host.view(_U64).reshape(self._rest.shape), at)

    def forget(self) -> None:
        """In a forked child, which has neither the device nor, perhaps, the memory that is mapped into it."""
        self._notice = np.zeros(1, _U64)
        self._filling, self._used, self._free, self.failed = {}, [], [], []


def _forget() -> None:
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
