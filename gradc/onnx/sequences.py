"""Sequences and optionals whose length and presence are known when a model is read: they leave nothing in the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .. import ops
from ..errors import InvalidProblem, Unsupported
from ..ir.dims import Dim
from ..ir.node import Node
from .table import MOST_STEPS, normalized_axis


class Items(tuple[Any, ...]):
    """The elements of a sequence."""

    __slots__ = ()


class Reader(Protocol):
    """Who reads the model."""

    def node(self, value: Any) -> Node: ...

    def integers(self, value: Any, place: int) -> np.ndarray[Any, Any]:
        """:raises Unsupported: the value is computed from data, or a size that varies."""
        ...


Operands = Sequence[Any]
Handler = Callable[[Reader, Operands, Mapping[str, Any]], Any]


def _items(operands: Operands) -> Items:
    if not operands or not isinstance(operands[0], Items):
        raise InvalidProblem("its first input is no sequence")
    return operands[0]


def _place(reader: Reader, operands: Operands, at: int, count: int, default: int) -> int:
    """A position among ``count``; negative ones count from the end."""
    if len(operands) <= at or operands[at] is None:
        return default
    place = int(reader.integers(operands[at], at).reshape(-1)[0])
    if not -count <= place < count:
        raise InvalidProblem(f"position {place} of a sequence of {count}")
    return place % count


def _insert(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Items:
    items = _items(operands)
    count = len(items)
    given = count
    if len(operands) > 2 and operands[2] is not None:
        given = int(reader.integers(operands[2], 2).reshape(-1)[0])
    if not -count <= given <= count:
        raise InvalidProblem(f"position {given} of a sequence of {count}")
    at = given + count if given < 0 else given
    return Items((*items[:at], operands[1], *items[at:]))


def _erase(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Items:
    items = _items(operands)
    if not items:
        raise InvalidProblem("nothing can be taken from an empty sequence")
    at = _place(reader, operands, 1, len(items), len(items) - 1)
    return Items((*items[:at], *items[at + 1 :]))


def _at(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Any:
    items = _items(operands)
    return items[_place(reader, operands, 1, len(items), 0)]


def _split(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Items:
    x = reader.node(operands[0])
    axis = normalized_axis(attributes.get("axis", 0), x.rank)
    size = x.shape[axis]
    if isinstance(size, Dim):
        raise Unsupported(f"a sequence of the parts of an axis of {size} elements")
    alone = len(operands) < 2 or operands[1] is None
    given = np.array(1) if alone else reader.integers(operands[1], 1)
    if not given.ndim and size > MOST_STEPS * max(int(given), 1):
        raise Unsupported(f"a sequence of more than {MOST_STEPS} parts")
    if given.ndim:
        sizes = tuple(given.tolist())
    elif given < 1:
        raise InvalidProblem(f"parts of {given} elements")
    else:
        sizes = tuple(min(int(given), size - at) for at in range(0, size, int(given)))
    parts = ops.split(x, sizes, axis)
    squeezed = alone and not attributes.get("keepdims", 1)
    return Items(ops.squeeze(part, axis) if squeezed else part for part in parts)


def _concat(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Node:
    nodes = [reader.node(item) for item in _items(operands)]
    if not nodes:
        raise InvalidProblem("an empty sequence has nothing to join")
    axis = attributes["axis"]
    if attributes.get("new_axis", 0):
        return ops.stack(*nodes, axis=normalized_axis(axis, nodes[0].rank + 1))
    return ops.concat(*nodes, axis=normalized_axis(axis, nodes[0].rank))


def _element(reader: Reader, operands: Operands, attributes: Mapping[str, Any]) -> Any:
    if not operands or operands[0] is None:
        raise InvalidProblem("an optional that holds nothing")
    return operands[0]


HANDLERS: dict[str, Handler] = {
    "Identity": lambda reader, operands, attributes: operands[0],
    "SequenceEmpty": lambda reader, operands, attributes: Items(),
    "SequenceConstruct": lambda reader, operands, attributes: Items(operands),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": lambda reader, operands, attributes: np.array(len(_items(operands)), np.int64),
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
    "Optional": lambda reader, operands, attributes: operands[0] if operands else None,
    "OptionalHasElement": lambda reader, operands, attributes: np.array(bool(operands) and operands[0] is not None),
    "OptionalGetElement": _element,
}
"""By operator: its one result. ``Identity`` is of all that a value can be."""
