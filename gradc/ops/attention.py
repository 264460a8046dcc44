"""Scaled dot product attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..errors import TypeRuleError
from ..ir.dims import Size, same
from ..ir.node import Node, call
from ..ir.op import BadSample, Function, Sample
from ..ir.operands import broadcast_shapes
from .movement import iota
from .pointwise import le, where
from .reduce import safe_softmax
from .rules import converted, floating, full, reshaped, spread

FEW = 16
"""Rows of a query that are multiplied together with those of other heads."""


def _check(query: Node, key: Node, value: Node, dropout_p: float) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if floating(x.type).rank < 2:
            raise TypeRuleError(f"{name} of rank {x.rank}: [..., L, E]")
        if x.dtype is not query.dtype:
            raise TypeRuleError(f"dtypes differ: query {query.dtype} and {name} {x.dtype}; write a cast")
    if not same(query.shape[-1], key.shape[-1]):
        raise TypeRuleError(f"query has {query.shape[-1]} features and key {key.shape[-1]}")
    if not same(key.shape[-2], value.shape[-2]):
        raise TypeRuleError(f"there are {key.shape[-2]} keys and {value.shape[-2]} values")
    if dropout_p != 0:
        raise TypeRuleError(f"dropout_p={dropout_p}: there are no random numbers; 0 is the one probability")


def _grouped(query: Node, key: Node) -> int:
    """How many heads of the query share one of the key."""
    if query.rank < 3 or key.rank < 3:
        raise TypeRuleError("enable_gqa wants an axis of heads: [..., H, L, E]")
    heads, shared = query.shape[-3], key.shape[-3]
    if not isinstance(heads, int) or not isinstance(shared, int) or shared == 0 or heads % shared:
        raise TypeRuleError(f"{heads} heads of the query are not a multiple of the key's {shared}")
    return heads // shared


def _split(x: Node, group: int) -> Node:
    """[..., G * group, L, E]  ->  [..., G, group, L, E]"""
    *lead, heads, rows, width = x.shape
    return reshaped(x, (*lead, heads // group, group, rows, width))


def _product(left: Node, right: Node) -> Node:
    """[..., G, group, L, K] x [..., G, 1, K, N]  ->  [..., G, group, L, N]

    Few rows are one matrix with those of the heads that share their right side, which is then read once; many are not,
    so that the steps of attention are one loop over them.
    """
    *lead, group, rows, width = left.shape
    if not isinstance(rows, int) or rows > FEW:
        return call("matmul", left, right)
    shared = reshaped(right, (*right.shape[:-3], *right.shape[-2:]))
    merged = call("matmul", reshaped(left, (*lead, group * rows, width)), shared)
    return reshaped(merged, (*merged.shape[:-2], group, rows, merged.shape[-1]))


def _attention(
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    _check(query, key, value, dropout_p)
    rows: Size = query.shape[-2]
    keys = key.shape[-2]
    if is_causal and attn_mask is not None:
        raise TypeRuleError("is_causal with an attn_mask: one of them")
    if scale is None:
        if not isinstance(query.shape[-1], int):
            raise TypeRuleError(f"the features {query.shape[-1]} are symbolic: give a scale")
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else math.inf
    heads = query.shape[-3:-2]
    group = _grouped(query, key) if enable_gqa else 1
    product: Callable[[Node, Node], Node] = partial(call, "matmul")
    if group > 1:  # an axis for the heads that share a key
        query, key, value, product = _split(query, group), _split(key, 1), _split(value, 1), _product
        if attn_mask is not None and attn_mask.rank > 2:
            if attn_mask.shape[-3] not in (1, *heads):
                raise TypeRuleError(f"attn_mask has {attn_mask.shape[-3]} heads and query {heads[0]}")
            attn_mask = _split(attn_mask, 1 if attn_mask.shape[-3] == 1 else group)
    # the wide product of 16-bit types is not rounded before the softmax
    compute = query.dtype.compute
    scores = product(converted(query, compute), converted(key, compute).T) * scale
    if is_causal:
        earlier = le(iota.plain(shape=(rows, keys), axis=1), iota.plain(shape=(rows, keys)))
        scores = where(spread(earlier, scores.shape), scores, full(-math.inf, scores))
    if attn_mask is not None:
        shape = broadcast_shapes([scores.shape, attn_mask.shape])
        scores, mask = spread(scores, shape), spread(attn_mask, shape)
        if mask.dtype.kind == "b":
            scores = where(mask, scores, full(-math.inf, scores))
        else:
            floating(mask.type)
            scores = scores + converted(mask, compute)
    weights = safe_softmax(scores, -1)
    y = converted(product(weights, converted(value, compute)), query.dtype)
    return reshaped(y, (*y.shape[:-4], *heads, *y.shape[-2:])) if group > 1 else y


scaled_dot_product_attention = Function(
    "scaled_dot_product_attention",
    write=_attention,
    samples=(
        Sample(("F[2,4,3,8]", "F[2,2,5,8]", "F[2,2,5,6]"), {"is_causal": True, "enable_gqa": True}),
        Sample(("F[2,3,8]", "F[2,5,8]", "F[2,5,6]", "bool[3,5]"), {"scale": 0.5}),
        Sample(("F[2,2,3,8]", "F[2,2,5,8]", "F[2,2,5,6]", "F[2,1,3,5]")),
        Sample(("F[N,M,8]", "F[N,M,8]", "F[N,M,8]"), {"is_causal": True}),
    ),
    bad=(
        BadSample(("f32[3,8]", "f32[5,7]", "f32[5,7]"), match="query has 8 features and key 7"),
        BadSample(("f32[3,8]", "f32[5,8]", "f32[4,8]"), match="5 keys and 4 values"),
        BadSample(("f32[3,8]", "f32[5,8]", "f32[5,8]"), {"dropout_p": 0.5}, match="dropout_p=0.5"),
        BadSample(("f32[3,3,8]", "f32[2,5,8]", "f32[2,5,8]"), {"enable_gqa": True}, match="not a multiple"),
        BadSample(
            ("f32[4,3,8]", "f32[2,5,8]", "f32[2,5,8]", "f32[3,3,5]"),
            {"enable_gqa": True},
            match="attn_mask has 3 heads and query 4",
        ),
    ),
    doc=(
        "softmax(query @ key.T * scale + mask) @ value over [..., L, E], [..., S, E] and [..., S, D]; a bool mask keeps"
        " where it is true; a row without keys is zeros; the default scale is 1/sqrt(E); with enable_gqa heads of the"
        " query share those of the key and value"
    ),
    source="torch.nn.functional.scaled_dot_product_attention; Vaswani et al. 2017",
)
