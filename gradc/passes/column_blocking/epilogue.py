"""A kernel that goes on with rows that a loop stores joins the steps of the loop, its epilogue.

The division of a product by a sum of the row, a cast, a transpose, a statistic of what the sweeps summed: each element
is computed from values of one row, which the loop has in hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ir.dims import Size, same, symbol
from ...ir.kernel import Kernel, Loop, Program
from ...ir.statement import REDUCTIONS, Axis, Index, Stmt
from ...ir.walk import backward_slice
from ..loops.legality import IllegalMove, refuse
from .body import BARRED
from .joining import check_between, joined

ROW, FEATURE = "i", "d"
"""What a kernel of an epilogue calls its axes."""


def with_epilogue(program: Program, loop: Loop) -> tuple[Program, Loop]:
    """store t[row + i, d] <- %0 in a loop;  store y[i, d] <- load t[i, d] * 2  ->  store y[row + i, d] <- %0 * 2 in it

    :param loop: a step of the program, with sweeps.
    """
    return joined(program, loop, _joined)


def _joined(program: Program, loop: Loop, number: int) -> tuple[Program, Loop]:
    """The program in which the step of this number is a step of the loop.

    :raises IllegalMove: it cannot be.
    """
    kernel, root = program.steps[number], program.root
    if not isinstance(kernel, Kernel):
        raise IllegalMove("no kernel")
    if number < program.steps.index(loop) or not {*map(root, kernel.reads)} & {*map(root, loop.writes)}:
        refuse("epilogue", kernel, "it reads nothing that the loop writes")
    check_between("epilogue", program, kernel, loop)
    made = _Epilogue(program, loop, kernel).kernel()
    larger = replace(loop, steps=(*loop.steps, made))
    steps = (larger if step is loop else step for step in program.steps if step is not kernel)
    return without_unread(replace(program, steps=tuple(steps)), larger)


def without_unread(program: Program, loop: Loop) -> tuple[Program, Loop]:
    """The program without the temps that only its loop writes, and nobody reads."""
    read = {b for step in program.steps for b in step.reads} | {b.alias for b in program.buffers}
    gone = {b for b in loop.writes if program.buffer[b].kind == "temp" and b not in read}

    def kept(step: Any) -> Any:
        if not isinstance(step, Kernel) or not gone & {*step.writes}:
            return step
        body = tuple(s for s in step.body if s.op != "store" or s.buffer not in gone)
        return replace(step, body=body).live.rehashed(program.types)

    steps = tuple(step for step in map(kept, loop.steps) if step.writes)
    less = replace(loop, steps=steps)
    buffers = tuple(b for b in program.buffers if b.name not in gone)
    whole = tuple(less if step is loop else step for step in program.steps)
    return replace(program, buffers=buffers, steps=whole), less


@dataclass
class _Epilogue:
    """Writes a kernel as a step of a loop.

    :ivar body: its statements.  :ivar axes: for each axis of the kernel its position in the loop.
    :ivar single: the loop's features, where there is one.
    """

    program: Program
    loop: Loop
    whole: Kernel
    body: list[Stmt] = field(default_factory=list)
    axes: dict[str, Index] = field(default_factory=dict)
    single: tuple[Axis, ...] = ()
    _known: dict[Any, str] = field(default_factory=dict)

    def kernel(self) -> Kernel:
        """
        :raises IllegalMove: it computes something else than elements of its own rows, by what the loop stores of them.
        """
        whole = self.whole
        if whole.order or whole.strategy or any(s.op in (*BARRED, *REDUCTIONS) for s in whole.body):
            refuse("epilogue", whole, "it does more than to compute elements")
        stored = self.stored()
        for s in whole.body:
            if s.op == "load" and s.buffer in stored:
                self.match(s, *stored[s.buffer])
        sizes = dict((*whole.rows, *whole.cols))
        if self.axes.keys() != sizes.keys():
            refuse("epilogue", whole, "its rows are not those of the loop")
        features = [axis for axis, own in self.axes.items() if own == Index.of(FEATURE)]
        values: dict[str, str] = {}
        for s in whole.body:
            if s.op == "load" and s.buffer in stored:
                values[s.name] = self.inlined(s, *stored[s.buffer])
            else:
                values[s.name] = self.add(s, values, self.axes)
        cols = tuple((FEATURE, sizes[axis]) for axis in features) or self.single
        kernel = Kernel("", ((ROW, symbol(self.loop.count)),), cols, tuple(self.body), note=whole.note)
        return kernel.live.named_by_structure(whole.name.rpartition("_")[0] or whole.name, self.program.types)

    def stored(self) -> Mapping[str, tuple[Kernel, Stmt]]:
        """The kernel of the loop that stores each buffer, and how; no other step of it writes one that is read."""
        found: dict[str, tuple[Kernel, Stmt]] = {}
        for step in self.loop.steps:
            own = _named(step) if isinstance(step, Kernel) else None
            for s in own.body if own else ():
                if own and s.op == "store":
                    found[s.buffer] = (own, s)
        inside = (b for step in self.loop.items for b in step.writes)
        written = [*map(self.program.root, (b for b in inside if b not in {own.name for own in self.loop.buffers}))]
        for name in self.whole.reads:
            if self.program.root(name) in written and (name not in found or written.count(name) != 1):
                refuse("epilogue", self.whole, f"the loop stores {name} otherwise")
        return {name: own for name, own in found.items() if name in self.whole.reads}

    def match(self, load: Stmt, kernel: Kernel, store: Stmt) -> None:
        """Finds by a load where the axes of the kernel are in the loop."""
        sizes = dict((*self.whole.rows, *self.whole.cols))
        for entry, own in zip(load.index, store.index, strict=True):
            axis, single = entry.variable, dict(kernel.cols).get(own.variable or "")
            if entry == Index() and single is not None and same(single, 1):
                self.single = ((FEATURE, single),)  # the only feature, of which the kernel has no axis
            if axis is None or axis not in sizes:
                continue
            size = self.size(own, kernel)
            if size is None or not same(sizes[axis], size) or self.axes.setdefault(axis, own) != own:
                refuse("epilogue", self.whole, f"its axis {axis} is none of the loop")
            if any(other != axis and place == own for other, place in self.axes.items()):
                refuse("epilogue", self.whole, f"its axis {axis} and another are one of the loop")

    def size(self, index: Index, kernel: Kernel) -> Size | None:
        """Of the axis that an index in a kernel of the loop goes over; None if it is none."""
        first, rows = self.loop.rows
        over = {Index(symbol(name)): size for name, size in self.loop.over}
        features = {Index.of(axis): size for axis, size in kernel.cols}
        return {**over, **features, Index(symbol(first), ((ROW, 1),)): rows}.get(index)

    def inlined(self, load: Stmt, kernel: Kernel, store: Stmt) -> str:
        """The value that a kernel of the loop stores where this one loads it."""
        index = tuple(i.compose(self.axes) for i in load.index)
        if self.single:
            index = tuple(
                o if i == Index() and o == Index.of(FEATURE) else i for i, o in zip(index, store.index, strict=True)
            )
        value = kernel.stmts[store.args[0]]
        if load.where or index != store.index or value.dtype is not load.dtype:
            refuse("epilogue", self.whole, f"it reads other elements of {load.buffer} than its own")
        names: dict[str, str] = {}
        for s in backward_slice(kernel.body, [value.name]):
            names[s.name] = self.add(s, names, {})
        return names[value.name]

    def add(self, s: Stmt, names: Mapping[str, str], axes: Mapping[str, Index]) -> str:
        """The name of a statement's value, computed anew if it is not there."""
        index = tuple(i.compose({**axes, **{old: Index.of(new) for old, new in names.items()}}) for i in s.index)
        own = s.altered(args=tuple(names[a] for a in s.args), index=index, where=names.get(s.where, ""))
        key = (own.op, own.args, own.dtype, own.buffer, own.index, own.where, repr(own.attrs))
        if not s.name:
            self.body.append(own)
            return ""
        if key not in self._known:
            self._known[key] = f"%{len(self._known)}"
            self.body.append(own.altered(name=self._known[key]))
        return self._known[key]


def _named(kernel: Kernel) -> Kernel:
    """A kernel of an epilogue with its axes called ``ROW`` and ``FEATURE``."""
    axes: Sequence[Axis] = (*kernel.rows, *kernel.cols)
    return kernel.with_axes(dict(zip((axis for axis, _ in axes), (ROW, FEATURE), strict=False)))
