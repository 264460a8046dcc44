"""The process's CPU thread pool and matrix product, which generated modules access through ``gradc_ctx``."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradc import knobs
from gradc.codegen.text import CODES, read_template
from gradc.errors import CompilerError, CompilerMissing, DeviceError, InternalError, InvalidProblem, OutOfMemory
from gradc.process.forks import lock
from gradc.runtime.cache import default_cache, digest
from gradc.runtime.host.toolchain import WHOLE, Build, compile_c, cpu_identity, find_compiler, load_library

ERROR_SLOTS = 8
# The matrix product may use fused multiply-add: only the order of its sums is guaranteed.
MATMUL_FLAGS = ("-ffp-contract=fast",)
_FLAGS = ("-O2", *MATMUL_FLAGS)  # compiled once and used by all, whatever GRADC_OPTIMIZE says of generated code
_lock = lock(reentrant=True)


class _Struct(ctypes.Structure):
    """``struct gradc_ctx`` of runtime.h, followed by the error slots that its ``error`` points to."""

    _fields_ = (
        ("parallel_for", ctypes.c_void_p),
        ("matmul", ctypes.c_void_p),
        ("local", ctypes.c_void_p),
        ("block", ctypes.c_void_p),
        ("stopped", ctypes.c_void_p),
        ("stream_from", ctypes.c_int64),
        ("error", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("slots", ctypes.c_int64 * ERROR_SLOTS),
    )


class Context:
    """A ``gradc_ctx``: the process's pool, and error slots for one call at a time.

    :ivar pointer: the generated function's first argument; keeps the memory alive.
    :ivar address: the same as an int, valid as long as this object lives.
    """

    __slots__ = ("_struct", "address", "pointer")

    def __init__(self, parallel_for: int, matmul: int, local: int, block: int, stopped: int):
        self._struct = _Struct(parallel_for, matmul, local, block, stopped, NEVER, 0, 0)
        self.address = ctypes.addressof(self._struct)
        self._struct.error = self.address + _Struct.slots.offset
        self.pointer = ctypes.byref(self._struct)

    @property
    def code(self) -> int:
        """Of :data:`gradc.codegen.text.CODES`; 0: nothing was reported."""
        return int(self._struct.slots[0])

    @property
    def error(self) -> tuple[int, int, int, int, int]:
        """(code, site, position, value, bound) of the reported error with the lowest site and position."""
        code, site, position, value, bound = self._struct.slots[:5]
        return code, site, position, value, bound

    def failure(self, name: str) -> Exception:
        """What the pool itself reports of the call ``name``: memory that a thread does not get, or a fork."""
        if self.code == CODES["GRADC_OUT_OF_MEMORY"]:
            needed = self.error[3]
            return OutOfMemory(
                f"{name}: a thread needs {needed} bytes more for itself, and the system does not give them"
            )
        if self.code == CODES["GRADC_FORKED"]:
            return DeviceError(
                f"{name}: the process was forked in the middle of the call, by the handler of a signal; the child has"
                " not what the parent's threads computed"
            )
        return InternalError(f"{name} reported code {self.code}")

    def clear(self) -> None:
        """Clears the error; every call does so at its start."""
        self._struct.slots = (ctypes.c_int64 * ERROR_SLOTS)()

    @property
    def stream_from(self) -> int:
        """The size in bytes from which arrays are written by streaming stores, bypassing the caches."""
        return int(self._struct.stream_from)

    @stream_from.setter
    def stream_from(self, least: int) -> None:
        self._struct.stream_from = least


def new_context() -> Context:
    """A new context; takes about a microsecond, except that the first call compiles the pool.

    :raises CompilerMissing, CompilerError: the pool cannot be compiled.
    """
    return Context(*_entries())


@functools.cache
def _entries() -> tuple[int, int, int, int, int]:
    library = _library()
    return (
        _address(library.gradc_parallel_for),
        _address(library.gradc_matmul),
        _address(library.gradc_local),
        _address(library.gradc_block),
        _address(library.gradc_stopped),
    )


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def call_entry() -> Callable[..., int]:
    """``gradc_call``: (address of an entry, context, pointers, dims, scratch, step) -> the entry's return value.

    It is called with the GIL and releases it while the entry runs; signal handlers are run between two tasks and within
    long ones, and an exception of a handler is raised here.  The outputs of the call are then undefined.
    """
    pointer = ctypes.c_void_p
    return ctypes.PYFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer, pointer, ctypes.c_int64)(
        _address(_library().gradc_call)
    )


UNFIT = -1
"""What :func:`prepared_entry` gives where an array has no memory or is not aligned, and nothing was run."""


class PreparedCall(ctypes.Structure):
    """``gradc_prepared``: see ``templates/cpu/runtime.c``."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("dims", ctypes.c_void_p),
        ("given", ctypes.c_int64),
        ("temps", ctypes.c_int64),
        ("lent", ctypes.c_int64),
        ("scratch", ctypes.c_int64),
        ("exclusive", ctypes.c_int64),
        ("arrays", ctypes.c_void_p),
        ("temp_places", ctypes.c_void_p),
        ("lent_places", ctypes.c_void_p),
    )


class ArrayTypes(ctypes.Structure):
    """``gradc_array_types``."""

    _fields_ = (
        ("item", ctypes.c_void_p),
        ("type", ctypes.c_void_p),
        ("expected", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Tensors(ctypes.Structure):
    """``gradc_tensors``."""

    _fields_ = (("item", ctypes.c_void_p), ("data_pointer", ctypes.c_void_p), ("count", ctypes.c_int64))


@functools.cache
def prepared_entry() -> Callable[..., int]:
    """``gradc_call_prepared``: (address of a :class:`PreparedCall`, context, addresses, table, workspace) -> 0, or
    :data:`UNFIT`, or anything else where an error was reported; as :func:`call_entry` in all else.
    """
    pointer = ctypes.c_void_p
    return ctypes.PYFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer, pointer)(
        _address(_library().gradc_call_prepared)
    )


@functools.cache
def arrays_entry() -> Callable[..., int] | None:
    """``gradc_call_arrays``: (address of :class:`ArrayTypes`, tuple, and as :func:`prepared_entry` takes them) -> as
    that, and :data:`UNFIT` where an array is not as expected; None where NumPy's arrays do not lie in memory as NumPy's
    own headers say.
    """
    if not _has_known_layout(np.zeros((2, 3), np.float32)[:, ::2]) or not _has_known_layout(np.zeros((), np.int8)):
        return None
    return _on_tuples(_library().gradc_call_arrays)


@functools.cache
def tensors_entry() -> Callable[..., int]:
    """``gradc_call_tensors``: (address of :class:`Tensors`, tuple, and as :func:`prepared_entry` takes them) -> as
    that.  The tensors have memory and are objects of torch's own classes, which is not looked at.
    """
    return _on_tuples(_library().gradc_call_tensors)


def _on_tuples(function: Any) -> Callable[..., int]:
    pointer = ctypes.c_void_p
    return ctypes.PYFUNCTYPE(ctypes.c_int, pointer, ctypes.py_object, pointer, pointer, pointer, pointer, pointer)(
        _address(function)
    )


def _has_known_layout(array: np.ndarray) -> bool:
    """Whether an array has its fields where ``numpy_array`` of ``templates/cpu/runtime.c`` has them.

    Where the fields around them are in their places, so are the pointers to shape and strides between.
    """
    word = ctypes.sizeof(ctypes.c_void_p)
    if word != 8 or type(array).__basicsize__ < 9 * word or sys.implementation.name != "cpython":
        return False
    words = (ctypes.c_uint64 * 9).from_address(id(array))
    return (
        words[1] == id(type(array))
        and words[2] == array.ctypes.data
        and words[3] & 0xFFFFFFFF == array.ndim
        and words[7] == id(array.dtype)
        and words[8] & 0xFFFFFFFF == array.flags.num
    )


def tuple_item() -> int:
    """The address of ``PyTuple_GetItem``."""
    return _address(ctypes.pythonapi.PyTuple_GetItem)


RUNTIME = "runtime"
KERNELS = ("f64", "bf16", "i8")
"""The kernels of products that are libraries of their own, compiled where a program has such products: see
:mod:`gradc.analysis.product_kernels`.
"""
_SOURCES = {RUNTIME: "cpu/runtime.c", **{name: f"cpu/gemm_{name}.c" for name in KERNELS}}
"""Library -> its text."""

_loaded: dict[str, ctypes.CDLL] = {}
"""Each library that the pool has.  The first stays: the handler of a signal may make a call while a library is being
loaded, and be done with it before.
"""
_offered: dict[str, bytes] = {}
_begun: dict[str, tuple[str, Build]] = {}
"""The libraries that are being compiled, each with its key."""
_calls = ContextVar("_calls", default=True)
_importer = os.getpid()


def texts() -> tuple[str, ...]:
    """All that the pool's libraries are compiled from."""
    headers = ("common/ieee.h", *(f"cpu/{name}.h" for name in _HEADERS))
    return tuple(map(read_template, (*headers, *_SOURCES.values())))


_HEADERS = ("runtime", "streaming", "gemm_type", "gemm_vector", "gemm_words", "gemm_kernels", "gemm")


def key(library: str = RUNTIME) -> str:
    """The key of a library's machine code in the cache.

    :raises CompilerMissing: there is no compiler.
    """
    return digest("runtime", library, *texts(), find_compiler().identity, cpu_identity(), *_FLAGS)


def packed(kernels: Collection[str] = ()) -> dict[str, bytes]:
    """The machine code of the pool and of some of :data:`KERNELS`, compressed, for a file that shall run where there is
    no compiler: by the name of each in the file.

    :raises CompilerMissing, CompilerError: one is not there yet and cannot be compiled.
    """
    libraries = (RUNTIME, *sorted(kernels))
    begin(libraries)
    return {part_of(library): zlib.compress(_machine_code(library)) for library in libraries}


def part_of(library: str) -> str:
    """The name of a library's machine code in a module's file."""
    return f"{RUNTIME}.so" if library == RUNTIME else f"{RUNTIME}.{library}.so"


def offer(parts: Mapping[str, bytes]) -> None:
    """Takes, of a file's parts, what :func:`packed` gave on this machine, of these :func:`texts`, for a process without
    a compiler.
    """
    _offered.update({library: parts[part] for library in _SOURCES if (part := part_of(library)) in parts})


def _machine_code(library: str = RUNTIME) -> bytes:
    """From the cache, else compiled; without a compiler what was offered."""
    try:
        find_compiler()
    except CompilerMissing:
        if library not in _offered:
            raise
        try:
            return zlib.decompress(_offered[library])
        except zlib.error as error:
            raise InvalidProblem(f"the runtime in a module's file is no machine code of gradc's: {error}") from None
    cache, name, begun = default_cache(), key(library), _taken(library)
    with begun[1] if begun is not None else nullcontext():  # stopped where another process was first
        payload = cache.get(name)
        if payload is None:
            payload = (
                begun[1].finish()[0]
                if begun is not None and begun[0] == name
                else compile_c(read_template(_SOURCES[library]), extra=_FLAGS)
            )
            cache.put(name, payload)
    return payload


def begin(libraries: Collection[str] = (RUNTIME,)) -> None:
    """Has the pool, or some of :data:`KERNELS`, compiled beside the caller where the cache does not have them, which
    takes seconds once: the first call waits for what is left, and has the errors.  The end of the process, or
    :func:`stop`, stops it; a process that may end without a word, and a block of :func:`no_calls`, leave all to the
    first call.
    """
    if not _calls.get() or _offered or _may_end_untold():
        return
    with _lock:
        for library in libraries:
            if library in _loaded or library in _begun or default_cache().get(key(library)) is not None:
                continue
            build = Build(extra=_FLAGS, link=WHOLE)
            try:
                build.add([read_template(_SOURCES[library])])
                _begun[library] = (key(library), build)
            except BaseException as error:  # also KeyboardInterrupt, whose traceback would keep what was begun
                build.__exit__()
                if not isinstance(error, CompilerError | OSError):
                    raise


@contextmanager
def no_calls() -> Iterator[None]:
    """Modules compiled in the block are looked at, not called: :func:`begin` does nothing."""
    before = _calls.set(False)
    try:
        yield
    finally:
        _calls.reset(before)


def _may_end_untold() -> bool:
    """Whether this process is a child that may end by ``os._exit``, as those of multiprocessing do: nothing would stop
    compilers and delete their files.
    """
    started = sys.modules.get("multiprocessing.process")
    return os.getpid() != _importer or (started is not None and started.parent_process() is not None)


def stop() -> None:
    """Stops what :func:`begin` began."""
    for library in _SOURCES:
        begun = _taken(library)
        if begun is not None:
            begun[1].__exit__(None, None, None)


def _taken(library: str) -> tuple[str, Build] | None:
    """What was begun of a library, for the first that asks."""
    with _lock:
        return _begun.pop(library, None)


def _library() -> ctypes.CDLL:
    """The pool's library, compiled and loaded once per process."""
    if RUNTIME in _loaded:
        return _loaded[RUNTIME]
    with _lock:
        if RUNTIME not in _loaded:
            library = load_library(_machine_code(), RUNTIME)
            library.gradc_set_threads.argtypes = [ctypes.c_int, ctypes.c_int]
            library.gradc_set_threads.restype = ctypes.c_int
            hooks = (
                ctypes.pythonapi.PyEval_SaveThread,
                ctypes.pythonapi.PyEval_RestoreThread,
                ctypes.pythonapi.PyErr_CheckSignals,
            )
            library.gradc_set_python(
                *(ctypes.c_void_p(_address(hook)) for hook in hooks),
                ctypes.c_uint64(threading.main_thread().ident or 0),
            )
            library.gradc_set_threads(_wanted_threads(), _cpus())
            _loaded.setdefault(RUNTIME, library)
    return _loaded[RUNTIME]


def require(kernels: Collection[str]) -> None:
    """Loads some of :data:`KERNELS` into the pool, before a call that has products of them.

    :raises CompilerMissing, CompilerError: they cannot be compiled.
    """
    for name in kernels:
        if name not in _loaded:
            runtime = _library()
            with _lock:
                if name not in _loaded:
                    library = load_library(_machine_code(name), f"{RUNTIME}-{name}")
                    made = getattr(library, f"gradc_{name}_kernels")
                    made.restype = ctypes.c_void_p
                    runtime.gradc_add_kernels(ctypes.c_void_p(made()))
                    _loaded.setdefault(name, library)


# ---- Streaming stores ----------------------------------------------------------------------------------------------

NEVER = 2**63 - 1
_LEAST, _MOST = 8 << 20, 64 << 20
"""The limits of the measured size, in bytes: shorter arrays may stay in a cache, longer ones do not."""
_GAIN = 105
"""The ratio, in percent, of the times of a plain and a streaming copy from which streaming is used; smaller ratios are
within the noise of the measurement.
"""


def least_streamed() -> int:
    """The size in bytes below which arrays are never written by streaming stores."""
    return knobs.STREAM_FROM.get() or _LEAST


def stream_from() -> int:
    """The size in bytes from which arrays are written by streaming stores, bypassing the caches: half of the last-level
    cache if a measurement, made once per machine, shows a gain; else NEVER.
    """
    return knobs.STREAM_FROM.get() or _stream_from()


@functools.cache
def _stream_from() -> int:
    key = digest("stream", read_template("cpu/streaming.h"), find_compiler().identity, cpu_identity(), str(_cpus()))
    cache = default_cache()
    known = cache.get(key)
    if known is None:
        try:
            known = b"%d" % _stream_gain()
        except MemoryError:  # not enough memory for the measurement
            return NEVER
        cache.put(key, known)
    return min(max(_last_level() // 2, _LEAST), _MOST) if int(known) >= _GAIN else NEVER


def _stream_gain() -> int:
    """The ratio of the times of a plain copy and a copy by streaming stores, in percent."""
    size = 2 * min(max(_last_level(), _LEAST), _MOST)
    source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    source[:] = target[:] = 1  # touch the pages, so that they are mapped
    return int(
        _library().gradc_stream_gain(
            new_context().pointer,
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_int64(size),
        )
    )


def _last_level() -> int:
    """The size of the last-level cache in bytes; 32 MiB if the system does not report it."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return (max(sizes) or 32 << 20) >> 20 << 20


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wanted_threads() -> int:
    wanted = knobs.NUM_THREADS.get()
    if wanted <= 0:
        first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # "4,2" counts nested levels
        wanted = int(first) if first.isdigit() and int(first) > 0 else _cpus()
    return max(1, min(wanted, 1024))


def set_num_threads(threads: int) -> None:
    """Sets the number of threads, including the calling one, for the following calls; results do not depend on it.

    :raises ValueError: the number is less than 1 or more than 1024.
    :raises InvalidProblem: called by a signal handler while a call of its own thread uses the pool.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"the pool takes 1 to 1024 threads, not {threads}")
    if _library().gradc_set_threads(threads, _cpus()):
        raise InvalidProblem(f"set_num_threads({threads}) in the middle of a call of this thread: its job has the pool")


def num_threads() -> int:
    """The number of threads that a call may use."""
    return int(_library().gradc_threads())


INTEGERS = 33
"""The runtime's number for products in i32, as 32 and 64 are for those in f32 and f64."""


def pack_bytes(kernels: str, m: int, n: int, k: int) -> int:
    """The most bytes of thread-local memory per thread for the matrix product of [m, k] and [k, n] by the kernels
    ``f32`` or one of :data:`KERNELS`.
    """
    types = ("f32", *KERNELS)  # the runtime's numbers, GEMM_F32 ...
    library = _library()
    require({kernels} & {*KERNELS})
    library.gradc_pack_bytes.restype = ctypes.c_int64
    return int(library.gradc_pack_bytes(types.index(kernels), *map(ctypes.c_int64, (m, n, k))))


def vector_bytes() -> int:
    """The vector width of the matrix product in bytes; a product's bits depend on its values, its shape and this, and
    those of a product of bf16 on :func:`bf16_product`.
    """
    return int(_library().gradc_vector_bytes())


def bf16_product() -> Literal["f32", "pairs", "tiles"]:
    """What multiplies two operands of bf16: the kernels of f32, vectors of pairs (AVX512-BF16), or tiles (AMX)."""
    names: tuple[Literal["f32", "pairs", "tiles"], ...] = ("f32", "pairs", "tiles")
    require(("bf16",))
    return names[_library().gradc_bf16_product()]


def parallel_for(context: Context, tasks: int, body: Any, args: int | None = None) -> None:
    """Runs a compiled ``gradc_body`` on the pool, for tests and measurements.

    :raises OutOfMemory, DeviceError: as :func:`matmul`.
    """
    call_entry()(
        _address(_library().gradc_run_tasks),
        context.pointer,
        (ctypes.c_void_p * 2)(_address(body), args),
        (ctypes.c_int64 * 1)(tasks),
        None,
        -1,
    )
    if context.code:
        raise context.failure("parallel_for")


class _Matrix(ctypes.Structure):
    """``gradc_matrix``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("col", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        *((f"scale_{axis}", ctypes.c_int64) for axis in ("batch", "row", "col")),
        ("row_per", ctypes.c_int64),
        ("col_per", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("places", ctypes.c_void_p),
    ]


_DTYPES = {"bfloat16": 1, "int8": 2, "uint8": 3}
_PRODUCTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("float32",) * 3: (),
    ("float64",) * 3: ("f64",),
    ("bfloat16", "bfloat16", "float32"): ("bf16",),
    **{(a, b, "int32"): ("i8",) for a in ("int8", "uint8") for b in ("int8", "uint8")},
}
"""Dtypes of both operands and of the result -> which of :data:`KERNELS` multiply them."""


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
    """``out (+)= a @ b`` by the pool's matrix product, f32 or f64, bf16 into f32, or int8 and uint8 into int32.

    The bits depend on the values, the shape and :func:`vector_bytes`, not on strides, alignment, or the number of
    threads.

    :param a: [batch, m, k] with any strides.  :param b: [batch, k, n].  :param out: contiguous [batch, m, n] that
        overlaps neither.

    :raises ValueError: ranks, sizes, dtypes or layouts are not as described.
    :raises OutOfMemory: not enough memory for packed operands or partial sums.
    :raises DeviceError: in a child of a fork in the middle of the product, by the handler of a signal.
    """
    prepared_matmul(a, b, out, accumulate)()


def prepared_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> Callable[[], None]:
    """:func:`matmul` as a function that is called later, any number of times; the arrays stay alive with it."""
    batch, m, n = out.shape
    k = a.shape[2]
    if (
        a.shape != (batch, m, k)
        or b.shape != (batch, k, n)
        or (dtypes := (a.dtype.name, b.dtype.name, out.dtype.name)) not in _PRODUCTS
        or not out.flags.c_contiguous
    ):
        raise ValueError(f"matmul: {a.dtype}{list(a.shape)} @ {b.dtype}{list(b.shape)} -> {out.dtype}{list(out.shape)}")
    require(_PRODUCTS[dtypes])
    context = new_context()
    operands = [_Matrix(x.ctypes.data, *(s // x.itemsize for s in x.strides), x.itemsize) for x in (a, b)]
    for operand, x in zip(operands, (a, b), strict=True):
        operand.dtype, operand.row_per, operand.col_per = _DTYPES.get(x.dtype.name, 0), 1, 1
        operand.read = _address(_library().gradc_read_bf16) if x.dtype.name == "bfloat16" else None
    buffers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, operands), out.ctypes.data)
    sizes = (ctypes.c_int64 * 6)(INTEGERS if out.dtype.kind == "i" else out.itemsize * 8, batch, m, n, k, accumulate)
    call, entry = call_entry(), _address(_library().gradc_run_matmul)

    def run() -> None:
        _ = a, b, out, operands
        call(entry, context.pointer, buffers, sizes, None, -1)
        if context.code:
            raise context.failure("matmul")

    return run
