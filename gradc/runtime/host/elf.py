"""The variables of a compiled library, read from its ELF symbol table."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SECTION = struct.Struct(
    "<IIQQQQIIQQ"
)  # name, type, flags, address, offset, size, link, info, alignment, size of an entry
_SYMBOL = struct.Struct("<IBBHQQ")  # name, type and binding, visibility, section, value, size
_SYMBOLS, _VARIABLE, _WRITABLE = 2, 1, 1


@dataclass(frozen=True)
class Variable:
    """A variable: symbol, section, whether the section is writable, address relative to the library's start, size."""

    symbol: str
    section: str
    writable: bool
    address: int
    size: int


def variables(library: bytes) -> Iterator[Variable]:
    """Every variable of a 64-bit little-endian ELF library that was not stripped."""
    if library[:6] != b"\x7fELF\x02\x01":
        return
    (start,), (count, names_at) = struct.unpack_from("<Q", library, 40), struct.unpack_from("<HH", library, 60)
    sections = [_SECTION.unpack_from(library, start + i * _SECTION.size) for i in range(count)]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        for at in range(offset, offset + size, _SYMBOL.size):
            name, info, _, where, value, length = _SYMBOL.unpack_from(library, at)
            if info & 15 == _VARIABLE and 0 < where < count:
                section = sections[where]
                yield Variable(
                    _text(library, sections[link][4] + name),
                    _text(library, sections[names_at][4] + section[0]),
                    bool(section[2] & _WRITABLE),
                    value,
                    length,
                )


def _text(library: bytes, at: int) -> str:
    return library[at : library.index(b"\0", at)].decode("ascii", "replace")
