"""read_in_place: implicit im2col: a matrix product reads an array through the affine index of the kernel that only
copied its elements.

The windows of a convolution are such a view: the product's packing reads the image, or a copy of it between zeros, and
there is no array of windows, which is as many times larger as a window has elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.dims import Size, evaluate, known_nonnegative, nominal, product, same
from ...ir.kernel import MOST_PARTS, Buffer, Call, Kernel, Program, Step
from ...ir.lexer import suffixed
from ...ir.node import REGISTRY, Note
from ...ir.statement import Axis, Index, Operand, Stmt
from ...ir.types import BOOL, F32, F64
from ...ir.walk import backward_slice
from ..manager import program_pass

WIDER = 2
"""Rows are narrow next to arrays of as many times their elements."""


@dataclass(frozen=True)
class _View:
    """What a store copies: elements of one array, at an affine index.

    :param target: where it is stored.
    :param axes: of what is stored, in order.
    :param load: whose index goes along them.
    :param guarded: the axes of the loaded array beyond whose ends there are zeros.
    """

    target: str
    axes: tuple[Axis, ...]
    load: Stmt
    guarded: frozenset[int]

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


Footprint = tuple[tuple[Size, Size], ...]
"""Of an array: the first and the last position along each axis, or beyond its ends."""


@program_pass("BITS")
def read_in_place(program: Program) -> Program:
    """Implicit im2col: kernel { store t[n, c, ky, kx, y, x] <- load image[n, c, y + ky, x + kx] };  matmul w[m, k],
    t[n, k, p]
    ->  matmul w[m, k], image[n, k0, p0 + k1, p1 + k2] with the parts k0, k1, k2 of k and p0, p1 of p

    Where the kernel stores zeros beyond the ends of an array, it copies the array between zeros instead.
    """
    kernels = [step for step in program.steps if isinstance(step, Kernel)]
    found = [(k, [m for s in k.body if s.op == "store" and (m := _view_of_store(k, s, program))]) for k in kernels]
    copies: dict[tuple[str, Footprint], Buffer] = {}
    for kernel, own in found:
        for view in own:
            of_same_array = [m for _, ms in found for m in ms if m.load.buffer == view.load.buffer and m.guarded]
            rest = _without_store(kernel, view.target, program)
            changed = _forward_to_products(program, kernel, rest, view, of_same_array, copies)
            program, kernel = changed, kernel if changed is program else rest
    return program


def _without_store(kernel: Kernel, target: str, program: Program) -> Kernel:
    """Kernel -> the kernel without the store to a buffer and what only that store used."""
    rest = replace(kernel, body=tuple(s for s in kernel.body if s.op != "store" or s.buffer != target)).live
    return rest.named_by_structure(kernel.name.rpartition("_")[0], program.types)


def _view_of_store(kernel: Kernel, store: Stmt, program: Program) -> _View | None:
    """(kernel, store to a temp) -> the view that it copies; None if a value is computed, or the index is no affine
    function of the axes.
    """
    needed = backward_slice(kernel.body, store.uses)
    loads = [s for s in needed if s.op == "load"]
    others = {s.op for s in needed} - {"load", "in_bounds", "bitwise_and"}
    if others or len(loads) != 1 or store.args != (loads[0].name,) or store.where:
        return None
    if sum(s.buffer == store.buffer for s in kernel.body) != 1:
        return None
    (load,) = loads
    source, target = program.buffer[load.buffer], program.buffer[store.buffer]
    dtype = target.type.dtype
    if target.kind != "temp" or target.alias or dtype not in (F32, F64) or source.type.dtype is not dtype:
        return None
    if dict(load.attrs).get("other", 0) != 0 or any(v.startswith("%") for i in load.index for v, _ in i.terms):
        return None
    sizes = dict((*kernel.rows, *kernel.cols))
    own = [i.variable for i in store.index if i.terms]
    whole = all(i.terms or same(n, 1) for i, n in zip(store.index, target.type.shape, strict=True))
    if None in own or len(set(own)) != len(own) or set(own) != set(sizes) or not whole:
        return None
    guarded = set[int]()
    for test in _bounds_tests(kernel, load.where):
        at = [a for a, i in enumerate(load.index) if i == test.index[0] and same(source.type.shape[a], test.attr("hi"))]
        if test.attr("lo") != 0 or not at:
            return None
        guarded.update(at)
    return _View(store.buffer, tuple((str(v), sizes[str(v)]) for v in own), load, frozenset(guarded))


def _bounds_tests(kernel: Kernel, mask: str) -> Iterator[Stmt]:
    """The in_bounds statements of which a mask is the conjunction."""
    if mask:
        s = kernel.stmts[mask]
        if s.op == "in_bounds":
            yield s
        for other in s.args:
            yield from _bounds_tests(kernel, other)


def _forward_to_products(
    program: Program,
    kernel: Kernel,
    rest: Kernel,
    view: _View,
    of_same_array: Sequence[_View],
    copies: dict[tuple[str, Footprint], Buffer],
) -> Program:
    """Program -> the program whose products read a view's array at the view's index, padded by a kernel of its own
    where the view is guarded; as it is unless all readers are such products.

    :param rest: the kernel without the store of the view.
    :param of_same_array: the views of the same array and the zeros around it.
    :param copies: padded copies of arrays, so far.
    """
    target = view.target
    views = {b.name for b in program.buffers if program.root(b.name) == target}
    users = [step for step in program.steps if step is not kernel and views & {*step.reads, *step.writes}]
    if views & {b for _, b in program.outputs} or not users:
        return program
    if _is_narrow_slice(program, view, [b for step in users for b in (*step.reads, *step.writes) if b not in views]):
        return program
    read, index = program.buffer[view.load.buffer], view.load.index
    made: tuple[Kernel, ...] = ()
    footprint: Footprint | None = ()
    if view.guarded:
        footprints = (_footprint(read, group) for group in (of_same_array, [view]))
        footprint = next((r for r in footprints if r is not None and not _exceeds(r, view)), None)
        if footprint is None:
            return program
        copy = copies.get((read.name, footprint))
        if copy is None:
            copy = Buffer(suffixed(target, ".padded"), read.type.with_shape(*_extents(footprint)))
            made = (_padding_kernel(read, footprint, copy, kernel.note),)
        read, index = copy, tuple(i + first * -1 for i, (first, _) in zip(index, footprint, strict=True))
    changed: dict[int, tuple[Step, ...]] = {id(kernel): (*made, *([rest] if rest.writes else []))}
    for step in users:
        call = step if isinstance(step, Call) and REGISTRY[step.op].contraction else None
        for name in views & {*step.reads}:
            call = call and _with_operand(call, program.buffer[name], view.axes, read.name, index)
        if call is None:
            return program
        changed[id(step)] = (call,)
    if footprint:
        copies[view.load.buffer, footprint] = read
    steps = tuple(new for s in program.steps for new in changed.get(id(s), (s,)))
    kept = [b for b in program.buffers if b.name not in views]
    return replace(program, buffers=(*kept, *((read,) if made else ())), steps=steps)


def _footprint(source: Buffer, moves: Sequence[_View]) -> Footprint | None:
    """(array, views of it) -> the box of positions that any of them reads; None if it is not known."""
    found: list[tuple[Size, Size]] = []
    guarded = {axis for view in moves for axis in view.guarded}
    for axis, size in enumerate(source.type.shape):
        if axis not in guarded:
            found.append((0, size - 1))
            continue
        ends = [view.range_of(axis) for view in moves]
        known = [end for end in ends if end is not None]
        first = [low for low, _ in known if all(known_nonnegative(other - low) for other, _ in known)]
        last = [high for _, high in known if all(known_nonnegative(high - other) for _, other in known)]
        if len(known) < len(ends) or not first or not last:
            return None
        found.append((first[0], last[0]))
    return tuple(found)


def _extents(footprint: Footprint) -> list[Size]:
    """Footprint -> its size along each axis."""
    return [last - first + 1 for first, last in footprint]


def _exceeds(footprint: Footprint, view: _View) -> bool:
    """Whether a footprint has more elements than the view, at nominal sizes: a padded copy would not pay."""
    copied, stored = product(_extents(footprint)), product(size for _, size in view.axes)
    typical = nominal([copied, stored])
    return evaluate(copied, typical) > evaluate(stored, typical)


def _is_narrow_slice(program: Program, view: _View, others: Sequence[str]) -> bool:
    """Whether a view is a contiguous slice of rows, next to which what the products read or write is wide: it costs
    little, and a product that reads it elsewhere cannot be blocked by rows.
    """
    last, size = view.axes[-1]
    source = program.buffer[view.load.buffer].type.shape
    in_order = [[v for v, _ in index.terms] for index in view.load.index] == [[axis] for axis, _ in view.axes]
    if view.guarded or not in_order or view.load.index[-1] != Index.of(last) or not same(source[-1], size):
        return False
    rows = product(n for _, n in view.axes)
    wide = [program.types[b].count for b in others if program.buffer[program.root(b)].kind == "temp"]
    typical = nominal([rows, *wide])
    return any(evaluate(n, typical) >= WIDER * evaluate(rows, typical) for n in wide)


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
        args.append(Operand(buffer, tuple(_substituted(i, names) for i in index)))
    taken = {name for name, _ in call.axes} & {part for own in parts.values() for part, _ in own}
    return None if taken else replace(call, args=tuple(args), parts=tuple(parts.items()))


def _substituted(index: Index, names: Mapping[str, Index]) -> Index:
    """Affine index -> the index with expressions for its axes; an axis without one is 0."""
    total = Index(index.const)
    for variable, factor in index.terms:
        total = total + names.get(variable, Index()) * factor
    return total


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
