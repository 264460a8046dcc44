"""Conversion of an op call's operands to nodes: scalars take the nodes' dtype, arrays become constants or inputs, and
shapes are broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import TypeRuleError
from ..process.ieee import plain
from .dims import Dim, Size, same, symbols
from .node import REGISTRY, Node
from .types import DType, array_of, typeof

CAPTURE: list[Callable[[np.ndarray[Any, Any]], Node]] = []  # set by the tracer: turns a large array into an input


def adopt(name: str, operands: Sequence[Any], broadcasting: bool) -> list[Node]:
    """The operands as nodes of one dtype, which Python scalars take from the nodes.

    :param broadcasting: whether they are brought to one shape (pointwise ops).
    """
    nodes = [o for o in operands if isinstance(o, Node)]
    arrays = [o for o in operands if not isinstance(o, Node | bool | int | float | Dim)]
    like = next((n.dtype for n in nodes if n.dtype.kind != "b"), nodes[0].dtype if nodes else None)
    if like is None and arrays:
        like = typeof(arrays[0]).dtype
    adopted = [o if isinstance(o, Node) else _lift(name, o, like) for o in operands]
    return broadcast(adopted) if broadcasting else adopted


def _lift(name: str, value: Any, like: DType | None) -> Node:
    constant = REGISTRY["constant"]
    if isinstance(value, Dim):
        node = REGISTRY["dim"](size=value)
        return REGISTRY["cast"](node, like) if like and like is not node.dtype else node  # type: ignore[no-any-return]
    if isinstance(value, bool) and like is not None and like.kind != "b":
        raise TypeRuleError(
            f"{name}: the Python bool {value} meets a {like} operand; write {int(value)}, or the cast of a traced mask"
        )
    if isinstance(value, bool | int | float):
        kind = like or typeof(value).dtype
        if not kind.is_float and isinstance(value, float):
            raise TypeRuleError(
                f"{name}: the scalar {value} meets a {kind} operand; write a cast of the operand or"
                f" {'an int' if kind.is_integer else 'a bool'}"
            )
        try:
            literal = kind.literal(value)
        except TypeRuleError as error:
            raise TypeRuleError(f"{name}: the scalar {error}") from None
        return constant(value=(literal,), dtype=kind, shape=())  # type: ignore[no-any-return]
    try:
        if not isinstance(value, list | tuple | np.generic) and not any(
            hasattr(value, protocol) for protocol in ("__array__", "__array_interface__")
        ):
            raise TypeRuleError(f"{name}: {repr(value)[:60]} is neither a traced value, a number nor an array")
        array = array_of(value)
    except TypeRuleError:
        raise
    except Exception as error:  # objects of other libraries may raise anything
        raise TypeRuleError(
            f"{name}: a {type(value).__qualname__} cannot be read as an array: {type(error).__name__}:"
            f" {str(error)[:200]}"
        ) from error
    kind = typeof(array).dtype
    if isinstance(value, list | tuple) and like is not None and like.kind == kind.kind:
        items = [like.literal(v) for v in array.reshape(-1).tolist()]
        with plain():
            array, kind = np.asarray(items, array.dtype).reshape(array.shape).astype(like.np), like
    if array.size > 64:
        if not CAPTURE:
            raise TypeRuleError(
                f"{name}: an array of {array.size} elements met outside a trace; constants hold 64 at most"
            )
        return CAPTURE[-1](array)
    flat = array.reshape(-1)
    items = (
        [float(v) for v in flat]
        if kind.is_float
        else [bool(v) for v in flat]
        if kind.kind == "b"
        else [int(v) for v in flat]
    )
    return constant(value=tuple(items), dtype=kind, shape=tuple(array.shape))  # type: ignore[no-any-return]


def broadcast_shapes(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """NumPy's broadcast shape; only the constant size 1 broadcasts, not a symbol whose value may be 1."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if result[axis] == 1:
                result[axis] = size
            elif size != 1 and not same(size, result[axis]):
                hint = "; assume(...) can state that they are equal" if symbols(size) | symbols(result[axis]) else ""
                raise TypeRuleError(f"shapes do not broadcast: {result[axis]} and {size} on axis {axis - rank}{hint}")
    return tuple(result)


def broadcast(nodes: Sequence[Node]) -> list[Node]:
    """The nodes broadcast to their common shape by explicit ``broadcast_to``."""
    shape = broadcast_shapes([n.shape for n in nodes])
    return [n if n.shape == shape else REGISTRY["broadcast_to"](n, shape) for n in nodes]
