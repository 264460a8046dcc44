"""The targets of the host: ``cpu``, compiled C, and ``numpy``, the interpreter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import DeviceError, InvalidProblem, Unsupported
from ...interp import run_program
from ...ir.kernel import Kernel, Program
from ...ir.types import Type
from ...process.forks import cached_property, held_off
from ...process.ieee import plain
from ...process.limits import Limit
from ..backend import Backend, BoundCall, Rebind
from .arrays import Arguments, Array, Kind, Results, available, empty, from_numpy, to_numpy, worth_asking
from .pool import num_threads
from .prepared import Described, KnownCalls, Prepared, prepared
from .tensors import check_unrecorded

if TYPE_CHECKING:
    from ...codegen.cpu.program import Source


class HostBackend(Backend):
    """Arrays in the memory of the host."""

    align = 16  # what every allocator guarantees; slots are aligned to 64 bytes relative to the workspace
    on_host = True

    def stream(self, given: Any, values: Iterable[Any]) -> int:
        if given is not None:
            raise Unsupported("stream=: the CPU has no streams")
        return 0

    def read(self, x: Any, stream: int, name: str, constants: Any = ()) -> tuple[Array, Kind]:
        try:
            array, kind = to_numpy(x)
        except (DeviceError, InvalidProblem) as error:
            raise type(error)(f"{name}: {error}") from error.__cause__
        if kind is Kind.TORCH:
            check_unrecorded(x, name)
        return array, kind

    def kind(self, kinds: Sequence[Kind]) -> Kind:
        return Kind.of(kinds)

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike, kind: Kind, stream: int) -> Array:
        return empty(shape, dtype)

    def scratch(self, shape: Sequence[int], dtype: npt.DTypeLike, stream: int, kind: Kind | None = None) -> Array:
        return empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike, stream: int, kind: Kind | None = None) -> Array:
        return np.zeros(shape, dtype)

    def to_device(self, array: Array, stream: int) -> Array:
        return array

    def place_inputs(self, call: BoundCall) -> None:
        """Nothing to do: host memory is where they are read."""

    def contiguous(self, array: Array, stream: int) -> Array:
        out = empty(array.shape, array.dtype)
        out[...] = array
        return out

    def result(self, array: Array, kind: Kind) -> Any:
        return from_numpy(array, kind)

    def donates(self, array: Array, kind: Kind) -> bool:
        return True

    def left(self) -> Limit:
        return available()

    def synchronize(self) -> None:
        """Nothing to do: calls are synchronous."""

    @property
    @plain()
    def source(self) -> str:
        with held_off:
            from ...codegen.cpu.program import render_program

        return render_program(self.program).text

    def kernel_source(self, kernel: Kernel, types: Mapping[str, Type]) -> str:
        with held_off:
            from ...codegen.cpu.kernel import render_kernel

        return render_kernel(kernel, types).text


def add_results(call: BoundCall) -> None:
    """Adds a call's outputs to the arrays of ``accumulate=``."""
    if call.add_to:
        with plain():
            for key, total in call.add_to.items():
                np.add(total, call.outputs[key], out=total)


class CpuBackend(HostBackend):
    """C, compiled for this machine and run on the threads of :mod:`.pool`.

    :param sites: the checks in ``payload``: number -> (op, source).
    """

    def __init__(
        self,
        program: Program,
        payload: bytes | None = None,
        sites: Mapping[int, tuple[str, str]] | None = None,
    ):
        super().__init__(program, "cpu", payload)
        self._sites = sites

    @plain()
    def _load(self) -> Any:
        with held_off:
            from .cpu import CpuProgram

        return CpuProgram(self.program, self._payload, self._sites)

    @plain()
    def load(self, source: Source, payload: bytes | None) -> None:
        with held_off:
            from .cpu import CpuProgram

        self.native = CpuProgram(self.program, payload, source=source)

    def plan(self, dims: Mapping[str, int], lenders: frozenset[str] = frozenset()) -> Any:
        return self.native.bind(dims, lenders)

    def thread_bytes(self, plan: Any) -> int:
        """Rows cached between passes, and packed panels of matrix products."""
        return plan.local * num_threads() if plan.local else 0  # type: ignore[no-any-return]

    def launch(self, call: BoundCall, workspace: Array | None, rebind: Rebind, only: int = -1) -> None:
        self.native.run(self.buffers(call), call.plan, workspace, only)
        add_results(call)

    # -- calls that differ in addresses alone --------------------------------------------------------------------------

    def prepared(
        self, call: BoundCall, outputs: Mapping[str, tuple[int, int]], out: Collection[str] = ()
    ) -> Prepared | None:
        """:func:`.prepared.prepared`; None, too, for a call that needs so much memory that it is asked for each time.

        :param call: bound, with or without memory for results.
        """
        made = outputs.keys() - call.donors.keys() - set(out)
        needed = sum(outputs[name][0] for name in made) + call.plan.workspace + self.thread_bytes(call.plan)
        return prepared(self.native, call, outputs, out) if needed <= worth_asking() else None

    @cached_property
    def _known_calls(self) -> KnownCalls:
        return KnownCalls([b.name for b in self.program.of_kind("input") if not b.alias])

    def described(self, inputs: Arguments, out: Any, dims: Any, stream: Any) -> Described | None:
        return self._known_calls.described(inputs, out, dims) if stream is None else None

    def remember(self, call: Described, bound: BoundCall) -> None:
        sizes = {name: (array.nbytes, array.itemsize) for name, array in bound.outputs.items()}
        self._known_calls.remember(call, bound, lambda: self.prepared(bound, sizes, call.out))

    def repeat(
        self, call: Any, inputs: Arguments, out: Arguments, rebind: Rebind
    ) -> tuple[Results, dict[str, int], None] | None:
        done = self._known_calls.repeat(call)
        return (*done, None) if done is not None else None


@dataclass(frozen=True)
class _NoPlan:
    """The empty memory plan of the interpreter, whose temporaries are not counted."""

    workspace: int = 0


class NumpyBackend(HostBackend):
    """The interpreter in NumPy; it has no compiled code."""

    def __init__(self, program: Program):
        super().__init__(program, "numpy")

    def _load(self) -> Any:
        raise Unsupported("compiled code of the target 'numpy': an interpreter runs it")

    def plan(self, dims: Mapping[str, int], lenders: frozenset[str] = frozenset()) -> _NoPlan:
        return _NoPlan()

    def launch(self, call: BoundCall, workspace: Array | None, rebind: Rebind, only: int = -1) -> None:
        for key, value in run_program(self.program, call.arrays, call.dims).items():
            call.outputs[key][...] = value
        add_results(call)
