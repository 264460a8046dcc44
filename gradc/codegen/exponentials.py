"""Exponentials that take fewer instructions: those whose argument is known not to be above 0, and those of which memory
sees no more than the leading bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ir.statement import Stmt
from ..ir.types import F32, DType


def is_exp_below_one(stmts: Mapping[str, Stmt], s: Stmt) -> bool:
    """Whether a value is an exponential in f32 of what is not above 0, or NaN: ``x - max_cols x``, where the maximum
    may be taken to be 0 if it is -inf, or ``x * x`` times a negative number.
    """
    if s.op != "exp" or s.dtype is not F32:
        return False
    power = stmts[s.args[0]]
    if power.op == "sub":
        top = _largest(stmts, stmts[power.args[1]])
        return top.op == "max_cols" and top.args[0] == power.args[0]
    if power.op != "mul":
        return False
    sides = [stmts[name] for name in power.args]
    square = any(side.op == "mul" and side.args[0] == side.args[1] for side in sides)
    return square and any(side.op == "const" and side.attr("value") < 0 for side in sides)


def _largest(stmts: Mapping[str, Stmt], top: Stmt) -> Stmt:
    """``where(x == -inf, 0, x)``  ->  ``x``."""
    if top.op != "where":
        return top
    test, zero, largest = (stmts[name] for name in top.args)
    if test.op != "eq" or test.args[0] != largest.name or zero.op != "const" or zero.attr("value") != 0:
        return top
    least = stmts[test.args[1]]
    return largest if least.op == "const" and least.attr("value") == -math.inf else top


def is_exp_of_magnitude(stmts: Mapping[str, Stmt], s: Stmt) -> bool:
    """Whether a value is ``exp(-|x|)`` in f32.  On a CPU sigmoid_f32 has the same: compilers make one of both."""
    if s.op != "exp" or s.dtype is not F32 or stmts[s.args[0]].op != "neg":
        return False
    return stmts[stmts[s.args[0]].args[0]].op == "abs"


def narrow_exponentials(statements: Sequence[Stmt]) -> frozenset[str]:
    """The exponentials in f32 that reach memory only through casts to shorter floats, and no decision either; but for
    those that a sigmoid has, too.

    :param statements: of a kernel, each after those that it uses.
    """
    seen: set[str] = set()  # values that something takes as they are
    for s in reversed(statements):
        if s.op == "cast" and s.dtype is not None and _is_short(s.dtype):
            continue
        if s.dtype is not F32 or s.op == "store" or not s.name or s.name in seen:
            seen.update(s.uses)
    values = {s.name: s for s in statements if s.name}
    return frozenset(
        s.name
        for s in statements
        if s.op == "exp" and s.dtype is F32 and s.name not in seen and not is_exp_of_magnitude(values, s)
    )


def _is_short(dtype: DType) -> bool:
    return dtype.is_float and dtype.bits < F32.bits
