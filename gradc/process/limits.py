"""The memory that this process may still have: what the machine has free, and what control groups and resource limits
leave of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

_NO_LIMIT = 1 << 62  # what cgroups of version 1 call no limit is a little less than 2^63


@dataclass(frozen=True)
class Limit:
    """One bound on what a process may have.

    :param left: bytes that may still be taken.
    :param total: bytes that it allows in all.
    :param name: what sets it, in words.
    """

    left: int
    total: int
    name: str


def limits(root: Path = Path("/")) -> Iterator[Limit]:
    """Every bound that the system tells of.

    :param root: of the file system in which proc and the control groups are looked for.
    """
    yield from _machine(root / "proc")
    yield from _resources(root / "proc")
    yield from _groups(root)


def tightest(root: Path = Path("/")) -> Limit:
    """The bound that leaves least; without limit where the system tells of none."""
    return min(limits(root), key=lambda limit: limit.left, default=Limit(sys.maxsize, sys.maxsize, "no limit"))


def tightest_total(root: Path = Path("/")) -> int:
    """Bytes that this process may have in all; 8 GiB where the system does not say."""
    return min((limit.total for limit in limits(root)), default=8 << 30)


def _machine(proc: Path) -> Iterator[Limit]:
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        found = {
            words[0]: int(words[1]) << 10
            for words in lines
            if len(words) > 1 and words[0] in ("MemTotal:", "MemAvailable:")
        }
        yield Limit(found["MemAvailable:"], found.get("MemTotal:", found["MemAvailable:"]), "memory of the machine")


def _resources(proc: Path) -> Iterator[Limit]:
    """``ulimit -v`` and ``ulimit -d``."""
    if resource is None:
        return
    for name, what, used in (("RLIMIT_AS", "ulimit -v, RLIMIT_AS", 0), ("RLIMIT_DATA", "ulimit -d, RLIMIT_DATA", 5)):
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            taken = 0
            with contextlib.suppress(OSError, ValueError, IndexError):
                taken = int((proc / "self/statm").read_text().split()[used]) * os.sysconf("SC_PAGE_SIZE")
            yield Limit(max(soft - taken, 0), soft, what)


# ---- Control groups: cgroups(7), Documentation/admin-guide/cgroup-v2.rst of the Linux kernel
# --------------------------

# By version: the files of limits, of what is used, and the lines of memory.stat that are given back on demand.
_FILES = {
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def _groups(root: Path) -> Iterator[Limit]:
    """The group of this process and all those that it is in."""
    with contextlib.suppress(OSError, ValueError):
        own = _own_groups((root / "proc/self/cgroup").read_text())
        for version, top, mounted in _mounts((root / "proc/self/mountinfo").read_text()):
            if version not in own:
                continue
            # In a container the top of what is mounted may be the group itself: its path is then seen from outside.
            path = own[version]
            below = (
                path.removeprefix(top).strip("/")
                if top != "/" and (path + "/").startswith(top.rstrip("/") + "/")
                else path.strip("/")
                if top == "/"
                else ""
            )
            base = root / mounted.strip("/")
            folder = base / below
            if ".." in Path(below).parts or not folder.is_dir():
                folder = base
            while True:
                yield from _group(folder, version)
                if folder == base:
                    break
                folder = folder.parent


def _own_groups(text: str) -> dict[int, str]:
    """The path of this process's group, by version of the memory controller: lines ``number:controllers:path``."""
    own = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    return own


def _mounts(text: str) -> Iterator[tuple[int, str, str]]:
    """Version, top and place of each mounted tree of groups: ``id parent device top place options... - type source
    options``.
    """
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        if len(words) < 5 or len(kind) < 3:
            continue
        top, place = (word.replace("\\040", " ") for word in words[3:5])
        if kind[0] == "cgroup2":
            yield 2, top, place
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, top, place


def _group(folder: Path, version: int) -> Iterator[Limit]:
    names, usage, given_back = _FILES[version]
    with contextlib.suppress(OSError, ValueError):
        allowed = {}
        for name in names:
            with contextlib.suppress(OSError):  # the top of version 2 has none
                text = (folder / name).read_text().strip()
                if text != "max" and int(text) < _NO_LIMIT:
                    allowed[name] = int(text)
        if not allowed:
            return
        used = int((folder / usage).read_text())
        with contextlib.suppress(OSError):
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines() if " " in line)
            used -= sum(int(stat.get(name, 0)) for name in given_back)
        for name, most in allowed.items():
            yield Limit(max(most - max(used, 0), 0), most, f"control group, {folder / name}")
