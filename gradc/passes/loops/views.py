"""Copies of elements of an array, as an affine function of their position, that who reads them does without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...ir.dims import Size, known_nonnegative, product, same
from ...ir.kernel import MOST_PARTS, Buffer, Call, Kernel, Program, Step
from ...ir.lexer import suffixed
from ...ir.node import REGISTRY, Note
from ...ir.statement import Axis, Index, Operand, Stmt
from ...ir.types import BOOL, F32, F64
from ...ir.walk import backward_slice
from .legality import IllegalMove, refuse

Footprint = tuple[tuple[Size, Size], ...]
"""Of an array: the first and the last position along each axis, or beyond its ends."""


@dataclass(frozen=True)
class View:
    """A temp whose elements are those of one array, at an affine index.

    :param number: of the kernel that stores it among the steps.
    :param target: the temp.
    :param axes: of what is stored, in order.
    :param load: whose index goes along them.
    :param guarded: the axes of the loaded array beyond whose ends there are zeros.
    """

    number: int
    target: str
    axes: tuple[Axis, ...]
    load: Stmt
    guarded: frozenset[int]

    def users(self, program: Program) -> list[Step]:
        """The steps of a program that touch it, but for the kernel."""
        names = _memory_of(program, self.target)
        touching = (s for s in program.steps if not (names.isdisjoint(s.reads) and names.isdisjoint(s.writes)))
        return [s for s in touching if self.target not in s.writes]

    def range_of(self, axis: int) -> tuple[Size, Size] | None:
        """(first, last) position that is read along an axis of the loaded array, possibly beyond its ends; None if that
        is not known.
        """
        first: Size = self.load.index[axis].const
        last: Size = first
        sizes = dict(self.axes)
        for variable, factor in self.load.index[axis].terms:
            if not isinstance(factor, int) or not known_nonnegative(sizes[variable] - 1):
                return None
            far = (sizes[variable] - 1) * factor
            first, last = (first + far, last) if factor < 0 else (first, last + far)
        return first, last


@dataclass(frozen=True)
class _Factor:
    """A factor of an axis: positions that are ``step`` apart."""

    axis: str
    size: Size
    step: Size = 1


def find_view(program: Program, target: str) -> View:
    """
    :raises IllegalMove: it is no temp that a kernel stores once, all of it, from an array of its dtype; or a value is
        computed, the index is no affine function of the axes, or the mask no test of the array's bounds.
    """
    number, kernel = _kernel_of(program, target)
    stores = [s for s in kernel.body if s.buffer == target]
    needed = backward_slice(kernel.body, stores[0].uses)
    loads = [s for s in needed if s.op == "load"]
    others = {s.op for s in needed} - {"load", "in_bounds", "bitwise_and"}
    if others or len(loads) != 1 or [s.op for s in stores] != ["store"] or stores[0].args != (loads[0].name,):
        refuse("find_view", kernel, f"what it stores to {target} is computed")
    (store,), (load,) = stores, loads
    a, b = program.buffer[load.buffer], program.buffer[target]
    if b.kind != "temp" or b.alias or b.type.dtype not in (F32, F64) or a.type.dtype is not b.type.dtype:
        refuse("find_view", kernel, f"{target} is memory that others have, or of another dtype")
    if dict(load.attrs).get("other", 0) != 0 or any(v.startswith("%") for i in load.index for v, _ in i.terms):
        refuse("find_view", kernel, f"{load.buffer} is read at positions in data, or with other values around it")
    sizes = dict((*kernel.rows, *kernel.cols))
    own = [i.variable for i in store.index if i.terms]
    whole = all(same(sizes.get(str(i.variable), 1), n) for i, n in zip(store.index, b.type.shape, strict=True))
    if None in own or len({*own}) != len(own) or {*own} != sizes.keys() or not whole:
        refuse("find_view", kernel, f"it does not store all of {target}")
    guarded = set[int]()
    for test in _bounds_tests(kernel, load.where):
        at = [k for k, i in enumerate(load.index) if i == test.index[0] and same(a.type.shape[k], test.attr("hi"))]
        if test.attr("lo") != 0 or not at:
            refuse("find_view", kernel, f"the mask of {load} is no test of its bounds")
        guarded.update(at)
    return View(number, target, tuple((str(v), sizes[str(v)]) for v in own), load, frozenset(guarded))


def _kernel_of(program: Program, target: str) -> tuple[int, Kernel]:
    """(number, kernel) of the step that writes a buffer.

    :raises IllegalMove: several do, or it is no kernel.
    """
    writers = [(i, s) for i, s in enumerate(program.steps) if target in s.writes]
    if len(writers) != 1 or not isinstance(writers[0][1], Kernel):
        raise IllegalMove(f"find_view of {target}: it is not the result of one kernel")
    return writers[0][0], writers[0][1]


def _memory_of(program: Program, root: str) -> set[str]:
    """The buffers that have the bytes of one that owns them.  A program is asked once or twice before it is changed:
    no table of all of them would pay.
    """
    return {b.name for b in program.buffers if (program.root(b.alias) if b.alias else b.name) == root}


def _bounds_tests(kernel: Kernel, mask: str) -> Iterator[Stmt]:
    """The in_bounds statements of which a mask is the conjunction."""
    if mask:
        s = kernel.stmts[mask]
        if s.op == "in_bounds":
            yield s
        for other in s.args:
            yield from _bounds_tests(kernel, other)


def pad(program: Program, target: str, footprint: Footprint) -> Program:
    """store t[n, k] <- load x[n + k] where it is inside  ->  store p[i] <- load x[i - 1] where it is inside;
     store t[n, k] <- load p[n + k + 1]: a guarded view reads a copy of the array between zeros, one for all views of
    a footprint.

    :raises IllegalMove: it is no guarded view, or reads outside of the footprint.
    """
    view = find_view(program, target)
    source, kernel = program.buffer[view.load.buffer], program.steps[view.number]
    assert isinstance(kernel, Kernel)
    for axis, (n, (first, last)) in enumerate(zip(source.type.shape, footprint, strict=True)):
        ends = view.range_of(axis) if axis in view.guarded else (0, n - 1)
        if ends is None or not known_nonnegative(ends[0] - first) or not known_nonnegative(last - ends[1]):
            refuse("pad", kernel, f"{view.load} may be outside of {footprint}")
    shape = source.type.with_shape(*(last - first + 1 for first, last in footprint))
    before = [s for s in program.steps[: view.number] if isinstance(s, Kernel) and len(s.writes) == 1]
    copies = [s for s in before if s.reads == (source.name,)]
    made = [s for s in copies if s == _padding_kernel(source, footprint, Buffer(s.writes[0], shape), kernel.note)]
    names = (suffixed(target, f".padded{k or ''}") for k in itertools.count())
    copy = (
        program.buffer[made[0].writes[0]] if made else Buffer(next(n for n in names if n not in program.types), shape)
    )
    new = () if made else (_padding_kernel(source, footprint, copy, kernel.note),)
    index = tuple(i + first * -1 for i, (first, _) in zip(view.load.index, footprint, strict=True))
    load = Stmt(next(kernel.fresh_names()), "load", (), view.load.dtype, copy.name, index)
    body = (x for s in kernel.body for x in ((load, s.altered(args=(load.name,))) if s.buffer == target else (s,)))
    buffers = (*program.buffers, *(() if made else (copy,)))
    read = replace(kernel, body=tuple(body)).live.rehashed({b.name: b.type for b in buffers})
    steps = tuple(x for s in program.steps for x in ((*new, read) if s is kernel else (s,)))
    return replace(program, steps=steps, buffers=buffers)


def inline_view(program: Program, target: str) -> Program:
    """store t[n, k] <- load x[n + k];  matmul w[m, k], t[n, k]  ->  matmul w[m, k], x[n + k]: the products that read a
    view read its array (compute_inline); one that reads a reshape of it, at parts of its axes.

    :raises IllegalMove: it is no view, or guarded; it is a result, or read by something else than products that can say
        so; or the array is written again.
    """
    view = find_view(program, target)
    kernel, read, index = program.steps[view.number], view.load.buffer, view.load.index
    assert isinstance(kernel, Kernel)
    names = _memory_of(program, target)
    users = view.users(program)
    if view.guarded or names & {b for _, b in program.outputs} or not users:
        refuse("inline_view", kernel, f"{target} is read where the array is not, or a result")
    memory = _memory_of(program, program.root(read))
    if not all(memory.isdisjoint(s.writes) for s in program.steps[view.number + 1 :]):
        refuse("inline_view", kernel, f"{read} is written again")
    rest = replace(kernel, body=tuple(s for s in kernel.body if s.buffer != target)).live.rehashed(program.types)
    changed: dict[int, tuple[Step, ...]] = {id(kernel): (rest,) if rest.writes else ()}
    for step in users:
        call = step if isinstance(step, Call) and REGISTRY[step.op].contraction else None
        for name in names & {*step.reads}:
            call = call and _with_operand(call, program.buffer[name], view.axes, read, index)
        if call is None:
            refuse("inline_view", kernel, f"{step.name} cannot read {read} at {', '.join(map(str, index))}")
        changed[id(step)] = (call,)
    steps = tuple(new for s in program.steps for new in changed.get(id(s), (s,)))
    return replace(program, steps=steps, buffers=tuple(b for b in program.buffers if b.name not in names))


def _with_operand(call: Call, view: Buffer, axes: Sequence[Axis], buffer: str, index: Sequence[Index]) -> Call | None:
    """Call -> the call whose operands read ``buffer`` at ``index`` in place of ``view``, whose axes are ``axes``; None
    if the call cannot express it.
    """
    groups = _factors(view.type.shape, axes)
    parts = dict(call.parts)
    args: list[Operand] = []
    for operand in call.args:
        if operand.buffer != view.name:
            if operand.scale and operand.scale.buffer == view.name:
                return None
            args.append(operand)
            continue
        if groups is None or operand.scale or operand.per:
            return None
        names: dict[str, Index] = {}
        for entry, own in zip(operand.index, groups, strict=True):
            axis = entry.variable
            if axis is None and (entry.terms or entry.const != 0):
                return None
            if axis is None or not own:
                continue
            made: tuple[Axis, ...] = ((axis, own[0].size),)
            if len(own) > 1:
                if axis in call.result_axes[:-2] or len(own) > MOST_PARTS:
                    return None
                made = parts.setdefault(axis, tuple((f"{axis}{i}", part.size) for i, part in enumerate(own)))
            if len(made) != len(own) or not all(same(a[1], b.size) for a, b in zip(made, own, strict=True)):
                return None
            for (name, _), part in zip(made, own, strict=True):
                names[part.axis] = names.get(part.axis, Index()) + Index.of(name) * part.step
        args.append(Operand(buffer, tuple(i.compose(names) for i in index)))
    taken = {name for name, _ in call.axes} & {part for own in parts.values() for part, _ in own}
    return None if taken else replace(call, args=tuple(args), parts=tuple(parts.items()))


def _factors(shape: Sequence[Size], axes: Sequence[Axis]) -> list[list[_Factor]] | None:
    """(shape of a reshape, axes of its source) -> for each dimension the axes, or factors of axes, that it is the
    product of; None if an axis is cut unevenly.
    """
    left = [_Factor(*axis) for axis in axes if axis[1] != 1]
    groups: list[list[_Factor]] = []
    for size in shape:
        own: list[_Factor] = []
        while not same(inside := product(part.size for part in own), size):
            if not left:
                return None
            part = left.pop(0)
            rest = size // inside if isinstance(size, int) and isinstance(inside, int) and inside > 0 else 0
            if isinstance(part.size, int) and 0 < rest < part.size and part.size % rest == 0:
                inner = part.size // rest
                left.insert(0, replace(part, size=inner))
                part = replace(part, size=rest, step=part.step * inner)
            own.append(part)
        groups.append(own)
    return None if left else groups


def _padding_kernel(source: Buffer, footprint: Footprint, copy: Buffer, note: Note) -> Kernel:
    """(array, footprint, buffer) -> the kernel that copies the array's footprint into the buffer, with zeros outside of
    the array.
    """
    shape, type_ = copy.type.shape, copy.type
    to = tuple(Index() if n == 1 else Index.of(f"i{a}") for a, n in enumerate(shape))
    at = tuple(i + first for i, (first, _) in zip(to, footprint, strict=True))
    body: list[Stmt] = []
    guarded = [
        axis for axis, (n, ends) in enumerate(zip(source.type.shape, footprint, strict=True)) if ends != (0, n - 1)
    ]
    for axis in guarded:
        attrs = (("hi", source.type.shape[axis]), ("lo", 0))
        body.append(Stmt(f"%{len(body)}", "in_bounds", (), BOOL, index=(at[axis],), attrs=attrs))
        if axis != guarded[0]:
            both = (body[-2].name, body[-1].name)
            body.append(Stmt(f"%{len(body)}", "bitwise_and", both, BOOL))
    mask, value = body[-1].name if body else "", f"%{len(body)}"
    body.append(Stmt(value, "load", (), type_.dtype, buffer=source.name, index=at, where=mask))
    body.append(Stmt("", "store", (value,), type_.dtype, buffer=copy.name, index=to))
    axes = tuple((f"i{a}", n) for a, n in enumerate(shape) if n != 1)
    made = Kernel("pad", axes[:-1], axes[-1:], tuple(body), note=note)
    return made.named_by_structure("pad", {source.name: source.type, copy.name: type_})
