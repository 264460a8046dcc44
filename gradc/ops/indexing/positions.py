"""Index arrays of x[i, j]: as nodes, counted from 0, and as one index into the axes that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import TypeRuleError
from ...ir.dims import Size, product
from ...ir.node import Node, call
from ...ir.operands import broadcast_shapes
from ...ir.types import DTYPES, I64
from ..rules import converted, full, reshaped, spread

_MOST = 64
"""Elements of one constant."""


def counted_from_end(index: Node, size: Size, op: str) -> Node:
    """Traced positions in i64, negative ones counted from the end, checked under the name ``op``."""
    if not index.dtype.is_integer:
        raise TypeRuleError(f"indices are {index.dtype}; they may be integers: write ops.cast(indices, 'i64')")
    if index.op.name == "constant" and isinstance(size, int):
        known = np.reshape(np.array(index.attrs["value"], np.int64), index.type.concrete({}))
        return constant_array(_from_start(known, size, op))
    place = converted(index, I64)
    if index.dtype.kind != "u":  # what is outside stays as it is, for the error's sake
        end = spread(call("dim", size=size), place.shape)
        from_end = call("bitwise_and", call("lt", place, full(0, place)), call("ge", place, -end))
        place = call("where", from_end, place + end, place)
    return checked(place, size, op)


def _from_start(positions: np.ndarray[Any, Any], size: int, op: str) -> np.ndarray[Any, Any]:
    """Positions that are known when tracing, negative ones counted from the end.

    :raises TypeRuleError: one is out of range.
    """
    outside = positions[(positions < -size) | (positions >= size)]
    if outside.size:
        raise TypeRuleError(f"{op}: index {int(outside[0])} of a size of {size}")
    return np.where(positions < 0, positions + size, positions)


def checked(place: Node, size: Size, op: str) -> Node:
    """Positions that are checked under the name ``op``, unless they are constants in [0, size)."""
    if place.op.name == "constant" and isinstance(size, int) and all(0 <= v < size for v in place.attrs["value"]):
        return place
    return call("check_index", place, bound=size, op=op)


def is_mask(key: Any) -> bool:
    """Whether an index is of bools: a traced mask, an array or a list of them, or one bool."""
    if isinstance(key, Node):
        return key.dtype.kind == "b"
    return isinstance(key, bool | np.bool_) or (
        isinstance(key, np.ndarray | list) and np.size(key) > 0 and np.asarray(key).dtype.kind == "b"
    )


def is_array(key: Any) -> bool:
    return isinstance(key, Node | np.ndarray | list)


def without_masks(keys: Sequence[Any], shape: Sequence[Size]) -> list[Any]:
    """The keys with a NumPy array of bools replaced by the integer arrays of the places where it is True.

    :raises TypeRuleError: the mask is traced or has another shape than the axes that it names.
    """
    found: list[Any] = []
    for at, key in enumerate(keys):
        if not is_mask(key):
            found.append(key)
            continue
        if not isinstance(key, np.ndarray) or not key.ndim:
            raise TypeRuleError(
                "getitem: x[mask] would have a shape that only the data knows; write ops.where(mask, x, 0) and reduce"
                " over that, or give the positions as integers; a NumPy array of bools is known when tracing"
            )
        after = _axes_of(keys[at + 1 :])
        first = len(shape) - after - key.ndim if Ellipsis in _plain(keys[:at]) else _axes_of(keys[:at])
        own = tuple(shape[first : first + key.ndim])
        if own != key.shape:
            raise TypeRuleError(f"getitem: a mask of shape {list(key.shape)} for axes of sizes {list(own)}")
        found += np.nonzero(key)
    return found


def _plain(keys: Sequence[Any]) -> list[Any]:
    return [key for key in keys if key is Ellipsis]


def _axes_of(keys: Sequence[Any]) -> int:
    """How many axes the keys name."""
    return sum(
        key.ndim if isinstance(key, np.ndarray) and is_mask(key) else key is not None and key is not Ellipsis
        for key in keys
    )


def as_index(key: Any, size: Size, op: str) -> Node:
    """An index array of ``op`` as a node; one known when tracing is checked against a constant size, counted from 0."""
    if isinstance(key, Node):
        return key
    array = np.asarray(key)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeRuleError(f"{op}: indices are {array.dtype}; they may be integers")
    array = array.astype(np.int64)
    node = constant_array(_from_start(array, size, op) if isinstance(size, int) else array)
    return counted_from_end(node, size, op) if array.size and array.min() < 0 else node


def constant_array(array: np.ndarray[Any, Any]) -> Node:
    """An i64 array as a node: one constant, or several where it has more elements than one may have."""
    line = array.reshape(-1)
    steps = np.diff(line)
    if line.size > _MOST and (steps == steps[0]).all():
        node = call("iota", shape=line.shape) * int(steps[0]) + int(line[0])
        return reshaped(node, array.shape)
    parts = [
        call("constant", value=tuple(part.tolist()), dtype=DTYPES["i64"], shape=part.shape)
        for part in (line[k : k + _MOST] for k in range(0, max(line.size, 1), _MOST))
    ]
    return reshaped(parts[0] if len(parts) == 1 else call("concat", *parts, axis=0), array.shape)


def arrays_of(keys: Sequence[Any], x: Node, op: str) -> dict[int, Node] | None:
    """The index arrays by axis, if every other key is a whole slice; None otherwise."""
    keys = without_masks(keys, x.shape)
    if any(key is None for key in keys) or len(keys) > x.rank:
        return None
    if Ellipsis in _plain(keys):
        at = next(k for k, key in enumerate(keys) if key is Ellipsis)
        keys = [*keys[:at], *[slice(None)] * (x.rank - len(keys) + 1), *keys[at + 1 :]]
    found = {axis: as_index(key, x.shape[axis], op) for axis, key in enumerate(keys) if is_array(key)}
    rest = [key for key in keys if not is_array(key)]
    whole = all(isinstance(key, slice) and key == slice(None) for key in rest)
    return found if found and whole else None


def along_axes(x: Node, arrays: Mapping[int, Node], op: str) -> tuple[Node, Node, int, tuple[int, ...]]:
    """x with the axes that are indexed made one, the index into that, the axis, and the order of x's axes for it:
    where the axes are not neighbours they go first.
    """
    axes = sorted(arrays)
    order = tuple(range(x.rank))
    if axes != list(range(axes[0], axes[-1] + 1)):
        order = (*axes, *(a for a in order if a not in axes))
        x = call("transpose", x, order)
        arrays = {k: arrays[a] for k, a in enumerate(axes)}
        axes = sorted(arrays)
    if len(axes) == 1:
        return x, arrays[axes[0]], axes[0], order
    shape = broadcast_shapes([index.shape for index in arrays.values()])
    place: Any = None
    for axis in axes:  # the index into the merged axis hides which of them is wrong, so each is checked
        at = spread(converted(arrays[axis], I64), shape)
        at = checked(at, x.shape[axis], op) if arrays[axis].op.name != "constant" else at
        place = at if place is None else place * spread(call("dim", size=x.shape[axis]), shape) + at
    merged = product(x.shape[a] for a in axes)
    return reshaped(x, (*x.shape[: axes[0]], merged, *x.shape[axes[-1] + 1 :])), place, axes[0], order
