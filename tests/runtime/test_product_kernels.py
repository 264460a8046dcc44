"""Kernels of products of other types than f32 are compiled and loaded where a program has such products."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import with_runtime

import gradc
from gradc import knobs, ops
from gradc.analysis.product_kernels import product_kernels
from gradc.ir.types import parse_type
from gradc.module.saved import parts_of
from gradc.runtime.host import pool

ROOT = Path(__file__).resolve().parents[2]


def attend(q: Any, k: Any, v: Any) -> Any:
    """In blocks of rows: its products are steps of a loop."""
    return ops.softmax(q @ k.T, axis=-1) @ v


def both(a: Any, b: Any, x: Any, y: Any) -> Any:
    return a @ b, ops.integer_matmul(x, y)


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...], set[str]]] = {
    "f32": (ops.matmul, ("f32[9,20]", "f32[20,7]"), set()),
    "f64": (ops.matmul, ("f64[9,20]", "f64[20,7]"), {"f64"}),
    "f64, one row": (ops.matmul, ("f64[1,20]", "f64[20,7]"), {"f64"}),
    "bf16": (ops.matmul, ("bf16[9,20]", "bf16[20,7]"), {"bf16"}),
    "i8": (ops.integer_matmul, ("i8[9,20]", "u8[20,7]"), {"i8"}),
    "groups": (ops.grouped_matmul, ("f64[9,20]", "f64[3,20,7]", "i64[4]"), {"f64"}),
    "blocks": (attend, ("f64[4096,64]", "f64[4096,64]", "f64[4096,8]"), {"f64"}),
    "two": (both, ("f64[9,8]", "f64[8,7]", "i8[9,8]", "i8[8,7]"), {"f64", "i8"}),
    "none": (lambda a, b: a + b, ("f64[9,20]", "f64[9,20]"), set()),
}  # fmt: skip


def graph_of(case: str) -> gradc.Graph:
    function, types, _ = CASES[case]
    names = [f"x{number}" for number in range(len(types))]
    return gradc.trace(lambda **given: function(*given.values()), **dict(zip(names, types, strict=True)))


@pytest.mark.parametrize("case", CASES)
def test_a_program_says_which_it_has(case: str) -> None:
    module = gradc.compile(graph_of(case), wrt=[], target="cpu")
    assert product_kernels(module.forward.program) == CASES[case][2]


RUN = """
import sys
sys.path[:0] = [{tests!r}, {folder!r}]
import numpy as np
import gradc
import test_product_kernels as cases
from gradc.runtime.host import pool
module = gradc.compile(cases.graph_of({case!r}), wrt=[], target="cpu")
assert not pool._loaded
arrays = cases.arrays_of({case!r})
found = module(**arrays)
assert {{*pool._loaded}} == cases.CASES[{case!r}][2] | {{pool.RUNTIME}}, pool._loaded
found = [*found.values()] if isinstance(found, dict) else [found]
for one, (expected, error) in zip(found, cases.expected_of({case!r}, arrays), strict=True):
    assert (abs(one.astype("f8") - expected) <= error).all(), abs(one.astype("f8") - expected).max()
"""


def arrays_of(case: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    graph, found = graph_of(case), {}
    for name, type_ in zip(graph.input_names, (parse_type(text) for text in CASES[case][1]), strict=True):
        shape, dtype = type_.shape, type_.dtype
        if dtype.name == "i64":
            found[name] = np.array([0, 2, 5, 9])
        elif dtype.is_integer:
            found[name] = rng.integers(*dtype.range, shape, endpoint=True).astype(dtype.np)
        else:
            found[name] = rng.normal(size=shape).astype(dtype.np)
    return found


def expected_of(case: str, arrays: dict[str, np.ndarray]) -> list[tuple[np.ndarray, float]]:
    """Each result in long double, or exactly, and the most by which one may differ."""
    wide = [x.astype(np.longdouble) for x in arrays.values()]
    if case == "none":
        return [(wide[0] + wide[1], 1e-14)]
    if case == "groups":
        x, w, _ = wide
        return [(np.concatenate([x[a:b] @ w[g] for g, (a, b) in enumerate(((0, 2), (2, 5), (5, 9)))]), 1e-13)]
    if case == "blocks":
        scores = wide[0] @ wide[1].T
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return [(weights @ wide[2] / weights.sum(-1, keepdims=True), 1e-12)]
    if case == "two":
        return [(wide[0] @ wide[1], 1e-13), (wide[2] @ wide[3], 0)]
    error = {"f32": 1e-5, "bf16": 0.1, "i8": 0}.get(case, 1e-13)
    return [(wide[0] @ wide[1], error)]


@pytest.mark.parametrize("case", [case for case in CASES if case != "blocks"])
def test_they_are_loaded_by_a_call_that_has_such_products(case: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": with_runtime(tmp_path / "cache")}
    code = RUN.format(tests=str(ROOT / "tests"), folder=str(Path(__file__).parent), case=case)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_memory_of_a_product_of_f32_is_the_same_whatever_was_loaded(tmp_path: Path) -> None:
    code = """
import gradc
from gradc.runtime.host import pool

def of_a_thread():
    graph = gradc.trace(lambda a, b: a @ b, a="f32[300,2000]", b="f32[2000,300]")
    return gradc.compile(graph, wrt=[], target="cpu").forward.native.bind({}).local

alone = of_a_thread()
pool.require(pool.KERNELS)
assert of_a_thread() == alone > 0
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": with_runtime(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("loading", [pool.RUNTIME, f"{pool.RUNTIME}-f64"])
def test_the_handler_of_a_signal_may_load_them_while_the_pool_is_loaded(loading: str, tmp_path: Path) -> None:
    """Its call and those after it have one pool, which has the kernels of all."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
import signal
import numpy as np
import gradc
import test_product_kernels as cases
from gradc.runtime.host import pool

def call(case, *signal):
    arrays = cases.arrays_of(case)
    made = gradc.compile(cases.graph_of(case), wrt=[], target="cpu")  # bound to its sizes anew
    ((expected, error),) = cases.expected_of(case, arrays)
    assert (abs(made(**arrays).astype("f8") - expected) <= error).all()
    print(case)

def loading(code, name):
    library = load(code, name)
    if name == {loading!r} and not handled:
        handled.append(name)
        signal.raise_signal(signal.SIGUSR1)
    return library

load, pool.load_library, handled = pool.load_library, loading, []
signal.signal(signal.SIGUSR1, lambda *_: (call("i8"), call("f64")))
for case in ("f64", "i8", "bf16", "f64"):
    call(case)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": with_runtime(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split() == ["i8", "f64", "f64", "i8", "bf16", "f64"], done.stderr


def test_kernels_that_another_process_compiled_first_are_not_compiled_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_runtime(tmp_path / "cache")
    for name in ("_loaded", "_begun", "_offered"):
        monkeypatch.setattr(pool, name, {})
    with knobs.CACHE_DIR.set(str(tmp_path / "none")), knobs.OBJECTS.set(""):
        pool.begin(["f64"])
    ((_, build),) = pool._begun.values()
    with knobs.CACHE_DIR.set(str(tmp_path / "cache")):
        pool._machine_code("f64")
    assert not pool._begun and build._objects is not None and not build._objects.directory.exists()


@pytest.mark.parametrize("case", ["f64", "bf16", "two"])
def test_a_file_brings_them_to_where_there_is_no_compiler(case: str, tmp_path: Path) -> None:
    gradc.compile(graph_of(case), wrt=[], target="cpu").save(tmp_path / "module.gradc")
    code = RUN.format(tests=str(ROOT / "tests"), folder=str(Path(__file__).parent), case=case)
    compiling = f'gradc.compile(cases.graph_of({case!r}), wrt=[], target="cpu")'
    code = code.replace(compiling, f"gradc.load_module({str(tmp_path / 'module.gradc')!r})")
    alone = {**os.environ, "CC": "no-such-compiler", "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True, text=True, timeout=600)
    assert compiling not in code and done.returncode == 0, done.stderr


def test_a_product_without_its_kernels_is_refused(tmp_path: Path) -> None:
    """It would be another one's bits, or none: what a program needs is asked for before it is called."""
    code = """
import ml_dtypes
import numpy as np
from gradc import errors
from gradc.runtime.host import pool
pool.require = lambda kernels: None
for dtype, result in (("f8", "f8"), ("i1", "i4"), (ml_dtypes.bfloat16, "f4")):
    a = np.ones((1, 3, 4), dtype)
    try:
        pool.matmul(a, a.transpose(0, 2, 1), np.empty((1, 3, 3), result))
    except errors.InternalError:
        print("refused")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRADC_CACHE_DIR": with_runtime(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["refused"] * 3, done.stderr


@pytest.mark.parametrize("case", [case for case in CASES if case != "blocks"])
def test_a_file_holds_those_that_its_module_needs(case: str, tmp_path: Path) -> None:
    module = gradc.compile(graph_of(case), wrt=[], target="cpu")
    parts = parts_of(module, portable=True)
    expected = {pool.part_of(name) for name in (pool.RUNTIME, *CASES[case][2])}
    assert {name for name in parts if name.startswith(pool.RUNTIME)} == expected
