"""Handles of CUDA's libraries (gradc/runtime/cuda/handles.py), with a cuBLAS that notes what it is told: threads and
streams, a full pool, captures, forks, another device, and the end of the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradc.codegen.cuda.actions import Library, Part, Product, Strided
from gradc.codegen.cuda.library_products import library_of
from gradc.errors import DeviceError, OutOfMemory
from gradc.runtime.cuda import cublas, handles
from gradc.runtime.cuda.device import Span
from gradc.runtime.cuda.handles import STREAMS, Handles


class Blas:
    """cuBLAS, whose handles are numbers.

    :ivar state: the stream and the workspace of each handle that there is.
    :ivar seen: of each product the handle, the stream and workspace that it has at the beginning of the product and at
        its end, and where the result goes.
    :ivar busy: handles in a product.  :ivar most: how many there were at once.
    :ivar room: handles that there is memory for.
    """

    def __init__(self) -> None:
        self.state: dict[int, dict[str, Any]] = {}
        self.made, self.destroyed, self.seen = 0, [], []  # type: ignore[var-annotated]
        self.busy: list[int] = []
        self.most, self.room = 0, 100
        self.between = threading.Event()

    def cublasCreate_v2(self, at: Any) -> int:
        if len(self.state) >= self.room:
            return 3
        self.made += 1
        at._obj.value = self.made
        self.state[self.made] = {}
        return 0

    def cublasDestroy_v2(self, handle: Any) -> int:
        assert handle.value not in self.busy
        del self.state[handle.value]
        self.destroyed.append(handle.value)
        return 0

    def cublasSetMathMode(self, handle: Any, mode: int) -> int:
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: int) -> int:
        self.state[handle.value] = {"stream": stream}
        self.between.wait(0.0005)
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, address: int, nbytes: int) -> int:
        self.state[handle.value]["workspace"] = address
        self.between.wait(0.0005)
        return 0

    def cublasGemmStridedBatchedEx(self, handle: Any, *given: Any) -> int:
        assert handle.value not in self.busy
        self.busy.append(handle.value)
        self.most = max(self.most, len(self.busy))
        before = dict(self.state[handle.value])
        self.between.wait(0.0005)
        self.busy.remove(handle.value)
        assert before == self.state[handle.value]
        self.seen.append((handle.value, before["stream"], before["workspace"], given[15]))
        return 0


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blas]:
    made = Blas()
    monkeypatch.setattr(cublas, "_library", lambda: made)
    monkeypatch.setattr(cublas, "_handles", Handles(cublas._create, made.cublasDestroy_v2))
    monkeypatch.setattr(handles, "_make_current", lambda device: None)
    yield made
    cublas._handles.close()


def a_product() -> Library:
    part = Part("x", 0, 1 << 20, np.dtype(np.float32))
    sides = (Strided(part, (5, 7), (7, 1)), Strided(part, (7, 2), (2, 1)), Strided(part, (5, 2), (2, 1)))
    found = library_of(Product(*sides, 0))
    assert found is not None
    return found


LIBRARY = a_product()


def submit(stream: int, device: int = 0, capturing: Any = None) -> None:
    """A product whose workspace and result have the number of its stream."""
    space = Span(stream, 0, np.dtype(np.uint8))
    cublas.prepared(device, LIBRARY, 0, 0, stream, space, capturing=capturing)(stream)


def in_threads(streams: range, times: int = 5) -> None:
    failed: list[BaseException] = []

    def work(stream: int) -> None:
        try:
            for _ in range(times):
                submit(stream)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_each_stream_has_a_handle_and_threads_do_not_wait_for_each_other(blas: Blas) -> None:
    in_threads(range(1, 3), 20)
    assert blas.made == 2 and len(blas.seen) == 40 and blas.most == 2
    assert all(stream == workspace == out for _, stream, workspace, out in blas.seen)
    assert len({(handle, stream) for handle, stream, *_ in blas.seen}) == 2


def test_more_threads_than_handles(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns; each product has its own stream and workspace, and nothing is destroyed."""
    monkeypatch.setattr(handles, "STREAMS", 2)
    in_threads(range(1, 7))
    assert blas.made == 2 and len(blas.seen) == 30 and not blas.destroyed
    assert all(stream == workspace == out for _, stream, workspace, out in blas.seen)


def test_a_full_pool_gives_up_the_least_used(blas: Blas) -> None:
    for stream in (*range(1, STREAMS + 1), 1, 100):
        submit(stream)
    assert blas.made == STREAMS and not blas.destroyed
    of = {stream: handle for handle, stream, *_ in blas.seen}
    assert of[100] == of[2] and len(set(of.values())) == STREAMS
    submit(2)
    assert blas.seen[-1][0] == of[3] and blas.seen[-1][1:] == (2, 2, 2)


def test_two_devices(blas: Blas) -> None:
    """A device's handles are its own: the stream 0 is another on each, and a full pool leaves the others alone."""
    for device in (0, 1):
        submit(0, device)
    assert [seen[0] for seen in blas.seen] == [1, 2]
    for stream in range(1, 2 * STREAMS):
        submit(stream)
    submit(0, 1)
    assert blas.made == STREAMS + 1 and blas.seen[-1][0] == 2


def test_a_capture_makes_no_handle(blas: Blas) -> None:
    captured = {5, 6}.__contains__
    submit(1, capturing=captured)
    submit(5, capturing=captured)
    assert blas.made == 1 and blas.seen[-1] == (1, 5, 5, 5)
    submit(2, capturing=captured)
    submit(6, capturing=captured)  # the least used one's again, and what was captured by it is there
    assert blas.made == 2 and blas.seen[-1] == (1, 6, 6, 6) and not blas.destroyed


def test_a_captured_call_after_all_were_given_back(blas: Blas) -> None:
    """Another thread's, while the process ends: as any first call, it asks for a handle."""
    product = cublas.prepared(0, LIBRARY, 0, 0, 5, Span(5, 0, np.dtype(np.uint8)), capturing=lambda stream: True)
    cublas._handles.close()
    product(5)
    assert blas.destroyed == [1] and blas.seen[-1] == (2, 5, 5, 5)


def test_no_memory_for_a_handle(blas: Blas) -> None:
    """One that there is serves another stream; without any it is an error, and the next call works."""
    blas.room = 0
    with pytest.raises(OutOfMemory, match="status 3, allocation failed"):
        submit(1)
    blas.room = 1
    for stream in (1, 2, 1):
        submit(stream)
    assert [seen[:2] for seen in blas.seen] == [(1, 1), (1, 2), (1, 1)]


def test_a_handle_that_was_not_told_all_is_told_again(blas: Blas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "cublasSetWorkspace_v2", lambda *_: 7)
    with pytest.raises(DeviceError, match="status 7, invalid value"):
        submit(4)
    monkeypatch.undo()
    monkeypatch.setattr(cublas, "_library", lambda: blas)
    monkeypatch.setattr(cublas, "_handles", Handles(cublas._create, blas.cublasDestroy_v2))
    submit(4)
    assert blas.seen[-1][1:] == (4, 4, 4)


def test_closed_once_their_calls_are_submitted(blas: Blas) -> None:
    submit(1)
    began, go_on = threading.Event(), threading.Event()

    def slowly(handle: Any, *_: Any) -> int:
        began.set()
        go_on.wait(10)
        assert handle.value in blas.state
        return 0

    blas.cublasGemmStridedBatchedEx = slowly  # type: ignore[method-assign]
    thread = threading.Thread(target=submit, args=(1,))
    thread.start()
    began.wait(10)
    closing = threading.Thread(target=cublas._handles.close)
    closing.start()
    go_on.set()
    thread.join()
    closing.join()
    assert blas.destroyed == [1] and not blas.state
    submit(1)  # as what runs at exit may
    cublas._handles.close()
    assert blas.destroyed == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_none_of_its_parents(blas: Blas) -> None:
    """Not even at its end; the parent's are as they were, and another thread's lock is free."""
    submit(1)
    inside, leave = threading.Event(), threading.Event()
    pool = cublas._handles
    holder = threading.Thread(target=lambda: pool.using(0, lambda *_: inside.set() or leave.wait(10))(1))
    holder.start()
    inside.wait(10)
    child = os.fork()
    if not child:
        try:
            pool.close()
            submit(1)
            fine = not blas.destroyed and blas.seen[-1][0] == 2
        finally:
            os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    leave.set()
    holder.join()
    submit(1)
    assert blas.seen[-1][0] == 1


def test_given_back_at_exit() -> None:
    """Before what CuPy, imported earlier, does there."""
    program = """
import atexit
from gradc.runtime.cuda.handles import Handles
pool = Handles(lambda device: f"handle of {device}", lambda made: print("destroyed", made))
atexit.register(print, "CuPy's end")
pool.using(0, lambda handle, stream: print(handle.native, stream))(5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["handle of 0 5", "destroyed handle of 0", "CuPy's end"]
    assert not done.stderr
