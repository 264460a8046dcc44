"""Rows that one kernel combines and hands on to the next as they are finished: where they are, and their values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.analysis.cost import kernel_bytes
from gradc.codegen.cuda.finished_rows import launched
from gradc.codegen.cuda.render import render_cuda
from gradc.errors import TypeRuleError, Unsupported
from gradc.ir.kernel import Kernel, Program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.runtime.executable import Executable

ROWS, WIDTH = 700, 5


def bags(o: Any, i: Any, w: Any) -> Any:
    return ops.embedding_bag(i, w, o, mode="sum")


FORWARDED = {
    "one pass": lambda o, i, w: ops.exp(bags(o, i, w)) * 0.5,
    "several passes": lambda o, i, w: ops.softmax(bags(o, i, w), axis=1),
    "a value of each row": lambda o, i, w: ops.sum(bags(o, i, w) ** 2.0, axis=1),
    "rows by their own numbers": lambda o, i, w: bags(o, i, w) * ops.gather(w, ops.iota((o.shape[0],)), oob="clamp"),
}
STORED = {
    "the sums are a result": lambda o, i, w: {"s": (s := bags(o, i, w)), "y": ops.softmax(s, axis=1)},
    "rows are combined again": lambda o, i, w: ops.sum(ops.softmax(bags(o, i, w), axis=1), axis=0),
    "other rows are read": lambda o, i, w: ops.exp(ops.flip(bags(o, i, w), axis=(0,))),
    "rows and columns change places": lambda o, i, w: ops.exp(ops.transpose(bags(o, i, w), (1, 0))),
}


def offsets(kind: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Where bags begin: with empty ones, one of nearly all rows, or each of one row."""
    if kind == "one each":
        return np.arange(ROWS)
    if kind == "one long":
        return np.array([0, 0, 3, ROWS - 2, ROWS, ROWS])
    return np.concatenate([[0], np.sort(rng.integers(0, ROWS + 1, 90))])


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", [*FORWARDED, *STORED])
def test_values(name: str, dtype: str) -> None:
    graph = gradc.trace((FORWARDED | STORED)[name], o="i64[B]", i="i64[N]", w=f"{dtype}[V,{WIDTH}]")
    module = gradc.compile(graph, (), "cpu")
    program = module.forward.program
    handed = [b.name for b in program.of_kind("forwarded")]
    assert bool(handed) == (name in FORWARDED)
    assert parse_program(str(program)) == program
    wide = gradc.trace((FORWARDED | STORED)[name], o="i64[B]", i="i64[N]", w=f"f64[V,{WIDTH}]")
    rtol, atol = (1e-6, 1e-5) if dtype == "f32" else (1e-13, 1e-13)
    for kind in ("some empty", "one long", "one each"):
        rng = np.random.default_rng(0)
        given = {
            "o": offsets(kind, rng),
            "i": rng.integers(0, 50, ROWS),
            "w": rng.standard_normal((50, WIDTH)).astype(graph.input("w").dtype.np) / 16,
        }
        wanted = gradc.interp.run(wide, {**given, "w": given["w"].astype(np.float64)})
        for key, value in module.forward.run(**given).items():
            np.testing.assert_allclose(value, wanted[key], rtol=rtol, atol=atol, err_msg=f"{key}: {kind}")


def test_a_forwarded_buffer_has_no_memory() -> None:
    graph = gradc.trace(FORWARDED["several passes"], o="i64[B]", i="i64[N]", w="f32[V,64]")
    with_rows, without = (gradc.compile(graph, (), "cpu", fuse=fuse).forward for fuse in (True, False))
    sizes = {"B": 10**6, "N": 10**6, "V": 10}
    assert without.workspace_size(**sizes) - with_rows.workspace_size(**sizes) >= 4 * 64 * sizes["B"]


def test_what_a_reader_writes_does_not_lie_where_rows_are_read() -> None:
    """The rows of ``x`` are read by the producer while the reader stores those of the donated ``x``."""
    fn = lambda o, x: {"x": ops.softmax(ops.embedding_bag(ops.iota((x.shape[0],)), x, o, mode="sum"), axis=1)}
    graph = gradc.trace(fn, o="i64[N]", x="f64[N,3]")
    module = gradc.compile(graph, (), "cpu", donate=["x"])
    given = {"o": np.array([0, 3, 3, 4]), "x": np.random.default_rng(0).standard_normal((4, 3))}
    wanted = gradc.compile(graph, (), "numpy")(**{name: a.copy() for name, a in given.items()})
    np.testing.assert_allclose(module(**given), wanted, rtol=1e-14)


TEXT = """gradc-ir 1
program @p {
  input k: i64[N]
  input x: f32[N,3]
  forwarded t: f32[V,3]
  output y: f32[V,3]
  kernel @sum rows(n: N) cols(d: 3) order(t) strategy(t: segmented) {
    %0 = load k[n] : i64
    %1 = in_bounds %0 {hi=V, lo=0} : bool
    phase
    %2 = load x[n, d] : f32
    accum t[%0, d] <- %2 where %1 : f32
  }
  kernel @double rows(v: V) cols(d: 3) {
    phase
    %0 = load t[v, d] : f32
    %1 = add %0, %0 : f32
    store y[v, d] <- %1 : f32
  }
  return y=y
}
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("load t[v, d]", "load t[v, d*0]"),
        ("load t[v, d]", "load t[0, d]"),
        ("    store y[v, d] <- %1 : f32", "    store y[v, d] <- %1 : f32\n    accum t[v, d] <- %1 : f32"),
        ("return y=y", "return y=t"),
        ("order(t) strategy(t: segmented)", "strategy(t: privatized)"),
        ("order(t) strategy(t: segmented)", "order(t) strategy(t: privatized)"),
        ("order(t) strategy(t: segmented)", "strategy(t: regular)"),
        ("accum t[%0, d] <- %2", "accum t[%0, 0] <- %2"),
    ],
)
def test_rows_that_are_not_handed_on(old: str, new: str) -> None:
    verify_program(parse_program(TEXT))
    with pytest.raises(TypeRuleError, match=r"not handed from one kernel|is the forwarded t"):
        verify_program(parse_program(TEXT.replace(old, new)))


def _index_add(x: Any, i: Any, u: Any) -> Any:
    return {"x": ops.index_add(x, 0, i, u)}


def _step_of_table(x: Any, i: Any, u: Any) -> Any:
    return {"x": x - ops.index_add(x * 0.0, 0, i, u) * 0.125}


def _step_by_rows(x: Any, i: Any, u: Any) -> Any:
    """Of a rate that the squares of a whole row decide."""
    g = ops.index_add(x * 0.0, 0, i, u)
    wide = ops.cast(g, g.dtype.compute)
    rate = 0.125 / (ops.sqrt(ops.mean(wide * wide, axis=1, keepdims=True)) + 1.0)
    return {"x": ops.cast(ops.cast(x, g.dtype.compute) - rate * wide, x.dtype), "rate": rate}


def _wanted(fn: Any, x: Any, total: Any) -> Any:
    """The table after a step, of the sum of its rows' gradients."""
    if fn is _step_by_rows:
        return x - 0.125 / (np.sqrt((total * total).mean(1, keepdims=True)) + 1) * total
    return x + total * (1 if fn is _index_add else -0.125)


@pytest.mark.parametrize(
    "fn, dtype, columns, symbols, tolerance",
    [
        (_index_add, "f32", 128, False, 2e-7),
        (_step_of_table, "bf16", 5, True, 2**-8),
        (_step_of_table, "f64", "D", True, 4e-16),
        (_step_by_rows, "f32", 96, True, 2e-7),
        (_step_by_rows, "f64", 3, False, 4e-16),
        (_step_by_rows, "bf16", 520, False, 2**-8),
        (_step_by_rows, "f32", 2, True, 2e-7),
        (_step_of_table, "bf16", 8, True, 2**-8),
    ],
)
def test_a_gpu_hands_on_rows(fn: Any, dtype: str, columns: Any, symbols: bool, tolerance: float) -> None:
    """Rows that nobody hits, whole segments, and one of so many chunks that their carry rows are added up as a tree.

    The same bits as where rows are in memory between, but that threads may add up a row of f64 in another order.
    """
    rows, table, width = 1500, 40, 36 if columns == "D" else columns
    of_rows, of_table = ("N", "V") if symbols else (rows, table)
    types = {"x": f"{dtype}[{of_table},{columns}]", "i": f"i64[{of_rows}]", "u": f"{dtype}[{of_rows},{columns}]"}
    graph, rng = gradc.trace(fn, **types), np.random.default_rng(0)
    hit = np.concatenate([np.full(900, 7), rng.integers(0, table // 2, rows - 900)])
    narrow = graph.input("x").dtype.np
    given = {"x": rng.standard_normal((table, width)).astype(narrow), "i": rng.permutation(hit)}
    given["u"] = (rng.standard_normal((rows, width)) / 16).astype(narrow)
    program = gradc.compile(graph, (), "cuda-sim", reductions={"*": "segmented"}, donate=["x"]).forward.program
    assert [b.name for b in program.of_kind("forwarded")]
    total = np.zeros((table, width), np.longdouble)
    np.add.at(total, given["i"], given["u"].astype(np.longdouble))
    wanted = _wanted(fn, given["x"].astype(np.longdouble), total)
    largest = np.abs(given["x"].astype(np.longdouble))
    np.add.at(largest, given["i"], np.abs(given["u"].astype(np.longdouble)))
    found = _run(program, given)
    assert np.all(np.abs(found.astype(np.longdouble) - wanted) <= tolerance * largest)
    reordered = fn is _step_by_rows and dtype == "f64"
    np.testing.assert_allclose(_run(_stored(program), given), found, rtol=1e-14 if reordered else 0, atol=0)


def _stored(program: Program) -> Program:
    """The program with memory for the rows that kernels hand on."""
    kinds = {"forwarded": "temp"}
    return replace(program, buffers=tuple(replace(b, kind=kinds.get(b.kind, b.kind)) for b in program.buffers))


def _run(program: Program, given: dict[str, Any]) -> Any:
    """The table after a program in cuda-sim."""
    return Executable(program, "cuda-sim").run({name: a.copy() for name, a in given.items()})["x"]


@pytest.mark.parametrize("tables", [1, 4])
def test_a_choice_of_a_call_hands_on_rows_or_stores_them(tables: int) -> None:
    """Few rows are added up as partial results, and read where they are stored; many come sorted.  Of several tables
    both are in one call, each for some of them.
    """
    names = [f"x{n}" for n in range(tables)]

    def fn(**given: Any) -> dict[str, Any]:
        return {x: _step_by_rows(given[x], given[f"i.{x}"], given[f"u.{x}"])["x"] for x in names}

    types = {x: f"f32[V{x},64]" for x in names}
    types |= {f"i.{x}": f"i64[N{x}]" for x in names} | {f"u.{x}": f"f32[N{x},64]" for x in names}
    module = gradc.compile(gradc.trace(fn, **types), (), "cuda-sim")
    program = module.forward.program
    handed = [b.name for b in program.of_kind("forwarded")]
    assert len(handed) == tables and bool(program.batches) == (tables > 1)
    assert parse_program(str(program)) == program
    with pytest.raises(Unsupported, match="a choice of kernels that hand on rows on the target cpu"):
        Executable(program, "cpu")
    rng, taken = np.random.default_rng(0), set()
    for sizes in ({x: 40 for x in names}, {x: 6000 if n % 2 == 0 else 40 for n, x in enumerate(names)}):
        dims = {f"N{x}": 30 * size // 8 for x, size in sizes.items()} | {f"V{x}": size for x, size in sizes.items()}
        taken.add(len(program.handed_on(dims)))
        given = {x: rng.standard_normal((size, 64)).astype(np.float32) for x, size in sizes.items()}
        for x, size in sizes.items():
            given[f"i.{x}"] = rng.integers(0, size, dims[f"N{x}"])
            given[f"u.{x}"] = rng.standard_normal((dims[f"N{x}"], 64)).astype(np.float32)
        found = module.forward.run({name: a.copy() for name, a in given.items()})
        for x in names:
            total = np.zeros(given[x].shape, np.longdouble)
            np.add.at(total, given[f"i.{x}"], given[f"u.{x}"].astype(np.longdouble))
            wanted = _wanted(_step_by_rows, given[x].astype(np.longdouble), total)
            np.testing.assert_allclose(found[x].astype(np.float64), wanted.astype(np.float64), rtol=1e-5, atol=1e-6)
    assert taken == {0, -(-tables // 2)}


def test_what_a_reader_loads_is_counted_for_all_finished_rows() -> None:
    """Also where fewer rows are added up: 40 rows and their i64 keys, and a table of 1000 that is read and written."""
    graph = gradc.trace(_step_of_table, x="f32[1000,64]", i="i64[40]", u="f32[40,64]")
    program = gradc.compile(graph, (), "cuda-sim", reductions={"*": "segmented"}).forward.program
    (kernel,) = [k for k in launched(program) if isinstance(k, Kernel) and k.handed_on]
    moved = kernel_bytes(kernel, program.types, {}, program.handed_on({}))
    assert moved == 4 * 64 * (40 + 2 * 1000) + 8 * 40


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_kernels_that_hand_on_rows_are_no_two_whose_fusion_was_missed(target: str) -> None:
    graph = gradc.trace(_index_add, x="f32[V,64]", i="i64[N]", u="f32[N,64]")
    module = gradc.compile(graph, (), target, reductions={"*": "segmented"})
    assert module.forward.program.forwards
    assert "are two kernels" not in str(module.explain())


def test_what_a_gpu_has_no_text_for() -> None:
    """Rows whose columns are scanned on a GPU are no reader of its, nor are those that a task has only a part of, and
    are not handed on.
    """
    bag = lambda o, i, w: ops.cumsum(bags(o, i, w), axis=1)
    for fn, columns in ((bag, 64), (FORWARDED["several passes"], "D"), (FORWARDED["several passes"], 4096)):
        graph = gradc.trace(fn, o="i64[B]", i="i64[N]", w=f"f32[V,{columns}]")
        module = gradc.compile(graph, (), "cuda", reductions={"*": "segmented"})
        assert not module.forward.program.of_kind("forwarded")
    scanned = """%0 = load t[v, d] : f32
    %1 = scan %0 {combine="sum", reverse=false} : f32"""
    text = TEXT.replace("%0 = load t[v, d] : f32\n    %1 = add %0, %0 : f32", scanned)
    program = parse_program(text)
    with pytest.raises(Unsupported, match="'t', which is forwarded"):
        render_cuda(program)
    with pytest.raises(Unsupported, match="target cuda-sim"):
        Executable(program, "cuda-sim")
    given = {"k": np.array([0, 0, 3]), "x": np.arange(9, dtype=np.float32).reshape(3, 3)}
    found, wanted = (Executable(program, target, dims={"V": 5}).run(given)["y"] for target in ("cpu", "numpy"))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("states", [2, 4])
def test_rows_are_handed_on_where_registers_are_enough(states: int) -> None:
    """Of AdamW's state and not of AMSGrad's with an average, of which a thread would have 88 elements at once."""

    def fn(x: Any, i: Any, u: Any, **state: Any) -> dict[str, Any]:
        total = ops.index_add(ops.cast(x, "f32") * 0.0, 0, i, ops.cast(u, "f32"))
        new = {name: old * 0.5 + total for name, old in state.items()}
        return {**new, "x": ops.cast(ops.cast(x, "f32") - sum(new.values()), "bf16")}

    types = {f"s{n}": "f32[V,D]" for n in range(states)} | {"x": "bf16[V,D]", "i": "i64[N]", "u": "bf16[N,D]"}
    graph = gradc.trace(fn, **types)
    program = gradc.compile(graph, (), "cuda", reductions={"*": "segmented"}, donate=["x"]).forward.program
    assert len(program.of_kind("forwarded")) == (states < 4)


def test_a_gpu_hands_on_rows_of_several_tables_at_once() -> None:
    """Whose kernels have one text, and start together."""
    tables = {f"x{n}": (size, 20 * size // (n + 1)) for n, size in enumerate((40, 70, 30, 100))}

    def fn(**given: Any) -> dict[str, Any]:
        return {name: ops.index_add(given[name], 0, given[f"i.{name}"], given[f"u.{name}"]) for name in tables}

    types, given, rng = {}, {}, np.random.default_rng(0)
    for name, (size, rows) in tables.items():
        types |= {name: f"f64[{size},8]", f"i.{name}": f"i64[{rows}]", f"u.{name}": f"f64[{rows},8]"}
        given |= {name: rng.standard_normal((size, 8)), f"i.{name}": rng.integers(0, size, rows)}
        given[f"u.{name}"] = rng.standard_normal((rows, 8))
    module = gradc.compile(gradc.trace(fn, **types), (), "cuda-sim", reductions={"*": "segmented"})
    program = module.forward.program
    assert len(program.of_kind("forwarded")) == len(tables) and program.batches
    found = module(**given)
    for name in tables:
        wanted = given[name].copy()
        np.add.at(wanted, given[f"i.{name}"], given[f"u.{name}"])
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12, atol=1e-12)
