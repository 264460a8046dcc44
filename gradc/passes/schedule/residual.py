"""What forward keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.node import Node


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
