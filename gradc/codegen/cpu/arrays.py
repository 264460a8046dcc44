"""Memory as the text of a kernel names it: its buffers, and arrays of its own."""

from __future__ import annotations

from dataclasses import dataclass


def grouped(text: str) -> str:
    """A size as a factor of a product."""
    return text if text.startswith("(") or text.isidentifier() or text.isdigit() else f"({text})"


@dataclass(frozen=True)
class BufferField:
    """A buffer as a kernel's arguments hold it.

    :param name: the identifier of the user's name.
    :param ctype: the type of its elements in memory, ``const`` where the kernel only reads them.
    """

    name: str
    ctype: str


@dataclass(frozen=True)
class LocalArray:
    """An array in the workspace, or in the memory of the running thread.

    :param name: what it is called.
    :param ctype: the type of its elements.
    :param count: how many there are, as C.
    """

    name: str
    ctype: str
    count: str

    @property
    def bytes(self) -> str:
        """Its bytes, as C."""
        return f"{grouped(self.count)} * (i64)sizeof({self.ctype})"


@dataclass(frozen=True)
class StreamedArray(LocalArray):
    """An array that a store streams to.

    :param row: bytes that lie side by side in a row of the kernel, as C.
    """

    row: str
