"""The collector of cyclic garbage waits for a compilation, and is as it was afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gradc
from gradc import compiler, ops
from gradc.process import collection
from gradc.process.collection import collection_waits


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_on_again_after_the_last_of_nested_blocks():
    with collection_waits:
        with collection_waits:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_one_that_is_off_stays_off():
    gc.disable()
    with collection_waits:
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_an_error_ends_a_block():
    with pytest.raises(ZeroDivisionError), collection_waits:
        raise ZeroDivisionError
    assert gc.isenabled()


@contextlib.contextmanager
def other_thread() -> Iterator[None]:
    """A thread is inside a block of its own meanwhile."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collection_waits:
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    yield
    leave.set()
    thread.join()


def test_it_is_on_again_when_the_last_thread_has_left():
    with other_thread():
        with collection_waits:
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_no_other_threads_block():
    with other_thread():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def each_instruction(at: int, handler: Any) -> int:
    """Has a signal come at an instruction of a block, of which this gives how many there are."""
    seen = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = frame.f_code.co_filename in (__file__, collection.__file__)
        if event == "opcode":
            seen += 1
            if seen == at:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    def block() -> None:
        with collection_waits:
            pass

    before, tracer = signal.signal(signal.SIGUSR1, handler), sys.gettrace()
    sys.settrace(trace)
    try:
        block()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(tracer)
        signal.signal(signal.SIGUSR1, before)
    return seen


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
@pytest.mark.parametrize("compiles", [False, True], ids=["an exception", "another block"])
def test_a_signal_at_any_instruction(compiles: bool) -> None:
    """An exception, as Ctrl-C is, leaves the collector on; a handler that compiles does not wait for itself."""

    def handler(number: int, frame: Any) -> None:
        if not compiles:
            raise KeyboardInterrupt
        with collection_waits:
            assert not gc.isenabled()

    count = each_instruction(0, handler)
    assert count > 20
    for at in range(1, count + 1):
        each_instruction(at, handler)
        assert gc.isenabled(), at


def test_nothing_is_collected_by_passes(monkeypatch):
    found = []
    passes = compiler.run_passes
    monkeypatch.setattr(compiler, "run_passes", lambda *given: (found.append(gc.isenabled()), passes(*given))[1])
    gradc.compile(gradc.trace(lambda x: ops.exp(x) * 3.25, x="f32[7]"), target="numpy")
    assert found == [False] and gc.isenabled()
