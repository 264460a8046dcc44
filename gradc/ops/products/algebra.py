"""Linear algebra in terms of matrix products and elementwise ops: products with an addend, products of vectors, powers
and chains of matrices, and the sums and quotients that torch names (addcmul, lerp, divide).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...errors import TypeRuleError
from ...ir.node import Node, call
from ...ir.op import BadSample, Composite, Function, Sample
from ...ir.types import F32
from ..elementwise.pointwise import bitwise_and, div, floordiv, lt, ne, where
from ..elementwise.rounding import trunc
from ..reductions.reduce import sum
from ..rules import alike, canonical_axis, converted, floating, full, of_rank, reshaped, slopes, spread, widened
from ..shapes.diagonals import diag_embed, diagonal
from .einsum import outer, tensordot

# -- a product and an addend -------------------------------------------------------------------------------------------


def _sum_of(input: Node, y: Node, beta: int | float, alpha: int | float) -> Node:
    """beta * input + alpha * y, rounded once; an input times 0 is not read.

    :raises TypeRuleError: the input has another dtype, or does not broadcast to y's shape.
    """
    if input.dtype is not y.dtype:
        raise TypeRuleError(f"input is {input.type} and the product {y.type}: dtypes differ; write a cast")
    addend = spread(input, y.shape)
    if beta == 0:
        return y if alpha == 1 else y * alpha
    if alpha == beta == 1:
        return addend + y
    return _scaled_sum(addend, y, beta=beta, alpha=alpha)


@widened
def _scaled_sum(addend: Node, y: Node, *, beta: int | float, alpha: int | float) -> Node:
    return (addend if beta == 1 else addend * beta) + (y if alpha == 1 else y * alpha)


def _addmm(input: Node, mat1: Node, mat2: Node, beta: int | float = 1, alpha: int | float = 1) -> Node:
    return _sum_of(input, call("matmul", of_rank("mat1", mat1, 2), of_rank("mat2", mat2, 2)), beta, alpha)


def _baddbmm(input: Node, batch1: Node, batch2: Node, beta: int | float = 1, alpha: int | float = 1) -> Node:
    return _sum_of(input, call("matmul", of_rank("batch1", batch1, 3), of_rank("batch2", batch2, 3)), beta, alpha)


addmm = Function(
    "addmm",
    write=_addmm,
    samples=(
        Sample(("F[3]", "F[2,4]", "F[4,3]"), {"beta": 0.5, "alpha": 2.0}),
        Sample(("F[2,3]", "F[2,4]", "F[4,3]")),
    ),
    bad=(
        BadSample(("f32[3]", "f32[4]", "f32[4,3]"), match="mat1 of rank 1, not 2"),
        BadSample(("f32[5]", "f32[2,4]", "f32[4,3]"), {"beta": 0.0}, match="f32[5]"),
        BadSample(("f64[3]", "f32[2,4]", "f32[4,3]"), {"beta": 0.0}, match="dtypes differ"),
    ),
    doc="beta * input + alpha * (mat1 @ mat2); with beta=0 the input is not read",
    source="torch.addmm",
)
baddbmm = Function(
    "baddbmm",
    write=_baddbmm,
    samples=(Sample(("F[2,1,3]", "F[2,2,4]", "F[2,4,3]"), {"beta": 0.5, "alpha": 2.0}),),
    bad=(BadSample(("f32[3]", "f32[2,4]", "f32[4,3]"), match="batch1 of rank 2, not 3"),),
    doc="beta * input + alpha * (batch1 @ batch2) of batches; with beta=0 the input is not read",
    source="torch.baddbmm",
)


def _addbmm(input: Node, batch1: Node, batch2: Node, beta: int | float = 1, alpha: int | float = 1) -> Node:
    products = call("matmul", of_rank("batch1", batch1, 3), of_rank("batch2", batch2, 3))
    return _sum_of(input, sum(products, 0), beta, alpha)


addbmm = Function(
    "addbmm",
    write=_addbmm,
    samples=(Sample(("F[3]", "F[2,2,4]", "F[2,4,3]"), {"beta": 0.5, "alpha": 2.0}),),
    bad=(BadSample(("f32[3]", "f32[2,4]", "f32[4,3]"), match="batch1 of rank 2, not 3"),),
    doc="beta * input + alpha * the sum of a batch's products batch1 @ batch2; with beta=0 the input is not read",
    source="torch.addbmm",
)


def _addmv(input: Node, mat: Node, vec: Node, beta: int | float = 1, alpha: int | float = 1) -> Node:
    return _sum_of(input, call("matmul", of_rank("mat", mat, 2), of_rank("vec", vec, 1)), beta, alpha)


addmv = Function(
    "addmv",
    write=_addmv,
    samples=(Sample(("F[3]", "F[3,4]", "F[4]"), {"beta": 0.5, "alpha": 2.0}), Sample(("F[1]", "F[3,N]", "F[N]"))),
    bad=(BadSample(("f32[3]", "f32[3,4]", "f32[4,1]"), match="vec of rank 2, not 1"),),
    doc="beta * input + alpha * (mat @ vec); with beta=0 the input is not read",
    source="torch.addmv",
)


def _addr(input: Node, vec1: Node, vec2: Node, beta: int | float = 1, alpha: int | float = 1) -> Node:
    return _sum_of(input, outer(of_rank("vec1", vec1, 1), vec2), beta, alpha)


addr = Function(
    "addr",
    write=_addr,
    samples=(Sample(("F[3,4]", "F[3]", "F[4]"), {"beta": 0.5, "alpha": 2.0}), Sample(("F[4]", "F[3]", "F[4]"))),
    bad=(BadSample(("f32[3,4]", "f32[3,1]", "f32[4]"), match="vec1 of rank 2, not 1"),),
    doc="beta * input + alpha * outer(vec1, vec2); with beta=0 the input is not read",
    source="torch.addr",
)


def _addcmul(input: Node, tensor1: Node, tensor2: Node, value: float = 1.0) -> Node:
    product = tensor1 * tensor2
    return input + (product if value == 1 else product * value)


addcmul = Function(
    "addcmul",
    write=_addcmul,
    samples=(Sample(("F[2,3]", "F[3]", "F[2,1]"), {"value": 0.5}), Sample(("F[N]", "F[N]", "F[N]"))),
    bad=(BadSample(("f32[3]", "f32[4]", "f32[3]"), match="do not broadcast: 4 and 3"),),
    doc="input + value * tensor1 * tensor2",
    source="torch.addcmul",
)


def _addcdiv(input: Node, tensor1: Node, tensor2: Node, value: float = 1.0) -> Node:
    quotient = tensor1 / tensor2
    return input + (quotient if value == 1 else quotient * value)


_NONZERO = ("normal", "normal", "nonzero")

addcdiv = Function(
    "addcdiv",
    write=_addcdiv,
    samples=(
        Sample(("F[2,3]", "F[3]", "F[2,1]"), {"value": 0.5}, draw=_NONZERO),
        Sample(("F[N]", "F[N]", "F[N]"), draw=_NONZERO),
    ),
    bad=(BadSample(("f32[3]", "f32[4]", "f32[3]"), match="do not broadcast: 4 and 3"),),
    doc="input + value * tensor1 / tensor2",
    source="torch.addcdiv",
)

# -- products of vectors -----------------------------------------------------------------------------------------------


def _dot(input: Node, tensor: Node) -> Node:
    return call("matmul", of_rank("input", input, 1), of_rank("tensor", tensor, 1))


dot = Function(
    "dot",
    write=_dot,
    samples=(Sample(("F[N]", "F[N]")), Sample(("F[4]", "F[4]"))),
    bad=(
        BadSample(("f32[2,3]", "f32[3]"), match="input of rank 2, not 1"),
        BadSample(("f32[2]", "f32[3]"), match="inner sizes differ: 2 and 3"),
    ),
    doc="the sum of the products of two vectors' elements",
    source="torch.dot",
)


def _inner(input: Node, other: Node) -> Node:
    if input.rank == 0 or other.rank == 0:
        return input * other
    y: Node = tensordot(input, other, ((input.rank - 1,), (other.rank - 1,)))
    return y


inner = Function(
    "inner",
    write=_inner,
    samples=(Sample(("F[2,3]", "F[4,3]")), Sample(("F[2,3]", "F[]"))),
    bad=(BadSample(("f32[2,3]", "f32[4]"), match="3 and 4"),),
    doc="products summed over the last axis of both; a scalar multiplies",
    source="torch.inner",
)


def _vecdot(x: Node, y: Node, axis: int = -1) -> Node:
    floating(x.type)
    product = x * y
    return sum(product, canonical_axis(axis, product.rank))


vecdot = Function(
    "vecdot",
    write=_vecdot,
    samples=(Sample(("F[2,3]", "F[2,3]")), Sample(("F[3,1]", "F[3,N]"), {"axis": 0})),
    bad=(
        BadSample(("f32[2,3]", "f32[4]"), match="do not broadcast: 3 and 4"),
        BadSample(("f32[3]", "f32[3]"), {"axis": 1}, match="axis=1"),
    ),
    doc="the sum of products along an axis of operands that are broadcast",
    source="torch.linalg.vecdot",
)

# -- matrices ----------------------------------------------------------------------------------------------------------


def _kron(input: Node, other: Node) -> Node:
    rank = max(input.rank, other.rank)
    left, right = ((1,) * (rank - v.rank) + v.shape for v in (input, other))
    wide = tuple(n for pair in zip(left, right, strict=True) for n in pair)
    a = reshaped(input, tuple(n for size in left for n in (size, 1)))
    b = reshaped(other, tuple(n for size in right for n in (1, size)))
    return reshaped(spread(a, wide) * spread(b, wide), tuple(n * m for n, m in zip(left, right, strict=True)))


kron = Function(
    "kron",
    write=_kron,
    samples=(Sample(("F[2,3]", "F[3,2]")), Sample(("F[2]", "F[2,1,3]")), Sample(("F[]", "F[N]"))),
    bad=(BadSample(("f32[2]", "f64[2]"), match="dtypes differ"),),
    doc="Kronecker's product: each element of input times all of other, as blocks",
    source="torch.kron",
)


def _trace(input: Node) -> Node:
    return sum(diagonal(of_rank("input", input, 2)))


trace = Function(
    "trace",
    write=_trace,
    samples=(Sample(("F[3,5]",)), Sample(("F[4,4]",))),
    bad=(BadSample(("f32[2,3,3]",), match="input of rank 3, not 2"),),
    doc="the sum of a matrix's diagonal",
    source="torch.trace",
)


def _matrix_power(input: Node, n: int) -> Node:
    if input.rank < 2 or input.shape[-1] != input.shape[-2]:
        raise TypeRuleError(f"{input.type} is no square matrix")
    if n < 0:
        raise TypeRuleError(f"n={n}: the power of an inverse; 0 at least")
    if n == 0:
        return spread(diag_embed(full(1, input.type.with_shape(input.shape[-1]))), input.shape)
    if n == 1:
        return input
    half = _matrix_power(input, n // 2)
    square: Node = call("matmul", half, half)
    return call("matmul", square, input) if n % 2 else square


matrix_power = Function(
    "matrix_power",
    write=_matrix_power,
    samples=(
        Sample(("F[2,3,3]",), {"n": 5}),
        Sample(("F[3,3]",), {"n": 1}),
        Sample(("F[2,3,3]",), {"n": 0}),
        Sample(("F[3,3]",), {"n": 4}),
    ),
    bad=(
        BadSample(("f32[2,3]",), {"n": 2}, match="no square matrix"),
        BadSample(("f32[3,3]",), {"n": -1}, match="n=-1"),
    ),
    doc="a square matrix multiplied by itself: the n-th power, n >= 0, by repeated squares",
    source="torch.linalg.matrix_power",
)


def _cuts(sizes: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Where to part each piece (first, last) of a chain for the fewest multiplications: matrix j is
    [sizes[j], sizes[j + 1]].  The textbook's dynamic program, O(n^3).
    """
    count = len(sizes) - 1
    cost = {(j, j): 0 for j in range(count)}
    at: dict[tuple[int, int], int] = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            prices = {k: cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)}
            at[i, j] = min(prices, key=lambda k: prices[k])
            cost[i, j] = prices[at[i, j]]
    return at


def _multi_dot(*tensors: Node) -> Node:
    if len(tensors) < 2:
        raise TypeRuleError(f"{len(tensors)} matrices: 2 at least")
    for j, x in enumerate(tensors):
        if x.rank != 2 and not (x.rank == 1 and j in (0, len(tensors) - 1)):
            raise TypeRuleError(f"matrix {j} of rank {x.rank}, not 2; the first and the last may be vectors")
    sizes = (*(x.shape[0] if x.rank == 2 else 1 for x in tensors), tensors[-1].shape[1] if tensors[-1].rank == 2 else 1)
    constant = tuple(n for n in sizes if isinstance(n, int))
    if len(constant) == len(sizes):
        at = _cuts(constant)
    else:  # from the left where a size is symbolic
        at = {(i, j): j - 1 for j in range(len(tensors)) for i in range(j)}

    def chain(first: int, last: int) -> Node:
        if first == last:
            return tensors[first]
        cut = at[first, last]
        return call("matmul", chain(first, cut), chain(cut + 1, last))

    return chain(0, len(tensors) - 1)


multi_dot = Function(
    "multi_dot",
    write=_multi_dot,
    samples=(
        Sample(("F[2,5]", "F[5,3]", "F[3,1]", "F[1,4]")),
        Sample(("F[3]", "F[3,4]", "F[4,2]", "F[2]")),
        Sample(("F[2,N]", "F[N,3]", "F[3,2]")),
    ),
    bad=(
        BadSample(("f32[2,3]", "f32[4,2]"), match="inner sizes differ: 3 and 4"),
        BadSample(("f32[2,3]", "f32[3]", "f32[3,2]"), match="matrix 1 of rank 1"),
        BadSample(("f32[2,3]",), match="2 at least"),
    ),
    doc="the product of a chain of matrices in the order of fewest multiplications; the ends may be vectors",
    source="torch.linalg.multi_dot",
)

# -- elementwise -------------------------------------------------------------------------------------------------------


def _lerp_value(input: Node, end: Node, weight: Node) -> Node:
    # from the nearer end: exact at both, also where one is much larger than the other
    distance = end - input
    near = lt(weight, full(0.5, weight))
    return where(near, input + distance * weight, end - distance * (full(1, weight) - weight))


lerp = Composite(
    "lerp",
    infer=lambda input, end, weight: floating(alike(input, end, weight)),
    decompose=widened(_lerp_value),
    vjp=slopes(lambda input, end, weight: (full(1, weight) - weight, weight, end - input)),
    broadcast=True,
    samples=(
        Sample(("F[2,3]", "F[3]", "F[2,1]")),
        Sample(("F[N]", "F[N]", "F[]")),
        Sample(("F[3,N]", "F[3,N]", "F[3,N]"), draw=("normal", "normal", "unit")),
    ),
    bad=(
        BadSample(("f32[3]", "f32[4]", "f32[]"), match="do not broadcast"),
        BadSample(("i32[3]", "i32[3]", "i32[]"), match="i32 is no float"),
    ),
    doc="input + (end - input) * weight, counted from the end from weight 0.5 on",
    source="torch.lerp",
)


def _divide(x: Node, y: Node, rounding_mode: Literal["trunc", "floor"] | None = None) -> Node:
    if rounding_mode == "floor":
        return floordiv(x, y)
    if x.dtype is y.dtype and not x.dtype.is_float:
        if rounding_mode is None:
            return div(converted(x, F32), converted(y, F32))
        return _to_zero(x, y)
    if rounding_mode is None or x.dtype is not y.dtype:  # which div refuses
        return div(x, y)
    wide = x.dtype.compute  # a quotient that was rounded to 16 bits first is another integer
    return converted(trunc(div(converted(x, wide), converted(y, wide))), x.dtype)


def _to_zero(x: Node, y: Node) -> Node:
    """A quotient of integers rounded towards 0: one more than rounded down where that is below 0 and not exact."""
    down = floordiv(x, y)
    if x.dtype.kind == "u":
        return down
    inexact = bitwise_and(ne(down * y, x), lt(down, full(0, down)))
    return where(inexact, down + 1, down)


divide = Function(
    "divide",
    write=_divide,
    samples=(
        Sample(("F[2,3]", "F[3]"), draw=("normal", "nonzero")),
        Sample(("F[N]", "F[N]"), {"rounding_mode": "trunc"}, draw=("normal", "nonzero")),
        Sample(("F[2,3]", "F[]"), {"rounding_mode": "floor"}, draw=("normal", "nonzero")),
        Sample((np.array([7, -7, 7, -7, -6]), np.array([2, 2, -2, -2, 3]))),
        Sample((np.array([7, -7, 7, -7, -6]), np.array([2, 2, -2, -2, 3])), {"rounding_mode": "trunc"}),
        Sample((np.array([7, 9], np.uint8), np.array([2, 5], np.uint8)), {"rounding_mode": "trunc"}),
    ),
    bad=(
        BadSample(("f32[3]", "f32[3]"), {"rounding_mode": "ceil"}, match="rounding_mode='ceil'"),
        BadSample(("f32[3]", "f32[4]"), match="do not broadcast: 3 and 4"),
    ),
    doc=(
        "x / y, with rounding_mode rounded towards 0 (trunc) or down (floor); of integers f32 without a rounding_mode,"
        " otherwise integers (0 where y is 0)"
    ),
    source="torch.div",
)
