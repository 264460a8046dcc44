"""Every environment variable that gradc reads, each declared once with its type, default and meaning.

>>> from gradc import knobs
>>> with knobs.VERIFY.set(True):
...     knobs.VERIFY.get()
True
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .errors import InvalidSetting

T = TypeVar("T")
ALL: dict[str, Knob[Any]] = {}
TARGETS = ("cpu", "numpy", "cuda", "cuda-sim")


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("neither a yes (1, true, yes, on) nor a no (0, false, no, off)")


def _count(most: int) -> Callable[[str], int]:
    """A parser of integers from 0 to ``most``; int() alone would accept '1_0' and digits of other scripts."""

    def parse(text: str) -> int:
        text = text.strip()
        if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > most:
            raise ValueError(f"not an integer from 0 to {most}")
        return int(text)

    return parse


def _path(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise ValueError("not a path: it has a line break or a zero byte")
    return text


def _choice(*known: str, unset: str = "") -> Callable[[str], str]:
    """A parser of one of these words; an empty text is ``unset``."""

    def parse(text: str) -> str:
        if text and text not in known:
            raise ValueError(f"not one of {', '.join(known)}")
        return text or unset

    return parse


VOIDING = (
    *(
        "-Ofast",
        "--optimize=fast",
        "-ffast-math",
        "-funsafe-math-optimizations",
        "-fassociative-math",
        "-freciprocal-math",
        "-ffinite-math-only",
    ),
    *(
        "-fno-signed-zeros",
        "-fno-honor-nans",
        "-fno-honor-infinities",
        "-fapprox-func",
        "-fsingle-precision-constant",
        "-fallow-store-data-races",
    ),
    *(
        "-ffp-contract=fast",
        "-ffp-contract=on",
        "-ffp-contract=fast-honor-pragmas",
        "-ffp-model=fast",
        "-ffp-model=aggressive",
    ),
    *(
        "-fdenormal-fp-math",
        "-fdenormal-fp-math-f32",
        "-mdaz-ftz",
        "-mrecip",
        "-mpc32",
        "-mpc64",
        "-mfpmath=387",
        "-mfpmath=both",
        "-mfpmath=sse,387",
        "-mfpmath=sse+387",
    ),
    *(
        "-menable-no-nans",
        "-menable-no-infs",
        "-menable-unsafe-fp-math",
        "-enable-unsafe-fp-math",
        "-enable-no-nans-fp-math",
        "-enable-no-infs-fp-math",
        "-fp-contract=fast",
    ),
)
"""Flags of gcc and clang (also of clang's front end and LLVM, after -Xclang and -mllvm) that permit results other
than IEEE 754's; also with ``=value`` appended.
"""


def _compiler(text: str) -> str:
    """A compiler command without flags that change the numerics."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"not a command: {error}") from None
    for word in words[1:]:
        if word in VOIDING or any(word.startswith(f"{flag}=") for flag in VOIDING):
            raise ValueError(
                f"with {word} a compiler may round, reorder or drop what IEEE 754 prescribes, and results would be"
                " wrong; leave it out"
            )
        if word.startswith("@"):
            raise ValueError(f"{word} is a file of flags, which is not read; write them out")
    return text


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One variable: ``get()`` reads the override of :meth:`set`, else the environment, else the default.

    :param parse: text -> value; its ValueError says what is wrong with the text.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    doc: str
    _override: contextvars.ContextVar[Any] = field(default_factory=lambda: contextvars.ContextVar("knob", default=None))

    def __post_init__(self) -> None:
        ALL[self.name] = self

    def get(self) -> T:
        override = self._override.get()
        if override is not None:
            return override[0]  # type: ignore[no-any-return]
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        return self.read(text)

    def read(self, text: str) -> T:
        """The value of a text.

        :raises InvalidSetting: the text is not a valid value.
        """
        try:
            return self.parse(text)
        except ValueError as error:
            raise InvalidSetting(self.name, text, f"{error}; it means: {self.doc}") from None

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
        token = self._override.set((value,))
        try:
            yield
        finally:
            self._override.reset(token)


DUMP = Knob("GRADC_DUMP", _path, "", "directory that receives every stage of each compilation")
VERIFY = Knob("GRADC_VERIFY", _flag, False, "re-infer every node after every pass")
VALIDATE = Knob(
    "GRADC_VALIDATE",
    _flag,
    False,
    "evaluate graphs in exact algebra, and programs in f64, before and after every pass and require equality; the error"
    " names the pass",
)
PRINT_PASSES = Knob("GRADC_PRINT_PASSES", _flag, False, "print one line for each pass that changed something")
TARGET = Knob(
    "GRADC_TARGET",
    _choice(*TARGETS),
    "",
    "the default target of compile(); if unset, cuda if there are a GPU and CuPy, else cpu",
)
SIM_CHECK = Knob(
    "GRADC_SIM_CHECK", _flag, False, "cuda-sim detects races, reads of uninitialised memory and out-of-bounds accesses"
)
SYNC = Knob(
    "GRADC_SYNC",
    _flag,
    False,
    'modules for a GPU have errors="sync": each launch is waited for, so that the error of a fault names its function,'
    " which an asynchronous call only reports later",
)
BOUNDS = Knob(
    "GRADC_BOUNDS",
    _flag,
    False,
    "generated C checks that every access is inside its array; for debugging gradc, several times slower",
)
NUM_THREADS = Knob(
    "GRADC_NUM_THREADS",
    _count(1024),
    0,
    "threads of the CPU pool; 0 = OMP_NUM_THREADS, else the CPUs this process may use",
)
STREAM_FROM = Knob(
    "GRADC_STREAM_FROM",
    _count(2**63 - 1),
    0,
    "size in bytes from which arrays are written by streaming stores, bypassing the CPU's caches; 0 = half of the"
    " last-level cache if a measurement shows a gain",
)
OPTIMIZE = Knob(
    "GRADC_OPTIMIZE",
    _choice("0", "1", "2", "3", unset="2"),
    "2",
    "the level -O at which generated C is compiled; 0 compiles in half the time and gives the same values, slowly",
)
CACHE_DIR = Knob("GRADC_CACHE_DIR", _path, "", "directory of the kernel cache; default: the user's cache directory")
CACHE = Knob("GRADC_CACHE", _flag, True, "keep compiled modules on disk")
OBJECTS = Knob(
    "GRADC_OBJECTS",
    _path,
    "",
    "directory that keeps machine code by its source, flags and compiler, and headers that gcc has read, so that a"
    " changed gradc compiles only the kernels that it changed; for who develops gradc",
)
CC = Knob(
    "CC",
    _compiler,
    "",
    "the C compiler with flags, such as -march= for another processor than this one; default: gcc, clang, cc, else the"
    " ziglang wheel",
)
NVRTC = Knob(
    "GRADC_NVRTC", _path, "", "path of libnvrtc; default: NVIDIA's wheel, CUDA_HOME, CUDA_PATH, the system loader"
)
CUDA_HOME = Knob("CUDA_HOME", _path, "", "CUDA toolkit in which NVRTC is searched, before that of CUDA_PATH")
CUDA_PATH = Knob("CUDA_PATH", _path, "", "CUDA toolkit in which NVRTC is searched")
CALIBRATION = Knob(
    "GRADC_CALIBRATION",
    _path,
    "",
    "file of a device's constants written by gradc calibrate, or none; default: the device's file in the user's"
    " configuration directory, else for some processors the one that comes with gradc",
)
CHECK_RESIDUALS = Knob(
    "GRADC_CHECK_RESIDUALS",
    _flag,
    False,
    "compare a digest of every residual between forward and backward; torch tensors are always checked by their version"
    " counters",
)
