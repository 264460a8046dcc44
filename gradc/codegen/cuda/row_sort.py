"""The stable sort of rows by key on a GPU: its arrays and its launches, which sizes alone decide.

``templates/cuda/sort.cu`` has the functions: one block sorts few rows in shared memory, in one launch; more rows are
moved digit by digit, in two launches a pass, or three where there are many tiles: tiles are as small as leaves few, so
that as many multiprocessors work.  Digits share out a key's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...analysis.strategies import passes
from ..text import enumerators
from .actions import Launch, Part, align, chunks

_SORT, _TILE, _BOUNDS = (enumerators(f"cuda/{name}") for name in ("sort.cu", "sort_tile.h", "sort_bounds.cu"))
DIGITS = _TILE["GRADC_DIGITS"]
TILE = _SORT["GRADC_TILE"]
"""Rows of a tile at most."""
FEW_TILES = _SORT["GRADC_FEW_TILES"]
"""Tiles whose counts need no scan."""
ONE_BLOCK = _SORT["GRADC_ONE_BLOCK"]
"""Rows that one block sorts in one launch."""
BOUNDS = _BOUNDS["GRADC_BOUNDS"]
"""Keys of a block that looks where their rows start."""
TREE = _BOUNDS["GRADC_TREE"]
"""Chunks whose pieces of one segment are added up separately, where there are twice as many."""
THREADS, TILE_THREADS, BLOCK_THREADS = 256, 512, 1024
"""Of a block of the small functions, of one that has a tile, of the one that has all rows."""


@dataclass(frozen=True)
class RowSort:
    """A sort.

    :param rows: that are visited in the order of their keys.
    :param keys: keys that a row may have.
    :param groups: neighbouring rows that are sorted as one, as are the neighbouring keys that they have.
    :param masked: whether rows may have the key ``keys``, which is none.
    :param in_order: whether rows come in the order of their keys: what is left is where each key starts.
    """

    rows: int
    keys: int
    groups: int = 1
    masked: bool = False
    in_order: bool = False

    @property
    def sorted_rows(self) -> int:
        return self.rows // self.groups

    @property
    def sorted_keys(self) -> int:
        return self.keys // self.groups

    @property
    def digits(self) -> tuple[int, int]:
        """(passes, bits of each)."""
        largest = self.sorted_keys if self.masked else max(self.sorted_keys - 1, 0)
        count = max(1, passes(largest))
        return count, max(1, chunks(largest.bit_length(), count))

    @property
    def each(self) -> int:
        """Rows of a tile for each of its threads: one more whenever there would be more than few tiles."""
        return max(1, min(chunks(self.sorted_rows, FEW_TILES * TILE_THREADS), TILE // TILE_THREADS))

    @property
    def tiles(self) -> int:
        """Tiles of a pass."""
        return chunks(self.sorted_rows, self.each * TILE_THREADS)

    @property
    def moves(self) -> int:
        """Passes that move rows from one side to the other.  0: one block sorts in place, or nothing is sorted."""
        return 0 if self.in_order or self.sorted_rows <= ONE_BLOCK else self.digits[0]

    @property
    def counts(self) -> int:
        """Elements of the array of counts: rows of each digit in each tile, and in all."""
        return DIGITS * (self.tiles + 1) if self.moves else 0

    @property
    def arrays(self) -> list[int]:
        """The elements of each array of u32, in their order (:func:`gradc.codegen.cuda.workspace.sort_arrays`): keys
        and rows, the other side of the passes, where each key starts; with groups keys, rows and starts of all follow.
        Of rows in order keys and starts.
        """
        row, start = self.sorted_rows, self.sorted_keys + 2
        if self.in_order:
            return [row, start]
        return [row, row, row, row, start, *([self.rows, self.rows, self.keys + 2] if self.groups > 1 else [])]

    @property
    def bytes(self) -> int:
        """Of these arrays, from the beginning of the workspace on."""
        return sum(align(4 * count) for count in self.arrays)

    def launches(self, space: Callable[[int, int], Part], counts: Part, end: tuple[Part, int]) -> list[Launch]:
        """(key, row) pairs of the key stage, stably by key; then where each key starts.

        :param space: (first byte, elements) -> an array of u32 there.
        :param end: the flag, and the checks before this.
        """
        rows, begins = self.sorted_rows, accumulate(map(_bytes, self.arrays), initial=0)
        arrays = [*map(space, begins, self.arrays)]
        if self.in_order:
            key, start = arrays
            return [self._bounds(key, start, end)]
        key, row, other_key, other_row, start, *spread = arrays
        launches: list[Launch] = []
        if self.moves:
            launches += self._passes([(key, row), (other_key, other_row)], counts, end)
        elif rows:
            launches.append(Launch("gradc_sort_block", 1, BLOCK_THREADS, (key, row, rows, *self.digits, *end), (0, 1)))
        launches.append(self._bounds(key, start, end))
        if spread:
            blocks = chunks(max(self.rows, self.keys + 2), THREADS)
            args: tuple[Part | int, ...] = (key, row, start, *spread, self.rows, self.keys, self.groups, *end)
            launches.append(Launch("gradc_sort_spread", blocks, THREADS, args, (3, 4, 5)))
        return launches

    def _bounds(self, key: Part, start: Part, end: tuple[Part, int]) -> Launch:
        """What finds where each key starts."""
        rows, keys = self.sorted_rows, self.sorted_keys
        return Launch("gradc_sort_bounds", chunks(keys + 2, BOUNDS), THREADS, (key, start, rows, keys, *end), (1,))

    def _passes(self, sides: Sequence[tuple[Part, Part]], counts: Part, end: tuple[Part, int]) -> list[Launch]:
        """:param sides: (keys, rows) of both; the sort ends in the first."""
        rows, tiles, each, (number, bits) = self.sorted_rows, self.tiles, self.each, self.digits
        launches = []
        for i in range(number):
            (key, row), (key_out, row_out) = sides if (number - i) % 2 == 0 else sides[::-1]
            args: tuple[Part | int, ...] = (key, counts, rows, tiles, each, bits * i, bits, *end)
            launches.append(Launch("gradc_sort_count", tiles, TILE_THREADS, args, (1,)))
            if tiles > FEW_TILES:
                launches.append(Launch("gradc_sort_scan", 1 << bits, THREADS, (counts, tiles, *end), (0,)))
            args = (key, row, counts, key_out, row_out, rows, tiles, each, bits * i, bits, int(i == 0), *end)
            launches.append(Launch("gradc_sort_move", tiles, TILE_THREADS, args, (3, 4)))
        return launches


def _bytes(count: int) -> int:
    return align(4 * count)
