"""A dict of bounded size that drops what was asked for least recently."""

from __future__ import annotations

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A cache of values that can be made again; None is no value.

    Threads may use it at once: at worst one of them makes a value that another has dropped just now.

    :param room: how many it holds.
    """

    room: int = 256

    def __init__(self, room: int):
        super().__init__()
        self.room = room

    def get(self, key: K, default: Any = None) -> Any:
        """The value, which is now the most recent one."""
        found = self.pop(key, None)
        if found is None:
            return default
        super().__setitem__(key, found)
        return found

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self.room:
            try:
                oldest = next(iter(self))
            except (StopIteration, RuntimeError):  # another thread changes it
                continue
            self.pop(oldest, None)
