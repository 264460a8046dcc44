"""Generated C and CUDA indented by their braces, so that templates need not know how deep they stand."""

from __future__ import annotations

import re

_COMMENT = re.compile(r"/\*.*?\*/|//.*")
_HEADER = re.compile(r"(for|if|while|else if) \(.*\)|else")
"""A line that the next statement belongs to."""


def indented(text: str) -> str:
    """The lines of a text, two blanks for each brace or parenthesis that is open, and for a statement alone below its
    ``for`` or ``if``.
    """
    depth, alone, comment = 0, 0, False
    lines: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if comment or (bare.startswith("/*") and "*/" not in bare):
            lines.append(f" {bare}" if comment else bare)
            comment = "*/" not in bare
            continue
        code = _COMMENT.sub("", bare).strip()
        closing = len(code) - len(code.lstrip("})"))
        lines.append("  " * (depth - closing + alone) + bare)
        if code.startswith("#"):
            continue
        opened = sum(map(code.count, "{(")) - sum(map(code.count, "})"))
        alone = alone + 1 if opened == 0 and _HEADER.fullmatch(code) else 0
        depth += opened
    return "\n".join(lines) + "\n"
