"""Objects that are shared rather than copied."""

from __future__ import annotations

from typing import Any, Self


class Shared:
    """Its copy, shallow or deep, is the object itself: it holds machine code and caches, no state of one owner."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
