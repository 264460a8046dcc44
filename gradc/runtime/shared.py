"""What calls do not change."""

from __future__ import annotations

from typing import Any, Self


class Shared:
    """A copy of it, deep or not, is itself: it holds machine code and what is looked up, nothing that belongs to one
    owner.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
