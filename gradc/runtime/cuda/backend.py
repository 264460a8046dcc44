"""The backends of the targets ``cuda``, a GPU, and ``cuda-sim``, the simulator on the host.

A call is submitted to a stream; an index out of range is raised when it returns (``errors="sync"``) or later.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import knobs
from ...codegen.cuda.launch import LaunchPlan
from ...codegen.cuda.render import cuda_kernel
from ...errors import CaptureError, CompilerMissing, DeviceError, GradcError, OutOfMemory
from ...ir.kernel import Kernel, Program
from ...ir.types import Type
from ...process.forks import cached_property, held_off
from ...process.ieee import plain
from ..backend import Array, Backend, BoundCall, Rebind
from ..host.arrays import Arguments, Kind, Results, address_of
from ..host.backend import HostBackend
from ..simulator.device import Simulator
from . import gpu
from .cublas import workspace_bytes
from .device import Device
from .numbers import Numbers
from .on_device import DeviceArray, DeviceArrays, check_addable
from .pending import DeferredCheck
from .programs import Again, CudaProgram, CudaSource, Submission
from .repeated import Repeated, RepeatedCalls

if TYPE_CHECKING:
    from .nvrtc import CudaBinary


_NOTHING = contextlib.nullcontext()
_U8 = np.dtype(np.uint8)


class CudaBackend(Backend):
    """A program's CUDA source on a device, real or simulated."""

    @abstractmethod
    def _load(self) -> CudaProgram:
        """Creates the program for its device; nothing is submitted yet."""

    @property
    @plain()
    def source(self) -> str:
        return str(self.native.text)

    def kernel_source(self, kernel: Kernel, types: Mapping[str, Type]) -> str:
        return cuda_kernel(kernel, types).text

    def plan(self, dims: Mapping[str, int], lenders: frozenset[str] = frozenset()) -> LaunchPlan:
        return self.native.bind(dims)

    def launch(self, call: BoundCall, workspace: Array | None, rebind: Rebind, only: int = -1) -> DeferredCheck | None:
        """See :meth:`.Backend.launch`; ``only`` is ignored, every step runs.

        :raises CaptureError: the stream is being captured, no workspace was given, and none can be allocated.
        :raises IndexOutOfRange: with ``errors="sync"``; otherwise the returned check has the error.
        """
        plan = call.plan
        if not call.allocates and workspace is None and plan.workspace:
            raise CaptureError(
                f"{self.program.name} is called on a stream that is being captured, where nothing can be allocated:"
                f" workspace= of {plan.workspace} bytes is needed"
            )
        if call.captured or self.waits or not plan.checks:  # an error flag stays in the workspace
            started = self.start(call, workspace)
            if self.waits and not call.captured:
                self.finish(started)
            return None
        outputs = {address_of(a) for a in call.outputs.values()}
        donated = any(address_of(a) in outputs for a in call.arrays.values() if a.nbytes)
        again = self._again(call.given, rebind, call.dims, call.stream) if not donated else lambda: None
        return self.start(call, workspace, again=again).check

    @property
    def waits(self) -> bool:
        """Whether a call waits for its end and raises its own errors."""
        return True

    def start(self, call: BoundCall, workspace: Array | None, only: int = -1, again: Again | None = None) -> Submission:
        """Submits the launches of a call, or those of the step ``only``, without waiting.

        :param again: see :meth:`.CudaProgram.start_at`.
        """
        adds = {self._roots[key]: target for key, target in call.add_to.items()}
        for key, target in call.add_to.items():
            check_addable(target, key)
        arrays = self.buffers(call)
        if workspace is None:
            workspace = self.workspace(call.plan, call.kind, call.stream)
        try:
            with self.numbers_written(call):
                return self.native.start(arrays, call.plan, workspace, call.stream, only, adds, again=again)  # type: ignore[no-any-return]
        except (DeviceError, OutOfMemory) as error:
            self.note(error, call.plan)
            raise

    def note(self, error: Exception, plan: LaunchPlan) -> None:
        """Says of which program's call an error is, and how much memory that takes."""
        room = f", which needs {plan.workspace} bytes of workspace" if isinstance(error, OutOfMemory) else ""
        error.add_note(f"in {self.program.name}{room}")

    def numbers_written(self, call: BoundCall) -> contextlib.AbstractContextManager[Any]:
        """A context in which work that is submitted finds the call's numbers."""
        return _NOTHING

    def keep_numbers(self, call: BoundCall) -> None:
        """Moves the numbers of a call to memory that later calls do not write."""

    def workspace(self, plan: LaunchPlan, kind: Kind, stream: int) -> Array | None:
        """Memory for a call from the allocator of its arrays' library; None: from the device's."""
        return None

    def finish(self, started: Submission) -> None:
        """Waits for a call and raises its error."""
        try:
            self.native.finish(started)
        except DeviceError as error:
            error.add_note(f"in {self.program.name}")
            raise

    def _again(self, given: Arguments, rebind: Rebind, dims: Mapping[str, int], stream: int) -> Again:
        """A function that gives the call's arrays with new memory for results, to rerun it for the description of an
        error; None once the caller has deleted an argument, because arguments are not kept alive.
        """
        recalls = {name: _weak(value) for name, value in given.items()}

        def arrays() -> Mapping[str, Array] | None:
            values = {name: recall() for name, recall in recalls.items()}
            if any(value is None for value in values.values()):
                return None
            try:
                again = rebind(values, {d: dims[d] for d in self.program.dims}, stream)
                self.keep_numbers(again)
                return self.buffers(again)
            except GradcError:
                return None

        return arrays


def _weak(value: Any) -> Callable[[], Any]:
    """A weak reference to a caller's array; a strong reference to a number."""
    if isinstance(value, np.ndarray) and not isinstance(value, DeviceArray):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value if isinstance(value, bool | int | float | np.generic) else None


class SimulatorBackend(CudaBackend, HostBackend):
    """The simulator, on host arrays."""

    def __init__(self, program: Program, payload: bytes | None = None):
        super().__init__(program, "cuda-sim", payload)

    @plain()
    def _load(self) -> CudaProgram:
        check = knobs.SIM_CHECK.get()
        return CudaProgram(self.program, lambda text, *_: Simulator(text, check))

    @plain()
    def launch(self, call: BoundCall, workspace: Array | None, rebind: Rebind, only: int = -1) -> DeferredCheck | None:
        return super().launch(call, workspace, rebind, only)  # plain: a GPU has its own FP environment


class GpuBackend(DeviceArrays, CudaBackend):
    """A GPU.

    :param arch: the architecture to compile for, ``sm_90``.
    :param errors: ``"sync"``: a call waits and raises its own errors; ``"async"``: it returns a deferred check, unless
        GRADC_SYNC is set.
    """

    on_host = False

    def __init__(self, program: Program, payload: bytes | None = None, *, arch: str, errors: str):
        DeviceArrays.__init__(self)
        CudaBackend.__init__(self, program, "cuda", payload)
        self.arch, self.errors = arch, "sync" if knobs.SYNC.get() else errors

    def _load(self) -> CudaProgram:
        return self._new_program(self._payload)

    def load(self, source: CudaSource, payload: bytes | None) -> None:
        self.native = self._new_program(payload, source)

    @plain()
    def _new_program(self, payload: bytes | None, source: CudaSource | None = None) -> CudaProgram:
        arch, sync = self.arch, self.waits
        return CudaProgram(
            self.program,
            lambda text, cubin, wide: gpu.Gpu(text, cubin=cubin, wide=wide, arch=arch, sync=sync),
            workspace_bytes(arch),
            payload,
            source,
        )

    def workspace(self, plan: LaunchPlan, kind: Kind, stream: int) -> Array | None:
        if kind is not Kind.TORCH or not plan.workspace:
            return None
        return self.empty((plan.workspace,), np.uint8, kind, stream)

    @cached_property
    def _repeated(self) -> RepeatedCalls:
        return RepeatedCalls(self, [b.name for b in self.program.of_kind("input") if not b.alias])

    def described(self, inputs: Arguments, out: Any, dims: Any, stream: Any) -> Repeated | None:
        return self._repeated.described(inputs, out, dims, stream)

    def remember(self, call: Repeated, bound: BoundCall) -> None:
        self._repeated.remember(call, bound, self._roots)

    def repeat(
        self, call: Repeated, inputs: Arguments, out: Arguments, rebind: Rebind
    ) -> tuple[Results, dict[str, int], DeferredCheck | None] | None:
        known = call.known
        if known is None or not self._repeated.fits(call, known):
            return None
        stream, plan = call.stream, known.plan
        try:
            made = [self.new_native(shape, dtype, known.kind, stream) for _, _, shape, dtype in known.fresh]
            torchs = plan.workspace and known.kind is Kind.TORCH
            space = self.new_native((plan.workspace,), _U8, known.kind, stream) if torchs else None
        except OutOfMemory:
            return None  # the call as the first says how much is needed and left
        roots = {root: address for (root, _, _), address in zip(known.places, call.addresses, strict=True)}
        roots |= {root: address for (_, root, _, _), (_, address) in zip(known.fresh, made, strict=True)}
        again = self._again(inputs, rebind, known.dims, stream) if plan.checks and not self.waits else None
        try:
            started = self.native.start_at(roots, plan, stream, space, again)
            if self.waits:
                self.native.finish(started)
        except (DeviceError, OutOfMemory) as error:
            self.note(error, plan)
            raise
        results = {**out, **{name: native for (name, *_), (native, _) in zip(known.fresh, made, strict=True)}}
        return results, dict(known.dims), started.check

    def numbers_written(self, call: BoundCall) -> contextlib.AbstractContextManager[Any]:
        return self._written(call) if call.numbers else _NOTHING

    @contextlib.contextmanager
    def _written(self, call: BoundCall) -> Iterator[None]:
        with self.numbers.lock:
            self.write_numbers(call)
            yield

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers(self.device, self.support, [b.name for b in self.program.of_kind("input")])

    @property
    def device(self) -> Device:
        return self.native.device

    @property
    def support(self) -> Device:
        return self.native.support

    @property
    def waits(self) -> bool:
        return self.errors == "sync"

    @cached_property
    def binary(self) -> CudaBinary:
        with held_off:
            from .limits import refuse_large_blocks
            from .nvrtc import compile_cuda

        made = compile_cuda(self.source, arch=self.arch)
        refuse_large_blocks(made, self.native.kernels.values())
        return made

    def portable(self, dims: Mapping[str, int]) -> bytes:
        """The machine code; only the source if there is no NVRTC."""
        try:
            return self.native.portable(self.binary.cubin, self.native.wide_cubin(dims, self.arch))
        except CompilerMissing:
            return self.native.payload

    def seconds(self, call: BoundCall, rebind: Rebind, only: int = -1) -> float:
        """The time on the device, measured between two events."""
        plan, device = call.plan, self.device
        space = self.scratch((max(plan.workspace, 1),), np.uint8, call.stream)
        device.load()
        begin, end = device.event(), device.event()
        begin.record(call.stream)
        started = self.start(call, space, only)
        end.record(call.stream)
        end.wait()
        self.finish(started)
        return float(end.since(begin))

    def synchronize(self) -> None:
        if self._native is not None and self._native.started:
            self._native.device.synchronize()
