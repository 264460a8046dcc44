"""with_prologue: sums over features of a loop's rows become its first sweep."""

from __future__ import annotations

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import knobs, ops
from gradc.compiler import run_passes
from gradc.errors import InternalError
from gradc.interp import run_program
from gradc.ir.kernel import Kernel, Loop, Program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.module.options import Options
from gradc.passes.column_blocking import tile_rows
from gradc.passes.column_blocking.prologue import with_prologue
from gradc.runtime.cuda.programs import CudaProgram
from gradc.runtime.simulator.device import Simulator

WRT = ("q", "k", "v")
ARRAYS = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}


def _attention(q, k, v):
    return ops.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def _backward(with_it: bool, features: int = 64) -> Program:
    graph = gradc.trace(_attention, **{n: f"bf16[2,2,300,{features}]" for n in WRT})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tile_rows, "calls_seconds", lambda *_: float("inf"))
        if not with_it:
            patched.setattr(tile_rows, "with_prologue", lambda program, loop: (program, loop))
        return run_passes(graph, WRT, Options(arch="sm_90"), "cuda")[2]["backward"]


def _parts(program: Program) -> tuple[Kernel, Loop, str]:
    """The kernel that sums features, the loop that reads the sum first, and the temp it is in."""
    kernel = next(s for s in program.steps if isinstance(s, Kernel))
    return kernel, program.loops[0], kernel.writes[0]


@pytest.mark.parametrize("features", [64, 96])
def test_delta_is_the_first_sweep_of_the_loop_that_reads_it(features):
    before, after = _backward(False, features), _backward(True, features)
    temp = _parts(before)[2]
    assert [type(s) for s in before.steps] == [Kernel, Loop, Loop]
    assert [type(s) for s in after.steps] == [Loop, Loop]
    first, second = after.loops
    assert [s.cols[1] for s in first.sweeps] == [features, 300] and len(second.sweeps) == 1
    assert temp in first.writes and temp not in first.reads and temp in second.reads


def _given(program: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    types = {b.name: b.type for b in program.of_kind("input")}
    return {n: rng.uniform(0.5, 2, t.concrete({})).astype(ARRAYS[t.dtype.name]) for n, t in types.items()}


def test_it_computes_the_same():
    before, after = _backward(False), _backward(True)
    one, two = (run_program(program, _given(before), precision="f64") for program in (before, after))
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-12, atol=1e-12 * np.abs(one[name]).max())


def test_the_pass_is_validated_and_a_fault_is_found(monkeypatch):
    """With the first half of the features, the loop's sum is another."""
    graph = gradc.trace(_attention, **dict.fromkeys(WRT, "bf16[B,2,S,64]"))
    monkeypatch.setattr(tile_rows, "calls_seconds", lambda *_: float("inf"))

    def backward():
        with knobs.VALIDATE.set(True):
            return run_passes(graph, WRT, Options(arch="sm_90"), "cuda")[2]["backward"]

    assert [len(loop.sweeps) for loop in backward().loops] == [2, 1]

    def half(program, loop):
        program, made = with_prologue(program, loop)
        if made is loop:
            return program, loop
        first, *others = made.sweeps
        less = replace(made, sweeps=(replace(first, cols=(first.cols[0], 32)), *others))
        return replace(program, steps=tuple(less if step is made else step for step in program.steps)), less

    monkeypatch.setattr(tile_rows, "with_prologue", half)
    with pytest.raises(InternalError, match=r"^backward.tile_rows: .* no longer means the same"):
        backward()


@pytest.mark.parametrize("features", [64, 80])
def test_its_kernel_has_torchs_gradients_and_the_order_of_warps_changes_no_bit(features, monkeypatch):
    """Of parts of blocks, which a warp leaves out where all of its rows are masked, in cuda-sim that checks."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tile_rows, "calls_seconds", lambda *_: float("inf"))
    graph = gradc.trace(_attention, **dict.fromkeys(WRT, f"bf16[B,2,S,{features}]"))
    programs = run_passes(graph, WRT, Options(arch="sm_90"), "cuda")[2]
    assert [len(loop.sweeps) for loop in programs["backward"].loops] == [2, 1]
    dims, rng = {"B": 1, "S": 259}, np.random.default_rng(0)
    shape = (1, 2, 259, features)
    arrays = {n: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for n in (*WRT, "d.y")}
    for program in programs.values():
        seen = []
        for seed in (None, 1, 2):
            own = {b.name: arrays[b.name] for b in program.of_kind("input")}
            types = {b: program.buffer[b].type for _, b in program.outputs}
            own |= {b: np.empty(t.concrete(dims), t.dtype.np) for b, t in types.items()}
            made = CudaProgram(program, lambda text, *_, seed=seed: Simulator(text, check=True, seed=seed))
            made.run(own, made.bind(dims))
            seen.append({b: own[b].tobytes() for b in types})
        assert seen[0] == seen[1] == seen[2]
        arrays |= {name: own[b] for name, b in program.outputs}
    exact = {n: torch.tensor(arrays[n].astype(np.float64), requires_grad=True) for n in WRT}
    y = torch.nn.functional.scaled_dot_product_attention(*exact.values(), is_causal=True)
    y.backward(torch.tensor(arrays["d.y"].astype(np.float64)))
    for n in WRT:
        wanted = exact[n].grad.numpy()
        assert np.abs(arrays[f"d.{n}"].astype(np.float64) - wanted).max() <= 2.0**-7 * np.abs(wanted).max(), n


def _changed(text: str, old: str, new: str) -> Program:
    assert text.count(old) >= 1
    return parse_program(text.replace(old, new, 1))


def test_a_kernel_that_does_something_else_stays_one():
    """A maximum, a result of the program, a sum that the loop reads of other rows or as other bytes, one that a step
    between reads.
    """
    program = _backward(False)
    program = replace(program, buffers=tuple(replace(b, slot=-1) for b in program.buffers))
    kernel, first, temp = _parts(program)
    text = str(program)
    maximum = _changed(text, "sum_cols", "max_cols")
    result = replace(program.buffer[temp], kind="output")
    given = replace(program, buffers=tuple(result if b.name == temp else b for b in program.buffers))
    other = _changed(text, f"load {temp}[(at0), (at1), i2 + (row)]", f"load {temp}[(at0), (at1), i2]")
    between = replace(program, steps=(kernel, program.loops[1], first))
    alias = _changed(
        text, f"  temp {temp}: f32[2,2,300]", f"  temp {temp}: f32[2,2,300]\n  temp w: f32[2,2,300] of {temp}"
    )
    alias = _changed(str(alias), "load r.amax[(at0), (at1), i2 + (row)]", "load w[(at0), (at1), i2 + (row)]")
    cases = [(maximum, maximum.loops[0]), (given, first), (other, other.loops[0]), (alias, alias.loops[0])]
    for changed, _ in cases:
        verify_program(changed)
    for changed, loop in (*cases, (between, first)):
        assert with_prologue(changed, loop) == (changed, loop)
    made, loop = with_prologue(program, first)
    verify_program(made)
    assert len(loop.sweeps) == 2


@pytest.mark.parametrize(("features", "joins"), [("256", True), ("257", False), ("F", False)])
def test_sums_of_more_features_and_of_an_unknown_number_stay_kernels(features, joins, monkeypatch):
    def scaled(q, k, v, x):
        s = ops.mixed_matmul(q, k.T)
        scale = ops.sum(ops.cast(x, dtype="f32"), -1, keepdims=True)
        return ops.softmax_matmul(s * ops.broadcast_to(scale, s.shape), v)

    monkeypatch.setattr(tile_rows, "calls_seconds", lambda *_: float("inf"))
    types = {**dict.fromkeys(WRT, "bf16[B,2,S,64]"), "x": f"bf16[B,2,S,{features}]"}
    program = run_passes(gradc.trace(scaled, **types), (), Options(arch="sm_90"), "cuda")[2]["forward"]
    assert [type(s) for s in program.steps] == ([Loop] if joins else [Kernel, Loop])
