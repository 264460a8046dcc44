"""Running a Program's CUDA text: buffers, launches and the flag of bad indices, on a device or on the simulator."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..codegen.cuda import STRIP, CudaKernel, Stage, render_cuda
from ..codegen.index import flatten
from ..errors import IndexOutOfRange, InternalError, NotAscending
from ..ir.dims import evaluate
from ..ir.kernel import Call, Kernel, Program, alternatives, taken
from ..passes.plan_buffers import slot_sizes
from .arrays import empty

Array = np.ndarray[Any, Any]
ALIGN = 256
FINE = 2**64 - 1
TASKS = 1024
"""Tasks that a combine is cut into, more or less: the unit of determinism comes from shapes alone."""
LONGEST = 128
"""Positions of a sorted order per task."""
MOST_PARTIALS = 1 << 22
"""Elements of all partial results of a kernel."""
TILE = 2048


def _align(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def _chunks(count: int, each: int) -> int:
    return -(-count // each)


class Device(Protocol):
    """Where kernels run."""

    def launch(self, function: str, blocks: int, threads: int, args: Sequence[Any], written: Collection[int]) -> None:
        """Start a function: each argument is an array or an integer; ``written`` are the places of arrays that may be written."""

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """``out = a @ b`` for views with any strides."""

    def begin(self, fresh: Sequence[Array], flag: Array) -> None:
        """A call begins: the arrays hold nothing yet, the flag (a part of one) holds its beginning."""


@dataclass(frozen=True)
class Sizes:
    """A kernel's numbers for one set of dims.

    :param chunk: rows (or positions) per task.  :param scratch: bytes.
    """

    dims: tuple[int, ...]
    rows: int
    chunk: int
    tasks: int
    keys: int
    scratch: int

    @property
    def sort_passes(self) -> int:
        """8 bits each; the keys are 0 to ``keys``, which is nowhere."""
        return max(1, _chunks(self.keys.bit_length(), 8))


def sizes_of(kernel: CudaKernel, dims: Mapping[str, int]) -> Sizes:
    """What a launch needs to know, from shapes alone; ``dims`` by the names of the kernel's own text."""
    rows, columns, chunked = (max(0, evaluate(x, dims)) for x in (kernel.rows, kernel.columns, kernel.chunked))
    keys = evaluate(kernel.keys, dims) if kernel.keys is not None else 0
    chunk = 1
    if kernel.keys is not None:
        chunk = min(LONGEST, max(8, _chunks(rows, TASKS)))
    elif kernel.by_chunk:
        chunk = max(8, _chunks(chunked, TASKS))
    chunk = max(chunk, _chunks(chunked * evaluate(kernel.private, dims), MOST_PARTIALS))
    tasks = rows * _chunks(columns, STRIP) if kernel.strips else _chunks(chunked, chunk)
    scratch = 0
    if kernel.keys is not None:
        scratch += 4 * _align(4 * rows) + _align(4 * (keys + 2))
    for count, each in kernel.scratch:
        scratch += _align(_chunks(chunked, chunk) * evaluate(count, dims) * each)
    for count in kernel.fixed:
        scratch += _align(16 * evaluate(count, dims)) + _align(4)
    if kernel.keys is not None:
        scratch += _align(4 * 256 * _chunks(rows, TILE))
    return Sizes(tuple(dims[f"{d}"] for d in _own_dims(kernel)), rows, chunk, tasks, keys, scratch)


def _own_dims(kernel: CudaKernel) -> list[str]:
    return [f"n{i:02d}" if i > 9 else f"n{i}" for i in range(len(kernel.dims))]


@dataclass(frozen=True)
class Binding:
    """What a call needs to know once its sizes are numbers.

    :param workspace: bytes of the one workspace: slots of temps, the scratch of the widest kernel, the flag.
    """

    dims: dict[str, int]
    offsets: dict[str, int]
    scratch: int
    workspace: int


class CudaProgram:
    """A Program as CUDA on a device; the counterpart of CpuProgram.

    :param device: makes one from the program's text.
    """

    def __init__(self, program: Program, device: Any):
        self.program = program
        self.text, self.kernels = render_cuda(program)
        self.roots = [b for b in program.buffers if not b.alias]
        self.constants = {b.name: np.asarray(b.value, np.float64 if b.type.dtype.is_float else None).astype(b.type.dtype.np) for b in self.roots if b.kind == "const"}
        self.checks = [i for i, step in enumerate(program.steps) if any(isinstance(k, Kernel) and self.kernels[k.name].checks for k in alternatives(step))]
        self.flag_bytes = _align(8 * (3 + len(self.checks)))
        self._device = device
        self._bindings: dict[tuple[int, ...], Binding] = {}

    @functools.cached_property
    def device(self) -> Device:
        made: Device = self._device(self.text if self.kernels else "")
        return made

    @property
    def payload(self) -> bytes:
        return b""  # the device keeps what it compiled

    def sites_json(self) -> str:
        return json.dumps({})

    def sizes(self, kernel: CudaKernel, dims: Mapping[str, int]) -> Sizes:
        return sizes_of(kernel, {own: dims[name] for own, name in zip(_own_dims(kernel), kernel.dims, strict=True)})

    def bind(self, dims: Mapping[str, int]) -> Binding:
        """Offsets and sizes for these dims, kept for the next call."""
        key = tuple(dims[name] for name in self.program.dims)
        found = self._bindings.get(key)
        if found is None:
            starts, total = [], 0
            for size in slot_sizes(self.program):
                starts.append(total)
                total += _align(evaluate(size, dims))
            steps = [taken(step, dims) for step in self.program.steps]
            scratch = max((self.sizes(self.kernels[s.name], dims).scratch for s in steps if isinstance(s, Kernel)), default=0)
            offsets = {b.name: starts[b.slot] for b in self.roots if b.slot >= 0}
            found = Binding(dict(dims), offsets, total, total + scratch + self.flag_bytes)
            if len(self._bindings) > 256:
                self._bindings.clear()
            self._bindings[key] = found
        return found

    def run(self, arrays: Mapping[str, Array], binding: Binding, workspace: Array | None = None, only: int = -1) -> None:
        """Run every step (or one) on contiguous arrays, by buffer name; outputs are written in place.

        :raises IndexOutOfRange: a data-dependent index; nothing that depends on it was written.
        """
        if workspace is None:
            workspace = empty((binding.workspace,), np.uint8)
        memory = dict(arrays) | self.constants
        for name, offset in binding.offsets.items():
            type_ = self.program.buffer[name].type
            shape = type_.concrete(binding.dims)
            count = int(np.prod(shape, dtype=np.int64)) * type_.dtype.itemsize
            memory[name] = workspace[offset : offset + count].view(type_.dtype.np).reshape(shape)
        flag = workspace[binding.workspace - self.flag_bytes :][: 8 * (3 + len(self.checks))].view(np.uint64)
        flag[:] = FINE
        inputs = {a.ctypes.data for b, a in arrays.items() if self.program.buffer[b].kind == "input"}
        outputs = {b: arrays[b] for b in (self.program.root(b) for _, b in self.program.outputs) if b in arrays and self.program.buffer[b].kind == "output"}
        self.device.begin([workspace, *(a for a in outputs.values() if a.ctypes.data not in inputs)], flag)  # a donated input holds its values
        call = _Run(self, memory, binding, workspace[binding.scratch : binding.workspace - self.flag_bytes], flag)
        for number, step in enumerate(self.program.steps):
            if only in (-1, number):
                call.step(number, taken(step, binding.dims))
        if (flag[3:] != FINE).any():
            call.explain()


class _Run:
    """One call: its memory and the launches of its steps."""

    def __init__(self, owner: CudaProgram, memory: Mapping[str, Array], binding: Binding, scratch: Array, flag: Array):
        self.owner, self.memory, self.dims, self.scratch, self.flag = owner, memory, binding.dims, scratch, flag

    def array(self, name: str) -> Array:
        return self.memory[self.owner.program.root(name)]

    def step(self, number: int, item: Kernel | Call, aux: int = 0) -> None:
        if isinstance(item, Call):
            self.call(item)
            return
        kernel = self.owner.kernels[item.name]
        sizes = self.owner.sizes(kernel, self.dims)
        for stage in kernel.stages:
            tasks = sizes.tasks if stage.tasks is None else evaluate(stage.tasks, dict(zip(_own_dims(kernel), sizes.dims, strict=True)))
            own = aux or (-1 if stage.kind == "key" and sizes.sort_passes % 2 else 0)
            self.launch(stage, kernel, item, sizes, tasks, number, own)
            if stage.kind == "key":
                self.sort(sizes, self.site(number))

    def launch(self, stage: Stage, kernel: CudaKernel, item: Kernel, sizes: Sizes, tasks: int, number: int, aux: int) -> None:
        if tasks <= 0:
            return
        args = [self.array(b) for b in item.buffers]
        written = [i for i, b in enumerate(item.buffers) if b in item.writes]
        scratch, flag = len(args) + len(sizes.dims), len(args) + len(sizes.dims) + 1
        self.owner.device.launch(stage.name, _chunks(tasks * stage.width, kernel.threads), kernel.threads, [*args, *sizes.dims, self.scratch, self.flag, self.site(number), sizes.chunk, aux], [*written, scratch, flag])

    def site(self, number: int) -> int:
        """How many checks come before a step."""
        return sum(c < number for c in self.owner.checks)

    def sort(self, sizes: Sizes, site: int) -> None:
        """(key, row) pairs of the key stage, stably by key; then where each key starts."""
        step = _align(4 * sizes.rows)
        first = [self.scratch[i * step :][: 4 * sizes.rows].view(np.uint32) for i in range(4)]
        pairs = [(first[0], first[1]), (first[2], first[3])]  # ends in the first
        start = self.scratch[4 * step :][: 4 * (sizes.keys + 2)].view(np.uint32)
        tiles = _chunks(sizes.rows, TILE)
        device = self.owner.device
        if sizes.rows:
            counts = self.scratch[len(self.scratch) - _align(1024 * tiles) :][: 1024 * tiles].view(np.uint32)
            for number in range(sizes.sort_passes):
                (key, row), (key_out, row_out) = pairs if (sizes.sort_passes - number) % 2 == 0 else pairs[::-1]
                device.launch("gradc_sort_count", tiles, 256, [key, counts, sizes.rows, tiles, 8 * number, self.flag, site], [1])
                device.launch("gradc_sort_scan", 1, 1024, [counts, 256 * tiles, self.flag, site], [0])
                device.launch("gradc_sort_move", tiles, 256, [key, row, counts, key_out, row_out, sizes.rows, tiles, 8 * number, int(number == 0), self.flag, site], [3, 4])
        device.launch("gradc_sort_bounds", _chunks(sizes.keys + 2, 256), 256, [pairs[0][0], start, sizes.rows, sizes.keys, self.flag, site], [1])

    def call(self, item: Call) -> None:
        """A matrix product, through views with the call's axes."""
        if (self.flag[3:] != FINE).any():
            return
        sizes = {axis: evaluate(size, self.dims) for axis, size in item.axes}
        order = [str(i.variable) for i in item.out.index]
        (inner,) = [axis for axis in sizes if axis not in order]
        *batch, m, n = order

        def view(operand: Any, axes: Sequence[str]) -> Array:
            array = self.array(operand.buffer)
            flat = flatten(operand.index, self.owner.program.buffer[operand.buffer].type.shape)
            steps, at = dict(flat.terms), evaluate(flat.const, self.dims)
            shape = [sizes[a] for a in axes]
            if 0 in shape:
                return np.empty(shape, array.dtype)
            return np.lib.stride_tricks.as_strided(array.reshape(-1)[at:], shape, [evaluate(steps.get(a, 0), self.dims) * array.itemsize for a in axes])

        out = self.array(item.out.buffer).reshape([sizes[a] for a in order])
        self.owner.device.matmul(view(item.args[0], [*batch, m, inner]), view(item.args[1], [*batch, inner, n]), out)

    def explain(self) -> None:
        """The error of the flag: the step that raised it runs again, to say what stands there."""
        site = int(np.argmax(self.flag[3:] != FINE))
        number, position = self.owner.checks[site], int(self.flag[3 + site])
        item = taken(self.owner.program.steps[number], self.dims)
        assert isinstance(item, Kernel)
        self.step(number, item, position + 1)
        code, value, bound = self.flag[:3].view(np.int64).tolist()
        op, source = next(iter(self.owner.kernels[item.name].sites), ("index", "?"))
        if code == 1:
            raise IndexOutOfRange(op, source, position, value, bound)
        if code == 3:
            raise NotAscending(op, source, position, value, bound)
        raise InternalError(f"{self.owner.program.name} reported code {code} at {position}")


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
