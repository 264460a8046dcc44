"""Rows in the order of their keys, which are combined in memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..mapping import Segmented


@dataclass(frozen=True, kw_only=True)
class SegmentedRows(Segmented):
    """A task has a chunk of the sorted rows, and computes one after another."""
