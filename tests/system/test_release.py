"""What a release promises beside its code: types that checkers see, and a wheel that has all that runs.

``make release`` builds it and tries it in fresh environments.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import gradc
from tests.release import user

ROOT = Path(__file__).resolve().parents[2]


def test_checkers_see_the_public_names() -> None:
    """What stands under TYPE_CHECKING is what is imported at run time."""
    tree = ast.parse((ROOT / "gradc" / "__init__.py").read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found: dict[str, str] = {}
    for statement in seen.body:
        assert isinstance(statement, ast.ImportFrom) and all(n.asname == n.name for n in statement.names)
        found |= {name.name: statement.module or "" for name in statement.names}
    modules = dict.fromkeys((*gradc._MODULES, "torch", "onnx"), "")
    others = {name: package for name, (package, _) in gradc._WITH_OTHERS.items() if name.startswith("from_")}
    assert found == {**gradc._PUBLIC, **modules, **others}
    assert (ROOT / "gradc" / "py.typed").is_file()


def test_a_typed_users_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    user.main()
    assert re.fullmatch(r"loss 11\.276\d to 7\.207\d\n", capsys.readouterr().out)


def test_make_lint_checks_the_types_of_a_users_code() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/release/user.py" in settings["files"]
    assert any("tests.release.user" in each["module"] for each in settings["overrides"])
