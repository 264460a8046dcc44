"""read_in_place: implicit im2col: a matrix product reads an array through the affine index of the kernel that only
copied its elements.

The windows of a convolution are such a view: the product's packing reads the image, or a copy of it between zeros, and
there is no array of windows, which is as many times larger as a window has elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.dims import Size, evaluate, known_nonnegative, nominal, product, same
from ...ir.kernel import Kernel, Program
from ...ir.statement import Index
from ...ir.types import Type
from ..loops.legality import attempt
from ..loops.views import Footprint, View, find_view, inline_view, pad
from ..manager import program_pass

WIDER = 2
"""Rows are narrow next to arrays of as many times their elements."""


@program_pass("BITS")
def read_in_place(program: Program) -> Program:
    """Implicit im2col: kernel { store t[n, c, ky, kx, y, x] <- load image[n, c, y + ky, x + kx] };  matmul w[m, k],
    t[n, k, p]
    ->  matmul w[m, k], image[n, k0, p0 + k1, p1 + k2] with the parts k0, k1, k2 of k and p0, p1 of p

    Where the kernel stores zeros beyond the ends of an array, it copies the array between zeros instead.
    """
    stored = [b for step in program.steps if isinstance(step, Kernel) for b in step.writes]
    views = [view for b in stored if (view := attempt(find_view, program, b)) is not None]
    for view in views:
        target = view.target
        if not view.guarded and not _is_narrow_slice(program, view):
            program = attempt(inline_view, program, target) or program
        if not view.guarded:
            continue
        source = program.types[view.load.buffer]
        of_same_array = [v for v in views if v.load.buffer == view.load.buffer and v.guarded]
        tried = (_footprint(source, group) for group in (of_same_array, [view]))
        box = next((box for box in tried if box is not None and not _exceeds(box, view)), None)
        if box is not None and (padded := attempt(pad, program, target, box)) is not None:
            program = attempt(inline_view, padded, target) or program
    return program


def _footprint(source: Type, views: Sequence[View]) -> Footprint | None:
    """(array, views of it) -> the box of positions that any of them reads; None if it is not known."""
    found: list[tuple[Size, Size]] = []
    guarded = {axis for view in views for axis in view.guarded}
    for axis, size in enumerate(source.shape):
        if axis not in guarded:
            found.append((0, size - 1))
            continue
        ends = [view.range_of(axis) for view in views]
        known = [end for end in ends if end is not None]
        first = [low for low, _ in known if all(known_nonnegative(other - low) for other, _ in known)]
        last = [high for _, high in known if all(known_nonnegative(high - other) for _, other in known)]
        if len(known) < len(ends) or not first or not last:
            return None
        found.append((first[0], last[0]))
    return tuple(found)


def _exceeds(footprint: Footprint, view: View) -> bool:
    """Whether a footprint has more elements than the view, at nominal sizes: a padded copy would not pay."""
    copied, stored = product(last - first + 1 for first, last in footprint), product(size for _, size in view.axes)
    typical = nominal([copied, stored])
    return evaluate(copied, typical) > evaluate(stored, typical)


def _is_narrow_slice(program: Program, view: View) -> bool:
    """Whether a view is a contiguous slice of rows, next to which what the products read or write is wide: it costs
    little, and a product that reads it elsewhere cannot be blocked by rows.
    """
    users = view.users(program)
    others = [b for s in users for b in (*s.reads, *s.writes) if program.root(b) != view.target]
    last, size = view.axes[-1] if view.axes else ("", 1)
    source = program.buffer[view.load.buffer].type.shape
    in_order = [[v for v, _ in index.terms] for index in view.load.index] == [[axis] for axis, _ in view.axes]
    if not in_order or view.load.index[-1] != Index.of(last) or not same(source[-1], size):
        return False
    rows = product(n for _, n in view.axes)
    wide = [program.types[b].count for b in others if program.buffer[program.root(b)].kind == "temp"]
    typical = nominal([rows, *wide])
    return any(evaluate(n, typical) >= WIDER * evaluate(rows, typical) for n in wide)
