"""What CUDA text runs on: memory by address, streams, events, graphs.  A GPU (:mod:`.gpu`) and the simulator
(:mod:`.simulator`) offer the same.

An address is an int; on a GPU it is never followed here.  A stream is an int too: what ``cudaStream_t`` is, 0 the
default one; None means the current one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Description:
    """A device, as its driver describes it; sizes in bytes.

    :param number: as the process counts devices.
    :param arch: ``sm_90``.
    :param sms: multiprocessors.
    :param l2: of the second-level cache.
    :param shared: shared memory that a block can have.
    :param memory: all there is.
    :param bandwidth: bytes/s that clock and width of the memory bus allow, 0 where the driver does not say.
    :param driver: the newest CUDA it knows: (12, 8).
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
    """``count`` elements from an address of the device's memory on."""

    address: int
    count: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class Memory(Protocol):
    """Bytes of the device, freed when this object dies and the work submitted to its stream is done."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Event(Protocol):
    """A CUDA event."""

    def record(self, stream: int | None = None) -> None:
        """Record it: it completes when the work submitted to the stream so far is done."""

    def done(self) -> bool:
        """Whether it has completed; never waits."""

    def wait(self) -> None:
        """Wait for it."""

    def since(self, start: Any) -> float:
        """Seconds since another event; both have completed and are timed."""


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self, stream: int | None = None) -> None:
        """Launch it."""


class Device(Protocol):
    """A machine, and one CUDA text on it, compiled and loaded at its first launch (there may be none: ``""``).

    Work is asynchronous and in order along a stream; only ``synchronize``, ``Event.wait`` and ``read`` wait.
    """

    @property
    def description(self) -> Description: ...

    def check_current(self) -> None:
        """DeviceError if another device is this thread's current one."""

    def device_of(self, address: int) -> int:
        """The number of the device whose memory an address is."""

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        """A new array of the device's own library (CuPy), for use along a stream; ``.data.ptr`` is its address."""

    def load(self) -> None:
        """Load the code now rather than at the first launch: loading is not allowed while a stream is captured."""

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
    ) -> None:
        """Start a function.

        :param args: each a Span or an integer of 64 bits.
        :param written: positions in ``args`` of the Spans that may be written.
        :param shared: bytes of dynamic shared memory.
        :param wide: the function of the text compiled for offsets of 64 bits, at its first such launch.
        :raises DeviceError: it was not started; the function is named.
        """

    def memory(self, nbytes: int, stream: int | None = None) -> Any:
        """Fresh :class:`Memory`, at a multiple of 256 bytes, for use along a stream.

        :raises OutOfMemory: there is not as much.
        """

    def pinned(self, nbytes: int) -> Array:
        """Host memory (u8) that the device can write while the host goes on."""

    def free(self) -> int:
        """About how many bytes ``memory`` can still allocate."""

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Copy between any two addresses, of the device or of pinned host memory."""

    def fill(self, at: int, value: int, nbytes: int, stream: int | None = None) -> None:
        """Set every byte."""

    def upload(self, to: int, array: Array, stream: int | None = None) -> None:
        """Copy a host array to the device; the array may change as soon as this returns."""

    def read(self, span: Span, stream: int | None = None) -> Array:
        """Wait for the stream, then copy to the host."""

    def multiply(self, library: Any, a: int, b: int, out: int, workspace: Span, stream: int = 0) -> None:
        """A :class:`gradc.codegen.cuda.actions.Library` product, on addresses."""

    def stream(self) -> int:
        """A new stream that nothing else uses; lives as long as this device."""

    def current_stream(self) -> int:
        """The one on which arrays of its own library are made."""

    def follow(self, stream: int, other: int) -> None:
        """Work submitted to ``stream`` from now on waits for the work submitted to ``other`` so far."""

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
        """End the capture: a :class:`Graph`; ``keep=False`` throws it away after an error, and gives None."""

    def begin(self, fresh: Sequence[Span], stream: int = 0) -> None:
        """A call begins: these spans hold nothing yet (a checking simulator wants to know)."""
