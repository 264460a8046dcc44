"""Single kernels of an Executable, to inspect, run and time separately."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..analysis.cost import kernel_bytes
from ..analysis.strategies import ON_HOST
from ..errors import GradcError, InvalidProblem
from ..formats.html_text import Html, details, joined, pre, table
from ..ir.accesses import assumed, check_of, checked_buffers
from ..ir.dims import Size, evaluate, symbols
from ..ir.kernel import Buffer, Call, Kernel, Program, alternatives
from ..ir.lexer import suffixed
from ..ir.statement import format_axes
from ..ir.types import Type
from ..passes.program.choose_reduction import choose_reduction
from ..passes.program.copy_donated import copy_of
from ..process.forks import cached_property, held_off
from .backend import Backend
from .host.arrays import Arguments, Results

Array = np.ndarray[Any, Any]


class Owner(Protocol):
    """The part of :class:`gradc.Executable` that its kernel handles use."""

    program: Program
    target: str
    arch: str
    fixed_dims: dict[str, int]
    inputs: dict[str, Type]
    backend: Backend

    @property
    def source(self) -> str: ...

    def sibling(self, program: Program) -> Owner: ...

    def run(self, inputs: Arguments | None = None, /, *, dims: Mapping[str, int] | None = None) -> Results: ...

    def time_last_step(self, inputs: Arguments, repeat: int, dims: Mapping[str, int]) -> float: ...


class Kernels(dict[str, "KernelHandle"]):
    """Kernels by name.

    :ivar calls: the names of the library calls.
    """

    def __init__(self, calls: Iterable[str] = ()):
        super().__init__()
        self.calls = tuple(dict.fromkeys(calls))

    def _repr_html_(self) -> str:
        rows = [
            (details(name, *handle.texts()), handle.shape, handle.ways, handle.kernel.note.where)
            for name, handle in self.items()
        ]
        return table(("kernel", "iterates over", "combines rows", "line"), rows)

    def __missing__(self, name: str) -> KernelHandle:
        raise KeyError(self.lacking(name))

    def lacking(self, name: str) -> str:
        """The error message for an unknown name, with the known names."""
        if any(name in (call, call.rsplit("_", 1)[0]) for call in self.calls):
            return f"{name!r} is computed by a library: it has no kernel; the kernels are {', '.join(self) or 'none'}"
        close = difflib.get_close_matches(name, self, 1)
        return (
            f"there is no kernel {name!r}; {f'did you mean {close[0]}? ' if close else ''}the kernels are"
            f" {', '.join(self) or 'none'}"
        )


def kernels_of(executable: Owner) -> Kernels:
    """The kernels of a program by name.  Of kernels with the same structure, which share a name, the second is
    ``name.2``; alternatives of one select that are equal count once.
    """
    kernels = Kernels(
        item.name for step in executable.program.steps for item in alternatives(step) if not isinstance(item, Kernel)
    )
    for kernel in (
        item
        for step in executable.program.steps
        for item in dict.fromkeys(alternatives(step))
        if isinstance(item, Kernel)
    ):
        count = sum(name == kernel.name or name.startswith(f"{kernel.name}.") for name in kernels)
        kernels[f"{kernel.name}.{count + 1}" if count else kernel.name] = KernelHandle(kernel, executable)
    return kernels


def index_limits(kernel: Kernel, types: Mapping[str, Type], dims: Mapping[str, int]) -> dict[str, int]:
    """For each buffer whose values a kernel uses as indices, the smallest size that they index."""
    came_from: dict[str, set[str]] = {}
    limits: dict[str, int] = {}
    for s in kernel.body:
        came_from[s.name] = set().union(*(came_from.get(u, set()) for u in s.uses)) | (
            {s.buffer} if s.op in ("load", "search") else set()
        )
        if s.op == "check":
            for b in came_from.get(s.args[0], ()):
                limits[b] = min(limits.get(b, 2**62), evaluate(s.attr("bound"), dims))
        for i, size in zip(s.index, types[s.buffer].shape if s.buffer else (), strict=False):
            for v, _ in i.terms:
                for b in came_from.get(v, ()) if v.startswith("%") else ():
                    limits[b] = min(limits.get(b, 2**62), evaluate(size, dims))
    return limits


def draw(random: np.random.Generator, name: str, type_: Type, dims: Mapping[str, int], limit: int | None) -> Array:
    """Random contents of an input: floats in [0.5, 2], whose roots and logarithms are finite; integers from 0.

    :param limit: integers are below it; None where they are no indices.
    :raises InvalidProblem: there is no index below the limit.
    """
    shape = type_.concrete(dims)
    if type_.dtype.is_float:
        return random.uniform(0.5, 2.0, shape).astype(type_.dtype.np)
    high = limit if limit is not None else 2 if type_.dtype.kind == "b" else min(type_.dtype.range[1], 100) + 1
    drawn = random.integers(0, max(high, 1), shape).astype(type_.dtype.np)
    if high < 1 and drawn.size:
        raise InvalidProblem(f"{name} is looked up in something of size {high}: no index is inside")
    return drawn


class KernelHandle:
    """A kernel of an executable: ``.ir``, ``.source``, ``.bytes(**dims)``, ``.run(**buffers)``, ``.time(**dims)``."""

    def __init__(self, kernel: Kernel, owner: Owner):
        self.kernel, self.owner = kernel, owner
        self.name = kernel.name
        self.types: dict[str, Type] = {b: owner.program.buffer[b].type for b in kernel.buffers}
        self.loop = next((loop for loop in owner.program.loops if kernel in loop.steps), None)

    def bound(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Sizes by name: a kernel of a loop is taken for the largest block, unless ``dims`` says otherwise."""
        given = {**self.owner.fixed_dims, **dims}
        if self.loop is None:
            return given
        around = {s for size in self.loop.sizes for s in symbols(size)} - {*self.loop.symbols}
        if around - given.keys():
            return given
        return {**self.loop.largest(given), **given}

    @property
    def ir(self) -> str:
        """Its statements."""
        return str(self.kernel)

    @property
    def source(self) -> str:
        """Its generated C or CUDA source."""
        return self.owner.backend.kernel_source(self.kernel, self.types)

    def bytes(self, **dims: int) -> int:
        """Bytes it must move for these dims."""
        return kernel_bytes(self.kernel, self.types, self.bound(dims))

    @cached_property
    def executable(self) -> Owner:
        """The kernel as a separate program: buffers it reads are inputs, buffers it writes are outputs, those that it
        updates are both, and indices are checked first.
        """
        buffers = {b: self.owner.program.buffer[b] for b in self.kernel.buffers}
        new = {b: suffixed(b, ".updated") for b in self.kernel.updates}
        buffers |= {name: replace(buffers[b], name=name, alias="") for b, name in new.items()}
        kernel = replace(
            self.kernel, body=tuple(s.altered(buffer=new.get(s.buffer, s.buffer)) for s in self.kernel.body)
        )
        program = as_program(self.name, buffers, kernel, kernel.writes)
        checks = [check_of(b, self.types[b], size, *self._named(b, size)) for b, size in assumed(kernel, program)]
        copies = [copy_of(b, name, self.types[b]) for b, name in new.items()]
        old = {name: b for b, name in new.items()}
        outputs = tuple((old.get(name, name), b) for name, b in program.outputs)
        return self.owner.sibling(replace(program, steps=(*checks, *copies, kernel), outputs=outputs))

    def _named(self, buffer: str, bound: Size) -> tuple[str, str]:
        """(op, the user's name of the indices), as in the errors of the owner's check of this buffer."""
        program = self.owner.program
        for kernel in program.kernels:
            for other, size in checked_buffers(kernel, {b.name: b.type for b in program.buffers}):
                if program.root(other) == program.root(buffer) and size == bound:
                    check = next(s for s in kernel.body if s.op == "check")
                    return check.attr("op"), check.attr("source")
        return self.name, buffer

    def run(self, *, dims: Mapping[str, int] | None = None, **buffers: Any) -> Results:
        """Runs the kernel; the buffers it writes, by name."""
        return self.executable.run(buffers, dims=self._of_program(dims or {}))

    def _of_program(self, dims: Mapping[str, int]) -> dict[str, int]:
        """``dims``, and what is bound beside them of the kernel's own program."""
        own = self.executable.program.dims
        return {name: size for name, size in self.bound(dims).items() if name in dims or name in own}

    def sample(self, seed: int = 0, **dims: int) -> dict[str, Array]:
        """Random contents for every buffer it reads: floats in [0.5, 2], whose roots and logarithms are finite; indices
        in range.
        """
        bound = self.bound(dims)
        missing = sorted({s for t in self.types.values() for size in t.shape for s in symbols(size)} - bound.keys())
        if missing:
            raise InvalidProblem(f"{self.name} needs a value for {', '.join(missing)}")
        random = np.random.default_rng(seed)
        limits = index_limits(self.kernel, self.types, bound)
        return {name: draw(random, name, self.types[name], bound, limits.get(name)) for name in self.executable.inputs}

    def time(self, repeat: int = 10, buffers: Arguments | None = None, **dims: int) -> float:
        """The median time of ``repeat`` warm runs in seconds, on random data unless ``buffers`` are given; on a GPU
        measured between two events.
        """
        inputs = dict(buffers) if buffers is not None else self.sample(**dims)
        return self.executable.time_last_step(inputs, repeat, self._of_program(dims))

    def forced(self, buffer: str, strategy: str) -> KernelHandle | None:
        """The kernel with another strategy for its combine into ``buffer``; None if that is incompatible with its other
        combines.
        """
        with held_off:
            from ..targets.devices import CPU, gpu_of

        on_gpu = self.owner.target.startswith("cuda")
        device, available = (
            (gpu_of(self.owner.arch), (strategy, *self.kernel.strategies.values())) if on_gpu else (CPU, ())
        )
        program = self.executable.program
        if self.kernel.strategies.get(buffer) == strategy:
            return self
        force = {**self.kernel.strategies, buffer: strategy}
        *_, step = choose_reduction(
            program, force=force, device=device, determinism="none", available=(*available, *ON_HOST)
        ).steps
        return (
            KernelHandle(step, self.owner)
            if isinstance(step, Kernel) and step.strategies.get(buffer) == strategy
            else None
        )

    @property
    def shape(self) -> str:
        """Its rows and columns."""
        return f"{format_axes(self.kernel.rows) or '-'} x {format_axes(self.kernel.cols) or '-'}"

    @property
    def ways(self) -> str:
        """How it combines rows, into each result."""
        return ", ".join(f"{buffer}: {strategy}" for buffer, strategy in self.kernel.strategy)

    def texts(self) -> list[Html]:
        """Its statements and its source as HTML."""
        try:
            source = self.source
        except GradcError as error:  # the target has none
            source = str(error)
        return [pre(self.ir), details("source", pre(source))]

    def _repr_html_(self) -> str:
        about = "; ".join(filter(None, [self.shape, self.ways, self.kernel.note.where]))
        return joined(Html("<div><b>"), self.name, Html("</b>"), f": {about}", Html("</div>"), *self.texts())

    def __str__(self) -> str:
        return self.ir

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def time_call(call: Call, owner: Owner, repeat: int, dims: Mapping[str, int]) -> float:
    """:meth:`KernelHandle.time` of a library call, on random numbers."""
    buffers = {b: owner.program.buffer[b] for b in (*call.reads, *call.writes)}
    executable = owner.sibling(as_program(call.name, buffers, call, call.writes))
    random = np.random.default_rng(0)
    bound = {**owner.fixed_dims, **dims}
    inputs = {
        name: random.integers(0, 2, type_.concrete(bound)).astype(type_.dtype.np)
        for name, type_ in executable.inputs.items()
    }
    return executable.time_last_step(inputs, repeat, dims)


def as_program(name: str, buffers: Mapping[str, Buffer], step: Any, outputs: Collection[str]) -> Program:
    """A program of one step."""
    kinds = {b: "output" if b in outputs else "input" for b in buffers}
    kept = tuple(
        Buffer(b.name, b.type, b.kind if b.kind == "const" else kinds[b.name], "", b.value) for b in buffers.values()
    )
    return Program(name, kept, (step,), (), tuple((b, b) for b in outputs))
