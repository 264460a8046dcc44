"""Loop transformations: what a kernel of any form computes stays; and what each of them refuses, and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradc
from gradc import interp, ops
from gradc.analysis.strategies import ATOMIC
from gradc.ir.kernel import Buffer, Kernel, Program
from gradc.ir.program_text import parse_program
from gradc.ir.statement import Index, Stmt
from gradc.ir.types import BOOL, F32, I64, Type
from gradc.ir.verify import verify_program
from gradc.passes.loops.accums import demote_reductions, promote_accums, store_sums
from gradc.passes.loops.copies import find_copy, write_through
from gradc.passes.loops.fission import fission
from gradc.passes.loops.fuse import fuse
from gradc.passes.loops.hoist import hoist_loads
from gradc.passes.loops.legality import IllegalMove, attempt
from gradc.passes.loops.relayout import relayout
from gradc.passes.loops.reorder import reorder
from gradc.passes.loops.split import split
from gradc.passes.loops.unroll import unroll
from gradc.passes.loops.views import find_view, inline_view, pad

PLACES = 5
"""Rows of what is scattered to."""


@st.composite
def kernels(draw: st.DrawFn) -> Program:
    """A program of one kernel over two to four short axes: loads at affine places and at data, tests, selects, sums of
    columns, a scan, and one or two effects of any level.
    """
    axes = [(name, draw(st.integers(1, 4))) for name in "nmkw"[: draw(st.integers(2, 4))]]
    cut = draw(st.integers(0, len(axes)))
    rows, cols, sizes = tuple(axes[:cut]), tuple(axes[cut:]), dict(axes)
    buffers: list[Buffer] = []
    body: list[Stmt] = []
    levels: dict[str, set[str]] = {}

    def value(op: str, dtype: Any, level: set[str], args: tuple[str, ...] = (), **rest: Any) -> str:
        body.append(Stmt(f"%{len(levels)}", op, args, dtype, **rest))
        levels[body[-1].name] = level
        return body[-1].name

    def some_axes() -> list[str]:
        return draw(st.permutations(draw(st.lists(st.sampled_from(list(sizes)), unique=True))))

    def load(dtype: Any = F32, **rest: Any) -> str:
        along = some_axes()
        far = [(a, draw(st.integers(1, 2)), draw(st.integers(0, 1))) for a in along]
        shape = tuple((sizes[a] - 1) * step + first + 1 for a, step, first in far)
        buffers.append(Buffer(f"x{len(buffers)}", Type(dtype, shape), "input"))
        index = tuple(Index(first, ((a, step),)) for a, step, first in far)
        level = {*along} | levels.get(rest.get("where", ""), set())
        return value("load", dtype, level, buffer=buffers[-1].name, index=index, **rest)

    floats = [load()]
    place = load(I64)
    place = value("clamp_index", I64, levels[place], (place,), attrs=(("oob", "clip"), ("size", PLACES)))
    mask = ""
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["load", "add", "mul", "test", "where", "masked", "reduce", "scan"]))
        a, b = draw(st.sampled_from(floats)), draw(st.sampled_from(floats))
        if kind == "load":
            floats.append(load())
        elif kind in ("add", "mul"):
            floats.append(value(kind, F32, levels[a] | levels[b], (a, b)))
        elif kind == "test":
            axis, at = draw(st.sampled_from(axes))[0], draw(st.integers(0, 3))
            bounds = (("hi", at + 1), ("lo", at))
            mask = value("in_bounds", BOOL, {axis}, index=(Index.of(axis),), attrs=bounds)
        elif kind == "where" and mask:
            floats.append(value("where", F32, levels[mask] | levels[a] | levels[b], (mask, a, b)))
        elif kind == "masked" and mask:
            floats.append(load(where=mask))
        elif kind == "reduce" and cols:
            op = draw(st.sampled_from(["sum_cols", "max_cols"]))
            floats.append(value(op, F32, levels[a] - {c for c, _ in cols}, (a,)))
        elif kind == "scan" and len(cols) == 1:
            attrs = (("combine", "sum"), ("reverse", False))
            floats.append(value("scan", F32, levels[a] | {c for c, _ in cols}, (a,), attrs=attrs))
    for number in range(draw(st.integers(1, 2))):
        stored = draw(st.sampled_from(floats))
        along = some_axes()
        if draw(st.booleans()):
            own = sorted(levels[stored] | {*along})
            buffers.append(Buffer(f"y{number}", Type(F32, tuple(sizes[a] for a in own)), "output"))
            body.append(Stmt("", "store", (stored,), F32, buffers[-1].name, tuple(map(Index.of, own))))
            continue
        at = [Index.of(a) for a in along] + ([Index.of(place)] if draw(st.booleans()) else [])
        shape = (*(sizes[a] for a in along), *([PLACES] if len(at) > len(along) else []))
        combine = draw(st.sampled_from([(), (("combine", "max"),)]))
        where = mask if draw(st.booleans()) else ""
        buffers.append(Buffer(f"y{number}", Type(F32, shape), "output"))
        body.append(Stmt("", "accum", (stored,), F32, buffers[-1].name, tuple(at), where, combine))
    outputs = tuple((b.name, b.name) for b in buffers if b.kind == "output")
    return Program("p", tuple(buffers), (Kernel("k_0", rows, cols, tuple(body)),), outputs=outputs)


def arrays(program: Program) -> dict[str, np.ndarray]:
    """Small whole numbers, whose sums and products are exact in f64."""
    rng = np.random.default_rng(0)
    return {
        b.name: rng.integers(0, PLACES, b.type.shape).astype(b.type.dtype.np) for b in program.of_kind("input")
    }  # fmt: skip


def require_same(before: Program, after: Program) -> None:
    """Both are valid, which proves that no access leaves its buffer, and they compute the same, exactly."""
    verify_program(before)
    verify_program(after)
    given = arrays(before)
    want, got = (interp.run(p, given, precision="f64") for p in (before, after))
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], f"{before}\n{after}")


def moves(kernel: Kernel, types: dict[str, Type]) -> list[Callable[[], Kernel]]:
    """Every transformation of a kernel, with every argument."""
    axes = (*kernel.rows, *kernel.cols)
    chosen = [c for size in range(len(axes) + 1) for c in itertools.permutations(axes, size)]
    return [
        *(lambda c=c: reorder(kernel, [a for a, _ in c]) for c in chosen),
        *(lambda c=c: unroll(kernel, c) for c in chosen if [*c] == [a for a in axes if a in c]),
        *(lambda a=a, step=step: split(kernel, a, step)[0] for a, n in axes for step in range(1, n + 1)),  # type: ignore[misc]
        lambda: promote_accums(kernel),
        lambda: demote_reductions(kernel),
        lambda: store_sums(kernel, types),
        lambda: hoist_loads(kernel, types),
    ]


@settings(max_examples=300, deadline=None)
@given(kernels(), st.data())
def test_what_is_legal_changes_nothing(program: Program, data: st.DataObject) -> None:
    """One transformation after another, each drawn from all those of the kernel before."""
    (kernel,) = program.kernels
    for _ in range(3):
        kernel = attempt(data.draw(st.sampled_from(moves(kernel, dict(program.types))))) or kernel
    require_same(program, replace(program, steps=(kernel,)))


TEXT = """program @p {
  input x: f32[4,3,8]
  input t: i64[4,3]
  output y: f32[%s]
  kernel @k_aaaaaa rows(n: 4) cols(%s) {
%s
  }
  return y=y
}
"""


def kernel_of(y: str, cols: str, *lines: str) -> Kernel:
    program = parse_program(TEXT % (y, cols, "\n".join(f"    {line}" for line in lines)))
    verify_program(program)
    (kernel,) = program.kernels
    return kernel


X = "%0 = load x[n, k, w] : f32"
SUM, KW = (X, "%1 = sum_cols %0 : f32", "store y[n] <- %1 : f32"), "k: 3, w: 8"
ADD = (X, "accum y[n] <- %0 : f32")
SCAN = ("%0 = load x[n, 0, w] : f32", '%1 = scan %0 {combine="sum", reverse=false} : f32', "store y[n, w] <- %1 : f32")
CHECK = ("%0 = load t[n, k] : i64", 'check %0 {bound=8, op="o", source="t"}')
TWICE = (X, "%1 = sum_cols %0 : f32", "accum y[] <- %1 : f32", "%2 = exp %1 : f32", "accum y[] <- %2 : f32")
CASES: dict[str, tuple[Callable[[Kernel], object], tuple[str, ...], str]] = {
    "reorder: a reduction": (lambda k: reorder(k, ["w"]), ("4", KW, *SUM), "reads a reduction"),
    "reorder: a scan": (lambda k: reorder(k, []), ("4,8", "w: 8", *SCAN), "scans its columns"),
    "reorder: a check": (lambda k: reorder(k, ["n"]), ("4", "k: 3", *CHECK, "%1 = load x[n, 0, 0] : f32",
                                                       "store y[n] <- %1 : f32"), "first bad position"),
    "reorder: an accum of rows": (
        lambda k: reorder(k, []),
        ("", KW, "%0 = load x[n, 0, 0] : f32", "accum y[] <- %0 : f32"),
        "would be executed over ['k', 'n', 'w'], not ['n']",
    ),
    "reorder: a store that columns without elements would leave out": (
        lambda k: reorder(k, []),
        ("4", KW, "%0 = load x[n, 0, 0] : f32", "store y[n] <- %0 : f32"),
        "would be executed",
    ),
    "reorder: a sum to a place of its own": (
        lambda k: reorder(k, ["n", "k", "w"]),
        ("4", KW, X, "%1 = sum_cols %0 : f32", "accum y[n] <- %1 : f32"),
        "to one place for each column",
    ),
    "split: no whole blocks": (lambda k: split(k, "w", 3), ("4", KW, *SUM), "no whole blocks of 3"),
    "split: a name that is taken": (lambda k: split(k, "w", 2), ("4", "w: 8, wr: 3", "%0 = load x[n, wr, w] : f32",
                                                                 "accum y[n] <- %0 : f32"), "an axis wr"),
    "split: a scan": (lambda k: split(k, "w", 2), ("4,8", "w: 8", *SCAN), "scans w"),
    "unroll: some columns of a sum": (lambda k: unroll(k, [("k", 3)]), ("4", KW, *SUM), "no chain"),
    "unroll: columns of a sum in another order": (
        lambda k: unroll(k, [("w", 8), ("k", 3)]), ("4", KW, *SUM), "no chain"),
    "unroll: no such axis": (lambda k: unroll(k, [("w", 7)]), ("4", KW, *SUM), "no axes of constant sizes"),
    "unroll: a check": (lambda k: unroll(k, [("k", 3)]), ("4", "k: 3", *CHECK, "%1 = load x[n, 0, 0] : f32",
                                                          "store y[n] <- %1 : f32"), "first bad position"),
    "unroll: a scan": (lambda k: unroll(k, [("w", 8)]), ("4,8", "w: 8", *SCAN), "scans its columns"),
    "unroll: an accum of all rows": (
        lambda k: unroll(k, [("n", 4)]),
        ("", KW, "%0 = load x[0, k, w] : f32", "accum y[] <- %0 : f32"),
        "more often",
    ),
    "unroll: an accum whose last column goes": (
        lambda k: unroll(k, [("k", 3)]),
        ("4", KW, "%0 = load x[n, k, 0] : f32", "accum y[n] <- %0 : f32"),
        "more often",
    ),
    "promote: a place of columns": (promote_accums, ("4,3", KW, X, "accum y[n, k] <- %0 : f32"), "columns decide"),
    "promote: a mask of columns": (
        promote_accums,
        ("4", KW, X, "%1 = in_bounds k {hi=2, lo=1} : bool", "accum y[n] <- %0 where %1 : f32"),
        "columns decide",
    ),
    "promote: an accum of rows": (
        promote_accums, ("4", KW, "%0 = load x[n, 0, 0] : f32", "accum y[n] <- %0 : f32"), "of rows"),
    "demote: read by a store": (demote_reductions, ("4", KW, *SUM), "reads a reduction"),
    "demote: combined otherwise": (
        demote_reductions,
        ("4", KW, X, "%1 = max_cols %0 : f32", "accum y[n] <- %1 : f32"),
        "reads a reduction",
    ),
    "demote: a count": (
        demote_reductions,
        ("4", KW, "%0 = load x[n, 0, 0] : f32", "%1 = sum_cols %0 : f32", "accum y[n] <- %1 : f32"),
        "counts its columns",
    ),
    "demote: a sum for each column": (
        demote_reductions, ("4,3", KW, X, "%1 = sum_cols %0 : f32", "accum y[n, k] <- %1 : f32"), "once per column"),
    "store: rows": (lambda k: store_sums(k, {}), ("", KW, *TWICE), "each of its rows"),
    "store: two into one": (
        lambda k: store_sums(replace(k, rows=(), cols=(*k.rows, *k.cols)), {"y": Type(F32, ())}),
        ("", KW, *TWICE),
        "not all that its buffer gets",
    ),
    "store: one element of several": (
        lambda k: store_sums(replace(k, rows=(), cols=(*k.rows, *k.cols)), {"y": Type(F32, (2,))}),
        ("2", KW, X, "%1 = sum_cols %0 : f32", "accum y[0] <- %1 : f32"),
        "not all that its buffer gets",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_legal_is_refused_with_its_reason(case: str) -> None:
    move, text, why = CASES[case]
    with pytest.raises(IllegalMove, match=re.escape(why)):
        move(kernel_of(*text))


def test_a_kernel_whose_strategies_are_chosen_is_left() -> None:
    chosen = replace(kernel_of("4", KW, *ADD), strategy=(("y", "atomic"),))
    for move in moves(chosen, {}):
        made = attempt(move)
        assert made is None or made.rows == chosen.rows  # what only moves loads


def test_what_is_read_and_written_is_not_unrolled() -> None:
    kernel = kernel_of("4,3", "k: 3", "%0 = load x[n, k, 0] : f32", "store y[n, k] <- %0 : f32")
    both = replace(kernel, body=tuple(replace(s, buffer="y") for s in kernel.body))
    with pytest.raises(IllegalMove, match="reads what it writes"):
        unroll(both, [("k", 3)])


def test_moves_that_are_wanted_are_legal() -> None:
    """What the passes ask for most, so that no check refuses everything."""
    add = kernel_of("4", KW, *ADD)
    assert promote_accums(add).stmts.keys() == {"%0", "%2"}
    assert demote_reductions(promote_accums(add)).body == add.body
    assert [a for a, _ in reorder(add, ["n"]).rows] == ["k", "w"]
    assert reorder(promote_accums(kernel_of("", KW, X, "accum y[] <- %0 : f32")), ["n", "k", "w"]).rows == ()
    assert len(unroll(kernel_of("4", KW, *SUM), add.cols).body) == 24 + 23 + 1
    assert split(add, "w", 4)[0].cols == (("k", 3), ("w", 2), ("wr", 4))
    assert split(add, "w", 8)[0].cols == (("k", 3), ("wr", 8))


def test_branches_on_unrolled_axes_are_folded() -> None:
    kernel = kernel_of("4,3", "k: 3", "%0 = load x[n, 0, 0] : f32", "%1 = load x[n, 1, 0] : f32",
                       "%2 = in_bounds k {hi=2, lo=1} : bool", "%3 = where %2, %0, %1 : f32",
                       "store y[n, k] <- %3 : f32")  # fmt: skip
    made = unroll(kernel, kernel.cols).live
    assert [s.op for s in made.body] == ["load", "load", "store", "store", "store"]
    assert [s.args for s in made.body[2:]] == [("%1",), ("%0",), ("%1",)]


FUSED = """program @p {
  input x: f32[4,3]
  input z: f32[4]
  temp t: f32[4]
  temp u: f32[4]
  output y: f32[4,3]
  output v: f32[4]
  kernel @one_aaaaaa rows(n: 4) cols(k: 3) {
    phase
    %0 = load x[n, k] : f32
    %1 = sum_cols %0 : f32
    store t[n] <- %1 : f32
  }
  kernel @between_bbbbbb rows(n: 4) cols() {
    %0 = load z[n] : f32
    store u[n] <- %0 : f32
  }
  kernel @two_cccccc rows() cols(i: 4) {
    phase
    %0 = load t[i] : f32
    %1 = load z[i] : f32
    %2 = mul %0, %1 : f32
    store v[i] <- %2 : f32
  }
  kernel @rest_dddddd rows(n: 4) cols(k: 3) {
    %0 = load u[n] : f32
    phase
    %1 = load x[n, k] : f32
    %2 = add %0, %1 : f32
    store y[n, k] <- %2 : f32
  }
  return y=y, v=v
}
"""


def test_two_kernels_are_fused() -> None:
    program = parse_program(FUSED)
    made = fuse(program, 0, 2)
    require_same(program, made)
    assert len(made.steps) == 3 and not any(b.name == "t" for b in made.buffers)
    assert [s.op for s in made.steps[0].body] == ["load", "sum_cols", "load", "mul", "store"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "before, after, why",
    [
        ("%1 = load z[i]", "%1 = load u[i]", "between_bbbbbb comes between"),  # its values are not there yet
        ("%0 = load u[n]", "%0 = load t[n]", "t is not between these two alone"),
        ("return y=y", "return t=t, y=y", "t is not between these two alone"),
        ("%0 = load t[i]", "%0 = load t[0]", "t is read elsewhere than it is stored"),
        ("%1 = load z[i]", "%1 = load t[i]", "t is not stored once and loaded once"),
        ("rows() cols(i: 4)", "rows() cols(i: 2)", "it does not traverse t"),
        ("store v[i]", "accum v[i]", "it does more than to store elements"),
        ("%0 = load t[i]", "%0 = load z[i]", "it has no axes in common with the producer"),
    ],
)  # fmt: skip
def test_kernels_that_are_not_fused(before: str, after: str, why: str) -> None:
    assert before in FUSED
    text = FUSED.replace(before, after)
    program = parse_program(text.replace("temp t", "output t") if "t=t" in text else text)
    with pytest.raises(IllegalMove, match=re.escape(why)):
        fuse(program, 0, 2)


SPLIT = """program @p {
  input x: f32[4,3]
  input z: f32[4]
  output s: f32[4]
  output v: f32[4]
  output y: f32[3]
  kernel @both_aaaaaa rows(n: 4) cols(k: 3) order(y) strategy(y: atomic) {
    %0 = load z[n] : f32
    %1 = mul %0, %0 : f32
    store v[n] <- %1 : f32
    phase
    %2 = load x[n, k] : f32
    %3 = sum_cols %2 : f32
    store s[n] <- %3 : f32
    phase
    %4 = mul %2, %3 : f32
    accum y[k] <- %4 : f32
  }
  return s=s, v=v, y=y
}
"""


@pytest.mark.parametrize(
    "buffer, ops, columns", [("s", ["load", "sum_cols", "store"], "k"), ("v", ["load", "mul", "store"], "n")]
)
def test_a_kernel_is_split_in_two(buffer: str, ops: list[str], columns: str) -> None:
    """The strategies of its sums stay with them; what is computed of rows alone goes along these."""
    program = parse_program(SPLIT)
    made = fission(program, 0, buffer)
    require_same(program, made)
    first, second = made.kernels
    assert [s.op for s in first.body] == ops and [a for a, _ in first.cols] == [columns]
    assert first.strategies == {} and second.strategies == {"y": ATOMIC.name}
    assert (buffer in second.reads) == (buffer == "s")


@pytest.mark.parametrize(
    "buffer, before, after, why",
    [
        ("y", "", "", "y is not stored once for each row"),
        ("v", "%1 = mul %0, %0", "%1 = exp %0 : f32\n    store v[n] <- %1", "v is not stored once for each row"),
        ("s", "    store v[n] <- %1 : f32\n", "    store s[n] <- %1 : f32\n", "s is not stored once for each row"),
    ],
)
def test_kernels_that_stay_whole(buffer: str, before: str, after: str, why: str) -> None:
    text = SPLIT.replace(before, after) if before else SPLIT
    text = text.replace("store v[n] <- %1\n    store", "store") if before else text
    text = text.replace(" : f32 : f32", " : f32")
    with pytest.raises(IllegalMove, match=re.escape(why)):
        fission(parse_program(text), 0, buffer)


def test_a_kernel_that_only_stores_is_not_split() -> None:
    text = SPLIT.replace("    accum y[k] <- %4 : f32\n", "").replace("    store v[n] <- %1 : f32\n", "")
    for gone in ("  output v: f32[4]\n", "  output y: f32[3]\n", ", v=v, y=y", " order(y) strategy(y: atomic)"):
        text = text.replace(gone, "")
    with pytest.raises(IllegalMove, match="it does nothing else"):
        fission(parse_program(text), 0, "s")


COPIED = """program @p {
  input x: f32[4,1,3]
  input a: f32[4,2,5]
  input b: f32[4,5,3]
  temp t: f32[4,1,3]
  temp p: f32[4,2,3]
  temp s: f32[4]
  output y: f32[3,4,1]
  output q: f32[2,4,3]
  output z: f32[4,1,3]
  output r: bf16[4]
  kernel @one_aaaaaa rows(n: 4) cols(k: 3) {
    phase
    %0 = load x[n, 0, k] : f32
    %1 = exp %0 : f32
    store t[n, 0, k] <- %1 : f32
    accum s[n] <- %1 : f32
  }
  call @matmul axes(b0: 4, m: 2, n: 3, k: 5) p[b0, m, n] <- matmul a[b0, m, k], b[b0, k, n]
  kernel @turn_bbbbbb rows(i: 3) cols(j: 4) {
    phase
    %0 = load t[j, 0, i] : f32
    store y[i, j, 0] <- %0 : f32
    %1 = neg %0 : f32
    store z[j, 0, i] <- %1 : f32
  }
  kernel @move_cccccc rows(i: 2, j: 4) cols(k: 3) {
    phase
    %0 = load p[j, i, k] : f32
    store q[i, j, k] <- %0 : f32
  }
  kernel @round_dddddd rows() cols(i: 4) {
    phase
    %0 = load s[i] : f32
    %1 = cast %0 {dtype=bf16} : bf16
    store r[i] <- %1 : bf16
  }
  return y=y, q=q, z=z, r=r
}
"""


@pytest.mark.parametrize("number, target, steps", [(2, "y", 5), (3, "q", 4), (4, "r", 4)])
def test_a_copy_is_written_by_its_producer(number: int, target: str, steps: int) -> None:
    """A transposed one, which its reader reads on; the rows of a product, moved; a sum, rounded."""
    program = parse_program(COPIED)
    made = write_through(program, find_copy(program, number, target))
    assert len(made.steps) == steps and len(made.buffers) == len(program.buffers) - 1
    verify_program(made)
    given = arrays(program)
    want, got = (interp.run(p, given) for p in (program, made))
    for name in want:
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]), name)


@pytest.mark.parametrize(
    "number, target, before, after, why",
    [
        (2, "z", "", "", "what it writes to z is no copy"),
        (1, "q", "", "", "it is no kernel"),
        (2, "y", "rows(i: 3)", "rows(i: 2)", "it does not copy all of t"),
        (2, "y", "load t[j, 0, i]", "load t[j, 0, 0]", "not at the same positions"),
        (2, "y", "return y=y", "return t=t, y=y", "t is memory that others have"),
        (2, "y", "temp p: f32[4,2,3]", "temp p: f32[4,2,3]\n  temp u: f32[12] of t", "t is memory that others have"),
        (2, "y", "accum s[n] <- %1", "accum y[0, n, 0] <- %1", "y is touched before"),
        (3, "q", "rows(i: 2, j: 4) cols(k: 3)", "rows(i: 2, k: 3) cols(j: 4)", "writes rows"),
        (4, "r", "accum s[n] <- %1 :", 'accum s[n] <- %1 {combine="max"} :', "no sum in f32"),
        (4, "r", "rows() cols(i: 4)", "rows() cols(i: 3)", "it does not copy all of s"),
        (4, "r", "%1 = neg %0", "%2 = load s[j] : f32\n    %1 = neg %2", "read by kernels as it is"),
    ],
)
def test_copies_that_are_not_written_by_their_producers(
    number: int, target: str, before: str, after: str, why: str
) -> None:
    text = COPIED.replace(before, after) if before else COPIED
    assert not before or before in COPIED
    if "t=t" in after:
        text = text.replace("temp t", "output t")
    if "cols(j: 4)" in after:
        text = text.replace("q: f32[2,4,3]", "q: f32[2,3,4]").replace("q[i, j, k]", "q[i, k, j]")
    with pytest.raises(IllegalMove, match=re.escape(why)):
        find_copy(parse_program(text), number, target)


def test_a_temp_lies_in_another_order() -> None:
    program = parse_program(COPIED)
    made = relayout(program, "t", (2, 0, 1))
    assert str(made.buffer["t"].type) == "f32[3,4,1]" and "store t[k, n, 0]" in str(made)
    verify_program(made)
    given = arrays(program)
    for name, want in interp.run(program, given).items():
        np.testing.assert_array_equal(np.asarray(interp.run(made, given)[name]), np.asarray(want))


@pytest.mark.parametrize("temp, why", [("p", "not only kernels"), ("x", "memory that others have")])
def test_what_does_not_lie_in_another_order(temp: str, why: str) -> None:
    with pytest.raises(IllegalMove, match=why):
        relayout(parse_program(COPIED), temp, (0, 2, 1))


VIEWED = """program @p {
  input x: f32[3,7]
  input w: f32[2,6]
  temp t: f32[3,2,7]
  temp u: f32[6,7] of t
  output y: f32[2,7]
  output z: f32[3]
  kernel @windows_aaaaaa rows(c: 3, k: 2) cols(i: 7) {
    phase
    %0 = in_bounds i + k {hi=7, lo=0} : bool
    %1 = load x[c, i + k] where %0 : f32
    store t[c, k, i] <- %1 : f32
  }
  call @matmul axes(m: 2, n: 7, k: 6) y[m, n] <- matmul w[m, k], u[k, n]
  kernel @last_bbbbbb rows() cols(c: 3) {
    phase
    %0 = load x[c, 6] : f32
    store z[c] <- %0 : f32
  }
  return y=y, z=z
}
"""
BOX = ((0, 2), (0, 7))


def test_a_product_reads_windows_of_a_padded_array() -> None:
    program = parse_program(VIEWED)
    view = find_view(program, "t")
    assert view.guarded == {1} and view.range_of(1) == (0, 7)
    padded = pad(program, "t", BOX)
    require_same(program, padded)
    made = inline_view(padded, "t")
    require_same(program, made)
    assert "matmul w[m, k], t.padded[k0, n + k1]" in str(made) and "temp u" not in str(made)
    more = """y[m, n] <- matmul w[m, k], u[k, n]
  kernel @windows_cccccc rows(c: 3) cols(i: 7) {
    phase
    %0 = in_bounds i + 1 {hi=7, lo=0} : bool
    %1 = load x[c, i + 1] where %0 : f32
    store v[c, i] <- %1 : f32
  }
  call @matmul axes(m: 3, n: 3, k: 7) q[m, n] <- matmul v[m, k], v[n, k]
"""
    buffers = "  temp v: f32[3,7]\n  output q: f32[3,3]\n  output y"
    text = VIEWED.replace("y[m, n] <- matmul w[m, k], u[k, n]\n", more).replace("  output y", buffers)
    twice = parse_program(text.replace("y=y", "y=y, q=q"))
    both = pad(pad(twice, "t", BOX), "v", BOX)
    assert [b.name for b in both.buffers if "padded" in b.name] == ["t.padded"]
    require_same(twice, inline_view(inline_view(both, "v"), "t"))


@pytest.mark.parametrize(
    "before, after, why",
    [
        ("store t[c, k, i] <- %1", "%2 = exp %1 : f32\n    store t[c, k, i] <- %2", "is computed"),
        ("temp t: f32[3,2,7]", "temp t: f32[3,2,8]", "does not store all"),
        ("return y=y", "return t=t, y=y", "memory that others have"),
        ("in_bounds i + k {hi=7, lo=0}", "in_bounds i + k {hi=7, lo=1}", "no test of its bounds"),
        ("in_bounds i + k {hi=7, lo=0}", "in_bounds i + c {hi=7, lo=0}", "no test of its bounds"),
        ("load x[c, i + k] where %0 :", "load x[c, i + k] where %0 {other=0x1p+0} :", "other values around"),
        ("rows(c: 3, k: 2) cols(i: 7)", "rows(c: 3, k: 2, j: 2) cols(i: 7)", "does not store all"),
        ("load x[c, 6] :", "load t[c, 0, 6] :", "cannot read"),
    ],
)
def test_views_that_stay(before: str, after: str, why: str) -> None:
    text = VIEWED.replace(before, after)
    assert before in VIEWED
    if "t=t" in after:
        text = text.replace("temp t", "output t")
    if "2,8" in after:
        text = text.replace("u: f32[6,7]", "u: f32[6,8]").replace("n: 7", "n: 8").replace("y: f32[2,7]", "y: f32[2,8]")
    with pytest.raises(IllegalMove, match=why):
        inline_view(pad(parse_program(text), "t", BOX), "t")


def test_a_padded_copy_has_all_that_is_read() -> None:
    program = parse_program(VIEWED)
    for box in (((0, 2), (0, 6)), ((0, 1), (0, 7)), ((0, 2), (1, 7))):
        with pytest.raises(IllegalMove, match="may be outside"):
            pad(program, "t", box)
    with pytest.raises(IllegalMove, match="read where the array is not"):
        inline_view(program, "t")


def test_an_array_that_is_written_again_is_not_read_later() -> None:
    inside = (VIEWED.replace("    %0 = in_bounds i + k {hi=7, lo=0} : bool\n", "").replace(" where %0", "")
              .replace("cols(i: 7)", "cols(i: 6)").replace("n: 7", "n: 6").replace("t: f32[3,2,7]", "t: f32[3,2,6]")
              .replace("y: f32[2,7]", "y: f32[2,6]").replace("u: f32[6,7]", "u: f32[6,6]"))  # fmt: skip
    require_same(parse_program(inside), inline_view(parse_program(inside), "t"))
    moved = inside.split("  call @matmul")
    call, last = moved[1].split("\n", 1)
    again = moved[0] + last.replace("store z[c]", "store x[c, 0]").replace(
        "  return", f"  call @matmul{call}\n  return"
    )
    with pytest.raises(IllegalMove, match="is written again"):
        inline_view(parse_program(again.replace("input x", "output x")), "t")


def test_scanned_columns_do_not_become_rows() -> None:
    """What is scattered element by element of a scan, on a GPU."""
    graph = gradc.trace(lambda x, at: ops.scatter_add(at, ops.cumsum(x, axis=0), size=7), x="f32[40]", at="i64[40]")
    rng = np.random.default_rng(0)
    x, at = rng.integers(-3, 4, 40).astype(np.float32), rng.integers(0, 7, 40)
    want = np.zeros(7, np.float32)
    np.add.at(want, at, x.cumsum())
    np.testing.assert_array_equal(gradc.compile(graph, target="cuda-sim")(x=x, at=at), want)
