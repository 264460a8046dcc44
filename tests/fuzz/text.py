"""IR text by grammar-aware mutation: each is refused by a typed error, or parses, verifies, and prints to what parses
to the same.

The texts come from :mod:`.corpus`; one to four mutations are applied to the tokens, lines, sizes, types and attributes
of one, or of two spliced together.  Both grammars are attacked: graphs (``gradc.ir.text``) and programs
(``gradc.ir.program_text``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from gradc.errors import GradcError, InternalError
from gradc.ir.node import REGISTRY
from gradc.ir.program_text import parse_program
from gradc.ir.text import parse
from gradc.ir.types import DTYPES
from gradc.ir.verify import verify, verify_program

from .campaign import Campaign, Options, Outcome
from .corpus import Source, sources

TOKEN = re.compile(r"%?[\w.]+|\"(?:[^\"\\]|\\.)*\"|//|<-|->|>=|==|\s+|.", re.DOTALL)
NUMBER = re.compile(r"-?\d+")
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "-0",
    "00",
    "127",
    "128",
    "255",
    "256",
    "65536",
    "70000",
    "2147483647",
    "2147483648",
    "-2147483649",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "18446744073709551616",
    "1" + "0" * 30,
    "1" + "0" * 400,
    "9" * 5000,
    "0x1p+0",
    "0x1p-1074",
    "0x1p+2000",
    "1e400",
    "1e-400",
    "nan",
    "-nan",
    "nan(0xfff8000000000001)",
    "nan(0x0)",
    "inf",
    "-inf",
    "1.5",
    "-0.0",
    "1_000",
    "٣",
    "²",
)
WORDS = (
    "none",
    "true",
    "false",
    "f32",
    "i64",
    "N",
    "M",
    "x",
    "y",
    "d",
    "r",
    "d.x",
    "r.x",
    "return",
    "assume",
    "input",
    "output",
    "temp",
    "const",
    "kernel",
    "call",
    "select",
    "when",
    "else",
    "phase",
    "check",
    "load",
    "store",
    "accum",
    "rows",
    "cols",
    "order",
    "strategy",
    "per",
    "axes",
    "of",
    "slot",
    "where",
    "loop",
    "max",
    "min",
    "index",
    "in_bounds",
    "size",
    "graph",
    "program",
    "__class__",
    "__proto__",
    "sum_cols",
    "gather",
    "é",
    "ﬁ",
    "İ",
    "𝔘",
    "\u200b",
    "\ufeff",
    "\u202e",
    "a" * 300,
)
MARKS = (
    *"()[]{}<>,:;=%@#*+-/\\\"'?!\t\r\n\x00\x0b\x0c\x85\u2028\ud800",
    "//",
    "<-",
    "->",
    ">=",
    "==",
    "{}",
    "[]",
    "()",
    '"\\ud800"',
    '"\\',
    "# x",
    "// y",
)
SIZES = (
    "N",
    "N+1",
    "N-1",
    "2*N",
    "N//2",
    "(N+3)//4",
    "max(N, M)",
    "max(N-1, 0)",
    "N*M",
    "N**2",
    "N//0",
    "0",
    "-1",
    "0*N",
    "max()",
    "max(N)",
    "(N",
    "N N",
    "N//(0*N)",
    "1" + "0" * 40,
)


def mutated(choose: random.Random, text: str, other: str) -> str:
    for _ in range(choose.choice((1, 1, 1, 2, 2, 3, 4))):
        text = choose.choices(MUTATIONS, WEIGHTS)[0](choose, text, other)
    return text


def _token(choose: random.Random, text: str, _: str) -> str:
    """One token dropped, repeated, swapped with another, or replaced."""
    tokens = TOKEN.findall(text)
    if not tokens:
        return text
    at = choose.randrange(len(tokens))
    match choose.randrange(6):
        case 0:
            tokens[at] = ""
        case 1:
            tokens[at] *= choose.choice((2, 2, 3, 50))
        case 2:
            to = choose.randrange(len(tokens))
            tokens[at], tokens[to] = tokens[to], tokens[at]
        case 3:
            tokens[at] = choose.choice(tokens)
        case 4:
            tokens[at] = choose.choice((*WORDS, *MARKS))
        case 5:
            tokens.insert(at, choose.choice((*WORDS, *MARKS, *NUMBERS)))
    return "".join(tokens)


def _line(choose: random.Random, text: str, other: str) -> str:
    """One line dropped, repeated, moved, cut, or taken from the other text."""
    lines = text.split("\n")
    at, to = choose.randrange(len(lines)), choose.randrange(len(lines))
    match choose.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(to, lines[at])
        case 2:
            lines[at], lines[to] = lines[to], lines[at]
        case 3:
            lines[at] = lines[at][: choose.randrange(len(lines[at]) + 1)]
        case 4:
            lines.insert(at, choose.choice(other.split("\n")))
        case 5:
            lines[at : at + 1] = [lines[at]] * choose.choice((2, 3, 200))
    return "\n".join(lines)


def _replaced(pattern: str, options: Callable[[], tuple[str, ...]]) -> Callable[[random.Random, str, str], str]:
    compiled = re.compile(pattern)

    def mutate(choose: random.Random, text: str, _: str) -> str:
        found = list(compiled.finditer(text))
        if not found:
            return text
        match, new = choose.choice(found), choose.choice(options())
        return text[: match.start()] + new + text[match.end() :]

    return mutate


def _from_the_other(pattern: str) -> Callable[[random.Random, str, str], str]:
    """One occurrence replaced by one of the other text: a type for a type, an attribute list for an attribute list."""
    compiled = re.compile(pattern)

    def mutate(choose: random.Random, text: str, other: str) -> str:
        mine, theirs = list(compiled.finditer(text)), compiled.findall(choose.choice((text, other)))
        if not mine or not theirs:
            return text
        match = choose.choice(mine)
        return text[: match.start()] + choose.choice(theirs) + text[match.end() :]

    return mutate


def _splice(choose: random.Random, text: str, other: str) -> str:
    """The beginning of one and the end of the other."""
    if choose.random() < 0.3:
        return text[: choose.randrange(len(text) + 1)] + other[choose.randrange(len(other) + 1) :]
    one, two = text.split("\n"), other.split("\n")
    return "\n".join((*one[: choose.randrange(len(one) + 1)], *two[choose.randrange(len(two) + 1) :]))


def _nested(choose: random.Random, text: str, _: str) -> str:
    """Brackets far too deep, or numbers far too many, where there are some."""
    depth = choose.choice((20, 200, 5000))
    found = [m.start() for m in re.finditer(r"[\[({=]", text)]
    if not found:
        return text
    at = choose.choice(found) + 1
    inside = choose.choice(
        (
            "(" * depth + "N" + ")" * depth,
            "[" * depth + "]" * depth,
            "max(" * depth,
            "N+" * depth + "1",
            "N//" * depth + "2",
            "1, " * depth,
            "-" * depth,
            "{" * depth,
        )
    )
    return text[:at] + inside + text[at:]


def _characters(choose: random.Random, text: str, _: str) -> str:
    """Single characters, as bits flip."""
    at = choose.randrange(len(text) + 1)
    return (
        text[:at]
        + choose.choice(("", chr(choose.randrange(32, 127)), chr(choose.randrange(0x110000))))
        + text[at + choose.randrange(2) :]
    )


MUTATIONS: tuple[Callable[[random.Random, str, str], str], ...] = (
    _token,
    _line,
    _replaced(NUMBER.pattern, lambda: NUMBERS),
    _replaced(r"(?<=[\[,: ])[\w+*/-]+(?=[\],)])", lambda: SIZES),
    _replaced(r"\b[iuf]\d+\w*\b|\bbf16\b|\bbool\b|\be8m0\b", lambda: tuple(DTYPES)),
    _replaced(r"(?<== )[a-z]\w*", lambda: tuple(sorted(REGISTRY))),
    _from_the_other(r"\{[^{}]*\}"),
    _from_the_other(r"\b\w+\[[^\]]*\]"),
    _from_the_other(r"%[\w.]+"),
    _from_the_other(r"\w+=[^,{}\[\]\n]+"),
    _splice,
    _nested,
    _characters,
)
WEIGHTS = (6, 4, 4, 4, 3, 3, 3, 3, 5, 4, 1, 1, 2)


def judged(text: str, is_graph: bool) -> Outcome:
    """What becomes of a text."""
    form = "graph" if is_graph else "program"
    read, check = (parse, verify) if is_graph else (parse_program, verify_program)
    try:
        try:
            made = read(text)
            check(made)  # type: ignore[operator]
        except GradcError as error:
            str(error)
            return Outcome("typed", counts={f"{form} refused": 1})
        printed = str(made)
        again = read(printed)
        if again != made or str(again) != printed:
            return Outcome(
                "wrong", f"the {form} does not round-trip:\n{text}\n--- printed\n{printed}", f"round trip of a {form}"
            )
    except GradcError as error:
        return Outcome(
            "wrong",
            f"the {form} is accepted, and refused after printing: {error}\n{text}",
            f"printed {form} refused: {type(error).__name__}",
        )
    except InternalError as error:
        return Outcome("untyped", f"InternalError: {error}\n{text}", f"InternalError of a {form}")
    return Outcome("right", counts={f"{form} accepted": 1})


def _input(seed: int) -> tuple[str, Source]:
    """Neighbouring seeds share a text, so that a few mutations need few programs."""
    base = random.Random(seed // 256)
    first, second = base.choice(sources()), base.choice(sources())
    return mutated(random.Random(seed), first.text, second.text), first


def attempt(seed: int, options: Options) -> Outcome:
    text, source = _input(seed)
    try:
        return judged(text, source.is_graph)
    except Exception as error:
        error.add_note(text[:20000])
        raise


def shrink(seed: int, outcome: Outcome, options: Options) -> Outcome:
    """Lines, then tokens, taken away while the verdict and its kind stay."""
    from .driver import attempted

    text, source = _input(seed)
    for pattern in (re.compile(r"[^\n]*\n?"), TOKEN):
        parts = [p for p in pattern.findall(text) if p]
        size = len(parts)
        while size:
            at = 0
            while at < len(parts):
                fewer = parts[:at] + parts[at + size :]
                found = attempted(lambda fewer=fewer: judged("".join(fewer), source.is_graph))[1]  # type: ignore[misc]
                if (found.verdict, found.kind) == (outcome.verdict, outcome.kind):
                    parts = fewer
                else:
                    at += size
            size //= 2
        text = "".join(parts)
    found = attempted(lambda: judged(text, source.is_graph))[1]
    return Outcome(outcome.verdict, f"{text!r}\n\n{found.text}", outcome.kind)


CAMPAIGN = Campaign("text", attempt, limit=60, ci=1000, tries=("gradc/ir", "gradc/ops"), shrink=shrink)
