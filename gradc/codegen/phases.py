"""What a phase of a kernel computes, in a few words: the comment above its statements."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.kernel import Kernel, Phase
from ..ir.statement import Stmt

_REDUCED = {
    "sum_cols": "sum of",
    "prod_cols": "product of",
    "max_cols": "maximum of",
    "min_cols": "minimum of",
    "argmax_cols": "position of the maximum of",
    "argmin_cols": "position of the minimum of",
}
_SCANNED = {
    "sum": "running sum of",
    "prod": "running product of",
    "max": "running maximum of",
    "min": "running minimum of",
    "argmax": "position of the running maximum of",
    "argmin": "position of the running minimum of",
    "logsumexp": "running logsumexp of",
    "affine": "linear recurrence of",
}
_COMBINED = {"sum": "add to", "prod": "multiply into", "max": "maximum into", "min": "minimum into"}


def phase_comment(kernel: Kernel, phase: Phase, number: int) -> str:
    """``/* phase 2: v6 = sum of squares over the columns; store y */``, values as the text calls them."""
    return f"/* phase {number + 1}: {'; '.join(_parts(kernel, phase)) or 'values of the row'} */"


def _parts(kernel: Kernel, phase: Phase) -> list[str]:
    reduced = [
        f"v{s.name.removeprefix('%')} = {_REDUCED[s.op]} {_noun(s.args[0], kernel.stmts)}"
        for s in phase.roots
        if s.op in _REDUCED
    ]
    parts = [f"{', '.join(reduced)} over the columns"] if reduced else []
    scanned = [
        f"v{s.name.removeprefix('%')} = {_SCANNED[s.combine]} {_noun(s.args[-1], kernel.stmts)}"
        for s in phase.body
        if s.op == "scan"
    ]
    parts = [*scanned, *parts]
    effects = [s for s in (*phase.row, *phase.roots) if not s.name]
    if any(s.op == "check" for s in effects):
        parts.append("check indices")
    for s in effects:
        if s.op == "accum":
            parts.append(f"{_COMBINED[s.combine]} {s.buffer}")
    stored = [s.buffer for s in effects if s.op == "store"]
    return [*dict.fromkeys(parts), *([f"store {', '.join(dict.fromkeys(stored))}"] if stored else [])]


def _noun(name: str, stmts: Mapping[str, Stmt]) -> str:
    s = stmts[name]
    if s.op == "load":
        return s.buffer
    if s.op == "cast":
        return _noun(s.args[0], stmts)
    return "squares" if s.op == "mul" and s.args[0] == s.args[1] else s.op
