"""Which elements of a block a lane has, what several of them share, and what lies in shared memory for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ....analysis.tiles import Strip, begins_whole, place_of
from ....ir.kernel import Kernel
from ....ir.statement import REDUCTIONS, Stmt
from .canonical import COLUMN, ROW

UNROLL = "#pragma unroll"


@dataclass(frozen=True)
class StripText:
    """A strip in the template.

    :param at: bytes before it in shared memory.  :param first: the address of its first element, at column 0.
    :param offset: elements from there to the first of a block of columns.
    :param there: its rows that are there, and :param valid: elements of each.
    """

    name: str
    at: int
    ctype: str
    strip: Strip
    height: int
    width: int
    pitch: int
    first: str
    step: str
    next: str
    offset: str
    there: str
    valid: str
    comment: str

    @property
    def memory(self) -> str:
        return f"from_s{self.name[5:]}"

    @property
    def words(self) -> str:
        """The registers of a lane's bytes."""
        return f"words{self.name[5:]}"

    @property
    def stage(self) -> str:
        """Its first element in the stage."""
        return f"{self.name} + stage * {self.height * self.pitch}"


@dataclass(frozen=True)
class Lanes:
    """Which elements of a block a lane has, and how it reaches what several of them share.

    :param run: its neighbouring columns, of each four times as many.
    :param together: whether its rows are neighbours; else they are 8 apart.
    :param split: warps that share the columns.  :param tiles: of 16 rows, of a warp.
    :param starts: symbols of the first row and the first column of a block.
    """

    run: int
    together: bool
    split: int
    tiles: int
    starts: frozenset[str]

    @property
    def width(self) -> str:
        """Columns of a warp."""
        return "WIDTH" if self.split > 1 else "COLUMNS"

    @property
    def row(self) -> str:
        """Row ``h``."""
        return f"lane_row + {'h' if self.together else '8 * h'}"

    @property
    def step(self) -> str:
        """Columns from the lane's first one to element ``i`` of the piece ``c`` of 8 columns."""
        half = self.run // 2
        return "8 * c + i % 2" if half == 1 else f"c / {half} * {4 * self.run} + c % {half} * 2 + i % 2"

    # -- what several elements share: the columns of a run, or the rows of a lane -------------------------------------

    @property
    def shared(self) -> tuple[str, str]:
        """The sizes of an array of values that elements share."""
        return (f"[{self.width} / 8]", "[2]") if self.together else ("[2 * TILES]", f"[{self.width} / {4 * self.run}]")

    @property
    def of_element(self) -> str:
        """The place in it for an element."""
        return "[c][i % 2]" if self.together else f"[h][c / {self.run // 2}]"

    @property
    def each(self) -> tuple[str, ...]:
        """Opens a loop over it: all that share a value have the row ``h`` and the column ``step``."""
        if self.together:
            opened = f"for (int piece = 0; piece < {self.width} / 4; piece++) {{"
            return UNROLL, opened, "const int c = piece / 2, i = piece % 2, h = 0, step = 8 * c + i;"
        runs = f"({self.width} / {4 * self.run})"
        opened = f"for (int piece = 0; piece < 2 * TILES * {runs}; piece++) {{"
        whole = f"const int h = piece / {runs}, c = piece % {runs} * {self.run // 2}, i = 0, step = 8 * c;"
        return UNROLL, opened, whole

    def bytes(self, strip: Strip) -> int:
        """Of a lane's neighbours."""
        return (2 * self.tiles if self.together else self.run) // strip.per

    def shares(self, strip: Strip) -> bool:
        """Whether all that share a value have one element of a strip."""
        return strip.per >= (2 * self.tiles if self.together else self.run)

    def place(self, text: StripText) -> str:
        """Where a strip has the element of row ``h`` and column ``step``."""
        own, column = text.strip, "lane_column + step"
        if own.across:
            return f"({column}) * {text.pitch} + ({self.row}) / {own.per}"
        return f"({self.row}) * {text.pitch} + ({column}) / {own.per}"

    def coded(self, text: StripText, ctype: str) -> str:
        """An element of a strip: a byte of the lane's words, or in shared memory."""
        if not text.strip.is_codes:
            return f"({text.stage})[{self.place(text)}]"
        return f"gradc_byte<{ctype}>({text.words}{self.of_element}, {self.byte(text)})"

    def fraction(self, text: StripText, signed: bool, place: str) -> str:
        """4 bits of a strip's byte, as a float between 1 and 2."""
        return f"gradc_fraction<{str(signed).lower()}>({text.words}{self.of_element}, {self.byte(text)}, {place})"

    def byte(self, text: StripText) -> str:
        """Which of a lane's bytes an element has."""
        neighbour = "h" if self.together else f"(c % {self.run // 2} * 2 + i % 2)"
        return f"{neighbour} / {text.strip.per}"


def shared_values(kernel: Kernel, strips: Mapping[str, Strip], staged: Collection[str], lanes: Lanes) -> frozenset[str]:
    """The values of elements of a kernel that are the same for all columns of a run, or for all rows of a lane.

    :param strips: of the loads from them, by name.  :param staged: loads of vectors over columns.
    """
    if not strips:
        return frozenset()
    found = set[str]()
    varies = {COLUMN, ROW} if lanes.together else {COLUMN}

    def first(s: Stmt) -> bool:
        """Whether elements share it for itself, and not for what it is computed of."""
        if s.name in strips:
            return lanes.shares(strips[s.name])
        if lanes.together:
            return s.name in staged
        axis, start, per = place_of(kernel, s.name)
        return axis == COLUMN and per >= lanes.run and begins_whole(start, lanes.run, lanes.starts)

    for s in kernel.body:
        if s.name and kernel.is_column(s) and s.op not in REDUCTIONS:
            alike = all(u in found or not varies & kernel.levels[u] for u in s.uses)
            if (alike and s.uses and s.name not in strips) or first(s):
                found.add(s.name)
    return frozenset(found)
