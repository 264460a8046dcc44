"""Sizes and assumptions read from text: ``N*D``, ``max(N-1, 0)//2``, ``N >= 1``; never evaluated as Python.

::

    size  ::= term (("+" | "-") term)*
    term  ::= atom (("*" | "//") atom)*
    atom  ::= INT | NAME | "(" size ")" | "-" atom | ("max" | "min" | "ceildiv") "(" size "," size ")"
"""

from __future__ import annotations

import re

from ..errors import IRFormatError, TypeRuleError
from .dims import DEEPEST, LARGEST, Assumption, Size, ceildiv, floordiv, maximum, minimum, symbol

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(//|[-+*(),]))", re.ASCII)


def parse_size(text: str, line: int = 0, column: int = 1) -> Size:
    """Read one size; IRFormatError says where it goes wrong."""
    tokens: list[tuple[str, str, int]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if not match:
            raise IRFormatError(f"unexpected {text[position : position + 20]!r} in a size", line, column + position)
        kind = "int" if match[1] else "name" if match[2] else "op"
        tokens.append((kind, match[1] or match[2] or match[3], column + match.start(match.lastindex or 0)))
        position = match.end()
    tokens.append(("end", "", column + end))
    here = 0

    def fail(problem: str) -> IRFormatError:
        return IRFormatError(f"{problem} in the size {text[:60]!r}", line, tokens[here][2])

    def take(expected: str) -> None:
        nonlocal here
        if tokens[here][1] != expected:
            raise fail(f"expected {expected!r}")
        here += 1

    def atom(depth: int) -> Size:
        nonlocal here
        kind, word, _ = tokens[here]
        if depth > DEEPEST:
            raise fail("nesting too deep")
        here += 1
        if kind == "int":
            if len(word) > 19 or int(word) > LARGEST:
                here -= 1
                raise fail("a number beyond 2^63")
            return int(word)
        if word == "-":
            return -atom(depth + 1)
        if word == "(":
            inside = total(depth + 1)
            take(")")
            return inside
        if kind == "name" and tokens[here][1] == "(":
            functions = {"max": maximum, "min": minimum, "ceildiv": ceildiv}
            if word not in functions:
                raise fail(f"unknown function {word[:60]!r}")
            take("(")
            left = total(depth + 1)
            take(",")
            right = total(depth + 1)
            take(")")
            return functions[word](left, right)
        if kind == "name":
            return symbol(word)
        here -= 1
        raise fail("expected a number, a name or '('")

    def term(depth: int) -> Size:
        nonlocal here
        value = atom(depth)
        while tokens[here][1] in ("*", "//"):
            operator = tokens[here][1]
            here += 1
            right = atom(depth)
            value = value * right if operator == "*" else floordiv(value, right)
        return value

    def total(depth: int) -> Size:
        nonlocal here
        value = term(depth)
        while tokens[here][1] in ("+", "-"):
            sign = 1 if tokens[here][1] == "+" else -1
            here += 1
            value = value + sign * term(depth)
        return value

    if len(tokens) > 400:
        raise fail("too long")
    try:
        value = total(0)
    except TypeRuleError as error:
        raise IRFormatError(str(error), line, column) from None
    if tokens[here][0] != "end":
        raise fail(f"unexpected {tokens[here][1][:60]!r}")
    return value


def parse_assumption(text: str, line: int = 0, column: int = 1) -> Assumption:
    """Read ``N >= 1`` or ``N == 4*M``."""
    for relation in (">=", "=="):
        left, separator, right = text.partition(relation)
        if separator:
            return Assumption(parse_size(left, line, column), relation, parse_size(right, line, column + len(left) + 2))
    raise IRFormatError(f"an assumption reads 'N >= 1' or 'N == 4*M', not {text[:60]!r}", line, column)
