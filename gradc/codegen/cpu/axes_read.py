"""Axes that a body computes of a row's number and does not read."""

from __future__ import annotations

import re

from ..declarations import words

_AXIS = re.compile(r"\s*const i64 (i\d+) = ")


def without_unread_axes(body: str) -> str:
    """A body without the declarations of axes that nothing reads in the block that follows them."""
    lines = body.splitlines()
    kept = []
    for number, line in enumerate(lines):
        axis = _AXIS.match(line)
        if axis is None or axis[1] in words(_block("\n".join(lines[number + 1 :]))):
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def _block(text: str) -> str:
    """A text up to the brace that closes the block which it begins in."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return text[:place]
    return text
