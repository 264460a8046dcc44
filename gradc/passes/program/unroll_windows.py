"""unroll_windows: short reductions across contiguous rows become straight-line code of one element, whose threads take
several neighbouring elements at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod

from ...ir.dims import evaluate, nominal
from ...ir.kernel import Kernel, Program
from ...ir.statement import REDUCTIONS, Axis, Stmt
from ...ir.types import BOOL, Type
from ..loops.legality import attempt
from ..loops.reorder import reorder
from ..loops.split import split
from ..loops.unroll import unroll
from ..manager import program_pass
from .unroll_columns import divisors, has_reduction_or_check, is_contiguous_along

LONGEST = 32
"""Elements of a window at most."""
LARGEST = 512
"""Statements of an unrolled kernel at most."""
MOST_PHASES = 4
"""Rows that become one at most."""
MOST_THREADS = 1 << 18
"""Of a GPU: fewer elements than these are one each."""
FEWEST = 8
"""Windows along the axis that becomes the columns, at least: 16 bytes of 16-bit elements."""


@program_pass("REAL")
def unroll_windows(program: Program) -> Program:
    """rows(n, h, w) cols(k: 3) { store y[n, h, w] <- max_cols x[n, h + k, w] }
    ->  rows(n, h) cols(w) { store y[n, h, w] <- maximum x[n, h, w], x[n, h + 1, w], x[n, h + 2, w] }

    rows(n, h: 2*H) cols(w) { store y[n, h, w] <- x[n, h >> 1, w] }
    ->  rows(n, h: H) cols(w) { store y[n, h*2, w] <- x[n, h, w], store y[n, h*2 + 1, w] <- x[n, h, w] }

    As columns, the elements of a window are a loop that each thread has for one row: it loads one element at a time,
    and computes places and masks of each, which all rows that differ in ``w`` alone share.  Neighbours that are in the
    same windows, as those of a strided image's gradient, load these once; and which windows each is in is known.
    """
    temps = {b.name for b in program.of_kind("temp")}
    return program.with_kernels(lambda kernel: _by_phases(_unrolled(kernel, temps, program.types)))


def _unrolled(kernel: Kernel, temps: Set[str], types: Mapping[str, Type]) -> Kernel:
    lane = _lane(kernel, temps, types)
    made = attempt(unroll, kernel, kernel.cols) if lane is not None else None
    if lane is None or made is None or len(made.body) > LARGEST:
        return kernel
    return _without_selects(reorder(made, [lane[0]]))


def _lane(kernel: Kernel, temps: Set[str], types: Mapping[str, Type]) -> Axis | None:
    """The row axis along which a kernel that reduces short columns, and does nothing else, is contiguous in inputs and
    outputs, or in temps if it has no others, which can be laid out so; None: there is none.
    """
    sizes = [n for _, n in kernel.cols if isinstance(n, int)]
    if len(sizes) < len(kernel.cols) or not 2 <= prod(sizes) <= LONGEST:
        return None
    reduced = [kernel.stmts[s.args[0]] for s in kernel.body if s.op in REDUCTIONS]
    if not reduced or any(s.dtype is BOOL for s in reduced):
        return None
    if any(s.op in ("accum", "check", "scan", "search") for s in kernel.body):
        return None
    if any(s.op == "store" and kernel.is_column(s) for s in kernel.body):
        return None
    loads = [s for s in kernel.body if s.op == "load" and kernel.is_column(s)]
    accesses = [*loads, *(s for s in kernel.body if s.op == "store")]
    accesses = [s for s in accesses if s.buffer not in temps] or loads
    for lane in reversed(kernel.rows):
        long = not isinstance(lane[1], int) or lane[1] >= FEWEST
        if long and loads and all(is_contiguous_along(kernel, s, lane[0], types) for s in accesses):
            return lane
    return None


def _by_phases(kernel: Kernel) -> Kernel:
    """Partial unrolling: a map with one row for each few of an axis whose indices it divides by their number."""
    sizes = nominal([n for _, n in (*kernel.rows, *kernel.cols)])
    elements = prod(evaluate(n, sizes) for _, n in (*kernel.rows, *kernel.cols))
    if not kernel.cols or has_reduction_or_check(kernel):
        return kernel
    steps: dict[str, int] = {}
    for axis, size in kernel.rows:
        (step, *others) = divisors(kernel, axis) or {1}
        total = step * prod(steps.values())
        fits = not others and isinstance(size, int) and size % step == 0 and 1 < total <= MOST_PHASES
        if step > 1 and fits and total * len(kernel.body) <= LARGEST and total * MOST_THREADS <= elements:
            steps[axis] = step
    if not steps:
        return kernel
    parts: list[Axis] = []
    wide = kernel
    for axis, step in steps.items():
        wide, part = split(wide, axis, step)
        parts.append(part)
    made = attempt(unroll, wide, parts)
    return kernel if made is None else _without_selects(made.live)


def _without_selects(kernel: Kernel) -> Kernel:
    """where %m, (where %c, (load x[...] where %m), 0), 0  ->  where %c, (load x[...] where %m), 0"""

    def is_other(value: str, mask: str, other: str) -> bool:
        """Whether a value is that of a constant where a mask does not hold."""
        s, constant = kernel.stmts[value], kernel.stmts[other].attr("value")
        if s.op == "load":
            return s.where == mask and str(float(dict(s.attrs).get("other", 0))) == str(float(constant))
        return value == other or (s.op == "where" and all(is_other(a, mask, other) for a in s.args[1:]))

    names: dict[str, str] = {}
    body: list[Stmt] = []
    for s in kernel.body:
        mask, value, other = s.args if s.op == "where" else ("", "", "")
        if other and kernel.stmts[other].op == "const" and is_other(value, mask, other):
            names[s.name] = names.get(value, value)
            continue
        index = tuple(i.renamed(names) for i in s.index)
        args, where = tuple(names.get(a, a) for a in s.args), names.get(s.where, s.where)
        body.append(replace(s, args=args, index=index, where=where))
    return replace(kernel, body=tuple(body))
