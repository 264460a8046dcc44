"""Values that several columns have in one byte: a block of them is unpacked, byte by byte, before the columns read them
where they lie side by side.

A column that reads byte ``column / 2`` and shifts it by ``column % 2`` steps through memory as no vector does; a loop
over bytes, each of which gives two values, is one of vectors.  Where these are codes of a code book of 16 floats, a
vector of codes gives one of floats by a permutation of the book, which compilers do not find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...ir.statement import Index, Stmt
from ..expr import Scribe, carrier, variable


@dataclass(frozen=True)
class Packed:
    """A value that is computed from a byte, and from which of its parts it is.

    :param code: its name.  :param per: how many of them a byte has.
    :param place: the value that is the byte's number, :param parts: and those that are the part's.
    :param body: the statements that compute it from these, in order.
    :param entry: the load that reads a code book at it, if that alone reads it.
    """

    code: str
    per: int
    place: str
    parts: tuple[str, ...]
    body: tuple[Stmt, ...]
    entry: Stmt | None = None

    @property
    def value(self) -> str:
        """What columns read of it."""
        return self.entry.name if self.entry else self.code

    @property
    def array(self) -> str:
        """The array of a block's codes."""
        return unpacked(self.code)

    @property
    def byte(self) -> str:
        """The variable of a byte's number."""
        return variable(self.place)

    def unpacking(self, scribe: Scribe) -> Unpacking:
        """The statements that a block of such values is computed by: for each part, then for the byte."""
        each = [
            [
                *(f"const i64 {variable(name)} = {part};" for name in self.parts),
                *(scribe.value(s) for s in self.body),
                f"{self.array}[{self.per} * e + {part}] = {variable(self.code)};",
            ]
            for part in range(self.per)
        ]
        book = f"&{scribe.element(self.entry.buffer, [Index()])}" if self.entry else ""
        return self, carrier(scribe.values[self.code]), each, book and unpacked(self.value), book


Unpacking: TypeAlias = tuple[Packed, str, list[list[str]], str, str]
"""Values that bytes have in parts, the C type of an element of their array, and the statements of each part; the array
of what a code book has at them, and where the book begins, or "" for both.
"""


def unpacked(value: str) -> str:
    """The array of a block's values that bytes have in parts."""
    return f"unpacked{value[1:]}"


def packed_values(
    body: Sequence[Stmt],
    roots: Sequence[Stmt],
    constants: Mapping[str, int],
    column: str,
    by_column: Callable[[str], bool],
    is_book: Callable[[str], bool],
) -> tuple[Packed, ...]:
    """Those of a pass.

    :param body, roots: its values, and what it does with them.  :param constants: the whole numbers among all values.
    :param column: the innermost axis.  :param by_column: whether a value depends on columns.  :param is_book: whether a
        buffer is a code book, and nothing in the kernel writes to it.
    """
    positions = {s.name for s in body if s.op == "index" and s.index == (Index.of(column),)}
    places: dict[str, int] = {}
    parts: dict[str, int] = {}
    for s in body:
        if len(s.args) == 2 and s.args[0] in positions and s.args[1] in constants:
            if s.op == "right_shift":
                places[s.name] = 1 << constants[s.args[1]]
            elif s.op == "bitwise_and":
                parts[s.name] = constants[s.args[1]] + 1
    found: list[Packed] = []
    for load in body:
        uses = [u for u in load.uses if by_column(u)]
        if load.op == "load" and len(uses) == 1 and uses[0] in places and not load.where:
            on_axes = {v for i in load.index for v, _ in i.terms}
            if column not in on_axes:
                found += _from_byte(load, uses[0], places[uses[0]], parts, body, roots, by_column)
    return tuple(replace(packed, entry=_entry(packed, body, roots, is_book)) for packed in found)


def _entry(packed: Packed, body: Sequence[Stmt], roots: Sequence[Stmt], is_book: Callable[[str], bool]) -> Stmt | None:
    """The load of a code book at a value of four bits that nothing else reads."""
    (made,) = (s for s in body if s.name == packed.code)
    if made.dtype is None or made.dtype.name != "u4":
        return None
    readers = [s for s in (*body, *roots) if packed.code in s.uses]
    entry = readers[0]
    reads = len(readers) == 1 and entry.op == "load" and not entry.where and entry.index == (Index.of(packed.code),)
    return entry if reads and is_book(entry.buffer) else None


def _from_byte(
    load: Stmt,
    place: str,
    per: int,
    parts: Mapping[str, int],
    body: Sequence[Stmt],
    roots: Sequence[Stmt],
    by_column: Callable[[str], bool],
) -> list[Packed]:
    own_parts = {name for name, count in parts.items() if count == per}
    shifts, made = set(own_parts), {load.name}
    for s in body:
        uses = {u for u in s.uses if by_column(u)}
        if not uses or s.op == "load" or not uses <= shifts | made or s.dtype is None or s.name in shifts:
            continue
        if uses <= shifts:
            shifts.add(s.name)
        elif carrier(s.dtype) in ("u8", "i8"):
            made.add(s.name)
    read_outside = {u for s in (*body, *roots) if s.name not in made for u in s.uses} & made
    if len(read_outside) != 1 or per not in (2, 4, 8):
        return []
    (value,) = read_outside
    computed = tuple(s for s in body if (s.name in made or s.name in shifts) and s.name not in own_parts)
    return [Packed(value, per, place, tuple(sorted(own_parts)), computed)]
