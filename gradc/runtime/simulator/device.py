"""The CPU as a CUDA device: work is executed synchronously, with a fiber per CUDA thread."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.ctypeslib

from ...codegen.cuda.actions import Convolution, Library
from ...codegen.cuda.convolutions import computed
from ...codegen.cuda.launch import LaunchPlan
from ...codegen.cuda.products import multiplied, views
from ...errors import CaptureError, InternalError
from ...ir.epilogue import PLAIN, Epilogue
from ...process.forks import held_off
from ..cuda.device import Description, Prepared, Span
from ..cuda.steps import StepByStep
from ..host.arrays import available, empty

Array = np.ndarray[Any, Any]
Work = Callable[[], None]


class HostMemory:
    """Host memory with a simulated device address."""

    def __init__(self, array: Array, address: int):
        self.array, self.nbytes, self.address = array, array.nbytes, address


class SimulatedEvent:
    def __init__(self, device: Simulator):
        self.device, self.at = device, 0.0
        self.come = True

    def record(self, stream: int | None = None) -> None:
        self.come = False

        def arrive() -> None:
            self.at, self.come = time.perf_counter(), True

        self.device.ask(stream, arrive)

    def done(self) -> bool:
        return self.come

    def wait(self) -> None:
        if not self.come:
            self.device.synchronize()

    def since(self, start: Any) -> float:
        return self.at - start.at


class SimulatedGraph:
    def __init__(self, device: Simulator, work: Sequence[Work]):
        self.device, self.work = device, tuple(work)

    def replay(self, stream: int | None = None) -> None:
        for work in self.work:
            self.device.ask(stream, work)


class Simulator:
    """A :class:`gradc.runtime.cuda.device.Device` in host memory.

    :param check: detect races, reads of uninitialised memory and accesses out of bounds.
    :param seed: run blocks and warps in a random order drawn from it.
    """

    description = Description(0, "cuda-sim", "", 1, 0, 227 * 1024, 0, 0, (0, 0))
    offset = 0
    """The difference between a device address and the host address."""
    captures: ClassVar[dict[int, list[Work]]] = {}
    _streams = itertools.count(1 << 12)

    def __init__(self, text: str = "", check: bool = False, seed: int | None = None):
        self.text, self.check, self.seed = text, check, seed
        self.libraries: dict[bool, Any] = {}  # whether offsets have 64 bits -> library
        self.fresh: list[tuple[int, Array]] = []  # (address, which bytes from there on are initialised)

    def check_current(self) -> None:
        """Nothing to do: there is one device."""

    def device_of(self, address: int) -> int:
        return 0

    def new_array(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> Any:
        raise InternalError("the simulator's arrays are the host's")

    def load(self, wide: bool = False) -> None:
        with held_off:
            from ...codegen.text import widened
            from .compile import compile_sim

        if wide not in self.libraries and self.text:
            self.libraries[wide] = compile_sim(widened(self.text) if wide else self.text, check=self.check)

    @property
    def library(self) -> Any:
        """The compiled source, with 32-bit offsets."""
        return self.libraries.get(False)

    def ask(self, stream: int | None, work: Work) -> None:
        """Executes the work, or records it if the stream is being captured."""
        if stream in self.captures:
            self.captures[stream].append(work)
        else:
            self.do(stream or 0, work)

    def do(self, stream: int, work: Work) -> None:
        work()

    def seen(self, span: Span) -> Array:
        """The elements of a span, as a view."""
        if not span.nbytes:
            return np.empty(span.count, span.dtype)
        return numpy.ctypeslib.as_array((ctypes.c_ubyte * span.nbytes).from_address(span.address - self.offset)).view(
            span.dtype
        )

    def bytes_at(self, address: int, nbytes: int) -> Array:
        return self.seen(Span(address, nbytes, np.dtype(np.uint8)))

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
        self.load(wide)

        def work() -> None:
            seen = [self.seen(a) if isinstance(a, Span) else a for a in args]
            ready = {i: self.ready(a) for i, a in enumerate(seen) if isinstance(a, np.ndarray)}
            self.libraries[wide].launch(
                function,
                (blocks, 1, 1),
                (threads, 1, 1),
                shared,
                seen,
                written=[i for i in written if seen[i].nbytes],
                initialised=ready,
                seed=self.seed,
                batch=batch,
            )

        self.ask(stream, work)

    def prepare(self, plan: LaunchPlan) -> Prepared:
        return StepByStep(self, plan)

    # -- which bytes have a value --------------------------------------------------------------------------------------

    def begin(self, fresh: Sequence[Span], stream: int = 0) -> None:
        def work() -> None:
            self.fresh = [(span.address - self.offset, np.zeros(span.nbytes, np.uint8)) for span in fresh]

        if self.check:
            self.ask(stream, work)

    def ready(self, array: Array) -> bool | Array:
        for address, mask in self.fresh:
            at = array.ctypes.data - address
            if 0 <= at and at + array.nbytes <= mask.size:
                return mask[at : at + array.nbytes]
        return True

    def has(self, array: Array, source: bool | Array = True) -> None:
        """Marks these bytes as initialised, or, if ``source`` is an array, as initialised as its bytes."""
        ready = self.ready(array)
        if isinstance(ready, np.ndarray):
            ready[:] = source

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self, nbytes: int, stream: int | None = None) -> HostMemory:
        array = empty((nbytes + 255,), np.uint8)
        array = array[-array.ctypes.data % 256 :][:nbytes]
        return HostMemory(array, array.ctypes.data + self.offset)

    def mapped(self, nbytes: int) -> tuple[Array, int]:
        array = np.zeros(nbytes, np.uint8)
        return array, array.ctypes.data

    def made_current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free(self) -> int:
        return available().left

    def trim(self) -> None:
        """Nothing to do: nothing is kept."""

    def copy(self, to: int, source: int, nbytes: int, stream: int | None = None) -> None:
        def work() -> None:
            target, given = self.bytes_at(self.own(to), nbytes), self.bytes_at(self.own(source), nbytes)
            target[:] = given
            self.has(target, self.ready(given))

        self.ask(stream, work)

    def own(self, address: int) -> int:
        """The device address of an address of mapped host or device memory."""
        return address if address >= self.offset else address + self.offset

    def fill(self, at: int, value: int, nbytes: int, stream: int | None = None) -> None:
        def work() -> None:
            array = self.bytes_at(at, nbytes)
            array[:] = value
            self.has(array)

        self.ask(stream, work)

    def upload(self, to: int, array: Array, stream: int | None = None) -> None:
        kept = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()

        def work() -> None:
            target = self.bytes_at(to, kept.nbytes)
            target[:] = kept
            self.has(target)

        self.ask(stream, work)

    def read(self, span: Span, stream: int | None = None) -> Array:
        self.synchronize(stream)
        return self.seen(span).copy()

    def product(
        self,
        library: Library,
        a: int,
        b: int,
        out: int,
        workspace: Span,
        pointers: int = 0,
        epilogue: Epilogue[Span] = PLAIN,
    ) -> Callable[[int], None]:
        return lambda stream: self.multiply(library, a, b, out, workspace, stream, pointers, epilogue)

    def multiply(
        self,
        library: Library,
        a: int,
        b: int,
        out: int,
        workspace: Span,
        stream: int = 0,
        pointers: int = 0,
        epilogue: Epilogue[Span] = PLAIN,
    ) -> None:
        """Computes a product on addresses, whose steps and matrices it looks at."""
        p = library.product

        def work() -> None:
            if pointers:
                self.check_pointers(library, (a, b, out), pointers)
            memory = [
                self.bytes_at(at - operand.skipped, operand.part.nbytes)
                for at, operand in zip((a, b, out), (p.a, p.b, p.out), strict=True)
            ]
            x, y, result = views(p, *memory)
            given = epilogue.map(self.seen)
            multiplied(x, y, result, p.add, given)
            for written in given.writes:
                self.has(written)
            ready = self.ready(memory[2])
            if isinstance(ready, np.ndarray):  # of what lies between rows, nothing is written
                size = result.itemsize
                np.lib.stride_tricks.as_strided(ready, (*result.shape, size), (*result.strides, 1))[...] = 1

        self.ask(stream, work)

    def convolution(
        self, asked: Convolution, first: int, second: int, out: int, workspace: Span
    ) -> Callable[[int], None]:
        return lambda stream: self.convolve(asked, first, second, out, workspace, stream)

    def convolve(self, asked: Convolution, first: int, second: int, out: int, workspace: Span, stream: int = 0) -> None:
        """Computes a convolution on addresses."""

        def work() -> None:
            memory = [
                self.bytes_at(at - x.skipped, x.part.nbytes)
                for at, x in zip((first, second, out), (*asked.operands, asked.out), strict=True)
            ]
            computed(asked, *memory)
            self.has(memory[2])

        self.ask(stream, work)

    def check_pointers(self, library: Library, starts: Sequence[int], pointers: int) -> None:
        """Raises InternalError where the addresses of matrices in memory are others than those of the product."""
        p, found = library.product, self.seen(Span(pointers, 3 * library.matrices, np.dtype(np.uint64)))
        for start, operand, given in zip(starts, (p.a, p.b, p.out), np.split(found, 3), strict=True):
            at = [np.arange(n) * s for n, s in zip(operand.shape[:-2], operand.strides[:-2], strict=True)]
            elements = sum(np.meshgrid(*at, indexing="ij", sparse=True), start=np.int64(0)).reshape(-1)
            wanted = start + elements * operand.part.dtype.itemsize
            if not np.array_equal(given.astype(np.int64), wanted):
                raise InternalError(f"{library.matrices} products of addresses that are not their matrices'")

    # -- streams -------------------------------------------------------------------------------------------------------

    def stream(self) -> int:
        return next(self._streams)

    def current_stream(self) -> int:
        return 0

    def follow(self, stream: int, other: int) -> None:
        """Nothing to do: work is synchronous."""

    def synchronize(self, stream: int | None = None) -> None:
        """Nothing to do: work is synchronous."""

    def event(self, timed: bool = True) -> SimulatedEvent:
        return SimulatedEvent(self)

    def capturing(self, stream: int) -> bool:
        return stream in self.captures

    def capture(self, stream: int) -> None:
        if not stream:
            raise CaptureError("the default stream cannot be captured")
        self.captures[stream] = []

    def captured(self, stream: int, keep: bool = True) -> SimulatedGraph | None:
        work = self.captures.pop(stream)
        return SimulatedGraph(self, work) if keep else None
