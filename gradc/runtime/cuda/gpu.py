"""A GPU, accessed through CuPy by addresses; the only module that imports cupy, and only when a device is needed.

>>> from gradc.runtime.cuda import gpu
>>> gpu.count() and gpu.current_device().arch           # 0 without a driver: cupy is not imported then
>>> device = gpu.Gpu(text)                              # CUDA text, compiled for the current device at its first launch
>>> memory = device.memory(4096)
>>> begin, end = device.event(), device.event()
>>> begin.record(); device.launch("name", blocks, threads, [Span(memory.address, 1024, np.dtype("f4")), 1024],
written=[0]); end.record()
>>> end.wait(); end.since(begin)                        # seconds
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...codegen.text import widened
from ...errors import CaptureError, DeviceError, DriverTooOld, NoDevice, OutOfMemory, Unsupported
from ...ir.epilogue import PLAIN, Epilogue
from ...process.forks import held_off, lock
from .capture_mode import driver_library, relaxed
from .device import Description, Span

if TYPE_CHECKING:
    from ...codegen.cuda.launch import LaunchPlan
    from .steps import PackedPlan

Array = np.ndarray[Any, Any]
_FUNCTION = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+'
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
_NO_MEMORY, _NOT_READY = 2, 600
_FAULTS = frozenset((700, 702, 710, *range(714, 720)))
"""Errors of kernels, reported by a later call: illegal addresses and instructions, timeouts, failed assertions."""


# -- is there one? -----------------------------------------------------------------------------------------------------


@functools.cache
def count() -> int:
    """The number of devices; 0 without a driver."""
    try:
        library, number = driver_library(), ctypes.c_int()
        return 0 if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(number)) else number.value
    except (OSError, AttributeError):
        return 0


def usable() -> bool:
    """Whether there are a device and CuPy; imports nothing."""
    return count() > 0 and importlib.util.find_spec("cupy") is not None


@functools.cache
def _cupy() -> Any:
    """CuPy, imported if there is a device."""
    if not count():
        raise NoDevice(
            "no GPU: the loader knows no libcuda.so.1, or the driver has no device; target='cuda-sim' runs the same"
            " kernels on the CPU"
        )
    try:
        with held_off:
            import cupy
    except ImportError as error:
        raise NoDevice(
            f"a GPU is reached through CuPy, which does not import: {error}; `pip install gradc[cuda12]` or"
            " `gradc[cuda13]` brings it"
        ) from error
    return cupy


def failure(error: Exception, activity: str, at_fault: bool = False) -> DeviceError | OutOfMemory:
    """The error of gradc for a failed CUDA call.

    :param at_fault: whether ``activity`` is what failed; otherwise work submitted before may have.
    """
    status, text = getattr(error, "status", None), f"{activity}: {error}"
    if status in _FAULTS and not at_fault:
        text += (
            "; a kernel that was submitted before has failed, and CUDA does not say which. This process cannot use the"
            " device any more: run it again with GRADC_SYNC=1, which waits for each launch and names the one that fails"
        )
    if isinstance(error, MemoryError) or status == _NO_MEMORY:
        return OutOfMemory(text)
    if status == 35:  # cudaErrorInsufficientDriver
        return DriverTooOld(
            f"{text}; this CuPy is of CUDA {_cupy().cuda.runtime.runtimeGetVersion()}, a CuPy of the driver's own CUDA"
            " goes with it"
        )
    if status == 100:
        return NoDevice(text)
    if status is not None and 900 <= status <= 908:
        return CaptureError(text)
    return DeviceError(text)


@contextlib.contextmanager
def _named(activity: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceError | OutOfMemory):
            raise
        raise failure(error, activity) from error


def _asked(activity: str, function: Any, *args: Any) -> Any:
    """As :func:`_named`, for a single function; faster."""
    try:
        return function(*args)
    except (RuntimeError, MemoryError) as error:
        raise failure(error, activity) from error


def current_device() -> Description:
    """The current device of this thread.

    :raises NoDevice: there is no driver, no device, or no CuPy; the message says which.
    :raises DriverTooOld: the driver is too old for this CuPy.
    """
    cupy = _cupy()
    with _named("asking for the current device"):
        return _description(cupy.cuda.runtime.getDevice())


@functools.cache
def _description(number: int) -> Description:
    runtime = _cupy().cuda.runtime
    about, driver = runtime.getDeviceProperties(number), runtime.driverGetVersion()
    bandwidth = 2 * about.get("memoryClockRate", 0) * 1000 * about.get("memoryBusWidth", 0) // 8
    return Description(
        number,
        about["name"].decode(),
        f"sm_{about['major']}{about['minor']}",
        about["multiProcessorCount"],
        about["l2CacheSize"],
        about["sharedMemPerBlockOptin"],
        about["totalGlobalMem"],
        bandwidth,
        (driver // 1000, driver % 1000 // 10),
    )


def fits(arch: str, device: Description) -> bool:
    """Whether a device can run a binary for ``arch``: its own architecture, or an earlier one of its generation."""
    number, variant = int(re.sub(r"\D", "", arch)), arch[-1] if arch[-1] in "af" else ""
    own = int(device.arch[3:])
    return number == own if variant == "a" else number // 10 == own // 10 and number <= own


def initialised_torch() -> Any:
    """torch, if it uses a GPU in this process; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


# -- memory and launches -----------------------------------------------------------------------------------------------


class _Memory:
    """Memory from CuPy's pool."""

    def __init__(self, pointer: Any, nbytes: int):
        self.pointer, self.nbytes, self.address = pointer, nbytes, int(pointer.ptr)


class _Event:
    def __init__(self, event: Any, device: Gpu):
        self.event, self.runtime, self.device = event, device.runtime, device

    def record(self, stream: int | None = None) -> None:
        _asked("recording an event", self.runtime.eventRecord, self.event.ptr, self.device.at(stream))

    def done(self) -> bool:
        status = relaxed(self.runtime.eventQuery, self.event.ptr)
        if status not in (0, _NOT_READY):
            raise failure(self.runtime.CUDARuntimeError(status), "what was asked of the device before")
        return bool(status == 0)

    def wait(self) -> None:
        with _named("what was asked of the device before"):
            relaxed(self.runtime.eventSynchronize, self.event.ptr)

    def since(self, start: Any) -> float:
        return float(self.runtime.eventElapsedTime(start.event.ptr, self.event.ptr)) / 1000


class _Graph:
    def __init__(self, executable: int, device: Gpu):
        self.executable, self.runtime, self.device = executable, device.runtime, device

    def replay(self, stream: int | None = None) -> None:
        with _named("starting a captured graph"):
            self.runtime.graphLaunch(self.executable, self.device.at(stream))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit the driver may be shut down already
            relaxed(self.runtime.graphExecDestroy, self.executable)


class Gpu:
    """The current device with CUDA code; implements :class:`gradc.runtime.cuda.device.Device`, which documents the
    methods.

    :param text: CUDA source with ``extern "C" __global__`` functions whose parameters are pointers and 64-bit integers.
    :param cubin: the compiled source, or b"" to compile it for the device's architecture (or take it from the cache) at
        the first launch.
    :param wide: the same with 64-bit offsets, for the first launch that needs them.
    :param arch: the architecture of the cubin.
    :param sync: wait after each launch, so that errors name the function that caused them.
    """

    check = False

    def __init__(self, text: str = "", *, cubin: bytes = b"", wide: bytes = b"", arch: str = "", sync: bool = False):
        self.text, self.cubin, self.wide, self.arch, self.sync = text, cubin, wide, arch, sync
        self.description = current_device()
        self.cupy = _cupy()
        self.runtime, self.driver = self.cupy.cuda.runtime, self.cupy.cuda.driver
        self._functions: dict[bool, dict[str, int]] = {}  # whether offsets have 64 bits -> functions
        self._shared: dict[int, int] = {}  # function -> bytes of dynamic shared memory that it may have
        self._streams: list[Any] = []
        self._lock = lock()
        self._thread = threading.local()

    def check_current(self) -> None:
        """DeviceError if another device is current in this thread; makes the driver's context current in it."""
        number = self.runtime.getDevice()
        if number != self.description.number:
            raise DeviceError(
                f"this module is loaded on device {self.description.number}, and the current one is device {number}"
            )
        if not getattr(self._thread, "ready", False):
            with _named(f"using device {number} ({self.description.name})"):
                # from CUDA 12 on this initialises the context; cudaFree(0), which did so before, ends a capture
                self.runtime.setDevice(number)
            self._thread.ready = True

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        before, own = self.runtime.getDevice(), self.description.number
        if before == own:
            yield
            return
        self.runtime.setDevice(own)
        try:
            yield
        finally:
            self.runtime.setDevice(before)

    def device_of(self, address: int) -> int:
        with _named(f"asking whose address {address:#x} is"):
            return int(self.runtime.pointerGetAttributes(address).device)

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        memory = self.memory(math.prod(shape) * dtype.itemsize, stream)
        try:
            return self.cupy.ndarray(shape, dtype, memory.pointer)
        except (TypeError, ValueError) as error:
            raise Unsupported(
                f"CuPy {self.cupy.__version__} has no arrays of {dtype}: {error}; torch tensors, or CuPy 14, have them"
            ) from error

    def load(self, wide: bool = False) -> None:
        self.check_current()
        with self._lock:
            if wide in self._functions or not self.text:
                return
            here, arch = self.description, self.arch or self.description.arch
            if not fits(arch, here):
                raise DeviceError(
                    f"this was compiled for {arch}, and device {here.number} ({here.name}) is {here.arch}; compile(...,"
                    f" arch={here.arch!r}) is for it"
                )
            text, cubin, maker = widened(self.text) if wide else self.text, self.wide if wide else self.cubin, ""
            if not cubin:
                with held_off:
                    from .nvrtc import compile_cuda, find_nvrtc

                version = find_nvrtc(arch).version
                maker = f" by NVRTC {version[0]}.{version[1]}"
                if version[0] > here.driver[0]:
                    raise DriverTooOld(
                        f"the driver of {here.name} is of CUDA {here.driver[0]}.{here.driver[1]}, and what NVRTC"
                        f" {version[0]}.{version[1]} makes needs one of {version[0]}.0"
                    )
                cubin = compile_cuda(text, arch=arch, emit=("cubin",)).cubin
            try:
                module = self.with_room(self.driver.moduleLoadData, cubin)
            except (RuntimeError, MemoryError) as error:
                subject = (
                    f"a binary for {arch}{maker} on {here.name} ({here.arch}, driver of CUDA"
                    f" {here.driver[0]}.{here.driver[1]})"
                )
                raise (
                    DriverTooOld(f"{subject}: {error}")
                    if getattr(error, "status", 0) in (200, 209, 222)
                    else failure(error, subject)
                ) from error
            functions = {}
            for name in _FUNCTION.findall(self.text):
                with _named(f"the function {name}"):
                    # its code is loaded only now, unless CUDA_MODULE_LOADING=EAGER
                    functions[name] = relaxed(self.driver.moduleGetFunction, module, name)
            self._functions[wide] = functions

    def launch(
        self,
        function: str,
        blocks: int,
        threads: int,
        args: Sequence[Any],
        written: Collection[int],
        stream: int | None = None,
        shared: int = 0,
        wide: bool = False,
        batch: int = 0,
    ) -> None:
        stream = self.at(stream)
        if wide not in self._functions and self.capturing(stream):
            raise CaptureError(f"the first launch of {function} loads it, which a capture cannot: run it once before")
        handle = self.handle(function, wide, shared)
        values = (ctypes.c_int64 * max(len(args), 1))(*(a.address if isinstance(a, Span) else a for a in args))
        first = ctypes.addressof(values)
        others = range(first + 8 * batch, first + 8 * len(args), 8)
        places = (ctypes.c_void_p * max(len(args), 1))(*([first] if batch else []), *others)
        try:
            self.driver.launchKernel(handle, blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(places), 0)
            if self.sync and not self.capturing(stream):
                relaxed(self.runtime.streamSynchronize, stream)
        except RuntimeError as error:
            raise self.failed(error, function, blocks, threads) from error

    def handle(self, function: str, wide: bool, shared: int) -> int:
        """A function that may be launched with so many bytes of dynamic shared memory; loads it first."""
        if wide not in self._functions:
            self.load(wide)
        functions = self._functions.get(wide, {})
        handle = functions.get(function)
        if handle is None:
            raise DeviceError(f"no function {function!r}; there are {', '.join(functions)}")
        if shared > self._shared.get(handle, 0):
            # static shared memory, not known here, counts against the default limit, too
            attribute = self.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _asked(
                f"{shared} bytes of shared memory for {function}",
                relaxed,
                self.driver.funcSetAttribute,
                handle,
                attribute,
                shared,
            )
            self._shared[handle] = shared
        return handle

    def failed(self, error: Exception, function: str, blocks: int, threads: int) -> DeviceError | OutOfMemory:
        """The error of gradc for a failed launch."""
        return failure(error, f"{function} ({blocks} blocks of {threads} threads)", at_fault=self.sync)

    def prepare(self, plan: LaunchPlan) -> PackedPlan:
        with held_off:
            from .steps import PackedPlan  # with it come the writers of CUDA, which a process without a GPU never needs
        return PackedPlan(self, plan)

    # -- memory --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def along(self, stream: int) -> Iterator[None]:
        """A context manager that makes ``stream`` CuPy's current stream."""
        kind = self.cupy.cuda.Stream
        if stream == 0:
            other = kind.null
        elif hasattr(kind, "from_external"):
            other = kind.from_external(_External(stream))
        else:  # CuPy 13
            other = self.cupy.cuda.ExternalStream(stream)
        with other:
            yield

    def memory(self, nbytes: int, stream: int | None = None) -> _Memory:
        self.check_current()
        if stream is not None and stream != self.current_stream():
            with self.along(stream):
                return self.memory(nbytes)
        pointer = _asked(f"{nbytes} bytes on {self.description.name}", self.with_room, self.cupy.cuda.alloc, nbytes)
        return _Memory(pointer, nbytes)

    def mapped(self, nbytes: int) -> tuple[Array, int]:
        runtime = self.runtime
        with _named(f"{nbytes} bytes of host memory that the device can write"):
            kind = runtime.hostAllocMapped | runtime.hostAllocPortable
            address = self.with_room(runtime.hostAlloc, nbytes, kind)
            at = int(runtime.pointerGetAttributes(address).devicePointer)
        return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address)), at

    def free(self) -> int:
        torch = initialised_torch()
        kept = self.cupy.get_default_memory_pool().free_bytes()
        if torch is not None:
            kept += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(relaxed(self.runtime.memGetInfo)[0] + kept)

    def trim(self) -> None:
        relaxed(self.cupy.get_default_memory_pool().free_all_blocks)

    def made_room(self, error: Exception, stream: int | None = None) -> bool:
        """Whether an error says that memory was short and what CuPy's and torch's allocators keep without using it has
        been given back: what failed may be tried again, once.  In a capture, which forbids that, it has not.
        """
        short = isinstance(error, MemoryError) or getattr(error, "status", None) == _NO_MEMORY
        if not short or self.capturing(self.at(stream)):
            return False
        self.trim()
        if torch := initialised_torch():
            relaxed(torch.cuda.empty_cache)
        return True

    def with_room(self, function: Callable[..., Any], *args: Any) -> Any:
        """The value of a function that allocates and has done nothing if it fails; other threads' captures go on."""
        try:
            return relaxed(function, *args)
        except (RuntimeError, MemoryError) as error:
            if not self.made_room(error):
                raise
        return relaxed(function, *args)

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        _asked("a copy", self.runtime.memcpyAsync, to, source, nbytes, self.runtime.memcpyDefault, self.at(stream))

    def fill(self, at: int, value: int, nbytes: int, stream: int | None = None) -> None:
        _asked("a fill", self.runtime.memsetAsync, at, value, nbytes, self.at(stream))

    def upload(self, to: int, array: Array, stream: int | None = None) -> None:
        self.copy(
            to, np.ascontiguousarray(array).ctypes.data, array.nbytes, stream
        )  # from pageable memory, which is staged before the call returns

    def read(self, span: Span, stream: int | None = None) -> Array:
        out = np.empty(span.count, span.dtype)
        self.synchronize(self.at(stream))
        with _named(f"a copy of {span.nbytes} bytes to the host"):
            relaxed(self.runtime.memcpy, out.ctypes.data, span.address, span.nbytes, self.runtime.memcpyDeviceToHost)
        return out

    def product(
        self,
        library: Any,
        a: int,
        b: int,
        out: int,
        workspace: Span,
        pointers: int = 0,
        epilogue: Epilogue[Span] = PLAIN,
    ) -> Callable[[int], None]:
        with held_off:
            from . import cublas

        number, more = self.description.number, (self._copy_rows, self.capturing)
        return self.with_room(cublas.prepared, number, library, a, b, out, workspace, pointers, epilogue, *more)

    def convolution(self, asked: Any, first: int, second: int, out: int, workspace: Span) -> Callable[[int], None]:
        with held_off:
            from . import cudnn

        given, arrays = (first, second, out), (*asked.operands, asked.out)
        prepared = functools.partial(self.with_room, cudnn.prepared, self.description.number, asked)
        if not any(at % cudnn.ALIGNMENT for at in given):
            return prepared(*given, workspace, self.capturing)

        def submit(stream: int) -> None:  # a caller's arrays may begin anywhere
            if self.capturing(stream):
                raise CaptureError(
                    f"an array of a convolution begins between multiples of {cudnn.ALIGNMENT} bytes: a replay would"
                    " copy it to memory that is given back by then"
                )
            each = -(-max(x.nbytes for x in arrays) // cudnn.ALIGNMENT) * cudnn.ALIGNMENT
            memory = self.memory(3 * each, stream)
            a, b, c = (memory.address + i * each for i in range(3))
            self.copy(a, first, arrays[0].nbytes, stream)
            self.copy(b, second, arrays[1].nbytes, stream)
            prepared(a, b, c, workspace, self.capturing)(stream)
            self.copy(out, c, arrays[2].nbytes, stream)

        return submit

    def _copy_rows(self, to: int, source: int, pitch: int, width: int, rows: int, stream: int) -> None:
        copy, kind = self.runtime.memcpy2DAsync, self.runtime.memcpyDefault
        _asked("a copy", copy, to, pitch, source, pitch, width, rows, kind, stream)

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self) -> int:
        self.check_current()
        with _named("a new stream"):
            self._streams.append(relaxed(self.cupy.cuda.Stream, non_blocking=True))
        return int(self._streams[-1].ptr)

    def at(self, stream: int | None) -> int:
        """The stream, or the current one for None."""
        return self.current_stream() if stream is None else stream

    def current_stream(self) -> int:
        return int(self.cupy.cuda.get_current_stream().ptr)

    def follow(self, stream: int, other: int) -> None:
        if self.capturing(stream) and not self.capturing(other):
            raise CaptureError(
                f"stream {stream:#x} is being captured, and would wait for stream {other:#x}, which is not: that ends"
                " the capture; wait before it begins, and give arrays that name no stream"
            )
        event = self.event(timed=False)
        event.record(other)
        with _named("waiting for another stream"):
            self.runtime.streamWaitEvent(stream, event.event.ptr)

    def synchronize(self, stream: int | None = None) -> None:
        with _named("what was asked of the device before"):
            self.runtime.deviceSynchronize() if stream is None else relaxed(self.runtime.streamSynchronize, stream)

    def event(self, timed: bool = True) -> _Event:
        with _named("a new event"):
            return _Event(self.cupy.cuda.Event(disable_timing=not timed), self)

    def capturing(self, stream: int) -> bool:
        return bool(_asked("whether the stream is being captured", self.runtime.streamIsCapturing, stream))

    def capture(self, stream: int) -> None:
        with _named("beginning a capture"):
            self.runtime.streamBeginCapture(stream, self.runtime.streamCaptureModeThreadLocal)

    def captured(self, stream: int, keep: bool = True) -> _Graph | None:
        try:
            graph = self.runtime.streamEndCapture(stream)
        except RuntimeError as error:
            if keep:
                raise failure(error, "ending a capture") from error
            return None
        try:
            with _named("making a graph of what was captured"):
                return _Graph(self.with_room(self.runtime.graphInstantiate, graph), self) if keep else None
        finally:
            relaxed(self.runtime.graphDestroy, graph)

    def begin(self, fresh: Sequence[Span], stream: int = 0) -> None:
        """Nothing to do: the device does not track initialisation."""


class _External:
    """A stream of another library, in the form that CuPy expects."""

    def __init__(self, stream: int):
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream
