"""Loops over blocks of rows: their text, their meaning, and what the verifier refuses."""

from __future__ import annotations

import numpy as np
import pytest

from gradc.errors import IRFormatError, TypeRuleError
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program

TEXT = """program @attention {
  input q: f32[B,N,4]
  input k: f32[B,M,4]
  input dy: f32[B,N,M]
  output row: f32[B,N]
  output y: f32[B,N,4]
  output dk: f32[B,M,4]
  loop over(b: B) rows(r: N) by(3) count(c) {
    block s: f32[c,M]
    call @matmul_0 axes(m: c, n: M, k: 4) s[m, n] <- matmul q[(b), m + (r), k], k[(b), n, k]
    kernel @squares rows(i: c) cols(j: M) {
      phase
      %0 = load s[i, j] : f32
      %1 = load dy[(b), i + (r), j] : f32
      %2 = mul %0, %1 : f32
      %3 = sum_cols %2 : f32
      store row[(b), i + (r)] <- %3 : f32
      store s[i, j] <- %2 : f32
    }
    call @matmul_1 axes(m: c, n: 4, k: M) y[(b), m + (r), n] <- matmul s[m, k], k[(b), k, n]
    call @matmul_2 axes(m: M, n: 4, k: c) dk[(b), m, n] += matmul s[k, m], q[(b), k + (r), n]
  }
  return row=row, y=y, dk=dk
}"""


def test_the_text_parses_back():
    program = parse_program(TEXT)
    assert str(program) == TEXT
    assert parse_program(str(program)) == program
    verify_program(program)
    assert program.dims == ("B", "N", "M")
    assert program.buffer["s"].kind == "block" and len(program.kernels) == 1


@pytest.mark.parametrize("rows", (0, 1, 2, 3, 4, 6, 7))
@pytest.mark.parametrize("batch", (0, 1, 3))
def test_the_interpreter_runs_it_block_by_block(rows, batch):
    rng = np.random.default_rng(rows)
    q, k, dy = (rng.standard_normal(s).astype(np.float32) for s in ((batch, rows, 4), (batch, 5, 4), (batch, rows, 5)))
    got = run_program(parse_program(TEXT), {"q": q, "k": k, "dy": dy}, precision="f64")
    q, k, dy = (x.astype(np.float64) for x in (q, k, dy))
    s = np.einsum("bmk,bnk->bmn", q, k) * dy
    np.testing.assert_allclose(got["row"], s.sum(-1), atol=1e-13)
    np.testing.assert_allclose(got["y"], s @ k, atol=1e-13)
    np.testing.assert_allclose(got["dk"], np.swapaxes(s, 1, 2) @ q, atol=1e-13)  # zeros, where there are no rows


@pytest.mark.parametrize(
    ("old", "new", "message"),
    (
        ("store row[(b), i + (r)] <- %3", "store row[(b), i] <- %3", "where another block does"),
        ("dk[(b), m, n] +=", "dk[(b), m, n] <-", "where another block does"),
        ("y[(b), m + (r), n] <-", "y[(b), m + (r), n] +=", "where another block does"),
        ("loop over(b: B) rows(r: N)", "loop over(b: B) rows(M: N)", "binds M, which is taken"),
        ("by(3)", "by(0)", "1 at least"),
        ("count(c) {", "count(c) cols(w: M) to(M - r) {", "does not rise with r"),
        ("load dy[(b), i + (r), j]", "load dy[(b), i + (2*r), j]", "not known to stay inside"),
        ("matmul q[(b), m + (r), k], k[(b), n, k]", "matmul y[(b), m, k], k[(b), n, k]", "another block writes"),
        ("matmul s[m, k], k[(b), k, n]", "matmul s[m, k], dk[(b), k, n]", "another block writes"),
        ("block s: f32[c,M]", "block y: f32[c,M]", "defined twice"),
        (
            "axes(m: c, n: 4, k: M) y[(b), m + (r), n]",
            "axes(m: c, n: 4, k: M) y[(b), n, m + (r)]",
            "one axis at each place",
        ),
    ),
)
def test_what_the_verifier_refuses(old, new, message):
    assert old in TEXT
    with pytest.raises(TypeRuleError, match=message):
        verify_program(parse_program(TEXT.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    (
        ("rows(r: N)", "rows(r: N, t: M)", "one axis of rows, not 2"),
        ("count(c) {", "count() {", "number of a block's rows"),
        ("rows(r: N) by(3)", "rows(r: N)", "expected 'by'"),
        ("count(c) {", "count(c) cols(w: M) {", "expected 'to'"),
        ("+= matmul s", "-= matmul s", "expected '<-'"),
    ),
)
def test_what_the_parser_refuses(old, new, message):
    assert old in TEXT
    with pytest.raises(IRFormatError, match=message):
        parse_program(TEXT.replace(old, new))
