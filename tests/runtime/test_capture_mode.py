"""The relaxed mode of captures (gradc/runtime/cuda/capture_mode.py), on a driver in C that keeps a mode for each thread
as CUDA's does, and that Ctrl-C comes to in the middle of a call.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gradc.runtime.cuda import capture_mode
from gradc.runtime.cuda.capture_mode import relaxed

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
TEXT = """
#include <signal.h>
int refuses, interrupted;  /* calls until Ctrl-C comes; 0: never */
static __thread int mode;
int mode_now(void) { return mode; }
int work(void) { if (interrupted && !--interrupted) raise(SIGINT); return mode; }
int cuThreadExchangeStreamCaptureMode(int *given) {
    if (refuses) return 3;  /* CUDA_ERROR_NOT_INITIALIZED */
    int before = mode;
    mode = *given, *given = before;
    if (interrupted && !--interrupted) raise(SIGINT);
    return 0;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("driver") / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", made], input=TEXT, text=True, check=True)
    return made


@pytest.fixture
def driver(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    library = ctypes.CDLL(path)
    monkeypatch.setattr(capture_mode, "driver_library", lambda: library)
    capture_mode._exchange.cache_clear()
    yield library
    capture_mode._exchange.cache_clear()
    for name in ("refuses", "interrupted"):
        ctypes.c_int.in_dll(library, name).value = 0
    set_mode(library, GLOBAL)


def set_mode(library: Any, mode: int) -> None:
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))


@pytest.mark.parametrize("before", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_mode_is_the_calls_and_the_threads(driver: Any, before: int) -> None:
    set_mode(driver, before)
    assert relaxed(driver.work) == RELAXED and driver.mode_now() == before
    assert relaxed(lambda: (relaxed(driver.work), driver.mode_now())) == (RELAXED, RELAXED)
    assert driver.mode_now() == before
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(driver.mode_now()))
    relaxed(lambda: (thread.start(), thread.join()))
    assert found == [GLOBAL]
    assert relaxed(sorted, [2, 3, 1], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError):
        relaxed(divmod, 1, 0)
    assert driver.mode_now() == before


@pytest.mark.parametrize("when", [1, 2, 3], ids=["entering", "inside", "leaving"])
@pytest.mark.parametrize("before", [GLOBAL, THREAD_LOCAL])
def test_ctrl_c_leaves_the_mode_as_it_was(driver: Any, before: int, when: int) -> None:
    """It comes behind a call of C, and so before the next line."""
    set_mode(driver, before)
    ctypes.c_int.in_dll(driver, "interrupted").value = when
    with pytest.raises(KeyboardInterrupt):
        relaxed(driver.work)
    assert driver.mode_now() == before


def test_a_driver_that_takes_no_mode_is_given_none_back(driver: Any) -> None:
    """As before cuInit, which the function may be what calls."""
    refuses = ctypes.c_int.in_dll(driver, "refuses")
    refuses.value = 1

    def initialised() -> int:
        refuses.value = 0
        return int(driver.mode_now())

    assert relaxed(initialised) == GLOBAL
    assert driver.mode_now() == GLOBAL


@pytest.mark.parametrize("there", [False, True], ids=["no driver", "one of before CUDA 10.1"])
def test_without_the_drivers_function(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> Any:
        if not there:
            raise OSError("no libcuda.so.1")
        return ctypes.CDLL(None)

    monkeypatch.setattr(capture_mode, "driver_library", library)
    capture_mode._exchange.cache_clear()
    try:
        assert relaxed(abs, -3) == 3 and capture_mode._exchange() is None
    finally:
        capture_mode._exchange.cache_clear()
