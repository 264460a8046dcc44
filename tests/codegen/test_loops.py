"""Loops over blocks of rows in C: what the interpreter says, with any number of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradc import knobs
from gradc.interp import run_program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.program.plan_buffers import plan_buffers
from gradc.runtime.executable import Executable
from gradc.runtime.host import pool
from gradc.runtime.host.cpu import CpuProgram

TEXT = """program @attention {
  input q: f32[B,N,4]
  input k: f32[B,M,4]
  input dy: f32[B,N,M]
  output row: f32[B,N]
  output y: f32[B,N,4]
  output dk: f32[B,M,4]
  loop over(b: B) rows(r: N) by(16) count(c) {
    block s: f32[c,M]
    block t: f32[c,M]
    call @matmul_0 axes(m: c, n: M, k: 4) s[m, n] <- matmul q[(b), m + (r), k], k[(b), n, k]
    kernel @squares rows(i: c) cols(j: M) {
      %0 = load s[i, j] : f32
      %1 = load dy[(b), i + (r), j] : f32
      %2 = mul %0, %1 : f32
      %3 = sum_cols %2 : f32
      store row[(b), i + (r)] <- %3 : f32
      store t[i, j] <- %2 : f32
    }
    call @matmul_1 axes(m: c, n: 4, k: M) y[(b), m + (r), n] <- matmul t[m, k], k[(b), k, n]
    call @matmul_2 axes(m: M, n: 4, k: c) dk[(b), m, n] += matmul t[k, m], q[(b), k + (r), n]
  }
  return row=row, y=y, dk=dk
}"""


@pytest.fixture(scope="module")
def program():
    return CpuProgram(plan_buffers(parse_program(TEXT)))


def _inputs(batch, rows, columns):
    rng = np.random.default_rng(batch * rows + columns)
    shapes = {"q": (batch, rows, 4), "k": (batch, columns, 4), "dy": (batch, rows, columns)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _run(program, inputs, batch, rows, columns):
    outputs = {"row": (batch, rows), "y": (batch, rows, 4), "dk": (batch, columns, 4)}
    arrays = {name: np.full(shape, 7, np.float32) for name, shape in outputs.items()}  # all of it is written
    program.run({**inputs, **arrays}, program.bind({"B": batch, "N": rows, "M": columns}))
    return arrays


@pytest.mark.parametrize("batch", (0, 1, 3, 9))  # from 8 on, threads have blocks of their own
@pytest.mark.parametrize("rows", (0, 1, 15, 16, 17, 50))
@pytest.mark.parametrize("columns", (0, 1, 40))
def test_c_is_what_the_interpreter_says(program, batch, rows, columns):
    inputs = _inputs(batch, rows, columns)
    wanted = run_program(program.program, inputs, precision="f64")
    for name, got in _run(program, inputs, batch, rows, columns).items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-5, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("batch", (2, 9))
def test_the_bits_do_not_depend_on_the_threads(program, batch):
    inputs, before, bits = _inputs(batch, 70, 40), pool.num_threads(), set()
    try:
        for threads in (1, 2, 3, 5):
            pool.set_num_threads(threads)
            bits.add(b"".join(x.tobytes() for x in _run(program, inputs, batch, 70, 40).values()))
    finally:
        pool.set_num_threads(before)
    assert len(bits) == 1


def test_blocks_are_a_workspace_or_a_threads_own(program):
    """All threads at one block: it is in the workspace.  Else each thread keeps one.  No size grows with the rows."""
    block = 16 * 40 * 4
    for rows in (64, 6400):
        few, many = (program.bind({"B": batch, "N": rows, "M": 40}) for batch in (7, 8))
        assert block <= few.workspace < 3 * block
        assert many.workspace == 0 and many.local - few.local == few.workspace


def test_a_loop_without_sums_has_a_task_for_each_block():
    text = TEXT.replace("  output dk: f32[B,M,4]\n", "").replace(", dk=dk", "")
    text = "\n".join(line for line in text.splitlines() if "matmul_2" not in line)
    program = CpuProgram(plan_buffers(parse_program(text)))
    inputs = _inputs(2, 70, 40)
    arrays = {"row": np.full((2, 70), 7, np.float32), "y": np.full((2, 70, 4), 7, np.float32)}
    program.run({**inputs, **arrays}, program.bind({"B": 2, "N": 70, "M": 40}))  # 2 x 5 tasks
    wanted = run_program(program.program, inputs, precision="f64")
    for name, got in arrays.items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-5, atol=1e-4, err_msg=name)


def test_products_in_a_loop_are_looked_at_where_bounds_are(program):
    """A block that the verifier did not see: one row too far."""
    from gradc.errors import InternalError

    bad = parse_program(TEXT.replace("matmul q[(b), m + (r), k]", "matmul q[(b), m + (r+1), k]"))
    with knobs.BOUNDS.set(True):
        checked = CpuProgram(replace(bad, name="outside"))
        with pytest.raises(InternalError, match="touches element"):
            _run(checked, _inputs(1, 20, 5), 1, 20, 5)


def test_rows_of_a_product_that_lie_apart(program) -> None:
    """A block whose rows are longer than the product's: the rest is left."""
    text = TEXT.replace("block s: f32[c,M]", "block s: f32[c,M + 3]")
    padded = parse_program(text)
    verify_program(padded)
    inputs = _inputs(2, 19, 5)
    for name, value in run_program(parse_program(TEXT), inputs).items():
        assert np.array_equal(run_program(padded, inputs)[name], value), name
    inputs = _inputs(2, 19, 5)
    wanted = _run(program, inputs, 2, 19, 5)
    for name, got in _run(CpuProgram(plan_buffers(padded)), inputs, 2, 19, 5).items():
        assert np.array_equal(got, wanted[name]), name


DECODED = """program @decoded {
  input x: f32[R,K]
  input codes: i8[N,K]
  input dy: f32[R,N]
  output y: f32[R,N]
  output dx: f32[R,K]
  kernel @zeros rows(i: R) cols(j: K) {
    %0 = const {value=0.0} : f32
    store dx[i, j] <- %0 : f32
  }
  loop rows(r: N) by(48) count(c) {
    block w: f32[c,K]
    kernel @decode rows(i: c) cols(j: K) {
      %0 = load codes[i + (r), j] : i8
      %1 = cast %0 {dtype=f32} : f32
      store w[i, j] <- %1 : f32
    }
    call @matmul_0 axes(m: R, n: c, k: K) y[m, n + (r)] <- matmul x[m, k], w[n, k]
    call @matmul_1 axes(m: R, n: K, k: c) dx[m, n] += matmul dy[m, k + (r)], w[k, n]
  }
  return y=y, dx=dx
}"""


@pytest.mark.parametrize("target", ("numpy", "cpu", "cuda-sim"))
def test_a_block_is_some_columns_of_a_product(target):
    """Rows of the right operand, a block after another: products of whole numbers are exact."""
    executable = Executable(parse_program(DECODED), target)
    rng = np.random.default_rng(0)
    shapes = [(r, n, 9) for r in (0, 1, 2, 5, 17, 130) for n in (1, 47, 48, 130)] + [
        (3, 100, 0),
        (1, 60, 4100),
        (5, 60, 4100),
        (60, 1, 3),
    ]
    for rows, columns, inner in shapes if target != "cuda-sim" else shapes[::5]:
        x, codes, dy = (
            rng.integers(-4, 5, shape).astype(np.int8) for shape in ((rows, inner), (columns, inner), (rows, columns))
        )
        got = executable(x=x.astype(np.float32), codes=codes, dy=dy.astype(np.float32))
        x, codes, dy = (a.astype(np.int64) for a in (x, codes, dy))
        assert np.array_equal(got["y"], x @ codes.T), (rows, columns, inner)
        assert np.array_equal(got["dx"], dy @ codes), (rows, columns, inner)
