"""Columns that are reduced, strip by strip: how many of them have accumulators of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.kernel import Phase
from ...ir.statement import REDUCTIONS, Stmt
from ...targets.cpu import LANE_BYTES, WAITING_COST
from .accums import Accum
from .facts import Facts
from .reductions import accumulator_type
from .row_memory import cost


@dataclass(frozen=True)
class Strips:
    """A loop over columns strip by strip, each column of which has accumulators of its own: what is added to what does
    not depend on the vectors that a compiler makes.  The columns that fill no strip share one accumulator.

    :param widths: columns of a strip, the widest first: each as often as it fits.  The first is the number of
        accumulators, beside the one that is shared.
    :param vector: columns that are computed at a time while the accumulators stay in registers, as C; "" leaves it to
        the compiler how many.
    :param rest: whether there may be columns behind the strips.
    """

    widths: tuple[int, ...]
    vector: str
    rest: bool


@dataclass(frozen=True, eq=False)
class PassLanes:
    """The accumulators of what a pass reduces.

    :param phase: whose pass it is.
    """

    facts: Facts
    accums: Mapping[str, Accum]
    phase: Phase

    @property
    def wide_blocks(self) -> bool:
        """Whether blocks of f32 are added in f64 too: where a pass gathers or computes on wider values than f32 a
        compiler adds the lanes, or the elements, one after another.
        """
        body = self.phase.body
        gathers = any(v.startswith("%") for s in body for i in s.index for v, _ in i.terms)
        wider = any(s.dtype is not None and s.dtype.bits > 32 for s in body)
        return not self.facts.kernel.rows or gathers or wider

    @property
    def count(self) -> int:
        """How many columns have accumulators of their own: no more than there are columns."""
        cols, most = self.facts.kernel.cols, self.most
        inner = cols[-1][1] if cols else 1
        if not isinstance(inner, int):
            return most if len(cols) == 1 else most // 4  # a row of several axes ends often
        return min(most, 1 << inner.bit_length() - 1) if inner >= 4 else 1

    @property
    def most(self) -> int:
        """So few that all accumulators stay in registers."""
        reduced = [s for s in self.phase.roots if s.op in REDUCTIONS or self.facts.reduces_columns(s)]
        return LANE_BYTES // (8 if {"f64", "i64", "u64"} & {*map(self._accumulator, reduced)} else 4)

    def _accumulator(self, s: Stmt) -> str:
        """The C type of an accumulator."""
        return accumulator_type(s, self.wide_blocks) if s.op in REDUCTIONS else self.accums[s.buffer].partial

    def strips(self, number: int, parted: bool) -> Strips:
        """How the pass goes through the columns.

        Accumulators are in registers by vectors that the text states, where nothing else takes longer than an addition
        does until the next can begin: neither computation nor conversion, which is the faster the longer a vector is.

        :param number: of the phase.  :param parted: whether some of the columns have a loop of their own.
        """
        facts, lanes = self.facts, self.count
        inner = facts.kernel.cols[-1][1] if facts.kernel.cols else 1
        known = inner if isinstance(inner, int) and not parted else -1
        fewer = self.most // 4  # a vector of them
        widths = (lanes, fewer) if lanes > fewer and known % lanes >= fewer else (lanes,)
        statements = [s for s in facts.values(self.phase, number) if facts.rows.by_column(s.name)]
        narrow = min([8, *map(facts.bytes_of, statements)])
        waits = sum(cost(s) for s in statements) < WAITING_COST and narrow * self.most >= LANE_BYTES
        return Strips(widths, f"GRADC_VECTOR / {narrow}" if waits else "", rest=known % widths[-1] != 0)
