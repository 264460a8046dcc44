"""with_prologue: sums over features of a loop's rows become its first sweep."""

from __future__ import annotations

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import gradc
from gradc import ops
from gradc.compiler import run_passes
from gradc.interp import run_program
from gradc.ir.kernel import Kernel, Loop, Program
from gradc.ir.program_text import parse_program
from gradc.ir.verify import verify_program
from gradc.module.options import Options
from gradc.passes.column_blocking import tile_rows
from gradc.passes.column_blocking.prologue import with_prologue

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


def test_it_computes_the_same():
    before, after = _backward(False), _backward(True)
    rng = np.random.default_rng(0)
    types = {b.name: b.type for b in before.of_kind("input")}
    given = {n: rng.uniform(0.5, 2, t.concrete({})).astype(ARRAYS[t.dtype.name]) for n, t in types.items()}
    one, two = run_program(before, given), run_program(after, given)
    for name in one:
        wanted = one[name].astype(np.float64)
        assert np.abs(two[name].astype(np.float64) - wanted).max() <= 2.0**-7 * np.abs(wanted).max(), name


def _changed(text: str, old: str, new: str) -> Program:
    assert text.count(old) >= 1
    return parse_program(text.replace(old, new, 1))


def test_a_kernel_that_does_something_else_stays_one():
    """A maximum, a result of the program, a sum that the loop reads of other rows, one that a step between reads."""
    program = _backward(False)
    kernel, first, temp = _parts(program)
    text = str(program)
    maximum = _changed(text, "sum_cols", "max_cols")
    given = replace(program, buffers=tuple(replace(b, kind="output") if b.name == temp else b for b in program.buffers))
    other = _changed(text, f"load {temp}[(at0), (at1), i2 + (row)]", f"load {temp}[(at0), (at1), i2]")
    between = replace(program, steps=(kernel, program.loops[1], first))
    for changed, loop in ((maximum, maximum.loops[0]), (given, first), (other, other.loops[0]), (between, first)):
        assert with_prologue(changed, loop) == (changed, loop)
    made, loop = with_prologue(program, first)
    verify_program(made)
    assert len(loop.sweeps) == 2
