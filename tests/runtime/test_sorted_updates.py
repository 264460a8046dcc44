"""Rows of a table updated by the kernel that sums their gradients, in integers: exact whatever the order, so that no
row is left out or taken twice, at each size from which on tasks, chunks and rows that are handed on are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops, optim
from gradc.codegen.text import enumerators
from gradc.optim.step_graph import step_graph
from gradc.runtime.host import pool

pytestmark = pytest.mark.optimised

CONSTANTS = enumerators("cpu/program.h")
CHUNK = 64
"""Rows of a chunk, of 64 columns where there are many."""
TASKS = CONSTANTS["GRADC_TASKS"]
SIZES = (1, 7, 8, 9, 16, 63, 64, 65, (2 * TASKS - 1) * CHUNK, 2 * TASKS * CHUNK + CHUNK + 1)
"""Of the last two, the first is the most at which a task has one chunk; at the second it has two, and the last task one
and a row.
"""
LAWS = {
    "each once": lambda random, n: random.permutation(n),
    "one": lambda random, n: np.full(n, 3),
    "hot": lambda random, n: np.where(random.random(n) < 0.5, 5, random.integers(0, n, n)),
    "runs of a chunk": lambda random, n: random.permutation(np.arange(n) // CHUNK),
    "runs of one more": lambda random, n: random.permutation(np.arange(n) // (CHUNK + 1)),
}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = pool.num_threads()
    yield
    pool.set_num_threads(before)


@pytest.fixture(scope="module")
def module() -> gradc.Module:
    graph = gradc.trace(ops.embedding, indices="i64[N]", weight="f32[V,W]")
    step = step_graph(graph, {"weight": optim.sgd(1.0)}, sparse=["weight"], loss=False)
    written = [name for name in step.output_names if name in step.input_names]
    return gradc.compile(step, target="cpu", donate=written)


def whole(random: np.random.Generator, *shape: int) -> Any:
    """Integers as f32: their sums here are exact, too."""
    return random.integers(-4, 5, shape, np.int8).astype(np.float32)


def check(module: gradc.Module, index: Any, width: int, rows: int) -> None:
    random = np.random.default_rng(len(index))
    values, before = whole(random, len(index), width), whole(random, rows, width)
    wanted = before.copy()
    np.subtract.at(wanted, index, values)
    (cotangent,) = set(module.graph.input_names) - {"indices", "weight", "lr", "state.step"}
    for threads in (1, 2):
        pool.set_num_threads(threads)
        table = before.copy()
        given = {"indices": index, "weight": table, cotangent: values, "lr": 1.0, "state.step": np.array(0)}
        module(**{name: given[name] for name in module.graph.input_names})
        np.testing.assert_array_equal(table, wanted)


@pytest.mark.parametrize("law", LAWS)
def test_each_row_is_updated_once(module: gradc.Module, law: str) -> None:
    for n in SIZES:
        check(module, LAWS[law](np.random.default_rng(n), n).astype(np.int64), 64, max(n, 9))


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1024, 2048, 2049])
def test_as_many_rows_are_handed_on_as_caches_hold(module: gradc.Module, width: int) -> None:
    assert CONSTANTS["GRADC_HANDED_BYTES"] == 8 * 4 * 256  # eight rows of 256, one of 2048
    for law in ("each once", "hot"):
        check(module, LAWS[law](np.random.default_rng(0), 300).astype(np.int64), width, 300)
