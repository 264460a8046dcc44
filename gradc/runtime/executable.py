"""Executable: a Program compiled for a target, and the checks of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analysis.cost import check_sorts, floor_bytes
from ..analysis.lifetimes import donations
from ..analysis.precision import Precision, precision_of
from ..errors import (
    BufferTooSmall,
    CaptureError,
    GradcError,
    InvalidProblem,
    MisalignedOperand,
    OutOfMemory,
    OverlappingOperands,
    Unsupported,
    WorkspaceTooSmall,
)
from ..interp import (
    bind_dims,
    by_name,
    check_conditions,
    check_nonempty,
    check_sizes,
    refuse_inputs_as_options,
    sizes_given,
)
from ..ir.kernel import Call, Kernel, Program, alternatives, refuse_stored_rows, refuse_sweeps
from ..ir.types import Type
from ..ir.verify import verify_accesses, verify_program, verify_sizes
from ..knobs import TARGETS
from ..passes.program.plan_buffers import plan_buffers
from ..process.forks import cached_property, held_off
from .backend import NO_ALLOCATION, Array, Backend, BoundCall
from .cuda.pending import AsyncErrors
from .host.adopt import adopt
from .host.arrays import Arguments, Kind, Results, address_of, is_copy, overlap, overlapping, worth_asking
from .host.backend import CpuBackend, NumpyBackend
from .host.tensors import detached, is_tensor, written
from .recent import Recent
from .shared import Shared

if TYPE_CHECKING:
    from .cuda.capture import Capture, Step
    from .cuda.nvrtc import CudaBinary
    from .kernel import Kernels


@dataclass
class Sizes:
    """Values determined by the sizes of a call, computed once per set of input shapes.

    :param shapes: of the outputs.
    :param nbytes: of the outputs.
    :param plan: :meth:`.Backend.plan`; None until the first call with these sizes is checked.
    """

    dims: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    nbytes: dict[str, int]
    plan: Any = None


class Executable(Shared):
    """A compiled program: ``run(**inputs)`` gives its outputs by name.

    :param program: scheduled, with strategies and slots.
    :param target: ``cpu``, ``numpy``, ``cuda`` or ``cuda-sim``.
    :param defaults: arrays for inputs that the caller may omit.
    :param dims: values of symbols that no input determines.
    :param payload: the machine code of an earlier build; without it the program is verified first, and rejected if it
        could access memory outside its arrays.
    :param sites: the checks in ``payload``: number -> (op, source).
    :param undecided: with ``payload``, the names of :attr:`undecided`; None where they are not known.
    :param donate: inputs whose memory may be reused for outputs.
    :param arch: the architecture for the target cuda, ``sm_90``.
    :param errors: ``"sync"``: a call waits and raises its own errors; ``"async"``: a later call or :meth:`synchronize`
        raises them.
    :ivar backend: the target's memory, loaded code and launches.
    :ivar exclusive: inputs that share memory with no other one, beside those that are donated, in calls that are not
        bound: others, :meth:`repeated` leaves to :meth:`bind_call`.
    :ivar copied: inputs that were copied because of their memory order -> number of calls.
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
        sites: Mapping[int, tuple[str, str]] | None = None,
        undecided: Collection[str] | None = None,
        arch: str = "",
        errors: str = "sync",
    ):
        if target not in TARGETS:
            raise Unsupported(f"the target {target!r}; there are {', '.join(TARGETS)}")
        self._undecided: list[Kernel | Call] | None = None
        if payload is None:
            self._undecided = verify_program(program)
        elif undecided is not None:
            items = [item for step in program.steps for item in alternatives(step)] if undecided else []
            self._undecided = [item for item in items if item.name in undecided]
        if payload is None:  # slots of a parsed program are not trusted: buffers in use at once might share one
            program = plan_buffers(program)
        self.program, self.target, self.arch, self.errors = program, target, arch, errors
        self.backend = self._new_backend(payload, sites)
        self.pending = AsyncErrors()
        self.defaults, self.fixed_dims = dict(defaults or {}), dict(dims or {})
        self.inputs: dict[str, Type] = {b.name: b.type for b in program.of_kind("input") if not b.alias}
        self.output_buffers = dict(program.outputs)
        self.outputs: dict[str, Type] = {name: program.buffer[b].type for name, b in program.outputs}
        unknown = set(donate) - self.inputs.keys()
        if unknown:
            raise InvalidProblem(f"donate names {min(unknown)!r}; the inputs are {', '.join(self.inputs)}")
        self.donated = donations(program, dict.fromkeys(donate))
        self._sizes: Recent[Any, Sizes] = Recent(256)
        self.copied: dict[str, int] = {}
        self.exclusive: Collection[str] = ()

    def _new_backend(self, payload: bytes | None, sites: Mapping[int, tuple[str, str]] | None) -> Backend:
        if self.target == "numpy":
            return NumpyBackend(self.program)
        if self.target == "cpu":
            refuse_sweeps(self.program, self.target)
            refuse_stored_rows(self.program, self.target)
            return CpuBackend(self.program, payload, sites)
        with held_off:
            from ..codegen.cuda.finished_rows import refuse_handed_on
            from ..codegen.cuda.tiles.kernel import refuse_tiles
            from .cuda.backend import GpuBackend, SimulatorBackend

        refuse_tiles(self.program, self.target, self.arch or "")
        refuse_handed_on(self.program, self.target)
        if self.target == "cuda-sim":
            return SimulatorBackend(self.program)
        return GpuBackend(self.program, payload, arch=self.arch, errors=self.errors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without its machine code."""
        made = functools.partial(
            Executable,
            defaults=self.defaults,
            dims=self.fixed_dims,
            donate=tuple(self.donated.values()),
            arch=self.arch,
            errors=self.errors,
        )
        return made, (self.program, self.target)

    def sibling(self, program: Program) -> Executable:
        """An Executable of another program for the same target, with the same fixed dims."""
        return Executable(program, self.target, arch=self.arch, dims=self.fixed_dims)

    # -- the machine code ----------------------------------------------------------------------------------------------

    @property
    def native(self) -> Any:
        """The loaded machine code, compiled at its first use."""
        return self.backend.native

    def portable(self) -> bytes:
        """The machine code in a form that another machine of the same architecture can run; for a GPU, only the source
        if there is no NVRTC.
        """
        return self.backend.portable(self.fixed_dims)

    @property
    def binary(self) -> CudaBinary:
        """NVRTC's output for the target's architecture: cubin, PTX and the resources of each kernel.  No GPU is needed.

        :raises Unsupported: the target is not cuda, or a block takes more shared memory or registers than the
            architecture gives one.
        :raises CompilerMissing, CompilerError: see :func:`gradc.runtime.cuda.nvrtc.compile_cuda`.
        """
        return self.backend.binary

    @property
    def undecided(self) -> list[Kernel | Call]:
        """What is not known to stay inside its arrays for all sizes, and is checked for those of a call."""
        if self._undecided is None:
            self._undecided = verify_accesses(self.program)
        return self._undecided

    # -- checking ------------------------------------------------------------------------------------------------------

    def bind_call(
        self,
        inputs: Arguments,
        out: Arguments | None = None,
        accumulate: bool | Collection[str] = False,
        dims: Mapping[str, int] | None = None,
        allocate: bool = True,
        stream: Any = None,
    ) -> BoundCall:
        """Checks the arguments completely, before anything is run or written, and binds them to a call.

        :param allocate: False does not allocate results or copies of inputs.
        """
        backend = self.backend
        dims = sizes_given(dims)
        at = backend.stream(stream, inputs.values() if inputs or not isinstance(out, Mapping) else out.values())
        outputs, kinds_given = self._given_outputs(out, at)
        arrays, kinds = self._read_inputs(inputs, at)
        kind, captured = backend.kind(kinds if inputs else kinds_given), backend.capturing(at)
        sizes = self._sized(tuple([array.shape for array in arrays.values()]), arrays, outputs, dims)
        adding = self._adding(accumulate, outputs)
        if outputs:
            self._check_outputs(arrays, sizes.shapes, outputs)
        noncontiguous = [key for key, a in arrays.items() if not ((flags := a.flags).c_contiguous and flags.aligned)]
        copies = sum(arrays[key].nbytes for key in noncontiguous) if noncontiguous else 0
        if sizes.plan is None:
            sizes.plan = backend.plan(sizes.dims, self._lenders(outputs))
        if backend.on_host or not allocate:
            lent = self._lent(inputs.keys() - set(noncontiguous)) if self.donated else set()
            self._fits(sizes, (outputs.keys() - adding) | lent, copies)
        add_to = {key: outputs[key] for key in adding}
        results = {key: array for key, array in outputs.items() if key not in adding}
        call = BoundCall(
            arrays,
            results,
            sizes.dims,
            kind,
            dict(inputs),
            add_to,
            at,
            tuple(noncontiguous),
            sizes.plan,
            captured,
            not captured or backend.allocates_captured(at, kind),
            exclusive=self.exclusive,
        )
        if allocate:
            try:
                self._allocate(call, sizes)
            except OutOfMemory as error:
                self._fits(sizes, outputs.keys() - adding, copies)  # says how much is needed and left
                needed = self._needed(sizes, outputs.keys() - adding, copies)
                error.add_note(f"{self.program.name} needs {needed} bytes of outputs and workspace")
                raise
        return call

    def _allocate(self, call: BoundCall, sizes: Sizes) -> None:
        """Completes a bound call: copies inputs that are not in row-major order or not on the device, allocates
        results.
        """
        backend, arrays, results, at = self.backend, call.arrays, call.outputs, call.stream
        for key in call.noncontiguous:
            self.copied[key] = self.copied.get(key, 0) + 1
            arrays[key] = backend.contiguous(arrays[key], at)
        backend.place_inputs(call)
        call.donors = self.donors(call) if self.donated else {}
        for key, type_ in self.outputs.items():
            if key in results:
                continue
            shape, dtype = sizes.shapes[key], type_.dtype.np
            if key in call.add_to:
                results[key] = backend.scratch(shape, dtype, at, call.kind)
            elif key in call.donors:
                results[key] = arrays[call.donors[key]]
            else:
                if not call.allocates:
                    raise CaptureError(NO_ALLOCATION)
                results[key] = backend.empty(shape, dtype, call.kind, at)

    def _read_inputs(self, inputs: Arguments, stream: int) -> tuple[dict[str, Array], list[Kind]]:
        """(the inputs as arrays of their declared dtypes, the libraries they came from)."""
        extra = inputs.keys() - self.inputs.keys()
        if extra:
            raise InvalidProblem(f"{self.program.name} has no input {min(extra)!r}; it has {', '.join(self.inputs)}")
        backend, constants = self.backend, self._constants
        arrays: dict[str, Array] = {}
        kinds: list[Kind] = []
        for key, type_ in self.inputs.items():
            if key in inputs:
                value = inputs[key]
            elif key in self.defaults:
                value = self.defaults[key]
            else:
                raise InvalidProblem(f"{self.program.name} needs the input {key!r}: {type_}")
            array, kind = backend.read(value, stream, f"the input {key}", constants)
            if array.dtype != type_.dtype.np:
                array = adopt(key, array, type_, kind, backend.on_host)
            arrays[key] = array
            kinds.append(kind)
        return arrays, kinds

    @cached_property
    def _constants(self) -> set[int]:
        """The ids of host arrays that are accepted on a GPU, too: the defaults."""
        return {id(array) for array in self.defaults.values()}

    def _given_outputs(self, out: Any, stream: int) -> tuple[dict[str, Array], list[Kind]]:
        """(``out=`` as arrays, the libraries they came from)."""
        if out is None:
            return {}, []
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
        read = {key: self.backend.read(value, stream, f"out[{key!r}]") for key, value in out.items()}
        for key, (array, _) in read.items():
            if self.backend.on_host and is_copy(array, out[key]):
                raise InvalidProblem(
                    f"out[{key!r}] is a {type(out[key]).__name__} that is read as a copy, in which a result would be"
                    " lost: pass an array of the machine's byte order, or a tensor without a lazy minus sign"
                )
        return {key: array for key, (array, _) in read.items()}, [kind for _, kind in read.values()]

    def _adding(self, accumulate: Any, out: Mapping[str, Array]) -> set[str]:
        """The names of the outputs to accumulate."""
        if isinstance(accumulate, bool):
            if accumulate and not out:
                raise InvalidProblem("accumulate=True adds to the arrays of out=, and there are none")
            return set(out) if accumulate else set()
        names = (
            list(accumulate) if isinstance(accumulate, Collection) and not isinstance(accumulate, str) else [accumulate]
        )
        unknown = [name for name in names if not isinstance(name, str) or name not in out]
        if unknown:
            raise InvalidProblem(f"accumulate names {min(map(str, unknown))!r}, for which out= gives no array")
        return set(names)

    def _lenders(self, given: Collection[str]) -> frozenset[str]:
        """The output buffers that lie in no array of the caller's: not in those of ``out=``, not in donated inputs."""
        root = self.program.root
        owned = {*self.donated, *(root(self.output_buffers[name]) for name in given)}
        return frozenset(root(buffer) for buffer in self.output_buffers.values()) - owned

    def _lent(self, given: Collection[str]) -> set[str]:
        """The outputs for which these inputs may lend memory, of which nothing need be left."""
        return {key for key, buffer in self.output_buffers.items() if self.donated.get(buffer) in given}

    def donors(self, call: BoundCall) -> dict[str, str]:
        """Output -> the donated input whose memory it reuses in this call; not a default, and not one that overlaps
        another input.
        """
        arrays, given, shared = call.arrays, call.given, overlapping(call.arrays)
        found = {key: self.donated.get(buffer, "") for key, buffer in self.output_buffers.items()}
        return {
            key: donor
            for key, donor in found.items()
            if donor in given
            and donor not in shared
            and arrays[donor].flags.writeable
            and self.backend.donates(arrays[donor], call.kind)
        }

    def _sized(
        self, shapes: tuple[Any, ...], arrays: Mapping[str, Array], out: Mapping[str, Array], dims: Mapping[str, int]
    ) -> Sizes:
        key = (
            shapes,
            tuple(sorted(dims.items())) if dims else (),
            tuple((n, a.shape) for n, a in out.items()) if out else (),
        )
        sizes = self._sizes.get(key)
        if sizes is not None:
            return sizes
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
        for kernel in self.undecided:
            verify_sizes(kernel, self.program, bound)
        check_sizes(self.program, bound)
        check_nonempty(self.program, bound)
        check_sorts(self.program, bound)
        check_conditions(self.program, bound)
        concrete = {name: type_.concrete(bound) for name, type_ in self.outputs.items()}
        made = self._sizes[key] = Sizes(
            bound, concrete, {name: prod(shape) * self.outputs[name].dtype.itemsize for name, shape in concrete.items()}
        )
        return made

    def _check_outputs(
        self, arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], out: Mapping[str, Array]
    ) -> None:
        """Checks that the arrays of ``out=`` can be written."""
        taken: list[tuple[str, Array]] = []
        for key, array in out.items():
            type_ = self.outputs[key]
            shape = shapes[key]
            if array.dtype != type_.dtype.np:
                raise InvalidProblem(f"out[{key!r}] is {array.dtype}, the output is {type_}")
            if array.nbytes < prod(shape) * array.itemsize:
                raise BufferTooSmall(prod(shape) * array.itemsize, array.nbytes, key)
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

    def _needed(self, sizes: Sizes, given: Collection[str], copies: int) -> int:
        """Bytes that a call allocates for what it is not given."""
        made = sizes.nbytes.values() if not given else [n for name, n in sizes.nbytes.items() if name not in given]
        needed: int = copies + sum(made) + sizes.plan.workspace + self.backend.thread_bytes(sizes.plan)
        return needed

    def _fits(self, sizes: Sizes, given: Collection[str], copies: int) -> None:
        """OutOfMemory, before anything is launched, if the memory to allocate exceeds what is available."""
        needed = self._needed(sizes, given, copies)
        if needed > worth_asking():
            limit = self.backend.left()
            if needed > limit.left:
                raise OutOfMemory(
                    f"{self.program.name} needs {needed} bytes of outputs and workspace, {limit.left} are left"
                    f" ({limit.name}, {limit.total} in all)"
                )

    def can_implement(
        self,
        inputs: Arguments | None = None,
        /,
        *,
        out: Arguments | None = None,
        accumulate: bool | Collection[str] = False,
        dims: Mapping[str, int] | None = None,
        stream: Any = None,
        workspace: Any = None,
        **more: Any,
    ) -> GradcError | None:
        """None if the call is valid, else the error it would raise; nothing is run.

        Dtypes, shapes, strides, lengths, alignment, aliasing and memory are checked, values are not.
        """
        try:
            call = self.bind_call(
                by_name(self.program.name, self.inputs, inputs, (), more), out, accumulate, dims, False, stream
            )
            self._workspace(workspace, call)
        except GradcError as error:
            return error
        return None

    def _workspace(self, workspace: Any, call: BoundCall) -> Array | None:
        """``workspace=`` as an array of bytes, checked."""
        if workspace is None:
            return None
        array, _ = self.backend.read(workspace, call.stream, "the workspace")
        needed = self.workspace_size(**{d: call.dims[d] for d in self.program.dims})
        if array.nbytes < needed:
            raise WorkspaceTooSmall(needed, array.nbytes)
        if (
            not array.flags.c_contiguous
            or not array.flags.writeable
            or (needed and array.ctypes.data % self.backend.align)
        ):
            raise MisalignedOperand(
                f"the workspace is not contiguous, writable memory at a multiple of {self.backend.align} bytes"
            )
        for role, others in (("input", call.arrays), ("output", call.outputs), ("output", call.add_to)):
            for name, other in others.items():
                if overlap(array, other):
                    raise OverlappingOperands(f"the workspace shares memory with the {role} {name}")
        return array.reshape(-1).view(np.uint8)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(
        self,
        inputs: Arguments | None = None,
        /,
        *extra: Any,
        out: Arguments | None = None,
        accumulate: bool | Collection[str] = False,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Results:
        """The outputs by name, as arrays of the inputs' library.

        :param inputs: arrays by name, for inputs that are not given as keywords (one may be called ``out``).
        :param out: arrays to write outputs into.
        :param accumulate: True, or the names of those in ``out`` to add to instead of overwriting them.
        :param workspace: memory of at least ``workspace_size(**dims)`` bytes.
        :param stream: of an accelerator; not for the CPU.
        :raises InvalidProblem, OverlappingOperands, WorkspaceTooSmall...: before anything is run.
        :raises IndexOutOfRange: a data-dependent index is out of range; no output that depends on it is returned.
        :raises KeyboardInterrupt: or another exception of a signal handler, on the main thread; the contents of ``out``
            and ``workspace`` are undefined.
        """
        given = by_name(self.program.name, self.inputs, inputs, extra, more)
        options = {"out": out, "accumulate": accumulate, "stream": stream, "workspace": workspace, "dims": dims}
        refuse_inputs_as_options(self.program.name, self.inputs.keys() - self.defaults.keys(), given, **options)
        return self.run_bound(given, out, accumulate, stream, workspace, dims)[0]

    def takes_all(self, donors: Mapping[str, str]) -> bool:
        """Whether a call with these :meth:`donors` writes over every input that it may write over."""
        return set(self.donated.values()) <= set(donors.values())

    def described(self, inputs: Arguments, out: Any, dims: Mapping[str, int] | None, stream: Any) -> Any:
        """What a call is without its addresses, for :meth:`repeated`; None: it must be bound."""
        if self.donated and not self.backend.on_host:
            return None
        given = {**self.defaults, **inputs} if self.defaults and self.backend.on_host else inputs
        return self.backend.described(given, out, dims, stream)

    def repeated(
        self, described: Any, inputs: Arguments, out: Arguments | None
    ) -> tuple[Results, dict[str, int]] | None:
        """Runs a call that has been checked but for its addresses, as :meth:`run_bound`; None, and nothing was done, if
        it has not.
        """
        if described is None or described.known is None:
            return None
        self.pending.check()
        done = self.backend.repeat(described, inputs, out or {}, self._rebind)
        if done is None:
            return None
        results, bound, check = done
        if check is not None:
            self.pending.add(check)
        if out:
            written(*out.values())
        return {key: results[key] for key in self.outputs}, bound

    def run_bound(
        self,
        inputs: Arguments,
        out: Arguments | None,
        accumulate: bool | Collection[str],
        stream: Any,
        workspace: Any,
        dims: Mapping[str, int] | None,
        described: Any = None,
    ) -> tuple[Results, dict[str, int]]:
        """(the results of :meth:`run`, the values of the dims).

        :param described: what :meth:`described` said of the call, if it was asked.
        """
        if described is None and workspace is None and accumulate is False:
            described = self.described(inputs, out, dims, stream)
        done = self.repeated(described, inputs, out)
        if done is not None:
            return done
        call = self.bind_call(inputs, out, accumulate, dims, True, stream)
        if not call.captured:  # the error of an earlier call is none of the capture's
            self.pending.check()
        self.launch(call, self._workspace(workspace, call))
        if described is not None and self.takes_all(call.donors):
            self.backend.remember(described, call)
        given = out or {}
        if given or self.donated:
            over = [donor for key, donor in call.donors.items() if key not in given and donor not in call.noncontiguous]
            written(*given.values(), *(inputs[name] for name in over))
        results = {key: given[key] if key in given else self._result(call, key) for key in self.outputs}
        return results, call.dims

    def _result(self, call: BoundCall, key: str) -> Any:
        """An output in the library of the call; a tensor that it was written over, itself."""
        array, over = call.outputs[key], call.given.get(call.donors.get(key, ""))
        if over is not None and is_tensor(over) and self.backend.on_host and over.data_ptr() == address_of(array):
            return detached(over)
        return self.backend.result(array, call.kind)

    __call__ = run

    def launch(self, call: BoundCall, workspace: Array | None = None, only: int = -1) -> None:
        """Runs a bound call: writes its outputs, or adds them to the arrays of ``accumulate=``.

        :param only: the number of the only step to run; on the CPU.
        """
        check = self.backend.launch(call, workspace, self._rebind, only)
        if check is not None:
            self.pending.add(check)

    def _rebind(self, inputs: Arguments, dims: Mapping[str, int], stream: int) -> BoundCall:
        return self.bind_call(inputs, dims=dims, stream=stream)

    def capture(
        self,
        inputs: Arguments | None = None,
        /,
        *,
        out: Arguments | None = None,
        stream: Any = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
        **more: Any,
    ) -> Capture:
        """Runs a call once and captures it as a CUDA graph over these arrays
        (:class:`gradc.runtime.cuda.capture.Capture`).
        """
        with held_off:
            from .cuda.capture import capture, stream_for

        given = by_name(self.program.name, self.inputs, inputs, (), more)
        at = stream_for(self.backend, stream, given.values())
        only = self.capture_step(given, at, out, workspace, dims)
        return capture([only], at, only.results)

    def capture_step(
        self,
        inputs: Arguments,
        stream: int,
        out: Arguments | None = None,
        workspace: Any = None,
        dims: Mapping[str, int] | None = None,
    ) -> Step:
        """Runs a call once and returns it as a step of a CUDA graph to be captured from ``stream``."""
        with held_off:
            from .cuda.capture import step

        call = self.bind_call(inputs, out, False, dims, True, stream)
        return step(self.backend, call, self._workspace(workspace, call), out or {})

    def time_last_step(self, inputs: Arguments, repeat: int, dims: Mapping[str, int]) -> float:
        """The run time of the last step in seconds: the median of ``repeat`` runs, after one run of all steps (earlier
        steps check its indices); on a GPU measured between two events.
        """
        backend, last = self.backend, len(self.program.steps) - 1
        if not backend.on_host:
            stream = backend.stream(None, inputs.values())
            inputs = {
                name: backend.to_device(array, stream) if isinstance(array, np.ndarray) else array
                for name, array in inputs.items()
            }
        times: list[float] = []
        for _ in range(repeat + 1):
            call = self.bind_call(inputs, dims={**dims})
            times.append(backend.seconds(call, self._rebind, last if times else -1))
        return float(np.median(times[1:]))

    def synchronize(self) -> None:
        """Wait until all submitted calls have finished, and raise their first error."""
        self.pending.wait()
        self.backend.synchronize()

    # -- looking -------------------------------------------------------------------------------------------------------

    def thread_bytes(self, bound: Mapping[str, int]) -> int:
        """Bytes of thread-local memory of all CPU threads, kept between such calls: rows cached between passes, packed
        panels of matrix products.
        """
        return self.backend.thread_bytes(self.backend.plan(bound, self._lenders(())))

    def workspace_size(self, **dims: int) -> int:
        """Bytes of workspace for these dims (those given to compile need not be repeated), whatever ``out=`` names."""
        return int(self.backend.plan(self._all_dims(dims)).workspace)

    def own_workspace(self, **dims: int) -> int:
        """Bytes of workspace that a call without ``out=`` and ``workspace=`` allocates: at most :meth:`workspace_size`,
        for temporaries may lie in results that are not written yet.
        """
        return int(self.backend.plan(self._all_dims(dims), self._lenders(())).workspace)

    def _all_dims(self, dims: Mapping[str, int]) -> dict[str, int]:
        """These dims and the fixed ones, checked."""
        bound = {**self.fixed_dims, **sizes_given(dims)}
        missing = [d for d in self.program.dims if d not in bound]
        if missing:
            raise InvalidProblem(f"workspace_size needs {', '.join(missing)}")
        check_sizes(self.program, bound)
        check_sorts(self.program, bound)
        check_conditions(self.program, bound)
        return bound

    def sku(self, **dims: int) -> str:
        """An identifier: program, target, dtypes and sizes."""
        sizes = "_".join(f"{k}{v}" for k, v in {**self.fixed_dims, **dims}.items())
        dtypes = "_".join(dict.fromkeys(str(t.dtype) for t in self.inputs.values()))
        return ".".join(part for part in (self.program.name, self.target, dtypes, sizes) if part)

    @property
    def precision(self) -> Precision:
        """The dtypes it computes and accumulates in, derived from its kernels."""
        return precision_of(self.program, self.target)

    @property
    def source(self) -> str:
        """The generated C or CUDA source."""
        return self.backend.source

    @property
    def kernels(self) -> Kernels:
        """Every kernel by name; each can be printed, run and timed separately."""
        with held_off:
            from .kernel import kernels_of

        return kernels_of(self)

    def floor(self, **dims: int) -> int:
        """A lower bound of the bytes that any implementation moves."""
        return floor_bytes(self.program, {**self.fixed_dims, **dims})

    def __str__(self) -> str:
        lines = [f"{self.program.name} on {self.target}: {len(self.program.steps)} steps"]
        for step in self.program.steps:
            for item in alternatives(step):
                ways = ", ".join(f"{b} {s}" for b, s in item.strategy) if isinstance(item, Kernel) else "library"
                lines.append(f"  {item.name:<40} {ways}")
        return "\n".join(lines)
