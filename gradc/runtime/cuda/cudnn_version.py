"""Whether cuDNN is installed for convolutions, by what its packages say of themselves: nothing of it is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import re

FRONTEND = "nvidia-cudnn-frontend"
WHEELS = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
"""The packages that bring cuDNN itself, with torch; the system's is taken where a module asks for it by name."""
FRONTEND_NEEDED, CUDNN_NEEDED = (1, 14), (9, 8)
"""The oldest versions: those since which plans can be made without a device, as tests make them."""


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
def front_end_missing() -> str:
    """What is wrong with the package of the front end, with what is needed; "" if nothing is."""
    version = version_of(FRONTEND)
    if version and is_recent(version, FRONTEND_NEEDED):
        return ""
    there = f"is {version}" if version else "is not installed"
    return f"{FRONTEND} {there}; {_dotted(FRONTEND_NEEDED)} or newer is needed (gradc[cudnn])"


@functools.cache
def missing() -> str:
    """What keeps convolutions from being cuDNN's by default, with what is needed; "" if nothing does."""
    found = {name: version for name in WHEELS if (version := version_of(name))}
    needed = f"cuDNN {_dotted(CUDNN_NEEDED)} or newer is needed"
    if why := front_end_missing():
        return why
    if not found:
        return f"neither {' nor '.join(WHEELS)} is installed; {needed}"
    if not any(is_recent(version, CUDNN_NEEDED) for version in found.values()):
        return f"{', '.join(f'{name} is {version}' for name, version in found.items())}; {needed}"
    return ""


def installed() -> bool:
    """Whether convolutions for the target cuda are cuDNN's by default."""
    return not missing()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
