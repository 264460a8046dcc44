"""unroll_columns: unrolls short inner loops (windows, taps, stacked values), so that the lanes of a vector run along a
longer axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...ir.kernel import Buffer, Kernel, Program, Step
from ...ir.statement import EFFECTS, REDUCTIONS, Axis, Stmt
from ...ir.types import BOOL, Type
from ..loops.accums import promote_accums
from ..loops.hoist import hoist_loads
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..loops.split import split
from ..loops.unroll import DIVISIONS, unroll
from ..manager import program_pass
from .unroll_sums import sums_apart

LONGEST = 32
"""Columns at most that are accumulated into, or unswitched; a window that is unrolled has fewer elements."""
LARGEST = 768
"""Statements of an unrolled kernel at most."""
FEWEST = 8
"""Windows along the last axis at least: fewer leave most lanes of a vector empty."""
MOST_STEPS = 4
"""Columns that become one at most."""


@program_pass("REAL")
def unroll_columns(program: Program, *, reassociate: bool = True, side_by_side: bool = True) -> Program:
    """Full unrolling of short loops, so that a longer axis is vectorized:
    rows(n, w) cols(k: 3) { max_cols x[n, w*2 + k] }  ->  rows(n) cols(w) { maximum x[n, w*2], x[n, w*2 + 1], ... }
    rows(n, w) cols(k: 3) { accum y[k] <- x[n, w+k] }  ->  rows(n, k: 3) cols(w) { accum y[k] <- sum_cols x[n, w+k] }
    rows(n, w) cols(k: 2) { y[n, w, k] <- where k < 1, a[n, w], b[n, w] }  ->
        rows(n) cols(w) { y[n, w, 0] <- a[n, w], y[n, w, 1] <- b[n, w] }
    rows(n) cols(l: 2*W) { y[n, l] <- x[n, l >> 1] }  ->  cols(l: W) { y[n, l*2] <- x[n, l], y[n, l*2+1] <- ... }
    rows(k: 2, n) cols(w) { y[k, n, w] <- where k == 0, a + b, a - b }  ->
        rows(n) cols(w) { y[0, n, w] <- a + b, y[1, n, w] <- a - b }

    As columns, the elements of a window are a loop of three inside the loop over windows, and no vector is filled;
    elements of interleaved arrays are loaded one by one; elements of strided windows are gathered one by one; and where
    each position of a short axis is another expression, all of them are computed for each position, to select one.

    :param reassociate: sums may be added up in another order, as in the second line.
    :param side_by_side: a few of them are added up side by side, into buffers of their own (:mod:`.unroll_sums`).
    """
    steps: list[Step] = []
    buffers: list[Buffer] = []
    for step in program.steps:
        if isinstance(step, Kernel):
            made, own = attempt(_rewritten, step, program, reassociate, side_by_side) or ([step], [])
            steps += made
            buffers += own
        else:
            steps.append(step)
    if tuple(steps) == program.steps:
        return program
    return replace(program, steps=tuple(steps), buffers=(*program.buffers, *buffers))


def _rewritten(
    kernel: Kernel, program: Program, reassociate: bool, side_by_side: bool
) -> tuple[Sequence[Kernel], Sequence[Buffer]]:
    """Kernel -> the kernels in place of it, and their new buffers: unswitched, unrolled over its windows or lanes, or
    interchanged, whichever applies first.
    """
    types = program.types
    if (short := unswitchable_axes(kernel)) and (folded := unswitched(kernel, short)) is not None:
        return [folded.rehashed(types)], []
    if windows := _reduces_windows(kernel, types):
        kernel = hoist_loads(reorder(unroll(kernel, kernel.cols), [kernel.rows[-1][0]]), types)
    elif _interleaves(kernel, types):
        return [reorder(unroll(kernel, kernel.cols), [kernel.rows[-1][0]]).live.rehashed(types)], []
    if (step := _unroll_factor(kernel)) > 1:
        wide, part = split(kernel, kernel.cols[-1][0], step)
        return [unroll(wide, [part]).rehashed(types)], []
    lane = None if windows or not reassociate else _axis_to_vectorize(kernel, types)
    if lane is None:
        return [kernel.rehashed(types) if windows else kernel], []
    if side_by_side and prod(n for _, n in kernel.cols if isinstance(n, int)) * len(kernel.body) <= LARGEST:
        sums = promote_accums(hoist_loads(reorder(unroll(kernel, kernel.cols), [lane]), types))
        if (made := sums_apart(sums, program)) is not None:
            return made
    return [hoist_loads(promote_accums(reorder(kernel, [lane])), types).rehashed(types)], []


def _axis_to_vectorize(kernel: Kernel, types: Mapping[str, Type]) -> str | None:
    """The row axis along which a kernel that accumulates into few columns reads contiguous memory; None if there is
    none.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    effects = [s for s in kernel.body if s.op in EFFECTS]
    if len(sizes) < len(kernel.cols) or not 2 <= prod(sizes) <= LONGEST or not effects:
        return None
    if any(s.op in REDUCTIONS or s.op in ("scan", "search") for s in kernel.body):
        return None
    if any(s.op != "accum" or s.combine != "sum" or s.where or not kernel.is_column(s) for s in effects):
        return None
    if any(v.startswith("%") for s in kernel.body for entry in s.index for v, _ in entry.terms):
        return None
    loads = [s for s in kernel.body if s.op == "load"]
    for lane in reversed(kernel.rows):
        along = [s for s in loads if _depends_on(kernel, s, lane[0])]
        long = not isinstance(lane[1], int) or lane[1] >= max(FEWEST, 2 * prod(sizes))
        if long and along and all(is_contiguous_along(kernel, s, lane[0], types) for s in along):
            return None if any(_depends_on(kernel, s, lane[0]) for s in effects) else lane[0]
    return None


def _interleaves(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether a kernel interleaves a few arrays: its short columns choose among arrays that are contiguous along the
    rows.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    if not kernel.rows or len(sizes) < len(kernel.cols) or not 2 <= prod(sizes) <= MOST_STEPS:
        return False
    lane, count = kernel.rows[-1]
    if (isinstance(count, int) and count < FEWEST) or has_reduction_or_check(kernel):
        return False
    loads = [s for s in kernel.body if s.op == "load"]
    along = [s for s in loads if _depends_on(kernel, s, lane)]
    bits = [s.dtype.bits for s in kernel.body if s.op in ("load", "store") and s.dtype is not None]
    return (
        len(along) > 1
        and min(bits) >= 8
        and all(is_contiguous_along(kernel, s, lane, types) for s in along)
        and not any(_depends_on(kernel, s, axis) for s in loads for axis, _ in kernel.cols)
        and all(_is_innermost(s, (lane, *(a for a, _ in kernel.cols))) for s in kernel.body if s.op == "store")
    )


def unswitchable_axes(kernel: Kernel, masks: bool = False) -> list[Axis]:
    """The short axes on which a kernel branches: a select tests for one position of them.

    :param masks: or the mask of a load does.
    """
    if has_reduction_or_check(kernel):
        return []
    tests = {s.name: s.index[0] for s in kernel.body if s.op == "in_bounds" and s.attr("hi") - s.attr("lo") == 1}
    choices = [s.args[0] for s in kernel.body if s.op == "where"]
    choices += [s.where for s in kernel.body if s.op == "load" and masks]
    asked = {tests[name].terms for name in choices if name in tests}
    axes = [
        axis
        for axis in (*kernel.rows, *kernel.cols)
        if isinstance(axis[1], int) and 2 <= axis[1] <= MOST_STEPS and ((axis[0], 1),) in asked
    ]
    return axes if prod(n for _, n in axes if isinstance(n, int)) <= LONGEST else []


def unswitched(kernel: Kernel, short: Sequence[Axis]) -> Kernel | None:
    """Loop unswitching: the kernel unrolled over its short axes, each branch folded; None if that is too long, or has
    no other axes.
    """
    left = [a for a, _ in (*kernel.rows, *kernel.cols) if a not in dict(short)]
    if not left:
        return None
    made = unroll(kernel, short).live
    if len(made.body) > LARGEST:
        return None
    return made if made.cols else reorder(made, left[-1:])


def _is_innermost(store: Stmt, axes: Sequence[str]) -> bool:
    """Whether a store's last dimensions are indexed by these axes, in order."""
    return [i.variable for i in store.index[-len(axes) :]] == list(axes)


def has_reduction_or_check(kernel: Kernel) -> bool:
    """Whether a kernel is more than a map: it reduces, scans, searches, checks or accumulates."""
    return any(s.op in REDUCTIONS or s.op in ("scan", "search", "check", "accum") for s in kernel.body)


def _unroll_factor(kernel: Kernel) -> int:
    """The constant that all divisions of the last column's index share, by which unrolling the column folds them; 1
    where there is none.
    """
    if not kernel.cols or has_reduction_or_check(kernel):
        return 1
    column, size = kernel.cols[-1]
    steps = divisors(kernel, column)
    bytes_ = any(s.op == "load" and s.dtype is not None and s.dtype.bits <= 8 and s.uses for s in kernel.body)
    if len(steps) != 1 or not isinstance(size, int) or bytes_:  # bytes have parts, which a block unpacks
        return 1
    (step,) = steps
    fits = 1 < step <= MOST_STEPS and size % step == 0 and size // step >= FEWEST
    return step if fits and step * len(kernel.body) <= LARGEST else 1


def divisors(kernel: Kernel, axis: str) -> set[int]:
    """The constants by which a kernel divides indices that go along an axis one by one."""
    return {
        step
        for s in kernel.body
        if s.op in DIVISIONS
        and (place := kernel.stmts[s.args[0]]).op == "index"
        and kernel.stmts[s.args[1]].op == "const"
        and (axis, 1) in place.index[0].terms
        and (step := DIVISIONS[s.op](kernel.stmts[s.args[1]].attr("value")))
    }


def _reduces_windows(kernel: Kernel, types: Mapping[str, Type]) -> bool:
    """Whether a kernel reduces short columns of rows that overlap or adjoin: what it reads along them is contiguous
    along the last row axis.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    count = prod(sizes)
    if not kernel.rows or len(sizes) < len(kernel.cols) or count < 2 or sizes[-1] >= LONGEST:
        return False  # as many as that fill vectors of their own
    lane, windows = kernel.rows[-1]
    if (isinstance(windows, int) and windows < FEWEST) or count * len(kernel.body) > LARGEST:
        return False
    if any(s.op in ("accum", "check", "scan", "search") for s in kernel.body):
        return False
    reductions = [s for s in kernel.body if s.op in REDUCTIONS]
    return (
        bool(reductions)
        and all(kernel.stmts[s.args[0]].dtype is not BOOL for s in reductions)
        and all(
            is_contiguous_along(kernel, s, lane, types) or not _depends_on(kernel, s, lane)
            for s in kernel.body
            if s.op == "load" and kernel.is_column(s)
        )
        and all(
            not kernel.is_column(s) and is_contiguous_along(kernel, s, lane, types)
            for s in kernel.body
            if s.op == "store"
        )
    )


def is_contiguous_along(kernel: Kernel, s: Stmt, lane: str, types: Mapping[str, Type]) -> bool:
    """Whether an access moves along the last dimension of its buffer that has more than one element, and no other, when
    axis ``lane`` does.
    """
    along = [
        any(v == lane or (v.startswith("%") and lane in kernel.levels[v]) for v, _ in entry.terms)
        for entry, size in zip(s.index, types[s.buffer].shape, strict=True)
        if size != 1
    ]
    return bool(along) and along[-1] and not any(along[:-1])


def _depends_on(kernel: Kernel, s: Stmt, axis: str) -> bool:
    """Whether the address of an access depends on an axis."""
    return any(v == axis or axis in kernel.levels.get(v, ()) for entry in s.index for v, _ in entry.terms)
