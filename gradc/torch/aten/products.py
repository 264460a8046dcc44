"""Lines of products."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...ir.node import Node


def _with_addend(addend: Node, product: Node, beta: Any, alpha: Any) -> Node:
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (addend if beta == 1 else addend * beta)


LINES: dict[str, Any] = {
    "aten.linear.default": lambda x, weight, bias=None: ops.linear(x, weight, bias),
    "aten.matmul.default": lambda x, y: ops.matmul(x, y),
    "aten.mm.default": lambda x, y: ops.matmul(x, y),
    "aten.mv.default": lambda x, y: ops.matmul(x, y),
    "aten.dot.default": lambda x, y: ops.matmul(x, y),
    "aten.bmm.default": lambda x, y: ops.matmul(x, y),
    "aten.addmm.default": lambda x, a, b, *, beta=1, alpha=1: _with_addend(x, ops.matmul(a, b), beta, alpha),
    "aten.baddbmm.default": lambda x, a, b, *, beta=1, alpha=1: _with_addend(x, ops.matmul(a, b), beta, alpha),
    "aten.addmv.default": lambda x, a, b, *, beta=1, alpha=1: _with_addend(x, ops.matmul(a, b), beta, alpha),
}
