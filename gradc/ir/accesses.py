"""Finds the data-dependent accesses of a program that are not known to stay inside their buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from .dims import Assumption, Size, assuming, floordiv, known_nonnegative, same
from .kernel import Call, Kernel, Loop, Program, Step, alternatives
from .node import REGISTRY
from .ranges import KernelRanges, Range, constant, inside, of_type, sources
from .statement import REDUCTIONS, Index, Operand, Stmt
from .types import I64, Type


class Elements:
    """The known ranges of the integers in a program's buffers, updated step by step."""

    def __init__(self, program: Program):
        self.program = program
        self.types = program.types
        self.roots = {
            name: (program.root(name), b.type.dtype.name) for name, b in program.buffer.items()
        }  # keyed by dtype: the same bytes have other values as another dtype
        self.ranges = {
            self.roots[b.name]: constant(b.value, b.type.dtype)
            for b in program.buffers
            if b.kind == "const" and not b.alias
        }

    def known(self, buffer: str) -> Range:
        return self.ranges.get(self.roots[buffer], Range())

    def memory(self, buffer: str) -> str | int:
        """The identity of a buffer's memory: its workspace slot, or the name of the buffer that owns the bytes."""
        root = self.program.buffer[self.roots[buffer][0]]
        return root.slot if root.slot >= 0 and root.kind == "temp" else root.name

    def kernel(self, kernel: Kernel) -> KernelRanges:
        changing = {self.memory(b) for b in kernel.writes}
        return KernelRanges(
            kernel, self.types, lambda buffer: Range() if self.memory(buffer) in changing else self.known(buffer)
        )

    def after(self, step: Step) -> None:
        """Updates the known ranges after a step, from elements that it checked or stored; memory that it may overwrite
        becomes unknown.
        """
        changed = {self.memory(b) for b in step.writes}
        left = {key: range_ for memory in changed for key, range_ in self.stored(step, memory)}
        self.ranges = {key: range_ for key, range_ in self.ranges.items() if self.memory(key[0]) not in changed} | left
        if isinstance(step, Kernel):  # a select may run another kernel
            for buffer, bound in checked_buffers(step, self.types):
                if self.memory(buffer) not in changed:
                    self.ranges[self.roots[buffer]] = self.known(buffer) & inside(bound)

    def stored(self, step: Step, memory: str | int) -> Iterator[tuple[tuple[str, str], Range]]:
        """The range of the values that a step stores to ``memory``, if all its kernels store integers of one dtype."""
        keys: set[tuple[str, str]] = set()
        values: list[Range] = []
        whole = True
        if isinstance(step, Call):
            yield from self.positions(step)
            return
        if isinstance(step, Loop):  # what a block writes says nothing of the rest
            return
        for kernel in alternatives(step):
            writes = (
                [s for s in kernel.body if s.op in ("store", "accum") and self.memory(s.buffer) == memory]
                if isinstance(kernel, Kernel)
                else []
            )
            if not writes or any(s.op != "store" or not self.types[s.buffer].dtype.is_integer for s in writes):
                return
            assert isinstance(kernel, Kernel)
            ranges = self.kernel(kernel)
            keys |= {self.roots[s.buffer] for s in writes}
            values += [ranges.value(s.args[0], frozenset()) for s in writes]
            whole &= any(everywhere(kernel, s, s.index, self.types[s.buffer]) for s in writes)
        if len(keys) == 1:
            (key,) = keys
            yield key, functools.reduce(Range.__or__, values if whole else [*values, self.ranges.get(key, Range())])

    def positions(self, call: Call) -> Iterator[tuple[tuple[str, str], Range]]:
        """The range of the positions that a library function gives as its result."""
        operand = REGISTRY[call.op].positions_in
        if operand is not None:
            yield self.roots[call.out.buffer], inside(dict(call.axes)[call.views[operand][-1]])


def everywhere(kernel: Kernel, s: Stmt, index: tuple[Index, ...], type: Type) -> bool:
    """Whether a statement visits every element of a buffer: the index entries are distinct whole axes, and no other
    axis can have size 0.
    """
    axes = dict((*kernel.rows, *kernel.cols))
    named = [(i.variable, size) for i, size in zip(index, type.shape, strict=True) if size != 1]
    own = {name for name, _ in named if name in axes}
    if len(own) < len(named) or not all(same(axes[str(name)], size) for name, size in named):
        return False
    by_row = any(other.op in REDUCTIONS for other in kernel.body) and not kernel.is_column(
        s
    )  # rows run even without columns; without reductions a kernel may be divided along its columns
    return all(
        known_nonnegative(size - 1) for name, size in (kernel.rows if by_row else axes.items()) if name not in own
    )


def checked_buffers(kernel: Kernel, types: Mapping[str, Type]) -> Iterator[tuple[str, Size]]:
    """The (buffer, bound) whose elements a kernel checks completely."""
    for s in kernel.body:
        if s.op != "check":
            continue
        source = kernel.stmts[s.args[0]]
        while source.op == "cast" and of_type(kernel.stmts[source.args[0]].dtype).within(of_type(source.dtype)):
            source = kernel.stmts[source.args[0]]
        if (
            source.op == "load"
            and not source.where
            and not s.where
            and everywhere(kernel, s, source.index, types[source.buffer])
        ):
            yield source.buffer, s.attr("bound")


def by_data(index: Index) -> bool:
    """Whether an index depends on data."""
    return any(v.startswith("%") for v, _ in index.terms)


def unsafe_accesses(kernel: Kernel, elements: Elements) -> Iterator[tuple[Stmt, int, Size]]:
    """The accesses that are not known to stay in their buffer: (statement, axis of the buffer, size of the axis)."""
    inner = [Assumption(size, ">=", 1) for _, size in kernel.rows if not isinstance(size, int)]  # no rows, no access
    with assuming(inner):
        for s, axis, place, size in elements.kernel(kernel).accesses():
            if not place.within(inside(size)):
                yield s, axis, size


def unsafe_operands(call: Call, types: Mapping[str, Type]) -> Iterator[tuple[Operand, int, Size]]:
    """The operands of a library call that are not known to stay in their buffer: (operand, axis of the buffer, size of
    the axis).
    """
    sizes = dict((*call.axes, *(part for _, own in call.parts for part in own)))
    for operand in call.accesses:
        run = {v for i in operand.index for v, _ in i.terms} if operand in call.results else set(sizes)
        with assuming(
            [Assumption(sizes[v], ">=", 1) for v in run if not isinstance(sizes[v], int)]
        ):  # an empty operand is not accessed
            if any(sizes[v] == 0 for v in run):
                continue
            for axis, (index, size) in enumerate(zip(operand.index, types[operand.buffer].shape, strict=True)):
                place = Range.of(index.const, index.const)
                for v, factor in index.terms:
                    last = floordiv(sizes[v] - 1, dict(operand.per).get(v, 1))
                    place += Range.of(0, last) * factor
                if not place.within(inside(size)):
                    yield operand, axis, size


def assumed(kernel: Kernel, program: Program) -> list[tuple[str, Size]]:
    """The assumptions of a kernel on its buffers: (buffer, size) means that all elements must be in [0, size).  They
    are checked when it is run alone.
    """
    elements, pairs = Elements(program), dict[tuple[str, Size], None]()
    with assuming(program.assumptions):
        for s, axis, size in unsafe_accesses(kernel, elements):
            for buffer in sources(kernel, s.index[axis]):
                pairs[buffer, size] = None
    return list(pairs)


def check_of(buffer: str, type: Type, bound: Size, op: str, source: str) -> Kernel:
    """The kernel that checks that every element of a buffer is in [0, bound)."""
    axes = [(f"i{a}", size) for a, size in enumerate(type.shape) if size != 1]
    index = tuple(Index() if size == 1 else Index.of(f"i{a}") for a, size in enumerate(type.shape))
    body = [Stmt("%0", "load", (), type.dtype, buffer=buffer, index=index)]
    if type.dtype is not I64:
        body.append(Stmt("%1", "cast", ("%0",), I64, attrs=(("dtype", I64),)))
    body.append(Stmt("", "check", (body[-1].name,), attrs=(("bound", bound), ("op", op), ("source", source))))
    kernel = Kernel("check", tuple(axes[:-1]), tuple(axes[-1:]), tuple(body))
    return kernel.named_by_structure("check", {buffer: type})
