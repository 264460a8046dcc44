"""The user's names as C identifiers: what a generated kernel calls its buffers and dims.

Nothing of a name but ASCII letters, digits and single underscores reaches a text, and none that means something there:
a keyword, a macro, a function, or a local variable of a template or of a writer.  Writers give no local variable a
trailing underscore, so that a name with one is the user's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from ..ir.kernel import Kernel
from .text import template_dirs

LONGEST = 40
"""Characters of a name that are kept."""
_KEYWORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const const_cast
    consteval constexpr constinit continue co_await co_return co_yield decltype default delete do double dynamic_cast
    else enum explicit export extern false float for friend goto if inline int long main mutable namespace new noexcept
    not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires restrict return
    short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
    typeid typename typeof union unix linux unsigned using virtual void volatile wchar_t while xor xor_eq
    blockDim blockIdx gridDim threadIdx warpSize i8 i16 i32 i64 u8 u16 u32 u64 f16 f32 f64 ix
"""
WRITTEN = """
    EDGE EXCHANGED affordable balanced collapsed_keys collapsed_rows collapsed_start combined distant elements
    even_cols exchanged far group_keys group_rows h n next one piece shared shared_gather sorted_rows sorting
    strip strips there unknown_zero values worthwhile
"""
"""Local variables that writers declare and no template names; a test holds every text against them."""
_LOCAL = re.compile(r"[a-z]{1,8}_?[a-z]?\d+|\w+_[iuf]\d+")
"""What writers call what they number: values, axes, partial sums; and functions of one type, which macros define.
"""
_MACRO = re.compile(
    r"(EXIT|FD|FE|FP|HUGE|M|MATH|MB|PTRDIFF|RAND|SIG|SIZE|U?INT\w*|WCHAR|WINT)_\w+|S?NAN\w*|INFINITY|MAXFLOAT|NULL|EOF"
    r"|BUFSIZ|(FILENAME|FOPEN|TMP)_MAX|(SEEK|L)_\w+|P_tmpdir|NFDBITS|NDEBUG|\w+_ENDIAN|BYTE_ORDER|W[A-Z]{5,8}|math_errhandling|errno|assert|stdin|stdout|stderr"
)
"""Macros of the C headers that a text may include, and more that look like them."""
_OF_KERNELS = ("common", "cpu", "cuda")
_ELSEWHERE = r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}|/\*.*?\*/|//[^\n]*|(?<=[\w\])])\.[A-Za-z_]\w*"
"""Parts of a template that are no text of the target, or name a struct's member, which hides nothing."""


@functools.cache
def reserved(target: str = "") -> frozenset[str]:
    """Every word that means something in a generated text.

    :param target: the folder of templates whose texts count, beside the common ones; those of all kernels if unsaid.
    """
    rooms = dict.fromkeys((target, "common") if target else _OF_KERNELS)
    return frozenset({*_KEYWORDS.split(), *WRITTEN.split()}.union(*map(_of_templates, rooms)))


@functools.cache
def _of_templates(room: str) -> frozenset[str]:
    """The words that mean something in the texts of one folder of templates."""
    words: set[str] = set()
    for path in (path for folder in template_dirs() for path in (folder / room).rglob("*")):
        if path.suffix not in (".j2", ".h", ".c", ".cu"):
            continue
        text = re.sub(_ELSEWHERE, " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        if path.suffix == ".j2":
            words.update(re.findall(r"[A-Za-z_]\w*", text))
        else:
            words.update(re.findall(r"\b([A-Za-z_]\w*)[ \t]*\(", text))  # functions, and macros with arguments
            words.update(re.findall(r"#[ \t]*define[ \t]+(\w+)", text))
            words.update(re.findall(r"\b([A-Z_][A-Z0-9_]+)\b", text))  # constants
            words.update(re.findall(r"\b(\w+)[ \t]*;", " ".join(re.findall(r"typedef[^;{]*;|\}[^;{}]*;", text))))
    return frozenset(words)


def identifier(name: str, target: str = "") -> str:
    """A name as an identifier that means nothing else in a text: ``layers.0.weight`` is ``layers_0_weight``."""
    word = _word(name)
    taken = (
        word in reserved(target) or _LOCAL.fullmatch(word) or _MACRO.fullmatch(word) or word.lower().startswith("gradc")
    )
    return f"{word}_" if taken else word


def _word(name: str) -> str:
    word = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:LONGEST].rstrip("_")
    return word if word and not word[0].isdigit() else f"at_{word}" if word else "unnamed"


def member(name: str) -> str:
    """A name as a public one of C and C++: a member of a struct, a part of a longer name."""
    word = _word(name)
    return f"{word}_" if word in _KEYWORDS.split() or _MACRO.fullmatch(word) else word


def members(names: Iterable[str]) -> dict[str, str]:
    """Different :func:`member` for different names."""
    return _distinct({name: member(name) for name in names})


def identifiers(names: Iterable[str], target: str = "") -> dict[str, str]:
    """Different identifiers for different names, in their order: what would be the second ``x`` is ``x_2_``."""
    return _distinct({name: identifier(name, target) for name in names})


def _distinct(words: dict[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    taken: set[str] = set()
    for name, word in words.items():
        count = 1
        while (word if count == 1 else f"{word.rstrip('_')}_{count}_") in taken:
            count += 1
        given[name] = word if count == 1 else f"{word.rstrip('_')}_{count}_"
        taken.add(given[name])
    return given


_OWN_AXIS = re.compile(r"i(?!(8|16|32|64)$)\d+")
"""What the compiler calls axes, but for those whose names are types of a text."""


def foreign_axes(kernel: Kernel) -> list[str]:
    """The axes that a program's text has named otherwise than the compiler does, and those that are named as types."""
    return [a for a, _ in (*kernel.rows, *kernel.cols) if not _OWN_AXIS.fullmatch(a)]
