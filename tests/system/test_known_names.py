"""``pytest -k NAME`` leaves out files that have no test of that name, and never one that may have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import known_names
import pytest


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    monkeypatch.setattr(known_names, "ROOT", tmp_path)
    monkeypatch.setattr(known_names, "NAMES", tmp_path / "build" / "names.json")
    assert known_names.known() == {}
    tests = {"test_sum.py": ("test_sums[f32]", "test_mean"), "test_sort.py": ("test_Order[i8]",)}
    for file, functions in tests.items():
        (tmp_path / file).write_text(f"# {file}\n")
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


def test_a_file_that_has_changed_is_read(names: dict[str, tuple[str, str]]) -> None:
    (known_names.ROOT / "test_sort.py").write_text("# changed\n")
    assert known_names.without("mean", names) == set()
    (known_names.ROOT / "test_sort.py").unlink()
    assert known_names.without("mean", names) == set()


def test_a_damaged_list_is_none(names: dict[str, tuple[str, str]]) -> None:
    for text in ("", "{", "[1]", '{"a": 1}'):
        known_names.NAMES.write_text(text)
        assert known_names.known() == {}
