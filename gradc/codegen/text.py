"""Where the templates and the plain C files lie, and their text."""

from __future__ import annotations

import functools
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
