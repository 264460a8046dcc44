"""``pytest -k NAME`` leaves out files that have no test of that name, and never one that may have."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import durations
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


def test_what_tests_took_is_known_as_far_as_it_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "build" / "durations.json"
    assert durations.known(path) == {}
    known_names.write(path, {"a": 1, "b": 0.5, "c": -1, "d": math.inf, "e": math.nan, "f": "1", "g": None, "h": True})
    assert durations.known(path) == {"a": 1.0, "b": 0.5}
    for text in ("", "{", "[1]", "1", '{"a": 1', '{"a": [1]}', f'{{"a": {"9" * 400}}}', "[" * 100_000, "\ud800"):
        path.write_text(text, errors="surrogatepass")
        assert durations.known(path) == {}


def test_one_slow_run_at_most_doubles_what_a_test_takes() -> None:
    seconds = durations.updated({"a": 1.0, "b": 0.25, "c": 3.0, "z": 0.0}, {"a": 0.5, "b": 7.0, "n": 2.0, "z": 0.1})
    assert seconds == {"a": 0.5, "b": 0.5, "c": 3.0, "n": 2.0, "z": 0.1}


def test_each_function_has_a_test_before_any_has_two() -> None:
    tests = {"f": {"0": 0.5, "1": 0.25, "2": 0.25}, "g": {"0": 2.0, "1": 8.0}, "h": {"0": 0.1, "1": 0.2}}
    seconds = {f"t.py::{name}[{case}]": each for name, cases in tests.items() for case, each in cases.items()}

    def of(limit: float, **more: float) -> str:
        kept = durations.chosen(reversed(seconds), {**seconds, **more}, limit)
        return " ".join(test.removeprefix("t.py::") for test in seconds if test in kept)

    assert of(0.0) == of(0.1) == "h[0]"  # at least one
    assert of(0.4) == "f[1] h[0]"
    assert of(0.7) == "f[1] h[0] h[1]"
    assert of(2.5) == "f[1] g[0] h[0]"  # the first of each, where there would be time for five others
    assert of(2.6) == "f[1] g[0] h[0] h[1]"
    assert of(3.4) == "f[0] f[1] f[2] g[0] h[0] h[1]" and of(20.0) == " ".join(k[6:] for k in seconds)
    assert durations.chosen([], seconds, 5.0) == set()


def test_a_test_that_never_ran_takes_what_is_usual() -> None:
    """Of its function, or of a test that is not slow."""
    seconds = {"t.py::f[0]": 1.0, "t.py::f[1]": 3.0, "t.py::f[2]": 9.0, "t.py::fg[0]": 0.1}
    new = [f"t.py::f[new {k}]" for k in range(9)]
    assert durations.chosen(new, seconds, 8.9) == {*new[:2]} and durations.chosen(new, seconds, 9.0) == {*new[:3]}
    other = [f"t.py::g[{k}]" for k in range(9)]
    assert durations.chosen(other, seconds, 4.5 * durations.UNKNOWN) == {*other[:4]}


def test_the_time_for_tests_is_what_the_start_leaves() -> None:
    assert durations.budget({}) == durations.WANTED - durations.USUAL_START
    assert durations.budget({durations.START: 2.5}) == durations.WANTED - 2.5
    assert durations.budget({durations.START: 20.0}) == durations.LEAST


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


def checkout(root: Path) -> Path:
    """The folder of tests of a checkout that has none yet."""
    here = root / "tests"
    here.mkdir()
    for file in ("conftest.py", "durations.py", "known_names.py", "long_tests.py", "slow.txt", "watchdog.py"):
        shutil.copy(Path(known_names.__file__).parent / file, here)
    (root / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\nmarkers =\n"
        + "".join(f"    {name}: its\n" for name in ("optimised", "compiles", "long", "gpu", "slow"))
    )
    return here


def test_a_new_case_of_an_unchanged_file_is_found(tmp_path: Path) -> None:
    """Another file has a test of that name, and the file has not changed, but the list that it goes through has."""
    here = checkout(tmp_path)
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
    (here / "records.py").write_text("OPS = ['sum']\n")
    assert found("tests/test_mean.py") == ["test_mean.py::test_mean"]  # whose names alone are known now
    assert found("-k", "sum") == ["test_ops.py::test_op[sum]"] and times() == 5
    assert found("-k", "mean") == ["test_mean.py::test_mean"] and times() == 5


SUITE = {
    "test_ops.py": """
        import pytest

        @pytest.mark.parametrize("op", ["sum", "cumsum", "le", "leaky_relu", "log_softmax", "softmax-f32", "a.sum.b"])
        def test_op(op): pass

        @pytest.mark.parametrize("case", ["sum", "sum-f64", "table"])
        def test_takes_long(case): pass

        @pytest.mark.long
        @pytest.mark.parametrize("case", ["mean", "mean-f64"])
        def test_is_long(case): pass

        @pytest.mark.parametrize("case", ["sum of rows"])
        def test_a(case): pass

        @pytest.mark.parametrize("sizes", range(5))
        def test_exp(sizes): pass

        def test_sum_of_rows(): pass
        def test_Sum(): pass
    """,
    "test_le.py": "def test_bounds(): pass",
    "test_lengths.py": "def test_softmax(): pass",
}
OF_SUM = {"test_op[sum]", "test_op[a.sum.b]", "test_takes_long[sum]", "test_Sum"}
OF_EXP = [f"test_exp[{sizes}]" for sizes in range(5)]
EVERY = {
    *OF_EXP,
    *(f"test_op[{name}]" for name in ("cumsum", "le", "leaky_relu", "log_softmax", "softmax-f32")),
    *(f"test_takes_long[{name}]" for name in ("sum-f64", "table")),
    *(
        "test_a[sum of rows]",
        "test_is_long[mean]",
        "test_is_long[mean-f64]",
        "test_sum_of_rows",
        "test_bounds",
        "test_softmax",
        *OF_SUM,
    ),
}
BY_OPS: dict[tuple[str, ...], set[str]] = {
    ("-k", "sum"): OF_SUM,
    ("-k", "SUM"): OF_SUM,
    ("-k", "le"): {"test_op[le]", "test_bounds"},
    ("-k", "mean"): {"test_is_long[mean]"},
    ("-k", "softmax"): {"test_op[softmax-f32]", "test_softmax"},
    ("-k", "not sum"): EVERY - OF_SUM,
    ("-k", "sum and not (a.sum or takes)"): {"test_op[sum]", "test_Sum"},
    ("-k", "(le or sum) and test_op["): {"test_op[le]", "test_op[sum]", "test_op[a.sum.b]"},
    ("-k", "exp or le"): {*OF_EXP, "test_op[le]", "test_bounds"},
    ("-k", "exp", "--lf"): {*OF_EXP},
    ("-k", "exp and test_"): {*OF_EXP},
    ("-k", "exp", "-m", "not long", "--quick"): {OF_EXP[0], OF_EXP[-1]},
    ("-k", "not (sum or le)"): EVERY - OF_SUM - {"test_op[le]", "test_bounds"},
    ("-k", "lengths or mean"): {"test_softmax", "test_is_long[mean]"},
}
AS_PYTEST_SAYS: dict[tuple[str, ...], set[str]] = {
    (): EVERY,
    ("-k", "su"): {name for name in EVERY if "su" in name.lower()},
    ("-k", "sum_"): {"test_sum_of_rows"},
    ("-k", "[le"): {"test_op[le]", "test_op[leaky_relu]"},
    ("-k", "F64"): {"test_takes_long[sum-f64]", "test_is_long[mean-f64]"},
    ("-k", "exp", "--all"): {*OF_EXP},
    ("-k", "sum", "--all"): {name for name in EVERY if "sum" in name.lower()},
    ("-k", "mean", "tests/test_ops.py"): {"test_is_long[mean]", "test_is_long[mean-f64]"},
    ("-k", "sum", "tests/test_ops.py::test_takes_long"): {"test_takes_long[sum]", "test_takes_long[sum-f64]"},
}


def test_the_name_of_an_op_means_the_tests_of_that_op(tmp_path: Path) -> None:
    here = checkout(tmp_path)
    (here / "slow.txt").write_text("test_ops.py::test_takes_long\n")
    for name, text in SUITE.items():
        (here / name).write_text(textwrap.dedent(text))
    script = f"""
import pytest
for arguments in {[*AS_PYTEST_SAYS, *BY_OPS]}:
    print("arguments", flush=True)
    pytest.main(["-q", "--collect-only", *arguments])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    runs = done.stdout.split("arguments\n")[1:]
    for (arguments, wanted), output in zip((AS_PYTEST_SAYS | BY_OPS).items(), runs, strict=True):
        found = {line.rpartition("::")[2] for line in output.splitlines() if "::" in line}
        assert found == wanted, f"{arguments}\n{output}"
        assert ("-k with the name of an op" in output) == (arguments in BY_OPS), output


def test_an_ops_tests_are_as_many_as_there_is_time_for(tmp_path: Path) -> None:
    """As runs before say, and what they say is kept."""
    here, kept = checkout(tmp_path), tmp_path / "build" / "durations.json"
    text = """
        import pytest, time

        @pytest.mark.parametrize("case", range(9))
        def test_exp(case):
            end = time.process_time() + 0.2 * (case == 3)
            while time.process_time() < end:
                pass
            assert case != 4

        @pytest.mark.skip(reason="long")
        @pytest.mark.parametrize("case", range(9))
        def test_log(case): pass
    """
    (here / "test_ops.py").write_text(textwrap.dedent(text))
    (here / "test_exp.py").write_text("def test_more(): pass\ndef test_log(): pass\n")

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout
        return done.stdout

    def named(output: str) -> set[str]:
        return {word.rpartition("::")[2] for word in output.split() if "::" in word}

    cases = {f"test_exp[{case}]" for case in range(9)}
    output = run("-m", "pytest", "-v", "-rN", "-k", "exp")
    assert named(output) == {*cases, "test_more", "test_log"} and "left out" not in output, output
    took = durations.known(kept)
    assert took.keys() == {f"tests/test_ops.py::{case}" for case in cases - {"test_exp[4]"}} | {
        f"tests/test_exp.py::{name}" for name in ("test_more", "test_log")
    }
    assert took["tests/test_ops.py::test_exp[3]"] >= 0.2 > took["tests/test_ops.py::test_exp[2]"]

    took |= {f"tests/test_ops.py::test_exp[{k}]": (2.0 if k < 6 else 0.25) for k in range(9)}
    known_names.write(kept, {**took, durations.START: durations.WANTED - 1.1})
    some = {"test_exp[6]", "test_exp[7]", "test_exp[8]", "test_more", "test_log"}  # test_exp.py is exp's
    wanted: dict[tuple[str, ...], set[str]] = {
        ("-k", "exp"): some,
        ("-k", "exp or log"): {*some, *(f"test_log[{case}]" for case in range(9))},  # to skip takes no time
        ("-k", "exp", "--all"): {*cases, "test_more", "test_log"},
        ("-k", "exp", "--lf"): {"test_exp[4]"},
        ("-k", "exp", "--quick"): {"test_exp[0]", "test_exp[8]", "test_more", "test_log"},
        ("-k", "exp and test_ops"): cases,
        ("-k", "exp", "tests/test_ops.py"): cases,
    }
    mains = (f"print('run'); pytest.main({['-q', '--collect-only', *arguments]})" for arguments in wanted)
    outputs = run("-c", "\n".join(("import pytest", *mains))).split("run\n")[1:]
    for (arguments, each), output in zip(wanted.items(), outputs, strict=True):
        assert named(output) == each, f"{arguments}\n{output}"
        assert (f"take {durations.WANTED:g} s (6 left out); with --all" in output) == (
            each >= some and not each >= cases
        ), output
    if importlib.util.find_spec("xdist"):
        output = run("-m", "pytest", "-v", "-rN", "-n", "1", "-k", "exp")
        assert named(output) == some and f"take {durations.WANTED:g} s (the rest left out); with --all" in output, (
            output
        )
        now = durations.known(kept)
        assert now["tests/test_ops.py::test_exp[6]"] < 0.25 and now["tests/test_ops.py::test_exp[0]"] == 2.0


def test_a_change_of_the_package_has_no_file_read_that_had_no_test_of_an_op(
    names: dict[str, tuple[str, str]],
) -> None:
    """Where the names of ops alone choose: the tests of another expression are all of them."""
    root = known_names.ROOT
    (root / "gradc").mkdir()
    (root / "tests").mkdir()
    mean = known_names.word("mean")

    def keep() -> None:
        forget()
        for file, name in (("test_sum.py", f"test_mean{mean}"), ("test_sort.py", "test_order")):
            known_names.keep([item(root / file, name)])

    keep()
    assert left_out(mean) == left_out("mean") == {"test_sort.py"}
    (root / "gradc" / "rules.py").write_text("RULES = []\n")
    assert left_out(mean) == {"test_sort.py"} and left_out("mean") == left_out(f"{mean} and order") == set()
    assert left_out(known_names.word("sum")) == set()  # which no file had
    for changed in ("test_sort.py", "tests/registry.py", "pyproject.toml"):
        keep()
        assert left_out(mean) == {"test_sort.py"}
        (root / changed).write_text("# changed\n")
        assert left_out(mean) == set()


def test_workers_run_the_same_tests(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    here = checkout(tmp_path)
    (here / "test_ops.py").write_text(textwrap.dedent(SUITE["test_ops.py"]))
    command = [sys.executable, "-m", "pytest", "-v", "-n", "1", "-k", "exp or Sum"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    ran = {line.rpartition("::")[2].strip() for line in done.stdout.splitlines() if "PASSED" in line}
    assert ran == {*OF_EXP, *OF_SUM, "test_takes_long[sum-f64]"}, done.stdout  # none of slow.txt's


def test_a_package_that_cannot_be_imported_is_what_its_tests_say(tmp_path: Path) -> None:
    here, package = checkout(tmp_path), tmp_path / "gradc"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('half written')\n")
    (here / "test_ops.py").write_text("import gradc\ndef test_sum(): pass\n")
    (here / "test_files.py").write_text("def test_sum(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-k", "sum"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == pytest.ExitCode.INTERRUPTED and "INTERNAL" not in done.stdout, done.stdout + done.stderr
    assert "test_files.py::test_sum" in done.stdout and "RuntimeError: half written" in done.stdout, done.stdout
