"""Rows in the order of their keys, which are combined in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import Facts
from ..mapping import Segmented, segments


@dataclass(frozen=True, kw_only=True)
class SegmentedRows(Segmented):
    """A task has a chunk of the sorted rows, and computes one after another."""


def segmented_rows(facts: Facts, obstacle: str) -> SegmentedRows:
    """The mapping of sorted rows, :param obstacle: whose sums registers cannot hold, and why."""
    reason = f"rows of one key are visited one after another, and combined in memory: {obstacle}"
    return SegmentedRows(reason=reason, **segments(facts))
