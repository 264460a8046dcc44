"""Tables in files: whichever moment a process ends at, what is opened next is a whole step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import ops, optim
from gradc.errors import FileError, GradcError, IndexOutOfRange, InvalidProblem
from gradc.ir.types import dtype as dtype_of
from gradc.module import table_files
from gradc.module.table_files import TableFiles
from gradc.optim.optimizer import STEP, parameter_of

TYPES = {"users": "f32[50,3]", "state.sum.users": "f32[50]", "items": "bf16[7,2]", "count": "i64[]", "top": "f32[2,2]"}
TABLES = ["users", "items"]


def written(tables: TableFiles, number: int) -> Iterator[None]:
    """What step ``number`` does, array by array."""
    rng = np.random.default_rng(number)
    rows = rows_of(number)
    for name, array in tables.arrays.items():
        table = next((t for t in TABLES if name.endswith(t)), None)
        if table is None:
            array[...] = rng.integers(0, 99, array.shape)
        elif table in rows:
            array[rows[table]] = rng.integers(0, 99, (len(rows[table]), *array.shape[1:]))
        yield


def rows_of(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(1000 + number)
    named = {"users": rng.integers(0, 50, 9)} if number % 3 else {}
    return named | {"items": rng.permutation(7)[:3]}


def after(steps: int, tmp_path: Path) -> dict[str, Any]:
    """The arrays after whole steps, of files that nothing happened to."""
    tables = TableFiles.create(tmp_path / f"whole{steps}", TYPES, TABLES)
    for number in range(steps):
        with tables.step(rows_of(number)):
            list(written(tables, number))
    return {name: np.array(x) for name, x in tables.arrays.items()}


def assert_same(arrays: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert arrays.keys() == wanted.keys()
    for name, x in arrays.items():
        assert x.dtype == wanted[name].dtype and np.array_equal(np.asarray(x), wanted[name]), name


@pytest.mark.parametrize("durable", [False, True])
def test_whatever_moment_a_process_ends_at_a_whole_step_is_found(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the folder before and after each call of the system that changes it, and between any two arrays."""
    tables = TableFiles.create(tmp_path / "tables", TYPES, TABLES, durable=durable)
    copies: list[tuple[int, Path]] = []
    current = 0

    def copy() -> None:
        place = tmp_path / f"copy{len(copies)}"
        shutil.copytree(tmp_path / "tables", place)
        copies.append((current, place))

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            copy()
            try:
                return real(*args, **options)
            finally:
                copy()

        monkeypatch.setattr(os, name, call)

    watched("replace")
    watched("unlink")
    for current in range(4):
        with tables.step(rows_of(current)):
            for _ in written(tables, current):
                copy()
        copy()
    monkeypatch.undo()
    with_step = [after(n, tmp_path) for n in range(5)]
    found = set()
    for number, place in copies:
        opened = TableFiles.open(place)
        assert opened.number in (number, number + 1)
        found.add((number, opened.number))
        assert_same(opened.arrays, with_step[opened.number])
        opened.close()
        again = TableFiles.open(place)  # of one that was opened before its end
        assert_same(again.arrays, with_step[again.number])
    assert found == {(n, m) for n in range(4) for m in (n, n + 1)} and len(copies) > 40


CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
import test_table_files as case
tables = case.TableFiles.open(sys.argv[1])
while True:
    number = tables.number
    print(number, flush=True)
    with tables.step(case.rows_of(number)):
        list(case.written(tables, number))
"""


def test_a_killed_process_leaves_a_whole_step(tmp_path: Path) -> None:
    TableFiles.create(tmp_path / "tables", TYPES, TABLES).close()
    paths = [str(Path(__file__).parent), str(Path(gradc.__file__).parents[1])]
    seen = [0]
    for _ in range(4):
        args = [sys.executable, "-c", CHILD, str(tmp_path / "tables"), *paths]
        with subprocess.Popen(args, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(3):
                assert child.stdout.readline()
            with pytest.raises(InvalidProblem, match="open already"):
                TableFiles.open(tmp_path / "tables")
            time.sleep(random.uniform(0, 0.01))
            child.send_signal(signal.SIGKILL)
        tables = TableFiles.open(tmp_path / "tables")
        seen.append(tables.number)
        fresh = TableFiles.create(tmp_path / f"fresh{len(seen)}", TYPES, TABLES)
        for number in range(seen[-1]):
            list(written(fresh, number))
        assert_same(tables.arrays, fresh.arrays)
        tables.close()
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_step_writes_its_rows_back(error: type[BaseException], tmp_path: Path) -> None:
    wanted = after(1, tmp_path)
    tables = TableFiles.open(tmp_path / "whole1")
    for stop in range(len(TYPES)):
        with pytest.raises(error), tables.step(rows_of(1)):
            for position, _ in enumerate(written(tables, 1)):
                if position == stop:
                    raise error
        assert tables.number == 1
        assert_same(tables.arrays, wanted)
    with tables.step(rows_of(1)):
        list(written(tables, 1))
    assert tables.number == 2
    assert_same(tables.arrays, after(2, tmp_path))


def test_arrays_are_copied_and_are_files_of_numpy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = {
        "a": rng.standard_normal((4, 3)).astype(np.float32),
        "b": rng.standard_normal((4, 3)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 5), np.float16),
        "i": np.array(3),
        "flags": rng.random((2, 2)) < 0.5,
    }
    tables = TableFiles.create(tmp_path, given, ["a", "b", "empty"])
    for name, x in given.items():
        assert tables.arrays[name].dtype == x.dtype and np.array_equal(np.asarray(tables.arrays[name]), x)
        assert np.load(tmp_path / f"{name}.npy").tobytes() == x.tobytes()
    assert not any(np.shares_memory(tables.arrays[name], x) for name, x in given.items())
    with tables.step({"empty": [], "a": np.array([[3, 0], [0, 0]])}):
        pass
    assert tables.number == 1


def test_a_journal_has_the_named_rows_and_no_table(tmp_path: Path) -> None:
    types = {"big": "f32[1000000,16]", "state.sum.big": "f32[1000000]", "other": "f32[1000000,16]"}
    tables = TableFiles.create(tmp_path, types, ["big", "other"])
    with tables.step({"big": [5, 5, 7]}):
        assert (tmp_path / "journal").stat().st_size < 500
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_module_trains_tables_in_files(dtype: str, tmp_path: Path) -> None:
    """The same bits as arrays in memory, and after a call that was refused the bits of before."""
    graph = gradc.trace(
        lambda w, i, g: ops.sum(ops.embedding(i, ops.cast(w, "f32")) * g), w=f"{dtype}[V,8]", i="i64[N]", g="f32[N,8]"
    )
    update = {"w": optim.rowwise_adagrad(0.1, stochastic=dtype != "f32")}
    module = gradc.compile(graph, ["w"], "cpu", update=update, sparse="w")
    rng = np.random.default_rng(0)
    start = rng.standard_normal((500, 8)).astype(dtype_of(dtype).np)
    arrays: dict[str, Any] = {"w": start, "state.sum.w": np.zeros(500, np.float32), "state.step": np.array(0)}
    tables = TableFiles.create(tmp_path, arrays, ["w"])
    arrays = {name: x.copy() for name, x in arrays.items()}
    for _ in range(5):
        i, g = rng.integers(0, 500, 20), rng.standard_normal((20, 8)).astype(np.float32)
        module(**arrays, i=i, g=g)
        with tables.step({"w": i}):
            module(**tables.arrays, i=i, g=g)
        assert_same(tables.arrays, arrays)
        with pytest.raises(IndexOutOfRange), tables.step({"w": i}):
            module(**tables.arrays, i=np.where(np.arange(20) == 7, 500, i), g=g)
        assert_same(tables.arrays, arrays)
    assert not np.array_equal(np.asarray(arrays["w"]), start) and int(arrays["state.step"]) == 5
    tables.close()
    assert_same(TableFiles.open(tmp_path).arrays, arrays)


@pytest.mark.parametrize(
    ("types", "tables", "said"),
    [
        ({"../w": "f32[3,4]"}, [], "no name"),
        ({"": "f32[3]"}, [], "no name"),
        ({"w": "f32[N,4]"}, ["w"], "sizes that are numbers"),
        ({"w": "f32[3,4]"}, ["v"], "'v', which is missing"),
        ({"w": "f32[]"}, ["w"], "has no rows"),
        (
            {"w": "f32[3,4]", "state.sum.w": "f32[4]"},
            ["w"],
            r"and follows w, .*\{'state.sum.w': None\} says that it does",
        ),
        ({"w": "float[3]"}, [], "not a type"),
    ],
)
def test_what_cannot_be_a_table_is_refused(types: Any, tables: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(GradcError, match=said):
        TableFiles.create(tmp_path / "new", types, tables)
    assert not (tmp_path / "new").exists()


def test_rows_that_a_table_has_not_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    tables = TableFiles.create(tmp_path, TYPES, TABLES)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for rows, said in (
        ({"users": [50]}, "50 rows, not row 50"),
        ({"users": [3, -1]}, "not row -1"),
        ({"users": [0.5]}, "integers, not float64"),
        ({"users": np.array([2**64 - 1], np.uint64)}, "not row 18446744073709551615"),
        ({"top": [0]}, "no table"),
        ({"state.sum.users": [0]}, "no table"),
    ):
        with pytest.raises(InvalidProblem, match=said), tables.step(rows):
            raise AssertionError
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    for rows in (None, ["users"], "users"):
        with pytest.raises(InvalidProblem, match="a mapping, not"), tables.step(rows):  # type: ignore[arg-type]
            raise AssertionError
    with pytest.raises(InvalidProblem, match="a step in a step"), tables.step({}), tables.step({}):
        raise AssertionError
    assert tables.number == 0


def test_folders_without_tables_or_with_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match="has no tables"):
        TableFiles.open(tmp_path)
    tables = TableFiles.create(tmp_path, TYPES, TABLES)
    with pytest.raises(InvalidProblem, match="has tables already"):
        TableFiles.create(tmp_path, TYPES, TABLES)
    with pytest.raises(InvalidProblem, match="open already"):
        TableFiles.open(tmp_path)
    tables.close()
    np.save(tmp_path / "top.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(InvalidProblem, match=r"top.npy has float32 \(2, 3\), and not f32\[2,2\]"):
        TableFiles.open(tmp_path)
    np.save(tmp_path / "top.npy", np.zeros((2, 2), np.float32, "F"))  # a module would copy it, and write the copy
    with pytest.raises(InvalidProblem, match=r"top.npy has float32 \(2, 2\) in Fortran order, and not f32\[2,2\]"):
        TableFiles.open(tmp_path)
    np.save(tmp_path / "top.npy", np.zeros((2, 2), np.float32))
    os.truncate(tmp_path / "top.npy", cut := (tmp_path / "top.npy").stat().st_size - 5)
    with pytest.raises(InvalidProblem, match=r"top\.npy is not the file of f32\[2,2\]: it ends 5 bytes early"):
        TableFiles.open(tmp_path)
    assert (tmp_path / "top.npy").stat().st_size == cut  # NumPy fills it up with zeros, and says nothing
    for there, instead in ((b"(2, 2), }   ", b"(True, 4), }"), (b"(2, 2), }", b"(2, 2),  "), (b"'shape'", b"'sh\0pe'")):
        np.save(tmp_path / "top.npy", np.zeros((2, 2), np.float32))
        header = (tmp_path / "top.npy").read_bytes()
        assert there in header
        (tmp_path / "top.npy").write_bytes(header.replace(there, instead))
        with pytest.raises(InvalidProblem, match=r"top\.npy is not the file of f32\[2,2\]"):
            TableFiles.open(tmp_path)
    (tmp_path / "top.npy").unlink()
    with pytest.raises(InvalidProblem, match=r"top\.npy is not the file"):
        TableFiles.open(tmp_path)
    (tmp_path / "tables.json").write_text("{")
    with pytest.raises(InvalidProblem, match="damaged"):
        TableFiles.open(tmp_path)
    (tmp_path / "tables.json").unlink()
    (tmp_path / "tables.json").mkdir()
    with pytest.raises(InvalidProblem, match=r"tables\.json is damaged"):
        TableFiles.open(tmp_path)


def test_the_state_of_a_table_follows_it_and_what_is_called_alike_does_not(tmp_path: Path) -> None:
    """By the names of a step; ``follows`` says it of others, and that a state's name means none."""
    types = {"w": "f32[9,1]", "a.w": "f32[9,1]", "state.sum.a.w": "f32[9]", "state.sum.w": "f32[9]"}
    types |= {"b.w": "f32[9]", "state.w": "f32[9]", "other": "f32[9]", "state.mean.w": "f32[9]", "sum.w": "f32[4]"}
    follows = {"other": "w", "state.mean.w": None}
    TableFiles.create(tmp_path, types, ["w", "a.w"], follows=follows).close()
    tables = TableFiles.open(tmp_path)
    named = {"w": [2], "a.w": [4]}
    with pytest.raises(KeyboardInterrupt), tables.step(named):
        for array in tables.arrays.values():
            array[...] = 1
        raise KeyboardInterrupt
    kept = {
        name: np.flatnonzero(array[..., 0] == 0 if array.ndim > 1 else array == 0)
        for name, array in tables.arrays.items()
    }
    by_rows = {"w": 2, "state.sum.w": 2, "other": 2, "a.w": 4, "state.sum.a.w": 4}
    for name, array in tables.arrays.items():
        assert kept[name].tolist() == ([by_rows[name]] if name in by_rows else [*range(len(array))]), name


def test_every_state_of_a_step_follows_its_table() -> None:
    graph = gradc.trace(
        lambda t, i, g: ops.sum(ops.embedding(i, t["a.b"]) * g), t={"a.b": "f32[V,8]"}, i="i64[N]", g="f32[N,8]"
    )
    module = gradc.compile(graph, ["t"], "numpy", update={"t": optim.adam(0.1)}, sparse="t")
    table, *states = module.options.donate
    assert len(states) == 3 and [parameter_of(name) for name in states if name != STEP] == [table] * 2
    assert not parameter_of(STEP) and not parameter_of(table)


@pytest.mark.parametrize(
    ("follows", "said"),
    [
        ({"v": "w"}, "'v', which is missing"),
        ({"w": "w"}, "'w', which is a table"),
        ({"x": "y"}, "'x' follows 'y', which rows_of does not name"),
        ({"y": "w"}, "y is f32.4., and follows w"),
    ],
)
def test_what_nothing_can_follow_is_refused(follows: Any, said: str, tmp_path: Path) -> None:
    types = {"w": "f32[3,4]", "x": "f32[3]", "y": "f32[4]"}
    with pytest.raises(InvalidProblem, match=said):
        TableFiles.create(tmp_path / "new", types, ["w"], follows=follows)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("rows_of", "follows", "said"),
    [
        ("w", None, "a list of strings, not 'w'"),
        (None, None, "a list of strings, not None"),
        ([["w"]], None, "a list of strings, not"),
        (["w"], "x", "a mapping, not 'x'"),
        (["w"], [], "a mapping, not"),
        (["w"], {"x": ["w"]}, "'x' follows .'w'., which rows_of does not name"),
    ],
)
def test_what_names_no_arrays_is_refused(rows_of: Any, follows: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidProblem, match=said):
        TableFiles.create(tmp_path / "new", {"w": "f32[3,4]", "x": "f32[3]"}, rows_of, follows=follows)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "damage", [{"x": "v"}, {"x": ["w"]}, {"w": "x"}, {"w": None}, {"y": "w"}], ids=lambda damage: str(damage)
)
def test_a_manifest_of_tables_that_are_none_is_damaged(damage: dict[str, Any], tmp_path: Path) -> None:
    """Else no rows of an array would be kept before a step."""
    TableFiles.create(tmp_path, {"w": "f32[3,4]", "x": "f32[3]", "y": "f32[4]"}, ["w"], follows={"x": "w"}).close()
    path = tmp_path / "tables.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"follows": manifest["follows"] | damage}))
    with pytest.raises(InvalidProblem, match="follow"):
        TableFiles.open(tmp_path)


def test_names_of_one_file_are_refused_where_a_folder_takes_them_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that does not tell letters apart, if there is one, is imitated by what is asked of it."""
    types = {"w": "f32[3]", "W": "f32[3]"}
    if not table_files._ignores_case(tmp_path):
        tables = TableFiles.create(tmp_path / "both", types, [])
        tables.arrays["w"][...] = 1
        assert not tables.arrays["W"].any()
        real = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: real(path) or real(path.parent / path.name.lower()))
    with pytest.raises(InvalidProblem, match="w and W are one file of"):
        TableFiles.create(tmp_path, types, [])
    assert not [*tmp_path.glob("*.npy")]


# -- what went wrong once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_is_full_at_any_file_leaves_a_whole_step(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal's or the number's, and the next step begins with what the last whole one left."""
    tables = TableFiles.create(tmp_path / "tables", TYPES, TABLES)
    with tables.step(rows_of(0)):
        list(written(tables, 0))
    real, calls = os.replace, 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise OSError(errno.ENOSPC, "no space")
        real(*args)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match="no space"), tables.step(rows_of(1)):
        list(written(tables, 1))
    monkeypatch.undo()
    assert tables.number == 1
    assert_same(tables.arrays, after(1, tmp_path))


def test_what_the_roll_back_could_not_write_is_written_back_by_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = TableFiles.create(tmp_path / "tables", TYPES, TABLES)

    def interrupted(self: TableFiles) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tables.step(rows_of(0)):
        list(written(tables, 0))
        monkeypatch.setattr(TableFiles, "_recover", interrupted)
        raise ValueError
    monkeypatch.undo()
    with tables.step(rows_of(1)):
        assert_same(tables.arrays, after(0, tmp_path))


def test_a_relative_folder_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = TableFiles.create("tables", TYPES, TABLES)
    monkeypatch.chdir("/")
    with tables.step({}):
        pass
    assert tables.number == 1


def test_closed_tables_and_those_in_a_step_are_refused(tmp_path: Path) -> None:
    tables = TableFiles.create(tmp_path, TYPES, TABLES)
    with tables.step({}):
        with pytest.raises(InvalidProblem, match="not in it"):
            tables.close()
        with ThreadPoolExecutor() as pool, pytest.raises(InvalidProblem, match="a step in a step"):
            pool.submit(tables.step({}).__enter__).result()
    tables.close()
    tables.close()
    for rows in ({}, {"users": [0]}):
        with pytest.raises(InvalidProblem, match="was closed"), tables.step(rows):
            raise AssertionError
    assert TableFiles.open(tmp_path).number == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_neither_steps_nor_ends_a_step_nor_keeps_the_folder(tmp_path: Path) -> None:
    tables = TableFiles.create(tmp_path, TYPES, TABLES)
    reading, writing = os.pipe()
    pid = 0
    with contextlib.suppress(SystemExit), tables.step({"users": [3]}):
        tables.arrays["users"][3] = 1
        pid = os.fork()
        if pid == 0:
            raise SystemExit
    if pid == 0:
        try:
            with tables.step({}):
                os._exit(1)
        except InvalidProblem:
            os.close(writing)
            os.read(reading, 1)  # until the parent has closed, too
            os._exit(0)
    assert tables.number == 1 and tables.arrays["users"][3].tolist() == [1, 1, 1]
    tables.close()
    TableFiles.open(tmp_path).close()
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reading)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("journal", b""),
        ("journal", b"{}\n"),
        ("journal", b"\xff\n"),
        ("journal", b'{"step": 1, "kept": [["none", 1]]}\n'),
        ("journal", b'{"step": 1, "kept": [["items", 1]]}\n' + b"\x09" * 12),
        ("journal", b'{"step": "1", "kept": []}\n'),
        ("journal", b'{"kept": []}\n'),
        ("journal", b'{"step": 1, "kept": [["items", 1000000000000000]]}\n'),
        ("step", b""),
        ("step", b"-1"),
        ("tables.json", b'{"arrays": {"a": 7}, "rows_of": [], "follows": {"a": null}}'),
        ("tables.json", b"[" * 100_000),
        ("tables.json", b"[]"),
        ("tables.json", b"{}"),
    ],
)
def test_damaged_files_are_one_error_and_the_folder_stays_free(file: str, content: bytes, tmp_path: Path) -> None:
    TableFiles.create(tmp_path, TYPES, TABLES).close()
    whole = (tmp_path / file).read_bytes() if (tmp_path / file).exists() else None
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InvalidProblem, match="damaged") as found:
        TableFiles.open(tmp_path).number  # noqa: B018
    (tmp_path / file).unlink() if whole is None else (tmp_path / file).write_bytes(whole)
    assert found.value and TableFiles.open(tmp_path).number == 0  # while a traceback keeps what was tried


def test_files_made_anew_have_nothing_of_those_that_were_there(tmp_path: Path) -> None:
    tables = TableFiles.create(tmp_path / "tables", {"a": "f32[3]"}, ["a"])
    with tables.step({"a": [1]}):
        tables.arrays["a"][...] = 7
        shutil.copytree(tmp_path / "tables", tmp_path / "copy")
    (tmp_path / "copy" / "tables.json").unlink()
    given = np.load(tmp_path / "copy" / "a.npy", mmap_mode="r")
    made = TableFiles.create(tmp_path / "copy", {"a": given}, ["a"])  # its own file
    assert made.arrays["a"].tolist() == [7, 7, 7] and given.tolist() == [7, 7, 7]


def test_arrays_of_torch_and_of_the_other_byte_order_are_copied(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    given = {
        "b": torch.arange(4.0, dtype=torch.bfloat16),
        "p": torch.nn.Parameter(torch.ones(2, 3).t()),
        "big": np.arange(3, dtype=">f4"),
    }
    tables = TableFiles.create(tmp_path, given, ["b"])
    assert [x.tolist() for x in tables.arrays.values()] == [x.tolist() for x in given.values()]


def test_a_step_reads_the_rows_that_it_names_and_not_what_lies_around_them(tmp_path: Path) -> None:
    tables = TableFiles.create(tmp_path, {"w": "f32[4000000,64]"}, ["w"])
    with tables.step({"w": np.arange(0, 4_000_000, 4000)}):
        resident = sum(int(line.split()[1]) for line in _smaps(tmp_path / "w.npy") if line.startswith("Rss:"))
    assert 0 < resident < 1000 * 4 * 4  # KiB: two pages a row, and some


def _smaps(path: Path) -> list[str]:
    """What the system says of a mapped file."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("this system does not say what is resident")
    found, mine = [], False
    for line in smaps.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.endswith(str(path))
        elif mine:
            found.append(line)
    return found
