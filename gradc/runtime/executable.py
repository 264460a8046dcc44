"""Executable: a Program on a target, and everything that is checked before it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import (
    BufferTooSmall,
    CompilerMissing,
    GradcError,
    InvalidProblem,
    MisalignedOperand,
    OutOfMemory,
    OverlappingOperands,
    Unsupported,
    WorkspaceTooSmall,
)
from ..interp import bind_dims, by_name, check_nonempty, check_sizes, run_program, sizes_given
from ..ir.kernel import Kernel, Program, alternatives
from ..ir.types import Type
from ..ir.verify import verify_program, verify_sizes
from ..knobs import TARGETS
from ..passes.program.plan_buffers import donations, plan_buffers
from ..passes.program.precision import Precision, precision_of
from ..passes.reductions.cost import check_sorts, floor_bytes
from ..process.forks import cached_property, held_off, lock
from ..process.ieee import plain
from .cuda.pending import AsyncErrors
from .host.adopt import adopt
from .host.arrays import Host, Kind, overlap, worth_asking
from .host.pool import num_threads
from .host.tensors import written
from .shared import Shared

if TYPE_CHECKING:
    from .cuda.nvrtc import CudaBinary
    from .kernel import Kernels

Array = np.ndarray[Any, Any]


@dataclass
class Sizes:
    """What its sizes decide of a call, worked out once for each shape of its inputs.

    :param shapes: of the outputs, and ``nbytes`` their bytes.
    :param plan: of the machine code: offsets, workspace; None until it is asked for.
    """

    dims: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    nbytes: dict[str, int]
    plan: Any = None


@dataclass
class Prepared:
    """A call whose arguments have been found right.

    :param add_to: arrays that outputs are added to.
    :param loose: inputs that were packed.
    :param plan: of :class:`Sizes`.
    """

    arrays: dict[str, Array]
    outputs: dict[str, Array]
    dims: dict[str, int]
    kind: Kind
    given: dict[str, Any]
    add_to: dict[str, Array]
    stream: int = 0
    loose: tuple[str, ...] = ()
    plan: Any = None


class Executable(Shared):
    """A compiled program: ``run(**inputs)`` gives its outputs by name.

    :param program: scheduled, with strategies and slots.  :param target: ``cpu`` or ``numpy``.
    :param defaults: arrays for inputs that the caller need not give.
    :param dims: values of symbols that nothing binds.
    :param payload: the machine code of an earlier build; a program that is built now is refused where it could read or
        write outside its arrays.
    :param donate: inputs whose memory an output may take.  :param arch: of the target cuda, ``sm_90``.
    :param errors: ``"sync"``: a call waits and raises its own errors; ``"async"``: a later call or :meth:`synchronize`
        raises them.
    """

    def __init__(
        self,
        program: Program,
        target: str = "cpu",
        *,
        defaults: Mapping[str, Array] | None = None,
        dims: Mapping[str, int] | None = None,
        donate: Collection[str] = (),
        payload: bytes | None = None,
        sites: Any = None,
        arch: str = "",
        errors: str = "sync",
    ):
        if target not in TARGETS:
            raise Unsupported(f"the target {target!r}; there are {', '.join(TARGETS)}")
        self._undecided = verify_program(program) if payload is None else []
        if payload is None:
            program = plan_buffers(
                program
            )  # what a text says of slots is not believed: two that are in use at once may share one
        self.program, self.target, self.arch, self.errors = program, target, arch, errors
        self.pending = AsyncErrors()
        self.defaults, self.fixed_dims = dict(defaults or {}), dict(dims or {})
        self.inputs: dict[str, Type] = {b.name: b.type for b in program.of_kind("input") if not b.alias}
        self.output_buffers = dict(program.outputs)
        self.outputs: dict[str, Type] = {name: program.buffer[b].type for name, b in program.outputs}
        unknown = set(donate) - self.inputs.keys()
        if unknown:
            raise InvalidProblem(f"donate names {min(unknown)!r}; the inputs are {', '.join(self.inputs)}")
        self.donated = donations(program, dict.fromkeys(donate))
        self._payload, self._sites = payload, sites
        self._native: Any = None
        self._lock = lock(reentrant=True)
        self._sizes: dict[Any, Sizes] = {}
        self._roots = {key: program.root(b) for key, b in program.outputs}
        self.copied: dict[str, int] = {}  # inputs that lay in no order the kernels read, and in how many calls

    # -- the machine code ----------------------------------------------------------------------------------------------

    @property
    def native(self) -> Any:
        """The compiled C, built on first use."""
        if self._native is None:
            with self._lock:
                if self._native is None:
                    self._native = self._made()
        return self._native

    @native.setter
    def native(self, made: Any) -> None:
        self._native = made

    @plain()
    def _made(self) -> Any:
        if self.target == "cpu":
            with held_off:
                from .host.cpu import CpuProgram

            return CpuProgram(self.program, self._payload, self._sites)
        with held_off:
            from .cuda.calls import on_a_device

        return on_a_device(self, self._payload)

    def portable(self) -> bytes:
        """The machine code, as another machine may run it; for a GPU the text alone where there is no NVRTC."""
        if self.target != "cuda":
            return bytes(self.native.payload)
        try:
            return bytes(self.native.portable(self.binary.cubin, self.native.wide_cubin(self.fixed_dims, self.arch)))
        except CompilerMissing:
            return bytes(self.native.payload)

    @cached_property
    def place(self) -> Any:
        """Where arrays lie: :class:`.arrays.Host` or :class:`.on_device.OnDevice`."""
        if self.target != "cuda":
            return Host()
        with held_off:
            from .cuda.on_device import OnDevice

        return OnDevice(self.native.device, self.native.support)

    @cached_property
    def binary(self) -> CudaBinary:
        """What NVRTC makes of the CUDA text for the target's architecture: cubin, PTX and what each kernel takes. No
        GPU is needed.

        :raises Unsupported: another target.
        :raises CompilerMissing, CompilerError: see :func:`gradc.runtime.cuda.nvrtc.compile_cuda`.
        """
        with held_off:
            from .cuda.nvrtc import compile_cuda

        if self.target != "cuda":
            raise Unsupported(f"a binary for CUDA from the target {self.target!r}; target='cuda' has one")
        return compile_cuda(self.source, arch=self.arch)

    # -- checking ------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        inputs: Mapping[str, Any],
        out: Mapping[str, Any] | None = None,
        accumulate: bool | Collection[str] = False,
        dims: Mapping[str, int] | None = None,
        allocate: bool = True,
        stream: Any = None,
    ) -> Prepared:
        """Everything about a call that can be wrong is found here, before anything runs or is written."""
        name = self.program.name
        dims = sizes_given(dims)
        at = self.place.stream(stream, inputs.values())
        outputs = self._given_outputs(out, at)
        extra = inputs.keys() - self.inputs.keys()
        if extra:
            raise InvalidProblem(f"{name} has no input {min(extra)!r}; it has {', '.join(self.inputs)}")
        arrays, kinds, shapes = {}, [], []
        for key, type_ in self.inputs.items():
            if key in inputs:
                value = inputs[key]
            elif key in self.defaults:
                value = self.defaults[key]
            else:
                raise InvalidProblem(f"{name} needs the input {key!r}: {type_}")
            array, kind = self.place.read(value, at, f"the input {key}", self._constants)
            if array.dtype != type_.dtype.np:
                array = adopt(key, array, type_, kind, on_host=self.target != "cuda")
            arrays[key] = array
            shapes.append(array.shape)
            kinds.append(kind)
        sizes = self._sized(tuple(shapes), arrays, outputs, dims)
        adding = self._adding(accumulate, outputs)
        if outputs:
            self._check_outputs(arrays, sizes.shapes, outputs)
        loose = [key for key, array in arrays.items() if not ((flags := array.flags).c_contiguous and flags.aligned)]
        self._fits(sizes, outputs.keys() - adding, sum(arrays[key].nbytes for key in loose) if loose else 0)
        kind = self.place.kind(kinds)
        if allocate:
            for key in loose:
                self.copied[key] = self.copied.get(key, 0) + 1
                arrays[key] = self.place.packed(arrays[key], at)
            arrays = {key: self.place.settled(array, at) for key, array in arrays.items()}
        results = {key: array for key, array in outputs.items() if key not in adding}
        if allocate:
            for key in self.outputs:
                if key in results:
                    continue
                donor = "" if key in adding or not self.donated else self._donor(key, inputs, arrays, kind)
                shape, dtype = sizes.shapes[key], self.outputs[key].dtype.np
                results[key] = (
                    arrays[donor]
                    if donor
                    else (
                        self.place.scratch(shape, dtype, at)
                        if key in adding
                        else self.place.empty(shape, dtype, kind, at)
                    )
                )
        return Prepared(
            arrays,
            results,
            sizes.dims,
            kind,
            dict(inputs),
            {key: outputs[key] for key in adding},
            at,
            tuple(loose),
            sizes.plan,
        )

    @cached_property
    def _constants(self) -> set[int]:
        """The arrays of the host that even a GPU's module takes."""
        return {id(array) for array in self.defaults.values()}

    def _given_outputs(self, out: Any, stream: int) -> dict[str, Array]:
        """``out=`` as arrays."""
        if out is None:
            return {}
        if not isinstance(out, Mapping):
            raise InvalidProblem(
                f"out={type(out).__name__}: it maps names of outputs to arrays; the outputs are"
                f" {', '.join(self.outputs)}"
            )
        unknown = out.keys() - self.outputs.keys()
        if unknown:
            raise InvalidProblem(
                f"{self.program.name} has no output {min(unknown)!r}; it has {', '.join(self.outputs)}"
            )
        return {key: self.place.read(value, stream, f"out[{key!r}]")[0] for key, value in out.items()}

    def _adding(self, accumulate: Any, out: Mapping[str, Array]) -> set[str]:
        """The outputs that are added to."""
        if isinstance(accumulate, bool):
            if accumulate and not out:
                raise InvalidProblem("accumulate=True adds to the arrays of out=, and there are none")
            return set(out) if accumulate else set()
        names = (
            list(accumulate) if isinstance(accumulate, Collection) and not isinstance(accumulate, str) else [accumulate]
        )
        strange = [name for name in names if not isinstance(name, str) or name not in out]
        if strange:
            raise InvalidProblem(f"accumulate names {min(map(str, strange))!r}, for which out= gives no array")
        return set(names)

    def _donor(self, key: str, inputs: Mapping[str, Any], arrays: Mapping[str, Array], kind: Kind) -> str:
        """The donated input whose memory an output takes in this call: no default's, and none that another input looks
        at too.
        """
        donor = self.donated.get(self.output_buffers[key], "")
        if (
            not donor
            or donor not in inputs
            or not arrays[donor].flags.writeable
            or not self.place.donates(arrays[donor], kind)
        ):
            return ""
        return "" if any(overlap(arrays[donor], other) for name, other in arrays.items() if name != donor) else donor

    def _sized(
        self, shapes: tuple[Any, ...], arrays: Mapping[str, Array], out: Mapping[str, Array], dims: Mapping[str, int]
    ) -> Sizes:
        key = (
            shapes,
            tuple(sorted(dims.items())) if dims else (),
            tuple((n, a.shape) for n, a in out.items()) if out else (),
        )
        found = self._sizes.get(key)
        if found is not None:
            return found
        given = {**self.fixed_dims, **dims}
        bound = bind_dims(self.inputs, {n: a.shape for n, a in arrays.items()}, given)
        for name, array in out.items():
            for size, got in zip(self.outputs[name].shape, array.shape, strict=False):
                if str(size) in self.program.dims:
                    bound.setdefault(str(size), got)
        unbound = [d for d in self.program.dims if d not in bound]
        if unbound:
            raise InvalidProblem(
                f"{self.program.name}: nothing binds the dim {unbound[0]}; give dims={{{unbound[0]!r}: ...}} to compile"
                " or to the call"
            )
        for fact in self.program.assumptions:
            if fact.fails(bound):
                raise InvalidProblem(
                    f"{self.program.name} has {fact}, and here {', '.join(f'{k}={v}' for k, v in bound.items())}"
                )
        for kernel in self._undecided:
            verify_sizes(kernel, self.program, bound)
        check_sizes(self.program, bound)
        check_nonempty(self.program, bound)
        check_sorts(self.program, bound)
        if len(self._sizes) > 256:
            self._sizes.clear()
        concrete = {name: type_.concrete(bound) for name, type_ in self.outputs.items()}
        made = self._sizes[key] = Sizes(
            bound, concrete, {name: prod(shape) * self.outputs[name].dtype.itemsize for name, shape in concrete.items()}
        )
        return made

    def _check_outputs(
        self, arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], out: Mapping[str, Array]
    ) -> None:
        """The arrays of ``out=`` can be written."""
        taken: list[tuple[str, Array]] = []
        for key, array in out.items():
            type_ = self.outputs[key]
            shape = shapes[key]
            if array.dtype != type_.dtype.np:
                raise InvalidProblem(f"out[{key!r}] is {array.dtype}, the output is {type_}")
            if array.nbytes < int(np.prod(shape, dtype=np.int64)) * array.itemsize:
                raise BufferTooSmall(int(np.prod(shape, dtype=np.int64)) * array.itemsize, array.nbytes, key)
            if array.shape != shape:
                raise InvalidProblem(f"out[{key!r}] has the shape {array.shape}, the output {type_} {shape}")
            if not array.flags.c_contiguous or not array.flags.aligned:
                raise MisalignedOperand(f"out[{key!r}] is not contiguous and aligned (strides {array.strides})")
            if not array.flags.writeable:
                raise InvalidProblem(f"out[{key!r}] is read-only")
            donor = self.donated.get(self.output_buffers[key])
            for name, source in arrays.items():
                own = name == donor and array.ctypes.data == source.ctypes.data and source.flags.c_contiguous
                if overlap(array, source) and not own:
                    raise OverlappingOperands(
                        f"out[{key!r}] shares memory with the input {name}; donate=[...] allows a donated input's"
                        " memory"
                    )
            for other, earlier in taken:
                if overlap(array, earlier):
                    raise OverlappingOperands(f"out[{key!r}] shares memory with out[{other!r}]")
            taken.append((key, array))

    def _fits(self, sizes: Sizes, given: Collection[str], copies: int) -> None:
        """OutOfMemory before anything is launched, where what must be allocated exceeds what the system has left."""
        needed = copies + sum(
            sizes.nbytes.values() if not given else [n for name, n in sizes.nbytes.items() if name not in given]
        )
        if self.target != "numpy":
            if sizes.plan is None:
                sizes.plan = self.native.bind(sizes.dims)
            needed += sizes.plan.workspace + self._threads_keep(sizes.plan)
        if needed > worth_asking():
            limit = self.place.left()
            if needed > limit.left:
                raise OutOfMemory(
                    f"{self.program.name} needs {needed} bytes of outputs and workspace, {limit.left} are left"
                    f" ({limit.name}, {limit.total} in all)"
                )

    def can_implement(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        out: Mapping[str, Any] | None = None,
        accumulate: bool | Collection[str] = False,
        dims: Mapping[str, int] | None = None,
        stream: Any = None,
        workspace: Any = None,
        **more: Any,
    ) -> GradcError | None:
        """None if the call is right, else the error it would raise, before anything runs.

        Dtypes, shapes, strides, lengths, alignment, aliasing and memory are checked; values are not.
        """
        try:
            prepared = self.prepare(
                by_name(self.program.name, self.inputs, inputs, (), more), out, accumulate, dims, False, stream
            )
            self._workspace(workspace, prepared)
        except GradcError as error:
            return error
        return None

    def _workspace(self, workspace: Any, prepared: Prepared) -> Array | None:
        if workspace is None:
            return None
        array, _ = self.place.read(workspace, prepared.stream, "the workspace")
        needed = self.workspace_size(**{d: prepared.dims[d] for d in self.program.dims})
        if array.nbytes < needed:
            raise WorkspaceTooSmall(needed, array.nbytes)
        if (
            not array.flags.c_contiguous
            or not array.flags.writeable
            or (needed and array.ctypes.data % self.place.align)
        ):
            raise MisalignedOperand(
                f"the workspace is not contiguous, writable memory at a multiple of {self.place.align} bytes"
            )
        for what, others in (("input", prepared.arrays), ("output", prepared.outputs), ("output", prepared.add_to)):
            for name, other in others.items():
                if overlap(array, other):
                    raise OverlappingOperands(f"the workspace shares memory with the {what} {name}")
        return array.reshape(-1).view(np.uint8)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *extra: Any,
        out: Mapping[str, Any] | None = None,
        accumulate: bool | Collection[str] = False,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """The outputs, by name; arrays are of the kind that went in.

        :param inputs: arrays by name, for those that are not given as keywords (an input may be called ``out``).
        :param out: arrays to write outputs into.
        :param accumulate: True, or the names of ``out`` that are added to instead of written.
        :param workspace: memory of at least ``workspace_size(**dims)`` bytes.
        :param stream: for accelerators; the CPU has none.
        :raises InvalidProblem, OverlappingOperands, WorkspaceTooSmall...: before anything runs.
        :raises IndexOutOfRange: a data-dependent index; no output that depends on it was returned.
        :raises KeyboardInterrupt: or what else the handler of a signal raised, on the main thread; arrays of ``out``
            and ``workspace`` are undefined.
        """
        return self.run_bound(
            by_name(self.program.name, self.inputs, inputs, extra, more), out, accumulate, stream, workspace, dims
        )[0]

    def run_bound(
        self,
        inputs: Mapping[str, Any],
        out: Mapping[str, Any] | None,
        accumulate: bool | Collection[str],
        stream: Any,
        workspace: Any,
        dims: Mapping[str, int] | None,
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """:meth:`run`, and the dims the call bound."""
        self.pending.check()
        prepared = self.prepare(inputs, out, accumulate, dims, True, stream)
        self.launch(prepared, self._workspace(workspace, prepared))
        given = out or {}
        if given or self.donated:
            written(*given.values(), *(inputs[name] for name in self.donated.values() if name in inputs))
        results = {
            key: given[key] if key in given else self.place.result(prepared.outputs[key], prepared.kind)
            for key in self.outputs
        }
        return results, prepared.dims

    __call__ = run

    def launch(self, prepared: Prepared, workspace: Array | None = None, only: int = -1) -> None:
        """Run on prepared arrays; outputs are filled, and added where that was asked for.  ``only``: one step, on the
        CPU.
        """
        if self.target.startswith("cuda"):
            from .cuda.calls import call

            with (
                plain() if self.target == "cuda-sim" else contextlib.nullcontext()
            ):  # a GPU has an environment of its own
                return call(self, prepared, self.bound(prepared), self.native.bind(prepared.dims), workspace)
        if self.target == "numpy":
            for key, value in run_program(self.program, prepared.arrays, prepared.dims).items():
                prepared.outputs[key][...] = value
        else:
            self.native.run(self.bound(prepared), prepared.plan, workspace, only)
        if prepared.add_to:
            with plain():
                for key, total in prepared.add_to.items():
                    np.add(total, prepared.outputs[key], out=total)

    def bound(self, prepared: Prepared) -> dict[str, Array]:
        """Inputs and outputs of a call, by buffer."""
        return prepared.arrays | {self._roots[key]: array for key, array in prepared.outputs.items()}

    def capture(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        out: Mapping[str, Any] | None = None,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Any:
        """A call as a CUDA graph over these arrays (:class:`gradc.runtime.cuda.capture.Capture`), run once now."""
        with held_off:
            from .cuda.capture import capture, step, stream_for

        given = by_name(self.program.name, self.inputs, inputs, (), more)
        at = stream_for(self, stream, given.values())
        only = step(self, given, at, out, workspace, dims)
        return capture([only], at, only.results)

    def synchronize(self) -> None:
        """Wait for the calls that were asked for, and raise the first error of theirs."""
        self.pending.wait()
        if self.target == "cuda" and self._native is not None and self._native.started:
            self._native.device.synchronize()

    # -- looking -------------------------------------------------------------------------------------------------------

    def thread_bytes(self, bound: Mapping[str, int]) -> int:
        """Bytes that the threads of the CPU keep for such calls, all together: rows held from pass to pass, packed
        parts of a product's operands.
        """
        return self._threads_keep(self.native.bind(bound)) if self.target == "cpu" else 0

    def _threads_keep(self, plan: Any) -> int:
        return plan.local * num_threads() if self.target == "cpu" and plan.local else 0

    def workspace_size(self, **dims: int) -> int:
        """Bytes of workspace for these dims (those given to compile need not be repeated)."""
        bound = {**self.fixed_dims, **sizes_given(dims)}
        missing = [d for d in self.program.dims if d not in bound]
        if missing:
            raise InvalidProblem(f"workspace_size needs {', '.join(missing)}")
        check_sizes(self.program, bound)
        check_sorts(self.program, bound)
        return 0 if self.target == "numpy" else int(self.native.bind(bound).workspace)

    def sku(self, **dims: int) -> str:
        """One name for what this is: program, target, dtypes and sizes."""
        sizes = "_".join(f"{k}{v}" for k, v in {**self.fixed_dims, **dims}.items())
        dtypes = "_".join(dict.fromkeys(str(t.dtype) for t in self.inputs.values()))
        return ".".join(part for part in (self.program.name, self.target, dtypes, sizes) if part)

    @property
    def precision(self) -> Precision:
        """What it computes and accumulates in, read off its kernels."""
        return precision_of(self.program, self.target)

    @property
    @plain()
    def source(self) -> str:
        """The C or CUDA text."""
        if self.target.startswith("cuda"):
            return str(self.native.text)
        with held_off:
            from ..codegen.cpu.program import render_program

        return render_program(self.program).text

    @property
    def kernels(self) -> Kernels:
        """Every kernel by name, each printable, runnable and timeable alone."""
        with held_off:
            from .kernel import kernels_of

        return kernels_of(self)

    def floor(self, **dims: int) -> int:
        """Bytes that any implementation must move."""
        return floor_bytes(self.program, {**self.fixed_dims, **dims})

    def __str__(self) -> str:
        lines = [f"{self.program.name} on {self.target}: {len(self.program.steps)} steps"]
        for step in self.program.steps:
            for item in alternatives(step):
                how = ", ".join(f"{b} {s}" for b, s in item.strategy) if isinstance(item, Kernel) else "library"
                lines.append(f"  {item.name:<40} {how}")
        return "\n".join(lines)
