"""Reader and formatter of the elements common to the text formats of graphs and programs: words, sizes, types,
attribute values and notes; errors point at the line.

Texts are ASCII.  Blank lines and lines that start with ``//`` or ``#`` are skipped; ``#`` starts a comment anywhere
outside a string.  Nothing is evaluated, recursion is limited to :data:`DEEPEST`, and the time is linear in the text.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from typing import Any

from ..errors import GradcError, IRFormatError, TypeRuleError
from .dims import Assumption, Dim, Predicate, Size
from .node import Note
from .size_text import parse_assumption, parse_predicate, parse_size
from .types import DTYPES, DType, Type, parse_type

FORMAT = "gradc-ir 1"
LONGEST_TEXT, LONGEST_LINE, MOST_LINES, MOST_ASSUMPTIONS, DEEPEST = 2**26, 2**20, 2**20, 256, 16

WORD = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)
VALUE = re.compile(r"%\w+(?:\.\w+)*", re.ASCII)
_SPACE = re.compile(r"[ \t]*")
_BLANKS = (" ", "\t")
_TYPE = re.compile(r"\w+[ \t]*(?:\[[^\]]*\])?", re.ASCII)
_DELIMITER = re.compile(r"[(),\]}]")
_UNPRINTABLE = re.compile(r"[^ -~]")
_FORBIDDEN = re.compile(r"[^\t\n\r -~]|\r(?!\n)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)')
_STRING_OR_COMMENT = re.compile(_STRING.pattern + "|#")
_END = r"(?=[ \t]*[,\]}])"
_FLOAT = re.compile(
    r"(-?(?:0x[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?p[+-]?\d+|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|inf|nan)"
    r"|nan\(0x[0-9a-f]{16}\))" + _END,
    re.ASCII,
)
_INT = re.compile(r"(-?\d+)" + _END, re.ASCII)
_BARE = re.compile(r"(\w+)" + _END, re.ASCII)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, **DTYPES}
_RESERVED = {*_WORDS, "inf", "nan"}


LONGEST_NAME = 200
_DERIVED = re.compile(r"(?:[dr]\.)*")


def is_long(name: str) -> bool:
    """Whether a name has more than 200 characters, not counting what gradc adds: the prefixes ``d.`` and ``r.`` and
    suffixes such as ``.values``.

    A graph with valid names can therefore be differentiated any number of times.
    """
    derived = _DERIVED.match(name).end()  # type: ignore[union-attr]
    return len(name) - derived > LONGEST_NAME + 8 * (derived > 0)


def suffixed(name: str, suffix: str) -> str:
    """``name`` with ``suffix`` appended; ``name`` is truncated if the result would be too long."""
    return f"{name[: LONGEST_NAME - len(suffix)].rstrip('.')}{suffix}" if is_long(name + suffix) else name + suffix


# -- writing ----------------------------------------------------------------------------------------------------------


def format_value(value: Any, exact: bool = False) -> str:
    """An attribute's value as text that parses to the same value.

    :param exact: floats as hex floats (constants); otherwise as the shortest decimal.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _format_float(value, exact)
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, Dim):
        text = str(value)
        return f"({text})" if text.removeprefix("-") in _RESERVED else text
    if isinstance(value, int | DType):
        return str(value)
    if isinstance(value, tuple):
        return f"[{', '.join(format_value(v, exact) for v in value)}]"
    raise TypeRuleError(
        f"{value!r} is nothing an attribute can hold (int, bool, float, None, str, dtype, size and tuples of them)"
    )


def _format_float(value: float, exact: bool) -> str:
    if math.isnan(value):
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return "nan" if bits == 0x7FF8000000000000 else f"nan(0x{bits:016x})"
    if not exact or math.isinf(value):
        return repr(value)
    return re.sub(r"\.?0*p", "p", value.hex())


def format_attributes(attrs: Iterable[tuple[str, Any]], exact: bool = False) -> str:
    """`` {a=1, b=none}``, or the empty string without attributes."""
    parts = [f"{name}={format_value(value, exact)}" for name, value in attrs]
    return f" {{{', '.join(parts)}}}" if parts else ""


def format_note(note: Note | None) -> str:
    """A note as a trailing comment, escaped to printable ASCII on one line."""
    text = str(note) if note else ""
    if not text:
        return ""
    return "  # " + _UNPRINTABLE.sub("?", text.encode("ascii", "backslashreplace").decode())[:200].rstrip()


def excerpt(line: str, start: int, end: int) -> str:
    """The line with carets under ``line[start:end]``, truncated to the width of a terminal."""
    indent = min(len(line) - len(line.lstrip()), start)
    left = indent if start - indent < 90 else start - 60
    shown = _UNPRINTABLE.sub("?", line[left : left + 140].rstrip())
    width = max(1, min(end, left + 140) - start)
    return f"    {shown}\n    {' ' * (start - left)}{'^' * width}"


# -- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    """A scanner over a text: the current line and a position in it."""

    def __init__(self, text: str):
        if len(text) > LONGEST_TEXT:
            raise IRFormatError(f"a text of {len(text)} characters: {LONGEST_TEXT} is the most")
        if text.count("\n") > MOST_LINES:
            raise IRFormatError(f"a text of {text.count(chr(10))} lines: {MOST_LINES} is the most")
        self.text, self.next = text, 0
        self.number, self.line, self.at, self.end, self.comment = 0, "", 0, 0, ""
        self._types: dict[str, Type] = {}
        bad = _FORBIDDEN.search(text)
        if bad:
            start = text.rfind("\n", 0, bad.start()) + 1
            self.number, self.line = text.count("\n", 0, start) + 1, text[start : start + LONGEST_LINE]
            where = bad.start() - start
            raise self.fail(
                f"the character U+{ord(bad[0]):04X} may not stand in a text",
                where,
                where + 1,
                show=where < LONGEST_LINE,
            )

    def advance(self) -> bool:
        """Moves to the next line that is not blank or a comment; False at the end of the text."""
        while self.next < len(self.text):
            stop = self.text.find("\n", self.next)
            stop = len(self.text) if stop < 0 else stop
            self.line, self.next, self.at = self.text[self.next : stop].rstrip("\r"), stop + 1, 0
            self.number += 1
            if len(self.line) > LONGEST_LINE:
                raise self.fail(f"a line of {len(self.line)} characters: {LONGEST_LINE} is the most", 0, 1)
            self.end, self.comment = len(self.line), ""
            if "#" in self.line:
                for matched in _STRING_OR_COMMENT.finditer(self.line):
                    if matched[0] == "#":
                        self.end, self.comment = matched.start(), self.line[matched.end() :].strip()
                        break
            self._skip()
            if self.at < self.end and not self.line.startswith("//", self.at):
                return True
        return False

    def demand(self, wanted: str) -> None:
        """Moves to the next line; IRFormatError, naming what is ``wanted``, at the end of the text."""
        if not self.advance():
            self.at = self.end
            raise self.fail(f"the text ends before {wanted}", max(0, self.end - 1), self.end)

    def _skip(self) -> None:
        if self.line.startswith(
            _BLANKS, self.at
        ):  # mostly there is none, which a regular expression takes longer to see
            self.at = _SPACE.match(self.line, self.at).end()  # type: ignore[union-attr]

    # -- errors

    def fail(self, message: str, start: int | None = None, end: int | None = None, show: bool = True) -> IRFormatError:
        """The error that points at ``line[start:end]``, by default the word at the current position."""
        start = self.at if start is None else start
        end = self._word_end(start) if end is None else end
        error = IRFormatError(message, max(self.number, 1), start + 1)
        if show:
            error.add_note(excerpt(self.line, start, end))
        return error

    def point(self, error: GradcError, start: int, end: int) -> GradcError:
        """An error of a type rule, with an excerpt of the line added."""
        error.add_note(f"line {self.number}, column {start + 1}:\n{excerpt(self.line, start, end)}")
        return error

    def _word_end(self, start: int) -> int:
        word = re.compile(r"[\w.%@]+", re.ASCII).match(self.line, start, self.end or len(self.line))
        return word.end() if word else start + 1

    def found(self) -> str:
        """A description of the text at the current position, for messages."""
        self._skip()
        return (
            repr(self.line[self.at : min(self._word_end(self.at), self.at + 40)])
            if self.at < self.end
            else "the end of the line"
        )

    # -- words

    def maybe(self, literal: str) -> bool:
        """Consumes ``literal`` if it comes next, and says whether it did; a word must match as a whole."""
        self._skip()
        if not self.line.startswith(literal, self.at):
            return False
        stop = self.at + len(literal)
        if stop > self.end:
            return False
        if literal[-1].isalnum() and stop < self.end and (self.line[stop].isalnum() or self.line[stop] in "_."):
            return False
        self.at = stop
        return True

    def expect(self, literal: str) -> None:
        if not self.maybe(literal):
            raise self.fail(f"expected {literal!r}, found {self.found()}")

    def take(self, pattern: re.Pattern[str], wanted: str) -> str:
        """Consumes the text that matches ``pattern``; IRFormatError, naming what is ``wanted``, if none does."""
        self._skip()
        match = pattern.match(self.line, self.at, self.end)
        if not match:
            raise self.fail(f"expected {wanted}, found {self.found()}")
        self.at = match.end()
        return match[0]

    def name(self, wanted: str) -> str:
        word = self.take(WORD, wanted)
        if is_long(word):
            raise self.fail(
                f"{wanted} of {len(word)} characters: {LONGEST_NAME} is the most", self.at - len(word), self.at
            )
        return word

    def at_end(self) -> bool:
        self._skip()
        return self.at >= self.end

    def finish(self) -> None:
        """Rejects anything but a comment on the rest of the line."""
        if not self.at_end():
            raise self.fail(f"unexpected {self.found()}")

    # -- sizes, types, attributes

    def _until(self) -> str:
        """The text up to the next comma or closing bracket outside parentheses."""
        start, depth = self.at, 0
        for mark in _DELIMITER.finditer(self.line, start, self.end):
            depth += (mark[0] == "(") - (mark[0] == ")")
            if depth < 0 or (depth == 0 and mark[0] in ",]}"):
                self.at = mark.start()
                return self.line[start : mark.start()]
        self.at = self.end
        return self.line[start : self.end]

    def _pointing(self, error: IRFormatError) -> IRFormatError:
        if not getattr(error, "__notes__", None):
            start = max(0, error.column - 1)
            error.add_note(excerpt(self.line, start, self._word_end(start)))
        return error

    def size(self) -> Size:
        """A size, up to the next comma or closing bracket."""
        self._skip()
        return self._size(self.at, self._until())

    def size_of(self, word: str) -> Size:
        """Consumes ``word``, which comes next, and parses it as a size."""
        self.at += len(word)
        return self._size(self.at - len(word), word)

    def _size(self, start: int, text: str) -> Size:
        try:
            return parse_size(text, self.number, start + 1)
        except IRFormatError as error:
            raise self._pointing(error) from None

    def type(self) -> Type:
        start = self.at
        text = self.take(_TYPE, "a type such as f32[N,4]")
        if text not in self._types:
            try:
                self._types[text] = parse_type(text, self.number, self.at - len(text) + 1)
            except IRFormatError as error:
                self.at = start
                raise self._pointing(error) from None
        return self._types[text]

    def predicate(self, text: str, start: int) -> Predicate:
        try:
            return parse_predicate(text, self.number, start + 1)
        except IRFormatError as error:
            raise self._pointing(error) from None

    def assumptions(self) -> tuple[Assumption, ...]:
        """Consumes ``assume(...)`` lines; stops at the first other line."""
        facts: list[Assumption] = []
        while self.maybe("assume"):
            self.expect("(")
            start = self.at
            text = self._until()
            try:
                facts.append(parse_assumption(text, self.number, start + 1))
            except IRFormatError as error:
                raise self._pointing(error) from None
            self.expect(")")
            self.finish()
            if len(facts) > MOST_ASSUMPTIONS:
                raise self.fail(f"more than {MOST_ASSUMPTIONS} assumptions", 0, self.end)
            self.demand("the closing '}'")
        return tuple(facts)

    def value(self, depth: int = 0) -> Any:
        """An attribute's value."""
        self._skip()
        start, line = self.at, self.line
        if self.maybe("["):
            if depth >= DEEPEST:
                raise self.fail("brackets nested too deep", start, start + 1)
            items: list[Any] = []
            while not self.maybe("]"):
                if items:
                    self.expect(",")
                items.append(self.value(depth + 1))
            return tuple(items)
        if line.startswith('"', start):
            token = _STRING.match(line, start, self.end)[0]  # type: ignore[index]
            self.at = start + len(token)
            try:
                return json.loads(token)
            except ValueError:
                raise self.fail("a string that does not end or has an unknown escape", start, self.at) from None
        for pattern, read in ((_BARE, _WORDS.__getitem__), (_INT, _read_int), (_FLOAT, _read_float)):
            match = pattern.match(line, start, self.end)
            if match and (pattern is not _BARE or match[0] in _WORDS):
                self.at = match.end()
                try:
                    return read(match[0])
                except (ValueError, OverflowError):
                    raise self.fail(f"{match[0][:40]} is beyond what a number can be here", start, self.at) from None
        if self.at_end():
            raise self.fail("expected a value, found the end of the line", max(0, self.end - 1), self.end)
        return self.size()

    def attributes(self) -> dict[str, tuple[Any, int, int]]:
        """``{a=1, b=none}``: name -> (value, start, end); empty if no brace comes next."""
        attributes: dict[str, tuple[Any, int, int]] = {}
        if not self.maybe("{"):
            return attributes
        while not self.maybe("}"):
            if attributes:
                self.expect(",")
            self._skip()
            start = self.at
            name = self.name("an attribute's name")
            if name in attributes:
                raise self.fail(f"the attribute {name} is given twice", start, self.at)
            self.expect("=")
            value = self.value()
            attributes[name] = (value, start, self.at)
        return attributes

    def note(self) -> Note:
        """The line's comment as a note: ``scope/name  file:line``, or either part alone."""
        first, _, second = self.comment.partition("  ")
        if not second and re.search(r":\d+$", first):
            first, second = "", first
        scope, _, name = first.rpartition("/")
        return Note(name, second.strip(), scope)


def _read_int(word: str) -> int:
    if len(word) > 20 or not -(2**63) <= int(word) < 2**64:
        raise OverflowError
    return int(word)


def _read_float(word: str) -> float:
    if len(word) > 400:
        raise OverflowError
    if word.startswith("nan("):
        nan: float = struct.unpack("<d", struct.pack("<Q", int(word[4:-1], 16)))[0]
        if not math.isnan(nan):
            raise ValueError
        return nan
    if word == "nan":
        return math.nan
    value = float.fromhex(word) if "0x" in word else float(word)
    if math.isinf(value) and not word.endswith("inf"):
        raise OverflowError
    return value
