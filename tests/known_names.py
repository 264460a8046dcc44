"""``pytest -k NAME`` reads the files that have a test of that name: reading all of them takes longer than most tests.

The names of ops are parts of other words (``le`` of ``table``, ``sum`` of ``cumsum``): each means the tests of that op
(:func:`ops_of`), unless files are named or ``--all`` is given, and as many of them as one waits for (:mod:`durations`)
where nothing more is said of them.

``build/names.json`` has the names of each file's tests, as they were when all of the file was last collected.
Parameters may come from anything that a file imports or looks for (the records of ops, a folder, a compiler): the names
hold as long as :func:`digests` are the same, and else, or where no file has a name, everything is read.  Of what is
said by names of ops alone a part runs anyway: there a change of the package alone, after which most runs are, has no
file read that had no test of that op.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import long_tests
import pytest

_TESTS = re.compile(r"test_\w+\.py")
_IMPORTED = re.compile(rb"^\s*(?:from|import) +(test_\w+)", re.MULTILINE)
_IDENTIFIER = re.compile(r"[\w:+\-.\[\]\\/]+")  # of pytest's grammar
ROOT = Path(__file__).resolve().parent.parent
NAMES = ROOT / "build" / "names.json"
MADE = ("build", "dist", "__pycache__")
"""Folders of what is made of the checkout's files, beside what has a dot in front."""
SETTINGS = (".cfg", ".ini", ".toml")
OWN = tuple(f"GRADC_{name}" for name in ("CACHE_DIR", "CALIBRATION", "OBJECTS", "OPTIMIZE", "TARGET", "TEST_DAY"))
"""What a run sets itself, which parametrises nothing."""


@functools.cache
def contents() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Path -> digest of each file of the checkout as it is before the first test is read, and the names of the files of
    tests that it imports.
    """
    found = {}
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [name for name in inner if name not in MADE and not name.startswith(".")]
        for path in (Path(folder, name) for name in files if not name.startswith(".")):
            with contextlib.suppress(OSError):  # an editor's file, gone since
                text = path.read_bytes()
                imported = _IMPORTED.findall(text) if _TESTS.fullmatch(path.name) else ()
                known_as = path.relative_to(ROOT).as_posix()
                found[known_as] = hashlib.sha256(text).hexdigest(), tuple(f"{name.decode()}.py" for name in imported)
    return found


def _digest(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def surroundings() -> tuple[str, str]:
    """Digests of what may parametrise a file's tests beside the file: of what tests have in common, the settings, this
    machine, the environment, and the programs and packages that are installed; and of the rest of the checkout.
    """
    folders = {
        *os.environ.get("PATH", "").split(os.pathsep),
        *(path for path in sys.path if path.endswith("-packages")),
    }
    installed = [(path, Path(path).stat().st_mtime_ns) for path in sorted(folders) if os.path.isdir(path)]
    chosen = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith("GRADC_") and name not in OWN
    )
    files = sorted(item for item in contents().items() if not _TESTS.fullmatch(Path(item[0]).name))
    near = [item for item in files if item[0].startswith("tests/") or item[0].endswith(SETTINGS)]
    far = [item for item in files if item not in near]
    return _digest((sys.version, platform.uname(), installed, chosen, near)), _digest(far)


@functools.cache
def digests() -> dict[str, str]:
    """File of tests -> two digests with a dash between: of it, of those that it imports and of what is near them; and
    of the rest of their surroundings.
    """
    by_name = {Path(path).name: each for path, each in contents().items() if _TESTS.fullmatch(Path(path).name)}

    def of(path: str) -> str:
        texts, left = {path: contents()[path][0]}, list(contents()[path][1])
        for name in left:  # which grows
            if name in by_name and name not in texts:
                texts[name] = by_name[name][0]
                left += by_name[name][1]
        near, far = surroundings()
        return f"{_digest((near, sorted(texts.items())))}-{far}"

    return {path: of(path) for path in contents() if _TESTS.fullmatch(Path(path).name)}


def is_usual(config: pytest.Config) -> bool:
    """Whether no option has a file's tests be others."""
    own = any(option.startswith("python_") for option in config.getoption("override_ini", None) or ())
    return not own and not config.getoption("lf", False) and not config.getoption("doctestmodules", False)


def known() -> dict[str, tuple[str, str]]:
    """File -> its digests, and the names of its tests in lower case, as ``-k`` compares them."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged
        read = {path: (digest, names) for path, (digest, names) in json.loads(NAMES.read_text("utf-8")).items()}
        if all(isinstance(word, str) for each in read.values() for word in each):
            return read
    return {}


@functools.cache
def ops() -> frozenset[str]:
    """The names of all ops; none where the package cannot be imported, which the tests that import it will say."""
    try:
        from gradc import ops  # noqa: F401  (which registers them)
        from gradc.ir.node import REGISTRY
    except Exception:
        return frozenset()
    return frozenset(REGISTRY) - {"and", "or", "not"}


def ops_of(item: pytest.Item, slow: Container[str]) -> set[str]:
    """The ops that a test is of: those whose name is a word of its parameters (between brackets, dashes and points) or,
    behind ``test_``, the name of its function or file.  A slow test is of an op if that is all of its parameters, as it
    is of the one case that a function has of each op: more than these take longer than one waits for.

    :param slow: the functions whose cases take long.
    """
    path, _, name = item.nodeid.lower().partition("::")
    parameters = name.partition("[")[2]
    words = {word.removeprefix("test_") for word in re.split(r"[-.\[\]:]", f"{Path(path).name}:{name}")}
    if long_tests.function_of(long_tests.case_of(item.nodeid)) in slow or any(
        map(item.get_closest_marker, ("slow", "long"))
    ):
        words = {parameters.removesuffix("]")}
    return words & ops()


def word(op: str) -> str:
    """What ``-k`` finds in no other test; what is a part of it without the colons is a part of the test's name, too."""
    return f":{op}:"


def of_ops(expression: str) -> str:
    """An expression of ``-k`` in which the names of ops mean their tests, the rest what it means to pytest."""
    if not expression:
        return expression
    return _IDENTIFIER.sub(lambda m: word(m[0].lower()) if m[0].lower() in ops() else m[0], expression)


def has_ops_alone(expression: str) -> bool:
    """Whether what :func:`of_ops` gave says which ops, and nothing more of their tests."""
    words = {*_IDENTIFIER.findall(expression)} - {"and", "or"}
    return bool(words) and words <= {*map(word, ops())}


def without(expression: str, names: Mapping[str, tuple[str, str]]) -> set[str]:
    """The files that have no test for an expression of ``-k``."""
    words = {word.lower() for word in re.findall(r"[^\s()]+", expression)} - {"or", "and"}
    if not words or "not" in words or any(not any(word in text for _, text in names.values()) for word in words):
        return set()
    absent = {path for path, (_, text) in names.items() if not any(word in text for word in words)}
    part = 0 if has_ops_alone(expression) else slice(2)
    return {
        path for path in absent if path in digests() and _parts(digests()[path])[part] == _parts(names[path][0])[part]
    }


def _parts(digests: str) -> tuple[str, str]:
    near, _, far = digests.partition("-")
    return near, far


def keep(items: Iterable[pytest.Item]) -> None:
    """Writes down the names of files of which all tests were collected."""
    found: dict[Path, set[str]] = {}
    for item in items:
        marks, attributes = (mark.name for mark in item.iter_markers()), vars(getattr(item, "function", keep))
        names_of = item.nodeid, *item.listnames(), *item.listextrakeywords(), *marks, *attributes
        found.setdefault(item.path, set()).update(names_of)
    before = known()
    inside = {path.relative_to(ROOT).as_posix(): of for path, of in found.items() if path.is_relative_to(ROOT)}
    now = {path: "\n".join(sorted(of)).lower() for path, of in inside.items()}
    names = before | {path: (digests()[path], text) for path, text in now.items() if path in digests()}
    if names == before:
        return
    write(NAMES, names)


def write(path: Path, values: object) -> None:
    """Writes a file of JSON whole, or, in a checkout that cannot be written, not at all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-")  # another run may write, too
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(values, file)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
