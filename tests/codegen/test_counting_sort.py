"""The counting sorts of rows by key against NumPy's stable argsort: every way, any number of threads."""

import ctypes
from collections.abc import Iterator
from typing import Any

import long_tests
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.runtime.host import pool, toolchain

pytestmark = pytest.mark.optimised

SOURCE = """
#include "math.h"
#include "counting_sort.h"
__attribute__((visibility("default"))) i64 bytes(i64 rows, i64 keys) { return gradc_sort_bytes(rows, keys); }
__attribute__((visibility("default")))
int sort(const gradc_ctx *ctx, void *const *buffers, const i64 *n, char *scratch, i64 only) {
  gradc_sort(ctx, buffers[0], n[0], n[1], buffers[1], buffers[2], scratch);
  return (int)only * 0;
}
"""
ALONE, BY_KEY, BY_RANGE = "alone", "by key", "by range"
SIZES = [
    (0, 5, ALONE),
    (1, 0, ALONE),
    (8191, 3, ALONE),
    (8192, 1 << 18, ALONE),
    (8192, 0, BY_KEY),
    (8192, 511, BY_KEY),
    (8192, 512, ALONE),
    (40_001, 2047, BY_KEY),
    (40_001, 2048, BY_KEY),
    (300_007, 9_999, BY_KEY),
    (8191, 1 << 19, ALONE),
    (8192, 1 << 19, BY_RANGE),
    (70_001, 543_210, BY_RANGE),
    (9_000, 5_000_001, BY_RANGE),
    (300_007, 1 << 22, BY_RANGE),
]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = pool.num_threads()
    yield
    pool.set_num_threads(before)


@pytest.fixture(scope="module")
def library() -> Any:
    found = toolchain.load_library(toolchain.compile_c(SOURCE), "sort")
    found.bytes.restype, found.bytes.argtypes = ctypes.c_int64, [ctypes.c_int64] * 2
    return found


def draws(rows: int, keys: int) -> Iterator[np.ndarray]:
    """Keys: any; in order already, or but for the last row; most of them few, or none at all; all the same one, the
    first, the last, none.
    """
    random = np.random.default_rng(rows + keys)
    yield random.integers(0, keys + 1, rows)
    in_order = np.sort(random.integers(0, keys + 1, rows))
    yield in_order
    yield np.concatenate([in_order[:-1], [0] * min(rows, 1)])
    yield np.minimum(np.repeat(np.arange(rows), 700)[:rows], keys)
    yield np.where(random.random(rows) < 0.9, keys, np.minimum(random.zipf(1.3, rows) - 1, keys))
    for one in (0, max(keys - 1, 0), keys):
        yield np.full(rows, one)


@long_tests.values
@pytest.mark.parametrize("rows, keys, way", SIZES, ids=str)
def test_against_numpy(library: Any, rows: int, keys: int, way: str) -> None:
    needed = library.bytes(rows, keys)
    assert (needed == 0) is (way == ALONE) and (needed >= 8 * rows > 0) is (way == BY_RANGE)
    call, context = pool.call_entry(), pool.new_context()
    for drawn in draws(rows, keys):
        key = drawn.astype(np.int32)
        wanted = np.argsort(key, kind="stable")
        starts = np.append(0, np.cumsum(np.bincount(key, minlength=keys + 1)))
        for threads in (1, 2, 5):
            pool.set_num_threads(threads)
            start, order = np.full(keys + 3, -7, np.int32), np.full(rows + 1, -7, np.int32)
            scratch = np.full(needed + 64, 249, np.uint8)
            entry = ctypes.cast(library.sort, ctypes.c_void_p).value
            buffers = (ctypes.c_void_p * 3)(*(a.ctypes.data for a in (key, start, order)))
            sizes = (ctypes.c_int64 * 2)(rows, keys)
            call(entry, context.pointer, buffers, sizes, ctypes.c_void_p(scratch.ctypes.data), 0)
            np.testing.assert_array_equal(order[:-1], wanted)
            np.testing.assert_array_equal(start[:-1], starts)
            assert order[-1] == start[-1] == -7 and np.all(scratch[needed:] == 249)


@pytest.mark.parametrize("rows, table", [(20_000, 700), (9_000, 600_000), (300, 600_000)])
def test_the_gradient_of_an_embedding(rows: int, table: int) -> None:
    random = np.random.default_rng(rows)
    tokens = np.where(random.random(rows) < 0.3, 5, random.integers(0, table, rows))
    weight = random.standard_normal((table, 3)).astype(np.float32)
    module = gradc.compile(
        gradc.trace(lambda tokens, weight: ops.embedding(tokens, weight), tokens="i64[N]", weight="f32[V,3]"),
        wrt=["weight"],
        reductions={"*": "segmented"},
    )
    upstream = random.integers(-8, 8, (rows, 3)).astype(np.float32)
    wanted = np.zeros_like(weight)
    np.add.at(wanted, tokens, upstream)  # of small integers: exact in any order
    for threads in (1, 2, 5):
        pool.set_num_threads(threads)
        _, residuals = module.forward(tokens=tokens, weight=weight)
        np.testing.assert_array_equal(module.backward(residuals, upstream)["weight"], wanted)
