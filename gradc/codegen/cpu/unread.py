"""Axes and values that a body computes and does not read."""

from __future__ import annotations

import re

from ..declarations import words

_DECLARED = re.compile(r"\s*const \w+ ([iv]\d+) = (?!.*gradc_guarded)")
"""An axis or a value; an access that is looked at stays, read or not."""


def without_unread(body: str) -> str:
    """A body without the declarations of axes and values that nothing reads in the block that follows them."""
    kept: list[str] = []
    for line in reversed(body.splitlines()):
        declared = _DECLARED.match(line)
        if declared is None or declared[1] in words(_block("\n".join(reversed(kept)))):
            kept.append(line)
    return "".join(f"{line}\n" for line in reversed(kept))


def _block(text: str) -> str:
    """A text up to the brace that closes the block which it begins in."""
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return text[: brace.start()]
    return text
