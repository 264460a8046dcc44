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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ALL: dict[str, Knob[Any]] = {}


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"not a yes or no: {text!r}")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One variable: ``get()`` reads the override of :meth:`set`, else the environment, else the default."""

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
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}; it means: {self.doc}") from None

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
        token = self._override.set((value,))
        try:
            yield
        finally:
            self._override.reset(token)


DUMP = Knob("GRADC_DUMP", str, "", "directory that receives every stage of each compilation")
VERIFY = Knob("GRADC_VERIFY", _flag, False, "re-infer every node after every pass")
VALIDATE = Knob("GRADC_VALIDATE", _flag, False, "evaluate the graph in exact algebra before and after every pass and require equality")
PRINT_PASSES = Knob("GRADC_PRINT_PASSES", _flag, False, "print one line for each pass that changed something")
TARGET = Knob("GRADC_TARGET", str, "", "the target where compile() names none; default: cuda where there are a GPU and CuPy, else cpu")
SIM_CHECK = Knob("GRADC_SIM_CHECK", _flag, False, "cuda-sim looks for races, reads of nothing and addresses outside arrays")
NUM_THREADS = Knob("GRADC_NUM_THREADS", int, 0, "threads of the CPU pool; 0 = OMP_NUM_THREADS, else the CPUs this process may use")
PAST = Knob("GRADC_PAST", int, 0, "bytes from which an array is written past the CPU's caches; 0 = half of the last-level cache where a measurement finds that it pays")
CACHE_DIR = Knob("GRADC_CACHE_DIR", str, "", "directory of the kernel cache; default: the user's cache directory")
CACHE = Knob("GRADC_CACHE", _flag, True, "keep compiled modules on disk")
CC = Knob("CC", str, "", "the C compiler; default: gcc, clang, cc, else the ziglang wheel")
NVRTC = Knob("GRADC_NVRTC", str, "", "path of libnvrtc; default: NVIDIA's wheel, CUDA_HOME, CUDA_PATH, the system loader")
CUDA_HOME = Knob("CUDA_HOME", str, "", "CUDA toolkit in which NVRTC is looked for, before that of CUDA_PATH")
CUDA_PATH = Knob("CUDA_PATH", str, "", "CUDA toolkit in which NVRTC is looked for")
CALIBRATION = Knob("GRADC_CALIBRATION", str, "", "file of a GPU's constants that gradc calibrate wrote, or none; default: the device's in the user's configuration directory, if it is there")
CHECK_RESIDUALS = Knob("GRADC_CHECK_RESIDUALS", _flag, False, "compare a digest of every residual between forward and backward; torch tensors are compared by torch's count of changes in any case")
