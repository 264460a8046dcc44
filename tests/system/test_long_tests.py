"""What ``tests/long_tests.py`` leaves out: a long test whose files are those that it passed on, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import long_tests
import pytest


def on_day(day: int, name: str) -> bool:
    with pytest.MonkeyPatch.context() as context:
        context.setenv("GRADC_TEST_DAY", str(day))
        return long_tests.is_tried_again(name)


def forget() -> None:
    """Files are read anew."""
    long_tests.digest.cache_clear()
    long_tests.contents.cache_clear()
    long_tests.sources.cache_clear()
    long_tests.test_files.cache_clear()
    long_tests.heavy.cache_clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "package" / "a.py").write_text("a = 1\n")
    (tmp_path / "test_it.py").write_text("")
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    monkeypatch.setattr(long_tests, "PASSED", tmp_path / "tests" / "long.txt")
    monkeypatch.setattr(long_tests, "HEAVY", tmp_path / "tests" / "heavy.txt")
    other = next(day for day in itertools.count() if not on_day(day, "test_it.py::test_a"))
    monkeypatch.setenv("GRADC_TEST_DAY", str(other))
    forget()
    return tmp_path


WHOLE = ("passed", "passed", "passed")


class Item(SimpleNamespace):
    """What is read and written of a test."""

    def __init__(self, checkout: Path, *paths: str):
        super().__init__(nodeid="tests/test_it.py::test_a", path=checkout / "test_it.py", user_properties=[], marks=[])
        self.paths = paths

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=self.paths) if self.paths and name == "long" else None

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def ran(item: Item, *outcomes: str) -> long_tests.Results:
    results = long_tests.Results()
    for when, outcome in zip(("setup", "call", "teardown"), outcomes, strict=False):
        results.add(report(item, when, outcome, item.user_properties))
    return results


class Worker(SimpleNamespace):
    """What pytest-xdist's scheduler asks of one."""

    def __init__(self) -> None:
        super().__init__(gateway=SimpleNamespace(id="gw"), shutting_down=False, given=[])

    def __hash__(self) -> int:
        return id(self)

    def send_runtest_some(self, places: list[int]) -> None:
        self.given += places


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("tests", "long"), [(40, 7), (41, 1), (43, 0), (44, 44), (30, 29)])
def test_each_worker_begins_with_its_share(checkout: Path, workers: int, tests: int, long: int) -> None:
    """As pytest-xdist hands tests out."""
    worksteal = pytest.importorskip("xdist.scheduler.worksteal")
    from xdist.remote import Producer

    items: list[Any] = [Item(checkout, *(["package"] if k * long // tests != (k + 1) * long // tests else []))
                        for k in range(tests)]  # fmt: skip
    ordered = long_tests.begun_early(items, workers)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    others = [item for item in ordered if not item.paths]
    assert [id(item) for item in others] == [id(item) for item in items if not item.paths]
    config = SimpleNamespace(getvalue=lambda name: [f"{workers}*popen"])
    scheduler = worksteal.WorkStealingScheduling(config, Producer("test", enabled=False))
    nodes = [Worker() for _ in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, [str(k) for k in range(tests)])
    scheduler.schedule()
    shares = []
    for node in nodes:
        kinds = [bool(ordered[k].paths) for k in node.given]
        assert kinds == sorted(kinds, reverse=True)
        shares.append(sum(kinds))
    assert sum(shares) == long and max(shares) - min(shares) <= 1


def report(item: Item, when: str, outcome: str, properties: list[Any]) -> Any:
    return SimpleNamespace(
        nodeid=item.nodeid, when=when, outcome=outcome, failed=outcome == "failed", user_properties=properties
    )


def left_out(checkout: Path, *paths: str, everything: bool = False) -> bool:
    forget()
    item = Item(checkout, *paths)
    long_tests.leave_out([item], everything)  # type: ignore[list-item]
    return item.marks == ["skip"]


def test_it_runs_until_it_passed_and_again_when_a_file_changed(checkout: Path) -> None:
    item = Item(checkout, "package")
    assert not left_out(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    assert not item.marks
    ran(item, *WHOLE).write()
    assert left_out(checkout, "package") and not left_out(checkout, "package", everything=True)
    assert not left_out(checkout)  # no long test
    (checkout / "package" / "__pycache__" / "a.pyc").write_bytes(b"1")
    assert left_out(checkout, "package")
    (checkout / "package" / "b.py").write_text("")
    assert not left_out(checkout, "package")
    (checkout / "package" / "b.py").unlink()
    assert left_out(checkout, "package")
    (checkout / "test_it.py").write_text("# changed\n")
    assert not left_out(checkout, "package")


def test_what_is_left_out_has_its_day(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test once in so many days, and each day about as many."""
    (checkout / "package" / "a.py").write_text("a = 1\n")
    item = Item(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    long_tests.judged(item, ["a"], True)  # type: ignore[arg-type]
    ran(item, *WHOLE).write()
    days = range(739_000, 739_000 + long_tests.AGAIN)
    tried = []
    for day in days:
        monkeypatch.setenv("GRADC_TEST_DAY", str(day))
        tried.append(not left_out(checkout, "package"))
        assert tried[-1] is not ends(item, "a")
    assert sum(tried) == 1
    counts = [sum(on_day(day, f"test_it.py::test_{n}") for n in range(1600)) for day in days]
    assert sum(counts) == 1600 and max(counts) < 200


@pytest.mark.parametrize(
    "outcomes",
    [
        ("failed",),
        ("passed", "failed", "passed"),
        ("passed", "skipped", "passed"),
        ("skipped",),
        ("passed",),  # stopped by Ctrl-C
        ("passed", "passed", "failed"),
    ],
)
def test_what_did_not_pass_whole_is_taken_out(checkout: Path, outcomes: tuple[str, ...]) -> None:
    item = Item(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    ran(item, *WHOLE).write()
    assert left_out(checkout, "package")
    ran(item, *outcomes).write()
    assert not left_out(checkout, "package") and long_tests.passed() == {}


def test_a_test_whose_process_is_gone_did_not_pass(checkout: Path) -> None:
    item = Item(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    ran(item, *WHOLE).write()
    results = ran(item, "passed")
    results.add(report(item, "call", "failed", []))
    results.write()
    assert long_tests.passed() == {}


def test_another_release_of_what_runs_it_is_another_test(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = Item(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    ran(item, *WHOLE).write()
    assert left_out(checkout, "package")
    monkeypatch.setattr(long_tests, "_version", lambda package: f"{package} 9")
    assert not left_out(checkout, "package")


def test_other_tests_keep_their_lines(checkout: Path) -> None:
    long_tests.PASSED.write_text("test_other.py::test_b[a b] 0123456789abcdef\n")
    item = Item(checkout, "package")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    ran(item, *WHOLE).write()
    assert set(long_tests.passed()) == {"test_other.py::test_b[a b]", "test_it.py::test_a"}


def ends(item: Item, *texts: str, everything: bool = False) -> bool:
    forget()
    try:
        long_tests.judged(item, texts, everything)  # type: ignore[arg-type]
    except pytest.skip.Exception:
        return True
    return False


def test_it_ends_on_the_texts_it_passed_on(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the compiler has changed; other files, texts and an order of their own are another test."""
    monkeypatch.setattr(long_tests, "COMPILER", ("package",))
    (checkout / "other.py").write_text("")
    item = Item(checkout, "package", "other.py")
    long_tests.leave_out([item], True)  # type: ignore[list-item]
    assert not ends(item, "a", "b", everything=True)
    ran(item, *WHOLE).write()
    assert left_out(checkout, "package", "other.py")
    (checkout / "package" / "a.py").write_text("a = 2\n")
    assert not left_out(checkout, "package", "other.py")
    assert ends(item, "a", "b") and not ends(item, "a", "b", everything=True)
    assert not any(ends(item, *texts) for texts in (("a",), ("b", "a"), ("ab",), ("a", "c"), ()))
    (checkout / "other.py").write_text("# changed\n")
    assert not ends(item, "a", "b")


def test_a_path_that_is_not_there_is_an_error(checkout: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"package/c\.py"):
        left_out(checkout, "package/c.py")


GONE = "gone failed"
"""What becomes of a test whose process is gone."""


def cases(checkout: Path, *names: str) -> list[Item]:
    """Cases of a function, all that its file has, whose time is long together."""
    long_tests.HEAVY.write_text("test_it.py::test_a\n")
    forget()
    made = [Item(checkout) for _ in names]
    for item, name in zip(made, names, strict=True):
        item.nodeid = f"tests/test_it.py::test_a[{name}]"
    return made


def ran_all(checkout: Path, names: str, outcomes: dict[str, tuple[str, ...]] | None = None) -> None:
    """``make test-all``, in which these cases of ``names`` had other outcomes than to pass."""
    items = cases(checkout, *names)
    long_tests.leave_out(items, True)  # type: ignore[arg-type]
    assert not any(item.marks for item in items)
    results = long_tests.Results()
    for item, name in zip(items, names, strict=True):
        own = (outcomes or {}).get(name, WHOLE)
        for when, outcome in zip(("setup", "call", "teardown"), own, strict=False):
            # the report of a process that is gone has no properties
            results.add(
                report(item, when, outcome.removeprefix("gone "), item.user_properties * ("gone" not in outcome))
            )
    results.write()


def run(checkout: Path, names: str, whole_files: bool = True) -> str:
    """The cases that another run runs."""
    items = cases(checkout, *names)
    long_tests.leave_out(items, False, whole_files)  # type: ignore[arg-type]
    return "".join(name for item, name in zip(items, names, strict=True) if not item.marks)


@pytest.fixture
def no_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_tests, "is_tried_again", lambda name: False)


@pytest.mark.usefixtures("no_day")
@pytest.mark.parametrize(
    "changed",
    ["package/a.py", "package/new.py", "tests/helpers.py", "README.md", "test_it.py", "test_other.py", ".ci/run"],
)
def test_cases_of_a_heavy_function_run_where_anything_changed_but_other_tests(checkout: Path, changed: str) -> None:
    (checkout / ".ci").mkdir()
    (checkout / ".ci" / "run").write_text("")
    (checkout / "test_it.py").write_text("def f():\n    from test_other import helper\n")
    (checkout / "test_other.py").write_text("import test_it, test_nowhere\n")
    assert run(checkout, "xyz") == "xyz"
    ran_all(checkout, "xyz")
    assert long_tests.PASSED.read_text().count("\n") == 1
    assert run(checkout, "xyz") == "" and run(checkout, "xyz", whole_files=False) == "xyz"
    for other in ("tests/long.txt.bak/test_b.py", "build/x.c", ".git/x", "CHANGELOG.md", "package/__pycache__/b.pyc"):
        (checkout / other).parent.mkdir(exist_ok=True)
        (checkout / other).write_text("")
    assert run(checkout, "xyz") == ""
    (checkout / changed).write_text("# changed\n")
    assert run(checkout, "xyz") == "xyz"


@pytest.mark.usefixtures("no_day")
@pytest.mark.parametrize(
    "outcomes",
    [
        ("failed",),
        ("skipped",),
        ("passed", "skipped", "passed"),
        ("passed", "passed", "failed"),
        ("passed",),
        (),
        (GONE,),
    ],
)
def test_a_heavy_function_passed_where_all_of_its_cases_did(checkout: Path, outcomes: tuple[str, ...]) -> None:
    ran_all(checkout, "xyz")
    assert run(checkout, "xyz") == ""
    ran_all(checkout, "xyz", {"y": outcomes})
    before = () if outcomes == () else ("xyz",)  # a case that was not run says nothing of the others
    assert run(checkout, "xyz") == "".join(before)
    long_tests.PASSED.unlink()
    ran_all(checkout, "xyz", {"y": outcomes})
    assert run(checkout, "xyz") == "xyz"


@pytest.mark.usefixtures("no_day")
@pytest.mark.parametrize("name", ["HYPOTHESIS_PROFILE", "GRADC_OPTIMIZE", "GRADC_TARGET", "GRADC_VALIDATE"])
def test_cases_of_a_heavy_function_run_in_another_environment(
    checkout: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    ran_all(checkout, "xyz")
    for own in long_tests.OF_A_RUN:
        monkeypatch.setenv(own, "1")
    assert run(checkout, "xyz") == ""
    monkeypatch.setenv(name, "1")
    assert run(checkout, "xyz") == "xyz"


@pytest.mark.usefixtures("no_day")
def test_cases_of_a_heavy_function_run_on_another_architecture(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_all(checkout, "xyz")
    monkeypatch.setattr(long_tests.platform, "machine", lambda: "another")
    assert run(checkout, "xyz") == "xyz"


@pytest.mark.usefixtures("no_day")
@pytest.mark.parametrize("names", ["xyzw", "xy", "xyw"])
def test_other_cases_of_a_heavy_function_are_another_test(checkout: Path, names: str) -> None:
    """As an optional package or a compiler that is there makes them."""
    ran_all(checkout, "xyz")
    assert run(checkout, "zyx") == ""  # in whatever order
    assert run(checkout, names) == names


def test_cases_of_a_heavy_function_have_their_day(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    ran_all(checkout, names)
    found = []
    for day in range(739_000, 739_000 + long_tests.AGAIN):
        monkeypatch.setenv("GRADC_TEST_DAY", str(day))
        found += run(checkout, names)
    assert sorted(found) == sorted(names)
