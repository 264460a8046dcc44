"""Where the templates and the plain C files lie, and their text."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path, PurePosixPath

from gradc.errors import InternalError


@functools.cache
def _template_dirs() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parent.parent
    # A wheel carries them as package data; a checkout keeps them beside the package.
    return tuple(path for path in (package / "templates", package.parent / "templates") if path.is_dir())[:1]


def template_dirs() -> list[Path]:
    """The directories that hold ``cpu/`` and ``cuda/``: the package's own, else the checkout's."""
    return list(_template_dirs())


def read_template(name: str) -> str:
    """The text of one file, such as ``"cpu/runtime.h"``.

    :raises InternalError: there is no such file, or the name leaves the templates.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise InternalError(f"{name!r} is not the name of a template")
    for directory in _template_dirs():
        if (directory / path).is_file():
            return (directory / path).read_text(encoding="utf-8")
    raise InternalError(
        f"no template {name!r} in {', '.join(map(str, _template_dirs())) or 'the package or the checkout'}"
    )


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)".*\n', re.MULTILINE)


@functools.cache
def standalone(name: str) -> str:
    """The text of one file with the files that it includes by ``"name"`` in their places, each once.

    :raises InternalError: one of them is missing, or lies outside the templates.
    """
    seen = {name}

    def expanded(file: str) -> str:
        def included(match: re.Match[str]) -> str:
            other = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
            if other in seen:
                return ""
            seen.add(other)
            return expanded(other)

        return _INCLUDE.sub(included, read_template(file))

    return expanded(name)


@functools.cache
def enumerators(name: str) -> dict[str, int]:
    """The constants that a template declares as ``enum { NAME = VALUE, ... };``: Python reads what C has, so that each
    is written once.

    :param name: of a plain file, such as ``"cuda/sort.cu"``.
    :return: those whose value is an integer, or a shift of one.
    """
    found: dict[str, int] = {}
    for body in re.findall(r"\benum\s*\{([^}]*)\}", re.sub(r"/\*.*?\*/", " ", read_template(name), flags=re.DOTALL)):
        for constant, number, shift in re.findall(r"(\w+)\s*=\s*(\d+)(?:\s*<<\s*(\d+))?\s*(?:,|$)", body):
            found[constant] = int(number) << int(shift or 0)
    return found


CODES = enumerators("cpu/runtime.h")
"""What a kernel reports, on any target, by its name in C: GRADC_INDEX_OUT_OF_RANGE, GRADC_DECREASES..."""


def widened(text: str) -> str:
    """A CUDA text with offsets of 64 bits."""
    return f"#define GRADC_WIDE\n{text}"
