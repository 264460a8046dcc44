"""Lines of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import ops
from ...errors import InvalidProblem, Unsupported
from ...ir.dims import Dim, same
from ...ir.node import Node
from ...ir.types import F32, F64, I32
from ...ops.products.convolution import Geometry, is_depthwise, response_of
from ...ops.rules import converted
from ..table import Forms, Weight, checked


def _matmul(x: Node, y: Node) -> Node:
    if x.dtype.is_float:
        return ops.matmul(x, y)
    if not x.rank or not y.rank:
        raise InvalidProblem(f"a product of {x.type} and {y.type}: a scalar is no matrix")
    a = ops.unsqueeze(x, 0) if x.rank == 1 else x
    b = ops.unsqueeze(y, 1) if y.rank == 1 else y
    if not same(a.shape[-1], b.shape[-2]):  # one row or column would be all of them below
        raise InvalidProblem(f"a product of {x.type} and {y.type}: inner sizes differ")
    # Each product and the sum modulo 2^bits, which no product of floats gives: one kernel, without [rows, k, columns].
    sums = ops.sum(ops.unsqueeze(a, -1) * ops.unsqueeze(b, -3), -2)
    return _without_units(converted(sums, x.dtype), x, y)


def _without_units(product: Node, x: Node, y: Node) -> Node:
    """A product of two matrices without the axes that stand for x or y being a vector."""
    vectors = tuple(axis for axis, operand in ((-2, x), (-1, y)) if operand.rank == 1)
    return ops.squeeze(product, vectors)


def _gemm_first(
    a: Node,
    b: Node,
    c: Node,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
) -> Node:
    """Before opset 7 c has the shape of the product if it is not said to broadcast."""
    wanted = (a.shape[1 if transA else 0], b.shape[0 if transB else 1])
    if not broadcast and c.shape != wanted:
        raise InvalidProblem(f"{c.type} added to a product of shape {wanted}, and no broadcast=1")
    return _gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


def _gemm(
    a: Node,
    b: Node,
    c: Node | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Node:
    a, b = (ops.transpose(x, (1, 0)) if flag else x for x, flag in ((a, transA), (b, transB)))
    beta = 0.0 if c is None else beta
    if not a.dtype.is_float and not (alpha.is_integer() and beta.is_integer()):
        raise Unsupported(f"alpha {alpha:g} and beta {beta:g} of integers: gradc takes whole factors of them")
    y = _matmul(a, b)
    if alpha != 1.0:
        y = converted(y * alpha, a.dtype) if y.dtype.is_float else y * int(alpha)
    if c is None or beta == 0.0:
        return y
    if c.rank > 2:
        raise InvalidProblem(f"{c.type} added to a product {y.type}")
    c = ops.broadcast_to(c, y.shape)
    return y + (c if beta == 1.0 else c * (beta if c.dtype.is_float else int(beta)))


def _einsum(*operands: Node, equation: str) -> Node:
    return ops.einsum(equation, *operands)


def matmul_integer(x: Node, y: Node, zero_x: Node | None = None, zero_y: Node | None = None) -> Node:
    """The product of 8-bit integers less their zero points, i32."""

    a = ops.unsqueeze(x, 0) if x.rank == 1 else x
    b = ops.unsqueeze(y, 1) if y.rank == 1 else y

    def summed(codes: Node, axis: int) -> Node:
        return converted(ops.sum(codes, axis, keepdims=True), I32)

    total, wide = ops.integer_matmul(a, b), converted(b, I32)
    if zero_y is not None:  # x (y - zero) = x y - zero times the sums of x
        zero = converted(zero_y, I32)
        total, wide = total - zero * summed(converted(a, I32), -1), wide - zero
    if zero_x is not None:
        zero = converted(zero_x, I32)
        zero = ops.unsqueeze(zero, zero.rank) if 1 <= zero.rank < x.rank else zero  # of rows
        total = total - zero * summed(wide, -2)
    return _without_units(total, x, y)


LARGEST_DETERMINANT = 16
"""Rows of a matrix whose determinant is written out."""


def _determinant(x: Node) -> Node:
    """``Det`` without divisions (Bird 2011), so that singular matrices have gradients; in f64: sums cancel."""
    n = x.shape[-1]
    if isinstance(n, Dim) or n != x.shape[-2] or n > LARGEST_DETERMINANT:
        raise Unsupported(
            f"the determinant of {x.type}: gradc takes square matrices of 1 to {LARGEST_DETERMINANT} rows"
        )
    wide = converted(x, F64)
    power = wide
    for _ in range(n - 1):
        # Above the diagonal as it is, on it less the sum of what follows on the diagonal, below it zeros.
        diagonal = ops.diagonal(power, 0, -2, -1)
        after = diagonal - ops.cumsum(diagonal, -1, reverse=True)
        power = ops.matmul(ops.triu(power, 1) + ops.diag_embed(after, 0, -2, -1), wide)
    found = power[..., 0, 0]
    return converted(found if n % 2 else -found, x.dtype)


def spatial(x: Node) -> int:
    return x.rank - 2


def each(values: Any, rank: int, default: int) -> tuple[int, ...]:
    return tuple(int(v) for v in values) if values is not None and len(values) else (default,) * rank


_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def padding_of(
    auto_pad: str,
    pads: Any,
    sizes: Sequence[Any],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """The pair of widths for each axis of a window."""
    rank = len(kernel)
    if checked("auto_pad", auto_pad or "NOTSET", _PADDING) == "NOTSET":
        both = each(pads, 2 * rank, 0)
        return tuple(zip(both[:rank], both[rank:], strict=True))
    if auto_pad == "VALID":
        return ((0, 0),) * rank
    pairs = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        if isinstance(size, Dim):
            raise Unsupported(f"auto_pad over an axis of {size} elements")
        total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return tuple(pairs)


def convolution(
    x: Node,
    w: Weight,
    b: Node | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    """``Conv``: x [N, C, ...] with w [O, C / group, ...]."""
    rank = spatial(x)
    kernel = tuple(int(n) for n in w.shape[2:])
    step, spread = each(strides, rank, 1), each(dilations, rank, 1)
    padding = padding_of(auto_pad, pads, x.shape[2:], kernel, step, spread)
    return ops.convolution(x, w, b, stride=step, padding=padding, dilation=spread, groups=group)


def _conv_transpose(
    x: Node,
    w: Weight,
    b: Node | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    rank = spatial(x)
    kernel = tuple(int(n) for n in w.shape[2:])
    step, spread, extra = each(strides, rank, 1), each(dilations, rank, 1), each(output_padding, rank, 0)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, spread, strict=True)]
    if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        sizes = [int(n) for n in x.shape[2:]]
        wanted = (
            each(output_shape, rank, 0)[-rank:]
            if output_shape is not None
            else [n * s for n, s in zip(sizes, step, strict=True)]
        )
        pairs = []
        for size, s, r, e, want in zip(sizes, step, reach, extra, wanted, strict=True):
            total = s * (size - 1) + e + r - want
            if total < 0:  # the image is not reached there
                pairs.append((0, total))
                continue
            small, large = total // 2, total - total // 2
            pairs.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    else:
        pairs = list(padding_of(auto_pad, pads, x.shape[2:], kernel, step, spread))
    full = ops.convolution(
        x,
        w,
        None,
        stride=step,
        padding=((0, 0),) * rank,
        dilation=spread,
        transposed=True,
        output_padding=(0,) * rank,
        groups=group,
    )
    width = [(0, 0), (0, 0), *((-a, e - c) for (a, c), e in zip(pairs, extra, strict=True))]
    y = ops.pad(full, tuple(width)) if any(n for pair in width for n in pair) else full
    return y if b is None else y + ops.reshape(b, (1, b.shape[0], *(1,) * rank))


def conv_integer(
    x: Node,
    w: Node,
    zero_x: Node | None = None,
    zero_w: Node | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Node:
    """The convolution of 8-bit integers less their zero points, i32, modulo 2^32; padding is x's zero point."""
    for codes, zero in ((x, zero_x), (w, zero_w)):
        if zero is not None and zero.dtype is not codes.dtype:
            raise InvalidProblem(f"a zero point {zero.type} of {codes.type}: the dtypes differ")
    how = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "pads": pads, "strides": strides}
    channels, *size = convolution(converted(x, F32), converted(w, F32), **how).shape[1:]  # or a clear error
    rank = spatial(x)
    kernel = tuple(int(n) for n in w.shape[2:])
    step, spread = each(strides, rank, 1), each(dilations, rank, 1)
    padding = padding_of(auto_pad, pads, x.shape[2:], kernel, step, spread)
    if zero_x is not None:
        zero_x = ops.reshape(zero_x, ())
    if zero_w is not None:
        zero_w = ops.reshape(ops.broadcast_to(zero_w, (channels,)), (channels, *(1,) * (rank + 1)))
    image = _padded(x, zero_x, padding)
    geometry = Geometry(image.shape[2:], tuple(size), kernel, step, spread, (0,) * rank, group)
    if is_depthwise(w):
        sums = converted(response_of(_less(image, zero_x), _less(w, zero_w), geometry), I32)
    else:
        sums = _product_of_windows(image, w, zero_x, zero_w, geometry)
    return ops.stop_gradient(sums)


def _padded(x: Node, zero: Node | None, padding: tuple[tuple[int, int], ...]) -> Node:
    if not any(n for pair in padding for n in pair):
        return x
    width = ((0, 0), (0, 0), *padding)
    return ops.pad(x, width) if zero is None else ops.pad(x ^ zero, width) ^ zero


def _less(codes: Node, zero: Node | None) -> Node:
    wide = converted(codes, I32)
    return wide if zero is None else wide - converted(zero, I32)


def _product_of_windows(x: Node, w: Node, zero_x: Node | None, zero_w: Node | None, geometry: Geometry) -> Node:
    """x [N, G*B, *image], w [G*A, B, *filter], zero_x [], zero_w [G*A, 1, ...] -> [N, G*A, *response]

    The sum of (x - p) (w - q) is that of x w, less q times the sum of a window, less p times that of w - q.
    """
    groups, inner = geometry.groups, w.shape[1]
    n, outer, ones = x.shape[0], w.shape[0] // groups, (1,) * len(geometry.filter)
    y = response_of(x, w, geometry, "integer_matmul")
    total = ops.reshape(y, (n, groups, outer, *geometry.response))

    def summed(values: Node, axis: tuple[int, ...]) -> Node:
        return converted(ops.sum(converted(values, I32), axis), I32)

    def of_filter(values: Node) -> Node:
        return ops.reshape(values, (groups, outer, *ones))

    if zero_w is not None:
        of_group = summed(ops.reshape(x, (n, groups, inner, *x.shape[2:])), (2,))
        of_window = summed(geometry.windows(of_group), tuple(range(x.rank, x.rank + len(ones))))
        total = total - of_filter(converted(zero_w, I32)) * ops.unsqueeze(of_window, 2)
    if zero_x is not None:
        total = total - converted(zero_x, I32) * of_filter(summed(_less(w, zero_w), tuple(range(1, w.rank))))
    return ops.reshape(total, y.shape)


LINES: dict[str, Forms] = {
    "MatMul": _matmul,
    "Gemm": {1: _gemm_first, 7: _gemm},
    "Det": _determinant,
    "Einsum": _einsum,
    "MatMulInteger": matmul_integer,
    "Conv": convolution,
    "ConvTranspose": _conv_transpose,
    "ConvInteger": conv_integer,
}
