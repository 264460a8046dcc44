"""What forward keeps for backward."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...ir.node import Node

PRECOMPUTED = "a gradient for a cotangent of 1, made while what it is made of is there"
"""Why a gradient of a loss is kept: :mod:`gradc.passes.row_blocking.precompute_gradients`; in saved modules, too."""


class WideRowPolicy(enum.Enum):
    """Where the backward has a product with wide rows from, of which no half has more than a block in memory.

    The products of a loss and of attention are examples: logits [N, V], scores [S, S].
    """

    SAVE = "save"
    """From memory, whole, as any other product: no loop computes it block by block."""
    RECOMPUTE = "recompute"
    """From its operands: each half multiplies them, in a loop over blocks of rows."""
    PRECOMPUTE_GRADIENT = "precompute gradient"
    """It needs none: the forward's loop also computes the gradients that are made of it, for a cotangent of 1, and the
    backward multiplies them by the cotangent.  Only a scalar's gradients are linear in one number."""


@dataclass(frozen=True)
class Residual:
    """One value kept between forward and backward.

    :param why: ``input`` or ``output`` (borrowed, 0 bytes), or the op whose result it is and why it is not computed
        again.
    :param output: the name of the borrowed output, else "".
    """

    name: str
    node: Node
    why: str
    output: str = ""

    @property
    def borrowed(self) -> bool:
        """Whether the caller holds it: an input, or an output."""
        return self.why == "input" or bool(self.output)

    @property
    def precomputed(self) -> bool:
        """Whether it is a gradient that the forward makes for the backward alone."""
        return self.why == PRECOMPUTED
