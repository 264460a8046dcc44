"""Type rules, node builders and samples that many op records share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import TypeRuleError
from ..ir.dims import Size, same
from ..ir.node import Node, call
from ..ir.op import Sample
from ..ir.statement import neutral
from ..ir.types import BOOL, F64, DType, Type, typeof


def alike(*types: Type) -> Type:
    """The common type of operands that must have equal dtypes and shapes."""
    first = types[0]
    for other in types[1:]:
        if other.dtype is not first.dtype:
            raise TypeRuleError(f"dtypes differ: {first.dtype} and {other.dtype}; write a cast")
        if len(other.shape) != len(first.shape) or not all(
            same(a, b) for a, b in zip(first.shape, other.shape, strict=True)
        ):
            raise TypeRuleError(f"shapes differ: {first} and {other}")
    return first


def number(type: Type) -> Type:
    """A dtype that arithmetic is defined on: any but bool."""
    if type.dtype.kind == "b":
        raise TypeRuleError("bool has no arithmetic; cast it")
    return type


def floating(type: Type) -> Type:
    """A float dtype; TypeRuleError otherwise."""
    if not type.dtype.is_float:
        raise TypeRuleError(f"{type.dtype} is no float; write a cast")
    return type


def unary_float(x: Type) -> Type:
    return floating(x)


def unary_number(x: Type) -> Type:
    return number(x)


def binary_number(x: Type, y: Type) -> Type:
    return number(alike(x, y))


def binary_float(x: Type, y: Type) -> Type:
    return floating(alike(x, y))


def comparison(x: Type, y: Type) -> Type:
    return alike(x, y).with_dtype(BOOL)


def of_rank(name: str, x: Node, rank: int) -> Node:
    """The operand ``x`` itself; TypeRuleError in the terms of its ``name`` if it has another rank."""
    if x.rank != rank:
        raise TypeRuleError(f"{name} of rank {x.rank}, not {rank}")
    return x


def canonical_axis(axis: int, rank: int, argument: str = "axis") -> int:
    """``axis`` in 0..rank-1; a negative one counts from the end."""
    if not -rank <= axis < rank:
        raise TypeRuleError(f"{argument}={axis} of a rank {rank} operand: {-rank} to {rank - 1} exist")
    return axis % rank


def canonical_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """None (all axes), an int or several ints, as a sorted tuple of distinct axes in 0..rank-1."""
    if axis is None:
        return tuple(range(rank))
    axes = tuple(canonical_axis(int(a), rank) for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    if len(set(axes)) != len(axes):
        raise TypeRuleError(f"axis {axis} names an axis twice")
    return tuple(sorted(axes))


def without(shape: Sequence[Size], axes: Iterable[int]) -> tuple[Size, ...]:
    gone = set(axes)
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def keeping(shape: Sequence[Size], axes: Iterable[int]) -> tuple[Size, ...]:
    """The shape with ``axes`` reduced to size 1 (keepdims)."""
    gone = set(axes)
    return tuple(1 if axis in gone else size for axis, size in enumerate(shape))


def plain_number(value: Any) -> Any:
    """A NumPy scalar as a number of Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def full(value: float | int | bool, like: Node | Type, dtype: DType | None = None) -> Node:
    """A constant broadcast to the shape of ``like``, in its dtype unless another is given."""
    type_ = like.type if isinstance(like, Node) else like
    kind = dtype or type_.dtype
    return spread(call("constant", value=(kind.literal(value),), dtype=kind, shape=()), type_.shape)


def spread(node: Node, shape: Sequence[Size]) -> Node:
    """broadcast_to, or the node itself if it has the shape already."""
    return node if node.shape == tuple(shape) else call("broadcast_to", node, tuple(shape))


def along(node: Node, shape: Sequence[Size], axes: Iterable[int]) -> Node:
    """A reduction's result broadcast back over the reduced axes of ``shape``."""
    return spread(reshaped(node, keeping(shape, axes)), shape)


def reshaped(node: Node, shape: Sequence[Size]) -> Node:
    return node if node.shape == tuple(shape) else call("reshape", node, tuple(shape))


def leading(node: Node, shape: Sequence[Size]) -> Node:
    """The first elements along each axis, so many as ``shape`` has."""
    limit, rank = tuple(shape), node.rank
    return node if node.shape == limit else call("slice", node, start=(0,) * rank, limit=limit, step=(1,) * rank)


def converted(node: Node, dtype: DType) -> Node:
    return node if node.dtype is dtype else call("cast", node, dtype)


def widened(function: Callable[..., Node]) -> Callable[..., Node]:
    """A decomposition that computes in the first operand's compute dtype and rounds once; integers stay as they are."""

    def decompose(*operands: Node, **attrs: Any) -> Node:
        dtype = operands[0].dtype
        wide = (converted(o, dtype.compute) if o.dtype.is_float else o for o in operands)
        return converted(function(*wide, **attrs), dtype)

    return decompose


def slopes(function: Callable[..., tuple[Node, ...]]) -> Callable[..., tuple[Node, ...]]:
    """The vjp of a pointwise op from ``(*operands, **attrs) -> dy/doperand each``, in the compute dtype; the cotangent
    is multiplied last: what is finite is not lost on the way.
    """

    def vjp(g: Node, y: Node, *operands: Node, **attrs: Any) -> tuple[Node, ...]:
        dtype = operands[0].dtype.compute
        found = function(*(converted(o, dtype) for o in operands), **attrs)
        wide = converted(g, dtype)
        return tuple(converted(wide * slope, o.dtype) for slope, o in zip(found, operands, strict=True))

    return written(vjp, function)


def written(made: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A vjp that was made from a function: docs/ops.md shows that function's text."""
    made.written = function  # type: ignore[attr-defined]
    return made


def zeros_like(node: Node) -> Node:
    return full(0, node)


def linear_all(count: int, rank: int) -> dict[int, tuple[int | None, ...]]:
    """The ``multilinear`` map of a pointwise op: linear in each of ``count`` operands, axis a to axis a."""
    return {k: tuple(range(rank)) for k in range(count)}


def cases(*shapes: str, arity: int = 1, draw: str = "normal", dtype: str = "F") -> tuple[Sample, ...]:
    """Samples of pointwise ops: one per shape text such as ``"N,4"``."""
    return tuple(Sample((f"{dtype}[{shape}]",) * arity, draw=(draw,) * arity) for shape in shapes)


SHAPES = ("", "N", "3,N", "2,N,3", "2,1,N,3")
"""Sample shapes of pointwise ops: ranks 0 to 4, with a symbolic dim."""


def summing(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The accumulator dtype of NumPy references: wider than ``dtype``, so that the reference's own rounding error is
    negligible.
    """
    wider: dict[np.dtype[Any], np.dtype[Any]] = {
        np.dtype(np.float32): np.dtype(np.float64),
        np.dtype(np.float64): np.dtype(np.longdouble),
    }
    return wider.get(dtype, dtype)


def neutral_of(combine: str, array: np.ndarray[Any, Any]) -> int | float:
    """The neutral element of a combine for an array, which may be long double."""
    return neutral(combine, F64 if array.dtype.kind == "f" else typeof(array).dtype)


UFUNCS: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
"""NumPy's ufunc for each combine of a reduction or scatter."""
