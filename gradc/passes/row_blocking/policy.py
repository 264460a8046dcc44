"""What a partition may do about products with wide rows."""

from __future__ import annotations

import enum


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
