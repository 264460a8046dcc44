"""Lines of products."""

from __future__ import annotations

from typing import Any

from ... import ops
from ...errors import Unsupported
from ...ir.node import Node
from ...ir.types import I64
from ...ops.products.attention import attention_mix, attention_scores
from ...ops.rules import converted
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


def _grouped_mm(x: Node, weight: Node, ends: Node | None = None, bias: Any = None, out_dtype: Any = None) -> Node:
    """The products of groups, whose ends are along the rows of x, along the columns of weight, or, of two matrices,
    along what is summed over; without ends each of the two has as many matrices.
    """
    if bias is not None:
        raise Unsupported("a grouped product with a bias")
    if ends is None:
        product = ops.matmul(x, weight)
    else:
        offsets = ops.pad(converted(ends, I64), ((1, 0),))
        if (x.rank, weight.rank) == (2, 3):
            product = ops.grouped_matmul(x, weight, offsets)
        elif (x.rank, weight.rank) == (3, 2):
            product = ops.grouped_matmul(weight.T, x.T, offsets).T
        elif (x.rank, weight.rank) == (2, 2):
            product = ops.grouped_outer(x.T, weight, offsets)
        else:
            raise Unsupported(f"a grouped product of ranks {x.rank} and {weight.rank} with ends")
    return product if out_dtype is None else converted(product, out_dtype)


LINES: dict[str, Any] = {
    "aten.linear.default": lambda x, weight, bias=None: ops.linear(x, weight, bias),
    "aten.matmul.default": lambda x, y: ops.matmul(x, y),
    "aten.mm.default": lambda x, y: ops.matmul(x, y),
    "aten._int_mm.default": lambda x, y: ops.integer_matmul(x, y),
    "aten.mv.default": lambda x, y: ops.matmul(x, y),
    "aten.dot.default": lambda x, y: ops.matmul(x, y),
    "aten.bmm.default": lambda x, y: ops.matmul(x, y),
    "aten.addmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.addmm(x, a, b, beta, alpha),
    "aten.baddbmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.baddbmm(x, a, b, beta, alpha),
    "aten._grouped_mm.default": _grouped_mm,
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "aten.scaled_dot_product_attention.default": _attention,
    "gradc.dropout_attention.default": lambda q, k, v, attn_mask, mask, p, causal, scale, enable_gqa: (
        ops.scaled_dot_product_attention(q, k, v, attn_mask, p, causal, scale, enable_gqa, dropout_mask=mask)
    ),
    "gradc.attention_scores.default": attention_scores,
    "gradc.attention_mix.default": attention_mix,
    "aten.einsum.default": lambda equation, operands, *, path=None: ops.einsum(equation, *operands),
    "aten.bilinear.default": lambda x, y, weight, bias=None: ops.bilinear(x, y, weight, bias),
    "aten.linalg_cross.default": to_result(lambda x, y, *, dim=-1: ops.cross(x, y, dim)),
    "aten.addbmm.default": lambda x, a, b, *, beta=1, alpha=1: ops.addbmm(x, a, b, beta, alpha),
    "aten.addmv.default": lambda x, a, b, *, beta=1, alpha=1: ops.addmv(x, a, b, beta, alpha),
}
