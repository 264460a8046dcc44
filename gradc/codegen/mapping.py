"""A mapping of a kernel to what runs it, on any target: a frozen record of its own class."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KernelMapping:
    """What a kernel has been mapped to.

    :param reason: why a kernel has this mapping.
    """

    reason: str

    @classmethod
    def name(cls) -> str:
        """``column strips``, as explanations call it."""
        return re.sub("(?<!^)(?=[A-Z])", " ", cls.__name__).lower()

    @property
    def template(self) -> str:
        """Of the row program, in the folder of its target's kernels."""
        return self.name().replace(" ", "_")
