"""Conversion of GPU arrays: those of CuPy and torch, and objects with DLPack or the CUDA array interface.

Internally they are :class:`DeviceArray`: NumPy arrays over device addresses, which the host must not dereference.
NumPy handles their shapes, strides, overlaps and views; elements are never accessed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ...codegen.cuda.support import ADDED, AXES, THREADS, blocks, merged_axes
from ...errors import CaptureError, DeviceError, InternalError, InvalidProblem, OutOfMemory, Unsupported
from ...ir.types import dtype as dtype_of
from ...ir.types import shown
from ...process.forks import lock
from ...process.limits import Limit
from ..backend import NO_ALLOCATION, BoundCall
from ..host.arrays import Kind, address_of, byte_bounds, foreign, to_numpy
from ..host.tensors import BITS, NARROW, STORED, check_dense, check_unrecorded, is_tensor
from ..recent import Recent
from ..torch_private import current_stream
from .capture_mode import relaxed
from .device import Device, Memory, Span
from .numbers import Numbers, bits_of

Array = np.ndarray[Any, Any]
_SIZES = (1, 2, 4, 8)
# DLPack's (type code, bits) -> the dtype's name in NumPy or ml_dtypes.
_DLPACK = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
    (14, 8): "float8_e8m0fnu",
}
_CUDA, _MANAGED = 2, 13
_KEPT_BYTES = 1 << 16
"""Host constants of more bytes are cached by identity instead of by contents."""


class DeviceArray(np.ndarray):  # type: ignore[type-arg]
    """An array in device memory; reading an element on the host would crash the process.

    :ivar native: the object of the caller's library that owns this memory.
    :ivar number: the device's number, if that library reports it.
    :ivar owner: what keeps the memory allocated; views share it.
    :ivar address: of the first element; None for views of such an array, see :func:`address_of`.
    """

    native: Any = None
    number: int | None = None
    owner: Any = None
    address: int | None = None

    def __array_finalize__(self, base: Any) -> None:
        if base is not None:
            self.owner = getattr(base, "owner", None)

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise InternalError("arithmetic on the host with an array on a device")

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on a device>"

    __str__ = __repr__


_EVERYWHERE = (ctypes.c_char * (2**63 - 1)).from_address(1)
"""A buffer that begins at address 1 and holds every other; arrays over it are made in one step."""
_NOWHERE = 256
"""The address of empty arrays."""


def remote(
    address: int,
    shape: Sequence[int],
    dtype: Any,
    strides: Sequence[int] | None = None,
    owner: Any = None,
    native: Any = None,
    readonly: bool = False,
    number: int | None = None,
) -> DeviceArray:
    """Device memory as an array; strides in bytes."""
    wanted = np.dtype(dtype)
    if wanted.itemsize not in _SIZES or wanted.kind in "cOSUMm":
        raise InvalidProblem(f"an array of {wanted} does not hold numbers that gradc knows")
    if 0 in shape:
        address, strides = _NOWHERE, None
    array = np.ndarray.__new__(DeviceArray, shape, wanted, _EVERYWHERE, address - 1, strides)  # type: ignore[arg-type]
    if readonly:
        array.flags.writeable = False
    array.native, array.number, array.owner, array.address = native, number, owner, address
    return array


def _torch() -> Any:
    return sys.modules.get("torch")  # if there is a tensor, torch is imported


def describe(x: Any) -> DeviceArray | None:
    """A view of a GPU array; None for anything else.  Never waits."""
    if isinstance(x, DeviceArray):
        return x
    if is_tensor(x):
        return _from_tensor(x) if x.device.type == "cuda" else None
    if is_cupys(type(x)) and hasattr(x, "data"):
        return remote(x.data.ptr, x.shape, x.dtype, x.strides, owner=x, native=x, number=int(x.device.id))
    return None


def is_cupys(kind: type) -> bool:
    return kind.__module__ == "cupy" or kind.__module__.startswith("cupy.")


@functools.cache
def _meaning(dtype: Any) -> np.dtype[Any]:
    """NumPy's or ml_dtypes' name of a dtype of torch's.

    :raises InvalidProblem: there is none.
    """
    name = str(dtype)
    try:
        return np.dtype(BITS[name][1]) if name in BITS else np.dtype(name.removeprefix("torch."))
    except TypeError as error:
        raise InvalidProblem(f"a torch tensor of {name} does not hold numbers that gradc knows") from error


def _from_tensor(x: Any) -> DeviceArray:
    check_dense(x)
    if x.is_conj() or x.is_neg():
        raise InvalidProblem("a torch tensor with a lazy conjugate or minus sign: resolve_conj(), resolve_neg() first")
    meaning = _meaning(x.dtype)
    try:
        address = x.data_ptr()
    except RuntimeError as error:  # a fake tensor (torch.compile, torch.export), or one wrapped by torch.func
        raise InvalidProblem(f"a torch tensor of {x.dtype} ({type(x).__name__}) has no memory: {error}") from error
    if not address and x.numel():
        raise InvalidProblem(
            f"a torch tensor of {x.dtype} ({type(x).__name__}) has no memory: it is a stand-in for a tensor, or its"
            " storage was freed"
        )
    return remote(
        address,
        tuple(x.shape),
        meaning,
        [s * meaning.itemsize for s in x.stride()],
        owner=x,
        native=x,
        number=x.device.index,
    )


def to_host(x: Any) -> Array:
    """A copy of an array in host memory; waits for the device."""
    if is_tensor(x) and x.device.type == "cuda":
        return to_numpy(x.detach().cpu())[0]
    return np.asarray(x.get()) if hasattr(x, "get") and describe(x) is not None else to_numpy(x)[0]


# -- DLPack and the CUDA array interface -------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, version 0 (a capsule named dltensor)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def from_dlpack(x: Any, stream: int) -> DeviceArray:
    """The array through DLPack; the producer makes ``stream`` wait for its pending writes."""
    import ml_dtypes

    capsule = x.__dlpack__(stream=stream or 1)  # 1 is DLPack's number of the default stream
    tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    name = _DLPACK.get((tensor.code, tensor.bits))
    if name is None or tensor.lanes != 1:
        raise InvalidProblem(
            f"a {type(x).__qualname__} whose elements are (DLPack) code {tensor.code}, {tensor.bits} bits,"
            f" {tensor.lanes} lanes"
        )
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = tensor.shape[: tensor.ndim]
    strides = [s * dtype.itemsize for s in tensor.strides[: tensor.ndim]] if tensor.strides else None
    return remote(
        (tensor.data or 0) + tensor.byte_offset, shape, dtype, strides, owner=(capsule, x), native=x
    )  # an unconsumed capsule frees its tensor when it is deleted


def from_interface(x: Any, device: Device, stream: int) -> DeviceArray:
    """The array through the CUDA array interface."""
    about = x.__cuda_array_interface__
    if about.get("mask") is not None:
        raise InvalidProblem("a masked array: fill it first, its mask would be lost")
    address, readonly = about["data"]
    theirs = about.get("stream")
    if theirs is not None and theirs != (stream or 1):
        device.follow(stream, theirs)
    if any(n < 0 for n in about["shape"]) or (
        about.get("strides") is not None and len(about["strides"]) != len(about["shape"])
    ):
        raise InvalidProblem(
            f"a {type(x).__qualname__} says shape {about['shape']} and strides {about.get('strides')} of itself"
        )
    return remote(
        address or 0,
        about["shape"],
        np.dtype(about["typestr"]),
        about.get("strides"),
        owner=x,
        native=x,
        readonly=readonly,
    )


def pointer_of(stream: Any) -> int:
    """The address of a stream: an int, or an object with ``__cuda_stream__``, ``cuda_stream`` (torch) or ``ptr``
    (CuPy).
    """
    pointer = stream
    if hasattr(stream, "__cuda_stream__"):
        pointer = stream.__cuda_stream__()[1]
    elif not isinstance(stream, int):
        pointer = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if not isinstance(pointer, int) or isinstance(pointer, bool) or pointer < 0:
        raise InvalidProblem(f"stream={stream!r}: an int, or a stream of CuPy, torch or anything with __cuda_stream__")
    return int(pointer)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which array libraries store it: 8-bit integers for sub-byte dtypes."""
    narrow = NARROW.get(dtype)
    return dtype if narrow is None else np.dtype(narrow) if np.dtype(narrow).itemsize == 1 else np.dtype(np.uint8)


@functools.cache
def _torchs_name(dtype: np.dtype[Any]) -> str:
    """The name of the dtype in which torch stores it."""
    stored = _stored(dtype)
    return STORED[stored][1] if stored in STORED else stored.name


# -- arrays of a backend -----------------------------------------------------------------------------------------------


class DeviceArrays(ABC):
    """The array methods of :class:`gradc.runtime.backend.Backend` for GPU memory.

    :ivar numbers: where the numbers that calls are given lie.
    """

    align = 256
    numbers: Numbers

    def __init__(self) -> None:
        self._uploaded: Recent[Any, tuple[Memory, Array]] = Recent(256)
        self._upload_lock = lock()

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device, with or without a program's code."""

    @property
    @abstractmethod
    def support(self) -> Device:
        """The device with the functions of :func:`gradc.codegen.cuda.support.support_text`."""

    @property
    def number(self) -> int:
        return self.device.description.number

    def stream(self, given: Any, values: Iterable[Any]) -> int:
        """The caller's stream, else the current stream of the arrays' library."""
        self.device.check_current()
        if given is not None:
            return pointer_of(given)
        torch = _torch()
        if torch is not None:
            for value in values:
                if isinstance(value, torch.Tensor):
                    return self._torchs_stream()
        return self.device.current_stream()

    def read(self, x: Any, stream: int, name: str, constants: Collection[int] | None = None) -> tuple[Array, Kind]:
        """An argument as an array.

        :param name: its name in errors.
        :param constants: ids of host arrays that are uploaded once, as numbers are; None: neither is accepted.
        :raises DeviceError: it is in host memory, or on another device; named.  A tensor of torch's without an axis is
            a number there, as torch takes it beside tensors of any device.
        """
        if constants is not None and isinstance(x, bool | int | float | np.generic):
            array = np.asarray(x)
            if array.dtype.kind in "OU":
                raise InvalidProblem(f"{shown(x)} does not fit i64")
            return array, Kind.SCALAR if not isinstance(x, np.generic) else Kind.NUMPY
        found = describe(x)
        if found is None and constants is not None and id(x) in constants:
            return np.asarray(x), Kind.NUMPY
        if found is None and constants is not None and is_tensor(x) and x.device.type == "cpu" and not len(x.shape):
            check_unrecorded(x, name)
            return to_numpy(x)[0], Kind.TORCH
        if found is None:
            with foreign(x):
                found = self._through_protocol(x, stream, name)
        if found.nbytes and not (isinstance(x, DeviceArray) or found.native is None):
            number = found.number if found.number is not None else self.device.device_of(found.ctypes.data)
            if number != self.number:
                raise DeviceError(f"{name} lies on device {number}, and this module on device {self.number}")
        if is_tensor(x):
            check_unrecorded(x, name)
            return found, Kind.TORCH
        return found, Kind.NUMPY if isinstance(x, DeviceArray) else Kind.CUPY

    def _through_protocol(self, x: Any, stream: int, name: str) -> DeviceArray:
        type_name = f"{type(x).__module__}.{type(x).__qualname__}"
        dlpack_device = getattr(x, "__dlpack_device__", None)
        if dlpack_device is not None and not isinstance(x, type):
            kind, number = dlpack_device()
            if int(kind) in (_CUDA, _MANAGED):
                if number != self.number:
                    raise DeviceError(f"{name} lies on device {number}, and this module on device {self.number}")
                return from_dlpack(x, stream)
        elif hasattr(x, "__cuda_array_interface__"):
            return from_interface(x, self.device, stream)
        if dlpack_device is None and not hasattr(x, "__array__") and not hasattr(x, "__array_interface__"):
            raise InvalidProblem(
                f"{name} is a {type_name}: pass an array of CuPy, a torch CUDA tensor or anything with DLPack or the"
                " CUDA array interface"
            )
        raise DeviceError(
            f"{name} is a {type_name} in host memory, and this module runs on a GPU: cupy.asarray or tensor.cuda()"
            " moves it; target='cpu' takes it as it is"
        )

    def empty(self, shape: Sequence[int], dtype: Any, kind: Kind, stream: int) -> DeviceArray:
        """A new array for a result, in the caller's library; the stream is not being captured, or torch allocates."""
        wanted = np.dtype(dtype)
        native, address = self.new_native(shape, wanted, kind, stream)
        return remote(address, shape, wanted, owner=native, native=native)

    def new_native(self, shape: Sequence[int], dtype: np.dtype[Any], kind: Kind, stream: int) -> tuple[Any, int]:
        """(a new array of the library ``kind``, as :meth:`empty` has them; its address)."""
        if kind is Kind.TORCH:
            tensor = self._new_tensor(shape, dtype, stream)
            return tensor, tensor.data_ptr()
        native = self.device.new_array(tuple(shape), _stored(dtype), stream)
        return native, native.data.ptr

    def _new_tensor(self, shape: Sequence[int], wanted: np.dtype[Any], stream: int) -> Any:
        torch, name, device = _torch(), _torchs_name(wanted), f"cuda:{self.number}"

        def allocated() -> Any:
            # torch's allocator takes the relaxed mode itself only on a stream that is being captured
            if self._torchs_stream() == stream:
                return relaxed(torch.empty, tuple(shape), dtype=getattr(torch, name), device=device)
            # so that the allocator does not reuse the memory while this stream uses it
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                return relaxed(torch.empty, tuple(shape), dtype=getattr(torch, name), device=device)

        try:
            try:
                return allocated()
            except torch.OutOfMemoryError:  # torch has emptied its own cache
                if self.device.capturing(stream):
                    raise
                self.device.trim()
                return allocated()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{wanted}{list(shape)} on {device}: {error}") from error

    def _torchs_stream(self) -> int:
        """torch's current stream on this device."""
        return current_stream(self.number)

    def allocates_captured(self, stream: int, kind: Kind | None) -> bool:
        """torch's allocator does in a capture that torch began, which is of its current stream: the graph has a pool of
        its own, which lives as long as it does.
        """
        return kind is Kind.TORCH and self._torchs_stream() == stream

    def _check_allocation(self, stream: int, kind: Kind | None = None) -> None:
        if self.device.capturing(stream) and not self.allocates_captured(stream, kind):
            raise CaptureError(NO_ALLOCATION)

    def scratch(self, shape: Sequence[int], dtype: Any, stream: int, kind: Kind | None = None) -> DeviceArray:
        """An uninitialised array from the allocator of torch if the call's arrays are torch's, else from CuPy's."""
        self._check_allocation(stream, kind)
        wanted = np.dtype(dtype)
        if kind is Kind.TORCH:
            return self.empty(shape, wanted, kind, stream)
        memory = self.device.memory(max(int(np.prod(shape, dtype=np.int64)) * wanted.itemsize, 1), stream)
        return remote(memory.address, shape, wanted, owner=memory)

    def capturing(self, stream: int) -> bool:
        return self.device.capturing(stream)

    def place_inputs(self, call: BoundCall) -> None:
        host = [name for name, array in call.arrays.items() if not isinstance(array, DeviceArray)]
        if not host:
            return
        small = [name for name in host if not call.arrays[name].ndim and call.arrays[name].itemsize <= 8]
        for name in host:
            if name not in small:
                call.arrays[name] = self.to_device(call.arrays[name], call.stream)
        if small:
            call.numbers = {name: bits_of(call.arrays[name]) for name in small}
            own = (
                self.scratch((8 * len(small),), np.uint8, call.stream, call.kind)
                if call.captured and call.allocates
                else None
            )
            places, cells = self.numbers.places(small, call.stream, call.captured, own)
            for name, address in places.items():
                call.arrays[name] = remote(address, (), call.arrays[name].dtype, owner=cells, readonly=True)

    def write_numbers(self, call: BoundCall) -> None:
        """Submits what writes a call's numbers where the call reads them."""
        if call.numbers:
            arrays = [call.arrays[name] for name in call.numbers]
            places = dict(zip(call.numbers, map(address_of, arrays), strict=True))
            self.numbers.write(call.numbers, places, arrays[0].owner, call.stream)  # type: ignore[attr-defined]

    def keep_numbers(self, call: BoundCall) -> None:
        """Moves the numbers of a call to memory of their own, which later calls do not write, for replays of it."""
        if not call.numbers:
            return
        with self.numbers.lock:
            self.write_numbers(call)
            for name in call.numbers:
                call.arrays[name] = self.contiguous(call.arrays[name], call.stream)
        call.numbers = {}

    def to_device(self, array: Array, stream: int) -> Array:
        """A copy of a host array (a default) on the device; uploaded once."""
        if isinstance(array, DeviceArray):
            return array
        key = (array.dtype, array.shape, array.tobytes()) if array.nbytes <= _KEPT_BYTES else id(array)
        with self._upload_lock:
            found = self._uploaded.get(key)
            if found is None:
                self._check_allocation(stream)
                memory = self.device.memory(max(array.nbytes, 1), stream)
                self.device.upload(memory.address, array, stream)
                self.device.synchronize(stream)  # other streams may read it next
                found = self._uploaded[key] = (memory, array)
            memory, _ = found
        return remote(memory.address, array.shape, array.dtype, owner=memory, readonly=True)

    def contiguous(self, array: Array, stream: int) -> DeviceArray:
        """A copy in row-major order, aligned."""
        native = getattr(array, "native", None)
        kind = Kind.TORCH if native is not None and is_tensor(native) else Kind.CUPY
        out = self.scratch(array.shape, array.dtype, stream, kind)
        if array.flags.c_contiguous:
            self.device.copy(address_of(out), address_of(array), array.nbytes, stream)
            return out
        unit = array.itemsize
        while array.ctypes.data % unit or any(s % unit for s in array.strides):
            unit //= 2
        shape, strides = merged_axes((*array.shape, array.itemsize // unit), (*array.strides, unit))
        if len(shape) > AXES:
            raise Unsupported(f"packing an array with {len(shape)} axes that step differently; at most {AXES}")
        low, high = byte_bounds(array)
        dtype, pad = np.dtype(f"u{unit}"), AXES - len(shape)
        shape, steps = [1] * pad + shape, [0] * pad + [s // unit for s in strides]
        count = out.nbytes // unit
        args = [
            Span(low, (high - low) // unit, dtype),
            Span(out.ctypes.data, count, dtype),
            count,
            (array.ctypes.data - low) // unit,
            *shape[1:],
            *steps,
        ]
        self.support.launch(f"gradc_pack_{unit}", blocks(count), THREADS, args, (1,), stream)
        return out

    def zeros(self, shape: Sequence[int], dtype: Any, stream: int, kind: Kind | None = None) -> DeviceArray:
        """An array of zeros from the allocator of :meth:`scratch`."""
        out = self.scratch(shape, dtype, stream, kind)
        if out.nbytes:
            self.device.fill(out.ctypes.data, 0, out.nbytes, stream)
        return out

    def kind(self, kinds: Sequence[Kind]) -> Kind:
        """The library of the results: torch if any argument is a tensor, else CuPy."""
        return Kind.TORCH if any([kind is Kind.TORCH for kind in kinds]) else Kind.CUPY

    def result(self, array: Array, kind: Kind) -> Any:
        """A result as an object of the caller's library."""
        assert isinstance(array, DeviceArray)
        return array.native

    def donates(self, array: Array, kind: Kind) -> bool:
        """Whether an input's memory may be returned as a result in the library ``kind``."""
        return isinstance(array, DeviceArray) and (
            is_tensor(array.native) if kind is Kind.TORCH else is_cupys(type(array.native))
        )

    def left(self) -> Limit:
        """Bytes that can still be allocated."""
        free = self.device.free()
        return Limit(free, free, "memory of the device")


def add(support: Device, to: Array, more: Array, flag: Span, checks: int, stream: int) -> None:
    """``to += more`` on the device, unless one of the call's checks has failed."""
    if to.size:
        name = dtype_of(to.dtype).name
        args = [
            Span(to.ctypes.data, to.size, to.dtype),
            Span(more.ctypes.data, more.size, more.dtype),
            to.size,
            flag,
            checks,
        ]
        support.launch(f"gradc_add_{name}", blocks(to.size), THREADS, args, (0,), stream)


def check_addable(array: Array, name: str) -> None:
    """Unsupported if :func:`add` has no function for the dtype."""
    if dtype_of(array.dtype).name not in ADDED:
        raise Unsupported(
            f"accumulate into {name}: nothing adds {dtype_of(array.dtype).name} on a GPU; there are {', '.join(ADDED)}"
        )
