"""An op's declared data movement as the package's op of that kind."""

from __future__ import annotations

from ...errors import InternalError
from ...ir.node import Node
from ...ir.properties import (
    Broadcasts,
    Concats,
    Gathers,
    GathersElements,
    Pads,
    Reshapes,
    Scatters,
    Slices,
    Transposes,
    access,
)
from ..indexing.gathers import gather, scatter_add, take_along_axis
from .movement import broadcast_to, concat, pad, reshape, slice, transpose


def canonical(node: Node) -> Node:
    """The node that :mod:`gradc.ir.properties` says a node is equal to; itself if its record declares nothing.

    :raises InternalError: as :func:`.access`.
    """
    declared = access(node, object)
    operands = node.operands
    match declared:
        case None:
            return node
        case Gathers():
            return gather.plain(operands[declared.table], operands[declared.indices], **declared.attrs)
        case GathersElements(axis=axis, oob=oob):
            return take_along_axis.plain(operands[declared.table], operands[declared.indices], axis=axis, oob=oob)
        case Scatters(axis=axis):
            parts = operands[declared.indices], operands[declared.updates]
            return scatter_add.plain(*parts, size=node.shape[axis], **declared.attrs)
        case Reshapes():
            return reshape.plain(*operands, shape=node.shape)
        case Broadcasts():
            return broadcast_to.plain(*operands, shape=node.shape)
        case Slices():
            return slice.plain(*operands, **vars(declared))
        case Transposes():
            return transpose.plain(*operands, **vars(declared))
        case Concats():
            return concat.plain(*operands, **vars(declared))
        case Pads():
            return pad.plain(*operands, **vars(declared))
    raise InternalError(f"op {node.op.name} declares {declared!r}, which no property of gradc.ir.properties is")
