"""The device interface for CUDA code: memory by address, streams, events, graphs.  A GPU (:mod:`.gpu`) and the
simulator (:mod:`.simulator`) implement it.

An address is an int, never dereferenced on a GPU.  A stream is an int, the value of ``cudaStream_t``; 0 is the default
stream, None means the current one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...errors import DeviceError
from ...ir.epilogue import PLAIN, Epilogue

Array = np.ndarray[Any, Any]


class NoKernel(DeviceError):
    """A library has no kernel for what it is asked: a product with its epilogue, or a convolution."""


@dataclass(frozen=True)
class Description:
    """A device, as its driver describes it; sizes in bytes.

    :param number: the device's index in this process.
    :param arch: ``sm_90``.
    :param sms: number of multiprocessors.
    :param l2: size of the L2 cache.
    :param shared: maximum shared memory of a block.
    :param memory: total memory.
    :param bandwidth: theoretical memory bandwidth in bytes/s, 0 if the driver does not report it.
    :param driver: the newest CUDA version that the driver supports: (12, 8).
    """

    number: int
    name: str
    arch: str
    sms: int
    l2: int
    shared: int
    memory: int
    bandwidth: int
    driver: tuple[int, int]


@dataclass(frozen=True)
class Span:
    """``count`` elements of device memory, starting at an address."""

    address: int
    count: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Memory(Protocol):
    """A block of device memory, freed when this object is deleted and the work submitted to its stream is done."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Event(Protocol):
    """A CUDA event."""

    def record(self, stream: int | None = None) -> None:
        """Records it: it completes when the work submitted to the stream so far is done."""

    def done(self) -> bool:
        """Whether it has completed; never waits."""

    def wait(self) -> None:
        """Wait for it."""

    def since(self, start: Any) -> float:
        """Seconds since another event; both have completed and are timed."""


class Prepared(Protocol):
    """The steps of a launch plan."""

    def submit(self, roots: Mapping[str, int], stream: int) -> None:
        """Submits all of them.

        :param roots: the address of each memory root.
        :raises DeviceError: a launch failed; the function is named.
        """


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self, stream: int | None = None) -> None:
        """Launch it."""


class Device(Protocol):
    """A device with one CUDA source (which may be empty), compiled and loaded at its first launch.

    Work is asynchronous, and ordered within a stream; only ``synchronize``, ``Event.wait`` and ``read`` wait.

    :ivar check: whether it detects reads of uninitialised memory.
    """

    check: bool

    @property
    def description(self) -> Description: ...

    def check_current(self) -> None:
        """DeviceError if another device is this thread's current one."""

    def device_of(self, address: int) -> int:
        """The number of the device that an address belongs to."""

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        """A new array of the device's own library (CuPy), for use along a stream; ``.data.ptr`` is its address."""

    def load(self) -> None:
        """Loads the code now, because loading is not allowed during a capture."""

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
        """Launches a function.

        :param args: each a Span or a 64-bit integer; the first ``batch`` of them are one parameter.
        :param written: positions in ``args`` of the Spans that may be written.
        :param shared: bytes of dynamic shared memory.
        :param wide: use the code with 64-bit offsets, which is compiled at its first launch.
        :raises DeviceError: the launch failed; the function is named.
        """

    def prepare(self, plan: Any) -> Prepared:
        """A :class:`gradc.codegen.cuda.launch.LaunchPlan` for any number of calls; loads its functions."""

    def memory(self, nbytes: int, stream: int | None = None) -> Any:
        """New :class:`Memory`, aligned to 256 bytes, for use on a stream.

        :raises OutOfMemory: there is not enough memory.
        """

    def mapped(self, nbytes: int) -> tuple[Array, int]:
        """Host memory (u8) that the device can write, for as long as the process lives, and its address there."""

    def made_current(self) -> contextlib.AbstractContextManager[None]:
        """A context manager in which it is this thread's current device."""

    def free(self) -> int:
        """The approximate number of bytes that ``memory`` can still allocate."""

    def trim(self) -> None:
        """Gives memory that ``memory`` keeps without using it back to the driver, for others to allocate."""

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Copies between two addresses of device or pinned host memory."""

    def fill(self, at: int, value: int, nbytes: int, stream: int | None = None) -> None:
        """Set every byte."""

    def upload(self, to: int, array: Array, stream: int | None = None) -> None:
        """Copies a host array to the device; the array may be changed as soon as this returns."""

    def read(self, span: Span, stream: int | None = None) -> Array:
        """Waits for the stream, then copies to the host."""

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
        """A function that submits a :class:`gradc.codegen.cuda.actions.Library` product on addresses to a stream;
        ``pointers`` is the address of its ``pointers``, ``epilogue`` has what its product's reads and writes.

        :raises NoKernel: the library has none with this epilogue.
        """

    def convolution(self, asked: Any, first: int, second: int, out: int, workspace: Span) -> Callable[[int], None]:
        """A function that submits a :class:`gradc.codegen.cuda.actions.Convolution` to a stream; the addresses are
        those of its operands' and its result's first elements.

        :raises DeviceError: there is no library for it, or it has no algorithm; the sizes are named.
        """

    def stream(self) -> int:
        """A new stream, which exists as long as this object."""

    def current_stream(self) -> int:
        """The current stream of the device's array library (CuPy)."""

    def follow(self, stream: int, other: int) -> None:
        """Work submitted to ``stream`` from now on waits for the work submitted to ``other`` so far.

        :raises CaptureError: only ``stream`` is being captured.
        """

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for everything.

        :raises DeviceError: submitted work failed.
        """

    def event(self, timed: bool = True) -> Any:
        """A new :class:`Event`."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured."""

    def capture(self, stream: int) -> None:
        """Begin to capture the stream."""

    def captured(self, stream: int, keep: bool = True) -> Any:
        """Ends the capture and returns a :class:`Graph`; ``keep=False`` discards it after an error and returns None."""

    def begin(self, fresh: Sequence[Span], stream: int = 0) -> None:
        """Marks the beginning of a call and its uninitialised memory, for the checking mode of the simulator."""
