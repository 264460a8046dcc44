"""Loop interchange: which axes of a kernel are rows and which are columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.kernel import Kernel
from ...ir.statement import EFFECTS, REDUCTIONS, Stmt
from .legality import domain, domain_with_columns, place, place_level, refuse, require_open


def reorder(kernel: Kernel, cols: Sequence[str]) -> Kernel:
    """rows(n, k: 3) cols(w)  ->  rows(n, w) cols(k: 3), where ``cols`` is ``("k",)``: the named axes become the columns
    and all others rows, in the order that they have.

    A reduction may be over other columns if all that is done with it is to combine it likewise: it and the accum are
    one sum over rows and columns then.

    :param cols: axes of the kernel.
    :raises IllegalMove: a scan or a reduction is over the columns; an effect would happen more or less often; a check
        would find another bad position first.
    """
    axes = dict((*kernel.rows, *kernel.cols))
    rows = tuple((a, n) for a, n in axes.items() if a not in cols)
    made = replace(kernel, rows=rows, cols=tuple((a, axes[a]) for a in cols))
    require_open("reorder", kernel)
    moved = [a for a, _ in kernel.cols] != [*cols]
    if moved and kernel.scans:
        refuse("reorder", kernel, "it scans its columns")
    if any(s.op == "check" for s in kernel.body) and [*axes] != [a for a, _ in (*made.rows, *made.cols)]:
        refuse("reorder", kernel, "it reports the first bad position")
    for s in kernel.body:
        if moved and s.op in REDUCTIONS:
            _require_combined(kernel, s, cols)
        elif s.op in EFFECTS and not _reduced(kernel, s):
            now, then = domain(kernel, s), domain_with_columns(kernel, s, cols)
            if now != then:
                refuse("reorder", kernel, f"{s} would be executed over {sorted(then)}, not {sorted(now)}")
    return made


def _reduced(kernel: Kernel, s: Stmt) -> bool:
    return s.op == "accum" and kernel.stmts[s.args[0]].op in REDUCTIONS


def _require_combined(kernel: Kernel, reduction: Stmt, cols: Sequence[str]) -> None:
    """
    :raises IllegalMove: a reduction is more than a part of what accums combine, at places that no column decides.
    """
    columns = {*cols, *(a for a, _ in kernel.cols)}
    for s in (s for s in kernel.body if reduction.name in s.uses):
        if s.op != "accum" or s.combine != REDUCTIONS[reduction.op] or reduction.name in place(s):
            refuse("reorder", kernel, f"{s} reads a reduction of the columns")
        if place_level(kernel, s) & columns:
            refuse("reorder", kernel, f"{s} is to one place for each column")
