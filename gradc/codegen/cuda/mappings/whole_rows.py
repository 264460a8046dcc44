"""Whole rows, which each phase reads again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....ir.kernel import Kernel, Phase
from ..columns import columns_at_once
from ..exp_sums import ExpSum, with_exp_sums
from ..facts import Facts
from ..mapping import ChunkOfRows, block_threads, threads_for_columns
from ..row_registers import LONGEST_ROW

UNROLLED = 2
"""Times round the columns of a row, with all their loads under way."""
EXP_SUMS_UNROLLED = 4
"""The same where exponentials are added up: what the base takes is for all."""


@dataclass(frozen=True, kw_only=True)
class WholeRows(ChunkOfRows):
    """A task goes through the whole rows of a chunk; sums are in memory."""

    purpose = "Whole rows: a task goes through those of a chunk"

    def phases(self, kernel: Kernel) -> tuple[tuple[Phase, ...], Mapping[str, ExpSum]]:
        """With sums of exponentials in the phase of their maximum, where loads of a row are under way together."""
        return with_exp_sums(kernel) if self.unroll else super().phases(kernel)


def whole_rows(facts: Facts, vec: int) -> WholeRows:
    """The mapping of any kernel: ``vec`` columns of a thread at once."""
    vec = with_ragged_ends(facts, vec)
    width = threads_for_columns(facts, vec)
    return WholeRows(
        reason=_reason(facts, width),
        vec=vec,
        ragged=is_ragged(facts, vec),
        width=width,
        threads=block_threads(width),
        unroll=unrolled(facts, width),
    )


def with_ragged_ends(facts: Facts, vec: int) -> int:
    """Columns of a thread at once, ``vec`` or more of long rows whose number of columns is no multiple of them: logits
    of an odd number of classes, in rows that begin at multiples of 16 bytes.
    """
    columns, kernel = facts.known_columns, facts.kernel
    if columns is None or columns <= LONGEST_ROW or kernel.accums or facts.wide_values or not facts.shares_columns:
        return vec
    return max(vec, columns_at_once(kernel, facts.types, 0, facts.reduces, ragged=True))


def is_ragged(facts: Facts, vec: int) -> bool:
    """Whether the last of a thread's columns may not be there."""
    return facts.known_columns is not None and facts.known_columns % vec != 0


def unrolled(facts: Facts, width: int) -> int:
    """How often the threads of a task go round the columns of a row with all their loads under way; 0 for once, each
    with its loads.
    """
    if width == 1 or facts.wide_values:
        return 0
    return EXP_SUMS_UNROLLED if with_exp_sums(facts.kernel)[1] else UNROLLED


def _reason(facts: Facts, width: int) -> str:
    """Why a kernel has no other mapping."""
    if width == 1:
        return "a row has no columns that threads could share"
    if facts.separate_columns:
        return "its columns are separate, but what it is combined into is not cut as they are"
    if facts.known_columns is None:
        return "its phases need whole rows, and registers cannot hold a length that is not known"
    if facts.known_columns > LONGEST_ROW:
        return f"its phases need whole rows, and {facts.known_columns} columns are too many for registers"
    return "its phases need whole rows, and registers have no room for it"
