"""The interface between an Executable and its target: memory of arrays, loaded code, launching a call.

:mod:`.host.backend` has the backends of the targets ``cpu`` and ``numpy``, :mod:`.cuda.backend` those of ``cuda`` and
``cuda-sim``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import Unsupported
from ..ir.kernel import Kernel, Program
from ..ir.types import Type
from ..process.forks import lock
from ..process.limits import Limit
from .cuda.pending import DeferredCheck
from .host.arrays import Arguments, Kind, Results

if TYPE_CHECKING:
    from .cuda.nvrtc import CudaBinary

Array = np.ndarray[Any, Any]
NO_ALLOCATION = (
    "something must be allocated, and the stream is being captured: give out= for every result, contiguous inputs, and"
    " no accumulate=; or arrays of torch to a capture by torch.cuda.graph, which has memory for its graph"
)


@dataclass
class BoundCall:
    """A call whose arguments have been checked.

    :param arrays: the inputs by name, in row-major order.
    :param outputs: the arrays to write results into, by output.
    :param dims: the value of every symbol.
    :param kind: the library of the results' arrays.
    :param given: the inputs as passed by the caller.
    :param add_to: the arrays of ``accumulate=``, to which results are added.
    :param stream: the device's stream; 0 on the host.
    :param noncontiguous: inputs that were copied into row-major order.
    :param plan: :meth:`Backend.plan` of ``dims``.
    :param captured: whether the stream is being captured.
    :param allocates: whether memory can be allocated, which it can in a capture if :meth:`Backend.allocates_captured`.
    :param numbers: 8 bytes by input, for those that are written to the device when the call is submitted.
    :param donors: output -> the donated input in whose memory it lies.
    :param exclusive: :attr:`.Executable.exclusive`.
    """

    arrays: dict[str, Array]
    outputs: dict[str, Array]
    dims: dict[str, int]
    kind: Kind
    given: Arguments
    add_to: dict[str, Array]
    stream: int = 0
    noncontiguous: tuple[str, ...] = ()
    plan: Any = None
    captured: bool = False
    allocates: bool = True
    numbers: dict[str, int] = field(default_factory=dict)
    donors: dict[str, str] = field(default_factory=dict)
    exclusive: Collection[str] = ()


Rebind = Callable[[Arguments, Mapping[str, int], int], BoundCall]
"""Checks the arguments of a call: inputs by name, sizes by symbol, a stream."""


class Backend(ABC):
    """A program on one target.

    :param program: scheduled, with strategies and slots.
    :param payload: the machine code of an earlier compilation; None compiles at the first use.
    :cvar align: the required alignment of ``workspace=``, in bytes.
    :cvar on_host: whether the elements of arrays can be read by the host.
    """

    align: ClassVar[int]
    on_host: ClassVar[bool]

    def __init__(self, program: Program, target: str, payload: bytes | None = None):
        self.program, self.target = program, target
        self._payload = payload
        self._native: Any = None
        self._native_lock = lock(reentrant=True)
        self._roots = {key: program.root(buffer) for key, buffer in program.outputs}

    # -- the code ------------------------------------------------------------------------------------------------------

    @property
    def native(self) -> Any:
        """The loaded code, compiled at its first use."""
        if self._native is None:
            with self._native_lock:
                if self._native is None:
                    self._native = self._load()
        return self._native

    @native.setter
    def native(self, loaded: Any) -> None:
        self._native = loaded

    @abstractmethod
    def _load(self) -> Any:
        """Loads the payload, or compiles and loads the program."""

    def load(self, source: Any, payload: bytes | None) -> None:
        """Loads code that the compiler has rendered and compiled already, so that the first use compiles nothing.

        :param source: the rendered source, a :class:`gradc.codegen.cpu.program.Source` or a
            :class:`.cuda.programs.CudaSource`.
        :param payload: its machine code; None if a device compiles it at its first launch.
        """
        raise Unsupported(f"machine code for the target {self.target!r}")

    @property
    @abstractmethod
    def source(self) -> str:
        """The generated C or CUDA source."""

    @abstractmethod
    def kernel_source(self, kernel: Kernel, types: Mapping[str, Type]) -> str:
        """The generated C or CUDA source of one kernel."""

    @property
    def binary(self) -> CudaBinary:
        """See :attr:`gradc.Executable.binary`."""
        raise Unsupported(f"a binary for CUDA from the target {self.target!r}; target='cuda' has one")

    def portable(self, dims: Mapping[str, int]) -> bytes:
        """The machine code in a form that another machine of the same architecture can run.

        :param dims: sizes that are known beforehand.
        """
        return bytes(self.native.payload)

    # -- arrays --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def stream(self, given: Any, values: Iterable[Any]) -> int:
        """The stream of a call: the caller's, else the current stream of the library of the arrays ``values``."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured."""
        return False

    def allocates_captured(self, stream: int, kind: Kind | None) -> bool:
        """Whether memory that the library ``kind`` allocates on a stream that is being captured belongs to the graph,
        so that it stays as it is for as long as the graph can be replayed.
        """
        return False

    @abstractmethod
    def read(self, x: Any, stream: int, name: str, constants: Collection[int] | None = None) -> tuple[Array, Kind]:
        """An argument as an array, and the library it came from.

        :param name: its name in errors.
        :param constants: ids of host arrays that are accepted on a device, too.
        :raises DeviceError, InvalidProblem: it is in another memory, or is no array.
        """

    @abstractmethod
    def kind(self, kinds: Sequence[Kind]) -> Kind:
        """The library of the results' arrays, given those of the arguments."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any, kind: Kind, stream: int) -> Array:
        """An uninitialised array for a result, in the library ``kind``."""

    @abstractmethod
    def scratch(self, shape: Sequence[int], dtype: Any, stream: int, kind: Kind | None = None) -> Array:
        """An uninitialised array for internal use.

        :param kind: the library whose allocator to use, on a device.
        """

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: Any, stream: int, kind: Kind | None = None) -> Array:
        """An array of zeros for internal use; ``kind`` as :meth:`scratch` takes it."""

    @abstractmethod
    def to_device(self, array: Array, stream: int) -> Array:
        """A copy of a host array (a number, a default) in the device's memory; on the host, the array itself."""

    @abstractmethod
    def place_inputs(self, call: BoundCall) -> None:
        """Replaces the inputs of a call that are in host memory (numbers, defaults) by arrays on the device."""

    @abstractmethod
    def contiguous(self, array: Array, stream: int) -> Array:
        """A copy in row-major order, aligned."""

    @abstractmethod
    def result(self, array: Array, kind: Kind) -> Any:
        """A result as an object of the caller's library."""

    @abstractmethod
    def donates(self, array: Array, kind: Kind) -> bool:
        """Whether an input's memory may be returned as a result in the library ``kind``."""

    @abstractmethod
    def left(self) -> Limit:
        """Bytes that can still be allocated."""

    # -- calls ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def plan(self, dims: Mapping[str, int], lenders: frozenset[str] = frozenset()) -> Any:
        """The memory plan for these sizes, cached: offsets, and ``workspace`` in bytes.

        :param lenders: outputs in which temporaries may lie before they are written: the more, the less workspace.
        """

    def thread_bytes(self, plan: Any) -> int:
        """Bytes of thread-local memory of all CPU threads, kept between calls."""
        return 0

    def buffers(self, call: BoundCall) -> dict[str, Array]:
        """The arrays of inputs and outputs of a call, by buffer."""
        return call.arrays | {self._roots[key]: array for key, array in call.outputs.items()}

    @abstractmethod
    def launch(self, call: BoundCall, workspace: Array | None, rebind: Rebind, only: int = -1) -> DeferredCheck | None:
        """Runs a call: writes its outputs, or adds them to the arrays of ``accumulate=``.

        :param rebind: checks the call's arguments again, to describe an error after the call has returned.
        :param only: the number of the only step to run; on the CPU.
        :return: the deferred check of an asynchronous call, or None.
        :raises IndexOutOfRange: a data-dependent index is out of range.
        """

    def described(self, inputs: Arguments, out: Any, dims: Any, stream: Any) -> Any:
        """What a call is without its addresses, for :meth:`repeat`; None: it must be bound."""
        return None

    def remember(self, call: Any, bound: BoundCall) -> None:  # noqa: B027
        """Keeps a call, as :meth:`described` has it, that was checked and launched."""

    def repeat(
        self, call: Any, inputs: Arguments, out: Arguments, rebind: Rebind
    ) -> tuple[Results, dict[str, int], DeferredCheck | None] | None:
        """Runs a call that differs from one that is kept in addresses alone: (results, value of every symbol, deferred
        check or None); None, and nothing was done, if it must be bound first.
        """
        return None

    def seconds(self, call: BoundCall, rebind: Rebind, only: int = -1) -> float:
        """The run time of a call, or of its step ``only``, in seconds."""
        began = time.perf_counter()
        self.launch(call, None, rebind, only)
        return time.perf_counter() - began

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all submitted work has finished."""
