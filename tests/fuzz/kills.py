"""kill -9 in everything that writes files: afterwards each file is the old one or the new one, whole, and nothing piles
up.

A seed is a writer and a point: the n-th system call that changes a file, in front of it or, of a write, in its middle
(``kill_points.c``, preloaded).  Successive seeds take every point of every writer in turn.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import sanitize
from .campaign import Campaign, Options, Outcome

TIMES = re.compile(rb" *[\d.]+ (ms|us|s)\b|(?<=\"ms\":)[\d.e-]+")
AGE = 7200.0
"""Seconds by which leftovers are made older before the next write: a young one may be another process's."""


class Writer:
    """Something that writes.

    :param write: ``(path, which)`` writes the version 0 (old) or 1 (new) at a path; the path's folder is there.
    :param read: ``(path) -> value``; it must be one of the two versions' values, and raise nothing.
    """

    def __init__(self, name: str, write: Callable[[Path, int], Any], read: Callable[[Path], Any] | None = None):
        self.name, self.write, self.read = name, write, read


def _files(path: Path) -> dict[str, bytes]:
    """What lies below a folder, by name; the times that a compilation took are left out."""
    return {str(p.relative_to(path)): TIMES.sub(b"T", p.read_bytes()) for p in sorted(path.rglob("*")) if p.is_file()}


# -- the writers -------------------------------------------------------------------------------------------------------


@functools.cache
def _graphs() -> tuple[Any, Any, Any]:
    """Two graphs that differ in text and in arrays of one type, and one without arrays."""
    import gradc
    from gradc import ops

    def with_array(k: int) -> Any:
        table = np.full((40, 50), float(k), np.float32)
        return gradc.trace(lambda x: ops.matmul(x, table) + float(k), x="f32[N,40]")

    return with_array(0), with_array(1), gradc.trace(lambda x: x * 2.0, x="f32[N,4]")


@functools.cache
def _modules() -> tuple[Any, Any]:
    import gradc

    return tuple(gradc.compile(g, wrt=["x"], target="cpu") for g in _graphs()[:2])  # type: ignore[return-value]


def _seen(graph: Any) -> tuple[str, tuple[tuple[str, bytes], ...]]:
    return str(graph), tuple((name, np.asarray(array).tobytes()) for name, array in sorted(graph.defaults.items()))


def _load_graph(path: Path) -> Any:
    import gradc

    return _seen(gradc.load(path / "g.gir"))


def _load_module(path: Path) -> Any:
    import gradc

    module = gradc.load_module(path / "m")
    return _seen(module.graph), module.wrt, module(x=np.ones((3, 40), np.float32)).tobytes()


def _cache_write(path: Path, which: int) -> None:
    from gradc.runtime.cache import Cache

    Cache(path / "cache").put("key", bytes([which + 65]) * 300_000)


def _cache_read(path: Path) -> Any:
    from gradc.runtime.cache import Cache

    found = Cache(path / "cache").get("key")
    if found is not None and (len(found) != 300_000 or len(set(found)) != 1):
        raise ValueError("a torn entry")
    return found


def _dump(path: Path, which: int) -> None:
    from gradc.inspect.dump import dump_module

    dump_module(_modules()[which], path / "dump")


def _dump_stages(path: Path, which: int) -> None:
    from gradc import compile, knobs

    with knobs.DUMP.set(str(path / "dump")):
        compile(_graphs()[which], target="numpy")


def _report(path: Path, which: int) -> None:
    from gradc.demo.report import Report

    report = Report(f"report {which}")
    report.say("words " * 2000 * (which + 1))
    report.picture("a.svg", f"<svg>{'<g/>' * 5000}{which}</svg>")
    (path / "report").mkdir(exist_ok=True)
    report.write(path / "report")


def _calibration(path: Path, which: int) -> None:
    from gradc.process.files import write

    write(path / "calibration.json", json.dumps({"version": which, "pad": "x" * 20_000}))


def _command(*arguments: str) -> Callable[[Path, int], None]:
    """A command of the CLI on the graph of a version, which stands beside the folder that is looked at."""

    def write(path: Path, which: int) -> None:
        from gradc.cli import main

        model = path.parent / f"model{which}.gir"
        if not model.exists():
            raise FileNotFoundError(model)
        if status := main([a.format(model=model, path=path) for a in arguments]):
            raise SystemExit(status)

    return write


@functools.cache
def writers() -> tuple[Writer, ...]:
    return (
        Writer("module.save", lambda path, which: _modules()[which].save(path / "m"), _load_module),
        Writer("graph.save", lambda path, which: _graphs()[which].save(path / "g.gir"), _load_graph),
        Writer("graph.save without arrays", lambda path, which: _graphs()[2 * which].save(path / "g.gir"), _load_graph),
        Writer("cache.put", _cache_write, _cache_read),
        Writer("dump", _dump),
        Writer("dump of stages", _dump_stages),
        Writer("report", _report),
        Writer("calibration", _calibration),
        Writer(
            "gradc compile",
            _command("compile", "{model}", "--target", "cpu", "--emit", "ir,c,explain", "-o", "{path}/out"),
        ),
    )


# -- one kill ----------------------------------------------------------------------------------------------------------


def attempt(seed: int, options: Options) -> Outcome:
    writer, at, torn = _point(seed)
    with tempfile.TemporaryDirectory(prefix="gradc-kill-") as name:
        found = _tried(writer, at, torn, Path(name))
    what = (
        f"{writer.name}, killed {'in the middle of' if torn else 'before'} the call {at} of"
        f" {_clean(writer.name).points} that change files"
    )
    if found:
        return Outcome(
            "wrong", f"{what}\n{found}", f"{writer.name}: {found.splitlines()[0].split(':')[0]}", {"kills": 1}
        )
    return Outcome("right", what, counts={"kills": 1, f"kills in {writer.name}": 1})


def _point(seed: int) -> tuple[Writer, int, bool]:
    """The writers take turns; each goes through its points, front and middle."""
    writer = writers()[seed % len(writers())]
    turn = seed // len(writers()) * 7  # neighbouring turns lie apart
    points = _clean(writer.name).points
    stride = points if points % 7 else points + 1
    return writer, turn % stride % points + 1, turn // stride % 2 == 1


@dataclass(frozen=True)
class _Clean:
    """A writer undisturbed.

    :param folder: one ``at`` with the old version, and one ``new`` where the new was written over it.
    :param states: of both.
    :param names: of the files in the second.  :param points: calls that change files, from the old to the new.
    """

    folder: Path
    states: tuple[Any, Any]
    names: frozenset[str]
    points: int


@functools.cache
def _clean(name: str) -> _Clean:
    writer = next(w for w in writers() if w.name == name)
    folder = Path(tempfile.mkdtemp(prefix="gradc-kill-", dir=_home()))
    for which in (0, 1):
        _graphs()[which].save(folder / f"model{which}.gir")
    old, new = folder / "at", folder / "new"
    old.mkdir()
    statuses = [_forked(lambda: writer.write(old, 0))]
    shutil.copytree(old, new, symlinks=True)
    read, write = os.pipe()
    statuses.append(
        _forked(
            lambda: (
                _shim().gradc_kill_arm(0, 0),
                writer.write(new, 1),
                os.write(write, str(_shim().gradc_kill_count()).encode()),
            )
        )
    )
    os.close(write)
    with open(read, "rb") as file:
        points = int(file.read() or b"0")
    if any(statuses) or points < 2:
        raise RuntimeError(f"{name} undisturbed: status {statuses}, {points} calls that change files")
    return _Clean(folder, (_state(writer, old), _state(writer, new)), frozenset(_files(new)), points)


@functools.cache
def _home() -> str:
    """Of this process's undisturbed folders."""
    return tempfile.mkdtemp(prefix="gradc-kills-", dir=os.path.dirname(os.environ["GRADC_CACHE_DIR"]))


def _tried(writer: Writer, at: int, torn: bool, folder: Path) -> str:
    """What is wrong after a kill at this point, or ""."""
    clean = _clean(writer.name)
    path = folder / "at"
    shutil.copytree(clean.folder / "at", path, symlinks=True)
    for which in (0, 1):
        for file in clean.folder.glob(f"model{which}*"):
            shutil.copy(file, folder)

    def killed() -> int:
        return _forked(lambda: (_shim().gradc_kill_arm(at, int(torn)), writer.write(path, 1)))

    status = killed()
    if status not in (-signal.SIGKILL, 0):  # 0: this time there were fewer calls
        return f"fails instead of being killed: status {status}"
    problem = _whole(writer, path, clean)
    if problem:
        return problem
    killed()  # once more, then one that is not disturbed, two hours later
    _age(path, clean.names)
    status = _forked(lambda: writer.write(path, 1))
    if status:
        return f"writing again fails: status {status}"
    found = _state(writer, path)
    if writer.read is not None and found != clean.states[1]:
        return "writing again gives something else than the new version"
    if writer.read is None:
        different = sorted(n for n in clean.states[1] if found.get(n) != clean.states[1][n])
        if different:
            return (
                "writing again gives another"
                f" {different[0]}\n{_difference(found.get(different[0], b''), clean.states[1][different[0]])}"
            )
    left = set(_files(path)) - clean.names
    return f"leftovers: {sorted(left)}" if left else ""


def _state(writer: Writer, path: Path) -> Any:
    return _files(path) if writer.read is None else writer.read(path)


def _whole(writer: Writer, path: Path, clean: _Clean) -> str:
    if writer.read is not None:
        try:
            found = writer.read(path)
        except Exception as error:
            return f"does not load: {type(error).__name__}: {error}"
        return "" if found in clean.states else "loads as a mixture: neither the old nor the new version"
    for name, data in _files(path).items():
        versions = [state[name] for state in clean.states if name in state]
        if versions and data not in versions:
            return (
                f"torn file: {name} has {len(data)} bytes, the versions"
                f" {[len(v) for v in versions]}\n{_difference(data, versions[-1])}"
            )
    missing = (clean.states[0].keys() & clean.states[1].keys()) - _files(path).keys()
    return f"lost: {sorted(missing)}" if missing else ""


def _difference(found: bytes, wanted: bytes) -> str:
    lines = (data.decode("utf-8", "replace").splitlines() for data in (wanted, found))
    return "\n".join(itertools.islice(difflib.unified_diff(*lines, "wanted", "found", lineterm="", n=0), 12))


def _age(path: Path, names: set[str]) -> None:
    then = time.time() - AGE
    for p in path.rglob("*"):
        if p.is_file() and str(p.relative_to(path)) not in names:
            os.utime(p, (then, then))


def _forked(work: Callable[[], Any]) -> int:
    """The exit status of a fork that does the work; negative: the signal."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- the shim ----------------------------------------------------------------------------------------------------------


@functools.cache
def _built() -> str:
    import atexit

    folder = tempfile.mkdtemp(prefix="gradc-fuzz-kill-")
    process = os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    library = os.path.join(folder, "kill_points.so")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", library, str(Path(__file__).with_name("kill_points.c")), "-ldl"],
        check=True,
    )
    return library


@functools.cache
def _shim() -> Any:
    return ctypes.CDLL(None)


def missing() -> str:
    return (
        ""
        if sys.platform == "linux" and shutil.which("gcc")
        else "calls are counted by a library that gcc builds and Linux preloads"
    )


def environment(options: Options) -> Mapping[str, str]:
    return {**sanitize.surroundings(), "LD_PRELOAD": _built()}


CAMPAIGN = Campaign(
    "kills",
    attempt,
    limit=120.0,
    ci=6,
    tries=(
        *("gradc/api.py", "gradc/cli", "gradc/formats", "gradc/inspect/dump.py", "gradc/module/saved.py"),
        *("gradc/process", "gradc/runtime/cache.py"),
    ),
    environment=environment,
    missing=missing,
)
