"""Conversion of the caller's arrays to NumPy and of results to the caller's library, and the pool of output memory.

Writing fresh memory is ten times slower than writing memory that was touched before, so blocks are reused; a block is
free when the last array that refers to it has been deleted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gradc.errors import DeviceError, GradcError, InvalidProblem, OutOfMemory
from gradc.ir.types import array_of, shown
from gradc.process.forks import lock
from gradc.process.limits import Limit, tightest, tightest_total

from .tensors import from_tensor, is_tensor, to_tensor

Array = npt.NDArray[Any]
AnyArray = Any
"""An array of any library: NumPy, torch, CuPy, anything with DLPack or the array interface; or a number."""
Arguments = Mapping[str, AnyArray]
"""Arrays passed by a caller, by name."""
Results = dict[str, AnyArray]
"""Arrays returned to a caller, by name."""
T = TypeVar("T")

SMALL = 128 << 10  # bytes; for smaller arrays malloc reuses memory well
_HUGE = 2 << 20


def nbytes(shape: Sequence[int], dtype: npt.DTypeLike) -> int:
    """The size of a contiguous array in bytes, as a Python integer, which does not overflow."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays share a byte (interleaved views do not); True if that is too expensive to decide."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=1000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Array) -> bool:
    """Whether two elements share a byte, as in broadcast arrays and sliding windows; True for strides of which none
    spans the axes within it.
    """
    if array.flags.forc or not array.size:
        return False
    end = array.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end += stride * (n - 1)
    return False


def overlapping(arrays: Mapping[str, Array]) -> set[str]:
    """The names of arrays that share a byte with another one; only neighbours in memory are compared."""
    ranges = sorted((*byte_bounds(array), name) for name, array in arrays.items() if array.size)
    found: set[str] = set()
    for i, (_, end, name) in enumerate(ranges):
        for j in range(i + 1, len(ranges)):
            start, _, other = ranges[j]
            if start >= end:
                break
            if overlap(arrays[name], arrays[other]):
                found |= {name, other}
    return found


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    address = getattr(array, "address", None)  # a DeviceArray knows it
    return array.ctypes.data if address is None else address


def byte_bounds(array: Array) -> tuple[int, int]:
    """(address of the first byte of the elements, address after the last byte)."""
    start = address_of(array)
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    return start + sum(min(s, 0) for s in steps), start + sum(max(s, 0) for s in steps) + array.itemsize


# ---- The pool ------------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Memory of the system's.

    :param memory: what keeps it mapped.
    """

    memory: Array
    address: int
    size: int


class Lease:
    """A block in use, the base of all arrays in it; when it is deleted, the block returns to the pool.

    :ivar address: of its first byte.
    """

    __slots__ = ("__weakref__", "_block", "_pool", "_size", "address")

    def __init__(self, pool: OutputPool, block: _Block, size: int):
        self._pool, self._block, self._size, self.address = pool, block, size, block.address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        self._pool._give_back(self._block, self._size)


class OutputPool:
    """A pool of memory blocks for large arrays, by size class; thread-safe.

    :param limit: the maximum of free bytes to keep; the least recently used blocks are freed first.  None: an eighth of
        this process's memory limit.
    """

    def __init__(self, limit: int | None = None):
        self.limit = min(tightest_total() // 8, 1 << 62) if limit is None else limit
        self.reused = self.fresh = 0
        self._free: list[_Block] = []  # oldest first
        self._brief: set[int] = set()  # addresses of blocks allocated for use within one call
        self._retained = 0
        self.peak = self._in_use = 0
        self._changes: deque[tuple[_Block | None, int]] = (
            deque()
        )  # (returned block, decrease of the bytes in use), not processed yet
        self._lock = lock(reentrant=True)
        self._at_work = 0

    def _alone(self, work: Callable[[], T], otherwise: T) -> T:
        """The result of ``work``, run under the lock; ``otherwise`` if this thread holds the lock already, because a
        signal handler or the garbage collector interrupted it.
        """
        with self._lock:
            me = threading.get_ident()
            if self._at_work == me:
                return otherwise
            try:
                self._at_work = me
                self._drain()
                return work()
            finally:
                self._at_work = 0

    @property
    def retained(self) -> int:
        """The total size of free blocks in bytes."""
        return self._alone(lambda: self._retained, 0)

    def reset_peak(self) -> int:
        """The requested bytes of the large arrays that exist now; resets ``peak``, their maximum, to this number."""

        def reset() -> int:
            self.peak = self._in_use
            return self._in_use

        return self._alone(reset, 0)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike, brief: bool = False) -> Array:
        """An uninitialised C-contiguous array, 2 MB-aligned from 2 MB on.

        :param brief: it is only used within the current call; it may get a larger block than necessary, and smaller
            such blocks are then not kept.
        :raises OutOfMemory: the system does not provide the memory.
        """
        wanted = np.dtype(dtype)
        size = math.prod(shape) * wanted.itemsize
        if size < SMALL:
            return np.empty(tuple(shape), wanted)
        whole: Array = np.asarray(self.lease(size, brief))
        return whole.view(wanted).reshape(tuple(shape))

    def lease(self, size: int, brief: bool = False) -> Lease:
        """As many bytes of uninitialised memory, aligned as arrays are; as :meth:`empty`."""
        rounded = _size_class(size)
        block = self._alone(lambda: self._taken(rounded, size, brief), None)
        if block is None:
            block = self._allocate(rounded, size)
            if brief:
                self._brief.add(block.address)
            self._changes.append((None, -size))
            self._alone(lambda: None, None)
        return Lease(self, block, size)

    def _taken(self, size: int, requested: int, brief: bool) -> _Block | None:
        """A free block for :meth:`lease`, counted as in use; or None."""
        fitting = [i for i, free in enumerate(self._free) if free.size == size or (brief and free.size > size)]
        if fitting:  # the smallest; among equals the most recently used, which is most likely still in cache
            block = self._free.pop(min(fitting, key=lambda i: (self._free[i].size, -i)))
            self._retained -= block.size
            self.reused += 1
            self._count(requested)
            return block
        if brief:
            self._retained -= sum(free.size for free in self._free if free.address in self._brief)
            self._free = [free for free in self._free if free.address not in self._brief]
            self._brief.clear()
        return None

    def _count(self, requested: int) -> None:
        """Bytes that are in use from now on."""
        self._in_use += requested
        self.peak = max(self.peak, self._in_use)

    def trim(self, limit: int = 0) -> None:
        """Returns free blocks to the system, except ``limit`` bytes."""
        self._alone(lambda: self._shrink(limit), None)

    def _allocate(self, size: int, requested: int) -> _Block:
        for attempt in range(2):
            try:
                block = _map(size)
                break
            except (OSError, OverflowError, ValueError) as error:
                if attempt or not isinstance(error, OSError):
                    raise OutOfMemory(f"an array of {requested} bytes cannot be had: {error}") from error
                self.trim()
        with self._lock:
            self.fresh += 1
        return block

    def _give_back(self, block: _Block, requested: int) -> None:
        # Arrays may be deleted by a garbage collection while this thread holds the lock, so the lock is not taken here.
        self._changes.append((block, requested))
        if self._lock.acquire(blocking=False):
            try:
                self._alone(lambda: None, None)
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._changes:
            block, requested = self._changes.popleft()
            self._count(-requested)
            if block is not None:
                self._free.append(block)
                self._retained += block.size
        self._shrink(self.limit)

    def _shrink(self, limit: int) -> None:
        while self._retained > limit and self._free:
            self._retained -= self._free.pop(0).size


def _size_class(size: int) -> int:
    """The size rounded up to one of eight sizes per power of two, so that similar shapes share blocks; at most 12.5 %
    more.
    """
    step = max(1 << max(0, (size - 1).bit_length() - 4), 4096)
    return -(-size // step) * step


def _map(size: int) -> _Block:
    """Private (copy-on-write) pages; huge pages if the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        own = np.empty(size, np.uint8)
        return _Block(own, own.ctypes.data, size)
    slack = _HUGE if size >= _HUGE else 0
    memory = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    pages: Array = np.frombuffer(memory, np.uint8)
    start = pages.ctypes.data
    return _Block(pages, start + (-start % _HUGE if slack else 0), size)


def available() -> Limit:
    """The memory available to this process without swapping, including the pool's free blocks."""
    limit = tightest()
    return Limit(min(limit.left + pool.retained, sys.maxsize), limit.total, limit.name)


@functools.cache
def worth_asking() -> int:
    """The size in bytes below which available memory is not queried: 0.25 GB, or an eighth of this process's limit."""
    return min(1 << 28, tightest_total() // 8)


pool = OutputPool()


def empty(shape: Sequence[int], dtype: npt.DTypeLike, brief: bool = False) -> Array:
    """:meth:`OutputPool.empty` of the process's pool."""
    return pool.empty(shape, dtype, brief)


def lease(size: int, brief: bool = False) -> Lease:
    """:meth:`OutputPool.lease` of the process's pool."""
    return pool.lease(size, brief)


# ---- In and out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """The library of an array.

    :param namespace: its array API namespace (Python array API standard), which converts arrays back.
    """

    name: str
    namespace: Any = None

    NUMPY: ClassVar[Kind]
    SCALAR: ClassVar[Kind]
    """A Python number, which takes the dtype of the input."""
    TORCH: ClassVar[Kind]
    CUPY: ClassVar[Kind]
    """GPU arrays of all libraries except torch."""

    @staticmethod
    def of(kinds: Sequence[Kind]) -> Kind:
        """The library of a call's results: torch if any argument is a tensor, else the first other one, else NumPy."""
        return next(
            (k for k in kinds if k is Kind.TORCH), next((k for k in kinds if k.namespace is not None), Kind.NUMPY)
        )


Kind.NUMPY, Kind.SCALAR, Kind.TORCH, Kind.CUPY = Kind("numpy"), Kind("scalar"), Kind("torch"), Kind("cupy")


def to_numpy(x: Any) -> tuple[Array, Kind]:
    """(a NumPy array, sharing memory if possible; the library it came from).

    Accepts NumPy arrays and scalars, Python numbers, torch CPU tensors (without autograd), and objects with DLPack or
    the array interface on the CPU.  bf16 and f8 become dtypes of ml_dtypes.  Results are returned in the same library
    if it follows the Python array API standard (``__array_namespace__``), else as NumPy arrays.

    :raises DeviceError: it is on another device; names that.
    :raises InvalidProblem: it is not a dense array of numbers.
    """
    if isinstance(x, np.ndarray):
        return _plain(x), Kind.NUMPY
    if isinstance(x, np.generic):  # checked before float, of which np.float64 is a subclass
        return _plain(np.asarray(x)), Kind.NUMPY
    if isinstance(x, bool | int | float):
        array = np.asarray(x)
        if array.dtype.kind in "Ou":  # an int beyond i64
            raise InvalidProblem(f"{shown(x)} does not fit i64")
        return array, Kind.SCALAR
    torch = sys.modules.get("torch")  # if there is a tensor, torch is imported
    if torch is not None and isinstance(x, torch.Tensor):
        return from_tensor(torch, x), Kind.TORCH
    with foreign(x):
        namespace = getattr(x, "__array_namespace__", None)
        return _from_protocol(x), (
            Kind("array API", namespace()) if namespace is not None and not isinstance(x, type) else Kind.NUMPY
        )


def is_copy(array: Array, x: Any) -> bool:
    """Whether :func:`to_numpy` gave an array that is not in the memory of ``x``: a number, another byte order, a tensor
    that is negated lazily.  What a protocol gives is taken to be in it.
    """
    if isinstance(x, bool | int | float | np.generic):
        return True
    if isinstance(x, np.ndarray) or is_tensor(x):
        return bool(array.size) and array.ctypes.data != (x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr())
    return False


@contextlib.contextmanager
def foreign(x: Any) -> Iterator[None]:
    """A context manager that turns any exception of a foreign object, or wrong data from its protocols, into
    InvalidProblem, which names its type.
    """
    try:
        yield
    except GradcError:
        raise
    except Exception as error:
        raise InvalidProblem(
            f"a {type(x).__module__}.{type(x).__qualname__} cannot be read as an array: {type(error).__name__}:"
            f" {str(error)[:200]}"
        ) from error


def _plain(x: Array) -> Array:
    masked = sys.modules.get("numpy.ma")  # imported lazily by NumPy: without it there are no masked arrays
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise InvalidProblem("a masked array: fill it first, its mask would be lost")
    array = np.asarray(x)
    if array.dtype.kind in "OSUMm" or array.dtype.fields is not None:
        raise InvalidProblem(f"an array of {array.dtype} does not hold numbers")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _from_protocol(x: Any) -> Array:
    name = f"{type(x).__module__}.{type(x).__qualname__}"
    device = getattr(x, "__dlpack_device__", None)
    if device is not None and not isinstance(x, type):
        number, index = device()
        if int(number) not in (1, 3, 11):  # CPU, and host memory pinned by CUDA or ROCm
            names = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda managed", 14: "oneapi"}
            raise DeviceError(
                f"a {name} on {names.get(int(number), f'DLPack device {int(number)}')}:{index} "
                "was given to a module for the CPU"
            )
    elif hasattr(x, "__cuda_array_interface__"):
        raise DeviceError(f"a {name} on cuda was given to a module for the CPU")
    if hasattr(x, "__array_interface__") or hasattr(x, "__array_struct__"):
        return _plain(array_of(x))
    if device is not None:
        try:
            return _plain(np.from_dlpack(x))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if not hasattr(x, "__array__"):  # NumPy's DLPack does not support bf16; __array__ may
                raise InvalidProblem(f"a {name} cannot be read through DLPack: {error}") from error
    if hasattr(x, "__array__"):
        return _plain(np.asarray(x))
    raise InvalidProblem(
        f"a {name} is not an array: pass a NumPy array, a torch tensor or anything with DLPack or the array interface"
    )


def permuted(x: Any, order: Sequence[int]) -> Any:
    """A view with permuted axes, in the same library."""
    if isinstance(x, np.ndarray):
        return x.transpose(order)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.permute(*order)
    if type(x).__module__.partition(".")[0] == "cupy":
        return x.transpose(order)
    namespace = getattr(x, "__array_namespace__", None)
    return to_numpy(x)[0].transpose(order) if namespace is None else namespace().permute_dims(x, tuple(order))


def from_numpy(array: Array, kind: Kind) -> Any:
    """The inverse of :func:`to_numpy`: the array in the library ``kind``, sharing memory if possible."""
    if kind.namespace is not None:
        try:
            return kind.namespace.from_dlpack(array)
        except (
            AttributeError,
            BufferError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # NumPy's DLPack does not support bf16 and f8
            return kind.namespace.asarray(array)
    return to_tensor(array) if kind is Kind.TORCH else array
