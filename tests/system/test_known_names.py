"""``pytest -k NAME`` leaves out files that have no test of that name, and never one that may have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import known_names
import pytest


def forget() -> None:
    """Files are read anew."""
    for kept in (known_names.contents, known_names.surroundings, known_names.digests):
        kept.cache_clear()


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    monkeypatch.setattr(known_names, "ROOT", tmp_path)
    monkeypatch.setattr(known_names, "NAMES", tmp_path / "build" / "names.json")
    assert known_names.known() == {}
    tests = {"test_sum.py": ("test_sums[f32]", "test_mean"), "test_sort.py": ("test_Order[i8]",)}
    for file in tests:
        (tmp_path / file).write_text(f"# {file}\n")
    (tmp_path / "records.py").write_text("OPS = ['sum']\n")
    for file, functions in tests.items():
        known_names.keep([item(tmp_path / file, name) for name in functions])  # type: ignore[list-item]
    return known_names.known()


def item(path: Path, name: str) -> Any:
    marks = [SimpleNamespace(name="slow")] if "mean" in name else []
    return SimpleNamespace(
        path=path,
        nodeid=f"{path.name}::{name}",
        listnames=lambda: [path.name, name],
        listextrakeywords=lambda: set(),
        iter_markers=lambda: marks,
    )


@pytest.mark.parametrize(
    ("expression", "left_out"),
    [
        ("", set()),
        ("mean", {"test_sort.py"}),
        ("MEAN", {"test_sort.py"}),
        ("order", {"test_sum.py"}),
        ("slow", {"test_sort.py"}),
        ("f32 and sums", {"test_sort.py"}),
        ("(i8)", {"test_sum.py"}),
        ("f32 or i8", set()),
        ("test_s", set()),
        ("not mean", set()),
        ("newest", set()),  # in a file that is known, perhaps, by what has changed beside it
        ("mean or newest", set()),
    ],
)
def test_files_without_a_name(names: dict[str, tuple[str, str]], expression: str, left_out: set[str]) -> None:
    assert known_names.without(expression, names) == left_out


def left_out(expression: str) -> set[str]:
    forget()
    return known_names.without(expression, known_names.known())


def test_a_file_that_has_changed_is_read(names: dict[str, tuple[str, str]]) -> None:
    (known_names.ROOT / "test_sum.py").write_text("# another test: the other file's names hold\n")
    assert left_out("mean") == {"test_sort.py"} and left_out("order") == set()
    (known_names.ROOT / "test_sort.py").write_text("# changed\n")
    assert left_out("mean") == set()
    (known_names.ROOT / "test_sort.py").unlink()
    assert left_out("mean") == set()


@pytest.mark.parametrize(
    "change", ["a record", "a new file", "a file less", "an imported test", "a tool", "a variable"]
)
def test_names_hold_as_long_as_what_makes_them(
    names: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A file whose tests are parametrised by what has changed may have one of that name now."""
    root = known_names.ROOT
    tools = root / ".tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    (root / "test_sort.py").write_text("from test_sum import CASES\n")
    forget()
    for file, name in (("test_sum.py", "test_mean"), ("test_sort.py", "test_order")):
        known_names.keep([item(root / file, name)])
    assert left_out("mean") == {"test_sort.py"}
    if change == "a variable":
        monkeypatch.setenv("GRADC_SLOW_TESTS", "1")
    elif change == "a file less":
        (root / "records.py").unlink()
    else:
        file = {"a record": "records.py", "a new file": "more/case.onnx", "a tool": ".tools/clang"}.get(
            change, "test_sum.py"
        )
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text("OPS = ['sum', 'mean']\n")
    assert left_out("mean") == set()


def test_a_damaged_list_is_none(names: dict[str, tuple[str, str]]) -> None:
    for text in ("", "{", "[1]", '{"a": 1}', '{"a": [1, 2]}', '{"a": ["1", ["b"]]}', "\ud800"):
        known_names.NAMES.write_text(text, errors="surrogatepass")
        assert known_names.known() == {}


def test_runs_at_once_write_whole_lists(names: dict[str, tuple[str, str]]) -> None:
    """Of which the last one stays, and nothing beside it."""
    root, n = known_names.ROOT, 60

    def run(k: int) -> None:
        known_names.keep([item(root / "test_sum.py", f"test_{k}_" + "x" * 100 * k)])
        assert set(known_names.known()) == {"test_sum.py", "test_sort.py"}

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(n)))
    assert os.listdir(known_names.NAMES.parent) == ["names.json"]


def test_a_checkout_that_cannot_be_written(names: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    text = known_names.NAMES.read_text()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(json, "dump", full)
    known_names.keep([item(known_names.ROOT / "test_sum.py", "test_more")])
    assert known_names.NAMES.read_text() == text and os.listdir(known_names.NAMES.parent) == ["names.json"]
    monkeypatch.setattr(known_names, "NAMES", known_names.ROOT / "test_sum.py" / "names.json")  # a folder that is none
    known_names.keep([item(known_names.ROOT / "test_sum.py", "test_more")])


def test_a_new_case_of_an_unchanged_file_is_found(tmp_path: Path) -> None:
    """Another file has a test of that name, and the file has not changed, but the list that it goes through has."""
    here = tmp_path / "tests"
    here.mkdir()
    for file in ("conftest.py", "known_names.py", "long_tests.py", "slow.txt", "watchdog.py"):
        shutil.copy(Path(known_names.__file__).parent / file, here)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\nmarkers =\n"
        + "".join(f"    {name}: its\n" for name in ("optimised", "compiles", "long", "gpu", "slow"))
    )
    (here / "records.py").write_text("OPS = ['sum']\n")
    (here / "test_ops.py").write_text(
        "import pytest, records\nopen('.read', 'a').write('x')\n"
        "@pytest.mark.parametrize('op', records.OPS)\ndef test_op(op): pass\n"
    )
    (here / "test_mean.py").write_text("def test_mean(): pass\n")

    def found(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        return [line.partition("/")[2] for line in done.stdout.splitlines() if "::" in line]

    def times() -> int:
        return len((tmp_path / ".read").read_text())

    assert found() == ["test_mean.py::test_mean", "test_ops.py::test_op[sum]"] and times() == 1
    assert found("-k", "mean") == ["test_mean.py::test_mean"] and times() == 1
    assert found("-k", "mean", "-o", "python_functions=test check") == ["test_mean.py::test_mean"] and times() == 2
    (here / "records.py").write_text("OPS = ['sum', 'mean']\n")
    assert found("-k", "mean") == ["test_mean.py::test_mean", "test_ops.py::test_op[mean]"] and times() == 3
    assert found("-k", "sum") == ["test_ops.py::test_op[sum]"] and times() == 4
