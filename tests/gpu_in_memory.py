"""A GPU that is not there: the simulator behind addresses that nobody can follow, streams that do their work late, and
arrays of two libraries.

What a host must not do ends the process or shows wrong numbers: reading a device's address, reading results before
waiting, using memory that was given back (it is overwritten in stream order), allocating while a stream is captured.
"""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from gradc.errors import CaptureError, DeviceError, OutOfMemory
from gradc.runtime.cuda import gpu
from gradc.runtime.cuda.device import Description, Span
from gradc.runtime.simulator.device import HostMemory, SimulatedEvent, Simulator, Work

OFFSET = 1 << 60
Array = np.ndarray[Any, Any]


class Memory(HostMemory):
    """Given back in stream order, and overwritten then."""

    def __init__(self, array: Array, stream: int):
        super().__init__(array, array.ctypes.data + OFFSET)
        self.stream = stream

    def __del__(self) -> None:
        array = self.array

        def given_back() -> None:
            array[:] = 0xCD

        InMemory.queues[self.stream].append(given_back)


class Event(SimulatedEvent):
    def wait(self) -> None:
        if not self.come:
            InMemory.drain()
        assert self.come


class InMemory(Simulator):
    """The device."""

    offset = OFFSET
    description = Description(0, "in memory", "sm_90", 132, 50 << 20, 227 << 10, 80 << 30, 3 << 40, (12, 8))
    queues: ClassVar[dict[int, deque[Work]]] = defaultdict(deque)
    current: ClassVar[int] = 0
    device_number: ClassVar[int] = 0
    allocated: ClassVar[int] = 0
    waits: ClassVar[int] = 0
    launched: ClassVar[list[tuple[str, int]]] = []
    fails: ClassVar[str] = ""
    room: ClassVar[int] = 1 << 40

    def __init__(self, text: str = "", *, cubin: bytes = b"", wide: bytes = b"", arch: str = "", sync: bool = False):
        super().__init__(text, check=True)
        self.arch, self.sync, self.cubin = arch, sync, cubin

    @classmethod
    def drain(cls, stream: int | None = None) -> None:
        for number in [stream] if stream is not None else list(cls.queues):
            while cls.queues[number]:
                cls.queues[number].popleft()()

    def do(self, stream: int, work: Work) -> None:
        self.queues[stream].append(work)

    def check_current(self) -> None:
        if self.device_number:
            raise DeviceError(f"this module is loaded on device 0, and the current one is device {self.device_number}")

    def launch(
        self,
        function: str,
        blocks: int,
        threads: int,
        args: Any,
        written: Any,
        stream: int | None = None,
        shared: int = 0,
        wide: bool = False,
        batch: int = 0,
    ) -> None:
        assert stream is not None
        InMemory.launched.append((function, stream))
        if self.fails and self.fails in function:
            raise DeviceError(
                f"{function} ({blocks} blocks of {threads} threads): an illegal memory access was encountered"
            )
        assert all(type(a.address if isinstance(a, Span) else a) is int for a in (*args, stream, blocks, threads)), (
            "ctypes takes nothing else"
        )
        self.load(wide)
        codes = "".join(code for code, _ in self.libraries[wide].signature(function))
        assert ("s" in codes) == bool(batch) and codes.find("s") <= 0, "a batch is the first parameter"
        sizes = [size for code, size in self.libraries[wide].signature(function) if code != "s"]
        assert sizes == [8] * (len(args) - batch), "cuLaunchKernel gets 8 bytes for each other parameter"
        super().launch(function, blocks, threads, args, written, stream, shared, wide, batch)

    def memory(self, nbytes: int, stream: int | None = None) -> Memory:
        if stream in self.captures:
            raise CaptureError("an allocation on a stream that is being captured")
        if nbytes > self.room:
            raise OutOfMemory(f"{nbytes} bytes")
        InMemory.allocated += 1
        array = np.full(nbytes + 255, 0xCD, np.uint8)
        return Memory(array[-array.ctypes.data % 256 :][:nbytes], stream or 0)

    def free(self) -> int:
        return self.room

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> ndarray:
        return ndarray(shape, dtype, self.memory(int(np.prod(shape)) * dtype.itemsize, stream))

    def current_stream(self) -> int:
        return self.current

    def follow(self, stream: int, other: int) -> None:
        if stream in self.captures and other not in self.captures:
            raise CaptureError("a stream that is being captured would wait for one that is not")
        self.ask(stream, lambda: self.drain(other if other != 1 else 0))

    def synchronize(self, stream: int | None = None) -> None:
        if stream in self.captures:
            raise CaptureError("waiting for a stream that is being captured")
        InMemory.waits += 1
        self.drain(stream)

    def event(self, timed: bool = True) -> Event:
        return Event(self)


# -- arrays ------------------------------------------------------------------------------------------------------------


class Device:
    id = 0


class ndarray:
    """As CuPy's, as far as gradc looks."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Memory | None = None, view: Array | None = None):
        self.dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        self.memory = memory or InMemory().memory(count * self.dtype.itemsize, 0)
        self.host = (
            view
            if view is not None
            else self.memory.array[: count * self.dtype.itemsize].view(self.dtype).reshape(shape)
        )
        self.shape, self.strides, self.device = self.host.shape, self.host.strides, Device()

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data + OFFSET)

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def get(self) -> Array:
        InMemory.drain()
        return self.host.copy()

    def __getitem__(self, key: Any) -> ndarray:
        return self.seen(self.host[key])

    def __setitem__(self, key: Any, value: ndarray) -> None:
        InMemory.drain()
        self.host[key] = value.host

    def transpose(self, order: Any) -> ndarray:
        return self.seen(self.host.transpose(order))

    def seen(self, view: Array) -> ndarray:
        return ndarray(view.shape, view.dtype, self.memory, view)

    def __add__(self, other: ndarray) -> ndarray:
        return to_cupy(self.get() + other.get())

    def __int__(self) -> int:
        return int(self.get())


ndarray.__module__ = "cupy"


def to_cupy(array: Any) -> ndarray:
    given = np.asarray(array)
    out = ndarray(given.shape, given.dtype)
    out.host[...] = given
    return out


class Interface:
    """Nothing but the CUDA array interface."""

    def __init__(self, array: Array, stream: int | None = None):
        self.array = to_cupy(array)
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.array.data.ptr, False),
            "strides": None,
            "version": 3,
            "stream": stream,
        }


class Exchanged:
    """Nothing but DLPack."""

    asked: int | None = None

    def __init__(self, array: Array, device: int = 0):
        self.array, self.device = to_cupy(array), device

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, stream: int | None = None) -> Any:
        from gradc.runtime.cuda.on_device import _DLTensor

        self.asked = stream
        host = self.array.host
        code = {"f": 2, "i": 0, "u": 1, "b": 6}.get(host.dtype.kind, 4)
        self.shape = (ctypes.c_int64 * host.ndim)(*host.shape)
        self.strides = (ctypes.c_int64 * host.ndim)(*(s // host.itemsize for s in host.strides))
        self.tensor = _DLTensor(
            self.array.data.ptr - 64,
            2,
            self.device,
            host.ndim,
            code,
            8 * host.itemsize,
            1,
            self.shape,
            self.strides,
            64,
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class DType:
    def __init__(self, name: str, dtype: Any):
        self.name, self.np = name, np.dtype(dtype)

    def __str__(self) -> str:
        return f"torch.{self.name}"


class TorchDevice(NamedTuple):
    type: str
    index: int


class Tensor:
    """As torch's on CUDA, as far as gradc looks."""

    layout, is_quantized, requires_grad = "strided", False, False

    def __init__(self, array: ndarray, device: str = "cuda"):
        self.array, self.shape, self._version = array, array.shape, 0
        self.device = TorchDevice(device, 0)
        self.dtype = next(d for d in DTYPES if d.np == array.dtype)

    def is_conj(self) -> bool:
        return False

    is_neg = is_inference = is_conj

    def data_ptr(self) -> int:
        return self.array.data.ptr

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.dtype.itemsize for s in self.array.strides)

    def is_contiguous(self) -> bool:
        return bool(self.array.host.flags.c_contiguous)

    def permute(self, *order: int) -> Tensor:
        return Tensor(self.array.transpose(order))

    def numpy(self) -> Array:
        return self.array.get()

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(self.array + other.array)


DTYPES = [
    *(
        DType(name, name)
        for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
    ),
    *(DType(name, getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
]


def to_torch(array: Any) -> Tensor:
    return Tensor(to_cupy(array))


class ExternalStream:
    def __init__(self, pointer: int):
        self.cuda_stream = pointer


class InGraph(HostMemory):
    """Memory of a graph's own pool: given back during the capture, it is there for what the capture allocates next;
    it is gone with the graph.
    """

    def __init__(self, array: Array, graph: CUDAGraph):
        super().__init__(array, array.ctypes.data + OFFSET)
        self.graph = graph

    def __del__(self) -> None:
        self.graph.free.append(self.array)


class CUDAGraph:
    """torch's: what was captured, and the pool that the captured work uses."""

    def __init__(self) -> None:
        self.stream = next(Simulator._streams)
        self.work: list[Work] = []
        self.free: list[Array] = []
        self.kept: list[Array] = []

    def memory(self, nbytes: int) -> InGraph:
        fitting = [i for i, array in enumerate(self.free) if array.nbytes == nbytes]
        if fitting:
            return InGraph(self.free.pop(fitting[-1]), self)
        array = np.full(nbytes + 255, 0xCD, np.uint8)
        array = array[-array.ctypes.data % 256 :][:nbytes]
        self.kept.append(array)
        return InGraph(array, self)

    def replay(self) -> None:
        for work in self.work:
            InMemory().ask(sys.modules["torch"].streams[-1], work)


def torch_module() -> ModuleType:
    torch: Any = ModuleType("torch")
    torch.Tensor, torch.strided = Tensor, "strided"
    for dtype in DTYPES:
        setattr(torch, dtype.name, dtype)
    torch.streams, torch.capturing = [0], {}

    @contextmanager
    def along(stream: ExternalStream) -> Iterator[None]:
        torch.streams.append(stream.cuda_stream)
        try:
            yield
        finally:
            torch.streams.pop()

    def empty(shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        assert device == "cuda:0"
        stream, nbytes = torch.streams[-1], int(np.prod(shape)) * dtype.np.itemsize
        graph = torch.capturing.get(stream)
        return Tensor(
            ndarray(shape, dtype.np, graph.memory(nbytes) if graph is not None else InMemory().memory(nbytes, stream))
        )

    @contextmanager
    def graph(captured: CUDAGraph) -> Iterator[None]:
        InMemory.drain()
        with along(ExternalStream(captured.stream)):
            torch.capturing[captured.stream], InMemory.captures[captured.stream] = captured, []
            try:
                yield
            finally:
                del torch.capturing[captured.stream]
                captured.work = InMemory.captures.pop(captured.stream)

    def increment_version(x: Tensor | Sequence[Tensor]) -> None:
        for each in [x] if isinstance(x, Tensor) else x:
            each._version += 1

    torch.empty, torch.OutOfMemoryError = empty, MemoryError
    torch.autograd = SimpleNamespace(
        graph=SimpleNamespace(increment_version=increment_version), forward_ad=SimpleNamespace(_current_level=-1)
    )
    torch.jit = SimpleNamespace(is_tracing=lambda: False)
    torch.is_grad_enabled = lambda: True
    torch.cuda = SimpleNamespace(
        current_stream=lambda device=0: ExternalStream(torch.streams[-1]),
        Stream=lambda: ExternalStream(next(Simulator._streams)),
        stream=along,
        ExternalStream=ExternalStream,
        CUDAGraph=CUDAGraph,
        graph=graph,
        synchronize=InMemory.drain,
        is_initialized=lambda: True,
        memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
    )
    return torch


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[InMemory]]:
    """A GPU, its CuPy and its torch, for one test."""
    monkeypatch.setattr(gpu, "Gpu", InMemory)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(gpu, "current_device", lambda: InMemory.description)
    monkeypatch.setitem(sys.modules, "torch", torch_module())
    for name, value in {
        "current": 0,
        "device_number": 0,
        "allocated": 0,
        "waits": 0,
        "launched": [],
        "fails": "",
        "room": 1 << 40,
    }.items():
        monkeypatch.setattr(InMemory, name, value)
    yield InMemory
    InMemory.drain()
    InMemory.queues.clear()
    Simulator.captures.clear()


def span_of(array: ndarray) -> Span:
    return Span(array.data.ptr, array.host.size, array.dtype)
