"""Running compiled programs under ASan and UBSan: the environment of such a process, and each buffer in memory of its
own.

The generated C and the runtime are compiled with the sanitizers; Python and NumPy are as they are, their memory is
ASan's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

FLAGS = (
    "-fsanitize=address,undefined",
    "-fsanitize=float-cast-overflow",
    "-fno-sanitize-recover=all",
    "--param=asan-instrumentation-with-call-threshold=0",  # the same checks, and the runtime in 62 s of gcc for 104
)
ASAN_OPTIONS = {
    "detect_leaks": 0,  # CPython never frees everything
    "allocator_may_return_null": 1,
    "exitcode": 99,
    "redzone": 256,  # an index of -1 or V lands here, also in rows of a few dozen values
    "max_malloc_fill_size": 1 << 26,  # memory that nobody wrote reads as NaN, and as -1 where it serves as an index
    "malloc_fill_byte": 255,
    "symbolize": 0,
    "print_legend": 0,
    "print_full_thread_history": 0,
    "malloc_context_size": 2,
}


@functools.cache
def library() -> str:
    """libasan.so of the gcc at hand, "" where there is none."""
    try:
        found = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found if os.path.isabs(found) and os.path.exists(found) else ""


def missing() -> str:
    return "" if library() else "gcc has no libasan here"


def environment(options: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process must be started with."""
    return {
        "CC": " ".join(("gcc", *FLAGS)),
        "LD_PRELOAD": library(),
        "ASAN_OPTIONS": ":".join(f"{k}={v}" for k, v in ASAN_OPTIONS.items()),
        **surroundings(),
    }


def surroundings() -> dict[str, str]:
    """What every child of ours gets, sanitized or not: a kernel cache that goes with the driver, two threads."""
    return {
        "GRADC_CACHE_DIR": os.path.join(_folder(os.getpid()), "cache"),
        "GRADC_TARGET": "cpu",
        "GRADC_NUM_THREADS": "2",
        "GRADC_CALIBRATION": "none",
    }


@functools.cache
def _folder(process: int) -> str:
    """What the children of a driver write into."""
    import atexit

    folder = tempfile.mkdtemp(prefix="gradc-fuzz-children-")
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    return folder


# -- in the child ------------------------------------------------------------------------------------------------------


@functools.cache
def install() -> None:
    """Make this process, started with :func:`environment`, ready: outputs, temporaries and scratch get memory as long
    as their types say.

    Without this outputs come rounded up from a pool, and temporaries stand side by side in one workspace.
    """
    from gradc.runtime.host import arrays, cpu, pool, toolchain

    os.environ.pop("LD_PRELOAD", None)  # for us, not for the compiler that we start
    toolchain.FLAGS = tuple("-O1" if flag == "-O2" else flag for flag in toolchain.FLAGS)
    arrays.SMALL = 1 << 62
    pool.new_context()
    plain = cpu.CpuProgram.run

    def run(self: Any, given: Any, binding: Any, workspace: Any = None, only: int = -1) -> None:
        if workspace is not None:  # the caller's own is used as it is
            return plain(self, given, binding, workspace, only)
        with _apart(self, binding) as (own, base):
            plain(self, given, own, base, only)

    cpu.CpuProgram.run = run  # type: ignore[method-assign]


@contextmanager
def _apart(program: Any, binding: Any) -> Iterator[tuple[Any, Any]]:
    """(a binding whose temporaries and scratch lie in memory of their own, the array from which it counts their
    places).
    """
    import numpy as np

    from gradc.ir.dims import evaluate

    sizes = dict(zip(program.program.dims, binding.dims, strict=False))
    base = np.empty(1, np.uint8)
    taken: list[int] = []
    try:
        temps = [at for at, *_ in (*binding.temps, *binding.lent)]
        taken += [_aligned(evaluate(program.roots[at].type.nbytes, sizes)) for at in temps]
        taken.append(_aligned(binding.workspace - binding.scratch))
        places = [address - base.ctypes.data for address in taken]
        yield (
            replace(
                binding,
                temps=tuple(zip(temps, places, strict=False)),
                lent=(),
                scratch=places[-1],
            ),
            base,
        )
    finally:
        for address in taken:
            _c().free(address)


@functools.cache
def _c() -> ctypes.CDLL:
    c = ctypes.CDLL(None)
    c.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    c.free.argtypes = [ctypes.c_void_p]
    return c


def _aligned(size: int) -> int:
    from gradc.runtime.host.cpu import ALIGN

    out = ctypes.c_void_p()
    if _c().posix_memalign(ctypes.byref(out), ALIGN, max(size, 1)):
        raise MemoryError(size)
    return out.value or 0


@contextmanager
def uncached() -> Iterator[None]:
    """Compile without keeping: no program comes twice."""
    from gradc import knobs
    from gradc.runtime.cache import default_cache

    with knobs.CACHE.set(False):
        try:
            yield
        finally:
            default_cache()._memory.clear()


def announce(text: str, kind: str) -> None:
    """What runs now, for the report of a crash, in place of what was said before."""
    with suppress(OSError):  # standard error may be a terminal
        os.ftruncate(2, 0)
    print(f"-- {text}\nkind: {kind}", file=sys.stderr, flush=True)
