"""Runs a Program's CUDA code on a GPU or the simulator: buffers, launches, and the error flag of index checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...codegen.cuda.actions import FLAG, FLAG_WORDS, WORKSPACE, Action, Launch
from ...codegen.cuda.index_bound import LIMIT
from ...codegen.cuda.launch import LaunchPlan, checks_of
from ...codegen.cuda.render import CudaKernel, render_cuda
from ...codegen.cuda.rendered import packed, unpacked
from ...codegen.cuda.support import support_text
from ...codegen.text import CODES, widened
from ...errors import CaptureError, DeviceError, IndexOutOfRange, InternalError, NotAscending
from ...ir.dims import evaluate
from ...ir.kernel import Kernel, Program
from ...process.forks import cached_property, held_off, lock
from ..cache import pack, unpack
from ..host.arrays import address_of
from ..recent import Recent
from .device import Device, Memory, Prepared, Span
from .flags import FINE, Flag, FlagPool
from .on_device import add
from .pending import DeferredCheck
from .steps import Roots, span_of, submit

Array = np.ndarray[Any, Any]
_PLANS = 256
"""Launch plans that a program keeps."""
Arrays = Mapping[str, Array]
Again = Callable[[], Arrays | None]


@dataclass
class Submission:
    """A submitted call; a context in which it is submitted.

    :param roots: the address of each memory root.
    :param workspace: the memory for it, kept alive by this object.
    :param check: of a call that nobody waits for, :param own_flag: and its flag, which is not in the workspace.
    """

    plan: LaunchPlan
    roots: dict[str, int]
    stream: int
    workspace: Any
    check: DeferredCheck | None = None
    own_flag: tuple[FlagPool, Flag] | None = None

    @property
    def flag(self) -> Span:
        return span_of(self.plan.flag, self.roots)

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.own_flag is None:
            return
        pool, flag = self.own_flag
        try:
            pool.submitted(flag, self.check if kind is None else None)
        except DeviceError:
            if kind is None:  # else it is one more of the error that is raised
                raise


class CudaSource(NamedTuple):
    """A program's CUDA source.

    :param kernels: the launch information of each kernel's functions, by name.
    """

    text: str
    kernels: dict[str, CudaKernel]


class CudaProgram:
    """A Program as CUDA code on a device; the counterpart of CpuProgram.

    :param open_device: (source, cubin with 32-bit offsets or b"", cubin with 64-bit offsets or b"") -> Device.
    :param library: workspace bytes of the device's matrix products.
    :param payload: :attr:`payload` of another process.
    :param source: the result of :func:`gradc.codegen.cuda.render.render_cuda` for the program.
    :ivar started: whether it has been called.
    """

    def __init__(
        self,
        program: Program,
        open_device: Callable[[str, bytes, bytes], Device],
        library: int = 0,
        payload: bytes | None = None,
        source: CudaSource | None = None,
    ):
        self.program, self.library = program, library
        self._source = source
        self._given = unpack(payload) if payload else {}
        self.roots = [b for b in program.buffers if not b.alias]
        self.constants = {
            b.name: np.asarray(b.value, np.float64 if b.type.dtype.is_float else None).astype(b.type.dtype.np)
            for b in self.roots
            if b.kind == "const"
        }
        self._open = open_device
        self._plans: Recent[tuple[int, ...], LaunchPlan] = Recent(_PLANS)
        self._uploaded: dict[str, Memory] = {}
        self.started = False
        self._ready: set[bool] = set()  # offset widths (64 bits: True) of the loaded functions
        self._prepared: Recent[LaunchPlan, Prepared] = Recent(_PLANS)
        self._constant_roots: dict[str, int] | None = None if self.constants else {}
        self._lock = lock()

    @cached_property
    def _rendered(self) -> tuple[str, dict[str, CudaKernel]]:
        if self._source is not None:
            return self._source
        if "rendered" in self._given:
            return unpacked(self._given["rendered"])
        return render_cuda(self.program)

    @property
    def text(self) -> str:
        return self._rendered[0]

    @property
    def kernels(self) -> dict[str, CudaKernel]:
        return self._rendered[1]

    @cached_property
    def device(self) -> Device:
        return self._open(
            self.text if "__global__" in self.text else "", self._given.get("cubin", b""), self._given.get("wide", b"")
        )

    @cached_property
    def support(self) -> Device:
        """The device with the support functions, which are not specific to a program."""
        return self._open(support_text(), b"", b"")

    def portable(self, cubin: bytes = b"", wide: bytes = b"") -> bytes:
        """The data from which another process loads the program without rendering; with a cubin, without NVRTC."""
        binaries = {"cubin": cubin, "wide": wide}
        return pack(
            {"rendered": packed(*self._rendered), **{name: binary for name, binary in binaries.items() if binary}}
        )

    @property
    def payload(self) -> bytes:
        return self.portable(self._given.get("cubin", b""), self._given.get("wide", b""))

    def wide_cubin(self, dims: Mapping[str, int], arch: str) -> bytes:
        """The source compiled with 64-bit offsets if a function needs them for these dims, else b""."""
        with held_off:
            from .nvrtc import compile_cuda

        if any(name not in dims for name in self.program.dims) or not self.bind(dims).wide:
            return b""
        return compile_cuda(widened(self.text), arch=arch, emit=("cubin",)).cubin

    def counting(self, dims: Mapping[str, int]) -> str:
        """The offset width of its functions for these dims, with the reason."""
        plan = self.bind(dims)
        if not plan.wide:
            return f"offsets have 32 bits: none of its kernels counts beyond {plan.index_bound}"
        return (
            f"offsets have 64 bits in {', '.join(plan.wide)}, which may count to {max(plan.index_bound, LIMIT)}; 32 in"
            " the others"
        )

    def sites_json(self) -> str:
        return json.dumps({})

    def bind(self, dims: Mapping[str, int]) -> LaunchPlan:
        """The launch plan for these dims; cached."""
        key = tuple(dims[name] for name in self.program.dims)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = LaunchPlan(self.program, self.kernels, dims, self.library)
        return found

    # -- a call --------------------------------------------------------------------------------------------------------

    def run(
        self,
        arrays: Arrays,
        plan: LaunchPlan,
        workspace: Array | None = None,
        only: int = -1,
        adds: Mapping[str, Array] | None = None,
    ) -> None:
        """:meth:`start` on the default stream, then waits.

        :raises IndexOutOfRange: a data-dependent index is out of range; nothing that depends on it was written.
        """
        self.finish(self.start(arrays, plan, workspace, only=only, adds=adds))

    def start(
        self,
        arrays: Arrays,
        plan: LaunchPlan,
        workspace: Array | None = None,
        stream: int = 0,
        only: int = -1,
        adds: Mapping[str, Array] | None = None,
        until: int = -1,
        again: Again | None = None,
    ) -> Submission:
        """Submits every step (or the step ``only``, or those before ``until``) on contiguous arrays by buffer name;
        outputs are written in place.

        :param adds: buffer name -> array to which that output is added at the end.
        :param again: see :meth:`start_at`.
        """
        roots = {name: address_of(a) for name, a in arrays.items()}
        space = (workspace, address_of(workspace)) if workspace is not None else None
        prepared = self._prepare(plan, stream)
        with self._begun(roots, plan, stream, space, again) as started:
            if only < 0 and until < 0:
                prepared.submit(roots, stream)
            else:
                for number, actions in enumerate(plan.actions):
                    if only in (-1, number) and not 0 <= until <= number:
                        self.act(actions, started)
            for name, target in (adds or {}).items():
                add(self.support, target, arrays[name], started.flag, len(plan.checks), stream)
        self.started = True
        return started

    def start_at(
        self,
        roots: dict[str, int],
        plan: LaunchPlan,
        stream: int,
        workspace: tuple[Any, int] | None,
        again: Again | None = None,
    ) -> Submission:
        """Submits every step on the addresses of contiguous arrays by buffer name, to which those of other memory are
        added.

        :param workspace: (what keeps it allocated, its address).
        :param again: nobody waits for the call, which has a deferred check if it can fail; gives the call's arrays, to
            find the value of a bad index, or None if they no longer exist.
        """
        prepared = self._prepare(plan, stream)
        with self._begun(roots, plan, stream, workspace, again) as started:
            prepared.submit(roots, stream)
        self.started = True
        return started

    def _begun(
        self,
        roots: dict[str, int],
        plan: LaunchPlan,
        stream: int,
        workspace: tuple[Any, int] | None,
        again: Again | None,
    ) -> Submission:
        """A call with memory and a clear error flag, whose steps are submitted next."""
        device = self.device
        own, base = workspace or (None, 0)
        if workspace is None and plan.workspace:
            own = device.memory(plan.workspace, stream)
            base = own.address
        fresh = self._fresh(roots, base, plan) if device.check else ()
        roots |= self._constants(stream)
        roots[WORKSPACE], roots[FLAG] = base, base + plan.scratch_start + plan.scratch_size
        started = Submission(plan, roots, stream, own)
        if device.check:
            device.begin(fresh, stream)
        if plan.checks and again is not None:
            pool = self._flags
            flag = pool.take(stream)
            roots[FLAG] = flag.address
            started.check, started.own_flag = self._check(plan, stream, again), (pool, flag)
        elif plan.checks:
            device.fill(roots[FLAG], 255, plan.flag.nbytes, stream)
        return started

    def _prepare(self, plan: LaunchPlan, stream: int) -> Prepared:
        """The plan prepared for calls, with the functions that it needs loaded; kept.

        :raises CaptureError: the stream is being captured, and functions would be loaded.
        """
        found: Prepared | None = self._prepared.get(plan)
        if found is not None:
            return found
        widths = {a.wide for actions in plan.actions for a in actions if isinstance(a, Launch)}
        if not (self.started and widths <= self._ready) and self.device.capturing(stream):
            raise CaptureError(
                f"the first call of {self.program.name} loads its kernels, which a capture cannot: run it once before"
            )
        found = self._prepared[plan] = self.device.prepare(plan)
        self._ready |= widths
        return found

    def _fresh(self, arrays: Roots, base: int, plan: LaunchPlan) -> list[Span]:
        """The uninitialised memory: the workspace, and outputs that do not reuse a donated input and are not put by."""
        inputs = {at for b, at in arrays.items() if self.program.buffer[b].kind == "input"}
        outputs = [
            b
            for b in (self.program.root(b) for _, b in self.program.outputs)
            if b in arrays and self.program.buffer[b].kind == "output" and b not in plan.kept
        ]
        u8 = np.dtype(np.uint8)
        return [
            Span(base, plan.workspace, u8),
            *(Span(arrays[b], plan.part(b).nbytes, u8) for b in outputs if arrays[b] not in inputs),
        ]

    def _constants(self, stream: int) -> dict[str, int]:
        """The program's constants on the device; uploaded by the first call."""
        if self._constant_roots is not None:
            return self._constant_roots
        with self._lock:
            if self._constant_roots is None:
                for name, array in self.constants.items():
                    memory = self.device.memory(max(array.nbytes, 1), stream)
                    self.device.upload(memory.address, array, stream)
                    self._uploaded[name] = memory
                self.device.synchronize(stream)  # another stream may read them next
                self._constant_roots = {name: memory.address for name, memory in self._uploaded.items()}
            return self._constant_roots

    def act(self, actions: Sequence[Action], started: Submission) -> None:
        submit(self.device, started.plan, actions, started.roots, started.stream)

    # -- bad indices ---------------------------------------------------------------------------------------------------

    def finish(self, started: Submission) -> None:
        """Wait for a call, and raise its error."""
        if not started.plan.checks:
            self.device.synchronize(started.stream)
            return
        words = self.device.read(started.flag, started.stream)
        error = self.error(started.plan, words, lambda number: self._before(number, started))
        if error is not None:
            raise error

    def _before(self, number: int, started: Submission) -> Submission | None:
        """A call in the state before a step whose check has failed; None if its inputs were overwritten.

        Temporaries that the check reads may share their memory with operands of products, which do not stop.
        """
        plan, roots = started.plan, [b.name for b in self.roots if b.kind in ("input", "output")]
        item = plan.steps[number]
        assert isinstance(item, Kernel)
        if not any(self.program.root(b) in plan.offsets for b in item.buffers):
            return started
        if len({started.roots[b] for b in roots if b in started.roots}) < len(roots):
            return None
        for actions in plan.actions[:number]:
            self.act(actions, started)
        return started

    @cached_property
    def _flags(self) -> FlagPool:
        return FlagPool(self.device, FLAG_WORDS + len(checks_of(self.program)))

    def _check(self, plan: LaunchPlan, stream: int, again: Again) -> DeferredCheck:
        """The deferred check of a call."""

        def repeated(number: int) -> Submission | None:
            arrays = again()
            return self.start(arrays, plan, None, stream, until=number) if arrays is not None else None

        def described(words: Array) -> Exception | None:
            with self.device.made_current():
                return self.error(plan, words, repeated)

        return DeferredCheck(self._flags, described)

    def error(self, plan: LaunchPlan, words: Array, ready: Callable[[int], Submission | None]) -> Exception | None:
        """The error in the words of a flag, or None; the step that set it is rerun to find the value of the index.

        :param ready: gives the call in the state before a step, or None if its arrays no longer exist.
        """
        if not (words[FLAG_WORDS:] != FINE).any():
            return None
        site = int(np.argmax(words[FLAG_WORDS:] != FINE))
        number, position = plan.checks[site], int(words[FLAG_WORDS + site])
        item = plan.steps[number]
        assert isinstance(item, Kernel)
        check = next(s for s in item.body if s.op == "check")
        op, source = next(iter(plan.kernel(item).sites), ("index", "?"))
        started = ready(number)
        if started is not None:
            self.act(plan.actions_of(number, item, position + 1), started)
            code, value, bound = self.device.read(started.flag, started.stream)[:3].view(np.int64).tolist()
            if code == CODES["GRADC_INDEX_OUT_OF_RANGE"]:
                return IndexOutOfRange(op, source, position, value, bound)
            if code == CODES["GRADC_DECREASES"]:
                return NotAscending(op, source, position, value, bound)
            if code != -1:
                return InternalError(f"{self.program.name} reported code {code} at {position}")
        return IndexOutOfRange(op, source, position, None, evaluate(check.attr("bound"), plan.dims))
