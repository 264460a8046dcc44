"""Declarations of a generated function, of which the text keeps those that it uses.

Every function of a kernel could name all that the kernel has: buffers, dims, sizes, parts of the workspace.  Each is
declared in one place, in an order in which it may use those before it; a function keeps those that its body names, and
what these name in turn.  So nothing is declared in vain, and no compiler has to be told that it may be unused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WORD = r"[A-Za-z_]\w*"
_NAME, _COMMENT = re.compile(rf"(?<!\.)(?<!->)\b{WORD}"), re.compile(r"/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Declaration:
    """One line that declares one name.

    :param name: what it declares.
    :param line: the whole line, such as ``const i64 rows = n * 4;``.
    """

    name: str
    line: str


def words(text: str) -> frozenset[str]:
    """The identifiers of a text but for those in comments and those of members, which are declared elsewhere."""
    return frozenset(_NAME.findall(without_comments(text)))


def without_comments(text: str) -> str:
    """A text with as many empty lines for each comment as it has lines."""
    return _COMMENT.sub(lambda comment: " " + "\n" * comment[0].count("\n"), text)


def used(declarations: Sequence[Declaration], body: str) -> list[str]:
    """The lines that a body needs, in their order."""
    needed = set(words(body))
    kept: list[str] = []
    for declaration in reversed(declarations):
        if declaration.name in needed:
            needed |= words(declaration.line)
            kept.append(declaration.line)
    return kept[::-1]
