"""What every test run shares: a cache of its own, machine code kept between runs, the level at which a test's C is
optimised, the same random examples, and a word on what was not tested.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import functools
import gc
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import durations
import known_names
import long_tests
import pytest
from watchdog import Watchdog

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is part of the checkout, not of the package

OPTIONAL = {
    "torch": "gradients against torch",
    "torchao": "torchao's quantized weights",
    "bitsandbytes": "bitsandbytes' layers",
    "jax": "gradc beside JAX",
    "onnx": "the ONNX frontend",
    "swift_f0": "real ONNX models",
    "cupy": "CUDA kernels on a GPU",
    "nvidia.cuda_nvrtc": "compiling CUDA kernels",
    "ziglang": "the zig compiler",
}
os.environ.setdefault(
    "GRADC_TARGET", "cpu"
)  # where a GPU is, the tests are still those of the CPU; tests/gpu asks for it by name
OBJECTS = ROOT / "build" / "objects"
"""What compilers made of the tests' C, C++ and CUDA, by its text, flags and compiler: a run after a change of gradc
compiles the kernels that changed.
"""
DURATIONS = ROOT / "build" / "durations.json"
KEPT_DAYS, KEPT_BYTES = 21, 4 << 30
HANGS, SLACK = 600.0, 60.0
"""Seconds after which the stacks of a test are written, and how many of them earlier at most."""
_cache = pytest.StashKey[str]()
_objects = pytest.StashKey[str]()
_level = pytest.StashKey[str]()
_without = pytest.StashKey[set[str]]()
_of_ops = pytest.StashKey[bool]()
_known_seconds = pytest.StashKey[dict[str, float]]()
_left_out = pytest.StashKey[int]()
_begun = pytest.StashKey[float]()
_runtime = pytest.StashKey[subprocess.Popen[bytes]]()
_watchdog = pytest.StashKey[Watchdog]()

# A job in the background ignores Ctrl-C and so would what it starts; the tests of Ctrl-C are meant for those who press
# it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis"):  # tests/gpu runs where there is none
    from hypothesis import HealthCheck, settings

    # The same examples on every machine, and no verdict on a slow one.
    settings.register_profile(
        "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the files under tests/golden anew; read their diff before committing it",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"of each test function at most {QUICK_CASES} cases, and none of those in tests/slow.txt: make quick",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="tests marked as long, too, whatever they passed on: make test-all, which writes tests/long.txt",
    )
    parser.addoption(
        "--update-slow",
        action="store_true",
        help="write tests/slow.txt and tests/heavy.txt anew: the test functions whose cases take"
        f" {SLOW} s or more on average, and {HEAVY:g} s or more together",
    )


def function_of(nodeid: str) -> str:
    """``FILE::NAME`` of a test, without its parameters."""
    return long_tests.function_of(long_tests.case_of(nodeid))


QUICK_CASES = 2
SLOW, HEAVY = 0.13, 5.0
SLOW_FILE = Path(__file__).with_name("slow.txt")


@functools.cache
def slow_functions() -> frozenset[str]:
    return frozenset(SLOW_FILE.read_text(encoding="utf-8").split())


_seconds: dict[str, list[float]] = {}
_cpu_seconds: dict[str, float] = {}
_long = long_tests.Results()
_by_file: Counter[str] = Counter()
CPU = "CPU seconds"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    here = config.stash[_without] and collection_path.is_relative_to(ROOT)
    return True if here and str(collection_path.relative_to(ROOT)) in config.stash[_without] else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.extra_keyword_matches.update(map(known_names.word, known_names.ops_of(item, slow_functions())))


def _collects_whole_files(config: pytest.Config) -> bool:
    """All tests of each that is read, as they are by default; and is the one process of this run that does so first."""
    own = getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    return own and not any("::" in arg for arg in config.args) and known_names.is_usual(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    collected = [*items]
    whole = known_names.is_usual(config) and not any("::" in arg for arg in config.args)
    long_tests.leave_out(items, everything=config.getoption("--all"), whole_files=whole)
    yield
    _keep_some(config, items)
    items[:] = long_tests.begun_early(items, getattr(config, "workerinput", {}).get("workercount", 1))
    if _collects_whole_files(config):  # with the marks that other plugins have given them
        known_names.keep(collected)


def _some_cases(config: pytest.Config) -> bool:
    return known_names.is_usual(config) and known_names.has_ops_alone(config.option.keyword)


def _keep_some(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some of those that -k and -m have left, where all would take longer than one waits."""
    if config.getoption("--quick"):
        kept = _few_cases(items)
    elif _some_cases(config):
        seconds = config.stash[_known_seconds]
        skipped = {item.nodeid: 0.0 for item in items if item.get_closest_marker("skip")}
        names = durations.chosen((i.nodeid for i in items), {**seconds, **skipped}, durations.budget(seconds))
        kept = {item for item in items if item.nodeid in names}
        config.stash[_left_out] = len(items) - len(kept)
    else:
        return
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _few_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each function that is not slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        function, marked = function_of(item.nodeid), any(map(item.get_closest_marker, ("slow", "gpu", "long")))
        if not (marked or function in slow_functions()):
            cases.setdefault(function, []).append(item)
    return {
        found[k * (len(found) - 1) // max(1, QUICK_CASES - 1)]  # the first, the last, and some between
        for found in cases.values()
        for k in range(QUICK_CASES)
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What lives as long as the process (modules, torch, 14,000 tests) is not looked through by the collections of
    garbage, of which a run has thousands: with it they took a quarter of the time of some tests.  What comes later
    to live (dynamo, caches) is looked through every seven million allocations: it took a tenth of what Python does.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 1000)
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.stash[_without] and _some_cases(session.config):  # else other files are read than usual
        _cpu_seconds[durations.START] = durations.cpu_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: how this test's C is compiled (in its child processes, too)."""
    item.config.stash[_watchdog].begin()
    item.stash[_begun] = durations.cpu_seconds()
    os.environ["GRADC_OPTIMIZE"] = item.config.stash[_level] or ("2" if _is_optimised(item) else "0")
    if item.get_closest_marker("compiles"):
        os.environ.pop("GRADC_OBJECTS", None)
    elif item.config.stash[_objects]:
        os.environ["GRADC_OBJECTS"] = item.config.stash[_objects]


def _is_optimised(item: pytest.Item) -> bool:
    """At -O2 are the tests that are about its code, and of the others a quarter, another one each day: at -O0 a test of
    values takes half the time.  Cases with the same parameters take the same turn, as do all tests without: those of a
    file share modules, and the cache, which has an entry for each level.
    """
    case = getattr(item, "callspec", None)
    turn = zlib.crc32(f"{item.path.name} {case.id if case else ''}".encode()) + int(os.environ["GRADC_TEST_DAY"])
    return item.get_closest_marker("optimised") is not None or turn % 4 == 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown" and _begun in item.stash:
        report.user_properties.append((CPU, durations.cpu_seconds() - item.stash[_begun]))
    return report


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """pytest has cancelled the watchdog, in whose place somebody may now look at the test."""
    node.config.stash[_watchdog].cancel()


def pytest_report_header() -> str:
    return f"-O2 for the quarter of the tests that GRADC_TEST_DAY={os.environ['GRADC_TEST_DAY']} chooses"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _by_file[report.nodeid.partition("::")[0]] += report.duration
    _long.add(report)
    if report.when == "call" and report.passed:
        _seconds.setdefault(function_of(report.nodeid), []).append(report.duration)
        _cpu_seconds[report.nodeid] = math.inf
    elif report.when == "teardown" and report.nodeid in _cpu_seconds:
        _cpu_seconds[report.nodeid] = dict(report.user_properties)[CPU]


def pytest_sessionfinish(session: pytest.Session) -> None:
    judged = not session.config.getoption("--update-golden")  # else tests pass on whatever they wrote
    if session.config.getoption("--all") and judged and not hasattr(session.config, "workerinput"):
        _long.write()
    took = {test: each for test, each in _cpu_seconds.items() if each < math.inf}
    if took.keys() - {durations.START} and not hasattr(session.config, "workerinput"):
        known_names.write(DURATIONS, durations.updated(durations.known(DURATIONS), took))
    if session.config.getoption("--update-slow") and not hasattr(session.config, "workerinput"):
        slow = (function for function, each in _seconds.items() if sum(each) / len(each) >= SLOW)
        heavy = (
            function for function, each in _seconds.items() if sum(each) >= HEAVY and function not in _long.marked()
        )
        for file, functions in ((SLOW_FILE, slow), (long_tests.HEAVY, heavy)):
            file.write_text("".join(f"{function}\n" for function in sorted(functions)), encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is what tests/golden/NAME holds."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"tests/golden/{name} is not there: pytest --update-golden writes it"
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            lines = difflib.unified_diff(
                wanted.splitlines(), text.splitlines(), f"tests/golden/{name}", "now", lineterm="", n=2
            )
            pytest.fail("\n".join(lines), pytrace=False)

    return compare


@pytest.fixture
def judged(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``judged(*texts)``: a long test that passed on the same texts ends here (:mod:`long_tests`)."""
    everything = request.config.getoption("--all")
    return lambda *texts: long_tests.judged(request.node, texts, everything)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs whose calls are bound in this test, beside those of calls that are prepared."""
    from gradc.runtime.executable import Executable

    seen: list[str] = []
    real = Executable.bind_call

    def bind_call(self: Executable, *args: object, **kwargs: object) -> object:
        seen.append(self.program.name)
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Executable, "bind_call", bind_call)
    return seen


def _prune(folder: Path) -> None:
    """Deletes what was not read for :data:`KEPT_DAYS`, and the oldest beyond :data:`KEPT_BYTES`."""
    entries = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):  # another run deletes too
            about = entry.stat()
            entries.append((max(about.st_atime, about.st_mtime), about.st_size, entry))
    total, oldest = 0, time.time() - KEPT_DAYS * 86_400
    for last, size, entry in sorted(entries, reverse=True):
        total += size
        if last < oldest or total > KEPT_BYTES:
            with contextlib.suppress(OSError):
                entry.unlink()


def _use_objects() -> None:
    if "GRADC_OBJECTS" in os.environ:  # one's own, or "" for none
        return
    try:
        OBJECTS.parent.mkdir(exist_ok=True)
        OBJECTS.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # a checkout that cannot be written
        return
    _prune(OBJECTS)
    os.environ["GRADC_OBJECTS"] = str(OBJECTS)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_watchdog] = Watchdog(os.dup(2), HANGS, SLACK)  # capture changes what 2 is
    known_names.digests()  # of the files as they are read
    os.environ.setdefault("GRADC_TEST_DAY", str(datetime.date.today().toordinal()))
    if not hasattr(config, "workerinput"):
        _use_objects()
    config.stash[_level] = os.environ.get("GRADC_OPTIMIZE", "")  # one's own holds for every test
    config.stash[_objects] = os.environ.get("GRADC_OBJECTS", "")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the environment
        config.stash[_cache] = os.environ["GRADC_CACHE_DIR"] = tempfile.mkdtemp(prefix="gradc-tests-")
        os.environ.setdefault("GRADC_CALIBRATION", "none")  # what the user measured decides nothing here
        if config.getoption("numprocesses", None):
            # Compiled once while the workers collect their tests; each would do it for itself, in six seconds.
            config.stash[_runtime] = subprocess.Popen(
                [sys.executable, "-c", "from gradc.runtime.host.pool import KERNELS, packed; packed(KERNELS)"],
                cwd=ROOT,
                stderr=subprocess.DEVNULL,  # without a compiler the tests will say so
            )
    given = getattr(config, "workerinput", {})  # another run may write the file before a worker reads it
    config.stash[_known_seconds] = given[CPU] if CPU in given else durations.known(DURATIONS)
    _choose_files(config)


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_configure_node(node: Any) -> None:
    node.workerinput[CPU] = node.config.stash[_known_seconds]


def _choose_files(config: pytest.Config) -> None:
    """What ``-k`` says, and the files that have no test for it."""
    plain, config.stash[_without] = config.option.keyword, set()
    named = config.getoption("--all") or any(arg.partition("::")[0].endswith(".py") for arg in config.args)
    if not named:  # in xdist's workers, too, which parse the command line for themselves
        config.option.keyword = known_names.of_ops(plain)
    config.stash[_of_ops] = config.option.keyword != plain
    alone = not hasattr(config, "workerinput") and not config.getoption("numprocesses", None)  # else all read the same
    if alone and known_names.is_usual(config):
        config.stash[_without] = known_names.without(config.option.keyword, known_names.known())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _watchdog in config.stash:
        config.stash[_watchdog].cancel()
        os.close(config.stash[_watchdog].file)
    if _runtime in config.stash:
        config.stash[_runtime].wait()
    if _cache in config.stash:
        shutil.rmtree(config.stash[_cache], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    slowest = [f"{seconds:6.0f} s  {path}" for path, seconds in _by_file.most_common(10) if seconds >= 1]
    if slowest:
        terminalreporter.write_line("\n".join(("the slowest files:", *slowest)))
    if terminalreporter.config.stash[_of_ops]:
        config = terminalreporter.config
        left_out = config.stash.get(_left_out, "the rest")  # of which xdist's workers do not tell
        some = (
            f", as many as take {durations.WANTED:g} s ({left_out} left out)"
            if left_out and _some_cases(config)
            else ""
        )
        terminalreporter.write_line(
            f"-k with the name of an op: its tests but for slow ones{some};"
            " with --all or files named, all whose names have it"
        )
    absent = [f"{name} ({what})" for name, what in OPTIONAL.items() if not _installed(name)]
    if absent:
        terminalreporter.write_line(f"not installed, so not tested: {', '.join(absent)}")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False
