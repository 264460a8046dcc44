"""What the record of an op says of a node's data movement, so that a pass can rewrite an op that it has never seen.

A pass asks ``access(node, Gathers)`` and not for the name ``gather``: an op of a user's that declares ``access=lambda
node: Gathers(table=0, indices=1, axis=0)`` is rewritten as :func:`gradc.ops.gather` is.  What passes write in its place
are the package's ops, so a declaration says two things: the node's value is that of the op named beside each property,
and so is its derivative.  ``GRADC_VALIDATE=1`` holds the value against exact algebra, also at positions outside of
their bounds, :func:`gradc.check` the derivative against differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..errors import InternalError
from .dims import Dim, Size
from .node import Node

Bounds = Literal["error", "skip", "clamp", "wrap"]
"""What a position in data means that is outside: an error, nothing, the nearest end, or itself modulo the size."""


@dataclass(frozen=True)
class Gathers:
    """Slices of a table at positions in data: ``gather``.  result[a.., i.., b..] = table[a.., indices[i..], b..], with
    ``axis`` axes a.

    :param table, indices: the numbers of the operands.
    :param padding_idx: the position whose slice gets no gradient.
    :param scale_grad_by_freq: a slice's gradient is divided by the number of positions that read it.
    """

    table: int
    indices: int
    axis: int
    oob: Bounds = "error"
    padding_idx: int | Dim | None = None
    scale_grad_by_freq: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of ``gather``."""
        return {
            "axis": self.axis,
            "oob": self.oob,
            "padding_idx": self.padding_idx,
            "scale_grad_by_freq": self.scale_grad_by_freq,
        }


@dataclass(frozen=True)
class GathersElements:
    """One element at each position: ``take_along_axis``.  result[a, i, b] = table[a, indices[a, i, b], b] along
    ``axis``.

    :param table, indices: as in :class:`Gathers`.
    """

    table: int
    indices: int
    axis: int
    oob: Bounds = "error"


@dataclass(frozen=True)
class Scatters:
    """Zeros with slices of updates added at positions in data, the adjoint of :class:`Gathers`: ``scatter_add``.
    result[a.., indices[i..], b..] += updates[a.., i.., b..]; another combination than the sum has no property.

    :param indices, updates: the numbers of the operands.
    :param padding_idx: the position to which nothing is added.
    """

    indices: int
    updates: int
    axis: int
    oob: Bounds = "error"
    padding_idx: int | Dim | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of ``scatter_add`` but the size, which is the result's."""
        return {"axis": self.axis, "oob": self.oob, "padding_idx": self.padding_idx}


@dataclass(frozen=True)
class Slices:
    """``[start:limit:step]`` of the operand along each axis: ``slice``."""

    start: tuple[Size, ...]
    limit: tuple[Size, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class Reshapes:
    """The operand's elements in row-major order in the result's shape: ``reshape``."""


@dataclass(frozen=True)
class Broadcasts:
    """The operand repeated along new leading axes and along its axes of size 1: ``broadcast_to``."""


@dataclass(frozen=True)
class Transposes:
    """Result axis k is the operand's axis ``axes[k]``: ``transpose``."""

    axes: tuple[int, ...]


@dataclass(frozen=True)
class Concats:
    """The operands one after another along ``axis``: ``concat``."""

    axis: int


@dataclass(frozen=True)
class Pads:
    """``value`` before and after the operand along each axis: ``pad``."""

    pad_width: tuple[tuple[Size, Size], ...]
    value: int | float | bool


Access = Gathers | GathersElements | Scatters | Slices | Reshapes | Broadcasts | Transposes | Concats | Pads
A = TypeVar("A")


def access(node: Node, kind: type[A]) -> A | None:
    """What the node's record declares of its data movement, if that is of this kind; else None.

    :raises InternalError: it names an axis that is not there; axes count from 0.
    """
    declare = node.op.access
    declared = None if declare is None else declare(node)
    if not isinstance(declared, kind):
        return None
    axes, rank = _axes(declared, node)
    if not all(0 <= axis < rank for axis in axes):
        raise InternalError(f"op {node.op.name} declares a data movement that cannot be: {declared} of {rank} axes")
    return declared


def filling(node: Node, otherwise: Any) -> Any:
    """What a node's result holds where nothing of its operand is: the value of a pad, be its attribute's name what it
    may.
    """
    pad = access(node, Pads)
    return node.attrs.get("value", otherwise) if pad is None else pad.value


def _axes(declared: Any, node: Node) -> tuple[tuple[int, ...], int]:
    """The axes that a property names, and how many there are."""
    if isinstance(declared, Gathers):
        return (declared.axis,), node.operands[declared.table].rank
    if isinstance(declared, Transposes):
        return declared.axes, node.rank
    return ((declared.axis,) if isinstance(declared, GathersElements | Scatters | Concats) else ()), node.rank
