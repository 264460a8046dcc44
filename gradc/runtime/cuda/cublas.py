"""Matrix products by cuBLAS on raw pointers with the caller's workspace; ``cupy.matmul`` would allocate.

f32 products are computed in f32 (no TF32), those of 16-bit floats accumulate in f32 and give f32 or are rounded once,
those of f64 in f64.  Those with a bias, or another epilogue, are cuBLASLt's, which cuBLAS is linked with and whose
handle it takes.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...codegen.cuda.actions import Library, Side
from ...codegen.cuda.products import POINTER_ALIGN
from ...errors import DeviceError, DriverTooOld, OutOfMemory
from ...ir.epilogue import FORMS, PLAIN, Epilogue
from ...ir.types import dtype as dtype_of
from ..recent import Recent
from .device import NoKernel, Span
from .handles import Handle, Handles

_OK, _NO_MEMORY, _NOT_SUPPORTED, _DEFAULT_ALGORITHM = 0, 3, 15, -1
_NO_TRANSPOSE, _TRANSPOSE = 0, 1
# CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: split-K reductions of 16-bit products are
# in f32, too.
_MATH = 16
# cudaDataType and cublasComputeType_t of each dtype.
_F32 = 0
_TYPES = {"f32": (_F32, 68), "f64": (1, 70), "f16": (2, 68), "bf16": (14, 68)}
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
    "cublasDestroy_v2": "p",
    "cublasSetStream_v2": "p p",
    "cublasSetWorkspace_v2": "p p z",
    "cublasSetMathMode": "p i",
    "cublasGetProperty": "i p",
    # handle, transa, transb, m, n, k, alpha; A, Atype, lda, strideA; B the same; beta; C the same; batchCount,
    # computeType, algo
    "cublasGemmStridedBatchedEx": "p i i i i i p  p i i l  p i i l  p  p i i l  i i i",
    # without strides: A, B and C are arrays of addresses, which lie on the device
    "cublasGemmBatchedEx": "p i i i i i p  p i i  p i i  p  p i i  i i i",
}
"""The types of arguments: pointers, ints, long longs and a size."""
_LT_SIGNATURES = {
    "cublasLtMatmulDescCreate": "p i i",
    "cublasLtMatmulDescSetAttribute": "p i p z",
    "cublasLtMatmulDescDestroy": "p",
    # layout; type, rows, columns, leading dimension
    "cublasLtMatrixLayoutCreate": "p i l l l",
    "cublasLtMatrixLayoutDestroy": "p",
    "cublasLtMatmulPreferenceCreate": "p",
    "cublasLtMatmulPreferenceSetAttribute": "p i p z",
    "cublasLtMatmulPreferenceDestroy": "p",
    # handle, product, layouts of A, B, C and D, preference, how many are asked for; the results, how many there are
    "cublasLtMatmulAlgoGetHeuristic": "p p p p p p p i p p",
    # handle, product, alpha; A and its layout; B; beta; C; D; algorithm, workspace, its bytes, stream
    "cublasLtMatmul": "p p p  p p  p p  p  p p  p p  p p z p",
}
# Attributes of cublasLt.h: of a product TRANSA, TRANSB, EPILOGUE, BIAS_POINTER (of a bias, or of sums), and POINTER and
# LD of EPILOGUE_AUX (of an argument); of a preference MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK and
# MIN_ALIGNMENT_A_BYTES, which those of B, C and D follow.
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS, _ARGUMENT, _LEADING = 3, 4, 7, 8, 11, 12
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENT = 1, 3, 5
_IN_F32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: what _MATH says for cuBLAS
_MOST_ALIGNMENT = 256


def workspace_bytes(arch: str) -> int:
    """The workspace that cuBLAS recommends for an architecture: 32 MiB from sm_90 on, 4 MiB before."""
    return (32 if int(arch.removeprefix("sm_").rstrip("af")) >= 90 else 4) << 20


CopyRows = Callable[[int, int, int, int, int, int], None]
"""(to, source, bytes from a row to the next, bytes of each, rows, stream): submits a copy within the device."""
Capturing = Callable[[int], bool]
"""Whether a stream is being captured."""


def prepared(
    device: int,
    library: Library,
    a: int,
    b: int,
    out: int,
    workspace: Span,
    pointers: int = 0,
    epilogue: Epilogue[Span] = PLAIN,
    copy_rows: CopyRows | None = None,
    capturing: Capturing | None = None,
) -> Callable[[int], None]:
    """A function that submits a product to a stream, which may be under capture; arguments are converted once.

    :param pointers: the address of ``library.pointers``, by which one call is made unless an array of 16-bit elements
        begins between multiples of POINTER_ALIGN bytes.
    :param epilogue: what the product's reads and writes.
    :param copy_rows: by which cuBLAS alone gives a product with a bias that cuBLASLt has no kernel for.
    :raises NoKernel: cuBLASLt has none with this epilogue, or is not there.
    :raises DeviceError: there is no cuBLAS; the function raises it where that reports an error, with the sizes.
    """
    if epilogue:
        try:
            product = _WithEpilogue(device, library, a, b, out, workspace, epilogue)
            return _handles.using(device, product.submit, capturing)
        except NoKernel:
            if copy_rows is None or library.product.add or epilogue.bias is None or epilogue.beyond_bias:
                raise
            return _added_to_bias(device, library, a, b, out, workspace, epilogue.bias.address, copy_rows, capturing)
    blas = _library()
    asked = _calls(blas, library, (a, b, out), pointers)
    calls = [(_untyped(function), _converted(function, (None, *given))[1:]) for function, given in asked]
    set_stream, set_workspace = blas.cublasSetStream_v2, blas.cublasSetWorkspace_v2
    address, nbytes = workspace.address, workspace.nbytes

    def submitted(handle: Handle[ctypes.c_void_p], stream: int) -> None:
        given, native = (stream, address, nbytes), handle.native
        if handle.given != given:
            handle.given = None
            _check(set_stream(native, stream), library)
            # set after the stream, because setting the stream resets the workspace
            _check(set_workspace(native, address, nbytes), library)
            handle.given = given
        for function, arguments in calls:
            code = function(native, *arguments)
            if code:
                _check(code, library)

    return _handles.using(device, submitted, capturing)


def _added_to_bias(
    device: int, library: Library, a: int, b: int, out: int, workspace: Span, bias: int, copy_rows: CopyRows,
    capturing: Capturing | None,
) -> Callable[[int], None]:  # fmt: skip
    """A product with a bias: every row of the result begins as the bias, in copies that double, and the product is
    added to that.
    """
    product = replace(library.product, epilogue=PLAIN, add=True)
    added = prepared(device, replace(library, product=product), a, b, out, workspace, capturing=capturing)
    pitch, width = (library.dtype.itemsize * n for n in (library.out.leading, library.n))

    def submit(stream: int) -> None:
        copy_rows(out, bias, pitch, width, 1, stream)
        there = 1
        while there < library.m:
            more = min(there, library.m - there)
            copy_rows(out + there * pitch, out, pitch, width, more, stream)
            there += more
        added(stream)

    return submit


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_algorithms: Recent[tuple[Any, ...], _Algorithm] = Recent(1024)
"""By device, sizes, dtypes, epilogue, workspace and the alignment of every address; where there is none, what says so:
the library is asked once, and what is done instead is the same in every call.
"""


class _WithEpilogue:
    """A product with an epilogue on addresses.  The algorithm is found once for addresses that are aligned alike."""

    def __init__(
        self, device: int, library: Library, a: int, b: int, out: int, workspace: Span, epilogue: Epilogue[Span]
    ):
        self._made: list[tuple[str, int]] = []
        self.lt, self.library = _lt(), library
        self.what = "a bias" if not epilogue.beyond_bias else f"the epilogue {FORMS[epilogue.form]}"
        data, compute = _TYPES[dtype_of(library.dtype).name]
        m, n, k = library.m, library.n, library.k
        # out^T = b^T a^T, as for cuBLAS; a bias goes along the rows of what it sees
        product = self._create("MatmulDesc", compute, _F32)
        vector, argument = epilogue.bias or epilogue.sums, epilogue.argument
        for attribute, value in (
            (_TRANSPOSE_A, ctypes.c_int32(_operation(library.b))),
            (_TRANSPOSE_B, ctypes.c_int32(_operation(library.a))),
            (_EPILOGUE, ctypes.c_uint32(FORMS[epilogue.form])),
            *([(_BIAS, ctypes.c_void_p(vector.address))] if vector else []),
            *([(_ARGUMENT, ctypes.c_void_p(argument.address)), (_LEADING, ctypes.c_int64(n))] if argument else []),
        ):
            self._set("MatmulDesc", product, attribute, value)
        left = self._layout(data, n, k, library.b)
        right = self._layout(data, k, m, library.a)
        result = self._layout(data, n, m, library.out)
        # what is known of the result holds for what the epilogue reads and writes, too
        others = [span.address for span in (vector, argument) if span]
        aligned = tuple(min(_alignment(at) for at in each) for each in ((b,), (a,), (out,), (out, *others)))
        sides = tuple((side.transposed, side.leading) for side in (library.a, library.b, library.out))
        key = (device, m, n, k, sides, data, library.product.add, epilogue.form, workspace.nbytes, aligned)
        found = _algorithms.get(key)
        if found is None:
            layouts = (left, right, result, result)
            found = _algorithms[key] = self._heuristic(device, product, layouts, workspace.nbytes, aligned)
        if found.state:
            raise NoKernel(f"cuBLASLt has no kernel for a product with {self.what} ({_sizes(library)})")
        self._kept = found, ctypes.c_float(1), ctypes.c_float(library.product.add)
        algorithm, one, kept = map(ctypes.addressof, self._kept)
        operands = (product, one, b, left, a, right, kept, out, result, out, result)
        given = (None, *operands, algorithm, workspace.address, workspace.nbytes, 0)
        matmul = self.lt.cublasLtMatmul
        self._matmul, (_, *self._given, _) = _untyped(matmul), _converted(matmul, given)
        self._stream = ctypes.c_void_p if getattr(matmul, "argtypes", None) else int

    def submit(self, handle: Handle[ctypes.c_void_p], stream: int) -> None:
        code = self._matmul(handle.native, *self._given, self._stream(stream))
        if code:
            _check(code, self.library)

    def _heuristic(
        self, device: int, product: int, layouts: tuple[int, ...], nbytes: int, aligned: tuple[int, ...]
    ) -> _Algorithm:
        """The library's first; its state is not 0 where there is none."""
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, _MOST_WORKSPACE, ctypes.c_uint64(nbytes))
        self._set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_IN_F32))
        for i, alignment in enumerate(aligned):
            self._set("MatmulPreference", preference, _ALIGNMENT + i, ctypes.c_uint32(alignment))
        found, count = _Algorithm(), ctypes.c_int()
        asked = (product, *layouts, preference, 1, ctypes.addressof(found), ctypes.addressof(count))
        heuristic = self.lt.cublasLtMatmulAlgoGetHeuristic
        code = _handles.using(device, lambda handle, _: heuristic(handle.native, *asked))(None)
        if code != _NOT_SUPPORTED:
            _check(code, self.library)
        if code or not count.value:
            found.state = _NOT_SUPPORTED
        return found

    def _layout(self, data: int, rows: int, columns: int, side: Side) -> int:
        """A matrix of ``rows`` and ``columns``, as it lies in memory."""
        shape = (columns, rows) if side.transposed else (rows, columns)
        return self._create("MatrixLayout", data, *shape, side.leading)

    def _create(self, kind: str, *given: int) -> int:
        made = ctypes.c_void_p()
        _check(getattr(self.lt, f"cublasLt{kind}Create")(ctypes.addressof(made), *given), self.library)
        self._made.append((kind, made.value or 0))
        return made.value or 0

    def _set(self, kind: str, of: int, attribute: int, value: Any) -> None:
        setter = getattr(self.lt, f"cublasLt{kind}SetAttribute")
        _check(setter(of, attribute, ctypes.addressof(value), ctypes.sizeof(value)), self.library)

    def __del__(self) -> None:
        for kind, made in self._made:
            getattr(self.lt, f"cublasLt{kind}Destroy")(made)


def _calls(
    blas: Any, library: Library, starts: tuple[int, int, int], pointers: int
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Functions of cuBLAS with their arguments after the handle."""
    a, b, out = starts
    (data, _), (result, compute) = (_TYPES[dtype_of(each).name] for each in (library.read, library.dtype))
    real = ctypes.c_double if library.dtype == np.float64 else ctypes.c_float
    one, kept = real(1), real(library.product.add)  # what is there is added, or not even read
    # cuBLAS is column-major: it sees row-major matrices as transposes, and out^T = b^T a^T.
    sizes = (_operation(library.b), _operation(library.a), library.n, library.m, library.k)
    product, added = (*sizes, ctypes.byref(one)), ctypes.byref(kept)
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


def _alignment(address: int) -> int:
    """The power of two that an address is a multiple of, as far as cuBLASLt asks."""
    return min(address & -address, _MOST_ALIGNMENT) or _MOST_ALIGNMENT


def _operation(side: Side) -> int:
    return _TRANSPOSE if side.transposed else _NO_TRANSPOSE


def _check(code: int, library: Library) -> None:
    if code != _OK:
        kind = OutOfMemory if code == _NO_MEMORY else DeviceError
        raise kind(f"cuBLAS refused a product ({_sizes(library)}): {_status(code)}")


def _status(code: int) -> str:
    return f"status {code}, {_STATUS.get(code, 'unknown')}"


def _sizes(library: Library) -> str:
    return f"{library.matrices} x {library.m} x {library.n} x {library.k} in {library.dtype}"


def _create(device: int) -> ctypes.c_void_p:
    """
    :raises DriverTooOld: for this cuBLAS; both versions are named.
    """
    blas, made = _library(), ctypes.c_void_p()
    code = blas.cublasCreate_v2(ctypes.byref(made)) or blas.cublasSetMathMode(made, _MATH)
    if code == _NO_MEMORY:
        raise OutOfMemory(f"no memory for a handle of cuBLAS on device {device}: {_status(code)}")
    if code:
        (major, minor), driver = _version(blas), _driver()
        there = f"cuBLAS {major}.{minor} makes no handle of device {device}: {_status(code)}"
        if driver < (major, 0):
            needed = f"the driver is of CUDA {driver[0]}.{driver[1]}, and one of {major}.0 or newer is needed"
            raise DriverTooOld(f"{there}; {needed}, or the cuBLAS and CuPy of CUDA {driver[0]}")
        raise DeviceError(there)
    return made


def _version(blas: Any) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    blas.cublasGetProperty(0, ctypes.byref(major))
    blas.cublasGetProperty(1, ctypes.byref(minor))
    return major.value, minor.value


def _driver() -> tuple[int, int]:
    import cupy

    version = int(cupy.cuda.runtime.driverGetVersion())
    return version // 1000, version % 1000 // 10


def _destroy(made: ctypes.c_void_p) -> None:
    _library().cublasDestroy_v2(made)


_handles: Handles[ctypes.c_void_p] = Handles(_create, _destroy)


@functools.cache
def _library() -> Any:
    """The cuBLAS of CuPy's CUDA version.

    :raises DeviceError: it was not found; the message says where it was searched.
    """
    import cupy

    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    tried: list[str] = []
    for name in _candidates(major, tried):
        try:
            library = ctypes.CDLL(name)
            for function, types in _SIGNATURES.items():
                getattr(library, function).argtypes = [_KINDS[letter] for letter in types.split()]
            return library
        except (OSError, AttributeError) as error:
            tried.append(f"{name}: {error}")
    wheel = f"nvidia-cublas{'-cu12' if major == 12 else ''}"
    raise DeviceError(
        f"products of matrices are cuBLAS's, and there is no cuBLAS of CUDA {major} ({'; '.join(tried)}); the wheel"
        f" {wheel} brings one"
    )


@functools.cache
def _lt() -> Any:
    """cuBLASLt: its functions are found by the loader in what cuBLAS is linked with.

    :raises NoKernel: they are not.
    """
    library = _library()
    try:
        for function, types in _LT_SIGNATURES.items():
            getattr(library, function).argtypes = [_KINDS[letter] for letter in types.split()]
    except AttributeError as error:
        raise NoKernel(f"a product with a bias needs cuBLASLt, and this cuBLAS has none: {error}") from error
    return library


def _candidates(major: int, tried: list[str]) -> Iterator[str]:
    """Library names and files, in the order in which they are tried: loaded already, from a wheel, found by CuPy, which
    may say why it finds none.
    """
    soname = f"libcublas.so.{major}"
    yield soname
    namespace = importlib.util.find_spec("nvidia")
    for root in (namespace.submodule_search_locations if namespace is not None else None) or ():
        for folder in ("cublas", f"cu{major}"):
            yield from sorted(glob.glob(os.path.join(glob.escape(root), folder, "lib", soname)))
    import cupy

    try:
        cupy.cuda.device.get_cublas_handle()  # makes CuPy load its cuBLAS
    except (ImportError, OSError, RuntimeError) as error:
        tried.append(f"CuPy: {error}")
    else:
        yield soname
