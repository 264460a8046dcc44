"""What a program looks at in its data to choose between kernels: two numbers of a sample of an index.

Shapes cannot tell whether few rows of a table have most of the additions, or whether additions that follow one another
hit rows that lie together; both decide whether it pays to sort them.  The sample is of fixed places, so that the same
index always gives the same numbers, whatever evaluates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SIDE = 32
"""Blocks of an index, and positions of each, one after another."""
MOST = SIDE * SIDE
"""Positions that are looked at: what both numbers are at most."""
STRIDES = tuple(SIDE * part // 4 for part in range(1, 4))
"""How far apart those are that are compared: the taps of a convolution or of a bilinear sample are nearer."""
FEWEST = 1 << 17
"""Positions of an index that is looked at: of fewer, both numbers are 0, and looking takes no share of the time."""


@dataclass(frozen=True)
class Sample:
    """``skew, locality of tokens``

    :param skew: what the number is called of positions whose index one at the same place of another block has, before.
    :param locality: of pairs of positions ``STRIDES`` apart, how many more have indices nearer to each other in a block
        than those at the same place of two blocks are, than have them less near; by position, 0 at least.
    :param buffer: the index, i32 or i64.
    """

    skew: str
    locality: str
    buffer: str

    @property
    def names(self) -> tuple[str, str]:
        return self.skew, self.locality

    def of(self, index: np.ndarray[Any, Any]) -> dict[str, int]:
        """The numbers by name."""
        return dict(zip(self.names, sampled(index), strict=True))

    def __str__(self) -> str:
        return f"{self.skew}, {self.locality} of {self.buffer}"


def sampled(index: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(skew, locality) of an index in the order of its elements; ``gradc_sample_index`` says the same in C."""
    flat = index.reshape(-1)
    if len(flat) < FEWEST:
        return 0, 0
    first = np.arange(SIDE) * (len(flat) - SIDE) // (SIDE - 1)
    blocks = flat[first[:, None] + np.arange(SIDE)].astype(np.int64)
    ordered = np.sort(blocks, axis=0)
    skew = int((ordered[1:] == ordered[:-1]).sum())
    nearer = 0
    for stride in STRIDES:
        apart = [np.abs(np.roll(blocks, -stride, axis) - blocks) for axis in (0, 1)]
        nearer += int((apart[1] < apart[0]).sum()) - int((apart[1] > apart[0]).sum())
    return skew, max(nearer, 0) // len(STRIDES)
