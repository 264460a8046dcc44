"""What forward keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.node import Node


@dataclass(frozen=True)
class Residual:
    """One value kept between forward and backward.

    :param why: ``input`` (borrowed, 0 bytes), or the op whose result it is and why it is not computed again.
    """

    name: str
    node: Node
    why: str
