"""Steps of one form that wait for no other, as the tasks of one launch: which they are, and what they give."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import gradc
from gradc import knobs, ops, optim
from gradc.analysis.lifetimes import offsets
from gradc.codegen.cpu.program import elements
from gradc.errors import IndexOutOfRange, TypeRuleError
from gradc.ir.dims import evaluate
from gradc.ir.kernel import Call, alternatives
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.runtime.host import pool


def bags(tables: Any, w: Any, i: Any, offsets: Any, t: Any) -> Any:
    rows = [ops.embedding_bag(*each, mode="sum") for each in zip(i, tables, offsets, strict=True)]
    return ops.mean((ops.concat(rows, axis=1) @ w - t) ** 2.0)


@functools.cache
def trained(count: int, target: str) -> Any:
    graph = gradc.trace(
        bags,
        tables=[f"f32[V{k},8]" for k in range(count)],
        w=f"f32[{8 * count},1]",
        i=[f"i64[N{k}]" for k in range(count)],
        offsets=["i64[B]"] * count,
        t="f32[B,1]",
    )
    update = {"tables": optim.rowwise_adagrad(0.1), "w": optim.sgd(0.1)}
    with knobs.VALIDATE.set("1" if (count, target) == (4, "cpu") else ""):  # every stage, in the smallest one
        return gradc.compile(graph, ["tables", "w"], target, update=update, sparse="tables")


def arrays(count: int, rows: int = 40, bags: int = 16) -> dict[str, Any]:
    """Tables, bags and indices of other sizes for each table."""
    rng = np.random.default_rng(count)
    given: dict[str, Any] = {"state.step": np.array(0), "t": rng.standard_normal((bags, 1)).astype(np.float32)}
    given["w"] = rng.standard_normal((8 * count, 1)).astype(np.float32)
    for k in range(count):
        lengths = rng.integers(0, 4 + k, bags)
        given[f"tables.{k}"] = rng.standard_normal((rows + k, 8)).astype(np.float32)
        given[f"state.sum.tables.{k}"] = np.zeros(rows + k, np.float32)
        given[f"i.{k}"] = rng.integers(0, rows + k, lengths.sum())
        given[f"offsets.{k}"] = np.cumsum(lengths) - lengths
    return given


def launches(program: Any) -> int:
    inside = sum(end - begin - 1 for begin, end in program.batches)
    return len(program.steps) - inside


def test_more_tables_are_no_more_launches() -> None:
    few, many = (trained(count, "cpu").forward.program for count in (4, 7))
    assert launches(few) == launches(many) and len(many.steps) > len(few.steps) + 4 * 6
    assert str(parse_program(f"gradc-ir 1\n{many}")) == str(many) and parse_program(str(many)) == many


@pytest.mark.parametrize("bags", [16, 40_000])
def test_what_is_batched_gives_the_bits_of_one_thread(bags: int) -> None:
    """As the interpreter does; with so many bags each step has a launch of its own."""
    given = arrays(4, bags=bags)
    wanted = trained(4, "numpy")(**copy.deepcopy(given))
    threads, found = pool.num_threads(), []
    try:
        for count in (1, 2, 5):
            pool.set_num_threads(count)
            found.append(trained(4, "cpu")(**copy.deepcopy(given)))
    finally:
        pool.set_num_threads(threads)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[0][name], value, rtol=2e-3, atol=1e-5)
        assert len({np.asarray(each[name]).tobytes() for each in found}) == 1


UPDATES = """
import os, numpy as np, gradc

def update(p, g):
    return [x - y * 0.1 for x, y in zip(p, g)]

types = ["f32[N]", *["f32[M]"] * 5]
module = gradc.compile(gradc.trace(update, p=types, g=types), target="cpu")
for n, m in ((0, 0), (3, 3), (1000, 1000), (25_000, 3), (100_000, 100_000)):
    p, g = ([np.arange(m if k else n, dtype="f") * (k + seed) for k in range(6)] for seed in (0, 3))
    for found, x, y in zip(module(p=p, g=g).values(), p, g):
        np.testing.assert_array_equal(found, x - y * np.float32(0.1))
    print(n, len(os.listdir("/proc/self/task")), "on the caller's thread" in module.explain(N=n, M=m))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads")
def test_a_small_batch_wakes_no_thread() -> None:
    """The first job of the pool starts its threads.  A step of a small batch may itself have several tasks."""
    env = {**os.environ, "GRADC_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", UPDATES], capture_output=True, text=True, check=True, env=env)
    lines = [line.split() for line in done.stdout.splitlines()]
    started = [int(threads) for _, threads, _ in lines]
    assert [caller for *_, caller in lines] == ["True"] * 4 + ["False"]
    assert started == [started[0]] * 4 + [started[0] + 1]


def test_steps_of_short_bags_are_small() -> None:
    """With 1,500 indices a table every batch is one launch: a sort goes through its indices, not through their square,
    and put_rows through the rows that it writes, whatever is in the table.
    """
    program = trained(4, "cpu").forward.program
    dims = {**{name: 1500 for name in program.dims}, "B": 512}
    for begin, end in program.batches:
        for item in (item for step in program.steps[begin:end] for item in alternatives(step)):
            assert all(evaluate(each, dims) <= 8 * 1500 for each in elements(program, item))
    put = gradc.trace(lambda x, rows, y: ops.put_rows.plain(x, rows, y), x="f32[V,8]", rows="i64[N]", y="f32[N,8]")
    program = gradc.compile(put, (), "cpu").forward.program
    (call,) = (step for step in program.steps if isinstance(step, Call))
    assert max(evaluate(each, {"V": 10**18, "N": 100}) for each in elements(program, call)) == 800


def test_dense_gradients_share_memory() -> None:
    """Of eight tables no two are in memory at once: each is used up before the next is made."""
    fn = lambda tables, i: ops.sum(sum(ops.embedding(*each) for each in zip(i, tables, strict=True)) ** 2.0)
    needed = []
    for count in (1, 8):
        graph = gradc.trace(fn, tables=[f"f32[V{k},16]" for k in range(count)], i=["i64[N]"] * count)
        program = gradc.compile(graph, ["tables"], "cpu", update={"tables": optim.adam()}).forward.program
        dims = {name: 10_000 if name.startswith("V") else 10 for name in program.dims}
        needed.append(offsets(program, dims, 64)[1])
    assert needed[1] < needed[0] + 16 * 10_000 * 4


def test_an_index_out_of_range_in_a_batch_changes_nothing() -> None:
    """Of several the error is of the first."""
    given = arrays(4)
    for k in (3, 1, 2):
        given[f"i.{k}"][2] = 99
    before = copy.deepcopy(given)
    with pytest.raises(IndexOutOfRange, match=r"99 at position 2 of 'i\.1'"):
        trained(4, "cpu")(**given)
    assert all(given[name].tobytes() == x.tobytes() for name, x in before.items())


@hypothesis.given(strategies.permutations(range(8)), strategies.lists(strategies.booleans(), min_size=8, max_size=8))
@hypothesis.example([1, 0, 3, 2, 5, 4, 7, 6], [False] * 8)
@hypothesis.settings(deadline=None, max_examples=4)
def test_updates_in_place_that_read_one_another(reads: list[int], fresh: list[bool]) -> None:
    """Each of eight arrays, where it lies, times the sum of some array, of the old or the new one."""

    def moved(x: Any) -> Any:
        new: dict[int, Any] = {}
        for k, (other, wants) in enumerate(zip(reads, fresh, strict=True)):
            new[k] = x[k] * ops.sum(new[other] if wants and other in new else x[other])
        return {f"x.{k}": node for k, node in new.items()}

    graph = gradc.trace(moved, x=[f"f64[N{k}]" for k in range(8)])
    with knobs.VALIDATE.set("1"):
        module = gradc.compile(graph, (), "cpu", donate=[f"x.{k}" for k in range(8)])
    if reads == [1, 0, 3, 2, 5, 4, 7, 6] and not any(fresh):  # four times the same of two
        assert launches(module.forward.program) == 3
    given = {f"x.{k}": np.arange(k % 3, k % 3 + k + 1.0) - 2 for k in range(8)}
    wanted = gradc.compile(graph, (), "numpy")(**given)
    assert all(np.abs(x).max() < 2**53 for x in wanted.values())  # exact
    found = module(**given)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


TEXT = """gradc-ir 1
program @p {
  input a: f32[N]
  input b: f32[N]
  temp s: f32[N]
  temp t: f32[N]
  output y: f32[N]
  batch {
    kernel @first rows() cols(i: N) {
      phase
      %0 = load a[i] : f32
      store s[i] <- %0 : f32
    }
    kernel @second rows() cols(i: N) {
      phase
      %0 = load b[i] : f32
      store t[i] <- %0 : f32
    }
  }
  kernel @last rows() cols(i: N) {
    phase
    %0 = load s[i] : f32
    %1 = load t[i] : f32
    %2 = add %0, %1 : f32
    store y[i] <- %2 : f32
  }
  return y=y
}
"""


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_batch_is_text_and_is_verified(target: str) -> None:
    program = parse_program(TEXT)
    assert program.batches == ((0, 2),) and f"gradc-ir 1\n{program}\n" == TEXT
    a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    np.testing.assert_array_equal(gradc.Executable(program, target)(a=a, b=b)["y"], a + b)
    for changes, what in (
        ({"load b[i]": "load s[i]"}, "step 1 reads s, which another one writes"),
        ({"store t[i]": "store s[i]", "load t[i]": "load s[i]"}, "another one touches s, which step 1 writes"),
        ({"load a[i]": "load t[i]"}, "t is read before anything is written to it"),
        (
            {"batch {\n    kernel @first": "batch {\n    }\n  batch {\n    kernel @first"},
            "a batch of the steps 0 to -1",
        ),
    ):
        text = TEXT
        for old, new in changes.items():
            text = text.replace(old, new)
        with pytest.raises(TypeRuleError, match=what):
            verify_program(parse_program(text))
