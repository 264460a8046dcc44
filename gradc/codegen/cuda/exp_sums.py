"""The largest of a row and the sum of exp(x - largest) in one pass over its columns.

Two phases of a row program, ``m = max_cols x`` and ``sum_cols exp(x - m)``, read a row twice.  Where it is not kept in
registers they become one phase (M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, 2018): a thread
keeps the largest value so far and the sum of exp(x) 2^(-8 base), with an integer base that follows it.
The order in which values are added stays one that shapes alone decide, and rows with infinities and NaN give what the
two phases give (``templates/cuda/exp_sums.h``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from ...ir.kernel import Kernel, Phase
from ...ir.statement import Stmt
from ...ir.types import F32


@dataclass(frozen=True)
class ExpSum:
    """A sum of exponentials that is found together with the maximum.

    :param stmt: the sum.
    :param finite_shift: whether 0 is subtracted instead of an infinite maximum.
    """

    stmt: Stmt
    finite_shift: bool


def with_exp_sums(kernel: Kernel) -> tuple[tuple[Phase, ...], dict[str, ExpSum]]:
    """The phases, where each sum of exponentials is a root of the phase of its maximum; these sums by the maximum."""
    sums = {p.roots[0].name: s for p, q in pairwise(kernel.passes) if (s := _exp_sum(kernel, p, q)) is not None}
    phases: list[Phase] = []
    waiting: tuple[Stmt, ...] = ()  # statements of the row that used to stand between the two
    for p in kernel.passes:
        p = replace(p, row=(*waiting, *p.row))
        waiting = ()
        if phases and phases[-1].roots and phases[-1].roots[0].name in sums and len(phases[-1].roots) == 1:
            phases[-1] = replace(phases[-1], roots=(*phases[-1].roots, *p.roots))
            waiting = p.row
        else:
            phases.append(p)
    return (*phases, *([Phase(waiting, (), ())] if waiting else [])), sums


def _exp_sum(kernel: Kernel, p: Phase, q: Phase) -> ExpSum | None:
    """The sum of the second phase, if the two are of this form."""
    if [s.op for s in p.roots] != ["max_cols"] or [s.op for s in q.roots] != ["sum_cols"]:
        return None
    (top,), (total,) = p.roots, q.roots
    power = kernel.stmts[total.args[0]]
    if power.op != "exp" or {s.dtype for s in (top, power, total)} != {F32}:
        return None
    difference = kernel.stmts[power.args[0]]
    if difference.op != "sub" or difference.args[0] != top.args[0]:
        return None
    shift = difference.args[1]
    if shift == top.name:
        return ExpSum(total, finite_shift=False)
    return ExpSum(total, finite_shift=True) if _is_finite_shift(kernel.stmts, shift, top.name) else None


def _is_finite_shift(stmts: Mapping[str, Stmt], shift: str, top: str) -> bool:
    """Whether a value is ``where(|top| == inf, 0, top)``."""
    s = stmts[shift]
    if s.op != "where" or s.args[2] != top:
        return False
    test, zero = stmts[s.args[0]], stmts[s.args[1]]
    if test.op != "eq" or zero.op != "const" or zero.attr("value") != 0:
        return False
    sides = [stmts[a] for a in test.args]
    size = [x for x in sides if x.op == "abs" and x.args == (top,)]
    limit = [x for x in sides if x.op == "const" and x.attr("value") == float("inf")]
    return len(size) == len(limit) == 1
