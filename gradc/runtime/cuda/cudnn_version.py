"""Whether cuDNN is installed for convolutions, by what its packages say of themselves: nothing of it is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import re

FRONTEND = "nvidia-cudnn-frontend"
WHEELS = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
"""The packages that bring cuDNN itself; it may also be the system's."""
FRONTEND_NEEDED, CUDNN_NEEDED = (1, 12), (9, 1)
"""The oldest versions."""


def version_of(package: str) -> str:
    """The version of an installed package; "" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_recent(version: str, needed: tuple[int, int]) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return numbers >= needed


@functools.cache
def missing() -> str:
    """What keeps convolutions from being cuDNN's, with what is needed; "" if nothing does."""
    frontend = version_of(FRONTEND)
    if not frontend or not is_recent(frontend, FRONTEND_NEEDED):
        there = f"is {frontend}" if frontend else "is not installed"
        return f"{FRONTEND} {there}; {'.'.join(map(str, FRONTEND_NEEDED))} or newer is needed (gradc[cudnn])"
    found = {name: version for name in WHEELS if (version := version_of(name))}
    if found and not any(is_recent(version, CUDNN_NEEDED) for version in found.values()):
        there = ", ".join(f"{name} is {version}" for name, version in found.items())
        return f"{there}; cuDNN {'.'.join(map(str, CUDNN_NEEDED))} or newer is needed (gradc[cudnn])"
    return ""


def installed() -> bool:
    """Whether convolutions for the target cuda are cuDNN's by default."""
    return not missing()
