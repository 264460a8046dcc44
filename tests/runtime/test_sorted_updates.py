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
"""Rows of a chunk, of 64 columns or more where there are many."""
MANY = 2 * CHUNK * CONSTANTS["GRADC_TASKS"]
"""Rows from which on a task has two chunks."""
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
def modules() -> dict[str, gradc.Module]:
    """By the width of a table's rows: a number, or known at the call."""
    made = {}
    for width in ("64", "W"):
        graph = gradc.trace(ops.embedding, indices="i64[N]", weight=f"f32[V,{width}]")
        step = step_graph(graph, {"weight": optim.sgd(1.0)}, sparse=["weight"], loss=False)
        written = [name for name in step.output_names if name in step.input_names]
        made[width] = gradc.compile(step, target="cpu", donate=written)
    return made


def check(module: gradc.Module, index: Any, width: int, rows: int) -> None:
    random = np.random.default_rng(len(index))
    values = random.integers(-4, 5, (len(index), width)).astype(np.float32)
    before = random.integers(-9, 10, (rows, width)).astype(np.float32)
    wanted = before.astype(np.float64)
    np.subtract.at(wanted, index, values)
    others = {"indices", "weight", "lr", "state.step"}
    (cotangent,) = set(module.graph.input_names) - others
    for threads in (1, 2):
        pool.set_num_threads(threads)
        table = before.copy()
        given = {"indices": index, "weight": table, cotangent: values, "lr": 1.0, "state.step": np.array(0)}
        module(**{name: given[name] for name in module.graph.input_names})
        np.testing.assert_array_equal(table, wanted)


@pytest.mark.parametrize("law", LAWS)
def test_each_row_is_updated_once(modules: dict[str, gradc.Module], law: str) -> None:
    for n in (1, 7, 8, 9, 16, 63, 64, 65, MANY - 1, MANY + CHUNK + 1):
        check(modules["64"], LAWS[law](np.random.default_rng(n), n).astype(np.int64), 64, max(n, 9))


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1024, 2048, 2049])
def test_as_many_rows_are_handed_on_as_caches_hold(modules: dict[str, gradc.Module], width: int) -> None:
    assert CONSTANTS["GRADC_HANDED_BYTES"] == 8 * 4 * 256  # eight rows of 256, one of 2048
    for law in ("each once", "hot"):
        check(modules["W"], LAWS[law](np.random.default_rng(0), 300).astype(np.int64), width, 300)
