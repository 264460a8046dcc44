"""Parser of sizes, assumptions and predicates, which are never evaluated as Python: ``N*D``, ``max(N-1, 0)//2``;
``N >= 1``; ``V >= 9 and N <= 7 or V >= N``.

::

    predicate  ::= both ("or" both)*
    both       ::= comparison ("and" comparison)*
    comparison ::= size (">=" | "==" | "<=") size
    size       ::= term (("+" | "-") term)*
    term       ::= atom (("*" | "//") atom)*
    atom       ::= INT | NAME | "(" size ")" | "-" atom | ("max" | "min" | "ceildiv") "(" size "," size ")"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from ..errors import IRFormatError, TypeRuleError
from .dims import DEEPEST, LARGEST, Assumption, Predicate, Size, ceildiv, floordiv, maximum, minimum, symbol

R = TypeVar("R")
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(//|[<>=]=?|[-+*(),]))", re.ASCII)


_FUNCTIONS = {"max": maximum, "min": minimum, "ceildiv": ceildiv}
_MOST_TOKENS = 400


def parse_size(text: str, line: int = 0, column: int = 1) -> Size:
    """Parses one size; IRFormatError has the position of an error."""
    return _parse(text, line, column, _Parser.size)


def parse_assumption(text: str, line: int = 0, column: int = 1) -> Assumption:
    """Parses ``N >= 1`` or ``N == 4*M``."""
    return _parse(text, line, column, _Parser.comparison)


def parse_predicate(text: str, line: int = 0, column: int = 1) -> Predicate:
    """Parses ``V >= 9 and N <= 7 or V >= N``."""
    return _parse(text, line, column, _Parser.predicate)


def _parse(text: str, line: int, column: int, rule: Callable[[_Parser], R]) -> R:
    parser = _Parser(text, line, column)
    try:
        value = rule(parser)
    except TypeRuleError as error:
        raise IRFormatError(str(error), line, column) from None
    kind, word, _ = parser.token
    if kind != "end":
        raise parser.fail(f"unexpected {word[:60]!r}")
    return value


class _Parser:
    """A recursive-descent parser, with a method per grammar rule."""

    def __init__(self, text: str, line: int, column: int):
        self.text, self.line = text, line
        self.tokens: list[tuple[str, str, int]] = []
        """(kind, text, column)"""
        self.at = self.start = 0
        """The next token, and the first of its size."""
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if not match:
                raise IRFormatError(f"unexpected {text[position : position + 20]!r} in a size", line, column + position)
            kind = "int" if match[1] else "name" if match[2] else "op"
            start = match.start(match.lastindex or 0)
            self.tokens.append((kind, match[1] or match[2] or match[3], column + start))
            position = match.end()
        self.tokens.append(("end", "", column + end))

    @property
    def token(self) -> tuple[str, str, int]:
        return self.tokens[self.at]

    def fail(self, problem: str) -> IRFormatError:
        return IRFormatError(f"{problem} in the size {self.text[:60]!r}", self.line, self.token[2])

    def take(self, expected: str) -> None:
        if self.token[1] != expected:
            raise self.fail(f"expected {expected!r}")
        self.at += 1

    def atom(self, depth: int) -> Size:
        kind, word, _ = self.token
        if depth > DEEPEST:
            raise self.fail("nesting too deep")
        if self.at - self.start > _MOST_TOKENS:
            raise self.fail("too long")
        if kind == "int":
            if len(word) > 19 or int(word) > LARGEST:
                raise self.fail("a number beyond 2^63")
            self.at += 1
            return int(word)
        if word not in ("-", "(") and kind != "name":
            raise self.fail("expected a number, a name or '('")
        self.at += 1
        if word == "-":
            return -self.atom(depth + 1)
        if word == "(":
            inner = self.sum(depth + 1)
            self.take(")")
            return inner
        return self.call(word, depth) if self.token[1] == "(" else symbol(word)

    def call(self, function: str, depth: int) -> Size:
        if function not in _FUNCTIONS:
            raise self.fail(f"unknown function {function[:60]!r}")
        self.take("(")
        left = self.sum(depth + 1)
        self.take(",")
        right = self.sum(depth + 1)
        self.take(")")
        return _FUNCTIONS[function](left, right)

    def product(self, depth: int) -> Size:
        value = self.atom(depth)
        while (operator := self.token[1]) in ("*", "//"):
            self.at += 1
            right = self.atom(depth)
            value = value * right if operator == "*" else floordiv(value, right)
        return value

    def sum(self, depth: int) -> Size:
        value = self.product(depth)
        while (operator := self.token[1]) in ("+", "-"):
            self.at += 1
            value = value + (1 if operator == "+" else -1) * self.product(depth)
        return value

    def size(self) -> Size:
        self.start = self.at
        return self.sum(0)

    def comparison(self) -> Assumption:
        left, relation = self.size(), self.token[1]
        if relation not in (">=", "==", "<="):
            problem = f"an assumption reads 'N >= 1', 'N <= 9' or 'N == 4*M', not {self.text[:60]!r}"
            raise IRFormatError(problem, self.line, self.token[2])
        self.at += 1
        right = self.size()
        return Assumption(right, ">=", left) if relation == "<=" else Assumption(left, relation, right)

    def predicate(self) -> Predicate:
        return Predicate(self.joined("or", lambda: self.joined("and", self.comparison)))

    def joined(self, word: str, rule: Callable[[], R]) -> tuple[R, ...]:
        found = [rule()]
        while self.token[1] == word:
            self.at += 1
            found.append(rule())
        return tuple(found)
