"""Sums over rows in loops of their own: gradients against torch's rules in NumPy, over sizes of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from column_blocking import CASES, Case, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from gradc import knobs, ops
from gradc.errors import InternalError
from gradc.interp import run_program
from gradc.ir.kernel import Call, Tile
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.passes.column_blocking import split_loops as module
from gradc.passes.column_blocking.carry_sums import carry_sums
from gradc.passes.column_blocking.split_loops import split_loops
from gradc.passes.manager import Pipeline

torch = pytest.importorskip("torch")

MLP = Case(lambda x, w1, w2: ops.tanh(x @ w1) @ w2, {"x": "f32[N,3]", "w1": "f32[3,M]", "w2": "f32[M,2]"}, None)
HEADS = ("q", "k", "v")
SPLIT = {
    **{name: (CASES[name], HEADS) for name in ("attention", "causal", "sliding window", "key lengths", "bias of keys")},
    "a learned bias": (CASES["bias of heads"], (*HEADS, "bias")),
    "linear cross entropy": (CASES["linear cross entropy"], ("x", "w")),
    "mlp": (MLP, ("x", "w1", "w2")),
}


def _alibi(q, k, v):
    s = q @ k.T
    row, column, head = (ops.cast(ops.iota(shape=s.shape, axis=axis), dtype="f32") for axis in (2, 3, 1))
    return ops.softmax(s + (column - row) * (head + 1.0) * 0.25, -1) @ v


def _dropped(q, k, v, key):
    return ops.dropout(ops.softmax(q @ k.T, -1), key, p=0.25, stream=0) @ v


def _grouped(q, k, v):
    return ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _smoothed(x, w, t):
    return ops.linear_cross_entropy(x, w, t, label_smoothing=0.1)


ATTENTION = {name: "f32[B,H,S,4]" for name in HEADS}
LIKE_BEFORE = {
    **{name: SPLIT[name] for name in ("key lengths", "a learned bias")},
    "alibi": (Case(_alibi, ATTENTION, None), HEADS),
    "dropout": (Case(_dropped, {**ATTENTION, "key": "i64[]"}, None), HEADS),
    "grouped queries": (Case(_grouped, {"q": "f32[B,4,S,4]", "k": "f32[B,2,S,4]", "v": "f32[B,2,S,4]"}, None), HEADS),
    "label smoothing": (Case(_smoothed, CASES["linear cross entropy"].types, None), ("x", "w")),
}
SIZES = st.fixed_dictionaries({d: st.integers(0, 6) for d in "STNVM"} | {d: st.integers(1, 2) for d in "BH"})


def _torch_function(name):
    heads = torch.nn.functional.scaled_dot_product_attention
    return {
        "attention": heads,
        "bias of keys": lambda q, k, v, bias: heads(q, k, v, attn_mask=bias),
        "causal": lambda q, k, v: heads(q, k, v, is_causal=True),
        "sliding window": lambda q, k, v: heads(q, k, v, attn_mask=_window(q.shape[2])),
        "key lengths": lambda q, k, v, lengths: heads(
            q, k, v, attn_mask=torch.arange(k.shape[2]) < lengths[:, None, None, None]
        ),
        "a learned bias": lambda q, k, v, bias: heads(q, k, v, attn_mask=bias),
        "linear cross entropy": lambda x, w, t: torch.nn.functional.cross_entropy(x @ w.T, t),
        "mlp": lambda x, w1, w2: torch.tanh(x @ w1) @ w2,
    }[name]


def _window(size):
    at = torch.arange(size)
    return (at <= at[:, None]) & (at > at[:, None] - 3)


def _both(case, wrt, rows, columns):
    """The programs of forward and backward after both passes."""
    programs = []
    for direction in ("forward", "backward"):
        program = split_loops(case.program(direction, wrt), rows=rows, columns=columns)
        verify_program(program)
        assert parse_program(str(program)) == program
        program = carry_sums(program, rows=rows, columns=columns)
        verify_program(program)
        assert parse_program(str(program)) == program
        assert not any(loop.reduces_rows for loop in program.loops), "blocks of rows add to one result"
        programs.append(program)
    return programs


def _gradients(programs, case, wrt, arrays, dims):
    forward, backward = programs
    values = run_program(forward, arrays, {d: dims[d] for d in forward.dims}, precision="f64")
    rng = np.random.default_rng(1)
    cotangent = rng.standard_normal(values["y"].shape).astype(np.float32)
    given = {**arrays, **values, "d.y": cotangent}
    inputs = {b.name: given[b.name] for b in backward.of_kind("input")}
    got = run_program(backward, inputs, {d: dims[d] for d in backward.dims}, precision="f64")
    return values["y"], cotangent, [got[f"d.{name}"] for name in wrt]


@pytest.mark.parametrize("name", SPLIT)
@settings(max_examples=6)
@given(dims=SIZES, rows=st.integers(1, 3), columns=st.integers(1, 3), seed=st.integers(0, 99))
def test_gradients_are_those_of_torch_in_f64(name, dims, rows, columns, seed):
    case, wrt = SPLIT[name]
    if "t" in case.types:
        dims = {**dims, "V": max(dims["V"], 1)}
    arrays = drawn(case, dims, seed, scale=1.0)
    if "bias" in arrays:  # torch has NaN for rows of -inf alone
        arrays["bias"] = np.where(np.isinf(arrays["bias"]), np.float32(-3), arrays["bias"])
    if "lengths" in arrays:
        arrays["lengths"] = np.maximum(arrays["lengths"], 1)
    if "t" in arrays and not (arrays["t"] != -100).any():
        return
    programs = _both(case, wrt, rows, columns)
    y, cotangent, got = _gradients(programs, case, wrt, arrays, dims)
    given = {
        k: torch.tensor(a, dtype=torch.float64 if a.dtype == np.float32 else None, requires_grad=k in wrt)
        for k, a in arrays.items()
    }
    wanted = _torch_function(name)(*given.values())
    np.testing.assert_allclose(y, wanted.detach().numpy(), rtol=1e-11, atol=1e-12)
    to = torch.tensor(cotangent, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, [given[n] for n in wrt], to, materialize_grads=True)  # 0 of no elements
    for each, want in zip(got, gradients, strict=True):
        np.testing.assert_allclose(each, want.numpy(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", LIKE_BEFORE)
def test_values_are_those_of_the_programs_before(name):
    """With rows that are masked whole, and what torch has no counterpart of."""
    case, wrt = LIKE_BEFORE[name]
    dims = {"B": 2, "H": 2, "S": 5, "N": 5, "V": 4}
    arrays = drawn(case, dims, 3, scale=1.0)
    before = [case.program(direction, wrt) for direction in ("forward", "backward")]
    y, _, wanted = _gradients(before, case, wrt, arrays, dims)
    for rows, columns in ((2, 3), (64, 64)):
        again, _, got = _gradients(_both(case, wrt, rows, columns), case, wrt, arrays, dims)
        np.testing.assert_allclose(again, y, rtol=1e-12, atol=1e-13)
        for each, want in zip(got, wanted, strict=True):
            np.testing.assert_allclose(each, want, rtol=1e-11, atol=1e-12)


def test_each_block_of_columns_owns_its_result():
    """No sum goes over blocks of rows, and no block of the second loop reads rows before its columns."""
    case, wrt = SPLIT["causal"]
    program = split_loops(case.program("backward", wrt), rows=32, columns=128, tile=Tile("mma", 8, 2))
    rows, columns = program.loops
    assert not any(isinstance(step, Call) and step.add for step in rows.items) and rows.cols
    (sweep,) = columns.sweeps
    assert str(sweep.since) == "col" and sweep.by == 32 and columns.by == 128 and columns.tile == Tile("mma", 8, 2)
    assert [c.combine for c in sweep.carries] == ["sum", "sum"] and {"d.v", "d.q"}.isdisjoint(sweep.steps[0].writes)
    # what a row's softmax needs of all columns is in memory between the loops: two sums of its gradient, and what is
    # computed of the forward's maximum and sum
    assert sorted(b.name for b in program.buffers if ".row" in b.name) == ["t7.row", "t7.row_2", "t7.row_3", "t7.row_4"]
    assert "d.q" in program.types and split_loops(program) == program


def test_loops_that_sum_nothing_over_rows_stay():
    program = CASES["causal"].program()
    assert split_loops(program) == program


def test_kernels_over_features_are_run_in_the_sweeps():
    """A factor of each row that multiplies the queries instead of the weights."""
    program = CASES["attention"].program("backward", HEADS)
    blocks = [b.name for b in program.loops[0].blocks if b.type.shape[1] == 4]
    assert len(blocks) == 2
    for made in (split_loops(program).loops[1], carry_sums(program).loops[0]):
        assert sum(b.type.shape[1] == 4 for sweep in made.sweeps for b in sweep.blocks) == 2


def test_what_only_sums_over_rows_becomes_one_loop():
    program = parse_program(
        """program @sums {
  input x: f32[N,3]
  input w: f32[3,M]
  output dw: f32[M,3]
  loop rows(r: N) by(4) count(c) {
    block s: f32[c,M]
    block e: f32[c,M]
    call @matmul axes(m: c, n: M, k: 3) s[m, n] <- matmul x[m + (r), k], w[k, n]
    kernel @squares rows(i: c) cols(j: M) {
      %0 = load s[i, j] : f32
      %1 = mul %0, %0 : f32
      store e[i, j] <- %1 : f32
    }
    call @sum axes(m: M, n: 3, k: c) dw[m, n] += matmul e[k, m], x[k + (r), n]
  }
  return dw=dw
}"""
    )
    verify_program(program)
    split = split_loops(program, rows=2, columns=3)
    verify_program(split)
    (loop,) = split.loops
    assert not loop.reduces_rows and str(loop.rows[1]) == "M" and len(loop.sweeps) == 1
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((5, 3)).astype(np.float32), "w": rng.standard_normal((3, 7)).astype(np.float32)}
    got = run_program(split, arrays, precision="longdouble")["dw"]
    x, w = (a.astype(np.longdouble) for a in arrays.values())
    np.testing.assert_allclose(got, ((x @ w) ** 2).T @ x, rtol=1e-13)


# -- GRADC_VALIDATE ----------------------------------------------------------------------------------------------------


def _validated(program, graph):
    pipeline = Pipeline()
    with knobs.VALIDATE.set(True):
        pipeline.keep("forward.schedule", graph, lambda: program)
        return pipeline.run(split_loops, program, of="forward", rows=3, columns=2)


def test_the_pass_is_validated_and_a_fault_is_found(monkeypatch):
    """Gradients that a forward computes ahead: of a loss."""
    case, wrt = SPLIT["linear cross entropy"]
    forward = case.forward_graph(wrt)
    program = case.program("forward", wrt)
    assert len(_validated(program, forward).loops) == 2 and split_loops.licence == "REAL"
    # rows before a block's columns are left out, as if the loop were causal
    monkeypatch.setattr(module._ColumnsLoop, "since", property(lambda self: module.symbol(self.cut.first)))
    with pytest.raises(InternalError, match=r"^forward.split_loops: .* no longer means the same"):
        _validated(program, forward)
