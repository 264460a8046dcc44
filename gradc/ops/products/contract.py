"""Matrix products, and products with a small matrix of constants along one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, product, same
from ...ir.node import REGISTRY, Node, call
from ...ir.op import BadSample, Composite, Library, Lookup, Primitive, Sample
from ...ir.operands import adopt, broadcast_shapes
from ...ir.statement import Index
from ...ir.types import DType, Type
from ..rules import canonical_axis, converted, floating, reshaped, spread
from ..shapes.axes import replace_axis_beside, replaced


def product_shape(x: Type, y: Type) -> tuple[Size, ...]:
    """The shape of the product of two matrices, or of batches of them."""
    if x.rank < 2 or y.rank != x.rank:
        raise TypeRuleError(f"ranks {x.rank} and {y.rank}")
    if not same(x.shape[-1], y.shape[-2]):
        raise TypeRuleError(f"inner sizes differ: {x.shape[-1]} and {y.shape[-2]}")
    for n, m in zip(x.shape[:-2], y.shape[:-2], strict=True):
        if not same(n, m):
            raise TypeRuleError(f"batch sizes differ: {n} and {m}")
    return (*x.shape[:-1], y.shape[-1])


def _matmul(x: Type, y: Type) -> Type:
    if x.dtype is not y.dtype:
        raise TypeRuleError(f"dtypes differ: {x.dtype} and {y.dtype}; write a cast")
    shape = product_shape(x, y)
    return floating(x).with_shape(*shape)


def matmul_views(out: list[str], inner: list[str]) -> tuple[tuple[str, ...], ...]:
    """The axes of both operands of a product."""
    return (*out[:-1], *inner), (*out[:-2], *inner, out[-1])


def call_of(name: str) -> Callable[[Any, Any], Node]:
    """A call of a product with NumPy's broadcasting of batch axes, and with vectors."""

    def called(x: Any, y: Any) -> Node:
        op = REGISTRY[name]
        x, y = adopt(name, [x, y], broadcasting=False)
        if x.rank == 0 or y.rank == 0:
            raise TypeRuleError(f"{name}({x.type}, {y.type}): a scalar operand; * multiplies by it")
        if x.rank == 1:
            full = called(reshaped(x, (1, *x.shape)), y)
            return reshaped(full, (*full.shape[:-2], *full.shape[-1:]) if y.rank > 1 else full.shape[:-1])
        if y.rank == 1:
            full = called(x, reshaped(y, (*y.shape, 1)))
            return reshaped(full, full.shape[:-1])
        if y.rank == 2 and x.rank > 2:  # flatten the batch: one matrix product, and one for the gradient of y
            flat = op.plain(reshaped(x, (product(x.shape[:-1]), x.shape[-1])), y)
            return reshaped(flat, (*x.shape[:-1], y.shape[-1]))
        batch = broadcast_shapes([x.shape[:-2], y.shape[:-2]])
        whole: Node = op.plain(spread(x, (*batch, *x.shape[-2:])), spread(y, (*batch, *y.shape[-2:])))
        return whole

    return called


def matmul_axes(node: Node) -> Any:
    """The product as an einsum: (axes with sizes, index of each operand, index of the result)."""
    x, y = node.operands
    batch = [(f"b{i}", size) for i, size in enumerate(node.shape[:-2])]
    axes = (*batch, ("m", x.shape[-2]), ("n", y.shape[-1]), ("k", x.shape[-1]))
    lead = tuple(Index.of(name) for name, _ in batch)
    m, n, k = Index.of("m"), Index.of("n"), Index.of("k")
    return axes, ((*lead, m, k), (*lead, k, n)), (*lead, m, n)


def _matmul_map(node: Node) -> dict[int, tuple[int | None, ...]]:
    batch = tuple(range(node.rank - 2))
    return {0: (*batch, node.rank - 2, None), 1: (*batch, None, node.rank - 1)}


def _matmul_reference(x: Any, y: Any) -> Any:
    wide = (
        np.result_type(x.dtype, np.float64) if x.dtype.kind == "f" else x.dtype
    )  # f64 at most: BLAS has no wider matrix product
    return np.matmul(x.astype(wide), y.astype(wide)).astype(x.dtype)


matmul: Library = Library(
    "matmul",
    infer=_matmul,
    sugar=call_of("matmul"),
    reference=_matmul_reference,
    axes=matmul_axes,
    views=matmul_views,
    contraction=True,
    multilinear=_matmul_map,
    vjp=lambda g, y, a, b: (matmul.plain(g, b.T), matmul.plain(a.T, g)),
    samples=(
        Sample(("F[3,4]", "F[4,N]")),
        Sample(("F[N,4]", "F[4,3]")),
        Sample(("F[2,N,4]", "F[2,4,3]")),
        Sample(("F[2,N,4]", "F[4,3]")),
        Sample(("F[4]", "F[4,3]")),
        Sample(("F[2,3,4]", "F[4]")),
        Sample(("F[4]", "F[4]")),
        Sample(("F[2,1,3,4]", "F[5,4,2]")),
        Sample(("F[3,N]", "F[N,2]")),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,4]"), match="inner sizes differ: 4 and 3"),
        BadSample(("f32[3,4]", "f64[4,3]"), match="dtypes differ"),
        BadSample(("f32[]", "f32[4,3]"), match="scalar"),
        BadSample(("i32[3,4]", "i32[4,3]"), match="i32 is no float"),
    ),
    doc="the matrix product with NumPy's broadcasting of batch axes; accumulates in f32 for 16-bit types",
)


def _narrower(x: DType, y: DType) -> DType:
    """The dtype to which the operands of a mixed product are rounded."""
    if x is not y and x.compute is not y and y.compute is not x:
        raise TypeRuleError(f"dtypes differ: {x} and {y}; one may be the dtype that the other is computed in")
    return x if x.bits < y.bits else y


def mixed_product_type(x: Type, y: Type) -> Type:
    """The type of a mixed product."""
    narrow = _narrower(floating(x).dtype, floating(y).dtype)
    return _matmul(x.with_dtype(narrow), y.with_dtype(narrow)).with_dtype(narrow.compute)


def _mixed_matmul_value(x: Node, y: Node) -> Node:
    narrow = _narrower(x.dtype, y.dtype)
    return matmul.plain(*(converted(converted(o, narrow), narrow.compute) for o in (x, y)))


def _mixed_matmul_surrogate(x: Node, y: Node) -> Node:
    wide = _narrower(x.dtype, y.dtype).compute
    return call("matmul", converted(x, wide), converted(y, wide))


def mixed_product_slopes(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    # matmul's; the cotangent is rounded as an operand is, so that all three products multiply one narrow dtype
    narrow = _narrower(a.dtype, b.dtype)
    slope, left, right = (converted(x, narrow) for x in (g, a, b))
    to_a, to_b = mixed_matmul.plain(slope, right.T), mixed_matmul.plain(left.T, slope)
    return converted(to_a, a.dtype), converted(to_b, b.dtype)


mixed_matmul = Composite(
    "mixed_matmul",
    infer=mixed_product_type,
    sugar=call_of("mixed_matmul"),
    decompose=_mixed_matmul_value,
    vjp=mixed_product_slopes,
    surrogate=_mixed_matmul_surrogate,
    samples=(
        Sample(("F[3,4]", "F[4,N]")),
        Sample(("F[2,1,N,4]", "F[3,4,2]")),
        Sample(("f32[N,4]", "bf16[4,3]")),
        Sample(("f16[2,3,4]", "f32[2,4,N]")),
    ),
    bad=(
        BadSample(("f32[3,4]", "f32[3,4]"), match="inner sizes differ: 4 and 3"),
        BadSample(("bf16[3,4]", "f16[4,3]"), match="dtypes differ: bf16 and f16"),
        BadSample(("f32[]", "f32[4,3]"), match="scalar"),
        BadSample(("i32[3,4]", "f32[4,3]"), match="i32 is no float"),
    ),
    doc=(
        "the matrix product in mixed precision: of 16-bit operands in f32; an f32 operand beside one of 16 bits is"
        " rounded to its dtype, and so is the gradient before the two products that it is an operand of"
    ),
    source="Micikevicius et al., Mixed Precision Training, 2018",
)


def _linear(input: Type, weight: Type, bias: Type | None = None) -> Type:
    if weight.rank not in (1, 2) or input.rank < 1:
        raise TypeRuleError(f"input of rank {input.rank}, weight of rank {weight.rank}: at least 1, and 1 or 2")
    *outputs, features = weight.shape
    if not same(input.shape[-1], features):
        raise TypeRuleError(f"input has {input.shape[-1]} features and weight takes {features}")
    if bias is not None and (bias.rank != len(outputs) or not all(map(same, bias.shape, outputs))):
        raise TypeRuleError(f"bias {bias} for {f'{outputs[0]} outputs' if outputs else 'one output'}")
    for other in (weight, bias):
        if other is not None and other.dtype is not input.dtype:
            raise TypeRuleError(f"dtypes differ: {input.dtype} and {other.dtype}; write a cast")
    return floating(input).with_shape(*input.shape[:-1], *outputs)


def _linear_value(input: Node, weight: Node, bias: Node | None = None) -> Node:
    y = call("matmul", input, weight.T)
    return y if bias is None else y + bias


linear = Composite(
    "linear",
    infer=_linear,
    decompose=_linear_value,
    samples=(
        Sample(("F[N,4]", "F[3,4]", "F[3]")),
        Sample(("F[4]", "F[3,4]")),
        Sample(("F[2,N,4]", "F[3,4]", "F[3]")),
        Sample(("F[2,N,4]", "F[4]", "F[]")),
        Sample(("F[N]", "F[N]")),
    ),
    bad=(
        BadSample(("f32[2,4]", "f32[3,5]"), match="4 features and weight takes 5"),
        BadSample(("f32[2,4]", "f32[3,4]", "f32[4]"), match="for 3 outputs"),
        BadSample(("f32[2,4]", "f32[4]", "f32[4]"), match="for one output"),
        BadSample(("f32[2,4]", "f32[2,3,4]"), match="weight of rank 3: at least 1, and 1 or 2"),
    ),
    doc="input @ weight.T + bias; a weight of one axis gives one output, without an axis",
    source="torch.nn.functional.linear",
)


# -- mode_product ------------------------------------------------------------------------------------------------------

Matrix = tuple[tuple[float, ...], ...]


def _mode_product(x: Type, *, matrix: Matrix, axis: int = -1) -> Any:
    axis = canonical_axis(axis, floating(x).rank)
    columns = {len(row) for row in matrix}
    if len(columns) != 1 or 0 in columns:
        raise TypeRuleError(f"matrix={matrix!r}: one row at least, and rows of one length, of one number at least")
    if not all(math.isfinite(value) for row in matrix for value in row):
        raise TypeRuleError(f"matrix={matrix!r}: its numbers are finite")
    if not same(x.shape[axis], *columns):
        raise TypeRuleError(f"axis {axis} has {x.shape[axis]} elements, and a row of the matrix {columns.pop()}")
    return x.with_shape(*replaced(x.shape, axis, (len(matrix),))), {"matrix": matrix, "axis": axis}


def _combined(row: Sequence[float], element: Any, add: Any, subtract: Any, scale: Any, zero: Any) -> Any:
    """The sum of the elements times a row's numbers, in one order for every target: the first that is not subtracted,
    then the others as they stand.  What only adds and subtracts multiplies nothing, or the whole by the one number.
    """
    used = [k for k, value in enumerate(row) if value != 0]
    if not used:
        return zero()
    factors = {abs(row[k]) for k in used}
    whole = factors.pop() if len(factors) == 1 else 1.0
    first = next((k for k in used if row[k] > 0), used[0])

    def term(k: int) -> Any:
        factor = abs(row[k]) / whole
        return element(k) if factor == 1 else scale(element(k), factor)

    total = term(first)
    for k in used:
        if k != first:
            total = (add if row[k] * row[first] > 0 else subtract)(total, term(k))
    whole = whole if row[first] > 0 else -whole
    return total if whole == 1 else scale(total, whole)


def _mode_product_reference(x: Any, *, matrix: Matrix, axis: int) -> Any:
    number = x.dtype.type
    rows = [
        _combined(
            row,
            lambda k: np.take(x, k, axis),
            np.add,
            np.subtract,
            lambda v, c: v * number(c),
            lambda: np.zeros_like(np.take(x, 0, axis)),
        )
        for row in matrix
    ]
    return np.stack(rows, axis)


def _mode_product_at(index: Sequence[Index], node: Node, kernel: Any) -> Any:
    (x,), axis, matrix, dtype = node.operands, node.attrs["axis"], node.attrs["matrix"], node.dtype
    place = index[axis]

    def row(at: int) -> Any:
        return _combined(
            matrix[at],
            lambda k: kernel.read(x, replaced(index, axis, (Index(k),))),
            lambda a, b: kernel.emit("add", a, b, dtype=dtype),
            lambda a, b: kernel.emit("sub", a, b, dtype=dtype),
            lambda v, c: kernel.emit("mul", v, kernel.number(c, dtype), dtype=dtype),
            lambda: kernel.number(0.0, dtype),
        )

    if not place.terms and isinstance(place.const, int):
        return row(place.const)
    value = row(len(matrix) - 1)
    for at in reversed(range(len(matrix) - 1)):
        value = kernel.select(kernel.in_bounds(place + -at, 0, 1), row(at), value)
    return value


def _axes_of_mode_product(node: Node) -> Mapping[int, tuple[int | None, ...]]:
    if not all(map(any, node.attrs["matrix"])):  # a row of zeros makes a 0 that a scale must not reach: it may be NaN
        return {}
    return {0: tuple(None if a == node.attrs["axis"] else a for a in range(node.rank))}


mode_product = Primitive(
    "mode_product",
    infer=_mode_product,
    reference=_mode_product_reference,
    lower=Lookup(_mode_product_at, mixes=True),
    # by the transposed matrix
    vjp=lambda g, y, x, *, matrix, axis: (call("mode_product", g, matrix=tuple(zip(*matrix, strict=True)), axis=axis),),
    multilinear=_axes_of_mode_product,
    replace_axis=replace_axis_beside,
    samples=(
        Sample(("F[N,3]",), {"matrix": ((1.0, 0.0, -1.0), (0.0, -1.0, 1.0), (0.5, -0.5, 0.5), (-2.0, 0.0, 0.25))}),
        Sample(("F[2,N,3]",), {"matrix": ((0.0, 1.0), (-1.0, -1.0), (0.0, 0.0)), "axis": 0}),
    ),
    bad=(
        BadSample(("f32[4,3]",), {"matrix": ((1.0, 2.0),)}, match="axis 1 has 3 elements, and a row of the matrix 2"),
        BadSample(("f32[4,3]",), {"matrix": ((1.0, 2.0, 3.0), (1.0,))}, match="rows of one length"),
        BadSample(("f32[4,3]",), {"matrix": ()}, match="one row at least"),
        BadSample(("f32[4,2]",), {"matrix": ((1.0, float("inf")),)}, match="its numbers are finite"),
        BadSample(("f32[4,3]",), {"matrix": ((1.0, 2.0, 3.0),), "axis": 2}, match="axis=2"),
        BadSample(("i32[4,3]",), {"matrix": ((1.0, 2.0, 3.0),)}, match="i32 is no float"),
    ),
    doc=(
        "the product of an axis with a small matrix of constants: element a along it is the sum over k of number k of"
        " row a times element k, in which an element whose number is 0 has no part"
    ),
    source="Kolda and Bader, Tensor Decompositions and Applications, 2009: the n-mode product",
)
