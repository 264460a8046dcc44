"""Few long rows that are scanned in strips: on the simulator in checking mode, against NumPy in a wider type."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import long_tests
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gradc
from gradc import knobs, ops
from gradc.codegen.cuda.choose_mapping import MAPPINGS
from gradc.codegen.cuda.mappings.split_scans import SplitScans
from gradc.ir.types import DTYPES
from gradc.ops.indexing.sparse import sort_segments

pytestmark = pytest.mark.optimised

LONG, STRIP = 512, 256
"""Columns from which on rows are split here, and of a strip."""
EDGES = (0, 1, 2, STRIP - 1, STRIP, LONG - 1, LONG, LONG + 1, LONG + STRIP, 4 * STRIP - 1, 4 * STRIP + 1, 2077)


@pytest.fixture(autouse=True)
def short_rows_count_as_long(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SplitScans, "long_row", LONG)
    with knobs.SIM_CHECK.set(True):
        yield


def launched(module: Any, **dims: int) -> list[str]:
    """The functions that a call starts."""
    return [a.function for actions in module.forward.native.bind(dims).actions for a in actions]


@functools.cache
def segments() -> Any:
    return gradc.compile(gradc.trace(sort_segments, keys="i64[N]"), target="cuda-sim")


@pytest.mark.usefixtures("short_rows_count_as_long")
@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from(EDGES) | st.integers(0, 1500), keys=st.sampled_from((1, 2, 40, 10**9)), seed=st.integers(0, 99)
)
@example(n=4 * STRIP, keys=1, seed=0)
@example(n=4 * STRIP + 1, keys=0, seed=0)
def test_segments_of_any_size(n: int, keys: int, seed: int) -> None:
    """Of equal and of distinct keys, and of as many as there are."""
    rng = np.random.default_rng(seed)
    key = rng.permutation(n) - n // 2 if keys == 0 else rng.integers(-keys, keys, n) // max(keys - 1, 1) * (keys - 1)
    order = np.argsort(key, kind="stable")
    found, first = np.unique(key[order], return_index=True)
    made = segments()(keys=key.astype(np.int64))
    np.testing.assert_array_equal(made[0], order)
    np.testing.assert_array_equal(made[1], [*found, *[np.iinfo(np.int64).max] * (n - len(found))])
    np.testing.assert_array_equal(made[2], [*first, *[n] * (n - len(found))])


def test_only_long_rows_are_split() -> None:
    parts = [[f for f in launched(segments(), N=n) if f.endswith(("_part0", "_part1"))] for n in (LONG, LONG + 1)]
    assert parts[0] == [] and len(parts[1]) == 2


@functools.cache
def scans(reverse: bool) -> Any:
    """Several scans of one row in one kernel, what is made of one, and a sum that their elements are added to."""

    def several(x: Any, w: Any, k: Any) -> dict[str, Any]:
        scan = {name: getattr(ops, name) for name in ("cumsum", "cummax", "cummin", "logcumsumexp", "cumprod")}
        made = {name: op(x, axis=1, reverse=reverse) for name, op in scan.items() if name != "cumprod"}
        made["cumprod"] = ops.cumprod(w, axis=1, reverse=reverse)
        made["last"] = ops.cumargmax(x, axis=1, reverse=reverse)
        made["count"] = ops.cumsum(k, axis=1, reverse=reverse)
        return made | {"root": ops.sqrt(ops.abs(made["cumsum"])) + x}

    types = {"x": "f32[M,N]", "w": "f64[M,N]", "k": "i32[M,N]"}
    return gradc.compile(gradc.trace(several, **types), target="cuda-sim")


def wanted(x: np.ndarray, w: np.ndarray, k: np.ndarray) -> dict[str, np.ndarray]:
    wide = x.astype(np.float64)
    best, places = np.maximum.accumulate(x, 1), np.arange(x.shape[1])
    made = {
        "cumsum": np.add.accumulate(wide, 1),
        "cummax": best,
        "cummin": np.minimum.accumulate(x, 1),
        "logcumsumexp": np.logaddexp.accumulate(wide, 1),
        "cumprod": np.multiply.accumulate(w.astype(np.longdouble), 1),
        "last": np.maximum.accumulate(np.where((x == best) | (x != x), places, 0), 1),
        "count": np.add.accumulate(k, 1, dtype=np.int64),
    }
    return made | {"root": np.sqrt(np.abs(made["cumsum"])) + wide}


@long_tests.values
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("m", "n"), [(1, LONG + 1), (3, 5 * STRIP), (2, 4 * STRIP + 1), (127, LONG + 1), (1, 0), (0, 600)]
)
def test_scans_of_few_long_rows(m: int, n: int, reverse: bool) -> None:
    """In both directions, ties and NaN among them; a sum is off by the rounding of its result."""
    rng = np.random.default_rng(n)
    x = np.round(rng.normal(size=(m, n)), 1).astype(np.float32)
    w, k = np.exp(rng.normal(size=(m, n)) / 64), rng.integers(-9, 9, (m, n), np.int32)
    if n > 300 and m:
        x[0, 300] = np.nan
    assert any("part1" in f for f in launched(scans(reverse), M=m, N=n)) == (n > LONG and m > 0)
    made = scans(reverse)(x=x, w=w, k=k)
    turn = (lambda a: a[:, ::-1]) if reverse else (lambda a: a)
    for name, exact in wanted(turn(x), turn(w), turn(k)).items():
        exact, found = turn(n - 1 - exact if name == "last" and reverse else exact), made[name]
        if name in ("cummax", "cummin", "count", "last"):
            np.testing.assert_array_equal(found, exact, name)
        else:
            bound = {"cumprod": n * 2.0**-53, "logcumsumexp": 2.0**-19}.get(name, 2.0**-22)
            np.testing.assert_allclose(found, exact.astype(np.float64), bound, bound, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "strategy", "splits"),
    [
        ("i32", "atomic", True),
        ("f32", "atomic", True),
        ("f32", "atomic_fixed", False),
        ("f16", "atomic", False),
        ("bf16", "atomic_fixed", False),
        ("bf16", None, False),
    ],
)
def test_what_is_scanned_is_added_to_a_result(dtype: str, strategy: str | None, splits: bool) -> None:
    """In strips where that takes no workspace, which is theirs."""
    graph = gradc.trace(
        lambda x, i: ops.scatter_add(i, ops.cumsum(x, 0), size=50, oob="skip"), x=f"{dtype}[N]", i="i64[N]"
    )
    module = gradc.compile(graph, target="cuda-sim", reductions={"*": strategy} if strategy else {})
    n, rng = 5 * STRIP + 3, np.random.default_rng(0)
    x, i = rng.integers(0, 3, n).astype(DTYPES[dtype].np), rng.integers(-2, 55, n)
    exact, there = np.zeros(50), (i >= 0) & (i < 50)
    np.add.at(exact, i[there], np.cumsum(x.astype(np.int64))[there].astype(np.float64))
    found = np.asarray(module(x=x, i=i)).astype(np.float64)
    np.testing.assert_allclose(found, exact, {"i32": 0, "f32": 2.0**-20, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype])
    assert any("part1" in f for f in launched(module, N=n)) == splits


def test_what_is_stored_of_a_row_is_so_by_one_strip() -> None:
    graph = gradc.trace(lambda x, w: {"y": ops.cumsum(x * w, 1), "w": w * 2.0}, x="f64[M,N]", w="f64[M,1]")
    module = gradc.compile(graph, target="cuda-sim")
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 5 * STRIP)), rng.normal(size=(3, 1))
    assert [f[-5:] for f in launched(module, M=3, N=5 * STRIP)] == ["part0", "part1"]
    made = module(x=x, w=w)
    exact = np.add.accumulate(x.astype(np.longdouble) * w, 1)
    np.testing.assert_allclose(made["y"], exact.astype(np.float64), 1e-12, 1e-12)
    np.testing.assert_array_equal(made["w"], w * 2)


def mapping(fn: Any, **types: str) -> list[str]:
    program = gradc.compile(gradc.trace(fn, **types), target="cuda", arch="sm_90").forward
    return sorted({k.mapping for k in program.native.kernels.values() if "scan" in k.mapping})


def test_what_is_not_split() -> None:
    """Recurrences, whose factors are not multiplied; scans of scans and of sums over the row; many rows, short ones."""
    long = f"f32[2,{LONG + 1}]"
    assert mapping(lambda x: ops.cumsum(x, 1), x=long) == ["split scans"]
    assert mapping(lambda x: ops.linear_recurrence(x, x, axis=1), x=long) == ["scanned rows"]
    assert mapping(lambda x: ops.cumsum(ops.exp(ops.cumsum(x, 1)), 1), x=long) == ["scanned rows"]
    assert mapping(lambda x: ops.cumsum(x - ops.mean(x, axes=(1,), keepdims=True), 1), x=long) == ["scanned rows"]
    assert mapping(lambda x: ops.cumsum(x, 1), x="f32[128,600]") == ["scanned rows"]
    assert mapping(lambda x: ops.cumsum(x, 1), x=f"f32[2,{LONG}]") == ["scanned rows"]
    assert "split scans" in MAPPINGS
