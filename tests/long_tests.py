"""Tests that take long run where what they test has changed since they passed.

``@pytest.mark.long("gradc/process/files.py", "templates/export")`` names what a test tests, beside its own file.
``make test-all`` runs all of them and writes ``tests/long.txt``: each test that passed, with a digest of those files.
Any other run leaves out those whose digest still stands there, but for a few, others every day (:data:`AGAIN`): what
passed on one machine is tried on others.

Tests of functions whose cases take long together (``tests/heavy.txt``) test everything: they run where any file has
changed that is neither another test nor a record (:func:`sources`), where the system, the processor's architecture or
the settings in the environment are others (:func:`surroundings`), or where the function has other cases; and one line
of ``tests/long.txt`` stands for all cases of a function, where all of them passed.  A test that reads other tests is
marked, with ``"tests"`` among its paths.

A test that judges texts which the compiler writes hands them to ``judged(*texts)`` before what takes long: their digest
stands behind a ``+``, and where the compiler has changed but not these texts the test ends there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSED = Path(__file__).with_name("long.txt")
HEAVY = Path(__file__).with_name("heavy.txt")
PROPERTY, TEXTS, FUNCTION = "long", "texts", "function"
COMPILER = (
    *("gradc/analysis", "gradc/autodiff.py", "gradc/codegen", "gradc/compiler.py", "gradc/ir", "gradc/ops"),
    *("gradc/passes", "gradc/targets", "templates"),
)
"""What makes kernels."""
VALUES = (
    *COMPILER,
    *("gradc/api.py", "gradc/errors.py", "gradc/inspect", "gradc/interp.py", "gradc/jax", "gradc/knobs.py"),
    *("gradc/module", "gradc/pickles.py", "gradc/plans"),
    *("gradc/onnx", "gradc/optim", "gradc/process", "gradc/runtime", "gradc/torch", "gradc/trace.py", "gradc/verify"),
    *(f"tests/{name}.py" for name in ("agreement", "oracles", "registry", "sampling", "torch_oracles")),
)
"""What decides and judges the values of a module."""
AGAIN = 16
"""Of so many tests that are left out one is run nevertheless."""
RUNNERS = ("numpy", "torch", "torchao", "onnx", "onnxruntime", "jax", "ziglang", "nvidia-cuda-nvrtc-cu12")
"""Packages with another release of which a test is another test."""


values = pytest.mark.long(*VALUES)
IMPORTS = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
NO_PART = ("tests/long.txt", "tests/slow.txt", "tests/heavy.txt", "CHANGELOG.md")
"""What no test's outcome depends on."""
NO_SOURCES = ("__pycache__", "build", "dist")
"""Folders of what is made of the checkout's files; those whose names begin with a point are none of its either."""


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def case_of(nodeid: str) -> str:
    """``FILE::NAME[PARAMETERS]`` of a test; a file keeps its name when it moves to another folder."""
    path, _, name = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{name}"


@functools.cache
def digest(paths: tuple[str, ...]) -> str:
    """Of the files at these paths, relative to the checkout, and in the folders below them, and of what runs them.

    :raises FileNotFoundError: there is none at one of them.
    """
    hasher = hashlib.sha256(repr((sys.version_info[:2], *map(_version, RUNNERS))).encode())
    for path in paths:
        hasher.update(contents(path))
    return hasher.hexdigest()[:16]


@functools.cache
def contents(path: str) -> bytes:
    """Name and digest of each file at a path or below it; most tests name the same folders."""
    here = ROOT / path
    if not here.exists():
        raise FileNotFoundError(f"a test marked as long names {path}, which is not there")
    inside = [here] if here.is_file() else sorted(f for f in here.rglob("*") if f.is_file())
    return "".join(
        f"{file.relative_to(ROOT)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n"
        for file in inside
        if "__pycache__" not in file.parts
    ).encode()


@functools.cache
def sources() -> tuple[str, ...]:
    """The files of the checkout but for test files and records: shared modules of the tests are among them."""
    found = [".ci"] if (ROOT / ".ci").exists() else []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        folders[:] = [name for name in folders if name not in NO_SOURCES and not name.startswith(".")]
        names = (name for name in files if not name.startswith((".", "test_")))
        found += [path for path in map(str, map(here.joinpath, names)) if path not in NO_PART]
    return tuple(sorted(found))


@functools.cache
def test_files(path: Path) -> tuple[str, ...]:
    """A test file, and those beside it that it imports, relative to the checkout."""
    found = [path]
    for file in found:  # which grows
        others = (file.with_name(f"{name}.py") for name in IMPORTS.findall(file.read_text(encoding="utf-8")))
        found += [other for other in others if other not in found and other.exists()]
    return tuple(str(file.relative_to(ROOT)) for file in found)


OF_A_RUN = tuple(f"GRADC_{name}" for name in ("CACHE_DIR", "OBJECTS", "TEST_DAY"))
"""Settings that differ from run to run and decide no value."""


def surroundings() -> tuple[object, ...]:
    """What one sets to have other tests: the system, and the environment as it is before the first test."""
    chosen = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name == "HYPOTHESIS_PROFILE" or (name.startswith("GRADC_") and name not in OF_A_RUN)
    )
    return sys.platform, platform.machine(), *chosen


@functools.cache
def heavy() -> frozenset[str]:
    """Functions whose cases take long together."""
    return frozenset(HEAVY.read_text(encoding="utf-8").split()) if HEAVY.exists() else frozenset()


def function_of(name: str) -> str:
    """``FILE::NAME`` of a test's ``FILE::NAME[PARAMETERS]``."""
    return name.partition("[")[0]


def passed() -> dict[str, str]:
    """Test -> digest of what it tested when it last passed, and behind a ``+`` that of the texts that it judged."""
    if not PASSED.exists():
        return {}
    return dict(line.rsplit(" ", 1) for line in PASSED.read_text(encoding="utf-8").splitlines())


def judged(item: pytest.Item, texts: Sequence[str], everything: bool) -> None:
    """Ends a long test that passed on the same texts: all that it has of the compiler, for whose files they stand.

    What else the compiler's files decide (an architecture by an op's place among all) is one of the texts.
    """
    marker = item.get_closest_marker("long")
    assert marker is not None
    others = tuple(path for path in marker.args if path not in COMPILER)
    hasher = hashlib.sha256(digest((*others, str(item.path.relative_to(ROOT)))).encode())
    for text in texts:
        hasher.update(hashlib.sha256(text.encode()).digest())
    now = hasher.hexdigest()[:16]
    item.user_properties.append((TEXTS, now))
    name = case_of(item.nodeid)
    if not (everything or is_tried_again(name)) and passed().get(name, "").partition("+")[2] == now:
        pytest.skip("long, and passed on these texts: make test-all runs it")


def is_tried_again(name: str) -> bool:
    """Whether today (``GRADC_TEST_DAY``, in days) is the day of this test."""
    return (zlib.crc32(name.encode()) + int(os.environ["GRADC_TEST_DAY"])) % AGAIN == 0


def leave_out(items: list[pytest.Item], everything: bool, whole_files: bool = True) -> None:
    """Marks as skipped what has passed on the files that are here.

    :param whole_files: the items are all tests of each file.
    """
    known = passed()
    cases: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") is None:
            cases[function_of(case_of(item.nodeid))].append(case_of(item.nodeid))
    around = surroundings()
    for item in items:
        marker, name = item.get_closest_marker("long"), case_of(item.nodeid)
        function, record, own = function_of(name), name, test_files(item.path)
        if marker is not None:
            now = digest((*marker.args, *own))
        elif function in heavy():
            if not whole_files:
                continue
            of_files = digest((*sources(), *own))
            now = hashlib.sha256(repr((of_files, around, sorted(cases[function]))).encode()).hexdigest()[:16]
            record = function
            item.user_properties.append((FUNCTION, f"{len(cases[function])} {function}"))
        else:
            continue
        item.user_properties.append((PROPERTY, now))
        if everything or is_tried_again(name):
            continue
        if known.get(record, "").partition("+")[0] == now:
            item.add_marker(pytest.mark.skip(reason="long, and passed on these files: make test-all runs it"))


def begun_early(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in another order, in which each worker of ``--dist worksteal`` begins with its share of the long ones:
    each of several minutes, begun last, is what all others wait for.

    pytest-xdist hands out consecutive tests, as many to each worker as to the others, and what is left to the last.
    """
    long = [item for item in items if item.get_closest_marker("long") and not item.get_closest_marker("skip")]
    known = {id(item) for item in long}
    others = iter([item for item in items if id(item) not in known])
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        mine, count = long[worker::workers], (len(items) - len(ordered)) // (workers - worker)
        ordered += [*mine, *itertools.islice(others, max(0, count - len(mine)))]
    return ordered


class Results:
    """What became of long tests in a run of all of them.

    :ivar outcomes: of each test, by phase.  :ivar digests: of what it tests.
    :ivar functions: test -> number of cases and name of its function, where one line stands for all.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, str]] = {}
        self.digests: dict[str, str] = {}
        self.functions: dict[str, tuple[int, str]] = {}

    def add(self, report: pytest.TestReport) -> None:
        """Takes the report of one phase of a test."""
        properties, name = dict(report.user_properties), case_of(report.nodeid)
        if FUNCTION in properties:
            count, function = str(properties[FUNCTION]).split(" ", 1)
            self.functions[name] = int(count), function
        if PROPERTY in properties:
            self.digests[name] = "+".join(str(properties[p]) for p in (PROPERTY, TEXTS) if p in properties)
            self.outcomes.setdefault(name, {})[report.when] = report.outcome
        elif name in self.outcomes or report.failed:  # the report of a process that is gone has no properties
            self.outcomes.setdefault(name, {})["gone"] = report.outcome

    def marked(self) -> set[str]:
        """The functions of the tests that say themselves what they test."""
        return {function_of(name) for name in self.outcomes if name not in self.functions}

    def merged(self, before: Mapping[str, str]) -> dict[str, str]:
        """``before`` with the tests of which every phase passed, and without those of which one did not; with the
        functions all of whose cases passed, and without those of which one did not.
        """
        phases = dict.fromkeys(("setup", "call", "teardown"), "passed")
        good = {name for name, outcomes in self.outcomes.items() if outcomes == phases}
        bad = self.outcomes.keys() - good
        lines = {name: self.digests[name] for name in good if name not in self.functions}
        wanted = Counter(self.functions[name] for name in good if name in self.functions)
        whole = {function for (cases, function), ran in wanted.items() if ran == cases}
        lines |= {self.functions[n][1]: self.digests[n] for n in good if self.functions.get(n, (0, ""))[1] in whole}
        gone = {*bad, *map(function_of, bad)}
        return {name: now for name, now in (before | lines).items() if name not in gone}

    def write(self) -> None:
        """Writes :data:`PASSED` anew."""
        lines = (f"{name} {now}\n" for name, now in sorted(self.merged(passed()).items()))
        PASSED.write_text("".join(lines), encoding="utf-8")
