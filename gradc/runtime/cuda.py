"""Running a Program's CUDA text: buffers, launches and the flag of bad indices, on a device or on the simulator."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..codegen.cuda import render_cuda
from ..codegen.launch import FLAG, WORDS, WORKSPACE, Launch, LaunchPlan, Part, Strided
from ..errors import IndexOutOfRange, InternalError, NotAscending
from ..ir.kernel import Program
from .arrays import empty

Array = np.ndarray[Any, Any]
FINE = 2**64 - 1


class Device(Protocol):
    """Where kernels run."""

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        """Start a function: each argument is an array or an integer; ``written`` are the places of arrays that may be written."""

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for views with any strides."""

    def begin(self, fresh: Sequence[Array], flag: Array) -> None:
        """A call begins: the arrays hold nothing yet, the flag holds its beginning."""


class CudaProgram:
    """A Program as CUDA on a device; the counterpart of CpuProgram.

    :param device: makes one from the program's text.
    """

    def __init__(self, program: Program, device: Any):
        self.program = program
        self.text, self.kernels = render_cuda(program)
        self.roots = [b for b in program.buffers if not b.alias]
        self.constants = {b.name: np.asarray(b.value, np.float64 if b.type.dtype.is_float else None).astype(b.type.dtype.np) for b in self.roots if b.kind == "const"}
        self._device = device
        self._plans: dict[tuple[int, ...], LaunchPlan] = {}

    @functools.cached_property
    def device(self) -> Device:
        made: Device = self._device(self.text if self.kernels else "")
        return made

    @property
    def payload(self) -> bytes:
        return b""  # the device keeps what it compiled

    def sites_json(self) -> str:
        return json.dumps({})

    def bind(self, dims: Mapping[str, int]) -> LaunchPlan:
        """What these dims ask for, kept for the next call."""
        key = tuple(dims[name] for name in self.program.dims)
        found = self._plans.get(key)
        if found is None:
            found = LaunchPlan(self.program, self.kernels, dims)
            if len(self._plans) > 256:
                self._plans.clear()
            self._plans[key] = found
        return found

    def run(self, arrays: Mapping[str, Array], plan: LaunchPlan, workspace: Array | None = None, only: int = -1) -> None:
        """Run every step (or one) on contiguous arrays, by buffer name; outputs are written in place.

        :raises IndexOutOfRange: a data-dependent index; nothing that depends on it was written.
        """
        if workspace is None:
            workspace = empty((plan.workspace,), np.uint8)
        flag = workspace[plan.scratch + plan.room :][: plan.flag.nbytes].view(np.uint64)
        flag[:] = FINE
        memory = {**arrays, **self.constants, WORKSPACE: workspace, FLAG: flag}
        inputs = {a.ctypes.data for b, a in arrays.items() if self.program.buffer[b].kind == "input"}
        outputs = {b: arrays[b] for b in (self.program.root(b) for _, b in self.program.outputs) if b in arrays and self.program.buffer[b].kind == "output"}
        self.device.begin([workspace, *(a for a in outputs.values() if a.ctypes.data not in inputs)], flag)  # a donated input holds its values
        for number, actions in enumerate(plan.actions):
            if only in (-1, number):
                self.act(actions, memory)
        if (flag[WORDS:] != FINE).any():
            self.explain(plan, memory, flag)

    def act(self, actions: Sequence[Any], memory: Mapping[str, Array]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                args = [seen(memory, a) if isinstance(a, Part) else a for a in action.args]
                self.device.launch(action.function, action.blocks, action.threads, args, action.written)
            elif not (memory[FLAG][WORDS:] != FINE).any():
                self.device.matmul(strided(memory, action.a), strided(memory, action.b), strided(memory, action.out))

    def explain(self, plan: LaunchPlan, memory: Mapping[str, Array], flag: Array) -> None:
        """The error of the flag: the step that raised it runs again, to say what stands there."""
        site = int(np.argmax(flag[WORDS:] != FINE))
        number, position = plan.checks[site], int(flag[WORDS + site])
        item = plan.steps[number]
        self.act(plan.actions_of(number, item, position + 1), memory)
        code, value, bound = flag[:WORDS].view(np.int64).tolist()
        op, source = next(iter(self.kernels[item.name].sites), ("index", "?"))
        if code == 1:
            raise IndexOutOfRange(op, source, position, value, bound)
        if code == 3:
            raise NotAscending(op, source, position, value, bound)
        raise InternalError(f"{self.program.name} reported code {code} at {position}")


def seen(memory: Mapping[str, Array], part: Part) -> Array:
    """A part's elements."""
    whole = memory[part.root].reshape(-1).view(np.uint8)
    return whole[part.start : part.start + part.nbytes].view(part.dtype)


def strided(memory: Mapping[str, Array], operand: Strided) -> Array:
    part = seen(memory, operand.part)
    if 0 in operand.shape:
        return np.empty(operand.shape, part.dtype)
    return np.lib.stride_tricks.as_strided(part, operand.shape, [s * part.itemsize for s in operand.strides])


class Simulator:
    """Kernels on the CPU, a fiber for each thread.

    :param check: look for races, reads of nothing and addresses outside arrays.
    """

    def __init__(self, text: str, check: bool = False, seed: int | None = None):
        from .cudasim import compile_sim

        self.library = compile_sim(text, check=check) if text else None
        self.check, self.seed = check, seed
        self.fresh: list[tuple[int, Array]] = []  # address, and which bytes from there on have a value

    def begin(self, fresh: Sequence[Array], flag: Array) -> None:
        self.fresh = [(a.ctypes.data, np.zeros(a.nbytes, np.uint8)) for a in fresh] if self.check else []
        self.fill(flag)

    def fill(self, array: Array) -> None:
        ready = self.ready(array)
        if isinstance(ready, np.ndarray):
            ready[:] = 1

    def ready(self, array: Array) -> bool | Array:
        for address, mask in self.fresh:
            at = array.ctypes.data - address
            if 0 <= at and at + array.nbytes <= mask.size:
                return mask[at : at + array.nbytes]
        return True

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        assert self.library is not None
        self.library.launch(function, (blocks, 1, 1), (threads, 1, 1), 0, args, written=[i for i in written if args[i].nbytes], initialised={i: self.ready(a) for i, a in enumerate(args) if isinstance(a, np.ndarray)}, seed=self.seed)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        np.matmul(a, b, out=out)
        self.fill(out)
