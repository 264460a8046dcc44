"""JSON: reading what somebody else may have written, and writing what JSON has no words for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

DEEPEST = 64
"""Lists and objects inside one another; no format of gradc's needs ten."""
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[][{}]', re.DOTALL)
"""A string that does not end goes on to the end of the text, so that each character is looked at once."""


def read_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text.

    Its depth is counted before it is parsed: Python's parser calls itself for every bracket, and where that meets the
    limit of recursion, so does whatever the garbage collector happens to finalize there.

    :param pairs: makes the value of an object of its names and values, in their order (a dict by default).
    :raises ValueError: this is no JSON, or nested deeper than :data:`DEEPEST`, or a number has thousands of digits.
    """
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text) if text.count("[") + text.count("{") > DEEPEST else ():
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}, at character {found.start()}")
    return json.loads(text, object_pairs_hook=pairs)


def finite(value: Any, digits: int = 5) -> Any:
    """JSON has no NaN and no infinity: null stands for them.

    :param digits: significant ones of floats.
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each, digits) for key, each in value.items()}
    return [finite(each, digits) for each in value] if isinstance(value, list | tuple) else value
