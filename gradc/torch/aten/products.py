"""Lines of products."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ..table import to_result


def _attention(
    query: Node,
    key: Node,
    value: Node,
    mask: Node | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    if dropout:
        raise Unsupported("attention with dropout: torch draws the random numbers of eager mode")
    return ops.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


LINES: dict[str, Any] = {
    "aten.linear.default": lambda x, weight, bias=None: ops.linear(x, weight, bias),
    "aten.matmul.default": lambda x, y: ops.matmul(x, y),
    "aten.mm.default": lambda x, y: ops.matmul(x, y),
    "aten.mv.default": lambda x, y: ops.matmul(x, y),
    "aten.dot.default": lambda x, y: ops.matmul(x, y),
    "aten.bmm.default": lambda x, y: ops.matmul(x, y),
    "aten.addmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.addmm(x, a, b, beta, alpha),
    "aten.baddbmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.baddbmm(x, a, b, beta, alpha),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.einsum.default": lambda equation, operands, *, path=None: ops.einsum(equation, *operands),
    "aten.bilinear.default": lambda x, y, weight, bias=None: ops.bilinear(x, y, weight, bias),
    "aten.linalg_cross.default": to_result(lambda x, y, *, dim=-1: ops.cross(x, y, dim)),
    "aten.addbmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.addbmm(x, a, b, beta, alpha),
    "aten.addmv.default": lambda x, a, b, *, beta=1, alpha=1: ops.addmv(x, a, b, beta, alpha),
}
