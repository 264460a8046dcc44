"""Integer values of a kernel as affine functions of its axes, and comparisons of two of them."""

from __future__ import annotations

from .dims import Dim
from .kernel import Kernel
from .statement import Index, Stmt
from .types import I64

_MAX_COEFFICIENT = 1 << 40
"""Coefficients are below, so that a value is far from 2^63 at any sizes."""


def affine(kernel: Kernel, name: str) -> Index | None:
    """The value of a statement as an index, if it is one or the sum of one and sizes, and the difference of two such
    values does not overflow; else None.
    """
    s = kernel.stmts[name]
    found: Index | None = None
    if s.op == "index":
        found = s.index[0]
    elif s.op == "size":
        found = Index(s.attr("size"))
    elif s.op == "const" and s.dtype is I64:
        found = Index(s.attr("value"))
    elif s.op in ("add", "sub") and s.dtype is I64:
        a, b = (affine(kernel, x) for x in s.args)
        found = None if a is None or b is None else a + (b if s.op == "add" else b * -1)
    if found is None:
        return None
    numbers = [c for _, c in found.const.terms] if isinstance(found.const, Dim) else [found.const]
    return found if all(abs(c) < _MAX_COEFFICIENT for c in numbers) else None


def less_than(kernel: Kernel, s: Stmt) -> tuple[Index, Index] | None:
    """``(a, b)`` of a statement that compares affine values, which is ``a < b``; None for another statement."""
    if s.op not in ("le", "lt", "ge", "gt"):
        return None
    a, b = (affine(kernel, v) for v in (s.args if s.op in ("le", "lt") else reversed(s.args)))
    return None if a is None or b is None else (a, b + int(s.op in ("le", "ge")))
