"""Which elements of a block a lane has, what several of them share, and what lies in shared memory for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ....analysis.tiles import Strip
from ....ir.dims import Size
from ....ir.kernel import Kernel
from ....ir.quotient import Quotient
from ....ir.statement import REDUCTIONS, Stmt
from ....ir.types import DType
from .canonical import COLUMN, ROW

UNROLL = "#pragma unroll"
PAIRED = ("digit", "entry")
"""The operations on codes of which two neighbours are computed in one register: another one of a byte's each."""


@dataclass(frozen=True)
class StripText:
    """A strip in the template.

    :param at: bytes before it in shared memory.  :param first: its first element, at column 0.
    :param offset: elements from there to the first of a block of columns.
    :param there: its rows that are there, and :param valid: elements of each.
    :param staged: whether it comes in stages; else it is there once.
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
    staged: bool = True

    @property
    def memory(self) -> str:
        return f"from_s{self.name[5:]}"

    @property
    def shift(self) -> str:
        """Elements of a word before one that is copied with it."""
        in_words = self.staged and self.width == 1 and self.strip.bytes < 4 and not self.strip.is_codes
        return f" + {self.memory}.shift({self.offset})" if in_words else ""

    @property
    def words(self) -> str:
        """The registers of a lane's bytes."""
        return f"words{self.name[5:]}"

    @property
    def stage(self) -> str:
        """Its first element in the stage."""
        return f"{self.name} + stage * {self.height * self.pitch}" if self.staged else self.name


@dataclass(frozen=True)
class Lanes:
    """Which elements of a block a lane has, and how it reaches what several of them share.

    :param run: its neighbouring columns, of each four times as many.
    :param together: whether its rows are neighbours; else they are 8 apart.
    :param columns: with which a warp computes at once, :param narrow: and whether a block has more.
    :param tiles: of 16 rows, of a warp.
    :param first: of the symbols of a block's first row and column, those of what a warp computes with at once.
    :param in_words: whether two columns of a product are those of 4 bits each in the halves of a word, of a run; else
        they are neighbours.
    """

    run: int
    together: bool
    columns: int
    narrow: bool
    tiles: int
    first: Mapping[str, Size]
    in_words: bool = False

    @property
    def width(self) -> str:
        """Columns with which a warp computes at once."""
        return "WIDTH" if self.narrow else "COLUMNS"

    @property
    def row(self) -> str:
        """Row ``h``."""
        return f"lane_row + {'h' if self.together else '8 * h'}"

    @property
    def step(self) -> str:
        """Columns from the lane's first one to element ``i`` of the piece ``c`` of 8 columns."""
        half = self.run // 2
        return "8 * c + i % 2" if half == 1 else f"c / {half} * {4 * self.run} + {self.neighbour}"

    @property
    def apart(self) -> int:
        """Columns from an element ``i`` to ``i + 1``."""
        return 4 if self.in_words else 1

    @property
    def neighbour(self) -> str:
        """Which column of its run element ``i`` of the piece ``c`` has."""
        half = self.run // 2
        return f"c % {half} / 4 * 8 + c % 4 + i % 2 * 4" if self.in_words else f"c % {half} * 2 + i % 2"

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

    @property
    def sharing(self) -> int:
        """Neighbours that share a value."""
        return 2 * self.tiles if self.together else self.run

    def place(self, text: StripText) -> str:
        """Where a strip has the element of row ``h`` and column ``step``: what runs share has one place in the text of
        all of them, and is loaded once.
        """
        own, column = text.strip, "lane_column + step"
        if self.is_of_runs(own):
            return f"{self.first_of_row(text)} + step / {own.per}"
        if own.across:
            return f"({column}) * {text.pitch} + ({self.row}) / {own.per}"
        return f"({self.row}) * {text.pitch} + ({column}) / {own.per}"

    def is_of_runs(self, strip: Strip) -> bool:
        """Whether all columns of a run, and those of its neighbours', share an element, which is one of whole columns
        of a warp, or of whole warps.
        """
        whole = self.columns % strip.per == 0 or strip.per % self.columns == 0
        return not self.together and not strip.is_codes and strip.per >= 4 * self.run and whole

    def first_of_row(self, text: StripText) -> str:
        """Where a strip has the element of row ``h`` and the warp's first column."""
        return f"({self.row}) * {text.pitch}{f' + warp_column / {text.strip.per}' if self.narrow else ''}"

    def at_once(self, text: StripText) -> int:
        """Bytes of a row's elements that a lane loads together, those of all columns of its warp; 0: it does not."""
        own, count = text.strip, self.columns // text.strip.per
        size = count * own.bytes
        fits = count > 1 and size in (2, 4, 8, 16) and text.pitch * own.bytes % size == 0
        return size if fits and self.is_of_runs(own) else 0

    def coded(self, text: StripText, ctype: str) -> str:
        """An element of a strip: a part of the lane's words, or in shared memory."""
        if self.at_once(text):
            return f"gradc_part<{ctype}>({text.words}[h], step / {text.strip.per})"
        if not text.strip.is_codes:
            return f"({text.stage})[{self.place(text)}{text.shift}]"
        return f"gradc_byte<{ctype}>({text.words}{self.of_element}, {self.byte(text)})"

    def word(self, text: StripText) -> tuple[str, str]:
        """The word of eight codes of 4 bits of which two are a lane's elements ``i`` and ``i + 1``, and which: of half
        a word.
        """
        if not self.together:
            return f"{text.words}{self.of_element}[c % {self.run // 2} / 4]", "c % 4"
        both = ", ".join(f"{text.words}[c][{i}][h / 8]" for i in (0, 1))
        return f"gradc_of_columns({both}, h / 4 % 2)", "h % 4"

    def of_both(self, array: str) -> tuple[str, str]:
        """A value that elements share, for the elements ``i`` and ``i + 1``."""
        if self.together:
            return f"{array}[c][0]", f"{array}[c][1]"
        return (f"{array}{self.of_element}",) * 2

    def byte(self, text: StripText) -> str:
        """Which of a lane's bytes an element has."""
        neighbour = "h" if self.together else f"({self.neighbour})"
        return f"{neighbour} / {text.strip.per}"


def is_byte(dtype: DType | None) -> bool:
    """Whether values are integers of 8 bits."""
    return dtype is not None and dtype.name in ("u8", "i8")


def shared_values(
    kernel: Kernel, strips: Mapping[str, Strip], staged: Collection[str], lanes: Lanes, sharing: int = 0
) -> frozenset[str]:
    """The values of elements of a kernel that are the same for all columns of a run, or for all rows of a lane.

    :param strips: of the loads from them, by name.  :param staged: loads of vectors over columns.
    :param sharing: so many columns, in place of those of a run.
    """
    sharing = sharing or lanes.sharing
    if not strips:
        return frozenset()
    found = set[str]()
    varies = {COLUMN, ROW} if lanes.together else {COLUMN}

    def first(s: Stmt) -> bool:
        """Whether elements share it for itself, and not for what it is computed of."""
        if s.name in strips:
            return strips[s.name].per >= sharing
        if lanes.together:
            return s.name in staged
        own = Quotient.of(kernel, s.name)
        return own is not None and own.axis == COLUMN and own.shared_by(sharing, lanes.first)

    for s in kernel.body:
        if s.name and kernel.is_column(s) and s.op not in (*REDUCTIONS, *PAIRED):
            alike = all(u in found or not varies & kernel.levels[u] for u in s.uses)
            if (alike and s.uses and s.name not in strips) or first(s):
                found.add(s.name)
    return frozenset(found)
