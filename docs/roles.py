"""A hook of ``make site``: docstrings write :class:`Name` as Sphinx has it, and the site's Markdown leaves the role."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):(?=<code>)(<code>)[.~]?")


def on_page_content(text: str, **_: Any) -> str:
    """The page's HTML without roles."""
    return ROLE.sub(r"\1", text)
