"""Rows of donated arrays that are stored by the kernel that computes them: where they may be, and what is stored."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import gradc
from gradc import ops
from gradc.errors import TypeRuleError
from gradc.ir.kernel import Call
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program

put = ops.put_rows.plain  # rows that are there once


def own(x: Any, rows: Any) -> Any:
    return ops.gather(x, rows, oob="skip")


STORED = {
    "rows that are made of themselves": lambda w, s, r: {"w": put(w, r, own(w, r) * 2.0)},
    "rows of two arrays": lambda w, s, r: {
        "w": put(w, r, own(w, r) * 2.0),
        "s": put(s, r, own(s, r) + 1.0),
    },
    "a row's sum and the row": lambda w, s, r: {
        "w": put(w, r, own(w, r) - ops.mean(own(w, r) ** 2.0, axis=1, keepdims=True)),
        "s": put(s, r, own(s, r) + ops.mean(own(w, r) ** 2.0, axis=1)),
    },
    "rows that are computed": lambda w, s, r: {"w": put(w, r + 1, own(w, r + 1) + 3.0)},
}
CALLED = {
    "rows that are made of others": lambda w, s, r: {"w": put(w, r, ops.gather(w, r + 1, oob="wrap") * 2.0)},
    "of themselves and others": lambda w, s, r: {
        "w": put(w, r, own(w, r) - ops.gather(w, r, oob="clamp") * 2.0 + ops.gather(w, r + 1, oob="wrap"))
    },
    "values that are a result": lambda w, s, r: {"w": put(w, r, v := own(w, r) * 2.0), "v": v},
    "rows of an array that is a result, too": lambda w, s, r: {"w": put(w, r, own(w, r)), "old": w * 1.0},
}


@pytest.mark.parametrize("rows", [[], [0, 3, 5], [-2, 1, 4, 6, 6, 9]])
@pytest.mark.parametrize("name", [*STORED, *CALLED])
def test_rows_are_stored_where_they_lie(name: str, rows: list[int]) -> None:
    fn = (STORED | CALLED)[name]
    graph = gradc.trace(fn, w="f64[V,4]", s="f64[V]", r="i64[N]")
    rng = np.random.default_rng(0)
    quarters = lambda *shape: rng.integers(-9, 9, shape) / 4  # all results are exact, in any order of a sum
    given = {"w": quarters(6, 4), "s": quarters(6), "r": np.array(rows, np.int64)}
    wanted = gradc.compile(graph, (), "numpy")(**given)
    module = gradc.compile(graph, (), "cpu", donate=["w", "s"])
    program = module.forward.program
    calls = any(isinstance(step, Call) and step.op == "put_rows" for step in program.steps)
    stores = any(s.op == "store" and s.where for kernel in program.kernels for s in kernel.body)
    assert calls != stores
    if not name.startswith("rows of an array"):  # reads it whole, before or after
        assert stores == (name in STORED)
    found = module(**given)
    for key in graph.output_names:
        new, old = (found[key], wanted[key]) if isinstance(found, dict) else (found, wanted)
        np.testing.assert_array_equal(new, old)
        assert key not in given or np.shares_memory(new, given[key])


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
@hypothesis.given(
    rows=strategies.lists(strategies.sampled_from([-(2**63), -1, 0, 1, 1, 1, 4, 6, 7, 2**63 - 1]), max_size=12)
)
@hypothesis.settings(deadline=None, max_examples=25)
def test_the_last_of_several_values_for_one_row_stays(target: str, rows: list[int]) -> None:
    """In its gradient, too: as a loop over the rows in their order writes them."""
    rng = np.random.default_rng(len(rows))
    x, values, g = rng.standard_normal((7, 3)), rng.standard_normal((len(rows), 3)), rng.standard_normal((7, 3))
    wanted, writer = x.copy(), {}
    for position, row in enumerate(rows):
        if 0 <= row < 7:
            wanted[row], writer[row] = values[position], position
    dx, dvalues = g.copy(), np.zeros_like(values)
    for row, position in writer.items():
        dx[row], dvalues[position] = 0, g[row]
    module = _written_rows(target)
    y, residuals = module.forward(x=x, r=np.array(rows, np.int64), v=values)
    np.testing.assert_array_equal(y, wanted)
    gradients = module.backward(residuals, g)
    np.testing.assert_array_equal(gradients["x"], dx)
    np.testing.assert_array_equal(gradients["v"], dvalues)


@functools.cache
def _written_rows(target: str) -> Any:
    put_last = lambda x, r, v: ops.put_rows(x, r, v)
    return gradc.compile(gradc.trace(put_last, x="f64[V,3]", r="i64[N]", v="f64[N,3]"), ["x", "v"], target)


def test_rows_there_twice_are_made_of_the_old_ones() -> None:
    """In place, where a second one would read what the first has stored; by any number of threads."""

    def doubled(w: Any, r: Any) -> Any:
        return {"w": ops.put_rows(w, r, own(w, r) * 2.0)}

    module = gradc.compile(gradc.trace(doubled, w="f64[V,64]", r="i64[N]"), (), "cpu", donate=["w"])
    r = np.random.default_rng(0).integers(0, 50, 9000)
    w = np.random.default_rng(1).standard_normal((99, 64))
    wanted = w.copy()
    wanted[np.unique(r)] *= 2
    new = module(w=w, r=r)
    np.testing.assert_array_equal(new, wanted)
    assert np.shares_memory(new, w)


def test_values_that_are_computed_before_the_row_is_read() -> None:
    def both(w: Any, s: Any, r: Any, g: Any) -> Any:
        return {"s": put(s, r, ops.sum(g, axis=1)), "w": put(w, r, own(w, r) + g * 2.0)}

    graph = gradc.trace(both, w="f64[V,4]", s="f64[V]", r="i64[N]", g="f64[N,4]")
    rng = np.random.default_rng(0)
    quarters = lambda *shape: rng.integers(-9, 9, shape) / 4
    given = {"w": quarters(6, 4), "s": quarters(6), "r": np.array([-2, 1, 4, 6]), "g": quarters(4, 4)}
    wanted = gradc.compile(graph, (), "numpy")(**given)
    found = gradc.compile(graph, (), "cpu", donate=["w", "s"])(**given)
    for name in ("w", "s"):
        np.testing.assert_array_equal(found[name], wanted[name])
        assert np.shares_memory(found[name], given[name])


def test_a_kernel_that_updates_runs_alone() -> None:
    """On arrays of its own, which stay; explanations count what it moves, not the array."""
    graph = gradc.trace(STORED["a row's sum and the row"], w="f64[V,4]", s="f64[V]", r="i64[N]")
    module = gradc.compile(graph, (), "cpu", donate=["w", "s"])
    (name,) = (kernel.name for kernel in module.forward.program.kernels if kernel.updates)
    handle = module.kernels[name]
    given = {"w.2": np.ones((6, 4)), "s.2": np.zeros(6), "r": np.array([1, 5, 7])}
    out = handle.run(**given)
    wanted = np.ones((6, 4))
    wanted[[1, 5]] = 0
    np.testing.assert_array_equal(out["w.2"], wanted)
    np.testing.assert_array_equal(out["s.2"], [0, 1, 0, 0, 0, 1])
    assert (given["w.2"] == 1).all() and handle.time(1, N=3, V=6) > 0
    assert handle.bytes(N=3, V=10**6) < 1000 and "the floor (each input read once, each output written once) is " in (
        text := str(module.explain(N=3, V=10**6))
    )
    assert "MB" not in text.partition("the floor")[0]


TEXT = """gradc-ir 1
program @p {
  input w: f32[V,3]
  input r: i64[N]
  output w.2: f32[V,3]
  kernel @copy rows(i: V) cols(d: 3) {
    phase
    %0 = load w[i, d] : f32
    store w.2[i, d] <- %0 : f32
  }
  kernel @double rows(n: N) cols(d: 3) {
    %0 = load r[n] : i64
    %1 = in_bounds %0 {hi=V, lo=0} : bool
    phase
    %2 = load w.2[%0, d] where %1 : f32
    %3 = add %2, %2 : f32
    store w.2[%0, d] <- %3 where %1 : f32
  }
  return w=w.2
}
"""


def test_masked_stores_are_text_and_are_verified() -> None:
    program = parse_program(TEXT)
    assert str(parse_program(f"gradc-ir 1\n{program}")) == str(program)
    verify_program(program)
    unmasked = TEXT.replace("<- %3 where %1", "<- %3")
    with pytest.raises(TypeRuleError, match=r"axis 0 of w\.2 has V, and nothing before says that %0 is inside"):
        verify_program(parse_program(unmasked))
    first, second = TEXT.index("  kernel @copy"), TEXT.index("  kernel @double")
    alone = (TEXT[:first] + TEXT[second:]).replace("%2 = load w.2", "%2 = load w")
    with pytest.raises(TypeRuleError, match=r"a mask leaves elements of w\.2 as they are, and nothing is written"):
        verify_program(parse_program(alone))


MASKED = """gradc-ir 1
program @p {
  input w: f32[V,3]
  input m: bool[V,3]
  input r: bool[V]
  output y: f32[V,3]
  kernel @copy rows(i: V) cols(d: 3) {
    phase
    %0 = load w[i, d] : f32
    store y[i, d] <- %0 : f32
  }
  kernel @five rows(i: V) cols(d: 3) {
    phase
    %0 = load m[i, d] : bool
    %1 = const {value=5.0} : f32
    store y[i, d] <- %1 where %0 : f32
  }
  kernel @six rows(i: V) cols(d: 3) {
    %0 = load r[i] : bool
    phase
    %1 = const {value=6.0} : f32
    store y[i, d] <- %1 where %0 : f32
  }
  return y=y
}
"""


@pytest.mark.parametrize("target", ["numpy", "cpu", "cuda-sim"])
def test_a_masked_store_leaves_the_other_elements(target: str) -> None:
    """Under a mask of columns, and under one of rows."""
    rng = np.random.default_rng(0)
    w, m, r = rng.standard_normal((9, 3)).astype(np.float32), rng.random((9, 3)) < 0.5, rng.random(9) < 0.3
    wanted = np.where(r[:, None], np.float32(6), np.where(m, np.float32(5), w))
    np.testing.assert_array_equal(gradc.Executable(parse_program(MASKED), target)(w=w, m=m, r=r)["y"], wanted)
