"""What forward keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.node import Node

PRECOMPUTED = "a gradient for a cotangent of 1, made while what it is made of is there"
"""Why a gradient of a loss is kept: :mod:`gradc.passes.row_blocking.precompute_gradients`; in saved modules, too."""


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
