"""How one step is tiled by rows: its axes that a loop goes over, and what its iterations carry from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir.dims import Size, same
from ...ir.kernel import Call, Kernel, Program, Step
from ...ir.node import REGISTRY
from ...ir.statement import Index, Operand, Stmt


@dataclass(frozen=True)
class Tiling:
    """A step's axes that a loop goes over, by the step's own names.

    :param outer: of which an iteration has one position.
    :param row: of which it has a block.
    :param sums_rows: the step is a product that sums over the rows: each iteration adds to its result.
    :param accums: the buffers in which a kernel sums over some of ``outer``,
    :param carried: and the places of these in ``outer``: their iterations come one after another.
    """

    outer: tuple[str, ...]
    row: str
    sums_rows: bool = False
    accums: frozenset[str] = frozenset()
    carried: frozenset[int] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.outer, self.row)

    def carries(self, step: Step, buffer: str) -> bool:
        """Whether the step adds to what earlier iterations wrote to a buffer."""
        return (self.sums_rows and buffer in step.writes) or buffer in self.accums


def tile(step: Step, buffer: str, shape: tuple[Size, ...]) -> Tiling | None:
    """A step -> its tiling by the rows of a buffer that it accesses; None if iterations could not each do their part.

    :param shape: sizes of the buffer's outer axes, and of its rows.
    """
    if not isinstance(step, Kernel | Call):
        return None
    found = {
        tuple(i.variable for i, size in zip(a.index, shape, strict=False) if size != 1 or i.terms or i.const != 0)
        for a in step.accesses
        if a.buffer == buffer
    }
    if len(found) != 1:
        return None
    names = next(iter(found))
    axes = dict(step.rows if isinstance(step, Kernel) else step.axes)
    sizes = [*(size for size in shape[:-1] if size != 1), shape[-1]]
    if len(names) != len(sizes) or len(set(names)) < len(names):
        return None
    if not all(v in axes and same(axes[v], n) for v, n in zip(names, sizes, strict=True)):
        return None
    tiling = Tiling(tuple(map(str, names[:-1])), str(names[-1]))
    return _of_kernel(step, tiling) if isinstance(step, Kernel) else _of_call(step, tiling)


def starts_with(access: Stmt | Operand, axes: Sequence[str]) -> bool:
    """Whether the index of an access starts with axes, but for positions that are constant."""
    return [i.variable for i in access.index if i.terms][: len(axes)] == [*axes]


def _of_kernel(kernel: Kernel, tiling: Tiling) -> Tiling | None:
    """A kernel without effects but stores to its own rows, and sums over outer axes of values of its own rows."""
    if not kernel.accums and not kernel.order:
        return tiling if _stores_own_rows(kernel, tiling) else None
    if len(kernel.rows) != len(tiling.axes):
        return None
    summed = [_summed_axes(kernel, s, tiling) for s in kernel.accums]
    if any(axes is None for axes in summed):
        return None
    accums = frozenset(s.buffer for s in kernel.accums)
    once = len(accums) == len(kernel.accums) and not accums & set(kernel.reads)
    carried = frozenset(n for axes in summed for n in axes or ())
    legal = once and _stores_own_rows(kernel, tiling)
    return replace(tiling, accums=accums, carried=carried) if legal else None


def _stores_own_rows(kernel: Kernel, tiling: Tiling) -> bool:
    stores = [s for s in kernel.body if s.op == "store"]
    barred = any(s.op in ("check", "search") for s in kernel.body)
    return not barred and all(starts_with(s, tiling.axes) for s in stores)


def _summed_axes(kernel: Kernel, accum: Stmt, tiling: Tiling) -> set[int] | None:
    """The places among the outer axes of those that an accum sums over; None if it does not add to one element for each
    position along all other axes.
    """
    named = [index.variable for index in accum.index if index.terms]
    others = {axis for axis, _ in (*kernel.rows, *kernel.cols)} - {*tiling.outer}
    if accum.combine != "sum" or accum.where or len(set(named)) < len(named) or not others <= set(named):
        return None
    if not set(named) <= others | {*tiling.outer}:
        return None
    return {n for n, axis in enumerate(tiling.outer) if axis not in named}


def _of_call(call: Call, tiling: Tiling) -> Tiling | None:
    """A product with the rows of the loop, or one that sums over them."""
    lead, out = len(tiling.outer), [i.variable for i in call.out.index if i.terms]
    if not REGISTRY[call.op].contraction or call.parts or len(out) < lead + 2:
        return None
    batch, row = out[:lead], out[lead]
    divided = {axis for o in call.operands for axis, _ in o.per}
    if batch != [*tiling.outer] or divided & {*tiling.axes}:
        return None
    return tiling if tiling.row in (row, call.result_axes[-1]) else replace(tiling, sums_rows=True)


def without_unit_axes(program: Program) -> Program:
    """A program whose products have no axes of length 1 that their results begin with, as kernels have none: they are
    position 0.
    """
    steps = (_without_unit_axes(step) if isinstance(step, Call) else step for step in program.steps)
    return replace(program, steps=tuple(steps))


def with_unit_axes(program: Program, given: Program) -> Program:
    """A program whose products that are in no loop are as they were given."""
    calls = {step.out.buffer: step for step in given.steps if isinstance(step, Call)}
    return replace(program, steps=tuple(calls[s.out.buffer] if isinstance(s, Call) else s for s in program.steps))


def _without_unit_axes(call: Call) -> Call:
    if not REGISTRY[call.op].contraction:
        return call
    single = {axis for axis in call.result_axes[:-2] if dict(call.axes)[axis] == 1}
    index = tuple(Index() if i.variable in single else i for i in call.out.index)
    axes = tuple((axis, size) for axis, size in call.axes if axis not in single)
    used = {v for o in call.operands for i in o.index for v, _ in i.terms}
    return call if single & used else replace(call, axes=axes, out=replace(call.out, index=index))
