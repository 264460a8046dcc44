"""Loops with blocks of columns: their text, their meaning, what the verifier refuses, and what no target lowers yet."""

from __future__ import annotations

import numpy as np
import pytest

from gradc import Executable
from gradc.errors import IRFormatError, TypeRuleError, Unsupported
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program

TEXT = """program @attention {
  input q: f32[B,N,4]
  input k: f32[B,M,4]
  input v: f32[B,M,5]
  output y: f32[B,N,5]
  output p: f32[B,N,M]
  output dk: f32[B,M,4]
  loop over(b: B) rows(r: N) by(3) count(c) tile(mma, warps 4, stages 2) {
    sweep cols(w: M) by(2) count(n) {
      carry top: f32[c] max
      carry total: f32[c] sum by exp(top)
      carry o: f32[c,5] sum by exp(top)
      block s: f32[c,n]
      block e: f32[c,n]
      call @matmul_0 axes(m: c, n: n, k: 4) s[m, n] <- matmul q[(b), m + (r), k], k[(b), n + (w), k]
      kernel @top rows(i: c) cols(j: n) {
        phase
        %0 = load s[i, j] : f32
        %1 = max_cols %0 : f32
        accum top[i] <- %1 {combine="max"} : f32
      }
      kernel @total rows(i: c) cols(j: n) {
        %0 = load top[i] : f32
        phase
        %1 = load s[i, j] : f32
        %2 = sub %1, %0 : f32
        %3 = exp %2 : f32
        store e[i, j] <- %3 : f32
        %4 = sum_cols %3 : f32
        accum total[i] <- %4 : f32
      }
      call @matmul_1 axes(m: c, n: 5, k: n) o[m, n] += matmul e[m, k], v[(b), k + (w), n]
    }
    sweep cols(w2: M) by(4) count(n2) {
      block s2: f32[c,n2]
      call @matmul_2 axes(m: c, n: n2, k: 4) s2[m, n] <- matmul q[(b), m + (r), k], k[(b), n + (w2), k]
      kernel @weights rows(i: c) cols(j: n2) {
        %0 = load top[i] : f32
        %1 = load total[i] : f32
        phase
        %2 = load s2[i, j] : f32
        %3 = sub %2, %0 : f32
        %4 = exp %3 : f32
        %5 = div %4, %1 : f32
        store p[(b), i + (r), j + (w2)] <- %5 : f32
      }
      call @matmul_3 axes(m: n2, n: 4, k: c) dk[(b), m + (w2), n] += matmul s2[k, m], q[(b), k + (r), n]
    }
    kernel @divided rows(i: c) cols(d: 5) {
      %0 = load total[i] : f32
      phase
      %1 = load o[i, d] : f32
      %2 = div %1, %0 : f32
      store y[(b), i + (r), d] <- %2 : f32
    }
  }
  return y=y, p=p, dk=dk
}"""


def test_the_text_parses_back():
    program = parse_program(TEXT)
    assert str(program) == TEXT
    assert parse_program(str(program)) == program
    assert verify_program(program) == []
    assert program.dims == ("B", "N", "M")
    assert program.buffer["s"].kind == "block" and program.buffer["top"].kind == "carry"
    assert [k.name for k in program.kernels] == ["top", "total", "weights", "divided"]
    assert program.loops[0].writes == ("p", "dk", "y") and program.loops[0].reduces_rows


def test_bounds_parse_back():
    text = TEXT.replace("by(2) count(n) {", "by(2) count(n) from(r) to(r + c) {")
    program = parse_program(text)
    assert " from(r) to(c+r) {" in str(program) and parse_program(str(program)) == program
    verify_program(program)


@pytest.mark.parametrize("precision", ("f64", "longdouble"))
@pytest.mark.parametrize("columns", (1, 2, 5, 8))
@pytest.mark.parametrize("rows", (0, 1, 3, 7))
def test_the_interpreter_runs_it_block_by_block(rows, columns, precision):
    wide = np.longdouble if precision == "longdouble" else np.float64
    rng = np.random.default_rng(rows)
    shapes = ((2, rows, 4), (2, columns, 4), (2, columns, 5))
    q, k, v = (3 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    got = run_program(parse_program(TEXT), {"q": q, "k": k, "v": v}, precision=precision)
    q, k, v = (x.astype(wide) for x in (q, k, v))
    scores = np.einsum("bmk,bnk->bmn", q, k)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    close = 32 * np.finfo(wide).eps
    assert got["p"].dtype == wide
    np.testing.assert_allclose(got["p"], weights, rtol=64 * close, atol=0)
    np.testing.assert_allclose(got["y"], weights @ v, rtol=64 * close, atol=close)
    np.testing.assert_allclose(got["dk"], np.swapaxes(scores, 1, 2) @ q, rtol=64 * close, atol=64 * close)


def test_carries_begin_with_what_changes_nothing():
    """Without columns a sweep has no block."""
    empty = np.zeros((1, 0, 4), np.float32), np.zeros((1, 0, 5), np.float32)
    got = run_program(parse_program(TEXT), {"q": np.ones((1, 2, 4), np.float32), "k": empty[0], "v": empty[1]})
    assert np.isnan(got["y"]).all() and got["y"].shape == (1, 2, 5)  # 0 / 0


def test_all_columns_come_in_the_block_that_begins_a_sum_over_rows():
    """Blocks of rows that come later add to what it wrote, from(...) to(...) or not."""
    text = TEXT.replace("by(4) count(n2) {", "by(4) count(n2) from(M) to(0) {")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 5, 4), (1, 6, 4), (1, 6, 5)))
    got = run_program(parse_program(text), {"q": q, "k": k, "v": v}, precision="f64")
    q, k = (x.astype(np.float64) for x in (q, k))
    last = q[:, 3:]  # blocks of rows 3 and 4, then 0 to 2, which has no columns
    np.testing.assert_allclose(got["dk"], np.einsum("bmk,bnk->bnm", last, k) @ last, atol=1e-13)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    (
        ("sweep cols(w: M)", "sweep cols(N: M)", "binds N, which is taken"),
        ("store p[(b)", "store nowhere[(b)", "the buffer nowhere is not defined"),
        ("matmul e[m, k]", "matmul nowhere[m, k]", "the buffer nowhere is not defined"),
        ("sweep cols(w2: M)", "sweep cols(w: M)", "binds w, which is taken"),
        ("by(2) count(n)", "by(0) count(n)", "blocks of 0 columns: 1 at least"),
        ("by(2) count(n) {", "by(2) count(n) to(n) {", "n is no size of a block of rows"),
        ("tile(mma, ", "tile(wmma, ", "there is no such tile; there are mma"),
        ("stages 2)", "stages 2, parts 0)", "there is no such tile; .* 1 part or more"),
        ("warps 4", "warps 0", "there is no such tile"),
        ("stages 2", "stages 99", "there is no such tile"),
        ("block s2: f32[c,n2]", "block e: f32[c,n2]", "the buffer e is defined twice"),
        ("carry top: f32[c] max", "carry top: f32[n] max", "does not begin with the c rows"),
        ("carry o: f32[c,5]", "carry o: f32[c,n]", "does not begin with the c rows"),
        ("carry top: f32[c] max", "carry top: f32[c] mean", "combines by 'mean'"),
        ("f32[c] sum by exp(top)", "f32[c] sum by exp(total)", "total is no maximum of floats"),
        ("f32[c] sum by exp(top)", "f32[c] sum by exp(o)", "o is no maximum of floats"),
        ("f32[c] sum by exp(top)", "f32[c] prod by exp(top)", "only a sum is by exp"),
        ('{combine="max"}', '{combine="sum"}', "does not combine with top by max, once"),
        ("accum total[i] <- %4", "store total[i] <- %4", "does not combine with total by sum, once"),
        ("o[m, n] += matmul e", "o[m, n] <- matmul e", "does not combine with o by sum, once"),
        ("accum total[i] <- %4", "accum top[i] <- %4", "2 steps combine with top: 1 does"),
        ("load s[i, j] : f32\n        %2", "load e[i, j] : f32\n        %2", "read before anything is written"),
        ("load top[i] : f32\n        phase\n", "load total[i] : f32\n", "reads total before all columns are in it"),
        ("accum total[i] <- %4", "accum total[0] <- %4", "does not combine each row with its own of total"),
        ("load s2[i, j]", "load s[i, j]", "touches s of another sweep"),
        ("%1 = load o[i, d]", "%1 = load s2[i, d]", "touches s2 of another sweep"),
        ("store y[(b), i + (r), d] <- %2", "store total[i] <- %0", "writes total"),
        ("store p[(b), i + (r), j + (w2)]", "store p[(b), i + (r), j]", "where another block does"),
        ("dk[(b), m + (w2), n] +=", "dk[(b), m, n] +=", "where another block does"),
        ("by(4) count(n2) {", "by(4) count(n2) to(r + c) {", "weights leaves columns of p unwritten"),
        ("by(4) count(n2) {", "by(4) count(n2) from(r) {", "weights leaves columns of p unwritten"),
        ("store p[(b)", "accum p[(b)", "weights combines with all of p"),
        ("store y[(b)", "accum y[(b)", "divided combines with all of y"),
        ("k[(b), n + (w), k]", "k[(b), n + (w + 1), k]", "not known to stay inside"),
        ("j + (w2)] <- %5", "j + (w)] <- %5", "not known to stay inside|where another block does"),
    ),
)  # fmt: skip
def test_what_the_verifier_refuses(old, new, message):
    assert old in TEXT
    with pytest.raises(TypeRuleError, match=message):
        verify_program(parse_program(TEXT.replace(old, new, 1)))


def test_a_maximum_is_not_read_before_its_block_is_in_it():
    """Nor does a step sum by a maximum that a later one raises."""
    first, second = TEXT.index("      kernel @top"), TEXT.index("      kernel @total")
    end = TEXT.index("      call @matmul_1")
    swapped = TEXT[:first] + TEXT[second:end] + TEXT[first:second] + TEXT[end:]
    with pytest.raises(TypeRuleError, match="reads top before the block is in it"):
        verify_program(parse_program(swapped))
    unread = swapped.replace("%0 = load top[i] : f32\n        phase\n        %1", "phase\n        %1", 1)
    unread = unread.replace("sub %1, %0", "sub %1, %1", 1)
    with pytest.raises(TypeRuleError, match="raises top after total was summed"):
        verify_program(parse_program(unread))


def test_a_tile_needs_a_sweep_and_columns_are_cut_once():
    plain = TEXT[: TEXT.index("    sweep")] + TEXT[TEXT.index("    kernel @divided") :]
    with pytest.raises(TypeRuleError, match="a tile has blocks of columns"):
        verify_program(parse_program(plain))
    both = TEXT.replace("count(c) tile", "count(c) cols(x: M) to(r) tile")
    with pytest.raises(TypeRuleError, match="are cut by these"):
        verify_program(parse_program(both))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    (
        ("cols(w: M)", "cols(w: M, u: N)", "one axis of columns, not 2"),
        ("by(2) count(n)", "count(n)", "expected 'by'"),
        ("sum by exp(top)", "sum by log(top)", "expected 'exp'"),
        ("carry top: f32[c] max", "carry top: f32[c]", "what it combines by"),
        ("warps 4", "warps four", "warps|a value"),
        ("tile(mma, warps 4, stages 2)", "tile(mma, warps 4)", "expected ','"),
        ("stages 2)", "stages 2, parts 2, split 2)", "expected"),
        ("stages 2)", "stages 2, parts true)", "the parts of a tile are a number"),
        ("tile(mma, warps 4, stages 2)", f"tile(mma, warps {'9' * 5000}, stages 2)", "."),
    ),
)
def test_what_the_parser_refuses(old, new, message):
    assert old in TEXT
    with pytest.raises(IRFormatError, match=message):
        parse_program(TEXT.replace(old, new, 1))


@pytest.mark.parametrize("target", ("cpu", "cuda-sim", "cuda"))
def test_no_target_lowers_it_and_says_so_at_once(target):
    with pytest.raises(
        Unsupported, match=f"blocks of columns on the target {target}: attention has one in 'loop matmul_0'"
    ):
        Executable(parse_program(TEXT), target)


def test_the_numpy_target_runs_it():
    q = np.ones((1, 2, 4), np.float32)
    v = np.ones((1, 2, 5), np.float32)
    np.testing.assert_array_equal(Executable(parse_program(TEXT), "numpy").run(q=q, k=q, v=v)["y"], v)
