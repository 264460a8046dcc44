"""What makes a loop transformation legal: how often each effect of a kernel is executed, and by which iterations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn, ParamSpec, TypeVar

from ...errors import InternalError
from ...ir.kernel import Kernel
from ...ir.statement import Stmt

P = ParamSpec("P")
R = TypeVar("R")


class IllegalMove(InternalError):
    """A loop transformation that would change what a kernel computes; its text is the reason.  An error of the pass
    that asked for it, if nobody catches it.
    """


def attempt(move: Callable[P, R], *args: P.args, **options: P.kwargs) -> R | None:
    """``move(*args, **options)``; None where that is not legal."""
    try:
        return move(*args, **options)
    except IllegalMove:
        return None


def refuse(move: str, kernel: Kernel, why: str) -> NoReturn:
    """
    :raises IllegalMove: always.
    """
    raise IllegalMove(f"{move} of kernel {kernel.name}: {why}")


def require_open(move: str, kernel: Kernel) -> None:
    """
    :raises IllegalMove: strategies are chosen for the kernel's accums, which depend on its axes.
    """
    if kernel.strategy or kernel.order:
        refuse(move, kernel, "the strategies of its accums are chosen")


def domain(kernel: Kernel, s: Stmt) -> frozenset[str]:
    """The axes over which an effect is executed: a column is one iteration of it if any column decides what it does."""
    return _domain(kernel, s, {a for a, _ in kernel.rows}, {a for a, _ in kernel.cols})


def domain_with_columns(kernel: Kernel, s: Stmt, cols: Collection[str]) -> frozenset[str]:
    """The same if these axes were the columns, and all others rows."""
    return _domain(kernel, s, {a for a, _ in (*kernel.rows, *kernel.cols) if a not in cols}, {*cols})


def _domain(kernel: Kernel, s: Stmt, rows: Collection[str], cols: Collection[str]) -> frozenset[str]:
    return frozenset((*rows, *(cols if kernel.stmt_level(s) & {*cols} else ())))


def place(s: Stmt) -> set[str]:
    """The axes and values in the index and the mask of an access."""
    return {v for i in s.index for v, _ in i.terms} | ({s.where} if s.where else set())


def place_level(kernel: Kernel, s: Stmt) -> frozenset[str]:
    """The axes on which the index and the mask of an access depend."""
    return frozenset(a for v in place(s) for a in (kernel.levels[v] if v.startswith("%") else (v,)))
