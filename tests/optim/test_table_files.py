"""Tables in files: whichever moment a process ends at, what is opened next is a whole step."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import ops, optim
from gradc.errors import GradcError, IndexOutOfRange, InvalidProblem
from gradc.ir.types import dtype as dtype_of
from gradc.module.table_files import TableFiles

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
        real = getattr(Path, name)

        def call(*args: Any, **options: Any) -> Any:
            copy()
            try:
                return real(*args, **options)
            finally:
                copy()

        monkeypatch.setattr(Path, name, call)

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
        ({"w": "f32[3,4]", "state.sum.w": "f32[4]"}, ["w"], "and follows w"),
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
    (tmp_path / "top.npy").unlink()
    with pytest.raises(InvalidProblem, match=r"top\.npy is not the file"):
        TableFiles.open(tmp_path)
    (tmp_path / "tables.json").write_text("{")
    with pytest.raises(InvalidProblem, match="damaged"):
        TableFiles.open(tmp_path)


def test_a_longer_name_decides_which_table_is_followed(tmp_path: Path) -> None:
    types = {"w": "f32[3,1]", "a.w": "f32[5,1]", "state.sum.a.w": "f32[5]", "state.sum.w": "f32[3]"}
    tables = TableFiles.create(tmp_path, types, ["w", "a.w"])
    with tables.step({"a.w": [4], "w": [2]}):
        for array in tables.arrays.values():
            array[-1] = 1
    assert all(array[-1] == 1 for array in tables.arrays.values()) and os.listdir(tmp_path)
