"""Objects that ``copy`` and ``deepcopy`` share."""

from __future__ import annotations

from typing import Any, Self


class Shared:
    """Copies, shallow or deep, are the object itself: it has machine code and caches, but no mutable state."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
