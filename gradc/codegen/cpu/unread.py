"""Axes, values and bounds of columns that a body computes and does not read."""

from __future__ import annotations

import re

from ..declarations import WORD, without_comments

_DECLARED = re.compile(r"\s*const \w+ ([iv]\d+|(?:first|last)_col) = (?!.*gradc_guarded)")
"""An axis, a value, or a bound of columns that a row knows; an access that is looked at stays, read or not."""
_PARTS = re.compile(rf"[{{}}]|{WORD}")


def without_unread(body: str) -> str:
    """A body without the declarations of what nothing reads in the block that follows them."""
    kept: list[str] = []
    blocks: list[set[str]] = [set()]
    """The words that follow, in each of the blocks that are open at a line, the innermost last."""
    lines = body.splitlines()
    for line, code in zip(reversed(lines), reversed(without_comments("\n".join(lines)).split("\n")), strict=True):
        declared = _DECLARED.match(line)
        if declared is not None and declared[1] not in blocks[-1]:
            continue
        kept.append(line)
        for part in reversed(_PARTS.findall(code)):
            if part == "}":
                blocks.append(set())
            elif part == "{":
                inside = blocks.pop()
                blocks = blocks or [set()]
                blocks[-1] |= inside
            else:
                blocks[-1].add(part)
    return "".join(f"{line}\n" for line in reversed(kept))
