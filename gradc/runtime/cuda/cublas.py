"""Matrix products by cuBLAS on raw pointers with the caller's workspace; ``cupy.matmul`` would allocate.

f32 products are computed in f32 (no TF32), those of 16-bit floats accumulate in f32 and give f32 or are rounded once,
those of f64 in f64.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...codegen.cuda.actions import Library, Side
from ...codegen.cuda.products import POINTER_ALIGN
from ...errors import DeviceError
from ...ir.types import dtype as dtype_of
from ...process.forks import lock
from .device import Span

_OK, _DEFAULT_ALGORITHM = 0, -1
_NO_TRANSPOSE, _TRANSPOSE = 0, 1
# CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: split-K reductions of 16-bit products are
# in f32, too.
_MATH = 16
# cudaDataType and cublasComputeType_t of each dtype.
_TYPES = {"f32": (0, 68), "f64": (1, 70), "f16": (2, 68), "bf16": (14, 68)}
_STATUS = {
    1: "not initialized",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_longlong, "z": ctypes.c_size_t}
_SIGNATURES = {
    "cublasCreate_v2": "p",
    "cublasSetStream_v2": "p p",
    "cublasSetWorkspace_v2": "p p z",
    "cublasSetMathMode": "p i",
    # handle, transa, transb, m, n, k, alpha; A, Atype, lda, strideA; B the same; beta; C the same; batchCount,
    # computeType, algo
    "cublasGemmStridedBatchedEx": "p i i i i i p  p i i l  p i i l  p  p i i l  i i i",
    # without strides: A, B and C are arrays of addresses, which lie on the device
    "cublasGemmBatchedEx": "p i i i i i p  p i i  p i i  p  p i i  i i i",
}
"""The types of arguments: pointers, ints, long longs and a size."""


@dataclass
class _Handle:
    """A handle of cuBLAS.

    :param given: the stream, and the address and bytes of the workspace, that it was given last.
    """

    number: int
    given: tuple[int, int, int] | None = None


_handles: dict[int, _Handle] = {}
"""One of each device, for all threads (autograd's, too) and streams: each has memory of its own on the device."""
_lock = lock(reentrant=True)
"""Held from where a handle is given a stream and a workspace to where it has submitted all that goes there."""


def workspace_bytes(arch: str) -> int:
    """The workspace that cuBLAS recommends for an architecture: 32 MiB from sm_90 on, 4 MiB before."""
    return (32 if int(arch.removeprefix("sm_").rstrip("af")) >= 90 else 4) << 20


def prepared(
    device: int, library: Library, a: int, b: int, out: int, workspace: Span, pointers: int = 0
) -> Callable[[int], None]:
    """A function that submits a product to a stream, which may be under capture; arguments are converted once.

    :param pointers: the address of ``library.pointers``, by which one call is made unless an array of 16-bit elements
        begins between multiples of POINTER_ALIGN bytes.
    :raises DeviceError: there is no cuBLAS; the function raises it where that reports an error, with the sizes.
    """
    blas, handle = _library(), _handle(device)
    asked = _calls(blas, handle, library, (a, b, out), pointers)
    calls = [(_untyped(function), _converted(function, given)) for function, given in asked]
    set_stream, set_workspace = blas.cublasSetStream_v2, blas.cublasSetWorkspace_v2
    number, (address, nbytes) = handle.number, (workspace.address, workspace.nbytes)

    def submit(stream: int) -> None:
        given = (stream, address, nbytes)
        with _lock:
            if handle.given != given:
                handle.given = None
                _check(set_stream(number, stream), library)
                # set after the stream, because setting the stream resets the workspace
                _check(set_workspace(number, address, nbytes), library)
                handle.given = given
            for function, arguments in calls:
                code = function(*arguments)
                if code:
                    _check(code, library)

    return submit


def _calls(
    blas: Any, handle: _Handle, library: Library, starts: tuple[int, int, int], pointers: int
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Functions of cuBLAS with their arguments."""
    a, b, out = starts
    (data, _), (result, compute) = (_TYPES[dtype_of(each).name] for each in (library.read, library.dtype))
    real = ctypes.c_double if library.dtype == np.float64 else ctypes.c_float
    one, kept = real(1), real(library.product.add)  # what is there is added, or not even read
    # cuBLAS is column-major: it sees row-major matrices as transposes, and out^T = b^T a^T.
    sizes = (_operation(library.b), _operation(library.a), library.n, library.m, library.k)
    product, added = (handle.number, *sizes, ctypes.byref(one)), ctypes.byref(kept)
    left, right, written = ((side.leading, side.step) for side in (library.b, library.a, library.out))
    how = (compute, _DEFAULT_ALGORITHM)
    if pointers and (library.read.itemsize > 2 or not any(start % POINTER_ALIGN for start in starts)):
        of_a, of_b, of_out = (pointers + 8 * library.matrices * i for i in range(3))
        arrays = (of_b, data, left[0], of_a, data, right[0], added, of_out, result, written[0])
        yield blas.cublasGemmBatchedEx, (*product, *arrays, library.matrices, *how)
        return
    read, wrote = library.read.itemsize, library.dtype.itemsize
    for at_a, at_b, at_out in library.calls:
        operands = (b + at_b * read, data, *left, a + at_a * read, data, *right, added, out + at_out * wrote, result)
        yield blas.cublasGemmStridedBatchedEx, (*product, *operands, *written, library.batch, *how)


def _converted(function: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as the types of a foreign function; those of any other are as they are."""
    types = getattr(function, "argtypes", None)
    if not types:
        return given
    return tuple(kind(x) if isinstance(x, int) else x for kind, x in zip(types, given, strict=True))


def _untyped(function: Any) -> Any:
    """The same foreign function for arguments that have its types, which ctypes then need not convert in each call;
    any other as it is.
    """
    foreign = getattr(function, "argtypes", None)
    return type(function)(ctypes.cast(function, ctypes.c_void_p).value) if foreign else function


def _operation(side: Side) -> int:
    return _TRANSPOSE if side.transposed else _NO_TRANSPOSE


def _check(code: int, library: Library | None = None) -> None:
    if code != _OK:
        subject = (
            f"{library.matrices} x {library.m} x {library.n} x {library.k} in {library.dtype}"
            if library is not None
            else "its beginning"
        )
        raise DeviceError(f"cuBLAS refused a product ({subject}): status {code}, {_STATUS.get(code, 'unknown')}")


def _handle(device: int) -> _Handle:
    """The handle of a device, which is the current one."""
    with _lock:
        if device not in _handles:
            made = ctypes.c_void_p()
            _check(_library().cublasCreate_v2(ctypes.byref(made)))
            _check(_library().cublasSetMathMode(made, _MATH))
            _handles[device] = _Handle(made.value or 0)
        return _handles[device]


def prepare(device: int) -> None:
    """Creates the device's handle now, because that allocates, which is not possible during a capture."""
    _handle(device)


@functools.cache
def _library() -> Any:
    """The cuBLAS of CuPy's CUDA version.

    :raises DeviceError: it was not found; the message says where it was searched.
    """
    import cupy

    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    tried = []
    for name in _candidates(major):
        try:
            library = ctypes.CDLL(name)
            for function, types in _SIGNATURES.items():
                getattr(library, function).argtypes = [_KINDS[letter] for letter in types.split()]
            return library
        except (OSError, AttributeError) as error:
            tried.append(f"{name}: {error}")
    raise DeviceError(
        f"no cuBLAS of CUDA {major} ({'; '.join(tried)}); the wheel nvidia-cublas{'-cu12' if major == 12 else ''}"
        " brings one"
    )


def _candidates(major: int) -> Iterator[str]:
    """Library names and files, in the order in which they are tried: loaded already, from a wheel, found by CuPy."""
    soname = f"libcublas.so.{major}"
    yield soname
    namespace = importlib.util.find_spec("nvidia")
    for root in (namespace.submodule_search_locations if namespace is not None else None) or ():
        for folder in ("cublas", f"cu{major}"):
            yield from sorted(glob.glob(os.path.join(glob.escape(root), folder, "lib", soname)))
    import cupy

    cupy.cuda.device.get_cublas_handle()  # makes CuPy load its cuBLAS
    yield soname
