"""Elements of the result with an owner each, whose sums are in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..mapping import Owned
from ..phase_writer import PhaseWriter
from ..register_sums import register_sums


@dataclass(frozen=True, kw_only=True)
class OwnersInRegisters(Owned):
    """A task has a chunk of owners; members of one are added to a block of columns in registers, then to the next."""

    sums_in_registers = True

    def given(self, writer: PhaseWriter) -> dict[str, Any]:
        return {"t": register_sums(writer)}
