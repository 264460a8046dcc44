"""Scaled dot product attention.

Of 16-bit operands, all of its products multiply 16-bit operands in f32, forward and backward.  What is rounded to their
dtype are the exponentials before they meet the values (their sum divides after the product, so that the largest, which
is 1, is exact), in the backward the weights before they meet the cotangent, and the gradient of the scores before it
meets queries and keys.  The scores, their softmax and the gradient of the weights are in f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ...errors import TypeRuleError
from ...ir.dims import Size, same
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Sample
from ...ir.operands import broadcast_shapes
from ...ir.types import Type
from ..elementwise.pointwise import le, where
from ..reductions.reduce import safe_exponentials, safe_softmax, sum
from ..rules import along, converted, floating, full, reshaped, spread
from ..shapes.movement import iota
from .contract import mixed_product_slopes, mixed_product_type

FEW = 16
"""Rows of a query that are multiplied together with those of other heads."""


def scale_of_kept(p: float) -> float:
    """What a dropout multiplies with what it keeps."""
    return 1 / (1 - p) if p < 1 else 0.0


def _check(query: Node, key: Node, value: Node, dropout_p: float, dropout_mask: Node | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if floating(x.type).rank < 2:
            raise TypeRuleError(f"{name} of rank {x.rank}: [..., L, E]")
        if x.dtype is not query.dtype:
            raise TypeRuleError(f"dtypes differ: query {query.dtype} and {name} {x.dtype}; write a cast")
    if not same(query.shape[-1], key.shape[-1]):
        raise TypeRuleError(f"query has {query.shape[-1]} features and key {key.shape[-1]}")
    if not same(key.shape[-2], value.shape[-2]):
        raise TypeRuleError(f"there are {key.shape[-2]} keys and {value.shape[-2]} values")
    if not 0 <= dropout_p <= 1:
        raise TypeRuleError(f"dropout_p={dropout_p} is no probability")
    if (dropout_mask is not None) != (dropout_p > 0):
        raise TypeRuleError(f"dropout_p={dropout_p} {'without' if dropout_p else 'with'} a dropout_mask")
    if dropout_mask is not None and dropout_mask.dtype.kind != "b":
        raise TypeRuleError(f"dropout_mask is {dropout_mask.type}: a bool for each weight")


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


def _softmax_matmul(x: Type, value: Type) -> Type:
    if x.dtype not in (value.dtype, value.dtype.compute):
        raise TypeRuleError(
            f"dtypes differ: {x.dtype} and {value.dtype}; the first may be what the second is computed in"
        )
    return mixed_product_type(x, value).with_dtype(value.dtype)


def _softmax_matmul_value(x: Node, value: Node) -> Node:
    each, share = safe_exponentials(x, x.rank - 1)
    y = call("mixed_matmul", each, value)
    return converted(y * along(converted(share, y.dtype), y.shape, (y.rank - 1,)), value.dtype)


def _softmax_matmul_surrogate(x: Node, value: Node) -> Node:
    wide = value.dtype.compute
    return converted(call("matmul", safe_softmax(converted(x, wide), -1), converted(value, wide)), value.dtype)


def _softmax_matmul_vjp(g: Node, y: Node, x: Node, value: Node) -> tuple[Node, Node]:
    # of weights @ value, then dx = weights (dw - sum(dw weights)), as softmax's, where with dw = g @ value.T the sum
    # over the columns of dw weights is that over the features of g y: [L, D] in place of [L, S]
    weights = safe_softmax(converted(x, value.dtype.compute), -1)
    wide = converted(g, weights.dtype)
    to_weights, to_value = mixed_product_slopes(wide, y, weights, value)
    centre = sum.plain(wide * converted(y, weights.dtype), axis=(y.rank - 1,))
    return converted(weights * (to_weights - along(centre, x.shape, (x.rank - 1,))), x.dtype), to_value


softmax_matmul = Composite(
    "softmax_matmul",
    infer=_softmax_matmul,
    decompose=_softmax_matmul_value,
    vjp=_softmax_matmul_vjp,
    surrogate=_softmax_matmul_surrogate,
    samples=(
        Sample(("F[3,4]", "F[4,N]")),
        Sample(("F[2,N,4]", "F[2,4,3]")),
        Sample(("f32[2,3,N]", "bf16[2,N,3]")),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,4]"), match="inner sizes differ: 4 and 3"),
        BadSample(("f32[3,4]", "f64[4,3]"), match="dtypes differ: f32 and f64"),
        BadSample(("bf16[3,4]", "f32[4,3]"), match="dtypes differ: bf16 and f32"),
        BadSample(("i32[3,4]", "i32[4,3]"), match="i32 is no float"),
    ),
    doc=(
        "safe_softmax(x, -1) @ value, of value's dtype; x may be of the dtype that it is computed in; the product is in"
        " mixed precision as mixed_matmul: exponentials are rounded, and divided by their sum after it"
    ),
    source="Dao, FlashAttention-2, 2023: the rows are divided once, after the product",
)


Product = Callable[[Node, Node], Node]


def _scores(query: Node, key: Node) -> Node:
    """query [..., L, E] x key [..., E, S], in the dtype that the operands are computed in."""
    return call("matmul" if key.dtype is key.dtype.compute else "mixed_matmul", query, key)


def _mixed(scores: Node, value: Node) -> Node:
    """The values weighted."""
    if value.dtype is value.dtype.compute:
        return call("matmul", safe_softmax(scores, -1), value)
    batch = scores.shape[:-2]
    return softmax_matmul.plain(scores, spread(value, (*batch, *value.shape[-2:])))


def _merging_few(product: Product, left: Node, right: Node) -> Node:
    """[..., G, group, L, K] x [..., G, 1, K, N]  ->  [..., G, group, L, N]; where no heads share anything,
    [..., H, L, K] x [..., H, K, N]  ->  [..., H, L, N]

    Few rows are one matrix with those of the heads that share their right side, which is then read once; many are not,
    so that the steps of attention are one loop over them.
    """
    *lead, group, rows, width = left.shape
    if not isinstance(rows, int) or rows > FEW or not same(right.shape[-3], 1):
        return product(left, right)
    shared = reshaped(right, (*right.shape[:-3], *right.shape[-2:]))
    merged = product(reshaped(left, (*lead, group * rows, width)), shared)
    return reshaped(merged, (*merged.shape[:-2], group, rows, merged.shape[-1]))


def attention_scores(query: Node, key: Node) -> Node:
    """[..., G, group, L, E] x [..., G, 1, S, E] -> [..., G, group, L, S], in the dtype that those are computed in; or
    of each head its own: [..., H, L, E] x [..., H, S, E] -> [..., H, L, S].
    """
    return _merging_few(_scores, query, key.T)


def attention_mix(scores: Node, value: Node) -> Node:
    """[..., G, group, L, S] x [..., G, 1, S, D] -> [..., G, group, L, D]: safe_softmax(scores) @ value; or of each head
    its own: [..., H, L, S] x [..., H, S, D] -> [..., H, L, D].
    """
    return _merging_few(_mixed, scores, value)


def _attention(
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_mask: Node | None = None,
) -> Node:
    _check(query, key, value, dropout_p, dropout_mask)
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
    multiply: Product = _scores
    mix: Product = _mixed
    if group > 1:  # an axis for the heads that share a key
        query, key, value = _split(query, group), _split(key, 1), _split(value, 1)
        multiply, mix = partial(_merging_few, _scores), attention_mix
        if attn_mask is not None and attn_mask.rank > 2:
            if attn_mask.shape[-3] not in (1, *heads):
                raise TypeRuleError(f"attn_mask has {attn_mask.shape[-3]} heads and query {heads[0]}")
            attn_mask = _split(attn_mask, 1 if attn_mask.shape[-3] == 1 else group)
        if dropout_mask is not None and dropout_mask.rank > 2:
            dropout_mask = _split(dropout_mask, group)
    compute = query.dtype.compute
    scores = multiply(query, key.T) * scale
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
    if dropout_mask is None:
        y = mix(scores, value)
    else:
        kept = converted(spread(dropout_mask, scores.shape), compute)
        weights = safe_softmax(scores, -1) * kept * scale_of_kept(dropout_p)
        y = converted(multiply(weights, value), value.dtype)
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
        BadSample(("f32[3,8]", "f32[5,8]", "f32[5,8]"), {"dropout_p": 0.5}, match="dropout_p=0.5 without"),
        BadSample(("f32[3,8]", "f32[5,8]", "f32[5,8]"), {"dropout_p": 1.5}, match="no probability"),
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
        " query share those of the key and value; weights are kept where dropout_mask, bool [..., L, S], is true, and"
        " divided by 1 - dropout_p"
    ),
    source="torch.nn.functional.scaled_dot_product_attention; Vaswani et al. 2017",
)
